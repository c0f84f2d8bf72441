# SPDX-License-Identifier: Apache-2.0
"""Recorder: the log of one manager, from the training thread's side.

It knows since when the next mark's rows are, and what the marks lead down to: the step or point
that was restored, or a save of the run. A *stretch* begins with the first save or mark after a
start or a restore, by a head that process 0 writes; also in a run that keeps no log, where there is
one: what training left is dead from then on.

Calls are counted on all processes alike, those that take nothing too: the number is the mark's, and
says whether it is full. So a process that fails makes a point void, and never the next.

Where it saves a step in the place of a mark, all processes do: for reasons that all find at the
same call, or at a call that they have agreed on (``agreement``). So what only one process meets is
raised after all that the others wait for: whatever it is, they are at the same collective.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from deltackpt import events
from deltackpt.errors import OptionError, StorageError, TrackingError, WaitTimeout
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.format.stretches import Continues
from deltackpt.handlers.run import Run, keeper
from deltackpt.log import taking, trimming
from deltackpt.log.batch import Item, items_of
from deltackpt.log.logged_rows import LoggedRows
from deltackpt.log.needs import Needs
from deltackpt.log.stretch import Stretch, head_of, write_head
from deltackpt.log.taking import Rows
from deltackpt.log.writer import Failure, LogWriter
from deltackpt.options import LogOptions
from deltackpt.outcomes import Logged
from deltackpt.reading.stretches import LogPoint, Logs
from deltackpt.resources.staging import Staging
from deltackpt.save import snapshot
from deltackpt.save.branch import Known, doubt, settled
from deltackpt.save.clocks import Clocks, clocks_seen
from deltackpt.save.dense_blocks import DenseKeeper
from deltackpt.save.flight import Embeddings
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, TouchState, clock_exhausted

_GONE = "the marks that led to the point which training goes on from are gone"


class Due(NamedTuple):
    """A step that is to be saved in the place of a mark, and why."""

    reason: str


class Call(NamedTuple):
    """What ``log()`` was given beside state and step; see ``CheckpointManager.log``.

    ``may_commit`` is whether a save is in flight that has not failed.
    """

    touched: TouchState | None
    ids: Mapping[str, Any] | None
    items: Mapping[str, Any] | None
    full: bool | None
    started: float
    may_commit: bool


@dataclasses.dataclass(eq=False)
class _Chain:
    """What the next mark goes on from.

    Attributes:
      last: a save of the run, or the restored one, with the clocks of the newest batch in the place
        of its own: the next rows are since these.
      root: what the first mark's rows are since; None once that is written.
      anchor: the save, or point, that the marks lead down to.
      committed: whether that is known to stand.
    """

    last: Known
    root: SaveId | None
    anchor: SaveId
    committed: bool


class Recorder:
    """Takes marks and hands them to the writer; used by one thread at a time."""

    def __init__(self, run: Run):
        """Writes nothing yet.

        Args:
          run: the manager's run.

        Raises:
          OptionError: the log would be where the other processes do not see it.
        """
        self._run = run
        self._options = run.options.log
        if self._options is not None and run.held.apart and not self._options.backend.directory:
            raise OptionError(
                "LogOptions.backend: expected a directory that all processes see, found a stage of "
                "their own for each (Tiers(shared=False)); give LocalLog(directory=...)"
            )
        self._logs = Logs(run.held.log_at)
        self._stretch: Stretch | None = None
        self._needs = Needs(run)
        #: The tables that the head names.
        self._layout: Layout | None = None
        self._chain: _Chain | None = None
        #: The run of which it is all; another one after a restore.
        self._of_run = ""
        #: Whether the head of the run was written, or none is needed.
        self._begun = False
        #: Why no more marks are taken in this run; None while they are.
        self._ended: str | None = None
        #: How many times ``log`` was called.
        self._calls = 0
        self._newest_step = -1
        self._given_rows = LoggedRows()
        #: Rows that no durable mark of an ended stretch holds: the next one's first mark does.
        self._owed: list[Rows] = []
        self._committed: collections.deque[SaveId] = collections.deque(maxlen=2)
        self._trimming: Future[None] | None = None
        #: Whether marks that a run went on from may have been trimmed by this manager.
        self._may_have_trimmed = False
        #: The point of this run that was: its marks lead to it no more.
        self._lost: Continues | None = None
        self._staging = Staging((self._options or LogOptions()).buffer_bytes)
        #: What the dense leaves of the newest full mark decode to: never those of saves.
        self._references: DenseKeeper | None = None
        if self._options is not None and self._options.dense == "delta":
            self._references = keeper(run.options.dense)

    @property
    def _writer(self) -> LogWriter | None:
        return None if self._stretch is None else self._stretch.writer

    # Marks.

    def count(self) -> None:
        """Counts a call of ``log()``: before anything that may fail on this process alone.

        Raises:
          StorageError: whether all save at this call cannot be found out.
        """
        self._calls += 1
        self._needs.call()

    def log(self, step: int, split: Split, call: Call) -> Logged | Due:
        """Takes a mark; as ``CheckpointManager.log``.

        Args:
          step: the training step.
          split: the state.
          call: what else was given.

        Returns:
          What was taken; or that a step must be saved.
        """
        options = self._options
        assert options is not None
        self._follow_run()
        number = self._calls
        if self._needs.agreed is not None and self._needs.agreed.anew:
            self._chain, self._begun = None, False
        failure = self._tell()
        touched = self._run.touched_rows(split, call.touched)
        marks = Embeddings(split=split, touched=touched).marks
        clocks = snapshot.clocks_of(split, marks)
        reason, refused = self._due(split, clocks, call.may_commit, failure)
        self._check_above(step)
        if reason is None:
            # Steps that training left are newer than its marks.
            self._run.roll_back(step)
            if not self._begun or self._layout != split.layout:
                reason = self._open(split)
        items = items_of(call.items)
        rows = None if call.ids is None else taking.rows_of(call.ids, split)
        if rows is not None and self._chain is not None:
            # Where nothing is taken, too: the next mark holds these rows.
            self._given_rows.add(rows, since=self._chain.last.clocks, until=clocks)
        chain: _Chain | None = None
        try:
            if reason is not None:
                return Due(reason)
            if refused or self._ended is not None:
                why = self._ended or "this process could not do its part of the last save"
                return self._logged(step, None, f"skipped: {why}", call.started)
            if failure is not None and options.on_failure == "raise":
                raise failure.error() from failure.cause
            full = call.full
            if full is None:
                full = options.dense != "soft" and number % options.dense_every == 0
            full = full or not split.layout.dense
            assert self._chain is not None and self._chain.last.settled is not None
            since = clocks_seen(clocks, self._chain.last.settled)
            if not self._take(step, number, split, marks, since, rows, items, full, call.started):
                why = "skipped: the buffer is full; the next call takes these rows too"
                return self._logged(step, None, why, call.started)
            chain = self._chain
        finally:
            if chain is None and rows is not None and self._stretch is not None:
                # No stamp is looked at where the caller says what was touched.
                self._stretch.writer.owe(rows)
        assert chain is not None
        if rows is None:
            self._given_rows.forget()
        moved = settled(clocks, chain.last)
        chain.last = dataclasses.replace(chain.last, clocks=clocks, settled=moved)
        chain.root, self._newest_step = None, step
        kind = "full" if full else "soft"
        return self._logged(step, kind, f"{kind}: rows since the mark before", call.started)

    def _take(
        self,
        step: int,
        number: int,
        split: Split,
        marks: Sequence[Marks],
        since: Mapping[str, int],
        rows: Rows | None,
        items: Sequence[Item],
        full: bool,
        started: float,
    ) -> bool:
        """Hands a batch to the writer; returns whether there was room for it."""
        options, stretch, chain = self._options, self._stretch, self._chain
        assert options is not None and stretch is not None and chain is not None
        writer = stretch.writer
        losses, owed = writer.losses, writer.take_owed()
        try:
            segments = taking.segments_of(
                split,
                marks,
                since=since,
                rows=rows,
                owed=owed,
                always=full,
                staging=self._staging,
            )
            nbytes = sum(one.nbytes for one in segments)
            if not writer.has_room(nbytes):
                if options.when_full == "coalesce":
                    writer.owe(owed)
                    return False
                writer.wait_room(nbytes)
            batch = taking.take(
                SaveId(stretch.head.run, step, number),
                split,
                segments,
                full=full,
                items=items,
                codec=options.codec,
                restores=self._run.lineage.restores,
                process=self._run.among.index,
                staging=self._staging,
                references=self._references,
                started=started,
            )
        except BaseException:
            writer.owe(owed)
            raise
        batch.blocked_secs = time.perf_counter() - started
        writer.submit(batch, chain.root, losses)
        return True

    def _check_above(self, step: int) -> None:
        newest = self._newest_step
        known = self._run.lineage.newest_known
        if known is not None:
            below = known.info.save_id if known.continues is None else known.continues.save_id
            newest = max(newest, below.step - (known.continues is None))
        if step <= newest:
            raise OptionError(
                f"step {step}: expected a step above {newest}, the newest that was logged or "
                "restored, found an older or equal one; log each step once"
            )

    def _due(
        self, split: Split, clocks: Clocks, may_commit: bool, failure: Failure | None
    ) -> tuple[str | None, bool]:
        """Why a step must be saved; and whether this process alone can take no mark."""
        if any(clock_exhausted(reading.clock) for reading in clocks.readings):
            return "the clock is exhausted", False
        reason = self._why_not(split, clocks)
        needs, agreed = self._needs, self._needs.agreed
        if agreed is not None:
            return reason or agreed.reason, False
        if reason is not None:
            return (None, True) if needs.waits_for_others(split.layout) else (reason, False)
        rootless = not may_commit and not self.is_anchored
        return needs.alone(self._writer, split.layout, failure, rootless=rootless), False

    def _why_not(self, split: Split, clocks: Clocks) -> str | None:
        """Why a step must be saved first; None where a mark can be taken.

        All processes find the same, unless one was refused its part of a save: it depends on
        nothing else that differs between them.
        """
        reason = "there is no step, and no point, that a mark could go on from"
        if self._chain is not None:
            reason = self._unfit(self._chain.last, split, clocks)
        if reason is not None and (known := self._run.lineage.newest_known) is not None:
            # It may be newer than what the marks go on from.
            reason = self._unfit(known, split, clocks)
            if reason is None and known.continues is not None and known.continues == self._lost:
                reason = _GONE
            if reason is None:
                self._root_at(known)
        return reason

    def _unfit(self, known: Known, split: Split, clocks: Clocks) -> str | None:
        if known.layout != split.layout:
            return "the tables are not those of the step below"
        return doubt(clocks, known)

    def _root_at(self, known: Known) -> None:
        """The next mark goes on from a save, or from the point that was restored above it."""
        anchor = known.info.save_id if known.continues is None else known.continues.save_id
        committed = known.continues is not None or self._run.lineage.is_committed(anchor)
        self._chain = _Chain(last=known, root=anchor, anchor=anchor, committed=committed)

    def _tell(self) -> Failure | None:
        """Tells what has happened in the background; returns what has failed.

        Raises:
          FencedError: the root is another's.
        """
        for behind in self._needs.alarms():
            self._run.tell_failure("log", None, behind, time.perf_counter())
        writer = self._writer
        failure = None if writer is None else self._take_news(writer)
        if failure is not None:
            assert self._options is not None
            if self._options.on_failure == "save":
                events.warn(str(failure.error()))
        return failure

    def _take_news(self, writer: LogWriter) -> Failure | None:
        """Tells of durable marks, and of those that are none; returns why."""
        while writer.reports:
            events.emit(writer.reports.popleft(), self._run.sinks)
        if writer.fenced is not None:
            raise writer.fenced
        failure = writer.take_failure()
        if failure is not None:
            for step in failure.steps:
                self._run.tell_failure("log", step, failure.cause, failure.since)
        return failure

    def _logged(self, step: int, kind: Any, reason: str, started: float) -> Logged:
        return Logged(
            step=step,
            kind=kind,
            reason=reason,
            blocked_secs=time.perf_counter() - started,
            recovery=self.recovery(),
        )

    # What is durable.

    def recovery(self, *, fresh: bool = False) -> LogPoint | int | None:
        """What a restore would find now, as far as is known: the newest point, or step.

        Args:
          fresh: whether other processes are asked how far they are, however lately they were.
        """
        newest = self._run.lineage.newest_committed
        step = None if newest is None else newest.step
        if self._run.lineage.run != self._of_run:
            # Training has gone back: what it left leads nowhere, and nothing of it is trimmed.
            return step
        if newest is not None:
            self._note_committed(newest)
        stretch, chain = self._stretch, self._chain
        point = None
        if stretch is not None and chain is not None and self._anchored(chain):
            point = stretch.newest_point(fresh=fresh)
        if point is not None and (step is None or point.step > step):
            return point
        return step

    @property
    def is_anchored(self) -> bool:
        """Whether what marks lead down to stands, if there is anything: else they are no points."""
        return self._chain is None or self._anchored(self._chain)

    def _anchored(self, chain: _Chain) -> bool:
        if not chain.committed:
            chain.committed = self._run.lineage.is_committed(chain.anchor)
        return chain.committed

    def wait(self, timeout_secs: float) -> LogPoint | int | None:
        """Returns when all marks of this process are durable.

        Returns:
          What a restore would find, as far as is known.

        Raises:
          WaitTimeout: they are not within that time.
          LogFailed: some could not be made durable.
          FencedError: the root is another's.
        """
        writer = self._writer
        if writer is not None:
            writer.wait(timeout_secs)
            failure = self._take_news(writer)
            if failure is not None:
                raise failure.error() from failure.cause
        return self.recovery(fresh=True)

    def settle_trimming(self) -> None:
        """Waits until nothing is being trimmed, which only a later call of this manager begins."""
        if self._trimming is not None:
            concurrent.futures.wait([self._trimming])

    def settle_quietly(self) -> None:
        """Waits until all marks are durable, or have failed; the next ``log()`` tells of that.

        Nothing is being trimmed then, and so no point goes while it is restored and gone on from.
        """
        self.settle_trimming()
        if self._options is not None and (writer := self._writer) is not None:
            try:
                writer.wait(self._options.deadline_secs)
            except WaitTimeout as error:
                events.warn(str(error))

    def close(self) -> None:
        """Ends the writer once all marks are durable, or have failed."""
        self._needs.end()
        if self._stretch is not None:
            self._stretch.writer.close()
        self.settle_trimming()

    # What saves tell; see ``handlers.run.Log``.

    def begin(self, split: Split) -> None:
        """See ``Log``: writes the head of a stretch where there is none of this run.

        Raises:
          FencedError: the root is another's.
          StorageError: it cannot be written.
        """
        self._follow_run()
        if not self._begun:
            self._open(split)

    def _open(self, split: Split) -> str | None:
        """Begins a stretch: all processes do, at the same call.

        Returns:
          Why all save a step before they take a mark; None where they need not.
        """
        run, logs = self._run, self._options is not None
        # As before a save: a stage without what is logged is none to go on from.
        run.held.begin(run.lineage.goes_on, run.lineage.run)
        known, continues = run.lineage.newest_known, run.lineage.continues
        if self._ended is not None or (known is not None and known.continues != continues):
            continues = None

        def write() -> tuple[int | None, bool]:
            if not logs and not self._logs.numbers():
                return None, True
            leads = True
            if continues is not None and known is not None and self._may_have_trimmed:
                leads = self._logs.leads(known.info.save_id, continues)
            run.held.check_lease()
            number = write_head(
                self._logs,
                run=run.lineage.run,
                layout=split.layout if logs else None,
                process_count=run.among.count if logs else 0,
                base=None if known is None else known.info.save_id,
                continues=continues if leads else None,
                directory=None if self._options is None else self._options.backend.directory,
                log_dir=run.held.log_dir,
            )
            return number, leads

        number, leads = run.among.of_first("beginning the log", write, fatal=True)
        if not leads:
            self._chain, self._lost = None, continues
        self._needs.end()
        if self._stretch is not None:
            self._owed.append(self._stretch.close())
            self._stretch = None
        if number is not None and logs:
            with run.among.together("looking for the log", fatal=True):
                head = head_of(run, self._logs, number)
                stretch = Stretch.open(run, head, self._references)
            while self._owed:
                stretch.writer.owe(self._owed.pop())
            self._stretch, self._ended = stretch, None
            self._needs.begin(stretch, split.layout, self._calls)
        self._begun, self._layout = True, split.layout
        return None if leads else _GONE

    def check(self, split: Split, marks: Sequence[Marks]) -> None:
        """See ``Log``."""
        self._follow_run()
        missing = self._given_rows.missing(split, marks, self._staging)
        self._given_rows.compared()
        if missing is not None:
            self.distrust("log(ids=...) left out rows that were touched")
            raise TrackingError(
                f"log: expected ids to name every row that was touched, found {missing} by the "
                "stamps that none of them named; no point of this run can be restored any more. "
                "Give log() all ids of the steps since the call before, and save again"
            )

    def saved(self) -> None:
        """See ``Log``: marks go on from the save where what they led down to has failed."""
        self._follow_run()
        lineage = self._run.lineage
        if (newest := lineage.newest_committed) is not None:
            self._note_committed(newest)
        self._may_have_trimmed = True
        if self._options is None:
            return
        known, chain = lineage.newest_known, self._chain
        assert known is not None
        if chain is None or not self._anchored(chain) or chain.last.layout != known.layout:
            self._root_at(known)
        writer = self._writer
        self._needs.saved(writer)
        if writer is not None:
            writer.roll()

    def refused(self, split: Split) -> None:
        """See ``Log``: only a save of all makes this process's marks go on again."""
        self._needs.refused(split.layout)

    def distrust(self, reason: str) -> None:
        """See ``Log``: a head that goes on from no point kills those of this run."""
        self._follow_run()
        if self._stretch is None:
            return
        # Stamps, or ids, say no more what was touched: what is owed counts for nothing.
        self._stretch.close()
        self._stretch.void()
        self._owed.clear()
        if self._logs.numbers()[0] == self._stretch.head.stretch:
            # Else that is done, or the root is another trainer's, whose log this must not end.
            self._run.held.check_lease()
            write_head(
                self._logs,
                run=self._run.lineage.run,
                layout=None,
                process_count=0,
                base=self._committed[-1] if self._committed else None,
                continues=None,
                directory=None,
                log_dir=self._run.held.log_dir,
            )
        self._stretch, self._chain = None, None
        if self._run.among.count > 1:
            # No mark of the others makes a point without ours.
            self._ended = reason
            self._needs.ask(reason, anew=True)
        else:
            self._begun = False

    def _follow_run(self) -> None:
        """Begins anew where a restore has begun another run."""
        lineage = self._run.lineage
        if lineage.run == self._of_run:
            return
        self._of_run, self._begun, self._ended = lineage.run, False, None
        self._chain = self._lost = None
        self._needs.forget()
        self._newest_step = -1
        self._given_rows.forget()
        self._owed.clear()
        self._committed.clear()
        if (newest := lineage.newest_committed) is not None:
            self._committed.append(newest)
        if self._stretch is not None:
            self._stretch.close()
            self._stretch = None

    def _note_committed(self, newest: SaveId) -> None:
        if self._committed and self._committed[-1] == newest:
            return
        self._committed.append(newest)
        busy = self._trimming is not None and not self._trimming.done()
        if len(self._committed) < 2 or self._stretch is None or busy:
            return
        head, process, oldest = self._stretch.head, self._run.among.index, self._committed[0]
        at = self._run.held.log_dir
        self._trimming = self._run.workers.write(_trim, at, head, process, oldest)


def _trim(at: Any, head: Any, process: int, oldest: SaveId) -> None:
    try:
        trimming.trim(at, head, process, oldest)
    except StorageError as error:
        events.warn(f"marks of the log that nothing needs stay: {error}")
