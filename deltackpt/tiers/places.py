# SPDX-License-Identifier: Apache-2.0
"""Where copies lie: what directories and buckets have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from deltackpt.errors import (
    Damaged,
    StepGone,
    TargetDiffers,
)
from deltackpt.format import names
from deltackpt.format.chain import SaveInfo
from deltackpt.ledger.entries import Unit
from deltackpt.storage import digests
from deltackpt.storage.digests import Digest
from deltackpt.storage.store import Spot


class Place(Protocol):
    """Where units stand, of the steps that have one item of ours: a directory or a bucket.

    Methods are called from several threads. ``write`` makes nothing visible: ``publish`` does, by
    one action, and everything before it is on disk by then. All of them may be called again.
    """

    name: str
    item: str

    def __enter__(self) -> Place:
        """Holds it as a target, against other copies to it where these would be in the way."""
        ...

    def __exit__(self, *error: object) -> None:
        """Lets go of it."""
        ...

    def steps(self) -> list[int]:
        """Steps that are whole."""
        ...

    def in_use(self) -> str | None:
        """Why a trainer may be at work there; None where none can be."""
        ...

    def spot(self, unit: Unit) -> Spot:
        """The folder of a unit."""
        ...

    def info(self, unit: Unit) -> SaveInfo | None:
        """What chains need to know of a unit; None where there is no such unit."""
        ...

    def digests(self, unit: Unit) -> dict[str, Digest]:
        """Digests of all files of a unit, by their paths below it."""
        ...

    def read(self, unit: Unit, name: str) -> bytes:
        """A file of a unit that is whole."""
        ...

    def holds(self, unit: Unit, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """Whether a unit is there and whole; ``recheck`` reads every byte of it again.

        Raises:
          TargetDiffers: something else has its name.
        """
        ...

    def begin(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """Makes place for a unit.

        Raises:
          TargetDiffers: another save has its name.
        """
        ...

    def discard(self, unit: Unit) -> None:
        """Drops what was written of a unit that is not whole and will not be copied."""
        ...

    def written(self, unit: Unit, name: str, expected: Digest) -> bool:
        """Whether a file of a unit that is not whole yet is there and as expected."""
        ...

    def write(self, unit: Unit, name: str, data: bytes) -> None:
        """Writes a file of a unit that is not whole yet."""
        ...

    def publish(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """Makes a unit visible, of which every file is written.

        Raises:
          TargetDiffers: another save has its name by now.
        """
        ...


OTHER_COPY = "copy it there again from an intact source"


def head_name(unit: Unit, item: str) -> str:
    """Path of the manifest of process 0 in a unit: it says which save it is."""
    name = names.manifest_name(0)
    return name if unit.item is not None else f"{item}/{name}"


def gone(source: Place, unit: Unit) -> StepGone:
    """What is raised where a unit was removed from the source meanwhile."""
    return StepGone(
        f"{source.name}/{unit.name}: expected it to stay while it was copied, found it removed or "
        "replaced; copy again: the newest step is another one now"
    )


def differs(shown: str, found: str) -> TargetDiffers:
    """What is raised where the target holds something else under a name."""
    return TargetDiffers(
        f"{shown}: expected the save that is copied, or none, found {found}: it is not touched; "
        "copy to an empty place, or move what has this name away first"
    )


def check_bytes(shown: str, data: bytes, expected: Digest) -> None:
    """Checks what was read against its digest."""
    found = digests.digest_bytes(data)
    if found[:3] != expected[:3]:
        raise Damaged(
            shown,
            f"{expected.length} bytes, crc32c {expected.crc32c:08x}, tail {expected.tail:08x}",
            f"{found.length} bytes, crc32c {found.crc32c:08x}, tail {found.tail:08x}",
            "copy another step, or mend this one from a backup",
        )


def length(path: Path) -> int:
    """Bytes of a file, -1 where there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


def digests_bytes(digests: Mapping[str, Digest]) -> int:
    """Bytes of files in all, by their digests."""
    return sum(digest.length for digest in digests.values())
