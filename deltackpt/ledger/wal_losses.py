# SPDX-License-Identifier: Apache-2.0
"""Detects missing or altered WAL data, except what was trimmed or rolled back."""

from __future__ import annotations

from collections.abc import Sequence

from deltackpt.ledger.steps import Steps
from deltackpt.reading.wal_index import Loss, WalIndex


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
