# SPDX-License-Identifier: Apache-2.0
"""Touched rows as stamps: pure JAX, inside jit or out of it.

``TouchState`` holds one int32 stamp per row, one clock and an identity. ``mark`` advances the clock
and stamps rows with it; a save records the clock that it saw, and the rows touched since are those
with a greater stamp. Nothing is ever cleared, so a failed save loses no row. A clock alone does
not say whose it is: one that was made anew passes the clock of the last save soon. The identity
says it, and what it cannot tell (a copy of an older moment) the sampled proof finds (``proof``).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.experimental import multihost_utils

from deltackpt.errors import TableSelectionError, TrackingError
from deltackpt.format.manifest import KeyPath, path_name
from deltackpt.state import globs, paths, slots
from deltackpt.state.paths import Flat, Select
from deltackpt.tracking.bits import any_in_row, away_from_zero, bits, folded, width

#: The clock stops here; a save that sees it takes a base.
CLOCK_MAX = int(np.iinfo(np.int32).max)
#: The identity of a TouchState that was made where nothing could be drawn: under a trace.
UNKNOWN = 0


class TouchState(NamedTuple):
    """When each row was last touched; a pytree that lives inside jit.

    Attributes:
      clock: int32 scalar, advanced by each ``mark``.
      stamps: table name to the clock at which each row was last touched, (rows,) int32, 0 at
        first; sharded like the table's first axis.
      identity: int32 scalar, whose clock this is: drawn by ``init`` and at every restore, the same
        in all processes; ``UNKNOWN`` where ``init`` ran under a trace.
    """

    clock: jax.Array
    stamps: dict[str, jax.Array]
    identity: jax.Array


class Marks(NamedTuple):
    """One of the TouchStates that a save looks at.

    Attributes:
      place: its path in the state; "" where it was given beside the state.
      state: what it says.
    """

    place: str
    state: TouchState


class TrackState(NamedTuple):
    """State of the optimizer that ``track`` returns.

    Attributes:
      touched: the touched rows; a save finds them with ``find``.
      inner: state of the wrapped optimizer.
    """

    touched: TouchState
    inner: optax.OptState


def init(tables: Mapping[str, Any], *, identity: int | None = None) -> TouchState:
    """Makes a TouchState in which no row was touched yet.

    Args:
      tables: table name to its array or ShapeDtypeStruct, first axis rows. Stamps get its
        row sharding. Inside jit an array whose sharding jit alone decides (Auto axes) gives
        stamps that jit shards.
      identity: one that all processes have agreed on already; None draws one.

    Returns:
      Clock 0, stamps (rows,) int32 of zeros, an identity of its own. In a job of several processes
      every process must call it for tables that lie on several of them, since they agree on the
      identity.

    Raises:
      TrackingError: a table has no row axis, or ``tables`` is no mapping.

    Example:
      >>> state = init({"users": jnp.zeros((4, 2))})
      >>> state = mark(state, {"users": jnp.array([1, 3])})
      >>> state.stamps["users"].tolist()
      [0, 1, 0, 1]
    """
    if not isinstance(tables, Mapping):
        raise TrackingError(
            "init: expected a mapping of table names to arrays, found "
            f"{type(tables).__name__}; give e.g. {{'words': array}}, by the paths of the tables"
        )
    clock, stamps = jnp.zeros((), jnp.int32), {}
    traced = isinstance(clock, Tracer)
    for name, table in tables.items():
        if fault := paths.table_fault(table):
            raise TrackingError(f"table {name}: {fault}; expected an array of rows")
        stamps[name] = _filled(table.shape[:1], _row_sharding(table), 0, traced=traced)
    if identity is None:
        identity = UNKNOWN if traced else _agreed_identity(tables.values())
    return TouchState(clock, stamps, jnp.asarray(np.int32(identity)))


def new_identity() -> int:
    """An identity that no other TouchState bears, but for one in 2**31."""
    return 1 + secrets.randbelow(CLOCK_MAX)


def identity_of(run: str) -> int:
    """The identity that goes with a run id, which all processes have agreed on."""
    return 1 + int(run, 16) % CLOCK_MAX


def _agreed_identity(tables: Iterable[Any]) -> int:
    """A new identity, the same in all processes; ``UNKNOWN`` where they have no call in common."""
    if jax.process_count() == 1:
        return new_identity()
    shardings = [getattr(table, "sharding", None) for table in tables]
    if all(sharding is None or sharding.is_fully_addressable for sharding in shardings):
        return UNKNOWN
    return int(multihost_utils.broadcast_one_to_all(np.int32(new_identity())))


def fresh(state: TouchState, identity: int = UNKNOWN) -> TouchState:
    """A TouchState like ``state`` (abstract or not) in which no row was touched yet.

    Args:
      state: what it is to be like.
      identity: whose clock the new one is.
    """
    traced = isinstance(jnp.zeros((), jnp.int32), Tracer)

    def filled(leaf: Any, value: int) -> jax.Array:
        return _filled(leaf.shape, getattr(leaf, "sharding", None), value, traced=traced)

    values = TouchState(0, dict.fromkeys(state.stamps, 0), identity)  # pyright: ignore[reportArgumentType]
    return jax.tree.map(filled, state, values)


def mark(
    state: TouchState, ids: Mapping[str, Any], *, mask: Mapping[str, Any] | None = None
) -> TouchState:
    """Advances the clock and stamps the rows that ``ids`` name.

    An id outside 0..rows-1 stamps every row that any of JAX's indexing modes could move for it: the
    id modulo the number of rows (negative ids wrap in ``w[ids]``), and the first row (negative ids)
    or the last (ids beyond the end), which ``mode="clip"`` moves. One row too many is cheap, one
    too few would be a wrong model. Padding is best an id of the number of rows or more, which the
    default modes drop, or a ``mask``, which stamps nothing for it.

    Costs O(ids), whatever the tables' sizes. The clock stops at ``CLOCK_MAX``: rows are still
    stamped, and ``clock_exhausted`` makes the next saves bases.

    Args:
      state: the TouchState; its stamps keep their sharding under Auto and Explicit meshes.
      ids: table name, or the end of exactly one table's path (``"words"`` for
        ``"tables/words"``), to row indices of any shape and integer dtype.
      mask: names of ``ids`` to bool arrays that broadcast against them: False where an id is
        padding.

    Returns:
      The state after the mark.

    Raises:
      TrackingError: a name has no stamps, ids are no integers, or a mask is of no ids.

    Example:
      >>> state = init({"users": jnp.zeros((5, 2))})
      >>> state = mark(state, {"users": jnp.array([1, -2])})
      >>> state.stamps["users"].tolist()
      [1, 1, 0, 1, 0]
      >>> padded = {"users": jnp.array([2, 0])}
      >>> state = mark(state, padded, mask={"users": jnp.array([True, False])})
      >>> state.stamps["users"].tolist()
      [1, 1, 2, 1, 0]
    """
    clock = _next_clock(state)
    stamps = dict(state.stamps)
    masks = dict(mask or {})
    for name, rows in ids.items():
        key = _stamps_key("mark", name, stamps)
        stamps[key] = _stamp(name, stamps[key], clock, rows, masks.pop(name, None))
    if masks:
        raise TrackingError(
            f"mark: expected masks of the ids given, found masks of\n{paths.listed(masks)}\n"
            f"and ids of\n{paths.listed(ids)}"
        )
    return TouchState(clock, stamps, state.identity)


def _next_clock(state: TouchState) -> jax.Array:
    return jnp.minimum(state.clock, CLOCK_MAX - 1) + jnp.int32(1)


def _stamps_key(action: str, name: str, stamps: Mapping[str, jax.Array]) -> str:
    """The key of the stamps that a name means: itself, or the one path that ends with it."""
    key = globs.meant(name, stamps, TrackingError)
    if key not in stamps:
        raise TrackingError(f"{action}: no table {name!r}; the tables are\n{paths.listed(stamps)}")
    return key


def mark_rows(state: TouchState, rows: Mapping[str, jax.Array]) -> TouchState:
    """Advances the clock and stamps the rows for which a (rows,) bool mask is True.

    Costs O(rows); ``mark`` is the cheap way where the ids are known.

    Raises:
      TrackingError: a name has no stamps.
    """
    clock = _next_clock(state)
    stamps = dict(state.stamps)
    for name, mask in rows.items():
        key = _stamps_key("mark_rows", name, stamps)
        stamps[key] = jnp.where(mask, clock, stamps[key])
    return TouchState(clock, stamps, state.identity)


def clock_exhausted(clock: int | jax.Array) -> bool:
    """Whether the clock has stopped, so that stamps no longer tell rows apart.

    After 2**31 - 1 marks a row touched now bears the same stamp as one touched at the save
    before. A save that sees such a clock must take a base, as must every later one of the run; the
    fresh TouchState of a restore starts again at clock 0.
    """
    return int(clock) >= CLOCK_MAX


def track(
    optimizer: optax.GradientTransformation,
    select: Select,
    *,
    always: str | Sequence[str] = (),
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

    Returns:
      An optimizer with the updates of ``optimizer``, whose state is a ``TrackState``.

    Raises:
      TableSelectionError: when initialised: a pattern matches nothing, or a leaf that cannot
        be a table.
      TrackingError: when updated without the params, which an exact answer needs.

    Example:
      >>> params = {"emb": jnp.ones((3, 2)), "w": jnp.ones(2)}
      >>> optimizer = track(optax.adagrad(0.1), "emb")
      >>> state = optimizer.init(params)
      >>> grads = {"emb": jnp.zeros((3, 2)).at[1].set(1.0), "w": jnp.ones(2)}
      >>> updates, state = jax.jit(optimizer.update)(grads, state, params)
      >>> find(state).stamps["emb"].tolist()
      [0, 1, 0]
    """
    paths.check_select(select)
    inner = optax.with_extra_args_support(optimizer)

    def init_fn(params: optax.Params) -> TrackState:
        flat = _flatten(params)
        chosen = {path_name(flat.paths[i]): flat.leaves[i] for i in _chosen(flat, select)}
        return TrackState(touched=init(chosen), inner=inner.init(params))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, TrackState]:
        state = cast(TrackState, state)
        if params is None:
            raise TrackingError("track: update() needs the params; pass them as third argument")
        updates, new = inner.update(updates, state.inner, params, **extra)
        # What is compared is what is returned: a fusion of its own could round differently.
        updates, new = jax.lax.optimization_barrier((updates, new))
        changed = _changed_rows(select, always, params, updates, state.inner, new)
        rows = {
            name: _like(mask, state.touched.stamps[name])
            for name, mask in changed.items()
            if name in state.touched.stamps
        }
        return updates, TrackState(mark_rows(state.touched, rows), new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def find(state: Any) -> TouchState | None:
    """The TouchState anywhere inside a train state, optimizer state, nnx state or module.

    Args:
      state: any pytree.

    Returns:
      The TouchState; several of one clock and of different tables are joined under the identity of
      the first; None without any. A save looks at each by itself.

    Raises:
      TrackingError: several disagree in their clocks, or in the stamps of one table.
    """
    flat = _flatten(state)
    return combine([place.touched for place in places(flat)])


class Place(NamedTuple):
    """Where a TouchState stands among the leaves of a state.

    Attributes:
      path: its key path.
      positions: its leaves: one position where its type is intact, else the clock's, those of the
        stamps in the order of ``names``, and the identity's.
      names: the tables of the stamps, () where the type is intact.
      touched: its content.
    """

    path: KeyPath
    positions: tuple[int, ...]
    names: tuple[str, ...]
    touched: TouchState


def is_touch_state(node: Any) -> bool:
    """Whether a node is a TouchState."""
    return isinstance(node, TouchState)


def places(flat: Flat) -> list[Place]:
    """Every TouchState of a state flattened with ``is_touch_state`` as stop.

    An nnx ``State`` keeps no NamedTuple types: there it is what stands under ``touched`` with the
    fields, shapes and dtypes of a TouchState.
    """
    found = []
    untyped: dict[KeyPath, dict[tuple[str, ...], int]] = {}
    for i, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True)):
        if is_touch_state(leaf):
            found.append(Place(path, (i,), (), plain(leaf)))
            continue
        for depth, fields in ((1, ("clock", "identity")), (2, ("stamps",))):
            part = tuple(str(step) for _, step in path[-depth:])
            inside = len(path) > depth + 1 and path[-depth - 1][1] == "touched"
            if inside and part[0] in fields:
                untyped.setdefault(path[:-depth], {})[part] = i
    for path, parts in untyped.items():
        names = tuple(part[1] for part in parts if part[0] == "stamps")
        wanted = (("clock",), *(("stamps", name) for name in names), ("identity",))
        if not names or parts.keys() != {*wanted}:
            continue
        positions = tuple(parts[part] for part in wanted)
        leaves = [flat.leaves[i] for i in positions]
        ranks = [getattr(leaf, "ndim", None) for leaf in leaves]
        types = {getattr(leaf, "dtype", None) for leaf in leaves}
        if types == {np.dtype(np.int32)} and ranks == [0, *[1] * len(names), 0]:
            found.append(Place(path, positions, names, of_leaves(leaves, names)))
    return found


