# SPDX-License-Identifier: Apache-2.0
"""Plans the dense leaves that this process writes, in the layout of Orbax's PyTree handler.

The layout is that of Orbax 0.12.8 without compression: a chunk is a shard, and R replicas of a
shard split the first of its axes that R divides into R chunks. For a leaf that is not ``covered``,
Orbax's own handler writes the whole item, on all processes: nothing here differs between processes.
The plan follows from structure, shapes and shardings alone, and is cached: a WAL uses it at each
step.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt.errors import UnsupportedLeaf
from deltackpt.format import row_blocks
from deltackpt.format.naming import Leaf, PyTree
from deltackpt.format.records import IdentityCache
from deltackpt.save import capture
from deltackpt.state.tables import Split
from deltackpt.storage import ocdbt

#: Name by which Orbax finds the handler of the item.
HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
#: A string that begins with it and a colon stands for an array without elements.
EMPTY_ARRAY = "deltackpt:empty"
#: Stored by TensorStore under their own names.
_NAMED_DTYPES = frozenset(
    {
        "bfloat16",
        "int4",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e4m3b11fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    }
)
_EMPTY = {dict: "Dict", list: "List", tuple: "Tuple", type(None): "None"}


_nbytes: IdentityCache[int] = IdentityCache()


def nbytes(split: Split) -> int:
    """Returns the bytes of the arrays among the dense leaves of a state; cached by layout."""

    def count() -> int:
        return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(split.dense))

    return _nbytes.get(count, split.layout)


def storable(dense: PyTree) -> PyTree:
    """Returns dense leaves, nested dicts, in the form in which they are stored.

    Orbax rejects numpy scalars, which are stored as arrays without axes, and arrays without
    elements, which are stored as strings.
    """
    return jax.tree.map(as_stored, dense, is_leaf=lambda leaf: leaf is None)


def as_stored(leaf: Leaf) -> Leaf:
    """Returns one leaf in the form in which it is stored; see ``storable``."""
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and 0 in leaf.shape:
        shape = ",".join(str(size) for size in leaf.shape)
        return f"{EMPTY_ARRAY}:{np.dtype(leaf.dtype).name}:{shape}"
    return leaf


class WrittenChunk(NamedTuple):
    """A chunk that this process writes: a window of a leaf, or of one of its shards."""

    key: str  # in the database
    leaf: int  # its number
    shard: int | None
    window: tuple[slice, ...]
    shape: tuple[int, ...]  # of the window
    on_host: bool
    dtype: np.dtype
    group: str  # the dtype of the blocks in which deltas store it, or ``plain``
    nbytes: int  # of its blocks; 0 if it is stored as bytes

    @classmethod
    def planned(
        cls,
        key: str,
        leaf: int,
        shard: int | None,
        window: tuple[slice, ...],
        shape: tuple[int, ...],
        array: Any,
    ) -> WrittenChunk:
        """Returns a chunk of an array; ``array`` is the leaf, or the shard that holds it."""
        dtype, count = np.dtype(array.dtype), math.prod(shape)
        group = row_blocks.group_of(count * dtype.itemsize, dtype.name if dtype.isnative else "")
        blocks = 0 if group == row_blocks.PLAIN else row_blocks.blocks_of(count)
        nbytes = blocks * row_blocks.BLOCK * dtype.itemsize
        return cls(key, leaf, shard, window, shape, capture.on_host(array), dtype, group, nbytes)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The values and files that one process writes."""

    described: dict[str, bytes]  # ``.zarray`` keys and values; on process 0 only
    chunks: tuple[WrittenChunk, ...]  # in the order of the leaves
    files: dict[str, str]  # text of the item's other files, by relative path
    random_keys: frozenset[int]  # numbers of the leaves that are PRNG keys
    strings: tuple[tuple[str, int], ...]  # names and numbers; on process 0 only
    sources: Sequence[Any] = ()  # the leaf or shard of each chunk; none in a plan without values

    def of(self, leaves: Sequence[Leaf]) -> Plan:
        """Returns the plan with the values of a state of the same structure and shardings."""
        shards: dict[int, Any] = {}
        sources = []
        for chunk in self.chunks:
            number, source = chunk.leaf, leaves[chunk.leaf]
            if number in self.random_keys:
                source = jax.random.key_data(source)
            if chunk.shard is not None:
                if number not in shards:
                    shards[number] = source.addressable_shards
                source = shards[number][chunk.shard].data
            elif not isinstance(source, jax.Array):
                source = np.asarray(source)
            sources.append(source)
        files = self.files
        if self.strings:
            texts = {name: leaves[number] for name, number in self.strings}
            files = {**files, "_strings.json": json.dumps(texts, separators=(",", ":"))}
        return dataclasses.replace(self, sources=sources, files=files)


