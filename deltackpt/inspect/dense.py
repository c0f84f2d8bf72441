# SPDX-License-Identifier: Apache-2.0
"""Items of Orbax's PyTree handler, read through TensorStore, without Orbax.

Orbax's ``_METADATA`` describes the files: each array is a Zarr array, by default in an OCDBT
database, under the leaf's keys joined with ``.``; strings are in a JSON file. The data has no
checksums. Before the first element is read, all files of the item are therefore checked against
the step's digests, and again if a file has changed since. Names need only the metadata; shapes and
dtypes are read without that check. A step that a stock Orbax manager committed has no digests.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from deltackpt import codecs
from deltackpt.errors import Damaged, ForeignDirectory
from deltackpt.format import names
from deltackpt.format.manifest import DenseLeaf as DenseEntry
from deltackpt.format.manifest import path_name
from deltackpt.inspect import html
from deltackpt.reading import removal
from deltackpt.reading.orbax_values import ARRAY_METADATAS, key_impls
from deltackpt.storage import digests
from deltackpt.storage.kv_store import Reachable, reachable
from deltackpt.storage.store import StorePath, store_path
from deltackpt.units import count, size

METADATA = names.PYTREE_METADATA
_STRINGS = "_strings.json"
#: How the manager stores an array without elements, which Orbax rejects: see handlers/dense.py.
_EMPTY = re.compile(r"deltackpt:empty:(\w+):([0-9,]+)")
#: Files that describe the leaves.
_DESCRIPTIONS = (METADATA, _STRINGS, f"{ARRAY_METADATAS}/")
#: Orbax's names of leaves without an array; containers are empty ones.
_WITHOUT_ARRAY = {"None", "Dict", "List", "Tuple", "NamedTuple", "string"}


#: Kinds of leaves without a value.
PLACEHOLDERS = ("None", "empty")


class DenseItem(Mapping[str, "DenseLeaf"]):
    """Leaves of an item that Orbax's PyTree handler wrote, by '/'-joined path."""

    def __init__(
        self,
        item_dir: StorePath | Path,
        entries: Sequence[DenseEntry] = (),
        *,
        digests: bool,
        stands: Callable[[], bool],
    ):
        """Internal: index ``Step.items``.

        Args:
          item_dir: directory of the item.
          entries: paths of the leaves in the state, if the manifest has them.
          digests: whether the step has digests of its files.
          stands: returns whether the step's directory is still the one that was opened.
        """
        self._dir = store_path(item_dir)
        self._stands = stands
        self._digests = digests
        self._parsed: dict[str, dict[str, Any]] = {}
        #: Versions of the files when they were checked: all files, or only the descriptions.
        self._checked: dict[bool, dict[str, Hashable]] = {}
        self._paths = {entry.key: path_name(entry.path) for entry in entries}
        self._copied: Reachable | None = None

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

    @functools.cached_property
    def _leaves(self) -> dict[str, DenseLeaf]:
        with self.described(METADATA):
            kinds: dict[tuple[str, ...], str] = {
                tuple(str(step["key"]) for step in entry["key_metadata"]): str(
                    entry["value_metadata"]["value_type"]
                )
                for entry in self._json(METADATA)["tree_metadata"].values()
            }
        names = {key: self._paths.get(key, "/".join(key)) for key in kinds}
        common = collections.Counter(names.values())
        found = {}
        for key, kind in kinds.items():
            # If keys contain slashes, paths may collide; Orbax's own names do not.
            name = names[key] if common[names[key]] == 1 else ".".join(key)
            found[name] = DenseLeaf(self, name, key, kind)
        return found

    def text(self, key: Sequence[str]) -> str:
        """Returns the string of a leaf.

        Orbax uses the keys, joined with ``.``, as a JSON pointer: if one contains a slash, the
        string is in a nested object.

        Args:
          key: key of the leaf.
        """
        found: Any = self._strings
        with self.described(_STRINGS):
            for step in ".".join(key).split("/"):
                found = found[step.replace("~1", "/").replace("~0", "~")]
            if not isinstance(found, str):
                raise TypeError(f"a {type(found).__name__} instead of a string")
        return found

    @functools.cached_property
    def _strings(self) -> dict[str, Any]:
        with self._standing():
            found = self._json(_STRINGS) if self._has(_STRINGS) else {}
            self._check_stands()
            return found

    @functools.cached_property
    def prng_impls(self) -> dict[str, str]:
        """Implementation of each typed PRNG key, by the leaf's keys joined with ``.``."""
        found = {}
        with self._standing():
            for name in self._names_in(ARRAY_METADATAS):
                if not name.startswith(f"{ARRAY_METADATAS}/process_"):
                    continue
                with self.described(name):
                    found |= key_impls(self._json(name))
            self._check_stands()
        return found

    @contextlib.contextmanager
    def described(self, name: str) -> Iterator[None]:
        """Raises ``Damaged`` if one of Orbax's JSON files parses but lacks required contents."""
        try:
            yield
        except (KeyError, TypeError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise Damaged(f"{self._shown}/{name}", "valid Orbax contents", found) from error

    def open_array(self, key: Sequence[str]) -> Any:
        """Opens the array of a leaf as a ``tensorstore.TensorStore``; reads only its metadata.

        Raises:
          Damaged: the array is missing or altered.
          StepGone: the step was removed.
        """
        return self._opened(key, data=False)

    def read_array(self, key: Sequence[str], index: Any) -> np.ndarray:
        """Reads a slice of an array.

        Raises:
          Damaged, StepGone: as for ``open_array``.
        """
        with self._standing():
            store = self._opened(key, data=True)
            try:
                found = np.asarray(store[index].read().result())
            except ValueError as error:
                name = f"{self._shown}/{'.'.join(key)}"
                raise Damaged(name, "an array that can be read", str(error)) from error
            self._check_stands()
            return found

    def _opened(self, key: Sequence[str], *, data: bool) -> Any:
        name, metadata = ".".join(key), self._json(METADATA)
        with self._standing():
            kvstore, context = self._stored(name, metadata, data=data)
            spec = {
                "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
                "kvstore": kvstore,
                # A lost chunk would read as zeros, unless Orbax was configured to omit such chunks.
                "fill_missing_data_reads": not metadata.get("store_array_data_equal_to_fill_value"),
            }
            try:
                return ts.open(spec, open=True, read=True, context=context).result()
            except ValueError as error:
                raise Damaged(f"{self._shown}/{name}", "an array of Orbax's", str(error)) from error

    def _stored(self, name: str, metadata: Mapping[str, Any], *, data: bool) -> Reachable:
        """An array's folder; if ``data``, everything that its data depends on was verified."""
        if data:
            self._check(data=True)
        spec, context = self._reachable()
        if metadata.get("use_ocdbt", True):
            return Reachable({"driver": "ocdbt", "base": spec, "path": f"{name}/"}, context)
        if ".." in name.split("/"):
            raise Damaged(f"{self._shown}/{METADATA}", "names of arrays in the item", repr(name))
        return Reachable({**spec, "path": f"{spec['path']}{name}/"}, context)

    def _reachable(self) -> Reachable:
        """The item's files, copied once if TensorStore cannot read them in place."""
        if self._copied is None:
            with self._standing():
                found = reachable(self._dir)
            if found.spec["driver"] != "memory":
                return found
            self._copied = found
        return self._copied

    @property
    def _shown(self) -> str:
        return f"{self._dir.parent.name}/{self.name}"

    def _check(self, *, data: bool) -> None:
        """Checks the item's files against the step's digests, again if a file has changed.

        Args:
          data: whether to check all files, or only those that describe the leaves.
        """
        if not self._digests:
            return
        state = self._dir.versions()
        if self._checked.get(data) == state:
            return
        prefixes = (f"{self.name}/",)
        if not data:
            prefixes = tuple(f"{self.name}/{name}" for name in _DESCRIPTIONS)
        for damage in digests.check_step_files(
            self._dir.parent, wanted=lambda name: name.startswith(prefixes)
        ):
            raise damage
        self._checked[data] = state

    def _json(self, name: str) -> dict[str, Any]:
        if name not in self._parsed:
            with self._standing():
                found = self._read_json(name)
                self._check_stands()
            self._parsed[name] = found
        return self._parsed[name]

    def _read_json(self, name: str) -> dict[str, Any]:
        if not self._has(METADATA):
            self._check_stands()
            if not self._digests:
                raise ForeignDirectory(
                    f"{self._shown}: expected an item of Orbax's PyTree handler, found no "
                    f"{METADATA}; read it with the library that wrote it"
                )
        self._check(data=False)
        try:
            return json.loads(self._read(name))
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{self._shown}/{name}", "JSON", str(error)) from error

    def _has(self, name: str) -> bool:
        """Whether the item has such a file besides the arrays."""
        return (self._dir / name).is_file()

    def _names_in(self, folder: str) -> list[str]:
        """The files of a folder of the item."""
        return [f"{folder}/{name}" for name in (self._dir / folder).keys()]

    def _read(self, name: str) -> bytes:
        return (self._dir / name).read()

    def _check_stands(self) -> None:
        """Never mixes leaves of another save with the tables of this one."""
        if not self._stands():
            raise removal.gone(self._dir.parent, instead="open")

    def _standing(self) -> contextlib.AbstractContextManager[None]:
        return removal.standing(self._dir.parent, stands=self._stands, instead="open")


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

    @functools.cached_property
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
        return self._item.prng_impls.get(self._param)

    @property
    def value(self) -> Any:
        """The value: a numpy array, a number, a string, None, or an empty dict, list or tuple.

        For a typed PRNG key, this is its data; get the key from
        ``jax.random.wrap_key_data(leaf.value, impl=leaf.prng_impl)``.
        """
        if self.kind in ("None", "empty"):
            return {"Dict": {}, "List": [], "Tuple": ()}.get(self._value_type)
        if self.kind == "string":
            return self._text
        found = np.asarray(self)
        return found.item() if self.kind == "scalar" else found

    @functools.cached_property
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
        if self.kind in ("None", "empty", "string"):
            return 0
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: Any) -> Any:
        """Indexes like numpy; only integers and slices of step 1 read less than the whole array."""
        shape, dtype = self._described
        if 0 in shape:
            return np.empty(shape, dtype)[index]
        plain = _plain_index(index, shape)
        if plain is None:
            return self._item.read_array(self._key, ...)[index]
        found = self._item.read_array(self._key, plain)
        return found if found.ndim else found[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = np.asarray(self[...])
        return found if dtype is None else found.astype(dtype, copy=False)

    def __repr__(self) -> str:
        if self.kind in ("None", "empty", "string"):
            return f"<DenseLeaf {self.name} {self.value!r}>"
        return f"<DenseLeaf {self.name} {self.kind} {list(self.shape)} {_dtype_text(self)}>"

    @property
    def _param(self) -> str:
        return ".".join(self._key)

    @property
    def _text(self) -> str:
        return self._item.text(self._key)

    @functools.cached_property
    def _empty(self) -> np.ndarray | None:
        """The empty array that a string encodes; None if it is a plain string."""
        match = _EMPTY.fullmatch(self._text)
        return None if match is None else codecs.without_elements(match[1], match[2])

    @functools.cached_property
    def _described(self) -> tuple[tuple[int, ...], np.dtype]:
        if self.kind in ("None", "empty", "string"):
            raise TypeError(f"{self.name}: expected an array, found {self.kind}; see its value")
        if self._value_type == "string":
            assert self._empty is not None
            return self._empty.shape, self._empty.dtype
        store = self._item.open_array(self._key)
        return tuple(store.shape), store.dtype.numpy_dtype


def _plain_index(index: Any, shape: tuple[int, ...]) -> tuple[int | slice, ...] | None:
    """Normalizes an index of integers and slices of step 1; None for any other index."""
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [number for number, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1 or len(parts) - len(dots) > len(shape):
        return None
    if dots:
        parts[dots[0] : dots[0] + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    found: list[int | slice] = []
    for part, length in zip(parts, shape, strict=False):
        if isinstance(part, slice):
            start, stop, step = part.indices(length)
            if step < 1 or stop <= start:
                return None
            if step > 1:  # TensorStore would keep the origin start / step.
                return None
            found.append(slice(start, stop))
        elif isinstance(part, (int, np.integer)) and not isinstance(part, bool):
            if not -length <= part < length:
                return None
            found.append(int(part) % length)
        else:
            return None
    return tuple(found)


DENSE_COLUMNS = ("dense leaf", "shape", "dtype", "bytes")


def dense_lines(leaves: Iterable[DenseLeaf]) -> tuple[list[tuple[Any, ...]], str]:
    """Returns lines for ``DENSE_COLUMNS``, and a note that counts the leaves without a value.

    Those leaves are None and empty containers, such as optax's ``MaskedNode`` and ``EmptyState``.
    """
    shown, empty = [], 0
    for leaf in leaves:
        if leaf.kind in PLACEHOLDERS:
            empty += 1
        else:
            shown.append(dense_line(leaf))
    kinds = "without a value: None, or empty, such as optax's MaskedNode and EmptyState"
    return shown, f"and {count(empty, 'placeholder')} {kinds}" if empty else ""


def dense_line(leaf: DenseLeaf) -> tuple[Any, ...]:
    """Returns name, shape, dtype and bytes of a dense leaf; the value if it is not an array."""
    if leaf.kind in ("None", "empty", "string"):
        return leaf.name, repr(leaf.value), leaf.kind, None
    return leaf.name, html.shape_text(leaf.shape), _dtype_text(leaf), size(leaf.nbytes)


def _dtype_text(leaf: DenseLeaf) -> str:
    return leaf.dtype.name if leaf.kind != "key" else f"key<{leaf.prng_impl}>"
