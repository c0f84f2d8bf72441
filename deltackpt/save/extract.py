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

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np

from deltackpt.codecs import Codec
from deltackpt.errors import TableSelectionError, TrackingError
from deltackpt.format import blocks, manifest
from deltackpt.format.blocks import Ranges, RowBlock, Rows, Span
from deltackpt.format.manifest import Cover, FieldSpec, GroupEntry, Layout
from deltackpt.resources.staging import Staging
from deltackpt.save.encode import AHEAD, DevicePiece, HostPiece, Piece
from deltackpt.state import ownership

_SMALLEST_BUCKET = 1024
_DEVICE_PIECE_BYTES = 64 << 20
#: Fewer rows are not worth a thread.
_LEAST_SHARE = 4096


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
            _take_few(shard.data, rows[part] - shard.first, out[part])
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

        Each piece is valid until ``encode.AHEAD`` further ones were asked for.
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


def field_sources(
    layout: Layout,
    group: GroupEntry,
    spec: FieldSpec,
    leaves: Mapping[str, Mapping[str, Any]],
    stamps: StampsByTable,
) -> list[FieldSource]:
    """What this process writes of one field: a source for each column range that it holds.

    Args:
      layout: tables and groups.
      group: the group.
      spec: one of its fields.
      leaves: table name to field name to array, (rows, *trailing).
      stamps: of the tables; empty where every row is written.
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


def touched_rows(stamps: Any, since_clock: int, offset: int, spans: Sequence[Span]) -> np.ndarray:
    """Virtual indices, int64 ascending, of the rows stamped after ``since_clock``.

    Args:
      stamps: of a table, (rows,).
      since_clock: the clock.
      offset: the virtual index of the table's first row.
      spans: rows of the table to look at, ascending.

    Raises:
      TrackingError: stamps of these rows are on other processes.
    """
    return _touched_rows(stamps, _stamp_shards(stamps), since_clock, offset, spans)


def _touched_rows(
    stamps: Any,
    shards: Sequence[tuple[Span, Any]],
    since_clock: int,
    offset: int,
    spans: Sequence[Span],
) -> np.ndarray:
    found = [np.empty(0, np.int64)]
    for start, stop in spans:
        for (first, last), shard in shards:
            low, high = max(start, first), min(stop, last)
            if low == start < high:
                rows = _touched_in(shard, since_clock, low - first, high - first)
                found.append(rows + np.int64(first + offset))
                start = high
        if start < stop:
            raise TrackingError(
                f"stamps of shape {stamps.shape}: expected those of rows {start} to {stop} on this "
                f"process, found the sharding {getattr(stamps, 'sharding', None)}; give the stamps "
                "the sharding of their table's rows: touched.init(tables)"
            )
    return np.concatenate(found)


def _stamp_shards(stamps: Any) -> list[tuple[Span, Any]]:
    """The distinct shards of stamps on this process, by the rows that they hold."""
    if not isinstance(stamps, jax.Array):
        return [((0, stamps.shape[0]), stamps)]
    held = {shard.device: shard.data for shard in stamps.addressable_shards}
    by_rows = {
        box.rows: held[device]
        for device, box in ownership.boxes(stamps.sharding, stamps.shape).items()
    }
    return sorted(by_rows.items(), key=lambda item: item[0])


def _touched_in(stamps: Any, since_clock: int, start: int, stop: int) -> np.ndarray:
    """Rows of ``[start, stop)`` of one shard stamped after the clock."""
    if on_host(stamps):
        return np.flatnonzero(np.asarray(stamps)[start:stop] > since_clock) + start
    count = int(_count_touched(stamps, since_clock))
    rows = np.asarray(_touched(stamps, since_clock, size=bucket(count)))[:count]
    return rows[(rows >= start) & (rows < stop)].astype(np.int64)


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


def _take_few(data: Any, rows: np.ndarray, out: np.ndarray) -> None:
    """Copies rows of one shard into ``out``; waits for an accelerator."""
    if on_host(data):
        np.take(np.asarray(data), rows, axis=0, out=out, mode="clip")
        return
    padded = np.zeros(bucket(len(rows)), np.int32)
    padded[: len(rows)] = rows
    out[:] = np.asarray(_take(data, padded))[: len(rows)]


class Sources:
    """What this process reads of the training state for one save.

    Fields of which it holds the same rows share a segment. There is none where it has no row.
    """

    def __init__(
        self,
        layout: Layout,
        leaves: Mapping[str, Mapping[str, Any]],
        stamps: StampsByTable,
        staging: Staging,
    ):
        """Finds which rows of which fields this process reads; reads none.

        Args:
          layout: tables and groups.
          leaves: table name to field name to array.
          stamps: of every table, for a delta; may be empty for a base.
          staging: whose threads look for the touched rows.

        Raises:
          TableSelectionError: a slot is split by columns, and not as wide as its table.
          TrackingError: stamps are on other processes than their rows.
        """
        self.layout = layout
        self._found = {
            group.name: _sources_by_rows(layout, group, leaves, stamps) for group in layout.groups
        }
        self.stamps = Stamps(layout, stamps, staging, self._found)

    @property
    def owned(self) -> Owned:
        """What this process writes in a base."""
        return Owned(self.layout, self._found)

    def by_rows(self) -> Iterator[tuple[GroupEntry, Where, Mapping[str, FieldSource]]]:
        """The fields of each group by the columns and the rows that this process holds."""
        for group in self.layout.groups:
            for where, fields in self._found[group.name].items():
                yield group, where, fields

    def segments(self, *, whole: bool) -> list[SegmentSource]:
        """What this process reads for a base, or for a delta: see ``Stamps.look``.

        Args:
          whole: whether all rows, not the touched ones and the ``always`` fields alone.
        """
        segments = []
        for group, (columns, spans), fields in self.by_rows():
            always = {spec.name for spec in group.fields if spec.always}
            complete = fields if whole else _only(fields, always)
            changed = {name: field for name, field in fields.items() if name not in complete}
            for chosen, touched in ((complete, False), (changed, True)):
                if chosen:
                    taken = (
                        self.stamps.touched(group.name, spans) if touched else blocks.rows_of(spans)
                    )
                    if len(taken):
                        segments.append(SegmentSource(group.name, columns, taken, chosen))
        return segments


def _only(fields: Mapping[str, FieldSource], names: set[str]) -> Mapping[str, FieldSource]:
    return {name: field for name, field in fields.items() if name in names}


#: Columns of the fields that are as wide as the table, and the virtual rows.
Where = tuple[Span, tuple[Span, ...]]
_ByRows = Mapping[Where, Mapping[str, "FieldSource"]]
#: Table name to the place of each TouchState that has stamps of it, to these, (rows,).
StampsByTable = Mapping[str, Mapping[str, Any]]


class Owned:
    """What this process writes in a base: for the manifests of several processes."""

    def __init__(self, layout: Layout, found: Mapping[str, _ByRows]):
        """Notes where, and how wide; keeps no array."""
        self._layout = layout
        self._found = {
            group: [
                (*where, sum(math.prod(field.trailing[:1]) for field in fields.values()))
                for where, fields in by_rows.items()
            ]
            for group, by_rows in found.items()
        }

    @property
    def cells(self) -> dict[str, int]:
        """Group to the cells, over its fields; without groups of which it writes none."""
        found = {
            group: sum(sum(stop - start for start, stop in spans) * w for _, spans, w in wheres)
            for group, wheres in self._found.items()
        }
        return {group: cells for group, cells in found.items() if cells}

    def cover(self, group: GroupEntry) -> Cover:
        """Where its rows lie in one group."""
        wheres = self._found[group.name]
        rows = blocks.rows_of(span for _, spans, _ in wheres for span in spans)
        return manifest.cover(group, self._layout.tables, rows, [where[0] for where in wheres])


def _sources_by_rows(
    layout: Layout,
    group: GroupEntry,
    leaves: Mapping[str, Mapping[str, Any]],
    stamps: StampsByTable,
) -> dict[Where, dict[str, FieldSource]]:
    """The fields of a group, by the columns and the rows that this process writes of them."""
    found: dict[Where, dict[str, FieldSource]] = {}
    narrow = []
    for spec in group.fields:
        for source in field_sources(layout, group, spec, leaves, stamps):
            spans = blocks.joined((shard.start, shard.stop) for shard in source.shards)
            if group.columns(spec) is not None:
                found.setdefault((source.columns, spans), {})[spec.name] = source
            elif source.columns == (0, manifest.width(spec.trailing)):
                narrow.append((spans, spec.name, source))
            else:
                raise TableSelectionError(
                    f"group {group.name}, field {spec.name}: expected a slot of width "
                    f"{group.width} like its table, or one that is not split by columns, found its "
                    f"columns {source.columns} of shape {spec.trailing}; shard the slot by rows"
                )
    for spans, name, source in narrow:
        # Columns do not matter to it: it rides with any segment of the same rows.
        where = next((where for where in found if where[1] == spans), ((0, group.width), spans))
        found.setdefault(where, {})[name] = source
    return found


class Stamps:
    """The stamps of the rows of this process, by group; threads look for the touched ones."""

    def __init__(
        self,
        layout: Layout,
        stamps: StampsByTable,
        staging: Staging,
        found: Mapping[str, _ByRows],
    ):
        self._layout = layout
        self._stamps = stamps
        self._staging = staging
        self._shards: dict[tuple[str, str], list[tuple[Span, Any]]] = {}
        self._looking: dict[str, list[list[concurrent.futures.Future[np.ndarray]]]] = {}
        self._rows: dict[str, np.ndarray] = {}
        self._spans = {
            group.name: blocks.joined(span for _, spans in found[group.name] for span in spans)
            for group in layout.groups
        }

    @property
    def places(self) -> tuple[str, ...]:
        """Of the TouchStates."""
        return tuple({place: None for held in self._stamps.values() for place in held})

    def look(self, since: Mapping[str, int]) -> None:
        """Starts to look for the touched rows.

        Args:
          since: place of each TouchState to the clock after which its rows are touched.
        """
        self._rows = {}
        for group in self._layout.groups:
            rows = blocks.rows_of(self._spans[group.name])
            self._looking[group.name] = []
            for table in manifest.members(group, self._layout.tables):
                held = rows[blocks.row_slice(rows, table.offset, table.offset + table.rows)]
                if len(held):
                    spans = [(a - table.offset, b - table.offset) for a, b in blocks.spans_of(held)]
                    self._looking[group.name].append(
                        [
                            self._staging.submit(
                                _touched_rows,
                                stamps,
                                self._shards_of(table.name, place),
                                since[place],
                                table.offset,
                                spans,
                            )
                            for place, stamps in self._stamps[table.name].items()
                        ]
                    )

    def touched(self, group: str, spans: tuple[Span, ...]) -> np.ndarray:
        """The touched rows within some spans, virtual, int64 ascending; ``look`` comes first.

        A row is touched where any TouchState says so.

        Raises:
          TrackingError: stamps of the rows are on other processes.
        """
        if group not in self._rows:
            parts = [_union([look.result() for look in looks]) for looks in self._looking[group]]
            self._rows[group] = np.concatenate(parts) if parts else np.empty(0, np.int64)
        rows = self._rows[group]
        if spans == self._spans[group]:
            return rows
        parts = [rows[blocks.row_slice(rows, *span)] for span in spans]
        return np.concatenate(parts) if parts else rows[:0]

    def at(self, group: GroupEntry, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Place of each TouchState to the stamps, int32, of a few virtual rows.

        Stamps that a TouchState does not have, or not on this process, are -1.
        """
        members = manifest.members(group, self._layout.tables)
        found = {place: np.full(len(rows), -1, np.int32) for place in self.places}
        starts = [table.offset for table in members]
        for number in np.unique(np.searchsorted(starts, rows, "right") - 1):
            table = members[number]
            for place in self._stamps.get(table.name, {}):
                for (first, last), shard in self._shards_of(table.name, place):
                    part = blocks.row_slice(rows, table.offset + first, table.offset + last)
                    if part.start < part.stop:
                        local = rows[part] - (table.offset + first)
                        _take_few(shard, local, found[place][part])
        return found

    def shared(self, since: Mapping[str, int]) -> dict[str, int]:
        """CRC32C of what was touched of the stamps that other processes hold too.

        Replicated stamps are updated by each process for itself: where they differ, each would
        write its rows by other marks.

        Args:
          since: place of each TouchState to the clock after which its rows are touched.

        Returns:
          A key of table, rows and place, to a number that all holders must find alike.
        """
        found = {}
        for table in self._layout.tables:
            for place, stamps in self._stamps.get(table.name, {}).items():
                elsewhere = ownership.shared_rows(stamps)
                for span, shard in self._shards_of(table.name, place):
                    if span in elsewhere:
                        looking = self._staging.submit(
                            _crc32c_of_touched, stamps, [(span, shard)], since[place], span
                        )
                        found[f"{table.name}[{span[0]}:{span[1]}]@{place}"] = looking
        return {key: looking.result() for key, looking in found.items()}

    def _shards_of(self, table: str, place: str) -> list[tuple[Span, Any]]:
        if (table, place) not in self._shards:
            self._shards[table, place] = _stamp_shards(self._stamps[table][place])
        return self._shards[table, place]


def _union(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Ascending rows of which each is in one of several ascending arrays."""
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def _crc32c_of_touched(
    stamps: Any, shards: Sequence[tuple[Span, Any]], since_clock: int, span: Span
) -> int:
    """A checksum of the rows of a span that were touched, and of when."""
    rows = _touched_rows(stamps, shards, since_clock, 0, [span])
    [(_, shard)] = shards
    when = np.empty(len(rows), np.int32)
    if len(rows):
        _take_few(shard, rows - span[0], when)
    crc = google_crc32c.value(rows.astype("<i8").tobytes())
    return google_crc32c.extend(crc, (when - np.int32(since_clock)).astype("<i4").tobytes())


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
                        held = shard.data[shard.skip : shard.skip + shard.stop - shard.start]
                        [shard.data], shard.skip = _device_copy([held]), 0
