# SPDX-License-Identifier: Apache-2.0
"""The WAL of a root: which recovery points can be restored, and from which records.

A *recovery point* is a record that every process of a WAL epoch has. It is determined from their
segments alone, without a coordinator. The newest epoch is valid, and earlier epochs are valid up to
the point that it continues from.

A point is restored from an earlier committed step on the same lineage, and all records since. The
rows of a record are those touched since its *parent*, so the records suffice if the parent of the
oldest one is not later than the step. They may also begin before the step, because records contain
values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deltackpt.cached import cached_property
from deltackpt.errors import (
    Damaged,
    DamagedWal,
    DeltackptError,
    FormatMismatch,
    FormatTooNew,
    OptionError,
    StorageError,
)
from deltackpt.format import naming, wal_format
from deltackpt.format.manifest import SaveId
from deltackpt.format.wal_format import Continues, EpochHeader
from deltackpt.layers.footer import EpochRef
from deltackpt.reading import bounds
from deltackpt.reading.wal_locations import Record, WalFolder, WalLocation
from deltackpt.reading.wal_records import ProcessWal, WalRecord
from deltackpt.resources.runtime import READS, Runtime
from deltackpt.storage.store import FileStore, Missing, StorePath

#: One thread reads fewer logs faster: most calls find nothing new.
_LOGS_PER_THREAD = 4


class RecoveryPoint(NamedTuple):
    """A WAL record that every process has made durable, from which training can resume.

    Attributes:
      epoch: number of the WAL epoch.
      save_id: of the record.
      full: whether it has the dense leaves, so that it can be restored.
      unix_secs: when it was captured, in seconds since 1970.
    """

    epoch: int
    save_id: SaveId
    full: bool
    unix_secs: float

    @property
    def step(self) -> int:
        """Returns the training step."""
        return self.save_id.step

    def __str__(self) -> str:
        return f"recovery point {self.step} of WAL epoch {self.epoch}"


class ReplaySegment(NamedTuple):
    """Records of one epoch, by process, oldest first."""

    head: EpochHeader
    records: Mapping[int, tuple[WalRecord, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class ReplayPlan:
    """The records to replay from a step to a recovery point, by epoch, oldest first.

    ``view`` has the valid records of the point's epoch.
    """

    point: RecoveryPoint
    step: SaveId
    segments: tuple[ReplaySegment, ...]
    view: EpochView

    @property
    def records(self) -> Iterator[tuple[EpochHeader, WalRecord]]:
        """Yields all records with the header of their epoch, process by process."""
        for segment in self.segments:
            for records in segment.records.values():
                yield from ((segment.head, record) for record in records)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all records."""
        return sum(record.nbytes for _, record in self.records)

    def after(self, point: RecoveryPoint) -> ReplayPlan | None:
        """Returns the rest of the plan after a recovery point; None if it does not pass that."""
        for number, segment in enumerate(self.segments):
            if segment.head.epoch == point.epoch:
                rest = {
                    process: [*itertools.dropwhile(lambda one: one.save_id != point.save_id, of)]
                    for process, of in segment.records.items()
                }
                left = ReplaySegment(
                    segment.head, {process: tuple(of[1:]) for process, of in rest.items()}
                )
                segments = (left, *self.segments[number + 1 :])
                return dataclasses.replace(self, segments=segments) if all(rest.values()) else None
        return None

    def items(self) -> dict[int, dict[str, object]]:
        """Returns the additional items of the point, by process and name; raises DamagedWal."""
        return {process: record.items() for process, record in self.last_records.items()}

    @property
    def last_records(self) -> Mapping[int, WalRecord]:
        """Returns the record of the point of each process."""
        return {
            process: log.by_id[self.point.save_id] for process, log in self.view.processes.items()
        }


