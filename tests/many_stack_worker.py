# SPDX-License-Identifier: Apache-2.0
"""One process of a multi-process job with stacked tables; it runs ``many_worker.py``'s server."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import many_worker
import numpy as np
import test_sparsecore
from many_worker import Worker
from test_sparsecore import Model, Topology

import deltackpt


class Stacker(Worker):
    """A worker whose state has stacked tables; a step is one call of ``Model.trained``."""

    def open(self, root: str, cores: int = 1, replicas: int = 1, **writes: Any) -> None:
        """Creates the manager; ``writes`` are its ``WriteOptions``."""
        self._topology = Topology(jax.device_count() // replicas, cores, replicas)
        options = dataclasses.replace(
            test_sparsecore.OPTIONS,
            writes=deltackpt.WriteOptions(**writes),
            timeouts=deltackpt.Timeouts(processes_secs=10.0),
        )
        self._manager = deltackpt.CheckpointManager(
            root, handlers={"embeddings": self._topology.tables}, options=options
        )

    def begin(self) -> None:
        """Sets the state of step 0."""
        self._run = Model.new(sharding=self._replicated())

    def put(self, step: int, call: str = "save", marked: bool = True) -> dict[str, Any]:
        """Saves or appends the state as a step, then trains."""
        given = self._run.touched if marked else None
        found = getattr(self._manager, call)(step, self._placed(), touched=given)
        self._run = self._run.trained(step)
        return {"kind": found.kind}

    def verify(self) -> dict[str, Any]:
        """Verifies the marks of all steps since the last call."""
        compared = self._manager.verify_tracking(self._placed(), touched=self._run.touched)
        return {"compared": compared}

    def unmark(self) -> None:
        """Trains a step whose rows are not marked."""
        touched = self._run.touched
        self._run = self._run.trained(0)
        self._run.touched = touched

    def wait(self) -> dict[str, Any]:
        """Waits for saves and records; returns the rows in this process's shard of each save."""
        reports = self._manager.wait_until_finished()
        self._manager.wait_appended()
        return {"rows": [report.rows for report in reports]}

    def resume(self) -> dict[str, Any]:
        """Restores the newest state, and trains from it; reports a wrong shard."""
        template = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            self._topology.state(Model.new(sharding=self._replicated())),
        )
        template["bias"] = jax.ShapeDtypeStruct((3,), np.float32, sharding=self._replicated())
        found = self._manager.restore_latest(template)
        self._run = test_sparsecore.model_at(found.step)
        wrong = many_worker.difference(found.state, self._arrays())
        self._run.touched = found.touched
        self._run = self._run.trained(found.step)
        return {"step": found.step, "wrong": wrong}

    def twice(self, root: str) -> None:
        """Saves and restores a table whose first and last rows have the same id."""
        ids = np.arange(64, dtype=np.int32)
        ids[-1] = ids[0]
        rows = Topology(jax.device_count())
        state = {"table": rows.placed(np.zeros((64, 4), np.float32)), "ids": rows.placed(ids)}
        tables = deltackpt.Tables(select="table", key="ids")
        with deltackpt.CheckpointManager(root, handlers={"embeddings": tables}) as manager:
            manager.save(0, state)
            manager.wait_until_finished()
            manager.restore(0, state)

    def _replicated(self) -> jax.sharding.NamedSharding:
        mesh = jax.sharding.Mesh(jax.devices(), ("x",))
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def _placed(self) -> dict[str, Any]:
        bias = self._run.bias
        placed = jax.make_array_from_callback(bias.shape, self._replicated(), bias.__getitem__)
        return {**self._topology.state(self._run), "bias": placed}

    def _arrays(self) -> dict[str, Any]:
        return {**self._topology.arrays(self._run), "bias": self._run.bias}


many_worker.Worker = Stacker  # The class that forked processes use.

if __name__ == "__main__":
    many_worker.serve()
