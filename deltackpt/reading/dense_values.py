# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of a step whose deltas contain them in shards: read, verified, decoded; no jax.

The shards of the step list the values of its dense item. The reader determines what it
needs from the newest save backwards: once a block has a codec that needs no reference, older saves
are not needed for it. Blocks that no delta completes are read from the base's item, in Orbax's
layout. Then everything needed is applied in order, oldest save first.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format import blocks, names
from deltackpt.format.dense_blocks import BLOCK, PLAIN, BlockedValue, Key
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.segments import Segment
from deltackpt.reading import dense_work, orbax_values
from deltackpt.reading.chains import read_whole
from deltackpt.reading.dense_work import Lanes, Leaf, OnBytes, PartSource, uncounted
from deltackpt.reading.orbax_values import OnFilled, OrbaxValues, nobody
from deltackpt.reading.saves import StoredSave
from deltackpt.resources import memory
from deltackpt.storage.ocdbt import ZARRAY

#: Values up to this size are allocated without a check of their claimed length.
_SMALL_BYTES = 64 << 20
#: Threads that read and decode.
_READERS = 3


class DenseValues(NamedTuple):
    """The dense item of a step, in any storage format.

    Attributes:
      values: the values of Orbax's database by key, of all processes.
      files: the files beside it, by their paths in the item.
    """

    values: Mapping[str, memoryview]
    files: Mapping[str, memoryview]


class Base(Protocol):
    """The item of a base: ``orbax_values.OrbaxValues``."""

    def nbytes(self, key: Key) -> int | None:
        """Returns a value's size in bytes according to the item, or None."""
        ...

    def fill(self, into: Mapping[Key, np.ndarray], on_filled: OnFilled = ...) -> None:
        """Reads and verifies values, directly into their destination.

        Args:
          into: destination of each wanted value, (bytes,) uint8.
          on_filled: may be called with each range of bytes that was read, once, from several
            threads and before the range is verified. The callee may modify it afterwards.

        Raises:
          Damaged: a value is missing, altered, or has another length.
        """
        ...


#: Gives room for a value: see ``apply``, with any contents.
Room = Callable[[BlockedValue], np.ndarray]


def shape_of(value: BlockedValue) -> tuple[int, ...]:
    """Returns the shape of a value's buffer: (blocks, 256); for a plain one (bytes,)."""
    return (value.count,) if value.plain else (value.blocks, BLOCK)


def _empty(value: BlockedValue) -> np.ndarray:
    return memory.empty_buffer(shape_of(value), dtype_of(value.dtype))


def of_step(
    saves: Sequence[StoredSave],
    wanted: Callable[[str], bool] = lambda key: True,
    *,
    item_of: Callable[[StoredSave], OrbaxValues] = orbax_values.of_save,
    room: Room = _empty,
    on_bytes: OnBytes = uncounted,
) -> DenseValues:
    """Returns the dense item of the last save of a chain.

    If the chain cannot be read, another chain to the same step is tried: see ``chains.read_whole``.

    Args:
      saves: a chain, as returned by ``read_chain``.
      wanted: whether to read the value of a key of the database; files are always read.
      item_of: returns Orbax's item of a base; callers that read a step repeatedly cache it.
      room: allocates the values of blocks; values of a base have their own memory.
      on_bytes: called with the length of each chunk, or of each value of the base, as it is read.

    Raises:
      Damaged: an object is missing or altered; the message names it.
      StepGone: a step of the chain was removed concurrently.
    """

    def read(saves: Sequence[StoredSave]) -> DenseValues:
        return DenseItem(saves, item_of, room=room, on_bytes=on_bytes).read(wanted)

    return read_whole(saves, read)


class DenseItem:
    """The dense item of a step, read on demand.

    Attributes:
      fresh: whether what is read has no other owner, and may be kept and changed.
    """

    fresh = True

    def __init__(
        self,
        saves: Sequence[StoredSave],
        item_of: Callable[[StoredSave], OrbaxValues] = orbax_values.of_save,
        *,
        room: Room = _empty,
        on_bytes: OnBytes = uncounted,
    ):
        """Reads only manifests.

        Args:
          saves: a chain, as returned by ``read_chain``.
          item_of: as for ``of_step``.
          room: as for ``of_step``.
          on_bytes: as for ``of_step``.

        Raises:
          Damaged: a manifest is missing or altered.
        """
        self._sources, base = sources_of(saves, on_bytes)
        self._base = None if base is None else _Later(base, item_of, on_bytes)
        self._room = room
        self._name = saves[-1].name

    @functools.cached_property
    def outline(self) -> DenseValues:
        """Returns all files, and the metadata of the arrays.

        Raises:
          Damaged: an object is missing or altered.
        """
        return self.read(lambda key: key.endswith(f"/{ZARRAY}"))

    def read(self, wanted: Callable[[str], bool]) -> DenseValues:
        """Returns the wanted values of the database, and all files.

        Args:
          wanted: whether to read the value of a key.

        Raises:
          Damaged: an object is missing or altered.
        """
        if self._sources:
            return values_of(self._sources, self._base, self._name, wanted, self._room)
        assert self._base is not None
        return self._base.all(wanted)


