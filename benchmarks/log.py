# SPDX-License-Identifier: Apache-2.0
"""The WAL: what a record at every step costs training, and how fast recovery is.

The thesis DLRM (8 tables of 80,000 x 64, MLPs 512-512-64 and 1024-1024-1024-1 with Adam, 30 MB of
dense leaves) trains with soft and full records, with delta saves, with Orbax, and without saves, in
turn. The time that `append()` blocks is compared with `np.take` of the same rows and slots into
warm memory and a copy of the dense leaves. State W is recovered from a base and a WAL.
The comparison of the thesis is in ``thesis.py``.

python benchmarks/log.py --json log.json
python benchmarks/log.py --quick                      # a smoke test
python benchmarks/log.py --only blocked recovery      # single parts
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import time
from pathlib import Path
from statistics import median

import jax
import log_job
import numpy as np
import once
import state as states
import ways
from dlrm_jax import data
from dlrm_jax.trainer import TrainState
from log_job import MODES, Loop
from report import Report, Sample, arguments, megabytes, secs, times

import deltackpt
from deltackpt.format import names
from deltackpt.layers import targets
from deltackpt.reading import reader, wal_rows
from deltackpt.reading.wal_index import WalReader, newest_plan
from deltackpt.reading.wal_rows import SeenRows
from deltackpt.resources.runtime import Runtime
from deltackpt.storage.store import store_path

#: Bars on the time, relative to training without saves.
TRAINING = {"soft": 1.05, "full": 1.15}
#: Rows that one core should replay in a second.
REPLAY_ROWS = 5_000_000
#: For W: lookups of a record, as a share of all rows; bytes of the WAL, as a share of the base.
_LOOKUPS, _LOG_SHARE = 0.1, 0.5
_loops: list[Loop] = []


def sample(runs: list[dict[str, float]], field: str = "secs") -> Sample:
    """A figure of each round."""
    return Sample(tuple(run[field] for run in runs))


def compiled(options: argparse.Namespace) -> Loop:
    """The loop in this process, made once."""
    if not _loops:
        _loops.append(Loop.of(options, 1.07))
    return _loops[0]


def training(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Whole trainings, for each distribution of ids."""
    for exponent, law in ((1.07, "Zipf 1.07"), (0.0, "uniform")):
        loop = compiled(options)
        loop.draw(exponent)
        modes = ["none", "soft", "full", "delta", "deltas", "orbax-n"]
        found = log_job.rounds(loop, modes, options.repeats, root)
        nothing = sample(found["none"])
        for name in modes[1:]:
            title = f"{law}: training, {MODES[name].name}"
            mine = sample(found[name])
            report.compare(title, mine, "no saves", nothing, secs, bar=TRAINING.get(name))
        for name in modes[1:]:
            cpu = Sample(
                tuple(
                    (mine - bare) / options.steps
                    for mine, bare in zip(
                        sample(found[name], "cpu").values,
                        sample(found["none"], "cpu").values,
                        strict=True,
                    )
                )
            )
            report.state(f"{law}: more processor a step, {MODES[name].name}", cpu, secs)
            threads = sample(found[name], "threads").over(sample(found["none"], "threads"))
            report.state(f"{law}: threads, {MODES[name].name}", threads, times)
        for name in ("soft", "full", "delta"):
            title = f"{law}: {{}}, {MODES[name].name}"
            report.state(title.format("durable after"), sample(found[name], "durable"), secs)
            report.state(
                title.format("bytes of a record"), sample(found[name], "record_bytes"), megabytes
            )
            syncs = sample(found[name], "syncs")
            report.state(title.format("syncs"), syncs, "{:.0f}".format)
        report.section()


def taken(state: TrainState, batch: data.Batch, dense: bool, warm: dict[str, np.ndarray]) -> float:
    """Seconds that the machine takes to copy what a record copies, into warm memory."""
    sources: list[tuple[np.ndarray, np.ndarray | None, np.ndarray]] = []
    for name, ids in batch.ids.items():
        rows = np.unique(ids)
        for what, leaf in (("values", state.tables[name]), ("slots", state.accumulators[name])):
            array = np.asarray(leaf)
            out = warm.setdefault(f"{name}:{what}", np.zeros((len(ids), *array.shape[1:]), "f4"))
            sources.append((array, rows, out[: len(rows)]))
    for number, leaf in enumerate(jax.tree.leaves((state.dense, state.opt_state)) if dense else ()):
        array = np.asarray(leaf)
        sources.append((array, None, warm.setdefault(f"dense {number}", np.zeros_like(array))))
    started = time.perf_counter()
    for array, rows, out in sources:
        if rows is None:
            np.copyto(out, array)
        else:
            np.take(array, rows, 0, out, "clip")
    return time.perf_counter() - started


