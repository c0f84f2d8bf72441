# SPDX-License-Identifier: Apache-2.0
"""Segments: rows of one group as stored arrays, and how each of their fields was encoded. Records.

What they mean is specified in ``docs/format.md``.
"""

from __future__ import annotations

import dataclasses
import math

from deltackpt.format import dtypes
from deltackpt.format.blocks import VALUES


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One field of a group: ``values`` or ``slot.<name>``.

    ``trailing`` is the shape of one row; ``always`` fields are written whole in every delta.
    ``codec`` is the one planned for a save; a segment may have another: ``Segment.spec``.
    """

    name: str
    trailing: tuple[int, ...]
    dtype: str
    codec: str = "raw"
    always: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, unencoded."""
        return math.prod(self.trailing) * dtypes.dtype_of(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupEntry:
    """Tables of equal fields, laid end to end; ``rows`` is the length of the virtual table."""

    name: str
    rows: int
    fields: tuple[FieldSpec, ...]

    @property
    def width(self) -> int:
        """Columns of the tables."""
        return next(width(spec.trailing) for spec in self.fields if spec.name == VALUES)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all fields, unencoded."""
        return sum(spec.row_bytes for spec in self.fields)

    def columns(self, spec: FieldSpec) -> tuple[int, int] | None:
        """All columns of a field; None where it is not as wide as the tables: it is never split."""
        return (0, self.width) if width(spec.trailing) == self.width else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """One stored Zarr array: its shape is the truth, not that of ``zarr.json``.

    ``chunk_rows`` rows of the first axis make a chunk; other axes are not split. ``zstd`` and
    ``byte_planes`` arrays are compressed, the latter with their last axis first; others can be
    read straight from their chunk files.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk_rows: int
    zstd: bool = False
    byte_planes: bool = False

    @property
    def compressed(self) -> bool:
        """Whether a chunk's file holds something else than the bytes of its rows."""
        return self.zstd or self.byte_planes

    @property
    def nbytes(self) -> int:
        """Bytes of the array, before any compression."""
        return math.prod(self.shape) * dtypes.itemsize_of(self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """How one field of a segment was stored, and what that changed.

    Attributes:
      field: the field.
      codec: the codec that was used in the end.
      reason: why this one, for people.
      nbytes: bytes of its stored arrays, checksums and compression included.
      rows: rows of each table of the group, in the order of their offsets.
      squared_error: likewise the sum of the squares of what decoding changes; 0 where lossless.
      squared_norm: likewise the sum of the squares of the rows; 0 where lossless. Rows that are
        stored beside their codes count in neither.
    """

    field: str
    codec: str
    reason: str
    nbytes: int
    rows: tuple[int, ...]
    squared_error: tuple[float, ...]
    squared_norm: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Rows of one group that a part holds, with the same fields for each.

    ``columns`` is what it holds of the fields that are as wide as the tables; others are whole.

    Either ``ranges`` lists the virtual rows as half-open ranges in ascending order, or it is
    None and the array ``rows.gaps`` holds them. ``count`` is the number of rows. Segments lie in
    the part's directory under ``name``.
    """

    name: str
    group: str
    columns: tuple[int, int]
    count: int
    ranges: tuple[tuple[int, int], ...] | None
    fields: tuple[str, ...]
    arrays: tuple[ArrayEntry, ...]
    encodings: tuple[Encoding, ...] = ()

    def spec(self, group: GroupEntry, field: str) -> FieldSpec:
        """A field's spec as this segment has it: its columns, and the codec that was used."""
        planned = next(spec for spec in group.fields if spec.name == field)
        used = {encoding.field: encoding.codec for encoding in self.encodings}
        trailing = planned.trailing
        if trailing and group.columns(planned) is not None:
            trailing = (self.columns[1] - self.columns[0], *trailing[1:])
        return dataclasses.replace(planned, trailing=trailing, codec=used.get(field, planned.codec))


def width(trailing: tuple[int, ...]) -> int:
    """Columns of a field: the length of its second axis, 1 where it has none."""
    return trailing[0] if trailing else 1
