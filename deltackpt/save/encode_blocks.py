# SPDX-License-Identifier: Apache-2.0
"""Lossy encoding of blocks of dense leaves in host memory: compiled, or by numpy in small pieces.

A jitted program is not faster than numpy, and XLA flushes subnormal numbers to 0 on the CPU, unlike
readers. Decoded values equal what a reader decodes. Logarithms are polynomials in float32, each
operation rounded once, so that every machine and the compiled kernels compute the same codes; the
last bits of ``np.log2`` depend on the CPU. Scratch memory is kept: fresh memory costs as much as
filling it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deltackpt import kernels
from deltackpt.codecs import block_codecs, row_codecs
from deltackpt.codecs.block_codecs import BlockCodec, Linear, LogarithmDifference
from deltackpt.codecs.row_codecs import Uniform
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.row_blocks import BLOCK


class _Scratch(threading.local):
    """Buffers of ``PIECE_BLOCKS`` blocks; their contents are undefined at the start of a piece."""

    def __init__(self) -> None:
        floats = np.empty((4, block_codecs.PIECE_BLOCKS, BLOCK), np.float32)
        self.values, self.reference, self.change, self.other = floats
        self.codes = np.empty((block_codecs.PIECE_BLOCKS, BLOCK), np.int8)


SCRATCH = _Scratch()


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


def _logarithm(patterns: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns log2 of positive normal float32 bits, which it overwrites, in points of the grid."""
    distance = patterns.view(np.int32)
    distance -= np.int32(_ROOT_HALF)
    octaves = distance >> _SIGNIFICAND_BITS
    distance &= (1 << _SIGNIFICAND_BITS) - 1
    distance += np.int32(_ROOT_HALF)
    rest = distance.view(np.float32)
    rest -= 1
    out.fill(_FACTORS[-1])
    for factor in _FACTORS[-2::-1]:
        out *= rest
        out += np.float32(factor)
    out *= rest
    # Two terms: a multiple of the points of an octave, int32, and the rest, in ``out``.
    octaves *= block_codecs.FINE
    return octaves, out


