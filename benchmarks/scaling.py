# SPDX-License-Identifier: Apache-2.0
"""Weak scaling: saves of 1, 2 and 4 processes, with equal rows per process, against Orbax.

The processes are real ones on this machine, joined by gloo on loopback. Tables and slots are
sharded by rows over all devices; the dense part is replicated. Each set of processes saves in all
ways in turn, so every ratio is taken within one round of one run. A save blocks for the time of the
slowest process's call. It is durable when ``wait()`` has returned on every process, counted from a
barrier before the call.

python benchmarks/scaling.py --json scaling.json
python benchmarks/scaling.py --scale 0.02 --repeats 1 --processes 1 2      # a smoke test
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import state as states
import ways
from jax.experimental import multihost_utils
from report import Report, Sample, arguments, megabytes, secs

import deltackpt

P = jax.sharding.PartitionSpec

#: Rows of each process, in the proportions of state W: 130 MB of tables and slots.
ROWS = {name: rows // 8 for name, rows in states.ROWS.items()}
#: The dense part, 0.64 MB: as large relative to one process's rows as in state W.
KERNEL = 400
TOUCHED = 0.05
THEIRS = ("orbax", "orbax-tuned")
#: Comparisons: (kind of our save, figure, words, bars against default and tuned Orbax).
BARS: tuple[tuple[str, str, str, tuple[float | None, float | None]], ...] = (
    ("delta", "durable", "delta durable after", (1 / 15, 1 / 5)),
    ("delta", "blocked", "delta save blocks for", (1.0, 1.0)),
    ("base", "durable", "base durable after", (1 / 3, 1.0)),
    ("base", "blocked", "base save blocks for", (None, None)),
)
#: A process that takes longer to start, or to reach the others, has failed.
START_SECS = 120
#: Names of files that carry their process; the first process writes all others.
_WRITER = re.compile(r"(?:process_|part\.|manifest\.|digests\.)(\d+)")


@dataclasses.dataclass(frozen=True)
class Timed:
    """One save as one process saw it; the clock is machine-wide."""

    kind: str
    way: str
    started: float
    returned: float
    committed: float
    nbytes: int
    files: int


@dataclasses.dataclass(frozen=True)
class Save:
    """One save as its processes saw it."""

    parts: tuple[Timed, ...]

    @property
    def blocked(self) -> float:
        """Seconds that the slowest training thread was blocked."""
        return max(part.returned - part.started for part in self.parts)

    @property
    def durable(self) -> float:
        """Seconds until the last process saw the commit."""
        return max(part.committed for part in self.parts) - min(part.started for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all processes."""
        return sum(part.nbytes for part in self.parts)

    @property
    def most_bytes(self) -> int:
        """Bytes of the process that wrote most."""
        return max(part.nbytes for part in self.parts)

    @property
    def files(self) -> int:
        """Files of all processes."""
        return sum(part.files for part in self.parts)

    @property
    def most_files(self) -> int:
        """Files of the process that wrote most of them."""
        return max(part.files for part in self.parts)


#: Saves by (kind, way), one for each round.
Saves = dict[tuple[str, str], list[Save]]


# Code of the processes.


def work(options: argparse.Namespace) -> None:
    """Joins the other processes, saves in all ways, and writes the results."""
    signal.alarm(options.limit)  # Ends this process even if the launcher is gone.
    (count,) = options.processes
    address = f"127.0.0.1:{options.port}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        count,
        options.worker,
        coordinator_bind_address=address,
        initialization_timeout=START_SECS,
    )
    assert jax.process_count() == count, f"expected {count}, found {jax.process_count()}"
    found, equal = measure(options.directory, options.scale, options.repeats)
    result = {"saves": [dataclasses.asdict(timed) for timed in found], "equal": equal}
    (options.directory / f"found.{options.worker}.json").write_text(json.dumps(result))


def measure(directory: Path, scale: float, rounds: int) -> tuple[list[Timed], bool]:
    """This process's view of every save, and whether what it restores equals what it saved."""
    state = make(scale)
    managers = {name: ways.WAYS[name](directory / name) for name in (*THEIRS, "power")}
    found = []
    step = 0
    for number in range(rounds + 1):
        for name, manager in managers.items():
            first = step + 1
            for kind in ("full",) if name in THEIRS else ("base", "delta"):
                step += 1
                state = states.change(state, states.random_ids(state, TOUCHED, step))
                timed = save(manager, step, state, kind, name)
                if number:
                    found.append(timed)
            if jax.process_index() == 0:
                ways.keep_only(manager.root, first)
            barrier("kept")
    restored = managers["power"].restore(state)
    for manager in managers.values():
        manager.close()
    return found, all(map(np.array_equal, shards(restored), shards(state)))


