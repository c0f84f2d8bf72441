# SPDX-License-Identifier: Apache-2.0
"""Figures of what a save holds of each table, from its records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from deltackpt.format import manifest
from deltackpt.format.manifest import Encoding, GroupEntry, Segment, TableEntry


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFigures:
    """One field of one table in a save.

    Attributes:
      table: the table.
      field: ``values`` or ``slot.<name>``.
      codec: how its rows were stored.
      reason: why so.
      rows: rows written.
      nbytes: their bytes on disk.
      ratio: ``nbytes`` over the bytes of these rows unencoded.
      relative_error: norm of what decoding changes over the norm of the rows; 0 where lossless.
    """

    table: str
    field: str
    codec: str
    reason: str
    rows: int
    nbytes: int
    ratio: float
    relative_error: float


def table_figures(
    groups: Sequence[GroupEntry], tables: Sequence[TableEntry], segments: Sequence[Segment]
) -> tuple[TableFigures, ...]:
    """What segments hold of each table, by field.

    A field's bytes are shared out by rows. The bytes of the row numbers, which serve all fields
    of a segment, are in none of them.

    Args:
      groups: of the save.
      tables: of the save.
      segments: of one part, or of all.
    """
    found = []
    for group in groups:
        members = manifest.members(group, tables)
        for spec in group.fields:
            parts = [
                (segment, encoding)
                for segment in segments
                for encoding in segment.encodings
                if (segment.group, encoding.field) == (group.name, spec.name)
            ]
            for place, table in enumerate(members):
                figures = _figures(table.name, spec.name, place, parts, spec.row_bytes)
                if figures.rows:
                    found.append(figures)
    return tuple(found)


def _figures(
    table: str, field: str, place: int, parts: Sequence[tuple[Segment, Encoding]], row_bytes: int
) -> TableFigures:
    """Figures of the table that stands at ``place`` in its group."""
    # Segments of other columns hold the same rows again.
    first = min((segment.columns[0] for segment, _ in parts), default=0)
    rows = sum(part.rows[place] for segment, part in parts if segment.columns[0] == first)
    nbytes = sum(
        round(part.nbytes * part.rows[place] / max(1, sum(part.rows))) for _, part in parts
    )
    norm = sum(part.squared_norm[place] for _, part in parts)
    error = sum(part.squared_error[place] for _, part in parts)
    return TableFigures(
        table=table,
        field=field,
        codec="+".join(sorted({part.codec for _, part in parts})),
        reason="; ".join(sorted({part.reason for _, part in parts})),
        rows=rows,
        nbytes=nbytes,
        ratio=nbytes / max(1, rows * row_bytes),
        relative_error=math.sqrt(error / norm) if norm else 0.0,
    )
