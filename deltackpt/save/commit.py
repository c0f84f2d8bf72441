# SPDX-License-Identifier: Apache-2.0
"""A step as a transaction of all its processes: written, fsynced, made visible by one rename.

Everything is fsynced once, in parallel, after all files exist; each process fsyncs its files before
it reports that they are written. A step that was interrupted before the rename is never read.

Each process writes its shard, the other items and the digests of their files, and reports to
process 0. That reads the manifests, checks that all describe the same save, writes its own with an
index of all shards, commits, and reports that to all. A process that fails reports its error
instead, which prevents the commit. A process that gives up waiting prevents it, too, unless process
0 has already decided to commit: of the two, the first to store a value under one key wins. After
the decision, only the rename remains.

If the processes do not share a file system, each writes to a directory on its own node. With its
reports, it sends its manifest, its digests and the nodes of the OCDBT databases of dense leaves.
Process 0 sends its manifest after it has committed the step; then the others publish their shards.
Rows and values stay on their node until they are uploaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import google_crc32c
import msgpack

from deltackpt.coordination import Coordinator
from deltackpt.errors import Disagreement, ProcessMissing, StorageError, TrackingError
from deltackpt.format import manifest, naming
from deltackpt.format.manifest import Manifest, ShardEntry
from deltackpt.format.row_blocks import width
from deltackpt.resources.runtime import READS, Runtime
from deltackpt.state import placement
from deltackpt.storage import digests, posix
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import Digest
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.shard_writer import shard_entry
from deltackpt.storage.store import store_path

#: A process reports that all its files of the step are written; process 0 also reports the commit.
Phase = Literal["written", "done"]

_DEEDS: dict[Phase, str] = {
    "written": "write its files of the step",
    "done": "commit the step",
}
_SHOWN = 8
#: Fields that must be equal in the manifests of one save.
_AGREED = ("save_id", "kind", "parent", "process_count", "restores", "plan_crc32c")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepWriters:
    """The processes that write one step together, as one of them sees them."""

    coordinator: Coordinator
    key: str  # identifies the save in the job; the same on every process
    temporary: Path  # the step's temporary directory
    runtime: Runtime
    shared_fs: bool = True  # whether all processes see ``temporary``
    fsync: bool = True  # whether the step must survive a power cut
    _reported: set[Phase] = dataclasses.field(default_factory=set)

    @property
    def process(self) -> int:
        """Returns the index of this process."""
        return self.coordinator.index

    @property
    def count(self) -> int:
        """Returns the number of processes."""
        return self.coordinator.count

    @property
    def reporters(self) -> range:
        """Returns the processes that report to process 0."""
        return range(1, self.count)

    @property
    def _step(self) -> str:
        return f"step {_step_of(self.temporary.name)}"

    @property
    def prefix(self) -> str:
        """Returns the first part of the keys of all messages."""
        return f"deltackpt/save/{self.key}"

    def records(self, paths: Iterable[Path]) -> dict[str, bytes]:
        """Returns the files to send with a report, by posix path below the step, if any."""
        if self.count == 1 or self.shared_fs:
            return {}
        found = {path.relative_to(self.temporary).as_posix(): path for path in paths}
        return {name: store_path(path).read() for name, path in found.items()}

    def report(self, phase: Phase, records: Mapping[str, bytes | None]) -> None:
        """Reports that this process is done with a phase, with files that the receivers store.

        None stands for a file that the receivers see on the shared file system.
        """
        if self.count > 1:
            self._reported.add(phase)
            packed: Any = msgpack.packb((self.temporary.name, records))
            self.coordinator.send(f"{self.prefix}/{phase}", packed)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Shows during a block that this process is alive; reports an error of the block."""
        try:
            with self.coordinator.alive():
                yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Replaces reports by an error unless this process has committed the step; never raises."""
        phase: Phase = "written" if self.process else "done"
        if self.count > 1 and "done" not in self._reported:
            self.coordinator.send_failure(f"{self.prefix}/{phase}", error)

    def decide(self) -> None:
        """Records process 0's decision to commit; raises the error of a process that gave up."""
        if self.count > 1:
            self.coordinator.decide(f"{self.prefix}/decision", self._step)

    def give_up(self, error: BaseException) -> bool:
        """Prevents the commit; returns False if process 0 may already have decided to commit."""
        return self.coordinator.prevent(f"{self.prefix}/decision", error)

    def expire(self) -> None:
        """Deletes the messages of earlier saves; called when this process's shard has ended."""
        if self.process == 0 and self.count > 1:
            self.coordinator.expire(self.prefix)

    def wait(self, phase: Phase) -> set[str]:
        """Waits for a report of process 0, or as process 0 for all others; stores their files.

        Returns the names of these files, by posix path below the step.
        """
        topic, senders = f"{self.prefix}/{phase}", [0] if self.process else self.reporters
        received: dict[str, bytes | None] = {}
        for process, packed in self.coordinator.receive(topic, senders, self._step, _DEEDS[phase]):
            temporary, records = msgpack.unpackb(packed)
            if temporary != self.temporary.name:
                raise Disagreement(
                    f"{self._step}: expected process {process} to save the same step, found that "
                    f"it saves step {_step_of(temporary)}; call save() at the same steps on every "
                    "process, and restart the job if one has skipped a call"
                )
            received |= records
        for name, data in received.items():
            if data is not None:
                root = DurableDir(self.temporary.parent, fsync=self.fsync)
                root.write(self.temporary / name, data)
        return {*received}

    def collect(self, item_dir: Path, own: Manifest) -> tuple[ShardEntry, ...]:
        """Reads the manifests that all others have written; returns the index, process 0's first.

        ``own`` is process 0's manifest without the index. Raises Disagreement if a shard belongs to
        another save or the shards do not cover the tables. Raises TrackingError if processes that
        hold the same rows have marked different ones.
        """
        shards, owned = [shard_entry(own, 0)], [own.owned_cells]
        stamps = {key: (0, value) for key, value in own.shared_stamps.items()}
        paths = [item_dir / naming.manifest_name(process) for process in self.reporters]
        read = self.runtime.map(lambda path: store_path(path).read(), paths, threads=READS)
        for path, data in zip(paths, read, strict=True):
            found = manifest.from_bytes(data, name=path.name)
            _check_agreed(own, found)
            _check_agreed_stamps(stamps, found)
            shards.append(shard_entry(found, google_crc32c.value(data)))
            owned.append(found.owned_cells)
        _check_owned(own, owned)
        return tuple(shards)


