# SPDX-License-Identifier: Apache-2.0
"""Lloyd's k-means with a checkpoint of every iteration: its state, its step and its checkpoints.

The points are a table whose rows never change, so only the first save contains them. Assignments
and centroids are dense leaves, which every save contains: 0.27 MB, compared with 188 MB of points.
As tables they would need marking in every iteration, and would save bytes only once few points
move.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import deltackpt

#: The size of MNIST: images of 28 x 28, ten digits.
POINTS, WIDTH, CLUSTERS = 60_000, 784, 10

State = dict[str, jax.Array]


def begin(points: int = POINTS, seed: int = 0) -> State:
    """Returns synthetic points around as many centers as there are clusters, unassigned."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((CLUSTERS, WIDTH), np.float32)
    values = random.standard_normal((points, WIDTH), np.float32)
    # Close enough that points keep moving for a long time.
    values += 0.03 * centres[random.integers(CLUSTERS, size=points)]
    return {
        "points": jnp.asarray(values),
        "assignments": jnp.full(points, -1, jnp.int32),
        "centroids": jnp.asarray(values[:CLUSTERS]),
        "iteration": jnp.zeros((), jnp.int32),
    }


@jax.jit
def iterate(state: State) -> State:
    """Assigns each point to the nearest centroid, and moves centroids to their points' mean."""
    points, centroids = state["points"], state["centroids"]
    # The part of the squared distances that differs between centroids.
    distances = jnp.sum(centroids**2, axis=1) - 2 * points @ centroids.T
    assignments = jnp.argmin(distances, axis=1).astype(jnp.int32)
    members = jax.nn.one_hot(assignments, CLUSTERS, dtype=points.dtype)
    sizes = members.sum(axis=0)[:, None]
    middles = jnp.where(sizes > 0, members.T @ points / jnp.maximum(sizes, 1), centroids)
    return {
        "points": points,
        "assignments": assignments,
        "centroids": middles,
        "iteration": state["iteration"] + 1,
    }


@jax.jit
def _no_rows(marks: deltackpt.TouchState) -> deltackpt.TouchState:
    return deltackpt.touched.mark(marks, {"points": jnp.zeros(0, jnp.int32)})


def passed(marks: deltackpt.TouchState | None, state: State) -> deltackpt.TouchState:
    """Declares that an iteration changed no point."""
    return _no_rows(marks or deltackpt.touched.init({"points": state["points"]}))


@functools.cache
def _tables() -> deltackpt.Tables:
    return deltackpt.Tables(select="points", slots={})


def open_manager(
    url: str, stage: Path, extents: deltackpt.tiers.Extents, **tiers: Any
) -> deltackpt.CheckpointManager:
    """Opens checkpoints in the node's memory and on its disk, with background uploads.

    Args:
      url: URL of the checkpoint directory.
      stage: a staging directory in memory.
      extents: a directory on a disk.
      **tiers: further options of ``deltackpt.Tiers``.
    """
    # No base after the first: it would write the points again.
    policy = deltackpt.policies.Consecutive(max_chain=1_000_000, max_restore_ratio=1e9)
    return deltackpt.CheckpointManager(
        url,
        handlers={"embeddings": _tables()},
        options=deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(policy=policy),
            tiers=deltackpt.Tiers(
                **{"staging_dir": str(stage), "extents": extents, "wait_for": "staging", **tiers}
            ),
        ),
    )


class Clustering:
    """A clustering and its checkpoints; resumes from the newest one.

    Attributes:
      iteration: number of completed iterations.
      state: the state after them.
      source: where the restored checkpoint was found; () for a new run.
    """

    def __init__(self, manager: deltackpt.CheckpointManager, points: int = POINTS, seed: int = 0):
        """Restores the newest checkpoint, or starts from scratch.

        Args:
          manager: the result of ``open_manager``.
          points: number of synthetic points.
          seed: seed of the points.
        """
        self._manager = manager
        template = jax.eval_shape(functools.partial(_empty, points))
        found = manager.restore_latest(template)
        self.iteration = 0 if found is None else found.step
        self.state: State = begin(points, seed) if found is None else found.state
        self.source = () if found is None else found.source
        self._marks = None if found is None else found.touched

    def advance(self) -> None:
        """Runs one iteration."""
        self.state = iterate(self.state)
        self._marks = passed(self._marks, self.state)
        self.iteration += 1

    def save(self) -> None:
        """Saves the state; mostly in the background."""
        self._manager.save(self.iteration, self.state, touched=self._marks)

    def wait(self) -> None:
        """Waits until the save is in memory and on disk."""
        self._manager.wait_until_finished()


def _empty(points: int) -> State:
    """An abstract state."""
    return {
        "points": jnp.zeros((points, WIDTH), jnp.float32),
        "assignments": jnp.zeros(points, jnp.int32),
        "centroids": jnp.zeros((CLUSTERS, WIDTH), jnp.float32),
        "iteration": jnp.zeros((), jnp.int32),
    }
