# SPDX-License-Identifier: Apache-2.0
"""The cost of saving one delta: time, CPU time, threads and context switches.

deltackpt saves the rows touched since the previous save, Orbax the whole state. Both are compared
with the limits of the machine for the same bytes in the same round. For the time that blocks
training: a scan of all stamps and one `np.take` of the rows by two threads into warm memory. For
the rest: writing and fsyncing one file, buffered or with O_DIRECT, whichever is faster.

python benchmarks/step.py --json step.json
python benchmarks/step.py --scale 0.01 --repeats 1      # a smoke test
"""

from __future__ import annotations

import os
import resource
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import state as states
import ways
from report import Report, Sample, arguments, secs

from deltackpt.resources.memory import aligned_buffer

#: Name of a delta to its rows: a count, or a fraction of all rows below 1.
DELTAS = {"4,000 rows": 4_000, "10,000 rows": 10_000, "5 % of all rows": 0.05}
#: Saves of each method before the measured ones.
WARM_UP = 3
#: Deltas per full save of Orbax, which takes longer.
PER_ROUND = 4
#: Our methods to the target for a durable delta, as a fraction of the time of Orbax's defaults.
FRACTIONS = {"power": 1 / 15, "int4": 1 / 25}
_BUFFERED_BYTES, _DIRECT_BYTES = 256 << 10, 4 << 20


class Save(NamedTuple):
    """The cost of one save: seconds, seconds, CPU seconds, and counts."""

    blocked: float
    durable: float
    cpu: float
    switches: float
    threads: float


class Limit(NamedTuple):
    """Seconds that the machine needs for the same work."""

    taking: float
    writing: float


def measured(way: ways.Way, step: int, state: Any, *, forced: bool) -> Save:
    """Saves and waits; fsyncs the files if ``forced``."""
    before, threads = resource.getrusage(resource.RUSAGE_SELF), _threads()
    started = time.perf_counter()
    way.save(step, state)
    blocked = time.perf_counter() - started
    way.wait()
    if forced:
        ways.force_to_disk(way.root / str(step))
    durable = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
    # Thread IDs increase, so threads that have already ended count too.
    return Save(blocked, durable, cpu, switches, _threads() - threads - 1)


