# SPDX-License-Identifier: Apache-2.0
"""The head of a WAL record, which is in the manifest of its layer. No I/O.

A record is what one process wrote in one ``append()`` call, as one layer. Records of a process are
numbered from 1, across the segments of an epoch. After a failed write a new *part* begins, in a new
segment: records of earlier parts count only below the first number of the part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Literal

import msgpack

from deltackpt.errors import Damaged
from deltackpt.format import records
from deltackpt.format.dense_blocks import BlockedValue
from deltackpt.format.records import Unsound

#: Row group of the additional items of a record, and its array of bytes.
ITEMS, ITEM_BYTES = "items", "bytes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordItem:
    """An additional item of a record, and its number of bytes."""

    name: str
    kind: Literal["bytes", "json"]
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordHead:
    """A record, without its row groups.

    Attributes:
      part: number of the part of the WAL.
      part_start: number of the first record of the part.
      full: whether all dense leaves are in the record.
      unix_ns: when it was captured, in nanoseconds since 1970.
      values: values of the dense item, as ``packed_values``; None without dense leaves. They are
        decoded when they are needed: there may be thousands.
      against: number of the ``append()`` call whose record holds the previous values of the dense
        leaves; None if this one has them in full.
      items: additional items, in the order of their bytes.
    """

    part: int
    part_start: int
    full: bool
    unix_ns: int
    values: bytes | None = None
    against: int | None = None
    items: tuple[RecordItem, ...] = ()

    @property
    def item_bytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self.items)


def to_bytes(head: RecordHead) -> bytes:
    """Encodes a head."""
    return records.packed(
        {field.name: getattr(head, field.name) for field in dataclasses.fields(head)}
    )


def from_bytes(data: bytes, *, name: str) -> RecordHead:
    """Decodes a head, whose bytes are verified.

    Raises:
      Damaged: it is invalid.
    """
    try:
        return records.built(RecordHead, records.unpacked(data))
    except Unsound as error:
        raise error.damage(name) from error
    except ValueError as error:
        raise Damaged(name, "a map of msgpack", str(error)) from error


def packed_values(values: Iterable[BlockedValue]) -> bytes:
    """Encodes values of a dense item: a list of the fields of each."""
    rows = [(one.key, one.dtype, one.count, one.group, one.at, one.file) for one in values]
    data = msgpack.packb({"values": rows})
    assert data is not None
    return data


@functools.lru_cache(maxsize=16)
def unpacked_values(data: bytes) -> tuple[BlockedValue, ...]:
    """Decodes values of a dense item; consecutive records mostly have the same.

    Raises:
      Unsound: they are invalid.
    """
    try:
        rows = records.unpacked(data).get("values")
    except ValueError as error:
        raise Unsound("a map of msgpack", str(error), "values") from error
    if type(rows) is not list:
        raise Unsound("a list", rows, "values")
    return tuple(map(_value_of, rows))


_TYPES = ((str,), (str,), (int,), (str,), (int, type(None)), (bool,))


def _value_of(row: Any) -> BlockedValue:
    is_row = type(row) is list and len(row) == len(_TYPES)
    if not (is_row and all(map(_is_one_of, row, _TYPES))):
        raise Unsound("the fields of a value", row, "values")
    key, dtype, count, group, at, file = row
    return BlockedValue(key=key, dtype=dtype, count=count, group=group, at=at, file=file)


def _is_one_of(value: Any, types: tuple[type, ...]) -> bool:
    return type(value) in types
