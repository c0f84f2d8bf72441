# SPDX-License-Identifier: Apache-2.0
"""The load-imbalance table: steps of a job of several ranks, with and without saves.

Ranks are processes of this machine, joined by gloo. They wait for one another in each step, so a
step lasts as long as on the slowest rank. They train without saves; with deltas to a bucket,
through a staging directory and an uploader of each rank, with one base and one compaction in the
run; and with tuned Orbax to a directory, as often. The three take turns, round by round. A run ends
when its background work is done. The ranks use all cores, or leave one to the background work.

make servers
python benchmarks/interference.py --json interference.json
python benchmarks/interference.py --scale 0.02 --repeats 1 --steps 8 --every 4 --step-ms 5
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import fresh
import jax
import jax.numpy as jnp
import numpy as np
import scaling
import state as states
import ways
from dlrm_jax import trainer
from jax.experimental import multihost_utils
from report import Figures, Report, arguments, cpu_secs, secs, times
from running import s3_server

import deltackpt

NONE, OURS, THEIRS = "no saves", "deltackpt", "Orbax tuned"
FREE, FULL = "a core is free", "all cores are in use"
#: Bars relative to no saves if a core is free; otherwise Orbax's figures are the bars.
_BARS = {"p99": 1.10, "longest": 1.3}
_WORDS = {"p99": "p99 of the steps without a save", "longest": "longest step of any rank"}
#: Share of the rows that one step touches.
_TOUCHED = 0.0025
_WIDTH = 512
_CPU = re.compile(r"([\d.]+) s of CPU")


class Bucketed:
    """deltackpt with a staging directory for each rank."""

    def __init__(self, url: str, stage: Path, endpoint: str, cpus: list[int] | None):
        self._log = stage / f"process-{jax.process_index()}" / "promoter.log"
        policy = deltackpt.policies.Consecutive(max_chain=10_000, max_restore_ratio=1e9)
        self._manager = deltackpt.CheckpointManager(
            url,
            handlers={"embeddings": trainer.checkpoint_tables()},
            options=deltackpt.ManagerOptions(
                deltas=deltackpt.DeltaOptions(policy=policy),
                tiers=deltackpt.Tiers(staging_dir=str(stage), endpoint=endpoint, shared=False),
                background=deltackpt.Background(cpus=cpus),
            ),
        )

    def save(self, step: int, state: states.State, *, base: bool = False) -> None:
        self._manager.save(step, state, force_base=base)

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def uploader_cpu(self) -> float:
        """CPU seconds of this rank's uploader, once it has ended."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self._log.exists() and (found := _CPU.findall(self._log.read_text())):
                return sum(map(float, found))
            time.sleep(0.1)
        raise RuntimeError(f"{self._log}: expected the end of an uploader, found none in 60 s")


# Code of the ranks.


@partial(jax.jit, static_argnums=2)
def _multiply(rows: jax.Array, kernel: jax.Array, count: int) -> jax.Array:
    """Computes on the rows of this rank, then waits for all other ranks."""
    return jnp.sum(jax.lax.fori_loop(0, count, lambda _, rows: jnp.tanh(rows @ kernel), rows))


class Training:
    """The training steps of a job."""

    def __init__(self, scale: float, step_secs: float):
        mesh = jax.make_mesh(
            (jax.device_count(),), ("rows",), axis_types=(jax.sharding.AxisType.Auto,)
        )
        by_rows, everywhere = (
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
            for axes in (("rows",), ())
        )
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
        took = []
        for _ in range(3):
            started = time.perf_counter()
            jax.block_until_ready(_multiply(self._rows, self._kernel, self._count))
            took.append(time.perf_counter() - started)
        return float(multihost_utils.broadcast_one_to_all(np.float64(min(took))))

    def step(self) -> None:
        """Runs one training step and waits for it."""
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
    for number in range(sizes["repeats"] + 1):
        names = (NONE, OURS, THEIRS)
        for name in names if number % 2 else names[::-1]:
            place = Path(directory, f"{name.split()[0]}-{number}")
            url = f"s3://bench/{Path(directory).name}-{number}"
            way: Any = None
            os.sched_setaffinity(0, cores)
            if name == OURS:
                way = Bucketed(url, place, endpoint, background)
            elif name == THEIRS:
                way = ways.WAYS[THEIRS](place)
            os.sched_setaffinity(0, cores - set(background or ()))
            compact = (
                ["compact", url, "--endpoint", endpoint, "--workers=1"] if name == OURS else []
            )
            view = _run(training, way, sizes, _on(background, compact))
            if number:  # The first round compiles.
                found.append(view | {"name": name})
            if jax.process_index() == 0:
                shutil.rmtree(place, ignore_errors=True)
                os.sync()
            multihost_utils.sync_global_devices("removed")
    return found


def _on(cores: list[int] | None, words: list[str]) -> list[str]:
    """The command of a compaction that yields to training."""
    limit = [] if cores is None else ["taskset", "-c", ",".join(map(str, cores))]
    return [*limit, "nice", "-n10", sys.executable, "-m", "deltackpt.cli", *words] if words else []


