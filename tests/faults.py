# SPDX-License-Identifier: Apache-2.0
"""Breaks what this process does to one directory, or copies it in the middle of that.

An audit hook sees each call of the interpreter that opens a file to write, makes a directory,
renames or removes; writers in C++ (TensorStore's) call ``enter`` through a patch. At one of these
calls the directory can be copied while every thread that comes to another one waits: the copy is
what a process leaves that is killed there. ``tests/long`` kills real ones, at calls of C++ too.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
#: Audit events that change a directory, and which argument is the descriptor of it, or -1.
_CHANGES = {"os.mkdir": 2, "os.rename": 3, "os.remove": 1, "os.rmdir": 1}


class Faults:
    """Looks at the calls below one directory.

    Attributes:
      fired: whether a call failed since it was last set to False.
      image: the copy that was made, None while none was.
    """

    def __init__(self, root: Path):
        self.fired = False
        self.image: Path | None = None
        self._root = f"{root}/"
        self._lock = threading.Lock()
        #: Calls that are let through before something happens; None for all.
        self._left: int | None = None
        self._only = re.compile("")
        self._target: Path | None = None
        _install()
        _open.append(self)

    def fail_once(self, at: int, only: str) -> None:
        """Fails the call that comes after ``at`` others whose path below the root matches."""
        with self._lock:
            self._left, self._only, self._target = at, re.compile(only), None

    def copy_once(self, at: int, target: Path) -> None:
        """Copies the directory to ``target`` before the call that comes after ``at`` others."""
        with self._lock:
            self._left, self._only, self._target = at, re.compile(""), target

    def copy_now(self) -> Path:
        """Copies the directory unless that was done; where to."""
        with self._lock:
            if self.image is None:
                self._copy()
            assert self.image is not None
            return self.image

    def disarm(self) -> None:
        """Lets every call through."""
        with self._lock:
            self._left = None

    def close(self) -> None:
        """Looks at no call any more."""
        _open.remove(self)

    def enter(self, path: str) -> None:
        """What a call that changes ``path`` is preceded by."""
        if self._left is None or not path.startswith(self._root):
            return
        with self._lock:
            if self._left is None or not self._only.search(path, len(self._root)):
                return
            self._left -= 1
            if self._left >= 0:
                return
            if self._target is None:
                self._left, self.fired = None, True
                raise OSError(errno.EIO, "injected", path)
            self._copy()

    def _copy(self) -> None:
        self._left, target = None, self._target
        assert target is not None
        # Other threads may have come past here and make their calls only now, and TensorStore's
        # go on until they wait for ours: what changed meanwhile is copied again.
        listed: list[tuple[str, list[str], list[str]]] | None = None
        while (found := list(os.walk(self._root))) != listed:
            listed = found
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError, shutil.Error):
                shutil.copytree(self._root, target)
        self.image = target


_open: list[Faults] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _open or (event != "open" and event not in _CHANGES):
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
        return
    # Of a rename the new name counts.
    path = arguments[1 if event == "os.rename" else 0]
    if isinstance(path, int):
        return
    path, folder = os.fsdecode(path), _CHANGES.get(event)
    if folder is not None and arguments[folder] >= 0:
        path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[folder]}"), path)
    for faults in list(_open):
        faults.enter(path)


@functools.cache
def _install() -> None:
    """An audit hook stays for the life of the process: one is enough."""
    sys.addaudithook(_audit)
