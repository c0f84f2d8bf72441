# SPDX-License-Identifier: Apache-2.0
"""Measures what a base costs the trainer: extra memory, blocking and lost training time.

Each trial is a fresh process whose training step donates the state. `hold` and `block` are the two
modes of `base_snapshot`. `compacted` writes deltas, which another process merges into a base.
`rolling K` spreads the base over K deltas (`policy=Rolling(window=K)`).

python benchmarks/bases.py --json bases.json
python benchmarks/bases.py --scale 0.01 --repeats 1      # a smoke test
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import once
import state as states
import ways
from peak import reset_peak, status_bytes, trim
from report import Report, Sample, arguments, secs
from save_restore import read_through

import deltackpt

#: Compacts in a process that does not load jax.
COMPACT_ONCE = Path(__file__).parent / "compact_once.py"
TOUCHED = 0.05
#: Saves of a trial: their median, and the worst blocking and memory.
SAVES = 4
#: Undisturbed steps that time a single one.
QUIET_STEPS = 30
#: Saves over which a rolling base covers every row.
WINDOWS = (8, 16, 32)
ROLLING = tuple(f"rolling {window}" for window in WINDOWS)
MODES = ("hold", "block", "delta", "compacted", *ROLLING)
#: Memory limit of a compaction, as a multiple of the state's size.
COMPACTION = 0.25

#: Measurements of a trial.
Figures = dict[str, float]


def trial(mode: str, root: Path, scale: float) -> Figures:
    """Saves in one mode during training; memory in states, everything else in seconds."""
    warm_up(root / "warm")
    training = Training(states.make(scale))
    training.change(0)
    training.quiet()
    nbytes = states.nbytes(training.state)
    snapshot = "hold" if mode == "hold" else "block"
    policy = deltackpt.policies.Rolling(window=int(mode.split()[1])) if mode in ROLLING else None
    manager = ways.Deltas(root / "steps", "power", snapshot, policy=policy)
    bases = mode in ("hold", "block")
    if not bases:
        manager.save(0, training.state, base=True)
        manager.wait()
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(1, SAVES + 1):
        training.change(number)
        ways.settle(training.state)
        trim()
        reset_peak()
        quiet = training.quiet()
        # Staging memory left by the previous save is shared memory, and counts.
        before = status_bytes("VmHWM") - status_bytes("RssShmem")
        reset_peak()
        started = time.perf_counter()
        manager.save(number, training.state, base=bases)
        found["blocked"].append(time.perf_counter() - started)
        busy, longest, count = training.until(manager.wait)
        found["written"].append(time.perf_counter() - started)
        peak = status_bytes("VmHWM")
        quiet = (quiet + training.quiet()) / 2
        found["lost"].append(found["blocked"][-1] + busy - count * quiet)
        found["stall"].append(max(found["blocked"][-1], longest - quiet))
        found["memory"].append((peak - before) / nbytes)
    figures = {name: statistics.median(values) for name, values in found.items()}
    figures |= {name: max(found[name]) for name in ("blocked", "stall", "memory")}
    if mode == "compacted":
        figures |= compaction(training, root / "steps", nbytes)
    manager.close()
    return figures


def compaction(training: Training, root: Path, nbytes: int) -> Figures:
    """Measures a compaction in its own process and the training time it costs."""
    quiet = training.quiet()
    limit = max(64 << 20, round(COMPACTION * nbytes))
    command = [sys.executable, COMPACT_ONCE, str(root), str(limit)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    busy, _, count = training.until(process.wait)
    assert process.stdout is not None and process.returncode == 0
    told = json.loads(process.stdout.read())
    quiet = (quiet + training.quiet()) / 2
    return {
        "folded": time.perf_counter() - started,
        "fold lost": busy - count * quiet,
        "fold memory": told["extra"] / nbytes,
    }


class Training:
    """A loop whose steps donate the state."""

    def __init__(self, state: states.State):
        """Starts from a state."""
        self.state = state
        # Few distinct rows: they add to those that a save holds.
        self._ids = [states.lookups(state, seed) for seed in range(2)]
        self._pool = ThreadPoolExecutor(1, "wait")

    def change(self, seed: int) -> None:
        """Touches a share of the rows."""
        self.state = states.change(self.state, states.random_ids(self.state, TOUCHED, seed))
        jax.block_until_ready(self.state)

    def steps(self, until: Callable[[int], bool]) -> tuple[float, float, int]:
        """Trains; returns the total seconds, those of the longest step, and the step count."""
        count, longest, started = 0, 0.0, time.perf_counter()
        while not until(count):
            begun = time.perf_counter()
            self.state, loss = states.train(self.state, self._ids[count % len(self._ids)])
            jax.block_until_ready(loss)
            longest = max(longest, time.perf_counter() - begun)
            count += 1
        return time.perf_counter() - started, longest, count

    def quiet(self) -> float:
        """Seconds of an undisturbed step."""
        return self.steps(QUIET_STEPS.__eq__)[0] / QUIET_STEPS

    def until(self, end: Callable[[], object]) -> tuple[float, float, int]:
        """Trains for at least one step, until a call in another thread returns."""
        ended = self._pool.submit(end)
        found = self.steps(lambda count: count > 0 and ended.done())
        ended.result()
        return found


def warm_up(root: Path) -> None:
    """Saves a small state, so that one-time loading is not measured."""
    manager = ways.Deltas(root, "power")
    for step in range(2):
        manager.save(step, states.make(0.001))
        manager.wait()
    manager.close()
    shutil.rmtree(root)


def restores(
    root: Path, scale: float, rounds: int, windows: Sequence[int]
) -> dict[str, list[float]]:
    """Seconds of a warm restore of a window of saves, with a base below them and without."""
    places: dict[str, Path] = {}
    for window in windows:
        for name, policy in (
            (f"base + {window} deltas", None),
            (f"rolling {window}", deltackpt.policies.Rolling(window=window)),
        ):
            places[name] = root / name.replace(" ", "-")
            training = Training(states.make(scale))
            manager = ways.Deltas(places[name], "power", "block", policy=policy)
            for step in range(window + 1):
                manager.save(step, training.state, base=step == 0)
                manager.wait()
                training.change(step)
            manager.close()
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, place in places.items():
            read_through(place)
            figures = once.measure("restore", "power", place, f"--scale={scale}")
            found[name].append(figures["seconds"])
    return found


def measure(mode: str, root: Path, scale: float) -> Figures:
    """Runs a trial in its own process."""
    command = [sys.executable, __file__, "--trial", mode, str(root), f"--scale={scale}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    shutil.rmtree(root)
    return json.loads(done.stdout.splitlines()[-1])


def add_lines(report: Report, found: dict[str, list[Figures]]) -> None:
    """Adds the lines of all modes."""

    def sample(mode: str, what: str) -> Sample:
        return Sample(tuple(figures[what] for figures in found[mode]))

    base = sample("block", "written")
    report.state("base written, block", base, secs)
    for mode in found:
        report.section()
        bars = {} if mode == "delta" else {"memory": 0.3, "blocked": 0.1}
        memory = sample(mode, "memory")
        report.state(f"extra memory, {mode}", memory, states_of, bar=bars.get("memory"))
        for what in ("blocked", "stall", "lost"):
            title = {"stall": "longest stall", "lost": "training time lost"}.get(what, what)
            mine = sample(mode, what)
            report.compare(f"{title}, {mode}", mine, "base", base, secs, bar=bars.get(what))
        report.compare(f"written, {mode}", sample(mode, "written"), "base", base, secs)
        if mode == "compacted":
            report.state(
                "extra memory, compaction", sample(mode, "fold memory"), states_of, bar=0.3
            )
            report.compare("folded, compaction", sample(mode, "folded"), "base", base, secs)
            lost = sample(mode, "fold lost")
            report.compare("training time lost, compaction", lost, "base", base, secs)


def states_of(value: float) -> str:
    """A size as a multiple of the state's."""
    return f"{value:.3f} x state"


