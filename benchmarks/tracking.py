# SPDX-License-Identifier: Apache-2.0
"""Cost of tracking per training step (`mark`, `track`), and per save (fingerprints).

``mark`` runs in a step of the thesis DLRM. ``touched.track`` wraps optax's Adagrad over dense
gradients of the same tables, of which a twentieth of the rows is not zero, with both of its rules.

python benchmarks/tracking.py --json tracking.json
python benchmarks/tracking.py --scale 0.01 --repeats 3 --batch 64      # a smoke test
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import ways  # noqa: F401  (makes the example importable)
from dlrm_jax import data, trainer
from report import Report, arguments, interleaved, percent, secs, timed, times

import deltackpt
from deltackpt.tracking import fingerprints

#: Number of microsecond-long calls that are timed together.
_TOGETHER = 50
#: Bars: `mark` as a share of a step; a dense step with `track`, by its rule, over one without.
_MARK_BAR = 0.01
_RULES: dict[Literal["gradient", "bits"], float] = {"gradient": 1.05, "bits": 2.0}
_STEP, _MARKED = "a DLRM step", "a DLRM step with `mark`"
_DENSE, _PRINTS = "a dense Adagrad step", "fingerprints of all rows"


def dlrm_steps(
    sizes: trainer.ModelOptions, batches: list[data.Batch]
) -> tuple[dict[str, Callable[[], float]], list[trainer.TrainState]]:
    """Steps without and with ``mark``, each on its own state."""
    steps = [trainer.train_step(sizes, mark=mark) for mark in (False, True)]
    states = [trainer.init_state(sizes, 0) for _ in steps]
    numbers = [0, 0]

    def run(which: int) -> None:
        states[which], loss, _ = steps[which](states[which], batches[numbers[which] % len(batches)])
        numbers[which] += 1
        jax.block_until_ready((states[which], loss))

    def once(which: int) -> float:
        return timed(functools.partial(run, which))

    return {_STEP: lambda: once(0), _MARKED: lambda: once(1)}, states


def mark_alone(touched: deltackpt.TouchState, batches: list[data.Batch]) -> Callable[[], float]:
    """``mark``, jitted and donated as in a step."""
    mark = jax.jit(deltackpt.touched.mark, donate_argnums=0)
    ids = [jax.device_put(batch.ids) for batch in batches]
    held = [jax.tree.map(jnp.copy, touched)]

    def run() -> None:
        for number in range(_TOGETHER):
            held[0] = mark(held[0], ids[number % len(ids)])
        jax.block_until_ready(held[0])

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


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, repeats=31)
    parser.add_argument("--batch", type=int, default=2048, help="samples in a batch")
    parser.add_argument("--zipf", type=float, default=1.07, help="exponent of the ids")
    options = parser.parse_args()
    rows = data.table_rows("thesis", options.scale)
    sizes = trainer.ModelOptions(rows=rows)
    traffic = data.ZipfTraffic(rows, options.batch, exponent=options.zipf, seed=0)
    batches = [traffic.batch(step) for step in range(8)]
    calls, states = dlrm_steps(sizes, batches)
    trained = states[1]
    calls["`mark` alone"] = mark_alone(trained.touched, batches)
    tables = jax.tree.map(jnp.copy, trained.tables)
    slots = jax.tree.map(jnp.copy, trained.accumulators)
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

    def sample(name: str):
        return found(name, "secs")

    nbytes = sum(map(ways.nbytes, (tables, slots)))
    report = Report(
        "What tracking costs a training step",
        sizes=f"Thesis DLRM: {len(rows)} tables of {max(rows.values()):,} x {sizes.width}, bottom "
        f"{sizes.bottom}, top {sizes.top}, batch {options.batch}, Zipf {options.zipf:g}; "
        f"{nbytes / 1e6:.0f} MB of tables and slots",
    )
    step, mark = sample(_STEP), sample("`mark` alone")
    report.compare(_MARKED, sample(_MARKED), _STEP, step, secs)
    share = mark.mapped(lambda value: value / step.median)
    report.state("`mark` alone, of a step", share, percent, bar=_MARK_BAR)
    table: list[list] = [["`mark` in a DLRM step", (mark, secs), (share, percent)]]
    for rule, bar in _RULES.items():
        name = f"{_DENSE}, `track`, {rule} rule"
        report.compare(name, sample(name), _DENSE, sample(_DENSE), secs, bar=bar)
        over = sample(name).over(sample(_DENSE))
        table.append([f"`track`, {rule} rule: {_DENSE}", (sample(name), secs), (over, times)])
    report.state(f"{_PRINTS}, per save", sample(_PRINTS), secs)
    table.append([f"{_PRINTS}, per save", (sample(_PRINTS), secs), ""])
    report.publish("tracking", ("what", "time", "of the step"), table)
    report.show(options)


if __name__ == "__main__":
    main()
