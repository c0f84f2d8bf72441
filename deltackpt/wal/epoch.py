# SPDX-License-Identifier: Apache-2.0
"""A WAL epoch: its header, the writer of this process, and the known recovery points."""

from __future__ import annotations

import abc
import collections
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from deltackpt.coordination import Coordinator
from deltackpt.errors import Damaged, DeltackptError, OptionError, StorageError, WalBehind
from deltackpt.format import naming, wal_format
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.format.wal_format import Continues, EpochHeader
from deltackpt.layers.footer import EpochRef
from deltackpt.maintenance import garbage
from deltackpt.options import KafkaWal, LocalWal
from deltackpt.reading.wal_index import RecoveryPoint, WalReader, local_wal_folder
from deltackpt.reading.wal_locations import NAME, DurableRecord, WalFolder, newest_durable
from deltackpt.resources.runtime import Runtime
from deltackpt.save.dense_save import DenseKeeper
from deltackpt.session.run import Run
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import Exists, store_path
from deltackpt.wal import kafka_writer
from deltackpt.wal.kafka_writer import KAFKA_SEGMENT_BYTES, KafkaWriter
from deltackpt.wal.record_batch import Batch, DenseRecords
from deltackpt.wal.segment_files import RecordsOf, RecordWriter, SegmentWriter
from deltackpt.wal.writer import WalWriter

#: Durable full records that other processes may not have yet.
_KEPT = 4096


class OpenEpoch:
    """The WAL that a run writes; the header of the epoch exists."""

    def __init__(
        self,
        run: Run,
        head: EpochHeader,
        runtime: Runtime,
        references: DenseKeeper | None,  # What dense leaves are relative to, unless whole.
    ):
        options = run.options.wal
        assert options is not None
        self.head = head
        root, folder = run.local.path, WalFolder(store_path(run.local.wal_dir))
        #: The folders in which this process sees the header.
        self._heads = [folder]
        no_shared_fs = run.no_shared_fs
        if no_shared_fs and run.coordinator.index > 0:
            self._heads.clear()
        if head.directory is not None:
            root, folder = Path(head.directory), local_wal_folder(head.directory, head.run)
            self._heads.append(folder)
        directory = Path(folder.segments(head.epoch))
        self._check_lease = run.check_lease
        #: The save that was last noted.
        self._base: SaveId | None = None
        self._lock = threading.Lock()
        self._durable: collections.deque[RecoveryPoint] = collections.deque(maxlen=_KEPT)
        #: The newest point that ``newest_point`` has returned.
        self._known: RecoveryPoint | None = None
        if no_shared_fs and head.directory is None:
            self.progress: WalProgress = CoordinatorProgress(run.coordinator, head)
        else:
            self.progress = FileProgress(directory, run.coordinator.index, head.process_count)
        self._watch = LagWatch(options.deadline_secs)
        backend, process = options.backend, run.coordinator.index
        self._process = process
        of: RecordsOf = {
            "epoch": EpochRef.from_header(head),
            "process": process,
            "process_count": head.process_count,
        }
        if isinstance(backend, KafkaWal):
            assert run.topic is not None and head.topic is not None
            if isinstance(self.progress, FileProgress):
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

    @property
    def survives_node(self) -> bool:
        """Whether the records are in their own directory or in Kafka."""
        return self.head.directory is not None or self.head.topic is not None

    @property
    def is_removed(self) -> bool:
        """Returns whether its records or its header are missing although the root exists."""
        with contextlib.suppress(DeltackptError):
            self._check_lease()
            return self._records.is_removed or not self._has_heads()
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
        """Returns the newest full point that all processes have; ``fresh`` reads progress now."""
        number, since = min(self.progress.of_each(fresh=fresh)), self.progress.others_since
        with self._lock:
            below = (one for one in reversed(self._durable) if one.save_id.attempt <= number)
            found = next(below, None)
        if found is not None and found.save_id.attempt >= since:
            self._known = found
        # Another process may lack the record of this call, but have that of a later one.
        known = self._known
        return known if known is not None and known.save_id.attempt <= number else None

    def note_base(self, base: SaveId) -> None:
        """Stores that the save that records continue from was committed, so its loss is damage."""
        if self._process or base == self._base or base.run != self.head.run:
            return
        self._base = base  # Even if the write fails: only verify reads it.
        folder = Path(self._heads[0].segments(self.head.epoch))
        data = DurableRecord(base.attempt, base.step)
        with contextlib.suppress(StorageError):
            DurableDir(folder, fsync=False).write(folder / NAME, data.to_bytes())

    def lagging(self) -> WalBehind | None:
        """Returns an error about processes that lag; only process 0 looks, and not at each call."""
        if self._process or self.progress.count == 1:
            return None
        return self._watch.look(time.monotonic(), self.progress.of_each)

    def truncate(self, step: SaveId) -> None:
        """Removes records that no restore needs: those up to a step, and all earlier epochs.

        Pass the step before the newest, so that a damaged step costs nothing. Each process removes
        its own records, process 0 the earlier epochs, and the uploader files in a bucket.
        """
        if step.run != self.head.run:
            return
        end = self.head.continues
        if end is not None and end.save_id.step > step.step:
            return  # Points of the earlier epochs replay onto the step.
        self._records.truncate(step.step)
        if self._process == 0:
            for number in WalReader(self._heads[0]).numbers():
                if number < self.head.epoch:
                    garbage.remove_wal_epoch(self._heads[0], number)

    def close(self) -> dict[str, np.ndarray]:
        """Ends the writer; returns the rows that no durable record contains, by table."""
        self.writer.close()
        self.progress.close()
        return self.writer.drain_pending()

    def _is_durable(self, records: Sequence[Batch]) -> None:
        with self._lock:
            self._durable.extend(
                RecoveryPoint(self.head.epoch, one.save_id, True, one.unix_ns / 1e9)
                for one in records
                if one.full
            )
        self.progress.record([one.save_id for one in records])


