# SPDX-License-Identifier: Apache-2.0
"""A promoter as the process of a trainer: started, woken, and left to end what is left."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from deltackpt.errors import StorageError
from deltackpt.storage import files
from deltackpt.tiers import promoter
from deltackpt.tiers.stage import Stage

#: Between two starts of a promoter that ends by itself.
_START_SECS = 2.0
_LOG_BYTES = 2000
#: Nothing of the trainer's working directory is imported, whatever it is named; the package is,
#: even where it is not installed.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[2]); from deltackpt.tiers import promoter; "
    "raise SystemExit(promoter.main(sys.argv[3:]))"
)
_PACKAGES = Path(__file__).parent.parent.parent
#: Those that end what is left, of managers that were closed: nobody waits for them.
_left: list[subprocess.Popen[bytes]] = []


class Running:
    """The promoter of a stage; used by one thread at a time."""

    def __init__(self, stage: Stage, *, cpus: Collection[int] | None = None):
        """None runs yet; ``cpus``: where it is to run, anywhere by default."""
        self._stage = stage
        self._cpus = cpus
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        #: What is said of one that ended by itself; the newest.
        self.ended: str | None = None

    def start(self) -> str | None:
        """Starts one unless it runs.

        Returns:
          A warning, where the one before ended by itself.

        Raises:
          StorageError: it cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return None
        warning = None
        if self._process is not None:
            if time.monotonic() - self._started_at < _START_SECS:
                return None
            warning = self.ended = (
                f"the promoter of {self._stage.path} ended with {self._process.returncode}, and is "
                f"started again; it said: {self._said()}"
            )
        self.close()
        arguments = ["deltackpt.tiers.promoter", str(_PACKAGES), str(self._stage.path)]
        if self._cpus is not None:
            arguments += ["--cpus", *map(str, sorted(self._cpus))]
        with files.typed_errors(self._stage.log, "start a promoter that writes"):
            with open(self._stage.log, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    # It ends what an interrupted trainer leaves.
                    start_new_session=True,
                )
        self._started_at = time.monotonic()
        return warning

    def wake(self) -> None:
        """There is something to do."""
        self._tell(promoter.WAKE)

    def hurry(self) -> None:
        """Somebody waits for what is to be done; until the next ``wake``."""
        self._tell(promoter.HURRY)

    def _tell(self, word: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # It has ended; ``start`` says so.
                self._process.stdin.write(word)
                self._process.stdin.flush()

    def close(self) -> None:
        """No further saves will come: it ends once nothing is left."""
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
