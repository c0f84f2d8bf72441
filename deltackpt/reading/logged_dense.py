# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of a recovery point, from the frames of its records; no jax.

A full record contains its leaves as blocks, relative to those of the previous full record in the
same file; ``dense_values`` applies them like those of steps. Or it contains them whole or, in the
format before blocks, as their XOR with those of an earlier frame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
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
from deltackpt.reading.dense_values import DenseValues, OnBytes, uncounted
from deltackpt.reading.log_files import FrameAt, Mark, ProcessLog, damage_of
from deltackpt.reading.orbax_values import OnFilled, nobody
from deltackpt.reading.stretches import Way
from deltackpt.storage import frame_arrays
from deltackpt.storage.frame_arrays import StoredArray

#: The values of a process's part of the item.
Values = Mapping[Key, memoryview]
#: Whether the value of a key of the database is asked for; files always are.
Wanted = Callable[[str], bool]


def everything(key: str) -> bool:
    """Wants every value."""
    return True


class DenseKept:
    """A cache of the dense leaves read last, from which the next ones may continue."""

    def __init__(self) -> None:
        """Creates an empty cache."""
        #: For records with blocks: epoch, process and record to the decoded values.
        self.marks: dict[tuple[int, int, SaveId], Values] = {}
        #: For frames with values.
        self.frames: dict[tuple[str, Place, int], list[tuple[DenseValue, memoryview]]] = {}


def dense_of(
    way: Way,
    kept: DenseKept | None = None,
    wanted: Wanted = everything,
    *,
    on_bytes: OnBytes = uncounted,
) -> DenseValues:
    """Returns the dense leaves of the recovery point.

    Args:
      way: the replay plan to the recovery point.
      kept: cache of earlier calls with the same ``wanted``; this call adds what it reads.
      wanted: which values; frames with no other contents are not read.
      on_bytes: called with the lengths of the bodies that are read.

    Raises:
      DamagedWal: the leaves are missing or altered.
    """
    values: dict[str, memoryview] = {}
    files: dict[str, memoryview] = {}
    before, now = kept or DenseKept(), DenseKept()
    for process, mark in way.last_marks.items():
        log = way.era.processes[process].log
        dense = ProcessDense(way.era.head.stretch, process, log, wanted, on_bytes)
        with damage_of(mark):
            for (file, key), data in dense.values_of(mark, before, now).items():
                (files if file else values)[key] = data
    if kept is not None:
        kept.marks, kept.frames = now.marks, now.frames
    return DenseValues(values, files)


