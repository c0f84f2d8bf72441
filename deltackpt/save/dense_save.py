# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of a save: captured from the training state, then written as an item or in a layer.

A base stores them in Orbax's layout. A delta or a WAL record stores them in its layer: whole, or,
if a ``DenseKeeper`` keeps the decoded values of the parent, only the blocks that changed. There a
leaf is a table of 256-wide rows; leaves of one dtype are stored end to end, and each codec has a
segment with some of their blocks. Small values and files are one segment of bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from deltackpt.errors import OptionError, UnsupportedLeaf
from deltackpt.format import naming, row_blocks
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.manifest import DenseEntry, KeyPath, LeafFigures, SaveId, path_name
from deltackpt.format.naming import PyTree
from deltackpt.format.records import IdentityCache
from deltackpt.format.row_blocks import (
    BLOCK,
    LOSSLESS,
    PLAIN,
    BlockedValue,
    DenseBlocks,
    Key,
    Segment,
)
from deltackpt.lazy_import import LazyModule
from deltackpt.resources.runtime import Runtime
from deltackpt.save import dense_layout
from deltackpt.save.commit import StepWriters
from deltackpt.save.dense_layout import Plan, WrittenChunk
from deltackpt.state import placement
from deltackpt.storage import ocdbt, shard_writer
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.ocdbt import ZARRAY, Value
from deltackpt.storage.shard_writer import SegmentSink

if TYPE_CHECKING:
    from deltackpt.codecs import block_codecs
    from deltackpt.save import block_codes, device_blocks
    from deltackpt.save.block_codes import Array, DenseReference, EncodedBlocks, LeafDelta
else:  # Saves without dense blocks need none of these.
    block_codecs = LazyModule("deltackpt.codecs.block_codecs")
    block_codes = LazyModule("deltackpt.save.block_codes")
    device_blocks = LazyModule("deltackpt.save.device_blocks")

#: Smaller copies that a keeper keeps are not lent, because staging lends whole MiB.
_LENT_BYTES = 1 << 20
#: Threads share copies of so many bytes at least, in pieces of about so many.
_LARGE_BYTES, _PIECE_BYTES = 8 << 20, 2 << 20
#: Leaves whose codec a record explains.
_MOST_REASONS = 16
#: Fewer plain bytes of whole leaves are not worth the time of the compressor's threads.
_COMPRESSED_BYTES = 64 << 10
_RAW = "raw"


class Coding(NamedTuple):
    """How a leaf is encoded in deltas: a codec, and the maximum relative l2 error or None."""

    codec: str = LOSSLESS
    max_error: float | None = None


#: Path and coding of a leaf that is stored whole.
_UNCODED = "", Coding()


def codings(
    codec: str | Mapping[str, str], max_error: float | None
) -> Callable[[KeyPath, str], Coding]:
    """Returns a cached function from a leaf's path and dtype to its coding.

    If ``codec`` maps globs over paths, the first match applies and leaves without a match are
    lossless. A single codec applies only to the floats that it can encode.
    """

    @functools.cache
    def coding_of(path: KeyPath, dtype: str) -> Coding:
        name, leaf = codec, path_name(path)
        if not isinstance(name, str):
            named = (one for glob, one in name.items() if naming.matches(glob, leaf))
            name = next(named, LOSSLESS)
        if name == LOSSLESS:
            return Coding()
        if block_codecs.get(name).accepts_dtype(dtype):
            return Coding(name, max_error)
        if isinstance(codec, str):
            return Coding()
        raise OptionError(
            f"Dense.codec: dense leaf {leaf}: expected {', '.join(block_codecs.FLOATS)} for "
            f"{name}, found {dtype}; integers, booleans, keys and counters are always "
            "lossless: put a glob for it with codec 'lossless' first, or leave it out"
        )

    return coding_of


