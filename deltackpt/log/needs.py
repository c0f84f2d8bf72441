# SPDX-License-Identifier: Apache-2.0
"""When a step is saved in the place of a mark although one could be taken.

A process by itself saves where it needs to. One of several asks the others, goes on meanwhile as
well as it can, and saves at the call that all have agreed on: see ``agreement``.
"""

from __future__ import annotations

from deltackpt.errors import LogBehind
from deltackpt.format.manifest import Layout
from deltackpt.handlers.board import JobBoard
from deltackpt.handlers.run import Run
from deltackpt.log.agreement import Wish
from deltackpt.log.assembly import Assembly
from deltackpt.log.stretch import Stretch
from deltackpt.log.writer import Failure, LogWriter
from deltackpt.save.flight import base_bytes

#: A log of some such bases is replayed before anybody waits for it.
_LEAST_BASE_BYTES = 16 << 20
#: Failures in a row after which a step is saved.
_FAILURES = 2


class Needs:
    """What the log of a manager needs steps for; used by the training thread."""

    def __init__(self, run: Run):
        """Needs nothing yet.

        Args:
          run: the manager's run.
        """
        self._run = run
        #: Of several processes; it outlives the writer of its stretch.
        self._assembly: Assembly | None = None
        #: The tables of a save that the others have begun, and this process could not.
        self._refused: Layout | None = None
        self._bytes_at_step = 0
        #: Why all processes save at this call.
        self.agreed: Wish | None = None

    def call(self) -> None:
        """Counts a call of ``log()``; ``agreed`` is of this one then.

        Raises:
          StorageError: whether all save at it cannot be found out.
        """
        self.agreed = None if self._assembly is None else self._assembly.call()

    def begin(self, stretch: Stretch, layout: Layout, calls: int) -> None:
        """A stretch begins; all processes come here at the same call.

        Args:
          stretch: the new one.
          layout: its tables.
          calls: how often ``log()`` was called.
        """
        options = self._run.options.log
        assert options is not None
        self._bytes_at_step = 0
        if self._run.among.count == 1:
            return
        self._assembly = Assembly(
            JobBoard(),
            f"deltackpt/log/{stretch.head.run}/{stretch.head.stretch}",
            stretch.progress,
            calls=calls,
            most_bytes=options.most_bytes,
            base_bytes=_base_bytes(layout),
            deadline_secs=options.deadline_secs,
        )
        self._assembly.start()

    def end(self) -> None:
        """The stretch ends; what was asked for is asked for no more."""
        if self._assembly is not None:
            self._assembly.close()
            self._assembly = None

    def forget(self) -> None:
        """Another run begins."""
        self.end()
        self._refused = None

    def ask(self, reason: str, *, anew: bool = False) -> None:
        """Asks for a step of all processes.

        Args:
          reason: why.
          anew: whether the log begins anew with it.
        """
        if self._assembly is not None:
            self._assembly.wish(Wish(reason, anew))

    def saved(self, writer: LogWriter | None) -> None:
        """A save was begun, which covers what was logged."""
        self._refused = None
        if writer is not None:
            self._bytes_at_step = writer.bytes_written
        if self._assembly is not None:
            self._assembly.saved()

    def refused(self, layout: Layout) -> None:
        """A save of such tables was begun by the others, and could not be by this process."""
        self._refused = layout

    def waits_for_others(self, layout: Layout) -> bool:
        """Whether this process lacks a save that the others have begun, and so asks for another."""
        if self._refused != layout:
            return False
        self.ask("one of them could not do its part of the last save")
        return True

    def alone(
        self, writer: LogWriter | None, layout: Layout, failure: Failure | None, *, rootless: bool
    ) -> str | None:
        """Why a process by itself saves a step now; of several None, and the others are asked.

        Args:
          writer: of the log.
          layout: the tables.
          failure: what has failed since the last call.
          rootless: whether the save that the marks lead down to has failed.
        """
        options, reason = self._run.options.log, None
        assert options is not None
        if rootless:
            reason = "the save that the marks go on from has failed"
        elif writer and options.on_failure == "save" and writer.has_failed(_FAILURES):
            reason = "the log has failed again"
            if failure is not None:
                reason = f"{reason}: {failure.cause}"
        elif writer is not None and self._is_long(writer, layout):
            reason = "the log has grown to LogOptions.most_bytes"
        if reason is not None and self._run.among.count > 1:
            self.ask(reason)
            return None
        return reason

    def alarms(self) -> list[LogBehind]:
        """Who was found to be behind since the last call."""
        found = []
        while self._assembly is not None and self._assembly.alarms:
            found.append(self._assembly.alarms.popleft())
        return found

    def _is_long(self, writer: LogWriter, layout: Layout) -> bool:
        """Whether a process by itself has logged enough; of several process 0 finds that."""
        options = self._run.options.log
        assert options is not None
        grown = writer.bytes_written - self._bytes_at_step
        if self._assembly is not None:
            self._assembly.grew(grown, writer.dense_bytes)
            return False
        return grown > options.most_bytes * (_base_bytes(layout) + writer.dense_bytes)


def _base_bytes(layout: Layout) -> int:
    """Bytes of a base without dense leaves; of a small one as many as are replayed in no time."""
    return max(base_bytes(layout.groups), _LEAST_BASE_BYTES)