def covered(leaf: Leaf) -> str | None:
    """Returns why this module cannot write a leaf or an empty container; None if it can."""
    kind = type(leaf)
    if kind in _EMPTY:
        return None if leaf is None or not leaf else "is a container that is not empty"
    if kind in (bool, float, str):
        return None
    if kind is int:
        return None if -(1 << 63) <= leaf < 1 << 64 else "is an integer of more than 64 bits"
    if isinstance(leaf, jax.Array):
        return _covered_array(leaf)
    if kind is np.ndarray:
        if not leaf.size:
            return "has no elements"
        return None if _dtype(leaf.dtype) else f"has dtype {leaf.dtype}"
    if isinstance(leaf, np.number):
        plain = leaf.dtype.kind in "iuf" and leaf.dtype.itemsize <= 8
        return None if plain else f"is a scalar of dtype {leaf.dtype}"
    return f"is a {kind.__name__}"


def plan(tree: PyTree, process: int = 0) -> Plan:
    """Plans the values that a process writes, all ``covered``; cached by their shardings."""
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=_is_leaf)
    key = (process, structure, *map(_kind, leaves))
    return _outlines.get(lambda: _outline(tree, process), rest=key).of(leaves)


_outlines: IdentityCache[Plan] = IdentityCache(16)


def _kind(leaf: object) -> Hashable:
    """Returns what the outline depends on of a leaf."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.sharding
    if isinstance(leaf, (np.ndarray, np.generic)):
        return type(leaf), leaf.shape, leaf.dtype
    # An integer is stored by as many bits as it needs.
    return type(leaf), np.asarray(leaf).dtype if isinstance(leaf, int) else None


def _outline(tree: PyTree, process: int) -> Plan:
    paths: dict[str, tuple[Any, ...]] = {}
    described: dict[str, bytes] = {}
    pieces: list[WrittenChunk] = []
    keys_of_random: set[int] = set()
    tree_metadata, shardings, strings, extents = {}, {}, [], []
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)[0]
    for number, (path, leaf) in enumerate(flat):
        keys = _keys(path)
        name = ".".join(key for key, _ in keys)
        where = jax.tree_util.keystr(path)
        if problem := _unnameable(keys) or covered(leaf):
            raise UnsupportedLeaf(
                f"dense leaf {where} {problem}, so that only Orbax's handler can write it"
            )
        if name in paths:
            raise UnsupportedLeaf(
                f"dense leaves {jax.tree_util.keystr(paths[name])} and {where}: both would "
                f"be stored as {name!r}, and one would be lost; rename one of them"
            )
        paths[name] = path
        value: dict[str, object] = {"value_type": _value_type(leaf), "skip_deserialize": False}
        if type(leaf) in _EMPTY:
            value["skip_deserialize"] = True
        elif isinstance(leaf, str):
            strings.append((name, number))
        elif isinstance(leaf, jax.Array):
            implementation = None
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                implementation = {"random_key_impl": str(jax.random.key_impl(leaf))}
                leaf = jax.random.key_data(leaf)
                keys_of_random.add(number)
            extent, axis = chunk_shape(leaf)
            value["write_shape"] = list(extent)
            described[f"{name}/{ocdbt.ZARRAY}"] = _described(leaf, extent)
            shardings[base64.urlsafe_b64encode(name.encode()).decode()] = _sharding(leaf.sharding)
            extents.append((name, extent, implementation))
            pieces.extend(_pieces(name, number, leaf, extent, axis))
        else:
            array = np.asarray(leaf)
            described[f"{name}/{ocdbt.ZARRAY}"] = _described(array, array.shape)
            if process == 0:
                key = ocdbt.chunk_key(name, (0,) * array.ndim)
                whole = (slice(None),) * array.ndim
                pieces.append(WrittenChunk.planned(key, number, None, whole, array.shape, array))
        tree_metadata[str(tuple(key for key, _ in keys))] = {
            "key_metadata": [{"key": key, "key_type": kind} for key, kind in keys],
            "value_metadata": value,
        }
    if not paths:
        raise UnsupportedLeaf("dense leaves: expected at least one, found none")
    files = {}
    if extents:
        files[f"array_metadatas/process_{process}"] = _array_metadatas(extents)
    if process == 0:
        files["_METADATA"] = _metadata(tree_metadata)
        if shardings:
            files["_sharding"] = json.dumps(shardings, separators=(",", ":"))
    return Plan(
        described=described if process == 0 else {},
        chunks=tuple(pieces),
        files=files,
        random_keys=frozenset(keys_of_random),
        strings=tuple(strings) if process == 0 else (),
    )


def chunk_shape(array: jax.Array) -> tuple[tuple[int, ...], int | None]:
    """Returns the shape of an array's chunks, and the axis that replicas split, or None.

    It depends on the sharding alone: a process without a shard gets the same result.
    """
    shard = array.sharding.shard_shape(array.shape)
    shards = int(np.prod([n // s for n, s in zip(array.shape, shard, strict=True)], dtype=np.int64))
    replicas = array.sharding.num_devices // shards
    if replicas > 1:
        for axis, size in enumerate(shard):
            if size % replicas == 0:
                return (*shard[:axis], size // replicas, *shard[axis + 1 :]), axis
    return shard, None


def _pieces(
    name: str, number: int, array: jax.Array, extent: tuple[int, ...], axis: int | None
) -> Iterator[WrittenChunk]:
    if len(array.sharding.device_set) == 1:
        if array.is_fully_addressable:
            key, whole = ocdbt.chunk_key(name, (0,) * array.ndim), (slice(None),) * array.ndim
            yield WrittenChunk.planned(key, number, None, whole, extent, array)
        return
    for place, shard in enumerate(array.addressable_shards):
        if axis is None and shard.replica_id:
            continue
        starts = [piece.start or 0 for piece in shard.index]
        window: list[slice] = [slice(None)] * array.ndim
        if axis is not None:
            offset = shard.replica_id * extent[axis]
            starts[axis] += offset
            window[axis] = slice(offset, offset + extent[axis])
        index = [start // size for start, size in zip(starts, extent, strict=True)]
        key = ocdbt.chunk_key(name, index)
        yield WrittenChunk.planned(key, number, place, tuple(window), extent, shard.data)


def _covered_array(array: jax.Array) -> str | None:
    if not array.size:
        return "has no elements"
    sharding = array.sharding
    # Subclasses may mean something else.
    if type(sharding) not in (jax.sharding.NamedSharding, jax.sharding.SingleDeviceSharding):
        return f"has a sharding of type {type(sharding).__name__}"
    if sharding.memory_kind == "pinned_host":
        return "is in pinned host memory"
    if isinstance(sharding, jax.sharding.NamedSharding) and sharding.spec.unreduced:
        return "is not reduced"
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return None
    return None if _dtype(array.dtype) else f"has dtype {array.dtype}"


def _dtype(dtype: object) -> str | None:
    """Returns the name of a dtype in ``.zarray``; None if it is not supported."""
    if not isinstance(dtype, np.dtype):
        return None
    if dtype.name in _NAMED_DTYPES:
        return dtype.name
    plain = dtype.kind in "biuf" and dtype.itemsize <= 8 and dtype.str[0] in "<|"
    return dtype.str if plain and np.dtype(dtype.name) == dtype else None


def _described(array: Any, extent: tuple[int, ...]) -> bytes:
    dtype = _dtype(array.dtype)
    assert dtype is not None
    return json.dumps(ocdbt.zarray(array.shape, extent, dtype), separators=(",", ":")).encode()


def _is_leaf(node: object) -> bool:
    return node is None or (type(node) in _EMPTY and not node)


def _keys(path: tuple[Any, ...]) -> list[tuple[str, int]]:
    """Returns keys with their types in Orbax's metadata: 1 index, 2 name; 0 is unsupported."""
    found = []
    for key in path:
        if isinstance(key, jax.tree_util.SequenceKey):
            found.append((str(key.idx), 1))
        elif isinstance(key, jax.tree_util.DictKey):
            found.append((str(key.key), 2))
        elif isinstance(key, jax.tree_util.GetAttrKey):
            found.append((key.name, 2))
        else:
            found.append((str(key), 0))
    return found


