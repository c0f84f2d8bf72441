# SPDX-License-Identifier: Apache-2.0
"""Determines which rows of which arrays this process reads; computed once per layout.

The result depends on the layout, the shardings of the stamps and the process. Each save adds the
arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from deltackpt import processes
from deltackpt.errors import TableSelectionError
from deltackpt.format import blocks, manifest
from deltackpt.format.blocks import Span
from deltackpt.format.manifest import Cover, Layout, TableEntry
from deltackpt.format.segments import FieldSpec, GroupEntry, width
from deltackpt.save import extract
from deltackpt.save.extract import FieldShard, FieldSource
from deltackpt.state import ownership
from deltackpt.state.remembered import ByLayout

#: Columns of the fields that are as wide as the table, and the virtual rows.
Where = tuple[Span, tuple[Span, ...]]
#: Stamps of so many rows are looked at at once, tables of fewer rows together.
_LOOKED_AT_ONCE, _SMALL_ROWS = 1 << 18, 1 << 14

#: Spans of rows of one array of stamps, ascending, each with the shard that holds them.
StampShards = tuple[tuple[Span, int], ...]
#: Table name to the place of each TouchState that has stamps of it, to these, (rows,).
StampsByTable = Mapping[str, Mapping[str, Any]]
#: Table name to field name to array, (rows, *trailing).
Leaves = Mapping[str, Mapping[str, Any]]


class _Shard(NamedTuple):
    """Consecutive virtual rows: a shard of a table's array, see ``ownership.Share``."""

    table: str
    start: int
    stop: int
    shard: int
    skip: int


@dataclasses.dataclass(frozen=True, eq=False)
class FieldPlan:
    """One field of one group as this process holds it: a FieldSource without its arrays."""

    name: str
    columns: Span
    trailing: tuple[int, ...]
    dtype: np.dtype
    on_host: bool
    shards: tuple[_Shard, ...]

    def source(self, leaves: Leaves) -> FieldSource:
        """Returns the source that a save reads, with the arrays of its state."""
        name = self.name
        shards = [
            FieldShard(start, stop, ownership.shard_data(leaves[table][name], shard), skip)
            for table, start, stop, shard, skip in self.shards
        ]
        return FieldSource(self.columns, self.trailing, self.dtype, shards, self.on_host)


class Batch(NamedTuple):
    """Tables whose stamps are read together.

    Attributes:
      tables: each with its spans that this process reads, ascending.
      end_to_end: whether they are adjacent, read whole, and have all their stamps in one TouchState
        and in the host memory of this process.
    """

    tables: tuple[tuple[TableEntry, tuple[Span, ...]], ...]
    end_to_end: bool


class Division:
    """The rows that this process reads from states of one layout, and writes in a base.

    Attributes:
      layout: tables and groups.
      stamp_shards: table name to TouchState path to the location of its stamps.
      fields: group name to location to the fields at that location, by name.
      held: group name to the virtual rows that it reads.
      members: group name to the group's tables in the order of their offsets.
      offsets: group name to these offsets, (tables,) int64.
      batches: group name to the tables to read, in batches.
      owned: the rows that it writes in a base.
    """

    def __init__(self, layout: Layout, leaves: Leaves, stamps: StampsByTable):
        """Computed by ``of``.

        Raises:
          TableSelectionError: a slot is split by columns, and not as wide as its table.
          TrackingError: stamps are on other processes than their rows.
        """
        self.layout = layout
        self.stamp_shards: Mapping[str, Mapping[str, StampShards]] = {
            table: {place: stamp_shards_of(array) for place, array in held.items()}
            for table, held in stamps.items()
        }
        self.members = {
            group.name: tuple(manifest.members(group, layout.tables)) for group in layout.groups
        }
        self.offsets = {
            group: np.array([table.offset for table in members])
            for group, members in self.members.items()
        }
        turns = {table.name: turn for turn, table in enumerate(layout.tables)}
        known = {table: next(iter(held.values()), None) for table, held in stamps.items()}
        self.fields: dict[str, dict[Where, dict[str, FieldPlan]]] = {}
        for group in layout.groups:
            plans = [
                plan
                for spec in group.fields
                for plan in _field_plans(spec, self.members[group.name], leaves, known, turns)
            ]
            self.fields[group.name] = _by_rows(group, plans)
        self.held = {
            group: blocks.joined(span for _, spans in by_rows for span in spans)
            for group, by_rows in self.fields.items()
        }
        self.batches = {
            group: tuple(_batches(_spans_by_table(members, self.held[group]), stamps))
            for group, members in self.members.items()
        }
        self.owned = Owned(self)


def _spans_by_table(
    members: Sequence[TableEntry], held: tuple[Span, ...]
) -> Iterator[tuple[TableEntry, tuple[Span, ...]]]:
    """Spans of each table of some virtual ones; without tables that have none."""
    rows = blocks.rows_of(held)
    for table in members:
        part = rows[blocks.row_slice(rows, table.offset, table.offset + table.rows)]
        if len(part):
            assert not isinstance(part, np.ndarray)
            spans = blocks.spans_of(part)
            yield table, tuple((a - table.offset, b - table.offset) for a, b in spans)


def _batches(
    tables: Iterable[tuple[TableEntry, tuple[Span, ...]]], stamps: StampsByTable
) -> Iterator[Batch]:
    """Returns tables of a group in batches that are worth a thread, or fit into a cache."""
    batch: list[tuple[TableEntry, tuple[Span, ...]]] = []
    rows = 0
    for table, spans in tables:
        batch.append((table, spans))
        rows += table.rows
        if rows >= _LOOKED_AT_ONCE:
            yield _batch(batch, rows, stamps)
            batch, rows = [], 0
    if batch:
        yield _batch(batch, rows, stamps)


