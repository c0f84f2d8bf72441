# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a quiet run, so that no demonstration is silent for long."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from rich.console import Console

from running import journal

#: Number of lines of a whole run, and the longest silence in seconds.
_LINES, _SILENT_SECS = 8, 15.0
_POLL_SECS = 0.1


class Progress:
    """Prints the newest step in a run's journal: a few lines per run, at least one every 15 s."""

    def __init__(self, console: Console, what: str, path: Path, steps: int):
        """Prints nothing yet.

        Args:
          console: where to print.
          what: what the run does, e.g. ``"training"``.
          path: the run's journal; it may not exist yet.
          steps: number of steps of the whole run.
        """
        self._console, self._what, self._path, self._steps = console, what, path, steps
        self._shown = self._newest()
        self._started = self._shown_at = time.monotonic()

    def show(self) -> None:
        """Prints a line if the run has advanced, or if the last line is old; call it often."""
        now, newest = time.monotonic(), self._newest()
        advanced = newest - self._shown >= self._steps / _LINES
        finished = newest == self._steps > self._shown
        if advanced or finished or now - self._shown_at >= _SILENT_SECS:
            self._shown, self._shown_at = newest, now
            where = f"step {newest} of {self._steps}" if newest else "starting"
            self._console.print(f"  {self._what}: {where}, {now - self._started:.0f} s")

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Shows the progress of a process until it ends; returns its exit status."""
        while process.poll() is None:
            self.show()
            time.sleep(_POLL_SECS)
        self.show()
        return process.returncode

    def _newest(self) -> int:
        found = journal.read(self._path, "step") if self._path.exists() else []
        # Loops number their steps from 0 or from 1.
        return min(found[-1]["step"] + 1, self._steps) if found else 0
