# SPDX-License-Identifier: Apache-2.0
"""Finds the slots of each table in an optimizer state, and moving averages of tables.

Like ``optax.tree_utils.tree_map_params``, but from the optimizer state alone: a part of it with the
structure of a params tree has one leaf per parameter, ``MaskedNode`` for masked ones. Structures
are compared, not the ends of paths: table ``emb`` does not get the slots of ``tower/emb``.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from deltackpt.errors import TableSelectionError
from deltackpt.format import naming
from deltackpt.format.manifest import KeyPath, path_name
from deltackpt.format.naming import Leaf, PyTree
from deltackpt.state import paths
from deltackpt.state.paths import Flat

#: A node of the tree of canonical paths: step text to child; a leaf is its position.
Node = dict[str, "Node | int"]

#: Slots of factored statistics, whose rows all move at every step: optax's Adafactor.
_ALWAYS = frozenset({"v_row", "v_col"})
#: The names by which libraries call the params tree and the optimizer state.
_PARAMS = frozenset({"params", "model"})
_OPT_STATE = "opt_state"


@dataclasses.dataclass(frozen=True)
class Slot:
    """One slot of one table, by the positions of their leaves; ``name`` is like ``opt_state/0/mu``.

    ``always``: the slot is a factored statistic, whose rows all move at every step.
    """

    table: int
    leaf: int
    name: str
    always: bool


def optimizer_leaves(tree: PyTree, flat: Flat) -> list[bool | None]:
    """Returns for each leaf: None outside optimizer states, else whether the state is still typed.

    An optimizer state is a node with the key ``opt_state``, an optax state, or a tuple of them. It
    lacks its types in an nnx ``State`` and if it was restored as plain dicts and lists.
    """
    typed = {path for path in paths.nodes(tree, _is_optax_state) if path}
    roots = {path[:depth] for path in typed for depth in range(1, len(path) + 1)}
    answer: list[bool | None] = []
    for path in flat.paths:
        depths = range(1, len(path) + 1)
        inside = (d for d in depths if path[:d] in typed or str(path[d - 1][1]) == _OPT_STATE)
        depth = next(inside, None)
        answer.append(None if depth is None else path[:depth] in roots)
    return answer


def is_always(name: str, always: str | Sequence[str]) -> bool:
    """Returns whether a pattern in ``always`` matches a slot's name, or its last component."""
    patterns, last = [always] if isinstance(always, str) else always, name.rpartition("/")[2]
    return any(paths.matches(each, name) or paths.matches(each, last) for each in patterns)


def _is_named_tuple(node: object) -> bool:
    return isinstance(node, tuple) and hasattr(type(node), "_fields")


def _is_optax_state(node: object) -> bool:
    if _is_named_tuple(node):  # an empty one is not a hint: plain dicts may contain a MaskedNode
        return bool(node) and type(node).__module__.split(".")[0] in ("optax", "deltackpt")
    if type(node) is not tuple or not node:
        return False
    states = [_is_optax_state(item) for item in node]
    return any(states) and all(
        state or _is_named_tuple(item) for state, item in zip(states, node, strict=True)
    )


def find_slots(flat: Flat, tables: Sequence[int], optimizer: Sequence[bool | None]) -> list[Slot]:
    """Returns slots of the tables at these positions; ``optimizer`` is ``optimizer_leaves``."""
    outside = [i for i, typed in enumerate(optimizer) if typed is None]
    inside = [i for i, typed in enumerate(optimizer) if typed is not None]
    params = list(_containers(_trie(flat, outside), ()))
    exact = [bool(typed) and not flat.in_variable[i] for i, typed in enumerate(optimizer)]
    wanted = set(tables)
    found = []
    for prefix, pairs in _mirrors(_trie(flat, inside), (), params, flat, wanted, exact):
        for table, leaf in pairs:
            shape = getattr(flat.leaves[leaf], "shape", ())
            if table in wanted and shape and shape[0] == flat.leaves[table].shape[0]:
                found.append(Slot(table, leaf, "/".join(prefix), prefix[-1] in _ALWAYS))
    return found


def _trie(flat: Flat, positions: Sequence[int]) -> Node:
    root: Node = {}
    for i in positions:
        node = root
        *front, last = [str(step) for _, step in flat.paths[i]] or [""]
        for step in front:
            child = node.setdefault(step, {})
            if isinstance(child, int):
                raise TableSelectionError(
                    f"{path_name(flat.paths[i])}: expected a container at "
                    f"{path_name(flat.paths[child])}, found a leaf; rename one of the two keys"
                )
            node = child
        node[last] = i
    return root


def _containers(node: Node, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Node]]:
    yield prefix, node
    for step, child in node.items():
        if isinstance(child, dict):
            yield from _containers(child, (*prefix, step))


