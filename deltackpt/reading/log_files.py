# SPDX-License-Identifier: Apache-2.0
"""The log of one process: segments of frames, looked through for marks, without their rows.

A torn frame is where a log ends: its writer was killed, or is writing it now. What follows it in
another segment holds all the same, since that says what it goes on from; whether the marks before
and behind a hole belong together is seen from their parents. A further *part* was begun where
writing had failed, and says which frame of the one before is the last that counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from deltackpt.errors import Damaged, DamagedLog
from deltackpt.format import frames, names
from deltackpt.format.frames import BeginHead, Kind, MarkHead, Place
from deltackpt.format.manifest import SaveId
from deltackpt.format.names import SegmentPlace
from deltackpt.storage.store import Missing, Spot

#: Read at once while a log is looked through: heads are small, and rows are passed over.
_WINDOW_BYTES = 64 << 10
#: Read at once of a body that is only checked.
_CHECKED_BYTES = 8 << 20


class FrameAt(NamedTuple):
    """A frame whose head was read.

    Attributes:
      segment: where its file is.
      start: of its body in the file.
      body_bytes: of its body.
      kind: what it holds.
      place: where it stands in the log.
      head: what it says.
      head_crc32c: the checksum of its head, from which that of the body goes on.
      body_crc32c: what stands behind the body.
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
        """How errors name it."""
        return f"{self.segment.shown(4)}, frame {self.place.seq}"

    @property
    def end(self) -> int:
        """Where the next frame of the file begins."""
        return self.start + self.body_bytes + frames.CRC_BYTES

    def read(self) -> memoryview:
        """Its body, checked.

        Raises:
          Damaged: it is missing or altered.
        """
        body = np.empty(self.body_bytes, np.uint8).data
        with self.segment.missing_is_damage(self.name):
            self.segment.store.read_into(self.segment.key, self.start, [body])
        frames.check_body(body, self.head_crc32c, self.body_crc32c, self.name)
        return body

    def check(self) -> None:
        """Checks its body without holding more than some of it.

        Raises:
          Damaged: as ``read``.
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
    """What a process has written of one call of ``log()``.

    Attributes:
      save_id: of the mark.
      parent: of the mark, or of the step, since which its rows are.
      full: whether it has the dense leaves.
      unix_secs: when it was taken.
      place: of its frame.
      frames: those of rows, dense leaves and items.
      nbytes: of all its frames.
      end: where it ends in its segment.
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
        """Its frames of some kinds."""
        return [frame for frame in self.frames if frame.kind in kinds]


class damage_of:
    """Names the mark that what is damaged belongs to."""

    def __init__(self, mark: Mark):
        """Of whatever is read within it.

        Args:
          mark: it.
        """
        self._mark = mark

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Damaged) and not isinstance(error, DamagedLog):
            raise DamagedLog.of(error, self._mark.save_id) from error


class Break(NamedTuple):
    """Where a segment holds no further frame although its file goes on.

    Attributes:
      segment: where its file is.
      at: the first byte that is of no frame.
      seq: that the next frame would have.
      is_last: whether the writer can have been killed there: no segment of its part follows.
      counts: whether a frame there would count: no later part says that it goes on from before.
      problem: what is there instead.
    """

    segment: Spot
    at: int
    seq: int
    is_last: bool
    counts: bool
    problem: Damaged


@dataclasses.dataclass(eq=False)
class _Scan:
    """How far a segment was looked through.

    Attributes:
      at: where its next frame begins.
      seq: of that frame.
      crc32c: what it goes on from.
      after: what the segment says of the part before.
      pending: frames since the last mark.
      problem: why it ends where it does; None where that is its end.
      torn: whether it only lacks bytes, which may be on their way.
    """

    at: int = 0
    seq: int = 0
    crc32c: int = 0
    after: frames.After | None = None
    pending: list[FrameAt] = dataclasses.field(default_factory=list)
    problem: Damaged | None = None
    torn: bool = False


