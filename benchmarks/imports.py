# SPDX-License-Identifier: Apache-2.0
"""Start-up time in fresh processes: imports beside Orbax's, and the command line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import fresh
import report as reports
import state as states
import ways
from report import Report, interleaved, timed

_MANAGER, _ORBAX = "import of the manager", "import of Orbax"
_PROGRAMS = {
    "a bare Python": ["-c", ""],
    "import of numpy": ["-c", "import numpy"],
    "import of `deltackpt`": ["-c", "import deltackpt"],
    "import of JAX": ["-c", "import jax"],
    _ORBAX: ["-c", "import orbax.checkpoint"],
    _MANAGER: ["-c", "import deltackpt; deltackpt.CheckpointManager"],
}
#: Bars of the manager's import: seconds, and Orbax's in the same round.
_SECS_BAR, _ORBAX_BAR = 0.75, 1.0


def saved(root: str, scale: float) -> int:
    """Saves a base and ten deltas, in a process of its own; returns the newest step."""
    state, way = states.make(scale), ways.Deltas(root)
    for step in range(11):
        way.saved(step, state, base=step == 0)
        state = states.change(state, states.random_ids(state, 0.05, step))
    way.close()
    return step


def imports(report: Report, options: argparse.Namespace, place: Path) -> None:
    report.sizes = "Wall time of whole processes, page cache warm"
    fresh.call(saved, place, 0.01 * options.scale)
    programs = _PROGRAMS | {
        f"`deltackpt {word}`": ["-m", "deltackpt.cli", word, str(place)]
        for word in ("ls", "verify")
    }

    def started(words: list[str]) -> dict[str, float]:
        command = [sys.executable, *words]
        run = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        return {"secs": run}

    candidates = {name: lambda words=words: started(words) for name, words in programs.items()}
    found = interleaved(options.repeats, candidates)
    for name in programs:
        report.state(name, found(name, "secs"), bar=_SECS_BAR if name == _MANAGER else None)
    report.against(_MANAGER, found, "secs", _MANAGER, [_ORBAX], bars=[_ORBAX_BAR])
    report.publish("startup", ("a process", "time"), found.rows(programs, "secs"))


if __name__ == "__main__":
    reports.main("Start-up", imports)
