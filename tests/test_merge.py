# SPDX-License-Identifier: Apache-2.0
"""Merging against a model: newest wins, whatever the ranges of rows and columns."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.format.blocks import VALUES, EncodedBlock, RowBlock
from deltackpt.format.segments import FieldSpec
from deltackpt.reading import merge
from deltackpt.reading.merge import Target

ROWS, WIDTH = 40, 6
rows_of_a_block = st.one_of(
    st.sets(st.integers(0, ROWS - 1)).map(lambda rows: np.array(sorted(rows), np.int64)),
    st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(
        lambda ends: range(min(ends), max(ends))
    ),
)
spans = st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(
    lambda ends: (min(ends), max(ends))
)
columns = st.sampled_from([(0, 6), (0, 3), (3, 6), (2, 5)])


@given(
    st.lists(st.tuples(rows_of_a_block, columns), max_size=5),
    st.lists(st.tuples(spans, columns), min_size=1, max_size=3),
)
def test_blocks_land_where_a_naive_model_puts_them(blocks, places):
    table = np.full((ROWS, WIDTH), -1.0)
    targets = [
        Target(
            group="g",
            field=VALUES,
            rows=rows,
            columns=cols,
            buffer=np.full((rows[1] - rows[0], cols[1] - cols[0]), -1.0),
        )
        for rows, cols in places
    ]
    for number, (rows, cols) in enumerate(blocks):
        values = number * 1000 + np.arange(len(rows) * (cols[1] - cols[0]), dtype=float)
        values = values.reshape(len(rows), cols[1] - cols[0])
        table[np.array(rows, np.int64), cols[0] : cols[1]] = values
        merge.apply(RowBlock("g", rows, cols, {VALUES: values}), targets)
        merge.apply(RowBlock("other", rows, cols, {VALUES: values * -7}), targets)
    for target, (rows, cols) in zip(targets, places, strict=True):
        assert np.array_equal(target.buffer, table[rows[0] : rows[1], cols[0] : cols[1]])


@given(rows_of_a_block, st.sampled_from(["raw", "bf16"]))
def test_encoded_blocks_are_decoded_piece_by_piece(rows, codec):
    spec = FieldSpec(name=VALUES, trailing=(2,), dtype="float32", codec=codec)
    stored = np.arange(2 * len(rows), dtype=np.uint16).reshape(-1, 2)
    stored = stored if codec == "bf16" else stored.astype(np.uint32).view(np.float32)
    buffer = np.zeros((ROWS, 2), np.float32)
    target = Target(group="g", field=VALUES, rows=(0, ROWS), columns=(0, 2), buffer=buffer)
    written = merge.apply_encoded(
        EncodedBlock("g", rows, (0, 2), {VALUES: stored}), [spec], [target]
    )
    expected = np.zeros((ROWS, 2), np.uint32)
    bits = stored.astype(np.uint32) << 16 if codec == "bf16" else stored.view(np.uint32)
    expected[np.array(rows, np.int64)] = bits
    assert written == len(rows)
    assert np.array_equal(buffer.view(np.uint32), expected)
