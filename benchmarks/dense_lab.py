# SPDX-License-Identifier: Apache-2.0
"""Shared setup of the dense-leaf benchmarks: codings, trained states, and managers."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ways
from dense_models import Model, Trajectory

import deltackpt

#: Deltas of a chain.
CHAIN = 10
#: Longest gap between two saves, in gaps of a chain.
GAPS_OF_LONGEST = 5

EXACT, EIGHT_BITS, FOUR_BITS, LINEAR = "exact", "8 bits", "4 bits", "linear nu"
#: Globs of the kinds of leaves in the states of ``dense_models``.
_PARAMETERS = ("params/**", "dense/**", "opt_state/params/**")
_FIRST, _SECOND = "opt_state/**/mu/**", "opt_state/**/nu/**"


def codings(parameters: str, first: str, second: str) -> dict[str, str]:
    """Codecs by glob, for parameters, first moments and second moments."""
    return {_FIRST: first, _SECOND: second, **dict.fromkeys(_PARAMETERS, parameters)}


CODINGS: dict[str, Mapping[str, str]] = {
    EXACT: {},
    EIGHT_BITS: codings("ef8", "int8", "log8"),
    FOUR_BITS: codings("ef4", "int8", "log4"),
    # The control that must fail: small second moments become zero or far too large.
    LINEAR: codings("ef4", "int8", "int8"),
}


@functools.cache
def exact_weights(coding: str) -> dict[str, str]:
    """A coding with lossless bf16 weights, for states that also have a float32 master copy."""
    return {"params/**": "lossless", **CODINGS[coding]}


class Lab:
    """Models, their trained states, and a directory for checkpoints."""

    def __init__(
        self, models: Mapping[str, Model], states_dir: Path, first: int, gap: int, root: Path
    ):
        """Creates a lab.

        Args:
          models: by name.
          states_dir: where states are kept.
          first: steps that are trained before the first save.
          gap: steps between the saves of a chain.
          root: checkpoint directory.
        """
        self.models = models
        self.root = root
        #: Steps between two saves whose bytes are measured; the targets apply to the middle one.
        self.gaps = (1, gap, GAPS_OF_LONGEST * gap)
        #: The steps of a base and the deltas on it.
        self.chain = tuple(first + gap * number for number in range(CHAIN + 1))
        self._states_dir = states_dir

    def trajectory(self, name: str) -> Trajectory:
        """The states of a model at all needed steps; trains if they are missing."""
        model = self.models[name]
        found = Trajectory(model, self._states_dir / name)
        start = None if model.starts_from is None else self.trajectory(model.starts_from)
        first = self.chain[0]
        found.train(first, {*self.chain, *(first + gap for gap in self.gaps)}, start)
        return found

    def manager(self, model: Model, codec: Mapping[str, str]) -> deltackpt.CheckpointManager:
        """A manager over an empty directory, whose only base is its first save."""
        shutil.rmtree(self.root, ignore_errors=True)
        return deltackpt.CheckpointManager(
            self.root,
            handlers={"embeddings": model.tables},
            options=deltackpt.ManagerOptions(
                deltas=deltackpt.DeltaOptions(
                    policy=deltackpt.policies.Consecutive(max_chain=10_000, max_restore_ratio=1e9)
                ),
                writes=deltackpt.WriteOptions(durability="process"),
                # Without an error budget, nothing prevents a linear code for second moments.
                dense=deltackpt.Dense(deltas="blocks", codec=codec, max_error=None),
            ),
        )

    def saved_chain(self, trajectory: Trajectory, coding: str) -> deltackpt.CheckpointManager:
        """A manager that has saved a base and the deltas on it."""
        manager = self.manager(trajectory.model, CODINGS[coding])
        for step in self.chain:
            manager.save(step, trajectory.at(step))
            manager.wait_until_finished()
        return manager

    def orbax_bytes(self, state: Any, *, compressed: bool) -> int:
        """Bytes of a step that stock Orbax saves."""
        shutil.rmtree(self.root, ignore_errors=True)
        way = ways.Orbax(self.root, compressed=compressed)
        way.save(1, state)
        way.wait()
        way.close()
        return ways.tree_bytes(self.root / "1")
