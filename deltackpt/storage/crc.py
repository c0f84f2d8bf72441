# SPDX-License-Identifier: Apache-2.0
"""Checksums of memory, and of the chunks that hold it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import google_crc32c
import numpy as np

#: A read of some rows of a chunk verifies the blocks that it touches: 32 bytes of digests per MiB.
BLOCK_BYTES = 128 << 10
#: Of a checksum behind the bytes that it is of.
CRC_BYTES = 4
_PIECE_BYTES = 4 << 20


class ChunkSums(NamedTuple):
    """Checksums of a chunk.

    Attributes:
      crc32c: of all its bytes; they stand behind them.
      blocks: those of each ``BLOCK_BYTES`` of it, uint32 little endian; empty where not known.
    """

    crc32c: int
    blocks: bytes = b""


def crc32c(data: np.ndarray, crc: int = 0) -> int:
    """CRC32C of a contiguous array's bytes after ``crc``, without a copy (measured 31 GB/s).

    The interpreter's lock is held meanwhile, so long arrays are taken in pieces.
    """
    view = data.reshape(-1).view(np.uint8)
    view.flags.writeable = False
    for start in range(0, len(view), _PIECE_BYTES):
        piece = view[start : start + _PIECE_BYTES]
        crc = google_crc32c.extend(crc, piece)  # pyright: ignore[reportArgumentType]
    return crc


def joined(first: int, second: int, nbytes: int) -> int:
    """CRC32C of two runs of bytes one after the other, from those of each.

    A pass over memory fewer where both are wanted: measured 0.3 us, and 4 us for a block's bytes.

    Args:
      first: of the bytes before.
      second: of the bytes behind.
      nbytes: how many those behind are; a length that comes often, as its tables are kept.
    """
    low, lower, upper, high = _shifts(nbytes)
    return (
        low[first & 255]
        ^ lower[first >> 8 & 255]
        ^ upper[first >> 16 & 255]
        ^ high[first >> 24]
        ^ second
    )


@functools.lru_cache(maxsize=4)
def _shifts(nbytes: int) -> tuple[list[int], ...]:
    """What a checksum becomes by so many bytes of zeros, for each value of each of its bytes.

    That is linear in its bits, but for a constant.
    """
    zeros = np.zeros(nbytes, np.uint8)
    constant = crc32c(zeros)
    bits = [crc32c(zeros, 1 << bit) ^ constant for bit in range(32)]
    tables = []
    for byte in range(4):
        table = [0]
        for bit in bits[8 * byte : 8 * byte + 8]:
            table += [value ^ bit for value in table]
        tables.append(table)
    return tuple(tables)
