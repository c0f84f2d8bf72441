# SPDX-License-Identifier: Apache-2.0
"""Writes layers: arrays are gathered in buffers, which are written while others are filled.

Several threads write long arrays directly from their aligned memory: a copy and a second pass for
the checksum would cost as much CPU time as gathering the rows. A layer that fits into one buffer is
a single write: handing it to another thread costs more than it saves. The header of a longer layer
is written last.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from deltackpt import codecs
from deltackpt.errors import OptionError, StorageError
from deltackpt.format import naming
from deltackpt.format.manifest import LayerRef, SaveId
from deltackpt.format.row_blocks import (
    BLOCKS,
    PLAIN,
    ArrayEntry,
    Rows,
    Segment,
    Span,
    array_entry,
    spans_of,
)
from deltackpt.layers import footer
from deltackpt.layers.footer import (
    CHUNK,
    GAPS,
    PAGE_BYTES,
    REMOVED,
    Compression,
    Header,
    Kind,
    LayerArray,
    LayerManifest,
    RowGroup,
    compression_of,
)
from deltackpt.resources.host_memory import is_aligned
from deltackpt.resources.runtime import Runtime, Task
from deltackpt.storage import arrays
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import BlockSums, Digest, crc32c, joined, joiner
from deltackpt.storage.posix import DirectFile

#: Reading one row reads and verifies that many bytes.
_CHUNK_BYTES = 128 << 10
#: Compressed chunks are longer by this factor, since short ones compress worse.
_COMPRESSED_FACTOR = 8
#: Short arrays begin at multiples of it; longer ones at pages, so that they can be read directly.
_ALIGNMENT = 64
#: Buffers of a layer: one is filled while the others are written.
_BUFFERS = 3
#: Arrays of at least ``_IN_PLACE_BYTES`` that do not fit into the buffer are written from their own
#: memory, in pieces of about ``_PIECE_BYTES``.
_IN_PLACE_BYTES, _PIECE_BYTES = 1 << 20, 4 << 20


class WrittenLayer(NamedTuple):
    """A layer that was written, in bytes ``[start, stop)`` of the file.

    ``digest`` is its last four bytes as a number, which the next layer names as its predecessor.
    ``crc32c`` covers all bytes before; 0 if it was not calculated.
    """

    start: int
    stop: int
    digest: int
    crc32c: int


class LayerSink(Protocol):
    """The destination of layers: a ``DirectFile``, or memory. Several threads may write."""

    @property
    def path(self) -> Path:
        """Its name in errors."""
        ...

    def write(self, start: int, data: np.ndarray) -> None:
        """Writes bytes at an offset, whose memory may be reused when this returns."""

    def sync(self, *, metadata: bool = True) -> None:
        """Makes what was written durable."""


class LayerFile:
    """Appends layers to a new file; used by one thread. After an error, begin another file."""

    def __init__(
        self,
        file: LayerSink,
        runtime: Runtime,
        *,
        fsync: bool = True,
        sequence: int = 0,
        predecessor: int = 0,
        chunk_bytes: int = _CHUNK_BYTES,
        buffer_bytes: int = 6 << 20,
        checksum: bool = True,
    ):
        """Writes nothing yet; the caller closes ``file``.

        ``sequence`` is that of the first layer, which continues the layer with the digest
        ``predecessor``. Layers of up to ``buffer_bytes`` are a single write. ``checksum`` is
        whether to calculate ``WrittenLayer.crc32c``.
        """
        self.file, self._runtime, self._fsync = file, runtime, fsync
        self._sequence, self._predecessor = sequence, predecessor
        self._chunk_bytes, self._checksum = chunk_bytes, checksum
        self._buffer_bytes = buffer_bytes
        self._stop, self._is_durable, self._has_failed = 0, True, False

    def start_layer(self, manifest: LayerManifest) -> OpenLayer:
        """Begins a layer; finish or abandon it before the next call.

        Only the save id and the process of the manifest are used. Raises StorageError if an earlier
        write failed.
        """
        self._check()
        self._has_failed = True
        return OpenLayer(self, dataclasses.replace(manifest, sequence=self._sequence).seed)

    def sync(self) -> None:
        """Makes all layers durable, unless the file was created with ``fsync=False``.

        If it raises StorageError, layers since the last call may be lost.
        """
        self._check()
        if self._is_durable:
            return
        self._has_failed = True
        self.file.sync(metadata=False)
        self._has_failed, self._is_durable = False, True

    def _check(self) -> None:
        if self._has_failed:
            raise StorageError(
                f"{self.file.path}: expected a file without errors, found a failed write; begin "
                "another"
            )

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all layers."""
        return self._stop

    def _ended(self, written: WrittenLayer) -> None:
        self._has_failed, self._is_durable = False, not self._fsync
        self._sequence += 1
        self._predecessor, self._stop = written.digest, written.stop


