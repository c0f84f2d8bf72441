# SPDX-License-Identifier: Apache-2.0
"""The WAL records of Kafka topics, copied into segment files of a private temporary directory.

Repeated messages are dropped. After missing ones, a new segment file begins, so the reader reports
which records are missing. Messages are not trusted: nothing that they claim is allocated, and the
records verify themselves when they are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from deltackpt.errors import OptionError, RestoreError, StorageError
from deltackpt.format import naming, wal_format
from deltackpt.format.wal_format import EpochHeader, RecordChunk, WalTopic
from deltackpt.layers.footer import EpochRef
from deltackpt.reading.wal_locations import NAME, NBYTES
from deltackpt.storage import posix
from deltackpt.storage.kafka import Config, Message, Offsets, Topic
from deltackpt.storage.store import FileStore, StorePath

#: Length at which the copy of a segment ends, so that it can be removed once it is trimmed.
_SEGMENT_BYTES = 64 << 20


class _Next(NamedTuple):
    seq: int
    index: int


@dataclasses.dataclass(eq=False)
class _CopiedPart:
    """The copied records of a part, of which ``path`` is the current segment file."""

    following: _Next
    path: Path
    nbytes: int = 0


class Partition:
    """The copied records of a process in an epoch."""

    def __init__(self, folder: Path, epoch: EpochRef, start: int):
        self.folder = folder
        self._epoch = epoch
        #: Offset of the next message to read.
        self.offset = start
        self._parts: dict[int, _CopiedPart] = {}
        #: Segment files to the offset of their last message, which shows when they are trimmed.
        self._last: dict[Path, int] = {}

    def add(self, message: Message) -> None:
        """Copies the chunk of a message if it continues what was copied."""
        self.offset = message.offset + 1
        chunk = wal_format.chunk_from(message.data)
        if chunk is None:
            return
        if EpochRef(number=chunk.epoch, crc32c=chunk.epoch_crc32c) != self._epoch:
            return
        part = self._parts.get(chunk.part)
        if part is None or (chunk.index == 0 and self._begins_file(part, chunk)):
            if chunk.index:
                return  # The beginning of its record is missing.
            path = self.folder / naming.segment_name(chunk.part, chunk.seq)
            part = self._parts[chunk.part] = _CopiedPart(_Next(chunk.seq, 0), path)
        if (chunk.seq, chunk.index) != part.following:
            return
        _append(part.path, part.nbytes, chunk.data)
        part.nbytes += len(chunk.data)
        is_last = chunk.index == chunk.count - 1
        part.following = _Next(chunk.seq + 1, 0) if is_last else _Next(chunk.seq, chunk.index + 1)
        self._last[part.path] = message.offset

    def _begins_file(self, part: _CopiedPart, chunk: RecordChunk) -> bool:
        """Returns whether a record does not belong into the current file of its part."""
        if chunk.seq > part.following.seq:
            return True  # Records before it are missing.
        return part.following == (chunk.seq, 0) and part.nbytes >= _SEGMENT_BYTES

    def trim(self, start: int) -> None:
        """Removes segments whose messages the topic no longer has."""
        for path in [path for path, last in self._last.items() if last < start]:
            del self._last[path]
            path.unlink(missing_ok=True)
        for part in self._parts.values():
            if part.path not in self._last:
                # Its next whole record begins a file, never the middle of the removed one.
                seq, index = part.following
                part.following, part.nbytes = _Next(seq + (index > 0), 0), _SEGMENT_BYTES


class WalTopics:
    """Copies of the topics that one checkpoint directory's WAL epochs use; thread-safe."""

    def __init__(self, config: Config, *, follow: bool = False):
        """Connects when an epoch is read; see ``storage.kafka.Topic`` for ``config``.

        With ``follow``, messages of the newest epoch are fetched ahead, up to 64 MiB.
        """
        self._config, self._follow = config, follow
        self._lock = threading.Lock()
        self._copies: FileStore | None = None
        self._topics: dict[str, Topic] = {}
        self._clusters: dict[str, str] = {}
        self._epochs: dict[EpochRef, dict[int, Partition]] = {}

    def segments(self, epoch: EpochRef) -> StorePath:
        """Returns the directory with the copied segments of an epoch."""
        with self._lock:
            return self._epoch_folder(epoch)

    def copy(
        self, head: EpochHeader, epoch: EpochRef, beside: StorePath, until: WalTopic | None
    ) -> None:
        """Copies what was written to an epoch since the last call.

        ``beside`` is its folder next to the headers, which has the progress of its processes.
        ``until`` is the topic of an epoch that continues from it: what follows does not count.
        Raises OptionError for the configuration of another cluster, or if the topic is gone.
        """
        assert head.topic is not None
        with self._lock:
            topic = self._topic(head.topic)
            folder = Path(self._epoch_folder(epoch))
            if epoch not in self._epochs:
                self._epochs[epoch] = {
                    process: Partition(folder / str(process), epoch, head.topic.starts[process])
                    for process in range(head.process_count)
                }
            partitions = self._epochs[epoch]
            for process, partition in partitions.items():
                _copy_progress(beside / str(process) / NAME, partition.folder)
            there = topic.offsets(partitions.keys())
            ends = _ends(head.topic, until, there)
            spans = {
                process: Offsets(max(partition.offset, there[process].start), ends[process])
                for process, partition in partitions.items()
            }
            for message in topic.read(spans, follow=self._follow and until is None):
                partitions[message.partition].add(message)
            for process, partition in partitions.items():
                # Past messages that are not there, too.
                partition.offset = max(partition.offset, spans[process].stop)
                partition.trim(there[process].start)

    def remove(self, epoch: EpochRef) -> None:
        """Removes the copies of an epoch that no restore needs any more."""
        with self._lock:
            if self._epochs.pop(epoch, None) is not None:
                shutil.rmtree(Path(self._epoch_folder(epoch)), ignore_errors=True)

    def close(self) -> None:
        """Disconnects and removes the copies."""
        with self._lock:
            for topic in self._topics.values():
                topic.close()
            if self._copies is not None:
                shutil.rmtree(self._copies.path, ignore_errors=True)
            self._copies = None
            self._topics.clear()
            self._epochs.clear()

    def _epoch_folder(self, epoch: EpochRef) -> StorePath:
        if self._copies is None:
            self._copies = FileStore(Path(tempfile.mkdtemp(prefix="deltackpt-")))
            # Records have the store, and may be read after this object is gone.
            weakref.finalize(self._copies, shutil.rmtree, self._copies.path, ignore_errors=True)
        return StorePath(self._copies, f"{epoch.number}-{epoch.crc32c:08x}")

    def _topic(self, wanted: WalTopic) -> Topic:
        if wanted.name not in self._topics:
            self._topics[wanted.name] = Topic(wanted.name, self._config)
        topic = self._topics[wanted.name]
        if wanted.name not in self._clusters:
            self._clusters[wanted.name] = topic.cluster()
        if (found := self._clusters[wanted.name]) != wanted.cluster:
            raise OptionError(
                f"KafkaWal.config: expected the cluster {wanted.cluster} of {topic}, found "
                f"{found}; pass the brokers of that cluster, or restore a step: "
                "restore_latest(wal=False)"
            )
        return topic


def _ends(topic: WalTopic, until: WalTopic | None, there: Mapping[int, Offsets]) -> dict[int, int]:
    ends = {process: offsets.stop for process, offsets in there.items()}
    if until is not None and (until.name, until.cluster) == (topic.name, topic.cluster):
        starts = dict(enumerate(until.starts))
        ends = {process: min(end, starts.get(process, end)) for process, end in ends.items()}
    return ends


def _copy_progress(source: StorePath, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(RestoreError, StorageError):  # It is advice.
        data = source.read(most_bytes=NBYTES)
        _append(folder / NAME, 0, memoryview(data))


def _append(path: Path, start: int, data: memoryview) -> None:
    with posix.typed_errors(path, "copy a WAL from Kafka", full="free space in TMPDIR"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while len(data):
                count = os.pwrite(descriptor, data, start)
                data, start = data[count:], start + count
        finally:
            os.close(descriptor)
