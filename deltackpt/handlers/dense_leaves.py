# SPDX-License-Identifier: Apache-2.0
"""Reads dense leaves from the values of their item, straight into the template's placement.

Arrays with uncompressed chunks are read into their shardings without Orbax, only the chunks of this
process's shards; on the CPU, a chunk that is a shard into its memory. Orbax restores the rest from
a directory that contains nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from deltackpt.cached import cached_property
from deltackpt.errors import Damaged, RestoreError, StorageError
from deltackpt.format.manifest import nest
from deltackpt.format.naming import DENSE_ITEM, PYTREE_METADATA
from deltackpt.format.records import MOST_ZSTD_RATIO
from deltackpt.handlers import orbax_dense
from deltackpt.handlers.orbax_dense import StoredLeaf
from deltackpt.lazy_import import ocp
from deltackpt.reading import zarr_arrays
from deltackpt.reading.orbax_values import ARRAY_METADATAS, OrbaxValues
from deltackpt.reading.stored_dense import DenseValues, StoredItem
from deltackpt.reading.zarr_arrays import Box, ZarrArray
from deltackpt.restore.sources import DenseFiles
from deltackpt.state import placement
from deltackpt.storage.ocdbt import ZARRAY, check_chunks, chunk_key

#: Containers without leaves, by their names in Orbax's metadata.
_EMPTY: Mapping[str, Callable[[], Any]] = {
    "Dict": dict,
    "List": list,
    "Tuple": tuple,
    "None": lambda: None,
}
#: Orbax's names of the kinds of leaves that are stored as arrays.
_NUMBER = "scalar"
_ARRAY_KINDS = ("jax.Array", "np.ndarray", _NUMBER)
_NUMBERS = (bool, int, float)
_PLACED = (jax.sharding.NamedSharding, jax.sharding.SingleDeviceSharding)

#: What Orbax may restore from a copy where the rest needs no Orbax: so many bytes, or a share.
_LEFT_BYTES, _LEFT_SHARE = 1 << 20, 16

#: Errors of parsing bytes that are not valid descriptions or chunks.
_NONSENSE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    NotImplementedError,
)

#: So many bytes may be those of an array that lacks chunks.
_MADE_UP_BYTES = 64 << 20

#: Path of a leaf in the nested dicts of the item.
KeyPath = tuple[str, ...]


class DenseRead(NamedTuple):
    """Dense leaves that were read, as nested dicts.

    ``chunks``: for leaves placed on devices, keys of Orbax's database to the (bytes,) uint8 buffers
    they were read into. The buffers must not be modified: on the CPU a leaf may alias one.
    """

    leaves: dict[str, Any]
    chunks: Mapping[str, np.ndarray] = types.MappingProxyType({})


class StoredLeaves:
    """The leaves of an item, by their descriptions."""

    def __init__(self, item: StoredItem | DenseFiles, name: str):
        """Reads the descriptions; damaged if they are missing, altered or invalid."""
        self._item = item
        self._name = name
        self._outline = item.outline
        self._kinds: dict[KeyPath, str] = {}
        with self._nonsense_is_damage():
            self._metadata = json.loads(bytes(self._outline.files[PYTREE_METADATA]))
            for entry in self._metadata["tree_metadata"].values():
                self._kinds[_key_of(entry)] = _text(entry["value_metadata"]["value_type"])

    def need_no_orbax(self, abstract: dict[str, Any] | None, values: OrbaxValues) -> bool:
        """Returns whether nearly all of an item can be read straight into a template's placement.

        All chunks of each array must exist, because TensorStore fills missing chunks.
        """
        wanted = None if abstract is None else orbax_dense.by_key(abstract)
        if wanted is not None and wanted.keys() != self._kinds.keys():
            return False
        straight = 0
        for key, array in self._stored.items():
            if not (wanted is None or wanted[key] is ... or _is_placed(wanted[key], array)):
                continue
            nbytes, chunks = array.chunk_bytes, array.keys([array.whole])
            if not chunks or any(values.nbytes((False, chunk)) != nbytes for chunk in chunks):
                return False
            straight += nbytes * len(chunks)
        # Descriptions of many small arrays are more than a MiB, and nothing of it is for Orbax.
        total = sum(
            values.nbytes(key) or 0
            for key in values.keys()
            if not (key[0] or key[1].endswith(f"/{ZARRAY}"))
        )
        return total - straight <= max(_LEFT_BYTES, total // _LEFT_SHARE)

    def abstract(self) -> dict[str, Any]:
        """See ``orbax_dense.abstract``."""
        found: dict[KeyPath, Any] = {
            key: ocp.metadata.ScalarMetadata(name=array.name, directory=None, dtype=array.dtype)
            if array.is_number
            else jax.ShapeDtypeStruct(array.shape, array.dtype)
            for key, array in self._stored.items()
        }
        found |= {key: empty() for key, empty in self._empty.items()}
        left = self._kinds.keys() - found.keys()
        if left:
            described = DenseValues(self._described(left), self._files(left))
            with self._nonsense_is_damage(), self._folder(described) as folder:
                found |= orbax_dense.by_key(
                    orbax_dense.abstract(orbax_dense.handler().metadata(folder))
                )
        return nest(found.items())

    def restored(
        self, abstract: dict[str, Any] | None, step: int, keys: Collection[KeyPath] | None = None
    ) -> DenseRead:
        """Returns the leaves, checked as by ``orbax_dense.check`` and ``orbax_dense.restored``.

        Without ``abstract``, they are on the host except typed keys; ``keys`` may restrict them.
        """
        keys = {*(self._kinds if keys is None else keys)}
        wanted = None if abstract is None else orbax_dense.by_key(abstract)
        placed = {
            key: array
            for key, array in self._stored.items()
            if key in keys
            and (wanted is None or (key in wanted and _is_placed(wanted[key], array)))
        }
        known = {key: empty() for key, empty in self._empty.items() if key in keys}
        if wanted is not None:  # Placeholders stay, as Orbax has it.
            known |= {key: ... for key in keys if wanted.get(key) is ...}
        left = keys - placed.keys() - known.keys()
        described = DenseValues(self._described(left), self._files(left))
        rest = None
        if left:
            with self._nonsense_is_damage(), self._folder(described) as folder:
                rest = orbax_dense.handler().metadata(folder)
        if abstract is not None:
            found = {} if rest is None else orbax_dense.by_key(orbax_dense.described(rest))
            arrays = {
                key: StoredLeaf("number" if one.is_number else "array", one.shape, one.dtype)
                for key, one in placed.items()
            }
            orbax_dense.check(abstract, nest({**found, **arrays, **known}.items()), step)
        boxes = {
            key: _boxes(None if wanted is None or array.is_number else wanted[key], array.shape)
            for key, array in placed.items()
        }
        names = {".".join(key) for key in left}
        keys_of = {path: array.keys(boxes[path].values()) for path, array in placed.items()}
        chunks = set[str]().union(*keys_of.values())
        values = self._item.read(
            lambda key: key in chunks or key.rpartition("/")[0] in names
        ).values
        with self._nonsense_is_damage():
            for path, array in placed.items():
                _check_chunks(values, keys_of[path], array.chunk_bytes)
            for name, text in described.values.items():
                _check_stored(name.removesuffix(f"/{ZARRAY}"), text, values)
        leaves: dict[KeyPath, Any] = dict(known)
        for key, array in placed.items():
            template = None if wanted is None else wanted[key]
            leaves[key] = self._placed(array, values, boxes[key], template)
        if left:
            own = {k: data for k, data in values.items() if k.rpartition("/")[0] in names}
            asked = None if wanted is None else nest((key, wanted[key]) for key in left)
            with self._folder(described._replace(values={**described.values, **own})) as folder:
                args = orbax_dense.restore_args(asked, rest)
                try:
                    restored = orbax_dense.handler().restore(folder, args=args)
                except (ValueError, TypeError):
                    # It is the item, and not the template, if it cannot be restored without one.
                    with self._nonsense_is_damage():
                        orbax_dense.handler().restore(
                            folder, args=orbax_dense.restore_args(None, rest)
                        )
                    raise
                except Exception:
                    with self._nonsense_is_damage():
                        raise
                leaves |= orbax_dense.by_key(restored)
        whole = orbax_dense.restored(nest(leaves.items()), abstract, step)
        if wanted is None:
            with self._nonsense_is_damage():
                files = self._outline.files.items()
                about = (data for name, data in files if name.startswith(f"{ARRAY_METADATAS}/"))
                whole = orbax_dense.typed(whole, about)
        on_devices = {
            chunk: np.frombuffer(values[chunk], np.uint8)
            for key, array in placed.items()
            if self._item.fresh and wanted is not None
            if not (array.is_number or isinstance(wanted[key], np.ndarray))
            for chunk in keys_of[key]
        }
        return DenseRead(whole, on_devices)

    def _placed(
        self,
        array: ZarrArray,
        values: Mapping[str, memoryview],
        boxes: Mapping[Any, Box],
        template: Any,
    ) -> Any:
        held = {box: array.read(values, box) for box in set(boxes.values())}
        if template is not None and array.is_number:
            [data] = held.values()
            number = data.item()
            return type(template)(number) if type(template) in _NUMBERS else number
        if template is None or isinstance(template, np.ndarray):
            [data] = held.values()
            return data if self._item.fresh else data.copy()
        return placement.assembled(template, boxes, held)

    @cached_property
    def _empty(self) -> dict[KeyPath, Callable[[], Any]]:
        return {key: _EMPTY[kind] for key, kind in self._kinds.items() if kind in _EMPTY}

    @cached_property
    def _stored(self) -> dict[KeyPath, ZarrArray]:
        """Returns the arrays that do not need Orbax, for any placement."""
        found: dict[KeyPath, ZarrArray] = {}
        with self._nonsense_is_damage():
            special = {
                name
                for file, data in self._outline.files.items()
                if file.startswith(f"{ARRAY_METADATAS}/")
                for name in _special(json.loads(bytes(data))["array_metadatas"])
            }
            if self._metadata.get("use_zarr3"):
                return {}
            for key, kind in self._kinds.items():
                name = ".".join(key)
                text = self._outline.values.get(f"{name}/{ZARRAY}")
                if kind in _ARRAY_KINDS and text is not None and name not in special:
                    array = zarr_arrays.parsed(name, text, is_number=kind == _NUMBER)
                    if array is not None and not (array.is_number and array.shape):
                        found[key] = array
        return found

    def _described(self, keys: Iterable[KeyPath]) -> dict[str, memoryview]:
        names = (f"{'.'.join(key)}/{ZARRAY}" for key in keys)
        return {name: self._outline.values[name] for name in names if name in self._outline.values}

    def _files(self, keys: set[KeyPath]) -> dict[str, memoryview]:
        """Returns the files of an item that contains only some leaves."""
        entries = {
            text: entry
            for text, entry in self._metadata["tree_metadata"].items()
            if _key_of(entry) in keys
        }
        metadata = {**self._metadata, "tree_metadata": entries}
        return {**self._outline.files, PYTREE_METADATA: memoryview(json.dumps(metadata).encode())}

    @contextlib.contextmanager
    def _nonsense_is_damage(self) -> Iterator[None]:
        """Reports impossible contents of an item as damage, even if the checksums match."""
        try:
            yield
        except (RestoreError, StorageError):
            raise
        except Exception as error:
            # Orbax raises ``Exception`` itself for a missing chunk.
            if isinstance(error, _NONSENSE) or type(error) is Exception:
                raise self._damage(error) from error
            raise

    def _damage(self, error: Exception) -> Damaged:
        found = f"{type(error).__name__}: {error}"
        return Damaged(self._name, "dense leaves in Orbax's layout", found)

    @contextlib.contextmanager
    def _folder(self, values: DenseValues) -> Iterator[epath.Path]:
        with contextlib.closing(DenseFiles(values)) as files:
            yield epath.Path(files.folder(DENSE_ITEM))


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{found!r} is not text")
    return found


def _key_of(entry: Mapping[str, Any]) -> KeyPath:
    return tuple(_text(step["key"]) for step in entry["key_metadata"])


def _special(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Returns names of arrays with extended dtypes, such as keys, as Orbax will read them."""
    for one in (entry["array_metadata"] for entry in entries):
        name, extended = _text(one["param_name"]), one.get("ext_metadata")
        for shape in (one["write_shape"], one["chunk_shape"]):
            tuple(shape)
        if extended:
            if (impl := extended.get("random_key_impl")) is not None:
                jax.eval_shape(functools.partial(jax.random.key, impl=_text(impl)), 0)
            yield name


