# SPDX-License-Identifier: Apache-2.0
"""Cost of tracking per training step of the thesis DLRM (`mark`, `track`), and per save.

python benchmarks/tracking.py --json tracking.json
python benchmarks/tracking.py --scale 0.01 --repeats 3 --batch 64      # a smoke test
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import state
import ways  # noqa: F401  (makes the example importable)
from dlrm_jax import data, trainer
from report import Report, Sample, arguments, percent, secs, timed

import deltackpt
from deltackpt.format import manifest
from deltackpt.resources.runtime import Runtime
from deltackpt.save import flight, lineage, proof, selection, snapshot
from deltackpt.state.marks import match_marks
from deltackpt.tracking import fingerprints

_RUNTIME = Runtime()
#: Number of microsecond-long calls that are timed together.
_TOGETHER = 50


def measure_steps(
    sizes: trainer.ModelOptions, batches: list[data.Batch], rounds: int
) -> tuple[Sample, Sample, trainer.TrainState]:
    """Seconds of a step with and without ``mark``, alternately, each on its own state."""
    steps = [trainer.train_step(sizes, mark=mark) for mark in (True, False)]
    states = [trainer.init_state(sizes, 0) for _ in steps]
    found: list[list[float]] = [[], []]

    def take(which: int, batch: data.Batch) -> None:
        states[which], loss, _ = steps[which](states[which], batch)
        jax.block_until_ready((states[which], loss))

    for number in range(rounds + 2):
        # The order alternates, because the second step finds the batch in the caches.
        for which in (0, 1) if number % 2 else (1, 0):
            seconds = timed(lambda: take(which, batches[number % len(batches)]))  # noqa: B023
            if number > 1:
                found[which].append(seconds)
    return Sample(tuple(found[0])), Sample(tuple(found[1])), states[0]


def measure_mark(touched: deltackpt.TouchState, batches: list[data.Batch], rounds: int) -> Sample:
    """Seconds of ``mark`` alone, jitted and donated as in a step."""
    mark = jax.jit(deltackpt.touched.mark, donate_argnums=0)
    ids = [jax.device_put(batch.ids) for batch in batches]
    touched = jax.tree.map(jnp.copy, touched)

    def take() -> None:
        nonlocal touched
        for number in range(_TOGETHER):
            touched = mark(touched, ids[number % len(ids)])
        jax.block_until_ready(touched)

    return repeated(take, rounds, _TOGETHER)


def measure_track(tables: dict[str, jax.Array], rounds: int) -> tuple[Sample, Sample]:
    """Seconds of an optimizer step over dense gradients, with and without ``track``."""
    gradients = jax.tree.map(lambda table: jnp.zeros_like(table).at[::20].set(1e-3), tables)
    runs: list[Callable[[], None]] = []
    for tracked in (True, False):
        optimizer: optax.GradientTransformation = optax.adagrad(0.01)
        if tracked:
            optimizer = deltackpt.touched.track(optimizer, "*")
        runs.append(_Dense(optimizer, tables, gradients).step)
    taken: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for which, run in enumerate(runs):
            seconds = timed(run)
            if number:
                taken[which].append(seconds)
    return Sample(tuple(taken[0])), Sample(tuple(taken[1]))


class _Dense:
    """Tables under a dense optimizer."""

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        tables: dict[str, jax.Array],
        gradients: dict[str, jax.Array],
    ):
        self._params = jax.tree.map(jnp.copy, tables)
        self._gradients = gradients
        self._state = optimizer.init(self._params)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, gradients):
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        self._step = step

    def step(self) -> None:
        self._params, self._state = self._step(self._params, self._state, self._gradients)
        jax.block_until_ready(self._params)


def measure_proof(scale: float, rounds: int) -> Sample:
    """Seconds of the tracking audit of state W's deltas, 5 % of the rows touched, on this thread.

    The touched rows are found before the timing starts, as in a save. The audit checks the parent's
    sample and takes a new one.
    """
    held = state.make(scale)
    chosen = deltackpt.Tables(
        select="tables/*", slots={"tables/*": {"accumulator": "accumulators/{name}"}}
    )
    found: list[float] = []
    witness = None
    for number in range(rounds + 2):
        before = int(held.touched.clock)
        parts = deltackpt.handlers.split(held._asdict(), chosen)
        ids = state.random_ids(held, 0.05, number)
        if witness is None:
            witness = proof.of_restored(parts, held.touched, _RUNTIME)
        del parts
        held = jax.block_until_ready(state.change(held, ids))
        parts = deltackpt.handlers.split(held._asdict(), chosen)
        marks = flight.Embeddings(split=parts).marks
        readings = snapshot.clocks_of(parts, marks).readings
        intent = lineage.Intent(
            kind="delta",
            save_id=manifest.SaveId("benchmark", number, number),
            parent=None,
            since={reading.place: before for reading in readings},
            reason="",
            witness=witness,
            seen={reading.place: reading._replace(clock=before) for reading in readings},
        )
        stamps = match_marks(marks, parts.layout)
        sources = selection.Sources(parts.layout, parts.fields, stamps, _RUNTIME)
        sources.stamps.look(intent.since)
        for group, (_, spans), _ in sources.by_rows():
            sources.stamps.touched(group.name, spans)
        started = time.perf_counter()
        done = proof.take(sources, intent)
        if number > 1:
            found.append(time.perf_counter() - started)
        assert not done.faults, done.faults
        witness = done.witness
        del parts, marks, stamps, sources
    return Sample(tuple(found))


def repeated(call: Callable[[], object], rounds: int, together: int = 1) -> Sample:
    """Seconds of a call, after a warm-up call."""
    call()
    return Sample(tuple(timed(call) / together for _ in range(rounds)))


def run(options: argparse.Namespace) -> None:
    """Measures and prints the table."""
    rows = data.table_rows("thesis", options.scale)
    sizes = trainer.ModelOptions(rows=rows)
    traffic = data.ZipfTraffic(rows, options.batch, exponent=options.zipf, seed=0)
    batches = [traffic.batch(step) for step in range(8)]
    with_mark, without, trained = measure_steps(sizes, batches, options.repeats)
    mark = measure_mark(trained.touched, batches, options.repeats)
    report = Report(
        "What tracking costs a training step",
        sizes=(
            f"Thesis DLRM: {len(rows)} tables of {max(rows.values()):,} x {sizes.width}, bottom "
            f"{sizes.bottom}, top {sizes.top}, batch {options.batch}, Zipf {options.zipf:g}; "
            f"{options.repeats} interleaved rounds, median (range)"
        ),
    )
    alone = Sample(tuple(value / without.median for value in mark.values))
    report.compare("step with mark", with_mark, "step without", without, secs)
    report.state("mark alone", mark, secs)
    report.state("mark alone, of a step", alone, percent, bar=0.01)
    tracked, plain = measure_track(trained.tables, options.repeats)
    report.compare("dense Adagrad step with track", tracked, "without", plain, secs)
    prints = repeated(
        lambda: jax.block_until_ready(
            [
                fingerprints.fingerprint(table, [trained.accumulators[name]])
                for name, table in trained.tables.items()
            ]
        ),
        options.repeats,
    )
    report.state("fingerprints of all rows, per save", prints, secs)
    report.state(
        "tracking audit of a delta, state W",
        measure_proof(options.scale, options.repeats),
        secs,
        bar=0.002,
    )
    report.show(options.json, options.markdown)


def main() -> int:
    """Runs the command line."""
    parser = arguments(__doc__)
    parser.set_defaults(repeats=31)
    parser.add_argument("--batch", type=int, default=2048, help="samples in a batch")
    parser.add_argument("--zipf", type=float, default=1.07, help="exponent of the ids")
    run(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
