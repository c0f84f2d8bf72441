# SPDX-License-Identifier: Apache-2.0
"""Placement of arrays on devices, and of their rows on processes.

The caller's mesh, transfer guards and NaN checks are for the user's computations: ``neutral``
leaves them. ``jax_enable_x64`` and the default device stay, since restored arrays depend on them.

A field's sharding splits its table into boxes of rows and columns. If several devices hold a box,
it is divided among them by rows. Every process computes the same division from the shardings alone
and looks only at its own shards, so the work per process does not grow with their number. A device
writes rows only if its process also holds their stamps, which determine what is touched.

JAX moves an *uncommitted* array, which was not placed explicitly, to the devices of a computation,
but rejects arguments that are committed to different devices. An array that replaces an uncommitted
one must therefore be created without a device.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.experimental.layout import Format
from jax.sharding import Sharding

from deltackpt import coordination
from deltackpt.coordination import Device
from deltackpt.errors import DeltackptError, TemplateMismatch, TrackingError
from deltackpt.format import row_blocks
from deltackpt.format.naming import Leaf, PyTree
from deltackpt.format.row_blocks import Box, Span
from deltackpt.state import paths

_config: Any = jax.config
_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Bytes per comparison.
_COMPARED_BYTES = 1 << 20

#: Name in ``jax.config``, the values that change nothing, and what sets the first for a thread.
_NEUTRAL: tuple[
    tuple[str, tuple[object, ...], Callable[..., contextlib.AbstractContextManager[object]]], ...
] = (
    ("jax_numpy_rank_promotion", ("allow",), jax.numpy_rank_promotion),
    ("jax_numpy_dtype_promotion", ("standard",), jax.numpy_dtype_promotion),
    ("jax_debug_nans", (False,), jax.debug_nans),
    ("jax_debug_infs", (False,), jax.debug_infs),
    ("jax_debug_key_reuse", (False,), jax.debug_key_reuse),
    ("jax_disable_jit", (False,), jax.disable_jit),
    ("jax_check_tracer_leaks", (False,), jax.check_tracer_leaks),
    ("jax_no_tracing", (False,), jax.no_tracing),
    ("jax_transfer_guard_host_to_device", ("allow", None), jax.transfer_guard_host_to_device),
    ("jax_transfer_guard_device_to_host", ("allow", None), jax.transfer_guard_device_to_host),
    ("jax_transfer_guard_device_to_device", ("allow", None), jax.transfer_guard_device_to_device),
)


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """Leaves the contexts of the caller; inside a trace the mesh stays, as the program's own."""
    set_now = [
        (context, values[0])
        for name, values, context in _NEUTRAL
        if getattr(_config, name) not in values
    ]
    has_mesh = not jax.sharding.get_abstract_mesh().empty
    if not (set_now or has_mesh):
        yield
        return
    with contextlib.ExitStack() as stack:
        for context, value in set_now:
            stack.enter_context(context(value))
        if has_mesh:
            with contextlib.suppress(ValueError):
                stack.enter_context(jax.set_mesh(None))
        yield


