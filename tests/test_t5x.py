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
    StepNotFound,
    StorageError,
    TemplateMismatch,
    UnsupportedRoot,
)
from deltackpt.integrations import t5x as deltackpt_t5x
from deltackpt.integrations.t5x.settings import BestByMetric
from deltackpt.storage import batch
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


def newest(model_dir):
    """The checkpoint that T5X's own code resumes from."""
    config = utils.RestoreCheckpointConfig(path=str(model_dir), mode="latest")
    _, paths = utils.get_first_valid_restore_config_and_paths([config])
    return paths[0]


@contextlib.contextmanager
def held_back():
    """Blocks commits until the context ends."""
    proceed, reached, original = threading.Event(), threading.Event(), batch.FileBatch.force

    def held(*args, **kwargs):
        reached.set()
        assert proceed.wait(60)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch.FileBatch, "force", held)
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch.FileBatch, "force", refuse)
        assert manager.save(state)
        assert failed.wait(60)


def saves_of(model_dir):
    return {save.step: save for save in inspect.open(model_dir / "deltackpt").saves}


@pytest.fixture(scope="module")
def initializer():
    return make_initializer()


@pytest.fixture
def run(tmp_path, initializer):
    """A model directory with steps 1 to 3 of a finished training job."""
    states = {1: random_state(initializer, 1)}
    states[2] = after(states[1], [3, 5], 2)
    states[3] = after(states[2], [5, 60], 3)
    manager = open_manager(tmp_path, initializer)
    for state in states.values():
        assert manager.save(state)
    manager.close()
    return tmp_path, states


# Contents of a save.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resume_restores_every_bit_and_every_sharding(tmp_path, optimizer):
    initializer = make_initializer(optimizer)
    first = random_state(initializer, 1)
    second = after(first, [7], 2)
    manager = open_manager(tmp_path, initializer)
    manager.save(first)
    manager.save(second)
    manager.close()
    resumed = open_manager(tmp_path, initializer)
    assert_same(resumed.restore(path=newest(tmp_path)), second)
    resumed.close()


def test_saves_after_the_first_are_deltas_of_the_rows_that_changed(run):
    model_dir, _ = run
    saves = saves_of(model_dir)
    assert [save.kind for save in saves.values()] == ["base", "delta", "delta"]
    assert saves[2].rows == 2 and saves[3].rows == 2
    found = inspect.open(model_dir / "deltackpt").touched(3)
    assert {name: rows.tolist() for name, rows in found.items()} == {TABLE: [5, 60]}


def test_a_resumed_run_continues_with_a_delta(run, initializer):
    model_dir, states = run
    manager = open_manager(model_dir, initializer)
    restored = manager.restore(path=newest(model_dir))
    manager.save(after(restored, [11], 4))
    manager.close()
    assert saves_of(model_dir)[4].kind == "delta" and saves_of(model_dir)[4].rows == 1
    assert_same(open_reader(model_dir, initializer).restore(step=4), after(states[3], [11], 4))


def test_parameters_are_stored_in_the_dtype_of_the_save_configuration(tmp_path, initializer):
    state = random_state(initializer, 1)
    manager = open_manager(tmp_path, initializer, save_dtype="bfloat16", restore_dtype="bfloat16")
    manager.save(state)
    restored = flat(manager.restore(path=newest(tmp_path)))
    manager.close()
    wide = flat(open_reader(tmp_path, initializer, restore_dtype="float32").restore(step=1))
    for name, leaf in flat(state).items():
        if name.startswith("target/"):
            assert restored[name].dtype == jnp.bfloat16 and wide[name].dtype == jnp.float32
            leaf = leaf.astype(jnp.bfloat16)
            assert (wide[name] == leaf.astype(jnp.float32)).all()
        assert (restored[name] == leaf).all(), name


def test_a_save_configuration_without_a_dtype_opens_a_trainer(run, initializer):
    model_dir, states = run
    manager = open_manager(model_dir, initializer, save_dtype=None)
    restored = manager.restore(path=str(model_dir / "checkpoint_2"))
    with pytest.warns(UserWarning, match="rolled-back"):
        assert manager.save(after(restored, [9], 3))
    manager.close()
    assert_same(open_reader(model_dir, initializer).restore(step=3), after(states[2], [9], 3))


