# SPDX-License-Identifier: Apache-2.0
"""RowBlock and EncodedBlock: the one currency between extraction, storage and merge.

A group's *virtual table* is its tables laid end to end along the rows. A *field* is one array
over that table: ``values`` (the rows themselves) or ``slot.<name>`` (one optimizer slot).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

#: Sorted, unique virtual row indices: a range where they are contiguous, else an int64 array.
Rows = range | np.ndarray

#: Name of the field that holds the rows of the tables themselves.
VALUES = "values"


def slot_field(slot: str) -> str:
    """Field name of an optimizer slot."""
    return f"slot.{slot}"


def row_slice(rows: Rows, start: int, stop: int) -> slice:
    """Positions in ``rows`` of the row indices in ``[start, stop)``."""
    if isinstance(rows, range):
        low = min(max(start - rows.start, 0), len(rows))
        return slice(low, min(max(stop - rows.start, low), len(rows)))
    low, high = np.searchsorted(rows, (start, stop))
    return slice(int(low), int(high))


@dataclasses.dataclass(frozen=True, eq=False)
class RowBlock:
    """Rows of one group on one shard, in host memory.

    Attributes:
      group: name of the group.
      rows: sorted unique virtual row indices, length n.
      columns: half-open range of the table width that ``values`` covers.
      fields: field name to its array: ``values`` is (n, columns) in the table's dtype, a slot is
        (n, *trailing) in its own. A slot that is ``always`` written travels in a block of its
        own whose rows are all rows of the shard.
    """

    group: str
    rows: Rows
    columns: tuple[int, int]
    fields: Mapping[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of all fields."""
        return sum(array.nbytes for array in self.fields.values())


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedBlock:
    """A RowBlock after its codecs: what storage, the log and the service carry.

    Attributes:
      group, rows, columns: as in RowBlock.
      arrays: stored array name to array, first axis n. A field's codec yields one or more arrays,
        the first named like the field, further ones ``<field>.<suffix>``.
    """

    group: str
    rows: Rows
    columns: tuple[int, int]
    arrays: Mapping[str, np.ndarray]
