# SPDX-License-Identifier: Apache-2.0
"""One measurement in a fresh process; prints it as JSON. Used by the other benchmarks.

python benchmarks/once.py restore WAY ROOT [--scale S | --dlrm]
python benchmarks/once.py memory WAY ROOT (--kind base | --kind delta) [--scale S]
python benchmarks/once.py read WAY ROOT        # the limit of a restore: the same bytes, no more
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import re
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import state as states
import ways
from dlrm_jax import data, trainer

FRESH = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def measure(what: str, way: str, root: Path, *more: str) -> dict[str, Any]:
    """Runs this file in a new process."""
    command = [sys.executable, __file__, what, way, str(root), *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def restore(way: str, root: Path, template: Any, *, digest: bool) -> dict[str, Any]:
    """Opens the directory and restores its newest step."""
    ways.settle(template)
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    started = time.perf_counter()
    manager = ways.WAYS[way](root)
    restored = manager.restore(template)
    seconds = time.perf_counter() - started
    manager.close()
    return {"seconds": seconds, "digest": checksum(restored) if digest else None}


def read(root: Path) -> dict[str, Any]:
    """Reads every large file into fresh memory with two threads, as a restore must."""
    found = [path for path in root.rglob("*") if path.is_file() and path.stat().st_size > 1 << 16]
    buffers = [(path, mmap.mmap(-1, path.stat().st_size, flags=FRESH)) for path in found]

    def fill(path: Path, buffer: mmap.mmap) -> None:
        with path.open("rb", buffering=0) as file:
            view = memoryview(buffer)
            while count := file.readinto(view):
                view = view[count:]

    started = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(fill, *each) for each in buffers]:
            future.result()
    return {"seconds": time.perf_counter() - started, "digest": None}


def checksum(state: Any) -> int:
    """CRC32 over every leaf but the TouchState."""
    total = 0
    for leaf in jax.tree.leaves(state._replace(touched=())):
        total = zlib.crc32(np.ascontiguousarray(leaf).data, total)
    return total


def memory(way: str, root: Path, kind: str, scale: float) -> dict[str, Any]:
    """Peak increase of resident memory during a save while training continues."""
    state = states.make(scale)
    manager = ways.WAYS[way](root)
    state, _ = states.train(state, states.lookups(state, 0))
    if kind == "delta":
        manager.save(0, state, base=True)
        manager.wait()
    state = states.change(state, states.random_ids(state, 0.05, 0))
    jax.block_until_ready(state)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    manager.save(1, state, base=kind == "base")
    pool = ThreadPoolExecutor(1, "wait")
    commit = pool.submit(manager.wait)
    number = 0
    while not commit.done():
        state, loss = states.train(state, states.lookups(state, number))
        jax.block_until_ready(loss)
        number += 1
    commit.result()
    peak = status_bytes("VmHWM")
    manager.close()
    return {"extra": peak - before, "state": states.nbytes(state), "steps": number}


def status_bytes(name: str) -> int:
    """Returns a memory figure of this process in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["restore", "memory", "read"])
    parser.add_argument("way", choices=sorted(ways.WAYS))
    parser.add_argument("root", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--kind", choices=["base", "delta"], default="delta")
    parser.add_argument("--dlrm", action="store_true")
    parser.add_argument("--digest", action="store_true")
    options = parser.parse_args()
    if options.what == "memory":
        found = memory(options.way, options.root, options.kind, options.scale)
    elif options.what == "read":
        found = read(options.root)
    else:
        if options.dlrm:
            sizes = trainer.ModelOptions(rows=data.table_rows("thesis", options.scale))
            template = jax.eval_shape(lambda: trainer.init_state(sizes, 0))
        else:
            template = states.template(options.scale)
        found = restore(options.way, options.root, template, digest=options.digest)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
