# SPDX-License-Identifier: Apache-2.0
"""Writes the WAL records of a process to a Kafka partition instead of a file.

After a failure, a message may be stored, may still arrive, or may be lost. The next record then
begins a new part, with a new producer, as for files.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

from deltackpt.errors import OptionError, RestoreError, StorageError
from deltackpt.format import wal_format
from deltackpt.format.manifest import SaveId
from deltackpt.format.wal_format import WalTopic
from deltackpt.layers.write import LayerFile
from deltackpt.reading.wal_index import WalReader
from deltackpt.resources.runtime import Runtime
from deltackpt.storage.kafka import Producer, Topic
from deltackpt.wal.segment_files import EndedSegment, Fill, RecordsOf, RecordWriter

#: Bytes after which dense leaves are whole again, so that older records can be deleted.
KAFKA_SEGMENT_BYTES = 256 << 20


def here(topic: Topic) -> WalTopic:
    """Returns the topic with its ends: no record of a later epoch is before them."""
    offsets = topic.offsets()
    starts = tuple(offsets[partition].stop for partition in sorted(offsets))
    return WalTopic(name=topic.name, cluster=topic.cluster(), starts=starts)


def refuse_foreign(topic: Topic, reader: WalReader) -> None:
    """Raises ``OptionError`` if another directory uses a topic: truncation deletes records."""
    if all(offsets.start == offsets.stop for offsets in topic.offsets().values()):
        return
    for number in reader.numbers():
        with contextlib.suppress(RestoreError):
            known = reader.head(number).topic
            if known is not None and known.name == topic.name:
                return
    raise OptionError(
        f"{topic}: expected no messages, or those of this checkpoint directory, found messages, "
        f"but no WAL epoch in {reader.places} names the topic; use a topic of its own for each "
        "directory, or delete the messages"
    )


class _RecordBytes:
    """A record in memory; see ``layers.write.LayerSink``."""

    def __init__(self, path: Path):
        self.path = path
        self._lock, self._data = threading.Lock(), io.BytesIO()

    def write(self, start: int, data: np.ndarray) -> None:
        with self._lock:
            self._data.seek(start)
            self._data.write(data.data)

    def sync(self, *, metadata: bool = True) -> None:
        """See ``LayerSink``."""

    def view(self, nbytes: int) -> memoryview:
        return self._data.getbuffer()[:nbytes]


class KafkaWriter(RecordWriter):
    """Appends records to the partition of a process."""

    def __init__(
        self,
        topic: Topic,
        at: WalTopic,  # As the header of the epoch describes it.
        runtime: Runtime,
        *,
        message_bytes: int,
        deadline_secs: float,  # How long a record may wait for its acknowledgement.
        **of: Unpack[RecordsOf],
    ):
        super().__init__(runtime, **of)
        self._topic, self._starts = topic, at.starts
        self._message_bytes, self._deadline_secs = message_bytes, deadline_secs
        #: Offset after the newest acknowledged message.
        self._reached = at.starts[self._process]
        self._producer: Producer | None = None
        self._record: _RecordBytes | None = None

    def write(self, save_id: SaveId, parent: SaveId, fill: Fill) -> int:
        """See ``RecordWriter``: also sends the record."""
        nbytes = super().write(save_id, parent, fill)
        assert self._record is not None and self._producer is not None
        record, self._record = self._record, None
        for chunk in wal_format.record_chunks(
            record.view(nbytes),
            part=self.position.part,
            epoch=self._epoch.number,
            epoch_crc32c=self._epoch.crc32c,
            seq=self.position.seq,
            message_bytes=self._message_bytes,
        ):
            self._producer.send(chunk.to_bytes())
        return nbytes

    def sync(self) -> None:
        """See ``RecordWriter``: waits until all in-sync replicas have every message."""
        if self._producer is not None:
            self._producer.flush()
            self._reached = self._producer.stop or self._reached

    def roll(self) -> None:
        """See ``RecordWriter``: later records can be read without those before."""
        stop = None if self._producer is None else self._producer.stop
        if stop is not None and self.segment_bytes:
            self._end(stop)
        self.segment_bytes = 0

    def close(self) -> None:
        """See ``RecordWriter``; does not wait for what was not acknowledged."""
        super().close()
        if self._producer is not None:
            self._producer.close()
            self.is_removed = self.is_removed or self._producer.is_recreated
            self._producer = None

    def _remove(self, ended: Sequence[EndedSegment]) -> None:
        """Deletes ended epochs; Kafka can only delete the beginning of a partition."""
        # So all earlier epochs are deleted, too. Process 0 also empties the partitions that no
        # process writes to.
        offsets = {self._process: ended[-1].at if ended else self._starts[self._process]}
        if self._process == 0:
            offsets |= dict(enumerate(self._starts[self._process_count :], self._process_count))
        self._topic.truncate(offsets)

    def _open(self) -> LayerFile:
        if self.is_removed:
            raise StorageError(
                f"{self._topic}: expected the records before, found that the topic was recreated; "
                "the next append() saves the step and starts a new epoch"
            )
        if self._producer is None:
            self._producer = self._topic.producer(
                self._process,
                message_bytes=self._message_bytes,
                timeout_secs=self._deadline_secs,
                start=self._reached,
            )
        name = f"{self._topic}, partition {self._process}, record {self.position.seq + 1}"
        self._record = _RecordBytes(Path(name))
        return self._layer_file(self._record, fsync=False)
