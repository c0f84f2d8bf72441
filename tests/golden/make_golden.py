# SPDX-License-Identifier: Apache-2.0
"""Writes the golden checkpoints of the current format version: once, never again.

Run ``python tests/golden/make_golden.py`` after a change of ``FORMAT_VERSION``, and commit what it
writes beside the earlier versions, which every later deltackpt goes on reading. ``v<n>`` holds
states that a formula gives; ``encodings-v<n>`` what codecs made of them, and the digests of what is
decoded: encoders may improve, decoding may not change.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import deltackpt
from deltackpt import layout, manifest

HERE = Path(__file__).parent
STEPS = (10, 20, 30)


def handlers(**codecs: Any) -> dict[str, deltackpt.Tables]:
    """The golden tables by some codecs."""
    slots = {
        "tables/users": {"accumulator": "slots/users", "rows": "always/users"},
        "tables/items": {"accumulator": "slots/items"},
    }
    return {
        "embeddings": deltackpt.Tables(select="tables/*", slots=slots, always=("rows",), **codecs)
    }


HANDLERS = handlers(codec={"tables/coarse": "bf16"})
#: Every layout of codes, in bases too, with rows beside them.
ENCODED_HANDLERS = handlers(
    codec={
        "tables/users": deltackpt.CodecChoice(delta="adaptive4", base="int8"),
        "tables/items": deltackpt.CodecChoice(delta="int3", base="adaptive2"),
        "tables/half": deltackpt.CodecChoice(delta="symmetric4", base="lossless"),
        "tables/coarse": deltackpt.CodecChoice(delta="bf16", base="fp16"),
    },
    slot_codec={"tables/users": deltackpt.CodecChoice(delta="lossless", base="bf16")},
)


def state_at(step: int) -> dict:
    """The golden state of a step: a formula, so that a reader in any language can check it."""
    grown = STEPS.index(step)

    def table(rows: int, width: int, dtype: type) -> jnp.ndarray:
        cells = np.arange(rows * width, dtype=np.float64).reshape(rows, width) / 7 - 3
        for later in range(1, grown + 1):
            cells[later :: 10 * later] += 100 * later
        return jnp.asarray(cells.astype(np.float32).astype(dtype))

    def slot(rows: int) -> jnp.ndarray:
        cells = np.arange(rows, dtype=np.float32)
        for later in range(1, grown + 1):
            cells[later :: 10 * later] += later
        return jnp.asarray(cells)

    return {
        "tables": {
            "users": table(50, 4, np.float32),
            "items": table(30, 4, np.float32),
            "half": table(20, 3, ml_dtypes.bfloat16),
            "coarse": table(40, 2, np.float32),
            "ids": jnp.asarray(np.arange(24, dtype=np.int32).reshape(12, 2) + 1000 * grown),
        },
        "slots": {"users": slot(50), "items": slot(30)},
        "always": {"users": jnp.full(50, float(step), jnp.float32)},
        "dense": {"kernel": jnp.arange(6.0).reshape(2, 3) + step, "step": step, "none": None},
    }


def touched_at(state: deltackpt.TouchState, step: int) -> deltackpt.TouchState:
    """Marks the rows that change on the way to a step; all rows of ``ids``."""
    later = STEPS.index(step)
    ids = {
        name: jnp.arange(later, rows, 10 * later)
        for name, rows in (("users", 50), ("items", 30), ("half", 20), ("coarse", 40))
    }
    return deltackpt.touched.mark(state, {**ids, "ids": jnp.arange(12)})


def odd_state_at(step: int) -> dict:
    """The golden state with rows that no codec holds: they stand beside the others."""
    state = state_at(step)
    if step != STEPS[0]:
        users = np.array(state["tables"]["users"])
        users[STEPS.index(step)] = np.nan, np.inf, -0.0, 2.0**-149
        state["tables"]["users"] = jnp.asarray(users)
    return state


def digests(state: dict) -> dict[str, str]:
    """SHA-256 of the bits of every leaf, by its path."""
    return {
        jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def write(root: Path, handlers: dict[str, Any], state_of: Callable[[int], dict]) -> None:
    """Writes the steps of one golden directory."""
    touched = deltackpt.touched.init(
        {f"tables/{name}": leaf for name, leaf in state_at(10)["tables"].items()}
    )
    options = deltackpt.ManagerOptions(policy=deltackpt.Consecutive(max_restore_ratio=100))
    with deltackpt.CheckpointManager(root, handlers=handlers, options=options) as manager:
        for step in STEPS:
            if step != STEPS[0]:
                touched = touched_at(touched, step)
            manager.save(step, state_of(step), touched=touched)
    for leftover in root.glob("lease.*"):
        leftover.unlink()
    shutil.rmtree(root / layout.TRASH, ignore_errors=True)


def main() -> None:
    """Writes what is not there yet of the current format version."""
    plain = HERE / f"v{manifest.FORMAT_VERSION}"
    if not plain.exists():
        write(plain, HANDLERS, state_at)
    encoded = HERE / f"encodings-v{manifest.FORMAT_VERSION}"
    if not encoded.exists():
        write(encoded, ENCODED_HANDLERS, odd_state_at)
        found = {}
        options = deltackpt.ManagerOptions(read_only=True)
        with deltackpt.CheckpointManager(
            encoded, handlers=ENCODED_HANDLERS, options=options
        ) as manager:
            for step in STEPS:
                found[str(step)] = digests(manager.restore(step, state_at(step)).state)
        (encoded / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