class ProcessLog:
    """The marks of one process, oldest first; ``advance`` takes what was written since."""

    def __init__(self, spot: Spot, stretch: int, process: int):
        """Looks at nothing yet.

        Args:
          spot: the directory of its segments.
          stretch: number of the stretch.
          process: index of the process.
        """
        self._spot = spot
        self._stretch = stretch
        self._process = process
        self._scans: dict[SegmentPlace, _Scan] = {}
        self._marks: dict[SegmentPlace, list[Mark]] = {}

    @property
    def marks(self) -> list[Mark]:
        """All whole marks that count, oldest first."""
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
        """Why segments end before their ends: the last one is torn where its writer was killed."""
        return [scan.problem for _, scan in sorted(self._scans.items()) if scan.problem]

    def altered_above(self, step: int) -> list[Damaged]:
        """What was altered behind marks of a step, or of later ones; a torn end was not."""
        return [
            scan.problem
            for place, scan in sorted(self._scans.items())
            if scan.problem is not None
            and not scan.torn
            and not any(mark.save_id.step < step for mark in self._marks[place][-1:])
        ]

    @property
    def breaks(self) -> list[Break]:
        """Where segments break off: all of ``damage``, with what can be told of it."""
        last = self._last_that_count()
        newest = {place.part: place for place in sorted(self._scans)}
        return [
            Break(
                segment=self._spot / names.segment_name(*place),
                at=scan.at,
                seq=scan.seq,
                is_last=newest[place.part] == place,
                counts=scan.seq <= last.get(place.part, scan.seq),
                problem=scan.problem,
            )
            for place, scan in sorted(self._scans.items())
            if scan.problem is not None
        ]

    @property
    def segments(self) -> dict[str, tuple[Mark, ...]]:
        """The marks of each segment by its name, oldest first."""
        return {names.segment_name(*at): (*self._marks[at],) for at in sorted(self._marks)}

    def advance(self) -> None:
        """Looks through what was not there at the last call.

        Raises:
          StorageError: the directory cannot be read.
        """
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
        """Part to the last seq of it that counts, for those that others follow."""
        found: dict[int, int] = {}
        for _, scan in sorted(self._scans.items(), reverse=True):
            if scan.after is not None:
                # Nothing of any part counts that a later part does not go on from.
                for part in range(scan.after.part + 1):
                    found[part] = min(scan.after.seq, found.get(part, scan.after.seq))
        return found

    def _look_through(self, place: SegmentPlace, scan: _Scan) -> None:
        segment = self._spot / names.segment_name(*place)
        scan.problem = None
        try:
            window = _Window(segment)
            while scan.at < window.length:
                frame = _frame_at(window, segment, scan)
                self._take(place, scan, frame)
        except Damaged as error:
            scan.problem, scan.torn = error, isinstance(error, _Torn)
        except Missing:
            scan.problem = None  # It was trimmed meanwhile.

    def _take(self, place: SegmentPlace, scan: _Scan, frame: FrameAt) -> None:
        expected = Place(place.part, self._process, scan.seq, frame.place.step)
        if frame.place != expected or (frame.kind == Kind.BEGIN) != (scan.at == 0):
            raise Damaged(frame.name, f"a frame at {expected}", f"{frame.kind.name} {frame.place}")
        if isinstance(frame.head, BeginHead):
            if frame.head.stretch != self._stretch:
                found = f"stretch {frame.head.stretch}"
                raise Damaged(frame.name, f"the log of stretch {self._stretch}", found)
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


class _Window:
    """A file, of which some is read ahead."""

    def __init__(self, segment: Spot):
        self._segment = segment
        self.length = segment.store.length(segment.key)
        self._start, self._data = 0, memoryview(b"")

    def bytes_at(self, start: int, nbytes: int, name: str) -> memoryview:
        """Some bytes of it.

        Raises:
          Damaged: it ends before.
        """
        if start + nbytes > self.length:
            raise _Torn(name, f"{start + nbytes} bytes", f"{self.length} bytes")
        if not self._start <= start <= start + nbytes <= self._start + self._data.nbytes:
            count = min(max(nbytes, _WINDOW_BYTES), self.length - start)
            data = memoryview(bytearray(count))
            self._segment.store.read_into(self._segment.key, start, [data])
            self._start, self._data = start, data
        offset = start - self._start
        return self._data[offset : offset + nbytes]


def _frame_at(window: _Window, segment: Spot, scan: _Scan) -> FrameAt:
    """The frame that a segment has next, but for its body.

    Raises:
      Damaged: it is torn, or does not go on from the one before.
    """
    name = f"{segment.shown(4)}, frame {scan.seq}"
    prefix = frames.prefix_of(window.bytes_at(scan.at, frames.PREFIX_BYTES, name), name)
    start = scan.at + frames.PREFIX_BYTES
    data = window.bytes_at(start, prefix.head_bytes, name)
    head = frames.head_of(prefix, data, scan.crc32c, name)
    start += prefix.head_bytes
    behind = window.bytes_at(start + prefix.body_bytes, frames.CRC_BYTES, name)
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


def read_log(spot: Spot, stretch: int, process: int) -> ProcessLog:
    """The log of a process as it stands.

    Args:
      spot: the directory of its segments.
      stretch: number of the stretch.
      process: index of the process.

    Raises:
      StorageError: it cannot be read.
    """
    found = ProcessLog(spot, stretch, process)
    found.advance()
    return found
