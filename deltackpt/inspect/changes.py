# SPDX-License-Identifier: Apache-2.0
"""What changed between saves: rows touched, and differences of steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from deltackpt.errors import MissingExtra, RestoreError, TemplateMismatch
from deltackpt.format import blocks, globs
from deltackpt.format.blocks import Rows
from deltackpt.format.manifest import Layout, TableEntry
from deltackpt.format.segments import FieldSpec
from deltackpt.inspect import html
from deltackpt.inspect.lazy import LazyArray, RowNumbers, Saves
from deltackpt.reading import chains
from deltackpt.reading.saves import StoredSave

#: Quantiles that ``TableDiff.quantiles`` gives by default.
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TableDiff:
    """Rows of one field of a table that differ between two steps.

    Attributes:
      table: name of the table.
      rows: int64 (n,), ascending: rows of both steps that differ in any bit.
      norms: float64 (n,): l2 norm of the change of each; nan where a number is not finite.
      relative: float64 (n,): ``norms`` over the l2 norm of the row before; inf where that was 0.
      total_rows: rows of the table at the later step.
      compared: rows that were read and compared.
      added: rows that only the later step has; negative where the earlier has more.
    """

    table: str
    rows: np.ndarray
    norms: np.ndarray
    relative: np.ndarray
    total_rows: int
    compared: int
    added: int

    @property
    def fraction(self) -> float:
        """Share of the rows that differ."""
        return len(self.rows) / max(1, self.total_rows)

    def quantiles(
        self, of: Sequence[float] = _QUANTILES, *, relative: bool = False
    ) -> dict[float, float]:
        """Quantiles of the norms, or of the relative ones; empty where no row differs.

        What is not finite counts as infinite.
        """
        values = self.relative if relative else self.norms
        if not len(values):
            return {}
        values = np.where(np.isnan(values), np.inf, values)
        # The nearest: between a norm and infinity there is nothing to interpolate.
        found = np.quantile(values, of, method="nearest")
        return dict(zip(of, map(float, found), strict=True))

    def largest(self, count: int = 10) -> np.ndarray:
        """Rows that changed most, the greatest change first."""
        norms = np.where(np.isnan(self.norms), np.inf, self.norms)
        return self.rows[np.argsort(-norms, kind="stable")[:count]]

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with the columns norm and relative, by row.

        Raises:
          MissingExtra: pandas is not installed.
        """
        index = pandas().Index(self.rows, name="row")
        return pandas().DataFrame({"norm": self.norms, "relative": self.relative}, index=index)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Diff:
    """What differs between two steps.

    Attributes:
      a: the earlier step.
      b: the later step.
      field: ``values``, or ``slot.<name>``.
      tables: name to what differs, of the tables of both steps.
      only_a: names of tables that only the earlier step has, or has in another shape or dtype.
      only_b: likewise of the later.
    """

    a: int
    b: int
    field: str
    tables: Mapping[str, TableDiff]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    def __getitem__(self, table: str) -> TableDiff:
        return self.tables[named(table, self.tables)]

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with the columns norm and relative, by table and row.

        Raises:
          MissingExtra: pandas is not installed.
        """
        if not self.tables:
            return pandas().DataFrame({"norm": [], "relative": []})
        frames = {name: found.to_pandas() for name, found in self.tables.items()}
        return pandas().concat(frames, names=["table"])

    def _repr_html_(self) -> str:
        return _page(self)


def pandas() -> Any:
    """The module.

    Raises:
      MissingExtra: it is not installed.
    """
    try:
        import pandas as module
    except ImportError as error:
        raise MissingExtra(
            "to_pandas: expected pandas, found that it cannot be imported; run: pip install pandas"
        ) from error
    return module


def touched(
    save: StoredSave, numbers: RowNumbers, tables: Collection[str] | None
) -> dict[str, np.ndarray]:
    """Rows of tables that a save holds; see ``Checkpoints.touched``."""
    known = [table.name for table in save.head.tables]
    names = known if tables is None else [named(table, known) for table in tables]
    return {
        table.name: _rows_of(save, table, numbers, blocks.VALUES)
        for table in save.head.tables
        if table.name in names
    }


def named(table: str, known: Iterable[str]) -> str:
    """The table that a name means."""
    return globs.meant(table, known, TemplateMismatch)


def _rows_of(save: StoredSave, table: TableEntry, numbers: RowNumbers, field: str) -> np.ndarray:
    """Rows of a field of a table that a save holds, int64, ascending."""
    found = [
        np.asarray(rows, np.int64) - table.offset
        for rows in _held(save, table, numbers, field)
        if len(rows)
    ]
    if not found:
        return np.empty(0, np.int64)
    # Segments of other columns hold the same rows again.
    return found[0] if len(found) == 1 else np.unique(np.concatenate(found))


def holds(
    save: StoredSave, table: TableEntry, numbers: RowNumbers, field: str, rows: np.ndarray
) -> np.ndarray:
    """Whether a save holds each of some ascending rows of a field of a table, bool (rows,)."""
    holds = np.zeros(len(rows), bool)
    for held in _held(save, table, numbers, field):
        if isinstance(held, np.ndarray):
            place = np.minimum(np.searchsorted(held, rows + table.offset), len(held) - 1)
            holds |= held[place] == rows + table.offset if len(held) else False
        else:
            for start, stop in blocks.spans_of(held):
                holds |= (rows + table.offset >= start) & (rows + table.offset < stop)
    return holds


def _held(save: StoredSave, table: TableEntry, numbers: RowNumbers, field: str) -> Iterator[Rows]:
    """Virtual rows of a table of which each segment of a save holds a field."""
    try:
        for part in save.parts():
            for segment in part.record.segments:
                if segment.group == table.group and field in segment.fields:
                    rows = numbers.of(part, segment)
                    yield rows[blocks.row_slice(rows, table.offset, table.offset + table.rows)]
    except RestoreError as error:
        chains.raise_if_removed((save,), error)
        raise


def diff(a: Saves, b: Saves, tables: Sequence[str] | None, field: str) -> Diff:
    """See ``Checkpoints.diff``."""
    of_a, of_b = _fields(a.layout, field), _fields(b.layout, field)
    tables = [tables] if isinstance(tables, str) else tables
    if not of_a and not of_b:
        raise TemplateMismatch(
            f"field {field!r}: expected values or slot.<name>, found it of no table at either "
            "step; see step.tables"
        )
    known = of_a.keys() | of_b.keys()
    wanted = known if tables is None else {named(table, known) for table in tables}
    if unknown := wanted - of_a.keys() - of_b.keys():
        raise TemplateMismatch(
            f"tables {sorted(unknown)}, field {field!r}: expected some of "
            f"{sorted(of_a.keys() | of_b.keys())}, found them in neither step; name others"
        )
    both = [
        name
        for name in sorted(wanted & of_a.keys() & of_b.keys())
        if _kind(of_a[name]) == _kind(of_b[name])
    ]
    return Diff(
        a=a.target.info.save_id.step,
        b=b.target.info.save_id.step,
        field=field,
        tables={name: _table_diff(a, b, of_a[name], of_b[name]) for name in both},
        only_a=tuple(sorted(wanted & of_a.keys() - {*both})),
        only_b=tuple(sorted(wanted & of_b.keys() - {*both})),
    )


#: A field of a table.
_Field = tuple[TableEntry, FieldSpec]


def entry_of(layout: Layout, table: str, field: str) -> _Field | None:
    """A field of a table as a step has it; None where it does not."""
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
    """Whether a save has the field of a table."""
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
    return TableDiff(
        table=of_b[0].name,
        rows=rows,
        norms=norms,
        relative=relative,
        total_rows=len(after),
        compared=compared,
        added=len(after) - len(before),
    )


def _candidates(
    a: Saves, b: Saves, of_a: _Field, of_b: _Field, before: LazyArray
) -> Iterator[range | np.ndarray]:
    """Rows that may differ, in batches."""
    # As float64, as which they are subtracted.
    count = max(1, before.batch_rows * before.dtype.itemsize // 16)
    held = _rows_apart(a, b, of_a, of_b)
    rows = range(len(before)) if held is None else held
    for start in range(0, max(1, len(rows)), count):
        yield rows[start : start + count]


def _rows_apart(a: Saves, b: Saves, of_a: _Field, of_b: _Field) -> np.ndarray | None:
    """Rows of saves that only one of two chains has; None where these may be all rows."""
    ids = [[save.info.save_id for save in one.chain] for one in (a, b)]
    shared = [save_id for save_id in ids[0] if save_id in ids[1]]
    if not shared:
        return None
    held = [np.empty(0, np.int64)]
    for one, (table, spec), own in zip((a, b), (of_a, of_b), ids, strict=True):
        for save in one.chain[own.index(shared[-1]) + 1 :]:
            held.append(_rows_of(save, table, one.numbers, spec.name))
            if len(held[-1]) == table.rows:
                return None
    return np.unique(np.concatenate(held))


def _changed(
    rows: np.ndarray, before: np.ndarray, after: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of some rows those that differ in any bit, l2 norms of their change, and relative ones."""
    differs = (_bytes(before) != _bytes(after)).any(axis=1)
    rows, before, after = rows[differs], before[differs], after[differs]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        norms = np.linalg.norm(_change(before, after), axis=1)
        relative = norms / np.linalg.norm(_wide(before), axis=1)
    # A change of the sign of a zero alone has the norm 0, as has a change from 0 to 0.
    return rows, norms, np.where(norms == 0, 0.0, relative)


