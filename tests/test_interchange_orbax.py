# SPDX-License-Identifier: Apache-2.0
"""Stock Orbax checkpoints: imported as the first base of a run, and exported from any step."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import stock_orbax
from flax.training.train_state import TrainState
from orbax.checkpoint import v1

import deltackpt
from deltackpt import interchange, touched
from deltackpt.errors import (
    Damaged,
    ForeignDirectory,
    InUse,
    OptionError,
    OutOfSpace,
    StepGone,
    StepNotFound,
    StorageError,
    TargetExists,
    TemplateMismatch,
)

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
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        state,
    )


@pytest.mark.parametrize("with_template", [True, False], ids=["template", "no-template"])
@pytest.mark.parametrize("write", WRITERS)
def test_a_stock_checkpoint_continues_with_a_delta(tmp_path, write, with_template):
    state = trained(train_state(), ids_of(0))
    source = write(tmp_path / "stock", state)
    template = abstract(state) if with_template else None
    done = interchange.import_orbax(
        source, tmp_path / "run", tables=TABLES, abstract_state=template
    )
    assert done.step == 7 and list(done.tables) == ["params/emb/a", "params/emb/b"]
    [(slot,)] = set(done.tables.values())
    with deltackpt.CheckpointManager(tmp_path / "run", handlers={"embeddings": TABLES}) as manager:
        found = manager.restore_latest(train_state(seed=9))
        same_bits(found.state, state)
        ids = ids_of(8)
        moved = trained(found.state, ids)
        marks = touched.mark(found.touched, {"params/emb/a": ids, "params/emb/b": ids})
        assert manager.save(8, moved, touched=marks).kind == "delta"
    with deltackpt.CheckpointManager(tmp_path / "run", handlers={"embeddings": TABLES}) as manager:
        found = manager.restore_latest(train_state(seed=9))
        assert found.chain == (7, 8)
        same_bits(found.state, moved)
    assert "sum_of_squares" in slot


# Migration of a run.


@pytest.mark.processes
def test_training_killed_in_a_save_after_an_import_equals_an_uninterrupted_run(tmp_path):
    state = trained(train_state(), ids_of(0))
    source = v1_checkpointer(tmp_path / "stock", state)
    interchange.import_orbax(source, tmp_path / "run", tables=TABLES)
    killed = trainer(tmp_path / "run", last=12, kill_at=11)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = trainer(tmp_path / "run", last=14)
    assert ended.returncode == 0, ended.stderr
    # The save of 10 was committed; that of 11 was interrupted.
    assert json.loads(ended.stdout)[:2] == [[11, "delta"], [12, "delta"]]
    for step in range(8, 15):
        state = trained(state, ids_of(step))
    with reader(tmp_path / "run") as manager:
        found = manager.restore_latest(train_state(seed=9))
    assert found.step == 14 and found.chain == tuple(range(7, 15))
    same_bits(found.state, state)


def trainer(run: Path, *, last: int, kill_at: int | None = None):
    arguments = [str(run), str(last), str(kill_at)]
    return subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=240
    )


def train(run: Path, last: int, kill_at: int | None) -> None:
    """The program of ``trainer``: resumes from the newest step, and dies within a save."""
    from deltackpt.layers.write import LayerFile

    saves = []
    with deltackpt.CheckpointManager(run, handlers={"embeddings": TABLES}) as manager:
        found = manager.restore_latest(train_state(seed=9))
        assert found is not None
        state, marks = found.state, found.touched
        for step in range(found.step + 1, last + 1):
            ids = ids_of(step)
            state = trained(state, ids)
            marks = touched.mark(marks, {"params/emb/a": ids, "params/emb/b": ids})
            if step == kill_at:
                LayerFile.begin_layer = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            saves.append((step, manager.save(step, state, touched=marks).kind))
            manager.wait_until_finished()
    print(json.dumps(saves))


def reader(run: Path, choice: deltackpt.Tables = TABLES) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        run, handlers={"embeddings": choice}, options=deltackpt.ManagerOptions(access="read")
    )


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
    with reader(tmp_path / "run") as manager:
        assert manager.all_steps() == []
    interchange.import_orbax(source, tmp_path / "run", tables=TABLES)
    with reader(tmp_path / "run") as manager:
        same_bits(manager.restore_latest(state).state, state)


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
    done = interchange.import_orbax(
        source, run, tables=TABLES, abstract_state=abstract(fresh.replace(step=0))
    )
    assert done.tables["params/emb/a"] == ("opt_state/inner/0/mu", "opt_state/inner/0/nu")
    with deltackpt.CheckpointManager(run, handlers={"embeddings": TABLES}) as manager:
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
    choice = deltackpt.Tables(
        select="tables/*", slots={"tables/*": {"accumulator": "slots/{name}"}}
    )
    done = interchange.import_orbax(source, tmp_path / "run", tables=choice)
    assert set(done.tables.values()) == {("accumulator",)}
    with reader(tmp_path / "run", choice) as manager:
        model.assert_same(manager.restore_latest(state).state, state)


def test_an_nnx_state_is_imported_with_its_template(tmp_path):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, seed: int):
            self.emb = nnx.Embed(20, 4, rngs=nnx.Rngs(seed))
            self.head = nnx.Linear(4, 1, rngs=nnx.Rngs(seed))

    state, other = nnx.state(Model(0)), nnx.state(Model(1))
    choice = deltackpt.Tables(select="emb/embedding")
    source = v0_manager(tmp_path / "stock", state)
    interchange.import_orbax(source, tmp_path / "run", tables=choice, abstract_state=other)
    with reader(tmp_path / "run", choice) as manager:
        same_bits(manager.restore_latest(other).state, state)


# Refusals.


def importing(source: Path, run: Path, **options):
    return interchange.import_orbax(source, run, tables=TABLES, **options)


def test_an_import_refuses_a_directory_with_steps_and_takes_no_lease(tmp_path):
    source = v0_manager(tmp_path / "stock", train_state())
    importing(source, tmp_path / "run")
    before = sorted(os.listdir(tmp_path / "run"))
    with pytest.raises(TargetExists, match="found \\[7\\]"):
        importing(source, tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run")) == before
    with pytest.raises(TargetExists):
        importing(source, source)


def test_invalid_sources_and_templates_are_named(tmp_path):
    state = train_state()
    source = v0_manager(tmp_path / "stock", state)
    with pytest.raises(StepNotFound, match="check the path"):
        importing(tmp_path / "nothing", tmp_path / "run")
    with pytest.raises(StepNotFound, match=r"found \[3, 7\]"):
        importing(source, tmp_path / "run", step=5)
    (tmp_path / "foreign").mkdir()
    with pytest.raises(ForeignDirectory, match="_METADATA"):
        importing(tmp_path / "foreign", tmp_path / "run")
    v1.save_checkpointables(tmp_path / "two" / "3", {"params": {"a": 1}, "more": {"b": 2}})
    with pytest.raises(OptionError, match="'more', 'params'"):
        importing(tmp_path / "two", tmp_path / "run")
    with pytest.raises(StepNotFound, match="the item 'third'"):
        importing(tmp_path / "two", tmp_path / "run", item="third")
    v1.save(tmp_path / "unnumbered", state)
    with pytest.raises(OptionError, match="step=..."):
        importing(tmp_path / "unnumbered", tmp_path / "run")
    template = state.replace(params={**state.params, "w": jnp.ones(5)})
    with pytest.raises(TemplateMismatch, match="w.*float32\\[5\\].*float32\\[4\\]"):
        importing(source, tmp_path / "run", abstract_state=template)
    template = state.replace(params={**state.params, "further": jnp.ones(5)})
    with pytest.raises(TemplateMismatch, match="lacks\n  params/further\n"):
        importing(source, tmp_path / "run", abstract_state=template)
    template = state.replace(params={"emb": state.params["emb"]})
    with pytest.raises(TemplateMismatch, match="also has\n  params/w\n"):
        importing(source, tmp_path / "run", abstract_state=template)
    importing(source, tmp_path / "run")
    with pytest.raises(ForeignDirectory, match="written by deltackpt"):
        importing(tmp_path / "run", tmp_path / "again")
    assert not (tmp_path / "again").exists()


# Orbax reads all arrays concurrently, and reports only the first error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_source_that_lacks_data_is_damaged_and_nothing_is_imported(tmp_path):
    source = v0_manager(tmp_path / "stock", train_state()) / "7" / "default"
    data = max(source.glob("**/d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(Damaged, match="7/default"):
        importing(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_source_removed_during_a_read_is_gone(tmp_path):
    source = v0_manager(tmp_path / "stock", train_state())
    restore = ocp.PyTreeCheckpointHandler.restore

    def removed(self, directory, **arguments):
        shutil.rmtree(directory)
        return restore(self, directory, **arguments)

    with (
        mock.patch.object(ocp.PyTreeCheckpointHandler, "restore", removed),
        pytest.raises(StepGone),
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


EVERY_KIND = {"embeddings": deltackpt.Tables(select="emb/a")}


def saved_every_kind(run: Path) -> dict:
    state = every_kind()
    with deltackpt.CheckpointManager(run, handlers=EVERY_KIND) as manager:
        manager.save(4, state)
    return state


def stock_digests(root: Path, step: int) -> set[str]:
    """Digests of what each stock Orbax API restores; fails if deltackpt is imported."""
    found = subprocess.run(
        [sys.executable, stock_orbax.__file__, str(root), str(step)],
        capture_output=True,
        text=True,
        timeout=240,
    )
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
    assert b"tmp" not in b"".join(
        path.read_bytes() for path in (tmp_path / "plain").rglob("commit_success.txt")
    )


def test_stock_orbax_restores_an_export_into_shardings(tmp_path):
    state = saved_every_kind(tmp_path / "run")
    interchange.export_orbax(tmp_path / "run", 4, tmp_path / "plain")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
    table = jax.ShapeDtypeStruct((50, 4), jnp.float32, sharding=by_rows)
    wanted = {**state, "empty": "", "emb": {"a": table}}
    with ocp.CheckpointManager(tmp_path / "plain") as manager:
        by_v0 = manager.restore(
            4,
            args=ocp.args.PyTreeRestore(
                wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted)
            ),
        )
    for found in (by_v0, v1.load(tmp_path / "plain" / "4", wanted)):
        assert found["emb"]["a"].sharding == by_rows
        assert isinstance(found["bf16"], jax.Array)
        same_bits({**found, "empty": state["empty"]}, state)


@pytest.mark.processes
@pytest.mark.parametrize("with_template", [True, False], ids=["template", "no-template"])
def test_an_export_is_imported_and_exported_again_unchanged(tmp_path, with_template):
    state = saved_every_kind(tmp_path / "run")
    interchange.export_orbax(tmp_path / "run", 4, tmp_path / "one")
    choice = EVERY_KIND["embeddings"]
    template = abstract(state) if with_template else None
    done = interchange.import_orbax(
        tmp_path / "one", tmp_path / "again", tables=choice, abstract_state=template
    )
    assert (done.step, done.source) == (4, tmp_path / "one" / "4" / "default")
    with reader(tmp_path / "again", choice) as manager:
        found = manager.restore_latest(state).state
    same_bits(found, state)
    assert isinstance(found["numpy"], np.float64)
    interchange.export_orbax(tmp_path / "again", 4, tmp_path / "two")
    (one,), (two,) = (stock_digests(tmp_path / name, 4) for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("name", ["v1", "parts-v1", "encodings-v1"])
def test_deltas_codecs_and_parts_are_exported_as_they_restore(tmp_path, name):
    # A copy, because the repository's files are writable.
    shutil.copytree(GOLDEN / name, tmp_path / "run")
    for step in (10, 30):
        interchange.export_orbax(tmp_path / "run", step, tmp_path / str(step))
        with reader(tmp_path / "run", deltackpt.Tables(select="**")) as manager:
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
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(TargetExists, match="taken"):
        interchange.export_orbax(tmp_path / "run", 4, tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"
    with pytest.raises(StepNotFound):
        interchange.export_orbax(tmp_path / "run", 5, tmp_path / "plain")
    for error, kind in (
        (ValueError("RESOURCE_EXHAUSTED: No space left on device"), OutOfSpace),
        (ValueError("Input/output error"), StorageError),
        (OSError(28, "No space left on device"), OutOfSpace),
        (OSError(5, "Input/output error"), StorageError),
    ):
        with mock.patch.object(ocp.Checkpointer, "save", side_effect=error):
            with pytest.raises(kind, match="nothing was left behind"):
                interchange.export_orbax(tmp_path / "run", 4, tmp_path / "plain")
    array = next((tmp_path / "run" / "4" / "embeddings").rglob("c/0*"))
    array = array if array.is_file() else next(p for p in array.rglob("*") if p.is_file())
    array.write_bytes(array.read_bytes()[:-1] + b"?")
    with pytest.raises(Damaged):
        interchange.export_orbax(tmp_path / "run", 4, tmp_path / "plain")
    assert sorted(os.listdir(tmp_path)) == ["run", "taken"]


def test_keys_that_orbax_would_join_into_one_name_are_refused(tmp_path):
    state = {"emb": jnp.ones((4, 2)), "a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}
    handlers = {"embeddings": deltackpt.Tables(select="emb")}
    with deltackpt.CheckpointManager(tmp_path / "run", handlers=handlers) as manager:
        manager.save(1, state)
    with pytest.raises(OptionError, match="a.b"):
        interchange.export_orbax(tmp_path / "run", None, tmp_path / "plain")


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), None if sys.argv[3] == "None" else int(sys.argv[3]))


def test_an_import_beside_a_trainer_that_has_not_saved_yet_is_refused(tmp_path):
    state = train_state()
    ocp.StandardCheckpointer().save(tmp_path / "stock" / "7", {"params": state.params})
    handlers = {"embeddings": TABLES}
    with deltackpt.CheckpointManager(tmp_path / "run", handlers=handlers) as manager:
        with pytest.raises(InUse, match="the lease held by process"):
            interchange.import_orbax(tmp_path / "stock" / "7", tmp_path / "run", tables=TABLES)
        model.commit(manager, 1, {"params": state.params})
        assert manager.all_steps() == [1]
