# SPDX-License-Identifier: Apache-2.0
"""What saving and restoring share of one run of a manager."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from deltackpt import events, processes
from deltackpt.errors import OptionError
from deltackpt.handlers.agreement import Processes
from deltackpt.handlers.board import JobBoard
from deltackpt.ledger.held import Held
from deltackpt.ledger.steps import Steps
from deltackpt.options import Dense, ManagerOptions
from deltackpt.resources.pace import Pace
from deltackpt.resources.staging import Staging
from deltackpt.resources.workers import Workers
from deltackpt.save.apart import Meetings
from deltackpt.save.dense_blocks import DenseKeeper
from deltackpt.save.dense_coding import codings
from deltackpt.save.lineage import Lineage, new_run
from deltackpt.save.rendezvous import Rendezvous, of_this_process
from deltackpt.state.choice import Tables
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, TouchState
from deltackpt.tracking.fingerprints import RowTracker

#: Opens the root, to be written or only read.
OpenRoot = Callable[[bool], Steps]


class Log(Protocol):
    """What saves tell the log of a run; see ``log.recorder``."""

    def begin(self, split: Split) -> None:
        """Called before the first save or mark of a run: training goes on from here."""
        ...

    def check(self, split: Split, marks: Sequence[Marks]) -> None:
        """Called before a save: compares what was logged with the stamps.

        Raises:
          TrackingError: rows were touched that no mark holds.
        """
        ...

    def saved(self) -> None:
        """Called once a save was begun: it covers all that was logged."""
        ...

    def refused(self, split: Split) -> None:
        """Called where a save was begun by the other processes, and could not be by this one."""
        ...

    def distrust(self, reason: str) -> None:
        """Rows changed that were not marked: no mark of the run can be restored any more."""
        ...


class NoLog:
    """The ``Log`` of a manager that is only read."""

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


def keeper(options: Dense) -> DenseKeeper:
    """What copies dense leaves for blocks, and keeps what these decode to: a new one."""
    return DenseKeeper(
        codings(options.codec, options.max_error),
        max_reference_bytes=options.max_reference_bytes,
        skip_unchanged=options.skip_unchanged,
    )


@dataclasses.dataclass(eq=False)
class Run:
    """One manager's run: its directory, what it goes on from, and whom it tells.

    Attributes:
      options: of the manager.
      sinks: receivers of events.
      root: where the steps are; a trainer holds it.
      item: of the tables.
      choice: which leaves are tables.
      among: the processes that save and restore together.
      lineage: what this run knows of its own saves.
      staging: memory for snapshots.
      workers: threads of saves.
      tracker: what finds touched rows where that is the manager's business.
      meetings: where processes meet that do not see each other's directories.
      newest: the newest step, as process 0 found it at first; every committed one since.
      restored: the step that the next save goes on from, where it is not the newest one.
      dense: what keeps dense leaves that are blocks of deltas; None where they are Orbax's items.
      log: what is told of saves.
    """

    options: ManagerOptions
    sinks: tuple[events.Sink, ...]
    root: Steps
    item: str
    choice: Tables
    among: Processes
    lineage: Lineage
    staging: Staging
    workers: Workers
    tracker: RowTracker | None
    newest: int | None
    meetings: Meetings | None = None
    restored: int | None = None
    dense: DenseKeeper | None = None
    log: Log = dataclasses.field(default_factory=NoLog)

    @classmethod
    def begin(
        cls,
        directory: str | os.PathLike[str],
        item: str,
        choice: Tables,
        options: ManagerOptions,
        sinks: tuple[events.Sink, ...],
        open_root: OpenRoot,
    ) -> Run:
        """A new run on a root, which process 0 opens before the others.

        Args:
          directory: where the root is, as the user named it.
          item: of the tables.
          choice: which leaves are tables.
          options: of the manager.
          sinks: receivers of events.
          open_root: opens it, for this process to write where it is the first of them.
        """
        among = Processes(
            os.fspath(directory), options.timeouts.processes_secs, alone=options.alone
        )
        opened: list[Steps] = []

        def first() -> int | None:
            opened.append(open_root(not options.read_only))
            return opened[0].newest_step()

        what = f"{os.fspath(directory)}: opening it"
        newest = among.of_first(what, first, fatal=True, patience=1)
        root = opened[0] if opened else open_root(False)
        meetings = None
        if isinstance(root, Held) and root.apart:
            root.join(functools.partial(among.gather, what))
            newest = among.of_first(what, root.newest_step, fatal=True)
            meetings = Meetings(
                JobBoard(), among.index, among.count, options.timeouts.processes_secs
            )
        lineage = Lineage(
            options.deltas.policy,
            ledger=root if isinstance(root, Held) else None,
            item=item,
            run=among.agree("a new run", new_run()),
            compacted=options.deltas.bases == "compacted",
        )
        return cls(
            options=options,
            sinks=sinks,
            root=root,
            item=item,
            choice=choice,
            among=among,
            lineage=lineage,
            staging=Staging(options.writes.staging_bytes),
            workers=Workers(
                cpus=options.background.cpus,
                threads=options.background.threads,
                pace=Pace(options.background.bytes_per_sec),
            ),
            tracker=RowTracker() if options.deltas.tracking == "fingerprints" else None,
            newest=newest,
            meetings=meetings,
            dense=keeper(options.dense) if options.dense.deltas == "own" else None,
        )

    @property
    def held(self) -> Held:
        """The root, of a manager that saves."""
        assert isinstance(self.root, Held)
        return self.root

    def meeting(self, temporary: Path) -> Rendezvous:
        """Where the processes meet that write a step."""
        if self.meetings is None:
            return of_this_process(temporary, self.options.timeouts.processes_secs)
        return self.meetings.of(temporary, fsync=self.fsync)

    @property
    def fsync(self) -> bool:
        """Whether steps are forced to disk."""
        return self.options.writes.durability == "power"

    def check_above(self, step: int) -> None:
        """Checks that a step may be saved.

        Raises:
          OptionError: it is not above the newest one, or the one that was restored.
        """
        newest = self.newest if self.restored is None else self.restored
        parent = self.lineage.goes_on
        if newest is not None and parent is not None:
            # A save that was told to have failed may stand all the same.
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
        raise OptionError(
            f"step {step} in {self.root}: expected a step above {newest}, the newest in the "
            "directory or the restored one, found an older or equal one; call restore_latest() or "
            "restore(step) first to go on from a step, or use an empty directory"
        )

    def roll_back(self, step: int) -> None:
        """Moves steps later than the restored one aside, once, before the first save.

        Args:
          step: the one that is about to be saved.
        """
        if self.restored is None:
            return
        # The others list no steps before process 0 has moved them.
        what = f"going on from step {self.restored} with step {step}"
        with self.among.together(what, fatal=True):
            self.held.roll_back(self.restored, self.lineage.run)
        self.newest, self.restored = self.restored, None

    def touched_rows(self, split: Split, given: TouchState | None) -> TouchState | None:
        """The TouchState beside those of a state: the one given, or what the tracker finds now.

        Args:
          split: the state.
          given: by the caller of ``save`` or ``log``.

        Raises:
          OptionError: one is given, and rows are found by fingerprints.
        """
        if self.tracker is None:
            return given
        if given is not None:
            raise OptionError(
                'touched: expected none with tracking="fingerprints", which finds the rows by '
                'itself, found a TouchState; leave it out, or use tracking="marks"'
            )
        return self.tracker.look(split.fields, split.layout)

    def tell_failure(
        self,
        operation: events.Operation,
        step: int | None,
        error: Exception,
        started: float,
    ) -> None:
        """Emits what failed; ``started`` is of ``time.perf_counter()``."""
        seconds = time.perf_counter() - started
        process = processes.index()
        event = events.FailureEvent.of(error, operation, step, process=process, seconds=seconds)
        events.emit(event, self.sinks)
