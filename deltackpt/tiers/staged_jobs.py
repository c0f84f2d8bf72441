# SPDX-License-Identifier: Apache-2.0
"""A root that is a bucket, as the other processes of a job hold it: the first one orders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from deltackpt.errors import StorageError
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.committed import Catalog, Journaled
from deltackpt.ledger.entries import State
from deltackpt.tiers.staged import StagedRoot


class StagedBeside(StagedRoot):
    """The same stage and root in another process of the job: it saves its part, and orders nothing.

    All of them see the one stage; the first holds the root, and the promoter is its.
    """

    tells = False

    def _catalog(self) -> Catalog:
        return Journaled(self._journal)

    def _log_state(self) -> State:
        """What the root has of the log: no less than the first process has seen."""
        with contextlib.suppress(StorageError):
            return self._journal.state()
        return self._journal.known

    def stands(self, save_id: SaveId) -> bool:
        """See ``Held``; every process finds the same."""
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
    """A stage of another process of the job, with its parts of the saves, and the root.

    Its promoter brings them there, and that of the first process makes the saves visible.
    """

    tells = True

    def begin(self, goes_on: SaveId | None, run: str) -> None:
        """See ``Held``: noted for what is held near this stage."""
        StagedRoot.begin(self, goes_on, run)

    def roll_back(self, step: int, run: str) -> list[int]:
        """See ``Held``: of the root the first process does that."""
        infos = self._local.saves()
        moved = self._local.roll_back(step, run)
        gone = {info.save_id for one in moved if (info := infos.get(one)) is not None}
        if gone:
            self._order(era=self._orders.era + 1)
            self._near.forget(gone)
        return moved

    def collect(self, protected: Callable[[], frozenset[SaveId]] = frozenset) -> None:
        """See ``Held``: of the root the first process does that."""
        StagedRoot.collect(self, protected)

    def _drop_bases(self, protected: Callable[[], frozenset[SaveId]]) -> None:
        pass

    def _tidy(self) -> None:
        StagedRoot._tidy(self)

    def _start(self) -> None:
        StagedRoot._start(self)
