# SPDX-License-Identifier: Apache-2.0
"""Layers as a merge sees them, and the row indices of their segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format import naming, row_blocks
from deltackpt.format.records import MOST
from deltackpt.format.row_blocks import (
    ArrayEntry,
    GroupEntry,
    Rows,
    Segment,
    Span,
    StoredRows,
)
from deltackpt.layers.targets import Targets

#: Segments with at least this many row indices are read on another thread.
MANY_ROWS = 1 << 13


class Source(Protocol):
    """Stored arrays, read on demand and verified."""

    def name_of(self, segment: Segment, entry: ArrayEntry) -> str:
        """Returns the name of a stored array in errors."""
        ...

    def read_into(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        """Reads elements ``[start, stop)`` of an array's first axis into ``out``, verified.

        ``out`` is (stop - start, *entry.shape[1:]) of the stored dtype. Raises Damaged if the array
        is missing or altered, as every function does that reads.
        """


class Layer(Source, Protocol):
    """What one process wrote in a save or a WAL record."""

    @property
    def groups(self) -> Mapping[str, GroupEntry]:
        """The groups by name."""
        ...

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments; the layers of one save have different rows or columns."""
        ...

    def check(self, segment: Segment) -> None:
        """Raises Damaged if the stored data are too short; called before memory is allocated."""

    def row_indices(self, segment: Segment, first: int = 0, stop: int = MOST) -> StoredRows:
        """Returns the row indices in ``[first, stop)`` of a segment without ranges."""
        ...


#: Returns the row indices of a segment of a layer; None if no row of it is wanted.
RowIndices = Callable[[Any, Segment, Targets], StoredRows | None]


def segment_rows(layer: Layer, segment: Segment) -> Rows:
    """Returns the rows of a segment, checked against its group."""
    return rows_within(layer, segment, (0, MOST)).rows


def rows_within(layer: Layer, segment: Segment, span: Span) -> StoredRows:
    """Returns the rows of a segment in a span, checked against its group."""
    layer.check(segment)
    if segment.ranges is not None:
        rows = row_blocks.rows_of(segment.ranges)
        found = row_blocks.row_slice(rows, *span)
        return StoredRows(rows[found], found.start)
    held, total = layer.row_indices(segment, *span), layer.groups[segment.group].rows
    if (end := row_blocks.reach(held.rows)[1]) > total:
        entry = next(entry for entry in segment.arrays if entry.name == naming.GAPS)
        raise Damaged(layer.name_of(segment, entry), f"rows below {total}", f"{end - 1}")
    return held


def stored_rows(layer: Layer, segment: Segment, targets: Targets) -> StoredRows | None:
    """Returns the rows of a segment around the wanted ones; None if no row is wanted."""
    if segment.ranges is not None:
        return StoredRows(segment_rows(layer, segment))
    span = targets.reach(segment)
    return None if span is None else rows_within(layer, segment, span)


def set_flags(flags: np.ndarray, rows: Rows) -> None:
    """Sets the flags of some rows."""
    if isinstance(rows, np.ndarray):
        flags[rows] = True
    else:
        for start, stop in row_blocks.spans_of(rows):
            flags[start:stop] = True
