# SPDX-License-Identifier: Apache-2.0
"""Replication lag as reported by the uploader, and the events derived from it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from deltackpt.errors import Damaged, FencedError, RestoreError
from deltackpt.events import Event, FailureEvent, Operation, UploadEvent
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.directory import Root
from deltackpt.ledger.view import JournalView
from deltackpt.reading import saves
from deltackpt.storage import files
from deltackpt.tiers.stage import Progress, Stage, Tier, key_of, step_of


class Lag:
    """Staged saves that have not reached the next tiers; does not query the remote directory."""

    def __init__(self, stage: Stage, local: Root, journal: JournalView, holder: str, process: int):
        """Reads nothing yet.

        Args:
          stage: the staging directory whose uploader reports.
          local: its local checkpoint directory.
          journal: journal of the remote directory, as far as known.
          holder: holder number of the uploader's claim.
          process: the process whose staging directory it is.
        """
        self._stage = stage
        self._local = local
        self._journal = journal
        self._holder = holder
        self._process = process
        #: Bytes of the staged saves, by ``key_of``.
        self._sizes: dict[str, int] = {}
        self._told_promotions = 0
        self._told_damaged: set[str] = set()
        #: Operations whose problem was reported and persists.
        self._told_problems: set[str] = set()
        self._raised: set[str] = set()

    def progress(self, tier: Tier = "remote") -> Progress:
        """Returns the replicator's last report on a tier."""
        return self._stage.progress(self._holder, tier)

    def behind(self, tier: Tier = "remote") -> dict[int, int]:
        """Returns the staged steps that have reached neither a tier nor a later one, with bytes."""
        progress, found = self.progress(tier), dict[int, int]()
        committed = progress if tier == "remote" else self.progress()
        for step, info in self._local.saves().items():
            key = key_of(step, info and info.save_id)
            if key in progress.damaged or self._is_unreadable(step, progress):
                continue
            if info is None:
                has_reached = step in self._journal.known.steps
            else:
                has_reached = progress.has(info.save_id) or self.is_held(info.save_id, committed)
            if not has_reached:
                found[step] = self._bytes_of(step, key)
        return found

    def _is_unreadable(self, step: int, progress: Progress) -> bool:
        """Whether the replicator cannot identify a step's save, although it is known here."""
        if key_of(step, None) not in progress.damaged:
            return False
        try:
            saves.read_info(self._local.at(step), self._local.item)
        except RestoreError:
            return True
        return False  # Another save has taken its place.

    def _bytes_of(self, step: int, key: str) -> int:
        if key not in self._sizes:
            self._sizes[key] = files.tree_bytes(self._local.path / str(step))
        return self._sizes[key]

    def is_held(self, save_id: SaveId, progress: Progress | None = None) -> bool:
        """Returns whether a save was ever committed remotely."""
        return (progress or self.progress()).has(save_id) or self._journal.known.held(save_id)

    def require_claim(self) -> None:
        """Checks that no other trainer has taken the remote directory.

        Raises:
          FencedError: the uploader found that another trainer has taken it.
        """
        if (fenced := self.progress().fenced) is not None:
            raise FencedError(fenced)

    def newly_damaged(self, tier: Tier) -> str | None:
        """Returns the new reasons why saves cannot reach a tier, each once."""
        damaged = self.progress(tier).damaged
        # The oldest first, so that all processes name the same one; later ones may follow from it.
        for key in _oldest_first(damaged.keys() - self._raised):
            self._raised.add(key)
            return damaged[key]
        return None

    def news(self) -> list[Event]:
        """Returns the events since the last call."""
        progress, found = self.progress(), list[Event]()
        new = [one for one in progress.recent if one.number > self._told_promotions]
        behind = self.behind() if new else {}
        for one in new:
            self._told_promotions = one.number
            found.append(
                UploadEvent(
                    step=one.save_id.step,
                    process=self._process,
                    bytes_sent=one.nbytes,
                    objects=one.objects,
                    seconds=one.seconds,
                    lag_secs=one.lag_secs,
                    committed_unix_secs=one.committed_unix_secs,
                    waiting=len(behind),
                    waiting_bytes=sum(behind.values()),
                )
            )
        for key in _oldest_first(progress.damaged.keys() - self._told_damaged):
            self._told_damaged.add(key)
            message = progress.damaged[key]
            found.append(self._failure("upload", Damaged.code, message, step_of(key), 0.0))
        problems: list[tuple[Operation, Progress]]
        problems = [("upload", progress), ("push", self.progress("peers"))]
        for operation, told in problems:
            if told.problem is None:
                self._told_problems.discard(operation)
            elif operation not in self._told_problems:
                self._told_problems.add(operation)
                secs = max(0.0, time.time() - told.problem_unix_secs)
                found.append(self._failure(operation, told.code, told.problem, None, secs))
        return found

    def _failure(
        self, operation: Operation, code: str, message: str, step: int | None, seconds: float
    ) -> FailureEvent:
        return FailureEvent(
            step=step,
            process=self._process,
            operation=operation,
            code=code,
            message=message,
            seconds=seconds,
        )


def _oldest_first(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: (step_of(key), key))