def _mirrors(
    node: Node,
    prefix: tuple[str, ...],
    params: Sequence[tuple[tuple[str, ...], Node]],
    flat: Flat,
    tables: set[int],
    exact: Sequence[bool],
) -> Iterator[tuple[tuple[str, ...], list[tuple[int, int]]]]:
    """Yields outermost params-like parts at or below ``node``, with (parameter, leaf) pairs."""
    fits = []
    for where, tree in params:
        pairs = _pairs(tree, node, flat, exact)
        if pairs:
            fits.append((where, pairs))
    if fits:
        for _, pairs in _preferred(fits, prefix, tables):
            yield prefix, pairs
        return
    for step, child in node.items():
        if isinstance(child, dict):
            yield from _mirrors(child, (*prefix, step), params, flat, tables, exact)


def _preferred(
    fits: list[tuple[tuple[str, ...], list[tuple[int, int]]]],
    prefix: tuple[str, ...],
    tables: set[int],
) -> list[tuple[tuple[str, ...], list[tuple[int, int]]]]:
    """Returns the one params tree among those that fit; none if no table is concerned."""
    if not any(param in tables for _, pairs in fits for param, _ in pairs):
        return []
    if len(fits) > 1:
        named = [fit for fit in fits if fit[0] and fit[0][-1] in _PARAMS]
        fits = named if len(named) == 1 else fits
    if len(fits) > 1:
        raise TableSelectionError(
            f"slots: {'/'.join(prefix)} has the structure of more than one params tree:\n"
            f"{paths.listed('/'.join(where) or '(the state itself)' for where, _ in fits)}\n"
            "declare the slots with Tables(slots={table pattern: {slot name: path}}), "
            "or slots={} to save them whole"
        )
    return fits


def _pairs(
    tree: Node | int, node: Node | int, flat: Flat, exact: Sequence[bool]
) -> list[tuple[int, int]] | None:
    """Returns (parameter, leaf) positions if ``node`` has the structure of ``tree``, else None."""
    if isinstance(node, int):
        leaf = flat.leaves[node]
        if isinstance(tree, int):
            if paths.is_empty(leaf):
                return []
            return [(tree, node)] if _fits(flat.leaves[tree], leaf) else None
        return [] if _is_masked(leaf) else None
    # An untyped state has no ``MaskedNode``: masked parameters, and those not given to the
    # optimizer (nnx batch statistics), are missing. So ``node`` may then lack some of ``tree``.
    if isinstance(tree, int) or not node.keys() <= tree.keys():
        return None
    whole = node.keys() == tree.keys()
    pairs: list[tuple[int, int]] = []
    for step, child in node.items():
        inner = _pairs(tree[step], child, flat, exact)
        if inner is None:
            return None
        pairs += inner
    if not whole and any(exact[leaf] for _, leaf in pairs):
        return None
    return pairs


def _is_masked(leaf: object) -> bool:
    optax = sys.modules.get("optax")
    return leaf is None or (optax is not None and isinstance(leaf, optax.MaskedNode))


def _fits(param: object, leaf: object) -> bool:
    """Returns whether a leaf can be an optimizer's statistic of a parameter, by shape."""
    shape, own = getattr(leaf, "shape", None), getattr(param, "shape", None)
    if shape is None or own is None:
        return shape is own
    if tuple(shape) in (tuple(own), (), (1,)):
        return True
    return any(tuple(shape) == (*own[:axis], *own[axis + 1 :]) for axis in range(len(own)))


_NAMED_SO = re.compile(r"(?:^|[/_.])(?:ema|ewma|swa|polyak|avg|average[ds]?|averaging)(?:[/_.]|$)")


class Average(NamedTuple):
    """A leaf that looks like an average of ``table``; ``chosen`` if it is a table itself."""

    leaf: int
    name: str
    table: str
    chosen: bool


def averages_of(
    paths: Sequence[KeyPath],
    leaves: Sequence[Leaf],
    chosen: Collection[int],
    outside: Collection[int],
) -> tuple[Average, ...]:
    """Finds leaves with a table's shape and with its path except for the first component.

    Leaves that are tables themselves are included only if their names are typical of averages;
    ``outside`` has the positions of dense leaves outside optimizer states.
    """
    names = {i: path_name(paths[i]) for i in (*chosen, *outside)}
    originals = [i for i in chosen if not _NAMED_SO.search(names[i])]
    by_tail = {(_tail(paths[i]), tuple(leaves[i].shape)): names[i] for i in originals}
    found = (
        (i, by_tail.get((_tail(paths[i]), tuple(getattr(leaves[i], "shape", ())))))
        for i in names.keys() - originals
    )
    return tuple(
        Average(i, names[i], table, i in chosen) for i, table in found if table is not None
    )


def _tail(path: KeyPath) -> tuple[str, ...]:
    steps = [str(step) for _, step in path]
    return tuple(steps[1:] or steps)


def warning(found: Sequence[Average], leaves: Sequence[object]) -> str:
    """Returns the text of the warning about averages."""
    nbytes = sum(bytes_of(leaves[one.leaf]) for one in found)
    lines = naming.listed(f"{one.name}, of table {one.table}" for one in found)
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


def bytes_of(leaf: Leaf) -> int:
    """Returns the bytes of an array."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize
