# SPDX-License-Identifier: Apache-2.0
"""Dense leaves through Orbax's own PyTree handler.

Orbax 0.12.8 rejects numpy scalars, which are stored as arrays without axes, and arrays without
elements, which are stored as a string. ``fault`` finds leaves that it accepts but cannot write;
``check`` and ``restored`` find those that it would cast, truncate or drop in a restore.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from deltackpt import codecs
from deltackpt.errors import TemplateMismatch
from deltackpt.lazy_import import LazyModule, ocp, ts
from deltackpt.save import dense_layout
from deltackpt.save.dense_layout import EMPTY_ARRAY
from deltackpt.state import paths, placement

if TYPE_CHECKING:
    from deltackpt.reading import orbax_values
    from deltackpt.restore import template_check
else:  # Only restores need them.
    orbax_values = LazyModule("deltackpt.reading.orbax_values")
    template_check = LazyModule("deltackpt.restore.template_check")

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray)
_MISSING = object()
#: What a key of a text must not hold: Orbax takes it for a JSON pointer, and escapes nothing.
_NO_POINTER = re.compile("~(?![01])")


def handler() -> ocp.PyTreeCheckpointHandler:
    """Returns Orbax's handler for the dense item."""
    return ocp.PyTreeCheckpointHandler()


def save_args(dense: dict[str, Any]) -> ocp.args.PyTreeSave:
    """Returns save arguments of the dense leaves, nested dicts."""
    return ocp.args.PyTreeSave(dense_layout.storable(dense))


def fault(leaf: Any, key: Sequence[str] = ()) -> str | None:
    """Returns why a dense leaf cannot be stored, or None; ``key`` is its path in the item.

    The result depends only on type, shape and dtype, except for Python integers and strings.
    """
    if _has_halves("".join(key)):
        return "has a lone surrogate in its path, which is not valid Unicode"
    if key and key[-1].endswith("/"):
        # Orbax would overwrite the leaf with the same path without it.
        return "has a path that ends with '/'"
    if paths.is_empty(leaf):
        return None
    kind = type(leaf).__name__
    if leaf is ...:
        return "is a placeholder, not a value"
    if isinstance(leaf, np.ma.MaskedArray):
        return "is a masked array, whose mask would be lost"
    if isinstance(leaf, int):
        # Those of int64 and of uint64 can be stored.
        return None if -(1 << 63) <= leaf < 1 << 64 else "is an integer of more than 64 bits"
    if isinstance(leaf, str) and not isinstance(leaf, np.str_):
        if _is_empty(leaf):
            return f"begins with {EMPTY_ARRAY!r}, which is reserved for arrays"
        if _has_halves(leaf):
            return "has a lone surrogate, which is not valid Unicode"
        return _text_fault(key)
    if isinstance(leaf, bytes):
        return f"is {kind}"
    if isinstance(leaf, (np.generic, np.ndarray, jax.Array)):
        return _dtype_fault(leaf) or (_text_fault(key) if 0 in leaf.shape else None)
    return None if ocp.type_handlers.has_type_handler(type(leaf)) else f"is a {kind}"


def _has_halves(text: str) -> bool:
    """Returns whether a string has a lone surrogate, which no file can store."""
    return paths.printable(text) != text


def _text_fault(key: Sequence[str]) -> str | None:
    """Returns why a string (or an array without elements) cannot be stored under a key."""
    if _NO_POINTER.search(".".join(key)):
        return "is stored as a string, whose path cannot contain '~' in Orbax"
    return None


def _dtype_fault(leaf: Any) -> str | None:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return "is an array of keys without elements" if 0 in leaf.shape else None
    try:
        # Without elements it travels as a text, of any dtype that has a name.
        known = codecs.dtype_of(leaf.dtype.name) if 0 in leaf.shape else ts.dtype(leaf.dtype.name)
        fits = known == _native(leaf.dtype)
    except ValueError:
        fits = False
    return None if fits else f"has dtype {leaf.dtype}"


def restore_args(abstract: dict[str, Any] | None, stored: Any) -> ocp.args.PyTreeRestore:
    """Returns restore arguments of the dense leaves for the item's metadata; None: all as numpy."""
    if abstract is None:
        kinds = jax.tree.map(_host_args, stored.tree, is_leaf=_is_leaf_metadata)
        return ocp.args.PyTreeRestore(restore_args=kinds)
    item = jax.tree.map(_asked_for, abstract, stored.tree, is_leaf=_is_leaf)
    return ocp.args.PyTreeRestore(
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)
    )


def abstract(stored: Any) -> dict[str, Any]:
    """Returns shapes and dtypes of stored leaves; other leaves stay as Orbax describes them."""
    return jax.tree.map(_abstract, stored.tree, is_leaf=_is_leaf_metadata)


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """What is known of a stored leaf before it is read.

    A number is a Python number. A string may represent an array without elements; its dtype is
    None.
    """

    kind: Literal["array", "number", "string"]
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None


