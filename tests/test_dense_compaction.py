# SPDX-License-Identifier: Apache-2.0
"""Compaction of chains with dense blocks: one Orbax item, with the same bits."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from damages import HOWS, damage
from dense_runs import (
    HANDLERS,
    STEPS,
    bits,
    by_orbax,
    chain,
    initial,
    marked,
    options,
    restored,
    run_compaction,
    trained,
    write,
    written,
    written_once,
)
from killed_compaction import killed_anywhere
from shown import dense_leaves

import deltackpt
from deltackpt.errors import Damaged, OptionError, RestoreError
from deltackpt.maintenance import compact
from deltackpt.reading import stored_saves
from deltackpt.storage import ocdbt
from deltackpt.testing import Disk, DiskCall

__all__ = ["written", "written_once"]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_compacted_base_has_an_orbax_item_with_the_bits_of_the_chain(written, workers):
    root, states = written
    before = {step: dense_leaves(root, step) for step in STEPS}
    state = {step: restored(root, step, states[step]) for step in STEPS}
    done = run_compaction(root, 4, workers=workers)
    assert done is not None and done.deltas == 3
    assert done.bytes_written > sum(len(value) for value in before[4].values())
    assert chain(root, 4) == ["compacted/4"]
    for step in (1, 2, 3):
        shutil.rmtree(root / str(step))
    for step in (4, 5):
        assert dense_leaves(root, step) == before[step]
        assert restored(root, step, states[step]) == state[step]
    # Stock Orbax reads the item like that of any other step.
    tree = by_orbax(root / "compacted/4/embeddings/dense")
    for name, leaf in tree["params"].items():
        assert leaf.dtype == states[4]["params"][name].dtype
        assert leaf.tobytes() in state[4], name


def test_a_base_is_compacted_in_pieces_that_fit_into_memory(tmp_path):
    root = tmp_path / "run"
    large = {f"large {n}": jnp.full((800, 500), n, jnp.float32) for n in range(3)}
    states = write(root, steps=(1, 2, 3), state={**initial(), **large})
    before, state = dense_leaves(root, 3), restored(root, 3, states[3])
    with pytest.raises(OptionError, match="memory_bytes: expected at least") as refused:
        run_compaction(root, 3, memory_bytes=1)
    [least] = re.findall(r"at least ([\d,]+)", str(refused.value))
    assert run_compaction(root, 3, memory_bytes=int(least.replace(",", "")), workers=1) is not None
    item = root / "compacted/3/embeddings/dense"
    assert (item / "ocdbt.process_1").is_dir(), "several pieces"
    assert dense_leaves(root, 3) == before
    assert restored(root, 3, states[3]) == state
    assert compact.compact(root, step=3) is None


def test_a_compacted_base_is_compacted_again_and_deltas_continue_from_it(written):
    root, states = written
    run_compaction(root, 3)
    for step in (1, 2, 3):
        shutil.rmtree(root / str(step))
    before = dense_leaves(root, 5)
    assert run_compaction(root, 5).deltas == 2
    assert dense_leaves(root, 5) == before
    shutil.rmtree(root / "compacted/3")
    shutil.rmtree(root / "4")
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options()) as one:
        found = one.restore(5, states[5])
        state = trained(found.state, 5)
        saved = one.save(6, state, touched=marked(found.touched, 5))
        one.wait_until_finished()
        assert saved.kind == "delta"
    assert chain(root, 6) == ["compacted/5", "6"]
    record = stored_saves.read_save(root / "6").head.dense_blocks
    assert record is not None
    used = {one.codec for segment in record.segments for one in segment.encodings}
    assert {"ef4", "ef8", "sparse"} <= used, "what the base decodes to is their reference"
    found = restored(root, 6, state)
    assert all(bits(state["params"][name])[0] in found for name in ("exact", "half", "bias"))


def write_items(root: Path) -> dict:
    """Saves a state twice; one leaf requires an Orbax item each time."""
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    state = {**initial(), "odd": jax.device_put(jnp.ones(4), pinned)}
    touched = deltackpt.touched.init({"emb": state["emb"]})
    with deltackpt.CheckpointManager(root, handlers=HANDLERS) as one:
        for step in (1, 2):
            one.save(step, state, touched=touched)
            one.wait_until_finished()
    return state


def test_a_compacted_base_has_no_orbax_item_if_its_deltas_have_one(tmp_path):
    root = tmp_path / "run"
    state = write_items(root)
    assert run_compaction(root, 2) is not None
    assert (root / "2/dense").exists() and not (root / "compacted/2/embeddings/dense").exists()
    assert restored(root, 2, state) == bits(state)


def test_no_delta_continues_from_an_item_that_compaction_removes(tmp_path):
    root = tmp_path / "run"
    state = write_items(root)
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options()) as one:
        found = one.restore(2, state)
        state = {**found.state, "odd": jnp.ones(4)}
        assert one.save(3, trained(state, 2), touched=marked(found.touched, 2)).kind == "delta"
        one.wait_until_finished()
    assert stored_saves.read_save(root / "3").head.dense_blocks is not None
    run_compaction(root, 2)
    before = restored(root, 3, state)
    for step in (1, 2):
        shutil.rmtree(root / str(step))
    assert restored(root, 3, state) == before


def test_two_attempts_at_a_shard_leave_one_item(written):
    root, _ = written
    before = dense_leaves(root, 4)
    planned = compact.plan(root, step=4)
    assert planned is not None
    nbytes = sum(len(value) for value in before.values())
    assert nbytes < planned.dense_bytes < nbytes + 20_000  # With the descriptions.

    def merge_one(_: DiskCall | None = None) -> None:
        compact.merge_shard(planned, 0, memory_bytes=64 << 20)

    with Disk(root) as disk, compact.exclusive(root):
        # Another worker merges the whole shard.
        disk.on("rename", merge_one, f"/{planned.temporary}/0$", times=1)
        merge_one()
        assert disk.paths("rename").count(str(planned.shard_dir(0))) == 2
        assert os.listdir(planned.workspace) == ["0"]
        compact.publish(planned)
    shutil.rmtree(planned.workspace)
    assert dense_leaves(root, 4) == before
    assert chain(root, 4) == ["compacted/4"]


def test_everything_restores_after_a_kill_at_any_call(written):
    root, _ = written
    assert killed_anywhere(root, dense_leaves, every=3).kills > 15
    assert chain(root, 3) == ["compacted/3"]


@pytest.mark.parametrize("how", HOWS)
@mock.patch.object(stored_saves, "_GONE_INTERVAL_SECS", 0.0)
def test_a_damaged_item_of_a_compacted_base_is_skipped_or_an_error(written, how):
    root, _ = written
    before = dense_leaves(root, 4)
    run_compaction(root, 3)
    bare = root.with_name("bare")
    shutil.copytree(root, bare)
    for step in (1, 2):
        shutil.rmtree(bare / str(step))
    item = Path("compacted/3/embeddings/dense")
    for path in sorted(path for path in (root / item).rglob("*") if path.is_file()):
        data = path.read_bytes()
        name = path.relative_to(root)
        for place in (root, bare):
            damage(place / name, how)
        with pytest.warns(UserWarning, match="reading it through compacted/3/embeddings failed"):
            assert dense_leaves(root, 4) == before
        with pytest.raises(RestoreError, match=r"compacted/3/embeddings|parent 2"):
            dense_leaves(bare, 4)
        for place in (root, bare):
            (place / name).write_bytes(data)
    assert dense_leaves(bare, 4) == before


def test_a_step_that_lacks_a_value_of_its_arrays_is_not_compacted(written):
    root, _ = written
    with (
        mock.patch.object(ocdbt, "implied", lambda described: {"other/0"}),
        pytest.raises(Damaged, match="the values of dense leaves that their arrays imply"),
    ):
        run_compaction(root, 3)
    assert chain(root, 3)[0] == "1"
