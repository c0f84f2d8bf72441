# SPDX-License-Identifier: Apache-2.0
"""``tracking="auto"``: a TouchState is used if there is one, else rows are fingerprinted."""

from __future__ import annotations

import logging
import warnings

import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
import pytest

import deltackpt
from deltackpt import touched
from deltackpt.errors import OptionError, SaveFailed
from deltackpt.reading import stored_saves
from deltackpt.storage.store import store_path
from deltackpt.testing import failing_saves
from deltackpt.touched import TrackState

ROWS = 4000
HANDLERS = {"embeddings": deltackpt.Tables(select="emb", slots={})}


def manager(root, **options) -> deltackpt.CheckpointManager:
    given = deltackpt.ManagerOptions(**options)
    return deltackpt.CheckpointManager(root, handlers=HANDLERS, options=given)


def initial() -> dict:
    return {"emb": jnp.zeros((ROWS, 4)), "bias": jnp.zeros(3)}


def moved(state: dict, *rows: int) -> dict:
    return {**state, "emb": state["emb"].at[np.array(rows)].add(1.0)}


def rows_of(one: deltackpt.CheckpointManager) -> list[int]:
    return [report.rows for report in one.wait_until_finished()]


def recorded(root, step: int) -> str:
    return stored_saves.read_save(store_path(root / str(step)), "embeddings").head.tracking


def test_a_state_without_touch_state_is_fingerprinted(tmp_path, caplog):
    state = initial()
    with caplog.at_level(logging.INFO, "deltackpt"), manager(tmp_path) as one:
        assert one.save(0, state).kind == "base"
        state = moved(state, 3, 5)
        assert one.save(1, state).kind == "delta"
        assert rows_of(one) == [ROWS, 2]
    assert sum("12 bytes per row" in line for line in caplog.messages) == 1
    assert recorded(tmp_path, 1) == "fingerprints"


@pytest.mark.parametrize("where", ["passed", "in the state"])
def test_a_touch_state_is_used(tmp_path, where):
    state, marks = initial(), touched.init({"emb": jnp.zeros((ROWS, 4))})
    with manager(tmp_path) as one:
        for step, rows in ((0, (1,)), (1, (3, 5))):
            marks, state = touched.mark(marks, {"emb": jnp.array(rows)}), moved(state, *rows)
            if where == "passed":
                saved = one.save(step, state, touched=marks)
            else:
                saved = one.save(step, {**state, "opt": TrackState(marks, ())})
        assert saved.kind == "delta"
        assert rows_of(one) == [ROWS, 2]
        assert one.verify_tracking(state, touched=marks) is False
    assert recorded(tmp_path, 1) == "touched"


@pytest.mark.parametrize("tracking", ["auto", "touched", "fingerprints"])
@pytest.mark.parametrize("before", ["touched", "fingerprints", "untracked"])
def test_the_next_save_accepts_the_touch_state_of_a_restore(tmp_path, before, tracking):
    state, wal = initial(), deltackpt.WalOptions()
    marks = touched.init({"emb": state["emb"]}) if before == "touched" else None
    name = "fingerprints" if before == "fingerprints" else "touched"
    with manager(tmp_path, deltas=deltackpt.DeltaOptions(tracking=name)) as one:
        one.save(0, state, touched=marks)
    deltas = deltackpt.DeltaOptions(tracking=tracking)
    hashes = tracking == "fingerprints" or (tracking == "auto" and before == "fingerprints")
    with manager(tmp_path, deltas=deltas, wal=wal) as one:
        for step, call in ((1, "append"), (2, "save")):
            found = one.restore_latest(state)
            assert (found.touched is None) == hashes
            marks, state = found.touched, moved(found.state, step)
            if marks is not None:
                marks = touched.mark(marks, {"emb": jnp.array([step])})
            if call == "append":
                assert one.append(step, state, touched=marks).kind == "full"
                assert one.wait_appended().step == step
            else:
                assert one.save(step, state, touched=marks).kind == "delta"
        assert rows_of(one) == [2]
        model.assert_same(one.restore_latest(state).state, state)


def test_a_run_may_change_from_fingerprints_to_a_touch_state_and_back(tmp_path):
    state = initial()
    with manager(tmp_path) as one:
        one.save(0, state)
        marks = touched.init({"emb": state["emb"]})
        assert one.save(1, state, touched=marks).kind == "base"
        marks, state = touched.mark(marks, {"emb": jnp.array([2])}), moved(state, 2)
        assert one.save(2, state, touched=marks).kind == "delta"
        state = moved(state, 9)
        assert one.save(3, state).kind == "base"
        state = moved(state, 11)
        assert one.save(4, state).kind == "delta"
        assert rows_of(one) == [ROWS, ROWS, 1, ROWS, 1]
        for step in one.all_steps():
            assert one.restore(step, state).step == step
        model.assert_same(one.restore(4, state).state, state)


