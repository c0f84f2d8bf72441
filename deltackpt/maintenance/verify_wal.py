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
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from deltackpt.errors import Damaged, FormatMismatch, StorageError
from deltackpt.format import naming, wal_format
from deltackpt.format.manifest import SaveId
from deltackpt.format.wal_format import EpochHeader
from deltackpt.layers.targets import Targets
from deltackpt.ledger.recovery import in_both, losses_of
from deltackpt.ledger.steps import Steps
from deltackpt.maintenance.verify_save import Problem, Stops
from deltackpt.reading import dense_state, reader, wal_rows
from deltackpt.reading.dense_state import KnownStates
from deltackpt.reading.reader import ProgressMeter
from deltackpt.reading.wal_index import (
    Covering,
    EpochView,
    Loss,
    RecoveryPoint,
    WalIndex,
    WalReader,
    WalState,
    coverings,
    read_wal_state,
)
from deltackpt.reading.wal_locations import newest_durable
from deltackpt.reading.wal_records import ProcessWal, WalRecord
from deltackpt.storage import ocdbt


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointVerdict:
    """Whether a full recovery point can be restored."""

    point: RecoveryPoint
    step: int | None  #: Where a replay starts; None if it cannot be restored.
    broken_by: str = ""

    @property
    def restorable(self) -> bool:
        """Whether the recovery point can be restored, bit for bit."""
        return self.step is not None


def verify_wal(
    opened: Steps,
    steps: Mapping[int, SaveId],
    broken: Mapping[int, SaveId],
    meter: ProgressMeter,
) -> WalAudit:
    """Checks the valid epochs of a WAL; ``steps`` are those whose rows are intact, or not."""
    audit = WalAudit(opened, read_wal_state(opened.wal_location), meter)
    audit.verify_epochs()
    audit.points = audit.verdicts(steps, broken)
    return audit


