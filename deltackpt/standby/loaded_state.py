# SPDX-License-Identifier: Apache-2.0
"""What a follower holds: which rows, the held state, and the next one.

Replica and reader compute from a step's layout alone which rows a shard holds: the same part of
each table, so tables sharded by rows over as many nodes are on the nodes that need them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from deltackpt import codecs
from deltackpt.errors import RestoreError
from deltackpt.format import naming
from deltackpt.format.manifest import Layout, SaveId, SaveInfo, TableEntry
from deltackpt.format.row_blocks import Span
from deltackpt.reading import dense_state
from deltackpt.reading.dense_state import KnownStates, RecordedState
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import RecoveryPoint, ReplayPlan
from deltackpt.reading.wal_rows import SeenRows
from deltackpt.standby import cached_files
from deltackpt.standby.cached_files import CachedFiles
from deltackpt.storage.store import FileStore

_ALIGNMENT = 64


class Region(NamedTuple):
    """Rows of one field of one table in a replica's memory."""

    table: TableEntry
    field: str  # ``values`` or ``slot.<name>``.
    rows: Span  # Virtual rows of the group.
    columns: Span | None  # All, if the field is as wide as its table and may be wanted in part.
    offset: int  # In bytes.
    trailing: tuple[int, ...]  # Shape of one row.
    dtype: np.dtype

    @property
    def group(self) -> str:
        """The table's group."""
        return self.table.group

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        return math.prod(self.trailing) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of all its rows in bytes."""
        return (self.rows[1] - self.rows[0]) * self.row_bytes


#: Whether to hold a field of a table.
FieldChoice = Callable[[TableEntry, str], bool]


def everything(table: TableEntry, field: str) -> bool:
    """Chooses every field of every table."""
    return True


def regions(
    target: Layout, shard: int, shards: int, choice: FieldChoice = everything
) -> tuple[Region, ...]:
    """Returns the regions of a shard in memory order, without empty ones."""
    groups = target.group_by_name
    found: list[Region] = []
    offset = 0
    for table in target.tables:
        group = groups[table.group]
        first, last = (table.rows * number // shards for number in (shard, shard + 1))
        for spec in group.fields if first < last else ():
            if not choice(table, spec.name):
                continue
            region = Region(
                table=table,
                field=spec.name,
                rows=(table.offset + first, table.offset + last),
                columns=group.columns(spec),
                offset=offset,
                trailing=spec.trailing,
                dtype=codecs.dtype_of(spec.dtype),
            )
            found.append(region)
            offset += -(-region.nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(found)


def nbytes(held: tuple[Region, ...]) -> int:
    """Returns the bytes of memory that regions occupy."""
    return held[-1].offset + held[-1].nbytes if held else 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeldState:
    """A step in memory, or a recovery point above it."""

    save: SaveInfo  # Of the step.
    layout: Layout
    point: RecoveryPoint | None  # None for the step itself.
    unix_secs: float  # Of the step's commit, or of the recovery point.

    def is_at(self, save_id: SaveId, point: RecoveryPoint | None) -> bool:
        """Returns whether it is exactly this step, or exactly this recovery point above it."""
        return self.save.save_id == save_id and same_point(self.point, point)


_Held = TypeVar("_Held", bound=HeldState)


class StateHolder(Generic[_Held]):
    """The part of a ``StateReplica`` that holds one state."""

    #: None before the first load and during a change.
    loaded: _Held | None = None

    def is_at(self, plan: ReplayPlan | None) -> bool:
        """See ``StateReplica``."""
        held = self.loaded
        if held is None or plan is None:
            return held is not None and held.point is None
        return held.is_at(plan.step, plan.point)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoadedState(HeldState):
    """Rows in memory, and other files."""

    chain: tuple[SaveInfo, ...]  # The saves that it was merged from, base first.
    sequence: int = 0  # The memory's sequence number while it holds this state.
    lag_secs: float = 0.0  # From the newest commit or captured record until it was held.
    files: CachedFiles | None = None  # None if the save has no digests, or they do not fit.
    files_of: RecoveryPoint | None = None  # Point with dense leaves; None: the save.
    replayed: SeenRows | None = None  # The rows of all applied records.
    lossless: bool = False  # Whether all saves and records are, so they agree on unchanged rows.
    changed: Mapping[str, np.ndarray] | None = None  # Changed rows; None: any.

    def shares_files_with(self, goal: Goal) -> bool:
        """Returns whether its files also belong to another state."""
        of_step = self.save.save_id == goal.save_id
        return self.files is not None and of_step and same_point(self.files_of, goal.files_of)

    def serves(self, save_id: SaveId, point: RecoveryPoint | None) -> bool:
        """Returns whether replaying all records between the step and the point produces a state.

        A run's records contain each row touched up to the last of them, so it does not matter which
        earlier ones were applied. Records beyond the point may have changed rows that the others
        lack.
        """
        if self.save.save_id != save_id:
            return False
        if self.point is None or point is None:
            return self.point is None
        of_run = self.point.epoch == point.epoch and self.point.save_id.run == point.save_id.run
        return of_run and self.point.save_id.attempt <= point.save_id.attempt

    def may_reach(self, save_id: SaveId, point: RecoveryPoint | None) -> bool:
        """Returns whether it may still reach a state, because it is not known to be past it."""
        held = self.save.save_id
        if held != save_id:
            return held.run != save_id.run or held.step < save_id.step
        if self.point is None or point is None:
            return self.point is None
        return (self.point.epoch, self.point.save_id.attempt) < (
            point.epoch,
            point.save_id.attempt,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Goal:
    """The state to hold."""

    save: StoredSave
    plan: ReplayPlan | None  # From the step to a recovery point; None for the step itself.
    full: ReplayPlan | None  # To the newest recovery point on the way that has dense leaves.

    @property
    def save_id(self) -> SaveId:
        """Id of the step's save."""
        return self.save.info.save_id

    @property
    def point(self) -> RecoveryPoint | None:
        """The recovery point; None for the step itself."""
        return None if self.plan is None else self.plan.point

    @property
    def files_of(self) -> RecoveryPoint | None:
        """See ``LoadedState``."""
        return None if self.full is None else self.full.point


