# SPDX-License-Identifier: Apache-2.0
"""What concurrent work shares: threads and their priority, memory up to a limit, a write rate.

Whoever waits for a call that no thread has started runs it. Nested waits therefore need no threads,
and work still ends after ``close``, in a forked child, and while the interpreter exits.

Fresh memory fills at 0.3 to 8 GB/s because of page faults, warm memory at 17. Buffers are therefore
kept for the next request, up to the limit. They are aligned for direct I/O.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import copy
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import numpy as np

from deltackpt.errors import OptionError, StorageError
from deltackpt.resources.host_memory import UNIT_BYTES, aligned_buffer


class Pace:
    """A rate limit in bytes per second; thread-safe. After a pause, there is no burst."""

    def __init__(
        self, bytes_per_sec: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ):
        self._rate = bytes_per_sec
        self._clock = clock
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._lifters = 0
        #: Set while the limit is suspended; waiting threads then continue.
        self._is_lifted = threading.Event()

    def reserve(self, nbytes: int) -> float:
        """Reserves bytes; returns in how many seconds they may be sent."""
        if self._rate is None or self._is_lifted.is_set():
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._rate
        return start - now

    def acquire(self, nbytes: int, stopped: threading.Event | None = None) -> None:
        """Waits until bytes may be sent; an event replaces ``lifted`` as the end of the wait."""
        secs = self.reserve(nbytes)
        if secs > 0:
            (stopped or self._is_lifted).wait(secs)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Suspends the limit inside the context, because a caller is waiting for the data."""
        with self._lock:
            self._lifters += 1
            self._is_lifted.set()
        try:
            yield
        finally:
            with self._lock:
                self._lifters -= 1
                if not self._lifters:
                    self._is_lifted.clear()
                    self._free_at = 0.0


_NICE = 10


def pin(cpus: Collection[int] | None) -> None:
    """Restricts the calling thread and its children to some CPUs; None allows all.

    CPUs that the process may no longer use are ignored; if none remains, nothing changes.
    """
    if cpus is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(threading.get_native_id(), cpus)


#: Concurrent fsyncs; 22 files take 14 ms instead of 108.
FSYNCS = 8
#: Concurrent reads of the other processes' small files, each of which waits for the store.
READS = 32
_GRAIN_BYTES = 1 << 20
_T = TypeVar("_T")
_U = TypeVar("_U")


class Task(Generic[_T]):
    """A call that runs once: on a thread, or in the first caller of ``result``."""

    def __init__(self, call: Callable[[], _T]):
        self._call = call
        self._started = threading.Lock()
        self.future: Future[_T] = Future()

    def run(self) -> None:
        """Runs the call, unless it was started or cancelled."""
        if not self._started.acquire(blocking=False):
            return
        try:
            call = self._call
            del self._call
            found = call()
            del call  # Whoever waits for the result may free, or donate, what the call refers to.
            self.future.set_result(found)
        except BaseException as error:
            self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise  # An interrupt is the caller's, too.

    def cancel(self) -> bool:
        """Prevents that the call starts; returns False if it was started or cancelled before."""
        return self._started.acquire(blocking=False) and self.future.cancel()

    def wait(self) -> None:
        """Waits until the call has ended, even with an error."""
        self.run()
        if not self.future.cancelled():
            self.future.exception()

    def result(self) -> _T:
        """Returns the result of the call, or raises its error."""
        self.run()
        return self.future.result()


def no_thread(expected: str, found: RuntimeError, loss: str) -> StorageError:
    """Returns the error of a call that could not start a thread."""
    return StorageError(
        f"{expected}, found {found}; raise the limit of threads (ulimit -u, or that of the "
        f"container). {loss}"
    )


def _await(futures: Sequence[Future[Any]]) -> None:
    """Waits for calls that use the caller's memory, even if the main thread is interrupted once."""
    try:
        concurrent.futures.wait(futures)
    except BaseException:
        concurrent.futures.wait(futures)
        raise


