# SPDX-License-Identifier: Apache-2.0
"""The replicator: the process that brings staged saves to the remote directory and to peers.

It does not contend for the trainer's GIL or cores, and it finishes the uploads of a killed trainer:
the staging directory records the work, and the tiers what is done. A staging directory has at most
one replicator at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from deltackpt.errors import InUse, StorageError
from deltackpt.ledger import locks
from deltackpt.resources import memory, priority
from deltackpt.storage import files
from deltackpt.tiers.cursor import Trainer
from deltackpt.tiers.pushing import Pusher
from deltackpt.tiers.stage import Stage
from deltackpt.tiers.uploading import Uploader

_logger = logging.getLogger(__name__)

_LOCK_SECS = 0.2
_NICE = 10
_MOST_LOG_BYTES = 1 << 20


@contextlib.contextmanager
def only_one(stage: Stage, trainer: Trainer) -> Iterator[bool]:
    """Waits until no other replicator works on a staging directory.

    Yields:
      Whether this is the one; False if the trainer ended first and left nothing to do.
    """
    refusal = InUse(f"{stage.path}: expected no other uploader, found one running; it continues")
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locks.held(stage.lock, refusal, private=True))
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
    """The last reported upload progress of a staging directory.

    Attributes:
      url: URL of the remote directory.
      waiting: saves that are not uploaded yet.
      nbytes: total size of their files.
      damaged: same as in ``Progress``.
      problem: same as in ``Progress``, or the message about another trainer that took over.
      problem_unix_secs: same as in ``Progress``.
    """

    url: str
    waiting: int
    nbytes: int
    damaged: dict[str, str]
    problem: str | None
    problem_unix_secs: float


def status_of(stage: Stage) -> Status | None:
    """Returns the upload progress of a staging directory; None if it was never used.

    Raises:
      Damaged, StorageError: the staging directory is not readable.
    """
    orders = stage.orders()
    if orders is None:
        return None
    progress = stage.progress(orders.holder)
    waiting = Uploader(stage, orders, progress).waiting()
    return Status(
        url=orders.url,
        waiting=len(waiting),
        nbytes=sum(files.tree_bytes(stage.steps / str(step)) for step in waiting),
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
    stage = Stage(options.stage)
    priority.pin(options.cpus)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    memory.keep_little()
    trainer = Trainer(sys.stdin.fileno())
    with only_one(stage, trainer) as is_one:
        if is_one:
            _shorten(stage.log)
            with _pushing(stage, trainer):
                Uploader(stage).run(trainer)
    _logger.info("ended; peak memory %s, %.2f s of CPU", _most_memory(), time.process_time())
    return 0


@contextlib.contextmanager
def _pushing(stage: Stage, trainer: Trainer) -> Iterator[None]:
    """Replicates saves to peers in a second thread, if the trainer has found any."""
    if stage.keepers_stamp() is None:
        yield
        return
    pusher = Pusher(stage)
    thread = pusher.start(trainer)
    try:
        yield
    finally:
        pusher.end()
        thread.join()


def _most_memory() -> str:
    """Peak resident memory of this program; ``getrusage`` would include its parent's."""
    with contextlib.suppress(OSError, IndexError):
        return Path("/proc/self/status").read_text().split("VmHWM:")[1].split("\n")[0].strip()
    return "unknown"


def _shorten(log: Path) -> None:
    """Truncates a log that has grown long."""
    with contextlib.suppress(OSError, StorageError):
        if files.length(log, log.name) > _MOST_LOG_BYTES:
            os.close(os.open(log, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC))


if __name__ == "__main__":
    raise SystemExit(main())
