# SPDX-License-Identifier: Apache-2.0
"""PyMM's table: k-means on points of MNIST's size, made durable at every iteration.

An iteration changes 0.27 MB of assignments and centroids; the 188 MB of points never change. The
time lost to an iteration is that of a loop that saves, less that of one that does not. ``append()``
needs one write and one fdatasync. pickle and ``numpy.save`` write all arrays to a new file. The map
is a ``numpy.memmap``; a crash during its flush leaves a mixture of two iterations.
"""

from __future__ import annotations

import argparse
import functools
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import report as reports
import ways
from report import Report, interleaved, secs
from running import kmeans

import deltackpt

NONE, OURS, PICKLE, SAVE, MAP = "none", "append()", "pickle", "numpy.save", "memmap and flush"
#: Bars on the time lost to an iteration, and until it is on the disk.
_BARS = {PICKLE: 1 / 15, SAVE: None, MAP: 3.0}
#: At least this is lost: noise can make the difference of two times tiny or negative.
_LEAST_SECS = 1e-4
_TABLES = deltackpt.Tables(select="points", slots={})


class Appended:
    """deltackpt: a WAL record of each iteration."""

    def __init__(self, directory: Path, state: kmeans.State):
        wal = deltackpt.WalOptions(max_wal_ratio=1e9)
        self._way = ways.Deltas(directory, tables=_TABLES, wal=wal)
        self._marks, self._step = kmeans.passed(None, state), 0
        self._way.saved(0, state, touched=self._marks)

    def save(self, state: kmeans.State) -> None:
        self._step += 1
        self._marks = kmeans.passed(self._marks, state)
        no_rows = {"points": np.zeros(0, np.int32)}
        self._way.append(self._step, state, no_rows, touched=self._marks)

    def wait(self) -> None:
        self._way.manager.wait_appended()

    def check(self, state: kmeans.State) -> None:
        found = self._way.restore(jax.eval_shape(lambda: state))
        equal = jax.tree.map(np.array_equal, found, state)
        assert all(jax.tree.leaves(equal)), "the restored state differs"
        self._way.close()


class Written:
    """Writes all arrays to a new file at each save."""

    def __init__(self, folder: Path, write: Callable[[Any, dict[str, np.ndarray]], None]):
        folder.mkdir()
        self._path, self._write = folder / "newest", write

    def save(self, state: kmeans.State) -> None:
        arrays = {name: np.asarray(leaf) for name, leaf in state.items()}
        ways.replace_file(self._path, lambda file: self._write(file, arrays))

    def wait(self) -> None:
        pass


def _save_each(file: Any, arrays: dict[str, np.ndarray]) -> None:
    for array in arrays.values():
        np.save(file, array)


class Mapped:
    """Writes changes to memory-mapped files and flushes them."""

    def __init__(self, folder: Path, state: kmeans.State):
        folder.mkdir()
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


def clustering(report: Report, options: argparse.Namespace, place: Path) -> None:
    points = max(kmeans.CLUSTERS, round(kmeans.POINTS * options.scale))
    loop = Clustering(points, options.iterations)
    nbytes = sum(leaf.nbytes for leaf in loop.state.values())
    report.sizes = (
        f"{points:,} points of {kmeans.WIDTH} float32, {nbytes / 1e6:.0f} MB in all; "
        f"{options.iterations} iterations in a round."
    )
    ours = Appended(place / "ours", loop.state)
    made = {
        OURS: ours,
        PICKLE: Written(place / "pickle", lambda file, arrays: pickle.dump(arrays, file, 5)),
        SAVE: Written(place / "save", _save_each),
        MAP: Mapped(place / "map", loop.state),
    }
    candidates = {name: functools.partial(loop.measure, made.get(name)) for name in (NONE, *made)}
    found = interleaved(options.repeats, candidates)
    ours.save(loop.state)
    ours.wait()
    ours.check(loop.state)
    lost = {
        name: found(name, "secs").minus(found(NONE, "secs")).mapped(lambda s: max(_LEAST_SECS, s))
        for name in made
    }
    for name, bar in _BARS.items():
        what = "lost to an iteration, append()"
        report.compare(what, lost[OURS], name, lost[name], bar=bar)
        report.against("on the disk after append()", found, "durable", OURS, [name], bars=[bar])
    report.state("append() blocks", found(OURS, "blocked"))
    report.state("an iteration", found(NONE, "secs"))
    columns = ("an iteration is saved by", "time lost to it", "on the disk after")
    rows = [[name, (lost[name], secs), *found.cells(name, "durable")] for name in made]
    report.publish("clustering", columns, rows)


if __name__ == "__main__":
    title = "K-means, durable at every iteration"
    reports.main(title, clustering, repeats=5, iterations=20)
