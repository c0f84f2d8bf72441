# SPDX-License-Identifier: Apache-2.0
"""Row indices of deltas, decoded once for ascending ranges of rows."""

from __future__ import annotations

import numpy as np

from deltackpt.format import names
from deltackpt.format.blocks import Span
from deltackpt.format.segments import Segment
from deltackpt.layers import merge
from deltackpt.layers.merge import StoredRows
from deltackpt.layers.targets import Targets
from deltackpt.reading.saves import StoredPart
from deltackpt.storage.store import Spot


class RowNumbers:
    """Row indices of deltas within a range of rows; decodes each once if the ranges ascend."""

    def __init__(self) -> None:
        """Decodes nothing yet."""
        self._stretch: Span = (0, 0)
        #: Item, process and segment to where its row indices are read.
        self._cursors: dict[tuple[Spot, int, str], _Cursor] = {}

    def move(self, stretch: Span) -> None:
        """Moves to the next range of rows."""
        self._stretch = stretch

    def rows(self, part: StoredPart, segment: Segment, targets: Targets) -> StoredRows | None:
        """See ``layers.merge.RowIndices``."""
        if segment.ranges is not None:
            return merge.stored_rows(part, segment, targets)
        if not targets.want(segment, self._stretch):
            return None
        place = part.item_dir, part.record.process, segment.name
        cursor = self._cursors.setdefault(place, _Cursor(part, segment))
        return cursor.within(self._stretch)


class _Cursor:
    """The row indices of one segment, read chunk by chunk."""

    def __init__(self, part: StoredPart, segment: Segment):
        self._part = part
        self._segment = segment
        self._entry = next(entry for entry in segment.arrays if entry.name == names.GAPS)
        #: The chunk with the start of the next range, and the row before it.
        self._chunk = 0
        self._before: int | None = None
        self._stretch: Span | None = None
        self._held = StoredRows(np.empty(0, np.int64))

    def within(self, stretch: Span) -> StoredRows:
        """Row indices within a range; ranges must ascend."""
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
                # A copy, so that the rest of the chunk can be freed.
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
        return merge.gap_rows(self._part, self._segment, start, stop, after=self._before)
