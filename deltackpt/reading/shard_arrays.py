# SPDX-License-Identifier: Apache-2.0
"""The stored arrays of a shard: Zarr arrays, as in a base, or a layer, as in deltas and the WAL."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from deltackpt.cached import cached_property
from deltackpt.errors import Damaged
from deltackpt.format import naming, row_blocks
from deltackpt.format.manifest import LayerRef, Manifest
from deltackpt.format.records import MOST
from deltackpt.format.row_blocks import ArrayEntry, GroupEntry, Segment, StoredRows
from deltackpt.layers.footer import RowGroup, compression_of
from deltackpt.layers.read import LayerReader, StoredBytes
from deltackpt.layers.targets import Targets
from deltackpt.reading import bounds
from deltackpt.storage import arrays, digests
from deltackpt.storage.digests import ChunkSums, Digest
from deltackpt.storage.store import StorePath


class ZarrArrays:
    """One Zarr array in files of its own for each array; every read is verified."""

    def __init__(self, item_dir: StorePath, record: Manifest):
        self._item_dir, self._record = item_dir, record
        self._checked: set[str] = set()

    @cached_property
    def _digests(self) -> dict[str, dict[str, Digest]]:
        """Directory of each array below the item's to its chunks' paths and digests."""
        found: dict[str, dict[str, Digest]] = {}
        known = digests.read_item_digests(self._item_dir, self._record)
        for name, digest in known.items():
            array, _, chunk = name.rpartition("/")
            if chunk.startswith("c."):
                found.setdefault(array, {})[chunk] = digest
        return found

    @cached_property
    def _sums(self) -> dict[str, dict[str, ChunkSums]]:
        return {
            array: {name: ChunkSums(one.tail, one.blocks) for name, one in chunks.items()}
            for array, chunks in self._digests.items()
        }

    def files_of(self, segment: Segment) -> dict[str, int]:
        """Returns the stored bytes of a segment in each file, by path below the item's folder."""
        return {
            f"{self._directory(segment, entry).below(self._item_dir)}/{name}": digest.length
            for entry in segment.arrays
            for name, digest in self._chunks(segment, entry).items()
        }

    def name_of(self, segment: Segment, entry: ArrayEntry) -> str:
        """Returns the name of an array in errors."""
        return self._directory(segment, entry).shown(5)

    def check(self, segment: Segment) -> None:
        """Raises Damaged if the stored bytes are too short for the arrays of a segment.

        The digests contain the length of each file, and the first chunk of each array its own.
        Everything that reads calls it.
        """
        if segment.name in self._checked:
            return
        for entry in segment.arrays:
            directory, chunks = self._directory(segment, entry), self._chunks(segment, entry)
            nbytes, name = arrays.chunk_bytes(entry), directory.shown(5)
            bounds.check_chunks(entry, nbytes, [one.length for one in chunks.values()], name)
            if chunks:
                first = directory / arrays.chunk_name(entry, 0)
                shown = f"{name}/{arrays.chunk_name(entry, 0)}"
                bounds.check_chunk(entry, nbytes, first.length(shown), shown)
        self._checked.add(segment.name)

    def missing(self, segment: Segment, entry: ArrayEntry) -> Iterator[str]:
        """Yields names of chunks of an array, below the array's, that no digest describes."""
        known = self._chunks(segment, entry)
        for number in range(math.ceil(entry.shape[0] / entry.chunk_rows)):
            name = arrays.chunk_name(entry, number)
            if name not in known:
                yield name

    def row_indices(self, segment: Segment, first: int = 0, stop: int = MOST) -> StoredRows:
        """Returns the row indices in ``[first, stop)`` of a segment without ranges, or more."""
        self.check(segment)
        entry = next(entry for entry in segment.arrays if entry.name == naming.GAPS)
        found, position, last = [], 0, -1
        for start in range(0, entry.shape[0], entry.chunk_rows):
            gaps = np.empty(min(entry.chunk_rows, entry.shape[0] - start), entry.dtype)
            self.read_into(segment, entry, start, start + len(gaps), gaps)
            rows = np.cumsum(gaps, dtype=np.int64)
            # Summing int64 cannot wrap back to ascending rows.
            if rows[0] <= last or not np.all(rows[1:] > rows[:-1]):
                chunk = arrays.chunk_name(entry, start // entry.chunk_rows)
                name = f"{self.name_of(segment, entry)}/{chunk}"
                raise Damaged(name, f"ascending rows after {last}", "other gaps")
            last = int(rows[-1])
            if rows[0] >= stop:
                break
            if last < first:
                position = start + len(rows)
            else:
                found.append(rows)
        return StoredRows(np.concatenate([np.empty(0, np.int64), *found]), position)

    def read_into(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        """Reads elements ``[start, stop)`` of an array's first axis; raises Damaged."""
        self.check(segment)
        directory = self._directory(segment, entry)
        sums = self._sums.get(directory.below(self._item_dir), {})
        arrays.read_array(directory, entry, start, stop, out, checksums=sums)

    def _chunks(self, segment: Segment, entry: ArrayEntry) -> dict[str, Digest]:
        directory = self._directory(segment, entry)
        return self._digests.get(directory.below(self._item_dir), {})

    def _directory(self, segment: Segment, entry: ArrayEntry) -> StorePath:
        return naming.array_dir(self._item_dir, self._record.process, segment.name, entry.name)


class _Open(Protocol):
    """Opens a layer; see ``LayerReader`` for ``at_once``."""

    def __call__(self, *, at_once: bool = False) -> LayerReader: ...


class LayerArrays:
    """A layer; every read is verified."""

    def __init__(self, opened: _Open, *, name: str, file: str = "", nbytes: int = MOST):
        """Reads nothing yet; ``file`` is its path below the item's folder, empty in the WAL.

        ``nbytes`` are those of the layer, if they are known.
        """
        self._opened, self._name, self._file = opened, name, file
        self.nbytes = nbytes
        #: Row groups that agree with the record.
        self._checked: dict[str, RowGroup] = {}

    @cached_property
    def layer(self) -> LayerReader:
        """The layer; raises Damaged if its footer is missing, altered, or that of another save.

        Two threads may both open it: each reader verifies what it reads.
        """
        return self._opened()

    def loaded(self) -> LayerArrays:
        """Returns the same arrays, in memory from their first use on."""

        def opened(*, at_once: bool = True) -> LayerReader:
            if "layer" in vars(self):
                return self.layer.at(at_once=at_once)
            found = self._opened(at_once=at_once)
            self.layer = found.at()  # Keeps the footer, but not the bytes.
            return found

        return LayerArrays(opened, name=self._name, file=self._file, nbytes=self.nbytes)

    def files_of(self, segment: Segment) -> dict[str, int]:
        """See ``ZarrArrays``."""
        held = self.layer.arrays(self._group(segment))
        names = (entry.name for entry in segment.arrays if entry.name in held)
        return {self._file: sum(self.layer.bytes_of(held[name]) for name in names)}

    def name_of(self, segment: Segment, entry: ArrayEntry) -> str:
        """See ``ZarrArrays``."""
        return f"{self._name}: row group {segment.name!r}, array {entry.name!r}"

    def check(self, segment: Segment) -> None:
        """See ``ZarrArrays``; the footer bounds each array by the length of the file."""
        if segment.name in self._checked:
            return
        group = self._group(segment)
        held = self.layer.arrays(group).values()
        kinds = {one.name: (one.shape, one.dtype, one.compression) for one in held}
        for entry in (one for one in segment.arrays if one.name != naming.GAPS):
            expected = entry.shape, entry.dtype, compression_of(entry)
            if (found := kinds.get(entry.name)) != expected:
                name = self.name_of(segment, entry)
                raise Damaged(name, f"{expected}, as in the record", f"{found}")
        self._checked[segment.name] = group

    def row_indices(self, segment: Segment, first: int = 0, stop: int = MOST) -> StoredRows:
        """Returns the row indices in ``[first, stop)`` of a segment without ranges."""
        self.check(segment)
        return self.layer.rows(self._checked[segment.name], first, stop)

    def read_into(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        """See ``ZarrArrays``."""
        self.check(segment)
        array = self.layer.arrays(self._checked[segment.name])[entry.name]
        if out.flags.c_contiguous:
            self.layer.read_into(array, start, stop, out)
        else:
            whole = np.empty(out.shape, out.dtype)
            self.layer.read_into(array, start, stop, whole)
            out[...] = whole

    @cached_property
    def _groups(self) -> dict[str, RowGroup]:
        return {group.name: group for group in self.layer.manifest.row_groups}

    def _group(self, segment: Segment) -> RowGroup:
        if segment.name in self._checked:
            return self._checked[segment.name]
        group = self._groups.get(segment.name)
        expected = segment.count, segment.ranges if segment.count else ()
        if group is None or (group.count, group.ranges) != expected:
            found = "none" if group is None else f"{group.count} rows in {group.ranges}"
            shown = f"{self._name}: row group {segment.name!r}"
            raise Damaged(shown, f"{expected[0]} rows in {expected[1]}, as in the record", found)
        return group


ShardArrays: TypeAlias = ZarrArrays | LayerArrays
#: Layers up to this length are read as a whole, dense leaves included: one request takes less time
#: than one for each array.
_SMALL_BYTES = 256 << 10
#: Memory for such layers; more of them are read array by array.
_LOADED_BYTES = 64 << 20


_Shard = TypeVar("_Shard", bound="Shard")


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """The rows that one process wrote in a save or WAL record; see ``layers.row_indices.Layer``."""

    arrays: ShardArrays
    segments: tuple[Segment, ...]
    groups: Mapping[str, GroupEntry]

    def name_of(self, segment: Segment, entry: ArrayEntry) -> str:
        """Returns the name of a stored array in errors."""
        return self.arrays.name_of(segment, entry)

    def check(self, segment: Segment) -> None:
        """See ``layers.row_indices.Layer``."""
        self.arrays.check(segment)

    def row_indices(self, segment: Segment, first: int = 0, stop: int = MOST) -> StoredRows:
        """See ``layers.row_indices.Layer``."""
        return self.arrays.row_indices(segment, first, stop)

    def read_into(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        """Reads rows of one stored array; verifies that every chunk is the one written there."""
        self.arrays.read_into(segment, entry, start, stop, out)


def with_loaded(
    saves: Iterable[Iterable[_Shard]], targets: Targets | None = None
) -> list[list[_Shard]]:
    """Returns shards that read each small layer with one request, as far as there is memory.

    If ``targets`` contain less than half of the bytes of a layer's fields, its arrays are read one
    by one. The bytes are freed with these shards: others read what is stored then.
    """
    left, found = _LOADED_BYTES, list[list[_Shard]]()
    for of_save in saves:
        found.append([])
        for shard in of_save:
            arrays = shard.arrays
            if (
                isinstance(arrays, LayerArrays)
                and arrays.nbytes <= min(_SMALL_BYTES, left)
                and (targets is None or _is_mostly_wanted(shard, targets))
            ):
                left -= arrays.nbytes
                shard = dataclasses.replace(shard, arrays=arrays.loaded())
            found[-1].append(shard)
    return found


def _is_mostly_wanted(shard: Shard, targets: Targets) -> bool:
    balance = 0
    for segment in shard.segments:
        for name in segment.fields:
            nbytes = segment.count * segment.spec(shard.groups[segment.group], name).row_bytes
            balance += nbytes if targets.want(segment, name) else -nbytes
    return balance >= 0


def is_of_dense_segment(object_name: str) -> bool:
    """Returns whether a name in an error, without the item's path, is of a dense segment."""
    inside, _, row_group = object_name.partition(": ")
    found = [*inside.split("/")[1:2], row_group.removeprefix("row group '")]
    return any(name.startswith(row_blocks.SEGMENTS) for name in found)


def arrays_of(item_dir: StorePath, record: Manifest) -> ShardArrays:
    """Returns the stored arrays of a shard."""
    if record.layer is None:
        return ZarrArrays(item_dir, record)
    file, ref = naming.layer_name(record.process), record.layer
    opened = functools.partial(layer_of, item_dir, record, ref)
    return LayerArrays(opened, name=(item_dir / file).shown(), file=file, nbytes=ref.nbytes)


def layer_of(
    item_dir: StorePath, record: Manifest, ref: LayerRef, *, at_once: bool = False
) -> LayerReader:
    """Opens the layer of a delta's shard; raises Damaged if it is not that of the save."""
    source = StoredBytes(item_dir / naming.layer_name(record.process))
    layer = LayerReader(source, ref.nbytes, digest=ref.digest, at_once=at_once)
    if (found := layer.manifest.save_id) != record.save_id:
        raise Damaged(f"{source.name}: footer", f"the layer of {record.save_id}", f"{found}")
    return layer
