# SPDX-License-Identifier: Apache-2.0
"""The log of a root that is a bucket: heads that its journal names, and segments in pieces.

A journal's entry names each stretch that counts, so that a head is fenced as a commit is: whoever
has lost the claim writes none. Segments come in pieces as they grow, oldest first; where the next
one is missing a segment ends, as a torn one does. ``docs/format.md`` specifies the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import google_crc32c

from deltackpt.errors import Damaged, StorageError
from deltackpt.format import names
from deltackpt.format.names import PieceRange
from deltackpt.ledger.entries import LogRef, State
from deltackpt.reading.log_places import Record
from deltackpt.storage.store import Missing, Spot, Stamp

#: The head of a stretch, below its prefix.
HEAD = "head.msgpack"


class Pieces(NamedTuple):
    """The pieces of a segment that follow each other from its beginning, and all that there are."""

    whole: tuple[PieceRange, ...]
    every: tuple[PieceRange, ...]

    @property
    def length(self) -> int:
        """How far the segment reaches."""
        return self.whole[-1].end if self.whole else 0

    @classmethod
    def of(cls, found: Iterable[PieceRange]) -> Pieces:
        """Those of some names: of two that overlap both hold the same bytes there."""
        every = tuple(sorted(found, key=lambda one: (one.start, -one.end)))
        whole: list[PieceRange] = []
        end = 0
        for one in every:
            if one.start <= end < one.end:
                whole.append(one)
                end = one.end
        return cls(tuple(whole), every)


def pieces_at(stretch: Spot, folder: str = "") -> dict[str, Pieces]:
    """The pieces of each segment, ``<process>/<segment>``, of a stretch at the root; one listing.

    Args:
      stretch: the folder of the stretch.
      folder: below it, to look only there.

    Raises:
      StorageError: the store refused.
    """
    found: dict[str, list[PieceRange]] = {}
    at = stretch / folder if folder else stretch
    for key in at.store.keys(at.key):
        segment, _, name = Spot(at.store, key).below(stretch).rpartition("/")
        piece = names.piece_range(name)
        if piece is not None and segment:
            found.setdefault(segment, []).append(piece)
    return {segment: Pieces.of(pieces) for segment, pieces in found.items()}


class PromotedLog:
    """A stretch at the root, laid out as in a directory: ``<process>/<segment>``; thread-safe."""

    def __init__(self, at: Spot):
        """Asks nothing yet; ``at`` is the folder of the stretch at the root."""
        self._at = at
        self._known: Mapping[str, Pieces] = {}

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
        self, key: str, start: int, parts: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``."""
        found = self._pieces(key)
        wanted = sum(part.nbytes for part in parts)
        first = start + found.length if start < 0 else start
        if first < 0 or first + wanted > found.length or (whole and wanted != found.length):
            raise Damaged(f"{self.url}/{key}", f"{wanted} bytes", f"{found.length} bytes")
        numbered = iter(found.whole)
        piece = next(numbered)
        for part in parts:
            while part.nbytes:
                while piece.end <= first:
                    piece = next(numbered)
                inside = part[: piece.end - first]
                at = self._at / key / names.piece_name(piece)
                at.store.read_into(at.key, first - piece.start, [inside])
                part, first = part[inside.nbytes :], first + inside.nbytes

    def length(self, key: str) -> int:
        """See ``Store``."""
        return self._pieces(key).length

    def version(self, key: str) -> Hashable:
        """See ``Store``."""
        return self._pieces(key).whole

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """Refused: what is logged is promoted from a stage."""
        raise StorageError(f"{self.url}/{key}: expected to be read only, found a write")

    def delete(self, keys: Iterable[str]) -> None:
        """Refused: see ``put``."""
        raise StorageError(f"{self.url}: expected to be read only, found a deletion of {[*keys]}")

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``."""
        fresh = pieces_at(self._at, folder)
        inside = f"{folder}/" if folder else ""
        others = {key: one for key, one in self._known.items() if not key.startswith(inside)}
        self._known = others | fresh
        return sorted(key for key in fresh if key > after)

    def folders(self, folder: str) -> list[str]:
        """See ``Store``."""
        inside = f"{folder}/" if folder else ""
        below = (key.removeprefix(inside) for key in self.keys(folder))
        return sorted({key.partition("/")[0] for key in below if "/" in key})

    def stamp(self, folder: str) -> Stamp | None:
        """See ``Store``; a place is of one stretch."""
        found = self.keys(folder)
        return Stamp((self.url, folder), tuple(found)) if found else None

    def kvstore(self, folder: str) -> dict[str, Any] | None:
        """See ``Store``."""
        return None

    def _pieces(self, key: str) -> Pieces:
        found = self._known.get(key)
        if found is None:
            self.keys(key.rpartition("/")[0])
            found = self._known.get(key)
        if found is None:
            raise Missing(f"{self.url}/{key}")
        return found


class JournaledLogs:
    """The stretches that a journal names; see ``LogPlaces``."""

    def __init__(self, root: Spot, state: Callable[[], State]):
        """Asks nothing yet.

        Args:
          root: the folder that the journal is in.
          state: what the journal says.
        """
        self._root = root
        self._state = state

    def __str__(self) -> str:
        return str(self._root)

    def numbers(self) -> list[int]:
        """See ``LogPlaces``."""
        return [one.stretch for one in self._state().entry.logs]

    def logged(self) -> list[int]:
        """See ``LogPlaces``: those that the journal names."""
        return self.numbers()

    def has(self, stretch: int) -> bool:
        """See ``LogPlaces``."""
        return stretch in self.numbers()

    def head(self, stretch: int) -> Record:
        """See ``LogPlaces``."""
        ref = self._ref(stretch)
        at = self._root / ref.prefix / HEAD
        data = at.read(at.shown())
        if (found := google_crc32c.value(data)) != ref.crc32c:
            raise Damaged(at.shown(), f"crc32c {ref.crc32c:08x}", f"crc32c {found:08x}")
        return Record(at.shown(), data)

    def segments(self, stretch: int) -> Spot:
        """See ``LogPlaces``."""
        return Spot(PromotedLog(self._root / self._ref(stretch).prefix), "")

    def _ref(self, stretch: int) -> LogRef:
        for one in self._state().entry.logs:
            if one.stretch == stretch:
                return one
        raise Damaged(str(self), f"the head of stretch {stretch}", "none in the journal")
