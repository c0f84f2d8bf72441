# SPDX-License-Identifier: Apache-2.0
"""Multi-process jobs that train and save dense states, and their measurements, for ``tiers.py``.

The processes are real and are joined by gloo on loopback. Each has its own staging directory in
memory and its own uploader. The remote directory is behind servers with a bandwidth limit. Orbax
cannot write there, so its save gets the best case: it writes to memory while as many bytes as its
files have cross the same link from memory. The save is done when both are done.

A step updates all parameters, pauses (which frees the cores, as an accelerator's step does), and
synchronizes all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import deltackpt
from deltackpt.storage.nodes import Node

#: Pause in each training step, during which the cores are free.
PAUSE_SECS = 0.5
_START_SECS = 120
#: Size of a request that simulates Orbax's writes.
_PIECE_BYTES = 16 << 20
_TABLE = {"table": {"embedding": (8, 8)}}
_HANDLERS = {"embeddings": deltackpt.Tables(select="table/embedding", slots={})}

Shapes = dict[str, Any]


def resnet(scale: float) -> Shapes:
    """27 tensors of unequal size, 100 MB in total, like ResNet-50's parameters."""
    unit = 25.6e6 * scale / sum(range(1, 28))
    return {f"tensor{number:02d}": (4, max(1, round(unit * number / 4))) for number in range(1, 28)}


def nt3(scale: float) -> Shapes:
    """The nine tensors of CANDLE's NT3: 620 MB in total, nearly all of it in one tensor."""
    flat = max(4, round(773_760 * scale / 4) * 4)
    return {
        "conv1": {"kernel": (20, 1, 128), "bias": (128,)},
        "conv2": {"kernel": (10, 128, 128), "bias": (128,)},
        "dense1": {"kernel": (flat, 200), "bias": (200,)},
        "dense2": {"kernel": (200, 20), "bias": (20,)},
        "dense3": {"kernel": (20, 2)},
    }


def t5(scale: float) -> Shapes:
    """The parameters of T5.1.1-base, 990 MB; smaller scales are as deep but narrower."""
    factor = math.sqrt(scale)
    model, inner, heads, words = (
        max(4, round(size * factor / 4) * 4) for size in (768, 2048, 768, 32_128)
    )

    def attention() -> Shapes:
        inwards = {name: {"kernel": (model, heads)} for name in ("query", "key", "value")}
        return inwards | {"out": {"kernel": (heads, model)}}

    def layer(*attentions: str) -> Shapes:
        found: Shapes = {name: attention() for name in attentions}
        found["mlp"] = {
            "wi_0": {"kernel": (model, inner)},
            "wi_1": {"kernel": (model, inner)},
            "wo": {"kernel": (inner, model)},
        }
        norms = {f"pre_{name}_layer_norm": {"scale": (model,)} for name in found}
        return found | norms

    return {
        "token_embedder": {"embedding": (words, model)},
        "encoder": {f"layers_{n}": layer("attention") for n in range(12)}
        | {"encoder_norm": {"scale": (model,)}},
        "decoder": {
            f"layers_{n}": layer("self_attention", "encoder_decoder_attention") for n in range(12)
        }
        | {"decoder_norm": {"scale": (model,)}, "logits_dense": {"kernel": (model, words)}},
    }


STATES: dict[str, Callable[[float], Shapes]] = {"ResNet-50": resnet, "NT3": nt3, "T5.1.1": t5}


def _is_shape(found: Any) -> bool:
    return isinstance(found, tuple)


def nbytes(name: str, scale: float) -> int:
    """Size of a state in bytes."""
    shapes = jax.tree.leaves(STATES[name](scale), is_leaf=_is_shape)
    return sum(4 * math.prod(shape) for shape in shapes)


