# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of a step that has them as blocks, lazy: its chain is decoded for what is asked for.

They are shown as the leaves of the item that Orbax's handler would have written. A leaf is decoded
as a whole, from the newest block that says all back to the base, every array verified; the item of
the base is checked once for all leaves, and again where a file of it has changed since.
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
from deltackpt.inspect.lazy import Saves
from deltackpt.reading import dense_values, orbax_values
from deltackpt.reading.dense_values import DenseValues, PartSource
from deltackpt.reading.orbax_values import OrbaxValues
from deltackpt.reading.saves import StoredSave
from deltackpt.storage import digests, ocdbt
from deltackpt.storage.store import Spot
from deltackpt.units import size


class DenseOfBlocks(DenseItem):
    """The leaves of a step whose chain holds them as blocks, by their '/'-joined paths."""

    def __init__(
        self,
        item_dir: Spot,
        saves: Saves,
        entries: Sequence[DenseEntry],
        *,
        stands: Callable[[], bool],
    ):
        """Made by ``Step``.

        Args:
          item_dir: where the item would be.
          saves: the chain of the step.
          entries: where the leaves stand in the state.
          stands: whether the step's directory is still the one that was opened.
        """
        super().__init__(item_dir, entries, digests=True, stands=stands)
        self._saves = saves
        self._bases: dict[Spot, tuple[dict[str, Hashable], OrbaxValues]] = {}

    def open_array(self, key: Sequence[str]) -> Any:
        """As ``DenseItem.open_array``; of the array there is its description alone."""
        name = f"{'.'.join(key)}/{ocdbt.ZARRAY}"
        with self._standing():
            described = self._described.values
            return self._opened(key, {name: described[name]} if name in described else {})

    def read_array(self, key: Sequence[str], index: Any) -> np.ndarray:
        """As ``DenseItem.read_array``."""
        prefix = f"{'.'.join(key)}/"
        with self._standing():
            found = self._values(lambda name: name.startswith(prefix)).values
            array = np.asarray(self._opened(key, found)[index].read().result())
            self._check_stands()
            return array

    def _opened(self, key: Sequence[str], values: Mapping[str, memoryview]) -> Any:
        """An array of values of Orbax's database, in memory."""
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
        """Files beside the arrays, and what describes these."""
        return self._values(lambda name: name.endswith(f"/{ocdbt.ZARRAY}"))

    def _values(self, wanted: Callable[[str], bool]) -> DenseValues:
        return dense_values.of_step(self._saves.chain, wanted, item_of=self._item_of)

    def _item_of(self, save: StoredSave) -> OrbaxValues:
        """The item of a base, as it was checked."""
        found = orbax_values.of_save(save)
        versions = found.at.versions()
        known = self._bases.get(found.at)
        if known is None or known[0] != versions:
            known = self._bases[found.at] = versions, found
        return known[1]

    def _check(self, *, data: bool) -> None:
        """Nothing: what is read is verified as it is."""

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
    """What a save holds of a dense leaf as blocks.

    Attributes:
      name: its '/'-joined path.
      codecs: those of its blocks, sorted; ``plain`` where it is kept as bytes.
      blocks: of 256 numbers that are held, since they changed; of plain bytes 0.
      total_blocks: blocks of the leaf; of plain bytes 0.
      nbytes: bytes of files; those of a file of several leaves are shared by blocks.
      raw_bytes: bytes of the leaf itself.
    """

    name: str
    codecs: tuple[str, ...]
    blocks: int
    total_blocks: int
    nbytes: int
    raw_bytes: int


def saved_leaves(save: StoredSave) -> tuple[SavedLeaf, ...]:
    """What a save holds of each dense leaf as blocks; nothing of a save that has Orbax's item.

    Raises:
      Damaged: a record, or the row numbers of a segment, are missing or altered.
    """
    if save.head.dense_blocks is None:
        return ()
    names = {".".join(entry.key): path_name(entry.path) for entry in save.layout.dense}
    found: dict[str, _Counted] = collections.defaultdict(_Counted)
    for source in dense_values.sources(save):
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


def _held(source: PartSource) -> Iterator[tuple[str, str, int, float]]:
    """Of each array that has something in a segment: name, codec, blocks, bytes of files."""
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
            rows = dense_values.rows_of(source, segment) if rows is None else rows
            held = blocks.row_slice(rows, value.at, value.at + value.blocks)
            if count := held.stop - held.start:
                yield name, _codec(segment), count, share * count


def _codec(segment: Segment) -> str:
    return "+".join(encoding.codec for encoding in segment.encodings)


def _file_bytes(source: PartSource) -> dict[str, int]:
    """Bytes of the chunks of each segment of a part."""
    found: dict[str, int] = collections.Counter()
    part = source.part
    for name, (length, _, _) in digests.read_item_digests(part.item_dir, part.record).files.items():
        array, inside, _ = name.rpartition("/c/")
        if inside:
            found[array.split("/")[1]] += length
    return found


SAVED_COLUMNS = ("dense leaf", "codec", "blocks", "of all", "on disk", "of unencoded")


def saved_line(leaf: SavedLeaf) -> tuple[Any, ...]:
    """A leaf as a line under ``SAVED_COLUMNS``."""
    return (
        leaf.name,
        "+".join(leaf.codecs) or None,
        leaf.blocks or None,
        f"{leaf.blocks / leaf.total_blocks:.2%}" if leaf.total_blocks else None,
        size(leaf.nbytes),
        f"{leaf.nbytes / leaf.raw_bytes:.1%}" if leaf.raw_bytes else None,
    )
