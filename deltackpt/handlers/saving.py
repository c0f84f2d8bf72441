# SPDX-License-Identifier: Apache-2.0
"""Saves of a manager, one at a time: taken on the training thread, written by one of ours.

A save takes the touched rows and copies of the dense leaves, has further items begun by their
handlers, and hands all of it over as a ``step.Step``, which is written and committed in the
background. What failed there is found by the next call, which reports it once and is itself taken.
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
from deltackpt.handlers.run import Run
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
from deltackpt.save.step import Item, Step
from deltackpt.state import tables
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import TouchState
from deltackpt.storage import files

#: Reports that wait for ``wait()``: a loop may never call it.
_REPORTS = 1000


class Saver:
    """Starts saves and settles them; used by one thread at a time."""

    def __init__(self, run: Run, extra: dict[str, Any], owner: object):
        """Nothing is in flight.

        Args:
          run: the manager's run.
          extra: handlers of further items, by name.
          owner: the manager, which is kept while a save is in flight.
        """
        self._run = run
        self._extra = extra
        self._owner = owner
        self._keeps = retention.as_policy(run.options.retention)
        #: The save that is not settled yet.
        self.in_flight: InFlight | None = None
        #: The step of a save that was put off.
        self.due: int | None = None
        self.reports: collections.deque[SaveReport] = collections.deque(maxlen=_REPORTS)
        #: Whether it was said that no TouchState moves.
        self._told_stands_still = False
        #: Whether it was said that blocks do not cover the dense leaves.
        self._told_unusual = False
        #: Temporary directories of failed saves. Only these: another process may be ahead, and
        #: write the next step already.
        self._leftovers: list[Path] = []
        #: A failure that a restore or a read met, which warned of it; it is still to be raised.
        self._untold: Failure | None = None

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
        items = save_args(arguments.items, self._extra, run.item)
        arguments = dataclasses.replace(arguments, items=items)
        if when_busy != "wait" and self.all_busy():
            return self._not_now(step, started)
        met = self._untold
        failure = self.settle(run.options.timeouts.save_secs)
        self.due = None
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
        self._warn_of_tracking()
        if failure is not None:
            raise failure.error(saved) from failure.cause
        return saved

    def split(self, state: Any, *, dense_fault: tables.DenseFault | None = None) -> Split:
        """A state's tables, slots and dense leaves; its marks, unless rows are found by hashes."""
        split = tables.split(state, self._run.choice, dense_fault=dense_fault)
        # Fingerprints see more than the marks in a state.
        return split if self._run.tracker is None else dataclasses.replace(split, marks=())

    def _start(self, step: int, state: Any, arguments: SaveArguments, started: float) -> Saved:
        run = self._run
        if run.among.count == 1:
            # Of several processes one holds the lease: its commit checks it, and tells the others.
            run.held.check_lease()
        # First of all: what cannot be stored leaves even a rollback undone.
        split = self.split(state, dense_fault=dense.fault)
        self.go_back(split, arguments.touched)
        run.check_above(step)
        run.roll_back(step)
        run.log.begin(split)
        run.held.begin(run.lineage.goes_on, run.lineage.run)
        attempt = run.lineage.attempts + 1
        items: dict[str, Item] = {}
        try:
            if run.tracker is None:
                marks = Embeddings(split=split, touched=arguments.touched).marks
                run.log.check(split, marks)
            pending = self._take(step, attempt, split, arguments, items)
        except Exception as error:
            self._drop(items)
            self._leftovers.append(self._temporary(step, attempt))
            if run.among.count > 1:
                # The others begin it all the same, and are told.
                run.lineage.count_attempts(attempt)
                refused = RefusedSave(error)
                self._hand_over(step, attempt, {run.item: refused}, refused, arguments, started)
                run.log.refused(split)
            raise
        flight = self._hand_over(step, attempt, items, pending, arguments, started)
        run.log.saved()
        if run.options.deltas.base_snapshot == "block" or _has_host_arrays(split):
            with run.workers.pace.lifted():
                self._wait_released(pending, step)
        blocked_secs = flight.blocked_secs = time.perf_counter() - started
        intent = pending.intent
        return Saved(step=step, kind=intent.kind, reason=intent.reason, blocked_secs=blocked_secs)

    def _snapshot(self, step: int, split: Split, arguments: SaveArguments) -> PendingSave:
        run = self._run
        embeddings = Embeddings(
            split=split,
            touched=run.touched_rows(split, arguments.touched),
            lineage=run.lineage,
            options=PipelineOptions(
                sampled_proof=run.options.deltas.sampled_proof and run.tracker is None,
                fsync=run.fsync,
                staging_bytes=run.options.writes.staging_bytes,
                digests=("item", "step"),
                processes_secs=run.options.timeouts.processes_secs,
            ),
            staging=run.staging,
            workers=run.workers,
            force_base=arguments.force_base,
            dense_bytes=0 if run.dense is None else _dense_bytes(split),
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
        """Adds all items of a step, which are then independent of what training does next."""
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
        """Gives up what was taken of a step that will not be written."""
        for item in items.values():
            if isinstance(item, PendingSave):
                self._run.lineage.failed(item.intent.save_id)
                if self._run.dense is not None:
                    self._run.dense.references.failed(item.intent.save_id)
        _release(items)

    def _dense(self, step: int, attempt: int, split: Split, pending: PendingSave) -> Item | None:
        """Dense leaves by our own writer, or by Orbax's handler where one of them is unusual.

        None where they are blocks of the item of a delta.
        """
        run = self._run
        leaves = dense.storable(split.dense)
        try:
            if run.dense is None:
                return DenseLeaves.take(leaves, run.among.index, run.staging)
            taken = run.dense.take(leaves, split.layout.dense, run.among.index)
            if pending.intent.kind == "base":
                pending.base_dense_bytes = taken.nbytes
                return taken.as_item(pending.intent.save_id)
            pending.dense = taken
            return None
        except UnsupportedLeaf as error:
            if run.dense is not None and not self._told_unusual:
                self._told_unusual = True
                events.warn(
                    f"step {step}: dense leaves are saved whole, by Orbax's handler, also in "
                    f"deltas: {error}"
                )
            args = dense.save_args(split.dense)
            return self._begun(step, attempt, names.DENSE_ITEM, dense.handler(), args)

    def _begun(self, step: int, attempt: int, name: str, handler: Any, args: Any) -> HandlerItem:
        run = self._run
        item_dir = self._temporary(step, attempt) / name
        item_dir.mkdir(parents=True, exist_ok=True)
        return HandlerItem.begin(handler, item_dir, args, run.workers)

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
            others=run.meeting(temporary),
            fsync=run.fsync,
            metadata=lambda: self._metadata(items, arguments, begun_ns),
            check=run.held.check_lease,
        )
        nbytes = 0 if isinstance(pending, RefusedSave) else pending.nbytes
        nbytes += sum(item.nbytes for item in items.values() if isinstance(item, DenseLeaves))
        if isinstance(pending, PendingSave) and pending.dense is not None:
            nbytes += pending.dense.nbytes
        # With the manager, which would say that its save is lost if it went.
        future = run.workers.save(self._write, planned, nbytes, self._owner)
        self.in_flight = InFlight(number, temporary, pending, future, started)
        return self.in_flight

    # In the background.

    def _write(self, planned: Step, nbytes: int, owner: object) -> Done:
        run, begun = self._run, time.perf_counter()
        warnings: list[str] = []
        try:
            if (warning := run.held.make_room(nbytes)) is not None:
                warnings.append(f"step {planned.final.name}: {warning}")
            room_secs = time.perf_counter() - begun
            committed = steps.write(planned, run.workers)
        except BaseException:
            _release(planned.items)  # Not all of them were come to.
            self._drop_references(planned)
            raise
        self._keep_references(planned)
        run.held.committed()
        if run.among.index == 0:
            try:
                # Asked after the commit, which the policy counts.
                retention.enforce(self._keeps, run.held, run.lineage.protected())
            except Exception as error:
                warnings.append(f"steps that retention does not keep may stay: {error}")
        return Done(room_secs, committed, tuple(warnings))

    def _drop_references(self, planned: Step) -> None:
        """What a save has of dense leaves is no reference where it does not stand."""
        run, pending = self._run, planned.items[planned.tables]
        if run.dense is not None and isinstance(pending, PendingSave):
            run.dense.references.failed(pending.intent.save_id)

    def _keep_references(self, planned: Step) -> None:
        """References of dense leaves count once their save stands."""
        run, pending = self._run, planned.items[planned.tables]
        if run.dense is not None and isinstance(pending, PendingSave):
            save_id = pending.intent.save_id
            run.dense.references.committed(save_id, run.lineage.next_parent(save_id))

    def _metadata(
        self, items: Mapping[str, Item], arguments: SaveArguments, begun_ns: int
    ) -> bytes:
        """Orbax's metadata of the step, from which it restores without being told anything."""
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
        return json.dumps(told).encode()

    # On the training thread again.

    def go_back(self, split: Split, touched: TouchState | None) -> None:
        """Forgets a restore that was only looked at: training goes on with what it had before."""
        lineage = self._run.lineage
        if self._run.tracker is not None or not lineage.can_go_back:
            # Reading the clocks waits for the step that computes them.
            return
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
            self._run.log.distrust(pending.doubt)
        elif pending.intent.stands_still and not self._told_stands_still:
            self._told_stands_still = True
            events.warn(
                f"step {step}: no TouchState has moved since the parent of this delta, which "
                "therefore holds no row; if the tables did change, give save() the TouchState that "
                "the training step returned (touched = touched.mark(touched, ids))"
            )

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
        return Saved.skipped(step, reason, started)

    @property
    def is_lost(self) -> bool:
        """Whether a save failed, and that was not raised yet."""
        return self._untold is not None or (self.in_flight is not None and self.in_flight.is_lost)

    @property
    def may_commit(self) -> bool:
        """Whether a save is in flight, or to be settled, that has not failed."""
        return self.in_flight is not None and not self.in_flight.is_lost

    def busy(self) -> bool:
        """Whether a save of this process is in flight."""
        return self.in_flight is not None and not self.in_flight.future.done()

    def all_busy(self) -> bool:
        """Whether a save is in flight: what process 0 finds, on every process."""
        return self._run.among.agree("asking for a free writer", self.busy())

    # The end of a save.

    def settle(self, timeout_secs: float) -> Failure | None:
        """Waits for the save in flight, if any, and reports it.

        Args:
          timeout_secs: the longest wait.

        Returns:
          What is to be raised, once: that it failed, or that the one before a restore or a read
          did.

        Raises:
          WaitTimeout: it goes on.
        """
        failure = self._settled(timeout_secs) or self._untold
        self._untold = None
        return failure

    def _settled(self, timeout_secs: float) -> Failure | None:
        """Waits for the save in flight, if any, and reports it; returns its failure."""
        flight, run = self.in_flight, self._run
        self._tell_news()
        if flight is None:
            return None
        if not concurrent.futures.wait([flight.future], timeout_secs).done:
            raise WaitTimeout(
                f"the save of {flight.step}: expected it to end within {timeout_secs} s "
                "(ManagerOptions.timeouts), found it still running; look at the storage, then "
                "wait() again"
            )
        self.in_flight = None
        cause = flight.future.exception()
        if cause is not None:
            return self._failed(flight, cause)
        run.newest = flight.step
        while self._leftovers:
            files.remove_tree(self._leftovers.pop())
        done = flight.future.result()
        self._report(flight, done)
        for text in done.warnings:
            events.warn(text)
        try:
            run.held.collect(run.lineage.protected)
        except StorageError as error:
            events.warn(f"what nothing needs could not be removed: {error}")
        return None

    def settle_at_root(self, timeout_secs: float) -> None:
        """Waits until every save is where it is to be durable, and tells how it came there.

        Raises:
          WaitTimeout, FencedError, SaveFailed: as ``Held.settle``.
        """
        if isinstance(held := self._run.root, Held):
            try:
                held.settle(timeout_secs)
            finally:
                self._tell_news()

    def _tell_news(self) -> None:
        """Tells what happened between stage and root since the last call."""
        if isinstance(held := self._run.root, Held):
            for event in held.news():
                if held.tells:
                    events.emit(event, self._run.sinks)
                if not isinstance(event, events.FailureEvent) or event.step is None:
                    continue
                if event.code == Damaged.code:
                    # What is taken against it could not come to the root either.
                    reason = f"a save cannot come to the root: {event.message}"
                    self._run.lineage.lost(event.step, reason)

    def _failed(self, flight: InFlight, cause: BaseException) -> Failure:
        run = self._run
        if not isinstance(cause, Exception):
            cause = SaveFailed(f"its thread was ended by {cause!r}")
        failure = Failure(flight.step, cause)
        if isinstance(flight.pending, PendingSave):
            run.lineage.failed(flight.pending.intent.save_id)
        if isinstance(cause, DeltackptError) and cause.leaves_doubt:
            run.lineage.distrust(f"the touched rows of step {flight.step} were wrong")
            run.log.distrust(f"the touched rows of step {flight.step} were wrong")
        # Others may not have seen its notes yet: it is removed once another save was committed.
        self._leftovers.append(flight.temporary)
        if not flight.told:
            run.tell_failure("save", flight.step, failure.cause, flight.started)
        return failure

    def close(self) -> None:
        """Ends the threads, once they are done, and the handlers."""
        self._run.workers.close()
        for handler in self._extra.values():
            if hasattr(handler, "close"):
                handler.close()

    def settle_quietly(self) -> None:
        """A failed save does not stand in the way of a restore; it is raised by what follows."""
        flight = self.in_flight
        failure = self._settled(self._run.options.timeouts.close_secs)
        if failure is not None:
            events.warn(f"the save of step {failure.step} failed: {failure.cause}")
            if flight is not None and not flight.told:
                self._untold = failure

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
        events.emit(event, self._run.sinks)


def _release(items: Mapping[str, Item]) -> None:
    """Gives the memory of items back that will not be written, or no more."""
    for item in items.values():
        if isinstance(item, PendingSave):
            item.abandon()
        elif isinstance(item, DenseLeaves):
            item.release()


def _dense_bytes(split: Split) -> int:
    """Bytes of the arrays among the dense leaves."""
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(split.dense))


def _has_host_arrays(split: Split) -> bool:
    """Whether a table or slot can be changed in place while a base is written."""
    return any(
        not isinstance(leaf, jax.Array)
        for fields in split.fields.values()
        for leaf in fields.values()
    )


def _typestr(handler: Any) -> str:
    """Under which name Orbax finds a handler again."""
    if hasattr(handler, "typestr"):
        return handler.typestr()
    kind = handler if isinstance(handler, type) else type(handler)
    return f"{kind.__module__}.{kind.__qualname__}"


def _goes_on(error: Exception) -> bool:
    """Whether only a wait ran out, and the save that was waited for goes on."""
    return isinstance(error, WaitTimeout) and not isinstance(error, ProcessMissing)
