# SPDX-License-Identifier: Apache-2.0
"""Leaves encoded on devices decode to the values that the devices keep, bit for bit."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltackpt
from deltackpt.codecs import block_codecs
from deltackpt.format.row_blocks import BLOCK
from deltackpt.resources.runtime import Runtime
from deltackpt.save import capture, device_blocks
from deltackpt.save.block_codes import encode_leaf

POOL = Runtime(2)
DTYPES = ("float32", "bfloat16", "float16")


def blocks(seed: int, dtype: str, scale: float = 1.0, count: int = 37) -> np.ndarray:
    """Values of many magnitudes, with zeros of both signs."""
    random = np.random.default_rng(seed)
    found = random.standard_normal((count, BLOCK)) * scale
    found *= np.exp2(random.integers(-12, 3, (count, 1)))
    found[random.random(found.shape) < 0.02] = 0.0
    found[random.random(found.shape) < 0.02] = -0.0
    return found.astype(jnp.dtype(dtype))


def decoded(coded: object, reference: np.ndarray) -> np.ndarray:
    """Decodes the pieces, as a reader does."""
    out = reference.copy()
    for piece in coded.pieces:
        block_codecs.get(piece.codec).decode(piece.arrays, piece.blocks, out)
    return out


def same_bits(one: object, other: object) -> bool:
    """Whether two arrays have the same bits."""
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", ["ef4", "ef8"])
@given(seed=st.integers(0, 1 << 32), size=st.sampled_from([1e-30, 1e-9, 1e-4, 0.1, 30.0]))
def test_a_reader_decodes_what_the_device_keeps(
    codec: str, dtype: str, seed: int, size: float
) -> None:
    before = blocks(seed, dtype)
    now = (before.astype(np.float32) + blocks(seed + 1, "float32", size)).astype(before.dtype)
    now[3] = before[3]
    found = device_blocks.encode_leaf_there(
        jnp.asarray(now), jnp.asarray(before), codec, None, POOL
    )
    assert same_bits(decoded(found, before), found.decoded)
    assert all(3 not in piece.blocks for piece in found.pieces)
    missed = np.asarray(found.decoded, np.float64) - now.astype(np.float64)
    norm = np.linalg.norm(now.astype(np.float64))
    assert found.error == pytest.approx(np.linalg.norm(missed) / norm, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_a_device_may_flush_to_zero_are_exact(dtype: str) -> None:
    before, now = blocks(1, dtype), blocks(2, dtype)
    tiny = {"float32": 1e-42, "bfloat16": 1e-39, "float16": 3e-7}[dtype]
    before[0, 7] = now[1, 8] = tiny
    now[2, 9], now[4, 1], before[5, 2] = np.nan, np.inf, np.nan
    found = device_blocks.encode_leaf_there(
        jnp.asarray(now), jnp.asarray(before), "ef8", None, POOL
    )
    kept = decoded(found, before)
    assert same_bits(kept, found.decoded)
    assert same_bits(kept[[2, 4, 5]], now[[2, 4, 5]])
    if dtype == "float32":
        assert same_bits(kept[0], now[0])


def test_a_leaf_over_its_error_budget_gets_a_wider_codec_then_lossless() -> None:
    before, now = blocks(1, "float32"), blocks(2, "float32")
    wide = device_blocks.encode_leaf_there(jnp.asarray(now), jnp.asarray(before), "ef4", 0.02, POOL)
    assert wide.codec == "ef8" and "ef4 would change it" in wide.reason
    exact = device_blocks.encode_leaf_there(jnp.asarray(now), jnp.asarray(before), "ef4", 0.0, POOL)
    assert exact.codec == "lossless" and same_bits(decoded(exact, before), now)
    assert same_bits(exact.decoded, now)
    alone = device_blocks.encode_leaf_there(jnp.asarray(now), None, "ef4", None, POOL)
    assert alone.codec == "lossless" and same_bits(decoded(alone, np.zeros_like(now)), now)


def test_all_positive_values_stay_positive_with_any_codec() -> None:
    random = np.random.default_rng(5)
    before = (1e-2 * random.uniform(0.5, 2, (40, BLOCK))).astype(np.float32)
    now = (before * random.uniform(1e-6, 1e-4, before.shape)).astype(np.float32)
    # Large enough that the l2 error of the other values is within the budget.
    before[:, 0] = now[:, 0] = 10.0
    for codec in ("ef4", "int8"):
        found = encode_leaf(now, before, codec, 0.05, POOL)
        assert found.codec == "log8" and f"{codec} would make" in found.reason
        assert (found.decoded > 0).all()
        loose = encode_leaf(now, before, codec, None, POOL)
        assert loose.codec == codec and (loose.decoded <= 0).any()
    there = device_blocks.encode_leaf_there(
        jnp.asarray(now), jnp.asarray(before), "ef4", 0.05, POOL
    )
    assert there.codec == "log8" and "ef4 would make" in there.reason
    assert isinstance(there.decoded, jax.Array)
    assert same_bits(decoded(there, before), there.decoded)


def test_a_nan_does_not_hide_the_loss_of_other_values() -> None:
    now = np.full((40, BLOCK), 1e-6, np.float32)
    now[:, 0], now[3, 7] = 10.0, np.nan
    before = np.zeros_like(now)
    found = encode_leaf(now, before, "ef4", 0.05, POOL)
    there = device_blocks.encode_leaf_there(
        jnp.asarray(now), jnp.asarray(before), "ef4", 0.05, POOL
    )
    for leaf in (found, there):
        assert leaf.codec == "log8" and "ef4 would make" in leaf.reason
        assert np.count_nonzero(np.asarray(leaf.decoded) > 0) == now.size - 1
        assert np.isnan(np.asarray(leaf.decoded)[3, 7])


def test_a_captured_copy_outlives_its_array() -> None:
    source = jnp.arange(3 * 700, dtype=jnp.float32).reshape(3, 700)
    taken = device_blocks.capture(source, (slice(1, 3), slice(None)))
    source.delete()
    flat = np.asarray(taken).reshape(-1)
    assert taken.shape == (6, BLOCK)
    assert (flat[:1400] == np.arange(700, 2100)).all() and not flat[1400:].any()
    assert isinstance(taken, jax.Array)


@pytest.mark.parametrize("codec", ["ef4", "ef8"])
def test_a_state_on_devices_restores_to_what_they_keep(tmp_path: Path, codec: str) -> None:
    """Simulates an accelerator: only codes reach the host; a chain restores bit for bit."""
    random = np.random.default_rng(7)
    state = {
        "emb": jnp.zeros((8, 4)),
        "w": jnp.asarray(random.standard_normal((40, 130)), jnp.float32),
        "h": jnp.asarray(random.standard_normal((64, 64)), jnp.bfloat16),
        "count": jnp.zeros((), jnp.int32),
    }
    options = deltackpt.ManagerOptions(
        dense=deltackpt.Dense(deltas="blocks", codec={"w": codec, "h": codec}),
        writes=deltackpt.WriteOptions(durability="process"),
    )
    tables = deltackpt.Tables(select="emb", slots={})
    kept: dict[str, np.ndarray] = {}
    with (
        mock.patch.object(capture, "on_host", lambda array: not isinstance(array, jax.Array)),
        deltackpt.CheckpointManager(
            tmp_path, handlers={"embeddings": tables}, options=options
        ) as manager,
    ):
        touched = deltackpt.touched.init({"emb": state["emb"]})
        for step in range(4):
            noise = random.standard_normal((40, 130)).astype(np.float32)
            state = {**state, "w": state["w"] + 1e-3 * noise, "h": state["h"] * 1.01}
            state["count"] = state["count"] + 1
            manager.save(step, state, touched=touched)
            manager.wait_until_finished()
            keeper = manager._run.dense
            left = keeper.reference_of(manager._run.lineage.newest_committed)
            kept = {key: data for (_, key), data in left.data.items()}
        assert isinstance(kept["w/0.0"], jax.Array) and isinstance(kept["h/0.0"], jax.Array)
        restored = manager.restore(3, state)
    for name in ("w", "h"):
        flat = np.asarray(kept[f"{name}/0.0"]).reshape(-1)[: state[name].size]
        assert same_bits(restored.state[name], flat.reshape(state[name].shape))
        assert not same_bits(restored.state[name], state[name])
    assert int(restored.state["count"]) == 4
