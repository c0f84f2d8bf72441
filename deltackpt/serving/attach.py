# SPDX-License-Identifier: Apache-2.0
"""Attaches to the rows that a follower in another process of this machine keeps.

The follower writes the newest version's description into a small shared memory of its own, whose
address is in a file. A reader locks the memory of the rows like a thread of the follower does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deltackpt.errors import Damaged, FormatMismatch, OptionError, ServiceUnavailable
from deltackpt.format import records
from deltackpt.format.manifest import SaveId
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.serving.rows import Rows, RowsAddress
from deltackpt.serving.version import PublishedState, Versions
from deltackpt.standby.shared_memory import MemoryAddress, MemoryReader, SharedMemory
from deltackpt.storage import posix

_MAGIC = "deltackpt.serving"
#: Size of the description; only used pages take memory.
_MOST_BYTES = 16 << 20
_LENGTH = np.dtype(np.int64)
_RETRY_SECS = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionDescription:
    """The newest version, for other processes; see ``PublishedState``."""

    save_id: SaveId
    point: RecoveryPoint | None
    unix_secs: float
    number: int
    sequence: int
    address: RowsAddress


class SharedVersion:
    """Describes the newest version to other processes."""

    def __init__(self) -> None:
        self._memory = SharedMemory(_MOST_BYTES)

    def publish(self, path: Path) -> None:
        """Writes the address of the description to a file, atomically."""
        with posix.replacing(path) as temporary:
            temporary.write_bytes(records.to_bytes(self._memory.address, _MAGIC))

    def write(self, shown: PublishedState) -> None:
        """Describes a version instead of the one before."""
        rows = shown.rows
        assert rows is not None and isinstance(rows.memory, SharedMemory)
        data = records.to_bytes(
            VersionDescription(
                save_id=shown.save_id,
                point=shown.point,
                unix_secs=shown.unix_secs,
                number=shown.number,
                sequence=shown.sequence,
                address=RowsAddress(memory=rows.memory.address, tables=dict(rows.tables)),
            ),
            _MAGIC,
        )
        if len(data) + _LENGTH.itemsize > _MOST_BYTES:
            raise OptionError(
                f"share: expected a description of at most {_MOST_BYTES:,} bytes, found "
                f"{len(data):,}; follow fewer tables"
            )
        self._memory.start_write()
        self._memory.array(0, (1,), _LENGTH)[0] = len(data)
        out = self._memory.array(_LENGTH.itemsize, (len(data),), np.dtype(np.uint8))
        out[:] = np.frombuffer(data, np.uint8)
        self._memory.end_write()


def attach(path: str | os.PathLike[str]) -> Attached:
    """Opens the rows that another process follows; see ``Live.share``.

    Args:
      path: the file that it wrote.

    Returns:
      The rows. Nothing is read yet: the file need not exist.
    """
    return Attached(Path(path))


class Attached(Versions):
    """Looks up rows in the memory of a follower on the same machine, as the same user.

    Versions have rows only, with the same guarantees as in the follower. If the follower is
    restarted and shares the same file, later versions are the new follower's. Open a new one after
    a fork.
    """

    def __init__(self, path: Path):
        """Internal: call ``attach``."""
        super().__init__()
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._described: MemoryReader | None = None
        self._rows: tuple[RowsAddress, Rows] | None = None
        #: The description's sequence number, and what it describes.
        self._known: tuple[int, PublishedState] | None = None
        self._reading = threading.Lock()

    def _current(self, end: float) -> PublishedState:
        with self._reading:
            return self._newest(end)

    def _newest(self, end: float) -> PublishedState:
        with self._unavailable():
            stat = os.stat(self._path)
            if (stamp := (stat.st_ino, stat.st_mtime_ns)) != self._stamp:
                address: MemoryAddress = records.from_bytes(
                    self._path.read_bytes(), MemoryAddress, name=str(self._path), magic=_MAGIC
                )
                self._described, self._known = MemoryReader(address, follow=True), None
                self._stamp = stamp
        described = self._described
        assert described is not None
        while True:
            sequence = described.sequence
            known = self._known
            if known is not None and known[0] == sequence:
                return known[1]
            shown = None if sequence % 2 else self._read(described, sequence)
            if shown is not None:
                self._known = sequence, shown
                return shown
            if time.monotonic() > end:
                raise ServiceUnavailable(
                    f"{self._path}: expected a version, found that the follower has none yet; wait"
                )
            time.sleep(_RETRY_SECS)

    def _read(self, described: MemoryReader, sequence: int) -> PublishedState | None:
        """Returns the described version; None if it changes meanwhile."""
        length = int(described.array(0, (1,), _LENGTH)[0])
        length = min(length, _MOST_BYTES - _LENGTH.itemsize)
        data = described.array(_LENGTH.itemsize, (length,), np.dtype(np.uint8)).tobytes()
        if described.sequence != sequence:
            return None
        with self._unavailable():
            found: VersionDescription = records.from_bytes(
                data, VersionDescription, name=str(self._path), magic=_MAGIC
            )
            if self._rows is None or self._rows[0] != found.address:
                try:
                    memory = MemoryReader(found.address.memory, follow=True)
                except OSError:
                    if described.sequence != sequence:
                        return None  # The follower has replaced that memory meanwhile.
                    raise
                self._rows = found.address, Rows(memory, found.address.tables)
            rows = self._rows[1]
        return PublishedState(
            found.save_id, found.point, found.unix_secs, found.number, None, rows, found.sequence
        )

    @contextlib.contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, Damaged, FormatMismatch) as error:
            raise ServiceUnavailable(
                f"{self._path}: expected the rows of a running follower, found {error}; start "
                "deltackpt.serving.follow() on this machine, and call share()"
            ) from error
