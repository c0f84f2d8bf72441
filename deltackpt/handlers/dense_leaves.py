# SPDX-License-Identifier: Apache-2.0
"""Dense leaves from the values of their item, straight to where the template has them.

Arrays whose chunks are bytes as they are go into their shardings without Orbax: a chunk that is a
shard is the shard's memory on the CPU, and chunks that meet no shard of this process are not read.
What is left (keys, numbers, compressed arrays, memory of other kinds) Orbax restores from a folder
that holds nothing else.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from deltackpt import codecs
from deltackpt.format.names import DENSE_ITEM, PYTREE_METADATA
from deltackpt.handlers import dense
from deltackpt.reading.dense_values import DenseItem, DenseValues
from deltackpt.reading.orbax_values import OrbaxValues
from deltackpt.resources import memory
from deltackpt.restore.step_files import DenseFiles
from deltackpt.restore.steps import DenseRead
from deltackpt.storage.ocdbt import ZARRAY, chunk_key

#: Containers without leaves, by their names in Orbax's metadata.
_EMPTY: Mapping[str, Callable[[], Any]] = {
    "Dict": dict,
    "List": list,
    "Tuple": tuple,
    "None": lambda: None,
}
_PLACED = (jax.sharding.NamedSharding, jax.sharding.SingleDeviceSharding)

#: What Orbax may restore from a copy where the rest needs no Orbax: so many bytes, or a share.
_LEFT_BYTES, _LEFT_SHARE = 1 << 20, 16

#: Where a leaf stands in the nested dicts of the item.
KeyPath = tuple[str, ...]
#: Half-open ranges along each axis.
_Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class _Stored:
    """An array whose chunks are its numbers as they are.

    Attributes:
      name: in the database.
      chunks: shape of a chunk.
    """

    name: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype

    def keys(self, boxes: Iterable[_Box]) -> set[str]:
        """Keys of the chunks that meet some boxes."""
        return {chunk_key(self.name, index) for box in boxes for index in self.indices(box)}

    def indices(self, box: _Box) -> Iterator[tuple[int, ...]]:
        """Which chunks meet a box."""
        ranges = [
            range(start // size, -(-stop // size))
            for (start, stop), size in zip(box, self.chunks, strict=True)
        ]
        return itertools.product(*ranges)

    def read(self, values: Mapping[str, memoryview], box: _Box) -> np.ndarray:
        """A box of the array: the memory of a chunk where that is all of it."""
        found = [*self.indices(box)]
        shape = tuple(stop - start for start, stop in box)
        if len(found) == 1 and shape == self.chunks:
            return self._chunk(values, found[0])
        out = memory.empty_buffer(shape, self.dtype)
        for index in found:
            chunk = self._chunk(values, index)
            into, of = [], []
            for at, size, (start, stop) in zip(index, self.chunks, box, strict=True):
                first, last = max(start, at * size), min(stop, (at + 1) * size)
                into.append(slice(first - start, last - start))
                of.append(slice(first - at * size, last - at * size))
            out[tuple(into)] = chunk[tuple(of)]
        return out

    def _chunk(self, values: Mapping[str, memoryview], index: tuple[int, ...]) -> np.ndarray:
        data = values[chunk_key(self.name, index)]
        return np.frombuffer(data, self.dtype).reshape(self.chunks)


class DenseLeaves:
    """What an item holds, by its descriptions, and how it becomes leaves."""

    def __init__(self, item: DenseItem | DenseFiles):
        """Reads the descriptions.

        Args:
          item: of the step.

        Raises:
          Damaged: they are missing or altered.
        """
        self._item = item
        self._outline = item.outline
        self._metadata = json.loads(bytes(self._outline.files[PYTREE_METADATA]))
        self._kinds: dict[KeyPath, str] = {}
        for entry in self._metadata["tree_metadata"].values():
            key = tuple(step["key"] for step in entry["key_metadata"])
            self._kinds[key] = entry["value_metadata"]["value_type"]

    def need_no_orbax(self, abstract: dict[str, Any] | None, values: OrbaxValues) -> bool:
        """Whether nearly all of an item goes straight to where a template has it.

        Args:
          abstract: as for ``restored``.
          values: of the item. Of each array all chunks must be there, as TensorStore would make up
            those that are not.
        """
        wanted = None if abstract is None else dense.by_key(abstract)
        if wanted is not None and wanted.keys() != self._kinds.keys():
            return False
        straight = 0
        for key, array in self._stored.items():
            if not (wanted is None or wanted[key] is ... or _is_placed(wanted[key], array)):
                continue
            nbytes = math.prod(array.chunks) * array.dtype.itemsize
            chunks = array.keys([tuple((0, size) for size in array.shape)]) if nbytes else ()
            if not chunks or any(values.nbytes((False, chunk)) != nbytes for chunk in chunks):
                return False
            straight += nbytes * len(chunks)
        total = sum(values.nbytes(key) or 0 for key in values.keys() if not key[0])
        return total - straight <= max(_LEFT_BYTES, total // _LEFT_SHARE)

    def abstract(self) -> dict[str, Any]:
        """As ``dense.abstract``."""
        with self._folder(DenseValues(self._described(None), self._outline.files)) as folder:
            return dense.abstract(dense.handler().metadata(folder))

    def some(self, keys: Collection[KeyPath], step: int) -> dict[str, Any]:
        """Some leaves on the host, as ``restored`` has them without a template."""
        return self._restored(None, {*keys}, step).leaves

    def restored(self, abstract: dict[str, Any] | None, step: int) -> DenseRead:
        """The leaves, checked as ``dense.check`` and ``dense.restored`` check Orbax's.

        Args:
          abstract: what to restore, with the wanted shardings; None for everything, on the host.
          step: the step, for errors.

        Raises:
          TemplateMismatch: the step has other leaves.
          Damaged: a value is missing or altered.
        """
        return self._restored(abstract, {*self._kinds}, step)

    def _restored(
        self, abstract: dict[str, Any] | None, keys: set[KeyPath], step: int
    ) -> DenseRead:
        wanted = None if abstract is None else dense.by_key(abstract)
        placed = {
            key: array
            for key, array in self._stored.items()
            if key in keys
            and (wanted is None or (key in wanted and _is_placed(wanted[key], array)))
        }
        known = {key: _EMPTY[self._kinds[key]]() for key in keys if self._kinds[key] in _EMPTY}
        if wanted is not None:  # Placeholders stay, as Orbax has it.
            known |= {key: ... for key in keys if wanted.get(key) is ...}
        left = keys - placed.keys() - known.keys()
        described = DenseValues(self._described(left), self._files(left))
        rest = None
        if left:
            with self._folder(described) as folder:
                rest = dense.handler().metadata(folder)
        if abstract is not None:
            found = {} if rest is None else dense.by_key(rest.tree)
            arrays = {key: _metadata_of(array) for key, array in placed.items()}
            dense.check(abstract, _nested({**found, **arrays, **known}), step)
        boxes = {
            key: _boxes(None if wanted is None else wanted[key], array.shape)
            for key, array in placed.items()
        }
        names = {".".join(key) for key in left}
        chunks = {key for path, array in placed.items() for key in array.keys(boxes[path].values())}
        values = self._item.read(
            lambda key: key in chunks or key.rpartition("/")[0] in names
        ).values
        leaves: dict[KeyPath, Any] = dict(known)
        for key, array in placed.items():
            template = None if wanted is None else wanted[key]
            leaves[key] = self._placed(array, values, boxes[key], template)
        if left:
            own = {k: data for k, data in values.items() if k.rpartition("/")[0] in names}
            asked = None if wanted is None else _nested({key: wanted[key] for key in left})
            with self._folder(described._replace(values={**described.values, **own})) as folder:
                args = dense.restore_args(asked, rest)
                leaves |= dense.by_key(dense.handler().restore(folder, args=args))
        whole = dense.restored(_nested(leaves), abstract, step)
        on_devices = {
            chunk: np.frombuffer(values[chunk], np.uint8)
            for key, array in placed.items()
            if self._item.fresh and wanted is not None and not isinstance(wanted[key], np.ndarray)
            for chunk in array.keys(boxes[key].values())
        }
        return DenseRead(whole, on_devices)

    def _placed(
        self,
        array: _Stored,
        values: Mapping[str, memoryview],
        boxes: Mapping[Any, _Box],
        template: Any,
    ) -> Any:
        held = {box: array.read(values, box) for box in set(boxes.values())}
        if template is None or isinstance(template, np.ndarray):
            [data] = held.values()
            return data if self._item.fresh else data.copy()
        # As for tables: memory that is ours alone is a device's on the CPU, of one device.
        once = {box for box, count in collections.Counter(boxes.values()).items() if count == 1}
        arrays = [
            jax.device_put(
                held[box],
                jax.sharding.SingleDeviceSharding(device),
                may_alias=self._item.fresh and box in once,
            )
            for device, box in boxes.items()
        ]
        return jax.make_array_from_single_device_arrays(
            array.shape, _sharding(template), arrays, dtype=array.dtype
        )

    @functools.cached_property
    def _stored(self) -> dict[KeyPath, _Stored]:
        """The arrays that need no Orbax, wherever they are to lie."""
        special = {
            one["array_metadata"]["param_name"]
            for name, data in self._outline.files.items()
            if name.startswith("array_metadatas/")
            for one in json.loads(bytes(data))["array_metadatas"]
            if one["array_metadata"].get("ext_metadata")
        }
        if self._metadata.get("use_zarr3"):
            return {}
        found = {}
        for key, kind in self._kinds.items():
            name = ".".join(key)
            text = self._outline.values.get(f"{name}/{ZARRAY}")
            if kind in ("jax.Array", "np.ndarray") and text is not None and name not in special:
                array = _array(name, json.loads(bytes(text)))
                if array is not None:
                    found[key] = array
        return found

    def _described(self, keys: Iterable[KeyPath] | None) -> dict[str, memoryview]:
        """Descriptions of arrays; of all by default."""
        if keys is None:
            return dict(self._outline.values)
        names = (f"{'.'.join(key)}/{ZARRAY}" for key in keys)
        return {name: self._outline.values[name] for name in names if name in self._outline.values}

    def _files(self, keys: set[KeyPath]) -> dict[str, memoryview]:
        """The files of an item that has some leaves only."""
        entries = {
            text: entry
            for text, entry in self._metadata["tree_metadata"].items()
            if tuple(step["key"] for step in entry["key_metadata"]) in keys
        }
        metadata = {**self._metadata, "tree_metadata": entries}
        return {**self._outline.files, PYTREE_METADATA: memoryview(json.dumps(metadata).encode())}

    @contextlib.contextmanager
    def _folder(self, values: DenseValues) -> Iterator[epath.Path]:
        with contextlib.closing(DenseFiles(values)) as files:
            yield epath.Path(files.folder(DENSE_ITEM))


def _array(name: str, described: Mapping[str, Any]) -> _Stored | None:
    """An array by its ``.zarray``; None where its chunks are no plain numbers."""
    plain = (
        described["zarr_format"] == 2
        and described["compressor"] is None
        and not described["filters"]
        and described["order"] == "C"
        and described.get("dimension_separator", ".") == "."
    )
    text = described["dtype"]
    if not plain or not isinstance(text, str) or text.startswith(">"):
        return None
    dtype = np.dtype(text) if text[:1] in "<|" else codecs.dtype_of(text)
    return _Stored(name, tuple(described["shape"]), tuple(described["chunks"]), dtype)


def _metadata_of(array: _Stored) -> ocp.metadata.ArrayMetadata:
    """What Orbax says of it, as far as ``dense.check`` asks."""
    return ocp.metadata.ArrayMetadata(
        name=array.name, directory=None, shape=array.shape, sharding=None, dtype=array.dtype
    )


def _is_placed(leaf: Any, array: _Stored) -> bool:
    """Whether an array becomes a leaf of a template without Orbax."""
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
        return False
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or 0 in leaf.shape:
        return False
    if isinstance(leaf, np.ma.MaskedArray) or (tuple(leaf.shape), leaf.dtype) != (
        array.shape,
        array.dtype,
    ):
        return False
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.isnative
    sharding = leaf.sharding
    if sharding is None:
        return True
    kinds = (None, jax.local_devices()[0].default_memory().kind)
    return type(sharding) in _PLACED and sharding.memory_kind in kinds


def _sharding(leaf: Any) -> Any:
    """That of a template's leaf; without one the default device, as ``dense.restore_args``."""
    return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _boxes(leaf: Any, shape: Sequence[int]) -> dict[Any, _Box]:
    """The box of each device of this process; all of it where the leaf is on the host."""
    if leaf is None or isinstance(leaf, np.ndarray):
        return {None: tuple((0, size) for size in shape)}
    indices = _sharding(leaf).addressable_devices_indices_map(tuple(shape))
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in indices.items()
    }


def _nested(leaves: Mapping[KeyPath, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, leaf in leaves.items():
        node = tree
        for step in key[:-1]:
            node = node.setdefault(step, {})
        node[key[-1]] = leaf
    return tree
