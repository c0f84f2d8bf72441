# SPDX-License-Identifier: Apache-2.0
"""Decides when ``append()`` saves a step although a record could be written.

A single process saves when it needs to. With several, a process sends a request to the others,
continues as well as it can, and saves at the call that all have agreed on; see ``agreement``.
"""

from __future__ import annotations

from deltackpt.errors import WalBehind
from deltackpt.format.manifest import Layout
from deltackpt.save.pending_save import base_bytes
from deltackpt.session.run import Run
from deltackpt.wal.agreement import SaveRequest
from deltackpt.wal.agreement_thread import AgreementThread
from deltackpt.wal.epoch import OpenEpoch
from deltackpt.wal.writer import WalFailure, WalWriter

#: A WAL as long as some such bases is replayed before anybody waits for it.
_LEAST_BASE_BYTES = 16 << 20
#: Failures in a row after which a step is saved.
_FAILURES = 2


class SaveRequests:
    """Decides when ``append()`` saves a step, and requests it; used by the training thread."""

    def __init__(self, run: Run):
        self._run = run
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
        options = self._run.options.wal
        assert options is not None
        self._bytes_at_step = 0
        if self._run.coordinator.count == 1:
            return
        self._agreement = AgreementThread(
            self._run.coordinator,
            f"deltackpt/wal/{epoch.head.run}/{epoch.head.epoch}",
            epoch.progress,
            calls=calls,
            max_wal_ratio=options.max_wal_ratio,
            base_bytes=_base_bytes(layout),
            deadline_secs=options.deadline_secs,
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
        options = self._run.options.wal
        assert options is not None
        if reason is None and writer is not None:
            if options.on_failure == "save" and writer.has_failed(_FAILURES):
                reason = "the WAL has failed again"
                if failure is not None:
                    reason = f"{reason}: {failure.cause}"
            elif self._is_long(writer, layout):
                reason = "the WAL has grown to WalOptions.max_wal_ratio"
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
        options = self._run.options.wal
        assert options is not None
        grown = writer.bytes_written - self._bytes_at_step
        if self._agreement is not None:
            self._agreement.grew(grown, writer.dense_bytes)
            return False
        return grown > options.max_wal_ratio * (_base_bytes(layout) + writer.dense_bytes)


def _base_bytes(layout: Layout) -> int:
    """Returns the bytes of a base without dense leaves, at least what replays within moments."""
    return max(base_bytes(layout.groups), _LEAST_BASE_BYTES)
