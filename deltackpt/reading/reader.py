# SPDX-License-Identifier: Apache-2.0
"""Reading: a chain of saves merged, newest wins, straight into the final host buffers; no jax.

The base's chunks are read into the buffers themselves. Then, save by save, the chunks of each
delta are read, verified, decoded into a small piece and scattered; within one save the chunks
hold different rows, so they run in parallel, and a save is finished before the next begins.
"""

from __future__ import annotations

import bisect
import collections
import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deltackpt import codecs
from deltackpt.errors import Damaged, RestoreError, TemplateMismatch
from deltackpt.format import blocks, gaps, globs, manifest
from deltackpt.format import names as layout
from deltackpt.format.blocks import Box, EncodedBlock, Ranges, RowBlock, Rows, Span
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import ArrayEntry, Cover, FieldSpec, GroupEntry, Layout, Segment
from deltackpt.reading import merge
from deltackpt.reading.merge import Target
from deltackpt.reading.saves import StoredPart, StoredSave, raise_if_removed, read_whole
from deltackpt.resources import memory
from deltackpt.resources.staging import Staging

#: Called with (bytes read so far, bytes to read in all), from a background thread.
Progress = Callable[[int, int], None]

_READERS = 2

#: Kept for the next piece: fresh memory would cost more than the merge.
_SCRATCH_BYTES = 128 * 2**20

#: Table name to field name to the boxes of it that this process needs.
Wanted = Mapping[str, Mapping[str, Sequence[Box]]]


@dataclasses.dataclass(frozen=True, eq=False)
class RestoredTables:
    """Merged tables and slots.

    Attributes:
      buffers: table name to field name to box to array in host memory, (rows, *trailing) of the
        box.
      placed: what ``place`` made of them, where that was asked for.
      layout: tables and groups of the step.
      chain: the saves that were read, base first.
      bytes_read: bytes of the stored arrays that were read.
      seconds: wall time of reading and merging.
      source: where they were read from.
    """

    buffers: dict[str, dict[str, dict[Box, np.ndarray]]]
    layout: Layout
    chain: tuple[SaveInfo, ...]
    bytes_read: int
    seconds: float
    source: str = "storage"
    placed: dict[str, dict[str, Any]] | None = None

    @property
    def fields(self) -> dict[str, dict[str, Any]]:
        """Table name to field name to array: where it was placed, else the one box in memory."""
        if self.placed is not None:
            return self.placed
        return {
            name: {field: next(iter(held.values())) for field, held in fields.items()}
            for name, fields in self.buffers.items()
        }


def restore_tables(
    saves: Sequence[StoredSave],
    *,
    wanted: Wanted | None = None,
    progress: Progress | None = None,
) -> RestoredTables:
    """Reads and merges a chain; only what is wanted, and the parts that hold it.

    Where the chain does not hold, another one to the same step is read: ``stored.read_whole``.

    Args:
      saves: a chain of ``read_chain``.
      wanted: what to restore; by default every table and slot as a whole.
      progress: called as bytes are read.

    Raises:
      Damaged: an object is missing or altered; it is named.
      StepGone: a step of the chain was removed meanwhile.
      TemplateMismatch: a wanted table or box does not exist.
    """
    return read_whole(saves, functools.partial(_restored, wanted=wanted, progress=progress))


def _restored(
    saves: Sequence[StoredSave], *, wanted: Wanted | None, progress: Progress | None
) -> RestoredTables:
    started = time.perf_counter()
    target_layout = saves[-1].layout
    buffers, targets = empty_buffers(target_layout, wanted)
    bytes_read = fill(saves, targets, progress)
    return RestoredTables(
        buffers=buffers,
        layout=target_layout,
        chain=tuple(save.info for save in saves),
        bytes_read=bytes_read,
        seconds=time.perf_counter() - started,
    )


class HeldRows(NamedTuple):
    """Row numbers of a segment, from its position ``first`` on: all that can be wanted."""

    rows: Rows
    first: int = 0


#: What gives the row numbers of a segment; None where none of them is wanted.
RowNumbers = Callable[[StoredPart, Segment, "Targets"], HeldRows | None]


