# SPDX-License-Identifier: Apache-2.0
"""One save on its way to the commit, and what Orbax's background threads say of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from deltackpt.errors import DeltackptError, OptionError, OutOfSpace, SaveFailed, TrackingFailed
from deltackpt.handlers import commit
from deltackpt.handlers.orbax_private import TMP_DIR_SUFFIX
from deltackpt.handlers.run import Run
from deltackpt.outcomes import Saved
from deltackpt.restore.steps import Items
from deltackpt.save import rendezvous
from deltackpt.save.flight import PendingSave, RefusedSave
from deltackpt.save.rendezvous import Rendezvous
from deltackpt.state.touch_state import TouchState


@dataclasses.dataclass(frozen=True, eq=False)
class SaveArguments:
    """What ``save()`` was given beside step and state."""

    touched: TouchState | None = None
    items: Items | None = None
    metrics: Mapping[str, float] | None = None
    force_base: bool = False

    def __post_init__(self) -> None:
        if not (self.touched is None or isinstance(self.touched, TouchState)):
            raise OptionError(
                "touched: expected the TouchState that deltackpt.touched.init() made and mark() "
                f"gave back, found {type(self.touched).__name__}; give that"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Failure:
    """A save that failed in the background."""

    step: int
    cause: Exception

    def error(self, taken: Saved | None) -> SaveFailed:
        """What is raised; its cause is to be ``cause``.

        Args:
          taken: the save that was taken since, None where none was.
        """
        if isinstance(self.cause, DeltackptError):
            detail = str(self.cause)
        else:
            detail = f"{type(self.cause).__name__}: {self.cause}"
        follow = (
            "no touched row is lost, save again"
            if taken is None
            else f"step {taken.step} was taken and covers its rows"
        )
        if isinstance(self.cause, OutOfSpace) and taken is None:
            follow = f"keep fewer steps; {follow}"
        kind = SaveFailed
        if isinstance(self.cause, DeltackptError) and self.cause.leaves_doubt:
            kind = TrackingFailed
            follow = "the next save is a base" if taken is None else f"step {taken.step} was taken"
        error = kind(f"the save of step {self.step} failed: {detail}; {follow}")
        error.taken = taken
        return error


@dataclasses.dataclass(eq=False)
class InFlight:
    """The save that is not settled yet; ``started`` is of ``time.perf_counter()``."""

    step: int
    pending: PendingSave | RefusedSave
    started: float
    blocked_secs: float = 0.0
    #: Of one of several processes.
    committed: bool = False
    failure: BaseException | None = None
    #: Whether the call of ``save()`` raised the failure.
    told: bool = False


class Background:
    """What Orbax's threads call in the course of the save in flight; see ``engine.Moments``."""

    def __init__(self, run: Run, owner: object):
        """Nothing is in flight.

        Args:
          run: the manager's run.
          owner: what must not go while these threads, which hold this, are at work: a manager that
            goes says that its save is lost.
        """
        self._run = run
        self.owner = owner
        self.flight: InFlight | None = None
        #: When all files of this process were written, and when the step was visible, of the
        #: newest save: of ``time.perf_counter()``, 0 before.
        self.written_at = self.committed_at = 0.0

    def begin(self) -> None:
        """A save is about to be handed over: its commit may come before that call returns."""
        self.written_at = self.committed_at = 0.0

    def meet(self, *, key: str, timeout_ms: int) -> None:
        """What Orbax's background threads call where several processes are to meet.

        They meet through the step's directory (``Rendezvous``), where a failure is seen at once,
        and not at a barrier. ``timeout_ms`` is Orbax's.
        """
        flight, run = self.flight, self._run
        if run.among.count == 1 or flight is None:
            return
        step_dir = run.root.step_dir(flight.step)
        meeting = self._rendezvous(flight.step)
        try:
            if "async_write_complete" in key:
                self.written()
                commit.write_process_digests(meeting.temporary, meeting.process, fsync=run.fsync)
                if meeting.process == 0:
                    meeting.await_written()
            elif "async_commit_complete" in key:
                if meeting.process > 0:
                    meeting.await_commit(step_dir.is_dir)
                    self.committed()
                flight.committed = True
            elif not flight.committed:
                # The end of a save that failed in Orbax, which keeps the reason to itself.
                meeting.fail(SaveFailed("Orbax could not write or commit the step; see the log"))
        except BaseException as error:
            self.failed(error)
            raise

    def _rendezvous(self, step: int) -> Rendezvous:
        step_dir = self._run.root.step_dir(step)
        temporary = step_dir.with_name(f"{step_dir.name}{TMP_DIR_SUFFIX}")
        return rendezvous.of_this_process(temporary, self._run.options.timeouts.processes_secs)

    def written(self) -> None:
        """All files of this process are written."""
        if not self.written_at:
            self.written_at = time.perf_counter()

    def failed(self, error: BaseException) -> None:
        """Something ended the save before its commit: the other processes are told."""
        flight = self.flight
        if flight is not None and flight.failure is None:
            flight.failure = error
            self._rendezvous(flight.step).fail(error)

    def committed(self) -> None:
        """The step is visible; the save is reported later, by the next save or wait."""
        self.committed_at = time.perf_counter()
