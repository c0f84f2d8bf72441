# SPDX-License-Identifier: Apache-2.0
"""Canonical key paths of a state's leaves, and their choice by pattern.

The same leaf has one path whatever wraps it: the ``value`` step of an nnx ``Variable`` is
dropped. ``None`` and empty containers count as leaves, so that a split loses none of them.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from deltackpt.errors import OptionError, TableSelectionError
from deltackpt.format.globs import listed, matches
from deltackpt.format.manifest import KeyEntry, KeyPath, path_name

#: A glob over '/'-joined paths ("*" stays within one step, "**" crosses them), a compiled
#: pattern that must match a whole path, several of either, or a predicate of (path, leaf).
Select = str | re.Pattern[str] | Sequence[str | re.Pattern[str]] | Callable[[KeyPath, Any], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """The leaves of a tree, their canonical paths, and the paths inside nnx Variables."""

    leaves: list[Any]
    paths: list[KeyPath]
    in_variable: list[bool]


def is_empty(node: Any) -> bool:
    """Whether a node is None or an empty container (``MaskedNode`` and ``EmptyState`` too)."""
    return node is None or (isinstance(node, (tuple, list, dict)) and not node)


def printable(text: str) -> str:
    """A text with its halves of surrogate pairs escaped; as it is where it is Unicode."""
    return text.encode(errors="backslashreplace").decode()


def flatten(tree: Any, stop: Callable[[Any], bool]) -> tuple[list[Any], Any]:
    """Leaves and treedef; ``stop`` names nodes that count as leaves. The quick way."""
    # Asked of every node: a call within the call would double what it costs.
    return tree_util.tree_flatten(
        tree,
        is_leaf=lambda node: (
            node is None or (isinstance(node, (tuple, list, dict)) and not node) or stop(node)
        ),
    )


def flatten_with_paths(tree: Any, stop: Callable[[Any], bool]) -> Flat:
    """Leaves in ``flatten``'s order with their canonical paths."""
    pairs, _ = tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: is_empty(node) or stop(node)
    )
    variables = _variable_paths(tree, stop)
    paths, inside = [], []
    for raw, _ in pairs:
        steps: list[KeyEntry] = []
        wrapped = False
        for depth, key in enumerate(raw):
            if raw[:depth] in variables:
                wrapped = True
            else:
                steps.append(_entry(key))
        paths.append(tuple(steps))
        inside.append(wrapped)
    return Flat([leaf for _, leaf in pairs], paths, inside)


def nodes(tree: Any, wanted: Callable[[Any], bool]) -> list[KeyPath]:
    """Canonical paths of the outermost nodes for which ``wanted`` holds."""
    flat = flatten_with_paths(tree, wanted)
    return [path for path, leaf in zip(flat.paths, flat.leaves, strict=True) if wanted(leaf)]


def _variable_paths(tree: Any, stop: Callable[[Any], bool]) -> set[tuple[Any, ...]]:
    """Raw paths of the nnx Variables in a tree."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # no Variable can exist where flax.nnx was never imported
        return set()
    variable = nnx.Variable
    found = set()
    pairs, _ = tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, variable)
    )
    for raw, leaf in pairs:
        if isinstance(leaf, variable):
            found.add(raw)
    return found


def _entry(key: Any) -> KeyEntry:
    if isinstance(key, tree_util.DictKey):
        plain = isinstance(key.key, (str, int)) and not isinstance(key.key, bool)
        return ("dict", key.key if plain else str(key.key))
    if isinstance(key, tree_util.SequenceKey):
        return ("seq", key.idx)
    if isinstance(key, tree_util.GetAttrKey):
        return ("attr", key.name)
    if isinstance(key, tree_util.FlattenedIndexKey):
        # Old-style registrations (FrozenDict's ancestors) give an int here, some a name.
        return ("flat", key.key if isinstance(key.key, (str, int)) else str(key.key))
    return ("attr", str(key))


def check_select(select: Any) -> None:
    """Checks that ``select`` has one of the forms of ``Select``.

    Raises:
      OptionError: it has none of them, or is empty.
    """
    if isinstance(select, (str, re.Pattern)) or callable(select):
        if select != "":
            return
    elif isinstance(select, Sequence) and select:
        if all(isinstance(pattern, (str, re.Pattern)) for pattern in select):
            return
    raise OptionError(
        f"select: expected a path pattern, a compiled pattern, a sequence of them or a "
        f"predicate of (path, leaf), found {select!r}"
    )


def choose(select: Select, paths: Sequence[KeyPath], leaves: Sequence[Any]) -> list[int]:
    """Positions of the leaves that ``select`` chooses, ascending.

    Raises:
      TableSelectionError: a pattern matches nothing; the message lists the paths.
    """
    names = [path_name(path) for path in paths]
    if callable(select):
        found = {i for i, path in enumerate(paths) if select(path, leaves[i])}
        if not found:
            raise TableSelectionError(
                f"select: the predicate chose none of these leaves:\n{listed(names)}"
            )
        return sorted(found)
    found = set()
    patterns = [select] if isinstance(select, (str, re.Pattern)) else select
    for pattern in patterns:
        matched = {i for i, name in enumerate(names) if matches(pattern, name)}
        if not matched:
            shown = pattern if isinstance(pattern, str) else pattern.pattern
            raise TableSelectionError(
                f"select: pattern {shown!r} matches nothing; the leaves are\n{listed(names)}\n"
                "choose by one of these paths ('*' stays within one step, '**' crosses them)"
            )
        found |= matched
    return sorted(found)


def table_fault(leaf: Any) -> str | None:
    """Why a leaf cannot be a table, None where it can: shape (rows, ...), a plain dtype."""
    if leaf is ...:
        return "is a placeholder; to read some tables alone call read(step, tables)"
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return f"is a {type(leaf).__name__}, not an array"
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return f"has dtype {dtype}, which is no plain number type"
    if np.dtype(dtype).kind in "OSUMm":
        return f"has dtype {dtype}, which is no number type"
    if not shape:
        return "is a scalar"
    if 0 in shape:
        return f"has shape {tuple(shape)}, without any element"
    return None


def narrowed(leaf: Any) -> str | None:
    """What is wrong with a template's leaf whose 64-bit numbers jax would cut to 32 bits.

    Args:
      leaf: an array or a ``jax.ShapeDtypeStruct``.

    Returns:
      The problem and its cures; None where jax keeps them, or the leaf is a numpy array.
    """
    if isinstance(leaf, np.ndarray) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return None
    kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if kept == leaf.dtype:
        return None
    return (
        f"expected a template whose {leaf.dtype.name} jax can hold, found that it would be cut to "
        f'{kept.name}, since jax_enable_x64 is off; call jax.config.update("jax_enable_x64", True) '
        "first, or make this leaf of the template a numpy array"
    )
