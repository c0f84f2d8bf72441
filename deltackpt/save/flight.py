# SPDX-License-Identifier: Apache-2.0
"""One save in flight: its rows were taken from the training state, the background writes them.

``snapshot.take`` is the only part that blocks training; what it makes is a ``PendingSave``. What
that writes in the background is either *copied* (the touched rows, in staging memory) or *held*
(views of the training state, for a base or for a delta larger than the staging budget): see
``taken``. ``PendingSave.released`` is set as soon as nothing of the training state is referred to
any more.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

from deltackpt import events
from deltackpt.errors import TrackingError
from deltackpt.format.figures import table_figures
from deltackpt.format.manifest import GroupEntry
from deltackpt.resources.staging import Staging
from deltackpt.save import part
from deltackpt.save.lineage import Intent, Lineage
from deltackpt.save.part import PartPlan
from deltackpt.save.pieces import BusyClock
from deltackpt.save.rendezvous import Rendezvous, of_this_process
from deltackpt.save.taken import TakenRows
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, TouchState, plain

_PROCEED_SECS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How saves are staged and written.

    Attributes:
      fsync: whether every file is on disk before its part counts as written.
      staging_bytes: host memory for copied rows, over all saves in flight.
      digests: digest files that the commit promises; see ``Manifest.digests``.
      sampled_proof: whether saves prove a sample of the rows: see ``save.proof``.
      processes_secs: how long a process that has written its part waits for the others.
    """

    fsync: bool = True
    staging_bytes: int = 1 << 30
    digests: tuple[str, ...] = ("item",)
    sampled_proof: bool = True
    processes_secs: float = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Embeddings:
    """The tables and slots of one state, and what saving them needs: our checkpointable.

    Attributes:
      split: the state, split by ``tables.split``; its dense leaves are not saved here.
      touched: a TouchState given beside those of the state; a row is touched if any of them says
        so. Without any the save is a base.
      lineage: what the trainer knows of its saves; None gives a base of a run of its own.
      options: how to stage and write.
      staging: the pool shared by the saves of one manager.
      force_base: take a base whatever the policy says.
    """

    split: Split
    touched: TouchState | None = None
    lineage: Lineage | None = None
    options: PipelineOptions = PipelineOptions()
    staging: Staging | None = None
    force_base: bool = False

    @property
    def marks(self) -> tuple[Marks, ...]:
        """The TouchStates of the state, and the one given where it is another."""
        given = self.touched
        if given is None or any(marks.state.clock is given.clock for marks in self.split.marks):
            return self.split.marks
        return *self.split.marks, Marks("", plain(given))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What the background half of a save did; its stages are those of ``events.SaveEvent``.

    ``rows``, ``bytes_written`` and ``tables`` are of this process's part, ``base_bytes`` is what
    all rows of tables and slots take unencoded.
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


class PendingSave:
    """A save whose rows were taken; ``write`` runs once, in the background."""

    def __init__(
        self,
        plan: PartPlan,
        rows: TakenRows,
        *,
        faults: str | None,
        extract_secs: float,
        processes_secs: float,
    ):
        """Made by ``snapshot.take``.

        Args:
          plan: what is written.
          rows: what was taken.
          faults: what the sampled proof found; None where it holds.
          extract_secs: what taking it has cost.
          processes_secs: how long the other processes are waited for.
        """
        self.intent = plan.intent
        #: Why the touched rows were not trusted, and all rows are saved; None where they were.
        self.doubt = faults if plan.intent.kind == "base" else None
        #: ``write`` waits for it: busy beside the start of Orbax's own threads it would cost
        #: each of them, and so the training thread, a switch interval of the interpreter.
        self.proceed = threading.Event()
        self.report: SaveReport | None = None
        self.failure: BaseException | None = None
        self.rows = rows
        self._plan = plan
        self._faults = faults
        self._extract_secs = extract_secs
        self._processes_secs = processes_secs

    @property
    def released(self) -> threading.Event:
        """Set as soon as nothing of the training state is referred to any more."""
        return self.rows.released

    def wait_copied(self) -> None:
        """Returns when copied rows have left the training state; a held state has not yet."""
        started = time.perf_counter()
        try:
            self.rows.wait()
        except BaseException as error:
            self.failure = error  # Nothing is written of it.
            raise
        self._extract_secs += time.perf_counter() - started

    def write(self, item_dir: Path) -> SaveReport:
        """Writes this process's part into the item's directory, its manifest last.

        Args:
          item_dir: existing directory of the item, in the step's temporary directory.

        Raises:
          StorageError: the store refused; nothing was committed.
          ProcessMissing, ProcessFailed, Disagreement: as ``Rendezvous``.
        """
        self.proceed.wait(_PROCEED_SECS)
        others = of_this_process(item_dir.parent, self._processes_secs)
        try:
            if self.failure is not None:
                raise self.failure
            self.report = self._write(item_dir, others)
        except BaseException as error:
            self.failure = error
            others.fail(error)
            raise
        return self.report

    def _write(self, item_dir: Path, others: Rendezvous) -> SaveReport:
        plan, encoding = self._plan, BusyClock()
        started = time.perf_counter()
        try:
            if self.intent.kind == "delta" and self._faults is not None:
                raise TrackingError(f"step {self.intent.save_id.step}: {self._faults}")
            self.rows.land()
            landed = time.perf_counter()
            segments = part.write_segments(plan, item_dir, others.process, self.rows, encoding)
        finally:
            self.rows.release()
        written = time.perf_counter()
        done = part.finish(plan, item_dir, segments, others)
        groups = plan.layout.groups
        records = [segment.record for segment in segments]
        return SaveReport(
            intent=self.intent,
            rows=part.table_rows(segments),
            total_rows=sum(group.rows for group in groups),
            bytes_written=done.nbytes,
            base_bytes=base_bytes(groups),
            extract_secs=self._extract_secs + landed - started,
            encode_secs=encoding.seconds,
            write_secs=written - landed - encoding.seconds,
            digest_secs=time.perf_counter() - written,
            tables=table_figures(groups, plan.layout.tables, records),
        )

    def abandon(self) -> None:
        """Gives up a save that will not be written; safe to call at any time."""
        self.proceed.set()
        self.rows.release()


class RefusedSave:
    """A save that this process cannot take, and the other processes begin all the same.

    It goes through Orbax like a ``PendingSave``, so that no process waits for this one at a
    barrier, and tells the others why there will be no part of it.
    """

    def __init__(self, cause: Exception):
        """Made by the manager of one of several processes."""
        self.failure: BaseException | None = cause
        self._cause = cause

    def write(self, item_dir: Path) -> SaveReport:
        """Leaves a note for the others, and raises the cause."""
        of_this_process(item_dir.parent, 0.0).fail(self._cause)
        raise self._cause


def base_bytes(groups: tuple[GroupEntry, ...]) -> int:
    """Bytes that all rows of all fields take unencoded."""
    return sum(group.rows * group.row_bytes for group in groups)
