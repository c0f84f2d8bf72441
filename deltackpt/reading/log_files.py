# SPDX-License-Identifier: Apache-2.0
"""The WAL of one process: scans segments of frames for records, without reading their rows.

A WAL ends at a torn frame, whose writer was killed or is still writing it. Frames in a later
segment are still valid, because the segment names the frame that it continues from. The records'
parents show whether the records before and after a hole belong together. After a failed write, a
new *part* begins, which names the last valid frame of the previous part.

Frames are numbered without gaps, so any other loss or change is detected: see ``holes``. Records
missing at the end are detected because the writer stores its newest durable one beside the
segments.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from deltackpt.errors import Damaged, DamagedWal, FormatTooNew
from deltackpt.format import frames, names
from deltackpt.format.frames import BeginHead, Kind, MarkHead, Place
from deltackpt.format.manifest import SaveId
from deltackpt.format.names import SegmentPlace
from deltackpt.reading.log_progress import Noted, newest_durable
from deltackpt.storage.store import FileStore, Missing, Spot, Stamp

#: Read at once while a log is looked through: heads are small, and rows are passed over.
_WINDOW_BYTES = 64 << 10
#: Read at once of a body that is only checked.
_CHECKED_BYTES = 8 << 20
#: A power cut may leave this in place of a file's last pages; a frame never ends like this.
_ZEROS = bytes(16)


class FrameAt(NamedTuple):
    """A frame whose header was read.

    Attributes:
      segment: path of the segment file.
      start: offset of its body in the file.
      body_bytes: size of its body in bytes.
      kind: kind of its contents.
      place: its position in the WAL.
      head: its header.
      head_crc32c: checksum of its header; the body's checksum continues it.
      body_crc32c: the checksum stored after the body.
    """

    segment: Spot
    start: int
    body_bytes: int
    kind: Kind
    place: Place
    head: Any
    head_crc32c: int
    body_crc32c: int

    @property
    def name(self) -> str:
        """Returns its name in errors."""
        return f"{self.segment.shown(4)}, frame {self.place.seq}"

    @property
    def end(self) -> int:
        """Returns the offset of the next frame in the file."""
        return self.start + self.body_bytes + frames.CRC_BYTES

    def read(self) -> memoryview:
        """Reads and verifies the body.

        Raises:
          Damaged: it is missing or altered.
        """
        body, name = np.empty(self.body_bytes, np.uint8).data, self.name
        with self.segment.missing_is_damage(name):
            self.segment.store.read_into(self.segment.key, self.start, [body])
        frames.check_body(body, self.head_crc32c, self.body_crc32c, name)
        return body

    def check(self) -> None:
        """Verifies the body in parts.

        Raises:
          Damaged: as for ``read``.
        """
        crc, window = self.head_crc32c, memoryview(bytearray(min(self.body_bytes, _CHECKED_BYTES)))
        with self.segment.missing_is_damage(self.name):
            for start in range(0, self.body_bytes, _CHECKED_BYTES):
                part = window[: self.body_bytes - start]
                self.segment.store.read_into(self.segment.key, self.start + start, [part])
                crc = frames.extended(crc, part)
        if crc != self.body_crc32c:
            raise Damaged(self.name, f"crc32c {self.body_crc32c:08x}", f"crc32c {crc:08x}")


class Mark(NamedTuple):
    """A WAL record of one process: the data that it wrote in one ``append()`` call.

    Attributes:
      save_id: id of the record.
      parent: the record or step since which its rows were touched.
      full: whether it has the dense leaves.
      unix_secs: when it was captured.
      place: position of its frame.
      frames: its frames of rows, dense leaves and items.
      nbytes: size in bytes of all its frames.
      end: offset of its end in its segment.
    """

    save_id: SaveId
    parent: SaveId
    full: bool
    unix_secs: float
    place: Place
    frames: tuple[FrameAt, ...]
    nbytes: int
    end: int

    def frames_of(self, *kinds: Kind) -> list[FrameAt]:
        """Returns the record's frames of some kinds."""
        return [frame for frame in self.frames if frame.kind in kinds]


class damage_of:
    """Returns the error for damage, which names the affected record."""

    def __init__(self, mark: Mark):
        """Applies to everything read within the context.

        Args:
          mark: the record.
        """
        self._mark = mark

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Damaged) and not isinstance(error, DamagedWal):
            raise DamagedWal.of(error, self._mark.save_id) from error


class Break(NamedTuple):
    """A position at which the valid frames of a segment end although the file continues.

    Attributes:
      at: the segment's part, and the seq expected of the next frame.
      counts: whether a frame there would be valid, because no later part continues from an earlier
        frame.
      is_torn: whether a writer that was killed, or is still writing, can have caused it.
      step: the newest step of the frames after it; None if unknown.
      problem: what was found instead.
    """

    at: SegmentPlace
    counts: bool
    is_torn: bool
    step: int | None
    problem: Damaged


