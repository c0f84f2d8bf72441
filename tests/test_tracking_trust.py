# SPDX-License-Identifier: Apache-2.0
"""Restores are right for any accepted tracking: another TouchState, an older one, two, none.

Each test trains a state whose rows all differ, in a way that a clock alone cannot distinguish from
an ordinary run. It compares the restored state bit for bit with the one given to ``save()``.
"""

from __future__ import annotations

import contextlib
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

SELECT = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)


def opened(root, **options: Any) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": SELECT},
        options=manager_options(durability="process", **options),
    )


def assert_restores(root, states: dict[int, Any], tables: Any = SELECT) -> None:
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(
        root, handlers={"embeddings": tables}, options=options
    ) as reader:
        for step, state in states.items():
            model.assert_same(untracked(reader.restore(step, state).state), untracked(state))


def untracked(state: Any) -> Any:
    """A state without its TouchStates, which are never saved."""
    return jax.tree.map(
        lambda node: None if touched.is_touch_state(node) else node,
        state,
        is_leaf=touched.is_touch_state,
    )


def trained(state, rows, seeds):
    for seed in seeds:
        state, rows = model.train(state, rows, seed)
    return state, rows


@contextlib.contextmanager
def told(text: str):
    with pytest.warns(UserWarning, match=f"(?s)is saved as a base.*{text}"):
        yield


# --- 1: a TouchState that is not the one the parent saw ---------------------------------------


@pytest.mark.parametrize("policy", [deltackpt.policies.Consecutive(), deltackpt.policies.OneShot()])
def test_a_state_taken_back_from_memory_is_found_however_far_its_clock_goes(tmp_path, policy):
    start = model.initial()
    with opened(tmp_path, policy=policy) as manager:
        state, rows = trained(start, model.new_touched(start), range(1, 4))
        manager.save(0, state, touched=rows)
        kept = trained(state, rows, range(4, 6))
        state, rows = trained(*kept, range(6, 9))
        assert manager.save(10, state, touched=rows).kind == "delta"
        # NaN: return to the copy in memory and continue with other data, past the clock of step 10.
        state, rows = trained(*kept, range(20, 30))
        if isinstance(policy, deltackpt.policies.OneShot):
            # The delta has all rows since the base, and the base was not rolled back.
            assert manager.save(20, state, touched=rows).kind == "delta"
        else:
            with told("table tables/"):
                saved = manager.save(20, state, touched=rows)
            assert saved.kind == "base" and "differ from those in the parent" in saved.reason
        after = trained(state, rows, [31])
        assert manager.save(30, after[0], touched=after[1]).kind == "delta"
    assert_restores(tmp_path, {20: state, 30: after[0]})


def test_many_restores_forget_neither_the_state_in_memory_nor_restored_ones(tmp_path):
    start = model.initial()
    states = {}
    with opened(tmp_path) as manager:
        state, rows = start, model.new_touched(start)
        for step in (0, 10, 20, 30):
            state, rows = trained(state, rows, [step + 1])
            manager.save(step, state, touched=rows)
            states[step] = state
        for step in (0, 10, 20, 0, 10, 20):
            found = manager.restore(step, start)
        state, rows = trained(state, rows, [50])
        assert manager.save(40, state, touched=rows).kind == "delta"
        states[40] = state
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 10, 20, 30, 40]
        # A state from before the last restore rolls back to its own step.
        found = manager.restore(10, start)
        manager.restore(20, start)
        state, rows = trained(found.state, found.touched, [60])
        with pytest.warns(UserWarning, match="moved"):
            assert manager.save(11, state, touched=rows).kind == "delta"
        states = {0: states[0], 10: states[10], 11: state}
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 10, 11]
    assert_restores(tmp_path, states)


def test_a_rolled_back_step_is_not_a_parent_of_the_state_in_memory(tmp_path):
    start = model.initial()
    states = {}
    with opened(tmp_path) as manager:
        state, rows = trained(start, model.new_touched(start), [1])
        states[0] = state
        manager.save(0, state, touched=rows)
        kept = state, rows = trained(state, rows, [2, 3])
        manager.save(20, state, touched=rows)
        found = manager.restore(0, start)
        state, rows = trained(found.state, found.touched, [4])
        with pytest.warns(UserWarning, match="moved"):
            manager.save(10, state, touched=rows)
        states[10] = state
        state, rows = trained(*kept, [5, 6, 7])
        saved = manager.save(30, state, touched=rows)
        states[30] = state
        manager.wait_until_finished()
        assert saved.kind == "base" and "was removed" in saved.reason
        assert manager.all_steps() == [0, 10, 30]
    assert_restores(tmp_path, states)


