# SPDX-License-Identifier: Apache-2.0
"""Saves of a manager, one at a time: started on the training thread, committed by Orbax's.

The tables go through our handler, dense leaves through Orbax's own PyTree handler, further items
through theirs, and Orbax commits the step. A save that failed in the background is found by the
next call, which reports it once and is itself taken.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from deltackpt import events, processes
from deltackpt.errors import (
    DeltackptError,
    OptionError,
    ProcessMissing,
    StorageError,
    WaitTimeout,
)
from deltackpt.format import names
from deltackpt.handlers import dense, v0, waiting
from deltackpt.handlers.engine import Engine
from deltackpt.handlers.flight import Background, Failure, InFlight, SaveArguments
from deltackpt.handlers.items import save_args
from deltackpt.handlers.orbax_private import barrier_secs
from deltackpt.handlers.run import Run
from deltackpt.options import WhenBusy
from deltackpt.outcomes import Saved
from deltackpt.save import snapshot
from deltackpt.save.flight import (
    Embeddings,
    PendingSave,
    PipelineOptions,
    RefusedSave,
    SaveReport,
)
from deltackpt.state import tables
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import TouchState

#: Reports that wait for ``wait()``: a loop may never call it.
_REPORTS = 1000


class Saver:
    """Starts saves and settles them; used by one thread at a time."""

    def __init__(self, run: Run, extra: dict[str, ocp.CheckpointHandler], owner: object):
        """Opens Orbax's manager.

        Args:
          run: the manager's run.
          extra: handlers of further items, by name.
          owner: the manager, which is kept while a save is in flight.
        """
        self._run = run
        self._extra = extra
        self._background = Background(run, owner)
        #: The step of a save that was put off.
        self.due: int | None = None
        self.reports: collections.deque[SaveReport] = collections.deque(maxlen=_REPORTS)
        #: Whether it was said that no TouchState moves.
        self._told_stands_still = False
        #: Whether a failed save of several processes left its temporary directory.
        self._leftovers = False
        self.engine = Engine(run, extra, self._background)

    @property
    def committed(self) -> bool:
        """Whether the newest save that was handed over is visible."""
        return self._background.committed_at > 0

    @property
    def in_flight(self) -> InFlight | None:
        """The save that is not settled yet."""
        return self._background.flight

    # On the training thread.

    def save(
        self,
        step: int,
        state: Any,
        arguments: SaveArguments,
        when_busy: WhenBusy,
        started: float,
    ) -> Saved:
        """Settles the save before, and starts one; as ``CheckpointManager.save``.

        Args:
          step: the training step.
          state: the whole training state.
          arguments: what else was given.
          when_busy: what to do while a save is in flight.
          started: when the caller began to wait, of ``time.perf_counter()``.
        """
        run = self._run
        items = save_args(arguments.items, self._extra)
        arguments = dataclasses.replace(arguments, items=items)
        if when_busy != "wait" and self.all_busy():
            return self._not_now(step, started)
        failure = self.settle(run.options.timeouts.save_secs)
        self.due = None
        if failure is not None and isinstance(failure.cause, ProcessMissing):
            # Orbax would wait for that process on the training thread.
            raise failure.error(None) from failure.cause
        try:
            saved = self._start(step, state, arguments, started)
        except Exception as error:
            if failure is not None:
                error.add_note(f"Before that, {failure.error(None)}")
            if not _goes_on(error):
                run.tell_failure("save", step, error, started)
            raise
        self._warn_of_tracking()
        if failure is not None:
            raise failure.error(saved) from failure.cause
        return saved

    def split(self, state: Any, *, dense_fault: Callable[[Any], str | None] | None = None) -> Split:
        """A state's tables, slots and dense leaves; its marks, unless rows are found by hashes."""
        split = tables.split(state, self._run.choice, dense_fault=dense_fault)
        # Fingerprints see more than the marks in a state.
        return split if self._run.tracker is None else dataclasses.replace(split, marks=())

    def _start(self, step: int, state: Any, arguments: SaveArguments, started: float) -> Saved:
        run = self._run
        if run.among.count == 1:
            # Of several processes one holds the lease: its commit checks it, and tells the others.
            run.root.check_lease()
        # First of all: what cannot be stored leaves even a rollback undone.
        split = self.split(state, dense_fault=dense.fault)
        if run.tracker is None and run.lineage.can_go_back:
            # Looked at only then: reading the clocks waits for the step that computes them.
            self._go_back(split, arguments.touched)
        run.check_above(step)
        if run.roll_back(step):
            self.engine.restart()  # Orbax forgets what was moved.
        pending = self._snapshot(step, split, arguments)
        self._hand_over(step, split, pending, arguments)
        flight = self._background.flight = InFlight(step, pending, started)
        if isinstance(pending, RefusedSave):
            assert pending.failure is not None
            flight.told = True
            raise pending.failure
        try:
            pending.wait_copied()
        except BaseException as error:
            flight.failure, flight.told = error, True
            raise
        finally:
            pending.proceed.set()
        if run.options.deltas.base_snapshot == "block" or _has_host_arrays(split):
            self._wait_released(pending, step)
        blocked_secs = flight.blocked_secs = time.perf_counter() - started
        intent = pending.intent
        return Saved(step=step, kind=intent.kind, reason=intent.reason, blocked_secs=blocked_secs)

    def _snapshot(
        self, step: int, split: Split, arguments: SaveArguments
    ) -> PendingSave | RefusedSave:
        """Takes the snapshot; one of several processes tells the others where it cannot."""
        run = self._run
        embeddings = Embeddings(
            split=split,
            touched=self._touched_rows(split, arguments.touched),
            lineage=run.lineage,
            options=PipelineOptions(
                sampled_proof=run.options.deltas.sampled_proof and run.tracker is None,
                fsync=run.fsync,
                staging_bytes=run.options.writes.staging_bytes,
                digests=("item", "step"),
                processes_secs=run.options.timeouts.processes_secs,
            ),
            staging=run.staging,
            force_base=arguments.force_base,
        )
        attempt = run.lineage.attempts + 1
        try:
            return snapshot.take(embeddings, step, run.root.step_dir(step))
        except Exception as error:
            if run.among.count == 1:
                raise
            run.lineage.count_attempts(attempt)
            return RefusedSave(error)

    def _hand_over(
        self,
        step: int,
        split: Split,
        pending: PendingSave | RefusedSave,
        arguments: SaveArguments,
    ) -> None:
        """Has Orbax write and commit what was snapshotted, in its threads."""
        run = self._run
        self._background.begin()
        args: dict[str, ocp.args.CheckpointArgs] = {run.item: v0.DeltaSave(pending)}
        if split.layout.dense:
            args[names.DENSE_ITEM] = dense.save_args(split.dense)
        try:
            with barrier_secs(run.options.timeouts.processes_secs):
                self.engine.orbax.save(
                    step,
                    args=ocp.args.Composite(**args, **(arguments.items or {})),
                    metrics=arguments.metrics,
                    force=True,
                )
        except BaseException as error:
            self._give_up(pending)
            self.engine.orbax.reload()
            if run.among.count > 1 and isinstance(error, jax.errors.JaxRuntimeError):
                raise run.among.named(f"starting the save of step {step}", error) from error
            raise

    def _touched_rows(self, split: Split, given: TouchState | None) -> TouchState | None:
        tracker = self._run.tracker
        if tracker is None:
            return given
        if given is not None:
            raise OptionError(
                'touched: expected none with tracking="fingerprints", which finds the rows by '
                'itself, found a TouchState; leave it out, or use tracking="marks"'
            )
        return tracker.look(split.fields, split.layout)

    def _go_back(self, split: Split, touched: TouchState | None) -> None:
        """Forgets a restore that was only looked at: training goes on with what it had before."""
        lineage = self._run.lineage
        marks = Embeddings(split=split, touched=touched).marks
        if lineage.go_back(snapshot.clocks_of(split, marks)):
            self._run.restored = lineage.restored

    def _warn_of_tracking(self) -> None:
        """Says what the sampled proof found, and once where no TouchState moves."""
        assert self.in_flight is not None
        pending = self.in_flight.pending
        assert isinstance(pending, PendingSave)
        step = pending.intent.save_id.step
        if pending.doubt is not None:
            events.warn(f"step {step} is saved as a base, since {pending.doubt}")
        elif pending.intent.stands_still and not self._told_stands_still:
            self._told_stands_still = True
            events.warn(
                f"step {step}: no TouchState has moved since the parent of this delta, which "
                "therefore holds no row; if the tables did change, give save() the TouchState that "
                "the training step returned (touched = touched.mark(touched, ids))"
            )

    def _give_up(self, pending: PendingSave | RefusedSave) -> None:
        """Ends a save that failed; it stays the parent of the next where it was committed."""
        if isinstance(pending, PendingSave):
            self._run.lineage.failed(pending.intent.save_id)
            pending.abandon()

    def _wait_released(self, pending: PendingSave, step: int) -> None:
        limit = self._run.options.timeouts.save_secs
        if not pending.released.wait(limit):
            raise WaitTimeout(
                f"step {step}: expected its tables to be written within {limit} s "
                "(timeouts.save_secs), found the write still running; look at the storage"
            )

    def _not_now(self, step: int, started: float) -> Saved:
        flight = self.in_flight
        # Of several processes process 0 may be the only one that is not done yet.
        which = "a step" if flight is None else f"step {flight.step}"
        reason = f"{which} is still being saved"
        if self._run.options.writes.when_busy == "coalesce":
            self.due = step
            reason += "; due, save_if_due() takes it"
        return Saved(
            step=step,
            kind=None,
            reason=f"skipped: {reason}",
            blocked_secs=time.perf_counter() - started,
        )

    def busy(self) -> bool:
        """Whether a save of this process is in flight."""
        return self.in_flight is not None and self.engine.orbax.is_saving_in_progress()

    def all_busy(self) -> bool:
        """Whether a save is in flight: what process 0 finds, on every process."""
        return self._run.among.agree("asking for a free writer", self.busy())

    # The end of a save.

    def settle(self, timeout_secs: float, *, leaving: bool = False) -> Failure | None:
        """Waits for the save in flight, if any, and reports it.

        Args:
          timeout_secs: the longest wait.
          leaving: the program ends: nothing is opened anew after a failure.

        Raises:
          WaitTimeout: it goes on.
        """
        flight, run = self.in_flight, self._run
        if flight is None:
            return None
        failure = None
        try:
            waiting.bounded(
                self.engine.orbax.wait_until_finished, timeout_secs, f"the save of {flight.step}"
            )
        except Exception as error:
            if _goes_on(error):
                raise
            # Orbax raises what came last; what came first says why.
            cause = flight.failure or flight.pending.failure
            failure = Failure(flight.step, cause if isinstance(cause, Exception) else error)
            self._give_up(flight.pending)
            if isinstance(failure.cause, DeltackptError) and failure.cause.leaves_doubt:
                run.lineage.distrust(f"the touched rows of step {flight.step} were wrong")
            if not leaving:
                self._start_anew()
        self._background.flight = None
        if failure is None:
            run.newest = flight.step
            if self._leftovers:
                run.root.remove_leftovers()
                self._leftovers = False
            self._report(flight)
            try:
                run.root.collect(run.lineage.protected)
            except StorageError as error:
                events.warn(f"what nothing needs could not be removed: {error}")
        elif not flight.told:
            run.tell_failure("save", flight.step, failure.cause, flight.started)
        return failure

    def settle_quietly(self) -> None:
        """A failed save does not stand in the way of a restore; it is logged."""
        failure = self.settle(self._run.options.timeouts.close_secs)
        if failure is not None:
            events.warn(f"the save of step {failure.step} failed: {failure.cause}")

    def _start_anew(self) -> None:
        if self._run.among.count == 1:
            self.engine.restart(closed=self._run.root.remove_leftovers)
        else:
            # Others may not have seen its notes yet; the next save clears its own place.
            self._leftovers = True
            self.engine.restart()

    def _report(self, flight: InFlight) -> None:
        assert isinstance(flight.pending, PendingSave)
        report = flight.pending.report
        assert report is not None
        self.reports.append(report)
        written_at, committed_at = self._background.written_at, self._background.committed_at
        committed_ago_secs = time.perf_counter() - committed_at
        event = events.SaveEvent(
            step=flight.step,
            kind=report.intent.kind,
            reason=report.intent.reason,
            process=processes.index(),
            rows=report.rows,
            total_rows=report.total_rows,
            bytes_written=report.bytes_written,
            ratio=report.bytes_written / max(1, report.base_bytes),
            blocked_secs=flight.blocked_secs,
            extract_secs=report.extract_secs,
            encode_secs=report.encode_secs,
            write_secs=report.write_secs,
            digest_secs=report.digest_secs,
            commit_secs=committed_at - written_at,
            total_secs=committed_at - flight.started,
            committed_unix_secs=time.time() - committed_ago_secs,
            tables=report.tables,
        )
        events.emit(event, self._run.sinks)


def _has_host_arrays(split: Split) -> bool:
    """Whether a table or slot can be changed in place while a base is written."""
    return any(
        not isinstance(leaf, jax.Array)
        for fields in split.fields.values()
        for leaf in fields.values()
    )


def _goes_on(error: Exception) -> bool:
    """Whether only a wait ran out, and the save that was waited for goes on."""
    return isinstance(error, WaitTimeout) and not isinstance(error, ProcessMissing)