@dataclasses.dataclass(frozen=True, eq=False)
class _Later:
    """The item of a base, opened only if needed, since it may have been removed."""

    save: StoredSave
    item_of: Callable[[StoredSave], OrbaxValues]
    on_bytes: OnBytes

    @functools.cached_property
    def item(self) -> OrbaxValues:
        """Returns the item, which caches what it has verified."""
        return self.item_of(self.save)

    def nbytes(self, key: Key) -> int | None:
        """See ``Base``."""
        return self.item.nbytes(key)

    def fill(self, into: Mapping[Key, np.ndarray], on_filled: OnFilled = nobody) -> None:
        """See ``Base``."""
        before = self.item.bytes_read
        self.item.fill(into, on_filled)
        self.on_bytes(self.item.bytes_read - before)

    def all(self, wanted: Callable[[str], bool]) -> DenseValues:
        """Returns all files, and the wanted values."""
        before = self.item.bytes_read
        found = self.item.read([key for key in self.item.keys() if key[0] or wanted(key[1])])
        self.on_bytes(self.item.bytes_read - before)
        return DenseValues(
            {key: data for (file, key), data in found.items() if not file},
            {key: data for (file, key), data in found.items() if file},
        )


def listed(save: StoredSave) -> list[BlockedValue]:
    """Returns the dense item's values if a save stores them in its shards; otherwise none."""
    if save.head.dense_blocks is None:
        return []
    return [value for source in sources(save) for value in source.record.values]


def sources_of(
    saves: Sequence[StoredSave], on_bytes: OnBytes = uncounted
) -> tuple[list[list[PartSource]], StoredSave | None]:
    """Returns the blocks of a chain's deltas, newest first, and the save below the deltas.

    The latter is None if no older save is needed, or if the oldest save of the chain stores blocks.
    """
    found = []
    for save in reversed(saves):
        if save.head.dense_blocks is None:
            return found, save
        found.append([*sources(save, on_bytes)])
        if not save.needs_older_dense:
            break
    return found, None


def sources(save: StoredSave, on_bytes: OnBytes = uncounted) -> Iterator[PartSource]:
    """Returns the dense leaves that each process wrote, for a save with them in its shards.

    Args:
      save: the save.
      on_bytes: as for ``of_step``.

    Raises:
      Damaged: a manifest is missing or altered, or lists no dense leaves.
    """
    for part in save.parts():
        record = part.record.dense_blocks
        if record is None:
            shown = f"{save.name}/{names.manifest_name(part.record.process)}"
            raise Damaged(shown, "blocks of dense leaves, as in the first shard", "none")
        shown = f"{save.name}, process {part.record.process}"
        yield PartSource(part.arrays, part.check, record, shown, on_bytes)


def values_of(
    sources: Sequence[Sequence[PartSource]],
    base: Base | None,
    name: str,
    wanted: Callable[[str], bool] = lambda key: True,
    room: Room = _empty,
) -> DenseValues:
    """Returns the dense item at the newest of some saves or WAL records.

    Args:
      sources: the data that the processes wrote for each, newest first.
      base: the dense item of the oldest one's parent; None without a parent.
      name: the newest one's name in errors.
      wanted: as for ``of_step``.
      room: as for ``of_step``.

    Raises:
      Damaged: an object is missing or altered.
    """
    _check_lengths(sources, base, wanted)
    filling, lanes = Filling.of(sources[0], name, wanted, room=room), Lanes()
    with concurrent.futures.ThreadPoolExecutor(_READERS, "deltackpt-dense") as pool:
        for save in sources:
            if filling.complete:
                break
            for source in save:
                _add(source, filling, lanes)
        lanes.prepare(pool)
        filling.fill_from(base, lanes)
        lanes.run(pool)
    return filling.values()