def of_leaves(leaves: Sequence[Any], names: Iterable[str]) -> TouchState:
    """A TouchState of its leaves, in the order of ``jax.tree.leaves`` for sorted names."""
    clock, *stamps, identity = leaves
    return TouchState(clock, dict(zip(names, stamps, strict=True)), identity)


def plain(state: TouchState) -> TouchState:
    """A TouchState without the nnx Variables that may wrap its leaves."""
    return of_leaves(jax.tree.leaves(state), sorted(state.stamps))


def combine(states: Iterable[TouchState]) -> TouchState | None:
    """One TouchState of several; see ``find``."""
    states = list(states)
    if not states:
        return None
    first, stamps = states[0], dict(states[0].stamps)
    for other in states[1:]:
        for name, array in other.stamps.items():
            if name in stamps and stamps[name] is not array:
                raise TrackingError(
                    f"find: two TouchStates hold different stamps of table {name!r}; look at each "
                    "by itself, as a save does"
                )
            stamps[name] = array
        if other.clock is not first.clock and not _same_clock(first.clock, other.clock):
            raise TrackingError(
                f"find: two TouchStates disagree, with clocks {first.clock} and {other.clock}; "
                "look at each by itself, as a save does"
            )
    return TouchState(first.clock, stamps, first.identity)


