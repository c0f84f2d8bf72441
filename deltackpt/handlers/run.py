# SPDX-License-Identifier: Apache-2.0
"""State that the saves and restores of one manager share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jax.numpy as jnp

from deltackpt import events, processes
from deltackpt.coordination import Coordinator
from deltackpt.errors import OptionError, ProcessMissing, StorageError
from deltackpt.format.manifest import SaveId
from deltackpt.handlers.restored import RestoredState
from deltackpt.handlers.tracking import RowTracking
from deltackpt.ledger.held import Held
from deltackpt.ledger.steps import Steps
from deltackpt.options import Dense, KafkaWal, LocalWal, ManagerOptions, Tiers, WalOptions
from deltackpt.policies import Rolling
from deltackpt.reading.wal_topics import WalTopics
from deltackpt.resources.runtime import FSYNCS, READS, Runtime
from deltackpt.save import snapshot
from deltackpt.save.dense import DenseKeeper
from deltackpt.save.dense_coding import codings
from deltackpt.save.flight import Embeddings
from deltackpt.save.lineage import Lineage, new_run
from deltackpt.save.writers import StepWriters
from deltackpt.state.choice import Tables
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, TouchState
from deltackpt.storage.kafka import Topic

#: Number of fields that are written at the same time; as many threads encode.
_THREADS = 2
#: Opens the root, to be written or only read.
OpenRoot = Callable[[bool], Steps]


#: Why a save is a base: a TouchState need not mark what changed while rows were hashed.
HASHED = "a TouchState replaces the fingerprints of earlier calls"


class Log(Protocol):
    """The WAL's view of the saves of a run; see ``wal.recorder``."""

    def begin(self, split: Split) -> None:
        """Called before the first save or WAL record of a run, with the step that it continues."""
        ...

    def check(self, split: Split, marks: Sequence[Marks]) -> None:
        """Called before a save: compares the appended rows with the stamps.

        Raises:
          TrackingError: rows were touched that no WAL record contains.
        """
        ...

    def saved(self) -> None:
        """Called once a save has started, which contains everything appended so far."""
        ...

    def refused(self, split: Split) -> None:
        """Called if the other processes started a save and this one could not."""
        ...

    def distrust(self, reason: str) -> None:
        """Called if rows changed without being marked: no record of the run can be restored."""
        ...

    def deleted(self, step: SaveId, *, is_needed: bool) -> None:
        """Called on all processes once a step was deleted; no later record may continue from it.

        Args:
          step: the deleted save.
          is_needed: whether WAL records were trimmed that no remaining step covers, so that the WAL
            must end.
        """
        ...


class NoLog:
    """The ``Log`` of a read-only manager."""

    def begin(self, split: Split) -> None:
        """See ``Log``."""

    def check(self, split: Split, marks: Sequence[Marks]) -> None:
        """See ``Log``."""

    def saved(self) -> None:
        """See ``Log``."""

    def refused(self, split: Split) -> None:
        """See ``Log``."""

    def distrust(self, reason: str) -> None:
        """See ``Log``."""

    def deleted(self, step: SaveId, *, is_needed: bool) -> None:
        """See ``Log``."""


def keeper(options: Dense, runtime: Runtime) -> DenseKeeper:
    """Creates the object that copies dense leaves for blocks and keeps their decoded values."""
    return DenseKeeper(
        codings(options.codec, options.max_error),
        runtime,
        max_reference_bytes=options.max_reference_bytes,
        skip_unchanged=options.skip_unchanged,
    )


def _require_shared_log(options: WalOptions | None) -> None:
    backend = None if options is None else options.backend
    if backend is not None and not (isinstance(backend, LocalWal) and backend.directory):
        raise OptionError(
            "WalOptions.backend: expected a directory that all processes see, found a staging "
            "directory for each process (Tiers(shared=False)); pass LocalWal(directory=...)"
        )


def _topic(options: ManagerOptions, processes: int) -> Topic | None:
    """Returns the topic of the WAL, after checking that it can be written to."""
    if options.wal is None or not isinstance(backend := options.wal.backend, KafkaWal):
        return None
    topic = Topic(backend.topic, backend.config)
    if not options.read_only:
        topic.check(
            partitions=processes,
            message_bytes=backend.chunk_bytes,
            timeout_secs=options.wal.deadline_secs,
        )
    return topic


def _among(directory: str | os.PathLike[str], options: ManagerOptions) -> Coordinator:
    return Coordinator(os.fspath(directory), options.timeouts.processes_secs, alone=options.alone)


