# SPDX-License-Identifier: Apache-2.0
"""Writes layers: arrays are gathered in private memory while earlier ones are written directly.

A layer that fits into one buffer is a single write: handing it to another thread costs more than it
saves. The header of a longer one is written last.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zstandard

from deltackpt.errors import OptionError, StorageError
from deltackpt.format.blocks import Rows, spans_of
from deltackpt.layers import footer
from deltackpt.layers.footer import (
    CHUNK,
    GAPS,
    PAGE_BYTES,
    Compression,
    Header,
    Kind,
    LayerArray,
    LayerManifest,
    RowGroup,
)
from deltackpt.resources.memory import private_buffer
from deltackpt.resources.pace import Pace
from deltackpt.storage import aligned, files

#: Reading one row reads and verifies that many bytes.
_CHUNK_BYTES = 128 << 10
#: Compressed chunks are longer by this factor, since short ones compress worse.
_COMPRESSED_FACTOR = 8
_ZSTD_LEVEL, _PLANES_ZSTD_LEVEL = 3, 1
#: Short arrays begin at multiples of it; longer ones at pages, so that they can be read directly.
_ALIGNMENT = 64
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class ArrayInput(NamedTuple):
    """An array to write.

    Attributes:
      name: unique in its row group.
      shape: its shape.
      dtype: a core dtype of Zarr v3.
      fill: writes the elements ``[start, stop)`` of the first axis into memory of that shape.
        Called in ascending order, each element once. The memory is only valid during the call.
      compression: how to compress its chunks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    fill: Callable[[int, int, np.ndarray], None]
    compression: Compression = ""

    @classmethod
    def of(cls, name: str, array: np.ndarray, compression: Compression = "") -> ArrayInput:
        """Returns an input that copies an array in memory."""

        def fill(start: int, stop: int, out: np.ndarray) -> None:
            out[:] = array[start:stop]

        return cls(name, array.shape, array.dtype, fill, compression)


class RowGroupInput(NamedTuple):
    """A row group to write; see ``footer.RowGroup``. ``rows`` are ascending and unique."""

    name: str
    group: str
    rows: Rows
    arrays: Sequence[ArrayInput]
    kind: Kind = "rows"
    columns: tuple[int, int] | None = None
    codecs: Mapping[str, str] = {}


class WrittenLayer(NamedTuple):
    """A layer's byte range in the file, and the digest that the next layer continues from."""

    start: int
    stop: int
    digest: int


class WriteBuffers:
    """Memory to gather layers in, and a thread that writes it; kept from save to save.

    Used by one thread at a time, and not after a fork.
    """

    def __init__(self, *, nbytes: int = 6 << 20, count: int = 3):
        """Allocates nothing yet.

        Args:
          nbytes: length of a buffer. Layers up to this length are a single write.
          count: number of buffers, at least 2.
        """
        self.nbytes = nbytes
        self._count = count
        self._free: list[np.ndarray] = []
        self._writes: collections.deque[tuple[concurrent.futures.Future[None], np.ndarray]] = (
            collections.deque()
        )
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "deltackpt-layer")

    def take(self, nbytes: int) -> np.ndarray:
        """Returns a buffer of at least ``nbytes``, after waiting for one to be written.

        Raises:
          StorageError: writing failed.
        """
        while len(self._writes) >= self._count - 1:
            self._await_one()
        if self._free and nbytes <= self.nbytes:
            return self._free.pop()
        return private_buffer(max(nbytes, self.nbytes))

    def give_back(self, buffer: np.ndarray) -> None:
        """Keeps a buffer for the next ``take``, unless it is an oversized one."""
        if len(self._free) < self._count and buffer.nbytes < 2 * self.nbytes:
            self._free.append(buffer)

    def write(self, write: Callable[[np.ndarray], None], buffer: np.ndarray, nbytes: int) -> None:
        """Writes the first bytes of a buffer in the background, which then is free."""
        self._writes.append((self._pool.submit(write, buffer[:nbytes]), buffer))

    def wait(self) -> None:
        """Waits for all writes.

        Raises:
          StorageError: writing failed.
        """
        while self._writes:
            self._await_one()

    def abandon(self) -> None:
        """Waits for all writes of a layer that has failed."""
        while self._writes:
            with contextlib.suppress(Exception):
                self._await_one()

    def close(self) -> None:
        """Ends the thread and frees the memory."""
        self.abandon()
        self._free.clear()
        self._pool.shutdown()

    def _await_one(self) -> None:
        future, buffer = self._writes.popleft()
        concurrent.futures.wait([future])
        self.give_back(buffer)
        future.result()


