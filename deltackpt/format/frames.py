# SPDX-License-Identifier: Apache-2.0
"""WAL frames: what a process appends between two steps, each frame chained to the previous one.

A frame consists of a prefix, a head (a msgpack record) and a body (bytes). The checksum of prefix
and head continues that of the previous body, and the body's checksum continues that of the head. No
frame can therefore be altered, omitted, repeated or swapped undetected. Heads contain the body's
length, so scanning a log reads no rows.

A mark frame completes the WAL record of one ``append()`` call. A segment starts with a ``begin``
frame that continues the chain, so later segments remain valid after earlier ones are trimmed.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import google_crc32c
import numpy as np

from deltackpt.errors import Damaged, FormatTooNew
from deltackpt.format import dense_blocks, records
from deltackpt.format.dense_blocks import DenseBlocks
from deltackpt.format.manifest import SaveId
from deltackpt.format.records import Unsound
from deltackpt.format.segments import ArrayEntry, Segment
from deltackpt.format.soundness import MOST, MOST_ZSTD_RATIO, check_segment, is_name, require

#: The newest; frames that hold nothing new are of the first, which every reader knows.
VERSION = 2
#: How each frame begins.
MAGIC = b"DLOG"
#: Magic, version, kind, part, process, seq, step, bytes of the head and of the body.
_FIXED = struct.Struct("<4sBBHIQQIQ")
_CRC = struct.Struct("<I")
#: The prefix, before the head of a frame.
PREFIX_BYTES = _FIXED.size + _CRC.size
CRC_BYTES = _CRC.size
#: A body is cut so that it has no more, but for a single row, or a single leaf, that does.
BODY_BYTES = 64 << 20
#: What a reader takes: a frame may claim any length.
MOST_HEAD_BYTES, MOST_BODY_BYTES = 64 << 20, 1 << 40
#: Arrays of a body begin at multiples of it.
_ALIGNED = 8
_PIECE_BYTES = 4 << 20

Buffer = bytes | memoryview | np.ndarray
#: Of each array of a body the bytes of its chunks; none of one that is as it is. No sizes at all
#: where all are.
Sizes = tuple[tuple[int, ...], ...]


class Kind(enum.IntEnum):
    """Frame types."""

    BEGIN = 0
    ROWS = 1
    DENSE = 2
    ITEMS = 3
    MARK = 4
    BLOCKS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class After:
    """The last valid frame of an earlier part; later frames of that part are ignored."""

    part: int
    seq: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeginHead:
    """Head of the first frame of a segment.

    Attributes:
      stretch: sequence number of the epoch.
      crc32c: checksum that the next frame continues; its seq is that of this frame.
      after: for the first segment of a later part: the frame that it continues.
    """

    stretch: int
    crc32c: int
    after: After | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsHead:
    """Rows of one group: the arrays of the segment, one after the other, are the body.

    Attributes:
      segment: the rows.
      sizes: sizes of the compressed arrays.
    """

    segment: Segment
    sizes: Sizes = ()

    @property
    def arrays(self) -> tuple[ArrayEntry, ...]:
        """The arrays of the body, in order."""
        return self.segment.arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseValue:
    """One value of the dense item, in Orbax's layout, and its number of bytes in the frame's body.

    Attributes:
      key: its key in the database; for a file, its path in the item.
      file: whether it is a file.
      nbytes: its bytes in the body.
      decoded_bytes: size of the decoded value in bytes.
      itemsize: bytes per element.
      against: seq of the frame with the value that this one was XORed with. The result is split
        into byte planes and compressed with zstd. None if the body holds the value itself.
    """

    key: str
    file: bool
    nbytes: int
    decoded_bytes: int
    itemsize: int = 1
    against: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseHead:
    """Dense leaves of a full record, by key in Orbax's layout."""

    values: tuple[DenseValue, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlocksHead:
    """Some dense leaves of a full record, as blocks; the body holds the arrays of all segments.

    Attributes:
      record: the leaves, and their stored blocks.
      against: number of the ``append()`` call whose record holds the previous values of these
        leaves; None if this frame has them in full. Equal in all frames of a record.
      sizes: sizes of the compressed arrays.
    """

    record: DenseBlocks
    against: int | None = None
    sizes: Sizes = ()

    @property
    def arrays(self) -> tuple[ArrayEntry, ...]:
        """The arrays of the body, in order."""
        return tuple(entry for segment in self.record.segments for entry in segment.arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedItem:
    """An additional item of a record, and its number of bytes in the frame's body."""

    name: str
    kind: Literal["bytes", "json"]
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemsHead:
    """Further items of a record."""

    items: tuple[LoggedItem, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkHead:
    """Head of the frame that completes a record.

    Attributes:
      save_id: id of the record; its ``attempt`` is the number of the ``append()`` call.
      parent: the record or step that the rows are relative to.
      full: whether all dense leaves are among the frames.
      frames: number of frames since the previous record, without this one.
      unix_ns: when it was captured, in nanoseconds since 1970.
    """

    save_id: SaveId
    parent: SaveId
    full: bool
    frames: int
    unix_ns: int


Head = BeginHead | RowsHead | DenseHead | ItemsHead | MarkHead | BlocksHead
_HEADS: dict[Kind, type] = {
    Kind.BEGIN: BeginHead,
    Kind.ROWS: RowsHead,
    Kind.DENSE: DenseHead,
    Kind.ITEMS: ItemsHead,
    Kind.MARK: MarkHead,
    Kind.BLOCKS: BlocksHead,
}
_KINDS = {head: kind for kind, head in _HEADS.items()}


class Place(NamedTuple):
    """The position of a frame in the log of a process, and its step."""

    part: int
    process: int
    seq: int
    step: int


class Encoded(NamedTuple):
    """An encoded frame.

    Attributes:
      buffers: its bytes, in consecutive buffers.
      nbytes: total size in bytes.
      crc32c: checksum that the next frame continues.
    """

    buffers: list[memoryview]
    nbytes: int
    crc32c: int


class Prefix(NamedTuple):
    """The prefix of a frame; unverified."""

    kind: int
    place: Place
    head_bytes: int
    body_bytes: int
    crc32c: int
    covered: bytes

    @property
    def version(self) -> int:
        """Version of the format."""
        return self.covered[len(MAGIC)]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole frame."""
        return PREFIX_BYTES + self.head_bytes + self.body_bytes + CRC_BYTES


def encode(place: Place, head: Head, body: Iterable[Sequence[Buffer]], crc32c: int) -> Encoded:
    """Encodes a frame that continues another one.

    Args:
      place: its position.
      head: its header.
      body: arrays, each in contiguous pieces; each is padded to a whole word.
      crc32c: checksum of the previous frame; 0 for the first of a segment.
    """
    packed = records.packed(_as_map(head))
    parts = [part for pieces in body for part in _padded(pieces)]
    nbytes = sum(part.nbytes for part in parts)
    fixed = _FIXED.pack(
        MAGIC, _version_of(head), _KINDS[type(head)], place.part, place.process, place.seq,
        place.step, len(packed), nbytes,
    )  # fmt: skip
    crc = google_crc32c.extend(google_crc32c.extend(crc32c, fixed), packed)
    buffers = [memoryview(fixed + _CRC.pack(crc) + packed), *parts]
    for part in parts:
        crc = extended(crc, part)
    buffers.append(memoryview(_CRC.pack(crc)))
    return Encoded(buffers, PREFIX_BYTES + len(packed) + nbytes + CRC_BYTES, crc)


def prefix_of(data: bytes | memoryview, name: str) -> Prefix:
    """Parses the prefix of a frame.

    Args:
      data: ``PREFIX_BYTES`` bytes.
      name: the frame's name in errors.

    Raises:
      Damaged: the bytes are not a frame's prefix.
    """
    fixed = bytes(data[: _FIXED.size])
    magic, _, kind, *place, head_bytes, body_bytes = _FIXED.unpack(fixed)
    if magic != MAGIC:
        raise Damaged(name, "a frame", f"one that begins with {magic!r}")
    if head_bytes > MOST_HEAD_BYTES or body_bytes > MOST_BODY_BYTES:
        raise Damaged(name, "a shorter frame", f"one of {head_bytes} + {body_bytes} bytes")
    (crc,) = _CRC.unpack(data[_FIXED.size : PREFIX_BYTES])
    return Prefix(kind, Place(*place), head_bytes, body_bytes, crc, fixed)


def head_of(prefix: Prefix, data: bytes | memoryview, crc32c: int, name: str) -> Any:
    """Parses and verifies the head of a frame together with its prefix.

    Args:
      prefix: the result of ``prefix_of``.
      data: the bytes of the header.
      crc32c: checksum of the previous frame; a ``begin`` frame continues none.
      name: the frame's name in errors.

    Raises:
      Damaged: it is altered, is not a head, or does not continue the previous frame.
      FormatTooNew: a later version of deltackpt wrote it.
    """
    seed = 0 if prefix.kind == Kind.BEGIN else crc32c
    found = google_crc32c.extend(google_crc32c.extend(seed, prefix.covered), bytes(data))
    if found != prefix.crc32c:
        raise Damaged(name, f"crc32c {prefix.crc32c:08x}", f"crc32c {found:08x}")
    # With a valid checksum, it is really a later version and not a flipped bit.
    if prefix.version > VERSION:
        raise FormatTooNew(
            f"{name}: expected frames of version {VERSION} or below, found {prefix.version}; "
            "install a newer deltackpt"
        )
    if prefix.version < 1 or prefix.kind not in _HEADS:
        raise Damaged(name, "a frame of a known kind", f"kind {prefix.kind}")
    try:
        head = records.built(_HEADS[Kind(prefix.kind)], records.unpacked(bytes(data)))
        _check(head, prefix)
    except Unsound as error:
        raise error.damage(name) from error
    except ValueError as error:
        raise Damaged(name, "a map of msgpack", str(error)) from error
    return head


def body_crc32c(data: bytes | memoryview) -> int:
    """Returns the checksum after a frame's body, which the next frame continues."""
    (crc,) = _CRC.unpack(data)
    return crc


def check_body(body: memoryview, head_crc32c: int, expected: int, name: str) -> None:
    """Verifies the body of a frame.

    Args:
      body: the body.
      head_crc32c: checksum of its header, which the body's checksum continues.
      expected: the checksum stored after the body.
      name: the frame's name in errors.

    Raises:
      Damaged: it is altered.
    """
    found = extended(head_crc32c, body)
    if found != expected:
        raise Damaged(name, f"crc32c {expected:08x}", f"crc32c {found:08x}")


def extended(crc: int, data: memoryview) -> int:
    """Returns a checksum extended by more bytes; works in pieces, because it holds the GIL."""
    if not data.nbytes:
        return crc
    view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False
    for start in range(0, len(view), _PIECE_BYTES):
        piece = view[start : start + _PIECE_BYTES]
        crc = google_crc32c.extend(crc, piece)  # pyright: ignore[reportArgumentType]
    return crc


def chunk_rows(entry: ArrayEntry, number: int) -> int:
    """Returns the number of rows of a chunk; the last one may have fewer."""
    return min(entry.chunk_rows, entry.shape[0] - number * entry.chunk_rows)


def chunk_bytes(entry: ArrayEntry, number: int) -> int:
    """Returns the uncompressed bytes of a chunk."""
    return entry.nbytes // entry.shape[0] * chunk_rows(entry, number)


def pieces_of(sizes: Sequence[int], body: memoryview, name: str) -> list[memoryview]:
    """Returns the bytes of each array, value or item in a body.

    Raises:
      Damaged: the body has another length.
    """
    found, start = [], 0
    for nbytes in sizes:
        found.append(body[start : start + nbytes])
        start += nbytes + -nbytes % _ALIGNED
    if start != body.nbytes:
        raise Damaged(name, f"a body of {start} bytes", f"{body.nbytes} bytes")
    return found


def _version_of(head: Head) -> int:
    """The first version that has such frames."""
    new = isinstance(head, BlocksHead) or (isinstance(head, RowsHead) and head.sizes)
    return VERSION if new else 1


def _as_map(head: Head) -> dict[str, Any]:
    return {field.name: getattr(head, field.name) for field in dataclasses.fields(head)}


def _padded(pieces: Sequence[Buffer]) -> list[memoryview]:
    found = [part for part in map(_bytes_of, pieces) if part.nbytes]
    rest = -sum(part.nbytes for part in found) % _ALIGNED
    return [*found, memoryview(bytes(rest))] if rest else found


def _bytes_of(buffer: Buffer) -> memoryview:
    if isinstance(buffer, np.ndarray):
        # No buffer describes dtypes such as bfloat16; their bytes are like all others.
        return buffer.reshape(-1).view(np.uint8).data
    return memoryview(buffer).cast("B")


def _check(head: Any, prefix: Prefix) -> None:
    """Checks a head on its own.

    Raises:
      Unsound: the head is invalid.
    """
    if isinstance(head, RowsHead):
        try:
            check_segment(head.segment)
        except Unsound as error:
            raise error.within("segment") from None
        _check_sizes(head.arrays, head.sizes)
        return
    if isinstance(head, BlocksHead):
        _check_blocks(head)
        return
    if isinstance(head, DenseHead):
        for value in head.values:
            require(value.itemsize > 0, "at least 1 byte", value.itemsize, "values.itemsize")
            against = value.against
            require(against is None or against < prefix.place.seq, "an earlier frame", against)
            if value.file:
                inside = all(map(is_name, value.key.split("/")))
                require(inside, "a path within the item", value.key, "values.key")
            if against is None:
                require(value.nbytes == value.decoded_bytes, "bytes as they are", value.nbytes)
            require(value.decoded_bytes <= MOST_BODY_BYTES, "fewer bytes", value.decoded_bytes)
    if isinstance(head, MarkHead):
        for place, save_id in (("save_id", head.save_id), ("parent", head.parent)):
            require(is_name(save_id.run), "the id of a run", save_id.run, f"{place}.run")
            require(save_id.step <= MOST, f"at most {MOST}", save_id.step, f"{place}.step")
        step = prefix.place.step
        require(head.save_id.step == step, f"step {step}", head.save_id.step, "save_id.step")
        # Guarantees that following records to their parents ends.
        above = head.parent.step
        require(above <= step, f"a step up to {step}", above, "parent.step")
    if not isinstance(head, (BeginHead, MarkHead)):
        return
    require(prefix.body_bytes == 0, "no body", prefix.body_bytes)


def _check_blocks(head: BlocksHead) -> None:
    record = head.record
    try:
        dense_blocks.check(record)
    except Unsound as error:
        raise error.within("record") from None
    for value in record.values:
        if value.file:
            inside = all(map(is_name, value.key.split("/")))
            require(inside, "a path within the item", value.key, "values.key")
    held = sum(value.nbytes for value in record.values)
    require(held <= MOST_BODY_BYTES, "fewer bytes", held, "values")
    found = [(segment.name, entry.name) for segment in record.segments for entry in segment.arrays]
    require(len({*found}) == len(found), "arrays of different names", found, "segments")
    _check_sizes(head.arrays, head.sizes)


def _check_sizes(entries: Sequence[ArrayEntry], sizes: Sizes) -> None:
    require(len(sizes) in (0, len(entries)), f"sizes of {len(entries)} arrays", len(sizes), "sizes")
    for entry, own in zip(entries, sizes, strict=False):
        if not own:
            continue
        place = f"sizes.{records.shown(entry.name)}"
        require(entry.compressed and entry.nbytes > 0, "those of a compressed array", own, place)
        count = -(-entry.shape[0] // entry.chunk_rows)
        require(len(own) == count, f"those of {count} chunks", len(own), place)
        for number, nbytes in enumerate(own):
            plain = chunk_bytes(entry, number)
            fits = nbytes <= plain <= nbytes * MOST_ZSTD_RATIO
            require(fits, f"a chunk of {plain} bytes", nbytes, place)
