# SPDX-License-Identifier: Apache-2.0
"""Inspection of a directory of 1,000 steps, against a full restore of its newest step.

Every timed read and restore runs in a fresh process, in interleaved rounds, with a warm page cache.
"call" excludes the imports; "process" is what ``time`` would measure. A restore "alone" excludes
opening the manager, which takes Orbax a while on so many steps.

python benchmarks/inspect_rows.py [--scale S] [--steps N] [--repeats R] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import report as reports
import state as states
from report import Report, Sample

import deltackpt

#: Share of the rows that change between two saves.
SHARE = 0.002
#: Limit, as a fraction of a full restore.
BAR = 1 / 20

_READ = """
import json, sys, time
import deltackpt.inspect
started = time.perf_counter()
root, table, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
ck = deltackpt.inspect.open(root)
step = ck.at()
lazy = step[table]
found = lazy[len(lazy) // 2] if rows == 1 else lazy[[*range(0, len(lazy), len(lazy) // rows)]]
call = time.perf_counter() - started
print(json.dumps({"call": call, "chain": len(step.chain)}))
"""

_RESTORE = """
import json, sys, time
import deltackpt, inspect_rows, jax, state, ways
root, scale = sys.argv[1], float(sys.argv[2])
template = state.template(scale)
ways.settle(template)
jax.block_until_ready(jax.numpy.zeros(8) + 1)
started = time.perf_counter()
with deltackpt.CheckpointManager(
    root, handlers=inspect_rows.handlers(), options=deltackpt.ManagerOptions(access="read")
) as manager:
    result = manager.restore_latest(template, service=None)
    jax.block_until_ready(result.state)
    call = time.perf_counter() - started
print(json.dumps({"call": call, "alone": result.seconds, "chain": len(result.chain)}))
"""


def write(root: Path, scale: float, steps: int) -> int:
    """Saves ``steps`` steps; returns the bytes of the state."""
    state = states.make(scale)
    options = deltackpt.ManagerOptions(
        deltas=deltackpt.DeltaOptions(base_snapshot="block"),
        writes=deltackpt.WriteOptions(durability="process"),
    )
    with deltackpt.CheckpointManager(root, handlers=handlers(), options=options) as manager:
        for step in range(steps):
            manager.save(step, state)
            manager.wait_until_finished()
            state = states.change(state, states.random_ids(state, SHARE, step))
            jax.block_until_ready(state)
    return states.nbytes(state)


def handlers() -> dict[str, deltackpt.Tables]:
    """The tables of the state, and their slots."""
    slots = {"tables/*": {"accumulator": "accumulators/{name}"}}
    return {"embeddings": deltackpt.Tables(select="tables/*", slots=slots)}


def fresh(program: str, *arguments: object) -> dict[str, Any]:
    """Runs a program in a new process; returns what it printed and how long the process took."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent,
        check=True,
    )
    seconds = time.perf_counter() - started
    return json.loads(done.stdout.splitlines()[-1]) | {"process": seconds}


def run(options: argparse.Namespace, root: Path) -> Report:
    nbytes = write(root, options.scale, options.steps)
    found: dict[str, list[dict[str, Any]]] = {"row": [], "rows": [], "restore": []}
    for _ in range(options.repeats):
        found["restore"].append(fresh(_RESTORE, root, options.scale))
        found["row"].append(fresh(_READ, root, "tables/C1", 1))
        found["rows"].append(fresh(_READ, root, "tables/C1", 1000))
    report = Report(
        f"Looking inside {options.steps:,} steps",
        sizes=f"{nbytes / 1e9:.2f} GB of state, {SHARE:.1%} of the rows touched between saves, the "
        f"newest step a chain of {found['row'][0]['chain']} saves; {options.repeats} rounds",
    )

    def sample(what: str, figure: str) -> Sample:
        return Sample(tuple(one[figure] for one in found[what]))

    for what, text, bar in (
        ("row", "open and read one row", BAR),
        ("rows", "open and read 1,000 scattered rows", None),
    ):
        for figure in ("call", "process"):
            report.compare(
                f"{text}, {figure}",
                sample(what, figure),
                "full restore",
                sample("restore", figure),
                reports.secs,
                bar=bar if figure == "call" else None,
            )
        report.compare(
            f"{text}, call",
            sample(what, "call"),
            "full restore alone",
            sample("restore", "alone"),
            reports.secs,
            bar=bar,
        )
    return report


def main() -> None:
    """Runs the command line."""
    parser = reports.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        run(options, Path(directory) / "run").show(options.json, options.markdown)


if __name__ == "__main__":
    main()
