# SPDX-License-Identifier: Apache-2.0
"""Restores the tables of a step: merges its chain into host buffers; no jax."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from deltackpt import vocab
from deltackpt.errors import Damaged, DamagedWal, RestoreError
from deltackpt.format import row_blocks
from deltackpt.format.manifest import Layout, SaveInfo
from deltackpt.format.naming import Leaf
from deltackpt.format.row_blocks import Box, Segment, StoredRows, width
from deltackpt.layers import merge, row_indices
from deltackpt.layers.row_indices import RowIndices
from deltackpt.layers.targets import Targets, Wanted, empty_buffers
from deltackpt.reading import bounds, wal_rows
from deltackpt.reading.chains import raise_if_removed, read_whole
from deltackpt.reading.shard_arrays import Shard, with_loaded
from deltackpt.reading.stored_saves import StoredSave, StoredShard
from deltackpt.reading.wal_index import ReplayPlan
from deltackpt.reading.wal_rows import RecordRows, SeenRows, WalRows
from deltackpt.resources.runtime import Runtime

#: Called with (bytes read so far, bytes to read in all), from a background thread.
Progress = Callable[[int, int], None]


class ProgressMeter:
    """Counts bytes read, for the progress callback; threads may add at once."""

    def __init__(self, progress: Progress | None, total: int = 0):
        self.done = 0
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()

    def expect(self, nbytes: int) -> None:
        """Adds to the expected bytes."""
        self._total += nbytes

    def add(self, nbytes: int) -> None:
        """Adds to the bytes read; they may exceed those expected."""
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, max(self.done, self._total))


#: Three threads keep two cores busy while one waits for the disk (cold: 1.68 s; two: 1.80 s).
_THREADS = 3
_SMALL_SAVE_BYTES = 1 << 20
#: A row index in memory, and a flag.
_ROW_INDEX_BYTES = 9
#: Limit of row indices in memory; a quarter of the restored bytes if that is more.
_ROW_INDICES_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class RestoredTables:
    """Merged tables and slots.

    ``buffers`` are by table name, field name and box: (rows, *trailing) of the box, in host memory;
    ``placed`` is the result of ``place``, if requested. ``files`` are the contents of the step's
    other files by path, if the source holds them; for a recovery point, named as in
    ``dense_state``. ``point`` is whether the buffers are at the requested recovery point. If not,
    all records up to it must still be replayed; some may have been applied already.
    """

    buffers: dict[str, dict[str, dict[Box, np.ndarray]]]
    layout: Layout
    chain: tuple[SaveInfo, ...]
    bytes_read: int
    seconds: float
    source: str = "storage"
    placed: dict[str, dict[str, Leaf]] | None = None
    files: Mapping[str, np.ndarray] | None = None
    point: bool = False

    @property
    def fields(self) -> dict[str, dict[str, Leaf]]:
        """Returns table name to field name to array: the placed one, else the one box in memory."""
        if self.placed is not None:
            return self.placed
        return {
            name: {field: next(iter(held.values())) for field, held in fields.items()}
            for name, fields in self.buffers.items()
        }


def restore_tables(
    saves: Sequence[StoredSave],
    *,
    wanted: Wanted | None = None,
    progress: Progress | None = None,
    plan: ReplayPlan | None = None,
    seen: SeenRows | None = None,
) -> RestoredTables:
    """Reads and merges the wanted parts of a chain, by default every table and slot.

    ``plan`` has WAL records to replay onto the step, and ``seen`` receives their rows. If the chain
    cannot be read, ``chains.read_whole`` tries another one. Raises Damaged, DamagedWal, StepGone,
    and TemplateMismatch if a wanted table or box does not exist.
    """

    def restored(saves: Sequence[StoredSave]) -> RestoredTables:
        started, layout = time.perf_counter(), saves[-1].layout
        buffers, targets = empty_buffers(layout, wanted)
        records = () if plan is None else wal_rows.layers_of(plan, layout)
        bytes_read = fill(saves, targets, progress, records=records, seen=seen)
        return RestoredTables(
            buffers=buffers,
            layout=layout,
            chain=tuple(save.info for save in saves),
            bytes_read=bytes_read,
            seconds=time.perf_counter() - started,
        )

    return read_whole(saves, restored)


def check_keys(restored: RestoredTables) -> None:
    """Raises DamagedKeys if an id has two rows among those that this process has of a key."""
    groups, step = restored.layout.group_by_name, restored.chain[-1].save_id.step
    for table in restored.layout.tables:
        key = groups[table.group].key
        if key is None:
            continue
        ids, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for box, chunk in restored.buffers.get(table.name, {}).get(key.name, {}).items():
            if box.columns == (0, width(key.trailing)):
                # A template that has grown has more rows, which the step does not have.
                rows.append(np.asarray(box.within(table.rows)))
                ids.append(vocab.ids_of(chunk)[: len(rows[-1])])
        name = f"step {step}: key column of table {table.name}"
        vocab.check_unique(np.concatenate(ids), np.concatenate(rows), name=name)


def verify_keys(
    saves: Sequence[StoredSave],
    *,
    known: Wanted | None = None,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Reads whole ``key_columns`` of a step, and checks that ids are unique."""
    wanted = key_columns(saves[-1].layout, known=known, share=share)
    if wanted:
        check_keys(restore_tables(saves, wanted=wanted))