@dataclasses.dataclass(eq=False, slots=True)
class DenseValue:
    """A captured value of the dense item.

    ``data`` is (n,) uint8 for a plain value. Otherwise it is (blocks, 256), padded with zeros, in
    host memory or on its device; of a whole leaf, it may be (n,) without the padding.
    """

    key: str  # in Orbax's database, or a file's path in the item
    group: str  # its dtype if it is stored as blocks, otherwise ``plain``
    data: Array
    shape: tuple[int, ...] | None  # of the chunk; None for a plain value that is not an array
    dtype: np.dtype  # of the chunk
    coding: Coding = Coding()
    leaf: str = ""  # path of its leaf; empty without one
    file: bool = False
    staged: bool = False  # whether the data is a part of ``DenseLeaves.staged``

    @classmethod
    def from_bytes(cls, key: str, data: bytes, *, file: bool = False) -> DenseValue:
        """Returns a value that is not an array."""
        found = np.frombuffer(data, np.uint8)
        return cls(key, PLAIN, found, None, found.dtype, file=file)

    @property
    def item_key(self) -> Key:
        """Returns its key among all values of the item."""
        return self.file, self.key

    @property
    def plain(self) -> bool:
        """Returns whether it is stored as bytes."""
        return self.group == PLAIN

    @property
    def count(self) -> int:
        """Returns the number of elements; for a plain value, of bytes."""
        return self.data.size if self.shape is None or self.plain else math.prod(self.shape)

    @property
    def array(self) -> np.ndarray:
        """Returns the chunk, or the bytes."""
        flat = np.asarray(self.data).reshape(-1)
        if self.shape is None:
            return flat
        return (flat.view(self.dtype) if self.plain else flat[: self.count]).reshape(self.shape)


