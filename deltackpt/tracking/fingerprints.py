# SPDX-License-Identifier: Apache-2.0
"""Row fingerprints: detect every changed row, from any cause, at 8 bytes per row.

A fingerprint hashes the bits of a row and of its slots: -0.0 and 0.0 differ, a NaN equals itself.
Each word is mixed with a key of its position, and the sum does not depend on the sharding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from deltackpt import coordination
from deltackpt.errors import TrackingError
from deltackpt.format import row_blocks
from deltackpt.format.manifest import Layout
from deltackpt.state import placement, touch_state
from deltackpt.state.touch_state import (
    UNKNOWN,
    TouchState,
    new_identity,
    with_more_rows,
)
from deltackpt.tracking import stamps as stamping
from deltackpt.tracking.stamps import bits, folded, resharded

#: Table name to field name to array, as ``tables.split`` gives them.
Fields = Mapping[str, Mapping[str, Any]]

#: How many rows an error lists.
_LISTED = 20


@placement.neutral()
def fingerprint(table: object, slots: Sequence[object] = ()) -> jax.Array:
    """Hashes each row of a table together with its slots.

    Args:
      table: (rows, ...) of any number type.
      slots: arrays of the same first axis, in a fixed order.

    Returns:
      (rows, 2) uint32: two lanes of one 64-bit fingerprint. Two different rows share one with a
      probability of about 2**-64.

    Examples:
      >>> before = fingerprint(jnp.zeros((3, 2)))
      >>> after = fingerprint(jnp.zeros((3, 2)).at[1, 0].set(-0.0))
      >>> changed_rows(before, after).tolist()
      [1]
    """
    arrays = [_in_device_memory(array) for array in (table, *slots)]
    # JAX would cut 64-bit numbers of the host, and warn of those that it holds.
    with placement.on_device_of(table), jax.enable_x64(True):
        return _fingerprint(arrays[0], tuple(arrays[1:]))


@placement.neutral()
def changed_rows(old: object, new: object) -> np.ndarray:
    """Returns the indices of rows whose fingerprints differ, int64 ascending.

    Raises:
      TrackingError: the fingerprints have different row counts.
    """
    old, new = np.asarray(old), np.asarray(new)
    if old.shape != new.shape:
        raise TrackingError(
            f"fingerprints: expected {old.shape[0]} rows as before, found {new.shape[0]}; "
            "compute them again after a table has grown"
        )
    return np.flatnonzero((old != new).any(axis=1))


def fingerprints(fields: Fields, layout: Layout) -> dict[str, jax.Array]:
    """Returns the fingerprints of every table with its slots, by table name.

    ``fields`` and ``layout`` are of one split. Slots that are ``always`` written are excluded.
    """
    return {
        name: fingerprint(fields[name][row_blocks.VALUES], [fields[name][slot] for slot in slots])
        for name, slots in _hashed_slots(layout).items()
    }


def _hashed_slots(layout: Layout) -> dict[str, list[str]]:
    """Returns the slots that a fingerprint covers, by table name: those not ``always`` written."""
    groups = layout.group_by_name
    return {
        table.name: [
            spec.name
            for spec in groups[table.group].fields
            if spec.name != row_blocks.VALUES and not spec.always
        ]
        for table in layout.tables
    }


@placement.neutral()
def check_marked(
    before: Mapping[str, Any],
    now: Mapping[str, jax.Array],
    stamps: Mapping[str, Mapping[str, Any]],
    since: Mapping[str, int],
) -> None:
    """Raises ``TrackingError`` if a row changed on this process that no TouchState stamped since.

    ``stamps`` maps table to path of a TouchState to stamps, ``since`` such a path to its earlier
    clock.
    """
    faults = []
    for table, rows in now.items():
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
    found = [
        np.flatnonzero(np.asarray(shard.data)) + (shard.index[0].start or 0)
        for shard in flags.addressable_shards
    ]
    return np.unique(np.concatenate(found))


class RowTracker:
    """Finds the rows that change between saves, without changes to the training step.

    It keeps the fingerprints of the last call and a ``TouchState``: 12 bytes per row, on the
    devices that hold the rows. A row that changed and changed back between two calls is considered
    unchanged. Not thread-safe.

    Examples:
      >>> from deltackpt import Tables
      >>> from deltackpt.handlers import split
      >>> def update(table):
      ...     pieces = split({"emb": table}, Tables(select="emb"))
      ...     return tracker.update(pieces.fields, pieces.layout).stamps["emb"].tolist()
      >>> tracker = RowTracker()
      >>> table = jnp.zeros((3, 2))
      >>> update(table)  # Without earlier fingerprints, every row counts as touched.
      [1, 1, 1]
      >>> update(table.at[1].set(5.0))
      [1, 2, 1]
    """

    def __init__(self) -> None:
        self._before: dict[str, jax.Array] = {}
        #: Table name to the shape and sharding of the table that its stamps belong to.
        self._tables: dict[str, tuple[object, object]] = {}
        # Each process draws its own: it only has to differ from those of other TouchStates here.
        self._touched = stamping.init({}, identity=new_identity())
        #: Whether a table was new to the last update, which then stamped all its rows.
        self._is_new = True

    @property
    def touched(self) -> TouchState:
        """Returns the TouchState of the last call."""
        return self._touched

    @placement.neutral()
    def changed_share(self) -> float | None:
        """Returns the share of rows that the last call found changed.

        None if a table was new, or if the processes do not see the same rows.
        """
        stamps = self._touched.stamps.values()
        rows = sum(one.shape[0] for one in stamps)
        if self._is_new or not rows:
            return None
        count = coordination.process_count()
        if any(placement.process_span(one.sharding) < count for one in stamps):
            return None  # Each process sees only its own rows of a stacked table.
        clock = int(self._touched.clock)
        # One by one: the tables may be on different devices.
        return sum(int(_count(one, clock)) for one in stamps) / rows

    @placement.neutral()
    def start(self, fields: Fields, layout: Layout, identity: int | None = None) -> None:
        """Records tables and slots as stored, with no touched row and clock 0."""
        fields = on_devices(fields, layout)
        now = fingerprints(fields, layout)
        tables = {name: fields[name][row_blocks.VALUES] for name in now}
        self._store(now, stamping.init(tables, identity=identity), _placed(tables))

    @placement.neutral()
    def update(self, fields: Fields, layout: Layout) -> TouchState:
        """Advances the clock and stamps the rows that changed since the last call.

        All rows of a new table are stamped. The next delta contains all rows by which a table has
        grown, stamped or not.
        """
        fields = on_devices(fields, layout)
        now = fingerprints(fields, layout)
        tables = {name: fields[name][row_blocks.VALUES] for name in now}
        placed = _placed(tables)
        # The stamps of other tables are where they belong.
        moved = {name: tables[name] for name in now if self._tables.get(name) != placed[name]}
        fresh = stamping.init(moved, identity=UNKNOWN).stamps if moved else {}
        stamps, changed, is_new = {}, {}, False
        for name, rows in now.items():
            before = self._before.get(name)
            count = rows.shape[0]
            if before is None or before.shape[0] > count:
                stamps[name], is_new = fresh[name], True
                mask = jnp.ones(count, bool)
            else:
                before = with_more_rows(before, count)
                mask = _changed(_like(before, rows), rows)
                stamps[name] = with_more_rows(self._touched.stamps[name], count)
                if name in fresh:
                    stamps[name] = _like(stamps[name], fresh[name])
            changed[name] = _like(mask, stamps[name])
        found = touch_state.mark_rows(self._touched._replace(stamps=stamps), changed)
        self._store(now, found, placed)
        self._is_new = is_new
        return self._touched

    def _store(
        self,
        now: dict[str, jax.Array],
        found: TouchState,
        placed: dict[str, tuple[object, object]],
    ) -> None:
        """Replaces all, or nothing if the devices fail."""
        self._before, self._touched = jax.block_until_ready((now, found))
        self._tables = placed


def _placed(tables: Mapping[str, jax.Array]) -> dict[str, tuple[object, object]]:
    return {name: (table.shape, table.sharding) for name, table in tables.items()}


@placement.neutral()
def on_devices(fields: Fields, layout: Layout) -> dict[str, dict[str, jax.Array]]:
    """Returns the tables and their hashed slots on devices, as arguments for ``fingerprints``.

    A host's table goes to a CPU device, because an accelerator may lack the memory for it.
    """
    found = {}
    for name, slots in _hashed_slots(layout).items():
        leaves = fields[name]
        table = leaves[row_blocks.VALUES]
        if not isinstance(table, jax.Array):
            with jax.enable_x64(True):
                table = jax.device_put(np.asarray(table), _host_device())
        found[name] = {row_blocks.VALUES: table} | {
            slot: _on_devices_of(leaves[slot], table) for slot in slots
        }
    return found


def _in_device_memory(array: object) -> Any:
    """Moves an array to device memory if it is in host memory, where devices cannot compute."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return array
    kind = next(iter(array.sharding.device_set)).default_memory().kind
    if array.sharding.memory_kind in (None, kind):
        return array
    # Ready before the next table is copied: there may be room for one alone.
    return jax.block_until_ready(jax.device_put(array, array.sharding.with_memory_kind(kind)))