def _batch(
    tables: Sequence[tuple[TableEntry, tuple[Span, ...]]], rows: int, stamps: StampsByTable
) -> Batch:
    whole = all(spans == ((0, table.rows),) for table, spans in tables)
    ends = [table.offset + table.rows for table, _ in tables]
    adjacent = ends[:-1] == [table.offset for table, _ in tables[1:]]
    held = [stamps[table.name] for table, _ in tables] if stamps else []
    together = len({place for places in held for place in places}) == 1 and all(
        extract.on_host(array) and _covers(stamp_shards_of(array), array.shape[0])
        for places in held
        for array in places.values()
    )
    small = rows < len(tables) * _SMALL_ROWS
    return Batch(tuple(tables), whole and adjacent and together and small)


def _covers(shards: StampShards, rows: int) -> bool:
    """Whether shards hold all rows, each once."""
    ends = [0, *(stop for (_, stop), _ in shards)]
    return [start for (start, _), _ in shards] == ends[:-1] and ends[-1] == rows


def of(layout: Layout, leaves: Leaves, stamps: StampsByTable) -> Division:
    """Returns the division of a state.

    Args:
      layout: tables and groups, from ``tables.split`` of the same state as the leaves.
      leaves: its tables and slots.
      stamps: stamps of every table, for a delta; may be empty for a base.

    Raises:
      TableSelectionError, TrackingError: as for ``Division``.
    """
    return _divisions.get(layout, _kinds(stamps), lambda: Division(layout, leaves, stamps))


def forget() -> None:
    """Clears the cache."""
    _divisions.clear()


_divisions: ByLayout[Division] = ByLayout()


def stamp_shards_of(stamps: Any) -> StampShards:
    """Returns the distinct shards of stamps on this process, by their rows."""
    if not isinstance(stamps, jax.Array):
        return (((0, stamps.shape[0]), ownership.ITSELF),)
    found = {box.rows: shard for box, shard in ownership.shard_boxes(stamps).items()}
    return tuple(sorted(found.items()))


def _kinds(stamps: StampsByTable) -> tuple[Any, ...]:
    """Returns what a division depends on beside the layout."""
    kinds = [
        (table, place, getattr(array, "sharding", None))
        for table, held in stamps.items()
        for place, array in held.items()
    ]
    return processes.index(), processes.count(), *kinds


def _field_plans(
    spec: FieldSpec,
    members: Sequence[TableEntry],
    leaves: Leaves,
    stamps: Mapping[str, Any],
    turns: Mapping[str, int],
) -> list[FieldPlan]:
    """Returns what this process writes of one field: a plan for each column range that it has."""
    by_columns: dict[Span, list[_Shard]] = {}
    for table in members:
        leaf = leaves[table.name][spec.name]
        shares = ownership.shares(leaf, stamps.get(table.name), turn=turns[table.name])
        for share in shares:
            start, stop = table.offset + share.box.rows[0], table.offset + share.box.rows[1]
            shard = _Shard(table.name, start, stop, share.shard, share.skip)
            by_columns.setdefault(share.box.columns, []).append(shard)
    found = []
    for columns, shards in sorted(by_columns.items()):
        first = leaves[shards[0].table][spec.name]
        data = ownership.shard_data(first, shards[0].shard)
        found.append(
            FieldPlan(
                name=spec.name,
                columns=columns,
                trailing=tuple(data.shape[1:]),
                dtype=np.dtype(data.dtype),
                on_host=all(extract.on_host(leaves[shard.table][spec.name]) for shard in shards),
                shards=tuple(sorted(shards, key=lambda shard: shard.start)),
            )
        )
    return found


def _by_rows(group: GroupEntry, plans: Sequence[FieldPlan]) -> dict[Where, dict[str, FieldPlan]]:
    """Returns the fields of a group, by the columns and rows that this process writes."""
    specs = {spec.name: spec for spec in group.fields}
    found: dict[Where, dict[str, FieldPlan]] = {}
    narrow = []
    for plan in plans:
        spec = specs[plan.name]
        spans = blocks.joined((shard.start, shard.stop) for shard in plan.shards)
        if group.columns(spec) is not None:
            found.setdefault((plan.columns, spans), {})[plan.name] = plan
        elif plan.columns == (0, width(spec.trailing)):
            narrow.append((spans, plan))
        else:
            raise TableSelectionError(
                f"group {group.name}, field {spec.name}: expected a slot of width "
                f"{group.width} like its table, or one that is not split by columns, found its "
                f"columns {plan.columns} of shape {spec.trailing}; shard the slot by rows"
            )
    for spans, plan in narrow:
        # It has no columns, so it can join any segment of the same rows.
        where = next((where for where in found if where[1] == spans), ((0, group.width), spans))
        found.setdefault(where, {})[plan.name] = plan
    return found


class Owned:
    """The rows that this process writes in a base, for the manifests of several processes."""

    def __init__(self, division: Division):
        """Keeps positions and widths; no array."""
        self._division = division

    @functools.cached_property
    def cells(self) -> dict[str, int]:
        """Returns group to its number of cells, over its fields, if it writes any."""
        found = {
            group: sum(
                sum(stop - start for start, stop in spans) * math.prod(plan.trailing[:1])
                for (_, spans), plans in by_rows.items()
                for plan in plans.values()
            )
            for group, by_rows in self._division.fields.items()
        }
        return {group: cells for group, cells in found.items() if cells}

    def cover(self, group: GroupEntry) -> Cover:
        """Returns the cover of its rows in one group."""
        wheres = list(self._division.fields[group.name])
        rows = blocks.rows_of(itertools.chain.from_iterable(spans for _, spans in wheres))
        tables = self._division.layout.tables
        return manifest.cover(group, tables, rows, [columns for columns, _ in wheres])
