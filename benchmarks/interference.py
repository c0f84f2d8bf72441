# SPDX-License-Identifier: Apache-2.0
"""The load-imbalance table: steps of a job of several ranks, with and without saves.

Ranks are processes of this machine, joined by gloo; a step lasts as long as on the slowest rank.
They train in three ways. The first has no saves. The second saves deltas to a bucket, with a
staging directory and an uploader for each rank, one base and one compaction. The third saves as
often with tuned Orbax to a directory. A run ends when its background work is done. The ranks use
all cores, or leave one to the background work. It needs ``make servers``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import fresh
import jax
import jax.numpy as jnp
import numpy as np
import report as reports
import scaling
import state as states
import ways
from buckets import Bucketed
from jax.experimental import multihost_utils
from report import Figures, Report, cpu_secs, times
from running import s3_server

import deltackpt

NONE, OURS, THEIRS = "no saves", "deltackpt", "Orbax tuned"
FREE, FULL = "a core is free", "all cores are in use"
#: Bars relative to no saves if a core is free; otherwise Orbax's figures are the bars.
_BARS = {"p99": 1.10, "longest": 1.3}
_WORDS = {"p99": "p99 of the steps without a save", "longest": "longest step of any rank"}
#: Figures of the slowest rank; others are sums.
_SLOWEST = ("p99", "longest", "all steps")
#: Share of the rows that one step touches.
_TOUCHED = 0.0025
_WIDTH = 512
_CPU = re.compile(r"([\d.]+) s of CPU")


# Code of the ranks.


@partial(jax.jit, static_argnums=2)
def _multiply(rows: jax.Array, kernel: jax.Array, count: int) -> jax.Array:
    """Computes on the rows of this rank, then waits for all other ranks."""
    return jnp.sum(jax.lax.fori_loop(0, count, lambda _, rows: jnp.tanh(rows @ kernel), rows))


class Training:
    """The training steps of a job."""

    def __init__(self, scale: float, step_secs: float):
        by_rows, everywhere = scaling.shardings()
        shape = (_WIDTH * jax.device_count(), _WIDTH)
        self._rows = jax.jit(lambda: jnp.ones(shape), out_shardings=by_rows)()
        self._kernel = jax.jit(lambda: jnp.eye(_WIDTH) * 0.5, out_shardings=everywhere)()
        self.state = scaling.make(scale)
        self._number, self._count = 0, 1
        while (worst := self._least_secs()) < step_secs:
            grown = int(self._count * min(4.0, 1.1 * step_secs / worst))
            self._count = max(self._count + 1, grown)

    def _least_secs(self) -> float:
        """Seconds of the multiplications of a step, as process 0 measures them."""

        def once() -> None:
            jax.block_until_ready(_multiply(self._rows, self._kernel, self._count))

        took = min(reports.timed(once) for _ in range(3))
        return float(multihost_utils.broadcast_one_to_all(np.float64(took)))

    def step(self) -> None:
        self._number += 1
        ids = states.random_ids(self.state, _TOUCHED, self._number)
        self.state = states.change(self.state, ids)
        jax.block_until_ready((self.state, _multiply(self._rows, self._kernel, self._count)))


def trained(
    directory: str, endpoint: str, sizes: dict[str, Any], background: list[int] | None
) -> list[dict[str, Any]]:
    """This rank's view of all runs; ``background`` are the cores that training leaves free."""
    cores = os.sched_getaffinity(0)
    # Threads inherit the cores of the one that starts them: XLA's here, a manager's below.
    os.sched_setaffinity(0, cores - set(background or ()))
    training, found = Training(sizes["scale"], sizes["step_ms"] / 1e3), []
    limit = [] if background is None else ["taskset", "-c", ",".join(map(str, background))]
    compact = [*limit, "nice", "-n10", sys.executable, "-m", "deltackpt.cli", "compact"]
    for number in range(sizes["repeats"] + 1):
        names = (NONE, OURS, THEIRS)
        for name in names if number % 2 else names[::-1]:
            place = Path(directory, f"{name.split()[0]}-{number}")
            url = f"s3://bench/{Path(directory).name}-{number}"
            way, command = None, list[str]()
            os.sched_setaffinity(0, cores)
            if name == OURS:
                limited = deltackpt.Background(cpus=background)
                way = Bucketed(url, place, endpoint, shared=False, background=limited)
                command = [*compact, url, "--endpoint", endpoint, "--workers=1"]
            elif name == THEIRS:
                way = ways.WAYS[THEIRS](place)
            os.sched_setaffinity(0, cores - set(background or ()))
            view = _run(training, way, sizes, command)
            if name == OURS:
                view["uploaders"] = _uploader_cpu(place)
            if number:  # The first round compiles.
                found.append(view | {"name": name})
            multihost_utils.sync_global_devices("done")
            if jax.process_index() == 0:
                shutil.rmtree(place, ignore_errors=True)
                os.sync()
            multihost_utils.sync_global_devices("removed")
    return found


