# SPDX-License-Identifier: Apache-2.0
"""Restores a checkpoint with every stock Orbax API; runs as a program, without deltackpt."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import v1


def digest(state: Any) -> str:
    """Digest of the paths, types, shapes and bits of all leaves, including None."""
    found = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(state, is_leaf=lambda node: node is None):
        shown: Any = leaf
        if hasattr(leaf, "dtype"):
            kind = str(leaf.dtype)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            shown = kind, np.shape(leaf), np.asarray(leaf).tobytes()
        found.update(repr((jax.tree_util.keystr(path), shown)).encode())
    return found.hexdigest()


def main(root: str, step: int) -> None:
    """Prints a digest for each API."""
    with ocp.CheckpointManager(root) as manager:
        assert manager.latest_step() == step
        print(digest(manager.restore(step)))
    # A second manager: each one keeps the handler of its first restore.
    with ocp.CheckpointManager(root) as manager:
        print(digest(manager.restore(step, args=ocp.args.StandardRestore())))
    with ocp.StandardCheckpointer() as checkpointer:
        print(digest(checkpointer.restore(f"{root}/{step}/default")))
    with ocp.PyTreeCheckpointer() as checkpointer:
        print(digest(checkpointer.restore(f"{root}/{step}/default")))
    print(digest(v1.load(f"{root}/{step}")))
    with v1.training.Checkpointer(root) as checkpointer:
        print(digest(checkpointer.load_checkpointables(step)["default"]))


if __name__ == "__main__":
    sys.modules["deltackpt"] = None  # pyright: ignore[reportArgumentType]
    main(sys.argv[1], int(sys.argv[2]))
