# SPDX-License-Identifier: Apache-2.0
"""A version: the rows and dense leaves of one step or recovery point, until it is released."""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from deltackpt.errors import ClosedError, OptionError, ServiceUnavailable, VersionExpired
from deltackpt.format.manifest import SaveId
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.serving.leaves import ServedLeaves
from deltackpt.serving.rows import Rows
from deltackpt.standby.shared_memory import ReadLock

#: Pause before a reader that met a change looks again.
_RETRY_SECS = 1e-4


@dataclasses.dataclass(frozen=True)
class Position:
    """Identifies the state of a version; two states never share one.

    ``str(position)`` can be stored, and ``Position.parse`` reads it.

    Attributes:
      save_id: id of the step's save.
      epoch: WAL epoch of the recovery point above the step; None for a step.
      record: save id of the recovery point; None for a step.
    """

    save_id: SaveId
    epoch: int | None = None
    record: SaveId | None = None

    @classmethod
    def from_save(cls, save_id: SaveId, point: RecoveryPoint | None) -> Position:
        """Returns the position of a step, or of a recovery point above it."""
        return cls(save_id) if point is None else cls(save_id, point.epoch, point.save_id)

    @classmethod
    def parse(cls, text: str) -> Position:
        """Returns the position that ``str`` has written.

        Raises:
          OptionError: the text is not a position.
        """
        number = r"(\d{1,18})"
        save_id = rf"([^/+]+)/{number}/{number}"
        found = re.fullmatch(rf"{save_id}(?:\+{number}/{save_id})?", text)
        if found is None:
            raise OptionError(
                f"position: expected run/step/attempt, or that and +epoch/run/step/attempt, found "
                f"{text!r}; pass str(position)"
            )
        run, step, attempt, epoch, *record = found.groups()
        step_save = SaveId(run, int(step), int(attempt))
        if epoch is None:
            return cls(step_save)
        return cls(step_save, int(epoch), SaveId(record[0], int(record[1]), int(record[2])))

    @property
    def point(self) -> RecoveryPoint | None:
        """The recovery point, without what only its record has; None for a step."""
        if self.epoch is None or self.record is None:
            return None
        return RecoveryPoint(self.epoch, self.record, full=False, unix_secs=0.0)

    @property
    def step(self) -> int:
        """The training step."""
        return (self.record or self.save_id).step

    def __str__(self) -> str:
        shown = f"{self.save_id.run}/{self.save_id.step}/{self.save_id.attempt}"
        if (one := self.record) is not None:
            shown += f"+{self.epoch}/{one.run}/{one.step}/{one.attempt}"
        return shown


@dataclasses.dataclass(frozen=True, eq=False)
class PublishedState:
    """The newest state for readers."""

    save_id: SaveId
    point: RecoveryPoint | None  # Above the step; None for a step.
    unix_secs: float  # When the step was committed, or the point captured.
    number: int  # Ascends; see ``ChangeLog``.
    dense: ServedLeaves | None = None  # None if none are followed.
    rows: Rows | None = None  # None if no tables are followed.
    sequence: int = 0  # Of the memory while it holds these rows.

    @property
    def position(self) -> Position:
        """The step or recovery point."""
        return Position.from_save(self.save_id, self.point)

    @property
    def step(self) -> int:
        """The training step."""
        return (self.save_id if self.point is None else self.point).step

    def is_current(self) -> bool:
        """Returns whether the memory still holds these rows."""
        return self.rows is None or self.rows.memory.sequence == self.sequence

    def check_current(self) -> None:
        """Raises ``VersionExpired`` if a newer state has replaced the rows that were read."""
        if not self.is_current():
            raise VersionExpired(
                f"version of step {self.step}: expected it to be closed within reader_secs, found "
                "that a newer one has replaced it; open the newest version, and close it sooner"
            )


