# SPDX-License-Identifier: Apache-2.0
"""Zarr v3 arrays: their descriptions, and reads directly into the caller's memory.

Shapes come from the ``ArrayEntry`` in the manifest, since ``zarr.json`` has no checksum. Every
chunk ends with its CRC32C; only uncompressed chunks are read without TensorStore.
"""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deltackpt.errors import Damaged, StorageError
from deltackpt.format.row_blocks import ArrayEntry
from deltackpt.lazy_import import ts
from deltackpt.resources import host_memory
from deltackpt.storage.digests import BLOCK_BYTES, CRC_BYTES, ChunkSums, crc32c
from deltackpt.storage.kv_store import reachable
from deltackpt.storage.store import FileStore, Missing, StorePath, store_path

#: System errors that mean a missing or inaccessible chunk, so that an older step may work. Running
#: out of descriptors or memory is not one of them.
_UNOPENED = (
    *(errno.EACCES, errno.ELOOP, errno.ENXIO, errno.EPERM, errno.ENAMETOOLONG),
    *(errno.EIO, errno.ESTALE, errno.EROFS),
)
#: Bytes that are read and then verified in one piece, small enough to stay in the CPU cache.
_RUN_BYTES = 4 << 20
#: By dtype kind, in Zarr v3 JSON.
_FILL_VALUES: dict[str, object] = {"b": False, "c": [0.0, 0.0], "f": 0.0}


def chunk_bytes(entry: ArrayEntry) -> int:
    """Returns the file size of an uncompressed chunk, including its CRC32C."""
    row_bytes = int(np.prod(entry.shape[1:], dtype=np.int64)) * np.dtype(entry.dtype).itemsize
    return entry.chunk_rows * row_bytes + CRC_BYTES


def read_array(
    directory: StorePath | Path,
    entry: ArrayEntry,
    start: int,
    stop: int,
    out: np.ndarray,
    *,
    checksums: Mapping[str, ChunkSums] | None = None,
) -> None:
    """Reads rows ``[start, stop)`` into ``out``, contiguous, of the stored dtype; verifies them.

    ``checksums``, by path below ``directory``, reject intact chunks of other arrays or saves. With
    block checksums, only the blocks around the rows are read. A bad chunk raises ``Damaged``.
    """
    directory = store_path(directory)
    while start < stop:
        chunk = start // entry.chunk_rows
        first = chunk * entry.chunk_rows
        end = min(stop, first + entry.chunk_rows)
        piece, out = out[: end - start], out[end - start :]
        whole = start == first and end == min(first + entry.chunk_rows, entry.shape[0])
        name = chunk_name(entry, chunk)
        at = directory / name
        sums = None
        if checksums is not None:
            sums = checksums.get(name)
            if sums is None:
                raise Damaged(_shown(at), "a chunk listed in the digests", "an unlisted chunk")
        if not entry.compressed and piece.flags.c_contiguous:
            if whole:
                _read_chunk(at, piece, sums, padding_rows=first + entry.chunk_rows - end)
                start = end
                continue
            host_memory.populate(piece)
            if sums is not None and sums.blocks:
                _read_blocks(at, entry, piece, start - first, sums)
                start = end
                continue
        if sums is not None:
            _check_place(at, sums.crc32c)
        _read_through_tensorstore(directory, entry, start, end, piece, at)
        start = end


def chunk_name(entry: ArrayEntry, chunk: int) -> str:
    """Returns the path of a chunk below the array's directory."""
    return ".".join(("c", str(chunk), *("0" for _ in entry.shape[1:])))


def _shown(at: StorePath) -> str:
    return at.shown(6)


def _check_place(at: StorePath, expected: int) -> None:
    """Checks that a chunk is the one that was written at this position."""
    tail = bytearray(CRC_BYTES)
    with _chunk(at):
        at.store.read_into(at.key, -CRC_BYTES, [memoryview(tail)])
    _check_tail(at, tail, expected)


def _check_tail(at: StorePath, tail: bytes | bytearray, expected: int) -> None:
    found = int.from_bytes(tail, "little")
    if found != expected:
        raise Damaged(
            _shown(at),
            f"the chunk with crc32c {expected:08x}",
            f"the chunk with crc32c {found:08x}",
        )


def _chunk(at: StorePath) -> contextlib.AbstractContextManager[None]:
    return unreadable_is_damage(_shown(at), "a chunk")


@contextlib.contextmanager
def unreadable_is_damage(name: str, kind: str) -> Iterator[None]:
    """Names an object and its kind ("a chunk") in errors; an inaccessible one counts as damaged."""
    try:
        yield
    except Missing as error:
        raise Damaged(name, kind, error.found) from error
    except Damaged as error:
        raise Damaged(name, error.expected, error.found) from error
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _UNOPENED:
            raise Damaged(name, f"{kind} that can be read", f"{cause.strerror}") from error
        raise