def _change(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """What changed, (n, numbers); of integers exactly, before it is rounded, without its sign."""
    if before.dtype.kind not in "iu" or before.dtype.isbuiltin != 1:
        return _wide(after) - _wide(before)
    low, high = np.minimum(before, after), np.maximum(before, after)
    unsigned = np.dtype(f"uint{8 * before.dtype.itemsize}")
    return _wide(high.view(unsigned) - low.view(unsigned))


def _bytes(rows: np.ndarray) -> np.ndarray:
    row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(len(rows), row_bytes)


def _wide(rows: np.ndarray) -> np.ndarray:
    """Rows as (n, numbers) float64, or complex128."""
    dtype = np.complex128 if rows.dtype.kind == "c" else np.float64
    return rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(dtype)


DIFF_COLUMNS = ("table", "rows changed", "of all", "added", "median change", "99 %", "largest")


def diff_lines(found: Diff) -> list[tuple[Any, ...]]:
    """The tables of a diff as lines under ``DIFF_COLUMNS``: l2 norms of the changes."""
    lines: list[tuple[Any, ...]] = []
    for name, changed in found.tables.items():
        norms = changed.quantiles((0.5, 0.99, 1.0))
        lines.append(
            (
                name,
                len(changed.rows),
                f"{changed.fraction:.2%}",
                changed.added,
                *(f"{norms[of]:.4g}" if norms else None for of in (0.5, 0.99, 1.0)),
            )
        )
    return lines


def _page(found: Diff) -> str:
    """A diff: a line for each table."""
    title = f"{found.field}: step {found.a} → {found.b}, l2 norms of the rows' changes"
    return html.table(DIFF_COLUMNS, diff_lines(found), title)