def test_hashing_stops_with_one_warning_once_most_rows_change(tmp_path):
    state = initial()
    with manager(tmp_path) as one, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(8):
            saved = one.save(step, state)
            assert saved.kind == "base"
            one.wait_until_finished()
            state = {**state, "emb": state["emb"] + 1.0}
        [warning] = [str(one.message) for one in told]
        assert warning.startswith("more than half of the rows of all tables changed in each of the")
        assert "all further saves of this manager without a TouchState are bases" in warning
        assert 'DeltaOptions(tracking="fingerprints"), which never stops' in warning
        model.assert_same(one.restore_latest(state).state, {**state, "emb": state["emb"] - 1.0})
    assert [recorded(tmp_path, step) for step in (3, 4)] == ["fingerprints", ""]


def test_a_touch_state_gives_deltas_again_after_hashing_has_stopped(tmp_path):
    state = initial()
    with manager(tmp_path) as one:
        with pytest.warns(UserWarning, match="without a TouchState are bases"):
            for step in range(4):
                one.save(step, state)
                state = {**state, "emb": state["emb"] + 1.0}
        marks = deltackpt.touched.init({"emb": state["emb"]})
        assert one.save(4, state, touched=marks).kind == "base"
        state, marks = moved(state, 1), deltackpt.touched.mark(marks, {"emb": jnp.array([1])})
        assert one.save(5, state, touched=marks).kind == "delta"


def test_two_saves_of_most_rows_and_one_of_few_do_not_stop_hashing(tmp_path):
    state = initial()
    with manager(tmp_path) as one, warnings.catch_warnings():
        warnings.simplefilter("error")
        one.save(0, state)
        for step in range(1, 10):
            few = step % 3 == 0
            state = moved(state, 1) if few else {**state, "emb": state["emb"] + 1.0}
            assert (one.save(step, state).kind == "delta") == few


def test_requested_fingerprints_never_stop(tmp_path):
    state, named = initial(), deltackpt.DeltaOptions(tracking="fingerprints")
    with manager(tmp_path, deltas=named) as one:
        one.save(0, state)
        for step in range(1, 6):
            state = {**state, "emb": state["emb"] + 1.0}
            one.save(step, state)
        assert one.save(6, moved(state, 1)).kind == "delta"


def test_the_default_selects_large_embeddings_and_logs_them_once(tmp_path, caplog):
    state = {
        "tok": {"embedding": jnp.zeros((5000, 2))},
        "item": {"embeddings": jnp.zeros((4096, 2))},
        "pos": {"embedding": jnp.zeros((512, 2))},
    }
    with caplog.at_level(logging.INFO, "deltackpt"), deltackpt.CheckpointManager(tmp_path) as one:
        one.save(0, state)
        one.save(1, state)
    found = [line for line in caplog.messages if line.startswith("tables: ")]
    assert len(found) == 1
    assert "item/embeddings (4,096 rows), tok/embedding (5,000 rows)" in found[0]
    assert "pos" not in found[0]


def test_a_sharded_table_is_counted_over_all_devices(tmp_path):
    mesh = jax.make_mesh((8,), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    state = {**initial(), "emb": jax.device_put(jnp.zeros((ROWS, 4)), rows)}
    with manager(tmp_path) as one, pytest.warns(UserWarning, match="more than half"):
        for step in range(4):
            one.save(step, state)
            state = {**state, "emb": state["emb"] + (jnp.arange(ROWS) > ROWS // 3)[:, None]}


@pytest.mark.parametrize("options", ["wal", "blocks"])
def test_hashing_does_not_stop_if_it_is_needed_anyway(tmp_path, options):
    given = {
        "wal": {"wal": deltackpt.WalOptions()},
        "blocks": {"dense": deltackpt.Dense(deltas="blocks")},
    }[options]
    state = initial()
    with manager(tmp_path, **given) as one, warnings.catch_warnings():
        warnings.simplefilter("error")
        one.save(0, state)
        for step in range(1, 7):
            state = {**state, "emb": state["emb"] + 1.0}
            if options == "wal":
                assert one.append(step, state).kind == "full"
            else:
                one.save(step, state)
        one.wait_until_finished()
        assert one.next_save(state).kind == "delta"
        model.assert_same(one.restore_latest(state).state, state)


def test_tables_may_be_on_different_devices(tmp_path):
    first, second = jax.devices()[:2]
    state = {
        "emb": jax.device_put(jnp.zeros((ROWS, 4)), first),
        "other": jax.device_put(jnp.zeros((ROWS, 4)), second),
        "host": np.zeros((ROWS, 2), np.float32),
    }
    handlers = {"embeddings": deltackpt.Tables(select=("emb", "other", "host"), slots={})}
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers) as one:
        one.save(0, state)
        state["host"][5] = 1.0
        assert one.save(1, moved(state, 3)).kind == "delta"
        assert rows_of(one) == [3 * ROWS, 2]


def test_a_restored_touch_state_does_not_replace_the_fingerprints(tmp_path):
    """Either may continue an untracked step, but neither knows the other's changes."""
    state = initial()
    with manager(tmp_path, deltas=deltackpt.DeltaOptions(tracking="touched")) as one:
        one.save(0, state)
    deltas = deltackpt.DeltaOptions(tracking_audit=False)
    with manager(tmp_path, deltas=deltas) as one:
        marks = one.restore_latest(state).touched
        for step in range(1, 4):
            state = moved(state, step)
            assert one.save(step, state).kind == "delta"
            one.wait_until_finished()
        for row in range(9, 14):
            marks, state = touched.mark(marks, {"emb": jnp.array([row])}), moved(state, row)
        assert one.save(4, state, touched=marks).kind == "base"
        one.wait_until_finished()
        model.assert_same(one.restore(4, state).state, state)


def test_accumulated_gradients_of_an_untracked_step_are_not_lost(tmp_path):
    optimizer = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=4)
    handlers = {"embeddings": deltackpt.Tables(select="params/emb")}
    params = {"emb": jnp.zeros((ROWS, 4))}
    state = {"params": params, "opt": optimizer.init(params)}

    def step(state: dict, row: int) -> dict:
        gradient = {"emb": jnp.zeros((ROWS, 4)).at[row].add(1.0)}
        updates, gathered = optimizer.update(gradient, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": gathered}

    state = step(step(state, 0), 1)
    untracked = deltackpt.ManagerOptions(deltas=deltackpt.DeltaOptions(tracking="touched"))
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers, options=untracked) as one:
        one.save(2, state)
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers) as one:
        found = one.restore_latest(state)
        state, marks = found.state, found.touched
        for row in (2, 3):
            state, marks = step(state, row), touched.mark(marks, {"emb": jnp.array([row])})
        model.commit(one, 4, state, touched=marks)
        model.assert_same(one.restore(4, state).state, state)


