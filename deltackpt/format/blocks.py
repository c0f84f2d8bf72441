# SPDX-License-Identifier: Apache-2.0
"""RowBlock and EncodedBlock: rows of one group, after and before they are decoded.

A group's *virtual table* is its tables concatenated along the rows. A *field* is one array
over that table: ``values`` (the rows themselves) or ``slot.<name>`` (one optimizer slot).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

#: Half-open: rows or columns ``[first, last)``.
Span = tuple[int, int]


class Box(NamedTuple):
    """Rows and columns of one field of a table; a field without columns has ``(0, 1)``."""

    rows: Span
    columns: Span

    @property
    def cells(self) -> int:
        """Number of cells along the first two axes."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


class Ranges:
    """Two or more ascending spans of rows, neither overlapping nor adjacent, as one sequence."""

    def __init__(self, spans: Sequence[Span]):
        """See ``rows_of``, which makes them."""
        self.spans = tuple(spans)
        lengths = [stop - start for start, stop in self.spans]
        #: Position in the sequence at which each span begins, and the length at the end.
        self._at = (0, *itertools.accumulate(lengths))

    def __len__(self) -> int:
        return self._at[-1]

    def __getitem__(self, part: slice) -> range | Ranges:
        first, last, _ = part.indices(len(self))
        found = []
        for number in range(bisect.bisect_right(self._at, first) - 1, len(self.spans)):
            (start, _), low, high = self.spans[number], self._at[number], self._at[number + 1]
            if low >= last:
                break
            found.append((start + max(first, low) - low, start + min(last, high) - low))
        rows = rows_of(found)
        assert not isinstance(rows, np.ndarray)
        return rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        rows = np.concatenate([np.arange(*span) for span in self.spans])
        return rows if dtype is None else rows.astype(dtype)

    def below(self, row: int) -> int:
        """Returns the number of rows below ``row``."""
        number = bisect.bisect_right(self.spans, row, key=lambda span: span[0]) - 1
        if number < 0:
            return 0
        start, stop = self.spans[number]
        return self._at[number] + min(row, stop) - start


#: Sorted, unique virtual row indices: a range where they are contiguous, Ranges where they are a
#: few spans, else an int64 array.
Rows = range | Ranges | np.ndarray


class StoredRows(NamedTuple):
    """Row indices of a segment or row group.

    Attributes:
      rows: some consecutive ones of its row indices.
      first: the position of the first of them along the first axis of its arrays.
    """

    rows: Rows
    first: int = 0


#: Name of the field that holds the rows of the tables themselves.
VALUES = "values"
#: Name of the slot that ``Tables(key=...)`` selects.
KEY_SLOT = "key"


def slot_field(slot: str) -> str:
    """Field name of an optimizer slot."""
    return f"slot.{slot}"


def row_slice(rows: Rows, start: int, stop: int) -> slice:
    """Returns the positions in ``rows`` of the row indices in ``[start, stop)``."""
    if isinstance(rows, range):
        low = min(max(start - rows.start, 0), len(rows))
        return slice(low, min(max(stop - rows.start, low), len(rows)))
    if isinstance(rows, Ranges):
        return slice(rows.below(start), rows.below(max(start, stop)))
    low, high = np.searchsorted(rows, (start, stop))
    return slice(int(low), int(high))


def row_slices(rows: Rows, spans: Sequence[Span]) -> list[slice]:
    """Returns ``row_slice`` for each of some spans, faster for many."""
    if not isinstance(rows, np.ndarray):
        return [row_slice(rows, *span) for span in spans]
    ends = np.searchsorted(rows, np.array(spans, np.int64).reshape(-1))
    return [slice(*pair) for pair in ends.reshape(-1, 2).tolist()]


def distinct(values: np.ndarray) -> np.ndarray:
    """Returns the sorted distinct values (0 or more).

    Faster than ``np.unique`` for some thousand.
    """
    values = np.sort(values)
    return values[np.diff(values, prepend=-1) > 0]


def rows_of(spans: Iterable[Span]) -> range | Ranges:
    """Returns the rows of disjoint spans in any order; adjacent spans are joined."""
    found = joined(spans)
    return Ranges(found) if len(found) > 1 else range(*found[0]) if found else range(0)


def shifted(rows: Rows, by: int) -> Rows:
    """Returns all row indices plus a number."""
    if isinstance(rows, np.ndarray):
        return rows + by
    return rows_of((start + by, stop + by) for start, stop in spans_of(rows))


def spans_of(rows: range | Ranges) -> tuple[Span, ...]:
    """Returns the spans of rows that are represented as spans."""
    if isinstance(rows, Ranges):
        return rows.spans
    return ((rows.start, rows.stop),) if len(rows) else ()


def sorted_spans(held: Sequence[Rows]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the spans of rows in the order of their starts, and how far earlier ones reach.

    The memory does not depend on the size of the table.

    Returns:
      Starts and ends, int64 (n,); and (n + 1,) the largest end of all spans before each.
    """
    found = []
    for rows in held:
        if isinstance(rows, np.ndarray):
            cuts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
            ends = np.append(cuts[1:], len(rows)) - 1 if len(rows) else cuts
            found.append((rows[cuts], rows[ends] + 1))
        else:
            spans = np.array(spans_of(rows), np.int64).reshape(-1, 2)
            found.append((spans[:, 0], spans[:, 1]))
    nothing = np.empty(0, np.int64)
    starts = np.concatenate([nothing, *(one for one, _ in found)])
    stops = np.concatenate([nothing, *(one for _, one in found)])
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    return starts, stops, np.maximum.accumulate(np.concatenate([[0], stops]))


def common(one: Span, other: Span) -> Span:
    """Returns the intersection of two spans; an empty span if they are disjoint."""
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def union_of(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the values of some ascending arrays, int64, ascending and each once.

    ``np.unique`` hashes them, which takes 30 times as long for parts of one segment.
    """
    if not parts:
        return np.empty(0, np.int64)
    found = np.concatenate(parts).astype(np.int64, copy=False)
    if not np.all(found[1:] > found[:-1]):
        found.sort(kind="stable")  # Merges the ascending parts.
        found = found[np.append(True, found[1:] != found[:-1])]
    return found


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Returns spans in ascending order; joins touching ones and drops empty ones."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False)
class RowBlock:
    """Rows of one group on one shard, in host memory.

    A save copies the training state into these, and a read passes them to the merge.

    Attributes:
      group: name of the group.
      rows: sorted unique virtual row indices, length n.
      columns: range of columns that the block holds of ``values`` and of slots as wide as the
        table; other fields are whole.
      fields: field name to its array: ``values`` is (n, columns) in the table's dtype, a slot is
        (n, columns) or (n, *trailing) in its own. A slot that is ``always`` written travels in a
        block of its own whose rows are all rows of the shard.
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
    """A segment's stored arrays; decoding them returns a RowBlock.

    Attributes:
      group, rows, columns: same as in RowBlock.
      arrays: stored array name to array, first axis n. A field's codec yields one or more arrays,
        the first named like the field, the others ``<field>.<suffix>``.
    """

    group: str
    rows: Rows
    columns: tuple[int, int]
    arrays: Mapping[str, np.ndarray]
