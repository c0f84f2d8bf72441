# SPDX-License-Identifier: Apache-2.0
"""Reads of a part of a step, or of a step into a state with another structure."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
import pytest
from command import run
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import deltackpt
import deltackpt.inspect
from deltackpt import RecoveryPoint
from deltackpt.errors import Damaged, StepNotFound, TemplateMismatch
from deltackpt.format.manifest import SaveId

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}


@pytest.fixture
def saved(tmp_path):
    """A manager with three steps, and the state and TouchState of the last."""
    state = model.initial()
    touched = model.new_touched(state)
    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS) as manager:
        for step in range(3):
            state, touched = model.train(state, touched, step)
            manager.save(step, state, touched=touched)
        manager.wait_until_finished()
        yield manager, state, touched


def same(one, other) -> bool:
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_a_subtree_is_read_and_unused_leaves_are_reported(saved):
    manager, state, _ = saved
    template = {"tables": {"users": jnp.zeros((700, 8))}, "step": 0}
    found = manager.read_state(2, template)
    assert same(found.state["tables"]["users"], state["tables"]["users"])
    assert found.state["step"] == 3 and type(found.state["step"]) is int
    assert found.missing == () and "tables/items" in found.unused and "key" in found.unused


def test_placeholders_and_leaves_that_the_step_lacks_stay(saved):
    manager, state, touched = saved
    new = jnp.full((5, 2), 7.0)
    template = {
        "tables": {"users": ..., "items": state["tables"]["items"] * 0, "tags": new},
        "dense": {"kernel": np.zeros((4, 3), np.float32), "head": 1.5},
        "touched": touched,
        "key": jax.random.key(9),
    }
    found = manager.read_state(2, template)
    assert found.state["tables"]["users"] is ...
    assert found.state["tables"]["tags"] is new and found.state["dense"]["head"] == 1.5
    assert found.missing == ("dense/head", "tables/tags")
    assert found.state["touched"] is touched
    assert same(found.state["tables"]["items"], state["tables"]["items"])
    assert isinstance(found.state["dense"]["kernel"], np.ndarray)
    assert same(found.state["dense"]["kernel"], state["dense"]["kernel"])
    assert (found.state["key"] == state["key"]).all()


def test_dtypes_of_the_same_kind_are_cast_and_reported(saved):
    manager, state, _ = saved
    template = {"tables": {"users": jax.ShapeDtypeStruct((700, 8), jnp.bfloat16)}}
    found = manager.read_state(2, template)
    assert found.cast == ("tables/users",)
    expected = state["tables"]["users"].astype(jnp.bfloat16)
    assert same(found.state["tables"]["users"], expected)
    with pytest.raises(TemplateMismatch, match="a different kind"):
        manager.read_state(2, {"tables": {"users": jnp.zeros((700, 8), jnp.int32)}})
    with pytest.raises(TemplateMismatch, match=r"step 2, tables/users: expected.*\[700, 9\]"):
        manager.read_state(2, {"tables": {"users": jnp.zeros((700, 9))}})


INTEGERS = np.array([2**24 + 1, -5], np.int32)


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (INTEGERS, np.zeros(2, np.float32)),
        (INTEGERS, jax.ShapeDtypeStruct((2,), jnp.float32)),
        (INTEGERS, jnp.zeros(2, jnp.bfloat16)),
        (INTEGERS, np.zeros(2, np.float16)),
        (INTEGERS, np.zeros(2, np.complex64)),
        (INTEGERS, np.zeros(2, np.uint32)),
        (np.array([True, False]), np.zeros(2, np.int32)),
        (np.ones(2, np.float32), np.zeros(2, np.complex64)),
        (np.ones(2, np.float32), np.zeros(2, jnp.int4)),
        (2**53 + 1, 0.0),
        (2**53 + 1, np.zeros((), np.float64)),
    ],
    ids=lambda leaf: getattr(leaf, "dtype", repr(leaf)),
)
def test_a_number_that_a_cast_would_change_or_of_another_kind_is_refused(stored, asked, tmp_path):
    with (
        saved_once(tmp_path, {"leaf": stored}) as manager,
        pytest.raises(TemplateMismatch, match="step 0, leaf: expected .* found"),
    ):
        manager.read_state(0, {"leaf": asked})


def saved_once(tmp_path, leaves) -> deltackpt.CheckpointManager:
    handlers = {"embeddings": deltackpt.Tables(select="table")}
    manager = deltackpt.CheckpointManager(tmp_path, handlers=handlers)
    manager.save(0, {"table": np.ones((2, 2), np.float32), **leaves})
    manager.wait_until_finished()
    return manager


@pytest.mark.parametrize("kind", ["jax", "numpy", "sharded"])
def test_a_grown_table_keeps_the_additional_rows_of_the_template(saved, kind):
    manager, state, _ = saved
    grown = np.full((704, 8), 7.0, np.float32)
    if kind != "numpy":
        grown = jnp.asarray(grown)
    if kind == "sharded":
        mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
        grown = jax.device_put(grown, NamedSharding(mesh, PartitionSpec("x")))
    found = manager.read_state(2, {"tables": {"users": grown}}).state["tables"]["users"]
    assert type(found) is type(grown) and same(found[:700], state["tables"]["users"])
    assert (np.asarray(found[700:]) == 7).all() and (np.asarray(grown) == 7).all()
    if isinstance(grown, jax.Array):
        assert found.sharding == grown.sharding
    template = {"tables": {"users": jax.ShapeDtypeStruct((704, 8), jnp.float32)}}
    with pytest.raises(
        TemplateMismatch, match="template of arrays, whose additional rows stay unchanged"
    ):
        manager.read_state(2, template)


def test_a_key_with_a_slash_is_another_leaf(tmp_path):
    leaves = {"a": {"b": np.ones(2)}, "a/b": np.zeros(2)}
    with saved_once(tmp_path, leaves) as manager:
        new = np.full(2, 9.0)
        both = manager.read_state(0, {"a": {"b": new}, "a/b": new}).state
        assert same(both["a"]["b"], np.ones(2)) and same(both["a/b"], np.zeros(2))
        one = manager.read_state(0, {"a": {"b": new}})
        assert same(one.state["a"]["b"], np.ones(2)) and one.unused == ("a/b", "table")


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        *((1.5, 3), (np.float32(1.5), 3), (3, False), ("3", 3), ("1.5", 2.0), (3, "a text")),
        *((None, 3), ({}, 3), (np.ones(1), 2.0), (np.ones(2), "a text")),
        *((np.int64(2**40), np.int32(0)), (np.uint8(200), np.int8(0))),
        (np.array([2**40]), jax.ShapeDtypeStruct((1,), np.int64)),
        (jax.random.key(1), jax.random.key(1, impl="rbg")),
        (np.zeros(3, np.uint32), jax.random.key(1)),
    ],
)
def test_values_that_the_template_cannot_represent_are_refused(stored, wanted, tmp_path):
    with saved_once(tmp_path, {"leaf": stored}) as manager:
        with pytest.raises(TemplateMismatch, match="leaf: expected .* (?:as in|fit) the template"):
            manager.read_state(0, {"leaf": wanted})


@pytest.mark.parametrize(
    ("stored", "wanted"), [(True, 3), (3, 1.5), (np.int8(3), 7), (0.5, 1.0), ("a", "b")]
)
def test_python_scalars_are_read_if_the_conversion_is_exact(stored, wanted, tmp_path):
    with saved_once(tmp_path, {"leaf": stored}) as manager:
        found = manager.read_state(0, {"leaf": wanted}).state["leaf"]
        assert type(found) is type(wanted) and found == stored


def test_a_former_table_may_be_dense_and_shardings_are_the_templates(saved, tmp_path):
    manager, state, _ = saved
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec("x"))
    template = {"tables": {"users": jax.ShapeDtypeStruct((700, 8), jnp.float32, sharding=sharding)}}
    other = {"embeddings": deltackpt.Tables(select="tables/items")}
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(tmp_path, handlers=other, options=options) as reader:
        found = reader.read_state(1, template).state["tables"]["users"]
    assert found.sharding == sharding
    np.testing.assert_array_equal(found, manager.read_state(1, template).state["tables"]["users"])


def test_a_read_does_not_affect_the_run(saved):
    manager, state, touched = saved
    manager.read_state(0, {"step": 0})
    state, touched = model.train(state, touched, 3)
    assert manager.save(3, state, touched=touched).kind == "delta"
    assert same(manager.restore_latest(state).state["tables"]["users"], state["tables"]["users"])


def test_a_missing_or_damaged_step_raises_an_error(saved, tmp_path):
    manager, *_ = saved
    with pytest.raises(StepNotFound):
        manager.read_state(8, {"step": 0})
    for chunk in (tmp_path / "0").rglob("shard.0/*/values/c.0.0"):
        chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(Damaged):
        manager.read_state(2, {"tables": {"users": jnp.zeros((700, 8))}})


def masked_state() -> dict:
    """A state with many of Optax's placeholders, which have no value."""
    params = {"table": jnp.ones((20, 2)), "w": jnp.ones(3), "b": jnp.ones(3)}
    frozen = {"table": "rows", "w": "frozen", "b": "frozen"}
    rules = {"rows": optax.adagrad(0.1), "frozen": optax.set_to_zero()}
    optimizer = optax.chain(optax.clip(1.0), optax.multi_transform(rules, frozen))
    return {"params": params, "opt_state": optimizer.init(params), "old": jnp.zeros(2), "no": None}