def _threads() -> int:
    """The ID of a new thread; IDs increase system-wide."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(threading.get_native_id()))
    thread.start()
    thread.join()
    return found[0]


def limit(state: states.State, ids: dict[str, np.ndarray], nbytes: int, place: Path) -> Limit:
    """Measures how fast the machine can gather the rows of a delta and write its bytes."""
    leaves = [state.tables, state.accumulators]
    sources = [(np.asarray(leaf[name]), np.sort(ids[name])) for leaf in leaves for name in ids]
    warm = [np.zeros((len(rows), *leaf.shape[1:]), leaf.dtype) for leaf, rows in sources]
    stamps = [np.asarray(one) for one in state.touched.stamps.values()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(abs, range(2)))
        started = time.perf_counter()
        list(pool.map(lambda one: np.flatnonzero(one > 0).size, stamps))
        jobs = [
            pool.submit(np.take, leaf, rows, 0, out, "clip")
            for (leaf, rows), out in zip(sources, warm, strict=True)
        ]
        for job in jobs:
            job.result()
        taking = time.perf_counter() - started
    return Limit(taking, written(place, nbytes))


def written(place: Path, nbytes: int) -> float:
    """Seconds to write and fsync so many bytes, buffered or direct, whichever is faster."""
    data = aligned_buffer(nbytes)
    data[:] = 1
    return min(
        _written(place, data[:nbytes], 0, _BUFFERED_BYTES),
        _written(place, data, os.O_DIRECT, _DIRECT_BYTES),
    )


def _written(place: Path, data: np.ndarray, flags: int, piece: int) -> float:
    started = time.perf_counter()
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    for start in range(0, len(data), piece):
        os.write(descriptor, data[start : start + piece].data)
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.perf_counter() - started
    place.unlink()
    return seconds


class Round:
    """The save methods over one state, which training changes between saves."""

    def __init__(self, root: Path, scale: float):
        self._root = root
        self._state = states.make(scale)
        self._step = 0
        self._ways: dict[str, ways.Way] = {}

    def way(self, name: str) -> ways.Way:
        """A save method; on first use it saves a base."""
        if name not in self._ways:
            way = self._ways[name] = ways.WAYS[name](self._root / name)
            way.save(self._step, self._state, base=True)
            way.wait()
            for _ in range(WARM_UP):
                self.run(name, 1000)
        return self._ways[name]

    def run(self, name: str, rows: float) -> tuple[Save, Limit]:
        """Trains a step that touches so many rows, saves it, and measures the machine limits."""
        way = self.way(name)
        total = sum(table.shape[0] for table in self._state.tables.values())
        share = min(0.5, rows if rows < 1 else rows / total)
        self._step += 1
        ids = states.random_ids(self._state, share, self._step)
        self._state = jax.block_until_ready(states.change(self._state, ids))
        time.sleep(0.05)
        stock = name.startswith("orbax")
        saved = measured(way, self._step, self._state, forced=stock)
        nbytes = ways.tree_bytes(way.root / str(self._step))
        if stock:
            ways.keep_only(way.root, self._step)
            return saved, Limit(0, 0)
        found = limit(self._state, ids, nbytes, self._root / "plain")
        return saved, found

    def close(self) -> None:
        """Closes all managers."""
        for way in self._ways.values():
            way.close()


def _by_round(values: list[float]) -> Sample:
    """The median of the saves of each round."""
    rounds = (values[i : i + PER_ROUND] for i in range(0, len(values), PER_ROUND))
    return Sample(tuple(Sample(tuple(each)).median for each in rounds))


def show(
    deltas: dict[tuple[str, str], list[tuple[Save, Limit]]], whole: dict[str, list[Save]]
) -> Report:
    """The table of all deltas, against Orbax's full saves and the machine limits."""
    report = Report("One save", sizes=f"{ways.TUNED}")
    number = "{:.0f}".format
    stock = {
        name: {
            field: Sample(tuple(getattr(save, field) for save in saves)) for field in Save._fields
        }
        for name, saves in whole.items()
    }
    defaults, tuned = stock["orbax"], stock["orbax-tuned"]
    for (delta, way), rounds in deltas.items():
        ours = {f: _by_round([getattr(save, f) for save, _ in rounds]) for f in Save._fields}
        least = {f: _by_round([getattr(one, f) for _, one in rounds]) for f in Limit._fields}
        taking = Sample(tuple(1.3 * value + 0.003 for value in least["taking"].values))
        writing = Sample(tuple(1.5 * value + 0.025 for value in least["writing"].values))
        share = FRACTIONS[way]
        small = isinstance(DELTAS[delta], int)
        limit_bar, tuned_bar = (None, 1.0) if small else (1.0, None)
        for what, mine, against, theirs, unit, bar in (
            ("blocked", ours["blocked"], "1.3 takes + 3 ms", taking, secs, limit_bar),
            (
                "blocked",
                ours["blocked"],
                "Orbax tuned",
                tuned["blocked"],
                secs,
                1.0 if small else None,
            ),
            ("durable", ours["durable"], "1.5 writes + 25 ms", writing, secs, 1.0),
            (
                "durable",
                ours["durable"],
                "Orbax defaults",
                defaults["durable"],
                secs,
                share,
            ),
            ("durable", ours["durable"], "Orbax tuned", tuned["durable"], secs, None),
            ("processor", ours["cpu"], "Orbax tuned", tuned["cpu"], secs, None),
            ("switches", ours["switches"], "Orbax tuned", tuned["switches"], number, 0.25),
        ):
            report.compare(f"{delta}, {way}: {what}", mine, against, theirs, unit, bar=bar)
        report.state(f"{delta}, {way}: threads started", ours["threads"], number, bar=0)
        report.section()
    return report


def main() -> None:
    """Measures, and prints the results and which targets are met."""
    parser = arguments(__doc__)
    options = parser.parse_args()
    deltas: dict[tuple[str, str], list[tuple[Save, Limit]]] = {}
    whole: dict[str, list[Save]] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        running = Round(Path(place), options.scale)
        for _ in range(options.repeats):
            for way in FRACTIONS:
                for delta, rows in DELTAS.items():
                    # The first one also has the rows that steps of other methods touched.
                    found = [running.run(way, rows) for _ in range(1 + PER_ROUND)]
                    deltas.setdefault((delta, way), []).extend(found[1:])
            for way in ("orbax", "orbax-tuned"):
                whole.setdefault(way, []).append(running.run(way, 1000)[0])
        running.close()
    report = show(deltas, whole)
    report.note(f"State W at {options.scale:g} of its rows. Each round: {PER_ROUND} of each delta.")
    report.show(options.json, options.markdown)


if __name__ == "__main__":
    main()
