# SPDX-License-Identifier: Apache-2.0
"""Saves of a stage that arrive at its root, or cannot: what must be so, and what is told of it."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Collection
from typing import Any

from deltackpt.errors import BrokenChain, Damaged, DeltackptError, StorageError
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.entries import Standing, Unit
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.upload import Uploaded
from deltackpt.reading import saves
from deltackpt.storage.store import Spot, spot
from deltackpt.tiers.stage import MOST_RECENT, Progress, Promoted, Stage, key_of

_logger = logging.getLogger(__name__)


class Arrivals:
    """What a promoter tells its trainer of one stage; used by one thread.

    Attributes:
      progress: as it was told last.
      runs: of the saves in the stage, as found last.
    """

    def __init__(self, stage: Stage, progress: Progress):
        """Tells nothing yet."""
        self.progress = progress
        self.runs: Collection[str] = ()
        self._stage = stage

    def is_waiting(self, step: int, save_id: SaveId) -> bool:
        """Whether a save may come to the root and has not, as far as was told."""
        if key_of(step, save_id) in self.progress.damaged:
            return False
        return not self.progress.is_at_root(save_id)

    def came(
        self,
        step: int,
        info: SaveInfo,
        journal: Journal,
        put: Uploaded,
        made_secs: float,
        seconds: float,
    ) -> None:
        """Tells of a save that was committed at the root.

        Args:
          step: its step.
          info: what chains know of it.
          journal: of the root.
          put: what was put of it.
          made_secs: when it was made in the stage, in seconds since 1970.
          seconds: how long its upload took.
        """
        now = time.time()
        recent = self.progress.recent
        promoted = Promoted(
            number=recent[-1].number + 1 if recent else 1,
            save_id=info.save_id,
            nbytes=put.nbytes,
            objects=put.objects + 1,
            seconds=seconds,
            lag_secs=max(0.0, now - made_secs),
            committed_unix_secs=now,
        )
        self.tell_state(journal, recent=(*recent, promoted)[-MOST_RECENT:])
        _logger.info("step %d is at the root: %d bytes in %.2f s", step, put.nbytes, seconds)

    def cannot_come(self, step: int, info: SaveInfo, item: str, problem: str) -> None:
        """Tells why a save cannot come to the root, if it is still in the stage."""
        if stands(spot(self._stage.steps) / str(step), info, item):
            _logger.error("step %d cannot come to the root: %s", step, problem)
            self.tell(damaged={**self.progress.damaged, key_of(step, info.save_id): problem})

    def tell_state(self, journal: Journal, **changes: Any) -> None:
        """Tells what the root holds, as far as its journal is known, and further changes."""
        promoted = journal.known.entry.promoted
        held = {run: attempt for run, attempt in promoted.items() if run in self.runs}
        holder, entry = journal.claimed.lease.holder, journal.known.entry
        if entry.number != self.progress.entry:
            self._stage.report_entry(entry)  # First: who reads of its number finds it.
        self.tell(entry=entry.number, held=held, holder=holder, **changes)

    def tell(self, **changes: Any) -> None:
        """Tells changes of the progress, where there are any."""
        progress = dataclasses.replace(self.progress, **changes)
        if progress != self.progress:
            self._stage.report(progress)
            self.progress = progress

    def fail(self, error: DeltackptError, **changes: Any) -> None:
        """Tells what stands in the way; the first of the same kind says since when."""
        if self.progress.problem is None:
            _logger.warning("%s", error)
        since = self.progress.problem_unix_secs or time.time()
        told = {"problem": str(error), "code": error.code, "problem_unix_secs": since}
        try:
            self.tell(**told, **changes)
        except StorageError as refused:
            # The stage may be full, and work goes on all the same.
            _logger.warning("%s", refused)


def require_parent(info: SaveInfo, journal: Journal) -> None:
    """Checks that the parent of a save is at the root; the journal is read where it is not known.

    Raises:
      BrokenChain: it is not.
      StorageError: the journal cannot be read.
    """
    parent = info.parent
    if parent is None or journal.known.stands(parent.save_id):
        return
    if not journal.state().stands(parent.save_id):
        raise BrokenChain(
            f"step {info.step_dir}: expected its parent {parent.step_dir} (save id "
            f"{parent.save_id}) at the root, found that it is not; the next base is"
        )


def commit(step: int, info: SaveInfo, journal: Journal, prefix: str, put: Uploaded) -> None:
    """Makes a save visible, all of whose files are at the root.

    Raises:
      BrokenChain, TargetDiffers, FencedError, StorageError: as ``Journal.commit``.
    """
    journal.commit(
        Standing.of(info, Unit(step), prefix, stored_bytes=put.nbytes, crc32c=put.crc32c)
    )


def stands(source: Spot, info: SaveInfo, item: str) -> bool:
    """Whether a save is still where it was found in a stage."""
    try:
        return saves.read_info(source, item).save_id == info.save_id
    except Damaged:
        return source.is_dir()


def made_secs(source: Spot) -> float:
    """When a save in a stage was made, in seconds since 1970."""
    try:
        return os.stat(source).st_mtime
    except OSError:  # It was removed meanwhile.
        return time.time()
