# SPDX-License-Identifier: Apache-2.0
"""A WAL epoch: its header, the writer of this process, and the known recovery points."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deltackpt.errors import Damaged, DeltackptError, OptionError, StorageError
from deltackpt.format import names, wal_epochs
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.format.wal_epochs import Continues, EpochHeader, WalTopic
from deltackpt.handlers.run import Run
from deltackpt.layers.footer import EpochRef
from deltackpt.options import KafkaWal
from deltackpt.reading.wal_index import RecoveryPoint, WalReader, apart_folder
from deltackpt.reading.wal_locations import WalFolder
from deltackpt.resources.runtime import Runtime
from deltackpt.save.dense import DenseKeeper
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import Exists, store_path
from deltackpt.upkeep import wal_removal
from deltackpt.wal.dense_records import DenseRecords
from deltackpt.wal.kafka_writer import KAFKA_SEGMENT_BYTES, KafkaWriter
from deltackpt.wal.progress import Progress
from deltackpt.wal.segments import RecordWriter, SegmentWriter
from deltackpt.wal.writer import Durable, WalWriter

#: Durable records that other processes may not have yet.
_KEPT = 4096


class OpenEpoch:
    """The WAL that a run writes."""

    def __init__(
        self,
        run: Run,
        head: EpochHeader,
        root: Path,
        directory: Path,
        runtime: Runtime,
        references: DenseKeeper | None,
    ):
        """Writes nothing yet.

        Args:
          run: the manager's run.
          head: header of the epoch.
          root: an existing directory, which is never recreated.
          directory: with the segments of all processes, in the root.
          runtime: writes and encodes the records.
          references: what dense leaves are relative to; None if they are whole.
        """
        options = run.options.wal
        assert options is not None
        self.head = head
        self._heads = [WalFolder(store_path(run.held.log_dir))]
        self._check_lease = run.held.check_lease
        self._lock = threading.Lock()
        self._durable: collections.deque[Durable] = collections.deque(maxlen=_KEPT)
        self.progress = Progress(directory, run.among.index, head.process_count)
        backend, process = options.backend, run.among.index
        self._process = process
        of: dict[str, Any] = {
            "epoch": EpochRef.of(head),
            "process": process,
            "process_count": head.process_count,
        }
        if isinstance(backend, KafkaWal):
            assert run.topic is not None and head.topic is not None
            # Only the progress is stored there.
            DurableDir(root, fsync=run.fsync).make(directory / str(process))
            self._records: RecordWriter = KafkaWriter(
                run.topic,
                head.topic,
                runtime,
                message_bytes=backend.chunk_bytes,
                deadline_secs=options.deadline_secs,
                **of,
            )
            segment_bytes = KAFKA_SEGMENT_BYTES
        else:
            self._records = SegmentWriter(
                root, directory / str(process), runtime, fsync=run.fsync, **of
            )
            segment_bytes = backend.segment_bytes
        self.writer = WalWriter(
            self._records,
            check=self._check,
            process=process,
            dense=DenseRecords(references),
            segment_bytes=segment_bytes,
            deadline_secs=options.deadline_secs,
            runtime=runtime,
            notify=self._is_durable,
        )

    @classmethod
    def open(
        cls, run: Run, head: EpochHeader, runtime: Runtime, references: DenseKeeper | None
    ) -> OpenEpoch:
        """Opens an epoch whose header exists; see ``OpenEpoch``."""
        root, folder = run.held.path, WalFolder(store_path(run.held.log_dir))
        if head.directory is not None:
            root, folder = Path(head.directory), apart_folder(head.directory, head.run)
        found = cls(run, head, root, Path(folder.segments(head.epoch)), runtime, references)
        found._heads.append(folder)
        return found

    @property
    def is_removed(self) -> bool:
        """Returns whether its header is missing although the root exists."""
        with contextlib.suppress(DeltackptError):
            self._check_lease()
            return not self._has_heads()
        return False

    def _has_heads(self) -> bool:
        return all(heads.has(self.head.epoch) for heads in self._heads)

    def _check(self) -> None:
        self._check_lease()
        if not self._has_heads():
            raise StorageError(
                f"{self._heads[-1]}: expected the header of WAL epoch {self.head.epoch}, found "
                "none; it was moved or removed: the next append() starts a new epoch"
            )

    def newest_point(self, *, fresh: bool) -> RecoveryPoint | None:
        """Returns the newest full point that every process is known to have.

        Args:
          fresh: whether to read the other processes' progress now.
        """
        number = self.progress.of_all(fresh=fresh)
        with self._lock:
            found = (
                one for one in reversed(self._durable) if one.full and one.save_id.attempt <= number
            )
            newest = next(found, None)
        if newest is None:
            return None
        return RecoveryPoint(self.head.epoch, newest.save_id, True, newest.unix_secs)

    def truncate(self, step: SaveId) -> None:
        """Removes records that no restore needs: those up to a step, and all earlier epochs.

        Each process removes its own records of this epoch, and process 0 all earlier epochs. The
        uploader removes files in a bucket.

        Args:
          step: a committed step that restores may still fall back to: the one before the newest, so
            that a damaged step costs nothing.

        Raises:
          StorageError: the store reported an error.
        """
        if step.run != self.head.run:
            return
        self._records.truncate(step.step)
        if self._process == 0:
            for number in WalReader(self._heads[0]).numbers():
                if number < self.head.epoch:
                    wal_removal.remove(self._heads[0], number)

    def close(self) -> dict[str, np.ndarray]:
        """Ends the writer; returns the rows that no durable record contains, by table."""
        self.end()
        return self.writer.take_owed()

    def end(self) -> None:
        """Stops the writer."""
        self.writer.close()
        self.progress.close()

    def void(self) -> None:
        """Informs the other processes that this process has no valid records."""
        self.progress.note(0, 0)
        self.progress.close()

    def _is_durable(self, records: Sequence[Durable]) -> None:
        with self._lock:
            self._durable.extend(records)
        self.progress.note(records[-1].save_id.attempt, records[-1].save_id.step)


def write_head(
    logs: WalReader,
    *,
    run: str,
    layout: Layout | None,
    process_count: int,
    base: SaveId | None,
    continues: Continues | None,
    directory: str | None,
    topic: WalTopic | None,
    log_dir: Path,
) -> int:
    """Writes the header of a new epoch; earlier epochs are valid only up to its fork point.

    Args:
      logs: the WAL of the root.
      run: id of the run.
      layout: layout of the logged state; None without a WAL.
      process_count: number of processes that append.
      base: the step that training continues from.
      continues: the restored recovery point, if any.
      directory: directory of the segments, if they are not next to the headers. It gets a copy of
        the header, so that a reader there can find the root of the segments.
      topic: the Kafka topic that holds the records instead of segments.
      log_dir: directory of the headers.

    Returns:
      The number of the epoch.

    Raises:
      StorageError: it cannot be written.
    """
    while True:
        number = max(logs.numbers(), default=-1) + 1
        head = EpochHeader(
            epoch=number,
            run=run,
            process_count=process_count,
            base=base,
            continues=continues,
            directory=directory,
            topic=topic,
            features=() if topic is None else (wal_epochs.KAFKA,),
            groups=() if layout is None else layout.groups,
            tables=() if layout is None else layout.tables,
            dense=() if layout is None else layout.dense,
            tracking_paths=() if layout is None else layout.tracking_paths,
        )
        name, data = names.epoch_name(number), wal_epochs.to_bytes(head)
        if directory is not None:
            # It may be there from a call whose next write failed.
            apart = apart_folder(directory, run)
            for one in (apart.at / name, apart.segments(number) / names.HEAD_COPY):
                one.store.put(one.key, data)
        place = store_path(log_dir) / name
        try:
            place.store.put(place.key, data, absent=True)
        except Exists:
            continue  # Another trainer's; the lease decides between us.
        copy = WalFolder(place.parent).segments(number) / names.HEAD_COPY
        copy.store.put(copy.key, data)
        return number


def head_of(run: Run, logs: WalReader, number: int) -> EpochHeader:
    """Reads the header that process 0 has written.

    Args:
      run: the manager's run.
      logs: the WAL of the root.
      number: number of the epoch.

    Raises:
      OptionError: this process does not see the WAL directory of process 0.
      Damaged: the header is missing or altered.
    """
    options = run.options.wal
    assert options is not None
    backend = options.backend
    if isinstance(backend, KafkaWal) or (directory := backend.directory) is None:
        return logs.head(number)
    found: EpochHeader | None = None
    with contextlib.suppress(Damaged):
        name, data = apart_folder(directory, run.lineage.run).head(number)
        found = wal_epochs.from_bytes(data, name=name)
    if found is None:
        raise OptionError(
            f"WalOptions.backend: expected a directory that all {run.among.count} processes see, "
            f"found that process {run.among.index} does not see in {directory} what process 0 "
            "wrote there; use a directory that the nodes share"
        )
    return found