class DenseLeaves:
    """The dense leaves that this process writes, independent of later training steps."""

    def __init__(
        self,
        plan: Plan,
        chunks: Sequence[DenseValue],
        runtime: Runtime,
        keeper: DenseKeeper | None,
        staged: Mapping[str, np.ndarray],
    ):
        #: Bytes of all values.
        self.nbytes = sum(value.data.nbytes for value in chunks)
        self.nbytes += sum(map(len, plan.described.values()))
        self.nbytes += sum(len(text.encode()) for text in plan.files.values())
        self.chunks = chunks
        self._plan = plan
        self._runtime = runtime
        self._keeper = keeper
        #: Group to the blocks of its staged values, end to end; empty with a keeper.
        self._staged = staged

    @classmethod
    def capture(cls, tree: PyTree, process: int, runtime: Runtime) -> DenseLeaves:
        """Copies the values that this process writes, to store them whole, also from devices."""
        return _captured(dense_layout.plan(tree, process), runtime)

    def write(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        """See ``commit.Item``: writes a base's item in Orbax's layout, and releases the memory."""
        own = item_dir
        if writers.count > 1:
            own = ocdbt.process_directory(item_dir, writers.process)
        values = [Value(key, data) for key, data in self._plan.described.items()]
        values += [Value(value.key, value.array) for value in self.chunks]
        try:
            ocdbt.write(own, values, batch, separate_nodes=not writers.shared_fs)
        finally:
            del values
            self.release()
        for name, text in self._plan.files.items():
            path = item_dir / name
            batch.make(path.parent)
            batch.write(path, text.encode())

    def values(self) -> Iterator[DenseValue]:
        """Yields all values of the item, in its order."""
        for name, text in self._plan.files.items():
            yield DenseValue.from_bytes(name, text.encode(), file=True)
        described = self._plan.described
        yield from _described_values.get(
            lambda: [DenseValue.from_bytes(*item) for item in described.items()], described
        )
        yield from self.chunks

    def complete(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        """See ``commit.Item``."""
        if writers.count > 1:
            ocdbt.merge(item_dir, range(writers.count), self._plan.described)
            own = {ocdbt.process_directory(item_dir, number) for number in range(writers.count)}
            batch.adopt(item_dir, but=own)  # Each digests and forces its own.

    def write_layer(
        self, sink_of: Callable[[str], SegmentSink], save_id: SaveId, parent: SaveId | None
    ) -> WrittenDense:
        """Writes the segments of a delta or a WAL record, and releases the memory.

        With a keeper, their values become the reference of the next one; without a parent, it
        writes whole leaves.
        """
        keeper, values = self._keeper, [*self.values()]
        deltas: list[LeafDelta] = []
        try:
            if keeper is None:
                return write_whole(sink_of, values, self._staged)
            deltas.extend(encode(values, keeper.reference_of(parent), self._runtime))
            keeper.keep(save_id, values, [delta.decoded for delta in deltas])
        finally:
            if keeper is not None:
                keeper.release(delta.decoded for delta in deltas)
            self.release()
        return write_changes(sink_of, values, deltas)

    def keep(self, save_id: SaveId) -> None:
        """Makes the values of a keeper the reference of a base, once it is committed."""
        assert self._keeper is not None
        values = [*self.values()]
        self._keeper.keep(save_id, values, [value.data for value in values])

    def release(self) -> None:
        """Releases the memory that no save needs. Idempotent."""
        if self._keeper is not None:
            self._keeper.release(value.data for value in self.chunks)
        else:
            self._runtime.memory.give_back(self._staged.values())
        self.chunks, self._staged = (), {}


#: The values of ``Plan.described``, which are equal in all saves of a layout.
_described_values: IdentityCache[list[DenseValue]] = IdentityCache()


class DenseKeeper:
    """Captures dense leaves for blocks, and keeps the decoded values of saves; thread-safe."""

    def __init__(
        self,
        coding_of: Callable[[KeyPath, str], Coding],
        runtime: Runtime,
        *,
        max_reference_bytes: int,
    ):
        """Keeps at most ``max_reference_bytes`` of references in host memory, over all saves.

        Leaves without room are hashed.
        """
        self.encodes_on_device = device_blocks.can_encode  # Imports it before the first save.
        #: With memory for the references, and for the copies of saves in flight.
        self.runtime = runtime.with_memory(2 * max_reference_bytes)
        self._coding_of, self._most_bytes = coding_of, max_reference_bytes
        self._lock = threading.RLock()
        self._kept: dict[SaveId, DenseReference] = {}

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all kept arrays, each counted once, without hashes."""
        with self._lock:
            held = {
                id(one): one.nbytes for kept in self._kept.values() for one in kept.data.values()
            }
        return sum(held.values())

    def reference_of(self, save_id: SaveId | None) -> DenseReference:
        """Returns a save's reference; empty if it has none."""
        with self._lock:
            found = None if save_id is None else self._kept.get(save_id)
        return found or block_codes.DenseReference()

    def capture(
        self,
        tree: PyTree,
        leaves: Sequence[DenseEntry],
        process: int,
        given: Mapping[str, np.ndarray] = types.MappingProxyType({}),
    ) -> DenseLeaves:
        """Copies the dense leaves of this process; waits for accelerators.

        ``given``: key to the bytes of chunks in memory that is never written, (n,) uint8; those
        that fill their blocks are not copied. UnsupportedLeaf: Orbax's handler has to write them.
        """
        plan = dense_layout.plan(tree, process)
        dtypes_of = {_name_of(chunk.key): chunk.dtype for chunk in plan.chunks}
        codings = {}
        for leaf in leaves:
            if (name := ".".join(leaf.key)) in dtypes_of:
                coding = self._coding_of(leaf.path, dtypes_of[name].name)
                codings[name] = path_name(leaf.path), coding
        found = _captured(plan, self.runtime, self, codings, given)
        try:
            lossy = (one.data.nbytes for one in found.chunks if one.coding.codec != LOSSLESS)
            # Buffers are up to a fourth larger than their contents.
            self.runtime.memory.max_kept_bytes = (found.nbytes + sum(lossy)) * 5 // 4
        except BaseException:  # An interrupt.
            found.release()
            raise
        return found

    def keep(self, save_id: SaveId, values: Sequence[DenseValue], decoded: Sequence[Array]) -> None:
        """Makes decoded values the reference of a save, once it is committed."""
        data = {value.item_key: one for value, one in zip(values, decoded, strict=True)}
        counts = {one.item_key: one.count for one in values}
        with self._lock:
            # The reference of a save that was restored again is replaced.
            dropped = self._kept.get(save_id)
            self._kept[save_id] = block_codes.DenseReference(data, counts)
        self._release([dropped])

    def committed(self, save_id: SaveId, parent: SaveId) -> None:
        """Keeps only the parent of the next delta, or the save if ``parent`` has no reference."""
        with self._lock:
            chosen = parent if parent in self._kept else save_id
            dropped = [self._kept.pop(other) for other in self._kept.keys() - {chosen}]
            if chosen in self._kept and self.nbytes > self._most_bytes:
                dropped.append(self._kept[chosen])
                self._kept[chosen] = self._fitting(self._kept[chosen])
        self._release(dropped)

    def failed(self, save_id: SaveId) -> None:
        """Drops the reference of a failed save. Idempotent."""
        with self._lock:
            dropped = self._kept.pop(save_id, None)
        self._release([dropped])

    def release(self, copies: Iterable[Array]) -> None:
        """Releases copies that no save keeps."""
        with self._lock:
            kept = {id(data) for one in self._kept.values() for data in one.data.values()}
            self.runtime.memory.give_back(data for data in copies if id(data) not in kept)

    def _release(self, dropped: Iterable[DenseReference | None]) -> None:
        self.release(data for one in dropped if one is not None for data in one.data.values())

    def _fitting(self, reference: DenseReference) -> DenseReference:
        """Returns as much as there is room for, in the order of the leaves; hashes of the rest."""
        data, hashes, room = {}, dict(reference.hashes), self._most_bytes
        for key, found in reference.data.items():
            if found.nbytes <= room:
                data[key], room = found, room - found.nbytes
            elif found.ndim == 2:
                hashes[key] = block_codes.Hashes.from_bytes(np.asarray(found))
        return block_codes.DenseReference(data, reference.counts, hashes)

    def adopt(
        self,
        save_id: SaveId,
        tree: PyTree,
        leaves: Sequence[DenseEntry],
        process: int,
        described: Mapping[str, bytes],
        held: Mapping[str, np.ndarray],
    ) -> None:
        """Makes a restored state, with its decoded values, the reference of its step.

        A leaf whose chunks differ from those ``described`` in the step, because the topology
        changed, is not a reference. The chunks ``held``, (bytes,) uint8 by key, are never written,
        and not copied: jax may alias them, and does not write to them even if arrays are donated.
        """
        try:
            changed = {
                key.removesuffix(f"/{ZARRAY}")
                for key, data in dense_layout.plan(tree).described.items()
                if described.get(key) != data
            }
            same = {key: data for key, data in held.items() if _name_of(key) not in changed}
            found = self.capture(tree, leaves, process, same)
        except UnsupportedLeaf:
            return
        kept = [value for value in found.chunks if _name_of(value.key) not in changed]
        self.keep(save_id, kept, [value.data for value in kept])
        self.committed(save_id, save_id)
        found.release()


def _captured(
    plan: Plan,
    runtime: Runtime,
    keeper: DenseKeeper | None = None,
    codings: Mapping[str, tuple[str, Coding]] = types.MappingProxyType({}),
    given: Mapping[str, np.ndarray] = types.MappingProxyType({}),
) -> DenseLeaves:
    """Copies the chunks of a plan; without a keeper, the values are stored whole."""
    values: list[DenseValue] = []
    on_host: list[tuple[WrittenChunk, DenseValue]] = []
    # All copies from accelerators start before any copy in host memory.
    for chunk, source in zip(plan.chunks, plan.sources, strict=True):
        leaf, coding = codings.get(_name_of(chunk.key), _UNCODED) if codings else _UNCODED
        value = DenseValue(
            chunk.key, chunk.group, source, chunk.shape, chunk.dtype, coding, leaf=leaf
        )
        values.append(value)
        if (
            keeper is not None
            and not chunk.on_host
            and keeper.encodes_on_device(coding.codec, chunk.group)
        ):
            value.data = device_blocks.capture(source, chunk.window)
            continue
        if not (chunk.on_host or chunk.key in given):
            value.data = placement.host_copy(source)
        on_host.append((chunk, value))
    staged: dict[str, np.ndarray] = {}
    copies: list[tuple[np.ndarray, np.ndarray]] = []
    try:
        if keeper is None:
            _allocate_staged(plan, runtime, staged)
        used = dict.fromkeys(staged, 0)
        for chunk, value in on_host:
            if (held := given.get(chunk.key)) is None:
                data = np.asarray(value.data)
                if chunk.shard is not None:
                    data = data[chunk.window]
                is_copied = chunk.on_host or keeper is not None
            else:
                data = held.view(chunk.dtype)
                is_copied = data.size % BLOCK > 0
            if value.plain:
                value.data = np.frombuffer(data.tobytes(), np.uint8)
                continue
            if not is_copied:
                flat = np.ascontiguousarray(data).reshape(-1)
                value.data = flat if flat.size % BLOCK else flat.reshape(-1, BLOCK)
                continue
            count = row_blocks.blocks_of(data.size)
            if keeper is None:
                start = used[chunk.group]
                used[chunk.group] = start + count
                value.data, value.staged = staged[chunk.group][start : start + count], True
            elif chunk.nbytes >= _LENT_BYTES:
                value.data = runtime.memory.allocate((count, BLOCK), chunk.dtype)
            else:
                value.data = np.empty((count, BLOCK), chunk.dtype)
            flat = value.data.reshape(-1)
            flat[data.size :] = 0
            copies.append((flat[: data.size].reshape(data.shape), data))
        _copy(copies, runtime)
        return DenseLeaves(plan, values, runtime, keeper, staged)
    except BaseException:
        runtime.memory.give_back([*staged.values(), *(value.data for value in values)])
        raise


def _allocate_staged(plan: Plan, runtime: Runtime, staged: dict[str, np.ndarray]) -> None:
    """Allocates one array of blocks for the chunks of each dtype that are in host memory."""
    counts: collections.Counter[tuple[str, np.dtype]] = collections.Counter()
    for chunk in plan.chunks:
        if chunk.on_host and chunk.nbytes:
            counts[chunk.group, chunk.dtype] += row_blocks.blocks_of(math.prod(chunk.shape))
    for (group, dtype), count in counts.items():
        staged[group] = runtime.memory.allocate((count, BLOCK), dtype)


def _copy(pairs: Sequence[tuple[np.ndarray, np.ndarray]], runtime: Runtime) -> None:
    """Copies arrays to others of their shapes; threads help if they are large."""
    large = sum(source.nbytes for _, source in pairs) >= _LARGE_BYTES
    pieces = [piece for pair in pairs for piece in _pieces(*pair)] if large else pairs
    runtime.map(lambda pair: np.copyto(*pair), pieces, threads=None if large else 1)


def _pieces(out: np.ndarray, source: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if source.nbytes < 2 * _PIECE_BYTES:
        yield out, source
        return
    count = max(1, len(source) * _PIECE_BYTES // source.nbytes)
    for start in range(0, len(source), count):
        yield out[start : start + count], source[start : start + count]


def _name_of(key: str) -> str:
    return key.rpartition("/")[0]


def _blocks(data: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the blocks of a value; if it lacks the padding, its last one is a padded copy."""
    if data.ndim == 2:
        yield data
        return
    full = len(data) // BLOCK * BLOCK
    if full:
        yield data[:full].reshape(-1, BLOCK)
    last = np.zeros((1, BLOCK), data.dtype)
    last[0, : len(data) - full] = data[full:]
    yield last


class WrittenDense(NamedTuple):
    """Dense leaves that were written."""

    record: DenseBlocks  # for the manifest
    nbytes: int
    leaves: tuple[LeafFigures, ...] = ()  # of which this process has a part; none if they are whole


def write_whole(
    sink_of: Callable[[str], SegmentSink],
    values: Iterable[DenseValue],
    staged: Mapping[str, np.ndarray],
) -> WrittenDense:
    """Writes all values in full; those in ``staged`` memory, by group, are one piece."""
    values = sorted(values, key=lambda value: (not value.plain, value.group, not value.staged))
    segments = []
    plain = [np.asarray(value.data) for value in values if value.plain]
    if nbytes := sum(data.nbytes for data in plain):
        segments.append(write_plain(sink_of, plain, zstd=nbytes >= _COMPRESSED_BYTES))
    for group, held in itertools.groupby(values[len(plain) :], lambda value: value.group):
        blocks = [staged[group]] if group in staged else []
        for value in held:
            if not value.staged:
                blocks.extend(_blocks(np.asarray(value.data)))
        rows = range(sum(map(len, blocks)))
        segments.append(_write_blocks(sink_of, group, _RAW, rows, {"": blocks}))
    described = tuple(_described(values, [True] * len(values)))
    record = DenseBlocks(values=described, segments=tuple(segments), complete=True)
    return WrittenDense(record, sum(_stored_bytes(record).values()))


def encode(
    values: Sequence[DenseValue], parent: DenseReference, runtime: Runtime
) -> Iterator[LeafDelta]:
    """Encodes values relative to the parent, or whole; may lend the memory of ``runtime``."""
    for value in values:
        data, before, hashes = value.data, None, None
        if parent.counts.get(value.item_key) == value.count:
            before, hashes = parent.data.get(value.item_key), parent.hashes.get(value.item_key)
        if before is not None and (before.shape, before.dtype) != (data.shape, data.dtype):
            before = None
        if value.plain:
            same = before is not None and bool((before == data).all())
            pieces = [block_codes.EncodedBlocks(_RAW, np.arange(1), {"": np.asarray(data)})]
            yield block_codes.LeafDelta([] if same else pieces, data, LOSSLESS, "", 0.0)
        elif isinstance(data, jax.Array) and not isinstance(before, np.ndarray) and hashes is None:
            yield device_blocks.encode_leaf_there(data, before, *value.coding, runtime)
        else:
            data = np.asarray(data)
            yield block_codes.encode_leaf(
                data,
                None if before is None else np.asarray(before),
                *value.coding,
                runtime,
                only=None if hashes is None else hashes.changed(data),
            )


def write_changes(
    sink_of: Callable[[str], SegmentSink], values: Sequence[DenseValue], deltas: Sequence[LeafDelta]
) -> WrittenDense:
    """Writes the changed blocks of values, given in the order of the item, from ``encode``."""
    described = tuple(_described(values, [bool(delta.pieces) for delta in deltas]))
    pieces: dict[tuple[str, str], list[EncodedBlocks]] = collections.defaultdict(list)
    reasons: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for value, delta, stored in zip(values, deltas, described, strict=True):
        for piece in delta.pieces:
            assert stored.at is not None
            place = value.group, piece.codec
            pieces[place].append(piece._replace(blocks=piece.blocks + stored.at))
            if delta.reason:
                reasons[place].append(f"{value.leaf}: {delta.reason}")
    segments = []
    plain = [piece.arrays[""] for piece in pieces.get((PLAIN, _RAW), ())]
    if any(data.nbytes for data in plain):
        segments.append(write_plain(sink_of, plain, zstd=True))
    for group, codec in sorted(pieces.keys() - {(PLAIN, _RAW)}):
        held, reason = pieces[group, codec], reasons[group, codec]
        rows: row_blocks.Rows = np.concatenate([piece.blocks for piece in held])
        if len(rows) == rows[-1] + 1 - rows[0]:
            rows = range(int(rows[0]), int(rows[-1]) + 1)
        by_suffix = {name: [piece.arrays[name] for piece in held] for name in held[0].arrays}
        text = "; ".join(dict.fromkeys(reason[:_MOST_REASONS]))
        text += "; and others" if len(reason) > _MOST_REASONS else ""
        segments.append(_write_blocks(sink_of, group, codec, rows, by_suffix, text))
    record = DenseBlocks(values=described, segments=tuple(segments))
    on_disk = _stored_bytes(record)
    shares = {
        place: on_disk.get(place, 0) / max(1, sum(piece.nbytes for piece in held))
        for place, held in pieces.items()
    }
    by_leaf: dict[str, list[LeafFigures]] = collections.defaultdict(list)
    for value, delta in zip(values, deltas, strict=True):
        if value.leaf:
            by_leaf[value.leaf].append(_figures(value, delta, shares))
    leaves = tuple(LeafFigures.joined(found) for found in by_leaf.values())
    return WrittenDense(record, sum(on_disk.values()), leaves)


def _described(values: Iterable[DenseValue], stored: Iterable[bool]) -> Iterator[BlockedValue]:
    """Yields the records of values, end to end in each group; plain ones only if stored."""
    ends: dict[str, int] = {}
    for value, is_stored in zip(values, stored, strict=True):
        at, count, group = None, value.count, value.group
        if is_stored or group != PLAIN:
            at = ends.get(group, 0)
            ends[group] = at + (count if group == PLAIN else row_blocks.blocks_of(count))
        yield BlockedValue(
            key=value.key,
            file=value.file,
            dtype="uint8" if group == PLAIN else group,
            count=count,
            group=group,
            at=at,
        )


def _stored_bytes(record: DenseBlocks) -> dict[tuple[str, str], int]:
    """Returns group and codec to the stored bytes of their segment."""
    return {
        (segment.group, encoding.codec): encoding.nbytes
        for segment in record.segments
        for encoding in segment.encodings
    }


def _figures(
    value: DenseValue, delta: LeafDelta, shares: Mapping[tuple[str, str], float]
) -> LeafFigures:
    """Returns figures of one value; ``shares``: bytes on disk per byte before compression."""
    return LeafFigures(
        leaf=value.leaf,
        codec=delta.codec,
        reason=delta.reason,
        raw_bytes=value.count * value.data.dtype.itemsize,
        nbytes=round(sum(one.nbytes * shares[value.group, one.codec] for one in delta.pieces)),
        blocks=1 if value.plain else len(value.data),
        changed_blocks=sum(len(one.blocks) for one in delta.pieces),
        relative_error=delta.error,
    )


def write_plain(
    sink_of: Callable[[str], SegmentSink], held: Sequence[np.ndarray], *, zstd: bool
) -> Segment:
    """Writes the bytes of plain values, (n,) uint8 each, not all empty."""
    sink = sink_of(f"{row_blocks.SEGMENTS}{PLAIN}")
    data, name = np.concatenate(held), row_blocks.PLAIN_BYTES_OF
    entry = row_blocks.array_entry(name, data.shape, data.dtype, zstd=zstd)
    stored = shard_writer.write_array(sink, entry, [data])
    bounds = np.array([0, len(data)])
    field = shard_writer.stored_field(name, [stored], codec=_RAW, reason="", bounds=bounds)
    return shard_writer.stored_segment(sink, PLAIN, (0, 1), range(len(data)), (), [field])


def _write_blocks(
    sink_of: Callable[[str], SegmentSink],
    group: str,
    codec: str,
    rows: row_blocks.Rows,
    held: Mapping[str, Sequence[np.ndarray]],
    reason: str = "",
) -> Segment:
    """Writes blocks of one group and codec, given each array's pieces by suffix."""
    sink, written = sink_of(f"{row_blocks.SEGMENTS}{group}.{codec}"), []
    row_indices = shard_writer.write_rows(sink, rows)
    for suffix, array in block_codecs.get(codec).stored(dtype_of(group)).items():
        pieces = [piece.view(array.dtype) for piece in held[suffix]]
        entry = row_blocks.array_entry(
            f"{row_blocks.BLOCKS}.{suffix}" if suffix else row_blocks.BLOCKS,
            (sum(map(len, pieces)), *array.trailing),
            array.dtype,
            zstd=array.zstd,
            byte_planes=array.byte_planes,
        )
        written.append(shard_writer.write_array(sink, entry, pieces))
    bounds = np.array([0, len(rows)])
    # ``reason``: why leaves have another codec than requested.
    field = shard_writer.stored_field(
        row_blocks.BLOCKS, written, codec=codec, reason=reason, bounds=bounds
    )
    return shard_writer.stored_segment(sink, group, (0, BLOCK), rows, row_indices, [field])