class ProcessDense:
    """Reads the dense leaves that one process has appended."""

    def __init__(
        self,
        stretch: int,
        process: int,
        log: ProcessLog,
        wanted: Wanted = everything,
        on_bytes: OnBytes = uncounted,
    ):
        """Reads nothing yet.

        Args:
          stretch: sequence number of the epoch.
          process: index of the process.
          log: what it wrote.
          wanted: as for ``dense_of``.
          on_bytes: as for ``dense_of``.
        """
        self._wanted, self._on_bytes = wanted, on_bytes
        self._stretch = stretch
        self._process = process
        self._marks = {mark.save_id.attempt: mark for mark in log.marks}

    def values_of(self, mark: Mark, before: DenseKept, now: DenseKept) -> Values:
        """Returns the process's part of the dense item at a record.

        Args:
          mark: one of its records.
          before: values that were read before.
          now: receives the values that are read.

        Raises:
          Damaged: a frame of it, or of a record that it continues from, is missing or altered.
        """
        found = dict(self.blocks_of(mark, before, now))
        if values := mark.frames_of(Kind.DENSE):
            reader = _ValuesReader(self._marks.values(), before, now, self._wanted, self._on_bytes)
            for frame in values:
                found |= {(value.file, value.key): data for value, data in reader.read(frame)}
        return found

    def blocks_of(self, mark: Mark, before: DenseKept, now: DenseKept) -> Values:
        """See ``values_of``, for its frames of blocks."""
        if not mark.frames_of(Kind.BLOCKS):
            return {}
        sources, held, at = [], None, mark
        while at is not None:
            frames = at.frames_of(Kind.BLOCKS)
            sources.append([FrameSource(frame, self._on_bytes) for frame in frames])
            at = self._before(at)
            held = None if at is None else before.marks.get(self._key(at))
            if held is not None:
                break
        name = sources[0][0].name
        base = None if held is None else _Held(held, name)
        values, files = dense_values.values_of(sources, base, name, self._wanted)
        found = {(False, key): data for key, data in values.items()}
        found |= {(True, key): data for key, data in files.items()}
        now.marks[self._key(mark)] = found
        return found

    def _key(self, mark: Mark) -> tuple[int, int, SaveId]:
        return self._stretch, self._process, mark.save_id

    def _before(self, mark: Mark) -> Mark | None:
        """Returns the record that the leaves of one are relative to; None if they are whole.

        Raises:
          Damaged: the record does not exist.
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
            raise Damaged(own[0].name, f"an earlier record {number} that it is relative to", "none")
        return found


def against_of(frame: FrameAt) -> int | None:
    """Returns the call number of the record that a frame of blocks is relative to, or None."""
    head: BlocksHead = frame.head
    return head.against


class _Held(NamedTuple):
    """The values of an earlier record; see ``dense_values.Base``."""

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
                expected = f"{len(out)} bytes of {key[1]} in the previous record"
                raise Damaged(self.name, expected, have)
            out[:] = np.frombuffer(data, np.uint8)


class FrameSource:
    """The blocks of a frame; see ``dense_values.Source``. Its body is read once and verified."""

    def __init__(self, frame: FrameAt, on_bytes: OnBytes = uncounted):
        """Reads nothing yet.

        Args:
          frame: a frame of kind ``BLOCKS``.
          on_bytes: as for ``dense_of``.
        """
        self._frame, self._on_bytes = frame, on_bytes
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

    def rows(self, segment: Segment, total: int) -> np.ndarray:
        """See ``Source``."""
        return dense_values.gap_rows(self, segment, total)

    def _read(self) -> dict[tuple[str, str], StoredArray]:
        head = self._head
        self._on_bytes(self._frame.body_bytes)
        stored = frame_arrays.stored_of(head.arrays, head.sizes, self._frame.read(), self.name)
        names = [
            (segment.name, entry.name)
            for segment in head.record.segments
            for entry in segment.arrays
        ]
        return dict(zip(names, stored, strict=True))


# Frames of values.


class _ValuesReader:
    """Reads frames of values of one process; resolves differences."""

    def __init__(
        self,
        marks: Iterable[Mark],
        before: DenseKept,
        now: DenseKept,
        wanted: Wanted,
        on_bytes: OnBytes,
    ):
        self._wanted, self._on_bytes = wanted, on_bytes
        self._before, self._now = before.frames, now.frames
        self._frames = {
            frame.place.seq: frame for mark in marks for frame in mark.frames_of(Kind.DENSE)
        }

    def read(self, frame: FrameAt) -> list[tuple[DenseValue, memoryview]]:
        """Returns the wanted values of a frame, as they were appended.

        Raises:
          Damaged: it, or one that it needs, is missing or altered.
        """
        head: DenseHead = frame.head
        if not any(self._is_wanted(value) for value in head.values):
            return []
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
            raise Damaged(frame.name, f"one frame {seq} that it is relative to", "none")
        return self._frames[seq]

    def _decoded(
        self, frame: FrameAt, held: Mapping[str, memoryview]
    ) -> list[tuple[DenseValue, memoryview]]:
        head: DenseHead = frame.head
        sizes = [value.nbytes for value in head.values]
        self._on_bytes(frame.body_bytes)
        bodies = frames.pieces_of(sizes, frame.read(), frame.name)
        found = []
        for value, data in zip(head.values, bodies, strict=True):
            if not self._is_wanted(value):
                continue
            if value.against is not None:
                before = held.get(value.key)
                if before is None or before.nbytes != value.decoded_bytes:
                    raise Damaged(frame.name, f"an earlier value of {value.key}", "none")
                data = undiffered(data, before, value.itemsize, frame.name)
            found.append((value, data))
        return found

    def _is_wanted(self, value: DenseValue) -> bool:
        return value.file or self._wanted(value.key)


def _key(frame: FrameAt) -> tuple[str, Place, int]:
    return str(frame.segment), frame.place, frame.body_crc32c


def undiffered(data: memoryview, before: memoryview, itemsize: int, name: str) -> memoryview:
    """Returns a value from its difference to another value of the same length.

    Args:
      data: the difference: XOR, split into byte planes, compressed with zstd.
      before: the other value.
      itemsize: bytes per element.
      name: its name in errors.

    Raises:
      Damaged: the data is not such a difference.
    """
    nbytes = before.nbytes
    try:
        # Decompression allocates as many bytes as the data claim.
        if (claimed := zstandard.frame_content_size(data)) != nbytes:
            raise Damaged(name, f"a difference of {nbytes} bytes", f"{claimed} bytes")
        plain = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise Damaged(name, "zstd data", str(error)) from error
    if nbytes % itemsize:
        raise Damaged(name, f"elements of {itemsize} bytes", f"{nbytes} bytes")
    planes = np.frombuffer(plain, np.uint8).reshape(itemsize, -1)
    found = np.ascontiguousarray(planes.T).reshape(-1)
    return np.bitwise_xor(found, np.frombuffer(before, np.uint8)).data
