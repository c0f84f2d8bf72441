# SPDX-License-Identifier: Apache-2.0
"""Lossy encoding of blocks of dense leaves in host memory.

In numpy, in pieces that stay in the cache: one jitted program for all of it is no faster, and XLA
takes subnormal numbers for 0 on the CPU, which readers do not. What blocks decode to is found by
the arithmetic of the codecs, so that the reference of the next save is what a reader will have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deltackpt.codecs import packing, uniform
from deltackpt.codecs.block_codec import BlockCodec
from deltackpt.codecs.of_blocks import Alone, Difference
from deltackpt.codecs.uniform import Uniform
from deltackpt.format.dtypes import dtype_of
from deltackpt.save import encode_logarithms

#: Blocks of a piece: of float32, 1 MiB; shorter ones pay more for the calls than the cache saves.
PIECE_BLOCKS = 1024
#: The least greatest magnitude of what is encoded, where that is not 0: scales are normal numbers.
SMALLEST = 2.0**-80
#: Sums of squares in float32 that are surely neither too small nor too large for it.
_SURE = 2.0**-60, 2.0**120


class EncodedBlocks(NamedTuple):
    """Encoded blocks.

    Attributes:
      arrays: suffix to stored array, first axis n.
      held: (n,) bool, False for blocks that the codec does not hold: their arrays say nothing.
    """

    arrays: Mapping[str, np.ndarray]
    held: np.ndarray


def encode(
    codec: BlockCodec, now: np.ndarray, before: np.ndarray | None, out: np.ndarray
) -> EncodedBlocks:
    """Encodes a piece.

    Args:
      codec: a lossy one.
      now: (n, 256) of a float dtype, n at most ``PIECE_BLOCKS``.
      before: likewise the reference, of relative codecs.
      out: likewise, gets what the blocks decode to; of those that are not held, anything.
    """
    # What is not finite is found in what comes of it.
    with np.errstate(all="ignore"):
        if isinstance(codec, Difference):
            assert before is not None
            reference = before.astype(np.float32, copy=False)
            values = now.astype(np.float32, copy=False) - reference
            arrays, held = _symmetric(codec.code, values)
            values += reference
            np.copyto(out, values, casting="unsafe")
        elif isinstance(codec, Alone):
            values = now.astype(np.float32)
            arrays, held = _symmetric(codec.code, values)
            np.copyto(out, values, casting="unsafe")
        else:
            arrays, held = encode_logarithms.encode(codec, now, before)
            codec.decode(arrays, before, out)
        if out.dtype == np.float16:
            # Rounded up in its last steps, a code may lead out of this narrow range.
            held &= np.isfinite(out).all(axis=1)
    return EncodedBlocks(arrays, held)


def _symmetric(code: Uniform, values: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Codes of float32 numbers, (n, 256), in whose place they leave what they stand for.

    That is what ``Uniform.decode`` makes of them; unpacking what was just packed takes a third of
    all time.
    """
    # The patterns of magnitudes ascend with them, and those of NaN lie above infinity.
    greatest = np.abs(values).view(np.uint32).max(axis=1).view(np.float32)
    held = _within(greatest)
    scale = np.where(held, greatest, 0) / np.float32(code.highest)
    rounded, stored = _scale(code, scale)
    values *= _inverse(rounded)[:, None]
    codes = np.rint(values, out=values).astype(np.int8)
    np.multiply(codes, rounded[:, None], out=values)
    return {"": _packed(codes, code), "scale": stored}, held


def _within(greatest: np.ndarray) -> np.ndarray:
    return (greatest == 0) | ((greatest >= SMALLEST) & (greatest <= uniform.LARGEST))


def _scale(code: Uniform, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales of blocks, rounded as ``Uniform`` stores them: float32, and what is stored."""
    half = (np.float32(code.middle) * scale < uniform.FLOAT16_BELOW) & (
        (scale >= uniform.FLOAT16_SCALE) | (scale == 0)
    )
    short, brain = scale.astype(np.float16), scale.astype(dtype_of("bfloat16"))
    rounded = np.where(half, short.astype(np.float32), brain.astype(np.float32))
    flagged = brain.view(np.uint16) | np.uint16(uniform.BFLOAT16_FLAG)
    return rounded, np.where(half, short.view(np.uint16), flagged).view(np.float16)


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)


def _packed(codes: np.ndarray, code: Uniform) -> np.ndarray:
    """See ``codecs.packing``: (n, 256) int8, less the middle, to bytes."""
    if code.bits == 8:
        return codes.view(np.uint8) ^ np.uint8(code.middle)
    return packing.pack((codes + np.int8(code.middle)).view(np.uint8))


def squares(blocks: np.ndarray, other: np.ndarray | None = None) -> float:
    """The sum of the squares of the numbers of a piece, or of what two differ by.

    Numbers that are not finite count nothing.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        values = blocks.astype(np.float32, copy=False)
        if other is not None:
            values = values - other.astype(np.float32, copy=False)
        # Of a block each: a product of the whole piece would wake the threads of the BLAS.
        found = float(np.vecdot(values, values).sum(dtype=np.float64))
    if _SURE[0] < found < _SURE[1]:
        return found
    # Without those that are not finite: to cast a signalling NaN is an invalid operation, too.
    exact = np.where(np.isfinite(values), values, 0).astype(np.float64)
    return float(np.square(exact).sum())


def relative(squared_error: float, squared_norm: float) -> float:
    """A relative l2 error, infinite where there is nothing that it is relative to."""
    if squared_norm > 0:
        return math.sqrt(squared_error / squared_norm)
    return math.inf if squared_error > 0 else 0.0
