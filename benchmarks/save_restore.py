# SPDX-License-Identifier: Apache-2.0
"""Saves and restores of state W (1.04 GB, 5 % of the rows touched between saves) against Orbax.

python benchmarks/save_restore.py --json save_restore.json
python benchmarks/save_restore.py --scale 0.02 --repeats 2      # a smoke test
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import once
import state as states
import ways
from report import Report, Sample, arguments, megabytes, secs, timed, times

TOUCHED = 0.05
#: Deltas on the base in a restored chain.
CHAIN = 10
#: Undisturbed steps before and after each save whose cost to training is measured.
QUIET_STEPS = 30
OURS, THEIRS = ("power", "process"), ("orbax", "orbax-tuned")
#: Other codecs of deltas.
CODED = ("adaptive4", "int4", "lossless")
ALL = (*OURS, *THEIRS)

#: Limits of a restore's time, relative to reading the same bytes.
LIMITS = {"warm": 1.5, "cold": 1.2}
#: Seconds or bytes by (what, way), one for each round.
Figures = dict[tuple[str, str], list[float]]


def measure_saves(root: Path, state: states.State, rounds: int) -> tuple[Figures, states.State]:
    """Measures bytes, blocked time and time to commit of each kind of save, on an idle machine."""
    found: Figures = defaultdict(list)
    managers = {name: ways.WAYS[name](root / name) for name in (*ALL, *CODED)}
    step = 0
    for number in range(rounds + 1):
        for name, manager in managers.items():
            kinds = ("full",) if name in THEIRS else ("base", "delta")
            first = step
            for kind in kinds:
                step += 1
                state = states.change(state, states.random_ids(state, TOUCHED, step))
                jax.block_until_ready(state)
                ways.settle(state)
                started = time.perf_counter()
                manager.save(step, state, base=kind == "base")
                blocked = time.perf_counter() - started
                manager.wait()
                committed = time.perf_counter() - started
                step_dir = manager.root / str(step)
                part = step_dir / "embeddings"
                forced = timed(functools.partial(ways.force_to_disk, step_dir))
                if number:
                    found[f"{kind} blocked", name].append(blocked)
                    found[f"{kind} committed", name].append(committed)
                    found[f"{kind} forced", name].append(committed + forced)
                    found[f"{kind} bytes", name].append(ways.tree_bytes(step_dir))
                    found[f"{kind} rows", name].append(ways.tree_bytes(part))
            ways.keep_only(manager.root, first + 1)
    for manager in managers.values():
        manager.close()
    return found, state


def measure_training(root: Path, state: states.State, rounds: int) -> tuple[Figures, states.State]:
    """Measures the cost of a save to a training loop on the same cores."""
    found: Figures = defaultdict(list)
    managers = {name: ways.WAYS[name](root / f"{name}-lost") for name in ALL}
    step = 0
    for name in OURS:
        managers[name].save(0, state, base=True)
        managers[name].wait()
    ids = [states.lookups(state, seed) for seed in range(8)]

    def train(until: Callable[[int], bool]) -> tuple[float, int]:
        nonlocal state
        count, started = 0, time.perf_counter()
        while not until(count):
            state, loss = states.train(state, ids[count % len(ids)])
            jax.block_until_ready(loss)
            count += 1
        return time.perf_counter() - started, count

    train(QUIET_STEPS.__eq__)
    pool = ThreadPoolExecutor(1, "wait")
    for number in range(rounds + 1):
        for name, manager in managers.items():
            step += 1
            state = states.change(state, states.random_ids(state, TOUCHED, 1000 + step))
            jax.block_until_ready(state)
            ways.settle(state)
            before, _ = train(QUIET_STEPS.__eq__)
            started = time.perf_counter()
            manager.save(step, state)
            blocked = time.perf_counter() - started
            commit = pool.submit(manager.wait)
            busy, steps = train(functools.partial(committed, commit))
            commit.result()
            after, _ = train(QUIET_STEPS.__eq__)
            quiet = (before + after) / (2 * QUIET_STEPS)
            if number:
                found["lost", name].append(blocked + busy - steps * quiet)
                found["window", name].append(blocked + busy)
                found["step", name].append(quiet)
                if steps:
                    found["slower", name].append(busy / steps / quiet)
            if name in THEIRS:
                ways.keep_only(manager.root, step)
    pool.shutdown()
    for manager in managers.values():
        manager.close()
    return found, state


def committed(commit: Future[None], steps: int) -> bool:
    """Whether the save that ``commit`` waits for has ended; ignores ``steps``."""
    del steps
    return commit.done()


def measure_restores(
    root: Path, state: states.State, rounds: int, scale: float
) -> tuple[Figures, bool]:
    """Measures restores in new processes: ours of a base and ten deltas, Orbax's of a full save."""
    found: Figures = defaultdict(list)
    chains = ("power", "adaptive4")
    names = (*chains, *THEIRS)
    managers = {name: ways.WAYS[name](root / f"{name}-restore") for name in names}
    for number in range(CHAIN + 1):
        state = states.change(state, states.random_ids(state, TOUCHED, 5000 + number))
        for name in chains:
            managers[name].save(number, state, base=number == 0)
            managers[name].wait()
    for name in THEIRS:
        managers[name].save(0, state)
        managers[name].wait()
    for manager in managers.values():
        manager.close()
    expected = once.checksum(state)
    equal = True
    for name in ("power", *THEIRS):
        checked = once.measure("restore", name, managers[name].root, f"--scale={scale}", "--digest")
        equal = equal and checked["digest"] == expected
    for _ in range(rounds):
        for name in names:
            place = managers[name].root
            for cache in ("cold", "warm"):
                if cache == "cold" and not drop_caches():
                    continue
                if cache == "warm":
                    read_through(place)
                figures = once.measure("restore", name, place, f"--scale={scale}")
                found[f"restore {cache}", name].append(figures["seconds"])
                if name == "power":
                    if cache == "cold":
                        drop_caches()
                    limit = once.measure("read", name, place)
                    found[f"restore {cache}", "limit"].append(limit["seconds"])
    return found, equal


