# SPDX-License-Identifier: Apache-2.0
"""The write-ahead log: headers of epochs, heads of records, their chunks in Kafka. No I/O.

A WAL epoch is the log of one run: every start and every restore begins a new one. Its header is
written once, atomically, with a number above all earlier ones, before the run saves or appends
anything. The newest header alone names what it continues: a recovery point, a step, or nothing.
Records of earlier epochs beyond that are ignored, including those that a fenced trainer still
appends.

A record is what one process wrote in one ``append()`` call, as one layer. Records of a process are
numbered from 1, across the segments of an epoch. After a failed write a new *part* begins, in a new
segment: records of earlier parts count only below the first number of the part.

In Kafka, partition p of the topic has the records of process p. Each message has the sequence
number of its record and the index of its chunk, so readers drop repeated messages and detect
missing ones whatever the broker delivers.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import google_crc32c
import msgpack
import numpy as np

from deltackpt.format import manifest, records
from deltackpt.format.manifest import DenseEntry, KeyPath, Layout, SaveId, TableEntry
from deltackpt.format.records import is_name, require
from deltackpt.format.row_blocks import BlockedValue, GroupEntry

_MAGIC = "deltackpt.log"
#: More than any job has; the log of each is looked for.
_MOST_PROCESSES = 1 << 16
#: Feature of an epoch whose records are in a Kafka topic.
KAFKA = "kafka"
#: Features that a reader must support to read a WAL epoch.
KNOWN_FEATURES: frozenset[str] = frozenset({KAFKA})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continues:
    """The recovery point of an earlier WAL epoch from which a run resumes."""

    epoch: int
    save_id: SaveId


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalTopic:
    """The Kafka topic of an epoch: partition p has the records of process p.

    ``starts`` has, for each partition, an offset before the first record of the epoch.
    """

    name: str
    cluster: str
    starts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochHeader:
    """Header of a WAL epoch: what the run resumed from, and what it logs.

    ``process_count`` is 0 if the run has no WAL and only records its fork point. ``directory`` is
    the location of the segments if it is not next to the header. ``base`` is the step that was
    restored, or onto which the point was replayed; ``continues`` is the restored recovery point.
    If a run's tables or leaves change, ``base`` is the first save with the new ones, and
    ``continues`` is the run's newest point before it.
    """

    epoch: int
    run: str
    process_count: int
    base: SaveId | None
    continues: Continues | None
    directory: str | None = None
    topic: WalTopic | None = None
    groups: tuple[GroupEntry, ...] = ()
    tables: tuple[TableEntry, ...] = ()
    dense: tuple[DenseEntry, ...] = ()
    tracking_paths: tuple[KeyPath, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def group_by_name(self) -> dict[str, GroupEntry]:
        """Groups by name."""
        return {group.name: group for group in self.groups}

    @property
    def layout(self) -> Layout:
        """Tables and dense leaves of the state that is logged."""
        return Layout(self.groups, self.tables, self.dense, self.tracking_paths)


def epoch_header_bytes(head: EpochHeader) -> bytes:
    """Encodes an epoch header with its checksum."""
    return records.to_bytes(head, _MAGIC)


def epoch_header_from(data: bytes, *, name: str) -> EpochHeader:
    """Decodes an epoch header; raises Damaged or FormatTooNew."""
    head = records.from_bytes(
        data, EpochHeader, name=name, magic=_MAGIC, known_features=KNOWN_FEATURES
    )
    with records.as_damage(name):
        _check(head)
    return head


def _check(head: EpochHeader) -> None:
    require(is_name(head.run), "the id of a run", head.run, "run")
    count = head.process_count
    require(count <= _MOST_PROCESSES, f"at most {_MOST_PROCESSES}", count, "process_count")
    if (continues := head.continues) is not None:
        before = continues.epoch
        require(before < head.epoch, "an earlier epoch", before, "continues.epoch")
        require(head.base is not None, "the step below the point", None, "base")
    if (topic := head.topic) is not None:
        require(is_name(topic.name), "the name of a topic", topic.name, "topic.name")
        partitions = len(topic.starts)
        require(count <= partitions, f"at least {count} partitions", partitions, "topic.starts")
        require(min(topic.starts, default=0) >= 0, "offsets", topic.starts, "topic.starts")
    manifest.check_paths(head)


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

    ``part_start`` is the number of the first record of the part. ``full`` is whether all dense
    leaves are in the record; if not, ``against`` is the number of the ``append()`` call whose
    record holds their previous values. ``unix_ns`` is when the record was captured. ``values`` are
    ``packed_values``, decoded only when they are needed; None without dense leaves. ``items`` are
    in the order of their bytes.
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


def record_head_bytes(head: RecordHead) -> bytes:
    """Encodes a record head."""
    return records.packed(
        {field.name: getattr(head, field.name) for field in dataclasses.fields(head)}
    )


def record_head_from(data: bytes, *, name: str) -> RecordHead:
    """Decodes a record head, whose bytes are verified; raises Damaged if it is invalid."""
    return records.built(data, RecordHead, name=name)


def packed_values(values: Iterable[BlockedValue]) -> bytes:
    """Encodes values of a dense item: a list of the fields of each."""
    rows = [(one.key, one.dtype, one.count, one.group, one.at, one.file) for one in values]
    data = msgpack.packb({"values": rows})
    assert data is not None
    return data


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PackedValues:
    values: tuple[tuple[str, str, int, str, int | None, bool], ...]


@functools.lru_cache(maxsize=16)
def unpacked_values(data: bytes) -> tuple[BlockedValue, ...]:
    """Decodes values of a dense item, mostly those of the last call; raises InvalidRecord."""
    # By bytes alone: records with equal values share one tuple, which is checked once.
    return tuple(
        BlockedValue(key=key, dtype=dtype, count=count, group=group, at=at, file=file)
        for key, dtype, count, group, at, file in records.unpacked(data, _PackedValues).values
    )


#: Magic and version; part; number and CRC32C of the epoch; sequence number; chunk, and their count.
_HEAD = struct.Struct("<4sIIIQII")
_CRC = struct.Struct("<I")
_CHUNK_MAGIC = b"DWM\x01"
#: Bytes of a message before its chunk.
HEAD_BYTES = _HEAD.size + _CRC.size
#: Segment names hold five digits.
_MOST_PARTS = 100_000


class RecordChunk(NamedTuple):
    """Chunk ``index`` of ``count`` of record ``seq``; ``epoch_crc32c`` is that of the header."""

    part: int
    epoch: int
    epoch_crc32c: int
    seq: int
    index: int
    count: int
    data: memoryview

    def to_bytes(self) -> bytes:
        """Returns the message."""
        head = _HEAD.pack(_CHUNK_MAGIC, *self[:-1])
        return b"".join((head, _CRC.pack(_crc32c(head, self.data)), self.data))


def chunk_from(message: bytes) -> RecordChunk | None:
    """Returns the chunk in a message; None if it is altered, or not a message of a WAL."""
    if len(message) <= HEAD_BYTES:
        return None
    magic, part, epoch, epoch_crc32c, seq, index, count = _HEAD.unpack_from(message)
    (crc,) = _CRC.unpack_from(message, _HEAD.size)
    data = memoryview(message)[HEAD_BYTES:]
    found = RecordChunk(part, epoch, epoch_crc32c, seq, index, count, data)
    if magic != _CHUNK_MAGIC or crc != _crc32c(message[: _HEAD.size], found.data):
        return None
    is_sound = found.index < found.count and found.part < _MOST_PARTS and 0 < found.seq < 1 << 63
    return found if is_sound else None


def record_chunks(
    record: memoryview, *, part: int, epoch: int, epoch_crc32c: int, seq: int, message_bytes: int
) -> Iterator[RecordChunk]:
    """Yields the chunks of a record's layer, in order; a message has up to ``message_bytes``."""
    nbytes = message_bytes - HEAD_BYTES
    starts = range(0, len(record), nbytes)
    for index, start in enumerate(starts):
        data = record[start : start + nbytes]
        yield RecordChunk(part, epoch, epoch_crc32c, seq, index, len(starts), data)


def _crc32c(head: bytes, data: memoryview) -> int:
    view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False
    return google_crc32c.extend(google_crc32c.value(head), view)  # pyright: ignore[reportArgumentType]
