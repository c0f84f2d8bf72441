# SPDX-License-Identifier: Apache-2.0
"""Restores are right for any accepted tracking: another TouchState, an older one, two, none.

Each test trains a state whose rows all differ, in a way that a clock alone cannot distinguish from
an ordinary run. It compares the restored state bit for bit with the one given to ``save()``.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import warnings
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
import pytest
from flat_options import manager_options

import deltackpt
from deltackpt import touched
from deltackpt.errors import OptionError, TrackingError
from deltackpt.resources.runtime import Runtime
from deltackpt.save import lineage, tracking_audit
from deltackpt.state.tables import split
from deltackpt.testing import TrainingRun

SELECT = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)


def opened(root, tables: Any = SELECT, **options: Any) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": tables},
        options=manager_options(durability="process", **options),
    )


class Run(TrainingRun):
    """A run that may return to a state in memory; no two of its steps use the same data."""

    def __init__(self, root: Any, **options: Any):
        seeds = itertools.count(1)
        super().__init__(
            root,
            options=manager_options(durability="process", **options),
            move=lambda state, rows, _: model.train(state, rows, next(seeds)),
        )

    def verify(self) -> Any:
        return self.manager.verify_tracking(self.state, touched=self.touched)

    def save_base(self) -> deltackpt.Saved:
        """Trains and saves; the warning names a table whose rows differ."""
        with base_warning("table tables/"):
            saved = self.save()
        assert saved.kind == "base"
        return saved

    def check_all(self) -> list[int]:
        """Restores all steps in a new manager; returns them."""
        with opened(self.root, access="read") as self.manager:
            return self.check_steps()


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)


def assert_restores(root, states: dict[int, Any], tables: Any = SELECT) -> None:
    with opened(root, tables, access="read") as reader:
        for step, state in states.items():
            model.assert_same(untracked(reader.restore(step, state).state), untracked(state))


def untracked(state: Any) -> Any:
    """A state without its TouchStates, which are never saved."""
    return jax.tree.map(
        lambda node: None if touched.is_touch_state(node) else node,
        state,
        is_leaf=touched.is_touch_state,
    )


def base_warning(text: str):
    return pytest.warns(UserWarning, match=f"(?s)is saved as a base.*{text}")


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("policy", [deltackpt.policies.Consecutive(), deltackpt.policies.OneShot()])
def test_a_state_taken_back_from_memory_is_found_however_far_its_clock_goes(tmp_path, policy):
    run = Run(tmp_path, policy=policy)
    with run.open():
        run.train(2)
        run.save()
        run.train(2)
        kept = run.state, run.touched, run.step
        run.train(2)
        assert run.save().kind == "delta"
        # NaN: return to the copy in memory and continue with other data, past the clock of step 8.
        run.state, run.touched, run.step = kept
        run.train(9)
        if isinstance(policy, deltackpt.policies.OneShot):
            # The delta has all rows since the base, and the base was not rolled back.
            assert run.save().kind == "delta"
        else:
            assert "differ from those in the parent" in run.save_base().reason
        assert run.save().kind == "delta"
        assert run.step == 16
    assert_restores(tmp_path, {step: run.states[step] for step in (15, 16)})


def test_many_restores_forget_neither_the_state_in_memory_nor_restored_ones(run):
    with run.open() as manager:
        for _ in range(4):
            run.train()
            run.save()
        for step in (2, 4, 6, 2, 4, 6):
            manager.restore(step, run.state)
        run.train()
        assert run.save().kind == "delta"
        assert manager.all_steps() == [2, 4, 6, 8, 10]
        # A state from before the last restore rolls back to its own step.
        run.continue_from(manager.restore(4, run.state))
        manager.restore(6, run.state)
        with pytest.warns(UserWarning, match="moved"):
            assert run.save().kind == "delta"
    assert run.check_all() == [2, 4, 5]


@pytest.mark.parametrize("made", ["init", "jitted init", "eval_shape", "fresh"])
def test_a_touch_state_recreated_during_a_run_is_not_saved_as_a_delta(run, made):
    tables = {f"tables/{name}": leaf for name, leaf in run.state["tables"].items()}
    jitted = jax.jit(touched.init)
    new = {
        "init": lambda: touched.init(tables),
        "jitted init": lambda: jitted(tables),
        "eval_shape": lambda: jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(touched.init, tables)
        ),
        "fresh": lambda: touched.fresh(touched.init(tables)),
    }[made]
    run.touched = new()
    with run.open():
        run.train(2)
        run.save()
        run.train()
        assert run.save().kind == "delta"
        # The next epoch: rows marked before the clock passes that of step 5 would be lost.
        run.touched = new()
        run.train(9)
        if made == "init":
            saved = run.save()
            assert saved.kind == "base" and "re-created" in saved.reason
        else:
            run.save_base()
        assert run.save().kind == "delta"
        assert run.step == 16
    assert_restores(run.root, {step: run.states[step] for step in (15, 16)})


def test_the_sampled_audit_can_be_disabled(tmp_path):
    run = Run(tmp_path, tracking_audit=False)
    with run.open() as manager:
        run.save_initial()
        rows = run.touched
        run.train()
        with pytest.warns(UserWarning, match="expected marks since the parent"):
            assert manager.save(run.step, run.state, touched=rows).kind == "delta"


def test_large_tables_are_sampled_among_recently_touched_rows(tmp_path):
    """Four wrong rows of 300,000: among the rows of the last save, which are checked first."""
    state = {"tables": {"t": jnp.arange(300_000 * 2, dtype=jnp.float32).reshape(-1, 2)}}
    tables = deltackpt.Tables(select="tables/*")

    def step(state, rows, ids):
        moved = {"tables": {"t": state["tables"]["t"].at[ids].add(0.5)}}
        return moved, touched.mark(rows, {"t": ids})

    rows = touched.init(state["tables"])
    with opened(tmp_path, tables) as manager:
        manager.save(0, state, touched=rows)
        kept = step(state, rows, jnp.arange(100))
        state, rows = step(*kept, jnp.arange(200_000, 200_004))
        assert manager.save(1, state, touched=rows).kind == "delta"
        state, rows = step(*step(*kept, jnp.arange(5)), jnp.arange(5))
        with base_warning(r"table tables/t: rows 200000, 200001, 200002, 200003\n"):
            assert manager.save(2, state, touched=rows).kind == "base"
    assert_restores(tmp_path, {2: state}, tables)


def test_a_sampled_audit_checks_a_bounded_number_of_rows_tables_and_bytes():
    widths = {f"t{i:03d}": 8 for i in range(100)} | {"wide": 100_000}
    state = {"tables": {name: jnp.zeros((500, width)) for name, width in widths.items()}}
    pieces = split(state, deltackpt.Tables(select="tables/*"))
    samples = tracking_audit.sample_restored(pieces, touched.init(state["tables"]), Runtime())
    assert {type(sample) for sample in samples.values()} == {tracking_audit.Sample}
    sampled = [len(sample.rows) for sample in samples.values()]
    assert 16 <= sum(sampled) <= tracking_audit.ROWS
    nbytes = sum(bits.nbytes for sample in samples.values() for bits in sample.bits.values())
    assert nbytes <= 64 * 400_000


def two_tables():
    params = {"a": jnp.arange(400.0).reshape(200, 2), "b": jnp.arange(300.0).reshape(100, 3)}
    optimizer = touched.track(optax.sgd(0.5), "a")
    return params, optimizer, {"params": params, "opt_state": optimizer.init(params)}


def updated(state, optimizer, ids):
    """One step of an optimizer, whose gradient is 1 at some rows of some tables."""
    params = state["params"]
    grads = {name: jnp.zeros_like(leaf) for name, leaf in params.items()}
    for name, rows in ids.items():
        grads[name] = grads[name].at[jnp.asarray(rows)].set(1.0)
    updates, opt_state = optimizer.update(grads, state["opt_state"], params)
    return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}


EMB = deltackpt.Tables(select="params/emb")


def emb_run(optimizer, table):
    """A state with the table ``emb``, its TouchState, and a jitted step that marks its rows."""
    params = {"emb": table}

    @jax.jit
    def step(state, marks, ids):
        return updated(state, optimizer, {"emb": ids}), touched.mark(marks, {"emb": ids})

    return {"params": params, "opt_state": optimizer.init(params)}, touched.init(params), step


def edit(state, table, row):
    """Changes a row, as an edit by hand would."""
    state["params"][table] = state["params"][table].at[row].add(7.0)


def test_a_row_is_touched_if_the_given_touch_state_or_the_one_in_the_state_marks_it(tmp_path):
    params, optimizer, state = two_tables()
    tables = deltackpt.Tables(select="params/*")
    given = touched.init(params)
    with opened(tmp_path, tables) as manager:
        manager.save(0, state, touched=given)
        for step in range(1, 6):
            # `track` sees "a"; "b" and a manual edit of "a" are marked explicitly.
            state = updated(state, optimizer, {"a": [step], "b": [step]})
            edit(state, "a", 100 + step)
            given = touched.mark(given, {"a": np.array([100 + step]), "b": np.array([step])})
            if step % 2:  # The two clocks diverge.
                given = touched.mark(given, {"b": np.array([step])})
            assert manager.save(step, state, touched=given).kind == "delta"
            manager.wait_until_finished()
            assert_restores(tmp_path, {step: state}, tables)
    with opened(tmp_path, tables) as manager:
        found = manager.restore_latest(state)
        state, given = found.state, found.touched
        assert set(given.stamps) == {"a", "params/b"}  # The restored one can be saved as is.
        edit(state, "b", 7)
        given = touched.mark(given, {"b": np.array([7])})
        assert manager.save(6, state, touched=given).kind == "delta"
    assert_restores(tmp_path, {6: state}, tables)


def test_saves_that_nobody_waits_for_keep_no_samples_in_memory(tmp_path):
    """A loop may never wait, and the manager keeps what a wait would return of a hundred saves."""

    def samples() -> int:
        return sum(isinstance(one, tracking_audit.Sample) for one in gc.get_objects())

    run = Run(tmp_path)
    with run.open():
        for _ in range(4):
            run.save(wait=False)
        few = samples()
        for _ in range(12):
            run.save(wait=False)
        assert 0 < samples() <= 2 * few


@pytest.mark.parametrize("restart", [False, True])
def test_rows_that_an_accumulator_moves_after_the_save_are_in_the_delta(tmp_path, restart):
    """At a window's end, MultiSteps moves and resets rows that were marked before the save."""
    rng, kinds = np.random.default_rng(0), []
    table = jnp.asarray(rng.normal(size=(4000, 2)), jnp.float32)
    state, marks, step = emb_run(optax.MultiSteps(optax.adagrad(0.5), 4), table)
    # Without the tracking audit: the rule alone must suffice.
    with opened(tmp_path, EMB, tracking_audit=False) as manager:
        manager.save(0, state, touched=marks)
        for number in range(1, 20):
            state, marks = step(state, marks, jnp.asarray(rng.integers(0, 4000, 3)))
            kinds.append(manager.save(number, state, touched=marks).kind)
            manager.wait_until_finished()
            assert_restores(tmp_path, {number: state}, EMB)
            if restart and number == 10:
                found = manager.restore(number, state)
                state, marks = found.state, found.touched
    assert kinds.count("base") == (2 if restart else 0), kinds


