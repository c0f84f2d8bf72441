# SPDX-License-Identifier: Apache-2.0
"""T5X's train state as leaves by '/'-joined path, and the placement of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from deltackpt import inspect
from deltackpt.errors import TemplateMismatch
from deltackpt.format.globs import listed
from deltackpt.integrations.t5x.modules import state_utils


class ModelLeaves:
    """The abstract leaves of a train state, by path."""

    def __init__(self, train_state: Any, partitioner: Any):
        """Takes a T5X train state with abstract leaves, and its partitioner."""
        self._train_state = train_state
        self._partitioner = partitioner

    def chosen(
        self, stored: dict[str, Any], transformation_fns: Sequence[Callable[..., Any]]
    ) -> dict[str, Any]:
        """Returns the lazy leaf for each of the model's leaves, after T5X's functions."""
        tree = traverse_util.unflatten_dict(stored, sep="/")
        for fn in transformation_fns:
            tree = fn(tree, self._train_state.state_dict())
        return {name: leaf for name, leaf in flat(tree).items() if name in self._leaves}

    def is_own(self, stored: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
        """Returns whether a checkpoint can be restored as it is, leaf by leaf."""
        return stored.keys() == chosen.keys() == self._leaves.keys() and all(
            leaf is stored[name] and leaf.shape == self._leaves[name].shape
            for name, leaf in chosen.items()
        )

    def template(self, stored: Mapping[str, Any]) -> Any:
        """Returns the template for resuming.

        It has the model's tree and placement, and the checkpoint's dtypes.
        """
        return self._tree(
            {
                name: jax.ShapeDtypeStruct(
                    leaf.shape, stored[name].dtype, sharding=self._shardings[name]
                )
                for name, leaf in self._leaves.items()
            }
        )

    def read(self, chosen: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Reads this process's part of these leaves onto its devices; waits for no other process.

        Raises:
          TemplateMismatch: a leaf's shape differs from the model's.
          RestoreError: a leaf cannot be read.
        """
        return {name: self._place(name, leaf) for name, leaf in chosen.items()}

    def placed(
        self, found: Mapping[str, Any], fallback_state: Mapping[str, Any], dtype: Any
    ) -> Any:
        """Returns the model's state dict with its leaves on the devices.

        Args:
          found: leaves by path, lazy ones or arrays.
          fallback_state: T5X state dict that provides the leaves that were not found.
          dtype: dtype of the parameters; None keeps the stored dtypes.

        Raises:
          TemplateMismatch: a leaf is missing, or its shape differs from the model's.
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

    @functools.cached_property
    def _leaves(self) -> dict[str, Any]:
        """The model's abstract leaves."""
        return flat(self._train_state.state_dict())

    @functools.cached_property
    def _shardings(self) -> dict[str, jax.sharding.NamedSharding]:
        axes = flat(self._partitioner.get_mesh_axes(self._train_state).state_dict())
        replicated = jax.sharding.PartitionSpec()
        return {
            name: jax.sharding.NamedSharding(self._partitioner.mesh, axes.get(name, replicated))
            for name in self._leaves
        }

    def _place(self, name: str, leaf: Any) -> jax.Array:
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

    def _tree(self, leaves: Mapping[str, Any]) -> Any:
        """The model's state dict with other leaves; empty nodes are kept."""
        whole = traverse_util.flatten_dict(
            self._train_state.state_dict(), keep_empty_nodes=True, sep="/"
        )
        return traverse_util.unflatten_dict({**whole, **leaves}, sep="/")


def leaves_of(found: inspect.Step) -> dict[str, Any]:
    """Returns lazy leaves of a step; shapes and dtypes are read now, values when indexed.

    Raises:
      RestoreError: the step cannot be read.
    """
    leaves: dict[str, Any] = {
        path: table.field(field)
        for table in found.tables.values()
        for field, path in table.leaves.items()
    }
    leaves |= {n: leaf for n, leaf in found.dense.items() if leaf.kind not in ("None", "empty")}
    for leaf in leaves.values():
        leaf.shape  # noqa: B018
    return leaves


def taken(
    chosen: Mapping[str, Any], stored: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of the chosen lazy leaves.

    Args:
      chosen: the result of ``ModelLeaves.chosen``.
      stored: the lazy leaves that were passed to ``ModelLeaves.chosen``.
      values: the values of ``stored``, under the same paths.
    """
    names = {id(leaf): name for name, leaf in stored.items()}
    return {
        name: values[names[id(leaf)]] if id(leaf) in names else leaf
        for name, leaf in chosen.items()
    }


def flat(tree: Any) -> dict[str, Any]:
    """Returns leaves by '/'-joined path, without empty nodes."""
    leaves = state_utils.flatten_state_dict(tree)
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def cast(target: Any, dtype: Any) -> Any:
    """Casts parameters to another dtype; leaves that are not floating-point are kept."""

    def with_dtype(leaf: Any) -> Any:
        changes = leaf.dtype != dtype and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if changes else leaf

    return target if dtype is None else jax.tree.map(with_dtype, target)
