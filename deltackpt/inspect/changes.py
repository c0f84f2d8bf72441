# SPDX-License-Identifier: Apache-2.0
"""Changes between saves: touched rows, and differences between steps."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from deltackpt import vocab
from deltackpt.errors import MissingExtra, RestoreError, TemplateMismatch
from deltackpt.format import naming, row_blocks
from deltackpt.format.manifest import Layout, TableEntry
from deltackpt.format.row_blocks import FieldSpec, Rows
from deltackpt.inspect.lazy import LazyArray, RowIndexCache, Saves
from deltackpt.inspect.listing import Listing
from deltackpt.reading import chains
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.units import count

if TYPE_CHECKING:
    from pandas import DataFrame

#: Quantiles that ``TableDiff.quantiles`` gives by default.
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TableDiff:
    """Rows of one field of a table that differ between two steps.

    Attributes:
      table: name of the table.
      rows: int64 (n,), ascending: rows of both steps that differ in any bit.
      norms: float64 (n,): l2 norm of each row's change; NaN if an element is not finite.
      relative: float64 (n,): ``norms`` over the l2 norm of the earlier row; inf if that is 0.
      total_rows: number of rows of the table at the later step.
      compared: number of rows that were read and compared.
      added: number of rows that only the later step has; negative if the earlier step has more.
      ids: int64 (n,): ids of ``rows`` at the later step, -1 for none; None without a key column.
    """

    table: str
    rows: np.ndarray
    norms: np.ndarray
    relative: np.ndarray
    total_rows: int
    compared: int
    added: int
    ids: np.ndarray | None = None

    def __repr__(self) -> str:
        changed = f"{len(self.rows):,} of {self.compared:,} compared rows differ"
        return f"<TableDiff of {self.table}: {changed}>"

    @property
    def fraction(self) -> float:
        """Share of the rows that differ."""
        return len(self.rows) / max(1, self.total_rows)

    def quantiles(
        self, of: Sequence[float] = _QUANTILES, *, relative: bool = False
    ) -> dict[float, float]:
        """Returns quantiles of the norms, or of the relative norms; empty if no row differs.

        Norms that are not finite count as infinite.

        Args:
          of: the quantiles, each within [0, 1].
          relative: whether to use ``relative`` instead of ``norms``.
        """
        values = self.relative if relative else self.norms
        if not len(values):
            return {}
        values = np.where(np.isnan(values), np.inf, values)
        # Do not interpolate between a norm and infinity.
        found = np.quantile(values, of, method="nearest")
        return dict(zip(of, map(float, found), strict=True))

    def largest(self, count: int = 10) -> np.ndarray:
        """Returns the rows that changed most, largest change first."""
        norms = np.where(np.isnan(self.norms), np.inf, self.norms)
        return self.rows[np.argsort(-norms, kind="stable")[:count]]

    def to_pandas(self) -> DataFrame:
        """Returns a ``pandas.DataFrame`` with columns ``norm`` and ``relative``, indexed by row.

        With a key column, it has a column ``id``.

        Raises:
          MissingExtra: pandas is not installed.
        """
        index = pandas().Index(self.rows, name="row")
        ids = {} if self.ids is None else {"id": self.ids}
        columns = {**ids, "norm": self.norms, "relative": self.relative}
        return pandas().DataFrame(columns, index=index)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Diff:
    """Differences between two steps.

    Attributes:
      a: the earlier step.
      b: the later step.
      field: ``values``, or ``slot.<name>``.
      tables: differences of the tables that both steps have, by name.
      only_a: tables that only the earlier step has, or whose row shape or dtype differs.
      only_b: tables that only the later step has, or whose row shape or dtype differs.
    """

    a: int
    b: int
    field: str
    tables: Mapping[str, TableDiff]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    def __getitem__(self, table: str) -> TableDiff:
        return self.tables[named(table, self.tables)]

    def to_pandas(self) -> DataFrame:
        """Returns a ``pandas.DataFrame`` with columns ``norm`` and ``relative``, by table and row.

        Raises:
          MissingExtra: pandas is not installed.
        """
        if not self.tables:
            return pandas().DataFrame({"norm": [], "relative": []})
        frames = {name: found.to_pandas() for name, found in self.tables.items()}
        return pandas().concat(frames, names=["table"])

    def __repr__(self) -> str:
        changed = sum(len(found.rows) for found in self.tables.values())
        return (
            f"<Diff of {self.field}, step {self.a} to {self.b}: {changed:,} rows of "
            f"{count(len(self.tables), 'table')} differ>"
        )

    def _repr_html_(self) -> str:
        return list_differences(self).html()


def pandas() -> types.ModuleType:
    """Imports pandas, or raises ``MissingExtra``."""
    try:
        import pandas as module
    except ImportError as error:
        raise MissingExtra(
            "to_pandas: expected pandas, found that it cannot be imported; run: pip install pandas"
        ) from error
    return module


def touched(
    save: StoredSave, row_indices: RowIndexCache, tables: Collection[str] | None
) -> dict[str, np.ndarray]:
    """Returns the rows that a save contains; see ``Checkpoints.touched``."""
    known = [table.name for table in save.head.tables]
    names = known if tables is None else [named(table, known) for table in tables]
    return {
        table.name: _rows_of(save, table, row_indices, row_blocks.VALUES)
        for table in save.head.tables
        if table.name in names
    }


def named(table: str, known: Iterable[str]) -> str:
    """Returns the table that a name, or the end of one, refers to."""
    return naming.meant(table, known, TemplateMismatch)


def _rows_of(
    save: StoredSave, table: TableEntry, row_indices: RowIndexCache, field: str
) -> np.ndarray:
    """Rows of a field of a table in a save, int64, ascending."""
    found = [
        np.asarray(rows, np.int64) - table.offset
        for rows in _held(save, table, row_indices, field)
        if len(rows)
    ]
    if not found:
        return np.empty(0, np.int64)
    # Segments of other columns repeat the same rows.
    return found[0] if len(found) == 1 else np.unique(np.concatenate(found))


def contains_rows(
    save: StoredSave, table: TableEntry, row_indices: RowIndexCache, field: str, rows: np.ndarray
) -> np.ndarray:
    """Returns whether a save contains each of some ascending rows of a field, bool (rows,)."""
    holds = np.zeros(len(rows), bool)
    for held in _held(save, table, row_indices, field):
        if isinstance(held, np.ndarray):
            place = np.minimum(np.searchsorted(held, rows + table.offset), len(held) - 1)
            holds |= held[place] == rows + table.offset if len(held) else False
        else:
            for start, stop in row_blocks.spans_of(held):
                holds |= (rows + table.offset >= start) & (rows + table.offset < stop)
    return holds


def _held(
    save: StoredSave, table: TableEntry, row_indices: RowIndexCache, field: str
) -> Iterator[Rows]:
    """Virtual rows of a table in each segment of a save that has a field."""
    try:
        for shard in save.shards():
            for segment in shard.record.segments:
                if segment.group == table.group and field in segment.fields:
                    rows = row_indices.rows_of(shard, segment)
                    yield rows[row_blocks.row_slice(rows, table.offset, table.offset + table.rows)]
    except RestoreError as error:
        chains.raise_if_removed((save,), error)
        raise


def diff(a: Saves, b: Saves, tables: Sequence[str] | None, field: str) -> Diff:
    """See ``Checkpoints.diff``."""
    of_a, of_b = _fields(a.layout, field), _fields(b.layout, field)
    tables = [tables] if isinstance(tables, str) else tables
    if not of_a and not of_b:
        raise TemplateMismatch(
            f"field {field!r}: expected values or slot.<name>, found no table with it at either "
            "step; see step.tables"
        )
    known = of_a.keys() | of_b.keys()
    wanted = known if tables is None else {named(table, known) for table in tables}
    if unknown := wanted - of_a.keys() - of_b.keys():
        raise TemplateMismatch(
            f"tables {sorted(unknown)}, field {field!r}: expected some of "
            f"{sorted(of_a.keys() | of_b.keys())}, found them in neither step; choose others"
        )
    both = [
        name
        for name in sorted(wanted & of_a.keys() & of_b.keys())
        if _kind(of_a[name]) == _kind(of_b[name])
    ]
    return Diff(
        a=a.save_id.step,
        b=b.save_id.step,
        field=field,
        tables={name: _table_diff(a, b, of_a[name], of_b[name]) for name in both},
        only_a=tuple(sorted(wanted & of_a.keys() - {*both})),
        only_b=tuple(sorted(wanted & of_b.keys() - {*both})),
    )


#: A field of a table.
_Field = tuple[TableEntry, FieldSpec]


def entry_of(layout: Layout, table: str, field: str) -> _Field | None:
    """Returns a step's entry for a field of a table; None if the step lacks the field."""
    return _fields(layout, field).get(table)


