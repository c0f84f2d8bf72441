# SPDX-License-Identifier: Apache-2.0
"""Statistics of each table in a save, from its records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deltackpt.format import manifest
from deltackpt.format.manifest import TableEntry
from deltackpt.format.segments import Encoding, FieldSpec, GroupEntry, Segment


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFigures:
    """One field of one table in a save.

    Attributes:
      table: the table.
      field: ``values`` or ``slot.<name>``.
      codec: how its rows were stored.
      reason: why that codec was chosen.
      rows: rows written.
      nbytes: their bytes on disk.
      ratio: ``nbytes`` over the bytes of these rows unencoded.
      relative_error: norm of the decoding error over the norm of the rows; 0 if lossless.
    """

    table: str
    field: str
    codec: str
    reason: str
    rows: int
    nbytes: int
    ratio: float
    relative_error: float


class LeafFigures(NamedTuple):
    """One dense leaf that a delta stores as blocks, or one process's part of it.

    Attributes:
      leaf: its path.
      codec: ``lossless``, or the lossy codec that was used.
      reason: why the codec differs from the configured one; empty if it does not.
      raw_bytes: unencoded bytes of the leaf itself.
      nbytes: bytes on disk.
      blocks: number of its blocks of 256 elements; 1 if it is smaller than a block.
      changed_blocks: number of blocks that are stored.
      relative_error: norm of the decoding error over the norm of the leaf; 0 if lossless.
    """

    leaf: str
    codec: str
    reason: str
    raw_bytes: int
    nbytes: int
    blocks: int
    changed_blocks: int
    relative_error: float

    @classmethod
    def joined(cls, parts: Sequence[LeafFigures]) -> LeafFigures:
        """Combines the figures of a leaf's chunks; the largest error is kept."""
        return cls(
            leaf=parts[0].leaf,
            codec="+".join(sorted({part.codec for part in parts})),
            reason="; ".join(sorted({part.reason for part in parts} - {""})),
            raw_bytes=sum(part.raw_bytes for part in parts),
            nbytes=sum(part.nbytes for part in parts),
            blocks=sum(part.blocks for part in parts),
            changed_blocks=sum(part.changed_blocks for part in parts),
            relative_error=max(part.relative_error for part in parts),
        )


def table_figures(
    groups: Sequence[GroupEntry], tables: Sequence[TableEntry], segments: Sequence[Segment]
) -> tuple[TableFigures, ...]:
    """Returns figures of the rows that segments hold of each table, by field.

    A field's bytes are divided among tables in proportion to their rows. Row indices, which all
    fields of a segment share, are not counted.

    Args:
      groups: groups of the save.
      tables: tables of the save.
      segments: segments of one part, or of all.
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
            found += _figures(members, spec, parts)
    return tuple(found)


def _figures(
    members: Sequence[TableEntry], spec: FieldSpec, parts: Sequence[tuple[Segment, Encoding]]
) -> Iterator[TableFigures]:
    """Figures of one field of a group's tables, of those that have rows."""
    # Segments of other columns hold the same rows again.
    first = min((segment.columns[0] for segment, _ in parts), default=0)
    rows, nbytes = [0] * len(members), [0] * len(members)
    norm, error = [0.0] * len(members), [0.0] * len(members)
    for segment, part in parts:
        total = max(1, sum(part.rows))
        for place, count in enumerate(part.rows):
            rows[place] += count if segment.columns[0] == first else 0
            nbytes[place] += round(part.nbytes * count / total)
            norm[place] += part.squared_norm[place]
            error[place] += part.squared_error[place]
    codec = "+".join(sorted({part.codec for _, part in parts}))
    reason = "; ".join(sorted({part.reason for _, part in parts}))
    row_bytes = spec.row_bytes
    for place, table in enumerate(members):
        if rows[place]:
            yield TableFigures(
                table=table.name,
                field=spec.name,
                codec=codec,
                reason=reason,
                rows=rows[place],
                nbytes=nbytes[place],
                ratio=nbytes[place] / max(1, rows[place] * row_bytes),
                relative_error=math.sqrt(error[place] / norm[place]) if norm[place] else 0.0,
            )
