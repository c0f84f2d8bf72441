# SPDX-License-Identifier: Apache-2.0
"""Marks of a log onto the buffers of a restored step; no jax.

Buffers that nobody sees yet are written as frames are read (``replay``). Those that are in use are
not before all frames are known to be whole: ``pieces`` are read and decoded first.

Of the marks of a stretch the newest is read first, and a row that was seen is passed over in all
earlier ones: a row that is touched at every step is decoded once. Frames whose fields and columns
overlap without being the same, as after a change of shardings, are applied in their order instead.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from deltackpt import codecs
from deltackpt.errors import Damaged, DamagedLog
from deltackpt.format import blocks, frames, gaps, names
from deltackpt.format.blocks import EncodedBlock, RowBlock, Span
from deltackpt.format.frames import ItemsHead, Kind
from deltackpt.format.manifest import Layout
from deltackpt.format.segments import GroupEntry, Segment
from deltackpt.reading import bounds, merge
from deltackpt.reading.dense_values import DenseValues
from deltackpt.reading.log_files import FrameAt, Mark, damage_of
from deltackpt.reading.stretches import Leg, Way
from deltackpt.reading.targets import Targets
from deltackpt.storage import frame_arrays


@dataclasses.dataclass(frozen=True, eq=False)
class Replayed:
    """What was read of a log.

    Attributes:
      rows: table name to the numbers of all rows that the marks hold, int64 ascending, whichever of
        them were wanted.
      bytes_read: of the bodies of frames.
      marks: how many marks of each process were read.
    """

    rows: Mapping[str, np.ndarray]
    bytes_read: int
    marks: int


class LoggedState(NamedTuple):
    """A full point, but for its tables.

    Attributes:
      dense: its dense leaves.
      items: its further items, by process and name.
      rows: as in ``Replayed``, of the marks from its step on.
    """

    dense: DenseValues
    items: Mapping[int, Mapping[str, Any]]
    rows: Mapping[str, np.ndarray]

    def items_for(self, process: int, count: int) -> dict[str, Any]:
        """The items of one of several processes: its own, where as many have logged.

        Otherwise those of the first.

        Args:
          process: its index.
          count: how many there are.
        """
        return dict(self.items[process if count == len(self.items) else 0])


def replay(way: Way, targets: Targets, layout: Layout) -> Replayed:
    """Applies the marks of a way to buffers that hold its step; verified.

    Args:
      way: from the step to a point.
      targets: the buffers.
      layout: of the step.

    Raises:
      DamagedLog: a frame is missing or altered; the mark that it belongs to is named.
    """
    seen = SeenRows(layout)
    bytes_read = 0
    for piece in pieces(way, layout, seen):
        piece.apply(targets)
        bytes_read += piece.nbytes
    count = sum(max(map(len, leg.marks.values()), default=0) for leg in way.legs)
    return Replayed(rows=seen.by_table(), bytes_read=bytes_read, marks=count)


def pieces(way: Way, layout: Layout, seen: SeenRows) -> Iterator[LoggedRows]:
    """The frames of rows of a way, to be read and applied in this order, each before the next.

    Args:
      way: from a step, or from a point above it, to a point.
      layout: of the step.
      seen: gets the numbers of all rows that are read.

    Raises:
      DamagedLog: as ``replay``.
    """
    for leg in way.legs:
        _check_layout(leg, layout, way)
        yield from _pieces_of(leg, layout, seen)


def items_of(way: Way) -> dict[int, dict[str, Any]]:
    """Further items of the point: those of each process, by name.

    Raises:
      DamagedLog: they are missing or altered.
    """
    return {process: _items_of(mark) for process, mark in way.last_marks.items()}


def _items_of(mark: Mark) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with damage_of(mark):
        for frame in mark.frames_of(Kind.ITEMS):
            head: ItemsHead = frame.head
            sizes = [item.nbytes for item in head.items]
            bodies = frames.pieces_of(sizes, frame.read(), frame.name)
            for item, data in zip(head.items, bodies, strict=True):
                found[item.name] = bytes(data) if item.kind == "bytes" else _json(data, frame.name)
    return found


def _json(data: memoryview, name: str) -> Any:
    try:
        return json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise Damaged(name, "an item of JSON", str(error)) from error


def _check_layout(leg: Leg, layout: Layout, way: Way) -> None:
    if not leg.head.layout.has_rows_of(layout):
        raise DamagedLog(
            f"stretch {leg.head.stretch}",
            f"the tables of step {way.step.step}",
            "others",
            "restore the step itself: restore_latest(log=None)",
            way.point.save_id,
        )


# Rows.

#: Group, columns and fields: frames that have the same hold the same part of their rows.
_Class = tuple[str, Span, tuple[str, ...]]


class SeenRows:
    """Which rows of each group some marks hold."""

    def __init__(self, layout: Layout):
        """None of them.

        Args:
          layout: the tables.
        """
        self._layout = layout
        self._rows = {group.name: np.zeros(group.rows, bool) for group in layout.groups}

    def add(self, group: str, rows: np.ndarray | slice) -> None:
        """Some virtual rows of a group are held."""
        self._rows[group][rows] = True

    def or_those_of(self, other: SeenRows) -> SeenRows:
        """These rows, and those of other marks of the same tables."""
        found = SeenRows(self._layout)
        for name, rows in self._rows.items():
            np.logical_or(rows, other._rows[name], out=found._rows[name])
        return found

    def add_blocks(self, found: Iterable[RowBlock]) -> None:
        """The rows of some blocks are held."""
        for block in found:
            self.add(block.group, np.asarray(block.rows))

    def has_more_than(self, other: SeenRows, targets: Targets) -> bool:
        """Whether some of these rows are wanted, and not among others."""
        for group, (start, stop) in {(one.group, one.rows) for one in targets.all}:
            if (self._rows[group][start:stop] & ~other._rows[group][start:stop]).any():
                return True
        return False

    def by_table(self) -> dict[str, np.ndarray]:
        """Table name to the numbers of its rows."""
        found = {}
        for table in self._layout.tables:
            part = self._rows[table.group][table.offset : table.offset + table.rows]
            found[table.name] = np.flatnonzero(part)
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class LoggedRows:
    """The rows of a frame, read when they are asked for.

    Attributes:
      mark: that the frame belongs to.
      frame: where they are.
      group: of the rows.
      seen: notes them.
      newer: those of frames before, which are newer; None where later ones replace earlier ones.
    """

    mark: Mark
    frame: FrameAt
    group: GroupEntry
    seen: SeenRows
    newer: np.ndarray | None

    @property
    def nbytes(self) -> int:
        """Bytes of the frame."""
        return self.frame.body_bytes

    def apply(self, targets: Targets) -> None:
        """Reads the rows, and writes them but for those that newer frames hold.

        Raises:
          DamagedLog: the frame is missing or altered.
        """
        with damage_of(self.mark):
            if (block := self._read()) is not None:
                block.apply(targets)

    def load(self, targets: Targets) -> list[RowBlock]:
        """What ``apply`` would write, decoded, of one field each; later ones replace earlier ones.

        Raises:
          DamagedLog: the frame is missing or altered.
        """
        with damage_of(self.mark):
            block = self._read()
            return [] if block is None else list(block.decoded(targets))

    def _read(self) -> _Block | None:
        head, name = self.frame.head, self.frame.name
        segment = head.segment
        stored = frame_arrays.arrays_of(head.arrays, head.sizes, self.frame.read(), name)
        rows = _row_numbers(segment, stored, self.group, self.frame.name)
        if not len(rows):
            return None
        self.seen.add(self.group.name, rows)
        block = _decodable(segment, stored, self.group, rows, self.frame.name)
        if self.newer is None:
            return block
        fresh = ~self.newer[rows]
        self.newer[rows] = True
        if fresh.all():
            return block
        return block.only(fresh) if fresh.any() else None


def segments_of(leg: Leg) -> Iterator[Segment]:
    """What the frames of rows of some marks hold."""
    for marks in leg.marks.values():
        for mark in marks:
            for frame in mark.frames_of(Kind.ROWS):
                yield frame.head.segment


def _pieces_of(leg: Leg, layout: Layout, seen: SeenRows) -> Iterator[LoggedRows]:
    groups = layout.group_by_name
    tables = collections.Counter(table.group for table in layout.tables)
    by_class: dict[_Class, list[tuple[Mark, FrameAt]]] = {}
    # Marks of a number are of one moment: their rows are of different processes.
    order = sorted(
        ((mark, frame) for marks in leg.marks.values() for mark in marks for frame in mark.frames),
        key=lambda one: one[0].save_id.attempt,
        reverse=True,
    )
    for mark, frame in order:
        if frame.kind == Kind.ROWS:
            segment = frame.head.segment
            with damage_of(mark):
                bounds.check_segment(segment, groups, tables, frame.name)
            key = segment.group, segment.columns, segment.fields
            by_class.setdefault(key, []).append((mark, frame))
    overlapping = _overlapping(by_class, groups)
    for key, found in by_class.items():
        if key[0] not in overlapping:
            newer = np.zeros(groups[key[0]].rows, bool)
            for mark, frame in found:
                yield LoggedRows(mark, frame, groups[key[0]], seen, newer)
    late = [one for key, found in by_class.items() if key[0] in overlapping for one in found]
    for mark, frame in sorted(late, key=lambda one: one[0].save_id.attempt):
        yield LoggedRows(mark, frame, groups[frame.head.segment.group], seen, None)


def _overlapping(classes: Iterable[_Class], groups: Mapping[str, GroupEntry]) -> set[str]:
    """Groups of which frames share cells without holding the same fields and columns."""
    found = set()
    for one, other in itertools.combinations(classes, 2):
        if one[0] != other[0] or one[0] in found:
            continue
        specs = {spec.name: spec for spec in groups[one[0]].fields}
        split = [groups[one[0]].columns(specs[name]) for name in {*one[2]} & {*other[2]}]
        apart = blocks.common(one[1], other[1])
        if split and (apart[0] < apart[1] or None in split):
            found.add(one[0])
    return found


def _row_numbers(
    segment: Segment, stored: Mapping[str, np.ndarray], group: GroupEntry, name: str
) -> np.ndarray:
    if segment.ranges is not None:
        return np.asarray(blocks.rows_of(segment.ranges))
    return gaps.decode_gaps(stored[names.GAPS], total_rows=group.rows, name=name)


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """Rows of a frame, ready to be decoded; those that a codec does not hold beside them."""

    segment: Segment
    group: GroupEntry
    rows: np.ndarray
    arrays: Mapping[str, np.ndarray]
    beside: tuple[RowBlock, ...]

    def only(self, chosen: np.ndarray) -> _Block:
        """Some of the rows; ``chosen`` is (n,) bool."""
        rows = self.rows[chosen]
        beside = []
        for block in self.beside:
            held = np.isin(np.asarray(block.rows), rows, assume_unique=True)
            fields = {name: array[held] for name, array in block.fields.items()}
            beside.append(
                dataclasses.replace(block, rows=np.asarray(block.rows)[held], fields=fields)
            )
        arrays = {name: array[chosen] for name, array in self.arrays.items()}
        return dataclasses.replace(self, rows=rows, arrays=arrays, beside=tuple(beside))

    def apply(self, targets: Targets) -> None:
        """Decodes and writes them into every buffer that they belong to."""
        segment = self.segment
        span = int(self.rows[0]), int(self.rows[-1]) + 1
        for field in segment.fields:
            over = targets.over(segment.group, field, span, segment.columns)
            if over:
                block = EncodedBlock(segment.group, self.rows, segment.columns, self.arrays)
                merge.apply_encoded(block, [segment.spec(self.group, field)], over)
        for block in self.beside:
            for field in block.fields:
                merge.apply(block, targets.over(segment.group, field, span, segment.columns))

    def decoded(self, targets: Targets) -> Iterator[RowBlock]:
        """The rows that belong to some buffers, of one field each."""
        segment = self.segment
        span = int(self.rows[0]), int(self.rows[-1]) + 1
        for field in segment.fields:
            spec = segment.spec(self.group, field)
            for target in targets.over(segment.group, field, span, segment.columns):
                chosen = blocks.row_slice(self.rows, *target.rows)
                if chosen.start < chosen.stop:
                    arrays = {name: array[chosen] for name, array in self.arrays.items()}
                    rows = self.rows[chosen]
                    block = EncodedBlock(segment.group, rows, segment.columns, arrays)
                    yield codecs.decode_block(block, [spec])
        yield from self.beside


def _decodable(
    segment: Segment,
    stored: Mapping[str, np.ndarray],
    group: GroupEntry,
    rows: np.ndarray,
    name: str,
) -> _Block:
    arrays: dict[str, np.ndarray] = {}
    beside = []
    for field in segment.fields:
        spec = segment.spec(group, field)
        codec, dtype = codecs.get(spec.codec), codecs.dtype_of(spec.dtype)
        for suffix in codec.stored(spec.trailing, dtype):
            array = codecs.array_name(field, suffix)
            arrays[array] = stored[array]
        at = stored.get(codecs.array_name(field, codecs.BESIDE_AT))
        if at is not None:
            ascending = np.all(at[1:] > at[:-1])
            if len(at) and not (ascending and 0 <= at[0] and at[-1] < len(rows)):
                raise Damaged(name, f"ascending places of {len(rows)} rows", "others")
            values = stored[codecs.array_name(field, codecs.BESIDE)].view(dtype)
            fields = {field: values.reshape(-1, *spec.trailing)}
            beside.append(RowBlock(segment.group, rows[at], segment.columns, fields))
    return _Block(segment, group, rows, arrays, tuple(beside))
