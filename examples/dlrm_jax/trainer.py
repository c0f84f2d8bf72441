# SPDX-License-Identifier: Apache-2.0
"""The training state and one step of it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import deltackpt
from dlrm_jax import model
from dlrm_jax.data import Batch
from dlrm_jax.optimizer import row_wise_adagrad


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes and learning rates.

    Attributes:
      rows: table name to its rows.
      width: columns of every table.
      bottom: hidden layers of the bottom MLP; a layer of ``width`` follows.
      top: hidden layers of the top MLP; the logit follows.
      table_rate: learning rate of the tables' row-wise Adagrad.
      dense_rate: learning rate of the MLPs' Adam.
    """

    rows: Mapping[str, int]
    width: int = 64
    bottom: tuple[int, ...] = (512, 512)
    top: tuple[int, ...] = (1024, 1024, 1024)
    table_rate: float = 0.02
    dense_rate: float = 1e-3


class TrainState(NamedTuple):
    """Everything that a run needs to go on.

    Attributes:
      tables: table name to (rows, width) float32.
      accumulators: table name to (rows,) float32, the slots of row-wise Adagrad.
      dense: both MLPs.
      opt_state: optax state of ``dense``.
      step: steps done, int32 scalar.
      touched: which rows changed when; never saved.
    """

    tables: dict[str, jax.Array]
    accumulators: dict[str, jax.Array]
    dense: model.Dense
    opt_state: optax.OptState
    step: jax.Array
    touched: deltackpt.TouchState


def checkpoint_tables(
    codec: str | deltackpt.BitWidthPolicy | deltackpt.CodecChoice = "raw", slot_codec: str = "raw"
) -> deltackpt.Tables:
    """Which leaves of a ``TrainState`` are tables, which are their slots, how both are stored."""
    return deltackpt.Tables(
        select="tables/*",
        slots={"tables/*": {"accumulator": "accumulators/{name}"}},
        codec=codec,
        slot_codec=slot_codec,
    )


def init_state(options: ModelOptions, seed: int) -> TrainState:
    """A state from which training starts."""
    table_key, dense_key = jax.random.split(jax.random.key(seed))
    tables = model.init_tables(table_key, options.rows, options.width)
    dense = model.init_dense(dense_key, len(tables), options.width, options.bottom, options.top)
    return TrainState(
        tables=tables,
        accumulators={name: jnp.zeros(table.shape[0]) for name, table in tables.items()},
        dense=dense,
        opt_state=optax.adam(options.dense_rate).init(dense),
        step=jnp.zeros((), jnp.int32),
        touched=deltackpt.touched.init(tables),
    )


def train_step(
    options: ModelOptions, *, mark: bool = True
) -> Callable[[TrainState, Batch], tuple[TrainState, jax.Array, jax.Array]]:
    """The jitted step: (state, batch) to (state, loss, logits of the batch before the update).

    Args:
      options: sizes and rates.
      mark: False leaves the TouchState alone, to measure what marking costs.
    """
    optimizer = optax.adam(options.dense_rate)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array, jax.Array]:
        numeric, ids_of, labels = jax.tree.map(jnp.asarray, batch)
        looked_up = [state.tables[name][ids] for name, ids in ids_of.items()]

        def loss_of(dense: model.Dense, rows: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            logits = model.logits(dense, numeric, rows)
            return model.cross_entropy(logits, labels), logits

        gradient = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
        (loss, logits), (dense_gradient, row_gradients) = gradient(state.dense, looked_up)
        updates, opt_state = optimizer.update(dense_gradient, state.opt_state, state.dense)
        tables, accumulators = dict(state.tables), dict(state.accumulators)
        for (name, ids), gradients in zip(ids_of.items(), row_gradients, strict=True):
            tables[name], accumulators[name] = row_wise_adagrad(
                tables[name],
                accumulators[name],
                ids,
                gradients,
                learning_rate=options.table_rate,
            )
        touched = state.touched
        if mark:
            touched = deltackpt.touched.mark(touched, ids_of)
        new = TrainState(
            tables=tables,
            accumulators=accumulators,
            dense=cast(model.Dense, optax.apply_updates(state.dense, updates)),
            opt_state=opt_state,
            step=state.step + 1,
            touched=touched,
        )
        return new, loss, logits

    return step


def digest(state: TrainState) -> str:
    """SHA-256 over path, dtype, shape and bits of every leaf that a save holds."""
    total = hashlib.sha256()
    kept: Any = state._replace(touched=())
    for path, leaf in jax.tree_util.tree_leaves_with_path(kept):
        array = np.ascontiguousarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape};".encode())
        total.update(array.data)
    return total.hexdigest()
