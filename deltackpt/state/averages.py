# SPDX-License-Identifier: Apache-2.0
"""Detects moving averages of tables, which change every row: saves store them whole."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from deltackpt.format import globs
from deltackpt.format.manifest import KeyPath, path_name

_NAMED_SO = re.compile(r"(?:^|[/_.])(?:ema|ewma|swa|polyak|avg|average[ds]?|averaging)(?:[/_.]|$)")


class Average(NamedTuple):
    """A leaf that looks like an average of a table.

    Attributes:
      leaf: position of the leaf in the state.
      name: its '/'-joined path.
      table: path of the table.
      chosen: whether it is a table itself.
    """

    leaf: int
    name: str
    table: str
    chosen: bool


def averages_of(
    paths: Sequence[KeyPath],
    leaves: Sequence[Any],
    chosen: Collection[int],
    outside: Collection[int],
) -> tuple[Average, ...]:
    """Finds leaves with a table's shape and with its path except for the first component.

    Leaves that are tables themselves are included only if their names are typical of averages.

    Args:
      paths: paths of the state's leaves.
      leaves: the leaves.
      chosen: positions of the tables.
      outside: positions of dense leaves outside optimizer states.
    """
    return tuple(_found(paths, leaves, chosen, outside))


def _found(
    paths: Sequence[KeyPath],
    leaves: Sequence[Any],
    chosen: Collection[int],
    outside: Collection[int],
) -> Iterator[Average]:
    names = {i: path_name(paths[i]) for i in (*chosen, *outside)}
    originals = [i for i in chosen if not _NAMED_SO.search(names[i])]
    by_tail = {(_tail(paths[i]), tuple(leaves[i].shape)): names[i] for i in originals}
    for i in names.keys() - originals:
        table = by_tail.get((_tail(paths[i]), tuple(getattr(leaves[i], "shape", ()))))
        if table is not None:
            yield Average(i, names[i], table, i in chosen)


def _tail(path: KeyPath) -> tuple[str, ...]:
    steps = [str(step) for _, step in path]
    return tuple(steps[1:] or steps)


def warning(found: Sequence[Average], leaves: Sequence[Any]) -> str:
    """Returns the text of the warning about averages."""
    nbytes = sum(bytes_of(leaves[one.leaf]) for one in found)
    lines = globs.listed(f"{one.name}, of table {one.table}" for one in found)
    dense = [one.name for one in found if not one.chosen]
    advice = (
        "update such an average only in the rows of each batch "
        "(ema.at[ids].set(decay * ema[ids] + (1 - decay) * table[ids]))"
    )
    if dense:
        advice += f", and choose it as a table too: Tables(select=[..., {dense[0]!r}])"
    return (
        f"each save stores {nbytes / 1e6:.1f} MB whole, or nearly so, since the state seems to "
        f"contain averages (EMA) or copies of tables:\n{lines}\nAn average over all rows changes "
        f"every row at every step; {advice}"
    )


def bytes_of(leaf: Any) -> int:
    """Returns the bytes of an array."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize
