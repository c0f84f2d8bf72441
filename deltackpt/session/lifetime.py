# SPDX-License-Identifier: Apache-2.0
"""The calls of a manager, one at a time, from its opening to its end.

Its owner, the end of the program or another manager of the same directory ends it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Literal

from jax.core import eval_context

from deltackpt import coordination, events
from deltackpt.errors import (
    AppendFailed,
    ClosedError,
    FencedError,
    OptionError,
    SaveFailed,
    StorageError,
    WaitTimeout,
)
from deltackpt.save import exits
from deltackpt.session.run import Run
from deltackpt.session.saving import Saver
from deltackpt.state import placement


class Lifetime:
    """Runs the calls of a manager, one at a time, in the process that created it, until it ends."""

    #: "opening": nothing can end it; its start may still fail and close everything that is open.
    #: "replaced": another manager of the directory closed it. "left": the program has ended.
    state: Literal["opening", "open", "closed", "replaced", "left"] = "opening"

    def __init__(self, run: Run, saver: Saver, warnings: events.CallWarnings):
        """Lets the end of the program and other managers end it, if it can write."""
        self._run, self._saver, self._warnings = run, saver, warnings
        self.lock = threading.RLock()
        self._pid, self._read_only = os.getpid(), run.options.read_only
        #: The method that runs, if any. It may also be one that an interrupt has ended, until its
        #: traceback is freed; its frame is then on no stack.
        self._outer: FrameType | None = None
        self.termination = coordination.Termination()
        self._watch: exits.Watch | None = None
        if not self._read_only:
            self._watch = exits.Watch(self.end, run.local.path, run.local.epoch)

    # The calls.

    @contextlib.contextmanager
    def call(self, *, writing: bool = False, reading: bool = False) -> Iterator[None]:
        """Runs one call at a time, outside the caller's JAX contexts; detects a takeover.

        Before ``reading`` steps, waits for the save and the WAL; only warns of their failures.
        """
        self._check_process()  # In a forked child, the thread that holds the lock may not exist.
        with self._alone(sys._getframe(2)):  # The method; contextlib calls this function.
            self.check_usable(writing=writing)
            with self._working():
                if reading:
                    self._saver.wait_finished_or_warn()
                    self._run.wal.wait_durable_or_warn()
                yield

    @contextlib.contextmanager
    def _alone(self, method: FrameType) -> Iterator[None]:
        """Waits for the calls of other threads; refuses one inside a call of the same thread.

        If jax traces the caller, arrays are computed nevertheless.
        """
        self._check_not_nested()
        with eval_context(), placement.neutral(), self.lock, self._warnings.deferred():
            try:
                self._outer = method
                yield
            finally:
                self._outer = None

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Shows other processes that this one works; raises FencedError after a takeover."""
        try:
            with self._run.coordinator.alive():
                yield
        except (SaveFailed, AppendFailed, StorageError, WaitTimeout) as error:
            # For example, the new trainer has removed the directory of a save in flight.
            with contextlib.suppress(StorageError):
                try:
                    self._run.check_lease()
                except FencedError as fenced:
                    raise fenced from error
            raise

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                f"{self._name}: expected to be used in process {self._pid}, found process "
                f"{os.getpid()}; create a manager in the child instead"
            )

    def _check_not_nested(self) -> None:
        # The outer call may hold a lock that the background needs, or have changed half its state.
        outer, frame = self._outer, sys._getframe()
        while outer is not None and frame is not None:
            if frame is outer:
                who = "one of its event handlers" if self._run.is_emitting else "a signal handler"
                raise ClosedError(
                    f"{self._name}: expected no call inside another one of the same thread, found "
                    f"one, as by {who}; let the handler note what to do, and call the manager "
                    "after the outer call has returned"
                )
            frame = frame.f_back

    def check_usable(self, *, writing: bool = False) -> None:
        """Raises ClosedError or FencedError if it has ended, and OptionError if it only reads."""
        self._check_process()
        if self.state == "replaced":
            raise FencedError(
                f"{self._name}: expected to hold the directory, found that another manager of this "
                "process was opened on its directory; use that one"
            )
        if self.state != "open":
            why = ", because the program has ended" if self.state == "left" else ""
            raise ClosedError(
                f"{self._name}: expected an open manager, found it closed{why}; create a new one"
            )
        if writing and self._read_only:
            raise OptionError(
                f"{self._name}: expected a manager that can write, found "
                f"access={self._run.options.access!r}; open it with access='write' to save"
            )

    @property
    def _name(self) -> str:
        return f"CheckpointManager of {self._run.root}"

    # The end.

    def wait_for_saves(self) -> None:
        """Waits until all saves and WAL records are durable; raises SaveFailed once."""
        limit = self._run.options.timeouts.close_secs
        try:
            self._saver.wait(limit)
        except SaveFailed:
            self._saver.reports.clear()
            raise
        self._saver.wait_uploaded(limit)
        self._run.wal.wait(limit)

    def close(self) -> None:
        """See ``CheckpointManager.close``."""
        self._check_process()
        with self._alone(sys._getframe()):
            if self.state == "open":
                try:
                    with self._working():
                        self.wait_for_saves()
                finally:
                    self._close("closed")
            elif self.state == "replaced":
                self._saver.raise_unreported()

    def end(self, ending: exits.Ending) -> None:
        """Waits for the saves, then closes or leaves; see ``exits.Watch``."""
        self._check_not_nested()
        limit = self._run.options.timeouts.close_secs
        if not self.lock.acquire(timeout=limit):
            raise WaitTimeout(
                f"{self._name}: expected it to be free within {limit} s (timeouts.close_secs), "
                "found it in use by another thread; check the storage"
            )
        try:
            with self._alone(sys._getframe()):
                if self.state == "open" and ending == "close":
                    self._close("replaced")
                elif self.state == "open":
                    self._wait_to_end(ending, limit)
        finally:
            self.lock.release()

    def _wait_to_end(self, ending: exits.Ending, limit: float) -> None:
        try:
            failure = self._saver.unreported = self._saver.wait_finished(limit)
            try:
                if ending == "leave" and failure is None:
                    self._run.wal.wait(limit)
                else:
                    self._run.wal.wait_durable_or_warn()
            finally:
                if failure is None and ending != "commit":
                    self._saver.wait_uploaded(limit)
        finally:
            if ending == "leave":
                # Python ends threads and executors; the next trainer removes the rest.
                self.state = "left"
        if failure is not None:
            raise failure.error(None) from failure.cause

    def _close(self, state: Literal["closed", "replaced"]) -> None:
        """Closes everything, or nothing if it is interrupted first."""
        try:
            exits.uninterrupted(functools.partial(self._close_all, state))
        finally:
            if self.state != "open":
                # Once more: only the main thread can restore the previous handler.
                self.termination.close()

    def _close_all(self, state: Literal["closed", "replaced"]) -> None:
        self.state = state
        self.termination.close()
        with self._warnings.deferred(), contextlib.ExitStack() as stack:
            stack.callback(self._run.close)
            if self._watch is not None:
                stack.callback(self._watch.cancel)

    def __del__(self) -> None:
        if self.state not in ("open", "left") or self._pid != os.getpid():
            return
        flight = self._saver.in_flight
        if self.state == "open" and flight is not None and flight.is_lost:
            # Its thread, which kept the manager alive, has ended without a commit.
            exits.report_lost(
                f"the save of step {flight.step} failed, and its {self._name} is gone: "
                f"{flight.future.exception()}"
            )
        warnings.warn(
            f"{self._name} was not closed: use it in a with statement",
            ResourceWarning,
            stacklevel=1,
        )
