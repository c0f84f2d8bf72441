# SPDX-License-Identifier: Apache-2.0
"""Checksums of memory, and of the chunks that hold it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import google_crc32c
import numpy as np

#: Reading some rows of a chunk verifies the blocks that it touches: 32 bytes of digests per MiB.
BLOCK_BYTES = 128 << 10
#: The checksum that follows a chunk's bytes.
CRC_BYTES = 4
_PIECE_BYTES = 4 << 20
#: Bit-reversed, like the checksums.
_POLYNOMIAL = 0x82F63B78
_BITS = 32


class ChunkSums(NamedTuple):
    """Checksums of a chunk.

    Attributes:
      crc32c: CRC32C of all its bytes, stored after them.
      blocks: CRC32C of each ``BLOCK_BYTES`` of it, uint32 little-endian; empty if unknown.
    """

    crc32c: int
    blocks: bytes = b""


class BlockSums:
    """The CRC32Cs of a run of bytes and of each block of it, as the bytes arrive."""

    def __init__(self, block_bytes: int) -> None:
        """Starts empty."""
        self._block_bytes, self._blocks = block_bytes, list[int]()
        #: Number of bytes.
        self.nbytes = 0

    def add(self, data: np.ndarray) -> None:
        """Adds the next bytes; uint8, (n,)."""
        while len(data):
            used = self.nbytes % self._block_bytes
            piece = data[: self._block_bytes - used]
            begun = self._blocks.pop() if used else 0
            self._blocks.append(crc32c(piece, begun))
            self.nbytes += len(piece)
            data = data[len(piece) :]

    @property
    def crc32c(self) -> int:
        """Returns the CRC32C of all bytes."""
        found, left = 0, self.nbytes
        for block in self._blocks:
            found = joined(found, block, min(left, self._block_bytes))
            left -= self._block_bytes
        return found

    @property
    def blocks(self) -> bytes:
        """Returns the CRC32Cs of the blocks, as in ``ChunkSums``."""
        return np.array(self._blocks, "<u4").tobytes()


def crc32c(data: np.ndarray, crc: int = 0) -> int:
    """Returns the CRC32C of an array's bytes, continuing ``crc``, without a copy (31 GB/s).

    It holds the GIL, so long arrays are processed in pieces.
    """
    view = data.reshape(-1).view(np.uint8)
    view.flags.writeable = False
    for start in range(0, len(view), _PIECE_BYTES):
        piece = view[start : start + _PIECE_BYTES]
        crc = google_crc32c.extend(crc, piece)  # pyright: ignore[reportArgumentType]
    return crc


def joined(first: int, second: int, nbytes: int) -> int:
    """Returns the CRC32C of two consecutive runs of bytes from their CRC32Cs, without reading them.

    The first CRC is advanced over as many zero bytes as the second run has, which is a linear map
    over GF(2) (M. Adler's ``crc32_combine``). Measured: 15 us, and 0.3 us for a block.

    Args:
      first: CRC32C of the first run.
      second: CRC32C of the second run.
      nbytes: length of the second run.
    """
    if nbytes == BLOCK_BYTES:
        low, lower, upper, high = _over_a_block()
        shifted = low[first & 255] ^ lower[first >> 8 & 255]
        return shifted ^ upper[first >> 16 & 255] ^ high[first >> 24] ^ second
    return _carried(first, nbytes) ^ second


def _carried(crc: int, nbytes: int) -> int:
    """Advances a CRC over a number of zero bytes."""
    for power, is_set in enumerate(reversed(f"{nbytes:b}")):
        if is_set == "1":
            crc = _applied(_over_zeros(power), crc)
    return crc


@functools.cache
def _over_a_block() -> tuple[list[int], ...]:
    """Tables that advance a CRC over a block, for each value of each of its bytes."""
    return tuple(
        [_carried(value << 8 * byte, BLOCK_BYTES) for value in range(256)] for byte in range(4)
    )


@functools.cache
def _over_zeros(power: int) -> tuple[int, ...]:
    """How each bit of a CRC advances over ``2 ** power`` zero bytes."""
    if power == 0:
        one_bit = (_POLYNOMIAL, *(1 << bit for bit in range(_BITS - 1)))
        two_bits = _twice(one_bit)
        return _twice(_twice(two_bits))
    return _twice(_over_zeros(power - 1))


def _twice(columns: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_applied(columns, column) for column in columns)


def _applied(columns: tuple[int, ...], vector: int) -> int:
    found = 0
    for column in columns:
        if not vector:
            break
        if vector & 1:
            found ^= column
        vector >>= 1
    return found
