# SPDX-License-Identifier: Apache-2.0
"""Replays WAL records onto the buffers of a restored step; no jax."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from deltackpt.errors import Damaged, DamagedWal
from deltackpt.format import blocks, frames
from deltackpt.format.blocks import RowBlock, Rows
from deltackpt.format.frames import ItemsHead, Kind
from deltackpt.format.manifest import Layout
from deltackpt.format.segments import ArrayEntry, GroupEntry, Segment
from deltackpt.layers import merge
from deltackpt.layers.merge import Piece, StoredRows
from deltackpt.layers.targets import Targets
from deltackpt.reading import bounds
from deltackpt.reading.dense_values import DenseValues
from deltackpt.reading.log_files import FrameAt, Mark, damage_of
from deltackpt.reading.stretches import Leg, Way
from deltackpt.resources.staging import Staging
from deltackpt.storage import frame_arrays
from deltackpt.storage.store import Spot


@dataclasses.dataclass(frozen=True, eq=False)
class Replayed:
    """Summary of a replay.

    Attributes:
      rows: table name to the indices of all rows in the records, wanted or not, int64 ascending.
      bytes_read: bytes of the frame bodies that were read.
      marks: number of records read for each process.
    """

    rows: Mapping[str, np.ndarray]
    bytes_read: int
    marks: int


class LoggedState(NamedTuple):
    """A full recovery point without its tables.

    Attributes:
      dense: its dense leaves.
      items: its additional items, by process and name.
      rows: as in ``Replayed``, for the records since its step.
    """

    dense: DenseValues
    items: Mapping[int, Mapping[str, Any]]
    rows: Mapping[str, np.ndarray]

    def items_for(self, process: int, count: int) -> dict[str, Any]:
        """Returns the items for a process: its own, if the number of processes has not changed.

        Otherwise, returns the items of process 0.

        Args:
          process: index of the process.
          count: number of processes.
        """
        return dict(self.items[process if count == len(self.items) else 0])


def replay(way: Way, targets: Targets, layout: Layout) -> Replayed:
    """Verifies the records from a step to a recovery point, and merges their rows into buffers.

    Args:
      way: the replay plan from the step to the point.
      targets: the buffers.
      layout: layout of the step.

    Raises:
      DamagedWal: a frame is missing or altered; the error names its record.
    """
    seen, layers = SeenRows(layout), layers_of(way, layout)
    scratch = Staging(merge.SCRATCH_BYTES)
    merge.run(plan(layers, targets, seen), scratch)
    count = sum(max(map(len, leg.marks.values()), default=0) for leg in way.legs)
    return Replayed(
        rows=seen.by_table(),
        bytes_read=sum(layer.frame.body_bytes for of_record in layers for layer in of_record),
        marks=count,
    )


def items_of(way: Way) -> dict[int, dict[str, Any]]:
    """Returns the additional items of the recovery point, by process and name.

    Raises:
      DamagedWal: the items are missing or altered.
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
        raise Damaged(name, "a JSON item", str(error)) from error


class SeenRows:
    """The rows of each group that some records contain."""

    def __init__(self, layout: Layout):
        """Creates an empty set.

        Args:
          layout: the tables.
        """
        self._layout = layout
        self._rows = {group.name: np.zeros(group.rows, bool) for group in layout.groups}

    def add(self, group: str, rows: Rows) -> None:
        """Adds some virtual rows of a group."""
        if isinstance(rows, np.ndarray):
            self._rows[group][rows] = True
        else:
            for start, stop in blocks.spans_of(rows):
                self._rows[group][start:stop] = True

    def or_those_of(self, other: SeenRows) -> SeenRows:
        """Returns the union with the rows of other records of the same tables."""
        found = SeenRows(self._layout)
        for name, rows in self._rows.items():
            np.logical_or(rows, other._rows[name], out=found._rows[name])
        return found

    def add_blocks(self, found: Iterable[RowBlock]) -> None:
        """Adds the rows of some blocks."""
        for block in found:
            self.add(block.group, block.rows)

    def has_more_than(self, other: SeenRows, targets: Targets) -> bool:
        """Returns whether some wanted rows are in this set but not in another."""
        for group, (start, stop) in {(one.group, one.rows) for one in targets.all}:
            if (self._rows[group][start:stop] & ~other._rows[group][start:stop]).any():
                return True
        return False

    def by_table(self) -> dict[str, np.ndarray]:
        """Returns table name to the indices of its rows."""
        found = {}
        for table in self._layout.tables:
            part = self._rows[table.group][table.offset : table.offset + table.rows]
            found[table.name] = np.flatnonzero(part)
        return found


