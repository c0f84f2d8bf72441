# SPDX-License-Identifier: Apache-2.0
"""Merges saves and WAL records into host buffers; the newest wins. Numpy only.

The planner reads row indices from the newest layer backwards, and skips rows that a newer layer
contains. Each row is therefore decoded and written once. Ranges, such as those of a base, are
merged first, oldest layer first; they are read straight into the buffers, while the planner reads
row indices. Groups whose segments overlap in a part of their fields or columns are merged oldest
first, too.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from deltackpt import codecs
from deltackpt.codecs import block_codecs
from deltackpt.codecs.block_codecs import BlockCodec
from deltackpt.errors import Damaged
from deltackpt.format import naming, row_blocks
from deltackpt.format.records import MOST
from deltackpt.format.row_blocks import (
    BLOCKS,
    ArrayEntry,
    EncodedBlock,
    FieldSpec,
    GroupEntry,
    Ranges,
    RowBlock,
    Rows,
    Segment,
    Span,
    StoredRows,
)
from deltackpt.layers.targets import Target, Targets
from deltackpt.resources import host_memory
from deltackpt.resources.host_memory import empty_buffer
from deltackpt.resources.runtime import Memory, Runtime, Task

#: Bytes of rows and their indices that are decoded at a time; they stay in the CPU cache until
#: they are written.
_DECODED_BYTES = 4 << 20
#: Smaller pieces are mostly Python code, so the GIL would serialize threads.
_SMALL_BYTES, _SMALL_TOTAL_BYTES = 1 << 18, 1 << 26
#: Small pieces of blocks are read in windows of this size, of which the last few are kept: three
#: threads read, and a piece may need two.
_WINDOW_BYTES, _WINDOWS = 1 << 20, 6
#: Suffix of the array with the number of elements of each row in ragged arrays.
_COUNT = "count"
#: In ragged arrays, it is kept where the elements of every so many rows begin.
_COUNTED_ROWS = 256
#: Segments with at least this many row indices are read on another thread.
MANY_ROWS = 1 << 13


class Source(Protocol):
    """Stored arrays, read on demand and verified."""

    def name_of(self, segment: Segment, entry: ArrayEntry) -> str:
        """Returns the name of a stored array in errors."""
        ...

    def read_into(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        """Reads elements ``[start, stop)`` of an array's first axis into ``out``, verified.

        ``out`` is (stop - start, *entry.shape[1:]) of the stored dtype. Raises Damaged if the array
        is missing or altered, as every function does that reads.
        """


class Layer(Source, Protocol):
    """What one process wrote in a save or a WAL record."""

    @property
    def groups(self) -> Mapping[str, GroupEntry]:
        """The groups by name."""
        ...

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments; the layers of one save have different rows or columns."""
        ...

    def check(self, segment: Segment) -> None:
        """Raises Damaged if the stored data are too short; called before memory is allocated."""

    def row_indices(self, segment: Segment, first: int = 0, stop: int = MOST) -> StoredRows:
        """Returns the row indices in ``[first, stop)`` of a segment without ranges."""
        ...


#: Returns the row indices of a segment of a layer; None if no row of it is wanted.
RowIndices = Callable[[Any, Segment, Targets], StoredRows | None]


def segment_rows(layer: Layer, segment: Segment) -> Rows:
    """Returns the rows of a segment, checked against its group."""
    return rows_within(layer, segment, (0, MOST)).rows


def rows_within(layer: Layer, segment: Segment, span: Span) -> StoredRows:
    """Returns the rows of a segment in a span, checked against its group."""
    layer.check(segment)
    if segment.ranges is not None:
        rows = row_blocks.rows_of(segment.ranges)
        found = row_blocks.row_slice(rows, *span)
        return StoredRows(rows[found], found.start)
    held, total = layer.row_indices(segment, *span), layer.groups[segment.group].rows
    if (end := reach(held.rows)[1]) > total:
        entry = next(entry for entry in segment.arrays if entry.name == naming.GAPS)
        raise Damaged(layer.name_of(segment, entry), f"rows below {total}", f"{end - 1}")
    return held


def stored_rows(layer: Layer, segment: Segment, targets: Targets) -> StoredRows | None:
    """Returns the rows of a segment around the wanted ones; None if no row is wanted."""
    if segment.ranges is not None:
        return StoredRows(segment_rows(layer, segment))
    span = targets.reach(segment)
    return None if span is None else rows_within(layer, segment, span)