def test_an_unchanged_touch_state_causes_one_warning(run):
    with run.open() as manager:
        run.save_initial()
        with pytest.warns(UserWarning, match="step 1: expected marks since the parent"):
            assert manager.save(1, run.state, touched=run.touched).kind == "delta"
        with no_warning():
            assert manager.save(2, run.state, touched=run.touched).kind == "delta"


def test_a_manager_without_any_tracking_warns_once(tmp_path):
    state, missing = model.initial(), "step {}: expected a TouchState or tracking"
    with opened(tmp_path, tracking="touched") as manager:
        with no_warning():
            manager.save(0, state)  # Every run begins with a base.
            manager.save(1, state, force_base=True)
        with pytest.warns(UserWarning, match=missing.format(2)):
            assert manager.save(2, state).kind == "base"
        with no_warning():
            assert manager.save(3, state).kind == "base"
    with opened(tmp_path, tracking="touched") as manager:
        state = manager.restore_latest(state).state
        with pytest.warns(UserWarning, match=missing.format(4)):
            manager.save(4, state)


def test_marks_under_dense_adam_lose_no_row(tmp_path):
    state, marks, step = emb_run(optax.adam(0.1), jnp.ones((3000, 2)))
    with opened(tmp_path, EMB) as manager:
        for number in range(5):
            state, marks = step(state, marks, 20 * number + jnp.arange(20))
            with base_warning("table params/emb") if number else contextlib.nullcontext():
                assert manager.save(number, state, touched=marks).kind == "base"
            manager.wait_until_finished()
            assert_restores(tmp_path, {number: state}, EMB)


