# SPDX-License-Identifier: Apache-2.0
"""The rows that a replica of the hot standby holds, and their layout in its memory.

Replica and reader compute it from a step's layout alone. Shard ``shard`` of ``shards`` holds that
part of the rows of each table, so for tables sharded by rows over as many nodes, rows are on the
nodes that need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from deltackpt import codecs
from deltackpt.format.blocks import Span
from deltackpt.format.manifest import Layout, TableEntry

_ALIGNMENT = 64


class Region(NamedTuple):
    """Rows of one field of one table in a replica's memory.

    Attributes:
      table: the table.
      field: ``values`` or ``slot.<name>``.
      rows: virtual rows of the group.
      columns: all columns of a field as wide as its table, which may be wanted in part; else None.
      offset: offset of the rows in bytes.
      trailing: shape of one row.
      dtype: dtype of the values.
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
        """Size of one row in bytes."""
        return math.prod(self.trailing) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of all its rows in bytes."""
        return (self.rows[1] - self.rows[0]) * self.row_bytes


#: Whether to hold a field of a table.
FieldChoice = Callable[[TableEntry, str], bool]


def everything(table: TableEntry, field: str) -> bool:
    """Chooses every field of every table."""
    return True


def regions(
    target: Layout, shard: int, shards: int, choice: FieldChoice = everything
) -> tuple[Region, ...]:
    """Returns the regions of a shard in memory order, without empty ones."""
    groups = target.group_by_name
    found: list[Region] = []
    offset = 0
    for table in target.tables:
        group = groups[table.group]
        first, last = (table.rows * number // shards for number in (shard, shard + 1))
        for spec in group.fields if first < last else ():
            if not choice(table, spec.name):
                continue
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
    """Returns the bytes of memory that regions occupy."""
    return held[-1].offset + held[-1].nbytes if held else 0
