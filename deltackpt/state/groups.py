# SPDX-License-Identifier: Apache-2.0
"""Groups tables: tables with equal fields, codecs and row sharding form one virtual table.

Names and offsets come from the tables' names, so every process finds the same groups. A table with
a key column has a group to itself, so that it can grow without moving other tables.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from deltackpt import codecs
from deltackpt.errors import OptionError, TableSelectionError
from deltackpt.format import row_blocks
from deltackpt.format.manifest import TableEntry
from deltackpt.format.naming import Leaf
from deltackpt.format.records import is_name
from deltackpt.format.row_blocks import FieldSpec, GroupEntry
from deltackpt.policies import BitWidthPolicy, CodecChoice
from deltackpt.state import paths
from deltackpt.state.paths import Flat

#: How rows are stored: for all tables, or by table path pattern (the first that matches; ``raw``
#: without a match). A codec's name or a policy applies to the rows of deltas.
_OneOption = str | BitWidthPolicy | CodecChoice
CodecOption = _OneOption | Mapping[str, _OneOption]
#: Fields, codecs and shardings of the tables of a group; the name of a table that has one alone.
_GroupKey = tuple[tuple[FieldSpec, ...], tuple[CodecChoice, ...], tuple[object, ...], str | None]


@dataclasses.dataclass
class TableFields:
    """A table's fields, before its group is known: field to its leaf's position and ``always``."""

    name: str
    fields: dict[str, tuple[int, bool]]
    key: str | None = None


class Grouped(NamedTuple):
    """Groups, tables, and the codec choice of each field of each group."""

    groups: tuple[GroupEntry, ...]
    tables: tuple[TableEntry, ...]
    choices: dict[str, dict[str, CodecChoice]]


def group_tables(
    found: list[TableFields], flat: Flat, codec: CodecOption, slot_codec: CodecOption
) -> Grouped:
    """Returns groups and table entries of tables sorted by name."""
    names = [table.name for table in found]
    values_of = _choices("codec", codec, names)
    slots_of = _choices("slot_codec", slot_codec, names)
    rows_of: dict[_GroupKey, int] = {}
    placed = []
    for table in found:
        for field, (i, _) in table.fields.items():
            _check_dtype(f"table {table.name}, {field}", np.dtype(flat.leaves[i].dtype))
        specs = tuple(
            _field_spec(field, flat.leaves[i], always, key=field == table.key)
            for field, (i, always) in sorted(table.fields.items(), key=_values_first)
        )
        _check_array_names(table.name, specs)
        choices = tuple(
            CodecChoice()
            if spec.key
            else (values_of if spec.name == row_blocks.VALUES else slots_of)[table.name]
            for spec in specs
        )
        for spec, choice in zip(specs, choices, strict=True):
            _check_fit(table.name, spec, choice)
        shardings = tuple(_row_sharding(flat.leaves[table.fields[spec.name][0]]) for spec in specs)
        key = (specs, choices, shardings, None if table.key is None else table.name)
        rows = flat.leaves[table.fields[row_blocks.VALUES][0]].shape[0]
        placed.append((table, key, rows_of.get(key, 0), rows))
        rows_of[key] = rows_of.get(key, 0) + rows
    name_of = {key: f"g{number}" for number, key in enumerate(rows_of)}
    groups = tuple(
        GroupEntry(name=name_of[key], rows=rows, fields=key[0]) for key, rows in rows_of.items()
    )
    entries = tuple(
        TableEntry(
            name=table.name,
            group=name_of[key],
            offset=offset,
            rows=rows,
            leaves={spec.name: flat.paths[table.fields[spec.name][0]] for spec in key[0]},
        )
        for table, key, offset, rows in placed
    )
    chosen = {
        name: {spec.name: choice for spec, choice in zip(key[0], key[1], strict=True)}
        for key, name in name_of.items()
    }
    return Grouped(groups, entries, chosen)


def _values_first(item: tuple[str, object]) -> tuple[bool, str]:
    return item[0] != row_blocks.VALUES, item[0]


def _choices(option: str, given: CodecOption, names: list[str]) -> dict[str, CodecChoice]:
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, CodecChoice.from_option(given))
    for pattern in given:
        paths.matching(option, pattern, names)
    return {name: CodecChoice.from_option(_first_match(given, name)) for name in names}


def _first_match(given: Mapping[str, _OneOption], name: str) -> _OneOption:
    matching = (choice for pattern, choice in given.items() if paths.matches(pattern, name))
    return next(matching, "raw")


def _check_dtype(what: str, dtype: np.dtype) -> None:
    if not codecs.can_store(dtype):
        raise TableSelectionError(
            f"{what}: expected a dtype that Zarr supports, in this machine's byte order, found "
            f"{dtype!r}; cast it, e.g. with x.astype(x.dtype.newbyteorder('='))"
        )


def _check_array_names(table: str, specs: tuple[FieldSpec, ...]) -> None:
    """Checks that slots have names of folders, and not of arrays that codecs of others may add."""
    for spec in specs:
        longest = codecs.array_name(spec.name, max(codecs.SUFFIXES, key=len))
        if not is_name(urllib.parse.quote(longest, safe="")):
            raise TableSelectionError(
                f"table {table}: expected slot names that fit in a folder name, found "
                f"{spec.name}, which is too long; name the slots with "
                "Tables(slots={table pattern: {slot name: path}})"
            )
    taken = {
        codecs.array_name(spec.name, suffix): spec.name
        for spec in specs
        for suffix in codecs.SUFFIXES
    }
    for spec in specs:
        if spec.name in taken:
            raise TableSelectionError(
                f"table {table}: expected slot names that differ from those of stored arrays, "
                f"found {spec.name}, which is also an array of {taken[spec.name]}; rename the "
                "slot: its name cannot be that of another slot and one of "
                f"{', '.join('.' + suffix for suffix in codecs.SUFFIXES)}"
            )


def _check_fit(table: str, spec: FieldSpec, choice: CodecChoice) -> None:
    for name in choice.names():
        try:
            codecs.get(name).check(spec.trailing, codecs.dtype_of(spec.dtype))
        except OptionError as error:
            raise OptionError(f"table {table}, {spec.name}: {error}") from error


def _field_spec(field: str, leaf: Leaf, always: bool, *, key: bool) -> FieldSpec:
    return FieldSpec(
        name=field,
        trailing=tuple(int(size) for size in leaf.shape[1:]),
        dtype=np.dtype(leaf.dtype).name,
        always=always,
        key=key,
    )


def _row_sharding(leaf: object) -> str:
    """Returns a leaf's sharding as a string; empty if every device holds all of it."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.is_fully_replicated:
        return ""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = list(sharding.spec)
        while spec and spec[-1] is None:
            spec.pop()
        return f"{dict(sharding.mesh.shape)} {spec}"
    return str(sharding)
