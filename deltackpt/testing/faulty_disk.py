# SPDX-License-Identifier: Apache-2.0
"""Fails, pauses, shortens and records what this process does to one directory.

An audit hook sees the calls that open a file, and make, rename, truncate or remove a name, whoever
makes them in Python. Writes to descriptors and fsyncs are seen because the functions of
``os`` are replaced while a ``Disk`` is open, and so is ``os.open``, since the hook does not see its
``dir_fd``. Code in C++ (TensorStore) is not seen.
"""

from __future__ import annotations

import atexit
import contextlib
import errno as errnos
import functools
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
#: Audit event to the name of its call, the argument that is its path, and its ``dir_fd`` if any.
_EVENTS: dict[str, tuple[str, int, int | None]] = {
    "open": ("open", 0, None),
    "os.mkdir": ("mkdir", 0, 2),
    "os.rename": ("rename", 1, 3),
    "os.link": ("link", 1, 3),
    "os.remove": ("remove", 0, 1),
    "os.rmdir": ("rmdir", 0, 1),
    "os.truncate": ("truncate", 0, None),
}
#: Function of ``os`` that takes a descriptor to the name of its call.
_REPLACED = {
    "write": "write",
    "pwrite": "write",
    "writev": "write",
    "pwritev": "write",
    "fsync": "fsync",
    "fdatasync": "fdatasync",
}
_CHANGES = {*_REPLACED.values(), *(name for name, _, _ in _EVENTS.values())}
_NAMES = {*_CHANGES, "read"}
_PAUSE_SECS = 60.0
#: Pattern of the files that a save writes before its commit.
STEP_FILES = r"^\d+\.[^/]+/"


class DiskCall(NamedTuple):
    """One call that changes or fsyncs something below the directory.

    Attributes:
      name: "open" (to write), "read" (opened to read), "write", "fsync", "fdatasync", "mkdir",
        "rename", "link", "remove", "rmdir" or "truncate"; ``os.replace`` counts as "rename".
      path: absolute path; the new one of a rename or link.
      errno: the injected error; None if the call was let through.
    """

    name: str
    path: str
    errno: int | None = None


class Pause:
    """A point at which calls wait; it is released when the context exits.

    Attributes:
      reached: set once a call waits.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._released = threading.Event()

    def __enter__(self) -> Pause:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets the waiting calls through, and those that follow."""
        self._released.set()

    def wait(self, call: DiskCall) -> None:
        """Blocks a call until the release.

        Raises:
          TimeoutError: it was not released within a minute.
        """
        self.reached.set()
        if not self._released.wait(_PAUSE_SECS):
            raise TimeoutError(f"{call.name} of {call.path}: not released within {_PAUSE_SECS} s")


class _Rule:
    def __init__(
        self,
        action: Callable[[DiskCall], None] | None,
        calls: str | Collection[str],
        path: str,
        after: int,
        times: int | None,
        errno: int | None = None,
        most_bytes: int | None = None,
    ):
        self.action, self.errno, self.most_bytes = action, errno, most_bytes
        self._calls = {calls} if isinstance(calls, str) else {*calls} or _CHANGES
        if unknown := self._calls - _NAMES:
            raise ValueError(f"calls: expected names of {sorted(_NAMES)}, found {sorted(unknown)}")
        self._path = re.compile(path)
        self._after = after
        self._left = times

    def applies(self, call: DiskCall, below: str) -> bool:
        if self._left == 0 or call.name not in self._calls:
            return False
        if not self._path.search(below):
            return False
        if self._after > 0:
            self._after -= 1
            return False
        if self._left is not None:
            self._left -= 1
        return True