class LayerFile:
    """Appends layers to a new file; used by one thread.

    A later layer proves to readers that the ones before it are durable, so each is flushed before
    the next is written. After an error, begin another file.
    """

    def __init__(
        self,
        path: Path,
        buffers: WriteBuffers,
        *,
        fsync: bool = True,
        sequence: int = 0,
        predecessor: int = 0,
        pace: Pace | None = None,
        chunk_bytes: int = _CHUNK_BYTES,
    ):
        """Creates the file.

        Args:
          path: the file; its directory must exist. The caller fsyncs the directory.
          buffers: memory and thread.
          fsync: whether layers must survive a power cut.
          sequence: sequence number of the first layer.
          predecessor: digest of the layer that it continues; 0 without one.
          pace: limits the rate of writing.
          chunk_bytes: length of an uncompressed chunk, if rows are not longer.

        Raises:
          StorageError: the file exists, or cannot be created.
        """
        self.path, self._buffers, self._fsync = path, buffers, fsync
        self._sequence, self._predecessor, self._pace = sequence, predecessor, pace or Pace()
        self._chunk_bytes = chunk_bytes
        self._stop, self._is_durable, self._has_failed = 0, True, False
        with files.typed_errors(path, "create"):
            self._descriptor = os.open(path, _NEW, 0o666)
            self._direct = True
            try:
                aligned.check_alignment(self._descriptor)
                self._set_direct(True)
            except OSError as error:
                self._direct = False
                if error.errno not in aligned.REFUSED:
                    os.close(self._descriptor)
                    raise

    def append(self, manifest: LayerManifest, groups: Iterable[RowGroupInput]) -> WrittenLayer:
        """Writes a layer; it is durable after ``sync``.

        Args:
          manifest: without sequence number, predecessor, row groups and arrays.
          groups: what to write. An iterator is advanced only after the previous one's arrays are
            gathered, so that encoders of unknown length can produce them one by one.

        Raises:
          StorageError: writing failed.
          OptionError: row indices are not ascending.
        """
        self.sync()
        self._has_failed, self._is_durable = True, not self._fsync
        manifest = dataclasses.replace(
            manifest, sequence=self._sequence, predecessor=self._predecessor
        )
        try:
            gathering = _Gathering(self._buffers, self._stop, self._write_at, self._chunk_bytes)
            written = gathering.write(manifest, groups)
        except BaseException:
            self._buffers.abandon()
            raise
        self._has_failed = False
        self._sequence += 1
        self._predecessor, self._stop = written.digest, written.stop
        return written

    def sync(self) -> None:
        """Makes all layers durable, unless the file was created with ``fsync=False``.

        Raises:
          StorageError: flushing failed; layers since the last call may be lost.
        """
        if self._has_failed:
            raise StorageError(
                f"{self.path}: expected a file without errors, found a failed write; begin another"
            )
        if self._is_durable:
            return
        self._has_failed = True
        with files.typed_errors(self.path, "force to disk"):
            aligned.force(self._descriptor)
        self._has_failed, self._is_durable = False, True

    def close(self) -> None:
        """Closes the file, without flushing it.

        Raises:
          StorageError: an earlier write was lost.
        """
        with files.typed_errors(self.path, "close"):
            os.close(self._descriptor)

    def _write_at(self, start: int, data: np.ndarray) -> None:
        self._pace.take(len(data))
        with files.typed_errors(self.path, "write"):
            if self._direct:
                try:
                    aligned.write_aligned(self._descriptor, data, start)
                    return
                except OSError as error:
                    # Some file systems refuse only the first write.
                    if error.errno not in aligned.REFUSED or start:
                        raise
                    self._set_direct(False)
                    self._direct = False
            aligned.write_all(self._descriptor, data, start)

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if on else 0))