def _check_lengths(
    sources: Sequence[Sequence[PartSource]], base: Base | None, wanted: Callable[[str], bool]
) -> None:
    """Checks the claimed length of large values before memory is allocated for them.

    A value has no more blocks than saves contain of its group without a reference, or it is as long
    as the base has it. Errors of small values are found, and named better, later.

    Raises:
      Damaged: one is longer.
    """
    held: collections.Counter[str] = collections.Counter()
    for source in (source for save in sources for source in save):
        for segment in source.record.segments:
            if segment.group == PLAIN or not dense_work.codec_of(segment, source.name).relative:
                held[segment.group] += segment.count
    for source in sources[0]:
        for value in source.record.values:
            key = value.file, value.key
            if value.nbytes <= _SMALL_BYTES or not (value.file or wanted(value.key)):
                continue
            if (value.count if value.plain else value.blocks) <= held[value.group]:
                continue
            if (found := None if base is None else base.nbytes(key)) != value.nbytes:
                expected = f"{value.nbytes} bytes of {value.key} in the base"
                raise Damaged(source.name, expected, "none" if found is None else f"{found}")


def missing(
    sources: Sequence[Sequence[PartSource]], base: StoredSave | None, name: str
) -> dict[Key, int]:
    """Returns the values that some saves leave incomplete, and their sizes; a base must have them.

    It reads row indices and plain values, but no codes.

    Args:
      sources: as for ``values_of``.
      base: the dense item of the oldest one's parent.
      name: as for ``values_of``.

    Raises:
      Damaged: an object is missing or altered, or invalid.
    """
    item = None if base is None else _Later(base, orbax_values.of_save, uncounted)
    _check_lengths(sources, item, lambda key: True)

    def nowhere(value: BlockedValue) -> np.ndarray:
        shape, dtype = shape_of(value), dtype_of(value.dtype)
        return np.empty(shape, dtype) if value.plain else np.broadcast_to(dtype.type(0), shape)

    filling, lanes = Filling.of(sources[0], name, lambda key: True, room=nowhere), Lanes()
    for save in sources:
        if filling.complete:
            break
        for source in save:
            _add(source, filling, lanes)
    return filling.missing()


def apply(
    source: PartSource,
    held: Mapping[Key, np.ndarray],
    writable: Callable[[Key], np.ndarray] | None = None,
) -> None:
    """Applies the data that one process wrote to the parent's values, in place.

    Args:
      source: the data of a save newer than ``held``.
      held: leaves as (blocks, 256), plain values as (n,) uint8, with the parent's values; those
        that ``source`` completes may have any contents.
      writable: returns an equal copy to write instead of a value, only for those that change; by
        default the value itself.

    Raises:
      Damaged: an object is missing or altered.
    """
    leaves = {key: Leaf(key, data, writable=writable) for key, data in held.items()}
    filling, lanes = Filling(leaves, source.name), Lanes()
    _add(source, filling, lanes)
    with concurrent.futures.ThreadPoolExecutor(_READERS, "deltackpt-dense") as pool:
        lanes.run(pool)


class Filling:
    """The values of an item while saves are scanned, newest first."""

    def __init__(self, leaves: Mapping[Key, Leaf], name: str):
        """See ``of``."""
        self._leaves = dict(leaves)
        self._name = name

    @classmethod
    def of(
        cls,
        newest: Sequence[PartSource],
        name: str,
        wanted: Callable[[str], bool],
        *,
        room: Room = _empty,
    ) -> Filling:
        """Returns the values that the newest save lists, all still missing."""
        leaves: dict[Key, Leaf] = {}
        for source in newest:
            for value in source.record.values:
                key = value.file, value.key
                if key in leaves:
                    raise Damaged(source.name, f"{value.key} of one process", "a duplicate")
                if not (value.file or wanted(value.key)):
                    continue
                try:
                    leaf = Leaf(key, room(value), value.count, is_fresh=room is _empty)
                    leaves[key] = leaf
                except MemoryError as error:
                    found = f"{value.count} elements of {value.key}"
                    raise Damaged(source.name, "values that fit into memory", found) from error
        return cls(leaves, name)

    def missing(self) -> dict[Key, int]:
        """Returns the values that no save has completed so far, and their sizes."""
        return {
            key: leaf.count * leaf.data.itemsize
            for key, leaf in self._leaves.items()
            if not leaf.complete.all()
        }

    @property
    def complete(self) -> bool:
        """Returns whether older saves are not needed."""
        return all(leaf.complete.all() for leaf in self._leaves.values())

    def leaf(self, value: BlockedValue, name: str) -> Leaf | None:
        """Returns the destination of a value of an older save; None if it is not wanted.

        Raises:
          Damaged: the value had another kind then, and newer saves continue from it.
        """
        found = self._leaves.get((value.file, value.key))
        if found is None or found.complete.all():
            return None
        shape = shape_of(value)
        if found.data.shape != shape or found.data.dtype != dtype_of(value.dtype):
            expected = f"{value.key} as {found.data.dtype.name}{list(found.data.shape)}"
            raise Damaged(name, expected, f"{value.dtype}{list(shape)}")
        return found

    def fill_from(self, base: Base | None, lanes: Lanes) -> None:
        """Reads incomplete values from the base, and decodes the rest at the same time."""
        missing = {key: leaf for key, leaf in self._leaves.items() if not leaf.complete.all()}
        if not missing:
            return
        if base is None:
            shown = ", ".join(key for _, key in list(missing)[:3])
            raise Damaged(self._name, f"dense leaves down to a base: {shown}", "none")
        for leaf in missing.values():
            leaf.data.reshape(-1)[leaf.count :] = np.zeros((), leaf.data.dtype)
        base.fill(
            {key: leaf.bytes for key, leaf in missing.items()},
            lambda key, start, stop: lanes.filled(missing[key], start, stop),
        )

    def values(self) -> DenseValues:
        """Returns all values."""
        return DenseValues(
            {key: leaf.bytes.data for (file, key), leaf in self._leaves.items() if not file},
            {key: leaf.bytes.data for (file, key), leaf in self._leaves.items() if file},
        )


