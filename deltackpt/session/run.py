# SPDX-License-Identifier: Apache-2.0
"""State that the saves and restores of one manager share, and how it finds touched rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import jax.numpy as jnp

from deltackpt import coordination, events, units
from deltackpt.coordination import Coordinator
from deltackpt.errors import (
    DeltackptError,
    Disagreement,
    OptionError,
    ProcessMissing,
    StorageError,
)
from deltackpt.format.manifest import Layout, SaveId, TrackingName
from deltackpt.handlers.items import Handlers
from deltackpt.ledger.directory import Root
from deltackpt.ledger.steps import Steps
from deltackpt.options import Dense, KafkaWal, LocalWal, ManagerOptions, Tiers, Tracking, WalOptions
from deltackpt.resources.runtime import FSYNCS, READS, Runtime
from deltackpt.save import pending_save
from deltackpt.save.dense_save import DenseKeeper, codings
from deltackpt.save.lineage import Clocks, Lineage, new_run
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, TouchState
from deltackpt.storage import buckets
from deltackpt.tracking.fingerprints import RowTracker

if TYPE_CHECKING:
    from deltackpt.reading.reader import RestoredTables
    from deltackpt.session.restored import RestoredState
    from deltackpt.storage.kafka import Topic
    from deltackpt.tiers.replication import ReplicationClient

_logger = logging.getLogger(__name__)

#: Hashing stops after this many saves in a row of which each changed more than half of the rows.
_WIDE_SAVES = 3
#: So many changes between a TouchState and fingerprints are taken for a mistake.
_CHANGES = 3
_BYTES_A_ROW = 12


class RowTracking:
    """The tracking of one manager; used by one thread at a time."""

    def __init__(self, mode: Tracking, *, dense_blocks: bool = False, may_stop: bool = True):
        """Hashes nothing yet.

        ``dense_blocks``: deltas contain blocks of dense leaves, and pay without any table.
        ``may_stop``: "auto" stops hashing if most rows change; not if WAL records need the rows in
        any case.
        """
        self._mode, self._dense_blocks = mode, dense_blocks
        self._may_stop = may_stop and not dense_blocks
        self.tracker = RowTracker() if mode == "fingerprints" else None
        #: The tracker that a TouchState has replaced, until a save begins: a refused save changes
        #: nothing.
        self._replaced: RowTracker | None = None
        #: Whether rows were hashed for a save or a record since the start or a restore.
        self._hashed = False
        #: Whether rows were hashed before a restore: training may return to its state in memory.
        self.hashed_before_restore = False
        #: What the last save or record used, and how often that has changed.
        self._used: TrackingName | None = None
        self._changes = 0
        self._wide_saves = 0
        self.stopped = False

    def name(self, split: Split, touched: TouchState | None) -> TrackingName:
        """Returns what the manifest of a save records."""
        if self.tracker is not None:
            return "fingerprints"
        return "touched" if split.marks or touched is not None else ""

    def choose(self, split: Split, touched: TouchState | None) -> Split:
        """Chooses the tracking for a state, and returns what it needs of the state."""
        tracker = self.chosen(split, touched)
        if tracker is None:
            self._replaced = self.tracker or self._replaced
        elif self.tracker is None:
            tracker, self._replaced = self._replaced or tracker, None
            self._log_cost(split.layout)
        self.tracker = tracker
        if self._mode == "auto":
            self._count_change(self.name(split, touched))
        # Fingerprints see more than a TouchState in the state.
        return split if tracker is None else dataclasses.replace(split, marks=())

    def chosen(self, split: Split, touched: TouchState | None) -> RowTracker | None:
        """Returns what ``choose`` would hash with, None if nothing; changes nothing."""
        if self._mode != "auto":
            return self.tracker
        if split.marks or touched is not None or self.stopped:
            return None
        if self.tracker is None and self._is_worthwhile(split.layout):
            return self._replaced or RowTracker()
        return self.tracker

    @property
    def has_replaced(self) -> bool:
        """Whether a TouchState has replaced fingerprints: it need not mark what changed before."""
        return self._hashed and self._replaced is not None

    def saved(self) -> None:
        """Called once a save was begun."""
        if self.tracker is None:
            self._replaced, self._hashed = None, False

    def restored(
        self,
        kept: Split | RestoredTables,
        *,
        has_touch_state: bool,
        recorded: TrackingName,
        identity: int,
    ) -> None:
        """Continues from a restored state, whose manifest has the tracking ``recorded``.

        The ``identity`` for the fingerprints is another one than that of the TouchState that the
        restore returns, which does not see what these find.
        """
        if self._mode == "auto":
            if has_touch_state or recorded == "touched" or self.stopped:
                self.tracker = None
            elif self.tracker is None and self._is_worthwhile(kept.layout):
                self.tracker = RowTracker()
                self._log_cost(kept.layout)
        self.hashed_before_restore |= self._hashed
        self._replaced, self._hashed, self._used = None, False, None
        if self.tracker is not None:
            self.tracker.start(kept.fields, kept.layout, identity)

    def accepts_touch_state(self, recorded: TrackingName) -> bool:
        """Returns whether the next save may use the TouchState of the restored step.

        With "auto", training may continue with either if the step records neither.
        """
        return self.tracker is None or (self._mode == "auto" and recorded != "fingerprints")

    def touch_state(self, split: Split, given: TouchState | None) -> TouchState | None:
        """Returns the TouchState of a save or record: the one passed, or what hashing finds now."""
        if self.tracker is None:
            return given
        if given is not None:
            raise OptionError(
                'touched: expected none with tracking="fingerprints", which finds the rows by '
                'itself, found a TouchState; leave it out, or use tracking="auto"'
            )
        found = self.tracker.update(split.fields, split.layout)
        self._hashed = True
        if self._mode == "auto" and self._may_stop:
            self._stop_if_useless(self.tracker.changed_share())
        return found

    def _is_worthwhile(self, layout: Layout) -> bool:
        return self._dense_blocks or bool(layout.tables)

    def _count_change(self, used: TrackingName) -> None:
        """Warns once if saves and records pass a TouchState and do not, by turns."""
        if self._used not in (None, used):
            self._changes += 1
            if self._changes == _CHANGES:
                events.warn(
                    "some calls of save() and append() were given a TouchState and others were "
                    "not, and each time the next save is a base: pass touched= to all of them, or "
                    "to none"
                )
        self._used = used

    def _log_cost(self, layout: Layout) -> None:
        if not (rows := sum(table.rows for table in layout.tables)):
            return
        _logger.info(
            "found no TouchState: detecting changed rows by fingerprints, which need %s on the "
            "devices (%d bytes per row), and twice that while a save starts",
            units.size(rows * _BYTES_A_ROW),
            _BYTES_A_ROW,
        )

    def _stop_if_useless(self, changed_share: float | None) -> None:
        """Stops hashing from the next call on, if most rows changed in several saves in a row."""
        if changed_share is None:
            return
        self._wide_saves = self._wide_saves + 1 if changed_share > 0.5 else 0
        if self._wide_saves >= _WIDE_SAVES and not self.stopped:
            self.stopped = True
            events.warn(
                "more than half of the rows of all tables changed in each of the last "
                f"{_WIDE_SAVES} saves: fingerprints are no longer computed, and all further saves "
                "of this manager without a TouchState are bases; if your deltas are still smaller "
                'than bases, set DeltaOptions(tracking="fingerprints"), which never stops, or pass '
                "a TouchState; otherwise select only tables in which few rows change"
            )


#: Number of fields that are written at the same time; as many threads encode. Direct writes wait
#: for the disk: on two cores, a base of 1 GB is durable in 0.84 to 0.90 of the time of two threads,
#: for the same CPU time, and training is not slower.
_THREADS = 4
#: Opens the checkpoint directory, to be written or only read, with or without tiers.
OpenRoot = Callable[[bool], "Steps | ReplicationClient"]


#: Why a save is a base: a TouchState need not mark what changed while rows were hashed.
HASHED = "a TouchState replaces the fingerprints of earlier calls"


class WalHooks:
    """The WAL's view of the saves of a run, see ``wal.recorder``; by default, there is no WAL."""

    begun = ""  # Id of the run whose epoch has begun; empty if it has to begin.

    def start_epoch(self, split: Split) -> None:
        """Called before a save if ``begun`` is not its run, with the step that it continues."""

    def check(self, split: Split, marks: Sequence[Marks]) -> None:
        """Called before a save: raises TrackingError if touched rows are in no WAL record."""

    def saved(self) -> None:
        """Called once a save has started, which contains everything appended so far."""

    def refused(self, split: Split) -> None:
        """Called if the other processes started a save and this one could not."""

    def distrust(self, reason: str) -> None:
        """Called if rows changed without being marked: no record of the run can be restored."""

    def deleted(self, step: SaveId, *, is_needed: bool) -> None:
        """Called on all processes once a step was deleted; no later record may continue from it.

        If it ``is_needed``, no remaining step covers WAL records that were trimmed: the WAL must
        end.
        """

    def wait(self, timeout_secs: float) -> object:
        """Waits until all records of this process are durable; raises why they are not."""

    def wait_trimmed(self) -> None:
        """Waits until trimming has ended; only a later call of this manager starts it again."""

    def wait_durable_or_warn(self) -> None:
        """Waits until all records are durable or failed, and trimming has ended."""

    def close(self) -> None:
        """Ends the writer once all records are durable, or have failed."""


