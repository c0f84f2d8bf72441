# SPDX-License-Identifier: Apache-2.0
"""Codes of second moments: on a grid of logarithms to base 2, zero a symbol of its own.

A second moment spans many powers of two within one block. A linear code makes the small ones zero,
and an optimizer that divides by their roots then leaves the model in ruins.

The grid has 128 places to an octave, half a per cent from one to the next. What stands for them is
one table of constants, so that decoding needs no ``exp2``, whose last bit differs from machine to
machine: the float32 next to ``2**(m / 128)`` for m from 0 to 127, and these times powers of two.
``log8`` looks its numbers up. ``log4`` multiplies the reference by one of them: one product of
normal float32 numbers, rounded once, which no machine computes in another way.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from deltackpt.codecs import packing
from deltackpt.codecs.block_codec import FLOATS, BlockArray
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
    """The 24-bit integers next to ``2**(23 + m / 128)``, by exact arithmetic.

    Example:
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
    """What each place of the grid decodes to, (PLACES,) of a float dtype, ascending.

    The power of two nearest to it in float32, rounded to the dtype; never zero and never infinite.
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
    """What codes of ``log4`` multiply by, float32 (steps, 16): 0 for the symbol of zero."""
    steps = np.arange(WIDEST_STEP + 1)[:, None]
    changes = np.arange(-MIDDLE, FURTHEST + 1) * steps
    found = powers("float32")[changes - LOWEST_POWER * FINE]
    found[:, 0] = 0
    found.flags.writeable = False
    return found


@functools.cache
def _places(dtype: str) -> np.ndarray:
    """``powers`` for all places that 16 bits can name: behind the last one, the last one."""
    found = np.full(1 << 16, powers(dtype)[-1])
    found[:PLACES] = powers(dtype)
    return found


@functools.cache
def _factors_of_bytes() -> tuple[np.ndarray, np.ndarray]:
    """``factors`` of the lower and the upper code of a byte, each (steps, 256) laid end to end."""
    code = np.arange(256)
    return factors()[:, code & 15].reshape(-1), factors()[:, code >> 4].reshape(-1)


@dataclasses.dataclass(frozen=True)
class Logarithms:
    """Codes of 8 bits; each block has its lowest place and its step.

    Code 0 is zero, code k the place ``low + (k - 1) * step``. A block of any positive numbers and
    zeros is held. Where it spans 20 octaves, its numbers come within 3 %.
    """

    name: str = "log8"
    lossless: bool = False
    relative: bool = False

    def takes(self, dtype: str) -> bool:
        """See ``BlockCodec``."""
        return dtype in FLOATS

    def stored(self, dtype: np.dtype) -> Mapping[str, BlockArray]:
        """See ``BlockCodec``."""
        return {
            "": BlockArray((BLOCK,), np.dtype(np.uint8), zstd=True),
            "low": BlockArray((), np.dtype(np.uint16), zstd=True),
            "step": BlockArray((), np.dtype(np.uint8), zstd=True),
        }

    def decode(
        self, arrays: Mapping[str, np.ndarray], reference: np.ndarray | None, out: np.ndarray
    ) -> None:
        """See ``BlockCodec``: places in 16 bits; those behind the last one are the last one."""
        table = _places(out.dtype.name)
        steps = arrays["step"].astype(np.uint16)[:, None]
        firsts = arrays["low"][:, None] - steps
        for start in range(0, len(out), _PIECE_BLOCKS):
            part = slice(start, start + _PIECE_BLOCKS)
            codes, found = arrays[""][part], out[part]
            places = codes.astype(np.uint16)
            places *= steps[part]
            places += firsts[part]
            # All places are in the table, and of the ways to say so this one is the fastest.
            np.take(table, places, out=found, mode="wrap")
            if not codes.all():
                found[codes == 0] = 0


@dataclasses.dataclass(frozen=True)
class LogarithmDifference:
    """Codes of 4 bits: by how many steps of the grid a number moved; each block has its step.

    Errors do not add up: the reference is what the parent decodes to. A block is held where no
    number moved by more than 7/4 octaves, and none that was zero is so no longer.
    """

    name: str = "log4"
    lossless: bool = False
    relative: bool = True

    def takes(self, dtype: str) -> bool:
        """See ``BlockCodec``."""
        return dtype in FLOATS

    def stored(self, dtype: np.dtype) -> Mapping[str, BlockArray]:
        """See ``BlockCodec``."""
        packed = packing.packed_bytes(BLOCK, 4)
        return {
            "": BlockArray((packed,), np.dtype(np.uint8), zstd=True),
            "step": BlockArray((), np.dtype(np.uint8), zstd=True),
        }

    def decode(
        self, arrays: Mapping[str, np.ndarray], reference: np.ndarray | None, out: np.ndarray
    ) -> None:
        """See ``BlockCodec``: in float32, one product, rounded to the dtype."""
        assert reference is not None
        steps = arrays["step"]
        if len(steps) and steps.max() > WIDEST_STEP:
            raise ValueError(f"steps up to {WIDEST_STEP}, found {steps.max()}")
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
