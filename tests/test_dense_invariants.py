# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of every kind against a model that keeps every state in memory.

Random leaves appear, change slightly, partly or fully, change their dtype, shape, sharding or kind,
and disappear, between saves and WAL records with random codecs. Fresh and long-lived readers find
the bits that were given; leaves with a lossy codec are within the error budget.
"""

from __future__ import annotations

import warnings
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import deltackpt
from deltackpt import serving, touched
from deltackpt.upkeep import verify

HANDLERS = {"embeddings": deltackpt.Tables(select="table")}
LOSSY = ("ef4", "ef8", "int8", "log4", "log8")
CODECS = {f"{codec}/*": codec for codec in LOSSY}
FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)
DTYPES = (
    *FLOATS,
    *(np.float64, np.int8, np.uint16, np.int32, np.uint64, bool, ml_dtypes.int4),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
)
#: Around a block of 256 elements, and below the least size for blocks.
SHAPES = ((), (1,), (0, 3), (255,), (16, 16), (257,), (513,), (8, 64), (8, 65), (64, 72))
NAMES = ("w", "a.b", "%", "0", "é", "..", "[x]", "a b")
OTHERS = (None, 3, -(2**40), 0.5, float("nan"), True, "a text", {}, [])
#: Values that arithmetic treats specially.
ODD = (np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38)
MAX_ERROR = 0.05


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Any bits, or values of a distribution with some odd ones among them."""
    dtype = np.dtype(dtype)
    if dtype.name == "bool" or dtype.name.startswith(("int4", "int8")):
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu" or rng.random() < 0.2:
        count = int(np.prod(shape, dtype=int))
        return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape).copy()
    found = rng.normal(size=shape)
    if rng.random() < 0.5:
        found = np.abs(found) * np.exp(rng.normal(size=shape) * rng.choice([1, 5, 20]))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = np.array(found, dtype)
        if found.size and rng.random() < 0.25:
            found.reshape(-1)[rng.integers(found.size)] = rng.choice(ODD)
    return found


def placed(rng: np.random.Generator, data: np.ndarray) -> Any:
    """On the host in some memory order, or on one or several devices."""
    where = rng.integers(5)
    if data.dtype.itemsize == 8 or where == 0:
        return data
    if where == 1:
        return np.asfortranarray(data)
    if where == 2:
        return jnp.asarray(data)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    axes = [axis for axis, size in zip("xy", data.shape, strict=False) if size and size % 8 == 0]
    return jax.device_put(data, NamedSharding(mesh, PartitionSpec(*axes)))


def leaf_of(rng: np.random.Generator, lossy: bool) -> Any:
    if not lossy and rng.random() < 0.25:
        return OTHERS[rng.integers(len(OTHERS))]
    if not lossy and rng.random() < 0.1:
        return jax.random.split(jax.random.key(int(rng.integers(9))), int(rng.integers(1, 200)))
    dtypes = FLOATS if lossy else DTYPES
    shape, dtype = SHAPES[rng.integers(len(SHAPES))], dtypes[rng.integers(len(dtypes))]
    return placed(rng, numbers(rng, shape, dtype))


def changed(rng: np.random.Generator, leaf: Any, lossy: bool) -> Any:
    """The same leaf, another one, or one with some of its elements changed."""
    how = rng.random()
    if how < 0.3:
        return leaf
    is_array = isinstance(leaf, (np.ndarray, jax.Array)) and leaf.size
    if how < 0.4 or not is_array or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf_of(rng, lossy)
    data = np.array(leaf, order="C")
    flat = data.reshape(-1)
    if how < 0.6:
        flat[rng.integers(flat.size)] = numbers(rng, (), data.dtype)
    elif how < 0.8 and jnp.issubdtype(data.dtype, jnp.floating):
        with np.errstate(all="ignore"):
            factor = 1 + 1e-2 * rng.normal(size=flat.size)
            flat[:] = (flat.astype(np.float64) * factor).astype(data.dtype)
    else:
        first = rng.integers(flat.size)
        flat[first : first + 300] = numbers(rng, flat[first : first + 300].shape, data.dtype)
    return placed(rng, data)


