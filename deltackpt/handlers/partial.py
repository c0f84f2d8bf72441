# SPDX-License-Identifier: Apache-2.0
"""A part of a step in a template of another structure: to begin from it, not to go on with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt.errors import TemplateMismatch
from deltackpt.format.manifest import Layout, path_name
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
        path_name(path): position
        for position, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True))
        if not (_stays(leaf) or paths.is_empty(leaf))
    }
    stored = _stored(save.layout)
    tables = {table for name in wanted if (table := stored.get(name)) is not None}
    found = _tables(save.layout, read(step, dict.fromkeys(tables), progress)) if tables else {}
    asked = [leaf for leaf in save.layout.dense if path_name(leaf.path) in wanted]
    if asked:
        saves.check_dense(save)
        dense = items.some(step, [leaf.key for leaf in asked])
        found |= {path_name(leaf.path): dense_at(dense, leaf.key) for leaf in asked}
    saves.check_stands(save)
    leaves, cast = list(flat.leaves), list[str]()
    for name in wanted.keys() & found.keys():
        leaf = leaves[wanted[name]]
        leaves[wanted[name]] = _like(leaf, found[name], f"step {step}, {name}")
        placed = leaves[wanted[name]]
        if not jnp.issubdtype(getattr(placed, "dtype", int), jax.dtypes.extended):
            if getattr(placed, "dtype", None) != getattr(found[name], "dtype", None):
                cast.append(name)
    return ReadState(
        step=step,
        state=jax.tree.unflatten(treedef, leaves),
        missing=tuple(sorted(wanted.keys() - stored.keys())),
        unused=tuple(sorted(stored.keys() - wanted.keys())),
        cast=tuple(sorted(cast)),
    )


def _stays(leaf: Any) -> bool:
    """Whether a leaf of a template is left as it is: a placeholder, or marks of another run."""
    return leaf is ... or touch_state.is_touch_state(leaf)


def _stored(layout: Layout) -> dict[str, str | None]:
    """The names of all leaves of a step, and which table each belongs to; None for dense ones."""
    found: dict[str, str | None] = {path_name(leaf.path): None for leaf in layout.dense}
    for table in layout.tables:
        found |= {path_name(path): table.name for path in table.leaves.values()}
    return found


def _tables(layout: Layout, rows: ReadRows) -> dict[str, Any]:
    return {
        path_name(path): rows.tables[table.name][field]
        for table in layout.tables
        if table.name in rows.tables
        for field, path in table.leaves.items()
    }


def _like(leaf: Any, value: Any, what: str) -> Any:
    """A stored value as a leaf of the template has it: its type, dtype and sharding.

    Raises:
      TemplateMismatch: it has another shape, or a dtype that would change what the numbers mean.
    """
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return value if isinstance(leaf, str) or leaf is None else type(leaf)(value)
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    value = np.asarray(value)
    if is_key and value.dtype == np.uint32:
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
    if isinstance(leaf, (np.ndarray, np.generic)):
        return value.astype(leaf.dtype)
    cast = value if same else np.asarray(value).astype(leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    if is_key or sharding is None:
        return jax.device_put(cast, sharding)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: cast[index])