def _check_chunks(values: Mapping[str, memoryview], keys: Iterable[str], nbytes: int) -> None:
    """Checks that chunks exist, and their lengths, before memory is allocated for an array."""
    for key in keys:
        if key not in values or values[key].nbytes != nbytes:
            raise ValueError(f"{key} does not have {nbytes} bytes")


def _check_stored(name: str, text: memoryview, values: Mapping[str, memoryview]) -> None:
    """Checks an array before Orbax restores it: TensorStore allocates the size that it claims."""
    described = json.loads(bytes(text))
    check_chunks(described)
    counts = [-(-n // c) for n, c in zip(described["shape"], described["chunks"], strict=True)]
    keys = [chunk_key(name, index) for index in itertools.product(*map(range, counts))]
    nbytes = math.prod(described["chunks"]) * zarr_arrays.dtype_in(described["dtype"]).itemsize
    there = [key for key in keys if key in values]
    if described["compressor"] is None and not described["filters"]:
        _check_chunks(values, there, nbytes)
    elif nbytes > MOST_ZSTD_RATIO * min((values[key].nbytes for key in there), default=nbytes):
        raise ValueError(f"{name} has chunks of {nbytes} bytes")
    # TensorStore makes up those that are not there.
    if len(there) < len(keys) and nbytes * len(keys) > _MADE_UP_BYTES:
        raise ValueError(f"{name} has {len(there)} of {len(keys)} chunks")


def _is_placed(leaf: Any, array: ZarrArray) -> bool:
    """Returns whether an array becomes a leaf of a template without Orbax."""
    if array.is_number:
        if type(leaf) in _NUMBERS:
            return True
        is_array = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))
        return is_array and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
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
    sharding = placement.sharding_of(leaf)
    return sharding is None or type(sharding) in _PLACED


def _boxes(leaf: Any, shape: Sequence[int]) -> dict[Any, Box]:
    """Returns the box of each device of this process; the whole leaf if no device must hold it."""
    sharding = placement.sharding_of(leaf)
    if sharding is None:
        return {None: tuple((0, size) for size in shape)}
    indices: Mapping[Any, Any] = sharding.addressable_devices_indices_map(tuple(shape))
    return {
        device: tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))
        for device, index in indices.items()
    }
