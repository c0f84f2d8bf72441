# SPDX-License-Identifier: Apache-2.0
"""Merges the rows of one part of a plan from their chain into the files of a base.

A worker uses its memory for row indices of the deltas, for data that is being read and decoded, for
chunks that are being written, and, with the rest, for the window of rows that is being merged. With
a larger window, fewer chunks of compressed deltas are read twice. A part is divided into ranges of
rows whose row indices fit into the memory, so that these are decoded once per part, and a range
into windows.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from deltackpt import codecs
from deltackpt.errors import OptionError
from deltackpt.format import manifest, names
from deltackpt.format.blocks import Span, StoredRows
from deltackpt.format.manifest import Manifest
from deltackpt.format.segments import FieldSpec, GroupEntry, Segment, width
from deltackpt.layers import merge
from deltackpt.layers.targets import Target, Targets
from deltackpt.reading import chains, reader
from deltackpt.reading.meter import Progress
from deltackpt.reading.saves import StoredPart, StoredSave
from deltackpt.resources import memory
from deltackpt.resources.staging import Staging
from deltackpt.storage import arrays, digests, files, parts
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import Digest
from deltackpt.storage.parts import (
    ArrayPlace,
    Share,
    StoredArrays,
    StoredField,
    WrittenPart,
)
from deltackpt.storage.store import StorePath
from deltackpt.upkeep import fold_dense
from deltackpt.upkeep.plan import Plan, chain, standing

#: Minimum memory of a worker besides compressed chunks: smaller windows are very slow.
_LEAST_BYTES = 8 << 20
#: TensorStore reads a compressed chunk as a whole: its bytes, decoded, in order, copied.
_COPIES_OF_COMPRESSED = 4
#: A chunk that is being written: its data, TensorStore's copy, encoded.
_COPIES_WRITTEN = 3
#: A piece of a delta that is being merged: stored, decoded, and intermediate.
_COPIES_READ = 4
#: Share of the memory limit that is used: the C library keeps some of what is freed.
_SPENT = 2 / 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folded:
    """Bytes that merging a part read and wrote; 0 read if the part existed already."""

    bytes_read: int
    bytes_written: int


def fold(plan: Plan, number: int, *, memory_bytes: int, progress: Progress | None = None) -> Folded:
    """Writes one part of the new base, and fsyncs it.

    Idempotent, and may run concurrently in several processes: the first to finish writes the part.

    Args:
      plan: the plan.
      number: number of the part.
      memory_bytes: memory limit in bytes.
      progress: called with the part's bytes done and total bytes.

    Raises:
      StepGone: the step was removed.
      Damaged, BrokenChain: the chain is not intact.
      OptionError: the memory limit is too low.
      OutOfSpace, StorageError: the storage failed.
    """
    done = ready(plan, number)
    if done is not None:
        return Folded(bytes_read=0, bytes_written=done.nbytes)
    with standing(plan):
        held = chain(plan)
    attempt = plan.workspace / f"{number}.{uuid.uuid4().hex}"
    try:
        files.make_below(plan.directory, attempt)
        files.make_below(plan.directory, plan.item_dir)
        with standing(plan), chains.standing_chain(held):
            dense = fold_dense.fold(plan, held, memory_bytes) if number == 0 else {}
            work = _Fold(plan, number, held, attempt, memory_bytes, progress, dense)
            written = work.run()
        if dense:
            fold_dense.move(plan)
        _move(attempt, plan.item_dir, number)
    finally:
        files.remove_tree(attempt, below=plan.directory)
    return Folded(bytes_read=work.bytes_read, bytes_written=written.nbytes)


def least_memory_bytes(chain: Sequence[StoredSave]) -> int:
    """Returns the minimum memory in bytes for merging any rows of a chain."""
    return max(_least(_compressed_bytes(chain)), fold_dense.least_memory_bytes(chain))


def _least(compressed_bytes: int) -> int:
    return math.ceil((_LEAST_BYTES + compressed_bytes) / _SPENT)


def ready(plan: Plan, number: int) -> WrittenPart | None:
    """Returns a part that was written; None if it was not."""
    path = plan.item_dir / names.manifest_name(number)
    if not path.is_file():
        return None
    data = files.read_bytes(path)
    record = manifest.from_bytes(data, name=files.object_name(path))
    held = digests.read_item_digests(plan.item_dir, record)
    nbytes = len(data) + (plan.item_dir / names.digests_name(number)).stat().st_size
    nbytes += sum(length for length, _, _ in held.files.values())
    return WrittenPart(dataclasses.replace(record, parts=()), nbytes, google_crc32c.value(data))


def _move(attempt: Path, item_dir: Path, number: int) -> None:
    """Moves a part into the base, its manifest last."""
    part = names.part_dir(attempt, number)
    with files.typed_errors(item_dir, "be written"):
        if part.is_dir():
            try:
                os.rename(part, names.part_dir(item_dir, number))
            except OSError as error:
                # Another attempt has written the same bytes.
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        for name in (names.digests_name(number), names.manifest_name(number)):
            files.fsync_path(item_dir)
            os.replace(attempt / name, item_dir / name)
        files.fsync_path(item_dir)


class _Budget(NamedTuple):
    """How a worker uses its memory; see the module.

    Attributes:
      row_numbers: maximum number of row indices of deltas in memory.
      window_bytes: bytes of the rows that are merged at a time.
      chunk_bytes: bytes of a chunk that is being written.
    """

    row_numbers: int
    window_bytes: int
    chunk_bytes: int

    @classmethod
    def of(cls, memory_bytes: int, fields: int) -> _Budget:
        """Divides the memory for rows; each field has one chunk in memory."""
        row_numbers_bytes = memory_bytes // 4
        piece_bytes = min(arrays.CHUNK_BYTES, memory_bytes // 16)
        chunk_bytes = min(arrays.CHUNK_BYTES, memory_bytes // 4 // (fields + _COPIES_WRITTEN))
        spent = row_numbers_bytes + _COPIES_READ * piece_bytes
        spent += (fields + _COPIES_WRITTEN) * chunk_bytes
        # An int64 index, and a flag.
        return cls(row_numbers_bytes // 9, memory_bytes - spent, chunk_bytes)


class _Fold:
    """Merges one part."""

    def __init__(
        self,
        plan: Plan,
        number: int,
        chain: Sequence[StoredSave],
        item_dir: Path,
        memory_bytes: int,
        progress: Progress | None,
        dense: Mapping[str, Digest],
    ):
        self.bytes_read = 0
        self._plan = plan
        self._number = number
        self._saves = chain
        self._item_dir = item_dir
        self._memory_bytes = memory_bytes
        self._progress = progress
        self._dense = dense
        self._done = 0
        self._target = chain[-1]
        self._layout = self._target.layout
        self._groups = _planned_groups(chain)

    def run(self) -> WrittenPart:
        """Writes arrays, digests, then the manifest, and fsyncs them."""
        batch = FileBatch(self._item_dir, fsync=True)
        segments = [
            self._fold_span(
                ArrayPlace(self._item_dir, self._number, f"{name}.{number}", batch),
                self._groups[name],
                span,
            )
            for number, (name, span) in enumerate(self._plan.parts[self._number])
        ]
        several = len(self._plan.parts) > 1
        written = parts.finish(
            self._item_dir,
            self._head(),
            segments,
            batch,
            share=self._share() if several else None,
            beside=self._dense,
        )
        batch.force()
        return written

    def _fold_span(self, place: ArrayPlace, group: GroupEntry, span: Span) -> Segment:
        """Writes one segment."""
        window = _Windows(self._layout, group, span)
        compressed_bytes = _compressed_bytes(self._saves, window.all)
        memory_bytes = int(self._memory_bytes * _SPENT) - compressed_bytes
        if memory_bytes < _LEAST_BYTES - 1:
            least = _least(compressed_bytes)
            raise OptionError(
                f"memory_bytes: expected at least {least:,} to merge rows of {group.name}, found "
                f"{self._memory_bytes:,}; raise it, or use fewer workers"
            )
        budget = _Budget.of(memory_bytes, len(group.fields))
        writers = {spec.name: _FieldWriter(place, spec, span, budget) for spec in group.fields}
        rows_of_deltas = _RowIndices()
        scratch = Staging(2 * arrays.CHUNK_BYTES)
        rows = {
            spec.name: min(max(1, budget.window_bytes // max(1, spec.row_bytes)), span[1] - span[0])
            for spec in group.fields
        }
        nbytes = max(rows[spec.name] * spec.row_bytes for spec in group.fields)
        buffer = memory.empty_buffer((nbytes,), np.dtype(np.uint8))
        for stretch in self._stretches(window, budget):
            rows_of_deltas.move(stretch)
            for spec in group.fields:
                for start in range(*stretch, rows[spec.name]):
                    part = (start, min(start + rows[spec.name], stretch[1]))
                    held = _rows_view(buffer, spec, part)
                    self._merge(window.targets(spec, part, held), rows_of_deltas, scratch)
                    writers[spec.name].write(held)
                    memory.trim_memory()
                    self._note(held.nbytes)
        bounds = parts.table_bounds(group, self._layout, range(*span))
        return parts.stored_segment(
            place,
            group.name,
            (0, group.width),
            range(*span),
            StoredArrays((), 0),
            [writers[spec.name].finish(bounds) for spec in group.fields],
        )

    def _merge(self, targets: Targets, rows: _RowIndices, scratch: Staging) -> None:
        def read(chain: Sequence[StoredSave]) -> int:
            found = reader.fill(chain, targets, indices=rows, scratch=scratch, threads=1)
            self._saves = chain
            return found

        self.bytes_read += chains.read_whole(self._saves, read)

    def _note(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            total = sum(
                (span[1] - span[0]) * self._groups[name].row_bytes
                for name, span in self._plan.parts[self._number]
            )
            self._progress(self._done, total)

    def _stretches(self, window: _Windows, budget: _Budget) -> Iterator[Span]:
        """Ranges of rows whose row indices in all deltas fit into the memory."""
        counts = [
            segment.count for _, segment in _segments(self._saves, window.all) if not segment.ranges
        ]
        first, last = window.span
        rows = last - first
        while rows > 1 and sum(min(count, rows) for count in counts) > budget.row_numbers:
            rows = -(-rows // 2)
        for start in range(first, last, rows):
            yield start, min(start + rows, last)

    def _head(self) -> Manifest:
        """The manifest, without what was written."""
        deltas = self._plan.deltas
        return Manifest(
            kind="base",
            save_id=self._plan.save_id,
            parent=None,
            reason=f"base: compacted from {deltas} delta{'' if deltas == 1 else 's'}",
            process=self._number,
            process_count=len(self._plan.parts),
            groups=tuple(self._groups.values()),
            tables=self._layout.tables,
            segments=(),
            dense=self._layout.dense,
            tracking_paths=self._layout.tracking_paths,
            digests=("item", names.DENSE_ITEM) if self._dense else ("item",),
            dense_bytes=self._dense_bytes(),
            restores=self._target.head.restores,
        )

    def _dense_bytes(self) -> int:
        """Bytes of the dense leaves, with which those of deltas are compared."""
        if self._number:
            return 0
        records = [part.record.dense_blocks for part in self._target.parts()]
        changed = (record for record in records if record and not record.complete)
        return sum(value.nbytes for record in changed for value in record.values)

    def _share(self) -> Share:
        """The part's share, if there are several parts."""
        spans = self._plan.parts[self._number]
        return Share(
            owned_cells={
                name: (span[1] - span[0]) * _row_cells(self._groups[name]) for name, span in spans
            },
            covers=tuple(
                manifest.cover(
                    self._groups[name],
                    self._layout.tables,
                    range(*span),
                    [(0, self._groups[name].width)],
                )
                for name, span in spans
            ),
        )


