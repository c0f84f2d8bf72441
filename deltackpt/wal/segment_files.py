# SPDX-License-Identifier: Apache-2.0
"""The WAL records of a process: appended to files, fsynced together, in a new file after a failure.

After a failed write or fsync, the file may contain all, some or none of the data. It is never
written or fsynced again: the next record goes to a file of a new part, which names the valid
records of earlier parts.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import errno
import functools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict, Unpack

from deltackpt.errors import StorageError
from deltackpt.format import naming, wal_format
from deltackpt.format.manifest import SaveId
from deltackpt.format.row_blocks import Segment
from deltackpt.format.wal_format import ITEMS, RecordHead
from deltackpt.layers.footer import EpochRef, LayerManifest, RowGroup
from deltackpt.layers.write import LayerFile, LayerSegmentSink, LayerSink, row_group_of
from deltackpt.resources.runtime import Runtime
from deltackpt.storage import posix
from deltackpt.storage.posix import DirectFile, DurableDir, fsync_path
from deltackpt.storage.shard_writer import SegmentSink
from deltackpt.storage.store import store_path

#: Shorter writes use the page cache, which flushes several of them together. Appending 32 MB costs
#: 40 ms of CPU time through a full page cache and 8 ms with direct I/O.
_CACHED_BYTES = 1 << 20
#: Records up to this length are a single write.
_BUFFER_BYTES = 2 << 20


class FilledRecord(NamedTuple):
    """The head of a record, with placeholders for the part, and the segments that were written."""

    head: RecordHead
    segments: Sequence[Segment]


#: Writes the arrays of a record to the places of its segments.
Fill = Callable[[Callable[[str], SegmentSink]], FilledRecord]


class RecordPosition(NamedTuple):
    """The last record that was written, and its digest, which the next one names."""

    part: int
    seq: int
    digest: int


class EndedSegment(NamedTuple):
    """A segment that is not written to any more: its newest step, and where it is."""

    step: int
    at: Any


class RecordsOf(TypedDict):
    """Whose records a ``RecordWriter`` appends; see its arguments."""

    epoch: EpochRef
    process: int
    process_count: NotRequired[int]


class RecordWriter(abc.ABC):
    """Appends records to the WAL of one process; one thread uses it, and any may truncate."""

    def __init__(self, runtime: Runtime, *, epoch: EpochRef, process: int, process_count: int = 1):
        self._runtime = runtime
        self._epoch = epoch
        self._process, self._process_count = process, process_count
        self.position, self._part_start = RecordPosition(0, 0, 0), 1
        self._newest = -1
        self._lock = threading.Lock()
        #: Of the segment that is written to.
        self.segment_bytes = 0
        #: Their steps ascend.
        self._ended: list[EndedSegment] = []
        #: Whether earlier records were found to be missing.
        self.is_removed = False

    def write(self, save_id: SaveId, parent: SaveId, fill: Fill) -> int:
        """Appends a record relative to ``parent``; returns the number of bytes written.

        After any error, call ``start_part`` next.
        """
        file, at = self._open(), self.position
        manifest = LayerManifest(
            save_id=save_id,
            parent=parent,
            process=self._process,
            process_count=self._process_count,
            epoch=self._epoch,
        )
        layer = file.start_layer(manifest)
        try:
            record = fill(functools.partial(LayerSegmentSink, layer))
            head = dataclasses.replace(record.head, part=at.part, part_start=self._part_start)
            manifest = dataclasses.replace(
                manifest,
                schema=wal_format.record_head_bytes(head),
                row_groups=tuple(row_groups_of(record)),
            )
        except BaseException:
            layer.abandon()
            raise
        written = layer.finish(manifest)
        self.position = RecordPosition(at.part, at.seq + 1, written.digest)
        self._newest = save_id.step
        nbytes = written.stop - written.start
        self.segment_bytes += nbytes
        return nbytes

    def start_part(self, after: RecordPosition) -> None:
        """Begins a new part, which invalidates everything written after ``after``."""
        self.close()
        self._part_start = after.seq + 1
        self.position = RecordPosition(self.position.part + 1, after.seq, after.digest)

    def close(self) -> None:
        """Closes what is open."""
        with contextlib.suppress(StorageError):
            self.roll()

    def truncate(self, step: int) -> None:
        """Removes the segments that contain only records up to a step."""
        with self._lock:
            below = [one for one in self._ended if one.step <= step]
        self._remove(below)
        with self._lock:
            del self._ended[: len(below)]

    def _layer_file(self, sink: LayerSink, *, fsync: bool) -> LayerFile:
        """Returns a file that continues the last record."""
        return LayerFile(
            sink,
            self._runtime,
            fsync=fsync,
            sequence=self.position.seq + 1,
            predecessor=self.position.digest,
            buffer_bytes=_BUFFER_BYTES,
            checksum=False,
        )

    def _end(self, at: object) -> None:
        with self._lock:
            self._ended.append(EndedSegment(self._newest, at))

    @abc.abstractmethod
    def _remove(self, ended: Sequence[EndedSegment]) -> None:
        """Removes the oldest segments."""

    @abc.abstractmethod
    def _open(self) -> LayerFile:
        """Returns the file that the next record is written to."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Makes everything written durable; after a ``StorageError``, call ``start_part``."""

    @abc.abstractmethod
    def roll(self) -> None:
        """Ends the segment after ``sync``; raises ``StorageError`` if an earlier write was lost."""


