# SPDX-License-Identifier: Apache-2.0
"""What carries the agreement of ``agreement`` between processes, and watches who is behind.

Messages go by the job's coordination service: it stands wherever several processes log, also when
the disk is full. A thread waits for the next proposal; that of process 0 makes them as well. What
is told is told when it changes: a job in which nothing is needed sends nothing.
"""

from __future__ import annotations

import collections
import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from deltackpt.errors import LogBehind, StorageError
from deltackpt.handlers.board import JobBoard
from deltackpt.log.agreement import Leader, Member, Proposal, Settle, Status, Wish, too_long
from deltackpt.log.progress import Progress, Watch

#: How long the thread waits for a proposal, while none is open and while one is.
_IDLE_SECS, _OPEN_SECS = 0.5, 0.02
#: Longest wait of a call for the outcome of a proposal that this process has accepted.
_PATIENCE_SECS = 2.0
#: Growth is told in such shares of what makes a log too long.
_SHARES = 16
_YES, _NO = b"yes", b"no"


class Assembly:
    """One process's side, of one stretch; calls come from the training thread."""

    def __init__(
        self,
        board: JobBoard,
        key: str,
        progress: Progress,
        *,
        calls: int,
        most_bytes: float,
        base_bytes: int,
        deadline_secs: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Nothing is said before ``start``.

        Args:
          board: of the job.
          key: of all that is said about this stretch.
          progress: of the processes.
          calls: how often ``log()`` was called.
          most_bytes: how long the logs of all may grow together, in bases.
          base_bytes: of a base without dense leaves.
          deadline_secs: how far behind a process may be; how long a proposal stands.
          clock: in seconds.
        """
        self._board, self._key = board, key
        self._progress = progress
        self._index, self._count = progress.process, progress.count
        self._most_bytes, self._base_bytes = most_bytes, base_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._member = Member(calls)
        self._leader = Leader(self._count, deadline_secs)
        self._watch = Watch(deadline_secs)
        self._watch_every = deadline_secs / 4
        self._watched_at = clock()
        self._patience_secs = min(_PATIENCE_SECS, deadline_secs)
        self._wish: Wish | None = None
        self._grown = self._dense = 0
        self._told: Status | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        #: Processes that are behind, until it is told.
        self.alarms: collections.deque[LogBehind] = collections.deque(maxlen=8)

    # On the training thread.

    def start(self) -> None:
        """Begins to listen."""
        self._tell()
        self._thread = threading.Thread(target=self._work, name="deltackpt-agree", daemon=True)
        self._thread.start()

    def call(self) -> Wish | None:
        """Counts a call of ``log()``; every process makes the same calls.

        Returns:
          Why all processes save a step at this one; None where they do not.

        Raises:
          StorageError: that cannot be found out.
        """
        with self._lock:
            proposal = self._member.call()
        if proposal is None:
            self._tell()
            return None
        place = self._outcome(proposal)
        outcome = self._board.wait_for(place, self._patience_secs)
        if outcome is None:
            # Process 0, or another one, is behind: whoever writes first decides.
            outcome = self._board.put_first(place, _NO)
        return proposal.wish if outcome == _YES else None

    def wish(self, wish: Wish) -> None:
        """Asks for a step of all processes, unless more was asked for."""
        if self._wish is None or wish.anew:
            self._wish = wish
            self._tell()

    def saved(self) -> None:
        """A step is being saved: nothing is needed any more, unless the log must begin anew."""
        if self._wish is not None and not self._wish.anew:
            self._wish = None
        self._grown = 0
        self._tell()

    def grew(self, nbytes: int, dense_bytes: int) -> None:
        """Says how long the log of this process is.

        Args:
          nbytes: since the last step.
          dense_bytes: of its dense leaves.
        """
        self._dense = dense_bytes
        share = self._most_bytes * (self._base_bytes + dense_bytes) / self._count / _SHARES
        if abs(nbytes - self._grown) >= share:
            self._grown = nbytes

    def close(self) -> None:
        """Listens no more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * _IDLE_SECS)

    def _tell(self) -> None:
        """Has process 0 know what it does not: never how many calls there were alone."""
        with self._lock:
            status = self._member.status(self._wish, self._grown, self._dense)
            if self._told is not None and status == self._told._replace(calls=status.calls):
                return
            # What is not known is not agreed on; it is told at the next call.
            with contextlib.suppress(StorageError):
                self._board.replace(f"{self._key}/status/{self._index}", _packed(status))
                self._told = status

    # In the thread.

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                self.listen()
            except StorageError:
                # The job is at its end, or the service is busy.
                self._closed.wait(_IDLE_SECS)

    def listen(self) -> None:
        """One round: process 0 decides, then all hear what there is to hear.

        Raises:
          StorageError: the board does not answer.
        """
        if self._index == 0:
            self._lead()
            self._look_behind()
        place = f"{self._key}/proposal/{self._member.next_id}"
        wait_secs = _IDLE_SECS if self._leader.proposal is None else _OPEN_SECS
        data = self._board.wait_for(place, wait_secs)
        if data is None:
            return
        with self._lock:
            self._member.hear(_proposal(data))
        self._tell()

    def _lead(self) -> None:
        now, leader = self._clock(), self._leader
        told = self._board.folder(f"{self._key}/status/")
        statuses = {int(process): _status(data) for process, data in told.items()}
        with self._lock:
            statuses[0] = self._member.status(self._wish, self._grown, self._dense)
        long = too_long(statuses, self._most_bytes, self._base_bytes)
        wish = Wish("the log has grown to LogOptions.most_bytes", anew=False) if long else None
        found = leader.look(now, statuses, wish)
        if isinstance(found, Proposal):
            self._board.replace(f"{self._key}/proposal/{found.id}", _packed(found))
        elif isinstance(found, Settle):
            outcome = _YES if found.yes else _NO
            stands = self._board.put_first(self._outcome(found.proposal), outcome)
            answers = [one for one in statuses.values() if one.heard == found.proposal.id]
            refused = not all(one.accepted for one in answers)
            leader.settled(now, yes=stands == _YES, refused=refused)

    def _look_behind(self) -> None:
        now = self._clock()
        if now - self._watched_at < self._watch_every:
            return
        self._watched_at = now
        late = self._watch.look(now, self._progress.of_each())
        if late:
            self.alarms.append(self._watch.error(late))

    def _outcome(self, proposal: Proposal) -> str:
        return f"{self._key}/outcome/{proposal.id}"


def _packed(value: Proposal | Status) -> bytes:
    return json.dumps(value).encode()


def _wish(plain: Any) -> Wish | None:
    return None if plain is None else Wish(*plain)


def _proposal(data: bytes) -> Proposal:
    number, call, wish = json.loads(data)
    return Proposal(number, call, Wish(*wish))


def _status(data: bytes) -> Status:
    found = Status(*json.loads(data))
    return found._replace(wish=_wish(found.wish))
