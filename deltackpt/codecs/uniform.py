# SPDX-License-Identifier: Apache-2.0
"""Row-wise uniform quantization: codes of few bits, and a scale and an offset for each row.

Source: Eisenman et al., "Check-N-Run", NSDI 2022, section 4.2 (symmetric, asymmetric, and adaptive
asymmetric: a greedy search of the range).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from deltackpt.codecs import packing
from deltackpt.codecs.codec import StoredArray
from deltackpt.errors import OptionError

#: Magnitudes whose squares, steps and their inverses are normal float32 numbers. Rows whose
#: largest magnitude is neither 0 nor within are not held.
SMALLEST, LARGEST = 2.0**-48, 2.0**48
#: In float16 tables: a decoded number may lie a step beyond the row, and must not overflow.
_LARGEST_FLOAT16 = 2.0**15
#: A row's parameters are float16 if its largest magnitude is below the first, and its scale is 0 or
#: at least the second; else they are bfloat16, which the sign bit of the scale indicates.
FLOAT16_BELOW, FLOAT16_SCALE = 2.0**15, 2.0**-16
BFLOAT16_FLAG = 0x8000
#: Parameters of one row in bytes, each.
_PARAMETER = np.dtype(np.float16)
#: Dtype to the relative rounding error of its numbers, and half of its least subnormal number.
_ROUNDING = {
    "float32": (0.0, 0.0),
    "bfloat16": (2.0**-8, 2.0**-126),
    "float16": (2.0**-11, 2.0**-25),
}
_DTYPES = tuple(_ROUNDING)


def largest(dtype: np.dtype) -> float:
    """Returns the largest magnitude of representable rows of a dtype."""
    return _LARGEST_FLOAT16 if dtype.name == "float16" else LARGEST


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Codes k of a row x, decoded as ``(k - middle) * scale + offset``.

    Asymmetric codes cover [min, max] of the row with ``2**bits`` levels. Symmetric ones have no
    offset: 0 is exact, and one of the ``2**bits`` levels is unused.

    Attributes:
      name: the codec's name.
      bits: bits per code: 2, 3, 4 or 8.
      symmetric: whether codes are symmetric around 0, without an offset.
      bins: the greedy search shrinks the range in steps of ``1 / bins``, from the end with the
        smaller L2 error, and keeps the best range; 0 for no search.
      ratio: maximum share of the range that the search may remove.
      refits: number of least-squares fits of scale and offset to the codes after the search; a fit
        is kept only if it reduces the l2 error.
    """

    name: str
    bits: int
    symmetric: bool = False
    bins: int = 0
    ratio: float = 0.0
    refits: int = 0
    lossless: ClassVar[bool] = False

    @property
    def middle(self) -> int:
        """Returns the code whose value is the offset."""
        return 1 << (self.bits - 1)

    @property
    def lowest(self) -> int:
        """Returns the lowest code minus the middle."""
        return 1 - self.middle if self.symmetric else -self.middle

    @property
    def highest(self) -> int:
        """Returns the highest code minus the middle."""
        return self.middle - 1

    @property
    def steps(self) -> int:
        """Returns the number of steps of the search."""
        return round(self.bins * self.ratio)

    def check(self, trailing: tuple[int, ...], dtype: np.dtype) -> None:
        """See ``Codec``."""
        if dtype.name not in _DTYPES:
            raise OptionError(
                f"codec {self.name}: expected rows of {', '.join(_DTYPES)}, found {dtype.name}; "
                "use codec raw"
            )
        stored = sum(
            int(np.prod(array.trailing, dtype=np.int64)) * array.dtype.itemsize
            for array in self.stored(trailing, dtype).values()
        )
        raw = math.prod(trailing) * dtype.itemsize
        if stored >= raw:
            raise OptionError(
                f"codec {self.name}: expected rows wide enough to gain, found {dtype.name} rows of "
                f"shape {trailing}: {raw} bytes raw, {stored} encoded; use codec raw or "
                "bf16"
            )

    def stored(self, trailing: tuple[int, ...], dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``Codec``."""
        codes = (packing.packed_bytes(math.prod(trailing), self.bits),)
        arrays = {
            "": StoredArray(codes, np.dtype(np.uint8)),
            "scale": StoredArray((), _PARAMETER),
        }
        return arrays if self.symmetric else arrays | {"offset": StoredArray((), _PARAMETER)}

    def decode(self, arrays: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """See ``Codec``: in float32, the product rounded, then the sum."""
        width = math.prod(out.shape[1:])
        codes = packing.unpack(arrays[""], self.bits, width)
        centred = (codes ^ 0x80).view(np.int8) if self.bits == 8 else codes.view(np.int8)
        if self.bits < 8:
            centred -= np.int8(self.middle)
        scale, offset = self._parameters(arrays)
        values = out.reshape(len(out), width)
        if out.dtype != np.float32:
            values = np.empty((len(out), width), np.float32)
        np.multiply(centred, scale[:, None], out=values)
        if offset is not None:
            np.add(values, offset[:, None], out=values)
        if out.dtype != np.float32:
            np.copyto(out.reshape(len(out), width), values, casting="same_kind")

    def _parameters(self, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray | None]:
        """Scale and offset of each row, float32 (n,)."""
        scale = arrays["scale"].view(np.uint16)
        brain = (scale & BFLOAT16_FLAG) != 0
        found = [
            np.where(brain, _brain(array.view(np.uint16) & mask), array.astype(np.float32))
            for array, mask in (
                (arrays["scale"], np.uint16(BFLOAT16_FLAG - 1)),
                *(() if self.symmetric else ((arrays["offset"], np.uint16(0xFFFF)),)),
            )
        ]
        return found[0], None if self.symmetric else found[1]

    def error_bound(self, rows: np.ndarray) -> np.ndarray:
        """See ``Codec``: half a step for each element, and the rounding of the parameters.

        The search and the fits begin with the row's whole range and keep the best, so the bound of
        the plain codec also applies to them.
        """
        flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(np.float64)
        low, high = flat.min(axis=1, initial=np.inf), flat.max(axis=1, initial=-np.inf)
        magnitude = np.maximum(-low, high)
        if self.symmetric:
            step = magnitude / self.highest
        else:
            step = (high - low) / (self.highest - self.lowest)
        # The codes reach a step beyond the row: there the encoder may take bfloat16 earlier.
        half = (magnitude + 2 * step < FLOAT16_BELOW) & ((step >= FLOAT16_SCALE) | (step == 0))
        # Of scale and offset together: the last place of float16 (2**-15 below its normal
        # numbers), or of bfloat16; and what float32 rounds on the way.
        rounding = np.where(half, 2.0**-9 * magnitude + 2.0**-24, 2.0**-6 * magnitude)
        rounding += np.where(half, 2.0**-25 / FLOAT16_SCALE * step * self.middle, 0)
        # Of the table's own dtype.
        own, unit = _ROUNDING[rows.dtype.name]
        each = step / 2 + rounding + own * (magnitude + step) + unit
        return np.sqrt(flat.shape[1]) * each


def _brain(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def _family() -> tuple[Uniform, ...]:
    plain = [Uniform(f"int{bits}", bits) for bits in (8, 4, 3, 2)]
    symmetric = [Uniform(f"symmetric{bits}", bits, symmetric=True) for bits in (8, 4, 3, 2)]
    # Bins and ratios of Check-N-Run, section 5.2.
    searched = ((4, 45, 0.2), (3, 25, 0.5), (2, 25, 0.5))
    greedy = [
        Uniform(f"greedy{bits}", bits, bins=bins, ratio=ratio) for bits, bins, ratio in searched
    ]
    adaptive = [
        Uniform(f"adaptive{bits}", bits, bins=bins, ratio=ratio, refits=2)
        for bits, bins, ratio in searched
    ]
    return (*plain, *symmetric, *greedy, *adaptive, Uniform("adaptive8", 8, refits=2))


UNIFORM = _family()