@pytest.mark.parametrize("made", ["init", "jitted init", "eval_shape", "fresh"])
def test_a_touch_state_recreated_during_a_run_is_not_saved_as_a_delta(tmp_path, made):
    start = model.initial()
    tables = {f"tables/{name}": leaf for name, leaf in start["tables"].items()}
    jitted = jax.jit(touched.init)
    new = {
        "init": lambda: touched.init(tables),
        "jitted init": lambda: jitted(tables),
        "eval_shape": lambda: jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(touched.init, tables)
        ),
        "fresh": lambda: touched.fresh(touched.init(tables)),
    }[made]
    with opened(tmp_path) as manager:
        state, rows = trained(start, new(), range(1, 4))
        manager.save(0, state, touched=rows)
        state, rows = trained(state, rows, range(4, 6))
        assert manager.save(10, state, touched=rows).kind == "delta"
        # The next epoch: rows marked before the clock passes that of step 10 would be lost.
        state, rows = trained(state, new(), range(6, 16))
        if made == "init":
            saved = manager.save(20, state, touched=rows)
            assert "re-created" in saved.reason
        else:
            with told("table tables/"):
                saved = manager.save(20, state, touched=rows)
        assert saved.kind == "base"
        after = trained(state, rows, [16])
        assert manager.save(30, after[0], touched=after[1]).kind == "delta"
    assert_restores(tmp_path, {20: state, 30: after[0]})


def test_the_sampled_audit_can_be_disabled(tmp_path):
    start = model.initial()
    with opened(tmp_path, tracking_audit=False) as manager:
        manager.save(0, start, touched=model.new_touched(start))
    assert_restores(tmp_path, {0: start})


def test_large_tables_are_sampled_among_recently_touched_rows(tmp_path):
    """Four wrong rows of 300,000: among the rows of the last save, which are checked first."""
    state = {"tables": {"t": jnp.arange(300_000 * 2, dtype=jnp.float32).reshape(-1, 2)}}
    tables = deltackpt.Tables(select="tables/*")
    rows = touched.init(state["tables"])

    def step(state, rows, ids, value):
        moved = {"tables": {"t": state["tables"]["t"].at[ids].add(value)}}
        return moved, touched.mark(rows, {"t": ids})

    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": tables}) as manager:
        manager.save(0, state, touched=rows)
        kept = step(state, rows, jnp.arange(100), 0.5)
        state, rows = step(*kept, jnp.arange(200_000, 200_004), 0.5)
        assert manager.save(1, state, touched=rows).kind == "delta"
        state, rows = step(*kept, jnp.arange(5), 0.5)
        state, rows = step(state, rows, jnp.arange(5), 0.5)
        with told(r"table tables/t: rows 200000, 200001, 200002, 200003\n"):
            assert manager.save(2, state, touched=rows).kind == "base"
    assert_restores(tmp_path, {2: state}, tables)


def test_a_sampled_audit_checks_a_bounded_number_of_rows_tables_and_bytes():
    widths = {f"t{i:03d}": 8 for i in range(100)} | {"wide": 100_000}
    state = {"tables": {name: jnp.zeros((500, width)) for name, width in widths.items()}}
    parts = split(state, deltackpt.Tables(select="tables/*"))
    samples = tracking_audit.of_restored(parts, touched.init(state["tables"]), Runtime())
    assert {type(sample) for sample in samples.values()} == {tracking_audit.Sample}
    sampled = [len(sample.rows) for sample in samples.values()]
    assert 16 <= sum(sampled) <= tracking_audit.ROWS
    nbytes = sum(bits.nbytes for sample in samples.values() for bits in sample.bits.values())
    assert nbytes <= 64 * 400_000


# --- 2: a TouchState in the state, and one given ----------------------------------------------


def two_tables():
    params = {
        "a": jnp.arange(400.0).reshape(200, 2),
        "b": jnp.arange(300.0).reshape(150, 2),
    }
    optimizer = touched.track(optax.sgd(0.5), "a")
    return params, optimizer, {"params": params, "opt_state": optimizer.init(params)}


