# SPDX-License-Identifier: Apache-2.0
"""Merges saves and WAL records into host buffers; the newest wins. Numpy only.

``merge_plan`` determines which rows of which segments are needed; they are cut into pieces here,
which threads read, decode and write into the targets. Few rows of many segments are one piece, so
that numpy handles them at once.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from deltackpt import codecs
from deltackpt.cached import cached_property
from deltackpt.errors import Damaged
from deltackpt.format import row_blocks
from deltackpt.format.row_blocks import (
    ArrayEntry,
    EncodedBlock,
    FieldSpec,
    RowBlock,
    Rows,
    Segment,
    Span,
)
from deltackpt.layers import row_indices
from deltackpt.layers.merge_plan import MergePlan, SegmentRows
from deltackpt.layers.row_indices import Layer, RowIndices
from deltackpt.layers.targets import Target, Targets
from deltackpt.resources import host_memory
from deltackpt.resources.host_memory import empty_buffer
from deltackpt.resources.runtime import Memory, Runtime

#: Bytes of rows and their indices that are decoded at a time; they stay in the CPU cache until
#: they are written.
_DECODED_BYTES = 4 << 20
_INDEX_BYTES = np.dtype(np.int64).itemsize
#: Smaller pieces are mostly Python code, so the GIL would serialize threads.
_SMALL_BYTES, _SMALL_TOTAL_BYTES = 1 << 18, 1 << 26
#: Shorter sections are joined, up to ``_SMALL_BYTES``; both also limit the decoded rows.
_JOINED_BYTES = 1 << 16

#: A block, and the positions of its rows in its arrays; None if they have only these rows.
_Decoded = tuple[RowBlock, np.ndarray | None]


def plan(
    layers: Sequence[Sequence[Layer]],
    targets: Targets,
    indices: RowIndices = row_indices.stored_rows,
    *,
    runtime: Runtime | None = None,
) -> Iterator[Iterator[Piece]]:
    """Yields stages of pieces. Merge all pieces of a stage before you merge one of the next.

    The pieces of a stage may be merged at the same time, in any order. ``layers`` has the layers of
    each save or WAL record, oldest first. ``indices`` returns the row indices of a segment; the
    threads of ``runtime`` call it, by default the caller's thread.
    """
    for stage in MergePlan(layers, targets, indices, runtime).stages():
        yield _pieces((one for rows in stage for one in _sections(rows, targets)), targets)


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


def _pieces(sections: Iterable[Section], targets: Targets) -> Iterator[Piece]:
    """Joins short sections with row indices that are decoded alike."""
    waiting: dict[tuple[str, Span, FieldSpec], list[Section]] = {}
    sizes = collections.Counter[tuple[str, Span, FieldSpec]]()
    for one in sections:
        # Some codecs store less than they decode, those of tombstones nothing.
        nbytes = max(one.nbytes, len(one.rows) * (one.field.spec.row_bytes + _INDEX_BYTES))
        if nbytes > _JOINED_BYTES or not isinstance(one.rows, np.ndarray):
            yield _piece([one], targets)
            continue
        kind = one.field.segment.group, one.field.segment.columns, one.field.spec
        if kind in waiting and sizes[kind] + nbytes > _SMALL_BYTES:
            yield _piece(waiting.pop(kind), targets)
            del sizes[kind]
        waiting.setdefault(kind, []).append(one)
        sizes[kind] += nbytes
    for joined in waiting.values():
        yield _piece(joined, targets)


def _piece(sections: list[Section], targets: Targets) -> Piece:
    spans = [row_blocks.reach(one.rows) for one in sections]
    span = min(first for first, _ in spans), max(stop for _, stop in spans)
    segment, name = sections[0].field.segment, sections[0].field.spec.name
    return Piece(sections, targets.over(segment.group, name, span, segment.columns))


def _sections(source: SegmentRows, targets: Targets) -> Iterator[Section]:
    """Cuts the rows of a segment at the chunks of each field."""
    (layer, segment), held, needed = source
    layer.check(segment)
    group = layer.groups[segment.group]
    entries = {entry.name: entry for entry in segment.arrays}
    for name in segment.fields:
        field = SegmentField(layer, segment, segment.spec(group, name), entries)
        # Rows without stored arrays are one section.
        chunk_rows = field.stored[""].chunk_rows if field.stored else segment.count
        for wanted in targets.sections(segment, held.rows, name):
            start, stop = held.first + wanted.start, held.first + wanted.stop
            while start < stop:
                end = min(stop, (start // chunk_rows + 1) * chunk_rows)
                own = slice(start - held.first, end - held.first)
                mask = None if needed is None or needed[own].all() else needed[own]
                if mask is None or mask.any():
                    yield Section(field, held.rows[own], mask, start, end)
                start = end


class SegmentField:
    """One field of a segment, with its spec as the segment has it, and all arrays by name.

    ``stored`` has the array of each codec suffix; ``is_view`` is whether decoding returns a view of
    it. ``raw_rows`` are the array of rows that are stored raw, and that of their positions; it may
    be empty. ``nbytes`` are those of all arrays.
    """

    def __init__(
        self, layer: Layer, segment: Segment, spec: FieldSpec, entries: Mapping[str, ArrayEntry]
    ):
        self.layer, self.segment, self.spec = layer, segment, spec
        codec = codecs.parse_codec(spec.codec)
        self.stored = {
            suffix: entries[codecs.array_name(spec.name, suffix)]
            for suffix in codec.stored(spec.trailing, codecs.dtype_of(spec.dtype))
        }
        self.is_view = codecs.is_lossless(codec) and bool(self.stored)
        beside = () if codec.lossless else (codecs.RAW_ROWS, codecs.RAW_POSITIONS)
        names = [codecs.array_name(spec.name, suffix) for suffix in beside]
        self.raw_rows = tuple(entries[name] for name in names if name in entries)
        self.nbytes = sum(entry.nbytes for entry in (*self.stored.values(), *self.raw_rows))

    def read_into(self, entry: ArrayEntry, start: int, stop: int, out: np.ndarray) -> None:
        """Reads elements of a stored array; raises Damaged."""
        self.layer.read_into(self.segment, entry, start, stop, out)

    @cached_property
    def raw_positions(self) -> np.ndarray:
        """The positions in the segment, ascending, of the raw rows."""
        entry = self.raw_rows[1]
        out = empty_buffer(entry.shape, np.dtype(entry.dtype))
        self.read_into(entry, 0, entry.shape[0], out)
        found = out.astype(np.int64)
        if len(found) and not (
            np.all(found[1:] > found[:-1]) and 0 <= found[0] and found[-1] < self.segment.count
        ):
            name = self.layer.name_of(self.segment, entry)
            raise Damaged(name, f"ascending positions of {self.segment.count} rows", "others")
        return found


class Section(NamedTuple):
    """Rows at positions ``[start, stop)`` of one field of a segment, within one chunk.

    ``rows`` are their virtual rows. ``needed``, (rows,) bool, has those that no newer layer has;
    None if all are needed.
    """

    field: SegmentField
    rows: Rows
    needed: np.ndarray | None
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Stored bytes of the section."""
        return self.field.nbytes * (self.stop - self.start) // max(1, self.field.segment.count)


