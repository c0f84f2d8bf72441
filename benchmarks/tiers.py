# SPDX-License-Identifier: Apache-2.0
"""The tables of DeepFreeze and CHFS: what a save blocks and costs, and a store over several nodes.

``freeze``: the processes of a job save a dense state to a remote directory behind a link of
100 MB/s, each through a staging directory in memory. Against it, synchronous Orbax, in its best
case: it writes to memory while as many bytes as its files have cross the same link, and a save is
done when both are. A step updates all parameters, pauses (which frees the cores, as an
accelerator's step does), and waits for all processes.

``stores``: one process saves to node stores, and to one shared store as fast as each of them.

python benchmarks/tiers.py --json tiers.json
python benchmarks/tiers.py --scale 0.01 --repeats 1 --processes 2 --nodes 2      # a smoke test
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import secrets
import shutil
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
import orbax.checkpoint as ocp
import ways
from jax.experimental import multihost_utils
from report import Figures, Report, arguments, interleaved, secs

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


def resnet(scale: float) -> list[tuple[int, ...]]:
    """27 tensors of unequal size, 100 MB in total, like ResNet-50's parameters."""
    unit = 25.6e6 * scale / sum(range(1, 28))
    return [(4, max(1, round(unit * number / 4))) for number in range(1, 28)]


def nt3(scale: float) -> list[tuple[int, ...]]:
    """The nine tensors of CANDLE's NT3: 620 MB in total, nearly all of it in one tensor."""
    large = max(4, round(773_760 * scale / 4) * 4), 200
    return [(20, 1, 128), (128,), (10, 128, 128), (128,), large, (200,), (200, 20), (20,), (20, 2)]


SHAPES = {"ResNet-50": resnet, "NT3": nt3}


def nbytes(name: str, scale: float) -> int:
    """Size of a state in bytes."""
    return sum(4 * math.prod(shape) for shape in SHAPES[name](scale))


def make(name: str, scale: float) -> dict[str, Any]:
    """A state of random values, replicated over the devices of all processes, and a small table."""
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def placed(shape: tuple[int, ...]) -> jax.Array:
        values = np.random.default_rng(math.prod(shape)).random(shape, np.float32)
        return jax.make_array_from_callback(shape, everywhere, values.__getitem__)

    params = {f"tensor{n:02}": placed(shape) for n, shape in enumerate(SHAPES[name](scale))}
    return {"params": params, "table": {"embedding": placed((8, 8))}}


@functools.partial(jax.jit, donate_argnums=0)
def update(state: dict[str, Any]) -> dict[str, Any]:
    """Updates all parameters, as a training step does."""
    return {**state, "params": jax.tree.map(lambda leaf: leaf * 0.999, state["params"])}


class Tiered:
    """deltackpt: a staging directory in memory and an uploader per process; one remote."""

    def __init__(self, url: str, stage: Path):
        shared = jax.process_count() == 1
        tiers = deltackpt.Tiers(staging_dir=str(stage), keep_local=1, shared=shared)
        self._manager = deltackpt.CheckpointManager(
            url,
            handlers={"embeddings": deltackpt.Tables(select="table/embedding", slots={})},
            options=deltackpt.ManagerOptions(max_to_keep=1, tiers=tiers),
        )

    def save(self, step: int, state: dict[str, Any]) -> None:
        marks = deltackpt.touched.init({"table/embedding": state["table"]["embedding"]})
        self._manager.save(step, state, touched=marks, force_base=True)

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, state: dict[str, Any]) -> None:
        found = self._manager.restore_latest(jax.eval_shape(lambda: state))
        assert found is not None
        jax.block_until_ready(found.state)

    def close(self) -> None:
        self._manager.close()


class Orbax:
    """Stock Orbax, synchronous and uncompressed; its bytes cross the link during the save."""

    def __init__(self, root: Path, url: str, size: int):
        self._manager = ocp.CheckpointManager(
            root,
            item_handlers=ocp.PyTreeCheckpointHandler(use_compression=False),
            options=ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False),
        )
        address = url.removeprefix("nodes://").partition("/")[0]
        self._node = Node(address, os.environ[_TOKEN], deadline_secs=600)
        self._sender = ThreadPoolExecutor(1, "link")
        self._nbytes = size // jax.process_count()

    def save(self, step: int, state: dict[str, Any]) -> None:
        sent = self._sender.submit(self._send)
        self._manager.save(step, args=ocp.args.PyTreeSave(state))
        sent.result()
        multihost_utils.sync_global_devices("saved")

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self._manager.close()
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