def _run(
    training: Training, way: Any, sizes: dict[str, Any], compact: list[str]
) -> dict[str, float]:
    """Trains once; process 0 starts the compaction before the last save."""
    steps, every = sizes["steps"], sizes["every"]
    for _ in range(3):
        training.step()
    multihost_utils.sync_global_devices("begin")
    plain, saving, cpu = list[float](), list[float](), cpu_secs()
    compactor: subprocess.Popen[bytes] | None = None
    for step in range(steps):
        starts_compaction = step == steps - every // 2 - 1
        if way is not None and compact and starts_compaction:
            way.wait()  # Untimed, and at full size there is nothing to wait for.
        started = time.perf_counter()
        training.step()
        times_ = plain
        if way is not None and step % every == every // 2:
            way.save(step, training.state, base=step < every)
            times_ = saving
        times_.append(time.perf_counter() - started)
        if compact and starts_compaction and jax.process_index() == 0:
            compactor = subprocess.Popen(compact, stdout=subprocess.DEVNULL)
    if way is not None:
        way.wait()
        way.close()
    found = {
        "p99": float(np.percentile(plain, 99)),
        "longest": max(plain + saving),
        "all steps": sum(plain + saving),
        "ranks": cpu_secs() - cpu,
    }
    if isinstance(way, Bucketed):
        found["uploaders"], found["compaction"] = way.uploader_cpu(), 0.0
    if compactor is not None:
        _, status, used = os.wait4(compactor.pid, 0)
        compactor.returncode = os.waitstatus_to_exitcode(status)
        if compactor.returncode:
            raise RuntimeError(f"the compaction ended with {compactor.returncode}")
        found["compaction"] = used.ru_utime + used.ru_stime
    multihost_utils.sync_global_devices("done")
    return found


# Code of the launcher.


def add(report: Report, found: Figures, title: str) -> list[list]:
    """Adds the lines of one use of the cores, and returns its rows of the published table."""
    rows = []
    for name in (OURS, THEIRS):
        for figure in ("p99", "longest", "all steps"):
            bar = _BARS.get(figure) if (name, title) == (OURS, FREE) else None
            what, none = f"{title}: {_WORDS.get(figure, figure)}, {name}", found(NONE, figure)
            report.compare(what, found(name, figure), NONE, none, secs, bar=bar)
        cpu = found(name, "ranks").minus(found(NONE, "ranks"))
        report.state(f"{title}: more CPU of the ranks, {name}", cpu, secs)
        relative = [(found(name, one).over(found(NONE, one)), times) for one in _BARS]
        rows.append([title, name, *relative])
    for figure in _BARS:
        mine, theirs = found(OURS, figure), found(THEIRS, figure)
        bar = 1.0 if title == FULL else None
        report.compare(f"{title}: {_WORDS[figure]}", mine, THEIRS, theirs, secs, bar=bar)
    for figure in ("uploaders", "compaction"):
        report.state(f"{title}: CPU of {figure}", found(OURS, figure), secs)
    report.section()
    return rows


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--ranks", type=int, default=2, help="processes of the job")
    parser.add_argument("--steps", type=int, default=100, help="of one run")
    parser.add_argument("--every", type=int, default=20, help="steps between saves")
    parser.add_argument("--step-ms", type=float, default=200.0, help="least of a step")
    options = parser.parse_args()
    nbytes = sum(scaling.ROWS.values()) * options.scale * (states.WIDTH + 1) * 4
    report = Report(
        "What training loses to saving",
        sizes=f"{options.ranks} ranks over gloo, {nbytes / 1e6:.0f} MB each; {options.steps} steps "
        f"of at least {options.step_ms:g} ms, a save every {options.every}. {ways.TUNED}",
    )
    cores, rows = sorted(os.sched_getaffinity(0)), []
    sizes = {
        name: getattr(options, name) for name in ("scale", "repeats", "steps", "every", "step_ms")
    }
    for title, background in ((FREE, cores[-1:]), (FULL, None)):
        if background == cores:
            report.note("No core can be left free: there is only one.")
            continue
        with tempfile.TemporaryDirectory(prefix="interference-", dir=options.directory) as place:
            os.sched_setaffinity(0, background or cores)  # The server inherits it.
            with s3_server.running(Path(place) / "server") as server:
                os.sched_setaffinity(0, cores)
                server.bucket("bench")
                where = place, server.endpoint, sizes, background
                views = fresh.call_job(trained, options.ranks, *where, limit=3600)
        found = Figures()
        for parts in zip(*views, strict=True):
            name = parts[0].pop("name")
            for figure in parts[0]:
                slowest = figure in ("p99", "longest", "all steps")
                value = (max if slowest else sum)(part[figure] for part in parts)
                found.add(name, {figure: value})
        rows += add(report, found, title)
    report.note("The server of the bucket runs on the cores of the background work.")
    report.publish(
        "interference", ("", "saved by", *(f"{w}, of no saves" for w in _WORDS.values())), rows
    )
    report.show(options)


if __name__ == "__main__":
    main()
