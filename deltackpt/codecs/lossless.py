# SPDX-License-Identifier: Apache-2.0
"""Codecs that keep every bit: the stored array is a view of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from deltackpt.codecs.codec import StoredArray
from deltackpt.errors import OptionError
from deltackpt.format.dtypes import stored_dtype


class Raw:
    """The bits as they are: chunks can be read straight into their place."""

    name = "raw"
    lossless: ClassVar[bool] = True

    def check(self, trailing: tuple[int, ...], dtype: np.dtype) -> None:
        """Every row can be stored."""

    def stored(self, trailing: tuple[int, ...], dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``Codec``."""
        return {"": StoredArray(trailing, stored_dtype(dtype))}

    def stored_view(self, rows: np.ndarray) -> np.ndarray:
        """See ``Lossless``."""
        return rows.view(stored_dtype(rows.dtype))

    def rows_view(self, stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """See ``Lossless``."""
        return stored.view(dtype)

    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """See ``Codec``."""
        np.copyto(self.stored_view(out), arrays[""])

    def error_bound(self, rows: np.ndarray) -> np.ndarray:
        """See ``Codec``."""
        return np.zeros(len(rows))


class BytePlanes(Raw):
    """The bytes of equal place of all numbers of a chunk side by side, compressed by zstd.

    Sign and exponent of trained floats have 2 to 3 bits of entropy, their mantissas none to gain:
    a seventh is saved (measured 0.84 of normal, 0.86 of trained rows, where zstd alone leaves
    0.92 and 0.94), at 1.5 GB/s on two cores.
    """

    name = "lossless"

    def check(self, trailing: tuple[int, ...], dtype: np.dtype) -> None:
        """See ``Codec``."""
        if dtype.itemsize == 1:
            raise OptionError(
                f"codec lossless: expected numbers of two bytes or more, found {dtype.name}; use "
                "codec raw"
            )

    def stored(self, trailing: tuple[int, ...], dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``Codec``."""
        return {"": StoredArray((*trailing, dtype.itemsize), np.dtype(np.uint8), True)}

    def stored_view(self, rows: np.ndarray) -> np.ndarray:
        """See ``Lossless``."""
        return rows.view(np.uint8).reshape(*rows.shape, rows.dtype.itemsize)

    def rows_view(self, stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """See ``Lossless``."""
        return stored.view(dtype).reshape(stored.shape[:-1])
