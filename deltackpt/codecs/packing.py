# SPDX-License-Identifier: Apache-2.0
"""Packs codes of 2, 3, 4 and 8 bits into bytes.

With b bits, a byte has 8 / b positions, and a row of ``width`` codes takes ``plane = ceil(width * b
/ 8)`` bytes: byte j has code j in its lowest bits, code ``plane + j`` in the next, and so on, so
that packing and unpacking move whole runs of columns. For 3-bit codes, the lower two bits of each
code are stored first, then the third bits. Missing codes at the end are 0.
"""

from __future__ import annotations

import numpy as np

#: Bits of a code to the (bits, shift within the code) of its parts, in the order of their bytes.
PARTS = {2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),), 8: ((8, 0),)}
_LOWER = np.uint64(0x0F0F0F0F0F0F0F0F)


def packed_bytes(width: int, bits: int) -> int:
    """Returns the bytes of ``width`` codes of ``bits`` bits.

    Examples:
      >>> packed_bytes(64, 3), packed_bytes(10, 3), packed_bytes(5, 4)
      (24, 5, 3)
    """
    return sum(plane_bytes(width, part) for part, _ in PARTS[bits])


def plane_bytes(width: int, bits: int) -> int:
    """Returns the columns of one plane: the codes at the same position of their bytes."""
    return -(-width * bits // 8)


def unpack(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Unpacks rows (n, packed_bytes) uint8 to codes (n, width) uint8.

    Examples:
      >>> unpack(np.array([[0x21, 0x43]], np.uint8), 4, 3).tolist()
      [[1, 3, 2]]
    """
    if bits == 8:
        return packed
    codes = np.empty((len(packed), width), np.uint8)
    if bits == 4 and width % 16 == 0 and packed.flags.c_contiguous:
        _unpack_words(packed.view(np.uint64), codes.view(np.uint64))
        return codes
    start = 0
    for part, shift in PARTS[bits]:
        plane = plane_bytes(width, part)
        held = packed[:, start : start + plane]
        start += plane
        for place in range(8 // part):
            out = codes[:, place * plane : (place + 1) * plane]
            code = held[:, : out.shape[1]] >> (place * part)
            code &= (1 << part) - 1
            if shift:
                out |= code << shift
            else:
                out[...] = code
    return codes


def _unpack_words(packed: np.ndarray, codes: np.ndarray) -> None:
    """Codes of 4 bits, 8 bytes at a time: thrice as fast."""
    half = packed.shape[1]
    np.bitwise_and(packed, _LOWER, out=codes[:, :half])
    np.right_shift(packed, 4, out=codes[:, half:])
    codes[:, half:] &= _LOWER


def pack(codes: np.ndarray) -> np.ndarray:
    """Packs 4-bit codes, (n, width) uint8, the inverse of ``unpack``; width is a multiple of 16.

    Examples:
      >>> codes = np.arange(16, dtype=np.uint8)[None]
      >>> bytes(pack(codes)[0, :3]).hex(), (unpack(pack(codes), 4, 16) == codes).all().item()
      ('8091a2', True)
    """
    words = np.ascontiguousarray(codes).view(np.uint64)
    half = words.shape[1] // 2
    # No code leaves its byte.
    packed = words[:, half:] << 4
    packed |= words[:, :half]
    return packed.view(np.uint8)
