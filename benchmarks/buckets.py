# SPDX-License-Identifier: Apache-2.0
"""Saves to a bucket behind a slow link: deltackpt, Orbax whose steps are copied, and a plain copy.

A training loop saves state W at a fixed interval to a fake-gcs-server bucket behind a 100 MB/s
link. deltackpt writes deltas through the staging directory and uploader. Orbax writes to a local
directory that is copied in the background. It needs ``make servers``.
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
import report as reports
import state as states
import ways
from report import Report, interleaved

import deltackpt
from deltackpt.events import UploadEvent
from deltackpt.storage import buckets

BYTES_PER_SEC = 100e6
NONE, OURS, THEIRS = "no saves", "deltackpt", "Orbax to disk, copied"
_BUILT = Path(__file__).resolve().parents[1] / "build" / "servers" / "bin"
#: Share of the rows that change between two saves.
_TOUCHED = 0.05
_COPIERS = 8
#: Bars of the time that save() blocks, and of the training time lost, against Orbax.
_BARS = {"blocked": 0.1, "lost": 0.2}


class Bucketed(ways.Deltas):
    """deltackpt with a staging directory; ``options`` are those of the manager."""

    def __init__(
        self, url: str, stage: Path, endpoint: str, *, shared: bool = True, **options: Any
    ):
        tiers = deltackpt.Tiers(staging_dir=str(stage), endpoint=endpoint, shared=shared)
        super().__init__(url, tiers=tiers, **options)


class OrbaxCopied(ways.Orbax):
    """Stock Orbax to a local directory, whose steps are copied to the bucket in the background."""

    def __init__(self, local: Path, url: str, endpoint: str):
        super().__init__(local)
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

    def copy(path: Path) -> None:
        bucket.store.put(path.relative_to(folder.parent).as_posix(), path.read_bytes())

    found, started = ways.files_in(folder), time.perf_counter()
    with ThreadPoolExecutor(_COPIERS) as pool:
        list(pool.map(copy, found))
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
        way.saved(0, state)  # The base, or Orbax's first save: not measured.
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
    way = None
    if name == OURS:
        way = Bucketed(url, folder, address)
    elif name == THEIRS:
        way = OrbaxCopied(folder, url, address)
    found = train(way, options)
    if way is not None:
        way.close()
    if isinstance(way, Bucketed):
        uploads = [event.seconds for event in way.events if isinstance(event, UploadEvent)]
        found["upload"] = median(uploads[1:])
        steps = sorted((folder / "steps").glob("[0-9]*"), key=lambda path: int(path.name))
        found["copy"] = put(steps[-1], buckets.locate(f"{url}-copy", endpoint=address).open())
    shutil.rmtree(folder, ignore_errors=True)
    return found


def bucket(report: Report, options: argparse.Namespace, place: Path) -> None:
    nbytes = ways.nbytes(states.template(options.scale))
    report.sizes = (
        f"State of {nbytes / 1e6:.0f} MB, {_TOUCHED:.0%} of the rows touched between saves, "
        f"{options.saves} saves every {options.interval} s. {ways.TUNED}"
    )
    with google(place) as address:
        candidates = {
            name: functools.partial(measure, name, options, place, address)
            for name in (NONE, OURS, THEIRS)
        }
        found = interleaved(options.repeats, candidates, warm_up=0)
    for name in (OURS, THEIRS):
        for ran, none in zip(found(name, "ran").values, found(NONE, "ran").values, strict=True):
            found.add(name, {"lost": max(1e-3, ran - none)})  # It is a divisor.
    rows: list[list] = []
    for words, figure in (
        ("`save()` blocks", "blocked"),
        ("training time lost", "lost"),
        ("until everything is in the bucket", "uploaded"),
    ):
        report.against(words, found, figure, OURS, [THEIRS], bars=[_BARS.get(figure)])
        rows.append([words, *found.cells(OURS, figure), *found.cells(THEIRS, figure)])
    upload, copy = found(OURS, "upload"), found(OURS, "copy")
    report.compare("upload of a delta", upload, "a plain copy of it", copy)
    report.publish("bucket", (f"{options.saves} saves", OURS, THEIRS), rows)


if __name__ == "__main__":
    # The interval is in seconds.
    reports.main("A bucket behind 100 MB/s", bucket, repeats=5, scale=0.2, saves=6, interval=0.5)
