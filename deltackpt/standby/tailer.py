# SPDX-License-Identifier: Apache-2.0
"""Chooses the next state of a follower: the newest intact step, and the WAL records above it.

A damaged step is skipped for a while, and the previous one is followed instead. The choice of
records is the same as in a restore from storage: the newest recovery point above all steps,
replayed onto the newest step below it in its lineage. Superseded records are not chosen: a restart
resumed from an earlier point, or they are void because writing them failed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from deltackpt.errors import (
    DamagedWal,
    DeltackptError,
    RestoreError,
    StepGone,
    StorageError,
    without_frames,
)
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.recovery import in_both, losses_of
from deltackpt.ledger.steps import Steps
from deltackpt.reading import stored_saves
from deltackpt.reading.wal_index import (
    Loss,
    RecoveryPoint,
    ReplayPlan,
    WalIndex,
    WalReader,
    newest_plan,
)
from deltackpt.reading.wal_records import WalRecord
from deltackpt.storage.store import DirIdentity, StorePath

#: A damaged step or record is not read again for this long: it may still be being copied.
_REFUSED_SECS = 30.0


#: Distinguishes a step's directory from a later one with the same name.
_StepIdentity = tuple[int, DirIdentity]


class StateReplica(Protocol):
    """Holds one step or recovery point at a time."""

    def is_at(self, plan: ReplayPlan | None) -> bool:
        """Returns whether a plan's recovery point is held; without a plan, whether the step is."""
        ...

    def load_state(self, step_dir: StorePath, plan: ReplayPlan | None) -> bool:
        """Loads a step, or a recovery point above it; returns whether the held state has changed.

        If the step must be loaded first, the call may load only the step; then call it again.
        """
        ...


class Tailer:
    """Chooses which state of a directory a replica holds, and loads it; used by one thread."""

    def __init__(self, root: Steps, item: str, *, soft: bool, wal: bool = True):
        self._root, self._soft = root, soft
        self._reader = WalReader(root.wal_location) if wal else None
        self._ids = _SaveIds(root, item)
        self._index = WalIndex(())
        self._unreadable: DeltackptError | None = None
        #: Parts of the WAL that two reads found missing.
        self._lost: Sequence[Loss] = ()
        self._seen: _StepIdentity | None = None
        self._newest: int | None = None
        #: Errors of steps and records, and when to read them again, on the monotonic clock.
        self._refused: dict[_StepIdentity | SaveId, tuple[float, RestoreError]] = {}
        #: The error of a newer state than the held one, or None.
        self.problem: DeltackptError | None = None

    def load_newest(self, replica: StateReplica) -> bool | None:
        """Loads the newest intact state; returns whether it changed, or None without a step."""
        self._poll()
        failure: RestoreError | None = None
        steps = {*self._root.steps()}
        self._newest = max(steps, default=None)
        is_changed = False
        while steps:
            plan = self._plan(steps)
            step = max(steps) if plan is None else plan.step.step
            step_dir = self._root.at(step)
            found = step_dir.dir_identity()
            if found is None:
                steps.remove(step)
                continue
            identity = step, found
            if identity in self._refused:
                failure = failure or self._refused[identity][1]
                steps.remove(step)
                continue
            try:
                if identity != self._seen or not replica.is_at(plan):
                    with stored_saves.detect_removal(step_dir):
                        is_changed = replica.load_state(step_dir, plan) or is_changed
            except StepGone as error:
                failure = failure or without_frames(error)
                steps.remove(step)
                continue
            except DamagedWal as error:
                assert plan is not None
                self._refuse(plan.point.save_id, error)
                if isinstance(error.record, SaveId):
                    self._refuse(error.record, error)
                continue
            except RestoreError as error:
                self._refuse(identity, error)
                failure = failure or error
                steps.remove(step)
                continue
            self._seen = identity
            if replica.is_at(plan):  # Otherwise the step had to be loaded first.
                above = step if plan is None else plan.point.step
                self.problem = failure or self._wal_problem(above)
                return is_changed
        if failure is not None:
            raise failure
        self.problem = None
        return None

    def newest_step(self) -> int | None:
        """Returns the training step of the newest listed step or full recovery point, or None."""
        newest_point = (one.step for one in self._index.points() if one.full)
        found = [self._newest, next(newest_point, None)]
        return max((step for step in found if step is not None), default=None)

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

    def records(self, epoch: int) -> list[WalRecord]:
        """Returns the valid records of an epoch that were not trimmed, of all processes."""
        views = (view for view in self._index.views if view.head.epoch == epoch)
        logs = (log for view in views for log in view.processes.values())
        return [record for log in logs for record in log.by_id.values()]

    def leads_to(self, step: SaveId, point: RecoveryPoint) -> bool:
        """Returns whether a step descends from a recovery point.

        Every row of the records up to the point is then in the deltas up to the step.
        """
        index = self._index
        return point.step <= step.step and index.counts(point) and index.has_step(step)

    def _poll(self) -> None:
        """Reads the newly written records; if they are damaged, all records are ignored."""
        now = time.monotonic()
        self._refused = {one: error for one, error in self._refused.items() if now < error[0]}
        if self._reader is None:
            return
        try:
            # A bucket's names the epochs that its journal had.
            self._reader.places = self._root.wal_location
            self._index, self._unreadable = self._reader.read(), None
        except RestoreError as error:
            self._index, self._unreadable = WalIndex(()), without_frames(error)
        except StorageError as error:
            self._unreadable = without_frames(error)
            # For example, a Kafka outage: unless there is a newer epoch, the index stays valid.
            with contextlib.suppress(StorageError):
                if self._reader.numbers()[:1] != [one.head.epoch for one in self._index.views[:1]]:
                    self._index = WalIndex(())

    def _plan(self, steps: Collection[int]) -> ReplayPlan | None:
        """Returns the plan to the recovery point to hold; None to hold the newest intact step."""
        if not self._index.views:
            return None
        refused = {one for one in self._refused if isinstance(one, SaveId)}
        return newest_plan(self._index, self._ids.of(steps), refused, soft=self._soft)

    def _refuse(self, one: _StepIdentity | SaveId, error: RestoreError) -> None:
        """Excludes a step or record for a while."""
        self._refused[one] = time.monotonic() + _REFUSED_SECS, without_frames(error)

    def _wal_problem(self, step: int) -> DeltackptError | None:
        """Returns what is wrong with the WAL above a training step."""
        if self._reader is None:
            return None
        found: list[DeltackptError] = [
            error
            for one, (_, error) in self._refused.items()
            if isinstance(one, SaveId) and one.step > step
        ]
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
        self._known: dict[int, tuple[DirIdentity, SaveId]] = {}

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
        identity = at.dir_identity()
        known = self._known.get(step)
        if identity is not None and (known is None or known[0] != identity):
            known = None
            with contextlib.suppress(RestoreError, StorageError):
                known = identity, stored_saves.read_info(at, self._item).save_id
            if known is not None:
                self._known[step] = known
        return None if identity is None or known is None else known[1]
