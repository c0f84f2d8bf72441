# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of a step whose deltas hold them as blocks: read, verified, decoded; no jax.

The values of the step's item are those that its own parts list. From the newest save back it is
found what is needed: a block is complete with the newest codec that needs no reference, and older
saves have nothing more to say of it. What no delta completes comes from the base's item, as Orbax
laid it out. Then all that is needed is applied in order, oldest save first.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from deltackpt.codecs import of_blocks
from deltackpt.errors import Damaged, OptionError
from deltackpt.format import blocks, gaps, names
from deltackpt.format.dense_blocks import BLOCK, BLOCKS, PLAIN, BlockedValue, DenseBlocks
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.segments import ArrayEntry, Segment
from deltackpt.reading import orbax_values
from deltackpt.reading.saves import StoredPart, StoredSave, read_whole
from deltackpt.resources import memory

#: Threads that read and decode.
_READERS = 3


class DenseValues(NamedTuple):
    """The dense item of a step, whatever it was made of.

    Attributes:
      values: key to value of the database that Orbax keeps of it, of all processes.
      files: the files beside it, by their paths in the item.
    """

    values: Mapping[str, memoryview]
    files: Mapping[str, memoryview]


#: A value of the item: whether it is a file, and its key.
Key = tuple[bool, str]


class Source(Protocol):
    """What one process wrote of dense leaves, in a step or in a mark."""

    @property
    def name(self) -> str:
        """How errors name it."""
        ...

    @property
    def record(self) -> DenseBlocks:
        """What it is."""
        ...

    def read(self, segment: Segment, entry: ArrayEntry, start: int, stop: int) -> np.ndarray:
        """Rows of a stored array, verified.

        Raises:
          Damaged: they are missing or altered.
        """
        ...


#: The values that are in the item of a base, for some keys; all that are asked for.
Base = Callable[[Sequence[Key]], Mapping[Key, memoryview]]


#: Called with the lengths of what is read.
OnBytes = Callable[[int], None]


def _nobody(nbytes: int) -> None:
    """Nobody asks."""


@dataclasses.dataclass(frozen=True, eq=False)
class PartSource:
    """The blocks of a part of a step; see ``Source``."""

    part: StoredPart
    record: DenseBlocks
    name: str
    on_bytes: OnBytes = _nobody

    def read(self, segment: Segment, entry: ArrayEntry, start: int, stop: int) -> np.ndarray:
        """See ``Source``."""
        self.part.check(segment)
        self.on_bytes(sum(self.part.chunks_of(segment, entry, start, stop).values()))
        out = memory.empty_buffer((stop - start, *entry.shape[1:]), np.dtype(entry.dtype))
        self.part.read_array(segment, entry, start, stop, out)
        return out


#: Where the blocks, or the bytes, of a value are to lie: as for ``apply``, with any contents.
Room = Callable[[BlockedValue], np.ndarray]


def of_step(
    saves: Sequence[StoredSave],
    wanted: Callable[[str], bool] = lambda key: True,
    room: Room | None = None,
    on_bytes: OnBytes = _nobody,
) -> DenseValues:
    """The dense item of the last save of a chain.

    Where the chain does not hold, another one to the same step is read: ``saves.read_whole``.

    Args:
      saves: a chain of ``read_chain``.
      wanted: whether the value of a key of the database is; files always are.
      room: where the values of blocks are to lie; in memory of their own by default.
      on_bytes: called with the lengths of the chunks, and of the base's values, as they are read.

    Raises:
      Damaged: an object is missing or altered; it is named.
      StepGone: a step of the chain was removed meanwhile.
    """
    read = functools.partial(_of_step, wanted=wanted, room=room, on_bytes=on_bytes)
    return read_whole(saves, read)


def _of_step(
    saves: Sequence[StoredSave],
    *,
    wanted: Callable[[str], bool],
    room: Room | None,
    on_bytes: OnBytes,
) -> DenseValues:
    sources, base = [], None
    for save in reversed(saves):
        if save.head.dense_blocks is None:
            base = orbax_values.of_save(save)
            break
        sources.append([*sources_of(save, on_bytes)])
    name = saves[-1].name
    if not sources:
        assert base is not None
        return _all_of(base, wanted, on_bytes)

    def read(keys: Sequence[Key]) -> Mapping[Key, memoryview]:
        assert base is not None
        found = base.read(keys)
        on_bytes(sum(data.nbytes for data in found.values()))
        return found

    return values_of(sources, None if base is None else read, name, wanted, room)


