# SPDX-License-Identifier: Apache-2.0
"""Statistics of the elements of a table, computed in batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of the elements of some rows; of the magnitudes, if they are complex.

    Attributes:
      rows: number of rows.
      mean: mean of the finite elements; NaN if no element is finite.
      std: standard deviation of the finite elements; NaN if no element is finite.
      least: smallest finite element; NaN if no element is finite.
      greatest: largest finite element; NaN if no element is finite.
      zero_rows: number of rows that contain only zeros.
      not_finite_rows: number of rows with an infinity or NaN.
    """

    rows: int
    mean: float
    std: float
    least: float
    greatest: float
    zero_rows: int
    not_finite_rows: int


def statistics_of(batches: Iterable[np.ndarray]) -> Statistics:
    """Computes the statistics of rows given in batches, (n, *trailing) each."""
    rows = zero_rows = not_finite_rows = count = 0
    mean = squares = 0.0
    least, greatest = math.inf, -math.inf
    for batch in batches:
        wide = np.abs(batch) if batch.dtype.kind == "c" else batch
        flat = wide.reshape(len(batch), math.prod(batch.shape[1:])).astype(np.float64)
        finite = np.isfinite(flat)
        rows += len(flat)
        zero_rows += int((flat == 0).all(axis=1).sum())
        not_finite_rows += int((~finite.all(axis=1)).sum())
        values = flat[finite]
        if not values.size:
            continue
        # Chan, Golub and LeVeque 1979: combines means and squares of two parts.
        own = float(values.mean())
        total = count + values.size
        squares += float(((values - own) ** 2).sum())
        squares += (own - mean) ** 2 * count * values.size / total
        mean += (own - mean) * values.size / total
        count = total
        least, greatest = min(least, float(values.min())), max(greatest, float(values.max()))
    return Statistics(
        rows=rows,
        mean=mean if count else math.nan,
        std=math.sqrt(squares / count) if count else math.nan,
        least=least if count else math.nan,
        greatest=greatest if count else math.nan,
        zero_rows=zero_rows,
        not_finite_rows=not_finite_rows,
    )