class Hole(NamedTuple):
    """Records of a process that were durable and are no longer intact.

    Attributes:
      step: their newest step; if unknown, a lower bound.
      before: the first intact record after them; None if the WAL ends there.
      may_be_trimmed: whether they and all earlier records are completely missing.
      problem: what is missing or altered.
    """

    step: int
    before: Mark | None
    may_be_trimmed: bool
    problem: Damaged


@dataclasses.dataclass(eq=False)
class _Scan:
    """How far a segment was scanned.

    Attributes:
      at: where its next frame begins.
      seq: of that frame.
      crc32c: what it continues from.
      after: what the segment records about the previous part.
      pending: frames since the last record.
      problem: why its valid frames end; None at the end of the file.
      rest: what follows there; set on the first request.
      seen: where it ended, and the length of its file, at the last scan.
    """

    at: int = 0
    seq: int = 0
    crc32c: int = 0
    after: frames.After | None = None
    pending: list[FrameAt] = dataclasses.field(default_factory=list)
    problem: Damaged | None = None
    rest: _Rest | None = None
    seen: tuple[int, int] = 0, 0


class ProcessLog:
    """The records of one process, oldest first; ``advance`` reads newly written records."""

    def __init__(self, spot: Spot, stretch: int, process: int):
        """Reads nothing yet.

        Args:
          spot: the directory of its segments.
          stretch: number of the epoch.
          process: index of the process.
        """
        self._spot = spot
        self._stretch = stretch
        self._process = process
        self._scans: dict[SegmentPlace, _Scan] = {}
        self._marks: dict[SegmentPlace, list[Mark]] = {}
        self._stamp: Stamp | None = None
        #: The newest durable mark according to its writer: number of the call, and step.
        self._noted = Noted(0, 0)

    @property
    def noted(self) -> Noted:
        """Returns the newest durable record as of the last scan."""
        return self._noted

    @property
    def marks(self) -> list[Mark]:
        """Returns all valid intact records, oldest first."""
        last = self._last_that_count()
        found = [
            mark
            for place in sorted(self._marks)
            for mark in self._marks[place]
            if mark.place.seq <= last.get(place.part, mark.place.seq)
        ]
        return sorted(found, key=lambda mark: mark.save_id.attempt)

    @property
    def damage(self) -> list[Damaged]:
        """Returns why segments end early: the last one is torn if its writer was killed."""
        return [scan.problem for _, scan in sorted(self._scans.items()) if scan.problem]

    @property
    def breaks(self) -> list[Break]:
        """Returns the positions at which segments break off: ``damage`` with details."""
        last, found = self._last_that_count(), []
        for place, scan in sorted(self._scans.items()):
            if scan.problem is None:
                continue
            if scan.rest is None:
                scan.rest = _rest(self._segment(place), scan, self._process)
            found.append(
                Break(
                    at=SegmentPlace(place.part, scan.seq),
                    counts=scan.seq <= last.get(place.part, scan.seq),
                    is_torn=scan.rest.is_torn and self._may_end_in(place),
                    step=scan.rest.step,
                    problem=scan.problem,
                )
            )
        return found

    def holes(self) -> list[Hole]:
        """Returns missing or altered records, oldest first; a torn end is not a hole."""
        breaks = [one for one in self.breaks if one.counts]
        found, end, newest = [], SegmentPlace(0, 0), None
        for newest in self.marks:
            first = SegmentPlace(newest.place.part, newest.place.seq - len(newest.frames))
            within = [one.problem for one in breaks if end < one.at <= first]
            if within or first.seq != end.seq + 1:
                problem = [*within, self._gap(end.seq + 1, first.seq - 1)][0]
                trimmed = end.seq == 0 and not within
                found.append(Hole(newest.parent.step, newest, trimmed, problem))
            end = SegmentPlace(newest.place.part, newest.place.seq)
        at_end = self._hole_at_end(newest, [one for one in breaks if end < one.at])
        return [*found, *at_end]

    def _hole_at_end(self, newest: Mark | None, breaks: Sequence[Break]) -> Iterator[Hole]:
        """Yields missing or altered parts after the newest record."""
        number, seq, step = 0, 0, -1
        if newest is not None:
            number, seq, step = newest.save_id.attempt, newest.place.seq, newest.save_id.step
        last = self._last_that_count()
        gaps = [at.seq for at in self._scans if seq + 1 < at.seq <= last.get(at.part, at.seq)]
        problems = [one.problem for one in breaks if not one.is_torn]
        if self._noted.number > number:
            expected = f"the WAL record of step {self._noted.step}, which was durable"
            have = "no record" if newest is None else f"none above step {step}"
            missing = Damaged(self._name(seq + 1), expected, have)
            trimmed = newest is None and not problems
            yield Hole(self._noted.step, None, trimmed, [*problems, missing][0])
        elif problems:
            steps = [one.step for one in breaks if one.step is not None]
            yield Hole(max(steps, default=step + 1), None, False, problems[0])
        elif gaps and newest is not None:
            yield Hole(step + 1, None, False, self._gap(seq + 1, min(gaps) - 1))

    def _gap(self, first: int, last: int) -> Damaged:
        return Damaged(self._name(first), f"the frames {first} to {last} in or after it", "none")

    def _name(self, seq: int) -> str:
        """Returns the name, for errors, of the segment that has a frame, or of the previous one."""
        before = [place for place in sorted(self._scans) if place.seq <= seq]
        return self._segment(before[-1]).shown(4) if before else self._spot.shown()

    def _segment(self, place: SegmentPlace) -> Spot:
        return self._spot / names.segment_name(*place)

    def _may_end_in(self, place: SegmentPlace) -> bool:
        """Returns whether the WAL may end within a segment: only a part without a frame follows."""
        later = (one for one in self._scans.items() if one[0] > place)
        return all(one.part > place.part and scan.at == 0 for one, scan in later)

    @property
    def segments(self) -> dict[str, tuple[Mark, ...]]:
        """Returns the records of each segment by its name, oldest first."""
        return {names.segment_name(*at): (*self._marks[at],) for at in sorted(self._marks)}

    def advance(self) -> None:
        """Scans the records written since the last call.

        Raises:
          StorageError: the directory cannot be read.
        """
        if isinstance(self._spot.store, FileStore):
            stamp = self._spot.stamp()
            if self._stamp is not None and not self._stamp.same(stamp):
                # A copy with other bytes may have replaced the directory. In other stores, asking
                # would cost another listing.
                self._scans.clear()
                self._marks.clear()
            self._stamp = stamp
        # Before the segments: what is durable by now is in them.
        self._noted = newest_durable(self._spot)
        places = sorted(
            place for name in self._spot.names() if (place := names.segment_place(name)) is not None
        )
        for gone in self._scans.keys() - {*places}:  # It was trimmed.
            del self._scans[gone], self._marks[gone]
        for place in places:
            scan = self._scans.setdefault(place, _Scan(seq=place.seq))
            self._marks.setdefault(place, [])
            self._look_through(place, scan)

    def _last_that_count(self) -> dict[int, int]:
        """Returns part to its last seq that counts, for parts that others follow."""
        found: dict[int, int] = {}
        for _, scan in sorted(self._scans.items(), reverse=True):
            if scan.after is not None:
                # Frames that no later part continues from do not count.
                for part in range(scan.after.part + 1):
                    found[part] = min(scan.after.seq, found.get(part, scan.after.seq))
        return found

    def _look_through(self, place: SegmentPlace, scan: _Scan) -> None:
        segment = self._segment(place)
        scan.problem = None
        try:
            window = _Window(segment)
        except Missing:
            return  # It was trimmed concurrently.
        try:
            while scan.at < window.length:
                frame = _frame_at(window, segment, scan)
                self._take(place, scan, frame)
        except Damaged as error:
            scan.problem = error
            if scan.seen != (scan.at, window.length):
                scan.seen, scan.rest = (scan.at, window.length), None
        except Missing:
            scan.problem = None  # It was trimmed concurrently.

    def _take(self, place: SegmentPlace, scan: _Scan, frame: FrameAt) -> None:
        expected = Place(place.part, self._process, scan.seq, frame.place.step)
        if frame.place != expected or (frame.kind == Kind.BEGIN) != (scan.at == 0):
            raise Damaged(frame.name, f"a frame at {expected}", f"{frame.kind.name} {frame.place}")
        if isinstance(frame.head, BeginHead):
            if frame.head.stretch != self._stretch:
                found = f"epoch {frame.head.stretch}"
                raise Damaged(frame.name, f"a segment of WAL epoch {self._stretch}", found)
            scan.at, scan.crc32c, scan.after = frame.end, frame.head.crc32c, frame.head.after
            return
        scan.at = frame.end
        scan.seq, scan.crc32c = scan.seq + 1, frame.body_crc32c
        if not isinstance(frame.head, MarkHead):
            scan.pending.append(frame)
            return
        pending, scan.pending = scan.pending, []
        if len(pending) == frame.head.frames:
            self._marks[place].append(_mark(frame, pending))


