# SPDX-License-Identifier: Apache-2.0
"""Prefetches several objects concurrently.

It pays off if a store answers slowly: an uncached disk, a network file system, a bucket. For files
in memory, reading takes less time than passing them between threads.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Iterable
from types import TracebackType

from deltackpt.errors import DeltackptError
from deltackpt.storage.store import StorePath

#: A store is slow where so many reads in a row took so long: one may have waited for a processor.
_SLOW_READS, _SLOW_SECS = 3, 1e-3
_THREADS = 16
#: Nothing longer is read ahead: it may not be wanted.
_MOST_BYTES = 1 << 22


class Ahead:
    """Prefetches objects if the store has proved slow; use it as a context manager."""

    def __init__(self) -> None:
        """Reads nothing yet."""
        #: How many reads in a row were slow.
        self._slow_reads = 0
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._coming: dict[StorePath, concurrent.futures.Future[bytes]] = {}

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def read(self, at: StorePath, shown: str) -> bytes:
        """Returns the bytes of an object, read now unless they were prefetched.

        Args:
          at: path of the object.
          shown: its name in errors.

        Raises:
          Damaged, StorageError: as for ``StorePath.read``.
        """
        coming = self._coming.pop(at, None)
        if coming is not None:
            with contextlib.suppress(DeltackptError, OSError):
                return coming.result()
        started = time.perf_counter()
        data = at.read(shown)
        slow = time.perf_counter() - started > _SLOW_SECS
        self._slow_reads = self._slow_reads + 1 if slow else 0
        return data

    def want(self, wanted: Iterable[StorePath]) -> None:
        """Starts to read objects, if that helps; they need not exist.

        Args:
          wanted: their paths, soonest first.
        """
        if self._slow_reads < _SLOW_READS:
            return
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "deltackpt-ahead")
        for at in wanted:
            if at not in self._coming:
                self._coming[at] = self._pool.submit(at.read, most_bytes=_MOST_BYTES)
