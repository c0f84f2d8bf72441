# SPDX-License-Identifier: Apache-2.0
"""Managers that nobody closed: their saves are ended when the program ends, or opens another.

``atexit`` comes too late: when its functions run, the threads were joined and no executor takes
work any more, and the background of a save needs both. What comes in time depends on Python:

- 3.11, 3.12.2 and later: ``threading._register_atexit``, which ``concurrent.futures`` itself uses.
  Its functions run before the threads are joined, the last registered one first, and ours is
  registered after those of ``concurrent.futures``. It is private, and tested.
- 3.12.0 and 3.12.1 start no thread once the program's own code has ended
  (https://github.com/python/cpython/issues/113964): there ``sys.monitoring`` tells of that end.

An interrupt (Ctrl-C) as the interpreter begins to end breaks off what Python does there, before it
comes to us: then ``atexit``, at which threads still run, is in time.

A save that is lost all the same must not end in the exit code 0. Python documents 120 for an error
while it cleans up, such as in its flush of stdout: ``_LastFlush`` is such an error.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltackpt.errors import ClosedError, DeltackptError, SaveFailed, WaitTimeout

_logger = logging.getLogger(__name__)

#: What Python documents for an error while it cleans up.
EXIT_CODE = 120

_lock = threading.Lock()
_watched: list[Watch] = []
_has_hook = False
_has_ended = False
#: Whether a wait ran out, or was given up: Python would join the threads that are left.
_is_stuck = False


class Watch:
    """A manager that may have a save in flight when the program ends."""

    def __init__(self, end: Callable[[str, bool], None], directory: Path):
        """Watches until ``cancel()``, or until the manager is gone.

        Args:
          end: a method of the manager, which is not kept alive. It is called with the reason, and
            whether the program ends; it waits, with a limit, for the save in flight, takes no
            other, and raises what went wrong.
          directory: where the manager writes.
        """
        self.directory = Path(os.path.realpath(directory))
        #: The thread that trains: it may go on when the main thread has ended.
        self.trainer = threading.current_thread()
        self._end = weakref.WeakMethod(end)
        with _lock:
            _watched[:] = [watch for watch in _watched if watch.is_alive]
            _watched.append(self)

    @property
    def is_alive(self) -> bool:
        """Whether the manager is not gone."""
        return self._end() is not None

    def cancel(self) -> None:
        """The manager is closed."""
        with _lock, contextlib.suppress(ValueError):
            _watched.remove(self)

    def is_of(self, directory: str | os.PathLike[str]) -> bool:
        """Whether the manager writes to a directory, by whatever path."""
        try:
            return os.path.samefile(self.directory, directory)
        except OSError:  # One of them is not there.
            return False

    def end(self, reason: str, *, leaving: bool) -> None:
        """Ends the manager's saves, as its ``end`` does, and watches no longer."""
        self.cancel()
        end = self._end()
        if end is not None:
            end(reason, leaving)


def take_over(directory: str | os.PathLike[str]) -> list[DeltackptError]:
    """Makes ready for a manager that will write to a directory: ends others of this process.

    Returns:
      What went wrong with their saves.

    Raises:
      ClosedError: the program has ended; no save could be finished.
    """
    failures = []
    with _lock:
        _register(directory)
        others = [watch for watch in _watched if watch.is_of(directory)]
    for watch in others:
        try:
            watch.end("another manager of this process was opened on its directory", leaving=False)
        except DeltackptError as error:
            failures.append(error)
    return failures


def tell_lost(text: str) -> None:
    """Logs that a save is lost, and makes the program end with ``EXIT_CODE``."""
    _logger.error(text)
    if not isinstance(sys.stdout, _LastFlush):
        sys.stdout = _LastFlush(sys.stdout, text)  # type: ignore[assignment]


