# SPDX-License-Identifier: Apache-2.0
"""Saves and restores once with the installed deltackpt.

python tools/smoke.py EMPTY_DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import deltackpt
from deltackpt import touched


def main(directory: str) -> None:
    """Writes a base and a delta, and compares what a new manager restores."""
    handlers = {"embeddings": deltackpt.Tables(select="tables/*")}
    state = {"tables": {"words": jnp.zeros((1000, 8))}, "bias": jnp.zeros(8)}
    stamps = touched.init({"tables/words": state["tables"]["words"]})
    with deltackpt.CheckpointManager(directory, handlers=handlers) as manager:
        for step in (0, 1):
            ids = jnp.array([step, 500])
            words = state["tables"]["words"].at[ids].add(1.0)
            state = {"tables": {"words": words}, "bias": state["bias"] + 1}
            stamps = touched.mark(stamps, {"tables/words": ids})
            manager.save(step, state, touched=stamps)
    with deltackpt.CheckpointManager(directory, handlers=handlers) as manager:
        found = manager.restore_latest(state)
    assert found is not None and found.chain == (0, 1), found
    jax.tree.map(np.testing.assert_array_equal, found.state, state)
    package = Path(deltackpt.__file__).parent
    print(f"deltackpt {deltackpt.__version__} from {package}, jax {jax.__version__}:")
    print(f"steps {found.chain} restored")


if __name__ == "__main__":
    main(sys.argv[1])
