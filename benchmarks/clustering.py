# SPDX-License-Identifier: Apache-2.0
"""K-means on points of MNIST's size, checkpointed at every iteration in several ways.

The time lost to an iteration is that of a loop that saves, less that of one that does not, in the
same round. As in training, only the next ``save()`` of deltackpt waits for the previous one.
``append()`` logs each iteration in a local checkpoint directory: one write and one fdatasync make
it durable. pickle and numpy.save write all arrays to a new file, and fsync it and its directory.
The map is a ``numpy.memmap``: changed assignments and the centroids are written into it and
flushed. A crash in the middle leaves a mixture of two iterations.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import numpy as np
import stores
from report import Report, Sample, secs
from running import kmeans

import deltackpt
from deltackpt.tiers.replicator import status_of
from deltackpt.tiers.stage import Stage

_AGAINST_WHOLE, _AGAINST_MAP = 1 / 10, 1.2
_APPEND_AGAINST_PICKLE, _APPEND_AGAINST_MAP = 1 / 15, 3
_EXTENT_BYTES = 1 << 20
_NO_ROWS = np.zeros(0, np.int32)
#: Lower bound: noise can make the difference of two times tiny or negative.
_LEAST_SECS = 1e-4


class Way(Protocol):
    """A way to save."""

    def save(self, iteration: int, state: kmeans.State) -> None:
        """Saves, or starts a save."""
        ...

    def wait(self) -> None:
        """Waits until the save is on disk."""
        ...


class Tiered:
    """deltackpt: a staging directory in memory, extents on disk."""

    def __init__(self, url: str, stage: Path, disk: Path, points: int):
        base = 4 * points * (kmeans.WIDTH + 1)
        nbytes = (3 * base // _EXTENT_BYTES + 128) * _EXTENT_BYTES
        extents = deltackpt.tiers.Extents(
            directory=str(disk), nbytes=nbytes, extent_bytes=_EXTENT_BYTES
        )
        self._stage = stage
        self._manager = kmeans.open_manager(url, stage, extents)
        self._marks: Any = None

    def save(self, iteration: int, state: kmeans.State) -> None:
        self._marks = kmeans.passed(self._marks, state)
        self._manager.save(iteration, state, touched=self._marks)

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def settle(self) -> None:
        """Waits for all uploads, so that no iteration pays for the upload of a base."""
        while (status := status_of(Stage(self._stage))) is not None and status.waiting:
            time.sleep(0.05)

    def close(self) -> None:
        self._manager.close()


class Appended:
    """deltackpt: a write-ahead log in a local checkpoint directory."""

    def __init__(self, directory: Path):
        policy = deltackpt.policies.Consecutive(max_chain=1_000_000, max_restore_ratio=1e9)
        options = deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(policy=policy),
            wal=deltackpt.WalOptions(max_wal_ratio=1e9),
        )
        handlers = {"embeddings": deltackpt.Tables(select="points", slots={})}
        self._manager = deltackpt.CheckpointManager(directory, handlers=handlers, options=options)
        self._marks: Any = None

    def save(self, iteration: int, state: kmeans.State) -> None:
        self._marks = kmeans.passed(self._marks, state)
        self._manager.append(iteration, state, touched=self._marks, ids={"points": _NO_ROWS})

    def wait(self) -> None:
        self._manager.wait_appended()

    def close(self) -> None:
        self._manager.close()


class Whole:
    """Writes all arrays to a new file at each save."""

    def __init__(self, disk: Path, write: Callable[[Any, dict[str, np.ndarray]], None]):
        self._disk, self._write = disk, write

    def save(self, iteration: int, state: kmeans.State) -> None:
        arrays = {name: np.asarray(leaf) for name, leaf in state.items()}
        new, path = self._disk / "new", self._disk / "newest"
        with new.open("wb") as file:
            self._write(file, arrays)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
        folder = os.open(self._disk, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def wait(self) -> None:
        pass


def _pickled(file: Any, arrays: Any) -> None:
    pickle.dump(arrays, file, protocol=5)


def _saved(file: Any, arrays: Any) -> None:
    for array in arrays.values():
        np.save(file, array)


class Mapped:
    """Writes changes to a memory-mapped file and flushes it."""

    def __init__(self, disk: Path, state: kmeans.State):
        self._known = np.asarray(state["assignments"]).copy()
        self._maps = {}
        for name, leaf in state.items():
            array = np.asarray(leaf)
            self._maps[name] = np.memmap(disk / name, array.dtype, "w+", shape=array.shape)
            self._maps[name][...] = array
            self._maps[name].flush()

    def save(self, iteration: int, state: kmeans.State) -> None:
        assignments = np.asarray(state["assignments"])
        changed = np.flatnonzero(assignments != self._known)
        self._known[changed] = assignments[changed]
        self._maps["assignments"][changed] = assignments[changed]
        self._maps["centroids"][...] = np.asarray(state["centroids"])
        for name in ("assignments", "centroids"):
            self._maps[name].flush()

    def wait(self) -> None:
        pass


def measure(
    report: Report, memory: Path, disk: Path, *, scale: float, repeats: int, iterations: int
) -> None:
    """Adds the lines of this table to a report.

    Args:
      report: receives the lines.
      memory: a folder in memory, for the staging directory.
      disk: a folder on a disk, for everything else.
      scale: factor for the number of points.
      repeats: interleaved rounds.
      iterations: per way and round; a fifth of them for ways that write all arrays.
    """
    points = max(kmeans.CLUSTERS, round(kmeans.POINTS * scale))
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="kmeans-", dir=disk) as folder:
        place = Path(folder)
        for name in ("extents", "append", "pickle", "numpy", "map"):
            (place / name).mkdir()
        with stores.node_stores(1) as server:
            stage = memory / "kmeans"
            ours = Tiered(f"{server.url}/run", stage, place / "extents", points)
            try:
                with contextlib.closing(Appended(place / "append")) as appended:
                    _rounds(found, ours, appended, place, points, repeats, iterations)
            finally:
                ours.close()
                shutil.rmtree(stage, ignore_errors=True)
    sample = {name: Sample(tuple(values)) for name, values in found.items()}
    nbytes = 4 * (points * (kmeans.WIDTH + 1) + kmeans.CLUSTERS * kmeans.WIDTH)
    what = f"k-means, {nbytes / 1e6:.0f} MB: lost to an iteration"
    for other, bar in (
        ("pickle", _AGAINST_WHOLE),
        ("numpy.save", _AGAINST_WHOLE),
        ("memmap and flush", _AGAINST_MAP),
    ):
        report.compare(what, sample["lost, ours"], other, sample[f"lost, {other}"], secs, bar=bar)
    for other, bar in (
        ("pickle", _APPEND_AGAINST_PICKLE),
        ("memmap and flush", _APPEND_AGAINST_MAP),
    ):
        theirs = sample[f"lost, {other}"]
        report.compare(f"{what}, append()", sample["lost, append"], other, theirs, secs, bar=bar)
        theirs = sample[f"durable, {other}"]
        words = "k-means: on disk after append()"
        report.compare(words, sample["durable, append"], other, theirs, secs, bar=bar)
    report.state("k-means: append() blocks", sample["blocked, append"], secs)
    report.state("k-means: save() blocks", sample["blocked, ours"], secs)
    report.state("k-means: on disk after", sample["durable, ours"], secs)
    report.state("k-means: an iteration", sample["none"], secs)


def _rounds(
    found: dict[str, list[float]],
    ours: Tiered,
    appended: Appended,
    place: Path,
    points: int,
    repeats: int,
    iterations: int,
) -> None:
    state = kmeans.begin(points)
    ways: dict[str, Way] = {
        "ours": ours,
        "append": appended,
        "pickle": Whole(place / "pickle", _pickled),
        "numpy.save": Whole(place / "numpy", _saved),
        "memmap and flush": Mapped(place / "map", state),
    }
    number = 0
    for round_ in range(-1, repeats):
        state = jax.block_until_ready(kmeans.iterate(state))
        none = _loop(None, state, number, iterations)[0]
        if round_ >= 0:
            found["none"].append(none)
        for name, way in ways.items():
            count = max(2, iterations // 5) if isinstance(way, Whole) else iterations
            way.save(number, state)
            way.wait()
            ours.settle()
            secs_, blocked = _loop(way, state, number + 1, count)
            number += count + 1
            if round_ >= 0:
                found[f"lost, {name}"].append(max(_LEAST_SECS, secs_ - none))
                found[f"blocked, {name}"].append(blocked)
                found[f"durable, {name}"].append(_durable(way, state, number))
            number += 1


def _loop(
    way: Way | None, state: kmeans.State, number: int, iterations: int
) -> tuple[float, float]:
    """Returns seconds per iteration: in total, and blocked by saving."""
    blocked, started = 0.0, time.perf_counter()
    for index in range(iterations):
        state = jax.block_until_ready(kmeans.iterate(state))
        if way is not None:
            before = time.perf_counter()
            way.save(number + index, state)
            blocked += time.perf_counter() - before
    ran = time.perf_counter() - started
    if way is not None:
        way.wait()
    return ran / iterations, blocked / iterations


def _durable(way: Way, state: kmeans.State, number: int) -> float:
    state = jax.block_until_ready(kmeans.iterate(state))
    started = time.perf_counter()
    way.save(number, state)
    way.wait()
    return time.perf_counter() - started
