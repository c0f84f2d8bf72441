# SPDX-License-Identifier: Apache-2.0
"""Presents a bucket's committed contents like a directory; readers need not know the journal.

Keys are those of a directory, ``7/embeddings/manifest.0.msgpack`` and
``compacted/7/embeddings/...``; the objects' locations are looked up. The digests of all files of a
step are one object, so names and lengths cost no request, and every object that is read completely
is verified.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import google_crc32c

from deltackpt.errors import Damaged, StorageError
from deltackpt.format import names
from deltackpt.ledger.entries import COMMIT, Unit
from deltackpt.ledger.view import JournalView
from deltackpt.resources.runtime import Runtime
from deltackpt.storage import digests, files
from deltackpt.storage.digests import Digest, Streamed
from deltackpt.storage.store import Missing, Stamp, StorePath

#: Larger files are uploaded as several objects of this size below ``SEGMENTS``: services limit the
#: size of a single upload, and no process should hold a whole object.
SEGMENT_BYTES = 32 << 20
SEGMENTS = "segments"
#: Number of steps whose digests are cached: more than a chain has.
_KEPT_UNITS = 512
#: Number of concurrent downloads.
_FETCHERS = 4


def segment_name(name: str, number: int) -> str:
    """Returns the name of a file's segment, below its prefix."""
    return f"{SEGMENTS}/{name}/{number:06}"


def _first_bytes(parts: list[memoryview], most_bytes: int) -> tuple[list[memoryview], int]:
    """Removes the first bytes of some parts; returns them, and their number."""
    found, nbytes = [], 0
    while parts and nbytes < most_bytes:
        piece = parts[0][: most_bytes - nbytes]
        found.append(piece)
        nbytes += piece.nbytes
        parts[0] = parts[0][piece.nbytes :]
        if not parts[0].nbytes:
            del parts[0]
    return found, nbytes


class Catalog(Protocol):
    """The units in a store, and their locations."""

    @property
    def root(self) -> StorePath:
        """The folder to which the units' locations are relative."""
        ...

    def units(self, *, anew: bool) -> Mapping[Unit, str]:
        """Returns the prefix of each unit's files, below the root.

        Args:
          anew: whether to query the store again.
        """
        ...

    def digests(self, unit: Unit, prefix: str) -> dict[str, Digest]:
        """Returns the digests of all files of a unit.

        Raises:
          Missing: the digests do not exist.
          Damaged: the digests are altered.
        """
        ...


class Journaled:
    """The units named by a journal."""

    def __init__(self, journal: JournalView):
        """Reads the units from a journal."""
        self.journal = journal

    @property
    def root(self) -> StorePath:
        """See ``Catalog``."""
        return self.journal.root

    def units(self, *, anew: bool) -> Mapping[Unit, str]:
        """See ``Catalog``."""
        was_there = self.journal.known.entry.number
        state = self.journal.state() if anew else self.journal.known
        if was_there and not state.entry.number:
            raise StorageError(
                f"{self.root}: expected a journal, found none because the bucket was emptied or "
                "replaced; open it again after its trainer has saved"
            )
        return {unit: one.prefix for unit, one in state.standings.items()}

    def digests(self, unit: Unit, prefix: str) -> dict[str, Digest]:
        """See ``Catalog``."""
        standing = self.journal.known.standings.get(unit)
        at = self.root / prefix / COMMIT
        data = at.store.get(at.key)
        if standing is not None and standing.prefix == prefix:
            if (found := google_crc32c.value(data)) != standing.crc32c:
                raise Damaged(at.shown(), f"crc32c {standing.crc32c:08x}", f"crc32c {found:08x}")
        record = digests.digests_from(data, name=at.shown())
        return {name: record.digest(name) for name in record.files}


class Copied:
    """The units named by markers, which copies to object stores used before there were journals.

    A marker holds the digests of a unit, whose files are stored under the unit's name.
    """

    def __init__(self, root: StorePath):
        """Reads the copies in a folder."""
        self._root = root
        self._known: dict[Unit, str] | None = None

    @property
    def root(self) -> StorePath:
        """See ``Catalog``."""
        return self._root

    def units(self, *, anew: bool) -> Mapping[Unit, str]:
        """See ``Catalog``."""
        if anew or self._known is None:
            stems = (
                key.removesuffix(".msgpack").split("/")
                for key in (self._root / names.COPIED).keys()
                if key.endswith(".msgpack")
            )
            found = (_unit_of(parts) for parts in stems)
            self._known = {unit: unit.name for unit, below in filter(None, found) if not below}
        return self._known

    def digests(self, unit: Unit, prefix: str) -> dict[str, Digest]:
        """See ``Catalog``."""
        at = self._root / names.copied_name(prefix)
        record = digests.digests_from(at.store.get(at.key), name=at.shown())
        return {name: record.digest(name) for name in record.files}


