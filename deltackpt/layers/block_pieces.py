# SPDX-License-Identifier: Apache-2.0
"""Blocks of dense leaves: stored blocks of a segment, decoded onto the older ones in place.

Leaves may be so small that reading each on its own would take most of the time. A few blocks are
therefore read together with adjacent ones, in *windows*.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from deltackpt import codecs
from deltackpt.cached import cached_property
from deltackpt.codecs.block_codecs import BlockCodec
from deltackpt.errors import Damaged
from deltackpt.format import row_blocks
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.row_blocks import BLOCKS, ArrayEntry, Rows, Segment, StoredRows
from deltackpt.layers.row_indices import Source
from deltackpt.layers.targets import Target
from deltackpt.resources import host_memory
from deltackpt.resources.runtime import Memory, Task

#: The last few windows are kept: three threads read, and a piece may need two.
_WINDOW_BYTES, _WINDOWS = 1 << 20, 6
#: Suffix of the array with the number of elements of each block in ragged arrays.
_COUNT = "count"
_Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]


class BlockField:
    """The blocks of one segment; ``stored`` has the array of each suffix of their codec."""

    def __init__(self, layer: Source, segment: Segment, codec: BlockCodec):
        self.layer, self.segment, self.codec = layer, segment, codec
        entries = {one.name: one for one in segment.arrays}
        kinds = codec.stored(dtype_of(segment.group))
        self.stored = {suffix: entries[codecs.array_name(BLOCKS, suffix)] for suffix in kinds}
        self.nbytes = sum(entry.nbytes for entry in self.stored.values())
        self._ragged = {suffix for suffix, array in kinds.items() if array.ragged}
        #: End of the last block that a piece needs: segments may claim many more.
        self._stop = 0
        #: Array and number to the windows that were used last.
        self._windows: dict[tuple[str, int], Task[np.ndarray]] = {}
        self._lock = threading.Lock()
        #: Reads ``_counts`` once.
        self._counting: Task[np.ndarray] | None = None

    def piece(self, held: StoredRows, target: Target) -> BlockPiece:
        """Returns some blocks of a target; make all pieces before you run one."""
        stop = held.first + len(held.rows)
        self._stop = max(self._stop, stop)
        return BlockPiece(self, held.rows, held.first, stop, target)

    def name_of(self, suffix: str = "") -> str:
        """Returns the name of a stored array in errors."""
        return self.layer.name_of(self.segment, self.stored[suffix])

    def arrays(self, start: int, stop: int, allocate: _Allocate) -> dict[str, np.ndarray]:
        """Returns the stored arrays of some blocks by suffix; raises Damaged."""
        found = {}
        for suffix, entry in self.stored.items():
            if suffix == _COUNT and self._ragged:
                found[suffix] = self._counts[start:stop]
            else:
                found[suffix] = self._read(entry, *self._elements(suffix, start, stop), allocate)
        return found

    def read_ahead(self, start: int, stop: int) -> None:
        """Reads the windows of some blocks, except those that another thread is reading."""
        for suffix, entry in self.stored.items():
            if suffix != _COUNT or not self._ragged:
                first, last = self._elements(suffix, start, stop)
                if self.has_window(entry, first, last):
                    for number in _windows_of(entry, first, last):
                        self._window(entry, number).run()

    def has_window(self, entry: ArrayEntry, start: int, stop: int) -> bool:
        """Returns whether some elements of an array are read together with adjacent ones."""
        return 0 < stop - start <= _window_rows(entry) // 4

    def _elements(self, suffix: str, start: int, stop: int) -> tuple[int, int]:
        """Returns the elements of a stored array that belong to some blocks."""
        if suffix not in self._ragged:
            return start, stop
        first, last = int(self._begins[start]), int(self._begins[stop])
        if last > (count := self.stored[suffix].shape[0]):
            raise Damaged(self.name_of(suffix), f"{last} elements", f"{count}")
        return first, last

    def _read(self, entry: ArrayEntry, start: int, stop: int, allocate: _Allocate) -> np.ndarray:
        if not self.has_window(entry, start, stop):
            out = allocate((stop - start, *entry.shape[1:]), np.dtype(entry.dtype))
            self.layer.read_into(self.segment, entry, start, stop, out)
            return out
        found = []
        for number in _windows_of(entry, start, stop):
            at = number * _window_rows(entry)
            found.append(self._window(entry, number).result()[max(0, start - at) : stop - at])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _window(self, entry: ArrayEntry, number: int) -> Task[np.ndarray]:
        """Returns a window; other threads wait for its result instead of reading it, too."""
        start = number * _window_rows(entry)
        stop = min(start + _window_rows(entry), entry.shape[0])

        def read() -> np.ndarray:
            held = np.empty((stop - start, *entry.shape[1:]), entry.dtype)
            self.layer.read_into(self.segment, entry, start, stop, held)
            return held

        key = entry.name, number
        with self._lock:
            if key not in self._windows:
                self._windows[key] = Task(read)
                for oldest in [*self._windows][: -_WINDOWS * len(self.stored)]:
                    del self._windows[oldest]
            return self._windows[key]

    @property
    def _counts(self) -> np.ndarray:
        """Element counts of the needed blocks in ragged arrays."""

        def read() -> np.ndarray:
            found = np.empty(self._stop, self.stored[_COUNT].dtype)
            self.layer.read_into(self.segment, self.stored[_COUNT], 0, self._stop, found)
            return found

        with self._lock:
            task = self._counting = self._counting or Task(read)
        return task.result()

    @cached_property
    def _begins(self) -> np.ndarray:
        """Where the elements of each of these blocks begin, int64; and the end of the last."""
        counts = self._counts
        found = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=found[1:])
        return found


class BlockPiece(NamedTuple):
    """Blocks at positions ``[start, stop)`` of a segment; see ``layers.merge.Work``.

    ``rows`` are their numbers in the target, which contains the older ones.
    """

    field: BlockField
    rows: Rows
    start: int
    stop: int
    target: Target

    @property
    def nbytes(self) -> int:
        """Stored bytes of the piece."""
        return self.field.nbytes * (self.stop - self.start) // max(1, self.field.segment.count)

    def read_ahead(self) -> None:
        """Reads windows that ``run`` needs, so that it does not wait for other threads."""
        self.field.read_ahead(self.start, self.stop)

    def run(self, memory: Memory) -> None:
        """See ``layers.merge.Work``."""
        codec, field = self.field.codec, self.field
        first, stop = (row - self.target.rows[0] for row in row_blocks.reach(self.rows))
        buffer, is_whole = self.target.buffer[first:stop], stop - first == len(self.rows)
        if is_whole and not codec.relative:
            if codec.name == "raw" and not field.has_window(
                field.stored[""], self.start, self.stop
            ):
                out = buffer.view(codecs.stored_dtype(buffer.dtype))
                field.layer.read_into(field.segment, field.stored[""], self.start, self.stop, out)
                return
            host_memory.populate(buffer)
        lent: list[np.ndarray] = []

        def allocate(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            lent.append(memory.allocate(shape, dtype))
            return lent[-1]

        try:
            arrays = field.arrays(self.start, self.stop, allocate)
            # Blocks that a newer save replaces may decode to NaN here.
            with np.errstate(all="ignore"):
                rows: Rows = range(first, stop)
                if not is_whole:
                    rows = np.asarray(row_blocks.shifted(self.rows, -self.target.rows[0]))
                codec.decode(arrays, rows, self.target.buffer)
        except (IndexError, ValueError) as error:
            raise Damaged(field.name_of(), "codes of its blocks", str(error)) from error
        finally:
            memory.give_back(lent)


def _window_rows(entry: ArrayEntry) -> int:
    return max(1, _WINDOW_BYTES * entry.shape[0] // max(1, entry.nbytes))


def _windows_of(entry: ArrayEntry, start: int, stop: int) -> range:
    """Returns the numbers of the windows with some elements."""
    size = _window_rows(entry)
    return range(start // size, (stop - 1) // size + 1)
