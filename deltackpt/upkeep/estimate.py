# SPDX-License-Identifier: Apache-2.0
"""Predicts what a restore of a step reads, and how long it takes on this machine.

Sizes are read from manifests and digests. The time is measured on a sample: some of the step's rows
are read, verified, decoded and merged like in a restore, for a limited time. The result is
extrapolated by kind of save and codec.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from deltackpt import codecs
from deltackpt.errors import StepNotFound
from deltackpt.format import blocks, manifest, names
from deltackpt.format.blocks import Span, StoredRows
from deltackpt.format.manifest import TableEntry
from deltackpt.format.segments import FieldSpec, GroupEntry, Segment
from deltackpt.layers import merge
from deltackpt.layers.merge import RowIndices
from deltackpt.layers.targets import Target, Targets
from deltackpt.ledger import points
from deltackpt.ledger.opening import open_steps
from deltackpt.reading import chains, orbax_values, reader, removal, stored_dense
from deltackpt.reading.part_arrays import PartArrays
from deltackpt.reading.saves import StoredPart, StoredSave
from deltackpt.reading.wal_index import RecoveryPoint, ReplayPlan
from deltackpt.resources import memory
from deltackpt.storage import digests
from deltackpt.storage.store import StorePath
from deltackpt.upkeep.dense_chain import DenseChain

#: Limits of stored bytes and (roughly) time for sampling tables.
_SAMPLE_BYTES = 64 << 20
_SAMPLE_SECS = 1.0
#: Limit of the bytes of dense files that are read.
_DENSE_BYTES = 16 << 20
#: Memory limit for merging a sample: rows of a delta may be far from each other.
_WINDOW_BYTES = 256 << 20
#: Chunks of an array in a sample: as many as a restore reads at a time.
_CHUNKS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavePlan:
    """One save that would be read.

    Attributes:
      name: its relative path; for a compacted base, ``compacted/<step>/<item>``.
      kind: base or delta.
      compacted: whether it is a compacted base.
      rows: number of table rows that it contains.
      nbytes: bytes of its files of tables and slots.
      file_count: number of these files.
      codecs: the codecs of its fields.
    """

    name: str
    kind: str
    compacted: bool
    rows: int
    nbytes: int
    file_count: int
    codecs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """One table with its slots.

    Attributes:
      table: name of the table.
      rows: number of its rows.
      rows_read: number of rows read, over the whole chain.
      bytes_read: bytes of their files; files of several tables are divided in proportion to rows.
      memory_bytes: bytes of all of its rows and slots in host memory.
    """

    table: str
    rows: int
    rows_read: int
    bytes_read: int
    memory_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted duration of a restore, with the current contents of the page cache.

    Excludes Orbax's reading, or the decoding, of dense leaves and the transfer to devices.

    Attributes:
      records_secs: seconds to read the manifests and digests of the chain; measured in full.
      tables_secs: seconds to read, verify, decode and merge tables and slots; extrapolated.
      dense_secs: seconds to check the files of the dense leaves; extrapolated.
      sampled_bytes: stored bytes of tables and slots in the sample.
      sampled_share: ``sampled_bytes`` as a share of all.
      wal_secs: for a recovery point, seconds to read and verify its WAL records; extrapolated.
    """

    records_secs: float
    tables_secs: float
    dense_secs: float
    sampled_bytes: int
    sampled_share: float
    wal_secs: float = 0.0

    @property
    def seconds(self) -> float:
        """Total predicted seconds."""
        return self.records_secs + self.tables_secs + self.dense_secs + self.wal_secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """What a restore of a step, or of a recovery point, reads.

    Attributes:
      step: the step; for a recovery point, its training step.
      chain: the saves that it reads, base first.
      tables: the tables.
      bytes_read: bytes of the files of tables and slots that it reads.
      file_count: number of these files.
      memory_bytes: host memory for all tables and slots, in bytes.
      dense_bytes: bytes of the files of all other items. For dense leaves stored as blocks, these
        are all their blocks in the chain and the base's item.
      dense_file_count: number of these files.
      merged_bytes: maximum size in bytes of a compacted base for the step, including dense leaves
        if compaction would write them.
      estimate: how long it should take.
      point: the recovery point, whose dense leaves are read from the WAL; None for a step.
      wal_bytes: bytes of the WAL records from the step below it to the recovery point.
      wal_records: upper bound of the number of these records per process.
    """

    step: int
    chain: tuple[SavePlan, ...]
    tables: tuple[TablePlan, ...]
    bytes_read: int
    file_count: int
    memory_bytes: int
    dense_bytes: int
    dense_file_count: int
    merged_bytes: int
    estimate: Estimate
    point: RecoveryPoint | None = None
    wal_bytes: int = 0
    wal_records: int = 0


