# SPDX-License-Identifier: Apache-2.0
"""The continuous checkpointing thesis's own comparison: total training and recovery time.

The thesis DLRM trains with full saves by stock Orbax every N steps, and with deltas every N and
every N / 10 steps, on uniform ids (which touch most rows) and on Zipf ids.

    python benchmarks/training.py --json training.json
    python benchmarks/training.py --scale 0.02 --repeats 2 --steps 20 --every 10 --batch 64
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import jax
import numpy as np
import once
import ways
from dlrm_jax import data, trainer
from report import Report, Sample, arguments, megabytes, secs

#: (name, way, number of saves per Orbax save); None saves nothing.
RUNS: tuple[tuple[str, str | None, int], ...] = (
    ("no saves", None, 0),
    ("Orbax defaults, every N", "orbax", 1),
    ("Orbax tuned, every N", "orbax-tuned", 1),
    ("deltas, power, every N", "power", 1),
    ("deltas, power, every N/10", "power", 10),
    ("deltas, process, every N/10", "process", 10),
)


#: Exponents for which the share of touched rows is reported.
EXPONENTS = (0.0, 0.9, 1.07, 1.2, 1.45)


class Loop:
    """The training loop, compiled once."""

    def __init__(self, options: argparse.Namespace, exponent: float):
        self.rows = data.table_rows("thesis", options.scale)
        self.sizes = trainer.ModelOptions(rows=self.rows)
        self._steps, self._every = options.steps, options.every
        traffic = data.ZipfTraffic(self.rows, options.batch, exponent=exponent, seed=0)
        # Drawn beforehand: only training and saving are measured.
        self._batches = [traffic.batch(step) for step in range(options.steps)]
        self._step = trainer.train_step(self.sizes)
        self.train(None, 0)

    def train(self, way: ways.Way | None, frequency: int) -> float:
        """Seconds of a training run, from a fresh state to the last save's commit."""
        state = jax.block_until_ready(trainer.init_state(self.sizes, 0))
        ways.settle(state)
        started = time.perf_counter()
        if way is not None:
            way.save(0, state, base=True)
        for number, batch in enumerate(self._batches, start=1):
            state, loss, _ = self._step(state, batch)
            jax.block_until_ready(loss)
            if way is not None and number % max(1, self._every // frequency) == 0:
                way.save(number, state)
        jax.block_until_ready(state)
        if way is not None:
            way.wait()
        return time.perf_counter() - started


def measure(
    options: argparse.Namespace, loop: Loop, root: Path
) -> dict[tuple[str, str], list[float]]:
    """Training time, bytes and recovery time of every run, round by round."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(options.repeats):
        for name, kind, frequency in RUNS:
            if kind is None:
                found["train", name].append(loop.train(None, 0))
                continue
            place = root / f"{kind}-{frequency}-{number}"
            way = ways.WAYS[kind](place)
            found["train", name].append(loop.train(way, frequency))
            way.close()
            found["bytes", name].append(ways.tree_bytes(place))
            scale = f"--scale={options.scale}"
            recovered = once.measure("restore", kind, place, "--dlrm", scale)
            found["restore", name].append(recovered["seconds"])
            shutil.rmtree(place)
    return found


def touched_share(options: argparse.Namespace, exponent: float, steps: int) -> float:
    """Share of the rows that a number of steps touches."""
    rows = data.table_rows("thesis", options.scale)
    traffic = data.ZipfTraffic(rows, options.batch, exponent=exponent, seed=0)
    batches = [traffic.batch(step) for step in range(steps)]
    touched = sum(
        len(np.unique(np.concatenate([batch.ids[name] for batch in batches]))) for name in rows
    )
    return touched / sum(rows.values())


def add(report: Report, options: argparse.Namespace, found, law: str) -> None:
    """Adds lines of one distribution of ids."""

    def sample(what: str, name: str) -> Sample:
        return Sample(tuple(found[what, name]))

    nothing = sample("train", "no saves")
    step_secs = nothing.median / options.steps
    full = [name for name, kind, _ in RUNS if kind in ("orbax", "orbax-tuned")]
    ours = [name for name, kind, _ in RUNS if kind in ("power", "process")]
    for name in (*full, *ours):
        report.compare(f"{law}: training, {name}", sample("train", name), "no saves", nothing, secs)
    # On average, half an interval is trained again.
    frequencies = {name: frequency for name, _, frequency in RUNS}
    again = {name: options.every / frequencies[name] / 2 * step_secs for name in (*full, *ours)}

    def recovery(name: str) -> Sample:
        return Sample(tuple(value + again[name] for value in found["restore", name]))

    for name, other in itertools.product(ours, full):
        mine, theirs = sample("train", name), sample("train", other)
        report.compare(f"{law}: training, {name}", mine, other, theirs, secs)
    for name, other in itertools.product(ours, full):
        mine, theirs = sample("restore", name), sample("restore", other)
        report.compare(f"{law}: restore, {name}", mine, other, theirs, secs, bar=1.0)
    for name, other in itertools.product(ours, full):
        label = f"{law}: restore and retrain, {name}"
        report.compare(label, recovery(name), other, recovery(other), secs)
    for name, kind, _ in RUNS:
        if kind is not None and kind != "process":
            report.state(f"{law}: bytes written, {name}", sample("bytes", name), megabytes)
    report.section()


def main() -> int:
    """Runs the command line."""
    parser = arguments(__doc__)
    parser.set_defaults(repeats=5)
    parser.add_argument("--batch", type=int, default=2048, help="samples in a batch")
    parser.add_argument("--steps", type=int, default=40, help="of one training")
    parser.add_argument("--every", type=int, default=20, help="N, steps between full saves")
    parser.add_argument("--zipf", type=float, default=1.07, help="exponent of the Zipf ids")
    options = parser.parse_args()
    rows = max(data.table_rows("thesis", options.scale).values())
    report = Report(
        "Whole training and recovery",
        sizes=(
            f"Thesis DLRM, 8 tables of {rows:,} x 64, batch {options.batch}, {options.steps} "
            f"steps, N = {options.every}; {options.repeats} interleaved rounds, median (range)"
        ),
    )
    report.note(ways.TUNED)
    with tempfile.TemporaryDirectory(prefix="training-", dir=options.directory) as place:
        for exponent, law in ((0.0, "uniform"), (options.zipf, f"Zipf {options.zipf:g}")):
            loop = Loop(options, exponent)
            found = measure(options, loop, Path(place))
            add(report, options, found, law)
    shares = [
        f"{touched_share(options, exponent, steps):.1%} in {steps} steps"
        + (" (uniform)" if exponent == 0 else f" (Zipf {exponent:g})")
        for exponent in EXPONENTS
        for steps in (max(1, options.every // 10), options.every)
    ]
    report.note(f"Rows touched: {', '.join(shares)}.")
    report.show(options.json, options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