class _Windows:
    """Targets for some rows of a group."""

    def __init__(self, target: manifest.Layout, group: GroupEntry, span: Span):
        self.span = span
        self._layout = target
        self._group = group
        nothing = np.empty(0, np.uint8)
        #: All fields, for finding parts and segments.
        self.all = Targets([self._one(spec, span, nothing) for spec in group.fields], target)

    def targets(self, spec: FieldSpec, span: Span, buffer: np.ndarray) -> Targets:
        """Targets of one field, with a buffer."""
        return Targets([self._one(spec, span, buffer)], self._layout)

    def _one(self, spec: FieldSpec, span: Span, buffer: np.ndarray) -> Target:
        columns = self._group.columns(spec)
        return Target(self._group.name, spec.name, span, columns, buffer)


class _FieldWriter:
    """Writes the array of one field of a segment."""

    def __init__(self, place: ArrayPlace, spec: FieldSpec, span: Span, budget: _Budget):
        codec = codecs.get(spec.codec)
        assert codecs.is_lossless(codec)
        self._spec = spec
        self._codec = codec
        (array,) = codec.stored(spec.trailing, codecs.dtype_of(spec.dtype)).values()
        count = span[1] - span[0]
        # Equal chunks: a shorter last one would be stored at full length.
        chunks = max(1, -(-count * spec.row_bytes // budget.chunk_bytes))
        self._entry = arrays.array_entry(
            spec.name,
            (count, *array.trailing),
            array.dtype,
            byte_planes=array.byte_planes,
            chunk_rows=max(1, -(-count // chunks)),
        )
        self._writer = place.writer(self._entry)

    def write(self, rows: np.ndarray) -> None:
        """Appends rows."""
        self._writer.write(self._codec.stored_view(rows))

    def finish(self, bounds: np.ndarray) -> StoredField:
        """Waits until everything is written; for ``bounds``, see ``parts.stored_field``."""
        spec = self._spec
        return parts.stored_field(
            spec.name,
            StoredArrays((self._entry,), self._writer.finish()),
            codec=spec.codec,
            reason=f"{spec.codec}: compacted, not re-encoded",
            bounds=bounds,
        )


def _planned_groups(chain: Sequence[StoredSave]) -> dict[str, GroupEntry]:
    """Groups by name, with the codecs of the new base: lossless if the old base's were."""
    kept = {
        (group.name, spec.name)
        for group in chain[0].head.groups
        for spec in group.fields
        if spec.codec == "lossless" and codecs.dtype_of(spec.dtype).itemsize > 1
    }
    groups = manifest.with_codecs(
        chain[-1].layout.groups,
        lambda group, spec: "lossless" if (group.name, spec.name) in kept else spec.codec,
    )
    return {group.name: group for group in groups}


class _RowIndices:
    """Row indices of deltas within a range, each read once; see ``merge.RowIndices``."""

    def __init__(self) -> None:
        self._span: Span = (0, 0)
        self._held: dict[tuple[StorePath, int, str], StoredRows] = {}

    def move(self, span: Span) -> None:
        """Moves to another range of rows."""
        self._span, self._held = span, {}

    def __call__(self, part: StoredPart, segment: Segment, targets: Targets) -> StoredRows | None:
        if segment.ranges is not None or targets.reach(segment) is None:
            return merge.stored_rows(part, segment, targets)
        key = part.item_dir, part.record.process, segment.name
        if key not in self._held:
            rows, first = merge.rows_within(part, segment, self._span)
            # A copy, so that the chunks around the range can be freed.
            self._held[key] = StoredRows(np.array(rows), first)
        return self._held[key]


def _segments(
    chain: Sequence[StoredSave], targets: Targets | None = None
) -> Iterator[tuple[StoredPart, Segment]]:
    """The segments of a chain that touch the targets; all by default."""
    for save in chain:
        for part in save.parts(None if targets is None else targets.touch):
            for segment in part.record.segments:
                if targets is None or targets.reach(segment) is not None:
                    yield part, segment


def _compressed_bytes(chain: Sequence[StoredSave], targets: Targets | None = None) -> int:
    """Memory for reading the largest compressed chunk of a chain."""
    chunks = (
        entry.nbytes * min(1.0, entry.chunk_rows / max(1, entry.shape[0]))
        for _, segment in _segments(chain, targets)
        for entry in segment.arrays
        if entry.compressed
    )
    return _COPIES_OF_COMPRESSED * math.ceil(max(chunks, default=0))


def _row_cells(group: GroupEntry) -> int:
    return sum(width(spec.trailing) for spec in group.fields)


def _rows_view(buffer: np.ndarray, spec: FieldSpec, span: Span) -> np.ndarray:
    """The start of a buffer as rows of a field."""
    dtype, shape = codecs.dtype_of(spec.dtype), (span[1] - span[0], *spec.trailing)
    return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
