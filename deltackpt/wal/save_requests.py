# SPDX-License-Identifier: Apache-2.0
"""Decides when ``append()`` saves a step although a record could be written.

A single process saves when it needs to. With several, a process sends a request to the others,
continues as well as it can, and saves at the call that all have agreed on; see ``agreement``. The
messages use the job's coordination service, which works while the disk is full. Statuses are sent
when they change, so an idle agreement sends nothing.
"""

from __future__ import annotations

import collections
import contextlib
import json
import threading
import time
from collections.abc import Callable

from deltackpt.coordination import Coordinator
from deltackpt.errors import StorageError, WalBehind
from deltackpt.format.manifest import Layout
from deltackpt.save.pending_save import base_bytes
from deltackpt.session.run import Run
from deltackpt.wal.agreement import (
    AgreedOutcome,
    Leader,
    Member,
    ProcessStatus,
    Proposal,
    SaveRequest,
    too_long,
)
from deltackpt.wal.epoch import LagWatch, OpenEpoch, WalProgress
from deltackpt.wal.writer import WalFailure, WalWriter

#: A WAL as long as some such bases is replayed before a save is requested.
_LEAST_BASE_BYTES = 16 << 20
#: Failures in a row after which a step is saved.
_FAILURES = 2
#: How long the thread waits for a proposal, while none is open and while one is.
_IDLE_SECS, _OPEN_SECS = 0.5, 0.02
#: Longest wait of a call for the outcome of a proposal that this process has accepted.
_PATIENCE_SECS = 2.0
#: Growth is reported in this many parts of the limit.
_SHARES = 16
_YES, _NO = b"yes", b"no"
_GROWN = "the WAL has grown to WalOptions.max_wal_ratio"


