# SPDX-License-Identifier: Apache-2.0
"""One process of a multi-process job that trains on its own data; see ``test_loops.py``.

It writes a line of JSON for its start position, for each step, and for its end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import IO, Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import deltackpt
from deltackpt.errors import ProcessFailed, TemplateMismatch
from deltackpt.integrations.loop import LoopCheckpoints

ROWS, WIDTH, BATCH, STEPS = 64, 4, 4, 10
#: Samples of both processes; each trains on half of them.
SAMPLES = 2 * BATCH * STEPS


def main(
    address: str,
    root: str,
    journal: IO[str],
    count: int,
    number: int,
    steps: int,
    kill_after: int,
    refusing: int,
) -> None:
    def say(**what: Any) -> None:
        journal.write(json.dumps(what) + "\n")
        journal.flush()

    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            address, count, number, coordinator_bind_address=address if number == 0 else None
        )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    over_all, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("all",), ()))
    sampler = grain.samplers.IndexSampler(
        SAMPLES,
        shard_options=grain.sharding.ShardOptions(number, count),
        shuffle=True,
        num_epochs=1,
        seed=5,
    )
    operations = [grain.transforms.Batch(BATCH)]
    # Grain accepts any object with a length and indices.
    batches = iter(
        grain.DataLoader(
            data_source=range(SAMPLES),  # pyright: ignore[reportArgumentType]
            sampler=sampler,
            operations=operations,
        )
    )

    def refuse(self: Any, state: Any) -> None:
        raise ValueError("this position is of other data")

    if number == refusing:
        type(batches).set_state = refuse

    @jax.jit
    def train_step(state: dict[str, jax.Array], ids: jax.Array) -> dict[str, jax.Array]:
        rows = ids % ROWS
        emb = state["emb"].at[rows].add(jnp.sin(state["emb"][rows]) + 0.01)
        emb = jax.lax.with_sharding_constraint(emb, over_all)
        return {"emb": emb, "total": state["total"] + ids.sum()}

    first = {
        "emb": jax.jit(lambda: jnp.ones((ROWS, WIDTH)), out_shardings=over_all)(),
        "total": jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=everywhere)(),
    }
    with LoopCheckpoints(
        root, tables=deltackpt.Tables(select="emb"), every_steps=2, data=batches
    ) as saves:
        try:
            state, done = saves.resume(first)
        except (TemplateMismatch, ProcessFailed) as error:
            say(refused=type(error).__name__, why=str(error))
            return
        say(resumed=done)
        for step in range(done + 1, steps + 1):
            own = np.asarray(next(batches))
            state = train_step(state, jax.make_array_from_process_local_data(over_all, own))
            say(step=step, samples=own.tolist())
            saves.after_step(step, state)
            if step == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
        saves.save(steps, state)
    final = multihost_utils.process_allgather(state["emb"], tiled=True)
    say(end=np.asarray(final).tobytes().hex(), total=int(state["total"]))


if __name__ == "__main__":
    place, directory, said, *numbers = sys.argv[1:]
    with open(said, "a") as lines:
        main(place, directory, lines, *map(int, numbers))