class Version:
    """One step or recovery point: its rows while it is open, and its dense leaves.

    All lookups return rows of the same step or recovery point.
    """

    def __init__(self, shown: PublishedState, count: Callable[[str, int], None]):
        """Internal: call ``Live.version`` or ``Attached.version``."""
        self._shown, self._count = shown, count
        self._open = True

    @property
    def step(self) -> int:
        """The training step."""
        return self._shown.step

    @property
    def save_id(self) -> SaveId:
        """Id of the save, or of the recovery point's WAL record."""
        return self._shown.save_id if self.point is None else self.point.save_id

    @property
    def point(self) -> RecoveryPoint | None:
        """The recovery point; None for a step."""
        return self._shown.point

    @property
    def position(self) -> Position:
        """Identifies the version; see ``Live.changes`` and ``patches``."""
        return self._shown.position

    @property
    def unix_secs(self) -> float:
        """Time of the step's commit, or of the recovery point, in seconds since 1970."""
        return self._shown.unix_secs

    @property
    def dense(self) -> ServedLeaves:
        """The dense leaves, which stay valid afterwards.

        At a recovery point without dense leaves, they are those of the newest full one below it, or
        of the step; ``dense.step`` and ``dense.point`` identify it.

        Raises:
          OptionError: no dense leaves are followed.
        """
        if self._shown.dense is None:
            raise OptionError(
                "dense: expected followed dense leaves, found none; pass leaves= to follow(), and "
                "look up dense leaves in the process that called it"
            )
        return self._shown.dense

    @property
    def tables(self) -> dict[str, range]:
        """The followed tables: name to the row indices that this shard holds."""
        rows = self._shown.rows
        return {} if rows is None else {n: range(*one.row_span) for n, one in rows.tables.items()}

    def lookup(
        self, table: str, rows: np.ndarray | Sequence[int], *, slot: str | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns some rows of a table.

        Args:
          table: name of the table, or the end of exactly one name.
          rows: (n,) row indices, integers of any size and order.
          slot: name of a followed slot; None for the values.

        Returns:
          (n, *row shape) values of the table's or slot's dtype, and (n,) bool, whether the row
          exists and belongs to this shard. Other rows are zero.

        Raises:
          OptionError: the table or slot is not followed, or the indices are not integers.
          VersionExpired: the version was open for too long, and has been replaced.
          ClosedError: the version is not open any more.
        """
        name, source = self._name_of(table)
        values, found = source.gather(name, rows, slot)
        self._shown.check_current()
        self._count(name, len(found))
        return values, found

    def rows_of(self, table: str, ids: np.ndarray | Sequence[int]) -> np.ndarray:
        """Returns the row indices of ids, for ``lookup``.

        The first call on a table indexes its key column. The first call on each later version
        compares the column with the indexed one, and indexes the rows that differ.

        Args:
          table: name of the table, or the end of exactly one name. Its key column must be followed:
            ``follow(slots=["key"])``.
          ids: integers of any shape; not -1.

        Returns:
          int64 row indices, of the shape of the ids; -1 for an id without a row in this shard.

        Raises:
          OptionError: the table or its key column is not followed, the ids are not integers, or
            one is -1.
          DamagedKeys: an id has two rows.
          VersionExpired, ClosedError: as for ``lookup``.
        """
        name, source = self._name_of(table)
        try:
            return source.rows_of(name, ids, self._shown.sequence)
        finally:
            # Also after DamagedKeys: the column may have changed while it was read.
            self._shown.check_current()

    def _name_of(self, table: str) -> tuple[str, Rows]:
        if not self._open:
            raise ClosedError(
                f"version of step {self.step}: expected an open version, found it closed; look up "
                "rows inside of 'with live.version()'"
            )
        if self._shown.rows is None:
            raise OptionError(
                f"table {table!r}: expected followed tables, found none; pass tables= to follow()"
            )
        return self._shown.rows.name_of(table), self._shown.rows

    def __repr__(self) -> str:
        return f"<Version of {self.position}: {len(self.tables)} tables>"


class Versions(abc.ABC):
    """Opens versions of a state that changes meanwhile."""

    def __init__(self) -> None:
        #: Rows that were looked up, by table.
        self._looked_up: collections.Counter[str] = collections.Counter()
        self._counting = threading.Lock()

    def _count(self, table: str, rows: int) -> None:
        with self._counting:
            self._looked_up[table] += rows

    @abc.abstractmethod
    def _current(self, end: float) -> PublishedState:
        """Returns the newest state; waits until ``end`` (monotonic) if it is being written."""

    @contextlib.contextmanager
    def version(self, *, timeout_secs: float = 30.0) -> Iterator[Version]:
        """Opens the newest version.

        If tables are followed, the next version waits until this one is closed, for at most
        ``reader_secs``; so close it before you compute. Without tables, versions wait for nothing.
        Do not open a version inside of another one.

        Args:
          timeout_secs: maximum time to wait while the rows change, in seconds.

        Yields:
          The version.

        Raises:
          ServiceUnavailable: no version is available, or none within the timeout.
        """
        with self._opened(timeout_secs) as shown:
            version = Version(shown, self._count)
            try:
                yield version
            finally:
                version._open = False

    @contextlib.contextmanager
    def _opened(self, timeout_secs: float) -> Iterator[PublishedState]:
        """Keeps the newest state from being changed."""
        end = time.monotonic() + timeout_secs
        held: list[ReadLock] = []
        try:
            while True:
                shown = self._current(end)
                readers = None if shown.rows is None else shown.rows.memory.readers
                if readers is None or readers.acquire(end, held):
                    if shown.is_current():
                        break
                    if held:
                        held[0].release(held)
                if time.monotonic() >= end:
                    raise ServiceUnavailable(
                        f"serving: expected rows that do not change within {timeout_secs:g} s, "
                        "found that they still do; retry, or wait for the next save"
                    )
                time.sleep(_RETRY_SECS)
            yield shown
        finally:
            try:
                if held:
                    held[0].release(held)
            finally:
                if held:  # That call was interrupted as it began.
                    held[0].release(held)
