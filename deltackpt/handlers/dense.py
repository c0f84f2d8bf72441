# SPDX-License-Identifier: Apache-2.0
"""Dense leaves through Orbax's own PyTree handler.

Orbax 0.12.8 refuses two kinds of leaves that training states hold: numpy scalars, which travel
as arrays without axes, and arrays without elements, which travel as a string that says so. What it
accepts and cannot write is found by ``fault`` before anything begins; what it would cast, cut or
leave out at a restore by ``check`` and ``restored``.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from deltackpt import codecs
from deltackpt.errors import TemplateMismatch
from deltackpt.format.globs import listed
from deltackpt.state import paths

_EMPTY = "deltackpt:empty"
_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray)
_MISSING = object()
#: What a key of a text must not hold: Orbax takes it for a JSON pointer, and escapes nothing.
_NO_POINTER = re.compile("~(?![01])")
_ADVICE = "give the state that was saved as the template, or restore without one"


def handler() -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler for the dense item."""
    return ocp.PyTreeCheckpointHandler()


def save_args(dense: dict[str, Any]) -> ocp.args.PyTreeSave:
    """Save arguments of the dense leaves, nested dicts."""
    return ocp.args.PyTreeSave(storable(dense))


def storable(dense: dict[str, Any]) -> dict[str, Any]:
    """Dense leaves as they are stored."""
    return jax.tree.map(_storable, dense, is_leaf=_is_none)


def fault(leaf: Any, key: Sequence[str] = ()) -> str | None:
    """Why a dense leaf cannot be stored, None where it can.

    For leaves of one type, and of one shape and dtype where they have these, the answer is the
    same, but for Python's integers and texts.

    Args:
      leaf: the leaf.
      key: where it stands in the nested dicts of the item.
    """
    if _has_halves("".join(key)):
        return "has half a character in its path, which is no Unicode then"
    if key and key[-1].endswith("/"):
        # Orbax would write it over the leaf whose path is the same but for that.
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
            return f"begins with {_EMPTY!r}, which stands for arrays"
        return "has half a character, and is no Unicode" if _has_halves(leaf) else _text_fault(key)
    if isinstance(leaf, bytes):
        return f"is {kind}"
    if isinstance(leaf, (np.generic, np.ndarray, jax.Array)):
        return _dtype_fault(leaf) or (_text_fault(key) if 0 in leaf.shape else None)
    return None if ocp.type_handlers.has_type_handler(type(leaf)) else f"is a {kind}"


def _has_halves(text: str) -> bool:
    """Whether a surrogate stands without its other half: no file can hold it as a text."""
    return paths.printable(text) != text


def _text_fault(key: Sequence[str]) -> str | None:
    """Why a text cannot be stored under a key; arrays without elements are texts, too."""
    if _NO_POINTER.search(".".join(key)):
        return "is stored as a text, in whose path Orbax cannot have '~'"
    return None


def _dtype_fault(leaf: Any) -> str | None:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return "is an array of keys without any element" if 0 in leaf.shape else None
    try:
        # Without elements it travels as a text, of any dtype that has a name.
        known = codecs.dtype_of(leaf.dtype.name) if 0 in leaf.shape else ts.dtype(leaf.dtype.name)
        fits = known == _native(leaf.dtype)
    except ValueError:
        fits = False
    return None if fits else f"has dtype {leaf.dtype}"


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
    item = jax.tree.map(_asked_for, abstract, stored.tree, is_leaf=_is_leaf)
    return ocp.args.PyTreeRestore(
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)
    )


def abstract(stored: Any) -> dict[str, Any]:
    """Shapes and dtypes of stored leaves; what is no array stays as Orbax describes it.

    Args:
      stored: Orbax's metadata of the stored item.
    """
    return jax.tree.map(_abstract, stored.tree, is_leaf=_is_leaf_metadata)


def check(abstract: dict[str, Any], stored: dict[str, Any], step: int) -> None:
    """Checks leaves of the template against those of the step; Orbax would cast and drop some.

    Args:
      abstract: what to restore, like the argument of ``save_args``.
      stored: Orbax's metadata of each stored leaf.
      step: the step, for errors.

    Raises:
      TemplateMismatch: a leaf is missing on either side, is of another kind, shape or dtype, or has
        a dtype that jax would cut to 32 bits.
    """
    wanted, found = by_key(abstract), by_key(stored)
    if forgotten := found.keys() - wanted.keys():
        raise TemplateMismatch(
            f"step {step}: expected by the template no further dense leaves, found in the step\n"
            f"{listed(map(_name, forgotten))}\n{_ADVICE}; what is not in the template would be lost"
        )
    for key, leaf in wanted.items():
        have = found.get(key, _MISSING)
        if not _fits(leaf, have):
            raise TemplateMismatch(
                f"step {step}, dense leaf {_name(key)}: expected by the template "
                f"{_described(leaf)}, found in the step {_described(have)}; {_ADVICE}"
            )
        if isinstance(leaf, _ARRAYS) and (problem := paths.narrowed(leaf)):
            raise TemplateMismatch(f"step {step}, dense leaf {_name(key)}: {problem}")


