# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoint directories and the restored state of each step: ``make_runs.py OUT``.

It needs jax and Orbax; the tests beside it read its output without either. For each directory
``OUT/<name>/steps`` it writes ``OUT/<name>/<step>.npz``: the bytes of each array of the restored
state as uint8, by path. ``<step>.json`` has their shapes and dtypes, and everything else.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import model
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp_v1
from golden import make_golden

import deltackpt
from deltackpt import codecs
from deltackpt.maintenance import compact

STEPS = 4


def main(out: Path) -> None:
    every_kind_of_leaf(out / "kinds")
    every_codec(out / "codecs")
    trained(out / "one-shot", policy=deltackpt.policies.OneShot())
    trained(out / "intermittent", policy=deltackpt.policies.Intermittent())
    trained(out / "always", always=("accumulator",))
    trained(out / "compacted")
    compact.compact(out / "compacted" / "steps", step=STEPS - 2, memory_bytes=64 << 20)
    for version in sorted(Path(make_golden.__file__).parent.glob("*v1")):
        if not (version / str(make_golden.STEPS[0])).is_dir():
            continue  # what a bucket holds, or extents: tests/test_journal.py, test_extents.py
        root = out / f"golden-{version.name}" / "steps"
        shutil.copytree(version, root)
        write_expected(root, make_golden.HANDLERS)
    stock(out / "stock")


def every_codec(out: Path) -> None:
    """A table for each codec, in deltas, and for some codecs in bases."""
    rng = np.random.default_rng(0)
    state = {name: rng.normal(size=(40, 16)).astype(np.float32) for name in codecs.names()}
    chosen = {
        name: deltackpt.policies.CodecChoice(delta=name, base="raw" if number % 2 else name)
        for number, name in enumerate(state)
    }
    handlers = {"embeddings": deltackpt.Tables(select="*", codec=chosen)}
    touched = deltackpt.touched.init(state)
    root = out / "steps"
    with deltackpt.CheckpointManager(root, handlers=handlers) as manager:
        for step in range(3):
            manager.save(step, state, touched=touched)
            manager.wait_until_finished()
            rows = np.arange(step, 40, 2 + step)
            state = {name: table.copy() for name, table in state.items()}
            for table in state.values():
                table[rows] = rng.normal(size=(len(rows), 16))
            # A row that has no code is stored beside the codes.
            state["int4"][rows[0]] = np.nan
            touched = deltackpt.touched.mark(touched, dict.fromkeys(state, jnp.asarray(rows)))
    write_expected(root, handlers)


def trained(out: Path, *, always=(), policy=None) -> None:
    """A few steps of the tests' model."""
    chosen = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS, always=always)
    handlers = {"embeddings": chosen}
    root, state = out / "steps", model.initial()
    touched = model.new_touched(state)
    with deltackpt.CheckpointManager(
        root,
        handlers=handlers,
        options=deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(policy=policy or deltackpt.policies.Consecutive()),
            writes=deltackpt.WriteOptions(durability="process"),
        ),
    ) as manager:
        for step in range(STEPS):
            manager.save(step, state, touched=touched)
            manager.wait_until_finished()
            state, touched = model.train(state, touched, step, rows=90)
    write_expected(root, handlers)


