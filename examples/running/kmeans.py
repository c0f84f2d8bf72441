# SPDX-License-Identifier: Apache-2.0
"""Lloyd's k-means that survives at every iteration: its state, its step, and its checkpoints.

The points are a table whose rows never change, so that only the first save holds them;
assignments and centroids are dense leaves, which every save holds whole: 0.27 MB beside 188 MB of
points. As tables they would cost marks in every iteration, and save bytes only once few points
still move.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import deltackpt

#: As MNIST: images of 28 x 28, ten digits.
POINTS, WIDTH, CLUSTERS = 60_000, 784, 10

State = dict[str, jax.Array]


def begin(points: int = POINTS, seed: int = 0) -> State:
    """Made-up points around as many centres as there are clusters, none of them assigned."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((CLUSTERS, WIDTH), np.float32)
    values = random.standard_normal((points, WIDTH), np.float32)
    # So close that points go on moving for a long time.
    values += 0.03 * centres[random.integers(CLUSTERS, size=points)]
    return {
        "points": jnp.asarray(values),
        "assignments": jnp.full(points, -1, jnp.int32),
        "centroids": jnp.asarray(values[:CLUSTERS]),
        "iteration": jnp.zeros((), jnp.int32),
    }


@jax.jit
def iterate(state: State) -> State:
    """Assigns each point to the nearest centroid, and moves these to the middle of their points."""
    points, centroids = state["points"], state["centroids"]
    # Of the squared distances, what differs between centroids.
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
    """Says of an iteration that it changed no point."""
    return _no_rows(marks or deltackpt.touched.init({"points": state["points"]}))


@functools.cache
def _tables() -> deltackpt.Tables:
    return deltackpt.Tables(select="points", slots={})


def open_manager(
    url: str, stage: Path, extents: deltackpt.Extents, **tiers: Any
) -> deltackpt.CheckpointManager:
    """Checkpoints in memory of the node and on its disk; the root follows in the background.

    Args:
      url: the root.
      stage: a directory in memory.
      extents: on a disk.
      **tiers: further options of ``deltackpt.Tiers``.
    """
    # No base after the first: points would be written again.
    policy = deltackpt.Consecutive(max_chain=1_000_000, max_restore_ratio=1e9)
    return deltackpt.CheckpointManager(
        url,
        handlers={"embeddings": _tables()},
        options=deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(policy=policy),
            tiers=deltackpt.Tiers(
                **{"stage": str(stage), "extents": extents, "wait_for": "stage", **tiers}
            ),
        ),
    )


class Clustering:
    """A clustering and its checkpoints; goes on from the newest one.

    Attributes:
      iteration: how many there were.
      state: after that.
      source: where the checkpoint that it goes on from was held; () if it began anew.
    """

    def __init__(self, manager: deltackpt.CheckpointManager, points: int = POINTS, seed: int = 0):
        """Restores, or begins.

        Args:
          manager: of ``open_manager``.
          points: how many are made up.
          seed: what they are drawn from.
        """
        self._manager = manager
        template = jax.eval_shape(functools.partial(_empty, points))
        found = manager.restore_latest(template)
        self.iteration = 0 if found is None else found.step
        self.state: State = begin(points, seed) if found is None else found.state
        self.source = () if found is None else found.source
        self._marks = None if found is None else found.touched

    def advance(self) -> None:
        """One iteration."""
        self.state = iterate(self.state)
        self._marks = passed(self._marks, self.state)
        self.iteration += 1

    def save(self) -> None:
        """Saves what is there; in the background but for what must be taken at once."""
        self._manager.save(self.iteration, self.state, touched=self._marks)

    def wait(self) -> None:
        """Until it is in memory and on disk."""
        self._manager.wait()


def _empty(points: int) -> State:
    """A state, for its shapes."""
    return {
        "points": jnp.zeros((points, WIDTH), jnp.float32),
        "assignments": jnp.zeros(points, jnp.int32),
        "centroids": jnp.zeros((CLUSTERS, WIDTH), jnp.float32),
        "iteration": jnp.zeros((), jnp.int32),
    }