def _same_clock(one: Any, other: Any) -> bool:
    if isinstance(one, jax.ShapeDtypeStruct) or isinstance(other, jax.ShapeDtypeStruct):
        return True
    return int(one) == int(other)


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


def _stamp(name: str, stamps: jax.Array, clock: jax.Array, ids: Any, mask: Any) -> jax.Array:
    rows = stamps.shape[0]
    if not isinstance(ids, jax.Array):
        # 64-bit ids of the host: jnp.asarray would cut them to 32 bits, and so name other rows.
        ids = np.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        if ids.size:
            raise TrackingError(
                f"mark: ids of table {name!r} have dtype {ids.dtype}, not an integer"
            )
        ids = ids.astype(np.int32)
    if not rows or not ids.size:
        return stamps
    held = ids.astype(jax.dtypes.canonicalize_dtype(ids.dtype))
    # An update that is given 64-bit ids of the host cuts them to 32 bits.
    cut = held is not ids and isinstance(ids, np.ndarray) and bool((held != ids).any())
    for given in (ids, held) if cut else (ids,):
        for targets in _movable(given, rows, mask):
            if targets.size:
                stamps = stamps.at[jnp.asarray(targets)].set(
                    clock,
                    mode="drop",
                    wrap_negative_indices=False,
                    out_sharding=jax.typeof(stamps).sharding,
                )
    return stamps


