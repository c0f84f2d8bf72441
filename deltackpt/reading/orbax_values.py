# SPDX-License-Identifier: Apache-2.0
"""The dense item of a base, as Orbax laid it out: values of its database and files, verified.

Orbax's data carries no checksum: the digests of the step cover it. Every file that a value is taken
from is read once, as a whole: the wanted bytes into their final place, the others past it, all of
them compared with the file's digest.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format import names
from deltackpt.format.dense_blocks import Key
from deltackpt.reading.saves import StoredSave, check_dense
from deltackpt.resources import memory, pages
from deltackpt.storage import digests, ocdbt_index
from deltackpt.storage.crc import crc32c, joined
from deltackpt.storage.digests import TAIL_BYTES, Digest
from deltackpt.storage.kv_store import reachable
from deltackpt.storage.ocdbt import ZARRAY
from deltackpt.storage.ocdbt_index import Extent, Index
from deltackpt.storage.store import Spot

#: Files of the item that the database consists of begin so.
_OF_DATABASE = ("d/", names.DENSE_NODES, "ocdbt.process_", "manifest.ocdbt")
#: What one call reads.
_PIECE_BYTES = 8 << 20
_READERS = 3

#: Called with a range of bytes of a value.
OnFilled = Callable[[Key, int, int], None]


def nobody(key: Key, start: int, stop: int) -> None:
    """Nobody waits for ranges of bytes."""


class OrbaxValues:
    """Values and files of an item.

    Attributes:
      name: how errors name it.
    """

    def __init__(
        self,
        item_dir: Spot,
        expected: Callable[[], Mapping[str, Digest]] | None,
        name: str | None = None,
    ):
        """Reads nothing yet.

        Args:
          item_dir: of the item.
          expected: digests of its files, by their paths below it; None where nothing covers them.
          name: how errors name it; that of the step and its own by default.
        """
        self.name = item_dir.shown(2) if name is None else name
        self._item_dir = item_dir
        self._read_digests = expected
        self._sound: set[str] = set()

    @property
    def at(self) -> Spot:
        """Where it is."""
        return self._item_dir

    def keys(self) -> list[Key]:
        """All keys of the database, and the files beside it."""
        values = self._index.values
        return [*((True, name) for name in self._files), *((False, key) for key in values)]

    def nbytes(self, key: Key) -> int | None:
        """Bytes of a value, as the database or the folder has it; None where there is none."""
        file, name = key
        if file:
            return (self._item_dir / name).length() if name in self._files else None
        found = self._index.values.get(name)
        return None if found is None else found.nbytes

    def read(self, keys: Collection[Key]) -> dict[Key, memoryview]:
        """The values of some keys, in memory of their own; those that there are.

        Raises:
          Damaged: as ``fill``.
        """
        into: dict[Key, np.ndarray] = {}
        found: dict[Key, memoryview] = {}
        present = set(self._files)
        for file, key in keys:
            if file and key in present:
                found[True, key] = self._file(key)
            elif not file and (value := self._index.values.get(key)) is not None:
                into[False, key] = memory.empty_buffer((value.nbytes,), np.dtype(np.uint8))
        self.fill(into)
        return found | {key: data.data for key, data in into.items()}

    def fill(self, into: Mapping[Key, np.ndarray], on_filled: OnFilled = nobody) -> None:
        """Reads values to where they are wanted, and verifies all that they depend on.

        The descriptions of arrays alone, which stand in the database's nodes, come with no more
        than the checksums of these: to plan by. What is then read is verified with the nodes.

        Args:
          into: (bytes,) uint8, of each value that is wanted.
          on_filled: called with each range of a value that was read, and whose sum is taken; from
            several threads.

        Raises:
          Damaged: a value is missing, or of another length; a file is missing or altered.
        """
        placed: dict[str, list[_Wanted]] = {}
        for (file, key), out in into.items():
            value = self._file(key) if file else self._index.values.get(key)
            if isinstance(value, Extent):
                placed.setdefault(value.file, []).append(_Wanted(value, (file, key), out))
            if value is None or value.nbytes != len(out):
                have = "none" if value is None else value.nbytes
                raise self._damage(f"{len(out)} bytes of {key}", have)
            if not isinstance(value, Extent):
                out[:] = np.frombuffer(value, np.uint8)
        if all(file or key.endswith(f"/{ZARRAY}") for file, key in into):
            return
        checked = self._expected is not None
        files = placed.keys() | (self._index.nodes - self._sound if checked else set())
        readers = [self._reader(file, placed.get(file, [])) for file in sorted(files)]
        work = [(reader, piece) for reader in readers for piece in reader.pieces]
        with concurrent.futures.ThreadPoolExecutor(_READERS, "deltackpt-dense") as pool:
            sums = iter(pool.map(lambda one: one[0].read(one[1], on_filled), work))
            for reader in readers:
                reader.check([next(sums) for _ in reader.pieces])
        self._sound |= files

    def check_rest(self) -> None:
        """Checks the files of the database that nothing was read of, where digests name them.

        Raises:
          Damaged: the first that is missing or altered.
        """
        known = self._expected or {}
        seen = self._sound.union(self._files)
        rest = {name: digest for name, digest in known.items() if name not in seen}
        for damage in digests.check_files(self._item_dir, rest, shown=self.name):
            raise damage

    def _reader(self, file: str, values: Sequence[_Wanted]) -> _FileReader:
        shown = f"{self.name}/{file}"
        expected = None
        if self._expected is not None and file not in self._sound:
            expected = self._expected.get(file)
            if expected is None:
                raise Damaged(shown, "a file that the digests name", "one that they do not")
            with (self._item_dir / file).missing_is_damage(shown):
                length = (self._item_dir / file).length(shown)
            if length != expected.length:
                raise Damaged(shown, f"{expected.length} bytes", f"{length} bytes")
        return _FileReader(self._item_dir / file, shown, expected, values)

    @functools.cached_property
    def _expected(self) -> Mapping[str, Digest] | None:
        return None if self._read_digests is None else self._read_digests()

    @functools.cached_property
    def _files(self) -> list[str]:
        """Files beside the database."""
        found = self._item_dir.keys() if self._expected is None else self._expected
        return [name for name in found if not name.startswith(_OF_DATABASE)]

    def _file(self, name: str) -> memoryview:
        """The bytes of a file beside the database."""
        shown = f"{self.name}/{name}"
        data = (self._item_dir / name).read(shown)
        if self._expected is not None:
            digests.check_bytes(data, self._expected[name], shown)
        return memoryview(data)

    @functools.cached_property
    def _index(self) -> Index:
        try:
            return ocdbt_index.index(reachable(self._item_dir))
        except (ValueError, OSError, LookupError) as error:
            raise self._damage("a database of dense leaves", str(error)) from error

    def _damage(self, expected: str, found: object) -> Damaged:
        """What is wrong with the item: with one of its files where the digests know that."""
        known = digests.check_files(self._item_dir, self._expected or {}, shown=self.name)
        return known[0] if known else Damaged(self.name, expected, f"{found}")


class _Wanted(NamedTuple):
    """A value, and where it is wanted: (bytes,) uint8."""

    at: Extent
    key: Key
    out: np.ndarray


class _Piece(NamedTuple):
    """Bytes of a file that are read at once; of no value where nobody wants them."""

    start: int
    stop: int
    value: _Wanted | None


class _FileReader:
    """Reads what is wanted of a file; of one that has a digest all that is in it."""

    def __init__(
        self,
        at: Spot,
        shown: str,
        expected: Digest | None,
        values: Sequence[_Wanted],
    ):
        """Reads nothing yet."""
        self._at = at
        self._shown = shown
        self._expected = expected
        self._body = 0 if expected is None else max(0, expected.length - TAIL_BYTES)
        self.pieces = [*self._pieces(values)]

    def read(self, piece: _Piece, on_filled: OnFilled) -> tuple[int, bytes]:
        """Reads a piece; see ``OrbaxValues.fill``.

        Returns:
          The CRC32C of its bytes; and those themselves where they belong to the file's tail.
        """
        value = piece.value
        if value is None:
            out = np.empty(piece.stop - piece.start, np.uint8)
        else:
            first, last = piece.start - value.at.start, piece.stop - value.at.start
            out = value.out[first:last]
        pages.populate(out)
        with self._at.missing_is_damage(self._shown):
            self._at.store.read_into(self._at.key, piece.start, [out.data])
        found = 0, b""
        if self._expected is not None:
            found = crc32c(out), out.tobytes() if piece.start >= self._body else b""
        if value is not None:
            on_filled(value.key, first, last)
        return found

    def check(self, sums: Sequence[tuple[int, bytes]]) -> None:
        """Compares what was read with the digest.

        Args:
          sums: what ``read`` returned of each piece.

        Raises:
          Damaged: it is another file.
        """
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

    def _pieces(self, values: Sequence[_Wanted]) -> Iterator[_Piece]:
        """All of the file in order where it has a digest, else the values."""
        at = 0
        for value in sorted(values, key=lambda one: one.at.start):
            start, stop = value.at.start, value.at.start + value.at.nbytes
            if self._expected is not None:
                if not at <= start <= stop <= self._expected.length:
                    found = f"bytes {start} to {stop} of {self._expected.length}"
                    raise Damaged(self._shown, f"a value behind {at}", found)
                yield from self._cut(at, start, None)
            yield from self._cut(start, stop, value)
            at = stop
        if self._expected is not None:
            yield from self._cut(at, self._expected.length, None)

    def _cut(self, start: int, stop: int, value: _Wanted | None) -> Iterator[_Piece]:
        while start < stop:
            end = min(stop, start + _PIECE_BYTES)
            if start < self._body:
                end = min(end, self._body)
            yield _Piece(start, end, value)
            start = end


def of_save(save: StoredSave) -> OrbaxValues:
    """The dense item of a save that has one.

    Raises:
      Damaged, ForeignDirectory: as ``check_dense``.
    """
    check_dense(save)
    if names.DENSE_ITEM in save.head.digests:
        expected = functools.partial(_digests_in, save)
        at = save.item_dir / names.DENSE_ITEM
        return OrbaxValues(at, expected, f"{save.name}/{names.DENSE_ITEM}")
    covered = "step" in save.head.digests
    if save.compacted:  # It says nothing of the step that it stands for.
        covered = (save.step_dir / names.STEP_DIGESTS).is_file()
    expected = functools.partial(_digests_of, save.step_dir) if covered else None
    return OrbaxValues(save.step_dir / names.DENSE_ITEM, expected)


def _digests_of(step_dir: Spot) -> Mapping[str, Digest]:
    """Digests of the item's files in a step."""
    return _of_item(digests.of_step(lambda name: (step_dir / name).read(), step_dir.name))


def _digests_in(save: StoredSave) -> Mapping[str, Digest]:
    """Digests of the item's files in a compacted base."""
    known = digests.read_item_digests(save.item_dir, save.head)
    return _of_item({name: known.digest(name) for name in known.files})


def _of_item(found: Mapping[str, Digest]) -> dict[str, Digest]:
    """Those of the item, by their paths below it."""
    prefix = f"{names.DENSE_ITEM}/"
    return {
        name.removeprefix(prefix): digest
        for name, digest in found.items()
        if name.startswith(prefix)
    }
