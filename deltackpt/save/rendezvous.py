# SPDX-License-Identifier: Apache-2.0
"""Coordinates a multi-process save in the background, using only the checkpoint directory.

Each process writes its shard and then its manifest. Process 0 polls for the manifests, checks that
all describe the same save, and then writes its own, with an index of all shards; the others poll
for it. After a process has written all its files of a step, it writes their digests. Process 0
polls for the digests and commits; the others poll for the commit. A process that fails leaves a
note, which the others find instead. Every wait has a timeout, with an error that names the missing
process. No device collectives are used, so nothing here can interfere with the collectives of the
training step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import google_crc32c

from deltackpt import processes
from deltackpt.errors import (
    DeltackptError,
    Disagreement,
    ProcessFailed,
    ProcessMissing,
    TrackingError,
)
from deltackpt.format import manifest, names
from deltackpt.format.manifest import Manifest, Part
from deltackpt.format.segments import width
from deltackpt.storage import files
from deltackpt.storage.parts import part_of
from deltackpt.storage.posix import DurableDir

#: Between two looks: a tenth of the time waited so far, within these bounds.
_SHORTEST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.002, 0.25
_SHOWN = 8
#: Fields that must be equal in the manifests of one save.
_AGREED = ("save_id", "kind", "parent", "process_count", "restores", "plan_crc32c", "rolling")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    """The note of a process that failed.

    Attributes:
      error: what went wrong.
      missing: the processes that timed out, if that is the error.
      doubt: whether this run's touched rows may be wrong.
    """

    error: str
    missing: tuple[int, ...] | None
    doubt: bool

    @classmethod
    def of(cls, error: BaseException) -> Note:
        """Returns the note for an error."""
        return cls(
            error=f"{type(error).__name__}: {error}",
            missing=error.processes if isinstance(error, ProcessMissing) else None,
            doubt=isinstance(error, DeltackptError) and error.leaves_doubt,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """One process's view of a save in flight.

    Attributes:
      apart: whether the processes do not share a file system.
      temporary: the step's temporary directory.
      process: index of this process.
      count: number of processes.
      timeout_secs: how long process 0 waits for the others after its own shard is done. They wait
        twice as long for it, so that process 0 names the missing process.
    """

    temporary: Path
    process: int
    count: int
    timeout_secs: float
    apart: ClassVar[bool] = False

    def tell(self, records: Mapping[str, bytes]) -> None:
        """Sends this process's fsynced files to the others, as far as they need them.

        Does nothing if they see its directory.

        Args:
          records: files to send, by posix path below the step.
        """

    def fail(self, error: BaseException) -> None:
        """Reports that this process failed; never raises."""
        note = dataclasses.asdict(Note.of(error))
        path = self.temporary / names.failure_name(self.process)
        # If it cannot be written, the others time out and name this process.
        with contextlib.suppress(OSError):
            if self.count > 1 and not path.exists():
                DurableDir(path.parent, fsync=False).write(path, json.dumps(note).encode())

    def collect(self, item_dir: Path, own: Manifest) -> tuple[Part, ...]:
        """Waits for the shards of all other processes; called by process 0.

        Args:
          item_dir: the item's directory, in the step's temporary directory.
          own: process 0's manifest, without its index.

        Returns:
          The index of all shards, process 0's first.

        Raises:
          ProcessMissing: manifests did not appear in time.
          ProcessFailed: a process left a note.
          Disagreement: a shard belongs to another save, or the shards do not cover the tables.
          TrackingError: processes with the same rows have marked different ones.
        """
        parts = {0: part_of(own, 0)}
        owned = [own.owned_cells]
        told = {key: (0, value) for key, value in own.shared_stamps.items()}
        for _ in self._polls(self.timeout_secs):
            self._raise_failure()
            for process in sorted(_found(item_dir, names.manifest_process) - parts.keys()):
                name = names.manifest_name(process)
                data = files.read_bytes(item_dir / name)
                found = manifest.from_bytes(data, name=name)
                _check_agreed(own, found)
                _check_told(told, found)
                parts[process] = part_of(found, google_crc32c.value(data))
                owned.append(found.owned_cells)
            if len(parts) == self.count:
                _check_owned(own, owned)
                return tuple(parts[process] for process in sorted(parts))
        raise self._missing(set(range(self.count)) - parts.keys(), "write its shard")

    def await_index(self, item_dir: Path) -> None:
        """Waits until process 0 has found all shards; called by the other processes.

        Args:
          item_dir: the item's directory, in the step's temporary directory.

        Raises:
          ProcessMissing: process 0 timed out.
          ProcessFailed: a process left a note.
        """
        first = item_dir / names.manifest_name(0)
        for _ in self._polls(2 * self.timeout_secs):
            self._raise_failure()
            if first.exists() or not item_dir.exists():
                # Without it the item was finished or abandoned; await_commit finds out.
                return
        arrived = _found(item_dir, names.manifest_process)
        missing = set(range(self.count)) - arrived - {self.process}
        raise self._missing(missing | {0}, "write its shard, or the index")

    def await_written(self) -> range:
        """Waits until every process has written all its files of the step; called by process 0.

        Returns:
          The other processes.

        Raises:
          ProcessMissing, ProcessFailed: as for ``collect``.
        """
        others = range(1, self.count)
        for _ in self._polls(self.timeout_secs):
            self._raise_failure()
            missing = {*others} - _found(self.temporary, names.step_digests_process)
            if not missing:
                return others
        raise self._missing(missing, "write its dense leaves")

    def await_commit(self, committed: Callable[[], bool]) -> None:
        """Waits for the commit by process 0; called by the other processes.

        Args:
          committed: returns whether the step is committed.

        Raises:
          ProcessMissing, ProcessFailed: as for ``await_index``.
        """
        for _ in self._polls(2 * self.timeout_secs):
            self._raise_failure()
            if not self.temporary.exists():
                if committed():
                    return
                raise ProcessFailed(
                    f"{self._step}: expected process 0 to commit it, found that it abandoned it; "
                    "check its log"
                )
        arrived = _found(self.temporary, names.step_digests_process)
        raise self._missing(set(range(self.count)) - arrived, "commit the step")

    def _polls(self, secs: float) -> Iterator[None]:
        """Polls at growing intervals until the deadline."""
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            yield
            if waited >= secs:
                return
            pause = min(max(waited / 10, _SHORTEST_PAUSE_SECS), _LONGEST_PAUSE_SECS)
            time.sleep(min(pause, secs - waited))

    def _raise_failure(self) -> None:
        """Raises a noted failure: on process 0 of any other, on these of process 0."""
        for process, note in sorted(self._noted().items()):
            text = (
                f"{self._step}: expected a shard of every process, found that process {process} "
                f"failed: {note.error}"
            )
            if note.missing is None:
                raise ProcessFailed(text, leaves_doubt=note.doubt)
            raise ProcessMissing(text, tuple({*note.missing} - {self.process}))

    def _noted(self) -> dict[int, Note]:
        """Returns the notes that concern this process.

        Opening the directory refreshes the cache of a network file system.
        """
        if self.process == 0:
            noted = _found(self.temporary, names.failure_process) - {0}
        else:
            with contextlib.suppress(FileNotFoundError):
                os.close(os.open(self.temporary, os.O_RDONLY))
            noted = {0}
        paths = {process: self.temporary / names.failure_name(process) for process in noted}
        return {
            process: Note(**json.loads(files.read_bytes(path)))
            for process, path in paths.items()
            if path.exists()
        }

    def _missing(self, processes: set[int], what: str) -> ProcessMissing:
        secs = self.timeout_secs * (1 if self.process == 0 else 2)
        named = sorted(processes)
        shown = ", ".join(map(str, named[:_SHOWN]))
        if len(named) > _SHOWN:
            shown += f" and {len(named) - _SHOWN} more"
        return ProcessMissing(
            f"{self._step}: expected process {shown} to {what} within {secs:g} s "
            f"(timeouts.processes_secs is {self.timeout_secs:g}), found nothing; check its log, "
            "then restart the job. Nothing was committed; the previous step is intact",
            tuple(named),
        )

    @property
    def _step(self) -> str:
        return f"step {re.split('[^0-9]', self.temporary.name)[0]}"


def of_this_process(temporary: Path, timeout_secs: float) -> Rendezvous:
    """Returns this process's view of a save in a step's temporary directory."""
    return Rendezvous(
        temporary=temporary,
        process=processes.index(),
        count=processes.count(),
        timeout_secs=timeout_secs,
    )


def _found(directory: Path, process_of: Callable[[str], int | None]) -> set[int]:
    """Returns the processes whose files exist in a directory."""
    try:
        entries = os.listdir(directory)
    except FileNotFoundError:
        return set()
    found = map(process_of, entries)
    return {process for process in found if process is not None}


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


def _check_told(told: dict[str, tuple[int, int]], other: Manifest) -> None:
    """Checks that processes with the same stamps have touched the same rows; records them."""
    for key, value in other.shared_stamps.items():
        process, before = told.setdefault(key, (other.process, value))
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
