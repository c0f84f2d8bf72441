# SPDX-License-Identifier: Apache-2.0
"""A frame to be written, and how arrays get into its body."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from deltackpt.format import frames
from deltackpt.format.frames import Head
from deltackpt.format.segments import ArrayEntry
from deltackpt.storage import frame_arrays, parts
from deltackpt.storage.frame_arrays import Body
from deltackpt.storage.parts import StoredArrays


class Frame(NamedTuple):
    """A frame to be written: its head, and the arrays of its body in pieces."""

    head: Head
    body: Sequence[Sequence[frames.Buffer]]


class _Array(NamedTuple):
    """Collects the pieces of one array, which stay unchanged until the frame is written."""

    pieces: list[np.ndarray]

    def write(self, rows: np.ndarray) -> None:
        """See ``RowsWriter``."""
        self.pieces.append(np.ascontiguousarray(rows))

    def finish(self) -> int:
        """See ``RowsWriter``."""
        return sum(piece.nbytes for piece in self.pieces)

    def remove(self) -> None:
        """See ``RowsWriter``."""
        self.pieces.clear()


class FramePlace:
    """Directs the arrays of a segment to the body of a frame. See ``parts.Place``."""

    def __init__(self, segment: str):
        """Creates an empty place.

        Args:
          segment: its name.
        """
        self._segment = segment
        self._arrays: dict[str, _Array] = {}

    @property
    def segment(self) -> str:
        """See ``parts.Place``."""
        return self._segment

    def writer(self, entry: ArrayEntry) -> _Array:
        """See ``parts.Place``."""
        found = self._arrays[entry.name] = _Array([])
        return found

    def write_array(
        self, entry: ArrayEntry, pieces: Iterable[np.ndarray], *, held: bool = False
    ) -> int:
        """See ``parts.Place``."""
        writer = self.writer(entry)
        for piece in pieces:
            writer.write(piece)
        return writer.finish()

    def write_rows(self, rows: np.ndarray) -> StoredArrays:
        """See ``parts.Place``."""
        return parts.write_gaps(self, rows)

    def pieces(self, entry: ArrayEntry) -> Sequence[np.ndarray]:
        """Returns the pieces of an array."""
        return self._arrays[entry.name].pieces


def body_of(
    held: Iterable[tuple[FramePlace, Sequence[ArrayEntry]]], pool: concurrent.futures.Executor
) -> Body:
    """Returns the body of a frame that contains some segments.

    Args:
      held: the position of each segment, and its arrays in order.
      pool: runs the compression.
    """
    return frame_arrays.body_of(
        ((entry, place.pieces(entry)) for place, entries in held for entry in entries), pool
    )
