# SPDX-License-Identifier: Apache-2.0
"""How much of what is to be read was read."""

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
        """So many more bytes are to be read."""
        self._total += nbytes

    def add(self, nbytes: int) -> None:
        """So many bytes were read; there may be more of them than were expected."""
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, max(self.done, self._total))
