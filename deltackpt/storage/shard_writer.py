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
from deltackpt.format.manifest import LayerRef, Manifest, ShardEntry
from deltackpt.format.row_blocks import ArrayEntry, Encoding, GroupEntry, Segment
from deltackpt.storage import digests
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import Digest


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

    def write_rows(self, rows: np.ndarray) -> ArrayEntry:
        """Writes row indices, int64 ascending."""
        ...


class WrittenArray(NamedTuple):
    """An array that was written, and the bytes of all its files."""

    entry: ArrayEntry
    nbytes: int


class StoredField(NamedTuple):
    """A field that was written."""

    arrays: tuple[ArrayEntry, ...]
    encoding: Encoding


def write_array(
    sink: SegmentSink, entry: ArrayEntry, pieces: Iterable[np.ndarray], *, pinned: bool = False
) -> WrittenArray:
    """Writes one array from its pieces, in order.

    With ``pinned``, all pieces may be kept until the array is written; see ``SegmentSink.writer``.
    """
    writer = sink.writer(entry, pinned=pinned)
    for piece in pieces:
        writer.write(piece)
    return WrittenArray(entry, writer.finish())


def write_rows(sink: SegmentSink, rows: row_blocks.Rows) -> tuple[ArrayEntry, ...]:
    """Writes the row indices of a segment, if ranges do not describe them."""
    return (sink.write_rows(rows),) if isinstance(rows, np.ndarray) else ()


def stored_field(
    name: str,
    arrays: Sequence[WrittenArray],
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
        nbytes=sum(array.nbytes for array in arrays),
        rows=tuple(np.diff(bounds).tolist()),
        squared_error=tuple(error.tolist()),
        squared_norm=tuple(norm.tolist()),
    )
    return StoredField(tuple(array.entry for array in arrays), encoding)


def stored_segment(
    sink: SegmentSink,
    group: str,
    columns: row_blocks.Span,
    rows: row_blocks.Rows,
    row_indices: tuple[ArrayEntry, ...],
    fields: Sequence[StoredField],
) -> Segment:
    """Returns the record of a segment whose arrays were written; ``rows`` are virtual."""
    return Segment(
        name=sink.segment,
        group=group,
        columns=columns,
        count=len(rows),
        ranges=None if isinstance(rows, np.ndarray) else row_blocks.spans_of(rows),
        fields=tuple(field.encoding.field for field in fields),
        arrays=(*row_indices, *(entry for field in fields for entry in field.arrays)),
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
    other_digests: Mapping[str, Digest] | None = None,
) -> tuple[Manifest, int]:
    """Returns a shard's manifest and the bytes of its files, after writing their digests.

    ``head`` lacks what describes the arrays, which were written. ``layer`` is None if they are
    files of the batch. ``other_digests`` are of other files of the item.
    """
    process = head.process
    item_digests_crc32c = 0
    if layer is None:
        shard_digests = batch.below(naming.shard_dir(item_dir, process), relative_to=item_dir)
        shard_digests |= other_digests or {}
        data = digests.digests_bytes(shard_digests)
        batch.write(item_dir / naming.digests_name(process), data)
        item_digests_crc32c = google_crc32c.value(data)
        nbytes = len(data) + sum(digest.length for digest in shard_digests.values())
    else:
        nbytes = layer.nbytes
    record = dataclasses.replace(
        head,
        segments=tuple(segments),
        item_digests_crc32c=item_digests_crc32c,
        layer=layer,
        writers=__about__.writer_versions(),
        features=_features(head, segments, layer),
    )
    if head.process_count > 1:
        record = dataclasses.replace(record, plan_crc32c=manifest.plan_crc32c(record))
    if process > 0:
        # Process 0 describes all; its digest verifies that.
        record = dataclasses.replace(record, groups=(), tables=(), dense=(), tracking_paths=())
    return record, nbytes


def write_manifest(item_dir: Path, record: Manifest, batch: FileBatch) -> bytes:
    """Writes the manifest of a shard, and returns it; the caller then fsyncs ``batch``."""
    data = manifest.to_bytes(record)
    batch.write(item_dir / naming.manifest_name(record.process), data)
    return data


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
