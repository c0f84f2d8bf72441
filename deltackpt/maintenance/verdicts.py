# SPDX-License-Identifier: Apache-2.0
"""Results of a verification: problems of saves, verdicts on steps, a report on the directory."""

from __future__ import annotations

import dataclasses
from typing import Literal

from deltackpt.errors import Damaged
from deltackpt.reading.wal_index import RecoveryPoint

#: What a problem prevents from being restored: the save and every chain through it, only the step,
#: recovery points, or nothing, because no restore reads the object.
Stops = Literal["chain", "step", "points", "nothing"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A damaged object; its name is its relative path in the checkpoint directory."""

    object_name: str
    expected: str
    found: str
    stops: Stops

    @classmethod
    def of(cls, error: Damaged, stops: Stops) -> Problem:
        """Returns the problem of a damaged object."""
        return cls(error.object_name, error.expected, error.found, stops)

    def __str__(self) -> str:
        return f"{self.object_name}: expected {self.expected}, found {self.found}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveVerdict:
    """Result for one save: a step, or a compacted base."""

    name: str  #: ``120``, or ``compacted/120``.
    kind: str | None  #: None if its manifest cannot be read.
    file_count: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]  #: What was not checked, and why.

    def stops(self, *what: Stops) -> bool:
        """Returns whether one of its problems has one of these effects."""
        return any(problem.stops in what for problem in self.problems)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """Whether a step can be restored bit for bit."""

    step: int
    restorable: bool
    chain: tuple[str, ...] = ()  #: Saves that a restore reads, base first.
    broken_by: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointVerdict:
    """Whether a full recovery point can be restored."""

    point: RecoveryPoint
    step: int | None  #: Where a replay starts; None if it cannot be restored.
    broken_by: str = ""

    @property
    def restorable(self) -> bool:
        """Whether the recovery point can be restored, bit for bit."""
        return self.step is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalReport:
    """Result for the write-ahead log; ``notes`` are not damage.

    ``points`` lacks those whose records were trimmed because a newer step replaces them.
    """

    points: tuple[PointVerdict, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    file_count: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootReport:
    """Result of verifying a directory; ``notes`` are leftovers and unknown names, not damage."""

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