def moved(rng: np.random.Generator, state: dict[str, Any]) -> dict[str, Any]:
    found = {"table": state["table"]}
    for kind in ("lossless", *LOSSY):
        lossy = kind != "lossless"
        leaves = state.get(kind, {})
        found[kind] = {
            name: changed(rng, leaf, lossy) for name, leaf in leaves.items() if rng.random() < 0.95
        }
        if len(leaves) < (4 if not lossy else 1):
            found[kind][NAMES[rng.integers(len(NAMES))]] = leaf_of(rng, lossy)
    return found


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, state)


def host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


@np.errstate(all="ignore")
def assert_is(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, have), want in pairs:
        name = jax.tree_util.keystr(path)
        assert isinstance(have, jax.Array) == isinstance(want, jax.Array), name
        if not hasattr(want, "dtype"):
            assert type(have) is type(want) and str(have) == str(want), name
            continue
        assert (have.dtype, have.shape) == (want.dtype, want.shape), name
        have, want = host(have), host(want)
        if have.tobytes() == want.tobytes():
            continue
        assert path[0].key in LOSSY, name
        have, want = have.astype(np.float64), want.astype(np.float64)
        finite = np.isfinite(want)
        assert np.array_equal(have[~finite], want[~finite], equal_nan=True), name
        lost = np.linalg.norm((have - want)[finite])
        assert lost <= MAX_ERROR * (1 + 1e-3) * np.linalg.norm(want[finite]), name
        if not (want < 0).any():
            assert (have[finite & (want > 0)] <= 0).mean() <= 0.011, name


def assert_shown(dense: serving.ServedLeaves, state: dict[str, Any]) -> None:
    """Asserts that a version has all arrays with elements, and no others."""
    wanted = {
        f"{kind}/{name}": host(leaf)
        for kind in ("lossless", *LOSSY)
        for name, leaf in state[kind].items()
        if isinstance(leaf, (np.ndarray, jax.Array, bool, int, float)) and np.size(leaf)
    }
    assert dense.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert (dense[name].dtype, dense[name].shape) == (leaf.dtype, leaf.shape), name
        assert dense[name].tobytes() == leaf.tobytes(), name


@pytest.mark.filterwarnings("ignore:step .*dense leaves are saved whole")
@settings(
    max_examples=4, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
)
@given(
    seed=st.integers(0, 1 << 32),
    policy=st.sampled_from(
        [deltackpt.policies.Consecutive(), deltackpt.policies.Rolling(window=3)]
    ),
    logged=st.sampled_from(["whole", "delta"]),
    room=st.sampled_from([16 << 30, 30_000, 1]),
    skip=st.booleans(),
)
def test_every_reader_finds_what_was_given(seed, policy, logged, room, skip, tmp_path_factory):
    rng = np.random.default_rng(seed)
    root = tmp_path_factory.mktemp("root")
    options = deltackpt.ManagerOptions(
        deltas=deltackpt.DeltaOptions(policy=policy),
        writes=deltackpt.WriteOptions(durability="process"),
        dense=deltackpt.Dense(
            deltas="blocks",
            codec=CODECS,
            max_error=MAX_ERROR,
            max_reference_bytes=room,
            skip_unchanged=skip,
        ),
        wal=deltackpt.WalOptions(dense=logged),
    )
    state: dict[str, Any] = moved(rng, {"table": jnp.ones((40, 2))})
    marks = touched.init({"table": state["table"]})
    live = serving.follow(root, ["lossless/**", *CODECS], poll_secs=None)
    with live, deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
        for step in range(8):
            expected = copied(state)
            if step and rng.random() < 0.5:
                manager.append(step, state, touched=marks)
            else:
                manager.save(step, state, touched=marks)
            for leaf in jax.tree.leaves(state):
                if isinstance(leaf, np.ndarray):
                    leaf[...] = np.zeros((), leaf.dtype)
            state = expected
            if rng.random() < 0.7:
                manager.wait_until_finished()
                manager.wait_appended()
                found = manager.restore_latest(expected)
                assert found is not None and found.step == step
                assert_is(found.state, expected)
                live.advance()
                with live.version() as version:
                    assert version.step == step
                    assert_shown(version.dense, found.state)
                if rng.random() < 0.5:  # Otherwise, training ignores the restore.
                    state, marks = found.state, found.touched
            state = moved(rng, copied(state))
        manager.wait_until_finished()
    assert not verify.verify_root(root).problems
