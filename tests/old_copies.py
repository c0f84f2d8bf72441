# SPDX-License-Identifier: Apache-2.0
"""Copies as versions before there were journals made them in object stores: with markers."""

from __future__ import annotations

from pathlib import Path

from deltackpt.format import names
from deltackpt.reading import inventory
from deltackpt.storage import digests
from deltackpt.storage.store import Spot, spot


def make(root: Path, at: Spot, *units: str) -> None:
    """Copies units of a directory: ``2`` or ``compacted/1/embeddings``."""
    for unit in units:
        base = unit.startswith(names.COMPACTED)
        found = inventory.every_digest(spot(root / unit), names.EMBEDDINGS_ITEM, base=base)
        for name in found:
            to = at / unit / name
            to.store.put(to.key, (root / unit / name).read_bytes())
        marker = at / names.copied_name(unit)
        marker.store.put(marker.key, digests.digests_bytes(digests.Digests.of(found)))
