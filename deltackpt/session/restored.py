# SPDX-License-Identifier: Apache-2.0
"""Decides whether a state is still the restored one, so that saving its step again saves nothing.

A ``jax.Array`` never changes: the restored object proves that a leaf is unchanged. Other leaves are
compared bit for bit with the step, which is read again only if it is itself saved.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt.coordination import Coordinator
from deltackpt.format.naming import Leaf, PyTree
from deltackpt.handlers import orbax_dense
from deltackpt.state.placement import same_bits
from deltackpt.state.stacks import array_of
from deltackpt.state.tables import Split

#: Read there, a leaf takes no memory of the accelerator.
_HOST_MEMORY = "pinned_host"
_PLACED = (jax.sharding.NamedSharding, jax.sharding.SingleDeviceSharding)


class RestoredState:
    """The restored state; keeps no array alive."""

    def __init__(self, split: Split, equals: Callable[[Split], bool]):
        """Notes a state; ``equals`` reads the step again, with the same result on every process."""
        self._fields = [*map(_reference, arrays_of(split))]
        self._dense = [*map(_reference, jax.tree.leaves(split.dense))]
        self._equals = equals

    def is_same(
        self, split: Split, coordinator: Coordinator, *, marked: bool, hashed: bool
    ) -> bool:
        """Returns whether a state is the restored one, alike on every process; each must call this.

        If rows are ``marked`` as touched, it is another one; if ``hashed``, fingerprints prove that
        no row has changed.
        """
        known = not marked and _are(self._dense, jax.tree.leaves(split.dense))
        known = known and (hashed or _are(self._fields, [*arrays_of(split)]))
        found = coordinator.gather("comparing the state with the restored one", [marked, known])
        if any(marked for marked, _ in found):
            return False
        return all(known for _, known in found) or self._equals(split)


def to_compare(split: Split) -> Split:
    """Returns a state as the template by which a step is read to be compared with it."""
    return dataclasses.replace(split, dense=jax.tree.map(_on_host, split.dense))


def same_leaves(found: dict[str, PyTree], leaves: dict[str, PyTree]) -> bool:
    """Returns whether dense leaves, nested dicts, are equal bit for bit on this process."""
    one, two = orbax_dense.by_key(found), orbax_dense.by_key(leaves)
    return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in two)


def arrays_of(split: Split) -> Iterator[Leaf]:
    """Yields the arrays of tables and slots."""
    return (array_of(leaf) for fields in split.fields.values() for leaf in fields.values())


def _reference(leaf: object) -> Callable[[], object]:
    """Returns what an unchanged leaf is; None for an array that may be modified in place."""
    if isinstance(leaf, jax.Array):
        return weakref.ref(leaf)
    return (lambda: None) if isinstance(leaf, np.ndarray) else (lambda: leaf)


def _are(restored: list[Callable[[], object]], leaves: list[Leaf]) -> bool:
    return len(restored) == len(leaves) and all(
        known() is leaf for known, leaf in zip(restored, leaves, strict=True)
    )


def _on_host(leaf: object) -> Leaf:
    """Returns a template of an array in host memory, with its shards; any other leaf as it is."""
    if not isinstance(leaf, jax.Array) or _is_key(leaf):
        return leaf
    sharding = leaf.sharding
    if not isinstance(sharding, _PLACED):
        return leaf
    memories = {memory.kind for memory in next(iter(sharding.device_set)).addressable_memories()}
    if _HOST_MEMORY in memories:
        sharding = sharding.with_memory_kind(_HOST_MEMORY)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _is_key(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _same(found: object, leaf: object) -> bool:
    if isinstance(leaf, jax.Array):
        if not isinstance(found, jax.Array) or found.dtype != leaf.dtype:
            return False
        if _is_key(leaf):
            found, leaf = jax.random.key_data(found), jax.random.key_data(leaf)
        pieces = {shard.device: shard.data for shard in found.addressable_shards}
        return all(
            shard.device in pieces and same_bits(pieces[shard.device], shard.data)
            for shard in leaf.addressable_shards
        )
    if type(found) is not type(leaf):
        return False
    if isinstance(leaf, (np.ndarray, np.generic, int, float)):
        return same_bits(found, leaf)
    return bool(found == leaf)
