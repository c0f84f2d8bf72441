# SPDX-License-Identifier: Apache-2.0
"""Serving: how soon a record is served, how fast lookups are, and how small patches are.

A trainer appends WAL records of 200,000 rows (2 tables of 64 float32), to a disk or to Kafka. A
follower in another process serves them; its lag starts when the trainer knows that the record is
durable. Then two reader processes look up rows while records are applied; every element that they
see must hold the step of the version. Patches are of bf16 weights of which 1% changed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fresh
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import report as reports
import ways
import workers_without_jax
from report import Report, Sample, count, interleaved, megabytes, ratio, secs
from running import kafka_cluster

import deltackpt
from deltackpt.serving import patches
from deltackpt.wal import KafkaWal, LocalWal

_WIDTH = 64
LAG_SECS, KAFKA_LAG_SECS, LOOKUP_SECS, PATCH_SHARE = 0.1, 0.3, 1.0, 0.02
_COLUMNS = ("what", "measured", "bar")


@functools.partial(jax.jit, donate_argnums=0)
def _with(table: jax.Array, rows: jax.Array, value: jax.Array) -> jax.Array:
    return table.at[rows].set(value)


class Trainer:
    """Appends records whose rows hold the step."""

    def __init__(self, root: Path, rows: int, backend: KafkaWal | None = None):
        tables = deltackpt.Tables(select="tables/*", slots={})
        wal = deltackpt.WalOptions(max_wal_ratio=1e9, backend=backend or LocalWal())
        self.way = ways.Deltas(root, tables=tables, wal=wal)
        self.tables = {name: jnp.zeros((rows, _WIDTH)) for name in "ab"}
        self.step = 0
        self.way.saved(0, self.state)

    @property
    def state(self) -> dict[str, object]:
        return {"tables": self.tables, "step": jnp.int32(self.step)}

    def append(self, ids: np.ndarray) -> float:
        """Sets rows of each table to the step; returns when the record was known to be durable."""
        self.step += 1
        rows, value = jnp.asarray(ids), jnp.float32(self.step)
        self.tables = {name: _with(table, rows, value) for name, table in self.tables.items()}
        jax.block_until_ready(self.tables)
        self.way.append(self.step, self.state, {f"tables/{name}": ids for name in "ab"})
        self.way.manager.wait_appended()
        return time.time()


@contextlib.contextmanager
def followed(root: Path, address: Path, *kafka: str) -> Iterator[subprocess.Popen[str]]:
    """Runs the follower; ``kafka`` is the topic of the WAL, and the servers."""
    follow = workers_without_jax.follow
    with fresh.started(follow, root, address, kafka, stdin=subprocess.PIPE) as process:
        fresh.heard(process)
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process
        finally:
            process.stdin.close()
            process.stdout.read()  # Otherwise the follower could not print its result.


def lag(
    report: Report,
    options: argparse.Namespace,
    root: Path,
    backend: KafkaWal | None = None,
    *kafka: str,
) -> None:
    """From a durable record to the version that serves it."""
    rng, address = np.random.default_rng(0), root / "address"
    trainer = Trainer(root / "run", options.rows, backend)
    durable: dict[int, float] = {}
    shown: dict[int, tuple[float, float]] = {}
    with followed(root / "run", address, *kafka) as follower:
        for _ in range(options.records + 3):
            ids = rng.choice(options.rows, options.changed // 2, replace=False)
            moment = trainer.append(ids)
            durable[trainer.step] = moment
            time.sleep(options.pause_secs)
        time.sleep(1.0)
        assert follower.stdin is not None
        follower.stdin.close()
        for step, at, captured in fresh.heard(follower):
            shown[step] = at, captured
    trainer.way.close()
    # The first ones compile, and fault in memory.
    steps = [step for step in sorted(shown) if step > 3]
    lags = [max(0.0, shown[step][0] - durable[step]) for step in steps]
    ages = [shown[step][0] - shown[step][1] for step in steps]
    by, bar = (" with the WAL in Kafka", KAFKA_LAG_SECS) if kafka else ("", LAG_SECS)
    p50, p99 = (Sample((float(np.percentile(lags, share)),)) for share in (50, 99))
    title = f"WAL record of {options.changed:,} rows{by}, from durable to served"
    report.state(f"{title}, p50", p50)
    report.state(f"{title}, p99", p99, bar=bar)
    report.state("from captured to served, p99", Sample((float(np.percentile(ages, 99)),)))
    skipped = len(durable) - sum(step in shown for step in durable)
    report.note(f"{len(steps)} versions measured; {skipped} records were served with the next one")
    measured = f"median {p50.shown(secs)}, p99 {p99.shown(secs)}"
    report.publish("kafka" if kafka else "lag", _COLUMNS, [[title, measured, secs(bar)]])


def kafka_lag(report: Report, options: argparse.Namespace, root: Path) -> None:
    """The same with the WAL in Kafka."""
    if (reason := kafka_cluster.missing()) is not None:
        sys.exit(reason)
    (root / "brokers").mkdir()
    with kafka_cluster.KafkaCluster(root / "brokers") as cluster:
        backend = KafkaWal(cluster.topic("lag"), config=cluster.config)
        lag(report, options, root, backend, backend.topic, cluster.config["bootstrap.servers"])


def lookups(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Lookups of two processes while records are applied."""
    address, hot = root / "address", np.arange(2000)
    trainer = Trainer(root / "run", options.rows)
    with followed(root / "run", address):
        trainer.append(hot)
        speeds = []
        for batch in (2048, 65536):
            title = f"lookup of 1 M rows by {batch:,}, CPU"
            more = options.rows, batch, options.repeats
            speeds.append(Sample(tuple(fresh.call(workers_without_jax.gather, address, *more))))
            report.state(title, speeds[-1], bar=LOOKUP_SECS)
        share = options.lookups // 2
        readers = [
            fresh.started(workers_without_jax.read, address, len(hot), share, 16, seed)
            for seed in range(2)
        ]
        while any(one.poll() is None for one in readers):
            trainer.append(hot)
        seen = [fresh.heard(one) for one in readers]
    trainer.way.close()
    mixed, done = (sum(one[name] for one in seen) for name in ("mixed", "done"))
    report.state("mixed versions, 2 processes", Sample((float(mixed),)), count, bar=0.0)
    versions = min(one["versions"] for one in seen)
    report.note(f"{done:,} lookups by 16 rows; {trainer.step} records, {versions} seen by a reader")
    each = Sample(tuple(one["secs"] / one["done"] for one in seen))
    report.state("CPU time of a lookup of 16 rows", each)
    millions = f"{1 / max(speeds[0].values):.0f} to {1 / min(speeds[0].values):.0f}"
    speed = f"{millions} million rows per second and core"
    mixing = f"mixed versions in {done:,} lookups of two processes, {trainer.step} records"
    one = "one lookup of 16 rows in another process"
    table = [
        [f"lookups of {_WIDTH} float32, by 2,048", speed, "1 million"],
        [one, f"{1e6 * each.median:.0f} µs", ""],
        [mixing, f"{mixed}", "0"],
    ]
    report.publish("lookups", _COLUMNS, table)