class _Gathering:
    """One layer on its way to a file: what is in the current buffer, and where it belongs."""

    def __init__(
        self,
        buffers: WriteBuffers,
        start: int,
        write_at: Callable[[int, np.ndarray], None],
        chunk_bytes: int,
    ):
        self._buffers, self._start, self._write_at = buffers, start, write_at
        self._chunk_bytes = chunk_bytes
        self._buffer = buffers.take(PAGE_BYTES)
        #: Offset of the buffer in the layer, and the number of its bytes that are in use.
        self._first, self._used = 0, PAGE_BYTES
        self._buffer[:PAGE_BYTES] = 0

    def write(self, manifest: LayerManifest, groups: Iterable[RowGroupInput]) -> WrittenLayer:
        """Writes the layer."""
        seed = manifest.seed
        row_groups: list[RowGroup] = []
        arrays: list[LayerArray] = []
        for given in groups:
            group, gaps = _row_group(given, self._chunk_bytes)
            inputs = given.arrays if gaps is None else (gaps, *given.arrays)
            own = [self._add_array(group.name, one, seed) for one in inputs]
            if gaps is not None:
                group = dataclasses.replace(group, bounds=_bounds(given.rows, own[0]))
            row_groups.append(group)
            arrays += own
        manifest = dataclasses.replace(manifest, row_groups=tuple(row_groups), arrays=tuple(arrays))
        data = footer.footer_bytes(manifest, self._offset)
        self._room(len(data))[: len(data)] = np.frombuffer(data, np.uint8)
        self._used += len(data)
        nbytes = self._offset
        header = np.frombuffer(Header.of(manifest, nbytes).page(), np.uint8)
        if self._first == 0:
            self._buffer[:PAGE_BYTES] = header
            self._write_at(self._start, self._buffer[:nbytes])
        else:
            self._flush(PAGE_BYTES)
            self._buffers.wait()
            self._buffer[:PAGE_BYTES] = header
            self._write_at(self._start, self._buffer[:PAGE_BYTES])
        self._buffers.give_back(self._buffer)
        return WrittenLayer(
            self._start, self._start + nbytes, int.from_bytes(data[-footer.CRC_BYTES :], "little")
        )

    @property
    def _offset(self) -> int:
        return self._first + self._used

    def _room(self, nbytes: int) -> np.ndarray:
        """Free memory for the next bytes of the layer, at least ``nbytes``."""
        if self._used + nbytes > len(self._buffer):
            self._flush(nbytes)
        return self._buffer[self._used :]

    def _flush(self, nbytes: int) -> None:
        """Writes all whole pages, and goes on in a buffer with room for ``nbytes``."""
        whole = self._used // PAGE_BYTES * PAGE_BYTES
        rest = self._buffer[whole : self._used]
        following = self._buffers.take(nbytes + len(rest))
        following[: len(rest)] = rest
        start = self._start + self._first
        self._buffers.write(lambda data: self._write_at(start, data), self._buffer, whole)
        self._buffer = following
        self._first, self._used = self._first + whole, len(rest)

    def _add_array(self, row_group: str, given: ArrayInput, seed: int) -> LayerArray:
        count, row_bytes = given.shape[0], math.prod(given.shape[1:]) * given.dtype.itemsize
        chunk_bytes = self._chunk_bytes * (_COMPRESSED_FACTOR if given.compression else 1)
        chunk_rows = max(1, chunk_bytes // row_bytes if row_bytes else count)
        padding = -self._offset % (PAGE_BYTES if count * row_bytes >= PAGE_BYTES else _ALIGNMENT)
        chunks: list[tuple[int, int, int]] = []
        start = 0
        while start < count and row_bytes:
            stop = min(count, start + chunk_rows)
            if given.compression:
                plain = np.empty((stop - start, *given.shape[1:]), given.dtype)
                given.fill(start, stop, plain)
                data = _compressed(plain, given.compression)
                room = self._room(padding + len(data))
                room[padding : padding + len(data)] = data
                chunks.append(self._add_chunk(seed, room, padding, len(data)))
            else:
                room = self._room(padding + (stop - start) * row_bytes)
                # As many whole chunks as fit: one call of a gather instead of many.
                fitting = (len(room) - padding) // (chunk_rows * row_bytes) * chunk_rows
                stop = max(stop, min(count, start + fitting))
                rows = room[padding : padding + (stop - start) * row_bytes].view(given.dtype)
                given.fill(start, stop, rows.reshape(stop - start, *given.shape[1:]))
                for first in range(start, stop, chunk_rows):
                    nbytes = min(chunk_rows, stop - first) * row_bytes
                    chunks.append(self._add_chunk(seed, room, padding, nbytes))
                    room, padding = room[padding + nbytes :], 0
            start, padding = stop, 0
        return LayerArray(
            row_group=row_group,
            name=given.name,
            shape=given.shape,
            dtype=given.dtype.name,
            chunk_rows=chunk_rows,
            compression=given.compression,
            chunks=np.array(chunks, CHUNK).tobytes(),
        )

    def _add_chunk(
        self, seed: int, room: np.ndarray, padding: int, nbytes: int
    ) -> tuple[int, int, int]:
        """Adds padding and the bytes after it, which are in place, and describes them."""
        offset = self._offset + padding
        room[:padding] = 0
        data = room[padding : padding + nbytes]
        self._used += padding + nbytes
        return offset, nbytes, footer.chunk_crc32c(seed, offset, room[:padding], data)


def _row_group(given: RowGroupInput, chunk_bytes: int) -> tuple[RowGroup, ArrayInput | None]:
    """A row group, and the array of its row indices if they are not ranges."""
    rows = given.rows
    ranges = None if isinstance(rows, np.ndarray) and len(rows) else ()
    if not isinstance(rows, np.ndarray):
        ranges = spans_of(rows)
    group = RowGroup(
        name=given.name,
        group=given.group,
        count=len(rows),
        kind=given.kind,
        columns=given.columns,
        ranges=ranges,
        codecs={**given.codecs},
    )
    if ranges is not None:
        return group, None
    gaps = np.diff(np.asarray(rows, np.int64), prepend=0)
    if gaps[0] < 0 or np.any(gaps[1:] <= 0):
        raise OptionError(
            f"row group {given.name!r}: expected ascending row indices, found others; sort them"
        )
    most = int(gaps[1:].max(initial=0))
    dtype = next(one for one in map(np.dtype, footer.GAPS_DTYPES) if most <= np.iinfo(one).max)
    # The bounds have the first row of each chunk.
    gaps[:: max(1, chunk_bytes // dtype.itemsize)] = 0
    return group, ArrayInput.of(GAPS, gaps.astype(dtype))


def _bounds(rows: Rows, gaps: LayerArray) -> tuple[tuple[int, int], ...]:
    """The first and the last row index of each chunk."""
    held = np.asarray(rows)
    firsts = held[:: gaps.chunk_rows]
    lasts = held[[*range(gaps.chunk_rows - 1, len(held) - 1, gaps.chunk_rows), len(held) - 1]]
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _compressed(plain: np.ndarray, compression: Compression) -> np.ndarray:
    level = _PLANES_ZSTD_LEVEL if compression == "planes" else _ZSTD_LEVEL
    stored = np.moveaxis(plain, -1, 0) if compression == "planes" else plain
    data = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    found = zstandard.ZstdCompressor(level=level).compress(data.data)
    # Uncompressed chunks are recognized by their length, and have no planes.
    shorter = np.frombuffer(found, np.uint8)
    return shorter if len(shorter) < plain.nbytes else plain.reshape(-1).view(np.uint8)
