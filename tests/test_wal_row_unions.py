# SPDX-License-Identifier: Apache-2.0
"""The union of the rows of many calls."""

from __future__ import annotations

import numpy as np
import pytest

from deltackpt.wal import named_rows
from deltackpt.wal.named_rows import NamedRows


@pytest.mark.parametrize("most", [1, 40])
def test_the_union_of_many_sets_is_sorted_and_takes_at_most_twice_its_memory(most):
    rng, rows = np.random.default_rng(most), NamedRows()
    expected: dict[str, set[int]] = {"users": set(), "items": set()}
    for _ in range(2000):
        table = ("users", "items")[rng.integers(2)]
        given = np.unique(rng.integers(0, 5000, rng.integers(0, most + 1)))
        rows.add({table: given})
        expected[table] |= {*given.tolist()}
        pieces = rows._arrays[table]
        assert len(pieces) <= named_rows._MOST_ARRAYS
        assert sum(map(len, pieces)) <= 2 * len(expected[table]) + most
    for found in (rows.rows(), rows.drain()):
        assert {name: one.tolist() for name, one in found.items()} == {
            name: sorted(one) for name, one in expected.items()
        }
    assert rows.drain() == {}
