# SPDX-License-Identifier: Apache-2.0
"""Serving: how soon a record is served, how fast lookups are, and how small patches are.

A trainer appends WAL records of 200,000 rows (2 tables of 64 float32) to a local disk. A follower
in another process serves them. Its lag is measured from the moment when the trainer knows that the
record is durable, and from its capture; the same with the WAL in a real Kafka broker. Then two
reader processes look up rows while the trainer appends small records; every element that they see
must hold the step of the version. Patches are those of bf16 weights of which 1% of the elements
changed.

python benchmarks/serving.py --json serving.json
python benchmarks/serving.py --quick                  # a smoke test
python benchmarks/serving.py --only patches           # single parts
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import fresh
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import serving_job
from report import Report, Sample, arguments, count, interleaved, megabytes, ratio, run_parts, secs
from running import kafka_cluster
from running.kafka_cluster import KafkaCluster

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
        """Saves step 0."""
        handlers = {"embeddings": deltackpt.Tables(select="tables/*", slots={})}
        wal = deltackpt.WalOptions(max_wal_ratio=1e9, backend=backend or LocalWal())
        self.manager = deltackpt.CheckpointManager(
            root, handlers=handlers, options=deltackpt.ManagerOptions(wal=wal)
        )
        self.tables = {name: jnp.zeros((rows, _WIDTH)) for name in "ab"}
        self.step = 0
        self.manager.save(0, self.state)
        self.manager.wait_until_finished()

    @property
    def state(self) -> dict[str, object]:
        """The state."""
        return {"tables": self.tables, "step": jnp.int32(self.step)}

    def append(self, ids: np.ndarray) -> None:
        """Sets some rows of each table to the step, and appends a record."""
        self.step += 1
        rows, value = jnp.asarray(ids), jnp.float32(self.step)
        self.tables = {name: _with(table, rows, value) for name, table in self.tables.items()}
        jax.block_until_ready(self.tables)
        self.manager.append(self.step, self.state, ids={f"tables/{name}": ids for name in "ab"})

    def append_durably(self, ids: np.ndarray) -> float:
        """Appends a record; returns when it was known to be durable."""
        self.append(ids)
        self.manager.wait_appended()
        return time.time()


@contextlib.contextmanager
def followed(root: Path, address: Path, *kafka: str) -> Iterator[subprocess.Popen[str]]:
    """Runs the follower; ``kafka`` is the topic of the WAL, and the servers."""
    follow = serving_job.follow
    with fresh.started(follow, root, address, kafka, stdin=subprocess.PIPE) as process:
        fresh.heard(process)
        assert process.stdin is not None
        try:
            yield process
        finally:
            process.stdin.close()


def lag(report: Report, options: argparse.Namespace, root: Path) -> None:
    """From a durable record to the version that serves it."""
    _lag(report, options, root, LAG_SECS)


def kafka_lag(report: Report, options: argparse.Namespace, root: Path) -> None:
    """The same with the WAL in Kafka."""
    if (reason := kafka_cluster.missing()) is not None:
        sys.exit(reason)
    (root / "brokers").mkdir()
    with KafkaCluster(root / "brokers") as cluster:
        backend = KafkaWal(cluster.topic("lag"), config=cluster.config)
        kafka = backend.topic, cluster.config["bootstrap.servers"]
        _lag(report, options, root, KAFKA_LAG_SECS, backend, kafka)


def _lag(
    report: Report,
    options: argparse.Namespace,
    root: Path,
    bar: float,
    backend: KafkaWal | None = None,
    kafka: tuple[str, ...] = (),
) -> None:
    rng, address = np.random.default_rng(0), root / "address"
    trainer = Trainer(root / "run", options.rows, backend)
    durable: dict[int, float] = {}
    shown: dict[int, tuple[float, float]] = {}
    with followed(root / "run", address, *kafka) as follower:
        for _ in range(options.records + 3):
            ids = rng.choice(options.rows, options.changed // 2, replace=False)
            moment = trainer.append_durably(ids)
            durable[trainer.step] = moment
            time.sleep(options.pause_secs)
        time.sleep(1.0)
        assert follower.stdin is not None
        follower.stdin.close()
        for step, at, captured in fresh.heard(follower):
            shown[step] = at, captured
    # The first ones compile, and fault in memory.
    steps = [step for step in sorted(shown) if step > 3]
    lags = [max(0.0, shown[step][0] - durable[step]) for step in steps]
    ages = [shown[step][0] - shown[step][1] for step in steps]
    by = " with the WAL in Kafka" if kafka else ""
    p50, p99 = (Sample((float(np.percentile(lags, share)),)) for share in (50, 99))
    title = f"WAL record of {options.changed:,} rows{by}, from durable to served"
    report.state(f"{title}, p50", p50, secs)
    report.state(f"{title}, p99", p99, secs, bar=bar)
    report.state("from captured to served, p99", Sample((float(np.percentile(ages, 99)),)), secs)
    skipped = len(durable) - sum(step in shown for step in durable)
    report.note(f"{len(steps)} versions measured; {skipped} records were served with the next one")
    trainer.manager.close()
    report.section()
    measured = f"median {p50.shown(secs)}, p99 {p99.shown(secs)}"
    name = "kafka" if kafka else "lag"
    report.publish(name, _COLUMNS, [[title, measured, secs(bar)]])


def lookups(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Lookups of two processes while records are applied."""
    address, hot = root / "address", np.arange(2000)
    trainer = Trainer(root / "run", options.rows)
    with followed(root / "run", address):
        trainer.append_durably(hot)
        speeds = []
        for batch in (2048, 65536):
            title = f"lookup of 1 M rows by {batch:,}, CPU"
            more = options.rows, batch, options.repeats
            found = Sample(tuple(fresh.call(serving_job.gather, address, *more)))
            report.state(title, found, secs, bar=LOOKUP_SECS)
            speeds.append(found)
        share = options.lookups // 2
        readers = [
            fresh.started(serving_job.read, address, len(hot), share, 16, seed) for seed in range(2)
        ]
        while any(one.poll() is None for one in readers):
            trainer.append_durably(hot)
        seen = [fresh.heard(one) for one in readers]
    trainer.manager.close()
    mixed, done = (sum(one[name] for one in seen) for name in ("mixed", "done"))
    report.state("mixed versions, 2 processes", Sample((float(mixed),)), count, bar=0.0)
    versions = min(one["versions"] for one in seen)
    report.note(f"{done:,} lookups by 16 rows; {trainer.step} records, {versions} seen by a reader")
    each = Sample(tuple(one["secs"] / one["done"] for one in seen))
    report.state("CPU time of a lookup of 16 rows", each, secs)
    report.section()
    millions = f"{1 / max(speeds[0].values):.0f} to {1 / min(speeds[0].values):.0f}"
    report.publish(
        "lookups",
        _COLUMNS,
        [
            [f"lookups of {_WIDTH} float32, by 2,048"]
            + [f"{millions} million rows per second and core", "1 million"],
            ["one lookup of 16 rows in another process", f"{1e6 * each.median:.0f} µs", ""],
            [
                f"mixed versions in {done:,} lookups of two processes, {trainer.step} records",
                f"{mixed}",
                "0",
            ],
        ],
    )


