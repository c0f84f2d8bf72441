# SPDX-License-Identifier: Apache-2.0
"""Writes the golden checkpoints of the current format version: once, never again.

Run ``python tests/golden/make_golden.py`` after a change of ``FORMAT_VERSION``, and commit what it
writes beside the earlier versions, which every later deltackpt goes on reading.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import deltackpt
from deltackpt import layout, manifest

HERE = Path(__file__).parent
STEPS = (10, 20, 30)
HANDLERS = {
    "embeddings": deltackpt.Tables(
        select="tables/*",
        slots={
            "tables/users": {"accumulator": "slots/users", "rows": "always/users"},
            "tables/items": {"accumulator": "slots/items"},
        },
        always=("rows",),
        codec={"tables/coarse": "bf16"},
    )
}


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


def main() -> None:
    """Writes ``v<format version>`` beside this file."""
    root = HERE / f"v{manifest.FORMAT_VERSION}"
    if root.exists():
        sys.exit(f"{root} exists: golden checkpoints are written once")
    touched = deltackpt.touched.init(
        {f"tables/{name}": leaf for name, leaf in state_at(10)["tables"].items()}
    )
    options = deltackpt.ManagerOptions(policy=deltackpt.Consecutive(max_restore_ratio=100))
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
        for step in STEPS:
            if step != STEPS[0]:
                touched = touched_at(touched, step)
            manager.save(step, state_at(step), touched=touched)
    for leftover in root.glob("lease.*"):
        leftover.unlink()
    shutil.rmtree(root / layout.TRASH, ignore_errors=True)


if __name__ == "__main__":
    main()
