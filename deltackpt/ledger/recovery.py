# SPDX-License-Identifier: Apache-2.0
"""Finds the steps that a damaged file affects, and the WAL records that replay onto a step.

If a file of a save is damaged, the steps that need it are skipped unread. An error may also come
from the network, from permissions, or from another save's record, so the named file counts as
damaged only if it differs from the records of its own save.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from deltackpt import events
from deltackpt.errors import (
    Damaged,
    DamagedWal,
    DeltackptError,
    RestoreError,
    StepGone,
    StepNotFound,
)
from deltackpt.format import naming
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.entries import COMMIT, prefix_step
from deltackpt.ledger.steps import Steps
from deltackpt.reading import inventory
from deltackpt.reading.shard_arrays import is_of_dense_segment
from deltackpt.reading.wal_index import (
    Loss,
    RecoveryPoint,
    ReplayPlan,
    WalIndex,
    WalReader,
    coverings,
    newest_plan,
)
from deltackpt.storage import digests
from deltackpt.storage.store import StorePath


class DamagedSave(NamedTuple):
    """A save, or its compacted base, with a damaged file."""

    step: int
    compacted: bool
    #: Whether every chain with the save reads the file: a later save may replace a dense leaf.
    every_child: bool


def find_damaged_save(error: BaseException, root: StorePath, item: str) -> DamagedSave | None:
    """Returns the save that a read error names if its file, which is read, is damaged."""
    if not isinstance(error, Damaged) or isinstance(error, DamagedWal):
        return None
    # The name of a layer file is followed by that of a chunk, that of a chunk's file by a block.
    name, _, within = error.object_name.partition(": ")
    path = name.partition(", ")[0].split("/")
    if path[-1] == COMMIT and (step := prefix_step("/".join(path[-3:-1]))) is not None:
        path = [str(step), COMMIT]  # A bucket stores it there.
    inside = {item, naming.DENSE_ITEM, naming.STEP_DIGESTS, COMMIT}
    found_at = [
        at
        for at in range(1, len(path))
        if path[at] in inside and naming.step_number(path[at - 1]) is not None
    ]
    if not found_at:
        return None
    at = found_at[-1]
    compacted = path[at] == item and path[max(0, at - 2)] == naming.COMPACTED
    shown = f"{naming.COMPACTED}/{path[at - 1]}" if compacted else path[at - 1]
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
    of_dense = (
        path[at] in (naming.DENSE_ITEM, naming.STEP_DIGESTS) or naming.DENSE_ITEM in below[:1]
    )
    of_dense = of_dense or is_of_dense_segment(f"{'/'.join(below)}: {within}")
    return DamagedSave(int(path[at - 1]), compacted, not of_dense)


def locate(root: Steps, requested: int | RecoveryPoint) -> tuple[int, ReplayPlan | None]:
    """Finds a committed step, or the step and WAL records for a recovery point; StepNotFound."""
    if isinstance(requested, int) and root.at(requested).dir_identity() is not None:
        return requested, None
    index, steps = WalReader(root.wal_location).read(), root.restorable()
    plan = plan_to(index, steps, requested)
    if plan is not None:
        return plan.step.step, plan
    index.require_topics()
    _, unreached = coverings(index, steps)
    points = [point for point in index.points() if point not in unreached]
    number = requested if isinstance(requested, int) else requested.step
    raise StepNotFound(
        f"{root}: expected step {number} or a full recovery point of that number, found neither; "
        f"{nearest(number, steps, points)}; see steps and recovery_points()"
    )


def plan_to(
    index: WalIndex,
    steps: Mapping[int, SaveId],
    requested: int | RecoveryPoint,
    damaged: Collection[int] = (),
) -> ReplayPlan | None:
    """Returns how to replay to a recovery point or training step; None if no step leads there.

    The replay does not start at ``damaged`` steps.
    """
    at = requested.step if isinstance(requested, RecoveryPoint) else requested
    if not any(point.full and requested in (point, point.step) for point in index.points()):
        return None
    intact = {step: save_id for step, save_id in steps.items() if step not in damaged}
    return newest_plan(index, intact, at=at)


def plan_above_older(
    root: Steps, plan: ReplayPlan, damaged: Collection[int], error: RestoreError
) -> ReplayPlan:
    """Returns another plan to a recovery point, which starts at none of the ``damaged`` steps.

    Raises the error if it does not show damage of the plan's step, or no other plan exists.
    """
    is_other = isinstance(error, (DamagedWal, StepGone, StepNotFound))
    if is_other or not error.another_step_may_do:
        raise error
    index = WalReader(root.wal_location).read()
    again = plan_to(index, root.restorable(), plan.point, damaged)
    if again is None or again.point != plan.point:
        raise error
    events.warn(f"step {plan.step.step} is skipped, it is not intact: {error}")
    return again


def nearest(number: int, steps: Iterable[int], points: Iterable[RecoveryPoint]) -> str:
    """Describes the restorable steps or recovery points nearest to a training step."""
    found = [(step, f"step {step}") for step in steps]
    found += [(point.step, str(point)) for point in points if point.full]
    below = max((one for one in found if one[0] <= number), default=None)
    above = min((one for one in found if one[0] > number), default=None)
    reported = " and ".join(one[1] for one in (below, above) if one is not None)
    return f"the nearest that can be restored: {reported}" if reported else "none can be restored"


def losses_of(root: Steps, index: WalIndex, newest: int, *, above: int = -1) -> list[Loss]:
    """Lists the lost WAL records above a step.

    The trainer may change the log while it is read, so a loss counts only if a second read of the
    log and the steps finds it again. ``index`` was read before the steps were listed. Records up to
    ``newest``, the newest restorable step on the current branch, may have been trimmed.
    """
    return [
        one
        for one in index.losses(above)
        if not one.may_be_trimmed
        or (one.step > newest and not _is_rolled_back(root, index, one.step))
    ]


def in_both(found: Sequence[Loss], again: Sequence[Loss]) -> list[Loss]:
    """Returns the losses that a second read confirms."""
    names = {one.error.object_name for one in found}
    return [one for one in again if one.error.object_name in names]


def _is_rolled_back(root: Steps, index: WalIndex, step: int) -> bool:
    """Returns whether a rollback set aside a step up to which the log was trimmed."""
    # The rollback's run has not begun a WAL epoch yet: the log still counts as if the step existed.
    return any(one.step >= step and index.has_step(one) for one in root.rolled_back())
