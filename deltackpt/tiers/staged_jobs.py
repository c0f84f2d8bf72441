# SPDX-License-Identifier: Apache-2.0
"""A bucket as the checkpoint directory of a job's other processes; the first process orders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from deltackpt.errors import StorageError
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.committed import Committed
from deltackpt.ledger.entries import State
from deltackpt.tiers.staged import StagedRoot


class StagedBeside(StagedRoot):
    """The same staging and remote directory in another process, which saves its part only.

    All processes see one staging directory; the first holds the claim, and owns the uploader.
    """

    tells = False

    def confirm(self) -> None:
        """See ``Held``: the first process does that."""

    def _at_remote(self) -> Committed:
        return Committed(self._journal)

    def _log_state(self) -> State:
        """The remote log state: at least what the first process has seen."""
        with contextlib.suppress(StorageError):
            return self._journal.state()
        return self._journal.known

    def stands(self, save_id: SaveId) -> bool:
        """See ``Held``; the answer is the same in every process."""
        with contextlib.suppress(StorageError):
            self._journal.state()
        return super().stands(save_id)

    def roll_back(self, step: int, run: str) -> list[int]:
        """See ``Held``: the first process does that."""
        return []

    def remove_steps(self, steps: Collection[int]) -> None:
        """See ``Held``: the first process does that."""

    def collect(self, protected: Callable[[], frozenset[SaveId]] = frozenset) -> None:
        """See ``Held``: the first process does that."""

    def begin(self, goes_on: SaveId | None, run: str) -> None:
        """See ``Held``: the first process does that."""

    def _tidy(self) -> None:
        self._look()

    def found_damaged(self, step: int) -> bool:
        """See ``Steps``: all processes would have to read again."""
        return False

    def _start(self) -> None:
        pass


class StagedApart(StagedBeside):
    """Another process's own staging directory, with its parts of the saves.

    Its uploader uploads the parts, and the first process's uploader commits the saves.
    """

    tells = True

    def confirm(self) -> None:
        """See ``Held``: the first process confirms the remote directory."""
        StagedRoot.confirm(self)

    def _start_claim(self) -> bool:
        return True

    def begin(self, goes_on: SaveId | None, run: str) -> None:
        """See ``Held``: recorded for the replicas of this staging directory."""
        StagedRoot.begin(self, goes_on, run)

    def roll_back(self, step: int, run: str) -> list[int]:
        """See ``Held``: the first process rolls the remote directory back."""
        infos = self._local.saves()
        moved = self._local.roll_back(step, run)
        gone = {info.save_id for one in moved if (info := infos.get(one)) is not None}
        if gone:
            self._order(**self._orders.next_era(run))
            self._near.forget(gone)
        return moved

    def collect(self, protected: Callable[[], frozenset[SaveId]] = frozenset) -> None:
        """See ``Held``: the first process collects the remote directory."""
        StagedRoot.collect(self, protected)

    def _drop_bases(self, protected: Callable[[], frozenset[SaveId]]) -> None:
        pass

    def _tidy(self) -> None:
        StagedRoot._tidy(self)

    def _start(self) -> None:
        StagedRoot._start(self)
