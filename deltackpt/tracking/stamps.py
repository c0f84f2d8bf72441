# SPDX-License-Identifier: Apache-2.0
"""Stamps rows whose ids are known; pure JAX, for use inside or outside jit.

Measured: marking 53k ids costs 0.16 ms; the update of those rows costs 3.3 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils

from deltackpt.errors import TrackingError
from deltackpt.format import globs
from deltackpt.state import contexts, paths, placement
from deltackpt.state.touch_state import CLOCK_MAX, UNKNOWN, TouchState, filled, new_identity


def init(tables: Mapping[str, Any], *, identity: int | None = None) -> TouchState:
    """Creates a TouchState in which no row is touched.

    Args:
      tables: table name to its array or ShapeDtypeStruct, first axis rows. Stamps get its row
        sharding. Inside jit, an array whose sharding only jit decides (Auto axes) gets stamps that
        jit shards.
      identity: an identity that all processes have already agreed on; None draws one.

    Returns:
      Clock 0, stamps (rows,) int32 of zeros, and a new identity. If tables are sharded over several
      processes, every process must make this call, since they agree on the identity.

    Raises:
      TrackingError: a table has no row axis, or ``tables`` is not a mapping; or neither an abstract
        table nor the current mesh names devices.

    Examples:
      >>> state = init({"users": jnp.zeros((4, 2))})
      >>> state = mark(state, {"users": jnp.array([1, 3])})
      >>> state.stamps["users"].tolist()
      [0, 1, 0, 1]
    """
    if not isinstance(tables, Mapping):
        raise TrackingError(
            "init: expected a mapping of table names to arrays, found "
            f"{type(tables).__name__}; pass e.g. {{'words': array}}, by the paths of the tables"
        )
    tables = placement.resolved(tables, TrackingError)
    with contexts.neutral():
        return _made(tables, identity)


def _made(tables: Mapping[str, Any], identity: int | None) -> TouchState:
    clock, stamps = jnp.zeros((), jnp.int32), {}
    traced = isinstance(clock, Tracer)
    for name, table in tables.items():
        if fault := paths.table_fault(table):
            raise TrackingError(f"table {name}: {fault}; expected an array of rows")
        stamps[name] = filled(table.shape[:1], _stamps_like(table), 0, traced=traced)
    if identity is None:
        identity = UNKNOWN if traced else _agreed_identity(tables.values())
    return TouchState(clock, stamps, jnp.asarray(np.int32(identity)))


@contexts.neutral()
def mark(
    state: TouchState, ids: Mapping[str, Any], *, mask: Mapping[str, Any] | None = None
) -> TouchState:
    """Advances the clock and stamps the rows that ``ids`` name.

    An id outside 0..rows-1 stamps every row that any of JAX's indexing modes could move for it: the
    id modulo the number of rows (negative ids wrap in ``w[ids]``), and the first row (negative ids)
    or the last (ids beyond the end), which ``mode="clip"`` moves. Marking one row too many is
    cheap; marking one too few would corrupt the model. For padding, use an id of the number of rows
    or more, which the default modes drop, or a ``mask``, which stamps nothing for it.

    Costs O(ids), independent of the tables' sizes. The clock stops at ``CLOCK_MAX``: rows are still
    stamped, and ``clock_exhausted`` makes the next saves bases.

    Args:
      state: the TouchState; its stamps keep their sharding under Auto and Explicit meshes.
      ids: table name, or the end of exactly one table's path (``"words"`` for ``"tables/words"``),
        to row indices of any shape and integer dtype.
      mask: names of ``ids`` to bool arrays that broadcast against them: False if an id is padding.

    Returns:
      The state after the mark.

    Raises:
      TrackingError: a name has no stamps, ids are not integers, or a mask has no ids.

    Examples:
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


@contexts.neutral()
def mark_rows(state: TouchState, rows: Mapping[str, jax.Array]) -> TouchState:
    """Advances the clock and stamps the rows for which a (rows,) bool mask is True.

    Costs O(rows); ``mark`` is cheaper if the ids are known.

    Raises:
      TrackingError: a name has no stamps.
    """
    clock = _next_clock(state)
    stamps = dict(state.stamps)
    for name, mask in rows.items():
        key = _stamps_key("mark_rows", name, stamps)
        stamps[key] = jnp.where(mask, clock, stamps[key])
    return TouchState(clock, stamps, state.identity)


def _agreed_identity(tables: Iterable[Any]) -> int:
    """Returns a new identity, equal in all processes; ``UNKNOWN`` if they cannot agree."""
    if jax.process_count() == 1:
        return new_identity()
    shardings = [getattr(table, "sharding", None) for table in tables]
    if all(sharding is None or sharding.is_fully_addressable for sharding in shardings):
        return UNKNOWN
    return int(multihost_utils.broadcast_one_to_all(np.int32(new_identity())))


def _next_clock(state: TouchState) -> jax.Array:
    return jnp.minimum(state.clock, CLOCK_MAX - 1) + jnp.int32(1)


def _stamps_key(action: str, name: str, stamps: Mapping[str, jax.Array]) -> str:
    """Returns the stamps' key for a name: the name itself, or the one path that ends with it."""
    key = globs.meant(name, stamps, TrackingError)
    if key not in stamps:
        raise TrackingError(f"{action}: no table {name!r}; the tables are\n{paths.listed(stamps)}")
    return key


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
    """Returns the rows that an update with these ids could move, int32; ``rows`` for none.

    Args:
      ids: numpy or jax array of any shape and integer dtype.
      rows: number of rows, at least 1.
      mask: False if an id names nothing; None if all name rows.

    Returns:
      Each id modulo ``rows``, in the shape of ``ids``; and (2,): the first row if an id is below
      zero, the last if one is beyond the end; (0,) if neither is possible.
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


def _stamps_like(table: Any) -> Any:
    """Returns the placement of a table's stamps: that of its rows, in the default memory."""
    if isinstance(table, Tracer):
        sharding: Any = jax.typeof(table).sharding
        if sharding.mesh.empty or not sharding.mesh.are_all_axes_explicit:
            return None
    else:
        sharding = placement.sharding_of(table)
        if sharding is None:
            return table
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(*sharding.spec[:1])
        sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
    elif isinstance(sharding, jax.sharding.SingleDeviceSharding):
        [device] = sharding.device_set
        sharding = jax.sharding.SingleDeviceSharding(device)
    else:
        return None
    return jax.ShapeDtypeStruct(table.shape[:1], np.int32, sharding=sharding)
