# SPDX-License-Identifier: Apache-2.0
"""Contexts that a program sets for its own computations neither change nor break our calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from user_contexts import CONTEXTS, MESHES, Context

import deltackpt
from deltackpt import fingerprint, inspect, serving, touched
from deltackpt.errors import TemplateMismatch, TrackingError
from deltackpt.state import placement

# The codec represents the values of these tables exactly.
TABLES = deltackpt.Tables(
    select="tables/*", slots={"tables/*": {"sum": "sums/{name}"}}, codec="bf16"
)
#: Settings for all threads, including those of a manager.
EVERYWHERE = {
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_transfer_guard": "disallow_explicit",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
}
OPTIONS = {
    "marks": deltackpt.ManagerOptions(
        wal=deltackpt.WalOptions(), dense=deltackpt.Dense(deltas="blocks")
    ),
    "fingerprints": deltackpt.ManagerOptions(
        deltas=deltackpt.DeltaOptions(tracking="fingerprints")
    ),
}
IDS = {"tables/sharded": np.array([3, 5]), "tables/free": np.array([3, 5])}


def first_state(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    rows = NamedSharding(mesh, P("x"))
    table = np.arange(256.0, dtype=np.float32).reshape(64, 4)
    table[0] = np.nan, np.inf, -np.inf, -0.0
    return {
        "tables": {"sharded": jax.device_put(table, rows), "free": jnp.asarray(table[:8])},
        "sums": {"sharded": jax.device_put(np.zeros(64, np.float32), rows), "free": jnp.zeros(8)},
        "weights": jax.device_put(
            np.full((8, 600), np.nan, np.float32), NamedSharding(mesh, P(None, "y"))
        ),
        "bias": jnp.full(3, jnp.inf),
        "key": jax.random.key(0),
        "step": jnp.int32(0),
        "host": np.arange(3),
    }


def moved(state: dict[str, Any]) -> dict[str, Any]:
    """Changes rows 3 and 5 of each table, and some dense leaves."""

    def changed(table: jax.Array) -> jax.Array:
        rows = np.array(table)
        rows[[3, 5]] += 1
        return jax.device_put(rows, table.sharding if table.committed else None)

    return {
        **state,
        "tables": jax.tree.map(changed, state["tables"]),
        "step": jnp.int32(7),
        "bias": jnp.full(3, jnp.nan),
    }


def abstract(state: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct.like(leaf) if isinstance(leaf, jax.Array) else leaf, state
    )


def states_of(mesh: jax.sharding.Mesh) -> list[dict[str, Any]]:
    """Three states of a run, and an abstract template."""
    first = first_state(mesh)
    second = moved(first)
    return [first, second, moved(second), abstract(first)]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    with placement.neutral():
        model.assert_same(found, expected)


def placements(state: dict[str, Any]) -> list[object]:
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    return model.placements(arrays)


def called_in(context: Context) -> Callable[..., Any]:
    """Makes calls in a context."""

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return call


def traced(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a manager while jax traces the caller; makes other calls outside."""
    owner = getattr(function, "__self__", function)
    if not (owner is deltackpt.CheckpointManager or isinstance(owner, deltackpt.CheckpointManager)):
        return function(*args, **kwargs)
    found = []
    jax.jit(lambda: found.append(function(*args, **kwargs)))()
    return found[0]


def every_call(
    root: Path, states: list[dict[str, Any]], how: str, call: Callable[..., Any]
) -> None:
    """A run, a resumed run and its readers."""
    first, second, third, template = states
    marks, handlers = None, {"embeddings": TABLES}
    with call(
        deltackpt.CheckpointManager, root, handlers=handlers, options=OPTIONS[how]
    ) as manager:
        if how == "marks":
            tables = {f"tables/{name}": table for name, table in first["tables"].items()}
            marks = call(touched.init, tables)
            call(manager.verify_tracking, first, touched=marks)
        call(manager.save, 0, first, touched=marks)
        if marks is not None:
            marks = call(touched.mark, marks, IDS, mask=dict.fromkeys(IDS, np.array([[True]])[0]))
        assert call(manager.save, 1, second, touched=marks).kind == "delta"
        assert call(manager.next_save, third, touched=marks).kind == "delta"
        if marks is not None:
            assert call(manager.verify_tracking, second, touched=marks)
            call(manager.wait_until_finished)
            marks = call(touched.mark, marks, IDS)
            call(manager.append, 2, third, touched=marks)
            call(manager.wait_appended)
            assert call(manager.recovery_points)
        else:
            call(manager.save, 2, third)
        call(manager.wait_until_finished)
        same(call(manager.restore_latest, first).state, third)
        found = call(manager.restore, 1, first).state
        same(found, second)
        assert placements(found) == placements(first)
        same(call(manager.read_state, 1, second).state, second)
        assert len(call(manager.read, 1, {"tables/free": None}).tables) == 1
        found = call(manager.restore, 2, template)
        same(found.state, third)
        again = found.touched
        assert (again is None) == (how == "fingerprints")
        if again is not None:
            call(manager.verify_tracking, found.state, touched=again)
        call(manager.save, 5, found.state, touched=again)
        call(manager.wait_until_finished)
        if again is not None:
            with pytest.raises(TrackingError):
                call(manager.verify_tracking, second, touched=again)
    call(call(inspect.open, root).at, 1)
    with call(serving.follow, root, leaves="bias", tables="free") as live:
        call(live.wait_ready, 60)
        call(live.dense_on_device)
        found = call(live.on_device, "free")
    np.testing.assert_array_equal(found.array, third["tables"]["free"])


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_no_context_of_a_program_affects_a_call(tmp_path, context, how):
    mesh = MESHES["Explicit" if "Explicit" in context else "Auto"]
    every_call(tmp_path, states_of(mesh), how, called_in(CONTEXTS[context]))


