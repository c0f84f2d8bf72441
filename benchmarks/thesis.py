# SPDX-License-Identifier: Apache-2.0
"""The table of the continuous-checkpointing thesis: records at each step against full saves.

Its model: 8 tables of 80,000 x 64, MLPs 512-512-64 and 1024-1024-1024-1, batch 2,048, epochs of
50,000 samples. It streams the updated rows instead of saving everything at the end of an epoch.
This takes 38 % less time with one process, and 47 % less with several. Its recovery takes 2 to
7 times a full load.

Ours: WAL records of the rows at each step and of the dense leaves at the end of the epoch, on this
disk and in Kafka. They are compared with synchronous full saves at the end of the epoch: by pickle
with fsync, by Orbax and as our base, on this disk and in a bucket behind a slow link. Every save
is measured, none is modelled. With one index for each lookup, a step touches 3 % of the rows. With
the thesis's 100 indices it touches 92 %: a record is then as large as a full save, and there is
nothing to gain.

python benchmarks/thesis.py --json thesis.json
python benchmarks/thesis.py --only epochs --processes 2 --repeats 3
python benchmarks/thesis.py --only epochs --processes 1 --lookups 100 --repeats 1
python benchmarks/thesis.py --quick                    # a smoke test
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import pickle
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import buckets
import fresh
import jax
import numpy as np
import scaling
import wal
import ways
from dlrm_jax.placement import Placement
from jax.experimental import multihost_utils
from report import Figures, Report, arguments, count, interleaved, megabytes, run_parts, secs, times
from running import kafka_cluster

import deltackpt
from deltackpt.format import naming
from deltackpt.storage import buckets as stores
from deltackpt.wal import KafkaWal

NONE, RECORDS, KAFKA, ALL = "no saves", "records", "records in Kafka", "records of everything"
BASE = "a base"
FULL = ("pickle", "Orbax defaults", "Orbax tuned", BASE)
#: Time of an epoch relative to one with full saves, by the number of processes, in the thesis.
THESIS = {1: 1 - 0.38, 2: 1 - 0.47, 4: 1 - 0.47}
#: Bar on a recovery relative to a full load; 2 to 7 in the thesis.
_RECOVERY = 1.2
#: Bytes per second of the link to the bucket: as fast as the full saves of the thesis.
_LINK_BYTES_PER_SEC = 20e6
_BROKERS = "BENCHMARK_KAFKA_BROKERS"


class Pickles:
    """One pickle for each process and save, as plain training scripts write it."""

    def __init__(self, root: Path):
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def _path(self) -> Path:
        return self.root / f"{jax.process_index()}.pickle"

    def save(self, step: int, state: Any, *, base: bool = False) -> None:
        del step, base
        shards = [np.asarray(shard) for shard in scaling.shards(state)]
        ways.replace_file(self._path(), lambda file: pickle.dump(shards, file, protocol=5))

    def wait(self) -> None:
        pass

    def restore(self, template: Any) -> Any:
        leaves, treedef = jax.tree.flatten(template._replace(touched=()))
        with self._path().open("rb") as file:
            shards = iter(pickle.load(file))
        found = []
        for leaf in leaves:
            placed = [jax.device_put(next(shards), s.device) for s in leaf.addressable_shards]
            found.append(
                jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed)
            )
        return jax.block_until_ready(jax.tree.unflatten(treedef, found))

    def close(self) -> None:
        pass


class Bases(ways.Deltas):
    """deltackpt whose saves are all full."""

    def save(self, step: int, state: Any, *, base: bool = False) -> None:
        super().save(step, state, base=True)


def make(mode: str, root: Path, every: int) -> Any:
    """The way of a mode."""
    if mode in (BASE, "pickle"):
        return (Bases if mode == BASE else Pickles)(root)
    if mode in FULL:
        return ways.WAYS[mode](root)
    options: dict[str, Any] = {} if mode == ALL else {"dense_every": every}
    if mode == KAFKA:
        config = {"bootstrap.servers": os.environ[_BROKERS]}
        options["backend"] = KafkaWal(root.name, config=config)
    return ways.Deltas(root, wal=deltackpt.WalOptions(**options))


# Code of the processes.


def epochs_of(place: str, sizes: dict[str, Any], modes: list[str]) -> list[dict[str, Any]]:
    """This process's view of each epoch, and of the recovery after it; all modes in turn."""
    options = argparse.Namespace(**sizes)
    placement = Placement.over_all_devices()
    loop = wal.Loop(options, exponent=0.0, lookups=options.lookups, placement=placement)
    meet = functools.partial(multihost_utils.sync_global_devices, "meet")
    found = []
    for number in range(options.repeats):
        for position, mode in enumerate(modes):
            root = Path(place, f"run-{position}-{number}")
            way = None if mode == NONE else make(mode, root, options.steps)
            every = 0 if mode in (RECORDS, KAFKA) else options.steps
            view, state = loop.train(way, every, waits=mode in FULL, meet=meet)
            if way is not None:
                meet()
                started = time.perf_counter()
                restored = way.restore(state)
                meet()
                view["recovery"] = time.perf_counter() - started
                pairs = map(np.array_equal, scaling.shards(restored), scaling.shards(state))
                assert all(pairs), f"{mode}: the restored state differs"
                if mode in FULL:
                    saved = root if mode == "pickle" else root / str(options.steps)
                    mine = ways.tree_bytes(saved) if jax.process_index() == 0 else 0
                    view["bytes"] = mine / options.steps
                way.close()
                meet()
            found.append(view | {"mode": mode})
            if jax.process_index() == 0:
                shutil.rmtree(root, ignore_errors=True)
            meet()
    return found


