# SPDX-License-Identifier: Apache-2.0
"""How far each process of a job has come with its log: advice, which no restore trusts.

A process notes its newest durable mark in a file beside its segments: 16 bytes, not forced.
"""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path

from deltackpt.storage import files

NAME = "progress"
_RECORD = struct.Struct("<QQ")
#: The others' are read so often at most.
_READ_SECS = 0.5


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
        self._process = process
        self._count = count
        self._own = 0
        self._least, self._read_at = 0, 0.0

    def note(self, number: int, step: int) -> None:
        """Notes the newest durable mark of this process.

        Args:
          number: of the call of ``log()``.
          step: the training step.
        """
        self._own = number
        if self._count > 1:
            with contextlib.suppress(OSError):
                path = self._stretch_dir / str(self._process) / NAME
                files.write_atomic(path, _RECORD.pack(number, step), fsync=False)

    def of_all(self, *, fresh: bool = False) -> int:
        """The newest mark that every process has, as far as is known: its number, 0 without any.

        Args:
          fresh: whether the others are asked however lately they were.
        """
        if self._count == 1:
            return self._own
        now = time.monotonic()
        if fresh or now - self._read_at >= _READ_SECS:
            others = (self._of(number) for number in range(self._count) if number != self._process)
            self._least, self._read_at = min(others), now
        return min(self._least, self._own)

    def behind(self) -> list[int]:
        """The processes that have come as far as the last, where others have come further."""
        found = [self._of(number) for number in range(self._count)]
        return [number for number, at in enumerate(found) if at == min(found) < max(found)]

    def _of(self, process: int) -> int:
        if process == self._process:
            return self._own
        try:
            number, _ = _RECORD.unpack(Path(self._stretch_dir, str(process), NAME).read_bytes())
        except (OSError, struct.error):
            return 0
        return number
