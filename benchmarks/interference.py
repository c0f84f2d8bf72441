# SPDX-License-Identifier: Apache-2.0
"""What training loses to saves: steps of a multi-rank job, with and without saves.

Ranks are processes of this machine, joined by gloo. They wait for one another in each step, so a
step lasts as long as on the slowest rank. They train without saves; with deltas to a bucket,
through a staging directory and an uploader of each rank, with one base and one compaction in the
run; and with stock Orbax to a directory, as often. The variants take turns, round by round. Each
run ends when its background work is done.

    make servers
    python benchmarks/interference.py --json interference.json
    python benchmarks/interference.py --ranks 4
    python benchmarks/interference.py --scale 0.02 --repeats 1 --steps 8 --every 4 --step-ms 5
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import scaling
import state as states
import ways
from dlrm_jax import trainer
from jax.experimental import multihost_utils
from report import Report, Sample, arguments, secs
from running import s3_server

import deltackpt

WAYS = ("none", "deltas", "orbax")
#: Bars relative to no saves: p99 of the steps without a save, and the longest step of any rank.
BARS = {"p99": 1.05, "longest": 1.25}
#: Share of the rows that one step touches.
_TOUCHED = 0.0025
_WIDTH = 512
_COMPACTOR_NICE = 10
_CPU = re.compile(r"([\d.]+) s of CPU")


class Bucketed:
    """deltackpt with a staging directory for each rank."""

    def __init__(self, url: str, stage: Path, endpoint: str):
        self._stage = stage / f"process-{jax.process_index()}"
        self._manager = deltackpt.CheckpointManager(
            url,
            handlers={"embeddings": trainer.checkpoint_tables()},
            options=deltackpt.ManagerOptions(
                deltas=deltackpt.DeltaOptions(
                    policy=deltackpt.policies.Consecutive(max_chain=10_000, max_restore_ratio=1e9)
                ),
                tiers=deltackpt.Tiers(staging_dir=str(stage), endpoint=endpoint, shared=False),
            ),
        )

    def save(self, step: int, state: states.State, *, base: bool) -> None:
        """Starts a save."""
        self._manager.save(step, state, force_base=base)

    def close(self) -> float:
        """Waits for all saves; returns the CPU seconds of this rank's uploader."""
        self._manager.wait_until_finished()
        self._manager.close()
        log = self._stage / "promoter.log"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if log.exists() and (found := _CPU.findall(log.read_text(errors="replace"))):
                return sum(map(float, found))
            time.sleep(0.1)
        raise RuntimeError(f"{log}: expected the end of a promoter, found none in 60 s")


class Orbax:
    """Stock Orbax: the whole state each time."""

    def __init__(self, root: Path):
        self._way = ways.Orbax(root, compressed=True)

    def save(self, step: int, state: states.State, *, base: bool) -> None:
        """Starts a save."""
        self._way.save(step, state, base=base)

    def close(self) -> float:
        """Waits for all saves, which threads of this process make."""
        self._way.wait()
        self._way.close()
        return 0.0


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a rank: seconds of its steps, and of CPU.

    Attributes:
      way: the variant.
      plain: seconds of the steps without a save.
      saving: seconds of the steps with a save.
      cpu: of this process, from the first step until all saves were done.
      others: of its uploader and of the compactor.
    """

    way: str
    plain: list[float]
    saving: list[float]
    cpu: float
    others: float


# Code of the ranks.


@partial(jax.jit, static_argnums=2)
def _multiply(rows: jax.Array, kernel: jax.Array, times: int) -> jax.Array:
    """Computes on the rows of this rank, then waits for all other ranks."""

    def once(_: int, rows: jax.Array) -> jax.Array:
        return jnp.tanh(rows @ kernel)

    return jnp.sum(jax.lax.fori_loop(0, times, once, rows))


class Training:
    """The training steps of a job."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        mesh = jax.make_mesh(
            (jax.device_count(),), ("rows",), axis_types=(jax.sharding.AxisType.Auto,)
        )
        by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        shape = (_WIDTH * jax.device_count(), _WIDTH)
        self._rows = jax.jit(lambda: jnp.ones(shape), out_shardings=by_rows)()
        self._kernel = jax.jit(lambda: jnp.eye(_WIDTH) * 0.5, out_shardings=everywhere)()
        self.state = scaling.make(options.scale)
        self._number = 0
        self._times = self._calibrated(options.step_ms / 1e3)

    def _calibrated(self, least_secs: float) -> int:
        """Multiplications for a step of the wanted duration; process 0 decides."""
        times = 1
        while True:
            took = []
            for _ in range(3):
                started = time.perf_counter()
                jax.block_until_ready(_multiply(self._rows, self._kernel, times))
                took.append(time.perf_counter() - started)
            worst = float(multihost_utils.broadcast_one_to_all(np.float64(min(took))))
            if worst >= least_secs:
                return times
            times = max(times + 1, int(times * min(4.0, 1.1 * least_secs / worst)))

    def step(self) -> None:
        """Runs one training step and waits for it."""
        self._number += 1
        ids = states.random_ids(self.state, _TOUCHED, self._number)
        self.state = states.change(self.state, ids)
        jax.block_until_ready((self.state, _multiply(self._rows, self._kernel, self._times)))