def restored(found: dict[str, Any], abstract: dict[str, Any] | None, step: int) -> dict[str, Any]:
    """The dense leaves as they were given to ``save_args``.

    Args:
      found: what Orbax restored.
      abstract: what was to be restored, as for ``restore_args``.
      step: the step, for errors.

    Raises:
      TemplateMismatch: a number does not fit into the template's type, or an array without
        elements is another one.
    """
    found = jax.tree.map(_original, found, is_leaf=_is_leaf)
    if abstract is None:
        return found
    values = by_key(found)
    for key, leaf in by_key(abstract).items():
        if not _holds(leaf, values[key]):
            raise TemplateMismatch(
                f"step {step}, dense leaf {_name(key)}: expected by the template "
                f"{_described(leaf)}, found in the step {_described(values[key])}; {_ADVICE}"
            )
    return jax.tree.map(_like, found, abstract, is_leaf=_is_leaf)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _is_leaf_metadata(leaf: Any) -> bool:
    return not isinstance(leaf, (dict, list, tuple))


def _is_leaf(node: Any) -> bool:
    return paths.is_empty(node) or _is_leaf_metadata(node)


def by_key(dense: Any) -> dict[tuple[str, ...], Any]:
    """Leaves of nested dicts by their keys; empty containers count as leaves."""
    found = jax.tree.leaves_with_path(dense, is_leaf=_is_leaf)
    return {ocp.tree.str_keypath(path): leaf for path, leaf in found}


def _name(key: tuple[str, ...]) -> str:
    """Path of a dense leaf in the state, whose steps are escaped in its key."""
    return "/".join(map(urllib.parse.unquote, key))


def _is_number(leaf: Any) -> bool:
    """Whether a leaf is a number of Python's; numpy's float64 is one of them otherwise."""
    return isinstance(leaf, (bool, int, float)) and not isinstance(leaf, np.generic)


def _fits(leaf: Any, have: Any) -> bool:
    """Whether a leaf of the template can be restored from what is stored, by Orbax's metadata."""
    if have is _MISSING:
        return False
    if leaf is ...:  # Orbax leaves it as it is.
        return True
    if paths.is_empty(leaf) or paths.is_empty(have):
        return paths.is_empty(leaf) and paths.is_empty(have)
    if isinstance(leaf, str) or (isinstance(leaf, _ARRAYS) and 0 in leaf.shape):
        return isinstance(have, ocp.metadata.StringMetadata)
    if isinstance(leaf, (*_ARRAYS, np.generic)) or _is_number(leaf):
        if isinstance(have, ocp.metadata.ScalarMetadata) or _is_number(leaf):
            # A Python number, whose abstract form has a dtype of jax's choice.
            dtype = np.dtype(type(leaf)) if _is_number(leaf) else leaf.dtype
            shape = getattr(have, "shape", None)
            return shape == np.shape(leaf) == () and _rank(have.dtype) <= _rank(dtype)
        if not isinstance(have, ocp.metadata.ArrayMetadata):
            return False
        return (tuple(have.shape), np.dtype(have.dtype)) == stored_as(leaf)
    return ocp.type_handlers.has_type_handler(type(leaf))


def stored_as(leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype under which Orbax keeps an array; of keys their numbers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return tuple(leaf.shape), leaf.dtype.newbyteorder("=")


def _holds(leaf: Any, value: Any) -> bool:
    """Whether a restored value is what a leaf of the template stands for."""
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
    """0 of truth values, 1 of integers, 2 of other numbers: one goes into a higher one."""
    kinds = (np.bool_, np.integer, np.number)
    return next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


def _described(leaf: Any) -> str:
    """A leaf of a template, or Orbax's metadata of one, in an error."""
    if leaf is _MISSING:
        return "no such array"
    if leaf is None or paths.is_empty(leaf):
        return repr(leaf)
    if isinstance(leaf, ocp.metadata.StringMetadata):
        return "a text, or an array without elements"
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return f"{leaf!r} ({type(leaf).__name__})" if _is_number(leaf) else repr(leaf)
    return f"{getattr(dtype, 'name', dtype)}{list(shape)}"


def _is_empty(text: str) -> bool:
    """Whether a text stands for an array without elements."""
    return text.startswith(_EMPTY + ":")


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
    if isinstance(abstract, np.ndarray):
        return np.asarray(leaf, abstract.dtype)
    if isinstance(abstract, _ARRAYS) and (isinstance(leaf, np.ndarray) or _is_number(leaf)):
        value = np.asarray(leaf, abstract.dtype)
        return jax.device_put(value, getattr(abstract, "sharding", None))
    return leaf


def a_number(stored: ocp.metadata.ScalarMetadata) -> bool | int | float:
    """A number of the type of a stored one, which asks Orbax for it."""
    return np.dtype(stored.dtype).type().item()


def _asked_for(leaf: Any, have: Any) -> Any:
    """What Orbax is asked for: a number as such, since it would cut one that does not fit."""
    if isinstance(leaf, (*_ARRAYS, np.generic)) and isinstance(have, ocp.metadata.ScalarMetadata):
        return a_number(have)
    item = _storable(leaf)
    if isinstance(item, np.ndarray) and not item.dtype.isnative:
        return np.broadcast_to(np.zeros((), _native(item.dtype)), item.shape)
    return _with_sharding(item)


def _with_sharding(leaf: Any) -> Any:
    """Restoring without shardings goes to the default device, whatever the topology was."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=default)
    return leaf


def _abstract(metadata: Any) -> Any:
    if not isinstance(metadata, ocp.metadata.ArrayMetadata):
        return metadata
    if isinstance(metadata, ocp.metadata.ScalarMetadata):
        return metadata
    return jax.ShapeDtypeStruct(tuple(metadata.shape), metadata.dtype)


def _host_args(metadata: Any) -> ocp.RestoreArgs:
    if isinstance(metadata, ocp.metadata.ArrayMetadata):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.RestoreArgs()