def carried(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wraps a call for another thread, with this thread's settings for new arrays."""
    x64, device = _config.jax_enable_x64, _config.jax_default_device

    @functools.wraps(call)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with neutral(), jax.enable_x64(x64), jax.default_device(device):
            return call(*args, **kwargs)

    return run


def on_device_of(array: object) -> contextlib.AbstractContextManager[object]:
    """Runs programs on the device of an uncommitted array instead of the default device."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or array.committed:
        return contextlib.nullcontext()
    [device] = array.sharding.device_set  # Also of an array that was donated.
    return jax.default_device(device)


_Box = TypeVar("_Box")
#: Memory kinds that device programs cannot gather rows from.
HOST_MEMORY = ("pinned_host", "unpinned_host")


def sharding_of(leaf: object) -> Sharding | None:
    """Returns the sharding that a leaf must have; None for uncommitted arrays and host leaves."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and not leaf.committed:
        return None
    return getattr(leaf, "sharding", None)


def is_split_beyond(leaf: object, axes: int) -> bool:
    """Returns whether a leaf is sharded along another axis than its first ``axes``."""
    sharding, shape = getattr(leaf, "sharding", None), getattr(leaf, "shape", ())
    return sharding is not None and sharding.shard_shape(shape)[axes:] != shape[axes:]


def process_span(sharding: Sharding) -> int:
    """Returns how many processes have devices of a sharding; equal on all processes."""
    return len({*map(coordination.process_of, sharding.device_set)})


def on_host(array: object) -> bool:
    """Returns whether an array is in host memory, even if devices cannot compute there."""
    if not isinstance(array, jax.Array):
        return True
    return all(device.platform == "cpu" for device in array.devices()) or in_host_memory(array)


def in_host_memory(array: object) -> bool:
    """Returns whether a device's array is in host memory, where programs cannot gather rows."""
    return isinstance(array, jax.Array) and array.sharding.memory_kind in HOST_MEMORY


def resolved(template: PyTree, error: type[DeltackptError] = TemplateMismatch) -> PyTree:
    """Returns a template whose abstract leaves name existing devices, or no device.

    A ``jax.ShapeDtypeStruct`` cannot express that an array is uncommitted. If it names the default
    device while other leaves are on several devices, its sharding is dropped: no program can use
    arrays that are committed to one device and to several. Raises ``error`` for an ``AbstractMesh``
    or a ``PartitionSpec`` that the current mesh does not fit.
    """
    leaves, treedef = jax.tree.flatten(template)
    leaves = [_of_type(leaf) if isinstance(leaf, ShapedArray) else leaf for leaf in leaves]
    abstract = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if not abstract:
        return template
    mesh, faults = _current_mesh(), dict[int, str]()
    for i in abstract:
        placed = _on_devices(leaves[i], mesh)
        if isinstance(placed, str):
            faults[i] = placed
        else:
            leaves[i] = placed
    if faults:
        raise error(_described(template, faults, mesh))
    untraced = (leaf for leaf in leaves if not isinstance(leaf, Tracer))
    shardings = [one for one in map(sharding_of, untraced) if one is not None]
    if any(len(one.device_set) > 1 for one in shardings):
        default = {_default_device()}
        for i in abstract:
            if leaves[i].sharding is not None and leaves[i].sharding.device_set == default:
                leaves[i] = _with_sharding(leaves[i], None)
    return jax.tree.unflatten(treedef, leaves)


def _of_type(leaf: ShapedArray) -> jax.ShapeDtypeStruct:
    """Returns the type of an array, from ``jax.typeof``, as an abstract leaf."""
    sharding = None if leaf.sharding.mesh.empty else leaf.sharding
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _current_mesh() -> jax.sharding.Mesh:
    """Returns the mesh of ``jax.set_mesh``; an empty one inside a trace, which names no devices."""
    try:
        return jax.sharding.get_mesh()
    except ValueError:
        return jax.sharding.Mesh(np.empty((), object), ())


def _on_devices(leaf: jax.ShapeDtypeStruct, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct | str:
    """Returns a leaf over devices; if the mesh does not fit its sharding, what that is over."""
    try:
        sharding = leaf.sharding
    except TypeError:
        return "a PartitionSpec alone"
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return leaf
    if isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        if mesh.empty or mesh.shape_tuple != sharding.mesh.shape_tuple:
            return f"an AbstractMesh of {dict(sharding.mesh.shape)}"
        memory = sharding.memory_kind
        sharding = jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=memory)
    elif mesh.empty:
        return leaf
    # Also a PartitionSpec alone, which means another mesh, or none, later.
    return _with_sharding(leaf, sharding)


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    layout = leaf.format.layout
    placed = sharding if layout is None or sharding is None else Format(layout, sharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed, weak_type=leaf.weak_type)


def _described(template: PyTree, faults: Mapping[int, str], mesh: jax.sharding.Mesh) -> str:
    keyed = jax.tree.leaves_with_path(template)
    lines = [f"{jax.tree_util.keystr(keyed[i][0])}: over {fault}" for i, fault in faults.items()]
    found = "no current mesh" if mesh.empty else f"the current mesh {dict(mesh.shape)}"
    return (
        f"expected shardings over devices, found {found} and in the template\n"
        f"{paths.listed(lines)}\ncall this under jax.set_mesh(mesh) of the same axes, or give "
        "shardings over a jax.sharding.Mesh"
    )


def _default_device() -> Device:
    device = _config.jax_default_device
    if isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return jax.local_devices()[0] if device is None else device


def put(value: np.ndarray, leaf: object) -> jax.Array:
    """Creates a ``jax.Array``, placed like a leaf, from a numpy array that all processes have.

    On a CPU it may alias the value, even with ``may_alias=False`` (jax issue 37830): nothing may
    write to the value afterwards. jax does not write to it either, even if the array is donated.
    """
    sharding = sharding_of(leaf)
    if sharding is None:
        with on_device_of(leaf):
            return jax.device_put(value)
    if sharding.is_fully_addressable:
        return _laid_out(jax.device_put(value, sharding), leaf)
    # JAX cannot infer the dtype in a process without a device of the sharding.
    found = jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )
    return _laid_out(found, leaf)


