# SPDX-License-Identifier: Apache-2.0
"""A manager's catalog of committed steps: metrics, save decisions, retention, deletion."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import model
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flat_options import manager_options

import deltackpt
from deltackpt.errors import Damaged, OptionError, SaveFailed, StepNotFound
from deltackpt.format import naming
from deltackpt.testing import failing_saves

policies = ocp.checkpoint_managers
HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}
LOSSES = {0: 3.0, 1: 1.0, 2: 2.0, 3: math.nan}


def manager_of(root: Path, **options: Any) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root, handlers=HANDLERS, options=manager_options(**{"durability": "process", **options})
    )


def save_all(manager: deltackpt.CheckpointManager, steps: range = range(4), **more: Any) -> Any:
    state, touched = model.start()
    for step in steps:
        metrics = {"loss": LOSSES[step]} if step in LOSSES else None
        state, touched = model.train(state, touched, step)
        manager.save(step, state, touched=touched, metrics=metrics, **more)
    manager.wait_until_finished()
    return state


def test_the_best_step_is_known_after_a_restart(tmp_path):
    with manager_of(tmp_path) as manager:
        save_all(manager, range(5), custom_metadata={"commit": "abc", "epoch": np.int32(3)})
        assert manager.best_step("loss", mode="min") == 1
    with manager_of(tmp_path, access="read") as manager:
        assert manager.best_step("loss", mode="min") == 1
        assert manager.best_step(lambda found: -found["loss"]) == 1
        assert manager.best_step("loss") == 0
        assert manager.best_step("accuracy") is None
        assert manager.metrics(2) == {"loss": 2.0}
        assert manager.metrics(4) is None
        assert manager.custom_metadata(2) == {"commit": "abc", "epoch": 3}
        with pytest.raises(StepNotFound, match="step 9"):
            manager.metrics(9)
        with pytest.raises(OptionError, match="BestN"):
            manager.best_step()
        with pytest.raises(OptionError, match="'max' or 'min'"):
            manager.best_step("loss", mode="least")
        with pytest.raises(OptionError, match="metric of step [0-3], found 'low'"):
            manager.best_step(lambda found: "low")
        with pytest.raises(OptionError, match="metric of step [0-3], found 1000"):
            manager.best_step(lambda found: 10**400)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_preservation_policy_ranks_saves_from_before_a_restart(tmp_path, wrapped):
    policy = policies.BestN(get_metric_fn=lambda found: found["loss"], reverse=True, n=1)
    kept = policies.AnyPreservationPolicy([policy, policies.LatestN(1)]) if wrapped else policy
    bases = deltackpt.policies.Consecutive(max_chain=1)
    with manager_of(tmp_path, policy=bases) as manager:
        state = save_all(manager, range(3))
    with manager_of(tmp_path, policy=bases, preservation_policy=kept) as manager:
        restored = manager.restore_latest(state)
        manager.save(3, state, touched=restored.touched, metrics={"loss": 9.0})
        model.commit(manager, 4, state, touched=restored.touched, metrics={"loss": 8.0})
        assert manager.best_step() == 1
        # The best, its base, and the newest, which is the parent of the next save.
        assert set(manager.all_steps()) >= {0, 1, 4} and 2 not in manager.all_steps()


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("reverse", "losses", "kept"),
    [
        (True, (3.0, 1.0, math.nan, math.nan, 9.0), {1, 4}),
        (False, (math.nan, 3.0, -math.inf, math.nan, 1.0), {1, 4}),
        (False, (math.nan, -math.inf, math.nan, math.nan), {1, 3}),
        (True, (math.nan,) * 4, {3}),
    ],
)
def test_a_nan_ranks_below_every_metric_and_never_replaces_the_best(
    tmp_path, reverse, losses, kept, wrapped
):
    policy = policies.BestN(get_metric_fn=lambda found: found["loss"], reverse=reverse, n=1)
    if wrapped:
        policy = policies.AnyPreservationPolicy([policy, policies.CustomSteps([])])
    with manager_of(tmp_path, preservation_policy=policy) as manager:
        state = model.initial()
        for step, loss in enumerate(losses):
            model.commit(manager, step, state, metrics={"loss": loss}, force_base=True)
        # The newest stays regardless of its metric: training continues from it.
        assert {*manager.all_steps()} == kept


def test_stock_orbax_knows_the_metrics_and_the_best_step(tmp_path):
    with manager_of(tmp_path) as manager:
        save_all(manager, range(3), custom_metadata={"note": "x"})
    options = ocp.CheckpointManagerOptions(
        best_fn=lambda found: found["loss"], best_mode="min", read_only=True
    )
    with ocp.CheckpointManager(tmp_path, item_names=("dense",), options=options) as stock:
        assert stock.best_step() == 1
        assert stock.metrics(2) == {"loss": 2.0}
        assert stock.metadata(2).custom_metadata == {"note": "x"}


DONATED = jnp.float32(1)
DONATED.delete()


@pytest.mark.parametrize(
    "given",
    [{"loss": jnp.ones(2)}, {"x": object()}, 3, {"loss": DONATED}, {"x": jax.typeof(jnp.ones(()))}],
)
def test_invalid_metrics_are_rejected_before_anything_is_saved(tmp_path, given):
    with manager_of(tmp_path) as manager:
        state = model.initial()
        with pytest.raises(OptionError, match="metrics: expected"):
            manager.save(0, state, metrics=given)
        assert manager.all_steps() == []
        model.commit(manager, 0, state, metrics={"loss": jnp.float32(0.5), "nested": {"a": [1]}})
        assert manager.metrics(0) == {"loss": 0.5, "nested": {"a": [1]}}


def test_damaged_metadata_is_reported(tmp_path):
    with manager_of(tmp_path) as manager:
        save_all(manager, range(1))
        (tmp_path / "0" / naming.STEP_METADATA).write_text("{")
        with pytest.raises(Damaged, match="JSON"):
            manager.metrics(0)
        assert manager.best_step("loss") is None


def test_item_metadata_can_be_used_as_a_template(tmp_path):
    state = {name: leaf for name, leaf in model.initial().items() if name != "key"}
    with manager_of(tmp_path) as manager:
        model.commit(manager, 1, state)
        found = manager.item_metadata(1)
        arrays = [leaf for leaf in jax.tree.leaves(found) if hasattr(leaf, "shape")]
        shapes = [(leaf.shape, leaf.dtype) for leaf in arrays]
        assert shapes == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
        again = manager.restore(1, found)
        plain = manager.restore(1)
        for one, other in zip(
            jax.tree.leaves(again.state), jax.tree.leaves(plain.state), strict=True
        ):
            np.testing.assert_array_equal(one, other)
        with pytest.raises(StepNotFound):
            manager.item_metadata(7)


def test_a_policy_that_raises_removes_no_step_and_its_error_is_shown(tmp_path):
    class Broken:
        def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
            raise KeyError("nope")

    with manager_of(tmp_path, preservation_policy=Broken()) as manager:
        with pytest.warns(UserWarning, match=r"may remain: KeyError\('nope'\)"):
            save_all(manager, range(2))
            manager.wait_until_finished()
        assert manager.all_steps() == [0, 1]


def test_a_step_that_others_depend_on_is_not_deleted(tmp_path):
    with manager_of(tmp_path) as manager:
        state = save_all(manager, range(4))
        with pytest.raises(OptionError, match=r"steps \[2, 3\] are deltas on top"):
            manager.delete(1)
        manager.delete(3)
        assert manager.all_steps() == [0, 1, 2]
        with pytest.raises(StepNotFound, match="step 3"):
            manager.delete(3)
        # The number can be reused; a save whose parent was deleted is a base.
        saved = manager.save(3, state, touched=model.new_touched(state))
        manager.wait_until_finished()
        assert saved.kind == "base"
        np.testing.assert_array_equal(
            manager.restore(3, state).state["tables"]["users"], state["tables"]["users"]
        )
        manager.delete(2)
        manager.delete(1)
        manager.delete(0)
        assert manager.all_steps() == [3]
        assert manager.restore_latest(state).step == 3


@pytest.mark.parametrize("step", [3, 4])
def test_training_continues_from_a_restored_step_that_is_deleted(tmp_path, step):
    with manager_of(tmp_path) as manager:
        state = save_all(manager)
    with manager_of(tmp_path) as manager:
        found = manager.restore_latest(state)
        assert found is not None and found.step == 3
        manager.delete(3)
        assert (manager.resume_step, manager.latest_step()) == (3, 2)
        with pytest.raises(OptionError, match="a step above"):
            manager.save(2, found.state, touched=found.touched)
        assert manager.save(step, found.state, touched=found.touched).kind == "base"
        manager.wait_until_finished()
        assert manager.resume_step == step
        model.assert_same(manager.restore(step, state).state, state)


def test_a_restored_step_is_saved_again_after_its_deletion_although_later_steps_exist(tmp_path):
    with manager_of(tmp_path) as manager:
        state = save_all(manager, force_base=True)
        found = manager.restore(1, state)
        manager.delete(1)
        manager.delete(0)
        with failing_saves(tmp_path, errno.ENOSPC):
            with pytest.warns(UserWarning, match="were moved"):
                manager.save(1, found.state, touched=found.touched)
            with pytest.raises(SaveFailed):
                manager.wait_until_finished()
        manager.save(1, found.state, touched=found.touched)
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
        with pytest.raises(OptionError, match="already saved"):
            manager.save(1, found.state, touched=found.touched)
        model.assert_same(manager.restore(1, state).state, found.state)


@pytest.mark.parametrize(
    ("policy", "taken"),
    [
        (None, [0, 3, 6]),
        (policies.FixedIntervalPolicy(4), [0, 4]),
        (policies.SpecificStepsPolicy((2, 5)), [2, 5]),
        (policies.InitialSavePolicy(), [0]),
        (
            policies.AnySavePolicy([policies.InitialSavePolicy(), policies.FixedIntervalPolicy(5)]),
            [0, 5],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_policy_decides_which_steps_are_saved(tmp_path, policy, taken):
    state, touched = model.start()
    interval = 3 if policy is None else None
    with manager_of(tmp_path, save_interval_steps=interval, save_decision_policy=policy) as manager:
        for step in range(8):
            expected = manager.should_save(step)
            saved = manager.save(step, state, touched=touched)
            assert (saved.kind is not None) == expected == (step in taken)
            assert expected or "save_interval_steps" in saved.reason
        manager.wait_until_finished()
        assert manager.all_steps() == taken
        assert manager.save(9, state, touched=touched, force=True).kind is not None
        assert manager.save(10, state, touched=touched, force_base=True).kind == "base"


@pytest.mark.parametrize("bad", [0, -2])
def test_an_interval_below_one_is_rejected(bad):
    with pytest.raises(OptionError, match="save_interval_steps"):
        deltackpt.ManagerOptions(save_interval_steps=bad)


def test_a_number_and_a_policy_exclude_each_other():
    keep = policies.LatestN(2)
    with pytest.raises(OptionError, match="preservation_policy"):
        deltackpt.ManagerOptions(max_to_keep=2, preservation_policy=keep)
    every = policies.FixedIntervalPolicy(2)
    with pytest.raises(OptionError, match="save_decision_policy"):
        deltackpt.ManagerOptions(save_interval_steps=2, save_decision_policy=every)


def test_a_background_error_is_raised_once_without_a_wait(tmp_path, monkeypatch):
    from deltackpt.save import commit

    state = model.initial()
    with manager_of(tmp_path) as manager:
        assert not manager.is_saving_in_progress()
        manager.check_for_errors()
        with monkeypatch.context() as patched:
            patched.setattr(commit, "_commit", lambda *_: 1 / 0)
            manager.save(0, state)
            while manager.is_saving_in_progress():
                pass
        with pytest.raises(SaveFailed, match="division by zero"):
            manager.check_for_errors()
        manager.check_for_errors()
        model.commit(manager, 0, state)
        assert manager.latest_step() == 0
