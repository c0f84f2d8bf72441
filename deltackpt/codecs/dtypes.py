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


@functools.cache
def dtype_of(name: str) -> np.dtype:
    """The dtype of a name as in a manifest, such as ``float32`` or ``bfloat16``.

    Raises:
      OptionError: no such dtype is known.
    """
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError as error:
        raise OptionError(
            f"dtype {name!r}: expected a numpy or ml_dtypes dtype, found neither; cast the table"
        ) from error


@functools.cache
def stored_dtype(dtype: np.dtype) -> np.dtype:
    """The core Zarr dtype whose bits hold ``dtype``."""
    if dtype.kind in _CORE_KINDS and dtype.isbuiltin == 1:
        return dtype
    return np.dtype(f"uint{8 * dtype.itemsize}")
