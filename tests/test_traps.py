# SPDX-License-Identifier: Apache-2.0
"""The known traps of incremental checkpoints, each named after the promise that avoids it."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest
from flat_options import manager_options

import deltackpt
from deltackpt import touched
from deltackpt.errors import Damaged, NoIntactStep, SaveFailed
from deltackpt.format import names
from deltackpt.testing import failing_saves, paused_saves, stored_chunks

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}

#: Traps that tests in other files cover: the promise, and its test.
ELSEWHERE = {
    "no lookup marks a row": "test_touched.py::test_evaluation_marks_nothing",
    "no table overwrites another": "test_tables.py::test_two_tables_of_one_name_are_an_error",
    "the older of two trainers is fenced": (
        "test_root.py::"
        "test_two_trainers_on_one_directory_the_older_is_fenced_and_its_save_is_not_committed"
    ),
    "a full disk is out of space": "test_root.py::test_a_full_file_system_is_out_of_space",
    "a failing disk loses nothing": (
        "long/test_io_errors.py::"
        "test_a_failed_io_call_is_a_typed_error_and_the_next_save_loses_nothing"
    ),
    "dense optimizers touch what they move": "test_touched.py::test_track_is_exact",
    "the clock never wraps": (
        "test_touched.py::test_the_clock_stops_instead_of_wrapping_and_loses_no_mark"
    ),
    "no step is lost without close()": (
        "test_exits.py::test_a_program_that_ends_without_close_loses_no_step"
    ),
    "a kill in the middle of a retention leaves only what restores": (
        "test_retention.py::test_at_every_call_of_a_retention_every_listed_step_restores"
    ),
    "another directory under the same path is fenced": (
        "test_root.py::test_a_backup_moved_into_place_is_fenced"
    ),
    "a TouchState of an older moment is found": (
        "test_tracking_trust.py::"
        "test_a_state_taken_back_from_memory_is_found_however_far_its_clock_goes"
    ),
    "a TouchState made anew is no delta": (
        "test_tracking_trust.py::test_a_touch_state_made_anew_in_mid_run_is_no_delta"
    ),
    "any damage is noticed": (
        "test_damage.py::test_damage_of_any_file_is_named_and_an_older_step_restores"
    ),
}


@pytest.mark.parametrize("node", ELSEWHERE.values(), ids=ELSEWHERE)
def test_the_promise_is_tested_elsewhere(node):
    name, _, function = node.partition("::")
    tree = ast.parse((Path(__file__).parent / name).read_text())
    assert function in {part.name for part in ast.walk(tree) if isinstance(part, ast.FunctionDef)}


def manager(root: Path, **options) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(root, handlers=HANDLERS, options=manager_options(**options))


def newest(root: Path, like: dict) -> deltackpt.Restored:
    with manager(root, access="read") as reader:
        found = reader.restore_latest(like)
    assert found is not None
    return found


def test_a_failed_save_keeps_the_touched_rows_for_the_next(tmp_path):
    """Trap 1."""
    state = model.initial()
    marks = model.new_touched(state)
    with manager(tmp_path) as saver:
        saver.save(1, state, touched=marks)
        saver.wait_until_finished()
        state, marks = model.train(state, marks, 1)
        with failing_saves(tmp_path):
            saver.save(2, state, touched=marks)
            with pytest.raises(SaveFailed, match="step 2"):
                saver.wait_until_finished()
        state, marks = model.train(state, marks, 2)
        assert saver.save(3, state, touched=marks).kind == "delta"
        saver.wait_until_finished()
        assert saver.all_steps() == [1, 3]
    found = newest(tmp_path, state)
    assert found.chain == (1, 3)
    model.assert_same(found.state, state)


def test_a_base_that_fails_resets_nothing(tmp_path):
    """Trap 2."""
    state = model.initial()
    marks = model.new_touched(state)
    with manager(tmp_path) as saver:
        saver.save(1, state, touched=marks)
        saver.wait_until_finished()
        state, marks = model.train(state, marks, 1)
        with failing_saves(tmp_path):
            saver.save(2, state, touched=marks, force_base=True)
            with pytest.raises(SaveFailed):
                saver.wait_until_finished()
        assert saver.save(3, state, touched=marks).kind == "delta"
        saver.wait_until_finished()
    model.assert_same(newest(tmp_path, state).state, state)


def test_tables_slots_and_dense_leaves_are_of_one_moment(tmp_path):
    """Trap 3: the next steps run, and donate, while the save is written."""
    state = model.initial()
    marks = model.new_touched(state)

    @jax.jit
    def copied(tree):
        return jax.tree.map(jnp.copy, tree)

    step = jax.jit(
        lambda tables, slots: jax.tree.map(lambda leaf: leaf + 1, (tables, slots)),
        donate_argnums=(0, 1),
    )
    with manager(tmp_path) as saver:
        saver.save(1, state, touched=marks)
        saver.wait_until_finished()
        for number in range(2, 6):
            state, marks = model.train(state, marks, number)
            expected = jax.tree.map(
                lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf + 0,
                state,
            )
            running = {**state, "tables": copied(state["tables"]), "slots": copied(state["slots"])}
            saver.save(number, running, touched=marks)
            for _ in range(3):
                running["tables"], running["slots"] = step(running["tables"], running["slots"])
            jax.block_until_ready(running["tables"])
            saver.wait_until_finished()
            model.assert_same(newest(tmp_path, state).state, expected)


def test_steps_after_a_rollback_are_never_replayed(tmp_path):
    """Trap 4."""
    state = model.initial()
    marks = model.new_touched(state)
    states = {}
    with manager(tmp_path) as saver:
        for number in range(1, 5):
            saver.save(number, state, touched=marks)
            states[number] = state
            state, marks = model.train(state, marks, number)
    with manager(tmp_path) as saver:
        found = saver.restore(2, states[1])
        state, marks = model.train(found.state, found.touched, 77)
        with pytest.warns(UserWarning, match=r"later steps \[3, 4\] were moved"):
            assert saver.save(3, state, touched=marks).kind == "delta"
        saver.wait_until_finished()
        assert saver.all_steps() == [1, 2, 3]
    found = newest(tmp_path, state)
    assert found.chain == (1, 2, 3)
    model.assert_same(found.state, state)
    assert {path.name for path in tmp_path.glob(f"{names.ROLLED_BACK}/*/*")} == {"3", "4"}


@pytest.mark.parametrize("how", ["missing", "duplicated", "reordered"])
def test_a_missing_duplicated_or_reordered_delta_is_noticed(tmp_path, how):
    """Trap 5; truncated ones are among the damages of test_damage.py."""
    state = model.initial()
    marks = model.new_touched(state)
    states = {}
    with manager(tmp_path) as saver:
        for number in range(1, 5):
            saver.save(number, state, touched=marks)
            states[number] = state
            state, marks = model.train(state, marks, number)
    if how == "missing":
        shutil.rmtree(tmp_path / "3")
    elif how == "duplicated":
        shutil.copytree(tmp_path / "4", tmp_path / "5")
    else:
        for source, target in (("2", "spare"), ("3", "2"), ("spare", "3")):
            (tmp_path / source).rename(tmp_path / target)
    with pytest.warns(UserWarning, match="is skipped"):
        found = newest(tmp_path, states[4])
    assert found.step == {"missing": 2, "duplicated": 4, "reordered": 1}[how]
    model.assert_same(found.state, states[found.step])
    assert found.skipped


def test_an_interval_without_touched_rows_is_an_empty_delta(tmp_path):
    """Trap 9."""
    state = model.initial()
    marks = model.new_touched(state)
    with manager(tmp_path) as saver:
        saver.save(1, state, touched=marks)
        saver.wait_until_finished()
        for number in (2, 3):
            assert saver.save(number, state, touched=marks).kind == "delta"
            assert saver.wait_until_finished()[0].rows == 0
    found = newest(tmp_path, state)
    assert found.chain == (1, 2, 3)
    model.assert_same(found.state, state)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "uint16", "bool"]
)
def test_tables_of_any_dtype_restore_bit_for_bit(tmp_path, dtype):
    """Trap 10, NaN payloads and signed zeros included."""
    words = np.random.default_rng(0).integers(0, 256, (50, 32), np.uint8)
    if dtype == "bool":
        words &= 1
    table = jnp.asarray(words.view(jnp.dtype(dtype)))
    state = {"tables": {"t": table}}
    marks = touched.init({"tables/t": table})
    handlers = {"embeddings": deltackpt.Tables(select="tables/*")}
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers) as saver:
        saver.save(1, state, touched=marks)
        # Changed by numpy: XLA's scatter changes NaNs of rows that it does not write.
        ids, changed = np.arange(0, 50, 3), np.array(table)
        changed[ids] = changed[::-1][ids]
        state = {"tables": {"t": jnp.asarray(changed)}}
        marks = touched.mark(marks, {"tables/t": jnp.asarray(ids)})
        assert saver.save(2, state, touched=marks).kind == "delta"
        saver.wait_until_finished()
        found = saver.restore_latest(state)
    assert found is not None
    restored = found.state["tables"]["t"]
    assert restored.dtype == table.dtype
    assert np.asarray(restored).tobytes() == np.asarray(state["tables"]["t"]).tobytes()


def test_another_sharding_at_restore_changes_no_bit(tmp_path):
    """Trap 11."""
    devices = jax.devices()
    if len(devices) < 8:
        pytest.skip("eight devices are needed")
    mesh = jax.sharding.Mesh(np.array(devices[:8]).reshape(4, 2), ("x", "y"))
    specs = [
        jax.sharding.PartitionSpec("x"),
        jax.sharding.PartitionSpec(None, "y"),
        jax.sharding.PartitionSpec("x", "y"),
        jax.sharding.PartitionSpec(),
    ]
    table = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)), jnp.float32)
    slot = jnp.arange(64.0)
    tables = deltackpt.Tables(select="t", slots={"t": {"s": "s"}})
    for number, spec in enumerate(specs):
        root = tmp_path / str(number)
        rows = jax.sharding.PartitionSpec(*spec[:1])
        placed = {
            "t": jax.device_put(table, jax.sharding.NamedSharding(mesh, spec)),
            "s": jax.device_put(slot, jax.sharding.NamedSharding(mesh, rows)),
        }
        marks = touched.init({"t": placed["t"]})
        with deltackpt.CheckpointManager(root, handlers={"embeddings": tables}) as saver:
            saver.save(1, placed, touched=marks)
            ids = jnp.array([1, 17, 40])
            moved = {"t": placed["t"].at[ids].add(1.0), "s": placed["s"].at[ids].add(1.0)}
            assert saver.save(2, moved, touched=touched.mark(marks, {"t": ids})).kind == "delta"
            saver.wait_until_finished()
            for other in specs:
                sharding = jax.sharding.NamedSharding(mesh, other)
                by_rows = jax.sharding.PartitionSpec(*other[:1])
                like = {
                    "t": jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=sharding),
                    "s": jax.ShapeDtypeStruct(
                        slot.shape,
                        slot.dtype,
                        sharding=jax.sharding.NamedSharding(mesh, by_rows),
                    ),
                }
                found = saver.restore(2, like)
                assert found.state["t"].sharding.is_equivalent_to(sharding, 2)
                for name in moved:
                    left, right = np.asarray(found.state[name]), np.asarray(moved[name])
                    assert left.tobytes() == right.tobytes(), (spec, other, name)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_retention_never_deletes_a_base_that_a_kept_delta_needs(tmp_path, kept):
    """Trap 12."""
    state = model.initial()
    marks = model.new_touched(state)
    states = {}
    policy = deltackpt.policies.Consecutive(max_chain=4)
    with manager(tmp_path, max_to_keep=kept, policy=policy) as saver:
        for number in range(1, 13):
            saver.save(number, state, touched=marks)
            states[number] = state
            saver.wait_until_finished()
            for step in saver.all_steps():
                found = saver.restore(step, state) if number == 12 else None
                assert found is None or set(found.chain) <= set(saver.all_steps())
                if found is not None:
                    model.assert_same(found.state, states[step])
            state, marks = model.train(state, marks, number)
        assert saver.all_steps()[-kept:] == list(range(13 - kept, 13))
        assert 1 not in saver.all_steps()


def test_a_copied_directory_restores_from_its_new_place(tmp_path):
    """Trap 13: nothing holds an absolute path."""
    state = model.initial()
    marks = model.new_touched(state)
    with manager(tmp_path / "old") as saver:
        for number in range(1, 4):
            saver.save(number, state, touched=marks)
            expected = state
            state, marks = model.train(state, marks, number)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    shutil.rmtree(tmp_path / "old")
    found = newest(tmp_path / "new", expected)
    assert found.chain == (1, 2, 3)
    model.assert_same(found.state, expected)
    for path in (tmp_path / "new").rglob("*"):
        assert not path.is_file() or str(tmp_path / "old").encode() not in path.read_bytes(), path


def test_an_unreadable_object_is_named_and_the_step_before_restores(tmp_path):
    """Trap 15: a directory in place of a file is unreadable for every user."""
    state = model.initial()
    marks = model.new_touched(state)
    with manager(tmp_path) as saver:
        saver.save(1, state, touched=marks)
        first = state
        state, marks = model.train(state, marks, 1)
        saver.save(2, state, touched=marks)
    victim = stored_chunks(tmp_path / "2")[0].path
    victim.unlink()
    victim.mkdir()
    with manager(tmp_path, access="read") as reader:
        with pytest.raises(Damaged, match="2/embeddings/layer.0: "):
            reader.restore(2, state)
        with pytest.warns(UserWarning, match="2/embeddings/layer.0: "):
            found = reader.restore_latest(state)
    assert found is not None and found.step == 1
    model.assert_same(found.state, first)


def test_an_exhausted_clock_causes_bases_and_is_reported(tmp_path):
    """Trap 16: the manager's side."""
    state = model.initial()
    marks = model.new_touched(state)._replace(clock=jnp.int32(touched.CLOCK_MAX - 1))
    with manager(tmp_path) as saver:
        saver.save(1, state, touched=marks)
        state, marks = model.train(state, marks, 1)
        state, marks = model.train(state, marks, 2)
        saved = saver.save(2, state, touched=marks)
        assert saved.kind == "base" and "clock" in saved.reason
        saver.wait_until_finished()
    model.assert_same(newest(tmp_path, state).state, state)


