# SPDX-License-Identifier: Apache-2.0
"""One step: its tables, slots and dense leaves as lazy arrays."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from deltackpt import vocab
from deltackpt.cached import cached_property
from deltackpt.errors import RestoreError, TemplateMismatch
from deltackpt.format import manifest, naming, row_blocks
from deltackpt.format.manifest import TableEntry
from deltackpt.format.row_blocks import FieldSpec
from deltackpt.inspect.dense_items import (
    METADATA,
    DecodedItem,
    DenseItem,
    DenseLeaf,
    SavedLeaf,
    list_dense,
    list_saved,
    saved_leaves,
)
from deltackpt.inspect.descriptions import shape_text
from deltackpt.inspect.lazy import LazyArray, Saves
from deltackpt.inspect.listing import Listing
from deltackpt.reading import stored_saves
from deltackpt.reading.orbax_values import item_values
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.storage.store import DirIdentity
from deltackpt.units import count, size

#: Rows of a table that a notebook shows.
_SHOWN_ROWS = 5


class Table(LazyArray):
    """A table at a step and its slots, read lazily.

    Attributes:
      name, shape, dtype: as in ``LazyArray``.
      slots: lazy arrays of its optimizer slots, (rows, *trailing), by name.
      key: the slot with the id of each row, and ``key_field`` its field; None and empty if rows
        have no ids.
      leaves: '/'-joined path of each field's leaf in the state, by field name.
    """

    def __init__(self, saves: Saves, table: TableEntry, fields: tuple[FieldSpec, ...]):
        """Internal: index ``Step.tables``."""
        specs = {spec.name: spec for spec in fields}
        super().__init__(saves, table, specs.pop(row_blocks.VALUES))
        self.slots: Mapping[str, LazyArray] = MappingProxyType(
            {
                name.removeprefix(row_blocks.slot_field("")): LazyArray(saves, table, spec)
                for name, spec in specs.items()
            }
        )
        self.key_field = next((name for name, spec in specs.items() if spec.key), "")
        self.key = self.field(self.key_field) if self.key_field else None
        self.leaves = {field: manifest.path_name(path) for field, path in table.leaves.items()}

    @property
    def fields(self) -> dict[str, LazyArray]:
        """The lazy arrays by field: ``values``, the table itself, and each ``slot.<name>``."""
        slots = {row_blocks.slot_field(name): slot for name, slot in self.slots.items()}
        return {row_blocks.VALUES: self, **slots}

    def rows_of(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the rows of some ids; reads the whole key column.

        Args:
          ids: (n,) integers.

        Returns:
          int64 (n,).

        Raises:
          TemplateMismatch: the table has no key column, or no row of an id.
          DamagedKeys: an id has two rows.
          Damaged, StepGone: as for ``__getitem__``.
        """
        if self.key is None:
            raise TemplateMismatch(
                f"table {self.name}: expected a key column, found none; name rows, or save the "
                "table with Tables(key=...)"
            )
        rows = vocab.RowKeys.index(np.asarray(self.key)).find(ids)
        if (missing := np.flatnonzero(rows < 0)).size:
            raise TemplateMismatch(
                f"table {self.name}: expected ids that have a row, found "
                f"{np.asarray(ids)[missing[0]]}, which has none; choose another step or id"
            )
        return rows

    def field(self, name: str) -> LazyArray:
        """Returns the lazy array of a field: ``values`` or ``slot.<name>``.

        Raises:
          TemplateMismatch: the field does not exist.
        """
        if name not in self.fields:
            raise TemplateMismatch(
                f"table {self.name}: expected one of the fields {[*self.fields]}, found {name!r}; "
                "choose one of them"
            )
        return self.fields[name]

    def _repr_html_(self) -> str:
        return _table_page(self)


