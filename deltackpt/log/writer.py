# SPDX-License-Identifier: Apache-2.0
"""The thread that makes batches durable: encoded, framed, written, and forced many at a time.

While one ``fdatasync`` is under way others queue up behind it, and the next one covers all of them:
group commit, as databases have it. A mark is durable once a ``fdatasync`` after it has returned and
the lease was ours still then: whoever takes the root afterwards finds it.

What fails is given up with all that is queued behind it. Their rows are *owed*: the next batch
holds them as they are by then, and goes to a new part of the log, after the last durable mark.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from deltackpt import events
from deltackpt.errors import FencedError, LogFailed, WaitTimeout
from deltackpt.format.manifest import SaveId
from deltackpt.log.batch import Batch, Figures, frames_of
from deltackpt.log.dense_frames import DenseFrames, dense_bytes
from deltackpt.log.segments import SegmentWriter
from deltackpt.resources.workers import Workers

#: So many bytes are forced to disk although more batches wait: they leave the page cache steadily.
_UNSYNCED_BYTES = 64 << 20
#: What was done, until it is told.
_REPORTS = 10_000


class Durable(NamedTuple):
    """A mark of this process that survives."""

    save_id: SaveId
    full: bool
    unix_secs: float


class Failure(NamedTuple):
    """Marks that could not be made durable.

    Attributes:
      steps: theirs.
      cause: why.
      since: when the first was taken, of ``time.perf_counter()``.
    """

    steps: tuple[int, ...]
    cause: Exception
    since: float

    def error(self) -> LogFailed:
        """What is raised; its cause is to be ``cause``."""
        first, last = self.steps[0], self.steps[-1]
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        return LogFailed(
            f"the log of {which}: {self.cause}; these steps cannot be restored, and no touched row "
            "is lost: the next log(), or save(), holds them"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """A batch on its way, and what its rows are since where that is no mark of the log."""

    batch: Batch
    root: SaveId | None


class LogWriter:
    """Writes the batches of one process in the background, in order; see the module."""

    def __init__(
        self,
        segments: SegmentWriter,
        *,
        check: Callable[[], None],
        process: int,
        dense: DenseFrames,
        segment_bytes: int,
        buffer_bytes: int,
        deadline_secs: float,
        workers: Workers,
        notify: Callable[[Durable], None],
    ):
        """Starts no thread before the first batch.

        Args:
          segments: where to.
          check: raises where the root is another's; called after each ``fdatasync``.
          process: index of the process.
          dense: makes the frames of dense leaves.
          segment_bytes: how long a file grows.
          buffer_bytes: of batches that are not durable.
          deadline_secs: for how long to wait for room.
          workers: encode rows, and whose pace holds.
          notify: called with each mark that is durable, in this thread.
        """
        self._segments = segments
        self._check = check
        self._process = process
        self._dense = dense
        self._segment_bytes = segment_bytes
        self._buffer_bytes = buffer_bytes
        self._deadline_secs = deadline_secs
        self._workers = workers
        self._notify = notify
        self._changed = threading.Condition()
        self._queue: collections.deque[Wanted] = collections.deque()
        self._written: list[Wanted] = []
        self._bytes = 0
        self._parent: SaveId | None = None
        self._durable_at = segments.position
        #: What a batch goes on from where nothing that was written since counts.
        self._durable: SaveId | None = None
        self._owed: list[Mapping[str, np.ndarray]] = []
        self._roll = False
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None
        self.failure: Failure | None = None
        self.fenced: FencedError | None = None
        self.reports: collections.deque[events.LogEvent] = collections.deque(maxlen=_REPORTS)
        #: Bytes that were written in all.
        self.bytes_written = 0
        #: Bytes of dense leaves of the newest full mark.
        self.dense_bytes = 0
        #: Batches in a row that failed.
        self._failures = 0
        #: How often batches were given up.
        self.losses = 0

    # On the training thread.

    def has_room(self, nbytes: int) -> bool:
        """Whether a batch of so many bytes may wait; one that never may goes alone."""
        with self._changed:
            return self._bytes == 0 or self._bytes + nbytes <= self._buffer_bytes

    def wait_room(self, nbytes: int) -> None:
        """Returns when a batch of so many bytes may wait.

        Raises:
          WaitTimeout: it may not within the deadline.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.has_room(nbytes), self._deadline_secs):
                raise WaitTimeout(
                    f"log: expected room for {nbytes:,} bytes within {self._deadline_secs:g} s "
                    f"(LogOptions.deadline_secs), found {self._bytes:,} bytes that are not durable "
                    "yet; look at the disk. No touched row is lost: the next log() holds them"
                )

    def submit(self, batch: Batch, root: SaveId | None, losses: int) -> None:
        """Has a batch written.

        Args:
          batch: what was taken.
          root: what its rows are since, where that is not the mark of the batch before.
          losses: what ``losses`` was before any of its rows were looked for.
        """
        wanted = Wanted(batch=batch, root=root)
        with self._changed:
            if batch.dense is not None:
                self.dense_bytes = batch.dense.nbytes
            if losses != self.losses:
                # It was taken since a mark that has been given up meanwhile, and lacks its rows.
                assert self.failure is not None
                self._lose([wanted], self.failure.cause)
                batch.release()
                return
            self._queue.append(wanted)
            self._bytes += batch.nbytes
            self._busy = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="deltackpt-log", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def take_owed(self) -> dict[str, np.ndarray]:
        """Table name to rows, ascending, that no durable mark holds: now they are the caller's."""
        with self._changed:
            owed, self._owed = self._owed, []
        found: dict[str, np.ndarray] = {}
        for rows in owed:
            for table, numbers in rows.items():
                found[table] = np.union1d(found[table], numbers) if table in found else numbers
        return found

    def owe(self, rows: Mapping[str, np.ndarray]) -> None:
        """Gives rows to the next batch."""
        with self._changed:
            if rows:
                self._owed.append(rows)

    def take_failure(self) -> Failure | None:
        """What failed since the last call."""
        with self._changed:
            failure, self.failure = self.failure, None
        return failure

    def has_failed(self, times: int) -> bool:
        """Whether batches have failed so often in a row; one that fails later does so again."""
        with self._changed:
            if self._failures < times:
                return False
            self._failures = times - 1
        return True

    def roll(self) -> None:
        """Has the next batch begin a file."""
        with self._changed:
            self._roll = True

    def wait(self, timeout_secs: float) -> None:
        """Returns when every batch is durable, or has failed.

        Raises:
          WaitTimeout: one is neither within that time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy, timeout_secs):
                raise WaitTimeout(
                    f"log: expected all marks to be durable within {timeout_secs:g} s, found "
                    f"{self._bytes:,} bytes that are not; look at the disk, then wait again"
                )

    def close(self) -> None:
        """Ends the thread once everything is written; nothing is submitted any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(self._deadline_secs)

    # In the thread.

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    break
                wanted, roll = self._queue.popleft(), self._roll
                self._roll = False
            try:
                self._write(wanted, roll)
                self._sync_where_due()
            except Exception as error:
                self._give_up(wanted, error)
            finally:
                with self._changed:
                    self._busy = bool(self._queue or self._written)
                    self._changed.notify_all()
            del wanted
        self._segments.close()

    def _write(self, wanted: Wanted, roll: bool) -> None:
        batch = wanted.batch
        segments = self._segments
        if roll or segments.segment_bytes >= self._segment_bytes:
            self._sync()
            segments.roll()
            self._dense.restart()
        self._written.append(wanted)
        started = time.perf_counter()
        batch.rows.land()
        parent = wanted.root or self._parent
        assert parent is not None
        found = list(frames_of(batch, parent, self._dense, self._workers.encoders))
        encoded = time.perf_counter()
        nbytes = segments.write(found, batch.save_id.step)
        self._parent = batch.save_id
        self._dense.written(batch.save_id)
        batch.release()
        self.bytes_written += nbytes
        batch.figures = Figures(
            nbytes=nbytes,
            dense_bytes=sum(map(dense_bytes, found)),
            encode_secs=encoded - started,
            write_secs=time.perf_counter() - encoded,
        )

    def _sync_where_due(self) -> None:
        with self._changed:
            waits = bool(self._queue)
        unsynced = sum(one.batch.figures.nbytes for one in self._written if one.batch.figures)
        if not waits or unsynced >= _UNSYNCED_BYTES:
            self._sync()

    def _sync(self) -> None:
        if not self._written:
            return
        started = time.perf_counter()
        self._segments.sync()
        # Whoever takes the root after this finds what is on disk now.
        self._check()
        now = time.perf_counter()
        done, self._written = self._written, []
        self._durable_at = self._segments.position
        self._durable, self._failures = done[-1].batch.save_id, 0
        for wanted in done:
            batch = wanted.batch
            self._notify(Durable(batch.save_id, batch.full, batch.unix_ns / 1e9))
            self.reports.append(
                _event(batch, self._process, now - started, now - batch.started, len(done))
            )
        with self._changed:
            self._bytes -= sum(wanted.batch.nbytes for wanted in done)
            self._changed.notify_all()

    def _give_up(self, wanted: Wanted, error: Exception) -> None:
        """Gives up everything that is not durable; the rows are owed."""
        with self._changed:
            # It is not among the written ones where those could not be forced before it.
            lost = [*self._written, *({wanted} - {*self._written}), *self._queue]
            self._queue.clear()
            self._written = []
            self._bytes = 0
            self._lose(lost, error)
            self._failures += 1
            self.losses += 1
            if isinstance(error, FencedError):
                self.fenced = error
        for one in lost:
            one.batch.release()
        self._segments.begin_part(self._durable_at)
        self._dense.restart()

    def _lose(self, lost: Sequence[Wanted], error: Exception) -> None:
        """Notes what no mark holds; under the lock."""
        roots = [one.root for one in lost if one.root is not None]
        if roots:
            self._durable = roots[-1]
        self._parent = self._durable
        self._owed += [one.batch.row_numbers for one in lost]
        steps = tuple(one.batch.save_id.step for one in lost)
        since = lost[0].batch.started
        if (before := self.failure) is not None:
            steps, since = (*before.steps, *steps), before.since
        self.failure = Failure(steps, error, since)


def _event(
    batch: Batch, process: int, sync_secs: float, durable_secs: float, together: int
) -> events.LogEvent:
    figures = batch.figures
    assert figures is not None
    return events.LogEvent(
        step=batch.save_id.step,
        process=process,
        kind="full" if batch.full else "soft",
        rows=batch.row_count,
        bytes_written=figures.nbytes,
        dense_bytes=figures.dense_bytes,
        blocked_secs=batch.blocked_secs,
        encode_secs=figures.encode_secs,
        write_secs=figures.write_secs,
        sync_secs=sync_secs,
        durable_secs=durable_secs,
        batches_in_sync=together,
        committed_unix_secs=time.time(),
    )
