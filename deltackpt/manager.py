# SPDX-License-Identifier: Apache-2.0
"""CheckpointManager: what a training loop holds; it wires the rest together.

It drives Orbax's v0 ``CheckpointManager``: the tables go through our handler, dense leaves
through Orbax's own PyTree handler, further items through theirs, and Orbax commits the step.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp

from deltackpt import events, processes
from deltackpt.errors import (
    ClosedError,
    DeltackptError,
    FencedError,
    ForeignDirectory,
    NoIntactStep,
    OptionError,
    ProcessFailed,
    ProcessMissing,
    RestoreError,
    SaveFailed,
    StepGone,
    StepNotFound,
    StorageError,
    TrackingError,
    TrackingFailed,
    WaitTimeout,
)
from deltackpt.format import names
from deltackpt.format.manifest import SaveId
from deltackpt.handlers import commit, dense, retention, v0, waiting
from deltackpt.handlers.agreement import Processes
from deltackpt.handlers.items import restore_args, save_args, sorted_handlers
from deltackpt.handlers.orbax_private import TMP_DIR_SUFFIX, barrier_secs, remove_by
from deltackpt.handlers.reading import OrbaxItems
from deltackpt.ledger.directory import Root
from deltackpt.options import ManagerOptions, WhenBusy
from deltackpt.outcomes import Restored, Saved
from deltackpt.policy import Decision
from deltackpt.reading.reader import Progress, RestoredTables
from deltackpt.resources.staging import Staging
from deltackpt.restore import steps
from deltackpt.restore.steps import Found, Items, RowRanges, Service, StepReader
from deltackpt.save import exits, pipeline, proof
from deltackpt.save.lineage import Clocks, Lineage, Reading, new_run
from deltackpt.save.pipeline import (
    Embeddings,
    PendingSave,
    PipelineOptions,
    RefusedSave,
    SaveReport,
)
from deltackpt.save.proof import TrackingVerifier
from deltackpt.save.rendezvous import Rendezvous
from deltackpt.state import tables, touch_state
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, TouchState
from deltackpt.tracking.fingerprints import RowTracker

#: How often a reader lists steps that a trainer removes meanwhile.
_LISTINGS = 10
#: Reports that wait for ``wait()``: a loop may never call it.
_REPORTS = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class _SaveArguments:
    touched: TouchState | None = None
    items: Items | None = None
    metrics: Mapping[str, float] | None = None
    force_base: bool = False

    def __post_init__(self) -> None:
        if not (self.touched is None or isinstance(self.touched, TouchState)):
            raise OptionError(
                "touched: expected the TouchState that deltackpt.touched.init() made and mark() "
                f"gave back, found {type(self.touched).__name__}; give that"
            )


@dataclasses.dataclass(eq=False)
class _InFlight:
    step: int
    pending: PendingSave | RefusedSave
    blocked_secs: float
    started: float
    #: When all files of this process were written, 0 before; of ``time.perf_counter()``.
    written_at: float = 0.0
    #: Of one of several processes.
    committed: bool = False
    failure: BaseException | None = None
    #: Whether the call of ``save()`` raised the failure.
    told: bool = False


class CheckpointManager:
    """Saves and restores a training state whose tables change by rows.

    Thread-safe. Use it as a context manager, or call ``close()``. Where a program ends without it,
    the save in flight is waited for all the same.

    Example:
      >>> import tempfile, jax.numpy as jnp, deltackpt
      >>> state = {"tables": {"words": jnp.ones((1000, 8))}, "bias": jnp.zeros(3)}
      >>> touched = deltackpt.touched.init(state["tables"])
      >>> with tempfile.TemporaryDirectory() as root:
      ...     handlers = {"embeddings": deltackpt.Tables(select="tables/*")}
      ...     with deltackpt.CheckpointManager(root, handlers=handlers) as manager:
      ...         _ = manager.save(0, state, touched=touched)
      ...         touched = deltackpt.touched.mark(touched, {"words": jnp.array([3, 5])})
      ...         saved = manager.save(1, state, touched=touched)
      ...         _ = manager.wait()
      ...         result = manager.restore_latest(state)
      >>> saved.kind, result.step, result.chain
      ('delta', 1, (0, 1))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        handlers: Mapping[str, Any] | None = None,
        options: ManagerOptions | None = None,
        sinks: tuple[events.Sink, ...] = (),
    ):
        """Opens a directory, and takes its lease unless it is opened read-only.

        Args:
          directory: root of the steps; made where it does not exist.
          handlers: item names to what handles them: exactly one ``Tables`` (by default
            ``{"embeddings": Tables(select="**/embedding")}``), the others Orbax v0 handlers.
          options: how to save.
          sinks: receivers of save and restore events.

        Raises:
          OptionError: the handlers or options cannot work.
          UnsupportedRoot, ForeignDirectory, StorageError: the directory cannot be used.
          ClosedError: the main thread has ended, and no save could be finished.
        """
        if not (options is None or isinstance(options, ManagerOptions)):
            raise OptionError(
                "options: expected a deltackpt.ManagerOptions, found "
                f"{type(options).__name__}; give e.g. ManagerOptions(retention=3)"
            )
        self.options = options or ManagerOptions()
        self._sinks = sinks
        self._item, self._tables, self._extra = sorted_handlers(handlers)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = True  # Until it is open.
        #: Who else closed it, and why.
        self._ended: str | None = None
        #: Whether the program has ended.
        self._leaving = False
        #: A failed save of which the owner was not told, because another manager was opened.
        self._untold: _Failure | None = None
        self._processes = Processes(
            os.fspath(directory), self.options.timeouts.processes_secs, alone=self.options.alone
        )
        if not self.options.read_only:
            for error in exits.take_over(directory):
                warnings.warn(
                    f"another manager of this process was open on the directory: {error}",
                    stacklevel=2,
                )
        self._root, run = self._open_root(directory)
        self._lineage = Lineage(
            self.options.deltas.policy,
            item=self._item,
            run=run,
            compacted=self.options.deltas.bases == "compacted",
        )
        self._tracker = RowTracker() if self.options.deltas.tracking == "fingerprints" else None
        self._verifier = TrackingVerifier()
        #: Whether it was said that no TouchState moves.
        self._told_stands_still = False
        self._staging = Staging(self.options.writes.staging_bytes)
        self._in_flight: _InFlight | None = None
        self._committed_at = 0.0
        self._due: int | None = None
        self._restored: int | None = None
        #: Whether a failed save of several processes left its temporary directory.
        self._leftovers = False
        self._reports: collections.deque[SaveReport] = collections.deque(maxlen=_REPORTS)
        #: How often reading by Orbax failed: its barriers count those that came, each for itself.
        self._failed_reads = 0
        self._orbax = self._open_orbax()
        self._steps = StepReader(
            self._root,
            self._item,
            self._tables,
            others=OrbaxItems(
                lambda: self._orbax, self._processes, self.options.timeouts.processes_secs
            ),
            share=(self._processes.index, self._processes.count),
            service_secs=self.options.timeouts.service_secs,
        )
        self._watch = None if self.options.read_only else exits.Watch(self._end, self._root.path)
        self._closed = False

    # Saving.

    def save(
        self,
        step: int,
        state: Any,
        *,
        touched: TouchState | None = None,
        items: Items | None = None,
        metrics: Mapping[str, float] | None = None,
        force_base: bool = False,
    ) -> Saved:
        """Saves a step; returns as soon as training may go on.

        Args:
          step: the training step, above every earlier one: an int, or an integer scalar of numpy or
            jax, such as flax's ``TrainState.step``.
          state: the whole training state, any pytree.
          touched: a TouchState beside those in ``state``: a row is touched if any of them says so.
            Not with ``tracking="fingerprints"``, which looks for itself.
          items: Orbax save arguments of further items.
          metrics: for retention policies that look at them.
          force_base: take a base whatever the policy says.

        Raises:
          SaveFailed: an earlier save failed in the background. This one *was* taken: its result
            is ``error.taken``, and it covers what the failed one held. ``TrackingFailed`` where the
            sampled proof found rows that changed and were not marked: then this one is a base.
          FencedError: another trainer has taken over the directory.
          OptionError: the step is not above those that the directory holds, or is no integer from
            0 to 2**63 - 1.
        """
        arguments = _SaveArguments(touched, items, metrics, force_base)
        return self._save(names.as_step(step), state, arguments, self.options.writes.when_busy)

    def save_if_due(self, step: int, state: Any, **arguments: Any) -> Saved | None:
        """Takes a save that is due: a coalesced one, or that of a preemption.

        Call it once per training step; it does nothing (in microseconds) where no save is due.
        A save that ``when_busy="coalesce"`` made due is taken once the writer is free. When the
        platform has announced a preemption, the step is saved whatever is in flight, and the
        call returns when it is durable.

        Args:
          step: the training step; a plain int costs least, a jax scalar is waited for.
          state: the state at that step.
          **arguments: as for ``save``.

        Returns:
          What was saved; None where nothing was due.
        """
        step = names.as_step(step)
        with self._lock:
            if self.reached_preemption(step):
                try:
                    return self._save(step, state, _SaveArguments(**arguments), "wait")
                finally:
                    # Also where an earlier save failed: this one was taken then.
                    self.wait()
            if self._due is None or self._all_busy():
                return None
            return self._save(step, state, _SaveArguments(**arguments), "wait")

    def next_save(self, state: Any, *, touched: TouchState | None = None) -> Decision:
        """What the next save would be, and why; notes nothing."""
        with self._lock:
            self._check_usable(writing=True)
            split = self._split(state)
            if self._tracker is not None:
                marks = (Marks("", self._tracker.touched),)
            else:
                marks = Embeddings(split=split, touched=touched).marks
            clocks = pipeline.clocks_of(split, marks)
            return self._lineage.next(clocks=clocks, layout=split.layout)

    def verify_tracking(self, state: Any, *, touched: TouchState | None = None) -> bool:
        """Proves of every row that it is marked if it changed since the last call of this.

        The sampled proof of each save looks at 1,536 rows at most, this at all: a pass over tables
        and slots, and 8 bytes per row on their devices from the first call on. Call it for a few
        steps when a training loop is set up, and after every change of the optimizer.

        Args:
          state: the whole training state.
          touched: as for ``save``.

        Returns:
          Whether there was anything to compare with: the first call, and the first one after the
          tables or their TouchStates were made anew, only look.

        Raises:
          TrackingError: rows changed that are not marked; names every such table and its rows. The
            next save is a base.
        """
        with self._lock:
            self._check_usable()
            if self._tracker is not None:
                raise OptionError(
                    'verify_tracking: expected tracking="marks", found tracking="fingerprints", '
                    "which looks at every row itself"
                )
            split = self._split(state)
            marks = Embeddings(split=split, touched=touched).marks
            try:
                return self._verifier.verify(split, marks, pipeline.clocks_of(split, marks))
            except TrackingError:
                self._lineage.distrust("verify_tracking found rows that are not marked")
                raise

    def reached_preemption(self, step: int) -> bool:
        """Whether the platform has announced that this job will be preempted at ``step``."""
        return self._orbax.reached_preemption(names.as_step(step))

    def wait(self) -> list[SaveReport]:
        """Waits until every save is committed, as durable as ``options.writes.durability`` says.

        Returns:
          Reports of the saves that were committed since the last call, the newest thousand.

        Raises:
          SaveFailed: a save failed in the background.
          WaitTimeout: it did not end within ``timeouts.close_secs``.
        """
        with self._lock:
            self._check_usable()
            failure = self._settle(self.options.timeouts.close_secs)
            reports = list(self._reports)
            self._reports.clear()
        if failure is not None:
            raise _save_failed(failure, None) from failure.cause
        return reports

    # Restoring.

    def restore_latest(
        self,
        abstract_state: Any = None,
        *,
        service: Service = "auto",
        items: Items | None = None,
        progress: Progress | None = None,
    ) -> Restored | None:
        """Restores the newest intact step.

        Tables and slots come from the memory of a restore service where one holds the step, else
        from storage, bit for bit the same; ``Restored.source`` says which it was. Each process
        finds that out for itself.

        Args:
          abstract_state: the state's structure with arrays or ``jax.ShapeDtypeStruct`` leaves,
            their shardings are used; without it nested dicts and lists of numpy arrays result.
          service: ``"auto"``: the service of the directory, where this process is connected to
            one; or a source of rows, such as ``deltackpt.service.connect(directory)``; or None
            for storage alone. It is given ``timeouts.service_secs``.
          items: Orbax restore arguments of further items.
          progress: called with bytes read and bytes in all.

        Returns:
          The step and what was skipped; None where no step was ever committed.

        Raises:
          NoIntactStep: steps were committed and none is intact.
          StepGone: every step was removed while it was read.
          ForeignDirectory: none of them is ours, or of the item's name.
          TemplateMismatch, FormatTooNew: the newest step is intact and needs something else.
        """
        with self._lock:
            self._check_usable()
            self._settle_quietly()
            started = time.perf_counter()
            skipped: list[tuple[int, RestoreError]] = []
            gone: list[tuple[int, RestoreError]] = []
            # Listed anew each time: beside a trainer, a step that goes while it is read has a
            # successor, which may have its number.
            while (step := self._newest_but({step for step, _ in skipped})) is not None:
                began = time.perf_counter()
                try:
                    result = self._restore(step, abstract_state, None, items, progress, service)
                except Exception as error:
                    if not isinstance(error, RestoreError) or not error.another_step_may_do:
                        self._tell_failure("restore", step, error, began)
                        raise
                    if isinstance(error, (StepGone, StepNotFound)) and len(gone) < _LISTINGS:
                        gone.append((step, error))
                        continue
                    self._tell_failure("skip", step, error, began)
                    skipped.append((step, error))
                    if not isinstance(error, ForeignDirectory):
                        warnings.warn(
                            f"step {step} is skipped, it is not intact: {error}", stacklevel=2
                        )
                    continue
                for foreign, error in skipped:
                    if isinstance(error, ForeignDirectory):
                        warnings.warn(f"step {foreign} is skipped: {error}", stacklevel=2)
                return dataclasses.replace(result, skipped=tuple(skipped))
            if gone and not skipped:
                self._tell_failure("restore", gone[0][0], gone[0][1], started)
                raise gone[0][1]
            if skipped:
                if all(isinstance(error, ForeignDirectory) for _, error in skipped):
                    # No copy of the directory helps: it is another one, or the item is.
                    raise skipped[0][1]
                error = NoIntactStep(
                    f"{self._root.path}: expected an intact step, found {len(skipped)} steps and "
                    f"none intact, the newest because {skipped[0][1]}; copy the directory back "
                    "from a backup, or start again in an empty one"
                )
                self._tell_failure("restore", None, error, started)
                raise error
            return None

    def restore(
        self,
        step: int,
        abstract_state: Any = None,
        *,
        tables: RowRanges | None = None,
        items: Items | None = None,
        progress: Progress | None = None,
    ) -> Restored:
        """Restores one step.

        Restoring an older step rolls back: at the next save the later steps are moved aside.

        Args:
          step: the step.
          abstract_state: as for ``restore_latest``.
          tables: read only these tables, by their paths or the ends of exactly one path each, and
            of each only a half-open range of rows (None for all); ``state`` is then a dict of
            table path to field name to numpy array, and the manager goes on as if nothing had
            been restored.
          items: as for ``restore_latest``.
          progress: as for ``restore_latest``.

        Raises:
          OptionError: it is no number of a step.
          RestoreError: what is wrong with the step.
        """
        step = names.as_step(step)
        with self._lock:
            self._check_usable()
            self._settle_quietly()
            started = time.perf_counter()
            try:
                return self._restore(step, abstract_state, tables, items, progress)
            except Exception as error:
                self._tell_failure("restore", step, error, started)
                raise

    def check_lease(self) -> None:
        """Checks that no newer trainer has taken the directory, as every save does.

        Raises:
          FencedError: one has; it is named.
        """
        self._root.check_lease()

    @property
    def goes_on_from(self) -> int | None:
        """The step that the next save must be above: the newest one, or an older one restored."""
        return self.latest_step() if self._restored is None else self._restored

    def all_steps(self) -> list[int]:
        """Committed steps on disk, ascending."""
        return sorted(self._root.steps())

    def latest_step(self) -> int | None:
        """Newest committed step on disk, None where there is none."""
        return self._root.newest_step()

    def close(self) -> None:
        """Waits for the saves in flight and gives the directory back.

        Raises:
          SaveFailed: a save failed in the background.
        """
        with self._lock:
            if self._closed:
                failure, self._untold = self._untold, None
                if failure is not None:
                    raise _save_failed(failure, None) from failure.cause
                return
            try:
                self.wait()
            finally:
                self._close()

    def _close(self) -> None:
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._close_orbax()
        self._root.close()

    def _end(self, reason: str, leaving: bool) -> None:
        """Closes the manager in the place of its owner, who did not; see ``exits.Watch``."""
        limit = self.options.timeouts.close_secs
        if not self._lock.acquire(timeout=limit):
            raise WaitTimeout(
                f"CheckpointManager of {self._root.path}: expected it to be free within {limit} s "
                "(timeouts.close_secs), found another thread at work in it; look at the storage"
            )
        try:
            if self._closed:
                return
            self._ended, self._leaving = reason, leaving
            try:
                failure = self._settle(limit)
            finally:
                if leaving:
                    # Threads and executors are ended by Python; the next trainer removes the rest.
                    self._closed = True
                else:
                    self._close()
            if failure is not None:
                self._untold = None if leaving else failure
                raise _save_failed(failure, None) from failure.cause
        finally:
            self._lock.release()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        was_closed = getattr(self, "_closed", True) and not getattr(self, "_leaving", False)
        if was_closed or self._pid != os.getpid():
            return
        flight = self._in_flight
        if not self._closed and flight is not None and self._committed_at < flight.started:
            # Its threads, which kept the manager alive, have ended without a commit.
            cause = flight.failure or flight.pending.failure
            exits.tell_lost(
                f"the save of step {flight.step} failed, and its CheckpointManager of "
                f"{self._root.path} is gone: {cause or 'see the log'}"
            )
        warnings.warn(
            f"CheckpointManager of {self._root.path} was not closed: use it in a with statement",
            ResourceWarning,
            stacklevel=1,
        )

    # The parts of a save.

    def _save(self, step: int, state: Any, arguments: _SaveArguments, when_busy: WhenBusy) -> Saved:
        started = time.perf_counter()
        items = save_args(arguments.items, self._extra)
        arguments = dataclasses.replace(arguments, items=items)
        with self._lock:
            self._check_usable(writing=True)
            if self._watch is not None:
                self._watch.trainer = threading.current_thread()
            if when_busy != "wait" and self._all_busy():
                return self._not_now(step, started)
            failure = self._settle(self.options.timeouts.save_secs)
            self._due = None
            if failure is not None and isinstance(failure.cause, ProcessMissing):
                # Orbax would wait for that process on the training thread.
                raise _save_failed(failure, None) from failure.cause
            try:
                saved = self._start(step, state, arguments, started)
            except Exception as error:
                if failure is not None:
                    error.add_note(f"Before that, {_save_failed(failure, None)}")
                if not _goes_on(error):
                    self._tell_failure("save", step, error, started)
                raise
            self._warn_of_tracking()
        if failure is not None:
            raise _save_failed(failure, saved) from failure.cause
        return saved

    def _start(self, step: int, state: Any, arguments: _SaveArguments, started: float) -> Saved:
        if self._processes.count == 1:
            # Of several processes one holds the lease: its commit checks it, and tells the others.
            self._root.check_lease()
        # First of all: what cannot be stored leaves even a rollback undone.
        split = self._split(state, dense_fault=dense.fault)
        if self._tracker is None and self._lineage.can_go_back:
            # Looked at only then: reading the clocks waits for the step that computes them.
            self._go_back(split, arguments.touched)
        self._check_step(step)
        self._roll_back(step)
        embeddings = Embeddings(
            split=split,
            touched=self._touched_rows(split, arguments.touched),
            lineage=self._lineage,
            options=PipelineOptions(
                sampled_proof=self.options.deltas.sampled_proof and self._tracker is None,
                fsync=self._fsync,
                staging_bytes=self.options.writes.staging_bytes,
                digests=("item", "step"),
                processes_secs=self.options.timeouts.processes_secs,
            ),
            staging=self._staging,
            force_base=arguments.force_base,
        )
        pending: PendingSave | RefusedSave
        attempt = self._lineage.attempts + 1
        try:
            pending = pipeline.snapshot(embeddings, step, self._root.step_dir(step))
        except Exception as error:
            if self._processes.count == 1:
                raise
            self._lineage.count_attempts(attempt)
            pending = RefusedSave(error)
        args: dict[str, ocp.args.CheckpointArgs] = {self._item: v0.DeltaSave(pending)}
        if split.layout.dense:
            args[names.DENSE_ITEM] = dense.save_args(split.dense)
        try:
            with barrier_secs(self.options.timeouts.processes_secs):
                self._orbax.save(
                    step,
                    args=ocp.args.Composite(**args, **(arguments.items or {})),
                    metrics=arguments.metrics,
                    force=True,
                )
        except BaseException as error:
            self._give_up(pending)
            self._orbax.reload()
            if self._processes.count > 1 and isinstance(error, jax.errors.JaxRuntimeError):
                raise self._processes.named(f"starting the save of step {step}", error) from error
            raise
        flight = self._in_flight = _InFlight(step, pending, 0.0, started)
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
        if self.options.deltas.base_snapshot == "block" or _has_host_arrays(split):
            self._wait_released(pending, step)
        blocked_secs = flight.blocked_secs = time.perf_counter() - started
        intent = pending.intent
        return Saved(step=step, kind=intent.kind, reason=intent.reason, blocked_secs=blocked_secs)

    def _touched_rows(self, split: Split, given: TouchState | None) -> TouchState | None:
        if self._tracker is None:
            return given
        if given is not None:
            raise OptionError(
                'touched: expected none with tracking="fingerprints", which finds the rows by '
                'itself, found a TouchState; leave it out, or use tracking="marks"'
            )
        return self._tracker.look(split.fields, split.layout)

    def _split(
        self, state: Any, *, dense_fault: Callable[[Any], str | None] | None = None
    ) -> Split:
        split = tables.split(state, self._tables, dense_fault=dense_fault)
        # Fingerprints see more than the marks in a state.
        return split if self._tracker is None else dataclasses.replace(split, marks=())

    def _go_back(self, split: Split, touched: TouchState | None) -> None:
        """Forgets a restore that was only looked at: training goes on with what it had before."""
        marks = Embeddings(split=split, touched=touched).marks
        if self._lineage.go_back(pipeline.clocks_of(split, marks)):
            self._restored = self._lineage.restored

    def _warn_of_tracking(self) -> None:
        """Says what the sampled proof found, and once where no TouchState moves."""
        assert self._in_flight is not None
        pending = self._in_flight.pending
        assert isinstance(pending, PendingSave)
        step = pending.intent.save_id.step
        if pending.doubt is not None:
            warnings.warn(f"step {step} is saved as a base, since {pending.doubt}", stacklevel=4)
        elif pending.intent.stands_still and not self._told_stands_still:
            self._told_stands_still = True
            warnings.warn(
                f"step {step}: no TouchState has moved since the parent of this delta, which "
                "therefore holds no row; if the tables did change, give save() the TouchState that "
                "the training step returned (touched = touched.mark(touched, ids))",
                stacklevel=4,
            )

    def _give_up(self, pending: PendingSave | RefusedSave) -> None:
        """Ends a save that failed; it stays the parent of the next where it was committed."""
        if isinstance(pending, PendingSave):
            self._lineage.failed(pending.intent.save_id)
            pending.abandon()

    def _wait_released(self, pending: PendingSave, step: int) -> None:
        if not pending.released.wait(self.options.timeouts.save_secs):
            raise WaitTimeout(
                f"step {step}: expected its tables to be written within "
                f"{self.options.timeouts.save_secs} s (timeouts.save_secs), found the write still "
                "running; look at the storage"
            )

    def _not_now(self, step: int, started: float) -> Saved:
        flight = self._in_flight
        # Of several processes process 0 may be the only one that is not done yet.
        which = "a step" if flight is None else f"step {flight.step}"
        reason = f"{which} is still being saved"
        if self.options.writes.when_busy == "coalesce":
            self._due = step
            reason += "; due, save_if_due() takes it"
        return Saved(
            step=step,
            kind=None,
            reason=f"skipped: {reason}",
            blocked_secs=time.perf_counter() - started,
        )

    def _check_step(self, step: int) -> None:
        # A listing may differ from process to process.
        newest = self.latest_step() if self._processes.count == 1 else self._newest
        if self._restored is not None:
            newest = self._restored
        if newest is None or step > newest:
            return
        raise OptionError(
            f"step {step} in {self._root.path}: expected a step above {newest}, the newest in the "
            "directory or the restored one, found an older or equal one; call restore_latest() or "
            "restore(step) first to go on from a step, or use an empty directory"
        )

    def _roll_back(self, step: int) -> None:
        """Moves steps later than the restored one aside, once, before the first save."""
        if self._restored is None:
            return
        # The others list no steps before process 0 has moved them.
        what = f"going on from step {self._restored} with step {step}"
        with self._processes.together(what, fatal=True):
            moved = self._root.roll_back(self._restored, self._lineage.run)
        self._newest, self._restored = self._restored, None
        if moved or self._processes.count > 1:
            # Orbax forgets what was moved. Only process 0 knows whether anything was.
            self._restart_orbax()

    def _busy(self) -> bool:
        return self._in_flight is not None and self._orbax.is_saving_in_progress()

    def _all_busy(self) -> bool:
        """Whether a save is in flight: what process 0 finds, on every process."""
        return self._processes.agree("asking for a free writer", self._busy())

    def _settle(self, timeout_secs: float) -> _Failure | None:
        """Waits for the save in flight, if any, and reports it."""
        flight = self._in_flight
        if flight is None:
            return None
        failure = None
        try:
            waiting.bounded(
                self._orbax.wait_until_finished, timeout_secs, f"the save of {flight.step}"
            )
        except Exception as error:
            if _goes_on(error):
                raise
            # Orbax raises what came last; what came first says why.
            cause = flight.failure or flight.pending.failure
            failure = _Failure(flight.step, cause if isinstance(cause, Exception) else error)
            self._give_up(flight.pending)
            if isinstance(failure.cause, DeltackptError) and failure.cause.leaves_doubt:
                self._lineage.distrust(f"the touched rows of step {flight.step} were wrong")
            self._reset_orbax()
        self._in_flight = None
        if failure is None:
            self._newest = flight.step
            if self._leftovers:
                self._root.remove_leftovers()
                self._leftovers = False
            self._report(flight)
            try:
                self._root.collect(self._lineage.protected)
            except StorageError as error:
                warnings.warn(f"what nothing needs could not be removed: {error}", stacklevel=4)
        elif not flight.told:
            self._tell_failure("save", flight.step, failure.cause, flight.started)
        return failure

    def _settle_quietly(self) -> None:
        """A failed save does not stand in the way of a restore; it is logged."""
        failure = self._settle(self.options.timeouts.close_secs)
        if failure is not None:
            warnings.warn(f"the save of step {failure.step} failed: {failure.cause}", stacklevel=3)

    def _report(self, flight: _InFlight) -> None:
        assert isinstance(flight.pending, PendingSave)
        report = flight.pending.report
        assert report is not None
        self._reports.append(report)
        committed_ago_secs = time.perf_counter() - self._committed_at
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
            commit_secs=self._committed_at - flight.written_at,
            total_secs=self._committed_at - flight.started,
            committed_unix_secs=time.time() - committed_ago_secs,
            tables=report.tables,
        )
        events.emit(event, self._sinks)

    def _tell_failure(
        self,
        operation: Literal["save", "restore", "skip"],
        step: int | None,
        error: Exception,
        started: float,
    ) -> None:
        seconds = time.perf_counter() - started
        process = processes.index()
        event = events.FailureEvent.of(error, operation, step, process=process, seconds=seconds)
        events.emit(event, self._sinks)

    def _meet(self, *, key: str, timeout_ms: int) -> None:
        """What Orbax's background threads call where several processes are to meet.

        They meet through the step's directory (``Rendezvous``), where a failure is seen at once,
        and not at a barrier. ``timeout_ms`` is Orbax's.
        """
        flight = self._in_flight
        if self._processes.count == 1 or flight is None:
            return
        step_dir = self._root.step_dir(flight.step)
        peers = self._rendezvous(flight.step)
        try:
            if "async_write_complete" in key:
                self._note_written()
                commit.write_process_digests(peers.temporary, peers.process, fsync=self._fsync)
                if peers.process == 0:
                    peers.await_written()
            elif "async_commit_complete" in key:
                if peers.process > 0:
                    peers.await_commit(step_dir.is_dir)
                    self._note_commit()
                flight.committed = True
            elif not flight.committed:
                # The end of a save that failed in Orbax, which keeps the reason to itself.
                peers.fail(SaveFailed("Orbax could not write or commit the step; see the log"))
        except BaseException as error:
            self._note_failure(error)
            raise

    def _rendezvous(self, step: int) -> Rendezvous:
        step_dir = self._root.step_dir(step)
        temporary = step_dir.with_name(f"{step_dir.name}{TMP_DIR_SUFFIX}")
        return pipeline.rendezvous(temporary, self.options.timeouts.processes_secs)

    def _note_written(self) -> None:
        """Called by Orbax's threads when all files of this process are written, and later."""
        flight = self._in_flight
        if flight is not None and not flight.written_at:
            flight.written_at = time.perf_counter()

    def _note_failure(self, error: BaseException) -> None:
        """Called by Orbax's threads with what ended a save before its commit."""
        flight = self._in_flight
        if flight is not None and flight.failure is None:
            flight.failure = error
            self._rendezvous(flight.step).fail(error)

    def _note_commit(self) -> None:
        """Called by Orbax's thread; the save is reported later, by the next save or wait."""
        self._committed_at = time.perf_counter()

    # The parts of a restore.

    def _newest_but(self, skipped: set[int]) -> int | None:
        """The newest step that process 0 finds, those skipped left out."""
        return self._processes.of_first(
            "choosing a step", lambda: max({*self.all_steps()} - skipped, default=None)
        )

    def _restore(
        self,
        step: int,
        template: Any,
        rows: RowRanges | None,
        items: Items | None,
        progress: Progress | None,
        service: Service = None,
    ) -> Restored:
        started = time.perf_counter()
        items = restore_args(items, self._extra)
        with self._processes.together(f"finding step {step}"):
            found = self._steps.find(step, template, rows, service)
        found_at = time.perf_counter()
        own = dataclasses.astuple(found.target.info.save_id)
        agreed = SaveId(*self._processes.agree("choosing a save", own))
        with self._reading(f"restoring step {step}"):
            loaded = self._steps.load(found, agreed, progress)
        read_at = time.perf_counter()
        merged = loaded.tables
        state: Any = merged.fields
        fresh: TouchState | None = None
        extra: dict[str, Any] = {}
        if rows is None:
            run = self._processes.agree("a new run", new_run())
            identity = touch_state.identity_of(run)
            state, fresh = steps.joined(template, found, loaded, identity)
            if items:
                with self._reading(f"restoring items of step {step}"):
                    extra = self._steps.items(found, items)
                    found.check_stays()
            if not self.options.read_only:
                self._go_on_from(found, merged, state, fresh, run)
        result = Restored(
            step=step,
            state=state,
            touched=fresh,
            items=extra,
            chain=tuple(info.save_id.step for info in merged.chain),
            skipped=(),
            source=merged.source,
            service_error=loaded.problem,
            bytes_read=merged.bytes_read,
            seconds=time.perf_counter() - started,
        )
        event = events.RestoreEvent(
            step=step,
            process=processes.index(),
            chain=result.chain,
            source=result.source,
            bytes_read=result.bytes_read,
            find_secs=found_at - started,
            read_secs=read_at - found_at,
            place_secs=started + result.seconds - read_at,
            total_secs=result.seconds,
        )
        events.emit(event, self._sinks)
        return result

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Reading by Orbax, which has all processes meet afterwards, after which all raise or none.

        Raises:
          RestoreError, ProcessFailed, ProcessMissing: as ``Processes.together``.
        """
        try:
            with self._processes.together(what):
                yield
        except Exception as error:
            if self._processes.count > 1 and not isinstance(error, ProcessMissing):
                # The process that failed did not come to the barrier: it is one behind the others.
                self._failed_reads += 1
                self._restart_orbax()
            raise

    def _go_on_from(
        self,
        found: Found,
        merged: RestoredTables,
        state: Any,
        fresh: TouchState | None,
        run: str,
    ) -> None:
        """Makes a restored step the parent of the next save."""
        # Each process may have read another chain to the step; all decide from one.
        sizes = self._processes.agree("what was read", [info.nbytes for info in merged.chain])
        target_layout = merged.layout
        if found.expected is not None and target_layout.has_rows_of(found.expected.layout):
            # The state goes on in the template's containers, which need not be the saved ones.
            target_layout = found.expected.layout
        identity = touch_state.identity_of(run)
        clocks = Clocks(readings=(Reading("", identity, 0),))
        witness = None
        if self._tracker is not None:
            kept = merged if found.expected is None else tables.split(state, self._tables)
            self._tracker.start(kept.fields, kept.layout, identity)
        elif fresh is not None:
            split = tables.split(state, self._tables)
            clocks = dataclasses.replace(clocks, windows=pipeline.clocks_of(split, ()).windows)
            if self.options.deltas.sampled_proof:
                witness = proof.of_restored(split, fresh, self._staging)
        self._lineage.adopt(
            merged.chain[-1],
            Path(found.target.step_dir),
            target_layout,
            sizes=sizes,
            clocks=clocks,
            restores=found.target.head.restores,
            run=run,
            witness=witness,
        )
        self._restored = found.step

    # Several processes.

    def _open_root(self, directory: str | os.PathLike[str]) -> tuple[Root, str]:
        """The directory, opened by process 0 before the others, and the id of the new run."""
        root: Root | None = None
        error: Exception | None = None
        read_only = self.options.read_only
        if self._processes.index == 0:
            try:
                root = Root.open(directory, item=self._item, read_only=read_only)
            except Exception as caught:
                error = caught
        text = None if error is None else f"{type(error).__name__}: {error}"
        newest = root.newest_step() if root is not None else None
        run, text, self._newest = self._processes.agree("opening", (new_run(), text, newest))
        if error is not None:
            raise error
        if text is not None:
            raise ProcessFailed(f"{directory}: expected process 0 to open it, found that {text}")
        return root or Root.open(directory, item=self._item, read_only=True), run

    # Orbax.

    @property
    def _fsync(self) -> bool:
        return self.options.writes.durability == "power"

    def _open_orbax(self) -> ocp.CheckpointManager:
        if self.options.read_only:
            # Beside a trainer: it lists the steps, then looks at each, which may be gone.
            for _ in range(_LISTINGS):
                with contextlib.suppress(FileNotFoundError):
                    return self._new_orbax()
        return self._new_orbax()

    def _new_orbax(self) -> ocp.CheckpointManager:
        options = self.options
        inner = retention.as_policy(options.retention)
        manager = ocp.CheckpointManager(
            self._root.path,
            item_handlers={
                self._item: v0.DeltaHandler(),
                names.DENSE_ITEM: dense.handler(),
                **self._extra,
            },
            options=ocp.CheckpointManagerOptions(
                create=False,
                read_only=options.read_only,
                save_interval_steps=0 if options.read_only else 1,
                preservation_policy=retention.KeepChain(
                    inner,
                    self._lineage.protected,
                    self._root.saves,
                    self._root.compacted,
                    deletes=self._processes.index == 0,
                ),
                temporary_path_class=commit.temporary_path_class(
                    fsync=self._fsync,
                    item=self._item,
                    begun=self._note_written,
                    check=self._root.check_lease,
                    committed=self._note_commit,
                    failed=self._note_failure,
                ),
                save_root_metadata=False,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=0 if not options.alone else processes.index(),
                    # Barriers of the coordination service, which have a limit, instead of
                    # collectives of the devices, which have none.
                    active_processes=self._active_processes,
                    barrier_sync_key_prefix=f"deltackpt-{self._lineage.run}-{self._failed_reads}",
                ),
                async_options=ocp.options.AsyncOptions(
                    # Above every limit of ours, which say more.
                    timeout_secs=math.ceil(
                        options.timeouts.save_secs + 4 * options.timeouts.processes_secs
                    ),
                    barrier_sync_fn=self._meet,
                ),
            ),
        )
        remove_by(manager, self._root.remove_steps)
        return manager

    @property
    def _active_processes(self) -> set[int] | None:
        if self.options.alone:
            return {processes.index()}
        return self._processes.everybody if self._processes.count > 1 else None

    def _reset_orbax(self) -> None:
        """After a failure: Orbax keeps raising the old error and forgets steps; start it anew."""
        if self._leaving:
            return
        self._close_orbax()
        if self._processes.count == 1:
            self._root.remove_leftovers()
        else:
            # Others may not have seen its notes yet; the next save clears its own place.
            self._leftovers = True
        self._orbax = self._open_orbax()

    def _restart_orbax(self) -> None:
        self._close_orbax()
        self._orbax = self._open_orbax()

    def _close_orbax(self) -> None:
        with contextlib.suppress(Exception):
            # Orbax raises the error of the failed save again, which was reported already.
            limit = self.options.timeouts.close_secs
            waiting.bounded(self._orbax.close, limit, "the end of Orbax's threads")

    def _check_usable(self, *, writing: bool = False) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                f"CheckpointManager of {self._root.path}: expected to be used in process "
                f"{self._pid}, found process {os.getpid()}; make a manager in the child instead"
            )
        if self._ended is not None and not self._leaving:
            raise FencedError(
                f"CheckpointManager of {self._root.path}: expected to hold the directory, found "
                f"that {self._ended}; go on with that one"
            )
        if self._closed:
            raise ClosedError(
                f"CheckpointManager of {self._root.path}: expected an open manager, found it "
                f"closed{f', because {self._ended}' if self._ended else ''}; make a new one"
            )
        if writing and self.options.read_only:
            raise OptionError(
                f"CheckpointManager of {self._root.path}: expected a manager that may write, "
                f"found access={self.options.access!r}; open it with access='write' to save"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class _Failure:
    step: int
    cause: Exception


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


def _save_failed(failure: _Failure, taken: Saved | None) -> SaveFailed:
    if isinstance(failure.cause, DeltackptError):
        detail = str(failure.cause)
    else:
        detail = f"{type(failure.cause).__name__}: {failure.cause}"
    follow = (
        "no touched row is lost, save again"
        if taken is None
        else f"step {taken.step} was taken and covers its rows"
    )
    kind = SaveFailed
    if isinstance(failure.cause, DeltackptError) and failure.cause.leaves_doubt:
        kind = TrackingFailed
        follow = "the next save is a base" if taken is None else f"step {taken.step} was taken"
    error = kind(f"the save of step {failure.step} failed: {detail}; {follow}")
    error.taken = taken
    return error
