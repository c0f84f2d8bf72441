# SPDX-License-Identifier: Apache-2.0
"""What holds bytes under keys: all that reading needs of a file system, or of a bucket.

Readers speak to a ``Spot``, which is what a path is to a file system: a store, and a key in it. So
another kind of store needs no change of theirs. Promised are the few things that every kind can
keep: a ``put`` is whole or not at all, of several that want a key to be absent one succeeds at
most, and what was put is seen from then on. There is no rename, no link, no lock and no append.

Keys are names joined with "/", those of folders have none at their end; the store itself is "".
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
from deltackpt.storage import files

#: Of one call of a bucket, unless it is opened with another: 64 MiB take a second.
DEADLINE_SECS = 60.0
#: How often a file is put anew where its folder goes while that is done.
_PUT_TRIES = 100


class Missing(StorageError):
    """There is nothing under a key; readers say what it was to be."""

    def __init__(self, where: str, found: str = "no such file"):
        self.found = found
        super().__init__(f"{where}: expected an object, found {found}; check what removed it")


class Exists(StorageError):
    """There is something under a key that was to be absent.

    It may be what was put: of a network an answer can be lost, and what is tried again finds it.
    """


class Unanswered(StorageError):
    """No answer came in time, or one that says to try again: what was asked may be done, or not."""


class Refused(StorageError):
    """The store will not do it: credentials, policies, or a bucket that is not there."""


class Stamp(NamedTuple):
    """What tells a folder from another one that takes its place.

    Attributes:
      identity: of the folder, whatever happens in it; one that is removed may leave it to another.
      version: changes with what the folder itself holds.
    """

    identity: Hashable
    version: Hashable

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        """That of a directory."""
        return cls((found.st_dev, found.st_ino), found.st_ctime_ns)

    def same(self, other: Stamp | None) -> bool:
        """Whether another one is of the same folder."""
        return other is not None and self.identity == other.identity


class Store(Protocol):
    """Bytes under keys; every method may be called from several threads.

    What is there and cannot be read or written is a ``StorageError`` with the refusal as its cause.
    """

    @property
    def url(self) -> str:
        """Where it is, for errors, and to open it again in another process."""
        ...

    def get(self, key: str) -> bytes:
        """All that is under a key.

        Raises:
          Missing: nothing is.
        """
        ...

    def read_into(
        self, key: str, start: int, parts: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """Fills parts, one after the other, with the bytes from ``start`` on.

        Args:
          key: what to read.
          start: first byte; below 0 it counts from the end.
          parts: writable bytes.
          whole: the object must end where they do.

        Raises:
          Missing: there is no such object.
          Damaged: it is shorter; or longer, where it must not be.
        """
        ...

    def length(self, key: str) -> int:
        """Bytes under a key.

        Raises:
          Missing: there are none.
        """
        ...

    def version(self, key: str) -> Hashable:
        """What changes with what is under a key.

        Raises:
          Missing: nothing is.
        """
        ...

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """Puts bytes under a key: all of them or nothing, durable when it returns.

        Args:
          key: where to; what was there is replaced.
          data: what.
          absent: only where nothing is there.

        Raises:
          Exists: something is.
        """
        ...

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """All keys below a folder, however deep, ascending; those that come after ``after``."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Names of the folders one level below a folder, ascending; of one that is not there none.

        An empty folder is one where the store has such.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Removes what is under keys; nothing is wrong where there is nothing."""
        ...

    def stamp(self, folder: str) -> Stamp | None:
        """What tells a folder from another one in its place; None where there is none."""
        ...

    def kvstore(self, folder: str) -> dict[str, Any] | None:
        """The same place as a kvstore of TensorStore; None where TensorStore cannot read it."""
        ...


class Spot(NamedTuple):
    """A place in a store: an object, or a folder of them."""

    store: Store
    key: str

    def __truediv__(self, name: str) -> Spot:
        return Spot(self.store, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}" if self.key else self.store.url

    def __fspath__(self) -> str:
        """Its path, for what works on files alone."""
        if not isinstance(self.store, FileStore):
            raise TypeError(f"{self}: expected a file, found an object of another store")
        return str(self)

    @property
    def name(self) -> str:
        """The last name in its key; that of the store where it is all of it."""
        return posixpath.basename(self.key or self.store.url)

    @property
    def parent(self) -> Spot:
        """The folder that it is in; of a store itself that of a file system."""
        if self.key:
            return Spot(self.store, posixpath.dirname(self.key))
        return spot(Path(self).parent)

    def below(self, folder: Spot) -> str:
        """Its key as seen from a folder above it."""
        return str(self).removeprefix(f"{folder}/")

    def shown(self, components: int = 3) -> str:
        """The last components of where it is: enough to find it in a checkpoint directory."""
        return files.object_name(str(self), components)

    def read(self, shown: str | None = None, *, most_bytes: int | None = MOST_BYTES) -> bytes:
        """Reads a whole object.

        Args:
          shown: how errors name it; its last three components by default.
          most_bytes: how long it may be; its length costs whoever made it nothing.

        Raises:
          Damaged: there is no such object, or it is longer.
          StorageError: it cannot be read.
        """
        shown = shown or self.shown()
        with self.missing_is_damage(shown):
            nbytes = self.store.length(self.key)
            if most_bytes is not None and nbytes > most_bytes:
                raise Damaged(shown, f"at most {most_bytes} bytes", f"{nbytes} bytes")
            return self.store.get(self.key)

    def length(self, shown: str | None = None) -> int:
        """Bytes of the object.

        Raises:
          Damaged, StorageError: as ``read``.
        """
        with self.missing_is_damage(shown or self.shown()):
            return self.store.length(self.key)

    @contextlib.contextmanager
    def missing_is_damage(self, shown: str, expected: str = "a file") -> Iterator[None]:
        """Raises Damaged, of an object of that name, where it is missing."""
        try:
            yield
        except Missing as error:
            raise Damaged(shown, expected, error.found) from error

    def is_file(self) -> bool:
        """Whether there is an object here."""
        try:
            self.store.length(self.key)
        except Missing:
            return False
        except StorageError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ELOOP:
                return False
            raise
        return True

    def stamp(self) -> Stamp | None:
        """What tells the folder here from another one; None where there is none."""
        return self.store.stamp(self.key)

    def is_dir(self) -> bool:
        """Whether there is a folder here."""
        return self.stamp() is not None

    def exists(self) -> bool:
        """Whether there is anything here."""
        return self.is_dir() or self.is_file()

    def folders(self) -> list[str]:
        """Names of the folders one level below."""
        return self.store.folders(self.key)

    def names(self) -> list[str]:
        """Names of the folders and objects one level below, ascending."""
        return sorted({key.partition("/")[0] for key in self.keys()} | {*self.folders()})

    def keys(self) -> list[str]:
        """Where all objects below are, as seen from here, ascending."""
        return [Spot(self.store, key).below(self) for key in self.store.keys(self.key)]

    def tree_bytes(self) -> int:
        """Bytes of all objects below, of which others may remove some meanwhile."""
        total = 0
        for name in self.keys():
            with contextlib.suppress(StorageError):  # It went; or nobody can read it.
                total += self.store.length((self / name).key)
        return total

    def versions(self) -> dict[str, Hashable]:
        """What changes with each object below, by where it is as seen from here.

        Raises:
          Missing: one of them was removed meanwhile.
        """
        return {name: self.store.version((self / name).key) for name in self.keys()}

    def kvstore(self) -> dict[str, Any] | None:
        """The folder as a kvstore of TensorStore; None where that cannot read it."""
        return self.store.kvstore(self.key)


def stamp_of_objects(store: Store, folder: str) -> Stamp | None:
    """The stamp of a folder that is its objects: of the same bytes it is the same."""
    found = store.keys(folder)
    if not found:
        return None
    with contextlib.suppress(Missing):
        return Stamp((folder, store.version(found[0])), tuple(found))
    return None


def unanswered(url: str, action: str, deadline_secs: float) -> Unanswered:
    """What is said of a service that did not answer in time."""
    return Unanswered(
        f"{url}: expected to {action}, found no answer within {deadline_secs:g} s; check that the "
        "service is up, then try again"
    )


def refusal(kind: type[StorageError], url: str, action: str, told: str) -> StorageError:
    """What is said of a service that answered otherwise than it should."""
    return kind(
        f"{url}: expected to {action}, found: {told}; check the URL, the endpoint and the "
        "credentials, then try again"
    )


def untrusted(url: str, action: str) -> Refused:
    """What is said of a server whose certificate is not one to be trusted."""
    return Refused(
        f"{url}: expected to {action}, found a server with a certificate of an authority that is "
        "not trusted here; check the endpoint, or name a file with the authority's certificate in "
        "SSL_CERT_FILE"
    )


@dataclasses.dataclass(frozen=True)
class FileStore:
    """A directory of a local or network file system."""

    path: Path

    @property
    def url(self) -> str:
        """See ``Store``: a path as it is, so that errors name what users know."""
        return str(self.path)

    def get(self, key: str) -> bytes:
        """See ``Store``."""
        with self._refusals(key), open(self._name(key), "rb", 0, opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise self._no_file(key)
            return file.read()

    def read_into(
        self, key: str, start: int, parts: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``; from the page cache straight into the parts."""
        wanted = sum(part.nbytes for part in parts)
        with self._refusals(key):
            descriptor = _without_waiting(self._name(key), os.O_RDONLY)
            try:
                if whole or start < 0:
                    length = os.fstat(descriptor).st_size
                    first = start + length if start < 0 else start
                    if first < 0 or (whole and first + wanted != length):
                        raise self._of_another_length(key, wanted if whole else -start, length)
                    start = first
                for part in parts:
                    start = self._fill(descriptor, key, part, start)
            finally:
                os.close(descriptor)

    def _fill(self, descriptor: int, key: str, part: memoryview, start: int) -> int:
        while part.nbytes:
            count = os.preadv(descriptor, [part], start)
            if count == 0:
                raise self._of_another_length(key, start + part.nbytes, start)
            part, start = part[count:], start + count
        return start

    def _of_another_length(self, key: str, expected: int, found: int) -> Damaged:
        return Damaged(f"{self.path / key}", f"{expected} bytes", f"{found} bytes")

    def length(self, key: str) -> int:
        """See ``Store``."""
        return self._stat(key).st_size

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
        return Missing(self._name(key), "no such file but something else of that name")

    def _name(self, key: str) -> str:
        return f"{self.path}/{key}" if key else str(self.path)

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """See ``Store``: a temporary file, forced to disk, then renamed, or linked."""
        path = self.path / key
        for left in reversed(range(_PUT_TRIES)):
            try:
                files.make_durable(path.parent)
                try:
                    return files.write_atomic(path, data, fsync=True, absent=absent)
                except StorageError as error:
                    if isinstance(error.__cause__, FileExistsError):
                        raise Exists(
                            f"{path}: expected nothing there, found a file; read who put it there"
                        ) from error
                    raise
            except StorageError as error:
                # Whoever deleted the last file of the folder removed it.
                if not left or not isinstance(error.__cause__, FileNotFoundError):
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
        """See ``Store``; folders that are empty then go as well."""
        for key in keys:
            with contextlib.suppress(Missing), self._refusals(key, "removed"):
                os.unlink(self.path / key)
            with contextlib.suppress(OSError):  # Something else is in it.
                for parent in (self.path / key).relative_to(self.path).parents[:-1]:
                    os.rmdir(self.path / parent)

    def stamp(self, folder: str) -> Stamp | None:
        """See ``Store``."""
        try:
            found = os.stat(self._name(folder))
        except OSError:  # Reading it says what is wrong.
            return None
        return Stamp.of(found) if stat.S_ISDIR(found.st_mode) else None

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
            raise files.unreadable(self._name(key), error, action) from error


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; a pipe in its place would wait for somebody to write."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def spot(where: Spot | str | os.PathLike[str]) -> Spot:
    """The spot that is meant: a path is a name in the store of its directory."""
    if isinstance(where, Spot):
        return where
    path = Path(where)
    return Spot(FileStore(path.parent), path.name)