@pytest.mark.parametrize("how", OPTIONS)
def test_a_call_inside_a_trace_computes_arrays(tmp_path, how):
    every_call(tmp_path, states_of(MESHES["Auto"]), how, traced)


@pytest.mark.parametrize("call", [called_in(contextlib.nullcontext), traced])
def test_programs_of_a_call_contain_no_computed_constants(tmp_path, call):
    """Those of the size of a table would stay on its devices."""
    found = []

    def receive(_: object) -> None:
        found.extend(jax.make_jaxpr(lambda: jnp.arange(99) * 2)().consts)
        found.append(jnp.arange(2).tolist())

    state = states_of(MESHES["Auto"])[0]
    with deltackpt.CheckpointManager(
        tmp_path,
        handlers={"embeddings": TABLES},
        event_handlers=(mock.Mock(receive=receive),),
    ) as manager:
        call(manager.save, 0, state)
        call(manager.wait_until_finished)
        call(manager.restore_latest, state)
    assert len(found) >= 2
    assert all(each == [0, 1] for each in found)


def test_stamps_of_abstract_tables_are_made_and_grown_inside_a_trace():
    few, more = (jax.ShapeDtypeStruct((rows, 2), jnp.float32) for rows in (4, 6))
    made = jax.jit(lambda: touched.grow(touched.init({"t": few}), {"t": more}))()
    assert made.stamps["t"].shape == (6,)
    mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"))
    other = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    with pytest.raises(TrackingError, match="over an AbstractMesh"):
        jax.jit(lambda: touched.init({"t": other}))()


@pytest.mark.parametrize("context", CONTEXTS)
def test_an_optimizer_is_tracked_in_any_context(context):
    """The optimizer and its jit belong to the program."""
    rows = None
    if context.startswith("set_mesh"):
        rows = NamedSharding(MESHES[context.removeprefix("set_mesh ")], P("x"))
    params = {"sharded": jax.device_put(np.ones((64, 4), np.float32), rows), "free": jnp.ones(4)}
    grads = jax.tree.map(lambda leaf: leaf * 0, params)
    optimizer = touched.track(optax.sgd(0.5), "sharded")
    update = jax.jit(optimizer.update)
    with CONTEXTS[context]():
        touched.track(optax.sgd(0.5), "sharded", rule="gradient").init(params)
        _, state = update(grads, optimizer.init(params), params)
        assert touched.find(state) is not None
        hashed = fingerprint.fingerprint(params["sharded"])
        assert fingerprint.changed_rows(hashed, hashed).size == 0


def test_a_restore_creates_arrays_with_the_settings_of_the_calling_thread(tmp_path):
    """Dense leaves are read in another thread."""
    handlers = {"embeddings": deltackpt.Tables(select="tables/*")}
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers) as manager:
        with jax.enable_x64(True), jax.default_device(jax.devices()[3]):
            wide = np.arange(8).reshape(4, 2) + (1 << 40)
            state = {"tables": {"t": jnp.asarray(wide)}, "wide": jnp.asarray(wide)}
            manager.save(0, state)
            for template in (state, jax.eval_shape(lambda: state)):
                found = manager.restore(0, template).state
                model.assert_same(found, state)
                assert model.placements(found) == model.placements(state)
        with pytest.raises(TemplateMismatch, match="jax_enable_x64 is off"):
            manager.restore(0, state)


@pytest.mark.parametrize("how", OPTIONS)
def test_settings_for_all_threads_affect_no_call(tmp_path, how):
    states = states_of(MESHES["Auto"])
    before = {name: getattr(jax.config, name) for name in EVERYWHERE}
    try:
        for name, value in EVERYWHERE.items():
            jax.config.update(name, value)
        every_call(tmp_path, states, how, called_in(contextlib.nullcontext))
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
