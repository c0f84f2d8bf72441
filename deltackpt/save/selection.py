# SPDX-License-Identifier: Apache-2.0
"""What this process reads of the training state for one save, and what it writes of a base.

Fields of which it holds the same rows and columns share a segment, so that the rows of a segment
are stored once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from deltackpt.errors import TableSelectionError
from deltackpt.format import blocks, manifest
from deltackpt.format.blocks import Span
from deltackpt.format.manifest import Cover, GroupEntry, Layout
from deltackpt.resources.staging import Staging
from deltackpt.save.extract import FieldSource, SegmentSource, field_sources
from deltackpt.save.touched_rows import Stamps, StampsByTable

#: Columns of the fields that are as wide as the table, and the virtual rows.
Where = tuple[Span, tuple[Span, ...]]
_ByRows = Mapping[Where, Mapping[str, FieldSource]]


class Sources:
    """What this process reads of the training state for one save.

    Fields of which it holds the same rows share a segment. There is none where it has no row.
    """

    def __init__(
        self,
        layout: Layout,
        leaves: Mapping[str, Mapping[str, Any]],
        stamps: StampsByTable,
        staging: Staging,
    ):
        """Finds which rows of which fields this process reads; reads none.

        Args:
          layout: tables and groups.
          leaves: table name to field name to array.
          stamps: of every table, for a delta; may be empty for a base.
          staging: whose threads look for the touched rows.

        Raises:
          TableSelectionError: a slot is split by columns, and not as wide as its table.
          TrackingError: stamps are on other processes than their rows.
        """
        self.layout = layout
        self._found = {
            group.name: _sources_by_rows(layout, group, leaves, stamps) for group in layout.groups
        }
        held = {
            group: blocks.joined(span for _, spans in by_rows for span in spans)
            for group, by_rows in self._found.items()
        }
        self.stamps = Stamps(layout, stamps, staging, held)

    @property
    def owned(self) -> Owned:
        """What this process writes in a base."""
        return Owned(self.layout, self._found)

    def by_rows(self) -> Iterator[tuple[GroupEntry, Where, Mapping[str, FieldSource]]]:
        """The fields of each group by the columns and the rows that this process holds."""
        for group in self.layout.groups:
            for where, fields in self._found[group.name].items():
                yield group, where, fields

    def segments(self, *, whole: bool) -> list[SegmentSource]:
        """What this process reads for a base, or for a delta: see ``Stamps.look``.

        Args:
          whole: whether all rows, not the touched ones and the ``always`` fields alone.
        """
        segments = []
        for group, (columns, spans), fields in self.by_rows():
            always = {spec.name for spec in group.fields if spec.always}
            complete = fields if whole else _only(fields, always)
            changed = {name: field for name, field in fields.items() if name not in complete}
            for chosen, touched in ((complete, False), (changed, True)):
                if chosen:
                    taken = (
                        self.stamps.touched(group.name, spans) if touched else blocks.rows_of(spans)
                    )
                    if len(taken):
                        segments.append(SegmentSource(group.name, columns, taken, chosen))
        return segments


def _only(fields: Mapping[str, FieldSource], names: set[str]) -> Mapping[str, FieldSource]:
    return {name: field for name, field in fields.items() if name in names}


class Owned:
    """What this process writes in a base: for the manifests of several processes."""

    def __init__(self, layout: Layout, found: Mapping[str, _ByRows]):
        """Notes where, and how wide; keeps no array."""
        self._layout = layout
        self._found = {
            group: [
                (*where, sum(math.prod(field.trailing[:1]) for field in fields.values()))
                for where, fields in by_rows.items()
            ]
            for group, by_rows in found.items()
        }

    @property
    def cells(self) -> dict[str, int]:
        """Group to the cells, over its fields; without groups of which it writes none."""
        found = {
            group: sum(sum(stop - start for start, stop in spans) * w for _, spans, w in wheres)
            for group, wheres in self._found.items()
        }
        return {group: cells for group, cells in found.items() if cells}

    def cover(self, group: GroupEntry) -> Cover:
        """Where its rows lie in one group."""
        wheres = self._found[group.name]
        rows = blocks.rows_of(span for _, spans, _ in wheres for span in spans)
        return manifest.cover(group, self._layout.tables, rows, [where[0] for where in wheres])


def _sources_by_rows(
    layout: Layout,
    group: GroupEntry,
    leaves: Mapping[str, Mapping[str, Any]],
    stamps: StampsByTable,
) -> dict[Where, dict[str, FieldSource]]:
    """The fields of a group, by the columns and the rows that this process writes of them."""
    found: dict[Where, dict[str, FieldSource]] = {}
    narrow = []
    for spec in group.fields:
        for source in field_sources(layout, group, spec, leaves, stamps):
            spans = blocks.joined((shard.start, shard.stop) for shard in source.shards)
            if group.columns(spec) is not None:
                found.setdefault((source.columns, spans), {})[spec.name] = source
            elif source.columns == (0, manifest.width(spec.trailing)):
                narrow.append((spans, spec.name, source))
            else:
                raise TableSelectionError(
                    f"group {group.name}, field {spec.name}: expected a slot of width "
                    f"{group.width} like its table, or one that is not split by columns, found its "
                    f"columns {source.columns} of shape {spec.trailing}; shard the slot by rows"
                )
    for spans, name, source in narrow:
        # Columns do not matter to it: it rides with any segment of the same rows.
        where = next((where for where in found if where[1] == spans), ((0, group.width), spans))
        found.setdefault(where, {})[name] = source
    return found
