# SPDX-License-Identifier: Apache-2.0
"""Row fingerprints and the proof of tracking."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from deltackpt import touched
from deltackpt.errors import TrackingError
from deltackpt.fingerprint import changed_rows, fingerprint, fingerprints, verify_tracking
from deltackpt.tables import Tables, split

DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float4_e2m1fn",
    "int4",
    "uint4",
    "int8",
    "uint8",
    "int16",
    "int32",
    "uint32",
    "bool",
    "complex64",
]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("name", DTYPES)
def test_any_change_of_a_value_changes_the_fingerprint_of_its_row(name):
    dtype = dtype_of(name)
    table = np.zeros((6, 3), dtype)
    before = fingerprint(table)
    assert before.shape == (6, 2) and before.dtype == jnp.uint32
    changed = table.copy()
    changed[1, 2] = 1
    changed[4, 0] = 1
    assert changed_rows(before, fingerprint(changed)).tolist() == [1, 4]
    assert changed_rows(before, fingerprint(table)).tolist() == []


@given(seed=st.integers(0, 2**32 - 1), bit=st.integers(0, 31), row=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_every_bit_counts(seed, bit, row):
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (8, 5), dtype=np.uint32)
    other = words.copy()
    other[row, rng.integers(5)] ^= np.uint32(1 << bit)
    old, new = fingerprint(words.view(np.float32)), fingerprint(other.view(np.float32))
    assert changed_rows(old, new).tolist() == [row]


def test_bits_are_compared_not_values():
    table = jnp.array([[0.0, jnp.nan], [0.0, jnp.nan]])
    other = table.at[1, 0].set(-0.0)
    assert changed_rows(fingerprint(table), fingerprint(other)).tolist() == [1]


def test_swapped_columns_and_slots_and_rows_are_seen():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    slot = table + 1
    assert len(changed_rows(fingerprint(table), fingerprint(table[:, ::-1]))) == 4
    swapped = fingerprint(slot, [table])
    assert len(changed_rows(fingerprint(table, [slot]), swapped)) == 4
    assert len({tuple(row) for row in np.asarray(fingerprint(table)).tolist()}) == 4


def test_slots_of_other_shapes_count():
    table, slot = jnp.ones((4, 3)), jnp.zeros(4)
    before = fingerprint(table, [slot])
    assert changed_rows(before, fingerprint(table, [slot.at[2].set(1)])).tolist() == [2]


def test_64_bit_tables():
    with jax.enable_x64(True):
        table = jnp.zeros((3, 2), jnp.float64)
        before = fingerprint(table)
        assert before.shape == (3, 2)
        after = fingerprint(table.at[1, 0].set(5e-324))
    assert changed_rows(before, after).tolist() == [1]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("rows", "columns"), P("rows"), P(None, "columns"), P()])
def test_the_sharding_does_not_matter(axis_type, spec):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    devices = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(axis_type,) * 2)
    table = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    with jax.set_mesh(devices):
        placed = jax.device_put(table, NamedSharding(devices, spec))
        sharded = fingerprint(placed, [placed])
    np.testing.assert_array_equal(sharded, fingerprint(table, [table]))


def test_a_grown_table_is_an_error():
    with pytest.raises(TrackingError, match="expected 3 rows as before, found 4"):
        changed_rows(fingerprint(jnp.zeros((3, 1))), fingerprint(jnp.zeros((4, 1))))


def train_state() -> TrainState:
    params = {"emb": jnp.ones((40, 2)), "tower": {"emb": jnp.ones((5, 2))}}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adagrad(0.1))


TABLES = Tables(select=["params/emb", "params/tower/emb"])


def test_marked_changes_pass_and_unmarked_ones_are_named_by_table_and_row():
    state = train_state()
    before_split = split(state, TABLES)
    before = fingerprints(before_split.fields, before_split.layout)
    marks = touched.init({"emb": state.params["emb"], "tower/emb": state.params["tower"]["emb"]})
    marks = touched.mark(marks, {"emb": jnp.array([1])})
    since = int(marks.clock)
    grads = {
        "emb": jnp.zeros((40, 2)).at[jnp.arange(30)].set(1.0),
        "tower": {"emb": jnp.zeros((5, 2)).at[4].set(1.0)},
    }
    after = split(state.apply_gradients(grads=grads), TABLES)
    full = touched.mark(marks, {"emb": jnp.arange(30), "tower/emb": jnp.array([4])})
    verify_tracking(before, after.fields, full, since, after.layout)
    partial = touched.mark(marks, {"emb": jnp.array([0, 2, 3])})
    with pytest.raises(TrackingError) as caught:
        verify_tracking(before, after.fields, partial, since, after.layout)
    message = str(caught.value)
    assert "table params/emb: rows 1, 4, 5" in message and "(27 in all)" in message
    assert "table params/tower/emb: rows 4\n" in message


def test_a_changed_slot_alone_is_seen():
    state = train_state()
    parts = split(state, TABLES)
    before = fingerprints(parts.fields, parts.layout)
    (slot,) = [field for field in parts.fields["params/emb"] if field != "values"]
    fields = {name: dict(arrays) for name, arrays in parts.fields.items()}
    fields["params/emb"][slot] = fields["params/emb"][slot].at[7].set(9.0)
    marks = touched.init({"emb": state.params["emb"], "tower/emb": state.params["tower"]["emb"]})
    with pytest.raises(TrackingError, match="params/emb: rows 7"):
        verify_tracking(before, fields, marks, 0, parts.layout)


def test_always_slots_are_no_part_of_a_fingerprint():
    params = {"emb": jnp.ones((16, 4))}
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=2)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    parts = split(state, Tables(select="params/emb"))
    (always,) = [spec.name for spec in parts.layout.groups[0].fields if spec.always]
    before = fingerprints(parts.fields, parts.layout)
    fields = {"params/emb": dict(parts.fields["params/emb"])}
    fields["params/emb"][always] = fields["params/emb"][always] + 1
    assert (
        changed_rows(
            before["params/emb"], fingerprints(fields, parts.layout)["params/emb"]
        ).tolist()
        == []
    )


@pytest.mark.parametrize("optimizer", [optax.adam(1e-2), optax.adagrad(0.1), optax.sgd(1.0)])
def test_track_stands_the_proof(optimizer):
    tx = touched.track(optimizer, "**/emb")
    state = train_state()
    state = TrainState.create(apply_fn=None, params=state.params, tx=tx)
    rng = np.random.default_rng(1)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for clock in range(5):
        parts = split(state, TABLES)
        before = fingerprints(parts.fields, parts.layout)
        rows = rng.integers(0, 40, 3)
        grads = {
            "emb": jnp.zeros((40, 2)).at[rows].set(1.0),
            "tower": {"emb": jnp.zeros((5, 2)).at[rows % 5].set(1.0)},
        }
        state = step(state, grads)
        after = split(state, TABLES)
        assert after.touched is not None
        verify_tracking(before, after.fields, after.touched, clock, after.layout)
