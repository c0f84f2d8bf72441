# SPDX-License-Identifier: Apache-2.0
"""Touched rows of each addressable shard, as RowBlocks.

A save reads the training state through ``FieldSource``: one field of one group as this process
sees it, a list of shards in row order. Which rows a save needs is decided once per table from
the stamps; each field then gathers those rows, whatever its own sharding.

On the CPU backend shards are zero-copy numpy views, gathered with numpy (measured 10 times
faster there than jitted ``nonzero`` and gather). XLA refuses to donate a buffer while a view of
it lives and copies it instead, so a view is dropped as soon as its rows are copied. On an
accelerator a gather is dispatched per shard before ``save()`` returns; the transfer to the host
overlaps the next steps, which may donate the tables because the gather came first.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt import blocks
from deltackpt.blocks import RowBlock, Rows
from deltackpt.codecs import Codec
from deltackpt.encode import AHEAD, DevicePiece, HostPiece, Piece
from deltackpt.errors import TableSelectionError
from deltackpt.manifest import FieldSpec, GroupEntry
from deltackpt.staging import Staging
from deltackpt.tables import Layout

_SMALLEST_BUCKET = 1024
_DEVICE_PIECE_BYTES = 64 << 20
#: Fewer rows are not worth a thread.
_LEAST_SHARE = 4096


@dataclasses.dataclass(eq=False)
class FieldShard:
    """Consecutive virtual rows of one field: ``data`` is (stop - start, *trailing)."""

    start: int
    stop: int
    data: Any

    def host(self) -> np.ndarray:
        """The rows in host memory; a zero-copy view on the CPU backend."""
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
            if isinstance(chosen, range):
                np.copyto(
                    out[part], shard.host()[chosen.start - shard.start : chosen.stop - shard.start]
                )
            else:
                # mode="clip" lets numpy write straight into `out`; the rows are in range.
                np.take(shard.host(), chosen - shard.start, axis=0, out=out[part], mode="clip")

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
                local[: len(chosen)] = chosen - shard.start
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

        Each piece is valid until ``encode.AHEAD`` further ones were asked for.
        """
        if isinstance(rows, range):
            for shard in self.shards:
                part = rows[blocks.row_slice(rows, shard.start, shard.stop)]
                for start in range(part.start, part.stop, limit_rows):
                    stop = min(start + limit_rows, part.stop)
                    data = shard.data[start - shard.start : stop - shard.start]
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
    fields: dict[str, FieldSource]

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

    def copied(self, staging: Staging) -> Copying:
        """The rows on their way into staging memory, copied by its threads.

        numpy copies without the interpreter's lock, so that the training thread goes on to
        start Orbax's part of the save meanwhile.
        """
        fields, futures = {}, []
        for name, source in self.fields.items():
            out = staging.take((len(self.rows), *source.trailing), source.dtype)
            fields[name] = out
            share = max(_LEAST_SHARE, -(-len(self.rows) // staging.THREADS))
            for start in range(0, len(self.rows), share):
                part = slice(start, start + share)
                futures.append(staging.submit(source.gather, self.rows[part], out[part]))
        return Copying(RowBlock(self.group, self.rows, self.columns, fields), futures)

    def dispatched(self, codec_of: Mapping[str, Codec]) -> Dispatched:
        """The rows on their way from the devices: independent of the training state.

        Args:
          codec_of: field name to codec; lossy ones encode on the devices.
        """
        fields = {
            name: source.dispatch(self.rows, codec_of[name]) for name, source in self.fields.items()
        }
        lossy = frozenset(name for name in fields if not codec_of[name].lossless)
        return Dispatched(self.group, self.columns, self.rows, fields, lossy)


@dataclasses.dataclass(frozen=True, eq=False)
class Landed:
    """Rows that are independent of the training state.

    Attributes:
      block: fields in staging memory.
      on_device: the other fields: gathered on accelerators, encoded there.
    """

    block: RowBlock
    on_device: Mapping[str, Sequence[DevicePiece]]

    def pieces(self, field: str, limit_rows: int) -> Iterator[Piece]:
        """Rows of a field in order, those in host memory at most ``limit_rows`` at a time."""
        if field in self.on_device:
            yield from self.on_device[field]
            return
        rows = self.block.fields[field]
        for start in range(0, len(rows), limit_rows):
            yield HostPiece(rows[start : start + limit_rows])

    def give_back(self, staging: Staging) -> None:
        """Ends the use of the staging memory."""
        for buffer in self.block.fields.values():
            staging.give_back(buffer)


@dataclasses.dataclass(eq=False)
class Copying:
    """Rows that threads copy into staging memory; see ``SegmentSource.copied``."""

    block: RowBlock
    futures: list[concurrent.futures.Future[None]]

    def wait(self) -> None:
        """Returns when the training state is not read any more."""
        concurrent.futures.wait(self.futures)

    def landed(self, staging: Staging) -> Landed:
        """Waits for the copies; raises what went wrong in them."""
        for future in self.futures:
            future.result()
        return Landed(self.block, {})

    def give_back(self, staging: Staging) -> None:
        """Ends the use of the staging memory, once nothing writes there any more."""
        self.wait()
        Landed(self.block, {}).give_back(staging)


@dataclasses.dataclass(eq=False)
class Dispatched:
    """Rows that the devices gather and send to the host; see ``SegmentSource.dispatched``.

    ``fields`` maps a field to the pieces of its rows in order; those in ``lossy`` stay on the
    devices until they are written, since a wider codec may be needed.
    """

    group: str
    columns: tuple[int, int]
    rows: Rows
    fields: dict[str, list[DevicePiece]]
    lossy: frozenset[str]

    def wait(self) -> None:
        """Nothing to wait for: the gather was dispatched before later steps can be."""

    def give_back(self, staging: Staging) -> None:
        """Nothing to give back: the rows are on the devices."""

    def landed(self, staging: Staging) -> Landed:
        """Waits for the transfers and puts lossless fields into staging memory."""
        fields = {}
        for name, pieces in self.fields.items():
            if name in self.lossy:
                continue
            first = pieces[0].rows
            out = staging.take((len(self.rows), *first.shape[1:]), np.dtype(first.dtype))
            start = 0
            for piece in pieces:
                out[start : start + piece.count] = piece.host()
                start += piece.count
            fields[name] = out
        block = RowBlock(self.group, self.rows, self.columns, fields)
        return Landed(block, {name: self.fields[name] for name in self.lossy})


def field_source(
    layout: Layout, group: GroupEntry, spec: FieldSpec, leaves: Mapping[str, Mapping[str, Any]]
) -> list[FieldSource]:
    """Sources of one field, one for each column range that this process holds.

    Args:
      layout: tables and groups.
      group: the group.
      spec: one of its fields.
      leaves: table name to field name to array, (rows, *trailing).
    """
    by_columns: dict[tuple[int, int], list[FieldShard]] = {}
    width = spec.trailing[0] if spec.trailing else 1
    for table in layout.tables:
        if table.group != group.name:
            continue
        leaf = leaves[table.name][spec.name]
        for start, stop, columns, data in _shards(leaf, width):
            shard = FieldShard(table.offset + start, table.offset + stop, data)
            by_columns.setdefault(columns, []).append(shard)
    return [
        FieldSource(
            columns,
            tuple(shards[0].data.shape[1:]),
            np.dtype(shards[0].data.dtype),
            sorted(shards, key=lambda shard: shard.start),
        )
        for columns, shards in sorted(by_columns.items())
    ]


def _shards(leaf: Any, width: int) -> Iterator[tuple[int, int, tuple[int, int], Any]]:
    """(first row, last row + 1, columns, data) of each distinct piece of an array here."""
    if not isinstance(leaf, jax.Array):
        yield 0, leaf.shape[0], (0, width), leaf
        return
    for shard in leaf.addressable_shards:
        if shard.replica_id != 0:
            continue
        rows = shard.index[0] if shard.index else slice(None)
        columns = shard.index[1] if len(shard.index) > 1 else slice(None)
        start, stop, _ = rows.indices(leaf.shape[0])
        first, last, _ = columns.indices(width)
        yield start, stop, (first, last), shard.data


def touched_rows(stamps: jax.Array | np.ndarray, since_clock: int, offset: int) -> np.ndarray:
    """Virtual indices, int64 ascending, of the rows stamped after ``since_clock``."""
    if on_host(stamps):
        return np.flatnonzero(np.asarray(stamps) > since_clock) + np.int64(offset)
    found = []
    for start, _, _, shard in sorted(_shards(stamps, 1), key=lambda piece: piece[0]):
        count = int(_count_touched(shard, since_clock))
        rows = _touched(shard, since_clock, size=bucket(count))
        found.append(np.asarray(rows)[:count].astype(np.int64) + start + offset)
    return np.concatenate(found)


def on_host(array: Any) -> bool:
    """Whether an array's memory is the host's: numpy, or a jax.Array of the CPU backend."""
    if not isinstance(array, jax.Array):
        return True
    return all(device.platform == "cpu" for device in array.devices())


def bucket(count: int) -> int:
    """The static size of a gather of ``count`` rows: few sizes, so that few are compiled."""
    return max(_SMALLEST_BUCKET, 1 << max(0, count - 1).bit_length())


@jax.jit
def _count_touched(stamps: jax.Array, since_clock: int) -> jax.Array:
    return jnp.sum(stamps > since_clock, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames="size")
def _touched(stamps: jax.Array, since_clock: int, *, size: int) -> jax.Array:
    return jnp.nonzero(stamps > since_clock, size=size)[0].astype(jnp.int32)


@jax.jit
def _take(data: jax.Array, rows: np.ndarray) -> jax.Array:
    return data.at[rows].get(mode="clip")


def segment_sources(
    layout: Layout,
    leaves: Mapping[str, Mapping[str, Any]],
    rows_of: Mapping[str, Rows],
    *,
    whole: bool,
) -> list[SegmentSource]:
    """What a save reads: for each group its rows, and its ``always`` fields whole.

    Args:
      layout: tables and groups.
      leaves: table name to field name to array.
      rows_of: group name to the virtual rows that the save holds.
      whole: True for a base, where ``always`` fields need no segment of their own.

    Raises:
      TableSelectionError: shards of a field leave rows of a table uncovered.
    """
    segments = []
    for group in layout.groups:
        usual = [spec for spec in group.fields if whole or not spec.always]
        always = [spec for spec in group.fields if not whole and spec.always]
        for specs, rows in ((usual, rows_of[group.name]), (always, range(group.rows))):
            by_columns: dict[tuple[int, int], dict[str, FieldSource]] = {}
            for spec in specs:
                for source in field_source(layout, group, spec, leaves):
                    columns = source.columns if spec.name == blocks.VALUES else (0, 0)
                    by_columns.setdefault(columns, {})[spec.name] = source
            segments += [
                SegmentSource(group.name, columns, rows, fields)
                for columns, fields in _joined(by_columns, group).items()
            ]
    _check_covered(layout, segments)
    return segments


def _joined(
    by_columns: dict[tuple[int, int], dict[str, FieldSource]], group: GroupEntry
) -> dict[tuple[int, int], dict[str, FieldSource]]:
    """Slots ride in the segment of the values where the table is not split along its width."""
    slots = by_columns.pop((0, 0), {})
    width = _width(group)
    if len(by_columns) <= 1:
        (columns, fields), *_ = by_columns.items() or [((0, width), {})]
        return {columns: fields | slots} if fields or slots else {}
    return by_columns | ({(0, width): slots} if slots else {})


def _width(group: GroupEntry) -> int:
    trailing = next(spec.trailing for spec in group.fields if spec.name == blocks.VALUES)
    return trailing[0] if trailing else 1


def _check_covered(layout: Layout, segments: Sequence[SegmentSource]) -> None:
    total = {group.name: group.rows for group in layout.groups}
    for segment in segments:
        for name, source in segment.fields.items():
            covered = sum(shard.stop - shard.start for shard in source.shards)
            if covered != total[segment.group]:
                raise TableSelectionError(
                    f"group {segment.group}, field {name}: expected shards that cover "
                    f"{total[segment.group]} rows on this process, found {covered}; arrays that "
                    "span several processes are not supported yet"
                )


@jax.jit
def _device_copy(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


def hold(segments: Sequence[SegmentSource]) -> None:
    """Makes the sources outlive donation: a device copy off the CPU, where views do already."""
    for segment in segments:
        for source in segment.fields.values():
            for shard in source.shards:
                if isinstance(shard.data, jax.Array):
                    if on_host(shard.data):
                        shard.data = np.asarray(shard.data)
                    else:
                        [shard.data] = _device_copy([shard.data])
