# SPDX-License-Identifier: Apache-2.0
"""Values of rows over the steps and recovery points; each chain is read once.

For the recovery points between two steps, WAL records are applied to the rows of the lower step,
one after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from deltackpt import codecs, vocab
from deltackpt.errors import RestoreError, StepGone, StepNotFound, TemplateMismatch
from deltackpt.format import row_blocks
from deltackpt.format.manifest import SaveId, TableEntry
from deltackpt.format.row_blocks import FieldSpec
from deltackpt.inspect.changes import contains_rows, entry_of, named, pandas
from deltackpt.inspect.lazy import RowIndexCache, Saves, targets_in
from deltackpt.layers.targets import Targets
from deltackpt.reading import chains, reader, stored_saves, wal_rows
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import RecoveryPoint, ReplayPlan, WalIndex, coverings
from deltackpt.reading.wal_rows import SeenRows
from deltackpt.units import count

if TYPE_CHECKING:
    from pandas import DataFrame

#: Names listed in an error.
_SHOWN = 8


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class History:
    """Values of some rows of one field at each step, and at the recovery points between steps.

    Attributes:
      table: name of the table.
      field: ``values``, or ``slot.<name>``.
      steps: int64 (steps,), ascending; steps without the table are left out.
      point_kinds: for each of the steps, ``full`` or ``soft`` if it is a recovery point, and None
        if it is a committed step.
      rows: int64 (rows,), in the requested order.
      ids: int64 (rows,), the ids that were requested; None if rows were.
      values: (steps, rows, *trailing) of the table's dtype; 0 if the table did not have the row
        yet.
      written: bool (steps, rows): whether the step's save, or WAL record, contains the row; a base
        contains all rows.
      present: bool (steps, rows): whether the table had the row, and the row the requested id.
    """

    table: str
    field: str
    steps: np.ndarray
    point_kinds: tuple[Literal["full", "soft"] | None, ...]
    rows: np.ndarray
    values: np.ndarray
    written: np.ndarray
    present: np.ndarray
    ids: np.ndarray | None = None

    def __repr__(self) -> str:
        rows, steps = count(len(self.rows), "row"), count(len(self.steps), "step")
        return f"<History of {self.table}, {self.field}: {rows} at {steps}>"

    def to_pandas(self) -> DataFrame:
        """Returns a ``pandas.DataFrame``: a row per step and table row, a column per element.

        Raises:
          MissingExtra: pandas is not installed.
        """
        steps, rows = len(self.steps), len(self.rows)
        flat = self.values.reshape(steps * rows, math.prod(self.values.shape[2:]))
        what, shown = ("row", self.rows) if self.ids is None else ("id", self.ids)
        index = pandas().MultiIndex.from_product([self.steps, shown], names=["step", what])
        frame = pandas().DataFrame(flat, index=index)
        frame.insert(0, "written", self.written.reshape(-1))
        return frame[self.present.reshape(-1)]


def by_id(found: History, ids: np.ndarray, keys: History) -> History:
    """Returns the history of ids, from that of their rows and of the rows' key column.

    A row is present only at the steps at which it had its id.
    """
    numbers = {step: number for number, step in enumerate(keys.steps.tolist())}
    same = np.zeros(found.present.shape, bool)
    for number, step in enumerate(found.steps.tolist()):
        if step in numbers:
            same[number] = vocab.ids_of(keys.values[numbers[step]]) == ids
    return dataclasses.replace(found, ids=ids, present=found.present & same)


def history(
    read: Callable[[int], StoredSave],
    saves_of: Callable[[int], Saves],
    steps: Sequence[int],
    table: str,
    rows: np.ndarray,
    field: str,
    *,
    all_steps: bool,
    log: WalIndex | None,
) -> History:
    """See ``Checkpoints.history``.

    ``saves_of`` returns a step's chain, and is called only if the parent was not read before.
    ``all_steps`` ignores steps that have been removed.
    """
    asked = _checked_rows(rows)
    removed = (StepNotFound, StepGone) if all_steps else ()
    known: set[str] = set()
    for step in steps:
        with contextlib.suppress(*removed):
            known.update(one.name for one in read(step).head.tables)
    table = named(table, known)
    if known and table not in known:
        names = ", ".join(sorted(known)[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
        raise TemplateMismatch(f"table {table!r}: expected one of {names}; found no such table")
    ordered, within = np.unique(asked, return_inverse=True)
    walk = _Walk(read, saves_of, table, field, ordered)
    states: dict[int, _State] = {}
    for step in steps:
        with contextlib.suppress(*removed):
            if (state := walk.at(read(step))) is not None:
                states[step] = state
    kinds_of: dict[int, Literal["full", "soft"]] = {}
    if log is not None:
        for point, state in _at_points(log, walk, read):
            if point.step not in states:
                states[point.step] = state
                kinds_of[point.step] = "full" if point.full else "soft"
        states = dict(sorted(states.items()))
    if not states:
        raise TemplateMismatch(
            f"table {table!r}, field {field!r}: expected in one of the requested steps, found in "
            "none; see step.tables"
        )
    kinds = {(state.values.shape[1:], state.values.dtype) for state in states.values()}
    if len(kinds) > 1:
        raise TemplateMismatch(
            f"table {table!r}, field {field!r}: expected the same row shape and dtype at every "
            f"step, found {_kinds_text(states)}; request steps with the same ones"
        )
    most = max(state.total_rows for state in states.values())
    if ordered.size and ordered[-1] >= most:
        raise TemplateMismatch(
            f"table {table!r}: expected row indices within [0, {most}), found "
            f"{int(ordered[-1])}; request rows that a step has"
        )
    return History(
        table=table,
        field=field,
        steps=np.array(list(states), np.int64),
        point_kinds=tuple(kinds_of.get(step) for step in states),
        rows=asked,
        values=np.stack([state.values for state in states.values()])[:, within],
        written=np.stack([state.written for state in states.values()])[:, within],
        present=np.stack([ordered < state.total_rows for state in states.values()])[:, within],
    )


def _at_points(
    log: WalIndex, walk: _Walk, read: Callable[[int], StoredSave]
) -> Iterator[tuple[RecoveryPoint, _State]]:
    """The states at the recovery points of a WAL; for a repeated step, the newest."""
    reported: set[int] = set()
    plans, _ = coverings(log, walk.known_steps)
    for plan, points in plans:
        try:
            save = read(plan.step.step)
        except (StepNotFound, StepGone):
            continue  # The step was removed since.
        for point, state in walk.along(save, plan, points):
            if point.step not in reported:
                reported.add(point.step)
                yield point, state


def _kinds_text(states: Mapping[int, _State]) -> str:
    """Lists each dtype and row shape with the first step that has it."""
    first: dict[str, int] = {}
    for step, state in states.items():
        values = state.values
        first.setdefault(f"{values.dtype.name}{list(values.shape[1:])}", step)
    return ", ".join(f"{kind} from step {step}" for kind, step in first.items())


def _checked_rows(rows: np.ndarray) -> np.ndarray:
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise TemplateMismatch(
            f"rows: expected row indices, found an array {rows.dtype.name}{list(rows.shape)}; pass "
            "an integer or a list of integers"
        )
    found = rows.astype(np.int64)
    if found.size and found.min() < 0:
        raise TemplateMismatch(
            f"rows: expected indices of at least 0, found {int(found.min())}; count from the start"
        )
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class _State:
    """Rows of one field after a save; ``values`` and ``written`` as in ``History``."""

    total_rows: int
    values: np.ndarray
    written: np.ndarray


class _Walk:
    """The states of some rows at successive steps; reads each save once."""

    def __init__(
        self,
        read: Callable[[int], StoredSave],
        saves_of: Callable[[int], Saves],
        table: str,
        field: str,
        rows: np.ndarray,
    ):
        """Expects ascending rows without duplicates."""
        self._read_save = read
        self._saves_of = saves_of
        self._table = table
        self._field = field
        self._rows = rows
        self._row_indices = RowIndexCache()
        #: None for a save without the table.
        self._values: dict[SaveId, np.ndarray | None] = {}

    def at(self, save: StoredSave) -> _State | None:
        """The state after a save; None if it does not have the table and field."""
        found = entry_of(save.layout, self._table, self._field)
        if found is None:
            return None
        table, _ = found
        values = self._values_at(save)
        assert values is not None
        held = contains_rows(save, table, self._row_indices, self._field, self._rows)
        return _State(table.rows, values, held)

    @property
    def known_steps(self) -> dict[int, SaveId]:
        return {one.step: one for one, values in self._values.items() if values is not None}

    def along(
        self, save: StoredSave, plan: ReplayPlan, points: Sequence[RecoveryPoint]
    ) -> Iterator[tuple[RecoveryPoint, _State]]:
        """The states at recovery points above a save, oldest first."""
        found = entry_of(save.layout, self._table, self._field)
        values = self._values.get(save.info.save_id)
        if found is None or values is None:
            return
        table, spec = found
        wanted = {point.save_id: point for point in points}
        now = values.copy()
        targets = self._targets(now, save, table, spec)
        written = np.zeros(len(self._rows), bool)
        for record in wal_rows.layers_of(plan, save.layout, table.group):
            seen = SeenRows(save.layout)
            reader.fill((), targets, records=[record], seen=seen, over_parent=True)
            written |= np.isin(self._rows, seen.by_table()[table.name])
            point = wanted.get(record[0].record.save_id)
            # Such a field is written in full, and only by full records.
            if point is None or (spec.always and not point.full):
                continue
            every = spec.always and point.full
            yield point, _State(table.rows, now.copy(), written | every)
            written = np.zeros(len(self._rows), bool)

    def _values_at(self, save: StoredSave) -> np.ndarray | None:
        unread = self._unread(save)
        if unread is not None:
            with contextlib.suppress(RestoreError):  # A compacted base may replace the chain.
                return self._merged(unread)
        chain = self._saves_of(save.info.save_id.step).chain
        if chain[-1].info.save_id != save.info.save_id:
            raise stored_saves.gone(save.step_dir, instead="read")
        return chains.read_whole(chain, self._merged)

    def _unread(self, save: StoredSave) -> list[StoredSave] | None:
        """The saves to merge up to a save, oldest first; None if a parent is missing."""
        found = [save]
        while (parent := found[-1].info.parent) is not None and parent.save_id not in self._values:
            try:
                found.append(self._read_save(parent.save_id.step))
            except RestoreError:
                return None
            if found[-1].info.save_id != parent.save_id:
                return None
        return found[::-1]

    def _merged(self, saves: Sequence[StoredSave]) -> np.ndarray | None:
        """The rows after merging saves; the first is a base, or its parent was read before."""
        parent = saves[0].info.parent
        values = None if parent is None else self._values[parent.save_id]
        for save in saves:
            save_id = save.info.save_id
            if save_id not in self._values:
                self._values[save_id] = self._read(save, values)
            values = self._values[save_id]
        return values

    def _read(self, save: StoredSave, parent: np.ndarray | None) -> np.ndarray | None:
        """The rows after a save, from those of its parent."""
        found = entry_of(save.layout, self._table, self._field)
        if found is None:
            return None
        table, spec = found
        values = np.zeros((len(self._rows), *spec.trailing), codecs.dtype_of(spec.dtype))
        if parent is not None:
            count = int(np.searchsorted(self._rows, table.rows))
            values[:count] = parent[:count]
        targets = self._targets(values, save, table, spec)
        reader.fill([save], targets, indices=self._row_indices, over_parent=parent is not None)
        return values

    def _targets(
        self, values: np.ndarray, save: StoredSave, table: TableEntry, spec: FieldSpec
    ) -> Targets:
        """The rows that a save's table has, in ``values``, as targets."""
        rows = self._rows[: int(np.searchsorted(self._rows, table.rows))]
        spans = list(row_blocks.joined((int(row), int(row) + 1) for row in rows))
        return targets_in(values, save.layout, table, spec, spans)
