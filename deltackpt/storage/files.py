# SPDX-License-Identifier: Apache-2.0
"""Files and directories on a local or network file system, with typed errors."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath

from deltackpt.errors import Damaged, DeltackptError, OptionError, OutOfSpace, StorageError
from deltackpt.format import names
from deltackpt.format.records import MOST_BYTES

#: Retries if others remove a directory while it is created.
_MAKING_TRIES = 100


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
def typed_errors(
    path: os.PathLike[str], action: str, *, full: str = "free space, then try again"
) -> Iterator[None]:
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
    try:
        return os.listdir(path)
    except OSError as error:
        raise StorageError(
            f"{path}: expected to list it, found {os.strerror(error.errno or 0)}; check the path, "
            "its permissions and the file system"
        ) from error


def unreadable(path: Path | str, error: OSError, action: str = "read") -> StorageError:
    """Returns the error for an existing file that cannot be read."""
    return StorageError(
        f"{path}: expected to {action}, found {os.strerror(error.errno or 0)}; check the file "
        "system and its permissions, then try again"
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
      fsync: whether to fsync the file and the directory entry.
      absent: fail if the file exists; of several concurrent writers one succeeds.
      private: make it readable by this user only, from the first byte on.

    Raises:
      StorageError: writing failed; the cause is FileExistsError if the file exists.
    """
    temporary = temporary_beside(path)
    with typed_errors(path, "write"):
        try:
            with open(temporary, "xb", opener=opened_privately if private else None) as file:
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


def temporary_beside(path: Path) -> Path:
    """Returns a random temporary name for ``path`` that no other writer uses or can guess."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def opened_privately(path: str, flags: int) -> int:
    """Opens new files readable only by this user, for any umask."""
    return os.open(path, flags, 0o600)


def _link(temporary: Path, path: Path) -> None:
    """Gives a file its name unless the name exists."""
    os.link(temporary, path)
    os.unlink(temporary)


def make_durable(path: Path, *, private: bool = False) -> None:
    """Creates a directory and its missing parents durably.

    Args:
      path: the directory.
      private: whether only this user can access new directories; existing ones keep their mode.

    Raises:
      StorageError: the file system reported an error.
    """
    with typed_errors(path, "make a directory"):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        make_folder(path, private=private)
        for folder in missing:
            fsync_path(folder.parent)


def make_folder(path: Path, *, private: bool = False) -> None:
    """Creates a directory and its missing parents, although others may remove empty ones."""
    mode = 0o700 if private else 0o777
    for _ in range(_MAKING_TRIES):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            if private:  # mkdir creates missing parents with the umask's mode.
                for folder in reversed([one for one in path.parents if not one.exists()]):
                    folder.mkdir(mode, exist_ok=True)
            # If it is removed right after mkdir found it, mkdir reports that it is not a directory.
            return path.mkdir(mode, parents=True, exist_ok=True)
        if path.exists() and not path.is_dir():
            break
    path.mkdir(mode, parents=True, exist_ok=True)


def make_below(base: Path, path: Path, *, fsync: bool = False) -> None:
    """Creates a directory and its missing parents, but never ``base``.

    A root that was moved or removed is not recreated: it would be mistaken for the missing one.

    Args:
      base: an existing directory.
      path: a directory in it.
      fsync: whether to fsync the new names.

    Raises:
      StorageError: ``base`` does not exist, or the file system reported an error.
    """
    folders = [path, *path.parents]
    missing = [folder for folder in folders[: folders.index(base)] if not folder.is_dir()]
    with typed_errors(path, "make a directory"):
        for left in reversed(range(_MAKING_TRIES if missing else 0)):
            try:
                for folder in reversed(missing):
                    try:
                        folder.mkdir()
                    except FileExistsError:
                        if folder.exists() and not folder.is_dir():
                            raise
                break
            except FileNotFoundError as error:
                if not base.exists():
                    raise StorageError(
                        f"{base}: expected to find the directory where it was opened, found none; "
                        "it was moved or removed: move it back, then try again"
                    ) from error
                if not left:  # Other processes remove empty directories.
                    raise
        for folder in missing if fsync else ():
            fsync_path(folder.parent)


def fsync_path(path: Path) -> None:
    """Fsyncs a file's data, or a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync(descriptor: int) -> None:
    """Fsyncs an open descriptor."""
    os.fsync(descriptor)
    # XFS after a shutdown fsyncs directories without an error, and fails only here.
    os.fstat(descriptor)


