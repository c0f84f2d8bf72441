# SPDX-License-Identifier: Apache-2.0
"""Row-wise Adagrad for embedding tables, at a cost of O(batch) for any table size.

One accumulator per row holds the mean square of the row's gradients, as in FBGEMM's
``EXACT_ROWWISE_ADAGRAD``. Only the rows that a batch looked up are read and written; under jit with
donated tables XLA updates them in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_wise_adagrad(
    table: jax.Array,
    accumulator: jax.Array,
    ids: jax.Array,
    gradients: jax.Array,
    *,
    learning_rate: float,
    epsilon: float = 1e-8,
) -> tuple[jax.Array, jax.Array]:
    """Updates the rows that a batch looked up.

    Args:
      table: (rows, width) float32.
      accumulator: (rows,) float32, not negative.
      ids: the row of each lookup, (lookups,) int32, within the table; may repeat.
      gradients: gradient with respect to each looked-up row, (lookups, width) float32.
      learning_rate: step size.
      epsilon: added to the root of the accumulator.

    Returns:
      The new table and accumulator.

    Example:
      >>> table, accumulator = jnp.zeros((4, 2)), jnp.zeros(4)
      >>> table, accumulator = row_wise_adagrad(
      ...     table, accumulator, jnp.array([2, 2]), jnp.ones((2, 2)), learning_rate=0.5)
      >>> table[:, 0].tolist(), accumulator.tolist()
      ([0.0, 0.0, -0.5, 0.0], [0.0, 0.0, 4.0, 0.0])
    """
    rows, summed = sum_by_row(ids, gradients, table.shape[0])
    power = jnp.mean(jnp.square(summed), axis=1)
    seen = accumulator.at[rows].get(mode="fill", fill_value=0.0) + power
    change = -learning_rate * summed / (jnp.sqrt(seen) + epsilon)[:, None]
    # The rows are distinct and ascending, so the scatters need no atomic updates.
    scatter = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    return table.at[rows].add(change, **scatter), accumulator.at[rows].set(seen, **scatter)


def sum_by_row(
    ids: jax.Array, gradients: jax.Array, table_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Sums the gradients of repeated ids, with static shapes.

    Args:
      ids: (lookups,) int32.
      gradients: (lookups, width).
      table_rows: rows of the table.

    Returns:
      Row indices (lookups,) int32, distinct and ascending: each id once, then indices past the
      table's end as padding; and their summed gradients (lookups, width), zero for padding.
    """
    lookups = ids.shape[0]
    order = jnp.argsort(ids)
    ascending = ids[order]
    starts = jnp.concatenate([jnp.ones(1, bool), ascending[1:] != ascending[:-1]])
    segments = jnp.cumsum(starts) - 1
    summed = jax.ops.segment_sum(
        gradients[order], segments, num_segments=lookups, indices_are_sorted=True
    )
    padding = table_rows + jnp.arange(lookups, dtype=ids.dtype)
    rows = padding.at[segments].set(ascending, indices_are_sorted=True)
    return rows, summed
