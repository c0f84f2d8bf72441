# SPDX-License-Identifier: Apache-2.0
"""Private memory in which the bytes of a file are gathered while earlier ones are written."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
from collections.abc import Callable

import numpy as np

from deltackpt.resources.memory import private_buffer


class WriteBuffers:
    """Memory to gather a file in, and a thread that writes it; kept from save to save.

    Used for one file at a time, and not after a fork.
    """

    def __init__(
        self,
        *,
        nbytes: int = 6 << 20,
        count: int = 3,
        pool: concurrent.futures.Executor | None = None,
    ):
        """Allocates nothing yet.

        Args:
          nbytes: length of a buffer. Files up to this length are a single write.
          count: number of buffers, at least 2.
          pool: writes; its threads must not wait for buffers. By default, a thread of its own.
        """
        self.nbytes = nbytes
        self._count = count
        self._free: list[np.ndarray] = []
        self._writes: collections.deque[tuple[concurrent.futures.Future[None], np.ndarray]] = (
            collections.deque()
        )
        self._own = None if pool else concurrent.futures.ThreadPoolExecutor(1, "deltackpt-gather")
        self._pool: concurrent.futures.Executor | None = pool or self._own

    def take(self, nbytes: int) -> np.ndarray:
        """Returns a buffer of at least ``nbytes``, after waiting for one to be written.

        Raises:
          StorageError: writing failed.
        """
        while len(self._writes) >= self._count - 1:
            self._await_one()
        if self._free and nbytes <= self.nbytes:
            return self._free.pop()
        return private_buffer(max(nbytes, self.nbytes))

    def give_back(self, buffer: np.ndarray) -> None:
        """Keeps a buffer for the next ``take``, unless it is an oversized one."""
        if len(self._free) < self._count and buffer.nbytes < 2 * self.nbytes:
            self._free.append(buffer)

    def write(self, write: Callable[[np.ndarray], None], buffer: np.ndarray, nbytes: int) -> None:
        """Writes the first bytes of a buffer in the background, which then is free."""
        assert self._pool is not None
        self._writes.append((self._pool.submit(write, buffer[:nbytes]), buffer))

    def wait(self) -> None:
        """Waits for all writes.

        Raises:
          StorageError: writing failed.
        """
        while self._writes:
            self._await_one()

    def abandon(self) -> None:
        """Waits for all writes of a file that has failed."""
        while self._writes:
            with contextlib.suppress(Exception):
                self._await_one()

    def close(self) -> None:
        """Ends the thread and frees the memory."""
        self.abandon()
        self._free.clear()
        if self._own is not None:
            self._own.shutdown()

    def _await_one(self) -> None:
        future, buffer = self._writes.popleft()
        concurrent.futures.wait([future])
        self.give_back(buffer)
        future.result()