def save(manager: ways.Way, step: int, state: states.State, kind: str, way: str) -> Timed:
    """Saves once, all processes at the same time, and waits for it."""
    jax.block_until_ready(state)
    ways.settle(shards(state))
    barrier("save")
    started = time.perf_counter()
    manager.save(step, state, base=kind == "base")
    returned = time.perf_counter()
    manager.wait()
    committed = time.perf_counter()
    barrier("saved")
    nbytes, files = written(manager.root / str(step), jax.process_index())
    barrier("counted")
    return Timed(kind, way, started, returned, committed, nbytes, files)


def make(scale: float) -> states.State:
    """A small state W over all processes together; random, like ``states.make``."""
    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.sharding.NamedSharding(mesh, P("rows"))
    everywhere = jax.sharding.NamedSharding(mesh, P())
    devices = jax.device_count()
    rows = {
        name: max(1, round(count * scale * jax.process_count() / devices)) * devices
        for name, count in ROWS.items()
    }

    def values() -> states.State:
        keys = iter(jax.random.split(jax.random.key(0), 2 * len(rows) + 1))
        tables = {
            name: jax.random.normal(next(keys), (n, states.WIDTH)) for name, n in rows.items()
        }
        return states.State(
            tables=tables,
            accumulators={name: jax.random.uniform(next(keys), (n,)) for name, n in rows.items()},
            dense={"kernel": jax.random.normal(next(keys), (KERNEL, KERNEL)) / KERNEL**0.5},
            step=jnp.zeros((), jnp.int32),
            touched=deltackpt.touched.init(tables),
        )

    shardings = jax.tree.map(
        lambda leaf: by_rows if leaf.shape[:1] and leaf.shape[0] in rows.values() else everywhere,
        jax.eval_shape(values),
    )
    return jax.jit(values, out_shardings=shardings)()


def shards(state: Any) -> list[jax.Array]:
    """The shards that this process holds of a state of this benchmark or of the example."""
    leaves = jax.tree.leaves(state._replace(touched=()))
    return [shard.data for leaf in leaves for shard in leaf.addressable_shards]


def written(step_dir: Path, process: int) -> tuple[int, int]:
    """Bytes and number of a step's files that a process wrote, according to their names."""
    sizes = []
    for path in step_dir.rglob("*"):
        writer = _WRITER.search(str(path.relative_to(step_dir)))
        if path.is_file() and process == (int(writer[1]) if writer else 0):
            sizes.append(path.stat().st_size)
    return sum(sizes), len(sizes)


def barrier(name: str) -> None:
    """Returns when every process has reached it."""
    multihost_utils.sync_global_devices(name)


# Code of the launcher.