def patch(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Patches of weights of which 1% changed."""
    rng = np.random.default_rng(0)
    count = options.patch_bytes // 2048 * 1024
    weights = rng.integers(0, 1 << 16, count, np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 1024)
    changed = weights.copy()
    changed.reshape(-1).view(np.uint16)[rng.random(count, np.float32) < 0.01] ^= 1
    path = root / "patch.safetensors"

    def run() -> dict[str, float]:
        state = {"w": weights.copy()}
        begun = time.perf_counter()
        made = patches.between({"w": weights}, {"w": changed}, parent="a", save="b")
        size = patches.write(made, path)
        written = time.perf_counter()
        patches.apply(patches.read(path), state, at="a")
        applied = time.perf_counter()
        assert state["w"].tobytes() == changed.tobytes(), "the patch does not give the weights"
        per_gb = weights.nbytes / 1e9
        return {
            "size": size,
            "write": (written - begun) / per_gb,
            "apply": (applied - written) / per_gb,
        }

    found = interleaved(options.repeats, {"": run}, warm_up=0)
    size, whole = found("", "size"), Sample((float(weights.nbytes),) * options.repeats)
    report.compare("patch, 1% changed", size, "bf16 weights", whole, megabytes, bar=PATCH_SHARE)
    rows: list[list] = [
        [
            f"patch of {weights.nbytes / 1e9:.2g} GB of bf16 weights, 1% changed",
            f"{size.shown(megabytes)}, {ratio(size.over(whole).median)}",
            ratio(PATCH_SHARE),
        ]
    ]
    for figure, words in (("write", "comparing and writing"), ("apply", "reading and applying")):
        report.state(f"{words}, per GB", found("", figure), secs)
        rows.append([f"{words} it, per GB", (found("", figure), secs), ""])
    report.publish("patches", _COLUMNS, rows)


PARTS = {"lag": lag, "kafka": kafka_lag, "lookups": lookups, "patches": patch}


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each table")
    parser.add_argument("--changed", type=int, default=200_000, help="rows of a record")
    parser.add_argument("--records", type=int, default=100, help="number of records")
    parser.add_argument("--pause-secs", type=float, default=0.1, help="pause after each record")
    parser.add_argument("--lookups", type=int, default=1_000_000)
    parser.add_argument("--patch-bytes", type=int, default=1_000_000_000)
    parser.add_argument("--quick", action="store_true", help="small sizes: a smoke test")
    options = parser.parse_args()
    options.rows = int(options.rows * options.scale)
    if options.quick:
        options.rows, options.changed, options.records = 20_000, 2_000, 10
        options.lookups, options.patch_bytes, options.repeats = 10_000, 1 << 22, 2
    sizes = f"2 tables of {options.rows:,} x {_WIDTH} float32; {options.records} records"
    report = Report("Serving", sizes=sizes)
    run_parts(report, options, PARTS, options.only)


if __name__ == "__main__":
    main()