def fill(
    saves: Sequence[StoredSave],
    targets: Targets,
    progress: Progress | None = None,
    *,
    numbers: RowNumbers | None = None,
    scratch: Staging | None = None,
    readers: int = _READERS,
    over_parent: bool = False,
) -> int:
    """Reads and merges a chain into buffers; where it raises, they hold anything.

    Args:
      saves: a chain of ``read_chain``.
      targets: the buffers.
      progress: called as bytes are read.
      numbers: gives the row numbers of segments; by default they are read.
      scratch: memory for what is read on the way, kept for the next call.
      readers: threads that read and decode, each a piece at a time.
      over_parent: whether the buffers hold the parent of the first save, which may be a delta.

    Returns:
      How many bytes of stored arrays were read.

    Raises:
      Damaged: an object is missing or altered; it is named.
      StepGone: a step of the chain was removed meanwhile.
    """
    scratch = scratch or Staging(_SCRATCH_BYTES)
    with concurrent.futures.ThreadPoolExecutor(readers, "deltackpt-read") as pool:
        try:
            work = list(pool.map(lambda save: pieces(save, targets, numbers), saves))
            if not over_parent:
                check_covered(saves[0], targets, work[0])
            meter = _Meter(sum(piece.nbytes for found in work for piece in found), progress)
            for found in work:
                for future in [pool.submit(piece.run, meter, scratch) for piece in found]:
                    future.result()
        except RestoreError as error:
            pool.shutdown(cancel_futures=True)
            raise_if_removed(saves, error)
            raise
    return meter.done


def wanted_rows(target: Layout, rows: Mapping[str, Span | None]) -> Wanted:
    """All fields of some tables, of each a half-open range of rows.

    Args:
      target: the layout of the step.
      rows: table name, or the end of exactly one, to the range, None for all rows.

    Raises:
      TemplateMismatch: there is no such table, or it has fewer rows.
    """
    tables = {table.name: table for table in target.tables}
    groups = {group.name: group for group in target.groups}
    found: dict[str, dict[str, list[Box]]] = {}
    for asked, span in rows.items():
        name = globs.meant(asked, tables, TemplateMismatch)
        if name not in tables:
            raise TemplateMismatch(
                f"table {name!r}: expected one of {sorted(tables)}, found no such table in the "
                "step; ask for one of them"
            )
        start, stop = span if span is not None else (0, tables[name].rows)
        if not 0 <= start <= stop <= tables[name].rows:
            raise TemplateMismatch(
                f"table {name!r}: expected a row range within [0, {tables[name].rows}), found "
                f"[{start}, {stop}); ask for rows that the step holds"
            )
        found[name] = {
            spec.name: [Box((start, stop), (0, manifest.width(spec.trailing)))]
            for spec in groups[tables[name].group].fields
        }
    return found


def empty_buffers(
    target: Layout, wanted: Wanted | None = None
) -> tuple[dict[str, dict[str, dict[Box, np.ndarray]]], Targets]:
    """Memory for what is wanted of a step: table name to field name to box to array.

    Args:
      target: the layout of the step.
      wanted: by default every table and slot as a whole.

    Returns:
      The arrays, and the same as targets of ``fill``.
    """
    if wanted is None:
        wanted = wanted_rows(target, dict.fromkeys(table.name for table in target.tables))
    groups = {group.name: group for group in target.groups}
    buffers: dict[str, dict[str, dict[Box, np.ndarray]]] = {}
    targets = []
    for table in target.tables:
        asked = wanted.get(table.name, {})
        group = groups[table.group]
        for spec in group.fields:
            if spec.name in asked:
                buffers.setdefault(table.name, {})[spec.name] = {}
            for box in asked.get(spec.name, ()):
                (start, stop), (first, last) = box
                trailing = (last - first, *spec.trailing[1:]) if spec.trailing else ()
                buffer = memory.empty_buffer((stop - start, *trailing), codecs.dtype_of(spec.dtype))
                buffers[table.name][spec.name][box] = buffer
                # A template may have grown: its further rows are not in the step.
                start, stop = min(start, table.rows), min(stop, table.rows)
                targets.append(
                    Target(
                        group=group.name,
                        field=spec.name,
                        rows=(table.offset + start, table.offset + stop),
                        columns=box.columns if group.columns(spec) is not None else None,
                        buffer=buffer[: stop - start],
                    )
                )
    return buffers, Targets(targets, target)