@pytest.mark.parametrize("inspects", [False, True])
def test_a_touch_state_after_a_failed_save_with_fingerprints_gives_a_base(tmp_path, inspects):
    state, marks = initial(), touched.init({"emb": jnp.zeros((ROWS, 4))})
    with manager(tmp_path, deltas=deltackpt.DeltaOptions(tracking_audit=False)) as one:
        model.commit(one, 0, state, touched=marks)
        state = moved(state, 7)
        with failing_saves(tmp_path):
            one.save(1, state)
            with pytest.raises(SaveFailed):
                one.wait_until_finished()
        if inspects:
            one.restore(0, state)
        marks, state = touched.mark(marks, {"emb": jnp.array([2])}), moved(state, 2)
        assert one.save(2, state, touched=marks).kind == "base"
        one.wait_until_finished()
        model.assert_same(one.restore(2, state).state, state)


def test_a_prediction_and_a_rejected_save_keep_the_fingerprints(tmp_path):
    state, marks = initial(), touched.init({"emb": jnp.zeros((ROWS, 4))})
    with manager(tmp_path) as one:
        one.save(0, state)
        assert one.next_save(state, touched=marks).kind == "base"
        one.verify_tracking(state, touched=marks)
        with pytest.raises(OptionError, match="above"):
            one.save(0, state, touched=marks)
        assert one.save(1, moved(state, 7)).kind == "delta"
        assert rows_of(one) == [ROWS, 1]


def test_passing_a_touch_state_only_sometimes_warns_once(tmp_path):
    state, marks = initial(), touched.init({"emb": jnp.zeros((ROWS, 4))})
    with manager(tmp_path) as one, pytest.warns(UserWarning) as told:
        for step in range(8):
            one.save(step, state, touched=marks if step % 2 else None)
    assert [str(each.message)[:27] for each in told] == ["some calls of save() and ap"]


def test_ids_that_omit_rows_lose_none_with_fingerprints(tmp_path):
    state = initial()
    with manager(tmp_path, wal=deltackpt.WalOptions()) as one:
        one.save(0, state)
        state = moved(state, 3, 5)
        assert one.append(1, state, ids={"emb": np.array([3])}).kind == "full"
        one.wait_until_finished()
        model.assert_same(one.restore_latest(state).state, state)


def test_the_wal_continues_from_a_save_with_other_tracking(tmp_path):
    """Records never span it: ids name the rows since the last call, not since an older save."""
    state, marks = initial(), touched.init({"emb": jnp.zeros((ROWS, 4))})
    with manager(tmp_path, wal=deltackpt.WalOptions()) as one:
        one.save(0, state, touched=marks)
        state, marks = moved(state, 1), touched.mark(marks, {"emb": jnp.array([1])})
        assert one.append(1, state).saved is not None
        one.save(2, state, touched=marks)
        state, marks = moved(state, 2), touched.mark(marks, {"emb": jnp.array([2])})
        found = one.append(3, state, touched=marks, ids={"emb": np.array([2])})
        assert found.kind == "full"
        model.commit(one, 4, state, touched=marks)
        model.assert_same(one.restore_latest(state).state, state)
