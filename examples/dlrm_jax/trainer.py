# SPDX-License-Identifier: Apache-2.0
"""The training state and one training step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

import deltackpt
from dlrm_jax import model
from dlrm_jax.data import Batch
from dlrm_jax.optimizer import row_wise_adagrad
from dlrm_jax.placement import Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes and learning rates.

    Attributes:
      rows: row count of each table, by name.
      row_multiple: tables are padded with zero rows to a multiple of this; no id refers to them.
        JAX shards arrays only evenly, and a multiple that does not depend on the devices lets a
        state move between any device counts that divide it.
      width: columns of every table.
      bottom: hidden layers of the bottom MLP; a layer of ``width`` follows.
      top: hidden layers of the top MLP; the logit follows.
      table_rate: learning rate of the tables' row-wise Adagrad.
      dense_rate: learning rate of the MLPs' Adam.
    """

    rows: Mapping[str, int]
    row_multiple: int = 1
    width: int = 64
    bottom: tuple[int, ...] = (512, 512)
    top: tuple[int, ...] = (1024, 1024, 1024)
    table_rate: float = 0.02
    dense_rate: float = 1e-3


class TrainState(NamedTuple):
    """Everything that a run needs to resume.

    Attributes:
      tables: table name to (rows, width) float32, padding rows included.
      accumulators: table name to (rows,) float32, the slots of row-wise Adagrad.
      dense: both MLPs.
      opt_state: optax state of ``dense``.
      step: number of completed steps, int32 scalar.
      touched: which rows changed when; never saved.
    """

    tables: dict[str, jax.Array]
    accumulators: dict[str, jax.Array]
    dense: model.Dense
    opt_state: optax.OptState
    step: jax.Array
    touched: deltackpt.TouchState


def checkpoint_tables(
    codec: str | deltackpt.policies.BitWidthPolicy | deltackpt.policies.CodecChoice = "raw",
    slot_codec: str = "raw",
) -> deltackpt.Tables:
    """Returns which leaves of a ``TrainState`` are tables and slots, and how both are stored."""
    return deltackpt.Tables(
        select="tables/*",
        slots={"tables/*": {"accumulator": "accumulators/{name}"}},
        codec=codec,
        slot_codec=slot_codec,
    )


def init_state(options: ModelOptions, seed: int, placement: Placement | None = None) -> TrainState:
    """Returns an initial training state.

    Args:
      options: sizes and rates.
      seed: seed of the parameters.
      placement: if given, each device creates its own part; otherwise one device holds the state.
    """
    if placement is not None:
        init = functools.partial(init_state, options, seed)
        return jax.jit(init, out_shardings=state_shardings(placement))()
    table_key, dense_key = jax.random.split(jax.random.key(seed))
    tables = model.init_tables(table_key, options.rows, options.width, options.row_multiple)
    dense = model.init_dense(dense_key, len(tables), options.width, options.bottom, options.top)
    return TrainState(
        tables=tables,
        accumulators={name: jnp.zeros(table.shape[0]) for name, table in tables.items()},
        dense=dense,
        opt_state=optax.adam(options.dense_rate).init(dense),
        step=jnp.zeros((), jnp.int32),
        touched=deltackpt.touched.init(tables),
    )


def abstract_state(options: ModelOptions, placement: Placement | None = None) -> TrainState:
    """Returns the shapes and dtypes of a state, and its shardings if it has a placement."""
    shapes = jax.eval_shape(functools.partial(init_state, options, 0))
    if placement is None:
        return shapes

    def placed(sharding: jax.sharding.Sharding, leaf: jax.ShapeDtypeStruct) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    shardings = jax.tree.broadcast(state_shardings(placement), shapes)
    return jax.tree.map(placed, shardings, shapes)


def state_shardings(placement: Placement) -> TrainState:
    """Returns the shardings of a state, as a prefix: one for each of its fields."""
    split: Any = placement.split
    whole: Any = placement.whole
    return TrainState(
        tables=split,
        accumulators=split,
        dense=whole,
        opt_state=whole,
        step=whole,
        touched=deltackpt.TouchState(clock=whole, stamps=split, identity=whole),
    )


def train_step(
    options: ModelOptions, *, mark: bool = True, placement: Placement | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, jax.Array, jax.Array]]:
    """Returns the jitted step: (state, batch) to (state, loss, logits before the update).

    Args:
      options: sizes and rates.
      mark: False does not update the TouchState, to measure the cost of marking.
      placement: placement of state and batch over several devices; loss and logits are then
        replicated.
    """
    optimizer = optax.adam(options.dense_rate)

    shardings: dict[str, Any] = {}
    if placement is not None:
        whole = placement.whole
        shardings["out_shardings"] = (state_shardings(placement), whole, whole)

    def placed(array: jax.Array, where: Literal["split", "whole"]) -> jax.Array:
        if placement is None:
            return array
        return jax.lax.with_sharding_constraint(array, getattr(placement, where))

    @functools.partial(jax.jit, donate_argnums=0, **shardings)
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array, jax.Array]:
        numeric, ids_of, labels = jax.tree.map(jnp.asarray, batch)
        # Each device looks up the rows that it holds, for all samples, and receives the rows of its
        # own samples.
        found = [placed(state.tables[name][ids], "whole") for name, ids in ids_of.items()]
        looked_up = [placed(rows, "split") for rows in found]

        def loss_of(dense: model.Dense, rows: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            pooled = [each.reshape(len(numeric), -1, options.width).sum(1) for each in rows]
            logits = model.logits(dense, numeric, pooled)
            return model.cross_entropy(logits, labels), logits

        gradient = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
        (loss, logits), (dense_gradient, row_gradients) = gradient(state.dense, looked_up)
        updates, opt_state = optimizer.update(dense_gradient, state.opt_state, state.dense)
        tables, accumulators = dict(state.tables), dict(state.accumulators)
        # Samples of several devices may look up one row: each device sums the gradients of the
        # whole batch and writes the rows that it holds. The tables themselves never travel.
        for (name, ids), gradients in zip(ids_of.items(), row_gradients, strict=True):
            tables[name], accumulators[name] = row_wise_adagrad(
                tables[name],
                accumulators[name],
                ids.reshape(-1),
                placed(gradients, "whole").reshape(-1, options.width),
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