class Targets:
    """The buffers that a restore fills, by group, field and rows."""

    def __init__(self, targets: Sequence[Target], target: Layout):
        """Sorts them.

        Args:
          targets: boxes of one field are cut by a grid: their rows are the same or disjoint.
          target: the layout of the step.
        """
        self.all = tuple(targets)
        self._layout = target
        self._sorted: dict[tuple[str, str], list[Target]] = {}
        for one in sorted(targets, key=lambda one: one.rows):
            self._sorted.setdefault((one.group, one.field), []).append(one)

    def over(self, group: str, field: str, rows: Span, columns: Span) -> tuple[Target, ...]:
        """Those of a field that share rows and columns with a segment."""
        found = self._sorted.get((group, field), [])
        low = bisect.bisect_right(found, rows[0], key=lambda one: one.rows[1])
        high = bisect.bisect_left(found, rows[1], key=lambda one: one.rows[0])
        return tuple(one for one in found[low:high] if one.overlap(columns) is not None)

    def want(self, segment: Segment, rows: Span) -> bool:
        """Whether there are any over rows of a segment, of whichever of its fields."""
        return any(
            self.over(segment.group, field, rows, segment.columns) for field in segment.fields
        )

    def touch(self, cover: Cover) -> bool:
        """Whether a part with such rows may hold any of them: no work for each of its tables."""
        wanted = self._covers.get(cover.group)
        return (
            wanted is not None
            and _meet(wanted.share, cover.share)
            and _meet(wanted.columns, cover.columns)
            and any(_meet(one, other) for one in wanted.tables for other in cover.tables)
        )

    @functools.cached_property
    def _covers(self) -> dict[str, Cover]:
        """Group to where its targets lie."""
        return {
            group.name: cover
            for group in self._layout.groups
            if (cover := self._cover(group)) is not None
        }

    def _cover(self, group: GroupEntry) -> Cover | None:
        targets = [one for one in self.all if one.group == group.name]
        spans = blocks.rows_of(one.rows for one in targets)
        columns = [one.columns or (0, group.width) for one in targets]
        return manifest.cover(group, self._layout.tables, spans, columns) if len(spans) else None


def _meet(one: Span, other: Span) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


class _Meter:
    """Counts bytes read, for the progress callback."""

    def __init__(self, total: int, progress: Progress | None):
        self.done = 0
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self._total)


