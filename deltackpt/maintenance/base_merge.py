# SPDX-License-Identifier: Apache-2.0
"""Merges one shard of a plan, rows of tables and dense leaves, from their chain into a base.

A shard is divided into ranges of rows whose row indices fit into the memory, and a range into
windows. Dense leaves are merged first, in pieces that fit into the same memory.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import math
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from deltackpt import codecs
from deltackpt.errors import OptionError
from deltackpt.format import manifest, naming, row_blocks
from deltackpt.format.manifest import Manifest
from deltackpt.format.row_blocks import FieldSpec, GroupEntry, Segment, Span, StoredRows, width
from deltackpt.layers import row_indices
from deltackpt.layers.targets import Target, Targets
from deltackpt.maintenance.plan import CompactionPlan, chain, detect_step_removal
from deltackpt.reading import chains, reader, stored_dense
from deltackpt.reading.stored_saves import StoredSave, StoredShard
from deltackpt.resources import host_memory
from deltackpt.resources.runtime import Runtime
from deltackpt.storage import digests, ocdbt, posix, shard_writer
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.ocdbt import ZARRAY
from deltackpt.storage.posix import DurableDir, fsync_path
from deltackpt.storage.shard_writer import StoredField
from deltackpt.storage.store import StorePath, store_path
from deltackpt.storage.zarr_writer import ZarrSegmentSink

#: Minimum memory of a worker besides the largest compressed chunk, or the largest dense value:
#: smaller windows are very slow.
_LEAST_BYTES = 8 << 20
#: A compressed chunk is read as a whole: its bytes, decoded, in order. A dense value: decoded, in
#: TensorStore's in-memory files, and the stored data that is read to verify it. A piece of a delta:
#: stored, decoded, and intermediate. A chunk that is being written, and the next one: its data, in
#: order, encoded.
_COPIES = 4
#: Share of the memory limit that is used for tables: the C library keeps some of what is freed.
_SPENT = 2 / 3


class WrittenShard(NamedTuple):
    """A shard that was written; ``nbytes`` counts all its files."""

    record: Manifest
    nbytes: int
    crc32c: int  # Of its manifest.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergedShard:
    """Bytes that merging a shard read and wrote; 0 read if the shard existed already."""

    bytes_read: int
    bytes_written: int


def merge_shard(
    plan: CompactionPlan,
    number: int,
    *,
    memory_bytes: int,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> MergedShard:
    """Writes one shard of the new base, and fsyncs it; ``on_bytes`` counts merged bytes.

    Several processes may attempt the same shard, each in its own directory. The first rename wins:
    names of OCDBT files are random, so files of two attempts cannot be mixed.
    """
    done = written_shard(plan, number)
    if done is not None:
        return MergedShard(bytes_read=0, bytes_written=done.nbytes)
    held = chain(plan)
    attempt = plan.workspace / f"{number}.{uuid.uuid4().hex}"
    try:
        DurableDir(plan.directory, fsync=False).make(attempt)
        with detect_step_removal(plan), chains.detect_chain_removal(held):
            work = _ShardMerge(plan, number, held, attempt, memory_bytes, on_bytes)
            nbytes = work.write()
        with posix.typed_errors(plan.shard_dir(number), "be written"):
            try:
                os.rename(attempt, plan.shard_dir(number))
            except OSError as error:
                # Another attempt has written the same rows and leaves.
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            fsync_path(plan.workspace)
    finally:
        DurableDir(plan.directory).remove(attempt)
    return MergedShard(bytes_read=work.bytes_read, bytes_written=nbytes)


def written_shard(plan: CompactionPlan, number: int) -> WrittenShard | None:
    """Returns a shard that was written; None if it was not."""
    folder = plan.shard_dir(number)
    if not folder.is_dir():
        return None
    path = folder / naming.manifest_name(number)
    data = store_path(path).read()
    record = manifest.from_bytes(data, name=posix.object_name(path))
    held = digests.read_item_digests(folder, record)
    nbytes = len(data) + (folder / naming.digests_name(number)).stat().st_size
    nbytes += sum(digest.length for digest in held.values())
    return WrittenShard(dataclasses.replace(record, shards=()), nbytes, google_crc32c.value(data))


def most_workers(
    plan: CompactionPlan,
    chain: Sequence[StoredSave],
    memory_bytes: int,
    targets: Targets | None = None,
) -> int:
    """Returns how many workers fit into a memory limit; ``OptionError`` if not even one does."""
    least = math.ceil((_LEAST_BYTES + _compressed_bytes(chain, targets)) / _SPENT)
    if sizes := [value.nbytes for value in stored_dense.listed(chain[-1])]:
        least = max(least, _LEAST_BYTES + _COPIES * max(sizes))
    if memory_bytes < least:
        raise OptionError(
            f"memory_bytes: expected at least {least:,} to compact step {plan.step}, found "
            f"{memory_bytes:,}; raise it, or use fewer workers"
        )
    return memory_bytes // least


class _ShardMerge:
    """Merges one shard; ``bytes_read`` counts the bytes of stored arrays of tables."""

    def __init__(
        self,
        plan: CompactionPlan,
        number: int,
        chain: Sequence[StoredSave],
        attempt: Path,
        memory_bytes: int,
        on_bytes: Callable[[int], None],
    ):
        self.bytes_read = 0
        self._plan, self._number, self._chain = plan, number, chain
        self._attempt, self._on_bytes = attempt, on_bytes
        self._target = chain[-1]
        self._layout = self._target.layout
        self._groups = _planned_groups(chain)
        self._spans = [(self._groups[name], span) for name, span in plan.shards[number]]
        self._has_dense = number == 0 and plan.dense_bytes > 0
        #: All rows of the shard, for finding shards and segments.
        self._every = Targets(
            [
                Target(group.name, spec.name, span, group.columns(spec), np.empty(0, np.uint8))
                for group, span in self._spans
                for spec in group.fields
            ]
        )
        most_workers(plan, chain, memory_bytes, self._every)  # Enough for one.
        self._memory_bytes = memory_bytes
        compressed_bytes = _compressed_bytes(chain, self._every)
        # For tables: a quarter each for row indices, pieces of deltas and chunks, at most; the rest
        # is the window.
        for_rows = int(memory_bytes * _SPENT) - compressed_bytes
        self._chunk_bytes = min(row_blocks.CHUNK_BYTES, for_rows // 4 // _COPIES)
        self._window_bytes = for_rows - for_rows // 4 - 2 * _COPIES * self._chunk_bytes
        # An int64 index, and a flag.
        self._most_row_indices = for_rows // 4 // 9
        self._row_indices = _RowIndices()
        self._runtime = Runtime(1, memory_bytes=2 * row_blocks.CHUNK_BYTES)
        self._batch = FileBatch(attempt, fsync=True)

    def write(self) -> int:
        """Writes dense leaves, arrays, digests, then the manifest, fsyncs; returns their bytes."""
        if self._has_dense:
            self._write_dense(self._attempt / naming.DENSE_ITEM)
        segments = [
            self._segment(f"{group.name}.{number}", group, span)
            for number, (group, span) in enumerate(self._spans)
        ]
        record, nbytes = shard_writer.described(
            self._attempt,
            self._head(),
            segments,
            self._batch,
            other_digests=self._batch.below(
                self._attempt / naming.DENSE_ITEM, relative_to=self._attempt
            ),
        )
        nbytes += len(shard_writer.write_manifest(self._attempt, record, self._batch))
        self._batch.force()
        return nbytes

    def _segment(self, name: str, group: GroupEntry, span: Span) -> Segment:
        self._row_indices = _RowIndices()
        sink = ZarrSegmentSink(self._attempt, self._number, self._batch, name)
        fields = [self._field(sink, group, spec, span) for spec in group.fields]
        rows, columns = range(*span), (0, group.width)
        return shard_writer.stored_segment(sink, group.name, columns, rows, (), fields)

    def _field(
        self, sink: ZarrSegmentSink, group: GroupEntry, spec: FieldSpec, span: Span
    ) -> StoredField:
        codec = codecs.get(spec.codec)
        assert codecs.is_lossless(codec)
        (array,) = codec.stored(spec.trailing, codecs.dtype_of(spec.dtype)).values()
        count = span[1] - span[0]
        # Equal chunks: a shorter last one would be stored at full length.
        chunks = max(1, -(-count * spec.row_bytes // self._chunk_bytes))
        entry = row_blocks.array_entry(
            spec.name,
            (count, *array.trailing),
            array.dtype,
            byte_planes=array.byte_planes,
            chunk_rows=max(1, -(-count // chunks)),
        )
        windows = map(codec.stored_view, self._windows(group, spec, span))
        return shard_writer.stored_field(
            spec.name,
            [shard_writer.write_array(sink, entry, windows)],
            codec=spec.codec,
            reason=f"{spec.codec}: compacted, not re-encoded",
            bounds=shard_writer.table_bounds(group, self._layout, range(*span)),
        )

    def _windows(self, group: GroupEntry, spec: FieldSpec, span: Span) -> Iterator[np.ndarray]:
        """Yields the merged rows of a field in order; each window is valid until the next."""
        size = max(1, self._window_bytes // max(1, spec.row_bytes))
        shape = min(size, span[1] - span[0]), *spec.trailing
        buffer = host_memory.empty_buffer(shape, codecs.dtype_of(spec.dtype))
        for first, last in self._ranges(group, span):
            self._row_indices.move((first, last))
            for start in range(first, last, size):
                stop = min(start + size, last)
                rows = buffer[: stop - start]
                target = Target(group.name, spec.name, (start, stop), group.columns(spec), rows)
                self._merge(Targets([target]))
                yield rows
                host_memory.trim_memory()
                self._on_bytes(rows.nbytes)

    def _merge(self, targets: Targets) -> None:
        def read(chain: Sequence[StoredSave]) -> int:
            found = reader.fill(chain, targets, indices=self._row_indices, runtime=self._runtime)
            self._chain = chain
            return found

        self.bytes_read += chains.read_whole(self._chain, read)

    def _ranges(self, group: GroupEntry, span: Span) -> Iterator[Span]:
        """Ranges of rows whose row indices in all deltas fit into the memory."""
        counts = [
            segment.count
            for segment in _segments(self._chain, self._every)
            if segment.group == group.name and not segment.ranges
        ]
        first, last = span
        rows = last - first
        while rows > 1 and sum(min(count, rows) for count in counts) > self._most_row_indices:
            rows = -(-rows // 2)
        for start in range(first, last, rows):
            yield start, min(start + rows, last)

    def _write_dense(self, item: Path) -> None:
        """Writes the dense leaves as Orbax's item, decoded: the values that a restore returns."""
        room = (self._memory_bytes - _LEAST_BYTES) // _COPIES
        # If they do not fit into the memory, each piece has a database, as those of a process.
        pieces = [*_pieces(self._target, room)]
        keys: set[str] = set()
        described: dict[str, bytes] = {}
        for number, wanted in enumerate(pieces):
            found = stored_dense.open_values(self._chain, wanted.__contains__)
            keys |= found.values.keys()
            described |= {
                key: bytes(data) for key, data in found.values.items() if key.endswith(f"/{ZARRAY}")
            }
            values = [
                ocdbt.Value(key, np.frombuffer(data, np.uint8))
                for key, data in sorted(found.values.items())
            ]
            several = len(pieces) > 1
            database = ocdbt.process_directory(item, number) if several else item
            ocdbt.write(database, values, self._batch, separate_nodes=several)
            for name, data in found.files.items() if number == 0 else ():
                self._batch.make((item / name).parent)
                self._batch.write(item / name, bytes(data))
            del found, values
            host_memory.trim_memory()
        # Before the merge, which checks the same: here, the error names the chain.
        ocdbt.check_keys(self._target.name, keys, described)
        if len(pieces) > 1:
            self._batch.force()
            ocdbt.merge(item, range(len(pieces)), described)
            self._batch.adopt(item)

    def _head(self) -> Manifest:
        """The manifest, without what was written."""
        deltas = self._plan.deltas
        # With which the bytes of deltas are compared.
        dense_bytes = self._plan.dense_bytes if self._target.needs_older_dense else 0
        owned_cells, covers = {}, []
        for group, span in self._spans if len(self._plan.shards) > 1 else ():
            cells = sum(width(spec.trailing) for spec in group.fields)
            owned_cells[group.name] = (span[1] - span[0]) * cells
            columns = [(0, group.width)]
            covers.append(manifest.cover(group, self._layout.tables, range(*span), columns))
        return Manifest(
            kind="base",
            save_id=self._plan.save_id,
            parent=None,
            reason=f"base: compacted from {deltas} delta{'' if deltas == 1 else 's'}",
            process=self._number,
            process_count=len(self._plan.shards),
            groups=tuple(self._groups.values()),
            tables=self._layout.tables,
            segments=(),
            dense=self._layout.dense,
            tracking_paths=self._layout.tracking_paths,
            digests=("item", naming.DENSE_ITEM) if self._has_dense else ("item",),
            files={},
            shards=(),
            dense_bytes=0 if self._number else dense_bytes,
            restores=self._target.head.restores,
            owned_cells=owned_cells,
            covers=tuple(covers),
        )


