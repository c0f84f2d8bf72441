# SPDX-License-Identifier: Apache-2.0
"""The next state for a follower: the newest intact step or recovery point.

A damaged one is skipped for a while, and the previous one is followed instead: it may still be
being copied, or may be removed.
"""

from __future__ import annotations

import time
from typing import Protocol

from deltackpt.errors import DamagedWal, DeltackptError, RestoreError, StepGone, without_frames
from deltackpt.ledger.steps import Steps
from deltackpt.reading import stored_saves
from deltackpt.reading.wal_index import ReplayPlan
from deltackpt.standby.wal import FollowedWal
from deltackpt.storage.store import Stamp, StorePath

#: A damaged step is not read again for this long: it may still be being copied.
_REFUSED_SECS = 30.0

#: Distinguishes a step's directory from a later one with the same name.
_Stamp = tuple[str, Stamp]


class StateReplica(Protocol):
    """Holds one step or recovery point at a time."""

    def is_at(self, plan: ReplayPlan | None) -> bool:
        """Returns whether a plan's recovery point is held; without a plan, whether the step is."""
        ...

    def load_state(self, step_dir: StorePath, plan: ReplayPlan | None) -> bool:
        """Loads a step, or a recovery point above it; returns whether the held state has changed.

        If the step must be loaded first, the call may load only the step; then call it again.
        """
        ...


class Candidates:
    """The steps and recovery points of a directory, polled repeatedly; used by one thread."""

    def __init__(self, root: Steps, wal: FollowedWal | None):
        self._root, self._wal = root, wal
        self._seen: _Stamp | None = None
        #: Errors of steps, and when to read them again, on the monotonic clock.
        self._refused: dict[_Stamp, tuple[float, RestoreError]] = {}
        #: The error of a newer state than the held one, or None.
        self.problem: DeltackptError | None = None

    def load_newest(self, replica: StateReplica) -> bool | None:
        """Loads the newest intact state; returns whether it changed, or None without a step."""
        wal = self._wal
        if wal is not None:
            wal.poll()
        failure: RestoreError | None = None
        steps = {*self._root.steps()}
        self._refused = {
            stamp: found for stamp, found in self._refused.items() if int(stamp[0]) in steps
        }
        is_changed = False
        while steps:
            plan = None if wal is None else wal.plan(steps)
            step = max(steps) if plan is None else plan.step.step
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
                if stamp != self._seen or not replica.is_at(plan):
                    with stored_saves.detect_removal(step_dir):
                        is_changed = replica.load_state(step_dir, plan) or is_changed
            except StepGone as error:
                failure = failure or without_frames(error)
                steps.remove(step)
                continue
            except DamagedWal as error:
                assert wal is not None and plan is not None
                wal.refuse(plan, error)
                continue
            except RestoreError as error:
                self._refused[stamp] = time.monotonic() + _REFUSED_SECS, without_frames(error)
                failure = failure or error
                steps.remove(step)
                continue
            self._seen = stamp
            if replica.is_at(plan):  # Otherwise the step had to be loaded first.
                above = step if plan is None else plan.point.step
                self.problem = failure or (None if wal is None else wal.problem(above))
                return is_changed
        if failure is not None:
            raise failure
        self.problem = None
        return None

    def newest_step(self) -> int | None:
        """Returns the newest committed training step, intact or not, or None."""
        found = [self._root.newest_step(), None if self._wal is None else self._wal.newest_step]
        return max((step for step in found if step is not None), default=None)
