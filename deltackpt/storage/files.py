# SPDX-License-Identifier: Apache-2.0
"""Files and directories on a local or network file system, with typed errors."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path, PurePath

from deltackpt.errors import Damaged, DeltackptError, OutOfSpace, StorageError
from deltackpt.format import names
from deltackpt.format.records import MOST_BYTES

#: How often a directory is made anew that others remove meanwhile.
_MAKING_TRIES = 100


@contextlib.contextmanager
def typed_errors(
    path: os.PathLike[str], action: str, *, full: str = "free space, then try again"
) -> Iterator[None]:
    """Turns an operating system's refusal into an error that says what to do next.

    Args:
      path: the object that was being worked on.
      action: what was being done, as in "write".
      full: what to do where there is no room; only the caller knows what it is for.
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
        raise StorageError(
            f"{path}: expected to {action}, found {os.strerror(error.errno or 0)}; check the "
            "file system and its permissions, then try again"
        ) from error


def read_bytes(
    path: Path, name: str | None = None, *, most_bytes: int | None = MOST_BYTES
) -> bytes:
    """Reads a whole file.

    Args:
      path: the file.
      name: how errors name it; its last three components by default.
      most_bytes: how long it may be; its length costs whoever made it nothing.

    Raises:
      Damaged: there is no such file, or it is longer.
      StorageError: it cannot be read.
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
    """Names in a directory.

    Raises:
      StorageError: it cannot be listed.
    """
    try:
        return os.listdir(path)
    except OSError as error:
        raise StorageError(
            f"{path}: expected to list it, found {os.strerror(error.errno or 0)}; check the path, "
            "its permissions and the file system"
        ) from error


def unreadable(path: Path | str, error: OSError, action: str = "read") -> StorageError:
    """What is raised where a file cannot be read, although it is there."""
    return StorageError(
        f"{path}: expected to {action}, found {os.strerror(error.errno or 0)}; check the file "
        "system and its permissions, then try again"
    )


def length(path: Path, name: str) -> int:
    """Bytes of a file.

    Args:
      path: the file.
      name: how errors name it.

    Raises:
      Damaged: there is no such file, or it is none that has a length: reading a pipe would wait.
      StorageError: it cannot be asked for.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(name, "a file", "no such file") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(name, "a file", "no such file but something else of that name")
    return found.st_size


def object_name(path: PurePath | str, components: int = 3) -> str:
    """The last components of a path: enough to find it in a checkpoint directory."""
    parts = path.split("/") if isinstance(path, str) else path.parts
    first = max(0, len(parts) - components)
    if first and parts[first - 1] == names.COMPACTED:
        first -= 1  # Not what it stands for.
    return "/".join(parts[first:])


def write_atomic(
    path: Path,
    data: bytes | memoryview,
    *,
    fsync: bool,
    absent: bool = False,
    private: bool = False,
) -> None:
    """Writes a file that is either absent, old or complete.

    Args:
      path: the file; its directory exists.
      data: the contents.
      fsync: whether file and directory entry are on disk before this returns.
      absent: only where there is no such file; of several that try one succeeds.
      private: readable by this user alone, from the first byte on.

    Raises:
      StorageError: the store refused; the cause is FileExistsError where there is one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    with typed_errors(path, "write"):
        try:
            with open(temporary, "wb", opener=_private if private else None) as file:
                file.write(data)
                file.flush()
                if fsync:
                    os.fsync(file.fileno())
            if absent:
                _link(temporary, path)
            else:
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if fsync:
            fsync_path(path.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _link(temporary: Path, path: Path) -> None:
    """Gives a file its name where nothing has it."""
    os.link(temporary, path)
    os.unlink(temporary)


def make_durable(path: Path) -> None:
    """Makes a directory and what is missing above it; their names are on disk afterwards."""
    with typed_errors(path, "make a directory"):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        make_folder(path)
        for folder in missing:
            fsync_path(folder.parent)


def make_folder(path: Path) -> None:
    """Makes a directory and what is missing above it, beside others who remove empty ones."""
    for _ in range(_MAKING_TRIES):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            # Where it goes a moment after mkdir found it, that is said to be no directory.
            return path.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_dir():
            break
    path.mkdir(parents=True, exist_ok=True)


def fsync_path(path: Path) -> None:
    """Forces a file's data, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync(descriptor: int) -> None:
    """Forces what is open to disk, whatever it is."""
    os.fsync(descriptor)
    # XFS that has shut down forces directories without an error, and fails here only.
    os.fstat(descriptor)


def fsync_tree(
    directory: Path, *, folders_only: bool = False, while_others_write: bool = False
) -> None:
    """Forces every file and directory below ``directory``, and itself, to disk.

    Args:
      directory: where.
      folders_only: the files are on disk already, their names may not be.
      while_others_write: whether what was listed may be gone when its turn comes.

    Raises:
      StorageError: the store refused.
    """
    gone = (FileNotFoundError,) if while_others_write else ()
    with typed_errors(directory, "force to disk"):
        for folder, _, inside in os.walk(directory, topdown=False):
            for name in (*(() if folders_only else inside), ""):
                with contextlib.suppress(*gone):
                    fsync_path(Path(folder, name))


def rename(source: Path, target: Path, *, fsync: bool) -> None:
    """Renames, durably where asked: both directories' entries are forced to disk."""
    with typed_errors(source, f"be renamed to {target}"):
        os.rename(source, target)
        if fsync:
            fsync_path(target.parent)
            if source.parent != target.parent:
                fsync_path(source.parent)


def remove_tree(directory: Path) -> None:
    """Removes a directory and what is in it; nothing is wrong where it is gone already."""
    with contextlib.suppress(OSError):  # Which it does not ignore where a directory is closed.
        shutil.rmtree(directory, ignore_errors=True)


def tree_bytes(directory: Path) -> int:
    """Bytes of all files below a directory, from which others may remove files meanwhile."""
    total = 0
    for folder, _, inside in os.walk(directory):
        for name in inside:
            with contextlib.suppress(OSError):  # It was removed; or nobody can read it.
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def free_bytes(path: Path) -> int:
    """Bytes that an unprivileged process may still write on the file system of ``path``."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