def _add(source: PartSource, filling: Filling, lanes: Lanes) -> None:
    """Adds what is needed of a source; what it completes is no longer missing."""
    wanted = {
        value: leaf
        for value in source.record.values
        if (leaf := filling.leaf(value, source.name)) is not None
    }
    done: list[tuple[Leaf, np.ndarray | slice]] = []
    segments = collections.Counter(segment.group for segment in source.record.segments)
    taken: dict[Leaf, np.ndarray] = {}
    for segment in source.record.segments:
        if segment.group == PLAIN:
            found = _fill_plain(source, segment, wanted)
            done += ((leaf, slice(0, 1)) for leaf in found)
            continue
        of_group = [(v, leaf) for v, leaf in wanted.items() if v.group == segment.group]
        rows = rows_of(source, segment) if of_group else range(0)
        parts = []
        for value, leaf in of_group:
            assert value.at is not None
            at = blocks.row_slice(rows, value.at, value.at + value.blocks)
            numbers = _numbers(rows[at], value.at)
            if segments[segment.group] > 1:  # By themselves, rows of a segment ascend.
                others = taken.setdefault(leaf, np.zeros(len(leaf.complete), bool))
                if others[numbers].any():
                    raise Damaged(source.name, f"each block of {value.key} once", "duplicates")
                others[numbers] = True
            if leaf.lacks(numbers):
                parts.append((at, numbers, leaf))
        if not parts:
            continue
        for start, stop, chunk in dense_work.chunks_of(source, segment):
            for at, numbers, leaf in parts:
                low, high = max(at.start, start), min(at.stop, stop)
                if low >= high:
                    continue
                some = numbers[low - at.start : high - at.start]
                lanes.add(leaf, chunk, slice(low, high), some)
                if not chunk.codec.relative:
                    done.append((leaf, some))
    for leaf, numbers in done:
        leaf.complete[numbers] = True


def _numbers(rows: blocks.Rows, first: int) -> np.ndarray:
    """Converts rows of a group to indices of the blocks of a value, int64."""
    if isinstance(rows, range):
        return np.arange(rows.start - first, rows.stop - first)
    numbers = np.asarray(rows, np.int64)
    return numbers - first if first else numbers


def _fill_plain(
    source: PartSource, segment: Segment, wanted: Mapping[BlockedValue, Leaf]
) -> Iterator[Leaf]:
    """Fills plain values; the newest save with one completes it."""
    values = [(value, leaf) for value, leaf in wanted.items() if value.plain]
    if all(value.at is None for value, _ in values):
        return
    [entry] = segment.arrays
    data = source.read(segment, entry, 0, segment.count)
    for value, leaf in values:
        if value.at is None:
            continue
        if value.at + value.count > len(data):
            raise Damaged(source.name, "plain values within the stored bytes", f"{len(data)}")
        leaf.begin()
        leaf.data[:] = data[value.at : value.at + value.count]
        yield leaf


def rows_of(source: PartSource, segment: Segment) -> blocks.Rows:
    """Returns the indices of the blocks of a segment in its group, ascending.

    Raises:
      Damaged: the indices are missing or altered.
    """
    total = sum(value.blocks for value in source.record.of_group(segment.group))
    if segment.ranges is not None:
        rows = blocks.rows_of(segment.ranges)
    else:
        rows = source.rows(segment, total)
    if len(rows) != segment.count:
        raise Damaged(source.name, f"{segment.count} blocks of {segment.name}", f"{len(rows)}")
    return rows