def _step_of(temporary: str) -> str:
    return re.split("[^0-9]", temporary)[0]


def _check_agreed(own: Manifest, other: Manifest) -> None:
    for field in _AGREED:
        want, have = getattr(own, field), getattr(other, field)
        if want != have:
            raise Disagreement(
                f"step {own.save_id.step}: expected process {other.process} to agree with process "
                f"0 on {field} {want} ({own.kind}: {own.reason}), found {have} ({other.kind}: "
                f"{other.reason}); pass every process the same state structure, options and "
                "arguments of save()"
            )


def _check_agreed_stamps(stamps: dict[str, tuple[int, int]], other: Manifest) -> None:
    """Checks that processes with the same stamps have touched the same rows; records them."""
    for key, value in other.shared_stamps.items():
        process, before = stamps.setdefault(key, (other.process, value))
        if before != value:
            table, _, place = key.partition("@")
            where = f"the TouchState at {place}" if place else "the TouchState given to save()"
            raise TrackingError(
                f"step {other.save_id.step}, table {table}: expected processes {process} and "
                f"{other.process}, which both have these rows, to have marked the same ones in "
                f"{where}, found that they did not; mark the ids of all processes on each "
                "(jax.lax.all_gather, or ids as one global array). The next save is a base"
            )


def _check_owned(own: Manifest, owned: list[dict[str, int]]) -> None:
    """Checks that exactly one process writes each cell of a base."""
    for group in own.groups:
        wanted = sum(group.rows * width(spec.trailing) for spec in group.fields)
        found = sum(cells.get(group.name, 0) for cells in owned)
        if found != wanted:
            tables = [table.name for table in own.tables if table.group == group.name]
            raise Disagreement(
                f"step {own.save_id.step}, tables {tables[:_SHOWN]}: expected {wanted} cells over "
                f"all processes, found {found}; make every table and slot one global array "
                "(jax.make_array_from_process_local_data), not one array in each process"
            )