def local_directory(run: Run) -> str | None:
    """Returns the directory of the segments, unless they are next to the headers or in Kafka."""
    backend = None if run.options.wal is None else run.options.wal.backend
    return backend.directory if isinstance(backend, LocalWal) else None


def write_head(
    run: Run,
    reader: WalReader,
    base: SaveId | None,  # The step that training continues from.
    continues: Continues | None,  # The restored recovery point, or the run's newest.
    layout: Layout | None = None,
) -> EpochHeader:
    """Writes the header of a new epoch, and returns it.

    It invalidates the records above its fork point. Without a layout, the run has no WAL.
    """
    directory = topic = None
    if layout is not None:
        directory = local_directory(run)
        topic = None if run.topic is None else kafka_writer.here(run.topic)
    tables, headers = layout or Layout((), (), (), ()), WalFolder(store_path(run.local.wal_dir))
    while True:
        # If the reader is that of a bucket, the newest headers may not be uploaded yet.
        number = max([*reader.numbers(), *headers.numbers()], default=-1) + 1
        head = EpochHeader(
            epoch=number,
            run=run.lineage.run,
            process_count=0 if layout is None else run.coordinator.count,
            base=base,
            continues=continues,
            directory=directory,
            topic=topic,
            features=() if topic is None else (wal_format.KAFKA,),
            groups=tables.groups,
            tables=tables.tables,
            dense=tables.dense,
            tracking_paths=tables.tracking_paths,
        )
        name, data = naming.epoch_name(number), wal_format.epoch_header_bytes(head)
        if directory is not None:
            # Readers there find the root of the segments. A call whose next write failed may have
            # written it.
            local = local_wal_folder(directory, head.run)
            for one in (local.at / name, local.segments(number) / naming.HEAD_COPY):
                one.store.put(one.key, data)
        header, copy = headers.at / name, headers.segments(number) / naming.HEAD_COPY
        try:
            header.store.put(header.key, data, absent=True)
        except Exists:
            continue  # Another trainer's; the lease decides between us.
        copy.store.put(copy.key, data)
        return head


def wal_key(head: EpochHeader) -> str:
    """Returns the prefix of the coordinator's keys of an epoch."""
    return f"deltackpt/wal/{head.run}/{head.epoch}"


def head_of(run: Run, reader: WalReader, sent: EpochHeader) -> EpochHeader:
    """Reads the header that process 0 has written and sent, if this process can see it."""
    if (directory := local_directory(run)) is None:
        return sent if run.no_shared_fs else reader.head(sent.epoch)
    found: EpochHeader | None = None
    with contextlib.suppress(Damaged):
        name, data = local_wal_folder(directory, run.lineage.run).head(sent.epoch)
        found = wal_format.epoch_header_from(data, name=name)
    if found is None:
        raise OptionError(
            f"WalOptions.backend: expected a directory that all {run.coordinator.count} processes "
            f"see, found that process {run.coordinator.index} does not see in {directory} what "
            "process 0 wrote there; use a directory that the nodes share"
        )
    return found


#: Minimum time between reads of the others' progress.
_READ_SECS = 0.5
#: Minimum time between reports of lagging processes.
_REPORT_SECS = 60.0