def measure_memory(root: Path, rounds: int, scale: float) -> Figures:
    """Extra memory peak of a new process that trains while it saves, relative to the state."""
    found: Figures = defaultdict(list)
    for number in range(rounds):
        for name in ("power", "power-block", *THEIRS):
            kinds = {"power": ("delta", "base"), "power-block": ("base",)}.get(name, ("base",))
            for kind in kinds:
                place = root / f"{name}-{kind}-{number}"
                figures = once.measure("memory", name, place, f"--kind={kind}", f"--scale={scale}")
                found[f"memory {kind}", name].append(figures["extra"] / figures["state"])
                shutil.rmtree(place)
    return found


def drop_caches() -> bool:
    """Empties the page cache; returns False if this user may not."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def read_through(root: Path) -> None:
    """Brings every file into the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def add_saves(report: Report, found: Figures) -> None:
    """Adds the figures of saves on an idle machine."""
    bars = {
        "delta bytes": ("bytes of a delta", (1 / 18, 1 / 18)),
        "delta committed": ("delta durable after", (1 / 15, 1 / 5)),
        "base committed": ("base durable after", (1 / 3, 1.0)),
        "delta blocked": ("delta save blocks for", (1.0, 1.0)),
    }
    for key, (title, limits) in bars.items():
        kind, what = key.split()
        unit = megabytes if what == "bytes" else secs
        for name, (other, bar) in itertools.product(OURS, zip(THEIRS, limits, strict=True)):
            mine, theirs = sample(found, key, name), sample(found, f"full {what}", other)
            report.compare(f"{title}, {name}", mine, ways.NAMES[other], theirs, unit, bar=bar)
            if what == "committed" and name == "power":
                # A fair comparison: Orbax with the fsyncs that it leaves out.
                forced = sample(found, "full forced", other)
                report.compare(
                    f"{title}, {name}", mine, f"{ways.NAMES[other]} + fsync", forced, unit
                )
        report.section()
    add_codecs(report, found)


def add_codecs(report: Report, found: Figures) -> None:
    """Adds the figures of deltas with other codecs; some cover tables and slots only."""
    bars = {
        ("bytes", "adaptive4"): (1 / 100, 1 / 100),
        ("committed", "adaptive4"): (1 / 25, 1 / 8),
        ("committed", "int4"): (1 / 25, 1 / 8),
        ("bytes", "lossless"): (1 / 18, 1 / 18),
        ("committed", "lossless"): (1 / 15, 1 / 5),
    }
    titles = {"bytes": "bytes of a delta", "committed": "delta durable after"}
    for (what, name), limits in bars.items():
        unit = megabytes if what == "bytes" else secs
        for other, bar in zip(THEIRS, limits, strict=True):
            mine = sample(found, f"delta {what}", name)
            theirs = sample(found, f"full {what}", other)
            title = f"{titles[what]}, {ways.NAMES[name]}"
            report.compare(title, mine, ways.NAMES[other], theirs, unit, bar=bar)
            if what == "bytes":
                rows = sample(found, "delta rows", name)
                report.compare(f"{title}, no dense", rows, ways.NAMES[other], theirs, unit)
    raw = sample(found, "delta committed", "power")
    for name in CODED:
        mine = sample(found, "delta committed", name)
        report.compare(f"delta durable after, {ways.NAMES[name]}", mine, "power, raw", raw, secs)
    report.section()


