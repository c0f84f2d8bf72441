# SPDX-License-Identifier: Apache-2.0
"""Restored arrays are placed like the template: devices, memory, layout, and committed or not.

JAX refuses programs whose arguments are committed to different devices. So the first step of a
resumed run fails if an array that was never placed is restored as committed.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from unittest import mock

import command
import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.layout import Format, Layout

import deltackpt
from deltackpt import inspect, touched
from deltackpt.errors import TemplateMismatch, TrackingError
from deltackpt.save import capture

P = jax.sharding.PartitionSpec
TABLES = deltackpt.Tables(select="params/tables/*")
OPTIMIZER = touched.track(
    optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 10)), "tables/*"
)


def auto_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def trainer() -> dict[str, Any]:
    """A state as programs build it: sharded parameters, and all else where JAX made it."""
    mesh = auto_mesh()
    rows = jax.sharding.NamedSharding(mesh, P("x"))
    params = {
        "tables": {
            "users": jax.device_put(jnp.arange(64.0).reshape(16, 4), rows),
            "never_placed": jnp.arange(32.0).reshape(8, 4),
        },
        "kernel": jax.device_put(jnp.ones((4, 4)), jax.sharding.NamedSharding(mesh, P(None, "y"))),
        "bias": jnp.zeros(4),
    }
    return {
        "params": params,
        "opt": OPTIMIZER.init(params),
        "key": jax.random.key(1),
        "rbg": jax.random.key(2, impl="rbg"),
        "raw_key": jax.random.PRNGKey(3),
        "step": jnp.int32(0),
        "average": jnp.zeros(()),
        "nothing": jnp.zeros((0, 3)),
        "modules": nnx.state(nnx.BatchNorm(4, rngs=nnx.Rngs(0))),
    }


@jax.jit
def trained(state: dict[str, Any]) -> dict[str, Any]:
    """One step that reads every leaf."""
    ids = jnp.array([3, 5])

    def loss(params):
        used = params["tables"]["users"][ids] + params["tables"]["never_placed"][ids]
        noise = jax.random.normal(jax.random.fold_in(state["key"], state["step"]), used.shape)
        return jnp.sum((used @ params["kernel"] + params["bias"] + noise) ** 2)

    grads = jax.grad(loss)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    key, rbg = jax.random.split(state["key"])[0], jax.random.split(state["rbg"])[0]
    return {
        **state,
        "params": optax.apply_updates(state["params"], updates),
        "opt": opt,
        "key": key,
        "rbg": rbg,
        "raw_key": jax.random.split(state["raw_key"])[1],
        "step": state["step"] + 1,
        "average": state["average"] + 0.5,
        "modules": jax.tree.map(lambda leaf: leaf + 1, state["modules"]),
    }


def committed(tree: Any) -> dict[str, bool]:
    return {
        jax.tree_util.keystr(path): leaf.committed for path, leaf in jax.tree.leaves_with_path(tree)
    }


def abstract(state: Any) -> Any:
    """A template as in JAX's own documentation."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def shapes(state: Any) -> Any:
    """The same, but only committed leaves name a sharding."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding if leaf.committed else None
        ),
        state,
    )


TEMPLATES = {
    "arrays": lambda state: state,
    "abstract": abstract,
    "shapes": shapes,
    "like": lambda state: jax.tree.map(jax.ShapeDtypeStruct.like, state),
}
OPTIONS = deltackpt.ManagerOptions(wal=deltackpt.WalOptions())


def without_touched(state: dict[str, Any]) -> dict[str, Any]:
    """Drops the TouchState, which a restore recreates."""
    return {**state, "opt": state["opt"].inner}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_resumed_run_equals_the_uninterrupted_run(tmp_path, template):
    """With optax counts, schedules and slots, keys, nnx variables and sharded parameters."""
    fresh = trainer()
    state = trained(fresh)
    with deltackpt.CheckpointManager(
        tmp_path, handlers={"embeddings": TABLES}, options=OPTIONS
    ) as manager:
        manager.save(1, state)
        manager.append(2, trained(state))
        manager.wait_until_finished()
        for step, now in ((1, state), (2, trained(state))):
            found = manager.restore(step, template(fresh)).state
            assert committed(found) == committed(fresh)
            expected = without_touched(trained(now))
            model.assert_same(without_touched(trained(found)), expected)
        begun = {name: fresh[name] for name in ("params", "step", "raw_key", "key", "rbg")}
        found = manager.read_state(1, template(begun)).state
        assert committed(found) == committed(begun)


@pytest.mark.parametrize("deltas", ["whole", "blocks"])
def test_a_typed_key_keeps_its_implementation_however_it_is_read(tmp_path, deltas):
    state = in_memory(MEMORIES[0], sharded=False)
    state |= {"key": jax.random.key(1), "rbg": jax.random.split(jax.random.key(2, impl="rbg"), 3)}
    marks = touched.init({"tables/t": state["tables"]["t"]})
    options = dataclasses.replace(OPTIONS, dense=deltackpt.Dense(deltas=deltas))
    with deltackpt.CheckpointManager(
        tmp_path, handlers={"embeddings": IN_MEMORY}, options=options
    ) as manager:
        for step in range(2):
            manager.save(step, state, touched=marks)
            marks = touched.mark(marks, {"t": [step]})
        manager.append(2, state, touched=marks)
        manager.wait_until_finished()
        for step in range(3):
            for template in (None, state, jax.eval_shape(lambda: state)):
                model.assert_same(manager.restore(step, template).state, state)
            if step < 2:
                piece = {"key": jax.random.key(0), "rbg": state["rbg"]}
                model.assert_same(
                    manager.read_state(step, piece).state, {**piece, "key": state["key"]}
                )
            leaf = inspect.open(tmp_path).at(step).dense["rbg"]
            keys = jax.random.wrap_key_data(leaf.value, impl=leaf.prng_impl)
            assert (keys == state["rbg"]).all()
            shown = command.run("show", tmp_path, step, "--json")
            assert json.loads(shown.stdout)["dense"]["rbg"]["prng_impl"] == "rbg", shown


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_sharded_and_a_never_placed_table_are_marked_in_one_program(tmp_path, kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    tables = {
        "sharded": jax.device_put(jnp.ones((16, 4)), jax.sharding.NamedSharding(mesh, P("x"))),
        "free": jnp.ones((16, 4)),
    }
    optimizer = touched.track(optax.sgd(0.1), "*")

    @jax.jit
    def step(tables, opt, marks, ids):
        grads = jax.tree.map(lambda table: table * (jnp.arange(16) == 3)[:, None], tables)
        updates, opt = optimizer.update(grads, opt, tables)
        return opt, touched.mark(marks, dict.fromkeys(tables, ids))

    rows = [0, 0, 0, 1] + [0] * 12
    opt, marks = step(tables, optimizer.init(tables), touched.init(tables), jnp.array([3]))
    for found in (opt.touched, marks):
        assert {name: stamps.tolist() for name, stamps in found.stamps.items()} == {
            "sharded": rows,
            "free": rows,
        }


MEMORIES = [memory.kind for memory in jax.devices()[0].addressable_memories()]


def in_memory(kind: str, *, sharded: bool) -> dict[str, Any]:
    """Tables, their slots and a dense leaf in one kind of memory."""
    rows = jax.sharding.SingleDeviceSharding(jax.devices()[1], memory_kind=kind)
    if sharded:
        rows = jax.sharding.NamedSharding(auto_mesh(), P("x"), memory_kind=kind)
    return jax.device_put(
        {
            "tables": {"t": np.arange(64, dtype=np.float32).reshape(16, 4)},
            "sums": {"t": np.zeros(16, np.float32)},
            "kernel": np.ones((8, 600), np.float32),
        },
        rows,
    )


IN_MEMORY = deltackpt.Tables(select="tables/*", slots={"tables/*": {"sum": "sums/{name}"}})


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tracking", ["touched", "fingerprints"])
@pytest.mark.parametrize("kind", MEMORIES)
def test_tables_slots_and_dense_leaves_keep_their_memory(tmp_path, kind, tracking, sharded):
    state = in_memory(kind, sharded=sharded)
    marks = touched.init({"tables/t": state["tables"]["t"]}) if tracking == "touched" else None
    options = deltackpt.ManagerOptions(deltas=deltackpt.DeltaOptions(tracking=tracking))
    handlers = {"embeddings": IN_MEMORY}
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers, options=options) as manager:
        manager.save(0, state, touched=marks)
        table = np.array(state["tables"]["t"])
        table[3] = -1
        moved = {**state, "tables": {"t": jax.device_put(table, state["tables"]["t"].sharding)}}
        if marks is not None:
            marks = jax.jit(touched.mark)(marks, {"t": jnp.array([3])})
            assert not manager.verify_tracking(moved, touched=marks)
        assert manager.save(1, moved, touched=marks).kind == "delta"
        [report] = manager.wait_until_finished()[1:]
        assert report.rows == 1
        for template in (state, abstract(state)):
            found = manager.restore(1, template).state
            model.assert_same(found, moved)
            assert jax.tree.map(lambda leaf: leaf.sharding, found) == jax.tree.map(
                lambda leaf: leaf.sharding, state
            )
        model.assert_same(manager.read_state(1, abstract(state)).state, moved)


@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_a_table_in_host_memory_is_saved_beside_slots_on_an_accelerator(tmp_path, codec):
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    state = {**in_memory(MEMORIES[0], sharded=False), "kernel": jnp.ones(3)}
    state["tables"] = jax.device_put(state["tables"], host)
    marks = touched.init({"tables/t": state["tables"]["t"]})
    handlers = {"embeddings": dataclasses.replace(IN_MEMORY, codec=codec)}

    def on_host(array: Any) -> bool:
        """Treats the CPU as an accelerator."""
        return not isinstance(array, jax.Array) or array.sharding.memory_kind == "pinned_host"

    with (
        mock.patch.object(capture, "on_host", on_host),
        deltackpt.CheckpointManager(tmp_path, handlers=handlers) as manager,
    ):
        manager.save(0, state, touched=marks)
        assert manager.save(1, state, touched=touched.mark(marks, {"t": [3]})).kind == "delta"
        model.assert_same(manager.restore(1, state).state, state)


def formats(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.format, tree)


@pytest.mark.parametrize("dense", ["whole", "blocks"])
@pytest.mark.parametrize("sharded", [False, True])
def test_arrays_keep_their_layouts(tmp_path, sharded, dense):
    state = in_memory(MEMORIES[0], sharded=sharded)

    def by_columns(leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, Format(Layout((1, 0)), leaf.sharding))

    state |= {"tables": jax.tree.map(by_columns, state["tables"])}
    state |= {"kernel": by_columns(state["kernel"])}
    marks = touched.init({"tables/t": state["tables"]["t"]})
    options = deltackpt.ManagerOptions(dense=deltackpt.Dense(deltas=dense))
    with deltackpt.CheckpointManager(
        tmp_path, handlers={"embeddings": IN_MEMORY}, options=options
    ) as manager:
        manager.save(0, state, touched=marks)
        moved = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf) * 2, leaf.format), state)
        manager.save(1, moved, touched=touched.mark(marks, {"t": np.arange(16)}))
        for step, expected in enumerate((state, moved)):
            for template in (state, jax.tree.map(jax.ShapeDtypeStruct.like, state)):
                found = manager.restore(step, template).state
                model.assert_same(found, expected)
                assert formats(found) == formats(state)
            found = manager.read_state(step, state).state
            assert formats(found) == formats(state)


def explicit_mesh(rows: int = 8) -> jax.sharding.Mesh:
    devices = jax.devices()[:rows]
    return jax.make_mesh((rows,), ("x",), (jax.sharding.AxisType.Explicit,), devices=devices)


def begun() -> dict[str, Any]:
    """An initial state under the current mesh."""
    tables = {"t": jax.sharding.reshard(jnp.arange(64.0).reshape(16, 4), P("x"))}
    sums = {"t": jnp.zeros_like(tables["t"][:, 0])}
    marks = touched.init({"tables/t": tables["t"]})
    return {"tables": tables, "sums": sums, "kernel": jnp.ones((8, 3)), "marks": marks}


def test_a_template_of_eval_shape_uses_the_current_mesh(tmp_path):
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": IN_MEMORY}) as manager:
        with jax.set_mesh(explicit_mesh()):
            state, template = jax.jit(begun)(), jax.eval_shape(begun)
            manager.save(0, state)
            for abstract in (jax.tree.map(jax.typeof, state), template):
                found = manager.restore(0, abstract)
                assert found.touched is not None
                for name in ("tables", "sums", "kernel"):
                    model.assert_same(found.state[name], state[name])
                assert found.state["tables"]["t"].sharding == state["tables"]["t"].sharding
                stamps = found.touched.stamps["tables/t"]
                assert stamps.sharding == state["marks"].stamps["tables/t"].sharding
            piece = manager.read_state(0, {"tables": template["tables"]}).state
            assert piece["tables"]["t"].sharding == state["tables"]["t"].sharding
            jax.jit(begun)()
            init = touched.init({"tables/t": template["tables"]["t"]})
            assert init.stamps["tables/t"].sharding == stamps.sharding
        with jax.set_mesh(explicit_mesh(4)):
            spec = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=P("x"))
            piece = manager.read_state(0, {"tables": {"t": spec}}).state
        assert len(piece["tables"]["t"].devices()) == 4


@pytest.mark.parametrize("mesh", [None, explicit_mesh(4)])
def test_an_error_about_a_template_over_another_mesh_names_its_leaves(tmp_path, mesh):
    with jax.set_mesh(explicit_mesh()):
        state, template = jax.jit(begun)(), jax.eval_shape(begun)
        alone = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=P("x"))
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": IN_MEMORY}) as manager:
        manager.save(0, state)
        with jax.set_mesh(mesh):
            for restore in (manager.restore_latest, lambda one: manager.restore(0, one)):
                with pytest.raises(TemplateMismatch, match=r"\['tables'\]\['t'\]: .*AbstractMesh"):
                    restore(template)
            with pytest.raises(TemplateMismatch, match=r"\['sums'\]\['t'\]"):
                manager.read_state(0, {"sums": template["sums"]})
            with pytest.raises(TrackingError, match=r"\['t'\]: .*AbstractMesh"):
                touched.init(template["tables"])
        if mesh is None:
            with pytest.raises(TemplateMismatch, match=r"\['t'\]: .*PartitionSpec"):
                manager.read_state(0, {"tables": {"t": alone}})
