# SPDX-License-Identifier: Apache-2.0
"""A bound of bytes per second, kept by whoever takes bytes from it before they go.

What is taken late is not caught up with: after a pause bytes go at the rate, not all at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Pace:
    """A bound of bytes per second; thread-safe."""

    def __init__(
        self, bytes_per_sec: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ):
        """None does not bound them."""
        self._rate = bytes_per_sec
        self._clock = clock
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._lifters = 0
        #: Set while nothing is bounded; who waits then goes on.
        self._is_lifted = threading.Event()

    def reserve(self, nbytes: int) -> float:
        """Takes so many bytes; how many seconds from now they may go."""
        if self._rate is None or self._is_lifted.is_set():
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._rate
        return start - now

    def take(self, nbytes: int, stopped: threading.Event | None = None) -> None:
        """Waits until so many bytes may go; an event cuts that short, instead of ``lifted``."""
        secs = self.reserve(nbytes)
        if secs > 0:
            (stopped or self._is_lifted).wait(secs)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Bounds nothing meanwhile: somebody waits for what is written."""
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
