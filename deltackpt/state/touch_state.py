# SPDX-License-Identifier: Apache-2.0
"""The TouchState (one int32 stamp per row, a clock and an identity), and how to find it in a state.

``mark`` advances the clock and stamps rows with it. A save records the clock that it saw; the rows
touched since then are those with a greater stamp. Nothing is ever cleared, so a failed save loses
no row. A clock does not identify its TouchState: the clock of a re-created one soon passes the
clock of the last save. The identity distinguishes them. The tracking audit (``save.proof``) detects
other cases, such as a reverted copy.
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
from deltackpt.state import contexts, paths, placement
from deltackpt.state.paths import Flat

#: The clock stops here; a save that sees it takes a base.
CLOCK_MAX = int(np.iinfo(np.int32).max)
#: The identity of a TouchState that was made where nothing could be drawn: under a trace.
UNKNOWN = 0


class TouchState(NamedTuple):
    """When each row was last touched; a pytree for use inside jit.

    Attributes:
      clock: int32 scalar, advanced by each ``mark``.
      stamps: table name to the clock at which each row was last touched, (rows,) int32, initially
        0; sharded like the table's first axis.
      identity: int32 scalar that identifies the clock. It is drawn at random by ``init`` and at
        every restore, equal in all processes; ``UNKNOWN`` if ``init`` was traced.
    """

    clock: jax.Array
    stamps: dict[str, jax.Array]
    identity: jax.Array


class Marks(NamedTuple):
    """A TouchState of a save, and its location.

    Attributes:
      place: its path in the state; "" if it was passed separately.
      state: the TouchState.
    """

    place: str
    state: TouchState


class TouchSite(NamedTuple):
    """The position of a TouchState among the leaves of a state.

    Attributes:
      path: its key path.
      positions: positions of its leaves: a single one if its type is intact; otherwise the clock,
        the stamps in the order of ``names``, and the identity.
      names: the tables of the stamps; () if the type is intact.
      touched: its content.
    """

    path: KeyPath
    positions: tuple[int, ...]
    names: tuple[str, ...]
    touched: TouchState


def new_identity() -> int:
    """Returns an identity that no other TouchState has, except with probability 2**-31."""
    return 1 + secrets.randbelow(CLOCK_MAX)


def identity_of(run: str) -> int:
    """Returns the identity that belongs to a run id, which all processes have agreed on."""
    return 1 + int(run, 16) % CLOCK_MAX


def next_identity(identity: int) -> int:
    """Returns a new identity, equal in all processes."""
    return 1 + identity % CLOCK_MAX


@contexts.neutral()
def clock_exhausted(clock: int | jax.Array) -> bool:
    """Returns whether the clock has stopped, so that stamps no longer distinguish rows.

    After 2**31 - 1 marks, a row touched now has the same stamp as one touched at the previous save.
    Every save from then on must be a base. The fresh TouchState of a restore starts at clock 0.
    """
    return int(clock) >= CLOCK_MAX


@contexts.neutral()
def fresh(state: TouchState, identity: int = UNKNOWN, *, traced: bool | None = None) -> TouchState:
    """Returns a TouchState like ``state`` (abstract or not) in which no row is touched.

    Args:
      state: the TouchState to imitate.
      identity: identity of the new one.
      traced: whether this is called inside jit, if known; detecting it triggers a compilation.
    """
    if traced is None:
        traced = isinstance(jnp.zeros((), jnp.int32), Tracer)

    def new(leaf: Any, value: int) -> jax.Array:
        return filled(leaf.shape, leaf, value, traced=traced)

    values = TouchState(0, dict.fromkeys(state.stamps, 0), identity)  # pyright: ignore[reportArgumentType]
    return jax.tree.map(new, state, values)


@contexts.neutral()
def find(state: Any) -> TouchState | None:
    """Finds the TouchState anywhere inside a train state, optimizer state, nnx state or module.

    Args:
      state: any pytree.

    Returns:
      The TouchState, or None. Several with equal clocks and different tables are joined under the
      identity of the first. (Saves use each one separately.)

    Raises:
      TrackingError: several have different clocks, or different stamps of the same table.
    """
    flat = paths.flatten_with_paths(state, is_touch_state)
    return combine([site.touched for site in sites(flat)])


def is_touch_state(node: Any) -> bool:
    """Returns whether a node is a TouchState."""
    return isinstance(node, TouchState)


def sites(flat: Flat) -> list[TouchSite]:
    """Returns every TouchState of a state flattened with ``is_touch_state`` as stop.

    An nnx ``State`` does not preserve NamedTuple types. There, a TouchState is a node ``touched``
    with the right fields, shapes and dtypes.
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
    """Returns a TouchState of its leaves, in the order of ``jax.tree.leaves`` for sorted names."""
    clock, *stamps, identity = leaves
    return TouchState(clock, dict(zip(names, stamps, strict=True)), identity)


def plain(state: TouchState) -> TouchState:
    """Returns a TouchState without the nnx Variables that may wrap its leaves."""
    return of_leaves(jax.tree.leaves(state), sorted(state.stamps))


def combine(states: Iterable[TouchState]) -> TouchState | None:
    """Combines several TouchStates; see ``find``."""
    states = list(states)
    if not states:
        return None
    first, stamps = states[0], dict(states[0].stamps)
    for other in states[1:]:
        for name, array in other.stamps.items():
            if name in stamps and stamps[name] is not array:
                raise TrackingError(
                    f"find: two TouchStates hold different stamps of table {name!r}; use each "
                    "one separately, as a save does"
                )
            stamps[name] = array
        if other.clock is not first.clock and not _same_clock(first.clock, other.clock):
            raise TrackingError(
                f"find: two TouchStates disagree, with clocks {first.clock} and {other.clock}; "
                "use each one separately, as a save does"
            )
    return TouchState(first.clock, stamps, first.identity)


def _same_clock(one: Any, other: Any) -> bool:
    if isinstance(one, jax.ShapeDtypeStruct) or isinstance(other, jax.ShapeDtypeStruct):
        return True
    return int(one) == int(other)


def filled(shape: tuple[int, ...], leaf: Any, value: int, *, traced: bool) -> jax.Array:
    """Returns an int32 array with a leaf's placement; outside jit it compiles nothing."""
    sharding = placement.sharding_of(leaf)
    if traced:
        return jnp.full(shape, value, jnp.int32, device=sharding)
    if sharding is None or len(sharding.device_set) == 1:
        # The CPU backend may keep it without a copy, for one device: see ``state.placement``.
        array = memory.empty_buffer(shape, np.dtype(np.int32))
        pages.populate(array)
        array.fill(value)
        return placement.put(array, leaf, may_alias=True)
    # Each process creates only its own shards.
    shard = np.full(sharding.shard_shape(shape), value, np.int32)
    return jax.make_array_from_callback(shape, sharding, lambda index: shard, dtype=np.int32)
