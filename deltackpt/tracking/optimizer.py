# SPDX-License-Identifier: Apache-2.0
"""An optax wrapper that stamps every row that its optimizer changes, by comparing bits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from deltackpt.errors import OptionError, TrackingError
from deltackpt.format.manifest import path_name
from deltackpt.format.naming import PyTree
from deltackpt.state import paths, placement, slots
from deltackpt.state.paths import Flat, Select
from deltackpt.state.touch_state import TouchState, is_touch_state, mark_rows
from deltackpt.tracking import by_gradient
from deltackpt.tracking.stamps import bits, flagged_rows, init, resharded, width

Rule = Literal["bits", "gradient"]


class TrackState(NamedTuple):
    """State of the optimizer that ``track`` returns.

    Attributes:
      touched: the touched rows; a save finds them with ``find``.
      inner: state of the wrapped optimizer.
    """

    touched: TouchState
    inner: optax.OptState


def track(
    optimizer: optax.GradientTransformation,
    select: Select,
    *,
    always: str | Sequence[str] = (),
    rule: Rule = "bits",
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it stamps every row that it changes.

    A row is touched if its update changes any bit of the row or of one of its slots. This is exact
    for all changes by the optimizer. It costs one pass over tables and slots at each step; ``mark``
    is far cheaper for sparse updates. ``track`` must be the outermost wrapper.
    With a dense optimizer such as Adam most rows move soon after their first gradient, and deltas
    grow accordingly.

    Args:
      optimizer: any optax optimizer.
      select: paths of the tables within the params, as for ``Tables.select``.
      always: names of slots whose rows all move at every step, as for ``Tables.always``; they are
        ignored. Adafactor's factored statistics are included automatically.
      rule: ``"bits"`` compares what the update changes. ``"gradient"`` treats a row as touched if
        its gradient is not zero, at the cost of one pass over it. It is for optimizers that move no
        other row, such as SGD without momentum and Adagrad; any other is rejected.

    Returns:
      An optimizer with the same updates, whose state is a ``TrackState``. With
      ``rule="gradient"``, zeros in the update of a table become -0.0.

    Raises:
      TableSelectionError: when initialized: a pattern matches nothing, or a leaf that cannot be a
        table.
      TrackingError: when updated without the params, which an exact result needs; when initialized
        with ``rule="gradient"``: the optimizer is not known to keep other rows unchanged.

    Examples:
      >>> params = {"emb": jnp.ones((3, 2)), "w": jnp.ones(2)}
      >>> optimizer = track(optax.adagrad(0.1), "emb")
      >>> state = optimizer.init(params)
      >>> grads = {"emb": jnp.zeros((3, 2)).at[1].set(1.0), "w": jnp.ones(2)}
      >>> updates, state = jax.jit(optimizer.update)(grads, state, params)
      >>> state.touched.stamps["emb"].tolist()
      [0, 1, 0]
    """
    paths.check_select(select)
    if rule not in ("bits", "gradient"):
        raise OptionError(f"track, rule: expected 'bits' or 'gradient', found {rule!r}")
    inner = optax.with_extra_args_support(optimizer)

    def init_fn(params: optax.Params) -> TrackState:
        flat = _flatten(params)
        positions = _chosen(flat, select)
        chosen = {path_name(flat.paths[i]): flat.leaves[i] for i in positions}
        state = TrackState(touched=init(chosen), inner=inner.init(params))
        if rule == "gradient":
            by_gradient.check(inner, params, state.inner, [flat.paths[i] for i in positions])
        return state

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, TrackState]:
        state = cast(TrackState, state)
        if params is None:
            raise TrackingError(
                "track: expected the params in update(), found none; pass them as third argument"
            )
        flat = _flatten(params)
        chosen = _chosen(flat, select)
        given = jax.tree.leaves((updates, state.inner, params))
        if rule == "gradient":
            changed = _with_gradients(flat, chosen, updates)
            updates, new = inner.update(updates, state.inner, params, **extra)
            tables = [flat.paths[i] for i in chosen]
            updates = by_gradient.with_negative_zeros(updates, tables)
        else:
            updates, new = inner.update(updates, state.inner, params, **extra)
            # Compare exactly what is returned: another fusion could round differently.
            updates, new = jax.lax.optimization_barrier((updates, new))
            changed = _changed_rows(flat, chosen, always, params, updates, state.inner, new)
        touched = _marked(state.touched, changed)
        if any(isinstance(leaf, np.ndarray) for leaf in given):
            # On CPU, JAX reads NumPy arrays asynchronously; the caller may overwrite them first.
            updates, touched = jax.block_until_ready((updates, touched))
        return updates, TrackState(touched, new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@placement.neutral()
def _marked(touched: TouchState, changed: dict[str, jax.Array]) -> TouchState:
    rows = {
        name: resharded(mask, touched.stamps[name])
        for name, mask in changed.items()
        if name in touched.stamps
    }
    return mark_rows(touched, rows)


@placement.neutral()
def _with_gradients(flat: Flat, chosen: list[int], gradients: PyTree) -> dict[str, jax.Array]:
    """Returns table name to the rows, (rows,) bool, that have a gradient."""
    given = _flatten(gradients)
    gradient_of = dict(zip(given.paths, given.leaves, strict=True))
    touched: dict[str, jax.Array] = {}
    nans = []
    for i in chosen:
        gradient = gradient_of.pop(flat.paths[i], None)
        if not paths.is_empty(gradient):
            rows, with_nan = by_gradient.touched_rows(jnp.asarray(gradient))
            touched[path_name(flat.paths[i])] = rows
            nans.append(with_nan.any())
    has_nan = functools.reduce(jnp.logical_or, nans, by_gradient.has_nan(gradient_of.values()))
    return {name: rows | has_nan for name, rows in touched.items()}


def _flatten(tree: PyTree) -> Flat:
    return paths.flatten_with_paths(tree, is_touch_state)


def _chosen(flat: Flat, select: Select) -> list[int]:
    chosen = paths.choose(select, flat, range(len(flat.leaves)))
    paths.check_tables("track", flat, chosen)
    return chosen


@placement.neutral()
def _changed_rows(
    flat: Flat,
    chosen: list[int],
    always: str | Sequence[str],
    params: PyTree,
    updates: PyTree,
    old: object,
    new: object,
) -> dict[str, jax.Array]:
    """Returns table name to the rows, (rows,) bool, whose bits or whose slots' bits changed."""
    moved = _flatten(updates)
    update_of = dict(zip(moved.paths, moved.leaves, strict=True))
    flags: dict[str, list[jax.Array]] = {}
    for i in chosen:
        update = update_of.get(flat.paths[i])
        table = jnp.asarray(flat.leaves[i])
        flags[path_name(flat.paths[i])] = (
            [] if paths.is_empty(update) else [flagged_rows(_moved, table, jnp.asarray(update))]
        )
    tree = {"params": params, "opt_state": old}
    both = _flatten(tree)
    optimizer = slots.optimizer_leaves(tree, both)
    prefix = len(both.paths) - len(flat.paths)  # "opt_state" sorts before "params"
    tables = [prefix + i for i in chosen]
    after = _flatten({"params": params, "opt_state": new}).leaves
    for slot in slots.find_slots(both, tables, optimizer):
        if slot.always or slots.is_always(slot.name, always):
            continue
        name = path_name(both.paths[slot.table][1:])
        before, now = jnp.asarray(both.leaves[slot.leaf]), jnp.asarray(after[slot.leaf])
        flags[name].append(flagged_rows(_differ, before, now))
    return {name: _any(arrays) for name, arrays in flags.items() if arrays}


def _any(flags: list[jax.Array]) -> jax.Array:
    """Returns the rows that any of several (rows,) uint8 arrays flags: (rows,) bool."""
    first, *others = flags
    for rows in others:
        first = first | resharded(rows, first)
    return first != 0


def _differ(one: jax.Array, other: jax.Array) -> jax.Array:
    """Returns which elements differ in bits: uint8."""
    return (bits(one) != bits(other)).astype(jnp.uint8)


def _moved(table: jax.Array, update: jax.Array) -> jax.Array:
    """Returns which elements of a table ``optax.apply_updates`` changes in bits: uint8."""

    def applied(delta: jax.Array) -> jax.Array:
        return bits((table + delta).astype(table.dtype)) != bits(table)

    changed = applied(update)
    # The caller's program may fuse the sum with the update's last product and then rounds once
    # instead of twice: its update is within one unit in the last place of ours. So a row is
    # unchanged if ours, and ours moved away from zero by one unit, leave it unchanged.
    if jnp.issubdtype(update.dtype, jnp.floating) and width(update.dtype) >= 16:
        changed |= applied(_away_from_zero(update))
        # Of two different NaNs either may come out.
        changed |= jnp.isnan(update) & (bits(update) != bits(table.astype(update.dtype)))
    return changed.astype(jnp.uint8)


def _away_from_zero(array: jax.Array) -> jax.Array:
    """Moves each float to the next one away from zero; zeros and NaN stay."""
    pattern = bits(array)
    moved = jax.lax.bitcast_convert_type(pattern + jnp.ones((), pattern.dtype), array.dtype)
    return jnp.where((array == 0) | jnp.isnan(array), array, moved)