def test_save_transformations_see_and_change_what_is_saved(tmp_path, initializer):
    def without_logits(state, infos):
        assert infos["target"]["token_embedder"]["embedding"].name == TABLE
        del state["target"]["decoder"]["logits_dense"]
        return state, infos

    manager = open_manager(tmp_path, initializer)
    manager.save(random_state(initializer, 1), [without_logits])
    manager.close()
    assert not any(
        "target/decoder/logits" in name for name in inspect.open(tmp_path / "deltackpt").at(1).dense
    )


def test_a_step_that_is_saved_or_restored_is_not_saved_again(run, initializer):
    model_dir, states = run
    manager = open_manager(model_dir, initializer)
    manager.restore(path=newest(model_dir))
    assert not manager.save(states[3])
    assert manager.save(at_step(states[3], 4)) and not manager.save(at_step(states[3], 4))
    manager.close()


def test_a_lossy_codec_is_used_if_requested(tmp_path, initializer):
    state = random_state(initializer, 1)
    settings = {"codec": "bf16"}
    manager = open_manager(tmp_path, initializer, settings=settings)
    manager.save(state)
    manager.save(after(state, [3], 2))
    manager.close()
    row = flat(open_reader(tmp_path, initializer).restore(step=2))[TABLE][3]
    exact = flat(after(state, [3], 2))[TABLE][3]
    assert (np.asarray(row) == np.asarray(exact.astype(jnp.bfloat16), np.float32)).all()


# Names that T5X finds.


def test_t5x_lists_every_committed_step(run, initializer):
    model_dir, _ = run
    assert checkpoints.all_steps(str(model_dir)) == [1, 2, 3]
    assert list(open_reader(model_dir, initializer).all_steps()) == [1, 2, 3]


def test_a_name_exists_before_its_step_is_committed(run, initializer, monkeypatch):
    model_dir, states = run
    manager = open_manager(model_dir, initializer)
    manager.restore(path=newest(model_dir))
    seen = []
    original = deltackpt.CheckpointManager.save

    def save(self, step, *args, **kwargs):
        seen.append(checkpoints.all_steps(str(model_dir)))
        return original(self, step, *args, **kwargs)

    monkeypatch.setattr(deltackpt.CheckpointManager, "save", save)
    manager.save(after(states[3], [1], 4))
    manager.close()
    assert seen == [[1, 2, 3, 4]]


def test_the_first_step_has_no_name_until_it_is_committed(tmp_path, initializer, monkeypatch):
    manager = open_manager(tmp_path, initializer)

    def refuse(*args, **kwargs):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(batch.FileBatch, "force", refuse)
        with pytest.raises(SaveFailed):
            manager.save(random_state(initializer, 1))
    assert checkpoints.all_steps(str(tmp_path)) == []
    manager.close()


def test_an_interrupted_save_leaves_a_name_and_the_run_resumes_from_the_previous_step(
    run, initializer
):
    model_dir, states = run
    (model_dir / "checkpoint_4").symlink_to("deltackpt/4")
    (model_dir / "deltackpt" / "4.orbax-checkpoint-tmp" / "dense").mkdir(parents=True)
    assert newest(model_dir).endswith("checkpoint_4")
    manager = open_manager(model_dir, initializer)
    with pytest.warns(UserWarning, match="resuming from step 3"):
        assert_same(manager.restore(path=str(model_dir / "checkpoint_4")), states[3])
    assert manager.save(after(states[3], [1], 4))
    manager.close()
    assert saves_of(model_dir)[4].kind == "delta"


def test_a_damaged_newest_step_is_skipped_with_a_warning(run, initializer):
    model_dir, states = run
    stored_chunks(model_dir / "deltackpt" / "3", "*", segment="dense.*")[0].flip()
    manager = open_manager(model_dir, initializer)
    with pytest.warns(UserWarning, match="3"):
        assert_same(manager.restore(path=newest(model_dir)), states[2])
    manager.close()


