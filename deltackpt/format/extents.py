# SPDX-License-Identifier: Apache-2.0
"""The bytes of a file of extents, but for what is held in them: ``docs/format.md``.

A block says how the file is divided, and is written once. Each extent begins with a block that says
which piece of which stream follows it; its checksum covers it, and its field ``crc32c`` the stream
up to the end of the piece, so that the last one of a stream has that of all of it.
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


class Division(NamedTuple):
    """How a file is divided.

    Attributes:
      extent_bytes: of each extent, its header included; a multiple of ``BLOCK_BYTES``.
      count: how many extents there are.
    """

    extent_bytes: int
    count: int

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return BLOCK_BYTES + self.count * self.extent_bytes

    @property
    def payload_bytes(self) -> int:
        """What an extent holds at most."""
        return self.extent_bytes - BLOCK_BYTES

    def start(self, extent: int) -> int:
        """Where an extent begins."""
        return BLOCK_BYTES + extent * self.extent_bytes

    def extents(self, nbytes: int) -> int:
        """How many extents a stream takes.

        Example:
          >>> division = Division(8192, 6)
          >>> [division.extents(nbytes) for nbytes in (0, 4096, 4097)]
          [1, 1, 2]
        """
        return max(1, -(-nbytes // self.payload_bytes))


class Header(NamedTuple):
    """What an extent holds.

    Attributes:
      sequence: of the stream: greater than those of all before it; the newest where there is none.
      number: which piece it is, from 0.
      pieces: how many there are; 0 where the extent was let go, and holds nothing.
      nbytes: of the piece.
      crc32c: of the stream, from its beginning to the end of the piece.
      key: of the stream.
    """

    sequence: int
    number: int
    pieces: int
    nbytes: int
    crc32c: int
    key: str


def division_block(division: Division) -> bytes:
    """The first block of a file."""
    return _block(_HEAD.pack(_HEAD_MAGIC, VERSION, *division))


def read_division(block: bytes, name: str) -> Division:
    """What the first block of a file says.

    Args:
      block: it.
      name: how errors name the file.

    Raises:
      Damaged: it is altered, or that of another kind of file.
      FormatTooNew: a later version of deltackpt wrote it.
    """
    body = _checked(block)
    action = "move the file away; what it holds is lost with it"
    if body is None or not body.startswith(_HEAD_MAGIC):
        raise Damaged(name, "a file of extents", f"one that begins with {block[:8]!r}", action)
    _, version, extent_bytes, count = _HEAD.unpack_from(body)
    if version > VERSION:
        raise FormatTooNew(
            f"{name}: expected extents of version {VERSION} or below, found {version}; use the "
            "deltackpt that wrote them, or a later one"
        )
    found = Division(extent_bytes, count)
    if found.extent_bytes % BLOCK_BYTES or found.extent_bytes < 2 * BLOCK_BYTES or not found.count:
        raise Damaged(name, "extents of whole blocks", f"{found}", action)
    return found


def header_block(header: Header) -> bytes:
    """The first block of an extent.

    Raises:
      ValueError: the key is none that can be held.
    """
    if header.pieces and not _KEY.fullmatch(header.key):
        raise ValueError(
            f"{header.key!r}: expected a key of 1 to 200 small letters, digits, points and hyphens"
        )
    *numbers, key = header
    encoded = key.encode("ascii")
    return _block(_HEADER.pack(_HEADER_MAGIC, VERSION, *numbers, len(encoded)) + encoded)


def read_header(block: bytes) -> Header | None:
    """What the first block of an extent says; None where it is altered, or was never written."""
    body = _checked(block)
    if body is None or not body.startswith(_HEADER_MAGIC):
        return None
    _, _, *numbers, length = _HEADER.unpack_from(body)
    key = body[_HEADER.size : _HEADER.size + length].decode("latin-1")
    header = Header._make((*numbers, key))
    return header if not header.pieces or _KEY.fullmatch(key) else None


def _block(body: bytes) -> bytes:
    padded = body.ljust(BLOCK_BYTES - _CRC.size, b"\0")
    return padded + _CRC.pack(google_crc32c.value(padded))


def _checked(block: bytes) -> bytes | None:
    body, (crc,) = block[: -_CRC.size], _CRC.unpack(block[-_CRC.size :])
    return body if google_crc32c.value(body) == crc else None