def every_kind_of_leaf(out: Path) -> None:
    """Tables of several dtypes, and dense leaves of every kind that a state may hold."""
    rng = np.random.default_rng(0)
    state = {
        "tables": {
            "half": jnp.asarray(rng.normal(size=(50, 4)), jnp.bfloat16),
            "counts": jnp.arange(150, dtype=jnp.int32).reshape(50, 3),
            "flat": jnp.arange(30, dtype=jnp.float32),
            "phases": jnp.arange(60, dtype=jnp.complex64).reshape(30, 2) * 1j,
            "cube": jnp.asarray(rng.normal(size=(20, 3, 2)), jnp.float32),
        },
        "dense": {
            "bf16": jnp.ones((3, 2), jnp.bfloat16) * 1.5,
            "fp8": jnp.arange(4, dtype=jnp.float32).astype(jnp.float8_e4m3fn),
            "int4": jnp.arange(-3, 4, dtype=jnp.int4),
            "bool": jnp.array([True, False]),
            "complex": jnp.ones(2, jnp.complex64) * 1j,
            "host": rng.normal(size=(300, 40)).astype(np.float32),
            "big": jnp.asarray(rng.normal(size=(1200, 1000)), jnp.float32),
            "zeros": jnp.zeros((8, 8)),
            "numpy scalar": np.float32(2.5),
            "no axes": jnp.float32(7),
            "no elements": jnp.zeros((0, 3)),
            "none": None,
            "text": "as it is",
            "whole": 3,
            "real": 2.5,
            "yes": True,
            "empty dict": {},
            "list": [jnp.arange(3), {"a/b.c%": jnp.ones(2)}],
            "tuple": (1, 2),
            "key": jax.random.key(1),
            "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3),
        },
    }
    handlers = {"embeddings": deltackpt.Tables(select="tables/*")}
    touched = deltackpt.touched.init({f"tables/{k}": v for k, v in state["tables"].items()})
    root = out / "steps"
    with deltackpt.CheckpointManager(root, handlers=handlers) as manager:
        for step in range(3):
            manager.save(step, state, touched=touched)
            manager.wait_until_finished()
            rows = jnp.arange(step, 20, 3)
            tables = {name: t.at[rows].add(1) for name, t in state["tables"].items()}
            state = {**state, "tables": tables}
            touched = deltackpt.touched.mark(touched, {f"tables/{name}": rows for name in tables})
    write_expected(root, handlers)


def stock(out: Path) -> None:
    """A step that stock Orbax committed, with our item beside an Orbax PyTree."""
    root, state = out / "steps", model.initial()
    handlers = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}
    piece = {key: state[key] for key in ("tables", "slots")}
    split = deltackpt.handlers.split(piece, handlers["embeddings"])
    registry = ocp_v1.handlers.local_registry(include_global_registry=True)
    registry.add(deltackpt.handlers.DeltaCheckpointableHandler)
    root.mkdir(parents=True)
    context = ocp_v1.Context(
        checkpointables_options=ocp_v1.options.CheckpointablesOptions(registry=registry)
    )
    with context:
        ocp_v1.save_checkpointables(
            root / "0",
            {"embeddings": deltackpt.handlers.Embeddings(split=split), "pytree": state["dense"]},
        )
    arrays = {
        "tables": {n: np.asarray(t) for n, t in state["tables"].items()},
        "slots": {n: np.asarray(t) for n, t in state["slots"].items()},
    }
    write_step(out, 0, arrays)


def write_expected(root: Path, handlers: dict) -> None:
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(root, handlers=handlers, options=options) as manager:
        for step in manager.all_steps():
            write_step(root.parent, step, manager.restore(step).state)


def write_step(out: Path, step: int, state: Any) -> None:
    arrays: dict[str, np.ndarray] = {}
    others: dict[str, Any] = {}

    def visit(name: str, node: Any) -> None:
        if isinstance(node, (dict, list)) and node:
            items = node.items() if isinstance(node, dict) else enumerate(node)
            for key, child in items:
                visit(f"{name}/{key}" if name else str(key), child)
        elif isinstance(node, (jax.Array, np.ndarray, np.generic)):
            if jax.dtypes.issubdtype(node.dtype, jax.dtypes.prng_key):
                node = jax.random.key_data(node)
            array = np.asarray(node)
            others[name] = {"shape": array.shape, "dtype": array.dtype.name}
            arrays[name] = np.frombuffer(array.tobytes(), np.uint8)
        else:
            others[name] = {"value": node}

    visit("", state)
    np.savez(out / f"{step}.npz", **{f"at:{name}": array for name, array in arrays.items()})
    (out / f"{step}.json").write_text(json.dumps(others))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