def sgd(state, optimizer, ids, skip=()):
    params = state["params"]
    grads = {name: jnp.zeros_like(leaf) for name, leaf in params.items()}
    for name, rows in ids.items():
        grads[name] = grads[name].at[jnp.asarray(rows)].set(1.0)
    updates, opt_state = optimizer.update(grads, state["opt_state"], params)
    return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}


def test_a_row_is_touched_if_the_given_touch_state_or_the_one_in_the_state_marks_it(tmp_path):
    params, optimizer, state = two_tables()
    tables = deltackpt.Tables(select="params/*")
    given = touched.init(params)
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": tables}) as manager:
        manager.save(0, state, touched=given)
        for step in range(1, 6):
            # `track` sees "a"; "b" and a manual edit of "a" are marked explicitly.
            state = sgd(state, optimizer, {"a": [step], "b": [step]})
            state["params"]["a"] = state["params"]["a"].at[100 + step].add(7.0)
            given = touched.mark(given, {"a": np.array([100 + step]), "b": np.array([step])})
            if step % 2:  # The two clocks diverge.
                given = touched.mark(given, {"b": np.array([step])})
            assert manager.save(step, state, touched=given).kind == "delta"
            manager.wait_until_finished()
            assert_restores(tmp_path, {step: state}, tables)
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": tables}) as manager:
        found = manager.restore_latest(state)
        state, given = found.state, found.touched
        assert set(given.stamps) == {"a", "params/b"}  # The restored one can be saved as is.
        given = touched.mark(given, {"b": np.array([7])})
        state["params"]["b"] = state["params"]["b"].at[7].add(7.0)
        assert manager.save(6, state, touched=given).kind == "delta"
    assert_restores(tmp_path, {6: state}, tables)


def test_a_touch_state_that_is_no_longer_given_makes_the_save_a_base(tmp_path):
    params, optimizer, state = two_tables()
    tables = deltackpt.Tables(select="params/a")
    given = touched.init({"a": params["a"]})
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": tables}) as manager:
        manager.save(0, state, touched=given)
        state = sgd(state, optimizer, {"a": [1]})
        state["params"]["a"] = state["params"]["a"].at[100].add(7.0)
        saved = manager.save(1, state)
        assert saved.kind == "base" and "is missing now" in saved.reason
    assert_restores(tmp_path, {1: state}, tables)


# --- 4: accumulators ----------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True])
def test_rows_that_an_accumulator_moves_after_the_save_are_in_the_delta(tmp_path, restart):
    """At a window's end, MultiSteps moves and resets rows that were marked before the save."""
    rows, optimizer = 4000, optax.MultiSteps(optax.adagrad(0.5), 4)
    rng = np.random.default_rng(0)
    params = {"emb": jnp.asarray(rng.normal(size=(rows, 2)), jnp.float32)}
    tables = deltackpt.Tables(select="params/emb")
    state = {"params": params, "opt_state": optimizer.init(params)}
    marks = touched.init(params)

    @jax.jit
    def step(state, marks, ids):
        grads = {"emb": jnp.zeros((rows, 2)).at[ids].set(1.0)}
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        moved = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }
        return moved, touched.mark(marks, {"emb": ids})

    kinds = []
    # Without the tracking audit: the rule alone must suffice.
    options = deltackpt.ManagerOptions(deltas=deltackpt.DeltaOptions(tracking_audit=False))
    with contextlib.ExitStack() as stack:
        handlers = {"embeddings": tables}
        manager = stack.enter_context(
            deltackpt.CheckpointManager(tmp_path, handlers=handlers, options=options)
        )
        manager.save(0, state, touched=marks)
        for number in range(1, 20):
            state, marks = step(state, marks, jnp.asarray(rng.integers(0, rows, 3)))
            kinds.append(manager.save(number, state, touched=marks).kind)
            manager.wait_until_finished()
            assert_restores(tmp_path, {number: state}, tables)
            if restart and number == 10:
                found = manager.restore(number, state)
                state, marks = found.state, found.touched
    assert kinds.count("base") == (2 if restart else 0), kinds


# --- 5: forgotten tracking ----------------------------------------------------------------------


def test_a_forgotten_reassignment_is_detected_and_reported(tmp_path):
    start = model.initial()
    with opened(tmp_path) as manager:
        state, rows = trained(start, model.new_touched(start), range(1, 4))
        manager.save(0, state, touched=rows)
        state, _ = trained(state, rows, [4])
        with told("table tables/"):
            assert manager.save(1, state, touched=rows).kind == "base"
    assert_restores(tmp_path, {1: state})


