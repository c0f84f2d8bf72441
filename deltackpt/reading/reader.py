# SPDX-License-Identifier: Apache-2.0
"""Reading: a chain of saves merged, newest wins, straight into the final host buffers; no jax.

The base's chunks are read into the buffers themselves. Then, save by save, the chunks of each
delta are read, verified, decoded into a small piece and scattered; within one save the chunks
hold different rows, so they run in parallel, and of a field a save is finished before the next
begins.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from deltackpt import codecs
from deltackpt.errors import Damaged, RestoreError
from deltackpt.format import blocks, gaps, names
from deltackpt.format.blocks import Box, EncodedBlock, Ranges, RowBlock, Rows, Span
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import Layout
from deltackpt.format.segments import ArrayEntry, FieldSpec, Segment
from deltackpt.reading import lanes, merge
from deltackpt.reading.chains import raise_if_removed, read_whole
from deltackpt.reading.merge import Target
from deltackpt.reading.meter import Meter, Progress
from deltackpt.reading.saves import StoredPart, StoredSave
from deltackpt.reading.targets import Targets, Wanted, empty_buffers
from deltackpt.resources import memory, pages
from deltackpt.resources.staging import Staging

#: More than two cores keep busy, as some wait for the disk (cold 1.68 s, by two threads 1.80).
_READERS = 3

#: Kept for the next piece: fresh memory would cost more than the merge.
_SCRATCH_BYTES = 128 * 2**20
#: Pieces up to this size are read ahead, so many bytes of them in all.
_AHEAD_PIECE_BYTES, _AHEAD_BYTES = 1 << 18, 1 << 26
_SMALL_SAVE_BYTES = 1 << 20

_T = TypeVar("_T")


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
      files: the bytes of the files beside the tables, by their posix path below the step, where
        the source has them too; of a point as ``point_files`` names them.
      point: whether they are those of the point of the log that was asked for. Else all marks up to
        it are still to be replayed, some of which may have been before.
    """

    buffers: dict[str, dict[str, dict[Box, np.ndarray]]]
    layout: Layout
    chain: tuple[SaveInfo, ...]
    bytes_read: int
    seconds: float
    source: str = "storage"
    placed: dict[str, dict[str, Any]] | None = None
    files: Mapping[str, np.ndarray] | None = None
    point: bool = False

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

    Where the chain does not hold, another one to the same step is read: ``chains.read_whole``.

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


class StoredRows(NamedTuple):
    """Row numbers of a segment, from its position ``first`` on: all that can be wanted."""

    rows: Rows
    first: int = 0


#: What gives the row numbers of a segment; None where none of them is wanted.
RowNumbers = Callable[[StoredPart, Segment, "Targets"], StoredRows | None]


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
            ahead = _Ahead()
            work = _begun(saves, lambda save: ahead.read(pieces(save, targets, numbers)), pool)
            if not over_parent:
                check_covered(saves, targets, [[turn.piece for turn in found] for found in work])
            turns = [turn for found in work for turn in found]
            meter = Meter(progress, sum(turn.piece.nbytes for turn in turns))
            if all(turn.read is not None for turn in turns):
                for turn in turns:  # A thread would take longer.
                    turn.run(meter, scratch)
            else:
                lanes.run(_by_field(work), lambda turn: turn.run(meter, scratch), pool, readers)
        except RestoreError as error:
            pool.shutdown(cancel_futures=True)
            raise_if_removed(saves, error)
            raise
    return meter.done


def _begun(
    saves: Sequence[StoredSave],
    begin: Callable[[StoredSave], _T],
    pool: concurrent.futures.ThreadPoolExecutor,
) -> list[_T]:
    """What is begun of each save; on threads where there is something to read.

    Of a small save nearly all is Python, for which threads would wait in turn: twice as slow.
    """
    large = {
        number: pool.submit(begin, save)
        for number, save in enumerate(saves)
        if save.info.nbytes > _SMALL_SAVE_BYTES
    }
    return [
        large[number].result() if number in large else begin(save)
        for number, save in enumerate(saves)
    ]


class _Turn(NamedTuple):
    """A piece, and its rows where they were read before its turn."""

    piece: Read
    read: Sequence[RowBlock] | None

    def run(self, meter: Meter, scratch: Staging) -> None:
        """Merges the piece; what is still to be read is read on the way."""
        if self.read is None:
            self.piece.run(meter, scratch)
        else:
            self.piece.merge(self.read, meter)


