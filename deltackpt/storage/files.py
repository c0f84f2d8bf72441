# SPDX-License-Identifier: Apache-2.0
"""Files on a local or network file system: typed errors, reads and sizes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath

from deltackpt.errors import Damaged, DeltackptError, OptionError, OutOfSpace, StorageError
from deltackpt.format import names
from deltackpt.format.records import MOST_BYTES

#: Advice for a full file system.
FULL = "free space, then try again"


def user_path(where: str | os.PathLike[str]) -> Path:
    """Makes a user's path absolute; ``~`` in it is a home directory.

    Raises:
      OptionError: the user does not exist.
    """
    path = os.path.expanduser(where)
    if path.startswith("~"):
        raise OptionError(
            f"{path}: expected '~' or '~user' of a user with a home directory, found none; use an "
            f"absolute path, or ./{path} for a directory of that name"
        )
    return Path(path).absolute()


@contextlib.contextmanager
def typed_errors(path: os.PathLike[str], action: str, *, full: str = FULL) -> Iterator[None]:
    """Converts an ``OSError`` into a typed error with advice.

    Args:
      path: the object of the operation.
      action: the operation, such as "write".
      full: advice for a full file system, which depends on the caller.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, DeltackptError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(
                f"{path}: expected room to {action}, found the file system full; {full}"
            ) from error
        raise unreadable(path, error, action) from error


def read_bytes(
    path: Path, name: str | None = None, *, most_bytes: int | None = MOST_BYTES
) -> bytes:
    """Reads a whole file.

    Args:
      path: the file.
      name: its name in errors; by default its last three components.
      most_bytes: maximum length, since a hostile file may claim any length.

    Raises:
      Damaged: the file does not exist, or is longer.
      StorageError: reading failed.
    """
    shown = name or object_name(path)
    nbytes = length(path, shown)
    if most_bytes is not None and nbytes > most_bytes:
        raise Damaged(shown, f"at most {most_bytes} bytes", f"{nbytes} bytes")
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise Damaged(shown, "a file", "no such file") from error
    except OSError as error:
        raise unreadable(path, error) from error


def listing(path: Path) -> list[str]:
    """Returns the names in a directory.

    Raises:
      StorageError: listing failed.
    """
    with typed_errors(path, "list it"):
        return os.listdir(path)


def unreadable(path: os.PathLike[str] | str, error: OSError, action: str = "read") -> StorageError:
    """Returns the error for an existing file that cannot be read."""
    found = os.strerror(error.errno) if error.errno else error
    return StorageError(
        f"{path}: expected to {action}, found {found}; check the file system and its permissions, "
        "then try again"
    )


def length(path: Path, name: str) -> int:
    """Returns the length of a file in bytes.

    Args:
      path: the file.
      name: its name in errors.

    Raises:
      Damaged: the file does not exist, or is not a regular file: reading a pipe would block.
      StorageError: the length cannot be determined.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(name, "a file", "no such file") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(name, "a file", "something other than a file")
    return found.st_size


def object_name(path: PurePath | str, components: int = 3) -> str:
    """Returns the last components of a path: enough to find it in a checkpoint directory."""
    parts = path.split("/") if isinstance(path, str) else path.parts
    first = max(0, len(parts) - components)
    if first and parts[first - 1] == names.COMPACTED:
        first -= 1  # Not the resolved path.
    return "/".join(parts[first:])


def tree_bytes(directory: Path) -> int:
    """Returns the total size of files below a directory; tolerates concurrent removals."""
    total = 0
    for folder, _, inside in os.walk(directory):
        for name in inside:
            with contextlib.suppress(OSError):  # Deleted concurrently, or unreadable.
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def free_bytes(path: Path) -> int:
    """Bytes that an unprivileged process may still write on the file system of ``path``."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
