# SPDX-License-Identifier: Apache-2.0
"""Recovery from a trainer's death: hot standby, storage and Orbax.

A trainer is killed with SIGKILL, and a new process restores its newest step. Stock Orbax restores
one full save. deltackpt restores a base and ten deltas from storage, and from a hot standby. The
*call* opens the directory and restores, until the arrays are on the device; the bars apply to it.
The *whole* time starts at the kill, and includes the start of the new process. The standby maps its
arrays copy-on-write; a first step that changes every element measures what this costs training.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import logging
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fresh
import jax
import jax.numpy as jnp
import report as reports
import save_restore
import state as states
import ways
from report import Figures, Report

import deltackpt

STANDBY, STORAGE = "the standby", "storage"
SOURCES = {STANDBY: "power", STORAGE: "power"} | {name: name for name in ways.THEIRS}
#: Bars of a restore call from the standby: against Orbax, and storage with a warm page cache.
BARS = (1 / 10, 1 / 3, 1 / 5)
#: Read when ray is imported. The node uses only the loopback interface, needs no token, sends no
#: usage reports, and kills no worker if memory is nearly full.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
_RAY_STORE_BYTES = 300_000_000


# In child processes.


def hold(name: str, root: str, scale: float) -> None:
    """A trainer between two steps, with a state and an open directory, until it is killed."""
    manager = ways.WAYS[name](Path(root))
    template = states.template(scale)
    state = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1, leaf.dtype), template)
    jax.block_until_ready(state)
    fresh.say("ready")
    signal.pause()
    del manager, state


@functools.partial(jax.jit, donate_argnums=0)
def change_all(state: Any) -> Any:
    """Changes every element of the tables and slots, like a dense optimizer."""
    tables, accumulators = jax.tree.map(lambda leaf: leaf * 1.001, state[:2])
    return state._replace(tables=tables, accumulators=accumulators)


def succeed(source: str, root: str, scale: float, address: str, digest: bool) -> dict[str, Any]:
    """A trainer's successor: restores and returns the times of its phases."""
    found: dict[str, Any] = {"imported": time.monotonic()}
    if source == STANDBY:
        import ray

        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        # The first object put into Ray imports pydantic and pyarrow, which takes 0.1 s or more. A
        # worker that Ray starts has already done that.
        ray.put(0)
    found["connected"] = time.monotonic()
    template = states.template(scale)
    jax.block_until_ready(jnp.zeros(8) + 1)
    whole = change_all.lower(template).compile()
    found["began"] = time.monotonic()
    if source in ways.THEIRS:
        manager = ways.WAYS[source](Path(root))
        restored = manager.restore(template)
    else:
        manager = ways.Deltas(Path(root))
        result = manager.restore_from(template, storage=source == STORAGE)
        assert ({*result.source} == {"service"}) == (source == STANDBY), result.service_error
        restored = jax.block_until_ready(result.state)
    found["ended"] = time.monotonic()
    manager.close()
    if digest:
        found["digest"] = ways.checksum(restored)
    # Orbax restores none, and all methods must train with the same program.
    restored = restored._replace(touched=deltackpt.touched.init(restored.tables))
    started = time.monotonic()
    jax.block_until_ready(whole(restored))
    return found | {"first whole": time.monotonic() - started}


# In the parent process.


@contextlib.contextmanager
def node() -> Iterator[str]:
    os.environ.update(_ENVIRONMENT)
    import ray

    # Ray's sockets are in this directory; their paths can have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:
        ray.init(
            num_cpus=os.cpu_count(),
            object_store_memory=_RAY_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
            _temp_dir=place,
        )
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()


@contextlib.contextmanager
def following(root: Path) -> Iterator[None]:
    """Runs the hot standby of a directory, once it has the newest step."""
    from deltackpt import service

    started = service.start(root)
    try:
        started.wait_ready(timeout_secs=300)
        yield
    finally:
        service.stop(root)


def recovery(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Times from a trainer's death, page cache warm; and of the call with a cold one."""
    digest = fresh.call(save_restore.build_chains, root, options.scale, ("power",))
    nbytes = ways.nbytes(states.template(options.scale))
    report.sizes = (
        f"State W, {nbytes / 1e9:.2f} GB, base + {save_restore.CHAIN} deltas of 5 % of the rows; "
        f"one Ray node, store {_RAY_STORE_BYTES / 1e6:.0f} MB. {ways.TUNED}"
    )
    found = Figures()
    with node() as address, following(root / "power"):
        for number, (source, name) in itertools.product(range(options.repeats), SOURCES.items()):
            place = root / name
            _drop(place)
            where = place, options.scale, address
            cold = fresh.call(succeed, source, *where, number == 0)
            assert cold.get("digest", digest) == digest, f"{source}: the state differs"
            killed = _outlived(name, place, options.scale, 4 * nbytes)
            seen = fresh.call(succeed, source, *where, False)
            figures = {
                "call": seen["ended"] - seen["began"],
                "whole": seen["ended"] - killed,
                "call, page cache cold": cold["ended"] - cold["began"],
                "then a step that changes everything": seen["first whole"],
                "start and imports": seen["imported"] - killed,
                "connection to Ray": seen["connected"] - seen["imported"],
            }
            found.add(source, figures)
    *compared, start, connection = figures
    for what in compared:
        bars = BARS if what == "call" else ()
        others = (*ways.THEIRS, STORAGE)
        report.against(f"{what}, {STANDBY}", found, what, STANDBY, others, bars=bars)
        report.against(f"{what}, {STORAGE}", found, what, STORAGE, ways.THEIRS)
    for what in (start, connection):
        report.state(f"of it {what}", found(STANDBY, what))
    columns = ("restore from", "call", "since the kill", "call, page cache cold")
    report.publish("recovery", columns, found.rows(SOURCES, *compared[:3]))


def _drop(place: Path) -> None:
    """Drops a directory from the page cache."""
    for path in ways.files_in(place):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _outlived(name: str, place: Path, scale: float, nbytes: int) -> float:
    """Starts and kills a trainer, with memory and page cache warm; returns the time of the kill."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert available is not None
    trainer = fresh.started(hold, name, place, scale)
    try:
        fresh.heard(trainer)
        # Only within free memory, since the hot standby needs some.
        most = min(nbytes, int(available[1]) * 1024 * 2 // 3)
        ways.warm_memory(states.template(scale), most)
        ways.read_through(place)
    finally:
        killed = time.monotonic()
        trainer.kill()
        trainer.wait()
    return killed


if __name__ == "__main__":
    reports.main("Recovery", recovery, repeats=5)