def _all_of(
    base: orbax_values.OrbaxValues, wanted: Callable[[str], bool], on_bytes: OnBytes
) -> DenseValues:
    keys = [key for key in base.keys() if key[0] or wanted(key[1])]
    found = base.read(keys)
    on_bytes(sum(data.nbytes for data in found.values()))
    return DenseValues(
        {key: data for (file, key), data in found.items() if not file},
        {key: data for (file, key), data in found.items() if file},
    )


def sources_of(save: StoredSave, on_bytes: OnBytes = _nobody) -> Iterator[PartSource]:
    """What the processes wrote of a save that has its dense leaves as blocks.

    Args:
      save: the save.
      on_bytes: as for ``of_step``.

    Raises:
      Damaged: one of them says nothing of them.
    """
    for part in save.parts():
        record = part.record.dense_blocks
        if record is None:
            shown = f"{save.name}/{names.manifest_name(part.record.process)}"
            raise Damaged(shown, "blocks of dense leaves, as in the first part", "none")
        shown = f"{save.name}, process {part.record.process}"
        yield PartSource(part, record, shown, on_bytes)


def values_of(
    sources: Sequence[Sequence[Source]],
    base: Base | None,
    name: str,
    wanted: Callable[[str], bool] = lambda key: True,
    room: Room | None = None,
) -> DenseValues:
    """The dense item that the newest of some saves, or marks, stand for.

    Args:
      sources: what the processes wrote of each, newest first.
      base: of the oldest one's parent; None where it has none.
      name: how errors name the newest.
      wanted: as for ``of_step``.
      room: likewise.

    Raises:
      Damaged: something is missing or altered.
    """
    filling = Filling.of(sources[0], name, wanted, room or _empty)
    work: list[list[_Piece]] = []
    for each in sources:
        if filling.complete:
            break
        work.append([piece for source in each for piece in _pieces(source, filling)])
    filling.fill_from(base)
    with concurrent.futures.ThreadPoolExecutor(_READERS, "deltackpt-dense") as pool:
        for pieces in reversed(work):
            for _ in pool.map(_Piece.run, pieces):
                pass
    return filling.values()


def apply(
    source: Source,
    held: Mapping[Key, np.ndarray],
    writable: Callable[[Key], np.ndarray] | None = None,
) -> None:
    """Applies what one process wrote to what its parent was, in place.

    Args:
      source: newer than what is held.
      held: leaves as (blocks, 256), plain values as (n,) uint8, each with what it was; those that
        ``source`` completes may hold anything.
      writable: gives what to write in the place of a value that changes, alike and with the same
        contents; by default that is what is held.

    Raises:
      Damaged: something is missing or altered.
    """
    filling = Filling({key: _Leaf(key, data) for key, data in held.items()}, source.name)
    pieces = [*_pieces(source, filling)]
    if writable is not None:
        changed = {leaf.key: leaf for piece in pieces for _, _, leaf in piece.parts}
        for key, leaf in changed.items():
            leaf.data = writable(key)
    with concurrent.futures.ThreadPoolExecutor(_READERS, "deltackpt-dense") as pool:
        for _ in pool.map(_Piece.run, pieces):
            pass


def shape_of(value: BlockedValue) -> tuple[int, ...]:
    """Shape of what a value is held in: (blocks, 256); of a plain one (bytes,)."""
    return (value.count,) if value.plain else (value.blocks, BLOCK)


def _empty(value: BlockedValue) -> np.ndarray:
    return memory.empty_buffer(shape_of(value), dtype_of(value.dtype))


@dataclasses.dataclass(eq=False)
class _Leaf:
    """The value of a key on its way.

    Attributes:
      key: see ``Key``.
      data: (blocks, 256), or (n,) uint8.
      count: numbers; of a plain value bytes.
      missing: (blocks,) bool, what no save completes so far; of a plain value (1,).
    """

    key: Key
    data: np.ndarray
    count: int = -1
    missing: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.missing = np.ones(len(self.data) if self.data.ndim == 2 else 1, bool)
        if self.count < 0:
            self.count = self.data.size

    @property
    def view(self) -> memoryview:
        """The bytes of the value."""
        return self.data.reshape(-1)[: self.count].view(np.uint8).data