def fsync_tree(
    directory: Path, *, folders_only: bool = False, while_others_write: bool = False
) -> None:
    """Fsyncs every file and directory below ``directory``, and itself.

    Args:
      directory: the directory.
      folders_only: skip the files, which are already fsynced.
      while_others_write: whether listed entries may disappear concurrently.

    Raises:
      StorageError: the file system reported an error.
    """
    gone = (FileNotFoundError,) if while_others_write else ()
    with typed_errors(directory, "force to disk"):
        for folder, _, inside in os.walk(directory, topdown=False):
            for name in (*(() if folders_only else inside), ""):
                with contextlib.suppress(*gone):
                    fsync_path(Path(folder, name))


@contextlib.contextmanager
def opened_below(folder: Path, below: Path, *, make: bool = False) -> Iterator[int]:
    """Opens a descriptor of a folder, following no symbolic link on the path from ``below``.

    Otherwise, a user who can write into a checkpoint directory could get files outside it removed.

    Args:
      folder: the folder.
      below: a parent of it, or the folder itself; links in this path are followed.
      make: whether to make missing folders.

    Raises:
      StorageError: there is a symbolic link on the path.
      FileNotFoundError, NotADirectoryError: the folder does not exist.
    """
    descriptor = os.open(below, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in folder.relative_to(below).parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=descriptor)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                inner = os.open(name, flags, dir_fd=descriptor)
            except OSError as error:
                try:
                    where = os.readlink(name, dir_fd=descriptor)
                except OSError:
                    raise error from None
                raise StorageError(
                    f"{folder}: expected a folder, found that {name} is a symbolic link to "
                    f"{where}, which deletions do not follow; remove the link"
                ) from error
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def entries_below(folder: Path, below: Path) -> list[Path]:
    """Returns the contents of a folder; empty if it is missing or behind a link."""
    try:
        with opened_below(folder, below) as descriptor:
            return [folder / name for name in sorted(os.listdir(descriptor))]
    except OSError:
        return []


def remove_file(path: Path, below: Path) -> None:
    """Removes a file, and folders below ``below`` that become empty; see ``opened_below``.

    Raises:
      OSError: it does not exist, or removing it failed.
    """
    try:
        with opened_below(path.parent, below) as folder:
            os.unlink(path.name, dir_fd=folder)
    finally:
        for parent in path.relative_to(below).parents[:-1]:
            remove_empty(below / parent, below)


def remove_empty(folder: Path, below: Path) -> None:
    """Removes a folder below another one if it is empty; see ``opened_below``."""
    with contextlib.suppress(OSError), opened_below(folder.parent, below) as parent:
        os.rmdir(folder.name, dir_fd=parent)


def rename_below(source: Path, target: Path, below: Path) -> None:
    """Renames, and creates the new parent folder if it is missing; see ``opened_below``.

    Raises:
      OSError: it does not exist, or renaming it failed.
    """
    with (
        opened_below(source.parent, below) as before,
        opened_below(target.parent, below, make=True) as after,
    ):
        os.rename(source.name, target.name, src_dir_fd=before, dst_dir_fd=after)


def rename(source: Path, target: Path, *, fsync: bool, below: Path | None = None) -> None:
    """Renames, durably on request: fsyncs the entries of both directories.

    Args:
      source: the old name.
      target: the new name; its folder is created if ``below`` is given.
      fsync: whether to make the rename durable.
      below: a folder above both; links on the paths below it are not followed. None to follow all.
    """
    with typed_errors(source, f"be renamed to {target}"):
        if below is None:
            os.rename(source, target)
        else:
            rename_below(source, target, below)
        if fsync:
            fsync_path(target.parent)
            if source.parent != target.parent:
                fsync_path(source.parent)


def remove_tree(directory: Path, *, below: Path | None = None) -> None:
    """Removes a directory, file or link; does nothing if it is already gone.

    Args:
      directory: the name to remove; targets of links in it are kept.
      below: a folder above it, see ``opened_below``; by default its parent.
    """
    with (
        # rmtree does not ignore this error when it closes a directory.
        contextlib.suppress(OSError),
        opened_below(directory.parent, below or directory.parent) as folder,
    ):
        try:
            os.unlink(directory.name, dir_fd=folder)
        except (IsADirectoryError, PermissionError):
            shutil.rmtree(directory.name, ignore_errors=True, dir_fd=folder)


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