def test_a_save_after_restoring_an_older_step_moves_the_later_ones_aside(run, initializer):
    model_dir, states = run
    manager = open_manager(model_dir, initializer)
    restored = manager.restore(path=str(model_dir / "checkpoint_1"))
    assert_same(restored, states[1])
    with pytest.warns(UserWarning, match="rolled-back"):
        manager.save(after(restored, [9], 2))
    manager.close()
    assert checkpoints.all_steps(str(model_dir)) == [1, 2]
    assert_same(open_reader(model_dir, initializer).restore(step=2), after(states[1], [9], 2))


def test_names_lost_in_a_power_cut_are_recreated_before_anything_is_overwritten(run, initializer):
    model_dir, states = run
    for step in states:
        (model_dir / f"checkpoint_{step}").unlink()
    with pytest.raises(OptionError, match="start the job again"):
        open_manager(model_dir, initializer)
    manager = open_manager(model_dir, initializer)
    assert_same(manager.restore(path=newest(model_dir)), states[3])
    manager.close()


def test_an_older_step_restores_its_state_after_further_saves(run, initializer):
    model_dir, states = run
    manager = open_manager(model_dir, initializer)
    manager.save(after(manager.restore(path=newest(model_dir)), [1], 4))
    manager.save(after(states[3], [1, 2], 5))
    assert_same(manager.restore(path=str(model_dir / "checkpoint_3")), states[3])
    manager.close()


def test_removing_the_newest_name_rolls_back_to_the_previous_step_as_in_t5x(run, initializer):
    model_dir, states = run
    (model_dir / "checkpoint_3").unlink()
    manager = open_manager(model_dir, initializer)
    # If killed here, the next start rolls back as well.
    assert newest(model_dir).endswith("checkpoint_2")
    with pytest.warns(UserWarning, match=r"rolling back to step 2.*\[3\]"):
        restored = manager.restore(path=newest(model_dir))
    assert_same(restored, states[2])
    with pytest.warns(UserWarning, match="rolled-back"):
        assert manager.save(after(restored, [9], 4))
    manager.close()
    assert checkpoints.all_steps(str(model_dir)) == [1, 2, 4]
    assert_same(open_reader(model_dir, initializer).restore(step=4), after(states[2], [9], 4))


def test_a_rollback_holds_if_the_first_save_after_it_was_interrupted(run, initializer):
    model_dir, states = run
    (model_dir / "checkpoint_3").unlink()
    (model_dir / "checkpoint_4").symlink_to("deltackpt/4")
    manager = open_manager(model_dir, initializer)
    with pytest.warns(UserWarning, match="rolling back to step 2"):
        assert_same(manager.restore(path=str(model_dir / "checkpoint_4")), states[2])
    manager.close()
    # And if nothing was saved after it.
    assert checkpoints.all_steps(str(model_dir)) == [1, 2]


def test_a_fenced_trainer_changes_no_names(run, initializer):
    model_dir, states = run
    old = open_manager(model_dir, initializer)
    old.restore(path=newest(model_dir))
    new = open_manager(model_dir, initializer)
    new.restore(path=newest(model_dir))
    with pytest.raises(FencedError):
        old.save(after(states[3], [1], 7))
    assert newest(model_dir).endswith("checkpoint_3")
    with held_back():
        new.save(after(states[3], [1], 4))
        old.close()
        assert checkpoints.all_steps(str(model_dir)) == [1, 2, 3, 4]
    new.close()
    assert newest(model_dir).endswith("checkpoint_4")


def test_a_trainer_that_cannot_start_closes_its_manager(run, initializer, monkeypatch):
    model_dir, _ = run
    (model_dir / "checkpoint_2").unlink()

    def refuse(*args, **kwargs):
        raise OSError(5, "Input/output error")

    closed = []
    original = deltackpt.CheckpointManager.close
    monkeypatch.setattr(
        deltackpt.CheckpointManager, "close", lambda self: closed.append(1) or original(self)
    )
    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(StorageError, match="checkpoint_2"):
        open_manager(model_dir, initializer)
    assert closed


