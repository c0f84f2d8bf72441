# SPDX-License-Identifier: Apache-2.0
"""Row blocks of groups, their segments and stored arrays, and blocks of dense leaves. No I/O.

A group's *virtual table* is its tables concatenated along the rows. A *field* is one array
over that table: ``values`` (the rows themselves) or ``slot.<name>`` (one optimizer slot).

The values of the dense item are those of Orbax's database (``NAME/0.1``: a chunk of a leaf) and the
files beside it. A chunk is a table of *blocks* of 256 values, the last one padded with zeros; the
chunks of one dtype, laid end to end, are a group, and a segment holds some blocks of a group by one
codec. Blocks in no segment are unchanged from the parent. Small values and everything that is not
an array are *plain*: consecutive bytes.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deltackpt.cached import cached_property
from deltackpt.format import dtypes
from deltackpt.format.records import (
    KEPT_FIELDS,
    MOST,
    IdentityCache,
    InvalidRecord,
    check_segment,
    is_name,
    require,
)

if TYPE_CHECKING:
    import numpy.typing as npt

#: Uncompressed bytes per chunk: ten times faster than one giant value, and few enough files.
CHUNK_BYTES = 16 << 20
#: Chunks of whole pages are read and written without a copy.
_PAGE_BYTES = 4096
#: Half-open: rows or columns ``[first, last)``.
Span = tuple[int, int]


class Box(NamedTuple):
    """Rows and columns of one field of a table; a field without columns has ``(0, 1)``.

    ``cycle`` is the period and phases of ``CyclicRows``; None for all rows of the span.
    """

    rows: Span
    columns: Span
    cycle: tuple[int, tuple[int, ...]] | None = None

    def within(self, table_rows: int) -> Rows:
        """Returns the rows below ``table_rows``."""
        span = common(self.rows, (0, table_rows))
        return range(*span) if self.cycle is None else CyclicRows(span, *self.cycle).to_array()


class Ranges:
    """Two or more ascending spans of rows, neither overlapping nor adjacent, as one sequence."""

    def __init__(self, spans: Sequence[Span]):
        self.spans = tuple(spans)
        lengths = [stop - start for start, stop in self.spans]
        #: Position in the sequence at which each span begins, and the length at the end.
        self._at = (0, *itertools.accumulate(lengths))

    def __len__(self) -> int:
        return self._at[-1]

    def __getitem__(self, piece: slice) -> range | Ranges:
        first, last, _ = piece.indices(len(self))
        found = []
        for number in range(bisect.bisect_right(self._at, first) - 1, len(self.spans)):
            (start, _), low, high = self.spans[number], self._at[number], self._at[number + 1]
            if low >= last:
                break
            found.append((start + max(first, low) - low, start + min(last, high) - low))
        rows = rows_of(found)
        assert not isinstance(rows, np.ndarray)
        return rows

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        rows = np.concatenate([np.arange(*span) for span in self.spans])
        return rows if dtype is None else rows.astype(dtype)

    def below(self, row: int) -> int:
        """Returns the number of rows below ``row``."""
        number = bisect.bisect_right(self.spans, row, key=lambda span: span[0]) - 1
        if number < 0:
            return 0
        start, stop = self.spans[number]
        return self._at[number] + min(row, stop) - start


class CyclicRows(NamedTuple):
    """Rows of a span whose offset from its first row, modulo ``period``, is in ``phases``."""

    rows: Span
    period: int
    phases: tuple[int, ...]

    @property
    def count(self) -> int:
        """Returns the number of rows."""
        return self._below(self.rows[1])

    def _below(self, row: int) -> int:
        length = row - self.rows[0]
        return sum(-(-(length - phase) // self.period) for phase in self.phases if phase < length)

    def count_in(self, rows: Rows) -> int:
        """Returns how many of some rows in the span are cyclic rows."""
        if isinstance(rows, np.ndarray):
            return int(np.count_nonzero(self.contains(rows)))
        return sum(self._below(stop) - self._below(start) for start, stop in spans_of(rows))

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Returns the positions of some of its rows in ``to_array()``."""
        quotient, phase = np.divmod(rows - self.rows[0], self.period)
        return quotient * len(self.phases) + np.searchsorted(self.phases, phase)

    def to_array(self) -> np.ndarray:
        """Returns the rows, int64 ascending."""
        found = np.add.outer(
            np.arange(*self.rows, self.period), np.array(self.phases, int)
        ).reshape(-1)
        return found[: self.count]

    def contains(self, rows: np.ndarray) -> np.ndarray:
        """Returns a mask of the given rows of the span that are cyclic rows."""
        at_phase = np.zeros(self.period, bool)
        at_phase[[*self.phases]] = True
        return at_phase[(rows - self.rows[0]) % self.period]


