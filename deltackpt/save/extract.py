# SPDX-License-Identifier: Apache-2.0
"""Rows of fields, gathered from the shards of the training state.

A save reads the training state through ``FieldSource``: one field of one group as this process
sees it, a list of shards in row order. Which rows a save needs is decided once per table from
the stamps (``touched_rows``); each field then gathers those rows, whatever its own sharding.

On the CPU backend shards are zero-copy numpy views, gathered with numpy (measured 10 times
faster there than jitted ``nonzero`` and gather). XLA refuses to donate a buffer while a view of
it lives and copies it instead, so a view is dropped as soon as its rows are copied. On an
accelerator a gather is dispatched per shard before ``save()`` returns; the transfer to the host
overlaps the next steps, which may donate the tables because the gather came first.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from deltackpt.codecs import Codec
from deltackpt.format import blocks
from deltackpt.format.blocks import Rows
from deltackpt.format.manifest import Kind
from deltackpt.save.pieces import AHEAD, DevicePiece, HostPiece, Piece

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
        """The virtual row that the first row of ``data`` would be."""
        return self.start - self.skip

    def host(self) -> np.ndarray:
        """``data`` in host memory; a zero-copy view on the CPU backend."""
        return np.asarray(self.data)


@dataclasses.dataclass(eq=False)
class FieldSource:
    """One field of one group on this process; shards ascend and do not overlap.

    ``trailing`` is the shape of one row as this process holds it.
    """

    columns: tuple[int, int]
    trailing: tuple[int, ...]
    dtype: np.dtype
    shards: list[FieldShard]
    #: Whether all shards are in host memory, where that is known; asking a thousand takes a while.
    known_on_host: bool | None = None

    @property
    def on_host(self) -> bool:
        """Whether all shards are in host memory already."""
        if self.known_on_host is not None:
            return self.known_on_host
        return all(on_host(shard.data) for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.trailing) * self.dtype.itemsize

    def gather(self, rows: Rows, out: np.ndarray) -> None:
        """Copies ``rows`` into ``out``, (len(rows), *trailing)."""
        if isinstance(rows, np.ndarray):
            for shard, (low, high) in zip(
                self.shards, np.searchsorted(rows, self._bounds).tolist()
            ):
                if low < high:
                    # mode="clip" lets numpy write straight into `out`; the rows are in range.
                    local = rows[low:high] - shard.first
                    np.asarray(shard.data).take(local, 0, out[low:high], "clip")
            return
        for shard in self.shards:
            part = blocks.row_slice(rows, shard.start, shard.stop)
            if part.start == part.stop:
                continue
            chosen = rows[part]
            assert isinstance(chosen, range)
            held = slice(chosen.start - shard.first, chosen.stop - shard.first)
            np.copyto(out[part], shard.host()[held])

    def bits(self, rows: np.ndarray) -> np.ndarray:
        """The bits of a few rows, ascending: (len(rows), row_bytes) uint8.

        Only the shards that hold some are looked at, however many there are.
        """
        out = np.empty((len(rows), *self.trailing), self.dtype)
        bounds = self._bounds
        numbers = blocks.distinct(np.searchsorted(bounds[:, 0], rows, "right") - 1)
        parts = np.searchsorted(rows, bounds[numbers]).tolist()
        take = _take_on_host if self.on_host else take_few
        for number, (low, high) in zip(numbers.tolist(), parts):
            shard = self.shards[number]
            take(shard.data, rows[low:high] - shard.first, out[low:high])
        return out.view(np.uint8).reshape(len(rows), self.row_bytes)

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
                piece = _take(shard.data, local)
                if codec.lossless:
                    piece.copy_to_host_async()
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
        """``rows`` in order, at most ``limit_rows`` at a time; views where they are contiguous.

        Each piece is valid until ``pieces.AHEAD`` further ones were asked for.
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
    """The rows that one segment of a save holds, and where to take them from.

    ``kind`` says whose codecs they are stored by: those of bases, or of deltas.
    """

    group: str
    columns: tuple[int, int]
    rows: Rows
    fields: Mapping[str, FieldSource]
    kind: Kind = "delta"

    @property
    def on_host(self) -> bool:
        """Whether all fields are in host memory already."""
        return all(field.on_host for field in self.fields.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields."""
        return sum(source.row_bytes for source in self.fields.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all rows over all fields."""
        return self.row_bytes * len(self.rows)

    def detached(self) -> SegmentSource:
        """The segment without its shards: a reference to them would block donation."""
        fields = {
            name: dataclasses.replace(source, shards=[]) for name, source in self.fields.items()
        }
        return dataclasses.replace(self, fields=fields)


def on_host(array: Any) -> bool:
    """Whether an array's memory is the host's: numpy, or a jax.Array of the CPU backend."""
    if not isinstance(array, jax.Array):
        return True
    return all(device.platform == "cpu" for device in array.devices())


def bucket(count: int) -> int:
    """The static size of a gather of ``count`` rows: few sizes, so that few are compiled."""
    return max(_SMALLEST_BUCKET, 1 << max(0, count - 1).bit_length())


@jax.jit
def _take(data: jax.Array, rows: np.ndarray) -> jax.Array:
    return data.at[rows].get(mode="clip")


def _take_on_host(data: Any, rows: np.ndarray, out: np.ndarray) -> None:
    np.asarray(data).take(rows, 0, out, "clip")


def take_few(data: Any, rows: np.ndarray, out: np.ndarray) -> None:
    """Copies rows of one shard into ``out``; waits for an accelerator."""
    if on_host(data):
        _take_on_host(data, rows, out)
        return
    padded = np.zeros(bucket(len(rows)), np.int32)
    padded[: len(rows)] = rows
    out[:] = np.asarray(_take(data, padded))[: len(rows)]
