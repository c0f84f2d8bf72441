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
from deltackpt.format import blocks, manifest
from deltackpt.format.blocks import Ranges, Rows, Span
from deltackpt.format.manifest import FieldSpec, GroupEntry, Layout
from deltackpt.save.pieces import AHEAD, DevicePiece, HostPiece, Piece
from deltackpt.state import ownership

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

    @property
    def on_host(self) -> bool:
        """Whether all shards are in host memory already."""
        return all(on_host(shard.data) for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.trailing) * self.dtype.itemsize

    def gather(self, rows: Rows, out: np.ndarray) -> None:
        """Copies ``rows`` into ``out``, (len(rows), *trailing)."""
        for shard in self.shards:
            part = blocks.row_slice(rows, shard.start, shard.stop)
            if part.start == part.stop:
                continue
            chosen = rows[part]
            assert not isinstance(chosen, Ranges)
            if isinstance(chosen, range):
                held = slice(chosen.start - shard.first, chosen.stop - shard.first)
                np.copyto(out[part], shard.host()[held])
            else:
                # mode="clip" lets numpy write straight into `out`; the rows are in range.
                np.take(shard.host(), chosen - shard.first, axis=0, out=out[part], mode="clip")

    def bits(self, rows: np.ndarray) -> np.ndarray:
        """The bits of a few rows, ascending: (len(rows), row_bytes) uint8.

        Only the shards that hold some are looked at, however many there are.
        """
        out = np.empty((len(rows), *self.trailing), self.dtype)
        for number in np.unique(np.searchsorted(self._starts, rows, "right") - 1):
            shard = self.shards[number]
            part = blocks.row_slice(rows, shard.start, shard.stop)
            take_few(shard.data, rows[part] - shard.first, out[part])
        return out.view(np.uint8).reshape(len(rows), self.row_bytes)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [shard.start for shard in self.shards]

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
    """The rows that one segment of a save holds, and where to take them from."""

    group: str
    columns: tuple[int, int]
    rows: Rows
    fields: Mapping[str, FieldSource]

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


def field_sources(
    layout: Layout,
    group: GroupEntry,
    spec: FieldSpec,
    leaves: Mapping[str, Mapping[str, Any]],
    stamps: Mapping[str, Mapping[str, Any]],
) -> list[FieldSource]:
    """What this process writes of one field: a source for each column range that it holds.

    Args:
      layout: tables and groups.
      group: the group.
      spec: one of its fields.
      leaves: table name to field name to array, (rows, *trailing).
      stamps: table name to those of each TouchState; empty where every row is written.
    """
    by_columns: dict[Span, list[FieldShard]] = {}
    turns = {table.name: turn for turn, table in enumerate(layout.tables)}
    for table in manifest.members(group, layout.tables):
        leaf = leaves[table.name][spec.name]
        known = next(iter(stamps.get(table.name, {}).values()), None)
        for share in ownership.shares(leaf, known, turn=turns[table.name]):
            start, stop = share.box.rows
            shard = FieldShard(table.offset + start, table.offset + stop, share.data, share.skip)
            by_columns.setdefault(share.box.columns, []).append(shard)
    return [
        FieldSource(
            columns,
            tuple(shards[0].data.shape[1:]),
            np.dtype(shards[0].data.dtype),
            sorted(shards, key=lambda shard: shard.start),
        )
        for columns, shards in sorted(by_columns.items())
    ]


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


def take_few(data: Any, rows: np.ndarray, out: np.ndarray) -> None:
    """Copies rows of one shard into ``out``; waits for an accelerator."""
    if on_host(data):
        np.take(np.asarray(data), rows, axis=0, out=out, mode="clip")
        return
    padded = np.zeros(bucket(len(rows)), np.int32)
    padded[: len(rows)] = rows
    out[:] = np.asarray(_take(data, padded))[: len(rows)]
