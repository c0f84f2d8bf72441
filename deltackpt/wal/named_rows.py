# SPDX-License-Identifier: Apache-2.0
"""The rows named in ``append(ids=...)``: checked, joined, and compared with the stamps at a save.

With ``ids`` the training thread does not read the stamps. If they omit a touched row, no record
contains it; a save finds that before any restore does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from deltackpt.errors import OptionError
from deltackpt.format import naming, row_blocks
from deltackpt.format.manifest import Layout
from deltackpt.format.records import IdentityCache
from deltackpt.format.row_blocks import RowSet
from deltackpt.resources.runtime import Runtime
from deltackpt.save import pending_save
from deltackpt.save.branch import Clocks, clocks_seen
from deltackpt.save.selection import Sources, virtual_rows
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, match_marks

#: Flags for all rows of a table are set and looked through where there are at most so many for each
#: number: with more it is faster to sort the numbers.
_MOST_FLAGS = 64
#: Table name to row numbers, int64 ascending.
Rows = Mapping[str, np.ndarray]


def rows_of(ids: Mapping[str, object], layout: Layout, clocks: Clocks) -> Rows:
    """Returns the rows that ``append(ids=...)`` names, checked and sorted, by full table name."""
    if not isinstance(ids, Mapping):
        raise OptionError(
            f"ids: expected a mapping of table names to row indices, found {type(ids).__name__}"
        )
    if clocks.windows:
        raise OptionError(
            "ids: expected none with optax.MultiSteps, which moves all gathered rows at the end of "
            "a window; omit them: the stamps record which rows moved"
        )
    names = _meant.get(lambda: _tables_meant(ids, layout), layout, rest=tuple(ids))
    found: dict[str, np.ndarray] = {}
    for (given, indices), (name, count) in zip(ids.items(), names, strict=True):
        try:
            rows = np.asarray(indices)
        except (RuntimeError, TypeError, ValueError) as error:  # Donated, traced, ragged.
            raise OptionError(
                f"ids[{given!r}]: expected an array of integers on the host, found "
                f"{type(indices).__name__}: {error}"
            ) from error
        if rows.dtype.kind not in "iu" and rows.size:
            raise OptionError(
                f"ids[{given!r}]: expected integers, found dtype {rows.dtype}; pass row indices"
            )
        flat = rows.astype(np.int64, copy=False).reshape(-1)
        # Without its sign a negative one is beyond all tables.
        if flat.size and int(flat.view(np.uint64).max()) >= count:
            raise OptionError(
                f"ids[{given!r}]: expected rows from 0 to {count - 1}, found {rows.min()} to "
                f"{rows.max()}; pass the indices that the training step looked up"
            )
        rows = _ascending(flat, count)
        found[name] = rows if name not in found else np.union1d(found[name], rows)
    return found


#: Names and rows of the tables that the keys of ``ids`` mean.
_meant: IdentityCache[tuple[tuple[str, int], ...]] = IdentityCache()


def _tables_meant(given: Iterable[str], layout: Layout) -> tuple[tuple[str, int], ...]:
    tables = {table.name: table.rows for table in layout.tables}
    found = []
    for one in given:
        name = naming.meant(one, tables, OptionError)
        if name not in tables:
            raise OptionError(
                f"ids[{one!r}]: expected one of {sorted(tables)}, found no such table"
            )
        found.append((name, tables[name]))
    return tuple(found)


def _ascending(indices: np.ndarray, rows: int) -> np.ndarray:
    """Returns sorted unique row indices."""
    if rows > _MOST_FLAGS * len(indices):
        return row_blocks.distinct(indices)
    # For 16,384 ids of 80,000 rows, 5 times as fast as sorting and 15 times as np.unique.
    held = np.zeros(rows, bool)
    held[indices] = True
    return held.nonzero()[0]


#: More arrays than this are merged: a small array takes more memory than its rows.
_MOST_ARRAYS = 1024


class NamedRows:
    """The union of sets of rows; takes at most twice its memory, plus that of the last set."""

    def __init__(self) -> None:
        #: Table name to ascending rows, the union of most of them first.
        self._arrays: dict[str, list[np.ndarray]] = {}

    def add(self, rows: Mapping[str, np.ndarray]) -> None:
        """Adds rows: table name to row indices, int64 ascending."""
        for table, indices in rows.items():
            pieces = self._arrays.setdefault(table, [])
            pieces.append(indices)
            # Each merge at least doubles what it merges with, so that few rows are sorted per call.
            if len(pieces) > _MOST_ARRAYS or sum(map(len, pieces[1:])) > len(pieces[0]):
                pieces[:] = [_union(pieces)]

    def rows(self) -> dict[str, np.ndarray]:
        """Returns table name to all rows, ascending."""
        return {table: _union(pieces) for table, pieces in self._arrays.items()}

    def drain(self) -> dict[str, np.ndarray]:
        """Returns all rows, and removes them."""
        found, self._arrays = self.rows(), {}
        return found


def _union(pieces: list[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else row_blocks.distinct(np.concatenate(pieces))


class UncheckedRows:
    """The rows that were named since the last comparison."""

    def __init__(self) -> None:
        self._rows = NamedRows()
        self._since: Clocks | None = None
        self._until: Clocks | None = None

    def add(self, rows: Mapping[str, np.ndarray], since: Clocks | None, until: Clocks) -> None:
        """Adds rows named between two moments; if ``since`` is None, only to earlier rows."""
        if self._since is None:
            self._since = since
        if self._since is None:
            return
        self._until = until
        self._rows.add(rows)

    def compared(self) -> None:
        """Continues from the last moment of which rows were named: those before are correct."""
        self._rows, self._since, self._until = NamedRows(), self._until or self._since, None

    def forget(self) -> None:
        """Removes all rows."""
        self._rows, self._since, self._until = NamedRows(), None, None

    def missing(self, split: Split, marks: Sequence[Marks], runtime: Runtime) -> str | None:
        """Describes touched rows that ``ids`` omitted; None if there are none.

        Rows that were touched again since the last record are not detected.
        """
        since, until = self._since, self._until
        if since is None or until is None or not marks:
            return None
        now = Clocks(readings=tuple(until.readings))
        before, after = clocks_seen(now, since), {one.place: one.clock for one in until.readings}
        found = {one.place: one.clock for one in pending_save.clocks_of(split, marks).readings}
        if not before or found.keys() != before.keys():
            return None
        if any(clock < after[place] for place, clock in found.items()):
            return None  # Training has gone back to a state from before the last calls.
        stamps = match_marks(marks, split.layout)
        sources = Sources(split, stamps, runtime)
        given = virtual_rows(self._rows.rows(), split.layout)
        touched = {
            clock: _all_touched(sources, clocks) for clock, clocks in enumerate((before, after))
        }
        for (group, held), rows in touched[0].items():
            named = held.intersect(given.get(group, np.empty(0, np.int64)))
            missing = np.setdiff1d(np.setdiff1d(rows, named), touched[1][group, held])
            if len(missing):
                return _described(split, group, missing)
        return None


def _all_touched(
    sources: Sources, since: Mapping[str, int]
) -> dict[tuple[str, RowSet], np.ndarray]:
    sources.stamps.scan(since)
    return {
        (group.name, held): sources.stamps.touched(group.name, held)
        for group, (_, held), _ in sources.by_rows()
    }


def _described(split: Split, group: str, rows: np.ndarray) -> str:
    for table in split.layout.tables:
        held = RowSet(((table.offset, table.offset + table.rows),)).intersect(rows) - table.offset
        if table.group == group and len(held):
            return f"{len(held)} rows of table {table.name}, the first of them {held[0]},"
    return f"{len(rows)} rows"