def restore_plan(
    directory: str | os.PathLike[str],
    step: int | RecoveryPoint | None = None,
    *,
    item: str = names.EMBEDDINGS_ITEM,
    endpoint: str | None = None,
) -> RestorePlan:
    """Determines what a restore of a step or recovery point reads, and estimates its duration.

    Args:
      directory: the checkpoint directory: a path, or a bucket URL.
      step: the step, a full recovery point, or its training step; the newest step by default.
      item: name of deltackpt's item in the step.
      endpoint: address of a bucket's server, if it is not the provider's own.

    Raises:
      StepNotFound: the step or recovery point does not exist.
      StepGone: the step was removed while it was read.
      RestoreError: its chain is broken, or damage was found in the part that was read.
    """
    opened = open_steps(directory, item=item, endpoint=endpoint)
    step = opened.newest_step() if step is None else step
    if step is None:
        raise StepNotFound(f"{opened}: expected committed steps, found none; check the path")
    step, plan = points.find(opened, step)
    step_dir = opened.at(step)
    with removal.standing(step_dir, instead="ask for"):
        started = time.perf_counter()
        walked = chains.read_chain(step_dir, item)
        with chains.standing_chain(walked):
            for save in walked:
                _files(save, _segments(save))  # Reads the digests.
            records_secs = time.perf_counter() - started
            if plan is not None:
                return _with_log(_plan(step, walked, {}, records_secs), plan)
            dense = _other_files(step_dir, item) | _dense_files(walked)
            return _plan(step, walked, dense, records_secs)


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


def _plan(
    step: int, saves: Sequence[StoredSave], dense: Mapping[StorePath, int], records_secs: float
) -> RestorePlan:
    """The plan of a step whose manifests were read in ``records_secs``."""
    sizes = {save.name: _segment_bytes(save) for save in saves}
    chain = tuple(_save_plan(save, sizes[save.name]) for save in saves)
    tables_secs, sampled, share = _sampled(saves)
    groups = saves[-1].layout.groups
    nbytes = sum(group.rows * group.row_bytes for group in groups)
    return RestorePlan(
        step=step,
        chain=chain,
        tables=tuple(_table_plans(saves, sizes)),
        bytes_read=sum(save.nbytes for save in chain),
        file_count=sum(save.file_count for save in chain),
        memory_bytes=nbytes,
        dense_bytes=sum(dense.values()),
        dense_file_count=len(dense),
        merged_bytes=nbytes + sum(value.nbytes for value in stored_dense.listed(saves[-1])),
        estimate=Estimate(
            records_secs=records_secs,
            tables_secs=tables_secs,
            dense_secs=_dense_secs(dense),
            sampled_bytes=sampled,
            sampled_share=share,
        ),
    )


#: Process and segment to its stored bytes, without ``zarr.json``.
_Sizes = Mapping[tuple[int, str], int]


def _segment_bytes(save: StoredSave) -> _Sizes:
    return {
        (part.record.process, segment.name): sum(part.arrays.files_of(segment).values())
        for part in save.parts()
        for segment in part.record.segments
    }


def _files(
    save: StoredSave, segments: Iterable[tuple[PartArrays, Segment]]
) -> dict[StorePath, int]:
    """The files that hold some segments of a save, with the bytes of these."""
    found: dict[StorePath, int] = collections.Counter()
    for arrays, segment in segments:
        for name, nbytes in arrays.files_of(segment).items():
            found[save.item_dir / name] += nbytes
    return found


def _segments(save: StoredSave) -> Iterator[tuple[PartArrays, Segment]]:
    return ((part.arrays, segment) for part in save.parts() for segment in part.record.segments)


def _save_plan(save: StoredSave, sizes: _Sizes) -> SavePlan:
    used = {
        segment.spec(part.groups[segment.group], field).codec
        for part in save.parts()
        for segment in part.record.segments
        for field in segment.fields
    }
    return SavePlan(
        name=save.name if save.compacted else save.info.step_dir,
        kind=save.info.kind,
        compacted=save.compacted,
        rows=sum(_value_rows(save).values()),
        nbytes=sum(sizes.values()),
        file_count=len(_files(save, _segments(save))),
        codecs=tuple(sorted(used)),
    )