def keeper(options: Dense, runtime: Runtime) -> DenseKeeper:
    """Creates the object that copies dense leaves for blocks and keeps their decoded values."""
    return DenseKeeper(
        codings(options.codec, options.max_error),
        runtime,
        max_reference_bytes=options.max_reference_bytes,
    )


def _require_shared_log(options: WalOptions | None) -> None:
    backend = None if options is None else options.backend
    if isinstance(backend, LocalWal) and not backend.directory:
        raise OptionError(
            "WalOptions.backend: expected a directory that all processes see, or Kafka, found a "
            "staging directory for each process (Tiers(shared=False)); pass "
            "LocalWal(directory=...) or KafkaWal(...)"
        )


def _shared_options(options: ManagerOptions) -> dict[str, str]:
    """Returns the options that must be equal on all processes: they share calls and files."""
    wal = options.wal
    return {
        "access": options.access,
        "deltas.bases": options.deltas.bases,
        "deltas.tracking": options.deltas.tracking,
        "dense.deltas": options.dense.deltas,
        "save_decision_policy": type(options.save_decision_policy).__name__,
        "save_interval_steps": str(options.save_interval_steps),
        "tiers.shared": str((options.tiers or Tiers()).shared),
        "wal.backend": type(wal and wal.backend).__name__,
        "writes.durability": options.writes.durability,
        "writes.when_busy": options.writes.when_busy,
    }


