# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of a step, read lazily and without Orbax: Orbax's items, and blocks of a chain.

Orbax's data has no checksums: what is read is checked against the step's digests, and again if a
file has changed since. Shapes and dtypes in a database are checked only against the checksums of
its nodes. A step that a stock Orbax manager committed has no digests. Leaves stored as blocks
appear as those of the item that Orbax's handler would have written.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from deltackpt import codecs
from deltackpt.cached import cached_property
from deltackpt.errors import Damaged, ForeignDirectory
from deltackpt.format import naming
from deltackpt.format.manifest import DenseEntry, path_name
from deltackpt.format.row_blocks import PLAIN
from deltackpt.inspect.descriptions import shape_text
from deltackpt.inspect.lazy import Saves
from deltackpt.inspect.listing import Listing
from deltackpt.lazy_import import ts
from deltackpt.reading import stored_dense, stored_saves, zarr_arrays
from deltackpt.reading.orbax_values import ARRAY_METADATAS, key_impls
from deltackpt.reading.stored_dense import DenseShard
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.storage import ocdbt
from deltackpt.storage.kv_store import in_memory
from deltackpt.storage.store import StorePath, store_path
from deltackpt.units import count, size

if TYPE_CHECKING:
    import numpy.typing as npt

METADATA = naming.PYTREE_METADATA
_STRINGS = "_strings.json"
#: How the manager stores an empty array, which Orbax rejects; see handlers/orbax_dense.py.
_EMPTY = re.compile(r"deltackpt:empty:(\w+):([0-9,]+)")
#: Files that describe the leaves.
_DESCRIPTIONS = (METADATA, _STRINGS, f"{ARRAY_METADATAS}/")
#: Names of an array's metadata in Zarr v2 and v3.
_ARRAY_METADATA = (ocdbt.ZARRAY, "zarr.json")
#: Orbax's names of leaves without an array; containers are empty ones.
_WITHOUT_ARRAY = {"None", "Dict", "List", "Tuple", "NamedTuple", "string"}


#: Kinds of leaves without a value, and of those that are not arrays.
PLACEHOLDERS = ("None", "empty")
_NO_ARRAYS = (*PLACEHOLDERS, "string")


class ItemSource(Protocol):
    """An item: arrays as Zarr stores them, and files that describe them. Reads are verified."""

    def files(self, wanted: Callable[[str], bool]) -> Mapping[str, memoryview]:
        """Returns the wanted files next to the arrays, by name."""
        ...

    def values(self, wanted: Callable[[str], bool]) -> Mapping[str, memoryview]:
        """Returns the wanted metadata and chunks of arrays, by key."""
        ...


