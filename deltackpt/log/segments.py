# SPDX-License-Identifier: Apache-2.0
"""The files of a process's log: frames appended, forced together, in a new file after a failure.

What could not be written, or forced, may be in a file all the same, or in half. So nothing is ever
written to it again, nor forced: the next frame goes to a file of a further part, which says what of
the earlier parts counts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from deltackpt.errors import StorageError
from deltackpt.format import frames, names
from deltackpt.format.frames import After, BeginHead, Place
from deltackpt.log.frame import Frame
from deltackpt.storage import files
from deltackpt.storage.appending import Appender


class Position(NamedTuple):
    """A frame, and the checksum that the next one goes on from."""

    part: int
    seq: int
    crc32c: int


class SegmentWriter:
    """Appends frames to the log of one process; used by one thread."""

    def __init__(self, directory: Path, *, stretch: int, process: int, fsync: bool):
        """Writes nothing yet.

        Args:
          directory: of the segments; made at the first frame.
          stretch: number of the stretch.
          process: index of the process.
          fsync: whether ``sync`` forces what was written to disk.
        """
        self.directory = directory
        self._stretch = stretch
        self._process = process
        self._fsync = fsync
        self._at = Position(0, 0, 0)
        self._after: After | None = None
        self._file = Appender()
        self._fresh = False
        #: Bytes of the file that is written to.
        self.segment_bytes = 0
        #: How often files, and directories, were forced.
        self.syncs = 0

    @property
    def position(self) -> Position:
        """The last frame that was written."""
        return self._at

    def write(self, batch: Iterable[Frame], step: int) -> int:
        """Appends the frames of a batch.

        Args:
          batch: the frames, in order.
          step: of all of them.

        Returns:
          How many bytes were written.

        Raises:
          StorageError: the store refused; ``begin_part`` comes next.
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
        """Returns when all that was written is on disk, and the file's name.

        Raises:
          StorageError: it may not be; ``begin_part`` comes next.
        """
        if self._file.descriptor is None or not self._fsync:
            return
        with self._refusals("force to disk"):
            os.fdatasync(self._file.descriptor)
            self.syncs += 1
            if self._fresh:
                files.fsync_path(self.directory)
                self.syncs += 1
                self._fresh = False

    def roll(self) -> None:
        """Ends the file; what was written to it is forced by ``sync``, which comes first."""
        self._file.end()

    def begin_part(self, after: Position) -> None:
        """Begins a new part: nothing counts of what was written beyond ``after``."""
        with contextlib.suppress(OSError):
            self.roll()
        self._after = After(part=self._at.part, seq=after.seq)
        self._at = Position(self._at.part + 1, after.seq, after.crc32c)

    def _begin(self) -> None:
        at = self._at
        path = self.directory / names.segment_name(at.part, at.seq + 1)
        with self._refusals("make a file"):
            files.make_durable(self.directory) if self._fsync else self.directory.mkdir(
                parents=True, exist_ok=True
            )
            self._file.begin(path)
        self._fresh, self.segment_bytes = True, 0
        head = BeginHead(stretch=self._stretch, crc32c=at.crc32c, after=self._after)
        encoded = frames.encode(Place(at.part, self._process, at.seq + 1, 0), head, [], 0)
        with self._refusals("write"):
            self._file.append(encoded.buffers)
        self._after = None

    def _refusals(self, action: str) -> contextlib.AbstractContextManager[None]:
        return files.typed_errors(self.directory, action, full="free space; no touched row is lost")

    def close(self) -> None:
        """Ends the file."""
        with contextlib.suppress(StorageError, OSError):
            self.roll()
