# SPDX-License-Identifier: Apache-2.0
"""Decides when ``append()`` saves a step although a record could be written.

A record needs no agreement: each process appends to its own segments, and readers count a
recovery point only if those of all processes have its number. A step needs one: all processes must
save it at the same call, whichever of them needs it, and no call may wait for another process.

With several processes, a key in JAX's coordination service therefore decides every fourth call. The
first process that reaches the decision stores the answer: a save if any stored status requests one.
All others read it. Each process does this in the background, one call ahead, and stores its own
status (request and WAL size) if it has changed. So no process waits for one that is slow or lost,
and a slow one reads the same answers later. A save meets all requests made before it.

Process 0 deletes the answers that every process has passed according to its status. Each process
therefore also stores an unchanged status from time to time. If a process is lost, the save that the
others make fails and names it. The keys of an epoch are deleted when the next one begins, those of
the last epoch when the job opens another manager.
"""

from __future__ import annotations

import concurrent.futures
import json
import threading
from typing import NamedTuple

from deltackpt.coordination import Coordinator
from deltackpt.errors import ProcessMissing
from deltackpt.format.manifest import Layout
from deltackpt.resources.runtime import Runtime, Task
from deltackpt.save.pending_save import base_bytes
from deltackpt.session.run import Run
from deltackpt.wal.epoch import OpenEpoch, wal_key
from deltackpt.wal.writer import WalFailure, WalWriter

#: Number of calls between decisions.
_EVERY = 4
#: Number of answers above which process 0 deletes old ones.
_KEPT = 8
#: Number of calls after which an unchanged status is stored again.
_STATUS_CALLS = _KEPT * _EVERY
#: Minimum size of a base for ``max_wal_ratio``.
_LEAST_BASE_BYTES = 16 << 20
#: Consecutive failures after which a step is saved.
_FAILURES = 2
#: Growth is reported in steps of this fraction of the limit.
_SHARES = 16
#: Limit for the text of a request: a message has at most 64 KiB.
_MOST_CHARACTERS = 8 << 10
_GROWN = "the WAL has grown to WalOptions.max_wal_ratio"


class SaveRequest(NamedTuple):
    """A process's request that all processes save a step."""

    reason: str
    restarts_wal: bool  # The WAL restarts with the step: earlier records are invalid.


class _Status(NamedTuple):
    """What a process reports to the others."""

    moment: int  # Logical time: twice the number of calls, plus one after a save.
    request: SaveRequest | None = None
    grown: int = 0  # Bytes appended since the last step.
    dense: int = 0  # Bytes of its dense leaves.


class SaveAgreement:
    """Agrees with the other processes at which calls of a WAL epoch all save."""

    def __init__(
        self,
        coordinator: Coordinator,
        key: str,  # Prefix of all keys of this epoch.
        runtime: Runtime,
        *,
        calls: int,
        max_wal_ratio: float,
        base_bytes: int,  # Of a base without dense leaves.
    ):
        self._coordinator, self._key, self._runtime = coordinator, key, runtime
        self._max_wal_ratio, self._base_bytes = max_wal_ratio, base_bytes
        self._calls = calls
        #: The moment of the newest save.
        self._saved = 2 * calls
        self._status = self._stored = _Status(self._saved)
        #: The answer for the next call, if that call has one.
        self._answer: Task[SaveRequest | None] | None = None

    def call(self) -> SaveRequest | None:
        """Counts a call of ``append()``; returns why all processes save a step at it, or None."""
        self._calls += 1
        answer, self._answer = self._answer, None
        if (self._calls + 1) % _EVERY == 0:
            self._answer = self._ask(self._calls + 1)
        if self._calls % _EVERY:
            return None
        if answer is None:
            answer = self._ask(self._calls)
        if not answer.future.done():
            # If no pool thread was free: running it here could block without a limit.
            threading.Thread(target=answer.run, name="deltackpt-answer", daemon=True).start()
        secs = self._coordinator.timeout_secs
        if not concurrent.futures.wait([answer.future], secs).done:
            raise ProcessMissing(
                f"append: expected an answer of JAX's coordination service, which process 0 runs, "
                f"within {secs:g} s (timeouts.processes_secs), found nothing; check the log of "
                "process 0, then restart the job",
                (0,),
            )
        return answer.future.result()

    def request_save(self, request: SaveRequest) -> None:
        """Requests a save of all processes; a request that restarts the WAL replaces another."""
        if self._status.request is None or request.restarts_wal:
            self._status = self._status._replace(moment=self._moment, request=request)

    def saved(self) -> None:
        """Clears the request, because a step is being saved, unless the WAL must restart."""
        request = self._status.request
        kept = request if request is not None and request.restarts_wal else None
        self._saved = 2 * self._calls + 1
        self._status = _Status(self._saved, kept, 0, self._status.dense)

    def grew(self, nbytes: int, dense_bytes: int) -> None:
        """Reports the bytes of this process's WAL since the last step, and of its dense leaves."""
        share = self._max_wal_ratio * (self._base_bytes + dense_bytes)
        share /= self._coordinator.count * _SHARES
        if abs(nbytes - self._status.grown) >= share:
            self._status = _Status(self._moment, self._status.request, nbytes, dense_bytes)

    @property
    def _moment(self) -> int:
        return max(2 * self._calls, self._saved)

    def _ask(self, number: int) -> Task[SaveRequest | None]:
        now = max(2 * (number - 1), self._saved)  # This call needs its answer still.
        if now - self._status.moment >= 2 * _STATUS_CALLS:
            self._status = self._status._replace(moment=now)
        return self._runtime.submit(self._find_answer, number, self._status, self._saved)

    def _find_answer(self, number: int, status: _Status, saved: int) -> SaveRequest | None:
        """Returns the answer for a call, in the background; see the module."""
        coordinator, calls = self._coordinator, f"{self._key}/calls/"
        if status != self._stored:
            coordinator.replace(f"{self._key}/status/{coordinator.index}", _packed(status))
            self._stored = status
        answers = coordinator.folder(calls)
        answer = answers.get(str(number))
        if answer is None:
            answer = coordinator.put_first(f"{calls}{number}", _packed(self._needed(status, saved)))
        if coordinator.index == 0 and len(answers) > _KEPT:
            statuses = self._statuses(status)
            if len(statuses) == coordinator.count:
                reached = min(one.moment for one in statuses.values()) // 2
                for name in answers:
                    if int(name) <= reached:
                        coordinator.delete(f"{calls}{name}")
        return _request(json.loads(answer))

    def _needed(self, own: _Status, saved: int) -> SaveRequest | None:
        """Returns a request of any process, or one because the WAL has grown; None without one."""
        statuses = self._statuses(own)
        since = [one for one in statuses.values() if one.moment >= saved]
        requests = [one.request for one in since if one.request is not None]
        dense = sum(one.dense for one in statuses.values())
        limit = self._max_wal_ratio * (self._base_bytes + dense)
        if sum(one.grown for one in since) > limit:
            requests.append(SaveRequest(_GROWN, restarts_wal=False))
        return max(requests, key=lambda one: one.restarts_wal, default=None)

    def _statuses(self, own: _Status) -> dict[int, _Status]:
        stored = self._coordinator.folder(f"{self._key}/status/")
        statuses = {int(process): _status(data) for process, data in stored.items()}
        return {**statuses, self._coordinator.index: own}


