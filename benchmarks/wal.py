# SPDX-License-Identifier: Apache-2.0
"""The WAL: what a record at every step costs training, how fast recovery is, and Kafka.

The thesis DLRM (8 tables of 80,000 x 64, MLPs 512-512-64 and 1024-1024-1024-1 with Adam, 30 MB of
dense leaves) trains with records, with delta saves, with Orbax, and without saves, in turn; each
run begins with a durable base and ends when its last record or save is durable. ``recovery``
restores state W from a base and a WAL. ``kafka`` compares acknowledged records of a broker on
loopback with the local WAL, and reads all records back from the topic.

python benchmarks/wal.py --json wal.json
python benchmarks/wal.py --quick                      # a smoke test
python benchmarks/wal.py --only kafka recovery      # single parts
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import fresh
import jax
import jax.numpy as jnp
import numpy as np
import save_restore
import state as states
import ways
from dlrm_jax import data, trainer
from dlrm_jax.placement import Placement
from report import (
    Figures,
    Report,
    Sample,
    arguments,
    interleaved,
    megabytes,
    metered,
    run_parts,
    secs,
    times,
)
from running import kafka_cluster

import deltackpt
from deltackpt.format import naming
from deltackpt.ledger.opening import open_steps
from deltackpt.reading.wal_index import WalReader
from deltackpt.reading.wal_topics import WalTopics
from deltackpt.wal import KafkaWal, LocalWal

#: Bars on the training time, relative to training without saves.
TRAINING_BARS = {"records, full every N": 1.02, "full records": 1.10}
#: For W: lookups of a record, as a share of all rows; bytes of the WAL, as a share of the base.
_LOOKUPS, _WAL_SHARE = 0.1, 0.5
#: Kafka: records of a round, records that are read; bars on an acknowledged record over a local
#: one, and on the bytes that are read in a second.
_RECORDS, _READ_RECORDS = 12, 16
_KAFKA_BAR, _READ_BAR = 5.0, 300e6
#: Steps to run so that everything is compiled: from a fresh state, and from the next ones.
_COMPILES = 3


class Loop:
    """The training loop, compiled once; batches are drawn beforehand."""

    def __init__(
        self,
        options: argparse.Namespace,
        *,
        exponent: float = 1.07,
        lookups: int = 1,
        placement: Placement | None = None,
    ):
        self.rows = data.table_rows("thesis", options.scale)
        half, whole = (options.hidden // 2,) * 2, (options.hidden,) * 3
        sizes = trainer.ModelOptions(rows=self.rows, row_multiple=8, bottom=half, top=whole)
        self._sizes, self._placement = sizes, placement
        self._step = trainer.train_step(sizes, placement=placement)
        traffic = data.ZipfTraffic(
            self.rows, options.batch, exponent=exponent, seed=0, lookups=lookups
        )
        self.batches = [traffic.batch(step) for step in range(options.steps)]
        state = self.start()
        for batch in self.batches[:_COMPILES]:
            state = self.advance(state, batch)

    def start(self) -> trainer.TrainState:
        """Returns a fresh state."""
        return jax.block_until_ready(trainer.init_state(self._sizes, 0, self._placement))

    def advance(self, state: trainer.TrainState, batch: data.Batch) -> trainer.TrainState:
        """Runs one step."""
        placed = batch if self._placement is None else self._placement.batch(batch)
        return jax.block_until_ready(self._step(state, placed))[0]

    def train(
        self,
        way: Any,
        every: int,
        *,
        waits: bool = False,
        meet: Callable[[], object] = lambda: None,
    ) -> tuple[dict[str, float], trainer.TrainState]:
        """Runs a whole training from a durable base; returns its figures and the last state.

        Args:
          way: how it is saved; None for no saves.
          every: steps between saves; 0 appends a record at each step.
          waits: whether to wait for each save.
          meet: waits for the other processes of the job.
        """
        state = self.start()
        if way is not None:
            way.save(0, state, base=True)
            way.wait()
        ways.warm_memory(state)
        meet()
        blocked = list[float]()
        with metered() as spent:
            for number, batch in enumerate(self.batches, start=1):
                state = self.advance(state, batch)
                started = time.perf_counter()
                if way is not None and every == 0:
                    way.append(number, state, batch.ids)
                elif way is not None and number % every == 0:
                    way.save(number, state)
                    if waits:
                        way.wait()
                blocked.append(time.perf_counter() - started)
            if way is not None:
                way.wait()
            meet()
        found = spent[0]._asdict() | {"blocked": median(blocked)}
        if appends := getattr(way, "appends", []):
            durable = [event.durable_secs for event in appends]
            found["durable"], found["durable p99"] = map(float, np.percentile(durable, (50, 99)))
            found["bytes"] = sum(event.bytes_written for event in appends) / len(appends)
            found["syncs"] = sum(1 / event.batches_in_sync for event in appends)
        return found, state


def _modes(every: int) -> dict[str, tuple[Callable[[Path], Any] | None, int]]:
    """How a training is saved: its manager, and the steps between saves; 0 appends records."""

    def wal(**options: Any) -> Callable[[Path], Any]:
        return lambda root: ways.Deltas(root, wal=deltackpt.WalOptions(**options))

    return {
        "no checkpoints": (None, every),
        "records, full every N": (wal(dense_every=every), 0),
        "full records": (wal(), 0),
        'full records, dense="delta"': (wal(dense="delta"), 0),
        "a delta each step": (ways.WAYS["power"], 1),
        "Orbax tuned every N": (ways.WAYS["Orbax tuned"], every),
    }


def trained(loop: Loop, make: Callable[[Path], Any] | None, every: int, root: Path) -> Any:
    """The figures of a training whose saves are then removed."""
    way = None if make is None else make(root)
    found, _ = loop.train(way, every)
    if way is not None:
        way.close()
        shutil.rmtree(root)
    return found


def training(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Whole trainings."""
    loop, made = Loop(options), _modes(options.every)
    candidates = {
        mode: functools.partial(trained, loop, *how, root / "run") for mode, how in made.items()
    }
    modes = list(made)
    found = interleaved(options.repeats, candidates, warm_up=0)
    none = modes[0]
    for mode in modes[1:]:
        mine, bar = found(mode, "secs"), TRAINING_BARS.get(mode)
        report.compare(f"training, {mode}", mine, none, found(none, "secs"), secs, bar=bar)
        if bar is not None:
            theirs = found(modes[-1], "secs")
            report.compare(f"training, {mode}", mine, modes[-1], theirs, secs, bar=1.0)
        cpu = found(mode, "cpu").minus(found(none, "cpu"))
        cpu = cpu.mapped(lambda value: value / options.steps)
        report.state(f"more CPU a step, {mode}", cpu, secs)
        if (mode, "durable") in found:
            report.state(f"append() blocks, {mode}", found(mode, "blocked"), secs)
            report.state(f"a record is durable after, {mode}", found(mode, "durable"), secs)
            report.state(f"bytes of a record, {mode}", found(mode, "bytes"), megabytes)
            report.state(f"fsyncs, {mode}", found(mode, "syncs"), "{:.0f}".format)
    report.section()
    words = {
        none: none,
        modes[1]: f"a WAL record each step, dense leaves in every {options.every}th",
        modes[2]: "a WAL record with dense leaves each step",
        modes[3]: 'the same, `WalOptions(dense="delta")`',
        modes[4]: "a delta each step",
        modes[5]: f"Orbax tuned every {options.every} steps",
    }
    rows = []
    for mode in modes:
        mine = found(mode, "secs")
        cell = (mine, secs) if mode == none else (mine.over(found(none, "secs")), times)
        more: list = ["", ""]
        if (mode, "durable") in found:
            more = [(found(mode, figure), secs) for figure in ("blocked", "durable")]
        rows.append([words[mode], cell, *more])
    columns = ("training with", "time", "`append()` blocks", "a record is durable after")
    report.publish("training", columns, rows)


