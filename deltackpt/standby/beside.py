# SPDX-License-Identifier: Apache-2.0
"""What a state has beside its tables, got before the memory changes: files of a step or a point."""

from __future__ import annotations

from deltackpt.format.manifest import Layout
from deltackpt.reading import logged_dense, point_files, replay
from deltackpt.reading.logged_dense import DenseKept
from deltackpt.reading.replay import LoggedState, SeenRows
from deltackpt.standby import files
from deltackpt.standby.files import HeldFiles
from deltackpt.standby.holding import Goal


class Beside:
    """The files of a state; those of a point are whole when the rows of its marks are known."""

    def __init__(self, goal: Goal, found: HeldFiles | None, most_bytes: int, kept: DenseKept):
        """Reads the dense leaves and items of a point that is not held.

        Args:
          goal: the state.
          found: its files, where they are held; or those of its step.
          most_bytes: longest that all of them may be.
          kept: dense leaves that were read before.

        Raises:
          DamagedLog: those of a point are missing or altered.
        """
        self.files = found
        self._most_bytes = most_bytes
        self._logged = None
        if found is None and goal.full is not None:
            dense = logged_dense.dense_of(goal.full, kept)
            self._logged = dense, replay.items_of(goal.full)

    def complete(self, rows: SeenRows, layout: Layout) -> None:
        """Holds the files of a point.

        Args:
          rows: of all marks from the step to the point.
          layout: its tables.
        """
        if self._logged is not None:
            dense, items = self._logged
            state = LoggedState(dense, items, rows.by_table())
            self.files = files.hold(point_files.to_files(state, layout), self._most_bytes)
