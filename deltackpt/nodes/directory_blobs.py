# SPDX-License-Identifier: Apache-2.0
"""Object storage in a directory: an object and its name are durable when a write is acknowledged.

Incoming data bypasses the page cache if the file system allows it; outgoing data goes from it to
the socket in the kernel. A killed server leaves partial objects in a folder that the next empties.
Only regular files in real folders are objects. Folders are opened one by one, each relative to its
parent, so no link below the directory is ever followed, even one that is added concurrently.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from deltackpt.errors import InUse, OutOfSpace, StorageError
from deltackpt.nodes.blobs import Incoming, OpenObject
from deltackpt.resources.host_memory import aligned_buffer
from deltackpt.storage import posix, wire
from deltackpt.storage.posix import DirectFile, DurableDir, fsync
from deltackpt.storage.store import Exists, Missing

#: Folder of incomplete objects; no key begins with it.
INCOMING = ".incoming"
#: Smaller objects cost less through the page cache.
_DIRECT_BYTES = 1 << 18
_BUFFER_BYTES = 1 << 20
#: Error numbers of opening a link, a folder or a socket as a file.
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})


class DirectoryBlobs:
    """Objects as files of a directory, whose names are their keys."""

    def __init__(self, path: Path):
        """Creates the directory if necessary, private; InUse if another server has it."""
        self.path = path
        self._allocated = 0
        self._lock = threading.Lock()
        self.directory = DurableDir(path, private=True)
        self.directory.create()
        with posix.typed_errors(path, "be made"), contextlib.ExitStack() as opened:
            #: Descriptor of the folder of incomplete objects.
            self.arriving = opened.enter_context(self.directory.opened(path / INCOMING, make=True))
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

    def receive(self, key: str, nbytes: int) -> Incoming:
        """See ``BlobStore``."""
        if _is_incoming(key):
            raise StorageError(
                f"{key}: expected a key outside {INCOMING}/; choose another one"
            ) from PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with self._lock:
            free = posix.free_bytes(self.path) - self._allocated
            if nbytes > free:
                raise OutOfSpace(
                    f"{self.path}: expected room for {nbytes:,} bytes, found {max(0, free):,}; "
                    "make room, or remove objects"
                )
            self._allocated += nbytes
        try:
            return _InFile(self, key, nbytes)
        except BaseException:
            self.give_back(nbytes)
            raise

    def find(self, key: str) -> OpenObject:
        """See ``BlobStore``."""
        if _is_incoming(key):
            raise Missing(str(self.path / key))
        path = self.path / key
        try:
            with self.directory.opened(path.parent) as folder:
                return _FromFile(path, folder)
        except Missing:
            raise
        except OSError as error:
            if _is_missing(error):
                raise Missing(str(path)) from error
            raise posix.unreadable(path, error) from error

    def keys(self, folder: str, *, after: str, most: int) -> list[str]:
        """See ``BlobStore``."""
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
            with self.directory.opened(self.path / folder) as at, os.scandir(at) as entries:
                named = [
                    f"{one.name}/" if one.is_dir(follow_symlinks=False) else one.name
                    for one in entries
                    if one.is_dir(follow_symlinks=False) or one.is_file(follow_symlinks=False)
                ]
        except OSError as error:
            if _is_missing(error):
                return
            raise posix.unreadable(self.path / folder, error, "list it") from error
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
        """See ``BlobStore``; removes folders that become empty, and links but not their targets."""
        if _is_incoming(key):
            return
        try:
            self.directory.remove_file(self.path / key)
        except OSError as error:
            if not (_is_missing(error) or isinstance(error, IsADirectoryError)):
                raise posix.unreadable(self.path / key, error, "be removed") from error

    def close(self) -> None:
        """See ``BlobStore``; the objects stay."""
        self._opened.close()

    def give_back(self, nbytes: int) -> None:
        """Reports that some bytes were written, or will not be written."""
        with self._lock:
            self._allocated -= nbytes


def _is_incoming(key: str) -> bool:
    return key.partition("/")[0] == INCOMING


def _is_missing(error: OSError) -> bool:
    """Whether there is no such folder or object; what is behind a link does not count."""
    return any(
        isinstance(one, FileNotFoundError | NotADirectoryError) for one in (error, error.__cause__)
    )


class _InFile:
    """See ``Incoming``."""

    def __init__(self, blobs: DirectoryBlobs, key: str, nbytes: int):
        self._blobs, self._path, self._nbytes = blobs, blobs.path / key, nbytes
        self._temporary, self._left = uuid.uuid4().hex, nbytes
        self._file = DirectFile(
            self._path,
            private=True,
            folder=blobs.arriving,
            name=self._temporary,
            buffer=aligned_buffer(_BUFFER_BYTES),
            cached_bytes=_DIRECT_BYTES if nbytes < _DIRECT_BYTES else 0,
        )

    def window(self) -> memoryview:
        return self._file.room()[: self._left].data

    def filled(self, nbytes: int) -> None:
        self._left -= nbytes
        self._file.advance(nbytes)

    def commit(self, *, absent: bool) -> None:
        """See ``Incoming``: its data is fsynced, then its name."""

        def named(folder: int) -> None:
            ends = {"src_dir_fd": self._blobs.arriving, "dst_dir_fd": folder}
            if absent:
                os.link(self._temporary, self._path.name, **ends, follow_symlinks=False)
                os.unlink(self._temporary, dir_fd=self._blobs.arriving)
            else:
                os.replace(self._temporary, self._path.name, **ends)
            fsync(folder)

        self._file.finish()
        self._file.sync()
        try:
            with posix.typed_errors(self._path, "write"):
                self._blobs.directory.within(self._path.parent, named)
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                raise Exists(f"{self._path}", "a file") from error
            raise
        self._end()

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._temporary, dir_fd=self._blobs.arriving)
        self._end()

    def _end(self) -> None:
        self._blobs.give_back(self._nbytes)
        self._nbytes = 0  # It may be discarded after its commit has failed.
        self._file.close()


class _FromFile:
    """See ``OpenObject``; what replaces or removes the object leaves the open file as it is."""

    def __init__(self, path: Path, folder: int):
        try:
            # Not through a link, and without waiting for who writes to a pipe.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._file = open(os.open(path.name, flags, dir_fd=folder), "rb", 0)
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
        return os.sendfile(connection.fileno(), self._file.fileno(), start, nbytes)

    def close(self) -> None:
        self._file.close()
