# SPDX-License-Identifier: Apache-2.0
"""Changed rows in batches, for consumers that keep a copy: a cache, a parameter server, an index.

The log keeps row indices only; values are read from memory when a consumer asks. Changes of several
versions are therefore sent once, and memory is bounded whatever a consumer does.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from deltackpt.format import row_blocks
from deltackpt.serving.rows import Rows, choose
from deltackpt.serving.version import Position, PublishedState

#: Maximum size of older changes: their row indices, and so much for each object with some.
_MOST_INDEX_BYTES = 64 << 20
_OBJECT_BYTES = 256
#: Values that are copied while the next version waits; at least one row.
_PIECE_BYTES = 16 << 20
#: No row indices.
NO_ROWS = np.empty(0, np.int64)

#: Table name to row indices, int64 and ascending; None means every row of every table.
ChangedTables = Mapping[str, np.ndarray] | None


class _Entry(NamedTuple):
    """The rows in which a version differs from the one before."""

    number: int
    position: Position
    rows: ChangedTables

    @property
    def nbytes(self) -> int:
        rows = () if self.rows is None else self.rows.values()
        return 2 * _OBJECT_BYTES + sum(_OBJECT_BYTES + one.nbytes for one in rows)


class ChangeLog:
    """The rows that changed between the newest versions. Thread-safe."""

    def __init__(self) -> None:
        self._entries: collections.deque[_Entry] = collections.deque()
        self._lock = threading.Lock()
        self._number, self._nbytes = 0, 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._coming: ChangedTables = {}

    def add(self, changed: ChangedTables) -> None:
        """Adds changed rows to those of the next version."""
        self._coming = united(self._coming, changed)

    def complete(self, position: Position) -> int:
        """Ends the changes of a version, and returns the version's number."""
        with self._lock:
            self._number += 1
            entry, self._coming = _Entry(self._number, position, self._coming), {}
            for table, rows in (entry.rows or {}).items():
                self._counts[table] += len(rows)
            if entry.nbytes > _MOST_INDEX_BYTES:
                entry = entry._replace(rows=None)
            self._entries.append(entry)
            self._nbytes += entry.nbytes
            while self._nbytes > _MOST_INDEX_BYTES:
                self._nbytes -= self._entries.popleft().nbytes
            return self._number

    def changed_rows(self) -> dict[str, int]:
        """Returns table name to the rows that changed so far, without whole tables."""
        with self._lock:
            return dict(self._counts)

    def number_of(self, position: Position) -> int | None:
        """Returns the number of a version; None if it is not known any more."""
        with self._lock:
            known = (one.number for one in reversed(self._entries) if one.position == position)
            return next(known, None)

    def since(self, number: int) -> ChangedTables:
        """Returns the rows that changed after a version; None if they are not known any more."""
        with self._lock:
            later = [one for one in self._entries if one.number > number]
            if len(later) != self._number - number:
                return None
        found: ChangedTables = {}
        for one in later:
            found = united(found, one.rows)
        return found


def united(one: ChangedTables, other: ChangedTables) -> ChangedTables:
    """Returns the rows of both."""
    if one is None or other is None:
        return None
    found = {**one}
    for table, rows in other.items():
        held = found.get(table, NO_ROWS)
        found[table] = rows if not len(held) else row_blocks.union_of([held, rows])
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class ChangeBatch:
    """New values of some rows of a table."""

    table: str
    rows: np.ndarray
    values: np.ndarray
    position: Position
    reset: bool
    complete: bool


@dataclasses.dataclass
class _PendingRows:
    """Rows of a table to send: a range, and others."""

    start: int = 0
    stop: int = 0
    rows: np.ndarray = dataclasses.field(default_factory=lambda: NO_ROWS)
    reset: bool = False

    def __len__(self) -> int:
        return self.stop - self.start + len(self.rows)

    def add(self, rows: np.ndarray) -> None:
        outside = rows[(rows < self.start) | (rows >= self.stop)]
        self.rows = row_blocks.union_of([self.rows, outside])

    def pop(self, count: int) -> np.ndarray:
        """Removes and returns up to ``count`` rows."""
        if self.start < self.stop:
            end = min(self.stop, self.start + count)
            found, self.start = np.arange(self.start, end), end
        else:
            found, self.rows = self.rows[:count], self.rows[count:]
        return found