def _table_plans(saves: Sequence[StoredSave], sizes: Mapping[str, _Sizes]) -> Iterator[TablePlan]:
    """The tables of a step, with the sizes of their data in the chain."""
    target = saves[-1].layout
    groups = target.group_by_name
    nbytes: dict[str, float] = collections.defaultdict(float)
    rows: dict[str, int] = collections.Counter()
    for save in saves:
        rows.update(_value_rows(save))
        for part in save.parts():
            for segment in part.record.segments:
                held = sizes[save.name][part.record.process, segment.name]
                for name, count in _table_rows(part, segment, save.head.tables).items():
                    nbytes[name] += held * count / max(1, segment.count)
    for table in target.tables:
        yield TablePlan(
            table=table.name,
            rows=table.rows,
            rows_read=rows[table.name],
            bytes_read=round(nbytes[table.name]),
            memory_bytes=table.rows * groups[table.group].row_bytes,
        )


def _value_rows(save: StoredSave) -> dict[str, int]:
    """Number of rows in a save by table; counts rows split over column segments once."""
    found: dict[str, int] = collections.Counter()
    for part in save.parts():
        for segment in part.record.segments:
            if blocks.VALUES in segment.fields and segment.columns[0] == 0:
                found.update(_table_rows(part, segment, save.head.tables))
    return found


def _table_rows(part: StoredPart, segment: Segment, tables: Iterable[TableEntry]) -> dict[str, int]:
    """Number of rows in a segment by table."""
    members = manifest.members(part.groups[segment.group], tables)
    for encoding in segment.encodings:
        return {table.name: count for table, count in zip(members, encoding.rows, strict=True)}
    rows = merge.segment_rows(part, segment)
    slices = {
        table.name: blocks.row_slice(rows, table.offset, table.offset + table.rows)
        for table in members
    }
    return {name: held.stop - held.start for name, held in slices.items()}


def _other_files(step_dir: StorePath, item: str) -> dict[StorePath, int]:
    """Files of the other items of a step, with their bytes."""
    inside = f"{item}/"
    names = [name for name in step_dir.keys() if not name.startswith(inside)]
    return {step_dir / name: (step_dir / name).length() for name in names}


def _dense_files(chain: Sequence[StoredSave]) -> dict[StorePath, int]:
    """Files of dense leaves that a chain stores as blocks, and of the base's item."""
    held = DenseChain.of(chain)
    found: dict[StorePath, int] = {}
    for save, of_save in zip(reversed(chain), held.sources, strict=False):
        blocks = ((one.arrays, segment) for one in of_save for segment in one.record.segments)
        found |= _files(save, blocks)
    if held.missing or (chain[-1].compacted and not held.sources):
        found |= _item_files(held.base)
    return found


def _item_files(base: StoredSave | None) -> dict[StorePath, int]:
    """Files of a base's dense item, if it has one."""
    if base is None or not base.has_dense:
        return {}
    at = orbax_values.of_save(base).at
    return {at / name: (at / name).length() for name in at.keys()}


def _dense_secs(dense: Mapping[StorePath, int]) -> float:
    """Time to check the dense files, extrapolated by bytes from some of them."""
    started, read = time.perf_counter(), 0
    for path, nbytes in dense.items():
        if read and read + nbytes > _DENSE_BYTES:
            break
        digests.digest_file(path)
        read += path.length()
    return (time.perf_counter() - started) * sum(dense.values()) / max(1, read)


