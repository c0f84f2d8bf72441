# SPDX-License-Identifier: Apache-2.0
"""Restores the tables of a step without a manager, for the Orbax v0 and v1 handlers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from deltackpt import coordination
from deltackpt.errors import TemplateMismatch
from deltackpt.format.naming import Leaf
from deltackpt.reading.chains import read_chain
from deltackpt.reading.reader import RestoredTables, check_keys, restore_tables, verify_keys
from deltackpt.restore import placing
from deltackpt.restore.placing import AbstractEmbeddings
from deltackpt.state import placement


@placement.neutral()
def load_item(item_dir: Path, abstract: AbstractEmbeddings | None) -> RestoredTables:
    """Restores the tables of a committed step."""
    saves = read_chain(item_dir.parent, item_dir.name)
    if abstract is None or abstract.tables is None:
        return restore_tables(saves)
    stored = placing.abstract_of(saves[-1]).tables or {}
    tables = placement.resolved(abstract.tables)
    for name, fields in tables.items():
        for field, leaf in fields.items():
            _check_leaf(name, field, leaf, stored.get(name, {}).get(field))
            placing.check_width(f"table {name}, {field}", leaf)
    wanted = placing.wanted_of(tables)
    merged = restore_tables(saves, wanted=wanted)
    check_keys(merged)
    share = coordination.process_index(), coordination.process_count()
    if share[1] > 1:
        verify_keys(saves, known=wanted, share=share)
    return dataclasses.replace(merged, placed=placing.place(merged, tables))


def _check_leaf(name: str, field: str, wanted: Leaf, stored: Leaf | None) -> None:
    found = None if stored is None else (tuple(stored.shape), stored.dtype)
    if found != (tuple(wanted.shape), wanted.dtype):
        raise TemplateMismatch(
            f"table {name}, {field}: expected {wanted.dtype}{wanted.shape} as in the template, "
            f"found {found or 'no such array'} in the step; use the shapes that metadata() returns"
        )
