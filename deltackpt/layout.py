# SPDX-License-Identifier: Apache-2.0
"""Every object name, built and parsed here only.

Inside an Orbax step directory::

    <step>/
      embeddings/                      the item of DeltaHandler (its name is the user's)
        manifest.<process>.msgpack     written last of its part
        digests.<process>.msgpack      length and CRC32C of every file of the part
        part.<process>/<segment>/<array>/zarr.json, c/...
      dense/                           Orbax's own PyTree item
      digests.step.msgpack             everything else in the step, written just before the commit
"""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path

EMBEDDINGS_ITEM = "embeddings"
DENSE_ITEM = "dense"
STEP_DIGESTS = "digests.step.msgpack"
#: Moved-aside steps of a rolled-back run, beside the steps.
ROLLED_BACK = "rolled-back"
#: Steps that are being deleted: renamed here first, then emptied.
TRASH = "deleted"
GAPS = "rows.gaps"

_MANIFEST = re.compile(r"manifest\.(\d+)\.msgpack")
_LEASE = re.compile(r"lease\.(\d+)\.msgpack")


def manifest_name(process: int) -> str:
    """Name of a process's manifest in the item's directory."""
    return f"manifest.{process}.msgpack"


def manifest_process(name: str) -> int | None:
    """Process of a manifest's name, None where the name is another object's."""
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def digests_name(process: int) -> str:
    """Name of a process's digests in the item's directory."""
    return f"digests.{process}.msgpack"


def array_dir(item_dir: Path, process: int, segment: str, array: str) -> Path:
    """Directory of one Zarr array of a part; the name is percent-encoded, it may hold slashes."""
    return item_dir / f"part.{process}" / segment / urllib.parse.quote(array, safe="")


def lease_name(epoch: int) -> str:
    """Name of an epoch's lease in the root."""
    return f"lease.{epoch}.msgpack"


def lease_epoch(name: str) -> int | None:
    """Epoch of a lease's name, None where the name is another object's."""
    match = _LEASE.fullmatch(name)
    return int(match[1]) if match else None
