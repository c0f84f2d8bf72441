# SPDX-License-Identifier: Apache-2.0
"""Marks of a log onto the buffers of a restored step, and their dense leaves; no jax.

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
import zstandard

from deltackpt import codecs
from deltackpt.errors import Damaged, DamagedLog
from deltackpt.format import blocks, frames, gaps, names
from deltackpt.format.blocks import EncodedBlock, RowBlock, Span
from deltackpt.format.frames import DenseHead, DenseValue, ItemsHead, Kind, RowsHead
from deltackpt.format.manifest import GroupEntry, Layout, Segment
from deltackpt.reading import bounds, merge
from deltackpt.reading.log_files import FrameAt, Mark, ProcessLog
from deltackpt.reading.stretches import Leg, Way
from deltackpt.reading.targets import Targets


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


class LoggedDense(NamedTuple):
    """Dense leaves of a full mark.

    Attributes:
      values: key to value of the database that Orbax keeps of them, of all processes.
      files: the files beside it, by their paths in the item.
    """

    values: Mapping[str, memoryview]
    files: Mapping[str, memoryview]


def replay(way: Way, targets: Targets, layout: Layout) -> Replayed:
    """Applies the marks of a way to buffers that hold its step; verified.

    Args:
      way: from the step to a point.
      targets: the buffers.
      layout: of the step.

    Raises:
      DamagedLog: a frame is missing or altered; the mark that it belongs to is named.
    """
    seen = _Seen(layout)
    bytes_read = 0
    for leg in way.legs:
        _check_layout(leg, layout, way)
        bytes_read += _replay_leg(leg, targets, layout, seen)
    count = sum(max(map(len, leg.marks.values()), default=0) for leg in way.legs)
    return Replayed(rows=seen.by_table(), bytes_read=bytes_read, marks=count)


def dense_of(way: Way) -> LoggedDense:
    """The dense leaves of the point.

    Raises:
      DamagedLog: they are missing or altered.
    """
    values: dict[str, memoryview] = {}
    files: dict[str, memoryview] = {}
    for process, mark in way.last_marks.items():
        reader = _DenseReader(way.era.processes[process].log)
        with _damage_of(mark):
            for frame in _frames_of(mark, Kind.DENSE):
                for value, data in reader.read(frame):
                    (files if value.file else values)[value.key] = data
    return LoggedDense(values, files)


def items_of(way: Way) -> dict[str, Any]:
    """Further items of the point, by name: those of process 0.

    Raises:
      DamagedLog: they are missing or altered.
    """
    found: dict[str, Any] = {}
    mark = way.last_marks[0]
    with _damage_of(mark):
        for frame in _frames_of(mark, Kind.ITEMS):
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
        raise Damaged(
            f"stretch {leg.head.stretch}",
            f"the tables of step {way.step.step}",
            "others",
            "restore the step itself: restore_latest(log=None)",
        )


def _frames_of(mark: Mark, kind: Kind) -> Iterator[FrameAt]:
    return (frame for frame in mark.frames if frame.kind == kind)


class _damage_of:
    """Names the mark that what is damaged belongs to."""

    def __init__(self, mark: Mark):
        self._mark = mark

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Damaged) and not isinstance(error, DamagedLog):
            raise DamagedLog.of(error, self._mark.save_id) from error


# Rows.

#: Group, columns and fields: frames that have the same hold the same part of their rows.
_Class = tuple[str, Span, tuple[str, ...]]


class _Seen:
    """Which rows of each group the marks hold."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._rows = {group.name: np.zeros(group.rows, bool) for group in layout.groups}

    def add(self, group: str, rows: np.ndarray | slice) -> None:
        self._rows[group][rows] = True

    def by_table(self) -> dict[str, np.ndarray]:
        """Table name to the numbers of its rows."""
        found = {}
        for table in self._layout.tables:
            part = self._rows[table.group][table.offset : table.offset + table.rows]
            found[table.name] = np.flatnonzero(part)
        return found


def _replay_leg(leg: Leg, targets: Targets, layout: Layout, seen: _Seen) -> int:
    groups = layout.group_by_name
    tables = collections.Counter(table.group for table in layout.tables)
    by_class: dict[_Class, list[tuple[Mark, FrameAt]]] = {}
    # Marks of a number are of one moment: their rows are of different processes.
    order = sorted(
        ((mark, frame) for marks in leg.marks.values() for mark in marks for frame in mark.frames),
        key=lambda one: one[0].save_id.attempt,
        reverse=True,
    )
    bytes_read = 0
    for mark, frame in order:
        if frame.kind == Kind.ROWS:
            segment = frame.head.segment
            with _damage_of(mark):
                bounds.check_segment(segment, groups, tables, frame.name)
            key = segment.group, segment.columns, segment.fields
            by_class.setdefault(key, []).append((mark, frame))
            bytes_read += frame.body_bytes
    overlapping = _overlapping(by_class, groups)
    for key, found in by_class.items():
        if key[0] in overlapping:
            continue
        newer = np.zeros(groups[key[0]].rows, bool)
        for mark, frame in found:
            _apply(mark, frame, targets, groups, seen, newer)
    late = [one for key, found in by_class.items() if key[0] in overlapping for one in found]
    for mark, frame in sorted(late, key=lambda one: one[0].save_id.attempt):
        _apply(mark, frame, targets, groups, seen, None)
    return bytes_read


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


