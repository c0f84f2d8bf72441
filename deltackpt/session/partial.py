# SPDX-License-Identifier: Apache-2.0
"""Reads parts of a step into a template of a different structure, to initialize a new run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt.errors import TemplateMismatch
from deltackpt.format.manifest import KeyPath, Layout, dense_at
from deltackpt.format.naming import Leaf, PyTree
from deltackpt.handlers import orbax_dense
from deltackpt.handlers.item_reader import OrbaxItems
from deltackpt.outcomes import ReadRows, ReadState
from deltackpt.reading import stored_saves
from deltackpt.reading.reader import Progress
from deltackpt.restore import placing
from deltackpt.session.run import Run
from deltackpt.state import paths, placement, touch_state

#: Reads rows of tables: ``Restorer.rows``.
ReadTables = Callable[[int, Mapping[str, None], Progress | None], ReadRows]


def read_state(
    run: Run,
    step: int,
    template: PyTree,
    items: OrbaxItems,
    read: ReadTables,
    progress: Progress | None,
) -> ReadState:
    """Returns leaves of a step by path; see ``CheckpointManager.read_state``."""
    paths.check_template(template)
    run.root.await_readable(step)
    save = stored_saves.read_save(run.root.at(step), run.item)
    flat = paths.flatten_with_paths(template, _stays)
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
        stored_saves.check_dense(save)
        values = items.some(step, [leaf.key for leaf in asked])
        found |= {_place(leaf.path): dense_at(values, leaf.key) for leaf in asked}
    stored_saves.check_exists(save)
    leaves, cast, grown = list(flat.leaves), list[_Place](), dict[str, tuple[int, int]]()
    for place in wanted.keys() & found.keys():
        leaf = leaves[wanted[place]]
        what = f"step {step}, {'/'.join(place)}"
        placed = _like(leaf, found[place], what, is_table=stored[place] is not None)
        leaves[wanted[place]] = placed
        if (name := stored[place]) is not None and len(placed) > len(found[place]):
            grown[name] = len(found[place]), len(placed)
        if not jnp.issubdtype(getattr(placed, "dtype", int), jax.dtypes.extended):
            if getattr(placed, "dtype", None) != getattr(found[place], "dtype", None):
                cast.append(place)
    placing.report_grown(step, grown)
    unused = stored.keys() - wanted.keys()
    return ReadState(
        step=step,
        state=jax.tree.unflatten(flat.treedef, leaves),
        missing=_names(wanted.keys() - stored.keys()),
        unused=_names(unused - _placeholders(step, save.layout, items, unused)),
        cast=_names(cast),
    )


#: Returns the components of a path, for any kind of containers; a component may contain a slash.
_Place = tuple[str, ...]


def _place(path: KeyPath) -> _Place:
    return tuple(str(step) for _, step in path)


def _names(places: Iterable[_Place]) -> tuple[str, ...]:
    return tuple(sorted("/".join(place) for place in places))


def _placeholders(
    step: int, layout: Layout, items: OrbaxItems, among: Collection[_Place]
) -> set[_Place]:
    """Returns paths of a step with None or an empty container, such as optax's ``MaskedNode``."""
    entries = [leaf for leaf in layout.dense if _place(leaf.path) in among]
    kinds = orbax_dense.by_key(items.abstract(step)) if entries else {}
    return {_place(leaf.path) for leaf in entries if paths.is_empty(kinds.get(leaf.key, ...))}


def _stays(leaf: object) -> bool:
    """Returns whether a leaf of a template is kept: a placeholder, or marks of another run."""
    return leaf is ... or touch_state.is_touch_state(leaf)


def _stored(layout: Layout) -> dict[_Place, str | None]:
    """Returns all leaves of a step, and the table that each belongs to; None for dense ones."""
    found: dict[_Place, str | None] = {_place(leaf.path): None for leaf in layout.dense}
    for table in layout.tables:
        found |= {_place(path): table.name for path in table.leaves.values()}
    return found


def _tables(layout: Layout, rows: ReadRows) -> dict[_Place, Leaf]:
    return {
        _place(path): rows.tables[table.name][field]
        for table in layout.tables
        if table.name in rows.tables
        for field, path in table.leaves.items()
    }


