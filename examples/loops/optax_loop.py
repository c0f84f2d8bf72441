# SPDX-License-Identifier: Apache-2.0
"""A plain optax loop: the state is a dict of arrays, and the training step a jitted function.

python examples/loops/optax_loop.py --directory run --journal run.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from running.digest import digest
from running.journal import Journal

import deltackpt
from deltackpt.integrations.loop import LoopCheckpoints
from loops import data
from loops.options import parsed

WIDTH, HIDDEN = 16, 32
OPTIMIZER = optax.adagrad(0.3)


def main(arguments: list[str] | None = None) -> None:
    """Trains to the last epoch, resuming from an earlier start if there was one."""
    options = parsed(arguments, "A plain optax loop.")
    journal = Journal(Console(), options.journal)
    batches = data.batches(options.pipeline, epochs=options.epochs, workers=options.workers)
    with LoopCheckpoints(
        options.directory,
        tables=deltackpt.Tables(select="params/tables/*"),
        every_steps=options.every,
        data=batches,
        event_handlers=(journal,),
    ) as checkpoints:
        state, done = checkpoints.resume(first_state(jax.random.key(0)))
        journal.write("start", step=done)
        for step in range(done + 1, options.steps + 1):
            batch = next(batches)
            state, _ = train_step(state, batch)
            journal.write("step", step=step, samples=batch["sample"].tolist())
            checkpoints.after_step(step, state)
        checkpoints.save(options.steps, state)
    journal.write("end", step=options.steps, digest=digest(state))
    journal.close()


def first_state(key: jax.Array) -> dict[str, Any]:
    """Returns the initial state of a new run."""
    keys = jax.random.split(key, 4)
    params = {
        "tables": {
            "users": 0.1 * jax.random.normal(keys[0], (data.USERS, WIDTH)),
            "items": 0.1 * jax.random.normal(keys[1], (data.ITEMS, WIDTH)),
        },
        "hidden": 0.1 * jax.random.normal(keys[2], (2 * WIDTH, HIDDEN)),
        "out": 0.1 * jax.random.normal(keys[3], (HIDDEN,)),
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


@jax.jit
def train_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], jax.Array]:
    """Runs one training step; returns the new state and the loss."""
    value, grads = jax.value_and_grad(loss)(state["params"], batch)
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, value


def loss(params: Any, batch: dict[str, Any]) -> jax.Array:
    """Returns the mean cross entropy of a batch."""
    users = params["tables"]["users"][batch["user"]]
    items = params["tables"]["items"][batch["item"]]
    hidden = jax.nn.relu(jnp.concatenate([users, items], axis=1) @ params["hidden"])
    return optax.sigmoid_binary_cross_entropy(hidden @ params["out"], batch["label"]).mean()


if __name__ == "__main__":
    main()
