# SPDX-License-Identifier: Apache-2.0
"""A part of a step, or a step in a state of another structure."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import deltackpt
from deltackpt.errors import Damaged, StepNotFound, TemplateMismatch

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}


@pytest.fixture
def saved(tmp_path):
    """Three steps, and the state of the last."""
    state = model.initial()
    touched = model.new_touched(state)
    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS) as manager:
        for step in range(3):
            state, touched = model.train(state, touched, step)
            manager.save(step, state, touched=touched)
        manager.wait()
        yield manager, state, touched


def same(one, other) -> bool:
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_a_subtree_is_read_and_what_is_left_is_said(saved):
    manager, state, _ = saved
    template = {"tables": {"users": jnp.zeros((700, 8))}, "step": 0}
    found = manager.read_state(2, template)
    assert same(found.state["tables"]["users"], state["tables"]["users"])
    assert found.state["step"] == 3 and type(found.state["step"]) is int
    assert found.missing == () and "tables/items" in found.unused and "key" in found.unused


def test_placeholders_and_what_the_step_lacks_stay(saved):
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


def test_dtypes_of_a_kind_are_cast_and_said(saved):
    manager, state, _ = saved
    template = {"tables": {"users": jax.ShapeDtypeStruct((700, 8), jnp.bfloat16)}}
    found = manager.read_state(2, template)
    assert found.cast == ("tables/users",)
    expected = state["tables"]["users"].astype(jnp.bfloat16)
    assert same(found.state["tables"]["users"], expected)
    with pytest.raises(TemplateMismatch, match="another kind"):
        manager.read_state(2, {"tables": {"users": jnp.zeros((700, 8), jnp.int32)}})
    with pytest.raises(TemplateMismatch, match=r"step 2, tables/users: expected.*\[700, 9\]"):
        manager.read_state(2, {"tables": {"users": jnp.zeros((700, 9))}})


def test_what_was_a_table_may_be_dense_now_and_shardings_are_the_templates(saved, tmp_path):
    manager, state, _ = saved
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec("x"))
    template = {"tables": {"users": jax.ShapeDtypeStruct((700, 8), jnp.float32, sharding=sharding)}}
    other = {"embeddings": deltackpt.Tables(select="tables/items")}
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(tmp_path, handlers=other, options=options) as reader:
        found = reader.read_state(1, template).state["tables"]["users"]
    assert found.sharding == sharding
    np.testing.assert_array_equal(found, manager.read_state(1, template).state["tables"]["users"])


def test_the_run_goes_on_as_if_nothing_had_been_read(saved):
    manager, state, touched = saved
    manager.read_state(0, {"step": 0})
    state, touched = model.train(state, touched, 3)
    assert manager.save(3, state, touched=touched).kind == "delta"
    assert same(manager.restore_latest(state).state["tables"]["users"], state["tables"]["users"])


def test_a_step_that_is_not_there_or_not_intact_is_said(saved, tmp_path):
    manager, *_ = saved
    with pytest.raises(StepNotFound):
        manager.read_state(8, {"step": 0})
    for chunk in (tmp_path / "0").rglob("part.0/*/values/c/0/0"):
        chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(Damaged):
        manager.read_state(2, {"tables": {"users": jnp.zeros((700, 8))}})