def launch(options: argparse.Namespace, count: int, directory: Path) -> tuple[Saves, bool]:
    """Runs a set of processes; returns their saves and whether all restored equal states.

    Raises:
      RuntimeError: a process failed, or they did not end in time.
    """
    command = [sys.executable, __file__, f"--processes={count}", f"--port={free_port()}"]
    command += [f"--scale={options.scale}", f"--repeats={options.repeats}"]
    command += [f"--directory={directory}", f"--limit={options.limit}"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={options.devices}",
    }
    logs = [directory / f"log.{rank}" for rank in range(count)]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                workers.append(
                    subprocess.Popen(
                        [*command, f"--worker={rank}"],
                        env=environment,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        join(workers, logs, time.monotonic() + options.limit)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    found = [json.loads((directory / f"found.{rank}.json").read_text()) for rank in range(count)]
    saves: Saves = {}
    for views in zip(*(result["saves"] for result in found), strict=True):
        parts = tuple(Timed(**view) for view in views)
        saves.setdefault((parts[0].kind, parts[0].way), []).append(Save(parts))
    return saves, all(result["equal"] for result in found)


def join(workers: list[subprocess.Popen[bytes]], logs: list[Path], deadline: float) -> None:
    """Waits until all processes succeed; one that fails leaves the others waiting."""
    while running := [worker for worker in workers if worker.poll() is None]:
        failed = [rank for rank, worker in enumerate(workers) if worker.returncode]
        if failed or time.monotonic() > deadline:
            break
        try:
            running[0].wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
    tails = [
        f"process {rank} of {len(workers)} failed:\n{log.read_text(errors='replace')[-4000:]}"
        for rank, (worker, log) in enumerate(zip(workers, logs, strict=True))
        if worker.returncode
    ]
    if tails:
        raise RuntimeError("\n".join(tails))
    if running:
        raise RuntimeError(f"{len(running)} of {len(workers)} processes did not end in time")


def free_port() -> int:
    """A port that is free on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def add(report: Report, saves: Saves, title: str) -> None:
    """Adds the lines of one set of processes."""
    for kind, figure, words, bars in BARS:
        for other, bar in zip(THEIRS, bars, strict=True):
            mine, theirs = (
                sample(saves, kind, "power", figure),
                sample(saves, "full", other, figure),
            )
            report.compare(f"{title}: {words}", mine, ways.NAMES[other], theirs, secs, bar=bar)
    sizes: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("nbytes", "bytes", megabytes),
        ("most_bytes", "bytes by one process, at most", megabytes),
        ("files", "files", whole),
        ("most_files", "files by one process, at most", whole),
    )
    for (figure, words, unit), kind in itertools.product(sizes, ("delta", "base")):
        mine = sample(saves, kind, "power", figure)
        theirs = sample(saves, "full", "orbax-tuned", figure)
        report.compare(f"{title}: {words}, {kind}", mine, ways.NAMES["orbax-tuned"], theirs, unit)
    report.section()


def add_growth(report: Report, found: dict[int, Saves]) -> None:
    """Adds lines of the cost of more processes, with equal rows per process: 1.0 is ideal."""
    least, most = min(found), max(found)
    for kind, way in (("delta", "power"), ("base", "power"), *(("full", way) for way in THEIRS)):
        name = f"{ways.NAMES[way]}, {kind}" if way == "power" else ways.NAMES[way]
        report.compare(
            f"durable with {processes(most)}: {name}",
            sample(found[most], kind, way, "durable"),
            processes(least),
            sample(found[least], kind, way, "durable"),
            secs,
        )
    report.note(
        f"Growth from {processes(least)} to {processes(most)} has no bar: they share "
        f"{os.cpu_count()} cores and one disk, so it says little of processes on machines of "
        "their own."
    )


def sample(saves: Saves, kind: str, way: str, figure: str) -> Sample:
    """A figure of one kind of save, round by round."""
    return Sample(tuple(getattr(save, figure) for save in saves[kind, way]))


def processes(count: int) -> str:
    """A number of processes, in words."""
    return f"{count} process" + ("es" if count > 1 else "")


def whole(value: float) -> str:
    """A number of files."""
    return f"{value:.0f}"


def run(options: argparse.Namespace, root: Path) -> None:
    """Measures and prints the table."""
    rows = sum(ROWS.values()) * options.scale
    report = Report(
        "Weak scaling of saves against Orbax",
        sizes=(
            f"Each process: {rows:,.0f} rows of {states.WIDTH} float32 in {len(ROWS)} tables, "
            f"{rows * (states.WIDTH + 1) * 4 / 1e6:.0f} MB with slots, on {options.devices} "
            f"virtual device(s); {4 * KERNEL**2 / 1e6:.2f} MB dense, replicated; {TOUCHED:.0%} of "
            f"the rows touched between saves; {options.repeats} interleaved rounds, median (range)"
        ),
    )
    report.note(ways.TUNED)
    found: dict[int, Saves] = {}
    equal = True
    for count in sorted(options.processes):
        directory = root / str(count)
        directory.mkdir()
        found[count], same = launch(options, count, directory)
        equal = equal and same
        add(report, found[count], processes(count))
    if len(found) > 1:
        add_growth(report, found)
    report.note(
        f"Every state that was restored was {'equal, bit for bit' if equal else 'DIFFERENT'}."
    )
    report.show(options.json, options.markdown)


def main() -> int:
    """Runs the command line."""
    parser = arguments(__doc__)
    parser.set_defaults(repeats=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="sets of them")
    parser.add_argument("--devices", type=int, default=2, help="virtual devices of each process")
    parser.add_argument("--limit", type=int, default=900, help="seconds for a set of processes")
    for hidden in ("--worker", "--port"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="scaling-", dir=options.directory) as place:
        run(options, Path(place))
    return 0


if __name__ == "__main__":
    sys.exit(main())
