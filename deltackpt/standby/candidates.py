# SPDX-License-Identifier: Apache-2.0
"""What a follower may take next: the newest step, or point above one, that is intact.

One that is not is passed over for a while, so that what stands before it is followed meanwhile: it
may be in the middle of being copied, or go.
"""

from __future__ import annotations

import time
from typing import Protocol

from deltackpt.errors import DamagedLog, DeltackptError, RestoreError, StepGone, without_frames
from deltackpt.ledger.steps import Steps
from deltackpt.reading import removal
from deltackpt.reading.stretches import Way
from deltackpt.standby.marks import Marks
from deltackpt.storage.store import Spot, Stamp

#: So long a step that is not intact is not read again: it may be in the middle of being copied.
_REFUSED_SECS = 30.0

#: What tells a step's directory from another one that has the same name later.
_Stamp = tuple[str, Stamp]


class Holder(Protocol):
    """Holds one step, or point, at a time."""

    def is_at(self, way: Way | None) -> bool:
        """Whether the point of a way is held, or, without one, a step and no point."""
        ...

    def take(self, step_dir: Spot, way: Way | None) -> bool:
        """Makes a step, or a point above it, what is held.

        Where the step has to be had first, it may be all that is taken; it is called again.

        Returns:
          Whether another state is held than before.

        Raises:
          RestoreError: it is not intact, or went meanwhile.
        """
        ...


class Candidates:
    """The steps and points of a root, looked at again and again; used by one thread."""

    def __init__(self, root: Steps, marks: Marks | None):
        """Reads nothing yet.

        Args:
          root: of the steps.
          marks: of its log; None where steps alone are followed.
        """
        self._root, self._marks = root, marks
        self._seen: _Stamp | None = None
        #: What was wrong with steps, and when they are looked at again, on the monotonic clock.
        self._refused: dict[_Stamp, tuple[float, RestoreError]] = {}
        #: What is wrong with something newer than what was taken; None where nothing is.
        self.problem: DeltackptError | None = None

    def give(self, holder: Holder) -> bool | None:
        """Has the newest intact state taken.

        Args:
          holder: takes it.

        Returns:
          Whether another one is held than before; None where there is no step at all.

        Raises:
          RestoreError: no step is intact.
          StorageError: the root cannot be read.
        """
        marks = self._marks
        if marks is not None:
            marks.look()
        failure: RestoreError | None = None
        steps = {*self._root.steps()}
        self._refused = {
            stamp: found for stamp, found in self._refused.items() if int(stamp[0]) in steps
        }
        taken = False
        while steps:
            way = None if marks is None else marks.way(steps)
            step = max(steps) if way is None else way.step.step
            step_dir = self._root.at(step)
            found = step_dir.stamp()
            if found is None:
                steps.remove(step)
                continue
            stamp = str(step), found
            until, problem = self._refused.get(stamp, (0.0, None))
            if problem is not None and time.monotonic() < until:
                failure = failure or problem
                steps.remove(step)
                continue
            try:
                if stamp != self._seen or not holder.is_at(way):
                    with removal.standing(step_dir):
                        taken = holder.take(step_dir, way) or taken
            except StepGone as error:
                failure = failure or without_frames(error)
                steps.remove(step)
                continue
            except DamagedLog as error:
                assert marks is not None and way is not None
                marks.refuse(way, error)
                continue
            except RestoreError as error:
                self._refused[stamp] = time.monotonic() + _REFUSED_SECS, without_frames(error)
                failure = failure or error
                steps.remove(step)
                continue
            self._seen = stamp
            if holder.is_at(way):  # Else the step had to be loaded first.
                above = step if way is None else way.point.step
                self.problem = failure or (None if marks is None else marks.problem(above))
                return taken
        if failure is not None:
            raise failure
        self.problem = None
        return None

    def newest_step(self) -> int | None:
        """Training step of the newest that was committed, intact or not; None where none was."""
        found = [self._root.newest_step(), None if self._marks is None else self._marks.newest_step]
        return max((step for step in found if step is not None), default=None)
