# SPDX-License-Identifier: Apache-2.0
"""Writes one shard of a save: arrays, then their digests, then the manifest, last.

Trainers and compactors write the same layout. After a kill, no manifest names a missing file. Each
process writes a shard; process 0's manifest describes all, so the others omit what it contains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import google_crc32c
import numpy as np

from deltackpt import __about__
from deltackpt.format import manifest, naming, row_blocks
from deltackpt.format.manifest import Cover, LayerRef, Manifest, ShardEntry
from deltackpt.format.row_blocks import ArrayEntry, Encoding, GroupEntry, Segment
from deltackpt.storage import digests
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import Digest, Digests


class RowsWriter(Protocol):
    """Writes the rows of one array, piece by piece, as Zarr chunks or in a layer."""

    def write(self, rows: np.ndarray) -> None:
        """Writes the next rows."""
        ...

    def finish(self) -> int:
        """Completes the array; returns its bytes."""
        ...

    def remove(self) -> None:
        """Abandons the array."""
        ...


class SegmentSink(Protocol):
    """The destination of one segment's arrays: files, or a layer."""

    @property
    def segment(self) -> str:
        """Name of the segment."""
        ...

    def writer(self, entry: ArrayEntry, *, pinned: bool = False) -> RowsWriter:
        """Returns a writer for one of its arrays.

        ``pinned`` pieces stay valid until ``finish``, but others may change their contents. The
        writer may keep all of them until then, so they should be views of memory that is kept
        anyway.
        """
        ...

    def write_rows(self, rows: np.ndarray) -> StoredArrays:
        """Writes row indices, int64 ascending."""
        ...


class StoredArrays(NamedTuple):
    """Arrays that were written, and the bytes of all their files."""

    entries: tuple[ArrayEntry, ...]
    nbytes: int

    @classmethod
    def joined(cls, pieces: Iterable[StoredArrays]) -> StoredArrays:
        """The arrays of all pieces, in their order."""
        found = list(pieces)
        entries = tuple(entry for piece in found for entry in piece.entries)
        return cls(entries, sum(piece.nbytes for piece in found))


class StoredField(NamedTuple):
    """A field that was written."""

    arrays: StoredArrays
    encoding: Encoding


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardSummary:
    """One process's shard of a save, as described to the others."""

    owned_cells: dict[str, int]  # By group: the cells that it writes in a base.
    covers: tuple[Cover, ...]  # Regions that contain the shard's rows.
    shared_stamps: Mapping[str, int] = dataclasses.field(default_factory=dict)


class DescribedShard(NamedTuple):
    """A shard whose arrays were written; ``nbytes`` counts the files but its manifest."""

    record: Manifest
    nbytes: int


class WrittenShard(NamedTuple):
    """A shard whose manifest was written; ``nbytes`` counts all its files."""

    record: Manifest
    nbytes: int
    crc32c: int  # Of the manifest's bytes.


def write_array(
    sink: SegmentSink, entry: ArrayEntry, pieces: Iterable[np.ndarray], *, pinned: bool = False
) -> StoredArrays:
    """Writes one array from its pieces, in order.

    With ``pinned``, all pieces may be kept until the array is written; see ``SegmentSink.writer``.
    """
    writer = sink.writer(entry, pinned=pinned)
    for piece in pieces:
        writer.write(piece)
    return StoredArrays((entry,), writer.finish())


def write_rows(sink: SegmentSink, rows: row_blocks.Rows) -> StoredArrays:
    """Writes the row indices of a segment, if ranges do not describe them."""
    return sink.write_rows(rows) if isinstance(rows, np.ndarray) else StoredArrays((), 0)


def stored_field(
    name: str,
    stored: StoredArrays,
    *,
    codec: str,
    reason: str,
    bounds: np.ndarray,
    squared_error: np.ndarray | None = None,
    squared_norm: np.ndarray | None = None,
) -> StoredField:
    """Returns the record of a written field, with its figures by table.

    ``bounds``, (tables + 1,), are the positions in the segment at which each table's rows begin and
    end. The sums of squares, of the decoding error and of the encoded rows, are (tables,).
    """
    nothing = np.zeros(len(bounds) - 1)
    error = nothing if squared_error is None else squared_error
    norm = nothing if squared_norm is None else squared_norm
    encoding = Encoding(
        field=name,
        codec=codec,
        reason=reason,
        nbytes=stored.nbytes,
        rows=tuple(np.diff(bounds).tolist()),
        squared_error=tuple(error.tolist()),
        squared_norm=tuple(norm.tolist()),
    )
    return StoredField(stored, encoding)


