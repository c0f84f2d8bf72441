# SPDX-License-Identifier: Apache-2.0
"""Locations of a WAL: a directory next to the steps, or a staging directory.

If several locations hold an epoch, the nearest is used: it is complete, and the others have only
the part uploaded so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from deltackpt.errors import Damaged
from deltackpt.format import names
from deltackpt.storage.store import Spot


class Record(NamedTuple):
    """The bytes of a record, and its name in errors."""

    name: str
    data: bytes


class LogPlaces(Protocol):
    """Headers of WAL epochs, and their segments."""

    def numbers(self) -> list[int]:
        """Returns the numbers of all epochs, unordered, even if a header is unreadable or lost.

        Raises:
          StorageError: they cannot be listed.
        """
        ...

    def logged(self) -> list[int]:
        """Returns the numbers of the epochs that have segments, unordered, even without a header.

        Raises:
          StorageError: they cannot be listed.
        """
        ...

    def has(self, stretch: int) -> bool:
        """Returns whether a header with a number, or a copy of it, exists."""
        ...

    def head(self, stretch: int) -> Record:
        """Returns the header of an epoch.

        Raises:
          Damaged: it is missing, or longer than any.
          StorageError: it cannot be read.
        """
        ...

    def copy(self, stretch: int) -> Record:
        """Returns another copy of the header of an epoch.

        Raises:
          Damaged, StorageError: as for ``head``.
        """
        ...

    def segments(self, stretch: int) -> Spot:
        """Returns the directory of an epoch's segments, ``<process>/<segment>``."""
        ...


class LogFolder(NamedTuple):
    """A directory with headers and segments."""

    at: Spot

    def __str__(self) -> str:
        return str(self.at)

    def numbers(self) -> list[int]:
        """See ``LogPlaces``: segments without a header are the newest, or have lost it."""
        # Before the heads: each is there before its log is.
        logged = [int(name) for name in self.at.folders() if names.step_number(name) is not None]
        found = map(names.stretch_number, self.at.names())
        heads = [number for number in found if number is not None]
        newest = max(heads, default=-1)
        return [*heads, *(one for one in logged if one > newest and (self.at / str(one)).keys())]

    def logged(self) -> list[int]:
        """See ``LogPlaces``."""
        found = [name for name in self.at.folders() if names.step_number(name) is not None]
        return [int(name) for name in found if (self.at / name).keys()]

    def has(self, stretch: int) -> bool:
        """See ``LogPlaces``; does not list the directory, because a listing may be stale."""
        head = self.at / names.stretch_name(stretch)
        return head.is_file() or (self.segments(stretch) / names.HEAD_COPY).is_file()

    def head(self, stretch: int) -> Record:
        """See ``LogPlaces``."""
        place = self.at / names.stretch_name(stretch)
        return Record(place.shown(), place.read(place.shown()))

    def copy(self, stretch: int) -> Record:
        """See ``LogPlaces``: the copy next to the segments."""
        place = self.segments(stretch) / names.HEAD_COPY
        return Record(place.shown(), place.read(place.shown()))

    def segments(self, stretch: int) -> Spot:
        """See ``LogPlaces``."""
        return self.at / str(stretch)


class LogLayers:
    """Several locations, nearest first."""

    def __init__(self, places: Sequence[LogPlaces]):
        """Reads nothing yet."""
        self._places = places

    def __str__(self) -> str:
        return ", ".join(map(str, self._places))

    def numbers(self) -> list[int]:
        """See ``LogPlaces``."""
        return [*{number for place in self._places for number in place.numbers()}]

    def logged(self) -> list[int]:
        """See ``LogPlaces``."""
        return [*{number for place in self._places for number in place.logged()}]

    def has(self, stretch: int) -> bool:
        """See ``LogPlaces``."""
        return any(place.has(stretch) for place in self._places)

    def head(self, stretch: int) -> Record:
        """See ``LogPlaces``."""
        return self._of(stretch).head(stretch)

    def copy(self, stretch: int) -> Record:
        """See ``LogPlaces``: the copy in the same location, else the header in another one."""
        first = self._of(stretch)
        try:
            return first.copy(stretch)
        except Damaged:
            for place in self._places:
                if place is not first and place.has(stretch):
                    return place.head(stretch)
            raise

    def segments(self, stretch: int) -> Spot:
        """See ``LogPlaces``."""
        return self._of(stretch).segments(stretch)

    def _of(self, stretch: int) -> LogPlaces:
        for place in self._places:
            if place.has(stretch):
                return place
        raise Damaged(str(self), f"the header of WAL epoch {stretch}", "none")