def test_a_delta_of_nearly_all_rows_is_saved_as_a_base(tmp_path):
    start = model.initial()
    rows = model.new_touched(start)
    every = {f"tables/{name}": np.arange(count) for name, count in model.ROWS.items()}
    marked = touched.mark(rows, every)
    with opened(tmp_path) as manager:
        manager.save(0, start, touched=rows)
        saved = manager.save(1, start, touched=marked)
        assert saved.kind == "base" and "would write about" in saved.reason
    quantized = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS, codec="int4")
    with opened(tmp_path / "4", quantized) as manager:
        manager.save(0, start, touched=rows)
        assert manager.save(1, start, touched=marked).kind == "delta"
    assert_restores(tmp_path, {1: start})


def test_verify_tracking_checks_every_row_between_calls(tmp_path, run):
    with run.open() as manager:
        assert not run.verify()
        run.train()
        assert run.verify()
        run.save(wait=False)
        run.train()
        state, rows = run.state, run.touched
        changed = {**state, "tables": {**state["tables"]}}
        changed["tables"]["users"] = state["tables"]["users"].at[699].add(1.0)
        assert np.asarray(rows.stamps["tables/users"])[699] <= 2
        # The base of step 2 may still be in flight; it does not contain the rows in doubt.
        with (
            mock.patch.object(lineage, "_committed_manifest", return_value=None),
            pytest.raises(TrackingError, match="table tables/users: rows 699"),
        ):
            manager.verify_tracking(changed, touched=rows)
        assert run.verify()
        saved = manager.save(3, state, touched=rows)
        assert saved.kind == "base" and "verify_tracking" in saved.reason
        assert not manager.verify_tracking(state, touched=model.new_touched(state))
        with pytest.raises(OptionError, match="expected a TouchState"):
            manager.verify_tracking(state)
    with (
        opened(tmp_path, tracking="fingerprints") as manager,
        pytest.raises(OptionError, match="verify_tracking"),
    ):
        manager.verify_tracking(state)
