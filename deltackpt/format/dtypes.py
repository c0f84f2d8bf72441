# SPDX-License-Identifier: Apache-2.0
"""Dtypes of tables, and their names in Zarr and in headers of safetensors files. No I/O.

Zarr v3 has no core name for bfloat16, the float8 kinds and sub-byte integers; such arrays are
stored as the unsigned integers of their size, so that any Zarr reader opens them.

The safetensors library writes whole files from memory; this project streams rows.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deltackpt.errors import Damaged, OptionError
from deltackpt.lazy_import import LazyModule

if TYPE_CHECKING:
    import ml_dtypes
else:
    ml_dtypes = LazyModule("ml_dtypes")

_CORE_KINDS = "biufc"
#: A size has fewer digits.
_DIGITS = 19
#: Core dtypes of Zarr v3, which hold all others.
NUMPY_DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_ML_DTYPES = (
    *("bfloat16", "bcomplex32", "complex32"),
    *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
    *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)
#: Names of the dtypes that tables may have, if the installed ml_dtypes has them.
DTYPES = (*NUMPY_DTYPES, *_ML_DTYPES)
#: Maximum bytes of an element of each kind: Zarr v3 has no wider ones.
_WIDEST = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}


def is_known(name: str) -> bool:
    """Returns whether tables may have a dtype; a manifest with others is invalid."""
    return name in NUMPY_DTYPES or (name in _ML_DTYPES and hasattr(ml_dtypes, name))


@functools.cache
def dtype_of(name: str) -> np.dtype:
    """Returns the dtype for a name such as ``bfloat16``; raises OptionError if it is not known."""
    if not is_known(name):
        raise OptionError(
            f"dtype {name!r}: expected a numpy or ml_dtypes dtype, found neither; cast the table"
        )
    return np.dtype(name if name in NUMPY_DTYPES else getattr(ml_dtypes, name))


def without_elements(dtype: str, shape: str) -> np.ndarray | None:
    """Returns an empty array from a dtype and comma-separated sizes; None if they are invalid."""
    sizes = [int(size) for size in shape.split(",") if size.isdecimal() and len(size) < _DIGITS]
    if not is_known(dtype) or 0 not in sizes or len(sizes) != shape.count(",") + 1:
        return None
    try:
        return np.empty(sizes, dtype_of(dtype))
    except ValueError:  # Too many axes, or too long ones.
        return None


@functools.cache
def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the core Zarr dtype whose bits hold ``dtype``."""
    # 2 is one that a library has registered; numpy's own are 1, and 0 after newbyteorder("=").
    if dtype.kind in _CORE_KINDS and dtype.isbuiltin != 2:
        return dtype
    return np.dtype(f"uint{8 * dtype.itemsize}")


@functools.cache
def itemsize_of(stored: str) -> int:
    """Returns the bytes of one element of a stored dtype."""
    return np.dtype(stored).itemsize


def can_store(dtype: np.dtype) -> bool:
    """Returns whether an array of this dtype can be stored and restored exactly.

    The dtype's name must determine it completely; it does not include the byte order.
    """
    try:
        named = dtype_of(dtype.name)
    except OptionError:
        return False
    return named == dtype and dtype.itemsize > 0 and dtype.itemsize <= _WIDEST.get(dtype.kind, 8)


#: The header's entry that is not a tensor.
METADATA = "__metadata__"
#: Name of each dtype in the format.
NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {written: name for name, written in NAMES.items()}
_LENGTH_BYTES = 8


class SafetensorsTensor(NamedTuple):
    """The dtype (one of ``NAMES``) and shape of one tensor of a file."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def safetensors_header(
    tensors: Mapping[str, SafetensorsTensor], metadata: Mapping[str, str]
) -> bytes:
    """Returns the first bytes of a file, before the tensors' bytes, which follow in their order."""
    found: dict[str, object] = {METADATA: metadata}
    at = 0
    for name, one in tensors.items():
        offsets = [at, at + one.nbytes]
        dtype = NAMES[one.dtype.name]
        found[name] = {"dtype": dtype, "shape": list(one.shape), "data_offsets": offsets}
        at += one.nbytes
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def parsed_safetensors_header(
    data: bytes, shown: str
) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Returns the metadata and the tensors of a whole file, which share its memory."""
    try:
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        found = json.loads(data[_LENGTH_BYTES:start])
        metadata = {str(key): str(text) for key, text in found.pop(METADATA, {}).items()}
        arrays: dict[str, np.ndarray] = {}
        end = start
        for name, one in found.items():
            tensor = SafetensorsTensor(
                dtype_of(_DTYPES[one["dtype"]]), tuple(map(int, one["shape"]))
            )
            if min(tensor.shape, default=0) < 0 or [*one["data_offsets"]] != [
                end - start,
                end - start + tensor.nbytes,
            ]:
                raise ValueError(f"{name} at {one['data_offsets']}")
            flat = np.frombuffer(data, np.uint8, tensor.nbytes, end)
            arrays[name] = flat.view(tensor.dtype).reshape(tensor.shape)
            end += tensor.nbytes
        if end != len(data):
            raise ValueError(f"{len(data) - end} bytes after the tensors")
        return metadata, arrays
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(shown, "a safetensors file", str(error)) from error
