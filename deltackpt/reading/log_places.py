# SPDX-License-Identifier: Apache-2.0
"""Where the logs of a root are: in a folder beside its steps, or in a stage before a bucket.

Of a stretch that several places have the first one counts: what is near has all of it, and what is
behind it only what has come there by now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from deltackpt.errors import Damaged
from deltackpt.format import names
from deltackpt.storage.store import Spot


class Record(NamedTuple):
    """A record as it is stored, and how errors name it."""

    name: str
    data: bytes


class LogPlaces(Protocol):
    """Heads of stretches, and their logs."""

    def numbers(self) -> list[int]:
        """Numbers of all stretches, in no order; those whose heads cannot be read, too.

        Raises:
          StorageError: nobody can tell.
        """
        ...

    def logged(self) -> list[int]:
        """Numbers of the stretches that have logs, in no order; those without a head, too.

        Raises:
          StorageError: nobody can tell.
        """
        ...

    def has(self, stretch: int) -> bool:
        """Whether there is a head of that number."""
        ...

    def head(self, stretch: int) -> Record:
        """The head of a stretch.

        Raises:
          Damaged: it is missing, or longer than any.
          StorageError: it cannot be read.
        """
        ...

    def segments(self, stretch: int) -> Spot:
        """The folder of the logs of its processes, ``<process>/<segment>``."""
        ...


class LogFolder(NamedTuple):
    """A folder that holds heads, and logs beside them."""

    at: Spot

    def __str__(self) -> str:
        return str(self.at)

    def numbers(self) -> list[int]:
        """See ``LogPlaces``."""
        found = map(names.stretch_number, self.at.names())
        return [number for number in found if number is not None]

    def logged(self) -> list[int]:
        """See ``LogPlaces``."""
        found = [name for name in self.at.folders() if names.step_number(name) is not None]
        return [int(name) for name in found if (self.at / name).keys()]

    def has(self, stretch: int) -> bool:
        """See ``LogPlaces``; the folder is not listed: of another node that may be an old list."""
        return (self.at / names.stretch_name(stretch)).is_file()

    def head(self, stretch: int) -> Record:
        """See ``LogPlaces``."""
        place = self.at / names.stretch_name(stretch)
        return Record(place.shown(), place.read(place.shown()))

    def segments(self, stretch: int) -> Spot:
        """See ``LogPlaces``."""
        return self.at / str(stretch)


class LogLayers:
    """Several places, the nearest first."""

    def __init__(self, places: Sequence[LogPlaces]):
        """Asks nobody yet."""
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

    def segments(self, stretch: int) -> Spot:
        """See ``LogPlaces``."""
        return self._of(stretch).segments(stretch)

    def _of(self, stretch: int) -> LogPlaces:
        for place in self._places:
            if place.has(stretch):
                return place
        raise Damaged(str(self), f"the head of stretch {stretch}", "none")
