# SPDX-License-Identifier: Apache-2.0
"""A toy of reinforcement learning: a policy that learns which action each context is paid for.

The trainer keeps the weights twice: in float32, which Adam moves by little steps, and cast to
bfloat16, which rollouts use. At each step few of the cast numbers change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

BITS, ACTIONS, WIDTH = 12, 8, 512
CONTEXTS = 1 << BITS
LEARNING_RATE = 2e-5
OPTIMIZER = optax.adam(LEARNING_RATE)
#: Where the weights of rollouts stand in the state.
WEIGHTS = "rollout/**"


class Rollouts(NamedTuple):
    """What a policy did.

    Attributes:
      contexts: (n,) int32, what it saw.
      actions: (n,) int32, what it did.
      rewards: (n,) float32, what it was paid.
    """

    contexts: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray


def first_state(key: jax.Array) -> dict[str, Any]:
    """The state that a run begins with; ``visits`` is its table."""
    keys = jax.random.split(key, 3)
    scale = WIDTH**-0.5
    params = {
        "bits": BITS**-0.5 * jax.random.normal(keys[0], (BITS, WIDTH)),
        "hidden": scale * jax.random.normal(keys[1], (WIDTH, WIDTH)),
        "actions": scale * jax.random.normal(keys[2], (WIDTH, ACTIONS)),
    }
    return {
        "params": params,
        "opt_state": OPTIMIZER.init(params),
        "rollout": cast(params),
        "visits": jnp.zeros((CONTEXTS, 1), jnp.int32),
    }


def cast(params: Any) -> Any:
    """The weights as rollouts use them."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def logits(params: Any, contexts: jax.Array | np.ndarray) -> jax.Array:
    """(n, ACTIONS) of (n,) contexts."""
    bits = 2 * (contexts[:, None] >> jnp.arange(BITS) & 1) - 1
    hidden = jax.nn.relu(bits.astype(params["bits"].dtype) @ params["bits"])
    hidden = jax.nn.relu(hidden @ params["hidden"])
    return (hidden @ params["actions"]).astype(jnp.float32)


@jax.jit
def act(params: Any, key: jax.Array, contexts: jax.Array | np.ndarray) -> jax.Array:
    """An action for each context, drawn by the policy."""
    return jax.random.categorical(key, logits(params, contexts))


def rewards(contexts: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """1 where the action is the one that the context pays for."""
    return (actions == contexts % ACTIONS).astype(np.float32)


@jax.jit
def train_step(state: dict[str, Any], seen: Rollouts) -> dict[str, Any]:
    """One step of REINFORCE with the mean reward as baseline."""

    def loss(params: Any) -> jax.Array:
        chances = jax.nn.log_softmax(logits(params, seen.contexts))
        taken = jnp.take_along_axis(chances, seen.actions[:, None], axis=1)[:, 0]
        return -((seen.rewards - seen.rewards.mean()) * taken).mean()

    grads = jax.grad(loss)(state["params"])
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    visits = state["visits"].at[seen.contexts].add(1)
    return {"params": params, "opt_state": opt_state, "rollout": cast(params), "visits": visits}


def digest_of(weights: Mapping[str, Any]) -> str:
    """SHA-256 over the bits of some weights, by their names."""
    total = hashlib.sha256()
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name])
        total.update(f"{name} {array.dtype} {array.shape};".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()
