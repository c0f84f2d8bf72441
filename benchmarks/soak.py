# SPDX-License-Identifier: Apache-2.0
"""Memory growth of a long run: resident memory from the 50th save to the last.

Each variant saves a tenth of state W in its own process and keeps three steps; Orbax writes all of
it each time. Memory is resident memory without mapped files, after freed memory is returned.

python benchmarks/soak.py --json soak.json
python benchmarks/soak.py --scale 0.001 --repeats 1 --saves 8      # a smoke test
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import state as states
import ways
from peak import status_bytes, trim
from report import Report, Sample, arguments, percent

WAYS = ("power", "orbax-tuned")
#: Memory counts from this save on; caches and pools fill before it.
FIRST = 50
TOUCHED = 0.05
_KEPT = 3


def soak(way: str, root: Path, scale: float, saves: int) -> float:
    """Returns the growth of resident memory, as a multiple of the state's size."""
    state, manager = states.make(scale), ways.WAYS[way](root)
    first = 0
    for step in range(saves):
        if step:
            ids = states.random_ids(state, TOUCHED, step)
            state = jax.block_until_ready(states.change(state, ids))
        manager.save(step, state, base=step % 20 == 0)
        manager.wait()
        # There is a base every 20 steps; chains need it.
        ways.keep_only(root, step - step % 20 if way == "power" else step - _KEPT)
        if step == min(FIRST, saves // 2):
            first = resident()
    grown = resident() - first
    manager.close()
    return grown / states.nbytes(state)


def resident() -> int:
    """Returns the resident bytes of this process that are not file-backed."""
    gc.collect()
    trim()
    return status_bytes("VmRSS") - status_bytes("RssFile")


def main() -> None:
    """Measures, prints, and reports whether the target is met."""
    parser = arguments(__doc__)
    parser.set_defaults(scale=0.1, repeats=1)
    parser.add_argument("--saves", type=int, default=1000)
    parser.add_argument("--way", choices=WAYS, help="what a process of its own runs")
    options = parser.parse_args()
    if options.way:
        grown = soak(options.way, options.directory, options.scale, options.saves)
        print(json.dumps(grown))
        return
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=options.directory) as place:
                command = [sys.executable, __file__, "--way", way, "--directory", place]
                command += ["--scale", str(options.scale), "--saves", str(options.saves)]
                ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found[way].append(json.loads(ran.stdout.splitlines()[-1]))
    report = Report("Long runs", sizes=f"state W at {options.scale:g} of its rows")
    for way, bar in zip(WAYS, (0.01, None), strict=True):
        name = f"memory grown from save {FIRST} to {options.saves}, of the state: {ways.NAMES[way]}"
        report.state(name, Sample(tuple(found[way])), percent, bar=bar)
    report.show(options.json, options.markdown)


if __name__ == "__main__":
    main()