def test_names_of_removed_steps_are_removed_with_them(tmp_path, initializer):
    state = random_state(initializer, 1)
    settings = {
        "options": deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(policy=deltackpt.policies.Consecutive(max_chain=1))
        )
    }
    manager = open_manager(tmp_path, initializer, settings=settings, keep=1)
    for step in range(1, 8):
        manager.save(after(state, [step], step))
        manager._writer.wait_until_finished()
    manager.close()
    assert checkpoints.all_steps(str(tmp_path)) == inspect.open(tmp_path / "deltackpt").steps
    assert 1 not in checkpoints.all_steps(str(tmp_path))


# Waits.


def test_the_wait_after_a_save_is_deferred_unless_an_exception_is_handled(
    run, initializer, monkeypatch
):
    model_dir, states = run
    waits = []
    original = deltackpt.CheckpointManager.wait_until_finished
    monkeypatch.setattr(
        deltackpt.CheckpointManager,
        "wait_until_finished",
        lambda self: waits.append(1) or original(self),
    )
    manager = open_manager(model_dir, initializer)
    manager.restore(path=newest(model_dir))
    model.commit(manager, after(states[3], [1], 4))
    assert not waits
    try:
        raise RuntimeError("preempted")
    except RuntimeError:
        model.commit(manager, after(states[3], [1], 5))
        assert waits and (model_dir / "checkpoint_5").is_dir()
    manager.close()


def test_each_wait_blocks_if_requested(run, initializer):
    model_dir, states = run
    manager = open_manager(model_dir, initializer, settings={"wait": "each"})
    manager.restore(path=newest(model_dir))
    model.commit(manager, after(states[3], [1], 4))
    assert (model_dir / "deltackpt" / "4").is_dir()
    manager.close()


def test_an_emergency_save_is_committed_even_if_the_previous_save_failed(run, initializer):
    model_dir, states = run
    manager = open_manager(model_dir, initializer)
    manager.restore(path=newest(model_dir))
    save_that_fails(manager, after(states[3], [20], 4))
    fifth = after(after(states[3], [20], 4), [21], 5)
    with pytest.raises(RuntimeError, match="preempted"):
        try:
            raise RuntimeError("preempted")
        except RuntimeError:
            with pytest.warns(UserWarning, match="step 4 failed"):
                assert manager.save(fifth)
            assert (model_dir / "checkpoint_5").is_dir()
            manager.wait_until_finished()
            raise
    assert checkpoints.all_steps(str(model_dir)) == [1, 2, 3, 5] and not manager.save(fifth)
    manager.close()
    assert_same(open_reader(model_dir, initializer).restore(step=5), fifth)


def test_a_save_that_raises_an_earlier_failure_is_committed_and_named(run, initializer):
    model_dir, states = run
    manager = open_manager(model_dir, initializer)
    manager.restore(path=newest(model_dir))
    save_that_fails(manager, after(states[3], [20], 4))
    with pytest.raises(SaveFailed, match="step 4 failed"):
        manager.save(after(states[3], [20], 5))
    assert checkpoints.all_steps(str(model_dir)) == [1, 2, 3, 5]
    assert not manager.save(after(states[3], [20], 5))
    manager.close()
    assert saves_of(model_dir).keys() == {1, 2, 3, 5}


def test_a_step_whose_save_failed_is_saved_again(run, initializer):
    model_dir, states = run
    manager = open_manager(model_dir, initializer)
    manager.restore(path=newest(model_dir))
    fourth = after(states[3], [20], 4)
    save_that_fails(manager, fourth)
    with pytest.warns(UserWarning, match="saved anew"):
        assert manager.save(fourth)
    assert not manager.save(fourth)
    # And if a wait raised the failure.
    fifth = after(fourth, [21], 5)
    save_that_fails(manager, fifth)
    try:
        raise RuntimeError("preempted")
    except RuntimeError:
        with pytest.raises(SaveFailed):
            manager.wait_until_finished()
    assert manager.save(fifth)
    manager.close()
    assert_same(open_reader(model_dir, initializer).restore(step=4), fourth)
    assert_same(open_reader(model_dir, initializer).restore(step=5), fifth)


