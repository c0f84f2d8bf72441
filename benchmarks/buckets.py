# SPDX-License-Identifier: Apache-2.0
"""Saves to and restores from a bucket behind a slow link: deltackpt, Orbax, and a plain copy.

A training loop saves state W at a fixed interval to a fake-gcs-server bucket behind a 100 MB/s
link: deltas through the staging directory and uploader, Orbax through gs:// (gcsfs), and Orbax to a
local directory that is copied in the background. Requests are counted in versitygw's access log.

    make servers && pip install gcsfs
    python benchmarks/buckets.py --json buckets.json
    python benchmarks/buckets.py --scale 0.02 --repeats 2 --saves 3
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import numpy as np
import state as states
import ways
from dlrm_jax import trainer
from report import Report, Sample, arguments, megabytes, secs
from running import s3_server

import deltackpt
from deltackpt import events
from deltackpt.ledger.opening import open_steps
from deltackpt.storage import buckets

BYTES_PER_SEC = 100e6
_BUILT = Path(__file__).resolve().parents[1] / "build" / "servers" / "bin"
#: Share of the rows that change between two saves.
_TOUCHED = 0.05
_COPIERS = 8


class Bucketed:
    """deltackpt with a staging directory."""

    def __init__(
        self, url: str, stage: Path, endpoint: str, wal: deltackpt.WalOptions | None = None
    ):
        self.stage = stage
        #: Seconds that uploads took, the newest last.
        self.promoted: list[float] = []
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
            self.promoted.append(event.seconds)

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step, state)

    def log(self, step: int, state: Any, ids: Any = None) -> None:
        """Appends a WAL record of this step."""
        self._manager.append(step, state, ids=ids)

    def wait(self) -> None:
        self._manager.wait_until_finished()
        if self._manager.options.wal is not None:
            self._manager.wait_appended()

    def restore(self, template: Any) -> Any:
        result = self._manager.restore_latest(template)
        assert result is not None and not result.skipped
        return jax.block_until_ready(result.state)

    def close(self) -> None:
        self._manager.close()


class OrbaxCopied(ways.Orbax):
    """Stock Orbax to a local directory, whose steps are copied to the bucket in the background."""

    def __init__(self, local: Path, url: str, endpoint: str):
        super().__init__(local, compressed=False)
        self._local = local
        self._bucket = buckets.place(url, endpoint=endpoint).open()
        self._copier = ThreadPoolExecutor(1, "copy")
        self._files = ThreadPoolExecutor(_COPIERS, "put")
        self._copied: Future[None] | None = None

    def save(self, step: int, state: Any, *, base: bool = False) -> None:
        # Only one step is copied at a time: otherwise the disk fills.
        if self._copied is not None:
            self._copied.result()
        super().save(step, state, base=base)
        self._copied = self._copier.submit(self._copy, step)

    def _copy(self, step: int) -> None:
        super().wait()
        put(self._local / str(step), self._bucket, self._files)

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.result()

    def close(self) -> None:
        self.wait()
        super().close()


def put(folder: Path, bucket: Any, pool: ThreadPoolExecutor) -> int:
    """Copies the files of a folder, and returns their number."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    names = [path.relative_to(folder.parent).as_posix() for path in found]
    for done in [
        pool.submit(bucket.store.put, name, path.read_bytes())
        for name, path in zip(names, found, strict=True)
    ]:
        done.result()
    return len(found)


