# SPDX-License-Identifier: Apache-2.0
"""The write-ahead log of a directory: its epochs and their recovery points."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from deltackpt.format.manifest import SaveId
from deltackpt.inspect import html
from deltackpt.reading.wal_index import RecoveryPoint, coverings
from deltackpt.reading.wal_state import EpochState, WalState
from deltackpt.units import size


class ForkPoint(NamedTuple):
    """A recovery point that another run resumed from.

    Attributes:
      epoch: number of its WAL epoch.
      save_id: of its record.
    """

    epoch: int
    save_id: SaveId


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalEpoch:
    """A WAL epoch: the records that one run appended.

    Attributes:
      number: number of the epoch.
      run: id of the run that wrote it; None if the epoch header cannot be read.
      processes: number of processes that append; 0 if the run has no WAL, and the header only
        records what it resumed from.
      base: the step that the run resumed from, or the step below ``forked_from``; None for a new
        run.
      forked_from: the recovery point that the run resumed from; None if it resumed from a step, or
        is a new run.
      live: whether restores may read it: True for the newest epoch and the ones it forked from, up
        to the fork. None if the newest header cannot be read.
      records: number of valid WAL records of each process.
      recovery_points: records that all processes have and that a step can be replayed to, newest
        first, including soft ones.
      nbytes: total size of its files.
      ends: reason why valid records end before the file does, by process. In the newest epoch this
        is normal: a record is being written, or the trainer was killed.
      problem: why the epoch cannot be read; empty if it can.
    """

    number: int
    run: str | None
    processes: int
    base: SaveId | None
    forked_from: ForkPoint | None
    live: bool | None
    records: tuple[int, ...]
    recovery_points: tuple[RecoveryPoint, ...]
    nbytes: int
    ends: tuple[str, ...]
    problem: str

    @property
    def full_points(self) -> int:
        """Number of full recovery points, which can be restored."""
        return sum(point.full for point in self.recovery_points)

    @property
    def newest(self) -> RecoveryPoint | None:
        """The newest full recovery point, or None."""
        return next((point for point in self.recovery_points if point.full), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wal:
    """The write-ahead log of a directory.

    Attributes:
      epochs: the WAL epochs, newest first.
      problem: why the valid epochs cannot be determined; empty if they are known.
    """

    epochs: tuple[WalEpoch, ...]
    problem: str = ""

    def recovery_points(self) -> list[RecoveryPoint]:
        """Recovery points of valid epochs that a step can be replayed to.

        Returns:
          The recovery points, newest first, including soft ones.
        """
        return [point for one in self.epochs if one.live for point in one.recovery_points]

    def _repr_html_(self) -> str:
        return html.table(EPOCH_COLUMNS, [epoch_line(one) for one in self.epochs])


def wal_of(found: WalState, steps: Mapping[int, SaveId]) -> Wal:
    """Summarizes a WAL.

    Args:
      found: its state.
      steps: the steps that can be restored, by number.
    """
    unreached = [] if found.index is None else coverings(found.index, steps)[1]
    return Wal(
        epochs=tuple(_epoch(state, unreached) for state in found.epochs),
        problem="" if found.problem is None else str(found.problem),
    )


def _epoch(state: EpochState, unreached: Collection[RecoveryPoint]) -> WalEpoch:
    head, view = state.head, state.view
    fork = None if head is None else head.continues
    logs = {} if view is None else view.processes
    ends = [
        f"process {process}: {one.problem}" for process in logs for one in logs[process].log.breaks
    ]
    return WalEpoch(
        number=state.number,
        run=None if head is None else head.run,
        processes=0 if head is None else head.process_count,
        base=None if head is None else head.base,
        forked_from=None if fork is None else ForkPoint(fork.epoch, fork.save_id),
        live=state.live,
        records=tuple(len(logs[process].by_id) for process in logs),
        recovery_points=tuple(point for point in state.points if point not in unreached),
        nbytes=state.nbytes,
        ends=tuple(ends),
        problem="" if state.problem is None else str(state.problem),
    )


EPOCH_COLUMNS = (
    "epoch",
    "run",
    "resumed from",
    "processes",
    "records",
    "full recovery points",
    "newest",
    "on disk",
    "valid",
    "end of the records",
)


def epoch_line(epoch: WalEpoch) -> tuple[Any, ...]:
    """Returns a WAL epoch as a line for ``EPOCH_COLUMNS``."""
    resumed_from = None if epoch.base is None else f"step {epoch.base.step}"
    if (point := epoch.forked_from) is not None:
        resumed_from = f"recovery point {point.save_id.step} of epoch {point.epoch}"
        resumed_from += "" if epoch.base is None else f", step {epoch.base.step}"
    return (
        epoch.number,
        None if epoch.run is None else epoch.run[:8],
        resumed_from,
        epoch.processes,
        max(epoch.records, default=0),
        epoch.full_points,
        None if epoch.newest is None else epoch.newest.step,
        size(epoch.nbytes),
        {True: "yes", False: "no", None: "unknown"}[epoch.live],
        epoch.problem or "; ".join(epoch.ends) or None,
    )


POINT_COLUMNS = ("recovery point", "epoch", "kind", "appended (UTC)")


def point_lines(points: Sequence[RecoveryPoint]) -> list[tuple[Any, ...]]:
    """Returns recovery points as lines for ``POINT_COLUMNS``."""
    return [
        (one.step, one.epoch, "full" if one.full else "soft", html.utc(one.unix_secs))
        for one in points
    ]
