# SPDX-License-Identifier: Apache-2.0
"""Advisory progress of each process's WAL; never used to choose a recovery point.

A process stores its newest durable record in a file beside its segments: 16 bytes, not fsynced.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from deltackpt.errors import WalBehind
from deltackpt.reading.wal_locations import NAME, Noted, newest_durable
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import store_path

#: The others' are read so often at most.
_READ_SECS = 0.5
#: Minimum time between reports of lagging processes.
_REPORT_SECS = 60.0


class WalProgress:
    """The progress of the processes of one epoch, written by one thread, read by another."""

    def __init__(self, epoch_dir: Path, process: int, count: int):
        self._epoch_dir = epoch_dir
        self.process = process
        self.count = count
        self._own = 0
        self._lock = threading.Lock()
        self._file: int | None = None
        self._least, self._read_at = 0, 0.0

    def record(self, number: int, step: int) -> None:
        """Stores this process's newest durable record: the ``append()`` call and the step."""
        self._own = number
        path, record = self._epoch_dir / str(self.process) / NAME, Noted(number, step).to_bytes()
        with self._lock, contextlib.suppress(OSError):
            if self._file is None:
                # A new file at first; then in place, at a tenth of the cost.
                DurableDir(path.parent, fsync=False).write(path, record)
                self._file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            else:
                os.pwrite(self._file, record, 0)

    def close(self) -> None:
        """Closes the file; the next ``record`` opens it again."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def of_all(self, *, fresh: bool = False) -> int:
        """Returns the newest record that all processes are known to have, or 0.

        The others' progress is cached for a moment, unless ``fresh``.
        """
        if self.count == 1:
            return self._own
        now = time.monotonic()
        if fresh or now - self._read_at >= _READ_SECS:
            others = (self._of(number) for number in range(self.count) if number != self.process)
            self._least, self._read_at = min(others), now
        return min(self._least, self._own)

    def of_each(self) -> list[int]:
        """Returns the number of the newest record of each process, or 0."""
        return [self._of(number) for number in range(self.count)]

    def _of(self, process: int) -> int:
        if process == self.process:
            return self._own
        return newest_durable(store_path(self._epoch_dir) / str(process)).number


class LagWatch:
    """Finds processes that lack a record that others have had for ``deadline_secs``."""

    def __init__(self, deadline_secs: float):
        self._deadline_secs = deadline_secs
        #: When a process had come so far, oldest first: the first is the newest that is long ago.
        self._tops: collections.deque[tuple[float, int]] = collections.deque()
        self._reported_at: float | None = None

    def poll(self, now: float, numbers: Sequence[int]) -> tuple[int, ...]:
        """Returns the processes to report now; none if they were reported recently."""
        tops, before = self._tops, now - self._deadline_secs
        tops.append((now, max(numbers)))
        while len(tops) > 1 and tops[1][0] <= before:
            tops.popleft()
        if tops[0][0] > before or (
            self._reported_at is not None and now < self._reported_at + _REPORT_SECS
        ):
            return ()
        lagging = tuple(process for process, at in enumerate(numbers) if at < tops[0][1])
        if lagging:
            self._reported_at = now
        return lagging

    def error(self, lagging: tuple[int, ...]) -> WalBehind:
        """Returns the error about processes that lag."""
        which = f"process{'es' if len(lagging) > 1 else ''} {', '.join(map(str, lagging))}"
        return WalBehind(
            f"WAL: expected every process within {self._deadline_secs:g} s of the others "
            f"(WalOptions.deadline_secs), found that {which} lack records that others had by then; "
            "newer records cannot be restored until they catch up: check their disks",
            lagging,
        )
