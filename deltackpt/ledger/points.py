# SPDX-License-Identifier: Apache-2.0
"""Finds recovery points by number, and suggests the nearest if there is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deltackpt.errors import StepNotFound
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.steps import Steps
from deltackpt.reading.wal_index import (
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
