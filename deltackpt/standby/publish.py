# SPDX-License-Identifier: Apache-2.0
"""Publishes the new state after a change of memory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Mapping

import numpy as np

from deltackpt.errors import RestoreError
from deltackpt.format import names
from deltackpt.format.chain import SaveInfo
from deltackpt.layers.targets import Targets
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.wal_rows import SeenRows
from deltackpt.standby.beside import Beside
from deltackpt.standby.holding import Goal, Holding
from deltackpt.storage.store import FileStore


class Publish:
    """Called once with memory that has the new contents; it may be a copy of the held memory."""

    def __init__(self, targets: Targets):
        """Publishes nothing yet.

        Args:
          targets: the memory that changes.
        """
        self.targets = targets
        self._found: Holding | None = None

    def __call__(
        self,
        chain: tuple[SaveInfo, ...],
        goal: Goal,
        beside: Beside,
        replayed: SeenRows | None = None,
        *,
        lossless: bool,
        changed: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Records the new contents.

        Args:
          chain: the saves that it was merged from, base first.
          goal: the state that was to be held.
          beside: its files.
          replayed: rows of the applied records.
          lossless: see ``Holding``.
          changed: see ``Holding``.
        """
        self._found = Holding(
            chain=chain,
            layout=goal.save.layout,
            sequence=0,
            lag_secs=0.0,
            point=goal.point,
            files=beside.files,
            files_of=goal.files_of,
            replayed=None if goal.plan is None else replayed,
            lossless=lossless,
            changed=changed,
            unix_secs=committed_secs(goal.save) if goal.point is None else goal.point.unix_secs,
        )

    def holding(self, sequence: int) -> Holding:
        """Returns the new state, in memory with the given sequence number."""
        assert self._found is not None
        lag_secs = max(0.0, time.time() - self._found.unix_secs)
        return dataclasses.replace(self._found, sequence=sequence, lag_secs=lag_secs)


def committed_secs(save: StoredSave) -> float:
    """Returns when a step was committed, in seconds since 1970.

    0 if it was removed concurrently.
    """
    with contextlib.suppress(OSError, RestoreError, ValueError):
        if isinstance(save.step_dir.store, FileStore):
            # The rename that committed the step.
            return os.stat(save.step_dir).st_ctime
        # When it was made; it was uploaded later.
        told = json.loads((save.step_dir / names.STEP_METADATA).read())
        return told["commit_timestamp_nsecs"] / 1e9
    return 0.0
