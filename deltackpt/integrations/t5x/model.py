# SPDX-License-Identifier: Apache-2.0
"""T5X's train state as leaves by '/'-joined path, and the placement of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike

from deltackpt import inspect
from deltackpt.cached import cached_property
from deltackpt.errors import TemplateMismatch
from deltackpt.format.naming import Leaf, PyTree, listed
from deltackpt.integrations.t5x.settings import state_utils


class TrainState(Protocol):
    """The part of T5X's train state that is used; ``step`` is its number of training steps."""

    @property
    def step(self) -> Leaf:
        """Number of training steps."""
        ...

    def state_dict(self) -> dict[str, PyTree]:
        """Returns the leaves in nested dicts."""
        ...

    def restore_state(self, state_dict: Mapping[str, PyTree]) -> TrainState:
        """Returns the state with other leaves."""
        ...


class DataLayout(Protocol):
    """The part of T5X's data layout that is used: the shard of the data of this process."""

    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool


class Partitioner(Protocol):
    """The part of T5X's partitioner that is used."""

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of the devices."""
        ...

    def get_data_layout(self) -> DataLayout:
        """Returns which part of the data this process reads."""
        ...

    def get_mesh_axes(self, train_state: TrainState) -> TrainState:
        """Returns the state with a partition spec in place of each leaf."""
        ...


#: A state transformation of T5X: it receives state dicts, and returns a changed one.
Transformation = Callable[..., PyTree]


class ModelLeaves:
    """The abstract leaves of a train state, by path."""

    def __init__(self, train_state: TrainState, partitioner: Partitioner):
        self._train_state = train_state
        self._partitioner = partitioner

    def chosen(
        self, stored: dict[str, Leaf], transformation_fns: Sequence[Transformation]
    ) -> dict[str, Leaf]:
        """Returns the lazy leaf for each of the model's leaves, after T5X's functions."""
        tree = traverse_util.unflatten_dict(stored, sep="/")
        for fn in transformation_fns:
            tree = fn(tree, self._train_state.state_dict())
        return {name: leaf for name, leaf in flat(tree).items() if name in self._leaves}

    def is_own(self, stored: Mapping[str, Leaf], chosen: Mapping[str, Leaf]) -> bool:
        """Returns whether a checkpoint can be restored as it is, leaf by leaf."""
        return stored.keys() == chosen.keys() == self._leaves.keys() and all(
            leaf is stored[name] and leaf.shape == self._leaves[name].shape
            for name, leaf in chosen.items()
        )

    def template(self, stored: Mapping[str, Leaf]) -> PyTree:
        """Returns the template for resuming: the model's tree and placement, the stored dtypes."""
        return self._tree(
            {
                name: jax.ShapeDtypeStruct(
                    leaf.shape, stored[name].dtype, sharding=self._shardings[name]
                )
                for name, leaf in self._leaves.items()
            }
        )

    def read(self, chosen: Mapping[str, Leaf]) -> dict[str, jax.Array]:
        """Reads this process's part of these leaves onto its devices, without other processes."""
        return {name: self._place(name, leaf) for name, leaf in chosen.items()}

    def placed(
        self,
        found: Mapping[str, Leaf],
        fallback_state: Mapping[str, PyTree],
        dtype: DTypeLike | None,
    ) -> dict[str, PyTree]:
        """Returns the model's state dict on the devices, from ``found`` or else ``fallback_state``.

        ``dtype`` is that of the parameters; None keeps the stored dtypes.
        """
        found = {**flat(fallback_state), **found}
        missing = self._leaves.keys() - found.keys()
        if missing:
            raise TemplateMismatch(
                f"the model has leaves that the checkpoint lacks:\n{listed(missing)}\n"
                "rename with an assignment_map, or set fallback_to_scratch"
            )
        state = self._tree({name: self._place(name, found[name]) for name in self._leaves})
        return {**state, "target": cast(state["target"], dtype)}

    @cached_property
    def _leaves(self) -> dict[str, Leaf]:
        return flat(self._train_state.state_dict())

    @cached_property
    def _shardings(self) -> dict[str, jax.sharding.NamedSharding]:
        axes = flat(self._partitioner.get_mesh_axes(self._train_state).state_dict())
        replicated = jax.sharding.PartitionSpec()
        return {
            name: jax.sharding.NamedSharding(self._partitioner.mesh, axes.get(name, replicated))
            for name in self._leaves
        }

    def _place(self, name: str, leaf: Leaf) -> jax.Array:
        shape = self._leaves[name].shape
        if tuple(leaf.shape) != tuple(shape):
            raise TemplateMismatch(
                f"{name}: expected the model's shape {list(shape)}, found {list(leaf.shape)} in "
                "the checkpoint; drop it with an assignment_map and set fallback_to_scratch"
            )
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, self._shardings[name])
        # A lazy leaf reads only the parts that this process needs.
        return jax.make_array_from_callback(
            shape, self._shardings[name], lambda index: np.asarray(leaf[index])
        )

    def _tree(self, leaves: Mapping[str, Leaf]) -> dict[str, PyTree]:
        """Returns the model's state dict with other leaves; empty nodes are kept."""
        whole = traverse_util.flatten_dict(
            self._train_state.state_dict(), keep_empty_nodes=True, sep="/"
        )
        return traverse_util.unflatten_dict({**whole, **leaves}, sep="/")


def leaves_of(found: inspect.Step) -> dict[str, Leaf]:
    """Returns lazy leaves of a step; shapes and dtypes are read now, values when indexed."""
    leaves: dict[str, Leaf] = {
        path: table.field(field)
        for table in found.tables.values()
        for field, path in table.leaves.items()
    }
    leaves |= {n: leaf for n, leaf in found.dense.items() if leaf.kind not in ("None", "empty")}
    for leaf in leaves.values():
        leaf.shape  # noqa: B018
    return leaves


def chosen_values(
    chosen: Mapping[str, Leaf], stored: Mapping[str, Leaf], values: Mapping[str, Leaf]
) -> dict[str, Leaf]:
    """Returns the values of leaves that ``ModelLeaves.chosen`` chose from ``stored``."""
    names = {id(leaf): name for name, leaf in stored.items()}
    return {
        name: values[names[id(leaf)]] if id(leaf) in names else leaf
        for name, leaf in chosen.items()
    }


def flat(tree: PyTree) -> dict[str, Leaf]:
    """Returns leaves by '/'-joined path, without empty nodes."""
    leaves = state_utils.flatten_state_dict(tree)
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def cast(target: PyTree, dtype: DTypeLike | None) -> PyTree:
    """Casts parameters to another dtype; leaves that are not floating-point are kept."""

    def with_dtype(leaf: Leaf) -> Leaf:
        changes = leaf.dtype != dtype and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if changes else leaf

    return target if dtype is None else jax.tree.map(with_dtype, target)
