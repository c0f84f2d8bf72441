# SPDX-License-Identifier: Apache-2.0
"""The training state and one training step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import deltackpt
from t5_jax import model
from t5_jax.data import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Training options.

    Attributes:
      sizes: sizes of the model.
      seed: seed of the parameters and of dropout.
      warmup: T5's learning rate is 1 / sqrt(max(step, warmup)), relative to each parameter's root
        mean square.
      z_loss: see ``model.cross_entropy``.
    """

    sizes: model.Sizes
    seed: int = 0
    warmup: int = 10_000
    z_loss: float = 1e-4


class TrainState(NamedTuple):
    """Everything that a run needs to resume.

    Attributes:
      params: parameters of the model, nested dicts of float32.
      opt_state: state of Adafactor.
      step: number of completed steps, int32 scalar.
      touched: which rows of the embedding changed when; never saved. None if the manager
        fingerprints rows.
    """

    params: Any
    opt_state: optax.OptState
    step: jax.Array
    touched: deltackpt.TouchState | None


def checkpoint_tables(codec: str | deltackpt.policies.CodecChoice = "raw") -> deltackpt.Tables:
    """Returns which leaf of a ``TrainState`` is a table, and how its rows are stored.

    The head also has one row per word, but the softmax updates all of them at every step, so it is
    dense.
    """
    return deltackpt.Tables(
        select="/".join(("params", *model.EMBEDDING)),
        # Adafactor's statistics decay in every row at every step: ``v_col`` or ``v_row``, one value
        # per row, and ``v`` of a table with fewer than 128 rows, which is not factored.
        always="v*",
        codec=codec,
    )


def init_state(options: TrainOptions, *, mark: bool = True) -> TrainState:
    """Returns an initial training state.

    Args:
      options: sizes and seed.
      mark: False leaves the TouchState out.
    """

    @jax.jit
    def init(key: jax.Array) -> tuple[Any, optax.OptState]:
        some = jnp.zeros((1, 1), jnp.int32)
        params = model.T5(options.sizes).init(key, some, some)["params"]
        return params, optimizer(options).init(params)

    params, opt_state = init(jax.random.key(options.seed))
    touched = deltackpt.touched.init({_TABLE: embedding(params)}) if mark else None
    state = TrainState(params, opt_state, jnp.zeros((), jnp.int32), touched)
    # A step gives arrays that are committed to their device; so are these, to compile it once.
    return jax.device_put(state, jax.local_devices()[0])


def abstract_state(options: TrainOptions, *, mark: bool = True) -> TrainState:
    """Returns the shapes and dtypes of a state."""
    return jax.eval_shape(functools.partial(init_state, options, mark=mark))


def optimizer(options: TrainOptions) -> optax.GradientTransformation:
    """Returns T5's Adafactor: factored, without momentum, with clipped, parameter-relative updates.

    A row with a zero gradient does not change, since there is neither momentum nor weight decay.
    """

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        return jax.lax.rsqrt(jnp.maximum(jnp.float32(step), options.warmup))

    return optax.adafactor(rate)


def train_step(
    options: TrainOptions,
) -> Callable[[TrainState, Batch], tuple[TrainState, jax.Array]]:
    """Returns the jitted step.

    (state, batch) to (state, loss before the update); donates the state.
    """
    network, adafactor = model.T5(options.sizes), optimizer(options)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        inputs, targets = jax.tree.map(jnp.asarray, batch)
        decoder_inputs = model.shifted_right(targets)
        # Dropout depends on the step alone, so a resumed run is identical.
        key = jax.random.fold_in(jax.random.key(options.seed), state.step)

        def loss_of(params: Any) -> jax.Array:
            logits: Any = network.apply(
                {"params": params},
                inputs,
                decoder_inputs,
                deterministic=options.sizes.dropout == 0,
                rngs={"dropout": key},
            )
            return model.cross_entropy(logits, targets, options.z_loss)

        loss, gradient = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = adafactor.update(gradient, state.opt_state, state.params)
        touched = state.touched
        if touched is not None:
            # Encoder and decoder look rows up in the same table; only these rows get a gradient.
            looked_up = jnp.concatenate([inputs.ravel(), decoder_inputs.ravel()])
            touched = deltackpt.touched.mark(touched, {_TABLE: looked_up})
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1, touched), loss

    return step


def embedding(params: Any) -> jax.Array:
    """Returns the input embedding, (rows, d_model)."""
    for name in model.EMBEDDING:
        params = params[name]
    return params


_TABLE = "/".join(model.EMBEDDING)