def _read_chunk(
    at: StorePath, out: np.ndarray, sums: ChunkSums | None, *, padding_rows: int
) -> None:
    """Reads a whole chunk: rows, padding of the last chunk, CRC32C of both."""
    data = out.reshape(-1).view(np.uint8)
    padding_bytes = padding_rows * (data.nbytes // max(1, len(out)))
    end = np.empty(padding_bytes + CRC_BYTES, np.uint8)
    found, start = 0, 0
    with _chunk(at):
        is_file = isinstance(at.store, FileStore)
        if is_file and at.store.length(at.key) == data.nbytes + end.nbytes:
            for stop in range(_RUN_BYTES, data.nbytes, _RUN_BYTES):
                section = data[start:stop]
                host_memory.populate(section)
                at.store.read_into(at.key, start, [section.data])
                found, start = crc32c(section, found), stop
        host_memory.populate(data[start:])
        at.store.read_into(at.key, start, [data[start:].data, end.data], whole=True)
    padding, tail = end[:padding_bytes], end[padding_bytes:].tobytes()
    if sums is not None:
        _check_tail(at, tail, sums.crc32c)
    expected = int.from_bytes(tail, "little")
    found = crc32c(padding, crc32c(data[start:], found))
    if found != expected:
        raise Damaged(_shown(at), f"crc32c {expected:08x}", f"crc32c {found:08x}")


def _read_blocks(
    at: StorePath, entry: ArrayEntry, out: np.ndarray, first_row: int, sums: ChunkSums
) -> None:
    """Reads some rows of a chunk by blocks; the blocks at both ends through a buffer."""
    wanted = out.reshape(-1).view(np.uint8)
    total = chunk_bytes(entry) - CRC_BYTES
    row_bytes = total // entry.chunk_rows
    start = first_row * row_bytes
    stop = start + wanted.nbytes
    first = start // BLOCK_BYTES * BLOCK_BYTES
    last = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, total)
    # Blocks from `inner` to `end` are completely within the wanted rows.
    inner = min(-(-start // BLOCK_BYTES) * BLOCK_BYTES, last)
    end = max(inner, last if last == stop else stop // BLOCK_BYTES * BLOCK_BYTES)
    sections = [
        np.empty(inner - first, np.uint8),
        wanted[inner - start : end - start] if inner < end else wanted[:0],
        np.empty(last - end, np.uint8),
    ]
    with _chunk(at):
        at.store.read_into(at.key, first, [section.data for section in sections])
    crcs = np.frombuffer(sums.blocks, "<u4")
    if len(crcs) != -(-total // BLOCK_BYTES):
        count = -(-total // BLOCK_BYTES)
        raise Damaged(_shown(at), f"checksums of {count} blocks", f"{len(crcs)}")
    number = first // BLOCK_BYTES
    for section in sections:
        for begin in range(0, section.nbytes, BLOCK_BYTES):
            found, expected = crc32c(section[begin : begin + BLOCK_BYTES]), int(crcs[number])
            if found != expected:
                name = f"{_shown(at)}, block {number}"
                raise Damaged(name, f"crc32c {expected:08x}", f"crc32c {found:08x}")
            number += 1
    for section, begin in ((sections[0], first), (sections[2], end)):
        low, high = max(begin, start), min(begin + section.nbytes, stop)
        if low < high:
            wanted[low - start : high - start] = section[low - begin : high - begin]


def _read_through_tensorstore(
    directory: StorePath, entry: ArrayEntry, start: int, stop: int, out: np.ndarray, at: StorePath
) -> None:
    with _chunk(at):
        found = reachable(directory, [at.below(directory)])
    spec = spec_of(found.spec, entry)
    try:
        # The manifest is authoritative: zarr.json is not read.
        store = ts.open(spec, open=True, assume_metadata=True, context=found.context).result()
        ts.array(out).write(store[start:stop]).result()
    except (ValueError, OSError) as error:
        if not at.is_file():
            raise Damaged(_shown(at), "a chunk", "no such file") from error
        found = str(error).splitlines()[0]
        raise Damaged(_shown(at), "a chunk with its checksum", found) from error


@functools.cache
def unsynced() -> Any:
    """Returns a TensorStore context that does not fsync."""
    return ts.Context({"file_io_sync": False})


def spec_of(kvstore: Mapping[str, object], entry: ArrayEntry) -> dict[str, object]:
    """Returns the spec of an array for TensorStore's Zarr v3 driver."""
    return {
        "driver": "zarr3",
        "kvstore": dict(kvstore),
        "metadata": metadata_of(entry),
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def metadata_of(entry: ArrayEntry) -> dict[str, object]:
    """Returns the Zarr v3 metadata of an array, without the constant parts."""
    codecs: list[dict[str, object]] = [{"name": "bytes"}]
    if np.dtype(entry.dtype).itemsize > 1:
        codecs[0]["configuration"] = {"endian": "little"}
    if entry.byte_planes:
        last = len(entry.shape) - 1
        codecs.insert(0, {"name": "transpose", "configuration": {"order": [last, *range(last)]}})
    if entry.compressed:
        # Higher levels gain nothing on byte planes of floats.
        level = 1 if entry.byte_planes else 3
        codecs.append({"name": "zstd", "configuration": {"level": level}})
    codecs.append({"name": "crc32c"})
    grid = {"chunk_shape": [entry.chunk_rows, *entry.shape[1:]]}
    return {
        "shape": list(entry.shape),
        "chunk_grid": {"name": "regular", "configuration": grid},
        # All chunks in one directory, which is fsynced once.
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "data_type": entry.dtype,
        "codecs": codecs,
        "fill_value": _FILL_VALUES.get(np.dtype(entry.dtype).kind, 0),
    }
