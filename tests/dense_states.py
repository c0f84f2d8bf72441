# SPDX-License-Identifier: Apache-2.0
"""A mostly dense training state, and the expected contents of its deltas."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import model
import numpy as np
from shown import dense_leaves

import deltackpt
from deltackpt import inspect
from deltackpt.reading import stored_saves

ROWS, WIDTH = 64, 8
HANDLERS = {"embeddings": deltackpt.Tables(select="emb", slots={})}
#: Parameters are encoded as differences, moments as values; integers, keys and counters stay exact.
LOSSY = {"params/**": "ef4", "nu": "int8", "half": "ef8"}


def initial(seed: int = 0) -> dict[str, Any]:
    """One small table, and dense leaves of many kinds; some have many blocks."""
    rng = np.random.default_rng(seed)
    return {
        "emb": jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32),
        "params": {
            "w": jnp.asarray(rng.normal(size=(64, 300)), jnp.float32),
            "frozen": jnp.asarray(rng.normal(size=(40, 256)), jnp.float32),
            "bias": jnp.asarray(rng.normal(size=200), jnp.float32),
        },
        "half": jnp.asarray(rng.normal(size=(30, 1001)), jnp.bfloat16),
        "nu": jnp.asarray(rng.random((64, 300)), jnp.float32),
        "big": jnp.arange(5000, dtype=jnp.int32),
        "bits": jnp.asarray(rng.random(9000) < 0.5),
        "small": jnp.arange(7, dtype=jnp.uint8),
        "count": jnp.int32(0),
        "key": jax.random.key(seed),
        "none": None,
    }


def move(state: dict[str, Any], seed: int) -> dict[str, Any]:
    """One step: changes parameters slightly, a few elements of ``half``, and one table row."""
    rng = np.random.default_rng(1000 + seed)
    half = np.array(state["half"])
    half.reshape(-1)[rng.integers(0, half.size, 60)] += 0.5
    emb = np.array(state["emb"])
    emb[seed % ROWS] += 1
    params = state["params"]
    bits = np.array(state["bits"])
    bits[seed % bits.size] ^= True
    return {
        **state,
        "emb": jnp.asarray(emb),
        "params": {
            **params,
            "w": params["w"] + 1e-3 * rng.normal(size=params["w"].shape).astype("f4"),
            "bias": params["bias"] * 0.99,
        },
        "half": jnp.asarray(half),
        "nu": state["nu"] * 0.99,
        "big": state["big"].at[seed % 5000].add(1),
        "bits": jnp.asarray(bits),
        "count": state["count"] + 1,
        "key": jax.random.fold_in(state["key"], seed),
    }


class Loop:
    """A training loop: its state, and the state passed to each save."""

    def __init__(self, state: dict[str, Any] | None = None, touched: Any = None):
        self.state = initial() if state is None else state
        self.touched = (
            deltackpt.touched.init({"emb": self.state["emb"]}) if touched is None else touched
        )
        self.states: dict[int, dict[str, Any]] = {}
        self.seed = 0

    def train(self, seed: int | None = None) -> None:
        """Runs one step and marks the touched row."""
        self.seed = self.seed + 1 if seed is None else seed
        self.state = move(self.state, self.seed)
        ids = jnp.asarray([self.seed % ROWS])
        self.touched = deltackpt.touched.mark(self.touched, {"emb": ids})

    def save(self, saver: deltackpt.CheckpointManager, step: int, **options) -> deltackpt.Saved:
        """Saves the state and waits."""
        self.states[step] = self.state
        saved = saver.save(step, self.state, touched=self.touched, **options)
        saver.wait_until_finished()
        return saved

    def steps(self, saver: deltackpt.CheckpointManager, *steps: int) -> list[str]:
        """Trains and saves at each step; returns the kinds of the saves."""
        kinds = []
        for step in steps:
            self.train()
            kinds.append(self.save(saver, step).kind)
        return kinds


def opened(root: Path, dense: deltackpt.Dense | None = None, **options: Any):
    """A manager whose deltas store dense leaves as blocks by default."""
    policy = options.pop("policy", None)
    handlers = options.pop("handlers", HANDLERS)
    deltas = deltackpt.DeltaOptions(
        **{"policy": policy} if policy is not None else {}, **options.pop("deltas", {})
    )
    return deltackpt.CheckpointManager(
        root,
        handlers=handlers,
        options=deltackpt.ManagerOptions(
            dense=deltackpt.Dense(deltas="blocks") if dense is None else dense,
            deltas=deltas,
            writes=deltackpt.WriteOptions(durability="process"),
            **options,
        ),
    )


def assert_kept_as_stored(root: Path, loop: Loop, step: int, **options: Any) -> None:
    """Asserts that a trainer's copy of a delta's parent equals what it stored.

    Another trainer that restores the parent therefore writes the same delta.

    Args:
      root: checkpoint directory; it is not changed.
      loop: the loop that saved ``step``.
      step: the delta.
      **options: passed to ``opened``.
    """
    twin, state = root.with_name(f"{root.name}.twin"), loop.states[step]
    shutil.copytree(root, twin, ignore=shutil.ignore_patterns("lease.*"))
    before = inspect.open(root).save_of(step).parent
    assert before is not None
    for later in [one for one in inspect.open(twin).steps if one > before]:
        shutil.rmtree(twin / str(later))
    with opened(twin, **options) as saver:
        found = saver.restore(before, state)
        assert found.touched is not None
        # Mark all rows: the test is about dense leaves only.
        touched = deltackpt.touched.mark(found.touched, {"emb": jnp.arange(ROWS)})
        assert saver.save(step, state, touched=touched).kind == "delta"
    assert dense_leaves(twin, step) == dense_leaves(root, step)
    shutil.rmtree(twin)


def assert_exact(saver: deltackpt.CheckpointManager, states: dict[int, dict[str, Any]]) -> None:
    """Asserts that every step restores bit for bit."""
    for step, state in states.items():
        model.assert_same(saver.restore(step, state).state, state)


def assert_close(saver: deltackpt.CheckpointManager, loop: Loop, steps: list[int]) -> None:
    """Checks that leaves of restored steps that match a glob differ only slightly, others not."""
    for step in steps:
        state = loop.states[step]
        found = saver.restore(step, state).state
        exact = {**found, "nu": state["nu"], "half": state["half"]}
        exact["params"] = {**found["params"], **{n: state["params"][n] for n in ("w", "bias")}}
        lossy = {"nu": found["nu"], "half": found["half"]}
        for one, other in ((found["params"], state["params"]), (lossy, state)):
            for name, leaf in one.items():
                expected = np.asarray(other[name], np.float64)
                difference = np.asarray(leaf, np.float64) - expected
                assert np.linalg.norm(difference) <= 0.05 * np.linalg.norm(expected)
        model.assert_same(exact, state)


def own(root: Path, step: int) -> bool:
    """Whether a step stores its dense leaves as blocks."""
    found = stored_saves.read_save(root / str(step)).head.dense_blocks is not None
    assert found != (root / str(step) / "dense").exists()
    return found


def changed_bytes(root: Path, step: int) -> int:
    """Size in bytes of a step's dense blocks."""
    record = stored_saves.read_save(root / str(step)).head.dense_blocks
    assert record is not None
    return record.nbytes