class StateFiles:
    """The other files of a state; those of a recovery point need its rows: see ``complete``."""

    def __init__(self, goal: Goal, found: CachedFiles | None, most_bytes: int, known: KnownStates):
        self.files = found
        self._most_bytes = most_bytes
        self._recorded = None
        if found is None and goal.full is not None:
            dense = dense_state.at_point(goal.full, known)
            self._recorded = dense, goal.full.items()

    def complete(self, rows: SeenRows, layout: Layout) -> None:
        """Stores the files of a recovery point; ``rows`` are of all records from its step."""
        if self._recorded is not None:
            dense, items = self._recorded
            state = RecordedState(dense, items, rows.by_table())
            self.files = cached_files.store(dense_state.to_files(state, layout), self._most_bytes)


def committed_secs(save: StoredSave) -> float:
    """Returns when a step was committed, since 1970, or 0 if it was removed concurrently."""
    with contextlib.suppress(OSError, RestoreError, ValueError):
        if isinstance(save.step_dir.store, FileStore):
            # The rename that committed the step.
            return os.stat(save.step_dir).st_ctime
        # When it was made; it was uploaded later.
        metadata = json.loads((save.step_dir / naming.STEP_METADATA).read())
        return metadata["commit_timestamp_nsecs"] / 1e9
    return 0.0


def same_point(one: RecoveryPoint | None, other: RecoveryPoint | None) -> bool:
    """Returns whether both are the same recovery point, or both None."""
    if one is None or other is None:
        return one is other
    return (one.epoch, one.save_id) == (other.epoch, other.save_id)
