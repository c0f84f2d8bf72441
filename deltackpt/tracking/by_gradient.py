# SPDX-License-Identifier: Apache-2.0
"""Rows touched by their gradients alone, for optimizers that move no other row.

An optimizer qualifies where two things hold. Its state is of types that are known, and whose
effect on a row with a gradient of zero does not depend on the row's history: so nothing that a
trial would have to wait for can move such a row later. And in a trial on small tables no row with a
gradient of zero moves, nor its slots, after steps with other gradients too.
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
from deltackpt.state import paths
from deltackpt.tracking.bits import any_in_row, bits, folded

#: Nothing in them lets a row move without a gradient: none, sums of squares, a factor of the step.
_KNOWN = (optax.EmptyState, optax.ScaleByRssState, optax.ScaleByScheduleState)
#: States around others.
_WRAPPERS = (optax.MaskedState, optax.PartitionState)
_ADVICE = 'use rule="bits", which compares what every optimizer does'
#: Of the tables of a trial: as many as optax needs to keep factored statistics.
_ROWS = 136
#: Steps of a trial, and after how many its rows get no gradient any more.
_STEPS, _QUIET = 5, 3


def touched_rows(gradient: jax.Array, has_nan: jax.Array) -> jax.Array:
    """Rows of a table's gradient, (rows, ...), that are not +0.0 throughout: (rows,) bool.

    A negative zero counts, since an update of +0.0 moves a number that is -0.0.

    Args:
      gradient: of the table.
      has_nan: bool, of ``has_nan``: then every row counts.
    """
    (pieces,) = folded(gradient)
    return any_in_row(bits(pieces) != 0) | has_nan


def has_nan(gradients: Iterable[Any]) -> jax.Array:
    """Whether there is a NaN in any array: through a global norm it would reach all rows."""
    found = jnp.zeros((), bool)
    for leaf in gradients:
        if jnp.issubdtype(getattr(leaf, "dtype", np.dtype(bool)), jnp.inexact):
            found |= jnp.isnan(jnp.asarray(leaf)).any()
    return found


def check(
    optimizer: optax.GradientTransformationExtraArgs,
    params: Any,
    state: Any,
    tables: Collection[KeyPath],
) -> None:
    """Checks that an optimizer moves a row of these tables only where its gradient is not zero.

    Args:
      optimizer: as it is wrapped.
      params: of which it was initialised, abstract or not.
      state: its state.
      tables: paths of the tables in the params.

    Raises:
      TrackingError: it does, or it is not known whether it does.
    """
    for kind in sorted(_unknown(state, tables)):
        raise TrackingError(
            f'track, rule="gradient": expected an optimizer whose state is of '
            f"{', '.join(known.__name__ for known in _KNOWN)} as far as the tables go, found "
            f"{kind}: it is not known to leave rows without a gradient alone; {_ADVICE}"
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


def _unknown(state: Any, tables: Collection[KeyPath]) -> set[str]:
    """Names of the types of states that are not known, and do not leave the tables out."""
    return {type(one).__name__ for one in _states(state) if not _leaves_out(one, tables)}


def _states(node: Any) -> Iterator[Any]:
    """States of single transformations that are not known, wherever they stand."""
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


def _leaves_out(state: Any, tables: Collection[KeyPath]) -> bool:
    """Whether a state shows that its transformation is masked from all tables."""
    flat = paths.flatten_with_paths(state, _is_masked)
    masked = [path for path, leaf in zip(flat.paths, flat.leaves, strict=True) if _is_masked(leaf)]
    return all(any(_is_of(path, table) for path in masked) for table in tables)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _is_of(path: KeyPath, table: KeyPath) -> bool:
    """Whether a leaf of a state stands where optax keeps what belongs to a table."""
    return path[-len(table) :] == table


def _tried(
    optimizer: optax.GradientTransformationExtraArgs, params: Any, tables: Collection[KeyPath]
) -> str | None:
    """A table of which a row moved that had no gradient; None where none did."""
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
        then = optax.apply_updates(now, updates)
        for table in tables:
            for old, new in _of_table(table, (now, state), (then, after)):
                if np.ndim(old) and len(old) == _ROWS:
                    old, new = old[quiet], new[quiet]
                if old.tobytes() != new.tobytes():
                    return path_name(table)
        now, state = then, after
    return None


def _like(
    params: Any, tables: Collection[KeyPath], values: Callable[[tuple[int, ...]], np.ndarray]
) -> Any:
    """Small params, or gradients of them: tables of ``_ROWS`` rows, and one number of the rest."""
    flat = paths.flatten_with_paths(params, _is_masked)
    _, treedef = paths.flatten(params, _is_masked)
    leaves = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if path in tables:
            leaf = jnp.asarray(values((_ROWS, *leaf.shape[1:])), leaf.dtype)
        elif hasattr(leaf, "shape"):
            leaf = jnp.ones((1,) * len(leaf.shape), leaf.dtype)
        leaves.append(leaf)
    return jax.tree.unflatten(treedef, leaves)


def _signed(values: np.ndarray) -> np.ndarray:
    """The same with some rows of negative zeros, which an update of +0.0 would move."""
    values[::7] = -0.0
    return values


def _of_table(table: KeyPath, old: Any, new: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A table and its slots in two trees of one structure: the table itself, too."""
    before, after = (paths.flatten_with_paths(tree, _is_masked) for tree in (old, new))
    for path, one, other in zip(before.paths, before.leaves, after.leaves, strict=True):
        if _is_of(path, table) and not _is_masked(one):
            yield np.asarray(one), np.asarray(other)
