# SPDX-License-Identifier: Apache-2.0
"""Locations of a WAL: a directory next to the steps, or a staging directory; progress in it.

If several locations hold an epoch, only the nearest is complete. The progress of a process is not
fsynced: a restore compares it with the segments, and reports durable records that are missing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from deltackpt.errors import Damaged, RestoreError, StorageError
from deltackpt.format import naming
from deltackpt.storage.store import StorePath

if TYPE_CHECKING:
    from deltackpt.reading.wal_topics import WalTopics

NAME = "progress"
_RECORD = struct.Struct("<QQQ")
#: As written before ``since`` was added.
_WITHOUT_SINCE = struct.Struct("<QQ")
NBYTES = _RECORD.size


class DurableRecord(NamedTuple):
    """The newest durable record: the number of its ``append()`` call, 0 for none, and its step.

    From call ``since`` on, the process has a record of each call; it may lack earlier records. 0 if
    it lacks none, has no record, or uses an earlier version, which does not note gaps.
    """

    number: int
    step: int
    since: int = 0

    @classmethod
    def from_bytes(cls, data: bytes) -> DurableRecord:
        """Decodes the contents of the file; raises ``struct.error`` if they are not whole."""
        layout = _WITHOUT_SINCE if len(data) == _WITHOUT_SINCE.size else _RECORD
        return cls(*layout.unpack(data))

    def to_bytes(self) -> bytes:
        """Returns the contents of the file."""
        return _RECORD.pack(*self)


def newest_durable(folder: StorePath) -> DurableRecord:
    """Returns the progress stored next to a process's segments; empty if it cannot be read."""
    try:
        return DurableRecord.from_bytes((folder / NAME).read(most_bytes=NBYTES))
    except (RestoreError, StorageError, struct.error):
        return DurableRecord(0, 0)


class Record(NamedTuple):
    """The bytes of a record, and its name in errors."""

    name: str
    data: bytes


class WalLocation(Protocol):
    """Headers of WAL epochs, and their segments; methods raise StorageError if reading fails."""

    @property
    def topics(self) -> WalTopics | None:
        """Reads epochs in Kafka; None if they cannot be read from here."""
        ...

    def numbers(self) -> list[int]:
        """Returns the numbers of all epochs, unordered, even if a header is unreadable or lost."""
        ...

    def logged(self) -> list[int]:
        """Returns the numbers of the epochs with segments, unordered, even without a header."""
        ...

    def has(self, epoch: int) -> bool:
        """Returns whether a header with a number, or a copy of it, exists."""
        ...

    def head(self, epoch: int) -> Record:
        """Returns the header of an epoch; raises Damaged if it is missing, or longer than any."""
        ...

    def copy(self, epoch: int) -> Record:
        """Returns another copy of the header of an epoch; raises as ``head`` does."""
        ...

    def segments(self, epoch: int) -> StorePath:
        """Returns the directory of an epoch's segments, ``<process>/<segment>``."""
        ...


class WalFolder(NamedTuple):
    """A directory with headers and segments."""

    at: StorePath
    topics: WalTopics | None = None

    def __str__(self) -> str:
        return str(self.at)

    def numbers(self) -> list[int]:
        """See ``WalLocation``: segments without a header are the newest, or have lost it."""
        # Before the heads: each is there before its log is.
        logged = [int(name) for name in self.at.folders() if naming.step_number(name) is not None]
        found = map(naming.epoch_number, self.at.names())
        heads = [number for number in found if number is not None]
        newest = max(heads, default=-1)
        return [*heads, *(one for one in logged if one > newest and (self.at / str(one)).keys())]

    def logged(self) -> list[int]:
        """See ``WalLocation``."""
        found = [name for name in self.at.folders() if naming.step_number(name) is not None]
        return [int(name) for name in found if (self.at / name).keys()]

    def has(self, epoch: int) -> bool:
        """See ``WalLocation``; does not list the directory, because a listing may be stale."""
        head = self.at / naming.epoch_name(epoch)
        return head.is_file() or (self.segments(epoch) / naming.HEAD_COPY).is_file()

    def head(self, epoch: int) -> Record:
        """See ``WalLocation``."""
        place = self.at / naming.epoch_name(epoch)
        return Record(place.shown(), place.read(place.shown()))

    def copy(self, epoch: int) -> Record:
        """See ``WalLocation``: the copy next to the segments."""
        place = self.segments(epoch) / naming.HEAD_COPY
        return Record(place.shown(), place.read(place.shown()))

    def segments(self, epoch: int) -> StorePath:
        """See ``WalLocation``."""
        return self.at / str(epoch)


class WalLocations:
    """Several locations, nearest first."""

    def __init__(self, places: Sequence[WalLocation]):
        self._places = places
        self.topics = next((one.topics for one in places if one.topics is not None), None)

    def __str__(self) -> str:
        return ", ".join(map(str, self._places))

    def numbers(self) -> list[int]:
        """See ``WalLocation``."""
        return [*{number for place in self._places for number in place.numbers()}]

    def logged(self) -> list[int]:
        """See ``WalLocation``."""
        return [*{number for place in self._places for number in place.logged()}]

    def has(self, epoch: int) -> bool:
        """See ``WalLocation``."""
        return any(place.has(epoch) for place in self._places)

    def head(self, epoch: int) -> Record:
        """See ``WalLocation``."""
        return self._of(epoch).head(epoch)

    def copy(self, epoch: int) -> Record:
        """See ``WalLocation``: the copy in the same location, else the header in another one."""
        first = self._of(epoch)
        try:
            return first.copy(epoch)
        except Damaged:
            for place in self._places:
                if place is not first and place.has(epoch):
                    return place.head(epoch)
            raise

    def segments(self, epoch: int) -> StorePath:
        """See ``WalLocation``."""
        return self._of(epoch).segments(epoch)

    def _of(self, epoch: int) -> WalLocation:
        for place in self._places:
            if place.has(epoch):
                return place
        raise Damaged(str(self), f"the header of WAL epoch {epoch}", "none")