def test_an_unchanged_touch_state_causes_one_warning(tmp_path):
    state = model.initial()
    with opened(tmp_path) as manager:
        rows = model.new_touched(state)
        manager.save(0, state, touched=rows)
        with pytest.warns(UserWarning, match="step 1: expected marks since the parent"):
            assert manager.save(1, state, touched=rows).kind == "delta"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert manager.save(2, state, touched=rows).kind == "delta"


def test_a_manager_without_any_tracking_warns_once(tmp_path):
    state, missing = model.initial(), "step {}: expected a TouchState or tracking"
    with opened(tmp_path, tracking="touched") as manager:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.save(0, state)  # Every run begins with a base.
            manager.save(1, state, force_base=True)
        with pytest.warns(UserWarning, match=missing.format(2)):
            assert manager.save(2, state).kind == "base"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert manager.save(3, state).kind == "base"
    with opened(tmp_path, tracking="touched") as manager:
        state = manager.restore_latest(state).state
        with pytest.warns(UserWarning, match=missing.format(4)):
            manager.save(4, state)


def test_marks_under_dense_adam_lose_no_row(tmp_path):
    rows, optimizer = 3000, optax.adam(0.1)
    params = {"emb": jnp.ones((rows, 2))}
    tables = deltackpt.Tables(select="params/emb")
    state = {"params": params, "opt_state": optimizer.init(params)}
    marks = touched.init(params)

    @jax.jit
    def step(state, marks, ids):
        grads = {"emb": jnp.zeros((rows, 2)).at[ids].set(1.0)}
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        moved = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        return moved, touched.mark(marks, {"emb": ids})

    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": tables}) as manager:
        for number in range(5):
            state, marks = step(state, marks, 20 * number + jnp.arange(20))
            with told("table params/emb") if number else contextlib.nullcontext():
                assert manager.save(number, state, touched=marks).kind == "base"
            manager.wait_until_finished()
            assert_restores(tmp_path, {number: state}, tables)


# --- 20: deltas of nearly all rows --------------------------------------------------------------


def test_a_delta_of_nearly_all_rows_is_saved_as_a_base(tmp_path):
    start = model.initial()
    every = {f"tables/{name}": np.arange(rows) for name, rows in model.ROWS.items()}
    with opened(tmp_path) as manager:
        rows = model.new_touched(start)
        manager.save(0, start, touched=rows)
        saved = manager.save(1, start, touched=touched.mark(rows, every))
        assert saved.kind == "base" and "would write about" in saved.reason
    quantized = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS, codec="int4")
    with deltackpt.CheckpointManager(tmp_path / "4", handlers={"embeddings": quantized}) as manager:
        manager.save(0, start, touched=rows)
        assert manager.save(1, start, touched=touched.mark(rows, every)).kind == "delta"
    assert_restores(tmp_path, {1: start})


# --- the full audit -----------------------------------------------------------------------------


def test_verify_tracking_checks_every_row_between_calls(tmp_path):
    start = model.initial()
    with opened(tmp_path) as manager:
        rows = model.new_touched(start)
        assert not manager.verify_tracking(start, touched=rows)
        state, rows = trained(start, rows, [1, 2])
        assert manager.verify_tracking(state, touched=rows)
        manager.save(0, state, touched=rows)
        state, rows = trained(state, rows, [3])
        changed = {**state, "tables": {**state["tables"]}}
        changed["tables"]["users"] = state["tables"]["users"].at[699].add(1.0)
        marked = np.asarray(rows.stamps["tables/users"])[699] > 2
        assert not marked
        # The base of step 0 may still be in flight; it does not contain the rows in doubt.
        with (
            mock.patch.object(lineage, "_committed_manifest", return_value=None),
            pytest.raises(TrackingError, match="table tables/users: rows 699"),
        ):
            manager.verify_tracking(changed, touched=rows)
        assert manager.verify_tracking(state, touched=rows)
        saved = manager.save(1, state, touched=rows)
        assert saved.kind == "base" and "verify_tracking" in saved.reason
        assert not manager.verify_tracking(state, touched=model.new_touched(state))
        with pytest.raises(OptionError, match="expected a TouchState"):
            manager.verify_tracking(state)
    with (
        opened(tmp_path, tracking="fingerprints") as manager,
        pytest.raises(OptionError, match="verify_tracking"),
    ):
        manager.verify_tracking(state)
