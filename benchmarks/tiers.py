# SPDX-License-Identifier: Apache-2.0
"""The tables of DeepFreeze and CHFS: what a save blocks and costs, and a store over several nodes.

``freeze``: the processes of a job save a dense state to a remote directory behind a link of
100 MB/s, through staging directories in memory. Against it, synchronous Orbax in its best case: it
writes to memory while as many bytes cross the same link. A step updates all parameters, pauses
(which frees the cores, as an accelerator's step does), and waits for all processes.

``stores``: one process saves to node stores, and to one shared store as fast as each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fresh
import jax
import numpy as np
import report as reports
import scaling
import ways
from jax.experimental import multihost_utils
from report import Report, interleaved

import deltackpt
from deltackpt.storage.node_client import Node

#: Bandwidth of the shared file system; and of each node's store and its link together, so low that
#: two cores are not the limit.
_SHARED, _SLOW = 100e6, 8e6
#: Pause in each training step, during which the cores are free.
_PAUSE_SECS = 0.5
#: Size of a request that simulates Orbax's writes.
_PIECE = 16 << 20
#: Bars against Orbax; and of several stores against one.
_BARS = {"blocked": 1 / 10, "overhead": 1 / 5}
_STORES = {2: None, 4: 1 / 3.9, 8: 1 / 6}
_TOKEN = "DELTACKPT_NODES_TOKEN"
OURS, THEIRS = "deltackpt", "Orbax, synchronous"


def shapes(name: str, scale: float) -> list[tuple[int, ...]]:
    """Tensors: 27 of unequal size, 100 MB, like ResNet-50's; or the nine of CANDLE's NT3, 620 MB.

    Nearly all of NT3 is in one tensor.
    """
    if name == "ResNet-50":
        unit = 25.6e6 * scale / sum(range(1, 28))
        return [(4, max(1, round(unit * number / 4))) for number in range(1, 28)]
    large = max(4, round(773_760 * scale / 4) * 4), 200
    return [(20, 1, 128), (128,), (10, 128, 128), (128,), large, (200,), (200, 20), (20,), (20, 2)]


def nbytes(name: str, scale: float) -> int:
    return sum(4 * math.prod(shape) for shape in shapes(name, scale))


def make(name: str, scale: float) -> dict[str, Any]:
    """A state of random values, replicated over the devices of all processes, and a small table."""
    _, everywhere = scaling.shardings()

    def placed(shape: tuple[int, ...]) -> jax.Array:
        values = np.random.default_rng(math.prod(shape)).random(shape, np.float32)
        return jax.make_array_from_callback(shape, everywhere, values.__getitem__)

    params = {f"tensor{n:02}": placed(shape) for n, shape in enumerate(shapes(name, scale))}
    return {"params": params, "table": {"embedding": placed((8, 8))}}


@functools.partial(jax.jit, donate_argnums=0)
def update(state: dict[str, Any]) -> dict[str, Any]:
    """Updates all parameters, as a training step does."""
    return {**state, "params": jax.tree.map(lambda leaf: leaf * 0.999, state["params"])}


class Tiered(ways.Deltas):
    """deltackpt: a staging directory in memory and an uploader per process; one remote."""

    def __init__(self, url: str, stage: Path):
        shared = jax.process_count() == 1
        super().__init__(
            url,
            tables=deltackpt.Tables(select="table/embedding", slots={}),
            max_to_keep=1,
            tiers=deltackpt.Tiers(staging_dir=str(stage), keep_local=1, shared=shared),
        )

    def save(self, step: int, state: dict[str, Any], **_: Any) -> None:
        marks = deltackpt.touched.init({"table/embedding": state["table"]["embedding"]})
        super().save(step, state, touched=marks, base=True)


class Orbax(ways.Orbax):
    """Stock Orbax, synchronous and uncompressed; its bytes cross the link during the save."""

    def __init__(self, root: Path, url: str, size: int):
        super().__init__(root, keep=1, asynchronous=False)
        address = url.removeprefix("nodes://").partition("/")[0]
        self._node = Node(address, os.environ[_TOKEN], deadline_secs=600)
        self._sender = ThreadPoolExecutor(1, "link")
        self._nbytes = size // jax.process_count()

    def save(self, step: int, state: dict[str, Any], **_: Any) -> None:
        sent = self._sender.submit(self._send)
        super().save(step, state)
        sent.result()
        multihost_utils.sync_global_devices("saved")

    def close(self) -> None:
        super().close()
        self._sender.shutdown()
        self._node.close()

    def _send(self) -> None:
        data = memoryview(bytes(min(self._nbytes, _PIECE)))
        for start in range(0, self._nbytes, _PIECE):
            self._node.put(f"orbax/{jax.process_index()}", [data[: self._nbytes - start]])


def saves(directory: str, url: str, name: str, scale: float, repeats: int) -> list[dict[str, Any]]:
    """This process's view of each save: how long it blocks, and its cost to two steps."""
    state, size = make(name, scale), nbytes(name, scale)
    made = {
        OURS: Tiered(f"{url}/run", Path(directory, "stage")),
        THEIRS: Orbax(Path(directory, "orbax"), url, size),
    }

    def steps(way: Any, step: int) -> tuple[float, float]:
        nonlocal state
        blocked, started = 0.0, time.perf_counter()
        for number in range(2):
            state = jax.block_until_ready(update(state))
            before = time.perf_counter()
            if way is not None and number == 0:
                way.save(step, state)
            blocked += time.perf_counter() - before
            time.sleep(_PAUSE_SECS)
            multihost_utils.sync_global_devices("step")
        return time.perf_counter() - started, blocked

    found = []
    for number in range(repeats + 1):
        for candidate, way in made.items():
            if jax.process_index() == 0:
                ways.warm_memory(state, 2 * size)
            multihost_utils.sync_global_devices("warm")
            without, _ = steps(None, number)
            took, blocked = steps(way, number)
            way.wait()
            if number:
                # At least 1 ms, as it is a divisor.
                view = {"blocked": blocked, "overhead": max(1e-3, took - without)}
                found.append(view | {"name": candidate})
    for way in made.values():
        way.close()
    return found


