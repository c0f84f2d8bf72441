# SPDX-License-Identifier: Apache-2.0
"""Recovery time from a trainer's death to restored arrays: hot standby, storage and Orbax.

A trainer is killed with SIGKILL, and a new process restores its newest step: stock Orbax from one
full save; deltackpt from storage (a base and ten deltas), and from the memory of a hot standby that
follows the same directory. The benchmark reports two times. The *call* opens the directory and
restores, until the arrays are on the device; the targets apply to it. The *whole* time starts at
the kill: exit of the old process, start and imports of the new one, its connection to Ray (hot
standby only), and the call. The page cache is warm, then cold. The hot standby maps its arrays
copy-on-write, which moves some of the wait from the restore to training. The first steps, and a
first step that changes every element, measure this. Sizes that do not fit in memory are skipped,
and the report lists them.

Then: how far the hot standby lags behind commits while a trainer saves, how much it slows the
trainer's steps, and the speed of compaction, against a plain write of as many bytes.

python benchmarks/restore_service.py --json restore_service.json
python benchmarks/restore_service.py --scale 0.02 --repeats 2      # a smoke test
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import once
import save_restore
import state as states
import ways
from report import Report, Sample, arguments, secs, speed

import deltackpt

#: Sizes of state W: 1.04 GB at scale 1.
SIZES = {"1": 1.0, "4": 3.85}
#: Names of the sources of a restore, and targets of the hot standby against Orbax.
PLACES = {
    "service": "the service",
    "power": "storage",
    "orbax": ways.NAMES["orbax"],
    "orbax-tuned": ways.NAMES["orbax-tuned"],
}
BARS = {"orbax": 1 / 10, "orbax-tuned": 1 / 3}
#: Target against storage, at 1 GB with a warm page cache.
STORAGE_BAR = 1 / 5
#: First training steps after a restore.
FIRST_STEPS = 5
#: Saves of one block of training, steps after each, and distinct batches of those. Lookups are 5 %
#: of the rows; fewer rows change, since some lookups hit the same row.
SAVES, STEPS, BATCHES = 8, 40, 20
#: Free memory that a size needs, in states: for the hot standby and Orbax's restore.
_NEEDED_STATES = 4.5
_LOOK_SECS = 0.2
#: Read when ray is imported. The node uses only the loopback interface, needs no token, sends no
#: usage reports, and kills no worker if memory is nearly full.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
_RAY_STORE_BYTES = 300_000_000

#: Seconds by (what, way or arm), one per round.
Figures = save_restore.Figures


class Service(ways.Deltas):
    """deltackpt, restoring from the hot standby of its directory."""

    def __init__(self, root: Path):
        """Requires a connection to Ray."""
        super().__init__(root, "power")

    def restore(self, template: Any) -> Any:
        result = self._manager.restore_latest(template)
        assert result is not None and not result.skipped
        assert {*result.source} == {"service"}, result.service_error
        return jax.block_until_ready(result.state)


#: Save methods by their command-line names.
WAYS = ways.WAYS | {"service": Service}


# In child processes.


def build(root: Path, scale: float) -> None:
    """Saves one state with each method: ours as a base and deltas, Orbax's as a full save."""
    state = states.make(scale)
    nbytes = states.nbytes(state)
    manager = WAYS["power"](root / "power")
    for number in range(save_restore.CHAIN + 1):
        ids = states.random_ids(state, save_restore.TOUCHED, number)
        state = states.change(state, ids)
        manager.save(number, state, base=number == 0)
        manager.wait()
    manager.close()
    for name in save_restore.THEIRS:
        manager = WAYS[name](root / name)
        manager.save(0, state)
        manager.wait()
        manager.close()
    say(digest=once.checksum(state), nbytes=nbytes)


def hold(way: str, root: Path, scale: float) -> None:
    """A trainer between two steps, with a state and an open directory, until it is killed."""
    manager = WAYS[way](root)
    template = states.template(scale)
    state = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1, leaf.dtype), template)
    jax.block_until_ready(state)
    say(ready=True)
    signal.pause()
    del manager, state


@functools.partial(jax.jit, donate_argnums=0)
def change_all(state: Any) -> Any:
    """Changes every element of the tables and slots, like a dense optimizer."""
    tables, accumulators = jax.tree.map(lambda leaf: leaf * 1.001, state[:2])
    return state._replace(tables=tables, accumulators=accumulators)


