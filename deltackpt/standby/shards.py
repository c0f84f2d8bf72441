# SPDX-License-Identifier: Apache-2.0
"""Which rows a member of the service holds, and where in its memory they lie.

Both sides compute it from a step's layout alone. Member ``shard`` of ``shards`` holds that part of
the rows of each table, so that tables sharded by rows over as many nodes lie where they are needed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from deltackpt import codecs
from deltackpt.format.blocks import Span
from deltackpt.format.manifest import Layout, TableEntry

_ALIGNMENT = 64


class Region(NamedTuple):
    """Rows of one field of one table in the memory of a member.

    Attributes:
      table: the table.
      field: ``values`` or ``slot.<name>``.
      rows: virtual rows of the group.
      columns: all columns of a field as wide as its table, which may be wanted in part; else None.
      offset: where the rows begin, in bytes.
      trailing: shape of one row.
      dtype: of the numbers.
    """

    table: TableEntry
    field: str
    rows: Span
    columns: Span | None
    offset: int
    trailing: tuple[int, ...]
    dtype: np.dtype

    @property
    def group(self) -> str:
        """The table's group."""
        return self.table.group

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.trailing) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all its rows."""
        return (self.rows[1] - self.rows[0]) * self.row_bytes


def regions(target: Layout, shard: int, shards: int) -> tuple[Region, ...]:
    """What a member holds, in the order of its memory; regions without rows are left out."""
    groups = target.group_by_name
    found: list[Region] = []
    offset = 0
    for table in target.tables:
        group = groups[table.group]
        first, last = (table.rows * number // shards for number in (shard, shard + 1))
        for spec in group.fields if first < last else ():
            region = Region(
                table=table,
                field=spec.name,
                rows=(table.offset + first, table.offset + last),
                columns=group.columns(spec),
                offset=offset,
                trailing=spec.trailing,
                dtype=codecs.dtype_of(spec.dtype),
            )
            found.append(region)
            offset += -(-region.nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(found)


def nbytes(held: tuple[Region, ...]) -> int:
    """Bytes of memory that regions take."""
    return held[-1].offset + held[-1].nbytes if held else 0