def assembled(leaf: Leaf, boxes: Mapping[Any, _Box], held: Mapping[_Box, np.ndarray]) -> jax.Array:
    """Creates a ``jax.Array`` from pieces in host memory, placed like a leaf and in its shape.

    It may alias the pieces; see ``put``.
    """
    sharding = sharding_of(leaf)
    if sharding is None:
        [value] = held.values()
        return put(value, leaf)
    arrays = [
        jax.device_put(
            held[box], jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        )
        for device, box in boxes.items()
    ]
    # JAX cannot infer the dtype in a process without a piece.
    return _laid_out(
        jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays, dtype=leaf.dtype),
        leaf,
    )


def like(array: jax.Array, leaf: object) -> jax.Array:
    """Moves an array to the placement of a leaf, if that is uncommitted or has a layout."""
    if sharding_of(leaf) is not None:
        return _laid_out(array, leaf)
    if not array.is_fully_addressable or _lies_like(array, leaf):
        return array
    if not jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return put(np.asarray(array), leaf)
    data = put(np.asarray(jax.random.key_data(array)), leaf)
    with on_device_of(leaf):  # Else the keys are made on the default device.
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


def _lies_like(array: jax.Array, leaf: object) -> bool:
    """Returns whether an array is uncommitted, and on the device of a leaf if that is an array."""
    if array.committed:
        return False
    return not isinstance(leaf, jax.Array) or array.sharding.device_set == leaf.sharding.device_set


def _laid_out(array: Leaf, leaf: Leaf) -> jax.Array:
    """Gives an array the device layout of a leaf, if the leaf has one."""
    if array.ndim < 2 or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    wanted = leaf.format.layout
    if wanted is None or wanted == array.format.layout:
        return array
    return jax.device_put(array, Format(wanted, array.sharding))


@neutral()
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


#: A device writes at least so much of a box, where the box has it: slivers of a small table would
#: cost a restore one request each.
_LEAST_BYTES = 4096
_REMEMBERED = 1 << 16

#: Numbers of a table's shard along its rows and its columns.
_Cell = tuple[int, int]


#: In place of the number of a shard: the array itself is it.
ITSELF = -1


def same_bits(one: object, two: object) -> bool:
    """Returns whether two arrays have the same bits, shape and dtype; copies both to the host."""
    one, two = np.asarray(one), np.asarray(two)
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    one, two = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (one, two))
    pieces = (slice(at, at + _COMPARED_BYTES) for at in range(0, len(one), _COMPARED_BYTES))
    return all(np.array_equal(one[piece], two[piece]) for piece in pieces)


class OwnedBox(NamedTuple):
    """Rows of a box that this process writes: after ``skip`` rows of a shard, or of ``ITSELF``."""

    box: Box
    shard: int
    skip: int


class _Owned(NamedTuple):
    """A box, the device that writes it, and how many rows of its shard precede it."""

    box: Box
    device: Device
    skip: int


def owned_boxes(leaf: Leaf, stamps: object = None, *, turn: int = 0) -> Iterator[OwnedBox]:
    """Returns the rows of one field of a table that this process writes; equal for equal arrays.

    A numpy array is assumed to be equal on every process. ``stamps`` is None if touched rows are
    not needed; ``turn``, the table's index, spreads small tables over the devices.
    """
    row_bytes = math.prod(leaf.shape[1:]) * np.dtype(leaf.dtype).itemsize
    known = stamps.sharding if isinstance(stamps, jax.Array) else None
    here = coordination.process_index()
    if not isinstance(leaf, jax.Array):
        # Stamps on one process may be its own array, as those of a numpy table are.
        if known is not None and process_span(known) == 1:
            known = None
        spans, everyone = list[Span](), range(coordination.process_count())
        for rows, knowing in _known(known, leaf.shape[0], (0, leaf.shape[0])):
            holders = tuple(everyone if knowing is None else sorted(knowing))
            owners = _owners(holders, (rows[1] - rows[0]) * row_bytes, turn)
            pieces = (_subspan(rows, number, len(owners)) for number in range(len(owners)))
            spans += [piece for piece, owner in zip(pieces, owners) if owner == here]
        for span in row_blocks.joined(spans):
            yield OwnedBox(Box(span, (0, _width(leaf.shape))), ITSELF, span[0])
        return
    shard_of = _shard_numbers(leaf)
    for owned in _owned(leaf.sharding, known, leaf.shape, row_bytes, turn, here):
        yield OwnedBox(owned.box, shard_of[owned.device], owned.skip)


