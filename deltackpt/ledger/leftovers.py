# SPDX-License-Identifier: Apache-2.0
"""Recognizes names in a checkpoint directory: known ones, and leftovers of interrupted saves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from deltackpt.format import names

_LEFTOVER = re.compile(r"[0-9]+\.orbax-checkpoint-tmp.*")


def is_leftover(name: str) -> bool:
    """Returns whether a name belongs to an interrupted or running save."""
    return _LEFTOVER.fullmatch(name) is not None


def is_known(name: str) -> bool:
    """Returns whether deltackpt, Orbax or mkfs creates such a name in a checkpoint directory."""
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
    """Returns whether a directory with the given entries is a step, not a checkpoint directory."""
    return names.STEP_DIGESTS in entries or any(
        (path / name / names.manifest_name(0)).exists() for name in entries if not is_known(name)
    )
