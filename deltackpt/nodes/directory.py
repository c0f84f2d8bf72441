# SPDX-License-Identifier: Apache-2.0
"""A shelf that is a directory: an object is on disk, with its name, when it is answered for.

What comes goes past the page cache where the file system allows it, and from the cache into the
socket without passing this process. A server that is killed leaves parts of objects in a folder of
their own, which the next one empties.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import socket
import stat
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deltackpt.errors import InUse, OutOfSpace, StorageError
from deltackpt.nodes.shelves import Held, Incoming
from deltackpt.resources.memory import ALIGNMENT, aligned_buffer
from deltackpt.storage import aligned, files, wire
from deltackpt.storage.store import Exists, Missing

#: Where objects are until they are whole; no key begins with it.
INCOMING = ".incoming"
#: Smaller objects cost less through the page cache.
_DIRECT_BYTES = 1 << 18
_BUFFER_BYTES = 1 << 20
#: How often a folder is made anew that goes with its last object meanwhile.
_PUT_TRIES = 100


class DirectoryShelf:
    """Objects as files of a directory, whose names are their keys."""

    def __init__(self, path: Path):
        """Makes the directory where there is none, for its owner alone.

        Raises:
          InUse: another server has it.
          StorageError: it cannot be made, or be written.
        """
        self.path = path
        self._taken = 0
        self._lock = threading.Lock()
        self._buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self.incoming = path / INCOMING
        with files.typed_errors(path, "be made"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.make_durable(self.incoming)
        self._owner = os.open(self.incoming, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._owner)
            raise InUse(
                f"{path}: expected a directory that no other server has, found one that is served "
                "already; give another one, or stop that server"
            ) from error
        for name in files.listing(self.incoming):
            with files.typed_errors(self.incoming / name, "be removed"):
                os.unlink(self.incoming / name)

    def take(self, key: str, nbytes: int) -> Incoming:
        """See ``Shelf``."""
        self._check(key)
        with self._lock:
            free = files.free_bytes(self.path) - self._taken
            if nbytes > free:
                raise OutOfSpace(
                    f"{self.path}: expected room for {nbytes:,} bytes, found {max(0, free):,}; "
                    "free space, or remove objects"
                )
            self._taken += nbytes
        try:
            return _InFile(self, key, nbytes)
        except BaseException:
            self.give_back(nbytes)
            raise

    def find(self, key: str) -> Held:
        """See ``Shelf``."""
        self._check(key)
        return _FromFile(self.path / key)

    def keys(self, folder: str, *, after: str, most: int) -> list[str]:
        """See ``Shelf``."""
        found = []
        for key in _keys(self.path, folder, after):
            if len(found) == most:
                break
            found.append(key)
        return found

    def delete(self, key: str) -> None:
        """See ``Shelf``; folders that are empty then go as well."""
        self._check(key)
        try:
            os.unlink(self.path / key)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        except OSError as error:
            raise files.unreadable(self.path / key, error, "be removed") from error
        with contextlib.suppress(OSError):  # Something else is in it.
            for parent in (self.path / key).relative_to(self.path).parents[:-1]:
                os.rmdir(self.path / parent)

    def close(self) -> None:
        """See ``Shelf``; the objects stay."""
        os.close(self._owner)

    def buffer(self) -> np.ndarray:
        """Memory to write from directly; ``keep`` takes it back."""
        with contextlib.suppress(queue.Empty):
            return self._buffers.get_nowait()
        return aligned_buffer(_BUFFER_BYTES)

    def keep(self, buffer: np.ndarray) -> None:
        """Keeps memory for the next object."""
        self._buffers.put(buffer)

    def give_back(self, nbytes: int) -> None:
        """So much is written by now, or will not be."""
        with self._lock:
            self._taken -= nbytes

    def _check(self, key: str) -> None:
        if key.partition("/")[0] == INCOMING:
            raise StorageError(f"{key}: expected a key outside {INCOMING}/; choose another one")


def _keys(root: Path, folder: str, after: str) -> Iterator[str]:
    """Keys below a folder in their order, in which "a.b" comes before "a/b"."""
    try:
        with os.scandir(root / folder) as entries:
            named = [(f"{one.name}/" if one.is_dir() else one.name) for one in entries]
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise files.unreadable(root / folder, error, "list it") from error
    inside = f"{folder}/" if folder else ""
    for name in sorted(named):
        key = inside + name
        if key == f"{INCOMING}/" or not wire.is_key(name.rstrip("/")):
            continue
        if not name.endswith("/"):
            if key > after:
                yield key
        elif key > after or after.startswith(key):
            yield from _keys(root, key[:-1], after)


class _InFile:
    """See ``Incoming``: whole buffers are written as they fill."""

    def __init__(self, shelf: DirectoryShelf, key: str, nbytes: int):
        self._shelf, self._key, self._nbytes = shelf, key, nbytes
        self._path = shelf.incoming / uuid.uuid4().hex
        self._received = self._in_buffer = self._written = 0
        with files.typed_errors(self._path, "write"):
            self._descriptor, self._direct = _created(self._path, direct=nbytes >= _DIRECT_BYTES)
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
        """See ``Incoming``: its data are forced to disk, then its name."""
        path = self._shelf.path / self._key
        with files.typed_errors(path, "write"):
            files.fsync(self._descriptor)
        for left in reversed(range(_PUT_TRIES)):
            try:
                files.make_durable(path.parent)
                with files.typed_errors(path, "write"):
                    self._name(path, absent=absent)
                break
            except StorageError as error:
                # Whoever removed the last object of the folder removed it.
                if not left or not isinstance(error.__cause__, FileNotFoundError):
                    raise
        with files.typed_errors(path, "write"), contextlib.suppress(FileNotFoundError):
            files.fsync_path(path.parent)  # Or this object was removed by now, and its folder.
        self._end()

    def _name(self, path: Path, *, absent: bool) -> None:
        if not absent:
            return os.replace(self._path, path)
        try:
            os.link(self._path, path)
        except FileExistsError as error:
            raise Exists(f"{path}: expected nothing there, found a file") from error
        os.unlink(self._path)

    def discard(self) -> None:
        """See ``Incoming``."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
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


def _created(path: Path, *, direct: bool) -> tuple[int, bool]:
    """A new file, and whether it is written past the page cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
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

    def __init__(self, path: Path):
        try:
            # Not through a link, and without waiting for who writes to a pipe.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._file = open(path, "rb", 0, opener=lambda name, _: os.open(name, flags))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise Missing(str(path)) from error
        except OSError as error:
            raise files.unreadable(path, error) from error
        found = os.fstat(self._file.fileno())
        if not stat.S_ISREG(found.st_mode):
            self._file.close()
            raise Missing(str(path), "no such file but something else of that name")
        self.nbytes = found.st_size
        self.version = f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"

    def send(self, connection: socket.socket, start: int, nbytes: int) -> int:
        """See ``Held``."""
        return os.sendfile(connection.fileno(), self._file.fileno(), start, nbytes)

    def close(self) -> None:
        """See ``Held``."""
        self._file.close()