def freeze(report: Report, options: argparse.Namespace, memory: Path) -> None:
    """DeepFreeze's table: blocking phase and overhead."""
    rows = []
    for name in SHAPES:
        for processes in options.processes:
            folder = memory / f"{name}-{processes}"
            folder.mkdir()
            with node_stores(1, _SHARED) as url:
                arguments_ = folder, url, name, options.scale, options.repeats
                views = fresh.call_job(saves, processes, *arguments_)
            found = Figures()
            for parts in zip(*views, strict=True):
                found.add(
                    parts[0]["name"], {one: max(part[one] for part in parts) for one in _BARS}
                )
            size = f"{name}-sized, {nbytes(name, options.scale) / 1e6:.0f} MB"
            title = f"{size}, {processes} process{'es' if processes > 1 else ''}"
            for figure, bar in _BARS.items():
                mine, theirs = found(OURS, figure), found(THEIRS, figure)
                report.compare(f"{title}: {figure}", mine, THEIRS, theirs, secs, bar=bar)
            cells = [(found(who, one), secs) for one in _BARS for who in (OURS, THEIRS)]
            rows.append([size, str(processes), *cells])
            shutil.rmtree(folder)
    columns = [
        f"{one}, {who}" for one in ("`save()` blocks", "overhead") for who in (OURS, "Orbax")
    ]
    remark = "Overhead: of the step that saves and the next one, over two steps without a save."
    report.publish("freeze", ("state", "processes", *columns), rows, remark)
    report.section()


def stores(report: Report, options: argparse.Namespace, memory: Path) -> None:
    """CHFS's table: a store over nodes against one shared store with the bandwidth of a node."""
    rows = []
    for number in options.nodes:
        state = jax.block_until_ready(make("NT3", options.scale))

        def measure(url: str, state: Any = state) -> dict[str, float]:
            folder, cpu = f"{url}/{time.monotonic_ns()}", time.process_time()
            ways.warm_memory(state, 2 * nbytes("NT3", options.scale))
            found = {}
            for figure in ("saved", "restored"):
                way, started = Tiered(folder, memory / "stage"), time.perf_counter()
                if figure == "saved":
                    way.save(1, state)
                    way.wait()
                else:
                    way.restore(state)
                found[figure] = time.perf_counter() - started
                way.close()
                shutil.rmtree(memory / "stage")
            return found | {"cpu": time.process_time() - cpu}

        with node_stores(number, _SLOW) as nodes, node_stores(1, _SLOW) as one:
            urls = {"nodes": nodes, "one": one}
            candidates = {name: functools.partial(measure, url) for name, url in urls.items()}
            found = interleaved(options.repeats, candidates)
        title = f"NT3-sized, {nbytes('NT3', options.scale) / 1e6:.0f} MB, {number} stores"
        for figure in ("saved", "restored"):
            mine, theirs = found("nodes", figure), found("one", figure)
            bar = _STORES[number]
            report.compare(f"{title}: {figure}", mine, "one store", theirs, secs, bar=bar)
            rows.append([f"{number}, {figure}", (mine, secs), (theirs, secs)])
        report.state(f"{title}: CPU of this process", found("nodes", "cpu"), secs)
    speed = f"Each store transfers {_SLOW / 1e6:g} MB/s. Restores are by a new manager."
    report.publish("stores", ("stores", "time", "one store of all"), rows, speed)
    report.section()


PARTS = {"freeze": freeze, "stores": stores}


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, repeats=5)
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=[*PARTS], help="what to measure")
    add("--processes", type=int, nargs="+", default=[1, 2, 4], help="of a job")
    add("--nodes", type=int, nargs="+", choices=_STORES, default=[4, 8], help="node stores")
    add("--memory", type=Path, default=Path("/dev/shm"), help="for staging directories")
    options = parser.parse_args()
    report = Report(
        "Tiers against published measurements",
        sizes=f"Steps pause for {_PAUSE_SECS} s, in which the cores are free. Shared store: "
        f"{_SHARED / 1e6:g} MB/s.",
    )
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=options.memory) as memory:
        for name in options.only:
            PARTS[name](report, options, Path(memory))
    report.show(options)


if __name__ == "__main__":
    main()