# Restores.


def test_an_evaluation_job_reads_alongside_the_trainer_and_takes_no_lease(run):
    model_dir, states = run
    trainer_initializer = make_initializer()
    trainer = open_manager(model_dir, trainer_initializer)
    trainer.restore(path=newest(model_dir))
    # Without an optimizer, as in T5X's evaluation and inference.
    initializer = make_initializer(training=False)
    reader = open_reader(model_dir, initializer)
    found = flat(reader.restore(path=newest(model_dir)))
    assert found.keys() == flat(initializer.global_train_state_shape).keys()
    for name, leaf in found.items():
        assert (leaf == flat(states[3])[name]).all()
    reader.close()
    assert trainer.save(after(states[3], [1], 4))
    trainer.close()


def test_an_evaluation_job_reads_the_step_before_one_that_is_being_written(run, initializer):
    model_dir, states = run
    (model_dir / "checkpoint_4").symlink_to("deltackpt/4")
    with pytest.warns(UserWarning, match="reading step 3"):
        found = open_reader(model_dir, initializer).restore(path=newest(model_dir))
    assert_same(found, states[3])
    (model_dir / "checkpoint_2").unlink()
    shutil.rmtree(model_dir / "deltackpt" / "2")
    with pytest.raises(StepNotFound):
        open_reader(model_dir, initializer).restore(step=2)


def test_training_starts_from_a_checkpoint_of_another_model_directory(
    run, tmp_path_factory, initializer
):
    model_dir, states = run
    own = tmp_path_factory.mktemp("own")
    config = utils.RestoreCheckpointConfig(
        path=str(model_dir),
        assignment_map=[(r"target/decoder/logits_dense/.*", None), (r"state.*", None)],
        fallback_to_scratch=True,
    )
    manager = open_manager(own, initializer)
    fallback = random_state(initializer, 0, seed=1)
    found = manager.restore(
        path=str(model_dir / "checkpoint_3"),
        state_transformation_fns=config.state_transformation_fns,
        fallback_state=fallback.state_dict(),
    )
    for name, leaf in flat(found).items():
        source = fallback if "logits_dense" in name or name.startswith("state") else states[3]
        assert np.asarray(leaf).tobytes() == np.asarray(flat(source)[name]).tobytes(), name
    assert manager.save(found) and list(manager.all_steps()) == [0]
    manager.close()
    assert saves_of(own)[0].kind == "base" and len(saves_of(model_dir)) == 3


def test_a_leaf_of_the_checkpoint_may_be_renamed(run, initializer):
    model_dir, states = run
    names = "target/encoder/encoder_norm/scale", "target/decoder/decoder_norm/scale"
    swapped = [names, names[::-1]]
    config = utils.RestoreCheckpointConfig(path=str(model_dir), assignment_map=swapped)
    found = open_reader(model_dir, initializer).restore(
        step=3, state_transformation_fns=config.state_transformation_fns
    )
    for name, other in swapped:
        assert (flat(found)[name] == flat(states[3])[other]).all()
    assert (flat(found)[TABLE] == flat(states[3])[TABLE]).all()


def test_a_run_resumes_through_transformations_too(run, initializer):
    model_dir, states = run

    def renamed(tree, target, *, is_resuming=False):
        scale = tree["target"]["encoder"]["encoder_norm"]["scale"]
        tree["target"]["decoder"]["decoder_norm"]["scale"] = scale
        return tree

    manager = open_manager(model_dir, initializer)
    found = manager.restore(path=newest(model_dir), state_transformation_fns=[renamed])
    wanted = flat(states[3])["target/encoder/encoder_norm/scale"]
    assert (flat(found)["target/decoder/decoder_norm/scale"] == wanted).all()
    manager.save(at_step(found, 4))
    manager.close()
    assert_same(open_reader(model_dir, initializer).restore(step=4), at_step(found, 4))


