# SPDX-License-Identifier: Apache-2.0
"""A rate limit in bytes per second, from which senders reserve bytes.

Unused budget does not accumulate: after a pause, bytes are sent at the rate, not in a burst.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Pace:
    """A rate limit in bytes per second; thread-safe."""

    def __init__(
        self, bytes_per_sec: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ):
        """Creates a limit; None means unlimited."""
        self._rate = bytes_per_sec
        self._clock = clock
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._lifters = 0
        #: Set while the limit is suspended; waiting threads then continue.
        self._is_lifted = threading.Event()

    def reserve(self, nbytes: int) -> float:
        """Reserves bytes; returns in how many seconds they may be sent."""
        if self._rate is None or self._is_lifted.is_set():
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._rate
        return start - now

    def take(self, nbytes: int, stopped: threading.Event | None = None) -> None:
        """Waits until bytes may be sent; an event replaces ``lifted`` as the end of the wait."""
        secs = self.reserve(nbytes)
        if secs > 0:
            (stopped or self._is_lifted).wait(secs)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Suspends the limit inside the context, because a caller is waiting for the data."""
        with self._lock:
            self._lifters += 1
            self._is_lifted.set()
        try:
            yield
        finally:
            with self._lock:
                self._lifters -= 1
                if not self._lifters:
                    self._is_lifted.clear()
                    self._free_at = 0.0