def victim(mode: str, root: str, sizes: dict[str, Any]) -> None:
    """Trains until it is killed, and sends each step after its append or save."""
    options = argparse.Namespace(**sizes)
    loop, way = wal.Loop(options, exponent=0.0), make(mode, Path(root), options.steps)
    state, number = loop.start(), 0
    way.save(0, state, base=True)
    way.wait()
    while True:
        batch = loop.batches[number % options.steps]
        state, number = loop.advance(state, batch), number + 1
        if mode not in FULL:
            way.append(number, state, batch.ids)
        elif number % options.steps == 0:
            way.save(number, state)
            way.wait()
        fresh.say(number)


def survived(mode: str, root: str, sizes: dict[str, Any]) -> int:
    """The step of the state that a new process restores."""
    options = argparse.Namespace(**sizes)
    way = make(mode, Path(root), options.steps)
    step = int(way.restore(wal.Loop(options, exponent=0.0).start()).step)
    way.close()
    return step


# Code of the launcher.


def epochs(report: Report, options: argparse.Namespace, root: Path) -> None:
    """An epoch with records or full saves on this disk, and recovery, by number of processes."""
    modes, rows = [NONE, RECORDS, *FULL], []
    if (missing := kafka_cluster.missing()) is None:
        modes.insert(2, KAFKA)
    else:
        report.note(f"Without Kafka: {missing}.")
    for processes in options.processes:
        place = root / str(processes)
        place.mkdir()
        with _brokers(options, processes, place, modes):
            views = fresh.call_job(
                epochs_of, processes, place, _sizes(options), modes, limit=options.limit
            )
        found = Figures()
        for chunks in zip(*views, strict=True):
            mode = chunks[0].pop("mode")
            summed = ("cpu", "bytes") if mode != NONE else ("cpu",)
            found.add(
                mode, chunks[0] | {one: sum(chunk[one] for chunk in chunks) for one in summed}
            )
        title = f"{processes} process{'es' if processes > 1 else ''}"
        for mode in modes[1:]:
            none = found(NONE, "secs")
            report.compare(f"{title}: epoch, {mode}", found(mode, "secs"), NONE, none, secs)
            report.state(f"{title}: CPU, {mode}", found(mode, "cpu"), secs)
        bar = THESIS[processes] if options.lookups == 1 else None
        for mode in [mode for mode in (RECORDS, KAFKA) if mode in modes]:
            ours = mode == RECORDS
            for name in FULL:
                least = None if name == BASE else bar
                for figure, most in (("secs", least), ("recovery", _RECOVERY)):
                    what = f"{title}: {'epoch' if figure == 'secs' else 'recovery'}, {mode}"
                    mine, theirs = found(mode, figure), found(name, figure)
                    report.compare(what, mine, name, theirs, secs, bar=most if ours else None)
            report.state(f"{title}: lag of a record, {mode}", found(mode, "durable"), secs)
            report.state(f"{title}: its p99, {mode}", found(mode, "durable p99"), secs)
        for mode in modes[1:]:
            nbytes = found(mode, "bytes").mapped(lambda value: value * options.steps)
            report.state(f"{title}: bytes of an epoch, {mode}", nbytes, megabytes)
            relative = found(mode, "secs").over(found(NONE, "secs"))
            rows.append([str(processes), mode, (relative, times)])
            rows[-1] += [(found(mode, "recovery"), secs), (nbytes, megabytes)]
        report.section()
    columns = ("processes", "an epoch with", "time, of no saves", "recovery", "bytes written")
    report.publish("thesis", columns, rows)


