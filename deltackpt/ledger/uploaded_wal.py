# SPDX-License-Identifier: Apache-2.0
"""The WAL of a bucket: epoch headers named by the journal, and segments in pieces.

Headers are fenced like commits. Segments are uploaded in pieces as they grow, oldest first. A
segment ends where the next piece is missing, as a torn one does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import google_crc32c

from deltackpt.errors import Damaged
from deltackpt.format import naming
from deltackpt.format.naming import PieceRange
from deltackpt.ledger.entries import State, WalRef
from deltackpt.reading.wal_locations import NAME, NBYTES, Record
from deltackpt.storage.store import (
    DirIdentity,
    Missing,
    ReadOnlyStore,
    StorePath,
    first_byte,
    split,
)

if TYPE_CHECKING:
    from deltackpt.reading.wal_topics import WalTopics

#: The epoch header, below the epoch's prefix.
HEAD = "head.msgpack"
#: Its copy.
HEAD_COPY = "head.copy.msgpack"


def pieces_at(epoch: StorePath, folder: str = "") -> dict[str, list[PieceRange]]:
    """Returns the pieces of each segment, ``<process>/<segment>``, of a WAL epoch; one listing."""
    found: dict[str, list[PieceRange]] = {}
    at = epoch / folder if folder else epoch
    for key in at.store.keys(at.key):
        segment, _, name = StorePath(at.store, key).below(epoch).rpartition("/")
        piece = naming.piece_range(name)
        if piece is not None and segment:
            found.setdefault(segment, []).append(piece)
    return found


def contiguous(pieces: Iterable[PieceRange]) -> tuple[PieceRange, ...]:
    """Returns the pieces of a segment up to the first gap; overlaps hold the same bytes."""
    found: list[PieceRange] = []
    end = 0
    for one in sorted(pieces, key=lambda one: (one.start, -one.end)):
        if one.start <= end < one.end:
            found.append(one)
            end = one.end
    return tuple(found)


def _end(pieces: Sequence[PieceRange]) -> int:
    return pieces[-1].end if pieces else 0


def _is_progress(key: str) -> bool:
    return key.rpartition("/")[2] == NAME


class UploadedWal(ReadOnlyStore):
    """A remote WAL epoch, with a directory's layout: ``<process>/<segment>``; thread-safe."""

    def __init__(self, at: StorePath):
        self._at = at
        #: The contiguous pieces of each segment.
        self._known: dict[str, tuple[PieceRange, ...]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """See ``Store``."""
        return str(self._at)

    def get(self, key: str) -> bytes:
        """See ``Store``."""
        data = bytearray(self.length(key))
        self.read_into(key, 0, [memoryview(data)])
        return bytes(data)

    def read_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``."""
        if _is_progress(key):
            at = self._at / key
            return at.store.read_into(at.key, start, buffers, whole=whole)
        pieces = self._pieces(key)
        wanted = sum(buffer.nbytes for buffer in buffers)
        first = first_byte(f"{self.url}/{key}", start, wanted, _end(pieces), whole=whole)
        for number, at_byte, inside in split(first, buffers, (one.end for one in pieces)):
            piece = pieces[number]
            at = self._at / key / naming.piece_name(piece)
            at.store.read_into(at.key, at_byte - piece.start, inside)

    def length(self, key: str) -> int:
        """See ``Store``."""
        if _is_progress(key):
            return NBYTES
        return _end(self._pieces(key))

    def version(self, key: str) -> Hashable:
        """See ``Store``."""
        return self._pieces(key)

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``."""
        found = pieces_at(self._at, folder)
        fresh = {segment: contiguous(pieces) for segment, pieces in found.items()}
        inside = f"{folder}/" if folder else ""
        with self._lock:  # Or another thread's listing of another folder would be lost.
            others = {key: one for key, one in self._known.items() if not key.startswith(inside)}
            self._known = others | fresh
        return sorted(key for key in fresh if key > after)

    def dir_identity(self, folder: str) -> DirIdentity | None:
        """See ``Store``; a prefix belongs to one WAL epoch."""
        found = self.keys(folder)
        return DirIdentity((self.url, folder), tuple(found)) if found else None

    def _pieces(self, key: str) -> tuple[PieceRange, ...]:
        found = self._known.get(key)
        if found is None:
            self.keys(key.rpartition("/")[0])
            found = self._known.get(key)
        if found is None:
            raise Missing(f"{self.url}/{key}")
        return found


class UploadedWals:
    """The WAL epochs named by a journal; see ``WalLocation``."""

    def __init__(
        self, root: StorePath, state: Callable[[], State], topics: WalTopics | None = None
    ):
        """Sends no request yet; ``root`` is the folder of the journal."""
        self._root, self.topics = root, topics
        self._state = state

    def __str__(self) -> str:
        return str(self._root)

    def numbers(self) -> list[int]:
        """See ``WalLocation``."""
        return [one.epoch for one in self._state().entry.logs]

    def logged(self) -> list[int]:
        """See ``WalLocation``: those that the journal names."""
        return self.numbers()

    def has(self, epoch: int) -> bool:
        """See ``WalLocation``."""
        return epoch in self.numbers()

    def head(self, epoch: int) -> Record:
        """See ``WalLocation``."""
        return self._record(epoch, HEAD)

    def copy(self, epoch: int) -> Record:
        """See ``WalLocation``."""
        return self._record(epoch, HEAD_COPY)

    def _record(self, epoch: int, name: str) -> Record:
        ref = self._ref(epoch)
        at = self._root / ref.prefix / name
        data = at.read(at.shown())
        if (found := google_crc32c.value(data)) != ref.crc32c:
            raise Damaged(at.shown(), f"crc32c {ref.crc32c:08x}", f"crc32c {found:08x}")
        return Record(at.shown(), data)

    def segments(self, epoch: int) -> StorePath:
        """See ``WalLocation``."""
        return StorePath(UploadedWal(self._root / self._ref(epoch).prefix), "")

    def _ref(self, epoch: int) -> WalRef:
        for one in self._state().entry.logs:
            if one.epoch == epoch:
                return one
        raise Damaged(str(self), f"the header of WAL epoch {epoch}", "none in the journal")
