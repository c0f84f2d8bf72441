# SPDX-License-Identifier: Apache-2.0
"""Determines the rows that a template needs, and places merged buffers on its devices."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from deltackpt import codecs, coordination
from deltackpt.errors import TemplateMismatch
from deltackpt.format.naming import Leaf
from deltackpt.format.row_blocks import VALUES, Box
from deltackpt.layers.targets import Wanted
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.state import paths, placement
from deltackpt.state.stacks import MemberRows, RestoredMember

if TYPE_CHECKING:
    from deltackpt.reading.reader import RestoredTables

_logger = logging.getLogger(__name__)

#: Table name to its rows in a step and in a template.
GrownTables = Mapping[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AbstractEmbeddings:
    """The requested parts of an item: table name to field name to abstract leaf.

    A leaf is a ``jax.ShapeDtypeStruct`` (its sharding is used) or an array. If ``tables`` is None,
    everything is restored on the host.
    """

    tables: Mapping[str, Mapping[str, Leaf]] | None = None


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


def check_width(what: str, leaf: object) -> None:
    """Raises TemplateMismatch if JAX would truncate a leaf's dtype to 32 bits."""
    if problem := paths.narrowed(leaf):
        raise TemplateMismatch(f"{what}: {problem}")


def wanted_of(templates: Mapping[str, Mapping[str, object]]) -> Wanted:
    """Returns the boxes of each field on this process's devices; all of it for unsharded leaves."""
    return {
        name: {field: _boxes_of(leaf) for field, leaf in fields.items()}
        for name, fields in templates.items()
    }


def _boxes_of(leaf: Leaf) -> list[Box]:
    if isinstance(leaf, MemberRows):
        return [leaf.box()]
    return sorted(set(placement.device_boxes(leaf).values()))


def place(
    merged: RestoredTables, templates: Mapping[str, Mapping[str, Leaf]]
) -> dict[str, dict[str, Leaf]]:
    """Places what ``restore_tables`` read for ``wanted_of(templates)`` as the template's leaves.

    A numpy leaf becomes the buffer itself, a table of a stacked array a ``RestoredMember``.
    """
    rows = {table.name: table.rows for table in merged.layout.tables}
    placed: dict[str, dict[str, Leaf]] = {}
    for name, fields in merged.buffers.items():
        for field, held in fields.items():
            template = templates[name][field]
            if template.shape[0] > rows[name]:
                _keep_new_rows(held, template, rows[name])
            placed.setdefault(name, {})[field] = _placed(held, template)
    return placed


def grown(merged: RestoredTables, templates: Mapping[str, Mapping[str, Leaf]]) -> GrownTables:
    """Returns the tables of which the template has more rows than the step."""
    rows = {table.name: table.rows for table in merged.layout.tables}
    counts = {name: fields[VALUES].shape[0] for name, fields in templates.items()}
    return {name: (rows[name], count) for name, count in counts.items() if count > rows[name]}


def report_grown(step: int, tables: GrownTables) -> None:
    """Logs one warning about tables with rows that a step does not have, on process 0."""
    if not tables or coordination.process_index():
        return
    described = ", ".join(
        f"{name} ({stored:,} rows in the step, {wanted:,} in the template)"
        for name, (stored, wanted) in sorted(tables.items())
    )
    _logger.warning(
        "step %d: the template has more rows than the step: %s; the additional rows of each table "
        "and of its slots keep the values of the template",
        step,
        described,
        extra={"process_index": 0},
    )


def _keep_new_rows(held: Mapping[Box, np.ndarray], template: Leaf, stored: int) -> None:
    """Copies the rows of a template that has grown from ``stored`` rows on."""
    if isinstance(template, MemberRows):
        [(box, buffer)] = held.items()
        first = len(box.within(stored))
        template.take(np.asarray(box.within(box.rows[1]))[first:], buffer[first:])
        return
    for box, piece in _local_boxes(template):
        first = len(box.within(stored))
        if first < len(held[box]):  # Copies of the other shards would only take memory.
            held[box][first:] = np.asarray(piece)[first:]


def _placed(held: Mapping[Box, np.ndarray], template: Leaf) -> Leaf:
    if isinstance(template, (np.ndarray, MemberRows)):
        [(box, buffer)] = held.items()
        return buffer if isinstance(template, np.ndarray) else RestoredMember(buffer, template, box)
    # The buffer is aligned for that: the leaf may alias it.
    return placement.assembled(template, placement.device_boxes(template), held)


def same_tables(merged: RestoredTables, leaves: Mapping[str, Mapping[str, object]]) -> bool:
    """Returns whether merged buffers equal this process's shards of ``leaves`` bit for bit."""
    return all(
        placement.same_bits(merged.buffers[name][field][box], piece)
        for name, fields in leaves.items()
        for field, leaf in fields.items()
        for box, piece in _local_boxes(leaf)
    )


def _local_boxes(leaf: Leaf) -> Iterator[tuple[Box, object]]:
    """Yields the boxes of a leaf on this process's devices, with their rows."""
    if isinstance(leaf, MemberRows):
        box = leaf.box()
        yield box, leaf.take(np.asarray(box.within(box.rows[1])))
        return
    pieces = placement.local_arrays(leaf)
    for device, box in placement.device_boxes(leaf).items():
        yield box, pieces[device]
