# SPDX-License-Identifier: Apache-2.0
"""Codes of second moments: a grid of base-2 logarithms, with a separate symbol for zero.

Second moments span many powers of two within one block. A linear code would turn the small ones
into zero, and an optimizer that divides by their square roots would then diverge.

The grid has 128 points per octave, half a percent from one to the next. They are represented by a
table of constants, so that decoding needs no ``exp2``, whose last bit differs between machines: the
float32 nearest to ``2**(m / 128)`` for m from 0 to 127, and these times powers of two. ``log8``
looks its values up. ``log4`` multiplies the reference by one of them: one product of normal float32
numbers, rounded once, the same on every machine.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from deltackpt.codecs import packing
from deltackpt.codecs.block_codec import FLOATS
from deltackpt.codecs.codec import StoredArray
from deltackpt.format.dense_blocks import BLOCK
from deltackpt.format.dtypes import dtype_of

#: Places of the grid to an octave.
FINE = 128
#: The powers of two that the grid begins with, and ends before: all positive float32 numbers.
LOWEST_POWER, END_POWER = -149, 128
#: Places of the grid.
PLACES = (END_POWER - LOWEST_POWER) * FINE
#: Codes of ``log4`` that multiply go from -7 to 7, moved up by 8; 0 is the symbol of zero.
MIDDLE, FURTHEST = 8, 7
#: The widest step of ``log4`` in places: what it decodes to is within an eighth of an octave.
WIDEST_STEP = 32
#: Dtype to the least and the largest positive number that ``log4`` holds, before and after: their
#: products are normal numbers of the dtype.
WITHIN = {
    "float32": (2.0**-120, 2.0**120),
    "bfloat16": (2.0**-120, 2.0**120),
    "float16": (2.0**-12, 2.0**14),
}
#: Blocks that are decoded at once stay in the cache.
_PIECE_BLOCKS = 256
_SIGNIFICAND_BITS = 23


@functools.cache
def octave() -> tuple[int, ...]:
    """Returns the 24-bit integers nearest to ``2**(23 + m / 128)``, by exact arithmetic.

    Examples:
      >>> octave()[0] == 2**23, octave()[64] == round(2**23 * 2**0.5)
      (True, True)
    """
    precision = 128
    # 2**(1/2), 2**(1/4), ..., 2**(1/128) as integers of so many bits behind the point.
    roots = [2 << precision]
    while len(roots) <= FINE.bit_length() - 1:
        roots.append(math.isqrt(roots[-1] << precision))
    found = []
    for place in range(FINE):
        power = 1 << precision
        for number, root in enumerate(reversed(roots[1:])):
            if place >> number & 1:
                power = power * root >> precision
        shift = precision - _SIGNIFICAND_BITS
        found.append((power + (1 << (shift - 1))) >> shift)
    return tuple(found)


@functools.cache
def powers(dtype: str) -> np.ndarray:
    """Returns the decoded value of each grid point, (PLACES,) of a float dtype, ascending.

    The value is the nearest power of two in float32, rounded to the dtype; never zero or infinite.
    """
    significands = np.array(octave(), np.float64) * 2.0**-_SIGNIFICAND_BITS
    scales = np.ldexp(1.0, np.arange(LOWEST_POWER, END_POWER))
    # Bit patterns: a processor that flushes subnormal numbers does not come in between.
    exact = (scales[:, None] * significands).reshape(-1)
    units = np.rint(exact * 2.0**149)
    normal = exact.astype(np.float32).view(np.uint32)
    found = np.where(exact < 2.0**-126, np.minimum(units, 2.0**23), 0).astype(np.uint32)
    found = np.where(exact < 2.0**-126, found, normal).view(np.float32)
    if dtype == "float16":
        found = np.clip(found, 2.0**-24, 65504).astype(np.float16)
    elif dtype == "bfloat16":
        patterns = found.view(np.uint32)
        patterns = (patterns + 0x7FFF + ((patterns >> 16) & 1)) >> 16
        found = np.clip(patterns, 1, 0x7F7F).astype(np.uint16).view(dtype_of(dtype))
    found.flags.writeable = False
    return found


@functools.cache
def factors() -> np.ndarray:
    """Returns the multipliers of the codes of ``log4``, float32 (steps, 16); 0 for zero."""
    steps = np.arange(WIDEST_STEP + 1)[:, None]
    changes = np.arange(-MIDDLE, FURTHEST + 1) * steps
    found = powers("float32")[changes - LOWEST_POWER * FINE]
    found[:, 0] = 0
    found.flags.writeable = False
    return found


@functools.cache
def _places(dtype: str) -> np.ndarray:
    """Returns ``powers`` for all points that 16 bits can name; past the end, the last one."""
    found = np.full(1 << 16, powers(dtype)[-1])
    found[:PLACES] = powers(dtype)
    return found


@functools.cache
def _factors_of_bytes() -> tuple[np.ndarray, np.ndarray]:
    """Returns ``factors`` of the lower and the upper code of a byte, each flat (steps * 256,)."""
    code = np.arange(256)
    return factors()[:, code & 15].reshape(-1), factors()[:, code >> 4].reshape(-1)


@dataclasses.dataclass(frozen=True)
class Logarithms:
    """8-bit codes; each block stores its lowest point and its step.

    Code 0 is zero; code k is the point ``low + (k - 1) * step``. Blocks may contain any positive
    numbers and zeros. If a block spans 20 octaves, the relative error is at most 3 %.
    """

    name: str = "log8"
    lossless: bool = False
    relative: bool = False

    def takes(self, dtype: str) -> bool:
        """See ``BlockCodec``."""
        return dtype in FLOATS

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``BlockCodec``."""
        return {
            "": StoredArray((BLOCK,), np.dtype(np.uint8), zstd=True),
            "low": StoredArray((), np.dtype(np.uint16), zstd=True),
            "step": StoredArray((), np.dtype(np.uint8), zstd=True),
        }

    def decode(
        self, arrays: Mapping[str, np.ndarray], reference: np.ndarray | None, out: np.ndarray
    ) -> None:
        """See ``BlockCodec``: 16-bit points; those past the end are clamped to the last one."""
        table = _places(out.dtype.name)
        steps = arrays["step"].astype(np.uint16)[:, None]
        firsts = arrays["low"][:, None] - steps
        for start in range(0, len(out), _PIECE_BLOCKS):
            part = slice(start, start + _PIECE_BLOCKS)
            codes, found = arrays[""][part], out[part]
            places = codes.astype(np.uint16)
            places *= steps[part]
            places += firsts[part]
            # All indices are in the table; mode="wrap" is the fastest way to skip the check.
            np.take(table, places, out=found, mode="wrap")
            if not codes.all():
                found[codes == 0] = 0


