# SPDX-License-Identifier: Apache-2.0
"""Row numbers of deltas, decoded once while stretches of rows go up."""

from __future__ import annotations

import numpy as np

from deltackpt.format import names
from deltackpt.format.blocks import Span
from deltackpt.format.segments import Segment
from deltackpt.reading import reader
from deltackpt.reading.reader import StoredRows, Targets
from deltackpt.reading.saves import StoredPart
from deltackpt.storage.store import Spot


class RowNumbers:
    """Row numbers of deltas within a stretch of rows: decoded once while stretches go up."""

    def __init__(self) -> None:
        """Nothing is decoded yet."""
        self._stretch: Span = (0, 0)
        self._cursors: dict[Spot, _Cursor] = {}

    def move(self, stretch: Span) -> None:
        """Goes on to the next stretch."""
        self._stretch = stretch

    def rows(self, part: StoredPart, segment: Segment, targets: Targets) -> StoredRows | None:
        """See ``reader.RowNumbers``."""
        if segment.ranges is not None:
            return reader.stored_rows(part, segment, targets)
        if not targets.want(segment, self._stretch):
            return None
        place = names.array_dir(part.item_dir, part.record.process, segment.name, names.GAPS)
        cursor = self._cursors.setdefault(place, _Cursor(part, segment))
        return cursor.within(self._stretch)


class _Cursor:
    """The row numbers of one segment, read chunk by chunk."""

    def __init__(self, part: StoredPart, segment: Segment):
        self._part = part
        self._segment = segment
        self._entry = next(entry for entry in segment.arrays if entry.name == names.GAPS)
        #: The chunk in which the next stretch begins, and the row before it.
        self._chunk = 0
        self._before: int | None = None
        self._stretch: Span | None = None
        self._held = StoredRows(np.empty(0, np.int64))

    def within(self, stretch: Span) -> StoredRows:
        """Those of the rows in a stretch; stretches must ascend."""
        if stretch != self._stretch:
            self._held = self._read(stretch)
            self._stretch = stretch
        return self._held

    def _read(self, stretch: Span) -> StoredRows:
        found: list[np.ndarray] = []
        first = 0
        chunks = -(-self._entry.shape[0] // self._entry.chunk_rows)
        while self._chunk < chunks:
            rows = self._decoded()
            low, high = np.searchsorted(rows, stretch)
            if low < high:
                if not found:
                    first = self._chunk * self._entry.chunk_rows + int(low)
                # A copy: the rest of the chunk is not to stay in memory.
                found.append(rows[low:high].copy())
            if high < len(rows):
                break
            self._before = int(rows[-1])
            self._chunk += 1
        if not found:
            return StoredRows(np.empty(0, np.int64))
        return StoredRows(found[0] if len(found) == 1 else np.concatenate(found), first)

    def _decoded(self) -> np.ndarray:
        start = self._chunk * self._entry.chunk_rows
        stop = min(start + self._entry.chunk_rows, self._entry.shape[0])
        return reader.gap_rows(self._part, self._segment, start, stop, after=self._before)
