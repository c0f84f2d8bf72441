# SPDX-License-Identifier: Apache-2.0
"""Row fingerprints: the proof of what changed, from any cause, at 8 bytes per row.

A fingerprint is a hash of the bits of a row and of its slots, so -0.0 and 0.0 differ and a NaN
equals itself. Each word is mixed with a key of its place and the mixed words are added, so the
answer does not depend on how the table is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltackpt import blocks
from deltackpt.bits import bits
from deltackpt.errors import TrackingError
from deltackpt.manifest import Layout
from deltackpt.tables import match_touched
from deltackpt.touched import TouchState

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
    return _fingerprint(table, tuple(slots))


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


def fingerprints(fields: Mapping[str, Mapping[str, Any]], layout: Layout) -> dict[str, jax.Array]:
    """Fingerprints of every table with its slots, by table name.

    Args:
      fields: table name to field name to array, as ``tables.split`` gives them.
      layout: the layout of the same split. Slots that are ``always`` written are left out.
    """
    groups = {group.name: group for group in layout.groups}
    result = {}
    for table in layout.tables:
        names = [spec.name for spec in groups[table.group].fields if not spec.always]
        arrays = [fields[table.name][name] for name in names if name != blocks.VALUES]
        result[table.name] = fingerprint(fields[table.name][blocks.VALUES], arrays)
    return result


def verify_tracking(
    before: Mapping[str, Any],
    fields: Mapping[str, Mapping[str, Any]],
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
    faults = []
    for table, now in fingerprints(fields, layout).items():
        if table not in before:
            raise TrackingError(f"table {table}: no fingerprints of it were taken before")
        changed = changed_rows(before[table], now)
        stamps = np.asarray(touched.stamps[names[table]])
        missed = changed[stamps[changed] <= since_clock]
        if missed.size:
            shown = ", ".join(map(str, missed[:_LISTED].tolist()))
            more = f", ... ({missed.size} in all)" if missed.size > _LISTED else ""
            faults.append(f"  table {table}: rows {shown}{more}")
    if faults:
        raise TrackingError(
            "rows changed since clock "
            f"{since_clock} that are not marked, and a delta would lose them:\n"
            + "\n".join(faults)
            + "\nmark every id that the update moves, or wrap the optimizer in track()"
        )


@jax.jit
def _fingerprint(table: jax.Array, slots: tuple[jax.Array, ...]) -> jax.Array:
    total = jnp.zeros((), jnp.uint32)
    for number, array in enumerate((table, *slots)):
        words = _words(jnp.asarray(array))
        key = _keys(words.shape[1:], number)
        lanes = [
            jnp.sum(
                _mix(words * jnp.uint32(odd) ^ (key + jnp.uint32(seed))), axis=1, dtype=jnp.uint32
            )
            for odd, seed in ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F))
        ]
        total = total + jnp.stack(lanes, axis=1)
    return _mix(total)


def _words(array: jax.Array) -> jax.Array:
    """The bits of each row as uint32 words: (rows, words)."""
    patterns = bits(array)
    if patterns.dtype == jnp.uint64:
        patterns = lax.bitcast_convert_type(patterns, jnp.uint32)
    return patterns.astype(jnp.uint32).reshape(array.shape[0], -1)


def _keys(shape: tuple[int, ...], number: int) -> jax.Array:
    """A key for each word of a row, different for each field."""
    place = lax.iota(jnp.uint32, shape[0])
    return _mix(place * jnp.uint32(2) + jnp.uint32(1)) + _mix(jnp.uint32(number + 1))


def _mix(word: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: a bijection on 32 bits in which every bit moves every bit."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
