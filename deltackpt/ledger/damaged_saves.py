# SPDX-License-Identifier: Apache-2.0
"""Finds the save that an error of a restore blames, and proves its damage.

An error may also come from the network, from permissions, or from another save's record. Steps are
given up unread only if the named file differs from the records of its own save.
"""

from __future__ import annotations

from typing import NamedTuple

from deltackpt.errors import Damaged, DamagedWal, DeltackptError
from deltackpt.format import names
from deltackpt.ledger.entries import COMMIT, prefix_step
from deltackpt.reading import inventory
from deltackpt.reading.part_arrays import is_of_dense_segment
from deltackpt.storage import digests
from deltackpt.storage.store import StorePath


class DamagedSave(NamedTuple):
    """A save with a damaged file.

    Attributes:
      step: its step.
      compacted: whether it is the compacted base of the step.
      every_child: whether every chain with the save reads the file. Chains read files of dense
        leaves only if no later save replaces the leaves.
    """

    step: int
    compacted: bool
    every_child: bool


def blamed(error: BaseException, root: StorePath, item: str) -> DamagedSave | None:
    """Returns the save that an error names, if its file is missing or altered; reads that file.

    Args:
      error: the error of a read.
      root: the folder of the steps.
      item: name of deltackpt's item.
    """
    if not isinstance(error, Damaged) or isinstance(error, DamagedWal):
        return None
    # The name of a layer file is followed by that of a chunk, that of a chunk's file by a block.
    name, _, within = error.object_name.partition(": ")
    path = name.partition(", ")[0].split("/")
    if path[-1] == COMMIT and (step := prefix_step("/".join(path[-3:-1]))) is not None:
        path = [str(step), COMMIT]  # Where a bucket stores it.
    inside = {item, names.DENSE_ITEM, names.STEP_DIGESTS, COMMIT}
    found_at = [
        at
        for at in range(1, len(path))
        if path[at] in inside and names.step_number(path[at - 1]) is not None
    ]
    if not found_at:
        return None
    at = found_at[-1]
    compacted = path[at] == item and path[max(0, at - 2)] == names.COMPACTED
    shown = f"{names.COMPACTED}/{path[at - 1]}" if compacted else path[at - 1]
    folder, file = root / shown, "/".join(path[at:])
    try:
        if not folder.is_dir():
            return None
        found = inventory.read_inventory(folder, item, shown=shown)
        records = {one.object_name for one in found.damage}
        known = {file: found.files[file]} if file in found.files else {}
        is_record = not records.isdisjoint((error.object_name, f"{shown}/{file}"))
        if not is_record and not digests.check_files(folder, known):
            return None
    except (DeltackptError, OSError):
        return None
    below = path[at + 1 :]
    of_dense = path[at] in (names.DENSE_ITEM, names.STEP_DIGESTS) or names.DENSE_ITEM in below[:1]
    of_dense = of_dense or is_of_dense_segment(f"{'/'.join(below)}: {within}")
    return DamagedSave(int(path[at - 1]), compacted, not of_dense)