def described(stored: Any) -> dict[str, Any]:
    """Returns each stored leaf as a ``StoredLeaf``; empty containers and other leaves stay."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, ocp.metadata.StringMetadata):
            return StoredLeaf("string")
        if not isinstance(leaf, ocp.metadata.ArrayMetadata):
            return leaf
        kind = "number" if isinstance(leaf, ocp.metadata.ScalarMetadata) else "array"
        return StoredLeaf(kind, tuple(leaf.shape), np.dtype(leaf.dtype))

    return jax.tree.map(of_leaf, stored.tree, is_leaf=_is_leaf_metadata)


def check(abstract: dict[str, Any], stored: dict[str, Any], step: int) -> None:
    """Checks leaves of the template against those of the step; Orbax would cast or drop some."""
    wanted, found = by_key(abstract), by_key(stored)
    faults = {}
    for key in (*wanted, *sorted(found.keys() - wanted.keys())):
        leaf, have = wanted.get(key, _MISSING), found.get(key, _MISSING)
        if leaf is _MISSING or not _fits(leaf, have):
            faults[f"dense leaf {_name(key)}"] = _described(leaf), _described(have)
    if faults:
        raise template_check.mismatch(step, faults)
    for key, leaf in wanted.items():
        if isinstance(leaf, _ARRAYS) and (problem := paths.narrowed(leaf)):
            raise TemplateMismatch(f"step {step}, dense leaf {_name(key)}: {problem}")


def from_folder(item_dir: epath.Path, abstract: dict[str, Any] | None, step: int) -> dict[str, Any]:
    """Restores the dense leaves of an item with Orbax's handler."""
    with contextlib.closing(handler()) as reader:
        metadata = reader.metadata(item_dir)
        if abstract is not None:
            check(abstract, described(metadata), step)
        found = reader.restore(item_dir, args=restore_args(abstract, metadata))
    leaves = restored(found, abstract, step)
    if abstract is not None:
        return leaves
    about = sorted((item_dir / orbax_values.ARRAY_METADATAS).glob("process_*"))
    return typed(leaves, (path.read_bytes() for path in about))


def restored(found: dict[str, Any], abstract: dict[str, Any] | None, step: int) -> dict[str, Any]:
    """Returns the leaves that Orbax restored as they were passed to ``save_args``."""
    found = jax.tree.map(_original, found, is_leaf=_is_leaf)
    if abstract is None:
        return found
    values = by_key(found)
    for key, leaf in by_key(abstract).items():
        if not _holds(leaf, values[key]):
            sides = _described(leaf), _described(values[key])
            raise template_check.mismatch(step, {f"dense leaf {_name(key)}": sides})
    return jax.tree.map(like, found, abstract, is_leaf=_is_leaf)


def typed(found: dict[str, Any], about: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Replaces key data with typed keys in leaves restored without a template.

    ``about``: contents of the item's metadata files.
    """
    impls: dict[str, str] = {}
    for data in about:
        impls |= orbax_values.key_impls(json.loads(bytes(data)))
    if not impls:
        return found

    def as_stored(path: Any, leaf: Any) -> Any:
        impl = impls.get(".".join(_keys(path)))
        return leaf if impl is None else jax.random.wrap_key_data(jnp.asarray(leaf), impl=impl)

    return jax.tree.map_with_path(as_stored, found, is_leaf=_is_leaf)


def _is_leaf_metadata(leaf: Any) -> bool:
    return not isinstance(leaf, (dict, list, tuple))


def _is_leaf(node: Any) -> bool:
    return paths.is_empty(node) or _is_leaf_metadata(node)


def by_key(dense: Any) -> dict[tuple[str, ...], Any]:
    """Returns leaves of nested dicts by their keys; empty containers count as leaves."""
    found = jax.tree.leaves_with_path(dense, is_leaf=_is_leaf)
    return {_keys(path): leaf for path, leaf in found}


def _keys(path: Iterable[Any]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((step,), simple=True) for step in path)


def _name(key: tuple[str, ...]) -> str:
    """Returns the path of a dense leaf in the state, from its escaped key."""
    return "/".join(map(urllib.parse.unquote, key))


def _is_number(leaf: Any) -> bool:
    """Returns whether a leaf is a Python number; numpy's float64 would pass as one otherwise."""
    return isinstance(leaf, (bool, int, float)) and not isinstance(leaf, np.generic)


def _fits(leaf: Any, have: Any) -> bool:
    """Returns whether a leaf of the template matches the stored one, by its metadata."""
    if have is _MISSING:
        return False
    if leaf is ...:  # Orbax leaves it as it is.
        return True
    if paths.is_empty(leaf) or paths.is_empty(have):
        return paths.is_empty(leaf) and paths.is_empty(have)
    if isinstance(leaf, str) or (isinstance(leaf, _ARRAYS) and 0 in leaf.shape):
        return isinstance(have, StoredLeaf) and have.kind == "string"
    if isinstance(leaf, (*_ARRAYS, np.generic)) or _is_number(leaf):
        if not isinstance(have, StoredLeaf) or have.dtype is None:
            return False
        if have.kind == "number" or _is_number(leaf):
            # A Python number, whose abstract form has a dtype of jax's choice.
            dtype = np.dtype(type(leaf)) if _is_number(leaf) else leaf.dtype
            return have.shape == np.shape(leaf) == () and _rank(have.dtype) <= _rank(dtype)
        return (have.shape, have.dtype) == stored_as(leaf)
    return ocp.type_handlers.has_type_handler(type(leaf))


def stored_as(leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Returns the shape and dtype in which Orbax stores an array; for keys, of their key data."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return tuple(leaf.shape), leaf.dtype.newbyteorder("=")


def as_keys(data: Any, like: Any) -> jax.Array:
    """Wraps key data as typed keys with the PRNG implementation of other keys, abstract or not."""
    impls: list[Any] = []
    # ``key_impl`` rejects abstract keys but accepts those of a trace.
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), like)
    return jax.random.wrap_key_data(jnp.asarray(data), impl=impls[0])