def _like(leaf: Leaf, value: Leaf, what: str, *, is_table: bool) -> Leaf:
    """Converts a stored value to the type, dtype and sharding of a leaf of the template."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return _plain(leaf, value, what)
    is_key = _is_key(leaf)
    if not _is_key(value):
        value = np.asarray(value)
        if is_key and (value.shape, value.dtype) == orbax_dense.stored_as(leaf):
            # For key data that was saved as integers, the template gives the implementation.
            value = orbax_dense.as_keys(value, leaf)
    same = value.dtype == leaf.dtype
    # If a table has grown, its additional rows are those of the template.
    grows = is_table and leaf.shape[1:] == value.shape[1:] and leaf.shape[:1] > value.shape[:1]
    kept = grows and isinstance(leaf, (jax.Array, np.ndarray))
    if (value.shape != leaf.shape and not kept) or ((is_key or _is_key(value)) and not same):
        advice = (
            "a template of arrays, whose additional rows stay unchanged"
            if grows
            else ("a template of the stored shape and kind")
        )
        raise TemplateMismatch(
            f"{what}: expected {leaf.dtype}{list(leaf.shape)} as in the template, found "
            f"{value.dtype}{list(value.shape)} in the step; pass {advice}, or a placeholder (...) "
            "to keep this leaf"
        )
    if not (same or _kind(value.dtype) == _kind(leaf.dtype)):
        raise TemplateMismatch(
            f"{what}: expected values of {leaf.dtype} as in the template, found {value.dtype} in "
            "the step, which is a different kind; pass a template with the stored dtype"
        )
    if is_key:
        return orbax_dense.like(value, leaf)
    on_host = isinstance(leaf, (np.ndarray, np.generic))
    dtype = leaf.dtype if on_host else jax.dtypes.canonicalize_dtype(leaf.dtype)
    cast = value.astype(dtype, copy=on_host)
    if jnp.issubdtype(dtype, jnp.integer) and not np.array_equal(cast, value):
        raise TemplateMismatch(
            f"{what}: expected integers that fit the template's {dtype}, found one of "
            f"{value.dtype} in the step that does not fit; pass a template of the stored dtype"
        )
    if kept:
        return _grown(leaf, cast)
    return orbax_dense.like(cast, leaf)


def _is_key(leaf: object) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.dtype(bool)), jax.dtypes.extended)


def _grown(template: jax.Array | np.ndarray, values: np.ndarray) -> jax.Array | np.ndarray:
    """Returns a table of the template with its first rows replaced by the stored ones."""
    if isinstance(template, np.ndarray):
        return np.concatenate((values, template[len(values) :]))
    arrays = []
    for shard in template.addressable_shards:
        data, (start, stop, _) = np.array(shard.data), shard.index[0].indices(len(template))
        count = max(0, min(stop, len(values)) - start)
        data[:count] = values[(slice(start, start + count), *shard.index[1:])]
        arrays.append(jax.device_put(data, shard.data.sharding))
    found = jax.make_array_from_single_device_arrays(
        template.shape, template.sharding, arrays, dtype=template.dtype
    )
    return placement.like(found, template)


#: Kinds of numbers, each with the dtypes whose values a cast keeps or rounds.
_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


def _kind(dtype: np.dtype) -> int | None:
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), None)


def _plain(leaf: Leaf, value: object, what: str) -> str | float:
    """Returns a stored value as a string or a Python number."""
    number = np.asarray(value)
    rank = _kind(number.dtype)
    wanted = next((i for i, kind in enumerate((bool, int, float)) if isinstance(leaf, kind)), None)
    if isinstance(leaf, str) and isinstance(value, str):
        return value
    fits = rank is not None and wanted is not None and rank <= wanted and not number.shape
    if not fits or (rank != wanted and type(leaf)(number.item()) != number.item()):
        shown = repr(value) if isinstance(value, str) else f"{number.dtype}{list(number.shape)}"
        raise TemplateMismatch(
            f"{what}: expected {leaf!r} ({type(leaf).__name__}) as in the template, found {shown} "
            "in the step; pass a template of the stored kind, or a placeholder (...) to keep this "
            "leaf"
        )
    return type(leaf)(number.item())
