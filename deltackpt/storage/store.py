# SPDX-License-Identifier: Apache-2.0
"""Key-value stores: everything that readers need from a file system or a bucket.

Readers use a ``StorePath``: a store and a key in it. They therefore work with any kind of
store. Guarantees are those that every kind provides: a ``put`` is atomic, at most one
of several concurrent write-if-absent requests succeeds, and a written object is visible at once.
Stores cannot rename, link, lock or append.

Keys are names joined with "/", without a trailing "/" for folders; the store itself is "".
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import posixpath
import stat
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from deltackpt.errors import Damaged, StorageError
from deltackpt.format.records import MOST_BYTES
from deltackpt.storage import posix
from deltackpt.storage.posix import DurableDir

#: Timeout of a bucket request, unless another is set: 64 MiB take a second.
DEADLINE_SECS = 60.0


class Missing(StorageError):
    """No object exists under a key; readers describe what they expected."""

    def __init__(self, where: str, found: str = "no such file"):
        self.where, self.found = where, found
        super().__init__(f"{where}: expected an object, found {found}; check what removed it")

    def __reduce__(self):
        return type(self), (self.where, self.found)


class Exists(StorageError):
    """A key was expected to be absent, but an object exists.

    It may be the caller's own: after a lost answer, the retry finds the first write.
    """

    def __init__(self, where: str, found: str = "an object"):
        self.where, self.found = where, found
        super().__init__(
            f"{where}: expected nothing there, found {found}; check which program wrote it"
        )

    def __reduce__(self):
        return type(self), (self.where, self.found)


class Unanswered(StorageError):
    """No answer in time, or a transient error: the request may or may not have been executed."""


class Refused(StorageError):
    """The store rejected the request: credentials, policies, or a missing bucket."""


class DirIdentity(NamedTuple):
    """Identity of a folder, to distinguish it from a replacement."""

    identity: Hashable  # Stays while contents change; may be reused after the folder is removed.
    version: Hashable  # Changes with the folder's own entries.

    @classmethod
    def from_stat(cls, found: os.stat_result) -> DirIdentity:
        """Returns the identity of a local directory."""
        return cls((found.st_dev, found.st_ino), found.st_ctime_ns)

    def same(self, other: DirIdentity | None) -> bool:
        """Returns whether another one belongs to the same folder."""
        return other is not None and self.identity == other.identity


class Store(Protocol):
    """Objects by key; thread-safe. A method that needs an object raises ``Missing`` without it.

    A store that only has objects may inherit ``folders``, ``dir_identity`` and ``kvstore``.
    An object that exists but cannot be read or written raises a ``StorageError`` with its cause.
    """

    @property
    def url(self) -> str:
        """Location of the store, for errors and to open it in another process."""
        ...

    def get(self, key: str) -> bytes:
        """Returns the bytes under a key."""
        ...

    def read_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """Fills writable buffers in order with bytes, beginning at ``start``.

        A negative ``start`` counts from the end. ``Damaged`` is raised if the object is shorter, or
        if it is longer and ``whole`` requires that it ends with them.
        """
        ...

    def length(self, key: str) -> int:
        """Returns the length of an object in bytes."""
        ...

    def version(self, key: str) -> Hashable:
        """Returns a value that changes with the object."""
        ...

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """Writes an object atomically and durably; an existing one is replaced.

        With ``absent``, an existing one raises ``Exists`` instead.
        """
        ...

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """Returns all keys below a folder, recursively, that sort after ``after``, ascending."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Returns the names of the folders one level below, ascending; none if it is missing.

        Empty folders are included if the store has them.
        """
        inside = f"{folder}/" if folder else ""
        below = (key.removeprefix(inside).partition("/") for key in self.keys(folder))
        return sorted({name for name, slash, _ in below if slash})

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; missing ones are ignored."""
        ...

    def dir_identity(self, folder: str) -> DirIdentity | None:
        """Returns the identity of a folder; None if it does not exist.

        The default derives it from the objects, so it is equal for equal bytes.
        """
        found = self.keys(folder)
        if not found:
            return None
        with contextlib.suppress(Missing):
            return DirIdentity((folder, self.version(found[0])), tuple(found))
        return None

    def kvstore(self, folder: str) -> dict[str, Any] | None:
        """Returns a folder as a TensorStore kvstore; None if TensorStore cannot read it."""
        return None


class ReadOnlyStore(Store, Protocol):
    """A store whose objects are written in another way."""

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """Not supported."""
        raise StorageError(f"{self.url}/{key}: expected only reads, found a write")

    def delete(self, keys: Iterable[str]) -> None:
        """Not supported."""
        raise StorageError(f"{self.url}: expected only reads, found a deletion of {[*keys]}")