def _require_equal(every: Sequence[Mapping[str, str]], what: str) -> None:
    for process, found in enumerate(every):
        for name, value in found.items():
            if value != (expected := every[0][name]):
                raise Disagreement(
                    f"{what}: expected equal ManagerOptions.{name} on every process, found "
                    f"{expected!r} on process 0 and {value!r} on process {process}; pass the same "
                    "options on every process"
                )


def _topic(options: ManagerOptions, processes: int) -> Topic | None:
    """Returns the topic of the WAL, after checking that it can be written to."""
    if options.wal is None or not isinstance(backend := options.wal.backend, KafkaWal):
        return None
    from deltackpt.storage.kafka import Topic

    topic = Topic(backend.topic, backend.config)
    if not options.read_only:
        if not backend.topic:
            raise OptionError(
                "KafkaWal.topic: expected the topic to write to, found none; pass "
                "KafkaWal('topic', config=...)"
            )
        topic.check(
            partitions=processes,
            message_bytes=backend.chunk_bytes,
            timeout_secs=options.wal.deadline_secs,
        )
    return topic


def _coordinator(directory: str | os.PathLike[str], options: ManagerOptions) -> Coordinator:
    return Coordinator(os.fspath(directory), options.timeouts.processes_secs, alone=options.alone)


