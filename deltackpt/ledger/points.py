# SPDX-License-Identifier: Apache-2.0
"""Recovery points: finds them by number, and detects WAL data that is missing or altered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deltackpt.errors import StepNotFound
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.steps import Steps
from deltackpt.reading.wal_index import (
    Loss,
    RecoveryPoint,
    ReplayPlan,
    WalIndex,
    WalReader,
    coverings,
    newest_plan,
)


def find(root: Steps, asked: int | RecoveryPoint) -> tuple[int, ReplayPlan | None]:
    """Finds a committed step, or the step and WAL records for a full recovery point.

    Args:
      root: the checkpoint directory.
      asked: a step, a recovery point, or the training step of a recovery point.

    Raises:
      StepNotFound: there is neither.
      Damaged: there is no such step, and the log is not readable.
    """
    if isinstance(asked, int) and root.at(asked).stamp() is not None:
        return asked, None
    index, steps = WalReader(root.log_at).read(), root.restorable()
    plan = plan_to(index, steps, asked)
    if plan is not None:
        return plan.step.step, plan
    _, unreached = coverings(index, steps)
    points = [point for point in index.points() if point not in unreached]
    number = asked if isinstance(asked, int) else asked.step
    raise StepNotFound(
        f"{root}: expected step {number} or a full recovery point of that number, found neither; "
        f"{nearest(number, steps, points)}; see steps() and recovery_points()"
    )


def plan_to(
    index: WalIndex, steps: Mapping[int, SaveId], asked: int | RecoveryPoint
) -> ReplayPlan | None:
    """Returns how to replay to a full recovery point; None if no step leads to it.

    Args:
      index: the WAL index.
      steps: the restorable steps, by number.
      asked: a recovery point, or its training step.
    """
    at = asked.step if isinstance(asked, RecoveryPoint) else asked
    if not any(point.full and asked in (point, point.step) for point in index.points()):
        return None
    return newest_plan(index, steps, at=at)


def nearest(number: int, steps: Iterable[int], points: Iterable[RecoveryPoint]) -> str:
    """Describes the restorable steps or recovery points nearest to a training step."""
    found = [(step, f"step {step}") for step in steps]
    found += [(point.step, str(point)) for point in points if point.full]
    below = max((one for one in found if one[0] <= number), default=None)
    above = min((one for one in found if one[0] > number), default=None)
    told = " and ".join(one[1] for one in (below, above) if one is not None)
    return f"the nearest that can be restored: {told}" if told else "none can be restored"


def losses_of(root: Steps, index: WalIndex, newest: int, *, above: int = -1) -> list[Loss]:
    """Lists the lost WAL records above a step.

    A trainer may change the log while it is read, so a loss counts only if a second read of the log
    and the steps finds it again.

    Args:
      root: the checkpoint directory.
      index: the WAL index, read before the steps were listed.
      newest: the newest restorable step on the current branch; records up to it may have been
        trimmed. Less than all steps if there is none.
      above: the step.
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
    """Whether a rollback set aside a step up to which the log was trimmed.

    The rollback's run has not begun a WAL epoch yet: the log still counts as if the step existed.
    """
    return any(one.step >= step and index.has_step(one) for one in root.rolled_back())
