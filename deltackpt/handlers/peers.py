# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run agree on when a manager is made and when a step is restored.

Both are calls that every process makes at the same point of its program, on its main thread. What
goes on in the background of a save is ``rendezvous``'s, which uses no collective.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from deltackpt import processes
from deltackpt.errors import PeerMissing

#: Of all managers of the process: the keys of barriers are the job's.
_numbers = itertools.count()
_LATE = re.compile(r"timed out task names:(.*?)(?:RPC|$)", re.DOTALL)


class Peers:
    """The processes of a run; with one process nothing waits and nothing is sent."""

    def __init__(self, timeout_secs: float):
        """Looks up how many processes there are.

        Args:
          timeout_secs: the longest wait for another process.
        """
        self.index = processes.index()
        self.count = processes.count()
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
          PeerMissing: a process did not come in time.
        """
        if self.count == 1:
            return value
        self._meet(what)
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        length = int(multihost.broadcast_one_to_all(np.int32(len(data))))
        sent = np.zeros(length, np.uint8)
        sent[: len(data)] = data[:length]
        return json.loads(np.asarray(multihost.broadcast_one_to_all(sent)).tobytes())

    def failures(self, what: str, error: BaseException | None) -> dict[int, str]:
        """What went wrong on which process; the same answer on every process.

        Args:
          what: what was being done.
          error: what went wrong here.
        """
        if self.count == 1:
            return {} if error is None else {0: str(error)}
        self._meet(what)
        text = "" if error is None else f"{type(error).__name__}: {error}"
        failed = np.zeros(self.count, bool)
        failed[self.index] = error is not None
        found = {}
        # Failures are few: each is told by its process alone.
        for process in np.flatnonzero(self._any(failed)):
            found[int(process)] = self._told(text, int(process))
        return found

    def barrier(
        self,
        broken: Callable[[], BaseException | None],
        written: Callable[[], None],
        committed: Callable[[], None],
    ) -> multihost.BarrierSyncFn:
        """The barrier that Orbax's background threads use.

        Args:
          broken: why the save in flight has failed because a process is missing; the barrier
            then fails at once instead of waiting for that process again.
          written: called when this process has written all its files of a step.
          committed: called when process 0 has committed a step.
        """

        def wait(*, key: str, timeout_ms: int) -> None:
            if self.count == 1:
                return
            reason = broken()
            if reason is not None:
                raise reason
            if "async_write_complete" in key:
                written()
            self._wait(key, min(timeout_ms / 1000, self._timeout_secs), key)
            if "async_commit_complete" in key:
                committed()

        return wait

    def _told(self, text: str, source: int) -> str:
        own = np.frombuffer(text.encode(), np.uint8)
        is_source = self.index == source
        length = int(multihost.broadcast_one_to_all(np.int32(len(own)), is_source=is_source))
        sent = np.zeros(length, np.uint8)
        if is_source:
            sent[:] = own
        told = multihost.broadcast_one_to_all(sent, is_source=is_source)
        return np.asarray(told).tobytes().decode(errors="replace")

    def _any(self, flags: np.ndarray) -> Any:
        return np.any(multihost_utils.process_allgather(flags), axis=0, keepdims=False)

    def _meet(self, what: str) -> None:
        """Collectives have no limit of their own: first everybody must have come."""
        self._wait(f"deltackpt:{next(_numbers)}:{what}", self._timeout_secs, what)

    def _wait(self, key: str, timeout_secs: float, what: str) -> None:
        if self._barrier is None:
            self._barrier = multihost.get_barrier_sync_fn(processes=self.everybody)
        try:
            self._barrier(key=key, timeout_ms=max(1, int(timeout_secs * 1000)))
        except jax.errors.JaxRuntimeError as error:
            # The service names those that did not come after the first that did.
            late = _LATE.search(str(error))
            names = re.findall(r"\d+", late[1]) if late is not None else ()
            missing = tuple(sorted({int(name) for name in names} - {self.index}))
            shown = f"process {', '.join(map(str, missing))}" if missing else "every process"
            raise PeerMissing(
                f"{what}: expected {shown} to come within {timeout_secs:g} s "
                f"(timeouts.peers_secs), found {str(error).splitlines()[0]}; look at the logs of "
                "the processes, then restart the job",
                missing,
            ) from error
