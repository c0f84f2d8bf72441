# SPDX-License-Identifier: Apache-2.0
"""Vocabularies that change: which id each row of a table has, and which rows to evict.

The map from ids to rows is training state. Its exact form is the table's *key column*: the id of
each row, -1 for a row without one (``Tables(key=...)`` saves it with the rows). ``RowKeys`` is an
index of that column. Its results depend on the column and on the calls after it alone, never on how
the column came about, so a run that restores the column assigns rows as the lost run would have.

Numpy only; an instance is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deltackpt.errors import DamagedKeys, OptionError, VocabularyFull

#: The id of a row without one.
NO_ID = -1
#: Positions of the hash table that were never used, and those of evicted ids. As rows, both are
#: after the last one, and stand for no id.
_UNUSED, _EVICTED = -1, -2
#: The hash table has at least this many positions for each row, and is rebuilt if more than
#: ``_MOST_USED`` of them were used: lookups pass the positions of evicted ids.
_POSITIONS_PER_ROW, _MOST_USED = 3, 0.6
#: 2^64 divided by the golden ratio, odd: multiplicative (Fibonacci) hashing.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
#: Ids looked up at a time; the temporary arrays of so many stay in the cache.
_AT_ONCE = 1 << 15


class Assigned(NamedTuple):
    """Rows of some ids.

    Attributes:
      rows: int64, of the shape of the ids: the row of each.
      new: int64, ascending: the rows that had no id before. Initialize and mark them, and write
        their ids (``RowKeys.ids``) into the key column.
    """

    rows: np.ndarray
    new: np.ndarray


class RowKeys:
    """Maps ids to the rows of one table by open addressing; every method works on whole batches.

    New ids get the free rows in ascending order, in the ascending order of the ids.

    Examples:
      >>> keys = RowKeys(4)
      >>> keys.assign([70, 7, 70])
      Assigned(rows=array([1, 0, 1]), new=array([0, 1]))
      >>> keys.evict(ids=[7])
      array([0])
      >>> keys.find([7, 70])
      array([-1,  1])
      >>> RowKeys.index(keys.column()).assign([8]).rows  # As the lost run would have.
      array([0])
    """

    def __init__(self, capacity: int):
        """Creates a vocabulary without ids, for a table of ``capacity`` rows, below 2^31.

        Raises:
          OptionError: the capacity is out of range.
        """
        if not 0 < capacity < 1 << 31:
            raise OptionError(f"capacity: expected 1 to 2^31 - 1 rows, found {capacity}")
        self._set_ids(np.full(capacity, NO_ID, np.int64))
        #: Rows from here on were never assigned.
        self._fresh = 0
        #: Free rows before ``_fresh``: ascending, then those of later evictions, in any order.
        self._freed = np.empty(0, np.int64)
        self._evicted: list[np.ndarray] = []
        self._rebuild()

    @classmethod
    def index(cls, column: np.ndarray) -> RowKeys:
        """Returns the vocabulary of a key column (see ``ids_of``), for example of a restored one.

        Raises:
          DamagedKeys: an id has two rows.
          OptionError: the column has another shape or dtype.
        """
        ids = ids_of(column)
        check_unique(ids)
        found = cls(len(ids))
        found._set_ids(ids)
        found._find_free_rows()
        found._rebuild()
        return found

    def follow(self, column: np.ndarray) -> None:
        """Replaces the ids with those of a later key column; rehashes only the rows that differ.

        Raises:
          DamagedKeys: an id has two rows; nothing was replaced.
          OptionError: the column has another shape or dtype, or another number of rows.
        """
        ids = ids_of(column)
        if len(ids) != self.capacity:
            raise OptionError(f"column: expected {self.capacity} rows, found {len(ids)}")
        changed = np.flatnonzero(ids != self._ids)
        known = self.find(ids[changed][ids[changed] != NO_ID])
        if not np.isin(known[known >= 0], changed).all():
            check_unique(ids)  # A row that did not change has the id of one that did.
        check_unique(ids[changed], changed)
        self._forget(changed[self._ids[changed] != NO_ID])
        self._ids[changed] = ids[changed]
        self._evicted = []
        self._find_free_rows()
        self._insert(changed[ids[changed] != NO_ID])

    def __len__(self) -> int:
        """Returns the number of ids."""
        return self.capacity - self.free

    @property
    def capacity(self) -> int:
        """The number of rows."""
        return len(self._ids)

    @property
    def free(self) -> int:
        """The number of rows without an id."""
        evicted = sum(map(len, self._evicted))
        return self.capacity - self._fresh + len(self._freed) + evicted

    def assign(self, ids: Sequence[int] | np.ndarray) -> Assigned:
        """Returns the rows of ids, and gives a free row to each id that has none.

        Args:
          ids: integers of any shape, with duplicates; not -1.

        Raises:
          VocabularyFull: there are more new ids than free rows; nothing was assigned.
          OptionError: the ids are not integers, or -1 is among them.
        """
        asked = _checked_ids(ids)
        rows = self._rows_of(asked.reshape(-1))
        unknown = np.flatnonzero(rows < 0)
        new = np.empty(0, np.int64)
        if len(unknown):
            missing = asked.reshape(-1)[unknown]
            added = _distinct(missing)
            new = self._allocate_rows(len(added))
            self._ids[new] = added
            self._insert(new)
            rows[unknown] = self._rows_of(missing)
        return Assigned(rows.reshape(asked.shape), new)

    def find(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the row of each id, int64 of the shape of the ids; -1 for an id without one.

        Raises:
          OptionError: the ids are not integers, or -1 is among them.
        """
        asked = _checked_ids(ids)
        return self._rows_of(asked.reshape(-1)).reshape(asked.shape)

    def evict(
        self,
        ids: Sequence[int] | np.ndarray | None = None,
        *,
        rows: Sequence[int] | np.ndarray | None = None,
    ) -> np.ndarray:
        """Frees the rows of some ids, or some rows; duplicates and unknown ids are ignored.

        Returns:
          The rows that were freed: int64, ascending. Set their ids to -1 in the key column, and
          mark them; zero their values and slots, so that a save needs no bytes for them.

        Raises:
          OptionError: both or neither of ``ids`` and ``rows`` were given, or a row is out of range.
        """
        if (ids is None) == (rows is None):
            raise OptionError("evict: expected either ids or rows, found both or neither")
        if rows is None:
            assert ids is not None
            chosen = self.find(ids).reshape(-1)
            chosen = chosen[chosen >= 0]
        else:
            chosen = self._checked_rows(rows)
            chosen = chosen[self._ids[chosen] != NO_ID]
        freed = _distinct(chosen)
        if len(freed):
            self._forget(freed)
            self._evicted.append(freed)
        return freed

    def ids(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the ids of some rows, int64; -1 for a free row.

        Raises:
          OptionError: a row is out of range.
        """
        return self._ids[self._checked_rows(rows)]

    def column(self, dtype: np.dtype | type = np.int64) -> np.ndarray:
        """Returns a copy of the key column; see ``column_of`` for the dtypes.

        Raises:
          OptionError: an id does not fit the dtype.
        """
        return column_of(self._ids, dtype)

    def grow(self, capacity: int) -> None:
        """Adds free rows after the existing ones, which keep their ids, up to ``capacity`` rows.

        Raises:
          OptionError: the capacity is out of range.
        """
        if not self.capacity <= capacity < 1 << 31:
            raise OptionError(
                f"capacity: expected {self.capacity} to 2^31 - 1 rows, found {capacity}"
            )
        more = np.full(capacity - self.capacity, NO_ID, np.int64)
        self._set_ids(np.concatenate([self._ids, more]))
        self._rebuild()

    def _checked_rows(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        found = _integers("rows", rows)
        if found.size and not 0 <= found.min() <= found.max() < self.capacity:
            raise OptionError(
                f"rows: expected rows from 0 to {self.capacity - 1}, found {found.min()} to "
                f"{found.max()}"
            )
        return found

    def _allocate_rows(self, count: int) -> np.ndarray:
        """Removes the first free rows from the free ones and returns them, ascending."""
        if count > self.free:
            raise VocabularyFull(
                f"assign: expected at most {self.free} new ids, as many as free rows, found "
                f"{count} (capacity {self.capacity}); evict rows, e.g. "
                "evict(rows=vocab.lowest(...)), or grow the table"
            )
        if self._evicted:
            # A stable sort merges ascending runs in linear time.
            self._freed = np.sort(np.concatenate([self._freed, *self._evicted]), kind="stable")
            self._evicted = []
        freed, self._freed = np.split(self._freed, [count])
        fresh = np.arange(self._fresh, self._fresh + count - len(freed))
        self._fresh += len(fresh)
        return np.concatenate([freed, fresh])

    def _forget(self, rows: np.ndarray) -> None:
        """Removes the ids of some rows, all of which have one."""
        self._table[self._probed(self._ids[rows])[1]] = _EVICTED
        self._ids[rows] = NO_ID

    def _find_free_rows(self) -> None:
        rows = np.flatnonzero(self._ids != NO_ID)
        self._fresh = int(rows[-1]) + 1 if len(rows) else 0
        self._freed = np.flatnonzero(self._ids[: self._fresh] == NO_ID)

    def _rebuild(self) -> None:
        """Builds the hash table from the ids, without the positions of evicted ones."""
        bits = max(4, (self.capacity * _POSITIONS_PER_ROW - 1).bit_length())
        self._table = np.full(1 << bits, _UNUSED, np.int32)
        self._shift, self._used = np.uint64(64 - bits), 0
        self._insert(np.flatnonzero(self._ids != NO_ID))

    def _set_ids(self, ids: np.ndarray) -> None:
        """Sets the id of each row."""
        self._of_entries = np.concatenate([ids, [NO_ID, NO_ID]])
        self._ids = self._of_entries[:-2]

    def _insert(self, rows: np.ndarray) -> None:
        """Adds rows to the hash table whose ids are not in it."""
        if self._used + len(rows) > len(self._table) * _MOST_USED:
            self._rebuild()
            return
        for start in range(0, len(rows), _AT_ONCE):
            pending = rows[start : start + _AT_ONCE].astype(np.int32)
            at = self._positions(self._ids[pending])
            while len(pending):
                entries = self._table.take(at)
                vacant = np.flatnonzero(entries < 0)
                self._table[at[vacant]] = pending[vacant]
                # If several rows try one position, one is stored; the others try the next one.
                stored = self._table.take(at) == pending
                self._used += np.count_nonzero(stored & (entries == _UNUSED))
                left = np.flatnonzero(~stored)
                pending, at = pending[left], self._next(at[left])

    def _rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the row of each id, -1 without one."""
        return self._probed(ids)[0]

    def _probed(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row of each id, -1 without one, and the position at which probing ended."""
        rows, positions = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        for start in range(0, len(ids), _AT_ONCE):
            piece = slice(start, start + _AT_ONCE)
            self._probe(ids[piece], rows[piece], positions[piece])
        return rows, positions

    def _probe(self, ids: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> None:
        """Looks up ids: all at their first positions, those not found there at the next ones."""
        at = positions[:] = self._positions(ids)
        entries = rows[:] = self._table.take(at)
        left = np.flatnonzero(self._differs(entries, ids))
        while len(left):
            at = positions[left] = self._next(positions[left])
            entries = rows[left] = self._table.take(at)
            left = left[self._differs(entries, ids[left])]

    def _differs(self, entries: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Returns which positions are, or were, those of other ids."""
        return (self._of_entries.take(entries) != ids) & (entries != _UNUSED)

    def _positions(self, ids: np.ndarray) -> np.ndarray:
        """Returns the first position of each id in the hash table."""
        bits = ids.view(np.uint64)
        # The upper bits of a product depend on all bits below them, but not on those above.
        mixed = (bits ^ (bits >> np.uint64(32))) * _MULTIPLIER
        return (mixed >> self._shift).view(np.int64)

    def _next(self, at: np.ndarray) -> np.ndarray:
        return (at + 1) & (len(self._table) - 1)


def lowest(
    ids: np.ndarray, count: int, *scores: np.ndarray, keep: np.ndarray | None = None
) -> np.ndarray:
    """Returns the rows with the lowest scores, as eviction policies need them.

    With the step of the last use as the score, these are the least recently used rows; with the
    number of uses and then the last use, the least frequently used ones.

    Args:
      ids: key column; see ``ids_of``. Rows without an id are never returned.
      count: number of rows to return; all rows with an id if there are fewer.
      *scores: at least one, (rows,) each, without NaN: ties in one are decided by the next, then by
        the row.
      keep: rows that are not returned, such as those of the next batch; -1 is ignored.

    Returns:
      int64, ascending.

    Examples:
      >>> last_used, uses = np.array([9, 4, 4, 0]), np.array([5, 2, 1, 0])
      >>> lowest(np.array([70, 7, 8, -1]), 1, last_used)
      array([1])
      >>> lowest(np.array([70, 7, 8, -1]), 1, uses, last_used)
      array([2])
    """
    eligible = ids_of(ids) != NO_ID
    if keep is not None:
        eligible[keep[keep >= 0]] = False
    rows, found = np.flatnonzero(eligible), []
    for score in scores:
        if not 0 < count < len(rows):
            break
        held = np.asarray(score)[rows]
        limit = np.partition(held, count - 1)[count - 1]
        below = rows[held < limit]
        found.append(below)
        # Rows with the limit itself: the next score decides which of them.
        rows, count = rows[held == limit], count - len(below)
    found.append(rows[: max(count, 0)])
    return np.sort(np.concatenate(found))


def expired(ids: np.ndarray, last_used: np.ndarray, before: int) -> np.ndarray:
    """Returns the rows with an id that were last used before a step: int64, ascending.

    Args:
      ids: key column; see ``ids_of``.
      last_used: (rows,), the step of the last use of each row.
      before: for a time to live of n steps, the step minus n.
    """
    return np.flatnonzero((ids_of(ids) != NO_ID) & (np.asarray(last_used) < before))


def ids_of(column: np.ndarray) -> np.ndarray:
    """Returns the ids of a key column: (rows,) int64, a copy.

    Args:
      column: (rows,) int32, int64 or uint64, or (rows, 2) int32 or uint32, the lower half first,
        for 64-bit ids without ``jax_enable_x64``. Ids from 2^63 on are negative in the result.

    Raises:
      OptionError: the column has another shape or dtype.
    """
    found = np.asarray(column)
    if fault := column_fault(found.shape, found.dtype):
        raise OptionError(f"key column: {fault}")
    if found.ndim == 2:
        return np.array(found, found.dtype.newbyteorder("<"), order="C").view("<i8").reshape(-1)
    if found.dtype == np.uint64:
        return found.view(np.int64).copy()
    return found.astype(np.int64)


def column_of(ids: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
    """Returns ids as a key column.

    Args:
      ids: (n,) int64.
      dtype: int32, int64 or uint64, for a column (n,); or uint32, for (n, 2) with the lower half
        first.

    Raises:
      OptionError: an id does not fit the dtype, or the dtype is another.
    """
    wanted = np.dtype(dtype)
    if wanted == np.uint32:
        return np.array(ids, "<i8").view("<u4").reshape(-1, 2)
    if wanted == np.uint64:
        return np.array(ids, np.int64).view(np.uint64)
    if wanted not in (np.int32, np.int64):
        raise OptionError(f"key column: expected int32, int64, uint64 or uint32, found {wanted}")
    found = np.asarray(ids).astype(wanted)
    if (outside := np.flatnonzero(found != ids)).size:
        raise OptionError(
            f"key column: expected ids that fit {wanted}, found {np.asarray(ids)[outside[0]]}; "
            "use a column of (rows, 2) uint32: column(np.uint32)"
        )
    return found


def column_fault(shape: Sequence[int], dtype: np.dtype) -> str | None:
    """Returns why an array cannot be a key column; None if it can."""
    kind = np.dtype(dtype)
    if len(shape) == 1 and kind in (np.int32, np.int64, np.uint64):
        return None
    if len(shape) == 2 and shape[1] == 2 and kind in (np.int32, np.uint32):
        return None
    return (
        "expected (rows,) of int32, int64 or uint64, or (rows, 2) of int32 or uint32, "
        f"found {tuple(shape)} of {kind.name}"
    )


def check_unique(
    ids: np.ndarray, rows: np.ndarray | None = None, *, name: str = "key column"
) -> None:
    """Checks that no id but -1 has two rows.

    Args:
      ids: (n,) int64.
      rows: (n,) the row of each id; by default its position.
      name: of the column, for the error.

    Raises:
      DamagedKeys: an id has two rows; the message has the id and both rows.
    """
    ordered = np.sort(ids)
    twice = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != NO_ID)]
    if len(twice):
        at = np.flatnonzero(ids == twice[0])[:2]
        first, second = (at if rows is None else rows[at]).tolist()
        raise DamagedKeys(
            name, "one row for each id", f"id {twice[0]} in rows {first} and {second}"
        )


def _distinct(values: np.ndarray) -> np.ndarray:
    """Returns the sorted distinct values; ``np.unique`` takes ten times as long for 100,000."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def _integers(name: str, given: Sequence[int] | np.ndarray) -> np.ndarray:
    found = np.asarray(given)
    if not found.size:
        return found.astype(np.int64)
    if found.dtype.kind not in "iu":
        raise OptionError(f"{name}: expected integers, found {found.dtype.name}")
    return found.view(np.int64) if found.dtype == np.uint64 else found.astype(np.int64, copy=False)


def _checked_ids(given: Sequence[int] | np.ndarray) -> np.ndarray:
    found = _integers("ids", given)
    if found.size and found.min() <= NO_ID and (found == NO_ID).any():
        raise OptionError("ids: expected ids, found -1, which means none; remove padding first")
    return found
