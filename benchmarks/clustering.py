# SPDX-License-Identifier: Apache-2.0
"""PyMM's table: k-means on points of MNIST's size, made durable at every iteration.

An iteration changes 0.27 MB of assignments and centroids; the 188 MB of points never change. The
time lost to an iteration is that of a loop that saves, less that of one that does not, in the same
round. ``append()`` makes an iteration durable with one write and one fdatasync. pickle and
``numpy.save`` write all arrays to a new file, and fsync it and its directory. The map is a
``numpy.memmap``, into which changes are written and flushed; a crash in the middle leaves a mixture
of two iterations.

python benchmarks/clustering.py --json clustering.json
python benchmarks/clustering.py --scale 0.01 --repeats 1 --iterations 2     # a smoke test
"""

from __future__ import annotations

import functools
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ways
from report import Report, arguments, interleaved, secs
from running import kmeans

import deltackpt

OURS, PICKLE, SAVE, MAP = "append()", "pickle", "numpy.save", "memmap and flush"
#: Bars on the time lost to an iteration, and until it is on the disk.
_BARS = {PICKLE: 1 / 15, SAVE: None, MAP: 3.0}
#: At least this is lost: noise can make the difference of two times tiny or negative.
_LEAST_SECS = 1e-4


class Appended:
    """deltackpt: a WAL record of each iteration."""

    def __init__(self, directory: Path, state: kmeans.State):
        policy = deltackpt.policies.Consecutive(max_chain=1_000_000, max_restore_ratio=1e9)
        options = deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(policy=policy),
            wal=deltackpt.WalOptions(max_wal_ratio=1e9),
        )
        handlers = {"embeddings": deltackpt.Tables(select="points", slots={})}
        self._manager = deltackpt.CheckpointManager(directory, handlers=handlers, options=options)
        self._marks = kmeans.passed(None, state)
        self._step = 0
        self._manager.save(0, state, touched=self._marks)
        self._manager.wait_until_finished()

    def save(self, state: kmeans.State) -> None:
        self._step += 1
        self._marks = kmeans.passed(self._marks, state)
        no_rows = {"points": np.zeros(0, np.int32)}
        self._manager.append(self._step, state, touched=self._marks, ids=no_rows)

    def wait(self) -> None:
        self._manager.wait_appended()

    def check(self, state: kmeans.State) -> None:
        """Compares what a restore returns with the newest state."""
        found = self._manager.restore_latest(jax.eval_shape(lambda: state))
        assert found is not None
        equal = jax.tree.map(np.array_equal, found.state, state)
        assert all(jax.tree.leaves(equal)), "the restored state differs"
        self._manager.close()


class Whole:
    """Writes all arrays to a new file at each save."""

    def __init__(self, folder: Path, write: Callable[[Any, Any], None]):
        self._folder, self._write = folder, write

    def save(self, state: kmeans.State) -> None:
        arrays = {name: np.asarray(leaf) for name, leaf in state.items()}
        ways.replace_file(self._folder / "newest", lambda file: self._write(file, arrays))

    def wait(self) -> None:
        pass


def _pickle(file: Any, arrays: Any) -> None:
    pickle.dump(arrays, file, protocol=5)


def _save_each(file: Any, arrays: Any) -> None:
    for array in arrays.values():
        np.save(file, array)


class Mapped:
    """Writes changes to memory-mapped files and flushes them."""

    def __init__(self, folder: Path, state: kmeans.State):
        self._known = np.array(state["assignments"])
        self._maps = {}
        for name, leaf in state.items():
            self._maps[name] = np.memmap(folder / name, leaf.dtype, "w+", shape=leaf.shape)
            self._maps[name][...] = np.asarray(leaf)
            self._maps[name].flush()

    def save(self, state: kmeans.State) -> None:
        assignments = np.asarray(state["assignments"])
        changed = np.flatnonzero(assignments != self._known)
        self._known[changed] = self._maps["assignments"][changed] = assignments[changed]
        self._maps["centroids"][...] = np.asarray(state["centroids"])
        for name in ("assignments", "centroids"):
            self._maps[name].flush()

    def wait(self) -> None:
        pass


class Clustering:
    """One k-means clustering, continued from round to round."""

    def __init__(self, points: int, iterations: int):
        self.state, self._iterations = kmeans.iterate(kmeans.begin(points)), iterations

    def measure(self, way: Any) -> dict[str, float]:
        """Seconds of an iteration, that a save blocks, and until a single save is durable."""
        ways.warm_memory(self.state)
        blocked, started = 0.0, time.perf_counter()
        for _ in range(self._iterations):
            blocked += self._iterate(way)
        found = {"secs": (time.perf_counter() - started) / self._iterations}
        if way is None:
            return found
        way.wait()
        durable = self._iterate(way, waits=True)
        return found | {"blocked": blocked / self._iterations, "durable": durable}

    def _iterate(self, way: Any, *, waits: bool = False) -> float:
        """Seconds that the save of an iteration takes."""
        self.state = jax.block_until_ready(kmeans.iterate(self.state))
        started = time.perf_counter()
        if way is not None:
            way.save(self.state)
            if waits:
                way.wait()
        return time.perf_counter() - started


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--iterations", type=int, default=20, help="in a round")
    options = parser.parse_args()
    points = max(kmeans.CLUSTERS, round(kmeans.POINTS * options.scale))
    loop = Clustering(points, options.iterations)
    nbytes = sum(leaf.nbytes for leaf in loop.state.values())
    report = Report(
        "K-means, durable at every iteration",
        sizes=f"{points:,} points of {kmeans.WIDTH} float32, {nbytes / 1e6:.0f} MB in all; "
        f"{options.iterations} iterations in a round.",
    )
    with tempfile.TemporaryDirectory(prefix="clustering-", dir=options.directory) as place:
        folders = {name: Path(place, str(number)) for number, name in enumerate(_BARS)}
        for folder in folders.values():
            folder.mkdir()
        ours = Appended(Path(place, "ours"), loop.state)
        made = {
            OURS: ours,
            PICKLE: Whole(folders[PICKLE], _pickle),
            SAVE: Whole(folders[SAVE], _save_each),
            MAP: Mapped(folders[MAP], loop.state),
        }
        candidates = {"none": functools.partial(loop.measure, None)}
        candidates |= {name: functools.partial(loop.measure, way) for name, way in made.items()}
        found = interleaved(options.repeats, candidates)
        ours.save(loop.state)
        ours.wait()
        ours.check(loop.state)
    none = found("none", "secs")
    lost = {
        name: found(name, "secs").minus(none).mapped(lambda value: max(_LEAST_SECS, value))
        for name in made
    }
    for name, bar in _BARS.items():
        report.compare(
            "lost to an iteration, append()", lost[OURS], name, lost[name], secs, bar=bar
        )
        mine, theirs = found(OURS, "durable"), found(name, "durable")
        report.compare("on the disk after append()", mine, name, theirs, secs, bar=bar)
    report.state("append() blocks", found(OURS, "blocked"), secs)
    report.state("an iteration", none, secs)
    columns = ("an iteration is saved by", "time lost to it", "on the disk after")
    rows = [[name, (lost[name], secs), (found(name, "durable"), secs)] for name in made]
    report.publish("clustering", columns, rows)
    report.show(options)


if __name__ == "__main__":
    main()
