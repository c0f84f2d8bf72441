# SPDX-License-Identifier: Apache-2.0
"""Vocabularies: ids to rows and back, eviction, and key columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltackpt import vocab
from deltackpt.errors import DamagedKeys, OptionError, VocabularyFull

#: Few enough that they repeat, from both ends of the range, and some that share hash positions.
IDS = st.sampled_from(
    [*range(24), -2, -(2**63), 2**63 - 1, 2**32, 2**33, *(k << 40 for k in range(1, 9))]
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["assign", "evict", "evict rows", "follow", "grow"]), st.lists(IDS)),
    max_size=30,
)


class Model:
    """What ``RowKeys`` promises, with a dict."""

    def __init__(self, capacity: int):
        self.capacity, self.row_of = capacity, dict[int, int]()

    def assign(self, ids: list[int]) -> tuple[list[int], list[int]] | None:
        """Returns the rows and the new ones; None if there are too few."""
        free = sorted({*range(self.capacity)} - {*self.row_of.values()})
        added = sorted({*ids} - self.row_of.keys())
        if len(added) > len(free):
            return None
        self.row_of |= dict(zip(added, free, strict=False))
        return [self.row_of[one] for one in ids], free[: len(added)]

    def evict(self, ids: list[int]) -> list[int]:
        return sorted(self.row_of.pop(one) for one in {*ids} & self.row_of.keys())

    def column(self) -> list[int]:
        found = [-1] * self.capacity
        for one, row in self.row_of.items():
            found[row] = one
        return found


@given(st.integers(1, 20), CALLS, st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_a_restored_run_assigns_and_evicts_as_the_lost_one_would_have(capacity, calls, seed):
    model, keys, random = Model(capacity), vocab.RowKeys(capacity), np.random.default_rng(seed)
    for call, ids in calls:
        if random.random() < 0.5:
            keys = vocab.RowKeys.index(keys.column())
        if call == "assign":
            expected = model.assign(ids)
            if expected is None:
                with pytest.raises(VocabularyFull, match="free rows"):
                    keys.assign(ids)
            else:
                found = keys.assign(ids)
                assert (found.rows.tolist(), found.new.tolist()) == expected
        elif call == "evict":
            assert keys.evict(ids).tolist() == model.evict(ids)
        elif call == "evict rows":
            rows = random.integers(0, model.capacity, len(ids))
            gone = [one for one, row in model.row_of.items() if row in rows]
            assert keys.evict(rows=rows).tolist() == model.evict(gone)
        elif call == "follow":
            later, half = vocab.RowKeys.index(keys.column()), len(ids) // 2
            assert later.evict(ids[:half]).tolist() == model.evict(ids[:half])
            if model.assign(ids[half:]) is not None:
                later.assign(ids[half:])
            keys.follow(later.column())
        else:
            model.capacity += len(ids)
            keys.grow(model.capacity)
        assert keys.column().tolist() == model.column()
        assert len(keys) == len(model.row_of)
        assert keys.free == model.capacity - len(model.row_of)
        asked = np.array([*model.row_of, 100], np.int64)
        assert keys.find(asked).tolist() == [*model.row_of.values(), -1]


def test_a_column_in_which_an_id_has_two_rows_is_refused_and_the_next_one_followed():
    random = np.random.default_rng(0)
    keys = vocab.RowKeys.index(random.permutation(200)[:100])
    for _ in range(100):
        column = keys.column()
        changed = random.choice(100, 30, replace=False)
        column[changed] = random.choice(np.setdiff1d(np.arange(300), column), 30, replace=False)
        damaged, (first, second) = column.copy(), random.choice(100, 2, replace=False)
        damaged[first] = damaged[second]
        before = keys.column()
        with pytest.raises(DamagedKeys, match=f"id {damaged[second]} in rows"):
            keys.follow(damaged)
        np.testing.assert_array_equal(keys.column(), before)
        keys.follow(column)
        np.testing.assert_array_equal(keys.find(column), np.arange(100))
        assert (keys.find(np.setdiff1d(before, column)) == -1).all()


def test_a_full_vocabulary_replaces_all_its_ids_many_times():
    random, keys = np.random.default_rng(0), vocab.RowKeys(5000)
    held = np.empty(0, np.int64)
    for _ in range(60):
        ids = random.choice(1 << 40, 4000, replace=False)
        keys.evict(rows=vocab.lowest(keys.column(), len(ids) - keys.free, np.arange(5000)))
        rows, new = keys.assign(ids)
        np.testing.assert_array_equal(keys.ids(rows), ids)
        assert len(new) == 4000 - np.isin(ids, held).sum()
        held = keys.column()
    np.testing.assert_array_equal(keys.find(held[held != -1]), np.flatnonzero(held != -1))


def test_assign_keeps_the_shape_of_the_ids_and_takes_hashes_of_64_bits():
    ids = np.array([[2**64 - 2, 5], [5, 2**63]], np.uint64)
    keys = vocab.RowKeys(3)
    assert keys.assign(ids).rows.tolist() == [[1, 2], [2, 0]]
    assert keys.ids([0, 1, 2]).view(np.uint64).tolist() == [2**63, 2**64 - 2, 5]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda keys: keys.assign([3, -1]), "padding"),
        (lambda keys: keys.assign([0.5]), "expected integers, found float64"),
        (lambda keys: keys.evict(rows=[4]), "rows from 0 to 3"),
        (lambda keys: keys.evict(), "either ids or rows"),
        (lambda keys: keys.grow(3), "capacity"),
        (lambda keys: vocab.RowKeys(0), "capacity"),
        (lambda keys: vocab.RowKeys.index(np.zeros(3)), "expected .rows,. of int32"),
        (lambda keys: vocab.column_of(np.array([2**40]), np.int32), "ids that fit int32"),
    ],
)
def test_invalid_arguments_are_refused_with_the_expected_ones(call, said):
    with pytest.raises(OptionError, match=said):
        call(vocab.RowKeys(4))


def test_an_id_in_two_rows_is_named_with_both():
    with pytest.raises(DamagedKeys, match="id 7 in rows 1 and 3"):
        vocab.RowKeys.index(np.array([-1, 7, -1, 7]))


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_a_column_of_pairs_holds_every_64_bit_id(ids):
    column = vocab.column_of(np.array(ids, np.int64), np.uint32)
    assert column.shape == (len(ids), 2) and column.dtype == np.uint32
    assert vocab.ids_of(column).tolist() == ids
    assert vocab.ids_of(column.view(np.int32)).tolist() == ids
    assert vocab.ids_of(vocab.column_of(np.array(ids, np.int64), np.uint64)).tolist() == ids


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 3), st.integers(0, 3)), max_size=20),
    st.integers(0, 25),
)
def test_eviction_takes_the_lowest_scores_and_breaks_ties_by_row(rows, count):
    ids, uses, last_used = np.array(rows, np.int64).reshape(-1, 3).T
    held = [row for row, one in enumerate(ids) if one != vocab.NO_ID]
    lru = sorted(held, key=lambda row: (last_used[row], row))
    lfu = sorted(held, key=lambda row: (uses[row], last_used[row], row))
    assert vocab.lowest(ids, count, last_used).tolist() == sorted(lru[:count])
    assert vocab.lowest(ids, count, uses, last_used).tolist() == sorted(lfu[:count])
    expired = [row for row in held if last_used[row] < 2]
    assert vocab.expired(ids, last_used, 2).tolist() == expired
    kept = vocab.lowest(ids, count, uses, keep=np.array([-1, *held[:3]]))
    rest = sorted(held[3:], key=lambda row: (uses[row], row))
    assert kept.tolist() == sorted(rest[:count])
