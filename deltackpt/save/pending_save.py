# SPDX-License-Identifier: Apache-2.0
"""One save: decided and captured on the training thread, written in the background.

``capture`` is the only part that blocks training. The lineage decides between base and delta, the
stamps determine the touched rows, the audit checks a few other rows, and the rows are staged or
pinned (``save.capture``). All of it is dispatched before the training thread continues: later steps
may donate the tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import google_crc32c
import numpy as np

from deltackpt import codecs, coordination, events
from deltackpt.coordination import Coordinator
from deltackpt.errors import TrackingError
from deltackpt.format import manifest, naming
from deltackpt.format.manifest import (
    Kind,
    LayerRef,
    Layout,
    Manifest,
    TrackingName,
    table_figures,
)
from deltackpt.format.row_blocks import GroupEntry, Segment, width
from deltackpt.layers.write import LayerShard
from deltackpt.policies import CodecChoice, too_large
from deltackpt.resources.runtime import Runtime
from deltackpt.save import commit, tracking_audit
from deltackpt.save import shard as save_shard
from deltackpt.save.branch import Clocks, Reading, Written
from deltackpt.save.capture import BusyClock, CapturedRows, PinnedRows, SegmentSource, StagedRows
from deltackpt.save.commit import Item, StepWriters
from deltackpt.save.dense_save import DenseLeaves, WrittenDense
from deltackpt.save.lineage import Intent, Lineage
from deltackpt.save.selection import Division, Sources, including
from deltackpt.save.shard import Plans
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, TouchState, match_marks, plain
from deltackpt.storage import digests, posix, shard_writer
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.shard_writer import SegmentSink
from deltackpt.storage.zarr_writer import ZarrSegmentSink


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Embeddings:
    """The tables and slots of one state, as a checkpointable for Orbax.

    Attributes:
      split: the state, split by ``tables.split``; its dense leaves are not saved here.
      touched: a TouchState in addition to those of the state; a row is touched if any of them marks
        it. Without any TouchState, the save is a base.
      lineage: the trainer's earlier saves; None makes the save a base of a new run.
      runtime: shared by the saves of one manager; by default, the save has its own.
      force_base: save a base regardless of the policy.
      dense_bytes: bytes of the dense leaves that a base contains and a delta may omit.
      copied_bytes: bytes of the dense leaves that will be copied to the same memory as the rows.
      tracking: how the touched rows were found, for the manifest.
      tracking_audit: whether the save checks a sample of the rows; see ``save.tracking_audit``.
      digests: digest files that the commit writes; see ``Manifest.digests``.
      fsync: whether to fsync every file before its shard is considered written.
      processes_secs: how long another process may be silent.
    """

    split: Split
    touched: TouchState | None = None
    lineage: Lineage | None = None
    runtime: Runtime | None = None
    force_base: bool = False
    dense_bytes: int = 0
    copied_bytes: int = 0
    tracking: TrackingName = ""
    tracking_audit: bool = True
    digests: tuple[str, ...] = ("item",)
    fsync: bool = True
    processes_secs: float = 60.0


def capture(embeddings: Embeddings, step: int, step_dir: Path) -> PendingSave:
    """Captures what a save needs from the training state; returns the save to be written.

    The caller must ``wait_copied()`` before training continues. If the tracking audit finds the
    touched rows wrong, a single process saves a base at once; several fail in the background,
    before the commit. Raises TrackingError if a TouchState does not fit the tables, and OutOfSpace.
    """
    started = time.perf_counter()
    split, marks = embeddings.split, marks_of(embeddings.split, embeddings.touched)
    lineage = embeddings.lineage or Lineage(protected=False)
    runtime = embeddings.runtime or Runtime(memory_bytes=1 << 30)
    stamps = match_marks(marks, split.layout) if marks else {}
    intent = lineage.start_save(
        step,
        step_dir,
        clocks=clocks_of(split, marks),
        layout=split.layout,
        force_base=embeddings.force_base,
    )
    faults, shared_stamps = lineage.suspected if intent.kind == "delta" else None, {}
    try:
        sources = Sources(split, stamps, runtime)
        if since := intent.since or intent.recent:
            sources.stamps.scan(since)
        if embeddings.tracking_audit and marks and embeddings.lineage is not None:
            found, sample = tracking_audit.audit(sources, intent)
            lineage.record_sample(intent.save_id, sample)
            if found:
                faults = tracking_audit.text(found, "in the parent")
        if intent.kind == "delta" and coordination.process_count() > 1:
            shared_stamps = sources.stamps.shared(intent.since)
        elif intent.kind == "delta" and faults is not None:
            intent = lineage.as_base(intent, faults)
        touched = including(sources.stamps.touched, intent.unmarked, split.layout)
        segments = sources.segments(whole=intent.kind == "base", touched=touched)
        if intent.kind == "delta" and coordination.process_count() == 1:
            delta_bytes, base_bytes = _expected_bytes(split, segments, intent)
            # A delta's dense bytes are known only after encoding.
            base_bytes += embeddings.dense_bytes
            if (reason := too_large(lineage.policy, delta_bytes, base_bytes)) is not None:
                intent = lineage.as_base(intent, reason)
                segments = sources.segments(whole=True)
        plans = planned(split.codecs, intent.kind, intent.restores)
        nbytes = sum(segment.nbytes for segment in segments)
        require_room(step_dir.parent, nbytes, step)
        if intent.kind == "delta" and runtime.memory.fits(nbytes + embeddings.copied_bytes):
            rows = StagedRows(segments, plans, runtime)
        else:
            rows = PinnedRows(segments)
    except BaseException:
        lineage.failed(intent.save_id)
        raise
    return PendingSave(
        intent=intent,
        layout=split.layout,
        plans=plans,
        division=sources.division,
        shared_stamps=shared_stamps,
        lineage=lineage,
        digests=embeddings.digests,
        tracking=embeddings.tracking,
        rows=rows,
        faults=faults,
        nbytes=nbytes,
        extract_secs=time.perf_counter() - started,
        fsync=embeddings.fsync,
        runtime=runtime,
    )


def planned(choices: Mapping[str, Mapping[str, CodecChoice]], kind: Kind, restores: int) -> Plans:
    """Returns the codecs that a save, or a WAL record, tries first, by group and field."""
    return {
        group: {field: choice.planned(kind, restores=restores) for field, choice in held.items()}
        for group, held in choices.items()
    }


def marks_of(split: Split, touched: TouchState | None) -> tuple[Marks, ...]:
    """Returns the TouchStates of a state, and a passed one if it is not among them."""
    if touched is None or any(marks.state.clock is touched.clock for marks in split.marks):
        return split.marks
    return *split.marks, Marks("", plain(touched))


def clocks_of(split: Split, marks: Sequence[Marks]) -> Clocks:
    """Returns the state of tracking; waits for the training step that computes it."""
    readings = [Reading(place, _int(state.identity), _int(state.clock)) for place, state in marks]
    windows = [(_int(updates), _int(gathered)) for updates, gathered in split.windows]
    return Clocks(readings=tuple(readings), windows=tuple(windows))


def _int(scalar: object) -> int:
    """Returns a scalar of the state as an int; ten times as fast as ``int`` for host memory."""
    return int(np.asarray(scalar))


def _expected_bytes(
    split: Split, segments: Sequence[SegmentSource], intent: Intent
) -> tuple[int, int]:
    """Bytes that a delta of some segments, and a base, would write before any compression."""
    delta_bytes = base_bytes = 0
    for group in split.layout.groups:
        for spec in group.fields:
            choice, dtype = split.codecs[group.name][spec.name], codecs.dtype_of(spec.dtype)
            row_bytes = {}
            for kind in ("delta", "base"):
                codec = codecs.get(choice.planned(kind, restores=intent.restores).codec)
                arrays_of = codec.stored(spec.trailing, dtype).values()
                row_bytes[kind] = sum(math.prod(a.trailing) * a.dtype.itemsize for a in arrays_of)
            held = [s for s in segments if s.group == group.name and spec.name in s.fields]
            # Segments of other columns hold the same rows.
            cells = sum(len(s.rows) * math.prod(s.fields[spec.name].trailing[:1]) for s in held)
            delta_bytes += cells * row_bytes["delta"] // width(spec.trailing)
            base_bytes += group.rows * row_bytes["base"]
    return delta_bytes, base_bytes


def require_room(root: Path, nbytes: int, step: int) -> None:
    """Raises OutOfSpace if the file system of a directory has too little free space."""
    existing = next(path for path in (root, *root.parents) if path.exists())
    advice = "free space or keep fewer steps, then save again: no touched row is lost"
    posix.require_room(existing, nbytes, f"step {step} in {root}", advice)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class PendingSave(Item):
    """A save whose rows were captured: an item of a step, written once, in the background."""

    intent: Intent  # the decision about the save
    layout: Layout
    plans: Plans
    division: Division
    shared_stamps: Mapping[str, int]  # must be equal on other processes; see ``Stamps.shared``
    lineage: Lineage  # knows the compacted bases
    digests: tuple[str, ...]  # see ``Manifest.digests``
    tracking: TrackingName
    rows: CapturedRows
    faults: str | None  # what the tracking audit found
    nbytes: int  # of the rows, before they are encoded
    extract_secs: float
    fsync: bool  # whether the shard is fsynced if others commit it
    runtime: Runtime
    event: events.SaveEvent | None = None  # without what only the commit determines
    record: Manifest | None = None  # of this process's shard, once its arrays are written
    dense: DenseLeaves | None = None  # written beside the rows, in this item
    base_dense_bytes: int = 0  # see ``Manifest.dense_bytes``

    @property
    def doubt(self) -> str | None:
        """Returns why all rows are saved, if the touched ones were not trusted."""
        return self.faults if self.intent.kind == "base" else None

    def wait_copied(self) -> None:
        """Waits until staged rows are copied from the training state; pinned rows stay in it."""
        started = time.perf_counter()
        self.rows.wait()
        self.extract_secs += time.perf_counter() - started

    def write(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        """Writes this process's shard, but not process 0's manifest; always releases the rows."""
        encoding = BusyClock()
        started = time.perf_counter()
        try:
            if self.intent.kind == "delta" and self.faults is not None:
                raise TrackingError(f"step {self.intent.save_id.step}: {self.faults}")
            self.rows.land()
            landed = time.perf_counter()
            arrays = self._write_arrays(item_dir, batch, writers, encoding)
        finally:
            self.abandon()
        segments, dense, layer = arrays
        written = time.perf_counter()
        head = self._head(segments, dense, writers)
        self.record, nbytes = shard_writer.described(item_dir, head, segments, batch, layer=layer)
        if writers.process > 0:
            nbytes += len(shard_writer.write_manifest(item_dir, self.record, batch))
        dense_bytes = 0 if dense is None else dense.nbytes
        groups = self.layout.groups
        self.event = events.SaveEvent(
            step=self.intent.save_id.step,
            kind=self.intent.kind,
            reason=self.intent.reason,
            process=writers.process,
            rows=save_shard.table_rows(segments),
            total_rows=sum(group.rows for group in groups),
            bytes_written=nbytes - dense_bytes,
            extract_secs=self.extract_secs + landed - started,
            encode_secs=encoding.seconds,
            write_secs=written - landed - encoding.seconds,
            digest_secs=time.perf_counter() - written,
            tables=table_figures(groups, self.layout.tables, segments),
            dense_bytes=dense_bytes,
            dense=() if dense is None else dense.leaves,
        )

    def complete(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        """Writes process 0's manifest, with an index of all shards, after all other files.

        A delta's manifest has the digests of the step's other files, a base's is one of those.
        """
        record, event = self.record, self.event
        assert record is not None and event is not None
        if writers.count > 1:
            shards = writers.collect(item_dir, record)
            record = dataclasses.replace(record, shards=shards, shared_stamps={})
        has_digests, is_delta = "step" in self.digests, self.intent.kind == "delta"
        if has_digests and is_delta:
            others = digests.without_blocks(commit.uncovered(batch, item_dir.name))
            record = dataclasses.replace(record, files=others)
        data = shard_writer.write_manifest(item_dir, record, batch)
        if has_digests and not is_delta:
            commit.write_digests(batch, item_dir.name, naming.STEP_DIGESTS)
        written = Written(google_crc32c.value(data), record.nbytes, record.compacted)
        self.lineage.wrote(self.intent.save_id, written)
        self.event = dataclasses.replace(event, bytes_written=event.bytes_written + len(data))

    def _write_arrays(
        self, item_dir: Path, batch: FileBatch, writers: StepWriters, encoding: BusyClock
    ) -> tuple[list[Segment], WrittenDense | None, LayerRef | None]:
        """Writes the arrays of a base as Zarr arrays, and those of a delta into a layer file."""
        intent = self.intent

        def write(place: Callable[[str], SegmentSink]) -> tuple[list[Segment], WrittenDense | None]:
            # Dense leaves first: nothing is left to copy while the rows are written.
            dense = None
            if self.dense is not None:
                parent = None if intent.parent is None else intent.parent.save_id
                dense = self.dense.write_layer(place, intent.save_id, parent)
            segments = save_shard.write_segments(
                self.rows, place, self.layout, self.plans, self.runtime, encoding
            )
            return segments, dense

        if intent.kind == "base":
            place = functools.partial(ZarrSegmentSink, item_dir, writers.process, batch)
            return *write(place), None
        with LayerShard(
            item_dir,
            intent.save_id,
            None if intent.parent is None else intent.parent.save_id,
            batch,
            self.runtime,
            process=writers.process,
            process_count=writers.count,
        ) as shard:
            segments, dense = write(shard.place)
            blocks = () if dense is None else dense.record.segments
            return segments, dense, shard.finish([*segments, *blocks])

    def _head(
        self, segments: Sequence[Segment], dense: WrittenDense | None, writers: StepWriters
    ) -> Manifest:
        """Returns the manifest without anything about the files."""
        intent, layout = self.intent, self.layout
        is_first, has_several = writers.process == 0, writers.count > 1
        held = {segment.group for segment in segments} if has_several else ()
        covers = (self.division.cover(group) for group in layout.groups if group.name in held)
        return Manifest(
            kind=intent.kind,
            save_id=intent.save_id,
            parent=intent.parent,
            reason=intent.reason,
            process=writers.process,
            process_count=writers.count,
            groups=manifest.with_codecs(
                layout.groups, lambda group, spec: self.plans[group.name][spec.name].codec
            ),
            tables=layout.tables,
            segments=(),
            dense=layout.dense,
            tracking_paths=layout.tracking_paths,
            digests=self.digests,
            files={},
            shards=(),
            dense_blocks=None if dense is None else dense.record,
            dense_bytes=self.base_dense_bytes,
            restores=intent.restores,
            # Process 0 informs the others about compaction.
            compacted=self.lineage.newest_compacted() if is_first else None,
            parents=intent.parents if is_first else (),
            tracking=self.tracking if is_first else "",
            owned_cells=self.division.owned_cells if has_several else {},
            covers=tuple(covers),
            shared_stamps=dict(self.shared_stamps) if has_several else {},
        )

    def write_alone(self, item_dir: Path, coordinator: Coordinator) -> None:
        """Writes and fsyncs this process's shard if others commit the step; see ``write``."""
        save_id = self.intent.save_id
        writers = StepWriters(
            coordinator=coordinator,
            key=f"{save_id.run}-{save_id.attempt}",
            temporary=item_dir.parent,
            runtime=self.runtime,
        )
        files = FileBatch(item_dir, fsync=self.fsync, runtime=self.runtime)
        with writers.working(), contextlib.closing(files) as batch:
            self.write(item_dir, batch, writers)
            if writers.process > 0:
                batch.force()
                writers.report("written", {})
                writers.wait("done")
                return
            if writers.count > 1:
                batch.force()  # In parallel with the writes of the others.
                writers.wait("written")
            self.complete(item_dir, batch, writers)
            batch.force()
            if writers.count > 1:
                writers.report("done", {})
                # No later save of this coordinator does it.
                coordinator.delete(f"{writers.prefix}/written")

    def abandon(self) -> None:
        """Abandons a save that will not be written. Idempotent."""
        self.rows.release()
        if self.dense is not None:
            self.dense.release()


@dataclasses.dataclass(frozen=True, eq=False)
class RefusedSave(Item):
    """A save that others have started and this process cannot make: its write reports why."""

    cause: Exception

    def write(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        """Raises the cause."""
        raise self.cause


def base_bytes(groups: tuple[GroupEntry, ...]) -> int:
    """Returns the unencoded bytes of all rows of all fields."""
    return sum(group.rows * group.row_bytes for group in groups)
