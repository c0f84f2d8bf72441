# SPDX-License-Identifier: Apache-2.0
"""A few rows of a table, and how far they moved."""

from __future__ import annotations

import numpy as np

#: Rows of a sample, and how many of them lie side by side.
_SAMPLE_ROWS = 1024
_RUN_ROWS = 16
#: What a sample of rows may take, over all steps.
_SAMPLE_BYTES = 64 << 20


def sample(rows: int, row_bytes: int, seed: int) -> np.ndarray:
    """Runs of rows at random places; a block holds many rows and is verified as a whole."""
    most = min(_SAMPLE_ROWS, max(_RUN_ROWS, _SAMPLE_BYTES // max(1, row_bytes)))
    if rows <= most:
        return np.arange(rows)
    starts = np.arange(0, rows, _RUN_ROWS)
    chosen = np.random.default_rng(seed).choice(starts, most // _RUN_ROWS, replace=False)
    found = np.sort(chosen)[:, None] + np.arange(_RUN_ROWS)
    return found[found < rows]


def distances(values: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """The l2 distance of each row from where it was."""
    with np.errstate(invalid="ignore"):  # inf - inf is nan, which is left out.
        difference = values.astype(np.float64) - origin
        return np.linalg.norm(difference.reshape(len(difference), -1), axis=1)
