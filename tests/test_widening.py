# SPDX-License-Identifier: Apache-2.0
"""Fast paths of lossy block codecs give the same values as the plain ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instruction_sets import forced

from deltackpt.codecs import block_codecs, dtype_of
from deltackpt.codecs.block_codecs import FLOATS, widened
from deltackpt.format.row_blocks import BLOCK
from deltackpt.save import encode_blocks


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_bit_pattern_is_widened_as_by_a_cast(dtype):
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(-1, BLOCK)
    values = patterns.view(dtype_of(dtype))
    room = np.full((len(values) + 3, BLOCK), 7, np.float32)
    found = widened(values, room)
    assert np.shares_memory(found, room) and found.shape == values.shape
    with np.errstate(invalid="ignore"):
        assert found.tobytes() == values.astype(np.float32).tobytes()
    assert (room[len(values) :] == 7).all()


def test_float32_is_not_copied():
    values = np.zeros((2, BLOCK), np.float32)
    assert widened(values, np.empty_like(values)) is values


@pytest.mark.parametrize("dtype", FLOATS)
@given(seed=st.integers(0, 1 << 32))
def test_squares_sum_over_all_finite_values(dtype, seed):
    random = np.random.default_rng(seed)
    bits = random.integers(0, 256, (3, BLOCK * dtype_of(dtype).itemsize), np.uint8)
    blocks = bits.view(dtype_of(dtype))
    with np.errstate(invalid="ignore"):
        exact = blocks.astype(np.float32).astype(np.float64)
    expected = np.square(exact[np.isfinite(exact)]).sum()
    with forced(""):
        found = encode_blocks.encode(block_codecs.get("int8"), blocks, None, np.empty_like(blocks))
    assert found.squared_norm == pytest.approx(expected, rel=1e-5)