class WalProgress(abc.ABC):
    """The progress of the processes of one epoch, written by one thread, read by another."""

    def __init__(self, process: int, count: int):
        self.process = process
        self.count = count
        self._own = DurableRecord(0, 0)
        #: The newest record of each other process, as last read.
        self._read: Mapping[int, DurableRecord] = {}
        self._read_at = 0.0

    def record(self, saves: Sequence[SaveId]) -> None:
        """Reports that records of this process, oldest first, are durable."""
        own = self._own
        for one in saves:
            since = own.since if one.attempt == own.number + 1 else one.attempt
            own = DurableRecord(one.attempt, one.step, since)
        self._own = own
        self._store(own.to_bytes())

    def reset(self) -> None:
        """Reports that this process has no record."""
        self._own = DurableRecord(0, 0)
        self._store(self._own.to_bytes())

    @abc.abstractmethod
    def _store(self, record: bytes) -> None:
        """Makes this process's progress visible to the others; never raises."""

    @abc.abstractmethod
    def _others(self, *, fresh: bool) -> dict[int, DurableRecord]:
        """Returns the newest records of the other processes; never raises."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes what is open; the next ``record`` opens it again."""

    def of_each(self, *, fresh: bool = False) -> list[int]:
        """Returns the number of the newest record of each process, or 0.

        The others' progress is cached for a moment, unless ``fresh``.
        """
        now = time.monotonic()
        if self.count > 1 and (fresh or now - self._read_at >= _READ_SECS):
            self._read, self._read_at = self._others(fresh=fresh), now
        found = {process: one.number for process, one in self._read.items()}
        found[self.process] = self._own.number
        return [found.get(process, 0) for process in range(self.count)]

    @property
    def others_since(self) -> int:
        """The call from which on every other process has each record, as last read."""
        others = self._read.items()
        return max((one.since for process, one in others if process != self.process), default=0)


class CoordinatorProgress(WalProgress):
    """Progress through the coordinator, for processes that share no directory."""

    def __init__(self, coordinator: Coordinator, head: EpochHeader):
        super().__init__(coordinator.index, coordinator.count)
        self._coordinator = coordinator
        self._key = f"{wal_key(head)}/progress/"
        #: The newest record of each process, as last read.
        self._found: dict[int, DurableRecord] = {}
        self._finding: threading.Thread | None = None

    def _store(self, record: bytes) -> None:
        with contextlib.suppress(StorageError):
            self._coordinator.replace(f"{self._key}{self.process}", record)

    def _others(self, *, fresh: bool) -> dict[int, DurableRecord]:
        if fresh or self._finding is None or not self._finding.is_alive():
            # ``append()`` must not wait if process 0, which runs the service, has stopped.
            self._finding = threading.Thread(target=self._find, name="deltackpt-wal", daemon=True)
            self._finding.start()
        if fresh:
            self._finding.join(self._coordinator.timeout_secs)
        return self._found

    def _find(self) -> None:
        with contextlib.suppress(StorageError):
            found = self._coordinator.folder(self._key)
            self._found = {
                int(number): DurableRecord.from_bytes(data) for number, data in found.items()
            }

    def close(self) -> None:
        """See ``WalProgress``: nothing is open."""


class FileProgress(WalProgress):
    """Progress in a file next to the segments of each process, which restores read."""

    def __init__(self, epoch_dir: Path, process: int, count: int):
        super().__init__(process, count)
        self._epoch_dir = epoch_dir
        self._lock = threading.Lock()
        self._file: int | None = None

    def _store(self, record: bytes) -> None:
        path = self._epoch_dir / str(self.process) / NAME
        with self._lock, contextlib.suppress(OSError):
            if self._file is None:
                # A new file at first; then in place, at a tenth of the cost.
                DurableDir(path.parent, fsync=False).write(path, record)
                self._file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            else:
                os.pwrite(self._file, record, 0)

    def close(self) -> None:
        """See ``WalProgress``."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _others(self, *, fresh: bool) -> dict[int, DurableRecord]:
        at, others = store_path(self._epoch_dir), {*range(self.count)} - {self.process}
        return {number: newest_durable(at / str(number)) for number in others}


class LagWatch:
    """Finds processes that lack a record that another has had for ``deadline_secs``."""

    def __init__(self, deadline_secs: float):
        self._deadline_secs = deadline_secs
        #: The newest record of any process at the last look, and when the next look is due.
        self._top, self._due = 0, -math.inf

    def look(self, now: float, numbers: Callable[[], Sequence[int]]) -> WalBehind | None:
        """Returns an error about the processes that lag, at most once a minute."""
        if now < self._due:
            return None
        found = numbers()
        lagging = tuple(process for process, number in enumerate(found) if number < self._top)
        self._top, self._due = max(found), now + self._deadline_secs
        if not lagging:
            return None
        self._due = max(self._due, now + _REPORT_SECS)
        which = f"process{'es' if len(lagging) > 1 else ''} {', '.join(map(str, lagging))}"
        return WalBehind(
            f"WAL: expected every process within {self._deadline_secs:g} s of the others "
            f"(WalOptions.deadline_secs), found that {which} lack records that others had by then; "
            "newer records cannot be restored until they catch up: check their disks",
            lagging,
        )