class Step:
    """A step, or a recovery point, of a checkpoint directory, read lazily.

    ``step[name]`` returns a table, a slot (``<table>.slot.<name>``), or a dense leaf. The name is
    its key in ``step.tables`` or ``step.dense``, or the end of exactly one such key.

    If the step below a recovery point is damaged, rows are read above an older step, with a
    warning; ``path``, ``chain`` and ``reads`` are then those of the older step.
    """

    def __init__(self, saves: Saves, identity: DirIdentity | None):
        """Internal: call ``Checkpoints.at``; the identity precedes the reading of the manifests."""
        self._saves = saves
        self._identity = identity
        self._store_path = saves.target.step_dir

    @property
    def path(self) -> Path:
        """The step's directory; for a recovery point, the directory of the step below it.

        Raises:
          TypeError: the step is in a bucket.
        """
        return Path(self._saves.current.target.step_dir)

    @property
    def step(self) -> int:
        """The step; for a recovery point, its training step."""
        return self._saves.save_id.step

    @property
    def point(self) -> RecoveryPoint | None:
        """The recovery point; None for a step."""
        return None if self._saves.plan is None else self._saves.plan.point

    @property
    def save_id(self) -> str:
        """Id of the save, or of the recovery point's WAL record: ``run/step/attempt``."""
        found = self._saves.save_id
        return f"{found.run}/{found.step}/{found.attempt}"

    def check_exists(self) -> None:
        """Raises an error if the step is no longer the save that was opened.

        Raises:
          StepGone: the step was removed, or another save replaced it.
        """
        stored_saves.check_exists(self._saves.current.target)

    @property
    def chain(self) -> tuple[int, ...]:
        """Steps of the saves in its chain, base first."""
        return tuple(save.info.save_id.step for save in self._saves.current.chain)

    @property
    def reads(self) -> tuple[str, ...]:
        """Relative paths of the saves in its chain, such as ``120`` or ``compacted/120``.

        The last entry of a recovery point is its own name.
        """
        saves = (
            f"{naming.COMPACTED}/{save.step_dir.name}" if save.compacted else save.step_dir.name
            for save in self._saves.current.chain
        )
        return (*saves, *([] if self.point is None else [str(self.point)]))

    @cached_property
    def tables(self) -> Mapping[str, Table]:
        """Tables by name."""
        groups = self._saves.layout.group_by_name
        return MappingProxyType(
            {
                table.name: Table(self._saves, table, groups[table.group].fields)
                for table in self._saves.layout.tables
            }
        )

    @cached_property
    def dense(self) -> Mapping[str, DenseLeaf]:
        """Dense leaves saved by deltackpt's manager, by '/'-joined path."""
        if not self._own.layout.dense:
            return MappingProxyType({})
        has_item = self.point is not None or (self._store_path / naming.DENSE_ITEM).is_dir()
        if not has_item and self._exists():
            stored_saves.check_dense(self._own)
        return self._item(naming.DENSE_ITEM)

    @cached_property
    def dense_saved(self) -> tuple[SavedLeaf, ...]:
        """Blocks of each dense leaf in this save; empty if the leaves are in Orbax's item.

        Raises:
          Damaged: the save's records are missing or altered.
          StepGone: the step was removed.
        """
        if self.point is not None:
            return ()
        with self._detect_removal():
            return saved_leaves(self._own)

    @cached_property
    def items(self) -> Mapping[str, DenseItem]:
        """Items of Orbax's PyTree handler, by name; includes dense leaves stored as blocks.

        For a recovery point, only the dense leaves.
        """
        if self.point is not None:
            found = [naming.DENSE_ITEM] if self._own.layout.dense else []
            return MappingProxyType({name: self._item(name) for name in found})
        with self._detect_removal():
            found = [
                name
                for name in self._store_path.folders()
                if (self._store_path / name / METADATA).is_file()
            ]
            if self._own.head.dense_blocks is not None:
                found.append(naming.DENSE_ITEM)
            stored_saves.check_exists(self._own)
            return MappingProxyType({name: self._item(name) for name in sorted(found)})

    def _item(self, name: str) -> DenseItem:
        at, head = self._store_path / name, self._own.head
        entries = self._own.layout.dense if name == naming.DENSE_ITEM else ()
        if name == naming.DENSE_ITEM and (self.point is not None or head.dense_blocks is not None):
            item, shown = DecodedItem(self._saves), f"{self._saves.name}/{name}"
            return DenseItem(at, lambda: item, entries, exists=self._exists, shown=shown)
        files = head.files if "step" in head.digests else None
        return DenseItem(
            at,
            lambda: self._saves.verified(item_values(at, files)),
            entries,
            exists=self._exists,
        )

    @cached_property
    def _own(self) -> StoredSave:
        """The save itself, even if the chain uses its compacted base."""
        target = self._saves.target
        if not target.compacted:
            return target
        with self._detect_removal():
            return stored_saves.read_save(self._store_path, target.item)

    def _detect_removal(self) -> contextlib.AbstractContextManager[None]:
        """Converts errors in its block to ``StepGone`` if the step was removed or replaced."""
        target = self._saves.target
        return stored_saves.detect_removal(
            self._store_path,
            exists=lambda: stored_saves.exists(self._store_path, target.info.save_id, target.item),
            instead="open",
        )

    def _exists(self) -> bool:
        """Whether the step's directory is still the one that was opened."""
        identity = self._store_path.dir_identity()
        if identity is None or identity == self._identity:
            return identity is not None
        # Replaced, or a file was added to it.
        own = self._own.info.save_id
        try:
            same = stored_saves.read_save(self._store_path, self._own.item).info.save_id == own
        except RestoreError:
            return False
        if same:
            self._identity = identity
        return same

    def __getitem__(self, name: str) -> LazyArray | DenseLeaf:
        found = self._found(name)
        if found is not None:
            return found
        similar = difflib.get_close_matches(name, [*self.tables, *self.dense], 3, 0.3)
        raise KeyError(
            f"step {self.step}: no table or dense leaf {name!r}; the closest: "
            f"{', '.join(similar) or 'none'}; see tables and dense"
        )

    def _found(self, name: str) -> LazyArray | DenseLeaf | None:
        """Returns the table, slot or dense leaf of a name; None without one."""
        if name in self.tables:
            return self.tables[name]
        if name not in {manifest.path_name(leaf.path) for leaf in self._own.layout.dense}:
            before, slot, field = name.rpartition(f".{row_blocks.slot_field('')}")
            table = naming.meant(before if slot else name, self.tables, TemplateMismatch)
            if table in self.tables:
                found = self.tables[table]
                return found.field(row_blocks.slot_field(field)) if slot else found
        return self.dense.get(naming.meant(name, self.dense, TemplateMismatch))

    def __iter__(self) -> Iterator[str]:
        yield from self.tables
        yield from self.dense

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._found(name) is not None

    def __repr__(self) -> str:
        logged = "" if self.point is None else f", and the WAL records up to {self.point}"
        return (
            f"<Step {self.step}: {count(len(self.tables), 'table')}, read from {self.reads[0]} "
            f"and {count(len(self.chain) - 1, 'delta')}{logged}>"
        )

    def _repr_html_(self) -> str:
        listings = [list_fields(self), list_dense(self.dense.values())]
        if self.dense_saved:
            listings.append(list_saved(self.dense_saved))
        return "".join(listing.html() for listing in listings if listing.lines)


def list_fields(step: Step) -> Listing:
    """Returns a line for each table and slot of a step."""
    lines = [
        (name, field, shape_text(held.shape), held.dtype.name, size(held.nbytes))
        for name, table in step.tables.items()
        for field, held in table.fields.items()
    ]
    title = f"step {step.step}, reads {' → '.join(step.reads)}"
    return Listing(("table", "field", "shape", "dtype", "bytes"), lines, title)


def _table_page(found: Table) -> str:
    rows = min(_SHOWN_ROWS, len(found))
    first = found[:rows].reshape(rows, -1)
    shown = min(8, first.shape[1])
    more = ("…",) if first.shape[1] > shown else ()
    columns = ("row", *map(str, range(shown)), *more)
    lines = [
        (row, *(f"{value:.6g}" for value in first[row, :shown].tolist()), *more)
        for row in range(rows)
    ]
    title = (
        f"{found.name}: {shape_text(found.shape)} {found.dtype.name}, {size(found.nbytes)}, "
        f"slots: {', '.join(found.slots) or 'none'}"
    )
    return Listing(columns, lines, title).html()
