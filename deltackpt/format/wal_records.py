# SPDX-License-Identifier: Apache-2.0
"""What a layer of the WAL says of its record; the layer's footer holds it. No I/O.

A record is what one process wrote in one ``append()`` call, as one layer. Records of a process are
numbered from 1, across the segments of an epoch. After a failed write a new *part* begins, in a new
segment: records of earlier parts count only below the first number of the part.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from deltackpt.errors import Damaged
from deltackpt.format import dense_blocks, records
from deltackpt.format.dense_blocks import DenseBlocks
from deltackpt.format.records import Unsound
from deltackpt.format.segments import Segment
from deltackpt.format.soundness import check_segment, is_name, require

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
    """What the arrays of a record are.

    Attributes:
      part: number of the part of the WAL.
      part_start: number of the first record of the part.
      full: whether all dense leaves are in the record.
      unix_ns: when it was captured, in nanoseconds since 1970.
      segments: the rows.
      dense: the dense leaves of a full record; None if the state has none.
      against: number of the ``append()`` call whose record holds the previous values of the dense
        leaves; None if this one has them in full.
      items: additional items, in the order of their bytes.
    """

    part: int
    part_start: int
    full: bool
    unix_ns: int
    segments: tuple[Segment, ...] = ()
    dense: DenseBlocks | None = None
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
        head = records.built(RecordHead, records.unpacked(data))
        _check(head)
    except Unsound as error:
        raise error.damage(name) from error
    except ValueError as error:
        raise Damaged(name, "a map of msgpack", str(error)) from error
    return head


def _check(head: RecordHead) -> None:
    """Checks a head on its own.

    Raises:
      Unsound: the head is invalid.
    """
    for number, segment in enumerate(head.segments):
        try:
            check_segment(segment)
        except Unsound as error:
            raise error.within(f"segments[{number}]") from None
    if head.dense is not None:
        try:
            dense_blocks.check(head.dense)
        except Unsound as error:
            raise error.within("dense") from None
        for value in head.dense.values:
            if value.file:
                inside = all(map(is_name, value.key.split("/")))
                require(inside, "a path within the item", value.key, "dense.values.key")
    names = [segment.name for segment in head.segments]
    names += () if head.dense is None else [segment.name for segment in head.dense.segments]
    require(len({*names, ITEMS}) == len(names) + 1, "segments of different names", names)
