# SPDX-License-Identifier: Apache-2.0
"""A toy reinforcement learning task: a policy learns which action each context rewards.

The trainer keeps the weights twice: in float32, which Adam updates in small steps, and cast to
bfloat16 for rollouts. Few of the bfloat16 values change at each step.
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
#: Path of the rollout weights in the state.
WEIGHTS = "rollout/**"


class Rollouts(NamedTuple):
    """A batch of a policy's actions.

    Attributes:
      contexts: (n,) int32, the observed contexts.
      actions: (n,) int32, the chosen actions.
      rewards: (n,) float32, the rewards.
    """

    contexts: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray


def first_state(key: jax.Array) -> dict[str, Any]:
    """Returns the initial state of a run; ``visits`` is its table."""
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
    """Casts the weights for rollouts."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def logits(params: Any, contexts: jax.Array | np.ndarray) -> jax.Array:
    """Returns logits (n, ACTIONS) for contexts (n,)."""
    bits = 2 * (contexts[:, None] >> jnp.arange(BITS) & 1) - 1
    hidden = jax.nn.relu(bits.astype(params["bits"].dtype) @ params["bits"])
    hidden = jax.nn.relu(hidden @ params["hidden"])
    return (hidden @ params["actions"]).astype(jnp.float32)


@jax.jit
def act(params: Any, key: jax.Array, contexts: jax.Array | np.ndarray) -> jax.Array:
    """Samples an action for each context from the policy."""
    return jax.random.categorical(key, logits(params, contexts))


def rewards(contexts: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Returns 1 for each action that its context rewards, otherwise 0."""
    return (actions == contexts % ACTIONS).astype(np.float32)


@jax.jit
def train_step(state: dict[str, Any], seen: Rollouts) -> dict[str, Any]:
    """Runs one step of REINFORCE with the mean reward as baseline."""

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
    """Returns the SHA-256 of the bits of some weights, by name."""
    total = hashlib.sha256()
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name])
        total.update(f"{name} {array.dtype} {array.shape};".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()