def _holds(leaf: Any, value: Any) -> bool:
    """Returns whether a restored value is of the kind that a leaf of the template names."""
    if isinstance(leaf, str):
        return isinstance(value, str)
    if not isinstance(leaf, (*_ARRAYS, np.generic)):
        return True
    if _is_number(value):
        return isinstance(value, float) or int(np.asarray(value).astype(leaf.dtype)) == value
    found = getattr(value, "shape", None), getattr(value, "dtype", None)
    return found == (leaf.shape, _native(leaf.dtype))


def _native(dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else dtype.newbyteorder("=")


def _rank(dtype: Any) -> int:
    """Ranks types: 0 for booleans, 1 for integers, 2 for other numbers; lower fits into higher."""
    kinds = (np.bool_, np.integer, np.number)
    return next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


def _described(leaf: Any) -> str:
    """Describes a leaf of a template, or a stored one, for an error."""
    if leaf is _MISSING:
        return template_check.NOTHING
    if leaf is None or paths.is_empty(leaf):
        return repr(leaf)
    if isinstance(leaf, StoredLeaf) and leaf.kind == "string":
        return "a string, or an array without elements"
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return f"{leaf!r} ({type(leaf).__name__})" if _is_number(leaf) else repr(leaf)
    return f"{getattr(dtype, 'name', dtype)}{list(shape)}"


def _is_empty(text: str) -> bool:
    return text.startswith(EMPTY_ARRAY + ":")


def _original(leaf: Any) -> Any:
    if isinstance(leaf, str) and _is_empty(leaf):
        dtype, _, shape = leaf.removeprefix(EMPTY_ARRAY + ":").partition(":")
        array = codecs.without_elements(dtype, shape)
        return leaf if array is None else array
    return leaf


def like(leaf: Any, abstract: Any) -> Any:
    """Returns a stored leaf converted to the kind and placement of the matching template leaf."""
    if isinstance(abstract, np.generic):
        return abstract.dtype.type(leaf)
    if isinstance(abstract, np.ndarray):
        return np.asarray(leaf, abstract.dtype)
    if isinstance(abstract, _ARRAYS) and (isinstance(leaf, np.ndarray) or _is_number(leaf)):
        # With jax_enable_x64 off its arrays have 32 bits at most.
        dtype = jax.dtypes.canonicalize_dtype(abstract.dtype)
        return placement.put(np.asarray(leaf, dtype), abstract)
    if isinstance(abstract, _ARRAYS) and isinstance(leaf, jax.Array):
        if leaf.is_fully_addressable:
            leaf = jax.device_put(leaf, placement.sharding_of(abstract))
        return placement.like(leaf, abstract)
    return leaf


def a_number(stored: ocp.metadata.ScalarMetadata) -> bool | int | float:
    """Returns a number of the stored type, which makes Orbax restore a number."""
    return np.dtype(stored.dtype).type().item()


def _asked_for(leaf: Any, have: Any) -> Any:
    """Returns the request to Orbax: a plain number, since Orbax would truncate others."""
    if isinstance(leaf, (*_ARRAYS, np.generic)) and isinstance(have, ocp.metadata.ScalarMetadata):
        return a_number(have)
    item = dense_layout.as_stored(leaf)
    if isinstance(item, np.ndarray) and not item.dtype.isnative:
        return np.broadcast_to(np.zeros((), _native(item.dtype)), item.shape)
    return _with_sharding(item)


def _with_sharding(leaf: Any) -> Any:
    """Adds a sharding; without one Orbax restores to the default device."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=default)
    return leaf


def _abstract(metadata: Any) -> Any:
    is_array = isinstance(metadata, ocp.metadata.ArrayMetadata)
    if not is_array or isinstance(metadata, ocp.metadata.ScalarMetadata):
        return metadata
    return jax.ShapeDtypeStruct(tuple(metadata.shape), metadata.dtype)


def _host_args(metadata: Any) -> ocp.RestoreArgs:
    if isinstance(metadata, ocp.metadata.ArrayMetadata):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.RestoreArgs()
