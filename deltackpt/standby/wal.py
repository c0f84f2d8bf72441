# SPDX-License-Identifier: Apache-2.0
"""Chooses the WAL records that a follower applies above a step.

The choice is the same as in a restore from storage: the newest recovery point above all steps,
replayed onto the newest step below it in its lineage. Superseded records are not chosen: a restart
resumed from an earlier point, or they are void because writing them failed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from deltackpt.errors import DamagedWal, DeltackptError, RestoreError, StorageError, without_frames
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.steps import Steps, in_both, losses_of
from deltackpt.reading import stored_saves
from deltackpt.reading.wal_index import (
    Loss,
    RecoveryPoint,
    ReplayPlan,
    WalIndex,
    WalReader,
    newest_plan,
)
from deltackpt.storage.store import Stamp

#: A damaged record is not read again for this long.
_REFUSED_SECS = 30.0


class FollowedWal:
    """The WAL of a directory, as far as it was read; used by one thread."""

    def __init__(self, root: Steps, item: str, *, soft: bool):
        self._reader = WalReader(root.wal_location)
        self._ids = _SaveIds(root, item)
        self._root = root
        self._soft = soft
        #: Parts of the WAL that two reads found missing.
        self._lost: Sequence[Loss] = ()
        self._index = WalIndex(())
        self._unreadable: DeltackptError | None = None
        #: Errors of records, and when to read them again, on the monotonic clock.
        self._refused: dict[SaveId, tuple[float, RestoreError]] = {}

    def poll(self) -> None:
        """Reads the newly written records; if that fails, all records are ignored."""
        now = time.monotonic()
        self._refused = {
            record: refusal for record, refusal in self._refused.items() if now < refusal[0]
        }
        try:
            self._index, self._unreadable = self._reader.read(), None
        except (RestoreError, StorageError) as error:
            self._index, self._unreadable = WalIndex(()), without_frames(error)

    @property
    def newest_step(self) -> int | None:
        """Returns the training step of the newest full recovery point, or None."""
        return next((one.step for one in self._index.points() if one.full), None)

    def plan(self, steps: Collection[int]) -> ReplayPlan | None:
        """Returns the plan to the recovery point to hold; None to hold the newest intact step."""
        if not self._index.views:
            return None
        return newest_plan(self._index, self._ids.of(steps), self._refused.keys(), soft=self._soft)

    def full(self, plan: ReplayPlan) -> ReplayPlan | None:
        """Returns the replay plan from the same step to the newest point with dense leaves."""
        if plan.point.full:
            return plan
        for point in self._index.points():
            if point.full and plan.after(point) is not None:
                return self._index.plan(point, plan.step)
        return None

    def plan_to(self, point: RecoveryPoint, step: SaveId) -> ReplayPlan | None:
        """Returns the replay plan from a step to a recovery point; None if it is not known."""
        return self._index.plan(point, step) if self._index.views else None

    def leads_to(self, step: SaveId, point: RecoveryPoint) -> bool:
        """Returns whether a step descends from a recovery point.

        Every row of the records up to the point is then in the deltas up to the step.
        """
        index = self._index
        return point.step <= step.step and index.counts(point) and index.has_step(step)

    def refuse(self, plan: ReplayPlan, error: DamagedWal) -> None:
        """Excludes plans with a damaged record for a while."""
        refusal = time.monotonic() + _REFUSED_SECS, without_frames(error)
        self._refused[plan.point.save_id] = refusal
        if isinstance(error.record, SaveId):
            self._refused[error.record] = refusal

    def problem(self, step: int) -> DeltackptError | None:
        """Returns what is wrong with the WAL above a training step."""
        found = [error for record, (_, error) in self._refused.items() if record.step > step]
        lost = losses_of(self._root, self._index, step, above=step)
        if lost != in_both(self._lost, lost):
            with contextlib.suppress(RestoreError, StorageError):
                again = WalReader(self._root.wal_location).read()
                lost = in_both(losses_of(self._root, again, step, above=step), lost)
        self._lost = lost
        found += [loss.error for loss in lost]
        return found[0] if found else self._unreadable or self._index.in_topic


class _SaveIds(Mapping[int, SaveId | None]):
    """The save of a step, queried only when the WAL needs it; None if unknown."""

    def __init__(self, root: Steps, item: str):
        self._root, self._item = root, item
        self._steps: Collection[int] = ()
        self._known: dict[int, tuple[Stamp, SaveId]] = {}

    def of(self, steps: Collection[int]) -> _SaveIds:
        self._steps = steps
        self._known = {step: known for step, known in self._known.items() if step in steps}
        return self

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, step: int) -> SaveId | None:
        at = self._root.at(step)
        stamp = at.stamp()
        known = self._known.get(step)
        if stamp is not None and (known is None or known[0] != stamp):
            known = None
            with contextlib.suppress(RestoreError, StorageError):
                known = stamp, stored_saves.read_info(at, self._item).save_id
            if known is not None:
                self._known[step] = known
        return None if stamp is None or known is None else known[1]