def block_owners(leaf: Leaf, count: int) -> list[int]:
    """Returns the process that writes each of ``count`` equal blocks; the same on all processes.

    Each block of rows must be whole on one device.
    """
    if not isinstance(leaf, jax.Array):
        processes = coordination.process_count()
        return [block % processes for block in range(count)]
    grid_shape = _shard_counts(leaf.sharding, leaf.shape)
    holders = _grid(leaf.sharding, grid_shape).holders
    found = []
    for block in range(count):
        devices = holders[block * grid_shape[0] // count, 0]
        processes = [*dict.fromkeys(map(coordination.process_of, devices))]
        found.append(processes[block % len(processes)])
    return found


def shard_boxes(array: jax.Array) -> dict[Box, int]:
    """Returns the distinct boxes of this process, each with the index of a shard that holds it."""
    shard_of = _shard_numbers(array)
    return {box: shard_of[device] for device, box in boxes(array.sharding, array.shape).items()}


def local_arrays(array: Leaf) -> dict[Device | None, Leaf]:
    """Returns the content of an array by the devices of ``device_boxes``; None for the whole."""
    if sharding_of(array) is None:
        return {None: array}
    return {shard.device: shard.data for shard in array.addressable_shards}


def _shard_numbers(array: jax.Array) -> dict[Device, int]:
    if len(array.sharding.device_set) == 1:
        return dict.fromkeys(array.sharding.device_set, ITSELF)
    return {shard.device: number for number, shard in enumerate(array.addressable_shards)}


def shard_data(array: Leaf, shard: int) -> Leaf:
    """Returns one shard of an array: see ``OwnedBox.shard``."""
    return array if shard == ITSELF else array.addressable_shards[shard].data


def boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Box]:
    """Returns the box of each device of this process."""
    # Declared as optional, but each device of a process has an index.
    indices: Mapping[Device, Any] = sharding.addressable_devices_indices_map(shape)
    return {
        device: _box(index, shape)
        for device, index in indices.items()
        if coordination.process_of(device) == coordination.process_index()
    }


def device_boxes(leaf: Leaf) -> dict[Any, Box]:
    """Returns the box of each device of this process; of None if no device must hold the leaf."""
    sharding = sharding_of(leaf)
    if sharding is None:
        return {None: whole(leaf.shape)}
    return boxes(sharding, leaf.shape)


def shared_rows(stamps: Leaf) -> frozenset[Span]:
    """Returns rows of the stamps that this and other processes hold, by shard."""
    if not isinstance(stamps, jax.Array):
        return frozenset({(0, stamps.shape[0])} if coordination.process_count() > 1 else ())
    return _shared_rows(stamps.sharding, stamps.shape, coordination.process_index())


@functools.lru_cache(_REMEMBERED)
def _shared_rows(sharding: Sharding, shape: tuple[int, ...], here: int) -> frozenset[Span]:
    grid = _grid(sharding, _shard_counts(sharding, shape))
    found = set()
    for device, box in boxes(sharding, shape).items():
        holders = {coordination.process_of(other) for other in grid.holders[grid.cell_of[device]]}
        if holders - {here}:
            found.add(box.rows)
    return frozenset(found)


def whole(shape: tuple[int, ...]) -> Box:
    """Returns the box of a whole field of some shape, (rows, *trailing)."""
    return Box((0, shape[0]), (0, _width(shape)))


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    padded = (*index, slice(None), slice(None))
    first, last, _ = padded[0].indices(shape[0])
    left, right, _ = padded[1].indices(_width(shape))
    return Box((first, last), (left, right))


def _width(shape: tuple[int, ...]) -> int:
    return shape[1] if len(shape) > 1 else 1


