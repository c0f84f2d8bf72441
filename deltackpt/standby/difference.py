# SPDX-License-Identifier: Apache-2.0
"""Finds the rows of a save that differ from the held ones, so a new base changes only these."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltackpt.format import blocks
from deltackpt.format.blocks import RowBlock
from deltackpt.layers.targets import Target

#: Bytes compared at a time.
_COMPARED_BYTES = 1 << 20


def changed_rows(block: RowBlock, targets: Sequence[Target]) -> list[RowBlock]:
    """Returns the rows of a block whose bits differ from the held ones."""
    found = []
    for target in targets:
        chosen = blocks.row_slice(block.rows, *target.rows)
        common = target.overlap(block.columns)
        if chosen.start == chosen.stop or common is None:
            continue
        rows = np.asarray(block.rows[chosen])
        values = block.fields[target.field][chosen]
        held = target.buffer[rows[0] - target.rows[0] : rows[-1] + 1 - target.rows[0]]
        if target.columns is not None and block.columns != target.columns:
            low, high = (column - target.columns[0] for column in common)
            held = held[:, low:high]
            values = values[:, common[0] - block.columns[0] : common[1] - block.columns[0]]
            columns = common
        else:
            columns = block.columns
        per_row = max(1, values[:1].nbytes)
        step = max(1, _COMPARED_BYTES // per_row)
        at = [
            start + np.flatnonzero(_differ(values[start : start + step], part))
            for start in range(0, len(rows), step)
            for part in (held[rows[start : start + step] - rows[0]],)
        ]
        positions = np.concatenate(at)
        if len(positions):
            fields = {target.field: values[positions]}
            found.append(RowBlock(block.group, rows[positions], columns, fields))
    return found


def _differ(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The rows in which two arrays of the same shape differ in any bit."""
    flat = [
        np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8) for part in (one, other)
    ]
    return (flat[0] != flat[1]).any(axis=1)
