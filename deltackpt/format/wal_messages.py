# SPDX-License-Identifier: Apache-2.0
"""Messages of a WAL in Kafka: the chunks of a record, which is the same layer as in a segment file.

Partition p of the topic has the records of process p. Each message has the sequence number of its
record and the index of its chunk, so readers drop repeated messages and detect missing ones
whatever the broker delivers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import google_crc32c
import numpy as np

#: Magic and version; part; number and CRC32C of the epoch; sequence number; chunk, and their count.
_HEAD = struct.Struct("<4sIIIQII")
_CRC = struct.Struct("<I")
_MAGIC = b"DWM\x01"
#: Bytes of a message before its chunk.
HEAD_BYTES = _HEAD.size + _CRC.size
#: Segment names hold five digits.
_MOST_PARTS = 100_000


class RecordChunk(NamedTuple):
    """A chunk of a record.

    Attributes:
      part: part of the WAL of the process; a new one begins after each failure.
      epoch: number of the WAL epoch.
      epoch_crc32c: CRC32C of its header.
      seq: sequence number of the record.
      index: index of the chunk in the record.
      count: number of chunks of the record.
      data: its bytes.
    """

    part: int
    epoch: int
    epoch_crc32c: int
    seq: int
    index: int
    count: int
    data: memoryview

    def to_bytes(self) -> bytes:
        """Returns the message."""
        head = _HEAD.pack(_MAGIC, *self[:-1])
        return b"".join((head, _CRC.pack(_crc32c(head, self.data)), self.data))


def from_bytes(message: bytes) -> RecordChunk | None:
    """Returns the chunk in a message; None if it is altered, or not a message of a WAL."""
    if len(message) <= HEAD_BYTES:
        return None
    magic, part, epoch, epoch_crc32c, seq, index, count = _HEAD.unpack_from(message)
    (crc,) = _CRC.unpack_from(message, _HEAD.size)
    data = memoryview(message)[HEAD_BYTES:]
    found = RecordChunk(part, epoch, epoch_crc32c, seq, index, count, data)
    if magic != _MAGIC or crc != _crc32c(message[: _HEAD.size], found.data):
        return None
    is_sound = found.index < found.count and found.part < _MOST_PARTS and 0 < found.seq < 1 << 63
    return found if is_sound else None


def chunks(
    record: memoryview, *, part: int, epoch: int, epoch_crc32c: int, seq: int, message_bytes: int
) -> Iterator[RecordChunk]:
    """Yields the chunks of a record, in order.

    Args:
      record: the bytes of its layer.
      part: part of the record.
      epoch: number of the WAL epoch.
      epoch_crc32c: CRC32C of its header.
      seq: sequence number of the record.
      message_bytes: maximum length of a message.
    """
    nbytes = message_bytes - HEAD_BYTES
    starts = range(0, len(record), nbytes)
    for index, start in enumerate(starts):
        data = record[start : start + nbytes]
        yield RecordChunk(part, epoch, epoch_crc32c, seq, index, len(starts), data)


def _crc32c(head: bytes, data: memoryview) -> int:
    view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False
    return google_crc32c.extend(google_crc32c.value(head), view)  # pyright: ignore[reportArgumentType]
