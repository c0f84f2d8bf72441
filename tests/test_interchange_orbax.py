# SPDX-License-Identifier: Apache-2.0
"""Stock Orbax checkpoints: imported as the first base of a run, and exported from any step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import model
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import stock_orbax
from flax.training.train_state import TrainState
from orbax.checkpoint import v1

import deltackpt
from deltackpt import errors, interchange, touched

GOLDEN = Path(__file__).parent / "golden"
TABLES = deltackpt.Tables(select="params/emb/*")
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.masked(optax.adagrad(0.1), {"emb": {"a": True, "b": True}, "w": False}),
)


def train_state(seed: int = 0, optimizer=OPTIMIZER) -> TrainState:
    rng = np.random.default_rng(seed)
    params = {
        "emb": {
            "a": jnp.asarray(rng.normal(size=(40, 4)), jnp.float32),
            "b": jnp.asarray(rng.normal(size=(30, 4)), jnp.bfloat16),
        },
        "w": jnp.asarray(rng.normal(size=(4,)), jnp.float32),
    }
    return TrainState.create(apply_fn=None, params=params, tx=optimizer)


def trained(state: TrainState, ids: jax.Array) -> TrainState:
    """Trains one step on these rows of both tables."""

    def loss(params):
        rows = params["emb"]["a"][ids] + params["emb"]["b"][ids].astype(jnp.float32)
        return jnp.sum((rows @ params["w"] - 1.0) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def ids_of(step: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(step).integers(0, 30, 5))


def same_bits(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if hasattr(other, "dtype") and jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if isinstance(other, str):
            assert one == other, name
            continue
        one, other = np.asarray(one), np.asarray(other)
        assert (one.shape, one.tobytes()) == (other.shape, other.tobytes()), name
        assert one.dtype == other.dtype, name


def v0_manager(path: Path, state) -> Path:
    with ocp.CheckpointManager(path) as manager:
        for step in (3, 7):
            manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    return path


def v0_manager_with_items(path: Path, state) -> Path:
    with ocp.CheckpointManager(path) as manager:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), notes=ocp.args.JsonSave({}))
        model.commit(manager, 7, args=args)
    return path / "7"


def v0_standard(path: Path, state) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "ckpt_000007", state)
    return path / "ckpt_000007"


def v0_pytree(path: Path, state) -> Path:
    with ocp.PyTreeCheckpointer() as checkpointer:
        for step in (3, 7):
            checkpointer.save(path / str(step), state)
    return path


def v1_free(path: Path, state) -> Path:
    v1.save(path / "7", state)
    return path / "7"


def v1_checkpointer(path: Path, state) -> Path:
    with v1.training.Checkpointer(path) as checkpointer:
        checkpointer.save(7, state)
    return path


WRITERS = [v0_manager, v0_manager_with_items, v0_standard, v0_pytree, v1_free, v1_checkpointer]


def abstract(state):
    def of_leaf(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(of_leaf, state)


def manager_of(run: Path, choice: deltackpt.Tables = TABLES, **options):
    options = deltackpt.ManagerOptions(**options)
    return deltackpt.CheckpointManager(run, handlers={"embeddings": choice}, options=options)


def importing(source: Path, run: Path, tables: deltackpt.Tables = TABLES, **options):
    return interchange.import_orbax(source, run, tables=tables, **options)


def restored(run: Path, template, choice: deltackpt.Tables = TABLES):
    """What a reader restores from the newest step."""
    with manager_of(run, choice, access="read") as reader:
        return reader.restore_latest(template)


def marked(marks, ids: jax.Array):
    """Marks these rows of both tables."""
    return touched.mark(marks, {"params/emb/a": ids, "params/emb/b": ids})


@pytest.mark.parametrize("with_template", [True, False], ids=["template", "no-template"])
@pytest.mark.parametrize("write", WRITERS)
def test_a_stock_checkpoint_continues_with_a_delta(tmp_path, write, with_template):
    state = trained(train_state(), ids_of(0))
    source = write(tmp_path / "stock", state)
    template = abstract(state) if with_template else None
    done = importing(source, tmp_path / "run", abstract_state=template)
    assert done.step == 7 and list(done.tables) == ["params/emb/a", "params/emb/b"]
    [(slot,)] = set(done.tables.values())
    with manager_of(tmp_path / "run") as manager:
        found = manager.restore_latest(train_state(seed=9))
        same_bits(found.state, state)
        moved = trained(found.state, ids_of(8))
        saved = manager.save(8, moved, touched=marked(found.touched, ids_of(8)))
        assert saved.kind == "delta"
    found = restored(tmp_path / "run", train_state(seed=9))
    assert found.chain == (7, 8)
    same_bits(found.state, moved)
    assert "sum_of_squares" in slot


@pytest.mark.processes
def test_an_import_that_is_killed_leaves_no_step_and_can_be_repeated(tmp_path):
    state = train_state()
    source = v0_manager(tmp_path / "stock", state)
    program = (
        "import os, signal, sys; from deltackpt import interchange, Tables;"
        "from deltackpt.save import commit;"
        "commit._commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL);"
        "interchange.import_orbax(*sys.argv[1:], tables=Tables(select='params/emb/*'))"
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "run")]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with manager_of(tmp_path / "run", access="read") as manager:
        assert manager.all_steps() == []
    importing(source, tmp_path / "run")
    same_bits(restored(tmp_path / "run", state).state, state)


def test_a_template_provides_shardings_and_tracking(tmp_path):
    plain = train_state(optimizer=optax.adam(0.1))
    source = v0_manager(tmp_path / "stock", plain)
    tracking = touched.track(optax.adam(0.1), "emb/*")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    fresh = jax.tree.map(
        lambda leaf: jax.device_put(leaf, by_rows if jnp.ndim(leaf) == 2 else whole),
        train_state(seed=9, optimizer=tracking),
    )
    run = tmp_path / "run"
    done = importing(source, run, abstract_state=abstract(fresh.replace(step=0)))
    assert done.tables["params/emb/a"] == ("opt_state/inner/0/mu", "opt_state/inner/0/nu")
    with manager_of(run) as manager:
        found = manager.restore_latest(fresh.replace(step=0))
        same_bits(found.state.params, plain.params)
        same_bits(found.state.opt_state.inner, plain.opt_state)
        assert found.state.params["emb"]["a"].sharding == by_rows
        moved = trained(found.state, ids_of(1))
        assert manager.save(8, moved).kind == "delta"
        manager.wait_until_finished()
        same_bits(manager.restore_latest(abstract(moved)).state.params, moved.params)


def test_slots_outside_an_optimizer_state_are_declared(tmp_path):
    state = model.initial()
    del state["dense"]["none"]
    source = v0_pytree(tmp_path / "stock", state)
    slots = {"tables/*": {"accumulator": "slots/{name}"}}
    choice = deltackpt.Tables(select="tables/*", slots=slots)
    done = importing(source, tmp_path / "run", choice)
    assert set(done.tables.values()) == {("accumulator",)}
    model.assert_same(restored(tmp_path / "run", state, choice).state, state)


def test_an_nnx_state_is_imported_with_its_template(tmp_path):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, seed: int):
            self.emb = nnx.Embed(20, 4, rngs=nnx.Rngs(seed))
            self.head = nnx.Linear(4, 1, rngs=nnx.Rngs(seed))

    state, other = nnx.state(Model(0)), nnx.state(Model(1))
    choice = deltackpt.Tables(select="emb/embedding")
    source = v0_manager(tmp_path / "stock", state)
    importing(source, tmp_path / "run", choice, abstract_state=other)
    same_bits(restored(tmp_path / "run", other, choice).state, state)


# Refusals.


def test_an_import_refuses_a_directory_with_steps_and_takes_no_lease(tmp_path):
    source = v0_manager(tmp_path / "stock", train_state())
    importing(source, tmp_path / "run")
    before = sorted(os.listdir(tmp_path / "run"))
    with pytest.raises(errors.TargetExists, match="found \\[7\\]"):
        importing(source, tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run")) == before
    with pytest.raises(errors.TargetExists):
        importing(source, source)


def test_invalid_sources_and_templates_are_named(tmp_path):
    state = train_state()
    source = v0_manager(tmp_path / "stock", state)
    (tmp_path / "foreign").mkdir()
    v1.save_checkpointables(tmp_path / "two" / "3", {"params": {"a": 1}, "more": {"b": 2}})
    v1.save(tmp_path / "unnumbered", state)
    other, further, fewer = (
        {"abstract_state": state.replace(params=params)}
        for params in (
            {**state.params, "w": jnp.ones(5)},
            {**state.params, "further": jnp.ones(5)},
            {"emb": state.params["emb"]},
        )
    )
    for error, match, name, options in (
        (errors.StepNotFound, "check the path", "nothing", {}),
        (errors.StepNotFound, r"found \[3, 7\]", "stock", {"step": 5}),
        (errors.ForeignDirectory, "_METADATA", "foreign", {}),
        (errors.OptionError, "'more', 'params'", "two", {}),
        (errors.StepNotFound, "the item 'third'", "two", {"item": "third"}),
        (errors.OptionError, "step=...", "unnumbered", {}),
        (errors.TemplateMismatch, r"w.*float32\[5\].*float32\[4\]", "stock", other),
        (errors.TemplateMismatch, "lacks\n  params/further\n", "stock", further),
        (errors.TemplateMismatch, "also has\n  params/w\n", "stock", fewer),
    ):
        with pytest.raises(error, match=match):
            importing(tmp_path / name, tmp_path / "run", **options)
    importing(source, tmp_path / "run")
    with pytest.raises(errors.ForeignDirectory, match="written by deltackpt"):
        importing(tmp_path / "run", tmp_path / "again")
    assert not (tmp_path / "again").exists()


# Orbax reads all arrays concurrently, and reports only the first error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_source_that_lacks_data_is_damaged_and_nothing_is_imported(tmp_path):
    source = v0_manager(tmp_path / "stock", train_state()) / "7" / "default"
    data = max(source.glob("**/d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(errors.Damaged, match="7/default"):
        importing(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_source_removed_during_a_read_is_gone(tmp_path):
    source = v0_manager(tmp_path / "stock", train_state())
    handler = ocp.PyTreeCheckpointHandler
    with (
        model.before_first_call(handler, "restore", lambda _, place: shutil.rmtree(place)),
        pytest.raises(errors.StepGone),
    ):
        importing(source, tmp_path / "run")


# Exports.


def every_kind() -> dict:
    """Leaves of every kind that a training state may hold."""
    rng = np.random.default_rng(0)
    return {
        "emb": {"a": jnp.asarray(rng.normal(size=(50, 4)), jnp.float32)},
        "list": [jnp.ones(2), None, {"deep": jnp.int8(3)}],
        "bf16": jnp.asarray(rng.normal(size=5), jnp.bfloat16),
        "fp8": jnp.asarray(rng.normal(size=5), jnp.float8_e4m3fn),
        "int4": jnp.arange(-4, 4).astype(jnp.int4),
        "bool": jnp.array([True, False]),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1), 3),
        "none": None,
        "int": 3,
        "float": 2.5,
        "flag": True,
        "numpy": np.float64(0.1),
        "text": "some words",
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "nothing": {},
        "host": np.arange(3, dtype=np.uint16),
    }


EVERY_KIND = deltackpt.Tables(select="emb/a")


def saved_every_kind(run: Path) -> dict:
    state = every_kind()
    with manager_of(run, EVERY_KIND) as manager:
        manager.save(4, state)
    return state


def stock_digests(root: Path, step: int) -> set[str]:
    """Digests of what each stock Orbax API restores; fails if deltackpt is imported."""
    command = [sys.executable, stock_orbax.__file__, str(root), str(step)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("\n") == 6
    return set(found.stdout.split())


@pytest.mark.processes
def test_stock_orbax_restores_every_kind_of_leaf_without_deltackpt(tmp_path):
    state = saved_every_kind(tmp_path / "run")
    done = interchange.export_orbax(tmp_path / "run", None, tmp_path / "plain")
    assert (done.step, done.changed) == (4, {"empty": "text"})
    expected = {**state, "empty": "deltackpt:empty:bfloat16:0,3", "numpy": np.asarray(0.1)}
    assert stock_digests(tmp_path / "plain", 4) == {stock_orbax.digest(expected)}
    for path in (tmp_path / "plain").rglob("commit_success.txt"):
        assert b"tmp" not in path.read_bytes()


def test_stock_orbax_restores_an_export_into_shardings(tmp_path):
    state = saved_every_kind(tmp_path / "run")
    interchange.export_orbax(tmp_path / "run", 4, tmp_path / "plain")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
    table = jax.ShapeDtypeStruct((50, 4), jnp.float32, sharding=by_rows)
    wanted = {**state, "empty": "", "emb": {"a": table}}
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    with ocp.CheckpointManager(tmp_path / "plain") as manager:
        args = ocp.args.PyTreeRestore(wanted, restore_args=restore_args)
        by_v0 = manager.restore(4, args=args)
    for found in (by_v0, v1.load(tmp_path / "plain" / "4", wanted)):
        assert found["emb"]["a"].sharding == by_rows
        assert isinstance(found["bf16"], jax.Array)
        same_bits({**found, "empty": state["empty"]}, state)


@pytest.mark.processes
@pytest.mark.parametrize("with_template", [True, False], ids=["template", "no-template"])
def test_an_export_is_imported_and_exported_again_unchanged(tmp_path, with_template):
    state = saved_every_kind(tmp_path / "run")
    interchange.export_orbax(tmp_path / "run", 4, tmp_path / "one")
    template = abstract(state) if with_template else None
    done = importing(tmp_path / "one", tmp_path / "again", EVERY_KIND, abstract_state=template)
    assert (done.step, done.source) == (4, tmp_path / "one" / "4" / "default")
    found = restored(tmp_path / "again", state, EVERY_KIND).state
    same_bits(found, state)
    assert isinstance(found["numpy"], np.float64)
    interchange.export_orbax(tmp_path / "again", 4, tmp_path / "two")
    (one,), (two,) = (stock_digests(tmp_path / name, 4) for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("name", ["v1", "shards-v1", "encodings-v1"])
def test_deltas_codecs_and_shards_are_exported_as_they_restore(tmp_path, name):
    # A copy, because the repository's files are writable.
    shutil.copytree(GOLDEN / name, tmp_path / "run")
    for step in (10, 30):
        interchange.export_orbax(tmp_path / "run", step, tmp_path / str(step))
        with manager_of(tmp_path / "run", deltackpt.Tables(select="**"), access="read") as manager:
            expected = manager.restore(step).state
        with ocp.CheckpointManager(tmp_path / str(step)) as manager:
            same_bits(manager.restore(step), expected)


@pytest.mark.processes
def test_a_compacted_step_is_exported(tmp_path):
    from deltackpt.maintenance.compact import compact

    shutil.copytree(GOLDEN / "v1", tmp_path / "run")
    interchange.export_orbax(tmp_path / "run", 30, tmp_path / "before")
    compact(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "10")
    shutil.rmtree(tmp_path / "run" / "20")
    interchange.export_orbax(tmp_path / "run", 30, tmp_path / "after")
    assert stock_digests(tmp_path / "before", 30) == stock_digests(tmp_path / "after", 30)


def test_an_export_never_touches_existing_files_and_leaves_nothing_partial(tmp_path):
    saved_every_kind(tmp_path / "run")

    def export(step: int = 4, target: str = "plain") -> None:
        interchange.export_orbax(tmp_path / "run", step, tmp_path / target)

    for name in ("back\\slash", "run[1]"):
        with pytest.raises(errors.UnsupportedRoot, match="use another path"):
            export(target=name)
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(errors.TargetExists, match="taken"):
        export(target="taken")
    assert (tmp_path / "taken").read_text() == "mine"
    with pytest.raises(errors.StepNotFound):
        export(5)
    for error, kind in (
        (ValueError("RESOURCE_EXHAUSTED: No space left on device"), errors.OutOfSpace),
        (ValueError("Input/output error"), errors.StorageError),
        (OSError(28, "No space left on device"), errors.OutOfSpace),
        (OSError(5, "Input/output error"), errors.StorageError),
    ):
        with mock.patch.object(ocp.Checkpointer, "save", side_effect=error):
            with pytest.raises(kind, match="nothing was left behind"):
                export()
    array = next((tmp_path / "run" / "4" / "embeddings").rglob("c.0*"))
    array = array if array.is_file() else next(p for p in array.rglob("*") if p.is_file())
    array.write_bytes(array.read_bytes()[:-1] + b"?")
    with pytest.raises(errors.Damaged):
        export()
    assert sorted(os.listdir(tmp_path)) == ["run", "taken"]


def test_keys_that_orbax_would_join_into_one_name_are_refused(tmp_path):
    state = {"emb": jnp.ones((4, 2)), "a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}
    with manager_of(tmp_path / "run", deltackpt.Tables(select="emb")) as manager:
        manager.save(1, state)
    with pytest.raises(errors.OptionError, match="a.b"):
        interchange.export_orbax(tmp_path / "run", None, tmp_path / "plain")


def test_a_table_of_a_dtype_that_orbax_lacks_is_named(tmp_path):
    state = {"emb": np.ones((4, 2), ml_dtypes.uint4), "w": np.ones(2)}
    with manager_of(tmp_path / "run", deltackpt.Tables(select="emb")) as manager:
        manager.save(1, state)
    with pytest.raises(errors.OptionError, match="(?s)emb has dtype uint4.*choose other leaves"):
        interchange.export_orbax(tmp_path / "run", None, tmp_path / "plain")
    interchange.export_orbax(tmp_path / "run", None, tmp_path / "plain", leaves="w")


def test_an_import_beside_a_trainer_that_has_not_saved_yet_is_refused(tmp_path):
    state = train_state()
    ocp.StandardCheckpointer().save(tmp_path / "stock" / "7", {"params": state.params})
    with manager_of(tmp_path / "run") as manager:
        with pytest.raises(errors.InUse, match="the lease held by process"):
            importing(tmp_path / "stock" / "7", tmp_path / "run")
        model.commit(manager, 1, {"params": state.params})
        assert manager.all_steps() == [1]
