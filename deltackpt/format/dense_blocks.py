# SPDX-License-Identifier: Apache-2.0
"""Records of the dense leaves of a delta or WAL record that one process wrote as blocks.

The values of the dense item are those of Orbax's database (``NAME/0.1``: a chunk of a leaf) and the
files beside it. A chunk is a table of *blocks* of 256 values, the last one padded with zeros; the
chunks of one dtype, laid end to end, are a group, and a segment holds some blocks of a group by one
codec. Blocks in no segment are unchanged from the parent. Small values and everything that is not
an array are *plain*: consecutive bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

from deltackpt.format import dtypes
from deltackpt.format.segments import Segment
from deltackpt.format.soundness import MOST, check_segment, is_name, require

#: Values per block: they share a scale.
BLOCK = 256
#: Smaller chunks are plain: a block of float32 is larger.
PLAIN_BYTES = 1024
#: Group of the segment that holds plain values, and its only array.
PLAIN, PLAIN_BYTES_OF = "plain", "bytes"
#: Prefix of the names of all segments of dense leaves.
SEGMENTS = "dense."
#: Field of the blocks of a segment.
BLOCKS = "blocks"

#: Values that were checked, kept alive so that their identities stay unique, and their blocks.
_known: dict[int, tuple[tuple[BlockedValue, ...], tuple[Mapping[str, int], int]]] = {}
_MOST_KNOWN = 16

#: A value of the item: whether it is a file, and its key.
Key = tuple[bool, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockedValue:
    """One value of the dense item.

    Attributes:
      key: key in Orbax's database, ``NAME/.zarray`` or ``NAME/I.J``; for a file, its path in the
        item.
      file: whether it is a file.
      dtype: dtype of its elements; ``uint8`` for plain values.
      count: number of elements.
      group: its dtype if it consists of blocks, otherwise ``plain``.
      at: its first block in the group. For a plain value, its first byte; None if the value is
        the same as in the parent.
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

    Attributes:
      values: every value of the item that it owns, changed or not; keys are unique across
        processes.
      segments: the data that changed since the parent. ``group`` is a dtype, or ``plain``;
        ``fields`` is ``blocks``, whose codec is that of the encoding.
      complete: whether the segments contain every value without reference, so that no older save
        is needed; False if that is unknown.
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


def is_plain(nbytes: int, dtype: str) -> bool:
    """Returns whether a chunk is stored as bytes."""
    return nbytes < PLAIN_BYTES or dtype not in BLOCKED_DTYPES


#: Of numbers that blocks are made of: those that a numpy view of unsigned integers covers.
BLOCKED_DTYPES = frozenset(
    (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *("bfloat16", "float16", "float32", "float64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2"),
        *("float8_e5m2fnuz", "bool"),
    )
)


def check(record: DenseBlocks, *, remember: bool = False) -> None:
    """Checks a record on its own.

    Args:
      record: the record.
      remember: whether other records may have the same tuple of values, which is checked once.

    Raises:
      Unsound: the record is invalid.
    """
    ends, plain_stop = _known_ends_of(record.values) if remember else _ends_of(record.values)
    names: set[str] = set()
    plain = [segment.count for segment in record.segments if segment.group == PLAIN]
    require(len(plain) <= 1, "one segment of plain values", f"{len(plain)}", "segments")
    stored = sum(plain)
    require(plain_stop <= stored, f"plain values within {stored} bytes", plain_stop, "values")
    for segment in record.segments:
        check_segment(segment)
        require(segment.name not in names, "one segment of a name", segment.name, "segments")
        names.add(segment.name)
        require(
            segment.group in ends,
            "a group of its values",
            segment.group,
            f"segments.{segment.name}.group",
        )
        total = ends[segment.group]
        if segment.group == PLAIN:
            shapes = [(entry.dtype, entry.shape) for entry in segment.arrays]
            expected = [("uint8", (segment.count,))]
            require(shapes == expected, f"{expected}", shapes, f"segments.{segment.name}.arrays")
        if segment.ranges:
            last = segment.ranges[-1][1]
            require(last <= total, f"blocks below {total}", last, f"segments.{segment.name}")
    if record.complete:
        _check_complete(record, ends)


def _known_ends_of(values: tuple[BlockedValue, ...]) -> tuple[Mapping[str, int], int]:
    """Returns ``_ends_of`` some values, remembered by identity.

    ``records.quickly`` returns the same objects for the same bytes, and saves mostly have the same
    values.
    """
    known = _known.get(id(values))
    if known is None:
        known = _known[id(values)] = values, _ends_of(values)
        for oldest in [*_known][:-_MOST_KNOWN]:  # Other threads may do the same.
            _known.pop(oldest, None)
    return known[1]


def _ends_of(values: tuple[BlockedValue, ...]) -> tuple[Mapping[str, int], int]:
    """Checks values.

    Returns:
      The number of blocks of each group, and that of plain bytes; and where the last of them ends.
    """
    keys: set[Key] = set()
    ends: dict[str, int] = {}
    plain_end = plain_stop = 0
    for value in values:
        # A record may have thousands of values, so errors are described only if there are any.
        key, at, plain = (value.file, value.key), value.at, value.group == PLAIN
        expected = 0 if plain else ends.get(value.group, 0)
        sound = (
            key not in keys
            and 0 <= value.count <= MOST // 16
            and not value.file
            and (
                value.dtype == "uint8" and (at is None or at >= 0)
                if plain
                else value.dtype in BLOCKED_DTYPES and value.group == value.dtype and at == expected
            )
        )
        if not sound:
            _check_value(value, keys, expected)
        keys.add(key)
        if not plain:
            ends[value.group] = expected + value.blocks
        elif at is not None:
            plain_end += value.count
            plain_stop = max(plain_stop, at + value.count if value.count else 0)
    ends[PLAIN] = plain_end
    return ends, plain_stop


def _check_value(value: BlockedValue, keys: Set[Key], expected: int) -> None:
    """Checks a value; ``expected`` is its first block, and ``keys`` are those before it."""
    place = f"values.{value.key}"
    require((value.file, value.key) not in keys, "one value of a key", value.key, "values")
    if value.file:
        inside = all(map(is_name, value.key.split("/")))
        require(inside, "a path in the item", value.key, f"{place}.key")
    require(value.dtype in BLOCKED_DTYPES, "a dtype of blocks", value.dtype, f"{place}.dtype")
    require(0 <= value.count <= MOST // 16, "numbers", value.count, f"{place}.count")
    if value.plain:
        require(value.dtype == "uint8", "bytes", value.dtype, f"{place}.dtype")
        require((value.at or 0) >= 0, "0 or more", value.at, f"{place}.at")
        return
    require(value.group == value.dtype, f"group {value.dtype}", value.group, f"{place}.group")
    require(value.at == expected, f"blocks from {expected} on", value.at, f"{place}.at")


def _check_complete(record: DenseBlocks, blocks: Mapping[str, int]) -> None:
    """Checks that a complete record contains all of its values."""
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