def test_a_leaf_that_the_checkpoint_lacks_or_has_in_another_shape_is_named(run, initializer):
    model_dir, _ = run

    def lacking(tree, target):
        del tree["target"]["decoder"]["logits_dense"]
        return tree

    def transposed(tree, target):
        tree["target"]["decoder"]["logits_dense"]["kernel"] = tree["target"]["token_embedder"][
            "embedding"
        ]
        return tree

    reader = open_reader(model_dir, initializer)
    for change in (lacking, transposed):
        with pytest.raises(TemplateMismatch, match="logits_dense/kernel"):
            reader.restore(step=3, state_transformation_fns=[change])


@pytest.fixture
def run_with_data(tmp_path, initializer):
    """A model directory with steps 1 to 4; step n follows n elements of the data."""
    data = numbers()
    manager = open_manager(tmp_path, initializer, dataset_iterator=data)
    state = random_state(initializer, 0)
    for step in range(1, 5):
        next(data)
        manager.save(at_step(state, step))
    next(data)
    manager.close()
    return tmp_path


@pytest.mark.parametrize("open_job", [open_manager, open_reader])
def test_the_data_position_is_of_the_same_step(run_with_data, initializer, open_job):
    resumed = numbers()
    manager = open_job(run_with_data, initializer, dataset_iterator=resumed)
    manager.restore(path=newest(run_with_data))
    assert next(resumed)["number"] == 4
    manager.close()


def test_an_altered_data_position_is_reported_and_not_used(run_with_data, initializer):
    steps = run_with_data / "deltackpt"
    for path in (steps / "1" / "dataset").iterdir():
        shutil.copy(path, steps / "4" / "dataset" / path.name)
    data = numbers()
    reader = open_reader(run_with_data, initializer, dataset_iterator=data)
    with pytest.raises(Damaged, match="4/dataset/"):
        reader.restore(step=4)
    assert next(data)["number"] == 0


def test_the_data_position_is_unchanged_if_the_step_cannot_be_read(run_with_data, initializer):
    stored_chunks(run_with_data / "deltackpt" / "4", "*", segment="dense.*")[0].flip()
    data = numbers()
    reader = open_reader(run_with_data, initializer, dataset_iterator=data)
    with pytest.raises(Damaged):
        reader.restore(step=4)
    assert next(data)["number"] == 0


def test_a_step_without_a_data_position_is_reported(run, initializer):
    model_dir, _ = run
    reader = open_reader(model_dir, initializer, dataset_iterator=numbers())
    with pytest.raises(TemplateMismatch, match="save_dataset"):
        reader.restore(step=3)
    manager = open_manager(model_dir, initializer, dataset_iterator=numbers())
    with pytest.raises(TemplateMismatch, match="save_dataset"):
        manager.restore(path=newest(model_dir))
    manager.close()


def test_tables_that_differ_from_those_of_the_run_are_refused_with_a_remedy(run, initializer):
    model_dir, _ = run
    manager = open_manager(
        model_dir, initializer, settings={"tables": "target/decoder/logits_dense/kernel"}
    )
    with pytest.raises(TemplateMismatch, match="tables.* as in the run that saved"):
        manager.restore(path=newest(model_dir))
    manager.close()


# T5X's own checkpoints.


def test_a_run_continues_from_a_t5x_checkpoint_which_is_kept(tmp_path, initializer):
    state = random_state(initializer, 5)
    stock = checkpoints.OrbaxCheckpointManagerInterface(
        str(tmp_path), initializer.global_train_state_shape, initializer._partitioner
    )
    model.commit(stock, state)
    stock.close()
    kept = sorted(path for path in (tmp_path / "checkpoint_5").rglob("*"))
    # If given a dtype for the parameters, T5X applies it to the step, too.
    manager = open_manager(tmp_path, initializer, restore_dtype=None)
    restored = manager.restore(path=newest(tmp_path))
    assert_same(restored, state)
    assert list(manager.all_steps()) == [5] and not manager.save(restored)
    manager.save(after(restored, [3], 6))
    manager.save(after(restored, [3, 4], 7))
    # With names of both kinds, one of them a dangling link.
    (tmp_path / "checkpoint_9").symlink_to("deltackpt/9")
    reader = open_reader(tmp_path, initializer, restore_dtype=None)
    assert_same(reader.restore(path=str(tmp_path / "checkpoint_5")), state)
    manager._writer.wait_until_finished()
    with pytest.raises(OptionError, match=r"found \[6, 7\]; resume from checkpoint_7, or move"):
        manager.restore(path=str(tmp_path / "checkpoint_5"))
    manager.close()
    # The next start removes the dangling link.
    open_manager(tmp_path, initializer).close()
    assert saves_of(tmp_path)[6].kind == "base" and saves_of(tmp_path)[7].kind == "delta"
    assert checkpoints.all_steps(str(tmp_path)) == [5, 6, 7]
    assert sorted(path for path in (tmp_path / "checkpoint_5").rglob("*")) == kept


