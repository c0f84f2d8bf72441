# SPDX-License-Identifier: Apache-2.0
"""Dense leaves that a chain stores as blocks, decoded lazily.

They appear as the leaves of the item that Orbax's handler would have written. A leaf is decoded
and verified as a whole, from its newest blocks back to the base. The base's item is checked once
for all leaves, and again if one of its files has changed since.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from deltackpt.errors import Damaged
from deltackpt.format import blocks
from deltackpt.format.manifest import DenseLeaf as DenseEntry
from deltackpt.format.manifest import path_name
from deltackpt.format.segments import Segment
from deltackpt.inspect.dense import DenseItem
from deltackpt.inspect.lazy import PointSaves, Saves
from deltackpt.reading import dense_state, orbax_values, stored_dense
from deltackpt.reading.orbax_values import OrbaxValues
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stored_dense import DenseShard, DenseValues
from deltackpt.storage import ocdbt
from deltackpt.storage.store import StorePath
from deltackpt.units import size


class DenseOfBlocks(DenseItem):
    """Leaves of a step whose chain stores them as blocks, by '/'-joined path."""

    def __init__(
        self,
        item_dir: StorePath,
        saves: Saves,
        entries: Sequence[DenseEntry],
        *,
        stands: Callable[[], bool],
    ):
        """Internal: index ``Step.items``.

        Args:
          item_dir: where the item would be.
          saves: the chain of the step.
          entries: paths of the leaves in the state.
          stands: returns whether the step's directory is still the one that was opened.
        """
        super().__init__(item_dir, entries, digests=True, stands=stands)
        self._saves = saves
        self._bases: dict[StorePath, tuple[dict[str, Hashable], OrbaxValues]] = {}

    def open_array(self, key: Sequence[str]) -> Any:
        """Opens the metadata of an array, like ``DenseItem.open_array``, without its data."""
        name = f"{'.'.join(key)}/{ocdbt.ZARRAY}"
        with self._standing():
            described = self._described.values
            return self._opened(key, {name: described[name]} if name in described else {})

    def read_array(self, key: Sequence[str], index: Any) -> np.ndarray:
        """Reads a slice of an array, like ``DenseItem.read_array``."""
        prefix = f"{'.'.join(key)}/"
        with self._standing():
            found = self._values(lambda name: name.startswith(prefix)).values
            array = np.asarray(self._opened(key, found)[index].read().result())
            self._check_stands()
            return array

    def _opened(self, key: Sequence[str], values: Mapping[str, memoryview]) -> Any:
        """Opens an array from values of Orbax's database, in memory."""
        name, context = ".".join(key), ts.Context()
        memory = {"driver": "memory", "path": f"{name}/"}
        store = ts.KvStore.open({"driver": "memory"}, context=context).result()
        for place, value in values.items():
            store.write(place, bytes(value)).result()
        spec = {"driver": "zarr", "kvstore": memory, "fill_missing_data_reads": False}
        try:
            return ts.open(spec, open=True, read=True, context=context).result()
        except ValueError as error:
            raise Damaged(f"{self._shown}/{name}", "an array of Orbax's", str(error)) from error

    @functools.cached_property
    def _described(self) -> DenseValues:
        """The item's files, and the metadata of its arrays."""
        return self._values(lambda name: name.endswith(f"/{ocdbt.ZARRAY}"))

    def _values(self, wanted: Callable[[str], bool]) -> DenseValues:
        return stored_dense.of_step(self._saves.chain, wanted, item_of=self._item_of)

    def _item_of(self, save: StoredSave) -> OrbaxValues:
        """The item of a base, as it was checked."""
        found = orbax_values.of_save(save)
        versions = found.at.versions()
        known = self._bases.get(found.at)
        if known is None or known[0] != versions:
            known = self._bases[found.at] = versions, found
        return known[1]

    def _check(self, *, data: bool) -> None:
        """Does nothing: blocks are verified when they are read."""

    def _has(self, name: str) -> bool:
        return name in self._described.files

    def _names_in(self, folder: str) -> list[str]:
        return sorted(name for name in self._described.files if name.startswith(f"{folder}/"))

    def _read(self, name: str) -> bytes:
        if name not in self._described.files:
            raise Damaged(f"{self._shown}/{name}", "a file of Orbax's", "none")
        return bytes(self._described.files[name])