def recovery(report: Report, options: argparse.Namespace, root: Path) -> None:
    """State W from a base and a WAL of half its bytes, against a full load by Orbax."""
    state, way = states.make(options.scale), ways.WAYS["wal"](root / "wal")
    assert isinstance(way, ways.Deltas)
    way.save(0, state, base=True)
    way.wait()
    written, number = 0, 0
    while written < _WAL_SHARE * ways.nbytes(state):
        number += 1
        random = np.random.default_rng(number)
        ids = {
            name: data.zipf_rows(random, len(table), round(_LOOKUPS * len(table)), 1.07)
            for name, table in state.tables.items()
        }
        state = jax.block_until_ready(states.change(state, ids))
        way.append(number, state, ids)
        way.wait()
        written = sum(event.bytes_written for event in way.appends)
    way.close()
    for name in ways.THEIRS:
        other = ways.WAYS[name](root / name)
        other.save(number, state)
        other.wait()
        other.close()
    nbytes = ways.tree_bytes(root / "wal" / naming.LOG)
    digest = ways.checksum(state)
    del state
    compared = ("wal", *ways.THEIRS)
    for name in compared:
        checked = fresh.call(save_restore.restored, name, root / name, options.scale, True)
        assert checked["digest"] == digest, f"{name}: the restored state differs"

    def restore(name: str) -> dict[str, float]:
        done = fresh.call(save_restore.restored, name, root / name, options.scale, False)
        return {"secs": done["secs"]}

    found = interleaved(
        options.repeats, {name: functools.partial(restore, name) for name in compared}, warm_up=0
    )
    for name in ways.THEIRS:
        mine, theirs = found("wal", "secs"), found(name, "secs")
        report.compare("recovery of W", mine, name, theirs, secs, bar=1.0)
    report.state("recovery of W: bytes of the WAL", Sample((float(nbytes),)), megabytes)
    report.section()
    words = {"wal": "a base and a WAL half its size"} | {name: name for name in ways.THEIRS}
    rows = [[words[name], (found(name, "secs"), secs)] for name in compared]
    report.publish("recovery", ("recovery of state W from", "time"), rows)


