# SPDX-License-Identifier: Apache-2.0
"""Writes one part of a save: arrays, then their digests, then the manifest, last.

A trainer and a compactor write the same: the arrays of each segment under its name, digests of all
files of the part, and a manifest that vouches for these. What is not there yet when a process is
killed is not named by any manifest. Several processes write a part each; process 0's manifest
speaks for all of them, so those of the others leave out what it says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from deltackpt import __about__
from deltackpt.format import blocks, gaps, manifest, names
from deltackpt.format.manifest import (
    ArrayEntry,
    Cover,
    Encoding,
    GroupEntry,
    Manifest,
    Part,
    Segment,
)
from deltackpt.storage import arrays, digests, files
from deltackpt.storage.arrays import ChunkSums
from deltackpt.storage.digests import Digest, Digests


class ArrayPlace(NamedTuple):
    """Where the arrays of one segment go."""

    item_dir: Path
    process: int
    segment: str
    fsync: bool

    def directory(self, array: str) -> Path:
        """Directory of one array."""
        return names.array_dir(self.item_dir, self.process, self.segment, array)

    def stored(self, entry: ArrayEntry, checksums: Mapping[str, ChunkSums]) -> StoredArrays:
        """An array that was written there, with what its writer says of its chunks."""
        below = self.directory(entry.name).relative_to(self.item_dir).as_posix()
        return StoredArrays((entry,), digests.chunk_digests(below, entry, checksums))


class StoredArrays(NamedTuple):
    """Arrays that were written, and the digests of their chunks by path below the item."""

    entries: tuple[ArrayEntry, ...]
    chunks: Mapping[str, Digest]

    @classmethod
    def joined(cls, parts: Iterable[StoredArrays]) -> StoredArrays:
        """The arrays of all parts, in their order."""
        entries: list[ArrayEntry] = []
        chunks: dict[str, Digest] = {}
        for part in parts:
            entries += part.entries
            chunks |= part.chunks
        return cls(tuple(entries), chunks)


class StoredField(NamedTuple):
    """A field that was written."""

    arrays: StoredArrays
    encoding: Encoding


class StoredSegment(NamedTuple):
    """A segment that was written, and the digests of its chunks by path below the item."""

    record: Segment
    chunks: Mapping[str, Digest]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What one of several processes says of its part.

    Attributes:
      owned_cells: group to the cells that it writes in a base.
      covers: where the rows of the part lie.
      shared_stamps: checksums of stamps that other processes hold too.
    """

    owned_cells: dict[str, int]
    covers: tuple[Cover, ...]
    shared_stamps: Mapping[str, int] = dataclasses.field(default_factory=dict)


class WrittenPart(NamedTuple):
    """A part whose manifest stands.

    Attributes:
      record: what that says.
      nbytes: bytes of all files of the part.
      crc32c: of the bytes of the manifest.
    """

    record: Manifest
    nbytes: int
    crc32c: int


def write_array(place: ArrayPlace, entry: ArrayEntry, pieces: Iterator[np.ndarray]) -> StoredArrays:
    """Writes one array as it is; see ``arrays.write_array``."""
    checksums = arrays.write_array(place.directory(entry.name), entry, pieces, fsync=place.fsync)
    return place.stored(entry, checksums)


def write_rows(place: ArrayPlace, rows: blocks.Rows) -> StoredArrays:
    """Writes which rows a segment holds, where ranges do not say it."""
    if not isinstance(rows, np.ndarray):
        return StoredArrays((), {})
    encoded = gaps.encode_gaps(rows)
    entry = arrays.array_entry(names.GAPS, encoded.shape, encoded.dtype, zstd=True)
    return write_array(place, entry, iter([encoded]))


def stored_field(
    place: ArrayPlace,
    name: str,
    stored: StoredArrays,
    *,
    codec: str,
    reason: str,
    bounds: np.ndarray,
    squared_error: np.ndarray | None = None,
    squared_norm: np.ndarray | None = None,
) -> StoredField:
    """A field that was written, with its figures by table.

    Args:
      place: where.
      name: of the field.
      stored: all its arrays.
      codec: what encoded it.
      reason: why that one.
      bounds: (tables + 1,): positions in the segment at which each table's rows begin and end.
      squared_error: (tables,): what the codec changed; nothing by default.
      squared_norm: (tables,): of the rows that it encoded; nothing by default.
    """
    nothing = np.zeros(len(bounds) - 1)
    error = nothing if squared_error is None else squared_error
    norm = nothing if squared_norm is None else squared_norm
    encoding = Encoding(
        field=name,
        codec=codec,
        reason=reason,
        nbytes=sum(files.tree_bytes(place.directory(entry.name)) for entry in stored.entries),
        rows=tuple(np.diff(bounds).tolist()),
        squared_error=tuple(error.tolist()),
        squared_norm=tuple(norm.tolist()),
    )
    return StoredField(stored, encoding)


