# SPDX-License-Identifier: Apache-2.0
"""The WAL files of a process: frames appended, fsynced together, in a new file after a failure.

After a failed write or fsync, the file may contain all, some or none of the data. It is never
written or fsynced again: the next frame goes to a file of a new part, whose header names the valid
frames of earlier parts.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from deltackpt.errors import StorageError
from deltackpt.format import frames, names
from deltackpt.format.frames import After, BeginHead, Place
from deltackpt.storage import files
from deltackpt.storage.appending import Appender
from deltackpt.wal.frame import Frame


class Position(NamedTuple):
    """A frame, and the checksum that the next one continues."""

    part: int
    seq: int
    crc32c: int


class SegmentWriter:
    """Appends frames to the WAL of one process; used by one thread."""

    def __init__(self, root: Path, directory: Path, *, stretch: int, process: int, fsync: bool):
        """Writes nothing yet.

        Args:
          root: an existing directory, which is never recreated.
          directory: directory of the segments, in the root; created at the first frame.
          stretch: number of the WAL epoch.
          process: index of the process.
          fsync: whether ``sync`` calls fsync.
        """
        self._root = root
        self.directory = directory
        self._stretch = stretch
        self._process = process
        self._fsync = fsync
        self._at = Position(0, 0, 0)
        self._after: After | None = None
        self._file = Appender()
        self._path = directory
        self._fresh = False
        #: Bytes of the file that is written to.
        self.segment_bytes = 0
        #: How often files, and directories, were forced.
        self.syncs = 0

    @property
    def position(self) -> Position:
        """Returns the last frame that was written."""
        return self._at

    def write(self, batch: Iterable[Frame], step: int) -> int:
        """Appends the frames of a batch.

        Args:
          batch: frames in order.
          step: training step of the frames.

        Returns:
          The number of bytes written.

        Raises:
          StorageError: the store reported an error; call ``begin_part`` next.
        """
        if self._file.descriptor is None:
            self._begin()
        buffers: list[memoryview] = []
        nbytes, at = 0, self._at
        for frame in batch:
            place = Place(at.part, self._process, at.seq + 1, step)
            encoded = frames.encode(place, frame.head, frame.body, at.crc32c)
            at = Position(at.part, place.seq, encoded.crc32c)
            buffers += encoded.buffers
            nbytes += encoded.nbytes
        with self._refusals("write"):
            self._file.append(buffers)
        self._at = at
        self.segment_bytes += nbytes
        return nbytes

    def sync(self) -> None:
        """Makes everything written, and the file's name, durable.

        Raises:
          StorageError: it may not be; call ``begin_part`` next.
        """
        if self._file.descriptor is None:
            return
        with self._refusals("fsync"):
            if self._fsync:
                os.fdatasync(self._file.descriptor)
                self.syncs += 1
            if self._fsync and self._fresh:
                files.fsync_path(self.directory)
                self.syncs += 1
                self._fresh = False
            if not os.path.samestat(os.fstat(self._file.descriptor), os.stat(self._path)):
                raise FileNotFoundError(errno.ENOENT, "moved or removed", self._path)

    def roll(self) -> None:
        """Ends the file after ``sync``."""
        self._file.end()

    def begin_part(self, after: Position) -> None:
        """Begins a new part, which invalidates everything written after ``after``."""
        with contextlib.suppress(OSError):
            self.roll()
        self._after = After(part=self._at.part, seq=after.seq)
        self._at = Position(self._at.part + 1, after.seq, after.crc32c)

    def _begin(self) -> None:
        at = self._at
        path = self.directory / names.segment_name(at.part, at.seq + 1)
        with self._refusals("make a file"):
            files.make_below(self._root, self.directory, fsync=self._fsync)
            self._file.begin(path)
        self._path = path
        self._fresh, self.segment_bytes = True, 0
        head = BeginHead(stretch=self._stretch, crc32c=at.crc32c, after=self._after)
        encoded = frames.encode(Place(at.part, self._process, at.seq + 1, 0), head, [], 0)
        with self._refusals("write"):
            self._file.append(encoded.buffers)
        self._after = None

    def _refusals(self, action: str) -> contextlib.AbstractContextManager[None]:
        return files.typed_errors(self.directory, action, full="free space")

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(StorageError, OSError):
            self.roll()
