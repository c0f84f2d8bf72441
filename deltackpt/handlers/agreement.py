# SPDX-License-Identifier: Apache-2.0
"""Agreement of the processes of a run on their main threads, never in the background of a save.

Every process makes these calls at the same point of its program: when a manager opens, when a step
is restored, when ``save`` checks for a free writer or moves later steps aside, and when a save
without our manager draws its run. ``save.rendezvous`` coordinates the background of a save, without
collectives.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from deltackpt import processes
from deltackpt.errors import ProcessFailed, ProcessMissing, RestoreError, StepGone, StepNotFound
from deltackpt.handlers.board import JobBoard
from deltackpt.state import contexts

_LATE = re.compile(r"timed out task names:(.*?)(?:RPC|$)", re.DOTALL)


class Failure(NamedTuple):
    """A failure on a process.

    Attributes:
      process: index of the process.
      text: text of the error.
      fatal: whether any other step would fail too.
      gone: whether the step was removed.
    """

    process: int
    text: str
    fatal: bool
    gone: bool


class Processes:
    """The processes of a run; a single process neither waits nor sends."""

    def __init__(self, directory: str, timeout_secs: float, *, alone: bool = False):
        """Looks up the number of processes.

        Args:
          directory: the directory that they share.
          timeout_secs: maximum wait for another process.
          alone: whether this process ignores the others.
        """
        self.index = 0 if alone else processes.index()
        self.count = 1 if alone else processes.count()
        self._directory = directory
        #: Begins the keys of barriers, which are the job's; agreed on when they first meet.
        self._key: str | None = None
        self._meetings = itertools.count()
        self._timeout_secs = timeout_secs
        self._barrier: multihost.BarrierSyncFn | None = None

    @property
    def everybody(self) -> set[int]:
        """Returns the indices of all processes."""
        return set(range(self.count))

    def agree(self, what: str, value: Any) -> Any:
        """Returns process 0's value on every process.

        Args:
          what: the subject of the agreement, for errors.
          value: a JSON value; only that of process 0 counts.

        Raises:
          ProcessMissing: a process timed out.
        """
        if self.count == 1:
            return value
        self._meet(what)
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        with contexts.neutral():
            length = int(multihost.broadcast_one_to_all(np.int32(len(data))))
            sent = np.zeros(length, np.uint8)
            sent[: len(data)] = data[:length]
            return json.loads(np.asarray(multihost.broadcast_one_to_all(sent)).tobytes())

    def failures(
        self, what: str, error: BaseException | None, *, fatal: bool, patience: int = 3
    ) -> list[Failure]:
        """Returns the failures of all processes; the same result on every process.

        Args:
          what: the operation.
          error: its error on this process.
          fatal: whether any other step would fail too.
          patience: multiple of the timeout: other processes may first have waited for this one at
            an Orbax barrier.
        """
        if self.count == 1:
            return [] if error is None else [Failure(0, str(error), fatal, _gone(error))]
        self._meet(what, patience=patience)
        flags = np.zeros((self.count, 3), bool)
        flags[self.index] = error is not None, fatal, _gone(error)
        with contexts.neutral():
            found = np.any(multihost_utils.process_allgather(flags), axis=0)
        text = "" if error is None else f"{type(error).__name__}: {error}"
        # Failures are few, so each is broadcast separately.
        return [
            Failure(int(process), self._told(text, int(process)), *map(bool, found[process, 1:]))
            for process in np.flatnonzero(found[:, 0])
        ]

    @contextlib.contextmanager
    def together(self, what: str, *, fatal: bool = False, patience: int = 3) -> Iterator[None]:
        """Runs a block; afterwards either every process raises, or none does.

        Args:
          what: the operation.
          fatal: whether no other step would succeed if it fails.
          patience: as for ``failures``.

        Raises:
          RestoreError: another process failed, and another step may succeed; the message names it.
          StepGone: another process failed because the step was removed.
          ProcessFailed: another process failed fatally; the message names it.
          ProcessMissing: a process timed out.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
            fatal = fatal or not (isinstance(error, RestoreError) and error.another_step_may_do)
        failures = self.failures(what, error, fatal=error is not None and fatal, patience=patience)
        worst = [failure for failure in failures if failure.fatal] or failures
        if error is not None and (fatal or not worst[0].fatal):
            raise error
        if worst:
            process, text, is_fatal, is_gone = worst[0]
            kind = ProcessFailed if is_fatal else StepGone if is_gone else RestoreError
            raise kind(f"{what}: expected it on every process, found on process {process} {text}")

    def of_first(
        self, what: str, find: Callable[[], Any], *, fatal: bool = False, patience: int = 3
    ) -> Any:
        """Returns the value that process 0 finds, on every process.

        Args:
          what: the value's name, for errors.
          find: called only on process 0; returns a JSON value.
          fatal: whether no other step would succeed if it fails.
          patience: as for ``failures``.

        Raises:
          RestoreError, ProcessFailed: process 0 failed; process 0 itself raises its own error.
          ProcessMissing: a process timed out.
        """
        found = None
        with self.together(what, fatal=fatal, patience=patience):
            if self.index == 0:
                found = find()
        return self.agree(what, found)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Returns the value of each process, by process; the same result on every process.

        Args:
          what: what is gathered, for errors.
          value: a JSON value.

        Raises:
          ProcessMissing: a process timed out.
        """
        if self.count == 1:
            return [value]
        self._meet(what)
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        with contexts.neutral():
            lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(data))))
            sent = np.zeros(int(lengths.max()), np.uint8)
            sent[: len(data)] = data
            found = np.asarray(multihost_utils.process_allgather(sent))
        return [
            json.loads(one[:length].tobytes()) for one, length in zip(found, lengths, strict=True)
        ]

    def named(self, what: str, error: BaseException) -> ProcessMissing:
        """Returns the error of a barrier that timed out, naming the missing processes."""
        # After the first arrival, the service lists those that did not arrive.
        late = _LATE.search(str(error))
        names = re.findall(r"\d+", late[1]) if late is not None else ()
        return self._missing(what, {int(name) for name in names}, str(error).splitlines()[0])

    def _missing(self, what: str, late: set[int], found: str) -> ProcessMissing:
        missing = tuple(sorted(late - {self.index}))
        shown = f"process {', '.join(map(str, missing))}" if missing else "every process"
        return ProcessMissing(
            f"{what}: expected {shown} to arrive in time (timeouts.processes_secs is "
            f"{self._timeout_secs:g}), found {found}; check the logs of the processes, then "
            "restart the job",
            missing,
        )

    @contexts.neutral()
    def _told(self, text: str, source: int) -> str:
        own = np.frombuffer(text.encode(), np.uint8)
        is_source = self.index == source
        length = int(multihost.broadcast_one_to_all(np.int32(len(own)), is_source=is_source))
        sent = np.zeros(length, np.uint8)
        if is_source:
            sent[:] = own
        told = multihost.broadcast_one_to_all(sent, is_source=is_source)
        return np.asarray(told).tobytes().decode(errors="replace")

    def _meet(self, what: str, *, patience: int = 1) -> None:
        """Waits for all processes first, since collectives have no timeout."""
        timeout_secs = patience * self._timeout_secs
        if self._key is None:
            self._key = self._join(what, timeout_secs)
        self._wait(f"{self._key}:{next(self._meetings)}:{what}", timeout_secs, what)

    def _join(self, what: str, timeout_secs: float) -> str:
        """Returns a key that only the processes of the current meeting have.

        A counter of meetings would stay out of step once a process fails before a meeting. So each
        process puts a random name on the job's board while it waits, and process 0 assigns the key
        to these names.
        """
        if not multihost.is_jax_distributed_client_initialized():
            return f"deltackpt:{self._directory}"
        board, own = JobBoard(), uuid.uuid4().hex
        at = f"deltackpt/meet/{hashlib.sha256(self._directory.encode()).hexdigest()}"
        deadline = time.monotonic() + timeout_secs
        awaited = [f"waits/{process}" for process in range(1, self.count)]
        board.replace(f"{at}/waits/{self.index}", own.encode())
        try:
            found = [
                board.wait_for(f"{at}/{name}", deadline - time.monotonic())
                for name in ([f"keys/{own}"] if self.index else awaited)
            ]
            if None in found:
                late = self.everybody - {*map(int, board.folder(f"{at}/waits/"))}
                raise self._missing(what, late, "that it did not")
        finally:
            board.delete(f"{at}/keys/{own}")
            board.delete(f"{at}/waits/{self.index}")
        names = [one.decode() for one in found if one is not None]
        if self.index:
            return names[0]
        for wait, name in zip(awaited, names, strict=True):
            board.delete(f"{at}/{wait}")
            board.put(f"{at}/keys/{name}", own.encode())
        return own

    def _wait(self, key: str, timeout_secs: float, what: str) -> None:
        if self._barrier is None:
            self._barrier = multihost.get_barrier_sync_fn(processes=self.everybody)
        try:
            self._barrier(key=key, timeout_ms=max(1, int(timeout_secs * 1000)))
        except jax.errors.JaxRuntimeError as error:
            raise self.named(what, error) from error


def _gone(error: BaseException | None) -> bool:
    return isinstance(error, (StepGone, StepNotFound))
