# SPDX-License-Identifier: Apache-2.0
"""Reads and decodes blocks of dense leaves along a chain, one span of a leaf at a time.

All saves that change a span are applied while it is in the cache; other threads process other
spans. Chunks are decompressed when the first span needs them, and released after the last.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from deltackpt.codecs import of_blocks
from deltackpt.errors import Damaged, OptionError, StorageError
from deltackpt.format import names
from deltackpt.format.dense_blocks import BLOCK, BLOCKS, PLAIN, DenseBlocks, Key
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.segments import ArrayEntry, Segment
from deltackpt.reading.part_arrays import PartArrays
from deltackpt.resources import memory

#: Called with the lengths of what is read.
OnBytes = Callable[[int], None]
#: Bytes of a leaf that one thread decodes at a time.
_STRETCH_BYTES = 4 << 20
#: Blocks per call for codecs that cannot change scattered blocks in place.
_GATHERED_BLOCKS = 1024


def uncounted(nbytes: int) -> None:
    """Ignores the number of bytes read."""


@dataclasses.dataclass(frozen=True, eq=False)
class PartSource:
    """The dense leaves that one process wrote in a step or a WAL record.

    Attributes:
      arrays: its arrays.
      check: see ``PartArrays.check``.
      record: what they are.
      name: its name in errors.
      on_bytes: called with the lengths of what is read.
    """

    arrays: PartArrays
    check: Callable[[Segment], None]
    record: DenseBlocks
    name: str
    on_bytes: OnBytes = uncounted

    def read(self, segment: Segment, entry: ArrayEntry, start: int, stop: int) -> np.ndarray:
        """Returns rows of a stored array, verified; from any thread.

        Raises:
          Damaged: the blocks are missing or altered.
        """
        out = memory.empty_buffer((stop - start, *entry.shape[1:]), np.dtype(entry.dtype))
        self.read_into(segment, entry, start, stop, out)
        return out

    def read_into(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        """Like ``read``, into ``out``; after an error its contents are undefined."""
        self.check(segment)
        self.on_bytes(self.arrays.bytes_of(segment, entry, start, stop))
        self.arrays.read_into(segment, entry, start, stop, out)

    def rows(self, segment: Segment, total: int) -> np.ndarray:
        """Returns the row indices of a segment without ranges, ascending and below ``total``.

        Raises:
          Damaged: they are missing or altered.
        """
        self.check(segment)
        found = np.asarray(self.arrays.row_indices(segment).rows)
        self.on_bytes(self.arrays.stored_bytes(segment, self._gaps(segment)))
        if len(found) and found[-1] >= total:
            raise Damaged(f"{self.name}, {segment.name}", f"rows below {total}", f"{found[-1]}")
        return found

    def _gaps(self, segment: Segment) -> ArrayEntry:
        entry = next((one for one in segment.arrays if one.name == names.GAPS), None)
        if entry is None:
            raise Damaged(self.name, f"row indices of {segment.name}", "none")
        return entry


@dataclasses.dataclass(eq=False)
class Leaf:
    """A value that is being decoded.

    Attributes:
      key: see ``Key``.
      data: (blocks, 256), or (n,) uint8.
      count: number of elements; for a plain value, of bytes.
      writable: returns the array to write instead of ``data``; None to write ``data`` itself.
      is_fresh: whether ``data`` is discarded after an error; raw blocks are then read into it.
      complete: (blocks,) bool, whether some save completes the block; (1,) for a plain value. It
        takes no space before it is written, because a record may claim any length.
    """

    key: Key
    data: np.ndarray
    count: int = -1
    writable: Callable[[Key], np.ndarray] | None = None
    is_fresh: bool = False
    complete: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.complete = np.zeros(len(self.data) if self.data.ndim == 2 else 1, bool)
        if not self.data.size:
            self.complete[:] = True
        if self.count < 0:
            self.count = self.data.size

    def begin(self) -> None:
        """Prepares the value; called before any of it is written."""
        if self.writable is not None:
            self.data, self.writable = self.writable(self.key), None

    def lacks(self, numbers: np.ndarray) -> bool:
        """Returns whether any of some ascending blocks is incomplete."""
        if not len(numbers):
            return False
        # Mostly none is, which is quicker to see than to look each of them up.
        around = self.complete[numbers[0] : numbers[-1] + 1]
        return not around.any() or not self.complete[numbers].all()

    @property
    def bytes(self) -> np.ndarray:
        """Returns the bytes of the value, (n,) uint8."""
        return self.data.reshape(-1)[: self.count].view(np.uint8)

    @property
    def stretch(self) -> int:
        """Returns the number of blocks to decode on one thread."""
        return max(1, _STRETCH_BYTES // (BLOCK * self.data.itemsize))


class Chunk:
    """Some blocks of a segment as they are stored: read on first use."""

    def __init__(self, source: PartSource, segment: Segment, start: int, stop: int):
        """Reads nothing yet.

        Args:
          source: the shard of the segment.
          segment: the segment.
          start: its first block in the segment.
          stop: its last + 1.
        """
        self.codec = codec_of(segment, source.name)
        self.users = 0
        self._source = source
        self._segment = segment
        #: Its blocks in the segment that are read: none is wanted yet.
        self._wanted = stop, start
        self._lock = threading.Lock()
        self._arrays: dict[str, np.ndarray] | None = None
        self._ends: np.ndarray | None = None

    def add_user(self, at: slice) -> None:
        """Counts one more user of some blocks, before anything is read."""
        self.users += 1
        first, last = self._wanted
        self._wanted = min(first, at.start), max(last, at.stop)

    def decode(self, at: slice, numbers: np.ndarray, leaf: Leaf) -> None:
        """Updates blocks of a leaf to their values in this save.

        Args:
          at: location of the segment.
          numbers: indices of the blocks in the leaf.
          leaf: the leaf, with the values of the previous save.

        Raises:
          Damaged: the blocks are missing or altered.
        """
        if leaf.is_fresh and self._is_raw and len(numbers) == numbers[-1] + 1 - numbers[0]:
            entry = self._entry_of("", self.codec.stored(dtype_of(self._segment.group))[""])
            out = leaf.data[numbers[0] : numbers[-1] + 1].view(np.dtype(entry.dtype))
            self._source.read_into(self._segment, entry, at.start, at.stop, out)
            self._used()
            return
        arrays = self._cut(at)
        try:
            # Blocks that a newer save completes may decode to NaN here.
            with np.errstate(all="ignore"):
                _decode(self.codec, arrays, numbers, leaf.data)
        except ValueError as error:
            shown = f"{self._source.name}, {self._segment.name}"
            raise Damaged(shown, "codes of its blocks", str(error)) from error
        self._used()

    def prepare(self) -> None:
        """Prefetches the chunk; errors are raised on first use."""
        with self._lock, contextlib.suppress(Damaged, StorageError):
            if self._arrays is None and self.users and not self._is_raw:
                self._read()

    @property
    def _is_raw(self) -> bool:
        return isinstance(self.codec, of_blocks.Whole)

    def _cut(self, at: slice) -> dict[str, np.ndarray]:
        """Returns the stored arrays of some blocks."""
        with self._lock:
            if self._arrays is None:
                self._read()
            arrays, ends = self._arrays, self._ends
        assert arrays is not None
        stored = self.codec.stored(dtype_of(self._segment.group))
        low, high = at.start - self._wanted[0], at.stop - self._wanted[0]
        found = {}
        for suffix, array in stored.items():
            if array.ragged:
                assert ends is not None
                found[suffix] = arrays[suffix][ends[low] - ends[0] : ends[high] - ends[0]]
            else:
                found[suffix] = arrays[suffix][low:high]
        return found

    def _read(self) -> None:
        stored = self.codec.stored(dtype_of(self._segment.group))
        first, last = self._wanted
        found: dict[str, np.ndarray] = {}
        start, stop = first, last
        if any(array.ragged for array in stored.values()):
            counts = self._array("count", stored["count"], 0, last)
            # Summing numbers of another width in one call takes thrice as long.
            ends = np.zeros(last + 1, np.int64)
            ends[1:] = counts
            np.cumsum(ends, out=ends)
            self._ends, found["count"] = ends[first:], counts[first:]
            start, stop = int(ends[first]), int(ends[last])
        for suffix, array in stored.items():
            if suffix not in found:
                found[suffix] = self._array(suffix, array, start, stop)
        self._arrays = found

    def _array(self, suffix: str, array: of_blocks.BlockArray, start: int, stop: int) -> np.ndarray:
        """Returns rows of a stored array."""
        source, segment = self._source, self._segment
        entry = self._entry_of(suffix, array)
        if stop > entry.shape[0]:
            shown = f"{source.name}, {segment.name}"
            raise Damaged(shown, f"{stop} elements of {entry.name}", f"{entry.shape[0]}")
        return source.read(segment, entry, start, stop)

    def _entry_of(self, suffix: str, array: of_blocks.BlockArray) -> ArrayEntry:
        name = f"{BLOCKS}.{suffix}" if suffix else BLOCKS
        entries = {entry.name: entry for entry in self._segment.arrays}
        return _entry(entries, name, array, self._segment, self._source.name)

    def _used(self) -> None:
        with self._lock:
            self.users -= 1
            if not self.users:
                self._arrays = self._ends = None


class Task(NamedTuple):
    """The changes to some blocks of a span in one save."""

    chunk: Chunk
    at: slice
    numbers: np.ndarray


class Lanes:
    """The decoding work, by spans of leaves."""

    def __init__(self) -> None:
        """Starts without work."""
        self._lanes: dict[tuple[int, int], tuple[Leaf, list[Task]]] = {}

    def add(self, leaf: Leaf, chunk: Chunk, at: slice, numbers: np.ndarray) -> bool:
        """Adds the work that some blocks need; call it for the newest save first.

        Args:
          leaf: the leaf of the blocks.
          chunk: the chunk that contains the blocks.
          at: location of the segment.
          numbers: ascending indices of the blocks in the leaf.

        Returns:
          Whether any block is needed; blocks that newer saves complete are not.
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
                chunk.add_user(part)
                added = True
        return added

    def prepare(self, pool: concurrent.futures.Executor) -> None:
        """Starts to read the data of the first span, on which its threads would otherwise wait."""
        for _, tasks in itertools.islice(self._lanes.values(), 1):
            for task in reversed(tasks):
                pool.submit(task.chunk.prepare)

    def filled(self, leaf: Leaf, start: int, stop: int) -> None:
        """Decodes the spans within a range of a leaf's bytes that is now in the cache.

        The parent's values of the oldest save are present.

        Raises:
          Damaged: an object is missing or altered.
        """
        nbytes = leaf.stretch * BLOCK * leaf.data.itemsize
        whole = stop == leaf.bytes.nbytes
        for number in range(-(-start // nbytes), -(-stop // nbytes) if whole else stop // nbytes):
            lane = self._lanes.pop((id(leaf), number), None)
            if lane is not None:
                _run(lane)

    def run(self, pool: concurrent.futures.Executor) -> None:
        """Decodes all remaining spans, oldest save first.

        Raises:
          Damaged: an object is missing or altered.
        """
        each(pool, _run, self._lanes.values())


def _run(lane: tuple[Leaf, list[Task]]) -> None:
    leaf, tasks = lane
    for task in reversed(tasks):
        task.chunk.decode(task.at, task.numbers, leaf)


def each(
    pool: concurrent.futures.Executor, call: Callable[..., object], items: Iterable[object]
) -> None:
    """Calls a function with every item; raises the first error and drops calls not started."""
    futures = [pool.submit(call, item) for item in items]
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()


def chunks_of(source: PartSource, segment: Segment) -> Iterator[tuple[int, int, Chunk]]:
    """Returns the chunks of a segment, and which of its blocks each has."""
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
    """Decodes blocks in place, or through a copy that stays in the cache."""
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
    """Returns the codec of a segment's blocks.

    Raises:
      Damaged: the codec is unknown; ``name`` is the source's name in errors.
    """
    used = [encoding.codec for encoding in segment.encodings if encoding.field == BLOCKS]
    try:
        [codec] = used
        return of_blocks.get(codec)
    except (ValueError, OptionError) as error:
        raise Damaged(name, f"a codec of {segment.name}", f"{used}") from error


def check_arrays(source: PartSource, segment: Segment) -> None:
    """Checks that a segment has the arrays of its codec, with the right number of blocks.

    Raises:
      Damaged: it lacks an array, or its codec is unknown.
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
