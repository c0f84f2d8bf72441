# SPDX-License-Identifier: Apache-2.0
"""State W: 4M rows of 64 in five tables, row-wise Adagrad slots, 5 MB of dense leaves (1.04 GB)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import deltackpt

#: Rows of the five tables: unequal, as in real models.
ROWS = {"C1": 1_600_000, "C2": 1_000_000, "C3": 640_000, "C4": 480_000, "C5": 280_000}
WIDTH = 64
_KERNELS, _KERNEL = 5, 500
#: Lookups per table in one training step.
LOOKUPS = 2048


class State(NamedTuple):
    """The fields of the example's ``TrainState`` that are needed here."""

    tables: dict[str, jax.Array]
    accumulators: dict[str, jax.Array]
    dense: dict[str, jax.Array]
    step: jax.Array
    touched: deltackpt.TouchState


def rows_at(scale: float) -> dict[str, int]:
    return {name: max(LOOKUPS, round(rows * scale)) for name, rows in ROWS.items()}


def make(scale: float, seed: int = 0) -> State:
    """Returns a state of random values: regular ones would compress better than trained ones."""
    return random_state(rows_at(scale), {f"kernel{i}": _KERNEL for i in range(_KERNELS)}, seed)


def random_state(rows: dict[str, int], kernels: dict[str, int], seed: int) -> State:
    """Returns a state with so many rows, and square kernels of some widths."""
    keys = iter(jax.random.split(jax.random.key(seed), 2 * len(rows) + len(kernels)))
    tables = {name: jax.random.normal(next(keys), (n, WIDTH)) for name, n in rows.items()}
    return State(
        tables=tables,
        accumulators={name: jax.random.uniform(next(keys), (n,)) for name, n in rows.items()},
        dense={
            name: jax.random.normal(next(keys), (width, width)) / width**0.5
            for name, width in kernels.items()
        },
        step=jnp.zeros((), jnp.int32),
        touched=deltackpt.touched.init(tables),
    )


def template(scale: float) -> State:
    return jax.eval_shape(lambda: make(scale))


def random_ids(state: State, share: float, seed: int) -> dict[str, np.ndarray]:
    """Draws distinct rows, ``share`` of each table."""
    random = np.random.default_rng(seed)
    return {
        name: random.choice(table.shape[0], round(table.shape[0] * share), replace=False).astype(
            np.int32
        )
        for name, table in state.tables.items()
    }


def lookups(state: State, seed: int) -> dict[str, np.ndarray]:
    """The ids of one training step, ``LOOKUPS`` per table, uniform."""
    random = np.random.default_rng([seed, 1])
    return {
        name: random.integers(table.shape[0], size=LOOKUPS, dtype=np.int32)
        for name, table in state.tables.items()
    }


@functools.partial(jax.jit, donate_argnums=0)
def change(state: State, ids: dict[str, Any]) -> State:
    """Changes the rows in ``ids``, their slots and the dense leaves, and marks the rows."""
    tables, accumulators = dict(state.tables), dict(state.accumulators)
    for name, rows in ids.items():
        tables[name] = tables[name].at[rows].multiply(1.001)
        accumulators[name] = accumulators[name].at[rows].add(0.5)
    return state._replace(
        tables=tables,
        accumulators=accumulators,
        dense=jax.tree.map(lambda kernel: kernel * 1.0001, state.dense),
        step=state.step + 1,
        touched=deltackpt.touched.mark(state.touched, ids),
    )


@functools.partial(jax.jit, donate_argnums=0)
def train(state: State, ids: dict[str, Any], work: int = 1) -> tuple[State, jax.Array]:
    """A training step: lookups, ``work`` times the matrix products, updates.

    With ``work`` of 1, it takes about ten milliseconds on two cores.
    """
    looked_up = [state.tables[name][rows] for name, rows in ids.items()]
    batch = jnp.concatenate(looked_up, axis=1)

    def layers(_: int, hidden: jax.Array) -> jax.Array:
        for kernel in state.dense.values():
            hidden = jax.nn.relu(hidden @ kernel)
        return hidden

    padded = jnp.pad(batch, ((0, 0), (0, _KERNEL - batch.shape[1])))
    loss = jnp.mean(jax.lax.fori_loop(0, work, layers, padded))
    tables, accumulators = dict(state.tables), dict(state.accumulators)
    for name, rows in ids.items():
        tables[name] = tables[name].at[rows].add(-1e-6 * loss)
        accumulators[name] = accumulators[name].at[rows].add(1e-6)
    touched = None if state.touched is None else deltackpt.touched.mark(state.touched, ids)
    return state._replace(tables=tables, accumulators=accumulators, touched=touched), loss


class Loop:
    """A training loop whose steps donate the state."""

    #: Undisturbed steps that time a single one.
    QUIET_STEPS = 30

    def __init__(self, state: State, batches: int = 2):
        """Draws few distinct batches: their rows add to those that a save holds."""
        self.state = state
        self._ids = [lookups(state, seed) for seed in range(batches)]
        self._pool = ThreadPoolExecutor(1, "wait")

    def change(self, share: float, seed: int) -> None:
        self.state = change(self.state, random_ids(self.state, share, seed))
        jax.block_until_ready(self.state)

    def steps(self, until: Callable[[int], bool]) -> tuple[float, float, int]:
        """Trains; returns the total seconds, those of the longest step, and the step count."""
        number, longest, started = 0, 0.0, time.perf_counter()
        while not until(number):
            begun = time.perf_counter()
            self.state, loss = train(self.state, self._ids[number % len(self._ids)])
            jax.block_until_ready(loss)
            longest = max(longest, time.perf_counter() - begun)
            number += 1
        return time.perf_counter() - started, longest, number

    def quiet(self) -> float:
        return self.steps(self.QUIET_STEPS.__eq__)[0] / self.QUIET_STEPS

    def until(self, end: Callable[[], object]) -> tuple[float, float, int]:
        """Trains for at least one step, until a call in another thread returns."""
        ended = self._pool.submit(end)
        found = self.steps(lambda number: number > 0 and ended.done())
        ended.result()
        return found

    def disturbed(self, save: Callable[[], object], wait: Callable[[], object]) -> dict[str, float]:
        """Trains during a save; returns what it cost, next to undisturbed steps."""
        before = self.quiet()
        started = time.perf_counter()
        save()
        blocked = time.perf_counter() - started
        busy, longest, steps = self.until(wait)
        written = time.perf_counter() - started
        quiet = (before + self.quiet()) / 2
        return {
            "blocked": blocked,
            "written": written,
            "lost": blocked + busy - steps * quiet,
            "stall": max(blocked, longest - quiet),
            "slower": busy / steps / quiet,
        }