class Loss(NamedTuple):
    """WAL records, up to ``step`` if known, that were durable and are missing or altered.

    ``may_be_trimmed`` is whether they may have been trimmed because a later step was committed.
    """

    step: int
    error: DamagedWal
    may_be_trimmed: bool

    @classmethod
    def from_damage(cls, step: int, problem: Damaged, *, may_be_trimmed: bool) -> Loss:
        """Returns the error to report for a problem."""
        action = (
            "everything appended after it is lost, and restores use what is before it; "
            '"deltackpt verify" lists the remaining recovery points'
        )
        error = DamagedWal(problem.object_name, problem.expected, problem.found, action)
        return cls(step, error, may_be_trimmed)


class _Log(NamedTuple):
    log: ProcessWal
    by_id: Mapping[SaveId, WalRecord]


@dataclasses.dataclass(frozen=True, eq=False)
class EpochView:
    """The valid records of a WAL epoch: all those of its processes, or those up to ``last``."""

    head: EpochHeader
    last: SaveId | None
    processes: Mapping[int, _Log]

    def points(self) -> list[RecoveryPoint]:
        """Returns its recovery points, newest first."""
        count = self.head.process_count
        if count == 0 or self.processes.keys() != {*range(count)}:
            return []
        ids = set.intersection(*({*log.by_id} for log in self.processes.values()))
        found = []
        for save_id in sorted(ids, key=lambda one: one.attempt, reverse=True):
            if self.last is None or save_id.attempt <= self.last.attempt:
                records = [log.by_id[save_id] for log in self.processes.values()]
                full = all(record.full for record in records)
                secs = min(record.unix_secs for record in records)
                found.append(RecoveryPoint(self.head.epoch, save_id, full, secs))
        return found

    def losses(self) -> Iterator[Loss]:
        """Returns missing or altered valid records."""
        for process, log in self.processes.items():
            holes = log.log.holes()
            if (last := self.last) is not None:
                end = [
                    one
                    for one in holes
                    if one.before is None or one.before.save_id.attempt > last.attempt
                ]
                holes = holes[: len(holes) - len(end)]
                if last not in log.by_id:
                    name = f"WAL of process {process} in epoch {self.head.epoch}"
                    expected = f"the record {last} that training continued from"
                    missing = Damaged(name, expected, "none")
                    breaks = log.log.breaks
                    known = [one.problem for one in (*breaks, *end)]
                    # A kill while an epoch is removed leaves its progress without its segments.
                    trimmed = not breaks and all(one.may_be_trimmed for one in end)
                    yield Loss.from_damage(last.step, [*known, missing][0], may_be_trimmed=trimmed)
            for one in holes:
                yield Loss.from_damage(one.step, one.problem, may_be_trimmed=one.may_be_trimmed)

    def has_step(self, save_id: SaveId) -> bool:
        """Returns whether the run saved a committed step before the end of the epoch."""
        ended = self.last is not None and save_id.step > self.last.step
        return save_id.run == self.head.run and not ended