class Item(Protocol):
    """One directory of a step; its methods are called in the background."""

    def write(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        """Writes this process's shard into the item's existing directory, through ``batch``."""
        ...

    def complete(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        """Completes the item on process 0, after all processes have written their shards.

        The item of the tables is completed last, after all other files are written.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepTransaction:
    """A step to be written."""

    final: Path  # path of the step once it is committed
    items: Mapping[str, Item]
    tables: str  # name of the item whose shards have their own digests
    writers: StepWriters
    #: Returns files of the step's directory, just before the commit.
    own_files: Callable[[], Mapping[str, bytes]]
    check: Callable[[], None]  # called before the commit; an exception prevents it


class Committed(NamedTuple):
    """``perf_counter()`` when this process had written its files, and when the step was visible."""

    written_at: float
    at: float


def temporary_dir(final: Path, attempt: str) -> Path:
    """Returns the temporary directory of an attempt at a step, unique across attempts and runs."""
    return final.with_name(f"{final.name}{naming.TEMPORARY}-{attempt}")


def write(step: StepTransaction) -> Committed:
    """Writes a step and commits it on all processes; after an error, it may be committed or not."""
    writers, temporary = step.writers, step.writers.temporary
    try:
        with writers.working():
            with posix.typed_errors(temporary, "make a directory"):
                temporary.mkdir(exist_ok=True)
            made = FileBatch(temporary, fsync=writers.fsync, runtime=writers.runtime)
            with contextlib.closing(made) as batch:
                return _write(step, batch)
    except BaseException:
        if writers.count == 1:
            DurableDir(step.final.parent).remove(temporary)
        raise
    finally:
        writers.expire()


def _write(step: StepTransaction, batch: FileBatch) -> Committed:
    writers, temporary = step.writers, step.writers.temporary
    for name in step.items:
        batch.make(temporary / name)

    @placement.neutral()  # On each thread.
    def write_item(name: str) -> None:
        step.items[name].write(temporary / name, batch, writers)

    # In parallel: an item that computes leaves the disk to the others.
    writers.runtime.map(write_item, step.items)
    written_at = time.perf_counter()
    if writers.process > 0:
        records: dict[str, bytes | None] = {}
        if uncovered(batch, step.tables):
            name = naming.step_digests_name(writers.process)
            write_digests(batch, step.tables, name)
            records[name] = None
        batch.force()
        writers.report("written", records | writers.records(_descriptions(step)))
        try:
            writers.wait("done")
        except (ProcessMissing, StorageError) as error:
            if writers.give_up(error):
                raise
            # Process 0, which runs the coordination service, may have died between the commit and
            # its report.
            if temporary.exists() or not step.final.is_dir():
                error.add_note("The step may nevertheless be committed.")
                raise
        if writers.shared_fs:
            # Opening the directory refreshes the cache of a network file system.
            with contextlib.suppress(OSError):
                os.close(os.open(step.final.parent, os.O_RDONLY))
        else:
            step.check()
            _publish(step)
        return Committed(written_at, time.perf_counter())
    if writers.count > 1:
        batch.force()  # While the others write.
        received = writers.wait("written")
        others = {naming.step_digests_name(process) for process in writers.reporters}
        # If one that was reported cannot be seen, the save fails.
        batch.adopt_files([temporary / name for name in sorted(others & received)])
    for name, item in step.items.items():
        if name != step.tables:
            item.complete(temporary / name, batch, writers)
    _commit(step, batch)
    return Committed(written_at, time.perf_counter())


def _commit(step: StepTransaction, batch: FileBatch) -> None:
    """Writes the step's metadata and index, fsyncs everything, and renames the step."""
    temporary = step.writers.temporary
    for name, data in step.own_files().items():
        batch.write(temporary / name, data)
    step.items[step.tables].complete(temporary / step.tables, batch, step.writers)
    batch.force()
    step.check()
    head = step.writers.records([temporary / step.tables / naming.manifest_name(0)])
    step.writers.decide()
    try:
        _publish(step)
    finally:
        # Even if only the last fsync failed. A process that gets no report raises ProcessMissing.
        if not temporary.exists():
            with contextlib.suppress(StorageError):
                step.writers.report("done", head)


def _publish(step: StepTransaction) -> None:
    root = DurableDir(step.final.parent, fsync=step.writers.fsync)
    root.publish(step.writers.temporary, step.final)


def _descriptions(step: StepTransaction) -> Iterator[Path]:
    """Yields the files that process 0 needs to know of another process's shard."""
    temporary, process = step.writers.temporary, step.writers.process
    if (path := temporary / naming.step_digests_name(process)).exists():
        yield path
    for name in step.items:
        for record in (naming.manifest_name(process), naming.digests_name(process)):
            if (path := temporary / name / record).exists():
                yield path
        for path in sorted((temporary / name / naming.dense_process_dir(process)).rglob("*")):
            if path.is_file() and naming.is_dense_node(path.relative_to(temporary).as_posix()):
                yield path


def uncovered(batch: FileBatch, tables: str) -> dict[str, Digest]:
    """Returns the digests of files that neither a shard's digests nor process 0's index cover."""
    prefix = f"{tables}/"
    return {
        name: digest
        for name, digest in batch.digests.items()
        if not (name.startswith(prefix) and naming.is_of_shard(name.removeprefix(prefix)))
    }


def write_digests(batch: FileBatch, tables: str, name: str) -> None:
    """Writes the digests of ``uncovered`` files to a file of the step."""
    batch.write(batch.top / name, digests.digests_bytes(uncovered(batch, tables)))
