# SPDX-License-Identifier: Apache-2.0
"""Items that Orbax's PyTree handler wrote, read through TensorStore alone.

Orbax's files are read as its ``_METADATA`` describes them: each array is a Zarr array, by default
in an OCDBT database, under the leaf's keys joined with ``.``; strings stand in a JSON file. Its
data carries no checksum, so before the first number is read all files of the item are checked
against the digests of the step, and again where a file has changed since. Names need only the
metadata; shapes and dtypes are read without that check. A step that a stock Orbax manager committed
has no digests.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
from deltackpt.storage import digests
from deltackpt.storage.kv_store import Reachable, reachable
from deltackpt.storage.store import Spot, spot
from deltackpt.units import size

METADATA = names.PYTREE_METADATA
_STRINGS = "_strings.json"
_ARRAY_METADATAS = "array_metadatas"
#: How our manager stores an array without elements, which Orbax refuses: see handlers/dense.py.
_EMPTY = re.compile(r"deltackpt:empty:(\w+):([0-9,]+)")
#: Files that say which leaves there are.
_DESCRIPTIONS = (METADATA, _STRINGS, f"{_ARRAY_METADATAS}/")
#: Kinds of leaves, by Orbax's names, that hold no array; containers are empty ones.
_WITHOUT_ARRAY = {"None", "Dict", "List", "Tuple", "NamedTuple", "string"}


class DenseItem(Mapping[str, "DenseLeaf"]):
    """The leaves of an item that Orbax's PyTree handler wrote, by their '/'-joined paths."""

    def __init__(
        self,
        item_dir: Spot | Path,
        entries: Sequence[DenseEntry] = (),
        *,
        digests: bool,
        stands: Callable[[], bool],
    ):
        """Made by ``Step``.

        Args:
          item_dir: directory of the item.
          entries: where the leaves stand in the state, where our manifest says so.
          digests: whether the step has digests of its files.
          stands: whether the step's directory is still the one that was opened.
        """
        self._dir = spot(item_dir)
        self._stands = stands
        self._digests = digests
        self._parsed: dict[str, dict[str, Any]] = {}
        #: Files as they were when they were checked: all, or those that describe the leaves.
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
            # Where a key holds a slash two leaves may have one path; Orbax's own names differ.
            name = names[key] if common[names[key]] == 1 else ".".join(key)
            found[name] = DenseLeaf(self, name, key, kind)
        return found

    def text(self, key: Sequence[str]) -> str:
        """The string of a leaf.

        Orbax takes the keys, joined with ``.``, for a JSON pointer: where one holds a slash, the
        string stands in an object of its own.

        Args:
          key: of the leaf.
        """
        found: Any = self._strings
        with self.described(_STRINGS):
            for step in ".".join(key).split("/"):
                found = found[step.replace("~1", "/").replace("~0", "~")]
            if not isinstance(found, str):
                raise TypeError(f"a {type(found).__name__} in the place of a string")
        return found

    @functools.cached_property
    def _strings(self) -> dict[str, Any]:
        with self._standing():
            found = self._json(_STRINGS) if self._has(_STRINGS) else {}
            self._check_stands()
            return found

    @functools.cached_property
    def prng_impls(self) -> dict[str, str]:
        """Implementations of the typed PRNG keys that it holds, by their keys joined with ``.``."""
        found = {}
        with self._standing():
            for name in self._names_in(_ARRAY_METADATAS):
                if not name.startswith(f"{_ARRAY_METADATAS}/process_"):
                    continue
                with self.described(name):
                    for entry in self._json(name)["array_metadatas"]:
                        metadata = entry["array_metadata"]
                        impl = (metadata["ext_metadata"] or {}).get("random_key_impl")
                        if impl is not None:
                            found[str(metadata["param_name"])] = str(impl)
            self._check_stands()
        return found

    @contextlib.contextmanager
    def described(self, name: str) -> Iterator[None]:
        """Raises Damaged for what a file of Orbax's does not say although its JSON is whole."""
        try:
            yield
        except (KeyError, TypeError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise Damaged(f"{self._shown}/{name}", "what Orbax writes there", found) from error

    def open_array(self, key: Sequence[str]) -> Any:
        """The stored array of a leaf, a ``tensorstore.TensorStore``; nothing but its shape is read.

        Raises:
          Damaged: it is missing or altered.
          StepGone: the step was removed.
        """
        metadata = self._json(METADATA)
        name = ".".join(key)
        found = self._reachable()
        store = dict(found.spec)
        if metadata.get("use_ocdbt", True):
            store = {"driver": "ocdbt", "base": store, "path": f"{name}/"}
        elif ".." in name.split("/"):
            raise Damaged(f"{self._shown}/{METADATA}", "names of arrays in the item", repr(name))
        else:
            store["path"] += f"{name}/"
        spec = {
            "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
            "kvstore": store,
            # A lost chunk would read as zeros; Orbax may have been told to leave such chunks out.
            "fill_missing_data_reads": not metadata.get("store_array_data_equal_to_fill_value"),
        }
        with self._standing():
            try:
                return ts.open(spec, open=True, read=True, context=found.context).result()
            except ValueError as error:
                raise Damaged(f"{self._shown}/{name}", "an array of Orbax's", str(error)) from error

    def read_array(self, key: Sequence[str], index: Any) -> np.ndarray:
        """Reads a part of an array.

        Raises:
          Damaged, StepGone: as ``open_array``.
        """
        with self._standing():
            self._check(data=True)
            store = self.open_array(key)
            try:
                found = np.asarray(store[index].read().result())
            except ValueError as error:
                name = f"{self._shown}/{'.'.join(key)}"
                raise Damaged(name, "an array that can be read", str(error)) from error
            self._check_stands()
            return found

    def _reachable(self) -> Reachable:
        """The item's files, copied once where TensorStore cannot read them."""
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
        """Checks the files of the item against the digests of its step; those that changed anew.

        Args:
          data: whether all files are checked, or only those that describe the leaves.
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
        """Whether there is such a file beside the arrays."""
        return (self._dir / name).is_file()

    def _names_in(self, folder: str) -> list[str]:
        """The files of a folder beside the arrays."""
        return [f"{folder}/{name}" for name in (self._dir / folder).keys()]

    def _read(self, name: str) -> bytes:
        return (self._dir / name).read()

    def _check_stands(self) -> None:
        """Leaves of another save must not stand beside the tables of this one."""
        if not self._stands():
            raise removal.gone(self._dir.parent, instead="open")

    def _standing(self) -> contextlib.AbstractContextManager[None]:
        return removal.standing(self._dir.parent, stands=self._stands, instead="open")


class DenseLeaf:
    """A leaf that is neither table nor slot; an array is read when it is indexed or converted.

    Attributes:
      name: its '/'-joined path.
      kind: ``array``, ``key`` (a typed PRNG key, whose data is read), ``scalar``, ``string``,
        ``None``, or ``empty`` for an empty container.
    """

    def __init__(self, item: DenseItem, name: str, key: tuple[str, ...], value_type: str):
        """Made by ``DenseItem``."""
        self._item = item
        self._key = key
        self._value_type = value_type
        self.name = name

    @functools.cached_property
    def kind(self) -> str:
        """What it is; see the class."""
        if self._value_type == "string":
            return "string" if self._empty is None else "array"
        if self._value_type in ("None", "scalar"):
            return self._value_type
        if self._value_type in _WITHOUT_ARRAY:
            return "empty"
        return "array" if self.prng_impl is None else "key"

    @property
    def prng_impl(self) -> str | None:
        """Implementation of a typed PRNG key, such as ``threefry2x32``; None for another leaf."""
        return self._item.prng_impls.get(self._param)

    @property
    def value(self) -> Any:
        """The leaf: an array as numpy's, a number, a string, or None.

        An empty container is an empty dict, list or tuple. Of a typed PRNG key it is the data;
        ``jax.random.wrap_key_data(leaf.value, impl=leaf.prng_impl)`` makes the key of it.
        """
        if self.kind in ("None", "empty"):
            return {"Dict": {}, "List": [], "Tuple": ()}.get(self._value_type)
        if self.kind == "string":
            return self._text
        found = np.asarray(self)
        return found.item() if self.kind == "scalar" else found

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array; of a typed PRNG key that of its data."""
        return self._described[0]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array.

        Raises:
          TypeError: the leaf is no array.
        """
        return self._described[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the array in memory; 0 where it is none."""
        if self.kind in ("None", "empty", "string"):
            return 0
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: Any) -> Any:
        """What numpy would give; only ascending slices and integers read less than the whole."""
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
        return f"<DenseLeaf {self.name} {self.kind} {list(self.shape)} {self.dtype.name}>"

    @property
    def _param(self) -> str:
        return ".".join(self._key)

    @property
    def _text(self) -> str:
        return self._item.text(self._key)

    @functools.cached_property
    def _empty(self) -> np.ndarray | None:
        """The array without elements that a string stands for; None where it is a string."""
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
    """An index of integers and ascending slices within the shape; None where it is another."""
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


def dense_line(leaf: DenseLeaf) -> tuple[Any, ...]:
    """Name, shape, dtype and bytes of a dense leaf; its value where it is no array."""
    if leaf.kind in ("None", "empty", "string"):
        return leaf.name, repr(leaf.value), leaf.kind, None
    dtype = leaf.dtype.name if leaf.kind != "key" else f"key<{leaf.prng_impl}>"
    return leaf.name, html.shape_text(leaf.shape), dtype, size(leaf.nbytes)
