# SPDX-License-Identifier: Apache-2.0
"""Training runs of the thesis DLRM, in this process or in a multi-process job.

Each run begins with a durable base, and ends when its last WAL record or save is durable.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import scaling
import ways
from dlrm_jax import data, trainer
from dlrm_jax.placement import Placement
from report import Report

import deltackpt
from deltackpt.wal import KafkaWal

#: Steps to run so that everything is compiled: from a fresh state, and from the next ones.
_COMPILES = 3
#: Environment variable with the addresses of Kafka brokers.
BROKERS = "BENCHMARK_KAFKA_BROKERS"
#: Options that are passed to jobs.
_PASSED = ("scale", "batch", "steps", "every", "hidden", "lookups", "repeats", "limit")


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a training run is saved.

    Attributes:
      name: name in the table.
      make: makes its way from a directory and the steps between full points; None saves nothing.
      each: whether to save every step instead of every N; ignored if the way appends to a WAL.
      waits: whether to wait for each save.
      restores: whether to restore at the end, outside the training time.
    """

    name: str
    make: Callable[[Path, int], ways.Way] | None = None
    each: bool = False
    waits: bool = False
    restores: bool = False


def _logs(**options: Any) -> Callable[[Path, int], ways.Way]:
    return lambda root, every: ways.Logs(root, deltackpt.WalOptions(**options))


def _way(name: str) -> Callable[[Path, int], ways.Way]:
    return lambda root, every: ways.WAYS[name](root)


def _kafka(root: Path, every: int) -> ways.Way:
    """Returns a WAL in the topic that is named after the run; see ``launch``."""
    backend = KafkaWal(topic_of(root), config={"bootstrap.servers": os.environ[BROKERS]})
    return ways.Logs(root, deltackpt.WalOptions(backend=backend, dense_every=every))


def topic_of(root: Path) -> str:
    """Returns the Kafka topic of a run."""
    return f"{root.parent.name}-{root.name}"


MODES = {
    "none": Mode("no saves"),
    "soft": Mode(
        "soft records, full every N",
        lambda root, every: ways.Logs(root, deltackpt.WalOptions(dense_every=every)),
    ),
    "full": Mode("full records", _logs()),
    "delta": Mode('full records, dense="delta"', _logs(dense="delta")),
    "deltas": Mode("a delta every step", _way("power"), each=True),
    "orbax-n": Mode("Orbax tuned every N", _way("orbax-tuned")),
    "epoch-wal": Mode(
        "rows each step, dense leaves each epoch",
        lambda root, every: ways.Logs(root, deltackpt.WalOptions(dense_every=every)),
        restores=True,
    ),
    "epoch-kafka": Mode("the same in Kafka", _kafka, restores=True),
    "epoch-full": Mode("rows and dense leaves each step", _logs(), restores=True),
    "epoch-pickle": Mode("pickle each epoch", _way("pickle"), waits=True, restores=True),
    "epoch-orbax": Mode("Orbax each epoch", _way("orbax"), waits=True, restores=True),
    "epoch-tuned": Mode("Orbax tuned each epoch", _way("orbax-tuned"), waits=True, restores=True),
}


@dataclasses.dataclass(frozen=True)
class Training:
    """Cost of one training run.

    Attributes:
      secs: wall time of the slowest process.
      cpu: CPU seconds.
      threads: threads at its end.
      syncs: fsyncs of the WAL.
      record_bytes: mean size of a record.
      durable: median seconds from ``append()`` until a record was durable.
      durable_p99: 99th percentile of these.
      saved_bytes: bytes written since the base: records, or saves.
      recovery: seconds of a restore onto the devices; 0 if there was none.
    """

    secs: float
    cpu: float
    threads: float
    syncs: float = 0.0
    record_bytes: float = 0.0
    durable: float = 0.0
    durable_p99: float = 0.0
    saved_bytes: float = 0.0
    recovery: float = 0.0