def test_rows_touched_between_snapshot_and_commit_are_in_the_next_delta(tmp_path):
    """Trap 17: marking continues while a save is paused."""
    state = model.initial()
    marks = model.new_touched(state)
    with manager(tmp_path) as saver:
        saver.save(1, state, touched=marks)
        saver.wait_until_finished()
        state, marks = model.train(state, marks, 1)
        with paused_saves(tmp_path) as held:
            saver.save(2, state, touched=marks)
            assert held.reached.wait(60)
            second = state
            state, marks = model.train(state, marks, 2)
            held.release()
            saver.wait_until_finished()
        model.assert_same(newest(tmp_path, second).state, second)
        state, marks = model.train(state, marks, 3)
        assert saver.save(3, state, touched=marks).kind == "delta"
        saver.wait_until_finished()
    model.assert_same(newest(tmp_path, state).state, state)


def test_a_grown_table_causes_a_base_with_a_reason(tmp_path):
    """Trap 18."""
    tables = {"embeddings": deltackpt.Tables(select="tables/*")}
    state = {"tables": {"t": jnp.ones((10, 4))}}
    marks = touched.init({"tables/t": state["tables"]["t"]})
    with deltackpt.CheckpointManager(tmp_path, handlers=tables) as saver:
        saver.save(1, state, touched=marks)
        grown = {"tables": {"t": jnp.concatenate([state["tables"]["t"], jnp.zeros((5, 4))])}}
        marks = touched.init({"tables/t": grown["tables"]["t"]})
        saved = saver.save(2, grown, touched=marks)
        assert saved.kind == "base" and "tables" in saved.reason
        saver.wait_until_finished()
        found = saver.restore_latest(grown)
    assert found is not None
    assert np.array_equal(found.state["tables"]["t"], grown["tables"]["t"])


def test_without_an_intact_step_the_error_reports_what_is_wrong_with_the_newest(tmp_path):
    state = model.initial()
    with manager(tmp_path) as saver:
        saver.save(1, state)
    next((tmp_path / "1").glob("embeddings/manifest.0.msgpack")).write_bytes(b"")
    with (
        manager(tmp_path, access="read") as reader,
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(NoIntactStep, match="found none among 1 step: .*manifest"),
    ):
        reader.restore_latest(state)
