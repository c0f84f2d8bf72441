# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of saves and WAL records whose layers contain them; no jax.

A layer lists the values of its process's shard of the dense item, and contains the blocks that
changed. ``DensePlan`` determines from the newest save backwards what is needed: once a block has a
codec that is not relative, older saves are not needed for it. Blocks that no layer completes come
from the base's item, in Orbax's layout. ``layers.merge`` then applies what is needed.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np

from deltackpt import codecs
from deltackpt.cached import cached_property
from deltackpt.codecs import block_codecs
from deltackpt.errors import Damaged, OptionError
from deltackpt.format import naming, row_blocks
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.row_blocks import (
    BLOCK,
    BLOCKS,
    PLAIN,
    ArrayEntry,
    BlockedValue,
    DenseBlocks,
    Key,
    Rows,
    Segment,
    StoredRows,
)
from deltackpt.layers import merge, row_indices
from deltackpt.layers.block_pieces import BlockField, BlockPiece
from deltackpt.layers.targets import Target
from deltackpt.reading import orbax_values
from deltackpt.reading.chains import read_whole
from deltackpt.reading.orbax_values import OnFilled, OrbaxValues, ignore_range
from deltackpt.reading.shard_arrays import LayerArrays
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.resources import host_memory
from deltackpt.resources.runtime import Memory, Runtime, Task
from deltackpt.storage import ocdbt
from deltackpt.storage.ocdbt import ZARRAY

#: Values up to this size are allocated without a check of their claimed length.
_SMALL_BYTES = 64 << 20
#: The changes of smaller leaves are mostly Python code, which threads only slow down.
_SMALL_LEAF_BYTES = 1 << 20
#: Bytes of a value that a chain changes; they stay in the CPU cache.
_CHAIN_BYTES = 4 << 20
#: Threads that read and decode.
_READERS = 3


class DenseValues(NamedTuple):
    """The dense leaves of a step or recovery point, decoded; see ``Base``.

    ``values`` are those of Orbax's database, and ``files`` the files beside it. ``dtypes`` are
    those of the values that layers contain, ``uint8`` for plain ones. ``bytes_read`` is what had to
    be read for them: arrays before any compression, and ranges of Orbax's files.
    """

    values: Mapping[str, memoryview]
    files: Mapping[str, memoryview]
    dtypes: Mapping[Key, str] = MappingProxyType({})
    bytes_read: int = 0

    def items(self) -> Iterator[tuple[Key, memoryview]]:
        """Yields the keys and bytes of all values and files."""
        yield from (((False, name), data) for name, data in self.values.items())
        yield from (((True, name), data) for name, data in self.files.items())

    def get(self, key: Key) -> memoryview | None:
        """Returns the bytes of a value or file, or None."""
        file, name = key
        return (self.files if file else self.values).get(name)

    def nbytes(self, key: Key) -> int | None:
        """See ``BaseItem``."""
        found = self.get(key)
        return None if found is None else found.nbytes

    def fill(self, into: Mapping[Key, np.ndarray], on_filled: OnFilled = ignore_range) -> int:
        """See ``BaseItem``; a plan has checked that it has the values."""
        for key, out in into.items():
            out[:] = np.frombuffer(self.get(key) or b"", np.uint8)
        return 0


#: Returns memory for a value, of ``shape_of`` it; padding in it may have any contents.
Room = Callable[[BlockedValue], np.ndarray]


def shape_of(value: BlockedValue) -> tuple[int, ...]:
    """Returns the shape of a value's buffer: (blocks, 256); for a plain one (bytes,)."""
    return (value.count,) if value.plain else (value.blocks, BLOCK)