@dataclasses.dataclass(frozen=True, eq=False)
class Read:
    """Positions ``[start, stop)`` of one field of a segment, within one chunk."""

    field: _StoredField
    rows: Rows
    start: int
    stop: int
    targets: tuple[Target, ...]

    @property
    def nbytes(self) -> int:
        """Stored bytes of the piece."""
        return sum(
            entry.nbytes * (self.stop - self.start) // max(1, self.field.segment.count)
            for entry in (*self.field.stored.values(), *self.field.beside)
        )

    def run(self, meter: _Meter, scratch: Staging) -> None:
        """Reads, decodes and merges the piece; what is read on the way is in ``scratch``."""
        direct = self._direct_target()
        if direct is not None:
            self._read(self.field.stored[""], direct.view(codecs.stored_dtype(direct.dtype)))
        else:
            self._merge(scratch)
            self._merge_beside()
        meter.add(self.nbytes)

    def load(self) -> Iterator[RowBlock]:
        """Reads and decodes the piece; a later block overwrites an earlier one."""
        segment = self.field.segment
        found: dict[str, np.ndarray] = {}
        for entry in self.field.stored.values():
            shape = (self.stop - self.start, *entry.shape[1:])
            found[entry.name] = np.empty(shape, np.dtype(entry.dtype))
            self._read(entry, found[entry.name])
        block = EncodedBlock(segment.group, self.rows, segment.columns, found)
        yield codecs.decode_block(block, [self.field.spec])
        beside = self._beside()
        if beside is not None:
            yield beside

    def _direct_target(self) -> np.ndarray | None:
        """The part of a final buffer that the stored bytes can be read into as they are."""
        if self.field.spec.codec != "raw" or not isinstance(self.rows, range):
            return None
        for target in self.targets:
            first, last = target.rows
            if first <= self.rows.start and self.rows.stop <= last:
                view = target.buffer[self.rows.start - first : self.rows.stop - first]
                same = target.columns in (None, self.field.segment.columns)
                return view if same and len(self.targets) == 1 else None
        return None

    def _merge(self, scratch: Staging) -> None:
        found: dict[str, np.ndarray] = {}
        segment = self.field.segment
        try:
            for entry in self.field.stored.values():
                shape = (self.stop - self.start, *entry.shape[1:])
                found[entry.name] = scratch.take(shape, np.dtype(entry.dtype))
                self._read(entry, found[entry.name])
            block = EncodedBlock(segment.group, self.rows, segment.columns, found)
            merge.apply_encoded(block, [self.field.spec], self.targets)
        finally:
            for buffer in found.values():
                scratch.give_back(buffer)

    def _merge_beside(self) -> None:
        beside = self._beside()
        if beside is not None:
            merge.apply(beside, self.targets)

    def _beside(self) -> RowBlock | None:
        """Rows of the piece that its codec did not hold: they replace what it made of them."""
        field = self.field
        if not field.beside:
            return None
        first, last = np.searchsorted(field.beside_at, (self.start, self.stop))
        if first == last:
            return None
        entry = field.beside[0]
        found = np.empty((last - first, *entry.shape[1:]), np.dtype(entry.dtype))
        field.read(entry, int(first), int(last), found)
        rows = np.asarray(self.rows)[field.beside_at[first:last] - self.start]
        values = {field.spec.name: found.view(codecs.dtype_of(field.spec.dtype))}
        return RowBlock(field.segment.group, rows, field.segment.columns, values)

    def _read(self, entry: ArrayEntry, out: np.ndarray) -> None:
        self.field.read(entry, self.start, self.stop, out)


@dataclasses.dataclass(frozen=True, eq=False)
class _StoredField:
    """One field of a segment: its spec as the segment has it."""

    part: StoredPart
    segment: Segment
    spec: FieldSpec

    @functools.cached_property
    def stored(self) -> dict[str, ArrayEntry]:
        """Codec suffix to the stored array."""
        suffixes = codecs.get(self.spec.codec).stored(
            self.spec.trailing, codecs.dtype_of(self.spec.dtype)
        )
        return {suffix: self._entries[self._name(suffix)] for suffix in suffixes}

    @functools.cached_property
    def beside(self) -> tuple[ArrayEntry, ...]:
        """The rows that the codec did not hold, and their positions; empty where there are none."""
        if codecs.get(self.spec.codec).lossless:
            return ()
        names = [self._name(suffix) for suffix in (codecs.BESIDE, codecs.BESIDE_AT)]
        return tuple(self._entries[name] for name in names if name in self._entries)

    @functools.cached_property
    def beside_at(self) -> np.ndarray:
        """Positions in the segment, ascending, of the rows that the codec did not hold."""
        entry = self.beside[1]
        out = memory.empty_buffer(entry.shape, np.dtype(entry.dtype))
        self.read(entry, 0, entry.shape[0], out)
        return out

    @functools.cached_property
    def _entries(self) -> dict[str, ArrayEntry]:
        return {entry.name: entry for entry in self.segment.arrays}

    def _name(self, suffix: str) -> str:
        return codecs.array_name(self.spec.name, suffix)

    def read(self, entry: ArrayEntry, start: int, stop: int, out: np.ndarray) -> None:
        """Reads rows of one of the arrays."""
        self.part.read_array(self.segment, entry, start, stop, out)


