# SPDX-License-Identifier: Apache-2.0
"""A step as a transaction: written to a temporary directory, fsynced, made visible by one rename.

Everything is fsynced once, in parallel, after all files exist; each process fsyncs its files before
it reports that they are written. Several processes coordinate through the step's temporary
directory alone (``rendezvous``); process 0 completes the items and commits. A step that was
interrupted before the rename is a directory that is never read.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from deltackpt.format import names
from deltackpt.resources.runtime import Runtime
from deltackpt.save.rendezvous import Rendezvous
from deltackpt.storage import digests, files
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import Digests
from deltackpt.storage.posix import DurableDir


class Item(Protocol):
    """One directory of a step; its methods are called in the background."""

    def write(self, item_dir: Path, batch: FileBatch, others: Rendezvous) -> None:
        """Writes this process's share of the item.

        Args:
          item_dir: the item's existing directory.
          batch: writes files, or registers them.
          others: coordinates the processes.
        """
        ...

    def complete(self, item_dir: Path, batch: FileBatch, others: Rendezvous) -> None:
        """Completes the item after all processes have written their parts; called by process 0."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A step to be written.

    Attributes:
      final: path of the step once it is committed.
      items: the items of the step, by name.
      tables: name of the item whose shards have their own digests.
      others: coordinates the processes through the step's temporary directory.
      fsync: whether the committed step survives a power cut.
      metadata: returns the contents of Orbax's step metadata, just before the commit.
      check: called before the commit; an exception prevents the commit.
    """

    final: Path
    items: Mapping[str, Item]
    tables: str
    others: Rendezvous
    fsync: bool
    metadata: Callable[[], bytes]
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
      ProcessMissing, ProcessFailed, Disagreement: as for ``Rendezvous``.
    """
    others, temporary = step.others, step.others.temporary
    try:
        with files.typed_errors(temporary, "make a directory"):
            temporary.mkdir(exist_ok=True)
        batch = FileBatch(temporary, fsync=step.fsync, runtime=runtime)
        try:
            return _write(step, batch)
        finally:
            batch.close()
    except BaseException as error:
        others.fail(error)
        if others.count == 1:
            DurableDir(step.final.parent).remove(temporary)
        raise


def _write(step: Step, batch: FileBatch) -> Committed:
    others, temporary = step.others, step.others.temporary
    for name, item in step.items.items():
        batch.make(temporary / name)
        item.write(temporary / name, batch, others)
    written_at = time.perf_counter()
    if others.process > 0:
        _tell_written(step, batch)
        if others.apart:
            others.tell(_records(step))
        others.await_commit(step.final.is_dir)
        if others.apart:
            step.check()
            _publish(step)
        return Committed(written_at, time.perf_counter())
    if others.count > 1:
        batch.force()  # While the others write.
        for process in others.await_written():
            batch.adopt_file(temporary / names.step_digests_name(process))
    for name, item in step.items.items():
        item.complete(temporary / name, batch, others)
    _commit(step, batch)
    return Committed(written_at, time.perf_counter())


def _commit(step: Step, batch: FileBatch) -> None:
    """Metadata and digests of the whole step, all of it forced; then the rename."""
    temporary = step.others.temporary
    batch.write(temporary / names.STEP_METADATA, step.metadata())
    text = f"Checkpoint commit was successful to {step.final.name}"
    batch.write(temporary / names.COMMIT_SUCCESS, text.encode())
    _write_digests(step, batch, temporary / names.STEP_DIGESTS)
    batch.force()
    step.check()
    _publish(step)
    if step.others.apart:
        head = f"{step.tables}/{names.manifest_name(0)}"
        step.others.tell({head: files.read_bytes(step.final / head)})


def _publish(step: Step) -> None:
    root = DurableDir(step.final.parent, fsync=step.fsync)
    root.publish(step.others.temporary, step.final)


def _records(step: Step) -> dict[str, bytes]:
    """What process 0 needs to know of the part of another one, by posix path below the step."""
    temporary, process = step.others.temporary, step.others.process
    found = [temporary / names.step_digests_name(process)]
    for name in step.items:
        records = (names.manifest_name(process), names.digests_name(process))
        found += [temporary / name / record for record in records]
        found += sorted((temporary / name / names.dense_part(process)).rglob("*"))
    paths = {path.relative_to(temporary).as_posix(): path for path in found if path.is_file()}
    return {
        name: files.read_bytes(path)
        for name, path in paths.items()
        if names.is_dense_node(name) or names.dense_part(process) not in name.split("/")
    }


def _tell_written(step: Step, batch: FileBatch) -> None:
    """Fsyncs what this process wrote, then writes its digests, which report that it is done.

    These are fsynced before they are renamed; process 0 fsyncs the renames with all others.
    """
    batch.force()
    path = step.others.temporary / names.step_digests_name(step.others.process)
    _write_digests(step, batch, path, whole=True)


def _write_digests(step: Step, batch: FileBatch, path: Path, *, whole: bool = False) -> None:
    """Digests of all that the parts' own digests, and process 0's index of these, do not cover."""
    prefix = f"{step.tables}/"
    found = {
        name: digest
        for name, digest in batch.digests.items()
        if not (name.startswith(prefix) and names.is_of_part(name.removeprefix(prefix)))
    }
    batch.write(path, digests.digests_bytes(Digests.of(found)), whole=whole)