def key_columns(
    layout: Layout, *, known: Wanted | None = None, share: tuple[int, int] = (0, 1)
) -> Wanted:
    """Returns the whole key columns that a process must read to check that ids are unique.

    ``share`` is this process's index and the number of processes, which divide the tables among
    them. Tables whose whole key column is in ``known`` are left out: they were checked already.
    """
    groups = layout.group_by_name
    every = {
        table.name: {key.name: [Box((0, table.rows), (0, width(key.trailing)))]}
        for table in layout.tables
        if (key := groups[table.group].key) is not None
    }
    return {
        name: fields
        for number, (name, fields) in enumerate(every.items())
        if number % share[1] == share[0]
        and not all(
            (known or {}).get(name, {}).get(field) == held for field, held in fields.items()
        )
    }


def fill(
    saves: Sequence[StoredSave],
    targets: Targets,
    progress: Progress | None = None,
    *,
    records: WalRows = (),
    seen: SeenRows | None = None,
    indices: RowIndices = row_indices.stored_rows,
    runtime: Runtime | None = None,
    over_parent: bool = False,
) -> int:
    """Reads and merges saves and WAL records into buffers; returns the stored bytes that were read.

    ``saves`` are a chain of ``read_chain`` or the end of one. If ``over_parent``, the buffers
    contain the parent of the first save or record: ``saves`` may be empty, and coverage is not
    checked. All rows of ``records`` are verified and reported to ``seen``, wanted or not. If row
    indices need much memory, only some saves are merged at a time, the oldest first. After an
    error, the contents of the buffers are undefined.
    """
    if records:
        indices = wal_rows.all_rows(seen, indices)
    meter, done, records = ProgressMeter(progress), 0, with_loaded(records)
    try:
        with (
            contextlib.nullcontext(runtime) if runtime else Runtime(_THREADS) as runtime,
            wal_rows.verified(records),
        ):
            layers = [*with_loaded(layers_of(saves, targets, runtime), targets), *records]
            for chunk in _runs(layers, targets):
                cached = _cached(indices)
                stages = merge.plan(chunk, targets, cached, runtime=runtime)
                if not over_parent:
                    # Ends with the saves: records cover nothing.
                    for parent, save, shards in zip((None, *saves)[done:], saves[done:], chunk):
                        check_covered(save, shards, targets, cached, parent=parent)
                done += len(chunk)
                if progress is not None:
                    stages = [[*one] for one in stages]
                    meter.expect(sum(piece.nbytes for stage in stages for piece in stage))
                merge.run(stages, runtime, meter.add)
                # The row indices of the next part take their memory.
                del cached, stages
    except RestoreError as error:
        if not isinstance(error, DamagedWal):
            raise_if_removed(saves, error)
        raise
    return meter.done


