# SPDX-License-Identifier: Apache-2.0
"""The digest of a training state: equal digests mean that every bit is equal."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import deltackpt


def digest(state: Any) -> str:
    """Returns the SHA-256 over path, dtype, shape and bits of every leaf that a save holds.

    It does not depend on the placement. If a state spans several processes, all of them must call
    this, and each gathers one leaf at a time.

    Args:
      state: any pytree; a ``TouchState`` in it, which is never saved, is left out.
    """
    total = hashlib.sha256()
    leaves = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda node: isinstance(node, deltackpt.TouchState)
    )
    for path, leaf in leaves:
        if isinstance(leaf, deltackpt.TouchState):
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        array = np.ascontiguousarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape};".encode())
        total.update(array.data)
    return total.hexdigest()
