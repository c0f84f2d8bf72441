# SPDX-License-Identifier: Apache-2.0
"""How far each process of a job has come with its log: advice, which no restore trusts.

A process notes its newest durable mark in a file beside its segments: 16 bytes, not forced.
"""

from __future__ import annotations

import collections
import contextlib
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from deltackpt.errors import LogBehind
from deltackpt.storage import files

NAME = "progress"
_RECORD = struct.Struct("<QQ")
#: The others' are read so often at most.
_READ_SECS = 0.5
#: Who is behind is said so often at most.
_SAY_SECS = 60.0


class Progress:
    """The progress of the processes of one stretch, written by one thread, read by another."""

    def __init__(self, stretch_dir: Path, process: int, count: int):
        """Reads and writes nothing yet.

        Args:
          stretch_dir: of the logs of all processes.
          process: index of this process.
          count: how many there are.
        """
        self._stretch_dir = stretch_dir
        self.process = process
        self.count = count
        self._own = 0
        self._least, self._read_at = 0, 0.0

    def note(self, number: int, step: int) -> None:
        """Notes the newest durable mark of this process.

        Args:
          number: of the call of ``log()``.
          step: the training step.
        """
        self._own = number
        if self.count > 1:
            with contextlib.suppress(OSError):
                path = self._stretch_dir / str(self.process) / NAME
                files.write_atomic(path, _RECORD.pack(number, step), fsync=False)

    def of_all(self, *, fresh: bool = False) -> int:
        """The newest mark that every process has, as far as is known: its number, 0 without any.

        Args:
          fresh: whether the others are asked however lately they were.
        """
        if self.count == 1:
            return self._own
        now = time.monotonic()
        if fresh or now - self._read_at >= _READ_SECS:
            others = (self._of(number) for number in range(self.count) if number != self.process)
            self._least, self._read_at = min(others), now
        return min(self._least, self._own)

    def of_each(self) -> list[int]:
        """The newest mark of each process, as it says: its number, 0 without any."""
        return [self._of(number) for number in range(self.count)]

    def _of(self, process: int) -> int:
        if process == self.process:
            return self._own
        try:
            number, _ = _RECORD.unpack(Path(self._stretch_dir, str(process), NAME).read_bytes())
        except (OSError, struct.error):
            return 0
        return number


class Watch:
    """Finds the processes that do not have a mark yet which others had long ago."""

    def __init__(self, deadline_secs: float):
        """Has seen nothing.

        Args:
          deadline_secs: how far behind the others a process may be.
        """
        self._deadline_secs = deadline_secs
        #: When a process had come so far, oldest first: the first is the newest that is long ago.
        self._tops: collections.deque[tuple[float, int]] = collections.deque()
        self._said_at: float | None = None

    def look(self, now: float, numbers: Sequence[int]) -> tuple[int, ...]:
        """The processes that are to be named now: none if that was done a moment ago.

        Args:
          now: in seconds.
          numbers: of the newest mark of each process.
        """
        tops, before = self._tops, now - self._deadline_secs
        tops.append((now, max(numbers)))
        while len(tops) > 1 and tops[1][0] <= before:
            tops.popleft()
        if tops[0][0] > before or (self._said_at is not None and now < self._said_at + _SAY_SECS):
            return ()
        late = tuple(process for process, at in enumerate(numbers) if at < tops[0][1])
        if late:
            self._said_at = now
        return late

    def error(self, late: tuple[int, ...]) -> LogBehind:
        """What is said of processes that are behind."""
        which = f"process{'es' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        return LogBehind(
            f"the log: expected every process within {self._deadline_secs:g} s of the others "
            f"(LogOptions.deadline_secs), found that {which} lack marks that others had by then; "
            "what is newer cannot be restored until they have come there: look at their disks",
            late,
        )