def blocked(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Compares the time that `append()` blocks training with that of the bare copies."""
    loop = compiled(options)
    loop.draw(1.07)
    kinds = {
        "rows only": (deltackpt.WalOptions(dense="soft"), True),
        "rows and dense leaves": (deltackpt.WalOptions(), True),
        "rows only, found from the stamps": (deltackpt.WalOptions(dense="soft"), False),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(options.repeats):
        for name, (log, ids) in kinds.items():
            place = root / f"{number}"
            found[name].append(_blocked(loop, log, ids, place))
            shutil.rmtree(place)
    for name, rounds in found.items():
        mine = Sample(tuple(one for one, _ in rounds))
        limit = Sample(tuple(1.5 * other + 0.001 for _, other in rounds))
        bar = 1.0 if kinds[name][1] else None
        report.compare(f"log() blocks, {name}", mine, "1.5 takes + 1 ms", limit, secs, bar=bar)
    report.section()


def _blocked(loop: Loop, log: deltackpt.WalOptions, ids: bool, place: Path) -> tuple[float, float]:
    """Medians over a training: seconds in `append()`, and of the copies."""
    state, way, warm = loop.start(), ways.Logs(place, log), {}
    way.save(0, state, base=True)
    way.wait()
    ours, takes = [], []
    gc.collect()
    for number, batch in enumerate(loop.batches, start=1):
        state = loop.advance(state, batch)
        # The second of the two finds the rows in the caches: each is second half of the time.
        if number % 2:
            takes.append(taken(state, batch, log.dense != "soft", warm))
        started = time.perf_counter()
        way.log(number, state, batch.ids if ids else None)
        ours.append(time.perf_counter() - started)
        if number % 2 == 0:
            takes.append(taken(state, batch, log.dense != "soft", warm))
    way.wait()
    way.close()
    return median(ours), median(takes)


def recovery(report: Report, options: argparse.Namespace, root: Path) -> None:
    """State W from a base and a WAL of half its bytes, against a full load by Orbax."""
    way, state = _logged(options.scale, root / "log")
    for name in ("orbax", "orbax-tuned"):
        other = ways.WAYS[name](root / name)
        other.save(int(state.step), state)
        other.wait()
        other.close()
    nbytes = ways.tree_bytes(root / "log" / names.LOG)
    del state, way
    gc.collect()
    replay(report, options, root / "log")
    compared = ("log", "orbax", "orbax-tuned")
    scale = f"--scale={options.scale}"
    digests = {once.measure("restore", n, root / n, scale, "--digest")["digest"] for n in compared}
    found: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(options.repeats):
        for name in compared:
            found[name].append(once.measure("restore", name, root / name, scale)["seconds"])
    mine = Sample(tuple(found["log"]))
    for name in compared[1:]:
        theirs = Sample(tuple(found[name]))
        report.compare("recovery of W", mine, ways.NAMES[name], theirs, secs, bar=1.0)
    report.state("recovery of W: bytes of the log", Sample((nbytes,)), megabytes)
    report.note(
        f"What was recovered is {'equal, bit for bit' if len(digests) == 1 else 'DIFFERENT'}."
    )
    report.section()


def _logged(scale: float, place: Path) -> tuple[ways.Logs, states.State]:
    """State W after a base and records of half its bytes; the manager is closed."""
    state, way = states.make(scale), ways.Logs(place)
    way.save(0, state, base=True)
    way.wait()
    written, number = 0, 0
    while written < _LOG_SHARE * states.nbytes(state):
        number += 1
        random = np.random.default_rng(number)
        ids = {
            name: data.zipf_rows(random, len(table), round(_LOOKUPS * len(table)), 1.07)
            for name, table in state.tables.items()
        }
        state = jax.block_until_ready(states.change(state, ids))
        way.log(number, state, ids)
        way.wait()
        written = sum(event.bytes_written for event in way.appends)
    way.close()
    return way, state


def replay(report: Report, options: argparse.Namespace, place: Path) -> None:
    """Replays all records of a WAL into warm memory on one core."""
    history = WalReader(store_path(place / names.LOG)).read()
    [view] = history.views
    # A base was saved before the first record.
    base = view.processes[0].log.records[0].parent
    way = newest_plan(history, {base.step: base})
    assert way is not None
    rows = sum(segment.count for _, record in way.records for segment in record.segments)
    buffers, wanted = targets.empty_buffers(view.head.layout)
    for array in jax.tree.leaves(buffers):
        array[...] = 0
    found, distinct = [], 0
    for _ in range(options.repeats + 1):
        started = time.process_time()
        seen, records = SeenRows(view.head.layout), wal_rows.layers_of(way, view.head.layout)
        one = Runtime(1)
        reader.fill((), wanted, records=records, seen=seen, runtime=one, over_parent=True)
        found.append(time.process_time() - started)
        distinct = sum(map(len, seen.by_table().values()))
    cpu = found[1:]  # The first reads the log into the page cache.
    for what, count, bar in (("", rows, 1.0), (", each counted once", distinct, None)):
        per_5m = Sample(tuple(value * REPLAY_ROWS / count for value in cpu))
        report.state(f"replay of 5 M rows{what}, processor", per_5m, secs, bar=bar)
    report.note(f"The log of W holds {rows:,} rows, {distinct:,} different ones.")


PARTS = {"training": training, "blocked": blocked, "recovery": recovery}


def main() -> int:
    """Runs the command line."""
    parser = arguments(__doc__)
    add = parser.add_argument
    log_job.add_arguments(parser, PARTS)
    add("--steps", type=int, default=32, help="of one training")
    add("--every", type=int, default=16, help="N, steps from full point to full point")
    options = parser.parse_args()
    if options.quick:
        options.scale, options.repeats, options.batch, options.steps = 0.01, 1, 64, 4
        options.every, options.hidden = 2, 32
    rows = max(data.table_rows("thesis", options.scale).values())
    report = Report(
        "The log",
        sizes=(
            f"Thesis DLRM, 8 tables of {rows:,} x 64, batch {options.batch}, {options.steps} "
            f"steps, N = {options.every}; W at {options.scale:g} of its rows; {options.repeats} "
            "interleaved rounds, median (range)"
        ),
    )
    log_job.show_parts(report, options, PARTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
