# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of a point, from the frames of its marks; no jax.

A full mark holds its leaves as blocks, against those of the full mark before it in the same file:
``dense_values`` applies them as it does those of steps. Or it holds them whole, and in logs of
before there were blocks as their XOR with those of an earlier frame.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import zstandard

from deltackpt.errors import Damaged
from deltackpt.format import frames
from deltackpt.format.dense_blocks import DenseBlocks, Key
from deltackpt.format.frames import BlocksHead, DenseHead, DenseValue, Kind, Place
from deltackpt.format.manifest import SaveId
from deltackpt.format.segments import ArrayEntry, Segment
from deltackpt.reading import dense_values
from deltackpt.reading.dense_values import DenseValues
from deltackpt.reading.log_files import FrameAt, Mark, ProcessLog, damage_of
from deltackpt.reading.orbax_values import OnFilled, nobody
from deltackpt.reading.stretches import Way
from deltackpt.storage import frame_arrays
from deltackpt.storage.frame_arrays import StoredArray

#: The values of a process's part of the item.
Values = Mapping[Key, memoryview]


class DenseKept:
    """Dense leaves that were read last: the next ones may go on from them."""

    def __init__(self) -> None:
        """None were."""
        #: Of marks that hold blocks: stretch, process and mark to what they decode to.
        self.marks: dict[tuple[int, int, SaveId], Values] = {}
        #: Of frames that hold values.
        self.frames: dict[tuple[str, Place, int], list[tuple[DenseValue, memoryview]]] = {}


def dense_of(way: Way, kept: DenseKept | None = None) -> DenseValues:
    """The dense leaves of the point.

    Args:
      way: to the point.
      kept: what an earlier call has read; it gets what this one does.

    Raises:
      DamagedLog: they are missing or altered.
    """
    values: dict[str, memoryview] = {}
    files: dict[str, memoryview] = {}
    before, now = kept or DenseKept(), DenseKept()
    for process, mark in way.last_marks.items():
        log = ProcessDense(way.era.head.stretch, process, way.era.processes[process].log)
        with damage_of(mark):
            for (file, key), data in log.values_of(mark, before, now).items():
                (files if file else values)[key] = data
    if kept is not None:
        kept.marks, kept.frames = now.marks, now.frames
    return DenseValues(values, files)


class ProcessDense:
    """Reads the dense leaves that one process has logged."""

    def __init__(self, stretch: int, process: int, log: ProcessLog):
        """Reads nothing yet.

        Args:
          stretch: number of the stretch.
          process: index of the process.
          log: what it wrote.
        """
        self._stretch = stretch
        self._process = process
        self._marks = {mark.save_id.attempt: mark for mark in log.marks}

    def values_of(self, mark: Mark, before: DenseKept, now: DenseKept) -> Values:
        """What it has of the dense item at a mark.

        Args:
          mark: one of its marks.
          before: what was read before.
          now: gets what is read.

        Raises:
          Damaged: a frame of it, or of a mark that it goes on from, is missing or altered.
        """
        found = dict(self.blocks_of(mark, before, now))
        if values := mark.frames_of(Kind.DENSE):
            reader = _ValuesReader(self._marks.values(), before, now)
            for frame in values:
                found |= {(value.file, value.key): data for value, data in reader.read(frame)}
        return found

    def blocks_of(self, mark: Mark, before: DenseKept, now: DenseKept) -> Values:
        """As ``values_of``, of its frames of blocks."""
        if not mark.frames_of(Kind.BLOCKS):
            return {}
        sources, held, at = [], None, mark
        while at is not None:
            sources.append([FrameSource(frame) for frame in at.frames_of(Kind.BLOCKS)])
            at = self._before(at)
            held = None if at is None else before.marks.get(self._key(at))
            if held is not None:
                break
        name = sources[0][0].name
        base = None if held is None else _Held(held, name)
        values, files = dense_values.values_of(sources, base, name)
        found = {(False, key): data for key, data in values.items()}
        found |= {(True, key): data for key, data in files.items()}
        now.marks[self._key(mark)] = found
        return found

    def _key(self, mark: Mark) -> tuple[int, int, SaveId]:
        return self._stretch, self._process, mark.save_id

    def _before(self, mark: Mark) -> Mark | None:
        """The mark that the leaves of one are against; None where they are whole.

        Raises:
          Damaged: there is none such.
        """
        own = mark.frames_of(Kind.BLOCKS)
        numbers = {against_of(frame) for frame in own}
        if numbers == {None}:
            return None
        [number] = numbers if len(numbers) == 1 else (None,)
        found = None if number is None else self._marks.get(number)
        if (
            found is None
            or found.save_id.attempt >= mark.save_id.attempt
            or not found.frames_of(Kind.BLOCKS)
        ):
            raise Damaged(own[0].name, f"an earlier mark {number} that it is against", "none")
        return found


def against_of(frame: FrameAt) -> int | None:
    """Number of the call whose mark a frame of blocks is against; None where it is whole."""
    head: BlocksHead = frame.head
    return head.against


