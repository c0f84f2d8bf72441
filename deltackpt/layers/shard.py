# SPDX-License-Identifier: Apache-2.0
"""Segments as row groups of a layer, and the layer file of one process's shard of a delta."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deltackpt.errors import StorageError
from deltackpt.format import names
from deltackpt.format.dense_blocks import BLOCKS, PLAIN
from deltackpt.format.manifest import LayerRef, SaveId
from deltackpt.format.segments import ArrayEntry, Encoding, Segment
from deltackpt.format.soundness import check_segment
from deltackpt.layers.footer import Kind, LayerArray, LayerManifest, RowGroup, compression_of
from deltackpt.layers.write import ArrayWriter, LayerFile, OpenLayer
from deltackpt.resources.runtime import Runtime
from deltackpt.storage import arrays
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import Digest
from deltackpt.storage.parts import StoredArrays
from deltackpt.storage.posix import DirectFile


class LayerPlace(NamedTuple):
    """The destination of one segment's arrays in a layer; see ``storage.parts.Place``."""

    layer: OpenLayer
    segment: str

    def writer(self, entry: ArrayEntry, *, held: bool = False) -> ArrayWriter:
        """See ``Place``."""
        dtype, compression = np.dtype(entry.dtype), compression_of(entry)
        return self.layer.array(
            self.segment, entry.name, entry.shape, dtype, compression, check=held
        )

    def write_rows(self, rows: np.ndarray) -> StoredArrays:
        """See ``Place``."""
        stored = self.layer.write_rows(self.segment, rows)
        dtype = np.dtype(np.uint8 if stored is None else stored.dtype)
        entry = arrays.array_entry(names.GAPS, rows.shape, dtype)
        return StoredArrays((entry,), entry.nbytes)


class LayerShard:
    """Writes the layer of one process's shard of a delta."""

    def __init__(
        self,
        item_dir: Path,
        save_id: SaveId,
        parent: SaveId | None,
        batch: FileBatch,
        runtime: Runtime,
        *,
        process: int,
        process_count: int,
    ):
        """Creates the file.

        Args:
          item_dir: directory of the item, in the step's temporary directory.
          save_id: id of the save.
          parent: id of its parent.
          batch: fsyncs the file, and keeps its digest.
          runtime: provides the buffers, and writes them.
          process: index of this process.
          process_count: number of processes.

        Raises:
          StorageError: the file cannot be created.
        """
        self._batch = batch
        self._manifest = LayerManifest(
            save_id=save_id, parent=parent, process=process, process_count=process_count
        )
        file = DirectFile(item_dir / names.layer_name(process), pace=batch.pace)
        #: None once the batch has it.
        self._file: DirectFile | None = file
        try:
            self._layer = LayerFile(file, runtime).begin(self._manifest)
        except BaseException:
            file.close()
            raise

    def place(self, segment: str) -> LayerPlace:
        """Returns the destination of a segment."""
        return LayerPlace(self._layer, segment)

    def finish(self, segments: Sequence[Segment]) -> LayerRef:
        """Writes the rest of the file; the caller then fsyncs the batch.

        Args:
          segments: all segments, whose arrays were written.

        Raises:
          StorageError: writing failed.
        """
        manifest = dataclasses.replace(
            self._manifest, row_groups=tuple(map(row_group_of, segments))
        )
        written = self._layer.finish(manifest)
        digest = Digest(written.stop, written.crc32c, written.digest)
        file, self._file = self._file, None
        assert file is not None
        self._batch.take(file, digest)
        return LayerRef(nbytes=written.stop, crc32c=written.crc32c, digest=written.digest)

    def abandon(self) -> None:
        """Closes the file of a save that has failed, unless the batch has it. Idempotent."""
        if self._file is not None:
            self._layer.abandon()
            with contextlib.suppress(StorageError):
                self._file.close()
            self._file = None


def segment_of(group: RowGroup, stored: Iterable[LayerArray]) -> Segment:
    """Returns the segment that was written as a row group, without statistics of its encodings.

    Args:
      group: the row group.
      stored: its arrays.

    Raises:
      Unsound: the row group is not a valid segment.
    """
    encodings = tuple(
        Encoding(
            field=field,
            codec=codec,
            reason="",
            nbytes=0,
            rows=(),
            squared_error=(),
            squared_norm=(),
        )
        for field, codec in group.codecs.items()
    )
    # Not the layer's chunks, which are shorter: readers take so many rows at a time.
    entries = tuple(
        arrays.array_entry(
            array.name,
            array.shape,
            np.dtype(array.dtype),
            zstd=array.compression == "zstd",
            byte_planes=array.compression == "planes",
        )
        for array in stored
    )
    segment = Segment(
        name=group.name,
        group=group.group,
        columns=group.columns or (0, 0),
        count=group.count,
        ranges=group.ranges,
        fields=tuple(group.codecs),
        arrays=entries,
        encodings=encodings,
    )
    check_segment(segment)
    return segment


def row_group_of(segment: Segment) -> RowGroup:
    """Returns the row group with the arrays of a segment."""
    kind: Kind = "blocks" if BLOCKS in segment.fields else "rows"
    if segment.group == PLAIN:
        kind = "item"
    return RowGroup(
        name=segment.name,
        group=segment.group,
        kind=kind,
        count=segment.count,
        columns=segment.columns,
        ranges=() if segment.ranges is None and not segment.count else segment.ranges,
        codecs={encoding.field: encoding.codec for encoding in segment.encodings},
    )