def reach(rows: Rows) -> Span:
    """Returns the span from the first to the last of some rows."""
    if isinstance(rows, Ranges):
        return rows.spans[0][0], rows.spans[-1][1]
    return (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)


def plan(
    layers: Sequence[Sequence[Layer]],
    targets: Targets,
    indices: RowIndices = stored_rows,
    *,
    runtime: Runtime | None = None,
) -> Iterator[Iterator[Piece]]:
    """Yields stages of pieces. Merge all pieces of a stage before you merge one of the next.

    The pieces of a stage may be merged at the same time, in any order. ``layers`` has the layers of
    each save or WAL record, oldest first. ``indices`` returns the row indices of a segment; the
    threads of ``runtime`` call it, by default the caller's thread.
    """
    return _Planner(layers, targets, indices, runtime).stages()


def set_flags(flags: np.ndarray, rows: Rows) -> None:
    """Sets the flags of some rows."""
    if isinstance(rows, np.ndarray):
        flags[rows] = True
    else:
        for start, stop in row_blocks.spans_of(rows):
            flags[start:stop] = True


class Work(Protocol):
    """A piece of a merge that one thread does."""

    @property
    def nbytes(self) -> int:
        """Stored bytes to read."""
        ...

    def run(self, memory: Memory) -> None:
        """Reads, decodes and merges; ``memory`` is for temporary buffers."""


