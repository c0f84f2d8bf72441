# SPDX-License-Identifier: Apache-2.0
"""CheckpointManager: saves and restores training states; the entry point of the library.

``session.saving`` implements saves and ``session.restoring`` restores; both share a ``Run``.
``session.lifetime`` runs one call at a time, and closes the manager.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from jax.core import eval_context

from deltackpt import coordination, events
from deltackpt.cached import cached_property
from deltackpt.errors import OptionError, UnsupportedRoot, chained
from deltackpt.format import naming
from deltackpt.format.naming import PyTree
from deltackpt.handlers.items import Items, json_args, sorted_handlers
from deltackpt.lazy_import import LazyModule
from deltackpt.ledger.directory import Root
from deltackpt.ledger.steps import Steps
from deltackpt.options import ManagerOptions, WalOptions
from deltackpt.outcomes import Appended, ReadRows, ReadState, Restored, Saved
from deltackpt.policies import Decision
from deltackpt.save import exits
from deltackpt.session.lifetime import Lifetime
from deltackpt.session.run import Run, check_arguments, opening, refuse
from deltackpt.session.saving import SaveArguments, Saver
from deltackpt.state import placement
from deltackpt.state.touch_state import TouchState
from deltackpt.storage import buckets
from deltackpt.wal.ended import EndedWal

if TYPE_CHECKING:
    from deltackpt.reading import wal_index
    from deltackpt.reading.reader import Progress
    from deltackpt.reading.wal_index import RecoveryPoint
    from deltackpt.restore.sources import Service
    from deltackpt.session import catalog, restoring
    from deltackpt.session.catalog import Metric, Mode
    from deltackpt.session.step_reader import RowRanges
    from deltackpt.tiers import startup
    from deltackpt.tiers.replication import ReplicationClient
    from deltackpt.wal import record_batch, recorder
else:  # Saves to a local directory without a WAL need none of these.
    catalog = LazyModule("deltackpt.session.catalog")
    record_batch = LazyModule("deltackpt.wal.record_batch")
    recorder = LazyModule("deltackpt.wal.recorder")
    restoring = LazyModule("deltackpt.session.restoring")
    startup = LazyModule("deltackpt.tiers.startup")
    wal_index = LazyModule("deltackpt.reading.wal_index")


class CheckpointManager:
    """Saves and restores a training state, and writes only the table rows that changed.

    Use it as a context manager, or call ``close()``. If a program ends without that, it still waits
    for the save in flight.

    Any thread may call any method, with these limits:

    - Methods that save, append, restore, read, wait, delete or close run one at a time: each waits
      for the calls of other threads. ``all_steps``, ``latest_step``, ``resume_step``,
      ``best_step``, ``metrics``, ``custom_metadata``, ``item_metadata``, ``check_lease``,
      ``reached_preemption`` and ``is_saving_in_progress`` do not wait for them.
    - If a signal handler interrupts one of these methods, another one raises ``ClosedError``. To
      save after a SIGTERM, call ``save_if_due`` at each step, or let a handler set a flag.
    - Only the main thread installs the SIGTERM handler, see ``reached_preemption``.
    - In a job of several processes, each makes the same calls in the same order. Call the methods
      that run one at a time from one thread there.

    Examples:
      >>> import tempfile, jax.numpy as jnp, deltackpt
      >>> state = {"tables": {"words": jnp.ones((1000, 8))}, "bias": jnp.zeros(3)}
      >>> touched = deltackpt.touched.init(state["tables"])
      >>> with tempfile.TemporaryDirectory() as root:
      ...     handlers = {"embeddings": deltackpt.Tables(select="tables/*")}
      ...     with deltackpt.CheckpointManager(root, handlers=handlers) as manager:
      ...         _ = manager.save(0, state, touched=touched)
      ...         touched = deltackpt.touched.mark(touched, {"words": jnp.array([3, 5])})
      ...         saved = manager.save(1, state, touched=touched)
      ...         _ = manager.wait_until_finished()
      ...         result = manager.restore_latest(state)
      >>> saved.kind, result.step, result.chain
      ('delta', 1, (0, 1))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        handlers: Mapping[str, object] | None = None,
        options: ManagerOptions | None = None,
        event_handlers: tuple[events.EventHandler, ...] = (),
    ):
        """Opens a checkpoint directory and takes its lease, unless ``access="read"``.

        Args:
          directory: the checkpoint directory: a path (created if it does not exist; ``~`` is the
            home directory) or a URL: ``s3://bucket/run``, ``gs://...``, ``az://...`` or
            ``nodes://...``. ``Tiers`` sets how saves get to a URL.
          handlers: item names to handlers: exactly one ``Tables``; the others are Orbax v0
            handlers. JSON items need none. By default, the tables are the leaves named
            ``embedding`` or ``embeddings`` with at least 4,096 rows, if there are any.
          options: how to save and restore; None for the defaults.
          event_handlers: receivers of events, see ``deltackpt.events``.

        Raises:
          OptionError: handlers or options are invalid.
          UnsupportedRoot, ForeignDirectory, StorageError: the directory cannot be used.
          FencedError: another trainer, which started later, has already taken over.
          ClosedError: the main thread has ended, so that no save could be finished.
        """
        if not isinstance(directory, (str, os.PathLike)):
            raise OptionError(f"directory: expected a path or a URL, found {directory!r}")
        options = ManagerOptions() if options is None else options
        try:
            check_arguments(directory, options, event_handlers)
            saves_to = None if options.read_only else _saves_to(directory, options)
            chosen = sorted_handlers(handlers)
        except (OptionError, UnsupportedRoot) as error:
            known = options if isinstance(options, ManagerOptions) else ManagerOptions()
            refuse(directory, known, error)

        def end_others(end: Callable[[Path], list[Exception]]) -> None:
            for error in () if saves_to is None else end(saves_to):
                events.warn(f"another manager of this process was open on the directory: {error}")

        def open_root(writing: bool) -> Steps | ReplicationClient:
            if (local := buckets.file_path(directory)) is not None:
                return Root.open(local, item=chosen.item, read_only=not writing, confirmed=False)
            return startup.open_bucket(
                directory,
                item=chosen.item,
                options=options,
                writing=writing,
                process=coordination.process_index(),
                processes=coordination.process_count(),
                # A staging directory, with its extents and peers, has one manager per process.
                taking=lambda: end_others(exits.close_others),
            )

        take_over = functools.partial(end_others, exits.take_over)
        self._recorder: recorder.Recorder | None = None
        warnings = events.CallWarnings()
        start = contextlib.nullcontext() if saves_to is None else exits.starting(saves_to)
        with warnings.deferred(), start, eval_context():
            run = self._run = Run(directory, chosen, options, event_handlers, open_root, take_over)
            try:
                # Either all processes get a manager, or none does.
                with run.coordinator.together(opening(directory), fatal=True):
                    if options.wal is not None and not options.read_only:
                        self._recorder = run.wal = recorder.Recorder(run)
                    elif not options.read_only:
                        run.wal = EndedWal(run)
                    self._saver = Saver(run, self)
                with run.coordinator.together(opening(directory), fatal=True):
                    if not options.read_only:
                        run.ledger.confirm()
                        end_others(functools.partial(exits.close_others, epoch=run.local.epoch))
                    warnings.issue()  # As errors, they end the start of every process.
                self._lifetime = Lifetime(run, self._saver, warnings)
            except BaseException:
                run.opened.abandon()
                raise
            self._lifetime.state = "open"

    @cached_property
    def _restorer(self) -> restoring.Restorer:
        return restoring.Restorer(self._run)

    @cached_property
    def _catalog(self) -> catalog.Catalog:
        return catalog.Catalog(self._run)

    @property
    def directory(self) -> Path | str:
        """Returns the checkpoint directory: an absolute path, or the URL."""
        given = self._run.root.given
        return given if "://" in given else Path(given)

    @property
    def options(self) -> ManagerOptions:
        """Returns the options that the manager was opened with."""
        return self._run.options

    # Saving.

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        touched: TouchState | None = None,
        items: Items | None = None,
        metrics: Mapping[str, float] | None = None,
        custom_metadata: Mapping[str, object] | None = None,
        force_base: bool = False,
        force: bool = False,
    ) -> Saved:
        """Saves a step; returns as soon as training can continue.

        Args:
          step: the training step, greater than all earlier ones: an int, or an integer scalar of
            numpy or jax, such as flax's ``TrainState.step``.
          state: the whole training state, any pytree.
          touched: a ``TouchState`` in addition to those in ``state``; a row is touched if any of
            them marks it. Not allowed with ``tracking="fingerprints"``, which detects changed rows
            itself.
          items: Orbax save arguments of additional items.
          metrics: values stored with the step, for ``best_step`` and preservation policies.
          custom_metadata: JSON values stored with the step.
          force_base: save a base regardless of the policy.
          force: save even if ``save_interval_steps`` or ``save_decision_policy`` does not select
            the step; ``force_base`` implies it.

        Returns:
          The result. Its kind is None if ``options`` skip this step, or if it is the restored
          newest step and the state still has the restored values, bit for bit; if a leaf is not
          the restored array object, the step is read again to compare it. If ``append()`` has just
          saved this step instead of writing a WAL record, that save is returned.

        Raises:
          SaveFailed: an earlier save failed in the background. This save *was* made: its result is
            ``error.saved``, and it contains the rows of the failed save. ``TrackingFailed`` if the
            tracking audit found rows that changed without being marked; this save is then a base.
          FencedError: another trainer took over the directory.
          OptionError: the step is not greater than the newest step in the directory, or is not an
            integer from 0 to 2**63 - 1.
        """
        _refuse_orbax_args(state, "save(step, state)")
        arguments = SaveArguments(touched, items, metrics, force_base, custom_metadata)
        started = time.perf_counter()
        with self._lifetime.call(writing=True):
            when_busy, step = self.options.writes.when_busy, _as_step(step)
            done = self._saver.saved_by_append
            if done is not None and done.step == step and not force_base:
                if metrics or items or custom_metadata:
                    events.warn(
                        f"step {step}: append() has already saved it, without the metrics, items "
                        "and metadata given to save(); call save() before append() at such steps"
                    )
                return dataclasses.replace(done, reason=f"{done.reason}; by append(), at this step")
            if not (force or force_base or self._selects(step, metrics)):
                return Saved.skipped(
                    step,
                    "neither save_interval_steps nor save_decision_policy selects this step",
                    started,
                )
            return self._saver.save(step, state, arguments, when_busy, started)

    def should_save(self, step: int, *, metrics: Mapping[str, float] | None = None) -> bool:
        """Returns whether ``save()`` would save this step. Process 0 decides for all processes."""
        with self._lifetime.call(writing=True):
            return self._selects(_as_step(step), metrics)

    def _selects(self, step: int, metrics: Mapping[str, float] | None) -> bool:
        return self._saver.should_save(step, metrics, self.reached_preemption)

    def save_if_due(
        self,
        step: int,
        state: PyTree,
        *,
        touched: TouchState | None = None,
        items: Items | None = None,
        metrics: Mapping[str, float] | None = None,
        custom_metadata: Mapping[str, object] | None = None,
        force_base: bool = False,
    ) -> Saved | None:
        """Saves if a save is due: a coalesced one, or one before a preemption.

        Call it once per training step. If no save is due, it returns within microseconds. A save
        that ``when_busy="coalesce"`` made due is made once the writer is free. If the platform
        announced a preemption, or a SIGTERM arrived since the first call, the step is saved even if
        another save is in flight, and the call returns when it is durable. If it has just been
        saved, that save is returned.

        The arguments are those of ``save``. A plain int as the step costs least; the call waits for
        a jax scalar.

        Returns:
          The result; None if nothing was due.

        Raises:
          SaveFailed, FencedError, OptionError: as for ``save``.
        """
        _refuse_orbax_args(state, "save_if_due(step, state)")
        started, step = time.perf_counter(), _as_step(step)
        with self._lifetime.call():
            preempted = self.reached_preemption(step)
            if not preempted and (self._saver.due is None or self._saver.all_busy()):
                return None
            arguments = SaveArguments(touched, items, metrics, force_base, custom_metadata)
            try:
                self._lifetime.check_usable(writing=True)
                if not force_base and (done := self._saver.saved(step)) is not None:
                    return done
                return self._saver.save(step, state, arguments, "wait", started)
            finally:
                if preempted:
                    # Also if an earlier save failed: this one was made nevertheless.
                    self._lifetime.wait_for_saves()

    def next_save(self, state: PyTree, *, touched: TouchState | None = None) -> Decision:
        """Returns whether the next save would be a base or a delta, and why; changes nothing."""
        with self._lifetime.call(writing=True):
            return self._saver.next(state, touched)

    def verify_tracking(self, state: PyTree, *, touched: TouchState | None = None) -> bool:
        """Checks that every row that changed since the previous call is marked as touched.

        The tracking audit of each save checks about 1,536 rows; this method checks all rows. It
        makes one pass over tables and slots, and keeps 8 bytes per row on their devices from the
        first call on. Call it for a few steps when you set up a training loop, and after every
        change of the optimizer.

        Args:
          state: the whole training state.
          touched: as for ``save``.

        Returns:
          Whether an earlier state was available for comparison. The first call, and the first call
          after the tables or their ``TouchState`` were re-created, only record the state.

        Raises:
          TrackingError: rows changed without being marked; the message lists every such table and
            its rows. The next save is a base; with several processes, their next delta fails first.
          OptionError: the manager uses fingerprints, which check every row at each save.
        """
        with self._lifetime.call():
            return self._saver.verify_tracking(state, touched)

    def reached_preemption(self, step: int) -> bool:
        """Returns whether this job is preempted at ``step``, by the platform or by SIGTERM.

        The first call in the main thread installs a SIGTERM handler until the manager is closed.
        The first step that is queried after a SIGTERM is the step of the preemption.
        """
        self._lifetime.check_usable()
        step = _as_step(step)
        if coordination.process_count() > 1:
            # All must save the same step. A process that handled SIGTERM itself would save alone,
            # and would replace the handler through which JAX notifies the other processes.
            return coordination.reached_preemption(step)
        return self._lifetime.termination.announced(step) or coordination.reached_preemption(step)

    def wait_until_finished(self) -> list[events.SaveEvent]:
        """Waits until every save is committed with the durability of ``options.writes.durability``.

        For a bucket, waits until every save has reached the tier that ``Tiers.wait_for`` sets. With
        ``"remote"``, it also waits until every ``delete()`` is done there.

        Returns:
          Events of the saves committed since the last call, at most the newest hundred.

        Raises:
          SaveFailed: a save failed in the background.
          WaitTimeout: the saves did not finish within ``timeouts.close_secs``.
          FencedError: another trainer took over the bucket.
        """
        with self._lifetime.call():
            self._lifetime.wait_for_saves()
        # Not before: a warning that is an error is raised in place of the events.
        with self._lifetime.lock:
            reports = [*self._saver.reports]
            self._saver.reports.clear()
        return reports

    def is_saving_in_progress(self) -> bool:
        """Returns whether a save of this process is being written."""
        self._lifetime.check_usable()
        return self._saver.busy()

    def check_for_errors(self) -> None:
        """Raises the error of a failed background save, without waiting for saves in flight.

        Raises:
          SaveFailed: a save failed; it is raised once.
        """
        with self._lifetime.call():
            if self._saver.is_lost:
                self._saver.wait(0.0)

    # The write-ahead log.

    def append(
        self,
        step: int,
        state: PyTree,
        *,
        touched: TouchState | None = None,
        ids: Mapping[str, object] | None = None,
        items: Mapping[str, object] | None = None,
        full: bool | None = None,
    ) -> Appended:
        """Appends the changes since the last call to the write-ahead log; blocks for a few ms.

        Rows and dense leaves are copied before it returns and become durable soon after: see
        ``wait_appended``. All processes call it at the same steps. The WAL continues from the
        restored step or recovery point, or from a save. The step is saved instead if no such state
        exists, if the tables have changed, or if the WAL has grown to ``max_wal_ratio``. It is
        saved as a base if the ``TouchState`` is older than that of the last record. If the sampled
        audit finds changed rows that are not marked, the call saves a base, with a warning.

        Args:
          step: the training step, greater than all appended before.
          state: the whole training state.
          touched: as for ``save``.
          ids: table, or the end of its path, to the row indices (on the host) that were touched
            since the last call of ``append()``, regardless of saves in between. The manager then
            does not read the stamps, for which it would wait for an accelerator. Each save compares
            them with the stamps. Fingerprints find the rows without ``ids``. Without a
            ``TouchState``, the call after one with invalid ids saves the step instead.
          items: small values by name, bytes or JSON, such as a data iterator's position; a restored
            recovery point has them in ``Restored.items``. If the step is saved instead, they become
            JSON items, bytes as ``{"base64": ...}``.
          full: whether the record contains all dense leaves; by default as ``WalOptions`` sets.

        Returns:
          The result.

        Raises:
          OptionError: ``ManagerOptions.wal`` is not set; the step is not greater than the last one;
            an item or ids are invalid.
          AppendFailed: earlier records could not be made durable, and ``on_failure="raise"``.
          WaitTimeout: the buffer was full for ``deadline_secs``.
          TrackingError: a ``TouchState`` does not fit the tables.
          ProcessMissing: with several processes, process 0 did not answer within
            ``timeouts.processes_secs``.
          FencedError: another trainer took over the directory.
          SaveFailed: as for ``save``, if the step was saved instead.
        """
        _refuse_orbax_args(state, "append(step, state)")
        started = time.perf_counter()
        with self._lifetime.call(writing=True):
            if self.options.wal is None:
                raise OptionError(
                    "append: expected a manager with a WAL, found none; make it with "
                    "ManagerOptions(wal=WalOptions())"
                )
            assert self._recorder is not None
            self._saver.saved_by_append = None
            try:
                self._recorder.count()
                step = _as_step(step)
                split = self._saver.split(state, touched)
                self._saver.go_back(split, touched)
            except BaseException:
                self._recorder.requeue_ids(ids)
                raise
            may_commit = self._saver.may_commit
            found = self._recorder.append(
                step, split, touched, ids, items, full, started=started, may_commit=may_commit
            )
            if isinstance(found, Appended):
                return found
            given = json_args(record_batch.as_json(items))
            arguments = SaveArguments(touched=touched, items=given, ids=ids)
            saved = self._saver.save(step, state, arguments, "wait", time.perf_counter())
            self._saver.saved_by_append = saved
            return Appended(
                step=step,
                kind=None,
                reason=f"saved the step instead: {found}",
                blocked_secs=time.perf_counter() - started,
                recovery=self._recorder.recovery(),
                saved=saved,
            )

    def wait_appended(self, timeout_secs: float | None = None) -> RecoveryPoint | int | None:
        """Waits until everything that this process appended is as durable as a step.

        It also waits for the save that the records replay onto if that is still in flight, for
        example the first save of a new run. Later records replay onto a committed step.

        Args:
          timeout_secs: maximum wait; ``WalOptions.deadline_secs`` by default.

        Returns:
          The newest restorable state: the newest recovery point that every process has, or a newer
          step; None before the first one.

        Raises:
          WaitTimeout: the timeout expired; nothing is lost.
          AppendFailed: some records could not be made durable; no touched row is lost.
          TrackingError: rows changed without being marked; the next ``append()`` saves a base.
          SaveFailed: the save that the records replay onto failed; the next ``append()`` saves.
          FencedError: another trainer took over the directory.
        """
        limit = timeout_secs
        if limit is None:
            limit = (self.options.wal or WalOptions()).deadline_secs
        deadline = time.monotonic() + limit
        with self._lifetime.call(writing=True):
            if self._recorder is None:
                newest = self._run.lineage.newest_committed
                return None if newest is None else newest.step
            # If the save commits during the wait, what the wait returns may not know of it.
            is_base_committed = self._recorder.is_base_committed
            found = self._recorder.wait(limit)
            if is_base_committed:
                return found
            self._saver.wait(max(0.0, deadline - time.monotonic()))
            return self._recorder.recovery(fresh=True)

    def recovery_points(self) -> list[RecoveryPoint]:
        """Returns the recovery points that can be restored, newest first.

        A point may be trimmed before it is restored, once two more steps are committed;
        ``restore`` then reports that. Points of this manager's own WAL stay until it saves, appends
        or waits.

        Raises:
          Damaged: the newest WAL epoch header cannot be read.
        """
        with self._lifetime.call():
            self._run.wal.wait_trimmed()
            return self._restorer.chooser.points()

    # Restoring.

    def restore_latest(
        self,
        abstract_state: PyTree = None,
        *,
        service: Service = "auto",
        items: Items | None = None,
        progress: Progress | None = None,
        wal: bool = True,
    ) -> Restored | None:
        """Restores the newest intact step, or a recovery point above it.

        Tables and slots are read from the memory of a hot standby if one holds the step, otherwise
        from storage; the result is bit-identical. ``Restored.source`` lists where each save of the
        chain was read from. Each process decides that independently.

        Args:
          abstract_state: the state's structure with arrays or ``jax.ShapeDtypeStruct`` leaves.
            Restored arrays get their placement: sharding, memory kind, layout, and whether they are
            committed. Without it, nested dicts and lists of numpy arrays are returned.
          service: ``"auto"``: the hot standby of the directory, if this process is connected to
            one; or a source of rows, such as ``deltackpt.service.connect(directory)``; or None for
            storage only. The restore waits for it for at most ``timeouts.service_secs``.
          items: Orbax restore arguments of additional items; a recovery point has its own items.
          progress: called with the bytes read and the total bytes, from several threads, one
            call at a time.
          wal: whether to consider recovery points. If False, the next save or WAL record discards
            the points above the restored step.

        Returns:
          The step or recovery point, and the skipped ones; None if no step was ever committed.

        Raises:
          NoIntactStep: steps were committed, but none is intact.
          StepGone: every step was removed while it was read.
          ForeignDirectory: no step was written by deltackpt with this item name.
          TemplateMismatch, FormatTooNew: the newest step is intact, but does not match the abstract
            state or needs a newer version.
          FormatTooOld: a development version of deltackpt wrote the WAL.
        """
        _refuse_orbax_args(abstract_state, "restore_latest(abstract_state)")
        abstract_state = placement.resolved(abstract_state)
        with self._lifetime.call(reading=True):
            arguments = restoring.RestoreArguments(abstract_state, items, progress, service)
            return self._restorer.newest(arguments, wal=wal)

    def restore(
        self,
        step: int | RecoveryPoint,
        abstract_state: PyTree = None,
        *,
        service: Service = "auto",
        items: Items | None = None,
        progress: Progress | None = None,
    ) -> Restored:
        """Restores one step or one recovery point.

        Restoring an older one rolls back: the next save or WAL record moves later steps aside and
        invalidates later recovery points.

        ``step`` is a step, a recovery point from ``recovery_points()``, or the step of such a
        point; the other arguments are those of ``restore_latest``. If the step below a recovery
        point is damaged, the WAL is replayed onto an older one, with a warning.

        Raises:
          OptionError: ``step`` is not a valid step.
          StepNotFound: the step or recovery point does not exist; the message names the nearest
            ones.
          StepGone: it was removed while it was read; the message names the nearest ones.
          RestoreError: the step or recovery point cannot be restored.
        """
        _refuse_orbax_args(abstract_state, "restore(step, abstract_state)")
        requested = step if isinstance(step, wal_index.RecoveryPoint) else _as_step(step)
        abstract_state = placement.resolved(abstract_state)
        with self._lifetime.call(reading=True):
            arguments = restoring.RestoreArguments(abstract_state, items, progress, service)
            return self._restorer.restore_one(requested, arguments)

    def read(self, step: int, tables: RowRanges, *, progress: Progress | None = None) -> ReadRows:
        """Reads rows of some tables of a step, without the rest of the state.

        Does not affect later saves; use ``restore`` to resume training from a step.

        Args:
          step: the step.
          tables: table paths, or unique ends of paths, to half-open ranges of rows, or None for all
            rows.
          progress: as for ``restore_latest``.

        Returns:
          The rows, on the host.

        Raises:
          OptionError: ``step`` is not a valid step, ``tables`` not a mapping, or a range invalid.
          RestoreError: the step cannot be read, or does not have these tables or rows.
        """
        step = _as_step(step)
        with self._lifetime.call(reading=True):
            return self._restorer.rows(step, tables, progress)

    def read_state(
        self, step: int, template: PyTree, progress: Progress | None = None
    ) -> ReadState:
        """Reads the leaves of a step that a template names, e.g. to initialize another state.

        The template may contain only a part of the state, leaves that the step lacks, different
        tables, and different dtypes of the same kind. A table may have grown if the template has an
        array, whose additional rows are kept. A typed PRNG key must have the same implementation.
        Placeholders (``...``) and ``TouchState`` leaves are returned unchanged. Does not affect
        later saves.

        Args:
          step: the step.
          template: a pytree of arrays or ``jax.ShapeDtypeStruct`` leaves.
          progress: as for ``restore_latest``.

        Returns:
          The filled template, and which paths were missing, unused or cast.

        Raises:
          StepNotFound, RestoreError: the step does not exist, or is not intact.
          TemplateMismatch: a leaf has another shape, a dtype of another kind, or a dtype that
            cannot represent the stored integers.
        """
        step = _as_step(step)
        template = placement.resolved(template)
        with self._lifetime.call(reading=True):
            return self._restorer.state(step, template, progress)

    # Committed steps.

    def metrics(self, step: int) -> dict[str, Any] | None:
        """Returns the metrics saved with a step, or None; raises ``StepNotFound``."""
        self._lifetime.check_usable()
        return dict(self._catalog.metadata(_as_step(step)).get("metrics") or {}) or None

    def custom_metadata(self, step: int) -> dict[str, Any]:
        """Returns the ``custom_metadata`` saved with a step; raises ``StepNotFound``."""
        self._lifetime.check_usable()
        return dict(self._catalog.metadata(_as_step(step)).get("custom_metadata") or {})

    def best_step(self, metric: Metric | None = None, *, mode: Mode = "max") -> int | None:
        """Returns the committed step with the best metric (the newest if tied), or None.

        Args:
          metric: name of the metric, or a function of all metrics that returns a number. By
            default, the metric and mode of a ``BestN`` ``preservation_policy``.
          mode: ``"max"`` or ``"min"``: whether higher or lower is better.

        Raises:
          OptionError: neither the call nor the options name a metric.
        """
        self._lifetime.check_usable()
        return self._catalog.best(metric, mode)

    def item_metadata(self, step: int) -> PyTree:
        """Returns a step's structure without its data: nested dicts of ``jax.ShapeDtypeStruct``.

        PRNG keys appear as their key data; leaves that are not arrays appear as Orbax describes
        them.

        Raises:
          StepNotFound, Damaged: the step does not exist, or cannot be read.
        """
        self._lifetime.check_usable()
        return self._catalog.abstract_state(_as_step(step))

    def delete(self, step: int) -> None:
        """Deletes a committed step that no other step needs; first waits for the save in flight.

        If training resumed from the step, recovery points before it are not restorable any more.
        From a bucket, the step is deleted in the background: ``wait_until_finished()`` waits for
        that with ``Tiers.wait_for="remote"``. If the staging directory is lost before, the step
        reappears.

        Raises:
          StepNotFound: the step was not committed.
          OptionError: other steps are deltas on top of the step, or the newest recovery points
            replay onto it; the message names them.
          FencedError: another trainer took over the directory.
        """
        step = _as_step(step)
        with self._lifetime.call(writing=True, reading=True):
            self._catalog.delete(step)

    def check_lease(self) -> None:
        """Checks that no other trainer took over the directory, as every save does.

        Raises:
          FencedError: another trainer took over the directory; the message names it.
        """
        self._lifetime.check_usable()
        self._run.check_lease(refresh=True)

    @property
    def resume_step(self) -> int | None:
        """Returns the step that the next save must exceed: the newest or the restored step.

        It is still the restored step after the deletion of that step, because training continues
        from its state; the step may then be saved again.
        """
        self._lifetime.check_usable()
        restored, point = self._run.restored, self._run.lineage.forked_from
        step = self.latest_step() if restored is None else restored
        return step if point is None else max(step or 0, point.save_id.step)

    def all_steps(self) -> list[int]:
        """Returns the committed steps in ascending order."""
        self._lifetime.check_usable()
        return sorted(self._run.root.steps())

    def latest_step(self) -> int | None:
        """Returns the newest committed step, or None."""
        self._lifetime.check_usable()
        return self._run.root.newest_step()

    def close(self) -> None:
        """Waits for the saves in flight and releases the directory.

        Raises:
          SaveFailed: a save failed in the background.
          ClosedError: this is a forked child of the process that created the manager.
        """
        self._lifetime.close()

    def __repr__(self) -> str:
        state = self._lifetime.state
        state = "read-only" if state == "open" and self.options.read_only else state
        return f"<CheckpointManager of {self._run.root}, {state}>"

    def __enter__(self) -> CheckpointManager:
        self._lifetime.check_usable()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with chained(error):
            self.close()


def _refuse_orbax_args(state: PyTree, call: str) -> None:
    """Raises OptionError for arguments of Orbax's manager, which would look like an empty state."""
    if type(state).__module__.startswith("orbax."):
        raise OptionError(
            f"{call}: expected the training state, found {type(state).__name__}; pass the state "
            "itself, and arguments of Orbax as items={name: arguments}"
        )


def _as_step(step: SupportsIndex) -> int:
    if type(step) is int:
        return naming.as_step(step)
    with placement.neutral():
        return naming.as_step(step)


def _saves_to(directory: str | os.PathLike[str], options: ManagerOptions) -> Path:
    """Returns the local directory in which this process makes its saves."""
    local = buckets.file_path(directory)
    return local or startup.saves_to(directory, options, coordination.process_index())