class _Body:
    """Caches the arrays of the last frame read; the pieces of a frame are consecutive."""

    def __init__(self) -> None:
        #: Frames that were read, and so verified.
        self.read: set[tuple[Spot, int]] = set()
        self._frame: FrameAt | None = None
        self._arrays: dict[str, np.ndarray] = {}

    def arrays(self, frame: FrameAt) -> dict[str, np.ndarray]:
        if self._frame is not frame:
            self._frame, self._arrays = None, {}  # Before another one takes memory.
            head = frame.head
            self._arrays = frame_arrays.arrays_of(head.arrays, head.sizes, frame.read(), frame.name)
            self._frame = frame
            self.read.add((frame.segment, frame.start))
        return self._arrays


@dataclasses.dataclass(frozen=True, eq=False)
class RecordLayer:
    """A frame of rows as a layer; used by one thread.

    Attributes:
      mark: the record of the frame.
      frame: the frame.
      name: its name in errors.
      groups: groups of the step's layout by name.
      body: the body that was read last, of all layers.
    """

    mark: Mark
    frame: FrameAt
    name: str
    groups: Mapping[str, GroupEntry]
    body: _Body

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Returns its one segment."""
        return (self.frame.head.segment,)

    @property
    def has_separate_indices(self) -> bool:
        """Returns False: a frame is read and verified as a whole."""
        return False

    def name_of(self, segment: Segment, entry: ArrayEntry) -> str:
        """Returns the name of the frame in errors."""
        return self.name

    def check(self, segment: Segment) -> None:
        """See ``layers.merge.Layer``; the body has the length that its head implies."""

    def failing(self) -> AbstractContextManager[None]:
        """See ``layers.merge.Layer``."""
        return damage_of(self.mark)

    def view(self, segment: Segment, entry: ArrayEntry, start: int, stop: int) -> np.ndarray:
        """See ``layers.merge.Layer``; reads and verifies the whole body."""
        return self.body.arrays(self.frame)[entry.name][start:stop]

    def row_indices(self, segment: Segment, start: int, stop: int) -> None:
        """Returns None: frames have arrays of gaps."""

    def read_into(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        """See ``view``."""
        out[...] = self.view(segment, entry, start, stop)


def layers_of(way: Way, layout: Layout) -> list[list[RecordLayer]]:
    """Returns the frames of rows of a replay plan, record by record, oldest first.

    Args:
      way: the replay plan.
      layout: layout of its step.

    Raises:
      DamagedWal: a frame is invalid, or its epoch has other tables.
    """
    groups, body = layout.group_by_name, _Body()
    tables = collections.Counter(table.group for table in layout.tables)
    found: dict[tuple[int, int], list[RecordLayer]] = {}
    for number, leg in enumerate(way.legs):
        if not leg.head.layout.has_rows_of(layout):
            raise DamagedWal(
                f"WAL epoch {leg.head.stretch}",
                f"the tables of step {way.step.step}",
                "others",
                "restore the step itself: restore_latest(wal=False)",
                way.point.save_id,
            )
        for mark in (mark for marks in leg.marks.values() for mark in marks):
            of_mark = found.setdefault((number, mark.save_id.attempt), [])
            for frame in mark.frames_of(Kind.ROWS):
                name = frame.name
                with damage_of(mark):
                    bounds.check_segment(frame.head.segment, groups, tables, name)
                of_mark.append(RecordLayer(mark, frame, name, groups, body))
    return [found[key] for key in sorted(found)]


def plan(
    layers: Sequence[Sequence[RecordLayer]], targets: Targets, seen: SeenRows
) -> Iterator[Iterator[Piece]]:
    """Yields the pieces of records to merge: ``layers.merge.plan``.

    Args:
      layers: the frames, from ``layers_of``.
      targets: the buffers.
      seen: receives the indices of all rows, wanted or not.

    Raises:
      DamagedWal: a frame is missing or altered.
    """

    # ``seen`` needs the rows of every frame, wanted or not.
    def indices(layer: RecordLayer, segment: Segment, targets: Targets) -> StoredRows:
        return StoredRows(merge.segment_rows(layer, segment))

    def on_rows(segment: Segment, rows: Rows) -> None:
        seen.add(segment.group, rows)

    yield from merge.plan(layers, targets, indices, on_rows=on_rows)
    for layer in (layer for of_record in layers for layer in of_record):
        # No piece was read of a frame whose rows are all replaced; verify it too.
        if (layer.frame.segment, layer.frame.start) not in layer.body.read:
            with layer.failing():
                layer.frame.check()


def segments_of(leg: Leg) -> Iterator[Segment]:
    """Yields the segments of frames of rows of some records."""
    for marks in leg.marks.values():
        for mark in marks:
            for frame in mark.frames_of(Kind.ROWS):
                yield frame.head.segment