def stored_segment(
    sink: SegmentSink,
    group: str,
    columns: row_blocks.Span,
    rows: row_blocks.Rows,
    row_indices: StoredArrays,
    fields: Sequence[StoredField],
) -> Segment:
    """Returns the record of a segment whose arrays were written; ``rows`` are virtual."""
    found = StoredArrays.joined([row_indices, *(field.arrays for field in fields)])
    return Segment(
        name=sink.segment,
        group=group,
        columns=columns,
        count=len(rows),
        ranges=None if isinstance(rows, np.ndarray) else row_blocks.spans_of(rows),
        fields=tuple(field.encoding.field for field in fields),
        arrays=found.entries,
        encodings=tuple(field.encoding for field in fields),
    )


def table_bounds(group: GroupEntry, layout: manifest.Layout, rows: row_blocks.Rows) -> np.ndarray:
    """Returns the position in some virtual rows at which each table's rows begin, and the end."""
    tables = manifest.tables_of_group(group, layout.tables)
    if isinstance(rows, np.ndarray):
        starts = np.searchsorted(rows, [table.offset for table in tables]).tolist()
    else:
        starts = [row_blocks.row_slice(rows, table.offset, group.rows).start for table in tables]
    return np.array([*starts, len(rows)])


def described(
    item_dir: Path,
    head: Manifest,
    segments: Sequence[Segment],
    batch: FileBatch,
    *,
    layer: LayerRef | None = None,
    summary: ShardSummary | None = None,
    other_digests: Mapping[str, Digest] | None = None,
) -> DescribedShard:
    """Returns the manifest of a shard whose arrays were written, after writing their digests.

    ``layer`` is None if the arrays are files of the batch; ``summary`` is None if one process
    writes the save. ``other_digests`` are of other files of the item.
    """
    process = head.process
    if layer is None:
        shard_digests = batch.below(naming.shard_dir(item_dir, process), relative_to=item_dir)
        shard_digests |= other_digests or {}
        data = digests.digests_bytes(Digests.from_files(shard_digests))
        batch.write(item_dir / naming.digests_name(process), data)
        record = complete(head, segments, summary, item_digests_crc32c=google_crc32c.value(data))
        nbytes = len(data) + sum(digest.length for digest in shard_digests.values())
    else:
        record, nbytes = complete(head, segments, summary, layer=layer), layer.nbytes
    if process > 0:
        # Process 0 describes all; its digest verifies that.
        record = dataclasses.replace(record, groups=(), tables=(), dense=(), tracking_paths=())
    return DescribedShard(record, nbytes)


def write_manifest(item_dir: Path, shard: DescribedShard, batch: FileBatch) -> WrittenShard:
    """Writes the manifest of a shard; the caller then fsyncs ``batch``."""
    process, data = shard.record.process, manifest.to_bytes(shard.record)
    batch.write(item_dir / naming.manifest_name(process), data)
    return WrittenShard(shard.record, shard.nbytes + len(data), google_crc32c.value(data))


def complete(
    head: Manifest,
    segments: Sequence[Segment],
    summary: ShardSummary | None,
    *,
    item_digests_crc32c: int = 0,
    layer: LayerRef | None = None,
) -> Manifest:
    """Completes a manifest after the arrays of a shard were written."""
    record = dataclasses.replace(
        head,
        segments=tuple(segments),
        item_digests_crc32c=item_digests_crc32c,
        layer=layer,
        writers=__about__.writer_versions(),
        features=_features(head, segments, layer),
    )
    if summary is None:
        return record
    return dataclasses.replace(
        record,
        plan_crc32c=manifest.plan_crc32c(record),
        shared_stamps=dict(summary.shared_stamps),
        owned_cells=summary.owned_cells,
        covers=summary.covers,
    )


def _features(
    head: Manifest, segments: Iterable[Segment], layer: LayerRef | None
) -> tuple[str, ...]:
    """Features that a reader must support, such as codecs other than the planned ones."""
    planned = {spec.codec for group in head.groups for spec in group.fields}
    used = {encoding.codec for segment in segments for encoding in segment.encodings}
    coded = () if planned | used == {"raw"} else (manifest.ENCODINGS,)
    if head.process_count > 1:
        coded = (*coded, manifest.SHARDS)
    if head.dense_blocks is not None:
        coded = (*coded, manifest.DENSE_BLOCKS)
    return coded if layer is None else (*coded, manifest.LAYERS)


def shard_entry(record: Manifest, crc32c: int) -> ShardEntry:
    """Returns the index entry of a shard; ``crc32c`` of its manifest is 0 for process 0's own."""
    return ShardEntry(
        process=record.process, crc32c=crc32c, nbytes=record.nbytes, covers=record.covers
    )
