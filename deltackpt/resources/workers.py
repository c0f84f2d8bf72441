# SPDX-License-Identifier: Apache-2.0
"""The threads of one manager: started when they are first needed, and kept from save to save.

Starting a thread costs the training thread up to a millisecond if other threads contend for the
GIL.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from deltackpt.resources import priority
from deltackpt.resources.pace import Pace

if TYPE_CHECKING:
    from deltackpt.resources.write_buffers import WriteBuffers

_T = TypeVar("_T")
#: That write, and that encode.
_THREADS = 2
#: Number of concurrent fsyncs.
FORCERS = 8


def drain(items: collections.deque[_T], action: Callable[[_T], object]) -> None:
    """Processes the remaining items until none are left; several threads may share the queue.

    Args:
      items: the queue; items are removed from the left.
      action: processes one item. An exception ends this call; other threads process the rest.
    """
    while True:
        try:
            item = items.popleft()
        except IndexError:
            return
        action(item)


def complete(future: Future[None], call: Callable[[], object]) -> None:
    """Runs a call, and stores its end or error in a future; does nothing if that was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


class Workers:
    """Thread pools. Work in a pool never waits for other work in the same pool."""

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
          pace: limits the rate of writes; unlimited by default.

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
        #: Buffers that no save uses, and the process whose memory they are.
        self._buffers: collections.deque[tuple[int, WriteBuffers]] = collections.deque(maxlen=1)

    def save(self, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Runs the background half of a save; one at a time."""
        return self._saver.submit(call, *arguments)

    def write(self, call: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Runs a call that writes one array or field."""
        return self._writers.submit(call, *arguments)

    @contextlib.contextmanager
    def write_buffers(self) -> Iterator[WriteBuffers]:
        """Lends buffers for one file, which are kept for the next."""
        # The command line imports this module also if numpy is missing.
        from deltackpt.resources.write_buffers import WriteBuffers

        try:
            process, buffers = self._buffers.popleft()
        except IndexError:
            process, buffers = 0, None
        if buffers is None or process != os.getpid():
            buffers = WriteBuffers(pool=self.forcers)
        try:
            yield buffers
        finally:
            buffers.abandon()
            self._buffers.append((os.getpid(), buffers))

    def close(self) -> None:
        """Stops accepting work; the threads exit once they are done.

        A save that still runs in the background can keep using the other pools.
        """
        try:
            self._saver.submit(self._close_others)
        except RuntimeError:  # It was closed, or the interpreter ends: nothing is done any more.
            self._close_others()
        self._saver.shutdown(wait=False)

    def _close_others(self) -> None:
        for pool in (self._writers, self.encoders, self.forcers):
            pool.shutdown(wait=False)
        self._buffers.clear()