def _fields(layout: Layout, field: str) -> dict[str, _Field]:
    """Tables that have a field, by name."""
    specs = {
        group.name: spec for group in layout.groups for spec in group.fields if spec.name == field
    }
    return {
        table.name: (table, specs[table.group]) for table in layout.tables if table.group in specs
    }


def _kind(found: _Field) -> tuple[tuple[int, ...], str]:
    """Row shape and dtype, which must be equal to compare."""
    return found[1].trailing, found[1].dtype


def _table_diff(a: Saves, b: Saves, of_a: _Field, of_b: _Field) -> TableDiff:
    before, after = LazyArray(a, *of_a), LazyArray(b, *of_b)
    common = min(len(before), len(after))
    compared = 0
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for rows in _candidates(a, b, of_a, of_b, before):
        if len(rows) and rows[-1] >= common:
            rows = rows[: int(np.searchsorted(np.asarray(rows), common))]
        compared += len(rows)
        found.append(_changed(np.asarray(rows, np.int64), before.rows(rows), after.rows(rows)))
    rows, norms, relative = (np.concatenate(parts) for parts in zip(*found, strict=True))
    key = b.layout.group_by_name[of_b[0].group].key
    return TableDiff(
        table=of_b[0].name,
        rows=rows,
        norms=norms,
        relative=relative,
        total_rows=len(after),
        compared=compared,
        added=len(after) - len(before),
        ids=None if key is None else vocab.ids_of(LazyArray(b, of_b[0], key).rows(rows)),
    )


