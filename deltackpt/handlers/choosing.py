# SPDX-License-Identifier: Apache-2.0
"""Which step or point is restored: the newest, the one that was asked for, or what is near it.

Beside a trainer all of these go: retention removes steps, and trimming the marks of points. So the
answer is sought anew when what was chosen could not be read, and process 0 alone gives it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, NamedTuple

from deltackpt.errors import DamagedLog, RestoreError, StepGone, StepNotFound, StorageError
from deltackpt.format.manifest import SaveId
from deltackpt.handlers.run import Run
from deltackpt.reading.stretches import History, LogPoint, Logs, coverings, newest_way


class Choice(NamedTuple):
    """What is restored: a step, or a point by way of a step below it."""

    step: int
    point: LogPoint | None

    @property
    def number(self) -> int:
        """The training step that is restored."""
        return self.step if self.point is None else self.point.step

    @classmethod
    def of(cls, plain: Any) -> Choice | None:
        """A choice that JSON has carried."""
        if plain is None:
            return None
        step, point = plain
        if point is None:
            return cls(step, None)
        stretch, save_id, full, unix_secs = point
        return cls(step, LogPoint(stretch, SaveId(*save_id), full, unix_secs))


def _plain(point: LogPoint) -> Any:
    return point.stretch, dataclasses.astuple(point.save_id), point.full, point.unix_secs


class Tried:
    """Steps and points that were not intact, and those that went while they were read."""

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self.points: set[SaveId] = set()
        self.skipped: list[tuple[int, RestoreError]] = []
        self.gone: list[tuple[int, RestoreError]] = []

    def skip(self, choice: Choice, error: RestoreError) -> None:
        """Notes what is wrong with a choice: with the marks of a log, or with the step."""
        self.skipped.append((choice.number, error))
        if choice.point is None or not isinstance(error, DamagedLog):
            self.steps.add(choice.step)
        else:
            self.points.add(choice.point.save_id)
            if isinstance(error.mark, SaveId):
                self.points.add(error.mark)


class Chooser:
    """Chooses among the steps and points of a run's root, all processes alike."""

    def __init__(self, run: Run):
        """Looks at nothing yet.

        Args:
          run: the manager's run.
        """
        self._run = run

    def newest(self, tried: Tried, *, log: bool) -> Choice | None:
        """The newest step, or point, but for those that were tried; None where there is none.

        Args:
          tried: what was not intact.
          log: whether points count.
        """
        run = self._run

        def find() -> Any:
            # The log first: what is trimmed from it then has made way for a step that is listed.
            history = Logs(run.root.log_at).read() if log else None
            steps = {*run.root.steps()} - tried.steps
            way = None
            if history is not None and history.eras:
                way = newest_way(history, self._ids(steps), tried.points)
            if way is not None:
                return way.step.step, _plain(way.point)
            newest = max(steps, default=None)
            return None if newest is None else (newest, None)

        return Choice.of(run.among.of_first("choosing a step", find))

    def asked(self, asked: int | LogPoint) -> Choice:
        """The step that was asked for, or the point and a step below it that leads there.

        Raises:
          StepNotFound: there is none; the message names what is near.
        """
        choice = self.found(asked)
        if choice is None:
            raise StepNotFound(
                f"{self._shown(asked)}: expected a committed step, or a point that one leads to, "
                f"found neither; {self.near(_number(asked))}"
            )
        return choice

    def found(self, asked: int | LogPoint) -> Choice | None:
        """As ``asked``; None where there is none."""
        run = self._run

        def find() -> Any:
            if isinstance(asked, int) and asked in {*run.root.steps()}:
                return asked, None
            history, at = Logs(run.root.log_at).read(), _number(asked)
            if not any(point.full and asked in (point, at) for point in _at(history, at)):
                return None
            way = newest_way(history, run.root.restorable(), at=at)
            return None if way is None else (way.step.step, _plain(way.point))

        return Choice.of(run.among.of_first(f"finding {asked}", find))

    def points(self) -> list[LogPoint]:
        """Full points to which a step leads that can be restored, newest first."""
        history = Logs(self._run.root.log_at).read()
        _, unreached = coverings(history, self._run.root.restorable())
        return [point for point in history.points() if point.full and point not in unreached]

    def went(self, asked: int | LogPoint) -> StepGone:
        """What to raise of a step or point that is there no more, and was when it was found."""
        return StepGone(
            f"{self._shown(asked)}: expected it to stay while it was read, found it removed: steps "
            f"by retention, the marks of points once later steps are committed; "
            f"{self.near(_number(asked))}"
        )

    def near(self, number: int) -> str:
        """What can be restored that is nearest to a step, by this process's own look."""
        found = [(step, f"step {step}") for step in self._run.root.restorable()]
        with contextlib.suppress(RestoreError, StorageError):  # Steps are known all the same.
            found += [(point.step, str(point)) for point in self.points()]
        below = max((one for one in found if one[0] <= number), default=None)
        above = min((one for one in found if one[0] > number), default=None)
        told = " and ".join(one[1] for one in (below, above) if one is not None)
        nearest = f"the nearest that can be restored: {told}" if told else "none can be restored"
        return f"{nearest}; all_steps() and points() list what there is"

    def _shown(self, asked: int | LogPoint) -> str:
        return f"{self._run.root.at(asked) if isinstance(asked, int) else asked}"

    def _ids(self, steps: set[int]) -> dict[int, SaveId]:
        """Save ids of those steps whose manifests can be read."""
        known = self._run.root.saves()
        return {step: info.save_id for step in steps if (info := known.get(step)) is not None}


def _number(asked: int | LogPoint) -> int:
    return asked if isinstance(asked, int) else asked.step


def _at(history: History, number: int) -> list[LogPoint]:
    return [point for point in history.points() if point.step == number]
