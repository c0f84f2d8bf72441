# SPDX-License-Identifier: Apache-2.0
"""The program of each worker in the ``JaxTrainer`` tests: every state of its table is known."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

ROWS, WIDTH, IDS = 64, 4, 8


def ids_of(step: int) -> np.ndarray:
    """Rows that a step changes, one of them twice."""
    return np.array([(step * (i + 3)) % ROWS for i in range(IDS - 1)] + [step * 3 % ROWS])


def expected(steps: int) -> dict[str, np.ndarray]:
    """The state after this many steps, computed with numpy."""
    table = np.zeros((ROWS, WIDTH), np.float32)
    for step in range(1, steps + 1):
        np.add.at(table, ids_of(step), np.float32(step))
    return {"words": table, "bias": np.full(3, steps / 2, np.float32)}


def train(config: dict[str, Any]) -> None:
    """Trains to ``config["steps"]``, and is interrupted once.

    Worker 1 kills itself after step ``config["kill"]``. Or all workers wait after step
    ``config["preemption"]`` until Ray announces a preemption, save, and keep waiting.
    """
    import jax
    import jax.numpy as jnp
    import ray
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import deltackpt
    from deltackpt.service import jax_trainer

    directory = Path(config["directory"])
    session = jax_trainer.Session(directory)
    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(AxisType.Auto,))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("rows",), ()))

    def init() -> dict[str, Any]:
        tables = {"words": jnp.zeros((ROWS, WIDTH))}
        touched = deltackpt.touched.init(tables)
        return {"tables": tables, "bias": jnp.zeros(3), "touched": touched}

    shardings: Any = {
        "tables": {"words": split},
        "bias": whole,
        "touched": deltackpt.TouchState(clock=whole, stamps={"words": split}, identity=whole),
    }

    def step_of(state: dict[str, Any], step: Any, ids: Any) -> dict[str, Any]:
        return {
            "tables": {"words": state["tables"]["words"].at[ids].add(step.astype(jnp.float32))},
            "bias": state["bias"] + 0.5,
            "touched": deltackpt.touched.mark(state["touched"], {"words": ids}),
        }

    train_step = jax.jit(step_of, out_shardings=shardings)
    template = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(init),
        shardings,
    )

    def note(event: str, step: int, state: Any) -> None:
        bits = {
            "words": multihost_utils.process_allgather(state["tables"]["words"], tiled=True),
            "bias": np.asarray(state["bias"]),
        }
        entry = {name: np.asarray(array).tobytes().hex() for name, array in bits.items()}
        entry |= {"event": event, "step": step, "devices": jax.device_count()}
        entry["node"] = ray.get_runtime_context().get_node_id()
        if jax.process_index() == 0:
            with Path(config["journal"]).open("a") as file:
                file.write(json.dumps(entry) + "\n")

    with deltackpt.CheckpointManager(
        directory,
        handlers={"embeddings": deltackpt.Tables(select="tables/*")},
        options=deltackpt.ManagerOptions(timeouts=deltackpt.Timeouts(processes_secs=30)),
        event_handlers=(session,),
    ) as manager:
        found = manager.restore_latest(template)
        if found is None:
            state, first = jax.jit(init, out_shardings=shardings)(), 0
        else:
            state, first = found.state, found.step
            note("restored", first, state)
        for step in range(first + 1, config["steps"] + 1):
            state = train_step(state, jnp.int32(step), jnp.asarray(ids_of(step)))
            if step % config["save_every"] == 0:
                manager.save(step, state)
            session.report({"loss": state["bias"][0], "at": step})
            if step == config.get("kill") and found is None and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == config.get("preemption") and found is None:
                note("waiting", step, state)
                while not session.preempted():
                    time.sleep(0.1)
                manager.save(step, state)
                manager.wait_until_finished()
                session.report({"loss": state["bias"][0], "at": step})
                assert not session.preempted()
                note("saved", step, state)
                threading.Event().wait()
        manager.wait_until_finished()
        session.report({"loss": state["bias"][0], "at": config["steps"]})
        note("end", config["steps"], state)
