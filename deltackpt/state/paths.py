# SPDX-License-Identifier: Apache-2.0
"""Canonical key paths of a state's leaves, and their selection by pattern.

A leaf has the same path with or without wrappers: the ``value`` component of an nnx ``Variable`` is
dropped. ``None`` and empty containers are treated as leaves, so that a split does not lose them.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.core import Tracer

from deltackpt.cached import cached_property
from deltackpt.errors import OptionError, TableSelectionError, TemplateMismatch
from deltackpt.format.manifest import KeyEntry, KeyPath, path_name
from deltackpt.format.naming import Leaf, PyTree, listed, matches

#: A glob over '/'-joined paths ("*" stays within one step, "**" crosses them), a compiled
#: pattern that must match a whole path, several of either, or a predicate of (path, leaf).
Select = str | re.Pattern[str] | Sequence[str | re.Pattern[str]] | Callable[[KeyPath, Leaf], bool]

#: Tables of a manager without handlers: leaves that match and have this many rows, if any do.
DEFAULT_SELECT = ("**/embedding", "**/embeddings")
DEFAULT_MIN_ROWS = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """The leaves of a tree, their canonical paths, which are in nnx Variables, and the treedef."""

    leaves: list[Leaf]
    paths: list[KeyPath]
    in_variable: list[bool]
    treedef: object

    @cached_property
    def names(self) -> list[str]:
        """The paths as strings."""
        return [path_name(path) for path in self.paths]


def is_empty(node: object) -> bool:
    """Returns whether a node is None or an empty container, including ``MaskedNode``."""
    return node is None or (isinstance(node, (tuple, list, dict)) and not node)


def printable(text: str) -> str:
    """Returns a string with lone surrogates escaped, or unchanged if it has none."""
    return text.encode(errors="backslashreplace").decode()


def flatten(tree: PyTree, stop: Callable[[object], bool]) -> tuple[list[Leaf], object]:
    """Returns leaves and treedef, fast; ``stop`` selects nodes that are treated as leaves."""
    # Asked of every node: a call within the call would double what it costs.
    return tree_util.tree_flatten(
        tree,
        is_leaf=lambda node: (
            node is None or (isinstance(node, (tuple, list, dict)) and not node) or stop(node)
        ),
    )


def flatten_with_paths(tree: PyTree, stop: Callable[[object], bool]) -> Flat:
    """Returns leaves in ``flatten``'s order with their canonical paths."""
    pairs, treedef = tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: is_empty(node) or stop(node)
    )
    variables = _variable_paths(tree)
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
    return Flat([leaf for _, leaf in pairs], paths, inside, treedef)


def nodes(tree: PyTree, wanted: Callable[[object], bool]) -> list[KeyPath]:
    """Returns canonical paths of the outermost nodes for which ``wanted`` is true."""
    flat = flatten_with_paths(tree, wanted)
    return [path for path, leaf in zip(flat.paths, flat.leaves, strict=True) if wanted(leaf)]


def _variable_paths(tree: PyTree) -> set[tree_util.KeyPath]:
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
        return ("dict", _plain_key(key.key))
    if isinstance(key, tree_util.SequenceKey):
        return ("seq", key.idx)
    if isinstance(key, tree_util.GetAttrKey):
        return ("attr", key.name)
    if isinstance(key, tree_util.FlattenedIndexKey):
        # Old-style registrations (FrozenDict's ancestors) give an int here, some a name.
        return ("flat", _plain_key(key.key))
    return ("attr", str(key))


def _plain_key(key: object) -> str | int:
    """Returns a key of a container as records store it, and as ``path_name`` shows it."""
    if type(key) is str or (type(key) is int and -(1 << 63) <= key < 1 << 64):
        return key
    # A record would hold the value of an enum's member, and its path the name.
    return str(key)


def check_select(select: object, option: str = "select") -> None:
    """Raises ``OptionError`` for ``option`` unless ``select`` is a ``Select`` that is not empty."""
    if isinstance(select, (str, re.Pattern)) or callable(select):
        if select != "":
            return
    elif isinstance(select, Sequence) and (select or select == ()):
        if all(isinstance(pattern, (str, re.Pattern)) for pattern in select):
            return
    raise OptionError(
        f"{option}: expected a path pattern, a compiled pattern, a sequence of them, a predicate "
        f"of (path, leaf), or () for a state without tables, found {select!r}"
    )


