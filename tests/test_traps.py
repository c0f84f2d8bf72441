# SPDX-License-Identifier: Apache-2.0
"""The known traps of incremental checkpoints, each named after the promise that avoids it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest
from flat_options import manager_options

import deltackpt
from deltackpt import touched
from deltackpt.errors import Damaged
from deltackpt.testing import paused_saves, stored_chunks

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}


def manager(root: Path, **options) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(root, handlers=HANDLERS, options=manager_options(**options))


def newest(root: Path, like: dict) -> deltackpt.Restored:
    with manager(root, access="read") as reader:
        found = reader.restore_latest(like)
    assert found is not None
    return found


def test_tables_slots_and_dense_leaves_are_of_one_moment(tmp_path):
    """Trap 3: the next steps run, and donate, while the save is written."""
    state, marks = model.start()

    @jax.jit
    def copied(tree):
        return jax.tree.map(jnp.copy, tree)

    step = jax.jit(
        lambda tables, slots: jax.tree.map(lambda leaf: leaf + 1, (tables, slots)),
        donate_argnums=(0, 1),
    )
    with manager(tmp_path) as saver:
        model.commit(saver, 1, state, touched=marks)
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


def test_an_unreadable_object_is_named_and_the_step_before_restores(tmp_path):
    """Trap 15: a directory in place of a file is unreadable for every user."""
    state, marks = model.start()
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


def test_rows_touched_between_snapshot_and_commit_are_in_the_next_delta(tmp_path):
    """Trap 17: marking continues while a save is paused."""
    state, marks = model.start()
    with manager(tmp_path) as saver:
        model.commit(saver, 1, state, touched=marks)
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
    model.assert_same(newest(tmp_path, state).state, state)
