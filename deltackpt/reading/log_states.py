# SPDX-License-Identifier: Apache-2.0
"""All WAL epochs of a checkpoint directory: which of them are valid, and what they contain.

``Logs`` reads the valid ones, for restores. Inspection, verification and cleanup also need the
rest: epochs that the newest header does not continue, damaged headers, segments without a header.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from deltackpt.errors import Damaged, DeltackptError, FormatMismatch, FormatTooNew, StorageError
from deltackpt.format.manifest import SaveId
from deltackpt.format.stretches import StretchHead
from deltackpt.reading.log_places import LogPlaces
from deltackpt.reading.wal_index import Era, History, Logs, RecoveryPoint
from deltackpt.storage.store import Spot


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StretchState:
    """The state of an epoch.

    Attributes:
      number: number of the epoch.
      folders: folders that contain its segments, or may contain them.
      era: its header and records; only the valid records if the epoch is live, otherwise all. None
        if it cannot be read.
      live: whether restores may read it; None if the newest header is damaged.
      problem: why it cannot be read.
    """

    number: int
    folders: tuple[Spot, ...]
    era: Era | None
    live: bool | None
    problem: DeltackptError | None = None

    @property
    def head(self) -> StretchHead | None:
        """Returns the epoch's header if it can be read."""
        return None if self.era is None else self.era.head

    @functools.cached_property
    def points(self) -> list[RecoveryPoint]:
        """Returns the epoch's recovery points, newest first, including soft ones."""
        return [] if self.era is None else self.era.points()

    @functools.cached_property
    def nbytes(self) -> int:
        """Returns the total size of the epoch's files."""
        return sum(folder.tree_bytes() for folder in self.folders)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LogState:
    """The WAL epochs of a root.

    Attributes:
      at: the directory of the headers.
      history: the valid records; None if the newest header cannot be read.
      stretches: all epochs, newest first.
      problem: why the newest header cannot be read.
    """

    at: LogPlaces
    history: History | None
    stretches: tuple[StretchState, ...]
    problem: DeltackptError | None = None

    @property
    def newest(self) -> StretchHead | None:
        """Returns the newest header; None if it does not exist or cannot be read."""
        return self.stretches[0].head if self.stretches else None

    def needless(self, steps: Mapping[int, SaveId]) -> dict[int, str]:
        """Returns epochs that no restore can need, with the reason.

        Args:
          steps: committed steps.
        """
        newest = self.newest
        if self.history is None or newest is None:
            return {}
        # Marks below the last but one step are of no use; see ``log.trimming``.
        passed = sum(save_id.run == newest.run for save_id in steps.values()) >= 2
        found = {}
        for state in self.stretches:
            if state.number == newest.stretch:
                continue
            if not state.live:
                found[state.number] = "the newest epoch does not continue from it"
            elif passed:
                found[state.number] = "two steps of a later epoch are committed"
        return found


def log_state(at: LogPlaces) -> LogState:
    """Returns all WAL epochs of a root.

    Args:
      at: their location.

    Raises:
      StorageError: the location cannot be read.
      FormatTooOld: a development version of deltackpt wrote a WAL that counts.
    """
    logs = Logs(at)
    numbers = logs.numbers()
    history, problem = None, None
    try:
        history = logs.read()
    except (Damaged, FormatTooNew) as error:
        problem = error
    eras = {} if history is None else {era.head.stretch: era for era in history.eras}
    stretches = [
        _state(logs, number, eras, history is not None)
        for number in sorted({*numbers, *at.logged()}, reverse=True)
    ]
    return LogState(at=at, history=history, stretches=tuple(stretches), problem=problem)


def _state(logs: Logs, number: int, eras: Mapping[int, Era], known: bool) -> StretchState:
    live = number in eras if known else None
    beside = logs.places.segments(number)
    try:
        head = logs.head(number)
        folder = logs.segments_of(head)
        era = eras.get(number) or logs.era(head, None)
    except (Damaged, FormatMismatch, StorageError) as error:
        return StretchState(number=number, folders=(beside,), era=None, live=live, problem=error)
    return StretchState(number=number, folders=(folder,), era=era, live=live)
