# SPDX-License-Identifier: Apache-2.0
"""Messages between a service's replicas and clients: checksummed bytes, independent of versions.

Ray would pickle the records, and a pickle of another version's class may not load. A replica
therefore answers with the bytes of ``manifest.to_bytes``.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from deltackpt.__about__ import __version__
from deltackpt.errors import RestoreError, ServiceMismatch
from deltackpt.format import manifest
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import SaveId
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.standby.files import HeldFile
from deltackpt.standby.memory import MemoryAddress

#: Incremented when a replica's answers or arguments change their meaning.
PROTOCOL = 3
_MAGIC = "deltackpt.service"
_Record = TypeVar("_Record", "Description", "Pinned")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """A replica's description of itself: identity, contents and health.

    Attributes:
      protocol: the replica's ``PROTOCOL``.
      version: its deltackpt version.
      directory: the checkpoint directory.
      node: Ray's id of its node.
      pid: its process id.
      health: its current activity or problem, as text.
      code: code of the current error, or empty.
      save_id: id of the save that it holds.
      newest_step: the newest committed step that it sees.
      point: the recovery point above that save that it holds; None if it holds the save itself.
      lag_secs: seconds from the commit of ``save_id``, or from ``point``, until it held that state.
      nbytes: bytes of memory used for rows.
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
    """A state that a replica keeps for a reader.

    Attributes:
      protocol: the replica's ``PROTOCOL``.
      version: its deltackpt version.
      pin: number of the pin; 0 if the state is not pinned.
      refused: why the state is not pinned.
      soon: whether the replica is following and may hold the state soon.
      held: the save that it holds.
      epoch: number of the WAL epoch of ``point``.
      point: the recovery point above ``held`` that it holds; None if it holds the save itself.
      place: path of its memory for processes on the same machine.
      sequence: sequence number of the memory.
      chain: ids of the saves that the state was merged from, base first.
      files: files of the step or recovery point other than its tables, if held.
      files_place: path of those files for processes on the same machine.
    """

    protocol: int = PROTOCOL
    version: str = __version__
    pin: int = 0
    refused: str = ""
    soon: bool = False
    held: SaveId | None = None
    epoch: int = 0
    point: SaveId | None = None
    place: MemoryAddress | None = None
    sequence: int = 0
    chain: tuple[SaveInfo, ...] = ()
    files: tuple[HeldFile, ...] = ()
    files_place: MemoryAddress | None = None


def plain_point(point: RecoveryPoint | None) -> tuple[int, str, int, int] | None:
    """Returns a recovery point as a request: WAL epoch, run, step and attempt."""
    if point is None:
        return None
    return point.epoch, *dataclasses.astuple(point.save_id)


def point_of(plain: tuple[int, str, int, int]) -> RecoveryPoint:
    """Returns the recovery point of a ``plain_point``.

    Its time is not set, since no caller reads it.
    """
    return RecoveryPoint(plain[0], SaveId(*plain[1:]), full=True, unix_secs=0.0)


def packed(record: Description | Pinned) -> bytes:
    """Returns the bytes of an answer."""
    return manifest.to_bytes(record, _MAGIC)


def unpacked(data: bytes, kind: type[_Record], replica: str) -> _Record:
    """Decodes an answer.

    Raises:
      ServiceMismatch: another version encoded it.
    """
    try:
        found = manifest.from_bytes(data, kind, name=replica, magic=_MAGIC)
        if found.protocol == PROTOCOL:
            return found
        problem = f"protocol {found.protocol} of version {found.version}"
    except (RestoreError, TypeError) as error:
        problem = str(error)
    raise ServiceMismatch(
        f"{replica}: expected an answer of protocol {PROTOCOL} (version {__version__}), found "
        f"{problem}; install one version of deltackpt everywhere, stop the service and start it "
        "again"
    )
