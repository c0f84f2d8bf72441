# SPDX-License-Identifier: Apache-2.0
"""Publishes a state after its memory was changed: its tables and its other files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Mapping

import numpy as np

from deltackpt.errors import RestoreError
from deltackpt.format import naming
from deltackpt.format.manifest import Layout, SaveInfo
from deltackpt.layers.targets import Targets
from deltackpt.reading import dense_state, point_files
from deltackpt.reading.dense_state import KnownStates
from deltackpt.reading.point_files import RecordedState
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_rows import SeenRows
from deltackpt.standby import cached_files
from deltackpt.standby.cached_files import CachedFiles
from deltackpt.standby.loaded_state import Goal, LoadedState
from deltackpt.storage.store import FileStore


class StateFiles:
    """The other files of a state; those of a recovery point need its rows: see ``complete``."""

    def __init__(self, goal: Goal, found: CachedFiles | None, most_bytes: int, known: KnownStates):
        self.files = found
        self._most_bytes = most_bytes
        self._recorded = None
        if found is None and goal.full is not None:
            dense = dense_state.at_point(goal.full, known)
            self._recorded = dense, goal.full.items()

    def complete(self, rows: SeenRows, layout: Layout) -> None:
        """Stores the files of a recovery point; ``rows`` are of all records from its step."""
        if self._recorded is not None:
            dense, items = self._recorded
            state = RecordedState(dense, items, rows.by_table())
            self.files = cached_files.store(point_files.to_files(state, layout), self._most_bytes)


class Publish:
    """Called once with memory that has the new contents; it may be a copy of the held memory."""

    def __init__(self, targets: Targets):
        self.targets = targets
        self._found: LoadedState | None = None

    def __call__(
        self,
        chain: tuple[SaveInfo, ...],
        goal: Goal,
        state_files: StateFiles,
        replayed: SeenRows | None = None,
        *,
        lossless: bool,
        changed: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Records the new contents; see ``LoadedState``."""
        self._found = LoadedState(
            chain=chain,
            layout=goal.save.layout,
            sequence=0,
            lag_secs=0.0,
            point=goal.point,
            files=state_files.files,
            files_of=goal.files_of,
            replayed=None if goal.plan is None else replayed,
            lossless=lossless,
            changed=changed,
            unix_secs=committed_secs(goal.save) if goal.point is None else goal.point.unix_secs,
        )

    def loaded(self, sequence: int) -> LoadedState:
        """Returns the new state, in memory with the given sequence number."""
        assert self._found is not None
        lag_secs = max(0.0, time.time() - self._found.unix_secs)
        return dataclasses.replace(self._found, sequence=sequence, lag_secs=lag_secs)


def committed_secs(save: StoredSave) -> float:
    """Returns when a step was committed, since 1970, or 0 if it was removed concurrently."""
    with contextlib.suppress(OSError, RestoreError, ValueError):
        if isinstance(save.step_dir.store, FileStore):
            # The rename that committed the step.
            return os.stat(save.step_dir).st_ctime
        # When it was made; it was uploaded later.
        told = json.loads((save.step_dir / naming.STEP_METADATA).read())
        return told["commit_timestamp_nsecs"] / 1e9
    return 0.0
