# SPDX-License-Identifier: Apache-2.0
"""Codecs: lossless to the bit, or within the bound that they state."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from deltackpt import codecs
from deltackpt.errors import OptionError

words = arrays.arrays(np.uint32, st.tuples(st.integers(0, 8), st.integers(1, 5)))


def there_and_back(codec: str, values: np.ndarray) -> np.ndarray:
    chosen = codecs.get(codec)
    stored = chosen.stored(values.shape[1:], values.dtype)
    encoded = chosen.encode(values)
    assert {name: (array.shape[1:], array.dtype) for name, array in encoded.items()} == stored
    out = np.empty_like(values)
    chosen.decode(encoded, out)
    return out


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"]
    + ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"],
)
def test_raw_keeps_every_bit_of_every_dtype(dtype):
    kind = codecs.dtype_of(dtype)
    data = np.random.default_rng(0).integers(0, 256, (64, 16), np.uint8)
    values = (data & 1).astype(bool) if dtype == "bool" else data.view(kind)
    if dtype in ("int4", "uint4"):
        values = (data & 7).astype(kind)
    found = there_and_back("raw", values)
    assert found.dtype == kind
    assert found.tobytes() == values.tobytes()


@given(words)
def test_bf16_rounds_to_the_nearest_even_and_keeps_nan_and_infinity(bits):
    values = bits.view(np.float32)
    found = there_and_back("bf16", values)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.isnan(found), np.isnan(values))
    normal = np.isfinite(found) & (np.abs(values) >= np.finfo(np.float32).tiny)
    bound = codecs.get("bf16").relative_error_bound(np.dtype(np.float32))
    with np.errstate(all="ignore"):
        error = np.abs(found.astype(np.float64) - values) / np.abs(values.astype(np.float64))
    assert (error[normal] <= bound).all()


@given(words)
def test_bf16_is_stable_once_rounded(bits):
    once = there_and_back("bf16", bits.view(np.float32))
    assert np.array_equal(there_and_back("bf16", once), once, equal_nan=True)


def test_a_codec_that_cannot_hold_the_rows_says_so():
    with pytest.raises(
        OptionError, match="bf16: expected float32 rows, found int32; use codec raw"
    ):
        codecs.get("bf16").stored((4,), np.dtype(np.int32))


def test_an_unknown_codec_lists_the_known_ones():
    with pytest.raises(OptionError, match=r"'int3'.*bf16.*raw"):
        codecs.get("int3")
