# SPDX-License-Identifier: Apache-2.0
"""Reconstructs the samples that a state was trained on, from the journals of a run with kills."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from running import journal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lineage:
    """The contents of a run's journals, over all starts.

    Attributes:
      samples: for each step of the newest state, in order, the sample indices it was trained on.
      starts: number of completed steps at each start.
      repeated: number of steps that were trained again, because they came after the last save
        before a kill. Their first execution is not part of the final state.
    """

    samples: list[list[int]]
    starts: list[int]
    repeated: int


def read(journals: Iterable[Path]) -> Lineage:
    """Reads the journals of a run, one per start, in order.

    A start at step ``n`` discards the later steps in the journal. A step is written to the journal
    before it can be saved.
    """
    samples: list[list[int]] = []
    starts: list[int] = []
    trained = 0
    for path in journals:
        # Empty if the process was killed before the first step.
        for start in journal.read(path, "start"):
            starts.append(start["step"])
            samples = samples[: start["step"]]
        steps = journal.read(path, "step")
        trained += len(steps)
        samples += [step["samples"] for step in steps]
        if steps and steps[-1]["step"] != len(samples):
            raise ValueError(f"{path}: expected step {len(samples)}, found {steps[-1]['step']}")
    return Lineage(samples=samples, starts=starts, repeated=trained - len(samples))