class Memory:
    """Host memory up to a limit, for requests that know their cost; thread-safe."""

    def __init__(self, limit_bytes: int):
        """Limits what is reserved, and the buffers that are lent or kept."""
        if limit_bytes <= 0:
            raise OptionError(f"memory limit: expected a positive size, found {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        #: Limit of buffers that are kept without being lent.
        self.max_kept_bytes = limit_bytes
        # An interrupt inside of ``Condition.__enter__``, which is Python code, leaves it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._kept: list[np.ndarray] = []
        self._lent: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # Sums over thousands of buffers would take longer than small copies.
        self._kept_bytes = self._lent_bytes = 0

    @contextlib.contextmanager
    def reserved(self, nbytes: int) -> Iterator[None]:
        """Reserves memory during the context."""
        reservation = Reservation(self)
        try:
            reservation.acquire(nbytes)
            yield
        finally:
            try:
                reservation.release()
            finally:  # That call may have been interrupted as it began.
                reservation.release()

    def fits(self, nbytes: int) -> bool:
        """Returns whether buffers of ``nbytes`` in total are available now."""
        with self._lock:
            return self._lent_bytes + nbytes <= self.limit_bytes

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an uninitialized buffer; pass it to ``give_back`` after use."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            # What any small request gets fits all of them: else each would take a new one.
            most = max(4 * nbytes, 2 * _GRAIN_BYTES)
            fitting = [raw for raw in self._kept if nbytes <= raw.nbytes <= most]
            raw = min(fitting, key=lambda raw: raw.nbytes, default=None)
            if raw is None:
                room = max(1, nbytes * 5 // 4)
                # Large buffers are in huge pages, of which the last one counts as a whole.
                grain = _GRAIN_BYTES if room <= _GRAIN_BYTES else UNIT_BYTES
                raw = aligned_buffer(-(-room // grain) * grain)
            else:
                self._kept = [kept for kept in self._kept if kept is not raw]
                self._kept_bytes -= raw.nbytes
            out = raw[:nbytes].view(dtype).reshape(shape)
            self._evict(raw.nbytes)
            self._lent[id(out)] = (out, raw)
            self._lent_bytes += raw.nbytes
        return out

    def give_back(self, arrays: Iterable[object]) -> None:
        """Keeps the buffers among some arrays for later requests; the oldest are freed if full."""
        with self._lock:
            for _, raw in (self._lent.pop(id(one)) for one in arrays if id(one) in self._lent):
                self._kept.append(raw)
                self._lent_bytes -= raw.nbytes
                self._kept_bytes += raw.nbytes
            self._evict()

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all buffers, lent or kept."""
        return self._lent_bytes + self._kept_bytes

    def _evict(self, more: int = 0) -> None:
        """Frees the oldest kept buffers if there are too many, ``more`` bytes included."""
        while self._kept and (
            self.nbytes + more > self.limit_bytes or self._kept_bytes > self.max_kept_bytes
        ):
            self._kept_bytes -= self._kept.pop(0).nbytes


class Reservation:
    """Memory that one owner reserves; created before ``acquire``, so no interrupt can leak it."""

    def __init__(self, memory: Memory):
        """Reserves nothing yet."""
        self._memory, self._nbytes = memory, 0

    def acquire(self, nbytes: int, timeout_secs: float | None = None) -> bool:
        """Waits for room; returns whether there was some within the timeout.

        A request larger than the limit is granted once nothing is reserved.
        """
        memory = self._memory

        def fits() -> bool:
            return not memory.reserved_bytes or memory.reserved_bytes + nbytes <= memory.limit_bytes

        with memory._lock:
            if not memory._changed.wait_for(fits, timeout_secs):
                return False
            # Python runs no signal handler between these assignments.
            memory.reserved_bytes += nbytes
            self._nbytes = nbytes
            return True

    def release(self) -> None:
        """Ends the reservation. Idempotent."""
        memory = self._memory
        with memory._lock:
            # First, so that an interrupted call can be repeated; waiting threads need the lock.
            memory._changed.notify_all()
            memory.reserved_bytes -= self._nbytes
            self._nbytes = 0


class Runtime:
    """Threads, memory and a write rate.

    Threads start when they are first needed: starting one costs the training thread up to a
    millisecond if others contend for the GIL.
    """

    def __init__(
        self,
        threads: int = 2,
        *,
        size: int | None = None,
        memory_bytes: int = 128 << 20,
        bytes_per_sec: float | None = None,
        cpus: Collection[int] | None = None,
        low_priority: bool = False,
        name: str = "deltackpt",
    ):
        """Starts no thread yet; ``map`` runs ``threads`` requests at the same time.

        ``size`` is the number of threads beside the caller's, by default ``threads - 1``.
        """
        allowed = os.sched_getaffinity(0)
        if missing := sorted(set(cpus or ()) - allowed):
            raise OptionError(
                f"Background.cpus: expected CPUs that this process may use, {sorted(allowed)}, "
                f"found {missing}; choose others, or request more from the scheduler"
            )

        def set_up() -> None:
            pin(cpus)
            if low_priority:
                with contextlib.suppress(OSError):  # On Linux, niceness is per thread.
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)

        self.threads = threads
        self.memory = Memory(memory_bytes)
        self.pace = Pace(bytes_per_sec)
        self._size = threads - 1 if size is None else size
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, self._size), name, set_up)

    def with_memory(self, memory_bytes: int) -> Runtime:
        """Returns a runtime with the same threads and rate, and its own memory."""
        found = copy.copy(self)
        found.memory = Memory(memory_bytes)
        return found

    def start(self, call: Callable[..., _T], *arguments: object) -> Future[_T]:
        """Runs a call on a thread, never on the caller's; raises what ``queue`` does."""
        task = Task(lambda: call(*arguments))
        try:
            self.queue(task)
        except BaseException:
            task.cancel()
            raise
        return task.future

    def queue(self, task: Task[Any]) -> None:
        """Lets a thread run a task.

        Raises RuntimeError after ``close``, or if no thread can start; the task is cancelled then.
        """
        try:
            queued = self._pool.submit(task.run)
        except RuntimeError:
            # The executor has queued it nevertheless: another thread may have become idle.
            if task.cancel():
                raise
        else:
            queued.add_done_callback(lambda ended: task.cancel() if ended.cancelled() else None)

    def submit(self, call: Callable[..., _T], *arguments: object) -> Task[_T]:
        """Runs a call on a thread, or in the caller of ``Task.result`` if that comes first."""
        task = Task(lambda: call(*arguments))
        self._offer(task)
        return task

    def _offer(self, task: Task[Any]) -> None:
        if self._size:
            with contextlib.suppress(RuntimeError):  # Closed: the caller of ``result`` runs it.
                self._pool.submit(task.run)

    def map(
        self,
        call: Callable[[_U], _T],
        items: Iterable[_U],
        *,
        threads: int | None = None,
        cost: Callable[[_U], int] | None = None,
    ) -> list[_T]:
        """Calls a function with each item, in this thread and in others that are idle.

        ``cost`` gives the bytes that a call needs; it waits until they are reserved. After an
        error, no further call starts; it is raised once no call is running.
        """
        requests = [*items]
        helpers = min(len(requests) - 1, (threads or self.threads) - 1, self._size)
        if helpers < 1:
            return [call(item) for item in requests]
        results: dict[int, _T] = {}
        left = collections.deque(enumerate(requests))

        def work() -> None:
            try:
                while left:
                    try:
                        number, item = left.popleft()
                    except IndexError:  # Another thread was faster.
                        return
                    if cost is None:
                        results[number] = call(item)
                    else:
                        with self.memory.reserved(cost(item)):
                            results[number] = call(item)
            except BaseException:
                left.clear()
                raise

        # All exist before a thread has one: an interrupt must find it here.
        tasks = [Task(work) for _ in range(helpers)]
        try:
            for task in tasks:
                self._offer(task)
            work()
        except BaseException:
            left.clear()
            raise
        finally:
            # Those that no thread has started are not awaited: no item is left.
            begun = [task for task in tasks if not task.cancel()]
            _await([task.future for task in begun])
        for task in begun:
            task.result()
        return [results[number] for number in range(len(requests))]

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads once they are idle; calls that have not started do not start there.

        Without ``wait``, calls that were started before still run.
        """
        self._pool.shutdown(wait=wait, cancel_futures=wait)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