class Filling:
    """The values of an item while saves are looked through, newest first."""

    def __init__(self, leaves: Mapping[Key, _Leaf], name: str):
        """See ``of``."""
        self._leaves = dict(leaves)
        self._name = name

    @classmethod
    def of(
        cls, newest: Sequence[Source], name: str, wanted: Callable[[str], bool], room: Room
    ) -> Filling:
        """What the newest save says that there is, all of it missing."""
        leaves: dict[Key, _Leaf] = {}
        for source in newest:
            for value in source.record.values:
                key = value.file, value.key
                if key in leaves:
                    raise Damaged(source.name, f"{value.key} of one process", "it twice")
                if value.file or wanted(value.key):
                    leaves[key] = _Leaf(key, room(value), value.count)
        return cls(leaves, name)

    @property
    def complete(self) -> bool:
        """Whether older saves have nothing more to say."""
        return not any(leaf.missing.any() for leaf in self._leaves.values())

    def leaf(self, value: BlockedValue, name: str) -> _Leaf | None:
        """Where a value of an older save goes; None where it is not wanted.

        Raises:
          Damaged: it was of another kind then, and newer saves go on from it.
        """
        found = self._leaves.get((value.file, value.key))
        if found is None or not found.missing.any():
            return None
        shape = shape_of(value)
        if found.data.shape != shape or found.data.dtype != dtype_of(value.dtype):
            expected = f"{value.key} as {found.data.dtype.name}{list(found.data.shape)}"
            raise Damaged(name, expected, f"{value.dtype}{list(shape)}")
        return found

    def fill_from(self, base: Base | None) -> None:
        """Takes what no save completes from the base."""
        missing = {key: leaf for key, leaf in self._leaves.items() if leaf.missing.any()}
        if not missing:
            return
        if base is None:
            shown = ", ".join(key for _, key in list(missing)[:3])
            raise Damaged(self._name, f"dense leaves down to a base: {shown}", "none")
        found = base(list(missing))
        for key, leaf in missing.items():
            data = found.get(key)
            nbytes = leaf.count * leaf.data.itemsize
            if data is None or data.nbytes != nbytes:
                have = "none" if data is None else f"{data.nbytes}"
                raise Damaged(self._name, f"{nbytes} bytes of {key[1]} in the base", have)
            flat = leaf.data.reshape(-1)
            flat[: leaf.count].view(np.uint8)[:] = np.frombuffer(data, np.uint8)
            flat[leaf.count :] = np.zeros((), leaf.data.dtype)

    def values(self) -> DenseValues:
        """All of it."""
        return DenseValues(
            {key: leaf.view for (file, key), leaf in self._leaves.items() if not file},
            {key: leaf.view for (file, key), leaf in self._leaves.items() if file},
        )


class _Piece(NamedTuple):
    """Blocks of one chunk of a segment that are needed: for each leaf some of them."""

    source: Source
    segment: Segment
    start: int
    stop: int
    #: Positions in the segment, the leaf's blocks that stand there, and the leaf.
    parts: Sequence[tuple[slice, np.ndarray, _Leaf]]

    def run(self) -> None:
        """Reads, decodes and applies them.

        Raises:
          Damaged: they are missing or altered.
        """
        # What older saves say of blocks that a newer one completes is no number.
        with np.errstate(all="ignore"):
            self._run()

    def _run(self) -> None:
        source, segment = self.source, self.segment
        entries = {entry.name: entry for entry in segment.arrays}
        if segment.group == PLAIN:
            [entry] = segment.arrays
            data = source.read(segment, entry, self.start, self.stop)
            for at, _, leaf in self.parts:
                leaf.data[:] = data[at.start - self.start : at.stop - self.start]
            return
        codec, dtype = _codec_of(segment, source.name), dtype_of(segment.group)
        found: dict[str, np.ndarray] = {}
        stored = codec.stored(dtype)
        ragged = any(array.ragged for array in stored.values())
        for suffix in stored:
            name = f"{BLOCKS}.{suffix}" if suffix else BLOCKS
            entry = _entry(entries, name, stored[suffix], segment, source.name)
            whole = (0, entry.shape[0]) if ragged else (self.start, self.stop)
            found[suffix] = source.read(segment, entry, *whole)
        first = 0 if ragged else self.start
        ends = np.cumsum(found["count"], dtype=np.int64) if ragged else None
        for at, numbers, leaf in self.parts:
            arrays = {}
            for suffix, array in stored.items():
                low, high = at.start - first, at.stop - first
                if array.ragged:
                    assert ends is not None
                    low = int(ends[low - 1]) if low else 0
                    high = int(ends[high - 1]) if high else 0
                arrays[suffix] = found[suffix][low:high]
            try:
                _decode(codec, arrays, numbers, leaf)
            except ValueError as error:
                shown = f"{source.name}, {segment.name}"
                raise Damaged(shown, "codes of its blocks", str(error)) from error


