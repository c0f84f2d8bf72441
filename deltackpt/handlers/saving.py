# SPDX-License-Identifier: Apache-2.0
"""Saves of a manager, one at a time: captured on the training thread, written by a worker.

A save copies the touched rows and the dense leaves, lets the handlers start on additional items,
and passes everything on as a ``step.Step``, which is written and committed in the background. The
next call reports a background failure once, and still makes its own save.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from deltackpt import events, processes
from deltackpt.errors import (
    Damaged,
    DeltackptError,
    ProcessMissing,
    SaveFailed,
    StorageError,
    UnsupportedLeaf,
    WaitTimeout,
)
from deltackpt.format import names
from deltackpt.handlers import dense, retention
from deltackpt.handlers.flight import Done, Failure, InFlight, SaveArguments
from deltackpt.handlers.foreign import HandlerItem, Metrics
from deltackpt.handlers.items import save_args
from deltackpt.handlers.run import HASHED, Run
from deltackpt.handlers.v1 import DeltaCheckpointableHandler
from deltackpt.ledger.held import Held
from deltackpt.options import WhenBusy
from deltackpt.outcomes import Saved
from deltackpt.save import snapshot
from deltackpt.save import step as steps
from deltackpt.save.dense import DenseLeaves
from deltackpt.save.flight import (
    Embeddings,
    PendingSave,
    PipelineOptions,
    RefusedSave,
    SaveReport,
)
from deltackpt.save.lineage import UNTRACKED
from deltackpt.save.step import Item, Step
from deltackpt.state import contexts, tables
from deltackpt.state.stacks import array_of
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import TouchState
from deltackpt.storage.posix import DurableDir

#: Reports that wait for ``wait()``: a loop may never call it.
_REPORTS = 1000


class Saver:
    """Starts saves and settles them; used by one thread at a time."""

    def __init__(self, run: Run, extra: dict[str, Any], owner: object):
        """Starts nothing yet.

        Args:
          run: the manager's run.
          extra: handlers of additional items, by name.
          owner: the manager, which is kept alive while a save is in flight.
        """
        self._run = run
        self._extra = extra
        self._owner = owner
        self._keeps = retention.policy_of(run.options)
        #: The save that is not settled yet.
        self.in_flight: InFlight | None = None
        #: The step of a save that was put off.
        self.due: int | None = None
        self.reports: collections.deque[SaveReport] = collections.deque(maxlen=_REPORTS)
        #: Whether the warnings about idle TouchStates and about missing tracking were issued.
        self._told_stands_still = self._told_untracked = False
        self._has_tables = True
        #: Whether the warning about dense leaves that blocks do not support was issued.
        self._told_unusual = False
        #: Temporary directories of failed saves. Only these: another process may be ahead, and
        #: write the next step already.
        self._leftovers: list[Path] = []
        #: A failure that a restore or a read met, which warned of it; it is still to be raised.
        self.untold: Failure | None = None

    # On the training thread.

    def save(
        self,
        step: int,
        state: Any,
        arguments: SaveArguments,
        when_busy: WhenBusy,
        started: float,
    ) -> Saved:
        """Settles the previous save and starts one; see ``CheckpointManager.save``.

        Args:
          step: the training step.
          state: the whole training state.
          arguments: the other arguments.
          when_busy: what to do while a save is in flight.
          started: when the caller started to wait, as a ``time.perf_counter()`` value.
        """
        run = self._run
        items = save_args(arguments.items, self._extra, run.item)
        arguments = dataclasses.replace(arguments, items=items)
        if when_busy != "wait" and self.all_busy():
            return self._not_now(step, started)
        met = self.untold
        failure = self.settle(run.options.timeouts.save_secs)
        self.due = None
        is_first = run.lineage.newest_committed is None
        if failure is not None and isinstance(failure.cause, ProcessMissing) and failure is not met:
            # It would be missing for this save as well; a restore since has shown that it is not.
            raise failure.error(None) from failure.cause
        try:
            saved = self._start(step, state, arguments, started)
        except Exception as error:
            if failure is not None:
                error.add_note(f"Before that, {failure.error(None)}")
            if not _goes_on(error):
                run.tell_failure("save", step, error, started)
            raise
        if saved.kind is not None:
            self._warn_of_tracking(is_first)
        if failure is not None:
            raise failure.error(saved) from failure.cause
        return saved

    def split(self, state: Any, touched: TouchState | None) -> Split:
        """Returns a state's tables, slots and dense leaves, and its marks unless it hashes rows.

        With ``tracking="auto"`` this decides how touched rows are found.

        Raises:
          UnsupportedLeaf: a leaf cannot be stored, or it or ``touched`` cannot be read.
        """
        return self._run.tracking.choose(self.parts(state, touched), touched)

    def parts(self, state: Any, touched: TouchState | None) -> Split:
        """Returns a state's tables, slots, dense leaves and marks, without side effects.

        Raises:
          UnsupportedLeaf: a leaf cannot be stored, or it or ``touched`` cannot be read.
        """
        tables.check_touched(touched)
        return tables.split(state, self._run.choice, dense_fault=dense.fault)

    def _start(self, step: int, state: Any, arguments: SaveArguments, started: float) -> Saved:
        run = self._run
        if run.among.count == 1:
            # With several processes, the lease holder's commit checks it and informs the others.
            run.held.check_lease()
        # First, so that an unsupported leaf does not even cause a rollback.
        split = self.split(state, arguments.touched)
        self._has_tables = bool(split.layout.tables)
        self.go_back(split, arguments.touched)
        if self._is_restored(step, split, arguments):
            reason = "it was restored, and nothing has changed since"
            return Saved.skipped(step, reason, started)
        run.check_above(step)
        # The epoch first: without the later steps, points above the restored one would count again.
        run.log.begin(split)
        run.roll_back(step)
        run.end_hashing()
        run.held.begin(run.lineage.newest_committed, run.lineage.run)
        attempt = run.lineage.attempts + 1
        items: dict[str, Item] = {}
        try:
            if run.tracking.tracker is None:
                marks = Embeddings(split=split, touched=arguments.touched).marks
                run.log.check(split, marks)
            pending = self._take(step, attempt, split, arguments, items)
        except Exception as error:
            self._drop(items)
            self._leftovers.append(self._temporary(step, attempt))
            if run.among.count > 1:
                # The others begin it nevertheless, and get the error.
                run.lineage.count_attempts(attempt)
                refused = RefusedSave(error)
                self._hand_over(step, attempt, {run.item: refused}, refused, arguments, started)
                run.log.refused(split)
            raise
        flight = self._hand_over(step, attempt, items, pending, arguments, started)
        run.log.saved()
        run.tracking.saved()
        if run.options.deltas.base_snapshot == "block" or _has_host_arrays(split):
            with run.runtime.pace.lifted():
                self._wait_released(pending, step)
        blocked_secs = flight.blocked_secs = time.perf_counter() - started
        intent = pending.intent
        return Saved(step=step, kind=intent.kind, reason=intent.reason, blocked_secs=blocked_secs)

    def _is_restored(self, step: int, split: Split, arguments: SaveArguments) -> bool:
        """Returns whether a loop that made no step saves the restored step again at its end."""
        run, point = self._run, self._run.lineage.continues
        if arguments.force_base or arguments.items or arguments.metrics or arguments.ids:
            return False
        if arguments.custom_metadata or not run.lineage.goes_on_with(split.layout):
            return False
        if run.restored is None or step != (run.restored if point is None else point.save_id.step):
            return False
        if run.newest is not None and run.newest > step:
            return False  # Training went back: without a save a restart would find the later steps.
        return run.is_restored(split, run.tracking.look(split, arguments.touched))

    def _snapshot(self, step: int, split: Split, arguments: SaveArguments) -> PendingSave:
        run = self._run
        embeddings = Embeddings(
            split=split,
            touched=run.tracking.look(split, arguments.touched),
            lineage=run.lineage,
            options=PipelineOptions(
                sampled_proof=run.options.deltas.sampled_proof and run.tracking.tracker is None,
                fsync=run.fsync,
                digests=("item", "step"),
                processes_secs=run.options.timeouts.processes_secs,
            ),
            runtime=run.runtime,
            force_base=arguments.force_base,
            dense_bytes=0 if run.dense is None else dense.nbytes(split),
            copied_bytes=0 if run.dense is not None else dense.nbytes(split),
            tracking=run.tracking.name(split, arguments.touched),
        )
        return snapshot.take(embeddings, step, run.held.step_dir(step))

    def _take(
        self,
        step: int,
        attempt: int,
        split: Split,
        arguments: SaveArguments,
        items: dict[str, Item],
    ) -> PendingSave:
        """Captures all items of a step, independently of what training does next."""
        run = self._run
        pending = items[run.item] = self._snapshot(step, split, arguments)
        if split.layout.dense:
            item = self._dense(step, attempt, split, pending)
            if item is not None:
                items[names.DENSE_ITEM] = item
        for name, args in (arguments.items or {}).items():
            items[name] = self._begun(step, attempt, name, self._extra[name], args)
        if arguments.metrics and names.METRICS not in items:
            items[names.METRICS] = Metrics(arguments.metrics)
        pending.wait_copied()
        return pending

    def _drop(self, items: Mapping[str, Item]) -> None:
        """Releases what was captured for a step that will not be written."""
        for item in items.values():
            if isinstance(item, PendingSave):
                self._run.lineage.failed(item.intent.save_id)
                if self._run.dense is not None:
                    self._run.dense.references.failed(item.intent.save_id)
        _release(items)

    def _dense(self, step: int, attempt: int, split: Split, pending: PendingSave) -> Item | None:
        """Captures dense leaves for our own writer, or for Orbax's handler if one is unusual.

        Returns None if they are part of the item of a delta.
        """
        run = self._run
        leaves = dense.storable(split.dense)
        try:
            if run.dense is None:
                found = DenseLeaves.capture(leaves, run.among.index, run.runtime)
            else:
                found = run.dense.capture(leaves, split.layout.dense, run.among.index)
        except UnsupportedLeaf as error:
            if run.dense is not None and not self._told_unusual:
                self._told_unusual = True
                events.warn(
                    f"step {step}: dense leaves are saved whole, by Orbax's handler, also in "
                    f"deltas: {error}"
                )
            args = dense.save_args(split.dense)
            return self._begun(step, attempt, names.DENSE_ITEM, dense.handler(), args)
        if pending.intent.kind == "delta":
            pending.dense = found
            return None
        if run.dense is not None:
            pending.base_dense_bytes = found.nbytes
            found.keep(pending.intent.save_id)
        return found

    def _begun(self, step: int, attempt: int, name: str, handler: Any, args: Any) -> HandlerItem:
        run = self._run
        item_dir = self._temporary(step, attempt) / name
        DurableDir(run.held.path, fsync=False).make(item_dir)
        return HandlerItem.begin(handler, item_dir, args, run.runtime)

    def _temporary(self, number: int, attempt: int) -> Path:
        run = self._run
        return steps.temporary_dir(run.held.step_dir(number), f"{run.lineage.run}-{attempt}")

    def _hand_over(
        self,
        number: int,
        attempt: int,
        items: Mapping[str, Item],
        pending: PendingSave | RefusedSave,
        arguments: SaveArguments,
        started: float,
    ) -> InFlight:
        """Has a step written and committed in the background."""
        run, begun_ns = self._run, time.time_ns()
        temporary = self._temporary(number, attempt)
        planned = Step(
            final=run.held.step_dir(number),
            items=items,
            tables=run.item,
            others=run.writers(temporary, attempt),
            fsync=run.fsync,
            own_files=lambda: self._own_files(number, items, arguments, begun_ns),
            check=run.held.check_lease,
        )
        nbytes = 0 if isinstance(pending, RefusedSave) else pending.nbytes
        nbytes += sum(item.nbytes for item in items.values() if isinstance(item, DenseLeaves))
        if isinstance(pending, PendingSave) and pending.dense is not None:
            nbytes += pending.dense.nbytes
        # Keep a strong reference to the manager: __del__ would otherwise report a lost save.
        future = run.runtime.start(self._write, planned, nbytes, self._owner)
        self.in_flight = InFlight(number, temporary, pending, future, started)
        return self.in_flight

    # In the background.

    @contexts.neutral()
    def _write(self, planned: Step, nbytes: int, owner: object) -> Done:
        run, begun = self._run, time.perf_counter()
        warnings: list[str] = []
        try:
            with planned.others.working():
                if (warning := run.held.make_room(nbytes)) is not None:
                    warnings.append(f"step {planned.final.name}: {warning}")
            room_secs = time.perf_counter() - begun
            committed = steps.write(planned, run.runtime)
        except BaseException:
            _release(planned.items)  # Some items were never started.
            self._drop_references(planned)
            run.held.remove_remade(planned.others.temporary)
            raise
        self._keep_references(planned)
        with run.among.alive():
            run.held.committed()
        if run.among.index == 0:
            try:
                # After the commit, since the policy counts this step.
                retention.enforce(self._keeps, run.held, run.lineage.protected())
            except Exception as error:
                warnings.append(f"steps that retention should remove may remain: {error}")
        return Done(room_secs, committed, tuple(warnings))

    def _drop_references(self, planned: Step) -> None:
        """Discards the dense leaves of a failed save as references."""
        run, pending = self._run, planned.items[planned.tables]
        if run.dense is not None and isinstance(pending, PendingSave):
            run.dense.references.failed(pending.intent.save_id)

    def _keep_references(self, planned: Step) -> None:
        """Makes the dense leaves of a committed save the references."""
        run, pending = self._run, planned.items[planned.tables]
        if run.dense is not None and isinstance(pending, PendingSave):
            save_id = pending.intent.save_id
            run.dense.references.committed(save_id, run.lineage.next_parent(save_id))

    def _own_files(
        self, number: int, items: Mapping[str, Item], arguments: SaveArguments, begun_ns: int
    ) -> dict[str, bytes]:
        """Returns Orbax's metadata of the step, which lets Orbax restore it without arguments.

        Orbax opens the copy of a step in a bucket only with ``commit_success.txt``. It cannot open
        a delta: there the file would only cost an fsync.
        """
        handlers = {
            self._run.item: DeltaCheckpointableHandler,
            names.DENSE_ITEM: ocp.PyTreeCheckpointHandler,
            names.METRICS: ocp.JsonCheckpointHandler,
            **self._extra,
        }
        told = {
            "item_handlers": {name: _typestr(handlers[name]) for name in items},
            "metrics": dict(arguments.metrics or {}),
            "performance_metrics": {},
            "init_timestamp_nsecs": begun_ns,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": dict(arguments.custom_metadata or {}),
        }
        found = {names.STEP_METADATA: json.dumps(told).encode()}
        tables = items[self._run.item]
        if not (isinstance(tables, PendingSave) and tables.intent.kind == "delta"):
            text = f"Checkpoint commit was successful to {self._run.held.step_dir(number).name}"
            found[names.COMMIT_SUCCESS] = text.encode()
        return found

    # On the training thread again.

    def go_back(self, split: Split, touched: TouchState | None) -> None:
        """Reverts a restore that was only for inspection: training keeps its earlier state."""
        lineage = self._run.lineage
        if self._run.tracking.tracker is not None or not lineage.can_go_back:
            # Reading the clocks waits for the step that computes them.
            return
        marks = Embeddings(split=split, touched=touched).marks
        if lineage.go_back(snapshot.clocks_of(split, marks)):
            self._run.restored = lineage.restored
            if self._run.tracking.looked_before:
                lineage.distrust(HASHED)

    def _warn_of_tracking(self, is_first: bool) -> None:
        """Warns of faults that the audit found, and once if tracking is missing or idle."""
        assert self.in_flight is not None
        pending = self.in_flight.pending
        assert isinstance(pending, PendingSave)
        step = pending.intent.save_id.step
        if pending.doubt is not None:
            events.warn(f"step {step} is saved as a base, because {pending.doubt}")
            self._run.log.distrust(pending.doubt)
        elif not self._has_tables:
            return
        elif pending.intent.stands_still and not self._told_stands_still:
            self._told_stands_still = True
            events.warn(
                f"step {step}: expected marks since the parent of this delta, found none, so the "
                "delta contains no row; if the tables did change, pass save() the TouchState that "
                "the training step returned (touched = touched.mark(touched, ids))"
            )
        elif self._run.tracking.stopped:
            return  # It has warned.
        elif pending.intent.reason == UNTRACKED and not is_first and not self._told_untracked:
            self._told_untracked = True
            events.warn(
                f'step {step}: expected a TouchState or tracking="fingerprints", found neither, '
                "so every save is a base; pass ManagerOptions(deltas=DeltaOptions("
                'tracking="fingerprints")), or mark the rows with touched.mark or touched.track'
            )

    def _wait_released(self, pending: PendingSave, step: int) -> None:
        limit = self._run.options.timeouts.save_secs
        if not pending.released.wait(limit):
            raise WaitTimeout(
                f"step {step}: expected its tables to be written within {limit} s "
                "(timeouts.save_secs), found the write still running; check the storage"
            )

    def _not_now(self, step: int, started: float) -> Saved:
        flight = self.in_flight
        # Process 0 may be the only process that is still busy.
        which = "a step" if flight is None else f"step {flight.step}"
        reason = f"{which} is still being saved"
        if self._run.options.writes.when_busy == "coalesce":
            self.due = step
            reason += "; due, save_if_due() will save it"
        return Saved.skipped(step, reason, started)

    @property
    def is_lost(self) -> bool:
        """Returns whether a save failed, and that was not raised yet."""
        return self.untold is not None or (self.in_flight is not None and self.in_flight.is_lost)

    @property
    def may_commit(self) -> bool:
        """Returns whether a save that has not failed is in flight or not yet settled."""
        return self.in_flight is not None and not self.in_flight.is_lost

    def busy(self) -> bool:
        """Returns whether a save of this process is in flight."""
        flight = self.in_flight  # Another thread may settle it now.
        return flight is not None and not flight.future.done()

    def all_busy(self) -> bool:
        """Returns, equal on every process, whether process 0 has a save in flight."""
        return self._run.among.agree("asking for a free writer", self.busy())

    # The end of a save.

    def settle(self, timeout_secs: float) -> Failure | None:
        """Waits for the save in flight, if any, and reports it.

        Args:
          timeout_secs: maximum wait.

        Returns:
          The failure to raise, once: of this save, or of an earlier one that a restore or read
          found.

        Raises:
          WaitTimeout: the save is still running.
        """
        failure = self._settled(timeout_secs) or self.untold
        self.untold = None
        return failure

    def _settled(self, timeout_secs: float) -> Failure | None:
        """Waits for the save in flight, if any, and reports it; returns its failure."""
        flight, run = self.in_flight, self._run
        self._tell_news()
        if flight is None:
            return None
        if not concurrent.futures.wait([flight.future], timeout_secs).done:
            raise WaitTimeout(
                f"save of step {flight.step}: expected it to end within {timeout_secs} s "
                "(ManagerOptions.timeouts), found it still running; check the storage, then call "
                "wait_until_finished() again"
            )
        self.in_flight = None
        cause = flight.future.exception()
        if cause is not None:
            return self._failed(flight, cause)
        run.newest = flight.step
        while self._leftovers:
            DurableDir(run.held.path).remove(self._leftovers.pop())
        done = flight.future.result()
        self._report(flight, done)
        for text in done.warnings:
            events.warn(text)
        try:
            run.held.collect(run.lineage.protected)
        except Exception as error:  # The save is valid regardless of the error.
            text = str(error) if isinstance(error, StorageError) else repr(error)
            events.warn(f"unneeded files could not be removed: {text}")
        return None

    def settle_at_root(self, timeout_secs: float) -> None:
        """Waits until every save is durable as configured, and reports it.

        Raises:
          WaitTimeout, FencedError, SaveFailed: as for ``Held.settle``.
        """
        if isinstance(held := self._run.root, Held):
            try:
                held.settle(timeout_secs)
            finally:
                self._tell_news()

    def _tell_news(self) -> None:
        """Emits the upload events since the last call."""
        if isinstance(held := self._run.root, Held):
            for event in held.news():
                if held.tells:
                    self._run.emit(event)
                if not isinstance(event, events.FailureEvent) or event.step is None:
                    continue
                if event.code == Damaged.code:
                    # Saves on top of it could not be uploaded either.
                    reason = f"a save cannot be uploaded: {event.message}"
                    self._run.lineage.lost(event.step, reason)

    def _failed(self, flight: InFlight, cause: BaseException) -> Failure:
        run = self._run
        if not isinstance(cause, Exception):
            cause = SaveFailed(f"{cause!r} ended its thread")
        failure = Failure(flight.step, cause)
        if isinstance(flight.pending, PendingSave):
            run.lineage.failed(flight.pending.intent.save_id)
        if isinstance(cause, DeltackptError) and cause.leaves_doubt:
            run.lineage.distrust(f"the touched rows of step {flight.step} were wrong")
            run.log.distrust(f"the touched rows of step {flight.step} were wrong")
        # Others may still write to it; remove it after the next committed save.
        self._leftovers.append(flight.temporary)
        if not flight.told:
            run.tell_failure("save", flight.step, failure.cause, flight.started)
        return failure

    def close(self) -> None:
        """Stops the threads once they are done, and closes the handlers."""
        self._run.runtime.close(wait=False)
        for handler in self._extra.values():
            if hasattr(handler, "close"):
                handler.close()

    def settle_quietly(self) -> None:
        """Warns about a failed save before a restore; a later call raises the error."""
        flight = self.in_flight
        failure = self._settled(self._run.options.timeouts.close_secs)
        if failure is not None:
            events.warn(f"the save of step {failure.step} failed: {failure.cause}")
            if flight is not None and not flight.told:
                self.untold = failure

    def _report(self, flight: InFlight, done: Done) -> None:
        assert isinstance(flight.pending, PendingSave)
        report, committed = flight.pending.report, done.committed
        assert report is not None
        self.reports.append(report)
        committed_ago_secs = time.perf_counter() - committed.at
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
            room_secs=done.room_secs,
            encode_secs=report.encode_secs,
            write_secs=report.write_secs,
            digest_secs=report.digest_secs,
            commit_secs=committed.at - committed.written_at,
            total_secs=committed.at - flight.started,
            committed_unix_secs=time.time() - committed_ago_secs,
            tables=report.tables,
            dense_bytes=report.dense_bytes,
            dense=report.dense,
        )
        self._run.emit(event)


def _release(items: Mapping[str, Item]) -> None:
    """Releases the memory of items that will not be written."""
    for item in items.values():
        if isinstance(item, PendingSave):
            item.abandon()
        elif isinstance(item, DenseLeaves):
            item.release()


def _has_host_arrays(split: Split) -> bool:
    """Returns whether a table or slot can change in place while a base is written."""
    return any(
        not isinstance(array_of(leaf), jax.Array)
        for fields in split.fields.values()
        for leaf in fields.values()
    )


def _typestr(handler: Any) -> str:
    """Returns the name by which Orbax finds a handler again."""
    if hasattr(handler, "typestr"):
        return handler.typestr()
    kind = handler if isinstance(handler, type) else type(handler)
    return f"{kind.__module__}.{kind.__qualname__}"


def _goes_on(error: Exception) -> bool:
    """Returns whether only a wait timed out, and the save itself continues."""
    return isinstance(error, WaitTimeout) and not isinstance(error, ProcessMissing)