@dataclasses.dataclass(frozen=True)
class LogarithmDifference:
    """4-bit codes: the number of grid steps by which a value moved; each block stores its step.

    Errors do not add up, because the reference is the decoded parent. A block can be represented
    if no value moved by more than 7/4 octaves, and no zero has become nonzero.
    """

    name: str = "log4"
    lossless: bool = False
    relative: bool = True

    def takes(self, dtype: str) -> bool:
        """See ``BlockCodec``."""
        return dtype in FLOATS

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``BlockCodec``."""
        packed = packing.packed_bytes(BLOCK, 4)
        return {
            "": StoredArray((packed,), np.dtype(np.uint8), zstd=True),
            "step": StoredArray((), np.dtype(np.uint8), zstd=True),
        }

    def decode(
        self, arrays: Mapping[str, np.ndarray], reference: np.ndarray | None, out: np.ndarray
    ) -> None:
        """See ``BlockCodec``: in float32, one product, rounded to the dtype."""
        assert reference is not None
        steps = arrays["step"]
        if len(steps) and steps.max() > WIDEST_STEP:
            raise ValueError(f"expected steps up to {WIDEST_STEP}, found {steps.max()}")
        half = BLOCK // 2
        firsts = steps.astype(np.uint16)[:, None] << 8
        factor = np.empty((min(len(out), _PIECE_BLOCKS), half), np.float32)
        for start in range(0, len(out), _PIECE_BLOCKS):
            part = slice(start, start + _PIECE_BLOCKS)
            places = (firsts[part] | arrays[""][part]).astype(np.intp)
            found = factor[: len(places)]
            for first, table in zip((0, half), _factors_of_bytes(), strict=True):
                columns = slice(first, first + half)
                np.take(table, places, out=found, mode="wrap")
                before = reference[part, columns].astype(np.float32, copy=False)
                if out.dtype == np.float32:
                    np.multiply(before, found, out=out[part, columns])
                else:
                    np.multiply(before, found, out=found)
                    np.copyto(out[part, columns], found, casting="unsafe")


LOGARITHMS = (Logarithms(), LogarithmDifference())
