# SPDX-License-Identifier: Apache-2.0
"""Serving: how soon a record is served, how fast lookups are, and how small patches are.

A trainer appends WAL records of 200,000 rows (2 tables of 64 float32) to a local disk. A follower
in another process serves them. Its lag is measured from the moment when the trainer knows that the
record is durable, and from its capture. Then two reader processes look up rows while the trainer
appends small records; every element that they see must hold the step of the version. Patches are
those of bf16 weights of which 1% of the elements changed.

python benchmarks/serving.py --json serving.json
python benchmarks/serving.py --quick                  # a smoke test
python benchmarks/serving.py --only patches           # single parts
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from report import Report, Sample, arguments, megabytes, secs

import deltackpt
from deltackpt.serving import patches

_JOB = str(Path(__file__).with_name("serving_job.py"))
_WIDTH = 64
LAG_SECS, LOOKUP_SECS, PATCH_SHARE = 0.1, 1.0, 0.02


@functools.partial(jax.jit, donate_argnums=0)
def _with(table: jax.Array, rows: jax.Array, value: jax.Array) -> jax.Array:
    return table.at[rows].set(value)


class Trainer:
    """Appends records whose rows hold the step."""

    def __init__(self, root: Path, rows: int):
        """Saves step 0."""
        handlers = {"embeddings": deltackpt.Tables(select="tables/*", slots={})}
        wal = deltackpt.WalOptions(max_wal_ratio=1e9)
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
def followed(root: Path, address: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs the follower."""
    process = subprocess.Popen(
        [sys.executable, _JOB, "follower", str(root), str(address)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            sys.exit("the follower failed")
        yield process
    finally:
        process.communicate(timeout=60)


def lag(report: Report, options: argparse.Namespace, root: Path) -> None:
    """From a durable record to the version that serves it."""
    rng, address = np.random.default_rng(0), root / "address"
    trainer = Trainer(root / "run", options.rows)
    durable: dict[int, float] = {}
    shown: dict[int, tuple[float, float]] = {}
    with followed(root / "run", address) as follower:
        for _ in range(options.records + 3):
            ids = rng.choice(options.rows, options.changed // 2, replace=False)
            moment = trainer.append_durably(ids)
            durable[trainer.step] = moment
            time.sleep(options.pause_secs)
        time.sleep(1.0)
        told, _ = follower.communicate(timeout=60)
    for line in told.splitlines():
        step, at, captured = json.loads(line)
        shown[step] = at, captured
    # The first ones compile, and fault in memory.
    steps = [step for step in sorted(shown) if step > 3]
    lags = [max(0.0, shown[step][0] - durable[step]) for step in steps]
    ages = [shown[step][0] - shown[step][1] for step in steps]
    for name, values in (("durable", lags), ("captured", ages)):
        for share in (50, 99):
            bar = LAG_SECS if (name, share) == ("durable", 99) else None
            value = Sample((float(np.percentile(values, share)),))
            report.state(
                f"{options.changed:,} rows: {name} to served, p{share}", value, secs, bar=bar
            )
    skipped = len(durable) - sum(step in shown for step in durable)
    report.note(f"{len(steps)} versions measured; {skipped} records were served with the next one")
    trainer.manager.close()
    report.section()


def lookups(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Lookups of two processes while records are applied."""
    address, hot = root / "address", np.arange(2000)
    trainer = Trainer(root / "run", options.rows)
    with followed(root / "run", address):
        trainer.append_durably(hot)
        found = run("gather", address, rows=options.rows, batch=2048, repeats=options.repeats)
        report.state(
            "lookup of 1 M rows by 2,048, processor", Sample(tuple(found)), secs, bar=LOOKUP_SECS
        )
        found = run("gather", address, rows=options.rows, batch=65536, repeats=options.repeats)
        report.state(
            "lookup of 1 M rows by 65,536, processor", Sample(tuple(found)), secs, bar=LOOKUP_SECS
        )
        readers = [
            started(
                "reader",
                address,
                rows=len(hot),
                lookups=options.lookups // 2,
                batch=16,
                seed=seed,
            )
            for seed in range(2)
        ]
        while any(one.poll() is None for one in readers):
            trainer.append_durably(hot)
        told = [json.loads(one.communicate()[0]) for one in readers]
    trainer.manager.close()
    mixed, done = (sum(one[name] for one in told) for name in ("mixed", "done"))
    report.state("mixed versions, 2 processes", Sample((float(mixed),)), "{:.0f}".format, bar=0.0)
    versions = min(one["versions"] for one in told)
    report.note(f"{done:,} lookups by 16 rows; {trainer.step} records, {versions} seen by a reader")
    each = Sample(tuple(1e6 * one["secs"] / one["done"] for one in told))
    report.state("processor time of such a lookup", each, "{:.1f} us".format)
    report.section()


def patch(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Patches of weights of which 1% changed."""
    rng = np.random.default_rng(0)
    count = options.patch_bytes // 2048 * 1024
    weights = rng.integers(0, 1 << 16, count, np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 1024)
    changed = weights.copy()
    changed.reshape(-1).view(np.uint16)[rng.random(count, np.float32) < 0.01] ^= 1
    path, figures = root / "patch.safetensors", ([], [], [])
    for _ in range(options.repeats):
        state = {"w": weights.copy()}
        begun = time.perf_counter()
        made = patches.between({"w": weights}, {"w": changed}, parent="a", save="b")
        size = patches.write(made, path)
        written = time.perf_counter()
        patches.apply(patches.read(path), state, at="a")
        applied = time.perf_counter()
        if state["w"].tobytes() != changed.tobytes():
            sys.exit("the patch does not give the weights")
        gigabytes = weights.nbytes / 1e9
        for values, value in zip(
            figures,
            (size, (written - begun) / gigabytes, (applied - written) / gigabytes),
            strict=True,
        ):
            values.append(value)
    sizes, writes, applies = (Sample(tuple(values)) for values in figures)
    report.compare(
        "patch, 1% changed",
        sizes,
        "bf16 weights",
        Sample((float(weights.nbytes),) * options.repeats),
        megabytes,
        bar=PATCH_SHARE,
    )
    report.state("compare and write, per GB", writes, secs)
    report.state("read, verify and apply, per GB", applies, secs)


def started(role: str, address: Path, **options: int) -> subprocess.Popen[str]:
    """Starts a job."""
    further = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, _JOB, role, str(address), *further]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def run(role: str, address: Path, **options: int) -> list[float]:
    """Runs a job; returns what it prints."""
    return json.loads(started(role, address, **options).communicate()[0])


PARTS = {"lag": lag, "lookups": lookups, "patches": patch}


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
    for name in options.only:
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="serving-") as place:
            PARTS[name](report, options, Path(place))
    report.show(options.json, options.markdown)


if __name__ == "__main__":
    main()
