# SPDX-License-Identifier: Apache-2.0
"""Captures rows of the training state: gathers them in pieces, and stages or pins them.

On the CPU backend, ``kernels`` gathers rows from the buffers of the shards (even numpy's gather is
10 times faster there than a jitted one). XLA does not donate a buffer while a view of it lives, so
no view is left when ``StagedRows.wait`` returns. On an accelerator a gather is dispatched per shard
before ``save()`` returns, so later steps may donate the tables.

Staged rows are copies; pinned rows are views of the training state, or copies on their devices,
until they are written. Call the methods of both in this order: ``wait`` in the training thread,
``land`` in the background, ``pieces`` for each field, and finally ``release``, even after an error.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from deltackpt import codecs, kernels, vocab
from deltackpt.codecs import Codec
from deltackpt.format import row_blocks
from deltackpt.format.row_blocks import Rows
from deltackpt.policies import PlannedCodec
from deltackpt.resources.runtime import Runtime, Task
from deltackpt.save import encode
from deltackpt.save.encode import Encoded
from deltackpt.state import placement, stacks
from deltackpt.state.stacks import MemberRows, array_of

_T = TypeVar("_T")
#: Bytes of float32 input that are encoded at once on the CPU: they stay in the cache (measured at
#: 64 columns: half of it costs a fifth of the speed, eight times as much three quarters).
PIECE_BYTES = 2 << 20
#: Pieces of a field that are encoded while one is written: enough for two threads; other fields
#: keep further threads busy.
AHEAD = 2


@dataclasses.dataclass(frozen=True, eq=False)
class HostPiece:
    """Rows in host memory; at most ``piece_rows`` if they are encoded."""

    rows: np.ndarray

    def host(self) -> np.ndarray:
        """Returns the rows, (n, *trailing)."""
        return self.rows

    def encoded(self, codec: Codec) -> Encoded:
        """Returns the rows encoded by a lossy codec."""
        return encode.on_host(codec, self.rows)


@dataclasses.dataclass(frozen=True, eq=False)
class DevicePiece:
    """The first ``count`` rows of an array on an accelerator, or of a table in host memory."""

    rows: jax.Array | np.ndarray
    count: int
    #: The codec and the encoded rows, if encoding has started.
    dispatched: tuple[Codec, Encoded] | None = None

    @classmethod
    @placement.neutral()
    def dispatch(cls, codec: Codec, rows: jax.Array | np.ndarray, count: int) -> DevicePiece:
        """Encodes rows on their device and starts to copy the result to the host."""
        with placement.on_device_of(rows):
            encoded = encode.encode(codec, rows)
        return cls(rows, count, (codec, jax.tree.map(placement.host_copy, encoded)))

    @placement.neutral()
    def host(self) -> np.ndarray:
        """Returns the rows in host memory, (n, *trailing)."""
        rows = self.rows
        if isinstance(rows, jax.Array):
            rows = placement.host_copy(rows)
        return np.asarray(rows)[: self.count]

    @placement.neutral()
    def encoded(self, codec: Codec) -> Encoded:
        """Returns the rows encoded by a lossy codec, in host memory."""
        dispatched = self.dispatched
        if dispatched is None or dispatched[0] != codec:
            dispatched = DevicePiece.dispatch(codec, self.rows, self.count).dispatched
        assert dispatched is not None
        return encode.to_host(dispatched[1], self.count)


#: Consecutive rows of one field on their way to storage.
RowPiece = HostPiece | DevicePiece


class BusyClock:
    """Measures the time during which at least one thread works; each enters it while it works."""

    def __init__(self):
        self._lock = threading.Lock()
        self._threads = 0
        self._since = 0.0
        #: Wall time so far; without what is under way.
        self.seconds = 0.0

    def __enter__(self) -> BusyClock:
        with self._lock:
            if self._threads == 0:
                self._since = time.perf_counter()
            self._threads += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                self.seconds += time.perf_counter() - self._since

    def timed(self, call: Callable[..., _T], *arguments: object) -> _T:
        """Returns the result of a call that counts as work."""
        with self:
            return call(*arguments)

    def over(self, items: Iterator[_T]) -> Iterator[_T]:
        """Yields the items; their production counts as work."""
        while True:
            with self:
                item = next(items, None)
            if item is None:
                return
            yield item


def encode_ahead(
    codec: Codec, pieces: Iterable[RowPiece], runtime: Runtime, clock: BusyClock
) -> Iterator[tuple[RowPiece, Encoded]]:
    """Yields encoded pieces; each must stay valid until ``AHEAD`` more are requested."""
    waiting: collections.deque[tuple[RowPiece, Task[Encoded]]] = collections.deque()
    for piece in pieces:
        waiting.append((piece, runtime.submit(clock.timed, piece.encoded, codec)))
        if len(waiting) > AHEAD:
            first, encoded = waiting.popleft()
            yield first, encoded.result()
    for first, encoded in waiting:
        yield first, encoded.result()


def piece_rows(trailing: tuple[int, ...]) -> int:
    """Returns the rows of a piece for ``on_host``: a power of two."""
    row_bytes = 4 * max(1, math.prod(trailing))
    return 1 << (max(encode.LEAST_ROWS, PIECE_BYTES // row_bytes).bit_length() - 1)


_SMALLEST_BUCKET = 1024
_DEVICE_PIECE_BYTES = 64 << 20


@dataclasses.dataclass(eq=False)
class FieldSource:
    """One field of one group on this process, in shards that ascend and do not overlap.

    Virtual rows ``bounds[i]`` are in ``data[i]``, whose first row is virtual row ``firsts[i]``.
    """

    columns: tuple[int, int]
    trailing: tuple[int, ...]  # shape of one row as this process holds it
    dtype: np.dtype
    on_host: bool  # whether all shards are in host memory
    bounds: np.ndarray  # (shards, 2) int64
    firsts: np.ndarray  # (shards,) int64
    data: list[Any]
    device_pieces: Sequence[DevicePiece] = ()  # captured on devices, in place of ``data``

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one row."""
        return math.prod(self.trailing) * self.dtype.itemsize

    @placement.neutral()
    def gather(self, rows: Rows, out: np.ndarray) -> None:
        """Copies ``rows`` into ``out``, (len(rows), *trailing)."""
        if isinstance(rows, np.ndarray):
            numbers, stops = self._holders(rows)
            held = [self.data[number] for number in numbers.tolist()]
            if not any(isinstance(data, MemberRows) for data in held):
                kernels.gather(held, self.firsts[numbers], stops, rows, out)
                return
        for data, first, chunk in self._chunks(rows):
            chosen = rows[chunk]
            if isinstance(chosen, np.ndarray):
                if isinstance(data, MemberRows):
                    data.take(chosen - first, out[chunk])
                else:
                    bounds = np.array([first]), np.array([len(chosen)])
                    kernels.gather([data], *bounds, chosen, out[chunk])
                continue
            assert isinstance(chosen, range)
            start, stop = chosen.start - first, chosen.stop - first
            if isinstance(data, MemberRows):
                data.copy(start, stop, out[chunk])
            else:
                np.copyto(out[chunk], np.asarray(data)[start:stop])

    def copied(self, rows: np.ndarray) -> FieldSource:
        """Returns the source with a copy of some rows, (n, *trailing), as its rows 0 to n."""
        bounds, firsts = np.array([[0, len(rows)]]), np.zeros(1, np.int64)
        return dataclasses.replace(
            self, on_host=True, bounds=bounds, firsts=firsts, data=[rows], device_pieces=()
        )

    def bits(self, rows: np.ndarray) -> np.ndarray:
        """Returns the bits of a few rows, ascending: (len(rows), row_bytes) uint8."""
        return self.dispatch_bits(rows)()

    def dispatch_bits(self, rows: np.ndarray) -> Callable[[], np.ndarray]:
        """Starts to read ``bits`` from the shards that hold them; returns a function that waits."""
        found = np.empty((len(rows), *self.trailing), self.dtype)
        row_items, chunks = math.prod(self.trailing), []
        if self.on_host:
            self.gather(rows, found)
        else:
            chunks = [
                (found[chunk], dispatch_rows(data, rows[chunk] - first))
                for data, first, chunk in self._chunks(rows)
            ]

        def landed() -> np.ndarray:
            for out, landing in chunks:
                out[...] = np.asarray(landing)[: len(out)]
            return found.reshape(len(found), row_items).view(np.uint8)

        return landed

    def held_positions(self, rows: np.ndarray) -> np.ndarray | slice:
        """Returns the positions, in ascending ``rows``, of those that are in a shard."""
        ends = np.searchsorted(rows, self.bounds)
        if (ends[:, 1] - ends[:, 0]).sum() == len(rows):
            return slice(None)
        return np.concatenate([np.arange(*pair) for pair in ends.tolist()])

    def _holders(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the shards that hold some rows, and the positions at which these end."""
        ends = self.bounds[:, 1]
        if len(ends) == 1 and len(rows):
            return np.zeros(1, np.int64), np.array([len(rows)])
        if isinstance(rows, np.ndarray):
            stops = np.searchsorted(rows, ends)
        else:
            found = [row_blocks.row_slice(rows, 0, end).stop for end in ends.tolist()]
            stops = np.array(found, np.int64)
        numbers = np.flatnonzero(np.diff(stops, prepend=0))
        return numbers, stops[numbers]

    def _chunks(self, rows: Rows) -> Iterator[tuple[Any, int, slice]]:
        """The arrays that hold some rows, each with its first row and the positions of these."""
        numbers, stops = self._holders(rows)
        start = 0
        for number, stop in zip(numbers.tolist(), stops.tolist()):
            yield self.data[number], int(self.firsts[number]), slice(start, stop)
            start = stop

    def dispatch(self, rows: Rows, codec: Codec) -> list[DevicePiece]:
        """Starts to gather ``rows`` on devices, encoded if lossy, in pieces of bucketed length."""
        # To encode rows on a device takes temporary memory of twice their bytes and more.
        device_rows = max(1, _DEVICE_PIECE_BYTES // max(1, self.row_bytes))
        device_rows = max(_SMALLEST_BUCKET, 1 << (device_rows.bit_length() - 1))
        # Without rows, one piece has the shape and the dtype of the field.
        chunks = [*self._chunks(rows)] or [(self.data[-1], int(self.firsts[-1]), slice(0, 0))]
        found = []
        for data, first, chunk in chunks:
            limit = max(1, chunk.stop - chunk.start) if codec.lossless else device_rows
            for start in range(chunk.start, max(chunk.start + 1, chunk.stop), limit):
                chosen = np.asarray(rows[start : min(start + limit, chunk.stop)])
                local = np.zeros(bucket(len(chosen)), np.int32)
                local[: len(chosen)] = chosen - first
                # A table may be there while its slots are on the device.
                if placement.in_host_memory(array_of(data)):
                    piece = _gather_on_host(data, local)
                else:
                    piece = _gather(data, local)
                if codec.lossless:
                    if isinstance(piece, jax.Array):
                        piece = placement.host_copy(piece)
                    found.append(DevicePiece(piece, len(chosen)))
                else:
                    found.append(DevicePiece.dispatch(codec, piece, len(chosen)))
        return found

    def pieces(self, rows: Rows, limit_rows: int) -> Iterator[RowPiece]:
        """Yields ``rows`` in pieces, views if contiguous; ``AHEAD`` earlier ones stay valid."""
        if not isinstance(rows, np.ndarray):
            for array, first, chunk in self._chunks(rows):
                chosen = rows[chunk]
                assert isinstance(chosen, range)
                for start in range(chosen.start, chosen.stop, limit_rows):
                    stop = min(start + limit_rows, chosen.stop)
                    data = array[start - first : stop - first]
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
    """The rows of one segment of a save, and where to read them."""

    group: str
    columns: tuple[int, int]
    rows: Rows
    fields: Mapping[str, FieldSource]
    key: str | None = None  # field with the ids of a delta's rows; None without one, and for bases
    evicted: bool = False  # no row has an id, and all other bits are 0
    copied_rows: Rows | None = None  # where ``fields`` have the rows, if these are copies

    @property
    def on_host(self) -> bool:
        """Returns whether all fields are in host memory already."""
        return all(field.on_host for field in self.fields.values())

    def is_view(self, name: str) -> bool:
        """Returns whether the pieces of a pinned field are views of the training state."""
        return not isinstance(self.rows, np.ndarray) and all(
            isinstance(data, np.ndarray) and data.flags.c_contiguous
            for data in self.fields[name].data
        )

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one row over all fields."""
        return sum(source.row_bytes for source in self.fields.values())

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all rows over all fields."""
        return self.row_bytes * len(self.rows)

    @property
    def source_rows(self) -> Rows:
        """Returns the rows of ``fields`` to read."""
        return self.rows if self.copied_rows is None else self.copied_rows

    def bits(self, name: str, positions: np.ndarray) -> np.ndarray:
        """Returns the bits of a field of the rows at some positions; see ``FieldSource.bits``."""
        return self.fields[name].bits(_at(self.source_rows, positions))

    def chosen(self, positions: np.ndarray, *, evicted: bool = False) -> SegmentSource:
        """Returns the rows at some positions as a segment."""
        copied = None if self.copied_rows is None else _at(self.copied_rows, positions)
        rows = _at(self.rows, positions)
        return dataclasses.replace(self, rows=rows, copied_rows=copied, evicted=evicted)

    def detached(self) -> SegmentSource:
        """Returns the segment without its arrays: a reference to them would block donation."""
        fields = {
            name: dataclasses.replace(source, data=[], device_pieces=())
            for name, source in self.fields.items()
        }
        return dataclasses.replace(self, fields=fields)


def _at(rows: Rows, positions: np.ndarray) -> np.ndarray:
    return positions + rows.start if isinstance(rows, range) else np.asarray(rows)[positions]


def on_host(leaf: object) -> bool:
    """Returns whether a leaf, or the stacked array that holds it, is in host memory."""
    return leaf.on_host if isinstance(leaf, MemberRows) else placement.on_host(leaf)


def bucket(count: int) -> int:
    """Returns the static size of a gather of ``count`` rows: few sizes compile."""
    return max(_SMALLEST_BUCKET, 1 << max(0, count - 1).bit_length())


def _gather(data: object, rows: np.ndarray) -> jax.Array:
    if isinstance(data, MemberRows):
        return data.on_device(rows)
    with placement.on_device_of(data):
        return stacks.gathered(data, rows)


def _gather_on_host(data: object, rows: np.ndarray) -> np.ndarray:
    return data.take(rows) if isinstance(data, MemberRows) else np.asarray(data).take(rows, 0)


def dispatch_rows(data: object, rows: np.ndarray) -> Any:
    """Starts to copy rows of one shard to the host; padding rows may follow them."""
    if on_host(data):
        return _gather_on_host(data, rows)
    padded = np.zeros(bucket(len(rows)), np.int32)
    padded[: len(rows)] = rows
    with placement.neutral():
        return placement.host_copy(_gather(data, padded))


#: Rows of held state are encoded in pieces of about this size.
_HELD_PIECE_BYTES = row_blocks.CHUNK_BYTES
#: Copying fewer bytes takes less time than starting another thread.
_INLINE_BYTES = 4 << 20
#: Fewer rows are not worth a thread.
_LEAST_SHARE = 4096
#: Evicted rows with fewer bytes are stored like others: their segment would be as large.
_LEAST_EVICTED_BYTES = 4096


def _split_evicted(segment: SegmentSource) -> list[SegmentSource]:
    """Splits off zero rows without an id, of which only the row indices are stored."""
    name_of_key = segment.key or ""
    key = segment.fields.get(name_of_key)
    # A table of two columns may be split, and its key column with it.
    if key is None or vocab.column_fault((len(segment.rows), *key.trailing), key.dtype):
        return [segment]
    if any(source.device_pieces for source in segment.fields.values()):  # Encoded on their device.
        return [segment]
    evicted = np.zeros(len(segment.rows), bool)
    step = max(1, _HELD_PIECE_BYTES // max(1, segment.row_bytes))
    for start in range(0, len(evicted), step):
        at = np.arange(start, min(start + step, len(evicted)))
        keys = segment.bits(name_of_key, at).view(key.dtype).reshape(len(at), *key.trailing)
        at = at[vocab.ids_of(keys) == vocab.NO_ID]
        for name in segment.fields:
            if name != name_of_key and len(at):
                at = at[~segment.bits(name, at).any(axis=1)]
        evicted[at] = True
    if np.count_nonzero(evicted) * segment.row_bytes < _LEAST_EVICTED_BYTES:
        return [segment]
    gone = segment.chosen(np.flatnonzero(evicted), evicted=True)
    return [gone] if evicted.all() else [segment.chosen(np.flatnonzero(~evicted)), gone]


class CapturedRows:
    """The rows of a save or WAL record; ``released`` once the training state is no longer read."""

    pinned = False

    def __init__(self) -> None:
        self.released = threading.Event()
        self.segments: list[SegmentSource] = []

    def wait(self) -> None:
        """Waits until the training state may be donated."""

    def land(self) -> None:
        """Waits until all rows can be read, and moves evicted ones to segments of their own."""
        self.segments = [one for segment in self.segments for one in _split_evicted(segment)]

    def pieces(self, number: int, field: str, codec: Codec) -> Iterator[RowPiece]:
        """Yields the rows of one field of a segment in order, in pieces suitable for a codec."""
        rows, source = self.segments[number].source_rows, self.segments[number].fields[field]
        if source.device_pieces:
            return iter(source.device_pieces)
        chunk_rows = max(1, _HELD_PIECE_BYTES // max(1, source.row_bytes))
        if not codec.lossless:
            on_host = piece_rows(source.trailing)
            return source.pieces(rows, on_host if source.on_host else chunk_rows)
        # Contiguous raw rows are written without a copy.
        in_place = (
            codec.name == "raw"
            and not isinstance(rows, np.ndarray)
            # Rows of a stack's member are not adjacent in memory.
            and not any(isinstance(data, MemberRows) for data in source.data)
        )
        return source.pieces(rows, max(1, len(rows)) if in_place else chunk_rows)

    def release(self) -> None:
        """Drops the rows. Idempotent."""
        self.segments = [segment.detached() for segment in self.segments]
        self.released.set()


class StagedRows(CapturedRows):
    """Rows being copied to their own memory."""

    def __init__(
        self,
        segments: Sequence[SegmentSource],
        plans: Mapping[str, Mapping[str, PlannedCodec]],
        runtime: Runtime,
    ):
        """Starts to copy rows, on threads or on their devices.

        numpy copies without the interpreter's lock, so that the training thread can start Orbax's
        part of the save at the same time. Lossy codecs, planned by group and field, encode on
        accelerators; their fields stay there until they are written: a wider codec may be needed.
        """
        super().__init__()
        self._runtime = runtime
        self._tasks: list[Task[None]] = []
        self._buffers: list[np.ndarray] = []
        try:
            for segment in segments:
                fields = {}
                for name, source in segment.fields.items():
                    if segment.on_host:
                        fields[name] = self._copy(source, segment.rows)
                    else:
                        codec = codecs.get(plans[segment.group][name].codec)
                        pieces = source.dispatch(segment.rows, codec)
                        fields[name] = dataclasses.replace(source, data=[], device_pieces=pieces)
                rows = range(len(segment.rows))
                self.segments.append(dataclasses.replace(segment, fields=fields, copied_rows=rows))
        except BaseException:
            self.release()
            raise

    def _copy(self, source: FieldSource, rows: Rows) -> FieldSource:
        out = self._allocate(len(rows), source)
        if out.nbytes <= _INLINE_BYTES:
            source.gather(rows, out)
            return source.copied(out)
        share = max(_LEAST_SHARE, -(-len(rows) // self._runtime.threads))
        for start in range(0, len(rows), share):
            chunk = slice(start, start + share)
            self._tasks.append(self._runtime.submit(source.gather, rows[chunk], out[chunk]))
        return source.copied(out)

    def _allocate(self, count: int, source: FieldSource) -> np.ndarray:
        self._buffers.append(self._runtime.memory.allocate((count, *source.trailing), source.dtype))
        return self._buffers[-1]

    def wait(self) -> None:
        """See ``CapturedRows``; devices read the state before later steps."""
        for task in self._tasks:
            task.wait()
        self.released.set()

    def land(self) -> None:
        """See ``CapturedRows``: copies lossless fields of devices to host memory."""
        self.wait()
        for task in self._tasks:
            task.result()
        for segment in self.segments:
            segment.fields = fields = dict(segment.fields)  # Each copy frees memory of its device.
            for name in fields:
                pieces = fields[name].device_pieces
                if pieces and pieces[0].dispatched is None:
                    out, start = self._allocate(len(segment.rows), fields[name]), 0
                    for piece in pieces:
                        out[start : start + piece.count] = piece.host()
                        start += piece.count
                    fields[name] = fields[name].copied(out)
        super().land()

    def release(self) -> None:
        """See ``CapturedRows``: gives the memory back once nothing writes to it."""
        self.wait()
        super().release()
        self._runtime.memory.give_back(self._buffers)
        self._buffers.clear()


class PinnedRows(CapturedRows):
    """Rows that are read from the training state until they are written."""

    pinned = True

    def __init__(self, segments: Sequence[SegmentSource]):
        """Makes them outlive donation: a device copy off the CPU, where views already do."""
        super().__init__()
        self.segments = list(segments)
        for segment in segments:
            _hold(segment)


def _hold(segment: SegmentSource) -> None:
    for source in segment.fields.values():
        source.firsts = source.firsts.copy()
        for number, data in enumerate(source.data):
            if isinstance(data, MemberRows):
                source.data[number] = data.detached()
            elif isinstance(data, jax.Array) and on_host(data):
                source.data[number] = np.asarray(data)
            elif isinstance(data, jax.Array):
                start, stop = (source.bounds[number] - source.firsts[number]).tolist()
                with placement.on_device_of(data):
                    source.data[number] = stacks.copied(data[start:stop])
                source.firsts[number] = source.bounds[number, 0]
