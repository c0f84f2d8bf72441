# SPDX-License-Identifier: Apache-2.0
"""Encodes blocks with the codes of second moments; see ``codecs.logarithms``.

Only the encoder uses the platform's logarithms. A different last bit leads to a different code
within the same error bound; decoding looks values up.
"""

from __future__ import annotations

import numpy as np

from deltackpt.codecs import logarithms, packing
from deltackpt.codecs.block_codec import BlockCodec
from deltackpt.codecs.logarithms import FINE, FURTHEST, LOWEST_POWER, MIDDLE, WIDEST_STEP, WITHIN
from deltackpt.save.scratch import SCRATCH

#: The pattern of infinity; negative and non-finite values have this or a greater one.
_INFINITY = 0x7F800000
_HIGHEST_CODE = 255


def encode(
    codec: BlockCodec, now: np.ndarray, before: np.ndarray | None, dtype: np.dtype
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Encodes blocks of a piece.

    Args:
      codec: one of ``logarithms.LOGARITHMS``.
      now: (n, 256) float32; blocks with a negative number, NaN or infinity cannot be encoded.
      before: (n, 256) float32, the reference, for ``log4``.
      dtype: dtype of the leaf.

    Returns:
      The arrays to store, and which blocks could be encoded, (n,) bool.
    """
    if isinstance(codec, logarithms.LogarithmDifference):
        assert before is not None
        return _difference(now, before, WITHIN[dtype.name])
    return _alone(now)


def _alone(values: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    patterns = values.view(np.uint32)
    lowest, highest = patterns.min(axis=1), patterns.max(axis=1)
    held = highest < _INFINITY
    zeros = lowest == 0
    if zeros.any():
        some = patterns[zeros]
        lowest[zeros] = np.where(some > 0, some, _INFINITY - 1).min(axis=1)
    # Any value will do for zeros only, which have their own code.
    lowest = np.minimum(lowest, np.maximum(highest, 1))
    first = np.floor(_place(np.where(held, lowest, 1)))
    last = np.ceil(_place(np.where(held, np.maximum(highest, 1), 1)))
    step = np.maximum(np.ceil((last - first) / (_HIGHEST_CODE - 1)), 1)
    per_octave = FINE / step
    code = np.log2(values, out=SCRATCH.change[: len(values)])
    code *= per_octave[:, None]
    code += (1 - first / step - LOWEST_POWER * per_octave)[:, None]
    codes = np.rint(code, out=code).astype(np.uint8)
    if zeros.any():
        codes[patterns == 0] = 0
    return {"": codes, "low": first.astype(np.uint16), "step": step.astype(np.uint8)}, held


def _place(patterns: np.ndarray) -> np.ndarray:
    """Places of the grid, float32, of positive float32 numbers by their patterns."""
    return (np.log2(patterns.view(np.float32)) - LOWEST_POWER) * np.float32(FINE)


def _difference(
    values: np.ndarray, reference: np.ndarray, within: tuple[float, float]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    limits = np.array(within, np.float32)
    held, no_zero = _held(values, limits)
    held &= _held(reference, limits)[0]
    moved = np.divide(values, reference, out=SCRATCH.change[: len(values)])
    np.log2(moved, out=moved)
    zero = None if no_zero else values == 0
    if zero is not None:
        moved[zero] = 0
    moved *= np.float32(FINE)
    magnitudes = np.abs(moved, out=SCRATCH.other[: len(values)])
    furthest = magnitudes.view(np.uint32).max(axis=1).view(np.float32)
    step = np.maximum(np.ceil(furthest / FURTHEST), 1)
    # A number that was zero has moved by infinity.
    held &= step <= WIDEST_STEP
    step = np.where(held, step, 1)
    moved *= (1 / step)[:, None]
    np.rint(moved, out=moved)
    moved += np.float32(MIDDLE)
    codes = SCRATCH.codes[: len(values)]
    np.copyto(codes, moved, casting="unsafe")
    if zero is not None:
        codes[zero] = 0
    return {"": packing.pack(codes.view(np.uint8)), "step": step.astype(np.uint8)}, held


def _held(values: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, bool]:
    """Whether all numbers of a block are zero or within limits, (n,) bool.

    And whether all of the piece are within, so that none is zero.
    """
    low, high = limits.view(np.uint32)
    patterns = values.view(np.uint32)
    if low <= patterns.min() and patterns.max() <= high:
        return np.ones(len(values), bool), True
    return ((patterns == 0) | ((patterns >= low) & (patterns <= high))).all(axis=1), False