def _host_device() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out.
        return jax.local_devices()[0]


def _on_devices_of(array: object, other: jax.Array) -> jax.Array:
    if isinstance(array, jax.Array) and _devices(array) == _devices(other):
        return array
    return _like(array, other)


def _devices(array: jax.Array) -> list[Any]:
    """Returns an array's devices in order; it must be the same for all arguments of a jit."""
    return [*array.sharding.devices_indices_map(array.shape)]


def _like(array: object, other: jax.Array) -> jax.Array:
    """Returns an array of rows, placed like the rows of another one."""
    sharding = other.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = sharding.update(spec=jax.sharding.PartitionSpec(*sharding.spec[:1]))
    if not isinstance(array, jax.Array):
        return _sent(np.asarray(array), sharding)
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    if array.is_fully_addressable and not sharding.is_fully_addressable:
        return _sent(np.asarray(array), sharding)
    is_local = array.is_fully_addressable or not sharding.is_fully_addressable
    if array.is_fully_replicated and not is_local:
        array = array.addressable_data(0)  # Stamps of a stacked table.
    kind = array.sharding.memory_kind
    if kind is not None and kind != sharding.memory_kind:
        # JAX does not move an array to other devices and to another memory at once.
        array = jax.device_put(array, sharding.with_memory_kind(kind))
    return jax.device_put(array, sharding)


