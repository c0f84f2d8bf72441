# SPDX-License-Identifier: Apache-2.0
"""Chooses the step or recovery point to restore: the newest or the requested one.

While a trainer runs, retention removes steps and trimming removes WAL records. The choice is
therefore repeated if the chosen state could not be read, and only process 0 makes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from typing import NamedTuple

from deltackpt.errors import (
    BrokenChain,
    Damaged,
    DamagedWal,
    RestoreError,
    StepGone,
    StepNotFound,
    StorageError,
)
from deltackpt.format.manifest import SaveId
from deltackpt.ledger import recovery
from deltackpt.ledger.recovery import DamagedSave, losses_of
from deltackpt.reading.wal_index import (
    RecoveryPoint,
    ReplayPlan,
    WalIndex,
    WalReader,
    coverings,
    newest_plan,
)
from deltackpt.session.run import Run

#: How often a log is read again at most while each look finds other damage.
_MOST_READS = 4
#: JSON values of a recovery point, of a choice, and of a lost WAL with its step.
_PlainPoint = tuple[int, tuple[str, int, int], bool, float]
_PlainChoice = tuple[int, _PlainPoint | None]
_PlainLoss = tuple[int | None, str, str, str, str]


class RestoreChoice(NamedTuple):
    """The target of a restore: a step, or a recovery point that replays onto a step."""

    step: int
    point: RecoveryPoint | None

    @property
    def number(self) -> int:
        """Returns the training step to restore."""
        return self.step if self.point is None else self.point.step

    @classmethod
    def from_plain(cls, plain: _PlainChoice | None) -> RestoreChoice | None:
        """Returns a choice from its JSON value."""
        if plain is None:
            return None
        step, point = plain
        if point is None:
            return cls(step, None)
        epoch, save_id, full, unix_secs = point
        return cls(step, RecoveryPoint(epoch, SaveId(*save_id), full, unix_secs))


def _fields_of(error: Damaged) -> tuple[str, str, str, str]:
    return error.object_name, error.expected, error.found, error.action


def _plain(plan: ReplayPlan) -> _PlainChoice:
    epoch, save_id, full, unix_secs = plan.point
    return plan.step.step, (epoch, dataclasses.astuple(save_id), full, unix_secs)


class FailedChoices:
    """Steps and recovery points that were damaged, or removed while they were read.

    ``lost`` has what is missing or altered in the WAL: records above the last choice, by their
    newest step; epoch headers that were read from a copy instead, by None.
    """

    def __init__(self) -> None:
        self.lost: list[tuple[int | None, RestoreError]] = []
        self.steps: set[int] = set()
        self.points: set[SaveId] = set()
        self.skipped: list[tuple[int, RestoreError]] = []
        self.gone: list[tuple[int, RestoreError]] = []
        #: Saves with damaged files that every chain with them reads.
        self.damaged: set[DamagedSave] = set()
        #: Steps that need a damaged save and were not passed yet, with the error that has shown it.
        self.lost_with: dict[int, RestoreError] = {}

    @property
    def lost_points(self) -> list[tuple[int, RestoreError]]:
        """Returns the entries of ``lost`` that made recovery points unrestorable."""
        return [(step, error) for step, error in self.lost if step is not None]

    def skip(self, choice: RestoreChoice, error: RestoreError) -> None:
        """Records an error of a choice, in its WAL records or in its step."""
        self.skipped.append((choice.number, error))
        if choice.point is None or not isinstance(error, DamagedWal):
            self.steps.add(choice.step)
        else:
            self.points.add(choice.point.save_id)
            if isinstance(error.record, SaveId):
                self.points.add(error.record)


class RestoreChooser:
    """Chooses among the steps and recovery points of a run, the same on all processes."""

    def __init__(self, run: Run):
        self._run = run
        self._wal: WalReader | None = None

    def pop_wal(self) -> WalReader | None:
        """Returns the reader of the last choice once: it need not scan the WAL again.

        None on processes that did not choose.
        """
        found, self._wal = self._wal, None
        return found

    def newest(self, tried: FailedChoices, *, wal: bool) -> RestoreChoice | None:
        """Returns the newest step, or recovery point if ``wal``, that was not tried, or None."""

        def find() -> tuple[_PlainChoice | None, list[_PlainLoss]]:
            found = self._choose(tried, wal)
            before = set[str]()
            for _ in range(_MOST_READS):
                lost = {name for _, name, *_ in found[1]}
                if lost <= before:
                    break
                # A trainer may roll back or trim the log while it is read.
                before, found = lost, self._choose(tried, wal)
            return found

        chosen, lost = self._run.coordinator.from_process_0("choosing a step", find)
        tried.lost = [(step, DamagedWal(*reported)) for step, *reported in lost]
        return RestoreChoice.from_plain(chosen)

    def _choose(
        self, tried: FailedChoices, wal: bool
    ) -> tuple[_PlainChoice | None, list[_PlainLoss]]:
        """Returns what to restore, and the lost WAL above it, both as plain values."""
        # The WAL first: a step listed later covers anything trimmed from it.
        index = self._index() if wal else WalIndex(())
        steps = {*self._run.root.steps()} - tried.steps
        plan = None
        if index.views:
            saves = self._run.root.saves()
            ids = {step: info.save_id for step in steps if (info := saves.get(step)) is not None}
            plan = newest_plan(index, ids, tried.points)
        newest = max(steps, default=-1)
        chosen = (newest, None) if steps else None
        if plan is not None:
            newest, chosen = plan.point.step, _plain(plan)
        losses = losses_of(self._run.root, index, newest, above=newest)
        lost = [(one.step, one.error) for one in losses]
        lost += [(None, error) for error in index.replaced]
        return chosen, [(step, *_fields_of(error)) for step, error in lost]

    def _index(self) -> WalIndex:
        """Reads the WAL for a choice, and keeps the reader for ``pop_wal``."""
        self._wal = WalReader(self._run.root.wal_location)
        return _readable(self._wal)

    def wal_damage(self, choice: RestoreChoice, error: RestoreError) -> RestoreError:
        """Returns the damage of the WAL that another process found, or else the given error.

        A process without an error of its own has a ``RestoreError`` that names that process.
        """
        if choice.point is None:
            return error
        own = None
        if isinstance(error, DamagedWal):
            record = error.record
            own = (
                _fields_of(error),
                dataclasses.astuple(record) if isinstance(record, SaveId) else None,
            )
        every = self._run.coordinator.gather("looking for damaged records", own)
        found = next((one for one in every if one is not None), None)
        if found is None or type(error) is not RestoreError:
            return error
        fields, record = found
        damage = DamagedWal(*fields, record=None if record is None else SaveId(*record))
        damage.__cause__ = error
        return damage

    def lost_with(
        self, tried: FailedChoices, choice: RestoreChoice, error: RestoreError
    ) -> list[int]:
        """Returns the steps that need a damaged save that a choice needs, ascending."""
        run = self._run
        found = recovery.find_damaged_save(error, run.root.store_path, run.item)
        every = run.coordinator.gather("looking for damaged saves", found)
        blamed = {DamagedSave(*one) for one in every if one is not None}
        tried.damaged |= {one for one in blamed if one.every_child}

        def find() -> list[int]:
            if not blamed and not isinstance(error, BrokenChain):
                return []
            damaged = tried.damaged | blamed if blamed else set[DamagedSave]()
            with contextlib.suppress(RestoreError, StorageError):  # Then each step is tried.
                return sorted(run.root.lost_with(damaged, choice.step))
            return []

        steps = run.coordinator.from_process_0("finding the steps of a damaged save", find)
        return [step for step in steps if step not in tried.steps]

    def is_of_wal(self, error: RestoreError) -> bool:
        """Returns whether any process found damage in the WAL."""
        own = isinstance(error, DamagedWal)
        return any(self._run.coordinator.gather("looking for damaged records", own))

    def is_gone(self, error: RestoreError, *, is_trimmed: bool = False) -> bool:
        """Returns whether what any process tried to read was removed, or trimmed."""
        own = is_trimmed or isinstance(error, (StepGone, StepNotFound))
        return any(self._run.coordinator.gather("looking for what was removed", own))

    def is_rolled_back(self, choice: RestoreChoice) -> bool:
        """Returns whether training rolled back past a recovery point since it was chosen."""
        run, point = self._run, choice.point
        if point is None:
            return False
        return run.coordinator.from_process_0(
            f"looking for {point}",
            lambda: not WalReader(run.root.wal_location).read().counts(point),
        )

    def find_requested(self, requested: int | RecoveryPoint) -> RestoreChoice:
        """Returns the requested step, or the point and a step that it replays onto."""
        choice = self.find_existing(requested)
        if choice is None:
            raise StepNotFound(
                f"{self._shown(requested)}: expected a committed step, or a recovery point above "
                f"one, found neither; {self._describe_nearest(requested)}"
            )
        return choice

    def find_existing(
        self, requested: int | RecoveryPoint, damaged: Collection[int] = ()
    ) -> RestoreChoice | None:
        """Like ``find_requested``, but returns None if the step or point does not exist.

        A recovery point does not replay onto the ``damaged`` steps.
        """
        run = self._run

        def find() -> _PlainChoice | None:
            if isinstance(requested, int) and requested in {*run.root.steps()}:
                return requested, None
            plan = recovery.plan_to(self._index(), run.root.restorable(), requested, damaged)
            return None if plan is None else _plain(plan)

        return RestoreChoice.from_plain(
            run.coordinator.from_process_0(f"finding {requested}", find)
        )

    def points(self) -> list[RecoveryPoint]:
        """Returns the full recovery points that a committed step makes restorable, newest first."""
        index = _readable(WalReader(self._run.root.wal_location))
        _, unreached = coverings(index, self._run.root.restorable())
        return [point for point in index.points() if point.full and point not in unreached]

    def gone_error(self, requested: int | RecoveryPoint) -> StepGone:
        """Returns the error for a step or recovery point that was removed after it was found."""
        return StepGone(
            f"{self._shown(requested)}: expected it to stay while it was read, found it removed: "
            "retention removes steps, and WAL records go once later steps are committed; "
            f"{self._describe_nearest(requested)}"
        )

    def _describe_nearest(self, requested: int | RecoveryPoint) -> str:
        """Describes the restorable steps and points nearest to one, as seen by this process."""
        number = requested if isinstance(requested, int) else requested.step
        steps, found = self._run.root.restorable(), list[RecoveryPoint]()
        with contextlib.suppress(RestoreError, StorageError):  # The steps are known anyway.
            found = self.points()
        nearest = recovery.nearest(number, steps, found)
        return f"{nearest}; all_steps() and recovery_points() list what exists"

    def _shown(self, requested: int | RecoveryPoint) -> str:
        return f"{self._run.root.at(requested) if isinstance(requested, int) else requested}"


def _readable(wal: WalReader) -> WalIndex:
    """Reads a WAL; its records decide what can be restored, so all must be readable."""
    index = wal.read()
    index.require_topics()
    return index
