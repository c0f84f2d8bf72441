# SPDX-License-Identifier: Apache-2.0
"""Describes why a step of another program, or a renamed step of ours, cannot be read."""

from __future__ import annotations

from pathlib import Path

from deltackpt.errors import ForeignDirectory
from deltackpt.format import names
from deltackpt.storage.store import StorePath, store_path


def foreign(step_dir: StorePath | Path, item: str) -> ForeignDirectory:
    """Returns the error for a step without a deltackpt item of a given name."""
    step_dir = store_path(step_dir)
    found: object = f"the directories {step_dir.folders()}"
    ours = _our_items(step_dir)
    if ours:
        found = f"deltackpt's under the name {' and '.join(map(repr, ours))}"
        action = (
            f"pass the manager handlers={{{ours[0]!r}: Tables(...)}}, or readers item={ours[0]!r} "
            f"(--item {ours[0]})"
        )
    elif _is_of_orbax(step_dir):
        found = f"a step of stock Orbax with the items {step_dir.folders()}"
        action = (
            f"make it the first base of a new directory with 'deltackpt import "
            f"{step_dir.parent} NEW_DIRECTORY --tables PATTERN', and continue there"
        )
    else:
        action = (
            "check the directory and the item's name, or restore it with the library that wrote it"
        )
    return ForeignDirectory(
        f"{step_dir}: expected an item {item!r} written by deltackpt, found {found}; {action}"
    )


def is_checkpoint(step_dir: StorePath | Path) -> bool:
    """Returns whether a directory is a step of deltackpt (with any item name) or of Orbax."""
    step_dir = store_path(step_dir)
    return bool(_our_items(step_dir)) or _is_of_orbax(step_dir)


def lacks_our_item(step_dir: StorePath) -> bool:
    """Returns whether deltackpt's manager committed a step whose deltackpt item is missing."""
    return (step_dir / names.STEP_DIGESTS).is_file() and not _our_items(step_dir)


def _our_items(step_dir: StorePath) -> list[str]:
    found = step_dir.folders()
    return [name for name in found if (step_dir / name / names.manifest_name(0)).is_file()]


def _is_of_orbax(step_dir: StorePath) -> bool:
    places = (step_dir, *(step_dir / name for name in step_dir.folders()))
    return not lacks_our_item(step_dir) and any(
        (at / names.PYTREE_METADATA).is_file() for at in places
    )
