# SPDX-License-Identifier: Apache-2.0
"""Multi-process jobs as threads, distinguished by what ``deltackpt.processes`` returns.

For tests with several participants that are never killed and run no jax collective; ``many.py``
starts real processes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from unittest import mock

from deltackpt import processes
from deltackpt.save import division
from deltackpt.state import ownership

#: Assigned to the processes of a job, in order.
DEVICES = 8


def forget() -> None:
    """Clears cached plans; their key is the sharding, but tests assign devices differently."""
    ownership._grid.cache_clear()
    ownership._owned.cache_clear()
    ownership._shared_rows.cache_clear()
    division.forget()


class Job:
    """Several processes on eight devices."""

    def __init__(self, count: int):
        self.count = count
        self.lock = threading.Lock()
        self._here = threading.local()

    @contextlib.contextmanager
    def running(self):
        forget()
        with (
            mock.patch.object(processes, "count", lambda: self.count),
            mock.patch.object(processes, "index", lambda: getattr(self._here, "index", 0)),
            mock.patch.object(processes, "of", lambda d: d.id * self.count // DEVICES),
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