@functools.lru_cache(_REMEMBERED)
def _owned(
    sharding: Sharding,
    stamps: Sharding | None,
    shape: tuple[int, ...],
    row_bytes: int,
    turn: int,
    here: int,
) -> tuple[_Owned, ...]:
    """Returns what process ``here``, this one, writes of a field."""
    grid_shape = _shard_counts(sharding, shape)
    grid = _grid(sharding, grid_shape)
    local = {}
    for device, box in boxes(sharding, shape).items():
        local.setdefault(box, device)
    found: list[_Owned] = []
    for box, holder in sorted(local.items(), key=lambda item: item[0]):
        cell = grid.cell_of[holder]
        for rows, knowing in _known(stamps, shape[0], box.rows):
            holders = grid.holders[cell]
            if knowing is not None:
                holders = tuple(d for d in holders if coordination.process_of(d) in knowing)
                if not holders:
                    raise TrackingError(
                        f"rows {rows} of an array of shape {shape}: expected their stamps on a "
                        f"process that holds them, found sharding {sharding} and stamps of "
                        f"sharding {stamps}; shard tables, slots and stamps over the same devices"
                    )
            nbytes = (rows[1] - rows[0]) * row_bytes // grid_shape[1]
            owners = _owners(holders, nbytes, turn + sum(cell))
            for number, owner in enumerate(owners):
                piece = _subspan(rows, number, len(owners))
                if coordination.process_of(owner) == here and piece[0] < piece[1]:
                    skip = piece[0] - box.rows[0]
                    _append(found, _Owned(Box(piece, box.columns), owner, skip))
    return tuple(found)


def _append(found: list[_Owned], more: _Owned) -> None:
    """Appends, or extends the last one if ``more`` continues it: each one is read separately."""
    if found:
        last = found[-1]
        together = (last.device, last.box.columns) == (more.device, more.box.columns)
        if together and last.box.rows[1] == more.box.rows[0]:
            rows = (last.box.rows[0], more.box.rows[1])
            found[-1] = last._replace(box=Box(rows, last.box.columns))
            return
    found.append(more)


def _known(
    stamps: Sharding | None, rows: int, span: Span
) -> Iterator[tuple[Span, frozenset[int] | None]]:
    """Splits a span at the boundaries of the stamps' shards; yields each piece's processes."""
    # None: it does not matter which processes hold the stamps.
    if stamps is None:
        yield span, None
        return
    (count, _) = grid_shape = _shard_counts(stamps, (rows,))
    grid = _grid(stamps, grid_shape)
    for number in range(count):
        piece = _subspan((0, rows), number, count)
        common = max(span[0], piece[0]), min(span[1], piece[1])
        if common[0] < common[1]:
            yield common, frozenset(map(coordination.process_of, grid.holders[number, 0]))


def _owners(holders: tuple[_T, ...], nbytes: int, turn: int) -> tuple[_T, ...]:
    """Returns the holders that write a piece each, spread evenly over them."""
    count = min(len(holders), max(1, nbytes // _LEAST_BYTES))
    first = turn % len(holders)
    turned = holders[first:] + holders[:first]
    return tuple(turned[number * len(holders) // count] for number in range(count))


def _subspan(span: Span, number: int, count: int) -> Span:
    """Returns one of ``count`` nearly equal pieces of a span."""
    length = span[1] - span[0]
    return span[0] + length * number // count, span[0] + length * (number + 1) // count


def _shard_counts(sharding: Sharding, shape: tuple[int, ...]) -> _Cell:
    """Returns into how many shards a sharding splits rows and columns."""
    shard = sharding.shard_shape(shape)
    counts = [max(1, -(-size // max(1, piece))) for size, piece in zip(shape[:2], shard[:2])]
    return counts[0], counts[1] if len(counts) > 1 else 1


class _Grid(NamedTuple):
    """Which devices hold which shard of an array, in an order that is the same on every process."""

    holders: dict[_Cell, tuple[Device, ...]]
    cell_of: dict[Device, _Cell]


@functools.lru_cache(_REMEMBERED)
def _grid(sharding: Sharding, grid_shape: _Cell) -> _Grid:
    holders: dict[_Cell, list[Device]] = {}
    cell_of = {}
    # The shards as an array with one element each, so that cells do not depend on the rows.
    for device, index in _indices(sharding, grid_shape).items():
        box = _box(index, grid_shape)
        cell_of[device] = cell = (box.rows[0], box.columns[0])
        holders.setdefault(cell, []).append(device)
    return _Grid({cell: _ordered(devices) for cell, devices in holders.items()}, cell_of)


def _ordered(devices: list[Device]) -> tuple[Device, ...]:
    """Orders by process and index; one CPU device per process, as they share memory."""
    found = sorted(devices, key=lambda device: (coordination.process_of(device), device.id))
    if any(device.platform != "cpu" for device in found):
        return tuple(found)
    return tuple({coordination.process_of(device): device for device in reversed(found)}.values())[
        ::-1
    ]


def _indices(sharding: Sharding, grid_shape: _Cell) -> Mapping[Device, tuple[slice, ...]]:
    try:
        return sharding.devices_indices_map(grid_shape)
    except ValueError:  # A sharding of one axis.
        found = sharding.devices_indices_map(grid_shape[:1])
        return {device: (*index, slice(None)) for device, index in found.items()}
