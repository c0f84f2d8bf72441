# SPDX-License-Identifier: Apache-2.0
"""Verification of the write-ahead log: all valid records, and those of every recovery point.

Data that no restore needs is not damage: epochs from which the newest one did not fork, records
after the fork, and the rest of a failed segment after the record that the next part names. If the
writer was killed, the last record may be torn. If intact records follow it, it was not torn but
altered.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from deltackpt.errors import Damaged, FormatMismatch, StorageError
from deltackpt.format import names, wal_epochs
from deltackpt.format.manifest import SaveId
from deltackpt.format.wal_epochs import EpochHeader
from deltackpt.layers.targets import Targets
from deltackpt.ledger.steps import Steps
from deltackpt.ledger.wal_losses import in_both, losses_of
from deltackpt.reading import dense_state, replay
from deltackpt.reading.dense_state import KnownStates
from deltackpt.reading.meter import Meter
from deltackpt.reading.wal_index import (
    Covering,
    EpochView,
    Loss,
    RecoveryPoint,
    ReplayPlan,
    ReplaySegment,
    WalIndex,
    WalReader,
    coverings,
)
from deltackpt.reading.wal_records import ProcessWal, WalRecord
from deltackpt.reading.wal_state import EpochState, WalState, read_wal_state
from deltackpt.storage import ocdbt
from deltackpt.upkeep.verdicts import PointVerdict, Problem, Stops, WalReport


def verify_log(opened: Steps, steps: Mapping[int, SaveId], meter: Meter) -> WalReport:
    """Re-reads and checks the valid epochs of a WAL.

    Args:
      opened: the checkpoint directory.
      steps: the steps that can be restored.
      meter: counts the bytes that are read.

    Raises:
      StorageError: the directory of the WAL cannot be read.
    """
    found = read_wal_state(opened.log_at)
    audit = _LogAudit(opened, found, meter)
    for state in found.epochs:
        audit.look_at(state)
    points = audit.verdicts(steps)
    return WalReport(
        points=points,
        problems=tuple(audit.problems),
        notes=tuple(audit.notes),
        file_count=audit.file_count,
    )


@dataclasses.dataclass(eq=False)
class _Broken:
    """The first damage of each WAL record.

    Attributes:
      rows: records whose rows are needed by every later recovery point.
      point: records whose damage affects only their own recovery point: its dense leaves, or items.
    """

    rows: dict[SaveId, str] = dataclasses.field(default_factory=dict)
    point: dict[SaveId, str] = dataclasses.field(default_factory=dict)


class _LogAudit:
    """The verification of a WAL."""

    def __init__(self, opened: Steps, found: WalState, meter: Meter):
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.file_count = 0
        self._opened = opened
        self._found = found
        self._meter = meter
        self._broken = _Broken()
        #: Records that were trimmed while they were read: no restore needs them.
        self._trimmed: set[SaveId] = set()
        if found.problem is not None:
            number = found.epochs[0].number
            self._tell(f"{names.LOG}/{names.epoch_name(number)}", found.problem)

    def look_at(self, state: EpochState) -> None:
        """Verifies a WAL epoch if it is valid."""
        if state.live is None:
            return  # The newest header is damaged, which is reported.
        if state.view is None and self._is_gone_on_from(state.number):
            return  # Reported as lost; see ``verdicts``.
        if state.view is None or not state.live:
            self.notes.append(f"{names.LOG}/{state.number}: no longer valid, not verified")
        else:
            self._verify(state.view)

    def _is_gone_on_from(self, number: int) -> bool:
        """Whether the valid epochs forked from one whose header cannot be read."""
        index = self._found.index
        last = index.views[-1].head.continues if index is not None and index.views else None
        return last is not None and last.epoch == number

    def _verify(self, view: EpochView) -> None:
        self.file_count += 1
        self._check_copy(view.head)
        dense: dict[SaveId, list[_Value]] = {}
        for process, log in view.processes.items():
            self.file_count += len(log.log.segments)
            if view.last is None and any(one.counts and one.is_torn for one in log.log.breaks):
                name = f"{names.LOG}/{view.head.epoch}/{process}"
                self.notes.append(
                    f"{name}: ends in a torn record; its writer was killed, or is still writing"
                )
            records = sorted(log.by_id.values(), key=lambda record: record.save_id.attempt)
            self._meter.expect(sum(record.nbytes for record in records))
            dense_check = _DenseCheck(log.log)
            for record in records:
                self._check_rows(view, process, record)
                dense.setdefault(record.save_id, []).extend(dense_check.check(record, self._void))
                self._meter.add(record.nbytes)
        for point in view.points():
            known = point.save_id in self._broken.point or point.save_id in self._trimmed
            if point.full and not known:
                self._check_keys(view.head, point, dense.get(point.save_id, ()))
        self._look_at_ends(view)

    def _check_copy(self, head: EpochHeader) -> None:
        """Checks the copy of an epoch header, if there is one."""
        with contextlib.suppress(Damaged, StorageError):
            name, data = self._found.at.copy(head.epoch)
            if data != wal_epochs.to_bytes(head):
                self._add(name, "the bytes of the header", "different bytes", stops="nothing")

    def _check_rows(self, view: EpochView, process: int, record: WalRecord) -> None:
        """Checks rows and items of a record; every later recovery point needs the rows."""
        point = RecoveryPoint(view.head.epoch, record.save_id, record.full, record.unix_secs)
        segment = ReplaySegment(view.head, {process: (record,)})
        plan = ReplayPlan(point=point, step=record.parent, segments=(segment,), view=view)
        layout = view.head.layout
        try:
            replay.replay(plan, Targets((), layout), layout)
        except (Damaged, FormatMismatch, StorageError) as error:
            if not self._went(record):
                self._tell(_object_of(error), error)
                self._broken.rows.setdefault(record.save_id, self.problems[-1].object_name)
        try:
            replay.items_of_record(record)
        except (Damaged, StorageError) as error:
            self._void(record, error)

    def _went(self, record: WalRecord) -> bool:
        """Whether a record was trimmed while it was read."""
        if record.segment.is_file():
            return False
        self._trimmed.add(record.save_id)
        return True

    def _void(self, record: WalRecord, error: Damaged | StorageError | str) -> None:
        """Notes that a recovery point cannot be restored, with new damage or a known object."""
        if isinstance(error, str):
            self._broken.point.setdefault(record.save_id, error)
        elif not self._went(record):
            self._tell(_object_of(error), error)
            self._broken.point.setdefault(record.save_id, self.problems[-1].object_name)

    def _check_keys(
        self, head: EpochHeader, point: RecoveryPoint, values: Collection[_Value]
    ) -> None:
        """Checks that all processes together have exactly the keys that their arrays imply."""
        keys = {value.key for value in values if not value.file}
        tail = f"/{ocdbt.ZARRAY}"
        described = {
            value.key.removesuffix(tail): value.text for value in values if value.key.endswith(tail)
        }
        try:
            missing = ocdbt.implied(described) ^ keys
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            missing = {f"metadata of arrays: {error}"}
        if missing or (head.dense and not values):
            name = f"{names.LOG}/{head.epoch}, {point}"
            shown = ", ".join(sorted(missing)[:3]) or "no dense leaf"
            self._add(name, "the dense leaves that its arrays imply", f"a difference in {shown}")
            self._broken.point[point.save_id] = name

    def _look_at_ends(self, view: EpochView) -> None:
        """Notes processes that have fewer records than others."""
        newest = {
            process: max((one.attempt for one in log.by_id), default=0)
            for process, log in view.processes.items()
        }
        behind = [process for process in newest if newest[process] < max(newest.values())]
        if behind:
            self.notes.append(
                f"{names.LOG}/{view.head.epoch}: the processes {behind} are behind the others; "
                "records that they lack are not recovery points"
            )

    def verdicts(self, steps: Mapping[int, SaveId]) -> tuple[PointVerdict, ...]:
        """Returns a verdict for each full recovery point."""
        index = self._found.index
        if index is None:
            return ()
        plans, unreached = coverings(index, steps)
        found = [verdict for one in plans for verdict in self._along(one)]
        if self._trimmed:
            self.notes.append(
                f"{len(self._trimmed)} WAL records were trimmed while they were verified"
            )
        lost, losses = self._lost(index, unreached, steps)
        if lost or losses:
            # A trainer may roll back or trim the log while it is read.
            again, steps = WalReader(self._opened.log_at).read(), self._opened.restorable()
            _, unreached = coverings(again, steps)
            found_again = self._lost(again, unreached, steps)
            lost = [one for one in lost if one in found_again[0]]
            losses = in_both(losses, found_again[1])
        for one in losses:
            self._tell(one.error.object_name, one.error)
        for error in index.replaced:
            self._add(error.object_name, error.expected, error.found, stops="nothing")
        if self.problems:
            # Without damage, records below a step were only trimmed.
            lost = [one for one in unreached if one.full]
        if lost:
            expected = f"records from a restorable step to {lost[-1]}, and to later ones"
            self._add(f"{names.LOG}/{lost[-1].epoch}", expected, "that some are missing")
        found += [
            PointVerdict(point=point, step=None, broken_by="no intact records lead to it")
            for point in lost
        ]
        return tuple(sorted(found, key=lambda one: (one.point.epoch, one.point.save_id.attempt)))

    def _lost(
        self, index: WalIndex, unreached: Sequence[RecoveryPoint], steps: Mapping[int, SaveId]
    ) -> tuple[list[RecoveryPoint], list[Loss]]:
        """Full recovery points that cannot be reached or replaced, and lost parts of the WAL."""
        newest = max((step for step in steps if index.has_step(steps[step])), default=-1)
        lost = [one for one in unreached if one.full and one.step > newest]
        return lost, losses_of(self._opened, index, newest)

    def _along(self, found: Covering) -> Iterator[PointVerdict]:
        """Verdicts on the recovery points along a sequence of records."""
        order = [
            (segment.head.epoch, record.save_id.attempt, record.save_id)
            for segment in found.plan.segments
            for records in segment.records.values()
            for record in records
        ]
        bad = [one for one in sorted(order) if one[2] in self._broken.rows]
        for point in found.points:
            if not point.full or point.save_id in self._trimmed:
                continue
            own = self._broken.point.get(point.save_id)
            place = point.epoch, point.save_id.attempt
            before = next((record for *at, record in bad if tuple(at) <= place), None)
            broken_by = own or ("" if before is None else self._broken.rows[before])
            step = None if broken_by else found.plan.step.step
            yield PointVerdict(point=point, step=step, broken_by=broken_by)

    def _tell(self, name: str, error: Exception) -> None:
        if isinstance(error, Damaged):
            self._add(name, error.expected, error.found)
        else:
            self._add(name, "data that this deltackpt can read", str(error))

    def _add(self, name: str, expected: str, found: str, stops: Stops = "points") -> None:
        self.problems.append(Problem(object_name=name, expected=expected, found=found, stops=stops))


def _object_of(error: Exception) -> str:
    return error.object_name if isinstance(error, Damaged) else names.LOG


#: Reports that the dense leaves of a record are incomplete: the error, or the damaged object.
_Void = Callable[[WalRecord, Damaged | StorageError | str], None]


class _Value(NamedTuple):
    """A value of a record; only array metadata has its bytes."""

    file: bool
    key: str
    text: bytes

    @classmethod
    def of(cls, file: bool, key: str, data: memoryview) -> _Value:
        """Keeps the bytes only if the value is array metadata."""
        return cls(file, key, bytes(data) if key.endswith(f"/{ocdbt.ZARRAY}") else b"")


class _DenseCheck:
    """Checks the dense leaves of one process's records, oldest first."""

    def __init__(self, log: ProcessWal):
        self._records = dense_state.by_attempt(log)
        self._known: KnownStates = {}
        #: Damaged objects that were reported.
        self._damaged: set[str] = set()

    def check(self, record: WalRecord, void: _Void) -> list[_Value]:
        """Returns the values of a record."""
        try:
            found = dense_state.at_record(record, self._records, self._known)
        except (Damaged, StorageError) as error:
            name = _object_of(error)
            void(record, name if name in self._damaged else error)
            self._damaged.add(name)
            return []
        if record.full:
            self._known = {dense_state.key_of(record): found}
        return [_Value.of(file, key, data) for (file, key), data in found.items()]
