# SPDX-License-Identifier: Apache-2.0
"""Lossy encoding of blocks of dense leaves in host memory: compiled, or by numpy in small pieces.

XLA flushes subnormal numbers to 0 on the CPU, unlike readers. Decoded values equal what a reader
decodes. Logarithms are polynomials in float32, each operation rounded once, so that every machine
and the compiled kernels compute the same codes; the last bits of ``np.log2`` depend on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deltackpt import kernels
from deltackpt.codecs import block_codecs, row_codecs
from deltackpt.codecs.block_codecs import BlockCodec, Linear, LogarithmDifference
from deltackpt.codecs.row_codecs import Uniform
from deltackpt.format.dtypes import dtype_of

#: The pattern of infinity; negative and non-finite values have this or a greater one.
_INFINITY = 0x7F800000
#: Patterns of the smallest normal number, and of the square root of a half.
_NORMAL, _ROOT_HALF = 0x00800000, 0x3F3504F3
_SIGNIFICAND_BITS = 23
#: Coefficients of ``x**(n + 1)`` in the base-2 logarithm of ``1 + x``, in points of the grid. The
#: error is at most 0.0003 for ``1 + x`` between the square roots of a half and of 2.
_FACTORS = tuple(
    map(
        float.fromhex,
        (
            *("0x1.7155acp+7", "-0x1.713832p+6", "0x1.eada34p+5"),
            *("-0x1.784f52p+5", "0x1.49e2fep+5", "-0x1.a71976p+4"),
        ),
    )
)
#: More than the error of ``_logarithm``: values that are points of the grid keep their points.
_SLACK = np.float32(2.0**-10)
_HIGHEST_CODE = 255


def _logarithm(patterns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns log2 of positive normal float32 bits in points of the grid, as two terms.

    These are a multiple of the points of an octave, int32, and the rest, float32.
    """
    distance = patterns.view(np.int32) - np.int32(_ROOT_HALF)
    octaves = distance >> _SIGNIFICAND_BITS
    significand = (distance & ((1 << _SIGNIFICAND_BITS) - 1)) + np.int32(_ROOT_HALF)
    excess = significand.view(np.float32) - np.float32(1)
    rest = np.full(patterns.shape, _FACTORS[-1], np.float32)
    for factor in _FACTORS[-2::-1]:
        rest *= excess
        rest += np.float32(factor)
    rest *= excess
    return octaves * np.int32(block_codecs.FINE), rest


