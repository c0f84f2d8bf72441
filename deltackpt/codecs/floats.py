# SPDX-License-Identifier: Apache-2.0
"""Shorter floats: float32 rows as bfloat16 or float16, rounded to nearest even."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from deltackpt.codecs.codec import StoredArray
from deltackpt.errors import OptionError
from deltackpt.format.dtypes import dtype_of


@dataclasses.dataclass(frozen=True)
class ShorterFloat:
    """Stores float32 rows as a 16-bit float.

    It represents rows whose largest magnitude is 0 or in [smallest, largest]: from the smallest
    normal number, so that the error is relative to the row, to the greatest finite one whose square
    is far from overflow.

    Attributes:
      name: the codec's name.
      dtype: name of the 16-bit float dtype.
      mantissa_bits: number of explicit mantissa bits.
      smallest, largest: limits of the magnitude, as above.
    """

    name: str
    dtype: str
    mantissa_bits: int
    smallest: float
    largest: float
    lossless: ClassVar[bool] = False

    def check(self, trailing: tuple[int, ...], dtype: np.dtype) -> None:
        """See ``Codec``."""
        if dtype != np.float32:
            raise OptionError(
                f"codec {self.name}: expected float32 rows, found {dtype.name}; use codec raw"
            )

    def stored(self, trailing: tuple[int, ...], dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``Codec``."""
        return {"": StoredArray(trailing, np.dtype(np.uint16))}

    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """See ``Codec``; exact, since a float32 holds each shorter float."""
        if self.dtype == "bfloat16":
            # A bfloat16 is the upper half of a float32.
            np.left_shift(arrays[""], 16, out=out.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(out, arrays[""].view(dtype_of(self.dtype)))

    def error_bound(self, rows: np.ndarray) -> np.ndarray:
        """See ``Codec``: half a unit in the last place; subnormal values may become 0."""
        flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(np.float64)
        below = np.sqrt(flat.shape[1]) * self.smallest
        relative = 2.0 ** -(self.mantissa_bits + 1)
        unit = below * relative if self.dtype == "float16" else below
        return relative * np.linalg.norm(flat, axis=1) + unit


BFLOAT16 = ShorterFloat("bf16", "bfloat16", 7, 2.0**-126, 2.0**48)
FLOAT16 = ShorterFloat("fp16", "float16", 10, 2.0**-14, 65504.0)
