# SPDX-License-Identifier: Apache-2.0
"""Memory of a restored trainer and of the restore service, in addition to the trainer's arrays.

A process restores from the service by mapping the service's memory. It then changes every value,
so that XLA copies the arrays. Another process saves a delta; the service makes its own copy if
anything is still mapped. The benchmark measures both at each of these moments, with shared pages
counted once, less the trainer's state and the memory of its process before the restore.

python benchmarks/service_memory.py --json service_memory.json
python benchmarks/service_memory.py --sizes 1 --scale 0.1    # a smoke test
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import restore_service
import save_restore
import state as states
from dlrm_jax import trainer
from report import Report, Sample, arguments
from restore_service import change_all, connect, heard, say

import deltackpt

#: Limit of memory in addition to the arrays, in states.
MEMORY_BAR = 1.2
#: How long both are watched after the service has advanced.
_WATCHED_SECS = 5.0
_LOOK_SECS = 0.05
#: Free memory that a size needs, in states: the service, its copy, a trainer, and one that saves.
_NEEDED_STATES = 5.5


def stay(root: Path, scale: float, address: str) -> None:
    """A trainer that restores from the service; each line of input makes it change every value."""
    connect(address)
    template = states.template(scale)
    jax.block_until_ready(jnp.zeros(8) + 1)
    whole = change_all.lower(template).compile()
    say(before=pss_bytes(os.getpid()))
    manager = restore_service.WAYS["service"](root)
    state = manager.restore(template)
    manager.close()
    say(restored=True)
    for _ in sys.stdin:
        for _ in range(2):  # A step's input is freed at the next step.
            state = jax.block_until_ready(whole(state))
        say(written=True)


def advance(root: Path, scale: float) -> None:
    """Another trainer: resumes from storage and saves a delta."""
    manager = deltackpt.CheckpointManager(
        root, handlers={"embeddings": trainer.checkpoint_tables("raw", "raw")}
    )
    found = manager.restore_latest(states.template(scale), service=None)
    assert found is not None
    state = states.change(found.state, states.random_ids(found.state, save_restore.TOUCHED, 99))
    manager.save(found.step + 1, state)
    manager.close()
    say(step=found.step + 1)


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process."""
    told = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(re.findall(r"^Pss:\s+(\d+) kB", told, re.MULTILINE)[0])


def child(*words: str, **more: Any) -> subprocess.Popen[str]:
    """Starts this file in a new process."""
    command = [sys.executable, __file__, "--work", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)


@dataclasses.dataclass
class Memory:
    """Bytes of a restored trainer and of the service, in addition to the trainer's arrays.

    Attributes:
      restored: just after the restore.
      written: after the trainer has changed everything.
      most: peak while the service then advanced to another step, and after.
      last: at the end.
    """

    restored: int
    written: int
    most: int
    last: int


def measure_memory(root: Path, scale: float, nbytes: int, address: str) -> Memory:
    """Watches a restored trainer and the service while another trainer saves a step."""
    where = (str(root), f"--scale={scale}")
    with restore_service.following(root) as service, contextlib.ExitStack() as stack:
        one = stack.enter_context(
            child("stay", *where, f"--address={address}", stdin=subprocess.PIPE)
        )
        stack.callback(one.kill)
        before = heard(one)["before"]
        [replica] = service.status().replicas

        def beside() -> int:
            return pss_bytes(one.pid) - before + pss_bytes(replica.found.pid) - nbytes

        heard(one)
        restored = beside()
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
        heard(one)
        seen = [beside()]
        other = stack.enter_context(child("advance", *where))
        end = None
        while end is None or time.monotonic() < end:
            seen.append(beside())
            if end is None and other.poll() is not None:
                service.wait_ready(timeout_secs=300)
                end = time.monotonic() + _WATCHED_SECS
            time.sleep(_LOOK_SECS)
    return Memory(restored=restored, written=seen[0], most=max(seen), last=seen[-1])


def add_memory(
    report: Report, size: str, nbytes: int, root: Path, scale: float, address: str
) -> None:
    """Adds the memory of a restored trainer and the service, without the trainer's arrays."""
    found = measure_memory(root, scale, nbytes, address)
    for title, of, bar in (
        ("after the restore", found.restored, MEMORY_BAR),
        ("after a step that changes everything", found.written, MEMORY_BAR),
        ("at most, while the service goes on", found.most, None),
        (f"{_WATCHED_SECS:.0f} s later", found.last, MEMORY_BAR),
    ):
        report.state(
            f"{size} GB, memory beside the arrays in states, {title}",
            Sample((of / nbytes,)),
            "{:.2f}".format,
            bar=bar,
        )
    report.section()


def run(options: argparse.Namespace, root: Path) -> None:
    """Measures the chosen sizes and prints the table."""
    report = Report(
        "Memory of the restore service",
        sizes=f"State W at 1 and {restore_service.SIZES['4']} times its size x {options.scale:g}",
    )
    with restore_service.node() as address:
        for size in options.sizes:
            scale = options.scale * restore_service.SIZES[size]
            needed = _NEEDED_STATES * restore_service.state_bytes(scale)
            if restore_service.available_bytes() < needed:
                report.note(f"{size} GB: not measured, it needs {needed / 2**30:.0f} GiB.")
                continue
            nbytes = restore_service.asked("build", str(root / size), f"--scale={scale}")["nbytes"]
            add_memory(report, size, nbytes, root / size / "power", scale, address)
    report.note(
        "Memory is PSS: pages that processes share count once. The service's process itself, 0.2 "
        "GB or so, counts; that of the trainer before its restore does not."
    )
    report.show(options.json, options.markdown)


def work(words: list[str]) -> None:
    """Entry point of the child processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["stay", "advance"])
    parser.add_argument("root", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--address", default="")
    options = parser.parse_args(words)
    if options.what == "stay":
        stay(options.root, options.scale, options.address)
    else:
        advance(options.root, options.scale)


def main() -> int:
    """Runs the command line."""
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2:])
        return 0
    parser = arguments(__doc__)
    sizes = [*restore_service.SIZES]
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=sizes, help="in GB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="service-memory-", dir=options.directory) as place:
        run(options, Path(place))
    return 0


if __name__ == "__main__":
    sys.exit(main())