class Trained:
    """A manager with a WAL, whose tables change at each step."""

    def __init__(self, place: Path, backend: LocalWal | KafkaWal, rows: int, batch: int):
        """Saves the first step."""
        self._random = np.random.default_rng(7)
        self._rows, self._batch, self._step = rows, batch, 0
        tables = {f"{number}": jnp.zeros((rows, states.WIDTH)) for number in range(8)}
        self._state = {"tables": tables, "bias": jnp.zeros(8)}
        self._seen = deltackpt.touched.init({f"tables/{name}": tables[name] for name in tables})
        self._change = jax.jit(
            lambda tables, ids: {name: tables[name].at[ids[name]].add(0.1) for name in tables}
        )
        wal = deltackpt.WalOptions(backend=backend, dense="soft", max_wal_ratio=1e6)
        self.manager = deltackpt.CheckpointManager(
            place,
            handlers={"embeddings": deltackpt.Tables(select="tables/*")},
            options=deltackpt.ManagerOptions(wal=wal),
        )
        self.manager.save(0, self._state, touched=self._seen)
        self.manager.wait_until_finished()

    def record_secs(self) -> float:
        """Trains a step, and returns how long its record takes to be acknowledged."""
        self._step += 1
        ids = {
            name: jnp.asarray(self._random.integers(0, self._rows, self._batch), jnp.int32)
            for name in self._state["tables"]
        }
        self._state = {**self._state, "tables": self._change(self._state["tables"], ids)}
        marked = {f"tables/{name}": rows for name, rows in ids.items()}
        self._seen = deltackpt.touched.mark(self._seen, marked)
        jax.block_until_ready((self._state, self._seen))
        started = time.perf_counter()
        self.manager.append(self._step, self._state, touched=self._seen)
        self.manager.wait_appended()
        return time.perf_counter() - started


