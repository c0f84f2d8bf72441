# SPDX-License-Identifier: Apache-2.0
"""The promoter: brings the saves of a stage to the root, in a process of its own.

It takes neither the interpreter's lock of a trainer nor its place on the cores, and it ends what a
killed trainer has left: the stage says what that is, and the root's journal what of it is done. One
works at a stage at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from deltackpt.errors import InUse, StorageError
from deltackpt.ledger import locks
from deltackpt.resources import memory, priority
from deltackpt.storage import files
from deltackpt.tiers.promotion import Promoter, Trainer
from deltackpt.tiers.pushing import Pusher
from deltackpt.tiers.stage import Stage

_logger = logging.getLogger(__name__)

_LOCK_SECS = 0.2
_NICE = 10
_MOST_LOG_BYTES = 1 << 20
#: What a trainer writes: there is work; somebody waits for it.
WAKE, HURRY = b".", b"!"


class PipeTrainer:
    """A trainer that holds the other end of a pipe, and writes to it where there is work."""

    def __init__(self, descriptor: int):
        """Reads from a descriptor."""
        self._descriptor = descriptor
        self.is_gone = False
        self.is_waiting = False

    def wait(self, secs: float) -> None:
        """See ``Trainer``."""
        if self.is_gone:
            time.sleep(secs)
            return
        readable, _, _ = select.select([self._descriptor], [], [], secs)
        if readable:
            told = os.read(self._descriptor, 1 << 16)
            self.is_gone, self.is_waiting = not told, told.endswith(HURRY)


class NoTrainer:
    """None that this promoter belongs to: it works until it is stopped, or nothing is left."""

    def __init__(self, *, until_empty: bool):
        """One that is gone, or may come at any time."""
        self.is_gone = until_empty
        self.is_waiting = True

    def wait(self, secs: float) -> None:
        """See ``Trainer``."""
        time.sleep(min(secs, 1.0))


@contextlib.contextmanager
def only_one(stage: Stage, trainer: Trainer) -> Iterator[bool]:
    """Waits until no other promoter works at a stage.

    Yields:
      Whether this is the one; not where the trainer went meanwhile and left nothing to do.
    """
    refusal = InUse(f"{stage.path}: expected no other promoter, found one at work; it goes on")
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locks.held(stage.lock, refusal))
            except InUse:
                trainer.wait(_LOCK_SECS)
                status = status_of(stage) if trainer.is_gone else None
                if trainer.is_gone and (status is None or not status.waiting):
                    yield False
                    return
                if trainer.is_gone:
                    time.sleep(_LOCK_SECS)
                continue
            yield True
            return


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """How far the saves of a stage have come, as was told last.

    Attributes:
      url: of the root.
      waiting: saves that may come to the root and have not.
      nbytes: bytes of their files.
      damaged: as in ``Progress``.
      problem: as in ``Progress``; what is said of another trainer where it has taken the root.
      problem_unix_secs: as in ``Progress``.
    """

    url: str
    waiting: int
    nbytes: int
    damaged: dict[str, str]
    problem: str | None
    problem_unix_secs: float


def status_of(stage: Stage) -> Status | None:
    """How far the saves of a stage have come; None where nobody ever trained there.

    Raises:
      Damaged, StorageError: the stage cannot be read.
    """
    orders = stage.orders()
    if orders is None:
        return None
    progress = stage.progress(orders.holder)
    promoter = Promoter(stage, orders, progress)
    waiting = promoter.waiting()
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
    parser = argparse.ArgumentParser(prog="deltackpt.tiers.promoter", description=__doc__)
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
    trainer = PipeTrainer(sys.stdin.fileno())
    with only_one(stage, trainer) as is_one:
        if is_one:
            _shorten(stage.log)
            with _pushing(stage):
                Promoter(stage).run(trainer)
    _logger.info("ended; most memory %s, %.2f s of CPU", _most_memory(), time.process_time())
    return 0


@contextlib.contextmanager
def _pushing(stage: Stage) -> Iterator[None]:
    """Brings saves to neighbours meanwhile, where the trainer has found such."""
    if stage.keepers_stamp() is None:
        yield
        return
    pusher = Pusher(stage)
    thread = pusher.start()
    try:
        yield
    finally:
        pusher.end()
        thread.join()


def _most_memory() -> str:
    """The peak of this program's resident memory; that of ``getrusage`` is its parent's, too."""
    with contextlib.suppress(OSError, IndexError):
        return Path("/proc/self/status").read_text().split("VmHWM:")[1].split("\n")[0].strip()
    return "unknown"


def _shorten(log: Path) -> None:
    """Begins a log anew that has become long."""
    with contextlib.suppress(OSError, StorageError):
        if files.length(log, log.name) > _MOST_LOG_BYTES:
            os.truncate(log, 0)


if __name__ == "__main__":
    raise SystemExit(main())