def _any_logarithm(patterns: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """See ``_logarithm``; the numbers may be subnormal."""
    subnormal = patterns < _NORMAL
    scaled = np.where(subnormal, patterns.astype(np.float32).view(np.uint32), patterns)
    points, rest = _logarithm(scaled, out)
    points[subnormal] += block_codecs.LOWEST_POWER * block_codecs.FINE
    return points, rest


def _alone(values: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns arrays of a piece, and which blocks they hold: none with negative or NaN values."""
    patterns = values.view(np.uint32)
    highest = patterns.max(axis=1)
    held = highest < _INFINITY
    # Zeros have their own code: minus 1, their patterns wrap to the greatest.
    lowest = np.subtract(patterns, 1, out=SCRATCH.other[: len(values)].view(np.uint32)).min(axis=1)
    # Blocks of zeros may use any positive number.
    lowest, highest = np.maximum(lowest + np.uint32(1), 1), np.maximum(highest, 1)
    found = np.empty((2, len(values)), np.float32)
    (low, low_rest), (high, high_rest) = map(_any_logarithm, (lowest, highest), found)
    first = low + np.floor(low_rest + _SLACK).astype(np.int32)
    last = high + np.ceil(high_rest - _SLACK).astype(np.int32)
    step = np.maximum(-((first - last) // (_HIGHEST_CODE - 1)), 1)
    code, scratch = SCRATCH.change[: len(values)], SCRATCH.other[: len(values)].view(np.uint32)
    if (lowest < _NORMAL).any():
        points, rest = _any_logarithm(patterns, code)
    else:
        np.copyto(scratch, patterns)
        points, rest = _logarithm(scratch, code)
    points -= first[:, None]
    rest += points.astype(np.float32)
    rest *= (np.float32(1) / step.astype(np.float32))[:, None]
    rest += 1
    codes = np.rint(rest, out=rest).astype(np.uint8)
    codes[patterns == 0] = 0
    first -= block_codecs.LOWEST_POWER * block_codecs.FINE
    return {"": codes, "low": first.astype(np.uint16), "step": step.astype(np.uint8)}, held


def _difference(
    values: np.ndarray, reference: np.ndarray, within: tuple[float, float]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    limits = np.array(within, np.float32)
    held, no_zero = _held(values, limits)
    held &= _held(reference, limits)[0]
    ratio = np.divide(values, reference, out=SCRATCH.other[: len(values)])
    points, moved = _logarithm(ratio.view(np.uint32), SCRATCH.change[: len(values)])
    moved += points.astype(np.float32)
    zero = None if no_zero else values == 0
    if zero is not None:
        moved[zero] = 0
    magnitudes = np.abs(moved, out=SCRATCH.other[: len(values)])
    furthest = magnitudes.view(np.uint32).max(axis=1).view(np.float32)
    step = np.maximum(np.ceil((furthest - _SLACK) / block_codecs.FURTHEST), 1)
    # An element that was zero has moved by infinity.
    held &= step <= block_codecs.WIDEST_STEP
    step = np.where(held, step, 1)
    moved *= (1 / step)[:, None]
    np.rint(moved, out=moved)
    moved += np.float32(block_codecs.MIDDLE)
    codes = SCRATCH.codes[: len(values)]
    np.copyto(codes, moved, casting="unsafe")
    if zero is not None:
        codes[zero] = 0
    return {"": row_codecs.pack(codes.view(np.uint8)), "step": step.astype(np.uint8)}, held


def _held(values: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, bool]:
    """Returns which blocks are zero or within limits, and whether all are, without a zero."""
    low, high = limits.view(np.uint32)
    patterns = values.view(np.uint32)
    if low <= patterns.min(initial=high) and patterns.max(initial=low) <= high:
        return np.ones(len(values), bool), True
    return ((patterns == 0) | ((patterns >= low) & (patterns <= high))).all(axis=1), False


#: Smallest nonzero maximum magnitude of an encoded block, so that scales are normal numbers.
SMALLEST = 2.0**-80
#: Adding and subtracting it rounds small float32 numbers as ``np.rint`` does, except that zeros
#: lose their sign, which a code does not have: float32 numbers from 2**23 on are integers.
_ROUNDS = np.float32(1.5 * 2.0**23)
#: If a greater share of a piece's blocks changed, all are encoded in place, and the unchanged ones
#: are dropped: copying the changed ones would take a third of the time.
_MOSTLY = 0.75
#: 8-byte words of a block that are compared first.
_FIRST_WORDS = 4
#: Sums of squares in float32 that are surely neither too small nor too large for it.
_SURE = 2.0**-60, 2.0**120


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
    *,
    skip_unchanged: bool,
) -> EncodedSpan:
    """Encodes blocks, (n, 256) of a float dtype; ``out`` receives them as readers decode them.

    Blocks that are not coded equal ``now`` there. If ``skip_unchanged``, blocks whose bits equal
    the reference ``before`` are skipped.
    """
    skip_unchanged &= before is not None
    if kernels.available():
        return _compiled(codec, now, before, out, skip_unchanged)
    found = []
    for start in range(0, max(1, len(now)), block_codecs.PIECE_BLOCKS):
        chunk = slice(start, start + block_codecs.PIECE_BLOCKS)
        reference = None if before is None else before[chunk]
        # Non-finite values are detected in the results.
        with np.errstate(all="ignore"):
            found.append(_piece(codec, now[chunk], reference, out[chunk], skip_unchanged))
    states, arrays, errors, norms = zip(*found, strict=True)
    joined = {name: np.concatenate([one[name] for one in arrays]) for name in arrays[0]}
    return EncodedSpan(np.concatenate(states), joined, math.fsum(errors), math.fsum(norms))


def _compiled(
    codec: BlockCodec,
    now: np.ndarray,
    before: np.ndarray | None,
    out: np.ndarray,
    skip_unchanged: bool,
) -> EncodedSpan:
    table, within = None, (0.0, 0.0)
    if isinstance(codec, block_codecs.Logarithms):
        table = block_codecs.places(now.dtype.name)
    elif isinstance(codec, LogarithmDifference):
        table, within = block_codecs.factors(), block_codecs.WITHIN[now.dtype.name]
    found = kernels.encode_blocks(
        codec.name, now, before, out, skip_unchanged=skip_unchanged, table=table, within=within
    )
    stored = codec.stored(now.dtype).items()
    arrays = {
        suffix: one.view(array.dtype)
        for (suffix, array), one in zip(stored, found.arrays, strict=True)
    }
    return EncodedSpan(found.states, arrays, found.squared_error, found.squared_norm)


def _piece(
    codec: BlockCodec,
    now: np.ndarray,
    before: np.ndarray | None,
    out: np.ndarray,
    skip_unchanged: bool,
) -> EncodedSpan:
    """See ``encode``, for at most ``PIECE_BLOCKS`` blocks, in numpy."""
    norm = _squares(block_codecs.widened(now, SCRATCH.values))
    changed = np.ones(len(now), bool)
    if skip_unchanged:
        assert before is not None
        changed = changed_blocks(now, before)
    count = np.count_nonzero(changed)
    if count > _MOSTLY * len(now):
        arrays, held, error = _encoded(codec, now, before, out, changed)
        if not held.all():
            out[~held] = now[~held]
            arrays = {name: array[held] for name, array in arrays.items()}
    else:
        rows, few = np.flatnonzero(changed), np.empty((count, BLOCK), out.dtype)
        some = None if before is None else before[rows]
        arrays, kept, error = _encoded(codec, now[rows], some, few, np.ones(count, bool))
        held = np.zeros(len(now), bool)
        held[rows] = kept
        np.copyto(out, now)
        out[held] = few[kept]
        arrays = {name: array[kept] for name, array in arrays.items()}
    states = np.where(held, kernels.CODED, np.where(changed, kernels.LEFT, kernels.UNCHANGED))
    return EncodedSpan(states.astype(np.uint8), arrays, error, norm)


def changed_blocks(now: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Returns which blocks changed, by their bits: (n,) bool."""
    words, other = now.view(np.uint64), before.view(np.uint64)
    # An optimizer step nearly always changes the first elements of a block.
    changed = words[:, 0] != other[:, 0]
    for word in range(1, _FIRST_WORDS):
        changed |= words[:, word] != other[:, word]
    same = np.flatnonzero(~changed)
    if len(same) == len(now):
        return (words != other).any(axis=1)
    if len(same):
        changed[same] = (words[same] != other[same]).any(axis=1)
    return changed


def _encoded(
    codec: BlockCodec,
    now: np.ndarray,
    before: np.ndarray | None,
    out: np.ndarray,
    wanted: np.ndarray,
) -> tuple[Mapping[str, np.ndarray], np.ndarray, float]:
    """Returns a piece's arrays, which blocks are wanted and possible, and the squared error."""
    values, reference = block_codecs.widened(now, SCRATCH.values), None
    if before is not None and codec.relative:
        reference = block_codecs.widened(before, SCRATCH.reference)
    if isinstance(codec, Linear) and codec.relative:
        assert reference is not None
        change = np.subtract(values, reference, out=SCRATCH.change[: len(now)])
        arrays, held = _symmetric(codec.code, change)
        change += reference
        np.copyto(out, change, casting="unsafe")
    elif isinstance(codec, Linear):
        arrays, held = _symmetric(codec.code, values)
        np.copyto(out, SCRATCH.change[: len(now)], casting="unsafe")
    else:
        if isinstance(codec, LogarithmDifference):
            assert reference is not None
            arrays, held = _difference(values, reference, block_codecs.WITHIN[now.dtype.name])
        else:
            arrays, held = _alone(values)
        if before is not None:
            np.copyto(out, before)
        codec.decode(arrays, range(len(out)), out)
    if out.dtype == np.float16:
        # Rounded up in its last steps, a code may lead out of this narrow range.
        held &= np.isfinite(out).all(axis=1)
    held &= wanted
    found = block_codecs.widened(out, SCRATCH.other)
    missed = np.subtract(values, found, out=SCRATCH.other[: len(now)])
    return arrays, held, _squares(missed, held)


def _symmetric(code: Uniform, values: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns codes of float32 values, (n, 256); ``SCRATCH.change`` receives the decoded ones."""
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
    # These equal what ``Uniform.decode`` makes of the codes. Unpacking what was just packed takes a
    # third of all time.
    change *= rounded[:, None]
    return {"": _packed(codes, code), "scale": stored}, held


def _within(greatest: np.ndarray) -> np.ndarray:
    return (greatest == 0) | ((greatest >= SMALLEST) & (greatest <= row_codecs.LARGEST))


def _scale(code: Uniform, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales of blocks, rounded as ``Uniform`` stores them: float32, and what is stored."""
    half = (np.float32(code.middle) * scale < row_codecs.FLOAT16_BELOW) & (
        (scale >= row_codecs.FLOAT16_SCALE) | (scale == 0)
    )
    short, brain = scale.astype(np.float16), scale.astype(dtype_of("bfloat16"))
    rounded = np.where(half, short.astype(np.float32), brain.astype(np.float32))
    flagged = brain.view(np.uint16) | np.uint16(row_codecs.BFLOAT16_FLAG)
    return rounded, np.where(half, short.view(np.uint16), flagged).view(np.float16)


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)


def _packed(codes: np.ndarray, code: Uniform) -> np.ndarray:
    """See ``codecs.row_codecs``: (n, 256) int8, less the middle, to bytes; it may change them."""
    if code.bits == 8:
        return codes.view(np.uint8) ^ np.uint8(code.middle)
    codes += np.int8(code.middle)
    return row_codecs.pack(codes.view(np.uint8))


def squares(blocks: np.ndarray) -> float:
    """Returns the sum of the squares of the finite values of blocks, (n, 256) of a float dtype."""
    pieces = range(0, len(blocks), block_codecs.PIECE_BLOCKS)
    chunks = (blocks[start : start + block_codecs.PIECE_BLOCKS] for start in pieces)
    with np.errstate(over="ignore", invalid="ignore"):
        return math.fsum(_squares(block_codecs.widened(chunk, SCRATCH.values)) for chunk in chunks)


def _squares(values: np.ndarray, chosen: np.ndarray | slice = slice(None)) -> float:
    """Returns the sum of the squares of the finite values of the chosen float32 blocks."""
    # One product per block: a product of the whole piece would wake the threads of the BLAS.
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
