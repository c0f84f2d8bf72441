# SPDX-License-Identifier: Apache-2.0
"""How tables group: those of equal fields and row sharding form one virtual table.

Names and offsets follow from the tables' names, so every process finds the same groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from deltackpt import blocks, paths
from deltackpt.errors import TableSelectionError
from deltackpt.manifest import FieldSpec, GroupEntry, TableEntry
from deltackpt.paths import Flat


@dataclasses.dataclass
class TableFields:
    """A table's fields before its group is known.

    Attributes:
      name: the table.
      fields: field name to the position of its leaf, and whether it is always written whole.
    """

    name: str
    fields: dict[str, tuple[int, bool]]


def group_tables(
    found: list[TableFields], flat: Flat, codec: str | Mapping[str, str]
) -> tuple[tuple[GroupEntry, ...], tuple[TableEntry, ...]]:
    """Groups and table entries of tables that come sorted by name.

    Args:
      found: the tables.
      flat: the leaves of the state.
      codec: codec of the values, for all or by table path pattern.

    Raises:
      TableSelectionError: a codec's pattern matches no table.
    """
    codec_of = _codecs(codec, [table.name for table in found])
    rows_of: dict[Any, int] = {}
    placed = []
    for table in found:
        specs = tuple(
            _field_spec(field, flat.leaves[i], always, codec_of[table.name])
            for field, (i, always) in sorted(table.fields.items(), key=_values_first)
        )
        shardings = tuple(_row_sharding(flat.leaves[table.fields[spec.name][0]]) for spec in specs)
        key = (specs, shardings)
        rows = flat.leaves[table.fields[blocks.VALUES][0]].shape[0]
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
    return groups, entries


def _values_first(item: tuple[str, Any]) -> tuple[bool, str]:
    return item[0] != blocks.VALUES, item[0]


def _codecs(codec: str | Mapping[str, str], names: list[str]) -> dict[str, str]:
    if isinstance(codec, str):
        return dict.fromkeys(names, codec)
    for pattern in codec:
        if not any(paths.matches(pattern, name) for name in names):
            raise TableSelectionError(
                f"codec: pattern {pattern!r} matches no table; the tables are\n"
                f"{paths.listed(names)}"
            )
    return {
        name: next((c for pattern, c in codec.items() if paths.matches(pattern, name)), "raw")
        for name in names
    }


def _field_spec(field: str, leaf: Any, always: bool, codec: str) -> FieldSpec:
    return FieldSpec(
        name=field,
        trailing=tuple(int(size) for size in leaf.shape[1:]),
        dtype=np.dtype(leaf.dtype).name,
        codec=codec if field == blocks.VALUES else "raw",
        always=always,
    )


def _row_sharding(leaf: Any) -> str:
    """A leaf's sharding as text; empty where every device holds all of it."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.is_fully_replicated:
        return ""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = list(sharding.spec)
        while spec and spec[-1] is None:
            spec.pop()
        return f"{dict(sharding.mesh.shape)} {spec}"
    return str(sharding)
