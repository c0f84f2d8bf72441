# SPDX-License-Identifier: Apache-2.0
"""Samples of a table's rows, and the distances that the rows moved."""

from __future__ import annotations

import numpy as np

#: Rows of a sample, and of each run of adjacent rows.
_SAMPLE_ROWS = 1024
_RUN_ROWS = 16
#: Memory limit of a sample, over all steps.
_SAMPLE_BYTES = 64 << 20


def sample(rows: int, row_bytes: int, seed: int) -> np.ndarray:
    """Returns runs of adjacent rows at random positions: verifying a block reads many anyway."""
    most = min(_SAMPLE_ROWS, max(_RUN_ROWS, _SAMPLE_BYTES // max(1, row_bytes)))
    if rows <= most:
        return np.arange(rows)
    starts = np.arange(0, rows, _RUN_ROWS)
    chosen = np.random.default_rng(seed).choice(starts, most // _RUN_ROWS, replace=False)
    found = np.sort(chosen)[:, None] + np.arange(_RUN_ROWS)
    return found[found < rows]


def distances(values: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Returns the l2 distance of each row from its origin."""
    with np.errstate(invalid="ignore"):  # inf - inf is nan, which is left out.
        difference = values.astype(np.float64) - origin
        return np.linalg.norm(difference.reshape(len(difference), -1), axis=1)
