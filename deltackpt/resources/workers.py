# SPDX-License-Identifier: Apache-2.0
"""The threads of one manager: started when they are first needed, and kept from save to save.

Starting a thread costs the training thread up to a millisecond while the interpreter's lock is
wanted elsewhere.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from deltackpt.resources import priority
from deltackpt.resources.pace import Pace

_T = TypeVar("_T")
#: That write, and that encode.
_THREADS = 2
#: Files that are forced to disk at once.
FORCERS = 8


def drain(items: collections.deque[_T], action: Callable[[_T], object]) -> None:
    """Does something with each of what is left, until nothing is: several threads may share it.

    Args:
      items: taken from its left.
      action: of one item; what it raises ends this call, and leaves the others to other threads.
    """
    while True:
        try:
            item = items.popleft()
        except IndexError:
            return
        action(item)


class Workers:
    """Pools of threads, each for work that waits for none of its own kind."""

    def __init__(
        self,
        *,
        cpus: Collection[int] | None = None,
        threads: int | None = None,
        pace: Pace | None = None,
    ) -> None:
        """No thread runs yet.

        Args:
          cpus: where all of them run; anywhere by default.
          threads: how many write, and how many encode.
          pace: of what they write; as fast as the disk takes it by default.

        Raises:
          OptionError: this process may not use one of the CPUs.
        """
        priority.check(cpus)
        pool = functools.partial(
            ThreadPoolExecutor, initializer=functools.partial(priority.pin, cpus)
        )
        self.pace = pace or Pace()
        self._saver = pool(1, "deltackpt-save")
        self._writers = pool(threads or _THREADS, "deltackpt-write")
        #: Encode, and wait for nothing.
        self.encoders: concurrent.futures.Executor = pool(threads or _THREADS, "deltackpt-encode")
        #: Wait for the disk most of the time.
        self.forcers: concurrent.futures.Executor = pool(FORCERS, "deltackpt-force")

    def save(self, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Runs the background half of a save; one at a time."""
        return self._saver.submit(call, *arguments)

    def write(self, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Runs what writes one array or field."""
        return self._writers.submit(call, *arguments)

    def close(self) -> None:
        """Has all threads end once they are done; takes no more work.

        A save that goes on, which nobody waits for any longer, still finds the other threads.
        """
        try:
            self._saver.submit(self._close_others)
        except RuntimeError:  # It was closed, or the interpreter ends: nothing is done any more.
            self._close_others()
        self._saver.shutdown(wait=False)

    def _close_others(self) -> None:
        for pool in (self._writers, self.encoders, self.forcers):
            pool.shutdown(wait=False)