def succeed(way: str, root: Path, scale: float, address: str, *, digest: bool) -> None:
    """A trainer's successor: restores and reports the times of its phases."""
    imported = time.monotonic()
    if way == "service":
        connect(address)
    connected = time.monotonic()
    template = states.template(scale)
    jax.block_until_ready(jnp.zeros(8) + 1)
    batches = [states.lookups(template, number) for number in range(FIRST_STEPS)]
    step = states.train.lower(template, batches[0]).compile()
    whole = change_all.lower(template).compile()
    began = time.monotonic()
    manager = WAYS[way](root)
    restored = manager.restore(template)
    ended = time.monotonic()
    peak = once.status_bytes("VmHWM")
    manager.close()
    found = once.checksum(restored) if digest else None
    if way in save_restore.THEIRS:
        # Orbax restores none, and all methods must train with the same program.
        restored = restored._replace(touched=deltackpt.touched.init(restored.tables))
    moments = [time.monotonic()]
    for batch in batches:
        restored, loss = step(restored, batch)
        jax.block_until_ready(loss)
    moments.append(time.monotonic())
    jax.block_until_ready(whole(restored))
    moments.append(time.monotonic())
    say(
        steps=moments[1] - moments[0],
        whole=moments[2] - moments[1],
        imported=imported,
        connected=connected,
        began=began,
        ended=ended,
        peak=peak,
        digest=found,
    )


def train(root: Path, scale: float) -> None:
    """A trainer: for each input line, saves a base or runs a block of steps and saves."""
    state = states.make(scale)
    manager = WAYS["power"](root)
    step = 0

    def save(*, base: bool = False) -> float:
        nonlocal step
        step += 1
        started = time.perf_counter()
        manager.save(step, state, base=base)
        return time.perf_counter() - started

    for line in sys.stdin:
        if line.strip() == "base":
            save(base=True)
            manager.wait()
            ways.keep_only(root, step)
            say(step=step)
            continue
        spent, blocked, first = [], [], step + 1
        batches = [
            [states.lookups(state, BATCHES * (step + number) + seed) for seed in range(BATCHES)]
            for number in range(SAVES + 1)
        ]
        for number in range(SAVES + 1):
            for count in range(STEPS):
                started = time.perf_counter()
                state, loss = states.train(state, batches[number][count % BATCHES])
                jax.block_until_ready(loss)
                if number:  # During or after a save.
                    spent.append(time.perf_counter() - started)
            if number < SAVES:
                blocked.append(save())
        manager.wait()
        say(first=first, last=step, steps=spent, blocked=blocked)
    manager.close()


def fold(root: Path) -> None:
    """Compacts the newest step's chain."""
    from deltackpt.upkeep.compact import compact

    found = compact(root)
    assert found is not None
    say(seconds=found.seconds, read=found.bytes_read, written=found.bytes_written)


def say(**figures: Any) -> None:
    """Sends figures to the parent process."""
    print(json.dumps(figures), flush=True)


# In the parent process.


