# SPDX-License-Identifier: Apache-2.0
"""The dense leaves of a delta, whole: copied when it is captured, stored in its shard.

They are one segment of raw blocks per dtype, and one of bytes. No older save is needed to read
them, and nothing is kept in memory after the save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deltackpt.codecs import of_blocks
from deltackpt.format import dense_blocks
from deltackpt.format.dense_blocks import (
    BLOCK,
    BLOCKS,
    PLAIN,
    BlockedValue,
    DenseBlocks,
)
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.segments import Segment
from deltackpt.resources.staging import Staging
from deltackpt.save import coded_dense, dense_layout
from deltackpt.save.coded_dense import WrittenDense
from deltackpt.save.dense_layout import Chunk
from deltackpt.state import placement
from deltackpt.storage import parts
from deltackpt.storage.parts import Place

#: Smaller groups are copied into memory of their own.
_STAGED_BYTES = 128 << 10
#: Fewer plain bytes are not worth the time of the compressor's threads.
_COMPRESSED_BYTES = 64 << 10

_RAW = "raw"


class _Group(NamedTuple):
    """Blocks of one dtype.

    Attributes:
      values: the values, in the order of their blocks.
      pieces: their blocks, (n, 256) each, end to end.
    """

    values: list[BlockedValue]
    pieces: list[np.ndarray]


class WholeDense:
    """The dense leaves that this process writes, independent of later training steps."""

    def __init__(
        self,
        plain: Sequence[BlockedValue],
        data: bytes,
        groups: Mapping[str, _Group],
        staging: Staging,
        lent: list[np.ndarray],
    ):
        """Created by ``capture``."""
        self._plain = plain
        self._data = data
        self._groups = groups
        self._staging = staging
        self._lent = lent
        #: Bytes of what is to be written.
        self.nbytes = len(data) + sum(
            piece.nbytes for group in groups.values() for piece in group.pieces
        )

    @classmethod
    def capture(cls, tree: Any, process: int, staging: Staging) -> WholeDense:
        """Copies the values that this process writes; waits for accelerators.

        Args:
          tree: nested containers of leaves.
          process: index of this process.
          staging: provides the memory for the copies.

        Raises:
          UnsupportedLeaf: Orbax's handler must write the leaves.
        """
        plan = dense_layout.plan(tree, process)
        chunks = [
            chunk if chunk.on_host else chunk._replace(source=placement.host_copy(chunk.source))
            for chunk in plan.chunks
        ]
        plain = _Plain()
        for name, text in plan.files.items():
            plain.add(name, text.encode(), file=True)
        for key, data in plan.described.items():
            plain.add(key, data)
        blocked: dict[str, list[tuple[Chunk, np.ndarray]]] = {}
        for chunk in chunks:
            found = np.asarray(chunk.source)[chunk.window]
            if dense_blocks.is_plain(found.nbytes, found.dtype.name) or not found.dtype.isnative:
                plain.add(chunk.key, found.tobytes())
            else:
                blocked.setdefault(found.dtype.name, []).append((chunk, found))
        lent: list[np.ndarray] = []
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        try:
            groups = {
                name: _group(blocked[name], copies, staging, lent) for name in sorted(blocked)
            }
            staging.copy(copies)
        except BaseException:
            _give_back(lent, staging)
            raise
        return cls(plain.values, b"".join(plain.data), groups, staging, lent)

    def write(self, place_of: Callable[[str], Place]) -> WrittenDense:
        """Writes the segments, and releases the memory.

        Args:
          place_of: returns the destination of a segment.
        """
        try:
            segments = []
            if self._data:
                zstd = len(self._data) >= _COMPRESSED_BYTES
                data = np.frombuffer(self._data, np.uint8)
                segments.append(coded_dense.write_plain(place_of, [data], zstd=zstd))
            segments += (
                _write_group(place_of(f"{dense_blocks.SEGMENTS}{name}.{_RAW}"), name, group)
                for name, group in self._groups.items()
            )
        finally:
            self.release()
        values = [value for group in self._groups.values() for value in group.values]
        record = DenseBlocks(
            values=(*self._plain, *dense_blocks.laid_out(values)),
            segments=tuple(segments),
            complete=True,
        )
        nbytes = sum(encoding.nbytes for segment in segments for encoding in segment.encodings)
        return WrittenDense(record, nbytes, ())

    def release(self) -> None:
        """Releases the memory. Idempotent."""
        for group in self._groups.values():
            group.pieces.clear()
        _give_back(self._lent, self._staging)


class _Plain:
    """Values that are stored as bytes, end to end."""

    def __init__(self) -> None:
        self.values: list[BlockedValue] = []
        self.data: list[bytes] = []
        self._end = 0

    def add(self, key: str, data: bytes, *, file: bool = False) -> None:
        self.values.append(
            BlockedValue(
                key=key, file=file, dtype="uint8", count=len(data), group=PLAIN, at=self._end
            )
        )
        self.data.append(data)
        self._end += len(data)


def _group(
    chunks: Sequence[tuple[Chunk, np.ndarray]],
    copies: list[tuple[np.ndarray, np.ndarray]],
    staging: Staging,
    lent: list[np.ndarray],
) -> _Group:
    """Lays out the blocks of one dtype.

    Values of the host get one buffer in the layout of the segment, which is then written without
    another copy. Copies of accelerators are already memory of their own.

    Args:
      chunks: the chunks and their values.
      copies: gets the copies to make, as destination and source.
      staging: provides the buffer.
      lent: gets the buffer if it must be given back.
    """
    # A stable sort: values of the host first.
    ordered = sorted(chunks, key=lambda one: not one[0].on_host)
    dtype = ordered[0][1].dtype
    values = [
        BlockedValue(key=chunk.key, dtype=dtype.name, count=found.size, group=dtype.name, at=None)
        for chunk, found in ordered
    ]
    count = sum(
        value.blocks for value, (chunk, _) in zip(values, ordered, strict=True) if chunk.on_host
    )
    pieces: list[np.ndarray] = []
    if count:
        shape = (count, BLOCK)
        if count * BLOCK * dtype.itemsize < _STAGED_BYTES:
            buffer = np.empty(shape, dtype)
        else:
            buffer = staging.take(shape, dtype)
            lent.append(buffer)
        pieces.append(buffer)
        left = buffer.reshape(-1)
    for value, (chunk, found) in zip(values, ordered, strict=True):
        if not chunk.on_host:
            pieces += _blocks(np.ascontiguousarray(found).reshape(-1))
            continue
        copies.append((left[: found.size].reshape(found.shape), found))
        left[found.size : value.blocks * BLOCK] = 0
        left = left[value.blocks * BLOCK :]
    return _Group(values, pieces)


def _blocks(flat: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the full blocks of a value, and its last one, padded."""
    full = len(flat) // BLOCK * BLOCK
    if full:
        yield flat[:full].reshape(-1, BLOCK)
    if full < len(flat):
        last = np.zeros((1, BLOCK), flat.dtype)
        last[0, : len(flat) - full] = flat[full:]
        yield last


def _write_group(place: Place, name: str, group: _Group) -> Segment:
    """Writes all blocks of one dtype."""
    [(suffix, array)] = of_blocks.get(_RAW).stored(dtype_of(name)).items()
    held = [piece.view(array.dtype) for piece in group.pieces]
    rows = range(sum(map(len, held)))
    stored = parts.write_array(place, coded_dense.entry_of(suffix, array, held), held)
    field = parts.stored_field(
        BLOCKS, stored, codec=_RAW, reason="", bounds=np.array([0, len(rows)])
    )
    return parts.stored_segment(place, name, (0, BLOCK), rows, parts.StoredArrays((), 0), [field])


def _give_back(lent: list[np.ndarray], staging: Staging) -> None:
    while lent:
        staging.give_back(lent.pop())