@contextlib.contextmanager
def _brokers(
    options: argparse.Namespace, processes: int, place: Path, modes: list[str]
) -> Iterator[None]:
    """Runs a broker with the topics of all rounds, if it is wanted."""
    if KAFKA not in modes:
        yield
        return
    folder = place.with_name(f"{place.name}-broker")
    folder.mkdir()
    with kafka_cluster.KafkaCluster(folder) as cluster:
        for number in range(options.repeats):
            cluster.topic(f"run-{modes.index(KAFKA)}-{number}", processes)
        os.environ[_BROKERS] = cluster.config["bootstrap.servers"]
        yield


def slow_store(report: Report, options: argparse.Namespace, root: Path) -> None:
    """An epoch whose saves go to a bucket behind a slow link; one process."""
    loop = wal.Loop(options, exponent=0.0, lookups=options.lookups)
    link = f"a bucket at {_LINK_BYTES_PER_SEC / 1e6:g} MB/s"

    def epoch(name: str, address: str) -> dict[str, float]:
        place = root / f"{name.split()[0]}-{time.monotonic_ns()}"
        url = f"gs://bench/{place.name}"
        way: Any = None
        if name == RECORDS:
            logged = deltackpt.WalOptions(dense_every=options.steps)
            way = buckets.Bucketed(url, place, address, wal=logged)
        elif name != NONE:
            way = buckets.OrbaxCopied(place, url, address)
        every, started = 0 if name == RECORDS else options.steps, time.perf_counter()
        # The full saves of the thesis are synchronous.
        found, _ = loop.train(way, every, waits=True)
        if name == RECORDS:
            _await_records(place, url, address)
        if way is not None:
            way.close()
        shutil.rmtree(place, ignore_errors=True)
        return {"secs": found["secs"], "complete": time.perf_counter() - started}

    with buckets.google(root, _LINK_BYTES_PER_SEC) as address:
        names = (NONE, RECORDS, "Orbax, copied")
        candidates = {name: functools.partial(epoch, name, address) for name in names}
        found = interleaved(options.repeats, candidates, warm_up=0)
    bar = THESIS[1] if options.lookups == 1 else None
    mine = found(RECORDS, "secs")
    report.compare(f"{link}: epoch", mine, NONE, found(NONE, "secs"), secs)
    report.compare(f"{link}: epoch", mine, names[2], found(names[2], "secs"), secs, bar=bar)
    rows: list[list[Any]] = []
    for name in names[1:]:
        report.state(f"{link}: base and epoch are complete, {name}", found(name, "complete"), secs)
        relative = found(name, "secs").over(found(NONE, "secs"))
        rows.append([name, (relative, times), (found(name, "complete"), secs)])
    report.section()
    columns = ("an epoch with", "time, of no saves", "until the bucket has everything")
    report.publish("store", columns, rows)


