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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deltackpt.errors import Damaged
from deltackpt.format.dense_blocks import PLAIN
from deltackpt.format.manifest import DenseLeaf as DenseEntry
from deltackpt.format.manifest import path_name
from deltackpt.inspect.dense import DenseItem
from deltackpt.inspect.lazy import Saves
from deltackpt.reading import stored_dense
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stored_dense import DenseShard, DenseValues
from deltackpt.storage import ocdbt
from deltackpt.storage.kv_store import Reachable, in_memory
from deltackpt.storage.store import StorePath
from deltackpt.units import size


class DenseOfBlocks(DenseItem):
    """Leaves of a step or recovery point that layers or WAL records contain, by '/'-joined path."""

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
          saves: the chain of the step or recovery point.
          entries: paths of the leaves in the state.
          stands: returns whether the step's directory is still the one that was opened.
        """
        super().__init__(item_dir, entries, digests=True, stands=stands)
        self._saves = saves

    @property
    def _shown(self) -> str:
        return f"{self._saves.name}/{self.name}"

    @functools.cached_property
    def _described(self) -> DenseValues:
        """The item's files, and the metadata of its arrays."""
        return self._saves.dense(lambda name: name.endswith(f"/{ocdbt.ZARRAY}"))

    def _stored(self, name: str, metadata: Mapping[str, Any], *, data: bool) -> Reachable:
        """The array's values in Orbax's database, in memory; only its metadata without ``data``."""
        if data:
            values = self._saves.dense(lambda key: key.startswith(f"{name}/")).values
        else:
            key, described = f"{name}/{ocdbt.ZARRAY}", self._described.values
            values = {key: described[key]} if key in described else {}
        spec, context = in_memory(values)
        return Reachable({**spec, "path": f"{name}/"}, context)

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
    for shard in stored_dense.shards(save):
        for value in shard.record.values:
            array, _, chunk = value.key.rpartition("/")
            if not value.file and chunk != ocdbt.ZARRAY:
                leaf = found[names.get(array, array)]
                leaf.total_blocks += value.blocks
                leaf.raw_bytes += value.nbytes
        for array, codec, count, nbytes in _held(shard):
            leaf = found[names.get(array, array)]
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


def _held(shard: DenseShard) -> Iterator[tuple[str, str, int, float]]:
    """For each array with blocks in a segment: name, codec, blocks, bytes of files."""
    for segment in shard.record.segments:
        share = sum(shard.arrays.files_of(segment).values()) / max(1, segment.count)
        values = [value for value in shard.record.values if value.group == segment.group]
        codec = "+".join(encoding.codec for encoding in segment.encodings)
        if segment.group == PLAIN:
            held = [(value, PLAIN, 0, value.count) for value in values if value.at is not None]
        else:
            rows = stored_dense.blocks_by_value(values, shard.rows(segment))
            held = [(value, codec, len(rows), len(rows)) for value, (rows, _) in rows]
        for value, codec, count, stored in held:
            name, _, chunk = value.key.rpartition("/")
            if not value.file and chunk != ocdbt.ZARRAY:
                yield name, codec, count, share * stored


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
