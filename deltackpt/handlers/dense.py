# SPDX-License-Identifier: Apache-2.0
"""Dense leaves through Orbax's own PyTree handler.

Orbax 0.12.8 refuses two kinds of leaves that training states hold: numpy scalars, which travel
as arrays without axes, and arrays without elements, which travel as a string that says so.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from deltackpt import codecs
from deltackpt.errors import TemplateMismatch

_EMPTY = "deltackpt:empty"


def handler() -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler for the dense item."""
    return ocp.PyTreeCheckpointHandler()


def save_args(dense: dict[str, Any]) -> ocp.args.PyTreeSave:
    """Save arguments of the dense leaves, nested dicts."""
    return ocp.args.PyTreeSave(jax.tree.map(_storable, dense, is_leaf=_is_none))


def restore_args(abstract: dict[str, Any] | None, stored: Any) -> ocp.args.PyTreeRestore:
    """Restore arguments of the dense leaves.

    Args:
      abstract: what to restore, with the wanted shardings, like the argument of ``save_args``;
        None restores everything, arrays as numpy arrays.
      stored: Orbax's metadata of the stored item.
    """
    if abstract is None:
        kinds = jax.tree.map(_host_args, stored.tree, is_leaf=_is_leaf_metadata)
        return ocp.args.PyTreeRestore(restore_args=kinds)
    item = jax.tree.map(_storable, abstract, is_leaf=_is_none)
    item = jax.tree.map(_with_sharding, item, is_leaf=_is_none)
    return ocp.args.PyTreeRestore(
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)
    )


def check(abstract: dict[str, Any], stored: Any, step: int) -> None:
    """Checks arrays of the template against those of the step; Orbax would cast and reshape.

    Args:
      abstract: what to restore, like the argument of ``save_args``.
      stored: Orbax's metadata of the stored item.
      step: the step, for errors.

    Raises:
      TemplateMismatch: a leaf is missing, or differs in shape or dtype.
    """
    kept = jax.tree.leaves_with_path(stored.tree, is_leaf=_is_leaf_metadata)
    found = {jax.tree_util.keystr(path): leaf for path, leaf in kept}
    for path, leaf in jax.tree.leaves_with_path(jax.tree.map(_storable, abstract)):
        name = jax.tree_util.keystr(path)
        if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            continue
        have = found.get(name)
        if isinstance(have, ocp.metadata.ScalarMetadata):
            # A Python number, whose abstract form has a dtype of jax's choice.
            continue
        if not isinstance(have, ocp.metadata.ArrayMetadata):
            described = "no such array"
        elif (tuple(have.shape), np.dtype(have.dtype)) == (leaf.shape, leaf.dtype):
            continue
        else:
            described = f"{np.dtype(have.dtype).name}{list(have.shape)}"
        raise TemplateMismatch(
            f"step {step}, dense leaf {name}: expected by the template "
            f"{leaf.dtype.name}{list(leaf.shape)}, found in the step {described}; give the state "
            "that was saved as the template, or restore without one"
        )


def restored(found: dict[str, Any], abstract: dict[str, Any] | None) -> dict[str, Any]:
    """The dense leaves as they were given to ``save_args``."""
    found = jax.tree.map(_original, found, is_leaf=_is_none)
    if abstract is None:
        return found
    return jax.tree.map(_like, found, abstract, is_leaf=_is_none)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _is_leaf_metadata(leaf: Any) -> bool:
    return not isinstance(leaf, (dict, list, tuple))


def _storable(leaf: Any) -> Any:
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and 0 in leaf.shape:
        shape = ",".join(str(size) for size in leaf.shape)
        return f"{_EMPTY}:{np.dtype(leaf.dtype).name}:{shape}"
    return leaf


def _original(leaf: Any) -> Any:
    if isinstance(leaf, str) and leaf.startswith(_EMPTY + ":"):
        dtype, _, shape = leaf.removeprefix(_EMPTY + ":").partition(":")
        array = codecs.without_elements(dtype, shape)
        return leaf if array is None else array
    return leaf


def _like(leaf: Any, abstract: Any) -> Any:
    """Gives back the kind of leaf that the template has where Orbax changed it."""
    if isinstance(abstract, np.generic):
        return abstract.dtype.type(leaf)
    if isinstance(abstract, (jax.Array, jax.ShapeDtypeStruct)) and isinstance(leaf, np.ndarray):
        return jax.device_put(leaf, getattr(abstract, "sharding", None))
    return leaf


def _with_sharding(leaf: Any) -> Any:
    """Restoring without shardings goes to the default device, whatever the topology was."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=default)
    return leaf


def _host_args(metadata: Any) -> ocp.RestoreArgs:
    if isinstance(metadata, ocp.metadata.ArrayMetadata):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.RestoreArgs()
