# SPDX-License-Identifier: Apache-2.0
"""The rows of WAL records as layers to merge above a step. Numpy only."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from deltackpt.errors import Damaged, DamagedWal
from deltackpt.format.manifest import Layout
from deltackpt.format.row_blocks import Rows, Segment, StoredRows
from deltackpt.layers import row_indices
from deltackpt.layers.read import StoredBytes
from deltackpt.layers.row_indices import RowIndices
from deltackpt.layers.targets import Targets
from deltackpt.reading import bounds
from deltackpt.reading.shard_arrays import LayerArrays, Shard
from deltackpt.reading.wal_index import ReplayPlan
from deltackpt.reading.wal_records import WalRecord, damage_of


@dataclasses.dataclass(frozen=True, eq=False)
class RecordRows(Shard):
    """The rows that one process wrote in a WAL record."""

    arrays: LayerArrays
    record: WalRecord


#: The rows of each record by process, oldest record first.
WalRows = Sequence[Sequence[RecordRows]]


class SeenRows:
    """The rows that some WAL records contain, as a bitmap for each group.

    A record contains all rows of its ``always`` slots. Rows that it contains only for such slots
    are not counted.
    """

    def __init__(self, layout: Layout):
        self._layout = layout
        self._flags = {group.name: np.zeros(group.rows, bool) for group in layout.groups}

    def add(self, group: str, rows: Rows) -> None:
        """Adds some virtual rows of a group."""
        row_indices.set_flags(self._flags[group], rows)

    def update(self, other: SeenRows) -> None:
        """Adds the rows of another set for the same tables."""
        for name, flags in self._flags.items():
            flags |= other._flags[name]

    def covers(self, other: SeenRows, targets: Targets) -> bool:
        """Returns whether the set has all wanted rows of another one."""
        return not any(
            np.any(other._flags[group][start:stop] & ~self._flags[group][start:stop])
            for group, (start, stop) in {(one.group, one.rows) for one in targets.all}
        )

    def by_table(self) -> dict[str, np.ndarray]:
        """Returns table name to its rows in the set, int64, ascending."""
        return {
            table.name: np.flatnonzero(
                self._flags[table.group][table.offset : table.offset + table.rows]
            )
            for table in self._layout.tables
        }


def rows_of(record: WalRecord, layout: Layout, group: str | None = None) -> RecordRows:
    """Returns the rows of a record, or of one group of it; reads nothing.

    Raises Damaged if a row group is invalid.
    """
    groups, source = layout.group_by_name, StoredBytes(record.segment)
    segments = tuple(one for one in record.segments if group in (None, one.group))
    for segment in segments:
        bounds.check_segment(segment, groups, None, record.name)
    # A copy, which records what this replay has verified.
    opened = functools.partial(record.layer.at, source)
    arrays = LayerArrays(opened, name=record.name, nbytes=record.nbytes)
    return RecordRows(arrays, segments, groups, record)


def layers_of(plan: ReplayPlan, layout: Layout, group: str | None = None) -> list[list[RecordRows]]:
    """Returns the rows of each record of a replay plan, oldest record first; reads nothing.

    ``layout`` is that of the plan's step. Raises DamagedWal if a record is invalid, or its epoch
    has other tables.
    """
    found: dict[tuple[int, int], list[RecordRows]] = {}
    checked = -1
    for head, record in plan.records:
        if head.epoch != checked and not head.layout.has_rows_of(layout):
            raise DamagedWal(
                f"WAL epoch {head.epoch}",
                f"the tables of step {plan.step.step}",
                "others",
                "restore the step itself: restore_latest(wal=False)",
                plan.point.save_id,
            )
        checked = head.epoch
        with damage_of(record):
            rows = rows_of(record, layout, group)
        found.setdefault((head.epoch, record.save_id.attempt), []).append(rows)
    return [found[key] for key in sorted(found)]


def all_rows(seen: SeenRows | None, others: RowIndices = row_indices.stored_rows) -> RowIndices:
    """Returns a function that returns all row indices of WAL records, and adds them to ``seen``."""

    def indices(layer: Shard, segment: Segment, targets: Targets) -> StoredRows | None:
        if not isinstance(layer, RecordRows):
            return others(layer, segment, targets)
        rows = row_indices.segment_rows(layer, segment)
        group = layer.groups[segment.group]
        if seen is not None and not all(segment.spec(group, one).always for one in segment.fields):
            seen.add(segment.group, rows)
        return StoredRows(rows)

    return indices


@contextlib.contextmanager
def verified(records: WalRows) -> Iterator[None]:
    """Verifies what was not read of the rows of some records at the end of a merge.

    Raises DamagedWal with the name of the record.
    """
    every = [rows for of_record in records for rows in of_record]
    try:
        yield
        for rows in every:
            rows.arrays.layer.verify_rest({segment.name for segment in rows.segments})
    except Damaged as error:
        for rows in every:
            if f"{error.object_name}: ".startswith(f"{rows.record.name}: "):
                raise DamagedWal.from_damage(error, rows.record.save_id) from error
        raise
