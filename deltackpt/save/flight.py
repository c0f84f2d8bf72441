# SPDX-License-Identifier: Apache-2.0
"""One save in flight: its rows were captured from the training state; the background writes them.

``snapshot.take`` is the only part that blocks training; it returns a ``PendingSave``. The rows to
write in the background are either *copied* (touched rows, in staging memory) or *held* (views of
the training state, for a base or for a delta larger than the staging budget): see ``taken``.
``PendingSave.released`` is set as soon as nothing refers to the training state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path

from deltackpt import events
from deltackpt.coordination import Coordinator
from deltackpt.errors import TrackingError
from deltackpt.format.figures import LeafFigures, table_figures
from deltackpt.format.manifest import LayerRef, TrackingName
from deltackpt.format.segments import GroupEntry, Segment
from deltackpt.layers.shard import LayerShard
from deltackpt.resources.runtime import Runtime
from deltackpt.save import part
from deltackpt.save.branch import Written
from deltackpt.save.dense import DenseLeaves
from deltackpt.save.dense_layer import WrittenDense
from deltackpt.save.lineage import Intent, Lineage
from deltackpt.save.part import PartPlan
from deltackpt.save.pieces import BusyClock
from deltackpt.save.taken import TakenRows
from deltackpt.save.writers import StepWriters
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, TouchState, plain
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.parts import ArrayPlace, Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How saves are staged and written, for use of the handlers without a manager.

    Attributes:
      fsync: whether to fsync every file before its shard is considered written.
      digests: digest files that the commit writes; see ``Manifest.digests``.
      sampled_proof: whether saves check a sample of the rows; see ``save.proof``.
      processes_secs: how long another process may be silent.
    """

    fsync: bool = True
    digests: tuple[str, ...] = ("item",)
    sampled_proof: bool = True
    processes_secs: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Embeddings:
    """The tables and slots of one state, as a checkpointable for Orbax.

    Attributes:
      split: the state, split by ``tables.split``; its dense leaves are not saved here.
      touched: a TouchState in addition to those of the state; a row is touched if any of them marks
        it. Without any TouchState, the save is a base.
      lineage: the trainer's earlier saves; None makes the save a base of a new run.
      options: how to stage and write the rows.
      runtime: shared by the saves of one manager; by default, the save has its own.
      force_base: save a base regardless of the policy.
      dense_bytes: bytes of the dense leaves that a base contains and a delta may omit.
      copied_bytes: bytes of the dense leaves that will be copied to the same memory as the rows.
      tracking: how the touched rows were found, for the manifest.
    """

    split: Split
    touched: TouchState | None = None
    lineage: Lineage | None = None
    options: PipelineOptions = PipelineOptions()
    runtime: Runtime | None = None
    force_base: bool = False
    dense_bytes: int = 0
    copied_bytes: int = 0
    tracking: TrackingName = ""

    @property
    def marks(self) -> tuple[Marks, ...]:
        """Returns the TouchStates of the state, and the passed one if it is not among them."""
        given = self.touched
        if given is None or any(marks.state.clock is given.clock for marks in self.split.marks):
            return self.split.marks
        return *self.split.marks, Marks("", plain(given))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveReport:
    """The result of the background half of a save, with the stages of ``events.SaveEvent``.

    ``rows``, ``bytes_written`` and ``tables`` are of this process's shard, ``base_bytes`` is the
    unencoded size of all rows of tables and slots. ``dense_bytes`` is of dense leaves
    stored in the shard, which ``bytes_written`` does not count; ``dense`` only of blocks.
    """

    intent: Intent
    rows: int
    total_rows: int
    bytes_written: int
    base_bytes: int
    extract_secs: float
    encode_secs: float
    write_secs: float
    digest_secs: float
    tables: tuple[events.TableFigures, ...]
    dense_bytes: int = 0
    dense: tuple[LeafFigures, ...] = ()


