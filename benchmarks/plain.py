# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of checkpoints: end-to-end training with default options, next to Orbax.

Each candidate trains 300 steps, saves every 20 (deltackpt: a base and 14 deltas), and ends when its
last save is durable. Then it trains 20 steps more and saves once while training waits. 5 % of the
rows change between two saves. A shorter round before it compiles everything.

    python benchmarks/plain.py --json plain.json --record docs/assets/cost.json
    python benchmarks/plain.py --scale 0.01 --repeats 1 --steps 40      # a smoke test
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import state as states
import step
import ways
from dlrm_jax import trainer
from report import Report, Sample, arguments, machine, megabytes, secs

import deltackpt

NONE, MARKS, HASHES = "no checkpoints", "deltackpt, TouchState", "deltackpt, fingerprints"
TUNED, DEFAULTS = "Orbax tuned", "Orbax defaults"
#: A fifth of state W's rows, and state W.
SCALES = (0.2, 1.0)
_SHARE = 0.05
#: Limits of the end-to-end training time, as a multiple of that without checkpoints.
_BARS = {MARKS: 1.03, HASHES: 1.06}


class Batches:
    """The ids of each step: uniform, from 5 % of the rows that change with each save."""

    def __init__(self, rows: dict[str, int], steps: int, every: int):
        """Draws all batches up front, so that no training waits for them."""
        random = np.random.default_rng(0)
        self._steps: list[dict[str, np.ndarray]] = []
        most = max(1, round(max(rows.values()) * _SHARE))
        size = max(states.LOOKUPS, -(-most // every))
        for number in range(steps):
            if number % every == 0:
                hot = {
                    name: random.choice(count, max(1, round(count * _SHARE)), replace=False)
                    for name, count in rows.items()
                }
            # Every hot row is in one of the batches, so that the share is exact.
            self._steps.append(
                {
                    name: np.concatenate(
                        [each[number % every :: every], random.choice(each, size)]
                    )[:size].astype(np.int32)
                    for name, each in hot.items()
                }
            )

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return self._steps[number]


class Plain(ways.Deltas):
    """deltackpt with default options."""

    def __init__(self, root: Path):
        self.root = root
        self._manager = deltackpt.CheckpointManager(
            root, handlers={"embeddings": trainer.checkpoint_tables()}
        )


def opened(name: str, root: Path) -> ways.Way | None:
    """Opens the manager of a candidate; Orbax's keeps two checkpoints, to save disk space."""
    if name == NONE:
        return None
    if name in (MARKS, HASHES):
        return Plain(root)
    return ways.Orbax(root, compressed=name == DEFAULTS, keep=2)


class Run(NamedTuple):
    """One training: seconds, CPU seconds, bytes of one save, and seconds to write as many."""

    whole: float
    cpu: float
    blocked: float
    save_bytes: float
    durable: float
    limit: float


def run(name: str, scale: float, batches: Batches, steps: int, every: int, root: Path) -> Run:
    """Trains from a fresh state with one candidate."""
    state = states.make(scale)
    if name != MARKS:
        state = state._replace(touched=None)
    saver = opened(name, root)
    state, _ = jax.block_until_ready(states.train(state, batches[0]))
    ways.settle(state)
    blocked: list[float] = []
    cpu, started = _cpu(), time.perf_counter()
    for number in range(1, steps + 1):
        state, loss = states.train(state, batches[number - 1])
        jax.block_until_ready(loss)
        if saver is not None and number % every == 0:
            before = time.perf_counter()
            saver.save(number, state)
            blocked.append(time.perf_counter() - before)
    jax.block_until_ready(state)
    if saver is None:
        return Run(time.perf_counter() - started, _cpu() - cpu, 0, 0, 0, 0)
    saver.wait()
    whole, cpu = time.perf_counter() - started, _cpu() - cpu
    for number in range(steps + 1, steps + every + 1):
        state, loss = states.train(state, batches[number - 1])
    jax.block_until_ready(state)
    started = time.perf_counter()
    saver.save(steps + every, state)
    saver.wait()
    durable = time.perf_counter() - started
    nbytes = ways.tree_bytes(root / str(steps + every))
    saver.close()
    limit = step.written(root / "plain", nbytes)
    return Run(whole, cpu, Sample(tuple(blocked[1:])).median, nbytes, durable, limit)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def add(report: Report, size: str, found: dict[str, list[Run]], saves: int) -> dict[str, Any]:
    """Adds the lines of one state, and returns its part of the record."""

    def sample(name: str, field: str) -> Sample:
        return Sample(tuple(getattr(one, field) for one in found[name]))

    record: dict[str, Any] = {"state": size}
    for name in (MARKS, HASHES, TUNED, DEFAULTS):
        whole, none = sample(name, "whole"), sample(NONE, "whole")
        bar = _BARS.get(name)
        report.compare(f"{size}: training, {name}", whole, NONE, none, secs, bar=bar)
        lost = Sample(
            tuple((a - b) / saves for a, b in zip(whole.values, none.values, strict=True))
        )
        more = Sample(
            tuple((a.cpu - b.cpu) / saves for a, b in zip(found[name], found[NONE], strict=True))
        )
        report.state(f"{size}: training time lost per save, {name}", lost, secs)
        report.state(f"{size}: CPU per save, {name}", more, secs)
        report.state(f"{size}: save() blocks, {name}", sample(name, "blocked"), secs)
        report.state(f"{size}: bytes of one save, {name}", sample(name, "save_bytes"), megabytes)
        report.compare(
            f"{size}: durable after, {name}",
            sample(name, "durable"),
            "a write of its bytes",
            sample(name, "limit"),
            secs,
        )
        record[name] = {
            "training": _spread(whole.over(none)),
            "lost_secs": _spread(lost),
            "cpu_secs": _spread(more),
            "blocked_secs": _spread(sample(name, "blocked")),
            "bytes": _spread(sample(name, "save_bytes")),
            "durable_secs": _spread(sample(name, "durable")),
            "write_secs": _spread(sample(name, "limit")),
        }
    report.section()
    return record


def _spread(sample: Sample) -> list[float]:
    """Returns the median, the least and the most, to three digits."""
    of = (sample.median, min(sample.values), max(sample.values))
    return [float(f"{value:.3g}") for value in of]


def main() -> int:
    """Runs the command line."""
    parser = arguments(__doc__)
    parser.set_defaults(repeats=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps between two saves")
    parser.add_argument("--record", type=Path, help="write what the figures are drawn from")
    options = parser.parse_args()
    saves = options.steps // options.every
    load = os.getloadavg()[0]
    report = Report(
        "End-to-end training time with default options",
        sizes=(
            f"{options.steps} steps, a save every {options.every}, {_SHARE:.0%} of the rows "
            f"between two saves; {options.repeats} rounds, median (range). {ways.TUNED}"
        ),
    )
    records = []
    for scale in SCALES:
        scale *= options.scale
        rows = states.rows_at(scale)
        batches = Batches(rows, options.steps + options.every, options.every)
        nbytes = states.nbytes(states.template(scale))
        size = f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
        found: dict[str, list[Run]] = collections.defaultdict(list)
        for number in range(options.repeats + 1):
            # The first round compiles, and is not counted.
            steps = options.steps if number else 2 * options.every
            for name in (NONE, MARKS, HASHES, TUNED, DEFAULTS):
                with tempfile.TemporaryDirectory(dir=options.directory) as place:
                    root = Path(place) / "run"
                    one = run(name, scale, batches, steps, options.every, root)
                if number:
                    found[name].append(one)
                    print(f"{size}, {name}: {one.whole:.2f} s", flush=True)
        records.append(add(report, size, found, saves))
    report.show(options.json, options.markdown)
    if options.record is not None:
        record = {
            "commit": _commit(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine(),
            "load_before": round(load, 2),
            "command": f"python benchmarks/plain.py --steps {options.steps}",
            "rounds": options.repeats,
            "steps": options.steps,
            "save_every_steps": options.every,
            "rows_changed": _SHARE,
            "values": "median, least, most",
            "states": records,
        }
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _commit() -> str:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