def _sent(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Places a NumPy array, which must be the same on every process, on devices."""
    # ``jax.device_put`` would compare the values of all processes, and NaN differs from itself.
    with jax.enable_x64(True):
        leaf = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        return placement.put(array, leaf)


@jax.jit
def _count(stamps: jax.Array, clock: int) -> jax.Array:
    return (stamps == clock).sum()


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
        found = jnp.stack(lanes, axis=1)
        # The rows of a slot may be placed unlike the table's.
        total = total + (found if total.ndim == 0 else resharded(found, total))
    return _mix(total)


def _words(array: jax.Array) -> jax.Array:
    """Returns the bits of each row as uint32 words, (rows, ...), sharded like the array."""
    patterns = bits(array)
    if patterns.dtype == jnp.uint64:
        patterns = lax.bitcast_convert_type(patterns, jnp.uint32)
    return patterns.astype(jnp.uint32)


def _keys(shape: tuple[int, ...], number: int) -> jax.Array:
    """Returns a key for each word of a row, different for each field."""
    place = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return _mix(place * jnp.uint32(2) + jnp.uint32(1)) + _mix(jnp.uint32(number + 1))


def _mix(word: jax.Array) -> jax.Array:
    """Mixes bits: MurmurHash3's finaliser, a bijection in which every bit affects every bit."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
