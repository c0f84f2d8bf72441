# SPDX-License-Identifier: Apache-2.0
"""Captures rows of the training state: gathers them in pieces, and stages or pins them.

On the CPU backend shards are zero-copy numpy views, gathered by ``kernels`` (even numpy's gather is
10 times faster there than a jitted one). XLA does not donate a buffer while a view of it lives, so
a view is dropped as soon as its rows are copied. On an accelerator a gather is dispatched per shard
before ``save()`` returns, so later steps may donate the tables.

Staged rows are copies; pinned rows are views of the training state, or copies on their devices,
until they are written. Call the methods of both in this order: ``wait`` in the training thread,
``land`` in the background, ``pieces`` for each field, and finally ``release``, even after an error.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt import kernels, vocab
from deltackpt.codecs import Codec
from deltackpt.format import row_blocks
from deltackpt.format.row_blocks import Rows
from deltackpt.resources.runtime import Runtime, Task
from deltackpt.save import encode
from deltackpt.save.encode import Encoded
from deltackpt.state import placement
from deltackpt.state.stacks import MemberRows, array_of

#: Bytes of float32 input that are encoded at once on the CPU: they stay in the cache (measured at
#: 64 columns: half of it costs a fifth of the speed, eight times as much three quarters).
PIECE_BYTES = 2 << 20
#: Pieces of a field that are encoded while one is written: enough for two threads; other fields
#: keep further threads busy.
AHEAD = 2


class RowPiece(Protocol):
    """Consecutive rows of one field on their way to storage."""

    def host(self) -> np.ndarray:
        """Returns the rows in host memory, (n, *trailing)."""
        ...

    def encoded(self, codec: Codec) -> Encoded:
        """Returns the rows encoded by a lossy codec, in host memory."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class HostPiece:
    """Rows in host memory; at most ``piece_rows`` if they are encoded."""

    rows: np.ndarray

    def host(self) -> np.ndarray:
        """See ``RowPiece``."""
        return self.rows

    def encoded(self, codec: Codec) -> Encoded:
        """See ``RowPiece``."""
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
        """See ``RowPiece``."""
        rows = self.rows
        if isinstance(rows, jax.Array):
            rows = placement.host_copy(rows)
        return np.asarray(rows)[: self.count]

    @placement.neutral()
    def encoded(self, codec: Codec) -> Encoded:
        """See ``RowPiece``."""
        if self.dispatched is not None and self.dispatched[0] == codec:
            return encode.to_host(self.dispatched[1], self.count)
        with placement.on_device_of(self.rows):
            encoded = encode.encode(codec, self.rows)
        return encode.to_host(jax.tree.map(placement.host_copy, encoded), self.count)


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

    def over(self, pieces: Iterator[RowPiece]) -> Iterator[RowPiece]:
        """Yields the pieces; measures the time to produce each piece and to run its methods."""
        while True:
            with self:
                piece = next(pieces, None)
            if piece is None:
                return
            yield _ClockedPiece(piece, self)


@dataclasses.dataclass(frozen=True, eq=False)
class _ClockedPiece:
    """A piece whose methods count as work."""

    piece: RowPiece
    clock: BusyClock

    def host(self) -> np.ndarray:
        with self.clock:
            return self.piece.host()

    def encoded(self, codec: Codec) -> Encoded:
        with self.clock:
            return self.piece.encoded(codec)


def encode_ahead(
    codec: Codec, pieces: Iterable[RowPiece], runtime: Runtime
) -> Iterator[tuple[RowPiece, Encoded]]:
    """Yields encoded pieces; each must stay valid until ``AHEAD`` more are requested."""
    waiting: collections.deque[tuple[RowPiece, Task[Encoded]]] = collections.deque()
    for piece in pieces:
        waiting.append((piece, runtime.submit(piece.encoded, codec)))
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


@dataclasses.dataclass(eq=False, slots=True)
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


