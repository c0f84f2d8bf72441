# SPDX-License-Identifier: Apache-2.0
"""The one lock of files: the kernel lets go of it when the process ends, however it does."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from deltackpt.errors import DeltackptError
from deltackpt.storage import files


@contextlib.contextmanager
def held(name: Path, refusal: DeltackptError) -> Iterator[None]:
    """Holds a lock against other processes, and other holders in this one.

    Whoever held it may remove the file, and its folder, as the last thing that he does.

    Args:
      name: its file; it is made, with its folder.
      refusal: what is raised where another one holds it.

    Raises:
      StorageError: the file cannot be made.
    """
    with contextlib.ExitStack() as stack:
        with files.typed_errors(name, "be locked"):
            while True:
                files.make_folder(name.parent)
                try:
                    lock = stack.enter_context(open(name, "ab"))
                except FileNotFoundError:
                    continue  # Whoever held it is leaving.
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise refusal from error
                # What was locked must be what has the name.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock.fileno()), name.stat()):
                        break
        yield