class OpenLayer:
    """A layer on its way to a file: what is in the current buffer, and where it belongs.

    Several threads may write its arrays; one finishes or abandons it.
    """

    def __init__(self, file: LayerFile, seed: int):
        """Called by ``LayerFile.start_layer``; ``seed`` is that of checksums."""
        self._file, self._seed = file, seed
        self._runtime, self._start = file._runtime, file.nbytes
        self._lock = threading.Lock()
        self._arrays: list[ArrayWriter] = []
        #: Row group to the bounds of each chunk of its row indices.
        self._bounds: dict[str, tuple[tuple[int, int], ...]] = {}
        #: Writes of earlier buffers.
        self._writes: collections.deque[tuple[Task[None], np.ndarray]] = collections.deque()
        self._buffer = self._next_buffer(PAGE_BYTES)
        #: Offset of the buffer in the layer, and the number of its bytes that are in use.
        self._first, self._used = 0, PAGE_BYTES
        self._buffer[:PAGE_BYTES] = 0
        #: Offset, length and CRC32C of each finished run of bytes, without the header.
        self._runs: list[tuple[int, int, int]] = []
        #: Offset of the current run, and the CRC32C of its bytes so far.
        self._run_start, self._run_crc = PAGE_BYTES, 0

    def write_rows(self, row_group: str, rows: Rows) -> LayerArray | None:
        """Writes the row indices of a row group, unless ``ranges_of`` describes them.

        Raises OptionError if they are not ascending.
        """
        if ranges_of(rows) is not None:
            return None
        gaps = _gaps(row_group, np.asarray(rows), self._file._chunk_bytes)
        array = self.array(row_group, GAPS, gaps.shape, gaps.dtype)
        array.write(gaps)
        found = array.entry()
        self._bounds[row_group] = _bounds(rows, found)
        return found

    def array(
        self,
        row_group: str,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        compression: Compression = "",
        *,
        check: bool = False,
    ) -> ArrayWriter:
        """Begins an array of a core dtype of Zarr v3 that is written piece by piece.

        ``check`` detects pieces that change before they are completely copied.
        """
        array = ArrayWriter(self, row_group, name, shape, dtype, compression, check)
        with self._lock:
            self._arrays.append(array)
        return array

    def finish(self, manifest: LayerManifest) -> WrittenLayer:
        """Writes the rest of the layer; it is durable after ``LayerFile.sync``.

        ``manifest`` has no sequence number, predecessor, arrays nor bounds of row groups.
        """
        try:
            written = self._finish(manifest)
        except BaseException:
            self.abandon()
            raise
        self._file._ended(written)
        return written

    def abandon(self) -> None:
        """Waits for pending writes of a layer that is not finished. Idempotent."""
        while self._writes:
            with contextlib.suppress(Exception):
                self._await_write()
        self._runtime.memory.give_back([self._buffer])

    def _finish(self, manifest: LayerManifest) -> WrittenLayer:
        groups = [
            dataclasses.replace(group, bounds=self._bounds.get(group.name, ()))
            for group in manifest.row_groups
        ]
        if any(array.row_group == REMOVED for array in self._arrays):
            groups.insert(0, RowGroup(name=REMOVED, group="", count=0, ranges=()))
        has_tombstones = any(
            codecs.is_constant(codec) for group in groups for codec in group.codecs.values()
        )
        manifest = dataclasses.replace(
            manifest,
            sequence=self._file._sequence,
            predecessor=self._file._predecessor,
            features=(footer.TOMBSTONES,) if has_tombstones else (),
            row_groups=tuple(groups),
            arrays=tuple(array.entry() for array in self._arrays),
        )
        data = footer.footer_bytes(manifest, self._offset)
        self._room(len(data))[: len(data)] = np.frombuffer(data, np.uint8)
        self._sum(self._buffer[self._used : self._used + len(data) - footer.CRC_BYTES])
        self._used += len(data)
        nbytes = self._offset
        header = np.frombuffer(Header.from_manifest(manifest, nbytes).page(), np.uint8)
        crc = 0
        if self._file._checksum:
            crc = crc32c(header)
            self._end_run(nbytes - footer.CRC_BYTES)
            for _, length, found in sorted(self._runs):
                crc = joined(crc, found, length)
        if self._first == 0:
            self._buffer[:PAGE_BYTES] = header
            self._file.file.write(self._start, self._buffer[:nbytes])
        else:
            self._start_write(PAGE_BYTES)
            while self._writes:
                self._await_write()
            self._buffer[:PAGE_BYTES] = header
            self._file.file.write(self._start, self._buffer[:PAGE_BYTES])
        self._runtime.memory.give_back([self._buffer])
        digest = int.from_bytes(data[-footer.CRC_BYTES :], "little")
        return WrittenLayer(self._start, self._start + nbytes, digest, crc)

    @property
    def _offset(self) -> int:
        return self._first + self._used

    def _room(self, nbytes: int) -> np.ndarray:
        """Free memory for the next bytes of the layer, at least ``nbytes``."""
        if self._used + nbytes > len(self._buffer):
            self._start_write(nbytes)
        return self._buffer[self._used :]

    def _start_write(self, nbytes: int) -> None:
        """Writes all whole pages, and continues in a buffer with room for ``nbytes``."""
        whole = self._used // PAGE_BYTES * PAGE_BYTES
        rest = self._buffer[whole : self._used]
        following = self._next_buffer(nbytes + len(rest))
        following[: len(rest)] = rest
        start = self._start + self._first
        write = self._runtime.submit(self._file.file.write, start, self._buffer[:whole])
        self._writes.append((write, self._buffer))
        self._buffer = following
        self._first, self._used = self._first + whole, len(rest)

    def _sum(self, data: np.ndarray) -> None:
        """Adds the next bytes of the layer to its checksum."""
        if self._file._checksum:
            self._run_crc = crc32c(data, self._run_crc)

    def _end_run(self, stop: int) -> None:
        self._runs.append((self._run_start, stop - self._run_start, self._run_crc))
        self._run_start, self._run_crc = stop, 0

    def _next_buffer(self, nbytes: int) -> np.ndarray:
        """Returns a buffer of at least ``nbytes``, after waiting for one to be written."""
        while len(self._writes) >= _BUFFERS - 1:
            self._await_write()
        shape = (max(nbytes, self._file._buffer_bytes),)
        return self._runtime.memory.allocate(shape, np.dtype(np.uint8))

    def _await_write(self) -> None:
        write, buffer = self._writes.popleft()
        try:
            write.result()
        finally:
            self._runtime.memory.give_back([buffer])

    def _append(self, array: ArrayWriter, rows: np.ndarray) -> None:
        """Adds whole chunks of an array."""
        if not array.compression:
            rows = rows[self._write_in_place(array, rows) :]
        while len(rows) and array.row_bytes:
            if array.compression:
                count = min(len(rows), array.chunk_rows)
                data = _compressed(np.ascontiguousarray(rows[:count]), array.compression)
                with self._lock:
                    padding = self._padding(array)
                    room = self._room(padding + len(data))
                    room[padding : padding + len(data)] = data
                    self._add_chunk(array, room, padding, len(data))
            else:
                with self._lock:
                    count = self._copy(array, rows)
            rows = rows[count:]

    def _copy(self, array: ArrayWriter, rows: np.ndarray) -> int:
        """Adds as many uncompressed chunks as fit into the buffer; returns the number of rows."""
        chunk_rows, row_bytes, padding = array.chunk_rows, array.row_bytes, self._padding(array)
        room = self._room(padding + min(chunk_rows, len(rows)) * row_bytes)
        # One copy instead of many.
        fitting = (len(room) - padding) // (chunk_rows * row_bytes) * chunk_rows
        count = min(len(rows), max(chunk_rows, fitting))
        data = np.ascontiguousarray(rows[:count]).reshape(-1).view(np.uint8)
        data = data.reshape(count * row_bytes)  # Rows of another shape raise ValueError.
        chunk_bytes = chunk_rows * row_bytes
        if whole := len(data) // chunk_bytes * chunk_bytes:
            sums, out = BlockSums(chunk_bytes), room[padding : padding + whole]
            sums.add(data[:whole], out)
            room[:padding] = 0
            self._sum(room[:padding])
            self._run_crc = self._add_chunks(
                array, self._offset + padding, room[:padding], sums.blocks, self._run_crc
            )
            self._used += padding + whole
            room, padding = room[padding + whole :], 0
        if len(data) > whole:
            room[padding : padding + len(data) - whole] = data[whole:]
            self._add_chunk(array, room, padding, len(data) - whole)
        return count

    def _write_in_place(self, array: ArrayWriter, rows: np.ndarray) -> int:
        """Adds the first chunks without a copy if possible and useful; returns how many rows."""
        chunk_bytes = array.chunk_rows * array.row_bytes
        # The last chunk ends at a page boundary.
        unit_bytes = math.lcm(chunk_bytes, PAGE_BYTES)
        nbytes = rows.nbytes // unit_bytes * unit_bytes if unit_bytes else 0
        if nbytes < _IN_PLACE_BYTES or not (rows.flags.c_contiguous and is_aligned(rows)):
            return 0
        with self._lock:
            if self._used + rows.nbytes <= len(self._buffer):
                return 0
            padding = self._room(PAGE_BYTES)[: -self._offset % PAGE_BYTES]
            padding[:] = 0
            self._sum(padding)
            self._used += len(padding)
            offset = self._reserve(nbytes)
        data = rows.reshape(-1).view(np.uint8)

        def write(start: int) -> bytes:
            piece = data[start : min(start + piece_bytes, nbytes)]
            sums = BlockSums(chunk_bytes)
            sums.add(piece)
            self._file.file.write(self._start + offset + start, piece)
            return sums.blocks

        piece_bytes = max(1, _PIECE_BYTES // unit_bytes) * unit_bytes
        pieces = self._runtime.map(write, range(0, nbytes, piece_bytes))
        before = np.zeros(len(padding), np.uint8)
        whole = self._add_chunks(array, offset, before, b"".join(pieces), 0)
        with self._lock:
            self._runs.append((offset, nbytes, whole))
        return nbytes // array.row_bytes

    def _reserve(self, nbytes: int) -> int:
        """Reserves bytes after the buffer, which ends at a page boundary; returns their offset."""
        if self._offset == PAGE_BYTES:
            self._first, self._used = PAGE_BYTES, 0  # The header is written last.
        elif self._used:
            self._start_write(0)
        offset = self._first
        self._end_run(offset)
        self._first += nbytes
        self._run_start = self._first
        return offset

    def _padding(self, array: ArrayWriter) -> int:
        """Bytes before the next chunk of an array: long arrays begin at a page."""
        is_long = not array.chunks and array.shape[0] * array.row_bytes >= PAGE_BYTES
        return -self._offset % (PAGE_BYTES if is_long else _ALIGNMENT)

    def _add_chunk(self, array: ArrayWriter, room: np.ndarray, padding: int, nbytes: int) -> None:
        """Adds padding and the bytes after it, which are in place, and describes them."""
        offset = self._offset + padding
        room[:padding] = 0
        data = room[padding : padding + nbytes]
        self._used += padding + nbytes
        self._sum(room[: padding + nbytes])
        crc = footer.chunk_crc32c(self._seed, offset, room[:padding], data)
        array.chunks.append((offset, nbytes, crc))

    def _add_chunks(
        self, array: ArrayWriter, offset: int, padding: np.ndarray, sums: bytes, crc: int
    ) -> int:
        """Describes chunks at ``offset``, after ``padding``; returns ``crc`` extended by them."""
        nbytes = array.chunk_rows * array.row_bytes
        join = joiner(nbytes)
        for found in np.frombuffer(sums, "<u4").tolist():
            seeded = footer.chunk_crc32c(self._seed, offset, padding, padding[:0])
            array.chunks.append((offset, nbytes, join(seeded, found)))
            crc, offset, padding = join(crc, found), offset + nbytes, padding[:0]
        return crc


class ArrayWriter:
    """Writes an array of a layer piece by piece; used by one thread."""

    def __init__(
        self,
        layer: OpenLayer,
        row_group: str,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        compression: Compression,
        check: bool,
    ):
        """Called by ``OpenLayer.array``."""
        self.row_group, self.name, self.shape, self.dtype = row_group, name, shape, dtype
        self.compression: Compression = compression
        self.row_bytes = math.prod(shape[1:]) * dtype.itemsize
        chunk_bytes = layer._file._chunk_bytes * (_COMPRESSED_FACTOR if compression else 1)
        self.chunk_rows = max(1, chunk_bytes // self.row_bytes if self.row_bytes else shape[0])
        if self.row_bytes:
            # Chunks of whole pages can be read and written without a copy.
            page_rows = PAGE_BYTES // math.gcd(PAGE_BYTES, self.row_bytes)
            self.chunk_rows = self.chunk_rows // page_rows * page_rows or self.chunk_rows
        #: Offset, length and CRC32C of each chunk.
        self.chunks: list[tuple[int, int, int]] = []
        self.check, self._layer, self._done = check, layer, 0
        #: The first rows of the next chunk, if a piece ended within it.
        self._rest: np.ndarray | None = None
        self._filled = 0

    def entry(self) -> LayerArray:
        """Returns the record of the array."""
        return LayerArray(
            row_group=self.row_group,
            name=self.name,
            shape=self.shape,
            dtype=self.dtype.name,
            chunk_rows=self.chunk_rows,
            compression=self.compression,
            chunks=np.array(self.chunks, CHUNK).tobytes(),
        )

    def write(self, rows: np.ndarray) -> None:
        """Appends rows, (n, *trailing); their memory may be reused when this returns.

        Raises StorageError if the rows changed while they were copied.
        """
        given = rows = rows.view(self.dtype) if rows.dtype != self.dtype else rows
        copied = 0
        while len(rows):
            at = self._done + self._filled
            is_end = at + len(rows) == self.shape[0]
            is_whole = not self._filled and (is_end or len(rows) >= self.chunk_rows)
            if is_whole and not self.check:
                whole = len(rows) if is_end else len(rows) - len(rows) % self.chunk_rows
                self._append(rows[:whole])
            else:
                whole = min(len(rows), self.chunk_rows - self._filled)
                if self._rest is None:
                    self._rest = np.empty((self.chunk_rows, *self.shape[1:]), self.dtype)
                copy = self._rest[self._filled : self._filled + whole]
                copy[:] = rows[:whole]
                if self.check:
                    copied = crc32c(copy, copied)
                self._filled += whole
                if self._filled == self.chunk_rows or at + whole == self.shape[0]:
                    filled, self._filled = self._filled, 0
                    self._append(self._rest[:filled])
            rows = rows[whole:]
        # The disk may have been waited for in between.
        if self.check and crc32c(np.ascontiguousarray(given)) != copied:
            raise StorageError(
                f"segment {self.row_group}, {self.name}: expected rows that stay as they are, "
                "found others: the arrays changed while they were written; do not write into numpy "
                "leaves, nor donate with base_snapshot='hold', before the save has released them. "
                "Nothing was committed"
            )

    def finish(self) -> int:
        """Ends the array; returns its stored bytes."""
        if self._done != self.shape[0]:
            raise ValueError(f"{self.name}: expected {self.shape[0]} rows, found {self._done}")
        return sum(nbytes for _, nbytes, _ in self.chunks)

    def remove(self) -> None:
        """Abandons the array: what is in the file already stays there, under another name."""
        layer = self._layer
        with layer._lock:
            # Readers ignore this row group.
            self.name = f"{self.row_group}/{self.name}.{layer._arrays.index(self)}"
            self.row_group, self.shape = REMOVED, (self._done, *self.shape[1:])
        self._rest = None

    def _append(self, rows: np.ndarray) -> None:
        self._done += len(rows)
        self._layer._append(self, rows)


def ranges_of(rows: Rows) -> tuple[Span, ...] | None:
    """Returns the ranges of a row group's rows; None if they are stored as gaps."""
    if isinstance(rows, np.ndarray):
        return None if len(rows) else ()
    return spans_of(rows)


def _gaps(row_group: str, rows: np.ndarray, chunk_bytes: int) -> np.ndarray:
    gaps = np.diff(rows.astype(np.int64, copy=False), prepend=0)
    if gaps[0] < 0 or np.any(gaps[1:] <= 0):
        raise OptionError(
            f"row group {row_group!r}: expected ascending row indices, found others; sort them"
        )
    most = int(gaps[1:].max(initial=0))
    dtype = next(one for one in map(np.dtype, footer.GAPS_DTYPES) if most <= np.iinfo(one).max)
    # The bounds have the first row of each chunk.
    gaps[:: max(1, chunk_bytes // dtype.itemsize)] = 0
    return gaps.astype(dtype)


def _bounds(rows: Rows, gaps: LayerArray) -> tuple[tuple[int, int], ...]:
    held = np.asarray(rows)
    firsts = held[:: gaps.chunk_rows]
    lasts = held[[*range(gaps.chunk_rows - 1, len(held) - 1, gaps.chunk_rows), len(held) - 1]]
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _compressed(plain: np.ndarray, compression: Compression) -> np.ndarray:
    found = arrays.compressed(plain, byte_planes=compression == "planes")
    # Uncompressed chunks are recognized by their length, and have no planes.
    return np.frombuffer(found if len(found) < plain.nbytes else plain, np.uint8)


class LayerSegmentSink(NamedTuple):
    """The destination of one segment's arrays in a layer; see ``shard_writer.SegmentSink``."""

    layer: OpenLayer
    segment: str

    def writer(self, entry: ArrayEntry, *, pinned: bool = False) -> ArrayWriter:
        """See ``SegmentSink``."""
        dtype, compression = np.dtype(entry.dtype), compression_of(entry)
        return self.layer.array(
            self.segment, entry.name, entry.shape, dtype, compression, check=pinned
        )

    def write_rows(self, rows: np.ndarray) -> ArrayEntry:
        """See ``SegmentSink``."""
        stored = self.layer.write_rows(self.segment, rows)
        dtype = np.dtype(np.uint8 if stored is None else stored.dtype)
        return array_entry(naming.GAPS, rows.shape, dtype)


class LayerShard:
    """Writes the layer of one process's shard of a delta."""

    def __init__(
        self,
        item_dir: Path,
        save_id: SaveId,
        parent: SaveId | None,
        batch: FileBatch,
        runtime: Runtime,
        *,
        process: int,
        process_count: int,
    ):
        """Creates the file in the item's directory; ``batch`` fsyncs it and keeps its digest."""
        self._batch = batch
        self._manifest = LayerManifest(
            save_id=save_id, parent=parent, process=process, process_count=process_count
        )
        file = DirectFile(item_dir / naming.layer_name(process), pace=batch.pace)
        #: None once the batch has it.
        self._file: DirectFile | None = file
        try:
            self._layer = LayerFile(file, runtime).start_layer(self._manifest)
        except BaseException:
            file.close()
            raise

    def place(self, segment: str) -> LayerSegmentSink:
        """Returns the destination of a segment."""
        return LayerSegmentSink(self._layer, segment)

    def finish(self, segments: Sequence[Segment]) -> LayerRef:
        """Writes the rest of the file; the caller then fsyncs the batch."""
        manifest = dataclasses.replace(
            self._manifest, row_groups=tuple(map(row_group_of, segments))
        )
        written = self._layer.finish(manifest)
        digest = Digest(written.stop, written.crc32c, written.digest)
        file, self._file = self._file, None
        assert file is not None
        self._batch.adopt_open(file, digest)
        return LayerRef(nbytes=written.stop, crc32c=written.crc32c, digest=written.digest)

    def __enter__(self) -> LayerShard:
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the file of a save that has failed, unless the batch has it."""
        if self._file is not None:
            self._layer.abandon()
            with contextlib.suppress(StorageError):
                self._file.close()


def row_group_of(segment: Segment) -> RowGroup:
    """Returns the row group with the arrays of a segment."""
    kind: Kind = "blocks" if BLOCKS in segment.fields else "rows"
    if segment.group == PLAIN:
        kind = "item"
    return RowGroup(
        name=segment.name,
        group=segment.group,
        kind=kind,
        count=segment.count,
        columns=segment.columns,
        ranges=() if segment.ranges is None and not segment.count else segment.ranges,
        codecs={encoding.field: encoding.codec for encoding in segment.encodings},
    )