def _mark(frame: FrameAt, held: Sequence[FrameAt]) -> Mark:
    head: MarkHead = frame.head
    return Mark(
        save_id=head.save_id,
        parent=head.parent,
        full=head.full,
        unix_secs=head.unix_ns / 1e9,
        place=frame.place,
        frames=tuple(held),
        nbytes=sum(one.body_bytes for one in held),
        end=frame.end,
    )


class _Torn(Damaged):
    """A file ends within a frame."""


class _TornBody(_Torn):
    """Handles an end within the body of a frame whose head is whole."""


class _Rest(NamedTuple):
    """The bytes at the end of a segment that are not a frame.

    Attributes:
      is_torn: whether it is the beginning of a frame, as a killed writer leaves it.
      step: the newest step of the frames in it; None if that is not known.
    """

    is_torn: bool
    step: int | None


def _rest(segment: Spot, scan: _Scan, process: int) -> _Rest:
    """Classifies the bytes after the last whole frame of a segment."""
    if isinstance(scan.problem, _TornBody):
        return _Rest(True, None)
    try:
        buffer = bytearray(max(0, segment.length() - scan.at))
        segment.store.read_into(segment.key, scan.at, [memoryview(buffer)])
    except Missing:
        return _Rest(True, None)  # It was trimmed.
    except Damaged:
        return _Rest(False, None)  # A piece is shorter than its name implies.
    data = bytes(buffer)
    behind = _newest_frame(data, segment.shown(4), process, scan.seq)
    if behind is not None:
        return _Rest(False, behind)
    if isinstance(scan.problem, _Torn) or data.endswith(_ZEROS) or not any(data):
        return _Rest(True, None)
    with contextlib.suppress(Damaged):
        prefix = frames.prefix_of(data.ljust(frames.PREFIX_BYTES), segment.shown(4))
        if (prefix.place.process, prefix.place.seq) == (process, scan.seq):
            return _Rest(False, prefix.place.step)
    return _Rest(False, None)