class StorePath(NamedTuple):
    """A location in a store: an object or a folder."""

    store: Store
    key: str

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self.store, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}" if self.key else self.store.url

    def __fspath__(self) -> str:
        """Returns its local path, for code that needs files."""
        if not isinstance(self.store, FileStore):
            raise TypeError(f"{self}: expected a file, found an object of another store")
        return str(self)

    @property
    def name(self) -> str:
        """The last component of its key, or of the store's location."""
        return posixpath.basename(self.key or self.store.url)

    @property
    def parent(self) -> StorePath:
        """The folder that contains it; for a file system's store, its parent directory."""
        if self.key:
            return StorePath(self.store, posixpath.dirname(self.key))
        return store_path(Path(self).parent)

    def below(self, folder: StorePath) -> str:
        """Returns the path relative to a folder above it."""
        return str(self).removeprefix(f"{folder}/")

    def shown(self, components: int = 3) -> str:
        """Returns the last components of its location, which suffice to find it."""
        return posix.object_name(str(self), components)

    def read(self, shown: str | None = None, *, most_bytes: int | None = MOST_BYTES) -> bytes:
        """Reads a whole object; ``Damaged`` if missing, or longer than ``most_bytes``.

        ``shown`` is its name in errors; by default its last three components.
        """
        shown = shown or self.shown()
        with self.missing_is_damage(shown):
            # A store that reads an object to learn its length is asked only once.
            at_once = getattr(self.store, "reads_to_measure", False)
            data = self.store.get(self.key) if at_once else None
            nbytes = self.store.length(self.key) if data is None else len(data)
            if most_bytes is not None and nbytes > most_bytes:
                raise Damaged(shown, f"at most {most_bytes} bytes", f"{nbytes} bytes")
            return self.store.get(self.key) if data is None else data

    def length(self, shown: str | None = None) -> int:
        """Returns the length of the object in bytes; ``Damaged`` if it is missing."""
        with self.missing_is_damage(shown or self.shown()):
            return self.store.length(self.key)

    @contextlib.contextmanager
    def missing_is_damage(self, shown: str) -> Iterator[None]:
        """Raises ``Damaged`` for a missing object, with the given name."""
        try:
            yield
        except Missing as error:
            raise Damaged(shown, "a file", error.found) from error

    def is_file(self) -> bool:
        """Returns whether an object exists at this location."""
        try:
            self.store.version(self.key)
        except Missing:
            return False
        except StorageError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ELOOP:
                return False
            raise
        return True

    def dir_identity(self) -> DirIdentity | None:
        """Returns the identity of the folder; None if it does not exist."""
        return self.store.dir_identity(self.key)

    def is_dir(self) -> bool:
        """Returns whether a folder exists at this location."""
        return self.dir_identity() is not None

    def exists(self) -> bool:
        """Returns whether an object or a folder exists at this location."""
        return self.is_dir() or self.is_file()

    def folders(self) -> list[str]:
        """Returns the names of the folders one level below."""
        return self.store.folders(self.key)

    def names(self) -> list[str]:
        """Returns the names of the folders and objects one level below, ascending."""
        return sorted({key.partition("/")[0] for key in self.keys()} | {*self.folders()})

    def keys(self) -> list[str]:
        """Returns the relative keys of all objects below, ascending."""
        return [StorePath(self.store, key).below(self) for key in self.store.keys(self.key)]

    def tree_bytes(self) -> int:
        """Returns the total size of all objects below; tolerates concurrent removals."""
        total, names = 0, list[str]()
        # The list of objects itself; verification reports its errors.
        with contextlib.suppress(Damaged):
            names = self.keys()
        for name in names:
            with contextlib.suppress(StorageError, Damaged):  # Removed, or unreadable.
                total += self.store.length((self / name).key)
        return total

    def versions(self) -> dict[str, Hashable]:
        """Returns a value per object below, by relative key, that changes with the object."""
        return {name: self.store.version((self / name).key) for name in self.keys()}

    def kvstore(self) -> dict[str, Any] | None:
        """Returns the folder as a TensorStore kvstore; None if TensorStore cannot read it."""
        return self.store.kvstore(self.key)


def first_byte(shown: str, start: int, wanted: int, total: int, *, whole: bool = False) -> int:
    """Returns where a range begins in an object of ``total`` bytes, for ``Store.read_into``."""
    first = start + total if start < 0 else start
    stop = first + wanted
    if first < 0 or stop > total or (whole and stop != total):
        expected = max(wanted, -start) if first < 0 else stop
        raise Damaged(shown, f"{expected} bytes", f"{total} bytes")
    return first


def fill(buffers: Iterable[memoryview], data: bytes | memoryview) -> None:
    """Copies bytes into buffers, in order."""
    left = memoryview(data)
    for buffer in buffers:
        buffer.cast("B")[:] = left[: buffer.nbytes]
        left = left[buffer.nbytes :]


def split(
    first: int, buffers: Iterable[memoryview], ends: Iterable[int]
) -> Iterator[tuple[int, int, list[memoryview]]]:
    """Divides a read at offset ``first`` over consecutive pieces, which end at ``ends``.

    Yields each piece that it reaches, by its position, with the offset of the first byte and the
    buffers to fill from there.
    """
    left = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    for number, end in enumerate(ends):
        if not left:
            return
        start, inside = first, list[memoryview]()
        while left and first < end:
            piece = left[0][: end - first]
            inside.append(piece)
            first += piece.nbytes
            if piece.nbytes < left[0].nbytes:
                left[0] = left[0][piece.nbytes :]
            else:
                del left[0]
        if inside:
            yield number, start, inside


