# SPDX-License-Identifier: Apache-2.0
"""What becomes of a change of memory: the state that it holds from then on."""

from __future__ import annotations

import contextlib
import json
import os
import time

from deltackpt.errors import RestoreError
from deltackpt.format import names
from deltackpt.format.chain import SaveInfo
from deltackpt.reading.replay import SeenRows
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.targets import Targets
from deltackpt.standby.beside import Beside
from deltackpt.standby.holding import Goal, Holding
from deltackpt.storage.store import FileStore


class Publish:
    """Called once with what some memory holds now, which may be a copy of what was held."""

    def __init__(self, targets: Targets):
        """Publishes nothing yet.

        Args:
          targets: the memory that changes.
        """
        self.targets = targets
        self._found: tuple[tuple[SaveInfo, ...], Goal, Beside, SeenRows | None, bool] | None = None

    def __call__(
        self,
        chain: tuple[SaveInfo, ...],
        goal: Goal,
        beside: Beside,
        replayed: SeenRows | None = None,
        *,
        lossless: bool,
    ) -> None:
        """Says what it is.

        Args:
          chain: the saves that it was merged from, base first.
          goal: what was to be held.
          beside: its files.
          replayed: rows of the marks that were applied.
          lossless: see ``Holding``.
        """
        self._found = chain, goal, beside, replayed, lossless

    def holding(self, sequence: int) -> Holding:
        """What is held from now on, by memory of that sequence number."""
        assert self._found is not None
        chain, goal, beside, replayed, lossless = self._found
        made_secs = committed_secs(goal.save) if goal.point is None else goal.point.unix_secs
        return Holding(
            chain=chain,
            layout=goal.save.layout,
            sequence=sequence,
            lag_secs=max(0.0, time.time() - made_secs),
            point=goal.point,
            files=beside.files,
            files_of=goal.files_of,
            replayed=None if goal.way is None else replayed,
            lossless=lossless,
        )


def committed_secs(save: StoredSave) -> float:
    """When a step was committed, in seconds since 1970; 0 where it was removed meanwhile."""
    with contextlib.suppress(OSError, RestoreError, ValueError):
        if isinstance(save.step_dir.store, FileStore):
            # The rename that committed the step.
            return os.stat(save.step_dir).st_ctime
        # When it was made; it came to the bucket later.
        told = json.loads((save.step_dir / names.STEP_METADATA).read())
        return told["commit_timestamp_nsecs"] / 1e9
    return 0.0
