# SPDX-License-Identifier: Apache-2.0
"""A part of a step in a template of another structure: to begin from it, not to go on with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt.errors import TemplateMismatch
from deltackpt.format.manifest import KeyPath, Layout
from deltackpt.handlers import dense
from deltackpt.handlers.reading import OrbaxItems
from deltackpt.ledger.steps import Steps
from deltackpt.outcomes import ReadRows, ReadState
from deltackpt.reading import saves
from deltackpt.reading.reader import Progress
from deltackpt.state import paths, touch_state
from deltackpt.state.nesting import dense_at

#: Reads rows of tables: ``Restorer.rows``.
ReadTables = Callable[[int, Mapping[str, None], Progress | None], ReadRows]


def read_state(
    step: int,
    template: Any,
    root: Steps,
    item: str,
    items: OrbaxItems,
    read: ReadTables,
    progress: Progress | None,
) -> ReadState:
    """Leaves of a step by their paths, as ``CheckpointManager.read_state``.

    Args:
      step: the step.
      template: the wanted structure.
      root: of the steps.
      item: of the tables.
      items: what reads dense leaves.
      read: what reads tables.
      progress: called with bytes of tables read and in all.
    """
    root.await_readable(step)
    save = saves.read_save(root.at(step), item)
    flat = paths.flatten_with_paths(template, _stays)
    _, treedef = paths.flatten(template, _stays)
    wanted = {
        _place(path): position
        for position, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True))
        if not (_stays(leaf) or paths.is_empty(leaf))
    }
    stored = _stored(save.layout)
    tables = {table for place in wanted if (table := stored.get(place)) is not None}
    found = _tables(save.layout, read(step, dict.fromkeys(tables), progress)) if tables else {}
    asked = [leaf for leaf in save.layout.dense if _place(leaf.path) in wanted]
    if asked:
        saves.check_dense(save)
        values = items.some(step, [leaf.key for leaf in asked])
        found |= {_place(leaf.path): dense_at(values, leaf.key) for leaf in asked}
    saves.check_stands(save)
    leaves, cast = list(flat.leaves), list[_Place]()
    for place in wanted.keys() & found.keys():
        leaf = leaves[wanted[place]]
        placed = _like(leaf, found[place], f"step {step}, {'/'.join(place)}")
        leaves[wanted[place]] = placed
        if not jnp.issubdtype(getattr(placed, "dtype", int), jax.dtypes.extended):
            if getattr(placed, "dtype", None) != getattr(found[place], "dtype", None):
                cast.append(place)
    return ReadState(
        step=step,
        state=jax.tree.unflatten(treedef, leaves),
        missing=_names(wanted.keys() - stored.keys()),
        unused=_names(stored.keys() - wanted.keys()),
        cast=_names(cast),
    )


#: Steps of a path, whatever containers they lead through; one may hold a slash.
_Place = tuple[str, ...]


def _place(path: KeyPath) -> _Place:
    return tuple(str(step) for _, step in path)


def _names(places: Iterable[_Place]) -> tuple[str, ...]:
    return tuple(sorted("/".join(place) for place in places))


def _stays(leaf: Any) -> bool:
    """Whether a leaf of a template is left as it is: a placeholder, or marks of another run."""
    return leaf is ... or touch_state.is_touch_state(leaf)


def _stored(layout: Layout) -> dict[_Place, str | None]:
    """All leaves of a step, and which table each belongs to; None for dense ones."""
    found: dict[_Place, str | None] = {_place(leaf.path): None for leaf in layout.dense}
    for table in layout.tables:
        found |= {_place(path): table.name for path in table.leaves.values()}
    return found


def _tables(layout: Layout, rows: ReadRows) -> dict[_Place, Any]:
    return {
        _place(path): rows.tables[table.name][field]
        for table in layout.tables
        if table.name in rows.tables
        for field, path in table.leaves.items()
    }


def _like(leaf: Any, value: Any, what: str) -> Any:
    """A stored value as a leaf of the template has it: its type, dtype and sharding.

    Raises:
      TemplateMismatch: it has another shape, a dtype that would change what the numbers mean, or
        an integer that the template's dtype does not hold.
    """
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return _plain(leaf, value, what)
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    value = np.asarray(value)
    if is_key and (value.shape, value.dtype) == dense.stored_as(leaf):
        value = jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(leaf))
    same = value.dtype == leaf.dtype
    if value.shape != leaf.shape or (is_key and not same):
        raise TemplateMismatch(
            f"{what}: expected by the template {leaf.dtype}{list(leaf.shape)}, found in the step "
            f"{value.dtype}{list(value.shape)}; give a template of the stored shape, or a "
            "placeholder (...) to leave this leaf as it is"
        )
    if not (same or jnp.can_cast(value.dtype, leaf.dtype, "same_kind")):
        raise TemplateMismatch(
            f"{what}: expected by the template a number of {leaf.dtype}, found in the step one of "
            f"{value.dtype}, which is of another kind; give a template of the stored dtype"
        )
    if is_key:
        return jax.device_put(value, getattr(leaf, "sharding", None))
    on_host = isinstance(leaf, (np.ndarray, np.generic))
    # With jax_enable_x64 off its arrays have 32 bits at most.
    dtype = leaf.dtype if on_host else jax.dtypes.canonicalize_dtype(leaf.dtype)
    cast = value.astype(dtype, copy=on_host)
    if jnp.issubdtype(dtype, jnp.integer) and not np.array_equal(cast, value):
        raise TemplateMismatch(
            f"{what}: expected by the template integers of {dtype}, found in the step one of "
            f"{value.dtype} that this does not hold; give a template of the stored dtype"
        )
    sharding = getattr(leaf, "sharding", None)
    if on_host:
        return cast
    if sharding is None:
        return jax.device_put(cast)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: cast[index])


def _plain(leaf: Any, value: Any, what: str) -> Any:
    """A stored value as a text, or as a number of Python's."""
    number = np.asarray(value)
    kinds = (np.bool_, np.integer, np.floating)
    rank = next((i for i, kind in enumerate(kinds) if jnp.issubdtype(number.dtype, kind)), None)
    wanted = next((i for i, kind in enumerate((bool, int, float)) if isinstance(leaf, kind)), None)
    if isinstance(leaf, str) and isinstance(value, str):
        return value
    if rank is None or wanted is None or rank > wanted or number.shape:
        shown = repr(value) if isinstance(value, str) else f"{number.dtype}{list(number.shape)}"
        raise TemplateMismatch(
            f"{what}: expected by the template {leaf!r} ({type(leaf).__name__}), found in the step "
            f"{shown}; give a template of the stored kind, or a placeholder (...) to leave this "
            "leaf as it is"
        )
    return type(leaf)(number.item())
