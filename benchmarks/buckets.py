# SPDX-License-Identifier: Apache-2.0
"""Saves to a bucket behind a slow link: deltackpt, Orbax whose steps are copied, and a plain copy.

A training loop saves state W at a fixed interval to a fake-gcs-server bucket behind a 100 MB/s
link: deltas through the staging directory and uploader, and Orbax to a local directory that is
copied in the background.

    make servers
    python benchmarks/buckets.py --json buckets.json
    python benchmarks/buckets.py --scale 0.02 --repeats 2 --saves 3
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import fresh
import jax
import link
import state as states
import ways
from dlrm_jax import trainer
from report import Report, arguments, interleaved, secs

import deltackpt
from deltackpt import events
from deltackpt.storage import buckets

BYTES_PER_SEC = 100e6
NONE, OURS, THEIRS = "no saves", "deltackpt", "Orbax to disk, copied"
_BUILT = Path(__file__).resolve().parents[1] / "build" / "servers" / "bin"
#: Share of the rows that change between two saves.
_TOUCHED = 0.05
_COPIERS = 8
#: Bars of the time that save() blocks, and of the training time lost, against Orbax.
_BLOCKED_BAR, _LOST_BAR = 0.1, 0.2


class Bucketed:
    """deltackpt with a staging directory."""

    def __init__(
        self, url: str, stage: Path, endpoint: str, *, wal: deltackpt.WalOptions | None = None
    ):
        #: Seconds that uploads took, the newest last.
        self.uploads: list[float] = []
        policy = deltackpt.policies.Consecutive(max_chain=10_000, max_restore_ratio=1e9)
        self._manager = deltackpt.CheckpointManager(
            url,
            handlers={"embeddings": trainer.checkpoint_tables()},
            options=deltackpt.ManagerOptions(
                deltas=deltackpt.DeltaOptions(policy=policy),
                tiers=deltackpt.Tiers(staging_dir=str(stage), endpoint=endpoint),
                wal=wal,
            ),
            event_handlers=(self,),
        )

    def receive(self, event: events.Event) -> None:
        if isinstance(event, events.UploadEvent):
            self.uploads.append(event.seconds)

    def save(self, step: int, state: Any, *, base: bool = False) -> None:
        self._manager.save(step, state, force_base=base)

    def append(self, step: int, state: Any, ids: Any = None) -> None:
        self._manager.append(step, state, ids=ids)

    def wait(self) -> None:
        self._manager.wait_until_finished()
        if self._manager.options.wal is not None:
            self._manager.wait_appended()

    def close(self) -> None:
        self._manager.close()


class OrbaxCopied(ways.Orbax):
    """Stock Orbax to a local directory, whose steps are copied to the bucket in the background."""

    def __init__(self, local: Path, url: str, endpoint: str):
        super().__init__(local, compressed=False)
        self._bucket = buckets.locate(url, endpoint=endpoint).open()
        self._copier = ThreadPoolExecutor(1, "copy")
        self._copied: Future[None] | None = None

    def save(self, step: int, state: Any, *, base: bool = False) -> None:
        # Only one step is copied at a time: otherwise the disk fills.
        self.wait()
        super().save(step, state, base=base)
        self._copied = self._copier.submit(self._copy, step)

    def _copy(self, step: int) -> None:
        super().wait()
        put(self.root / str(step), self._bucket)

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.result()

    def close(self) -> None:
        self.wait()
        super().close()


def put(folder: Path, bucket: Any) -> float:
    """Copies the files of a folder; returns the seconds."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    started = time.perf_counter()
    with ThreadPoolExecutor(_COPIERS) as pool:
        for done in [
            pool.submit(
                bucket.store.put, path.relative_to(folder.parent).as_posix(), path.read_bytes()
            )
            for path in found
        ]:
            done.result()
    return time.perf_counter() - started


