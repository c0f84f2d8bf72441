# SPDX-License-Identifier: Apache-2.0
"""A Flax NNX loop: the training step updates the model and optimizer objects in place.

Dropout uses the model's own ``Rngs``, which are saved with the model.

python examples/loops/nnx_loop.py --directory run --journal run.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console
from running.digest import digest
from running.journal import Journal

import deltackpt
from deltackpt.integrations.loop import LoopCheckpoints
from loops import data
from loops.options import parsed

WIDTH, HIDDEN = 16, 32


def main(arguments: list[str] | None = None) -> None:
    """Trains to the last epoch, resuming from an earlier start if there was one."""
    options = parsed(arguments, "A Flax NNX loop.")
    journal = Journal(Console(), options.journal)
    batches = data.batches(options.pipeline, epochs=options.epochs, workers=options.workers)
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adagrad(0.3), wrt=nnx.Param)
    state = {"model": model, "optimizer": optimizer}
    with LoopCheckpoints(
        options.directory,
        tables=deltackpt.Tables(select="model/*/embedding"),
        every_steps=options.every,
        data=batches,
        event_handlers=(journal,),
    ) as checkpoints:
        _, done = checkpoints.resume(state)
        journal.write("start", step=done)
        for step in range(done + 1, options.steps + 1):
            batch = next(batches)
            train_step(model, optimizer, batch)
            journal.write("step", step=step, samples=batch["sample"].tolist())
            checkpoints.after_step(step, state)
        checkpoints.save(options.steps, state)
    journal.write("end", step=options.steps, digest=digest(nnx.state((model, optimizer))))
    journal.close()


class Model(nnx.Module):
    """Two embedding tables, dropout, a hidden layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.users = nnx.Embed(data.USERS, WIDTH, rngs=rngs)
        self.items = nnx.Embed(data.ITEMS, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.hidden = nnx.Linear(2 * WIDTH, HIDDEN, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, 1, rngs=rngs)

    def __call__(self, batch: dict[str, Any]) -> jax.Array:
        """Returns the logits of a batch, (BATCH,)."""
        both = [self.users(batch["user"]), self.items(batch["item"])]
        hidden = nnx.relu(self.hidden(self.dropout(jnp.concatenate(both, axis=1))))
        return self.out(hidden)[:, 0]


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, batch: dict[str, Any]) -> jax.Array:
    """Runs one training step in place; returns the loss."""
    value, grads = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, grads)
    return value


def loss(model: Model, batch: dict[str, Any]) -> jax.Array:
    """Returns the mean cross entropy of a batch."""
    return optax.sigmoid_binary_cross_entropy(model(batch), batch["label"]).mean()


if __name__ == "__main__":
    main()