def pieces(save: StoredSave, targets: Targets, numbers: RowNumbers | None = None) -> list[Read]:
    """The work of one save, in pieces of different rows.

    Args:
      save: of a chain.
      targets: what is wanted of it.
      numbers: as for ``fill``.

    Raises:
      Damaged: a manifest, or row numbers, are missing or altered.
    """
    found = []
    for part in save.parts(targets.touch):
        for segment in part.record.segments:
            held = (numbers or stored_rows)(part, segment, targets)
            if held is None:
                continue
            part.check(segment)
            for field in segment.fields:
                spec = segment.spec(part.groups[segment.group], field)
                found += _field_pieces(_StoredField(part, segment, spec), held, targets)
    return found


def _field_pieces(stored: _StoredField, held: HeldRows, targets: Targets) -> Iterator[Read]:
    rows, first = held
    chunk_rows = stored.stored[""].chunk_rows
    segment, field = stored.segment, stored.spec.name

    def over(part: Rows) -> tuple[Target, ...]:
        return targets.over(segment.group, field, reach(part), segment.columns)

    wanted = [blocks.row_slice(rows, *target.rows) for target in over(rows)]
    for start, stop in blocks.joined((first + span.start, first + span.stop) for span in wanted):
        while start < stop:
            end = min(stop, (start // chunk_rows + 1) * chunk_rows)
            part = rows[start - first : end - first]
            yield Read(stored, part, start, end, over(part))
            start = end


def reach(rows: Rows) -> Span:
    """From the first to the last of some rows."""
    if isinstance(rows, Ranges):
        return rows.spans[0][0], rows.spans[-1][1]
    return (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)


def check_covered(base: StoredSave, targets: Targets, work: Sequence[Read]) -> None:
    """Checks that a base holds every row of what is wanted, exactly once.

    Args:
      base: the save.
      targets: what is wanted.
      work: its ``pieces``.

    Raises:
      Damaged: it does not.
    """
    found: dict[int, int] = collections.Counter()
    for piece in work:
        for target in piece.targets:
            held = blocks.row_slice(piece.rows, *target.rows)
            common = target.overlap(piece.field.segment.columns)
            assert common is not None
            found[id(target)] += (held.stop - held.start) * (common[1] - common[0])
    for target in targets.all:
        columns = target.columns or (0, 1)
        wanted = (target.rows[1] - target.rows[0]) * (columns[1] - columns[0])
        if found[id(target)] != wanted:
            raise Damaged(
                base.name,
                f"a base with {wanted} cells of {target.group}.{target.field}, rows {target.rows}",
                f"{found[id(target)]}",
            )


def stored_rows(part: StoredPart, segment: Segment, targets: Targets) -> HeldRows | None:
    """The rows of a segment, checked against its group; None where none of them is wanted."""
    if segment.ranges is None and not targets.want(segment, (0, part.groups[segment.group].rows)):
        return None
    return HeldRows(segment_rows(part, segment))


def segment_rows(part: StoredPart, segment: Segment) -> Rows:
    """The rows of a segment, checked against its group.

    Raises:
      Damaged: row numbers are missing or altered.
    """
    part.check(segment)
    if segment.ranges is not None:
        return blocks.rows_of(segment.ranges)
    return gap_rows(part, segment)


def gap_rows(
    part: StoredPart,
    segment: Segment,
    start: int = 0,
    stop: int | None = None,
    *,
    after: int | None = None,
) -> np.ndarray:
    """Row numbers of a segment that are stored as gaps, checked against its group.

    Args:
      part: the segment's.
      segment: one without ranges.
      start: the first of them.
      stop: the last + 1; all by default.
      after: the row before the first; None where they begin with the segment's first.

    Raises:
      Damaged: they are missing or altered.
    """
    entry = next(entry for entry in segment.arrays if entry.name == layout.GAPS)
    stop = entry.shape[0] if stop is None else stop
    out = memory.empty_buffer((stop - start,), np.dtype(entry.dtype))
    part.read_array(segment, entry, start, stop, out)
    total = part.groups[segment.group].rows
    name = part.directory(segment, entry).shown(5)
    return gaps.decode_gaps(out, total_rows=total, name=name, after=after)
