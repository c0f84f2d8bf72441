# SPDX-License-Identifier: Apache-2.0
"""Verification of the log between the steps: every frame that counts, every point's way.

What nobody needs is no damage: stretches that the newest one does not go on from, what stands
behind the point that a later stretch goes on from, and what a failed part holds beyond the frame
that the next one names. A log whose writer was killed ends in a torn frame. Where frames follow
that one, whole by themselves, it was not torn but altered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from deltackpt.errors import Damaged, FormatTooNew, StorageError
from deltackpt.format import frames, names
from deltackpt.format.frames import DenseHead, Kind
from deltackpt.format.manifest import SaveId
from deltackpt.format.stretches import StretchHead
from deltackpt.reading import logged_dense, replay
from deltackpt.reading.log_files import Break, FrameAt, Mark, ProcessLog
from deltackpt.reading.log_places import LogPlaces
from deltackpt.reading.log_states import LogState, StretchState, log_state
from deltackpt.reading.logged_dense import DenseKept, ProcessDense
from deltackpt.reading.meter import Meter
from deltackpt.reading.stretches import Covering, Era, Leg, LogPoint, Way, coverings
from deltackpt.reading.targets import Targets
from deltackpt.storage import ocdbt
from deltackpt.storage.store import Missing
from deltackpt.upkeep.verdicts import LogReport, PointVerdict, Problem


def verify_log(at: LogPlaces, steps: Mapping[int, SaveId], meter: Meter) -> LogReport:
    """Re-reads and checks what counts of the log of a root.

    Args:
      at: where they are.
      steps: the steps that can be restored.
      meter: counts what is read.

    Raises:
      StorageError: the folder cannot be read.
    """
    found = log_state(at)
    audit = _LogAudit(found, meter)
    for state in found.stretches:
        audit.look_at(state)
    points = audit.verdicts(steps)
    return LogReport(
        points=points,
        problems=tuple(audit.problems),
        notes=tuple(audit.notes),
        file_count=audit.file_count,
    )


@dataclasses.dataclass(eq=False)
class _Broken:
    """What is wrong with the marks of all stretches: first of each, what.

    Attributes:
      rows: marks that no point at or behind them can do without.
      point: marks of which the point alone is void: its dense leaves, or items.
    """

    rows: dict[SaveId, str] = dataclasses.field(default_factory=dict)
    point: dict[SaveId, str] = dataclasses.field(default_factory=dict)


class _LogAudit:
    """The verification of the log of a root."""

    def __init__(self, found: LogState, meter: Meter):
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.file_count = 0
        self._found = found
        self._meter = meter
        self._broken = _Broken()
        #: Marks that were trimmed while they were read: no restore needs them.
        self._trimmed: set[SaveId] = set()
        if found.problem is not None:
            number = found.stretches[0].number
            self._tell(f"{names.LOG}/{names.stretch_name(number)}", found.problem)

    def look_at(self, state: StretchState) -> None:
        """Verifies a stretch, where it counts."""
        if state.live is None:
            return  # The newest head is damaged, and that is told.
        if state.era is None and self._is_gone_on_from(state.number):
            assert state.problem is not None
            self._tell(f"{names.LOG}/{names.stretch_name(state.number)}", state.problem)
        elif state.era is None or not state.live:
            self.notes.append(f"{names.LOG}/{state.number}: it counts no more, not verified")
        else:
            self._verify(state.era)

    def _is_gone_on_from(self, number: int) -> bool:
        """Whether what counts goes on from a stretch whose head cannot be read."""
        history = self._found.history
        last = history.eras[-1].head.continues if history is not None and history.eras else None
        return last is not None and last.stretch == number

    def _verify(self, era: Era) -> None:
        self.file_count += 1
        dense: dict[SaveId, list[_Value]] = {}
        for process, log in era.processes.items():
            self.file_count += len(log.log.segments)
            for one in log.log.breaks:
                self._look_at_break(one, era, process)
            marks = sorted(log.by_id.values(), key=lambda mark: mark.save_id.attempt)
            self._meter.expect(sum(mark.nbytes for mark in marks))
            dense_check = _DenseCheck(era.head.stretch, process, log.log, marks)
            for mark in marks:
                self._check_rows(era, process, mark)
                dense.setdefault(mark.save_id, []).extend(dense_check.check(mark, self._void))
                self._meter.add(mark.nbytes)
        for point in era.points():
            known = point.save_id in self._broken.point or point.save_id in self._trimmed
            if point.full and not known:
                self._check_keys(era.head, point, dense.get(point.save_id, ()))
        self._look_at_ends(era)

    def _check_rows(self, era: Era, process: int, mark: Mark) -> None:
        """Checks rows and items of a mark: no later point can do without the rows."""
        point = LogPoint(era.head.stretch, mark.save_id, mark.full, mark.unix_secs)
        leg = Leg(era.head, {process: (mark,)})
        way = Way(point=point, step=mark.parent, legs=(leg,), era=era)
        layout = era.head.layout
        try:
            replay.replay(way, Targets((), layout), layout)
        except (Damaged, FormatTooNew, StorageError) as error:
            if not self._went(mark):
                self._tell(_object_of(error), error)
                self._broken.rows.setdefault(mark.save_id, self.problems[-1].object_name)
        for frame in mark.frames:
            if frame.kind == Kind.ITEMS:
                try:
                    sizes = [item.nbytes for item in frame.head.items]
                    frames.pieces_of(sizes, frame.read(), frame.name)
                except (Damaged, StorageError) as error:
                    self._void(mark, error)

    def _went(self, mark: Mark) -> bool:
        """Whether a mark was trimmed while it was read."""
        if all(frame.segment.is_file() for frame in mark.frames):
            return False
        self._trimmed.add(mark.save_id)
        return True

    def _void(self, mark: Mark, error: Damaged | StorageError | str) -> None:
        """A point cannot be restored: by what is wrong, or by the object that is known to be."""
        if isinstance(error, str):
            self._broken.point.setdefault(mark.save_id, error)
        elif not self._went(mark):
            self._tell(_object_of(error), error)
            self._broken.point.setdefault(mark.save_id, self.problems[-1].object_name)

    def _check_keys(self, head: StretchHead, point: LogPoint, values: Collection[_Value]) -> None:
        """Whether all processes together have the keys that their arrays imply."""
        keys = {value.key for value in values if not value.file}
        tail = f"/{ocdbt.ZARRAY}"
        described = {
            value.key.removesuffix(tail): value.text for value in values if value.key.endswith(tail)
        }
        try:
            missing = ocdbt.implied(described) ^ keys
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            missing = {f"descriptions of arrays: {error}"}
        if missing or (head.dense and not values):
            name = f"{names.LOG}/{head.stretch}, {point}"
            shown = ", ".join(sorted(missing)[:3]) or "no dense leaf"
            self._add(name, "the dense leaves that its arrays imply", f"a difference in {shown}")
            self._broken.point[point.save_id] = name

    def _look_at_break(self, found: Break, era: Era, process: int) -> None:
        last = None if era.last is None else era.processes[process].by_id.get(era.last)
        if not found.counts or (last is not None and last.place.seq < found.seq):
            return
        name = found.segment.shown(4)
        # What a later stretch goes on from was there.
        torn = found.is_last and era.last is None
        if torn and not _has_frames_behind(found, process):
            self.notes.append(f"{name}: it ends in a torn frame; its writer was killed, or writes")
            return
        self._tell(name, found.problem)

    def _look_at_ends(self, era: Era) -> None:
        """Processes that have not come as far as others."""
        newest = {
            process: max((one.attempt for one in log.by_id), default=0)
            for process, log in era.processes.items()
        }
        behind = [process for process in newest if newest[process] < max(newest.values())]
        if behind:
            self.notes.append(
                f"{names.LOG}/{era.head.stretch}: the processes {behind} have not come as far as "
                "the others; marks that they lack are no points"
            )

    def verdicts(self, steps: Mapping[int, SaveId]) -> tuple[PointVerdict, ...]:
        """Whether each full point can be restored."""
        history = self._found.history
        if history is None:
            return ()
        ways, unreached = coverings(history, steps)
        found = [verdict for one in ways for verdict in self._along(one)]
        if self._trimmed:
            self.notes.append(f"{len(self._trimmed)} marks were trimmed while they were verified")
        newest = max((step for step in steps if history.has_step(steps[step])), default=-1)
        # What lies below a step was trimmed, unless something is wrong.
        lost = [one for one in unreached if one.full and (one.step > newest or self.problems)]
        if lost:
            expected = f"marks from a step that can be restored to {lost[-1]}, and to later ones"
            self._add(f"{names.LOG}/{lost[-1].stretch}", expected, "that some are missing")
        found += [
            PointVerdict(point=point, step=None, broken_by="no step leads to it by whole marks")
            for point in lost
        ]
        return tuple(sorted(found, key=lambda one: (one.point.stretch, one.point.save_id.attempt)))

    def _along(self, found: Covering) -> Iterator[PointVerdict]:
        """Verdicts of the points that a way comes by."""
        order = [
            (leg.head.stretch, mark.save_id.attempt, mark.save_id)
            for leg in found.way.legs
            for marks in leg.marks.values()
            for mark in marks
        ]
        bad = [one for one in sorted(order) if one[2] in self._broken.rows]
        for point in found.points:
            if not point.full or point.save_id in self._trimmed:
                continue
            own = self._broken.point.get(point.save_id)
            place = point.stretch, point.save_id.attempt
            before = next((mark for *at, mark in bad if tuple(at) <= place), None)
            broken_by = own or ("" if before is None else self._broken.rows[before])
            step = None if broken_by else found.way.step.step
            yield PointVerdict(point=point, step=step, broken_by=broken_by)

    def _tell(self, name: str, error: Exception) -> None:
        if isinstance(error, Damaged):
            self._add(name, error.expected, error.found)
        else:
            self._add(name, "what this deltackpt can read", str(error))

    def _add(self, name: str, expected: str, found: str) -> None:
        self.problems.append(
            Problem(object_name=name, expected=expected, found=found, stops="points")
        )


def _object_of(error: Exception) -> str:
    return error.object_name if isinstance(error, Damaged) else names.LOG


#: Says of a mark that its dense leaves are not whole: what is wrong, or which object was.
_Void = Callable[[Mark, Damaged | StorageError | str], None]


class _Value(NamedTuple):
    """A value of a mark: of one that describes an array its bytes, of others none."""

    file: bool
    key: str
    text: bytes

    @classmethod
    def of(cls, file: bool, key: str, data: memoryview) -> _Value:
        """What is to be known of it."""
        return cls(file, key, bytes(data) if key.endswith(f"/{ocdbt.ZARRAY}") else b"")


class _DenseCheck:
    """Checks the dense leaves of the marks of one process, oldest first."""

    def __init__(self, stretch: int, process: int, log: ProcessLog, marks: Sequence[Mark]):
        self._reader = ProcessDense(stretch, process, log)
        self._before = DenseKept()
        #: Numbers of calls whose marks hold blocks that are not whole, likewise.
        self._broken_marks: dict[int, str] = {}
        every = [frame for mark in marks for frame in mark.frames_of(Kind.DENSE)]
        #: Frames that others are the difference to; these alone are kept until then.
        self._wanted = {value.against for frame in every for value in frame.head.values}
        self._held: dict[int, dict[str, memoryview]] = {}
        #: Frames that are not whole, to what was wrong first.
        self._broken: dict[int, str] = {}

    def check(self, mark: Mark, void: _Void) -> list[_Value]:
        """The values of a mark."""
        found = self._check_blocks(mark, void)
        held: dict[int, dict[str, memoryview]] = {}
        for frame in mark.frames_of(Kind.DENSE):
            head: DenseHead = frame.head
            known = (self._broken.get(value.against or 0) for value in head.values)
            if (cause := next(filter(None, known), None)) is not None:
                self._broken[frame.place.seq] = cause
                void(mark, cause)
                continue
            try:
                values = self._decoded(frame)
            except (Damaged, StorageError) as error:
                self._broken[frame.place.seq] = _object_of(error)
                void(mark, error)
                continue
            if frame.place.seq in self._wanted:
                held[frame.place.seq] = values
            found += [_Value.of(one.file, one.key, values[one.key]) for one in head.values]
        if mark.full:
            self._held = held
        return found

    def _check_blocks(self, mark: Mark, void: _Void) -> list[_Value]:
        own, number = mark.frames_of(Kind.BLOCKS), mark.save_id.attempt
        if not own:
            return []
        known = (self._broken_marks.get(logged_dense.against_of(frame) or 0) for frame in own)
        if (cause := next(filter(None, known), None)) is not None:
            self._broken_marks[number] = cause
            void(mark, cause)
            return []
        now = DenseKept()
        try:
            values = self._reader.blocks_of(mark, self._before, now)
        except (Damaged, StorageError) as error:
            self._broken_marks[number] = _object_of(error)
            void(mark, error)
            return []
        self._before = now
        return [_Value.of(file, key, data) for (file, key), data in values.items()]

    def _decoded(self, frame: FrameAt) -> dict[str, memoryview]:
        head: DenseHead = frame.head
        sizes = [value.nbytes for value in head.values]
        found = {}
        bodies = frames.pieces_of(sizes, frame.read(), frame.name)
        for value, data in zip(head.values, bodies, strict=True):
            if value.against is not None:
                before = self._held.get(value.against, {}).get(value.key)
                if before is None or before.nbytes != value.decoded_bytes:
                    wanted = f"the value of {value.key} in frame {value.against} before"
                    raise Damaged(frame.name, wanted, "none")
                data = logged_dense.undiffered(data, before, value.itemsize, frame.name)
            found[value.key] = data
        return found


def _has_frames_behind(found: Break, process: int) -> bool:
    """Whether a frame begins behind the place where a segment breaks off, and its head is whole.

    What stands before a frame is the checksum that its own goes on from.
    """
    try:
        count = found.segment.length() - found.at
        data = memoryview(bytearray(max(0, count)))
        found.segment.store.read_into(found.segment.key, found.at, [data])
    except (Damaged, Missing):
        return False  # It was trimmed.
    text, name = bytes(data), found.segment.shown(4)
    start = text.find(frames.MAGIC, frames.CRC_BYTES)
    while start >= 0:
        if _is_frame(text, start, name, process, found.seq):
            return True
        start = text.find(frames.MAGIC, start + 1)
    return False


def _is_frame(text: bytes, start: int, name: str, process: int, seq: int) -> bool:
    """Whether the head of a frame of a process, not before ``seq``, is whole there."""
    end = start + frames.PREFIX_BYTES
    if end > len(text):
        return False
    try:
        prefix = frames.prefix_of(text[start:end], name)
        before = frames.body_crc32c(text[start - frames.CRC_BYTES : start])
        frames.head_of(prefix, text[end : end + prefix.head_bytes], before, name)
    except (Damaged, FormatTooNew):
        return False
    return prefix.place.process == process and prefix.place.seq >= seq
