# SPDX-License-Identifier: Apache-2.0
"""Files of a step or recovery point other than its tables, read before the memory changes."""

from __future__ import annotations

from deltackpt.format.manifest import Layout
from deltackpt.reading import dense_state, point_files
from deltackpt.reading.dense_state import KnownStates
from deltackpt.reading.point_files import LoggedState
from deltackpt.reading.wal_rows import SeenRows
from deltackpt.standby import files
from deltackpt.standby.files import HeldFiles
from deltackpt.standby.holding import Goal


class Beside:
    """The other files of a state.

    The files of a recovery point are complete once its rows are known.
    """

    def __init__(self, goal: Goal, found: HeldFiles | None, most_bytes: int, known: KnownStates):
        """Reads the dense leaves and items of a recovery point that is not held.

        Args:
          goal: the state.
          found: its files, if held; or those of its step.
          most_bytes: maximum total size.
          known: dense leaves that were read before; see ``dense_state.at_point``.

        Raises:
          DamagedWal: files of a recovery point are missing or altered.
        """
        self.files = found
        self._most_bytes = most_bytes
        self._logged = None
        if found is None and goal.full is not None:
            dense = dense_state.at_point(goal.full, known)
            self._logged = dense, goal.full.items()

    def complete(self, rows: SeenRows, layout: Layout) -> None:
        """Stores the files of a recovery point.

        Args:
          rows: rows of all WAL records from the step to the point.
          layout: its tables.
        """
        if self._logged is not None:
            dense, items = self._logged
            state = LoggedState(dense, items, rows.by_table())
            self.files = files.hold(point_files.to_files(state, layout), self._most_bytes)
