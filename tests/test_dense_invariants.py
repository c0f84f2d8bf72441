# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of every kind against a model that keeps every state in memory.

Random leaves appear, change slightly, partly or fully, change their dtype, shape, sharding or kind,
and disappear, between saves and WAL records with random codecs and policies. Saves fail, training
restarts with other options, rolls back, looks at older steps and compacts. Fresh and long-lived
readers find the bits that were given; leaves with a lossy codec are within the error budget, and
every reader finds the same bits of them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dense_states import ROWS, WIDTH, opened
from hypothesis import HealthCheck, Phase, given, settings
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import deltackpt
from deltackpt import policies, serving, touched
from deltackpt.errors import SaveFailed
from deltackpt.maintenance import compact, verify
from deltackpt.reading import chains, dense_state
from deltackpt.reading.stored_dense import StoredItem
from deltackpt.testing import failing_saves

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
    return jnp.asarray(data) if where == 2 else spread(data)


def spread(data: np.ndarray) -> jax.Array:
    """On several devices, if the shape allows it."""
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
    elif how < 0.9 and data.ndim == 1:
        # The same number of blocks, or more.
        data = np.concatenate([flat, numbers(rng, (int(rng.integers(1, 300)),), data.dtype)])
    else:
        first = rng.integers(flat.size)
        flat[first : first + 300] = numbers(rng, flat[first : first + 300].shape, data.dtype)
    return placed(rng, data)


def moved(rng: np.random.Generator, state: dict[str, Any]) -> dict[str, Any]:
    found = {"emb": state["emb"]}
    # A save whose leaves are others than its parent's is a base.
    comes_and_goes = "lossless" not in state or rng.random() < 0.2
    for kind in ("lossless", *LOSSY):
        lossy = kind != "lossless"
        leaves = state.get(kind, {})
        found[kind] = {
            name: changed(rng, leaf, lossy)
            for name, leaf in leaves.items()
            if not comes_and_goes or rng.random() < 0.95
        }
        while comes_and_goes and len(found[kind]) < (4 if not lossy else 1):
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


#: Deltas even of leaves that are stored whole.
LIMITS = {"max_chain": 5, "max_delta_ratio": 1e6, "max_restore_ratio": 1e6}
POLICIES = (
    policies.Consecutive(**LIMITS),
    policies.OneShot(**LIMITS),
    policies.Intermittent(**LIMITS),
)
STEPS = 12


