# SPDX-License-Identifier: Apache-2.0
"""Saving the restored step again saves nothing if the state is unchanged, and fails if it is not.

A loop without work left restores a step and saves it at its end. Leaves are compared by value, not
by identity.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest

import deltackpt
from deltackpt import touched
from deltackpt.errors import OptionError, SaveFailed, StorageError, TableSelectionError
from deltackpt.session.restoring import Restorer
from deltackpt.session.step_reader import StepReader

P = jax.sharding.PartitionSpec
TABLES = deltackpt.Tables(select="tables/*", slots={"tables/*": {"sum": "sums/{name}"}})


@pytest.fixture
def state() -> dict[str, Any]:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, P("x"))
    return {
        "tables": {
            "cut": jax.device_put(jnp.arange(64.0).reshape(16, 4), rows),
            "free": jnp.arange(12.0).reshape(6, 2),
        },
        "sums": {"cut": jax.device_put(jnp.zeros(16), rows), "free": jnp.zeros(6)},
        "kernel": jax.device_put(jnp.ones((8, 3)), rows),
        "nan": jnp.array([jnp.nan, -0.0, 1.0]),
        "half": jnp.ones(3, jnp.bfloat16),
        "small": jnp.arange(-3, 4, dtype=jnp.int4),
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3),
        "step": jnp.int32(7),
        "nothing": jnp.zeros((0, 3)),
        "host": np.arange(5.0),
        "scalar": np.float32(2.5),
        "number": 1000.5,
        "yes": True,
        "text": "as it is",
        "none": None,
        "empty": {},
    }


def manager_of(root, tracking="touched", deltas="whole", wal=False) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": TABLES},
        options=deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(tracking=tracking),
            dense=deltackpt.Dense(deltas=deltas),
            wal=deltackpt.WalOptions() if wal else None,
        ),
    )


def each(change: Any) -> Any:
    """Applies a function to the jax arrays of a state other than keys."""

    def changed(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array)
        if is_array and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return change(leaf)
        return jax.random.clone(leaf) if is_array else leaf

    return lambda state: jax.tree.map(changed, state)


#: All preserve every bit; the first four create new arrays.
COPIES = {
    "jit": each(jax.jit(lambda leaf: leaf)),
    "copied": each(lambda leaf: leaf.copy()),
    "host": each(lambda leaf: jax.device_put(np.asarray(leaf), leaf.sharding)),
    "replicated": each(lambda leaf: jax.device_put(np.asarray(leaf), jax.devices()[3])),
    "same": lambda state: state,
}


@pytest.mark.parametrize("deltas", ["whole", "blocks"])
@pytest.mark.parametrize("tracking", ["touched", "fingerprints"])
@pytest.mark.parametrize("how", COPIES)
def test_new_arrays_of_equal_value_are_the_restored_state(tmp_path, how, tracking, deltas, state):
    with manager_of(tmp_path, tracking, deltas) as manager:
        marks = None
        if tracking == "touched":
            marks = touched.init({f"tables/{k}": v for k, v in state["tables"].items()})
        manager.save(10, state, touched=marks)
        manager.save(20, state, touched=marks)
    for like in (state, None):
        with manager_of(tmp_path, tracking, deltas) as manager:
            found = manager.restore_latest(like)
            assert found is not None
            marks = found.touched if tracking == "touched" else None
            saved = manager.save(20, COPIES[how](found.state), touched=marks)
            assert saved.kind is None and "it was restored" in saved.reason


def changes(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """States that differ in a single bit or leaf, by what differs."""
    found: dict[str, dict[str, Any]] = {}
    for name, leaf in state.items():
        if isinstance(leaf, dict) or leaf is None or np.size(leaf) == 0:
            continue
        if isinstance(leaf, str):
            other: Any = leaf + " not"
        elif isinstance(leaf, bool):
            other = not leaf
        elif isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            other = leaf[::-1] if leaf.shape else jax.random.split(leaf)[0]
        elif name == "nan":
            other = jnp.array([jnp.nan, 0.0, 1.0])
        else:
            other = type(leaf)(leaf + 1) if np.isscalar(leaf) else leaf + leaf.dtype.type(1)
        found[name] = {**state, name: other}
    for group in ("tables", "sums"):
        for name, table in state[group].items():
            rows = table.at[3].add(1)
            found[f"{group}/{name}"] = {**state, group: {**state[group], name: rows}}
    found["more"] = {**state, "more": jnp.ones(2)}
    found["dtype"] = {**state, "kernel": state["kernel"].astype(jnp.bfloat16)}
    return found


@pytest.mark.parametrize("tracking", ["touched", "fingerprints"])
def test_any_bit_that_changed_makes_it_another_state(tmp_path, tracking, state):
    with manager_of(tmp_path, tracking) as manager:
        marks = None
        if tracking == "touched":
            marks = touched.init({f"tables/{k}": v for k, v in state["tables"].items()})
        model.commit(manager, 20, state, touched=marks)
        found = manager.restore_latest(state)
        assert found is not None
        marks = found.touched if tracking == "touched" else None
        for name, changed in changes(found.state).items():
            with pytest.raises(OptionError, match="expected a step above 20"):
                pytest.fail(f"{name}: {manager.save(20, changed, touched=marks)}")
        assert manager.save(20, found.state, touched=marks).kind is None


@pytest.mark.parametrize("leaf", ["host", "table"])
def test_a_host_array_that_was_modified_in_place_makes_it_another_state(tmp_path, leaf):
    state = {"tables": {"t": np.ones((4, 2))}, "sums": {"t": np.zeros(4)}, "host": np.ones(3)}
    marks = touched.init({"tables/t": state["tables"]["t"]})
    with manager_of(tmp_path) as manager:
        model.commit(manager, 20, state, touched=marks)
        found = manager.restore_latest(state)
        assert found is not None
        assert manager.save(20, found.state, touched=found.touched).kind is None
        (found.state["tables"]["t"] if leaf == "table" else found.state["host"])[1] = 5
        with pytest.raises(OptionError, match="expected a step above 20"):
            manager.save(20, found.state, touched=found.touched)


@pytest.mark.parametrize("tracking", ["auto", "touched"])
@pytest.mark.parametrize("tables", [{}, {"t": jnp.ones((4, 2))}])
def test_a_state_without_marks_is_compared_too(tmp_path, tables, tracking):
    state = {"tables": tables, "kernel": jnp.ones(3)}
    handlers = {"embeddings": deltackpt.Tables(select="tables/*" if tables else ())}
    options = deltackpt.ManagerOptions(deltas=deltackpt.DeltaOptions(tracking=tracking))
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers, options=options) as manager:
        model.commit(manager, 20, state)
        found = manager.restore_latest(state)
        assert found is not None
        for copy in (found.state, COPIES["copied"](found.state)):
            assert manager.save(20, copy).kind is None
        with pytest.raises(OptionError, match="expected a step above 20"):
            manager.save(20, jax.tree.map(lambda leaf: leaf + 1, found.state))


@pytest.mark.parametrize("tracking", ["touched", "fingerprints"])
@pytest.mark.parametrize("call", ["append", "save"])
def test_a_restored_recovery_point_is_compared_too(tmp_path, call, tracking, state):
    with manager_of(tmp_path, tracking, wal=True) as manager:
        marks = None
        if tracking == "touched":
            marks = touched.init({f"tables/{k}": v for k, v in state["tables"].items()})
        manager.save(10, state, touched=marks)
        state = {**state, "step": jnp.int32(8)}
        state["tables"] = {**state["tables"], "free": state["tables"]["free"].at[1].set(-1)}
        if marks is not None:
            marks = touched.mark(marks, {"tables/free": jnp.array([1])})
        manager.append(20, state, touched=marks)
        manager.wait_appended()
    with manager_of(tmp_path, tracking, wal=True) as manager:
        found = manager.restore_latest(state)
        assert found is not None and found.point is not None
        marks = found.touched if tracking == "touched" else None
        told = getattr(manager, call)(20, COPIES["copied"](found.state), touched=marks)
        assert told.kind is None and "it was restored" in told.reason
        for changed in changes(found.state).values():
            with pytest.raises(OptionError, match="expected a step above"):
                getattr(manager, call)(20, changed, touched=marks)


def test_the_step_is_read_only_if_it_is_saved_again_with_other_arrays(tmp_path, state):
    state = state | {"host": None}
    with (
        manager_of(tmp_path) as manager,
        mock.patch.object(Restorer, "_equals", side_effect=AssertionError),
    ):
        marks = touched.init({f"tables/{k}": v for k, v in state["tables"].items()})
        model.commit(manager, 20, state, touched=marks)
        found = manager.restore_latest(state)
        assert found is not None
        assert manager.save(20, found.state, touched=found.touched).kind is None
        moved = touched.mark(found.touched, {"tables/free": jnp.array([1])})
        with pytest.raises(OptionError):
            manager.save(20, COPIES["copied"](found.state), touched=moved)
        assert manager.save(21, COPIES["copied"](found.state), touched=moved).kind is not None


def test_a_step_that_was_damaged_since_does_not_equal_the_state(tmp_path, state):
    with manager_of(tmp_path, "fingerprints") as manager:
        model.commit(manager, 20, state)
        found = manager.restore_latest(state)
        assert found is not None
        for path in (tmp_path / "20").rglob("*"):
            if path.is_file() and path.name not in ("commit.msgpack", "_CHECKPOINT_METADATA"):
                path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(OptionError, match="expected a step above 20"):
            manager.save(20, COPIES["copied"](found.state))


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (StorageError("no answer"), StorageError),
        (MemoryError("too little"), SaveFailed),
        (TableSelectionError("another table"), OptionError),
    ],
    ids=["storage", "memory", "tables"],
)
def test_a_step_that_cannot_be_compared_raises_a_typed_error_and_loses_nothing(
    tmp_path, cause, expected, state
):
    with manager_of(tmp_path, "fingerprints") as manager:
        model.commit(manager, 20, state)
        found = manager.restore_latest(state)
        assert found is not None
        with mock.patch.object(StepReader, "load", side_effect=cause):
            with pytest.raises(expected):
                manager.save(20, COPIES["copied"](found.state))
        assert manager.save(20, COPIES["copied"](found.state)).kind is None
        assert manager.save(21, found.state).kind is not None