class _LastFlush:
    """``sys.stdout`` of a program that has lost a save: the interpreter cannot flush it."""

    closed = False

    def __init__(self, stream: Any, text: str):
        self._stream = stream
        self._text = text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __repr__(self) -> str:
        return "deltackpt.save.exits"

    def flush(self) -> None:
        """Fails where nothing but the exit code can come of it.

        Raises:
          SaveFailed: nobody but the interpreter, or ``multiprocessing`` in a child, calls it now.
        """
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing() or (_has_ended and _is_child()):
            raise SaveFailed(self._text)


def _is_child() -> bool:
    """Whether this is a child of ``multiprocessing``, which ends before its interpreter does."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _register(directory: str | os.PathLike[str]) -> None:
    """Has the saves ended with the program, once."""
    global _has_hook
    if not _has_hook:
        with contextlib.suppress(RuntimeError):  # The program has ended.
            threading._register_atexit(_leave)  # type: ignore[attr-defined]
            atexit.register(_go_on_leaving)
            if (3, 12, 0) <= sys.version_info < (3, 12, 2):
                _call_at_end_of_program(_end_all)
            _has_hook = True
    if _has_ended or not _has_hook:
        raise ClosedError(
            f"CheckpointManager of {os.fspath(directory)}: expected to be opened before the main "
            "thread ends, found that it has ended, and that no save could be finished; let the "
            "main thread join the one that trains"
        )


def _leave() -> None:
    """Called when the main thread has ended, before threads are joined."""
    global _has_ended
    _end_all()
    _has_ended = True
    if _is_stuck:
        # Python would join the threads that hang, for ever.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(EXIT_CODE)


def _go_on_leaving() -> None:
    """Called by ``atexit``: does what an interrupt broke off, so that threads are joined as well.

    One that still runs when the interpreter goes may abort the program.
    """
    if not _has_ended:
        threading._shutdown()  # type: ignore[attr-defined]


def _end_all() -> None:
    global _is_stuck
    while True:
        with _lock:
            watch = next((watch for watch in _watched if watch.is_alive), None)
        if watch is None:
            return
        try:
            _await_trainer(watch)
            watch.end("the program has ended", leaving=True)
        except (WaitTimeout, KeyboardInterrupt) as error:
            # Who interrupts the wait gives the save up.
            _is_stuck = True
            watch.cancel()
            tell_lost(str(error) or f"{watch.directory}: interrupted; the save in flight is lost")
        except Exception as error:
            tell_lost(str(error))


def _await_trainer(watch: Watch) -> None:
    """A thread that trains on when the main thread has ended is joined by Python, so by us.

    Workers of executors end only when Python has told them to, after us.
    """
    trainer = watch.trainer
    workers = concurrent.futures.thread._threads_queues  # type: ignore[attr-defined]
    if not (trainer.daemon or trainer in (threading.main_thread(), threading.current_thread())):
        if trainer not in workers:
            trainer.join()


def _call_at_end_of_program(call: Callable[[], None]) -> None:
    """Calls when the code that the main thread began with returns or raises."""
    main = threading.main_thread()
    frame = sys._current_frames()[main.ident or 0]
    while frame.f_back is not None:
        frame = frame.f_back
    program = frame.f_code
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    tool = next((number for number in (3, 4) if monitoring.get_tool(number) is None), None)
    if tool is None:
        return

    def ended(code: object, *_: object) -> None:
        if code is program and threading.current_thread() is main:
            call()

    monitoring.use_tool_id(tool, __name__)
    monitoring.register_callback(tool, monitoring.events.PY_RETURN, ended)
    monitoring.register_callback(tool, monitoring.events.PY_UNWIND, ended)
    monitoring.set_events(tool, monitoring.events.PY_UNWIND)
    monitoring.set_local_events(tool, program, monitoring.events.PY_RETURN)


def _forget() -> None:
    """In a forked child: the managers, and the threads of their saves, are its parent's."""
    global _lock, _is_stuck
    _lock = threading.Lock()
    _watched.clear()
    _is_stuck = False


os.register_at_fork(after_in_child=_forget)
