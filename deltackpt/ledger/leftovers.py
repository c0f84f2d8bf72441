# SPDX-License-Identifier: Apache-2.0
"""Names in a directory: which are known, and which are of what was cut off."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from deltackpt.format import names

_LEFTOVER = re.compile(r"[0-9]+\.orbax-checkpoint-tmp.*")


def is_leftover(name: str) -> bool:
    """Whether it is the name of a save that was cut off, or is under way."""
    return _LEFTOVER.fullmatch(name) is not None


def is_known(name: str) -> bool:
    """Whether deltackpt, Orbax or mkfs makes such a name in a root."""
    return (
        name
        in (
            names.ROLLED_BACK,
            names.TRASH,
            names.COMPACTED,
            names.KEPT,
            "lost+found",
            names.STEP_METADATA,
        )
        or names.lease_epoch(name) is not None
        or names.step_number(name) is not None
        or is_leftover(name)
    )


def is_step_dir(path: Path, entries: Iterable[str]) -> bool:
    """Whether a directory, whose entries are given, is a step and no root of steps."""
    return names.STEP_DIGESTS in entries or any(
        (path / name / names.manifest_name(0)).exists() for name in entries if not is_known(name)
    )
