# SPDX-License-Identifier: Apache-2.0
"""Patches: safetensors files with the elements or rows that changed between two versions.

A patch has two tensors for each changed tensor ``NAME``: ``NAME:values``, and ``NAME:steps`` with
the positions. Each byte of the steps advances by that many positions and one more, to the next
value; 255 advances by 255 positions without a value. So the positions are

    at = steps.astype(int64).cumsum()[steps < 255] + arange(len(values))

A new tensor, or one that changed almost everywhere, is stored whole as ``NAME``. The metadata has
the version that the patch applies to, the version that results, and a CRC32C of each tensor. The
format is in ``docs/reference/format.md``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deltackpt.errors import Damaged, OptionError, PatchMismatch
from deltackpt.format import dtypes
from deltackpt.format.dtypes import SafetensorsTensor
from deltackpt.serving.row_changes import ChangeBatch
from deltackpt.storage import posix
from deltackpt.storage.digests import crc32c

_FORMAT = "deltackpt.patch.1"
_SKIP = 255
#: Elements per comparison, so that both stay in the CPU cache.
_COMPARED = 1 << 17
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Unit = Literal["element", "row", "whole"]


@dataclasses.dataclass(frozen=True, eq=False)
class TensorPatch:
    """The changes of one tensor.

    Attributes:
      unit: what ``positions`` index: elements of the flattened tensor, or rows; ``whole`` if the
        values are the whole tensor.
      dtype: name of the dtype.
      shape: shape of the tensor; for rows that of one row.
      positions: (n,) int64, ascending; empty if whole.
      values: (n,), or (n, *row shape), or the whole tensor.
    """

    unit: Unit
    dtype: str
    shape: tuple[int, ...]
    positions: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Patch:
    """What changed between two versions.

    Attributes:
      parent: id of the version that it applies to, such as ``str(version.position)``.
      save: id of the version that results.
      tensors: name to changes; names are those of dense leaves and tables.
      removed: names of tensors that the version does not have any more.
    """

    parent: str
    save: str
    tensors: Mapping[str, TensorPatch]
    removed: tuple[str, ...] = ()


def between(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], *, parent: str, save: str
) -> Patch:
    """Returns the elements whose bits differ between two states, such as two ``Version.dense``.

    Args:
      before: name to array.
      after: name to array; arrays that share memory with the one before are not compared.
      parent: id of the state before.
      save: id of the state after.
    """
    tensors: dict[str, TensorPatch] = {}
    for name, new in after.items():
        old = before.get(name)
        found = None
        if old is not None and (old.dtype, old.shape) == (new.dtype, new.shape):
            if old.ctypes.data == new.ctypes.data and old.strides == new.strides:
                continue
            bits = _bits(new)
            at = _different(_bits(old), bits)
            if not len(at):
                continue
            if 2 * len(at) < len(bits):
                values = np.ascontiguousarray(new).reshape(-1)[at]
                found = TensorPatch("element", new.dtype.name, new.shape, at, values)
        if found is None:
            nowhere = np.empty(0, np.int64)
            found = TensorPatch("whole", new.dtype.name, new.shape, nowhere, new)
        tensors[name] = found
    removed = tuple(name for name in before if name not in after)
    return Patch(parent, save, tensors, removed)


def of_changes(batches: Iterable[ChangeBatch], *, parent: str) -> Patch:
    """Returns the rows of batches of ``Live.changes``, the last of which is complete.

    Args:
      batches: all batches after the parent, in order.
      parent: id of the position that the consumer had before them.

    Raises:
      OptionError: the last batch is not complete, or there is none.
    """
    found = [*batches]
    if not found or not found[-1].complete:
        raise OptionError("patch: expected batches up to a complete one, found others")
    by_table: dict[str, list[ChangeBatch]] = {}
    for batch in reversed(found):  # The first value of a row is then its newest.
        by_table.setdefault(batch.table, []).append(batch)
    tensors: dict[str, TensorPatch] = {}
    for name, of_table in by_table.items():
        rows, first = np.unique(np.concatenate([one.rows for one in of_table]), return_index=True)
        values = np.concatenate([one.values for one in of_table])[first]
        tensors[name] = TensorPatch("row", values.dtype.name, values.shape[1:], rows, values)
    return Patch(parent, str(found[-1].position), tensors)


def write(patch: Patch, path: str | os.PathLike[str]) -> int:
    """Writes a patch as a safetensors file, which appears complete or not at all.

    Returns:
      The size of the file in bytes.

    Raises:
      OSError: the file cannot be written.
    """
    stored: dict[str, np.ndarray] = {}
    described: dict[str, object] = {}
    for name, one in patch.tensors.items():
        values = np.ascontiguousarray(one.values)
        if one.unit == "whole":
            pieces = {name: values}
        else:
            pieces = {f"{name}:steps": _steps(one.positions), f"{name}:values": values}
        stored |= pieces
        described[name] = {
            "unit": one.unit,
            "dtype": one.dtype,
            "shape": one.shape,
            "crc32c": [crc32c(_bytes(piece)) for piece in pieces.values()],
        }
    metadata = {
        "format": _FORMAT,
        "parent": patch.parent,
        "save": patch.save,
        "tensors": json.dumps(described),
        "removed": json.dumps(patch.removed),
    }
    # The header has no checksum of its own in the format.
    metadata["crc32c"] = str(_checksum(metadata))
    stored = {name: _storable(piece) for name, piece in stored.items()}
    # Wide types first, so that each tensor is aligned.
    names = sorted(stored, key=lambda name: (-stored[name].itemsize, name))
    listed = {name: SafetensorsTensor(stored[name].dtype, stored[name].shape) for name in names}
    with posix.replacing(Path(path)) as temporary:
        with temporary.open("wb") as file:
            file.write(dtypes.safetensors_header(listed, metadata))
            for name in names:
                file.write(_bytes(stored[name]).data)
        return temporary.stat().st_size


def read(path: str | os.PathLike[str]) -> Patch:
    """Reads and verifies a patch.

    Raises:
      Damaged: the file is truncated or altered, or is not a patch.
      OSError: the file cannot be read.
    """
    shown = str(path)
    metadata, stored = dtypes.parsed_safetensors_header(Path(path).read_bytes(), shown)
    checksum = metadata.pop("crc32c", None)
    if metadata.get("format") != _FORMAT or checksum != str(_checksum(metadata)):
        raise Damaged(shown, f"metadata of {_FORMAT} with a valid checksum", "others")
    tensors: dict[str, TensorPatch] = {}
    try:
        for name, one in json.loads(metadata["tensors"]).items():
            tensors[name] = _tensor(name, one, stored, shown)
        removed = tuple(json.loads(metadata["removed"]))
        return Patch(metadata["parent"], metadata["save"], tensors, removed)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(shown, "tensors as its metadata describes", str(error)) from error


def apply(patch: Patch, state: MutableMapping[str, np.ndarray], *, at: str) -> str:
    """Applies a patch to a state in place; checks everything before it changes anything.

    Args:
      patch: the patch.
      state: name to array, writable and C-contiguous; other tensors are left alone.
      at: id of the version that the state has.

    Returns:
      Id of the version that the state then has.

    Raises:
      PatchMismatch: the patch is for another version, or for tensors of another shape or dtype.
    """
    if patch.parent != at:
        raise PatchMismatch(
            f"patch to {patch.save}: expected a state at {patch.parent}, found one at {at}; apply "
            "the patches in between, or load the state whole"
        )
    for name, one in patch.tensors.items():
        if one.unit != "whole":
            _check(name, one, state.get(name))
    for name, one in patch.tensors.items():
        if one.unit == "whole":
            state[name] = np.array(one.values)
        elif one.unit == "row":
            state[name][one.positions] = one.values
        else:
            state[name].reshape(-1)[one.positions] = one.values
    for name in patch.removed:
        state.pop(name, None)
    return patch.save


def _check(name: str, one: TensorPatch, found: np.ndarray | None) -> None:
    shape = None if found is None else found.shape[1:] if one.unit == "row" else found.shape
    count = 0 if found is None else len(found) if one.unit == "row" else found.size
    matches = found is not None and (found.dtype.name, shape) == (one.dtype, one.shape)
    if not matches or (len(one.positions) and one.positions[-1] >= count):
        described = "none" if found is None else f"{found.dtype.name}{list(found.shape)}"
        what = f"{one.dtype}{list(one.shape)}"
        expected = f"rows of {what}, beyond {one.positions[-1]}" if one.unit == "row" else what
        raise PatchMismatch(
            f"patch of {name!r}: expected {expected}, found {described}; load the state whole"
        )
    if found is not None and not (found.flags.writeable and found.flags.c_contiguous):
        raise PatchMismatch(
            f"patch of {name!r}: expected a writable C-contiguous array, found another; copy it"
        )


def _tensor(name: str, one: Any, stored: Mapping[str, np.ndarray], shown: str) -> TensorPatch:
    unit, dtype = one["unit"], dtypes.dtype_of(one["dtype"])
    names = [name] if unit == "whole" else [f"{name}:steps", f"{name}:values"]
    pieces = [_bytes(stored[piece]) for piece in names]
    for piece, data, crc in zip(names, pieces, one["crc32c"], strict=True):
        if crc32c(data) != crc:
            raise Damaged(f"{shown}: {piece}", f"CRC32C {crc:08x}", "another")
    shape, values = tuple(map(int, one["shape"])), pieces[-1].view(dtype)
    if unit == "whole":
        return TensorPatch(unit, dtype.name, shape, np.empty(0, np.int64), values.reshape(shape))
    if unit not in ("element", "row"):
        raise ValueError(f"unit {unit!r}")
    steps = pieces[0]
    is_value = steps < _SKIP
    positions = np.cumsum(steps, dtype=np.int64)[is_value]
    positions += np.arange(len(positions))
    row = shape if unit == "row" else ()
    return TensorPatch(unit, dtype.name, shape, positions, values.reshape(len(positions), *row))


def _steps(positions: np.ndarray) -> np.ndarray:
    """Encodes ascending positions; see the module's docstring."""
    gaps = np.diff(positions, prepend=-1) - 1
    skips = gaps // _SKIP
    ends = np.cumsum(skips + 1)
    steps = np.full(ends[-1] if len(ends) else 0, _SKIP, np.uint8)
    steps[ends - 1] = gaps - skips * _SKIP
    return steps


def _different(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the positions at which two arrays of bits differ."""
    found = [np.empty(0, np.int64)]
    for start in range(0, len(one), _COMPARED):
        piece = slice(start, start + _COMPARED)
        differs = one[piece] != other[piece]
        if differs.any():
            differs = differs if differs.ndim == 1 else differs.any(axis=1)
            found.append(np.flatnonzero(differs) + start)
    return np.concatenate(found)


def _bits(array: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers, or as rows of bytes."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if (unsigned := _UNSIGNED.get(array.itemsize)) is not None:
        return flat.view(unsigned)
    return flat.view(np.uint8).reshape(len(flat), array.itemsize)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _checksum(metadata: Mapping[str, str]) -> int:
    return crc32c(np.frombuffer(json.dumps(dict(metadata), sort_keys=True).encode(), np.uint8))


def _storable(array: np.ndarray) -> np.ndarray:
    """Returns an array of a dtype that the format has; others are stored as their bytes."""
    if array.dtype.name in dtypes.NAMES:
        return array
    return _bytes(array).reshape(*array.shape, array.itemsize)