@dataclasses.dataclass(frozen=True, eq=False)
class WalIndex:
    """The contents of a checkpoint directory's WAL at the time it was read.

    ``views`` are the valid epochs, newest first. ``unreadable`` is the loss of the epoch that the
    oldest of them continues from, if its header cannot be read. ``replaced`` are errors of headers
    of which a copy was read instead: nothing is lost. ``unseen`` names what is missing if the
    segments of the newest epoch are not visible from here; ``in_topic`` if records are in a Kafka
    topic that cannot be read from here.
    """

    views: tuple[EpochView, ...]
    unreadable: Loss | None = None
    replaced: Sequence[Damaged] = ()
    unseen: Damaged | None = None
    in_topic: Damaged | None = None

    def losses(self, above: int) -> list[Loss]:
        """Returns missing or altered records after a training step."""
        found = [one for view in self.views for one in view.losses()]
        if self.unseen is not None:  # Its newest record is unknown.
            found.append(Loss.from_damage(above + 1, self.unseen, may_be_trimmed=False))
        if self.unreadable is not None:
            found.append(self.unreadable)
        return [one for one in found if one.step > above]

    def require_topics(self) -> None:
        """Raises OptionError if records are in a Kafka topic that cannot be read from here."""
        if self.in_topic is not None:
            raise OptionError(str(self.in_topic))

    def points(self) -> list[RecoveryPoint]:
        """Returns all valid recovery points, newest first, including soft ones."""
        return [point for view in self.views for point in view.points()]

    def has_step(self, save_id: SaveId) -> bool:
        """Returns whether a committed step is on the lineage of the newest epoch."""
        return any(view.has_step(save_id) or view.head.base == save_id for view in self.views)

    def counts(self, point: RecoveryPoint) -> bool:
        """Returns whether training continued from a point, even if its records were trimmed."""
        for view in self.views:
            if view.head.epoch == point.epoch:
                ended = view.last is not None and point.save_id.attempt > view.last.attempt
                return view.head.run == point.save_id.run and not ended
        return False

    def plan(self, point: RecoveryPoint, step: SaveId) -> ReplayPlan | None:
        """Returns the records from a step to a point; None if they do not reach back to the step.

        ``step`` is committed, not after the point, and ``has_step``.
        """
        segments: list[ReplaySegment] = []
        below = [*itertools.dropwhile(lambda view: view.head.epoch != point.epoch, self.views)]
        save_id = point.save_id
        for view in below:
            found = {
                process: _records_down_to(log.by_id, save_id, step)
                for process, log in view.processes.items()
            }
            segment = {process: one[0] for process, one in found.items() if one is not None}
            if len(segment) != view.head.process_count:
                return None
            segments.insert(0, ReplaySegment(view.head, segment))
            ends = {one[1] for one in found.values() if one is not None}
            ends = {end for end in ends if end.step > step.step}
            if not ends:
                return ReplayPlan(point=point, step=step, segments=tuple(segments), view=below[0])
            continues = view.head.continues
            if continues is None or ends != {continues.save_id}:
                return None
            save_id = continues.save_id
        return None


def _records_down_to(
    by_id: Mapping[SaveId, WalRecord], save_id: SaveId, step: SaveId
) -> tuple[tuple[WalRecord, ...], SaveId] | None:
    """Returns a process's records above a step, oldest first, and the parent of the first."""
    found, current = [], save_id
    while current.step > step.step:
        record = by_id.get(current)
        # The parent is above the step if it is not a record of this WAL.
        if record is None:
            return (tuple(reversed(found)), current) if found or save_id == current else None
        found.append(record)
        current = record.parent
        if current.step >= record.save_id.step:
            # It is the save of the same step: its id may be that of a record, too.
            break
    return tuple(reversed(found)), current


def local_wal_folder(directory: str, run: str) -> WalFolder:
    """Returns the folder of a run's WAL in a directory that several runs share."""
    # The directory is the store itself, which is never recreated if it was moved or removed.
    return WalFolder(StorePath(FileStore(Path(directory)), run))