def run(options: argparse.Namespace, root: Path) -> None:
    """Measures the chosen modes in turn and prints the table."""
    found: dict[str, list[Figures]] = defaultdict(list)
    for number in range(options.repeats):
        for mode in dict.fromkeys(("block", *options.modes)):
            found[mode].append(measure(mode, root / f"{mode}-{number}", options.scale))
    rows = sum(states.rows_at(options.scale).values())
    nbytes = states.nbytes(states.template(options.scale))
    sizes = (
        f"State: {rows:,} rows of {states.WIDTH} float32 in {len(states.ROWS)} tables, "
        f"{nbytes / 1e9:.2f} GB with slots and the dense part; {TOUCHED:.0%} of the rows touched "
        f"between saves; {SAVES} saves a trial (memory, blocking and stall: the worst of them), "
        f"{options.repeats} interleaved trials in fresh processes, median (range)"
    )
    report = Report("Bases", sizes=sizes)
    add_lines(report, found)
    windows = [window for window in WINDOWS if f"rolling {window}" in options.modes]
    if windows:
        report.section()
        seconds = restores(root, options.scale, options.repeats, windows)
        for window in windows:
            ours, other = f"rolling {window}", f"base + {window} deltas"
            mine, theirs = Sample(tuple(seconds[ours])), Sample(tuple(seconds[other]))
            report.compare(f"restore, {ours}", mine, other, theirs, secs, bar=1.5)
    report.show(options.json, options.markdown)


def main() -> int:
    """Runs the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="to measure")
    parser.add_argument("--trial", nargs=2, metavar=("MODE", "ROOT"), help="measure one, as JSON")
    options = parser.parse_args()
    if options.trial:
        print(json.dumps(trial(options.trial[0], Path(options.trial[1]), options.scale)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bases-", dir=options.directory) as place:
        run(options, Path(place))
    return 0


if __name__ == "__main__":
    sys.exit(main())
