# SPDX-License-Identifier: Apache-2.0
"""Saves of a state on a GPU: their cost to training, against Orbax, and encoding on the device.

A loop dispatches training steps a few ahead, as real loops do, and records when the device
completes each. The time of save() includes the steps in flight, which every save waits for. The
completions show three times: the idle gap at the save (less an undisturbed step), the time of steps
while the save is in flight, and the training time lost until its commit.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import report as reports
import state as states
import ways
from report import Figures, Report, Sample, interleaved, percent, speed, timed, times

from deltackpt import codecs
from deltackpt.save import capture, encode

TOUCHED = 0.05
#: Steps that are waiting for the device or running there.
AHEAD = 3
#: What is saved: name to (way, kind).
SAVES = {
    "delta of 5% of the rows, `raw`": ("power", "delta"),
    "the same, `adaptive4`": ("adaptive4", "delta"),
    'base, `base_snapshot="hold"` (default)': ("power", "base"),
    'base, `base_snapshot="block"`': ("power-block", "base"),
    "Orbax tuned": ("Orbax tuned", "full"),
    "Orbax defaults": ("Orbax defaults", "full"),
}
DELTA = next(iter(SAVES))
#: Label and target of each figure of a delta.
FIGURES = {
    "blocked": ("`save()` takes", 1.0),
    "lost": ("training time lost", 1 / 15),
    "committed": ("durable after", None),
    "gap": ("without a step at the save", None),
}
CODECS = ("bf16", "int8", "int4", "adaptive4", "adaptive2")
#: Rows that are encoded at once: 64 MiB, as in a save on a device.
ENCODED_ROWS = 1 << 18


class Loop:
    """Training that runs ahead of the device; a thread records when each step completes."""

    def __init__(self, state: states.State, step_secs: float):
        """Compiles the step and makes it last at least ``step_secs``."""
        self.state = state
        self.completed: list[float] = []
        #: Steps since ``begin``.
        self.dispatched = 0
        self._ids = [jax.device_put(states.lookups(state, seed)) for seed in range(8)]
        self._room = threading.Semaphore(AHEAD)
        self._pending: queue.SimpleQueue[jax.Array | None] = queue.SimpleQueue()
        self._work = 1

        def once() -> None:
            self.state, loss = states.train(self.state, self._ids[0], self._work)
            jax.block_until_ready((self.state, loss))

        while min(timed(once) for _ in range(3)) < step_secs:
            self._work *= 2
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

    def steps(self, count: int) -> None:
        """Dispatches steps; waits if too many are incomplete."""
        for _ in range(count):
            self._room.acquire()
            ids = self._ids[self.dispatched % len(self._ids)]
            self.state, loss = states.train(self.state, ids, self._work)
            self._pending.put(loss)
            self.dispatched += 1

    def begin(self) -> None:
        """Waits for earlier steps and clears their completions."""
        self.drain()
        self.completed.clear()
        self.dispatched = 0

    def drain(self) -> None:
        """Waits until every step is complete and recorded."""
        for _ in range(AHEAD):
            self._room.acquire()
        self._room.release(AHEAD)

    def close(self) -> None:
        self._pending.put(None)
        self._watcher.join()

    def _watch(self) -> None:
        while (loss := self._pending.get()) is not None:
            loss.block_until_ready()
            self.completed.append(time.perf_counter())
            self._room.release()


def disturbed(
    loop: Loop, manager: ways.Way, step: int, kind: str, quiet_steps: int, pool: ThreadPoolExecutor
) -> dict[str, float]:
    loop.begin()
    loop.steps(quiet_steps)
    first = loop.dispatched
    started = time.perf_counter()
    manager.save(step, loop.state, base=kind == "base")
    blocked = time.perf_counter() - started
    commit = pool.submit(committed_at, manager)
    # At least two steps: the gap before the first, and an interval of steps after it.
    loop.steps(2)
    while not commit.done():
        loop.steps(1)
    last = loop.dispatched
    loop.steps(quiet_steps)
    loop.drain()
    done = np.array(loop.completed)
    gaps = np.diff(done)
    # During the first steps the device waits for the host.
    quiet = float(np.median([*gaps[AHEAD : first - 1], *gaps[last:]]))
    found = {
        "blocked": blocked,
        "gap": gaps[first - 1] - quiet,
        "lost": done[last - 1] - done[first - 1] - (last - first) * quiet,
        "committed": commit.result() - started,
        "slower": (done[last - 1] - done[first]) / (last - 1 - first) / quiet,
        "quiet": quiet,
    }
    return {figure: float(value) for figure, value in found.items()}


def committed_at(manager: ways.Way) -> float:
    """Waits for the save in flight; returns the time of its commit."""
    manager.wait()
    return time.perf_counter()


def measure_training(root: Path, state: states.State, options: argparse.Namespace) -> Figures:
    """Measures the cost of each kind of save to training, in turn; the first round compiles."""
    managers = ways.opened(root, (way for way, _ in SAVES.values()))
    loop, step = Loop(state, options.step_secs), 0

    def save(way: str, kind: str) -> dict[str, float]:
        nonlocal step
        step += 2
        if kind == "delta":
            managers[way].saved(step - 1, loop.state, base=True)
        ids = states.random_ids(loop.state, TOUCHED, step)
        loop.state = jax.block_until_ready(states.change(loop.state, ids))
        ways.warm_memory(loop.state)
        figures = disturbed(loop, managers[way], step, kind, options.steps, pool)
        ways.keep_only(managers[way].root, step - 1)
        return figures

    with ThreadPoolExecutor(1, "wait") as pool:
        candidates = {name: functools.partial(save, *what) for name, what in SAVES.items()}
        found = interleaved(options.repeats, candidates)
    loop.close()
    for manager in managers.values():
        manager.close()
    return found


def encode_speed(name: str, rows: jax.Array) -> dict[str, float]:
    """Measures seconds per GB of rows encoded on the device."""
    codec = codecs.get(name)
    seconds = timed(lambda: jax.block_until_ready(encode.encode(codec, rows)))
    return {"encode": seconds / rows.nbytes * 1e9}


def alike(name: str, rows: jax.Array) -> float:
    """Share of rows for which the device and the CPU store the same bytes."""
    codec, count = codecs.get(name), rows.shape[0]
    on_device = encode.to_host(encode.encode(codec, rows), count)
    on_host = encode.on_host(codec, np.asarray(rows))
    same = np.ones(count, bool)
    for suffix, array in on_host.arrays.items():
        equal = np.asarray(on_device.arrays[suffix]) == np.asarray(array)
        same &= equal.reshape(count, -1).all(axis=1)
    return float(same.mean())


def gpu(report: Report, options: argparse.Namespace, root: Path) -> None:
    device = jax.devices()[0]
    if device.platform != "gpu":
        if not options.allow_cpu:
            sys.exit(f"expected a GPU, found {device.platform}; see --allow-cpu")
        report.note("Not on a GPU: this shows that the benchmark runs, and nothing else.")
    state = states.make(options.scale)
    rows = sum(table.shape[0] for table in state.tables.values())
    report.sizes = (
        f"{device.device_kind} ({device.platform}); {rows:,} rows of {states.WIDTH} float32, "
        f"{ways.nbytes(state) / 1e9:.2f} GB with slots and the dense part; {TOUCHED:.0%} of the "
        f"rows touched between saves; {AHEAD} steps ahead. {ways.TUNED}"
    )
    found = measure_training(root, state, options)
    ours = [name for name in SAVES if name not in ways.THEIRS]
    for (figure, (words, bar)), name in itertools.product(FIGURES.items(), ours):
        bars = (bar, bar) if name == DELTA else ()
        report.against(f"{name}: {words}", found, figure, name, ways.THEIRS, bars=bars)
    for name in SAVES:
        report.state(f"{name}: steps meanwhile", found(name, "slower"), times)
    report.state("undisturbed step", found(DELTA, "quiet"))
    report.section()
    size = max(1024, round(ENCODED_ROWS * min(1.0, options.scale)))
    random = jax.random.normal(jax.random.key(0), (size, states.WIDTH))
    speeds = {name: functools.partial(encode_speed, name, random) for name in CODECS}
    encoded = interleaved(options.repeats, speeds)
    few, table = random[: capture.piece_rows(random.shape[1:])], []
    for name in CODECS:
        same = Sample((alike(name, few),))
        report.state(f"{name}: encode on the device", encoded(name, "encode"), speed)
        report.state(f"{name}: rows stored as the CPU encodes them", same, percent)
        table.append([f"`{name}`", *encoded.cells(name, encode=speed), (same, percent)])
    shown = list(FIGURES)[:3]
    columns = ("save", *(FIGURES[figure][0] for figure in shown))
    report.publish("saves", columns, found.rows(SAVES, *shown))
    report.publish("encoding", ("codec", "encode on the device", "rows as the CPU's"), table)


if __name__ == "__main__":
    reports.main(
        "Saves of a state on a GPU",
        gpu,
        allow_cpu=False,
        steps=30,  # Undisturbed, around each save.
        step_secs=0.01,  # Of a training step, at least.
    )
