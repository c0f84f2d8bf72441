# SPDX-License-Identifier: Apache-2.0
"""Models of ``dense.py``: T5 with AdamW in float32 and with a bf16 copy, and adapters on it."""

from __future__ import annotations

import dataclasses
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

#: Hyperparameters of T5 with AdamW.
_RATE, _WARMUP, _DECAY = 1e-3, 50, 0.01
#: Learning rate of fine-tuning, as in reinforcement learning.
_TUNING_RATE = 1e-6
#: Rank of the adapters.
_RANK = 8
#: Tokens in a sample of T5.
_INPUTS = 64
#: Share of the text that is held out for testing.
_HELD_OUT = 0.1
#: Tables of a state that has no real ones.
_NO_TABLES = deltackpt.Tables(select="table", slots={})
#: Keys of the parameters of a state with adapters.
_BACKBONE, _ADAPTERS = "backbone", "adapters"
#: Maximum batches in one order of the data.
_ORDER_STRIDE = 10**6


class State(NamedTuple):
    """The complete training state of T5, which has no tables.

    Attributes:
      table: (8, 8), unused: a manager requires a table.
      params: parameters of the model.
      opt_state: state of the optimizer.
      step: completed steps, int32 scalar.
      touched: touched rows of the table.
    """

    table: jax.Array
    params: Any
    opt_state: Any
    step: jax.Array
    touched: deltackpt.TouchState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model, its optimizer and its data.

    Attributes:
      name: name on the command line.
      init: returns the first state; its field ``touched`` is the TouchState.
      step: (state, batch) to (state, loss); donates the state.
      batch: (order, number) to a batch; each order draws different data.
      tested: the mean loss of a state on held-out data.
      tables: selects the leaves that are tables.
      starts_from: name of the model whose state training starts from; None for ``init``.
    """

    name: str
    init: Callable[[], Any]
    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    batch: Callable[[int, int], Any]
    tested: Callable[[Any], float]
    tables: deltackpt.Tables
    starts_from: str | None = None


def marked(touched: deltackpt.TouchState) -> deltackpt.TouchState:
    """Advances the clock and touches a row: a manager warns of states that do not change."""
    return deltackpt.touched.mark(touched, {"table": jnp.zeros(1, jnp.int32)})


# T5.


class Corpus:
    """A text in batches of span corruption; its end is held out."""

    def __init__(self, text: str, batch_size: int):
        """Splits the text."""
        self.vocabulary = texts.Words(text)
        cut = text.rindex(" ", 0, round(len(text) * (1 - _HELD_OUT)))
        self._text, self._size = text[:cut], batch_size
        held_out = texts.SpanCorruption(
            text[cut:], self.vocabulary, 4 * batch_size, _INPUTS, seed=-1 % 2**32
        )
        self.test = [held_out.batch(number) for number in range(16)]
        self._source = texts.SpanCorruption(
            self._text, self.vocabulary, batch_size, _INPUTS, seed=0
        )

    def batch(self, order: int, number: int) -> texts.Batch:
        """Returns a training batch."""
        return self._source.batch(order * _ORDER_STRIDE + number)


def t5_models(text: str, size: str, batch_size: int) -> dict[str, Model]:
    """Returns T5 with several optimizers, by name.

    Args:
      text: training text.
      size: one of ``t5.NAMED``.
      batch_size: samples in a batch.
    """
    corpus = Corpus(text, batch_size)
    sizes = t5.Sizes(rows=corpus.vocabulary.size, **t5.NAMED[size])
    plain = _from_optax(_adamw(_warmed_up))
    kinds: dict[str, _Kind] = {
        "adamw": _Kind(_in_float32, plain),
        "master": _Kind(_in_bfloat16, _with_master(_adamw(_warmed_up))),
        "tuning": _Kind(
            _in_bfloat16, _with_master(_adamw(lambda step: _TUNING_RATE)), starts_from="master"
        ),
        "lora": _Kind(_with_adapters, _from_optax(_of_adapters(_adamw(_warmed_up)))),
    }
    return {name: _t5(name, kind, sizes, corpus) for name, kind in kinds.items()}


class _Optimizer(NamedTuple):
    """An optimizer: parameters to its state; gradient, state, parameters to new ones."""

    init: Callable[[Any], Any]
    apply: Callable[[Any, Any, Any], tuple[Any, Any]]


class _Kind(NamedTuple):
    """Converts the model's parameters to the form that a state keeps; and their optimizer."""

    kept: Callable[[Any], Any]
    optimizer: _Optimizer
    starts_from: str | None = None


