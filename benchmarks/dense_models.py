# SPDX-License-Identifier: Apache-2.0
"""Models of ``dense.py``: T5 with AdamW in float32 and with a bf16 copy, and adapters on it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ways  # noqa: F401  (makes the examples importable)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "t5x"))

from flax import traverse_util
from t5_jax import data as texts
from t5_jax import model as t5

import deltackpt

#: Learning rates: of training, after a warm-up, and of fine-tuning, as in reinforcement learning.
_RATE, _WARMUP, _TUNING_RATE, _DECAY = 1e-3, 50, 1e-6, 0.01
#: Rank of the adapters.
_RANK = 8
#: Tokens in a sample of T5.
_INPUTS = 64
#: Share of the text that is held out for testing.
_HELD_OUT = 0.1
#: Keys of the parameters of a state with adapters.
_BACKBONE, _ADAPTERS = "backbone", "adapters"
#: Maximum batches in one order of the data.
_ORDER_STRIDE = 10**6
#: A manager requires a table, and these states have no real ones.
TABLES = deltackpt.Tables(select="table", slots={})


class State(NamedTuple):
    """The complete training state of T5, or other dense leaves."""

    table: jax.Array
    params: Any
    opt_state: Any
    step: jax.Array
    touched: deltackpt.TouchState


def state_of(params: Any, opt_state: Any = ()) -> State:
    """A state after no steps."""
    table = jnp.zeros((8, 8))
    touched = deltackpt.touched.init({"table": table})
    return State(table, params, opt_state, jnp.zeros((), jnp.int32), touched)


def marked(touched: deltackpt.TouchState) -> deltackpt.TouchState:
    """Advances the clock and touches a row: a manager warns of states that do not change."""
    return deltackpt.touched.mark(touched, {"table": jnp.zeros(1, jnp.int32)})


class Optimizer(NamedTuple):
    """An optimizer: parameters to its state; gradient, state, parameters to new ones."""

    init: Callable[[Any], Any]
    apply: Callable[[Any, Any, Any], tuple[Any, Any]]


class Corpus:
    """A text in batches of span corruption; its end is held out."""

    def __init__(self, text: str, batch_size: int):
        self.vocabulary = texts.Words(text)
        cut = text.rindex(" ", 0, round(len(text) * (1 - _HELD_OUT)))
        held_out = texts.SpanCorruption(
            text[cut:], self.vocabulary, 4 * batch_size, _INPUTS, seed=-1 % 2**32
        )
        self.test = [held_out.batch(number) for number in range(16)]
        self._source = texts.SpanCorruption(
            text[:cut], self.vocabulary, batch_size, _INPUTS, seed=0
        )

    def batch(self, order: int, number: int) -> texts.Batch:
        """Returns a training batch; each order draws different data."""
        return self._source.batch(order * _ORDER_STRIDE + number)


class Model:
    """T5, its optimizer and its data."""

    def __init__(
        self,
        corpus: Corpus,
        size: str,
        kept: Callable[[Any], Any],
        optimizer: Optimizer,
        starts_from: str | None = None,
    ):
        """``kept`` converts parameters to the form that a state keeps.

        Training starts from the state of the model ``starts_from``, or from ``init``.
        """
        self._corpus, self._kept, self._optimizer = corpus, kept, optimizer
        self._network = t5.T5(t5.Sizes(rows=corpus.vocabulary.size, **t5.NAMED[size]))
        self._test_loss = jax.jit(functools.partial(self._loss, z_loss=0.0))
        self.batch, self.starts_from = corpus.batch, starts_from

    def init(self) -> State:
        return jax.device_put(self._first(), jax.local_devices()[0])

    @functools.partial(jax.jit, static_argnums=0)
    def _first(self) -> State:
        some = jnp.zeros((1, 1), jnp.int32)
        params = self._kept(self._network.init(jax.random.key(0), some, some)["params"])
        return state_of(params, self._optimizer.init(params))

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(self, state: State, batch: texts.Batch) -> State:
        gradient = jax.grad(functools.partial(self._loss, z_loss=1e-4))(state.params, batch)
        params, opt_state = self._optimizer.apply(gradient, state.opt_state, state.params)
        return State(state.table, params, opt_state, state.step + 1, marked(state.touched))

    def tested(self, state: State) -> float:
        return float(np.mean([self._test_loss(state.params, one) for one in self._corpus.test]))

    def _loss(self, kept: Any, batch: texts.Batch, z_loss: float) -> jax.Array:
        inputs, targets = jax.tree.map(jnp.asarray, batch)
        # Always compute in float32: a CPU has no arithmetic of fewer bits.
        params = _in(jnp.float32, kept)
        if _ADAPTERS in params:
            params = _adapted(params[_BACKBONE], params[_ADAPTERS])
        logits: Any = self._network.apply({"params": params}, inputs, t5.shifted_right(targets))
        return t5.cross_entropy(logits, targets, z_loss)


def t5_models(text: str, size: str, batch_size: int) -> dict[str, Model]:
    """Returns T5 of a size of ``t5.NAMED`` with several optimizers, by name."""
    model = functools.partial(Model, Corpus(text, batch_size), size)
    training = optax.adamw(_warmed_up, weight_decay=_DECAY)
    tuning = optax.adamw(_TUNING_RATE, weight_decay=_DECAY)
    kinds: Any = {"trained": training, "frozen": optax.set_to_zero()}
    of_adapters = optax.multi_transform(kinds, {_BACKBONE: "frozen", _ADAPTERS: "trained"})
    in_bf16 = functools.partial(_in, jnp.bfloat16)
    return {
        "adamw": model(lambda params: params, _from_optax(training)),
        "master": model(in_bf16, _with_master(training)),
        "tuning": model(in_bf16, _with_master(tuning), starts_from="master"),
        "lora": model(_with_adapters, _from_optax(of_adapters)),
    }


def _in(dtype: Any, params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def _with_adapters(params: Any) -> Any:
    adapters = {}
    for number, (path, kernel) in enumerate(_adapted_kernels(params)):
        key = jax.random.fold_in(jax.random.key(1), number)
        rows, columns = kernel.shape
        adapters[*path, "down"] = jax.random.normal(key, (rows, _RANK)) / rows**0.5
        adapters[*path, "up"] = jnp.zeros((_RANK, columns))
    return {_BACKBONE: params, _ADAPTERS: traverse_util.unflatten_dict(adapters)}


def _adapted(backbone: Any, adapters: Any) -> Any:
    flat: Any = traverse_util.flatten_dict(backbone)
    changes: Any = traverse_util.flatten_dict(adapters)
    for path, kernel in _adapted_kernels(backbone):
        flat[path] = kernel + changes[*path, "down"] @ changes[*path, "up"]
    return traverse_util.unflatten_dict(flat)


def _adapted_kernels(params: Any) -> list[tuple[tuple[str, ...], jax.Array]]:
    """Kernels of queries and values, as in LoRA."""
    flat: Any = traverse_util.flatten_dict(params)
    return [(path, leaf) for path, leaf in flat.items() if {"query", "value"} & {*path}]


def _warmed_up(step: jax.typing.ArrayLike) -> jax.Array:
    return _RATE * jnp.minimum(1.0, (step + 1) / _WARMUP)


def _from_optax(transformation: optax.GradientTransformation) -> Optimizer:
    def apply(gradient: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        updates, opt_state = transformation.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return Optimizer(transformation.init, apply)


class _Master(NamedTuple):
    """Master parameters in float32, and the state of their optimizer."""

    params: Any
    opt_state: Any


def _with_master(transformation: optax.GradientTransformation) -> Optimizer:
    inner = _from_optax(transformation)

    def init(params: Any) -> _Master:
        master = _in(jnp.float32, params)
        return _Master(master, inner.init(master))

    def apply(gradient: Any, opt_state: _Master, params: Any) -> tuple[Any, _Master]:
        del params
        wide = _in(jnp.float32, gradient)
        found = _Master(*inner.apply(wide, opt_state.opt_state, opt_state.params))
        return _in(jnp.bfloat16, found.params), found

    return Optimizer(init, apply)
