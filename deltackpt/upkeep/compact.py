# SPDX-License-Identifier: Apache-2.0
"""Compaction: a chain folded into a new base, beside the steps, without the trainer.

Three stages: ``plan`` divides the rows into parts, ``fold`` writes one part, in whichever process
sees the directory, and ``publish`` makes the base visible by one rename. ``compact`` does it all.

A compacted base stands for the step that it was folded from: it bears that step's save id, holds
every row as a restore of the step would give it, bit for bit, and is stored like the base of
several processes, so that readers need to know nothing more. Rows are never encoded again: what a
lossy codec made of them is stored as it is. The step does not change, and keeps its dense leaves.

Until the rename everything lies in a temporary directory, which whoever compacts next removes: a
compaction that is killed anywhere has changed nothing.

A worker's share of the memory is spent on row numbers of the deltas, what is read and decoded on
the way, chunks that are being written, and, with the rest, the window of rows that is being merged:
the larger it is, the fewer chunks of compressed deltas are read twice. Rows of a part are taken
in *stretches* whose row numbers fit, so that these are decoded once per part, and a stretch in
windows.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import itertools
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from deltackpt import __about__, codecs
from deltackpt.errors import (
    AlreadyCompacting,
    Damaged,
    OptionError,
    OutOfSpace,
    StepNotFound,
)
from deltackpt.format import manifest
from deltackpt.format import names as layout
from deltackpt.format.blocks import Span
from deltackpt.format.manifest import (
    ArrayEntry,
    Encoding,
    FieldSpec,
    GroupEntry,
    Manifest,
    Part,
    SaveId,
    Segment,
)
from deltackpt.ledger import locks
from deltackpt.ledger.directory import Root
from deltackpt.reading import reader
from deltackpt.reading import saves as stored
from deltackpt.reading.merge import Target
from deltackpt.reading.reader import HeldRows, Progress
from deltackpt.reading.saves import StoredPart, StoredSave
from deltackpt.reading.targets import Targets
from deltackpt.resources import memory, priority
from deltackpt.resources.staging import Staging
from deltackpt.storage import arrays, files
from deltackpt.storage import digests as integrity
from deltackpt.storage.digests import Digest, Digests
from deltackpt.storage.store import Spot

#: Memory of a compaction where the caller does not say it.
MEMORY_BYTES = 1 << 30
#: A part is a few seconds of work: what a worker that is lost has to do again.
_PART_BYTES = 4 << 30
#: Least memory of a worker besides that for compressed chunks: smaller windows would crawl.
_LEAST_BYTES = 8 << 20
#: A compressed chunk is read as a whole, by TensorStore: its bytes, decoded, in order, copied.
_COPIES_OF_COMPRESSED = 4
#: A chunk that is being written: held, copied by TensorStore, encoded.
_COPIES_WRITTEN = 3
#: A piece of a delta that is merged: as stored, decoded, and on the way between them.
_COPIES_READ = 4
#: Of the memory that is given, what is spent on purpose: the C library keeps some of what is freed.
_SPENT = 2 / 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a compaction will do: a pure description, which any process can follow.

    Attributes:
      directory: root of the steps.
      item: name of our item in them.
      step: the step that is folded.
      save_id: its save id, which the base will bear.
      temporary: name of the temporary directory below ``compacted/``.
      parts: of each part its spans of virtual rows, by group.
      nbytes: bytes of all rows of all fields, unencoded.
      deltas: how many deltas are folded.
    """

    directory: Path
    item: str
    step: int
    save_id: SaveId
    temporary: str
    parts: tuple[tuple[tuple[str, Span], ...], ...]
    nbytes: int
    deltas: int

    @property
    def step_dir(self) -> Path:
        """Directory of the step."""
        return self.directory / str(self.step)

    @property
    def workspace(self) -> Path:
        """The temporary directory."""
        return self.directory / layout.COMPACTED / self.temporary

    @property
    def item_dir(self) -> Path:
        """Where the base is put together."""
        return self.workspace / self.item


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folded:
    """What folding a part read and wrote; nothing was read where the part was there already."""

    bytes_read: int
    bytes_written: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compacted:
    """What a compaction did.

    Attributes:
      step: the step that the new base stands for.
      save_id: its save id.
      deltas: how many deltas were folded.
      bytes_read: bytes of the stored arrays that were read.
      bytes_written: bytes of the files of the base.
      seconds: wall time.
    """

    step: int
    save_id: SaveId
    deltas: int
    bytes_read: int
    bytes_written: int
    seconds: float


