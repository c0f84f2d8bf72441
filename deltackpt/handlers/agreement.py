# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run agree on, on their main threads: never in the background of a save.

That is when a manager is made, when a step is restored, when ``save`` asks whether a writer is free
or moves later steps aside, and when a save without our manager draws its run: calls that every
process makes at the same point of its program. What goes on in the background of a save is
``save.rendezvous``'s, which uses no collective.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from deltackpt import processes
from deltackpt.errors import ProcessFailed, ProcessMissing, RestoreError, StepGone, StepNotFound

#: Directory to how many managers it had in this process: the keys of barriers are the job's.
_managers: collections.Counter[str] = collections.Counter()
_LATE = re.compile(r"timed out task names:(.*?)(?:RPC|$)", re.DOTALL)


class Failure(NamedTuple):
    """What went wrong on a process.

    Attributes:
      process: its index.
      text: the error.
      fatal: whether it would go wrong with any other step too.
      gone: whether the step was removed.
    """

    process: int
    text: str
    fatal: bool
    gone: bool


class Processes:
    """The processes of a run; with one process nothing waits and nothing is sent."""

    def __init__(self, directory: str, timeout_secs: float, *, alone: bool = False):
        """Looks up how many processes there are.

        Args:
          directory: what they meet for.
          timeout_secs: the longest wait for another process.
          alone: whether this process takes no notice of the others.
        """
        self.index = 0 if alone else processes.index()
        self.count = 1 if alone else processes.count()
        if self.count > 1:
            _managers[directory] += 1
        self._key = f"deltackpt:{directory}:{_managers[directory]}"
        self._meetings = itertools.count()
        self._timeout_secs = timeout_secs
        self._barrier: multihost.BarrierSyncFn | None = None

    @property
    def everybody(self) -> set[int]:
        """Indices of all processes."""
        return set(range(self.count))

    def agree(self, what: str, value: Any) -> Any:
        """The value that process 0 gives, on every process.

        Args:
          what: what is agreed on, for errors.
          value: whatever json can write; only process 0's counts.

        Raises:
          ProcessMissing: a process did not come in time.
        """
        if self.count == 1:
            return value
        self._meet(what)
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        length = int(multihost.broadcast_one_to_all(np.int32(len(data))))
        sent = np.zeros(length, np.uint8)
        sent[: len(data)] = data[:length]
        return json.loads(np.asarray(multihost.broadcast_one_to_all(sent)).tobytes())

    def failures(
        self, what: str, error: BaseException | None, *, fatal: bool, patience: int = 3
    ) -> list[Failure]:
        """What went wrong on which process; the same answer on every process.

        Args:
          what: what was being done.
          error: what went wrong here.
          fatal: whether it would go wrong with any other step too.
          patience: how many times the limit to wait: others may have waited for this process at a
            barrier of Orbax first.
        """
        if self.count == 1:
            return [] if error is None else [Failure(0, str(error), fatal, _gone(error))]
        self._meet(what, patience=patience)
        flags = np.zeros((self.count, 3), bool)
        flags[self.index] = error is not None, fatal, _gone(error)
        found = np.any(multihost_utils.process_allgather(flags), axis=0)
        text = "" if error is None else f"{type(error).__name__}: {error}"
        # Failures are few: each is told by its process alone.
        return [
            Failure(int(process), self._told(text, int(process)), *map(bool, found[process, 1:]))
            for process in np.flatnonzero(found[:, 0])
        ]

    @contextlib.contextmanager
    def together(self, what: str, *, fatal: bool = False, patience: int = 3) -> Iterator[None]:
        """Work after which every process raises, or none.

        Args:
          what: what is being done.
          fatal: whether another step would not do either where it fails.
          patience: as for ``failures``.

        Raises:
          RestoreError: another process could not do it, and another step may do; it is named.
          StepGone: likewise, since the step was removed.
          ProcessFailed: another process could not go on at all; it is named.
          ProcessMissing: a process did not come in time.
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
        """What process 0 finds, on every process.

        Args:
          what: what is being found.
          find: called on process 0 alone; its result is whatever json can write.
          fatal: whether nothing else would do either where it fails.
          patience: as for ``failures``.

        Raises:
          RestoreError, ProcessFailed: process 0 could not find it; there its own error is raised.
          ProcessMissing: a process did not come in time.
        """
        found = None
        with self.together(what, fatal=fatal, patience=patience):
            if self.index == 0:
                found = find()
        return self.agree(what, found)

    def gather(self, what: str, value: Any) -> list[Any]:
        """What each process gives, by process; the same answer on every process.

        Args:
          what: what is gathered, for errors.
          value: whatever json can write.

        Raises:
          ProcessMissing: a process did not come in time.
        """
        if self.count == 1:
            return [value]
        self._meet(what)
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(data))))
        sent = np.zeros(int(lengths.max()), np.uint8)
        sent[: len(data)] = data
        found = np.asarray(multihost_utils.process_allgather(sent))
        return [
            json.loads(one[:length].tobytes()) for one, length in zip(found, lengths, strict=True)
        ]

    def named(self, what: str, error: BaseException) -> ProcessMissing:
        """A barrier of the coordination service that was not met in time, with who was missing."""
        # The service names those that did not come after the first that did.
        late = _LATE.search(str(error))
        names = re.findall(r"\d+", late[1]) if late is not None else ()
        missing = tuple(sorted({int(name) for name in names} - {self.index}))
        shown = f"process {', '.join(map(str, missing))}" if missing else "every process"
        return ProcessMissing(
            f"{what}: expected {shown} to come in time (timeouts.processes_secs is "
            f"{self._timeout_secs:g}), found {str(error).splitlines()[0]}; look at the logs of the "
            "processes, then restart the job",
            missing,
        )

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
        """Collectives have no limit of their own: first everybody must have come."""
        key = f"{self._key}:{next(self._meetings)}:{what}"
        self._wait(key, patience * self._timeout_secs, what)

    def _wait(self, key: str, timeout_secs: float, what: str) -> None:
        if self._barrier is None:
            self._barrier = multihost.get_barrier_sync_fn(processes=self.everybody)
        try:
            self._barrier(key=key, timeout_ms=max(1, int(timeout_secs * 1000)))
        except jax.errors.JaxRuntimeError as error:
            raise self.named(what, error) from error


def _gone(error: BaseException | None) -> bool:
    return isinstance(error, (StepGone, StepNotFound))
