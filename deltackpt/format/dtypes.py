# SPDX-License-Identifier: Apache-2.0
"""Dtypes of tables, and the Zarr dtypes that hold them.

Zarr v3 has no core name for bfloat16, the float8 kinds and sub-byte integers; such arrays are
stored as the unsigned integers of their size, so that any Zarr reader opens them.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

from deltackpt.errors import OptionError

_CORE_KINDS = "biufc"
#: A size has fewer digits.
_DIGITS = 19
_NUMPY = (
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
#: Names of the dtypes that tables may have; a manifest with others is invalid.
DTYPES = frozenset((*_NUMPY, *(name for name in _ML_DTYPES if hasattr(ml_dtypes, name))))
#: Bytes of a number of each kind at most: Zarr v3 has no wider ones.
_WIDEST = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}


@functools.cache
def dtype_of(name: str) -> np.dtype:
    """Returns the dtype for a name in a manifest, such as ``float32`` or ``bfloat16``.

    Raises:
      OptionError: no such dtype is known.
    """
    if name not in DTYPES:
        raise OptionError(
            f"dtype {name!r}: expected a numpy or ml_dtypes dtype, found neither; cast the table"
        )
    return np.dtype(getattr(ml_dtypes, name, name))


def without_elements(dtype: str, shape: str) -> np.ndarray | None:
    """Returns an array without elements, from a dtype's name and comma-separated sizes.

    Returns:
      The array; None if the strings are invalid.
    """
    sizes = [int(size) for size in shape.split(",") if size.isdecimal() and len(size) < _DIGITS]
    if dtype not in DTYPES or 0 not in sizes or len(sizes) != shape.count(",") + 1:
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