def opening(directory: str | os.PathLike[str]) -> str:
    """Names the constructor of a manager in errors; must be equal on all processes."""
    return f"{os.fspath(directory)}: opening it"


def check_arguments(
    directory: str | os.PathLike[str],
    options: object,
    event_handlers: tuple[events.EventHandler, ...],
) -> None:
    """Raises OptionError for arguments of a manager that cannot be right."""
    if not isinstance(options, ManagerOptions):
        raise OptionError(
            "options: expected a deltackpt.ManagerOptions, found "
            f"{type(options).__name__}; pass e.g. ManagerOptions(max_to_keep=3)"
        )
    if bad := [one for one in event_handlers if not callable(getattr(one, "receive", None))]:
        raise OptionError(f"event_handlers: expected objects with receive(event), found {bad[0]!r}")
    local = buckets.file_path(directory)
    if local is not None and options.tiers is not None:
        raise OptionError(
            f"ManagerOptions.tiers: expected None for the local directory {local}, found tiers; "
            "leave the option out, or use the URL of a bucket"
        )


def refuse(
    directory: str | os.PathLike[str], options: ManagerOptions, error: DeltackptError
) -> NoReturn:
    """Raises an error of a manager's arguments; the other processes report it without waiting."""
    with contextlib.suppress(ProcessMissing, StorageError):
        with _coordinator(directory, options).together(opening(directory), fatal=True):
            raise error
    raise error


def _steps_of(opened: Steps | ReplicationClient) -> Steps:
    return opened if isinstance(opened, Steps) else opened.steps