@pytest.mark.parametrize("deltas", ["whole", "blocks"])
def test_leaves_without_a_value_are_neither_unused_nor_shown(tmp_path, deltas):
    handlers = {"embeddings": deltackpt.Tables(select="params/table")}
    options = deltackpt.ManagerOptions(dense=deltackpt.Dense(deltas=deltas))
    state = masked_state()
    touched = deltackpt.touched.init({"table": state["params"]["table"]})
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers, options=options) as manager:
        for step in range(2):
            manager.save(step, state, touched=touched)
            manager.wait_until_finished()
        names = [*deltackpt.inspect.open(tmp_path).at(1).dense]
        assert sum("opt_state" in name for name in names) > 3  # Orbax stores each of them.
        found = manager.read_state(1, {"params": state["params"]})
        slot = "opt_state/1/inner_states/rows/inner_state/0/sum_of_squares/table"
        assert found.unused == ("old", slot), found.unused
    shown = run("show", tmp_path)
    lines = shown.stdout.splitlines()
    dense = [line.split()[0] for line in lines if line.split()[1:3] == ["3", "float32"]]
    assert shown.returncode == 0 and {*dense} == {"params/b", "params/w"}
    assert not any("inner_states" in line and "None" in line for line in lines), shown.stdout
    assert any(line.startswith("and ") and "without a value" in line for line in lines)


def test_results_of_restores_are_printed_in_a_line(saved):
    manager, state, _ = saved
    with_point = dataclasses.replace(
        manager.restore_latest(state), point=RecoveryPoint(1, SaveId("run", 7, 3), True, 0.0)
    )
    for found, told in (
        (manager.restore_latest(state), "<Restored step 2, from directory: "),
        (with_point, "<Restored recovery point 7 of WAL epoch 1, from directory: "),
        (manager.read_state(2, {"tables": state["tables"]}), "<ReadState of step 2: 0 missing, "),
        (manager.read(2, {"tables/users": (0, 3)}), "<ReadRows of step 2: 1 table, "),
    ):
        assert repr(found).startswith(told) and len(repr(found)) < 100, repr(found)
    damaged = ((9, Damaged("9/x", "a file", "none")),)
    assert "skipped 9" in repr(dataclasses.replace(manager.restore_latest(state), skipped=damaged))
