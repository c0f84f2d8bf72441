# SPDX-License-Identifier: Apache-2.0
"""Row fingerprints: the proof of what changed, from any cause, at 8 bytes per row.

A fingerprint is a hash of the bits of a row and of its slots, so -0.0 and 0.0 differ and a NaN
equals itself. Each word is mixed with a key of its place and the mixed words are added, so the
answer does not depend on how the table is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltackpt.errors import TrackingError
from deltackpt.format import blocks
from deltackpt.format.manifest import Layout
from deltackpt.state.marks import match_touched
from deltackpt.state.touch_state import UNKNOWN, TouchState
from deltackpt.tracking import stamps as stamping
from deltackpt.tracking.bits import bits, folded

#: Table name to field name to array, as ``tables.split`` gives them.
Fields = Mapping[str, Mapping[str, Any]]

#: How many rows an error lists.
_LISTED = 20


def fingerprint(table: Any, slots: Sequence[Any] = ()) -> jax.Array:
    """Hashes each row of a table together with its slots.

    Args:
      table: (rows, ...) of any number type.
      slots: arrays of the same first axis, in a fixed order.

    Returns:
      (rows, 2) uint32: two lanes of one 64-bit fingerprint. Two different rows share one with a
      probability of about 2**-64.

    Example:
      >>> before = fingerprint(jnp.zeros((3, 2)))
      >>> after = fingerprint(jnp.zeros((3, 2)).at[1, 0].set(-0.0))
      >>> changed_rows(before, after).tolist()
      [1]
    """
    return _fingerprint(_uncut(table), tuple(map(_uncut, slots)))


def changed_rows(old: Any, new: Any) -> np.ndarray:
    """Rows whose fingerprints differ, int64 ascending.

    Raises:
      TrackingError: the fingerprints are of different numbers of rows.
    """
    old, new = np.asarray(old), np.asarray(new)
    if old.shape != new.shape:
        raise TrackingError(
            f"fingerprints: expected {old.shape[0]} rows as before, found {new.shape[0]}; "
            "take them again after a table has grown"
        )
    return np.flatnonzero((old != new).any(axis=1))


def fingerprints(fields: Fields, layout: Layout) -> dict[str, jax.Array]:
    """Fingerprints of every table with its slots, by table name.

    Args:
      fields: the tables and slots.
      layout: the layout of the same split. Slots that are ``always`` written are left out.
    """
    return {
        name: fingerprint(fields[name][blocks.VALUES], [fields[name][slot] for slot in slots])
        for name, slots in _hashed_slots(layout).items()
    }


def _hashed_slots(layout: Layout) -> dict[str, list[str]]:
    """Slots that a fingerprint covers, by table name: those that are not ``always`` written."""
    groups = layout.group_by_name
    return {
        table.name: [
            spec.name
            for spec in groups[table.group].fields
            if spec.name != blocks.VALUES and not spec.always
        ]
        for table in layout.tables
    }


def verify_tracking(
    before: Mapping[str, Any],
    fields: Fields,
    touched: TouchState,
    since_clock: int,
    layout: Layout,
) -> None:
    """Proves that every row that changed is marked.

    Args:
      before: ``fingerprints`` taken when the clock stood at ``since_clock``.
      fields: the tables and slots now.
      touched: the TouchState now.
      since_clock: the clock then.
      layout: the layout of ``fields``.

    Raises:
      TrackingError: rows changed that are not marked; names every such table and its rows.
    """
    names = match_touched(touched, layout)
    stamps = {table: {"": touched.stamps[key]} for table, key in names.items()}
    check_marked(before, fingerprints(fields, layout), stamps, {"": since_clock})


def check_marked(
    before: Mapping[str, Any],
    now: Mapping[str, jax.Array],
    stamps: Mapping[str, Mapping[str, Any]],
    since: Mapping[str, int],
) -> None:
    """Checks that every row that changed on this process is stamped.

    Args:
      before: table name to fingerprints, (rows, 2), as they were.
      now: table name to fingerprints.
      stamps: table name to the place of each TouchState that has stamps of it, to these, (rows,).
      since: place of each TouchState to its clock when ``before`` was taken.

    Raises:
      TrackingError: rows changed, and no stamp of them is after its clock; names them.
    """
    faults = []
    for table, rows in now.items():
        if table not in before:
            raise TrackingError(f"table {table}: no fingerprints of it were taken before")
        if before[table].shape != rows.shape:
            raise TrackingError(
                f"table {table}: expected {before[table].shape[0]} rows as before, found "
                f"{rows.shape[0]}; take the fingerprints again after a table has grown"
            )
        missed = _changed(_like(before[table], rows), rows)
        for place, marked in stamps[table].items():
            untouched = jnp.asarray(marked) <= since[place]
            missed = missed & _like(untouched, missed)
        found = _local_rows(missed)
        if found.size:
            shown = ", ".join(map(str, found[:_LISTED].tolist()))
            more = f", ... ({found.size} in all)" if found.size > _LISTED else ""
            faults.append(f"  table {table}: rows {shown}{more}")
    if faults:
        clocks = ", ".join(str(clock) for clock in since.values())
        raise TrackingError(
            "rows changed since clock "
            f"{clocks} that are not marked, and a delta would lose them:\n"
            + "\n".join(faults)
            + "\nmark every id that the update moves, or wrap the optimizer in track()"
        )


def _local_rows(flags: jax.Array) -> np.ndarray:
    """Rows of this process, ascending, whose flag is set."""
    found = [
        np.flatnonzero(np.asarray(shard.data)) + (shard.index[0].start or 0)
        for shard in flags.addressable_shards
    ]
    return np.unique(np.concatenate(found))


class RowTracker:
    """Finds the rows that change from one save to the next, where no training step marks them.

    It keeps the fingerprints of the last look beside a ``TouchState``: 12 bytes per row, on the
    devices that hold the rows. A row whose bits changed and changed back between two looks is as
    it was. Not thread-safe.

    Example:
      >>> from deltackpt import Tables, split
      >>> def look(table):
      ...     parts = split({"emb": table}, Tables(select="emb"))
      ...     return tracker.look(parts.fields, parts.layout).stamps["emb"].tolist()
      >>> tracker = RowTracker()
      >>> table = jnp.zeros((3, 2))
      >>> look(table)  # Nothing was known of any row.
      [1, 1, 1]
      >>> look(table.at[1].set(5.0))
      [1, 2, 1]
    """

    def __init__(self) -> None:
        self._before: dict[str, jax.Array] = {}
        self._touched = stamping.init({})

    @property
    def touched(self) -> TouchState:
        """What the last look found."""
        return self._touched

    def start(self, fields: Fields, layout: Layout, identity: int | None = None) -> None:
        """Takes tables and slots as they were stored: nothing was touched since, at clock 0.

        Args:
          fields: the tables and slots as restored.
          layout: their layout.
          identity: whose clock starts; None draws one.
        """
        fields = on_devices(fields, layout)
        now = fingerprints(fields, layout)
        tables = {name: fields[name][blocks.VALUES] for name in now}
        self._take(now, stamping.init(tables, identity=identity))

    def look(self, fields: Fields, layout: Layout) -> TouchState:
        """Advances the clock and stamps the rows that changed since the last look, or the start.

        Every row of tables that are new, or that have another number of rows, is stamped.

        Args:
          fields: the tables and slots now.
          layout: their layout.

        Returns:
          The TouchState, for ``save(touched=...)``.
        """
        fields = on_devices(fields, layout)
        now = fingerprints(fields, layout)
        like = {name: fields[name][blocks.VALUES] for name in now}
        stamps = stamping.init(like, identity=UNKNOWN).stamps
        changed = {}
        for name, rows in now.items():
            before = self._before.get(name)
            if before is None or before.shape != rows.shape:
                mask = jnp.ones(rows.shape[0], bool)
            else:
                mask = _changed(_like(before, rows), rows)
                stamps[name] = _like(self._touched.stamps[name], stamps[name])
            changed[name] = _like(mask, stamps[name])
        self._take(now, stamping.mark_rows(self._touched._replace(stamps=stamps), changed))
        return self._touched

    def _take(self, now: dict[str, jax.Array], found: TouchState) -> None:
        """Both or, where the devices fail, neither; then the caller may change host arrays."""
        self._before, self._touched = jax.block_until_ready((now, found))


def on_devices(fields: Fields, layout: Layout) -> dict[str, dict[str, jax.Array]]:
    """The tables, each with the slots that are hashed beside it: what ``fingerprints`` takes.

    A table of the host stays on a CPU device: an accelerator may have no room for it.
    """
    found = {}
    for name, slots in _hashed_slots(layout).items():
        leaves = fields[name]
        table = leaves[blocks.VALUES]
        if not isinstance(table, jax.Array):
            table = jax.device_put(_uncut(np.asarray(table)), _host_device())
        found[name] = {blocks.VALUES: table} | {
            slot: _beside(leaves[slot], table) for slot in slots
        }
    return found


def _host_device() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out.
        return jax.local_devices()[0]


def _uncut(array: Any) -> Any:
    """An array of the host whose 64-bit numbers jax would cut, as words of 32 bits."""
    if isinstance(array, jax.Array):
        return array
    array = np.asarray(array)
    if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype:
        return array
    rows, *trailing = array.shape
    return np.ascontiguousarray(array).reshape(rows, math.prod(trailing)).view(np.uint32)


def _beside(array: Any, other: jax.Array) -> jax.Array:
    """An array of rows on the devices of another one: as it is where it is there."""
    if isinstance(array, jax.Array) and array.sharding.device_set == other.sharding.device_set:
        return array
    return _like(array, other)


def _like(array: Any, other: jax.Array) -> jax.Array:
    """An array of rows, placed like the rows of another one."""
    sharding = other.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = sharding.update(spec=jax.sharding.PartitionSpec(*sharding.spec[:1]))
    if not isinstance(array, jax.Array):
        return jax.device_put(_uncut(array), sharding)
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    if array.is_fully_addressable and not sharding.is_fully_addressable:
        return jax.device_put(np.asarray(array), sharding)
    return jax.device_put(array, sharding)


@jax.jit
def _changed(before: jax.Array, now: jax.Array) -> jax.Array:
    return (before != now).any(axis=1)


@jax.jit
def _fingerprint(table: jax.Array, slots: tuple[jax.Array, ...]) -> jax.Array:
    total = jnp.zeros((), jnp.uint32)
    for number, array in enumerate((table, *slots)):
        words = _words(*folded(jnp.asarray(array)))
        key = _keys(words.shape[1:], number)
        row = tuple(range(1, words.ndim))
        lanes = [
            jnp.sum(
                _mix(words * jnp.uint32(odd) ^ (key + jnp.uint32(seed))), axis=row, dtype=jnp.uint32
            )
            for odd, seed in ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F))
        ]
        total = total + _as_sharded(jnp.stack(lanes, axis=1), total)
    return _mix(total)


def _as_sharded(lanes: jax.Array, total: jax.Array) -> jax.Array:
    """The lanes of a field whose rows lie elsewhere than those of the table (Explicit meshes)."""
    wanted = jax.typeof(total).sharding
    if total.ndim == 0 or jax.typeof(lanes).sharding == wanted:
        return lanes
    return jax.sharding.reshard(lanes, wanted)


def _words(array: jax.Array) -> jax.Array:
    """The bits of each row as uint32 words: (rows, ...), cut as the array is."""
    patterns = bits(array)
    if patterns.dtype == jnp.uint64:
        patterns = lax.bitcast_convert_type(patterns, jnp.uint32)
    return patterns.astype(jnp.uint32)


def _keys(shape: tuple[int, ...], number: int) -> jax.Array:
    """A key for each word of a row, different for each field."""
    place = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return _mix(place * jnp.uint32(2) + jnp.uint32(1)) + _mix(jnp.uint32(number + 1))


def _mix(word: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: a bijection on 32 bits in which every bit moves every bit."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