class SegmentWriter(RecordWriter):
    """Appends records to segment files in ``directory``; never recreates ``root``."""

    def __init__(
        self, root: Path, directory: Path, runtime: Runtime, *, fsync: bool, **of: Unpack[RecordsOf]
    ):
        super().__init__(runtime, **of)
        self._root = root
        self.directory = directory
        self._fsync = fsync
        self._file: LayerFile | None = None
        self._sink: DirectFile | None = None
        self._path = directory
        self._fresh = False

    def sync(self) -> None:
        """See ``RecordWriter``: the file's name, too."""
        if self._file is None or self._sink is None:
            return
        self._file.sync()
        with posix.typed_errors(self.directory, "fsync", full="free space"):
            if self._fsync and self._fresh:
                fsync_path(self.directory)
                self._fresh = False
            if not os.path.samestat(os.fstat(self._sink.descriptor), os.stat(self._path)):
                raise FileNotFoundError(errno.ENOENT, "moved or removed", self._path)

    def roll(self) -> None:
        """See ``RecordWriter``."""
        self._file, sink, self._sink, self.segment_bytes = None, self._sink, None, 0
        if sink is not None:
            sink.close()

    def _remove(self, ended: Sequence[EndedSegment]) -> None:
        folder = store_path(self.directory)
        folder.store.delete((folder / one.at).key for one in ended)

    def _open(self) -> LayerFile:
        if self._file is not None:
            return self._file
        at = self.position
        if self._path != self.directory:
            self._end(self._path.name)  # Only now: the newest file always stays.
        self._path = self.directory / naming.segment_name(at.part, at.seq + 1)
        with posix.typed_errors(self.directory, "make a directory", full="free space"):
            DurableDir(self._root, fsync=self._fsync).make(self.directory)
        self._sink = DirectFile(self._path, cached_bytes=_CACHED_BYTES, full="free space")
        self._file = self._layer_file(self._sink, fsync=self._fsync)
        self._fresh = True
        return self._file


def row_groups_of(record: FilledRecord) -> list[RowGroup]:
    """Returns the row groups with the arrays of a record."""
    found = [row_group_of(segment) for segment in record.segments]
    if nbytes := record.head.item_bytes:
        found.append(
            RowGroup(name=ITEMS, group="", kind="item", count=nbytes, ranges=((0, nbytes),))
        )
    return found
