# SPDX-License-Identifier: Apache-2.0
"""The WAL: what a record at every step costs training, how fast recovery is, and Kafka.

The thesis DLRM (8 tables of 80,000 x 64, MLPs 512-512-64 and 1024-1024-1024-1 with Adam, 30 MB of
dense leaves) trains with records, with delta saves, with Orbax, and without saves, in turn; each
run begins with a durable base and ends when its last record or save is durable. ``recovery``
restores state W from a base and a WAL. ``kafka`` compares acknowledged records of a broker on
loopback with the local WAL, and reads all records back from the topic.
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
import report as reports
import save_restore
import state as states
import ways
from dlrm_jax import data, trainer
from dlrm_jax.placement import Placement
from report import Figures, Report, Sample, interleaved, megabytes, metered, secs, times
from running import kafka_cluster

import deltackpt
from deltackpt.events import AppendEvent
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
        return jax.block_until_ready(trainer.init_state(self._sizes, 0, self._placement))

    def advance(self, state: trainer.TrainState, batch: data.Batch) -> trainer.TrainState:
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

        It saves ``every`` so many steps, and ``waits`` for each save; 0 appends a record at each
        step. ``meet`` waits for the other processes of the job.
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
        if appends := appended(way):
            durable = [event.durable_secs for event in appends]
            found["durable"], found["durable p99"] = map(float, np.percentile(durable, (50, 99)))
            found["bytes"] = sum(event.bytes_written for event in appends) / len(appends)
            found["syncs"] = sum(1 / event.batches_in_sync for event in appends)
        return found, state


def appended(way: Any) -> list[AppendEvent]:
    """What each durable WAL record cost."""
    return [event for event in getattr(way, "events", ()) if isinstance(event, AppendEvent)]


def training(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Whole trainings, without saves, with records and with saves."""
    loop, every = Loop(options), options.every

    def wal(**more: Any) -> Callable[[Path], Any]:
        return lambda root: ways.Deltas(root, wal=deltackpt.WalOptions(**more))

    def trained(make: Callable[[Path], Any] | None, every: int) -> dict[str, float]:
        way = None if make is None else make(root / "run")
        found, _ = loop.train(way, every)
        if way is not None:
            way.close()
            shutil.rmtree(root / "run")
        return found

    # The manager, the steps between saves (0 appends records), and the words of the page.
    none, orbax = "no checkpoints", "Orbax tuned every N"
    page = f"a WAL record each step, dense leaves in every {every}th"
    modes: dict[str, tuple[Callable[[Path], Any] | None, int, str]] = {
        none: (None, every, none),
        "records, full every N": (wal(dense_every=every), 0, page),
        "full records": (wal(), 0, "a WAL record with dense leaves each step"),
        'full records, dense="delta"': (
            wal(dense="delta"),
            0,
            'the same, `WalOptions(dense="delta")`',
        ),
        "a delta each step": (ways.WAYS["power"], 1, "a delta each step"),
        orbax: (ways.WAYS["Orbax tuned"], every, f"Orbax tuned every {every} steps"),
    }
    candidates = {name: functools.partial(trained, *mode[:2]) for name, mode in modes.items()}
    found = interleaved(options.repeats, candidates, warm_up=0)
    rows: list[list] = [[none, *found.cells(none, "secs"), "", ""]]
    for mode, (_, _, words) in list(modes.items())[1:]:
        mine, title, bar = found(mode, "secs"), f"training, {mode}", TRAINING_BARS.get(mode)
        report.compare(title, mine, none, found(none, "secs"), bar=bar)
        if bar is not None:
            report.compare(title, mine, orbax, found(orbax, "secs"), bar=1.0)
        cpu = found(mode, "cpu").minus(found(none, "cpu"))
        report.state(f"more CPU a step, {mode}", cpu.mapped(lambda value: value / options.steps))
        more: list = ["", ""]
        if (mode, "durable") in found:
            report.state(f"append() blocks, {mode}", found(mode, "blocked"))
            report.state(f"a record is durable after, {mode}", found(mode, "durable"))
            report.state(f"bytes of a record, {mode}", found(mode, "bytes"), megabytes)
            report.state(f"fsyncs, {mode}", found(mode, "syncs"), "{:.0f}".format)
            more = found.cells(mode, "blocked", "durable")
        rows.append([words, (mine.over(found(none, "secs")), times), *more])
    columns = ("training with", "time", "`append()` blocks", "a record is durable after")
    report.publish("training", columns, rows)


