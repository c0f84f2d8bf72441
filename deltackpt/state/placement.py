# SPDX-License-Identifier: Apache-2.0
"""Placement of arrays: devices, memory kind, layout, and whether they are committed.

JAX moves an *uncommitted* array, which was not placed explicitly, to the devices of a computation.
It rejects computations whose arguments are committed to different devices. An array that replaces
an uncommitted one must therefore be created without a device.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Format

from deltackpt.errors import DeltackptError, TemplateMismatch
from deltackpt.state import contexts, paths

_Box = TypeVar("_Box")
#: Memory kinds that device programs cannot gather rows from.
HOST_MEMORY = ("pinned_host", "unpinned_host")


def sharding_of(leaf: Any) -> jax.sharding.Sharding | None:
    """Returns the sharding that a leaf must have; None for uncommitted arrays and host leaves."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and not leaf.committed:
        return None
    return getattr(leaf, "sharding", None)


def on_host(array: Any) -> bool:
    """Returns whether an array is in host memory, even if devices cannot compute there."""
    if not isinstance(array, jax.Array):
        return True
    return all(device.platform == "cpu" for device in array.devices()) or in_host_memory(array)


def in_host_memory(array: Any) -> bool:
    """Returns whether a device's array is in host memory.

    Device programs cannot gather rows there.
    """
    return isinstance(array, jax.Array) and array.sharding.memory_kind in HOST_MEMORY


def resolved(template: Any, error: type[DeltackptError] = TemplateMismatch) -> Any:
    """Returns a template whose abstract leaves name existing devices, or no device.

    A ``jax.ShapeDtypeStruct`` cannot express that an array is uncommitted. If it names the default
    device while other leaves are on several devices, its sharding is dropped: no program can use
    arrays that are committed to one device and to several.

    Args:
      template: any pytree.
      error: class of the error to raise.

    Raises:
      DeltackptError: a sharding is over an ``AbstractMesh``, or is a ``PartitionSpec``, and the
        current mesh does not fit it; names each such leaf.
    """
    leaves, treedef = jax.tree.flatten(template)
    abstract = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if not abstract:
        return template
    mesh, faults = jax.sharding.get_mesh(), {}
    for i in abstract:
        try:
            leaves[i] = _on_devices(leaves[i], mesh)
        except _NoMesh as fault:
            faults[i] = fault
    if faults:
        raise error(_described(template, faults, mesh))
    placed = (leaf for leaf in leaves if not isinstance(leaf, Tracer))
    shardings = [one for one in map(sharding_of, placed) if one is not None]
    if any(len(one.device_set) > 1 for one in shardings):
        default = {_default_device()}
        for i in abstract:
            if leaves[i].sharding is not None and leaves[i].sharding.device_set == default:
                leaves[i] = _with_sharding(leaves[i], None)
    return jax.tree.unflatten(treedef, leaves)


class _NoMesh(Exception):
    """Raised if the current mesh does not fit a leaf's sharding; names what it is over."""


