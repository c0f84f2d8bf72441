# SPDX-License-Identifier: Apache-2.0
"""The log between the steps, as it stands: its stretches, and the points that they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from deltackpt.format.manifest import SaveId
from deltackpt.format.stretches import Continues
from deltackpt.inspect import html
from deltackpt.reading.log_states import LogState, StretchState
from deltackpt.reading.stretches import LogPoint
from deltackpt.units import size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """What one run has logged.

    Attributes:
      number: of the stretch.
      run: id of the run; None where the head cannot be read.
      processes: how many log; 0 where the run keeps no log, and only says what it goes on from.
      base: the step that it goes on from, or that the point builds on; None where it began afresh.
      continues: the point that it goes on from; None where that was a step, or nothing.
      live: whether restores may read it: the newest stretch, and those that it goes on from, up to
        where it does. None where the newest head cannot be read.
      marks: how many marks each process has, of those that count.
      points: marks that all processes have, newest first, soft ones too.
      nbytes: bytes of its files.
      ends: why logs of it end before their files do, by process. That of the newest stretch may
        just be written, or its trainer was killed: both are normal.
      problem: why it cannot be read; empty where it can.
    """

    number: int
    run: str | None
    processes: int
    base: SaveId | None
    continues: Continues | None
    live: bool | None
    marks: tuple[int, ...]
    points: tuple[LogPoint, ...]
    nbytes: int
    ends: tuple[str, ...]
    problem: str

    @property
    def full_points(self) -> int:
        """How many of the points can be restored."""
        return sum(point.full for point in self.points)

    @property
    def newest(self) -> LogPoint | None:
        """The newest full point."""
        return next((point for point in self.points if point.full), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """The log of a directory.

    Attributes:
      stretches: newest first.
      problem: why nobody can tell which of them count; empty where that is known.
    """

    stretches: tuple[Stretch, ...]
    problem: str = ""

    def points(self) -> list[LogPoint]:
        """Points of stretches that count, newest first, soft ones too."""
        return [point for one in self.stretches if one.live for point in one.points]

    def _repr_html_(self) -> str:
        return html.table(STRETCH_COLUMNS, [stretch_line(one) for one in self.stretches])


def log_of(found: LogState) -> Log:
    """What is told of logs as they stand."""
    return Log(
        stretches=tuple(map(_stretch, found.stretches)),
        problem="" if found.problem is None else str(found.problem),
    )


def _stretch(state: StretchState) -> Stretch:
    head, era = state.head, state.era
    logs = {} if era is None else era.processes
    ends = [
        f"process {process}: {one.problem}" for process in logs for one in logs[process].log.breaks
    ]
    return Stretch(
        number=state.number,
        run=None if head is None else head.run,
        processes=0 if head is None else head.process_count,
        base=None if head is None else head.base,
        continues=None if head is None else head.continues,
        live=state.live,
        marks=tuple(len(logs[process].by_id) for process in logs),
        points=tuple(state.points),
        nbytes=state.nbytes,
        ends=tuple(ends),
        problem="" if state.problem is None else str(state.problem),
    )


STRETCH_COLUMNS = (
    "stretch",
    "run",
    "goes on from",
    "processes",
    "marks",
    "full points",
    "newest",
    "on disk",
    "counts",
    "why it ends",
)


def stretch_line(stretch: Stretch) -> tuple[Any, ...]:
    """A stretch as a line under ``STRETCH_COLUMNS``."""
    came_from = None if stretch.base is None else f"step {stretch.base.step}"
    if (point := stretch.continues) is not None:
        came_from = f"point {point.save_id.step} of stretch {point.stretch}, {came_from}"
    return (
        stretch.number,
        None if stretch.run is None else stretch.run[:8],
        came_from,
        stretch.processes,
        max(stretch.marks, default=0),
        stretch.full_points,
        None if stretch.newest is None else stretch.newest.step,
        size(stretch.nbytes),
        {True: "yes", False: "no", None: "unknown"}[stretch.live],
        stretch.problem or "; ".join(stretch.ends) or None,
    )


POINT_COLUMNS = ("point", "stretch", "kind", "logged (UTC)")


def point_lines(points: Sequence[LogPoint]) -> list[tuple[Any, ...]]:
    """Points as lines under ``POINT_COLUMNS``."""
    return [
        (one.step, one.stretch, "full" if one.full else "soft", html.utc(one.unix_secs))
        for one in points
    ]
