# SPDX-License-Identifier: Apache-2.0
"""Arrays in the body of a WAL frame: raw, or in zstd chunks.

A chunk has the same rows as in a step. It is one zstd frame that states its length, or raw bytes if
compression gains nothing; the sizes in the frame's head distinguish them.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import zstandard

from deltackpt.errors import Damaged
from deltackpt.format import frames
from deltackpt.format.frames import Buffer, Sizes
from deltackpt.format.segments import ArrayEntry
from deltackpt.storage import arrays


class Body(NamedTuple):
    """The body of a new frame.

    Attributes:
      arrays: bytes of each array, in pieces.
      sizes: see ``frames.Sizes``; empty if no array is compressed.
    """

    arrays: list[Sequence[Buffer]]
    sizes: Sizes


def body_of(
    held: Iterable[tuple[ArrayEntry, Sequence[np.ndarray]]], pool: concurrent.futures.Executor
) -> Body:
    """Encodes arrays for a frame.

    Args:
      held: each array with its pieces in order.
      pool: compresses chunks.
    """
    waiting: list[tuple[Sequence[Buffer], list[concurrent.futures.Future[Buffer]]]] = []
    for entry, pieces in held:
        chunks: list[concurrent.futures.Future[Buffer]] = []
        if entry.compressed and entry.nbytes:
            rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            for start in range(0, len(rows), entry.chunk_rows):
                chunk = rows[start : start + entry.chunk_rows]
                chunks.append(pool.submit(_compressed, entry, chunk))
        waiting.append((pieces, chunks))
    bodies: list[Sequence[Buffer]] = []
    sizes: list[tuple[int, ...]] = []
    for pieces, chunks in waiting:
        found = [chunk.result() for chunk in chunks]
        bodies.append(found or pieces)
        sizes.append(tuple(_nbytes(chunk) for chunk in found))
    return Body(bodies, tuple(sizes) if any(sizes) else ())


def arrays_of(
    entries: Sequence[ArrayEntry], sizes: Sizes, body: memoryview, name: str
) -> dict[str, np.ndarray]:
    """Decodes whole arrays by name; raw ones as views of the body.

    Args:
      entries: descriptions of all arrays of the body.
      sizes: sizes from the frame's head.
      body: the body.
      name: the frame's name in errors.

    Raises:
      Damaged: the body does not match.
    """
    stored = stored_of(entries, sizes, body, name)
    return {one.entry.name: one.rows(0, one.entry.shape[0]) for one in stored}


class StoredArray(NamedTuple):
    """An array in a body.

    Attributes:
      entry: its description.
      sizes: sizes of its chunks; empty if it is raw.
      data: its bytes.
      name: name of the frame in errors.
    """

    entry: ArrayEntry
    sizes: tuple[int, ...]
    data: memoryview
    name: str

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Returns rows ``[start, stop)``: a view if they are raw, or in one chunk.

        Raises:
          Damaged: the bytes do not encode such an array.
        """
        entry, dtype = self.entry, np.dtype(self.entry.dtype)
        if not self.sizes:
            return np.frombuffer(self.data, dtype).reshape(entry.shape)[start:stop]
        if start >= stop:
            return np.empty((0, *entry.shape[1:]), dtype)
        first, last = start // entry.chunk_rows, (stop - 1) // entry.chunk_rows
        chunks = [self._chunk(number) for number in range(first, last + 1)]
        rows = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        offset = first * entry.chunk_rows
        return rows[start - offset : stop - offset]

    def _chunk(self, number: int) -> np.ndarray:
        entry = self.entry
        start, rows = sum(self.sizes[:number]), frames.chunk_rows(entry, number)
        data = self.data[start : start + self.sizes[number]]
        dtype, shape = np.dtype(entry.dtype), (rows, *entry.shape[1:])
        nbytes = frames.chunk_bytes(entry, number)
        if data.nbytes == nbytes:
            return np.frombuffer(data, dtype).reshape(shape)
        plain = decompressed(data, nbytes, self.name)
        if not entry.byte_planes:
            return np.frombuffer(plain, dtype).reshape(shape)
        planes = np.frombuffer(plain, dtype).reshape(shape[-1], *shape[:-1])
        return np.ascontiguousarray(np.moveaxis(planes, 0, -1))


def stored_of(
    entries: Sequence[ArrayEntry], sizes: Sizes, body: memoryview, name: str
) -> list[StoredArray]:
    """Locates the arrays of a body.

    Raises:
      Damaged: the body has another length.
    """
    of_each = sizes or ((),) * len(entries)
    nbytes = [
        sum(own) if own else entry.nbytes for entry, own in zip(entries, of_each, strict=True)
    ]
    data = frames.pieces_of(nbytes, body, name)
    return [
        StoredArray(entry, own, one, name)
        for entry, own, one in zip(entries, of_each, data, strict=True)
    ]


def _compressed(entry: ArrayEntry, rows: np.ndarray) -> Buffer:
    stored = np.moveaxis(rows, -1, 0) if entry.byte_planes else rows
    plain = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    level = arrays.zstd_level(entry)
    found = zstandard.ZstdCompressor(level=level).compress(plain.data)
    # Raw: not as byte planes.
    return found if len(found) < plain.nbytes else np.ascontiguousarray(rows)


def _nbytes(chunk: Buffer) -> int:
    return len(chunk) if isinstance(chunk, bytes) else chunk.nbytes


def decompressed(data: memoryview, nbytes: int, name: str) -> bytes:
    """Returns the bytes of a zstd frame that must have a given length.

    Raises:
      Damaged: it is not one.
    """
    try:
        # Decoding allocates as many bytes as the data claim.
        if (claimed := zstandard.frame_content_size(data)) != nbytes:
            raise Damaged(name, f"a chunk of {nbytes} bytes", f"{claimed} bytes")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise Damaged(name, "bytes of zstd", str(error)) from error
