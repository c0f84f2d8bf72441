# SPDX-License-Identifier: Apache-2.0
"""Restores of dense leaves from deltas that follow the rows: seconds and bytes read, beside a read.

python benchmarks/dense_restore.py [--megabytes M] [--repeats N]

``bf16``: weights of which 1 % of the elements change between saves, exact. ``ef4``: AdamW in fp32,
parameters by ``ef4``, first moments by ``int8``. Each is a base and ten deltas; every measurement is
a process of its own, and the ways take turns. A *plain read* is that of the base's dense files into
fresh memory by two threads. The page cache is warm.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

import deltackpt

LEAVES = 100
DELTAS = 10
FRESH = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
HANDLERS = {"embeddings": deltackpt.Tables(select="table", slots={})}
CODECS = {"bf16": "exact", "ef4": {"params/**": "ef4", "mu/**": "int8"}}


def shapes(kind: str, megabytes: int) -> dict[str, Any]:
    """The dense leaves of a state: name to shape and dtype."""
    count = megabytes * 1_000_000 // LEAVES
    if kind == "bf16":
        rows = count // 2 // 1000
        return {f"w{i}": jax.ShapeDtypeStruct((rows, 1000), jnp.bfloat16) for i in range(LEAVES)}
    rows = count // 8 // 1000
    one = {f"w{i}": jax.ShapeDtypeStruct((rows, 1000), jnp.float32) for i in range(LEAVES)}
    return {"params": one, "mu": one}


def template(kind: str, megabytes: int) -> dict[str, Any]:
    """What is restored: the table is small."""
    return {"table": jax.ShapeDtypeStruct((1000, 8), jnp.float32), **shapes(kind, megabytes)}


def states(kind: str, megabytes: int) -> Iterator[dict[str, Any]]:
    """A base's state, and one for each delta; numpy arrays that change in place."""
    draws = np.random.default_rng(0)
    held = jax.tree.map(
        lambda leaf: (0.02 * draws.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype),
        shapes(kind, megabytes),
    )
    table = jnp.zeros((1000, 8))
    yield {"table": table, **jax.tree.map(jnp.array, held)}
    for _ in range(DELTAS):
        for leaf in jax.tree.leaves(held):
            if kind == "bf16":
                at = draws.integers(0, leaf.size, leaf.size // 100)
                moved = leaf.reshape(-1)[at].view(np.uint16) ^ draws.integers(1, 4, len(at)).astype(
                    np.uint16
                )
                leaf.reshape(-1)[at] = moved.view(ml_dtypes.bfloat16)
            else:
                leaf += 1e-3 * draws.standard_normal(leaf.shape, np.float32)
        yield {"table": table, **jax.tree.map(jnp.array, held)}


def write(root: Path, kind: str, megabytes: int) -> None:
    """Saves a base and ten deltas."""
    always = deltackpt.policy.Consecutive(max_restore_ratio=1e9, max_delta_ratio=1e9)
    options = deltackpt.ManagerOptions(
        dense=deltackpt.Dense(deltas="own", codec=CODECS[kind], max_error=None),
        deltas=deltackpt.DeltaOptions(policy=always),
    )
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
        marks = deltackpt.touched.init({"table": jnp.zeros((1000, 8))})
        for step, state in enumerate(states(kind, megabytes)):
            result = manager.save(step, state, touched=marks)
            manager.wait()
            assert result.kind == ("delta" if step else "base"), result


def plain(root: Path, kind: str, megabytes: int) -> None:
    """Reads the files of the base's dense item into fresh memory."""
    found = [path for path in (root / "0" / "dense").rglob("*") if path.is_file()]

    def fill(path: Path) -> mmap.mmap:
        buffer = mmap.mmap(-1, path.stat().st_size, flags=FRESH)
        with path.open("rb", buffering=0) as file:
            at = 0
            while count := os.preadv(file.fileno(), [memoryview(buffer)[at:]], at):
                at += count
        return buffer

    with ThreadPoolExecutor(2) as pool:
        held.extend(pool.map(fill, found))


def orbax(root: Path, kind: str, megabytes: int) -> None:
    """Orbax's own restore of the base's item; it verifies nothing."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    item = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
        shapes(kind, megabytes),
    )
    handler = ocp.PyTreeCheckpointHandler()
    args = ocp.args.PyTreeRestore(
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)
    )
    held.append(handler.restore(root / "0" / "dense", args=args))


def ours(step: int, access: str) -> Callable[[Path, str, int], None]:
    """A step by our manager."""

    def restore(root: Path, kind: str, megabytes: int) -> None:
        dense = deltackpt.Dense(deltas="own", codec=CODECS[kind], max_error=None)
        options = deltackpt.ManagerOptions(dense=dense, access=access)
        manager = deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options)
        held.append(manager.restore(step, template(kind, megabytes)).state)

    return restore


#: What is measured stays until the clock is stopped.
held: list[Any] = []
WAYS: dict[str, Callable[[Path, str, int], None]] = {
    "plain read": plain,
    "Orbax, base": orbax,
    "base": ours(0, "read"),
    "base + 1": ours(1, "read"),
    "base + 10": ours(DELTAS, "read"),
    "base + 10, to go on": ours(DELTAS, "write"),
}


def measure(way: str, root: Path, kind: str, megabytes: int) -> dict[str, float]:
    """Seconds and bytes read of one way, in this process."""
    jax.block_until_ready(jnp.zeros(8) + 1)
    # What jax, Orbax and TensorStore do once in each process.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with deltackpt.CheckpointManager(folder, handlers=HANDLERS) as manager:
            small = {"table": jnp.zeros((4, 8)), "w": jnp.zeros((4, 4))}
            manager.save(0, small)
            manager.wait()
            manager.restore(0, small)
    before, started = read_bytes(), time.perf_counter()
    WAYS[way](root, kind, megabytes)
    jax.block_until_ready([one for one in held if not isinstance(one, mmap.mmap)])
    return {"seconds": time.perf_counter() - started, "bytes": read_bytes() - before}


def read_bytes() -> int:
    """Bytes that this process has asked files for."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kind", choices=sorted(CODECS), action="append")
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--once", nargs=2, metavar=("WAY", "KIND"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        way, kind = args.once
        if way == "write":
            write(args.root, kind, args.megabytes)
        else:
            print(json.dumps(measure(way, args.root, kind, args.megabytes)))
        return
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"jax {jax.__version__}, orbax {ocp.__version__}, {args.megabytes} MB in {LEAVES} leaves"
    )
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        for kind in args.kind or sorted(CODECS):
            compare(Path(folder, kind), kind, args.megabytes, args.repeats)


def compare(root: Path, kind: str, megabytes: int, repeats: int) -> None:
    """Measures all ways in turn and prints a table."""

    def once(way: str) -> dict[str, float]:
        command = [sys.executable, __file__, "--once", way, kind, "--root", str(root)]
        command += ["--megabytes", str(megabytes)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout.splitlines()[-1]) if way != "write" else {}

    once("write")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            found[way].append(once(way))
    base = statistics.median(one["seconds"] for one in found["plain read"])
    nbytes = found["plain read"][0]["bytes"]
    print(f"\n{kind:22}{'ms':>8}{'spread':>14}{'of plain':>10}{'bytes read, of plain':>22}")
    for way, results in found.items():
        seconds = sorted(one["seconds"] for one in results)
        middle = statistics.median(seconds)
        spread = f"{1e3 * seconds[0]:.0f}..{1e3 * seconds[-1]:.0f}"
        read = results[0]["bytes"] / nbytes
        print(f"{way:22}{1e3 * middle:8.0f}{spread:>14}{middle / base:10.2f}{read:22.2f}")


if __name__ == "__main__":
    main()
