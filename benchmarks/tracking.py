# SPDX-License-Identifier: Apache-2.0
"""Cost of tracking per training step (`mark`, `track`), and per save (fingerprints).

``mark`` runs in a step of the thesis DLRM. ``touched.track`` wraps optax's Adagrad over dense
gradients of the same tables, of which a twentieth of the rows is not zero, with both of its rules.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import report as reports
import ways
from dlrm_jax import data, trainer
from report import Report, interleaved, percent, secs, timed, times

import deltackpt
from deltackpt.tracking import fingerprints

#: Number of microsecond-long calls that are timed together.
_TOGETHER = 50
#: Bars: `mark` as a share of a step; a dense step with `track`, by its rule, over one without.
_MARK_BAR = 0.01
_RULES: dict[Literal["gradient", "bits"], float] = {"gradient": 1.05, "bits": 2.0}
_STEP, _MARKED = "a DLRM step", "a DLRM step with `mark`"
_MARK, _DENSE, _PRINTS = "`mark` alone", "a dense Adagrad step", "fingerprints of all rows"


def dlrm_steps(
    sizes: trainer.ModelOptions, batches: list[data.Batch]
) -> tuple[dict[str, Callable[[], float]], list[trainer.TrainState]]:
    """Steps without and with ``mark``, each on its own state."""
    steps = [trainer.train_step(sizes, mark=mark) for mark in (False, True)]
    states, numbers = [trainer.init_state(sizes, 0) for _ in steps], [0, 0]

    def run(which: int) -> None:
        states[which], loss, _ = steps[which](states[which], batches[numbers[which] % len(batches)])
        numbers[which] += 1
        jax.block_until_ready((states[which], loss))

    names = enumerate((_STEP, _MARKED))
    return {name: lambda n=n: timed(functools.partial(run, n)) for n, name in names}, states


def mark_alone(touched: deltackpt.TouchState, batches: list[data.Batch]) -> Callable[[], float]:
    """``mark``, jitted and donated as in a step."""
    mark = jax.jit(deltackpt.touched.mark, donate_argnums=0)
    ids = [jax.device_put(batch.ids) for batch in batches]
    held = jax.tree.map(jnp.copy, touched)

    def run() -> None:
        nonlocal held
        for number in range(_TOGETHER):
            held = mark(held, ids[number % len(ids)])
        jax.block_until_ready(held)

    return lambda: timed(run) / _TOGETHER


def dense_step(
    tables: dict[str, jax.Array], rule: Literal["gradient", "bits"] | None
) -> Callable[[], float]:
    """An optimizer step over dense gradients, tracked with a rule or not."""
    gradients = jax.tree.map(lambda table: jnp.zeros_like(table).at[::20].set(1e-3), tables)
    optimizer: optax.GradientTransformation = optax.adagrad(0.01)
    if rule is not None:
        optimizer = deltackpt.touched.track(optimizer, "*", rule=rule)
    copied = jax.tree.map(jnp.copy, tables)
    held = [copied, optimizer.init(copied)]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def run() -> None:
        params, state = held
        held[:] = step(params, state, gradients)
        jax.block_until_ready(held)

    return lambda: timed(run)


def tracking(report: Report, options: argparse.Namespace, _: Path) -> None:
    rows = data.table_rows("thesis", options.scale)
    sizes = trainer.ModelOptions(rows=rows)
    traffic = data.ZipfTraffic(rows, options.batch, exponent=options.zipf, seed=0)
    batches = [traffic.batch(step) for step in range(8)]
    calls, states = dlrm_steps(sizes, batches)
    calls[_MARK] = mark_alone(states[1].touched, batches)
    tables = jax.tree.map(jnp.copy, states[1].tables)
    slots = jax.tree.map(jnp.copy, states[1].accumulators)
    calls[_DENSE] = dense_step(tables, None)
    for rule in _RULES:
        calls[f"{_DENSE}, `track`, {rule} rule"] = dense_step(tables, rule)
    calls[_PRINTS] = lambda: timed(
        lambda: jax.block_until_ready(
            [fingerprints.fingerprint(table, [slots[name]]) for name, table in tables.items()]
        )
    )
    candidates = {name: lambda call=call: {"secs": call()} for name, call in calls.items()}
    found = interleaved(options.repeats, candidates, warm_up=2)
    nbytes = sum(map(ways.nbytes, (tables, slots)))
    report.sizes = (
        f"Thesis DLRM: {len(rows)} tables of {max(rows.values()):,} x {sizes.width}, bottom "
        f"{sizes.bottom}, top {sizes.top}, batch {options.batch}, Zipf {options.zipf:g}; "
        f"{nbytes / 1e6:.0f} MB of tables and slots"
    )
    report.against(_MARKED, found, "secs", _MARKED, [_STEP])
    step, mark = found(_STEP, "secs"), found(_MARK, "secs")
    share = mark.mapped(lambda value: value / step.median)
    report.state(f"{_MARK}, of a step", share, percent, bar=_MARK_BAR)
    table: list[list] = [["`mark` in a DLRM step", (mark, secs), (share, percent)]]
    for rule, bar in _RULES.items():
        name = f"{_DENSE}, `track`, {rule} rule"
        report.against(name, found, "secs", name, [_DENSE], bars=[bar])
        over = found(name, "secs").over(found(_DENSE, "secs"))
        table.append([f"`track`, {rule} rule: {_DENSE}", *found.cells(name, "secs"), (over, times)])
    report.state(f"{_PRINTS}, per save", found(_PRINTS, "secs"))
    table.append([f"{_PRINTS}, per save", *found.cells(_PRINTS, "secs"), ""])
    report.publish("tracking", ("what", "time", "of the step"), table)


if __name__ == "__main__":
    # ``zipf`` is the exponent of the ids.
    title = "What tracking costs a training step"
    reports.main(title, tracking, repeats=31, batch=2048, zipf=1.07)