def run(
    stages: Iterable[Iterable[Work]],
    runtime: Runtime,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Reads, decodes and merges pieces; ``on_bytes`` receives the stored bytes of each piece.

    If it raises Damaged, no thread is still running.
    """
    coming = map(list, stages)
    pieces, following = next(coming, None), None

    def merge(piece: Work | None) -> None:
        nonlocal following
        if piece is None:  # The next stage is planned while other threads merge this one.
            following = next(coming, None)
            return
        piece.run(runtime.memory)
        if on_bytes is not None:
            on_bytes(piece.nbytes)

    while pieces is not None:
        following = None
        runtime.map(merge, [None, *pieces], threads=1 if _are_small(pieces) else None)
        pieces = following


def _are_small(pieces: Iterable[Work]) -> bool:
    sizes = [piece.nbytes for piece in pieces]
    return max(sizes, default=0) <= _SMALL_BYTES and sum(sizes) <= _SMALL_TOTAL_BYTES


def apply(block: RowBlock, targets: Iterable[Target]) -> None:
    """Writes the rows of a block into every target that they belong to."""
    own = [one for one in targets if one.group == block.group and one.field in block.fields]
    sections = row_blocks.row_slices(block.rows, [one.rows for one in own])
    for target, chosen in zip(own, sections, strict=True):
        if chosen.start < chosen.stop:
            _scatter(block, chosen, target)


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Rows at positions ``[start, stop)`` of one field of a segment.

    Table rows are within one chunk, and blocks of dense leaves within one target. ``rows``
    are their virtual rows. ``needed``, (rows,) bool, has those that no newer layer has; None if all
    are needed.
    """

    field: SegmentField
    rows: Rows
    needed: np.ndarray | None
    start: int
    stop: int
    targets: tuple[Target, ...]

    @property
    def nbytes(self) -> int:
        """Stored bytes of the piece."""
        return sum(
            entry.nbytes * (self.stop - self.start) // max(1, self.field.segment.count)
            for entry in (*self.field.stored.values(), *self.field.raw_rows)
        )

    def run(self, memory: Memory) -> None:
        """See ``Work``."""
        direct = self._direct_target()
        if direct is not None:
            out = direct.view(codecs.stored_dtype(direct.dtype))
            entry = self.field.stored[""]
            self.field.layer.read_into(self.field.segment, entry, self.start, self.stop, out)
            return
        if not self.field.is_relative:
            self._populate()
        lent: list[np.ndarray] = []

        def room(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            lent.append(memory.allocate(shape, dtype))
            return lent[-1]

        try:
            stored = self._stored(room)
            if self.field.block_codec is not None:
                self._change_blocks(self.field.block_codec, stored)
            else:
                row_bytes = self.field.spec.row_bytes + np.dtype(np.int64).itemsize
                # Copies of chosen rows stay in the cache, too.
                step = max(1, _DECODED_BYTES // row_bytes // (1 if self.needed is None else 4))
                for encoded in self._encoded(stored, step):
                    apply(codecs.decode_block(encoded, [self.field.spec]), self.targets)
        finally:
            memory.give_back(lent)
        for raw in self._read_raw_rows():
            apply(raw, self.targets)

    def read_ahead(self) -> None:
        """Reads windows that ``run`` needs, so that it does not wait for other threads."""
        for suffix, (start, stop) in self.field.elements(self.start, self.stop).items():
            if suffix != _COUNT:
                self.field.read_ahead(self.field.stored[suffix], start, stop)

    def load(self) -> list[RowBlock]:
        """Reads and decodes the piece; a later block overwrites an earlier one."""
        encoded = self._encoded(self._stored(np.empty), len(self.rows))
        decoded = [codecs.decode_block(one, [self.field.spec]) for one in encoded]
        return [*decoded, *self._read_raw_rows()]

    def _populate(self) -> None:
        """Allocates the memory of rows that were not written yet, if they are contiguous."""
        if isinstance(self.rows, range):
            for target in (one for one in self.targets if one.cycle is None):
                first, last = row_blocks.common(target.rows, reach(self.rows))
                host_memory.populate(target.buffer[first - target.rows[0] : last - target.rows[0]])

    def _direct_target(self) -> np.ndarray | None:
        """Returns the part of a final buffer that raw stored bytes can be read into."""
        if self.field.spec.codec != "raw" or not isinstance(self.rows, range):
            return None
        if self.field.has_window(self.field.stored[""], self.start, self.stop):
            return None
        for target in self.targets:
            first, last = target.rows
            if first <= self.rows.start and self.rows.stop <= last:
                view = target.buffer[self.rows.start - first : self.rows.stop - first]
                same = target.columns in (None, self.field.segment.columns) and not target.cycle
                return view if same and len(self.targets) == 1 else None
        return None

    def _stored(
        self, room: Callable[[tuple[int, ...], np.dtype], np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Returns the stored arrays; those that must be read are in memory from ``room``."""
        layer, segment, found = self.field.layer, self.field.segment, {}
        for suffix, (start, stop) in self.field.elements(self.start, self.stop).items():
            entry = self.field.stored[suffix]
            array = self.field.window(entry, start, stop)
            if array is None:
                array = room((stop - start, *entry.shape[1:]), np.dtype(entry.dtype))
                layer.read_into(segment, entry, start, stop, array)
            found[entry.name] = array
        return found

    def _change_blocks(self, codec: BlockCodec, stored: Mapping[str, np.ndarray]) -> None:
        """Decodes blocks in the only target, which contains the older ones."""
        [target] = self.targets
        arrays = {suffix: stored[entry.name] for suffix, entry in self.field.stored.items()}
        first, stop = (row - target.rows[0] for row in reach(self.rows))
        try:
            # Blocks that a newer save replaces may decode to NaN here.
            with np.errstate(all="ignore"):
                if stop - first == len(self.rows):
                    rows = range(first, stop)
                else:
                    rows = np.asarray(row_blocks.shifted(self.rows, -target.rows[0]))
                codec.decode(arrays, rows, target.buffer)
        except (IndexError, ValueError) as error:
            name = self.field.layer.name_of(self.field.segment, self.field.stored[""])
            raise Damaged(name, "codes of its blocks", str(error)) from error

    def _encoded(self, stored: Mapping[str, np.ndarray], step: int) -> Iterator[EncodedBlock]:
        """Yields the needed rows of the stored arrays, ``step`` at a time."""
        segment = self.field.segment
        positions = None if self.needed is None else np.flatnonzero(self.needed)
        for start in range(0, len(self.rows if positions is None else positions), step):
            section = slice(start, start + step)
            if positions is None:
                rows, found = (
                    self.rows[section],
                    {name: one[section] for name, one in stored.items()},
                )
            else:
                chosen = positions[section]
                rows = np.asarray(self.rows)[chosen]
                found = {name: np.take(one, chosen, axis=0) for name, one in stored.items()}
            yield EncodedBlock(segment.group, rows, segment.columns, found)

    def _read_raw_rows(self) -> Iterator[RowBlock]:
        """Yields raw rows of the piece, which replace what its codec decoded."""
        field = self.field
        if not field.raw_rows:
            return
        first, last = np.searchsorted(field.raw_positions, (self.start, self.stop))
        if first == last:
            return
        entry, at = field.raw_rows[0], field.raw_positions[first:last] - self.start
        found = np.empty((last - first, *entry.shape[1:]), np.dtype(entry.dtype))
        field.layer.read_into(field.segment, entry, int(first), int(last), found)
        if self.needed is not None:
            found, at = found[self.needed[at]], at[self.needed[at]]
        values = {field.spec.name: found.view(codecs.dtype_of(field.spec.dtype))}
        yield RowBlock(
            field.segment.group, np.asarray(self.rows)[at], field.segment.columns, values
        )


@dataclasses.dataclass(eq=False)
class SegmentField:
    """One field of a segment, with its spec as the segment has it."""

    layer: Source
    segment: Segment
    spec: FieldSpec
    #: Array and number to the windows that were used last.
    _windows: dict[tuple[str, int], Task[np.ndarray]] = dataclasses.field(default_factory=dict)
    #: Element counts of the first rows in ragged arrays.
    _counts: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.uint16))
    #: First elements of every ``_COUNTED_ROWS``-th of these rows, int64.
    _begins: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, np.int64))
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    _counting: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @functools.cached_property
    def block_codec(self) -> BlockCodec | None:
        """The codec of blocks of dense leaves; None for rows of tables and slots."""
        return block_codecs.get(self.spec.codec) if self.spec.name == BLOCKS else None

    @functools.cached_property
    def is_relative(self) -> bool:
        """Whether decoding needs the older values."""
        return self.block_codec is not None and self.block_codec.relative

    @functools.cached_property
    def stored(self) -> dict[str, ArrayEntry]:
        """Codec suffix to the stored array."""
        dtype = codecs.dtype_of(self.spec.dtype)
        if self.block_codec is not None:
            suffixes = [*self.block_codec.stored(dtype)]
        else:
            suffixes = [*codecs.parse_codec(self.spec.codec).stored(self.spec.trailing, dtype)]
        return {suffix: self._entries[self._name(suffix)] for suffix in suffixes}

    def elements(self, start: int, stop: int) -> dict[str, Span]:
        """Returns the elements of each stored array that belong to some rows.

        Raises:
          Damaged: the element counts are missing or altered.
        """
        found = dict.fromkeys(self.stored, (start, stop))
        if self._ragged:
            self.count_to(stop)
            first, last = self._begin_of(start), self._begin_of(stop)
            for suffix in self._ragged:
                if last > (count := self.stored[suffix].shape[0]):
                    name = self.layer.name_of(self.segment, self.stored[suffix])
                    raise Damaged(name, f"{last} elements", f"{count}")
                found[suffix] = first, last
        return found

    def window(self, entry: ArrayEntry, start: int, stop: int) -> np.ndarray | None:
        """Returns a few elements of blocks, which are read together with adjacent ones.

        Leaves may be so small that reading each on its own would take most of the time.

        Returns:
          The elements; None if they are many, or if the rows are those of a table.
        """
        if self._ragged and entry is self.stored[_COUNT]:
            self.count_to(stop)
            return self._counts[start:stop]
        if not self.has_window(entry, start, stop):
            return None
        sections = []
        for number in _window_numbers(entry, start, stop):
            at = number * _window_rows(entry)
            sections.append(self._window(entry, number).result()[max(0, start - at) : stop - at])
        return sections[0] if len(sections) == 1 else np.concatenate(sections)

    def has_window(self, entry: ArrayEntry, start: int, stop: int) -> bool:
        """Returns whether some elements of an array are read together with adjacent ones."""
        is_few = 0 < stop - start <= _window_rows(entry) // 4
        return self.block_codec is not None and is_few

    def read_ahead(self, entry: ArrayEntry, start: int, stop: int) -> None:
        """Reads the windows of some elements, except those that another thread is reading."""
        if self.has_window(entry, start, stop):
            for number in _window_numbers(entry, start, stop):
                self._window(entry, number).run()

    def _window(self, entry: ArrayEntry, number: int) -> Task[np.ndarray]:
        """Returns a window; other threads wait for its result instead of reading it, too."""

        def read() -> np.ndarray:
            start, size = number * _window_rows(entry), _window_rows(entry)
            held = np.empty((min(size, entry.shape[0] - start), *entry.shape[1:]), entry.dtype)
            self.layer.read_into(self.segment, entry, start, start + len(held), held)
            return held

        key = entry.name, number
        with self._lock:
            if key not in self._windows:
                self._windows[key] = Task(read)
                for oldest in [*self._windows][: -_WINDOWS * len(self.stored)]:
                    del self._windows[oldest]
            return self._windows[key]

    @functools.cached_property
    def _ragged(self) -> frozenset[str]:
        """Suffixes of arrays with several elements for a row."""
        if self.block_codec is None:
            return frozenset()
        stored = self.block_codec.stored(codecs.dtype_of(self.spec.dtype))
        return frozenset(suffix for suffix, array in stored.items() if array.ragged)

    def count_to(self, stop: int) -> None:
        """Reads the element counts of the first rows in ragged arrays."""
        if not self._ragged or stop <= len(self._counts):
            return
        with self._counting:
            have = len(self._counts)
            if have < stop:
                entry = self.stored[_COUNT]
                # Segments may claim many more rows than are needed.
                last = min(entry.shape[0], max(stop, 2 * have, _window_rows(entry)))
                counts = np.empty(last, entry.dtype)
                counts[:have] = self._counts
                self.layer.read_into(self.segment, entry, have, last, counts[have:])
                whole = counts[: last // _COUNTED_ROWS * _COUNTED_ROWS].reshape(-1, _COUNTED_ROWS)
                begins = np.zeros(len(whole) + 1, np.int64)
                np.cumsum(whole.sum(axis=1, dtype=np.uint32), out=begins[1:])
                self._begins, self._counts = begins, counts

    def _begin_of(self, row: int) -> int:
        """Returns where the elements of a row begin in ragged arrays."""
        number, rest = divmod(row, _COUNTED_ROWS)
        return int(self._begins[number]) + int(self._counts[row - rest : row].sum(dtype=np.int64))

    @functools.cached_property
    def raw_rows(self) -> tuple[ArrayEntry, ...]:
        """The rows that are stored raw, and their positions; may be empty."""
        if self.block_codec is not None or codecs.parse_codec(self.spec.codec).lossless:
            return ()
        names = [self._name(suffix) for suffix in (codecs.RAW_ROWS, codecs.RAW_POSITIONS)]
        return tuple(self._entries[name] for name in names if name in self._entries)

    @functools.cached_property
    def raw_positions(self) -> np.ndarray:
        """The positions in the segment, ascending, of the raw rows."""
        entry = self.raw_rows[1]
        out = empty_buffer(entry.shape, np.dtype(entry.dtype))
        self.layer.read_into(self.segment, entry, 0, entry.shape[0], out)
        found = out.astype(np.int64)
        if len(found) and not (
            np.all(found[1:] > found[:-1]) and 0 <= found[0] and found[-1] < self.segment.count
        ):
            name = self.layer.name_of(self.segment, entry)
            raise Damaged(name, f"ascending positions of {self.segment.count} rows", "others")
        return found

    @functools.cached_property
    def _entries(self) -> dict[str, ArrayEntry]:
        return {entry.name: entry for entry in self.segment.arrays}

    def _name(self, suffix: str) -> str:
        return codecs.array_name(self.spec.name, suffix)


#: Group, columns and fields: segments that share them replace each other's rows as a whole.
_Kind = tuple[str, Span, tuple[str, ...]]


class _Found(NamedTuple):
    layer: Layer
    segment: Segment

    @property
    def key(self) -> tuple[int, int]:
        return id(self.layer), id(self.segment)

    @property
    def kind(self) -> _Kind:
        return self.segment.group, self.segment.columns, self.segment.fields

    @property
    def group(self) -> GroupEntry:
        return self.layer.groups[self.segment.group]


class _SegmentRows(NamedTuple):
    """The ``held`` rows of a segment of save number ``save``.

    ``needed``, (rows,) bool, has the wanted rows that no newer save has; None if all are.
    """

    save: int
    segment: _Found
    held: StoredRows
    needed: np.ndarray | None = None


class _Planner:
    """Plans one merge; ``stages`` runs once. Only ``_read`` runs on several threads at a time."""

    def __init__(
        self,
        layers: Sequence[Sequence[Layer]],
        targets: Targets,
        indices: RowIndices,
        runtime: Runtime | None,
    ):
        self._targets, self._indices = targets, indices
        self._has_cycles = any(target.cycle is not None for target in targets.all)
        self._found = [
            [_Found(layer, segment) for layer in of_save for segment in layer.segments]
            for of_save in layers
        ]
        every = [one for of_save in self._found for one in of_save]
        #: Groups whose segments replace a part of each other's cells.
        self._overlapping = _overlapping(
            one
            for number, of_save in enumerate(self._found)
            for one in of_save
            # Ranges of the first save are merged before everything else.
            if number or one.segment.ranges is None
        )
        #: By layer and segment: equal segments of several layers may be one object.
        self._coming = {
            one.key: runtime.submit(self._read, one)
            for one in reversed(every)
            if runtime is not None and one.segment.ranges is None and one.segment.count >= MANY_ROWS
        }

    def stages(self) -> Iterator[Iterator[Piece]]:
        ranges = self._ranges()
        for number, of_save in enumerate(self._found):
            gapped = [one for one in of_save if self._is_gapped(one, overlapping=True)]
            if ranges[number] or gapped:
                yield self._oldest_first(number, ranges[number], gapped)
        yield (piece for section in self._newest_first(ranges) for piece in self._pieces(section))

    def _is_gapped(self, one: _Found, *, overlapping: bool = False) -> bool:
        """Returns whether a segment has row indices, and its group overlaps or does not."""
        is_overlapping = one.segment.group in self._overlapping
        return one.segment.ranges is None and is_overlapping == overlapping

    def _ranges(self) -> list[list[_SegmentRows]]:
        """Ranges of rows of each save, without those that newer ranges replace as a whole."""
        newer: dict[_Kind, tuple[Span, ...]] = {}
        found = []
        for number, of_save in reversed([*enumerate(self._found)]):
            kept = []
            for one in of_save:
                held = None if one.segment.ranges is None else self._rows(one)
                if held is None:
                    continue
                section, covered = _SegmentRows(number, one, held), newer.get(one.kind, ())
                newer[one.kind] = row_blocks.joined([*covered, *_spans(held.rows)])
                if newer[one.kind] != covered:
                    kept.append(section)
            found.append(kept)
        return found[::-1]

    def _oldest_first(
        self, number: int, sections: Sequence[_SegmentRows], gapped: Sequence[_Found]
    ) -> Iterator[Piece]:
        """Yields the pieces of one save that are merged whole."""
        for section in sections:
            yield from self._pieces(section)
        for one in gapped:
            if (stored := self._rows(one)) is not None:
                yield from self._pieces(_SegmentRows(number, one, stored))

    def _newest_first(self, ranges: Sequence[Sequence[_SegmentRows]]) -> Iterator[_SegmentRows]:
        """Yields the segments of each save with the rows that newer saves do not have."""
        #: Kind to the number of its gapped segments in saves older than the current one.
        older = collections.Counter(
            one.kind for of_save in self._found for one in of_save if self._is_gapped(one)
        )
        newer: dict[_Kind, np.ndarray] = {}
        for number, of_save in reversed([*enumerate(self._found)]):
            for section in ranges[number]:
                if older[section.segment.kind]:
                    flags = self._flags(newer, section.segment)
                    for start, stop in self._wanted(section.segment, section.held):
                        for first, last in _spans(section.held.rows[start:stop]):
                            flags[first:last] = True
            for one in filter(self._is_gapped, of_save):
                older[one.kind] -= 1
                if (held := self._rows(one)) is None:
                    continue
                needed = None
                if one.kind in newer or older[one.kind]:
                    flags, needed = self._flags(newer, one), np.zeros(len(held.rows), bool)
                    for start, stop in self._wanted(one, held):
                        rows = held.rows[start:stop]
                        needed[start:stop] = ~flags[rows]
                        flags[rows] = True
                needed = self._without_others(one, held, needed)
                yield _SegmentRows(number, one, held, needed)

    def _without_others(
        self, one: _Found, held: StoredRows, needed: np.ndarray | None
    ) -> np.ndarray | None:
        """Clears the needed rows that no target contains, if all targets are cyclic."""
        if not self._has_cycles:
            return needed
        over = [t for field in one.segment.fields for t in self._over(one, field, held.rows)]
        cycles = {target.cycle for target in over if target.cycle is not None}
        if not cycles or any(target.cycle is None for target in over):
            return needed
        rows, found = np.asarray(held.rows), np.zeros(len(held.rows), bool)
        for cycle in cycles:
            section = row_blocks.row_slice(rows, *cycle.rows)
            found[section] |= cycle.contains(rows[section])
        return found if needed is None else needed & found

    def _flags(self, newer: dict[_Kind, np.ndarray], one: _Found) -> np.ndarray:
        if one.kind not in newer:
            every = (other for of_save in self._found for other in of_save)
            rows = max(other.group.rows for other in every if other.kind == one.kind)
            newer[one.kind] = np.zeros(rows, bool)
        return newer[one.kind]

    def _rows(self, one: _Found) -> StoredRows | None:
        coming = self._coming.pop(one.key, None)
        return self._read(one) if coming is None else coming.result()

    def _read(self, one: _Found) -> StoredRows | None:
        return self._indices(one.layer, one.segment, self._targets)

    def _over(self, one: _Found, field: str, rows: Rows) -> tuple[Target, ...]:
        return self._targets.over(one.segment.group, field, reach(rows), one.segment.columns)

    def _wanted(self, one: _Found, held: StoredRows, *fields: str) -> tuple[Span, ...]:
        """Positions of the wanted rows among some rows of a segment."""
        segment, (first, last) = one.segment, reach(held.rows)
        spans = self._targets.wanted(segment.group, fields or segment.fields, segment.columns)
        low = bisect.bisect_right(spans, first, key=lambda span: span[1])
        high = bisect.bisect_left(spans, last, key=lambda span: span[0])
        # The tables of a group follow each other, so that most segments are wanted whole.
        if high - low == 1 and spans[low][0] <= first and last <= spans[low][1]:
            return ((0, len(held.rows)),)
        chosen = row_blocks.row_slices(held.rows, spans[low:high])
        return row_blocks.joined((section.start, section.stop) for section in chosen)

    def _pieces(self, section: _SegmentRows) -> Iterator[Piece]:
        _, one, held, needed = section
        one.layer.check(one.segment)
        for name in one.segment.fields:
            field = SegmentField(one.layer, one.segment, one.segment.spec(one.group, name))
            # Rows without stored arrays are one piece.
            chunk_rows = field.stored[""].chunk_rows if field.stored else one.segment.count
            for low, high in self._wanted(one, held, name):
                start, stop = held.first + low, held.first + high
                while start < stop:
                    end = min(stop, (start // chunk_rows + 1) * chunk_rows)
                    own = slice(start - held.first, end - held.first)
                    mask = None if needed is None else needed[own]
                    if mask is None or mask.any():
                        mask = None if mask is None or mask.all() else mask
                        rows = held.rows[own]
                        yield Piece(field, rows, mask, start, end, self._over(one, name, rows))
                    start = end


def _window_rows(entry: ArrayEntry) -> int:
    return max(1, _WINDOW_BYTES * entry.shape[0] // max(1, entry.nbytes))


def _window_numbers(entry: ArrayEntry, start: int, stop: int) -> range:
    size = _window_rows(entry)
    return range(start // size, (stop - 1) // size + 1)


def _spans(rows: Rows) -> tuple[Span, ...]:
    assert not isinstance(rows, np.ndarray)
    return row_blocks.spans_of(rows)


def _overlapping(found: Iterable[_Found]) -> set[str]:
    """Groups in which segments share cells without having the same fields and columns."""
    by_group: dict[str, dict[_Kind, _Found]] = {}
    for one in found:
        by_group.setdefault(one.segment.group, {})[one.kind] = one
    return {
        name
        for name, kinds in by_group.items()
        if any(_share_cells(*pair) for pair in itertools.combinations(kinds.values(), 2))
    }


def _share_cells(one: _Found, other: _Found) -> bool:
    shared = {*one.segment.fields} & {*other.segment.fields}
    split = [one.group.columns(spec) for spec in one.group.fields if spec.name in shared]
    apart = row_blocks.common(one.segment.columns, other.segment.columns)
    return bool(split) and (apart[0] < apart[1] or None in split)


def _scatter(block: RowBlock, chosen: slice, target: Target) -> None:
    values = block.fields[target.field][chosen]
    rows = block.rows[chosen]
    buffer = target.buffer
    if target.columns is not None and block.columns != target.columns:
        common = target.overlap(block.columns)
        if common is None:
            return
        first, last = common
        buffer = buffer[:, first - target.columns[0] : last - target.columns[0]]
        values = values[:, first - block.columns[0] : last - block.columns[0]]
    target.put(rows, values, buffer)