def _pieces(save: StoredSave, most_bytes: int) -> Iterator[set[str]]:
    """Sets of database keys with at most so many bytes; one empty set without keys."""
    piece, nbytes = set[str](), 0
    for value in stored_dense.listed(save):
        if value.file:
            continue
        if piece and nbytes + value.nbytes > most_bytes:
            yield piece
            piece, nbytes = set[str](), 0
        piece.add(value.key)
        nbytes += value.nbytes
    yield piece


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
    """Row indices of deltas within a range, each read once; see ``row_indices.RowIndices``."""

    def __init__(self) -> None:
        self._span: Span = (0, 0)
        self._held: dict[tuple[StorePath, int, str], StoredRows] = {}

    def move(self, span: Span) -> None:
        if span != self._span:
            self._span, self._held = span, {}

    def __call__(self, shard: StoredShard, segment: Segment, targets: Targets) -> StoredRows | None:
        if segment.ranges is not None or targets.reach(segment) is None:
            return row_indices.stored_rows(shard, segment, targets)
        key = shard.item_dir, shard.record.process, segment.name
        if key not in self._held:
            rows, first = row_indices.rows_within(shard, segment, self._span)
            # A copy, so that the chunks around the range can be freed.
            self._held[key] = StoredRows(np.array(rows), first)
        return self._held[key]


def _segments(chain: Sequence[StoredSave], targets: Targets | None) -> Iterator[Segment]:
    """The segments of a chain that touch the targets; all without targets."""
    for save in chain:
        for shard in save.shards(
            None if targets is None else functools.partial(targets.touch, save.head)
        ):
            for segment in shard.record.segments:
                if targets is None or targets.reach(segment) is not None:
                    yield segment


def _compressed_bytes(chain: Sequence[StoredSave], targets: Targets | None) -> int:
    """Memory for reading the largest compressed chunk of a chain."""
    chunks = (
        entry.nbytes * min(1.0, entry.chunk_rows / max(1, entry.shape[0]))
        for segment in _segments(chain, targets)
        for entry in segment.arrays
        if entry.compressed
    )
    return _COPIES * math.ceil(max(chunks, default=0))
