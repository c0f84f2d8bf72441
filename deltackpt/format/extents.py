# SPDX-License-Identifier: Apache-2.0
"""The file format of extents, except for their contents: ``docs/reference/format.md``.

The header of an extent has its own checksum; its field ``crc32c`` covers the stream up to the end
of the piece, so the last piece has that of the whole stream.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

import google_crc32c

from deltackpt.errors import Damaged, FormatTooNew

#: Of blocks; also the alignment of all that is read and written.
BLOCK_BYTES = 4096
VERSION = 1
_HEAD_MAGIC, _HEAD = b"dckpexts", struct.Struct("<8sIQQ")
_HEADER_MAGIC, _HEADER = b"dckpextn", struct.Struct("<8sIQIIQIH")
_CRC = struct.Struct("<I")
_KEY = re.compile(r"[a-z0-9.-]{1,200}")
#: Counting by one never gets there; a greater one could not be counted on from.
_MOST_SEQUENCE = 1 << 63


class ExtentDivision(NamedTuple):
    """How a file is divided; extents, with their headers, are multiples of ``BLOCK_BYTES``."""

    extent_bytes: int
    count: int

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return BLOCK_BYTES + self.count * self.extent_bytes

    @property
    def payload_bytes(self) -> int:
        """Maximum payload of an extent in bytes."""
        return self.extent_bytes - BLOCK_BYTES

    def start(self, extent: int) -> int:
        """Returns the offset of an extent."""
        return BLOCK_BYTES + extent * self.extent_bytes

    def extents(self, nbytes: int) -> int:
        """Returns the number of extents that a stream of ``nbytes`` needs; at least 1."""
        return max(1, -(-nbytes // self.payload_bytes))


class ExtentHeader(NamedTuple):
    """The header of an extent: piece ``number`` of ``pieces`` of a stream.

    ``sequence`` is greater than that of all earlier streams. ``pieces`` is 0 if the extent was
    freed; then ``sequence`` is the newest. ``crc32c`` covers the stream up to the end of the piece.
    """

    sequence: int
    number: int
    pieces: int
    nbytes: int
    crc32c: int
    key: str


def division_block(division: ExtentDivision) -> bytes:
    """Returns the first block of a file."""
    return _block(_HEAD.pack(_HEAD_MAGIC, VERSION, *division))


def read_division(block: bytes, name: str) -> ExtentDivision:
    """Parses the first block of a file; raises Damaged or FormatTooNew."""
    body = _checked(block)
    action = "move the file away; its contents are lost"
    if body is None or not body.startswith(_HEAD_MAGIC):
        raise Damaged(name, "a file of extents", f"one that begins with {block[:8]!r}", action)
    _, version, extent_bytes, count = _HEAD.unpack_from(body)
    if version > VERSION:
        raise FormatTooNew(
            f"{name}: expected extents of version {VERSION} or below, found {version}; use the "
            "deltackpt that wrote them, or a later one"
        )
    found = ExtentDivision(extent_bytes, count)
    if found.extent_bytes % BLOCK_BYTES or found.extent_bytes < 2 * BLOCK_BYTES or not found.count:
        raise Damaged(name, "extents of whole blocks", f"{found}", action)
    return found


def header_block(header: ExtentHeader) -> bytes:
    """Returns the first block of an extent; raises ValueError if the key is invalid."""
    if header.pieces and not _KEY.fullmatch(header.key):
        raise ValueError(
            f"{header.key!r}: expected a key of 1 to 200 lower-case letters, digits, dots and "
            "hyphens"
        )
    *numbers, key = header
    encoded = key.encode("ascii")
    return _block(_HEADER.pack(_HEADER_MAGIC, VERSION, *numbers, len(encoded)) + encoded)


def read_header(block: bytes) -> ExtentHeader | None:
    """Parses the first block of an extent; None if it is altered, or was never written."""
    body = _checked(block)
    if body is None or not body.startswith(_HEADER_MAGIC):
        return None
    _, _, *numbers, length = _HEADER.unpack_from(body)
    key = body[_HEADER.size : _HEADER.size + length].decode("latin-1")
    header = ExtentHeader._make((*numbers, key))
    is_sound = header.sequence <= _MOST_SEQUENCE and (not header.pieces or _KEY.fullmatch(key))
    return header if is_sound else None


def _block(body: bytes) -> bytes:
    padded = body.ljust(BLOCK_BYTES - _CRC.size, b"\0")
    return padded + _CRC.pack(google_crc32c.value(padded))


def _checked(block: bytes) -> bytes | None:
    body, (crc,) = block[: -_CRC.size], _CRC.unpack(block[-_CRC.size :])
    return body if google_crc32c.value(body) == crc else None