@dataclasses.dataclass(frozen=True)
class RowSet:
    """Virtual rows: ``spans`` and ``cycles``, each ascending, all disjoint."""

    spans: tuple[Span, ...]
    cycles: tuple[CyclicRows, ...] = ()

    def __len__(self) -> int:
        whole = sum(stop - start for start, stop in self.spans)
        return whole + sum(cycle.count for cycle in self.cycles)

    @property
    def reach(self) -> tuple[Span, ...]:
        """Returns spans that cover all rows, and the gaps of cyclic rows."""
        return joined([*self.spans, *(cycle.rows for cycle in self.cycles)])

    def rows(self) -> Rows:
        """Returns all rows."""
        if not self.cycles:
            return rows_of(self.spans)
        pieces = [np.arange(*span) for span in self.spans]
        pieces += [cycle.to_array() for cycle in self.cycles]
        return np.concatenate(sorted(pieces, key=lambda rows: rows[0]))

    def intersect(self, rows: np.ndarray) -> np.ndarray:
        """Returns the rows of the set among some ascending rows, ascending."""
        pieces = [rows[row_slice(rows, *span)] for span in self.spans]
        for cycle in self.cycles:
            inside = rows[row_slice(rows, *cycle.rows)]
            pieces.append(inside[cycle.contains(inside)])
        found = np.concatenate(pieces) if pieces else rows[:0]
        return np.sort(found) if self.cycles else found


#: Sorted, unique virtual row indices: a range where they are contiguous, Ranges where they are a
#: few spans, else an int64 array.
Rows = range | Ranges | np.ndarray


class StoredRows(NamedTuple):
    """Consecutive row indices of a segment, and the position of the first one in its arrays."""

    rows: Rows
    first: int = 0


#: Name of the field that holds the rows of the tables themselves.
VALUES = "values"
#: Name of the slot that ``Tables(key=...)`` selects.
KEY_SLOT = "key"


def slot_field(slot: str) -> str:
    """Field name of an optimizer slot."""
    return f"slot.{slot}"


def reach(rows: Rows) -> Span:
    """Returns the span from the first to the last of some rows."""
    if isinstance(rows, Ranges):
        return rows.spans[0][0], rows.spans[-1][1]
    return (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)


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
    """Returns the sorted distinct values (>= 0), faster than ``np.unique`` for some thousand."""
    values = np.sort(values)
    return values[np.diff(values, prepend=-1) > 0]


def rows_of(spans: Iterable[Span]) -> range | Ranges:
    """Returns the rows of disjoint spans in any order; adjacent spans are joined."""
    found = joined(spans)
    return Ranges(found) if len(found) > 1 else range(*found[0]) if found else range(0)


def shifted(rows: Rows, by: int) -> Rows:
    """Returns all row indices plus ``by``, which is usually 0."""
    if by == 0:
        return rows
    if isinstance(rows, np.ndarray):
        return rows + by
    return rows_of((start + by, stop + by) for start, stop in spans_of(rows))


def spans_of(rows: range | Ranges) -> tuple[Span, ...]:
    """Returns the spans of rows that are represented as spans."""
    if isinstance(rows, Ranges):
        return rows.spans
    return ((rows.start, rows.stop),) if len(rows) else ()


