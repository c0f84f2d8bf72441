# SPDX-License-Identifier: Apache-2.0
"""A multi-node Ray cluster on this machine, and a training run that a hot standby follows."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
import ray._common.utils
import ray._private.utils
from flat_options import manager_options
from ray.cluster_utils import Cluster

import deltackpt
from deltackpt import service
from deltackpt.options import Timeouts
from deltackpt.service import RestoreService, ServiceOptions, ServiceStatus

#: Guards against hangs only.
HANG_SECS = 120.0
#: The minimum that Ray accepts is 75 MB.
STORE_BYTES = 80 << 20
#: Table name to rows: multiples of eight, for meshes of eight devices.
ROWS = {"a": 8, "b": 88, "c": 400, "d": 1000}
WIDTH = 8
TABLES = deltackpt.Tables(
    select="tables/*",
    slots={"tables/*": {"moment": "wide/{name}", "accumulator": "narrow/{name}"}},
)
HANDLERS = {"embeddings": TABLES}

#: Ray's own warnings: at its import, for sockets that it leaves to the garbage collector, and for
#: its forks after earlier tests have started jax threads.
IGNORED = [
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@contextlib.contextmanager
def nodes(count: int = 3) -> Iterator[Cluster]:
    """A cluster of nodes with their own object stores; this process is connected to the first.

    The working directory of all its processes differs from this process's.
    """
    # A socket path can have at most 107 characters.
    place = Path(tempfile.mkdtemp(prefix="ray-"))
    (place / "cwd").mkdir()
    here = os.getcwd()
    with (
        pytest.MonkeyPatch.context() as patch,
        # Other Ray users on this machine must not connect to it.
        mock.patch.object(ray._private.utils, "write_ray_address"),
        mock.patch.object(ray._common.utils, "reset_ray_address"),
    ):
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        os.chdir(place / "cwd")
        cluster = None
        try:
            cluster = Cluster()
            checks = {
                "health_check_period_ms": 500,
                "health_check_failure_threshold": 12,
                "health_check_initial_delay_ms": 0,
            }
            _add_node(cluster, place, _system_config=checks)
            for _ in range(count - 1):
                _add_node(cluster, place)
            os.chdir(here)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            os.chdir(here)
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()
            shutil.rmtree(place, ignore_errors=True)


def _add_node(cluster: Cluster, place: Path, **options: Any) -> None:
    """Starts a node; retries if a busy machine exceeds Ray's limit of 30 s."""
    given = {
        "num_cpus": 2,
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
        "temp_dir": str(place),
        **options,
    }
    for left in reversed(range(5)):
        try:
            cluster.add_node(**given)
            return
        except Exception as error:
            if "timed out during startup" not in str(error) or left == 0:
                raise


def add_node(cluster: Cluster) -> None:
    """Adds a node to replace one that was removed."""
    place = Path(cluster.head_node.get_temp_dir_path())
    here = os.getcwd()
    os.chdir(place / "cwd")
    try:
        _add_node(cluster, place)
    finally:
        os.chdir(here)


def wait_until(true: Callable[[], Any], what: str) -> Any:
    """Waits until the result is true, and returns it."""
    end = time.monotonic() + HANG_SECS
    while not (found := true()):
        assert time.monotonic() < end, f"expected that {what}, found that it does not"
        time.sleep(0.02)
    return found


# Training.


def initial(rows: dict[str, int]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "tables": {name: rng.random((n, WIDTH), np.float32) for name, n in rows.items()},
        "wide": {name: rng.random((n, WIDTH), np.float32) for name, n in rows.items()},
        "narrow": {name: rng.random(n, np.float32) for name, n in rows.items()},
        "bias": np.zeros(3, np.float32),
    }


def trained(state: dict[str, Any], step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Changes rows of all tables with their slots, and the dense leaf; depends only on the step."""
    rng = np.random.default_rng(step)
    state = jax.tree.map(np.array, state)
    changed = {}
    for name, table in state["tables"].items():
        changed[name] = rng.integers(0, len(table), 30)
        for kind in ("tables", "wide", "narrow"):
            leaf = state[kind][name]
            leaf[changed[name]] = rng.random((30, *leaf.shape[1:]), np.float32)
    state["bias"] += 1
    return state, changed


def train_for_ever(root: str) -> None:
    """Resumes from the newest step and saves every step; runs in a trainer's process."""
    policy = deltackpt.policies.Consecutive(max_chain=8)
    with Trainer(Path(root), max_to_keep=3, policy=policy) as trainer:
        while True:
            trainer.save()
            trainer.states.clear()


class Trainer:
    """A manager, and the states that it saved, in host memory."""

    def __init__(self, root: Path, rows: dict[str, int] | None = None, **options: Any):
        self.root = root
        self.states: dict[int, dict[str, Any]] = {}
        self.step = 0
        self.manager = deltackpt.CheckpointManager(
            root,
            handlers=HANDLERS,
            options=manager_options(durability="process", **options),
        )
        found = self.manager.restore_latest(initial(rows or ROWS), service=None)
        if found is None:
            self.state = initial(rows or ROWS)
            self.marks = deltackpt.touched.init(
                {f"tables/{name}": table for name, table in self.state["tables"].items()}
            )
        else:
            self.state, self.marks, self.step = found.state, found.touched, found.step
            self.states[found.step] = self.state

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def train(self) -> None:
        """Makes the changes of the current step; see ``trained``."""
        self.state, changed = trained(self.state, self.step)
        marks = {f"tables/{name}": jnp.asarray(ids) for name, ids in changed.items()}
        self.marks = deltackpt.touched.mark(self.marks, marks)

    def save(self, **options: Any) -> int:
        """Trains and saves the next step."""
        self.step += 1
        self.train()
        self.states[self.step] = self.state
        self.manager.save(self.step, self.state, touched=self.marks, **options)
        self.manager.wait_until_finished()
        return self.step


def reader(root: Path, service_secs: float = HANG_SECS) -> deltackpt.CheckpointManager:
    """A manager that only reads."""
    options = deltackpt.ManagerOptions(access="read", timeouts=Timeouts(service_secs=service_secs))
    return deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options)


def restored(root: Path, template: Any = None, *, secs: float = HANG_SECS, **arguments: Any) -> Any:
    """The result of a new manager's ``restore_latest``."""
    with reader(root, secs) as manager:
        return newest(manager, template, **arguments)


def newest(manager: deltackpt.CheckpointManager, template: Any, **arguments: Any) -> Any:
    """The result of ``restore_latest``, without warnings about steps that retention removes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return manager.restore_latest(template, **arguments)


def remove_arrays(root: Path) -> None:
    """Removes the rows of all steps, and keeps their other files."""
    for path in root.glob("*/embeddings/**/*"):
        if path.is_file() and path.name.startswith(("c.", "layer.")):
            path.unlink()


# The hot standby.


def started(root: Path, **options: Any) -> RestoreService:
    """Starts a hot standby and waits until it has the newest step."""
    found = service.start(root, options=ServiceOptions(poll_secs=0.05, **options))
    found.wait_ready(timeout_secs=HANG_SECS)
    return found


def pids(status: ServiceStatus) -> list[int]:
    """Process IDs of the replicas that respond."""
    return [one.found.pid for one in status.replicas if one.found is not None]