def _await_records(stage: Path, url: str, address: str) -> None:
    """Waits until a bucket has all bytes of the WAL."""
    written = sum(path.stat().st_size for path in stage.rglob("*.seg"))
    log = stores.locate(url, endpoint=address).open() / naming.LOG
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        pieces = [naming.piece_range(key.rpartition("/")[2]) for key in log.keys()]
        if sum(piece.end - piece.start for piece in pieces if piece is not None) == written:
            return
        time.sleep(0.02)
    sys.exit(f"{url}: expected {written:,} bytes of the WAL within 300 s")


def kills(report: Report, options: argparse.Namespace, root: Path) -> None:
    """What is lost if training is killed with SIGKILL in its second epoch; one process."""
    chooser, found = random.Random(0), Figures()
    sizes, batches = _sizes(options), wal.Loop(options, exponent=0.0).batches
    for mode in (ALL, RECORDS, "pickle"):
        for number in range(options.repeats):
            where = mode, root / f"{mode.split()[-1]}-{number}", sizes
            after = options.steps + chooser.randrange(1, max(2, options.steps))
            with fresh.started(victim, *where) as process:
                while (done := fresh.heard(process)) < after:
                    pass
                process.kill()
                with contextlib.suppress(RuntimeError):
                    while True:  # Steps that it finished before it died.
                        done = fresh.heard(process)
            kept = fresh.call(survived, *where)
            lost = [batches[step % options.steps] for step in range(kept, done)]
            rows = [
                np.unique(np.concatenate([batch.ids[name] for batch in lost])).size
                for name in (batches[0].ids if lost else ())
            ]
            found.add(mode, {"steps": done - kept, "rows": sum(rows)})
        for figure in ("steps", "rows"):
            report.state(f"SIGKILL, {mode}: lost {figure}", found(mode, figure), count)
    report.section()
    lost_by_mode = found.rows((ALL, RECORDS, "pickle"), steps=count, rows=count)
    report.publish("kills", ("training with", "lost steps", "lost rows"), lost_by_mode)


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    names = ("scale", "batch", "hidden", "lookups", "steps", "repeats")
    return {name: getattr(options, name) for name in names}


PARTS = {
    "epochs": epochs,
    "slow-store": slow_store,
    "kills": kills,
}


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, repeats=5)
    add = parser.add_argument
    add("--batch", type=int, default=2048, help="samples in a batch")
    add("--hidden", type=int, default=1024, help="columns of the largest layers")
    add("--lookups", type=int, default=1, help="rows of each table that a sample uses")
    add("--epoch", type=int, default=50_000, help="samples in an epoch")
    add("--processes", type=int, nargs="+", choices=THESIS, default=[*THESIS])
    add("--limit", type=int, default=1800, help="seconds for a set of processes")
    add("--quick", action="store_true", help="everything small, which measures nothing")
    add("--only", nargs="+", choices=PARTS, default=[*PARTS], help="what to measure")
    options = parser.parse_args()
    if options.quick:
        options.scale, options.repeats, options.batch, options.hidden = 0.01, 1, 64, 32
        options.epoch, options.processes = 256, [2]
    options.steps = max(1, round(options.epoch / options.batch))
    report = Report(
        "The thesis's table",
        sizes=f"DLRM, 8 tables of {round(80_000 * options.scale):,} x 64, batch {options.batch}, "
        f"{options.steps} steps in an epoch, uniform ids, {options.lookups} for each lookup. "
        f"{ways.TUNED}",
    )
    run_parts(report, options, PARTS, options.only)


if __name__ == "__main__":
    main()