@contextlib.contextmanager
def google(folder: Path, bytes_per_sec: float = BYTES_PER_SEC) -> Iterator[str]:
    """Runs fake-gcs-server and a slow link to it; yields the address of the link."""
    with socket.socket() as one, socket.socket() as two:
        for probe in (one, two):
            probe.bind(("127.0.0.1", 0))
        direct, linked = (probe.getsockname()[1] for probe in (one, two))
    address = f"http://127.0.0.1:{linked}"
    server = [
        *(str(_BUILT / "fake-gcs-server"), "-scheme", "http", "-host", "127.0.0.1"),
        *("-port", str(direct), "-backend", "memory", "-log-level", "error"),
        *("-external-url", address, "-public-host", f"127.0.0.1:{linked}"),
    ]
    with open(folder / "gcs.log", "wb") as log:
        running: list[Any] = [subprocess.Popen(server, stdout=log, stderr=log)]
    running.append(fresh.started(link.run, linked, direct, bytes_per_sec))
    try:
        for port in (direct, linked):
            _await(port)
        # For TensorStore here and in the uploader processes.
        os.environ |= {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
        }
        asked = urllib.request.Request(
            f"http://127.0.0.1:{direct}/storage/v1/b?project=test",
            data=json.dumps({"name": "bench"}).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(asked, timeout=30).close()
        yield address
    finally:
        for process in running:
            process.kill()
            process.wait()


def _await(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    sys.exit(f"nothing listens on port {port}")


def train(way: Any, options: argparse.Namespace) -> dict[str, float]:
    """Seconds that save() blocked, of the whole run, and until all saves were in the bucket."""
    state = states.make(options.scale)
    ids = [states.random_ids(state, _TOUCHED, number) for number in range(options.saves)]
    state = jax.block_until_ready(states.change(state, ids[0]))
    if way is not None:
        way.save(0, state)  # The base, or Orbax's first save: not measured.
        way.wait()
    gc.collect()
    blocked, started = 0.0, time.perf_counter()
    for number in range(options.saves):
        state = jax.block_until_ready(states.change(state, ids[number]))
        time.sleep(options.interval)  # Simulates compute on a TPU, which leaves the cores free.
        if way is not None:
            before = time.perf_counter()
            way.save(number + 1, state)
            blocked += time.perf_counter() - before
    ran = time.perf_counter() - started
    if way is not None:
        way.wait()
    return {"blocked": blocked, "ran": ran, "uploaded": time.perf_counter() - started}


def measure(name: str, options: argparse.Namespace, place: Path, address: str) -> dict[str, float]:
    """Trains once with a candidate, and measures the limit of an upload."""
    ways.warm_memory(states.template(options.scale))
    url, folder = f"gs://bench/{name.split()[0]}{time.monotonic_ns()}", place / "run"
    way: Bucketed | OrbaxCopied | None = None
    if name != NONE:
        way = (Bucketed if name == OURS else OrbaxCopied)(*_places(name, url, folder), address)
    found = train(way, options)
    if way is not None:
        way.close()
    if isinstance(way, Bucketed):
        found["upload"] = median(way.uploads[1:])
        steps = sorted((folder / "steps").glob("[0-9]*"), key=lambda path: int(path.name))
        found["copy"] = put(steps[-1], buckets.locate(f"{url}-copy", endpoint=address).open())
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _places(name: str, url: str, folder: Path) -> tuple[Any, Any]:
    return (url, folder) if name == OURS else (folder, url)


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, repeats=5)
    parser.set_defaults(scale=0.2)
    parser.add_argument("--saves", type=int, default=6, help="of one run")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two saves")
    options = parser.parse_args()
    nbytes = ways.nbytes(states.template(options.scale))
    report = Report(
        "A bucket behind 100 MB/s",
        sizes=f"State of {nbytes / 1e6:.0f} MB, {_TOUCHED:.0%} of the rows touched between saves, "
        f"{options.saves} saves every {options.interval} s. {ways.TUNED}",
    )
    with tempfile.TemporaryDirectory(prefix="buckets-", dir=options.directory) as folder:
        place = Path(folder)
        with google(place) as address:
            candidates = {
                name: functools.partial(measure, name, options, place, address)
                for name in (NONE, OURS, THEIRS)
            }
            found = interleaved(options.repeats, candidates, warm_up=0)
    none = found(NONE, "ran")
    # At least 1 ms, as it is a divisor.
    lost = {n: found(n, "ran").minus(none).mapped(lambda s: max(1e-3, s)) for n in (OURS, THEIRS)}
    rows: list[list] = []
    for words, figure, bar in (
        ("`save()` blocks", "blocked", _BLOCKED_BAR),
        ("training time lost", "lost", _LOST_BAR),
        ("until everything is in the bucket", "uploaded", None),
    ):
        mine, theirs = (lost[n] if figure == "lost" else found(n, figure) for n in (OURS, THEIRS))
        report.compare(words, mine, THEIRS, theirs, secs, bar=bar)
        rows.append([words, (mine, secs), (theirs, secs)])
    upload, copy = found(OURS, "upload"), found(OURS, "copy")
    report.compare("upload of a delta", upload, "a plain copy of it", copy, secs)
    report.publish("bucket", (f"{options.saves} saves", OURS, THEIRS), rows)
    report.show(options)


if __name__ == "__main__":
    main()