def _on_devices(leaf: jax.ShapeDtypeStruct, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    try:
        sharding = leaf.sharding
    except TypeError:
        raise _NoMesh("a PartitionSpec alone") from None
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return leaf
    if isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        if mesh.empty or mesh.shape_tuple != sharding.mesh.shape_tuple:
            raise _NoMesh(f"an AbstractMesh of {dict(sharding.mesh.shape)}")
        memory = sharding.memory_kind
        sharding = jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=memory)
    elif mesh.empty:
        return leaf
    # Also a PartitionSpec alone, which means another mesh, or none, later.
    return _with_sharding(leaf, sharding)


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    layout = leaf.format.layout
    if layout is not None and sharding is not None:
        sharding = Format(layout, sharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


def _described(template: Any, faults: Mapping[int, _NoMesh], mesh: jax.sharding.Mesh) -> str:
    keyed = jax.tree.leaves_with_path(template)
    lines = [f"{jax.tree_util.keystr(keyed[i][0])}: over {fault}" for i, fault in faults.items()]
    found = "no current mesh" if mesh.empty else f"the current mesh {dict(mesh.shape)}"
    return (
        f"expected shardings over devices, found {found} and in the template\n"
        f"{paths.listed(lines)}\ncall this under jax.set_mesh(mesh) of the same axes, or give "
        "shardings over a jax.sharding.Mesh"
    )


def _default_device() -> Any:
    """Returns the device that JAX creates arrays on."""
    config: Any = jax.config
    device = config.jax_default_device
    if isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return jax.local_devices()[0] if device is None else device


def put(value: np.ndarray, leaf: Any, *, may_alias: bool = False) -> jax.Array:
    """Creates a ``jax.Array`` from a whole numpy array, placed like a leaf.

    Args:
      value: the same in all processes.
      leaf: an array, or a leaf of a ``resolved`` template.
      may_alias: whether no other code writes to the value.
    """
    sharding = sharding_of(leaf)
    if sharding is None:
        with _uncommitted_like(leaf):
            return jax.device_put(value, may_alias=may_alias)
    if sharding.is_fully_addressable:
        may_alias = may_alias and len(sharding.device_set) == 1
        return _laid_out(jax.device_put(value, sharding, may_alias=may_alias), leaf)
    return _laid_out(
        jax.make_array_from_callback(value.shape, sharding, lambda index: value[index]), leaf
    )


def assembled(
    leaf: Any, boxes: Mapping[Any, _Box], held: Mapping[_Box, np.ndarray], *, may_alias: bool
) -> jax.Array:
    """Creates a ``jax.Array`` from parts in host memory, placed like a leaf.

    Args:
      leaf: an array, or a leaf of a ``resolved`` template; the result has its shape.
      boxes: device to the part that it holds; a single device if the leaf is uncommitted.
      held: the parts in host memory.
      may_alias: whether no other code writes to the parts. The CPU backend then uses parts without
        a copy if only one device holds them; with two devices, donations would overwrite each
        other's rows.
    """
    sharding = sharding_of(leaf)
    if sharding is None:
        [value] = held.values()
        return put(value, leaf, may_alias=may_alias)
    once = {box for box, count in collections.Counter(boxes.values()).items() if count == 1}
    arrays = [
        jax.device_put(
            held[box],
            jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
            may_alias=may_alias and box in once,
        )
        for device, box in boxes.items()
    ]
    # Its dtype is asked for if this process has no part.
    return _laid_out(
        jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays, dtype=leaf.dtype),
        leaf,
    )


def like(array: jax.Array, leaf: Any) -> jax.Array:
    """Moves an array to the placement of a leaf, if that is uncommitted or has a layout.

    If the leaf has a sharding, the array must already have it.
    """
    if sharding_of(leaf) is not None:
        return _laid_out(array, leaf)
    if not array.is_fully_addressable or _lies_like(array, leaf):
        return array
    if not jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return put(np.asarray(array), leaf)
    data = put(np.asarray(jax.random.key_data(array)), leaf)
    with _uncommitted_like(leaf):  # Else the keys are made on the default device.
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


def _lies_like(array: jax.Array, leaf: Any) -> bool:
    """Returns whether an array is uncommitted, and on the device of a leaf if that is an array."""
    if array.committed:
        return False
    return not isinstance(leaf, jax.Array) or array.sharding.device_set == leaf.sharding.device_set


def _uncommitted_like(leaf: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes arrays on the device of an uncommitted leaf; on the default device for other leaves."""
    if not isinstance(leaf, jax.Array):
        return contextlib.nullcontext()
    [device] = leaf.sharding.device_set  # Also of an array that was donated.
    return jax.default_device(device)


def _laid_out(array: Any, leaf: Any) -> jax.Array:
    """Gives an array the device layout of a leaf, if the leaf has one."""
    if array.ndim < 2 or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    wanted = leaf.format.layout
    if wanted is None or wanted == array.format.layout:
        return array
    return jax.device_put(array, Format(wanted, array.sharding))


@contexts.neutral()
def host_copy(array: jax.Array) -> jax.Array:
    """Starts to copy an array to the host; ``np.asarray`` of the result waits for the copy.

    On a GPU, pinned memory receives the copy, and ``np.asarray`` is a view of it.
    ``copy_to_host_async`` fills pageable memory before it returns there: 0.8 ms per MB on an H100,
    where a copy to pinned memory takes 0.02 ms per MB, none of it in this call.
    """
    if array.sharding.memory_kind in HOST_MEMORY:
        return array
    devices = array.devices()
    if len(devices) == 1 and next(iter(devices)).platform == "gpu":
        return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
    array.copy_to_host_async()
    return array
