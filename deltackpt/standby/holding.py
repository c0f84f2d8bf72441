# SPDX-License-Identifier: Apache-2.0
"""What is held, and what is to be held next: a step, or a point of the log above it."""

from __future__ import annotations

import dataclasses

from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.reading.replay import SeenRows
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stretches import LogPoint, Way
from deltackpt.standby.files import HeldFiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holding:
    """A state that is held.

    Attributes:
      chain: the saves that it was merged from, base first.
      layout: its tables.
      sequence: of the memory while it holds this state.
      lag_secs: how long after the commit of the newest save, or after the newest mark was taken, it
        was there.
      point: the newest mark that was applied above the saves; None where none was.
      files: what is held beside the tables: of a point what ``point_files`` makes of it, else the
        files of the newest save; None where it has none that are covered by digests, or they do not
        fit.
      files_of: the point whose they are, the newest with dense leaves; None where they are the
        save's.
      replayed: the rows of all marks that were applied.
      lossless: whether every save and mark of it holds its rows bit for bit, so that all that saw a
        row unchanged have the same of it.
    """

    chain: tuple[SaveInfo, ...]
    layout: Layout
    sequence: int
    lag_secs: float
    point: LogPoint | None = None
    files: HeldFiles | None = None
    files_of: LogPoint | None = None
    replayed: SeenRows | None = None
    lossless: bool = False

    @property
    def save(self) -> SaveInfo:
        """The newest of its saves."""
        return self.chain[-1]

    def is_at(self, save_id: SaveId, point: LogPoint | None) -> bool:
        """Whether it is a step, or a point above one, and no other."""
        return self.save.save_id == save_id and _same(self.point, point)

    def is_beside(self, goal: Goal) -> bool:
        """Whether its files are those of another state, too."""
        of_step = self.save.save_id == goal.save_id
        return self.files is not None and of_step and _same(self.files_of, goal.files_of)

    def serves(self, save_id: SaveId, point: LogPoint | None) -> bool:
        """Whether a state can be made of it by replaying all marks between the step and the point.

        The marks of a run hold each row that it touched up to the last of them: it does not matter
        which of the earlier ones were applied. Beyond the point rows have changed that they lack.
        """
        if self.save.save_id != save_id:
            return False
        if self.point is None or point is None:
            return self.point is None
        of_run = self.point.stretch == point.stretch and self.point.save_id.run == point.save_id.run
        return of_run and self.point.save_id.attempt <= point.save_id.attempt

    def comes_to(self, save_id: SaveId, point: LogPoint | None) -> bool:
        """Whether it may still become a state, as far as can be told: it is not beyond it."""
        held = self.save.save_id
        if held != save_id:
            return held.run != save_id.run or held.step < save_id.step
        if self.point is None or point is None:
            return self.point is None
        return (self.point.stretch, self.point.save_id.attempt) < (
            point.stretch,
            point.save_id.attempt,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Goal:
    """What is to be held.

    Attributes:
      save: the step.
      way: from it to a point above it; None where it is the step itself.
      full: from it to the newest point on the way that has dense leaves, if any.
    """

    save: StoredSave
    way: Way | None
    full: Way | None

    @property
    def save_id(self) -> SaveId:
        """Of the step."""
        return self.save.info.save_id

    @property
    def point(self) -> LogPoint | None:
        """Of the log; None where it is the step itself."""
        return None if self.way is None else self.way.point

    @property
    def files_of(self) -> LogPoint | None:
        """See ``Holding``."""
        return None if self.full is None else self.full.point


def _same(one: LogPoint | None, other: LogPoint | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.stretch, one.save_id) == (other.stretch, other.save_id)
