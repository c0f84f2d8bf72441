# SPDX-License-Identifier: Apache-2.0
"""The requested parts of a step, and the buffers that they are read into."""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections.abc import Mapping, Sequence

import numpy as np

from deltackpt import codecs, kernels
from deltackpt.errors import OptionError, TemplateMismatch
from deltackpt.format import manifest, naming, row_blocks
from deltackpt.format.manifest import Cover, Layout, Manifest
from deltackpt.format.row_blocks import Box, CyclicRows, Rows, Segment, Span, width
from deltackpt.resources import host_memory

#: Table name to field name to the boxes of it that this process needs.
Wanted = Mapping[str, Mapping[str, Sequence[Box]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """The final buffer of some virtual rows and columns of one field.

    ``columns`` is None for a field that is not as wide as its table, and so never split; ``buffer``
    is (rows[1] - rows[0], *trailing), with trailing reduced to the columns. With a ``cycle`` over
    the same rows, it contains only the cyclic rows.
    """

    group: str
    field: str
    rows: Span
    columns: Span | None
    buffer: np.ndarray
    cycle: CyclicRows | None = None

    def count(self, rows: Rows) -> int:
        """Returns how many of some rows of its span the target contains."""
        return len(rows) if self.cycle is None else self.cycle.count_in(rows)

    def put(
        self,
        rows: Rows,
        values: np.ndarray,
        buffer: np.ndarray,
        positions: np.ndarray | None = None,
    ) -> None:
        """Writes values of some rows to ``buffer``: its own, or a view of some of its columns.

        ``positions`` are those of the rows in ``values``; None if it has only these rows.
        """
        first = self.rows[0]
        if self.cycle is None and isinstance(rows, range):
            buffer[rows.start - first : rows.stop - first] = values
            return
        rows = np.asarray(rows)
        if self.cycle is not None:
            found = np.flatnonzero(self.cycle.contains(rows))
            positions = found if positions is None else positions[found]
            rows, first = self.cycle.positions(rows[found]), 0
        whole = buffer.flags.c_contiguous and values.flags.c_contiguous
        if whole and buffer.dtype == values.dtype:
            kernels.scatter(values, positions, rows, first, buffer)
        else:
            buffer[rows - first] = values if positions is None else values[positions]

    def overlap(self, columns: Span) -> Span | None:
        """Returns the columns that the target shares with a segment, or None."""
        if self.columns is None:
            return (0, 1)
        first, last = max(self.columns[0], columns[0]), min(self.columns[1], columns[1])
        return (first, last) if first < last else None


def wanted_rows(target: Layout, rows: Mapping[str, Span | None]) -> Wanted:
    """Returns all fields of some tables, each with a half-open range of rows; None is all rows.

    A table may be named by the end of its name, if only one ends so. Raises TemplateMismatch if it
    does not exist or has fewer rows, OptionError if a range is invalid.
    """
    if not isinstance(rows, Mapping):
        raise OptionError(
            f"tables: expected a mapping from tables to row ranges, found {rows!r}; pass e.g. "
            "{'users': (0, 100), 'items': None}"
        )
    tables = {table.name: table for table in target.tables}
    groups = target.group_by_name
    found: dict[str, dict[str, list[Box]]] = {}
    for asked, span in rows.items():
        name = naming.meant(asked, tables, TemplateMismatch)
        if name not in tables:
            raise TemplateMismatch(
                f"table {name!r}: expected one of {sorted(tables)}, found no such table in the "
                "step; name one of them"
            )
        if name in found:
            raise OptionError(
                f"tables: expected one row range of each table, found two of {name!r}; read each "
                "in a call of its own"
            )
        try:
            start, stop = map(operator.index, (0, tables[name].rows) if span is None else span)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"table {name!r}: expected a row range (start, stop) of integers, or None for all "
                f"rows, found {span!r}; pass e.g. (0, 100)"
            ) from error
        if not 0 <= start <= stop <= tables[name].rows:
            raise TemplateMismatch(
                f"table {name!r}: expected a row range within [0, {tables[name].rows}), found "
                f"[{start}, {stop}); name rows that the step has"
            )
        found[name] = {
            spec.name: [Box((start, stop), (0, width(spec.trailing)))]
            for spec in groups[tables[name].group].fields
        }
    return found


def empty_buffers(
    target: Layout, wanted: Wanted | None = None
) -> tuple[dict[str, dict[str, dict[Box, np.ndarray]]], Targets]:
    """Allocates buffers for the wanted parts of a step, by default all, and targets for them.

    The buffers are by table name, field name and box.
    """
    if wanted is None:
        wanted = wanted_rows(target, dict.fromkeys(table.name for table in target.tables))
    groups = target.group_by_name
    buffers: dict[str, dict[str, dict[Box, np.ndarray]]] = {}
    for table in target.tables:
        asked = wanted.get(table.name, {})
        for spec in groups[table.group].fields:
            if spec.name in asked:
                buffers.setdefault(table.name, {})[spec.name] = {}
            for box in asked.get(spec.name, ()):
                first, last = box.columns
                trailing = (last - first, *spec.trailing[1:]) if spec.trailing else ()
                buffer = host_memory.empty_buffer(
                    (len(box.within(box.rows[1])), *trailing), codecs.dtype_of(spec.dtype)
                )
                buffers[table.name][spec.name][box] = buffer
    return buffers, targets_of(buffers, target)


def targets_of(
    buffers: Mapping[str, Mapping[str, Mapping[Box, np.ndarray]]], target: Layout
) -> Targets:
    """Returns buffers, by table name, field name and box, as targets."""
    groups, found = target.group_by_name, []
    for table in target.tables:
        held = buffers.get(table.name, {})
        group = groups[table.group]
        for spec in group.fields:
            for box, buffer in held.get(spec.name, {}).items():
                # A template may have grown: its additional rows are not in the step.
                start, stop = min(box.rows[0], table.rows), min(box.rows[1], table.rows)
                rows = table.offset + start, table.offset + stop
                cycle = None if box.cycle is None else CyclicRows(rows, *box.cycle)
                found.append(
                    Target(
                        group=group.name,
                        field=spec.name,
                        rows=rows,
                        columns=box.columns if group.columns(spec) is not None else None,
                        buffer=buffer[: stop - start if cycle is None else cycle.count],
                        cycle=cycle,
                    )
                )
    return Targets(found)


class Targets:
    """The buffers that a restore fills, by group, field and rows.

    The rows of the targets of one field are the same or disjoint: a grid splits them.
    """

    def __init__(self, targets: Sequence[Target]):
        self.all = tuple(targets)
        #: Numbers of rows of a save's groups to the covers of the targets, by group.
        self._covers: dict[tuple[int, ...], dict[str, Cover]] = {}
        self._sorted: dict[tuple[str, str], list[Target]] = {}
        #: Group, fields and columns to the joined rows of their targets.
        self._wanted: dict[tuple[str, tuple[str, ...], Span], tuple[Span, ...]] = {}
        for one in sorted(targets, key=lambda one: one.rows):
            self._sorted.setdefault((one.group, one.field), []).append(one)

    def over(self, group: str, field: str, rows: Span, columns: Span) -> tuple[Target, ...]:
        """Returns the targets of a field that overlap a segment in rows and columns."""
        found = self._sorted.get((group, field), [])
        low = bisect.bisect_right(found, rows[0], key=lambda one: one.rows[1])
        high = bisect.bisect_left(found, rows[1], key=lambda one: one.rows[0])
        return tuple(one for one in found[low:high] if one.overlap(columns) is not None)

    def reach(self, segment: Segment) -> Span | None:
        """Returns the span of the wanted rows of a segment's group; None if none is wanted."""
        spans = self._wanted_rows(segment, segment.fields)
        return (spans[0][0], spans[-1][1]) if spans else None

    def want(self, segment: Segment, field: str) -> bool:
        """Returns whether any target is of a field of a segment's group and columns."""
        return bool(self._wanted_rows(segment, (field,)))

    def sections(self, segment: Segment, rows: Rows, *fields: str) -> list[slice]:
        """Returns the positions of the wanted rows of a segment, by default of all its fields."""
        first, last = row_blocks.reach(rows)
        spans = self._wanted_rows(segment, fields or segment.fields)
        low = bisect.bisect_right(spans, first, key=lambda span: span[1])
        high = bisect.bisect_left(spans, last, key=lambda span: span[0])
        # The tables of a group follow each other, so that most segments are wanted whole.
        if high - low == 1 and spans[low][0] <= first and last <= spans[low][1]:
            return [slice(0, len(rows))]
        found = row_blocks.row_slices(rows, spans[low:high])
        return [section for section in found if section.start < section.stop]

    def _wanted_rows(self, segment: Segment, fields: tuple[str, ...]) -> tuple[Span, ...]:
        """Returns the rows of all targets of some fields of a segment, joined."""
        key = segment.group, fields, segment.columns
        if key not in self._wanted:
            targets = (
                one for name in fields for one in self._sorted.get((segment.group, name), ())
            )
            self._wanted[key] = row_blocks.joined(
                one.rows for one in targets if one.overlap(segment.columns) is not None
            )
        return self._wanted[key]

    def touch(self, stored: Manifest, cover: Cover) -> bool:
        """Returns whether a shard may contain any wanted row, from its cover alone.

        The tables of ``stored`` may have fewer rows than the target layout.
        """
        rows = tuple(group.rows for group in stored.groups)
        if rows not in self._covers:
            self._covers[rows] = self._covers_in(stored)
        wanted = self._covers[rows].get(cover.group)
        return (
            wanted is not None
            and _overlap(wanted.share, cover.share)
            and _overlap(wanted.columns, cover.columns)
            and any(_overlap(one, other) for one in wanted.tables for other in cover.tables)
        )

    def _covers_in(self, stored: Manifest) -> dict[str, Cover]:
        found = {}
        for group in stored.groups:
            targets = [one for one in self.all if one.group == group.name]
            spans = row_blocks.rows_of(one.rows for one in targets)
            columns = [one.columns or (0, group.width) for one in targets]
            if len(spans):
                found[group.name] = manifest.cover(group, stored.tables, spans, columns)
        return found


def _overlap(one: Span, other: Span) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])
