# SPDX-License-Identifier: Apache-2.0
"""What members of a service answer: records that travel as checked bytes, whatever the versions.

Ray pickles what it carries, and a pickle of another version's class is a riddle. A member's answer
is the bytes of ``manifest.to_bytes`` instead.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from deltackpt.__about__ import __version__
from deltackpt.errors import RestoreError, ServiceMismatch
from deltackpt.format import manifest
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import SaveId
from deltackpt.reading.stretches import LogPoint
from deltackpt.standby.files import HeldFile
from deltackpt.standby.memory import MemoryAddress

#: Raised by one where a member's answers or arguments change their meaning.
PROTOCOL = 3
_MAGIC = "deltackpt.service"
_Record = TypeVar("_Record", "Description", "Pinned")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """Who a member is, what it holds and how it is.

    Attributes:
      protocol: ``PROTOCOL`` of the member.
      version: of its deltackpt.
      directory: root of the steps.
      node: Ray's id of its node.
      pid: its process.
      health: what it does, or what is wrong, in words.
      code: of the error that is wrong; empty where nothing is.
      save_id: the save that it holds.
      newest_step: the newest committed step that it sees.
      point: the mark of the log above it that it holds; None where it holds the save itself.
      lag_secs: how long after the commit of ``save_id``, or after ``point``, it held it.
      nbytes: bytes of memory that hold the rows.
    """

    protocol: int = PROTOCOL
    version: str = __version__
    directory: str
    node: str
    pid: int
    health: str
    code: str = ""
    save_id: SaveId | None = None
    point: SaveId | None = None
    newest_step: int | None = None
    lag_secs: float | None = None
    nbytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pinned:
    """A state that a member keeps for a reader.

    Attributes:
      protocol: ``PROTOCOL`` of the member.
      version: of its deltackpt.
      pin: its number; 0 where the state is not kept.
      refused: why it is not.
      soon: whether the member follows, and may hold the state in a moment.
      held: what it holds.
      stretch: number of that of ``point``.
      point: the mark of the log above ``held`` that it holds; None where it holds the save itself.
      place: where processes of the same machine find its memory.
      sequence: of the memory.
      chain: the saves that the state was merged from, base first.
      files: of the step, or of the point, beside its tables, where they are held.
      files_place: where processes of the same machine find theirs.
    """

    protocol: int = PROTOCOL
    version: str = __version__
    pin: int = 0
    refused: str = ""
    soon: bool = False
    held: SaveId | None = None
    stretch: int = 0
    point: SaveId | None = None
    place: MemoryAddress | None = None
    sequence: int = 0
    chain: tuple[SaveInfo, ...] = ()
    files: tuple[HeldFile, ...] = ()
    files_place: MemoryAddress | None = None


def plain_point(point: LogPoint | None) -> tuple[int, str, int, int] | None:
    """A point as it is asked for: stretch, run, step and attempt."""
    if point is None:
        return None
    return point.stretch, *dataclasses.astuple(point.save_id)


def point_of(plain: tuple[int, str, int, int]) -> LogPoint:
    """The full point that ``plain_point`` was given; nobody asks when it was taken."""
    return LogPoint(plain[0], SaveId(*plain[1:]), full=True, unix_secs=0.0)


def packed(record: Description | Pinned) -> bytes:
    """The bytes of an answer."""
    return manifest.to_bytes(record, _MAGIC)


def unpacked(data: bytes, kind: type[_Record], member: str) -> _Record:
    """An answer from its bytes.

    Raises:
      ServiceMismatch: they are those of another version.
    """
    try:
        found = manifest.from_bytes(data, kind, name=member, magic=_MAGIC)
        if found.protocol == PROTOCOL:
            return found
        problem = f"protocol {found.protocol} of version {found.version}"
    except (RestoreError, TypeError) as error:
        problem = str(error)
    raise ServiceMismatch(
        f"{member}: expected an answer of protocol {PROTOCOL} (version {__version__}), found "
        f"{problem}; run one version of deltackpt, stop the service and start it again"
    )