def patch(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Patches of weights of which 1% changed."""
    rng = np.random.default_rng(0)
    size = options.patch_bytes // 2048 * 1024
    weights = rng.integers(0, 1 << 16, size, np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 1024)
    changed = weights.copy()
    changed.reshape(-1).view(np.uint16)[rng.random(size, np.float32) < 0.01] ^= 1
    path = root / "patch.safetensors"

    def run() -> dict[str, float]:
        state = {"w": weights.copy()}
        begun = time.perf_counter()
        made = patches.between({"w": weights}, {"w": changed}, parent="a", save="b")
        nbytes = patches.write(made, path)
        written = time.perf_counter()
        patches.apply(patches.read(path), state, at="a")
        applied = time.perf_counter()
        assert state["w"].tobytes() == changed.tobytes(), "the patch does not give the weights"
        took: dict[str, float] = {"write": written - begun, "apply": applied - written}
        per_gb = weights.nbytes / 1e9
        return {name: value / per_gb for name, value in took.items()} | {"size": float(nbytes)}

    found = interleaved(options.repeats, {"": run}, warm_up=0)
    nbytes, whole = found("", "size"), Sample((float(weights.nbytes),) * options.repeats)
    report.compare("patch, 1% changed", nbytes, "bf16 weights", whole, megabytes, bar=PATCH_SHARE)
    title = f"patch of {weights.nbytes / 1e9:.2g} GB of bf16 weights, 1% changed"
    measured = f"{nbytes.shown(megabytes)}, {ratio(nbytes.over(whole).median)}"
    rows: list[list] = [[title, measured, ratio(PATCH_SHARE)]]
    for figure, words in (("write", "comparing and writing"), ("apply", "reading and applying")):
        report.state(f"{words}, per GB", found("", figure))
        rows.append([f"{words} it, per GB", *found.cells("", figure), ""])
    report.publish("patches", _COLUMNS, rows)


def sizes(options: argparse.Namespace) -> str:
    return f"2 tables of {options.rows:,} x {_WIDTH} float32; {options.records} records"


if __name__ == "__main__":
    reports.main(
        "Serving",
        {"lag": lag, "kafka": kafka_lag, "lookups": lookups, "patches": patch},
        sizes,
        rows=1_000_000,  # Of each table.
        changed=200_000,  # Rows of a record.
        records=100,
        pause_secs=0.1,  # After each record.
        lookups=1_000_000,
        patch_bytes=1_000_000_000,
    )