def _newest_frame(data: bytes, name: str, process: int, seq: int) -> int | None:
    """Returns the step of the last frame that begins in some bytes and has an intact head."""
    found, start = None, data.find(frames.MAGIC, frames.CRC_BYTES)
    while start >= 0:
        end = start + frames.PREFIX_BYTES
        with contextlib.suppress(Damaged, FormatTooNew):
            prefix = frames.prefix_of(data[start:end].ljust(frames.PREFIX_BYTES), name)
            # Before a frame is the checksum that its own continues.
            before = frames.body_crc32c(data[start - frames.CRC_BYTES : start])
            frames.head_of(prefix, data[end : end + prefix.head_bytes], before, name)
            if prefix.place.process == process and prefix.place.seq >= seq:
                found = prefix.place.step
        start = data.find(frames.MAGIC, start + 1)
    return found


class _Window:
    """A file with a read-ahead buffer."""

    def __init__(self, segment: Spot):
        self._segment = segment
        self.length = segment.store.length(segment.key)
        self._start, self._data = 0, memoryview(b"")

    def bytes_at(self, start: int, nbytes: int, name: str) -> memoryview:
        """Returns some bytes of it.

        Raises:
          Damaged: it ends before.
        """
        if start + nbytes > self.length:
            raise _Torn(name, f"{start + nbytes} bytes", f"{self.length} bytes")
        if not self._start <= start <= start + nbytes <= self._start + self._data.nbytes:
            count = min(max(nbytes, _WINDOW_BYTES), self.length - start)
            try:
                data = self._read(start, count)
            except Damaged:
                if count == nbytes:
                    raise
                data = self._read(start, nbytes)  # The damage may be behind these bytes.
            self._start, self._data = start, data
        offset = start - self._start
        return self._data[offset : offset + nbytes]

    def _read(self, start: int, nbytes: int) -> memoryview:
        data = memoryview(bytearray(nbytes))
        self._segment.store.read_into(self._segment.key, start, [data])
        return data


def _frame_at(window: _Window, segment: Spot, scan: _Scan) -> FrameAt:
    """Returns the next frame of a segment, without its body.

    Raises:
      Damaged: it is torn, or does not continue the previous one.
    """
    name = f"{segment.shown(4)}, frame {scan.seq}"
    prefix = frames.prefix_of(window.bytes_at(scan.at, frames.PREFIX_BYTES, name), name)
    start = scan.at + frames.PREFIX_BYTES
    data = window.bytes_at(start, prefix.head_bytes, name)
    head = frames.head_of(prefix, data, scan.crc32c, name)
    start += prefix.head_bytes
    try:
        behind = window.bytes_at(start + prefix.body_bytes, frames.CRC_BYTES, name)
    except _Torn as error:
        raise _TornBody(error.object_name, error.expected, error.found) from None
    body_crc32c = frames.body_crc32c(behind)
    if not prefix.body_bytes:
        frames.check_body(memoryview(b""), prefix.crc32c, body_crc32c, name)
    return FrameAt(
        segment=segment,
        start=start,
        body_bytes=prefix.body_bytes,
        kind=Kind(prefix.kind),
        place=prefix.place,
        head=head,
        head_crc32c=prefix.crc32c,
        body_crc32c=body_crc32c,
    )