def _sampled(saves: Sequence[StoredSave]) -> tuple[float, int, float]:
    """Predicted time to read and merge a chain; sampled bytes, and their share.

    It is an upper bound: it counts rows that newer saves replace, which a restore skips.
    """
    kinds: dict[tuple[str, ...], list[tuple[StoredSave, StoredPart, Segment]]] = {}
    total: dict[tuple[str, ...], int] = collections.Counter()
    for save in saves:
        for part in save.parts():
            for segment in part.record.segments:
                kind = _kind(save, part, segment)
                kinds.setdefault(kind, []).append((save, part, segment))
                total[kind] += _field_bytes(segment)
    seconds: dict[tuple[str, ...], float] = collections.defaultdict(float)
    nbytes: dict[tuple[str, ...], int] = collections.Counter()
    started = time.perf_counter()
    for kind, sample in _in_turn(kinds):
        if nbytes and (
            sum(nbytes.values()) > _SAMPLE_BYTES or time.perf_counter() - started > _SAMPLE_SECS
        ):
            break
        save = sample[0]
        prepared = _prepared(*sample)
        if save.info.kind == "delta":
            # A delta is merged into memory that is mapped; a base is read into fresh memory.
            for target in prepared.targets.all:
                target.buffer.fill(0)
        before = time.perf_counter()
        nbytes[kind] += reader.fill(
            [save], prepared.targets, indices=prepared.indices, over_parent=True
        )
        seconds[kind] += time.perf_counter() - before + prepared.seconds
    read, whole = sum(nbytes.values()), sum(total.values())
    mean = sum(seconds.values()) / max(1, read)
    estimate = sum(
        count * (seconds[kind] / nbytes[kind] if nbytes[kind] else mean)
        for kind, count in total.items()
    )
    return estimate, read, read / max(1, whole)


def _kind(save: StoredSave, part: StoredPart, segment: Segment) -> tuple[str, ...]:
    """Key of segments that are read at the same speed."""
    group = part.groups[segment.group]
    return (save.info.kind, *(segment.spec(group, field).codec for field in segment.fields))


def _in_turn(
    kinds: Mapping[tuple[str, ...], list[tuple[StoredSave, StoredPart, Segment]]],
) -> Iterator[tuple[tuple[str, ...], tuple[StoredSave, StoredPart, Segment]]]:
    """Takes segments of all kinds in turn, the largest of each kind first."""
    largest = {
        kind: sorted(found, key=lambda one: -_field_bytes(one[2])) for kind, found in kinds.items()
    }
    order = sorted(largest, key=lambda kind: -sum(_field_bytes(one[2]) for one in largest[kind]))
    for number in range(max(map(len, largest.values()), default=0)):
        for kind in order:
            if number < len(largest[kind]):
                yield kind, largest[kind][number]


@dataclasses.dataclass(frozen=True, eq=False)
class _Prepared:
    """A sample of a segment.

    Attributes:
      targets: memory for its rows.
      indices: returns the row indices of the sample, and None for other segments.
      seconds: time it took to read the indices.
    """

    targets: Targets
    indices: RowIndices
    seconds: float


def _prepared(save: StoredSave, part: StoredPart, segment: Segment) -> _Prepared:
    """Prepares reading the first rows of a segment: some chunks, within the memory limit."""
    group = part.groups[segment.group]
    specs = [spec for spec in group.fields if spec.name in segment.fields]
    started = time.perf_counter()
    rows = merge.segment_rows(part, segment)
    count = _rows_of_first_chunks(segment)
    seconds = (time.perf_counter() - started) * count / max(1, segment.count)
    rows = rows[:count]
    first = merge.reach(rows)[0]
    most = max(1, _WINDOW_BYTES // max(1, sum(spec.row_bytes for spec in specs)))
    rows = rows[blocks.row_slice(rows, first, first + most)]
    span = merge.reach(rows)
    targets = Targets([_target(group, spec, span, segment) for spec in specs], save.layout)

    def indices(found: StoredPart, of: Segment, targets: Targets) -> StoredRows | None:
        return StoredRows(rows) if (found, of) == (part, segment) else None

    return _Prepared(targets, indices, seconds)


def _rows_of_first_chunks(segment: Segment) -> int:
    arrays = [entry for entry in segment.arrays if entry.name != names.GAPS]
    largest = max(arrays, key=lambda entry: entry.nbytes)
    return min(segment.count, _CHUNKS * largest.chunk_rows)


def _target(group: GroupEntry, spec: FieldSpec, span: Span, segment: Segment) -> Target:
    split = group.columns(spec) is not None
    held = segment.spec(group, spec.name)
    buffer = memory.empty_buffer((span[1] - span[0], *held.trailing), codecs.dtype_of(spec.dtype))
    return Target(group.name, spec.name, span, segment.columns if split else None, buffer)


def _field_bytes(segment: Segment) -> int:
    """Stored bytes of the fields of a segment, before any compression, as in ``reader``."""
    return sum(entry.nbytes for entry in segment.arrays if entry.name != names.GAPS)