# Retention.


def test_a_nan_metric_does_not_make_a_step_the_best(tmp_path):
    for step, value in enumerate([0.1, float("nan"), 0.3]):
        write_metric(tmp_path, step, value)
    policy = BestByMetric(
        model_dir=tmp_path,
        metric="inference_eval/accuracy",
        mode="min",
        keep=1,
        keep_without=False,
    )
    infos = [types.SimpleNamespace(step=step) for step in range(4)]
    assert policy.should_preserve(infos, context=None) == [True, False, False, True]


def test_the_best_steps_are_kept_with_their_chains_and_the_newest(tmp_path, initializer):
    state = random_state(initializer, 1)
    settings = {
        "options": deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(policy=deltackpt.policies.Consecutive(max_chain=1))
        )
    }
    manager = open_manager(
        tmp_path,
        initializer,
        settings=settings,
        keep=1,
        metric_name_to_monitor="inference_eval/accuracy",
    )
    for step in range(1, 10):
        manager.save(after(state, [step], step))
        manager._writer.wait_until_finished()
        write_metric(tmp_path, step, 1.0 if step == 3 else 0.1)
    manager.close()
    steps = checkpoints.all_steps(str(tmp_path))
    assert {3, 9} <= set(steps) and not {1, 2, 5, 6} & set(steps)


def test_steps_of_the_keep_period_are_kept_besides_the_newest(tmp_path, initializer):
    state = random_state(initializer, 1)
    settings = {
        "options": deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(policy=deltackpt.policies.Consecutive(max_chain=1))
        )
    }
    manager = open_manager(tmp_path, initializer, settings=settings, keep=1, force_keep_period=4)
    for step in range(1, 11):
        manager.save(after(state, [step], step))
        manager._writer.wait_until_finished()
    manager.close()
    steps = checkpoints.all_steps(str(tmp_path))
    assert {4, 8, 10} <= set(steps) and not {1, 2, 5, 6} & set(steps)


def test_only_one_retention_setting_is_allowed(tmp_path, initializer):
    settings = {"options": deltackpt.ManagerOptions(max_to_keep=2)}
    with pytest.raises(OptionError, match="max_to_keep"):
        open_manager(tmp_path, initializer, settings=settings, keep=3)


# T5X's configuration.


def test_the_same_settings_give_the_same_object_and_t5x_resumes_with_it():
    made = deltackpt_t5x.checkpoint_manager(codec="int8")
    assert deltackpt_t5x.checkpoint_manager(codec="int8") is made
    assert utils.RestoreCheckpointConfig(path="x").checkpoint_manager_cls is made
    other = deltackpt_t5x.checkpoint_manager(codec="raw")
    assert other is not made
    assert utils.RestoreCheckpointConfig(path="x").checkpoint_manager_cls is other
    assert deltackpt_t5x.checkpoint_manager(codec="int8") is made
    assert utils.RestoreCheckpointConfig(path="x").checkpoint_manager_cls is made
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

    with_mode("all")
    made = deltackpt_t5x.checkpoint_manager()
    below = config(path="x")
    assert (below.mode, below.checkpoint_manager_cls) == ("all", made)
    with_mode("specific")
    made = deltackpt_t5x.checkpoint_manager(codec="int8")
    above = config(path="x")
    assert (above.mode, above.checkpoint_manager_cls) == ("specific", made)


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
    record = json.loads(RECORD.read_text())
    assert signatures() == record["signatures"]


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
