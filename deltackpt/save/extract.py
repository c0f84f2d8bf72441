# SPDX-License-Identifier: Apache-2.0
"""Rows of fields, gathered from the shards of the training state.

A save reads the training state through ``FieldSource``: one field of one group as this process
sees it, a list of shards in row order. Which rows a save needs is decided once per table from
the stamps (``touched_rows``); each field then gathers those rows, independent of its own sharding.

On the CPU backend shards are zero-copy numpy views, gathered with numpy (measured 10 times
faster there than jitted ``nonzero`` and gather). XLA refuses to donate a buffer while a view of
it lives and copies it instead, so a view is dropped as soon as its rows are copied. On an
accelerator a gather is dispatched per shard before ``save()`` returns; the transfer to the host
overlaps the next steps, which may donate the tables because the gather came first.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from deltackpt.codecs import Codec
from deltackpt.format import blocks
from deltackpt.format.blocks import Rows
from deltackpt.format.manifest import Kind
from deltackpt.save.pieces import AHEAD, DevicePiece, HostPiece, Piece
from deltackpt.state import contexts, placement
from deltackpt.state.stacks import MemberRows, array_of

_SMALLEST_BUCKET = 1024
_DEVICE_PIECE_BYTES = 64 << 20


@dataclasses.dataclass(eq=False)
class FieldShard:
    """Consecutive virtual rows of one field: ``data`` holds them after ``skip`` other rows."""

    start: int
    stop: int
    data: Any
    skip: int = 0

    @property
    def first(self) -> int:
        """Returns the virtual row of the first row of ``data``."""
        return self.start - self.skip

    def take(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copies some rows of ``data`` into ``out``, (len(rows), *trailing)."""
        if isinstance(self.data, MemberRows):
            self.data.take(rows, out)
        else:
            # mode="clip" lets numpy write straight into `out`; the rows are in range.
            np.asarray(self.data).take(rows, 0, out, "clip")


