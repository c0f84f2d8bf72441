# SPDX-License-Identifier: Apache-2.0
"""A run whose deltas have dense leaves as blocks, exact and lossy: written, read, compacted."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import deltackpt
from deltackpt import inspect
from deltackpt.maintenance import compact

HANDLERS = {"embeddings": deltackpt.Tables(select="emb")}
CODECS = {"params/w": "ef4", "params/v": "ef8", "nu": "int8"}
STEPS = (1, 2, 3, 4, 5)


def options(**how) -> deltackpt.ManagerOptions:
    dense = deltackpt.Dense(deltas="blocks", codec=CODECS)
    writes = deltackpt.WriteOptions(durability="process")
    return deltackpt.ManagerOptions(dense=dense, writes=writes, **how)


def initial() -> dict:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    return {
        "emb": normal(50, 8),
        "params": {
            "w": normal(60, 70),
            "v": normal(40, 50),
            "exact": normal(33, 47),
            "half": normal(64, 100).astype(jnp.bfloat16),
            "bias": normal(70),
        },
        "frozen": normal(100, 30),
        "nu": jnp.abs(normal(60, 70)),
        "ids": jnp.arange(5000),
        "count": jnp.zeros((), jnp.int32),
        "key": jax.random.key(7),
        "name": "a text",
        "nothing": None,
    }


def trained(state: dict, step: int) -> dict:
    """The state after a step that leaves ``frozen`` and most bits of ``half`` unchanged."""
    rng = np.random.default_rng(step)
    params = dict(state["params"])
    for name in ("w", "v", "exact"):
        params[name] = params[name] + 1e-3 * rng.normal(size=params[name].shape).astype(np.float32)
    half = np.array(params["half"])
    half.reshape(-1)[rng.integers(0, half.size, 60)] += 0.25
    params["half"] = jnp.asarray(half)
    return {
        **state,
        "params": params,
        "nu": state["nu"] * 0.99,
        "ids": state["ids"].at[step].add(1),
        "count": state["count"] + 1,
        "key": jax.random.fold_in(state["key"], step),
        "emb": state["emb"].at[step].add(1.0),
    }


def marked(touched, step: int):
    return deltackpt.touched.mark(touched, {"emb": jnp.array([step])})


def write(root: Path, steps=STEPS, state=None, **how) -> dict[int, dict]:
    """Saves a base and deltas; returns the state of each step."""
    state = initial() if state is None else state
    touched = deltackpt.touched.init({"emb": state["emb"]})
    found = {}
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options(**how)) as one:
        for step in steps:
            one.save(step, state, touched=touched)
            one.wait_until_finished()
            found[step] = state
            state = trained(state, step)
            touched = marked(touched, step)
    return found


@pytest.fixture(scope="module")
def written_once(tmp_path_factory):
    root = tmp_path_factory.mktemp("written") / "run"
    return root, write(root)


@pytest.fixture
def written(written_once, tmp_path):
    """A base and four deltas, and the saved states."""
    root, states = written_once
    shutil.copytree(root, tmp_path / "run")
    return tmp_path / "run", states


def bits(tree) -> list[bytes]:
    def of(leaf) -> bytes:
        if isinstance(leaf, str):
            return leaf.encode()
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf).tobytes()

    return [of(leaf) for leaf in jax.tree.leaves(tree)]


def restored(root: Path, step: int, template=None) -> list[bytes]:
    how = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=how) as one:
        return bits(one.restore(step, template).state)


def chain(root: Path, step: int) -> list[str]:
    return [*inspect.open(root).at(step).reads]


def run_compaction(root: Path, step: int, **how):
    return compact.compact(root, step=step, **{"memory_bytes": 64 << 20, **how})


def _as_numpy(leaf) -> ocp.RestoreArgs:
    kind = np.ndarray if isinstance(leaf, ocp.metadata.ArrayMetadata) else None
    return ocp.RestoreArgs(restore_type=kind)


def by_orbax(path: Path):
    """A pytree as stock Orbax reads it, as numpy arrays."""
    with ocp.PyTreeCheckpointer() as one:
        kinds = one.metadata(path).item_metadata.tree
        args = jax.tree.map(_as_numpy, kinds)
        return one.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))