def _apply(
    mark: Mark,
    frame: FrameAt,
    targets: Targets,
    groups: Mapping[str, GroupEntry],
    seen: _Seen,
    newer: np.ndarray | None,
) -> None:
    """Applies the rows of a frame, but for those that newer ones hold, and notes them."""
    head: RowsHead = frame.head
    segment, group = head.segment, groups[head.segment.group]
    with _damage_of(mark):
        stored = frames.arrays_of(segment, frame.read(), frame.name)
        rows = _row_numbers(segment, stored, group, frame.name)
        if not len(rows):
            return
        seen.add(group.name, rows)
        block = _decodable(segment, stored, group, rows, frame.name)
        if newer is not None:
            fresh = ~newer[rows]
            newer[rows] = True
            if not fresh.any():
                return
            if not fresh.all():
                block = block.only(fresh)
        block.apply(targets)


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


# Dense leaves.


class _DenseReader:
    """Reads dense leaves of one process; differences by way of what they are against."""

    def __init__(self, log: ProcessLog):
        self._frames = {
            frame.place.seq: frame for mark in log.marks for frame in _frames_of(mark, Kind.DENSE)
        }

    def read(self, frame: FrameAt) -> list[tuple[DenseValue, memoryview]]:
        """The values of a frame, as they were.

        Raises:
          Damaged: it, or one that it needs, is missing or altered.
        """
        chain = [frame]
        while (needed := self._needs(chain[-1])) is not None:
            chain.append(needed)
        # Against what is not there is read from the oldest on.
        held: dict[str, memoryview] = {}
        found: list[tuple[DenseValue, memoryview]] = []
        for one in reversed(chain):
            found = self._decoded(one, held)
            held = {value.key: data for value, data in found}
        return found

    def _needs(self, frame: FrameAt) -> FrameAt | None:
        head: DenseHead = frame.head
        against = {value.against for value in head.values} - {None}
        if not against:
            return None
        [seq] = against if len(against) == 1 else (None,)
        if seq not in self._frames:
            raise Damaged(frame.name, f"one frame {seq} that it is the difference to", "none")
        return self._frames[seq]

    def _decoded(
        self, frame: FrameAt, held: Mapping[str, memoryview]
    ) -> list[tuple[DenseValue, memoryview]]:
        head: DenseHead = frame.head
        sizes = [value.nbytes for value in head.values]
        bodies = frames.pieces_of(sizes, frame.read(), frame.name)
        found = []
        for value, data in zip(head.values, bodies, strict=True):
            if value.against is not None:
                before = held.get(value.key)
                if before is None or before.nbytes != value.decoded_bytes:
                    raise Damaged(frame.name, f"a value of {value.key} before", "none")
                data = undiffered(data, before, value.itemsize, frame.name)
            found.append((value, data))
        return found


def differed(now: np.ndarray, before: np.ndarray, itemsize: int) -> bytes:
    """The difference of two values of as many bytes: XOR, as byte planes, by zstd.

    Args:
      now: (n,) uint8.
      before: likewise.
      itemsize: of the numbers in them; it divides n.
    """
    planes = np.bitwise_xor(now, before).reshape(-1, itemsize).T
    return zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(planes).data)


def undiffered(data: memoryview, before: memoryview, itemsize: int, name: str) -> memoryview:
    """What ``differed`` was made of.

    Args:
      data: the difference.
      before: what it is to.
      itemsize: of the numbers in it.
      name: how errors name it.

    Raises:
      Damaged: it is none of such a value.
    """
    nbytes = before.nbytes
    try:
        # It takes memory for as many bytes as the data say that there are.
        if (claimed := zstandard.frame_content_size(data)) != nbytes:
            raise Damaged(name, f"a difference of {nbytes} bytes", f"{claimed} bytes")
        plain = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise Damaged(name, "bytes of zstd", str(error)) from error
    if nbytes % itemsize:
        raise Damaged(name, f"numbers of {itemsize} bytes", f"{nbytes} bytes")
    planes = np.frombuffer(plain, np.uint8).reshape(itemsize, -1)
    found = np.ascontiguousarray(planes.T).reshape(-1)
    return np.bitwise_xor(found, np.frombuffer(before, np.uint8)).data