@dataclasses.dataclass(eq=False)
class FieldSource:
    """One field of one group on this process; shards ascend and do not overlap.

    ``trailing`` is the shape of one row as this process holds it.
    """

    columns: tuple[int, int]
    trailing: tuple[int, ...]
    dtype: np.dtype
    shards: list[FieldShard]
    #: Whether all shards are in host memory, if known; checking a thousand is slow.
    known_on_host: bool | None = None

    @property
    def on_host(self) -> bool:
        """Returns whether all shards are in host memory already."""
        if self.known_on_host is not None:
            return self.known_on_host
        return all(on_host(shard.data) for shard in self.shards)

    @property
    def in_order(self) -> bool:
        """Returns whether rows are adjacent in memory, so that views of them can be written."""
        return not any(isinstance(shard.data, MemberRows) for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one row."""
        return math.prod(self.trailing) * self.dtype.itemsize

    def gather(self, rows: Rows, out: np.ndarray) -> None:
        """Copies ``rows`` into ``out``, (len(rows), *trailing)."""
        if isinstance(rows, np.ndarray):
            for shard, (low, high) in zip(
                self.shards, np.searchsorted(rows, self._bounds).tolist()
            ):
                if low < high:
                    shard.take(rows[low:high] - shard.first, out[low:high])
            return
        for shard in self.shards:
            part = blocks.row_slice(rows, shard.start, shard.stop)
            if part.start == part.stop:
                continue
            chosen = rows[part]
            assert isinstance(chosen, range)
            held = slice(chosen.start - shard.first, chosen.stop - shard.first)
            if isinstance(shard.data, MemberRows):
                shard.data.copy(held.start, held.stop, out[part])
            else:
                np.copyto(out[part], np.asarray(shard.data)[held])

    def bits(self, rows: np.ndarray) -> np.ndarray:
        """Returns the bits of a few rows, ascending: (len(rows), row_bytes) uint8."""
        return self.dispatch_bits(rows)()

    def dispatch_bits(self, rows: np.ndarray) -> Callable[[], np.ndarray]:
        """Starts to read ``bits``; returns a function that waits for them.

        It reads only the shards that hold some of the rows.
        """
        take = _take_on_host if self.on_host else few
        parts = [
            (high - low, take(shard.data, rows[low:high] - shard.first))
            for shard, low, high in self._parts(rows)
        ]

        def landed() -> np.ndarray:
            found = [np.asarray(part)[:count] for count, part in parts]
            if not found:
                return np.empty((0, self.row_bytes), np.uint8)
            bits = found[0] if len(found) == 1 else np.concatenate(found)
            return bits.view(np.uint8).reshape(len(rows), self.row_bytes)

        return landed

    def _parts(self, rows: np.ndarray) -> list[tuple[FieldShard, int, int]]:
        """The shards that hold a few ascending rows, each with the positions of its rows."""
        if not len(rows):
            return []
        number = bisect.bisect_right(self.shards, rows[0], key=_start) - 1
        if rows[-1] < self.shards[number].stop:
            return [(self.shards[number], 0, len(rows))]
        bounds = self._bounds
        numbers = blocks.distinct(np.searchsorted(bounds[:, 0], rows, "right") - 1)
        parts = np.searchsorted(rows, bounds[numbers]).tolist()
        return [
            (self.shards[number], low, high) for number, (low, high) in zip(numbers.tolist(), parts)
        ]

    @functools.cached_property
    def _bounds(self) -> np.ndarray:
        """First and last rows of each shard, (shards, 2)."""
        return np.array([(shard.start, shard.stop) for shard in self.shards]).reshape(-1, 2)

    def dispatch(self, rows: Rows, codec: Codec) -> list[DevicePiece]:
        """Gathers ``rows`` on the devices and starts their copy to the host, encoded if lossy.

        Returns:
          The pieces in row order, each padded to a bucketed length.
        """
        found = []
        for shard in self.shards:
            part = blocks.row_slice(rows, shard.start, shard.stop)
            count = part.stop - part.start
            if count == 0 and (found or shard is not self.shards[-1]):
                continue
            limit = max(1, count) if codec.lossless else self._device_rows
            for start in range(part.start, max(part.start + 1, part.stop), limit):
                chosen = np.asarray(rows[start : min(start + limit, part.stop)])
                local = np.zeros(bucket(len(chosen)), np.int32)
                local[: len(chosen)] = chosen - shard.first
                # A table may be there while its slots are on the device.
                if placement.in_host_memory(array_of(shard.data)):
                    piece = _take_on_host(shard.data, local)
                else:
                    piece = _take(shard.data, local)
                if codec.lossless:
                    if isinstance(piece, jax.Array):
                        piece = placement.host_copy(piece)
                    found.append(DevicePiece(piece, len(chosen)))
                else:
                    found.append(DevicePiece.dispatch(codec, piece, len(chosen)))
        return found

    @property
    def _device_rows(self) -> int:
        """Rows that are encoded at once on a device: temporary memory is twice theirs and more."""
        rows = max(1, _DEVICE_PIECE_BYTES // max(1, self.row_bytes))
        return max(_SMALLEST_BUCKET, 1 << (rows.bit_length() - 1))

    def pieces(self, rows: Rows, limit_rows: int) -> Iterator[Piece]:
        """Yields ``rows`` in order, at most ``limit_rows`` at a time; views if they are contiguous.

        Each piece is valid until ``pieces.AHEAD`` more pieces were requested.
        """
        if not isinstance(rows, np.ndarray):
            for shard in self.shards:
                part = rows[blocks.row_slice(rows, shard.start, shard.stop)]
                assert isinstance(part, range)
                for start in range(part.start, part.stop, limit_rows):
                    stop = min(start + limit_rows, part.stop)
                    data = shard.data[start - shard.first : stop - shard.first]
                    yield (
                        HostPiece(np.asarray(data))
                        if on_host(data)
                        else DevicePiece(data, stop - start)
                    )
            return
        shape = (min(limit_rows, len(rows)), *self.trailing)
        buffers = itertools.cycle([np.empty(shape, self.dtype) for _ in range(AHEAD + 1)])
        for start in range(0, len(rows), limit_rows):
            chosen = rows[start : start + limit_rows]
            buffer = next(buffers)[: len(chosen)]
            self.gather(chosen, buffer)
            yield HostPiece(buffer)


@dataclasses.dataclass(eq=False)
class SegmentSource:
    """The rows of one segment of a save, and where to read them.

    ``kind`` selects the codecs: those of bases or those of deltas. ``key`` is the field with the
    ids of the rows, None without one. If ``evicted``, no row has an id, and all other bits are 0.
    """

    group: str
    columns: tuple[int, int]
    rows: Rows
    fields: Mapping[str, FieldSource]
    kind: Kind = "delta"
    key: str | None = None
    evicted: bool = False

    @property
    def on_host(self) -> bool:
        """Returns whether all fields are in host memory already."""
        return all(field.on_host for field in self.fields.values())

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one row over all fields."""
        return sum(source.row_bytes for source in self.fields.values())

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all rows over all fields."""
        return self.row_bytes * len(self.rows)

    def detached(self) -> SegmentSource:
        """Returns the segment without its shards: a reference to them would block donation."""
        fields = {
            name: dataclasses.replace(source, shards=[]) for name, source in self.fields.items()
        }
        return dataclasses.replace(self, fields=fields)


def on_host(leaf: Any) -> bool:
    """Returns whether a leaf, or the stacked array that holds it, is in host memory."""
    return placement.on_host(array_of(leaf))


def bucket(count: int) -> int:
    """Returns the static size of a gather of ``count`` rows: few sizes compile."""
    return max(_SMALLEST_BUCKET, 1 << max(0, count - 1).bit_length())


def _take(data: Any, rows: np.ndarray) -> jax.Array:
    if isinstance(data, MemberRows):
        return data.on_device(rows)
    with contexts.beside(data):
        return _gathered(data, rows)


@jax.jit
def _gathered(data: jax.Array, rows: np.ndarray) -> jax.Array:
    return data.at[rows].get(mode="clip")


def _take_on_host(data: Any, rows: np.ndarray) -> np.ndarray:
    return data.take(rows) if isinstance(data, MemberRows) else np.asarray(data).take(rows, 0)


def few(data: Any, rows: np.ndarray) -> Any:
    """Starts to copy rows of one shard to the host; padding rows may follow them."""
    if on_host(data):
        return _take_on_host(data, rows)
    padded = np.zeros(bucket(len(rows)), np.int32)
    padded[: len(rows)] = rows
    with contexts.neutral():
        return placement.host_copy(_take(data, padded))


def _start(shard: FieldShard) -> int:
    return shard.start
