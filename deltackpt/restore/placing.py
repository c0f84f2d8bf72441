# SPDX-License-Identifier: Apache-2.0
"""Restore: what a template wants of a step, and merged buffers placed on its devices."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deltackpt import codecs
from deltackpt.errors import TemplateMismatch
from deltackpt.format.blocks import VALUES, Box
from deltackpt.format.manifest import KeyPath, Layout
from deltackpt.reading.chains import read_chain
from deltackpt.reading.reader import RestoredTables, restore_tables
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.targets import Wanted
from deltackpt.state import ownership, paths


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AbstractEmbeddings:
    """What to restore of an item: table name to field name to abstract leaf.

    A leaf is a ``jax.ShapeDtypeStruct`` (its sharding is used) or an array. ``tables`` None asks
    for everything, on the host.
    """

    tables: Mapping[str, Mapping[str, Any]] | None = None


def load_item(item_dir: Path, abstract: AbstractEmbeddings | None) -> RestoredTables:
    """Restores one item of a step, for the adapters of Orbax.

    Args:
      item_dir: directory of the item in a committed step.
      abstract: what to restore, and where to put it.

    Raises:
      RestoreError: what is wrong with the step, or with what was asked for.
    """
    saves = read_chain(item_dir.parent, item_dir.name)
    if abstract is None or abstract.tables is None:
        return restore_tables(saves)
    stored = abstract_of(saves[-1]).tables or {}
    for name, fields in abstract.tables.items():
        for field, leaf in fields.items():
            _check_leaf(name, field, leaf, stored.get(name, {}).get(field))
            _check_width(f"table {name}, {field}", leaf)
    merged = restore_tables(saves, wanted=wanted_of(abstract.tables))
    return dataclasses.replace(merged, placed=place(merged, abstract.tables))


def abstract_of(save: StoredSave) -> AbstractEmbeddings:
    """Shapes and dtypes of a step's tables and slots."""
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
            f"table {name}, {field}: expected by the template {wanted.dtype}{wanted.shape}, found "
            f"in the step {found or 'no such array'}; ask for what metadata() shows"
        )


def _check_width(what: str, leaf: Any) -> None:
    if problem := paths.narrowed(leaf):
        raise TemplateMismatch(f"{what}: {problem}")


def wanted_of(templates: Mapping[str, Mapping[str, Any]]) -> Wanted:
    """What this process needs of some tables: the boxes of its shards, else all.

    Args:
      templates: table name to field name to the template's leaf.
    """
    return {
        name: {field: sorted(set(_boxes(leaf).values())) for field, leaf in fields.items()}
        for name, fields in templates.items()
    }


def place(
    merged: RestoredTables, templates: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Puts merged buffers where the template's leaves are: in their shardings, or on the host.

    Args:
      merged: what ``restore_tables`` made of ``wanted_of(templates)``.
      templates: table name to field name to the template's leaf; a numpy leaf keeps the buffer as
        it is.
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


def _keep_further_rows(held: Mapping[Box, np.ndarray], template: Any, stored: int) -> None:
    """Copies the rows of a template that has grown from ``stored`` rows on."""
    if isinstance(template, np.ndarray):
        [buffer] = held.values()
        buffer[stored:] = template[stored:]
        return
    data = {shard.device: shard.data for shard in template.addressable_shards}
    for device, box in _boxes(template).items():
        first = max(0, stored - box.rows[0])
        if first < box.rows[1] - box.rows[0]:
            held[box][first:] = np.asarray(data[device])[first:]


def _boxes(leaf: Any) -> dict[Any, Box]:
    """The box of each device of this process; of one device, or of none, all of the leaf."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return {None: ownership.whole(leaf.shape)}
    return ownership.boxes(sharding, leaf.shape)


def _placed(held: Mapping[Box, np.ndarray], template: Any) -> Any:
    if isinstance(template, np.ndarray):
        [buffer] = held.values()
        return buffer
    sharding = getattr(template, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        [buffer] = held.values()
        return jax.device_put(buffer, sharding, may_alias=True)
    boxes = ownership.boxes(sharding, template.shape)
    # A buffer is ours alone and aligned: the CPU backend may keep it without a copy, for one
    # device. Two would overwrite each other's rows where both are donated.
    once = {box for box, count in collections.Counter(boxes.values()).items() if count == 1}
    arrays = [
        jax.device_put(held[box], jax.sharding.SingleDeviceSharding(device), may_alias=box in once)
        for device, box in boxes.items()
    ]
    return jax.make_array_from_single_device_arrays(
        template.shape, sharding, arrays, dtype=template.dtype
    )


def check_template(
    expected: Layout, fields: Mapping[str, Mapping[str, Any]], save: StoredSave
) -> None:
    """Checks that a step holds the tables and slots that a template asks for.

    A table may have grown: where the template is an array its further rows stay as they are.

    Args:
      expected: the template's layout.
      fields: table name to field name to the template's leaf.
      save: the step.

    Raises:
      TemplateMismatch: a table or slot is missing on either side, differs in shape or dtype, or has
        a dtype that jax would cut to 32 bits.
    """
    step = save.info.save_id.step
    for table, leaves in fields.items():
        for field, leaf in leaves.items():
            _check_width(f"step {step}, table {table}, {field}", leaf)
    found, wanted = _described(save.layout), _described(expected)
    for name in sorted(found.keys() | wanted.keys()):
        have, want = found.get(name), wanted.get(name)
        if have == want:
            continue
        advice = _advice(name, expected, save.layout)
        if have is not None and want is not None and have[1:] == want[1:] and have[0] < want[0]:
            table, field = name
            if isinstance(fields[table][field], (jax.Array, np.ndarray)):
                continue
            advice = (
                "to go on with a table that has grown give a template of arrays, whose further "
                "rows stay as they are"
            )
        raise TemplateMismatch(
            f"step {step}, table {name[0]}, {name[1]}: expected by the template {_shown(want)}, "
            f"found in the step {_shown(have)}; {advice}"
        )


def _advice(name: tuple[str, str], expected: Layout, stored: Layout) -> str:
    """What to do about a table or slot that only one of template and step has."""
    asked, held = _leaf_of(name, expected), _leaf_of(name, stored)
    if held is not None and held in {leaf.path for leaf in expected.dense}:
        side = "by the manager's Tables"
    elif asked is not None and asked in {leaf.path for leaf in stored.dense}:
        side = "in the step"
    else:
        return "give the state that was saved as the template, or restore without one"
    option = "select" if name[1] == VALUES else "slots"
    tables = ", ".join(sorted(table.name for table in stored.tables))
    return (
        f"it is a dense leaf {side}, so the step was saved with another Tables({option}=...): "
        f"choose as it was then (its tables are {tables}), or restore without a template"
    )


def _leaf_of(name: tuple[str, str], target: Layout) -> KeyPath | None:
    table, field = name
    return next((one.leaves.get(field) for one in target.tables if one.name == table), None)


def _described(target: Layout) -> dict[tuple[str, str], tuple[int, tuple[int, ...], str]]:
    """Table and field to rows, shape of a row, and dtype."""
    groups = target.group_by_name
    return {
        (table.name, spec.name): (table.rows, spec.trailing, spec.dtype)
        for table in target.tables
        for spec in groups[table.group].fields
    }


def _shown(described: tuple[int, tuple[int, ...], str] | None) -> str:
    if described is None:
        return "no such array"
    rows, trailing, dtype = described
    return f"{dtype}{[rows, *trailing]}"