def _run(
    training: Training, way: ways.Way | None, sizes: dict[str, Any], compact: list[str]
) -> dict[str, Any]:
    """Trains once; process 0 starts the compaction before the last save."""
    steps, every = sizes["steps"], sizes["every"]
    for _ in range(3):
        training.step()
    multihost_utils.sync_global_devices("begin")
    plain, saving, cpu = list[float](), list[float](), cpu_secs()
    compactor: subprocess.Popen[bytes] | None = None
    for step in range(steps):
        compacts = bool(compact) and step == steps - every // 2 - 1
        if way is not None and compacts:
            way.wait()  # Untimed, and at full size there is nothing to wait for.
        started = time.perf_counter()
        training.step()
        saves = way is not None and step % every == every // 2
        if way is not None and saves:
            way.save(step, training.state, base=step < every)
        (saving if saves else plain).append(time.perf_counter() - started)
        if compacts and jax.process_index() == 0:
            compactor = subprocess.Popen(compact, stdout=subprocess.DEVNULL)
    if way is not None:
        way.wait()
        way.close()
    found = {
        "p99": float(np.percentile(plain, 99)),
        "longest": max(plain + saving),
        "all steps": sum(plain + saving),
        "ranks": cpu_secs() - cpu,
        "compaction": 0.0,
    }
    if compactor is not None:
        _, status, used = os.wait4(compactor.pid, 0)
        compactor.returncode = os.waitstatus_to_exitcode(status)
        if compactor.returncode:
            raise RuntimeError(f"the compaction ended with {compactor.returncode}")
        found["compaction"] = used.ru_utime + used.ru_stime
    return found


def _uploader_cpu(stage: Path) -> float:
    """CPU seconds of this rank's uploader, once it has ended."""
    log, deadline = stage / f"process-{jax.process_index()}" / "uploader.log", time.monotonic() + 60
    while time.monotonic() < deadline:
        if log.exists() and (found := _CPU.findall(log.read_text())):
            return sum(map(float, found))
        time.sleep(0.1)
    raise RuntimeError(f"{log}: expected the end of an uploader, found none in 60 s")


# Code of the launcher.


def add(report: Report, found: Figures, title: str) -> list[list]:
    """Adds the lines of one use of the cores, and returns its rows of the published table."""
    rows = []
    for name in (OURS, THEIRS):
        for figure in _SLOWEST:
            what = f"{title}: {_WORDS.get(figure, figure)}, {name}"
            bars = [_BARS.get(figure)] if (name, title) == (OURS, FREE) else ()
            report.against(what, found, figure, name, [NONE], bars=bars)
        cpu = found(name, "ranks").minus(found(NONE, "ranks"))
        report.state(f"{title}: more CPU of the ranks, {name}", cpu)
        relative = [(found(name, one).over(found(NONE, one)), times) for one in _BARS]
        rows.append([title, name, *relative])
    for figure, words in _WORDS.items():
        bars = [1.0] if title == FULL else ()
        report.against(f"{title}: {words}", found, figure, OURS, [THEIRS], bars=bars)
    for figure in ("uploaders", "compaction"):
        report.state(f"{title}: CPU of {figure}", found(OURS, figure))
    report.section()
    return rows


def interference(report: Report, options: argparse.Namespace, place: Path) -> None:
    nbytes = sum(scaling.ROWS.values()) * options.scale * (states.WIDTH + 1) * 4
    report.sizes = (
        f"{options.ranks} ranks over gloo, {nbytes / 1e6:.0f} MB each; {options.steps} steps "
        f"of at least {options.step_ms:g} ms, a save every {options.every}. {ways.TUNED}"
    )
    cores, rows = sorted(os.sched_getaffinity(0)), []
    names = ("scale", "repeats", "steps", "every", "step_ms")
    sizes = {name: getattr(options, name) for name in names}

    def combined(pieces: Any) -> dict[str, float]:
        names = [one for one in pieces[0] if one != "name"]
        sums: dict[str, float] = {one: sum(piece[one] for piece in pieces) for one in names}
        return sums | {one: max(piece[one] for piece in pieces) for one in _SLOWEST}

    for title, background in ((FREE, cores[-1:]), (FULL, None)):
        if background == cores:
            report.note("No core can be left free: there is only one.")
            continue
        folder = place / f"cores-{title.split()[0]}"
        folder.mkdir()
        os.sched_setaffinity(0, background or cores)  # The server inherits it.
        with s3_server.running(folder / "server") as server:
            os.sched_setaffinity(0, cores)
            server.bucket("bench")
            where = folder, server.endpoint, sizes, background
            views = fresh.call_job(trained, options.ranks, *where, limit=3600)
        rows += add(report, reports.joined(views, combined), title)
    report.note("The server of the bucket runs on the cores of the background work.")
    columns = ("", "saved by", *(f"{words}, of no saves" for words in _WORDS.values()))
    report.publish("interference", columns, rows)


if __name__ == "__main__":
    title = "What training loses to saving"
    reports.main(title, interference, repeats=5, ranks=2, steps=100, every=20, step_ms=200.0)