def kafka(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Acknowledged records, and the records of a topic copied into segments."""
    if (reason := kafka_cluster.missing()) is not None:
        sys.exit(reason)
    rows = max(1000, round(80_000 * options.scale))
    (root / "brokers").mkdir()
    with kafka_cluster.KafkaCluster(root / "brokers") as cluster:
        topics = {name: cluster.topic(name) for name in ("records", "read")}
        written = {
            "local": Trained(root / "local", LocalWal(), rows, 2048),
            "kafka": Trained(
                root / "kafka", KafkaWal(topics["records"], config=cluster.config), rows, 2048
            ),
        }

        def record(one: Trained) -> dict[str, float]:
            return {"secs": median(one.record_secs() for _ in range(_RECORDS))}

        found = interleaved(
            options.repeats,
            {name: functools.partial(record, one) for name, one in written.items()},
        )
        large = Trained(
            root / "read", KafkaWal(topics["read"], config=cluster.config), rows, rows // 4
        )
        for _ in range(_READ_RECORDS):
            large.record_secs()
        for one in (*written.values(), large):
            one.manager.close()
        nbytes, reads = 0, Figures()
        for number in range(options.repeats + 1):
            steps = open_steps(root / "read")
            steps.topics = WalTopics(cluster.config)
            started = time.perf_counter()
            [view] = WalReader(steps.wal_location).read().views
            if number:  # The first reads from the disk.
                reads.add("read", {"secs": time.perf_counter() - started})
            nbytes = sum(one.nbytes for one in view.processes[0].log.records)
            steps.topics.close()
    mine, local, read = found("kafka", "secs"), found("local", "secs"), reads("read", "secs")
    what = "record acknowledged by Kafka"
    report.compare(what, mine, "local WAL, fsynced", local, secs, bar=_KAFKA_BAR)
    limit = Sample((nbytes / _READ_BAR,) * options.repeats)
    title = f"{nbytes / 1e6:,.0f} MB read"
    report.compare(title, read, "300 MB/s", limit, secs, bar=1.0)
    report.section()
    report.publish(
        "kafka",
        ("what", "Kafka", "compared with"),
        [
            ["acknowledged record, 8 x 2,048 rows of 64 (4.2 MB)", (mine, secs)]
            + [f"local WAL, fsynced: {local.shown(secs)} ({mine.over(local).median:.1f} times)"],
            [f"reading {nbytes / 1e6:,.0f} MB of records", (read, secs)]
            + [f"{nbytes / read.median / 1e6:.0f} MB/s; target: 300 MB/s"],
        ],
    )


PARTS = {"training": training, "recovery": recovery, "kafka": kafka}


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, repeats=5)
    add = parser.add_argument
    add("--batch", type=int, default=2048, help="samples in a batch")
    add("--hidden", type=int, default=1024, help="columns of the largest layers")
    add("--steps", type=int, default=32, help="of one training")
    add("--every", type=int, default=16, help="N, steps between saves or full records")
    add("--quick", action="store_true", help="everything small, which measures nothing")
    add("--only", nargs="+", choices=PARTS, default=[*PARTS], help="what to measure")
    options = parser.parse_args()
    if options.quick:
        options.scale, options.repeats, options.batch, options.steps = 0.01, 1, 64, 4
        options.every, options.hidden = 2, 32
    rows = max(data.table_rows("thesis", options.scale).values())
    report = Report(
        "The WAL",
        sizes=f"Thesis DLRM, 8 tables of {rows:,} x 64, batch {options.batch}, {options.steps} "
        f"steps, N = {options.every}, Zipf 1.07; W at {options.scale:g} of its rows. {ways.TUNED}",
    )
    run_parts(report, options, PARTS, options.only)


if __name__ == "__main__":
    main()
