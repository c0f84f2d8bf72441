# SPDX-License-Identifier: Apache-2.0
"""Agreement of the processes of a job, over the key-value store of JAX's coordination service.

Processes send each other messages: each process to process 0, and process 0 to all. A process that
failed sends its error instead, and whoever waits for it raises that. While a process waits, or
works on something that others wait for, it shows every few seconds that it is alive. No device
collectives are used: they have no timeout, and could interfere with those of the training step.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import jax
from jax.experimental import multihost_utils

from deltackpt.errors import (
    DeltackptError,
    Disagreement,
    OptionError,
    ProcessFailed,
    ProcessMissing,
    RestoreError,
    StepGone,
    StepNotFound,
    StorageError,
)


def process_index() -> int:
    """Returns the index of this process."""
    return jax.process_index()


def process_count() -> int:
    """Returns the number of processes."""
    return jax.process_count()


class Device(Protocol):
    """The part of a ``jax.Device`` that is used; type checkers do not know that class."""

    id: int
    process_index: int
    platform: str


def process_of(device: Device) -> int:
    """Returns the index of the process that a device belongs to."""
    return device.process_index


def reached_preemption(step: int) -> bool:
    """Returns whether the platform has announced that this job will be preempted at ``step``."""
    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # The job is a single process, or preemption notices are switched off.
        return False


class Termination:
    """Listens for SIGTERM from the first query on; an existing handler still runs.

    Only for single-process jobs: with several, JAX's own handler must not be replaced.
    """

    def __init__(self) -> None:
        """Does not listen yet: without a query, a SIGTERM ends the process."""
        self._pid = os.getpid()
        self._listening = False
        self._closed = False
        self._received = False
        self._step: int | None = None
        self._former: Any = None

    def announced(self, step: int) -> bool:
        """Starts to listen; returns whether a SIGTERM arrived, for the first step after it."""
        if not (self._listening or self._closed):
            self._listen()
        if self._received and self._step is None:
            self._step = step
        return self._step == step

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Only there Python lets handlers be changed; another thread may ask later.
        self._listening = True
        self._former = signal.getsignal(signal.SIGTERM)
        if self._former is not None:  # None: it was not put there by Python.
            signal.signal(signal.SIGTERM, self._on_signal)

    def close(self) -> None:
        """Restores the previous handler; from another thread, forwards signals to it instead."""
        self._closed = True
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._former)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        mine = os.getpid() == self._pid and not self._closed
        self._received = self._received or mine
        # A second signal is for the former handler alone, which may end the process.
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._former)
        if callable(self._former):
            self._former(number, frame)
        elif not mine and self._former == signal.SIG_DFL:
            # In a forked child, or if nothing will save: end as without us.
            os.kill(os.getpid(), number)


#: A JSON value that processes exchange.
_Json = TypeVar("_Json")
#: Size limit of a value; longer messages are sent in pieces.
_PIECE_BYTES = 64 << 10
#: Limit for the text of an error, so that it is sent in one piece.
_MOST_CHARACTERS = 8 << 10
#: Timeout for a value that already exists.
_GET_SECS = 10.0
#: Longest time between two looks for failures.
_LOOK_SECS = 0.25
#: How often a process shows within a timeout that it is alive, and how often others look.
_BEATS, _LOOKS = 4, 8
#: A process that is alive, but does not do its part, is missing after so many timeouts.
_MOST_TIMEOUTS = 10
#: How many expired keys are kept.
_EXPIRED = 3
#: How many processes an error names.
_SHOWN = 8
#: Beginning of the error message of a timeout.
_LATE = "DEADLINE_EXCEEDED"
_ALIVE = "deltackpt/alive/"
#: The first byte of a message.
_DONE, _FAILED = b"+", b"!"


#: Process 0: keys of closed managers, which other processes may still read. The next call of all
#: processes deletes them, whichever manager makes it.
_discarded: list[str] = []


class _Failure(NamedTuple):
    """The failure of a process; ``fatal`` if any other step would fail too."""

    process: int
    text: str
    fatal: bool
    gone: bool


class Coordinator:
    """The processes that save and restore together; a single process neither waits nor sends.

    The main threads alone call ``gather`` and what is built on it, all at the same point of their
    programs: when a manager opens, when a step is restored, when ``save`` checks for a free writer
    or moves later steps aside. The other methods are thread-safe. A method raises ``StorageError``
    if the service does not answer, and ``ProcessMissing`` if a process that it, or process 0, waits
    for is silent for ``timeout_secs``.
    """

    def __init__(self, directory: str, timeout_secs: float, *, alone: bool = False):
        """Connects to the coordination service of ``jax.distributed`` if there are several.

        The shared ``directory`` keeps their calls apart from those of others; ``alone`` ignores the
        others. Without ``jax.distributed.initialize``, several processes are an ``OptionError``.
        """
        self.index = 0 if alone else process_index()
        self.count = 1 if alone else process_count()
        self.others = {*range(self.count)} - {self.index}
        self.timeout_secs = timeout_secs
        self._directory = directory
        #: The first part of the keys of all calls of ``gather``; agreed on at the first one.
        self._id: str | None = None
        self._calls = itertools.count()
        self._expired: collections.deque[str] = collections.deque()
        self._lock = threading.Lock()
        #: Number of ``alive`` blocks that run, and whether the heartbeat thread runs.
        self._working, self._is_beating = 0, False
        #: The unexpected error that has ended the heartbeat thread, until a call raises it.
        self._died: Exception | None = None
        if self.count == 1:
            return
        # The only public way to the client; a single process does not need Orbax.
        from orbax.checkpoint import multihost

        if not multihost.is_jax_distributed_client_initialized():
            raise OptionError(
                f"{directory}: expected a job with jax.distributed.initialize(), whose "
                f"coordination service connects the processes, found {self.count} processes and no "
                "such call; make it before anything else"
            )
        self._client: Any = multihost.get_jax_distributed_client()

    # The key-value store.

    def replace(self, key: str, data: bytes) -> None:
        """Stores a value of at most 64 KiB, replacing an existing one."""
        with _refusals(key):
            self._client.key_value_set_bytes(key, data, allow_overwrite=True)

    def put_first(self, key: str, data: bytes) -> bytes:
        """Stores a value unless one exists; returns the stored value."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set_bytes(key, data)
        with _refusals(key):
            return self._client.blocking_key_value_get_bytes(key, _milliseconds(_GET_SECS))

    def wait_for(self, key: str, timeout_secs: float) -> bytes | None:
        """Returns a value as soon as it exists; None if it does not appear in time."""
        with _refusals(key):
            try:
                return self._client.blocking_key_value_get_bytes(key, _milliseconds(timeout_secs))
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith(_LATE):
                    raise
        return None

    def folder(self, key: str) -> dict[str, bytes]:
        """Returns all values below a key, by the rest of their keys."""
        with _refusals(key):
            found = self._client.key_value_dir_get_bytes(key)
        return {name.removeprefix(key): value for name, value in found}

    def delete(self, key: str) -> None:
        """Deletes all values below a key; never raises."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_delete(key)

    def expire(self, key: str) -> None:
        """Deletes all values below a key three such calls later: others may still read them."""
        self._expired.append(key)
        if len(self._expired) > _EXPIRED:
            self.delete(self._expired.popleft())

    def discard(self, key: str) -> None:
        """Has process 0 delete all values below a key at a later call that all processes make."""
        if self.index == 0 and self.count > 1:
            _discarded.append(key)

    def close(self) -> None:
        """Discards what its calls have left; a process that is behind may still read it."""
        for key in list(self._expired):  # A save that still runs may change it.
            self.discard(key)
        if self._id is not None:
            self.discard(f"deltackpt/{self._id}")

    # Messages.

    def send(self, topic: str, data: bytes) -> None:
        """Sends a message of any size, replacing this process's earlier one of the topic."""
        self._send(topic, _DONE + data)

    def send_failure(self, topic: str, error: BaseException) -> None:
        """Sends an error in place of this process's message; never raises."""
        # If it cannot be sent, the others miss this process.
        with contextlib.suppress(StorageError):
            self._send(topic, self._failure(error))

    def decide(self, key: str, what: str) -> None:
        """Decides to do ``what``; if a process has prevented it, raises that process's failure."""
        self._checked(self.put_first(key, _DONE), what)

    def prevent(self, key: str, error: BaseException) -> bool:
        """Prevents a later ``decide`` of the key; returns False if it may be too late."""
        with contextlib.suppress(StorageError):
            return self.put_first(key, self._failure(error)).startswith(_FAILED)
        return False

    def receive(
        self, topic: str, senders: Iterable[int], what: str, deed: str
    ) -> Iterator[tuple[int, bytes]]:
        """Yields the sender and the content of each message, as they arrive.

        Errors name ``what``, the operation, and ``deed``, what each sender does before it sends. A
        failed sender raises ``ProcessFailed``.
        """
        missing, limit = {*senders}, self.timeout_secs
        # Process 0 may be waiting for others itself.
        most = (1 if self.index == 0 else 2) * _MOST_TIMEOUTS * limit
        started = looked = beaten = time.monotonic()
        heard = dict.fromkeys(missing, started)
        beats: dict[str, bytes] = {}
        while missing:
            first = min(missing)
            data = self.wait_for(f"{topic}/{first}", min(_LOOK_SECS, limit / _LOOKS))
            found = {} if data is None else {first: data}
            if len(missing) > 1:
                found = {int(process): data for process, data in self.folder(f"{topic}/").items()}
            for process in sorted(missing & found.keys()):
                missing.remove(process)
                yield process, self._content(topic, process, found[process], what)
            now = time.monotonic()
            if now - beaten >= limit / _BEATS:
                beaten = now
                self._beat()
            if now - looked >= limit / _LOOKS:
                last, beats = beats, self.folder(_ALIVE)
                # What the first look finds may be old.
                changed = {name for name, beat in beats.items() if last and last.get(name) != beat}
                heard |= {int(name): max(looked, now - limit / _LOOKS) for name in changed}
                if now - looked >= limit / 2:  # This process was suspended, and heard nothing.
                    heard = {process: max(at, now - limit / 2) for process, at in heard.items()}
                looked = now
            if late := {process for process in missing if now - heard[process] >= limit}:
                raise self._missing(what, late, f"to {deed}, or to show that it is alive,", limit)
            if missing and now - started >= most:
                raise self._missing(what, missing, f"to {deed}", most)

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Reports this process as alive while the block runs.

        Raises ``StorageError`` if an unexpected error has ended its heartbeat thread.
        """
        if self.count == 1:
            yield
            return
        with self._lock:
            died, self._died = self._died, None
            if died is not None:
                raise StorageError(
                    f"{self._directory}: expected a running heartbeat thread in process "
                    f"{self.index}, found that it has ended with {type(died).__name__}: {died}; "
                    "the others may have missed this process: check their logs, then try again"
                ) from died
            self._working += 1
            if not self._is_beating:
                self._is_beating = True
                threading.Thread(target=self._show, name="deltackpt-alive", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1

    # Calls that all processes make.

    def join(self, what: str) -> str:
        """Returns a new id on every process; ``what`` is the operation, for errors.

        A counter of calls would stay out of step once a process fails before a call. So each
        process sends a random name, and process 0 assigns the id to these names.
        """
        own = uuid.uuid4().hex
        if self.count == 1:
            return own
        topic = f"deltackpt/join/{hashlib.sha256(self._directory.encode()).hexdigest()}"
        if self.index > 0:
            self.send(topic, own.encode())
            try:
                [(_, found)] = self.receive(f"deltackpt/{own}", [0], what, "arrive")
            finally:
                self.delete(f"{topic}/{self.index}")
                self.delete(f"deltackpt/{own}")
            return found.decode()
        names: list[str] = []
        try:
            for process, name in self.receive(topic, self.others, what, "arrive"):
                self.delete(f"{topic}/{process}")
                names.append(name.decode())
        except ProcessMissing as error:
            for name in names:
                self.send_failure(f"deltackpt/{name}", error)
            raise
        for name in names:
            self.send(f"deltackpt/{name}", own.encode())
        return own

    def gather(self, what: str, value: _Json) -> list[_Json]:
        """Returns the JSON value of each process, by process; the same on every process.

        A tuple may arrive as a list. ``what`` names the operation, in errors too, and must be equal
        on all processes. If it is not, process 0 raises ``Disagreement``. Whenever process 0 cannot
        gather the values, the others raise ``ProcessFailed``.
        """
        if self.count == 1:
            return [value]
        if self._id is None:
            self._id = self.join(what)
        number, key = next(self._calls), f"deltackpt/{self._id}"
        each, result = f"{key}/{number}/each", f"{key}/{number}/all"
        if self.index > 0:
            self.send(each, json.dumps([what, value]).encode())
            try:
                [(_, found)] = self.receive(result, [0], what, "arrive")
            except ProcessMissing as error:
                self.send_failure(each, error)
                raise
            return json.loads(found)
        values = {0: value}
        try:
            for process, message in self.receive(each, self.others, what, "arrive"):
                other, values[process] = json.loads(message)
                if other != what:
                    raise Disagreement(
                        f"{what}: expected the same call on every process, found on process "
                        f"{process} {other}; make the same calls with the same options and "
                        "arguments, in the same order, on every process"
                    )
        except DeltackptError as error:
            self.send_failure(result, error)
            raise
        while _discarded:  # All processes have made the calls before this one.
            self.delete(_discarded.pop())
        found = json.dumps([values[process] for process in range(self.count)]).encode()
        self.send(result, found)
        # All processes have received the result before.
        self.delete(f"{key}/{number - 1}")
        return json.loads(found)

    def agree(self, what: str, value: _Json) -> _Json:
        """Returns process 0's JSON value on every process; see ``gather``."""
        return self.gather(what, [value] if self.index == 0 else [])[0][0]

    @contextlib.contextmanager
    def together(self, what: str, *, fatal: bool = False) -> Iterator[list[object]]:
        """Runs a block; afterwards either every process raises, or none does.

        If another process failed, the others raise ``ProcessFailed``, ``StepGone`` if the step was
        removed, or else ``RestoreError``: another step may succeed, unless the block is ``fatal``.
        Afterwards, the yielded list has the JSON values of process 0.
        """
        values: list[object] = []
        error: Exception | None = None
        try:
            with self.alive():
                yield values
        except Exception as caught:
            error = caught
        # A context manager drops this frame from the traceback, in which it would form a cycle.
        values[:] = self._outcome(what, error, values, fatal)

    def from_process_0(self, what: str, find: Callable[[], _Json], *, fatal: bool = False) -> _Json:
        """Returns the JSON value that process 0 finds, on every process.

        Raises as ``together`` does; process 0 itself raises its own error.
        """
        with self.together(what, fatal=fatal) as values:
            if self.index == 0:
                values.append(find())
        return cast(_Json, values[0])

    def _outcome(
        self, what: str, error: Exception | None, values: list[object], fatal: bool
    ) -> list[object]:
        """Returns process 0's values unless a process failed: then every process raises."""
        own: _Failure | None = None
        if error is not None:
            fatal = fatal or not (isinstance(error, RestoreError) and error.another_step_may_do)
            gone = isinstance(error, (StepGone, StepNotFound))
            own = _Failure(self.index, f"{type(error).__name__}: {error}", fatal, gone)
        found = self.gather(what, (own, values))
        failures = [_Failure(*failure) for failure, _ in found if failure is not None]
        worst = [failure for failure in failures if failure.fatal] or failures
        if error is not None and (fatal or not worst[0].fatal):
            raise error
        if worst:
            process, text, is_fatal, is_gone = worst[0]
            kind = ProcessFailed if is_fatal else StepGone if is_gone else RestoreError
            raise kind(f"{what}: expected it on every process, found on process {process} {text}")
        return found[0][1]

    def _send(self, topic: str, message: bytes) -> None:
        for start in range(_PIECE_BYTES, len(message), _PIECE_BYTES):
            # Pieces are listed in the order of their keys.
            key = f"{topic}.rest/{self.index}/{start:012}"
            self.replace(key, message[start : start + _PIECE_BYTES])
        self.replace(f"{topic}/{self.index}", message[:_PIECE_BYTES])

    def _content(self, topic: str, process: int, message: bytes, what: str) -> bytes:
        """Returns the content of a message; raises the failure that it reports."""
        if len(message) == _PIECE_BYTES:
            rest = sorted(self.folder(f"{topic}.rest/{process}/").items())
            message = b"".join([message, *(piece for _, piece in rest)])
        return self._checked(message, what)

    def _failure(self, error: BaseException) -> bytes:
        """Returns the message that reports an error."""
        note = {
            "process": self.index,
            "error": f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS],
            "missing": error.processes if isinstance(error, ProcessMissing) else None,
            "doubt": isinstance(error, DeltackptError) and error.leaves_doubt,
        }
        return _FAILED + json.dumps(note).encode()

    def _checked(self, message: bytes, what: str) -> bytes:
        """Returns the content of a whole message; raises the failure that it reports."""
        if message.startswith(_DONE):
            return message[len(_DONE) :]
        note = json.loads(message[len(_FAILED) :])
        text = (
            f"{what}: expected it on every process, found that process {note['process']} failed: "
            f"{note['error']}"
        )
        if note["missing"] is None:
            raise ProcessFailed(text, leaves_doubt=note["doubt"])
        raise ProcessMissing(text, tuple(sorted({*note["missing"]} - {self.index})))

    def _beat(self) -> None:
        with contextlib.suppress(StorageError):
            self.replace(f"{_ALIVE}{self.index}", str(time.monotonic_ns()).encode())

    def _show(self) -> None:
        """Beats as long as this process works; ends in a pause, until the next work."""
        try:
            while True:
                self._beat()
                time.sleep(self.timeout_secs / _BEATS)
                with self._lock:
                    if not self._working:
                        self._is_beating = False
                        return
        except Exception as error:
            with self._lock:
                self._died, self._is_beating = error, False

    def _missing(self, what: str, late: set[int], deed: str, secs: float) -> ProcessMissing:
        named = sorted(late)
        shown = ", ".join(map(str, named[:_SHOWN]))
        if len(named) > _SHOWN:
            shown += f" and {len(named) - _SHOWN} more"
        return ProcessMissing(
            f"{what}: expected process {shown} {deed} within {secs:g} s "
            f"(timeouts.processes_secs is {self.timeout_secs:g}), found nothing; check its log, "
            "then restart the job",
            tuple(named),
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
