# SPDX-License-Identifier: Apache-2.0
"""The WAL in Kafka beside the local WAL: acknowledged records, and the rate of reading them back.

One broker on loopback, on the same disk as the local WAL. The thesis DLRM's tables (8 of 80,000 x
64) change by a batch of 2048 lookups each; `append()` and `wait_appended()` are timed together, for
both backends in turn. Then all records are read back from the topic into segment files. The broker
shares the processors with the benchmark.

python benchmarks/kafka_wal.py --json kafka.json
python benchmarks/kafka_wal.py --scale 0.05 --repeats 1   # a smoke test
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
from report import Report, Sample, arguments, secs
from running import kafka_cluster
from running.kafka_cluster import KafkaCluster

import deltackpt
from deltackpt import touched
from deltackpt.ledger.opening import open_steps
from deltackpt.reading.wal_index import WalReader
from deltackpt.reading.wal_topics import WalTopics
from deltackpt.wal import KafkaWal, LocalWal

TABLES, ROWS, WIDTH, BATCH = 8, 80_000, 64, 2048
#: Records of each round.
RECORDS = 12
#: Bars: an acknowledged record, relative to the local WAL; bytes read in a second.
_MOST, _LEAST_BYTES_PER_SEC = 5.0, 300e6
#: Records that are read, each with a quarter of the rows.
_READ_RECORDS = 16


class Trained:
    """A manager with a WAL, whose tables change at each step."""

    def __init__(self, place: Path, backend: LocalWal | KafkaWal, rows: int, batch: int):
        """Saves the first step."""
        self._random = np.random.default_rng(7)
        self._rows, self._batch, self._step = rows, batch, 0
        tables = {f"{number}": jnp.zeros((rows, WIDTH)) for number in range(TABLES)}
        self._state = {"tables": tables, "bias": jnp.zeros(8)}
        self._seen = touched.init({f"tables/{name}": table for name, table in tables.items()})
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
        tables = jax.block_until_ready(self._change(self._state["tables"], ids))
        self._state = {**self._state, "tables": tables}
        self._seen = touched.mark(
            self._seen, {f"tables/{name}": rows for name, rows in ids.items()}
        )
        jax.block_until_ready(self._seen)
        started = time.perf_counter()
        self.manager.append(self._step, self._state, touched=self._seen)
        self.manager.wait_appended()
        return time.perf_counter() - started


def written(report: Report, repeats: int, rows: int, root: Path, cluster: KafkaCluster) -> None:
    """Compares acknowledged records."""
    topic = cluster.topic("records")
    ways = {
        "local": Trained(root / "local", LocalWal(), rows, BATCH),
        "kafka": Trained(root / "kafka", KafkaWal(topic, config=cluster.config), rows, BATCH),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way.record_secs()
    for _ in range(repeats):
        for name, way in ways.items():
            gc.collect()
            found[name].append(median(way.record_secs() for _ in range(RECORDS)))
    for way in ways.values():
        way.manager.close()
    mine, local = (Sample(tuple(found[name])) for name in ("kafka", "local"))
    report.compare("record acknowledged by Kafka", mine, "local WAL", local, secs, bar=_MOST)
    report.section()


def read(report: Report, repeats: int, rows: int, root: Path, cluster: KafkaCluster) -> None:
    """Measures how fast the records of a topic are copied into segments."""
    topic = cluster.topic("read")
    way = Trained(root / "read", KafkaWal(topic, config=cluster.config), rows, rows // 4)
    for _ in range(_READ_RECORDS):
        way.record_secs()
    way.manager.close()
    found, nbytes = list[float](), 0
    for _ in range(repeats + 1):
        steps = open_steps(root / "read")
        topics = steps.topics = WalTopics(cluster.config)
        logs = WalReader(steps.log_at)
        started = time.perf_counter()
        [view] = logs.read().views
        found.append(time.perf_counter() - started)
        nbytes = sum(record.nbytes for record in view.processes[0].log.records)
        topics.close()
    mine = Sample(tuple(found[1:]))  # The first reads from the disk.
    limit = Sample((nbytes / _LEAST_BYTES_PER_SEC,) * repeats)
    report.compare(f"{nbytes / 1e6:,.0f} MB read", mine, "300 MB/s", limit, secs, bar=1.0)


def main() -> int:
    """Runs the command line."""
    options = arguments(__doc__).parse_args()
    if (reason := kafka_cluster.missing()) is not None:
        sys.exit(reason)
    rows = max(1000, round(ROWS * options.scale))
    report = Report(
        "The WAL in Kafka",
        sizes=(
            f"{TABLES} tables of {rows:,} x {WIDTH}, {BATCH} lookups a table and record; "
            f"{options.repeats} interleaved rounds of {RECORDS} records, median (range)"
        ),
    )
    with tempfile.TemporaryDirectory(prefix="kafka-", dir=options.directory) as place:
        root = Path(place)
        (root / "brokers").mkdir()
        with KafkaCluster(root / "brokers") as cluster:
            written(report, options.repeats, rows, root, cluster)
            read(report, options.repeats, rows, root, cluster)
    report.show(options.json, options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