def _unnameable(keys: list[tuple[str, int]]) -> str | None:
    if not keys:
        return "has no container"
    for key, kind in keys:
        if not kind:
            return f"has a key of an unknown kind, {key!r}"
        # "/" parts keys of the database and of JSON pointers, "~" escapes in the latter.
        if not key or "/" in key or "~" in key:
            return f"has the key {key!r}"
    return None


def _value_type(leaf: object) -> str:
    if type(leaf) in _EMPTY:
        return _EMPTY[type(leaf)]
    if isinstance(leaf, str):
        return "string"
    if isinstance(leaf, jax.Array):
        return "jax.Array"
    return "np.ndarray" if isinstance(leaf, np.ndarray) else "scalar"


def _metadata(tree_metadata: Mapping[str, object]) -> str:
    return json.dumps(
        {
            "tree_metadata": tree_metadata,
            "use_ocdbt": True,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    )


def _array_metadatas(extents: Sequence[tuple[str, tuple[int, ...], object]]) -> str:
    return json.dumps(
        {
            "array_metadatas": [
                {
                    "array_metadata": {
                        "param_name": name,
                        "write_shape": list(extent),
                        "chunk_shape": list(extent),
                        "ext_metadata": further,
                    }
                }
                for name, extent, further in extents
            ]
        }
    )


def _sharding(sharding: Any) -> str:
    """Returns a sharding as JSON, from which Orbax restores without a template."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        device = str(next(iter(sharding.device_set)))
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": device})
    mesh = sharding.mesh
    return json.dumps(
        {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.shape.values()),
            "axis_names": list(mesh.axis_names),
            "axis_types": [str(kind) for kind in mesh.axis_types],
            "partition_spec": tuple(sharding.spec),
            "device_mesh": {"mesh": _device_ids(mesh.devices.tolist())},
        }
    )


def _device_ids(devices: Any) -> Any:
    if isinstance(devices, list):
        return [_device_ids(piece) for piece in devices]
    return {"id": devices.id}
