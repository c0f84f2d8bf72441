# SPDX-License-Identifier: Apache-2.0
"""Rows of tables in shared memory, looked up by this process or by another one."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from deltackpt import codecs, vocab
from deltackpt.errors import OptionError
from deltackpt.format import naming
from deltackpt.format.row_blocks import KEY_SLOT, VALUES, Span
from deltackpt.standby.follower import ReplicaTables
from deltackpt.standby.loaded_state import FieldChoice
from deltackpt.standby.shared_memory import MappedMemory, MemoryAddress

_SLOT = "slot."


@dataclasses.dataclass(frozen=True)
class ServedField:
    """Rows of the values or of one slot of a table."""

    offset: int  # In bytes.
    trailing: tuple[int, ...]  # Shape of one row.
    dtype: str


@dataclasses.dataclass(frozen=True)
class ServedTable:
    """One table in memory."""

    rows: int  # Of the whole table.
    row_span: Span  # The held row indices, half-open.
    fields: dict[str, ServedField]  # ``values``, or ``slot.<name>``, to its rows.

    @property
    def nbytes(self) -> int:
        """Size of the held rows in bytes."""
        return (self.row_span[1] - self.row_span[0]) * sum(
            math.prod(field.trailing) * codecs.dtype_of(field.dtype).itemsize
            for field in self.fields.values()
        )


def served_tables(tables: ReplicaTables, choice: FieldChoice) -> dict[str, ServedTable]:
    """Returns the chosen tables, by name; those without rows in the shard, too."""
    groups, found = tables.layout.group_by_name, dict[str, ServedTable]()
    regions = {(region.table.name, region.field): region for region in tables.regions}
    for table in tables.layout.tables:
        held, fields = (0, 0), dict[str, ServedField]()
        for spec in groups[table.group].fields:
            if not choice(table, spec.name):
                continue
            offset = 0
            if (region := regions.get((table.name, spec.name))) is not None:
                offset = region.offset
                held = region.rows[0] - table.offset, region.rows[1] - table.offset
            fields[spec.name] = ServedField(offset, spec.trailing, spec.dtype)
        if fields:
            found[table.name] = ServedTable(table.rows, held, fields)
    return found


@dataclasses.dataclass(frozen=True)
class RowsAddress:
    """What another process needs to look up rows."""

    memory: MemoryAddress
    tables: dict[str, ServedTable]


class Rows:
    """Rows in the memory of this process or of another one."""

    def __init__(self, memory: MappedMemory, tables: Mapping[str, ServedTable]):
        self.memory, self.tables = memory, tables
        self._arrays = {
            (name, field): memory.array(
                at.offset,
                (table.row_span[1] - table.row_span[0], *at.trailing),
                codecs.dtype_of(at.dtype),
            )
            for name, table in tables.items()
            for field, at in table.fields.items()
        }
        #: Table name to its indexed key column, and the sequence number of the memory at that time.
        self._keys: dict[str, tuple[int, vocab.RowKeys]] = {}
        self._lock = threading.Lock()

    def name_of(self, table: str) -> str:
        """Returns the full name of a followed table."""
        if table in self.tables:
            return table
        name = naming.meant(table, self.tables, OptionError)
        if name not in self.tables:
            raise OptionError(
                f"table {table!r}: expected a followed table, found none; "
                f"choose one of\n{naming.listed(self.tables)}"
            )
        return name

    def array(self, table: str, slot: str | None = None) -> np.ndarray:
        """Returns all held rows of a table or of one of its slots, in the memory itself."""
        found = self._arrays.get((table, VALUES if slot is None else _SLOT + slot))
        if found is None:
            slots = [one.removeprefix(_SLOT) for one in self.tables[table].fields if one != VALUES]
            raise OptionError(
                f"table {table!r}: expected one of the followed slots {slots}, found {slot!r}; "
                "name it in follow(slots=...)"
            )
        return found

    def gather(
        self, table: str, rows: np.ndarray | Sequence[int], slot: str | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Copies some rows; see ``Version.lookup``."""
        name = self.name_of(table)
        first, stop = self.tables[name].row_span
        array = self.array(name, slot)
        wanted = np.asarray(rows)
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            raise OptionError(
                f"table {table!r}: expected row indices as integers in one dimension, found "
                f"{wanted.dtype.name} of shape {wanted.shape}"
            )
        found = (wanted >= first) & (wanted < stop)
        if found.all():
            # Without "clip", numpy gathers through a second copy.
            at = wanted.astype(np.int64, copy=False) - first
            return np.take(array, at, axis=0, mode="clip"), found
        values = np.zeros((len(wanted), *array.shape[1:]), array.dtype)
        # The dtype of the indices may be too small for ``first``.
        values[found] = array[wanted[found].astype(np.int64) - first]
        return values, found

    def rows_of(self, table: str, ids: np.ndarray | Sequence[int], sequence: int) -> np.ndarray:
        """Returns the rows of ids; see ``Version.rows_of``. ``sequence`` is that of the memory."""
        column, first = self.array(table, KEY_SLOT), self.tables[table].row_span[0]
        if not len(column):
            return np.full(np.shape(ids), -1)
        with self._lock:
            read_at, keys = self._keys.get(table, (None, None))
            if keys is None:
                keys = vocab.RowKeys.index(column)
            elif read_at != sequence:
                keys.follow(column)
            self._keys[table] = sequence, keys
            rows = keys.find(ids)
        return np.where(rows < 0, rows, rows + first)


def is_meant(pattern: str, table: str) -> bool:
    """Returns whether a glob matches the name of a table, or the end of it after a slash."""
    return naming.matches(pattern, table) or naming.matches(f"**/{pattern}", table)


def choose(patterns: Sequence[str], tables: Mapping[str, object]) -> list[str]:
    """Returns the tables that any glob matches; raises ``OptionError`` if one matches none."""
    for pattern in patterns:
        if not any(is_meant(pattern, name) for name in tables):
            raise OptionError(
                f"tables: expected {pattern!r} to match a table, found none; the tables are\n"
                f"{naming.listed(tables)}"
            )
    return [name for name in tables if any(is_meant(one, name) for one in patterns)]