def sorted_spans(held: Sequence[Rows]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns int64 starts and ends of the spans of rows, by start, and how far earlier ones reach.

    The last array, (n + 1,), has the largest end of all spans before each. The memory does not
    depend on the size of the table.
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


def union_of(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the values of some ascending arrays, int64, ascending and each once.

    ``np.unique`` hashes them, which takes 30 times as long for parts of one segment.
    """
    if not pieces:
        return np.empty(0, np.int64)
    found = np.concatenate(pieces).astype(np.int64, copy=False)
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

    ``rows`` are n sorted unique virtual row indices. ``fields`` maps a field to its array:
    ``values`` is (n, columns), a slot is (n, columns) or (n, *trailing). ``columns`` is the range
    that the block holds of fields as wide as the table; other fields are whole. A slot that is
    ``always`` written is in a block of its own, with all rows of the shard.
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
    """A segment's stored arrays, first axis n; decoding them returns a RowBlock.

    The first array of a field is named like the field, the others ``<field>.<suffix>``.
    """

    group: str
    rows: Rows
    columns: tuple[int, int]
    arrays: Mapping[str, np.ndarray]


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

    @cached_property
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

    def axes(self, spec: FieldSpec) -> int:
        """Returns how many axes of a field may be sharded: rows, and columns if it has these."""
        return 1 if self.columns(spec) is None else 2


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


def array_entry(
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    zstd: bool = False,
    byte_planes: bool = False,
    chunk_rows: int | None = None,
) -> ArrayEntry:
    """Describes an array to be stored, of a core dtype of Zarr v3; only its first axis is split.

    Chunks have whole rows of about ``CHUNK_BYTES`` if ``chunk_rows`` is None.
    """
    if chunk_rows is None:
        nbytes = math.prod(shape) * dtype.itemsize
        # Equal chunks: a shorter last one would still be stored at full length.
        chunk_rows = max(1, -(-shape[0] // max(1, -(-nbytes // CHUNK_BYTES))))
        if chunk_rows < shape[0]:
            # Contiguous rows are written without a copy.
            even_rows = _PAGE_BYTES // math.gcd(_PAGE_BYTES, nbytes // shape[0])
            if even_rows <= chunk_rows // 16:
                chunk_rows = -(-chunk_rows // even_rows) * even_rows
    return ArrayEntry(
        name=name,
        shape=shape,
        dtype=_name_of(dtype),
        chunk_rows=chunk_rows,
        zstd=zstd,
        byte_planes=byte_planes,
    )


@functools.lru_cache(64)
def _name_of(dtype: np.dtype) -> str:
    return dtype.name  # It takes longer than everything else about an entry.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """How one field of a segment was stored, and what that changed.

    ``nbytes`` includes checksums and compression. ``rows``, ``squared_error`` (of the decoding
    error) and ``squared_norm`` (of the rows) have one value per table of the group, in the order of
    their offsets; the sums are 0 if lossless, and exclude rows stored next to their codes.
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
    """Rows of one group that a shard has, with the same fields for each.

    ``columns`` is the range of columns of fields as wide as the tables; other fields are whole.
    ``ranges`` lists the virtual rows as ascending half-open ranges; if it is None, the array
    ``rows.gaps`` holds them. Segments are stored in the shard's directory under ``name``.
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
        """Returns a field's spec with this segment's columns and the codec that was used."""
        [planned] = [spec for spec in group.fields if spec.name == field]
        codec, trailing = planned.codec, planned.trailing
        for encoding in self.encodings:
            if encoding.field == field:
                codec = encoding.codec
        if trailing and group.columns(planned) is not None:
            trailing = (self.columns[1] - self.columns[0], *trailing[1:])
        if (trailing, codec) == (planned.trailing, planned.codec):
            return planned
        return dataclasses.replace(planned, trailing=trailing, codec=codec)


def width(trailing: tuple[int, ...]) -> int:
    """Returns the columns of a field: the length of its second axis, 1 without one."""
    return trailing[0] if trailing else 1


#: Values per block: they share a scale.
BLOCK = 256
#: Name for options and figures: the smallest lossless encoding of each block. Manifests contain
#: the names of the encodings.
LOSSLESS = "lossless"
#: Smaller chunks are plain: a block of float32 is larger.
PLAIN_BYTES = 1024
#: Group of the segment that holds plain values, and its only array.
PLAIN, PLAIN_BYTES_OF = "plain", "bytes"
#: Prefix of the names of all segments of dense leaves.
SEGMENTS = "dense."
#: Field of the blocks of a segment.
BLOCKS = "blocks"

_known: IdentityCache[tuple[Mapping[str, int], int]] = IdentityCache(KEPT_FIELDS)

#: A value of the item: whether it is a file, and its key.
Key = tuple[bool, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockedValue:
    """One value of the dense item.

    ``key`` is ``NAME/.zarray`` or ``NAME/I.J`` in Orbax's database; for a file, its path in the
    item. ``count`` is the number of elements. ``group`` is the dtype if the value consists of
    blocks, otherwise ``plain``, whose dtype is ``uint8``. ``at`` is its first block in the group;
    for a plain value, its first byte, or None if the value is the same as in the parent.
    """

    key: str
    dtype: str
    count: int
    group: str
    at: int | None
    file: bool = False

    @property
    def plain(self) -> bool:
        """Whether it is stored as bytes."""
        return self.group == PLAIN

    @property
    def blocks(self) -> int:
        """Number of its blocks, including a padded last one."""
        return 0 if self.plain else blocks_of(self.count)

    @property
    def nbytes(self) -> int:
        """Bytes of the value itself."""
        return self.count * dtypes.dtype_of(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseBlocks:
    """The dense leaves that one process wrote in a delta, or in a WAL record.

    ``values`` are all values of the item that it owns, changed or not; keys are unique across
    processes. ``segments`` hold what changed since the parent: the group is a dtype or ``plain``,
    the field is ``blocks``. ``complete`` is whether they need no older save; False if that is
    unknown.
    """

    values: tuple[BlockedValue, ...]
    segments: tuple[Segment, ...]
    complete: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, before any compression."""
        return sum(entry.nbytes for segment in self.segments for entry in segment.arrays)

    def of_group(self, group: str) -> list[BlockedValue]:
        """Returns the values in a group, in the order of their blocks."""
        return [value for value in self.values if value.group == group and not value.plain]


def blocks_of(count: int) -> int:
    """Returns the number of blocks for a number of values."""
    return -(-count // BLOCK)


def group_of(nbytes: int, dtype: str) -> str:
    """Returns the group of a chunk: its dtype, or ``plain`` if it is stored as bytes."""
    return PLAIN if nbytes < PLAIN_BYTES or dtype not in BLOCKED_DTYPES else dtype


#: Of numbers that blocks are made of: those that a numpy view of unsigned integers covers.
BLOCKED_DTYPES = frozenset(
    (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *("bfloat16", "float16", "float32", "float64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2"),
        *("float8_e5m2fnuz", "bool"),
    )
)


def check(record: DenseBlocks) -> None:
    """Raises InvalidRecord if a record is invalid on its own."""
    # Most records of a run have the same tuple of values.
    ends, plain_stop = _known.get(lambda: _ends_of(record.values), record.values)
    names: set[str] = set()
    plain = [segment.count for segment in record.segments if segment.group == PLAIN]
    require(len(plain) <= 1, "one segment of plain values", f"{len(plain)}", "segments")
    stored = sum(plain)
    require(plain_stop <= stored, f"plain values within {stored} bytes", plain_stop, "values")
    for segment in record.segments:
        check_segment(segment)
        require(segment.name not in names, "one segment of a name", segment.name, "segments")
        names.add(segment.name)
        place = f"segments.{segment.name}"
        require(segment.group in ends, "a group of its values", segment.group, f"{place}.group")
        total = ends[segment.group]
        if segment.group == PLAIN:
            shapes = [(entry.dtype, entry.shape) for entry in segment.arrays]
            expected = [("uint8", (segment.count,))]
            require(shapes == expected, f"{expected}", shapes, f"{place}.arrays")
        if segment.ranges:
            last = segment.ranges[-1][1]
            require(last <= total, f"blocks below {total}", last, place)
    if record.complete:
        _check_complete(record, ends)


def _ends_of(values: tuple[BlockedValue, ...]) -> tuple[Mapping[str, int], int]:
    """Checks values; returns each group's number of blocks, and where the last plain bytes end."""
    keys: set[Key] = set()
    ends: dict[str, int] = {}
    plain_end = plain_stop = 0
    for value in values:
        key, at = (value.file, value.key), value.at
        if key in keys:
            raise InvalidRecord("one value of a key", value.key, "values")
        keys.add(key)
        _check_value(value, ends.get(value.group, 0))
        if not value.plain:
            ends[value.group] = ends.get(value.group, 0) + value.blocks
        elif at is not None:
            plain_end += value.count
            plain_stop = max(plain_stop, at + value.count if value.count else 0)
    ends[PLAIN] = plain_end
    return ends, plain_stop


def _check_value(value: BlockedValue, end: int) -> None:
    """Checks a value on its own, and that it begins at the ``end`` of its group's blocks."""
    # A record may have thousands of values, so errors are described only if there are any. Its
    # decoder has checked the types, and that no number is negative.
    if value.file and not is_name(*value.key.split("/")):
        raise InvalidRecord("a path in the item", value.key, f"values.{value.key}.key")
    if value.count > MOST // 16:
        raise InvalidRecord("numbers", value.count, f"values.{value.key}.count")
    if value.plain:
        if value.dtype != "uint8":
            raise InvalidRecord("bytes", value.dtype, f"values.{value.key}.dtype")
    elif value.dtype not in BLOCKED_DTYPES or (value.group, value.at) != (value.dtype, end):
        found = value.dtype, value.group, value.at
        raise InvalidRecord(f"a dtype of blocks from {end} on", found, f"values.{value.key}")


def _check_complete(record: DenseBlocks, blocks: Mapping[str, int]) -> None:
    found: dict[str, int] = {}
    for segment in record.segments:
        found[segment.group] = found.get(segment.group, 0) + segment.count
    for value in record.values:
        if value.at is None:
            require(not value.plain, "bytes", None, f"values.{value.key}.at")
    for group, count in blocks.items():
        held = found.get(group, 0)
        require(held == count, f"all {count} of {group}", held, "segments")


def plain_bytes(record: DenseBlocks) -> int:
    """Returns the bytes of all plain values in a record."""
    return sum(value.count for value in record.values if value.plain and value.at is not None)
