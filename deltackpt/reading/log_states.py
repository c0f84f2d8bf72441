# SPDX-License-Identifier: Apache-2.0
"""All stretches that stand beside the steps of a root: which of them count, and what they hold.

``Logs`` reads what counts, for restores. Whoever looks, verifies or tidies up wants the rest, too:
stretches that the newest head does not lead to, heads that are damaged, logs that have no head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from deltackpt.errors import Damaged, DeltackptError, FormatTooNew, StorageError
from deltackpt.format import names
from deltackpt.format.manifest import SaveId
from deltackpt.format.stretches import StretchHead
from deltackpt.reading.stretches import Era, History, LogPoint, Logs
from deltackpt.storage.store import Spot


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StretchState:
    """A stretch as it stands.

    Attributes:
      number: of the stretch.
      folders: where its logs are, or may be.
      era: its head and logs, those marks that count where it counts, else all; None where it cannot
        be read.
      live: whether restores may read it; None where the newest head is damaged, so that nobody
        knows.
      problem: why it cannot be read.
    """

    number: int
    folders: tuple[Spot, ...]
    era: Era | None
    live: bool | None
    problem: DeltackptError | None = None

    @property
    def head(self) -> StretchHead | None:
        """Its head, where that can be read."""
        return None if self.era is None else self.era.head

    @functools.cached_property
    def points(self) -> list[LogPoint]:
        """Newest first, soft ones too."""
        return [] if self.era is None else self.era.points()

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(folder.tree_bytes() for folder in self.folders)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LogState:
    """The logs of a root.

    Attributes:
      at: the folder of the heads.
      history: what counts; None where the newest head cannot be read.
      stretches: all that stand, newest first.
      problem: why the newest head cannot be read.
    """

    at: Spot
    history: History | None
    stretches: tuple[StretchState, ...]
    problem: DeltackptError | None = None

    @property
    def newest(self) -> StretchHead | None:
        """The newest head; None where there is none, or it cannot be read."""
        return self.stretches[0].head if self.stretches else None

    def needless(self, steps: Mapping[int, SaveId]) -> dict[int, str]:
        """Stretches that no restore can need, to why.

        Args:
          steps: committed steps, by number.
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
                found[state.number] = "the newest stretch does not go on from it"
            elif passed:
                found[state.number] = "two steps of a later stretch are committed"
        return found


def log_state(at: Spot) -> LogState:
    """All stretches below a folder of heads.

    Args:
      at: the folder.

    Raises:
      StorageError: it cannot be read.
    """
    logs = Logs(at)
    numbers = logs.numbers()
    history, problem = None, None
    try:
        history = logs.read()
    except (Damaged, FormatTooNew) as error:
        problem = error
    eras = {} if history is None else {era.head.stretch: era for era in history.eras}
    folders = [name for name in at.folders() if names.step_number(name) is not None]
    headless = {int(name) for name in folders if (at / name).keys()}
    stretches = [
        _state(logs, number, eras, history is not None)
        for number in sorted({*numbers, *headless}, reverse=True)
    ]
    # A log is made after its head: what has none is of a stretch that was removed.
    known = [one for one in stretches if one.number <= max(numbers, default=-1)]
    return LogState(at=at, history=history, stretches=tuple(known), problem=problem)


def _state(logs: Logs, number: int, eras: Mapping[int, Era], known: bool) -> StretchState:
    live = number in eras if known else None
    beside = logs.at / str(number)
    try:
        head = logs.head(number)
        folder = logs.segments_of(head)
        era = eras.get(number) or logs.era(head, None)
    except (Damaged, FormatTooNew, StorageError) as error:
        return StretchState(number=number, folders=(beside,), era=None, live=live, problem=error)
    return StretchState(number=number, folders=(folder,), era=era, live=live)
