# SPDX-License-Identifier: Apache-2.0
"""The dense leaves of a delta, whole: copied when it is captured, stored in its shard.

They are one segment of raw blocks per dtype, and one of bytes. No older save is needed to read
them, and nothing is kept in memory after the save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from deltackpt.format.segments import Segment
from deltackpt.resources.staging import Staging
from deltackpt.save import coded_dense, dense_layout
from deltackpt.save.coded_dense import WrittenDense
from deltackpt.storage import parts
from deltackpt.storage.parts import Place

#: Smaller groups are copied into memory of their own.
_STAGED_BYTES = 128 << 10
#: Fewer plain bytes are not worth the time of the compressor's threads.
_COMPRESSED_BYTES = 64 << 10

_RAW = "raw"


class _Plain(NamedTuple):
    """A value that is stored as bytes.

    Attributes:
      key: key in Orbax's database, or a file's path in the item.
      data: its bytes.
      file: whether it is a file.
    """

    key: str
    data: bytes
    file: bool = False


class _Group(NamedTuple):
    """Blocks of one dtype.

    Attributes:
      dtype: the dtype.
      counts: key and number of elements of each value, in the order of their blocks.
      pieces: their blocks, (n, 256) each, end to end.
    """

    dtype: np.dtype
    counts: list[tuple[str, int]]
    pieces: list[np.ndarray]


class WholeDense:
    """The dense leaves that this process writes, independent of later training steps."""

    def __init__(
        self,
        plain: Sequence[_Plain],
        groups: Sequence[_Group],
        staging: Staging,
        lent: list[np.ndarray],
    ):
        """Created by ``capture``."""
        self._plain = plain
        self._groups = groups
        self._staging = staging
        self._lent = lent
        #: Bytes of what is to be written.
        self.nbytes = sum(len(value.data) for value in plain) + sum(
            piece.nbytes for group in groups for piece in group.pieces
        )

    @classmethod
    def capture(cls, tree: Any, process: int, staging: Staging) -> WholeDense:
        """Copies the values that this process writes; waits for accelerators.

        Values of the host get one buffer per dtype in the layout of its segment, which is then
        written without another copy. Copies of accelerators are already memory of their own.

        Args:
          tree: nested containers of leaves.
          process: index of this process.
          staging: provides the memory for the copies.

        Raises:
          UnsupportedLeaf: Orbax's handler must write the leaves.
        """
        plan = dense_layout.plan(tree, process)
        chunks = plan.fetched()
        plain = [_Plain(name, text.encode(), file=True) for name, text in plan.files.items()]
        plain += [_Plain(key, data) for key, data in plan.described.items()]
        on_host: dict[np.dtype, list[tuple[str, np.ndarray]]] = {}
        fetched: dict[np.dtype, list[tuple[str, np.ndarray]]] = {}
        is_blocked: dict[np.dtype, bool] = {}
        for chunk, found in chunks:
            dtype = found.dtype
            if dtype not in is_blocked:
                is_blocked[dtype] = dtype.isnative and dtype.name in dense_blocks.BLOCKED_DTYPES
            if found.nbytes < dense_blocks.PLAIN_BYTES or not is_blocked[dtype]:
                plain.append(_Plain(chunk.key, found.tobytes()))
            else:
                of_dtype = on_host if chunk.on_host else fetched
                of_dtype.setdefault(dtype, []).append((chunk.key, found))
        lent: list[np.ndarray] = []
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        groups = []
        try:
            for dtype in sorted({*on_host, *fetched}, key=str):
                group = _Group(dtype, [], [])
                if dtype in on_host:
                    _lay_out(on_host[dtype], group, copies, staging, lent)
                for key, found in fetched.get(dtype, ()):
                    group.counts.append((key, found.size))
                    group.pieces.extend(_blocks(np.ascontiguousarray(found).reshape(-1)))
                groups.append(group)
            staging.copy(copies)
        except BaseException:
            staging.take_back(lent)
            raise
        return cls(plain, groups, staging, lent)

    def write(self, place_of: Callable[[str], Place]) -> WrittenDense:
        """Writes the segments, and releases the memory.

        Args:
          place_of: returns the destination of a segment.
        """
        try:
            segments = []
            if data := b"".join(value.data for value in self._plain):
                held = [np.frombuffer(data, np.uint8)]
                zstd = len(data) >= _COMPRESSED_BYTES
                segments.append(coded_dense.write_plain(place_of, held, zstd=zstd))
            segments += (_write_group(place_of, group) for group in self._groups)
        finally:
            self.release()
        record = DenseBlocks(
            values=tuple(self._values()),
            segments=tuple(segments),
            complete=True,
        )
        nbytes = sum(encoding.nbytes for segment in segments for encoding in segment.encodings)
        return WrittenDense(record, nbytes, ())

    def _values(self) -> Iterator[BlockedValue]:
        """Yields all values with their positions."""
        at = 0
        for key, data, file in self._plain:
            count = len(data)
            yield BlockedValue(key=key, file=file, dtype="uint8", count=count, group=PLAIN, at=at)
            at += count
        for dtype, counts, _ in self._groups:
            name, at = dtype.name, 0
            for key, count in counts:
                yield BlockedValue(key=key, dtype=name, count=count, group=name, at=at)
                at += dense_blocks.blocks_of(count)

    def release(self) -> None:
        """Releases the memory. Idempotent."""
        for group in self._groups:
            group.pieces.clear()
        self._staging.take_back(self._lent)


def _lay_out(
    values: Sequence[tuple[str, np.ndarray]],
    group: _Group,
    copies: list[tuple[np.ndarray, np.ndarray]],
    staging: Staging,
    lent: list[np.ndarray],
) -> None:
    """Adds values of the host to a group, as one buffer.

    Args:
      values: keys and values.
      group: gets the buffer.
      copies: gets the copies to make, as destination and source.
      staging: provides the buffer.
      lent: gets the buffer if it must be given back.
    """
    starts = [0]
    for _, found in values:
        starts.append(starts[-1] + dense_blocks.blocks_of(found.size) * BLOCK)
    shape = (starts[-1] // BLOCK, BLOCK)
    if starts[-1] * group.dtype.itemsize < _STAGED_BYTES:
        buffer = np.empty(shape, group.dtype)
    else:
        buffer = staging.take(shape, group.dtype)
        lent.append(buffer)
    flat = buffer.reshape(-1)
    for (key, found), start, stop in zip(values, starts, starts[1:], strict=False):
        end = start + found.size
        copies.append((flat[start:end].reshape(found.shape), found))
        if end < stop:
            flat[end:stop] = 0
        group.counts.append((key, found.size))
    group.pieces.append(buffer)


def _blocks(flat: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the full blocks of a value, and its last one, padded."""
    full = len(flat) // BLOCK * BLOCK
    if full:
        yield flat[:full].reshape(-1, BLOCK)
    if full < len(flat):
        last = np.zeros((1, BLOCK), flat.dtype)
        last[0, : len(flat) - full] = flat[full:]
        yield last


def _write_group(place_of: Callable[[str], Place], group: _Group) -> Segment:
    """Writes all blocks of one dtype."""
    name = group.dtype.name
    place = place_of(f"{dense_blocks.SEGMENTS}{name}.{_RAW}")
    [(suffix, array)] = of_blocks.get(_RAW).stored(group.dtype).items()
    held = [piece.view(array.dtype) for piece in group.pieces]
    rows = range(sum(map(len, held)))
    stored = parts.write_array(place, coded_dense.entry_of(suffix, array, held), held)
    field = parts.stored_field(
        BLOCKS, stored, codec=_RAW, reason="", bounds=np.array([0, len(rows)])
    )
    return parts.stored_segment(place, name, (0, BLOCK), rows, parts.StoredArrays((), 0), [field])
