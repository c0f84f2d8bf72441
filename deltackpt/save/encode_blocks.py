# SPDX-License-Identifier: Apache-2.0
"""Lossy encoding of blocks of dense leaves in host memory.

Implemented in numpy, in pieces that fit into the cache. A single jitted program is not faster, and
XLA flushes subnormal numbers to 0 on the CPU, unlike readers. Decoded values are computed with the
arithmetic of the codecs, so the reference of the next save equals the values that a reader decodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deltackpt.codecs import packing, uniform
from deltackpt.codecs.block_codec import BlockCodec
from deltackpt.codecs.of_blocks import PIECE_BLOCKS, Alone, Difference
from deltackpt.codecs.uniform import Uniform
from deltackpt.codecs.widening import widened
from deltackpt.format.dtypes import dtype_of
from deltackpt.save import encode_logarithms
from deltackpt.save.scratch import SCRATCH

#: Smallest nonzero maximum magnitude of an encoded block, so that scales are normal numbers.
SMALLEST = 2.0**-80
#: Added and taken away again, it rounds small float32 numbers as ``np.rint`` does, but that what
#: becomes zero has no sign, as zero has none as a code: 1.5 times the first power of two from which
#: on there are whole numbers only.
_ROUNDS = np.float32(1.5 * 2.0**23)
#: Sums of squares in float32 that are surely neither too small nor too large for it.
_SURE = 2.0**-60, 2.0**120


class EncodedPiece(NamedTuple):
    """An encoded piece of a leaf.

    Attributes:
      arrays: suffix to stored array, first axis n.
      held: (n,) bool; False for blocks that the codec cannot represent, or that are not wanted,
        whose arrays are undefined.
      squared_error: the sum over the blocks that are held.
    """

    arrays: Mapping[str, np.ndarray]
    held: np.ndarray
    squared_error: float


def encode(
    codec: BlockCodec,
    now: np.ndarray,
    before: np.ndarray | None,
    out: np.ndarray,
    wanted: np.ndarray,
) -> EncodedPiece:
    """Encodes a piece.

    Args:
      codec: a lossy codec.
      now: (n, 256) of a float dtype, n at most ``PIECE_BLOCKS``.
      before: (n, 256), the reference, for relative codecs.
      out: (n, 256), receives the decoded blocks; undefined for those that are not held.
      wanted: (n,) bool, which blocks to encode. Encoding a few others in between costs less than
        copying the wanted ones.
    """
    # Non-finite values are detected in the results.
    with np.errstate(all="ignore"):
        values, reference = widened(now, SCRATCH.values), None
        if before is not None and codec.relative:
            reference = widened(before, SCRATCH.reference)
        if isinstance(codec, Difference):
            assert reference is not None
            change = np.subtract(values, reference, out=SCRATCH.change[: len(now)])
            arrays, held = _symmetric(codec.code, change)
            if out.dtype == np.float32:
                np.add(change, reference, out=out)
            else:
                change += reference
                np.copyto(out, change, casting="unsafe")
        elif isinstance(codec, Alone):
            arrays, held = _symmetric(codec.code, values)
            np.copyto(out, SCRATCH.change[: len(now)], casting="unsafe")
        else:
            arrays, held = encode_logarithms.encode(codec, values, reference, now.dtype)
            codec.decode(arrays, before, out)
        if out.dtype == np.float16:
            # Rounded up in its last steps, a code may lead out of this narrow range.
            held &= np.isfinite(out).all(axis=1)
        held &= wanted
        found = widened(out, SCRATCH.other)
        missed = np.subtract(values, found, out=SCRATCH.other[: len(now)])
        return EncodedPiece(arrays, held, _squares(missed, held))


def _symmetric(code: Uniform, values: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns codes of float32 values, (n, 256); ``SCRATCH.change`` receives the decoded ones.

    That is what ``Uniform.decode`` makes of them; unpacking what was just packed takes a third of
    all time.
    """
    # The patterns of magnitudes ascend with them, and those of NaN lie above infinity.
    magnitudes = np.abs(values, out=SCRATCH.other[: len(values)])
    greatest = magnitudes.view(np.uint32).max(axis=1).view(np.float32)
    held = _within(greatest)
    scale = np.where(held, greatest, 0) / np.float32(code.highest)
    rounded, stored = _scale(code, scale)
    change = np.multiply(values, _inverse(rounded)[:, None], out=SCRATCH.change[: len(values)])
    change += _ROUNDS
    change -= _ROUNDS
    codes = SCRATCH.codes[: len(values)]
    np.copyto(codes, change, casting="unsafe")
    change *= rounded[:, None]
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
    """See ``codecs.packing``: (n, 256) int8, less the middle, to bytes; it may change them."""
    if code.bits == 8:
        return codes.view(np.uint8) ^ np.uint8(code.middle)
    codes += np.int8(code.middle)
    return packing.pack(codes.view(np.uint8))


def squares(blocks: np.ndarray) -> float:
    """Returns the sum of the squares of the finite values of blocks.

    Args:
      blocks: (n, 256) of a float dtype.
    """
    pieces = range(0, len(blocks), PIECE_BLOCKS)
    parts = (blocks[start : start + PIECE_BLOCKS] for start in pieces)
    with np.errstate(over="ignore", invalid="ignore"):
        return math.fsum(_squares(widened(part, SCRATCH.values)) for part in parts)


def _squares(values: np.ndarray, chosen: np.ndarray | slice = slice(None)) -> float:
    """See ``squares``, of float32 numbers of a piece, and of the chosen blocks alone."""
    # Of a block each: a product of the whole piece would wake the threads of the BLAS.
    found = float(np.vecdot(values, values)[chosen].sum(dtype=np.float64))
    if _SURE[0] < found < _SURE[1]:
        return found
    some = values[chosen]
    # Without those that are not finite: to cast a signalling NaN is an invalid operation, too.
    exact = np.where(np.isfinite(some), some, 0).astype(np.float64)
    return float(np.square(exact).sum())


def relative(squared_error: float, squared_norm: float) -> float:
    """Returns a relative l2 error, infinite if the norm is 0."""
    if squared_norm > 0:
        return math.sqrt(squared_error / squared_norm)
    return math.inf if squared_error > 0 else 0.0