def _candidates(
    a: Saves, b: Saves, of_a: _Field, of_b: _Field, before: LazyArray
) -> Iterator[range | np.ndarray]:
    """Rows that may differ, in batches."""
    # Rows are subtracted as float64.
    count = max(1, before.batch_rows * before.dtype.itemsize // 16)
    try:
        held = _differing_rows(a.current, b.current, of_a, of_b)
    except RestoreError:
        held = None  # Reading rows finds an intact chain, if there is one.
    rows = range(len(before)) if held is None else held
    for start in range(0, max(1, len(rows)), count):
        yield rows[start : start + count]


def _differing_rows(a: Saves, b: Saves, of_a: _Field, of_b: _Field) -> np.ndarray | None:
    """Rows in saves that only one of two chains has; None if these may be all rows."""
    ids = [[save.info.save_id for save in one.chain] for one in (a, b)]
    shared = [save_id for save_id in ids[0] if save_id in ids[1]]
    if not shared:
        return None
    held = [np.empty(0, np.int64)]
    for one, (table, spec), own in zip((a, b), (of_a, of_b), ids, strict=True):
        beyond = one.chain[own.index(shared[-1]) + 1 :]
        held += (_rows_of(save, table, one.row_indices, spec.name) for save in beyond)
        held.append(one.logged_rows(table))
        if one.plan is not None and spec.always:
            return None  # Full records have all its rows.
        if any(len(rows) == table.rows for rows in held):
            return None
    return np.unique(np.concatenate(held))


def _changed(
    rows: np.ndarray, before: np.ndarray, after: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows that differ in any bit, with the absolute and relative l2 norms of their change."""
    differs = (_bytes(before) != _bytes(after)).any(axis=1)
    rows, before, after = rows[differs], before[differs], after[differs]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        norms = np.linalg.norm(_change(before, after), axis=1)
        relative = norms / np.linalg.norm(_wide(before), axis=1)
    # A zero that only changes its sign has the norm 0.
    return rows, norms, np.where(norms == 0, 0.0, relative)


def _change(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The change, (n, elements); integers are subtracted exactly, and without the sign."""
    if before.dtype.kind not in "iu" or before.dtype.isbuiltin != 1:
        return _wide(after) - _wide(before)
    low, high = np.minimum(before, after), np.maximum(before, after)
    unsigned = np.dtype(f"uint{8 * before.dtype.itemsize}")
    return _wide(high.view(unsigned) - low.view(unsigned))


def _bytes(rows: np.ndarray) -> np.ndarray:
    row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(len(rows), row_bytes)


def _wide(rows: np.ndarray) -> np.ndarray:
    """Rows as (n, elements) float64, or complex128."""
    dtype = np.complex128 if rows.dtype.kind == "c" else np.float64
    return rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(dtype)


def list_differences(found: Diff) -> Listing:
    """Returns a line for each table, with l2 norms of the rows' changes."""
    quantiles = {0.5: "median change", 0.99: "99 % quantile", 1.0: "largest"}
    lines: list[tuple[object, ...]] = []
    for name, changed in found.tables.items():
        norms = changed.quantiles((*quantiles,))
        shown = (f"{norms[of]:.4g}" if norms else None for of in quantiles)
        lines.append((name, len(changed.rows), f"{changed.fraction:.2%}", changed.added, *shown))
    columns = ("table", "rows changed", "share", "added", *quantiles.values())
    return Listing(columns, lines, f"{found.field}: step {found.a} -> {found.b}")