class Run:
    """State shared by the saves and restores of a manager."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        handlers: Handlers,
        options: ManagerOptions,
        event_handlers: tuple[events.EventHandler, ...],
        open_root: OpenRoot,
        take_over: Callable[[], None],
    ):
        """Begins a new run on a root, which process 0 opens before the others.

        Every process checks the options before any lease is taken, and then calls ``take_over``.
        """
        self.options, self.event_handlers = options, event_handlers
        #: Name of the item with the tables, which leaves they are, handlers of additional items.
        self.item, self.choice, self.extra = handlers
        #: The step that the next save continues from, if it is not the newest one.
        self.restored: int | None = None
        #: A deleted step that may be saved again: the restored one, or any if none was restored.
        self.deleted: int | None = None
        #: The restored state, and where training continued from it.
        self.restored_state: tuple[object, RestoredState] | None = None
        self.is_emitting = False  # whether event handlers are being called
        self.wal = WalHooks()
        self.coordinator, what = _coordinator(directory, options), opening(directory)
        has_blocks = options.dense.deltas == "blocks"
        with self.coordinator.together(what, fatal=True):
            count, threads = self.coordinator.count, options.background.threads or _THREADS
            self.runtime = Runtime(
                threads,
                size=max(2 * threads, FSYNCS, min(READS, count)) + 1,
                memory_bytes=options.writes.staging_bytes,
                bytes_per_sec=options.background.bytes_per_sec,
                cpus=options.background.cpus,
                name="deltackpt-save",
            )
            #: For leaves that deltas store as changed blocks.
            self.dense = keeper(options.dense, self.runtime) if has_blocks else None
            self.tracking = RowTracking(
                options.deltas.tracking, dense_blocks=has_blocks, may_stop=options.wal is None
            )
            if count > 1 and not (options.read_only or (options.tiers or Tiers()).shared):
                _require_shared_log(options.wal)
            self.topic = _topic(options, count)  # of a WAL in Kafka
            take_over()
        _require_equal(self.coordinator.gather(what, _shared_options(options)), what)
        opened: list[Steps | ReplicationClient] = []

        def first() -> int | None:
            opened.append(open_root(not options.read_only))
            return _steps_of(opened[0]).newest_step()

        try:
            #: The newest step: first as process 0 found it, then every committed one.
            self.newest = self.coordinator.from_process_0(what, first, fatal=True)
            with self.coordinator.together(what, fatal=True):
                if not opened:
                    opened.append(open_root(False))
            #: What has to be closed: the directory, or the tiers that replicate it.
            [self.opened] = opened
            replication = self.replication
            if self.topic is not None:
                from deltackpt.reading.wal_topics import WalTopics

                self.root.topics = WalTopics(self.topic.config)
            if replication is not None and replication.no_shared_fs:
                replication.join(functools.partial(self.coordinator.gather, what))
                self.newest = self.coordinator.from_process_0(
                    what, self.root.newest_step, fatal=True
                )
            self.lineage = Lineage(
                options.deltas.policy,
                uploaded=None if replication is None else replication.steps,
                item=self.item,
                run=self.coordinator.agree("a new run", new_run()),
                compacted=options.deltas.bases == "compacted",
            )
        except BaseException:
            for one in opened:
                one.abandon()
            raise

    @property
    def replication(self) -> ReplicationClient | None:
        """Returns the tiers, if there are any."""
        return None if isinstance(self.opened, Steps) else self.opened

    @property
    def root(self) -> Steps:
        """Returns everything that is committed."""
        return _steps_of(self.opened)

    @property
    def no_shared_fs(self) -> bool:
        """Returns whether each process writes its shard of a save to its own directory."""
        return self.replication is not None and self.replication.no_shared_fs

    @property
    def local(self) -> Root:
        """Returns the local directory to which a writable manager saves."""
        local = self.root if self.replication is None else self.replication.local
        assert isinstance(local, Root)
        return local

    @property
    def ledger(self) -> Root | ReplicationClient:
        """Returns the object that starts, rolls back and removes steps, in the tiers too."""
        return self.local if self.replication is None else self.replication

    def close(self) -> None:
        """Closes everything that the manager has opened, even after an error."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.opened.close)
            if self.topic is not None:
                stack.callback(self.topic.close)
            stack.callback(self.coordinator.close)
            for handler in self.extra.values():
                if hasattr(handler, "close"):
                    stack.callback(handler.close)
            stack.callback(self.runtime.close, wait=False)
            stack.callback(self.wal.close)
            if self.replication is not None:
                stack.callback(self.replication.stop_waiting)

    def check_lease(self, *, refresh: bool = False) -> None:
        """Checks before every commit that no other trainer has taken over; raises FencedError.

        Without ``refresh``, a bucket is not queried: the last known state is used.
        """
        if self.replication is not None:
            self.replication.local.check_lease()
            self.replication.check_claim(refresh=refresh)
        elif isinstance(self.root, Root):
            self.root.check_lease()

    def start_replication(self) -> None:
        """Records for the tiers, before a run's first save or WAL, what it resumes from."""
        if (replication := self.replication) is not None:
            # A process that failed here alone would be one save behind the others.
            with self.coordinator.together("recording what the run resumes from", fatal=True):
                replication.start_run(self.lineage.newest_committed, self.lineage.run)

    @property
    def fsync(self) -> bool:
        """Returns whether steps are fsynced."""
        return self.options.writes.durability == "power"

    def check_above(self, step: int) -> None:
        """Raises OptionError if a step is not greater than the newest or the restored one."""
        newest = self._newest_to_keep
        parent = self.lineage.newest_committed
        if newest is not None and parent is not None:
            # A save that was reported as failed may be committed nevertheless.
            newest = max(newest, parent.step)
        if (point := self.lineage.forked_from) is not None:
            newest = max(newest or 0, point.save_id.step)
        if newest is None or step > newest:
            return
        may_be_gone = self.restored is None or (point is None and step == self.restored)
        if may_be_gone and self.coordinator.count == 1:
            # It may have been removed since. A listing may differ from process to process.
            there = self.root.newest_step()
            if there is None or step > there:
                return
            newest = there if self.restored is None else newest
        found = "the same step, which is already saved" if step == newest else "an older one"
        raise OptionError(
            f"step {step} in {self.root}: expected a step above {newest}, the newest in the "
            f"directory or the restored one, found {found}; call restore_latest() or "
            "restore(step) first to resume from a step, or use an empty directory"
        )

    @property
    def _newest_to_keep(self) -> int | None:
        """Returns the newest step of the branch; the next save moves later ones aside."""
        if self.restored is None:
            return self.newest
        return self.restored - 1 if self.restored == self.deleted else self.restored

    def roll_back(self, step: int) -> None:
        """Moves steps later than the restored one aside, once, before the first save (``step``)."""
        # Without a shared file system, the shards of a deleted step are still staged.
        if self.restored is None and (self.deleted is None or not self.no_shared_fs):
            return
        newest = self._newest_to_keep
        # The others list no steps before process 0 has moved them.
        what = f"continuing with step {step}"
        with self.coordinator.together(what, fatal=True):
            self.ledger.roll_back(-1 if newest is None else newest, self.lineage.run)
        self.newest, self.restored, self.deleted = newest, None, None

    def end_hashing(self) -> None:
        """Makes the next save a base if a TouchState has replaced fingerprints.

        The TouchState does not mark rows that changed before. If the saves that hashed rows have
        failed, their parent may have seen the same TouchState.
        """
        if self.tracking.has_replaced:
            self.lineage.distrust(HASHED)

    def suspect(self, found: str) -> None:
        """Makes the next save a base; with several processes, their next delta fails first."""
        if self.coordinator.count == 1:
            self.lineage.distrust(found)
        else:
            self.lineage.suspect(found)

    @property
    def position(self) -> tuple[object, ...]:
        """Returns what training continues from."""
        return self.restored, self.lineage.newest_committed, self.lineage.forked_from

    def clocks(self, split: Split, touched: TouchState | None) -> Clocks:
        """Returns the clocks of the TouchStates of a state."""
        return pending_save.clocks_of(split, pending_save.marks_of(split, touched))

    def is_restored(
        self, split: Split, touched: TouchState | None, *, differs: bool = False
    ) -> bool:
        """Returns whether a state and its TouchState are the restored ones, on every process.

        ``differs`` is whether this process has another reason to save.
        """
        if self.restored_state is None or self.restored_state[0] != self.position:
            return False  # Training keeps a state that it had before the last restore.
        marked, hashed = differs or self.lineage.distrusted is not None, False
        if self.tracking.tracker is not None:
            stamps = () if touched is None else touched.stamps.values()
            # A row that changed may have changed back.
            hashed = not any(int(jnp.max(each)) for each in stamps)
        else:
            clocks = self.clocks(split, touched)
            marked = marked or any(reading.clock for reading in clocks.readings)
        return self.restored_state[1].is_same(split, self.coordinator, marked=marked, hashed=hashed)

    def emit_failure(
        self,
        operation: events.Operation,
        step: int | None,
        error: Exception,
        started: float,
        *,
        log_message: bool = False,
    ) -> None:
        """Emits a failure event of what began at ``started``, a ``time.perf_counter()`` value.

        ``log_message`` if the error is neither raised nor issued as a warning.
        """
        seconds = time.perf_counter() - started
        process = coordination.process_index()
        event = events.FailureEvent.from_error(
            error, operation, step, process=process, seconds=seconds
        )
        self.emit(event, log_message)

    def emit(self, event: events.Event, log_message: bool = True) -> None:
        """Logs an event and passes it to the handlers, which must not call the manager."""
        self.is_emitting = True
        try:
            events.emit(event, self.event_handlers, log_message=log_message)
        finally:
            self.is_emitting = False
