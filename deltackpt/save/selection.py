# SPDX-License-Identifier: Apache-2.0
"""The rows that this process reads from the training state for a save, and writes in a base.

Fields with the same local rows and columns share a segment, so the row indices of a segment are
stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from deltackpt.format import blocks
from deltackpt.format.blocks import Ranges, Span
from deltackpt.format.manifest import Layout, RollingShare
from deltackpt.format.segments import GroupEntry
from deltackpt.resources.runtime import Runtime
from deltackpt.save import division
from deltackpt.save.division import Owned, StampsByTable, Where
from deltackpt.save.extract import FieldSource, SegmentSource
from deltackpt.save.touched_rows import Stamps

#: What gives the touched rows of a group within some spans, virtual, int64 ascending.
TouchedRows = Callable[[str, tuple[Span, ...]], np.ndarray]


class Sources:
    """The parts of the training state that this process reads for one save.

    Fields with the same local rows share a segment. Without rows, it has no segments.
    """

    def __init__(
        self,
        layout: Layout,
        leaves: Mapping[str, Mapping[str, Any]],
        stamps: StampsByTable,
        runtime: Runtime,
    ):
        """Determines which rows of which fields this process reads; reads none.

        Args:
          layout: tables and groups.
          leaves: table name to field name to array.
          stamps: stamps of every table, for a delta; may be empty for a base.
          runtime: whose threads find the touched rows.

        Raises:
          TableSelectionError: a slot is split by columns, and not as wide as its table.
          TrackingError: stamps are on other processes than their rows.
        """
        self.layout = layout
        self._division = division.of(layout, leaves, stamps)
        self._found = {
            group: {
                where: {name: plan.source(leaves) for name, plan in plans.items()}
                for where, plans in by_rows.items()
            }
            for group, by_rows in self._division.fields.items()
        }
        self.stamps = Stamps(self._division, stamps, runtime)

    @property
    def owned(self) -> Owned:
        """Returns the rows that this process writes in a base."""
        return self._division.owned

    def by_rows(self) -> Iterator[tuple[GroupEntry, Where, Mapping[str, FieldSource]]]:
        """Yields the fields of each group by the columns and the rows that this process has."""
        for group in self.layout.groups:
            for where, fields in self._found[group.name].items():
                yield group, where, fields

    def fields_of(self, group: str, where: Where) -> Mapping[str, FieldSource]:
        """Returns the fields of a group that this process has for given columns and rows."""
        return self._found.get(group, {}).get(where, {})

    def segments(
        self,
        *,
        whole: bool,
        rolling: RollingShare | None = None,
        touched: TouchedRows | None = None,
        always: bool = True,
    ) -> list[SegmentSource]:
        """Returns the segments that this process reads for a base, a delta or a WAL record.

        Args:
          whole: whether to read all rows, instead of the touched ones and the ``always`` fields.
          rolling: for a delta, the share of all rows that it also contains.
          touched: returns the touched rows; by default the result of ``Stamps.look``.
          always: whether to read ``always`` fields.
        """
        segments, touched_rows = [], touched or self.stamps.touched
        for group, (columns, spans), fields in self.by_rows():
            unmarked = {spec.name for spec in group.fields if spec.always}
            complete = fields if whole else _only(fields, unmarked)
            changed = {name: field for name, field in fields.items() if name not in complete}
            for chosen, is_whole in ((complete if whole or always else {}, True), (changed, False)):
                if not chosen:
                    continue
                taken = blocks.rows_of(spans) if is_whole else touched_rows(group.name, spans)
                if isinstance(taken, np.ndarray) and rolling is not None:
                    share = rolling.rows(group, self.layout.tables)
                    rolled, taken = _within(blocks.rows_of(spans), share), _without(taken, share)
                    if len(rolled):
                        segments.append(SegmentSource(group.name, columns, rolled, chosen, "base"))
                if len(taken):
                    kind = "base" if whole else "delta"
                    key = None if group.key is None else group.key.name
                    segments.append(SegmentSource(group.name, columns, taken, chosen, kind, key))
        return segments


def _within(rows: range | Ranges, share: range | Ranges) -> range | Ranges:
    """The rows that are in both."""
    parts = [rows[blocks.row_slice(rows, *span)] for span in blocks.spans_of(share)]
    return blocks.rows_of(span for part in parts for span in blocks.spans_of(part))


def _without(rows: np.ndarray, share: range | Ranges) -> np.ndarray:
    """The rows, ascending, that are not in a share."""
    parts = [blocks.row_slice(rows, *span) for span in blocks.spans_of(share)]
    starts = [0, *(part.stop for part in parts)]
    stops = [*(part.start for part in parts), len(rows)]
    return np.concatenate([rows[start:stop] for start, stop in zip(starts, stops, strict=True)])


def _only(fields: Mapping[str, FieldSource], names: set[str]) -> Mapping[str, FieldSource]:
    return {name: field for name, field in fields.items() if name in names}


def including(touched: TouchedRows, rows: Mapping[str, np.ndarray], layout: Layout) -> TouchedRows:
    """Returns a function for the union of the touched rows and other rows.

    Args:
      touched: returns the touched rows.
      rows: table name to the indices of the other rows, int64 ascending.
      layout: tables and groups.
    """
    further = virtual_rows(rows, layout)
    if not further:
        return touched

    def joined(group: str, spans: tuple[Span, ...]) -> np.ndarray:
        found = touched(group, spans)
        more = within(further[group], spans) if group in further else found[:0]
        return np.union1d(found, more) if len(more) else found

    return joined


def virtual_rows(rows: Mapping[str, np.ndarray], layout: Layout) -> dict[str, np.ndarray]:
    """Returns group to the virtual rows, int64 ascending, of some rows of its tables.

    Args:
      rows: table name to row indices, int64 ascending.
      layout: tables and groups; other tables are ignored.
    """
    found: dict[str, list[np.ndarray]] = {}
    for table in sorted(layout.tables, key=lambda table: table.offset):
        held = rows.get(table.name)
        if held is not None and len(held):
            found.setdefault(table.group, []).append(held + np.int64(table.offset))
    return {group: np.concatenate(parts) for group, parts in found.items()}


def within(rows: np.ndarray, spans: Iterable[Span]) -> np.ndarray:
    """Returns the rows that are within spans, ascending."""
    parts = [rows[blocks.row_slice(rows, *span)] for span in spans]
    return np.concatenate(parts) if parts else rows[:0]