def add_training(report: Report, found: Figures) -> None:
    """Adds the cost of a save to a training loop."""
    for name, other in itertools.product(OURS, THEIRS):
        mine, theirs = sample(found, "lost", name), sample(found, "lost", other)
        title = f"training time lost per delta, {name}"
        report.compare(title, mine, ways.NAMES[other], theirs, secs, bar=1 / 15)
    for other in THEIRS:
        mine, theirs = sample(found, "window", "power"), sample(found, "window", other)
        report.compare("durable under training, power", mine, ways.NAMES[other], theirs, secs)
    for name in ALL:
        report.state(f"steps meanwhile, {ways.NAMES[name]}", sample(found, "slower", name), times)
    report.section()


def add_restores(report: Report, found: Figures) -> None:
    """Adds the figures of restores."""
    for cache in ("warm", "cold"):
        if not found[f"restore {cache}", "power"]:
            report.note("Page cache cold: not measured, dropping it needs root.")
            continue
        for name, kind in (("power", "deltas"), ("adaptive4", "adaptive4 deltas")):
            mine = sample(found, f"restore {cache}", name)
            title = f"restore of base + {CHAIN} {kind}, {cache}"
            for other, bar in zip(THEIRS, (1 / 4, 1 / 2), strict=True):
                theirs = sample(found, f"restore {cache}", other)
                report.compare(title, mine, ways.NAMES[other], theirs, secs, bar=bar)
            if name == "power":
                limit, bar = sample(found, f"restore {cache}", "limit"), LIMITS[cache]
                report.compare(
                    title, mine, "the same bytes into fresh memory", limit, secs, bar=bar
                )
    report.section()


def add_memory(report: Report, found: Figures) -> None:
    """Adds the extra peak of host memory, in states."""
    for kind, name, bar in (
        ("delta", "power", 0.15),
        ("base", "power", 0.3),
        ("base", "power-block", 0.3),
    ):
        title = f"extra memory of a {kind}, {ways.NAMES[name]}"
        report.state(title, sample(found, f"memory {kind}", name), states_of, bar=bar)
    for name in THEIRS:
        title = f"extra memory of a save, {ways.NAMES[name]}"
        report.state(title, sample(found, "memory base", name), states_of)


def sample(found: Figures, what: str, name: str) -> Sample:
    """One of the figures."""
    return Sample(tuple(found[what, name]))


def states_of(value: float) -> str:
    """A size as a multiple of the state's."""
    return f"{value:.3f} x state"


def run(options: argparse.Namespace, root: Path) -> None:
    """Measures the chosen parts and prints the table."""
    state = states.make(options.scale)
    rows = sum(states.rows_at(options.scale).values())
    sizes = (
        f"State: {rows:,} rows of {states.WIDTH} float32 in {len(states.ROWS)} tables, "
        f"{states.nbytes(state) / 1e9:.2f} GB with slots and the dense part; {TOUCHED:.0%} of the "
        f"rows touched between saves; {options.repeats} interleaved rounds, median (range)"
    )
    report = Report("Saving and restoring against Orbax", sizes=sizes)
    report.note(ways.TUNED)
    if "saves" in options.parts:
        found, state = measure_saves(root, state, options.repeats)
        add_saves(report, found)
    if "training" in options.parts:
        found, state = measure_training(root, state, options.repeats)
        add_training(report, found)
    if "restores" in options.parts:
        for path in root.iterdir():
            shutil.rmtree(path)
        found, equal = measure_restores(root, state, options.repeats, options.scale)
        add_restores(report, found)
        report.note(
            "Every state restored from raw rows was "
            + ("equal, by checksum." if equal else "DIFFERENT.")
        )
    if "memory" in options.parts:
        for path in root.iterdir():
            shutil.rmtree(path)
        add_memory(report, measure_memory(root, options.repeats, options.scale))
    report.show(options.json, options.markdown)


def main() -> int:
    """Runs the command line."""
    parser = arguments(__doc__)
    known = ("saves", "training", "restores", "memory")
    parser.add_argument("--parts", nargs="+", choices=known, default=known, help="what to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="save-restore-", dir=options.directory) as place:
        run(options, Path(place))
    return 0


if __name__ == "__main__":
    sys.exit(main())