class Committed:
    """A read-only store of committed contents; thread-safe."""

    def __init__(self, catalog: Catalog):
        """Reads what a catalog names; sends no request yet."""
        self._catalog = catalog
        self._digests: dict[str, dict[str, Digest]] = {}
        #: Files stored in segments, by prefix.
        self._segmented: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """See ``Store``."""
        return str(self._catalog.root)

    def get(self, key: str) -> bytes:
        """See ``Store``; raises Damaged if the object differs from what was committed."""
        prefix, name, digest = self._file(key)
        if digest.length <= SEGMENT_BYTES:
            at = self._at(prefix, name)
            data = self._asked(prefix, key, lambda: at.store.get(at.key))
        else:
            data = bytearray(digest.length)
            self.read_into(key, 0, [memoryview(data)])
            data = bytes(data)
        if digests.digest_bytes(data)[:3] != digest[:3]:
            found = f"{len(data)} other bytes"
            raise Damaged(key, f"{digest.length} bytes as committed", found)
        return data

    def read_into(
        self, key: str, start: int, parts: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``; callers verify ranges with the checksums of their chunks."""
        prefix, name, digest = self._file(key)
        wanted = sum(part.nbytes for part in parts)
        first = start + digest.length if start < 0 else start
        if first < 0 or first + wanted > digest.length or (whole and wanted != digest.length):
            raise Damaged(key, f"{wanted} bytes", f"{digest.length} bytes")
        if digest.length <= SEGMENT_BYTES:
            at = self._at(prefix, name)
            self._asked(prefix, key, lambda: at.store.read_into(at.key, first, parts))
            return
        left = [part for part in parts if part.nbytes]
        while left:
            number, inside = divmod(first, SEGMENT_BYTES)
            pieces, nbytes = _first_bytes(left, SEGMENT_BYTES - inside)
            at = self._at(prefix, segment_name(name, number))
            self._asked(
                prefix,
                key,
                lambda at=at, pieces=pieces, inside=inside: at.store.read_into(
                    at.key, inside, pieces
                ),
            )
            first += nbytes

    def length(self, key: str) -> int:
        """See ``Store``."""
        return self._file(key)[2].length

    def version(self, key: str) -> Hashable:
        """See ``Store``."""
        prefix, name, digest = self._file(key)
        return prefix, name, digest[:3]

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """Not supported: committed files never change."""
        raise StorageError(f"{self.url}/{key}: expected only reads, found a write")

    def delete(self, keys: Iterable[str]) -> None:
        """Not supported: committed files are removed through the ledger."""
        raise StorageError(f"{self.url}: expected only reads, found a deletion of {[*keys]}")

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``."""
        found = []
        for unit in self._units(anew=not folder):
            if _is_below(unit.name, folder):
                found += [f"{unit.name}/{name}" for name in self._unit_digests(unit)]
            elif _is_below(folder, unit.name):
                below = (f"{unit.name}/{name}" for name in self._unit_digests(unit))
                found += [key for key in below if _is_below(key, folder) and key != folder]
        return sorted(key for key in found if key > after)

    def folders(self, folder: str) -> list[str]:
        """See ``Store``; the top-level folders are listed again each time."""
        units = self._units(anew=not folder)
        found = set()
        for unit in units:
            if unit.name != folder and _is_below(unit.name, folder):
                found.add(_next(unit.name, folder))
            elif _is_below(folder, unit.name):
                inside = (f"{unit.name}/{name}" for name in self._unit_digests(unit))
                below = (key for key in inside if _is_below(key, folder))
                found |= {_next(key, folder) for key in below if "/" in _rest(key, folder)}
        return sorted(found)

    def stamp(self, folder: str) -> Stamp | None:
        """See ``Store``; a prefix belongs to one upload."""
        unit, below = _unit_of(folder.split("/")) or (None, "")
        if unit is None:
            inside = tuple(self.folders(folder))
            return Stamp((self.url, folder), inside) if inside or not folder else None
        prefix = self._place_of(unit)
        if prefix is None:
            return None
        if below:
            try:
                known = self._unit_digests(unit)
            except Missing:
                return None
            if not any(name.startswith(f"{below}/") for name in known):
                return None
        return Stamp((prefix, below), prefix)

    def kvstore(self, folder: str) -> dict[str, Any] | None:
        """See ``Store``; files stored in segments are not available through TensorStore."""
        unit, below = _unit_of(folder.split("/")) or (None, "")
        prefix = None if unit is None else self._place_of(unit)
        if unit is None or prefix is None:
            raise Missing(f"{self.url}/{folder}")
        # Queried for each chunk that TensorStore reads, although few units have such files.
        segmented = self._segmented.get(prefix)
        if segmented is None:
            found = self._unit_digests(unit).items()
            segmented = [name for name, digest in found if digest.length > SEGMENT_BYTES]
            self._segmented[prefix] = segmented
        if any(not below or name.startswith(f"{below}/") for name in segmented):
            return None
        at = self._at(prefix, below) if below else self._catalog.root / prefix
        return at.kvstore()

    def fetch(self, folder: str, target: Path) -> None:
        """Downloads the files of a folder to a directory, and verifies each.

        Args:
          folder: a folder in a step or a compacted base.
          target: an existing directory.

        Raises:
          Damaged: a file differs from what was committed.
          StorageError: the store reported an error, or the directory is not writable.
        """
        keys = self.keys(folder)

        def fetch(key: str) -> None:
            path = target / key.removeprefix(f"{folder}/")
            with files.typed_errors(path, "be written"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "wb") as file:
                    self._copy(key, file)

        with Runtime(_FETCHERS) as runtime:
            runtime.map(fetch, keys)

    def _copy(self, key: str, file: IO[bytes]) -> None:
        """Copies a file piece by piece, and verifies it at the end."""
        digest, start, came = self._file(key)[2], 0, Streamed()
        if digest.length <= SEGMENT_BYTES:
            file.write(self.get(key))
            return
        while start < digest.length:
            piece = bytearray(min(SEGMENT_BYTES, digest.length - start))
            self.read_into(key, start, [memoryview(piece)])
            file.write(piece)
            came.add(piece)
            start += len(piece)
        came.check(f"{self.url}/{key}", digest)

    def units(self) -> Mapping[Unit, str]:
        """Returns the prefix of each unit, queried from the catalog."""
        return self._units(anew=True)

    def digests(self, unit: Unit) -> dict[str, Digest]:
        """Returns the digests of all files of a unit.

        Raises:
          Missing: there is no such unit.
          Damaged: the digests are altered.
        """
        return dict(self._unit_digests(unit))

    def _units(self, *, anew: bool) -> Mapping[Unit, str]:
        return self._catalog.units(anew=anew)

    def _place_of(self, unit: Unit) -> str | None:
        """The prefix of a unit; queries the catalog again for an unknown step."""
        found = self._units(anew=False).get(unit)
        if found is None and unit.item is None:
            found = self._units(anew=True).get(unit)
        return found

    def _at(self, prefix: str, name: str) -> StorePath:
        return self._catalog.root / prefix / name

    def _file(self, key: str) -> tuple[str, str, Digest]:
        """The prefix, relative name and digest of a file.

        Raises:
          Missing: there is no such file.
        """
        unit, name = _unit_of(key.split("/")) or (None, "")
        prefix = None if unit is None else self._place_of(unit)
        if unit is None or prefix is None or not name:
            raise Missing(f"{self.url}/{key}")
        found = self._unit_digests(unit).get(name)
        if found is None:
            raise Missing(f"{self.url}/{key}")
        return prefix, name, found

    def _unit_digests(self, unit: Unit) -> dict[str, Digest]:
        prefix = self._place_of(unit)
        if prefix is None:
            raise Missing(f"{self.url}/{unit.name}")
        known = self._digests.get(prefix)
        if known is None:
            asked = f"{unit.name}/{COMMIT}"
            known = self._asked(prefix, asked, lambda: self._catalog.digests(unit, prefix))
            with self._lock:
                self._digests[prefix] = known
                while len(self._digests) > _KEPT_UNITS:
                    oldest = next(iter(self._digests))
                    del self._digests[oldest]
                    self._segmented.pop(oldest, None)
        return known

    def _asked(self, prefix: str, key: str, ask: Any) -> Any:
        """Requests an object below a prefix.

        Raises:
          Missing: the unit was retired since it was looked up.
          Damaged: the unit is still committed, but the object is missing.
        """
        try:
            return ask()
        except Missing as error:
            # Retired concurrently; refresh the catalog so that the next lookup sees it.
            if prefix not in self._units(anew=True).values():
                raise Missing(f"{self.url}/{key}") from error
            raise Damaged(key, "the object as committed", error.found) from error


@functools.lru_cache(4096)
def _unit_of_key(parts: tuple[str, ...]) -> tuple[Unit, str] | None:
    if parts[0] == names.COMPACTED:
        if len(parts) < 3 or (step := names.step_number(parts[1])) is None:
            return None
        return Unit(step, parts[2]), "/".join(parts[3:])
    step = names.step_number(parts[0])
    return None if step is None else (Unit(step), "/".join(parts[1:]))


def _unit_of(parts: Sequence[str]) -> tuple[Unit, str] | None:
    """The unit that contains a key, and the key's name below it; None if there is none."""
    return _unit_of_key(tuple(parts))


def _is_below(key: str, folder: str) -> bool:
    """Whether a key is a folder or is inside it."""
    return not folder or key == folder or key.startswith(f"{folder}/")


def _rest(key: str, folder: str) -> str:
    return key[len(folder) + 1 :] if folder else key


def _next(key: str, folder: str) -> str:
    return _rest(key, folder).partition("/")[0]
