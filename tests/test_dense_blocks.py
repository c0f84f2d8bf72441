# SPDX-License-Identifier: Apache-2.0
"""Dense leaves as blocks in deltas: every step restores to what was saved."""

from __future__ import annotations

import contextlib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import dense_states
import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest
from dense_states import (
    LOSSY,
    Loop,
    assert_exact,
    changed_bytes,
    opened,
    own,
)

import deltackpt
from deltackpt.errors import OptionError
from deltackpt.format.manifest import SaveId
from deltackpt.format.row_blocks import DenseBlocks
from deltackpt.reading import stored_saves
from deltackpt.resources.runtime import Runtime
from deltackpt.save.block_codes import HASHED_BYTES, Hashes
from deltackpt.save.dense_save import DenseKeeper, DenseValue, codings

POLICIES = {
    "consecutive": deltackpt.policies.Consecutive(max_chain=4),
    "one-shot": deltackpt.policies.OneShot(max_chain=4),
    "intermittent": deltackpt.policies.Intermittent(max_chain=8),
}


@pytest.fixture
def loop() -> Loop:
    return Loop()


def record_of(root: Path, step: int) -> DenseBlocks:
    record = stored_saves.read_save(root / str(step)).head.dense_blocks
    assert record is not None
    return record


def codecs_of(root: Path, step: int, group: str = "*") -> set[str]:
    segments = record_of(root, step).segments
    return {code.codec for one in segments if fnmatch(one.group, group) for code in one.encodings}


def test_a_delta_holds_little_more_than_the_changes(tmp_path, loop):
    with opened(tmp_path) as saver:
        loop.steps(saver, 1, 2)
        w, nu = loop.state["params"]["w"].nbytes, loop.state["nu"].nbytes
        assert changed_bytes(tmp_path, 2) < 1.25 * (w + nu)
        loop.save(saver, 3)
        assert changed_bytes(tmp_path, 3) == 0
        assert_exact(saver, loop.states)


# What changes between saves.


#: Other leaves at each step.
RESHAPED = {
    2: {"extra": jnp.ones((3000,))},
    # The same number of blocks, with more elements; then fewer.
    3: {"extra": jnp.ones((3010,))},
    4: {"extra": jnp.ones((2990,))},
    5: {"extra": jnp.ones((2990,), jnp.bfloat16)},
    6: {"extra": jnp.ones((10, 299), jnp.float32)},
    7: {"extra": {"inner": jnp.ones((10, 299))}, "text": "a"},
    8: {"text": "b", "few": jnp.ones((3,))},
    9: {"few": jnp.ones((3000,))},
    10: {"few": jnp.ones((3,))},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_leaves_come_go_and_change(tmp_path, loop, policy):
    given: dict[int, dict[str, Any]] = {}
    with opened(tmp_path, policy=POLICIES[policy]) as saver:
        for step in range(1, 13):
            loop.train()
            given[step] = {**loop.state, **RESHAPED.get(step, {})}
            model.commit(saver, step, given[step], touched=loop.touched)
        for step, state in given.items():
            found = saver.restore(step, state).state
            assert found.pop("text", None) == state.pop("text", None)
            model.assert_same(found, state)


def test_a_grown_leaf_with_only_its_last_block_changed(tmp_path):
    """Its base has fewer bytes than the delta's value and cannot fill it."""
    grown = jnp.arange(3010, dtype=jnp.float32)
    loop = Loop({**dense_states.initial(), "grows": grown[:3000]})
    with opened(tmp_path) as saver:
        loop.save(saver, 1)
        loop.train()
        loop.state = {**loop.state, "grows": grown}
        assert loop.save(saver, 2).kind == "delta"
        loop.steps(saver, 3)
        assert_exact(saver, loop.states)


@pytest.mark.parametrize("policy", POLICIES)
def test_orbax_writes_leaves_that_we_do_not_support(tmp_path, loop, policy):
    """One delta has a leaf that this writer does not support; then blocks again."""
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    with opened(tmp_path, policy=POLICIES[policy]) as saver:
        loop.steps(saver, 1, 2)
        kept = loop.state
        loop.state = {**kept, "odd": jax.device_put(jnp.ones(4), pinned)}
        with pytest.warns(UserWarning, match="pinned host memory"):
            saved = loop.save(saver, 3)
        loop.state = kept
        loop.steps(saver, 4, 5, 6, 7, 8)
        if saved.kind == "delta":
            assert [own(tmp_path, step) for step in (2, 3, 4)] == [True, False, True]
        assert_exact(saver, loop.states)


# Options.


@pytest.mark.parametrize("name", ["big", "bits", "key", "count"])
def test_a_lossy_glob_that_matches_no_floats_is_rejected_at_the_first_save(tmp_path, loop, name):
    with opened(tmp_path, deltackpt.Dense(deltas="blocks", codec={name: "ef4"})) as saver:
        with pytest.raises(OptionError, match=rf"dense leaf {name}: expected float32, .* for ef4"):
            loop.save(saver, 1)
    with opened(tmp_path) as saver:
        assert saver.all_steps() == []
        loop.steps(saver, 2, 3)
        assert_exact(saver, {step: loop.states[step] for step in (2, 3)})


def test_a_budget_selects_the_next_wider_codec_and_finally_an_exact_one(tmp_path, loop):
    codec = {"params/*": "ef4", "nu": "int8"}
    with opened(tmp_path, deltackpt.Dense(deltas="blocks", codec=codec, max_error=0.0)) as saver:
        assert loop.steps(saver, 1, 2, 3)[1:] == ["delta", "delta"]
        assert_exact(saver, loop.states)
    assert "ef4" not in codecs_of(tmp_path, 3, "float32")


# Memory.


@pytest.mark.parametrize(("most", "codecs"), [(1 << 30, {"ef4", "ef8", "int8"}), (1, {"int8"})])
def test_without_room_for_references_difference_codecs_become_lossless(
    tmp_path, loop, most, codecs
):
    dense = deltackpt.Dense(deltas="blocks", codec=LOSSY, max_reference_bytes=most)
    with opened(tmp_path, dense) as saver:
        assert loop.steps(saver, 1, 2, 3)[1:] == ["delta", "delta"]
    assert codecs_of(tmp_path, 3) & {*LOSSY.values()} == codecs


def test_without_room_a_frozen_leaf_is_detected_by_its_hashes(tmp_path):
    loop = Loop({**dense_states.initial(), "backbone": jnp.arange(1 << 20, dtype=jnp.float32)})
    with opened(tmp_path, deltackpt.Dense(deltas="blocks", max_reference_bytes=1)) as saver:
        loop.steps(saver, 1, 2)
        rest = sum(leaf.nbytes for leaf in jax.tree.leaves(loop.state)) - (4 << 20)
        assert changed_bytes(tmp_path, 2) < 1.2 * rest
        loop.state = {**loop.state, "backbone": loop.state["backbone"].at[500_000].add(1)}
        loop.steps(saver, 3)
        more = changed_bytes(tmp_path, 3) - changed_bytes(tmp_path, 2)
        assert HASHED_BYTES * 0.9 < more < HASHED_BYTES * 1.1
        assert_exact(saver, loop.states)


@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.float32, np.float64])
def test_hashes_detect_which_64_kib_changed(dtype):
    blocks = np.zeros((700, 256), dtype)
    hashes, per_span = Hashes.from_bytes(blocks), HASHED_BYTES // (256 * blocks.itemsize)
    assert hashes.changed(blocks) == []
    blocks[per_span, 7] = 1
    assert hashes.changed(blocks) == [range(per_span, min(700, 2 * per_span))]
    assert hashes.changed(blocks[:600]) == [range(600)]


