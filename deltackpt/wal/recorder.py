# SPDX-License-Identifier: Apache-2.0
"""The WAL of one manager, as the training thread uses it.

All processes count calls alike, including calls that append nothing. The count numbers the record
and decides whether it is full, so a failure on one process invalidates one recovery point but not
the next. If a call saves a step instead of appending a record, all processes do: see
``save_requests``. A process therefore raises an error only after everything that the others wait
for, so that all stay at the same collective. Process 0 writes the header of an epoch.
``ended.EndedWal`` replaces the recorder in a manager without a WAL.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

from deltackpt import events
from deltackpt.errors import (
    Damaged,
    DeltackptError,
    OptionError,
    StorageError,
    TrackingError,
    WaitTimeout,
)
from deltackpt.format import wal_format
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.format.wal_format import Continues, EpochHeader
from deltackpt.outcomes import Appended
from deltackpt.reading.wal_index import RecoveryPoint, WalReader
from deltackpt.resources.runtime import Reservation
from deltackpt.save import dense_layout, pending_save
from deltackpt.save.branch import Clocks, Known, clocks_seen, discontinuity, settled
from deltackpt.save.dense_save import DenseKeeper
from deltackpt.session.run import Run, WalHooks, keeper
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, TouchState, clock_exhausted
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import store_path
from deltackpt.wal import kafka_writer, record_batch
from deltackpt.wal.audit import Audit
from deltackpt.wal.epoch import OpenEpoch, head_of, local_directory, write_head
from deltackpt.wal.named_rows import NamedRows, Rows, UncheckedRows, rows_of
from deltackpt.wal.record_batch import RecordedItem, items_of
from deltackpt.wal.save_requests import SaveRequests
from deltackpt.wal.writer import WalFailure, WalWriter

_GONE = "the WAL records below the restored recovery point are gone"
_UNNAMED = "an earlier call of append() did not name its rows, and there is no TouchState"
_LEFT = "the TouchState is older than that of the last WAL record"


class _Unmarked(TrackingError):
    """Rows changed that no record holds."""


@dataclasses.dataclass(eq=False)
class _Continuation:
    """What the next record continues from."""

    last: Known  # A save with the clocks of the newest batch: the next rows are touched since.
    root: SaveId | None  # The save below the first record; None once that is written.
    delta_base: SaveId  # Save or recovery point that the records replay onto.
    committed: bool  # Whether that is known to be committed.
    saved: Clocks  # Clocks of the newest save since, which the records may replay onto.
    called: Clocks | None = None  # Clocks of the newest call, whose record some process may have.

    def is_left(self, clocks: Clocks) -> bool:
        """Returns whether training went back, in memory, to before the last record.

        Replicas may hold rows of it that no later record or delta has. All processes get the same
        result, also one that has no record of that call.
        """
        return self.called is not None and clocks.is_older_than(self.called)

    def discontinuity(self, clocks: Clocks) -> str | None:
        """Returns why no record may follow with these clocks; see ``save.branch.discontinuity``."""
        if clocks.is_older_than(self.saved):
            return "the TouchState is older than that of the last save"
        return discontinuity(clocks, self.last)


class Recorder(WalHooks):
    """Captures records and passes them to the writer; used by one thread at a time."""

    def __init__(self, run: Run):
        self._run = run
        assert run.options.wal is not None
        self._options = run.options.wal
        self._reader = WalReader(run.root.wal_location)
        if run.topic is not None and run.coordinator.index == 0:
            kafka_writer.refuse_foreign(run.topic, self._reader)
        self._epoch: OpenEpoch | None = None
        #: The previous epoch, which the next one continues; None once the next one is open.
        self._ending: OpenEpoch | None = None
        self._save_requests = SaveRequests(run)
        #: The tables that the epoch header names.
        self._layout: Layout | None = None
        #: The directory of ``LocalWal``, until it is made: if removed later, it is not recreated.
        self._to_make = local_directory(run)
        #: How many times ``append`` was called.
        self._calls = 0
        #: The last call up to which all rows since the last record are known by name: ``ids`` name
        #: only rows since the last call. If it is another one, the next record reads the stamps; a
        #: step is saved if there are none.
        self._named_until = -1
        self._audit = Audit()
        self._trimming: Future[None] | None = None
        #: Whether this manager may have trimmed records that a run continued from.
        self._may_have_trimmed = False
        #: The manager's threads, with memory for records.
        self._runtime = run.runtime.with_memory(self._options.buffer_bytes)
        #: What the dense leaves of the newest full record decode to: never those of saves.
        self._references: DenseKeeper | None = None
        if self._options.dense == "delta":
            self._references = keeper(run.options.dense, run.runtime)
        self._start_run("")

    def _start_run(self, run: str) -> None:
        #: The run that these fields describe; a restore starts another.
        self._of_run = run
        self._chain: _Continuation | None = None
        #: Whether the epoch header of the run was written, or none is needed.
        self._begun = False
        #: Why this run writes no more records; None while it does.
        self._ended: str | None = None
        #: Whether recovery points of this run are known to be wrong but still count on disk.
        self._voiding = False
        #: Whether the next save is the first thing that records can continue from.
        self._needs_root = False
        #: Why a step is saved before the next record, which would be incomplete with ``ids`` alone.
        self._needs_step: str | None = None
        #: A former recovery point of this run, whose records were removed.
        self._lost: Continues | None = None
        self._newest_step = -1
        self._given_rows = UncheckedRows()
        #: Rows that no durable record of an ended epoch contains; the next epoch begins with them.
        self._pending_rows = NamedRows()
        self._committed: collections.deque[SaveId] = collections.deque(maxlen=2)

    @property
    def _writer(self) -> WalWriter | None:
        return None if self._epoch is None else self._epoch.writer

    # Marks.

    def count(self) -> None:
        """Counts an ``append()`` call, before anything that may fail only on this process."""
        self._calls += 1
        self._save_requests.call()

    def append(
        self,
        step: int,
        split: Split,
        touched: TouchState | None,
        ids: Mapping[str, object] | None,
        items: Mapping[str, object] | None,
        full: bool | None,
        *,
        started: float,
        may_commit: bool,  # Whether a save that has not failed is in flight.
    ) -> Appended | str:
        """Appends a record, or returns why a step must be saved; see the manager's ``append``."""
        options = self._options
        self._follow_run()
        number = self._calls
        if self._save_requests.agreed is not None and self._save_requests.agreed.restarts_wal:
            self._chain, self._begun, self._needs_root = None, False, True
            self._ending = None
            self._run.lineage.distrust(self._save_requests.agreed.reason)
        rows: Rows | None = None
        invalid: Exception | None = None
        chain: _Continuation | None = None
        is_named = False
        try:
            touched = self._run.tracking.touch_state(split, touched)
            self._run.end_hashing()
            marks = pending_save.marks_of(split, touched)
            clocks = pending_save.clocks_of(split, marks)
            if ids is not None and self._run.tracking.tracker is None:
                # Fingerprints name every row; the ids might omit some.
                try:
                    rows = rows_of(ids, split.layout, clocks)
                    is_named = not marks
                except Exception as error:
                    invalid = error  # Perhaps only here: all processes first begin the epoch.
            failure = self._report()
            reason, refused = self._due(split, clocks, may_commit, failure)
            if rows is not None and self._named_until != number - 1:
                if marks:
                    # The stamps name the rows of earlier calls, too.
                    self._requeue(rows)
                    rows = None
                else:
                    self._needs_root = True
                    if self._run.coordinator.count == 1:
                        reason = reason or _UNNAMED
                    elif reason is None:
                        self._save_requests.refused(split.layout, _UNNAMED)
                        refused = self._save_requests.waits_for_others(split.layout)
            if rows is not None:
                # Also if nothing is appended: the next record contains these rows.
                since = None if self._chain is None else self._chain.last.clocks
                self._given_rows.add(rows, since=since, until=clocks)
                is_named = True
            if ids is None and self._is_restored(step, split, touched):
                why = "skipped: it was restored, and nothing has changed since"
                return self._appended(step, None, why, started)
            self._check_above(step)
            if reason is None and self._chain is not None:
                self._chain.called = clocks
            if reason is None:
                if not self._begun or self._layout != split.layout:
                    # As before a save: without its WAL, a staging directory cannot be resumed from.
                    self._run.start_replication()
                    reason = self._open(split)
            if reason is None:
                # Steps that training left are newer than its records.
                self._run.roll_back(step)
            if invalid is not None:
                raise invalid
            recorded = items_of(items)
            if reason is not None:
                return reason
            if refused or self._ended is not None:
                why = self._ended or "this process waits for the next save of all processes"
                return self._appended(step, None, f"skipped: {why}", started)
            if failure is not None and options.on_failure == "raise":
                raise failure.error() from failure.cause
            if full is None:
                full = options.dense != "soft" and number % options.dense_every == 0
            full = full or not split.layout.dense
            assert self._chain is not None
            moved = settled(clocks, self._chain.last)
            if not self._submit(
                step, number, split, marks, clocks, moved, rows, recorded, full, started
            ):
                why = "skipped: the buffer is full; the next call also appends these rows"
                return self._appended(step, None, why, started)
            chain = self._chain
        except _Unmarked as error:
            self._suspect(str(error))
            if self._ended is None:
                return str(error)
            return self._appended(step, None, f"skipped: {error}", started)
        finally:
            if chain is None and rows is not None:
                self._requeue(rows)
            if chain is not None or (is_named and self._named_until == number - 1):
                self._named_until = number
        assert chain is not None
        if rows is None:
            self._given_rows.forget()
        chain.last = dataclasses.replace(chain.last, clocks=clocks, settled=moved)
        chain.root, self._newest_step = None, step
        kind = "full" if full else "soft"
        return self._appended(step, kind, f"{kind}: rows since the last record", started)

    def requeue_ids(self, ids: Mapping[str, object] | None) -> None:
        """Keeps the rows that a call named and that failed before ``append``.

        If its rows are unknown, the next record reads the stamps; without any, a step is saved.
        """
        chain = self._chain
        if ids is None or chain is None or chain.last.clocks.readings:
            return
        if self._run.lineage.run != self._of_run or self._named_until != self._calls - 1:
            return
        with contextlib.suppress(Exception):  # The caller raises its own error.
            self._requeue(rows_of(ids, chain.last.layout, chain.last.clocks))
            self._named_until = self._calls

    def _requeue(self, rows: Rows) -> None:
        """Keeps the rows that a call named, and did not append, for the next record."""
        if self._epoch is not None:
            self._epoch.writer.requeue(rows)
        elif self._chain is not None:  # Else the next record continues from a save to come.
            self._pending_rows.add(rows)

    def _submit(
        self,
        step: int,
        number: int,
        split: Split,
        marks: Sequence[Marks],
        clocks: Clocks,
        moved: Clocks | None,
        rows: Rows | None,
        items: Sequence[RecordedItem],
        full: bool,
        started: float,
    ) -> bool:
        """Passes a batch to the writer; returns whether there was room for it."""
        options, epoch, chain = self._options, self._epoch, self._chain
        assert epoch is not None and chain is not None
        assert chain.last.settled is not None
        since = clocks_seen(clocks, chain.last.settled)
        writer = epoch.writer
        losses, pending = writer.losses, writer.drain_pending()
        memory, batch = self._runtime.memory, None
        reservation = Reservation(memory)
        try:
            sources, given, segments = record_batch.segments_of(
                split, marks, rows, pending, since=since, always=full, runtime=self._runtime
            )
            nbytes = sum(one.nbytes for one in segments)
            if full:
                nbytes += writer.dense_bytes or dense_layout.nbytes(split)
            writer.require_thread()
            coalesces = options.when_full == "coalesce"
            if not reservation.acquire(nbytes, 0 if coalesces else options.deadline_secs):
                if coalesces:
                    writer.requeue(pending)
                    return False
                raise WaitTimeout(
                    f"append: expected room for {nbytes:,} bytes within {options.deadline_secs:g} "
                    f"s (WalOptions.deadline_secs), found {memory.reserved_bytes:,} bytes that are "
                    "not durable yet; check the disk. No touched row is lost: the next append() "
                    "contains them"
                )
            found = self._audit.compare(sources, given, clocks=clocks, since=since, settled=moved)
            if found is not None:
                raise _Unmarked(found)
            batch = record_batch.capture(
                SaveId(epoch.head.run, step, number),
                chain.root,
                self._run,
                split,
                segments,
                full=full,
                items=items,
                runtime=self._runtime,
                references=self._references,
                reservation=reservation,
                started=started,
            )
            batch.blocked_secs = time.perf_counter() - started
            writer.submit(batch, losses)
        except BaseException:
            writer.requeue(pending)
            if batch is None or not batch.queued:
                if batch is not None:
                    batch.release()
                reservation.release()
            raise
        return True

    def _is_restored(self, step: int, split: Split, touched: TouchState | None) -> bool:
        """Returns whether a loop that made no step appends the restored point again at its end."""
        known = self._run.lineage.newest_known
        point = None if known is None else known.continues
        if point is None or point.save_id.step != step or self._newest_step >= step:
            return False
        return self._run.restored is not None and self._run.is_restored(split, touched)

    def _check_above(self, step: int) -> None:
        newest = self._newest_step
        known = self._run.lineage.newest_known
        if known is not None:
            below = known.info.save_id if known.continues is None else known.continues.save_id
            newest = max(newest, below.step - (known.continues is None))
        if step <= newest:
            raise OptionError(
                f"step {step}: expected a step above {newest}, the newest that was appended or "
                "restored, found an older or equal one; append each step once"
            )

    def _due(
        self, split: Split, clocks: Clocks, may_commit: bool, failure: WalFailure | None
    ) -> tuple[str | None, bool]:
        """Returns why a step must be saved, and whether only this process cannot append."""
        if any(clock_exhausted(reading.clock) for reading in clocks.readings):
            return "the clock is exhausted", False
        reason = self._why_not(split, clocks)
        requests, agreed = self._save_requests, self._save_requests.agreed
        if agreed is not None:
            return reason or agreed.reason, False
        if (reason is not None or self._needs_root) and requests.waits_for_others(split.layout):
            return None, True
        if reason is not None:
            return reason, False
        reason = self._run.lineage.distrusted or self._needs_step
        if reason is None and not may_commit and not self.is_base_committed:
            reason = "the save that the WAL continues from has failed"
        return requests.reason_to_save(self._writer, split.layout, failure, reason), False

    def _why_not(self, split: Split, clocks: Clocks) -> str | None:
        """Returns why a step must be saved first; None if a record can be appended."""
        # All processes get the same result, unless one failed in its shard of a save, since it
        # depends on nothing else that differs between them.
        reason = "there is no step or recovery point that a WAL record could continue from"
        if self._chain is not None:
            if self._chain.is_left(clocks):
                return _LEFT  # Saved as a base: see ``check``.
            reason = self._layout_mismatch(self._chain.last, split) or self._chain.discontinuity(
                clocks
            )
        if reason is not None and (known := self._run.lineage.newest_known) is not None:
            # It may be newer than what the records continue from.
            reason = self._layout_mismatch(known, split) or discontinuity(clocks, known)
            if reason is None and known.continues is not None and known.continues == self._lost:
                reason = _GONE
            if reason is None:
                self._continue_from(known)
                self._named_until = -1
        return reason

    def _layout_mismatch(self, known: Known, split: Split) -> str | None:
        same = known.layout == split.layout
        return None if same else "the tables are not those of the step below"

    def _continue_from(self, known: Known) -> None:
        """Makes the next record continue from a save, or from the point restored above it."""
        delta_base = known.info.save_id if known.continues is None else known.continues.save_id
        committed = known.continues is not None or self._run.lineage.newest_committed == delta_base
        self._chain = _Continuation(known, delta_base, delta_base, committed, known.clocks)
        self._audit.start(known)

    def _report(self) -> WalFailure | None:
        """Reports what has happened in the background; returns what has failed."""
        behind = None if self._epoch is None else self._epoch.lagging()
        if behind is not None:
            began = time.perf_counter()
            self._run.emit_failure("append", None, behind, began, log_message=True)
        writer = self._writer
        failure = None if writer is None else self._report_writes(writer)
        if failure is not None and self._options.on_failure == "save":
            events.warn(str(failure.error()))
        return failure

    def _report_writes(self, writer: WalWriter) -> WalFailure | None:
        """Reports durable records and failed ones; returns the failure."""
        while writer.reports:
            self._run.emit(writer.reports.popleft())
        if writer.failure is not None:
            # After a takeover, a write may fail with any error. If the start of the other trainer
            # failed, it has returned the lease.
            with contextlib.suppress(StorageError):
                self._run.check_lease()
        failure = writer.pop_failure()
        if failure is not None:
            for step in failure.steps:
                self._run.emit_failure("append", step, failure.cause, failure.since)
            if self._epoch is not None and self._epoch.is_removed:
                # The records up to the point that training continues from may be missing, too.
                self._may_have_trimmed = True
                self._needs_step = "the WAL was removed"
                self.distrust(self._needs_step)
        return failure

    def _appended(
        self, step: int, kind: Literal["full", "soft"] | None, reason: str, started: float
    ) -> Appended:
        return Appended(
            step=step,
            kind=kind,
            reason=reason,
            blocked_secs=time.perf_counter() - started,
            recovery=self.recovery(),
        )

    # What is durable.

    def recovery(self, *, fresh: bool = False) -> RecoveryPoint | int | None:
        """Returns the newest point or step that a restore finds now; see ``newest_point``."""
        newest = self._run.lineage.newest_committed
        step = None if newest is None else newest.step
        if self._run.lineage.run != self._of_run:
            # Training has gone back: what it left leads nowhere, and nothing of it is trimmed.
            return step
        if newest is not None:
            self._note_committed(newest)
        epoch, chain = self._epoch, self._chain
        point = None
        if epoch is not None and chain is not None and self.is_base_committed:
            epoch.note_base(chain.delta_base)  # Before a point that needs it is acknowledged.
            point = epoch.newest_point(fresh=fresh)
        if point is not None and (step is None or point.step > step):
            return point
        return step

    @property
    def is_base_committed(self) -> bool:
        """Returns whether the save that the records replay onto, if any, is committed."""
        chain = self._chain
        if chain is not None and not chain.committed:
            chain.committed = self._run.lineage.newest_committed == chain.delta_base
        return chain is None or chain.committed

    def wait(self, timeout_secs: float) -> RecoveryPoint | int | None:
        """Waits until all records of this process are durable; returns ``recovery``."""
        writer = self._writer
        if writer is not None:
            writer.wait(timeout_secs)
            failure = self._report_writes(writer)
            if failure is not None:
                raise failure.error() from failure.cause
        self._void()
        if (found := self._audit.poll()) is not None:
            self._suspect(found)
            raise TrackingError(f"append: {found}")
        return self.recovery(fresh=True)

    def wait_trimmed(self) -> None:
        """Waits until trimming has ended; only a later call of this manager starts it again."""
        if self._trimming is not None:
            concurrent.futures.wait([self._trimming])

    def wait_durable_or_warn(self) -> None:
        """Waits until all records are durable or failed, which the next ``append()`` reports.

        Trimming has then ended, so no recovery point is removed while it is being restored.
        """
        self._void()
        self.wait_trimmed()
        if (writer := self._writer) is not None:
            try:
                writer.wait(self._options.deadline_secs)
            except (WaitTimeout, StorageError) as error:
                events.warn(str(error))
        if (found := self._audit.poll()) is not None:
            self._suspect(found)

    def close(self) -> None:
        """Ends the writer once all records are durable, or have failed."""
        self._save_requests.close()
        if self._epoch is not None:
            self._epoch.close()
        self.wait_trimmed()

    # Called by saves; see ``session.run.WalHooks``.

    @property
    def begun(self) -> str:
        """See ``WalHooks``."""
        return self._of_run if self._begun else ""

    def start_epoch(self, split: Split) -> None:
        """See ``WalHooks``: writes the header of an epoch if this run has none."""
        self._follow_run()
        if not self._begun:
            self._open(split)

    def _open(self, split: Split) -> str | None:
        """Begins an epoch in all processes at once; returns why all must save first, if so."""
        run = self._run
        known, continues = run.lineage.newest_known, run.lineage.forked_from
        if self._ended is not None or (known is not None and known.continues != continues):
            continues = None
        if self._begun:
            # Its points count until the save of the new tables or leaves is committed.
            self._ending = None if self._ended is not None else self._epoch
        ending = self._ending

        def write() -> tuple[str, bool]:
            leads = True
            if continues is not None and known is not None and self._may_have_trimmed:
                leads = self._reader.leads(known.info.save_id, continues)
            run.check_lease()
            if self._to_make is not None:
                DurableDir(Path(self._to_make)).create()
                self._to_make = None
            base, fork = None if known is None else known.info.save_id, continues if leads else None
            if ending is not None and continues is None and base is not None:
                fork = self._end_of(ending, base)
            head = write_head(run, self._reader, base, fork, split.layout)
            return wal_format.epoch_header_bytes(head).decode("latin-1"), leads

        self._begun = False  # Until the epoch is open.
        sent, leads = run.coordinator.from_process_0("starting a WAL epoch", write, fatal=True)
        if not leads:
            self._chain, self._lost = None, continues
        self._save_requests.end()
        self._close_epoch()
        with run.coordinator.together("looking for the WAL", fatal=True):
            head = wal_format.epoch_header_from(sent.encode("latin-1"), name="WAL epoch header")
            head = head_of(run, self._reader, head)
            epoch = OpenEpoch(run, head, self._runtime, self._references)
        epoch.writer.requeue(self._pending_rows.drain())
        self._epoch, self._ending, self._ended = epoch, None, None
        self._save_requests.start_epoch(epoch, split.layout, self._calls)
        self._begun, self._layout, self._voiding = True, split.layout, False
        return None if leads else _GONE

    def _end_of(self, epoch: OpenEpoch, base: SaveId) -> Continues | None:
        """Returns an epoch's newest point after the committed steps and before a save, or None."""
        point, newest = epoch.newest_point(fresh=True), self._run.lineage.newest_committed
        end = epoch.head.continues
        if point is not None:
            end = Continues(epoch=point.epoch, save_id=point.save_id)
        committed = -1 if newest is None else newest.step
        return end if end is not None and committed < end.save_id.step < base.step else None

    def check(self, split: Split, marks: Sequence[Marks]) -> None:
        """See ``WalHooks``."""
        self._follow_run()
        if (found := self._audit.poll()) is not None:
            self._suspect(found)
        if self._chain is not None and self._chain.is_left(pending_save.clocks_of(split, marks)):
            self._run.lineage.distrust(_LEFT)
        missing = self._given_rows.missing(split, marks, self._runtime)
        self._given_rows.compared()
        if self._named_until != self._calls:
            self._given_rows.forget()
        if missing is not None:
            self._needs_step = "append(ids=...) omitted touched rows"
            self.distrust(self._needs_step)
            raise TrackingError(
                f"append: expected ids to name every touched row, found {missing} marked but not "
                "named; no recovery point of this run can be restored any more. Pass append() "
                "all ids of the steps since the previous call, and save again"
            )

    def saved(self) -> None:
        """See ``WalHooks``: records continue from the save if what they replayed onto failed."""
        self._follow_run()
        lineage = self._run.lineage
        if (newest := lineage.newest_committed) is not None:
            self._note_committed(newest)
        self._may_have_trimmed = True
        known, chain = lineage.newest_known, self._chain
        assert known is not None
        if (
            chain is not None
            and known.clocks.readings
            and (chain.is_left(known.clocks) or chain.discontinuity(known.clocks))
        ):
            # Another TouchState than that of the records: rows may have changed without a stamp.
            chain = None
            self._given_rows.forget()
        if (
            chain is None
            or self._needs_root
            or not self.is_base_committed
            or chain.last.layout != known.layout
        ):
            self._continue_from(known)
            self._named_until, self._needs_root = self._calls, False
        else:
            chain.saved = known.clocks
        self._audit.start(known)
        self._needs_step = None
        writer = self._writer
        self._save_requests.saved(writer)
        if writer is not None:
            writer.roll()

    def refused(self, split: Split) -> None:
        """See ``WalHooks``: this process can append again only after a save of all processes."""
        self._save_requests.missed(split.layout, "one of them failed in its part of the last save")

    def _suspect(self, found: str) -> None:
        """Invalidates the points of this run, and makes the next save of all processes a base."""
        events.warn(f"the WAL is invalid, and the next step is saved as a base: {found}")
        self._given_rows.forget()
        self._run.suspect(found)
        self.distrust(found)

    def distrust(self, reason: str) -> None:
        """See ``WalHooks``: invalidates this run's points; the next call retries what failed."""
        self._follow_run()
        if self._epoch is None:  # A header that continues it may be written already.
            self._epoch = self._ending
        self._ending = None
        if self._epoch is None:
            if self._run.coordinator.count == 1:
                # Records to come must not continue from a step that is older than the base.
                self._chain, self._needs_root = None, True
                self._audit.start(None)
            return
        started = time.perf_counter()
        # From here on no record is written and no point of the run is acknowledged.
        self._chain, self._voiding, self._needs_root = None, True, True
        self._audit.start(None)
        if self._run.coordinator.count > 1:
            # Records of the others make no recovery point without ours. The others may notice this
            # later, so all save at a call that they agree on.
            self._ended = reason
            self._save_requests.request_save(reason, restarts_wal=True)
            if self._layout is not None:
                self._save_requests.refused(self._layout, reason)
        else:
            self._begun = False
        try:
            self._void()
        except DeltackptError as error:
            self._run.emit_failure("append", None, error, started)
            events.warn(f"the WAL has invalid recovery points that are still listed: {error}")

    def deleted(self, step: SaveId, *, is_needed: bool) -> None:
        """See ``WalHooks``: the next record continues from a step that is saved first."""
        if step in self._committed:
            self._committed.remove(step)
        # Training may return to this branch if the restore of another step was only an inspection.
        is_continued = self._chain is not None and self._chain.delta_base == step
        if not (self._run.lineage.forget(step) or is_continued or is_needed):
            return
        self._chain = None
        self._audit.start(None)
        if not is_needed:
            return

        def write() -> None:
            self._run.check_lease()
            self._write_end()  # Without a parent point: no trimmed record is missed.

        self._run.coordinator.from_process_0("ending the WAL", write, fatal=True)
        self._save_requests.end()
        self._begun, self._ending = False, None
        self._close_epoch()

    def _close_epoch(self) -> None:
        if self._epoch is not None:
            self._pending_rows.add(self._epoch.close())
            self._epoch = None

    def _write_end(self) -> None:
        """Writes a header without a WAL, which invalidates everything appended before."""
        base = self._committed[-1] if self._committed else None
        write_head(self._run, self._reader, base, None)

    def _void(self) -> None:
        """Invalidates the points of this run if ``distrust`` could not."""
        epoch = self._epoch
        if not self._voiding or epoch is None:
            return
        if self._counts(epoch.head):
            # Otherwise the header exists, the WAL is gone, another trainer has the root, or only
            # process 0 writes headers, at the save that was requested of all.
            self._run.check_lease()
            self._write_end()
        # Stamps and ids no longer identify the touched rows, so pending rows are meaningless.
        epoch.close()
        epoch.progress.reset()  # The other processes must not count its records either.
        epoch.progress.close()
        self._pending_rows = NamedRows()
        self._epoch, self._voiding = None, False

    def _counts(self, head: EpochHeader) -> bool:
        """Returns whether an epoch's records still count and no other run has followed."""
        headers, newest = WalReader(store_path(self._run.local.wal_dir)), None
        number = next(iter(headers.numbers()), None)
        while number is not None:
            try:
                found = headers.head(number)
            except Damaged:
                # The newest header may be this one; earlier epochs may be trimmed.
                return newest is None
            newest = newest or found
            if found == head:
                return newest.run == head.run
            number = None if found.continues is None else found.continues.epoch
        return False

    def _follow_run(self) -> None:
        """Restarts if a restore has begun another run."""
        lineage = self._run.lineage
        if lineage.run == self._of_run:
            return
        self._close_epoch()
        self._ending = None
        self._audit.start(None)
        self._save_requests.forget()
        self._start_run(lineage.run)
        if (newest := lineage.newest_committed) is not None:
            self._committed.append(newest)

    def _note_committed(self, newest: SaveId) -> None:
        if self._committed and self._committed[-1] == newest:
            return
        self._committed.append(newest)
        busy = self._trimming is not None and not self._trimming.done()
        if len(self._committed) < 2 or self._epoch is None or busy:
            return
        self._trimming = self._runtime.start(_truncate, self._run, self._epoch, self._committed[0])


def _truncate(run: Run, epoch: OpenEpoch, oldest: SaveId) -> None:
    try:
        if epoch.survives_node and (replication := run.replication) is not None:
            # If this node is lost, a restore replays the records onto a step that was uploaded.
            uploaded = replication.oldest_needed()
            if uploaded is None or uploaded.run != oldest.run:
                return
            oldest = min(oldest, uploaded, key=lambda one: one.step)
        epoch.truncate(oldest)
    except Exception as error:  # No caller awaits the outcome.
        text = str(error) if isinstance(error, StorageError) else repr(error)
        events.warn(f"unneeded WAL segments were not removed: {text}")
