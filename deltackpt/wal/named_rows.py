# SPDX-License-Identifier: Apache-2.0
"""The union of the rows of many calls, in the memory of one set."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deltackpt.format import blocks

#: Small arrays are merged once there are so many, since each takes more memory than its rows.
_MOST_PARTS = 1024


class NamedRows:
    """Adds sets of rows; it takes at most twice the memory of their union, and the last set."""

    def __init__(self) -> None:
        """Creates it without rows."""
        #: Table name to ascending rows, the union of most of them first.
        self._parts: dict[str, list[np.ndarray]] = {}

    def add(self, rows: Mapping[str, np.ndarray]) -> None:
        """Adds rows: table name to row indices, int64 ascending."""
        for table, numbers in rows.items():
            parts = self._parts.setdefault(table, [])
            parts.append(numbers)
            # Each merge at least doubles what it merges with, so that few rows are sorted per call.
            if len(parts) > _MOST_PARTS or sum(map(len, parts[1:])) > len(parts[0]):
                parts[:] = [_union(parts)]

    def rows(self) -> dict[str, np.ndarray]:
        """Returns table name to all rows, ascending."""
        return {table: _union(parts) for table, parts in self._parts.items()}

    def take(self) -> dict[str, np.ndarray]:
        """Returns all rows, and removes them."""
        found, self._parts = self.rows(), {}
        return found


def _union(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else blocks.distinct(np.concatenate(parts))
