# SPDX-License-Identifier: Apache-2.0
"""Replicates the saves of a staging directory to one tier: the loop that all tiers share.

Each tier's cursor has its own thread, so an outage of one tier does not delay the other.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import os
import random
import threading
import time
from collections.abc import Hashable, Sequence
from typing import ClassVar, NamedTuple

from deltackpt.errors import DeltackptError, RestoreError, StorageError
from deltackpt.format import naming
from deltackpt.format.manifest import SaveInfo
from deltackpt.reading import stored_saves
from deltackpt.storage.store import DirIdentity, StorePath, store_path
from deltackpt.tiers.staging import StagingDir, TierName, TierProgress, key_of

_logger = logging.getLogger(__name__)

#: Bytes that a trainer writes to the pipe: there is a save; a caller waits, until the next save;
#: orders or something else have changed.
WAKE, HURRY, LOOK = b".", b"!", b"?"
#: Seconds after which an idle cursor looks again: WAL records arrive without a wake-up.
IDLE_SECS = 5.0
#: The same without a pipe.
_UNTOLD_SECS = 1.0
#: Shortest and longest back-off before a retry, with random jitter.
BACK_OFF_SECS = (0.1, 30.0)


class Trainer:
    """The process that makes the saves, as the replicator sees it; thread-safe."""

    def __init__(self, pipe: int | None = None, *, is_gone: bool = False):
        """Listens to a pipe that the trainer writes to and closes; without one, cursors poll."""
        self.is_gone = is_gone
        self.is_waiting = pipe is None
        self.signals = 0
        self._most_secs = _UNTOLD_SECS if pipe is None else float("inf")
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        if pipe is not None:
            threading.Thread(target=self._listen, args=(pipe,), daemon=True).start()

    def _listen(self, pipe: int) -> None:
        try:
            while words := os.read(pipe, 1 << 16):
                last = words.rstrip(LOOK)[-1:]
                self.wake(is_waiting=last == HURRY if last else self.is_waiting)
        finally:
            self.is_gone = True
            self.wake(is_waiting=False)

    def wake(self, *, is_waiting: bool = False) -> None:
        """Wakes all cursors."""
        with self._lock:
            self.is_waiting = is_waiting
            self.signals += 1
            self._changed.notify_all()

    def wait(self, seen: int, secs: float) -> None:
        """Waits for a time, or until there were more than ``seen`` wake-ups."""
        with self._lock:
            self._changed.wait_for(lambda: self.signals > seen, min(secs, self._most_secs))


class StagedSave(NamedTuple):
    """A save in the staging directory."""

    step: int
    info: SaveInfo | None  # None if its manifest is unreadable
    at: StorePath
    identity: Hashable  # distinguishes the folder from a replacement

    @property
    def key(self) -> str:
        """Its name in the progress."""
        return key_of(self.step, self.info and self.info.save_id)


class Cursor(abc.ABC):
    """Tracks which staged saves one tier holds, and which is next; used by one thread."""

    tier: ClassVar[TierName]

    def __init__(self, stage: StagingDir, progress: TierProgress | None = None):
        self.stage = stage
        self.progress = progress or TierProgress(holder="")
        #: Whether the progress could not be written.
        self._is_unwritten = False
        self.trainer = Trainer()
        self._infos: dict[tuple[int, DirIdentity], SaveInfo | None] = {}
        #: Identifies the folder of each damaged save, by key.
        self._damaged_at: dict[str, Hashable] = {}

    def run(self, trainer: Trainer) -> None:
        """Brings saves to the tier until there is nothing left to do."""
        self.trainer = trainer
        failures = 0
        while True:
            seen = trainer.signals  # A wake-up during the step is not lost.
            try:
                has_more = self.step()
                if not has_more and self.is_done():
                    return
                failures = 0
                rest = 0.0 if has_more else self.rest_secs()
            except Exception as error:
                failures += 1
                if not self.is_retried(error):
                    return
                most = min(BACK_OFF_SECS[0] * 2 ** min(failures, 20), BACK_OFF_SECS[1])
                rest = most * random.uniform(0.5, 1.0)
            if rest:
                trainer.wait(seen, rest)

    @abc.abstractmethod
    def step(self) -> bool:
        """Brings the oldest save that the tier lacks; returns whether there may be more to do."""

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Returns whether to end; called when there is nothing to do."""

    def rest_secs(self) -> float:
        """Returns how long to wait for a wake-up when there is nothing to do."""
        return IDLE_SECS

    def is_retried(self, error: Exception) -> bool:
        """Reports a failed step; returns whether to try again, or raises a lasting error."""
        self.report_failure(error)
        return True

    def scan(self, item: str) -> list[StagedSave]:
        """Returns the staged saves, oldest first; each manifest is read once."""
        at, found = store_path(self.stage.steps), dict[tuple[int, DirIdentity], SaveInfo | None]()
        for name in at.folders():
            step = naming.step_number(name)
            identity = None if step is None else (at / name).dir_identity()
            if step is None or identity is None:
                continue
            info = self._infos.get((step, identity))
            try:
                info = info or stored_saves.read_info(at / name, item)
            except RestoreError:
                if not (at / name).is_dir():
                    continue  # It was removed concurrently.
            found[step, identity] = info
        self._infos = found
        staged = (
            StagedSave(step, info, at / str(step), identity.identity)
            for (step, identity), info in found.items()
        )
        return sorted(staged, key=lambda one: one.step)

    def forget_replaced(self, found: Sequence[StagedSave]) -> None:
        """Forgets damaged saves if another copy of one was staged, since others may need it."""
        there = {one.key: one.identity for one in found}
        known = {key: one for key, one in self._damaged_at.items() if key in self.progress.damaged}
        if any(there.get(key, one) != one for key, one in known.items()):
            known.clear()
            self.report(damaged={})
        damaged = self.progress.damaged
        self._damaged_at = {key: one for key, one in there.items() if key in damaged} | known

    def report_damaged(self, save: StagedSave, problem: str) -> None:
        """Reports why a save cannot reach the tier."""
        _logger.error("step %d cannot reach tier %r: %s", save.step, self.tier, problem)
        self.report(damaged={**self.progress.damaged, save.key: problem})

    def report_unreadable(self, save: StagedSave, item: str) -> None:
        """Reports a save that cannot be identified, if it is still there."""
        try:
            stored_saves.read_info(save.at, item)
        except RestoreError as error:
            if save.key not in self.progress.damaged and save.at.is_dir():
                self.report_damaged(save, f"step {save.step}: {error}")

    def report(self, **changes: object) -> None:
        """Reports changes of the progress to the trainer, if any.

        If the staging directory is full, the next call retries: the work continues, because only
        uploaded saves make room.
        """
        progress, was_unwritten = dataclasses.replace(self.progress, **changes), self._is_unwritten
        if progress == self.progress and not was_unwritten:
            return
        self.progress, self._is_unwritten = progress, True
        try:
            self.stage.report(progress, self.tier)
            self._is_unwritten = False
        except StorageError as error:
            if not was_unwritten:
                _logger.warning("%s", error)

    def report_failure(self, error: Exception, **changes: object) -> None:
        """Reports what blocks the tier; the first report of a kind sets the time."""
        is_typed = isinstance(error, DeltackptError)
        if self.progress.problem is None:
            _logger.warning("%s", error, exc_info=not is_typed)
        self.report(
            problem=str(error) if is_typed else f"{type(error).__name__}: {error}",
            code=error.code if is_typed else DeltackptError.code,
            problem_unix_secs=self.progress.problem_unix_secs or time.time(),
            **changes,
        )