class Disk:
    """Faults below one directory, as a context manager.

    Rules apply to calls by name (default: all but "read") and by a regular expression that is
    searched in the path relative to the directory, which itself is "". Each rule lets the first
    ``after`` matching calls through and then applies ``times`` times, or always if that is None. An
    unknown name of a call raises ``ValueError``.

    Attributes:
      calls: every call so far, in order; of those named "read" the ones to which a rule applied.
      image: the last copy of the directory; None if there is none.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as root, Disk(root) as disk:
      ...     disk.fail("open", "[.]json$", errno=28)
      ...     open(f"{root}/a.json", "w")
      Traceback (most recent call last):
      OSError: [Errno 28] No space left on device: ...
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.calls: list[DiskCall] = []
        self.image: Path | None = None
        self._root = Path(root).absolute()
        self._real = os.path.realpath(root)
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        #: The thread that copies the directory; its own calls are not seen.
        self._copier: int | None = None

    def __enter__(self) -> Disk:
        _watch_names()
        with _lock:
            if not _disks:
                for name in _REPLACED:
                    setattr(os, name, functools.partial(_descriptor_call, name))
                os.open = _open
            _disks.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            _disks.remove(self)
            if not _disks:
                for name, function in _functions.items():
                    setattr(os, name, function)

    @property
    def failures(self) -> list[DiskCall]:
        """Calls into which an error was injected."""
        return [call for call in self.calls if call.errno is not None]

    def paths(self, call: str) -> list[str]:
        """Returns the paths of all calls of a name, in order."""
        return [one.path for one in self.calls if one.name == call]

    def fail(
        self,
        calls: str | Collection[str] = (),
        path: str = "",
        *,
        errno: int = errnos.EIO,
        after: int = 0,
        times: int | None = 1,
    ) -> None:
        """Fails calls with an error number; nothing is written then."""
        self._add(_Rule(None, calls, path, after, times, errno=errno))

    def shorten(
        self, most_bytes: int, path: str = "", *, after: int = 0, times: int | None = None
    ) -> None:
        """Writes at most so many bytes per call. A call that also fails writes them first."""
        self._add(_Rule(None, "write", path, after, times, most_bytes=most_bytes))

    def pause(
        self,
        calls: str | Collection[str] = (),
        path: str = "",
        *,
        errno: int | None = None,
        after: int = 0,
        times: int | None = None,
    ) -> Pause:
        """Blocks calls until the returned ``Pause`` is released, then fails them if asked to."""
        pause = Pause()
        self._add(_Rule(pause.wait, calls, path, after, times, errno=errno))
        return pause

    def on(
        self,
        calls: str | Collection[str],
        action: Callable[[DiskCall], None],
        path: str = "",
        *,
        after: int = 0,
        times: int | None = None,
    ) -> None:
        """Runs an action in the calling thread before each matching call.

        An ``OSError`` that it raises is what the call fails with.
        """
        self._add(_Rule(action, calls, path, after, times))

    def copy(
        self, target: Path, calls: str | Collection[str] = (), path: str = "", *, after: int = 0
    ) -> None:
        """Copies the directory before a call, as a kill at this moment would leave it.

        Threads that arrive at another call wait meanwhile.
        """
        self.on(calls, lambda _: self.copy_now(target), path, after=after, times=1)

    def copy_now(self, target: Path) -> None:
        """Copies the directory and sets ``image``, unless it is this target already."""
        if target.is_relative_to(self._root):
            raise ValueError(f"target: expected a path outside {self._root}, found {target}")
        with self._lock:
            if self.image == target:
                return
            self._copier = threading.get_ident()
            try:
                # Threads that passed the lock earlier, and TensorStore's, may still make changes.
                listed: list[tuple[str, list[str], list[str]]] | None = None
                while (found := list(os.walk(self._root))) != listed:
                    listed = found
                    shutil.rmtree(target, ignore_errors=True)
                    with contextlib.suppress(FileNotFoundError, shutil.Error):
                        shutil.copytree(self._root, target)
                self.image = target
            finally:
                self._copier = None

    def clear(self) -> None:
        """Removes all rules; ``calls`` stays."""
        with self._lock:
            self._rules.clear()

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _enter(self, name: str, path: str) -> tuple[DiskCall, int | None]:
        """The call as it will be recorded, and how many bytes it may write."""
        call = DiskCall(name, path)
        if self._copier == threading.get_ident():
            return call, None
        for root in (str(self._root), self._real):
            if path == root or path.startswith(f"{root}/"):
                below = path[len(root) + 1 :]
                break
        else:
            return call, None
        with self._lock:
            rules = [rule for rule in self._rules if rule.applies(call, below)]
            error = next((rule.errno for rule in rules if rule.errno is not None), None)
            call = call._replace(errno=error)
            if rules or name != "read":
                self.calls.append(call)
            number = len(self.calls) - 1
        for rule in rules:
            if rule.action is not None:
                try:
                    rule.action(call)
                except OSError as raised:
                    self.calls[number] = call._replace(errno=raised.errno)
                    raise
        return call, min(
            (rule.most_bytes for rule in rules if rule.most_bytes is not None), default=None
        )


@contextlib.contextmanager
def paused_saves(root: str | os.PathLike[str], errno: int | None = None) -> Iterator[Pause]:
    """Pauses every save to a local checkpoint directory until the release, then fails it if asked.

    Args:
      root: checkpoint directory.
      errno: what the writes fail with; None to let them through.

    Yields:
      The point at which the saves wait.
    """
    with Disk(root) as disk, disk.pause("write", STEP_FILES, errno=errno) as pause:
        yield pause


@contextlib.contextmanager
def failing_saves(root: str | os.PathLike[str], errno: int = errnos.EIO) -> Iterator[Disk]:
    """Fails the writes of every save to a local checkpoint directory."""
    with Disk(root) as disk:
        disk.fail("write", STEP_FILES, errno=errno, times=None)
        yield disk


_disks: list[Disk] = []
_lock = threading.Lock()
_functions: dict[str, Callable[..., Any]] = {
    name: getattr(os, name) for name in (*_REPLACED, "open")
}


def _entered(name: str, path: str) -> tuple[DiskCall | None, int | None]:
    """The call that fails, and the least number of bytes that any disk allows."""
    failed, most = None, None
    for disk in list(_disks):
        call, bytes_ = disk._enter(name, path)
        failed = call if call.errno is not None else failed
        most = min((one for one in (most, bytes_) if one is not None), default=None)
    return failed, most


def _refused(call: DiskCall) -> OSError:
    number = cast(int, call.errno)
    return OSError(number, os.strerror(number), call.path)


def _descriptor_call(function: str, descriptor: Any, *arguments: Any) -> Any:
    real = _functions[function]
    try:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        path = os.readlink(f"/proc/self/fd/{number}")
    except (OSError, ValueError):
        return real(descriptor, *arguments)
    failed, most = _entered(_REPLACED[function], path)
    if most is not None:
        data, *position = arguments
        first = data[0] if function.endswith("v") else data
        short = memoryview(first).cast("B")[:most]
        written = real(descriptor, [short] if function.endswith("v") else short, *position)
        if failed is None:
            return written
    if failed is not None:
        raise _refused(failed)
    return real(descriptor, *arguments)


def _open(
    path: str | bytes | os.PathLike[str],
    flags: int,
    mode: int = 0o777,
    *,
    dir_fd: int | None = None,
) -> int:
    if dir_fd is not None:
        name = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fsdecode(path))
        failed, _ = _entered("open" if flags & _WRITING else "read", name)
        if failed is not None:
            raise _refused(failed)
    return _functions["open"](path, flags, mode, dir_fd=dir_fd)


def _audit(event: str, arguments: tuple[Any, ...], disks: list[Disk] = _disks) -> None:
    # A default, since the module's names are gone before the last events of the interpreter.
    if not disks or event not in _EVENTS:
        return
    name, at, folder = _EVENTS[event]
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
        name = "read"
    path = arguments[at]
    if isinstance(path, int):
        if event != "os.truncate":
            return
        path = os.readlink(f"/proc/self/fd/{path}")
    path = os.fsdecode(path)
    if folder is not None and arguments[folder] >= 0:
        path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[folder]}"), path)
    failed, _ = _entered(name, os.path.abspath(path))
    if failed is not None:
        raise _refused(failed)


@functools.cache
def _watch_names() -> None:
    """Installs the audit hook, which cannot be removed and serves every ``Disk``."""
    sys.addaudithook(_audit)
    atexit.register(_disks.clear)