class Training:
    """A training loop, and what was given to its manager and restored from it.

    Attributes:
      states: step to the state that was given.
      bits: step to the state as it was first restored.
    """

    def __init__(self, root: Path, seed: int, logged: str, fingerprints: bool):
        self.root, self.rng = root, np.random.default_rng(seed)
        self.logged, self.fingerprints = logged, fingerprints
        self.state: dict[str, Any] = moved(self.rng, {"emb": jnp.ones((ROWS, WIDTH))})
        self.touched = self.new_touched()
        self.states: dict[int, dict[str, Any]] = {}
        self.bits: dict[int, dict[str, Any]] = {}
        #: Whether steps or records above the state may still exist.
        self.is_back = False
        self.open()

    def new_touched(self) -> touched.TouchState | None:
        return None if self.fingerprints else touched.init({"emb": self.state["emb"]})

    def drawn(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def open(self) -> None:
        """Starts a manager with other options."""
        deltas = self.drawn("blocks", "blocks", "whole")
        # A codec that nothing would use is refused.
        encoded = {"codec": CODECS, "max_error": MAX_ERROR}
        dense = deltackpt.Dense(
            deltas=deltas,
            **(encoded if deltas == "blocks" or self.logged == "delta" else {}),
            max_reference_bytes=self.drawn(16 << 30, 16 << 30, 30_000, 1),
        )
        tracking = {"tracking": "fingerprints"} if self.fingerprints else {}
        wal = deltackpt.WalOptions(dense=self.logged)
        policy = self.drawn(*POLICIES)
        self.manager = opened(self.root, dense, policy=policy, wal=wal, deltas=tracking)

    def train(self) -> None:
        state = moved(self.rng, copied(self.state))
        rows = self.rng.integers(0, ROWS, 3)
        self.state = {**state, "emb": state["emb"].at[rows].add(1.0)}
        if self.touched is not None:
            self.touched = touched.mark(self.touched, {"emb": jnp.asarray(rows)})

    def give(self, step: int) -> None:
        """Saves or appends; the arrays on the host are overwritten once the call has returned."""
        kept, how = copied(self.state), self.drawn("save", "save", "append", "append", "fail")
        if how == "append" and step > 1:
            self.manager.append(step, self.state, touched=self.touched)
        elif how == "fail" and step > 1 and not self.is_back:
            self.wait()
            with failing_saves(self.root), pytest.raises(SaveFailed):
                self.manager.save(step, self.state, touched=self.touched)
                self.manager.wait_until_finished()
        else:
            how, force = "save", self.rng.random() < 0.1
            self.manager.save(step, self.state, touched=self.touched, force_base=force)
        for leaf in jax.tree.leaves(self.state):
            if isinstance(leaf, np.ndarray):
                leaf[...] = np.zeros((), leaf.dtype)
        self.state = kept
        if how != "fail":
            self.states[step], self.is_back = kept, False

    def wait(self) -> None:
        self.manager.wait_until_finished()
        self.manager.wait_appended()
        self.check_references()

    def check_references(self) -> None:
        """Checks that what the next delta is relative to is what readers decode."""
        dense = self.manager._run.dense
        for save_id, left in {} if dense is None else dense._kept.items():
            item = StoredItem(chains.read_chain(self.root / str(save_id.step)))
            values = item.read(dense_state.everything).values
            for (is_file, key), data in left.data.items():
                flat = np.asarray(data).reshape(-1)[: left.counts[is_file, key]]
                assert is_file or flat.tobytes() == bytes(values[key]), (save_id, key)

    def read(self, at: Any, template: dict[str, Any], manager: Any = None) -> Any:
        """Restores a step or recovery point; every restore finds the same bits."""
        if manager is None:
            with opened(self.root, access="read") as reader:
                return self.read(at, template, reader)
        found = manager.restore(at, template)
        assert_is(found.state, self.states[found.step])
        first = self.bits.setdefault(found.step, found.state)
        for one, other in zip(jax.tree.leaves(found.state), jax.tree.leaves(first), strict=True):
            assert not hasattr(one, "dtype") or host(one).tobytes() == host(other).tobytes()
        return found

    def adopt(self, found: Any) -> None:
        self.state, self.touched = found.state, None if self.fingerprints else found.touched
        self.is_back = True
        for step in [one for one in self.states if one > found.step]:
            self.states.pop(step)
            self.bits.pop(step, None)

    def go_on(self) -> None:
        """Restarts, rolls back, looks at an older step or compacts, or does none of these."""
        how = self.drawn("nothing", "nothing", "newest", "restart", "back", "look", "compact")
        at = self.drawn(*self.manager.all_steps()[-3:])
        if how == "restart":
            self.manager.close()
            self.open()
        if how in ("newest", "restart"):
            template = jax.tree.map(self.elsewhere(), self.states[max(self.states)])
            found = self.manager.restore_latest(template)
            assert found is not None and found.step == max(self.states) and not found.skipped
            self.adopt(self.read(found.point or found.step, template, self.manager))
        elif how == "back":
            self.adopt(self.read(at, self.states[at], self.manager))
        elif how == "look" and self.touched is not None:
            self.read(at, self.states[at], self.manager)
        elif how == "compact":
            compact.compact(self.root, step=at)

    def elsewhere(self) -> Any:
        """Returns a function that gives a template other placements."""
        place = self.drawn(jnp.asarray, spread)
        return lambda leaf: (
            place(np.asarray(leaf))
            if isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
            else leaf
        )


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(
    max_examples=6, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
)
@given(
    seed=st.integers(0, 1 << 32),
    logged=st.sampled_from(["whole", "delta"]),
    fingerprints=st.sampled_from([False, False, True]),
)
def test_every_reader_finds_what_was_given(seed, logged, fingerprints, tmp_path_factory):
    root = tmp_path_factory.mktemp("root") / "run"
    root.mkdir()
    training = Training(root, seed, logged, fingerprints)
    with serving.follow(root, ["lossless/**", *CODECS], poll_secs=None) as live:
        for step in range(1, STEPS + 1):
            training.train()
            training.give(step)
            if training.rng.random() < 0.7:
                training.wait()
                newest = max(training.states)
                found = training.read(newest, training.states[newest])
                live.advance()
                with live.version() as version:
                    assert version.step == newest
                    assert_shown(version.dense, found.state)
                if step < STEPS:
                    training.go_on()
        training.wait()
        training.manager.close()
    with opened(root, access="read") as reader:
        steps, points = reader.all_steps(), reader.recovery_points()
        assert {*steps} | {point.step for point in points} <= training.states.keys()
        assert max([*steps, *(point.step for point in points)]) == max(training.states)
        for at in [*steps, *points]:
            state = training.states[at if isinstance(at, int) else at.step]
            training.read(at, jax.tree.map(training.elsewhere(), state), reader)
    assert not verify.verify_root(root).problems
