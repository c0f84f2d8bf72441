# SPDX-License-Identifier: Apache-2.0
"""The TouchState: one int32 stamp per row, one clock, an identity; and where it stands in a state.

``mark`` advances the clock and stamps rows with it; a save records the clock that it saw, and the
rows touched since are those with a greater stamp. Nothing is ever cleared, so a failed save loses
no row. A clock alone does not say whose it is: one that was made anew passes the clock of the last
save soon. The identity says it, and what it cannot tell (a copy of an older moment) the sampled
proof finds (``save.proof``).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from deltackpt.errors import TrackingError
from deltackpt.format.manifest import KeyPath
from deltackpt.resources import memory, pages
from deltackpt.state import paths
from deltackpt.state.paths import Flat

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


class TouchSite(NamedTuple):
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


def new_identity() -> int:
    """An identity that no other TouchState bears, but for one in 2**31."""
    return 1 + secrets.randbelow(CLOCK_MAX)


def identity_of(run: str) -> int:
    """The identity that goes with a run id, which all processes have agreed on."""
    return 1 + int(run, 16) % CLOCK_MAX


def clock_exhausted(clock: int | jax.Array) -> bool:
    """Whether the clock has stopped, so that stamps no longer tell rows apart.

    After 2**31 - 1 marks a row touched now bears the same stamp as one touched at the save
    before. A save that sees such a clock must take a base, as must every later one of the run; the
    fresh TouchState of a restore starts again at clock 0.
    """
    return int(clock) >= CLOCK_MAX


def fresh(state: TouchState, identity: int = UNKNOWN, *, traced: bool | None = None) -> TouchState:
    """A TouchState like ``state`` (abstract or not) in which no row was touched yet.

    Args:
      state: what it is to be like.
      identity: whose clock the new one is.
      traced: whether this is called inside jit, where that is known: to find it out compiles.
    """
    if traced is None:
        traced = isinstance(jnp.zeros((), jnp.int32), Tracer)

    def new(leaf: Any, value: int) -> jax.Array:
        return filled(leaf.shape, getattr(leaf, "sharding", None), value, traced=traced)

    values = TouchState(0, dict.fromkeys(state.stamps, 0), identity)  # pyright: ignore[reportArgumentType]
    return jax.tree.map(new, state, values)


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
    flat = paths.flatten_with_paths(state, is_touch_state)
    return combine([site.touched for site in sites(flat)])


def is_touch_state(node: Any) -> bool:
    """Whether a node is a TouchState."""
    return isinstance(node, TouchState)


def sites(flat: Flat) -> list[TouchSite]:
    """Every TouchState of a state flattened with ``is_touch_state`` as stop.

    An nnx ``State`` keeps no NamedTuple types: there it is what stands under ``touched`` with the
    fields, shapes and dtypes of a TouchState.
    """
    found = []
    untyped: dict[KeyPath, dict[tuple[str, ...], int]] = {}
    for i, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True)):
        if is_touch_state(leaf):
            found.append(TouchSite(path, (i,), (), plain(leaf)))
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
            found.append(TouchSite(path, positions, names, of_leaves(leaves, names)))
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


def filled(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, value: int, *, traced: bool
) -> jax.Array:
    """An int32 array; outside jit nothing is compiled (40 ms for each shape of a new process)."""
    if traced:
        return jnp.full(shape, value, jnp.int32, device=sharding)
    if sharding is None or len(sharding.device_set) == 1:
        # The CPU backend may keep it without a copy, for one device: see ``restore.placing``.
        array = memory.empty_buffer(shape, np.dtype(np.int32))
        pages.populate(array)
        array.fill(value)
        return jax.device_put(array, sharding, may_alias=True)
    if sharding.is_fully_addressable:
        return jax.device_put(np.full(shape, value, np.int32), sharding)
    # Of an array of several processes each makes its own shards only.
    shard = np.full(sharding.shard_shape(shape), value, np.int32)
    return jax.make_array_from_callback(shape, sharding, lambda index: shard, dtype=np.int32)
