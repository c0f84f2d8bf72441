# SPDX-License-Identifier: Apache-2.0
"""A training state most of which is dense, and what its deltas are to decode to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import model
import numpy as np

import deltackpt
from deltackpt.reading import chains, dense_values, saves
from deltackpt.save import coded_dense

ROWS, WIDTH = 64, 8
HANDLERS = {"embeddings": deltackpt.Tables(select="emb", slots={})}
#: Parameters by their change, moments by themselves; integers, keys and counters stay exact.
LOSSY = {"params/**": "ef4", "nu": "int8", "half": "ef8"}


def initial(seed: int = 0) -> dict[str, Any]:
    """One small table, and dense leaves of many kinds; some are made of many blocks."""
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
    """One step: parameters a little, a few numbers of ``half``, some rows of the table."""
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
    """A training loop: its state, and what it gave to each save."""

    def __init__(self, state: dict[str, Any] | None = None, touched: Any = None):
        self.state = initial() if state is None else state
        self.touched = (
            deltackpt.touched.init({"emb": self.state["emb"]}) if touched is None else touched
        )
        self.states: dict[int, dict[str, Any]] = {}
        self.seed = 0

    def train(self, seed: int | None = None) -> None:
        """One step, marked."""
        self.seed = self.seed + 1 if seed is None else seed
        self.state = move(self.state, self.seed)
        ids = jnp.asarray([self.seed % ROWS])
        self.touched = deltackpt.touched.mark(self.touched, {"emb": ids})

    def save(self, saver: deltackpt.CheckpointManager, step: int, **options) -> deltackpt.Saved:
        """Saves the state and waits."""
        self.states[step] = self.state
        saved = saver.save(step, self.state, touched=self.touched, **options)
        saver.wait()
        return saved

    def steps(self, saver: deltackpt.CheckpointManager, *steps: int) -> list[str]:
        """Trains and saves; the kinds of the saves."""
        kinds = []
        for step in steps:
            self.train()
            kinds.append(self.save(saver, step).kind)
        return kinds


def opened(root: Path, dense: deltackpt.Dense | None = None, **options: Any):
    """A manager whose deltas have dense leaves of their own."""
    policy = options.pop("policy", None)
    handlers = options.pop("handlers", HANDLERS)
    deltas = deltackpt.DeltaOptions(
        **{"policy": policy} if policy is not None else {}, **options.pop("deltas", {})
    )
    return deltackpt.CheckpointManager(
        root,
        handlers=handlers,
        options=deltackpt.ManagerOptions(
            dense=deltackpt.Dense(deltas="own") if dense is None else dense,
            deltas=deltas,
            writes=deltackpt.WriteOptions(durability="process"),
            **options,
        ),
    )


class Encoded:
    """What the deltas of this process decode to, by what their encoder says, in turn."""

    def __init__(self) -> None:
        self.saves: list[dict[tuple[bool, str], bytes]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[Encoded]:
        """Takes down what is encoded meanwhile."""
        real = coded_dense.encode

        def encode(*arguments: Any, **options: Any) -> Any:
            found = real(*arguments, **options)
            values = {}
            for one in found:
                flat = one.decoded.reshape(-1)[: one.taken.count]
                values[one.taken.file, one.taken.key] = flat.tobytes()
            self.saves.append(values)
            return found

        with mock.patch.object(coded_dense, "encode", encode):
            yield self


def stored(root: Path, step: int) -> dict[tuple[bool, str], bytes]:
    """What a step's dense item is read as."""
    found = dense_values.of_step(chains.read_chain(root / str(step)))
    return {
        **{(False, key): bytes(data) for key, data in found.values.items()},
        **{(True, key): bytes(data) for key, data in found.files.items()},
    }


def assert_exact(saver: deltackpt.CheckpointManager, states: dict[int, dict[str, Any]]) -> None:
    """Every step restores bit for bit."""
    for step, state in states.items():
        model.assert_same(saver.restore(step, state).state, state)


def own(root: Path, step: int) -> bool:
    """Whether a step has its dense leaves as blocks."""
    found = saves.read_save(root / str(step)).head.dense_blocks is not None
    assert found != (root / str(step) / "dense").exists()
    return found


def changed_bytes(root: Path, step: int) -> int:
    """Bytes of the arrays of a step's dense blocks."""
    record = saves.read_save(root / str(step)).head.dense_blocks
    assert record is not None
    return record.nbytes
