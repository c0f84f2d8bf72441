# SPDX-License-Identifier: Apache-2.0
"""Progress of a read in bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable

#: Called with (bytes read so far, bytes to read in all), from a background thread.
Progress = Callable[[int, int], None]


class Meter:
    """Counts bytes read, for the progress callback; threads may add at once."""

    def __init__(self, progress: Progress | None, total: int = 0):
        """Expects ``total`` bytes at first."""
        self.done = 0
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()

    def expect(self, nbytes: int) -> None:
        """Adds to the expected bytes."""
        self._total += nbytes

    def add(self, nbytes: int) -> None:
        """Adds to the bytes read; they may exceed those expected."""
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, max(self.done, self._total))
