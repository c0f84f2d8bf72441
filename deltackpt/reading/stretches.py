# SPDX-License-Identifier: Apache-2.0
"""The logs of a root: which points can be restored, and by which marks.

A *point* is a mark that every process of a stretch has. Nothing says so but their logs: there is no
coordinator. Of several stretches the newest one counts, and of earlier ones what it goes on from.

A point is restored from a committed step below it, on the same line of training, and all marks
since. The rows of a mark are those since its *parent*, so the marks reach down to the step where
the parent of the oldest is not above it. They may begin before it: rows carry values.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from deltackpt.errors import Damaged, FormatTooNew
from deltackpt.format import stretches
from deltackpt.format.manifest import SaveId
from deltackpt.format.stretches import Continues, StretchHead
from deltackpt.reading import bounds
from deltackpt.reading.log_files import Mark, ProcessLog
from deltackpt.reading.log_places import LogFolder, LogPlaces
from deltackpt.storage.store import Missing, Spot, spot


class LogPoint(NamedTuple):
    """A mark that every process has written.

    Attributes:
      stretch: number of the stretch of the log.
      save_id: of the mark.
      full: whether it has the dense leaves, so that it can be restored.
      unix_secs: when it was taken, seconds since 1970.
    """

    stretch: int
    save_id: SaveId
    full: bool
    unix_secs: float

    @property
    def step(self) -> int:
        """The training step."""
        return self.save_id.step

    def __str__(self) -> str:
        return f"point {self.step} of stretch {self.stretch}"


class Leg(NamedTuple):
    """Marks of one stretch, by process, oldest first."""

    head: StretchHead
    marks: Mapping[int, tuple[Mark, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class Way:
    """What is read of the logs to come from a step to a point.

    Attributes:
      point: where it leads.
      step: the step that it begins at.
      legs: the marks, oldest stretch first.
      era: the stretch of the point.
    """

    point: LogPoint
    step: SaveId
    legs: tuple[Leg, ...]
    era: Era

    @property
    def nbytes(self) -> int:
        """Bytes of all marks."""
        return sum(
            mark.nbytes for leg in self.legs for marks in leg.marks.values() for mark in marks
        )

    def after(self, point: LogPoint) -> Way | None:
        """What of it lies beyond a point; None where that is not on it."""
        for number, leg in enumerate(self.legs):
            if leg.head.stretch == point.stretch:
                left = {}
                for process, marks in leg.marks.items():
                    ids = [mark.save_id for mark in marks]
                    if point.save_id not in ids:
                        return None
                    left[process] = marks[ids.index(point.save_id) + 1 :]
                legs = (Leg(leg.head, left), *self.legs[number + 1 :])
                return dataclasses.replace(self, legs=legs)
        return None

    def needs(self, mark: SaveId) -> bool:
        """Whether a mark is on it, of whichever process."""
        return any(
            one.save_id == mark
            for leg in self.legs
            for marks in leg.marks.values()
            for one in marks
        )

    @property
    def last_marks(self) -> Mapping[int, Mark]:
        """The mark of the point of each process."""
        return {
            process: log.by_id[self.point.save_id] for process, log in self.era.processes.items()
        }


class _Log(NamedTuple):
    """The log of a process, and its marks by their save ids."""

    log: ProcessLog
    by_id: Mapping[SaveId, Mark]


@dataclasses.dataclass(frozen=True, eq=False)
class Era:
    """A stretch as far as it counts.

    Attributes:
      head: of the stretch.
      last: the last mark that counts; None where nothing ends it.
      processes: the log of each process that has one.
    """

    head: StretchHead
    last: SaveId | None
    processes: Mapping[int, _Log]

    def points(self) -> list[LogPoint]:
        """Newest first."""
        count = self.head.process_count
        if count == 0 or self.processes.keys() != {*range(count)}:
            return []
        ids = set.intersection(*({*log.by_id} for log in self.processes.values()))
        found = []
        for save_id in sorted(ids, key=lambda one: one.attempt, reverse=True):
            if self.last is None or save_id.attempt <= self.last.attempt:
                marks = [log.by_id[save_id] for log in self.processes.values()]
                full = all(mark.full for mark in marks)
                secs = min(mark.unix_secs for mark in marks)
                found.append(LogPoint(self.head.stretch, save_id, full, secs))
        return found

    def has_step(self, save_id: SaveId) -> bool:
        """Whether a committed step is one that the run has taken before its end."""
        ended = self.last is not None and save_id.step > self.last.step
        return save_id.run == self.head.run and not ended


class History:
    """What the logs of a root hold, as it was read."""

    def __init__(self, eras: tuple[Era, ...]):
        """Made by ``Logs.read``.

        Args:
          eras: the stretches that count, newest first.
        """
        self.eras = eras

    def points(self) -> list[LogPoint]:
        """All points that count, newest first; those that are not full, too."""
        return [point for era in self.eras for point in era.points()]

    def has_step(self, save_id: SaveId) -> bool:
        """Whether a committed step is on the line of training that the newest stretch is on."""
        return any(era.has_step(save_id) or era.head.base == save_id for era in self.eras)

    def counts(self, point: LogPoint) -> bool:
        """Whether training went on from a point, though its marks may have been trimmed."""
        for era in self.eras:
            if era.head.stretch == point.stretch:
                ended = era.last is not None and point.save_id.attempt > era.last.attempt
                return era.head.run == point.save_id.run and not ended
        return False

    def way(self, point: LogPoint, step: SaveId) -> Way | None:
        """The marks from a step to a point; None where they do not reach down to it.

        Args:
          point: of ``points``.
          step: save id of a committed step that ``has_step``, not above the point.
        """
        number = next(
            (i for i, era in enumerate(self.eras) if era.head.stretch == point.stretch), None
        )
        if number is None:
            return None
        legs = self._legs(number, point.save_id, step)
        if legs is None:
            return None
        return Way(point=point, step=step, legs=tuple(legs), era=self.eras[number])

    def _legs(self, number: int, save_id: SaveId, step: SaveId) -> list[Leg] | None:
        era = self.eras[number]
        marks, ends = {}, set()
        for process, log in era.processes.items():
            found = _marks_down_to(log.by_id, save_id, step)
            if found is None:
                return None
            marks[process], end = found
            if end.step > step.step:
                ends.add(end)
        if len(marks) != era.head.process_count:
            return None
        leg = Leg(era.head, marks)
        if not ends:
            return [leg]
        continues = era.head.continues
        if continues is None or ends != {continues.save_id} or number + 1 == len(self.eras):
            return None
        before = self._legs(number + 1, continues.save_id, step)
        return None if before is None else [*before, leg]


def _marks_down_to(
    by_id: Mapping[SaveId, Mark], save_id: SaveId, step: SaveId
) -> tuple[tuple[Mark, ...], SaveId] | None:
    """The marks of a process above a step, oldest first, and what their rows are since.

    That is above the step where it is not a mark of this log.
    """
    found, current = [], save_id
    while current.step > step.step:
        mark = by_id.get(current)
        if mark is None:
            return (tuple(reversed(found)), current) if found or save_id == current else None
        found.append(mark)
        current = mark.parent
        if current.step >= mark.save_id.step:
            # It is the save of the same step: its id may be that of a mark, too.
            break
    return tuple(reversed(found)), current


def apart_folder(directory: str, run: str) -> LogFolder:
    """Where a run keeps its log in a directory apart from its root, beside other runs."""
    return LogFolder(spot(directory) / run)


class Logs:
    """The logs of a root, read as they stand; one may be read again and again."""

    def __init__(self, at: Spot | LogPlaces):
        """Reads nothing yet.

        Args:
          at: where they are; of a folder, that of the heads.
        """
        self.places: LogPlaces = LogFolder(at) if isinstance(at, Spot) else at
        #: Heads, and their bytes: a new root may take the place of the one that was read.
        self._heads: dict[int, tuple[bytes, StretchHead]] = {}
        self._logs: dict[tuple[int, int], ProcessLog] = {}

    def numbers(self) -> list[int]:
        """Numbers of all stretches, newest first; those whose heads cannot be read, too."""
        return sorted(self.places.numbers(), reverse=True)

    def head(self, stretch: int) -> StretchHead:
        """The head of a stretch; it never changes.

        Raises:
          Damaged: it is missing or altered.
          FormatTooNew: a later version of deltackpt wrote it.
        """
        shown, data = self.places.head(stretch)
        known, found = self._heads.get(stretch, (None, None))
        if found is None or known != data:
            found = stretches.from_bytes(data, name=shown)
            if found.stretch != stretch:
                raise Damaged(shown, f"stretch {stretch}", f"stretch {found.stretch}")
            bounds.check_tables(found, shown)
            self._forget(stretch)
            self._heads[stretch] = data, found
        return found

    def segments_of(self, head: StretchHead) -> Spot:
        """The folder of a stretch's logs.

        Another directory, which may be that of several roots, counts where it has the head, too: a
        node that does not see it may find another one of its name, and the logs where else they
        are.
        """
        if head.directory is not None:
            apart = apart_folder(head.directory, head.run)
            with contextlib.suppress(Damaged, FormatTooNew):
                name, data = apart.head(head.stretch)
                if stretches.from_bytes(data, name=name) == head:
                    return apart.segments(head.stretch)
        return self.places.segments(head.stretch)

    def read(self) -> History:
        """What counts of the logs now.

        Raises:
          Damaged: the newest head cannot be read, so that nobody knows what counts.
          FormatTooNew: a later version of deltackpt wrote it.
          StorageError: the logs cannot be read.
        """
        numbers = self.numbers()
        for gone in self._heads.keys() - {*numbers}:
            self._forget(gone)
        if not numbers:
            return History(())
        try:
            newest = self.head(numbers[0])
        except Damaged as error:
            action = "nobody knows which points count; restore a step: restore_latest(log=None)"
            raise Damaged(error.object_name, error.expected, error.found, action) from error
        return History(tuple(self._eras(newest)))

    def leads(self, step: SaveId, to: Continues) -> bool:
        """Whether the marks from a step to a point stand, whatever counts now.

        Args:
          step: save id of a committed step below the point.
          to: the point.

        Raises:
          FormatTooNew: a later version of deltackpt wrote a head.
          StorageError: the logs cannot be read.
        """
        try:
            head = self.head(to.stretch)
        except (Damaged, Missing):
            return False
        point = LogPoint(to.stretch, to.save_id, True, 0.0)
        return History(tuple(self._eras(head))).way(point, step) is not None

    def _forget(self, stretch: int) -> None:
        self._heads.pop(stretch, None)
        for key in [key for key in self._logs if key[0] == stretch]:
            del self._logs[key]

    def log_of(self, head: StretchHead, process: int) -> ProcessLog:
        """The log of a process of a stretch, as far as it was read."""
        key = head.stretch, process
        if key not in self._logs:
            folder = self.segments_of(head) / str(process)
            self._logs[key] = ProcessLog(folder, head.stretch, process)
        return self._logs[key]

    def era(self, head: StretchHead, last: SaveId | None) -> Era:
        """A stretch up to a mark, as it stands now; also one that counts no more.

        Args:
          head: of the stretch.
          last: the last mark that counts; None for all.

        Raises:
          StorageError: its logs cannot be read.
        """
        processes = {}
        for process in range(head.process_count):
            log = self.log_of(head, process)
            log.advance()
            marks = {mark.save_id: mark for mark in log.marks if _counts(mark, head, last)}
            processes[process] = _Log(log, marks)
        return Era(head, last, processes)

    def _eras(self, head: StretchHead) -> Iterator[Era]:
        last: SaveId | None = None
        while True:
            yield self.era(head, last)
            if head.continues is None:
                return
            last = head.continues.save_id
            try:
                head = self.head(head.continues.stretch)
            except (Damaged, Missing):
                # It was trimmed: what needs its marks cannot be restored.
                return


def _counts(mark: Mark, head: StretchHead, last: SaveId | None) -> bool:
    of_run = mark.save_id.run == head.run
    return of_run and (last is None or mark.save_id.attempt <= last.attempt)


def newest_way(
    history: History,
    steps: Mapping[int, SaveId | None],
    skipped: Collection[SaveId] = (),
    *,
    at: int | None = None,
    soft: bool = False,
) -> Way | None:
    """How to come to the newest full point above all of some steps.

    Args:
      history: of the logs.
      steps: committed steps, by number; None where it is not known which save one is.
      skipped: marks that are damaged: no way goes over them.
      at: the step of the point that is wanted; by default the newest.
      soft: whether a point without dense leaves will do.

    Returns:
      The way; None where a step is as new as any point that can be restored.
    """
    newest = max(steps, default=None)
    for point in history.points():
        if not (point.full or soft) or (at is not None and point.step != at):
            continue
        if at is None and newest is not None and point.step <= newest:
            return None
        for step in sorted((step for step in steps if step <= point.step), reverse=True):
            save_id = steps[step]
            if save_id is None or not history.has_step(save_id):
                continue
            if any(_between(mark, save_id, point) for mark in skipped):
                continue  # Most are told so, without all marks of the way.
            way = history.way(point, save_id)
            if way is not None and not any(map(way.needs, skipped)):
                return way
    return None


class Covering(NamedTuple):
    """A way, and all points that it comes by, oldest first; the last is where it leads."""

    way: Way
    points: tuple[LogPoint, ...]


def coverings(
    history: History, steps: Mapping[int, SaveId]
) -> tuple[list[Covering], list[LogPoint]]:
    """Few ways that come by all points which can be reached, soft ones too, each by one of them.

    Args:
      history: of the logs.
      steps: committed steps, by number.

    Returns:
      The ways, newest first; and the points that no step leads to, newest first.
    """
    below = sorted((one for one in steps if history.has_step(steps[one])), reverse=True)
    points = history.points()
    found: list[Covering] = []
    unreached: list[LogPoint] = []
    passed: set[SaveId] = set()
    for point in points:
        if point.save_id in passed:
            continue
        ways = (history.way(point, steps[step]) for step in below if step <= point.step)
        way = next((way for way in ways if way is not None), None)
        if way is None:
            unreached.append(point)
            continue
        along = {point.save_id}
        for leg in way.legs:
            along |= set.intersection(
                *({mark.save_id for mark in marks} for marks in leg.marks.values())
            )
        on = [one for one in reversed(points) if one.save_id in along - passed]
        passed |= along
        found.append(Covering(way, tuple(on)))
    return found, unreached


def _between(mark: SaveId, step: SaveId, point: LogPoint) -> bool:
    """Whether a mark of the point's run lies above a step, and not above the point."""
    return mark.run == point.save_id.run and step.step < mark.step and mark <= point.save_id
