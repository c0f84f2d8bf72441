# SPDX-License-Identifier: Apache-2.0
"""Predicts what a restore of a step reads, and how long it takes on this machine.

Sizes come from manifests and digests; the time from a restore of a sample of the rows.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from deltackpt import codecs
from deltackpt.errors import StepNotFound
from deltackpt.format import row_blocks
from deltackpt.format.manifest import Layout, TableFigures, table_figures
from deltackpt.format.row_blocks import GroupEntry, Span
from deltackpt.layers.targets import Target, Targets
from deltackpt.ledger import recovery
from deltackpt.ledger.opening import open_steps
from deltackpt.reading import chains, reader, stored_dense, stored_saves
from deltackpt.reading.stored_dense import StoredItem
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import RecoveryPoint, ReplayPlan
from deltackpt.resources import host_memory
from deltackpt.storage.store import StorePath

if TYPE_CHECKING:
    from deltackpt.options import KafkaWal

#: Limits of bytes and (roughly) time for sampling tables, and WAL records.
_SAMPLE_BYTES = 64 << 20
_SAMPLE_SECS = 1.0
#: Bytes of rows that are merged at a time: those of a chunk, which may be compressed.
_WINDOW_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavePlan:
    """One save that would be read; sizes are those of its files of tables and slots."""

    name: str  #: For a compacted base, ``compacted/<step>/<item>``.
    kind: str
    compacted: bool
    rows: int
    nbytes: int
    file_count: int
    codecs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """One table with its slots; files of several tables are divided in proportion to their data."""

    table: str
    rows: int
    rows_read: int
    bytes_read: int
    memory_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted duration of a restore, with the current contents of the page cache.

    Excludes dense leaves and the transfer to devices. All but ``records_secs`` are extrapolated
    from a sample.
    """

    records_secs: float
    tables_secs: float
    sampled_share: float
    wal_secs: float = 0.0

    @property
    def seconds(self) -> float:
        """Total predicted seconds."""
        return self.records_secs + self.tables_secs + self.wal_secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """What a restore of a step, or of a recovery point, reads."""

    step: int
    chain: tuple[SavePlan, ...]  #: Base first.
    tables: tuple[TablePlan, ...]
    bytes_read: int
    file_count: int
    memory_bytes: int
    #: Files of all other items: if dense leaves are blocks, their blocks and the base's item.
    dense_bytes: int
    dense_file_count: int
    merged_bytes: int  #: Maximum size of a compacted base for the step.
    estimate: Estimate
    point: RecoveryPoint | None = None
    wal_bytes: int = 0
    wal_records: int = 0  #: Upper bound, per process.


def restore_plan(
    directory: str | os.PathLike[str],
    step: int | RecoveryPoint | None = None,
    *,
    item: str | None = None,
    endpoint: str | None = None,
    wal: KafkaWal | None = None,
) -> RestorePlan:
    """Determines what a restore of a step or recovery point reads, and estimates its duration.

    ``step`` is a step, a full recovery point, or its training step; the newest step by default.
    ``wal`` reads WAL records in Kafka.
    """
    with contextlib.closing(open_steps(directory, item=item, endpoint=endpoint, wal=wal)) as opened:
        step = opened.newest_step() if step is None else step
        if step is None:
            raise StepNotFound(f"{opened}: expected committed steps, found none; check the path")
        step, plan = recovery.locate(opened, step)
        step_dir = opened.at(step)
        with stored_saves.detect_removal(step_dir, instead="ask for"):
            started = time.perf_counter()
            walked = chains.read_chain(step_dir, opened.item)
            with chains.detect_chain_removal(walked):
                # The digests are read for the sizes of files.
                described = [_described(save) for save in walked]
                records_secs = time.perf_counter() - started
                if plan is not None:
                    return _with_log(_plan(step, walked, described, {}, records_secs), plan)
                dense = _other_files(step_dir, opened.item) | _dense_files(walked)
                return _plan(step, walked, described, dense, records_secs)


def _with_log(below: RestorePlan, plan: ReplayPlan) -> RestorePlan:
    """The plan of a recovery point: that of the step below it, plus the WAL records."""
    every = [
        record for segment in plan.segments for of in segment.records.values() for record in of
    ]
    started, read = time.perf_counter(), 0
    for record in every:
        if read > _SAMPLE_BYTES or (read and time.perf_counter() - started > _SAMPLE_SECS):
            break
        record.layer.verify()
        read += record.nbytes
    wal_secs = (time.perf_counter() - started) * plan.nbytes / max(1, read)
    return dataclasses.replace(
        below,
        step=plan.point.step,
        dense_bytes=sum(record.dense_bytes for record in plan.last_records.values()),
        estimate=dataclasses.replace(below.estimate, wal_secs=wal_secs),
        point=plan.point,
        wal_bytes=plan.nbytes,
        wal_records=sum(
            max(map(len, segment.records.values()), default=0) for segment in plan.segments
        ),
    )


#: A save, and the figures of its tables.
_Described = tuple[SavePlan, Sequence[TableFigures]]