def stored_segment(
    place: ArrayPlace,
    group: str,
    columns: blocks.Span,
    rows: blocks.Rows,
    row_numbers: StoredArrays,
    fields: Sequence[StoredField],
) -> StoredSegment:
    """A segment whose arrays were written.

    Args:
      place: where.
      group: of its rows.
      columns: see ``Segment``.
      rows: virtual.
      row_numbers: of ``write_rows``.
      fields: in their order.
    """
    found = StoredArrays.joined([row_numbers, *(field.arrays for field in fields)])
    record = Segment(
        name=place.segment,
        group=group,
        columns=columns,
        count=len(rows),
        ranges=None if isinstance(rows, np.ndarray) else blocks.spans_of(rows),
        fields=tuple(field.encoding.field for field in fields),
        arrays=found.entries,
        encodings=tuple(field.encoding for field in fields),
    )
    return StoredSegment(record, found.chunks)


def table_bounds(group: GroupEntry, layout: manifest.Layout, rows: blocks.Rows) -> np.ndarray:
    """Positions in some virtual rows at which those of each table of a group begin, and the end."""
    tables = manifest.members(group, layout.tables)
    starts = [blocks.row_slice(rows, table.offset, group.rows).start for table in tables]
    return np.array([*starts, len(rows)])


def finish(
    item_dir: Path,
    head: Manifest,
    segments: Sequence[StoredSegment],
    *,
    fsync: bool,
    share: Share | None = None,
    index: Callable[[Manifest], tuple[Part, ...]] | None = None,
) -> WrittenPart:
    """Digests of all files of a part, then its manifest.

    Args:
      item_dir: of the item, in a temporary directory.
      head: the manifest as far as it is known before anything is written.
      segments: all of the part, written.
      fsync: whether all of it is on disk when this returns.
      share: what it says for the others; None where one process writes the whole save.
      index: waits for the parts of the others and gives the index of all, for process 0; where it
        is None the index is written later.

    Raises:
      StorageError: the store refused.
    """
    process = head.process
    chunks = {name: digest for segment in segments for name, digest in segment.chunks.items()}
    part = names.part_dir(item_dir, process)
    others = digests.digest_tree(item_dir, below=part, skip=chunks.__contains__)
    all_digests = Digests.of({**others, **chunks})
    digests_path = item_dir / names.digests_name(process)
    digests_crc32c = digests.write_digests(digests_path, all_digests, fsync=fsync)
    if fsync:
        files.fsync_tree(part, folders_only=True)
    record = complete(head, segments, digests_crc32c, share)
    if process > 0:
        # Process 0 speaks for all; what it says is checked by its digest.
        record = dataclasses.replace(record, groups=(), tables=(), dense=(), tracking_paths=())
    elif index is not None:
        record = dataclasses.replace(record, parts=index(record), shared_stamps={})
    data = manifest.to_bytes(record)
    files.write_atomic(item_dir / names.manifest_name(process), data, fsync=fsync)
    arrays_bytes = sum(length for length, _, _ in all_digests.files.values())
    nbytes = arrays_bytes + digests_path.stat().st_size + len(data)
    return WrittenPart(record, nbytes, google_crc32c.value(data))


def complete(
    head: Manifest, segments: Sequence[StoredSegment], digests_crc32c: int, share: Share | None
) -> Manifest:
    """A head with all that is known once the arrays and the digests of a part stand."""
    records = tuple(segment.record for segment in segments)
    record = dataclasses.replace(
        head,
        segments=records,
        item_digests_crc32c=digests_crc32c,
        writers=__about__.writer_versions(),
        features=_features(head, records),
    )
    if share is None:
        return record
    return dataclasses.replace(
        record,
        plan_crc32c=manifest.plan_crc32c(record),
        shared_stamps=dict(share.shared_stamps),
        owned_cells=share.owned_cells,
        covers=share.covers,
    )


def _features(head: Manifest, segments: Iterable[Segment]) -> tuple[str, ...]:
    """What a reader must know: it must not take planned codecs for those that were used."""
    planned = {spec.codec for group in head.groups for spec in group.fields}
    used = {encoding.codec for segment in segments for encoding in segment.encodings}
    coded = () if planned | used == {"raw"} else (manifest.ENCODINGS,)
    return (*coded, manifest.PARTS) if head.process_count > 1 else coded


def part_of(record: Manifest, crc32c: int) -> Part:
    """The entry of a part in the index.

    Args:
      record: its manifest.
      crc32c: of the bytes of that; 0 for process 0's own.
    """
    return Part(process=record.process, crc32c=crc32c, nbytes=record.nbytes, covers=record.covers)
