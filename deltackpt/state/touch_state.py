# SPDX-License-Identifier: Apache-2.0
"""TouchStates: one int32 stamp per row, a clock and an identity; those in a state.

``mark`` advances the clock and stamps rows with it. A save records the clock that it saw; the rows
touched since then have a greater stamp. Nothing is ever cleared, so a failed save loses no row. The
identity distinguishes a re-created TouchState, whose clock soon passes that of the last save. The
tracking audit (``save.tracking_audit``) detects other cases, such as a reverted copy.
"""

from __future__ import annotations

import collections
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from deltackpt.errors import TrackingError
from deltackpt.format import naming
from deltackpt.format.manifest import KeyPath, Layout
from deltackpt.format.naming import Leaf, PyTree
from deltackpt.format.records import IdentityCache
from deltackpt.resources import host_memory
from deltackpt.state import paths, placement
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

    If its type is intact, it is one leaf, and ``names`` is (). Otherwise ``positions`` has the
    clock, the stamps in the order of ``names``, and the identity.
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


@placement.neutral()
def clock_exhausted(clock: int | jax.Array) -> bool:
    """Returns whether the clock has stopped, so that stamps no longer distinguish rows.

    After 2**31 - 1 marks, a row touched now has the same stamp as one touched at the previous save.
    Every save from then on must be a base. The fresh TouchState of a restore starts at clock 0.
    """
    return int(clock) >= CLOCK_MAX


@placement.neutral()
def fresh(state: TouchState, identity: int = UNKNOWN, *, traced: bool | None = None) -> TouchState:
    """Returns a TouchState like ``state`` (abstract or not) in which no row is touched.

    Args:
      state: the TouchState to imitate.
      identity: identity of the new one.
      traced: whether this is called inside jit, if known; detecting it triggers a compilation.
    """
    if traced is None:
        traced = isinstance(jnp.zeros((), jnp.int32), Tracer)

    def new(leaf: Leaf, value: int) -> jax.Array:
        return filled(leaf.shape, leaf, value, traced=traced)

    values = TouchState(0, dict.fromkeys(state.stamps, 0), identity)  # pyright: ignore[reportArgumentType]
    return jax.tree.map(new, state, values)


@placement.neutral()
def find(state: PyTree) -> TouchState | None:
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


def is_touch_state(node: object) -> bool:
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
            piece = tuple(str(step) for _, step in path[-depth:])
            inside = len(path) > depth + 1 and path[-depth - 1][1] == "touched"
            if inside and piece[0] in fields:
                untyped.setdefault(path[:-depth], {})[piece] = i
    for path, pieces in untyped.items():
        names = tuple(piece[1] for piece in pieces if piece[0] == "stamps")
        wanted = (("clock",), *(("stamps", name) for name in names), ("identity",))
        if not names or pieces.keys() != {*wanted}:
            continue
        positions = tuple(pieces[piece] for piece in wanted)
        leaves = [flat.leaves[i] for i in positions]
        ranks = [getattr(leaf, "ndim", None) for leaf in leaves]
        types = {getattr(leaf, "dtype", None) for leaf in leaves}
        if types == {np.dtype(np.int32)} and ranks == [0, *[1] * len(names), 0]:
            found.append(TouchSite(path, positions, names, from_leaves(leaves, names)))
    return found


def from_leaves(leaves: Sequence[Leaf], names: Iterable[str]) -> TouchState:
    """Returns a TouchState of its leaves, in the order of ``jax.tree.leaves`` for sorted names."""
    clock, *stamps, identity = leaves
    return TouchState(clock, dict(zip(names, stamps, strict=True)), identity)


def plain(state: TouchState) -> TouchState:
    """Returns a TouchState without the nnx Variables that may wrap its leaves."""
    return from_leaves(jax.tree.leaves(state), sorted(state.stamps))


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


def _same_clock(
    one: jax.Array | jax.ShapeDtypeStruct, other: jax.Array | jax.ShapeDtypeStruct
) -> bool:
    if isinstance(one, jax.ShapeDtypeStruct) or isinstance(other, jax.ShapeDtypeStruct):
        return True
    return int(one) == int(other)


