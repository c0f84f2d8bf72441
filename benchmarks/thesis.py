# SPDX-License-Identifier: Apache-2.0
"""The table of the continuous-checkpointing thesis: records at each step against full saves.

Its model: 8 tables of 80,000 x 64, MLPs 512-512-64 and 1024-1024-1024-1, batch 2,048, epochs of
50,000 samples. Its training streams the updated rows instead of saving everything at the end of an
epoch, and takes 38 % less time with one process and 47 % less with several. Its recovery takes 2 to
7 times a full load.

Ours: WAL records of the rows at each step and of the dense leaves at the end of the epoch, on this
disk and in Kafka (one broker, on the same two cores). Theirs:
synchronous full saves at the end of the epoch, by pickle with fsync and by Orbax, on this disk; and
in a bucket behind a slow link, which records reach in pieces, up to 10 s after they are durable on
the node. Every save is measured, none is modelled. With one index for each
lookup, a step touches 3 % of the rows. With the thesis's 100 indices it touches 92 %: a record
is then as large as a full save, and there is nothing to gain.

    python benchmarks/thesis.py --json thesis.json
    python benchmarks/thesis.py --only epochs --lookups 100 --repeats 3
    python benchmarks/thesis.py --quick                    # a smoke test
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import buckets
import log_job
import numpy as np
import ways
from log_job import MODES, Loop
from report import Report, Sample, arguments, megabytes, secs
from running import kafka_cluster

import deltackpt
from deltackpt.format import names
from deltackpt.storage.buckets import place as place_of

#: Number of processes to the time of an epoch relative to one with full saves, in the thesis.
THESIS = {1: 1 - 0.38, 2: 1 - 0.47, 4: 1 - 0.47}
#: Bar on a recovery relative to a full load; 2 to 7 in the thesis.
RECOVERY = 1.2
EPOCH_SAMPLES = 50_000
#: Bytes per second of the link to the bucket: as fast as the full saves of the thesis.
LINK_BYTES_PER_SEC = 20e6
FULL = ("epoch-pickle", "epoch-orbax", "epoch-tuned")


def sample(runs: list[dict[str, float]], field: str = "secs") -> Sample:
    """A figure of each round."""
    return Sample(tuple(run[field] for run in runs))


def epochs(report: Report, options: argparse.Namespace, root: Path) -> None:
    """An epoch with records or full saves on this disk, and recovery, by number of processes."""
    modes = ["none", "epoch-wal", "epoch-full", *FULL]
    if (missing := kafka_cluster.missing()) is None:
        modes.insert(2, "epoch-kafka")
    else:
        report.note(f"Without Kafka: {missing}.")
    for count in options.processes:
        place = root / f"{count}"
        place.mkdir()
        with _brokers(options, count, place, "epoch-kafka" in modes) as brokers:
            found = log_job.launch(options, count, modes, place, brokers)
        title = f"{count} process{'es' if count > 1 else ''}"
        ours, nothing = found["epoch-wal"], sample(found["none"])
        bar = THESIS[count] if options.lookups == 1 else None
        records = [name for name in modes if name not in ("none", *FULL)]
        for name in records:
            what = f"{title}: epoch, {MODES[name].name}"
            report.compare(what, sample(found[name]), "no saves", nothing, secs)
        for name in FULL:
            theirs, what = found[name], MODES[name].name
            report.compare(f"{title}: epoch", sample(ours), what, sample(theirs), secs, bar=bar)
        if "epoch-kafka" in modes:
            loaded = sample(found[FULL[0]], "recovery")
            what, mine = f"{title}: recovery from Kafka", sample(found["epoch-kafka"], "recovery")
            report.compare(what, mine, f"load, {MODES[FULL[0]].name}", loaded, secs)
        for name in FULL:
            theirs, what = found[name], MODES[name].name
            report.compare(
                f"{title}: recovery",
                sample(ours, "recovery"),
                f"load, {what}",
                sample(theirs, "recovery"),
                secs,
                bar=RECOVERY,
            )
        report.compare(
            f"{title}: bytes of the epoch, process 0",
            sample(ours, "saved_bytes"),
            MODES[FULL[0]].name,
            sample(found[FULL[0]], "saved_bytes"),
            megabytes,
        )
        for name in modes:
            report.state(
                f"{title}: processor, {MODES[name].name}", sample(found[name], "cpu"), secs
            )
        for name in records:
            what = f"{title}: lag of a record, {MODES[name].name}"
            report.state(f"{what}: median", sample(found[name], "durable"), secs)
            report.state(f"{what}: p99", sample(found[name], "durable_p99"), secs)
        report.section()


@contextlib.contextmanager
def _brokers(options: argparse.Namespace, count: int, place: Path, wanted: bool) -> Iterator[str]:
    """Runs a broker with the topics of all rounds; yields its address, "" if it is not wanted."""
    if not wanted:
        yield ""
        return
    folder = place.with_name(f"{place.name}-broker")
    folder.mkdir()
    with kafka_cluster.KafkaCluster(folder) as cluster:
        for number in range(options.repeats):
            cluster.topic(log_job.topic_of(place / f"epoch-kafka-{number}"), count)
        yield cluster.config["bootstrap.servers"]


def slow_store(report: Report, options: argparse.Namespace, root: Path) -> None:
    """An epoch whose saves go to a bucket behind a slow link; one process."""
    loop = Loop.of(options, 0.0)
    found: dict[str, list[tuple[float, float]]] = {"none": [], "wal": [], "orbax": []}
    with buckets.google(root, LINK_BYTES_PER_SEC) as (address, _):
        for number in range(options.repeats):
            for name, runs in found.items():
                place = root / f"{name}-{number}"
                runs.append(_slow_epoch(loop, name, place, address))
    none = Sample(tuple(trained for trained, _ in found["none"]))
    for position, what in enumerate(("trained", "all in the bucket")):
        ours, theirs = (
            Sample(tuple(run[position] for run in found[name])) for name in ("wal", "orbax")
        )
        speed = f"{LINK_BYTES_PER_SEC / 1e6:g} MB/s"
        bar = THESIS[1] if position == 0 and options.lookups == 1 else None
        report.compare(
            f"bucket at {speed}: epoch, {what}", ours, "Orbax, then copied", theirs, secs, bar=bar
        )
        report.compare(f"bucket at {speed}: epoch, {what}", ours, "no saves", none, secs)
    report.section()


def _slow_epoch(loop: Loop, name: str, place: Path, address: str) -> tuple[float, float]:
    """Seconds until training ended, and until the bucket had everything."""
    state, url = loop.start(), f"gs://bench/{place.name}"
    way: buckets.Bucketed | buckets.OrbaxCopied | None = None
    if name == "wal":
        wal = deltackpt.WalOptions(dense_every=loop.every)
        way = buckets.Bucketed(url, place, address, wal=wal)
    elif name == "orbax":
        way = buckets.OrbaxCopied(place, url, address)
    if way is not None:
        way.save(0, state)
        way.wait()
    started = time.perf_counter()
    for number, batch in enumerate(loop.batches, start=1):
        state = loop.advance(state, batch)
        if isinstance(way, buckets.Bucketed):
            way.log(number, state, batch.ids)
    if isinstance(way, buckets.OrbaxCopied):
        way.save(len(loop.batches), state)
        way.wait()  # The thesis's full saves are synchronous.
    trained = time.perf_counter() - started
    if isinstance(way, buckets.Bucketed):
        way.wait()
        _await_records(place, url, address)
    complete = time.perf_counter() - started
    if way is not None:
        way.close()
    return trained, complete


def _await_records(stage: Path, url: str, address: str) -> None:
    """Waits until a bucket has all bytes of the WAL."""
    written = sum(path.stat().st_size for path in stage.rglob("*.seg"))
    log = place_of(url, endpoint=address).open() / names.LOG
    deadline = time.monotonic() + 300
    while True:
        pieces = [names.piece_range(key.rpartition("/")[2]) for key in log.keys()]
        if sum(piece.end - piece.start for piece in pieces if piece is not None) == written:
            return
        if time.monotonic() > deadline:
            sys.exit(f"{url}: expected {written:,} bytes of the WAL within 300 s")
        time.sleep(0.02)


def kills(report: Report, options: argparse.Namespace, root: Path) -> None:
    """What is lost if training is killed with SIGKILL in its second epoch; one process."""
    chooser = random.Random(options.seed)
    batches = Loop.of(options, 0.0).batches
    for name in ("epoch-full", "epoch-wal", "epoch-pickle"):
        steps, rows = [], []
        for number in range(options.repeats):
            place = root / f"{name}-{number}"
            after = len(batches) + chooser.randrange(1, len(batches))
            done = _killed(options, name, place, after)
            kept = _survived(options, name, place)
            lost = [batches[step % len(batches)] for step in range(kept, done)]
            steps.append(float(done - kept))
            rows.append(
                float(
                    sum(
                        len(np.unique(np.concatenate([batch.ids[table] for batch in lost])))
                        for table in batches[0].ids
                    )
                    if lost
                    else 0
                )
            )
        what = f"SIGKILL, {MODES[name].name}: lost"
        report.state(f"{what} steps", Sample(tuple(steps)), "{:.0f}".format)
        report.state(f"{what} rows", Sample(tuple(rows)), "{:,.0f}".format)
    report.section()


def _killed(options: argparse.Namespace, name: str, place: Path, after: int) -> int:
    """Kills a training once it has trained so many steps; returns how many it then had."""
    command = [sys.executable, __file__, "--victim", name, f"--directory={place}"]
    victim = subprocess.Popen([*command, *_sizes(options)], stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    done = 0
    try:
        for line in victim.stdout:
            done = int(line)
            if done == after:
                break
    finally:
        victim.kill()
    for line in victim.stdout:  # Steps that it finished before it died.
        with contextlib.suppress(ValueError):
            done = int(line)
    victim.wait()
    return done


def _survived(options: argparse.Namespace, name: str, place: Path) -> int:
    command = [sys.executable, __file__, "--survivor", name, f"--directory={place}"]
    done = subprocess.run([*command, *_sizes(options)], stdout=subprocess.PIPE, check=True)
    return int(done.stdout.split()[-1])


def victim(options: argparse.Namespace) -> None:
    """Trains until it is killed, and prints each step after its append or save."""
    loop, mode = Loop.of(options, 0.0), MODES[options.victim]
    assert mode.make is not None
    way, state, number = mode.make(options.directory, loop.every), loop.start(), 0
    way.save(0, state, base=True)
    way.wait()
    while True:
        for batch in loop.batches:
            state, number = loop.advance(state, batch), number + 1
            if isinstance(way, ways.Logs):
                way.log(number, state, batch.ids)
            elif number % loop.every == 0:
                way.save(number, state)
                way.wait()
            print(number, flush=True)


def survivor(options: argparse.Namespace) -> None:
    """Prints the step of the state that a new process restores."""
    loop, mode = Loop.of(options, 0.0), MODES[options.survivor]
    assert mode.make is not None
    way = mode.make(options.directory, loop.every)
    print(int(way.restore(loop.start()).step))
    way.close()


def _sizes(options: argparse.Namespace) -> list[str]:
    names = ("scale", "batch", "epoch", "hidden", "lookups")
    return [f"--{name}={getattr(options, name)}" for name in names]


PARTS = {"epochs": epochs, "slow-store": slow_store, "kills": kills}


def main() -> int:
    """Runs the command line."""
    parser = arguments(__doc__)
    add = parser.add_argument
    log_job.add_arguments(parser, PARTS)
    add("--epoch", type=int, default=EPOCH_SAMPLES, help="samples in an epoch")
    add("--processes", type=int, nargs="+", choices=list(THESIS), default=list(THESIS))
    add("--limit", type=int, default=1800, help="seconds for a set of processes")
    add("--seed", type=int, default=0, help="of the steps to kill after")
    add("--victim", choices=MODES, help=argparse.SUPPRESS)
    add("--survivor", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.scale, options.repeats, options.batch = 0.01, 1, 64
        options.epoch, options.processes, options.hidden = 256, [1, 2], 32
    options.steps = options.every = max(1, round(options.epoch / options.batch))
    if options.victim:
        victim(options)
    if options.survivor:
        survivor(options)
        return 0
    loop = Loop.of(options, 0.0)
    ids = loop.batches[0].ids
    share = np.mean([len(np.unique(ids[name])) / rows for name, rows in loop.rows.items()])
    report = Report(
        "The thesis's table",
        sizes=(
            f"DLRM, 8 tables of {round(80_000 * options.scale):,} x 64, batch {options.batch}, "
            f"{options.steps} steps in an epoch, uniform ids, {options.lookups} for each lookup: a "
            f"step touches {share:.0%} of the rows; {options.repeats} interleaved rounds, median "
            "(range)"
        ),
    )
    log_job.show_parts(report, options, PARTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