def choose(select: Select, flat: Flat, among: Iterable[int]) -> list[int]:
    """Returns the positions ``among`` some whose leaves ``select`` selects, ascending."""
    names = {i: flat.names[i] for i in among}
    if callable(select):
        found = {i for i in names if select(flat.paths[i], flat.leaves[i])}
        if not found:
            raise TableSelectionError(
                "select: expected a predicate that selects leaves, found that it selects none of\n"
                f"{listed(names.values())}\n"
                "select some, or pass select=() for a state without tables"
            )
        return sorted(found)
    found = set()
    patterns = [select] if isinstance(select, (str, re.Pattern)) else select
    for pattern in patterns:
        matched = {i for i, name in names.items() if matches(pattern, name)}
        if select is DEFAULT_SELECT:
            matched = {i for i in matched if _has_rows(flat.leaves[i], DEFAULT_MIN_ROWS)}
        elif not matched:
            shown = pattern if isinstance(pattern, str) else pattern.pattern
            raise TableSelectionError(
                f"select: pattern {shown!r} matches nothing; the leaves are\n"
                f"{listed(names.values())}\n"
                "select one of these paths ('*' matches within one path component, '**' across "
                "components), or pass select=() for a state without tables"
            )
        found |= matched
    return sorted(found)


def _has_rows(leaf: object, least: int) -> bool:
    shape = getattr(leaf, "shape", ())
    return len(shape) > 1 and shape[0] >= least


def matching(option: str, pattern: str, tables: Iterable[str]) -> list[str]:
    """Returns the names of the tables that an option's pattern matches, at least one."""
    names = [*tables]
    matched = [name for name in names if matches(pattern, name)]
    if not matched:
        raise TableSelectionError(
            f"{option}: pattern {pattern!r} matches no table; the tables are\n{listed(names)}"
        )
    return matched


def check_tables(option: str, flat: Flat, chosen: Iterable[int]) -> None:
    """Raises ``TableSelectionError`` if leaves that an option selects cannot be tables."""
    faults = [
        f"{path_name(flat.paths[i]) or '(the state itself)'} {fault}"
        for i in chosen
        if (fault := table_fault(flat.leaves[i]))
    ]
    if faults:
        raise TableSelectionError(
            f"{option}: these leaves cannot be tables:\n{listed(faults)}\n"
            "a table is a numeric array whose first axis is the rows; choose patterns, or a list "
            "of paths, that match no other leaf"
        )


def table_fault(leaf: object) -> str | None:
    """Returns why a leaf cannot be a table: shape (rows, ...), a plain dtype; None if it can."""
    if leaf is ...:
        return "is a placeholder; to read only some tables call read(step, tables)"
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return f"is a {type(leaf).__name__}, not an array"
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return f"has dtype {dtype}, which is not a plain numeric type"
    if np.dtype(dtype).kind in "OSUMm":
        return f"has dtype {dtype}, which is not numeric"
    if not shape:
        return "is a scalar"
    if 0 in shape:
        return f"has shape {tuple(shape)}, without elements"
    if isinstance(leaf, np.ma.MaskedArray):
        return "is a masked array, whose mask would be lost"
    return None


def check_template(template: PyTree) -> None:
    """Raises ``TemplateMismatch`` for tracers, and for shardings that do not fit their arrays."""
    leaves = jax.tree.leaves(template)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        # Inside a jitted function, no array can be placed.
        traced = _names_of(template, lambda leaf: isinstance(leaf, Tracer))
        raise TemplateMismatch(
            f"template: expected arrays, abstract or not, found tracers\n{listed(traced)}\n"
            "restore outside of jit, grad and scan; jax.eval_shape creates an abstract template"
        )
    if found := next(filter(None, map(_misfit, leaves)), None):
        misfits = _names_of(template, lambda leaf: _misfit(leaf) is not None)
        raise TemplateMismatch(
            "template: expected shardings that divide the shapes of their arrays, found others at\n"
            f"{listed(misfits)}\nthe first: {found}; replicate these axes, or use another mesh"
        )


def _misfit(leaf: Leaf) -> str | None:
    """Returns why the sharding of an abstract array cannot divide it; None if it can."""
    sharding, shape = getattr(leaf, "sharding", None), getattr(leaf, "shape", None)
    if not (isinstance(sharding, jax.sharding.Sharding) and isinstance(shape, tuple)):
        return None
    if isinstance(leaf, jax.Array):
        return None
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        return str(error)
    return None


def _names_of(template: PyTree, wanted: Callable[[Leaf], bool]) -> Iterator[str]:
    flat = flatten_with_paths(template, lambda node: False)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if wanted(leaf):
            yield path_name(path) or "(the state itself)"


def narrowed(leaf: Leaf) -> str | None:
    """Describes a leaf that jax would truncate to 32 bits; None for numpy and other leaves."""
    if isinstance(leaf, np.ndarray) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return None
    kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if kept == leaf.dtype:
        return None
    return (
        f"expected a template whose {leaf.dtype.name} jax supports, found that it would truncate "
        f'to {kept.name}, since jax_enable_x64 is off; call jax.config.update("jax_enable_x64", '
        "True) first, or make this leaf of the template a numpy array"
    )
