# SPDX-License-Identifier: Apache-2.0
"""All WAL epochs of a checkpoint directory: which of them are valid, and what they contain.

``WalReader`` reads the valid ones; inspection, verification and cleanup also need the rest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from deltackpt.errors import Damaged, DeltackptError, FormatMismatch, FormatTooNew, StorageError
from deltackpt.format.manifest import SaveId
from deltackpt.format.wal_format import EpochHeader
from deltackpt.reading.wal_index import EpochView, RecoveryPoint, WalIndex, WalReader
from deltackpt.reading.wal_locations import WalLocation
from deltackpt.storage.store import StorePath


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EpochState:
    """The state of an epoch, and the folders that contain its segments, or may contain them.

    ``view`` has only the valid records if the epoch is live, otherwise all; None if it cannot be
    read. ``live`` is whether restores may read it; None if the newest header is damaged.
    ``problem`` is why it, or its records, cannot be read.
    """

    number: int
    folders: tuple[StorePath, ...]
    view: EpochView | None
    live: bool | None
    problem: DeltackptError | None = None

    @property
    def head(self) -> EpochHeader | None:
        """Returns the epoch's header if it can be read."""
        return None if self.view is None else self.view.head

    @functools.cached_property
    def points(self) -> list[RecoveryPoint]:
        """Returns the epoch's recovery points, newest first, including soft ones."""
        return [] if self.view is None else self.view.points()

    @functools.cached_property
    def nbytes(self) -> int:
        """Returns the total size of the epoch's files."""
        return sum(folder.tree_bytes() for folder in self.folders)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WalState:
    """The WAL epochs of a root, newest first.

    ``index`` has the valid records; None if the newest header cannot be read, because of
    ``problem``.
    """

    at: WalLocation
    index: WalIndex | None
    epochs: tuple[EpochState, ...]
    problem: DeltackptError | None = None

    @property
    def newest(self) -> EpochHeader | None:
        """Returns the newest header; None if it does not exist or cannot be read."""
        return self.epochs[0].head if self.epochs else None

    def needless(self, steps: Mapping[int, SaveId]) -> dict[int, str]:
        """Returns epochs that no restore to the committed steps can need, with the reason."""
        newest = self.newest
        if self.index is None or newest is None:
            return {}
        # Records below the last but one step are of no use; see ``OpenEpoch.truncate``.
        passed = sum(save_id.run == newest.run for save_id in steps.values()) >= 2
        found = {}
        for state in self.epochs:
            if state.number == newest.epoch:
                continue
            if not state.live:
                found[state.number] = "the newest epoch does not continue from it"
            elif passed:
                found[state.number] = "two steps of a later epoch are committed"
        return found


def read_wal_state(at: WalLocation) -> WalState:
    """Returns all WAL epochs of a root; raises FormatTooOld if a development version's counts."""
    logs = WalReader(at)
    numbers = logs.numbers()
    index, problem = None, None
    try:
        index = logs.read()
    except (Damaged, FormatTooNew) as error:
        problem = error
    views = {} if index is None else {view.head.epoch: view for view in index.views}
    epochs = [
        _state(logs, number, views, index is not None)
        for number in sorted({*numbers, *at.logged()}, reverse=True)
    ]
    return WalState(at=at, index=index, epochs=tuple(epochs), problem=problem)


def _state(logs: WalReader, number: int, views: Mapping[int, EpochView], known: bool) -> EpochState:
    live = number in views if known else None
    beside = logs.places.segments(number)
    try:
        head = logs.head(number)
        folder = logs.segments_of(head)
        view = views.get(number) or logs.view(head, None)
    except (Damaged, FormatMismatch, StorageError) as error:
        return EpochState(number=number, folders=(beside,), view=None, live=live, problem=error)
    problem = logs.in_topic(head)
    return EpochState(number=number, folders=(folder,), view=view, live=live, problem=problem)