class AgreementThread:
    """One process's side of the agreement in one WAL epoch; called from the training thread."""

    def __init__(
        self,
        coordinator: Coordinator,
        key: str,  # Prefix of all keys of this epoch.
        progress: WalProgress,
        *,
        calls: int,
        max_wal_ratio: float,
        base_bytes: int,  # Of a base without dense leaves.
        deadline_secs: float,  # How far a process may lag; how long a proposal stays open.
        clock: Callable[[], float] = time.monotonic,
    ):
        self._coordinator, self._key = coordinator, key
        self._progress = progress
        self._index, self._count = progress.process, progress.count
        self._max_wal_ratio, self._base_bytes = max_wal_ratio, base_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._member = Member(calls)
        self._leader = Leader(self._count, deadline_secs)
        self._watch = LagWatch(deadline_secs)
        self._watch_every = deadline_secs / 4
        self._watched_at = clock()
        self._patience_secs = min(_PATIENCE_SECS, deadline_secs)
        self._request: SaveRequest | None = None
        self._grown = self._dense = 0
        self._sent_status: ProcessStatus | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        #: The error that ended a round of the thread, until it is reported.
        self._failure: Exception | None = None
        #: Lagging processes that were not reported yet.
        self.alarms: collections.deque[WalBehind] = collections.deque(maxlen=8)

    # On the training thread.

    def start(self) -> None:
        """Starts the thread, which sends the first messages."""
        self._send_status()
        self._thread = threading.Thread(target=self._work, name="deltackpt-agree", daemon=True)
        self._thread.start()

    def call(self) -> SaveRequest | None:
        """Counts a call of ``append()``; returns why all processes save a step at it, or None."""
        with self._lock:
            proposal = self._member.call()
        if proposal is None:
            self._send_status()
            return None
        key = self._outcome(proposal)
        outcome = self._coordinator.wait_for(key, self._patience_secs)
        if outcome is None:
            # Process 0, or another one, lags: the first write decides.
            outcome = self._coordinator.put_first(key, _NO)
        return proposal.request if outcome == _YES else None

    def pop_failure(self) -> Exception | None:
        """Returns an unexpected error of the thread once; the thread continues."""
        failure, self._failure = self._failure, None
        return failure

    def request_save(self, request: SaveRequest) -> None:
        """Requests a step of all processes, unless more was requested."""
        if self._request is None or request.restarts_wal:
            self._request = request
            self._send_status()

    def saved(self) -> None:
        """Clears the request, because a step is being saved, unless the WAL must restart."""
        if self._request is not None and not self._request.restarts_wal:
            self._request = None
        self._grown = 0
        self._send_status()

    def grew(self, nbytes: int, dense_bytes: int) -> None:
        """Reports the bytes of this process's WAL since the last step, and of its dense leaves."""
        self._dense = dense_bytes
        share = self._max_wal_ratio * (self._base_bytes + dense_bytes) / self._count / _SHARES
        if abs(nbytes - self._grown) >= share:
            self._grown = nbytes

    def close(self) -> None:
        """Stops the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * _IDLE_SECS)

    def _send_status(self) -> None:
        """Sends process 0 what has changed, except for the number of calls alone."""
        with self._lock:
            status = self._member.status(self._request, self._grown, self._dense)
            if self._sent_status is not None and status == self._sent_status._replace(
                calls=status.calls
            ):
                return
            # Without the status, processes cannot agree; the next call sends it again.
            with contextlib.suppress(StorageError):
                self._coordinator.replace(f"{self._key}/status/{self._index}", _packed(status))
                self._sent_status = status

    # In the thread.

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                self.run_round()
            except Exception as error:
                # The job ends, or the service is busy; otherwise the next ``append()`` raises it.
                if not isinstance(error, StorageError):
                    self._failure = error
                self._closed.wait(_IDLE_SECS)

    def run_round(self) -> None:
        """Runs one round: process 0 decides, then all receive."""
        if self._index == 0:
            self._lead()
            self._check_lag()
        key = f"{self._key}/proposal/{self._member.next_id}"
        wait_secs = _IDLE_SECS if self._leader.proposal is None else _OPEN_SECS
        data = self._coordinator.wait_for(key, wait_secs)
        if data is None:
            return
        with self._lock:
            self._member.receive(_proposal(data))
        self._send_status()

    def _lead(self) -> None:
        now, leader = self._clock(), self._leader
        received = self._coordinator.folder(f"{self._key}/status/")
        statuses = {int(process): _status(data) for process, data in received.items()}
        with self._lock:
            statuses[0] = self._member.status(self._request, self._grown, self._dense)
        is_long = too_long(statuses, self._max_wal_ratio, self._base_bytes)
        request = SaveRequest(_GROWN, restarts_wal=False) if is_long else None
        found = leader.next_action(now, statuses, request)
        if isinstance(found, Proposal):
            self._coordinator.replace(f"{self._key}/proposal/{found.id}", _packed(found))
        elif isinstance(found, AgreedOutcome):
            outcome = _YES if found.is_agreed else _NO
            stored = self._coordinator.put_first(self._outcome(found.proposal), outcome)
            replies = [one for one in statuses.values() if one.last_proposal == found.proposal.id]
            refused = not all(one.accepted for one in replies)
            leader.record_outcome(now, is_agreed=stored == _YES, refused=refused)

    def _check_lag(self) -> None:
        now = self._clock()
        if now - self._watched_at < self._watch_every:
            return
        self._watched_at = now
        lagging = self._watch.poll(now, self._progress.of_each())
        if lagging:
            self.alarms.append(self._watch.error(lagging))

    def _outcome(self, proposal: Proposal) -> str:
        return f"{self._key}/outcome/{proposal.id}"


def _packed(value: Proposal | ProcessStatus) -> bytes:
    return json.dumps(value).encode()


def _proposal(data: bytes) -> Proposal:
    number, call, request = json.loads(data)
    return Proposal(number, call, SaveRequest(*request))


def _status(data: bytes) -> ProcessStatus:
    found = ProcessStatus(*json.loads(data))
    return found._replace(request=found.request and SaveRequest(*found.request))


class SaveRequests:
    """Decides when ``append()`` saves a step, and requests it; used by the training thread."""

    def __init__(self, run: Run):
        assert run.options.wal is not None
        self._run, self._options = run, run.options.wal
        #: Only with several processes; it outlives the writer of its epoch.
        self._agreement: AgreementThread | None = None
        #: The tables for which this process can append only after a save of all, and why.
        self._refused: tuple[Layout, str] | None = None
        self._bytes_at_step = 0
        #: Why all processes save at this call.
        self.agreed: SaveRequest | None = None

    def call(self) -> None:
        """Counts a call of ``append()``, and sets ``agreed`` for it."""
        self.agreed = None if self._agreement is None else self._agreement.call()

    def begin_epoch(self, epoch: OpenEpoch, layout: Layout, calls: int) -> None:
        """Begins a WAL epoch; all processes make this call together."""
        self._bytes_at_step = 0
        if self._run.coordinator.count == 1:
            return
        self._agreement = AgreementThread(
            self._run.coordinator,
            f"deltackpt/wal/{epoch.head.run}/{epoch.head.epoch}",
            epoch.progress,
            calls=calls,
            max_wal_ratio=self._options.max_wal_ratio,
            base_bytes=_base_bytes(layout),
            deadline_secs=self._options.deadline_secs,
        )
        self._agreement.start()

    def end(self) -> None:
        """Ends the epoch and cancels requests."""
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None

    def forget(self) -> None:
        """Begins another run."""
        self.end()
        self._refused = None

    def request_save(self, reason: str, *, restarts_wal: bool = False) -> None:
        """Requests that all processes save a step."""
        if self._agreement is not None:
            self._agreement.request_save(SaveRequest(reason, restarts_wal))

    def saved(self, writer: WalWriter | None) -> None:
        """Called when a save has started, which contains everything appended."""
        self._refused = None
        if writer is not None:
            self._bytes_at_step = writer.bytes_written
        if self._agreement is not None:
            self._agreement.saved()

    def refused(self, layout: Layout, reason: str) -> None:
        """Called when only this process can append nothing before the next save of all."""
        self._refused = layout, reason

    def waits_for_others(self, layout: Layout) -> bool:
        """Returns whether only this process needs a save of all, and requests it."""
        if self._refused is None or self._refused[0] != layout:
            return False
        self.request_save(self._refused[1])
        return True

    def reason_to_save(
        self,
        writer: WalWriter | None,
        layout: Layout,
        failure: WalFailure | None,  # Since the last call.
        reason: str | None,  # Why records cannot be replayed onto a step, if they cannot.
    ) -> str | None:
        """Returns why a single process saves now; None with several, which must agree first."""
        if reason is None and writer is not None:
            if self._options.on_failure == "save" and writer.has_failed(_FAILURES):
                reason = "the WAL has failed again"
                if failure is not None:
                    reason = f"{reason}: {failure.cause}"
            elif self._is_long(writer, layout):
                reason = _GROWN
        if reason is not None and self._run.coordinator.count > 1:
            self.request_save(reason)
            return None
        return reason

    def pop_failure(self) -> Exception | None:
        """Returns an error of the background agreement since the last call."""
        return None if self._agreement is None else self._agreement.pop_failure()

    def alarms(self) -> list[WalBehind]:
        """Returns the processes found to lag since the last call."""
        found = []
        while self._agreement is not None and self._agreement.alarms:
            found.append(self._agreement.alarms.popleft())
        return found

    def _is_long(self, writer: WalWriter, layout: Layout) -> bool:
        """Returns whether a single process has appended enough; with several, process 0 decides."""
        grown = writer.bytes_written - self._bytes_at_step
        if self._agreement is not None:
            self._agreement.grew(grown, writer.dense_bytes)
            return False
        return grown > self._options.max_wal_ratio * (_base_bytes(layout) + writer.dense_bytes)


def _base_bytes(layout: Layout) -> int:
    """Returns the bytes of a base without dense leaves, at least what replays within moments."""
    return max(base_bytes(layout.groups), _LEAST_BASE_BYTES)
