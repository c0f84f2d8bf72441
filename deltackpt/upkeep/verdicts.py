# SPDX-License-Identifier: Apache-2.0
"""What verifying found: problems of saves, verdicts of steps, a report of the directory."""

from __future__ import annotations

import dataclasses
from typing import Literal

from deltackpt.format.manifest import SaveId
from deltackpt.reading.stretches import LogPoint

#: What a problem keeps from being restored: the save and those whose chains go through it, the
#: step alone, points of the log, or nothing, since no restore reads it.
Stops = Literal["chain", "step", "points", "nothing"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is not as it was written.

    Attributes:
      object_name: path below the root.
      expected: what should be there.
      found: what is there.
      stops: what cannot be restored because of it.
    """

    object_name: str
    expected: str
    found: str
    stops: Stops

    def __str__(self) -> str:
        return f"{self.object_name}: expected {self.expected}, found {self.found}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What was found of one save: a step, or a compacted base.

    Attributes:
      name: its path below the root: ``120``, or ``compacted/120``.
      kind: base or delta; None where its manifest cannot be read.
      save_id: its identity; None likewise.
      parent: step directory of its parent; None where it has none, or that is not known.
      file_count: files that were read.
      nbytes: bytes of these.
      problems: what is wrong with it.
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
        """Whether one of its problems stops such things."""
        return any(problem.stops in what for problem in self.problems)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """Whether a step can be restored.

    Attributes:
      step: the step.
      restorable: whether it can, bit for bit.
      chain: names of the saves that restoring it reads, base first; empty where it cannot.
      broken_by: why it cannot: the saves that are damaged, or what is wrong with its chain.
      read_by: where it cannot because retention kept it as a part of a rolling base only, the
        first step that can be restored and reads it; else None.
    """

    step: int
    restorable: bool
    chain: tuple[str, ...] = ()
    broken_by: tuple[str, ...] = ()
    read_by: int | None = None

    @property
    def sound(self) -> bool:
        """Whether it can be restored, or need not be restored by itself."""
        return self.restorable or self.read_by is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointVerdict:
    """Whether a full point of the log can be restored.

    Attributes:
      point: the point.
      step: the step that it is restored from; None where it cannot be.
      broken_by: why it cannot; empty where it can.
    """

    point: LogPoint
    step: int | None
    broken_by: str = ""

    @property
    def restorable(self) -> bool:
        """Whether it can, bit for bit."""
        return self.step is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogReport:
    """What was found of the log between the steps.

    Attributes:
      points: whether each full point can be restored, ascending; not those that trimming has left
        without the marks below them, which a newer step stands for.
      problems: what is wrong with what counts.
      notes: where logs end, and stretches that count no more; none of it is damage.
      file_count: files that were read.
    """

    points: tuple[PointVerdict, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    file_count: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootReport:
    """What was found of a directory.

    Attributes:
      directory: the directory.
      steps: whether each step can be restored, in ascending order.
      saves: what was found of each save that was verified.
      points: whether each full point of the log can be restored, ascending.
      problems: everything that is wrong: with the directory itself (its leases), then with each of
        its saves, then with its log.
      notes: what is left of cut saves, deletions and compactions, and names that are not known;
        none of it is damage.
      file_count: files that were read.
      bytes_read: bytes of these.
      seconds: wall time.
    """

    directory: str
    steps: tuple[StepVerdict, ...]
    saves: tuple[SaveReport, ...]
    points: tuple[PointVerdict, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    file_count: int
    bytes_read: int
    seconds: float

    @property
    def intact(self) -> bool:
        """Whether nothing is damaged and every step can be restored, or need not be."""
        return not self.problems and all(step.sound for step in self.steps)
