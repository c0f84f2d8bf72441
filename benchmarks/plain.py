# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of checkpoints: end-to-end training with default options, next to Orbax.

Each candidate trains 300 steps, saves every 20 (deltackpt: a base and 14 deltas), and ends when its
last save is durable. Then it trains 20 steps more and saves once while training waits. 5 % of the
rows change between two saves. A shorter round before it compiles everything.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from statistics import median

import jax
import numpy as np
import report as reports
import state as states
import ways
from report import Figures, Report, cpu_secs, megabytes, secs, times

NONE, MARKS, HASHES = "no checkpoints", "deltackpt, `TouchState`", "deltackpt, fingerprints"
#: A fifth of state W's rows, and state W.
SCALES = (0.2, 1.0)
_SHARE = 0.05
#: Limits of the end-to-end training time, as a multiple of that without checkpoints.
_BARS = {MARKS: 1.03, HASHES: 1.06}
_SAVING = (MARKS, HASHES, *reversed(ways.THEIRS))

#: The ids of each step, by table.
Batches = list[dict[str, np.ndarray]]


def batches_of(rows: dict[str, int], steps: int, every: int) -> Batches:
    """Draws the ids of each step: uniform, from 5 % of the rows that change with each save."""
    random = np.random.default_rng(0)
    found: Batches = []
    size = max(states.LOOKUPS, -(-max(1, round(max(rows.values()) * _SHARE)) // every))
    hot: dict[str, np.ndarray] = {}
    for number in range(steps):
        if number % every == 0:
            hot = {
                name: random.choice(count, max(1, round(count * _SHARE)), replace=False)
                for name, count in rows.items()
            }
        # Every hot row is in one of the batches, so that the share is exact.
        drawn = {
            name: np.concatenate([each[number % every :: every], random.choice(each, size)])
            for name, each in hot.items()
        }
        found.append({name: ids[:size].astype(np.int32) for name, ids in drawn.items()})
    return found


def opened(name: str, root: Path) -> ways.Way | None:
    """Opens the manager of a candidate; Orbax's keeps two checkpoints, to save disk space."""
    if name == NONE:
        return None
    if name in (MARKS, HASHES):
        return ways.Deltas(root, defaults=True)
    return ways.Orbax(root, compressed=name == "Orbax defaults", keep=2)


def run(
    name: str, scale: float, batches: Batches, steps: int, every: int, root: Path
) -> dict[str, float]:
    state = states.make(scale)
    if name != MARKS:
        state = state._replace(touched=None)
    saver = opened(name, root)
    state, _ = jax.block_until_ready(states.train(state, batches[0]))
    ways.warm_memory(state)
    blocked: list[float] = []
    cpu, started = cpu_secs(), time.perf_counter()
    for number in range(1, steps + 1):
        state, loss = states.train(state, batches[number - 1])
        jax.block_until_ready(loss)
        if saver is not None and number % every == 0:
            before = time.perf_counter()
            saver.save(number, state)
            blocked.append(time.perf_counter() - before)
    jax.block_until_ready(state)
    if saver is not None:
        saver.wait()
    found = {"whole": time.perf_counter() - started, "cpu": cpu_secs() - cpu}
    if saver is None:
        return found
    for number in range(steps + 1, steps + every + 1):
        state, loss = states.train(state, batches[number - 1])
    jax.block_until_ready(state)
    started = time.perf_counter()
    saver.save(steps + every, state)
    saver.wait()
    found["durable"] = time.perf_counter() - started
    found["bytes"] = nbytes = ways.tree_bytes(root / str(steps + every))
    saver.close()
    write = ways.write_secs(root / "plain", nbytes)
    return found | {"blocked": median(blocked[1:]), "write": write}


def add(report: Report, size: str, found: Figures, saves: int) -> list[list]:
    """Adds the lines of one state, and returns its rows of the published table."""
    rows = []
    for name in _SAVING:
        bars = [_BARS.get(name)]
        report.against(f"{size}: training, {name}", found, "whole", name, [NONE], bars=bars)
        lost, cpu = (
            found(name, what).minus(found(NONE, what)).mapped(lambda value: value / saves)
            for what in ("whole", "cpu")
        )
        blocked, durable, write = (found(name, what) for what in ("blocked", "durable", "write"))
        report.state(f"{size}: training time lost per save, {name}", lost)
        report.state(f"{size}: CPU per save, {name}", cpu)
        report.state(f"{size}: save() blocks, {name}", blocked)
        report.state(f"{size}: bytes of one save, {name}", found(name, "bytes"), megabytes)
        report.compare(f"{size}: durable, {name}", durable, "a write of its bytes", write)
        timings = [(sample, secs) for sample in (lost, cpu, blocked, durable, write)]
        relative = found(name, "whole").over(found(NONE, "whole")), times
        rows.append([size, name, relative, *timings, (found(name, "bytes"), megabytes)])
    report.section()
    return rows


def plain(report: Report, options: argparse.Namespace, place: Path) -> None:
    report.sizes = (
        f"{options.steps} steps, a save every {options.every} (a base, then deltas), "
        f"{_SHARE:.0%} of the rows changed between two saves. {ways.TUNED}"
    )
    rows: list[list] = []
    for scale in (each * options.scale for each in SCALES):
        batches = batches_of(states.rows_at(scale), options.steps + options.every, options.every)
        nbytes = ways.nbytes(states.template(scale))
        size = f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
        found = Figures()
        for number in range(options.repeats + 1):
            # The first round compiles, and is not counted.
            steps = options.steps if number else 2 * options.every
            for name in (NONE, *_SAVING):
                one = run(name, scale, batches, steps, options.every, place / "run")
                shutil.rmtree(place / "run", ignore_errors=True)
                if number:
                    found.add(name, one)
        rows += add(report, size, found, options.steps // options.every)
    columns = ("state", "candidate", "training time", "lost per save", "CPU per save")
    columns += ("`save()` blocks", "durable after", "write of its bytes", "bytes")
    report.publish("training", columns, rows)


if __name__ == "__main__":
    title = "End-to-end training time with default options"
    reports.main(title, plain, repeats=5, steps=300, every=20)
