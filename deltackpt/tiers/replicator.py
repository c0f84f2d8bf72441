# SPDX-License-Identifier: Apache-2.0
"""The replicator: the process that copies staged saves to the remote directory and to peers.

It does not contend for the trainer's GIL or cores, and finishes the uploads of a killed trainer.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from deltackpt.errors import InUse, RestoreError, StorageError
from deltackpt.ledger import lease
from deltackpt.resources import host_memory, runtime
from deltackpt.storage import posix
from deltackpt.storage.store import store_path
from deltackpt.tiers.cursor import WAKE, Trainer
from deltackpt.tiers.peer_push import Pusher
from deltackpt.tiers.staging import StagingDir
from deltackpt.tiers.uploader import Uploader

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
#: Uploaders of closed managers that finish pending uploads: no caller waits for them, and Python
#: would warn of each ``Popen`` that is deleted before its process ends.
_left: list[subprocess.Popen[bytes]] = []


@atexit.register
def _mark_ended() -> None:
    """Avoids a ResourceWarning for each uploader that outlives this process."""
    for process in _left:
        process.returncode = process.poll() or 0


class ReplicatorProcess:
    """A trainer's replicator, which finishes pending uploads on its own; thread-safe."""

    def __init__(self, stage: StagingDir, *, cpus: Collection[int] | None = None):
        """Starts no process yet; ``cpus`` restricts where it runs (default: anywhere)."""
        self._stage = stage
        self._cpus = cpus
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._starting = threading.RLock()  # A restart closes the exited process.
        #: About the last process that exited unexpectedly, and all that were not reported yet.
        self.ended: str | None = None
        self.warnings: list[str] = []

    def start(self) -> None:
        """Starts the uploader unless it is running."""
        with self._starting:
            if self._process is not None:
                is_recent = time.monotonic() - self._started_at < _START_SECS
                if self._process.poll() is None or is_recent:
                    return
                self.ended = (
                    f"the uploader of {self._stage.path} exited with code "
                    f"{self._process.returncode} and is restarted; its output: {self._said()}"
                )
                self.warnings.append(self.ended)
                self.close()
            self._process, self._started_at = self._started(), time.monotonic()

    def _started(self) -> subprocess.Popen[bytes]:
        arguments = ["deltackpt.tiers.replicator", str(_PACKAGES), str(self._stage.path)]
        if self._cpus is not None:
            arguments += ["--cpus", *map(str, sorted(self._cpus))]
        with posix.typed_errors(self._stage.log, "start an uploader that writes"):
            private = functools.partial(os.open, mode=0o600)
            with open(self._stage.log, "ab", opener=private) as log:
                return subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    # It finishes what an interrupted trainer leaves.
                    start_new_session=True,
                )

    def wake(self, word: bytes = WAKE) -> None:
        """Notifies it of new work, or of what another word of ``cursor`` means."""
        process = self._process  # Another thread may start a new one.
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # It has exited; ``start`` reports it.
                process.stdin.write(word)
                process.stdin.flush()

    def close(self) -> None:
        """Signals that no more saves will come; the uploader then exits after its last upload."""
        with self._starting:
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


_logger = logging.getLogger(__name__)

_LOCK_SECS = 0.2
_NICE = 10
_MOST_LOG_BYTES = 1 << 20


@contextlib.contextmanager
def only_one(stage: StagingDir, trainer: Trainer) -> Iterator[bool]:
    """Waits to be the only replicator of a staging directory; yields False if no work is left."""
    refusal = InUse(f"{stage.path}: expected no other uploader, found one running; it continues")
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lease.file_lock(stage.lock, refusal, private=True))
            except InUse:
                time.sleep(_LOCK_SECS)
                if trainer.is_gone:
                    status = status_of(stage)
                    if status is None or not status.waiting:
                        yield False
                        return
                continue
            yield True
            return


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """The last reported upload progress of a staging directory; see ``TierProgress``."""

    url: str
    waiting: int  # number of saves that are not uploaded yet, and size of their files
    nbytes: int
    damaged: dict[str, str]
    problem: str | None  # also if another trainer took over
    problem_unix_secs: float


def status_of(stage: StagingDir) -> Status | None:
    """Returns the upload progress of a staging directory; None if it was never used."""
    orders = stage.orders()
    if orders is None:
        return None
    progress = stage.progress(orders.holder)
    waiting = Uploader(stage, orders, progress).waiting()
    return Status(
        url=orders.url,
        waiting=len(waiting),
        nbytes=sum(store_path(stage.steps / str(step)).tree_bytes() for step in waiting),
        damaged=progress.damaged,
        problem=progress.fenced or progress.problem,
        problem_unix_secs=progress.problem_unix_secs,
    )


def main(arguments: list[str] | None = None) -> int:
    """The program that a manager starts; its standard input is the trainer's pipe."""
    parser = argparse.ArgumentParser(prog="deltackpt.tiers.replicator", description=__doc__)
    parser.add_argument("stage", type=Path)
    parser.add_argument("--cpus", type=int, nargs="+", help="where it runs")
    options = parser.parse_args(arguments)
    stage = StagingDir(options.stage)
    runtime.pin(options.cpus)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    host_memory.keep_little()
    trainer = Trainer(sys.stdin.fileno())
    with only_one(stage, trainer) as is_one:
        if is_one:
            _shorten(stage.log)
            with _pushing(stage, trainer):
                Uploader(stage).run(trainer)
    _logger.info("ended; %.2f s of CPU", time.process_time())
    return 0


@contextlib.contextmanager
def _pushing(stage: StagingDir, trainer: Trainer) -> Iterator[None]:
    """Replicates saves to peers in a second thread, if the trainer has found any."""
    has_peers = True  # The pusher reports unreadable orders.
    with contextlib.suppress(RestoreError, StorageError):
        orders = stage.orders()
        has_peers = orders is not None and orders.peers is not None
    if not has_peers:
        yield
        return
    pusher = Pusher(stage)
    thread = pusher.start(trainer)
    try:
        yield
    finally:
        pusher.end()
        thread.join()


def _shorten(log: Path) -> None:
    with contextlib.suppress(OSError, StorageError):
        if store_path(log).length(log.name) > _MOST_LOG_BYTES:
            os.close(os.open(log, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC))