class WalAudit:
    """The verification of a write-ahead log, and its result; ``notes`` are not damage.

    ``points`` lacks those whose records were trimmed because a newer step replaces them.
    """

    def __init__(self, opened: Steps, found: WalState, meter: ProgressMeter):
        """Reads no records yet."""
        self.points: tuple[PointVerdict, ...] = ()
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.file_count = 0
        self._opened, self._found, self._meter = opened, found, meter
        #: Records to the damage of their rows, which every later recovery point needs.
        self._rows: dict[SaveId, str] = {}
        #: Records to damage that affects only their own recovery point: its dense leaves, or items.
        self._own: dict[SaveId, str] = {}
        #: Records that were trimmed while they were read: no restore needs them.
        self._trimmed: set[SaveId] = set()

    def verify_epochs(self) -> None:
        """Reads every valid record."""
        found, forked_from = self._found, None
        if found.problem is not None:
            name = naming.epoch_name(found.epochs[0].number)
            self._add_error(found.problem, f"{naming.LOG}/{name}")
        if found.index is not None and found.index.views:
            continues = found.index.views[-1].head.continues
            forked_from = None if continues is None else continues.epoch
        for state in found.epochs if found.problem is None else ():
            if state.view is not None and state.live:
                self._verify(state.view)
            elif state.view is not None or state.number != forked_from:
                self.notes.append(f"{naming.LOG}/{state.number}: no longer valid, not verified")

    def _verify(self, view: EpochView) -> None:
        at = f"{naming.LOG}/{view.head.epoch}"
        self.file_count += 1
        with contextlib.suppress(Damaged, StorageError):
            name, data = self._found.at.copy(view.head.epoch)
            if not _is_header(data, view.head):
                self._add(name, "the bytes of the header", "different bytes")
        dense: dict[SaveId, list[_Value]] = {}
        for process, log in view.processes.items():
            self.file_count += len(log.log.segments)
            if view.last is None and any(one.counts and one.is_torn for one in log.log.breaks):
                self.notes.append(
                    f"{at}/{process}: ends in a torn record; its writer was killed, or is still "
                    "writing"
                )
            records = sorted(log.by_id.values(), key=lambda record: record.save_id.attempt)
            self._meter.expect(sum(record.nbytes for record in records))
            dense_check = _DenseCheck(log.log, functools.partial(self._break, self._own))
            for record in records:
                self._check(record, view.head)
                dense.setdefault(record.save_id, []).extend(dense_check.check(record))
                self._meter.add(record.nbytes)
        for point in view.points():
            if point.full and point.save_id not in self._own.keys() | self._trimmed:
                self._check_keys(view.head, point, dense.get(point.save_id, ()))
        newest = {
            process: max((one.attempt for one in log.by_id), default=0)
            for process, log in view.processes.items()
        }
        if behind := [process for process in newest if newest[process] < max(newest.values())]:
            self.notes.append(
                f"{at}: the processes {behind} are behind the others; records that they lack are "
                "not recovery points"
            )

    def _check(self, record: WalRecord, head: EpochHeader) -> None:
        try:
            rows = wal_rows.rows_of(record, head.layout)
            reader.fill((), Targets(()), records=[[rows]], over_parent=True)
        except (Damaged, FormatMismatch, StorageError) as error:
            self._break(self._rows, record, error)
        try:
            record.items()
        except (Damaged, StorageError) as error:
            self._break(self._own, record, error)

    def _break(self, broken: dict[SaveId, str], record: WalRecord, error: Exception | str) -> None:
        """Notes damage, new or of a known object, of a record that was not trimmed meanwhile."""
        if isinstance(error, str):
            broken.setdefault(record.save_id, error)
        elif record.segment.is_file():
            broken.setdefault(record.save_id, self._add_error(error))
        else:
            self._trimmed.add(record.save_id)

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
            shown = ", ".join(sorted(missing)[:3]) or "no dense leaf"
            expected, found = "the dense leaves that its arrays imply", f"a difference in {shown}"
            name = f"{naming.LOG}/{head.epoch}, {point}"
            self._own[point.save_id] = self._add_error(Damaged(name, expected, found))

    def verdicts(
        self, steps: Mapping[int, SaveId], broken: Mapping[int, SaveId]
    ) -> tuple[PointVerdict, ...]:
        """Returns whether each full recovery point can be restored."""
        index = self._found.index
        if index is None:
            return ()
        if index.in_topic is not None:
            self.notes.append(f"not verified: {index.in_topic}")
            return ()
        plans, unreached = coverings(index, steps)
        unreached, pending = self._without_pending(index, unreached)
        found = [verdict for one in plans for verdict in self._along(one)]
        above_broken = {
            point: f"step {one.plan.step.step} is damaged"
            for one in coverings(index, broken)[0]
            for point in one.points
            if point.full and point in unreached
        }
        found += [
            PointVerdict(point=point, step=None, broken_by=damage)
            for point, damage in above_broken.items()
        ]
        unreached = [point for point in unreached if point not in above_broken]
        if self._trimmed:
            self.notes.append(
                f"{len(self._trimmed)} WAL records were trimmed while they were verified"
            )
        lost, losses = self._lost(index, unreached, steps)
        if lost or losses:
            # A trainer may roll back or trim the log while it is read.
            again, steps = WalReader(self._opened.wal_location).read(), self._opened.restorable()
            unreached, pending = self._without_pending(again, coverings(again, steps)[1])
            found_again = self._lost(again, unreached, steps)
            lost = [one for one in lost if one in found_again[0]]
            losses = in_both(losses, found_again[1])
        self.notes += [
            f"{naming.LOG}/{epoch}: its records cannot be restored yet, or any more: the save of "
            f"step {step}, which they continue from, is in flight, failed or was killed"
            for epoch, step in sorted(pending)
        ]
        for one in losses:
            self._add_error(one.error)
        for error in index.replaced:
            self._add(error.object_name, error.expected, error.found)
        if self.problems:
            # Without damage, records below a step were only trimmed.
            lost = [one for one in unreached if one.full]
        if lost:
            expected = f"records from a restorable step to {lost[-1]}, and to later ones"
            name = f"{naming.LOG}/{lost[-1].epoch}"
            self._add_error(Damaged(name, expected, "that some are missing"))
        found += [
            PointVerdict(point=point, step=None, broken_by="no intact records lead to it")
            for point in lost
        ]
        return tuple(sorted(found, key=lambda one: (one.point.epoch, one.point.save_id.attempt)))

    def _without_pending(
        self, index: WalIndex, unreached: Sequence[RecoveryPoint]
    ) -> tuple[list[RecoveryPoint], set[tuple[int, int]]]:
        """Omits points above saves that were not committed; returns these epochs and steps."""
        newest, left, pending = self._opened.newest_step(), [], set[tuple[int, int]]()
        roots = {view.head.epoch: _roots(view) for view in index.views} if unreached else {}
        noted = {epoch: newest_durable(self._found.at.segments(epoch)).step for epoch in roots}
        for point in unreached:
            root = roots[point.epoch][point.save_id]
            if root is None or root.step <= max(noted[point.epoch], newest or 0):
                left.append(point)
            else:
                pending.add((point.epoch, root.step))
        return left, pending

    def _lost(
        self, index: WalIndex, unreached: Sequence[RecoveryPoint], steps: Mapping[int, SaveId]
    ) -> tuple[list[RecoveryPoint], list[Loss]]:
        """Full recovery points that cannot be reached or replaced, and lost records."""
        newest = max((step for step in steps if index.has_step(steps[step])), default=-1)
        lost = [one for one in unreached if one.full and one.step > newest]
        return lost, losses_of(self._opened, index, newest)

    def _along(self, found: Covering) -> Iterator[PointVerdict]:
        """Verdicts on the recovery points along a sequence of records."""
        bad = sorted(
            (head.epoch, record.save_id.attempt, self._rows[record.save_id])
            for head, record in found.plan.records
            if record.save_id in self._rows
        )
        for point in found.points:
            if not point.full or point.save_id in self._trimmed:
                continue
            place = point.epoch, point.save_id.attempt
            before = next((damage for *at, damage in bad if tuple(at) <= place), "")
            broken_by = self._own.get(point.save_id) or before
            step = None if broken_by else found.plan.step.step
            yield PointVerdict(point=point, step=step, broken_by=broken_by)

    def _add_error(self, error: Exception, name: str = "") -> str:
        """Adds the problem of an error; returns the name of the object."""
        name = name or _object_of(error)
        expected, found = "data that this deltackpt can read", str(error)
        if isinstance(error, Damaged):
            expected, found = error.expected, error.found
        self._add(name, expected, found, "points")
        return name

    def _add(self, name: str, expected: str, found: str, stops: Stops = "nothing") -> None:
        self.problems.append(Problem(name, expected, found, stops))


