# SPDX-License-Identifier: Apache-2.0
"""A training script with nnx and Orbax that keeps the three best checkpoints and can resume."""

import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint import CheckpointManager

KEPT = ocp.CheckpointManagerOptions(max_to_keep=3, best_fn=lambda m: m["loss"], best_mode="min")


class Model(nnx.Module):
    """Scores items for users."""

    def __init__(self, rngs: nnx.Rngs):
        self.users = nnx.Embed(200, 8, rngs=rngs)
        self.score = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.score(self.users(ids))[:, 0]


@nnx.jit
def train(model: Model, optimizer: nnx.Optimizer, ids: jax.Array) -> jax.Array:
    """One step towards the parity of the ids."""

    def error(model: Model) -> jax.Array:
        return jnp.mean((model(ids) - ids % 2) ** 2)

    loss, grads = nnx.value_and_grad(error)(model)
    optimizer.update(model, grads)
    return loss


def main(root: str, steps: int) -> None:
    """Trains up to a step, starting from the newest checkpoint."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adagrad(0.1), wrt=nnx.Param)
    seen, state = 0, nnx.to_pure_dict(nnx.state((model, optimizer)))
    with CheckpointManager(root, options=KEPT) as manager:
        if (newest := manager.latest_step()) is not None:
            kinds = {"state": ocp.args.StandardRestore(state), "done": ocp.args.JsonRestore()}
            found = manager.restore(newest, args=ocp.args.Composite(**kinds))
            nnx.update((model, optimizer), found.state)
            seen = found["done"]["seen"]
        for step in range(seen // 20, steps):
            loss = train(model, optimizer, jax.random.randint(jax.random.key(step), (20,), 0, 200))
            seen, state = seen + 20, nnx.to_pure_dict(nnx.state((model, optimizer)))
            done, scores = {"seen": seen}, {"loss": float(loss)}
            kinds = {"state": ocp.args.StandardSave(state), "done": ocp.args.JsonSave(done)}
            manager.save(step, args=ocp.args.Composite(**kinds), metrics=scores)
    with CheckpointManager(root, options=KEPT) as manager:
        print(manager.latest_step(), manager.best_step(), float(loss).hex())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
