# SPDX-License-Identifier: Apache-2.0
"""Steps of others, and of ours under other names: what is wrong with them."""

from __future__ import annotations

from pathlib import Path

from deltackpt.errors import ForeignDirectory
from deltackpt.format import names
from deltackpt.storage.store import Spot, spot


def foreign(step_dir: Spot | Path, item: str) -> ForeignDirectory:
    """What is wrong with a step that has no item of ours by some name: what it holds instead."""
    step_dir = spot(step_dir)
    found: object = f"the folders {step_dir.folders()}"
    ours = _our_items(step_dir)
    if ours:
        found = f"deltackpt's under the name {' and '.join(map(repr, ours))}"
        action = (
            f"give the manager handlers={{{ours[0]!r}: Tables(...)}}, or what reads the steps item="
            f"{ours[0]!r} (--item {ours[0]})"
        )
    elif _is_of_orbax(step_dir):
        found = f"a step of stock Orbax with the items {step_dir.folders()}"
        action = (
            f"make it the first base of a directory of its own with 'deltackpt import "
            f"{step_dir.parent} NEW_DIRECTORY --tables PATTERN', and go on there"
        )
    else:
        action = (
            "check the directory and the item's name, or restore it with the library that wrote it"
        )
    return ForeignDirectory(
        f"{step_dir}: expected an item {item!r} written by deltackpt, found {found}; {action}"
    )


def is_checkpoint(step_dir: Spot | Path) -> bool:
    """Whether a directory is a step of ours, by whatever name of the item, or of stock Orbax."""
    step_dir = spot(step_dir)
    return bool(_our_items(step_dir)) or _is_of_orbax(step_dir)


def _our_items(step_dir: Spot) -> list[str]:
    found = step_dir.folders()
    return [name for name in found if (step_dir / name / names.manifest_name(0)).is_file()]


def _is_of_orbax(step_dir: Spot) -> bool:
    places = (step_dir, *(step_dir / name for name in step_dir.folders()))
    return any((at / names.PYTREE_METADATA).is_file() for at in places)