class Changes(Iterator[ChangeBatch]):
    """The changes that one consumer receives, an iterator of ``ChangeBatch``es."""

    def __init__(
        self,
        log: ChangeLog,
        opened: Callable[[], AbstractContextManager[PublishedState | None]],  # Opens the newest.
        wait: Callable[[int], bool],  # For another version than this number; whether there is one.
        look_up: Callable[[Position, PublishedState], ChangedTables],  # In storage.
        *,
        consumer: str,
        tables: Sequence[str],
        after: Position | None,
        batch_rows: int,
    ):
        """Internal: call ``Live.changes``."""
        self.consumer, self.position = consumer, after
        self._log, self._opened, self._wait, self._look_up = log, opened, wait, look_up
        self._patterns, self._batch_rows = tables, batch_rows
        self._after: int | None = None if after is None else log.number_of(after)
        self.completed = self.number
        self._pending: dict[str, _PendingRows] = {}
        self._ready: collections.deque[ChangeBatch] = collections.deque()

    @property
    def number(self) -> int:
        """Number of the newest version whose changes were looked up; 0 before the first."""
        return self._after or 0

    def __next__(self) -> ChangeBatch:
        while not self._ready:
            self._read()
            if not self._ready and not self._wait(self.number):
                raise StopIteration
        batch = self._ready.popleft()
        if batch.complete:
            self.position, self.completed = batch.position, self.number
        return batch

    def _start(self) -> None:
        """Looks up what changed after the position if the log does not reach back to it."""
        with self._opened() as shown:
            pass  # Reading storage would delay the next version.
        if shown is None or self.position is None:
            return
        changed = self._look_up(self.position, shown)
        if changed is not None:
            assert shown.rows is not None
            self._add(changed, shown.rows)
            self._after = shown.number

    def _read(self) -> None:
        """Copies pending rows out of the newest version."""
        if self._after is None and self.position is not None:
            self._start()
        with self._opened() as shown:
            if shown is None:
                return
            rows = shown.rows
            assert rows is not None
            if self._after != shown.number:
                changed = None if self._after is None else self._log.since(self._after)
                self._add(changed, rows)
                self._after = shown.number
            budget, found = _PIECE_BYTES, list[ChangeBatch]()
            for table, pending in self._pending.items():
                array = rows.array(table)
                row_bytes = max(1, array[:1].nbytes)
                while len(pending) and budget > 0:
                    count = max(1, min(self._batch_rows, budget // row_bytes))
                    wanted = pending.pop(count)
                    budget -= len(wanted) * row_bytes
                    values, _ = rows.gather(table, wanted)
                    found.append(
                        ChangeBatch(
                            table, wanted, values, shown.position, pending.reset, complete=False
                        )
                    )
            if not shown.is_current():  # This thread was suspended for longer than ``reader_secs``.
                for batch in found:
                    self._pending[batch.table].add(batch.rows)
                return
            self._pending = {name: one for name, one in self._pending.items() if len(one)}
            if not self._pending:
                if found:
                    found[-1] = dataclasses.replace(found[-1], complete=True)
                else:
                    self.position, self.completed = shown.position, shown.number
            self._ready.extend(found)

    def _add(self, changed: ChangedTables, held: Rows) -> None:
        names = choose(self._patterns, held.tables)
        if changed is None:
            self._pending = {
                name: _PendingRows(*held.tables[name].row_span, reset=True) for name in names
            }
            return
        for name in names:
            if len(rows := changed.get(name, NO_ROWS)):
                self._pending.setdefault(name, _PendingRows()).add(rows)
