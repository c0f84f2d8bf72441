# SPDX-License-Identifier: Apache-2.0
"""File locks, which the kernel releases when the process ends for any reason."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from deltackpt.errors import DeltackptError
from deltackpt.storage import files
from deltackpt.storage.posix import DurableDir


@contextlib.contextmanager
def held(
    name: Path,
    refusal: DeltackptError,
    *,
    make_folder: bool = False,
    private: bool = False,
) -> Iterator[None]:
    """Holds a lock against other processes, and against other holders in this one.

    A holder may remove the file and its folder as its last action.

    Args:
      name: the lock file, which is created.
      refusal: the error to raise if the lock is held.
      make_folder: whether to create its folder as well.
      private: whether only this user can access the file, for any umask.

    Raises:
      StorageError: the file cannot be created.
    """
    with contextlib.ExitStack() as stack:
        with files.typed_errors(name, "be locked"):
            while True:
                if make_folder:
                    DurableDir(name.parent).create()
                try:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                    descriptor = os.open(name, flags, 0o600 if private else 0o666)
                    stack.callback(os.close, descriptor)
                except FileNotFoundError:
                    if make_folder:
                        continue  # The previous holder is exiting.
                    raise
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise refusal from error
                # The locked file must still be the one with that name.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), name.stat()):
                        break
        yield
