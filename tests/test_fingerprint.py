# SPDX-License-Identifier: Apache-2.0
"""Row fingerprints and the tracking audit."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import model
import numpy as np
import optax
import pytest
from flat_options import manager_options
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import deltackpt
from deltackpt import touched
from deltackpt.errors import OptionError, SaveFailed, TrackingError
from deltackpt.format import row_blocks
from deltackpt.state import touch_state
from deltackpt.state.tables import Tables, split
from deltackpt.testing import failing_saves
from deltackpt.tracking.fingerprints import (
    RowTracker,
    changed_rows,
    check_marked,
    fingerprint,
    fingerprints,
)

DTYPES = (
    "float32 float16 bfloat16 float8_e4m3fn float4_e2m1fn int4 uint4 int8 uint8 int16 int32 uint32 "
    "bool complex64"
).split()
AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


def mesh_of(axis_type: AxisType) -> jax.sharding.Mesh:
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(axis_type,) * 2)


@pytest.mark.parametrize("name", DTYPES)
def test_any_change_of_a_value_changes_the_fingerprint_of_its_row(name):
    table = np.zeros((6, 3), np.dtype(getattr(ml_dtypes, name, name)))
    before = fingerprint(table)
    assert before.shape == (6, 2) and before.dtype == jnp.uint32
    changed = table.copy()
    changed[[1, 4], [2, 0]] = 1
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


def test_swapped_columns_and_slots_and_rows_are_detected():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    slot = table + 1
    assert len(changed_rows(fingerprint(table), fingerprint(table[:, ::-1]))) == 4
    swapped = fingerprint(slot, [table])
    assert len(changed_rows(fingerprint(table, [slot]), swapped)) == 4
    assert len({tuple(row) for row in np.asarray(fingerprint(table)).tolist()}) == 4


def test_64_bit_tables():
    with jax.enable_x64(True):
        table = jnp.zeros((3, 2), jnp.float64)
        before = fingerprint(table)
        assert before.shape == (3, 2)
        after = fingerprint(table.at[1, 0].set(5e-324))
    assert changed_rows(before, after).tolist() == [1]


@AXIS_TYPES
@pytest.mark.parametrize("spec", [P("rows", "columns"), P("rows"), P(None, "columns"), P()])
@pytest.mark.parametrize("width", [4, 64])
def test_the_sharding_does_not_matter(axis_type, spec, width):
    devices = mesh_of(axis_type)
    table = np.random.default_rng(0).normal(size=(8, width)).astype(np.float32)
    with jax.set_mesh(devices):
        placed = jax.device_put(table, NamedSharding(devices, spec))
        sharded = fingerprint(placed, [placed])
    np.testing.assert_array_equal(sharded, fingerprint(table, [table]))


@AXIS_TYPES
@pytest.mark.parametrize("spec", [P("rows", None, "columns"), P("rows", "columns"), P("rows")])
def test_rows_of_several_axes_may_be_sharded_along_any(axis_type, spec):
    devices = mesh_of(axis_type)
    table = np.random.default_rng(0).normal(size=(8, 2, 6)).astype(np.float32)
    with jax.set_mesh(devices):
        sharded = fingerprint(jax.device_put(table, NamedSharding(devices, spec)))
    np.testing.assert_array_equal(sharded, fingerprint(table.reshape(8, 12)))


def test_fingerprints_take_hardly_any_extra_memory():
    def temporary_of(*row):
        table = jax.ShapeDtypeStruct((1 << 12, *row), jnp.float32)
        compiled = jax.jit(fingerprint).lower(table, [table]).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (table.size * 4)

    # If long rows were not folded, XLA would store the mixed words of both lanes in memory.
    assert max(temporary_of(*row) for row in [(32,), (64,), (100,), (768,), (3, 64)]) < 0.2


def test_a_grown_table_is_an_error():
    with pytest.raises(TrackingError, match="expected 3 rows as before, found 4"):
        changed_rows(fingerprint(jnp.zeros((3, 1))), fingerprint(jnp.zeros((4, 1))))


TABLES = Tables(select=["params/emb", "params/tower/emb"])


def train_state() -> tuple[TrainState, touched.TouchState]:
    params = {"emb": jnp.ones((40, 2)), "tower": {"emb": jnp.ones((5, 2))}}
    marks = touched.init({"emb": params["emb"], "tower/emb": params["tower"]["emb"]})
    return TrainState.create(apply_fn=None, params=params, tx=optax.adagrad(0.1)), marks


def test_marked_changes_pass_and_unmarked_ones_are_named_by_table_and_row():
    state, marks = train_state()
    parts = split(state, TABLES)
    before = fingerprints(parts.fields, parts.layout)
    marks = touched.mark(marks, {"emb": jnp.array([1])})
    since = int(marks.clock)
    grads = {
        "emb": jnp.zeros((40, 2)).at[jnp.arange(30)].set(1.0),
        "tower": {"emb": jnp.zeros((5, 2)).at[4].set(1.0)},
    }
    after = split(state.apply_gradients(grads=grads), TABLES)
    full = touched.mark(marks, {"emb": jnp.arange(30), "tower/emb": jnp.array([4])})
    now = fingerprints(after.fields, after.layout)

    def check(marks: touched.TouchState) -> None:
        stamps = touch_state.match_marks([touch_state.Marks("", marks)], after.layout)
        check_marked(before, now, stamps, {"": since})

    check(full)
    partial = touched.mark(marks, {"emb": jnp.array([0, 2, 3])})
    with pytest.raises(TrackingError) as caught:
        check(partial)
    message = str(caught.value)
    assert "table params/emb: rows 1, 4, 5" in message and "(27 in all)" in message
    assert "table params/tower/emb: rows 4\n" in message


def test_always_slots_are_not_part_of_a_fingerprint():
    params = {"emb": jnp.ones((16, 4))}
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=2)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    parts = split(state, Tables(select="params/emb"))
    (always,) = [spec.name for spec in parts.layout.groups[0].fields if spec.always]
    emb = dict(parts.fields["params/emb"])
    emb[always] = emb[always] + 1
    before, after = (
        fingerprints(fields, parts.layout)["params/emb"]
        for fields in (parts.fields, {"params/emb": emb})
    )
    assert changed_rows(before, after).tolist() == []


def test_a_poll_does_not_read_always_slots():
    state = {"tables": {"a": jnp.ones((3, 2))}, "slots": {"a": np.ones((3, 2))}}
    slots = {"tables/*": {"s": "slots/{name}"}}
    parts = split(state, Tables(select="tables/*", slots=slots, always="s"))
    [leaves] = parts.fields.values()
    [always] = [name for name in leaves if name != row_blocks.VALUES]
    leaves[always] = None  # Any use of it would fail.
    [stamps] = RowTracker().update(parts.fields, parts.layout).stamps.values()
    assert stamps.tolist() == [1, 1, 1]


# The manager with tracking="fingerprints".

PLACES = [P("rows", "columns"), P("rows"), P(None, "columns"), P(), "device", "host"]


def placed(array: np.ndarray, place, axis_type=AxisType.Auto):
    if place == "host":
        return array.copy()
    if place == "device":
        return jax.device_put(array, jax.devices()[-1])
    return jax.device_put(array, NamedSharding(mesh_of(axis_type), P(*place[: array.ndim])))


def poll(tracker: RowTracker, tables: dict, slots: dict) -> tuple[int, dict[str, list[int]]]:
    """Runs the tracker; returns its clock and the rows stamped with it."""
    state = {"tables": tables, "slots": slots}
    parts = split(state, Tables(select="tables/*", slots={"tables/*": {"s": "slots/{name}"}}))
    found = tracker.update(parts.fields, parts.layout)
    clock = int(found.clock)
    return clock, {
        name.removeprefix("tables/"): np.flatnonzero(np.asarray(stamps) == clock).tolist()
        for name, stamps in found.stamps.items()
    }


@AXIS_TYPES
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_poll_stamps_the_rows_that_changed_wherever_the_tables_are(axis_type, place):
    tracker = RowTracker()
    table, slot = np.zeros((64, 4), np.float32), np.zeros(64, np.float32)
    clock, rows = poll(tracker, {"a": placed(table, place, axis_type)}, {"a": slot})
    assert (clock, rows["a"]) == (1, list(range(64)))
    table[[3, 60], 1] = -0.0
    slot[7] = 1
    # Then they move unchanged.
    for clock, where, expected in [(2, place, [3, 7, 60]), (3, "device", []), (4, P("rows"), [])]:
        tables = {"a": placed(table, where, axis_type)}
        assert poll(tracker, tables, {"a": slot}) == (clock, {"a": expected})


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float64, np.complex128])
@pytest.mark.parametrize("part", ["tables", "slots"])
def test_all_bits_of_64_bit_host_values_count(dtype, part):
    tracker = RowTracker()
    state = {"tables": {"a": jnp.ones((3, 2))}, "slots": {"a": np.ones((3, 2))}}
    state[part]["a"] = np.ones((3, 2), dtype)
    poll(tracker, **state)
    # A change that 32 bits would not show.
    more = 1e-12 if np.issubdtype(dtype, np.inexact) else 1 << 32
    before = fingerprint(state[part]["a"])
    state[part]["a"][1, 1] += dtype(more)
    assert poll(tracker, **state)[1] == {"a": [1]}
    assert changed_rows(before, fingerprint(state[part]["a"])).tolist() == [1]


def test_a_slot_may_be_sharded_differently_from_its_table():
    tracker = RowTracker()
    table, slot = np.zeros((64, 4), np.float32), np.zeros(64, np.float32)
    for expected in (list(range(64)), [9]):
        tables = {"a": placed(table, P("rows"), AxisType.Explicit)}
        slots = {"a": placed(slot, P("columns"), AxisType.Explicit)}
        assert poll(tracker, tables, slots)[1] == {"a": expected}
        slot = slot + np.eye(64, dtype=np.float32)[9]


@pytest.mark.parametrize("memory", [None, "pinned_host"])
def test_a_slot_may_be_on_other_devices_than_its_table(memory):
    devices, tracker = np.array(jax.devices()), RowTracker()

    def sharded(array, held):
        mesh = jax.sharding.Mesh(held, ("rows",))
        return jax.device_put(array, NamedSharding(mesh, P("rows"), memory_kind=memory))

    table, slot = np.zeros((64, 4), np.float32), jnp.zeros(64)
    # The last ones are the same devices in another order.
    for held in (devices[:1], devices[2:4], devices[::-1]):
        poll(tracker, {"a": sharded(table, devices)}, {"a": jax.device_put(slot, held[0])})
        mesh = jax.sharding.Mesh(held, ("rows",))
        slot = jax.device_put(slot.at[9].add(1), NamedSharding(mesh, P("rows")))
        assert poll(tracker, {"a": sharded(table, devices)}, {"a": slot})[1] == {"a": [9]}
        slot = jnp.asarray(np.asarray(slot))


def test_all_rows_of_new_tables_and_the_further_rows_of_grown_ones_count_as_touched():
    tracker = RowTracker()
    one, two = np.zeros((3, 2), np.float32), np.zeros((2, 2), np.float32)
    poll(tracker, {"a": one}, {"a": one})
    assert poll(tracker, {"a": one, "b": two}, {"a": one, "b": two})[1] == {"a": [], "b": [0, 1]}
    # Also rows of a table that was missing for a while: changes in between are unknown.
    assert poll(tracker, {"b": two}, {"b": two})[1] == {"b": []}
    assert poll(tracker, {"a": one, "b": two}, {"a": one, "b": two})[1]["a"] == [0, 1, 2]
    grown = np.zeros((4, 2), np.float32)
    assert poll(tracker, {"a": grown, "b": two}, {"a": grown, "b": two})[1]["a"] == [3]


TRACKED = {"embeddings": Tables(select="tables/*", slots={"tables/*": {"s": "slots/{name}"}})}


def tracked(root, **options) -> deltackpt.CheckpointManager:
    options = manager_options(tracking="fingerprints", **options)
    return deltackpt.CheckpointManager(root, handlers=TRACKED, options=options)


def trained(state: dict, rows: list[int]) -> dict:
    ids = jnp.asarray(rows)
    return {
        "tables": {"a": jnp.asarray(state["tables"]["a"]).at[ids].add(1)},
        "slots": {"a": jnp.asarray(state["slots"]["a"]).at[ids].add(1)},
        "bias": jnp.asarray(state["bias"]) + 1,
    }


def initial() -> dict:
    return {
        "tables": {"a": jnp.zeros((1000, 4))},
        "slots": {"a": jnp.zeros(1000)},
        "bias": jnp.zeros(3),
    }


def saved_rows(manager: deltackpt.CheckpointManager) -> list[int]:
    """Waits for the saves in flight; returns the row count of each."""
    return [report.rows for report in manager.wait_until_finished()]


def assert_newest(manager: deltackpt.CheckpointManager, state: dict) -> None:
    found = manager.restore_latest(initial())
    assert found is not None
    assert jax.tree.all(jax.tree.map(np.array_equal, found.state, state))


@pytest.mark.parametrize("with_template", [True, False])
def test_saves_hold_changed_rows_without_marks_before_and_after_a_restore(tmp_path, with_template):
    state = initial()
    with tracked(tmp_path) as manager:
        manager.save(0, state)
        assert saved_rows(manager) == [1000]
        state = trained(state, [3, 999])
        assert manager.next_save(state).kind == "delta"
        assert manager.save(1, state).kind == "delta"
        assert saved_rows(manager) == [2]
    with tracked(tmp_path) as manager:
        result = manager.restore_latest(initial() if with_template else None)
        assert result is not None
        state = trained(result.state, [7])
        assert manager.save(2, state).kind == "delta"
        assert saved_rows(manager) == [1]
        # A rollback continues from what that step stored.
        result = manager.restore(1, initial())
        state = trained(result.state, [8, 9])
        with pytest.warns(UserWarning, match="later steps"):
            assert manager.save(2, state).kind == "delta"
        assert saved_rows(manager) == [2]
        assert_newest(manager, state)


@pytest.mark.parametrize("failure", ["write", "poll"])
def test_rows_of_a_failed_save_are_in_the_next_one(tmp_path, failure):
    """A failed poll is undone: otherwise no save would include the rows that it found."""
    state = initial()
    with tracked(tmp_path) as manager:
        model.commit(manager, 0, state)
        state = trained(state, [3])
        if failure == "write":
            with failing_saves(tmp_path):
                manager.save(1, state)
                with pytest.raises(SaveFailed):
                    manager.wait_until_finished()
        else:
            error = MemoryError("injected")
            with mock.patch.object(touch_state, "mark_rows", side_effect=error):
                with pytest.raises(MemoryError):
                    manager.save(1, state)
        state = trained(state, [4])
        manager.save(2, state)
        assert saved_rows(manager) == [2]
        assert_newest(manager, state)


def test_a_touch_state_is_refused_with_tracking_by_fingerprints(tmp_path):
    with tracked(tmp_path) as manager, pytest.raises(OptionError, match="leave it out"):
        manager.save(0, initial(), touched=touched.init({"tables/a": jnp.zeros((1000, 4))}))


def test_a_touch_state_within_the_state_is_ignored(tmp_path):
    state = {**initial(), "touched": touched.init({"tables/a": jnp.zeros((1000, 4))})}
    with tracked(tmp_path) as manager:
        manager.save(0, state)
        manager.save(1, {**trained(state, [5]), "touched": state["touched"]})
        assert saved_rows(manager) == [1000, 1]


@pytest.mark.parametrize("tracking", ["touched", "fingerprints"])
def test_host_tables_may_change_in_place_as_soon_as_save_returns(tmp_path, tracking):
    """Also after a restore, which returns numpy arrays if it has no template."""
    table = np.zeros((400_000, 32), np.float32)
    options = deltackpt.ManagerOptions(deltas=deltackpt.DeltaOptions(tracking=tracking))
    with deltackpt.CheckpointManager(tmp_path, handlers=TRACKED, options=options) as manager:
        state = {"tables": {"a": table}, "slots": {"a": np.zeros(400_000, np.float32)}}
        manager.save(0, state)
        table[-5:] = 1
        restored = manager.restore(0)
        assert not restored.state["tables"]["a"].any()
        if tracking == "fingerprints":
            restored.state["tables"]["a"][-7:] += 1
            manager.save(1, restored.state)
            assert saved_rows(manager)[-1] == 7