def _is_header(data: bytes, head: EpochHeader) -> bool:
    # Not its bytes: a version with fewer fields may have written it.
    with contextlib.suppress(Damaged, FormatMismatch):
        return wal_format.epoch_header_from(data, name="") == head
    return False


def _roots(view: EpochView) -> dict[SaveId, SaveId | None]:
    """Returns the save of the run that each record continues from; None if it is unknown."""
    if not view.processes:
        return {}
    roots: dict[SaveId, SaveId | None] = {}
    log = next(iter(view.processes.values()))  # The saves are those of all processes.
    gaps = {hole.before for hole in log.log.holes()}
    for record in log.by_id.values():
        parent = record.parent if record.parent.run == view.head.run else None
        roots[record.save_id] = None if record in gaps else roots.get(record.parent, parent)
    return roots


def _object_of(error: Exception) -> str:
    return error.object_name if isinstance(error, Damaged) else naming.LOG


class _Value(NamedTuple):
    file: bool
    key: str
    text: bytes  #: Empty unless it is array metadata.


class _DenseCheck:
    """Checks the dense leaves of one process's records, oldest first.

    Calls ``damaged`` with a record that is incomplete, and the error or the known damaged object.
    """

    def __init__(
        self, log: ProcessWal, damaged: Callable[[WalRecord, Damaged | StorageError | str], None]
    ):
        self._records = dense_state.by_attempt(log)
        self._known: KnownStates = {}
        self._damaged = damaged
        self._reported: set[str] = set()

    def check(self, record: WalRecord) -> list[_Value]:
        try:
            found = dense_state.at_record(record, self._records, self._known)
        except (Damaged, StorageError) as error:
            name = _object_of(error)
            self._damaged(record, name if name in self._reported else error)
            self._reported.add(name)
            return []
        if record.full:
            self._known = {dense_state.key_of(record): found}
        return [
            _Value(file, key, bytes(data) if key.endswith(f"/{ocdbt.ZARRAY}") else b"")
            for (file, key), data in found.items()
        ]