def _movable(ids: Any, rows: int, mask: Any) -> tuple[Any, Any]:
    """The rows that an update with these ids could move, int32; ``rows`` where there is none.

    Args:
      ids: of any shape and integer dtype, numpy or jax.
      rows: how many there are, at least 1.
      mask: False where an id names nothing; None for none such.

    Returns:
      Each id modulo ``rows``, in the shape of ``ids``; and (2,): the first row where an id is below
      zero, the last where one is beyond the end; (0,) where it is known that none is.
    """
    # In the ids' own type, or a wider one: a cast first would wrap uint32 and int64 ids.
    if jnp.iinfo(ids.dtype).bits < 32:
        ids = ids.astype(np.int32)
    count = np.asarray(rows, ids.dtype)
    below, beyond = ids < 0, ids >= count
    named = (ids % count).astype(np.int32)
    xp = np
    if isinstance(ids, jax.Array) or isinstance(mask, jax.Array):
        xp = jnp
    if mask is not None:
        mask = xp.asarray(mask, bool)
        below, beyond = below & mask, beyond & mask
        named = xp.where(mask, named, np.int32(rows))
    if xp is np and not (below.any() or beyond.any()):
        return named, np.empty(0, np.int32)
    first = xp.where(below.any(), np.int32(0), np.int32(rows))
    last = xp.where(beyond.any(), np.int32(rows - 1), np.int32(rows))
    return named, xp.stack([first, last])


def _filled(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, value: int, *, traced: bool
) -> jax.Array:
    """An int32 array; outside jit nothing is compiled (40 ms for each shape of a new process)."""
    if traced:
        return jnp.full(shape, value, jnp.int32, device=sharding)
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(np.full(shape, value, np.int32), sharding)
    # Of an array of several processes each makes its own shards only.
    shard = np.full(sharding.shard_shape(shape), value, np.int32)
    return jax.make_array_from_callback(shape, sharding, lambda index: shard, dtype=np.int32)


def _row_sharding(table: Any) -> jax.sharding.Sharding | None:
    """Sharding of a table's first axis, None where it has none to keep."""
    if isinstance(table, Tracer):
        sharding: Any = jax.typeof(table).sharding
        if sharding.mesh.empty or not sharding.mesh.are_all_axes_explicit:
            return None
    else:
        sharding = getattr(table, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding if isinstance(sharding, jax.sharding.SingleDeviceSharding) else None
    spec = jax.sharding.PartitionSpec(*sharding.spec[:1])
    return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