def recovery(report: Report, options: argparse.Namespace, root: Path) -> None:
    """State W from a base and a WAL of half its bytes, against a full load by Orbax."""
    state, way = states.make(options.scale), ways.Deltas(root / "wal", wal=deltackpt.WalOptions())
    way.saved(0, state, base=True)
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
        written = sum(event.bytes_written for event in appended(way))
    way.close()
    for other in ways.opened(root, ways.THEIRS).values():
        other.saved(number, state)
        other.close()
    nbytes = ways.tree_bytes(root / "wal" / naming.LOG)
    digest = ways.checksum(state)
    del state
    words = {"wal": "a base and a WAL half its size"} | {name: name for name in ways.THEIRS}
    for name in words:
        save_restore.check(name, root / name, options.scale, digest)

    def restore(name: str) -> dict[str, float]:
        done = fresh.call(save_restore.restored, name, root / name, options.scale, False)
        return {"secs": done["secs"]}

    candidates = {name: functools.partial(restore, name) for name in words}
    found = interleaved(options.repeats, candidates, warm_up=0)
    report.against("recovery of W", found, "secs", "wal", ways.THEIRS, bars=(1.0, 1.0))
    report.state("recovery of W: bytes of the WAL", Sample((float(nbytes),)), megabytes)
    rows = [[text, *found.cells(name, "secs")] for name, text in words.items()]
    report.publish("recovery", ("recovery of state W from", "time"), rows)


class Trained:
    """A manager with a WAL, whose tables change at each step."""

    def __init__(self, place: Path, backend: LocalWal | KafkaWal, rows: int, batch: int):
        self._random = np.random.default_rng(7)
        self._rows, self._batch, self._step = rows, batch, 0
        tables = {f"{number}": jnp.zeros((rows, states.WIDTH)) for number in range(8)}
        self._state = {"tables": tables, "bias": jnp.zeros(8)}
        self._seen = deltackpt.touched.init({f"tables/{name}": tables[name] for name in tables})
        self._change = jax.jit(
            lambda tables, ids: {name: tables[name].at[ids[name]].add(0.1) for name in tables}
        )
        wal = deltackpt.WalOptions(backend=backend, dense="soft", max_wal_ratio=1e6)
        self.way = ways.Deltas(place, tables=deltackpt.Tables(select="tables/*"), wal=wal)
        self.way.saved(0, self._state, touched=self._seen)

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
        self.way.append(self._step, self._state, touched=self._seen)
        self.way.manager.wait_appended()
        return time.perf_counter() - started


def kafka(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Acknowledged records, and the records of a topic copied into segments."""
    if (reason := kafka_cluster.missing()) is not None:
        sys.exit(reason)
    rows = max(1000, round(80_000 * options.scale))
    (root / "brokers").mkdir()
    with kafka_cluster.KafkaCluster(root / "brokers") as cluster:
        sent, read_back = (
            KafkaWal(cluster.topic(name), config=cluster.config) for name in ("records", "read")
        )
        written = {
            "local": Trained(root / "local", LocalWal(), rows, 2048),
            "kafka": Trained(root / "kafka", sent, rows, 2048),
        }

        def record(one: Trained) -> dict[str, float]:
            return {"secs": median(one.record_secs() for _ in range(_RECORDS))}

        candidates = {name: functools.partial(record, one) for name, one in written.items()}
        found = interleaved(options.repeats, candidates)
        large = Trained(root / "read", read_back, rows, rows // 4)
        for _ in range(_READ_RECORDS):
            large.record_secs()
        for one in (*written.values(), large):
            one.way.close()
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
    report.compare(what, mine, "local WAL, fsynced", local, bar=_KAFKA_BAR)
    limit, size = Sample((nbytes / _READ_BAR,) * options.repeats), f"{nbytes / 1e6:,.0f} MB"
    report.compare(f"{size} read", read, "300 MB/s", limit, bar=1.0)
    over = f"local WAL, fsynced: {local.shown(secs)} ({mine.over(local).median:.1f} times)"
    speed = f"{nbytes / read.median / 1e6:.0f} MB/s; target: 300 MB/s"
    table = [
        ["acknowledged record, 8 x 2,048 rows of 64 (4.2 MB)", (mine, secs), over],
        [f"reading {size} of records", (read, secs), speed],
    ]
    report.publish("kafka", ("what", "Kafka", "compared with"), table)


def sizes(options: argparse.Namespace) -> str:
    rows = max(data.table_rows("thesis", options.scale).values())
    return (
        f"Thesis DLRM, 8 tables of {rows:,} x 64, batch {options.batch}, {options.steps} steps, "
        f"N = {options.every}, Zipf 1.07; W at {options.scale:g} of its rows. {ways.TUNED}"
    )


if __name__ == "__main__":
    reports.main(
        "The WAL",
        {"training": training, "recovery": recovery, "kafka": kafka},
        sizes,
        repeats=5,
        batch=2048,  # Samples.
        hidden=1024,  # Columns of the largest layers.
        steps=32,  # Of one training.
        every=16,  # Steps between saves or full records.
    )