def make(name: str, scale: float, *, sharded: bool) -> dict[str, Any]:
    """Returns a state of random values on the devices of all processes.

    Args:
      name: name of its shapes.
      scale: factor on its size.
      sharded: whether to shard every tensor that divides evenly instead of replicating it.
    """
    mesh = jax.make_mesh(
        (jax.device_count(),), ("nodes",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    count = jax.device_count()

    def leaf(path: Any, shape: tuple[int, ...]) -> jax.Array:
        divides = sharded and shape[0] % count == 0
        spec = jax.sharding.PartitionSpec("nodes" if divides else None)
        seed = zlib.crc32(jax.tree_util.keystr(path).encode())
        # Random mantissas give values in [1, 2). Jitting 300 tensors would compile for a minute.
        bits = np.random.default_rng(seed).integers(1 << 23, size=shape, dtype=np.uint32)
        values = (bits | np.uint32(127 << 23)).view(np.float32)
        place = jax.sharding.NamedSharding(mesh, spec)
        return jax.make_array_from_callback(shape, place, lambda index: values[index])

    shapes = {"params": STATES[name](scale), **_TABLE}
    return jax.tree.map_with_path(leaf, shapes, is_leaf=_is_shape)


@functools.partial(jax.jit, donate_argnums=0)
def update(state: dict[str, Any]) -> dict[str, Any]:
    """Updates all parameters, as a training step does."""
    return {**state, "params": jax.tree.map(lambda leaf: leaf * 0.999, state["params"])}


class Tiered:
    """deltackpt: a staging directory in memory and an uploader per process; one remote."""

    def __init__(self, url: str, stage: Path, count: int):
        self._url, self._stage, self._count, self._opened = url, stage, count, 0
        self._open()

    def _open(self) -> None:
        tiers = deltackpt.Tiers(
            staging_dir=str(self._stage / f"{self._opened}"),
            keep_local=1,
            shared=self._count == 1,
        )
        self._opened += 1
        self._manager = deltackpt.CheckpointManager(
            self._url,
            handlers=_HANDLERS,
            options=deltackpt.ManagerOptions(max_to_keep=1, tiers=tiers),
        )

    def save(self, step: int, state: dict[str, Any]) -> None:
        marks = deltackpt.touched.init({"table/embedding": state["table"]["embedding"]})
        self._manager.save(step, state, touched=marks, force_base=True)

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore_anew(self, state: dict[str, Any]) -> None:
        """Restores the newest save in a new manager with an empty staging directory."""
        self.close()
        shutil.rmtree(self._stage)
        self._open()
        meet()
        found = self._manager.restore_latest(jax.eval_shape(lambda: state))
        assert found is not None
        jax.block_until_ready(found.state)

    def close(self) -> None:
        self._manager.close()


class Orbax:
    """Stock Orbax, synchronous and uncompressed; its bytes cross the link during the save."""

    def __init__(self, root: Path, url: str, count: int):
        self._root, self._count = root, count
        self._manager = ocp.CheckpointManager(
            root,
            item_handlers=ocp.PyTreeCheckpointHandler(use_compression=False),
            options=ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False),
        )
        address = url.removeprefix("nodes://").partition("/")[0]
        self._node = Node(address, os.environ["DELTACKPT_NODES_TOKEN"], deadline_secs=600)
        self._sender = ThreadPoolExecutor(1, "link")
        self._nbytes = 0

    def save(self, step: int, state: dict[str, Any]) -> None:
        sent = self._sender.submit(self._send, self._nbytes // self._count)
        self._manager.save(step, args=ocp.args.PyTreeSave(state))
        sent.result()
        meet()  # A save is done when all processes have written.

    def wait(self) -> None:
        # The next save writes as many bytes as this one.
        folder = self._root / str(self._manager.latest_step())
        self._nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        meet()

    def close(self) -> None:
        self._manager.close()
        self._sender.shutdown()
        self._node.close()

    def _send(self, nbytes: int) -> None:
        data = memoryview(bytes(min(nbytes, _PIECE_BYTES)))
        for start in range(0, nbytes, _PIECE_BYTES):
            self._node.put(f"orbax/{jax.process_index()}", [data[: nbytes - start]])


def meet() -> None:
    """Returns when every process has called it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("meet")


def settle(nbytes: int) -> None:
    """Touches free memory, which a virtual machine gets from its host only at the first touch."""
    if jax.process_index() == 0:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        mmap.mmap(-1, nbytes, flags=flags).close()
    meet()


def train_step(state: dict[str, Any]) -> dict[str, Any]:
    """Runs one training step."""
    state = jax.block_until_ready(update(state))
    time.sleep(PAUSE_SECS)
    meet()
    return state


def freeze(options: argparse.Namespace, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Measures by turns how long a save blocks, and its cost to that step and the next one."""
    ways = {
        "ours": Tiered(f"{options.url}/run", options.directory / "stage", options.processes),
        "Orbax": Orbax(options.directory / "orbax", options.url, options.processes),
    }
    found = []
    for number in range(options.repeats + 1):
        for name, way in ways.items():
            settle(2 * nbytes(options.state, options.scale))
            started = time.perf_counter()
            for _ in range(2):
                state = train_step(state)
            without = time.perf_counter() - started
            started = time.perf_counter()
            state = jax.block_until_ready(update(state))
            before = time.perf_counter()
            way.save(number, state)
            blocked = time.perf_counter() - before
            time.sleep(PAUSE_SECS)
            meet()
            state = train_step(state)
            # At least the noise, because it is a divisor.
            overhead = max(1e-3, time.perf_counter() - started - without)
            way.wait()
            if number:
                found.append({"way": name, "blocked": blocked, "overhead": overhead})
    for way in ways.values():
        way.close()
    return found


def gather(options: argparse.Namespace, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Saves to two remote directories by turns until it is durable, and restores from them."""
    urls = {"nodes": options.url, "shared": options.against}
    ways = {
        name: Tiered(f"{url}/run", options.directory / name, options.processes)
        for name, url in urls.items()
    }
    found = []
    for number in range(options.repeats + 1):
        for name, way in ways.items():
            state = jax.block_until_ready(update(state))
            settle(2 * nbytes(options.state, options.scale))
            started = time.perf_counter()
            way.save(number, state)
            way.wait()
            durable = time.perf_counter() - started
            meet()
            started, cpu = time.perf_counter(), time.process_time()
            way.restore_anew(state)
            restored = time.perf_counter() - started
            cpu = time.process_time() - cpu
            if number:
                figures = {"durable": durable, "restored": restored, "restore_cpu": cpu}
                found.append({"way": name, **figures})
            meet()
    for way in ways.values():
        way.close()
    return found


TASKS = {"freeze": freeze, "gather": gather}


def work(options: argparse.Namespace) -> None:
    """Runs one of the processes."""
    signal.alarm(options.limit)  # Also if no parent is left to end it.
    if options.processes > 1:
        address = f"127.0.0.1:{options.port}"
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            address,
            options.processes,
            options.worker,
            coordinator_bind_address=address,
            initialization_timeout=_START_SECS,
        )
    state = make(options.state, options.scale, sharded=options.task == "gather")
    found = TASKS[options.task](options, state)
    (options.directory / f"found.{options.worker}.json").write_text(json.dumps(found))


# In the parent process.


def run(
    task: str,
    state: str,
    url: str,
    folder: Path,
    *,
    processes: int,
    scale: float,
    repeats: int,
    against: str = "",
    limit: int = 900,
) -> list[dict[str, Any]]:
    """Runs a job and returns for each save the figures of its slowest process.

    Args:
      task: one of ``TASKS``.
      state: one of ``STATES``.
      url: URL of the store with the remote directory.
      folder: folder in memory for the staging directories; it is removed.
      processes: number of processes.
      scale: factor on the size of the state.
      repeats: measured saves per mode, after a warm-up save.
      against: URL of the other store, for ``gather``.
      limit: time limit of the job in seconds.

    Raises:
      RuntimeError: a process failed.
    """
    folder.mkdir()
    command = [sys.executable, __file__, task, state, url, f"--directory={folder}"]
    command += [f"--processes={processes}", f"--scale={scale}", f"--repeats={repeats}"]
    command += [f"--limit={limit}", f"--port={_free_port()}", f"--against={against}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    try:
        with contextlib.ExitStack() as stack:
            workers = [
                stack.enter_context(_started([*command, f"--worker={rank}"], environment, folder))
                for rank in range(processes)
            ]
            for rank, worker in enumerate(workers):
                if worker.wait():
                    said = (folder / f"log.{rank}").read_text(errors="replace")[-4000:]
                    raise RuntimeError(f"process {rank} of {processes} failed:\n{said}")
        views = [
            json.loads((folder / f"found.{rank}.json").read_text()) for rank in range(processes)
        ]
    finally:
        shutil.rmtree(folder)
    return [
        {
            "way": parts[0]["way"],
            **{key: max(part[key] for part in parts) for key in parts[0] if key != "way"},
        }
        for parts in zip(*views, strict=True)
    ]


@contextlib.contextmanager
def _started(
    command: list[str], environment: dict[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    rank = re.sub(r".*=", "", command[-1])
    with (folder / f"log.{rank}").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Command line of a process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("state", choices=STATES)
    parser.add_argument("url")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--against", default="")
    for name in ("processes", "repeats", "limit", "port", "worker"):
        parser.add_argument(f"--{name}", type=int, required=True)
    work(parser.parse_args())


if __name__ == "__main__":
    main()
