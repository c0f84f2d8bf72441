# SPDX-License-Identifier: Apache-2.0
"""Runs ``examples/running/kmeans.py`` in a process that a test kills."""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import jax
import numpy as np
from running import kmeans

import deltackpt
from deltackpt.storage.digests import crc32c
from deltackpt.tiers import replicator

POINTS = 6_000
_EXTENT_BYTES, _EXTENTS = 256 << 10, 512


def digests(state: kmeans.State) -> dict[str, int]:
    """Returns the CRC32C of every leaf."""
    found = {name: np.ascontiguousarray(leaf) for name, leaf in state.items()}
    return {name: crc32c(array.reshape(-1).view(np.uint8)) for name, array in found.items()}


def reference(path: str, iterations: int) -> None:
    """Writes the digests after each iteration of an undisturbed clustering."""
    state = kmeans.begin(POINTS)
    found = [digests(state)]
    for _ in range(iterations):
        state = kmeans.iterate(state)
        found.append(digests(state))
    Path(path).write_text(json.dumps(found))


def cluster(
    url: str,
    stage: str,
    disk: str,
    journal: str,
    environment: dict[str, str],
    seed: int,
    iterations: int,
    promotes: bool,
) -> None:
    """Resumes from the newest checkpoint, saves every iteration, and waits for some saves.

    Args:
      url: URL of the remote directory.
      stage: staging directory, in memory.
      disk: directory of the extents.
      journal: JSON-lines file for progress.
      environment: environment variables with the token of the remote directory.
      seed: random seed.
      iterations: the last iteration.
      promotes: whether saves are uploaded.
    """
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    if not promotes:
        replicator.ReplicatorProcess.start = lambda self: None
    draw = random.Random(seed)
    extents = deltackpt.tiers.Extents(
        directory=disk, nbytes=_EXTENTS * _EXTENT_BYTES, extent_bytes=_EXTENT_BYTES
    )
    with open(journal, "ab", 0) as told:

        def tell(what: str, **more: Any) -> None:
            told.write(json.dumps({"what": what, **more}).encode() + b"\n")

        tell("opening")
        with kmeans.open_manager(url, Path(stage), extents) as manager:
            clustering = kmeans.Clustering(manager, POINTS)
            state = jax.block_until_ready(clustering.state)
            tell(
                "ready",
                iteration=clustering.iteration,
                digests=digests(state),
                source=sorted({*clustering.source}),
            )
            while clustering.iteration < iterations:
                clustering.advance()
                tell("saving", iteration=clustering.iteration)
                clustering.save()
                if draw.random() < 0.5:
                    clustering.wait()
                    tell("held", iteration=clustering.iteration)
                else:
                    tell("going on", iteration=clustering.iteration)
