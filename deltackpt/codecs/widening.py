# SPDX-License-Identifier: Apache-2.0
"""Short floats as float32, in memory that is there: bit for bit what a cast makes of them."""

from __future__ import annotations

import functools

import numpy as np


def widened(values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Numbers as float32.

    Args:
      values: (n, 256) of a dtype in ``block_codec.FLOATS``.
      out: (m, 256) float32, m at least n: where to write them, if they are not float32 already.

    Returns:
      (n, 256) float32: ``values`` themselves, or the first rows of ``out``.
    """
    if values.dtype == np.float32:
        return values
    out = out[: len(values)]
    if values.dtype == np.float16:
        # A cast takes 2.5 times as long: numpy's wheels have no instructions of processors for it.
        np.take(_of_float16(), values.view(np.uint16), out=out, mode="wrap")
    else:
        np.copyto(out, values)
    return out


@functools.cache
def _of_float16() -> np.ndarray:
    """What each pattern of 16 bits is, (65536,) float32."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # Of some processors, by signaling NaN.
        found = patterns.view(np.float16).astype(np.float32)
    found.flags.writeable = False
    return found
