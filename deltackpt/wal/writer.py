# SPDX-License-Identifier: Apache-2.0
"""The thread that makes batches durable: encoded, written, and fsynced many at a time.

While one ``fdatasync`` runs, other batches queue up, and the next one covers all of them: group
commit. A record is durable once a ``fdatasync`` after it has returned and this trainer still held
the lease; any later lease holder then finds it.

A failed batch is abandoned with everything queued behind it. Their rows are *pending*: the next
batch contains their current values and goes to a new part of the WAL, after the last durable
record.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from deltackpt import events
from deltackpt.errors import AppendFailed, StorageError, WaitTimeout
from deltackpt.format.manifest import SaveId
from deltackpt.resources.runtime import Runtime, no_thread
from deltackpt.storage.shard_writer import SegmentSink
from deltackpt.wal.named_rows import NamedRows
from deltackpt.wal.record_batch import Batch, DenseRecords, write_record
from deltackpt.wal.segment_files import FilledRecord, RecordWriter

#: Bytes after which to fsync although more batches wait, so that the page cache drains steadily.
_UNSYNCED_BYTES = 64 << 20
#: Limit of events that were not reported yet.
_REPORTS = 10_000


class WalFailure(NamedTuple):
    """Records that could not be made durable."""

    steps: tuple[int, ...]  # Theirs.
    cause: Exception
    since: float  # When the first was captured, of ``time.perf_counter()``.

    def error(self) -> AppendFailed:
        """Returns the error to raise from ``cause``."""
        first, last = self.steps[0], self.steps[-1]
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        return AppendFailed(
            f"append of {which}: {self.cause}; these steps cannot be restored, but no touched row "
            "is lost: the next append() or save() contains them"
        )


class WalWriter:
    """Writes the batches of one process in the background, in order; see the module."""

    def __init__(
        self,
        segments: RecordWriter,
        *,
        check: Callable[[], None],  # Raises if another trainer took over; run after ``fdatasync``.
        process: int,
        dense: DenseRecords,
        segment_bytes: int,  # Size at which a file ends.
        deadline_secs: float,  # How long ``close`` waits.
        runtime: Runtime,  # Its memory is reserved for batches until they are durable.
        notify: Callable[[Sequence[Batch]], None],  # Of the records that one fsync made durable.
    ):
        self._segments, self._check, self._process, self._dense = segments, check, process, dense
        self._segment_bytes, self._deadline_secs = segment_bytes, deadline_secs
        self._runtime, self._memory, self._notify = runtime, runtime.memory, notify
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: collections.deque[Batch] = collections.deque()
        self._written: list[Batch] = []
        self._writing: Batch | None = None
        self._parent: SaveId | None = None
        self._durable_at = segments.position
        #: The newest durable record, which a batch continues after a failure.
        self._durable: SaveId | None = None
        self._pending = NamedRows()
        self._roll = False
        self._busy = self._closed = self._is_abandoned = False
        self._thread: threading.Thread | None = None
        #: The error that ended the thread.
        self._died: Exception | None = None
        self.failure: WalFailure | None = None
        self.reports: collections.deque[events.AppendEvent] = collections.deque(maxlen=_REPORTS)
        #: Bytes that were written in all.
        self.bytes_written = 0
        #: Bytes of dense leaves of the newest full record.
        self.dense_bytes = 0
        #: Batches in a row that failed.
        self._failures = 0
        #: How often batches were given up.
        self.losses = 0

    # On the training thread.

    def submit(self, batch: Batch, losses: int) -> None:
        """Queues a batch; ``losses`` is the count before any of its rows were determined."""
        with self._lock:
            self.require_thread()
            if batch.dense is not None:
                self.dense_bytes = batch.dense.nbytes
            if losses != self.losses:
                # It lacks the rows of a record that has since been given up.
                assert self.failure is not None
                batch.queued = True
                self._lose([batch], self.failure.cause)
                self._drop([batch])
                return
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="deltackpt-wal", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise no_thread(
                        "append: expected to start the thread that writes records",
                        error,
                        "No touched row is lost: the next append() contains them",
                    ) from error
                self._thread = thread
            self._changed.notify_all()
            # Python runs no signal handler before ``_queue.append`` returns: all happens, or none.
            # Batches from before ``roll`` may still be queued: they belong to the old file.
            batch.begins_file, self._roll = self._roll, False
            batch.queued = self._busy = True
            self._queue.append(batch)

    def drain_pending(self) -> dict[str, np.ndarray]:
        """Returns and clears table name to rows, ascending, that no durable record contains."""
        with self._lock:
            return self._pending.drain()

    def requeue(self, rows: Mapping[str, np.ndarray]) -> None:
        """Adds rows to the next batch."""
        with self._lock:
            self._pending.add(rows)

    def pop_failure(self) -> WalFailure | None:
        """Returns the failure since the last call, or None."""
        with self._lock:
            failure, self.failure = self.failure, None
        return failure

    def has_failed(self, times: int) -> bool:
        """Returns whether this many batches in a row have failed; a later failure counts again."""
        with self._lock:
            if self._failures < times:
                return False
            self._failures = times - 1
        return True

    def roll(self) -> None:
        """Makes the next submitted batch start a new file."""
        with self._lock:
            self._roll = True

    def wait(self, timeout_secs: float) -> None:
        """Waits until every batch is durable, or has failed."""
        with self._lock:
            self.require_thread()
            if not self._changed.wait_for(lambda: not self._busy, timeout_secs):
                raise WaitTimeout(
                    f"append: expected all records to be durable within {timeout_secs:g} s, found "
                    f"{self._memory.reserved_bytes:,} bytes that are not; check the disk, then "
                    "wait again"
                )
            if self.failure is None:  # Else the caller raises that.
                self.require_thread()

    def close(self) -> None:
        """Stops the thread once all is written, or after ``deadline_secs``; submit nothing later.

        Records that are not durable by then are abandoned with a warning: their rows are pending.
        """
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            return
        thread.join(self._deadline_secs)
        with self._lock:
            # An idle thread only has to exit; nothing can be lost.
            if not self._busy or self._is_abandoned:
                return
            self._is_abandoned = True
            error = WaitTimeout(
                f"append: expected its thread to end within {self._deadline_secs:g} s "
                f"(WalOptions.deadline_secs), found {self._memory.reserved_bytes:,} bytes that are "
                "not durable yet and are given up; check the disk"
            )
            self._lose(self._undurable(), error)
            self._drop(self._queue)
            self._queue.clear()
            self._busy = False
        events.warn(str(error))

    def require_thread(self) -> None:
        """Raises ``StorageError`` if an unexpected error has ended the thread."""
        if self._died is not None:
            raise StorageError(
                "append: expected the thread that writes records to run, found that it has ended "
                f"with {type(self._died).__name__}: {self._died}; save a step, and open the "
                "manager again to append"
            ) from self._died

    # In the thread.

    def _work(self) -> None:
        with self._lock:
            # An interrupt of its start leaves it unknown: the next ``submit`` starts another.
            if self._thread is not threading.current_thread():
                return
        try:
            self._write_all()
        except Exception as error:
            # Not even the failure of a record could be handled: what is in the files is unknown.
            with self._lock:
                self._died, self._busy = error, False
                lost = self._undurable()
                self._queue.clear()
                self._written.clear()
                self._changed.notify_all()
            self._drop(lost)

    def _write_all(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    break
                self._writing = batch = self._queue.popleft()
            try:
                self._write(batch)
                self._sync_where_due()
            except Exception as error:
                self._fail_pending(error)
            finally:
                with self._lock:
                    self._writing = None
            with self._lock:
                # Not if this thread is about to die: a waiting thread must find its error.
                self._busy = bool(self._queue or self._written)
                self._changed.notify_all()
            del batch
        self._segments.close()

    def _write(self, batch: Batch) -> None:
        segments = self._segments
        if batch.begins_file or segments.segment_bytes >= self._segment_bytes:
            self._sync()
            segments.roll()
            self._dense.restart()
        self._written.append(batch)
        started = time.perf_counter()
        batch.rows.land()
        parent = batch.parent or self._parent
        assert parent is not None
        dense_bytes, encoded = 0, started

        def fill(sink_of: Callable[[str], SegmentSink]) -> FilledRecord:
            nonlocal dense_bytes, encoded
            record, dense_bytes = write_record(batch, self._dense, sink_of, self._runtime)
            encoded = time.perf_counter()
            return record

        nbytes = segments.write(batch.save_id, parent, fill)
        self._parent = batch.save_id
        self._dense.written(batch.save_id)
        batch.release()
        self.bytes_written += nbytes
        batch.event = events.AppendEvent(
            step=batch.save_id.step,
            process=self._process,
            kind="full" if batch.full else "soft",
            rows=batch.row_count,
            bytes_written=nbytes,
            dense_bytes=dense_bytes,
            blocked_secs=batch.blocked_secs,
            encode_secs=encoded - started,
            write_secs=time.perf_counter() - encoded,
        )

    def _sync_where_due(self) -> None:
        with self._lock:
            waits = bool(self._queue)
        unsynced = sum(one.event.bytes_written for one in self._written if one.event)
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
        self._durable, self._failures = done[-1].save_id, 0
        self._notify(done)
        for batch in done:
            assert batch.event is not None
            self.reports.append(
                dataclasses.replace(
                    batch.event,
                    sync_secs=now - started,
                    durable_secs=now - batch.started,
                    batches_in_sync=len(done),
                    committed_unix_secs=time.time(),
                )
            )
        self._drop(done)

    def _fail_pending(self, error: Exception) -> None:
        """Gives up everything that is not durable; the rows are pending."""
        with self._lock:
            lost = self._undurable()
            self._queue.clear()
            self._written = []
            if not self._is_abandoned:
                self._lose(lost, error)
            self._failures += 1
            self.losses += 1
        self._drop(lost)
        self._segments.start_part(self._durable_at)
        self._dense.restart()

    def _drop(self, ended: Iterable[Batch]) -> None:
        """Releases all memory of batches that are durable, or never will be."""
        for one in ended:
            one.release()
            one.reservation.release()

    def _undurable(self) -> list[Batch]:
        # The batch that is being written is not among the written ones while those are fsynced.
        now = () if self._writing is None or self._writing in self._written else (self._writing,)
        return [*self._written, *now, *self._queue]

    def _lose(self, lost: Sequence[Batch], error: Exception) -> None:
        """Records what no record contains; under the lock."""
        if not lost:
            return
        parents = [one.parent for one in lost if one.parent is not None]
        if parents:
            self._durable = parents[-1]
        self._parent = self._durable
        for one in lost:
            self._pending.add(one.row_indices)
        steps = tuple(one.save_id.step for one in lost)
        since = lost[0].started
        if (before := self.failure) is not None:
            steps, since = (*before.steps, *steps), before.since
        self.failure = WalFailure(steps, error, since)
