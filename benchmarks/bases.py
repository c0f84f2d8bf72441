# SPDX-License-Identifier: Apache-2.0
"""Measures what a base costs the trainer: extra memory, blocking and lost training time.

Each trial is a fresh process whose training step donates the state. `hold` and `block` are the two
modes of `base_snapshot`. `compacted` writes deltas, which another process merges into a base.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import fresh
import report as reports
import state as states
import ways
import workers_without_jax
from report import Report, interleaved, secs, times

TOUCHED = 0.05
#: Saves of a trial: their median, and the worst blocking and memory.
SAVES = 4
MODES = {
    "hold": '`base_snapshot="hold"`, a base',
    "block": '`base_snapshot="block"`, a base',
    "delta": "a delta",
    "compacted": '`bases="compacted"`, a delta',
}
#: Memory limit of a compaction, as a multiple of the state's size.
COMPACTION = 0.25
#: Bars: extra memory in states, of a base and of a delta; blocking, relative to writing a base.
_MEMORY_BAR, _DELTA_MEMORY_BAR, _BLOCKED_BAR = 0.3, 0.15, 0.1


def trial(mode: str, root: str, scale: float) -> dict[str, float]:
    """Saves in one mode during training; memory in states, everything else in seconds."""
    place = Path(root)
    warm = ways.Deltas(place / "warm")
    for step in range(2):  # One-time loading is not measured.
        warm.saved(step, states.make(0.001))
    warm.close()
    training = states.Loop(states.make(scale))
    training.change(TOUCHED, 0)
    training.quiet()
    nbytes = ways.nbytes(training.state)
    manager = ways.Deltas(place / "steps", base_snapshot="hold" if mode == "hold" else "block")
    bases = mode in ("hold", "block")
    if not bases:
        manager.saved(0, training.state, base=True)
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(1, SAVES + 1):
        training.change(TOUCHED, number)
        ways.warm_memory(training.state)
        fresh.reset_peak()
        training.quiet()
        # Staging memory left by the previous save is shared memory, and counts.
        before = fresh.status_bytes("VmHWM") - fresh.status_bytes("RssShmem")
        fresh.reset_peak()

        def save(step: int = number) -> None:
            manager.save(step, training.state, base=bases)

        cost = training.disturbed(save, manager.wait)
        cost["memory"] = (fresh.status_bytes("VmHWM") - before) / nbytes
        for figure, value in cost.items():
            found[figure].append(value)
    figures = {name: median(values) for name, values in found.items()}
    figures |= {name: max(found[name]) for name in ("blocked", "stall", "memory")}
    if mode == "compacted":
        figures |= compaction(training, place / "steps", nbytes)
    manager.close()
    return figures


def compaction(training: states.Loop, root: Path, nbytes: int) -> dict[str, float]:
    """Measures a compaction in its own process and the training time it costs."""
    quiet = training.quiet()
    limit = max(64 << 20, round(COMPACTION * nbytes))
    started = time.perf_counter()
    with fresh.started(workers_without_jax.compacted, root, limit) as process:
        busy, _, steps = training.until(process.wait)
        extra = fresh.heard(process)["extra"]
    quiet = (quiet + training.quiet()) / 2
    return {
        "compaction": time.perf_counter() - started,
        "compaction lost": busy - steps * quiet,
        "compaction memory": extra / nbytes,
    }


def bases(report: Report, options: argparse.Namespace, place: Path) -> None:
    modes = list(dict.fromkeys(("block", *options.modes)))

    def measure(mode: str) -> dict[str, float]:
        found = fresh.call(trial, mode, place / mode, options.scale)
        shutil.rmtree(place / mode)
        return found

    candidates = {mode: functools.partial(measure, mode) for mode in modes}
    found = interleaved(options.repeats, candidates, warm_up=0)
    nbytes = ways.nbytes(states.template(options.scale))
    report.sizes = (
        f"State W at {options.scale:g} of its rows, {nbytes / 1e6:.0f} MB; {TOUCHED:.0%} of the "
        f"rows touched between saves; {SAVES} saves a trial (memory, blocking and stall: the worst "
        "of them), each in a fresh process"
    )
    base = found("block", "written")
    for mode in modes:
        bar = _MEMORY_BAR if mode in ("hold", "block") else _DELTA_MEMORY_BAR
        report.state(f"extra memory in states, {mode}", found(mode, "memory"), times, bar=bar)
        for what in ("blocked", "stall", "lost", "written"):
            bar = _BLOCKED_BAR if what == "blocked" and mode != "delta" else None
            report.compare(f"{what}, {mode}", found(mode, what), "a base", base, bar=bar)
    remarks = []
    if "compacted" in modes:
        memory = found("compacted", "compaction memory")
        report.state("extra memory in states, compaction", memory, times, bar=_MEMORY_BAR)
        for what in ("compaction", "compaction lost"):
            report.compare(what, found("compacted", what), "a base", base)
        lost = found("compacted", "compaction lost").shown(secs)
        remarks = [f"A compaction on the trainer's cores cost training {lost}."]
    columns = ("mode", "extra memory", "`save()` blocks", "longest stall")
    rows = [
        [MODES[mode], (found(mode, "memory"), times), *found.cells(mode, "blocked", "stall")]
        for mode in modes
    ]
    report.publish("bases", columns, rows, *remarks)


if __name__ == "__main__":
    reports.main("Bases", bases, scale=0.4, repeats=5, modes=tuple(MODES))
