# SPDX-License-Identifier: Apache-2.0
"""Finishes the saves of unclosed managers at exit.

``atexit`` is too late: by then threads are joined and executors accept no work. The private
``threading._register_atexit``, which ``concurrent.futures`` itself uses, runs before that. In
Python 3.12.0 and 3.12.1, no thread can start at that point
(https://github.com/python/cpython/issues/113964), so the thread of a save in flight does all of the
save's work itself. An interrupt (Ctrl-C) at the start of the shutdown skips it; threads then still
run at ``atexit``.

A lost save must not end in exit code 0. Python documents 120 for an error during cleanup, such as
while stdout is flushed. ``_LastFlush`` causes such an error, so ``atexit`` functions still run. A
child of ``multiprocessing`` sets its own exit code, so it is ended by ``os._exit`` once its threads
and executors have finished; its ``atexit`` functions do not run.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from deltackpt.errors import ClosedError, DeltackptError, SaveFailed, WaitTimeout
from deltackpt.resources.runtime import Task

_logger = logging.getLogger(__name__)

#: What to do with a manager: wait until its saves are committed in its directory (``commit``) or
#: have reached the tier in its options (``settle``), close it, or abandon it at program exit
#: (``leave``).
Ending = Literal["commit", "settle", "close", "leave"]
#: Python documents it for an error during cleanup.
EXIT_CODE = 120
_STARTING_SECS = 0.001
#: Interval at which a wait checks its thread.
_LOOKING_SECS = 0.2

# State of the process, as are the interpreter's hooks.
_lock = threading.Lock()
_watched: list[Watch] = []
#: Directories of managers whose constructors are running.
_starting: list[Path] = []
_has_hook = False
_has_ended = False
#: Whether a wait ran out or was interrupted: Python would join the threads that are left.
_is_stuck = False


class Watch:
    """A manager that may have a save in flight when the program ends."""

    def __init__(self, end: Callable[[Ending], None], directory: Path, epoch: int = 0):
        """Watches until ``cancel()``, or until the manager is garbage-collected.

        ``end`` is a method of the manager, which is not kept alive. Unless the manager is only
        closed, it waits (with a timeout) for the save in flight, and raises its error. ``epoch`` is
        that of the lease on the directory; 0 without one.
        """
        self.directory, self.epoch = Path(os.path.realpath(directory)), epoch
        self._end = weakref.WeakMethod(end)
        with _lock:
            _watched[:] = [watch for watch in _watched if watch.is_alive]
            _watched.append(self)

    @property
    def is_alive(self) -> bool:
        """Returns whether the manager still exists."""
        return self._end() is not None

    def cancel(self) -> None:
        """Stops watching: the manager is closed."""
        with _lock, contextlib.suppress(ValueError):
            _watched.remove(self)

    def end(self, ending: Ending) -> None:
        """Calls the manager's ``end``, which stops watching if it closes the manager."""
        if ending == "leave":
            self.cancel()
        end = self._end()
        if end is not None:
            end(ending)


@contextlib.contextmanager
def starting(directory: Path) -> Iterator[None]:
    """Registers the start of a manager; ``directory`` is where it will write."""
    with _lock:
        _starting.append(directory)
    try:
        yield
    finally:
        # A child that was forked meanwhile has forgotten it.
        with _lock, contextlib.suppress(ValueError):
            _starting.remove(directory)


def take_over(directory: str | os.PathLike[str]) -> list[Exception]:
    """Prepares a directory for a new manager: waits for the others of this process; returns errors.

    They stay open, since the constructor of the new one may fail. If another start is in progress,
    it waits only until their saves are committed locally, because the bucket accepts uploads only
    after that start. Raises ClosedError if the program has ended.
    """
    with _lock:
        _register(directory)
        starts = sum(_is_same(one, directory) for one in _starting)
    return _end_others(directory, "settle" if starts < 2 else "commit")


def close_others(directory: str | os.PathLike[str], epoch: int = 0) -> list[Exception]:
    """Closes the managers that ``take_over`` waited for, unless their lease is newer."""
    return _end_others(directory, "close", epoch)


def _is_same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # One of them does not exist.
        return False


def _end_others(
    directory: str | os.PathLike[str], ending: Ending, epoch: int = 0
) -> list[Exception]:
    failures = []
    with _lock:
        others = [
            watch
            for watch in _watched
            if _is_same(watch.directory, directory) and (not epoch or watch.epoch <= epoch)
        ]
    for watch in others:
        try:
            watch.end(ending)
        except (DeltackptError, Warning) as error:
            failures.append(error)
    return failures


