# SPDX-License-Identifier: Apache-2.0
"""Blocks of dense leaves, read and decoded along a chain: a stretch of a leaf at a time.

A stretch goes through all saves that have something to say of it while it is in the cache; other
stretches go through theirs on other threads. What the saves hold is decompressed a chunk at a time,
when the first stretch asks for it, and given up behind the last.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from deltackpt.codecs import of_blocks
from deltackpt.errors import Damaged, OptionError, StorageError
from deltackpt.format.dense_blocks import BLOCK, BLOCKS, PLAIN, DenseBlocks, Key
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.segments import ArrayEntry, Segment

#: Of a leaf, decoded on one thread.
_STRETCH_BYTES = 4 << 20
#: What a codec that cannot change scattered blocks where they lie is given at once.
_GATHERED_BLOCKS = 1024


class Source(Protocol):
    """What one process wrote of dense leaves, in a step or in a mark."""

    @property
    def name(self) -> str:
        """How errors name it."""
        ...

    @property
    def record(self) -> DenseBlocks:
        """What it is."""
        ...

    def read(self, segment: Segment, entry: ArrayEntry, start: int, stop: int) -> np.ndarray:
        """Rows of a stored array, verified; from any thread.

        Raises:
          Damaged: they are missing or altered.
        """
        ...


@dataclasses.dataclass(eq=False)
class Leaf:
    """The value of a key on its way.

    Attributes:
      key: see ``Key``.
      data: (blocks, 256), or (n,) uint8.
      count: numbers; of a plain value bytes.
      writable: gives what is written in the place of ``data``; None where it is that itself.
      complete: (blocks,) bool, what some save completes; of a plain value (1,). Memory that nobody
        wrote yet is none: a record may claim any length.
    """

    key: Key
    data: np.ndarray
    count: int = -1
    writable: Callable[[Key], np.ndarray] | None = None
    complete: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.complete = np.zeros(len(self.data) if self.data.ndim == 2 else 1, bool)
        if not self.data.size:
            self.complete[:] = True
        if self.count < 0:
            self.count = self.data.size

    def begin(self) -> None:
        """Called before anything of it is written."""
        if self.writable is not None:
            self.data, self.writable = self.writable(self.key), None

    def lacks(self, numbers: np.ndarray) -> bool:
        """Whether some of these blocks, which ascend, are not complete."""
        if not len(numbers):
            return False
        # Mostly none is, which is quicker to see than to look each of them up.
        around = self.complete[numbers[0] : numbers[-1] + 1]
        return not around.any() or not self.complete[numbers].all()

    @property
    def bytes(self) -> np.ndarray:
        """The bytes of the value, (n,) uint8."""
        return self.data.reshape(-1)[: self.count].view(np.uint8)

    @property
    def stretch(self) -> int:
        """How many blocks are decoded on one thread."""
        return max(1, _STRETCH_BYTES // (BLOCK * self.data.itemsize))


class Chunk:
    """Some blocks of a segment as they are stored: read when they are first asked for."""

    def __init__(self, source: Source, segment: Segment, start: int, stop: int):
        """Reads nothing yet.

        Args:
          source: whose segment it is.
          segment: that it is of.
          start: its first block in the segment.
          stop: its last + 1.
        """
        self.codec = codec_of(segment, source.name)
        self.users = 0
        self._source = source
        self._segment = segment
        self._range = start, stop
        self._lock = threading.Lock()
        self._arrays: dict[str, np.ndarray] | None = None
        self._ends: np.ndarray | None = None

    def decode(self, at: slice, numbers: np.ndarray, leaf: Leaf) -> None:
        """Changes blocks of a leaf to what they were in this save.

        Args:
          at: of the segment.
          numbers: where the leaf has them.
          leaf: as the save before left it.

        Raises:
          Damaged: they are missing or altered.
        """
        arrays = self._cut(at)
        try:
            # What older saves say of blocks that a newer one completes is no number.
            with np.errstate(all="ignore"):
                _decode(self.codec, arrays, numbers, leaf.data)
        except ValueError as error:
            shown = f"{self._source.name}, {self._segment.name}"
            raise Damaged(shown, "codes of its blocks", str(error)) from error
        self._used()

    def prepare(self) -> None:
        """Reads it before it is asked for; what is wrong is raised when it is."""
        with self._lock, contextlib.suppress(Damaged, StorageError):
            if self._arrays is None and self.users:
                self._read()

    def _cut(self, at: slice) -> dict[str, np.ndarray]:
        """The stored arrays of some blocks."""
        with self._lock:
            if self._arrays is None:
                self._read()
            arrays, ends = self._arrays, self._ends
        assert arrays is not None
        stored = self.codec.stored(dtype_of(self._segment.group))
        low, high = at.start - self._range[0], at.stop - self._range[0]
        found = {}
        for suffix, array in stored.items():
            if array.ragged:
                assert ends is not None
                found[suffix] = arrays[suffix][ends[low] : ends[high]]
            else:
                found[suffix] = arrays[suffix][low:high]
        return found

    def _read(self) -> None:
        source, segment = self._source, self._segment
        entries = {entry.name: entry for entry in segment.arrays}
        found: dict[str, np.ndarray] = {}
        stored = self.codec.stored(dtype_of(segment.group))
        for suffix, array in stored.items():
            name = f"{BLOCKS}.{suffix}" if suffix else BLOCKS
            entry = _entry(entries, name, array, segment, source.name)
            start, stop = (0, entry.shape[0]) if array.ragged else self._range
            found[suffix] = source.read(segment, entry, start, stop)
        if any(array.ragged for array in stored.values()):
            # Summing numbers of another width in one call takes thrice as long.
            self._ends = np.zeros(len(found["count"]) + 1, np.int64)
            self._ends[1:] = found["count"]
            np.cumsum(self._ends, out=self._ends)
        self._arrays = found

    def _used(self) -> None:
        with self._lock:
            self.users -= 1
            if not self.users:
                self._arrays = self._ends = None


class Task(NamedTuple):
    """What a save says of some blocks of a stretch."""

    chunk: Chunk
    at: slice
    numbers: np.ndarray


class Lanes:
    """What is to be decoded, by stretches of leaves."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._lanes: dict[tuple[int, int], tuple[Leaf, list[Task]]] = {}

    def add(self, leaf: Leaf, chunk: Chunk, at: slice, numbers: np.ndarray) -> bool:
        """Adds what is needed of some blocks; of saves the newest first.

        Args:
          leaf: that they are of.
          chunk: that holds them.
          at: of the segment.
          numbers: where the leaf has them; ascending.

        Returns:
          Whether anything is needed: what newer saves complete is not.
        """
        size, added = leaf.stretch, False
        first, last = int(numbers[0]) // size, int(numbers[-1]) // size
        cuts = np.searchsorted(numbers, np.arange(first + 1, last + 1) * size)
        for number, low, high in zip(
            range(first, last + 1), [0, *cuts], [*cuts, len(numbers)], strict=True
        ):
            some = numbers[low:high]
            if leaf.lacks(some):
                part = slice(at.start + int(low), at.start + int(high))
                lane = self._lanes.setdefault((id(leaf), number), (leaf, []))
                lane[1].append(Task(chunk, part, some))
                leaf.begin()
                chunk.users += 1
                added = True
        return added

    def prepare(self, pool: concurrent.futures.Executor) -> None:
        """Begins to read what the first stretch needs: its threads would wait for one another."""
        for _, tasks in itertools.islice(self._lanes.values(), 1):
            for task in reversed(tasks):
                pool.submit(task.chunk.prepare)

    def filled(self, leaf: Leaf, start: int, stop: int) -> None:
        """Decodes the stretches that lie in a range of a leaf's bytes: it is in the cache now.

        What the oldest save goes on from is there.

        Raises:
          Damaged: something is missing or altered.
        """
        nbytes = leaf.stretch * BLOCK * leaf.data.itemsize
        whole = stop == leaf.bytes.nbytes
        for number in range(-(-start // nbytes), -(-stop // nbytes) if whole else stop // nbytes):
            lane = self._lanes.pop((id(leaf), number), None)
            if lane is not None:
                _run(lane)

    def run(self, pool: concurrent.futures.Executor) -> None:
        """Decodes all that is left, of each stretch the oldest save first.

        Raises:
          Damaged: something is missing or altered.
        """
        each(pool, _run, self._lanes.values())


def _run(lane: tuple[Leaf, list[Task]]) -> None:
    leaf, tasks = lane
    for task in reversed(tasks):
        task.chunk.decode(task.at, task.numbers, leaf)


def each(
    pool: concurrent.futures.Executor, call: Callable[..., object], items: Iterable[object]
) -> None:
    """Calls with every item; what is raised is raised here, and calls that have not begun go."""
    futures = [pool.submit(call, item) for item in items]
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()


def chunks_of(source: Source, segment: Segment) -> Iterator[tuple[int, int, Chunk]]:
    """The chunks of a segment, and which of its blocks each has."""
    stored = codec_of(segment, source.name).stored(dtype_of(segment.group))
    count = max(1, segment.count)
    if not any(array.ragged for array in stored.values()):
        sizes = [one.chunk_rows for one in segment.arrays if one.name == BLOCKS]
        count = max(1, min(sizes, default=count))
    for start in range(0, segment.count, count):
        stop = min(segment.count, start + count)
        yield start, stop, Chunk(source, segment, start, stop)


def _decode(
    codec: of_blocks.BlockCodec,
    arrays: Mapping[str, np.ndarray],
    numbers: np.ndarray,
    data: np.ndarray,
) -> None:
    """Decodes blocks to where they lie, or by way of a copy that stays in the cache."""
    if isinstance(codec, of_blocks.Sparse):
        codec.change(arrays, numbers, data)
        return
    first, last = int(numbers[0]), int(numbers[-1]) + 1
    if last - first == len(numbers):
        out = data[first:last]
        codec.decode(arrays, out if codec.relative else None, out)
        return
    for start in range(0, len(numbers), _GATHERED_BLOCKS):
        part = slice(start, start + _GATHERED_BLOCKS)
        some = numbers[part]
        out = data[some] if codec.relative else np.empty((len(some), BLOCK), data.dtype)
        found = {suffix: array[part] for suffix, array in arrays.items()}
        codec.decode(found, out if codec.relative else None, out)
        data[some] = out


def codec_of(segment: Segment, name: str) -> of_blocks.BlockCodec:
    """The codec of a segment's blocks.

    Raises:
      Damaged: there is none of that name; the source is called ``name``.
    """
    used = [encoding.codec for encoding in segment.encodings if encoding.field == BLOCKS]
    try:
        [codec] = used
        return of_blocks.get(codec)
    except (ValueError, OptionError) as error:
        raise Damaged(name, f"a codec of {segment.name}", f"{used}") from error


def check_arrays(source: Source, segment: Segment) -> None:
    """Checks that a segment has the arrays that its codec stores, of as many blocks.

    Raises:
      Damaged: it has not, or its codec is not known.
    """
    if segment.group == PLAIN:
        return
    entries = {entry.name: entry for entry in segment.arrays}
    stored = codec_of(segment, source.name).stored(dtype_of(segment.group))
    for suffix, array in stored.items():
        name = f"{BLOCKS}.{suffix}" if suffix else BLOCKS
        _entry(entries, name, array, segment, source.name)


def _entry(
    entries: Mapping[str, ArrayEntry],
    name: str,
    array: of_blocks.BlockArray,
    segment: Segment,
    shown: str,
) -> ArrayEntry:
    found = entries.get(name)
    expected = f"{array.dtype.name} array {name} of {segment.name}"
    if found is None:
        raise Damaged(shown, expected, "none")
    count = found.shape[0] if array.ragged else segment.count
    if found.shape != (count, *array.trailing) or found.dtype != array.dtype.name:
        raise Damaged(shown, expected, f"{found.dtype}{list(found.shape)}")
    return found
