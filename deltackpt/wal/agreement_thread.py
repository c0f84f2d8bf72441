# SPDX-License-Identifier: Apache-2.0
"""Transports the messages of ``agreement`` between processes, and watches for processes that lag.

They use the job's coordination service, which works while the disk is full. Statuses are sent when
they change, so an idle agreement sends nothing.
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
from deltackpt.wal.agreement import (
    AgreedOutcome,
    Leader,
    Member,
    ProcessStatus,
    Proposal,
    SaveRequest,
    too_long,
)
from deltackpt.wal.progress import LagWatch, WalProgress

#: How long the thread waits for a proposal, while none is open and while one is.
_IDLE_SECS, _OPEN_SECS = 0.5, 0.02
#: Longest wait of a call for the outcome of a proposal that this process has accepted.
_PATIENCE_SECS = 2.0
#: Growth is reported in this many parts of the limit.
_SHARES = 16
_YES, _NO = b"yes", b"no"


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
        place = self._outcome(proposal)
        outcome = self._coordinator.wait_for(place, self._patience_secs)
        if outcome is None:
            # Process 0, or another one, lags: the first write decides.
            outcome = self._coordinator.put_first(place, _NO)
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
        place = f"{self._key}/proposal/{self._member.next_id}"
        wait_secs = _IDLE_SECS if self._leader.proposal is None else _OPEN_SECS
        data = self._coordinator.wait_for(place, wait_secs)
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
        long = too_long(statuses, self._max_wal_ratio, self._base_bytes)
        request = (
            SaveRequest("the WAL has grown to WalOptions.max_wal_ratio", restarts_wal=False)
            if long
            else None
        )
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


def _request(plain: SaveRequest | None) -> SaveRequest | None:
    return None if plain is None else SaveRequest(*plain)


def _proposal(data: bytes) -> Proposal:
    number, call, request = json.loads(data)
    return Proposal(number, call, SaveRequest(*request))


def _status(data: bytes) -> ProcessStatus:
    found = ProcessStatus(*json.loads(data))
    return found._replace(request=_request(found.request))
