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

from deltackpt.errors import Damaged
from deltackpt.format import blocks, gaps, names
from deltackpt.format.dense_blocks import BLOCK, PLAIN, BlockedValue, DenseBlocks
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.segments import ArrayEntry, Segment
from deltackpt.reading import dense_work, orbax_values
from deltackpt.reading.dense_work import Key, Lanes, Leaf, Source
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


class Base(Protocol):
    """The item of a base: ``orbax_values.OrbaxValues``."""

    def fill(self, into: Mapping[Key, np.ndarray]) -> None:
        """Reads values to where they are wanted, verified.

        Args:
          into: (bytes,) uint8, of each value that is wanted.

        Raises:
          Damaged: one is missing, altered, or of another length.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class PartSource:
    """The blocks of a part of a step; see ``Source``."""

    part: StoredPart
    record: DenseBlocks
    name: str

    def read(self, segment: Segment, entry: ArrayEntry, start: int, stop: int) -> np.ndarray:
        """See ``Source``."""
        self.part.check(segment)
        out = memory.empty_buffer((stop - start, *entry.shape[1:]), np.dtype(entry.dtype))
        self.part.read_array(segment, entry, start, stop, out)
        return out


def of_step(
    saves: Sequence[StoredSave],
    wanted: Callable[[str], bool] = lambda key: True,
) -> DenseValues:
    """The dense item of the last save of a chain.

    Where the chain does not hold, another one to the same step is read: ``saves.read_whole``.

    Args:
      saves: a chain of ``read_chain``.
      wanted: whether the value of a key of the database is; files always are.

    Raises:
      Damaged: an object is missing or altered; it is named.
      StepGone: a step of the chain was removed meanwhile.
    """
    return read_whole(saves, functools.partial(_of_step, wanted=wanted))


def _of_step(saves: Sequence[StoredSave], *, wanted: Callable[[str], bool]) -> DenseValues:
    sources, base = [], None
    for save in reversed(saves):
        if save.head.dense_blocks is None:
            base = orbax_values.of_save(save)
            break
        sources.append([*_sources(save)])
    name = saves[-1].name
    if not sources:
        assert base is not None
        return _all_of(base, wanted)
    return values_of(sources, base, name, wanted)


def _all_of(base: orbax_values.OrbaxValues, wanted: Callable[[str], bool]) -> DenseValues:
    keys = [key for key in base.keys() if key[0] or wanted(key[1])]
    found = base.read(keys)
    return DenseValues(
        {key: data for (file, key), data in found.items() if not file},
        {key: data for (file, key), data in found.items() if file},
    )


def _sources(save: StoredSave) -> Iterator[PartSource]:
    for part in save.parts():
        record = part.record.dense_blocks
        if record is None:
            shown = f"{save.name}/{names.manifest_name(part.record.process)}"
            raise Damaged(shown, "blocks of dense leaves, as in the first part", "none")
        yield PartSource(part, record, f"{save.name}, process {part.record.process}")


def values_of(
    sources: Sequence[Sequence[Source]],
    base: Base | None,
    name: str,
    wanted: Callable[[str], bool] = lambda key: True,
) -> DenseValues:
    """The dense item that the newest of some saves, or marks, stand for.

    Args:
      sources: what the processes wrote of each, newest first.
      base: of the oldest one's parent; None where it has none.
      name: how errors name the newest.
      wanted: as for ``of_step``.

    Raises:
      Damaged: something is missing or altered.
    """
    filling, lanes = Filling.of(sources[0], name, wanted), Lanes()
    with concurrent.futures.ThreadPoolExecutor(_READERS, "deltackpt-dense") as pool:
        for save in sources:
            if filling.complete:
                break
            for source in save:
                _add(source, filling, lanes)
        filling.fill_from(base)
        lanes.run(pool)
    return filling.values()


def apply(source: Source, held: Mapping[Key, np.ndarray]) -> None:
    """Applies what one process wrote to what its parent was, in place.

    Args:
      source: newer than what is held.
      held: leaves as (blocks, 256), plain values as (n,) uint8, each with what it was; those that
        ``source`` completes may hold anything.

    Raises:
      Damaged: something is missing or altered.
    """
    filling = Filling({key: Leaf(key, data) for key, data in held.items()}, source.name)
    lanes = Lanes()
    _add(source, filling, lanes)
    with concurrent.futures.ThreadPoolExecutor(_READERS, "deltackpt-dense") as pool:
        lanes.run(pool)


class Filling:
    """The values of an item while saves are looked through, newest first."""

    def __init__(self, leaves: Mapping[Key, Leaf], name: str):
        """See ``of``."""
        self._leaves = dict(leaves)
        self._name = name

    @classmethod
    def of(cls, newest: Sequence[Source], name: str, wanted: Callable[[str], bool]) -> Filling:
        """What the newest save says that there is, all of it missing."""
        leaves: dict[Key, Leaf] = {}
        for source in newest:
            for value in source.record.values:
                key = value.file, value.key
                if key in leaves:
                    raise Damaged(source.name, f"{value.key} of one process", "it twice")
                if value.file or wanted(value.key):
                    shape = (value.count,) if value.plain else (value.blocks, BLOCK)
                    data = memory.empty_buffer(shape, dtype_of(value.dtype))
                    leaves[key] = Leaf(key, data, value.count)
        return cls(leaves, name)

    @property
    def complete(self) -> bool:
        """Whether older saves have nothing more to say."""
        return not any(leaf.missing.any() for leaf in self._leaves.values())

    def leaf(self, value: BlockedValue, name: str) -> Leaf | None:
        """Where a value of an older save goes; None where it is not wanted.

        Raises:
          Damaged: it was of another kind then, and newer saves go on from it.
        """
        found = self._leaves.get((value.file, value.key))
        if found is None or not found.missing.any():
            return None
        shape = (value.count,) if value.plain else (value.blocks, BLOCK)
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
        base.fill({key: leaf.bytes for key, leaf in missing.items()})
        for leaf in missing.values():
            leaf.data.reshape(-1)[leaf.count :] = np.zeros((), leaf.data.dtype)

    def values(self) -> DenseValues:
        """All of it."""
        return DenseValues(
            {key: leaf.bytes.data for (file, key), leaf in self._leaves.items() if not file},
            {key: leaf.bytes.data for (file, key), leaf in self._leaves.items() if file},
        )


def _add(source: Source, filling: Filling, lanes: Lanes) -> None:
    """Adds what is needed of a source; what it completes is not missing any longer."""
    wanted = {
        value: leaf
        for value in source.record.values
        if (leaf := filling.leaf(value, source.name)) is not None
    }
    done: list[tuple[Leaf, np.ndarray | slice]] = []
    for segment in source.record.segments:
        if segment.group == PLAIN:
            found = _fill_plain(source, segment, wanted)
            done += ((leaf, slice(0, 1)) for leaf in found)
            continue
        of_group = [(v, leaf) for v, leaf in wanted.items() if v.group == segment.group]
        rows = _rows_of(source, segment) if of_group else range(0)
        parts = []
        for value, leaf in of_group:
            assert value.at is not None
            at = blocks.row_slice(rows, value.at, value.at + value.blocks)
            numbers = np.asarray(rows[at]) - value.at
            if len(numbers) and leaf.missing[numbers].any():
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
    # Segments of one save hold different blocks.
    for leaf, numbers in done:
        leaf.missing[numbers] = False


def _fill_plain(
    source: Source, segment: Segment, wanted: Mapping[BlockedValue, Leaf]
) -> Iterator[Leaf]:
    """Fills plain values, all of which the newest save that has them completes."""
    values = [(value, leaf) for value, leaf in wanted.items() if value.plain]
    if all(value.at is None for value, _ in values):
        return
    [entry] = segment.arrays
    data = source.read(segment, entry, 0, segment.count)
    for value, leaf in values:
        if value.at is None:
            continue
        if value.at + value.count > len(data):
            raise Damaged(source.name, "plain values within their bytes", f"{len(data)}")
        leaf.data[:] = data[value.at : value.at + value.count]
        yield leaf


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
