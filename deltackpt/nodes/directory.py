# SPDX-License-Identifier: Apache-2.0
"""Object storage in a directory: an object and its name are durable when a write is acknowledged.

Incoming data bypasses the page cache if the file system allows it. Outgoing data is copied from the
page cache to the socket by the kernel. A killed server leaves partial objects in a separate folder,
which the next server empties.

Only regular files in real folders are objects. Folders are opened one by one, each relative to its
parent, so no link below the directory is ever followed, even one that is added concurrently.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import socket
import stat
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from deltackpt.errors import InUse, OutOfSpace, StorageError
from deltackpt.nodes.shelves import Held, Incoming
from deltackpt.resources.memory import ALIGNMENT, aligned_buffer
from deltackpt.storage import aligned, files, wire
from deltackpt.storage.store import Exists, Missing

#: Folder of incomplete objects; no key begins with it.
INCOMING = ".incoming"
#: Smaller objects cost less through the page cache.
_DIRECT_BYTES = 1 << 18
_BUFFER_BYTES = 1 << 20
#: Retries if a folder is removed together with its last object.
_PUT_TRIES = 100
#: Error numbers of opening a link, a folder or a socket as a file.
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryShelf:
    """Objects as files of a directory, whose names are their keys."""

    def __init__(self, path: Path):
        """Creates the directory if necessary, private to its owner.

        Raises:
          InUse: another server has it.
          StorageError: it cannot be made, or be written.
        """
        self.path = path
        self._taken = 0
        self._lock = threading.Lock()
        self._buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        with files.typed_errors(path, "be made"), contextlib.ExitStack() as opened:
            files.make_durable(path, private=True)
            self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, self._root)
            self.incoming = path / INCOMING
            self.arriving = self.folder([INCOMING], make=True)
            opened.callback(os.close, self.arriving)
            try:
                fcntl.flock(self.arriving, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InUse(
                    f"{path}: expected a directory that no other server uses, found one that is "
                    "already served; use another directory, or stop that server"
                ) from error
            for name in os.listdir(self.arriving):
                os.unlink(name, dir_fd=self.arriving)
            self._opened = opened.pop_all()

    def take(self, key: str, nbytes: int) -> Incoming:
        """See ``Shelf``."""
        if _is_incoming(key):
            raise StorageError(
                f"{key}: expected a key outside {INCOMING}/; choose another one"
            ) from PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with self._lock:
            free = files.free_bytes(self.path) - self._taken
            if nbytes > free:
                raise OutOfSpace(
                    f"{self.path}: expected room for {nbytes:,} bytes, found {max(0, free):,}; "
                    "make room, or remove objects"
                )
            self._taken += nbytes
        try:
            return _InFile(self, key, nbytes)
        except BaseException:
            self.give_back(nbytes)
            raise

    def find(self, key: str) -> Held:
        """See ``Shelf``."""
        if _is_incoming(key):
            raise Missing(str(self.path / key))
        *parents, name = key.split("/")
        try:
            with self.opened(parents) as folder:
                return _FromFile(self.path / key, name, folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Missing(str(self.path / key)) from error
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise files.unreadable(self.path / key, error) from error

    def keys(self, folder: str, *, after: str, most: int) -> list[str]:
        """See ``Shelf``."""
        found = []
        if not _is_incoming(folder):
            for key in self._keys(folder, after):
                if len(found) == most:
                    break
                found.append(key)
        return found

    def _keys(self, folder: str, after: str) -> Iterator[str]:
        """Keys below a folder in their order, in which "a.b" comes before "a/b"."""
        try:
            with self.opened(folder.split("/") if folder else []) as at, os.scandir(at) as entries:
                named = [
                    f"{one.name}/" if one.is_dir(follow_symlinks=False) else one.name
                    for one in entries
                    if one.is_dir(follow_symlinks=False) or one.is_file(follow_symlinks=False)
                ]
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise files.unreadable(self.path / folder, error, "list it") from error
        inside = f"{folder}/" if folder else ""
        for name in sorted(named):
            key = inside + name
            if _is_incoming(key) or not wire.is_key(name.rstrip("/")):
                continue
            if not name.endswith("/"):
                if key > after:
                    yield key
            elif key > after or after.startswith(key):
                yield from self._keys(key[:-1], after)

    def delete(self, key: str) -> None:
        """See ``Shelf``; also removes folders that become empty. Removes a link, not its target."""
        if _is_incoming(key):
            return
        *parents, name = key.split("/")
        try:
            with self.opened(parents) as folder:
                os.unlink(name, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        except OSError as error:
            raise files.unreadable(self.path / key, error, "be removed") from error
        with contextlib.suppress(OSError):  # Something else is in it.
            while parents:
                emptied = parents.pop()
                with self.opened(parents) as folder:
                    os.rmdir(emptied, dir_fd=folder)

    def close(self) -> None:
        """See ``Shelf``; the objects stay."""
        self._opened.close()

    def folder(self, names: Sequence[str], *, make: bool = False) -> int:
        """Opens a folder below the directory without following links; the caller closes it.

        Args:
          names: names of the folders on the path.
          make: whether to create missing folders, durably.

        Raises:
          OSError: it does not exist, or is a link.
        """
        found = os.dup(self._root)
        try:
            for name in names:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=found)
                        files.fsync(found)
                inner = os.open(name, _FOLDER, dir_fd=found)
                os.close(found)
                found = inner
        except BaseException:
            os.close(found)
            raise
        return found

    @contextlib.contextmanager
    def opened(self, names: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """Context manager of ``folder``."""
        found = self.folder(names, make=make)
        try:
            yield found
        finally:
            os.close(found)

    def buffer(self) -> np.ndarray:
        """Returns memory for direct writes; return it with ``keep``."""
        with contextlib.suppress(queue.Empty):
            return self._buffers.get_nowait()
        return aligned_buffer(_BUFFER_BYTES)

    def keep(self, buffer: np.ndarray) -> None:
        """Keeps a buffer for the next object."""
        self._buffers.put(buffer)

    def give_back(self, nbytes: int) -> None:
        """Reports that some bytes were written, or will not be written."""
        with self._lock:
            self._taken -= nbytes


def _is_incoming(key: str) -> bool:
    return key.partition("/")[0] == INCOMING


class _InFile:
    """See ``Incoming``: whole buffers are written as they fill."""

    def __init__(self, shelf: DirectoryShelf, key: str, nbytes: int):
        self._shelf, self._key, self._nbytes = shelf, key, nbytes
        self._path, self._temporary = shelf.path / key, uuid.uuid4().hex
        self._received = self._in_buffer = self._written = 0
        with files.typed_errors(self._path, "write"):
            direct = nbytes >= _DIRECT_BYTES
            self._descriptor, self._direct = _created(self._temporary, shelf.arriving, direct)
        self._buffer: np.ndarray | None = shelf.buffer()

    def window(self) -> memoryview:
        """See ``Incoming``."""
        assert self._buffer is not None
        left = min(_BUFFER_BYTES - self._in_buffer, self._nbytes - self._received)
        return self._buffer.data[self._in_buffer : self._in_buffer + left]

    def filled(self, nbytes: int) -> None:
        """See ``Incoming``."""
        self._received += nbytes
        self._in_buffer += nbytes
        if self._in_buffer == _BUFFER_BYTES or self._received == self._nbytes:
            self._write()

    def commit(self, *, absent: bool) -> None:
        """See ``Incoming``: its data is fsynced, then its name."""
        *parents, name = self._key.split("/")
        with files.typed_errors(self._path, "write"):
            files.fsync(self._descriptor)
            for left in reversed(range(_PUT_TRIES)):
                try:
                    with self._shelf.opened(parents, make=True) as folder:
                        self._name(name, folder, absent=absent)
                        files.fsync(folder)
                    break
                except FileNotFoundError:
                    # Another thread removed the last object of the folder, and so the folder.
                    if not left:
                        raise
        self._end()

    def _name(self, name: str, folder: int, *, absent: bool) -> None:
        between = {"src_dir_fd": self._shelf.arriving, "dst_dir_fd": folder}
        if not absent:
            return os.replace(self._temporary, name, **between)
        try:
            os.link(self._temporary, name, **between, follow_symlinks=False)
        except FileExistsError as error:
            raise Exists(f"{self._path}: expected nothing there, found a file") from error
        os.unlink(self._temporary, dir_fd=self._shelf.arriving)

    def discard(self) -> None:
        """See ``Incoming``."""
        with contextlib.suppress(OSError):
            os.unlink(self._temporary, dir_fd=self._shelf.arriving)
        self._end()

    def _end(self) -> None:
        if self._buffer is not None:
            os.close(self._descriptor)
            self._shelf.keep(self._buffer)
            self._shelf.give_back(self._nbytes)
            self._buffer = None

    def _write(self) -> None:
        assert self._buffer is not None
        with files.typed_errors(self._path, "write"):
            if not self._direct:
                data = self._buffer[: self._in_buffer]
                aligned.write_all(self._descriptor, data, self._written)
            else:
                # Whole blocks; what is too much of the last one is cut off.
                blocks = -(-self._in_buffer // ALIGNMENT) * ALIGNMENT
                aligned.write_aligned(self._descriptor, self._buffer[:blocks], self._written)
                if blocks != self._in_buffer:
                    os.ftruncate(self._descriptor, self._nbytes)
        self._written += self._in_buffer
        self._in_buffer = 0


def _created(name: str, folder: int, direct: bool) -> tuple[int, bool]:
    """A new file, and whether it is written past the page cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    if direct:
        try:
            aligned.check_alignment(descriptor)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
            return descriptor, True
        except OSError as error:
            if error.errno not in aligned.REFUSED:
                os.close(descriptor)
                raise
    return descriptor, False


class _FromFile:
    """See ``Held``; what replaces or removes the object leaves the open file as it is."""

    def __init__(self, path: Path, name: str, folder: int):
        try:
            # Not through a link, and without waiting for who writes to a pipe.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._file = open(
                name, "rb", 0, opener=lambda name, _: os.open(name, flags, dir_fd=folder)
            )
            found = os.fstat(self._file.fileno())
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            raise Missing(str(path), "not a file, but another kind of entry") from error
        if not stat.S_ISREG(found.st_mode):
            self._file.close()
            raise Missing(str(path), "not a file, but another kind of entry")
        self.nbytes = found.st_size
        self.version = f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"

    def send(self, connection: socket.socket, start: int, nbytes: int) -> int:
        """See ``Held``."""
        return os.sendfile(connection.fileno(), self._file.fileno(), start, nbytes)

    def close(self) -> None:
        """See ``Held``."""
        self._file.close()
