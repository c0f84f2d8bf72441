# SPDX-License-Identifier: Apache-2.0
"""DLRM: bottom MLP, embedding tables, dot-product interaction, top MLP.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", arXiv:1906.00091.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

#: Numeric features of a Criteo sample.
NUMERIC = 13


#: One dense layer: ``kernel`` is (in, out), ``bias`` (out,).
Layer = dict[str, jax.Array]
#: The MLPs ``bottom`` and ``top``.
Dense = dict[str, list[Layer]]


def init_tables(
    key: jax.Array, rows: Mapping[str, int], width: int, row_multiple: int = 1
) -> dict[str, jax.Array]:
    """Returns embedding tables, (rows, width) float32, uniform as in the paper's reference code.

    Args:
      key: PRNG key.
      rows: row count of each table, by name.
      width: columns of every table.
      row_multiple: tables are padded with zero rows to a multiple of this.
    """
    keys = jax.random.split(key, len(rows))
    tables = {}
    for table_key, (name, count) in zip(keys, rows.items(), strict=True):
        bound = float(np.sqrt(1.0 / count))
        table = jax.random.uniform(table_key, (count, width), minval=-bound, maxval=bound)
        tables[name] = jnp.pad(table, ((0, -count % row_multiple), (0, 0)))
    return tables


def init_dense(
    key: jax.Array, tables: int, width: int, bottom: Sequence[int], top: Sequence[int]
) -> Dense:
    """Returns both MLPs; the bottom one ends in the tables' width, the top one in a logit."""
    bottom_key, top_key = jax.random.split(key)
    vectors = tables + 1
    interactions = vectors * (vectors - 1) // 2
    return {
        "bottom": _init_mlp(bottom_key, [NUMERIC, *bottom, width]),
        "top": _init_mlp(top_key, [interactions + width, *top, 1]),
    }


def logits(dense: Dense, numeric: jax.Array, rows: Sequence[jax.Array]) -> jax.Array:
    """Returns the click logits of a batch.

    Args:
      dense: both MLPs.
      numeric: numeric features, (batch, NUMERIC) float32.
      rows: the looked-up rows of each table, (batch, width) float32.

    Returns:
      Logits, (batch,) float32.
    """
    below = _mlp(dense["bottom"], numeric, last_is_linear=False)
    vectors = jnp.stack([below, *rows], axis=1)
    dots = jnp.einsum("bik,bjk->bij", vectors, vectors)
    first, second = np.tril_indices(vectors.shape[1], k=-1)
    joined = jnp.concatenate([below, dots[:, first, second]], axis=1)
    return _mlp(dense["top"], joined, last_is_linear=True)[:, 0]


def cross_entropy(logit: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean binary cross entropy of logits (batch,) and labels 0 or 1 (batch,)."""
    return jnp.mean(jax.nn.softplus(logit) - logit * labels)


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Returns the area under the ROC curve; nan if only one class is present.

    Args:
      scores: (samples,), higher for likelier clicks.
      labels: (samples,), 0 or 1.

    Example:
      >>> area_under_curve(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
      0.75
    """
    values, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Equal scores share the mean of their ranks.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0 or len(values) == 0:
        return float("nan")
    above = ranks[labels == 1].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def _init_mlp(key: jax.Array, sizes: Sequence[int]) -> list[Layer]:
    layers = []
    keys = jax.random.split(key, len(sizes) - 1)
    for layer_key, before, after in zip(keys, sizes[:-1], sizes[1:], strict=True):
        spread = float(np.sqrt(2.0 / (before + after)))
        kernel = spread * jax.random.normal(layer_key, (before, after))
        layers.append({"kernel": kernel, "bias": jnp.zeros(after)})
    return layers


def _mlp(layers: Sequence[Layer], inputs: jax.Array, *, last_is_linear: bool) -> jax.Array:
    for number, layer in enumerate(layers):
        inputs = inputs @ layer["kernel"] + layer["bias"]
        if number < len(layers) - 1 or not last_is_linear:
            inputs = jax.nn.relu(inputs)
    return inputs
