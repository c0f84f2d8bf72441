# SPDX-License-Identifier: Apache-2.0
"""Results of a verification: problems of saves, verdicts on steps, a report on the directory."""

from __future__ import annotations

import dataclasses
from typing import Literal

from deltackpt.errors import Damaged
from deltackpt.format.manifest import SaveId
from deltackpt.reading.wal_index import RecoveryPoint

#: What a problem prevents from being restored: the save and every chain through it, only the step,
#: recovery points, or nothing, because no restore reads the object.
Stops = Literal["chain", "step", "points", "nothing"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A damaged object.

    Attributes:
      object_name: its relative path in the checkpoint directory.
      expected: what was expected.
      found: what was found.
      stops: what cannot be restored because of it: ``chain`` (the save and every chain through it),
        ``step`` (only the step), ``points`` (recovery points), or ``nothing``.
    """

    object_name: str
    expected: str
    found: str
    stops: Stops

    @classmethod
    def of(cls, error: Damaged, stops: Stops) -> Problem:
        """Returns the problem of a damaged object."""
        return cls(
            object_name=error.object_name, expected=error.expected, found=error.found, stops=stops
        )

    def __str__(self) -> str:
        return f"{self.object_name}: expected {self.expected}, found {self.found}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveVerdict:
    """Result for one save: a step, or a compacted base.

    Attributes:
      name: its relative path: ``120``, or ``compacted/120``.
      kind: base or delta; None if its manifest cannot be read.
      save_id: its id; None if its manifest cannot be read.
      parent: step directory of its parent; None without a parent, or if it is not known.
      file_count: number of files that were read.
      nbytes: bytes of these files.
      problems: damage in the save.
      notes: what was not checked, and why.
    """

    name: str
    kind: str | None
    save_id: SaveId | None
    parent: str | None
    file_count: int
    nbytes: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    def stops(self, *what: Stops) -> bool:
        """Returns whether one of its problems has one of these effects."""
        return any(problem.stops in what for problem in self.problems)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """Whether a step can be restored.

    Attributes:
      step: the step.
      restorable: whether it can be restored, bit for bit.
      chain: names of the saves that a restore reads, base first; empty if it cannot be restored.
      broken_by: why it cannot be restored: damaged saves, or a description of the broken chain.
    """

    step: int
    restorable: bool
    chain: tuple[str, ...] = ()
    broken_by: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointVerdict:
    """Whether a full recovery point can be restored.

    Attributes:
      point: the recovery point.
      step: the step to which its WAL records are applied; None if it cannot be restored.
      broken_by: why it cannot be restored; empty if it can.
    """

    point: RecoveryPoint
    step: int | None
    broken_by: str = ""

    @property
    def restorable(self) -> bool:
        """Whether the recovery point can be restored, bit for bit."""
        return self.step is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalReport:
    """Result for the write-ahead log.

    Attributes:
      points: a verdict for each full recovery point, ascending; without those whose records were
        trimmed because a newer step replaces them.
      problems: damage in the valid epochs.
      notes: incomplete ends and invalid epochs; not damage.
      file_count: number of files that were read.
    """

    points: tuple[PointVerdict, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    file_count: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootReport:
    """Result of verifying a directory.

    Attributes:
      directory: the directory.
      steps: a verdict for each step, ascending.
      saves: a report on each save that was verified.
      points: a verdict for each full recovery point, ascending.
      problems: all damage: of the directory itself (its leases), then of its saves, then of its
        WAL.
      notes: leftovers of interrupted saves, deletions and compactions, and unknown names; not
        damage.
      file_count: number of files that were read.
      bytes_read: bytes of these files.
      seconds: elapsed time.
    """

    directory: str
    steps: tuple[StepVerdict, ...]
    saves: tuple[SaveVerdict, ...]
    points: tuple[PointVerdict, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    file_count: int
    bytes_read: int
    seconds: float

    @property
    def intact(self) -> bool:
        """Whether nothing is damaged, and every step can be restored."""
        return not self.problems and all(step.restorable for step in self.steps)
