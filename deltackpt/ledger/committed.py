# SPDX-License-Identifier: Apache-2.0
"""Presents a bucket's committed contents like a directory; readers need not know the journal.

The digests of all files of a step are one object, so names and lengths cost no request. Every
object that is read completely is verified.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import google_crc32c

from deltackpt.errors import Damaged, StorageError
from deltackpt.format import naming
from deltackpt.ledger.entries import COMMIT, Hidden, ObjectKey
from deltackpt.ledger.view import JournalView
from deltackpt.resources.runtime import Runtime
from deltackpt.storage import digests, posix
from deltackpt.storage.digests import Digest
from deltackpt.storage.store import (
    DirIdentity,
    Missing,
    ReadOnlyStore,
    StorePath,
    first_byte,
    split,
)

#: Larger files are uploaded as several objects of this size below ``SEGMENTS``: services limit the
#: size of a single upload, and no process should hold a whole object.
SEGMENT_BYTES = 32 << 20
SEGMENTS = "segments"
#: Number of steps whose digests are cached: more than a chain has.
_KEPT_UNITS = 512
#: Number of concurrent downloads.
_FETCHERS = 4
_T = TypeVar("_T")


class _Unit(NamedTuple):
    """The files of a unit, which stay as they are."""

    prefix: str
    digests: Mapping[str, Digest]
    segmented: Sequence[str]  # Names of the files that are stored in segments.


def object_name(name: str, file: Digest, number: int) -> str:
    """Returns the name of one of a file's objects, below its prefix."""
    return name if file.length <= SEGMENT_BYTES else f"{SEGMENTS}/{name}/{number:06}"


