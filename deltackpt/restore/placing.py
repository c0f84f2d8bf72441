# SPDX-License-Identifier: Apache-2.0
"""Determines the rows that a template needs, and places merged buffers on its devices."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deltackpt import codecs, processes
from deltackpt.errors import TemplateMismatch
from deltackpt.format.blocks import VALUES, Box
from deltackpt.format.manifest import KeyPath, Layout, path_name
from deltackpt.layers.targets import Wanted
from deltackpt.reading.chains import read_chain
from deltackpt.reading.reader import RestoredTables, check_keys, restore_tables
from deltackpt.reading.saves import StoredSave
from deltackpt.restore import mismatch
from deltackpt.state import contexts, ownership, paths, placement
from deltackpt.state.stacks import MemberRows, RestoredMember, array_of

_logger = logging.getLogger(__name__)

#: Bytes per comparison.
_COMPARED_BYTES = 1 << 20
#: Table name to its rows in a step and in a template.
GrownTables = Mapping[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AbstractEmbeddings:
    """The requested parts of an item: table name to field name to abstract leaf.

    A leaf is a ``jax.ShapeDtypeStruct`` (its sharding is used) or an array. If ``tables`` is None,
    everything is restored on the host.
    """

    tables: Mapping[str, Mapping[str, Any]] | None = None


@contexts.neutral()
def load_item(item_dir: Path, abstract: AbstractEmbeddings | None) -> RestoredTables:
    """Restores one item of a step, for the adapters of Orbax.

    Args:
      item_dir: directory of the item in a committed step.
      abstract: what to restore, and where to put it.

    Raises:
      RestoreError: the step is not readable, or does not match ``abstract``.
    """
    saves = read_chain(item_dir.parent, item_dir.name)
    if abstract is None or abstract.tables is None:
        return restore_tables(saves)
    stored = abstract_of(saves[-1]).tables or {}
    tables = placement.resolved(abstract.tables)
    for name, fields in tables.items():
        for field, leaf in fields.items():
            _check_leaf(name, field, leaf, stored.get(name, {}).get(field))
            _check_width(f"table {name}, {field}", leaf)
    merged = restore_tables(saves, wanted=wanted_of(tables))
    check_keys(merged)
    return dataclasses.replace(merged, placed=place(merged, tables))


def abstract_of(save: StoredSave) -> AbstractEmbeddings:
    """Returns the shapes and dtypes of a step's tables and slots."""
    groups = save.layout.group_by_name
    return AbstractEmbeddings(
        tables={
            table.name: {
                spec.name: jax.ShapeDtypeStruct(
                    (table.rows, *spec.trailing), codecs.dtype_of(spec.dtype)
                )
                for spec in groups[table.group].fields
            }
            for table in save.layout.tables
        }
    )


def _check_leaf(name: str, field: str, wanted: Any, stored: Any) -> None:
    found = None if stored is None else (tuple(stored.shape), stored.dtype)
    if found != (tuple(wanted.shape), wanted.dtype):
        raise TemplateMismatch(
            f"table {name}, {field}: expected {wanted.dtype}{wanted.shape} as in the template, "
            f"found {found or 'no such array'} in the step; use the shapes that metadata() returns"
        )


def _check_width(what: str, leaf: Any) -> None:
    if problem := paths.narrowed(leaf):
        raise TemplateMismatch(f"{what}: {problem}")


def wanted_of(templates: Mapping[str, Mapping[str, Any]]) -> Wanted:
    """Returns what this process needs of some tables: its shards' boxes, or everything.

    Args:
      templates: table name to field name to the template's leaf.
    """
    return {
        name: {
            field: sorted(set(ownership.device_boxes(leaf).values()))
            for field, leaf in fields.items()
        }
        for name, fields in templates.items()
    }


