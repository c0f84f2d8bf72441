# SPDX-License-Identifier: Apache-2.0
"""Committed steps and WAL epochs as objects, and as lines of HTML tables."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deltackpt.cached import cached_property
from deltackpt.errors import RestoreError
from deltackpt.format import naming, row_blocks
from deltackpt.format.manifest import Kind, SaveId, TableFigures
from deltackpt.inspect.listing import Listing
from deltackpt.lazy_import import LazyModule
from deltackpt.storage.store import StorePath
from deltackpt.units import size

if TYPE_CHECKING:
    from deltackpt.reading import wal_index
    from deltackpt.reading.wal_index import EpochState, RecoveryPoint, WalState
else:  # Only a directory with a WAL needs it.
    wal_index = LazyModule("deltackpt.reading.wal_index")


def utc(secs: float | None) -> str | None:
    """Formats a time in seconds since 1970, to the minute; None stays None."""
    return None if secs is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(secs))


def shape_text(shape: Sequence[int]) -> str:
    """Formats a shape, such as ``3 × 4``; that of a scalar is ``scalar``."""
    return " × ".join(f"{length:,}" for length in shape) or "scalar"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Save:
    """Description of a committed step.

    Attributes:
      step: the training step.
      path: its directory.
      kind: base or delta; None if it cannot be read.
      parent: step of a delta's parent.
      chain_length: number of deltas that a restore of the step merges; None if the chain is broken.
      reason: why the save is a base or a delta.
      compacted: whether it has a compacted base.
      tables: figures of each field of each table with rows in the save.
      table_rows: number of rows of each table, by name.
      nbytes: bytes of its arrays, before any compression.
      dense_nbytes: bytes of its dense leaves stored as blocks, before any compression; None without
        dense leaves, or if they are in Orbax's item.
      dense_codecs: codecs of the changed blocks of its dense leaves; empty if it has them whole.
      problem: why the save or its chain cannot be read; empty if no problem was found. Use
        ``deltackpt verify`` to check the data.
    """

    step: int
    store_path: StorePath
    kind: Kind | None = None
    parent: int | None = None
    chain_length: int | None = None
    reason: str = ""
    compacted: bool = False
    tables: tuple[TableFigures, ...] = ()
    table_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    nbytes: int = 0
    dense_nbytes: int | None = None
    dense_codecs: tuple[str, ...] = ()
    problem: str = ""

    def __repr__(self) -> str:
        what = "base" if self.parent is None else f"delta of step {self.parent}"
        held = f"{what}, {self.rows:,} of {self.total_rows:,} rows, {size(self.nbytes)}"
        return f"<Save of step {self.step}: {self.problem or held}>"

    @property
    def path(self) -> Path:
        """Directory of the step.

        Raises:
          TypeError: the step is in a bucket; ``store_path`` has its URL.
        """
        return Path(self.store_path)

    @property
    def rows(self) -> int:
        """Number of table rows in the save; slots are not counted."""
        return sum(figures.rows for figures in self.tables if figures.field == row_blocks.VALUES)

    @property
    def total_rows(self) -> int:
        """Number of rows of all tables."""
        return sum(self.table_rows.values())

    @cached_property
    def disk_bytes(self) -> int:
        """Bytes of all files of the step; 0 if it was removed."""
        return self.store_path.tree_bytes()

    @cached_property
    def committed_at(self) -> float | None:
        """Time of Orbax's commit, in seconds since 1970; None if it is not recorded."""
        try:
            found = json.loads((self.store_path / naming.STEP_METADATA).read())
            return found["commit_timestamp_nsecs"] / 1e9
        except (RestoreError, OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


_SAVE_COLUMNS = (
    "step", "kind", "parent", "deltas", "rows", "share", "on disk", "codecs", "committed (UTC)",
    "reason",
)  # fmt: skip


def list_saves(saves: Sequence[Save], title: str = "") -> Listing:
    """Returns a line for each step."""
    return Listing(_SAVE_COLUMNS, [_save_line(save) for save in saves], title)


def _save_line(save: Save) -> tuple[object, ...]:
    kind = f"{save.kind} (compacted)" if save.compacted else save.kind
    codecs = "+".join(sorted({figures.codec for figures in save.tables}))
    dense = f"dense {'+'.join(save.dense_codecs)}" if save.dense_codecs else ""
    return (
        save.step,
        kind or "unreadable",
        save.parent,
        save.chain_length,
        save.rows,
        f"{save.rows / save.total_rows:.2%}" if save.total_rows else None,
        size(save.disk_bytes),
        ", ".join(filter(None, (codecs, dense))) or None,
        utc(save.committed_at),
        save.problem or save.reason.removeprefix(f"{save.kind}: "),
    )


def list_figures(save: Save) -> Listing:
    """Returns a line for each field of each table in a save."""
    lines = [
        (
            figures.table,
            figures.field,
            figures.codec,
            figures.rows,
            size(figures.nbytes),
            f"{figures.ratio:.1%}",
            f"{figures.relative_error:.2g}" if figures.relative_error else None,
            figures.reason,
        )
        for figures in save.tables
    ]
    columns = ("table", "field", "codec", "rows", "on disk", "of raw", "error", "reason")
    return Listing(columns, lines, "in this save")


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
        return list_epochs(self).html()


def wal_of(found: WalState, steps: Mapping[int, SaveId]) -> Wal:
    """Summarizes a WAL; ``steps`` are those that can be restored, by number."""
    unreached = [] if found.index is None else wal_index.coverings(found.index, steps)[1]
    return Wal(
        epochs=tuple(_epoch(state, unreached) for state in found.epochs),
        problem="" if found.problem is None else str(found.problem),
    )


def _epoch(state: EpochState, unreached: Collection[RecoveryPoint]) -> WalEpoch:
    head, view = state.head, state.view
    fork = None if head is None else head.continues
    logs = {} if view is None else view.processes
    ends = [
        f"process {process}: {one.problem.object_name}: expected {one.problem.expected}, "
        f"found {one.problem.found}"
        for process in logs
        for one in logs[process].log.breaks
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


_EPOCH_COLUMNS = (
    "epoch", "run", "resumed from", "processes", "records", "full recovery points", "newest",
    "on disk", "valid", "end of the records",
)  # fmt: skip


def list_epochs(wal: Wal) -> Listing:
    """Returns a line for each WAL epoch, newest first."""
    return Listing(_EPOCH_COLUMNS, [_epoch_line(one) for one in wal.epochs], "write-ahead log")


def _epoch_line(epoch: WalEpoch) -> tuple[object, ...]:
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


def list_points(points: Sequence[RecoveryPoint]) -> Listing:
    """Returns a line for each recovery point."""
    lines = [
        (one.step, one.epoch, "full" if one.full else "soft", utc(one.unix_secs)) for one in points
    ]
    return Listing(("recovery point", "epoch", "kind", "appended (UTC)"), lines)