def _described(save: StoredSave) -> _Described:
    files = collections.Counter[str]()
    for shard in save.shards():
        for segment in shard.record.segments:
            files.update(shard.arrays.files_of(segment))
    segments = [segment for record in save.manifests for segment in record.segments]
    figures = table_figures(save.head.groups, save.head.tables, segments)
    found = SavePlan(
        name=save.name if save.compacted else save.info.step_dir,
        kind=save.info.kind,
        compacted=save.compacted,
        rows=sum(one.rows for one in figures if one.field == row_blocks.VALUES),
        nbytes=files.total(),
        file_count=len(files),
        codecs=tuple(sorted({codec for one in figures for codec in one.codec.split("+")})),
    )
    return found, figures


def _plan(
    step: int,
    saves: Sequence[StoredSave],
    described: Sequence[_Described],
    dense: Mapping[StorePath, int],
    records_secs: float,
) -> RestorePlan:
    """The plan of a step whose manifests were read in ``records_secs``."""
    tables_secs, share = _sampled(saves)
    groups = saves[-1].layout.groups
    nbytes = sum(group.rows * group.row_bytes for group in groups)
    return RestorePlan(
        step=step,
        chain=tuple(save for save, _ in described),
        tables=tuple(_table_plans(saves[-1].layout, described)),
        bytes_read=sum(save.nbytes for save, _ in described),
        file_count=sum(save.file_count for save, _ in described),
        memory_bytes=nbytes,
        dense_bytes=sum(dense.values()),
        dense_file_count=len(dense),
        merged_bytes=nbytes + sum(value.nbytes for value in stored_dense.listed(saves[-1])),
        estimate=Estimate(records_secs=records_secs, tables_secs=tables_secs, sampled_share=share),
    )


def _table_plans(target: Layout, described: Sequence[_Described]) -> Iterator[TablePlan]:
    """The tables of a step, with the sizes of their data in the chain."""
    nbytes: dict[str, float] = collections.defaultdict(float)
    rows: dict[str, int] = collections.Counter()
    for save, figures in described:
        total = sum(one.nbytes for one in figures)
        for one in figures:
            nbytes[one.table] += save.nbytes * one.nbytes / max(1, total)
            rows[one.table] += one.rows if one.field == row_blocks.VALUES else 0
    groups = target.group_by_name
    for table in target.tables:
        yield TablePlan(
            table=table.name,
            rows=table.rows,
            rows_read=rows[table.name],
            bytes_read=round(nbytes[table.name]),
            memory_bytes=table.rows * groups[table.group].row_bytes,
        )


def _other_files(step_dir: StorePath, item: str) -> dict[StorePath, int]:
    """Files of the other items of a step, with their bytes."""
    inside = f"{item}/"
    names = [name for name in step_dir.keys() if not name.startswith(inside)]
    return {step_dir / name: (step_dir / name).length() for name in names}


def _dense_files(chain: Sequence[StoredSave]) -> dict[StorePath, int]:
    """Files of dense leaves that a chain stores as blocks, and of the base's item."""
    item = StoredItem(chain)
    found: dict[StorePath, int] = collections.Counter()
    for save, shards in zip(reversed(chain), item.shards, strict=False):
        for shard in shards:
            for segment in shard.record.segments:
                for name, nbytes in shard.arrays.files_of(segment).items():
                    found[save.item_dir / name] += nbytes
    from_base = item.missing or (chain[-1].compacted and not item.shards)
    if from_base and item.base is not None and item.base.save.has_dense:
        at = item.base.item.at
        found |= {at / name: (at / name).length() for name in at.keys()}
    return found


def _sampled(saves: Sequence[StoredSave]) -> tuple[float, float]:
    """Predicts the seconds to read and merge a chain, from windows of rows; adds their share."""
    windows: list[tuple[GroupEntry, Span]] = []
    for group in saves[-1].layout.groups:
        rows = max(1, _WINDOW_BYTES // max(1, group.row_bytes))
        starts = range(0, group.rows, rows)
        windows += [(group, (start, min(start + rows, group.rows))) for start in starts]
    total = sum(group.rows * group.row_bytes for group in saves[-1].layout.groups)
    # Some rows are touched more often than others, and such rows may be neighbors.
    random.Random(0).shuffle(windows)
    started, sampled, secs = time.perf_counter(), 0, 0.0
    for group, (first, last) in windows:
        if sampled > _SAMPLE_BYTES or (sampled and secs > _SAMPLE_SECS):
            break
        shapes = {spec: (last - first, *spec.trailing) for spec in group.fields}
        targets = [
            Target(
                group.name,
                spec.name,
                (first, last),
                group.columns(spec),
                host_memory.empty_buffer(shape, codecs.dtype_of(spec.dtype)),
            )
            for spec, shape in shapes.items()
        ]
        reader.fill(saves, Targets(targets))
        sampled += (last - first) * group.row_bytes
        secs = time.perf_counter() - started
    share = sampled / total if total else 1.0
    return secs / share if share else 0.0, share
