# SPDX-License-Identifier: Apache-2.0
"""The dense item of a base, as Orbax laid it out: values of its database and files, verified.

Orbax's data carries no checksum: the digests of the step cover it. If much of a file is wanted, the
file is read once as a whole and compared with its digest; the wanted bytes are read into their
destination, the others are discarded. If little is wanted, and the digest has checksums of blocks,
only the blocks around the wanted bytes are read and compared.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deltackpt.cached import cached_property
from deltackpt.errors import Damaged
from deltackpt.format import naming
from deltackpt.format.records import TAIL_BYTES
from deltackpt.format.row_blocks import Key
from deltackpt.reading import stored_saves
from deltackpt.reading.stored_saves import StoredSave, check_dense
from deltackpt.resources import host_memory
from deltackpt.resources.runtime import Runtime
from deltackpt.storage import digests, ocdbt
from deltackpt.storage.digests import BLOCK_BYTES, Digest, crc32c, joined
from deltackpt.storage.kv_store import reachable
from deltackpt.storage.ocdbt import ZARRAY, Extent, Index
from deltackpt.storage.store import StorePath

#: Folder of an item with files about its arrays.
ARRAY_METADATAS = "array_metadatas"
_MANIFEST = "manifest.ocdbt"
#: Files of the item that the database consists of begin so.
_OF_DATABASE = ("d/", naming.DENSE_NODES, "ocdbt.process_", _MANIFEST)
#: What one call reads; it stays in the CPU cache until it is summed, and changed by deltas.
_PIECE_BYTES = 4 << 20
_READERS = 3
#: A file is read by blocks if less than this fraction of it is wanted.
_LITTLE = 2

#: Called with a range of bytes of a value.
OnFilled = Callable[[Key, int, int], None]


def ignore_range(key: Key, start: int, stop: int) -> None:
    """Ignores ranges of bytes."""


class OrbaxValues:
    """Values and files of an item; everything that is read is verified and raises Damaged."""

    def __init__(
        self,
        item_dir: StorePath,
        expected: Callable[[], Mapping[str, Digest]] | None,
        name: str | None = None,
    ):
        """Reads nothing yet.

        ``expected`` returns the digests of the item's files; None if nothing covers them.
        """
        self.name = item_dir.shown(2) if name is None else name
        self.bytes_read = 0
        self.at = item_dir
        self._read_digests = expected
        self._sound: set[str] = set()

    def at_copy(self, item_dir: StorePath, *, verify: bool) -> OrbaxValues:
        """Returns the values of a copy of the item, which errors name as this one.

        ``verify`` compares its files with the digests of this one.
        """
        return OrbaxValues(item_dir, self._read_digests if verify else None, self.name)

    def keys(self) -> list[Key]:
        """Returns all keys of the database, and the files next to it."""
        values = self._index.values
        return [*((True, name) for name in self._files), *((False, key) for key in values)]

    def files(self, wanted: Callable[[str], bool]) -> dict[str, memoryview]:
        """Returns the wanted files next to the database, by name."""
        return {name: self._file(name) for name in self._files if wanted(name)}

    def values(self, wanted: Callable[[str], bool]) -> dict[str, memoryview]:
        """Returns the wanted values, by key; without a database, each is a file."""
        found = self.read([key for key in self.keys() if wanted(key[1])])
        return {name: data for (_, name), data in found.items()}

    def nbytes(self, key: Key) -> int | None:
        """Returns the bytes of a value in the database or directory, or None."""
        file, name = key
        if file:
            return (self.at / name).length() if name in self._files else None
        found = self._index.values.get(name)
        return None if found is None else found.nbytes

    def read(self, keys: Collection[Key]) -> dict[Key, memoryview]:
        """Returns the values of some keys, in their own memory; missing ones are omitted."""
        into: dict[Key, np.ndarray] = {}
        found: dict[Key, memoryview] = {}
        present = set(self._files)
        for file, key in keys:
            if file and key in present:
                found[True, key] = self._file(key)
            elif not file and (value := self._index.values.get(key)) is not None:
                into[False, key] = host_memory.empty_buffer((value.nbytes,), np.dtype(np.uint8))
        self.fill(into)
        return found | {key: data.data for key, data in into.items()}

    def fill(self, into: Mapping[Key, np.ndarray], on_filled: OnFilled = ignore_range) -> None:
        """Reads values into their destination, and verifies everything that they depend on.

        If only descriptions of arrays are read, which are in the database's nodes, only the
        checksums of the nodes are verified: they are used only for planning. Several threads call
        ``on_filled`` with each range of a value that was read and summed.
        """
        placed: dict[str, list[_WantedValue]] = {}
        for (file, key), out in into.items():
            value = self._file(key) if file else self._index.values.get(key)
            if isinstance(value, Extent):
                placed.setdefault(value.file, []).append(_WantedValue(value, (file, key), out))
            if value is None or value.nbytes != len(out):
                have = "none" if value is None else value.nbytes
                raise self._damage(f"{len(out)} bytes of {key}", have)
            if not isinstance(value, Extent):
                out[:] = np.frombuffer(value, np.uint8)
        if all(file or key.endswith(f"/{ZARRAY}") for file, key in into):
            return
        checked = self._expected is not None
        files = placed.keys() | (self._index.nodes.keys() - self._sound if checked else set())
        readers = {file: self._reader(file, placed.get(file, [])) for file in sorted(files)}
        work = [(reader, piece) for reader in readers.values() for piece in reader.pieces]
        with Runtime(_READERS) as runtime:
            found = runtime.map(lambda one: one[0].read(one[1], on_filled), work)
        sums: Iterator[Any] = iter(found)
        for reader in readers.values():
            reader.check([next(sums) for _ in reader.pieces])
        self.bytes_read += sum(piece.stop - piece.start for _, piece in work)
        self._sound |= {file for file, reader in readers.items() if reader.whole}

    def check_rest(self) -> None:
        """Verifies the database files that were not read, if digests name them."""
        known = self._expected or {}
        seen = self._sound.union(self._files)
        rest = {name: digest for name, digest in known.items() if name not in seen}
        for damage in digests.check_files(self.at, rest, shown=self.name):
            raise damage

    def _reader(self, file: str, values: Sequence[_WantedValue]) -> _FileReader | _BlockReader:
        shown = f"{self.name}/{file}"
        expected = None
        if self._expected is not None and file not in self._sound:
            expected = self._listed(file, shown)
            with (self.at / file).missing_is_damage(shown):
                length = (self.at / file).length(shown)
            if length != expected.length:
                raise Damaged(shown, f"{expected.length} bytes", f"{length} bytes")
            nodes = self._index.nodes.get(file, ())
            if expected.blocks:
                found = _BlockReader(self.at / file, shown, expected, values, nodes)
                # Reading by blocks copies.
                if sum(piece.stop - piece.start for piece in found.pieces) < length // _LITTLE:
                    return found
        return _FileReader(self.at / file, shown, expected, values)

    @cached_property
    def _expected(self) -> Mapping[str, Digest] | None:
        return None if self._read_digests is None else self._read_digests()

    @cached_property
    def _names(self) -> list[str]:
        return [*(self.at.keys() if self._expected is None else self._expected)]

    @property
    def _has_database(self) -> bool:
        """Whether there is a database: not if all leaves are strings or None, or files of Zarr."""
        return _MANIFEST in self._names

    @cached_property
    def _files(self) -> list[str]:
        inside = _OF_DATABASE if self._has_database else ()
        return [name for name in self._names if not name.startswith(inside)]

    def _listed(self, name: str, shown: str) -> Digest:
        assert self._expected is not None
        if (found := self._expected.get(name)) is None:
            raise Damaged(shown, "a file listed in the digests", "an unlisted file")
        return found

    def _file(self, name: str) -> memoryview:
        shown = f"{self.name}/{name}"
        data = (self.at / name).read(shown, most_bytes=None)  # Without a database, also a chunk.
        if self._expected is not None:
            digests.check_bytes(data, self._listed(name, shown), shown)
        return memoryview(data)

    @cached_property
    def _index(self) -> Index:
        if not self._has_database:
            return Index({}, {})
        try:
            return ocdbt.index(reachable(self.at))
        except (ValueError, OSError, LookupError) as error:
            raise self._damage("a database of dense leaves", str(error)) from error

    def _damage(self, expected: str, found: object) -> Damaged:
        """Returns the damage of the item, or of one of its files if the digests reveal it."""
        known = digests.check_files(self.at, self._expected or {}, shown=self.name)
        return known[0] if known else Damaged(self.name, expected, f"{found}")


def key_impls(array_metadatas: Mapping[str, Any]) -> dict[str, str]:
    """Returns PRNG implementations of typed keys by array name, from Orbax's array metadata.

    Raises KeyError, TypeError or AttributeError if the metadata are invalid.
    """
    found = {}
    for entry in array_metadatas["array_metadatas"]:
        metadata = entry["array_metadata"]
        impl = (metadata["ext_metadata"] or {}).get("random_key_impl")
        if impl is not None:
            found[str(metadata["param_name"])] = str(impl)
    return found


class _WantedValue(NamedTuple):
    """A value and its destination: (bytes,) uint8."""

    at: Extent
    key: Key
    out: np.ndarray


class _FileSpan(NamedTuple):
    """Bytes of a file that are read at once; without a value if they are not wanted."""

    start: int
    stop: int
    value: _WantedValue | None


class _FileReader:
    """Reads the wanted parts of a file; reads all of a file that has a digest.

    ``whole`` is whether ``pieces`` are all of a file that has a digest.
    """

    whole = True

    def __init__(
        self, at: StorePath, shown: str, expected: Digest | None, values: Sequence[_WantedValue]
    ):
        self._at = at
        self._shown = shown
        self._expected = expected
        self._body = 0 if expected is None else max(0, expected.length - TAIL_BYTES)
        self.pieces = [*self._pieces(values)]

    def read(self, piece: _FileSpan, on_filled: OnFilled) -> tuple[int, bytes]:
        """Reads a piece; returns the CRC32C of its bytes, and the bytes if they are of the tail."""
        value = piece.value
        if value is None:
            out = np.empty(piece.stop - piece.start, np.uint8)
        else:
            first, last = piece.start - value.at.start, piece.stop - value.at.start
            out = value.out[first:last]
        host_memory.populate(out)
        with self._at.missing_is_damage(self._shown):
            self._at.store.read_into(self._at.key, piece.start, [out.data])
        found = 0, b""
        if self._expected is not None:
            found = crc32c(out), out.tobytes() if piece.start >= self._body else b""
        if value is not None:
            on_filled(value.key, first, last)
        return found

    def check(self, sums: Sequence[tuple[int, bytes]]) -> None:
        """Compares what ``read`` returned for each piece with the digest."""
        if self._expected is None:
            return
        crc, tail = 0, b""
        for piece, (found, ending) in zip(self.pieces, sums, strict=True):
            if piece.stop <= self._body:
                crc = joined(crc, found, piece.stop - piece.start)
            tail += ending
        wanted = self._expected
        if (crc, int.from_bytes(tail, "little")) != (wanted.crc32c, wanted.tail):
            raise Damaged(
                self._shown,
                f"crc32c {wanted.crc32c:08x}, tail {wanted.tail:08x}",
                f"crc32c {crc:08x}, tail {int.from_bytes(tail, 'little'):08x}",
            )

    def _pieces(self, values: Sequence[_WantedValue]) -> Iterator[_FileSpan]:
        """Yields the whole file in order if it has a digest, else the values."""
        at = 0
        for value in sorted(values, key=lambda one: one.at.start):
            start, stop = value.at.start, value.at.start + value.at.nbytes
            if self._expected is not None:
                if not at <= start <= stop <= self._expected.length:
                    found = f"bytes {start} to {stop} of {self._expected.length}"
                    raise Damaged(self._shown, f"a value after {at}", found)
                yield from self._cut(at, start, None)
            yield from self._cut(start, stop, value)
            at = stop
        if self._expected is not None:
            yield from self._cut(at, self._expected.length, None)

    def _cut(self, start: int, stop: int, value: _WantedValue | None) -> Iterator[_FileSpan]:
        while start < stop:
            end = min(stop, start + _PIECE_BYTES)
            if start < self._body:
                end = min(end, self._body)
            yield _FileSpan(start, end, value)
            start = end


class _BlockReader:
    """Reads and verifies the blocks around the wanted parts of a file; see ``_FileReader``."""

    whole = False

    def __init__(
        self,
        at: StorePath,
        shown: str,
        expected: Digest,
        values: Sequence[_WantedValue],
        nodes: Sequence[Extent],
    ):
        self._at, self._shown, self._expected = at, shown, expected
        self._body = expected.length - TAIL_BYTES
        self._sums = np.frombuffer(expected.blocks, "<u4")
        self._values = sorted(values, key=lambda one: one.at.start)
        self._starts = [value.at.start for value in self._values]
        extents = [*(value.at for value in values), *nodes]
        self.pieces = [*self._pieces(extents)]

    def read(self, piece: _FileSpan, on_filled: OnFilled) -> None:
        """Reads a piece and verifies it; see ``OrbaxValues.fill``."""
        data = np.empty(piece.stop - piece.start, np.uint8)
        with self._at.missing_is_damage(self._shown):
            self._at.store.read_into(self._at.key, piece.start, [data.data])
        for start in range(piece.start, min(piece.stop, self._body), BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, self._body)
            found = crc32c(data[start - piece.start : stop - piece.start])
            self._check("crc32c", int(self._sums[start // BLOCK_BYTES]), found)
        if piece.stop > self._body:
            ending = data[self._body - piece.start :].tobytes()
            self._check("tail", self._expected.tail, int.from_bytes(ending, "little"))
        first = max(0, bisect.bisect_right(self._starts, piece.start) - 1)
        for value in self._values[first : bisect.bisect_left(self._starts, piece.stop)]:
            start = max(piece.start, value.at.start)
            stop = min(piece.stop, value.at.start + value.at.nbytes)
            if start < stop:
                begin, end = start - value.at.start, stop - value.at.start
                value.out[begin:end] = data[start - piece.start : stop - piece.start]
                on_filled(value.key, begin, end)

    def check(self, sums: Sequence[object]) -> None:
        """Does nothing: ``read`` verifies."""

    def _check(self, what: str, expected: int, found: int) -> None:
        if found != expected:
            raise Damaged(self._shown, f"{what} {expected:08x}", f"{what} {found:08x}")

    def _pieces(self, extents: Sequence[Extent]) -> Iterator[_FileSpan]:
        """Returns the blocks that contain some of the extents, without repetition."""
        length, at = self._expected.length, 0
        for extent in sorted(extents, key=lambda one: one.start):
            end = extent.start + extent.nbytes
            if not 0 <= extent.start <= end <= length:
                found = f"bytes {extent.start} to {end} of {length}"
                raise Damaged(self._shown, "a value within the file", found)
            stop = -(-end // BLOCK_BYTES) * BLOCK_BYTES
            # The last four bytes belong to no block.
            stop = length if stop >= self._body else stop
            start = max(at, extent.start // BLOCK_BYTES * BLOCK_BYTES)
            # Blocks begin before values: pieces as long as chains of deltas would contain none.
            size = 2 * _PIECE_BYTES
            for first in range(start, stop, size):
                yield _FileSpan(first, min(stop, first + size), None)
            at = max(at, stop)


def open_values(save: StoredSave) -> OrbaxValues:
    """Returns the dense item of a save; raises as ``check_dense`` does."""
    check_dense(save)
    if naming.DENSE_ITEM in save.head.digests:
        expected = functools.partial(_digests_in, save)
        at = save.item_dir / naming.DENSE_ITEM
        return OrbaxValues(at, expected, f"{save.name}/{naming.DENSE_ITEM}")
    own = save
    # The manifest of a compacted base does not cover the step.
    if save.compacted and not (save.step_dir / naming.STEP_DIGESTS).is_file():
        own = stored_saves.read_save(save.step_dir, save.item)
    covered = own.compacted or "step" in own.head.digests
    return item_values(save.step_dir / naming.DENSE_ITEM, own.head.files if covered else None)


def item_values(item_dir: StorePath, files: digests.Files | None) -> OrbaxValues:
    """Returns the values of an item; ``files`` is that of the manifest, None without digests."""
    expected = None if files is None else functools.partial(_digests_of, item_dir, files)
    return OrbaxValues(item_dir, expected)


def _digests_of(item_dir: StorePath, files: digests.Files) -> Mapping[str, Digest]:
    step_dir = item_dir.parent
    found = digests.parse_step_digests(lambda name: (step_dir / name).read(), files, step_dir.name)
    return _of_item(found, item_dir.name)


def _digests_in(save: StoredSave) -> Mapping[str, Digest]:
    return _of_item(digests.read_item_digests(save.item_dir, save.head), naming.DENSE_ITEM)


def _of_item(found: Mapping[str, Digest], item: str) -> dict[str, Digest]:
    prefix = f"{item}/"
    return {
        name.removeprefix(prefix): digest
        for name, digest in found.items()
        if name.startswith(prefix)
    }
