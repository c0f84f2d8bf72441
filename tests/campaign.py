# SPDX-License-Identifier: Apache-2.0
"""Size and seed of the long loops, and the record of their results."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import random
from pathlib import Path
from typing import Any

#: Other runs do 1/SHARE of the work of a recorded run.
SHARE = 20
_VERSIONS = ("deltackpt", "jax", "orbax-checkpoint", "tensorstore", "numpy")


@dataclasses.dataclass(frozen=True)
class Campaign:
    """One run of the long loops.

    Attributes:
      full: whether it is a recorded run.
      seed: determines all random draws; the moments of external kills also depend on the machine.
    """

    full: bool
    seed: int

    def count(self, number: int) -> int:
        """The number of repetitions, for ``number`` in a recorded run."""
        return number if self.full else -(-number // SHARE)

    def random(self, *what: object) -> random.Random:
        """A random generator for a test."""
        return random.Random(f"{self.seed} {what}")

    def __str__(self) -> str:
        extent = "in full" if self.full else f"a part in {SHARE}"
        return f"long loops, {extent}; again with LONG_SEED={self.seed}"


def summary(campaign: Campaign, figures: list[tuple[str, dict[str, Any]]], secs: float) -> dict:
    """The combined results of all tests.

    Args:
      campaign: the run.
      figures: for each test, the name of its loop and its figures: numbers, and counts by name.
        Figures of one loop are summed.
      secs: how long the run took.
    """
    loops: dict[str, dict[str, Any]] = {}
    for loop, found in figures:
        total = loops.setdefault(loop, {"tests": 0})
        total["tests"] += 1
        for key, value in found.items():
            if isinstance(value, dict):
                counts = total.setdefault(key, {})
                for name, count in value.items():
                    counts[name] = counts.get(name, 0) + count
            else:
                total[key] = total.get(key, 0) + value
    return {
        "full": campaign.full,
        "seed": campaign.seed,
        "secs": round(secs),
        "loops": loops,
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _VERSIONS},
        },
    }


def markdown(found: dict[str, Any]) -> str:
    """A summary as Markdown for the documentation."""
    lines = ["| loop | what it did |", "| --- | --- |"]
    tables = []
    for loop, figures in found["loops"].items():
        plain = {key: value for key, value in figures.items() if not isinstance(value, dict)}
        told = ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in plain.items())
        lines.append(f"| {loop} | {told} |")
        for key, counts in figures.items():
            if isinstance(counts, dict):
                rows = [f"  {name:40s} {count:5d}" for name, count in counts.items()]
                tables.append("\n".join([f"{loop}, by {key}:", *rows]))
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    below = f"Seed {found['seed']}, {found['secs']:,} s in all; {found['machine']}; {versions}."
    return "\n".join([*lines, "", "```text", *tables, "```", "", below, ""])


def write(found: dict[str, Any], path: Path) -> None:
    """Writes a summary as ``path.json``, and as ``path.md``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(found))