def unanswered(url: str, action: str, deadline_secs: float) -> Unanswered:
    """Returns the error for a service that did not answer in time."""
    return Unanswered(
        f"{url}: expected to {action}, found no answer within {deadline_secs:g} s; check that the "
        "service is up, then try again"
    )


def refusal(kind: type[StorageError], url: str, action: str, message: str) -> StorageError:
    """Returns the error for an unexpected answer of a service."""
    return kind(
        f"{url}: expected to {action}, found: {message}; check the URL, the endpoint and the "
        "credentials, then try again"
    )


def untrusted(url: str, action: str) -> Refused:
    """Returns the error for a server with an untrusted certificate."""
    return Refused(
        f"{url}: expected to {action}, found a server certificate from an untrusted authority; "
        "check the endpoint, or set SSL_CERT_FILE to a file with the authority's certificate"
    )


@dataclasses.dataclass(frozen=True)
class FileStore:
    """A directory of a local or network file system."""

    path: Path

    @property
    def url(self) -> str:
        """See ``Store``: a plain path, so that errors show what users know."""
        return str(self.path)

    def get(self, key: str) -> bytes:
        """See ``Store``."""
        with self._refusals(key), open(self._name(key), "rb", 0, opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise self._no_file(key)
            return file.read()

    def read_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``; from the page cache directly into the buffers."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        with self._refusals(key):
            descriptor = _without_waiting(self._name(key), os.O_RDONLY)
            try:
                if whole or start < 0:
                    length = os.fstat(descriptor).st_size
                    start = first_byte(f"{self.path / key}", start, wanted, length, whole=whole)
                for left in buffers:
                    while left.nbytes:
                        count = os.preadv(descriptor, [left], start)
                        if count == 0:
                            expected = f"{start + left.nbytes} bytes"
                            raise Damaged(f"{self.path / key}", expected, f"{start} bytes")
                        left, start = left[count:], start + count
            finally:
                os.close(descriptor)

    def length(self, key: str) -> int:
        """See ``Store``."""
        return self._stat(key).st_size

    def next_data(self, key: str, start: int) -> int:
        """Returns where data begins at or after an offset of a file; its length if none does.

        Extending a file creates a hole, which reads as zeros. The data may begin with zeros.
        """
        with self._refusals(key), open(self._name(key), "rb", 0, opener=_without_waiting) as file:
            try:
                return os.lseek(file.fileno(), start, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    return start  # The file system does not support it, or reading fails as well.
                return max(start, os.fstat(file.fileno()).st_size)

    def version(self, key: str) -> Hashable:
        """See ``Store``."""
        found = self._stat(key)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _stat(self, key: str) -> os.stat_result:
        with self._refusals(key):
            found = os.stat(self._name(key))
        if not stat.S_ISREG(found.st_mode):
            raise self._no_file(key)
        return found

    def _no_file(self, key: str) -> Missing:
        return Missing(self._name(key), "something other than a file")

    def _name(self, key: str) -> str:
        return f"{self.path}/{key}" if key else str(self.path)

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """See ``Store``: a temporary file, fsynced, then renamed or linked."""
        path = self.path / key
        try:
            DurableDir(self.path).write(path, data, absent=absent)
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                raise Exists(f"{path}", "a file") from error
            raise

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``."""
        found = []
        for where, _, names in os.walk(self.path / folder):
            inside = Path(where).relative_to(self.path)
            found += [(inside / name).as_posix() for name in names]
        return sorted(key for key in found if key > after)

    def folders(self, folder: str) -> list[str]:
        """See ``Store``."""
        try:
            with self._refusals(folder), os.scandir(self.path / folder) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except Missing:
            return []

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store``; also removes folders that become empty."""
        for key in keys:
            with contextlib.suppress(Missing), self._refusals(key, "remove it"):
                DurableDir(self.path).remove_file(self.path / key)

    def dir_identity(self, folder: str) -> DirIdentity | None:
        """See ``Store``."""
        try:
            found = os.stat(self._name(folder))
        except OSError:  # Reading it reports the error.
            return None
        return DirIdentity.from_stat(found) if stat.S_ISDIR(found.st_mode) else None

    def kvstore(self, folder: str) -> dict[str, Any]:
        """See ``Store``."""
        return {"driver": "file", "path": f"{self.path / folder}/"}

    @contextlib.contextmanager
    def _refusals(self, key: str, action: str = "read") -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Missing(self._name(key)) from error
        except IsADirectoryError as error:
            raise self._no_file(key) from error
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise posix.unreadable(self._name(key), error, action) from error


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file without blocking if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def store_path(where: StorePath | str | os.PathLike[str]) -> StorePath:
    """Returns the ``StorePath`` of a path: a name in the store of its directory."""
    if isinstance(where, StorePath):
        return where
    path = Path(where)
    return StorePath(FileStore(path.parent), path.name)
