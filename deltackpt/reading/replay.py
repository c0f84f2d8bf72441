# SPDX-License-Identifier: Apache-2.0
"""Replays WAL records onto the buffers of a restored step; no jax."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from deltackpt.errors import Damaged, DamagedWal
from deltackpt.format import blocks, names
from deltackpt.format.blocks import RowBlock, Rows, StoredRows
from deltackpt.format.manifest import Layout
from deltackpt.format.segments import ArrayEntry, GroupEntry, Segment
from deltackpt.format.soundness import MOST
from deltackpt.format.wal_records import ITEM_BYTES, ITEMS
from deltackpt.layers import merge
from deltackpt.layers.merge import Piece
from deltackpt.layers.targets import Targets
from deltackpt.reading import bounds
from deltackpt.reading.stored_dense import DenseValues
from deltackpt.reading.wal_index import ReplayPlan, ReplaySegment
from deltackpt.reading.wal_records import WalRecord, damage_of
from deltackpt.resources import memory
from deltackpt.resources.staging import Staging

#: Records up to this length are read at once, dense leaves included.
_LOADED_BYTES = 256 << 10


@dataclasses.dataclass(frozen=True, eq=False)
class Replayed:
    """Summary of a replay.

    Attributes:
      rows: table name to the indices of all rows in the records, wanted or not, int64 ascending.
      bytes_read: bytes of the records that were read.
      record_count: number of records read for each process.
    """

    rows: Mapping[str, np.ndarray]
    bytes_read: int
    record_count: int


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


def replay(plan: ReplayPlan, targets: Targets, layout: Layout) -> Replayed:
    """Verifies the records from a step to a recovery point, and merges their rows into buffers.

    Args:
      plan: the replay plan from the step to the point.
      targets: the buffers.
      layout: layout of the step.

    Raises:
      DamagedWal: a record is missing or altered; the error names it.
    """
    seen, layers = SeenRows(layout), layers_of(plan, layout)
    scratch = Staging(merge.SCRATCH_BYTES)
    merge.run(stages(layers, targets, seen), scratch)
    count = sum(max(map(len, of_epoch.records.values()), default=0) for of_epoch in plan.segments)
    return Replayed(
        rows=seen.by_table(),
        bytes_read=sum(layer.record.nbytes for of_record in layers for layer in of_record),
        record_count=count,
    )


def items_of(plan: ReplayPlan) -> dict[int, dict[str, Any]]:
    """Returns the additional items of the recovery point, by process and name.

    Raises:
      DamagedWal: the items are missing or altered.
    """
    return {process: items_of_record(record) for process, record in plan.last_records.items()}


def items_of_record(record: WalRecord) -> dict[str, Any]:
    """Returns the additional items of a record by name.

    Raises:
      DamagedWal: the items are missing or altered.
    """
    found: dict[str, Any] = {}
    with damage_of(record):
        data, start = _item_bytes_of(record), 0
        for item in record.head.items:
            own, start = data[start : start + item.nbytes], start + item.nbytes
            found[item.name] = bytes(own) if item.kind == "bytes" else _json(own, record.name)
    return found


def _item_bytes_of(record: WalRecord) -> memoryview:
    """Reads the bytes of all additional items of a record."""
    nbytes = record.head.item_bytes
    if not nbytes:
        return memoryview(b"")
    group = next((one for one in record.layer.row_groups() if one.name == ITEMS), None)
    array = None if group is None else record.layer.arrays(group).get(ITEM_BYTES)
    if array is None or (array.shape, array.dtype) != ((nbytes,), "uint8"):
        raise Damaged(f"{record.name}: row group {ITEMS!r}", f"{nbytes} bytes", f"{array}")
    out = memory.empty_buffer((nbytes,), np.dtype(np.uint8))
    record.layer.read_into(array, 0, nbytes, out)
    return out.data


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
        merge.mark(self._rows[group], rows)

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


class _Rows:
    """Caches the arrays of the last record read; the pieces of a record are consecutive."""

    def __init__(self) -> None:
        #: Records that were read, and so verified.
        self.read: set[int] = set()
        self._part: RecordPart | None = None
        self._arrays: dict[tuple[str, str], np.ndarray] = {}

    def arrays(self, part: RecordPart) -> dict[tuple[str, str], np.ndarray]:
        if self._part is not part:
            self._part, self._arrays = None, {}  # Before another one takes memory.
            self._arrays = part.decoded()
            self._part = part
            self.read.add(id(part))
        return self._arrays


@dataclasses.dataclass(frozen=True, eq=False)
class RecordPart:
    """The rows of a record as a layer to merge; used by one thread.

    Attributes:
      record: the record.
      groups: groups of the step's layout by name.
      rows: the rows that were read last, of all records.
    """

    record: WalRecord
    groups: Mapping[str, GroupEntry]
    rows: _Rows

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Returns the segments of its tables."""
        return self.record.segments

    @property
    def has_separate_indices(self) -> bool:
        """Returns False: the row indices of all records would take too much memory."""
        return False

    def name_of(self, segment: Segment, entry: ArrayEntry) -> str:
        """Returns the name of a stored array in errors."""
        return self.record.arrays.name_of(segment, entry)

    def check(self, segment: Segment) -> None:
        """See ``layers.merge.Layer``."""
        self.record.arrays.check(segment)

    def failing(self) -> AbstractContextManager[None]:
        """See ``layers.merge.Layer``."""
        return damage_of(self.record)

    def view(self, segment: Segment, entry: ArrayEntry, start: int, stop: int) -> np.ndarray:
        """See ``layers.merge.Layer``; reads and verifies all rows of the record."""
        return self.rows.arrays(self)[segment.name, entry.name][start:stop]

    def row_indices(self, segment: Segment, first: int = 0, stop: int = MOST) -> StoredRows:
        """See ``layers.merge.Layer``."""
        self.check(segment)
        rows = self.rows.arrays(self)[segment.name, names.GAPS]
        found = blocks.row_slice(rows, first, stop)
        return StoredRows(rows[found], found.start)

    def read_into(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        """See ``view``."""
        out[...] = self.view(segment, entry, start, stop)

    def decoded(self) -> dict[tuple[str, str], np.ndarray]:
        """Reads all rows; returns segment and array to the stored elements, or the row indices.

        Raises:
          Damaged: an array is missing or altered.
        """
        arrays = self.record.arrays
        if self.record.layer.nbytes <= _LOADED_BYTES:
            arrays = arrays.loaded()
        found: dict[tuple[str, str], np.ndarray] = {}
        for segment in self.segments:
            arrays.check(segment)
            for entry in segment.arrays:
                if entry.name == names.GAPS:
                    out = np.asarray(arrays.row_indices(segment).rows)
                else:
                    out = _room(entry, self.record)
                    arrays.read_into(segment, entry, 0, entry.shape[0], out)
                found[segment.name, entry.name] = out
        return found


def _room(entry: ArrayEntry, record: WalRecord) -> np.ndarray:
    """Memory for an array of a record."""
    try:
        # The memory of the previous record is reused; populating new pages costs more than reading.
        return np.empty(entry.shape, np.dtype(entry.dtype))
    except MemoryError as error:
        raise Damaged(record.name, "rows that fit into memory", f"{entry.nbytes} bytes") from error


def layers_of(plan: ReplayPlan, layout: Layout) -> list[list[RecordPart]]:
    """Returns the rows of a replay plan, record by record, oldest first.

    Args:
      plan: the replay plan.
      layout: layout of its step.

    Raises:
      DamagedWal: a record is invalid, or its epoch has other tables.
    """
    groups, rows = layout.group_by_name, _Rows()
    found: dict[tuple[int, int], list[RecordPart]] = {}
    for number, of_epoch in enumerate(plan.segments):
        if not of_epoch.head.layout.has_rows_of(layout):
            raise DamagedWal(
                f"WAL epoch {of_epoch.head.epoch}",
                f"the tables of step {plan.step.step}",
                "others",
                "restore the step itself: restore_latest(wal=False)",
                plan.point.save_id,
            )
        for record in (record for records in of_epoch.records.values() for record in records):
            with damage_of(record):
                for segment in record.segments:
                    bounds.check_segment(segment, groups, None, record.name)
            of_record = found.setdefault((number, record.save_id.attempt), [])
            of_record.append(RecordPart(record, groups, rows))
    return [found[key] for key in sorted(found)]


def stages(
    layers: Sequence[Sequence[RecordPart]], targets: Targets, seen: SeenRows
) -> Iterator[Iterator[Piece]]:
    """Yields the pieces of records to merge: ``layers.merge.plan``.

    Args:
      layers: the records, from ``layers_of``.
      targets: the buffers.
      seen: receives the indices of all rows, wanted or not.

    Raises:
      DamagedWal: a record is missing or altered.
    """

    # ``seen`` needs the rows of every record, wanted or not.
    def indices(layer: RecordPart, segment: Segment, targets: Targets) -> StoredRows:
        return StoredRows(merge.segment_rows(layer, segment))

    def on_rows(segment: Segment, rows: Rows) -> None:
        seen.add(segment.group, rows)

    yield from merge.plan(layers, targets, indices, on_rows=on_rows)
    for layer in (layer for of_record in layers for layer in of_record):
        # Nothing was read of a record whose rows are ranges that are all replaced.
        if id(layer) not in layer.rows.read:
            with layer.failing():
                layer.rows.arrays(layer)


def segments_of(of_epoch: ReplaySegment) -> Iterator[Segment]:
    """Yields the segments of rows of some records."""
    for records in of_epoch.records.values():
        for record in records:
            with damage_of(record):
                yield from record.segments