@dataclasses.dataclass(eq=False)
class FieldSource:
    """One field of one group on this process; shards ascend and do not overlap."""

    columns: tuple[int, int]
    trailing: tuple[int, ...]  # shape of one row as this process holds it
    dtype: np.dtype
    shards: list[FieldShard]
    #: Whether all shards are in host memory, and their ``bounds_of``; None if unknown. Both take
    #: long for a thousand shards.
    known_on_host: bool | None = None
    known_bounds: np.ndarray | None = None

    @property
    def on_host(self) -> bool:
        """Returns whether all shards are in host memory already."""
        if self.known_on_host is not None:
            return self.known_on_host
        return all(on_host(shard.data) for shard in self.shards)

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one row."""
        return math.prod(self.trailing) * self.dtype.itemsize

    def gather(self, rows: Rows, out: np.ndarray) -> None:
        """Copies ``rows`` into ``out``, (len(rows), *trailing)."""
        if isinstance(rows, np.ndarray):
            parts = np.searchsorted(rows, self._bounds)
            # All at once: one numpy call for each of a thousand shards would take 1 ms.
            firsts = [shard.first for shard in self.shards]
            local = rows - np.repeat(firsts, parts[:, 1] - parts[:, 0])
            for shard, (low, high) in zip(self.shards, parts.tolist()):
                if low < high and isinstance(shard.data, MemberRows):
                    shard.data.take(local[low:high], out[low:high])
                elif low < high:
                    kernels.gather(np.asarray(shard.data), local[low:high], out[low:high])
            return
        for shard in self.shards:
            part = row_blocks.row_slice(rows, shard.start, shard.stop)
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
        """Starts to read ``bits`` from the shards that hold them; returns a function that waits."""
        gather = _gather_on_host if self.on_host else dispatch_rows
        parts = [
            (high - low, gather(shard.data, rows[low:high] - shard.first))
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
        numbers = row_blocks.distinct(np.searchsorted(bounds[:, 0], rows, "right") - 1)
        parts = np.searchsorted(rows, bounds[numbers]).tolist()
        return [
            (self.shards[number], low, high) for number, (low, high) in zip(numbers.tolist(), parts)
        ]

    @property
    def _bounds(self) -> np.ndarray:
        return bounds_of(self.shards) if self.known_bounds is None else self.known_bounds

    def dispatch(self, rows: Rows, codec: Codec) -> list[DevicePiece]:
        """Starts to gather ``rows`` on devices, encoded if lossy, in pieces of bucketed length."""
        # To encode rows on a device takes temporary memory of twice their bytes and more.
        device_rows = max(1, _DEVICE_PIECE_BYTES // max(1, self.row_bytes))
        device_rows = max(_SMALLEST_BUCKET, 1 << (device_rows.bit_length() - 1))
        found = []
        for shard in self.shards:
            part = row_blocks.row_slice(rows, shard.start, shard.stop)
            count = part.stop - part.start
            if count == 0 and (found or shard is not self.shards[-1]):
                continue
            limit = max(1, count) if codec.lossless else device_rows
            for start in range(part.start, max(part.start + 1, part.stop), limit):
                chosen = np.asarray(rows[start : min(start + limit, part.stop)])
                local = np.zeros(bucket(len(chosen)), np.int32)
                local[: len(chosen)] = chosen - shard.first
                # A table may be there while its slots are on the device.
                if placement.in_host_memory(array_of(shard.data)):
                    piece = _gather_on_host(shard.data, local)
                else:
                    piece = _gather(shard.data, local)
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
            for shard in self.shards:
                part = rows[row_blocks.row_slice(rows, shard.start, shard.stop)]
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
    """The rows of one segment of a save, and where to read them."""

    group: str
    columns: tuple[int, int]
    rows: Rows
    fields: Mapping[str, FieldSource]
    key: str | None = None  # field with the ids of a delta's rows; None without one, and for bases
    evicted: bool = False  # no row has an id, and all other bits are 0

    @property
    def on_host(self) -> bool:
        """Returns whether all fields are in host memory already."""
        return all(field.on_host for field in self.fields.values())

    def is_view(self, name: str) -> bool:
        """Returns whether the pieces of a pinned field are views of the training state."""
        return not isinstance(self.rows, np.ndarray) and all(
            isinstance(shard.data, np.ndarray) and shard.data.flags.c_contiguous
            for shard in self.fields[name].shards
        )

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one row over all fields."""
        return sum(source.row_bytes for source in self.fields.values())

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all rows over all fields."""
        return self.row_bytes * len(self.rows)

    def bits(self, name: str, positions: np.ndarray) -> np.ndarray:
        """Returns the bits of a field of the rows at some positions; see ``FieldSource.bits``."""
        return self.fields[name].bits(np.asarray(self.rows)[positions])

    def detached(self) -> SegmentSource:
        """Returns the segment without its shards: a reference to them would block donation."""
        fields = {
            name: dataclasses.replace(source, shards=[]) for name, source in self.fields.items()
        }
        return dataclasses.replace(self, fields=fields)


def bounds_of(shards: Iterable[Any]) -> np.ndarray:
    """Returns the first row of each shard, and the row after its last one: (shards, 2)."""
    return np.array([(shard.start, shard.stop) for shard in shards], np.int64).reshape(-1, 2)


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
        return _gathered(data, rows)


@jax.jit
def _gathered(data: jax.Array, rows: np.ndarray) -> jax.Array:
    return data.at[rows].get(mode="clip")


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


def _start(shard: FieldShard) -> int:
    return shard.start


#: Rows of held state are encoded in pieces of about this size.
_HELD_PIECE_BYTES = row_blocks.CHUNK_BYTES
#: Copying fewer bytes takes less time than starting another thread.
_INLINE_BYTES = 4 << 20
#: Threads that copy smaller pieces, on average, wait for the GIL: for 1,000 tables of 51 KB each,
#: two threads are as slow as one, and use more CPU time.
_INLINE_PIECE_BYTES = 64 << 10
#: Fewer rows are not worth a thread.
_LEAST_SHARE = 4096
#: Evicted rows with fewer bytes are stored like others: their segment would be as large.
_LEAST_EVICTED_BYTES = 4096


def _split_evicted(
    segment: SegmentSource, bits_of: Callable[[str, np.ndarray], np.ndarray]
) -> list[tuple[SegmentSource, np.ndarray | None]]:
    """Splits off zero rows without an id; returns segments with row positions (None: all)."""
    name_of_key = segment.key or ""
    key = segment.fields.get(name_of_key)
    # A table of two columns may be split, and its key column with it.
    if key is None or vocab.column_fault((len(segment.rows), *key.trailing), key.dtype):
        return [(segment, None)]
    evicted = np.zeros(len(segment.rows), bool)
    step = max(1, _HELD_PIECE_BYTES // max(1, segment.row_bytes))
    for start in range(0, len(evicted), step):
        at = np.arange(start, min(start + step, len(evicted)))
        keys = bits_of(name_of_key, at).view(key.dtype).reshape(len(at), *key.trailing)
        at = at[vocab.ids_of(keys) == vocab.NO_ID]
        for name in segment.fields:
            if name != name_of_key and len(at):
                at = at[~bits_of(name, at).any(axis=1)]
        evicted[at] = True
    count = np.count_nonzero(evicted)
    if count * segment.row_bytes < _LEAST_EVICTED_BYTES:
        return [(segment, None)]
    rows, found = np.asarray(segment.rows), []
    if count < len(rows):
        others = dataclasses.replace(segment, rows=rows[~evicted])
        found.append((others, np.flatnonzero(~evicted)))
    gone = dataclasses.replace(segment, rows=rows[evicted], evicted=True)
    return [*found, (gone, np.flatnonzero(evicted))]


def _bits_of(held: Mapping[str, np.ndarray], name: str, positions: np.ndarray) -> np.ndarray:
    rows = held[name].take(positions, 0)
    return rows.reshape(len(rows), -1).view(np.uint8)


class StagedRows:
    """Rows being copied to their own memory; ``released`` once the state is no longer read."""

    pinned = False

    def __init__(
        self,
        segments: Sequence[SegmentSource],
        codecs_of: Callable[[SegmentSource], Mapping[str, Codec]],
        runtime: Runtime,
    ):
        """Starts to copy rows, on threads or on their devices.

        numpy copies without the interpreter's lock, so that the training thread can start Orbax's
        part of the save at the same time. Lossy ``codecs_of`` a segment encode on accelerators;
        those fields stay there until they are written, since a wider codec may be needed.
        """
        self.released = threading.Event()
        self._runtime = runtime
        self._tasks: list[Task[None]] = []
        #: Number of a segment and field to its rows in host memory, (rows, *trailing).
        self._on_host: dict[tuple[int, str], np.ndarray] = {}
        self._on_device: dict[tuple[int, str], list[DevicePiece]] = {}
        self._lossless: list[tuple[int, str]] = []
        #: For each segment, the number of the captured one and the positions of its rows there.
        self._origins: list[tuple[int, np.ndarray | None]] = [
            (number, None) for number in range(len(segments))
        ]
        try:
            for number, segment in enumerate(segments):
                codec_of = {} if segment.on_host else codecs_of(segment)
                for name, source in segment.fields.items():
                    if segment.on_host:
                        self._copy((number, name), source, segment.rows)
                    else:
                        codec = codec_of[name]
                        self._on_device[number, name] = source.dispatch(segment.rows, codec)
                        if codec.lossless:
                            self._lossless.append((number, name))
        except BaseException:
            self.release()
            raise
        self.segments = [segment.detached() for segment in segments]

    def _copy(self, key: tuple[int, str], source: FieldSource, rows: Rows) -> None:
        out = self._buffer_of(key, len(rows), source.trailing, source.dtype)
        if out.nbytes <= max(_INLINE_BYTES, _INLINE_PIECE_BYTES * len(source.shards)):
            source.gather(rows, out)
            return
        share = max(_LEAST_SHARE, -(-len(rows) // self._runtime.threads))
        for start in range(0, len(rows), share):
            part = slice(start, start + share)
            self._tasks.append(self._runtime.submit(source.gather, rows[part], out[part]))

    def _buffer_of(
        self, key: tuple[int, str], count: int, trailing: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        self._on_host[key] = self._runtime.memory.allocate((count, *trailing), dtype)
        return self._on_host[key]

    def wait(self) -> None:
        """Waits until the training state is no longer read; devices read it before later steps."""
        for task in self._tasks:
            task.wait()
        self.released.set()

    def land(self) -> None:
        """Waits for the copies, and copies lossless fields of devices to host memory."""
        self.wait()
        for task in self._tasks:
            task.result()
        while self._lossless:
            key = self._lossless.pop()
            pieces, start = self._on_device.pop(key), 0
            first, count = pieces[0].rows, len(self.segments[key[0]].rows)
            out = self._buffer_of(key, count, first.shape[1:], np.dtype(first.dtype))
            for piece in pieces:
                out[start : start + piece.count] = piece.host()
                start += piece.count
        if any(segment.key is not None for segment in self.segments):
            self._split_evicted()

    def _split_evicted(self) -> None:
        """Moves evicted rows to segments of their own, of which only the row indices are stored."""
        segments, self._origins = self.segments, []
        self.segments = []
        for number, segment in enumerate(segments):
            held = {
                name: rows
                for name in segment.fields
                if (rows := self._on_host.get((number, name))) is not None
            }
            parts: list[tuple[SegmentSource, np.ndarray | None]] = [(segment, None)]
            if len(held) == len(segment.fields):  # Otherwise, some were encoded on their device.
                parts = _split_evicted(segment, functools.partial(_bits_of, held))
            for part, positions in parts:
                self.segments.append(part)
                self._origins.append((number, positions))

    def pieces(self, number: int, field: str, codec: Codec) -> Iterator[RowPiece]:
        """Yields the rows of one field of a segment in order, in pieces suitable for a codec."""
        source = self.segments[number].fields[field]
        number, positions = self._origins[number]
        if (number, field) in self._on_device:
            yield from self._on_device[number, field]
            return
        rows, limit = self._on_host[number, field], piece_rows(source.trailing)
        if positions is not None:
            if codec.lossless:
                limit = max(1, _HELD_PIECE_BYTES // max(1, source.row_bytes))
            for start in range(0, len(positions), limit):
                yield HostPiece(rows.take(positions[start : start + limit], 0))
            return
        if codec.lossless:
            limit = max(1, len(rows))
        for start in range(0, len(rows), limit):
            yield HostPiece(rows[start : start + limit])

    def release(self) -> None:
        """Releases the memory, once nothing writes to it. Idempotent."""
        self.wait()
        self._runtime.memory.give_back(self._on_host.values())
        self._on_host.clear()
        self._on_device.clear()


class PinnedRows:
    """Rows that are read from the training state until they are written; see ``StagedRows``."""

    pinned = True

    def __init__(self, segments: Sequence[SegmentSource]):
        """Makes them outlive donation: a device copy off the CPU, where views already do."""
        self.released = threading.Event()
        self.segments = list(segments)
        for segment in segments:
            _hold(segment)

    def wait(self) -> None:
        """Does nothing: views are valid, and device copies precede later steps."""

    def land(self) -> None:
        """Finds evicted rows in the training state; see ``StagedRows.land``."""
        self.segments = [
            part for segment in self.segments for part, _ in _split_evicted(segment, segment.bits)
        ]

    def pieces(self, number: int, field: str, codec: Codec) -> Iterator[RowPiece]:
        """See ``StagedRows``: contiguous raw rows are written without a copy."""
        rows, source = self.segments[number].rows, self.segments[number].fields[field]
        chunk_rows = max(1, _HELD_PIECE_BYTES // max(1, source.row_bytes))
        if not codec.lossless:
            on_host = piece_rows(source.trailing)
            return source.pieces(rows, on_host if source.on_host else chunk_rows)
        in_place = (
            codec.name == "raw"
            and not isinstance(rows, np.ndarray)
            # Rows of a stack's member are not adjacent in memory.
            and not any(isinstance(shard.data, MemberRows) for shard in source.shards)
        )
        return source.pieces(rows, max(1, len(rows)) if in_place else chunk_rows)

    def release(self) -> None:
        """Drops the references to the training state."""
        self.segments = [segment.detached() for segment in self.segments]
        self.released.set()


#: The rows of one save, independent of later training steps.
CapturedRows = StagedRows | PinnedRows


@jax.jit
def _device_copy(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


def _hold(segment: SegmentSource) -> None:
    for source in segment.fields.values():
        for shard in source.shards:
            if isinstance(shard.data, MemberRows):
                shard.data = shard.data.detached()
            elif isinstance(shard.data, jax.Array):
                if on_host(shard.data):
                    shard.data = np.asarray(shard.data)
                else:
                    with placement.on_device_of(shard.data):
                        held = shard.data[shard.skip : shard.skip + shard.stop - shard.start]
                        [shard.data], shard.skip = _device_copy([held]), 0
