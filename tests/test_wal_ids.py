# SPDX-License-Identifier: Apache-2.0
"""Rows that a caller names in ``append(ids=...)``: of any integer dtype, and none out of range."""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

import deltackpt
from deltackpt.errors import OptionError
from deltackpt.save.branch import Clocks
from deltackpt.state import tables
from deltackpt.state.tables import Split
from deltackpt.wal.named_rows import rows_of

ROWS = {"users": 300, "items": 5}
#: One pattern, whose states all have the same layout.
CHOICE = deltackpt.Tables(select="tables/*", slots={})


@pytest.fixture
def split() -> Split:
    state = {"tables": {name: np.zeros((rows, 2), np.float32) for name, rows in ROWS.items()}}
    return tables.split(state, CHOICE)


@pytest.mark.parametrize("dtype", ["i2", "i4", "i8", ">i4", "u1", "u2", "u8", ">u8"])
@pytest.mark.parametrize("count", [3, 200])
def test_each_row_is_given_once_in_order(split, dtype, count):
    """A few ids are sorted; many ids set flags."""
    most = min(ROWS["users"], np.iinfo(dtype).max + 1)
    given = np.random.default_rng(0).integers(0, most, count).astype(dtype)
    given[0] = most - 1
    for ids in (given, given.reshape(-1, 1), given[::-1], np.repeat(given, 2)[::2]):
        found = rows_of({"users": ids}, split.layout, Clocks())["tables/users"]
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, sorted({*given.tolist()}))


@pytest.mark.parametrize(
    "ids",
    [
        np.array([5], "i8"),
        np.array([0, -1], "i1"),
        np.array([-1, 4], "i2"),
        np.array([-(1 << 31)], "i4"),
        np.array([3, -(1 << 63)], "i8"),
        np.array([(1 << 64) - 1], "u8"),
        np.array([1 << 63], "u8"),
        np.array([1 << 24], ">i4"),
        [-5],
        7,
    ],
)
def test_rows_beyond_the_table_are_refused(split, ids):
    """Without its sign, a negative id of few bits would be a row of a longer table."""
    longer = np.array([299], "i2")
    for name in ("items", "tables/items"):
        with pytest.raises(OptionError, match=r"expected rows from 0 to 4, found"):
            rows_of({"users": longer, name: ids}, split.layout, Clocks())


def test_a_negative_id_of_few_bits_is_not_a_row_of_a_longer_table(split):
    with pytest.raises(OptionError, match="found -1 to 7"):
        rows_of({"users": np.array([-1, 7], "i1")}, split.layout, Clocks())


@pytest.mark.parametrize("ids", [[1.0], [True], np.array(["a"])])
def test_ids_that_are_not_integers_are_refused(split, ids):
    with pytest.raises(OptionError, match="expected integers"):
        rows_of({"items": ids}, split.layout, Clocks())


def test_ids_that_are_not_on_the_host_are_refused(split):
    donated = jnp.arange(2)
    donated.delete()
    for ids in (donated, [[1, 2], [3]]):
        with pytest.raises(OptionError, match="expected an array of integers on the host"):
            rows_of({"items": ids}, split.layout, Clocks())
    with pytest.raises(OptionError, match="expected a mapping"):
        rows_of(cast(Any, [1, 2]), split.layout, Clocks())


def test_tables_are_found_by_the_ends_of_their_paths(split):
    given: dict[str, Any] = {"users": [7, 2], "tables/users": [2, 9], "items": []}
    for _ in range(2):
        found = rows_of(given, split.layout, Clocks())
        assert {name: rows.tolist() for name, rows in found.items()} == {
            "tables/users": [2, 7, 9],
            "tables/items": [],
        }
    for _ in range(2):
        with pytest.raises(OptionError, match="found no such table"):
            rows_of({"others": [1]}, split.layout, Clocks())
