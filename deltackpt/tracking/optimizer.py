# SPDX-License-Identifier: Apache-2.0
"""An optax wrapper that stamps every row which its optimizer changes: bits are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from deltackpt.errors import OptionError, TableSelectionError, TrackingError
from deltackpt.format.manifest import path_name
from deltackpt.state import paths, slots
from deltackpt.state.paths import Flat, Select
from deltackpt.state.touch_state import TouchState, is_touch_state
from deltackpt.tracking import by_gradient
from deltackpt.tracking.bits import any_in_row, away_from_zero, bits, folded, width
from deltackpt.tracking.stamps import init, mark_rows

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

    A row is touched when its update changes the bits of the row, or when the bits of one of
    its slots change. That is exact for whatever passes through the optimizer, at the price
    of a pass over tables and slots at each step: ``mark`` is far cheaper for sparse updates. It
    must be the outermost wrapper. With a dense optimizer such as Adam most rows move soon after
    their first gradient, and deltas grow accordingly.

    Args:
      optimizer: any optax optimizer.
      select: the tables, by their paths within the params; as ``Tables.select``.
      always: slots whose rows all move at every step, by name as ``Tables.always``; they touch no
        row. Adafactor's factored statistics are known.
      rule: ``"bits"`` compares what the update changes. ``"gradient"`` takes a row for touched
        where its gradient is not zero, which costs next to nothing: for optimizers that move no
        other row, such as SGD without momentum and Adagrad; any other is refused.

    Returns:
      An optimizer with the updates of ``optimizer``, whose state is a ``TrackState``.

    Raises:
      TableSelectionError: when initialised: a pattern matches nothing, or a leaf that cannot
        be a table.
      TrackingError: when updated without the params, which an exact answer needs; when initialised
        with ``rule="gradient"``: the optimizer is not known to leave other rows alone.

    Example:
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
        **extra: Any,
    ) -> tuple[optax.Updates, TrackState]:
        state = cast(TrackState, state)
        if params is None:
            raise TrackingError("track: update() needs the params; pass them as third argument")
        if rule == "gradient":
            changed = _with_gradients(select, params, updates)
            updates, new = inner.update(updates, state.inner, params, **extra)
            return updates, TrackState(_marked(state.touched, changed), new)
        updates, new = inner.update(updates, state.inner, params, **extra)
        # What is compared is what is returned: a fusion of its own could round differently.
        updates, new = jax.lax.optimization_barrier((updates, new))
        changed = _changed_rows(select, always, params, updates, state.inner, new)
        return updates, TrackState(_marked(state.touched, changed), new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _marked(touched: TouchState, changed: dict[str, jax.Array]) -> TouchState:
    rows = {
        name: _like(mask, touched.stamps[name])
        for name, mask in changed.items()
        if name in touched.stamps
    }
    return mark_rows(touched, rows)


def _with_gradients(select: Select, params: Any, gradients: Any) -> dict[str, jax.Array]:
    """Table name to the rows, (rows,) bool, that have a gradient."""
    flat, given = _flatten(params), _flatten(gradients)
    gradient_of = dict(zip(given.paths, given.leaves, strict=True))
    has_nan = by_gradient.has_nan(given.leaves)
    return {
        path_name(flat.paths[i]): by_gradient.touched_rows(jnp.asarray(gradient), has_nan)
        for i in _chosen(flat, select)
        if not paths.is_empty(gradient := gradient_of.get(flat.paths[i]))
    }


def _flatten(tree: Any) -> Flat:
    return paths.flatten_with_paths(tree, is_touch_state)


def _chosen(flat: Flat, select: Select) -> list[int]:
    """Positions of the tables among the leaves of params; checked."""
    chosen = paths.choose(select, flat.paths, flat.leaves)
    faults = [
        f"{path_name(flat.paths[i])} {fault}"
        for i in chosen
        if (fault := paths.table_fault(flat.leaves[i]))
    ]
    if faults:
        raise TableSelectionError(f"track: these leaves cannot be tables:\n{paths.listed(faults)}")
    return chosen


def _changed_rows(
    select: Select,
    always: str | Sequence[str],
    params: Any,
    updates: Any,
    old: Any,
    new: Any,
) -> dict[str, jax.Array]:
    """Table name to the rows, (rows,) bool, whose bits or whose slots' bits changed."""
    flat = _flatten(params)
    moved = _flatten(updates)
    update_of = dict(zip(moved.paths, moved.leaves, strict=True))
    chosen = _chosen(flat, select)
    flags: dict[str, list[jax.Array]] = {}
    for i in chosen:
        update = update_of.get(flat.paths[i])
        table = jnp.asarray(flat.leaves[i])
        flags[path_name(flat.paths[i])] = (
            [] if paths.is_empty(update) else [_moved(*folded(table, jnp.asarray(update)))]
        )
    tree = {"params": params, "opt_state": old}
    both = _flatten(tree)
    optimizer = slots.optimizer_leaves(tree, both)
    prefix = len(both.paths) - len(flat.paths)  # "opt_state" sorts before "params"
    tables = [prefix + i for i in chosen]
    after = _flatten({"params": params, "opt_state": new}).leaves
    for slot in slots.find_slots(both, tables, optimizer):
        if slots.is_always(slot, always):
            continue
        name = path_name(both.paths[slot.table][1:])
        before, now = folded(jnp.asarray(both.leaves[slot.leaf]), jnp.asarray(after[slot.leaf]))
        flags[name].append(bits(before) != bits(now))
    return {name: _any_in_row(arrays) for name, arrays in flags.items() if arrays}


def _any_in_row(flags: list[jax.Array]) -> jax.Array:
    """Rows with a flag set in any of several (rows, ...) bool arrays: (rows,) bool."""
    first, *others = map(any_in_row, flags)
    for rows in others:
        first = first | _like(rows, first)
    return first


def _moved(table: jax.Array, update: jax.Array) -> jax.Array:
    """The numbers of a table that ``optax.apply_updates`` changes in bits: flags (rows, ...).

    The sum that the caller's program computes may be fused with the update's last product and
    then rounds once instead of twice. Its update lies within one unit in the last place of ours, so
    a row that ours, and ours moved away from zero by one unit, both leave alone is unchanged.
    """

    def applied(delta: jax.Array) -> jax.Array:
        return bits((table + delta).astype(table.dtype)) != bits(table)

    changed = applied(update)
    if jnp.issubdtype(update.dtype, jnp.floating) and width(update.dtype) >= 16:
        changed |= applied(away_from_zero(update))
        # Of two different NaNs either may come out.
        changed |= jnp.isnan(update) & (bits(update) != bits(table.astype(update.dtype)))
    return changed


def _like(mask: jax.Array, other: jax.Array) -> jax.Array:
    """``mask`` with the sharding of ``other`` in its type (Explicit meshes)."""
    wanted = jax.typeof(other).sharding
    if jax.typeof(mask).sharding == wanted:
        return mask
    return jax.sharding.reshard(mask, wanted)
