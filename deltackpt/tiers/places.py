# SPDX-License-Identifier: Apache-2.0
"""What directories and buckets have in common as copy sources and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from deltackpt.errors import (
    Damaged,
    StepGone,
    TargetDiffers,
)
from deltackpt.format import names
from deltackpt.format.chain import SaveInfo
from deltackpt.ledger.committed import SEGMENT_BYTES
from deltackpt.ledger.entries import Unit
from deltackpt.storage import digests
from deltackpt.storage.digests import Digest
from deltackpt.storage.store import StorePath

#: Copies all files of a unit from a folder, each verified. Called with the folder, the number of
#: concurrent files, and a function that receives bytes written and bytes found, in several threads.
Write = Callable[[StorePath, int, Callable[[int, int], None]], None]


class Place(Protocol):
    """A copy source or target, a directory or a bucket, that holds the units of one item."""

    name: str
    item: str

    def __enter__(self) -> Place:
        """Locks it as a target against other copies, if they would interfere."""
        ...

    def __exit__(self, *error: object) -> None:
        """Releases the lock."""
        ...

    def steps(self) -> list[int]:
        """Returns the complete steps."""
        ...

    def in_use(self) -> str | None:
        """Returns why a trainer may be using it; None if that is impossible."""
        ...

    def store_path(self, unit: Unit) -> StorePath:
        """Returns the folder of a unit."""
        ...

    def info(self, unit: Unit) -> SaveInfo | None:
        """Returns a unit's entry in the chain; None if it does not exist."""
        ...

    def digests(self, unit: Unit) -> dict[str, Digest]:
        """Returns the digests of all files of a unit, by relative path."""
        ...

    def holds(self, unit: Unit, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """Returns whether a unit exists and is complete; ``recheck`` reads all of its bytes.

        Raises:
          TargetDiffers: its name is taken by something else.
        """
        ...

    def writing(
        self, unit: Unit, info: SaveInfo, expected: Mapping[str, Digest]
    ) -> AbstractContextManager[Write]:
        """Makes a unit visible, atomically, after the context has written all its files.

        Raises:
          TargetDiffers: another save has its name.
        """
        ...


#: Bytes of a file in memory at a time.
PIECE_BYTES = SEGMENT_BYTES
_MEND = "copy another step, or restore this one from a backup"


def head_name(unit: Unit, item: str) -> str:
    """Returns the path of a unit's manifest of process 0, which identifies the save."""
    name = names.manifest_name(0)
    return name if unit.item is not None else f"{item}/{name}"


def gone(source: Place, unit: Unit) -> StepGone:
    """Returns the error for a unit that was removed from the source during the copy."""
    return StepGone(
        f"{source.name}/{unit.name}: expected it to remain during the copy, found it removed or "
        "replaced; copy again, since the newest step has changed"
    )


def differs(shown: str, found: str) -> TargetDiffers:
    """Returns the error for a target that holds something else under a name."""
    return TargetDiffers(
        f"{shown}: expected the copied save, or none, found {found}, which was not touched; copy "
        "to an empty target, or move this entry away first"
    )


def pieces_of(at: StorePath, expected: Digest) -> Iterator[bytes | bytearray]:
    """Yields a file piece by piece, holding one at a time; verifies it at the end.

    Raises:
      Damaged: the file does not match its digest.
    """
    came, shown = digests.Streamed(), str(at)
    try:
        with at.missing_is_damage(shown):
            if (length := at.store.length(at.key)) != expected.length:
                raise Damaged(shown, f"{expected.length} bytes", f"{length} bytes")
            for start in range(0, expected.length, PIECE_BYTES):
                piece = bytearray(min(PIECE_BYTES, expected.length - start))
                at.store.read_into(at.key, start, [memoryview(piece)])
                came.add(piece)
                yield piece
        came.check(shown, expected)
    except Damaged as error:  # May name an object.
        raise Damaged(shown, error.expected, error.found, _MEND) from None


def digests_bytes(digests: Mapping[str, Digest]) -> int:
    """Returns the total size of files, by their digests."""
    return sum(digest.length for digest in digests.values())
