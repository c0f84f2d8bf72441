# SPDX-License-Identifier: Apache-2.0
"""Orders the changes of dense leaves, of which each may be relative to the older ones.

A chain is everything that some saves change in the same few blocks. One thread applies it, oldest
save first, while the blocks are in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from deltackpt.format import blocks
from deltackpt.format.blocks import Rows, Span, StoredRows
from deltackpt.format.dense_blocks import BLOCKS
from deltackpt.layers.merge import Piece, StoredField, mark, reach
from deltackpt.layers.targets import Target, Targets
from deltackpt.resources.staging import Staging

#: Bytes of a target that a chain changes; they stay in the CPU cache.
_CHAIN_BYTES = 4 << 20


class Chain(NamedTuple):
    """Pieces of the same blocks of one target, newest save first."""

    pieces: list[Piece]

    @property
    def nbytes(self) -> int:
        """Stored bytes of the pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    def run(self, scratch: Staging) -> None:
        """Applies the pieces, oldest save first; see ``Piece.run``."""
        for piece in reversed(self.pieces):
            piece.run(scratch)


class StoredBlocks(NamedTuple):
    """Blocks of a segment, at their rows in a group of targets."""

    group: str
    field: StoredField
    held: StoredRows


def chains(
    saves: Iterable[Iterable[StoredBlocks]], targets: Targets
) -> dict[tuple[int, int], Chain]:
    """Returns the work on blocks of dense leaves; chains may run in any order, at the same time.

    Args:
      saves: the blocks of each save, newest first; those of one save are different blocks.
      targets: the buffers, which contain the values below the saves unless they are complete.

    Returns:
      The identity of a target and the number of the chain within it to the chain.
    """
    found: dict[tuple[int, int], Chain] = {}
    newer = {id(target): np.zeros(len(target.buffer), bool) for target in targets.all}
    for save in saves:
        complete = []
        for group, field, held in save:
            over = targets.over(group, BLOCKS, reach(held.rows), field.segment.columns)
            parts = [part for target in over for part in _parts_of(target)]
            slices = blocks.row_slices(held.rows, [rows for _, _, rows in parts])
            for (target, number, _), part in zip(parts, slices, strict=True):
                if part.start == part.stop:
                    continue
                rows = held.rows[part]
                own = blocks.shifted(rows, -target.rows[0])
                if not _all_marked(newer[id(target)], own):
                    first, last = held.first + part.start, held.first + part.stop
                    piece = Piece(field, rows, None, first, last, (target,))
                    found.setdefault((id(target), number), Chain([])).pieces.append(piece)
                if not field.is_relative:
                    complete.append((newer[id(target)], own))
        for flags, own in complete:
            mark(flags, own)
    return found


def _parts_of(target: Target) -> Iterator[tuple[Target, int, Span]]:
    """Yields the chains of a target: target, number and rows of each."""
    (first, stop), size = target.rows, chain_rows(target)
    for number, start in enumerate(range(first, stop, size)):
        yield target, number, (start, min(start + size, stop))


def chain_rows(target: Target) -> int:
    """Returns how many blocks of a target the chains have, the last one excepted."""
    return max(1, _CHAIN_BYTES // max(1, target.buffer[:1].nbytes))


def _all_marked(flags: np.ndarray, rows: Rows) -> bool:
    """Returns whether the flags of all of some rows are set."""
    first, stop = reach(rows)
    # Mostly none is, which is quicker to see than to look each of them up.
    around = flags[first:stop]
    if isinstance(rows, range) or not around.any():
        return bool(around.all())
    return bool(flags[np.asarray(rows)].all())
