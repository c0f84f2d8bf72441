# SPDX-License-Identifier: Apache-2.0
"""Multi-process jobs as threads, distinguished by what ``deltackpt.coordination`` returns.

For tests with several participants that are never killed and run no jax collective; ``many.py``
starts real processes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from orbax.checkpoint import multihost

from deltackpt import coordination
from deltackpt.coordination import Coordinator
from deltackpt.resources.runtime import Runtime
from deltackpt.save import selection
from deltackpt.save.commit import StepWriters
from deltackpt.state import placement

#: Assigned to the processes of a job, in order.
DEVICES = 8


def forget() -> None:
    """Clears cached plans; their key is the sharding, but tests assign devices differently."""
    placement._grid.cache_clear()
    placement._owned.cache_clear()
    placement._shared_rows.cache_clear()
    selection._divisions.clear()


class MemoryService:
    """The key-value store of JAX's coordination service, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.refuses = False
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        assert len(value) <= 64 << 10
        with self._locked():
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self._locked():
            if self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                return self.values[key]
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        below = f"{key.rstrip('/')}/"
        with self._locked():
            return [(name, self.values[name]) for name in self.values if name.startswith(below)]

    def key_value_delete(self, key: str) -> None:
        with self._locked():
            for name in [one for one in self.values if one == key or one.startswith(f"{key}/")]:
                del self.values[name]

    @contextlib.contextmanager
    def _locked(self):
        if self.refuses:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")
        with self._changed:
            yield


class Job:
    """Several processes on eight devices."""

    def __init__(self, count: int):
        self.count = count
        self.service = MemoryService()
        self.lock = threading.Lock()
        self._here = threading.local()

    @contextlib.contextmanager
    def running(self):
        forget()
        with (
            mock.patch.object(coordination, "process_count", lambda: self.count),
            mock.patch.object(
                coordination, "process_index", lambda: getattr(self._here, "index", 0)
            ),
            mock.patch.object(coordination, "process_of", lambda d: d.id * self.count // DEVICES),
            mock.patch.object(multihost, "is_jax_distributed_client_initialized", lambda: True),
            mock.patch.object(multihost, "get_jax_distributed_client", lambda: self.service),
        ):
            yield self
        forget()

    @contextlib.contextmanager
    def process(self, index: int):
        self._here.index = index
        yield
        self._here.index = 0

    def on_each(self, call) -> list:
        """Makes the call on all processes at once; returns each result or exception."""

        def run(index: int):
            with self.process(index):
                try:
                    return call(index)
                except Exception as error:
                    return error

        with concurrent.futures.ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(run, range(self.count)))


def coordinators(service: MemoryService, count: int, timeout_secs: float) -> list[Coordinator]:
    """The coordinators of the processes of a job that uses a service."""
    job, found = Job(count), []
    job.service = service
    with job.running():
        for index in range(count):
            with job.process(index):
                found.append(Coordinator("directory", timeout_secs))
    return found


def step_writers(
    coordinator: Coordinator, temporary: Path, key: str = "run-1", **changes: Any
) -> StepWriters:
    """The processes that write a step, as one of them sees them."""
    given = {"coordinator": coordinator, "key": key, "temporary": temporary, "runtime": Runtime()}
    return StepWriters(**given | changes)
