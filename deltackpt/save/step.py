# SPDX-License-Identifier: Apache-2.0
"""A step as a transaction: written to a temporary directory, fsynced, made visible by one rename.

Everything is fsynced once, in parallel, after all files exist; each process fsyncs its files before
it reports that they are written. Process 0 completes the items and commits. A step that was
interrupted before the rename is a directory that is never read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from deltackpt.errors import ProcessMissing, StorageError
from deltackpt.format import names
from deltackpt.resources.runtime import Runtime
from deltackpt.save.writers import StepWriters
from deltackpt.storage import digests, files
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import Digests
from deltackpt.storage.posix import DurableDir


class Item(Protocol):
    """One directory of a step; its methods are called in the background."""

    def write(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """Writes this process's share of the item.

        Args:
          item_dir: the item's existing directory.
          batch: writes files, or registers them.
          others: the processes that write the step.
        """
        ...

    def complete(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """Completes the item after all processes have written their parts; called by process 0."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A step to be written.

    Attributes:
      final: path of the step once it is committed.
      items: the items of the step, by name.
      tables: name of the item whose shards have their own digests.
      others: the processes that write the step.
      fsync: whether the committed step survives a power cut.
      own_files: returns the files of the step's directory, by name, just before the commit.
      check: called before the commit; an exception prevents the commit.
    """

    final: Path
    items: Mapping[str, Item]
    tables: str
    others: StepWriters
    fsync: bool
    own_files: Callable[[], Mapping[str, bytes]]
    check: Callable[[], None]


class Committed(NamedTuple):
    """A committed step; both times are ``time.perf_counter()`` values.

    Attributes:
      written_at: when all files of this process were written.
      at: when the step was visible.
    """

    written_at: float
    at: float


def temporary_dir(final: Path, attempt: str) -> Path:
    """Returns the temporary directory of an attempt at a step, unique across attempts and runs.

    Args:
      final: the step's path once committed.
      attempt: number of the attempt: the same on every process.
    """
    return final.with_name(f"{final.name}{names.TEMPORARY}-{attempt}")


def write(step: Step, runtime: Runtime) -> Committed:
    """Writes a step and commits it; all processes of a job call it.

    Args:
      step: the step to write.
      runtime: threads that fsync files, and the write rate.

    Raises:
      StorageError: the store reported an error; nothing was committed, as with every other error.
      ProcessMissing, ProcessFailed, Disagreement: as for ``StepWriters``.
    """
    others, temporary = step.others, step.others.temporary
    try:
        with others.working():
            with files.typed_errors(temporary, "make a directory"):
                temporary.mkdir(exist_ok=True)
            made = FileBatch(temporary, fsync=step.fsync, runtime=runtime)
            with contextlib.closing(made) as batch:
                return _write(step, batch)
    except BaseException:
        if others.count == 1:
            DurableDir(step.final.parent).remove(temporary)
        raise
    finally:
        others.expire()


def _write(step: Step, batch: FileBatch) -> Committed:
    others, temporary = step.others, step.others.temporary
    for name, item in step.items.items():
        batch.make(temporary / name)
        item.write(temporary / name, batch, others)
    written_at = time.perf_counter()
    if others.process > 0:
        _write_digests(step, batch, temporary / names.step_digests_name(others.process))
        batch.force()
        others.report("written", others.records(_descriptions(step)))
        try:
            others.wait("done")
        except (ProcessMissing, StorageError):
            # Process 0, which runs the coordination service, may have died between the commit and
            # its report.
            if temporary.exists() or not step.final.is_dir():
                raise
        if others.shared_fs:
            # Opening the directory refreshes the cache of a network file system.
            with contextlib.suppress(OSError):
                os.close(os.open(step.final.parent, os.O_RDONLY))
        else:
            step.check()
            _publish(step)
        return Committed(written_at, time.perf_counter())
    if others.count > 1:
        batch.force()  # While the others write.
        others.wait("written")
        batch.adopt_files(
            [temporary / names.step_digests_name(process) for process in others.reporters]
        )
    for name, item in step.items.items():
        item.complete(temporary / name, batch, others)
    _commit(step, batch)
    return Committed(written_at, time.perf_counter())


def _commit(step: Step, batch: FileBatch) -> None:
    """Metadata and digests of the whole step, all of it forced; then the rename."""
    temporary = step.others.temporary
    for name, data in step.own_files().items():
        batch.write(temporary / name, data)
    _write_digests(step, batch, temporary / names.STEP_DIGESTS)
    batch.force()
    step.check()
    head = step.others.records([temporary / step.tables / names.manifest_name(0)])
    try:
        _publish(step)
    finally:
        # Even if only the last fsync failed. Others that cannot be told miss this process.
        if not temporary.exists():
            with contextlib.suppress(StorageError):
                step.others.report("done", head)


def _publish(step: Step) -> None:
    root = DurableDir(step.final.parent, fsync=step.fsync)
    root.publish(step.others.temporary, step.final)


def _descriptions(step: Step) -> Iterator[Path]:
    """Yields the files that process 0 needs to know of another process's part."""
    temporary, process = step.others.temporary, step.others.process
    yield temporary / names.step_digests_name(process)
    for name in step.items:
        if (path := temporary / name / names.digests_name(process)).exists():
            yield path
        for path in sorted((temporary / name / names.dense_part(process)).rglob("*")):
            if path.is_file() and names.is_dense_node(path.relative_to(temporary).as_posix()):
                yield path


def _write_digests(step: Step, batch: FileBatch, path: Path) -> None:
    """Digests of all that the parts' own digests, and process 0's index of these, do not cover."""
    prefix = f"{step.tables}/"
    found = {
        name: digest
        for name, digest in batch.digests.items()
        if not (name.startswith(prefix) and names.is_of_part(name.removeprefix(prefix)))
    }
    batch.write(path, digests.digests_bytes(Digests.of(found)))