def run(options: argparse.Namespace, training: Training, way: str, number: int) -> Run:
    """Trains once."""
    place = options.directory / f"{way}-{number}"
    url = f"s3://bench/{way}-{number}"
    manager: Bucketed | Orbax | None = None
    if way == "deltas":
        manager = Bucketed(url, place, options.endpoint)
    elif way == "orbax":
        manager = Orbax(place)
    for _ in range(3):
        training.step()
    compactor: subprocess.Popen[bytes] | None = None
    scaling.barrier("begin")
    plain, saving, cpu = list[float](), list[float](), time.process_time()
    for step in range(options.steps):
        started = time.perf_counter()
        training.step()
        is_save = manager is not None and step % options.every == options.every // 2
        if is_save:
            assert manager is not None
            manager.save(step, training.state, base=step < options.every)
        (saving if is_save else plain).append(time.perf_counter() - started)
        is_late = step == options.steps - options.every // 2 - 1
        if way == "deltas" and is_late and jax.process_index() == 0:
            compactor = _compact(url, options.endpoint)
    others = 0.0 if manager is None else manager.close()
    spent = time.process_time() - cpu
    if compactor is not None:
        _, status, used = os.wait4(compactor.pid, 0)
        compactor.returncode = os.waitstatus_to_exitcode(status)
        if compactor.returncode:
            raise RuntimeError(f"the compaction ended with {compactor.returncode}")
        others += used.ru_utime + used.ru_stime
    scaling.barrier("done")
    if jax.process_index() == 0:
        shutil.rmtree(place, ignore_errors=True)
        os.sync()
    scaling.barrier("removed")
    return Run(way, plain, saving, spent, others)


def _compact(url: str, endpoint: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "deltackpt.cli", "compact", url, "--endpoint", endpoint]
    return subprocess.Popen(
        ["nice", f"-n{_COMPACTOR_NICE}", *command, "--workers=1"], stdout=subprocess.DEVNULL
    )


def work(options: argparse.Namespace) -> None:
    """Joins the other ranks and trains with each variant in turn."""
    signal.alarm(options.limit)  # Ends this rank even if the launcher is gone.
    address = f"127.0.0.1:{options.port}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        options.ranks,
        options.worker,
        coordinator_bind_address=address,
        initialization_timeout=scaling.START_SECS,
    )
    training = Training(options)
    # The first round compiles and is not counted.
    found = [
        run(options, training, way, number)
        for number in range(options.repeats + 1)
        for way in (WAYS if number % 2 else WAYS[::-1])
    ][len(WAYS) :]
    path = options.directory / f"found.{options.worker}.json"
    path.write_text(json.dumps([dataclasses.asdict(one) for one in found]))


# Code of the launcher.


