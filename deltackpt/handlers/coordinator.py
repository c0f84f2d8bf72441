# SPDX-License-Identifier: Apache-2.0
"""Agreement of the processes of a job, over JAX's coordination service.

On their main threads, all processes make the same calls of ``gather`` and of what is built on it,
at the same point of their programs: when a manager opens, when a step is restored, when ``save``
checks for a free writer or moves later steps aside, and when a save without our manager draws its
run. The background uses only the service's key-value store, where no call waits for a process
without a timeout. There are no device collectives, which have no timeout.
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
from orbax.checkpoint import multihost

from deltackpt import processes
from deltackpt.errors import (
    OptionError,
    ProcessFailed,
    ProcessMissing,
    RestoreError,
    StepGone,
    StepNotFound,
    StorageError,
)

#: Size limit of a message; longer values are sent in pieces.
_MESSAGE_BYTES = 64 << 10
#: Timeout for a value that already exists.
_GET_SECS = 10.0
#: Beginning of the error message of a timeout.
_LATE = "DEADLINE_EXCEEDED"
_MISSING = re.compile(r"timed out task names:(.*?)(?:RPC|$)", re.DOTALL)


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


class Coordinator:
    """The processes that save and restore together; a single process neither waits nor sends.

    The methods from ``put`` to ``delete`` are thread-safe; only a job of several processes may call
    them. The main threads alone call the others.

    Attributes:
      index: index of this process.
      count: number of processes.
    """

    def __init__(self, directory: str, timeout_secs: float, *, alone: bool = False):
        """Connects to the coordination service of ``jax.distributed`` if there are several.

        Args:
          directory: the directory that they share; keeps their calls apart from those of others.
          timeout_secs: maximum wait for another process.
          alone: whether this process ignores the others.

        Raises:
          OptionError: there are several processes, and ``jax.distributed`` is not initialized.
        """
        self.index = 0 if alone else processes.index()
        self.count = 1 if alone else processes.count()
        self._directory = directory
        self._timeout_secs = timeout_secs
        #: Begins the keys of all meetings; agreed on at the first one.
        self._key: str | None = None
        self._meetings = itertools.count()
        if self.count == 1:
            return
        if not multihost.is_jax_distributed_client_initialized():
            raise OptionError(
                f"{directory}: expected a job with jax.distributed.initialize(), whose "
                f"coordination service connects the processes, found {self.count} processes and no "
                "such call; make it before anything else"
            )
        self._client: Any = multihost.get_jax_distributed_client()
        self._barrier = multihost.get_barrier_sync_fn(processes=set(range(self.count)))

    # The key-value store.

    def put(self, key: str, data: bytes) -> None:
        """Stores a value of at most 64 KiB under an unused key.

        Raises:
          StorageError: the service does not answer, or the key is used.
        """
        with _refusals(key):
            self._client.key_value_set_bytes(key, data)

    def replace(self, key: str, data: bytes) -> None:
        """Stores a value, replacing an existing one.

        Raises:
          StorageError: the service does not answer.
        """
        with _refusals(key):
            self._client.key_value_set_bytes(key, data, allow_overwrite=True)

    def put_first(self, key: str, data: bytes) -> bytes:
        """Stores a value unless one exists; returns the stored value.

        Raises:
          StorageError: the service does not answer.
        """
        with contextlib.suppress(StorageError):
            self.put(key, data)
        return self.get(key)

    def wait_for(self, key: str, timeout_secs: float) -> bytes | None:
        """Returns a value as soon as it exists; None if it does not appear in time.

        Raises:
          StorageError: the service does not answer.
        """
        with _refusals(key):
            try:
                return self._client.blocking_key_value_get_bytes(key, _milliseconds(timeout_secs))
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith(_LATE):
                    raise
        return None

    def get(self, key: str) -> bytes:
        """Returns the value of a key.

        Raises:
          StorageError: the service does not answer, or has no value.
        """
        with _refusals(key):
            return self._client.blocking_key_value_get_bytes(key, _milliseconds(_GET_SECS))

    def folder(self, key: str) -> dict[str, bytes]:
        """Returns all values below a key, by the rest of their keys.

        Raises:
          StorageError: the service does not answer.
        """
        with _refusals(key):
            found = self._client.key_value_dir_get_bytes(key)
        return {name.removeprefix(key): value for name, value in found}

    def delete(self, key: str) -> None:
        """Deletes all values below a key; never raises."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_delete(key)

    # Calls that all processes make.

    def gather(self, what: str, value: Any, *, patience: int = 1) -> list[Any]:
        """Returns the value of each process, by process; the same result on every process.

        Args:
          what: what is gathered, for errors.
          value: a JSON value.
          patience: multiple of the timeout.

        Raises:
          ProcessMissing: a process timed out.
          StorageError: the service does not answer.
        """
        if self.count == 1:
            return [value]
        timeout_secs = patience * self._timeout_secs
        if self._key is None:
            self._key = self._join(what, timeout_secs)
        number, data = next(self._meetings), json.dumps(value).encode()
        key = f"{self._key}/{number}/"
        for start in range(0, len(data), _MESSAGE_BYTES):
            # Pieces are listed in the order of their keys.
            self.put(f"{key}{self.index}/{start:012}", data[start : start + _MESSAGE_BYTES])
        try:
            self._barrier(key=f"{key}{what}", timeout_ms=_milliseconds(timeout_secs))
        except jax.errors.JaxRuntimeError as error:
            # After the first arrival, the service lists those that did not arrive.
            late = _MISSING.search(str(error))
            names = {int(name) for name in re.findall(r"\d+", late[1])} if late else set[int]()
            raise self._missing(what, names, str(error).splitlines()[0]) from error
        found = [b""] * self.count
        for name, piece in sorted(self.folder(key).items()):
            found[int(name.partition("/")[0])] += piece
        if self.index == 0:
            # Whoever is here has finished the previous meeting.
            self.delete(f"{self._key}/{number - 1}")
        return [json.loads(one) for one in found]

    def agree(self, what: str, value: Any) -> Any:
        """Returns process 0's value on every process.

        Args:
          what: the subject of the agreement, for errors.
          value: a JSON value; only that of process 0 counts.

        Raises:
          ProcessMissing, StorageError: as for ``gather``.
        """
        return self.gather(what, value if self.index == 0 else None)[0]

    @contextlib.contextmanager
    def together(self, what: str, *, fatal: bool = False, patience: int = 3) -> Iterator[list[Any]]:
        """Runs a block; afterwards either every process raises, or none does.

        Args:
          what: the operation.
          fatal: whether no other step would succeed if it fails.
          patience: multiple of the timeout: other processes may first have waited for this one at
            an Orbax barrier.

        Raises:
          RestoreError: another process failed, and another step may succeed; the message names it.
          StepGone: another process failed because the step was removed.
          ProcessFailed: another process failed fatally; the message names it.
          ProcessMissing, StorageError: as for ``gather``.

        Yields:
          An empty list; afterwards it contains what the block added to it on process 0.
        """
        error: Exception | None = None
        values: list[Any] = []
        try:
            yield values
        except Exception as caught:
            error = caught
        # A context manager drops this frame from the traceback, where it would be a cycle.
        values[:] = self._outcome(what, error, values, fatal, patience)

    def of_first(
        self, what: str, find: Callable[[], Any], *, fatal: bool = False, patience: int = 3
    ) -> Any:
        """Returns the value that process 0 finds, on every process.

        Args:
          what: the value's name, for errors.
          find: called only on process 0; returns a JSON value.
          fatal: whether no other step would succeed if it fails.
          patience: as for ``together``.

        Raises:
          RestoreError, ProcessFailed: process 0 failed; process 0 itself raises its own error.
          ProcessMissing, StorageError: as for ``gather``.
        """
        with self.together(what, fatal=fatal, patience=patience) as found:
            if self.index == 0:
                found.append(find())
        return found[0]

    def _outcome(
        self, what: str, error: Exception | None, values: list[Any], fatal: bool, patience: int
    ) -> list[Any]:
        """Returns process 0's values unless a process failed: then every process raises."""
        own = None
        if error is not None:
            fatal = fatal or not (isinstance(error, RestoreError) and error.another_step_may_do)
            gone = isinstance(error, (StepGone, StepNotFound))
            own = Failure(self.index, f"{type(error).__name__}: {error}", fatal, gone)
        found = self.gather(what, [own, values], patience=patience)
        failures = [Failure(*failure) for failure, _ in found if failure is not None]
        worst = [failure for failure in failures if failure.fatal] or failures
        if error is not None and (fatal or not worst[0].fatal):
            raise error
        if worst:
            process, text, is_fatal, is_gone = worst[0]
            kind = ProcessFailed if is_fatal else StepGone if is_gone else RestoreError
            raise kind(f"{what}: expected it on every process, found on process {process} {text}")
        return found[0][1]

    def _join(self, what: str, timeout_secs: float) -> str:
        """Returns a key that only the processes of the current meeting have.

        A counter of meetings would stay out of step once a process fails before a meeting. So each
        process stores a random name while it waits, and process 0 assigns the key to these names.
        """
        own = uuid.uuid4().hex
        at = f"deltackpt/meet/{hashlib.sha256(self._directory.encode()).hexdigest()}"
        deadline = time.monotonic() + timeout_secs
        awaited = [f"waits/{process}" for process in range(1, self.count)]
        self.replace(f"{at}/waits/{self.index}", own.encode())
        try:
            found = [
                self.wait_for(f"{at}/{name}", deadline - time.monotonic())
                for name in ([f"keys/{own}"] if self.index else awaited)
            ]
            if None in found:
                late = {*range(self.count)} - {*map(int, self.folder(f"{at}/waits/"))}
                raise self._missing(what, late, "that it did not")
        finally:
            self.delete(f"{at}/keys/{own}")
            self.delete(f"{at}/waits/{self.index}")
        names = [one.decode() for one in found if one is not None]
        if self.index:
            return names[0]
        key = f"deltackpt/met/{own}"
        for wait, name in zip(awaited, names, strict=True):
            self.delete(f"{at}/{wait}")
            self.put(f"{at}/keys/{name}", key.encode())
        return key

    def _missing(self, what: str, late: set[int], found: str) -> ProcessMissing:
        missing = tuple(sorted(late - {self.index}))
        shown = f"process {', '.join(map(str, missing))}" if missing else "every process"
        return ProcessMissing(
            f"{what}: expected {shown} to arrive in time (timeouts.processes_secs is "
            f"{self._timeout_secs:g}), found {found}; check the logs of the processes, then "
            "restart the job",
            missing,
        )


def _milliseconds(secs: float) -> int:
    return max(1, int(secs * 1000))


@contextlib.contextmanager
def _refusals(key: str) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise StorageError(
            f"{key}: expected an answer of JAX's coordination service, found "
            f"{str(error).splitlines()[0]}; check the log of process 0, then restart the job"
        ) from error