@contextlib.contextmanager
def node_stores(number: int, bytes_per_sec: float) -> Iterator[str]:
    """Runs servers that keep bytes in memory; yields the URL of a store over all of them.

    The limit covers what each of them sends and receives.
    """
    os.environ.setdefault(_TOKEN, secrets.token_urlsafe(32))
    command = [sys.executable, "-m", "deltackpt.cli", "node-store", "--bind=127.0.0.1", "--json"]
    command += [f"--memory={8 << 30}", f"--bytes-per-sec={round(bytes_per_sec)}"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(number)]
    try:
        yield f"nodes://{','.join(map(_address, running))}"
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads("".join(lines))["address"]
    raise RuntimeError(f"a node store ended with {process.wait()}")


def freeze(report: Report, options: argparse.Namespace, _: Path) -> None:
    """DeepFreeze's table: blocking phase and overhead."""
    rows = []
    for name in ("ResNet-50", "NT3"):
        for processes in options.processes:
            with _memory(options) as folder, node_stores(1, _SHARED) as url:
                where = folder, url, name, options.scale, options.repeats
                found = reports.joined(fresh.call_job(saves, processes, *where))
            size = f"{name}-sized, {nbytes(name, options.scale) / 1e6:.0f} MB"
            title = f"{size}, {processes} process{'es' if processes > 1 else ''}"
            cells = []
            for figure, bar in _BARS.items():
                report.against(f"{title}: {figure}", found, figure, OURS, [THEIRS], bars=[bar])
                cells += [*found.cells(OURS, figure), *found.cells(THEIRS, figure)]
            rows.append([size, str(processes), *cells])
    columns = [
        f"{one}, {who}" for one in ("`save()` blocks", "overhead") for who in (OURS, "Orbax")
    ]
    remark = "Overhead: of the step that saves and the next one, over two steps without a save."
    report.publish("freeze", ("state", "processes", *columns), rows, remark)


def stores(report: Report, options: argparse.Namespace, _: Path) -> None:
    """CHFS's table: a store over nodes against one shared store with the bandwidth of a node."""
    rows, size = [], nbytes("NT3", options.scale)
    for number in options.nodes:
        state = jax.block_until_ready(make("NT3", options.scale))

        def measure(url: str, state: Any = state) -> dict[str, float]:
            folder, cpu = f"{url}/{time.monotonic_ns()}", time.process_time()
            ways.warm_memory(state, 2 * size)
            found = {}
            for figure in ("saved", "restored"):
                with _memory(options) as stage:
                    way, started = Tiered(folder, stage), time.perf_counter()
                    if figure == "saved":
                        way.saved(1, state)
                    else:
                        way.restore(jax.eval_shape(lambda: state))
                    found[figure] = time.perf_counter() - started
                    way.close()
            return found | {"cpu": time.process_time() - cpu}

        with node_stores(number, _SLOW) as nodes, node_stores(1, _SLOW) as one:
            urls = {"nodes": nodes, "one store": one}
            candidates = {name: functools.partial(measure, url) for name, url in urls.items()}
            found = interleaved(options.repeats, candidates)
        title, bars = f"NT3-sized, {size / 1e6:.0f} MB, {number} stores", [_STORES.get(number)]
        for figure in ("saved", "restored"):
            what = f"{title}: {figure}"
            report.against(what, found, figure, "nodes", ["one store"], bars=bars)
            cells = [cell for name in urls for cell in found.cells(name, figure)]
            rows.append([f"{number}, {figure}", *cells])
        report.state(f"{title}: CPU of this process", found("nodes", "cpu"))
    speed = f"Each store transfers {_SLOW / 1e6:g} MB/s. Restores are by a new manager."
    report.publish("stores", ("stores", "time", "one store of all"), rows, speed)


@contextlib.contextmanager
def _memory(options: argparse.Namespace) -> Iterator[Path]:
    """Yields a new directory for staging directories."""
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=options.memory) as folder:
        yield Path(folder)


def sizes(_: argparse.Namespace) -> str:
    return (
        f"Steps pause for {_PAUSE_SECS} s, in which the cores are free. Shared store: "
        f"{_SHARED / 1e6:g} MB/s."
    )


if __name__ == "__main__":
    reports.main(
        "Tiers against published measurements",
        {"freeze": freeze, "stores": stores},
        sizes,
        repeats=5,
        processes=(1, 2, 4),
        nodes=(4, 8),  # Stores.
        memory="/dev/shm",
    )
