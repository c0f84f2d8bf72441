# SPDX-License-Identifier: Apache-2.0
"""Start-up time in fresh processes: imports beside Orbax's, and the command line.

python benchmarks/imports.py --json imports.json
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import fresh
import state as states
import ways
from report import Report, arguments, interleaved, secs, timed

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
    state, way = states.make(scale), ways.Deltas(Path(root))
    for step in range(11):
        way.save(step, state, base=step == 0)
        way.wait()
        state = states.change(state, states.random_ids(state, 0.05, step))
    way.close()
    return step


def main() -> None:
    """Runs the command line."""
    options = arguments(__doc__).parse_args()
    report = Report("Start-up", sizes="Wall time of whole processes, page cache warm")
    with tempfile.TemporaryDirectory(prefix="imports-", dir=options.directory) as place:
        fresh.call(saved, place, 0.01 * options.scale)
        programs = _PROGRAMS | {
            f"`deltackpt {' '.join(words)}`": ["-m", "deltackpt.cli", *words, place]
            for words in (["ls"], ["verify"])
        }

        # An installed package has bytecode; without it, each process would compile the package.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

        def started(words: list[str]) -> dict[str, float]:
            command = [sys.executable, *words]
            run = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
            return {"secs": run}

        candidates = {name: lambda words=words: started(words) for name, words in programs.items()}
        found = interleaved(options.repeats, candidates)
    for name in programs:
        bar = _SECS_BAR if name == _MANAGER else None
        report.state(name, found(name, "secs"), secs, bar=bar)
    mine, theirs = found(_MANAGER, "secs"), found(_ORBAX, "secs")
    report.compare(_MANAGER, mine, _ORBAX, theirs, secs, bar=_ORBAX_BAR)
    rows = [[name, (found(name, "secs"), secs)] for name in programs]
    report.publish("startup", ("a process", "time"), rows)
    report.show(options)


if __name__ == "__main__":
    main()