def _opening(directory: str | os.PathLike[str]) -> str:
    return f"{os.fspath(directory)}: opening it"


def refuse(
    directory: str | os.PathLike[str], options: ManagerOptions, error: OptionError
) -> NoReturn:
    """Raises an error of a manager's arguments; the other processes report it without waiting."""
    with contextlib.suppress(ProcessMissing, StorageError):
        with _among(directory, options).together(_opening(directory), fatal=True):
            raise error
    raise error


@dataclasses.dataclass(eq=False)
class Run:
    """State shared by the saves and restores of a manager.

    Attributes:
      options: options of the manager.
      event_handlers: receivers of events.
      root: the checkpoint directory, whose lease a trainer holds.
      item: name of the item with the tables.
      choice: selects the tables.
      among: the processes that save and restore together.
      lineage: the saves of this run.
      runtime: threads and memory of saves.
      tracking: how touched rows are found.
      newest: the newest step: first as process 0 found it, then every committed one.
      restored: the step that the next save continues from, if it is not the newest one.
      dense: keeps dense leaves that deltas store as changed blocks; None if they store them whole.
      log: receives the saves.
      topic: the Kafka topic of the WAL.
      restored_state: the restored state, and where training continued from it.
      is_emitting: whether event handlers are being called.
    """

    options: ManagerOptions
    event_handlers: tuple[events.EventHandler, ...]
    root: Steps
    item: str
    choice: Tables
    among: Coordinator
    lineage: Lineage
    runtime: Runtime
    tracking: RowTracking
    newest: int | None
    restored: int | None = None
    dense: DenseKeeper | None = None
    log: Log = dataclasses.field(default_factory=NoLog)
    topic: Topic | None = None
    restored_state: tuple[Any, RestoredState] | None = None
    is_emitting: bool = False

    @classmethod
    def begin(
        cls,
        directory: str | os.PathLike[str],
        item: str,
        choice: Tables,
        options: ManagerOptions,
        event_handlers: tuple[events.EventHandler, ...],
        open_root: OpenRoot,
        take_over: Callable[[], None],
    ) -> Run:
        """Begins a new run on a root, which process 0 opens before the others.

        Every process checks the options before any lease is taken.

        Args:
          directory: the root, as the user named it.
          item: name of the item with the tables.
          choice: selects the tables.
          options: options of the manager.
          event_handlers: receivers of events.
          open_root: opens the directory, for writing on process 0.
          take_over: called before the directory is opened.

        Raises:
          OptionError: the options are not valid for this job or directory.
        """
        among, what = _among(directory, options), _opening(directory)
        with among.together(what, fatal=True):
            threads = options.background.threads or _THREADS
            runtime = Runtime(
                threads,
                size=max(2 * threads, FSYNCS, min(READS, among.count)) + 1,
                memory_bytes=options.writes.staging_bytes,
                bytes_per_sec=options.background.bytes_per_sec,
                cpus=options.background.cpus,
                name="deltackpt-save",
            )
            dense = keeper(options.dense, runtime)
            tracking = RowTracking(
                options.deltas.tracking,
                dense_blocks=options.dense.deltas == "blocks",
                may_stop=options.wal is None and not isinstance(options.deltas.policy, Rolling),
            )
            if among.count > 1 and not (options.read_only or (options.tiers or Tiers()).shared):
                _require_shared_log(options.wal)
            topic = _topic(options, among.count)
            take_over()
        opened: list[Steps] = []

        def first() -> int | None:
            opened.append(open_root(not options.read_only))
            return opened[0].newest_step()

        try:
            newest = among.of_first(what, first, fatal=True)
            with among.together(what, fatal=True):
                if not opened:
                    opened.append(open_root(False))
            root = opened[0]
            if topic is not None:
                root.topics = WalTopics(topic.config)
            if isinstance(root, Held) and root.apart:
                root.join(functools.partial(among.gather, what))
                newest = among.of_first(what, root.newest_step, fatal=True)
            lineage = Lineage(
                options.deltas.policy,
                ledger=root if isinstance(root, Held) else None,
                item=item,
                run=among.agree("a new run", new_run()),
                compacted=options.deltas.bases == "compacted",
            )
        except BaseException:
            for one in opened:
                one.abandon()
            raise
        return cls(
            options=options,
            event_handlers=event_handlers,
            root=root,
            item=item,
            choice=choice,
            among=among,
            lineage=lineage,
            runtime=runtime,
            tracking=tracking,
            newest=newest,
            dense=dense if options.dense.deltas == "blocks" else None,
            topic=topic,
        )

    @property
    def held(self) -> Held:
        """Returns the checkpoint directory of a manager that can save."""
        assert isinstance(self.root, Held)
        return self.root

    def writers(self, temporary: Path, attempt: int) -> StepWriters:
        """Returns the processes that write a step.

        Args:
          temporary: the step's temporary directory.
          attempt: number of the attempt at a save in this run.
        """
        return StepWriters(
            coordinator=self.among,
            key=f"{self.lineage.run}-{attempt}",
            temporary=temporary,
            runtime=self.runtime,
            shared_fs=not self.held.apart,
            fsync=self.fsync,
        )

    @property
    def fsync(self) -> bool:
        """Returns whether steps are fsynced."""
        return self.options.writes.durability == "power"

    def check_above(self, step: int) -> None:
        """Checks that a step may be saved.

        Raises:
          OptionError: the step is not greater than the newest or the restored one.
        """
        newest = self.newest if self.restored is None else self.restored
        parent = self.lineage.newest_committed
        if newest is not None and parent is not None:
            # A save that was reported as failed may be committed nevertheless.
            newest = max(newest, parent.step)
        if (point := self.lineage.continues) is not None:
            newest = max(newest or 0, point.save_id.step)
        if newest is None or step > newest:
            return
        if self.restored is None and self.among.count == 1:
            # It may have been removed since. A listing may differ from process to process.
            newest = self.root.newest_step()
            if newest is None or step > newest:
                return
        found = "the same step, which is already saved" if step == newest else "an older one"
        raise OptionError(
            f"step {step} in {self.root}: expected a step above {newest}, the newest in the "
            f"directory or the restored one, found {found}; call restore_latest() or "
            "restore(step) first to resume from a step, or use an empty directory"
        )

    def roll_back(self, step: int) -> None:
        """Moves steps later than the restored one aside, once, before the first save.

        Args:
          step: the step that is about to be saved.
        """
        if self.restored is None:
            return
        # The others list no steps before process 0 has moved them.
        what = f"continuing from step {self.restored} with step {step}"
        with self.among.together(what, fatal=True):
            self.held.roll_back(self.restored, self.lineage.run)
        self.newest, self.restored = self.restored, None

    def end_hashing(self) -> None:
        """Makes the next save a base if a TouchState has replaced fingerprints.

        The TouchState does not mark rows that changed before. If the saves that hashed rows have
        failed, their parent may have seen the same TouchState.
        """
        if self.tracking.has_left:
            self.lineage.distrust(HASHED)

    def note_restored(self, step: int, state: RestoredState) -> None:
        """Records what training continues from."""
        self.restored = step
        self.restored_state = self._position, state

    @property
    def _position(self) -> Any:
        return self.restored, self.lineage.newest_committed, self.lineage.continues

    def is_restored(self, split: Split, touched: TouchState | None) -> bool:
        """Returns whether a state is the restored one, alike on every process.

        Args:
          split: the state.
          touched: what ``tracking.look`` returned.
        """
        if self.restored_state is None or self.restored_state[0] != self._position:
            return False  # Training keeps a state that it had before the last restore.
        marked, hashed = self.lineage.distrusted is not None, False
        if self.tracking.tracker is not None:
            stamps = () if touched is None else touched.stamps.values()
            # A row that changed may have changed back.
            hashed = not any(int(jnp.max(each)) for each in stamps)
        else:
            marks = Embeddings(split=split, touched=touched).marks
            clocks = snapshot.clocks_of(split, marks)
            marked = marked or any(reading.clock for reading in clocks.readings)
        return self.restored_state[1].is_same(split, self.among, marked=marked, hashed=hashed)

    def tell_failure(
        self,
        operation: events.Operation,
        step: int | None,
        error: Exception,
        started: float,
        *,
        log_message: bool = False,
    ) -> None:
        """Emits a failure event.

        Args:
          operation: what failed.
          step: the step, if it concerns one.
          error: the failure.
          started: when the operation began, as a ``time.perf_counter()`` value.
          log_message: whether the error is neither raised nor issued as a warning.
        """
        seconds = time.perf_counter() - started
        process = processes.index()
        event = events.FailureEvent.of(error, operation, step, process=process, seconds=seconds)
        self.emit(event, log_message)

    def emit(self, event: events.Event, log_message: bool = True) -> None:
        """WalReader an event and passes it to the handlers, which must not call the manager."""
        self.is_emitting = True
        try:
            events.emit(event, self.event_handlers, log_message=log_message)
        finally:
            self.is_emitting = False