class DenseOfPoint(DenseOfBlocks):
    """Leaves of a recovery point, from its WAL records."""

    def __init__(
        self,
        item_dir: StorePath,
        saves: PointSaves,
        entries: Sequence[DenseEntry],
        *,
        stands: Callable[[], bool],
    ):
        """Like ``DenseOfBlocks``, for a recovery point above the step."""
        super().__init__(item_dir, saves, entries, stands=stands)
        self._plan = saves.plan

    @property
    def _shown(self) -> str:
        return f"{self._plan.point}/{self.name}"

    def _values(self, wanted: Callable[[str], bool]) -> DenseValues:
        return dense_state.at_point(self._plan, wanted=wanted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedLeaf:
    """Blocks of a dense leaf in one save.

    Attributes:
      name: the leaf's '/'-joined path.
      codecs: codecs of the blocks, sorted; ``plain`` if the leaf is stored as bytes.
      blocks: number of changed blocks of 256 elements in the save; 0 for plain bytes.
      total_blocks: number of blocks of the leaf; 0 for plain bytes.
      nbytes: bytes on disk; files of several leaves are divided in proportion to their blocks.
      raw_bytes: bytes of the leaf in memory.
    """

    name: str
    codecs: tuple[str, ...]
    blocks: int
    total_blocks: int
    nbytes: int
    raw_bytes: int


def saved_leaves(save: StoredSave) -> tuple[SavedLeaf, ...]:
    """Returns each dense leaf's blocks in a save; empty if the leaves are in Orbax's item.

    Raises:
      Damaged: a record, or the block indices of a segment, are missing or altered.
    """
    if save.head.dense_blocks is None:
        return ()
    names = {".".join(entry.key): path_name(entry.path) for entry in save.layout.dense}
    found: dict[str, _Counted] = collections.defaultdict(_Counted)
    for source in stored_dense.shards(save):
        for value in source.record.values:
            array, _, chunk = value.key.rpartition("/")
            if not value.file and chunk != ocdbt.ZARRAY:
                leaf = found[names.get(array, array)]
                leaf.total_blocks += value.blocks
                leaf.raw_bytes += value.nbytes
        for name, codec, count, nbytes in _held(source):
            leaf = found[names.get(name, name)]
            leaf.codecs.add(codec)
            leaf.nbytes += nbytes
            leaf.blocks += count
    return tuple(
        SavedLeaf(
            name=name,
            codecs=tuple(sorted(leaf.codecs)),
            blocks=leaf.blocks,
            total_blocks=leaf.total_blocks,
            nbytes=round(leaf.nbytes),
            raw_bytes=leaf.raw_bytes,
        )
        for name, leaf in found.items()
    )


@dataclasses.dataclass
class _Counted:
    """A ``SavedLeaf`` that is being counted."""

    codecs: set[str] = dataclasses.field(default_factory=set)
    blocks: int = 0
    total_blocks: int = 0
    nbytes: float = 0.0
    raw_bytes: int = 0


def _held(source: DenseShard) -> Iterator[tuple[str, str, int, float]]:
    """For each array with blocks in a segment: name, codec, blocks, bytes of files."""
    lengths = _file_bytes(source)
    values = [value for value in source.record.values if value.at is not None and not value.file]
    for segment in source.record.segments:
        share = lengths[segment.name] / max(1, segment.count)
        rows = None
        for value in values:
            name, _, chunk = value.key.rpartition("/")
            if value.group != segment.group or chunk == ocdbt.ZARRAY:
                continue
            assert value.at is not None
            if value.plain:
                yield name, value.group, 0, share * value.count
                continue
            rows = source.rows(segment) if rows is None else rows
            held = blocks.row_slice(rows, value.at, value.at + value.blocks)
            if count := held.stop - held.start:
                yield name, _codec(segment), count, share * count


def _codec(segment: Segment) -> str:
    return "+".join(encoding.codec for encoding in segment.encodings)


def _file_bytes(source: DenseShard) -> dict[str, int]:
    """Bytes of the chunks of each segment of a part."""
    return {
        segment.name: sum(source.arrays.files_of(segment).values())
        for segment in source.record.segments
    }


SAVED_COLUMNS = ("dense leaf", "codec", "blocks", "share", "on disk", "of raw")


def saved_line(leaf: SavedLeaf) -> tuple[Any, ...]:
    """Returns a leaf as a line under ``SAVED_COLUMNS``."""
    return (
        leaf.name,
        "+".join(leaf.codecs) or None,
        leaf.blocks or None,
        f"{leaf.blocks / leaf.total_blocks:.2%}" if leaf.total_blocks else None,
        size(leaf.nbytes),
        f"{leaf.nbytes / leaf.raw_bytes:.1%}" if leaf.raw_bytes else None,
    )
