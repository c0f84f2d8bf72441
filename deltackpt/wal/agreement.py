# SPDX-License-Identifier: Apache-2.0
"""Two-phase agreement on the ``append()`` call at which every process saves a step.

If one process needs a save, all must make it, at the same call. But a call must not wait for
another process unless it may be that call. Process 0 *proposes* a call that no process has reached,
as far as it knows. Each process accepts in the background if its own count is lower, so it knows in
advance that it must look up the outcome at that call. The outcome is written once: yes, by process
0 after all have accepted; no, by any process whose wait timed out. A process therefore saves only
if all processes that reach the call save, and no process waits long for one that lags or is dead.

Pure: ``save_requests`` transports the messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

#: A proposal is so many calls ahead at first, and at most; twice as many after each refusal.
_LEAST_AHEAD, _MOST_AHEAD = 2, 1 << 16
#: Pause after a proposal that timed out; doubles each time.
_PAUSE_SECS = 1.0


class SaveRequest(NamedTuple):
    """A process's request that all processes save a step."""

    reason: str
    restarts_wal: bool  # The WAL restarts with the step: earlier records are invalid.


class Proposal(NamedTuple):
    """A call at which all processes should save."""

    id: int  # From 1.
    number: int  # Of the ``append()`` call.
    request: SaveRequest


class ProcessStatus(NamedTuple):
    """What a process sends to process 0."""

    calls: int = 0  # Calls of ``append()`` by then.
    last_proposal: int = 0  # Id of the last one received; 0 before the first.
    accepted: bool = False
    passed: int = 0  # Id of the last proposal whose call it has passed.
    request: SaveRequest | None = None
    grown: int = 0  # Bytes appended since the last step.
    dense: int = 0  # Bytes of its dense leaves.


class Member:
    """One process's part in the agreement."""

    def __init__(self, calls: int = 0) -> None:
        self._calls = calls
        self._last_proposal: Proposal | None = None
        self._accepted = False

    def call(self) -> Proposal | None:
        """Counts a call of ``append()``; returns a proposal whose outcome must be known first."""
        self._calls += 1
        last_proposal = self._last_proposal
        if last_proposal is not None and self._accepted and last_proposal.number == self._calls:
            return last_proposal
        return None

    def receive(self, proposal: Proposal) -> None:
        """Accepts or refuses a proposal; one that was received before changes nothing."""
        if self._last_proposal is None or proposal.id > self._last_proposal.id:
            self._last_proposal = proposal
            self._accepted = self._calls < proposal.number

    @property
    def next_id(self) -> int:
        """Returns the id of the next proposal."""
        return 1 if self._last_proposal is None else self._last_proposal.id + 1

    def status(self, request: SaveRequest | None, grown: int = 0, dense: int = 0) -> ProcessStatus:
        """Returns the status for process 0."""
        last_proposal = self._last_proposal
        if last_proposal is None:
            return ProcessStatus(self._calls, request=request, grown=grown, dense=dense)
        passed = last_proposal.id if self._calls > last_proposal.number else last_proposal.id - 1
        return ProcessStatus(
            self._calls, last_proposal.id, self._accepted, passed, request, grown, dense
        )


class AgreedOutcome(NamedTuple):
    """The outcome that process 0 writes, unless one was written."""

    proposal: Proposal
    is_agreed: bool


class Leader:
    """The decisions of process 0; a proposal stays open for at most ``deadline_secs``."""

    def __init__(self, count: int, deadline_secs: float):
        self._count = count
        self._deadline_secs = deadline_secs
        self._ahead = _LEAST_AHEAD
        self._id = 0
        self.proposal: Proposal | None = None
        self._since = 0.0
        self._agreed = 0
        self._pause_secs = _PAUSE_SECS
        self._not_before = 0.0

    def next_action(
        self, now: float, statuses: Mapping[int, ProcessStatus], request: SaveRequest | None
    ) -> Proposal | AgreedOutcome | None:
        """Returns a proposal to send, an outcome to write for ``record_outcome``, or None."""
        if (proposal := self.proposal) is not None:
            replies = [one for one in statuses.values() if one.last_proposal == proposal.id]
            accepted = [one.accepted for one in replies]
            if not all(accepted):
                self._ahead = min(2 * self._ahead, _MOST_AHEAD)
                return AgreedOutcome(proposal, False)
            if len(accepted) == self._count:
                return AgreedOutcome(proposal, True)
            late = now - self._since >= self._deadline_secs
            # A process that passed the call has settled it itself.
            late = late or any(one.calls > proposal.number for one in statuses.values())
            return AgreedOutcome(proposal, False) if late else None
        if len(statuses) < self._count or now < self._not_before:
            return None
        if any(one.passed < self._agreed for one in statuses.values()):
            return None  # Their statuses are older than the agreed step.
        requests = [one.request for one in statuses.values() if one.request is not None]
        requests += [request] if request is not None else []
        if not requests:
            return None
        chosen = max(requests, key=lambda one: one.restarts_wal)
        self._id += 1
        calls = max(one.calls for one in statuses.values())
        self.proposal = Proposal(self._id, calls + self._ahead, chosen)
        self._since = now
        return self.proposal

    def record_outcome(self, now: float, *, is_agreed: bool, refused: bool) -> None:
        """Records an outcome; if ``refused``, the next proposal may follow at once."""
        assert self.proposal is not None
        if is_agreed:
            self._agreed, self._pause_secs = self.proposal.id, _PAUSE_SECS
        elif not refused:
            self._not_before = now + self._pause_secs
            self._pause_secs = min(2 * self._pause_secs, max(self._deadline_secs, _PAUSE_SECS))
        self.proposal = None


def too_long(statuses: Mapping[int, ProcessStatus], max_wal_ratio: float, base_bytes: int) -> bool:
    """Returns whether all WALs exceed the ratio to a base; ``base_bytes`` lacks dense leaves."""
    dense = sum(one.dense for one in statuses.values())
    return sum(one.grown for one in statuses.values()) > max_wal_ratio * (base_bytes + dense)
