# SPDX-License-Identifier: Apache-2.0
"""The drop-in for T5X, on T5X itself if it is installed, else on a stand-in: ``t5x_setup``."""

from __future__ import annotations

import contextlib
import functools
import inspect as inspect_module
import json
import os
import shutil
import threading
import types

import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest
from flax import traverse_util
from t5x_setup import (
    OPTIMIZERS,
    RECORD,
    bare,
    checkpoints,
    make_initializer,
    numbers,
    signatures,
    utils,
    write_metric,
)

import deltackpt
from deltackpt import inspect
from deltackpt.errors import (
    Damaged,
    FencedError,
    OptionError,
    SaveFailed,
    StepGone,
    StepNotFound,
    StorageError,
    TemplateMismatch,
    UnsupportedRoot,
)
from deltackpt.integrations import t5x as deltackpt_t5x
from deltackpt.integrations.t5x.settings import BestByMetric
from deltackpt.storage import batch, digests
from deltackpt.testing import stored_chunks

TABLE = "target/token_embedder/embedding"

#: T5X and its dependencies emit many deprecation warnings; ours are UserWarnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def flat(state):
    leaves = traverse_util.flatten_dict(state.state_dict(), sep="/")
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def with_leaves(state, leaves):
    whole = traverse_util.flatten_dict(state.state_dict(), keep_empty_nodes=True, sep="/")
    return state.restore_state(traverse_util.unflatten_dict({**whole, **leaves}, sep="/"))


def random_state(initializer, step, seed=0):
    """A train state of random values, sharded by the partitioner."""
    random = np.random.default_rng(seed)
    partitioner = initializer._partitioner
    axes = flat(partitioner.get_mesh_axes(initializer.global_train_state_shape))
    leaves = {}
    for name, leaf in flat(initializer.global_train_state_shape).items():
        sharding = jax.sharding.NamedSharding(
            partitioner.mesh, axes.get(name, jax.sharding.PartitionSpec())
        )
        values = random.standard_normal(leaf.shape).astype(leaf.dtype)
        leaves[name] = jax.device_put(np.asarray(values), sharding)
    state = with_leaves(initializer.global_train_state_shape, leaves)
    return at_step(state, step)


def at_step(state, step):
    old = flat(state)["state/step"]
    replicated = jax.sharding.NamedSharding(old.sharding.mesh, jax.sharding.PartitionSpec())
    return with_leaves(
        state, {"state/step": jax.device_put(np.asarray(step, old.dtype), replicated)}
    )


def after(state, rows, step):
    """A later state: these rows of the table and every dense leaf have changed."""
    leaves = {
        name: leaf + 1
        for name, leaf in flat(state).items()
        if jnp.issubdtype(leaf.dtype, jnp.floating) and "embedding" not in name
    }
    table = flat(state)[TABLE]
    leaves[TABLE] = jax.device_put(table.at[jnp.asarray(rows)].add(1.0), table.sharding)
    return at_step(with_leaves(state, leaves), step)


