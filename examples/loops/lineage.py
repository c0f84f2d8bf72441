# SPDX-License-Identifier: Apache-2.0
"""Which samples a state was trained on, from the journal of a loop that was killed and resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from running import journal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lineage:
    """What the journals of a run say, all its starts together.

    Attributes:
      samples: of each step behind the newest state, in order: the indices that it was trained on.
      starts: how many steps the state had behind it at each start.
      repeated: how many steps were trained more than once: those after the last save before a
        kill. What they did at first is in no state that was kept.
    """

    samples: list[list[int]]
    starts: list[int]
    repeated: int


def read(journals: Iterable[Path]) -> Lineage:
    """Reads the journals of a run, one for each start, in their order.

    A start at step ``n`` takes the state of step ``n``, so the steps that were journalled beyond
    it are behind no later state. A step is journalled before it can be saved.
    """
    samples: list[list[int]] = []
    starts: list[int] = []
    trained = 0
    for path in journals:
        for start in journal.read(path, "start"):  # None where it was killed before.
            starts.append(start["step"])
            samples = samples[: start["step"]]
        steps = journal.read(path, "step")
        trained += len(steps)
        samples += [step["samples"] for step in steps]
        if steps and steps[-1]["step"] != len(samples):
            raise ValueError(f"{path}: expected step {len(samples)}, found {steps[-1]['step']}")
    return Lineage(samples=samples, starts=starts, repeated=trained - len(samples))
