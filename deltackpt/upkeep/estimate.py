# SPDX-License-Identifier: Apache-2.0
"""What a restore of a step would read, and how long it should take here and now.

The first is counted from manifests and digests. The second is measured: some of the step's own
rows are read, verified, decoded and merged as a restore does it, within a bounded time, and the
rest is taken to go at the same speed as the sampled rows of its kind and codecs.
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
from deltackpt.format.blocks import Span
from deltackpt.format.manifest import TableEntry
from deltackpt.format.segments import FieldSpec, GroupEntry, Segment
from deltackpt.ledger.opening import open_steps
from deltackpt.reading import chains, dense_values, orbax_values, reader, removal
from deltackpt.reading.merge import Target
from deltackpt.reading.reader import StoredRows
from deltackpt.reading.saves import StoredPart, StoredSave
from deltackpt.reading.targets import Targets
from deltackpt.resources import memory
from deltackpt.storage import digests
from deltackpt.storage.store import Spot
from deltackpt.upkeep.dense_chain import DenseChain

#: Most stored bytes, and about the most time, that are spent on sampling tables.
_SAMPLE_BYTES = 64 << 20
_SAMPLE_SECS = 1.0
#: Most bytes of dense files that are read.
_DENSE_BYTES = 16 << 20
#: Most memory into which a sample is merged: rows of a delta may lie far apart.
_WINDOW_BYTES = 256 << 20
#: Chunks of an array in a sample: as many as a restore reads at a time.
_CHUNKS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavePlan:
    """One save that would be read.

    Attributes:
      name: its path below the root; of a compacted base ``compacted/<step>/<item>``.
      kind: base or delta.
      compacted: whether it is a compacted base.
      rows: rows of tables that it holds.
      nbytes: bytes of its files of tables and slots.
      file_count: how many files these are.
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
      table: its name.
      rows: its rows.
      rows_read: rows that are read of it, over the whole chain.
      bytes_read: bytes of their files; those of a file of several tables are shared by rows.
      memory_bytes: bytes of all of its rows and slots in host memory.
    """

    table: str
    rows: int
    rows_read: int
    bytes_read: int
    memory_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """How long a restore should take: what the page cache holds now is read from there.

    Attributes:
      records_secs: reading the manifests and digests of the chain; measured in full.
      tables_secs: reading, verifying, decoding and merging tables and slots; extrapolated.
      dense_secs: checking the files of the dense leaves; extrapolated. They are then read by Orbax,
        or decoded, and everything is placed on devices: that is in none of these.
      sampled_bytes: stored bytes of tables and slots that were read for it.
      sampled_share: the same as a share of all.
    """

    records_secs: float
    tables_secs: float
    dense_secs: float
    sampled_bytes: int
    sampled_share: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.records_secs + self.tables_secs + self.dense_secs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """What a restore of a step would do.

    Attributes:
      step: the step.
      chain: the saves that it reads, base first.
      tables: the tables, by name.
      bytes_read: bytes of the files of tables and slots that it reads.
      file_count: how many files these are.
      memory_bytes: host memory for all tables and slots.
      dense_bytes: bytes of the files of all other items; of dense leaves that the chain holds as
        blocks those of all blocks, and of the item that they go on from.
      dense_file_count: how many files these are.
      folded_bytes: bytes of the base that compaction would put in the place of the chain, at most;
        dense leaves count where it would write them.
      estimate: how long it should take.
    """

    step: int
    chain: tuple[SavePlan, ...]
    tables: tuple[TablePlan, ...]
    bytes_read: int
    file_count: int
    memory_bytes: int
    dense_bytes: int
    dense_file_count: int
    folded_bytes: int
    estimate: Estimate


def restore_plan(
    directory: str | os.PathLike[str],
    step: int | None = None,
    *,
    item: str = names.EMBEDDINGS_ITEM,
    endpoint: str | None = None,
) -> RestorePlan:
    """Finds what a restore of a step would read, and measures how long it should take.

    Args:
      directory: root of the steps: a path, or the URL of a bucket.
      step: the step; the newest by default.
      item: name of our item in it.
      endpoint: address of the server of a bucket, where it is not the service's own.

    Raises:
      StepNotFound: there is no such step.
      StepGone: it was removed meanwhile.
      RestoreError: what else is wrong with what was looked at of its chain.
    """
    opened = open_steps(directory, item=item, endpoint=endpoint)
    step = opened.newest_step() if step is None else step
    if step is None:
        raise StepNotFound(f"{opened}: expected committed steps, found none; check the path")
    step_dir = opened.at(step)
    with removal.standing(step_dir, instead="ask for"):
        started = time.perf_counter()
        walked = chains.read_chain(step_dir, item)
        with chains.standing_chain(walked):
            for save in walked:
                for part in save.parts():
                    part.checksums  # noqa: B018  (reads the digests)
            records_secs = time.perf_counter() - started
            dense = _other_files(step_dir, item) | _dense_files(walked)
            return _plan(step, walked, dense, records_secs)


def _plan(
    step: int, saves: Sequence[StoredSave], dense: Mapping[Spot, int], records_secs: float
) -> RestorePlan:
    """The plan of a step whose records were read in so many seconds."""
    sizes = {save.name: _array_bytes(save) for save in saves}
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
        folded_bytes=nbytes + sum(value.nbytes for value in dense_values.listed(saves[-1])),
        estimate=Estimate(
            records_secs=records_secs,
            tables_secs=tables_secs,
            dense_secs=_dense_secs(dense),
            sampled_bytes=sampled,
            sampled_share=share,
        ),
    )


#: Process, segment and array to the bytes of its files, ``zarr.json`` left out, and their number.
_Sizes = Mapping[tuple[int, str, str], tuple[int, int]]


def _array_bytes(save: StoredSave) -> _Sizes:
    found: dict[tuple[int, str, str], tuple[int, int]] = {}
    for part in save.parts():
        process = part.record.process
        lengths = digests.read_item_digests(part.item_dir, part.record).files
        chunks: dict[str, list[int]] = collections.defaultdict(list)
        for name, (length, _, _) in lengths.items():
            array, inside, _ = name.rpartition("/c/")
            if inside:
                chunks[array].append(length)
        for segment in part.record.segments:
            for entry in segment.arrays:
                place = part.directory(segment, entry).below(part.item_dir)
                held = chunks[place]
                found[process, segment.name, entry.name] = sum(held), len(held)
    return found


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
        nbytes=sum(nbytes for nbytes, _ in sizes.values()),
        file_count=sum(count for _, count in sizes.values()),
        codecs=tuple(sorted(used)),
    )


def _table_plans(saves: Sequence[StoredSave], sizes: Mapping[str, _Sizes]) -> Iterator[TablePlan]:
    """The tables of a step, each with what the chain holds of it."""
    target = saves[-1].layout
    groups = target.group_by_name
    nbytes: dict[str, float] = collections.defaultdict(float)
    rows: dict[str, int] = collections.Counter()
    for save in saves:
        rows.update(_value_rows(save))
        for part in save.parts():
            for segment in part.record.segments:
                held = sum(
                    sizes[save.name][part.record.process, segment.name, entry.name][0]
                    for entry in segment.arrays
                )
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
    """Table name to the rows of it that a save holds; segments of other columns hold them again."""
    found: dict[str, int] = collections.Counter()
    for part in save.parts():
        for segment in part.record.segments:
            if blocks.VALUES in segment.fields and segment.columns[0] == 0:
                found.update(_table_rows(part, segment, save.head.tables))
    return found


def _table_rows(part: StoredPart, segment: Segment, tables: Iterable[TableEntry]) -> dict[str, int]:
    """Table name to its rows in a segment."""
    members = manifest.members(part.groups[segment.group], tables)
    for encoding in segment.encodings:
        return {table.name: count for table, count in zip(members, encoding.rows, strict=True)}
    rows = reader.segment_rows(part, segment)
    slices = {
        table.name: blocks.row_slice(rows, table.offset, table.offset + table.rows)
        for table in members
    }
    return {name: held.stop - held.start for name, held in slices.items()}


def _other_files(step_dir: Spot, item: str) -> dict[Spot, int]:
    """Files of the other items of a step, and their bytes."""
    inside = f"{item}/"
    names = [name for name in step_dir.keys() if not name.startswith(inside)]
    return {step_dir / name: (step_dir / name).length() for name in names}


def _dense_files(chain: Sequence[StoredSave]) -> dict[Spot, int]:
    """Files of dense leaves that a chain holds as blocks, and of the item that they go on from."""
    held = DenseChain.of(chain)
    found: dict[Spot, int] = {}
    for source in (source for of_save in held.sources for source in of_save):
        item_dir = source.part.item_dir
        segments = {segment.name for segment in source.record.segments}
        known = digests.read_item_digests(item_dir, source.part.record).files
        for name, (length, _, _) in known.items():
            array, inside, _ = name.rpartition("/c/")
            if inside and array.split("/")[1] in segments:
                found[item_dir / name] = length
    if held.missing or (chain[-1].compacted and not held.sources):
        found |= _item_files(held.base)
    return found


def _item_files(base: StoredSave | None) -> dict[Spot, int]:
    """Files of the item of a base; of one that has none, none."""
    if base is None or not base.has_dense:
        return {}
    at = orbax_values.of_save(base).at
    return {at / name: (at / name).length() for name in at.keys()}


def _dense_secs(dense: Mapping[Spot, int]) -> float:
    """Time that checking the dense files takes: that of some, by bytes."""
    started, read = time.perf_counter(), 0
    for path, nbytes in dense.items():
        if read and read + nbytes > _DENSE_BYTES:
            break
        digests.digest_file(path)
        read += nbytes
    return (time.perf_counter() - started) * sum(dense.values()) / max(1, read)


def _sampled(saves: Sequence[StoredSave]) -> tuple[float, int, float]:
    """Time that reading and merging a chain takes, the bytes read to find it, their share."""
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
            # It is merged into memory that is in use; a base is read into fresh memory.
            for target in prepared.targets.all:
                target.buffer.fill(0)
        before = time.perf_counter()
        nbytes[kind] += reader.fill(
            [save], prepared.targets, numbers=prepared.numbers, over_parent=True
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
    """What decides how fast a segment is read."""
    group = part.groups[segment.group]
    return (save.info.kind, *(segment.spec(group, field).codec for field in segment.fields))


def _in_turn(
    kinds: Mapping[tuple[str, ...], list[tuple[StoredSave, StoredPart, Segment]]],
) -> Iterator[tuple[tuple[str, ...], tuple[StoredSave, StoredPart, Segment]]]:
    """One segment of each kind, then the next ones; of a kind the largest first."""
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
    """A sample of a segment that is to be read.

    Attributes:
      targets: memory for its rows.
      numbers: gives the row numbers of the sample, and of nothing else.
      seconds: how long these took to read.
    """

    targets: Targets
    numbers: reader.RowNumbers
    seconds: float


def _prepared(save: StoredSave, part: StoredPart, segment: Segment) -> _Prepared:
    """The first rows of a segment: some chunks, within a window of memory."""
    group = part.groups[segment.group]
    specs = [spec for spec in group.fields if spec.name in segment.fields]
    started = time.perf_counter()
    rows = _first_rows(part, segment)
    seconds = time.perf_counter() - started
    first = reader.reach(rows)[0]
    most = max(1, _WINDOW_BYTES // max(1, sum(spec.row_bytes for spec in specs)))
    rows = rows[blocks.row_slice(rows, first, first + most)]
    span = reader.reach(rows)
    targets = Targets([_target(group, spec, span, segment) for spec in specs], save.layout)

    def numbers(found: StoredPart, of: Segment, targets: Targets) -> StoredRows | None:
        return StoredRows(rows) if (found, of) == (part, segment) else None

    return _Prepared(targets, numbers, seconds)


def _first_rows(part: StoredPart, segment: Segment) -> blocks.Rows:
    """Row numbers of the first chunks of a segment."""
    arrays = [entry for entry in segment.arrays if entry.name != names.GAPS]
    largest = max(arrays, key=lambda entry: entry.nbytes)
    count = min(segment.count, _CHUNKS * largest.chunk_rows)
    if segment.ranges is not None:
        return blocks.rows_of(segment.ranges)[:count]
    return reader.gap_rows(part, segment, stop=count)


def _target(group: GroupEntry, spec: FieldSpec, span: Span, segment: Segment) -> Target:
    split = group.columns(spec) is not None
    held = segment.spec(group, spec.name)
    buffer = memory.empty_buffer((span[1] - span[0], *held.trailing), codecs.dtype_of(spec.dtype))
    return Target(group.name, spec.name, span, segment.columns if split else None, buffer)


def _field_bytes(segment: Segment) -> int:
    """Stored bytes of the fields of a segment, before any compression; as ``reader`` counts."""
    return sum(entry.nbytes for entry in segment.arrays if entry.name != names.GAPS)
