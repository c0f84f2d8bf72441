# SPDX-License-Identifier: Apache-2.0
"""Rows onto host buffers, newest wins; numpy only.

Blocks of a chain are applied base first, so that a later block overwrites. Blocks of one save
hold different rows and may be applied at the same time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from deltackpt import codecs
from deltackpt.format import blocks
from deltackpt.format.blocks import EncodedBlock, RowBlock, Span
from deltackpt.format.segments import FieldSpec

#: Decoded rows of this many stay in the cache until they are written.
_PIECE_ROWS = 1 << 14


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """The final buffer of some virtual rows and columns of one field.

    ``columns`` is None for a field that is not as wide as its table, and so never split; ``buffer``
    is (rows[1] - rows[0], *trailing), trailing cut to the columns.
    """

    group: str
    field: str
    rows: Span
    columns: Span | None
    buffer: np.ndarray

    def overlap(self, columns: Span) -> Span | None:
        """The columns that it shares with a segment; None where there are none."""
        if self.columns is None:
            return (0, 1)
        first, last = max(self.columns[0], columns[0]), min(self.columns[1], columns[1])
        return (first, last) if first < last else None


def apply(block: RowBlock, targets: Iterable[Target]) -> int:
    """Writes the rows of a block into every target that they belong to.

    Args:
      block: rows of one group.
      targets: buffers; those of other groups and fields are passed over.

    Returns:
      How many rows of targets were written.
    """
    written = 0
    for target in targets:
        if target.group != block.group or target.field not in block.fields:
            continue
        chosen = blocks.row_slice(block.rows, *target.rows)
        if chosen.start == chosen.stop:
            continue
        _scatter(block, chosen, target)
        written += chosen.stop - chosen.start
    return written


def apply_encoded(
    block: EncodedBlock, specs: Sequence[FieldSpec], targets: Sequence[Target]
) -> int:
    """Decodes and writes a block, its fields as ``specs`` say, in cache-sized pieces.

    See ``apply``.
    """
    written = 0
    for start in range(0, len(block.rows), _PIECE_ROWS):
        piece = slice(start, start + _PIECE_ROWS)
        encoded = EncodedBlock(
            block.group,
            block.rows[piece],
            block.columns,
            {name: array[piece] for name, array in block.arrays.items()},
        )
        written += apply(codecs.decode_block(encoded, specs), targets)
    return written


def _scatter(block: RowBlock, chosen: slice, target: Target) -> None:
    values = block.fields[target.field][chosen]
    rows = block.rows[chosen]
    buffer = target.buffer
    if target.columns is not None and block.columns != target.columns:
        common = target.overlap(block.columns)
        if common is None:
            return
        first, last = common
        buffer = buffer[:, first - target.columns[0] : last - target.columns[0]]
        values = values[:, first - block.columns[0] : last - block.columns[0]]
    if isinstance(rows, range):
        buffer[rows.start - target.rows[0] : rows.stop - target.rows[0]] = values
    else:
        held, found = _as_units(buffer, values)
        held[np.asarray(rows) - target.rows[0]] = found


def _as_units(buffer: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as numbers of one odd dtype, where they lie in one piece: numpy moves them x1.5 faster.

    Args:
      buffer: (rows, *trailing).
      values: (other rows, *trailing) of the same dtype.
    """
    row_bytes = math.prod(buffer.shape[1:]) * buffer.itemsize
    whole = buffer.flags.c_contiguous and values.flags.c_contiguous
    if buffer.ndim == 1 or not (whole and row_bytes and buffer.dtype == values.dtype):
        return buffer, values
    unit = np.dtype((np.void, row_bytes))
    return buffer.reshape(-1).view(unit), values.reshape(-1).view(unit)