def _decode(
    codec: of_blocks.BlockCodec,
    arrays: Mapping[str, np.ndarray],
    numbers: np.ndarray,
    leaf: _Leaf,
) -> None:
    first, last = int(numbers[0]), int(numbers[-1]) + 1
    if last - first == len(numbers):
        out = leaf.data[first:last]
        codec.decode(arrays, out if codec.relative else None, out)
        return
    out = np.empty((len(numbers), BLOCK), leaf.data.dtype)
    codec.decode(arrays, leaf.data[numbers] if codec.relative else None, out)
    leaf.data[numbers] = out


def _pieces(source: Source, filling: Filling) -> Iterator[_Piece]:
    """What is needed of a source; what it completes is not missing any longer."""
    wanted = {
        value: leaf
        for value in source.record.values
        if (leaf := filling.leaf(value, source.name)) is not None
    }
    done: list[tuple[_Leaf, np.ndarray | slice]] = []
    for segment in source.record.segments:
        if segment.group == PLAIN:
            parts = [
                (slice(value.at, value.at + value.count), np.empty(0, np.int64), leaf)
                for value, leaf in wanted.items()
                if value.plain and value.at is not None
            ]
            if parts:
                total = segment.count
                if any(part.stop > total for part, _, _ in parts):
                    raise Damaged(source.name, "plain values within their bytes", f"{total}")
                yield _Piece(source, segment, 0, total, parts)
                done += [(leaf, slice(0, 1)) for _, _, leaf in parts]
            continue
        codec = _codec_of(segment, source.name)
        rows = _rows_of(source, segment)
        parts = []
        for value, leaf in wanted.items():
            if value.group != segment.group or value.at is None:
                continue
            at = blocks.row_slice(rows, value.at, value.at + value.blocks)
            numbers = np.asarray(rows[at]) - value.at
            if len(numbers) and leaf.missing[numbers].any():
                parts.append((at, numbers, leaf))
                if not codec.relative:
                    done.append((leaf, numbers))
        yield from _by_chunk(source, segment, codec, parts)
    # Segments of one save hold different blocks.
    for leaf, numbers in done:
        leaf.missing[numbers] = False


def _by_chunk(
    source: Source,
    segment: Segment,
    codec: of_blocks.BlockCodec,
    parts: Sequence[tuple[slice, np.ndarray, _Leaf]],
) -> Iterator[_Piece]:
    if not parts:
        return
    stored = codec.stored(dtype_of(segment.group))
    if any(array.ragged for array in stored.values()):
        yield _Piece(source, segment, 0, segment.count, parts)
        return
    chunk_rows = max(1, min(entry.chunk_rows for entry in segment.arrays if entry.name == BLOCKS))
    for start in range(0, segment.count, chunk_rows):
        stop = min(segment.count, start + chunk_rows)
        cut = []
        for at, numbers, leaf in parts:
            low, high = max(at.start, start), min(at.stop, stop)
            if low < high:
                cut.append((slice(low, high), numbers[low - at.start : high - at.start], leaf))
        if cut:
            yield _Piece(source, segment, start, stop, cut)


def _rows_of(source: Source, segment: Segment) -> blocks.Rows:
    total = sum(value.blocks for value in source.record.of_group(segment.group))
    if segment.ranges is not None:
        rows = blocks.rows_of(segment.ranges)
    else:
        entry = next((one for one in segment.arrays if one.name == names.GAPS), None)
        if entry is None:
            raise Damaged(source.name, f"row numbers of {segment.name}", "none")
        found = source.read(segment, entry, 0, entry.shape[0])
        rows = gaps.decode_gaps(found, total_rows=total, name=f"{source.name}, {segment.name}")
    if len(rows) != segment.count:
        raise Damaged(source.name, f"{segment.count} blocks of {segment.name}", f"{len(rows)}")
    return rows


def _codec_of(segment: Segment, name: str) -> of_blocks.BlockCodec:
    used = [encoding.codec for encoding in segment.encodings if encoding.field == BLOCKS]
    try:
        [codec] = used
        return of_blocks.get(codec)
    except (ValueError, OptionError) as error:
        raise Damaged(name, f"a codec of {segment.name}", f"{used}") from error


def _entry(
    entries: Mapping[str, ArrayEntry],
    name: str,
    array: of_blocks.BlockArray,
    segment: Segment,
    shown: str,
) -> ArrayEntry:
    found = entries.get(name)
    expected = f"{array.dtype.name} array {name} of {segment.name}"
    if found is None:
        raise Damaged(shown, expected, "none")
    count = found.shape[0] if array.ragged else segment.count
    if found.shape != (count, *array.trailing) or found.dtype != array.dtype.name:
        raise Damaged(shown, expected, f"{found.dtype}{list(found.shape)}")
    return found