def _any_logarithm(patterns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """See ``_logarithm``; the numbers may be subnormal."""
    subnormal = patterns < _NORMAL
    scaled = np.where(subnormal, patterns.astype(np.float32).view(np.uint32), patterns)
    points, rest = _logarithm(scaled)
    points[subnormal] += block_codecs.LOWEST_POWER * block_codecs.FINE
    return points, rest


def _alone(values: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns arrays of a piece, and which blocks they hold: none with negative or NaN values."""
    patterns = values.view(np.uint32)
    highest = patterns.max(axis=1)
    held = highest < _INFINITY
    # Zeros have their own code: minus 1, their patterns wrap to the greatest.
    lowest = (patterns - np.uint32(1)).min(axis=1) + np.uint32(1)
    # Blocks of zeros may use any positive number.
    lowest, highest = np.maximum(lowest, 1), np.maximum(highest, 1)
    (low, low_rest), (high, high_rest) = _any_logarithm(lowest), _any_logarithm(highest)
    first = low + np.floor(low_rest + _SLACK).astype(np.int32)
    last = high + np.ceil(high_rest - _SLACK).astype(np.int32)
    step = np.maximum(-((first - last) // (_HIGHEST_CODE - 1)), 1)
    points, rest = _any_logarithm(patterns)
    rest += (points - first[:, None]).astype(np.float32)
    rest *= (np.float32(1) / step.astype(np.float32))[:, None]
    codes = np.rint(rest + np.float32(1)).astype(np.uint8)
    codes[patterns == 0] = 0
    first -= block_codecs.LOWEST_POWER * block_codecs.FINE
    return {"": codes, "low": first.astype(np.uint16), "step": step.astype(np.uint8)}, held


def _difference(
    values: np.ndarray, reference: np.ndarray, limits: tuple[float, float]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    held = _representable(values, limits) & _representable(reference, limits)
    points, moved = _logarithm((values / reference).view(np.uint32))
    moved += points.astype(np.float32)
    moved[values == 0] = 0
    furthest = np.abs(moved).view(np.uint32).max(axis=1).view(np.float32)
    step = np.maximum(np.ceil((furthest - _SLACK) / block_codecs.FURTHEST), 1)
    # An element that was zero has moved by infinity.
    held &= step <= block_codecs.WIDEST_STEP
    step = np.where(held, step, 1)
    moved *= (1 / step)[:, None]
    codes = (np.rint(moved) + np.float32(block_codecs.MIDDLE)).astype(np.int8)
    codes[values == 0] = 0
    return {"": row_codecs.pack(codes.view(np.uint8)), "step": step.astype(np.uint8)}, held


def _representable(values: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Returns which blocks have only zeros and values within limits."""
    low, high = np.array(limits, np.float32).view(np.uint32)
    patterns = values.view(np.uint32)
    return ((patterns == 0) | ((patterns >= low) & (patterns <= high))).all(axis=1)


#: Smallest nonzero maximum magnitude of an encoded block, so that scales are normal numbers.
SMALLEST = 2.0**-80


class EncodedSpan(NamedTuple):
    """Encoded blocks of a leaf; ``states`` has one of the states of ``kernels`` for each block."""

    states: np.ndarray
    arrays: Mapping[str, np.ndarray]  # suffix to stored array of the coded blocks
    squared_error: float  # of the coded blocks
    squared_norm: float  # of the finite values of all blocks


def encode(
    codec: BlockCodec,
    now: np.ndarray,
    before: np.ndarray | None,
    out: np.ndarray,
) -> EncodedSpan:
    """Encodes blocks, (n, 256) of a float dtype; ``out`` receives them as readers decode them.

    Blocks that are not coded equal ``now`` there. Blocks whose bits equal the reference ``before``
    are skipped.
    """
    if kernels.available():
        return _compiled(codec, now, before, out)
    found = []
    for start in range(0, max(1, len(now)), block_codecs.PIECE_BLOCKS):
        chunk = slice(start, start + block_codecs.PIECE_BLOCKS)
        reference = None if before is None else before[chunk]
        # Non-finite values are detected in the results.
        with np.errstate(all="ignore"):
            found.append(_piece(codec, now[chunk], reference, out[chunk]))
    states, arrays, errors, norms = zip(*found, strict=True)
    joined = {name: np.concatenate([one[name] for one in arrays]) for name in arrays[0]}
    return EncodedSpan(np.concatenate(states), joined, math.fsum(errors), math.fsum(norms))


def _compiled(
    codec: BlockCodec, now: np.ndarray, before: np.ndarray | None, out: np.ndarray
) -> EncodedSpan:
    table, within = None, (0.0, 0.0)
    if isinstance(codec, block_codecs.Logarithms):
        table = block_codecs.places(now.dtype.name)
    elif isinstance(codec, LogarithmDifference):
        table, within = block_codecs.factors(), block_codecs.WITHIN[now.dtype.name]
    states, coded, squared_error, squared_norm = kernels.encode_blocks(
        codec.name, now, before, out, table=table, within=within
    )
    stored = codec.stored(now.dtype).items()
    arrays = {
        suffix: one.view(array.dtype) for (suffix, array), one in zip(stored, coded, strict=True)
    }
    return EncodedSpan(states, arrays, squared_error, squared_norm)


def _piece(
    codec: BlockCodec, now: np.ndarray, before: np.ndarray | None, out: np.ndarray
) -> EncodedSpan:
    """See ``encode``, for at most ``PIECE_BLOCKS`` blocks, in numpy."""
    changed = np.arange(len(now))
    if before is not None:
        # By bits: NaN may have changed.
        changed = (now.view(np.uint64) != before.view(np.uint64)).any(axis=1).nonzero()[0]
    values = now[changed].astype(np.float32)
    decoded = now[changed] if before is None else before[changed]
    arrays, held = _encoded(codec, values, decoded)
    codec.decode(arrays, range(len(decoded)), decoded)
    if out.dtype == np.float16:
        # Rounded up in its last steps, a code may lead out of this narrow range.
        held &= np.isfinite(decoded).all(axis=1)
    coded, decoded = changed[held], decoded[held]
    np.copyto(out, now)
    out[coded] = decoded
    states = np.full(len(now), kernels.UNCHANGED, np.uint8)
    states[changed] = np.where(held, kernels.CODED, kernels.LEFT)
    arrays = {name: array[held] for name, array in arrays.items()}
    error = _squares(values[held] - decoded.astype(np.float32))
    return EncodedSpan(states, arrays, error, _squares(now.astype(np.float32)))


def _encoded(
    codec: BlockCodec, values: np.ndarray, reference: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the arrays of float32 values, (n, 256), and which blocks they represent."""
    wide = reference.astype(np.float32)
    if isinstance(codec, Linear):
        return _symmetric(codec.code, values - wide if codec.relative else values)
    if isinstance(codec, LogarithmDifference):
        return _difference(values, wide, block_codecs.WITHIN[reference.dtype.name])
    return _alone(values)


def _symmetric(code: Uniform, values: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    # The patterns of magnitudes ascend with them, and those of NaN lie above infinity.
    greatest = np.abs(values).view(np.uint32).max(axis=1).view(np.float32)
    held = (greatest == 0) | ((greatest >= SMALLEST) & (greatest <= row_codecs.LARGEST))
    scale = np.where(held, greatest, 0) / np.float32(code.highest)
    rounded, stored = _scale(code, scale)
    inverse = np.divide(1, rounded, out=np.zeros_like(rounded), where=rounded > 0)
    codes = np.rint(values * inverse[:, None]).astype(np.int8).view(np.uint8)
    if code.bits == 8:
        return {"": codes ^ np.uint8(code.middle), "scale": stored}, held
    return {"": row_codecs.pack(codes + np.uint8(code.middle)), "scale": stored}, held


def _scale(code: Uniform, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales of blocks, rounded as ``Uniform`` stores them: float32, and what is stored."""
    half = (np.float32(code.middle) * scale < row_codecs.FLOAT16_BELOW) & (
        (scale >= row_codecs.FLOAT16_SCALE) | (scale == 0)
    )
    short, brain = scale.astype(np.float16), scale.astype(dtype_of("bfloat16"))
    rounded = np.where(half, short.astype(np.float32), brain.astype(np.float32))
    flagged = brain.view(np.uint16) | np.uint16(row_codecs.BFLOAT16_FLAG)
    return rounded, np.where(half, short.view(np.uint16), flagged).view(np.float16)


def _squares(values: np.ndarray) -> float:
    """Returns the sum of the squares of the finite values."""
    return float(np.square(np.where(np.isfinite(values), values, 0).astype(np.float64)).sum())


def relative(squared_error: float, squared_norm: float) -> float:
    """Returns a relative l2 error, infinite if the norm is 0."""
    if squared_norm > 0:
        return math.sqrt(squared_error / squared_norm)
    return math.inf if squared_error > 0 else 0.0
