# SPDX-License-Identifier: Apache-2.0
"""CheckpointManager: what a training loop holds; it wires the rest together.

``handlers.saving`` has what a save does, ``handlers.restoring`` what a restore does, and both share
a ``Run``. Here is the surface: one call at a time, in the process that made the manager, until it
is closed by its owner, by the end of the program or by another manager of the same directory.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from deltackpt import events, processes
from deltackpt.errors import (
    ClosedError,
    FencedError,
    OptionError,
    TrackingError,
    WaitTimeout,
)
from deltackpt.format import names
from deltackpt.handlers import decision, dense
from deltackpt.handlers.catalog import Catalog, Metric, Mode
from deltackpt.handlers.flight import Failure, SaveArguments
from deltackpt.handlers.items import json_args, sorted_handlers
from deltackpt.handlers.restoring import Restorer
from deltackpt.handlers.run import Run
from deltackpt.handlers.saving import Saver
from deltackpt.ledger.steps import Steps
from deltackpt.log import batch
from deltackpt.log.recorder import Call, Recorder
from deltackpt.options import LogOptions, ManagerOptions, WhenBusy
from deltackpt.outcomes import Logged, ReadRows, ReadState, Restored, Saved
from deltackpt.policy import Decision
from deltackpt.reading.reader import Progress
from deltackpt.reading.stretches import LogPoint
from deltackpt.restore.steps import Items, RowRanges, Service
from deltackpt.save import exits, snapshot
from deltackpt.save.flight import Embeddings, SaveReport
from deltackpt.save.proof import TrackingVerifier
from deltackpt.save.termination import Termination
from deltackpt.state.touch_state import Marks, TouchState
from deltackpt.tiers import opening


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
        """Opens a root, and takes its lease unless it is opened read-only.

        Args:
          directory: root of the steps: a directory, made where it does not exist; or a bucket, by
            its URL: ``s3://bucket/run``, ``gs://...``, ``az://...`` or ``nodes://...``. See
            ``Tiers`` for how saves come there.
          handlers: item names to what handles them: exactly one ``Tables`` (by default
            ``{"embeddings": Tables(select="**/embedding")}``), the others Orbax v0 handlers. Items
            of JSON need none.
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
        options = options or ManagerOptions()
        item, choice, extra = sorted_handlers(handlers)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = True  # Until it is open.
        #: Who else closed it, and why.
        self._ended: str | None = None
        #: Whether the program has ended.
        self._leaving = False
        #: A failed save of which the owner was not told, because another manager was opened.
        self._untold: Failure | None = None
        #: The step that the last ``log()`` has saved in the place of a mark.
        self._saved_by_log: Saved | None = None
        self._verifier = TrackingVerifier()
        if not options.read_only:
            for error in exits.take_over(opening.saves_to(directory, options, processes.index())):
                events.warn(f"another manager of this process was open on the directory: {error}")

        def open_root(writing: bool) -> Steps:
            return opening.open_root(
                directory,
                item=item,
                options=options,
                writing=writing,
                process=processes.index(),
                processes=processes.count(),
            )

        self._run = Run.begin(directory, item, choice, options, sinks, open_root)
        self._root = self._run.root
        self._recorder: Recorder | None = None
        if not options.read_only:
            self._recorder = self._run.log = Recorder(self._run)
        self._saver = Saver(self._run, extra, self)
        self._restorer = Restorer(self._run, extra)
        self._catalog = Catalog(self._run)
        self._termination = Termination()
        self._watch = None if options.read_only else exits.Watch(self._end, self._run.held.path)
        self._closed = False

    @property
    def options(self) -> ManagerOptions:
        """How it saves and restores; given when it was opened."""
        return self._run.options

    # Saving.

    def save(
        self,
        step: int,
        state: Any,
        *,
        touched: TouchState | None = None,
        items: Items | None = None,
        metrics: Mapping[str, float] | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
        force_base: bool = False,
        force: bool = False,
    ) -> Saved:
        """Saves a step; returns as soon as training may go on.

        Args:
          step: the training step, above every earlier one: an int, or an integer scalar of numpy or
            jax, such as flax's ``TrainState.step``.
          state: the whole training state, any pytree.
          touched: a TouchState beside those in ``state``: a row is touched if any of them says so.
            Not with ``tracking="fingerprints"``, which looks for itself.
          items: Orbax save arguments of further items.
          metrics: numbers kept with the step, for ``best_step`` and policies of retention.
          custom_metadata: what JSON can write, kept with the step.
          force_base: take a base whatever the policy says.
          force: take the step whatever ``options.decision`` says; so does ``force_base``.

        Returns:
          What was saved; its kind is None where ``options`` had this step skipped. Where ``log()``
          has just saved this very step in the place of a mark, that is it.

        Raises:
          SaveFailed: an earlier save failed in the background. This one *was* taken: its result
            is ``error.taken``, and it covers what the failed one held. ``TrackingFailed`` where the
            sampled proof found rows that changed and were not marked: then this one is a base.
          FencedError: another trainer has taken over the directory.
          OptionError: the step is not above those that the directory holds, or is no integer from
            0 to 2**63 - 1.
        """
        arguments = SaveArguments(touched, items, metrics, force_base, custom_metadata)
        when_busy, started = self.options.writes.when_busy, time.perf_counter()
        step = names.as_step(step)
        if (done := self._saved_by_log) is not None and done.step == step and not force_base:
            if metrics or items or custom_metadata:
                events.warn(
                    f"step {step}: log() has saved it already, without the metrics, items and "
                    "metadata that save() was given; call save() before log() at steps of both"
                )
            return dataclasses.replace(done, reason=f"{done.reason}; by log(), at this step")
        if not (force or force_base or self.should_save(step, metrics=metrics)):
            return Saved.skipped(step, "options.decision does not take this step", started)
        return self._save(step, state, arguments, when_busy)

    def should_save(self, step: int, *, metrics: Mapping[str, float] | None = None) -> bool:
        """Whether ``options.decision`` takes a step; of several processes what process 0 finds."""
        with self._lock:
            self._check_usable(writing=True)
            step = names.as_step(step)
            flight, preempted = self._saver.in_flight, self.reached_preemption
            return decision.should_save(self._run, step, flight, metrics, preempted)

    def save_if_due(
        self,
        step: int,
        state: Any,
        *,
        touched: TouchState | None = None,
        items: Items | None = None,
        metrics: Mapping[str, float] | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
        force_base: bool = False,
    ) -> Saved | None:
        """Takes a save that is due: a coalesced one, or that of a preemption.

        Call it once per training step; it does nothing (in microseconds) where no save is due.
        A save that ``when_busy="coalesce"`` made due is taken once the writer is free. When the
        platform has announced a preemption, or a SIGTERM has come since the first call, the step is
        saved whatever is in flight, and the call returns when it is durable.

        Args:
          step: the training step; a plain int costs least, a jax scalar is waited for.
          state: the state at that step.
          touched: as for ``save``, and so the others.
          items: ditto.
          metrics: ditto.
          custom_metadata: ditto.
          force_base: ditto.

        Returns:
          What was saved; None where nothing was due.
        """
        step = names.as_step(step)
        with self._lock:
            preempted = self.reached_preemption(step)
            if not preempted and (self._saver.due is None or self._saver.all_busy()):
                return None
            arguments = SaveArguments(touched, items, metrics, force_base, custom_metadata)
            try:
                return self._save(step, state, arguments, "wait")
            finally:
                if preempted:
                    # Also where an earlier save failed: this one was taken then.
                    self.wait()

    def _save(self, step: int, state: Any, arguments: SaveArguments, when_busy: WhenBusy) -> Saved:
        started = time.perf_counter()
        with self._lock:
            self._check_usable(writing=True)
            if self._watch is not None:
                self._watch.trainer = threading.current_thread()
            return self._saver.save(step, state, arguments, when_busy, started)

    def next_save(self, state: Any, *, touched: TouchState | None = None) -> Decision:
        """What the next save would be, and why; notes nothing."""
        with self._lock:
            self._check_usable(writing=True)
            split = self._saver.split(state)
            if self._run.tracker is not None:
                marks = (Marks("", self._run.tracker.touched),)
            else:
                marks = Embeddings(split=split, touched=touched).marks
            clocks = snapshot.clocks_of(split, marks)
            return self._run.lineage.next(clocks=clocks, layout=split.layout)

    def verify_tracking(self, state: Any, *, touched: TouchState | None = None) -> bool:
        """Proves of every row that it is marked if it changed since the last call of this.

        The sampled proof of each save looks at some 1,536 rows, this at all: a pass over tables
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
            if self._run.tracker is not None:
                raise OptionError(
                    'verify_tracking: expected tracking="marks", found tracking="fingerprints", '
                    "which looks at every row itself"
                )
            split = self._saver.split(state)
            marks = Embeddings(split=split, touched=touched).marks
            try:
                return self._verifier.verify(split, marks, snapshot.clocks_of(split, marks))
            except TrackingError:
                reason = "verify_tracking found rows that are not marked"
                self._run.lineage.distrust(reason)
                self._run.log.distrust(reason)
                raise

    def reached_preemption(self, step: int) -> bool:
        """Whether this job will be preempted at ``step``: by the platform's word, or by SIGTERM.

        The first call in the main thread makes the manager listen for SIGTERM until it is closed:
        the first step that is asked for after one is that of the preemption.
        """
        step = names.as_step(step)
        return self._termination.announced(step) or processes.reached_preemption(step)

    def wait(self) -> list[SaveReport]:
        """Waits until every save is committed, as durable as ``options.writes.durability`` says.

        Of a bucket, until every save is where ``Tiers.wait_for`` says.

        Returns:
          Reports of the saves that were committed since the last call, the newest thousand.

        Raises:
          SaveFailed: a save failed in the background.
          WaitTimeout: it did not end within ``timeouts.close_secs``.
          FencedError: another trainer has taken the bucket.
        """
        limit = self.options.timeouts.close_secs
        with self._lock:
            self._check_usable()
            failure = self._saver.settle(limit)
            if failure is not None:
                self._saver.reports.clear()
                raise failure.error(None) from failure.cause
            self._saver.settle_at_root(limit)
            if self._recorder is not None:
                self._recorder.wait(limit)
            reports = list(self._saver.reports)
            self._saver.reports.clear()
        return reports

    def is_saving_in_progress(self) -> bool:
        """Whether a save of this process is being written."""
        return self._saver.busy()

    def check_for_errors(self) -> None:
        """Raises what has failed in the background, without waiting for what goes on.

        Raises:
          SaveFailed: a save failed; it is raised once.
        """
        with self._lock:
            self._check_usable()
            failure = self._saver.settle(0.0) if self._saver.is_lost else None
        if failure is not None:
            raise failure.error(None) from failure.cause

    # The log between steps.

    def log(
        self,
        step: int,
        state: Any,
        *,
        touched: TouchState | None = None,
        ids: Mapping[str, Any] | None = None,
        items: Mapping[str, Any] | None = None,
        full: bool | None = None,
    ) -> Logged:
        """Logs what has changed since the last call: a point to restore, in a few ms.

        Rows and dense leaves are copied before it returns, and are durable soon after: see
        ``wait_logged``. All processes call it at the same steps. It goes on from the step or point
        that was restored, or from a save; where there is none, where the tables have changed, and
        where the log has grown to ``LogOptions.most_bytes``, it saves the step instead.

        Args:
          step: the training step, above those that were logged before.
          state: the whole training state.
          touched: as for ``save``.
          ids: table, or the end of its path, to the numbers of rows that were touched since the
            last call of ``log()``, whatever was saved meanwhile, on the host: spares a look at the
            stamps, for which an accelerator is waited for. Each save compares them with the stamps.
          items: small things by name, bytes or what JSON can write, such as a data iterator's
            position; a restored point has them in ``Restored.items``. A step that is saved instead
            has them as items of JSON, bytes as ``{"base64": ...}``.
          full: whether the mark has all dense leaves; by default as ``LogOptions`` say.

        Returns:
          What was taken.

        Raises:
          OptionError: the manager has no ``ManagerOptions.log``; the step is not above the last;
            an item, or ids, cannot be used.
          LogFailed: earlier marks could not be made durable, and ``on_failure="raise"``.
          WaitTimeout: the buffer was full for ``deadline_secs``.
          TrackingError: a TouchState does not fit the tables.
          FencedError: another trainer has taken over the directory.
          SaveFailed: as ``save``, where the step was saved instead.
        """
        started = time.perf_counter()
        with self._lock:
            self._check_usable(writing=True)
            if self.options.log is None:
                raise OptionError(
                    "log: expected a manager with a log, found none; make it with "
                    "ManagerOptions(log=LogOptions())"
                )
            assert self._recorder is not None
            self._saved_by_log = None
            self._recorder.count()
            step = names.as_step(step)
            split = self._saver.split(state, dense_fault=dense.fault)
            self._saver.go_back(split, touched)
            call = Call(touched, ids, items, full, started, self._saver.may_commit)
            found = self._recorder.log(step, split, call)
            if isinstance(found, Logged):
                return found
            arguments = SaveArguments(touched=touched, items=json_args(batch.as_json(items)))
            saved = self._saved_by_log = self._save(step, state, arguments, "wait")
            return Logged(
                step=step,
                kind=None,
                reason=f"saved the step instead: {found.reason}",
                blocked_secs=time.perf_counter() - started,
                recovery=self._recorder.recovery(),
                saved=saved,
            )

    def wait_logged(self, timeout_secs: float | None = None) -> LogPoint | int | None:
        """Waits until all that this process has logged is as durable as steps are.

        So it waits as well for the save that the marks lead down to, where that is in flight: of a
        new run the first one. Later marks lead down to a step that stands.

        Args:
          timeout_secs: the longest wait; ``LogOptions.deadline_secs`` by default.

        Returns:
          What a restore would find now: the newest point that every process has, or a newer step;
          None where there is none yet.

        Raises:
          WaitTimeout: it is not within that time; nothing is lost.
          LogFailed: some of it could not be made durable; no touched row is lost.
          SaveFailed: the save that the marks lead down to has failed; the next ``log()`` saves.
          FencedError: another trainer has taken over the directory.
        """
        limit = timeout_secs
        if limit is None:
            limit = (self.options.log or LogOptions()).deadline_secs
        deadline = time.monotonic() + limit
        with self._lock:
            self._check_usable(writing=True)
            assert self._recorder is not None
            found = self._recorder.wait(limit)
            if self._recorder.is_anchored:
                return found
            failure = self._saver.settle(max(0.0, deadline - time.monotonic()))
            if failure is not None:
                raise failure.error(None) from failure.cause
            return self._recorder.recovery(fresh=True)

    def points(self) -> list[LogPoint]:
        """Full points of the log that can be restored by way of a committed step, newest first.

        One may be trimmed before it is restored, once two further steps are committed: ``restore``
        says so then. Of a manager's own none is, as long as it neither saves, logs nor waits.

        Raises:
          Damaged: the newest head of the log cannot be read.
        """
        with self._lock:
            self._check_usable()
            if self._recorder is not None:
                self._recorder.settle_trimming()
            return self._restorer.points()

    # Restoring.

    def restore_latest(
        self,
        abstract_state: Any = None,
        *,
        service: Service = "auto",
        items: Items | None = None,
        progress: Progress | None = None,
        log: Literal["auto"] | None = "auto",
    ) -> Restored | None:
        """Restores the newest intact step, or a full point of the log above it.

        Tables and slots come from the memory of a restore service where one holds the step, else
        from storage, bit for bit the same; ``Restored.source`` says where each save of its chain
        was read. Each process finds that out for itself.

        Args:
          abstract_state: the state's structure with arrays or ``jax.ShapeDtypeStruct`` leaves,
            their shardings are used; without it nested dicts and lists of numpy arrays result.
          service: ``"auto"``: the service of the directory, where this process is connected to
            one; or a source of rows, such as ``deltackpt.service.connect(directory)``; or None
            for storage alone. It is given ``timeouts.service_secs``.
          items: Orbax restore arguments of further items; a point has its own.
          progress: called with bytes read and bytes in all.
          log: ``"auto"``: points of the log count, where there is one; None: steps alone. The next
            save, or mark, then leaves the points behind.

        Returns:
          The step, or point, and what was skipped; None where no step was ever committed.

        Raises:
          NoIntactStep: steps were committed and none is intact.
          StepGone: every step was removed while it was read.
          ForeignDirectory: none of them is ours, or of the item's name.
          TemplateMismatch, FormatTooNew: the newest step is intact and needs something else.
        """
        with self._lock:
            self._check_usable()
            self._settle_quietly()
            return self._restorer.newest(
                abstract_state, items, progress, service, log=log is not None
            )

    def restore(
        self,
        step: int | LogPoint,
        abstract_state: Any = None,
        *,
        service: Service = "auto",
        items: Items | None = None,
        progress: Progress | None = None,
    ) -> Restored:
        """Restores one step, or one point of the log.

        Restoring an older one rolls back: at the next save, or mark, the later steps are moved
        aside, and later points count no more.

        Args:
          step: the step, a point of ``points``, or the number of the step of one.
          abstract_state: as for ``restore_latest``.
          service: as for ``restore_latest``.
          items: as for ``restore_latest``.
          progress: as for ``restore_latest``.

        Raises:
          OptionError: it is no number of a step.
          StepNotFound: there is no such step or point, or no more; the message names what can be
            restored that is nearest to it.
          StepGone: likewise, and it went while it was read.
          RestoreError: what is wrong with the step, or the point.
        """
        asked = step if isinstance(step, LogPoint) else names.as_step(step)
        with self._lock:
            self._check_usable()
            self._settle_quietly()
            return self._restorer.one(asked, abstract_state, items, progress, service)

    def read(self, step: int, tables: RowRanges, *, progress: Progress | None = None) -> ReadRows:
        """Reads rows of some tables of a step, and nothing else of it.

        The manager goes on as if nothing had been read; ``restore`` is what training goes on from.

        Args:
          step: the step.
          tables: which tables, by their paths or the ends of exactly one path each, and of each a
            half-open range of rows, or None for all.
          progress: as for ``restore_latest``.

        Raises:
          OptionError: it is no number of a step.
          RestoreError: what is wrong with the step, or with what was asked for.
        """
        step = names.as_step(step)
        with self._lock:
            self._check_usable()
            self._settle_quietly()
            return self._restorer.rows(step, tables, progress)

    def read_state(self, step: int, template: Any, progress: Progress | None = None) -> ReadState:
        """Reads the leaves of a step that a template asks for, by their paths: to begin from them.

        The template may be a part of the state, have leaves that the step lacks, other tables, and
        other dtypes of the same kind; ``...`` in place of a leaf, and TouchStates, stay as they
        are. The manager goes on as if nothing had been read.

        Raises:
          StepNotFound, RestoreError: the step is not there, or not intact.
          TemplateMismatch: a leaf has another shape, a dtype of another kind, or one that does not
            hold its integers.
        """
        step = names.as_step(step)
        with self._lock:
            self._check_usable()
            self._settle_quietly()
            return self._restorer.state(step, template, progress)

    # Committed steps.

    def metrics(self, step: int) -> dict[str, Any] | None:
        """The metrics that were saved with a step, None without any; raises ``StepNotFound``."""
        return dict(self._catalog.metadata(names.as_step(step)).get("metrics") or {}) or None

    def custom_metadata(self, step: int) -> dict[str, Any]:
        """What ``save(custom_metadata=...)`` kept with a step; raises ``StepNotFound``."""
        return dict(self._catalog.metadata(names.as_step(step)).get("custom_metadata") or {})

    def best_step(self, metric: Metric | None = None, *, mode: Mode = "max") -> int | None:
        """The committed step whose metric is the best, the newest of equals; None without any.

        Args:
          metric: its name, or what makes a number of all metrics; by default that of the ``BestN``
            policy in ``options.retention``, which then says the mode, too.
          mode: whether more or less is better.

        Raises:
          OptionError: neither the call nor the options name a metric.
        """
        return self._catalog.best(metric, mode)

    def item_metadata(self, step: int) -> Any:
        """A step's state without its data: nested dicts of ``jax.ShapeDtypeStruct``.

        Of PRNG keys these are their numbers; what is no array is Orbax's description of it.

        Raises:
          StepNotFound, Damaged: it is not there, or cannot be read.
        """
        return self._catalog.abstract_state(names.as_step(step))

    def delete(self, step: int) -> None:
        """Removes a committed step, which no other needs; waits for the save in flight first.

        Raises:
          StepNotFound: it was not committed.
          OptionError: other steps are deltas on top of it; they are named.
        """
        step = names.as_step(step)
        with self._lock:
            self._check_usable(writing=True)
            self._settle_quietly()
            self._catalog.delete(step)

    def check_lease(self) -> None:
        """Checks that no newer trainer has taken the directory, as every save does.

        Raises:
          FencedError: one has; it is named.
        """
        self._root.check_lease(ask=True)

    @property
    def goes_on_from(self) -> int | None:
        """The step that the next save must be above: the newest one, or an older one restored."""
        step = self.latest_step() if self._run.restored is None else self._run.restored
        point = self._run.lineage.continues
        return step if point is None else max(step or 0, point.save_id.step)

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
                    raise failure.error(None) from failure.cause
                return
            try:
                self.wait()
            finally:
                self._close()

    def _close(self) -> None:
        self._closed = True
        self._termination.close()
        if self._watch is not None:
            self._watch.cancel()
        if not self.options.read_only:
            self._run.held.give_up()
        if self._recorder is not None:
            self._recorder.close()
        self._saver.close()
        self._root.close()

    def _end(self, reason: str, leaving: bool) -> None:
        """Closes the manager in the place of its owner, who did not; see ``exits.Watch``."""
        limit = self.options.timeouts.close_secs
        if not self._lock.acquire(timeout=limit):
            raise WaitTimeout(
                f"CheckpointManager of {self._root}: expected it to be free within {limit} s "
                "(timeouts.close_secs), found another thread at work in it; look at the storage"
            )
        try:
            if self._closed:
                return
            self._ended, self._leaving = reason, leaving
            try:
                failure = self._saver.settle(limit)
                if self._recorder is not None:
                    self._recorder.settle_quietly()
                if failure is None:
                    self._saver.settle_at_root(limit)
            finally:
                if leaving:
                    # Threads and executors are ended by Python; the next trainer removes the rest.
                    self._closed = True
                else:
                    self._close()
            if failure is not None:
                self._untold = None if leaving else failure
                raise failure.error(None) from failure.cause
        finally:
            self._lock.release()

    def _settle_quietly(self) -> None:
        """What failed in the background does not stand in the way of a restore."""
        self._saved_by_log = None
        self._saver.settle_quietly()
        if self._recorder is not None:
            self._recorder.settle_quietly()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        was_closed = getattr(self, "_closed", True) and not getattr(self, "_leaving", False)
        if was_closed or self._pid != os.getpid():
            return
        flight = self._saver.in_flight
        if not self._closed and flight is not None and flight.is_lost:
            # Its thread, which kept the manager alive, has ended without a commit.
            exits.tell_lost(
                f"the save of step {flight.step} failed, and its CheckpointManager of "
                f"{self._root} is gone: {flight.future.exception()}"
            )
        warnings.warn(
            f"CheckpointManager of {self._root} was not closed: use it in a with statement",
            ResourceWarning,
            stacklevel=1,
        )

    def _check_usable(self, *, writing: bool = False) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                f"CheckpointManager of {self._root}: expected to be used in process "
                f"{self._pid}, found process {os.getpid()}; make a manager in the child instead"
            )
        if self._ended is not None and not self._leaving:
            raise FencedError(
                f"CheckpointManager of {self._root}: expected to hold the directory, found "
                f"that {self._ended}; go on with that one"
            )
        if self._closed:
            raise ClosedError(
                f"CheckpointManager of {self._root}: expected an open manager, found it "
                f"closed{f', because {self._ended}' if self._ended else ''}; make a new one"
            )
        if writing and self.options.read_only:
            raise OptionError(
                f"CheckpointManager of {self._root}: expected a manager that may write, "
                f"found access={self.options.access!r}; open it with access='write' to save"
            )
