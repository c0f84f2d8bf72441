# SPDX-License-Identifier: Apache-2.0
"""Compares a template with the layout of a step, and describes all differences in one error."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from deltackpt.errors import TemplateMismatch
from deltackpt.format.manifest import KeyPath, Layout, path_name
from deltackpt.format.naming import Leaf, listed
from deltackpt.format.row_blocks import VALUES, GroupEntry
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.restore.placing import check_width
from deltackpt.state import placement
from deltackpt.state.stacks import array_of

#: Advice if a part of the optimizer state has the structure of a part of the params alone.
_INITIALIZE = (
    "the optimizer state and the params of the template differ in structure or shapes: initialize "
    "the optimizer state from these params"
)
#: Shown for a leaf that one side lacks.
NOTHING = "no such array"


def check_template(
    expected: Layout, fields: Mapping[str, Mapping[str, Leaf]], save: StoredSave
) -> None:
    """Raises ``TemplateMismatch`` unless a step holds the tables and slots of a template.

    A table may have grown: if the template's leaf is an array, its additional rows are kept.
    """
    step = save.info.save_id.step
    groups = expected.group_by_name
    for table in expected.tables:
        for field, leaf in fields[table.name].items():
            what = f"step {step}, table {table.name}, {field}"
            check_width(what, leaf)
            _check_sharding(what, groups[table.group], field, leaf)
    found, wanted = _described(save.layout), _described(expected)
    faults: dict[str, tuple[str, str]] = {}
    named: dict[str, str] = {}  # Leaf to the field by which one side has it.
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
        leaf = _leaf_name(name, expected, save.layout)
        if (other := named.setdefault(leaf, name[1])) == name[1]:
            faults[leaf] = _shown(want), _shown(have)
            continue
        asked, held = (other, name[1]) if want is None else (name[1], other)
        faults[leaf] = f"it named {asked}", f"it named {held}"
        advice = _INITIALIZE if leaf == next(iter(faults)) else advice
    if faults:
        layouts = expected, save.layout
        asked, held = ({path_name(leaf.path) for leaf in one.dense} for one in layouts)
        tables = (table for one in layouts for table in one.tables)
        taken = {path_name(path) for table in tables for path in table.leaves.values()}
        for leaf in sorted((asked ^ held) - taken):
            dense = "a dense leaf"
            faults[leaf] = (dense, NOTHING) if leaf in asked else (NOTHING, dense)
        raise mismatch(step, faults, advice)


def _check_sharding(what: str, group: GroupEntry, field: str, leaf: Leaf) -> None:
    """Raises ``TemplateMismatch`` if a leaf is sharded along an axis that saves do not split."""
    spec = next(spec for spec in group.fields if spec.name == field)
    if placement.is_split_beyond(leaf, group.axes(spec)):
        raise TemplateMismatch(
            f"{what}: expected sharding by rows, and by columns only if as wide as its table, "
            f"found {leaf.sharding} of shape {leaf.shape}; shard it by rows"
        )


def mismatch(
    step: int, faults: Mapping[str, tuple[str, str]], advice: str | None = None
) -> TemplateMismatch:
    """Returns the error for leaves in which a template and a step differ, the most important first.

    A fault is what the template and the step have; ``NOTHING`` if one lacks the leaf. The default
    advice is to use another template, or ``read_state``.
    """
    (first, (want, have)), *rest = faults.items()
    if advice is None:
        how = (
            "which reads the leaves that both have and keeps the others"
            if NOTHING in (want, have)
            else "which casts to another dtype of the same kind, with a placeholder (...) in place "
            "of a leaf of another shape or kind"
        )
        advice = (
            f"pass the saved state as the template, call read_state({step}, template), "
            f"{how}, or restore without a template"
        )
    if any(want == NOTHING for want, _ in faults.values()):
        advice += "; leaves that only the step has would be lost"
    message = (
        f"step {step}, {first}: expected {want} as in the template, found {have} in the step; "
        f"{advice}"
    )
    template_only, step_only, different = [], [], []
    for name, (want, have) in faults.items() if rest else ():
        if have == NOTHING:
            template_only.append(f"{name}: {want}")
        elif want == NOTHING:
            step_only.append(f"{name}: {have}")
        else:
            different.append(f"{name}: {want} in the template, {have} in the step")
    for title, lines in (
        ("only the template has", template_only),
        ("only the step has", step_only),
        ("both have, but differently", different),
    ):
        if lines:
            message += f"\n{title}\n{listed(lines)}"
    return TemplateMismatch(message)


def _leaf_name(name: tuple[str, str], expected: Layout, stored: Layout) -> str:
    """Name of a table or slot for errors: its leaf in the state."""
    table, field = name
    if field == VALUES:
        return f"table {table}"
    path = _leaf_of(name, expected) or _leaf_of(name, stored)
    leaf = field if path is None else path_name(path)
    return f"{leaf}, a slot of table {table}"


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
    groups = target.group_by_name
    return {
        (table.name, spec.name): (table.rows, spec.trailing, spec.dtype)
        for table in target.tables
        for spec in groups[table.group].fields
    }


def _shown(described: tuple[int, tuple[int, ...], str] | None) -> str:
    if described is None:
        return NOTHING
    rows, trailing, dtype = described
    return f"{dtype}{[rows, *trailing]}"