class DenseItem(Mapping[str, "DenseLeaf"]):
    """Leaves of an item of Orbax's PyTree handler, or of a delta's blocks, by '/'-joined path."""

    def __init__(
        self,
        item_dir: StorePath | Path,
        source: Callable[[], ItemSource],
        entries: Sequence[DenseEntry] = (),
        *,
        exists: Callable[[], bool],
        shown: str | None = None,
    ):
        """Internal: index ``Step.items``; ``source`` is called for each read."""
        self._dir = store_path(item_dir)
        self._source, self._exists = source, exists
        self._shown = shown or f"{self._dir.parent.name}/{self.name}"
        self._paths = {entry.key: path_name(entry.path) for entry in entries}

    @property
    def name(self) -> str:
        """Name of the item in its step."""
        return self._dir.name

    def __getitem__(self, name: str) -> DenseLeaf:
        if name not in self._leaves:
            raise KeyError(
                f"item {self.name}: expected one of {sorted(self._leaves)}, found {name!r}"
            )
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        return f"<DenseItem {self.name}: {len(self)} leaves>"

    @cached_property
    def _leaves(self) -> dict[str, DenseLeaf]:
        with self._described_by(METADATA):
            kinds: dict[tuple[str, ...], str] = {
                tuple(str(step["key"]) for step in entry["key_metadata"]): str(
                    entry["value_metadata"]["value_type"]
                )
                for entry in self._metadata["tree_metadata"].values()
            }
        names = {key: self._paths.get(key, "/".join(key)) for key in kinds}
        common = collections.Counter(names.values())
        found = {}
        for key, kind in kinds.items():
            # If keys contain slashes, paths may collide; Orbax's own names do not.
            name = names[key] if common[names[key]] == 1 else ".".join(key)
            found[name] = DenseLeaf(self, name, key, kind)
        return found

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        if METADATA not in self._files:
            raise ForeignDirectory(
                f"{self._shown}: expected an item of Orbax's PyTree handler, found no {METADATA}; "
                "read it with the library that wrote it"
            )
        return self._json(METADATA)

    def _text(self, key: Sequence[str]) -> str:
        # Orbax uses the keys, joined with ".", as a JSON pointer: if one contains a slash, the
        # string is in a nested object.
        found: Any = self._strings
        with self._described_by(_STRINGS):
            for step in ".".join(key).split("/"):
                found = found[step.replace("~1", "/").replace("~0", "~")]
            if not isinstance(found, str):
                raise TypeError(f"a {type(found).__name__} instead of a string")
        return found

    @cached_property
    def _strings(self) -> dict[str, object]:
        return self._json(_STRINGS) if _STRINGS in self._files else {}

    @cached_property
    def _prng_impls(self) -> dict[str, str]:
        """Implementation of each typed PRNG key, by the leaf's keys joined with ``.``."""
        found = {}
        for name in self._files:
            if name.startswith(f"{ARRAY_METADATAS}/process_"):
                with self._described_by(name):
                    found |= key_impls(self._json(name))
        return found

    @contextlib.contextmanager
    def _described_by(self, name: str) -> Iterator[None]:
        """Raises ``Damaged`` if one of Orbax's JSON files parses but lacks required contents."""
        try:
            yield
        except (KeyError, TypeError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise Damaged(f"{self._shown}/{name}", "valid Orbax contents", found) from error

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads(bytes(self._files[name]))
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{self._shown}/{name}", "JSON", str(error)) from error

    @cached_property
    def _files(self) -> Mapping[str, memoryview]:
        """The files that describe the leaves."""
        with self._reading() as source:
            return source.files(lambda name: name.startswith(_DESCRIPTIONS))

    @cached_property
    def _arrays(self) -> Mapping[str, memoryview]:
        """Zarr's metadata of all arrays."""
        with self._reading() as source:
            return source.values(lambda key: key.rpartition("/")[2] in _ARRAY_METADATA)

    def _read_array(self, key: Sequence[str]) -> np.ndarray:
        name = ".".join(key)
        with self._reading() as source:
            stored = source.values(lambda key: key.startswith(f"{name}/"))
        array = zarr_arrays.described(name, stored.get(f"{name}/{ocdbt.ZARRAY}"), self._shown)
        try:
            if array is not None and array.keys([array.whole]) <= stored.keys():
                return np.require(array.read(stored, array.whole), requirements="W")
            return np.asarray(self._opened(name, stored).read().result())
        except (ValueError, TypeError) as error:
            shown = f"{self._shown}/{name}"
            raise Damaged(shown, "an array that can be read", str(error)) from error

    def _described(self, key: Sequence[str]) -> ts.TensorStore:
        """An array without its chunks."""
        name = ".".join(key)
        found = (f"{name}/{one}" for one in _ARRAY_METADATA)
        return self._opened(name, {key: self._arrays[key] for key in found if key in self._arrays})

    def _opened(self, name: str, stored: Mapping[str, memoryview]) -> ts.TensorStore:
        spec, context = in_memory(stored)
        spec = {
            "driver": "zarr3" if self._metadata.get("use_zarr3") else "zarr",
            "kvstore": {**spec, "path": f"{name}/"},
            # A lost chunk would read as zeros, unless Orbax was configured to omit such chunks.
            "fill_missing_data_reads": not self._metadata.get(
                "store_array_data_equal_to_fill_value"
            ),
        }
        try:
            return ts.open(spec, open=True, read=True, context=context).result()
        except ValueError as error:
            raise Damaged(f"{self._shown}/{name}", "an array of Orbax's", str(error)) from error

    @contextlib.contextmanager
    def _reading(self) -> Iterator[ItemSource]:
        """Within, errors become ``StepGone`` if the step was removed, and it must exist after.

        Leaves of another save are never mixed with the tables of this one.
        """
        at = self._dir.parent
        with stored_saves.detect_removal(at, exists=self._exists, instead="open"):
            yield self._source()
            if not self._exists():
                raise stored_saves.gone(at, instead="open")


class DenseLeaf:
    """A leaf that is neither a table nor a slot; arrays are read when indexed or converted.

    Attributes:
      name: '/'-joined path of the leaf.
      kind: ``array``, ``key`` (a typed PRNG key, whose data is read), ``scalar``, ``string``,
        ``None``, or ``empty`` for an empty container.
    """

    def __init__(self, item: DenseItem, name: str, key: tuple[str, ...], value_type: str):
        """Internal: index ``DenseItem``."""
        self._item = item
        self._key = key
        self._value_type = value_type
        self.name = name

    @cached_property
    def kind(self) -> str:
        """Kind of the leaf; see the class."""
        if self._value_type == "string":
            return "string" if self._empty is None else "array"
        if self._value_type in ("None", "scalar"):
            return self._value_type
        if self._value_type in _WITHOUT_ARRAY:
            return "empty"
        return "array" if self.prng_impl is None else "key"

    @property
    def prng_impl(self) -> str | None:
        """Implementation of a typed PRNG key, such as ``threefry2x32``; None for other leaves."""
        return self._item._prng_impls.get(".".join(self._key))

    @property
    def value(self) -> naming.PyTree:
        """The value: a numpy array, a number, a string, None, or an empty dict, list or tuple.

        For a typed PRNG key, this is its data; get the key from
        ``jax.random.wrap_key_data(leaf.value, impl=leaf.prng_impl)``.
        """
        if self.kind in PLACEHOLDERS:
            return {"Dict": {}, "List": [], "Tuple": ()}.get(self._value_type)
        if self.kind == "string":
            return self._item._text(self._key)
        found = np.asarray(self)
        return found.item() if self.kind == "scalar" else found

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array; for a typed PRNG key, of its data."""
        return self._described[0]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array.

        Raises:
          TypeError: the leaf is not an array.
        """
        return self._described[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the array in memory; 0 for other leaves."""
        if self.kind in _NO_ARRAYS:
            return 0
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: Any) -> Any:
        """Indexes like numpy; reads the whole array."""
        shape, dtype = self._described
        if 0 in shape:
            return np.empty(shape, dtype)[index]
        return self._item._read_array(self._key)[index]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        found = np.asarray(self[...])
        return found if dtype is None else found.astype(dtype, copy=False)

    def __repr__(self) -> str:
        if self.kind in _NO_ARRAYS:
            return f"<DenseLeaf {self.name} {self.value!r}>"
        return f"<DenseLeaf {self.name} {self.kind} {list(self.shape)} {_dtype_text(self)}>"

    @cached_property
    def _empty(self) -> np.ndarray | None:
        """The empty array that a string encodes; None if it is a plain string."""
        match = _EMPTY.fullmatch(self._item._text(self._key))
        return None if match is None else codecs.without_elements(match[1], match[2])

    @cached_property
    def _described(self) -> tuple[tuple[int, ...], np.dtype]:
        if self.kind in _NO_ARRAYS:
            raise TypeError(f"{self.name}: expected an array, found {self.kind}; see its value")
        if self._value_type == "string":
            assert self._empty is not None
            return self._empty.shape, self._empty.dtype
        store = self._item._described(self._key)
        return tuple(store.shape), store.dtype.numpy_dtype


def list_dense(leaves: Iterable[DenseLeaf]) -> Listing:
    """Returns a line for each leaf with a value; the title counts the others."""
    shown, empty = [], 0
    for leaf in leaves:
        if leaf.kind in PLACEHOLDERS:
            empty += 1
        elif leaf.kind == "string":
            shown.append((leaf.name, repr(leaf.value), leaf.kind, None))
        else:
            shape = shape_text(leaf.shape)
            shown.append((leaf.name, shape, _dtype_text(leaf), size(leaf.nbytes)))
    kinds = "without a value: None, or empty, such as optax's MaskedNode and EmptyState"
    title = f"and {count(empty, 'placeholder')} {kinds}" if empty else ""
    return Listing(("dense leaf", "shape", "dtype", "bytes"), shown, title)


def _dtype_text(leaf: DenseLeaf) -> str:
    return leaf.dtype.name if leaf.kind != "key" else f"key<{leaf.prng_impl}>"


class DecodedItem(NamedTuple):
    """The dense item of a step or recovery point, whose values layers or WAL records contain."""

    saves: Saves

    def files(self, wanted: Callable[[str], bool]) -> Mapping[str, memoryview]:
        """See ``ItemSource``."""
        found = self.saves.dense(lambda key: False).files
        return {name: data for name, data in found.items() if wanted(name)}

    def values(self, wanted: Callable[[str], bool]) -> Mapping[str, memoryview]:
        """See ``ItemSource``."""
        return self.saves.dense(wanted).values


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedLeaf:
    """Blocks of a dense leaf in one save.

    Attributes:
      name: the leaf's '/'-joined path.
      codecs: codecs of the blocks, sorted; ``plain`` if the leaf is stored as bytes.
      blocks: number of changed blocks of 256 elements in the save; 0 for plain bytes.
      total_blocks: number of blocks of the leaf; 0 for plain bytes.
      nbytes: bytes on disk; files of several leaves are divided in proportion to their blocks.
      raw_bytes: bytes of the leaf in memory.
    """

    name: str
    codecs: tuple[str, ...]
    blocks: int
    total_blocks: int
    nbytes: int
    raw_bytes: int


def saved_leaves(save: StoredSave) -> tuple[SavedLeaf, ...]:
    """Returns each dense leaf's blocks in a save; empty if the leaves are in Orbax's item."""
    if save.head.dense_blocks is None:
        return ()
    names = {".".join(entry.key): path_name(entry.path) for entry in save.layout.dense}
    found: dict[str, _Counted] = collections.defaultdict(_Counted)
    for shard in stored_dense.shards(save):
        for value in shard.record.values:
            array, _, chunk = value.key.rpartition("/")
            if not value.file and chunk != ocdbt.ZARRAY:
                leaf = found[names.get(array, array)]
                leaf.total_blocks += value.blocks
                leaf.raw_bytes += value.nbytes
        for array, codec, blocks, nbytes in _held(shard):
            leaf = found[names.get(array, array)]
            leaf.codecs.add(codec)
            leaf.nbytes += nbytes
            leaf.blocks += blocks
    return tuple(
        SavedLeaf(
            name=name,
            codecs=tuple(sorted(leaf.codecs)),
            blocks=leaf.blocks,
            total_blocks=leaf.total_blocks,
            nbytes=round(leaf.nbytes),
            raw_bytes=leaf.raw_bytes,
        )
        for name, leaf in found.items()
    )


@dataclasses.dataclass
class _Counted:
    """A ``SavedLeaf`` that is being counted."""

    codecs: set[str] = dataclasses.field(default_factory=set)
    blocks: int = 0
    total_blocks: int = 0
    nbytes: float = 0.0
    raw_bytes: int = 0


def _held(shard: DenseShard) -> Iterator[tuple[str, str, int, float]]:
    """For each array with blocks in a segment: name, codec, blocks, bytes of files."""
    for segment in shard.record.segments:
        share = sum(shard.arrays.files_of(segment).values()) / max(1, segment.count)
        values = [value for value in shard.record.values if value.group == segment.group]
        codec = "+".join(encoding.codec for encoding in segment.encodings)
        if segment.group == PLAIN:
            held = [(value, PLAIN, 0, value.count) for value in values if value.at is not None]
        else:
            rows = stored_dense.blocks_by_value(values, shard.rows(segment))
            held = [(value, codec, len(rows), len(rows)) for value, (rows, _) in rows]
        for value, codec, blocks, stored in held:
            name, _, chunk = value.key.rpartition("/")
            if not value.file and chunk != ocdbt.ZARRAY:
                yield name, codec, blocks, share * stored


def list_saved(leaves: Iterable[SavedLeaf]) -> Listing:
    """Returns a line for each leaf in a save."""
    lines = [
        (
            leaf.name,
            "+".join(leaf.codecs) or None,
            leaf.blocks or None,
            f"{leaf.blocks / leaf.total_blocks:.2%}" if leaf.total_blocks else None,
            size(leaf.nbytes),
            f"{leaf.nbytes / leaf.raw_bytes:.1%}" if leaf.raw_bytes else None,
        )
        for leaf in leaves
    ]
    columns = ("dense leaf", "codec", "blocks", "share", "on disk", "of raw")
    return Listing(columns, lines, "dense leaves in this save")