class _Held(NamedTuple):
    """What was read of an earlier mark; see ``dense_values.Base``."""

    values: Values
    name: str

    def nbytes(self, key: Key) -> int | None:
        """See ``Base``."""
        found = self.values.get(key)
        return None if found is None else found.nbytes

    def fill(self, into: Mapping[Key, np.ndarray], on_filled: OnFilled = nobody) -> None:
        """See ``Base``."""
        for key, out in into.items():
            data = self.values.get(key)
            if data is None or data.nbytes != len(out):
                have = "none" if data is None else f"{data.nbytes}"
                raise Damaged(self.name, f"{len(out)} bytes of {key[1]} in the mark before", have)
            out[:] = np.frombuffer(data, np.uint8)


class FrameSource:
    """The blocks of a frame; see ``dense_values.Source``. Its body is read once, and checked."""

    def __init__(self, frame: FrameAt):
        """Reads nothing yet.

        Args:
          frame: of kind ``BLOCKS``.
        """
        self._frame = frame
        self._head: BlocksHead = frame.head
        self._lock = threading.Lock()
        self._stored: dict[tuple[str, str], StoredArray] | None = None

    @property
    def name(self) -> str:
        """See ``Source``."""
        return self._frame.name

    @property
    def record(self) -> DenseBlocks:
        """See ``Source``."""
        return self._head.record

    def read(self, segment: Segment, entry: ArrayEntry, start: int, stop: int) -> np.ndarray:
        """See ``Source``."""
        with self._lock:
            if self._stored is None:
                self._stored = self._read()
        return self._stored[segment.name, entry.name].rows(start, stop)

    def _read(self) -> dict[tuple[str, str], StoredArray]:
        head = self._head
        stored = frame_arrays.stored_of(head.arrays, head.sizes, self._frame.read(), self.name)
        names = [
            (segment.name, entry.name)
            for segment in head.record.segments
            for entry in segment.arrays
        ]
        return dict(zip(names, stored, strict=True))


# Frames of values.


class _ValuesReader:
    """Reads frames of values of one process; differences by way of what they are against."""

    def __init__(self, marks: Iterable[Mark], before: DenseKept, now: DenseKept):
        self._before, self._now = before.frames, now.frames
        self._frames = {
            frame.place.seq: frame for mark in marks for frame in mark.frames_of(Kind.DENSE)
        }

    def read(self, frame: FrameAt) -> list[tuple[DenseValue, memoryview]]:
        """The values of a frame, as they were.

        Raises:
          Damaged: it, or one that it needs, is missing or altered.
        """
        chain = [frame]
        while (needed := self._needs(chain[-1])) is not None and _key(needed) not in self._before:
            chain.append(needed)
        # Against what is not there is read from the oldest on.
        found = [] if needed is None else self._before[_key(needed)]
        for one in reversed(chain):
            held = {value.key: data for value, data in found}
            found = self._decoded(one, held)
        self._now[_key(frame)] = found
        return found

    def _needs(self, frame: FrameAt) -> FrameAt | None:
        head: DenseHead = frame.head
        against = {value.against for value in head.values} - {None}
        if not against:
            return None
        [seq] = against if len(against) == 1 else (None,)
        if seq not in self._frames:
            raise Damaged(frame.name, f"one frame {seq} that it is the difference to", "none")
        return self._frames[seq]

    def _decoded(
        self, frame: FrameAt, held: Mapping[str, memoryview]
    ) -> list[tuple[DenseValue, memoryview]]:
        head: DenseHead = frame.head
        sizes = [value.nbytes for value in head.values]
        bodies = frames.pieces_of(sizes, frame.read(), frame.name)
        found = []
        for value, data in zip(head.values, bodies, strict=True):
            if value.against is not None:
                before = held.get(value.key)
                if before is None or before.nbytes != value.decoded_bytes:
                    raise Damaged(frame.name, f"a value of {value.key} before", "none")
                data = undiffered(data, before, value.itemsize, frame.name)
            found.append((value, data))
        return found


def _key(frame: FrameAt) -> tuple[str, Place, int]:
    return str(frame.segment), frame.place, frame.body_crc32c


def undiffered(data: memoryview, before: memoryview, itemsize: int, name: str) -> memoryview:
    """A value from its difference to another one of as many bytes.

    Args:
      data: the difference: XOR, as byte planes, by zstd.
      before: what it is to.
      itemsize: of the numbers in it.
      name: how errors name it.

    Raises:
      Damaged: it is none of such a value.
    """
    nbytes = before.nbytes
    try:
        # It takes memory for as many bytes as the data say that there are.
        if (claimed := zstandard.frame_content_size(data)) != nbytes:
            raise Damaged(name, f"a difference of {nbytes} bytes", f"{claimed} bytes")
        plain = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise Damaged(name, "bytes of zstd", str(error)) from error
    if nbytes % itemsize:
        raise Damaged(name, f"numbers of {itemsize} bytes", f"{nbytes} bytes")
    planes = np.frombuffer(plain, np.uint8).reshape(itemsize, -1)
    found = np.ascontiguousarray(planes.T).reshape(-1)
    return np.bitwise_xor(found, np.frombuffer(before, np.uint8)).data
