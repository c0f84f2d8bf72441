# SPDX-License-Identifier: Apache-2.0
"""How the processes of a job agree on a call of ``log()`` at which all save a step.

What one process needs, all must do, and at the same call; but no call waits for another process
unless it may be that one. Process 0 *proposes* a call that none has come to, as far as it knows.
Each process accepts in the background, as long as its own count is below, and so knows before it
comes there that it must ask for the outcome. The outcome is a value that is written once: yes, by
process 0 when all have accepted; no, by whoever has waited long enough. So nobody saves unless all
that come to the call do, and nobody waits for long where a process is behind, or dead.

Pure: ``assembly`` carries the messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

#: A proposal is so many calls ahead at first, and at most; twice as many after each refusal.
_LEAST_AHEAD, _MOST_AHEAD = 2, 1 << 16
#: After a proposal that nobody refused and not all accepted: twice as long after each.
_PAUSE_SECS = 1.0


class Wish(NamedTuple):
    """What a process needs of all.

    Attributes:
      reason: why a step must be saved.
      anew: whether the log begins anew with it: no mark before counts any more.
    """

    reason: str
    anew: bool


class Proposal(NamedTuple):
    """A call at which all are to save.

    Attributes:
      id: from 1 on.
      number: of the call.
      wish: what for.
    """

    id: int
    number: int
    wish: Wish


class Status(NamedTuple):
    """What process 0 knows of a process.

    Attributes:
      calls: how often it had called ``log()`` when it said so.
      heard: id of the last proposal that it has heard, 0 before the first.
      accepted: whether it has accepted that.
      passed: id of the last proposal whose call it has left behind.
      wish: what it needs.
      grown: bytes that it has logged since the last step.
      dense: bytes of its dense leaves.
    """

    calls: int = 0
    heard: int = 0
    accepted: bool = False
    passed: int = 0
    wish: Wish | None = None
    grown: int = 0
    dense: int = 0


class Member:
    """One process's part."""

    def __init__(self, calls: int = 0) -> None:
        """Has heard nothing.

        Args:
          calls: how often ``log()`` was called.
        """
        self._calls = calls
        self._heard: Proposal | None = None
        self._accepted = False

    def call(self) -> Proposal | None:
        """Counts a call of ``log()``.

        Returns:
          A proposal whose outcome must be known before anything else.
        """
        self._calls += 1
        heard = self._heard
        if heard is not None and self._accepted and heard.number == self._calls:
            return heard
        return None

    def hear(self, proposal: Proposal) -> None:
        """Accepts a proposal, or refuses it; one that was heard before changes nothing."""
        if self._heard is None or proposal.id > self._heard.id:
            self._heard = proposal
            self._accepted = self._calls < proposal.number

    @property
    def next_id(self) -> int:
        """Of the next proposal."""
        return 1 if self._heard is None else self._heard.id + 1

    def status(self, wish: Wish | None, grown: int = 0, dense: int = 0) -> Status:
        """What process 0 is to know."""
        heard = self._heard
        if heard is None:
            return Status(self._calls, wish=wish, grown=grown, dense=dense)
        passed = heard.id if self._calls > heard.number else heard.id - 1
        return Status(self._calls, heard.id, self._accepted, passed, wish, grown, dense)


class Settle(NamedTuple):
    """The outcome that process 0 writes, unless one was written."""

    proposal: Proposal
    yes: bool


class Leader:
    """What process 0 decides."""

    def __init__(self, count: int, deadline_secs: float):
        """Nothing is proposed.

        Args:
          count: how many processes there are.
          deadline_secs: how long a proposal stands that is neither accepted by all nor refused.
        """
        self._count = count
        self._deadline_secs = deadline_secs
        self._ahead = _LEAST_AHEAD
        self._id = 0
        self._open: Proposal | None = None
        self._since = 0.0
        self._agreed = 0
        self._pause_secs = _PAUSE_SECS
        self._not_before = 0.0

    @property
    def proposal(self) -> Proposal | None:
        """What is proposed and not settled."""
        return self._open

    def look(
        self, now: float, statuses: Mapping[int, Status], wish: Wish | None
    ) -> Proposal | Settle | None:
        """What is to be done next.

        Args:
          now: in seconds.
          statuses: of the processes, as far as they are known.
          wish: what all together need.

        Returns:
          A proposal that is to be told to all; the outcome of the one before, for ``settled``; or
          None.
        """
        if (proposal := self._open) is not None:
            answers = [one for one in statuses.values() if one.heard == proposal.id]
            accepted = [one.accepted for one in answers]
            if not all(accepted):
                self._ahead = min(2 * self._ahead, _MOST_AHEAD)
                return Settle(proposal, False)
            if len(accepted) == self._count:
                return Settle(proposal, True)
            late = now - self._since >= self._deadline_secs
            # Where one has left the call behind, it has settled that itself.
            late = late or any(one.calls > proposal.number for one in statuses.values())
            return Settle(proposal, False) if late else None
        if len(statuses) < self._count or now < self._not_before:
            return None
        if any(one.passed < self._agreed for one in statuses.values()):
            return None  # What they say is from before the step that was agreed on.
        wishes = [one.wish for one in statuses.values() if one.wish is not None]
        wishes += [wish] if wish is not None else []
        if not wishes:
            return None
        chosen = max(wishes, key=lambda one: one.anew)
        self._id += 1
        calls = max(one.calls for one in statuses.values())
        self._open = Proposal(self._id, calls + self._ahead, chosen)
        self._since = now
        return self._open

    def settled(self, now: float, *, yes: bool, refused: bool) -> None:
        """Notes the outcome of the open proposal.

        Args:
          now: in seconds.
          yes: whether all save.
          refused: whether a process had come too far: the next proposal may come at once.
        """
        assert self._open is not None
        if yes:
            self._agreed, self._pause_secs = self._open.id, _PAUSE_SECS
        elif not refused:
            self._not_before = now + self._pause_secs
            self._pause_secs = min(2 * self._pause_secs, max(self._deadline_secs, _PAUSE_SECS))
        self._open = None


def too_long(statuses: Mapping[int, Status], most_bytes: float, base_bytes: int) -> bool:
    """Whether all processes together have logged more than a restore is to read.

    Args:
      statuses: of the processes.
      most_bytes: in bases.
      base_bytes: of all tables and slots; dense leaves come on top.
    """
    dense = sum(one.dense for one in statuses.values())
    return sum(one.grown for one in statuses.values()) > most_bytes * (base_bytes + dense)