def uninterrupted(call: Callable[[], None]) -> None:
    """Calls a function to its end, even if the main thread is interrupted meanwhile.

    Signal handlers run only in the main thread, so the function runs in another one. The interrupt
    is raised once it has returned; a second interrupt ends the wait.
    """
    if threading.current_thread() is not threading.main_thread():
        call()
        return
    task = Task(call)
    try:
        try:
            threading.Thread(target=task.run, name="deltackpt-close").start()
        except RuntimeError:  # The program has ended: no thread starts any more.
            task.run()
        task.future.result()
    except BaseException:
        # An interrupted start may have started the thread.
        if not task.cancel():
            concurrent.futures.wait([task.future])
        raise


def report_lost(text: str) -> None:
    """Logs that a save is lost, and makes the program end with ``EXIT_CODE``."""
    _logger.error(text)
    if not isinstance(sys.stdout, _LastFlush):
        sys.stdout = _LastFlush(sys.stdout)  # type: ignore[assignment]


class _LastFlush:
    """``sys.stdout`` of a program that has lost a save: the interpreter cannot flush it."""

    closed = False

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Raises SaveFailed if the interpreter is ending."""
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise SaveFailed(
                f"a save was lost when the program ended, so it exits with code {EXIT_CODE}; "
                f"the logger {__name__} has the reason"
            )


def _is_child() -> bool:
    """Returns whether this is a child of ``multiprocessing``, which ends by itself."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _register(directory: str | os.PathLike[str]) -> None:
    """Installs the interpreter-exit hook (idempotent)."""
    global _has_hook
    if not _has_hook:
        with contextlib.suppress(RuntimeError):  # The program has ended.
            threading._register_atexit(_leave)  # type: ignore[attr-defined]
            atexit.register(_finish_leaving)
            _has_hook = True
    if _has_ended or not _has_hook:
        raise ClosedError(
            f"CheckpointManager of {os.fspath(directory)}: expected to be opened before the main "
            "thread ends, found that it has ended, and that no save could be finished; let the "
            "main thread join the one that trains"
        )


def _leave() -> None:
    """Runs when the main thread has ended, before threads are joined."""
    global _has_ended
    _end_all()
    _has_ended = True
    # Python would wait forever for threads that hang, and ``multiprocessing`` ends a child itself.
    if _is_stuck or (isinstance(sys.stdout, _LastFlush) and _is_child()):
        if not _is_stuck:
            with contextlib.suppress(KeyboardInterrupt):
                _await_threads()
                _finish_executors()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(EXIT_CODE)


def _finish_leaving() -> None:
    """Finishes an interrupted shutdown in ``atexit``, so that threads are joined."""
    if not _has_ended:
        # A thread that still runs when the interpreter exits may abort the program.
        threading._shutdown()  # type: ignore[attr-defined]


def _end_all() -> None:
    global _is_stuck
    while True:
        with _lock:
            watch = next((watch for watch in _watched if watch.is_alive), None)
        if watch is None:
            return
        try:
            with contextlib.suppress(KeyboardInterrupt):  # It abandons the wait, not a save.
                _await_threads()
            with warnings.catch_warnings():
                # As errors, they would end the wait.
                warnings.filters = [
                    ("default" if action == "error" else action, *rest)
                    for action, *rest in warnings.filters
                ]
                watch.end("leave")
        except (WaitTimeout, KeyboardInterrupt) as error:
            # An interrupt of this wait abandons the save.
            _is_stuck = True
            watch.cancel()
            report_lost(str(error) or f"{watch.directory}: interrupted; the save in flight is lost")
        except Exception as error:
            report_lost(str(error))


def _await_threads() -> None:
    """Waits for the threads that Python joins next: any of them may still be training."""
    ours = {threading.main_thread(), threading.current_thread()}
    while True:
        pools = sys.modules.get("concurrent.futures.process")
        # Executor workers exit only when Python stops them, after this hook.
        workers = {
            *concurrent.futures.thread._threads_queues,  # type: ignore[attr-defined]
            *getattr(pools, "_threads_wakeups", ()),
        }
        others = {*threading.enumerate()} - workers - ours
        thread = next((one for one in others if not one.daemon), None)
        if thread is None:
            return
        if thread.ident is None:
            time.sleep(_STARTING_SECS)  # It cannot be joined before it has started.
        else:
            # With a timeout: an executor registers a thread as its worker only after its start.
            thread.join(_LOOKING_SECS)


def _finish_executors() -> None:
    """Runs the work that was submitted to executors, as Python does after this hook."""
    for name in ("process", "thread"):
        executors = sys.modules.get(f"concurrent.futures.{name}")
        if executors is not None:
            executors._python_exit()


def _forget() -> None:
    """In a forked child: forgets the managers and threads of the parent."""
    global _lock, _is_stuck
    _lock = threading.Lock()
    _watched.clear()
    _starting.clear()
    _is_stuck = False


os.register_at_fork(after_in_child=_forget)
