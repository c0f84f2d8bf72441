# SPDX-License-Identifier: Apache-2.0
"""Writes the Zarr arrays of a base; uncompressed chunks have the bytes of TensorStore's."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deltackpt.format import naming, row_blocks
from deltackpt.format.row_blocks import ArrayEntry
from deltackpt.resources.runtime import Task
from deltackpt.storage import arrays
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import CRC_BYTES
from deltackpt.storage.shard_writer import write_array

#: Row indices in a chunk: a reader that needs a few of them reads one.
_CHUNK_ROWS = 1 << 18
#: Gathered chunks of one array that are compressed while the next one is gathered.
_COMPRESSED_AT_ONCE = 2


class ZarrWriter:
    """Writes a new array piece by piece; only chunks of several pieces are copied."""

    def __init__(
        self, directory: Path, entry: ArrayEntry, batch: FileBatch, *, pinned: bool = False
    ):
        """Creates the array in a new directory below that of the batch.

        With ``pinned``, the memory of all rows stays valid until ``finish``, and others might
        change rows while they are written; this is detected.
        """
        self._directory, self._entry, self._batch = directory, entry, batch
        self._pinned = pinned and not entry.compressed
        self._rows = 0
        #: Rows of the next chunk: several pieces if pinned, otherwise the first of ``_buffer``.
        self._sections: list[np.ndarray] = []
        self._buffer: np.ndarray | None = None
        #: Numbers and rows of complete chunks in memory of the caller.
        self._chunks: list[tuple[int, list[np.ndarray]]] = []
        #: Writes of gathered chunks.
        self._writes: collections.deque[Task[int]] = collections.deque()
        batch.make(directory)
        metadata = {**arrays.metadata_of(entry), "node_type": "array", "zarr_format": 3}
        text = json.dumps(metadata, separators=(",", ":"), sort_keys=True)
        batch.write(directory / "zarr.json", text.encode())
        self._nbytes = len(text)

    def write(self, rows: np.ndarray) -> None:
        """Appends rows, (n, *trailing); unless pinned, their memory may be reused afterwards."""
        chunk_rows = self._entry.chunk_rows
        while len(rows):
            filled = self._rows % chunk_rows
            piece, rows = rows[: chunk_rows - filled], rows[chunk_rows - filled :]
            self._rows += len(piece)
            is_complete = self._rows % chunk_rows == 0 or self._rows == self._entry.shape[0]
            if self._pinned or (is_complete and not filled):
                self._sections.append(piece)
            else:
                if self._buffer is None:
                    self._buffer = self._batch.buffer((chunk_rows, *piece.shape[1:]), piece.dtype)
                self._buffer[filled : filled + len(piece)] = piece
                self._sections = [self._buffer[: filled + len(piece)]]
            if is_complete:
                self._end_chunk((self._rows - 1) // chunk_rows)
        if not self._pinned:
            self._write_chunks()

    def finish(self) -> int:
        """Waits until everything is written; returns the bytes of all files of the array."""
        if self._rows != self._entry.shape[0]:
            raise ValueError(
                f"{self._entry.name}: expected {self._entry.shape[0]} rows, found {self._rows}"
            )
        self._write_chunks()
        self._wait(0)
        return self._nbytes

    def remove(self) -> None:
        """Abandons the array: waits for pending writes and removes what was written."""
        try:
            self._wait(0)
        finally:
            self._chunks, self._sections = [], []
            if self._buffer is not None:
                self._batch.give_back(self._buffer)
                self._buffer = None
        self._batch.remove(self._directory)

    def _end_chunk(self, number: int) -> None:
        """Starts to write a gathered chunk while the next one is gathered, or keeps it."""
        sections, buffer = self._sections, self._buffer
        self._sections, self._buffer = [], None
        if buffer is None:
            self._chunks.append((number, sections))
            return
        self._wait(_COMPRESSED_AT_ONCE - 1 if self._entry.compressed else 0)
        self._writes.append(self._batch.start(self._write_chunk, number, sections, buffer))

    def _write_chunks(self) -> None:
        """Writes the complete chunks in memory of the caller."""
        chunks, self._chunks = self._chunks, []
        try:
            written = self._batch.map(lambda chunk: self._write_chunk(*chunk), chunks)
        finally:
            # The traceback of an error would keep views of the training state.
            for _, sections in chunks:
                sections.clear()
        self._nbytes += sum(written)

    def _wait(self, most: int) -> None:
        while len(self._writes) > most:
            self._nbytes += self._writes.popleft().result()

    def _write_chunk(
        self, number: int, sections: list[np.ndarray], buffer: np.ndarray | None = None
    ) -> int:
        """Writes a chunk from its rows and gives back ``buffer``; returns its bytes."""
        entry, batch = self._entry, self._batch
        path = self._directory / arrays.chunk_name(entry, number)
        rows, pinned = sections[0], sections if self._pinned else ()
        try:
            if entry.compressed:
                data = arrays.compressed_chunk(entry, rows)
                batch.write(path, data)
                return len(data)
            if len(sections) > 1:
                shape = (sum(map(len, sections)), *rows.shape[1:])
                rows = buffer = batch.buffer(shape, rows.dtype)
                np.concatenate(sections, out=rows)
            padding = arrays.chunk_bytes(entry) - CRC_BYTES - rows.nbytes
            batch.write_chunk(path, rows, padding, pinned=pinned)
            return arrays.chunk_bytes(entry)
        finally:
            if buffer is not None:
                batch.give_back(buffer)


class ZarrSegmentSink(NamedTuple):
    """The destination of one segment's arrays in a step; ``item_dir`` is in a temporary one."""

    item_dir: Path
    process: int
    batch: FileBatch
    segment: str

    def writer(self, entry: ArrayEntry, *, pinned: bool = False) -> ZarrWriter:
        """See ``SegmentSink``."""
        directory = naming.array_dir(self.item_dir, self.process, self.segment, entry.name)
        return ZarrWriter(directory, entry, self.batch, pinned=pinned)

    def write_rows(self, rows: np.ndarray) -> ArrayEntry:
        """See ``SegmentSink``. Each chunk begins with a row index, so it is read on its own."""
        gaps = np.diff(rows, prepend=0)
        gaps[::_CHUNK_ROWS] = rows[::_CHUNK_ROWS]
        dtype = np.dtype(np.uint32 if rows[-1] < 1 << 32 else np.uint64)
        entry = row_blocks.array_entry(
            naming.GAPS, rows.shape, dtype, zstd=True, chunk_rows=min(len(rows), _CHUNK_ROWS)
        )
        return write_array(self, entry, [gaps.astype(dtype)]).entry