@pytest.mark.parametrize("policy", ["consecutive", "one-shot"])
def test_only_the_reference_of_the_next_delta_is_kept(tmp_path, loop, policy):
    """One copy for every policy; with two, a limit could drop the one that is needed."""
    with opened(tmp_path, policy=POLICIES[policy]) as saver:
        loop.steps(saver, 1)
        keeper = saver._run.dense
        alone = keeper.nbytes
        loop.steps(saver, 2, 3)
        assert keeper.nbytes == alone and saver._run.dense is keeper


def test_several_managers_in_one_process_are_independent(tmp_path):
    loops = [Loop(dense_states.initial(seed)) for seed in range(3)]
    with contextlib.ExitStack() as stack:
        savers = [stack.enter_context(opened(tmp_path / str(n))) for n in range(3)]
        for step in (1, 2, 3):
            for loop, saver in zip(loops, savers, strict=True):
                loop.train()
                loop.states[step] = loop.state
                saver.save(step, loop.state, touched=loop.touched)
        for loop, saver in zip(loops, savers, strict=True):
            saver.wait_until_finished()
            assert_exact(saver, loop.states)


def test_the_reference_of_a_save_that_is_restored_again_is_given_back():
    save_id = SaveId("a" * 32, 3, 1)
    with Runtime(1) as runtime:
        coding_of = codings("lossless", None)
        keeper = DenseKeeper(coding_of, runtime, max_reference_bytes=1 << 24)
        memory = keeper.runtime.memory
        for _ in range(3):
            kept = memory.allocate((1024, 256), np.dtype(np.float32))
            shared = memory.allocate((1024, 256), np.dtype(np.float32))
            one, other = (
                DenseValue(key, "float32", kept, kept.shape, kept.dtype) for key in ("a", "b")
            )
            for _ in range(2):
                keeper.keep(save_id, [one, other], [kept, shared])
            assert len(memory._lent) == 2
            keeper.keep(save_id, [other], [shared])
            assert len(memory._lent) == 1
        keeper.failed(save_id)
        assert not memory._lent
