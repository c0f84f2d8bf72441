# SPDX-License-Identifier: Apache-2.0
"""Detects touched rows by their gradients alone, for optimizers that move no other row.

The state of such an optimizer consists of known types whose effect on a row with a zero gradient
does not depend on the row's history. And in a trial on small tables, no row with a zero gradient
moves, nor its slots, even after steps with other gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from deltackpt.errors import TrackingError
from deltackpt.format.manifest import KeyPath, path_name
from deltackpt.format.naming import PyTree
from deltackpt.state import paths, placement
from deltackpt.tracking.stamps import bits, flagged_rows

#: Nothing in them lets a row move without a gradient: none, sums of squares, a factor of the step.
_KNOWN = (optax.EmptyState, optax.ScaleByRssState, optax.ScaleByScheduleState)
#: States around others.
_WRAPPERS = (optax.MaskedState, optax.PartitionState)
_ADVICE = 'use rule="bits", which compares what every optimizer does'
#: Of the tables of a trial: as many as optax needs to keep factored statistics.
_ROWS = 136
#: Steps of a trial, and after how many its rows get no gradient any more.
_STEPS, _QUIET = 5, 3


def touched_rows(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns which rows of a gradient are not all +0.0, and which contain a NaN: (rows,) bool.

    A negative zero counts as touched, since an update of +0.0 changes a value of -0.0.
    """
    found = flagged_rows(_flags, gradient)
    return found != 0, found > 1


def _flags(gradient: jax.Array) -> jax.Array:
    """Returns for each element 1 if it is not +0.0, and 3 if it is NaN: uint8."""
    patterns, nans = bits(gradient) != 0, _is_nan(gradient)
    flags = patterns.astype(jnp.uint8)
    if nans is not None:
        nans = nans.reshape(nans.shape + (1,) * (patterns.ndim - nans.ndim))
        flags |= nans.astype(jnp.uint8) << 1
    return flags


def has_nan(gradients: Iterable[PyTree]) -> jax.Array:
    """Returns whether any array contains a NaN, which a global norm would spread to all rows."""
    found = jnp.zeros((), bool)
    for leaf in gradients:
        if (nans := _is_nan(leaf)) is not None:
            found |= nans.any()
    return found


def _is_nan(leaf: PyTree) -> jax.Array | None:
    """Which elements are NaN; None if the dtype has none."""
    is_inexact = jnp.issubdtype(getattr(leaf, "dtype", np.dtype(bool)), jnp.inexact)
    return jnp.isnan(jnp.asarray(leaf)) if is_inexact else None


def with_negative_zeros(updates: PyTree, tables: Collection[KeyPath]) -> PyTree:
    """Replaces zeros in the tables' updates with -0.0: adding +0.0 would change a value of -0.0."""
    flat = paths.flatten_with_paths(updates, _is_masked)
    leaves = [
        jnp.where(leaf == 0, -jnp.zeros((), leaf.dtype), leaf)
        if path in tables and jnp.issubdtype(getattr(leaf, "dtype", np.dtype(bool)), jnp.inexact)
        else leaf
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
    ]
    return jax.tree.unflatten(flat.treedef, leaves)


@placement.neutral()
def check(
    optimizer: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    tables: Collection[KeyPath],
) -> None:
    """Raises ``TrackingError`` unless an optimizer moves only rows with a gradient."""
    unknown = {type(one).__name__ for one in _states(state) if not _leaves_out(one, tables)}
    for kind in sorted(unknown):
        raise TrackingError(
            f'track, rule="gradient": expected an optimizer whose state is of '
            f"{', '.join(known.__name__ for known in _KNOWN)} as far as the tables go, found "
            f"{kind}: it may move rows without a gradient; {_ADVICE}"
        )
    try:
        with jax.ensure_compile_time_eval():
            moved = _tried(optimizer, params, tables)
    except Exception as error:
        raise TrackingError(
            'track, rule="gradient": expected an optimizer that can be tried on small tables, '
            f"found {type(error).__name__}: {error}; {_ADVICE}"
        ) from error
    if moved is not None:
        raise TrackingError(
            f'track, rule="gradient": expected rows without a gradient to stay as they are, found '
            f"that the optimizer moves those of {moved}, or their slots; {_ADVICE}"
        )


def _states(node: Any) -> Iterator[Any]:
    """Returns states of single transformations that are not known, at any depth."""
    if isinstance(node, _KNOWN):
        return
    if isinstance(node, _WRAPPERS) or type(node) in (tuple, list):
        for one in node:
            yield from _states(one)
    elif isinstance(node, dict):
        for one in node.values():
            yield from _states(one)
    elif not isinstance(node, optax.MaskedNode):
        yield node


def _leaves_out(state: PyTree, tables: Collection[KeyPath]) -> bool:
    """Returns whether a state shows that its transformation is masked from all tables."""
    flat = paths.flatten_with_paths(state, _is_masked)
    masked = [path for path, leaf in zip(flat.paths, flat.leaves, strict=True) if _is_masked(leaf)]
    return all(any(_is_of(path, table) for path in masked) for table in tables)


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)


def _is_of(path: KeyPath, table: KeyPath) -> bool:
    """Returns whether a leaf of a state belongs to a table, as optax arranges it."""
    return path[-len(table) :] == table


def _tried(
    optimizer: optax.GradientTransformationExtraArgs, params: PyTree, tables: Collection[KeyPath]
) -> str | None:
    """Returns a table of which a row without a gradient moved, or None."""
    random = np.random.default_rng(0)
    now = _like(params, tables, lambda shape: _signed(random.standard_normal(shape)))
    state = optimizer.init(now)
    for step in range(_STEPS):
        quiet = np.arange(_ROWS) % 3 == 0 if step < _QUIET else np.ones(_ROWS, bool)
        loud = np.flatnonzero(~quiet)

        def gradient(shape: tuple[int, ...], loud: np.ndarray = loud) -> np.ndarray:
            values = np.zeros(shape)
            values[loud] = random.standard_normal((len(loud), *shape[1:]))
            return values

        updates, after = optimizer.update(_like(params, tables, gradient), state, now)
        then = optax.apply_updates(now, with_negative_zeros(updates, tables))
        for table in tables:
            for old, new in _of_table(table, (now, state), (then, after)):
                if np.ndim(old) and len(old) == _ROWS:
                    old, new = old[quiet], new[quiet]
                if old.tobytes() != new.tobytes():
                    return path_name(table)
        now, state = then, after
    return None


def _like(
    params: PyTree, tables: Collection[KeyPath], values: Callable[[tuple[int, ...]], np.ndarray]
) -> Any:
    """Returns small params, or gradients: tables of ``_ROWS`` rows, one element of the rest."""
    flat = paths.flatten_with_paths(params, _is_masked)
    leaves = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if path in tables:
            leaf = jnp.asarray(values((_ROWS, *leaf.shape[1:])), leaf.dtype)
        elif hasattr(leaf, "shape"):
            leaf = jnp.ones((1,) * len(leaf.shape), leaf.dtype)
        leaves.append(leaf)
    return jax.tree.unflatten(flat.treedef, leaves)


def _signed(values: np.ndarray) -> np.ndarray:
    """Returns the same with some rows of negative zeros, which an update of +0.0 would move."""
    values[::7] = -0.0
    return values


def _of_table(table: KeyPath, old: object, new: object) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    before, after = (paths.flatten_with_paths(tree, _is_masked) for tree in (old, new))
    for path, one, other in zip(before.paths, before.leaves, after.leaves, strict=True):
        if _is_of(path, table) and not _is_masked(one):
            yield np.asarray(one), np.asarray(other)