class Loop:
    """The training loop, compiled once."""

    def __init__(
        self,
        *,
        scale: float,
        batch: int,
        steps: int,
        every: int,
        hidden: int,
        exponent: float,
        lookups: int = 1,
        placement: Placement | None = None,
    ):
        """Draws the batches beforehand, so that only training and saving are timed.

        Args:
          scale: factor on the rows of the tables.
          batch: samples in a batch.
          steps: steps of a training run.
          every: steps between full points.
          hidden: width of the top MLP's layers; the bottom MLP's are half as wide.
          exponent: exponent of the distribution of ids.
          lookups: rows of each table that a sample uses.
          placement: see ``trainer.train_step``.
        """
        self.rows = data.table_rows("thesis", scale)
        half, whole = (hidden // 2,) * 2, (hidden,) * 3
        self.sizes = trainer.ModelOptions(rows=self.rows, row_multiple=8, bottom=half, top=whole)
        self.every, self.placement = every, placement
        self._batch, self._steps, self._lookups = batch, steps, lookups
        self.draw(exponent)
        self.step = trainer.train_step(self.sizes, placement=placement)
        state = self.start()
        for first in self.batches[:_COMPILES]:
            state = self.advance(state, first)

    @classmethod
    def of(
        cls, options: argparse.Namespace, exponent: float, placement: Placement | None = None
    ) -> Loop:
        """Returns the loop that the command line asks for; see ``add_arguments``."""
        return cls(
            scale=options.scale,
            batch=options.batch,
            steps=options.steps,
            every=options.every,
            hidden=options.hidden,
            exponent=exponent,
            lookups=options.lookups,
            placement=placement,
        )

    def draw(self, exponent: float) -> None:
        """Draws batches from another distribution of ids."""
        traffic = data.ZipfTraffic(
            self.rows, self._batch, exponent=exponent, seed=0, lookups=self._lookups
        )
        self.batches = [traffic.batch(step) for step in range(self._steps)]

    def start(self) -> trainer.TrainState:
        """Returns a fresh state."""
        return jax.block_until_ready(trainer.init_state(self.sizes, 0, self.placement))

    def advance(self, state: trainer.TrainState, batch: data.Batch) -> trainer.TrainState:
        """Runs one step."""
        placed = batch if self.placement is None else self.placement.batch(batch)
        return jax.block_until_ready(self.step(state, placed))[0]

    def train(self, mode: Mode, root: Path) -> Training:
        """Runs a whole training."""
        state, way = self.start(), None if mode.make is None else mode.make(root, self.every)
        if way is not None:
            way.save(0, state, base=True)
            way.wait()
        ways.settle(scaling.shards(state))
        _meet()
        before, started = _cpu(), time.perf_counter()
        for number, batch in enumerate(self.batches, start=1):
            state = self.advance(state, batch)
            if isinstance(way, ways.Logs):
                way.log(number, state, batch.ids)
            elif way is not None and (mode.each or number % self.every == 0):
                way.save(number, state)
                if mode.waits:
                    way.wait()
        if way is not None:
            way.wait()
        _meet()
        secs, cpu = time.perf_counter() - started, _cpu() - before
        found = Training(secs, cpu, len(os.listdir("/proc/self/task")))
        if way is None:
            return found
        if mode.restores:
            found = dataclasses.replace(found, **_restored(way, state))
        way.close()
        if not isinstance(way, ways.Logs):
            return found
        appends = way.appends
        durable = [event.durable_secs for event in appends]
        return dataclasses.replace(
            found,
            syncs=sum(1 / event.batches_in_sync for event in appends),
            record_bytes=sum(event.bytes_written for event in appends) / len(appends),
            durable=median(durable),
            durable_p99=float(np.percentile(durable, 99)),
            saved_bytes=sum(event.bytes_written for event in appends),
        )


def _restored(way: ways.Way, state: trainer.TrainState) -> dict[str, float]:
    """Restores the newest state, and returns the seconds and the bytes of the newest save."""
    mine = (path for path in way.root.iterdir() if not path.name.endswith(".part"))
    saved = max(mine, key=lambda path: path.stat().st_mtime)
    nbytes = ways.tree_bytes(saved) if saved.is_dir() else saved.stat().st_size
    _meet()
    started = time.perf_counter()
    found = way.restore(state)
    _meet()
    secs = time.perf_counter() - started
    equal = jax.tree.map(_equal, found._replace(touched=()), state._replace(touched=()))
    assert all(jax.tree.leaves(equal)), f"{way.root}: the restored state differs"
    return {"recovery": secs, "saved_bytes": nbytes}


def _equal(one: jax.Array, other: jax.Array) -> bool:
    pairs = zip(one.addressable_shards, other.addressable_shards, strict=True)
    return all(np.array_equal(mine.data, theirs.data) for mine, theirs in pairs)


def rounds(
    loop: Loop, modes: list[str], repeats: int, root: Path
) -> dict[str, list[dict[str, float]]]:
    """Runs all modes by turns, ``repeats`` times."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in modes}
    for number in range(repeats):
        for name in modes:
            place = root / f"{name}-{number}"
            found[name].append(dataclasses.asdict(loop.train(MODES[name], place)))
            _meet()
            if jax.process_index() == 0:
                shutil.rmtree(place, ignore_errors=True)
    return found


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _meet() -> None:
    if jax.process_count() > 1:
        scaling.barrier("meet")


# In each process of a job.


def work(options: argparse.Namespace) -> None:
    """Joins the other processes and trains with them."""
    signal.alarm(options.limit)  # also if no parent is left to end it
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{options.port}"
    if options.processes > 1:
        jax.distributed.initialize(
            address,
            options.processes,
            options.worker,
            coordinator_bind_address=address,
            initialization_timeout=scaling.START_SECS,
        )
    loop = Loop.of(options, 0.0, Placement.over_all_devices())
    found = rounds(loop, options.modes.split(","), options.repeats, options.directory)
    (options.directory / f"found.{options.worker}.json").write_text(json.dumps(found))


# In the parent process.


#: Measures one part of a benchmark, given an empty folder.
Part = Callable[[Report, argparse.Namespace, Path], None]


def add_arguments(parser: argparse.ArgumentParser, parts: Mapping[str, Part]) -> None:
    """Adds the sizes of a loop that have defaults, and which parts to measure."""
    parser.set_defaults(repeats=5)
    add = parser.add_argument
    add("--batch", type=int, default=2048, help="samples in a batch")
    add("--lookups", type=int, default=1, help="rows of each table that a sample uses")
    add("--hidden", type=int, default=1024, help="columns of the largest layers")
    add("--quick", action="store_true", help="everything small, which measures nothing")
    add("--only", nargs="+", choices=parts, default=list(parts), help="what to measure")


def show_parts(report: Report, options: argparse.Namespace, parts: Mapping[str, Part]) -> None:
    """Measures the chosen parts, each in a folder of its own, and prints the report."""
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        for name in options.only:
            folder = Path(place, name)
            folder.mkdir()
            parts[name](report, options, folder)
    report.note(ways.TUNED)
    report.show(options.json, options.markdown)


def launch(
    options: argparse.Namespace, count: int, modes: list[str], directory: Path, brokers: str = ""
) -> dict[str, list[dict[str, float]]]:
    """Runs a job and returns the figures of process 0, with the CPU seconds of all processes.

    The mode ``epoch-kafka`` needs the addresses of brokers, and a topic of each round.

    Raises:
      RuntimeError: a process failed or did not end in time.
    """
    command = [sys.executable, __file__, f"--directory={directory}", f"--modes={','.join(modes)}"]
    command += [f"--{name}={getattr(options, name)}" for name in _PASSED]
    command += [f"--processes={count}", f"--port={scaling.free_port()}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", BROKERS: brokers}
    logs = [directory / f"log.{rank}" for rank in range(count)]
    with contextlib.ExitStack() as stack:
        workers: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(logs):
            output = stack.enter_context(log.open("wb"))
            worker = subprocess.Popen(
                [*command, f"--worker={rank}"], env=environment, stdout=output, stderr=output
            )
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers.append(worker)
        scaling.join(workers, logs, time.monotonic() + options.limit)
    views = [json.loads((directory / f"found.{rank}.json").read_text()) for rank in range(count)]
    for view in views[1:]:
        for name, runs in view.items():
            for mine, theirs in zip(views[0][name], runs, strict=True):
                mine["cpu"] += theirs["cpu"]
    return views[0]


def main() -> None:
    """Command line of a process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--modes", required=True)
    parser.add_argument("--scale", type=float, required=True)
    for name in (*_PASSED[1:], "processes", "port", "worker"):
        parser.add_argument(f"--{name}", type=int, required=True)
    work(parser.parse_args())


if __name__ == "__main__":
    main()
