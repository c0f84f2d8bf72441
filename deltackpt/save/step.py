# SPDX-License-Identifier: Apache-2.0
"""A step is a transaction of ours: written aside, forced to disk, then made visible by one rename.

All that is written is forced once, in parallel, after everything is there; each process forces what
it wrote before it says so. Several processes meet through the step's temporary directory alone
(``rendezvous``); process 0 completes what all have written, and commits. A step that was cut
anywhere before the rename is a directory that nobody reads.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from deltackpt.format import names
from deltackpt.resources.workers import Workers
from deltackpt.save.rendezvous import Rendezvous
from deltackpt.storage import digests, files
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import Digests


class Item(Protocol):
    """One folder of a step; its methods are called in the background."""

    def write(self, item_dir: Path, batch: FileBatch, others: Rendezvous) -> None:
        """Writes what this process has of it.

        Args:
          item_dir: its folder, which was made.
          batch: what files are written with, or made known to.
          others: where the processes meet.
        """
        ...

    def complete(self, item_dir: Path, batch: FileBatch, others: Rendezvous) -> None:
        """Completes what all processes have written; called by process 0."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A step that is to be written.

    Attributes:
      final: where it will stand.
      items: its folders, by name.
      tables: name of the item whose parts have digests of their own.
      others: where the processes meet: in the step's temporary directory.
      fsync: whether it survives a power cut once it is committed.
      metadata: contents of Orbax's metadata of the step, asked for just before the commit.
      check: called before the commit; what it raises prevents it.
    """

    final: Path
    items: Mapping[str, Item]
    tables: str
    others: Rendezvous
    fsync: bool
    metadata: Callable[[], bytes]
    check: Callable[[], None]


class Committed(NamedTuple):
    """A step that stands; both are of ``time.perf_counter()``.

    Attributes:
      written_at: when all files of this process were written.
      at: when the step was visible.
    """

    written_at: float
    at: float


def temporary_dir(final: Path, attempt: str) -> Path:
    """Where an attempt at a step is written; no other attempt, of any run, has the same.

    Args:
      final: where the step will stand.
      attempt: which of all attempts it is: the same on every process.
    """
    return final.with_name(f"{final.name}{names.TEMPORARY}-{attempt}")


def write(step: Step, workers: Workers) -> Committed:
    """Writes a step and commits it; the processes of a job all call it.

    Args:
      step: what is written.
      workers: threads that force files.

    Raises:
      StorageError: the store refused; nothing was committed, as with every other error.
      ProcessMissing, ProcessFailed, Disagreement: as ``Rendezvous``.
    """
    others, temporary = step.others, step.others.temporary
    try:
        with files.typed_errors(temporary, "make a directory"):
            temporary.mkdir(exist_ok=True)
        batch = FileBatch(temporary, fsync=step.fsync, pool=workers.forcers, pace=workers.pace)
        try:
            return _write(step, batch)
        finally:
            batch.close()
    except BaseException as error:
        others.fail(error)
        if others.count == 1:
            files.remove_tree(temporary)
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
            files.rename(temporary, step.final, fsync=step.fsync)
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
    files.rename(temporary, step.final, fsync=step.fsync)
    if step.others.apart:
        head = f"{step.tables}/{names.manifest_name(0)}"
        step.others.tell({head: files.read_bytes(step.final / head)})


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
    """Forces what this process wrote, then leaves its digests, which say that it is done.

    These are forced before they have their name; process 0 forces that with all other names.
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
