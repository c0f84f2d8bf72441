# SPDX-License-Identifier: Apache-2.0
"""One step: its tables, slots and dense leaves as lazy arrays."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deltackpt.errors import RestoreError, TemplateMismatch
from deltackpt.format import blocks, globs, manifest, names
from deltackpt.format.manifest import TableEntry
from deltackpt.format.segments import FieldSpec
from deltackpt.inspect import html
from deltackpt.inspect.dense import DENSE_COLUMNS, METADATA, DenseItem, DenseLeaf, dense_line
from deltackpt.inspect.dense_of_blocks import (
    SAVED_COLUMNS,
    DenseOfBlocks,
    SavedLeaf,
    saved_leaves,
    saved_line,
)
from deltackpt.inspect.lazy import LazyArray, Saves
from deltackpt.reading import removal, saves
from deltackpt.reading.saves import StoredSave
from deltackpt.storage.store import Stamp
from deltackpt.units import count, size

#: Rows of a table that a notebook shows.
_SHOWN_ROWS = 5


class Table(LazyArray):
    """A table at a step, lazy, and its slots.

    Attributes:
      name, shape, dtype: as in ``LazyArray``.
      slots: names of its optimizer slots to their lazy arrays, (rows, *trailing).
      leaves: names of its fields to the '/'-joined paths of their leaves in the state.
    """

    def __init__(self, saves: Saves, table: TableEntry, fields: tuple[FieldSpec, ...]):
        """Made by ``Step``."""
        specs = {spec.name: spec for spec in fields}
        super().__init__(saves, table, specs.pop(blocks.VALUES))
        self.slots: Mapping[str, LazyArray] = MappingProxyType(
            {
                name.removeprefix(blocks.slot_field("")): LazyArray(saves, table, spec)
                for name, spec in specs.items()
            }
        )
        self.leaves = {field: manifest.path_name(path) for field, path in table.leaves.items()}

    def field(self, name: str) -> LazyArray:
        """The lazy array of a field: ``values`` or ``slot.<name>``.

        Raises:
          TemplateMismatch: there is no such field.
        """
        if name == blocks.VALUES:
            return self
        slot = name.removeprefix(blocks.slot_field(""))
        if slot not in self.slots:
            fields = [blocks.VALUES, *(blocks.slot_field(slot) for slot in self.slots)]
            raise TemplateMismatch(
                f"table {self.name}: expected one of the fields {fields}, found {name!r}; ask for "
                "one of them"
            )
        return self.slots[slot]

    def _repr_html_(self) -> str:
        return _table_page(self)


class Step:
    """A step of a directory, read lazily.

    ``step[name]`` is a table, a slot (``<table>.slot.<name>``), or a dense leaf, by the name that
    ``step.tables`` or ``step.dense`` has for it, or by the end of exactly one such name.

    """

    def __init__(self, saves: Saves, stamp: Stamp | None):
        """Made by ``Checkpoints.at``; the stamp is that of before the manifests were read."""
        self._saves = saves
        self._stamp = stamp
        self._spot = saves.target.step_dir

    @property
    def path(self) -> Path:
        """The step's directory.

        Raises:
          TypeError: it is in a bucket.
        """
        return Path(self._spot)

    @property
    def step(self) -> int:
        """Number of the step."""
        return self._saves.target.info.save_id.step

    @property
    def save_id(self) -> str:
        """Identity of the save: run, step and attempt."""
        found = self._saves.target.info.save_id
        return f"{found.run}/{found.step}/{found.attempt}"

    def check_stands(self) -> None:
        """Checks that the step is still the save that was opened.

        Raises:
          StepGone: it was removed, and another save may have its number.
        """
        saves.check_stands(self._saves.target)

    @property
    def chain(self) -> tuple[int, ...]:
        """Steps of the saves that are read for it, base first."""
        return tuple(save.info.save_id.step for save in self._saves.chain)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the saves of the chain below the root: ``120``, or ``compacted/120``."""
        return tuple(
            f"{names.COMPACTED}/{save.step_dir.name}" if save.compacted else save.step_dir.name
            for save in self._saves.chain
        )

    @functools.cached_property
    def tables(self) -> Mapping[str, Table]:
        """The tables by name."""
        groups = self._saves.layout.group_by_name
        return MappingProxyType(
            {
                table.name: Table(self._saves, table, groups[table.group].fields)
                for table in self._saves.layout.tables
            }
        )

    @functools.cached_property
    def dense(self) -> Mapping[str, DenseLeaf]:
        """The dense leaves by their '/'-joined paths; those that deltackpt's manager saved."""
        if not self._own.layout.dense:
            return MappingProxyType({})
        if not (self._spot / names.DENSE_ITEM).is_dir() and self._stands():
            saves.check_dense(self._own)
        return self._item(names.DENSE_ITEM)

    @functools.cached_property
    def dense_saved(self) -> tuple[SavedLeaf, ...]:
        """What the save itself holds of each dense leaf as blocks; nothing where it has an item.

        Raises:
          Damaged: its records are missing or altered.
          StepGone: it was removed.
        """
        with self._standing():
            return saved_leaves(self._own)

    @functools.cached_property
    def items(self) -> Mapping[str, DenseItem]:
        """Every item that Orbax's PyTree handler wrote, or would have written, by name."""
        with self._standing():
            found = [
                name for name in self._spot.folders() if (self._spot / name / METADATA).is_file()
            ]
            if self._own.head.dense_blocks is not None:
                found.append(names.DENSE_ITEM)
            saves.check_stands(self._own)
            return MappingProxyType({name: self._item(name) for name in sorted(found)})

    def _item(self, name: str) -> DenseItem:
        entries = self._own.layout.dense if name == names.DENSE_ITEM else ()
        if name == names.DENSE_ITEM and self._own.head.dense_blocks is not None:
            return DenseOfBlocks(self._spot / name, self._saves, entries, stands=self._stands)
        return DenseItem(
            self._spot / name,
            entries,
            digests="step" in self._own.head.digests,
            stands=self._stands,
        )

    @functools.cached_property
    def _own(self) -> StoredSave:
        """The save itself, where a compacted base stands for it in the chain."""
        target = self._saves.target
        if not target.compacted:
            return target
        with self._standing():
            return saves.read_save(self._spot, target.item)

    def _standing(self) -> contextlib.AbstractContextManager[None]:
        """Within, what fails since the step is no more the one that was opened is ``StepGone``."""
        target = self._saves.target
        return removal.standing(
            self._spot,
            stands=lambda: saves.stands(self._spot, target.info.save_id, target.item),
            instead="open",
        )

    def _stands(self) -> bool:
        """Whether the step's directory is still the one that was opened."""
        stamp = self._spot.stamp()
        if stamp is None or stamp == self._stamp:
            return stamp is not None
        # Another one, or somebody put a file into it.
        own = self._own.info.save_id
        try:
            same = saves.read_save(self._spot, self._own.item).info.save_id == own
        except RestoreError:
            return False
        if same:
            self._stamp = stamp
        return same

    def __getitem__(self, name: str) -> Any:
        found = self._found(name)
        if found is not None:
            return found
        raise KeyError(
            f"step {self.step}: expected a table of {sorted(self.tables)} or a dense leaf of "
            f"{sorted(self.dense)}, found {name!r}"
        )

    def _found(self, name: str) -> Any:
        """The table, slot or dense leaf of a name; None where there is none."""
        if name in self.tables:
            return self.tables[name]
        if name not in {manifest.path_name(leaf.path) for leaf in self._own.layout.dense}:
            before, slot, field = name.rpartition(f".{blocks.slot_field('')}")
            table = globs.meant(before if slot else name, self.tables, TemplateMismatch)
            if table in self.tables:
                found = self.tables[table]
                return found.field(blocks.slot_field(field)) if slot else found
        return self.dense.get(globs.meant(name, self.dense, TemplateMismatch))

    def __iter__(self) -> Iterator[str]:
        yield from self.tables
        yield from self.dense

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._found(name) is not None

    def __repr__(self) -> str:
        return (
            f"<Step {self.step}: {count(len(self.tables), 'table')}, read through {self.reads[0]} "
            f"and {count(len(self.chain) - 1, 'delta')}>"
        )

    def _repr_html_(self) -> str:
        return _page(self)


