# SPDX-License-Identifier: Apache-2.0
"""Upload completion: preconditions, commit, and progress reporting."""

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
from deltackpt.storage.store import StorePath, store_path
from deltackpt.tiers.stage import MOST_RECENT, Progress, Promoted, Stage, key_of

_logger = logging.getLogger(__name__)


class Arrivals:
    """Reports an uploader's progress on one staging directory to its trainer; used by one thread.

    Attributes:
      progress: as it was last reported.
      runs: runs of the saves in the staging directory, as last found.
    """

    def __init__(self, stage: Stage, progress: Progress):
        """Reports nothing yet."""
        self.progress = progress
        self.runs: Collection[str] = ()
        self._stage = stage

    def is_waiting(self, step: int, save_id: SaveId) -> bool:
        """Returns whether a save may still be uploaded, according to the last report."""
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
        """Reports a save that was committed in the remote checkpoint directory.

        Args:
          step: its step.
          info: its entry in the chain.
          journal: journal of the remote directory.
          put: what was uploaded of it.
          made_secs: when it was staged, in seconds since 1970.
          seconds: duration of its upload.
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
        _logger.info("uploaded step %d: %d bytes in %.2f s", step, put.nbytes, seconds)

    def cannot_come(self, step: int, info: SaveInfo, item: str, problem: str) -> None:
        """Reports why a save cannot be uploaded, if it is still staged."""
        if stands(store_path(self._stage.steps) / str(step), info, item):
            _logger.error("step %d cannot be uploaded: %s", step, problem)
            self.tell(damaged={**self.progress.damaged, key_of(step, info.save_id): problem})

    def tell_state(self, journal: Journal, **changes: Any) -> None:
        """Reports the remote contents according to the journal, and other changes."""
        promoted = journal.known.entry.promoted
        held = {run: attempt for run, attempt in promoted.items() if run in self.runs}
        holder, entry = journal.claimed.lease.holder, journal.known.entry
        if entry.number != self.progress.entry:
            self._stage.report_entry(
                entry
            )  # Publish the entry before its number, so a reader that sees the number can load it.
        self.tell(entry=entry.number, held=held, holder=holder, **changes)

    def tell(self, **changes: Any) -> None:
        """Reports changes of the progress, if any."""
        progress = dataclasses.replace(self.progress, **changes)
        if progress != self.progress:
            self._stage.report(progress)
            self.progress = progress

    def fail(self, error: DeltackptError, **changes: Any) -> None:
        """Reports what blocks the upload; the first report of a kind sets the time."""
        if self.progress.problem is None:
            _logger.warning("%s", error)
        since = self.progress.problem_unix_secs or time.time()
        told = {"problem": str(error), "code": error.code, "problem_unix_secs": since}
        try:
            self.tell(**told, **changes)
        except StorageError as refused:
            # The staging directory may be full; the upload continues regardless.
            _logger.warning("%s", refused)


def require_parent(info: SaveInfo, journal: Journal) -> None:
    """Checks that a save's parent was uploaded; reads the journal if that is not known.

    Raises:
      BrokenChain: the parent was not uploaded.
      StorageError: the journal is not readable.
    """
    parent = info.parent
    if parent is None or journal.known.stands(parent.save_id):
        return
    if not journal.state().stands(parent.save_id):
        raise BrokenChain(
            f"step {info.step_dir}: expected its parent {parent.step_dir} (save id "
            f"{parent.save_id}) to be uploaded, found that it is not; the next base will be "
            "uploaded"
        )


def commit(step: int, info: SaveInfo, journal: Journal, prefix: str, put: Uploaded) -> None:
    """Commits a save whose files are all uploaded.

    Raises:
      BrokenChain, TargetDiffers, FencedError, StorageError: as for ``Journal.commit``.
    """
    journal.commit(
        Standing.of(info, Unit(step), prefix, stored_bytes=put.nbytes, crc32c=put.crc32c)
    )


def stands(source: StorePath, info: SaveInfo, item: str) -> bool:
    """Returns whether a save is still where it was found in a staging directory."""
    try:
        return saves.read_info(source, item).save_id == info.save_id
    except Damaged:
        return source.is_dir()


def made_secs(source: StorePath) -> float:
    """Returns when a staged save was made, in seconds since 1970."""
    try:
        return os.stat(source).st_mtime
    except OSError:  # The save was removed concurrently.
        return time.time()
