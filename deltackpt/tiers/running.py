# SPDX-License-Identifier: Apache-2.0
"""Starts and wakes a trainer's replicator, which finishes pending uploads on its own."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from deltackpt.errors import StorageError
from deltackpt.storage import files
from deltackpt.tiers.cursor import HURRY, LOOK, WAKE
from deltackpt.tiers.stage import Stage

#: Seconds between two starts of an uploader that exits unexpectedly.
_START_SECS = 2.0
_LOG_BYTES = 2000
#: Imports nothing from the trainer's working directory, whatever its name, but finds the package
#: even if it is not installed.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[2]); from deltackpt.tiers import replicator; "
    "raise SystemExit(replicator.main(sys.argv[3:]))"
)
_PACKAGES = Path(__file__).parent.parent.parent
#: Uploaders of closed managers that finish pending uploads: no caller waits for them.
_left: list[subprocess.Popen[bytes]] = []


class Running:
    """The uploader process of a staging directory; used by one thread at a time."""

    def __init__(self, stage: Stage, *, cpus: Collection[int] | None = None):
        """Starts no process yet; ``cpus`` restricts where it runs (default: anywhere)."""
        self._stage = stage
        self._cpus = cpus
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        #: Message about the last one that exited unexpectedly.
        self.ended: str | None = None

    def start(self) -> str | None:
        """Starts the uploader unless it is running.

        Returns:
          A warning if the previous one exited unexpectedly.

        Raises:
          StorageError: it failed to start.
        """
        if self._process is not None and self._process.poll() is None:
            return None
        warning = None
        if self._process is not None:
            if time.monotonic() - self._started_at < _START_SECS:
                return None
            warning = self.ended = (
                f"the uploader of {self._stage.path} exited with code {self._process.returncode} "
                f"and is restarted; its output: {self._said()}"
            )
        self.close()
        arguments = ["deltackpt.tiers.replicator", str(_PACKAGES), str(self._stage.path)]
        if self._cpus is not None:
            arguments += ["--cpus", *map(str, sorted(self._cpus))]
        with files.typed_errors(self._stage.log, "start an uploader that writes"):
            private = functools.partial(os.open, mode=0o600)
            with open(self._stage.log, "ab", opener=private) as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    # It finishes what an interrupted trainer leaves.
                    start_new_session=True,
                )
        self._started_at = time.monotonic()
        return warning

    def wake(self) -> None:
        """Notifies it of new work."""
        self._tell(WAKE)

    def look(self) -> None:
        """Notifies it of another change; a caller may still be waiting."""
        self._tell(LOOK)

    def hurry(self) -> None:
        """Notifies it that a caller is waiting, until the next ``wake``."""
        self._tell(HURRY)

    def _tell(self, word: bytes) -> None:
        process = self._process  # Another thread may start a new one.
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # It has exited; ``start`` reports it.
                process.stdin.write(word)
                process.stdin.flush()

    def close(self) -> None:
        """Signals that no more saves will come; the uploader then exits after its last upload."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        _left[:] = [one for one in (*_left, process) if one.poll() is None]

    def _said(self) -> str:
        with contextlib.suppress(StorageError):
            text = self._stage.log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
            return text.strip().rpartition("\n")[2]
        return "nothing"
