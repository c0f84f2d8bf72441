# SPDX-License-Identifier: Apache-2.0
"""Saves of a manager, one at a time: captured on the training thread, written by a worker.

The next call reports a background failure once, and still makes its own save.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import json
import reprlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import jax

from deltackpt import events
from deltackpt.errors import (
    Damaged,
    DeltackptError,
    OptionError,
    OutOfSpace,
    ProcessMissing,
    SaveFailed,
    StorageError,
    TrackingError,
    TrackingFailed,
    UnsupportedLeaf,
    WaitTimeout,
)
from deltackpt.format import naming
from deltackpt.format.naming import Leaf, PyTree
from deltackpt.handlers import orbax_dense
from deltackpt.handlers.items import HandlerItem, Items, Metrics, save_args
from deltackpt.lazy_import import ocp
from deltackpt.ledger import directory
from deltackpt.options import WhenBusy
from deltackpt.outcomes import Saved
from deltackpt.policies import Decision
from deltackpt.resources.runtime import Task, no_thread
from deltackpt.save import commit, dense_layout, pending_save
from deltackpt.save.commit import Committed, Item, StepTransaction, StepWriters
from deltackpt.save.dense_save import DenseLeaves
from deltackpt.save.lineage import UNTRACKED
from deltackpt.save.pending_save import Embeddings, PendingSave, RefusedSave, base_bytes
from deltackpt.save.tracking_audit import TrackingVerifier
from deltackpt.session import retention
from deltackpt.session.restored import arrays_of
from deltackpt.session.retention import CommittedStep, StepMetadata
from deltackpt.session.run import HASHED, Run
from deltackpt.state import placement
from deltackpt.state import tables as state_tables
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, TouchState, match_marks
from deltackpt.storage.posix import DurableDir


@dataclasses.dataclass(frozen=True, eq=False)
class SaveArguments:
    """The arguments of ``save()`` other than step and state; ``ids`` is from ``append()``."""

    touched: TouchState | None = None
    items: Items | None = None
    metrics: Mapping[str, float] | None = None
    force_base: bool = False
    custom_metadata: Mapping[str, object] | None = None
    ids: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        for name in ("metrics", "custom_metadata"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _as_json(name, given))
        if not (self.touched is None or isinstance(self.touched, TouchState)):
            raise OptionError(
                "touched: expected a TouchState from deltackpt.touched.init() or mark(), found "
                f"{type(self.touched).__name__}; pass its result"
            )

    @property
    def save_unchanged(self) -> bool:
        """Whether the arguments require a save even if the state is the restored one."""
        others = self.items, self.metrics, self.custom_metadata, self.ids
        return self.force_base or any(others)


def _as_json(name: str, given: object) -> dict[str, object]:
    """Returns a copy as JSON values; scalars of numpy and jax become numbers."""
    if not isinstance(given, Mapping):
        raise OptionError(f"{name}: expected a mapping, found {type(given).__name__}")
    try:
        return json.loads(json.dumps(dict(given), default=_number))
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # ``item()`` too.
        raise OptionError(
            f"{name}: expected JSON values, found {reprlib.repr(given)}: {error}; pass numbers, "
            "strings, lists and dicts; convert arrays with .tolist()"
        ) from error


def _number(value: Leaf) -> object:
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{type(value).__name__} is not one of these")


@dataclasses.dataclass(frozen=True, eq=False)
class Failure:
    """A save that failed in the background."""

    step: int
    cause: Exception

    def error(self, taken: Saved | None) -> SaveFailed:
        """Returns the error to raise from ``cause``; ``taken`` is the save made since then."""
        cause = self.cause
        is_known = isinstance(cause, DeltackptError)
        detail = str(cause) if is_known else f"{type(cause).__name__}: {cause}"
        is_doubtful = is_known and cause.leaves_doubt
        if taken is not None:
            follow = f"step {taken.step} is being saved"
            follow += "" if is_doubtful else " and contains its rows"
        elif is_doubtful:
            follow = "the next save is a base"
        else:
            follow = "no touched row is lost, save again"
            if isinstance(cause, OutOfSpace):
                follow = f"keep fewer steps; {follow}"
        kind = TrackingFailed if is_doubtful else SaveFailed
        error = kind(f"the save of step {self.step} failed: {detail}; {follow}")
        error.saved = taken
        return error


class Done(NamedTuple):
    """The result of the background half of a committed save."""

    room_secs: float  # how long it waited for room
    committed: Committed
    warnings: tuple[str, ...]  # about other problems


@dataclasses.dataclass(eq=False)
class InFlight:
    """The save in flight."""

    step: int
    temporary: Path
    pending: PendingSave | RefusedSave  # its tables, or why this process cannot save them
    future: Future[Done]
    started: float  # when ``save()`` was called, ``time.perf_counter()``
    blocked_secs: float = 0.0  # how long ``save()`` blocked

    @property
    def is_reported(self) -> bool:
        """Returns whether ``save()`` itself raised the error."""
        return isinstance(self.pending, RefusedSave)

    @property
    def is_lost(self) -> bool:
        """Returns whether the save failed and the failure was not reported yet."""
        return self.future.done() and self.future.exception() is not None


#: Names by which Orbax finds the handlers of items; the classes would import Orbax.
_ORBAX_HANDLERS = {
    naming.DENSE_ITEM: dense_layout.HANDLER,
    naming.METRICS: "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler",
}
#: Events kept until ``wait_until_finished()``, which a loop may never call. With a thousand tables,
#: an event has half a megabyte of figures.
_REPORTS = 100


class Saver:
    """Starts saves and waits for them; one caller at a time. ``_write`` runs on another thread."""

    def __init__(self, run: Run, owner: object):
        """Starts nothing yet; ``owner``, the manager, is kept alive while a save is in flight."""
        self._run = run
        self._owner = owner
        self._retention = retention.policy_of(run.options)
        self._verifier = TrackingVerifier()
        #: The save that was not waited for yet.
        self.in_flight: InFlight | None = None
        #: The step of a save that was put off.
        self.due: int | None = None
        self.reports: collections.deque[events.SaveEvent] = collections.deque(maxlen=_REPORTS)
        #: Kinds of the warnings that were issued, each of them once.
        self._warned: set[str] = set()
        #: Temporary directories of failed saves. Only these: another process may be ahead, and
        #: write the next step already.
        self._leftovers: list[Path] = []
        #: A failure of which a restore or read has only warned; the next save raises it.
        self.unreported: Failure | None = None
        #: The save that was started last, until it fails or steps are read: training may go back.
        self._newest: Saved | None = None
        #: It, if the last ``append()`` made it instead of writing a WAL record.
        self.saved_by_append: Saved | None = None

    # On the training thread.

    def save(
        self,
        step: int,
        state: PyTree,
        arguments: SaveArguments,
        when_busy: WhenBusy,
        started: float,
    ) -> Saved:
        """Waits for the previous save and starts one; see ``CheckpointManager.save``."""
        run = self._run
        if arguments.items is not None:
            items = save_args(arguments.items, self._run.extra, run.item)
            arguments = dataclasses.replace(arguments, items=items)
        if when_busy != "wait" and self.all_busy():
            return self._not_now(step, started)
        already_warned = self.unreported
        failure = self.wait_finished(run.options.timeouts.save_secs)
        self.due = None
        is_first = run.lineage.newest_committed is None
        is_missing = failure is not None and isinstance(failure.cause, ProcessMissing)
        if failure is not None and is_missing and failure is not already_warned:
            # It is still missing, unless a restore has warned of it and succeeded since.
            raise failure.error(None) from failure.cause
        try:
            saved = self._start(step, state, arguments, started)
        except Exception as error:
            if failure is not None:
                error.add_note(f"Before that, {failure.error(None)}")
            # After a mere timeout of a wait, the save itself continues.
            if isinstance(error, ProcessMissing) or not isinstance(error, WaitTimeout):
                run.emit_failure("save", step, error, started)
            if isinstance(error, StorageError):
                self._collect()
            raise
        if saved.kind is not None:
            self._newest = saved
            self._warn_of_tracking(is_first)
        if failure is not None:
            raise failure.error(saved) from failure.cause
        return saved

    def saved(self, step: int) -> Saved | None:
        """Waits for a save of this step, if it was the last one; None if it was not, or failed."""
        if self._newest is not None and self._newest.step == step:
            self.unreported = self.wait_finished(self._run.options.timeouts.save_secs)
            return self._newest
        return None

    def should_save(
        self, step: int, metrics: Mapping[str, float] | None, preempted: Callable[[int], bool]
    ) -> bool:
        """Returns whether the options select a step; process 0 decides for all processes."""
        run, in_flight = self._run, self.in_flight
        policy = run.options.save_decision_policy
        if policy is None:
            return step % (run.options.save_interval_steps or 1) == 0

        def decide() -> bool:
            now: StepMetadata = {
                "metrics": dict(metrics or {}),
                "commit_timestamp_nsecs": time.time_ns(),
            }
            previous = retention.committed_steps(run.root)
            if in_flight is not None and in_flight.step not in [known.step for known in previous]:
                # It began earlier, and will be committed before the next one.
                previous.append(CommittedStep(in_flight.step, lambda: now))
            context = ocp.checkpoint_managers.DecisionContext(
                is_saving_in_progress=self.busy(),
                reached_preemption=preempted(step),
                multiprocessing_options=ocp.options.MultiprocessingOptions(),
            )
            current = CommittedStep(step, lambda: now)
            return bool(policy.should_save(current, previous, context=context))

        return run.coordinator.from_process_0(f"deciding on step {step}", decide)

    def split(self, state: PyTree, touched: TouchState | None) -> Split:
        """Splits a state, without marks if rows are hashed; ``tracking="auto"`` decides here."""
        return self._run.tracking.choose(self.split_all(state, touched), touched)

    def split_all(self, state: PyTree, touched: TouchState | None) -> Split:
        """Splits a state into tables, slots, dense leaves and marks; raises UnsupportedLeaf."""
        state_tables.check_touched(touched)
        return state_tables.split(state, self._run.choice, dense_fault=orbax_dense.fault)

    def next(self, state: PyTree, touched: TouchState | None) -> Decision:
        """Returns the decision about the next save; see ``CheckpointManager.next_save``."""
        split = self.split_all(state, touched)
        if (tracker := self._run.tracking.chosen(split, touched)) is not None:
            clocks = pending_save.clocks_of(split, (Marks("", tracker.touched),))
        else:
            clocks = self._run.clocks(split, touched)
        return self._run.lineage.next(clocks=clocks, layout=split.layout)

    def verify_tracking(self, state: PyTree, touched: TouchState | None) -> bool:
        """See ``CheckpointManager.verify_tracking``."""
        split = self.split_all(state, touched)
        if self._run.tracking.chosen(split, touched) is not None:
            raise OptionError(
                "verify_tracking: expected a TouchState, found none, so fingerprints check "
                "every row; pass touched= or keep the TouchState in the state"
            )
        marks = pending_save.marks_of(split, touched)
        if marks:
            match_marks(marks, split.layout)  # Its error makes no row doubtful.
        try:
            return self._verifier.verify(split, marks, pending_save.clocks_of(split, marks))
        except TrackingError:
            reason = "verify_tracking found rows that are not marked"
            self._run.suspect(reason)
            self._run.wal.distrust(reason)
            raise

    def _start(self, step: int, state: PyTree, arguments: SaveArguments, started: float) -> Saved:
        run = self._run
        if run.coordinator.count == 1:
            # With several processes, the lease holder's commit checks it and informs the others.
            run.check_lease()
        # First, so that an unsupported leaf does not even cause a rollback.
        split = self.split(state, arguments.touched)
        self.go_back(split, arguments.touched)
        if self._is_restored(step, split, arguments):
            reason = "it was restored, and nothing has changed since"
            return Saved.skipped(step, reason, started)
        run.check_above(step)
        # Before roll_back(): only later steps keep points of an old epoch from being restored.
        if run.wal.begun != run.lineage.run:
            # Before any file of the run is staged: a restart reads there what the run resumed from.
            run.start_replication()
            run.wal.start_epoch(split)
        run.roll_back(step)
        run.end_hashing()
        attempt = run.lineage.attempts + 1
        writers = self._writers(step, attempt)
        items: dict[str, Item] = {}
        try:
            if run.tracking.tracker is None:
                run.wal.check(split, pending_save.marks_of(split, arguments.touched))
            pending = self._capture(step, writers.temporary, split, arguments, items)
            flight = self._hand_over(step, writers, items, pending, arguments, started)
        except BaseException as error:
            if self.in_flight is not None:
                raise  # An interrupt: the save is written nevertheless.
            self._drop(items)
            self._leftovers.append(writers.temporary)
            if run.coordinator.count > 1:
                # The others begin it nevertheless, and get the error.
                run.lineage.count_attempts(attempt)
                if not isinstance(cause := error, Exception):
                    cause = SaveFailed(f"save() was interrupted: {error!r}")
                refused = RefusedSave(cause)
                self._hand_over(step, writers, {run.item: refused}, refused, arguments, started)
                run.wal.refused(split)
            raise
        run.wal.saved()
        run.tracking.saved()
        # A delta has copied its rows. While a base is written, arrays of numpy can change in place.
        if not pending.rows.released.is_set() and (
            run.options.deltas.base_snapshot == "block"
            or not all(isinstance(array, jax.Array) for array in arrays_of(split))
        ):
            limit = run.options.timeouts.save_secs
            with run.runtime.pace.lifted():
                if not pending.rows.released.wait(limit):
                    raise WaitTimeout(
                        f"step {step}: expected its tables to be written within {limit} s "
                        "(timeouts.save_secs), found the write still running; check the storage"
                    )
        blocked_secs = flight.blocked_secs = time.perf_counter() - started
        intent = pending.intent
        return Saved(step=step, kind=intent.kind, reason=intent.reason, blocked_secs=blocked_secs)

    def _is_restored(self, step: int, split: Split, arguments: SaveArguments) -> bool:
        """Returns whether the state is the restored one, unchanged, so that no save is needed."""
        run, point = self._run, self._run.lineage.forked_from
        if run.restored is None or step != (run.restored if point is None else point.save_id.step):
            return False
        if run.newest is not None and run.newest > step:
            return False  # Training went back: without a save a restart would find the later steps.
        # All processes compare, even if only one has arguments, such as metrics, that differ.
        differs = not run.lineage.parent_has(split.layout) or arguments.save_unchanged
        touched = run.tracking.touch_state(split, arguments.touched)
        return run.is_restored(split, touched, differs=differs)

    def _capture(
        self,
        step: int,
        temporary: Path,
        split: Split,
        arguments: SaveArguments,
        items: dict[str, Item],
    ) -> PendingSave:
        """Captures all items of a step into ``items``, which the caller drops after an error."""
        run = self._run
        embeddings = Embeddings(
            split=split,
            touched=run.tracking.touch_state(split, arguments.touched),
            lineage=run.lineage,
            runtime=run.runtime,
            force_base=arguments.force_base,
            dense_bytes=0 if run.dense is None else dense_layout.nbytes(split),
            copied_bytes=0 if run.dense is not None else dense_layout.nbytes(split),
            tracking=run.tracking.name(split, arguments.touched),
            tracking_audit=run.options.deltas.tracking_audit and run.tracking.tracker is None,
            digests=("item", "step"),
            fsync=run.fsync,
        )
        pending = items[run.item] = pending_save.capture(embeddings, step, run.local.step_dir(step))
        if split.layout.dense:
            item = self._dense(step, temporary, split, pending)
            if item is not None:
                items[naming.DENSE_ITEM] = item
        for name, args in (arguments.items or {}).items():
            items[name] = self._start_item(temporary / name, run.extra[name], args)
        if arguments.metrics and naming.METRICS not in items:
            items[naming.METRICS] = Metrics(arguments.metrics)
        pending.wait_copied()
        return pending

    def _drop(self, items: Mapping[str, Item]) -> None:
        """Releases what was captured for a step that will not be written."""
        for item in items.values():
            if isinstance(item, PendingSave):
                self._run.lineage.failed(item.intent.save_id)
                if self._run.dense is not None:
                    self._run.dense.failed(item.intent.save_id)
        _release(items)

    def _dense(self, step: int, temporary: Path, split: Split, pending: PendingSave) -> Item | None:
        """Captures dense leaves for our own writer or Orbax's; None if the delta has them."""
        run = self._run
        leaves = dense_layout.storable(split.dense)
        try:
            if run.dense is None:
                found = DenseLeaves.capture(leaves, run.coordinator.index, run.runtime)
            else:
                found = run.dense.capture(leaves, split.layout.dense, run.coordinator.index)
        except UnsupportedLeaf as error:
            if run.dense is not None:
                self._warn_once(
                    "unusual leaves",
                    f"step {step}: dense leaves are saved whole, by Orbax's handler, also in "
                    f"deltas: {error}",
                )
            args = orbax_dense.save_args(split.dense)
            return self._start_item(temporary / naming.DENSE_ITEM, orbax_dense.handler(), args)
        pending.dense = found
        if pending.intent.kind == "delta":
            return None
        if run.dense is not None:
            pending.base_dense_bytes = found.nbytes
            found.keep(pending.intent.save_id)
        pending.dense = None
        return found

    def _start_item(self, item_dir: Path, handler: object, args: object) -> HandlerItem:
        DurableDir(self._run.local.path, fsync=False).make(item_dir)
        return HandlerItem(handler, item_dir, args, self._run.runtime)

    def _writers(self, step: int, attempt: int) -> StepWriters:
        run = self._run
        key = f"{run.lineage.run}-{attempt}"
        return StepWriters(
            coordinator=run.coordinator,
            key=key,
            temporary=commit.temporary_dir(run.local.step_dir(step), key),
            runtime=run.runtime,
            shared_fs=not run.no_shared_fs,
            fsync=run.fsync,
        )

    def _hand_over(
        self,
        step: int,
        writers: StepWriters,
        items: Mapping[str, Item],
        pending: PendingSave | RefusedSave,
        arguments: SaveArguments,
        started: float,
    ) -> InFlight:
        """Starts the background half of a save; returns the save in flight."""
        run, begun_ns = self._run, time.time_ns()
        planned = StepTransaction(
            final=run.local.step_dir(step),
            items=items,
            tables=run.item,
            writers=writers,
            own_files=lambda: self._own_files(step, items, arguments, begun_ns),
            check=run.check_lease,
        )
        nbytes = 0 if isinstance(pending, RefusedSave) else pending.nbytes
        nbytes += sum(item.nbytes for item in items.values() if isinstance(item, DenseLeaves))
        if isinstance(pending, PendingSave) and pending.dense is not None:
            nbytes += pending.dense.nbytes
        # Keep a strong reference to the manager: __del__ would otherwise report a lost save.
        task = Task(functools.partial(self._write, planned, nbytes, self._owner))
        flight = self.in_flight = InFlight(step, writers.temporary, pending, task.future, started)
        try:
            run.runtime.queue(task)
        except RuntimeError as error:
            self.in_flight = None
            expected = f"step {step}: expected to start a thread that writes it"
            raise no_thread(expected, error, "No touched row is lost") from error
        except BaseException:  # An interrupt.
            if task.cancel():
                self.in_flight = None
            raise
        return flight

    # In the background.

    @placement.neutral()
    def _write(self, planned: StepTransaction, nbytes: int, owner: object) -> Done:
        run, begun = self._run, time.perf_counter()
        keeper, pending = run.dense, planned.items[planned.tables]
        save_id = pending.intent.save_id if isinstance(pending, PendingSave) else None
        warnings: list[str] = []
        try:
            if run.replication is not None:
                with planned.writers.working():
                    if (warning := run.replication.make_room(nbytes)) is not None:
                        warnings.append(f"step {planned.final.name}: {warning}")
            room_secs = time.perf_counter() - begun
            committed = commit.write(planned)
        except BaseException:
            _release(planned.items)  # Some items were never started.
            if keeper is not None and save_id is not None:
                # If it was committed nevertheless, the next delta has no references.
                keeper.failed(save_id)
            run.local.remove_remade(planned.writers.temporary)
            raise
        if keeper is not None and save_id is not None:
            keeper.committed(save_id, run.lineage.next_parent(save_id))
        if run.replication is not None:
            with run.coordinator.alive():
                run.replication.committed()
        if run.coordinator.index == 0:
            try:
                if self._retention is None:
                    directory.write_kept(run.local.path, None)
                else:  # After the commit, since the policy counts this step.
                    retention.enforce(self._retention, run)
            except Exception as error:
                # That of a policy may be only a key.
                text = str(error) if isinstance(error, DeltackptError) else repr(error)
                warnings.append(f"steps that retention should remove may remain: {text}")
        return Done(room_secs, committed, tuple(warnings))

    def _own_files(
        self, step: int, items: Mapping[str, Item], arguments: SaveArguments, begun_ns: int
    ) -> dict[str, bytes]:
        """Returns Orbax's metadata of the step, which lets Orbax restore it without arguments."""
        handlers = {self._run.item: naming.TABLES_HANDLER, **_ORBAX_HANDLERS}
        handlers |= {name: _typestr(handler) for name, handler in self._run.extra.items()}
        metadata = {
            "item_handlers": {name: handlers[name] for name in items},
            "metrics": dict(arguments.metrics or {}),
            "performance_metrics": {},
            "init_timestamp_nsecs": begun_ns,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": dict(arguments.custom_metadata or {}),
        }
        found = {naming.STEP_METADATA: json.dumps(metadata).encode()}
        tables = items[self._run.item]
        # Orbax opens the copy of a step in a bucket only with ``commit_success.txt``. It cannot
        # open a delta: there the file would only cost an fsync.
        if not (isinstance(tables, PendingSave) and tables.intent.kind == "delta"):
            step_dir = self._run.local.step_dir(step)
            text = f"Checkpoint commit was successful to {step_dir.name}"
            found[naming.COMMIT_SUCCESS] = text.encode()
        return found

    # On the training thread again.

    def go_back(self, split: Split, touched: TouchState | None) -> None:
        """Reverts a restore that was only for inspection: training keeps its earlier state."""
        lineage = self._run.lineage
        if self._run.tracking.tracker is not None or not lineage.can_go_back:
            # Reading the clocks waits for the step that computes them.
            return
        if lineage.go_back(self._run.clocks(split, touched)):
            self._run.restored = lineage.restored
            if self._run.tracking.hashed_before_restore:
                lineage.distrust(HASHED)

    def _warn_of_tracking(self, is_first: bool) -> None:
        """Warns of faults that the audit found, and once if tracking is missing or idle."""
        assert self.in_flight is not None
        pending = self.in_flight.pending
        assert isinstance(pending, PendingSave)
        step = pending.intent.save_id.step
        if pending.doubt is not None:
            events.warn(f"step {step} is saved as a base, because {pending.doubt}")
            self._run.wal.distrust(pending.doubt)
        elif not pending.layout.tables:
            return
        elif pending.intent.clocks_unchanged:
            self._warn_once(
                "idle marks",
                f"step {step}: expected marks since the parent of this delta, found none, so the "
                "delta contains no row; if the tables did change, pass save() the TouchState that "
                "the training step returned (touched = touched.mark(touched, ids))",
            )
        # Tracking that has stopped has warned.
        elif pending.intent.reason == UNTRACKED and not (is_first or self._run.tracking.stopped):
            self._warn_once(
                "untracked",
                f'step {step}: expected a TouchState or tracking="fingerprints", found neither, '
                "so every save is a base; pass ManagerOptions(deltas=DeltaOptions("
                'tracking="fingerprints")), or mark the rows with touched.mark or touched.track',
            )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            events.warn(text)

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
        return self.unreported is not None or (
            self.in_flight is not None and self.in_flight.is_lost
        )

    @property
    def may_commit(self) -> bool:
        """Returns whether a save that has not failed is in flight or not waited for yet."""
        return self.in_flight is not None and not self.in_flight.is_lost

    def busy(self) -> bool:
        """Returns whether a save of this process is in flight."""
        flight = self.in_flight  # Another thread may clear it now.
        return flight is not None and not flight.future.done()

    def all_busy(self) -> bool:
        """Returns, equal on every process, whether process 0 has a save in flight."""
        return self._run.coordinator.agree("asking for a free writer", self.busy())

    # The end of a save.

    def wait_finished(self, timeout_secs: float) -> Failure | None:
        """Waits for the save in flight; returns, once, its failure or that of an earlier one."""
        failure = self._wait_finished(timeout_secs) or self.unreported
        self.unreported = None
        return failure

    def wait(self, timeout_secs: float) -> None:
        """Waits for the save in flight; raises, once, its failure or that of an earlier one."""
        self.unreported = self._wait_finished(timeout_secs) or self.unreported
        self.raise_unreported()

    def raise_unreported(self) -> None:
        """Raises the failure that was not raised yet, if there is one."""
        failure, self.unreported = self.unreported, None
        if failure is not None:
            raise failure.error(None) from failure.cause

    def _wait_finished(self, timeout_secs: float) -> Failure | None:
        """Waits for the save in flight, if any, and reports it; returns its failure."""
        flight, run = self.in_flight, self._run
        self._emit_tier_events()
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
            failure = self._failed(flight, cause)
            self._collect()
            return failure
        run.newest = flight.step
        run.lineage.poll()
        while self._leftovers:
            DurableDir(run.local.path).remove(self._leftovers.pop())
        done = flight.future.result()
        self._report(flight, done)
        for text in done.warnings:
            events.warn(text)
        self._collect()
        return None

    def _collect(self) -> None:
        """Removes unneeded files, also after a failed save: a full disk needs the room."""
        try:
            self._run.ledger.collect(self._run.lineage.protected)
        except Exception as error:  # A save is valid regardless of the error.
            text = str(error) if isinstance(error, StorageError) else repr(error)
            events.warn(f"unneeded files could not be removed: {text}")

    def wait_uploaded(self, timeout_secs: float) -> None:
        """Waits until every save is durable as configured; see ``ReplicationClient.wait``."""
        if (replication := self._run.replication) is not None:
            try:
                replication.wait(timeout_secs)
            finally:
                self._emit_tier_events()

    def _emit_tier_events(self) -> None:
        if (replication := self._run.replication) is not None:
            for event in replication.poll_events():
                if replication.emits_events:
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
        failure, self._newest, self.saved_by_append = Failure(flight.step, cause), None, None
        if isinstance(flight.pending, PendingSave):
            run.lineage.failed(flight.pending.intent.save_id)
        if isinstance(cause, DeltackptError) and cause.leaves_doubt:
            run.lineage.distrust(f"the touched rows of step {flight.step} were wrong")
            run.wal.distrust(f"the touched rows of step {flight.step} were wrong")
        # Others may still write to it; remove it after the next committed save.
        self._leftovers.append(flight.temporary)
        if not flight.is_reported:
            run.emit_failure("save", flight.step, failure.cause, flight.started)
        return failure

    def wait_finished_or_warn(self) -> None:
        """Warns about a failed save before a restore; a later call raises the error."""
        flight, self._newest, self.saved_by_append = self.in_flight, None, None
        failure = self._wait_finished(self._run.options.timeouts.close_secs)
        if failure is not None:
            events.warn(f"the save of step {failure.step} failed: {failure.cause}")
            if flight is not None and not flight.is_reported:
                self.unreported = failure

    def _report(self, flight: InFlight, done: Done) -> None:
        pending, committed = flight.pending, done.committed
        assert isinstance(pending, PendingSave) and pending.event is not None
        event = dataclasses.replace(
            pending.event,
            ratio=pending.event.bytes_written / max(1, base_bytes(pending.layout.groups)),
            blocked_secs=flight.blocked_secs,
            room_secs=done.room_secs,
            commit_secs=committed.at - committed.written_at,
            total_secs=committed.at - flight.started,
            committed_unix_secs=time.time() - (time.perf_counter() - committed.at),
        )
        self.reports.append(event)
        self._run.emit(event)


def _release(items: Mapping[str, Item]) -> None:
    for item in items.values():
        if isinstance(item, PendingSave):
            item.abandon()
        elif isinstance(item, DenseLeaves):
            item.release()


def _typestr(handler: object) -> str:
    """Returns the name by which Orbax finds a handler again."""
    if (typestr := getattr(handler, "typestr", None)) is not None:
        return typestr()
    kind = handler if isinstance(handler, type) else type(handler)
    return f"{kind.__module__}.{kind.__qualname__}"