@contextlib.contextmanager
def google(folder: Path, bytes_per_sec: float = BYTES_PER_SEC) -> Iterator[tuple[str, str]]:
    """Runs fake-gcs-server and a slow link to it; yields the addresses of link and server."""
    direct, linked = _free_port(), _free_port()
    address = f"http://127.0.0.1:{linked}"
    program = _BUILT / "fake-gcs-server"
    server = [
        *(str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(direct)),
        *("-backend", "memory", "-log-level", "error"),
        *("-external-url", address, "-public-host", f"127.0.0.1:{linked}"),
    ]
    link = [sys.executable, str(Path(__file__).with_name("link.py"))]
    link += [str(linked), str(direct), str(bytes_per_sec)]
    with open(folder / "gcs.log", "wb") as log:
        running = [subprocess.Popen(each, stdout=log, stderr=log) for each in (server, link)]
    try:
        for port in (direct, linked):
            _await(port)
        # For TensorStore, gcsfs and the uploader processes.
        os.environ |= {
            "TENSORSTORE_GCS_HTTP_URL": address,
            "STORAGE_EMULATOR_HOST": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
        }
        asked = urllib.request.Request(
            f"http://127.0.0.1:{direct}/storage/v1/b?project=test",
            data=json.dumps({"name": "bench"}).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(asked, timeout=30).close()
        yield address, f"http://127.0.0.1:{direct}"
    finally:
        for process in running:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _await(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    sys.exit(f"nothing listens on port {port}")


def train(way: Any, options: argparse.Namespace) -> tuple[float, float, float]:
    """Seconds that save() blocked, of the whole run, and until all saves were in the bucket."""
    state = states.make(options.scale)
    ids = [states.random_ids(state, _TOUCHED, number) for number in range(options.saves)]
    state = jax.block_until_ready(states.change(state, ids[0]))
    if way is not None:
        way.save(0, state)  # The base, or Orbax's first save: not measured.
        way.wait()
    gc.collect()
    blocked = 0.0
    started = time.perf_counter()
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
    return blocked, ran, time.perf_counter() - started


def measure(options: argparse.Namespace, place: Path, has_gcsfs: bool) -> dict[str, list[float]]:
    """Blocked and total times of each way, and the times of the limits, round by round."""
    found: dict[str, list[float]] = defaultdict(list)
    with google(place) as (address, direct):
        for number in range(options.repeats):
            made: list[tuple[str, Callable[[], Any]]] = [
                ("none", lambda: None),
                (
                    "deltackpt",
                    lambda number=number: Bucketed(
                        f"gs://bench/ours{number}", place / f"stage{number}", address
                    ),
                ),
                (
                    "Orbax, copied",
                    lambda number=number: OrbaxCopied(
                        place / f"local{number}", f"gs://bench/copied{number}", address
                    ),
                ),
            ]
            if has_gcsfs:
                made.append(
                    (
                        "Orbax, gs://",
                        lambda number=number: ways.Orbax(
                            f"gs://bench/orbax{number}", compressed=False
                        ),
                    )
                )
            for name, make in made:
                ways.settle(states.template(options.scale))
                way = make()
                blocked, ran, durable = train(way, options)
                found[f"{name}: blocked"].append(blocked)
                found[f"{name}: ran"].append(ran)
                found[f"{name}: durable"].append(durable)
                if isinstance(way, Bucketed):
                    found["a delta"].append(median(way.promoted[1:]))
                if way is not None:
                    way.close()
            found["promoter"].append(_promoter_peak(place / f"stage{number}" / "promoter.log"))
            found["copy of a delta"].append(_copy_secs(place / f"stage{number}", address, number))
            for folder in place.iterdir():
                if folder.is_dir() and folder.name != "server":
                    shutil.rmtree(folder)
            _ = direct
    return found


def _copy_secs(stage: Path, address: str, number: int) -> float:
    """The physical limit: seconds to put the files of the newest delta with as many threads."""
    steps = sorted((stage / "steps").glob("[0-9]*"), key=lambda path: int(path.name))
    bucket = buckets.place(f"gs://bench/plain{number}", endpoint=address).open()
    with ThreadPoolExecutor(_COPIERS) as pool:
        started = time.perf_counter()
        put(steps[-1], bucket, pool)
        return time.perf_counter() - started


def _promoter_peak(log: Path) -> float:
    """Peak resident memory of an uploader, from its log."""
    for _ in range(200):
        if found := re.findall(r"most memory (\d+) kB", log.read_text()):
            return float(found[-1]) * 1024
        time.sleep(0.05)
    return float("nan")


def restores(options: argparse.Namespace, place: Path) -> tuple[list[float], list[float]]:
    """Seconds of restores of the same steps from a bucket without a slow link and a directory."""
    from_bucket, from_directory = [], []
    with s3_server.running(place / "server") as server:
        url = server.bucket("bench") + "/run"
        state = states.make(options.scale)
        template = states.template(options.scale)
        way = Bucketed(url, place / "first", server.endpoint)
        for step in range(3):
            way.save(step, state)
            state = states.change(state, states.random_ids(state, _TOUCHED, step))
        way.wait()
        way.close()
        for number in range(options.repeats):
            for found, where in ((from_bucket, "bucket"), (from_directory, "directory")):
                ways.settle(template)
                root: Any = (
                    Bucketed(url, place / f"cold{number}", server.endpoint)
                    if where == "bucket"
                    else ways.Deltas(place / "first" / "steps", "power")
                )
                started = time.perf_counter()
                root.restore(template)
                found.append(time.perf_counter() - started)
                root.close()
    return from_bucket, from_directory


def bill(options: argparse.Namespace, place: Path, report: Report) -> None:
    """Reports the requests of a delta's commit and of a read-only open, and a delta's files."""
    with s3_server.running(place / "server") as server:
        url = server.bucket("bench") + "/run"
        state = states.make(options.scale)
        way = Bucketed(url, place / "billed", server.endpoint)
        way.save(0, state)
        way.wait()
        time.sleep(1.0)  # Leftovers of interrupted uploads are looked for once.
        before = server.requests()
        way.save(1, states.change(state, states.random_ids(state, _TOUCHED, 1)))
        way.wait()
        time.sleep(0.2)
        spent = server.requests() - before
        step = place / "billed" / "steps" / "1"
        files = [path for path in step.rglob("*") if path.is_file()]
        layers = [path for path in files if path.name.startswith("layer.")]
        way.close()
        before = server.requests()
        open_steps(url, endpoint=server.endpoint)
        time.sleep(0.2)
        opened = server.requests() - before
    further = sum(spent.values()) - len(files) - 1  # Includes the digests file.
    report.state("requests of a commit, beyond 1 PUT a file", _one(further), _count, bar=3)
    report.state("listings of an opening", _one(opened["ListObjectsV2"]), _count, bar=1)
    report.state(
        "files of a delta that are no layers", _one(len(files) - len(layers)), _count, bar=20
    )
    report.note(
        f"A delta of {len(files)} files: {dict(spent)}; an opening to read: {dict(opened)}."
    )


def _one(value: float) -> Sample:
    return Sample((float(value),))


def _count(value: float) -> str:
    return f"{value:.0f}"


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__)
    parser.set_defaults(scale=0.2, repeats=5)
    parser.add_argument("--saves", type=int, default=8, help="of one run")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two saves")
    options = parser.parse_args()
    logging.getLogger("gcsfs").setLevel(logging.ERROR)
    has_gcsfs = importlib.util.find_spec("gcsfs") is not None
    nbytes = states.nbytes(states.template(options.scale))
    report = Report(
        "A bucket behind 100 MB/s",
        sizes=f"State of {nbytes / 1e6:.0f} MB, {_TOUCHED:.0%} of the rows touched between saves, "
        f"{options.saves} saves every {options.interval} s; {ways.TUNED}",
    )
    with tempfile.TemporaryDirectory(prefix="buckets-", dir=options.directory) as folder:
        place = Path(folder)
        found = measure(options, place, has_gcsfs)
        sample = {name: Sample(tuple(values)) for name, values in found.items()}
        others = ["Orbax, copied", *(["Orbax, gs://"] if has_gcsfs else [])]
        none = sample["none: ran"]
        for other in others:
            mine, theirs = sample["deltackpt: blocked"], sample[f"{other}: blocked"]
            report.compare("save() blocks, deltackpt", mine, other, theirs, secs, bar=0.1)
        for other in others:
            ours = _beyond(sample["deltackpt: ran"], none)
            theirs = _beyond(sample[f"{other}: ran"], none)
            report.compare("training beyond none, deltackpt", ours, other, theirs, secs, bar=0.2)
        for other in others:
            ours, theirs = sample["deltackpt: durable"], sample[f"{other}: durable"]
            report.compare("until all is in the bucket", ours, other, theirs, secs)
        report.section()
        limit = sample["copy of a delta"]
        each = sample["a delta"]
        report.compare("promotion of a delta", each, "a plain copy of it", limit, secs)
        report.state("most memory of the promoter", sample["promoter"], megabytes, bar=200e6)
        report.section()
        gc.collect()
        ours, theirs = (Sample(tuple(values)) for values in restores(options, place))
        report.compare("restore from the bucket", ours, "from a directory", theirs, secs, bar=2.5)
        shutil.rmtree(place / "server")
        bill(options, place, report)
    if not has_gcsfs:
        report.note("Without gcsfs: Orbax through gs:// was not measured (pip install gcsfs).")
    report.show(options.json, options.markdown)


def _beyond(ran: Sample, none: Sample) -> Sample:
    """The extra time of a run over one without saves; at least 1 ms, as it is a divisor."""
    return Sample(tuple(max(1e-3, a - b) for a, b in zip(ran.values, none.values, strict=True)))


if __name__ == "__main__":
    np.set_printoptions(precision=3)
    main()