def child(*words: str, **more: Any) -> subprocess.Popen[str]:
    """Starts this file in a child process."""
    command = [sys.executable, __file__, "--work", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next figures that a process reports."""
    assert process.stdout is not None
    for line in process.stdout:  # Ray may write there too.
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"{process.args} ended with {process.wait()}")


def asked(*words: str) -> dict[str, Any]:
    """Runs a process to its end and returns its figures."""
    with child(*words) as process:
        found = heard(process)
    if process.returncode:
        raise SystemExit(f"{process.args} ended with {process.returncode}")
    return found


def connect(address: str) -> None:
    """Connects this process to the node."""
    import ray

    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    # The first object put into Ray imports pydantic and pyarrow, which takes 0.1 s or more. A
    # worker that Ray starts has already done that.
    ray.put(0)


@contextlib.contextmanager
def node() -> Iterator[str]:
    """Starts a Ray node and yields its address."""
    os.environ.update(_ENVIRONMENT)
    # Ray's sockets are here; their paths can have at most 107 characters.
    place = tempfile.mkdtemp(prefix="ray-")
    import ray

    ray.init(
        num_cpus=os.cpu_count(),
        object_store_memory=_RAY_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
        _temp_dir=place,
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def following(root: Path) -> Iterator[Any]:
    """The hot standby of a directory, once it has the newest step."""
    from deltackpt import service

    started = service.start(root)
    try:
        started.wait_ready(timeout_secs=300)
        yield started
    finally:
        service.stop(root)


def measure_restores(
    root: Path, scale: float, rounds: int, address: str
) -> tuple[Figures, int, bool]:
    """Recovery times by method, the state's bytes, and whether all states were equal."""
    found: Figures = defaultdict(list)
    built = asked("build", str(root), f"--scale={scale}")
    equal = True
    with following(root / "power"):
        for number in range(rounds):
            for way in PLACES:
                place = root / ("power" if way == "service" else way)
                where = (way, str(place), f"--scale={scale}")
                more = ["--digest"] if number == 0 else []
                cold = asked_cold(place, "succeed", *where, f"--address={address}")
                found["cold", way].append(cold["ended"] - cold["began"])
                killed = outlived(where, 4 * built["nbytes"], place)
                seen = asked("succeed", *where, f"--address={address}", *more)
                equal = equal and seen["digest"] in (None, built["digest"])
                for what in ("steps", "whole"):
                    # The checksum has already read everything.
                    kept = cold if more else seen
                    found[f"first {what}", way].append(kept[what])
                found["whole", way].append(seen["ended"] - killed)
                found["call", way].append(seen["ended"] - seen["began"])
                found["start", way].append(seen["imported"] - killed)
                found["connect", way].append(seen["connected"] - seen["imported"])
                found["peak", way].append(seen["peak"] / built["nbytes"])
                call, whole = (found[what, way][-1] for what in ("call", "whole"))
                told = f"{place}: {PLACES[way]}, call {secs(call)}, whole {secs(whole)}"
                print(told, file=sys.stderr, flush=True)
    return found, built["nbytes"], equal


def asked_cold(place: Path, *words: str) -> dict[str, Any]:
    """Like ``asked``, with the directory dropped from the page cache."""
    for path in place.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return asked(*words)


def outlived(where: tuple[str, ...], nbytes: int, place: Path) -> float:
    """Starts and kills a trainer, with memory and page cache warm; returns the time of the kill."""
    trainer = child("hold", *where)
    try:
        heard(trainer)
        settle(nbytes)
        save_restore.read_through(place)
    finally:
        killed = time.monotonic()
        trainer.kill()
        trainer.wait()
    return killed


def settle(nbytes: int) -> None:
    """Like ``ways.settle``, but only within free memory, since the hot standby needs some."""
    os.sync()
    nbytes = min(nbytes, available_bytes() * 2 // 3)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    mmap.mmap(-1, max(1, nbytes), flags=flags).close()


def available_bytes() -> int:
    """Memory that is available without swapping."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found[1]) * 1024


@dataclasses.dataclass
class Followed:
    """Lags of the hot standby behind a trainer.

    Attributes:
      lags: seconds from each commit until the hot standby had it.
      unseen: saves that were superseded before a poll; they count with the lag of a later save.
    """

    lags: list[float] = dataclasses.field(default_factory=list)
    unseen: int = 0


def measure_following(root: Path, scale: float, rounds: int) -> tuple[Figures, Followed]:
    """Step times of a trainer that saves, with and without the hot standby, and the lags."""
    found: Figures = defaultdict(list)
    followed = Followed()
    place = root / "followed"
    with child("train", str(place), f"--scale={scale}", stdin=subprocess.PIPE) as trainer:

        def tell(word: str) -> dict[str, Any]:
            assert trainer.stdin is not None
            trainer.stdin.write(f"{word}\n")
            trainer.stdin.flush()
            return heard(trainer)

        def block(arm: str) -> dict[str, Any]:
            seen = tell("block")
            found["p50", arm].append(float(np.percentile(seen["steps"], 50)))
            found["p99", arm].append(float(np.percentile(seen["steps"], 99)))
            found["mean", arm].append(float(np.mean(seen["steps"])))
            found["blocked", arm].append(float(np.median(seen["blocked"])))
            return seen

        tell("base")
        tell("block")  # Compiles.
        for number in range(rounds):
            for arm in ("with", "without")[:: 1 if number % 2 else -1]:
                tell("base")
                os.sync()
                if arm == "without":
                    block(arm)
                    continue
                with following(place) as service:
                    watch = Watch(service)
                    seen = block(arm)
                    watch.until(seen["last"])
                steps = range(seen["first"], seen["last"] + 1)
                commits = {step: (place / str(step)).stat().st_ctime for step in steps}
                more, unseen = lags(commits, watch.held)
                followed.lags += more
                followed.unseen += unseen
        assert trainer.stdin is not None
        trainer.stdin.close()
    return found, followed


class Watch:
    """Records when the hot standby had each step."""

    def __init__(self, service: Any):
        """Starts polling."""
        self._service = service
        self._held: dict[int, float] = {}
        self._last: int | None = None
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while self._last is None or max(self._held, default=-1) < self._last:
            [replica] = self._service.status().replicas
            if replica.step is not None and replica.found.lag_secs is not None:
                self._held.setdefault(replica.step, replica.found.lag_secs)
            time.sleep(_LOOK_SECS)

    def until(self, step: int) -> None:
        """Waits until the hot standby has the step."""
        self._last = step
        self._thread.join()

    @property
    def held(self) -> dict[int, float]:
        """Seconds from its commit until the hot standby had it, for each step that was seen."""
        return self._held


def lags(commits: dict[int, float], held: dict[int, float]) -> tuple[list[float], int]:
    """Seconds from each commit until the hot standby had that step, or a later one that was seen.

    Args:
      commits: step to commit time.
      held: step to its own lag, for the steps that were seen, including the last.

    Returns:
      The lags, and how many of them are lags of later steps.
    """
    later = {step: min(seen for seen in held if seen >= step) for step in commits}
    found = [commits[later[step]] + held[later[step]] - when for step, when in commits.items()]
    return found, sum(step != seen for step, seen in later.items())


def measure_compaction(root: Path, rounds: int) -> tuple[Figures, dict[str, int]]:
    """Seconds per GB of compacted base, and per GB of a plain write."""
    found: Figures = defaultdict(list)
    sizes: dict[str, int] = {}
    for _ in range(rounds):
        save_restore.read_through(root)
        os.sync()
        seen = asked("fold", str(root))
        shutil.rmtree(root / "compacted")
        sizes = {"read": seen["read"], "written": seen["written"]}
        os.sync()
        found["compaction", "compact"].append(seen["seconds"] / seen["written"] * 1e9)
        seconds = plain_write(root.parent / "plain", seen["written"])
        found["compaction", "plain"].append(seconds / seen["written"] * 1e9)
    return found, sizes


def plain_write(path: Path, nbytes: int) -> float:
    """Seconds to write random bytes sequentially and fsync them."""
    piece = np.random.default_rng(0).bytes(16 << 20)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, nbytes, len(piece)):
            file.write(piece[: nbytes - start])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    os.sync()
    return seconds


def add_restores(report: Report, size: str, found: Figures) -> None:
    """Adds the lines of one size."""

    def sample(what: str, way: str) -> Sample:
        return save_restore.sample(found, what, way)

    for what, title in (("call", "restore call"), ("whole", "whole")):
        for way in ("service", "power"):
            for other, bar in BARS.items():
                report.compare(
                    f"{size} GB, {title}, {PLACES[way]}",
                    sample(what, way),
                    PLACES[other],
                    sample(what, other),
                    secs,
                    bar=bar if (what, way) == ("call", "service") else None,
                )
        report.compare(
            f"{size} GB, {title}, {PLACES['service']}",
            sample(what, "service"),
            PLACES["power"],
            sample(what, "power"),
            secs,
            bar=STORAGE_BAR if (what, size) == ("call", "1") else None,
        )
    for what, title in (
        ("cold", "restore call, page cache cold"),
        ("first steps", f"then the first {FIRST_STEPS} steps"),
        ("first whole", "then a step that changes everything"),
    ):
        for other in ("power", "orbax", "orbax-tuned"):
            report.compare(
                f"{size} GB, {title}, {PLACES['service']}",
                sample(what, "service"),
                PLACES[other],
                sample(what, other),
                secs,
            )
    report.state(f"{size} GB, of it start and imports", sample("start", "service"), secs)
    report.state(f"{size} GB, of it ray.init and a first put", sample("connect", "service"), secs)
    report.section()


def add_following(report: Report, found: Figures, followed: Followed) -> None:
    """Adds the lines of the hot standby with a trainer."""
    report.state("lag behind a commit", Sample(tuple(followed.lags)), secs)
    report.state("lag, p99", Sample((float(np.percentile(followed.lags, 99)),)), secs)
    for what, title in (
        ("p50", "step, p50"),
        ("p99", "step, p99"),
        ("mean", "step, mean"),
        ("blocked", "save() blocks for"),
    ):
        report.compare(
            f"{title}, service following",
            save_restore.sample(found, what, "with"),
            "no service",
            save_restore.sample(found, what, "without"),
            secs,
        )
    report.section()
    report.note(
        f"Lags of {len(followed.lags)} saves, of which {followed.unseen} were passed before the "
        f"service was asked, and count as the next. A save every {STEPS} steps, of about 5 % of "
        "the rows, power; steps are timed without save()."
    )


def run(options: argparse.Namespace, root: Path) -> None:
    """Measures the chosen parts and prints the table."""
    report = Report(
        "Recovery",
        sizes=(
            f"State W at 1 and {SIZES['4']} times its size (1.04 and 4.0 GB) times "
            f"{options.scale:g}, base + {save_restore.CHAIN} deltas of 5 % of the rows; "
            f"{options.repeats} interleaved rounds, median (range); page cache warm but where "
            f"it says cold; ray {importlib.metadata.version('ray')}, one node, store "
            f"{_RAY_STORE_BYTES / 1e6:.0f} MB"
        ),
    )
    report.note(ways.TUNED)
    with node() as address:
        if "restores" in options.parts:
            for size in options.sizes:
                scale = options.scale * SIZES[size]
                needed = _NEEDED_STATES * state_bytes(scale)
                if available_bytes() < needed:
                    report.note(
                        f"{size} GB: not measured, it needs {needed / 2**30:.0f} GiB of free "
                        f"memory, found {available_bytes() / 2**30:.0f}."
                    )
                    continue
                place = root / size
                found, nbytes, equal = measure_restores(place, scale, options.repeats, address)
                add_restores(report, size, found)
                peaks = ", ".join(
                    f"{PLACES[way]} {save_restore.sample(found, 'peak', way).median:.1f}"
                    for way in PLACES
                )
                report.note(
                    f"{size} GB ({nbytes / 1e9:.2f} GB): every state restored was "
                    + ("equal, by checksum" if equal else "DIFFERENT")
                    + f"; peak memory of the restoring process, in states: {peaks}."
                )
                for way in (*save_restore.THEIRS, *(["power"] if size != "1" else [])):
                    shutil.rmtree(place / way)
        if "following" in options.parts:
            found, followed = measure_following(root, options.scale, options.repeats)
            add_following(report, found, followed)
            shutil.rmtree(root / "followed")
    if "compaction" in options.parts:
        place = root / "1" / "power"
        if not place.is_dir():
            asked("build", str(place.parent), f"--scale={options.scale}")
        found, sizes = measure_compaction(place, options.repeats)
        report.compare(
            "compaction, by bytes written",
            save_restore.sample(found, "compaction", "compact"),
            "plain write + fsync",
            save_restore.sample(found, "compaction", "plain"),
            speed,
        )
        report.note(
            f"Compaction reads {sizes['read'] / 1e9:.2f} GB, of base + {save_restore.CHAIN} "
            f"deltas, and writes {sizes['written'] / 1e9:.2f} GB; it runs at a lowered priority."
        )
    report.show(options.json, options.markdown)


def state_bytes(scale: float) -> int:
    """Bytes of a state."""
    leaves = jax.tree.leaves(states.template(scale)._replace(touched=()))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def work(words: list[str]) -> None:
    """Entry point of the child processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["build", "hold", "succeed", "train", "fold"])
    parser.add_argument("where", nargs="+")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--address", default="")
    parser.add_argument("--digest", action="store_true")
    options = parser.parse_args(words)
    *way, root = options.where
    if options.what == "build":
        build(Path(root), options.scale)
    elif options.what == "hold":
        hold(way[0], Path(root), options.scale)
    elif options.what == "succeed":
        succeed(way[0], Path(root), options.scale, options.address, digest=options.digest)
    elif options.what == "train":
        train(Path(root), options.scale)
    else:
        fold(Path(root))


def main() -> int:
    """Runs the command line."""
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2:])
        return 0
    parser = arguments(__doc__)
    parser.set_defaults(repeats=5)
    known = ("restores", "following", "compaction")
    parser.add_argument("--parts", nargs="+", choices=known, default=known, help="what to measure")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES], default=[*SIZES], help="in GB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="restore-service-", dir=options.directory) as place:
        run(options, Path(place))
    return 0


if __name__ == "__main__":
    sys.exit(main())
