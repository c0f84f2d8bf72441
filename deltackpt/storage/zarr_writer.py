# SPDX-License-Identifier: Apache-2.0
"""Writes the Zarr arrays of a base, with the bytes that TensorStore would write."""

from __future__ import annotations

import collections
import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deltackpt.format import naming, row_blocks
from deltackpt.format.row_blocks import ArrayEntry
from deltackpt.lazy_import import ts
from deltackpt.resources.runtime import Task
from deltackpt.storage import arrays, posix
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import CRC_BYTES
from deltackpt.storage.shard_writer import StoredArrays, write_array

#: Row indices in a chunk: a reader that needs a few of them reads one.
_CHUNK_ROWS = 1 << 18
#: Compressed chunks of one array in flight, each in its own memory.
_WRITES_IN_FLIGHT = 4


class ZarrWriter:
    """Writes a new array piece by piece; only chunks of several pieces are copied."""

    def __init__(
        self, directory: Path, entry: ArrayEntry, batch: FileBatch, *, pinned: bool = False
    ):
        """Creates the array in a new directory below that of the batch.

        With ``pinned``, the memory of all rows stays valid until ``finish``, and others might
        change rows while they are written; this is detected.
        """
        self._directory, self._entry, self._batch, self._pinned = directory, entry, batch, pinned
        #: Rows of complete chunks, and bytes of their files unless TensorStore writes them.
        self._done = self._nbytes = 0
        #: A chunk that is gathered from several pieces; it has ``_filled`` rows so far.
        self._chunk: np.ndarray | None = None
        self._filled = 0
        #: Held rows, which ``finish`` writes: threads do not wait at the end of each piece.
        self._pieces: list[np.ndarray] = []
        #: Encodes compressed chunks.
        self._store: ts.TensorStore | None = None
        #: Chunks that are being written.
        self._writes: collections.deque[ts.WriteFutures | Task[None]] = collections.deque()
        batch.make(directory)
        if entry.compressed:
            with _refusals(directory):
                spec = arrays.spec_of({"driver": "file", "path": f"{directory}/"}, entry)
                self._store = ts.open(spec, create=True, context=arrays.unsynced()).result()
        else:
            text = json.dumps(_metadata(entry), separators=(",", ":"), sort_keys=True)
            batch.write(directory / "zarr.json", text.encode())
            self._nbytes = len(text)

    def write(self, rows: np.ndarray) -> None:
        """Appends rows, (n, *trailing); unless pinned, their memory may be reused afterwards."""
        chunk_rows = self._entry.chunk_rows
        if self._pinned and self._store is None:
            self._pieces.append(rows)
            self._done += len(rows)
            return
        while len(rows):
            if self._filled == 0 and (whole := self._whole_rows(len(rows))):
                self._write_chunks(rows[:whole])
                rows = rows[whole:]
                continue
            if self._chunk is None:
                self._chunk = self._batch.buffer((chunk_rows, *rows.shape[1:]), rows.dtype)
            taken = min(len(rows), chunk_rows - self._filled)
            self._chunk[self._filled : self._filled + taken] = rows[:taken]
            self._filled += taken
            if self._whole_rows(self._filled):
                self._write_gathered(self._chunk)
            rows = rows[taken:]

    def finish(self) -> int:
        """Waits until everything is written; returns the bytes of all files of the array."""
        if self._done != self._entry.shape[0]:
            raise ValueError(
                f"{self._entry.name}: expected {self._entry.shape[0]} rows, found {self._done}"
            )
        self._wait(0)
        self._give_back_chunk()
        self._write_pieces()
        return self._nbytes if self._store is None else self._batch.adopt(self._directory)

    def remove(self) -> None:
        """Abandons the array: waits for pending writes and removes what was written."""
        try:
            self._wait(0)
        finally:
            self._give_back_chunk()
            self._pieces.clear()
        self._batch.remove(self._directory)

    def _give_back_chunk(self) -> None:
        if self._chunk is not None:
            self._batch.give_back(self._chunk)
            self._chunk = None

    def _whole_rows(self, count: int) -> int:
        """Returns how many of the next rows fill chunks; the array's last chunk may be shorter."""
        if self._done + count == self._entry.shape[0]:
            return count
        return count - count % self._entry.chunk_rows

    def _write_chunks(self, rows: np.ndarray) -> None:
        """Writes the next chunks, on several threads unless TensorStore compresses them."""
        entry, first = self._entry, self._done
        self._done += len(rows)
        starts = range(first, self._done, entry.chunk_rows)
        if self._store is None:

            def write_one(start: int) -> None:
                self._write_chunk(start, rows[start - first :], pinned=False)

            self._batch.map(write_one, starts)
            self._nbytes += len(starts) * arrays.chunk_bytes(entry)
            return
        for start in starts:
            chunk = rows[start - first :][: entry.chunk_rows]
            self._wait(_WRITES_IN_FLIGHT - 1)
            self._batch.pace.acquire(chunk.nbytes)
            with _refusals(self._directory):
                write = self._store[start : start + len(chunk)].write(chunk)
                self._writes.append(write)
                write.copy.result()  # The caller may reuse the memory.

    def _write_pieces(self) -> None:
        """Writes pinned rows on several threads; only chunks of several pieces are copied."""
        chunk_rows = self._entry.chunk_rows
        chunks = _chunks_of(self._pieces, chunk_rows)

        def write_one(numbered: tuple[int, list[np.ndarray]]) -> None:
            number, sections = numbered
            if len(sections) == 1:
                self._write_chunk(number * chunk_rows, sections[0], pinned=True)
                return
            count = sum(map(len, sections))
            buffer = self._batch.buffer((count, *sections[0].shape[1:]), sections[0].dtype)
            np.concatenate(sections, out=buffer)
            self._write_from_buffer(number * chunk_rows, buffer, buffer)

        self._nbytes += len(chunks) * arrays.chunk_bytes(self._entry)
        try:
            self._batch.map(write_one, enumerate(chunks))
        finally:
            # The traceback of an error would keep views of the training state.
            for sections in (self._pieces, *chunks):
                sections.clear()

    def _write_gathered(self, chunk: np.ndarray) -> None:
        """Writes a gathered chunk, on another thread while the next one is gathered."""
        rows, self._filled = chunk[: self._filled], 0
        if self._store is not None:
            self._write_chunks(rows)
            return
        self._wait(0)
        self._writes.append(self._batch.start(self._write_from_buffer, self._done, rows, chunk))
        self._done += len(rows)
        self._nbytes += arrays.chunk_bytes(self._entry)
        self._chunk = None

    def _write_from_buffer(self, start: int, rows: np.ndarray, buffer: np.ndarray) -> None:
        try:
            self._write_chunk(start, rows, pinned=False)
        finally:
            self._batch.give_back(buffer)

    def _write_chunk(self, start: int, rows: np.ndarray, *, pinned: bool) -> None:
        """Writes the chunk that begins at row ``start``."""
        entry, rows = self._entry, np.ascontiguousarray(rows[: self._entry.chunk_rows])
        path = self._directory / arrays.chunk_name(entry, start // entry.chunk_rows)
        padding = arrays.chunk_bytes(entry) - CRC_BYTES - rows.nbytes
        self._batch.write_chunk(path, rows, padding, pinned=pinned)

    def _wait(self, most: int) -> None:
        with _refusals(self._directory):
            while len(self._writes) > most:
                self._writes.popleft().result()


def _chunks_of(pieces: Sequence[np.ndarray], chunk_rows: int) -> list[list[np.ndarray]]:
    """Returns the parts of each chunk."""
    chunks: list[list[np.ndarray]] = []
    free = 0
    for rows in pieces:
        while len(rows):
            if not free:
                chunks.append([])
                free = chunk_rows
            section, rows = rows[:free], rows[free:]
            chunks[-1].append(section)
            free -= len(section)
    return chunks


def _metadata(entry: ArrayEntry) -> dict[str, object]:
    """``zarr.json`` as TensorStore completes it, for arrays that are not compressed."""
    return {
        **arrays.metadata_of(entry),
        "node_type": "array",
        "zarr_format": 3,
    }


@contextlib.contextmanager
def _refusals(directory: Path) -> Iterator[None]:
    """Raises what the store refuses as a StorageError."""
    with posix.typed_errors(directory, "write"):
        try:
            yield
        except ValueError as error:
            raise _store_error(directory, error) from error


def _store_error(directory: Path, error: ValueError) -> Exception:
    """TensorStore reports what the operating system refused as a ValueError with its words."""
    text = str(error)
    for words, number in (
        ("No space left", 28),
        ("Disk quota", 122),
        ("Read-only", 30),
        ("Permission denied", 13),
        ("Input/output error", 5),
    ):
        if words in text:
            return OSError(number, os.strerror(number), str(directory))
    return error


class ZarrSegmentSink(NamedTuple):
    """The destination of one segment's arrays in a step; ``item_dir`` is in a temporary one."""

    item_dir: Path
    process: int
    segment: str
    batch: FileBatch

    def writer(self, entry: ArrayEntry, *, pinned: bool = False) -> ZarrWriter:
        """See ``SegmentSink``."""
        return ZarrWriter(self.directory(entry.name), entry, self.batch, pinned=pinned)

    def write_rows(self, rows: np.ndarray) -> StoredArrays:
        """See ``SegmentSink``. Each chunk begins with a row index, so it is read on its own."""
        gaps = np.diff(rows, prepend=0)
        gaps[::_CHUNK_ROWS] = rows[::_CHUNK_ROWS]
        dtype = np.dtype(np.uint32 if rows[-1] < 1 << 32 else np.uint64)
        entry = row_blocks.array_entry(
            naming.GAPS, rows.shape, dtype, zstd=True, chunk_rows=min(len(rows), _CHUNK_ROWS)
        )
        return write_array(self, entry, [gaps.astype(dtype)])

    def directory(self, array: str) -> Path:
        """Returns the directory of one array."""
        return naming.array_dir(self.item_dir, self.process, self.segment, array)