def filled(shape: tuple[int, ...], leaf: object, value: int, *, traced: bool) -> jax.Array:
    """Returns an int32 array with a leaf's placement; outside jit it compiles nothing."""
    sharding = placement.sharding_of(leaf)
    if traced:
        return jnp.full(shape, value, jnp.int32, device=sharding)
    if sharding is None or len(sharding.device_set) == 1:
        # The CPU backend may keep it without a copy: see ``placement.put``.
        array = host_memory.empty_buffer(shape, np.dtype(np.int32))
        host_memory.populate(array)
        array.fill(value)
        return placement.put(array, leaf)
    # Each process creates only its own shards.
    shard = np.full(sharding.shard_shape(shape), value, np.int32)
    return jax.make_array_from_callback(shape, sharding, lambda index: shard, dtype=np.int32)


@placement.neutral()
def mark_rows(state: TouchState, rows: Mapping[str, jax.Array | np.ndarray]) -> TouchState:
    """Advances the clock and stamps the rows for which a (rows,) bool mask is True.

    Costs O(rows); ``mark`` is cheaper if the ids are known.

    Raises:
      TrackingError: a name has no stamps.
    """
    clock = next_clock(state)
    stamps = dict(state.stamps)
    for name, mask in rows.items():
        key = key_of("mark_rows", name, stamps)
        if isinstance(mask, np.ndarray):
            mask = mask.copy()  # JAX reads it asynchronously; the caller may reuse it.
        stamps[key] = jnp.where(mask, clock, stamps[key])
    return TouchState(clock, stamps, state.identity)


def next_clock(state: TouchState) -> jax.Array:
    """Returns the clock of the next mark."""
    return jnp.minimum(state.clock, CLOCK_MAX - 1) + jnp.int32(1)


def key_of(action: str, name: str, stamps: Mapping[str, jax.Array]) -> str:
    """Returns the stamps' key for a name: the name itself, or the one path that ends with it."""
    key = naming.meant(name, stamps, TrackingError)
    if key not in stamps:
        raise TrackingError(f"{action}: no table {name!r}; the tables are\n{paths.listed(stamps)}")
    return key


def with_more_rows(array: jax.Array, rows: int) -> jax.Array:
    """Returns an array extended to ``rows`` rows with zeros."""
    if array.shape[0] == rows:
        return array
    added = [(0, rows - array.shape[0], 0), *[(0, 0, 0)] * (array.ndim - 1)]
    return lax.pad(array, jnp.zeros((), array.dtype), added)


#: Table name to the key of its stamps, by layout and by the stamps' names and lengths.
_matched: IdentityCache[dict[str, str]] = IdentityCache()


def match_marks(marks: Sequence[Marks], layout: Layout) -> dict[str, dict[str, jax.Array]]:
    """Returns table name to path to stamps; each table must have stamps in one of ``marks``."""
    found: dict[str, dict[str, jax.Array]] = {table.name: {} for table in layout.tables}
    for place, touched in marks:
        for table, key in matched(touched, layout).items():
            found[table][place] = touched.stamps[key]
    if bare := [table for table, stamps in found.items() if not stamps]:
        known = {key for _, touched in marks for key in touched.stamps}
        raise TrackingError(
            f"table {bare[0]}: expected stamps of it in the TouchState, found only those of\n"
            f"{paths.listed(known)}\ninitialize it with every table"
        )
    return found


def matched(touched: TouchState, layout: Layout) -> dict[str, str]:
    """Returns table name to the key of its stamps, for tables that have stamps.

    A key names the table with the same path; otherwise the only table whose path ends with the key,
    because ``track`` only sees paths within the params.
    """
    names, lengths = [*touched.stamps], [stamps.shape[0] for stamps in touched.stamps.values()]
    return _matched.get(
        lambda: _find_matched(dict(zip(names, lengths, strict=True)), layout),
        layout,
        rest=(*names, *lengths),
    )


def _find_matched(lengths: Mapping[str, int], layout: Layout) -> dict[str, str]:
    found: dict[str, str] = {}
    for table in layout.tables:
        steps = table.name.split("/")
        ends = ("/".join(steps[i:]) for i in range(len(steps)))
        key = next((end for end in ends if end in lengths), None)
        if key is None:
            continue
        found[table.name] = key
        rows = lengths[key]
        if rows != table.rows:
            raise TrackingError(
                f"table {table.name}: expected {table.rows} stamps, found {rows} under {key!r}; "
                "initialize the TouchState again with the tables as they are"
            )
    for key, count in collections.Counter(found.values()).items():
        if count > 1:
            sharing = [name for name, other in found.items() if other == key]
            raise TrackingError(
                f"stamps {key!r} fit more than one table:\n{paths.listed(sharing)}\n"
                "name the stamps by the tables' whole paths"
            )
    return found
