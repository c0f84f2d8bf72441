# SPDX-License-Identifier: Apache-2.0
"""Writes Zarr v3 arrays: raw chunks through the batch, compressed ones through TensorStore.

In both cases the bytes equal those that TensorStore would write, ``zarr.json`` included.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from deltackpt.format.segments import ArrayEntry
from deltackpt.resources.memory import aligned_buffer
from deltackpt.storage import arrays, files
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.crc import CRC_BYTES

#: Compressed chunks of one array on their way, each in memory of its own.
_WRITES_IN_FLIGHT = 4


class ArrayWriter:
    """Writes a new array piece by piece; only chunks of several pieces are copied."""

    def __init__(self, directory: Path, entry: ArrayEntry, batch: FileBatch, *, held: bool = False):
        """Makes the array.

        Args:
          directory: the array's directory, which is made; below that of the batch.
          entry: what the array is.
          batch: what forces the files, and keeps their digests.
          held: whether others might change the pieces while they are written, which is found.

        Raises:
          StorageError: the store reported an error.
        """
        self._directory, self._entry, self._batch, self._held = directory, entry, batch, held
        #: Rows of complete chunks, and bytes of their files unless TensorStore writes them.
        self._done = self._nbytes = 0
        #: The first ``filled`` rows of a chunk that comes in several pieces.
        self._chunk: np.ndarray | None = None
        self._filled = 0
        #: Encodes compressed chunks, of which some are on their way.
        self._store: ts.TensorStore | None = None
        self._writes: collections.deque[ts.WriteFutures] = collections.deque()
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
        """Appends rows, (n, *trailing); their memory may be reused when this returns.

        Raises:
          StorageError: the store reported an error, or the memory changed while it was written.
        """
        chunk_rows = self._entry.chunk_rows
        while len(rows):
            taken = min(len(rows), chunk_rows - self._filled)
            ends = self._done + self._filled + taken == self._entry.shape[0]
            if self._filled == 0 and (taken == chunk_rows or ends):
                self._write_chunk(rows[:taken])
            else:
                if self._chunk is None:
                    nbytes = arrays.chunk_bytes(self._entry) - CRC_BYTES
                    memory = aligned_buffer(nbytes)[:nbytes].view(rows.dtype)
                    self._chunk = memory.reshape(chunk_rows, *self._entry.shape[1:])
                self._chunk[self._filled : self._filled + taken] = rows[:taken]
                self._filled += taken
                if self._filled == chunk_rows or ends:
                    self._write_chunk(self._chunk[: self._filled])
                    self._filled = 0
            rows = rows[taken:]

    def finish(self) -> int:
        """Waits until everything is written; returns the bytes of all files of the array.

        Raises:
          StorageError: the store reported an error.
        """
        if self._done != self._entry.shape[0]:
            raise ValueError(
                f"{self._entry.name}: expected {self._entry.shape[0]} rows, found {self._done}"
            )
        self._wait(0)
        return self._nbytes if self._store is None else self._batch.adopt(self._directory)

    def remove(self) -> None:
        """Abandons the array: waits for pending writes and removes what was written.

        Raises:
          StorageError: the store reported an error.
        """
        self._wait(0)
        self._batch.remove(self._directory)

    def _write_chunk(self, rows: np.ndarray) -> None:
        start, self._done = self._done, self._done + len(rows)
        if self._store is not None:
            self._wait(_WRITES_IN_FLIGHT - 1)
            self._batch.pace.take(rows.nbytes)
            with _refusals(self._directory):
                write = self._store[start : self._done].write(rows)
                self._writes.append(write)
                write.copy.result()  # The caller may reuse the memory.
            return
        entry = self._entry
        path = self._directory / arrays.chunk_name(entry, start // entry.chunk_rows)
        self._batch.make(path.parent)
        padding = arrays.chunk_bytes(entry) - CRC_BYTES - rows.nbytes
        self._batch.write_chunk(path, np.ascontiguousarray(rows), padding, held=self._held)
        self._nbytes += arrays.chunk_bytes(entry)

    def _wait(self, most: int) -> None:
        """Waits until at most so many chunks are on their way."""
        with _refusals(self._directory):
            while len(self._writes) > most:
                self._writes.popleft().result()


def _metadata(entry: ArrayEntry) -> dict[str, Any]:
    """``zarr.json`` as TensorStore completes it, for arrays that are not compressed."""
    return {
        **arrays.metadata_of(entry),
        "chunk_key_encoding": {"name": "default"},
        "node_type": "array",
        "zarr_format": 3,
    }


@contextlib.contextmanager
def _refusals(directory: Path) -> Iterator[None]:
    """Raises what the store refuses as a StorageError."""
    with files.typed_errors(directory, "write"):
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
