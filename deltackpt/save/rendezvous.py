# SPDX-License-Identifier: Apache-2.0
"""How several processes make one save, in the background, through the directory alone.

Each process writes its part and then its manifest. Process 0 looks for the manifests, checks that
all speak of the same save, and writes its own, with an index of all parts, last; the others look
for that one. When all that a process writes of a step is there it leaves its digests of it; process
0 looks for these, and commits; the others look for the commit. A process that fails leaves a note,
which the others find instead. Every wait ends after the stated time, with an error that says which
process is missing. No collective of the devices is used, so nothing here can meet those of the
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

#: Between two looks: a tenth of the time waited so far, within these bounds.
_SHORTEST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.002, 0.25
_SHOWN = 8
#: What the parts of one save must say alike.
_AGREED = ("save_id", "kind", "parent", "process_count", "restores", "plan_crc32c", "rolling")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    """What a process that cannot do its part leaves for the others.

    Attributes:
      error: what went wrong.
      missing: the processes that did not come, where that is it.
      doubt: whether what this run believes of the touched rows may be wrong.
    """

    error: str
    missing: tuple[int, ...] | None
    doubt: bool

    @classmethod
    def of(cls, error: BaseException) -> Note:
        """That of an error."""
        return cls(
            error=f"{type(error).__name__}: {error}",
            missing=error.processes if isinstance(error, ProcessMissing) else None,
            doubt=isinstance(error, DeltackptError) and error.leaves_doubt,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """One process's view of a save in flight.

    Attributes:
      apart: whether no process sees the directory of another one.
      temporary: the step's temporary directory.
      process: index of this process.
      count: how many processes there are.
      timeout_secs: how long process 0 waits for the others after its own part is done. They wait
        twice as long for it, so that it is process 0 that names who is missing.
    """

    temporary: Path
    process: int
    count: int
    timeout_secs: float
    apart: ClassVar[bool] = False

    def tell(self, records: Mapping[str, bytes]) -> None:
        """Tells the others what they need to know of what this process wrote, which is forced.

        Where they see its directory its files do.

        Args:
          records: files that say it, by posix path below the step.
        """

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process cannot do its part; never raises."""
        note = dataclasses.asdict(Note.of(error))
        path = self.temporary / names.failure_name(self.process)
        # Where it cannot be written the others wait until their time is up, and name this process.
        with contextlib.suppress(OSError):
            if self.count > 1 and not path.exists():
                files.write_atomic(path, json.dumps(note).encode(), fsync=False)

    def collect(self, item_dir: Path, own: Manifest) -> tuple[Part, ...]:
        """Waits for the parts of all other processes; called by process 0.

        Args:
          item_dir: the item's directory, in the temporary one.
          own: process 0's manifest, as it will be but for its index.

        Returns:
          The index of all parts, process 0's first.

        Raises:
          ProcessMissing: manifests did not appear in time.
          ProcessFailed: a process left a note.
          Disagreement: a part is one of another save, or the parts do not make up the tables.
          TrackingError: processes that hold the same rows were told of other touched ones.
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
        raise self._missing(set(range(self.count)) - parts.keys(), "write its part")

    def await_index(self, item_dir: Path) -> None:
        """Waits until process 0 has found all parts; called by the others.

        Args:
          item_dir: the item's directory, in the temporary one.

        Raises:
          ProcessMissing: it did not in time.
          ProcessFailed: a process left a note.
        """
        first = item_dir / names.manifest_name(0)
        for _ in self._polls(2 * self.timeout_secs):
            self._raise_failure()
            if first.exists() or not item_dir.exists():
                # Without the directory the item was finished, or given up: the commit says which.
                return
        arrived = _found(item_dir, names.manifest_process)
        missing = set(range(self.count)) - arrived - {self.process}
        raise self._missing(missing | {0}, "write its part, or the index")

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
        """Waits for the commit of process 0; called by the others.

        Args:
          committed: whether the step stands.

        Raises:
          ProcessMissing, ProcessFailed: as for ``await_index``.
        """
        for _ in self._polls(2 * self.timeout_secs):
            self._raise_failure()
            if not self.temporary.exists():
                if committed():
                    return
                raise ProcessFailed(
                    f"{self._step}: expected process 0 to commit it, found that it gave it up; see "
                    "its log"
                )
        arrived = _found(self.temporary, names.step_digests_process)
        raise self._missing(set(range(self.count)) - arrived, "commit the step")

    def _polls(self, secs: float) -> Iterator[None]:
        """Comes back at growing intervals until the time is up."""
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            yield
            if waited >= secs:
                return
            pause = min(max(waited / 10, _SHORTEST_PAUSE_SECS), _LONGEST_PAUSE_SECS)
            time.sleep(min(pause, secs - waited))

    def _raise_failure(self) -> None:
        """Raises what another process noted: to process 0 any other, to these process 0."""
        for process, note in sorted(self._noted().items()):
            text = (
                f"{self._step}: expected a part of every process, found that process {process} "
                f"failed: {note.error}"
            )
            if note.missing is None:
                raise ProcessFailed(text, leaves_doubt=note.doubt)
            raise ProcessMissing(text, tuple({*note.missing} - {self.process}))

    def _noted(self) -> dict[int, Note]:
        """The notes that this process looks at.

        Opening the directory renews what a network file system remembers of it.
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
            f"(timeouts.processes_secs is {self.timeout_secs:g}), found nothing; look at its log, "
            "then restart the job. Nothing was committed, the step before is intact",
            tuple(named),
        )

    @property
    def _step(self) -> str:
        return f"step {re.split('[^0-9]', self.temporary.name)[0]}"


def of_this_process(temporary: Path, timeout_secs: float) -> Rendezvous:
    """This process's view of a save in a step's temporary directory."""
    return Rendezvous(
        temporary=temporary,
        process=processes.index(),
        count=processes.count(),
        timeout_secs=timeout_secs,
    )


def _found(directory: Path, process_of: Callable[[str], int | None]) -> set[int]:
    """The processes whose objects stand in a directory."""
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
                f"{other.reason}); give every process the same state structure, options and "
                "arguments of save()"
            )


def _check_told(told: dict[str, tuple[int, int]], other: Manifest) -> None:
    """Processes that hold the same stamps must have touched the same rows; notes what was told."""
    for key, value in other.shared_stamps.items():
        process, before = told.setdefault(key, (other.process, value))
        if before != value:
            table, _, place = key.partition("@")
            where = f"the TouchState at {place}" if place else "the TouchState given to save()"
            raise TrackingError(
                f"step {other.save_id.step}, table {table}: expected processes {process} and "
                f"{other.process}, which both hold these rows, to have marked the same ones in "
                f"{where}, found that they did not; mark the ids of all processes on each "
                "(jax.lax.all_gather, or ids as one global array). The next save is a base"
            )


def _check_owned(own: Manifest, owned: list[dict[str, int]]) -> None:
    """Each cell of a base must be written by exactly one process."""
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