@dataclasses.dataclass(eq=False, slots=True)
class Piece:
    """Sections with equal specs, groups and columns, which have different needed rows."""

    sections: list[Section]
    targets: tuple[Target, ...]

    @property
    def nbytes(self) -> int:
        """Stored bytes of the piece."""
        return sum(one.nbytes for one in self.sections)

    def run(self, memory: Memory) -> None:
        """See ``Work``."""
        first = self.sections[0]
        direct = self._direct_target(first)
        if direct is not None:
            out = direct.view(codecs.stored_dtype(direct.dtype))
            first.field.read_into(first.field.stored[""], first.start, first.stop, out)
            return
        self._populate(first.rows)
        row_bytes = first.field.spec.row_bytes + _INDEX_BYTES
        # Copies of chosen rows stay in the cache, too.
        step = max(1, _DECODED_BYTES // row_bytes // (1 if first.needed is None else 4))
        lent: list[np.ndarray] = []
        try:
            for block, positions in self._decoded(step, memory.allocate, lent):
                apply(block, self.targets, positions)
        finally:
            memory.give_back(lent)
        for block, positions in self._raw_rows():
            apply(block, self.targets, positions)

    def load(self) -> list[RowBlock]:
        """Reads and decodes the piece; a later block overwrites an earlier one."""
        count = sum(len(one.rows) for one in self.sections)
        found = []
        for block, at in (*self._decoded(count, np.empty, []), *self._raw_rows()):
            if at is not None:
                fields = {name: np.take(of, at, axis=0) for name, of in block.fields.items()}
                block = dataclasses.replace(block, fields=fields)
            found.append(block)
        return found

    def _populate(self, rows: Rows) -> None:
        """Allocates the memory of rows that were not written yet, if they are contiguous."""
        if isinstance(rows, range):
            for target in (one for one in self.targets if one.cycle is None):
                first, last = row_blocks.common(target.rows, row_blocks.reach(rows))
                host_memory.populate(target.buffer[first - target.rows[0] : last - target.rows[0]])

    def _direct_target(self, section: Section) -> np.ndarray | None:
        """Returns the part of a final buffer that raw stored bytes can be read into."""
        rows, field = section.rows, section.field
        if field.spec.codec != "raw" or not isinstance(rows, range):
            return None
        if len(self.targets) != 1:
            return None
        [target] = self.targets
        whole = target.columns in (None, field.segment.columns) and not target.cycle
        first, last = target.rows
        if whole and first <= rows.start and rows.stop <= last:
            return target.buffer[rows.start - first : rows.stop - first]
        return None

    def _chosen(self) -> tuple[Rows, np.ndarray | None]:
        """Returns the needed rows, and their positions in the joined sections; None for all."""
        first, *others = self.sections
        if not others and first.needed is None:
            return first.rows, None
        rows = np.concatenate([np.asarray(one.rows) for one in self.sections])
        needed = [
            np.ones(len(one.rows), bool) if one.needed is None else one.needed
            for one in self.sections
        ]
        positions = np.flatnonzero(np.concatenate(needed))
        if others:
            positions = positions[np.argsort(rows[positions], kind="stable")]
        return rows[positions], positions

    def _decoded(
        self,
        step: int,
        allocate: Callable[[tuple[int, ...], np.dtype], np.ndarray],
        lent: list[np.ndarray],
    ) -> Iterator[_Decoded]:
        """Yields the needed rows, ``step`` at a time; adds their memory to ``lent``."""
        first, stored = self.sections[0].field, {}
        count = sum(one.stop - one.start for one in self.sections)
        for suffix, entry in first.stored.items():
            held = allocate((count, *entry.shape[1:]), np.dtype(entry.dtype))
            stored[entry.name] = held
            lent.append(held)
            at = 0
            for field, _, _, start, stop in self.sections:
                end = at + stop - start
                field.read_into(field.stored[suffix], start, stop, held[at:end])
                at = end
        rows, positions = self._chosen()
        for start in range(0, len(rows), step):
            section, chosen = slice(start, start + step), None
            if positions is None:
                found = {name: of[section] for name, of in stored.items()}
            elif first.is_view:
                found, chosen = stored, positions[section]
            else:
                at = positions[section]
                found = {name: np.take(of, at, axis=0) for name, of in stored.items()}
            columns = first.segment.columns
            encoded = EncodedBlock(first.segment.group, rows[section], columns, found)
            yield codecs.decode_block(encoded, [first.spec]), chosen

    def _raw_rows(self) -> Iterator[_Decoded]:
        """Yields raw rows of the piece, which replace what its codec decoded."""
        for field, rows, needed, start, stop in self.sections:
            if not field.raw_rows:
                continue
            first, last = np.searchsorted(field.raw_positions, (start, stop))
            if first == last:
                continue
            entry, at = field.raw_rows[0], field.raw_positions[first:last] - start
            found = np.empty((last - first, *entry.shape[1:]), np.dtype(entry.dtype))
            field.read_into(entry, int(first), int(last), found)
            positions = None if needed is None else np.flatnonzero(needed[at])
            values = {field.spec.name: found.view(codecs.dtype_of(field.spec.dtype))}
            rows = np.asarray(rows)[at if positions is None else at[positions]]
            yield RowBlock(field.segment.group, rows, field.segment.columns, values), positions


def apply(block: RowBlock, targets: Iterable[Target], positions: np.ndarray | None = None) -> None:
    """Writes the rows of a block into every target that they belong to.

    ``positions`` are those of its rows in its arrays; by default, the arrays have only these rows.
    """
    own = [one for one in targets if one.group == block.group and one.field in block.fields]
    sections = row_blocks.row_slices(block.rows, [one.rows for one in own])
    for target, chosen in zip(own, sections, strict=True):
        if chosen.start < chosen.stop:
            _put(block, positions, chosen, target)


def _put(block: RowBlock, positions: np.ndarray | None, chosen: slice, target: Target) -> None:
    values, buffer = block.fields[target.field], target.buffer
    if positions is None:
        values = values[chosen]
    else:
        positions = positions[chosen]
    if target.columns is not None and block.columns != target.columns:
        common = target.overlap(block.columns)
        if common is None:
            return
        first, last = common
        buffer = buffer[:, first - target.columns[0] : last - target.columns[0]]
        values = values[:, first - block.columns[0] : last - block.columns[0]]
    target.put(block.rows[chosen], values, buffer, positions)