def _page(step: Step) -> str:
    """A step: its tables and dense leaves."""
    chain = " → ".join(step.reads)
    parts = [
        html.table(FIELD_COLUMNS, field_lines(step), f"step {step.step}, read through {chain}")
    ]
    if step.dense:
        lines = [dense_line(leaf) for leaf in step.dense.values()]
        parts.append(html.table(DENSE_COLUMNS, lines))
    if step.dense_saved:
        lines = [saved_line(leaf) for leaf in step.dense_saved]
        parts.append(html.table(SAVED_COLUMNS, lines, "dense leaves in this save"))
    return "".join(parts)


FIELD_COLUMNS = ("table", "field", "shape", "dtype", "bytes")


def field_lines(step: Step) -> list[tuple[Any, ...]]:
    """The tables and slots of a step as lines under ``FIELD_COLUMNS``."""
    found: list[tuple[Any, ...]] = []
    for name, values in step.tables.items():
        fields: dict[str, LazyArray] = {"values": values}
        fields |= {f"slot.{slot}": held for slot, held in values.slots.items()}
        found += [
            (name, field, html.shape_text(held.shape), held.dtype.name, size(held.nbytes))
            for field, held in fields.items()
        ]
    return found


def _table_page(found: Table) -> str:
    """A table: what it is, and its first rows."""
    rows = min(_SHOWN_ROWS, len(found))
    first = found[:rows].reshape(rows, -1)
    shown = min(8, first.shape[1])
    more = ("…",) if first.shape[1] > shown else ()
    columns = ("row", *map(str, range(shown)), *more)
    lines = [
        (row, *(f"{value:.6g}" for value in first[row, :shown].tolist()), *more)
        for row in range(rows)
    ]
    slots = ", ".join(found.slots) or "none"
    title = (
        f"{found.name}: {html.shape_text(found.shape)} {found.dtype.name}, {size(found.nbytes)}, "
        f"slots: {slots}"
    )
    return html.table(columns, lines, title)