class WalReader:
    """The current WAL of a checkpoint directory; it can be read repeatedly."""

    def __init__(self, at: StorePath | WalLocation):
        """Reads nothing yet; ``at`` may be the directory of the headers."""
        self.places: WalLocation = WalFolder(at) if isinstance(at, StorePath) else at
        #: Heads, and their bytes: a new root may take the place of the one that was read.
        self._heads: dict[int, tuple[bytes, EpochHeader]] = {}
        self._logs: dict[tuple[int, int], ProcessWal] = {}
        #: Errors of heads of which a copy was read instead.
        self._replaced: dict[int, Damaged] = {}

    def numbers(self) -> list[int]:
        """Returns numbers of all epochs, newest first, including those with unreadable headers."""
        return sorted(self.places.numbers(), reverse=True)

    def head(self, epoch: int) -> EpochHeader:
        """Returns the header of an epoch, which never changes; raises Damaged or FormatTooNew."""
        self._replaced.pop(epoch, None)
        try:
            return self._head_of(epoch, self.places.head(epoch))
        except Damaged as error:
            try:
                found = self._head_of(epoch, self.places.copy(epoch))
            except Damaged:
                raise error from None
            action = "its copy was read, and nothing is lost"
            reported = Damaged(error.object_name, error.expected, error.found, action)
            self._replaced[epoch] = reported
            return found

    def _head_of(self, epoch: int, record: Record) -> EpochHeader:
        shown, data = record
        known, found = self._heads.get(epoch, (None, None))
        if found is None or known != data:
            found = wal_format.epoch_header_from(data, name=shown)
            if found.epoch != epoch:
                raise Damaged(shown, f"WAL epoch {epoch}", f"WAL epoch {found.epoch}")
            bounds.check_tables(found, shown)
            self._forget(epoch)
            self._heads[epoch] = data, found
        return found

    def segments_of(self, head: EpochHeader) -> StorePath:
        """Returns the directory of an epoch's segments, or of their copies if they are in Kafka.

        A directory outside the checkpoint directory is used only if it holds the header too: on
        another node, a different directory may have the same path.
        """
        if head.topic is not None and self.places.topics is not None:
            return self.places.topics.segments(self._ref(head))
        local = self._local_segments(head)
        return self.places.segments(head.epoch) if local is None else local

    def _ref(self, head: EpochHeader) -> EpochRef:
        """Returns the reference that the records of an epoch have."""
        data, known = self._heads.get(head.epoch, (b"", None))
        # Its own bytes: a later version may have written fields that are unknown here.
        return EpochRef.from_header(head, data if known == head else None)

    def _local_segments(self, head: EpochHeader) -> StorePath | None:
        """Returns the directory of an epoch's segments in another directory, if it exists."""
        if head.directory is not None:
            local = local_wal_folder(head.directory, head.run)
            for read in (local.head, local.copy):
                with contextlib.suppress(Damaged, FormatMismatch):
                    name, data = read(head.epoch)
                    if wal_format.epoch_header_from(data, name=name) == head:
                        return local.segments(head.epoch)
        return None

    def _unseen(self, view: EpochView) -> Damaged | None:
        """Returns what is missing if an epoch's segments are in a directory not visible here."""
        head = view.head
        has_records = any(log.by_id for log in view.processes.values())
        if has_records or not head.directory or not head.process_count:
            return None
        if self._local_segments(head) is not None:
            return None
        name = f"{local_wal_folder(head.directory, head.run)}/{naming.epoch_name(head.epoch)}"
        return Damaged(name, f"WAL epoch {head.epoch}", "no header of it")

    def in_topic(self, head: EpochHeader) -> Damaged | None:
        """Returns what is missing if an epoch's records are in a topic that is not configured."""
        if head.topic is None or self.places.topics is not None:
            return None
        name = head.topic.name
        return Damaged(
            f"{self.places}, WAL epoch {head.epoch}",
            f"its records, which are in the Kafka topic {name!r} of cluster {head.topic.cluster}",
            "no configuration to read them",
            f"pass KafkaWal({name!r}, config=...), in WalOptions(backend=...) to a manager, or "
            "restore a step: restore_latest(wal=False)",
        )

    def read(self) -> WalIndex:
        """Returns the valid records of the WAL.

        Raises Damaged if the newest header cannot be read, so it is unknown which records are
        valid.
        """
        numbers = self.numbers()
        for gone in self._heads.keys() - {*numbers}:
            self._forget(gone)
        if not numbers:
            return WalIndex(())
        try:
            newest = self.head(numbers[0])
        except Damaged as error:
            if self.numbers()[:1] != numbers[:1]:
                return self.read()  # Another run has begun, and that head has gone since.
            action = (
                "it is unknown which recovery points count; restore a step: "
                "restore_latest(wal=False)"
            )
            raise Damaged(error.object_name, error.expected, error.found, action) from error
        return self._index(newest)

    def leads(self, step: SaveId, to: Continues) -> bool:
        """Returns whether the records from a step to a later point exist, valid or not."""
        try:
            head = self.head(to.epoch)
        except (Damaged, Missing):
            return False
        point = RecoveryPoint(to.epoch, to.save_id, True, 0.0)
        return self._index(head).plan(point, step) is not None

    def _forget(self, epoch: int) -> None:
        data, head = self._heads.pop(epoch, (b"", None))
        if head is not None and self.places.topics is not None:
            self.places.topics.remove(EpochRef.from_header(head, data))
        for key in [key for key in self._logs if key[0] == epoch]:
            del self._logs[key]

    def log_of(self, head: EpochHeader, process: int) -> ProcessWal:
        """Returns one process's WAL of an epoch, as far as it was read."""
        key = head.epoch, process
        if key not in self._logs:
            folder = self.segments_of(head) / str(process)
            self._logs[key] = ProcessWal(folder, head.run, self._ref(head), process)
        return self._logs[key]

    def view(
        self, head: EpochHeader, last: SaveId | None, following: EpochHeader | None = None
    ) -> EpochView:
        """Returns an epoch up to a record (None for all), even if the epoch is no longer valid.

        ``following`` is the epoch that continues from that record. Raises OptionError if the
        records are in another Kafka cluster than the one to read from.
        """
        if head.topic is not None and self.places.topics is not None:
            until = None if following is None else following.topic
            beside = self.places.segments(head.epoch)
            self.places.topics.copy(head, self._ref(head), beside, until)
        logs = [self.log_of(head, process) for process in range(head.process_count)]
        with Runtime(max(1, min(READS, len(logs) // _LOGS_PER_THREAD))) as runtime:
            runtime.map(ProcessWal.advance, logs)
        processes = {}
        for process, log in enumerate(logs):
            records = {one.save_id: one for one in log.records if one.save_id.run == head.run}
            if last is not None:
                records = {one: of for one, of in records.items() if one.attempt <= last.attempt}
            processes[process] = _Log(log, records)
        return EpochView(head, last, processes)

    def _index(self, head: EpochHeader) -> WalIndex:
        """Returns an epoch, and the point or step that it continues from."""
        views, unreadable = [self.view(head, None)], None
        while (continues := head.continues) is not None:
            following = head
            try:
                head = self.head(continues.epoch)
            except Damaged as error:
                is_there = self.places.has(continues.epoch)
                unreadable = Loss.from_damage(
                    continues.save_id.step, error, may_be_trimmed=not is_there
                )
                break
            views.append(self.view(head, continues.save_id, following))
        unseen = self._unseen(views[0])
        in_topics = (self.in_topic(view.head) for view in views)
        in_topic = next((one for one in in_topics if one is not None), None)
        replaced = (self._replaced.get(view.head.epoch) for view in views)
        found = [one for one in replaced if one is not None]
        return WalIndex(tuple(views), unreadable, found, unseen, in_topic)


def newest_plan(
    index: WalIndex,
    steps: Mapping[int, SaveId | None],
    skipped: Collection[SaveId] = (),
    *,
    at: int | None = None,
    soft: bool = False,
) -> ReplayPlan | None:
    """Returns the replay plan to the newest full recovery point after some committed steps.

    The save id of a step is None if it is unknown. ``skipped`` are damaged records to avoid, ``at``
    is the step of the wanted point, and ``soft`` accepts a point without dense leaves. Returns None
    if no restorable point is newer than the newest step.
    """
    newest = max(steps, default=None)
    for point in index.points():
        if not (point.full or soft) or (at is not None and point.step != at):
            continue
        if at is None and newest is not None and point.step <= newest:
            return None
        for step in sorted((step for step in steps if step <= point.step), reverse=True):
            save_id = steps[step]
            if save_id is None or not index.has_step(save_id):
                continue
            run, last = point.save_id.run, point.save_id
            if any(one.run == run and save_id.step < one.step and one <= last for one in skipped):
                continue  # A cheap check that rejects most.
            plan = index.plan(point, save_id)
            if plan is not None and not any(one.save_id in skipped for _, one in plan.records):
                return plan
    return None


class Covering(NamedTuple):
    """A replay plan, and all recovery points that it passes, oldest first; the last is its end."""

    plan: ReplayPlan
    points: tuple[RecoveryPoint, ...]


def coverings(
    index: WalIndex, steps: Mapping[int, SaveId]
) -> tuple[list[Covering], list[RecoveryPoint]]:
    """Returns few replay plans that cover each reachable recovery point once, soft ones too.

    Returns the plans for committed steps and the unreachable points, both newest first.
    """
    below = sorted((one for one in steps if index.has_step(steps[one])), reverse=True)
    points = index.points()
    found: list[Covering] = []
    unreached: list[RecoveryPoint] = []
    passed: set[SaveId] = set()
    for point in points:
        if point.save_id in passed:
            continue
        plans = (index.plan(point, steps[step]) for step in below if step <= point.step)
        plan = next((plan for plan in plans if plan is not None), None)
        if plan is None:
            unreached.append(point)
            continue
        along = {point.save_id}
        for segment in plan.segments:
            along |= set.intersection(
                *({one.save_id for one in of} for of in segment.records.values())
            )
        on = [one for one in reversed(points) if one.save_id in along - passed]
        passed |= along
        found.append(Covering(plan, tuple(on)))
    return found, unreached


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EpochState:
    """The state of an epoch, and the folders that contain its segments, or may contain them.

    ``view`` has only the valid records if the epoch is live, otherwise all; None if it cannot be
    read. ``live`` is whether restores may read it; None if the newest header is damaged.
    ``problem`` is why it, or its records, cannot be read.
    """

    number: int
    folders: tuple[StorePath, ...]
    view: EpochView | None
    live: bool | None
    problem: DeltackptError | None = None

    @property
    def head(self) -> EpochHeader | None:
        """Returns the epoch's header if it can be read."""
        return None if self.view is None else self.view.head

    @cached_property
    def points(self) -> list[RecoveryPoint]:
        """Returns the epoch's recovery points, newest first, including soft ones."""
        return [] if self.view is None else self.view.points()

    @cached_property
    def nbytes(self) -> int:
        """Returns the total size of the epoch's files."""
        return sum(folder.tree_bytes() for folder in self.folders)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WalState:
    """The WAL epochs of a root, newest first.

    ``index`` has the valid records; None if the newest header cannot be read, because of
    ``problem``.
    """

    at: WalLocation
    index: WalIndex | None
    epochs: tuple[EpochState, ...]
    problem: DeltackptError | None = None

    @property
    def newest(self) -> EpochHeader | None:
        """Returns the newest header; None if it does not exist or cannot be read."""
        return self.epochs[0].head if self.epochs else None

    def needless(self, steps: Mapping[int, SaveId]) -> dict[int, str]:
        """Returns epochs that no restore to the committed steps can need, with the reason."""
        newest = self.newest
        if self.index is None or newest is None:
            return {}
        # Records below the last but one step are of no use; see ``OpenEpoch.truncate``.
        own = sorted(one.step for one in steps.values() if one.run == newest.run)
        oldest = own[-2] if len(own) >= 2 else -1
        ends = {view.head.epoch: view.last for view in self.index.views}
        found = {}
        for state in self.epochs:
            if state.number == newest.epoch:
                continue
            if not state.live:
                found[state.number] = "the newest epoch does not continue from it"
            elif (last := ends[state.number]) is not None and last.step <= oldest:
                found[state.number] = "two later steps of the newest run are committed"
        return found


def read_wal_state(at: WalLocation) -> WalState:
    """Returns all WAL epochs of a root; raises FormatTooOld if a development version's counts."""
    logs = WalReader(at)
    numbers = logs.numbers()
    index, problem = None, None
    try:
        index = logs.read()
    except (Damaged, FormatTooNew) as error:
        problem = error
    views = {} if index is None else {view.head.epoch: view for view in index.views}
    epochs = [
        _state(logs, number, views, index is not None)
        for number in sorted({*numbers, *at.logged()}, reverse=True)
    ]
    return WalState(at=at, index=index, epochs=tuple(epochs), problem=problem)


def _state(logs: WalReader, number: int, views: Mapping[int, EpochView], known: bool) -> EpochState:
    live = number in views if known else None
    beside = logs.places.segments(number)
    try:
        head = logs.head(number)
        folder = logs.segments_of(head)
        view = views.get(number) or logs.view(head, None)
    except (Damaged, FormatMismatch, StorageError) as error:
        return EpochState(number=number, folders=(beside,), view=None, live=live, problem=error)
    problem = logs.in_topic(head)
    return EpochState(number=number, folders=(folder,), view=view, live=live, problem=problem)