class CommittedStore(ReadOnlyStore):
    """A read-only store of the contents that a journal names; thread-safe."""

    def __init__(
        self,
        journal: JournalView,
        *,
        hidden: Callable[[], Hidden] = frozenset,
        refresh: bool = True,
    ):
        """Reads what a journal names, without the ``hidden`` units; sends no request yet.

        Without ``refresh``, newer journal entries are not read.
        """
        self._journal = journal
        self._hidden = hidden
        self._refresh = refresh
        self._units: dict[str, _Unit] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """See ``Store``."""
        return str(self._journal.root)

    def get(self, key: str) -> bytes:
        """See ``Store``; raises Damaged if the object differs from what was committed."""
        prefix, name, digest = self._file(key)
        if digest.length <= SEGMENT_BYTES:
            at = self._at(prefix, name)
            data = self._read_committed(prefix, key, lambda: at.store.get(at.key))
        else:
            data = bytearray(digest.length)
            self.read_into(key, 0, [memoryview(data)])
            data = bytes(data)
        digests.check_bytes(data, digest, key)
        return data

    def read_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``; callers verify ranges with the checksums of their chunks."""
        prefix, name, digest = self._file(key)
        wanted = sum(buffer.nbytes for buffer in buffers)
        first = first_byte(key, start, wanted, digest.length, whole=whole)
        for number, at_byte, inside in split(first, buffers, count(SEGMENT_BYTES, SEGMENT_BYTES)):
            at = self._at(prefix, object_name(name, digest, number))
            begin = at_byte - number * SEGMENT_BYTES
            read = functools.partial(at.store.read_into, at.key, begin, inside)
            self._read_committed(prefix, key, read)

    def length(self, key: str) -> int:
        """See ``Store``."""
        return self._file(key)[2].length

    def version(self, key: str) -> Hashable:
        """See ``Store``."""
        prefix, name, digest = self._file(key)
        return prefix, name, digest[:3]

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``."""
        return sorted(key for key in self._below(folder, deep=True) if key > after)

    def folders(self, folder: str) -> list[str]:
        """See ``Store``; the top-level folders are listed again each time."""
        inside = f"{folder}/" if folder else ""
        below = (key.removeprefix(inside) for key in self._below(folder, deep=False))
        return sorted({key.partition("/")[0] for key in below if "/" in key})

    def _below(self, folder: str, *, deep: bool) -> Iterator[str]:
        """Keys below a folder; those of files in units below it only if ``deep``, else folders."""
        inside = f"{folder}/" if folder else ""
        for unit in self.units(refresh=not folder):
            own = f"{unit.name}/"
            if inside.startswith(own) or (deep and own.startswith(inside)):
                files = (own + name for name in self._open(unit).digests)
                yield from (key for key in files if key.startswith(inside))
            elif own.startswith(inside):
                yield own

    def dir_identity(self, folder: str) -> DirIdentity | None:
        """See ``Store``; a prefix belongs to one upload."""
        unit, below = _unit_of(folder)
        if unit is None:
            inside = tuple(self.folders(folder))
            return DirIdentity((self.url, folder), inside) if inside or not folder else None
        with contextlib.suppress(Missing):
            prefix = self._prefix_of(unit)
            if not below or any(name.startswith(f"{below}/") for name in self._open(unit).digests):
                return DirIdentity((prefix, below), prefix)
        return None

    def kvstore(self, folder: str) -> dict[str, Any] | None:
        """See ``Store``; files stored in segments are not available through TensorStore."""
        key, below = _unit_of(folder)
        if key is None:
            raise Missing(f"{self.url}/{folder}")
        # Queried for each chunk that TensorStore reads, although few units have such files.
        unit = self._open(key)
        if any(not below or name.startswith(f"{below}/") for name in unit.segmented):
            return None
        at = self._journal.root / unit.prefix
        return (at / below if below else at).kvstore()

    def fetch(
        self, folder: str, target: Path, wanted: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Downloads the ``wanted`` files below a folder to a directory; Damaged if one differs."""
        at = StorePath(self, folder)

        def fetch(name: str) -> None:
            path, file = target / name, self._file((at / name).key)[2]
            pieces = digests.verified_file(at / name, file, most_bytes=SEGMENT_BYTES)
            with posix.typed_errors(path, "be written"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "wb") as opened:
                    opened.writelines(pieces)

        with Runtime(_FETCHERS) as runtime:
            runtime.map(fetch, filter(wanted, at.keys()))

    def units(self, *, refresh: bool = True) -> Mapping[ObjectKey, str]:
        """Returns the prefix of each unit's files; ``refresh`` queries the journal again."""
        was_there = self._journal.known.entry.number
        state = self._journal.state() if refresh and self._refresh else self._journal.known
        if was_there and not state.entry.number:
            raise StorageError(
                f"{self.url}: expected a journal, found none because the bucket was emptied or "
                "replaced; open it again after its trainer has saved"
            )
        hidden = self._hidden()
        return {
            unit: one.prefix
            for unit, one in state.catalog.items()
            if (unit, one.save_id) not in hidden
        }

    def digests(self, unit: ObjectKey) -> dict[str, Digest]:
        """Returns the digests of all files of a unit; Missing if there is no such unit."""
        return dict(self._open(unit).digests)

    def _prefix_of(self, unit: ObjectKey) -> str:
        """The prefix of a unit, or Missing; reads the journal again for an unknown step."""
        found, prefix = self._journal.known.catalog.get(unit), None
        if found is None and self._refresh and unit.item is None:
            prefix = self.units().get(unit)
        elif found is not None and (unit, found.save_id) not in self._hidden():
            prefix = found.prefix
        if prefix is None:
            raise Missing(f"{self.url}/{unit.name}")
        return prefix

    def _at(self, prefix: str, name: str) -> StorePath:
        return self._journal.root / prefix / name

    def _file(self, key: str) -> tuple[str, str, Digest]:
        unit, name = _unit_of(key)
        with contextlib.suppress(Missing):
            if unit is not None and name in (opened := self._open(unit)).digests:
                return opened.prefix, name, opened.digests[name]
        raise Missing(f"{self.url}/{key}")

    def _open(self, unit: ObjectKey) -> _Unit:
        """Returns a unit, of which the digests are read once."""
        prefix = self._prefix_of(unit)
        known = self._units.get(prefix)
        if known is None:
            asked = f"{unit.name}/{COMMIT}"
            known = self._read_committed(prefix, asked, lambda: self._read_unit(unit, prefix))
            with self._lock:
                self._units[prefix] = known
                while len(self._units) > _KEPT_UNITS:
                    del self._units[next(iter(self._units))]
        return known

    def _read_unit(self, unit: ObjectKey, prefix: str) -> _Unit:
        at = self._at(prefix, COMMIT)
        data, known = at.store.get(at.key), self._journal.known.catalog.get(unit)
        crc32c = google_crc32c.value(data)
        if known is not None and known.prefix == prefix and known.crc32c != crc32c:
            raise Damaged(at.shown(), f"crc32c {known.crc32c:08x}", f"crc32c {crc32c:08x}")
        found = digests.digests_from(data, name=at.shown())
        segmented = [name for name, digest in found.items() if digest.length > SEGMENT_BYTES]
        return _Unit(prefix, found, segmented)

    def _read_committed(self, prefix: str, key: str, read: Callable[[], _T]) -> _T:
        """Calls ``read``; if the object is missing, names the reason: retired or damaged."""
        try:
            return read()
        except Missing as error:
            # Retired concurrently; refresh the catalog so that the next lookup sees it.
            if prefix not in self.units(refresh=True).values():
                raise Missing(f"{self.url}/{key}") from error
            raise Damaged(key, "the object as committed", error.found) from error


@functools.lru_cache(4096)
def _unit_of(key: str) -> tuple[ObjectKey | None, str]:
    """The unit that contains a key, if there is one, and the key's name below it."""
    folder, *components = key.split("/")
    item = None
    if folder == naming.COMPACTED and len(components) > 1:
        folder, item, *components = components
    step = naming.step_number(folder)
    return None if step is None else ObjectKey(step, item), "/".join(components)
