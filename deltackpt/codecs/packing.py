# SPDX-License-Identifier: Apache-2.0
"""Codes of 2, 3, 4 and 8 bits in bytes.

With b bits a byte has 8 / b places, and a row of ``width`` codes takes ``plane = ceil(width * b /
8)`` bytes: byte j holds code j in its lowest bits, code ``plane + j`` in the next, and so on, so
that packing and unpacking move whole runs of columns. Three bits are stored as the lower two of
each code, then the third. Missing codes at the end are 0.
"""

from __future__ import annotations

import numpy as np

#: Bits of a code to the (bits, shift within the code) of its parts, in the order of their bytes.
PARTS = {2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),), 8: ((8, 0),)}


def packed_bytes(width: int, bits: int) -> int:
    """Bytes of ``width`` codes of ``bits`` bits.

    Example:
      >>> packed_bytes(64, 3), packed_bytes(10, 3), packed_bytes(5, 4)
      (24, 5, 3)
    """
    return sum(plane_bytes(width, part) for part, _ in PARTS[bits])


def plane_bytes(width: int, bits: int) -> int:
    """Columns of one plane: the codes that stand in the same place of their bytes."""
    return -(-width * bits // 8)


def unpack(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Codes (n, width) uint8 of packed rows (n, packed_bytes) uint8.

    Example:
      >>> unpack(np.array([[0x21, 0x43]], np.uint8), 4, 3).tolist()
      [[1, 3, 2]]
    """
    if bits == 8:
        return packed
    codes = np.empty((len(packed), width), np.uint8)
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


def pack_halves(codes: np.ndarray) -> np.ndarray:
    """Packs codes of 4 bits, (n, width) uint8 of an even width, into (n, width / 2).

    Example:
      >>> pack_halves(np.array([[1, 3, 2, 4]], np.uint8)).tolist()
      [[33, 67]]
    """
    half = codes.shape[1] // 2
    packed = codes[:, half:] << 4
    packed |= codes[:, :half]
    return packed