#: Folds all parts of a plan: called with the plan, how many parts may be folded at a time, the most
#: memory of each, and what to tell of the progress.
FoldAll = Callable[[Plan, int, int, Progress | None], list[Folded]]


def compact(
    directory: str | os.PathLike[str],
    *,
    item: str = layout.EMBEDDINGS_ITEM,
    step: int | None = None,
    workers: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress | None = None,
    fold_all: FoldAll | None = None,
) -> Compacted | None:
    """Folds the chain of a step into a new base, beside trainers and readers of the directory.

    Args:
      directory: root of the steps.
      item: name of our item in them.
      step: the step; the newest by default.
      workers: how many parts are folded at a time; one for each CPU by default, fewer where the
        memory does not suffice.
      memory_bytes: most memory of all workers together.
      progress: called with bytes folded and bytes in all, from any thread.
      fold_all: folds the parts; by default threads do, at a lowered priority.

    Returns:
      What was done; None where the step is a base alone.

    Raises:
      AlreadyCompacting: another process compacts the directory.
      StepNotFound: there is no such step.
      StepGone: retention removed the step meanwhile.
      Damaged, BrokenChain: the chain is not intact.
      OptionError: the memory does not suffice for one worker.
      OutOfSpace, StorageError: the store refused. Whatever is raised, nothing was published.
    """
    started = time.perf_counter()
    if workers is not None and workers < 1:
        raise OptionError(f"workers: expected at least 1, found {workers}")
    wanted = workers or len(os.sched_getaffinity(0))
    root = Path(directory).absolute()
    with exclusive(root):
        planned = plan(root, item=item, step=step, parts=wanted)
        if planned is None:
            return None
        _require_room(planned)
        count = min(wanted, len(planned.parts), most_workers(planned, memory_bytes))
        try:
            folded = (fold_all or _by_threads)(planned, count, memory_bytes // count, progress)
            publish(planned)
        finally:
            files.remove_tree(planned.workspace)
    return Compacted(
        step=planned.step,
        save_id=planned.save_id,
        deltas=planned.deltas,
        bytes_read=sum(part.bytes_read for part in folded),
        bytes_written=sum(part.bytes_written for part in folded),
        seconds=time.perf_counter() - started,
    )


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Holds the directory against other compactors, and removes what cut compactions left.

    The kernel lets go of it when the process ends, however it does.

    Args:
      directory: root of the steps.

    Raises:
      AlreadyCompacting: another process holds it.
      StepNotFound: there is no such directory.
      ForeignDirectory: it holds other things than checkpoints.
      StorageError: the directory cannot be written.
    """
    if not directory.is_dir():
        raise StepNotFound(
            f"{directory}: expected a directory of steps, found none; check the path"
        )
    # Before anything is made there: it may be another's.
    Root.open(directory, read_only=True).close()
    folder = directory / layout.COMPACTED
    path = folder / layout.COMPACTION_LOCK
    if not folder.is_dir():
        with files.typed_errors(path, "be locked"):
            folder.mkdir(exist_ok=True)
            files.fsync_path(directory)
    refusal = AlreadyCompacting(
        f"{directory}: expected no other compaction of it, found its lock {path} held by another "
        "process; wait until that one has ended"
    )
    with locks.held(path, refusal):
        for entry in folder.iterdir():
            if layout.is_compaction(entry.name):
                files.remove_tree(entry)
        yield


def plan(
    directory: Path, *, item: str = layout.EMBEDDINGS_ITEM, step: int | None = None, parts: int = 1
) -> Plan | None:
    """Divides the rows of a step's tables into parts of nearly equal bytes.

    Args:
      directory: root of the steps.
      item: name of our item in them.
      step: the step; the newest by default.
      parts: how many parts, or a multiple of it where they would be larger than some GiB.

    Returns:
      The plan; None where the step is a base alone, compacted or not.

    Raises:
      StepNotFound: there is no such step.
      RestoreError: what else is wrong with its chain.
    """
    if step is None:
        step = Root.open(directory, item=item, read_only=True).newest_step()
        if step is None:
            raise StepNotFound(f"{directory}: expected committed steps, found none; check the path")
    step_dir = directory / str(step)
    with stored.standing(step_dir, during="compacted", instead="compact"):
        saves = stored.read_chain(step_dir, item)
    if len(saves) == 1:
        return None
    groups = saves[-1].layout.groups
    nbytes = sum(group.rows * _row_bytes(group) for group in groups)
    count = parts * max(1, math.ceil(nbytes / (parts * _PART_BYTES)))
    return Plan(
        directory=directory,
        item=item,
        step=step,
        save_id=saves[-1].info.save_id,
        temporary=layout.compaction_name(step_dir.name),
        parts=_divided(groups, nbytes, count),
        nbytes=nbytes,
        deltas=len(saves) - 1,
    )


def most_workers(plan: Plan, memory_bytes: int) -> int:
    """How many workers may fold parts at a time within so much memory.

    Raises:
      OptionError: not even one.
    """
    with _standing(plan):
        compressed_bytes = _compressed_bytes(_chain(plan))
    least = math.ceil((_LEAST_BYTES + compressed_bytes) / _SPENT)
    if memory_bytes < least:
        raise OptionError(
            f"memory_bytes: expected at least {least:,} to fold step {plan.step}, found "
            f"{memory_bytes:,}; give it more"
        )
    return memory_bytes // least


def fold(plan: Plan, number: int, *, memory_bytes: int, progress: Progress | None = None) -> Folded:
    """Writes one part of the new base; what it wrote is on disk when it returns.

    Idempotent: it may be called again, in another process too and at the same time, and whoever is
    done first has written the part.

    Args:
      plan: of ``plan``.
      number: of the part.
      memory_bytes: most memory that it takes.
      progress: called with the part's bytes folded and bytes in all.

    Raises:
      StepGone: the step was removed.
      Damaged, BrokenChain: the chain is not intact.
      OptionError: the memory does not suffice.
      OutOfSpace, StorageError: the store refused.
    """
    ready = _ready(plan, number)
    if ready is not None:
        return Folded(bytes_read=0, bytes_written=_written_bytes(plan, ready))
    with _standing(plan):
        saves = _chain(plan)
    attempt = plan.workspace / f"{number}.{uuid.uuid4().hex}"
    try:
        with files.typed_errors(attempt, "make a directory"):
            attempt.mkdir(parents=True)
            plan.item_dir.mkdir(exist_ok=True)
        work = _Fold(plan, number, saves, attempt, memory_bytes, progress)
        with _standing(plan), stored.standing_chain(saves):
            record = work.run()
        _move(attempt, plan.item_dir, number)
    finally:
        files.remove_tree(attempt)
    return Folded(bytes_read=work.bytes_read, bytes_written=_written_bytes(plan, record))


def publish(plan: Plan) -> None:
    """Makes the base visible, by one rename; everything is on disk before and after it.

    It does nothing where a base already stands for the save.

    Raises:
      Damaged: a part is missing or altered.
      StepGone: the step was removed, or is another save now.
      StorageError: the store refused.
    """
    with contextlib.suppress(Damaged):
        if stored.read_compacted(plan.step_dir, plan.save_id, plan.item) is not None:
            return
    count = len(plan.parts)
    records = []
    for number in range(count):
        record = _ready(plan, number)
        if record is None:
            raise Damaged(
                f"{plan.temporary}/{plan.item}/{layout.manifest_name(number)}",
                f"part {number} of {count}",
                "no such part",
                "fold it, then publish again",
            )
        records.append(record)
    if count > 1:
        head = dataclasses.replace(
            records[0], parts=tuple(_part(plan, record) for record in records)
        )
        path = plan.item_dir / layout.manifest_name(0)
        files.write_atomic(path, manifest.to_bytes(head), fsync=True)
    with _standing(plan):
        _chain(plan)
    final = layout.compacted_dir(plan.step_dir, plan.item)
    with files.typed_errors(final, "be published"):
        files.fsync_path(plan.item_dir)
        _move_aside(final, plan.workspace)
        _rename_into(plan.item_dir, final)
        files.fsync_path(final.parent)
        files.fsync_path(final.parent.parent)


def _by_threads(
    planned: Plan, threads: int, memory_bytes: int, progress: Progress | None
) -> list[Folded]:
    """All parts, by threads of lowered priority: measured no slower than processes."""
    meter = _Meter(planned.nbytes, progress)

    def run(number: int) -> Folded:
        if stop.is_set():
            raise concurrent.futures.CancelledError
        return fold(planned, number, memory_bytes=memory_bytes, progress=meter.of(number))

    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(threads, "deltackpt-fold", priority.lower) as pool:
        futures = [pool.submit(run, number) for number in range(len(planned.parts))]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


class _Meter:
    """Adds up what parts that are folded at the same time have done."""

    def __init__(self, total: int, progress: Progress | None):
        self._total = total
        self._progress = progress
        self._done: dict[int, int] = {}
        self._lock = threading.Lock()

    def of(self, number: int) -> Progress:
        """What one part calls."""

        def add(done: int, total: int) -> None:
            with self._lock:
                self._done[number] = done
                if self._progress is not None:
                    self._progress(sum(self._done.values()), self._total)

        return add


class _Budget(NamedTuple):
    """How a worker spends its memory; see the module.

    Attributes:
      row_numbers: most row numbers of deltas at a time.
      window_bytes: rows that are merged at a time.
      chunk_bytes: a chunk that is written.
    """

    row_numbers: int
    window_bytes: int
    chunk_bytes: int

    @classmethod
    def of(cls, memory_bytes: int, fields: int) -> _Budget:
        """The shares of a memory that is left for rows; each of the fields holds a chunk."""
        row_numbers_bytes = memory_bytes // 4
        piece_bytes = min(arrays.CHUNK_BYTES, memory_bytes // 16)
        chunk_bytes = min(arrays.CHUNK_BYTES, memory_bytes // 4 // (fields + _COPIES_WRITTEN))
        spent = row_numbers_bytes + _COPIES_READ * piece_bytes
        spent += (fields + _COPIES_WRITTEN) * chunk_bytes
        return cls(row_numbers_bytes // 8, memory_bytes - spent, chunk_bytes)


class _Fold:
    """One part on its way from a chain to the files of a base."""

    def __init__(
        self,
        plan: Plan,
        number: int,
        saves: Sequence[StoredSave],
        item_dir: Path,
        memory_bytes: int,
        progress: Progress | None,
    ):
        self.bytes_read = 0
        self._plan = plan
        self._number = number
        self._saves = saves
        self._item_dir = item_dir
        self._memory_bytes = memory_bytes
        self._progress = progress
        self._done = 0
        self._target = saves[-1]
        self._layout = self._target.layout
        self._groups = _planned_groups(saves)

    def run(self) -> Manifest:
        """Writes arrays, digests, then the manifest."""
        segments, chunks = [], {}
        for number, (name, span) in enumerate(self._plan.parts[self._number]):
            segment, found = self._fold_span(f"{name}.{number}", self._groups[name], span)
            segments.append(segment)
            chunks |= found
        part = layout.part_dir(self._item_dir, self._number)
        digests_crc32c = self._write_digests(part, chunks)
        record = self._manifest(segments, digests_crc32c)
        path = self._item_dir / layout.manifest_name(self._number)
        files.write_atomic(path, manifest.to_bytes(record), fsync=True)
        return record

    def _fold_span(
        self, name: str, group: GroupEntry, span: Span
    ) -> tuple[Segment, dict[str, Digest]]:
        """One segment, and the digests of its chunks."""
        window = _Windows(self._layout, group, span)
        compressed_bytes = _compressed_bytes(self._saves, window.all)
        memory_bytes = int(self._memory_bytes * _SPENT) - compressed_bytes
        if memory_bytes < _LEAST_BYTES - 1:
            least = math.ceil((_LEAST_BYTES + compressed_bytes) / _SPENT)
            raise OptionError(
                f"memory_bytes: expected at least {least:,} to fold rows of {group.name}, found "
                f"{self._memory_bytes:,}; give it more, or use fewer workers"
            )
        budget = _Budget.of(memory_bytes, len(group.fields))
        writers = {
            spec.name: _FieldWriter(self._directory(name, spec.name), spec, span, budget)
            for spec in group.fields
        }
        numbers = _RowNumbers()
        scratch = Staging(2 * arrays.CHUNK_BYTES)
        rows = {
            spec.name: min(max(1, budget.window_bytes // _field_bytes(spec)), span[1] - span[0])
            for spec in group.fields
        }
        nbytes = max(rows[spec.name] * _field_bytes(spec) for spec in group.fields)
        buffer = memory.empty_buffer((nbytes,), np.dtype(np.uint8))
        for stretch in self._stretches(window, budget):
            numbers.move(stretch)
            for spec in group.fields:
                for start in range(*stretch, rows[spec.name]):
                    part = (start, min(start + rows[spec.name], stretch[1]))
                    held = _rows_view(buffer, spec, part)
                    self._merge(window.targets(spec, part, held), numbers, scratch)
                    writers[spec.name].write(held)
                    memory.trim_memory()
                    self._note(held.nbytes)
        chunks: dict[str, Digest] = {}
        entries, encodings = [], []
        for spec in group.fields:
            writer = writers[spec.name]
            chunks |= writer.finish(self._item_dir)
            entries.append(writer.entry)
            encodings.append(self._encoding(writer, group, span))
        segment = Segment(
            name=name,
            group=group.name,
            columns=(0, group.width),
            count=span[1] - span[0],
            ranges=(span,),
            fields=tuple(spec.name for spec in group.fields),
            arrays=tuple(entries),
            encodings=tuple(encodings),
        )
        return segment, chunks

    def _merge(self, targets: Targets, numbers: _RowNumbers, scratch: Staging) -> None:
        def read(saves: Sequence[StoredSave]) -> int:
            found = reader.fill(saves, targets, numbers=numbers.rows, scratch=scratch, readers=1)
            self._saves = saves
            return found

        self.bytes_read += stored.read_whole(self._saves, read)

    def _note(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            total = sum(
                (span[1] - span[0]) * _row_bytes(self._groups[name])
                for name, span in self._plan.parts[self._number]
            )
            self._progress(self._done, total)

    def _stretches(self, window: _Windows, budget: _Budget) -> Iterator[Span]:
        """Rows whose row numbers in all deltas fit, whichever rows these are."""
        counts = [
            segment.count for _, segment in _segments(self._saves, window.all) if not segment.ranges
        ]
        first, last = window.span
        rows = last - first
        while rows > 1 and sum(min(count, rows) for count in counts) > budget.row_numbers:
            rows = -(-rows // 2)
        for start in range(first, last, rows):
            yield start, min(start + rows, last)

    def _directory(self, segment: str, field: str) -> Path:
        return layout.array_dir(self._item_dir, self._number, segment, field)

    def _encoding(self, writer: _FieldWriter, group: GroupEntry, span: Span) -> Encoding:
        tables = manifest.members(group, self._layout.tables)
        nothing = (0.0,) * len(tables)
        return Encoding(
            field=writer.spec.name,
            codec=writer.spec.codec,
            reason=f"{writer.spec.codec}: compacted, not encoded again",
            nbytes=files.tree_bytes(writer.directory),
            rows=tuple(
                max(0, min(span[1], table.offset + table.rows) - max(span[0], table.offset))
                for table in tables
            ),
            squared_error=nothing,
            squared_norm=nothing,
        )

    def _write_digests(self, part: Path, chunks: Mapping[str, Digest]) -> int:
        """Digests of all files of the part, and everything on disk; the digests' own CRC32C."""
        others = {}
        if part.is_dir():
            others = integrity.digest_tree(self._item_dir, below=part, skip=chunks.__contains__)
            files.fsync_tree(part, folders_only=True)
        path = self._item_dir / layout.digests_name(self._number)
        return integrity.write_digests(path, Digests.of({**others, **chunks}), fsync=True)

    def _manifest(self, segments: Sequence[Segment], digests_crc32c: int) -> Manifest:
        count = len(self._plan.parts)
        used = {spec.codec for group in self._groups.values() for spec in group.fields}
        coded = () if used <= {"raw"} else (manifest.ENCODINGS,)
        deltas = self._plan.deltas
        record = Manifest(
            kind="base",
            save_id=self._plan.save_id,
            parent=None,
            reason=f"base: compacted from {deltas} delta{'' if deltas == 1 else 's'}",
            process=self._number,
            process_count=count,
            groups=tuple(self._groups.values()),
            tables=self._layout.tables,
            segments=tuple(segments),
            dense=self._layout.dense,
            tracking_paths=self._layout.tracking_paths,
            item_digests_crc32c=digests_crc32c,
            writers=__about__.writer_versions(),
            restores=self._target.head.restores,
            features=(*coded, manifest.PARTS) if count > 1 else coded,
        )
        if count == 1:
            return record
        spans = self._plan.parts[self._number]
        record = dataclasses.replace(
            record,
            plan_crc32c=manifest.plan_crc32c(record),
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
        if self._number > 0:
            record = dataclasses.replace(record, groups=(), tables=(), dense=(), tracking_paths=())
        return record


class _Windows:
    """What is wanted of a chain for some rows of a group."""

    def __init__(self, target: manifest.Layout, group: GroupEntry, span: Span):
        self.span = span
        self._layout = target
        self._group = group
        nothing = np.empty(0, np.uint8)
        #: Of all fields, to ask which parts and segments there are.
        self.all = Targets([self._one(spec, span, nothing) for spec in group.fields], target)

    def targets(self, spec: FieldSpec, span: Span, buffer: np.ndarray) -> Targets:
        """Of one field, into a buffer."""
        return Targets([self._one(spec, span, buffer)], self._layout)

    def _one(self, spec: FieldSpec, span: Span, buffer: np.ndarray) -> Target:
        columns = self._group.columns(spec)
        return Target(self._group.name, spec.name, span, columns, buffer)


class _FieldWriter:
    """The stored array of one field of a segment."""

    def __init__(self, directory: Path, spec: FieldSpec, span: Span, budget: _Budget):
        codec = codecs.get(spec.codec)
        assert codecs.is_lossless(codec)
        self.spec = spec
        self.directory = directory
        self._codec = codec
        (array,) = codec.stored(spec.trailing, codecs.dtype_of(spec.dtype)).values()
        count = span[1] - span[0]
        # Equal chunks: a last one that is cut short would still be stored at full length.
        chunks = max(1, -(-count * _field_bytes(spec) // budget.chunk_bytes))
        self.entry: ArrayEntry = arrays.array_entry(
            spec.name,
            (count, *array.trailing),
            array.dtype,
            byte_planes=array.byte_planes,
            chunk_rows=max(1, -(-count // chunks)),
        )
        self._writer = arrays.ArrayWriter(directory, self.entry, fsync=True, in_flight=1)

    def write(self, rows: np.ndarray) -> None:
        """Appends rows."""
        self._writer.write(self._codec.stored_view(rows))

    def finish(self, item_dir: Path) -> dict[str, Digest]:
        """Waits until everything is written; the digests of the chunks."""
        below = self.directory.relative_to(item_dir).as_posix()
        return integrity.chunk_digests(below, self.entry, self._writer.finish())


class _RowNumbers:
    """Row numbers of deltas within a stretch of rows: decoded once while stretches go up."""

    def __init__(self) -> None:
        self._stretch: Span = (0, 0)
        self._cursors: dict[Spot, _Cursor] = {}

    def move(self, stretch: Span) -> None:
        """Goes on to the next stretch."""
        self._stretch = stretch

    def rows(self, part: StoredPart, segment: Segment, targets: Targets) -> HeldRows | None:
        """See ``reader.RowNumbers``."""
        if segment.ranges is not None:
            return reader.stored_rows(part, segment, targets)
        if not targets.want(segment, self._stretch):
            return None
        place = layout.array_dir(part.item_dir, part.record.process, segment.name, layout.GAPS)
        cursor = self._cursors.setdefault(place, _Cursor(part, segment))
        return cursor.within(self._stretch)


class _Cursor:
    """The row numbers of one segment, read chunk by chunk."""

    def __init__(self, part: StoredPart, segment: Segment):
        self._part = part
        self._segment = segment
        self._entry = next(entry for entry in segment.arrays if entry.name == layout.GAPS)
        #: The chunk in which the next stretch begins, and the row before it.
        self._chunk = 0
        self._before: int | None = None
        self._stretch: Span | None = None
        self._held = HeldRows(np.empty(0, np.int64))

    def within(self, stretch: Span) -> HeldRows:
        """Those of the rows in a stretch; stretches must ascend."""
        if stretch != self._stretch:
            self._held = self._read(stretch)
            self._stretch = stretch
        return self._held

    def _read(self, stretch: Span) -> HeldRows:
        found: list[np.ndarray] = []
        first = 0
        chunks = -(-self._entry.shape[0] // self._entry.chunk_rows)
        while self._chunk < chunks:
            rows = self._decoded()
            low, high = np.searchsorted(rows, stretch)
            if low < high:
                if not found:
                    first = self._chunk * self._entry.chunk_rows + int(low)
                # A copy: the rest of the chunk is not to stay in memory.
                found.append(rows[low:high].copy())
            if high < len(rows):
                break
            self._before = int(rows[-1])
            self._chunk += 1
        if not found:
            return HeldRows(np.empty(0, np.int64))
        return HeldRows(found[0] if len(found) == 1 else np.concatenate(found), first)

    def _decoded(self) -> np.ndarray:
        start = self._chunk * self._entry.chunk_rows
        stop = min(start + self._entry.chunk_rows, self._entry.shape[0])
        return reader.gap_rows(self._part, self._segment, start, stop, after=self._before)


def _chain(plan: Plan) -> tuple[StoredSave, ...]:
    """The chain that is folded, as it stands now."""
    saves = stored.read_chain(plan.step_dir, plan.item)
    if saves[-1].info.save_id != plan.save_id:
        raise stored.gone(plan.step_dir, during="compacted", instead="compact")
    return saves


def _standing(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Within, what fails since the step is no more what was planned for is ``StepGone``."""
    return stored.standing(
        plan.step_dir,
        stands=lambda: stored.stands(plan.step_dir, plan.save_id, plan.item),
        during="compacted",
        instead="compact",
    )


def _divided(
    groups: Sequence[GroupEntry], nbytes: int, count: int
) -> tuple[tuple[tuple[str, Span], ...], ...]:
    """All rows, cut into parts of nearly equal bytes; without parts that hold nothing."""
    starts = [0, *itertools.accumulate(group.rows * _row_bytes(group) for group in groups)]

    def row(group: GroupEntry, start: int, at: int) -> int:
        return min(max(0, at - start) // _row_bytes(group), group.rows)

    parts = []
    for number in range(count):
        low, high = number * nbytes // count, (number + 1) * nbytes // count
        spans = (
            (group.name, (row(group, start, low), row(group, start, high)))
            for group, start in zip(groups, starts, strict=False)
        )
        parts.append(tuple((name, span) for name, span in spans if span[0] < span[1]))
    return tuple(part for part in parts if part) or ((),)


def _planned_groups(saves: Sequence[StoredSave]) -> dict[str, GroupEntry]:
    """Groups by name, with the codecs of the new base: lossless where that of the base was."""
    kept = {
        (group.name, spec.name)
        for group in saves[0].head.groups
        for spec in group.fields
        if spec.codec == "lossless" and codecs.dtype_of(spec.dtype).itemsize > 1
    }
    return {
        group.name: dataclasses.replace(
            group,
            fields=tuple(
                dataclasses.replace(spec, codec="lossless")
                if (group.name, spec.name) in kept
                else spec
                for spec in group.fields
            ),
        )
        for group in saves[-1].layout.groups
    }


def _segments(
    saves: Sequence[StoredSave], targets: Targets | None = None
) -> Iterator[tuple[StoredPart, Segment]]:
    """The segments of a chain that have something that is wanted; all by default."""
    for save in saves:
        for part in save.parts(None if targets is None else targets.touch):
            for segment in part.record.segments:
                rows = part.groups[segment.group].rows
                if targets is None or targets.want(segment, (0, rows)):
                    yield part, segment


def _compressed_bytes(saves: Sequence[StoredSave], targets: Targets | None = None) -> int:
    """Memory for reading the largest compressed chunk of a chain."""
    chunks = (
        entry.nbytes * min(1.0, entry.chunk_rows / max(1, entry.shape[0]))
        for _, segment in _segments(saves, targets)
        for entry in segment.arrays
        if entry.compressed
    )
    return _COPIES_OF_COMPRESSED * math.ceil(max(chunks, default=0))


def _field_bytes(spec: FieldSpec) -> int:
    return max(1, math.prod(spec.trailing) * codecs.dtype_of(spec.dtype).itemsize)


def _row_bytes(group: GroupEntry) -> int:
    return sum(_field_bytes(spec) for spec in group.fields)


def _row_cells(group: GroupEntry) -> int:
    return sum(manifest.width(spec.trailing) for spec in group.fields)


def _rows_view(buffer: np.ndarray, spec: FieldSpec, span: Span) -> np.ndarray:
    """The beginning of a buffer as rows of a field."""
    dtype, shape = codecs.dtype_of(spec.dtype), (span[1] - span[0], *spec.trailing)
    return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _require_room(plan: Plan) -> None:
    free = files.free_bytes(plan.directory)
    if free < plan.nbytes:
        raise OutOfSpace(
            f"{plan.directory}: expected room for {plan.nbytes:,} bytes to compact step "
            f"{plan.step}, found {free:,} free; free space or keep fewer steps, then compact again"
        )


def _ready(plan: Plan, number: int) -> Manifest | None:
    """The manifest of a part that was folded; None where it was not."""
    path = plan.item_dir / layout.manifest_name(number)
    if not path.is_file():
        return None
    record = manifest.from_bytes(files.read_bytes(path), name=files.object_name(path))
    integrity.read_item_digests(plan.item_dir, record)
    return dataclasses.replace(record, parts=())


def _written_bytes(plan: Plan, record: Manifest) -> int:
    """Bytes of the files of a part."""
    digests = integrity.read_item_digests(plan.item_dir, record)
    names = (layout.manifest_name(record.process), layout.digests_name(record.process))
    beside = sum((plan.item_dir / name).stat().st_size for name in names)
    return beside + sum(length for length, _, _ in digests.files.values())


def _part(plan: Plan, record: Manifest) -> Part:
    data = files.read_bytes(plan.item_dir / layout.manifest_name(record.process))
    return Part(
        process=record.process,
        crc32c=google_crc32c.value(data) if record.process else 0,
        nbytes=record.nbytes,
        covers=record.covers,
    )


def _move(attempt: Path, item_dir: Path, number: int) -> None:
    """Moves a part to the others, its manifest last."""
    part = layout.part_dir(attempt, number)
    with files.typed_errors(item_dir, "be written"):
        if part.is_dir():
            try:
                os.rename(part, layout.part_dir(item_dir, number))
            except OSError as error:
                # Another attempt at the same part has come so far: its bytes are the same.
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        for name in (layout.digests_name(number), layout.manifest_name(number)):
            files.fsync_path(item_dir)
            os.replace(attempt / name, item_dir / name)
        files.fsync_path(item_dir)


def _move_aside(final: Path, workspace: Path) -> None:
    """Makes place where a base stands for nothing: of another save, or damaged."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(final, workspace / "replaced")


def _rename_into(source: Path, final: Path) -> None:
    while True:
        final.parent.mkdir(exist_ok=True)
        try:
            os.rename(source, final)
            return
        except FileNotFoundError:
            # A trainer removes the folder where it finds it empty.
            if not source.is_dir():
                raise
