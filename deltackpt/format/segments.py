# SPDX-License-Identifier: Apache-2.0
"""Records of segments: rows of one group as stored arrays, and the encoding of their fields.

``docs/reference/format.md`` specifies them.
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
    ``key`` is whether it holds the id of each row; see ``deltackpt.vocab``.
    """

    name: str
    trailing: tuple[int, ...]
    dtype: str
    codec: str = "raw"
    always: bool = False
    key: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, unencoded."""
        return math.prod(self.trailing) * dtypes.dtype_of(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupEntry:
    """Tables with equal fields, concatenated; ``rows`` is the length of the virtual table."""

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

    @property
    def key(self) -> FieldSpec | None:
        """The field with the id of each row; None if rows have no ids."""
        return next((spec for spec in self.fields if spec.key), None)

    def columns(self, spec: FieldSpec) -> tuple[int, int] | None:
        """Returns all columns of a field; None if it is not as wide as the tables."""
        return (0, self.width) if width(spec.trailing) == self.width else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayEntry:
    """One stored Zarr array. Its shape is authoritative, not the one in ``zarr.json``.

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
        """Whether a chunk's file is compressed."""
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
      reason: why this codec was chosen, as text.
      nbytes: bytes of its stored arrays, checksums and compression included.
      rows: rows of each table of the group, in the order of their offsets.
      squared_error: per table, the sum of squares of the decoding error; 0 if lossless.
      squared_norm: per table, the sum of squares of the rows; 0 if lossless. Rows that are stored
        next to their codes count in neither.
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

    ``columns`` is the range of columns that it holds of fields as wide as the tables; other fields
    are whole.

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
        codec = used.get(field, planned.codec)
        if (trailing, codec) == (planned.trailing, planned.codec):
            return planned
        return dataclasses.replace(planned, trailing=trailing, codec=codec)


def width(trailing: tuple[int, ...]) -> int:
    """Returns the columns of a field: the length of its second axis, 1 without one."""
    return trailing[0] if trailing else 1