def place(
    merged: RestoredTables, templates: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Places merged buffers as the template's leaves: in their shardings, or on the host.

    Args:
      merged: the result of ``restore_tables`` for ``wanted_of(templates)``.
      templates: table name to field name to the template's leaf; a numpy leaf returns the buffer
        itself, a table of a stacked array a ``RestoredMember``, which ``tables.join`` needs.
    """
    rows = {table.name: table.rows for table in merged.layout.tables}
    placed: dict[str, dict[str, Any]] = {}
    for name, fields in merged.buffers.items():
        for field, held in fields.items():
            template = templates[name][field]
            if template.shape[0] > rows[name]:
                _keep_further_rows(held, template, rows[name])
            placed.setdefault(name, {})[field] = _placed(held, template)
    return placed


def grown(merged: RestoredTables, templates: Mapping[str, Mapping[str, Any]]) -> GrownTables:
    """Returns the tables of which the template has more rows than the step."""
    rows = {table.name: table.rows for table in merged.layout.tables}
    counts = {name: fields[VALUES].shape[0] for name, fields in templates.items()}
    return {name: (rows[name], count) for name, count in counts.items() if count > rows[name]}


def report_grown(step: int, tables: GrownTables) -> None:
    """WalReader one warning about tables with rows that a step does not have, on process 0."""
    if not tables or processes.index():
        return
    listed = ", ".join(
        f"{name} ({stored:,} rows in the step, {wanted:,} in the template)"
        for name, (stored, wanted) in sorted(tables.items())
    )
    _logger.warning(
        "step %d: the template has more rows than the step: %s; the additional rows of each table "
        "and of its slots keep the values of the template",
        step,
        listed,
        extra={"process_index": 0},
    )


def _keep_further_rows(held: Mapping[Box, np.ndarray], template: Any, stored: int) -> None:
    """Copies the rows of a template that has grown from ``stored`` rows on."""
    if not isinstance(template, jax.Array):
        [buffer] = held.values()
        buffer[stored:] = template[stored:]
        return
    data = {shard.device: shard.data for shard in template.addressable_shards}
    for device, box in ownership.device_boxes(template).items():
        first = max(0, stored - box.rows[0])
        if first < box.rows[1] - box.rows[0]:
            rows = template if device is None else data[device]
            held[box][first:] = np.asarray(rows)[first:]


def _placed(held: Mapping[Box, np.ndarray], template: Any) -> Any:
    if isinstance(template, (np.ndarray, MemberRows)):
        [buffer] = held.values()
        return buffer if isinstance(template, np.ndarray) else RestoredMember(buffer, template)
    # The buffer is not shared, and is aligned.
    return placement.assembled(template, ownership.device_boxes(template), held, may_alias=True)


def same_bits(one: Any, two: Any) -> bool:
    """Returns whether two arrays have the same bits, shape and dtype; copies both to the host."""
    one, two = np.asarray(one), np.asarray(two)
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    one, two = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (one, two))
    parts = (slice(at, at + _COMPARED_BYTES) for at in range(0, len(one), _COMPARED_BYTES))
    return all(np.array_equal(one[part], two[part]) for part in parts)


def same_tables(merged: RestoredTables, leaves: Mapping[str, Mapping[str, Any]]) -> bool:
    """Returns whether merged buffers equal tables and slots bit for bit, on this process's shards.

    Args:
      merged: the result of ``restore_tables`` for ``wanted_of(leaves)``.
      leaves: table name to field name to array.
    """
    return all(
        same_bits(merged.buffers[name][field][box], part)
        for name, fields in leaves.items()
        for field, leaf in fields.items()
        for box, part in _parts(leaf)
    )


def _parts(leaf: Any) -> Iterator[tuple[Box, Any]]:
    """The boxes of an array with their rows, one for each device of this process."""
    held = (
        {}
        if not isinstance(leaf, jax.Array)
        else {shard.device: shard.data for shard in leaf.addressable_shards}
    )
    for device, box in ownership.device_boxes(leaf).items():
        yield box, leaf if device is None else held[device]


def check_template(
    expected: Layout, fields: Mapping[str, Mapping[str, Any]], save: StoredSave
) -> None:
    """Checks that a step holds the tables and slots of a template.

    A table may have grown: if the template's leaf is an array, its additional rows are kept.

    Args:
      expected: the template's layout.
      fields: table name to field name to the template's leaf.
      save: the step.

    Raises:
      TemplateMismatch: a table or slot is missing on either side, differs in shape or dtype, or has
        a dtype that JAX would truncate to 32 bits.
    """
    step = save.info.save_id.step
    for table, leaves in fields.items():
        for field, leaf in leaves.items():
            _check_width(f"step {step}, table {table}, {field}", leaf)
    found, wanted = _described(save.layout), _described(expected)
    faults: dict[str, tuple[str, str]] = {}
    advice: str | None = None
    # Tables before their slots, which follow from them.
    for name in sorted(found.keys() | wanted.keys(), key=lambda name: (name[1] != VALUES, name)):
        have, want = found.get(name), wanted.get(name)
        if have == want:
            continue
        why = _advice(name, expected, save.layout)
        if have is not None and want is not None and have[1:] == want[1:] and have[0] < want[0]:
            table, field = name
            if isinstance(array_of(fields[table][field]), (jax.Array, np.ndarray)):
                continue
            why = (
                "to resume with a table that has grown, pass a template of arrays, whose "
                "additional rows are kept"
            )
        advice = why if not faults else advice
        faults[_leaf_name(name, expected, save.layout)] = _shown(want), _shown(have)
    if faults:
        layouts = expected, save.layout
        asked, held = ({path_name(leaf.path) for leaf in one.dense} for one in layouts)
        taken = {path_name(path) for one in layouts for path in _table_leaves(one)}
        for leaf in sorted((asked ^ held) - taken):
            dense = "a dense leaf"
            faults[leaf] = (dense, mismatch.NOTHING) if leaf in asked else (mismatch.NOTHING, dense)
        raise mismatch.mismatch(step, faults, advice)


def _leaf_name(name: tuple[str, str], expected: Layout, stored: Layout) -> str:
    """Name of a table or slot for errors: its leaf in the state."""
    table, field = name
    if field == VALUES:
        return f"table {table}"
    path = _leaf_of(name, expected) or _leaf_of(name, stored)
    leaf = field if path is None else path_name(path)
    return f"{leaf}, a slot of table {table}"


def _table_leaves(layout: Layout) -> Iterator[KeyPath]:
    for table in layout.tables:
        yield from table.leaves.values()


def _advice(name: tuple[str, str], expected: Layout, stored: Layout) -> str | None:
    """Advice for a table or slot that is a dense leaf on the other side; None for others."""
    asked, held = _leaf_of(name, expected), _leaf_of(name, stored)
    if held is not None and held in {leaf.path for leaf in expected.dense}:
        side = "by the manager's Tables"
    elif asked is not None and asked in {leaf.path for leaf in stored.dense}:
        side = "in the step"
    else:
        return None
    option = "select" if name[1] == VALUES else "slots"
    tables = ", ".join(sorted(table.name for table in stored.tables))
    return (
        f"it is a dense leaf {side}, so the step was saved with another Tables({option}=...): "
        f"select the same leaves as then (its tables are {tables}), or restore without a template"
    )


def _leaf_of(name: tuple[str, str], target: Layout) -> KeyPath | None:
    table, field = name
    return next((one.leaves.get(field) for one in target.tables if one.name == table), None)


def _described(target: Layout) -> dict[tuple[str, str], tuple[int, tuple[int, ...], str]]:
    """Describes a table or field: rows, shape of a row, dtype."""
    groups = target.group_by_name
    return {
        (table.name, spec.name): (table.rows, spec.trailing, spec.dtype)
        for table in target.tables
        for spec in groups[table.group].fields
    }


def _shown(described: tuple[int, tuple[int, ...], str] | None) -> str:
    if described is None:
        return mismatch.NOTHING
    rows, trailing, dtype = described
    return f"{dtype}{[rows, *trailing]}"