def assert_same(restored, expected):
    found, wanted = flat(restored), flat(expected)
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert found[name].dtype == leaf.dtype, name
        assert np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes(), name
        assert found[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name


def open_manager(model_dir, initializer, *, settings=None, **arguments):
    """Opens a manager as T5X does for a training job."""
    arguments = {"save_dtype": "float32", "restore_dtype": "float32", "period": 1} | arguments
    return deltackpt_t5x.checkpoint_manager(**(settings or {}))(
        directory=str(model_dir),
        train_state=initializer.global_train_state_shape,
        partitioner=initializer._partitioner,
        **arguments,
    )


def open_reader(model_dir, initializer, **arguments):
    """Opens a manager as T5X does for an evaluation job, which has no save configuration."""
    arguments = {"save_dtype": None, "restore_dtype": None, "period": None} | arguments
    return open_manager(model_dir, initializer, **arguments)


class ModelDir:
    """A model directory, the jobs that T5X starts on it, and the states that they saved."""

    def __init__(self, path, initializer):
        self.path, self.initializer, self.states = path, initializer, {}

    def trainer(self, **arguments):
        """A context of a training job that has not restored a step."""
        return contextlib.closing(open_manager(self.path, self.initializer, **arguments))

    @contextlib.contextmanager
    def resumed(self, **arguments):
        """A training job that has restored the newest step."""
        with self.trainer(**arguments) as manager:
            manager.restore(path=self.newest())
            yield manager

    def reader(self, **arguments):
        return open_reader(self.path, self.initializer, **arguments)

    def assert_stored(self, step, expected):
        assert_same(self.reader().restore(step=step), expected)

    def random_state(self, step=1, **options):
        return random_state(self.initializer, step, **options)

    def name(self, step):
        """The name of a step, which T5X finds."""
        return self.path / f"checkpoint_{step}"

    def link(self, step):
        """Creates the name of a step that does not exist."""
        self.name(step).symlink_to(f"deltackpt/{step}")

    def step(self, step):
        return self.path / "deltackpt" / str(step)

    def named_steps(self):
        return checkpoints.all_steps(str(self.path))

    def newest(self):
        """The checkpoint that T5X's own code resumes from."""
        config = utils.RestoreCheckpointConfig(path=str(self.path), mode="latest")
        return utils.get_first_valid_restore_config_and_paths([config])[1][0]

    def saves(self):
        return {save.step: save for save in inspect.open(self.path / "deltackpt").saves}


def while_preempted(call, *args):
    """Calls a function while an exception is handled, as T5X does when a job is preempted."""
    try:
        raise RuntimeError("preempted")
    except RuntimeError:
        return call(*args)


@contextlib.contextmanager
def commits(function):
    """Replaces the function that forces a save's files to disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch.FileBatch, "force", function)
        yield


@contextlib.contextmanager
def held_back():
    """Blocks commits until the context ends."""
    proceed, reached, original = threading.Event(), threading.Event(), batch.FileBatch.force

    def held(*args, **kwargs):
        reached.set()
        assert proceed.wait(60)
        return original(*args, **kwargs)

    with commits(held):
        try:
            yield
            # Nothing would be blocked if saves no longer called this.
            assert reached.wait(60)
        finally:
            proceed.set()


def save_that_fails(manager, state):
    """Starts a save that has failed in the background when this returns."""
    failed = threading.Event()

    def refuse(*args, **kwargs):
        failed.set()
        raise OSError(28, "No space left on device")

    with commits(refuse):
        assert manager.save(state)
        assert failed.wait(60)


def io_error(*args, **kwargs):
    raise OSError(5, "Input/output error")


def record_calls(monkeypatch, method):
    """Returns a list that grows by one at each call of a method of the manager."""
    calls, original = [], getattr(deltackpt.CheckpointManager, method)
    monkeypatch.setattr(
        deltackpt.CheckpointManager, method, lambda self: calls.append(1) or original(self)
    )
    return calls


@pytest.fixture(scope="module")
def initializer():
    return make_initializer()


@pytest.fixture
def job(tmp_path, initializer):
    """An empty model directory."""
    return ModelDir(tmp_path, initializer)


@pytest.fixture
def run(job):
    """A model directory with steps 1 to 3 of a finished training job."""
    job.states[1] = job.random_state()
    job.states[2] = after(job.states[1], [3, 5], 2)
    job.states[3] = after(job.states[2], [5, 60], 3)
    with job.trainer() as manager:
        for state in job.states.values():
            assert manager.save(state)
    return job


# Contents of a save.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resume_restores_every_bit_and_every_sharding(tmp_path, optimizer):
    job = ModelDir(tmp_path, make_initializer(optimizer))
    first = job.random_state()
    second = after(first, [7], 2)
    with job.trainer() as manager:
        manager.save(first)
        manager.save(second)
    with job.trainer() as resumed:
        assert_same(resumed.restore(path=job.newest()), second)


def test_saves_after_the_first_are_deltas_of_the_rows_that_changed(run):
    saves = run.saves()
    assert [save.kind for save in saves.values()] == ["base", "delta", "delta"]
    assert saves[2].rows == 2 and saves[3].rows == 2
    found = inspect.open(run.path / "deltackpt").touched(3)
    assert {name: rows.tolist() for name, rows in found.items()} == {TABLE: [5, 60]}


def test_a_resumed_run_continues_with_a_delta(run):
    with run.trainer() as manager:
        manager.save(after(manager.restore(path=run.newest()), [11], 4))
    assert run.saves()[4].kind == "delta" and run.saves()[4].rows == 1
    run.assert_stored(4, after(run.states[3], [11], 4))


def test_parameters_are_stored_in_the_dtype_of_the_save_configuration(job):
    state = job.random_state()
    with job.trainer(save_dtype="bfloat16", restore_dtype="bfloat16") as manager:
        manager.save(state)
        restored = flat(manager.restore(path=job.newest()))
    wide = flat(job.reader(restore_dtype="float32").restore(step=1))
    for name, leaf in flat(state).items():
        if name.startswith("target/"):
            assert restored[name].dtype == jnp.bfloat16 and wide[name].dtype == jnp.float32
            leaf = leaf.astype(jnp.bfloat16)
            assert (wide[name] == leaf.astype(jnp.float32)).all()
        assert (restored[name] == leaf).all(), name


def test_save_transformations_see_and_change_what_is_saved(job):
    def without_logits(state, infos):
        assert infos["target"]["token_embedder"]["embedding"].name == TABLE
        del state["target"]["decoder"]["logits_dense"]
        return state, infos

    with job.trainer() as manager:
        manager.save(job.random_state(), [without_logits])
    assert not any(
        "target/decoder/logits" in name for name in inspect.open(job.path / "deltackpt").at(1).dense
    )


def test_a_step_that_is_saved_or_restored_is_not_saved_again(run):
    fourth = at_step(run.states[3], 4)
    with run.resumed() as manager:
        assert not manager.save(run.states[3])
        assert manager.save(fourth) and not manager.save(fourth)


def test_a_lossy_codec_is_used_if_requested(job):
    state = job.random_state()
    with job.trainer(settings={"codec": "bf16"}) as manager:
        manager.save(state)
        manager.save(after(state, [3], 2))
    row = flat(job.reader().restore(step=2))[TABLE][3]
    exact = flat(after(state, [3], 2))[TABLE][3]
    assert (np.asarray(row) == np.asarray(exact.astype(jnp.bfloat16), np.float32)).all()


# Names that T5X finds.


def test_a_name_exists_before_its_step_is_committed(run, monkeypatch):
    seen, original = [], deltackpt.CheckpointManager.save

    def save(self, step, *args, **kwargs):
        seen.append(run.named_steps())
        return original(self, step, *args, **kwargs)

    with run.resumed() as manager:
        monkeypatch.setattr(deltackpt.CheckpointManager, "save", save)
        manager.save(after(run.states[3], [1], 4))
    assert seen == [[1, 2, 3, 4]]


def test_the_first_step_has_no_name_until_it_is_committed(job):
    with job.trainer() as manager:
        with commits(io_error), pytest.raises(SaveFailed):
            manager.save(job.random_state())
        assert job.named_steps() == []


def test_an_interrupted_save_leaves_a_name_and_the_run_resumes_from_the_previous_step(run):
    run.link(4)
    (run.path / "deltackpt" / "4.orbax-checkpoint-tmp" / "dense").mkdir(parents=True)
    assert run.newest().endswith("checkpoint_4")
    with run.trainer() as manager:
        with pytest.warns(UserWarning, match="resuming from step 3"):
            assert_same(manager.restore(path=str(run.name(4))), run.states[3])
        assert manager.save(after(run.states[3], [1], 4))
    assert run.saves()[4].kind == "delta"


@pytest.mark.parametrize(
    ("older", "arguments"),
    [(1, {}), pytest.param(2, {"save_dtype": None}, id="without a dtype for saves")],
)
def test_a_save_after_restoring_an_older_step_moves_the_later_ones_aside(run, older, arguments):
    with run.trainer(**arguments) as manager:
        restored = manager.restore(path=str(run.name(older)))
        assert_same(restored, run.states[older])
        with pytest.warns(UserWarning, match="rolled-back"):
            assert manager.save(after(restored, [9], older + 1))
    assert run.named_steps() == [*range(1, older + 2)]
    run.assert_stored(older + 1, after(run.states[older], [9], older + 1))


def test_names_lost_in_a_power_cut_are_recreated_before_anything_is_overwritten(run):
    for step in run.states:
        run.name(step).unlink()
    with pytest.raises(OptionError, match="start the job again"):
        run.trainer()
    with run.trainer() as manager:
        assert_same(manager.restore(path=run.newest()), run.states[3])


def test_an_older_step_restores_its_state_after_further_saves(run):
    with run.resumed() as manager:
        manager.save(after(run.states[3], [1], 4))
        manager.save(after(run.states[3], [1, 2], 5))
        assert_same(manager.restore(path=str(run.name(3))), run.states[3])


def test_removing_the_newest_name_rolls_back_to_the_previous_step_as_in_t5x(run):
    run.name(3).unlink()
    with run.trainer() as manager:
        # If killed here, the next start rolls back as well.
        assert run.newest().endswith("checkpoint_2")
        with pytest.warns(UserWarning, match=r"rolling back to step 2.*\[3\]"):
            restored = manager.restore(path=run.newest())
        assert_same(restored, run.states[2])
        with pytest.warns(UserWarning, match="rolled-back"):
            assert manager.save(after(restored, [9], 4))
    assert run.named_steps() == [1, 2, 4]
    run.assert_stored(4, after(run.states[2], [9], 4))


def test_a_rollback_holds_if_the_first_save_after_it_was_interrupted(run):
    run.name(3).unlink()
    run.link(4)
    with run.trainer() as manager, pytest.warns(UserWarning, match="rolling back to step 2"):
        assert_same(manager.restore(path=str(run.name(4))), run.states[2])
    # And if nothing was saved after it.
    assert run.named_steps() == [1, 2]


def test_a_fenced_trainer_changes_no_names(run):
    with run.resumed() as old, run.resumed() as new:
        with pytest.raises(FencedError):
            old.save(after(run.states[3], [1], 7))
        assert run.newest().endswith("checkpoint_3")
        with held_back():
            new.save(after(run.states[3], [1], 4))
            old.close()
            assert run.named_steps() == [1, 2, 3, 4]
        new.close()
        assert run.newest().endswith("checkpoint_4")


def test_a_trainer_that_cannot_start_closes_its_manager(run, monkeypatch):
    run.name(2).unlink()
    closed = record_calls(monkeypatch, "close")
    monkeypatch.setattr(os, "symlink", io_error)
    with pytest.raises(StorageError, match="checkpoint_2"):
        run.trainer()
    assert closed


# Waits.


def test_the_wait_after_a_save_is_deferred_unless_an_exception_is_handled(run, monkeypatch):
    waits = record_calls(monkeypatch, "wait_until_finished")
    with run.resumed() as manager:
        model.commit(manager, after(run.states[3], [1], 4))
        assert not waits
        while_preempted(model.commit, manager, after(run.states[3], [1], 5))
        assert waits and run.name(5).is_dir()


def test_each_wait_blocks_if_requested(run):
    with run.resumed(settings={"wait": "each"}) as manager:
        model.commit(manager, after(run.states[3], [1], 4))
        assert run.step(4).is_dir()


def test_an_emergency_save_is_committed_even_if_the_previous_save_failed(run):
    with run.resumed() as manager:
        fourth = after(run.states[3], [20], 4)
        fifth = after(fourth, [21], 5)
        save_that_fails(manager, fourth)
        with pytest.warns(UserWarning, match="step 4 failed"):
            assert while_preempted(manager.save, fifth)
        assert run.name(5).is_dir()
        while_preempted(manager.wait_until_finished)
        assert run.named_steps() == [1, 2, 3, 5] and not manager.save(fifth)
    run.assert_stored(5, fifth)


def test_a_save_that_raises_an_earlier_failure_is_committed_and_named(run):
    with run.resumed() as manager:
        save_that_fails(manager, after(run.states[3], [20], 4))
        with pytest.raises(SaveFailed, match="step 4 failed"):
            manager.save(after(run.states[3], [20], 5))
        assert run.named_steps() == [1, 2, 3, 5]
        assert not manager.save(after(run.states[3], [20], 5))
    assert run.saves().keys() == {1, 2, 3, 5}


def test_a_step_whose_save_failed_is_saved_again(run):
    fourth = after(run.states[3], [20], 4)
    fifth = after(fourth, [21], 5)
    with run.resumed() as manager:
        save_that_fails(manager, fourth)
        with pytest.warns(UserWarning, match="saved again"):
            assert manager.save(fourth)
        assert not manager.save(fourth)
        # And if a wait raised the failure.
        save_that_fails(manager, fifth)
        with pytest.raises(SaveFailed):
            while_preempted(manager.wait_until_finished)
        assert manager.save(fifth)
    run.assert_stored(4, fourth)
    run.assert_stored(5, fifth)


# Restores.


def test_an_evaluation_job_reads_alongside_the_trainer_and_takes_no_lease(run):
    with run.resumed() as trainer:
        # Without an optimizer, as in T5X's evaluation and inference.
        evaluation = ModelDir(run.path, make_initializer(training=False))
        reader = evaluation.reader()
        found = flat(reader.restore(path=run.newest()))
        assert found.keys() == flat(evaluation.initializer.global_train_state_shape).keys()
        for name, leaf in found.items():
            assert (leaf == flat(run.states[3])[name]).all()
        reader.close()
        assert trainer.save(after(run.states[3], [1], 4))


def test_an_evaluation_job_reads_the_step_before_one_that_is_being_written(run):
    run.link(4)
    with pytest.warns(UserWarning, match="reading step 3"):
        assert_same(run.reader().restore(path=run.newest()), run.states[3])
    run.name(2).unlink()
    shutil.rmtree(run.step(2))
    with pytest.raises(StepNotFound):
        run.reader().restore(step=2)


def test_training_starts_from_a_checkpoint_of_another_model_directory(run, tmp_path_factory):
    own = ModelDir(tmp_path_factory.mktemp("own"), run.initializer)
    config = utils.RestoreCheckpointConfig(
        path=str(run.path),
        assignment_map=[(r"target/decoder/logits_dense/.*", None), (r"state.*", None)],
        fallback_to_scratch=True,
    )
    fallback = own.random_state(0, seed=1)
    with own.trainer() as manager:
        found = manager.restore(
            path=str(run.name(3)),
            state_transformation_fns=config.state_transformation_fns,
            fallback_state=fallback.state_dict(),
        )
        for name, leaf in flat(found).items():
            own_leaf = "logits_dense" in name or name.startswith("state")
            source = fallback if own_leaf else run.states[3]
            assert np.asarray(leaf).tobytes() == np.asarray(flat(source)[name]).tobytes(), name
        assert manager.save(found) and list(manager.all_steps()) == [0]
    assert own.saves()[0].kind == "base" and len(run.saves()) == 3


def test_a_leaf_of_the_checkpoint_may_be_renamed(run):
    names = "target/encoder/encoder_norm/scale", "target/decoder/decoder_norm/scale"
    swapped = [names, names[::-1]]
    config = utils.RestoreCheckpointConfig(path=str(run.path), assignment_map=swapped)
    found = run.reader().restore(step=3, state_transformation_fns=config.state_transformation_fns)
    for name, other in swapped:
        assert (flat(found)[name] == flat(run.states[3])[other]).all()
    assert (flat(found)[TABLE] == flat(run.states[3])[TABLE]).all()


def test_a_run_resumes_through_transformations_too(run):
    def renamed(tree, target, *, is_resuming=False):
        scale = tree["target"]["encoder"]["encoder_norm"]["scale"]
        tree["target"]["decoder"]["decoder_norm"]["scale"] = scale
        return tree

    with run.trainer() as manager:
        found = manager.restore(path=run.newest(), state_transformation_fns=[renamed])
        wanted = flat(run.states[3])["target/encoder/encoder_norm/scale"]
        assert (flat(found)["target/decoder/decoder_norm/scale"] == wanted).all()
        manager.save(at_step(found, 4))
    run.assert_stored(4, at_step(found, 4))


def test_a_leaf_that_the_checkpoint_lacks_or_has_in_another_shape_is_named(run):
    def lacking(tree, target):
        del tree["target"]["decoder"]["logits_dense"]
        return tree

    def transposed(tree, target):
        tree["target"]["decoder"]["logits_dense"]["kernel"] = tree["target"]["token_embedder"][
            "embedding"
        ]
        return tree

    reader = run.reader()
    for change in (lacking, transposed):
        with pytest.raises(TemplateMismatch, match="logits_dense/kernel"):
            reader.restore(step=3, state_transformation_fns=[change])


@pytest.fixture
def run_with_data(job):
    """A model directory with steps 1 to 4; step n follows n elements of the data."""
    data = numbers()
    with job.trainer(dataset_iterator=data) as manager:
        state = job.random_state(0)
        for step in range(1, 5):
            next(data)
            manager.save(at_step(state, step))
        next(data)
    return job


@pytest.mark.parametrize("open_job", [open_manager, open_reader])
def test_the_data_position_is_of_the_same_step(run_with_data, open_job):
    data = numbers()
    manager = open_job(run_with_data.path, run_with_data.initializer, dataset_iterator=data)
    manager.restore(path=run_with_data.newest())
    assert next(data)["number"] == 4
    manager.close()


def test_the_data_position_is_unchanged_if_it_or_the_step_is_damaged(run_with_data):
    def restore_fails(match=None):
        data = numbers()
        with pytest.raises(Damaged, match=match):
            run_with_data.reader(dataset_iterator=data).restore(step=4)
        assert next(data)["number"] == 0

    [chunk, *_] = stored_chunks(run_with_data.step(4), "*", segment="dense.*")
    chunk.flip()
    restore_fails()
    chunk.flip()
    for path in (run_with_data.step(1) / "dataset").iterdir():
        shutil.copy(path, run_with_data.step(4) / "dataset" / path.name)
    restore_fails("4/dataset/")


@pytest.mark.parametrize("after", ["_check_position", "check_step_files"])
def test_a_step_removed_before_its_data_position_is_read_is_gone(run_with_data, monkeypatch, after):
    data = numbers()
    reader = run_with_data.reader(dataset_iterator=data)
    of = type(reader) if after == "_check_position" else digests
    real = getattr(of, after)

    def then_remove(*arguments, **options):
        found = real(*arguments, **options)
        shutil.rmtree(run_with_data.step(4))
        return found

    monkeypatch.setattr(of, after, then_remove)
    with pytest.raises(StepGone):
        reader.restore(step=4)
    assert next(data)["number"] == 0


@pytest.mark.parametrize("open_job", [open_manager, open_reader])
def test_a_step_removed_while_its_data_position_is_listed_is_gone(
    run_with_data, monkeypatch, open_job
):
    data, step, real = numbers(), run_with_data.step(3), os.scandir

    def scandir(path="."):
        if path == step / "dataset":
            monkeypatch.undo()
            shutil.rmtree(step)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    manager = open_job(run_with_data.path, run_with_data.initializer, dataset_iterator=data)
    with contextlib.closing(manager), pytest.raises(StepGone):
        manager.restore(step=3)
    assert not step.exists() and next(data)["number"] == 0


def test_a_step_without_a_data_position_is_reported(run):
    with pytest.raises(TemplateMismatch, match="save_dataset"):
        run.reader(dataset_iterator=numbers()).restore(step=3)
    with run.trainer(dataset_iterator=numbers()) as manager:
        with pytest.raises(TemplateMismatch, match="save_dataset"):
            manager.restore(path=run.newest())


def test_tables_that_differ_from_those_of_the_run_are_refused_with_a_remedy(run):
    with run.trainer(settings={"tables": "target/decoder/logits_dense/kernel"}) as manager:
        with pytest.raises(TemplateMismatch, match="tables.* as in the run that saved"):
            manager.restore(path=run.newest())


# T5X's own checkpoints.


def test_a_run_continues_from_a_t5x_checkpoint_which_is_kept(job):
    state = job.random_state(5)
    shape, partitioner = job.initializer.global_train_state_shape, job.initializer._partitioner
    stock = checkpoints.OrbaxCheckpointManagerInterface(str(job.path), shape, partitioner)
    model.commit(stock, state)
    stock.close()
    kept = sorted(job.name(5).rglob("*"))
    # If given a dtype for the parameters, T5X applies it to the step, too.
    with job.trainer(restore_dtype=None) as manager:
        restored = manager.restore(path=job.newest())
        assert_same(restored, state)
        assert list(manager.all_steps()) == [5] and not manager.save(restored)
        manager.save(after(restored, [3], 6))
        manager.save(after(restored, [3, 4], 7))
        # With names of both kinds, one of them a dangling link.
        job.link(9)
        assert_same(job.reader().restore(path=str(job.name(5))), state)
        manager._writer.wait_until_finished()
        with pytest.raises(OptionError, match=r"found \[6, 7\]; resume from checkpoint_7, or move"):
            manager.restore(path=str(job.name(5)))
    # The next start removes the dangling link.
    with job.trainer():
        pass
    assert job.saves()[6].kind == "base" and job.saves()[7].kind == "delta"
    assert job.named_steps() == [5, 6, 7]
    assert sorted(job.name(5).rglob("*")) == kept


# Retention.


def test_a_nan_metric_does_not_make_a_step_the_best(tmp_path):
    for step, value in enumerate([0.1, float("nan"), 0.3]):
        write_metric(tmp_path, step, value)
    options = {"metric": "inference_eval/accuracy", "mode": "min", "keep": 1}
    policy = BestByMetric(model_dir=tmp_path, keep_without=False, **options)
    infos = [types.SimpleNamespace(step=step) for step in range(4)]
    assert policy.should_preserve(infos, context=None) == [True, False, False, True]


@pytest.mark.parametrize(
    ("last", "retention", "kept", "removed"),
    [
        (7, {}, {7}, {1}),
        (9, {"metric_name_to_monitor": "inference_eval/accuracy"}, {3, 9}, {1, 2, 5, 6}),
        (10, {"force_keep_period": 4}, {4, 8, 10}, {1, 2, 5, 6}),
    ],
    ids=["newest", "best", "keep period"],
)
def test_kept_steps_and_their_chains_have_names_and_other_steps_have_none(
    job, last, retention, kept, removed
):
    policy = deltackpt.policies.Consecutive(max_chain=1)
    options = deltackpt.ManagerOptions(deltas=deltackpt.DeltaOptions(policy=policy))
    state = job.random_state()
    with job.trainer(settings={"options": options}, keep=1, **retention) as manager:
        for step in range(1, last + 1):
            manager.save(after(state, [step], step))
            manager._writer.wait_until_finished()
            write_metric(job.path, step, 1.0 if step == 3 else 0.1)
    steps = job.named_steps()
    assert steps == inspect.open(job.path / "deltackpt").steps
    assert kept <= {*steps} and not removed & {*steps}


def test_only_one_retention_setting_is_allowed(job):
    with pytest.raises(OptionError, match="max_to_keep"):
        job.trainer(settings={"options": deltackpt.ManagerOptions(max_to_keep=2)}, keep=3)


# T5X's configuration.


def test_the_same_settings_give_the_same_object_and_t5x_resumes_with_it():
    found = []
    for codec in ("int8", "int8", "raw", "int8"):
        found.append(deltackpt_t5x.checkpoint_manager(codec=codec))
        assert utils.RestoreCheckpointConfig(path="x").checkpoint_manager_cls is found[-1]
    assert found[0] is found[1] is found[3] is not found[2]
    stock = checkpoints.OrbaxCheckpointManagerInterface
    own = utils.RestoreCheckpointConfig(path="x", checkpoint_manager_cls=stock)
    assert own.checkpoint_manager_cls is stock
    # T5X's own constructor is wrapped once, regardless of the number of calls.
    assert not hasattr(utils.RestoreCheckpointConfig.__init__.__wrapped__, "__wrapped__")


@pytest.mark.parametrize("copies_attributes", [True, False])
def test_other_decorators_of_the_configuration_are_kept(monkeypatch, copies_attributes):
    config = utils.RestoreCheckpointConfig

    def with_mode(mode):
        """Wraps the constructor with another default, as gin does."""
        original = config.__init__

        def init(self, *args, **kwargs):
            original(self, *args, **{"mode": mode} | kwargs)

        if copies_attributes:
            init = functools.wraps(original)(init)
        monkeypatch.setattr(config, "__init__", init)

    for mode, codec in (("all", None), ("specific", "int8")):
        with_mode(mode)
        made = deltackpt_t5x.checkpoint_manager(**({"codec": codec} if codec else {}))
        found = config(path="x")
        assert (found.mode, found.checkpoint_manager_cls) == (mode, made)


@pytest.mark.parametrize(
    "settings",
    [
        {"wait": "never"},
        {"options": deltackpt.ManagerOptions(access="read")},
        {"options": deltackpt.ManagerOptions(writes=deltackpt.WriteOptions(when_busy="skip"))},
        {"options": deltackpt.ManagerOptions(writes=deltackpt.WriteOptions(when_busy="coalesce"))},
    ],
)
def test_invalid_settings_are_refused_immediately(settings):
    with pytest.raises(OptionError):
        deltackpt_t5x.checkpoint_manager(**settings)


@pytest.mark.parametrize("url", ["gs://bucket/model", "s3://bucket/model", "nodes://a,b/model"])
def test_a_model_directory_at_a_url_is_refused_at_startup(initializer, url):
    for start in (open_manager, open_reader):
        with pytest.raises(UnsupportedRoot, match=url):
            start(url, initializer)


# T5X's API that the drop-in relies on.


def test_t5x_has_the_signatures_that_were_recorded():
    assert signatures() == json.loads(RECORD.read_text())["signatures"]


def test_the_manager_accepts_every_call_that_t5x_makes_to_its_own():
    recorded = json.loads(RECORD.read_text())["signatures"]
    stock = "checkpoints.OrbaxCheckpointManagerInterface"
    made = bare(inspect_module.signature(deltackpt_t5x.DeltaCheckpointManager))
    ours = [p for p in made.parameters.values() if p.name != "settings"]
    # T5X always gives the period.
    ours = str(made.replace(parameters=ours)).replace(" period=None", " period=1")
    assert ours == recorded[stock]
    names = ("all_steps", "latest_step", "should_save", "wait_until_finished", "close")
    for name in (*names, "save", "restore"):
        method = getattr(deltackpt_t5x.DeltaCheckpointManager, name)
        assert str(bare(inspect_module.signature(method))) == recorded[f"{stock}.{name}"]
