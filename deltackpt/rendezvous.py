# SPDX-License-Identifier: Apache-2.0
"""How the parts of one save come together, in the background, through the directory alone.

Each process writes its part and then its manifest. Process 0 looks for the manifests, checks that
all speak of the same save, and writes its own, with an index of all parts, last; the others look
for that one. A process that fails leaves a note, which the others find instead. Every wait ends
after the stated time, with an error that says which process is missing. No collective of the
devices is used, so nothing here can meet those of the training step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import google_crc32c

from deltackpt import layout, manifest
from deltackpt.errors import Damaged, Disagreement, PeerFailed, PeerMissing
from deltackpt.manifest import Manifest, Part
from deltackpt.storage import files

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS, _GROWTH = 0.002, 0.25, 1.5
_SHOWN = 8
#: What the parts of one save must say alike.
_AGREED = ("save_id", "kind", "parent", "process_count", "restores", "plan_crc32c")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """One process's view of a save in flight.

    Attributes:
      item_dir: the item's directory, in the step's temporary one.
      process: index of this process.
      count: how many processes there are.
      timeout_secs: how long to wait for others after this process is done.
    """

    item_dir: Path
    process: int
    count: int
    timeout_secs: float

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process cannot do its part; never raises."""
        missing = error.processes if isinstance(error, PeerMissing) else None
        note = {"error": f"{type(error).__name__}: {error}", "missing": missing}
        # Where it cannot be written the others wait until their time is up, and name this process.
        with contextlib.suppress(OSError):
            path = self.item_dir / layout.failure_name(self.process)
            files.write_atomic(path, json.dumps(note).encode(), fsync=False)

    def collect(self, own: Manifest) -> tuple[Part, ...]:
        """Waits for the parts of all other processes; called by process 0.

        Args:
          own: process 0's manifest, as it will be but for its index.

        Returns:
          The index of all parts, process 0's first.

        Raises:
          PeerMissing: manifests did not appear in time.
          PeerFailed: a process left a note.
          Disagreement: a part is one of another save, or the parts do not make up the tables.
        """
        found: dict[int, Manifest] = {0: own}
        parts = {0: part_of(own, 0)}
        for _ in self._polls():
            names = self._names()
            self._raise_failure(names)
            for process in sorted(_processes(names) - found.keys()):
                name = layout.manifest_name(process)
                data = files.read_bytes(self.item_dir / name)
                found[process] = manifest.from_bytes(data, name=name)
                parts[process] = part_of(found[process], google_crc32c.value(data))
                _check_agreed(own, found[process])
            if len(found) == self.count:
                _check_owned(own, list(found.values()))
                return tuple(parts[process] for process in sorted(parts))
        missing = tuple(process for process in range(self.count) if process not in found)
        raise self._missing(missing, "write its part")

    def await_index(self) -> None:
        """Waits until process 0 has found all parts; called by the others.

        Raises:
          PeerMissing: it did not in time.
          PeerFailed: a process left a note.
        """
        first = self.item_dir / layout.manifest_name(0)
        failure = layout.failure_name(0)
        for _ in self._polls():
            with contextlib.suppress(FileNotFoundError):
                # Opening the directory renews what a network file system remembers of it.
                os.close(os.open(self.item_dir, os.O_RDONLY))
            if (self.item_dir / failure).exists():
                self._raise_failure([failure])
            if first.exists() or not self.item_dir.exists():
                # Without the directory the item was finished, or given up: the commit says which.
                return
        missing = set(range(self.count)) - _processes(self._names()) - {0, self.process}
        raise self._missing((0, *sorted(missing)), "write its part, or the index of all")

    def _polls(self) -> Iterator[None]:
        """Comes back at growing intervals until the time is up."""
        deadline = time.monotonic() + self.timeout_secs
        pause = _FIRST_PAUSE_SECS
        while True:
            last = time.monotonic() >= deadline
            yield
            if last:
                return
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * _GROWTH, _LONGEST_PAUSE_SECS)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.item_dir)
        except FileNotFoundError:
            return []

    def _raise_failure(self, names: Iterable[str]) -> None:
        """Raises what another process noted."""
        for name in names:
            process = layout.failure_process(name)
            if process is None or process == self.process:
                continue
            with contextlib.suppress(Damaged):  # Removed meanwhile.
                note = json.loads(files.read_bytes(self.item_dir / name))
                text = (
                    f"{self._step}: expected a part of every process, found that process {process} "
                    f"failed: {note['error']}"
                )
                if note["missing"] is not None:
                    raise PeerMissing(text, tuple(note["missing"]))
                raise PeerFailed(text)

    def _missing(self, processes: tuple[int, ...], what: str) -> PeerMissing:
        shown = ", ".join(map(str, processes[:_SHOWN]))
        if len(processes) > _SHOWN:
            shown += f" and {len(processes) - _SHOWN} more"
        return PeerMissing(
            f"{self._step}: expected process {shown} to {what} within {self.timeout_secs:g} s "
            "(timeouts.peers_secs), found nothing; look at its log, then restart the job. Nothing "
            "was committed, the step before is intact",
            processes,
        )

    @property
    def _step(self) -> str:
        return f"step {re.split('[^0-9]', self.item_dir.parent.name)[0]}"


def _processes(names: Iterable[str]) -> set[int]:
    """Those whose manifests are among the names."""
    found = (layout.manifest_process(name) for name in names)
    return {process for process in found if process is not None}


def part_of(record: Manifest, crc32c: int) -> Part:
    """The entry of a part in the index."""
    return Part(process=record.process, crc32c=crc32c, nbytes=record.nbytes, covers=record.covers)


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


def _check_owned(own: Manifest, parts: list[Manifest]) -> None:
    """Each cell of a base must be written by exactly one process."""
    for group in own.groups:
        wanted = sum(group.rows * manifest.width(spec.trailing) for spec in group.fields)
        found = sum(part.owned_cells.get(group.name, 0) for part in parts)
        if found != wanted:
            names = [table.name for table in own.tables if table.group == group.name]
            raise Disagreement(
                f"step {own.save_id.step}, tables {names[:_SHOWN]}: expected {wanted} cells over "
                f"all processes, found {found}; make every table and slot one global array "
                "(jax.make_array_from_process_local_data), not one array in each process"
            )