def new_memory(value: BlockedValue) -> np.ndarray:
    """Returns new memory for a value."""
    return host_memory.empty_buffer(shape_of(value), dtype_of(value.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class DenseShard:
    """The dense leaves that one process wrote in a step or a WAL record."""

    arrays: LayerArrays
    record: DenseBlocks
    name: str

    def name_of(self, segment: Segment, entry: ArrayEntry) -> str:
        """See ``layers.row_indices.Source``."""
        return self.arrays.name_of(segment, entry)

    def read_into(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        """See ``layers.row_indices.Source``."""
        self.arrays.read_into(segment, entry, start, stop, out)

    def rows(self, segment: Segment) -> Rows:
        """Returns the indices of the blocks of a segment in its group, ascending."""
        if segment.ranges is not None:
            rows = row_blocks.rows_of(segment.ranges)
        else:
            rows = self.arrays.row_indices(segment).rows
        if len(rows) != segment.count:
            raise Damaged(self.name, f"{segment.count} blocks of {segment.name}", f"{len(rows)}")
        total = sum(value.blocks for value in self.record.of_group(segment.group))
        if (end := row_blocks.reach(rows)[1]) > total:
            raise Damaged(f"{self.name}, {segment.name}", f"rows below {total}", f"{end - 1}")
        return rows

    def codec_of(self, segment: Segment) -> block_codecs.BlockCodec:
        """Returns the codec of a segment's blocks; raises Damaged if it is unknown."""
        used = [encoding.codec for encoding in segment.encodings if encoding.field == BLOCKS]
        try:
            [codec] = used
            return block_codecs.get(codec)
        except (ValueError, OptionError) as error:
            raise Damaged(self.name, f"a codec of {segment.name}", f"{used}") from error

    def field_of(self, segment: Segment) -> BlockField:
        """Returns the blocks of a segment; raises Damaged if an array of its codec is missing."""
        codec, entries = self.codec_of(segment), {entry.name: entry for entry in segment.arrays}
        if not codec.accepts_dtype(segment.group):
            expected = f"a codec of {segment.group} for {segment.name}"
            raise Damaged(self.name, expected, codec.name)
        for suffix, array in codec.stored(dtype_of(segment.group)).items():
            name = codecs.array_name(BLOCKS, suffix)
            found, expected = entries.get(name), f"{array.dtype.name} array {name}"
            if found is None:
                raise Damaged(self.name, f"{expected} of {segment.name}", "none")
            count = found.shape[0] if array.ragged else segment.count
            if found.shape != (count, *array.trailing) or found.dtype != array.dtype.name:
                shown = f"{found.dtype}{list(found.shape)}"
                raise Damaged(self.name, f"{expected} of {segment.name}", shown)
        return BlockField(self, segment, codec)

    @cached_property
    def plain_bytes(self) -> np.ndarray:
        """The bytes of all its plain values, (n,) uint8; it has some."""
        [segment] = [segment for segment in self.record.segments if segment.group == PLAIN]
        [entry] = segment.arrays
        out = host_memory.empty_buffer((segment.count,), np.dtype(np.uint8))
        self.read_into(segment, entry, 0, segment.count, out)
        return out


def open_values(
    saves: Sequence[StoredSave],
    wanted: Callable[[str], bool] = lambda key: True,
    *,
    item_of: Callable[[StoredSave], OrbaxValues] = orbax_values.open_values,
    room: Room = new_memory,
) -> DenseValues:
    """Returns the dense item of the last save of a chain, read with ``chains.read_whole``.

    ``wanted`` is whether to read the value of a key of the database; files are always read.
    ``item_of`` returns Orbax's item of a base; callers that read a step repeatedly cache it.
    ``room`` allocates the values of blocks; values of a base have their own memory.
    """

    def read(saves: Sequence[StoredSave]) -> DenseValues:
        return StoredItem(saves, item_of, room=room).read(wanted)

    return read_whole(saves, read)


class StoredItem:
    """The dense item of a step, read on demand.

    ``shards`` are the dense leaves in the layers of each delta, newest first; empty if the step has
    Orbax's item. ``base`` is Orbax's item below them; None if no older save is needed, or if the
    chain has no base. ``fresh`` is whether what is read has no other owner, and may be kept and
    changed.
    """

    fresh = True

    def __init__(
        self,
        saves: Sequence[StoredSave],
        item_of: Callable[[StoredSave], OrbaxValues] = orbax_values.open_values,
        *,
        room: Room = new_memory,
    ):
        """Reads only the manifests of a chain of ``read_chain``; see ``open_values``."""
        self.shards: list[list[DenseShard]] = []
        self.base: BaseItem | None = None
        for save in reversed(saves):
            if save.head.dense_blocks is None:
                self.base = BaseItem(save, item_of)
                break
            self.shards.append([*shards(save)])
            if not save.needs_older_dense:
                break
        self._room = room
        self._name = saves[-1].name

    @cached_property
    def outline(self) -> DenseValues:
        """All files, and the metadata of the arrays."""
        return self.read(lambda key: key.endswith(f"/{ZARRAY}"))

    @cached_property
    def missing(self) -> Mapping[Key, BlockedValue]:
        """The values that the deltas do not complete; reads only records and row indices."""
        if not self.shards:
            return {}
        return DensePlan.sized(self.shards, self._name, lambda key: True, self.base).missing

    def check(self) -> None:
        """Raises Damaged if the chain lacks something that the deltas need, without reading values.

        Each save may be intact by itself and still lack what a later one needs, for example if the
        base was replaced by another one.
        """
        if not self.shards:
            return
        for key, value in self.missing.items():
            name, nbytes = self._name, None
            if self.base is not None:
                name, nbytes = self.base.item.name, self.base.nbytes(key)
            if nbytes != value.nbytes:
                expected = f"{value.nbytes} bytes of {key[1]}, which {self._name} builds on"
                raise Damaged(name, expected, "none" if nbytes is None else f"{nbytes}")
        values = (value for shard in self.shards[0] for value in shard.record.values)
        keys = {value.key for value in values if not value.file}
        ocdbt.check_keys(self._name, keys, self.outline.values)

    def read(self, wanted: Callable[[str], bool]) -> DenseValues:
        """Returns the wanted values of the database, and all files."""
        if self.shards:
            return values_of(self.shards, self.base, self._name, wanted, self._room)
        assert self.base is not None
        return self.base.all(wanted)


@dataclasses.dataclass(frozen=True, eq=False)
class BaseItem:
    """The item of a base, opened only if needed, since it may have been removed."""

    save: StoredSave
    item_of: Callable[[StoredSave], OrbaxValues] = orbax_values.open_values

    @cached_property
    def item(self) -> OrbaxValues:
        """The item, which caches what it has verified."""
        return self.item_of(self.save)

    def nbytes(self, key: Key) -> int | None:
        """Returns a value's size in bytes according to the item, or None."""
        return self.item.nbytes(key)

    def fill(self, into: Mapping[Key, np.ndarray], on_filled: OnFilled = ignore_range) -> int:
        """Reads and verifies values, directly into their destination, (bytes,) uint8; counts bytes.

        Several threads may call ``on_filled``, once with each range of bytes that was read, before
        it is verified. The callee may modify the range afterwards. Raises Damaged if a value is
        missing, altered, or has another length.
        """
        before = self.item.bytes_read
        self.item.fill(into, on_filled)
        return self.item.bytes_read - before

    def all(self, wanted: Callable[[str], bool]) -> DenseValues:
        """Returns all files, and the wanted values."""
        before = self.item.bytes_read
        found = self.item.read([key for key in self.item.keys() if key[0] or wanted(key[1])])
        return _split(found)._replace(bytes_read=self.item.bytes_read - before)


#: What is below some layers.
Base: TypeAlias = BaseItem | DenseValues


def listed(save: StoredSave) -> list[BlockedValue]:
    """Returns the dense item's values if a save stores them in its layers; otherwise none."""
    if save.head.dense_blocks is None:
        return []
    return [value for shard in shards(save) for value in shard.record.values]


def shards(save: StoredSave) -> Iterator[DenseShard]:
    """Yields the dense leaves that each process wrote, for a save with them in its layers."""
    for process, arrays, record in save.dense_layers():
        yield DenseShard(arrays, record, f"{save.name}, process {process}")


def values_of(
    saves: Sequence[Sequence[DenseShard]],
    base: Base | None,
    name: str,
    wanted: Callable[[str], bool] = lambda key: True,
    room: Room = new_memory,
) -> DenseValues:
    """Returns the dense item at the newest of some saves or WAL records, newest first.

    Values that the layers do not change are those of ``base``, the dense item below the oldest one;
    if that is in memory, it is never written. See ``open_values`` for ``wanted`` and ``room``.
    """
    plan = DensePlan.sized(saves, name, lambda key: key[0] or wanted(key[1]), base)
    found = _split(plan.read(room, base))
    return found._replace(dtypes=plan.dtypes, bytes_read=plan.bytes_read)


class DensePlan:
    """What must be read for some values of the newest of some saves or WAL records.

    A chain is everything that the saves change in the same few blocks of a value. One thread
    applies it, oldest save first, while the blocks are in the cache. ``missing`` are the values
    that the saves do not complete: they are relative to what is below. ``bytes_read`` grows as
    saves are added and read; see ``DenseValues``.
    """

    def __init__(
        self, saves: Sequence[Sequence[DenseShard]], name: str, wanted: Callable[[Key], bool]
    ):
        """Reads row indices of the shards of each save, but no values; ``saves`` newest first."""
        self._name, self.bytes_read = name, 0
        every = (value for shard in saves[0] for value in shard.record.values)
        values = {(value.file, value.key): value for value in every}
        self._values = {key: value for key, value in values.items() if wanted(key)}
        self.missing = {key: value for key, value in self._values.items() if value.count}
        #: Whether some save completes a block; takes no space before it is written.
        self._complete = {key: np.zeros(value.blocks, bool) for key, value in self._values.items()}
        #: Value and number of the chain within it to its blocks, newest save first.
        self._chains: dict[tuple[Key, int], list[_StoredBlocks]] = {}
        #: The shard and first byte of each plain value.
        self._plain: dict[Key, tuple[DenseShard, int]] = {}
        groups = {value.group for value in self.missing.values() if not value.plain}
        with Runtime(_READERS) as runtime:
            #: By shard and segment: equal segments of several shards may be one object.
            coming: dict[tuple[int, int], Task[Rows]] = {}
            later = iter(saves)
            for number, save in enumerate(saves):
                if not self.missing:
                    break
                # Mostly, the next older saves are needed, too.
                nearby = itertools.islice(later, 1 if number else _READERS)
                for shard in itertools.chain.from_iterable(nearby):
                    for segment in shard.record.segments:
                        if segment.group in groups and segment.count >= row_indices.MANY_ROWS:
                            key = id(shard), id(segment)
                            coming[key] = runtime.submit(shard.rows, segment)
                self._add(save, coming)

    @cached_property
    def changed(self) -> set[Key]:
        """The values of which the saves contain a part."""
        return {*self._plain, *(key for key, _ in self._chains)}

    @classmethod
    def sized(
        cls,
        saves: Sequence[Sequence[DenseShard]],
        name: str,
        wanted: Callable[[Key], bool],
        base: Base | None,
    ) -> DensePlan:
        """Returns a plan, after the claimed sizes of large values were checked.

        A value has no more blocks than saves contain of its group without a reference, or it is as
        long as the base has it. Errors of small values are found, and named better, later.
        """
        held: collections.Counter[str] = collections.Counter()
        for shard in (shard for save in saves for shard in save):
            for segment in shard.record.segments:
                if segment.group == PLAIN or not shard.codec_of(segment).relative:
                    held[segment.group] += segment.count
        for shard in saves[0]:
            for value in shard.record.values:
                key, size = (value.file, value.key), value.count if value.plain else value.blocks
                if value.nbytes <= _SMALL_BYTES or size <= held[value.group] or not wanted(key):
                    continue
                if (found := None if base is None else base.nbytes(key)) != value.nbytes:
                    expected = f"{value.nbytes} bytes of {value.key} in the base"
                    raise Damaged(shard.name, expected, "none" if found is None else f"{found}")
        return cls(saves, name, wanted)

    @property
    def dtypes(self) -> dict[Key, str]:
        """The dtype of each value."""
        return {key: value.dtype for key, value in self._values.items()}

    def read(self, room: Room, base: Base | None) -> dict[Key, memoryview]:
        """Reads the values, in memory from ``room`` and above ``base``; returns their bytes."""
        shared = self._shared(base) if isinstance(base, DenseValues) else {}
        data: dict[Key, np.ndarray] = {}
        for key, value in self._values.items():
            if key in shared:
                continue
            try:
                data[key] = room(value)
            except MemoryError as error:
                found = f"{value.count} elements of {value.key}"
                raise Damaged(self._name, "values that fit into memory", found) from error
        if self.missing and base is None:
            shown = ", ".join(key for _, key in list(self.missing)[:3])
            raise Damaged(self._name, f"dense leaves down to a base: {shown}", "none")
        self._merge(data, base)
        return shared | {key: _bytes_of(self._values[key], own).data for key, own in data.items()}

    def _shared(self, before: DenseValues) -> dict[Key, memoryview]:
        """Returns the values that do not change; checks that the others can be applied."""
        found: dict[Key, memoryview] = {}
        for key, value in self.missing.items():
            data, dtype = before.get(key), before.dtypes.get(key, value.dtype)
            if data is None or (data.nbytes, dtype) != (value.nbytes, value.dtype):
                expected = f"{value.nbytes} bytes of {value.key} as {value.dtype} before"
                shown = "none" if data is None else f"{data.nbytes} bytes as {dtype}"
                raise Damaged(self._name, expected, shown)
            if key not in self.changed:
                found[key] = data
        return found

    def _merge(self, data: Mapping[Key, np.ndarray], base: Base | None) -> None:
        """Merges the base and what the saves contain into memory, of ``shape_of`` each value."""
        for key, held in data.items():
            value = self._values[key]
            if (held.shape, held.dtype) != (shape_of(value), dtype_of(value.dtype)):
                expected = f"{value.key} as {held.dtype.name}{list(held.shape)}"
                raise Damaged(self._name, expected, f"{value.dtype}{list(shape_of(value))}")
        for key, (shard, at) in self._plain.items():
            data[key][:] = shard.plain_bytes[at : at + self._values[key].count]
        plain = {id(shard): shard.plain_bytes.nbytes for shard, _ in self._plain.values()}
        work = {
            (key, number): self._chain(key, found, data[key])
            for (key, number), found in self._chains.items()
        }
        self.bytes_read += sum(plain.values()) + sum(chain.nbytes for chain in work.values())

        def on_filled(key: Key, start: int, stop: int) -> None:
            """Applies the changes to a part of a value while it is in the cache."""
            value = self._values[key]
            if value.plain or value.nbytes < _SMALL_LEAF_BYTES:
                return
            nbytes = _chain_blocks(value) * BLOCK * dtype_of(value.dtype).itemsize
            end = -(-stop // nbytes) if stop == value.nbytes else stop // nbytes
            for number in range(-(-start // nbytes), end):
                if (chain := work.pop((key, number), None)) is not None:
                    chain.read_ahead()
                    chain.run(runtime.memory)

        with Runtime(_READERS) as runtime:
            if base is not None and self.missing:
                below = {key: value for key, value in self.missing.items() if key in data}
                for key, value in below.items():
                    data[key].reshape(-1)[value.count :] = np.zeros((), data[key].dtype)
                into = {key: _bytes_of(value, data[key]) for key, value in below.items()}
                self.bytes_read += base.fill(into, on_filled)
            merge.run([work.values()], runtime)

    def _add(self, save: Sequence[DenseShard], coming: dict[tuple[int, int], Task[Rows]]) -> None:
        """Adds the shards of the next older save; ``coming`` has row indices."""
        added: set[Key] = set()
        for shard in save:
            groups: dict[str, list[BlockedValue]] = {}
            for value in shard.record.values:
                key = value.file, value.key
                if (newest := self.missing.get(key)) is None:
                    continue
                if key in added:
                    raise Damaged(shard.name, f"{value.key} of one process", "a duplicate")
                added.add(key)
                if _kind_of(value) != _kind_of(newest):
                    expected = f"{newest.count} elements of {value.key} as {newest.dtype}"
                    raise Damaged(shard.name, expected, f"{value.count} as {value.dtype}")
                if not value.plain:
                    groups.setdefault(value.group, []).append(value)
                elif value.at is not None:
                    self._plain[key] = shard, value.at
            for group, values in groups.items():
                found: list[tuple[BlockField, Rows]] = []
                for one in shard.record.segments:
                    if one.group == group:
                        rows = coming.pop((id(shard), id(one)), None)
                        field = shard.field_of(one)
                        gaps = (entry for entry in one.arrays if entry.name == naming.GAPS)
                        self.bytes_read += sum(entry.nbytes for entry in gaps)
                        found.append((field, rows.result() if rows else shard.rows(one)))
                _check_disjoint(found)
                for field, rows in found:
                    for value, held in blocks_by_value(values, rows):
                        self._add_blocks(value, field, held)
        for key in [*self.missing]:
            plain = self._values[key].plain
            if key in self._plain if plain else self._complete[key].all():
                del self.missing[key]

    def _add_blocks(self, value: BlockedValue, field: BlockField, held: StoredRows) -> None:
        """Adds some blocks of a value to its chains, without those that newer saves complete."""
        key, size = (value.file, value.key), _chain_blocks(value)
        complete = self._complete[key]
        spans = [(start, start + size) for start in range(0, value.blocks, size)]
        for number, section in enumerate(row_blocks.row_slices(held.rows, spans)):
            rows = held.rows[section]
            if len(rows) and not _all_marked(complete, rows):
                found = _StoredBlocks(field, StoredRows(rows, held.first + section.start))
                self._chains.setdefault((key, number), []).append(found)
        if not field.codec.relative:
            row_indices.set_flags(complete, held.rows)

    def _chain(self, key: Key, found: Iterable[_StoredBlocks], data: np.ndarray) -> _Chain:
        """The work of a chain, in memory that contains the value below the saves."""
        target = Target("", BLOCKS, (0, self._values[key].blocks), None, data)
        return _Chain([field.piece(held, target) for field, held in found])


class _StoredBlocks(NamedTuple):
    field: BlockField
    held: StoredRows


class _Chain(NamedTuple):
    """Pieces of the same blocks, newest save first; see ``layers.merge.Work``."""

    pieces: list[BlockPiece]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def read_ahead(self) -> None:
        """Reads windows for all pieces, so that threads need not wait for each other's."""
        for piece in self.pieces:
            piece.read_ahead()

    def run(self, memory: Memory) -> None:
        for piece in reversed(self.pieces):
            piece.run(memory)


def blocks_by_value(
    values: Sequence[BlockedValue], rows: Rows
) -> Iterator[tuple[BlockedValue, StoredRows]]:
    """Yields the values that have some of the blocks of a segment, with their blocks.

    ``values`` are those of the segment's group, ascending; ``rows`` the segment's in the group. The
    blocks are numbered in their value, with the first one's position in the segment.
    """
    low, high = row_blocks.reach(rows)
    begin = max(0, bisect.bisect_right(values, low, key=_first_of) - 1)
    values = values[begin : bisect.bisect_left(values, high, key=_first_of)]
    firsts = [_first_of(value) for value in values]
    spans = [(at, at + value.blocks) for at, value in zip(firsts, values, strict=True)]
    slices = row_blocks.row_slices(rows, spans)
    for value, first, section in zip(values, firsts, slices, strict=True):
        if section.start < section.stop:
            yield value, StoredRows(row_blocks.shifted(rows[section], -first), section.start)


def _kind_of(value: BlockedValue) -> tuple[str, str, int]:
    return value.group, value.dtype, value.count


def _first_of(value: BlockedValue) -> int:
    assert value.at is not None
    return value.at


def _chain_blocks(value: BlockedValue) -> int:
    """How many blocks the chains of a value have, the last one excepted."""
    return max(1, _CHAIN_BYTES // (BLOCK * dtype_of(value.dtype).itemsize))


def _all_marked(flags: np.ndarray, rows: Rows) -> bool:
    first, stop = row_blocks.reach(rows)
    # Mostly none is, which is quicker to see than to look each of them up.
    around = flags[first:stop]
    if isinstance(rows, range) or not around.any():
        return bool(around.all())
    return bool(flags[np.asarray(rows)].all())


def _check_disjoint(found: Sequence[tuple[BlockField, Rows]]) -> None:
    if len(found) > 1:
        starts, _, reached = row_blocks.sorted_spans([rows for _, rows in found])
        if np.any(starts < reached[:-1]):
            field, _ = found[0]
            raise Damaged(field.name_of(), "blocks of no other segment", "duplicates")


def _bytes_of(value: BlockedValue, data: np.ndarray) -> np.ndarray:
    return data.reshape(-1)[: value.count].view(np.uint8)


def _split(found: Mapping[Key, memoryview]) -> DenseValues:
    return DenseValues(
        {key: data for (file, key), data in found.items() if not file},
        {key: data for (file, key), data in found.items() if file},
    )
