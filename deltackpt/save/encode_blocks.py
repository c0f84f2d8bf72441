# SPDX-License-Identifier: Apache-2.0
"""Lossy encoding of blocks of dense leaves in host memory.

In numpy, in pieces that stay in the cache: one jitted program for all of it took twice the time,
and XLA takes subnormal numbers for 0 on the CPU, which readers do not. What blocks decode to comes
from the codec itself: there is one implementation, and the reference of the next save is what a
reader will have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deltackpt.codecs import packing, uniform
from deltackpt.codecs.block_codec import BlockCodec
from deltackpt.codecs.of_blocks import Alone, Difference
from deltackpt.codecs.uniform import Uniform
from deltackpt.format.dtypes import dtype_of
from deltackpt.save import encode_logarithms

#: Blocks of a piece: of float32, 256 KiB.
PIECE_BLOCKS = 256
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
            arrays, held = _difference(codec.code, now, before)
        elif isinstance(codec, Alone):
            arrays, held = _alone(codec.code, now)
        else:
            arrays, held = encode_logarithms.encode(codec, now, before)
        codec.decode(arrays, before, out)
        if out.dtype == np.float16:
            # Rounded up in its last steps, a code may lead out of this narrow range.
            held &= np.isfinite(out).all(axis=1)
    return EncodedBlocks(arrays, held)


def _difference(
    code: Uniform, now: np.ndarray, before: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    change = np.subtract(now, before, dtype=np.float32)
    # The patterns of magnitudes ascend with them, and those of NaN lie above infinity.
    greatest = np.abs(change).view(np.uint32).max(axis=1).view(np.float32)
    held = _within(greatest)
    scale = np.where(held, greatest, 0) / np.float32(code.highest)
    rounded, patterns = _parameters(code, scale)
    change *= _inverse(rounded["scale"])[:, None]
    codes = np.rint(change, out=change).astype(np.int8)
    return {"": _packed(codes, code), **patterns}, held


def _alone(code: Uniform, now: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    values = now.astype(np.float32)
    low, high = values.min(axis=1), values.max(axis=1)
    held = _within(np.maximum(-low, high))
    low, high = np.where(held, low, 0), np.where(held, high, 0)
    scale = (high - low) / np.float32(code.highest - code.lowest)
    rounded, patterns = _parameters(code, scale, low + np.float32(code.middle) * scale)
    values -= rounded["offset"][:, None]
    values *= _inverse(rounded["scale"])[:, None]
    # A rounded offset may leave the ends outside.
    np.clip(values, code.lowest, code.highest, out=values)
    codes = np.rint(values, out=values).astype(np.int8)
    return {"": _packed(codes, code), **patterns}, held


def _within(greatest: np.ndarray) -> np.ndarray:
    return (greatest == 0) | ((greatest >= SMALLEST) & (greatest <= uniform.LARGEST))


def _parameters(
    code: Uniform, scale: np.ndarray, offset: np.ndarray | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Parameters of each block, rounded as ``Uniform`` stores them: float32, and what is stored."""
    given = {"scale": scale} if offset is None else {"scale": scale, "offset": offset}
    reach = np.float32(code.middle) * scale + (0 if offset is None else np.abs(offset))
    half = (reach < uniform.FLOAT16_BELOW) & ((scale >= uniform.FLOAT16_SCALE) | (scale == 0))
    rounded, patterns = {}, {}
    for name, value in given.items():
        short, brain = value.astype(np.float16), value.astype(dtype_of("bfloat16"))
        rounded[name] = np.where(half, short.astype(np.float32), brain.astype(np.float32))
        flag = np.uint16(uniform.BFLOAT16_FLAG if name == "scale" else 0)
        found = np.where(half, short.view(np.uint16), brain.view(np.uint16) | flag)
        patterns[name] = found.view(np.float16)
    return rounded, patterns


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)


def _packed(codes: np.ndarray, code: Uniform) -> np.ndarray:
    """See ``codecs.packing``: (n, 256) int8, less the middle, to bytes."""
    if code.bits == 8:
        return codes.view(np.uint8) ^ np.uint8(code.middle)
    return packing.pack_halves((codes + np.int8(code.middle)).view(np.uint8))


def squares(blocks: np.ndarray, other: np.ndarray | None = None) -> float:
    """The sum of the squares of the numbers of a piece, or of what two differ by.

    Numbers that are not finite count nothing.
    """
    values = blocks.astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        if other is not None:
            values = np.subtract(blocks, other, dtype=np.float32)
        # Of a block each: a product of the whole piece would wake the threads of the BLAS.
        found = float(np.vecdot(values, values).sum(dtype=np.float64))
    if _SURE[0] < found < _SURE[1]:
        return found
    exact = values.astype(np.float64)
    return float(np.square(exact[np.isfinite(exact)]).sum())