class _Master(NamedTuple):
    """Master parameters in float32, and the state of their optimizer."""

    params: Any
    opt_state: Any


def _t5(name: str, kind: _Kind, sizes: t5.Sizes, corpus: Corpus) -> Model:
    network, optimizer = t5.T5(sizes), kind.optimizer

    @jax.jit
    def init() -> State:
        some = jnp.zeros((1, 1), jnp.int32)
        params = kind.kept(network.init(jax.random.key(0), some, some)["params"])
        table = {"table": jnp.zeros((8, 8))}
        return State(
            table=table["table"],
            params=params,
            opt_state=optimizer.init(params),
            step=jnp.zeros((), jnp.int32),
            touched=deltackpt.touched.init(table),
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, batch: texts.Batch) -> tuple[State, jax.Array]:
        loss, gradient = jax.value_and_grad(functools.partial(_t5_loss, network))(
            state.params, batch, 1e-4
        )
        params, opt_state = optimizer.apply(gradient, state.opt_state, state.params)
        new = state._replace(params=params, opt_state=opt_state, step=state.step + 1)
        return new._replace(touched=marked(state.touched)), loss

    return Model(
        name=name,
        init=lambda: jax.device_put(init(), jax.local_devices()[0]),
        step=step,
        batch=corpus.batch,
        tested=_tester(sizes, corpus),
        tables=_NO_TABLES,
        starts_from=kind.starts_from,
    )


def _tester(sizes: t5.Sizes, corpus: Corpus) -> Callable[[Any], float]:
    loss = jax.jit(functools.partial(_t5_loss, t5.T5(sizes)), static_argnums=2)
    return lambda state: float(np.mean([loss(state.params, one, 0.0) for one in corpus.test]))


def _t5_loss(network: t5.T5, kept: Any, batch: texts.Batch, z_loss: float) -> jax.Array:
    inputs, targets = jax.tree.map(jnp.asarray, batch)
    # Always compute in float32: a CPU has no arithmetic of fewer bits.
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), kept)
    if _ADAPTERS in params:
        params = _adapted(params[_BACKBONE], params[_ADAPTERS])
    logits: Any = network.apply({"params": params}, inputs, t5.shifted_right(targets))
    return t5.cross_entropy(logits, targets, z_loss)


def _in_float32(params: Any) -> Any:
    return params


def _in_bfloat16(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


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


def _adamw(rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(rate, weight_decay=_DECAY)


def _of_adapters(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    kinds: Any = {"trained": inner, "frozen": optax.set_to_zero()}
    return optax.multi_transform(kinds, {_BACKBONE: "frozen", _ADAPTERS: "trained"})


def _from_optax(transformation: optax.GradientTransformation) -> _Optimizer:
    def apply(gradient: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        updates, opt_state = transformation.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return _Optimizer(transformation.init, apply)


def _with_master(transformation: optax.GradientTransformation) -> _Optimizer:
    inner = _from_optax(transformation)

    def init(params: Any) -> _Master:
        master = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        return _Master(master, inner.init(master))

    def apply(gradient: Any, opt_state: _Master, params: Any) -> tuple[Any, _Master]:
        del params
        gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)
        master, found = inner.apply(gradient, opt_state.opt_state, opt_state.params)
        return _in_bfloat16(master), _Master(master, found)

    return _Optimizer(init, apply)


def untrained(init: Callable[[], Any], tables: deltackpt.Tables = _NO_TABLES) -> Model:
    """Returns a model whose states are not changed by training."""

    def never(*_: Any) -> Any:
        raise NotImplementedError("a state that is not trained")

    return Model(name="untrained", init=init, step=never, batch=never, tested=never, tables=tables)
