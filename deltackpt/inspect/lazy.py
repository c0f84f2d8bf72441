# SPDX-License-Identifier: Apache-2.0
"""Lazy arrays: one field of a table at a step, of which only the rows asked for are read."""

from __future__ import annotations

import collections
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from deltackpt import codecs
from deltackpt.format import blocks
from deltackpt.format.blocks import Box, Rows, Span
from deltackpt.format.manifest import Layout, SaveId, TableEntry
from deltackpt.format.segments import FieldSpec, Segment, width
from deltackpt.inspect.statistics import Statistics, statistics_of
from deltackpt.reading import reader
from deltackpt.reading.chains import read_whole
from deltackpt.reading.reader import StoredRows
from deltackpt.reading.saves import StoredPart, StoredSave
from deltackpt.reading.targets import Targets, empty_buffers
from deltackpt.storage.crc import BLOCK_BYTES
from deltackpt.storage.store import Spot

#: Most memory of what is read at a time, beside the rows asked for.
_WINDOW_BYTES = 64 << 20
#: Item, save, process and name of a segment: a save may take the place of one that was rolled back.
_Place = tuple[Spot, SaveId, int, str]
#: Most memory of row numbers that are kept for the next read.
_ROW_NUMBERS_BYTES = 256 << 20


class LazyArray:
    """One field of a table at a step: it knows its shape and reads the rows that are asked for.

    Indexing is numpy's and gives numpy arrays; ``np.asarray`` reads everything. Each read goes
    through the base and the deltas of the step, the newest row wins, and verifies what it reads.

    Attributes:
      name: ``<table>``, or ``<table>.slot.<name>``.
      shape: (rows, *trailing).
      dtype: of the rows as they were given to ``save()``.
    """

    def __init__(self, saves: Saves, table: TableEntry, spec: FieldSpec):
        """Made by ``Step``."""
        self._saves = saves
        self._table = table
        self._spec = spec
        own = spec.name == blocks.VALUES
        self.name = table.name if own else f"{table.name}.{spec.name}"
        self.shape = (table.rows, *spec.trailing)
        self.dtype = codecs.dtype_of(spec.dtype)

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows in memory."""
        return self.size * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Rows, or parts of them, as numpy would give them.

        Raises:
          IndexError: as numpy's.
          Damaged: an object that is needed is missing or altered; it is named.
          StepGone: the step was removed meanwhile.
        """
        first, rest = _split_index(index, self.shape)
        rows, within = _rows_asked_for(first, self.shape[0])
        found = self.rows(rows)
        return found[(*rest[0], within, *rest[1])]

    def __iter__(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), self.batch_rows):
            yield from self[start : start + self.batch_rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self.name}: expected that a copy may be made, found copy=False")
        found = self.rows(range(self.shape[0]))
        return found if dtype is None else found.astype(dtype, copy=False)

    def rows(self, rows: range | np.ndarray) -> np.ndarray:
        """Whole rows.

        Args:
          rows: ascending row numbers without repetition; a range has step 1.

        Returns:
          (len(rows), *trailing).

        Raises:
          Damaged, StepGone: as ``__getitem__``.
        """
        if not len(rows):
            return np.empty((0, *self.shape[1:]), self.dtype)
        if isinstance(rows, range):
            return self._read([(rows.start, rows.stop)])[0]
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        at = 0
        for windows in _batches(rows, self._near_rows, self.batch_rows):
            for window, found in zip(windows, self._read(windows), strict=True):
                stop = at + int(np.searchsorted(rows[at:], window[1]))
                np.take(found, rows[at:stop] - window[0], axis=0, out=out[at:stop])
                at = stop
        return out

    def batches(self) -> Iterator[range]:
        """All row numbers, in ranges of ``batch_rows``."""
        for start in range(0, len(self), self.batch_rows):
            yield range(start, min(len(self), start + self.batch_rows))

    def statistics(self) -> Statistics:
        """Figures of all its numbers; every row is read, in a moderate amount of memory.

        Raises:
          Damaged, StepGone: as ``__getitem__``.
        """
        return statistics_of(self.rows(rows) for rows in self.batches())

    @property
    def batch_rows(self) -> int:
        """How many rows fit into a moderate amount of memory."""
        return max(1, _WINDOW_BYTES // max(1, self.row_bytes))

    @property
    def _near_rows(self) -> int:
        """Rows that are read with their neighbour anyway, since a block is verified as a whole."""
        return max(1, BLOCK_BYTES // max(1, self.row_bytes))

    def _read(self, spans: Sequence[Span]) -> list[np.ndarray]:
        return self._saves.read(self._table, self._spec, spans)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {list(self.shape)} {self.dtype.name}>"


class Saves:
    """A chain that is read from again and again: what was learnt of it is kept."""

    def __init__(self, saves: Sequence[StoredSave], numbers: RowNumbers | None = None):
        """A chain of ``chains.read_chain``, and what keeps row numbers of saves."""
        self.chain = tuple(saves)
        self.numbers = numbers or RowNumbers()

    @property
    def target(self) -> StoredSave:
        """The save that the chain leads to."""
        return self.chain[-1]

    @functools.cached_property
    def layout(self) -> Layout:
        """Tables and groups of the step."""
        return self.target.layout

    def read(self, table: TableEntry, spec: FieldSpec, spans: Sequence[Span]) -> list[np.ndarray]:
        """Rows of one field of a table, an array for each of some disjoint spans of rows."""

        def read(saves: Sequence[StoredSave]) -> list[np.ndarray]:
            buffers, targets = buffers_of(self.layout, table, spec, spans)
            reader.fill(saves, targets, numbers=self.numbers)
            self.chain = tuple(saves)  # The one that holds, where another did not.
            return buffers

        return read_whole(self.chain, read)


def buffers_of(
    layout: Layout, table: TableEntry, spec: FieldSpec, spans: Sequence[Span]
) -> tuple[list[np.ndarray], Targets]:
    """Memory for some disjoint spans of rows of one field, in their order, and as targets."""
    columns = (0, width(spec.trailing))
    boxes = [Box(span, columns) for span in spans]
    buffers, targets = empty_buffers(layout, {table.name: {spec.name: boxes}})
    held = buffers[table.name][spec.name]
    return [held[box] for box in boxes], targets


class RowNumbers:
    """Row numbers of deltas, decoded once; the least recently used are forgotten. Thread-safe."""

    def __init__(self, most_bytes: int = _ROW_NUMBERS_BYTES):
        """Keeps up to so many bytes."""
        self._most_bytes = most_bytes
        self._nbytes = 0
        self._held: collections.OrderedDict[_Place, np.ndarray] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, part: StoredPart, segment: Segment, targets: Targets) -> StoredRows | None:
        """See ``reader.RowNumbers``."""
        if not targets.want(segment, (0, part.groups[segment.group].rows)):
            return None
        return StoredRows(self.of(part, segment))

    def of(self, part: StoredPart, segment: Segment) -> Rows:
        """Rows of a segment.

        Raises:
          Damaged: row numbers are missing or altered.
        """
        record = part.record
        key = (part.item_dir, record.save_id, record.process, segment.name)
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        found = reader.segment_rows(part, segment)
        if isinstance(found, np.ndarray):
            self._keep(key, found)
        return found

    def _keep(self, key: _Place, found: np.ndarray) -> None:
        with self._lock:
            if key not in self._held:
                self._held[key] = found
                self._nbytes += found.nbytes
            while self._nbytes > self._most_bytes:
                self._nbytes -= self._held.popitem(last=False)[1].nbytes


def _split_index(
    index: Any, shape: tuple[int, ...]
) -> tuple[Any, tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """The index of the rows, and what stands before it (new axes) and after it."""
    ndim = len(shape)
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [np.asarray(part) if isinstance(part, list) else part for part in parts]
    taken = sum(_axes(part) for part in parts)
    dots = [number for number, part in enumerate(parts) if part is Ellipsis]
    if taken > ndim or len(dots) > 1:
        raise IndexError(f"expected at most {ndim} indices and one '...', found {index!r}")
    if dots:
        parts[dots[0] : dots[0] + 1] = [slice(None)] * (ndim - taken)
    first = next((n for n, part in enumerate(parts) if _axes(part)), None)
    if first is None:
        return slice(None), (tuple(parts), ())
    if isinstance(parts[first], np.ndarray) and parts[first].ndim > 1 and _is_mask(parts[first]):
        if parts[first].shape != shape[: parts[first].ndim]:
            raise IndexError(f"expected a mask of {shape}, found one of {parts[first].shape}")
        parts[first : first + 1] = parts[first].nonzero()
    return parts[first], (tuple(parts[:first]), tuple(parts[first + 1 :]))


def _axes(part: Any) -> int:
    """How many axes of the array an index takes."""
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, np.ndarray) and _is_mask(part) else 1


def _is_mask(part: np.ndarray) -> bool:
    return part.dtype == np.bool_


def _rows_asked_for(index: Any, total: int) -> tuple[range | np.ndarray, Any]:
    """Ascending rows to read, and the index that gives from these what was asked for."""
    if isinstance(index, slice):
        rows = range(*index.indices(total))
        if abs(rows.step) == 1:
            within = slice(None, None, rows.step)
            return (rows, within) if rows.step == 1 else (rows[::-1], within)
        ascending = rows if rows.step > 0 else rows[::-1]
        return np.arange(ascending.start, ascending.stop, ascending.step), slice(
            None, None, 1 if rows.step > 0 else -1
        )
    if isinstance(index, np.ndarray) and _is_mask(index):
        if len(index) != total:
            raise IndexError(f"expected a mask of {total} rows, found one of {len(index)}")
        found = np.flatnonzero(index)
        return found, np.arange(len(found))
    asked = np.asarray(index)
    if asked.dtype.kind not in "iu":
        if asked.size:
            raise IndexError(f"expected integers, slices or masks for rows, found {index!r}")
        asked = asked.astype(np.int64)
    asked = asked.astype(np.int64)
    outside = asked[(asked < -total) | (asked >= total)]
    if outside.size:
        raise IndexError(f"expected rows within [0, {total}), found {int(outside.flat[0])}")
    asked = np.where(asked < 0, asked + total, asked)
    rows, within = np.unique(asked, return_inverse=True)
    return rows, within.reshape(asked.shape) if asked.ndim else int(within.reshape(-1)[0])


def _batches(rows: np.ndarray, near: int, most: int) -> Iterator[list[Span]]:
    """Windows over ascending rows, near ones together, in batches of about so many rows."""
    gaps = np.flatnonzero(np.diff(rows) > near) + 1
    windows: list[Span] = []
    held = 0
    for part in np.split(rows, gaps):
        start = int(part[0])
        while start <= part[-1]:
            # A window that is longer than a batch is cut, and goes on at the next row asked for.
            stop = min(int(part[-1]) + 1, start + most)
            if held and held + stop - start > most:
                yield windows
                windows, held = [], 0
            windows.append((start, stop))
            held += stop - start
            following = np.searchsorted(part, stop)
            if following == len(part):
                break
            start = int(part[following])
    if windows:
        yield windows