def launch(options: argparse.Namespace, place: Path, endpoint: str) -> list[list[Run]]:
    """Runs the ranks and returns what each of them measured.

    Raises:
      RuntimeError: a rank failed, or they did not end in time.
    """
    command = [sys.executable, __file__, f"--port={scaling.free_port()}", f"--endpoint={endpoint}"]
    command += [f"--directory={place}"]
    for name in ("ranks", "scale", "repeats", "steps", "every", "step_ms", "limit"):
        command.append(f"--{name.replace('_', '-')}={getattr(options, name)}")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    logs = [place / f"log.{rank}" for rank in range(options.ranks)]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as out:
                workers.append(
                    subprocess.Popen(
                        [*command, f"--worker={rank}"],
                        env=environment,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )
        scaling.join(workers, logs, time.monotonic() + options.limit)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [
        [Run(**one) for one in json.loads((place / f"found.{rank}.json").read_text())]
        for rank in range(options.ranks)
    ]


def add(report: Report, options: argparse.Namespace, ranks: list[list[Run]]) -> None:
    """Adds lines that compare each variant with no saves."""
    rounds = list(zip(*ranks, strict=True))

    def sample(way: str, figure: Any) -> Sample:
        return Sample(tuple(figure(views) for views in rounds if views[0].way == way))

    def p99(views: tuple[Run, ...]) -> float:
        return max(float(np.percentile(one.plain, 99)) for one in views)

    def longest(views: tuple[Run, ...]) -> float:
        return max(max(*one.plain, *one.saving) for one in views)

    def whole(views: tuple[Run, ...]) -> float:
        return max(sum(one.plain) + sum(one.saving) for one in views)

    barred = options.ranks == 2
    names = {"deltas": "deltackpt", "orbax": "Orbax defaults"}
    for way, name in names.items():
        ours = barred and way == "deltas"
        for words, figure, bar in (
            ("p99 of the steps without a save", p99, BARS["p99"]),
            ("longest step of any rank", longest, BARS["longest"]),
            ("all steps", whole, None),
        ):
            mine, none = sample(way, figure), sample("none", figure)
            report.compare(
                f"{name}: {words}", mine, "no saves", none, secs, bar=bar if ours else None
            )
    report.section()
    for way, name in names.items():
        spent = sample(way, lambda views: sum(one.cpu for one in views))
        report.compare(
            f"{name}: CPU of the ranks",
            spent,
            "no saves",
            sample("none", lambda views: sum(one.cpu for one in views)),
            secs,
        )
    others = sample("deltas", lambda views: sum(one.others for one in views))
    report.state("deltackpt: CPU of promoters and compaction", others, secs)


def main() -> int:
    """Runs the command line."""
    parser = arguments(__doc__)
    parser.set_defaults(repeats=5)
    parser.add_argument("--ranks", type=int, default=2, help="processes of the job")
    parser.add_argument("--steps", type=int, default=100, help="of one run")
    parser.add_argument("--every", type=int, default=20, help="steps between saves")
    parser.add_argument("--step-ms", type=float, default=200.0, help="least of a step")
    parser.add_argument("--limit", type=int, default=3600, help="seconds for all of it")
    for hidden, kind in (("--worker", int), ("--port", int), ("--endpoint", str)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return 0
    rows = sum(scaling.ROWS.values()) * options.scale
    report = Report(
        "What training loses to saving",
        sizes=(
            f"{options.ranks} ranks over gloo, {rows * (states.WIDTH + 1) * 4 / 1e6:.0f} MB each; "
            f"{options.steps} steps of at least {options.step_ms:g} ms, a save every "
            f"{options.every}; {options.repeats} interleaved rounds, median (range)"
        ),
    )
    with (
        tempfile.TemporaryDirectory(prefix="interference-", dir=options.directory) as place,
        s3_server.running(Path(place) / "server") as server,
    ):
        server.bucket("bench")
        add(report, options, launch(options, Path(place), server.endpoint))
    report.note(
        "The server of the bucket, the promoters and the compaction share the ranks' cores, as "
        "nothing else does on hosts of their own."
    )
    report.show(options.json, options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