def _runs(
    layers: Sequence[Sequence[Shard]], targets: Targets
) -> Iterator[Sequence[Sequence[Shard]]]:
    """Returns runs of saves whose row indices fit into memory; there is at least one."""
    target_bytes = sum(target.buffer.nbytes for target in targets.all)
    most = max(_ROW_INDICES_BYTES, target_bytes // 4) // _ROW_INDEX_BYTES
    start = rows = 0
    for number, of_save in enumerate(layers):
        own = sum(_row_indices(shard, targets) for shard in of_save)
        if rows and rows + own > most:
            yield layers[start:number]
            start, rows = number, 0
        rows += own
    yield layers[start:]


def _row_indices(shard: Shard, targets: Targets) -> int:
    """Returns how many row indices of a shard are read at most."""
    count = 0
    for segment in shard.segments:
        if segment.ranges is None:
            first, stop = targets.reach(segment) or (0, 0)
            is_record = isinstance(shard, RecordRows)
            count += segment.count if is_record else min(segment.count, stop - first)
    return count


def _cached(indices: RowIndices) -> RowIndices:
    """Returns a function that calls another one once for each segment."""
    found: dict[tuple[int, str], StoredRows | None] = {}

    def cached(shard: Shard, segment: Segment, targets: Targets) -> StoredRows | None:
        key = id(shard), segment.name  # The caller keeps the shards alive, so ids stay unique.
        if key not in found:
            found[key] = indices(shard, segment, targets)
        return found[key]

    return cached


def layers_of(
    saves: Sequence[StoredSave], targets: Targets, runtime: Runtime | None = None
) -> list[list[StoredShard]]:
    """Returns the shards of each save, oldest first, that may have wanted rows.

    ``runtime`` reads the manifests of large saves; by default the caller's thread does.
    """

    def read(save: StoredSave) -> list[StoredShard]:
        return save.shards(functools.partial(targets.touch, save.head))

    coming = {
        number: runtime.submit(read, save)
        for number, save in enumerate(saves)
        if runtime is not None and save.info.nbytes > _SMALL_SAVE_BYTES
    }
    return [
        coming[number].result() if number in coming else read(save)
        for number, save in enumerate(saves)
    ]


def check_covered(
    save: StoredSave,
    shards: Sequence[Shard],
    targets: Targets,
    indices: RowIndices = row_indices.stored_rows,
    *,
    parent: StoredSave | None = None,
) -> None:
    """Checks that a save contains each wanted row exactly once, unless its parent's tables have it.

    These are all rows of a base; for a delta, the rows by which tables have grown.
    """
    if parent is not None and parent.head.groups == save.head.groups:
        return
    before = {} if parent is None else {one.name: one.rows for one in parent.head.groups}
    new = {one.name: (before.get(one.name, 0), one.rows) for one in save.head.groups}
    if all(start == stop for start, stop in new.values()):
        return
    found: dict[int, int] = collections.Counter()
    for shard, segment in ((one, segment) for one in shards for segment in one.segments):
        held = indices(shard, segment, targets)
        if held is None:
            continue
        span = row_blocks.common(row_blocks.reach(held.rows), new[segment.group])
        group = shard.groups[segment.group]
        fields = bounds.stored_fields(segment, group) if parent is None else segment.fields
        for field in fields:
            for target in targets.over(segment.group, field, span, segment.columns):
                columns = target.overlap(segment.columns)
                assert columns is not None
                own = row_blocks.row_slice(held.rows, *row_blocks.common(target.rows, span))
                count = target.count(held.rows[own])
                found[id(target)] += count * (columns[1] - columns[0])
    for target in targets.all:
        first, stop = row_blocks.common(target.rows, new[target.group])
        columns = target.columns or (0, 1)
        wanted = target.count(range(first, max(first, stop))) * (columns[1] - columns[0])
        if found[id(target)] != wanted:
            raise Damaged(
                save.name,
                f"{wanted} cells of {target.group}.{target.field}, rows {(first, stop)}"
                + (", which its parent does not have" if parent is not None else ""),
                f"{found[id(target)]}",
            )