def _packed(value: _Status | SaveRequest | None) -> bytes:
    return json.dumps(value).encode()


def _request(value: list[object] | None) -> SaveRequest | None:
    return None if value is None else SaveRequest(str(value[0]), restarts_wal=bool(value[1]))


def _status(data: bytes) -> _Status:
    moment, request, grown, dense = json.loads(data)
    return _Status(moment, _request(request), grown, dense)


class SaveRequests:
    """Decides when ``append()`` saves a step, and requests it; used by the training thread."""

    def __init__(self, run: Run):
        assert run.options.wal is not None
        self._run, self._options = run, run.options.wal
        #: None with one process; it outlives the writer of its epoch.
        self._agreement: SaveAgreement | None = None
        #: Prefix of the keys of the newest epoch.
        self._key = ""
        #: The tables for which this process can append only after a save of all, and why.
        self._refused: tuple[Layout, str] | None = None
        self._bytes_at_step = 0
        #: Why all processes save at this call.
        self.agreed: SaveRequest | None = None

    def call(self) -> None:
        """Counts a call of ``append()``, and sets ``agreed`` for it."""
        self.agreed = None if self._agreement is None else self._agreement.call()

    def start_epoch(self, epoch: OpenEpoch, layout: Layout, calls: int) -> None:
        """Begins a WAL epoch; all processes make this call together."""
        self._bytes_at_step = 0
        coordinator = self._run.coordinator
        if coordinator.count == 1:
            return
        ended, self._key = self._key, wal_key(epoch.head)
        if coordinator.index == 0 and ended not in ("", self._key):
            coordinator.delete(ended)  # All processes have ended that epoch.
        self._agreement = SaveAgreement(
            coordinator,
            self._key,
            self._run.runtime,
            calls=calls,
            max_wal_ratio=self._options.max_wal_ratio,
            base_bytes=_base_bytes(layout),
        )

    def end(self) -> None:
        """Ends the epoch and cancels requests."""
        self._agreement = None

    def close(self) -> None:
        """Ends it: the keys of its last epoch are no longer needed."""
        self.end()
        if self._key:
            self._run.coordinator.discard(self._key)

    def forget(self) -> None:
        """Begins another run."""
        self.end()
        self._refused = None

    def request_save(self, reason: str, *, restarts_wal: bool = False) -> None:
        """Requests that all processes save a step."""
        if self._agreement is not None:
            self._agreement.request_save(SaveRequest(reason[:_MOST_CHARACTERS], restarts_wal))

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

    def missed(self, layout: Layout, reason: str) -> None:
        """Like ``refused``, because this process failed in its shard of a save of all."""
        self.refused(layout, reason)
        if self._agreement is not None:
            self._agreement.saved()

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
        """Returns why a single process saves now; None with several: all must save."""
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

    def _is_long(self, writer: WalWriter, layout: Layout) -> bool:
        """Returns whether a single process has appended enough; with several, all together."""
        grown = writer.bytes_written - self._bytes_at_step
        if self._agreement is not None:
            self._agreement.grew(grown, writer.dense_bytes)
            return False
        return grown > self._options.max_wal_ratio * (_base_bytes(layout) + writer.dense_bytes)


def _base_bytes(layout: Layout) -> int:
    """Returns the bytes of a base without dense leaves, at least what replays within moments."""
    return max(base_bytes(layout.groups), _LEAST_BASE_BYTES)