class _Ahead:
    """Reads small pieces before their turn: for each a thread would take longer than reading it."""

    def __init__(self) -> None:
        """Nothing was read."""
        self._lock = threading.Lock()
        self._free_bytes = _AHEAD_BYTES

    def read(self, found: Sequence[Read]) -> list[_Turn]:
        """The pieces, each with its rows where it is small."""
        return [_Turn(piece, list(piece.load()) if self._takes(piece) else None) for piece in found]

    def _takes(self, piece: Read) -> bool:
        nbytes = (piece.stop - piece.start) * max(1, piece.field.spec.row_bytes)
        with self._lock:
            if nbytes > min(_AHEAD_PIECE_BYTES, self._free_bytes):
                return False
            self._free_bytes -= nbytes
            return True


def _by_field(work: Sequence[Sequence[_Turn]]) -> list[list[list[_Turn]]]:
    """Of each field its turns, save by save: those of other fields need not wait for them."""
    found: dict[tuple[str, str], list[list[_Turn]]] = {}
    for number, turns in enumerate(work):
        for turn in turns:
            field = turn.piece.field
            lane = found.setdefault(
                (field.segment.group, field.spec.name), [[] for _ in range(len(work))]
            )
            lane[number].append(turn)
    return [*found.values()]


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

    def run(self, meter: Meter, scratch: Staging) -> None:
        """Reads, decodes and merges the piece; what is read on the way is in ``scratch``."""
        direct = self._direct_target()
        self._populate()
        if direct is not None:
            self._read(self.field.stored[""], direct.view(codecs.stored_dtype(direct.dtype)))
        else:
            self._merge(scratch)
            self._merge_beside()
        meter.add(self.nbytes)

    def merge(self, read: Sequence[RowBlock], meter: Meter) -> None:
        """Merges what ``load`` has read."""
        for block in read:
            merge.apply(block, self.targets)
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

    def _populate(self) -> None:
        """Takes the memory of rows that nobody has written yet, where they lie together."""
        if isinstance(self.rows, range):
            for target in self.targets:
                first, last = blocks.common(target.rows, reach(self.rows))
                pages.populate(target.buffer[first - target.rows[0] : last - target.rows[0]])

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


def _field_pieces(stored: _StoredField, held: StoredRows, targets: Targets) -> Iterator[Read]:
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


def check_covered(
    saves: Sequence[StoredSave], targets: Targets, work: Sequence[Sequence[Read]]
) -> None:
    """Checks that a base, or all shares of a rolling one, hold each row of what is wanted once.

    Args:
      saves: the chain.
      targets: what is wanted.
      work: the ``pieces`` of each save.

    Raises:
      Damaged: they do not.
    """
    base = saves[0]
    # A chain without a base begins with the window of a rolling one.
    window = 1 if base.head.rolling is None else base.head.rolling.window
    found: dict[int, int] = collections.Counter()
    for save, pieces_of in zip(saves[:window], work[:window], strict=True):
        for piece in pieces_of:
            shares = _shares(save, piece)
            for target in piece.targets:
                columns = target.overlap(piece.field.segment.columns)
                assert columns is not None
                for share in shares:
                    held = blocks.row_slice(piece.rows, *blocks.common(target.rows, share))
                    found[id(target)] += (held.stop - held.start) * (columns[1] - columns[0])
    for target in targets.all:
        columns = target.columns or (0, 1)
        wanted = (target.rows[1] - target.rows[0]) * (columns[1] - columns[0])
        if found[id(target)] != wanted:
            raise Damaged(
                base.name,
                f"a base with {wanted} cells of {target.group}.{target.field}, rows {target.rows}",
                f"{found[id(target)]}",
            )


def _shares(save: StoredSave, piece: Read) -> tuple[Span, ...]:
    """Where the rows of a piece count: in a base everywhere, else in the share of a rolling one."""
    rolling = save.head.rolling
    if rolling is None:
        return (reach(piece.rows),) if save.head.kind == "base" else ()
    segment = piece.field.segment
    rows = rolling.rows(piece.field.part.groups[segment.group], save.head.tables)
    return blocks.spans_of(rows[blocks.row_slice(rows, *reach(piece.rows))])


def stored_rows(part: StoredPart, segment: Segment, targets: Targets) -> StoredRows | None:
    """The rows of a segment, checked against its group; None where none of them is wanted."""
    if segment.ranges is None and not targets.want(segment, (0, part.groups[segment.group].rows)):
        return None
    return StoredRows(segment_rows(part, segment))


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
    entry = next(entry for entry in segment.arrays if entry.name == names.GAPS)
    stop = entry.shape[0] if stop is None else stop
    out = memory.empty_buffer((stop - start,), np.dtype(entry.dtype))
    part.read_array(segment, entry, start, stop, out)
    total = part.groups[segment.group].rows
    name = part.directory(segment, entry).shown(5)
    return gaps.decode_gaps(out, total_rows=total, name=name, after=after)