class PendingSave:
    """A save whose rows were captured: an item of a step, written once, in the background."""

    def __init__(
        self,
        plan: PartPlan,
        rows: TakenRows,
        *,
        faults: str | None,
        nbytes: int,
        extract_secs: float,
        fsync: bool,
        runtime: Runtime,
    ):
        """Created by ``snapshot.take``.

        Args:
          plan: what is written.
          rows: the captured rows.
          faults: what the tracking audit found; None if it found none.
          nbytes: bytes of the rows, before they are encoded.
          extract_secs: duration of the capture.
          fsync: whether the shard is fsynced if others commit it.
          runtime: writes and encodes.
        """
        self.intent = plan.intent
        #: Why the touched rows were not trusted, and all rows are saved; None where they were.
        self.doubt = faults if plan.intent.kind == "base" else None
        self.report: SaveReport | None = None
        self.rows = rows
        #: Bytes of the rows, before they are encoded.
        self.nbytes = nbytes
        #: Dense leaves that are written beside the rows, in this item.
        self.dense: DenseLeaves | None = None
        #: See ``Manifest.dense_bytes``.
        self.base_dense_bytes = 0
        self._plan = plan
        self._faults = faults
        self._extract_secs = extract_secs
        self._fsync = fsync
        self._runtime = runtime

    @property
    def released(self) -> threading.Event:
        """Returns an event that is set once nothing refers to the training state."""
        return self.rows.released

    def wait_copied(self) -> None:
        """Waits until copied rows have left the training state; held rows stay in it."""
        started = time.perf_counter()
        self.rows.wait()
        self._extract_secs += time.perf_counter() - started

    def write(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """Writes this process's shard into the item's directory, its manifest last.

        Args:
          item_dir: existing directory of the item, in the step's temporary directory.
          batch: writes the files, and fsyncs them afterwards.
          others: the processes that write the step.

        Raises:
          StorageError: the store reported an error; nothing was committed.
          ProcessMissing, ProcessFailed, Disagreement: as for ``StepWriters``.
        """
        plan, encoding = self._plan, BusyClock()
        started = time.perf_counter()
        try:
            if self.intent.kind == "delta" and self._faults is not None:
                raise TrackingError(f"step {self.intent.save_id.step}: {self._faults}")
            self.rows.land()
            landed = time.perf_counter()
            arrays = self._write_arrays(item_dir, batch, others, encoding)
        finally:
            self.abandon()
        segments, dense, layer = arrays
        written = time.perf_counter()
        record = None if dense is None else dense.record
        done = part.finish(
            plan,
            item_dir,
            segments,
            batch,
            others,
            layer=layer,
            dense=record,
            dense_bytes=self.base_dense_bytes,
        )
        dense_bytes = 0 if dense is None else dense.nbytes
        if plan.lineage is not None and others.process == 0:
            plan.lineage.wrote(self.intent.save_id, Written.of(done.record, done.crc32c))
        groups = plan.layout.groups
        self.report = SaveReport(
            intent=self.intent,
            rows=part.table_rows(segments),
            total_rows=sum(group.rows for group in groups),
            bytes_written=done.nbytes - dense_bytes,
            base_bytes=base_bytes(groups),
            extract_secs=self._extract_secs + landed - started,
            encode_secs=encoding.seconds,
            write_secs=written - landed - encoding.seconds,
            digest_secs=time.perf_counter() - written,
            tables=table_figures(groups, plan.layout.tables, segments),
            dense_bytes=dense_bytes,
            dense=() if dense is None else dense.leaves,
        )

    def _write_arrays(
        self, item_dir: Path, batch: FileBatch, others: StepWriters, encoding: BusyClock
    ) -> tuple[list[Segment], WrittenDense | None, LayerRef | None]:
        """Writes the arrays of a base as Zarr arrays, and those of a delta into a layer file."""
        rows, runtime, intent = self.rows, self._runtime, self.intent
        fields = functools.partial(part.planned_fields, self._plan, rows)
        if intent.kind == "base":

            def place(segment: str) -> Place:
                return ArrayPlace(item_dir, others.process, segment, batch)

            segments = part.write_segments(rows, place, fields, runtime, encoding)
            return segments, self._write_dense(place), None
        shard = LayerShard(
            item_dir,
            intent.save_id,
            None if intent.parent is None else intent.parent.save_id,
            batch,
            runtime,
            process=others.process,
            process_count=others.count,
        )
        try:
            segments = part.write_segments(rows, shard.place, fields, runtime, encoding)
            dense = self._write_dense(shard.place)
            blocks = () if dense is None else dense.record.segments
            return segments, dense, shard.finish([*segments, *blocks])
        except BaseException:
            shard.abandon()
            raise

    def _write_dense(self, place_of: Callable[[str], Place]) -> WrittenDense | None:
        if self.dense is None:
            return None
        intent = self.intent
        parent = None if intent.parent is None else intent.parent.save_id
        return self.dense.write_layer(place_of, intent.save_id, parent, rolling=intent.rolling)

    def complete(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """Does nothing: process 0's manifest describes all shards."""

    def write_alone(self, item_dir: Path, coordinator: Coordinator) -> None:
        """Writes and fsyncs this process's shard if others commit the step; see ``write``.

        Args:
          item_dir: existing directory of the item.
          coordinator: the processes that write it.
        """
        save_id = self.intent.save_id
        others = StepWriters(
            coordinator=coordinator,
            key=f"{save_id.run}-{save_id.attempt}",
            temporary=item_dir.parent,
            runtime=self._runtime,
        )
        files = FileBatch(item_dir, fsync=self._fsync, runtime=self._runtime)
        with others.working(), contextlib.closing(files) as batch:
            self.write(item_dir, batch, others)
            batch.force()
            if others.process > 0:
                others.wait("done")
            elif others.count > 1:
                others.report("done", {})
                # No later save of this coordinator does it.
                coordinator.delete(f"{others.prefix}/shard")

    def abandon(self) -> None:
        """Abandons a save that will not be written. Idempotent."""
        self.rows.release()
        if self.dense is not None:
            self.dense.release()


class RefusedSave:
    """A save that this process cannot make although the other processes have started it.

    Writing it fails, which reports to the others why the shard is missing.
    """

    def __init__(self, cause: Exception):
        """Created by the manager of one of several processes."""
        self.cause = cause

    def write(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """Raises the cause."""
        raise self.cause

    def complete(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """Never called."""


def base_bytes(groups: tuple[GroupEntry, ...]) -> int:
    """Returns the unencoded bytes of all rows of all fields."""
    return sum(group.rows * group.row_bytes for group in groups)
