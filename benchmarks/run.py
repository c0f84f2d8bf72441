# SPDX-License-Identifier: Apache-2.0
"""Runs benchmarks one after another, and writes a result for each.

python benchmarks/run.py                            # all; the pages show these results
python benchmarks/run.py --quick-set                # the bars that matter most
python benchmarks/run.py step restores              # some of them

``tools/tables.py`` then renders the tables of the documentation. Measure on an idle machine, from a
clean checkout: a result records the load, and whether the checkout had changes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


class Benchmark(NamedTuple):
    """A command whose result has a name."""

    command: str  # The script and its arguments.
    minutes: float  # Approximate duration on two idle cores.
    tiny: str = "--scale 0.01 --repeats 1"  # Arguments of a smoke test, which measure nothing.
    quick: str | None = None  # Arguments in the quick set; None if it is not in that set.
    needs: str = ""  # What must be installed besides the package.


#: Small sizes of scripts with several results.
_WAL = "--scale 0.01 --repeats 1 --batch 64 --steps 4 --every 2 --hidden 32"
_SERVING = (
    "--repeats 2 --rows 20000 --changed 2000 --records 10 --lookups 10000 --patch-bytes 4194304"
)

#: By the name of the result.
BENCHMARKS = {
    "plain": Benchmark(
        "plain.py --steps 120", 12, "--scale 0.01 --repeats 1 --steps 40", "--repeats 3"
    ),
    "step": Benchmark("step.py --only deltas", 3, quick="--repeats 5"),
    "training-lost": Benchmark("save_restore.py --only training", 4),
    "restores": Benchmark("save_restore.py --only restores", 4, quick="--repeats 3"),
    "bases": Benchmark("bases.py", 8, "--scale 0.01 --repeats 1 --modes hold compacted"),
    "tables": Benchmark("step.py --only tables", 2, quick="--repeats 5"),
    "imports": Benchmark("imports.py", 1, quick=""),
    "codecs": Benchmark("codecs.py", 4, "--scale 0.01 --repeats 1 --steps 5", "--repeats 3"),
    "wal": Benchmark("wal.py --only training", 3, _WAL, "--repeats 3"),
    "wal-recovery": Benchmark("wal.py --only recovery", 3, _WAL),
    "kafka": Benchmark("wal.py --only kafka", 2, _WAL, needs="make servers"),
    "serving": Benchmark("serving.py --only lag", 1, _SERVING, ""),
    "serving-kafka": Benchmark("serving.py --only kafka", 1, _SERVING, needs="make servers"),
    "lookups": Benchmark("serving.py --only lookups patches", 2, _SERVING),
    "tracking": Benchmark("tracking.py", 1, "--scale 0.01 --repeats 2 --batch 64", "--repeats 15"),
    "processes": Benchmark("scaling.py", 5, "--scale 0.02 --repeats 1 --processes 1 2"),
    "thesis": Benchmark("thesis.py --only epochs", 15, "--quick", needs="make servers"),
    "thesis-lookups": Benchmark(
        "thesis.py --only epochs --processes 1 --lookups 100 --repeats 3", 8, "--quick"
    ),
    "thesis-store": Benchmark(
        "thesis.py --only slow-store kills", 12, "--quick", needs="make servers"
    ),
    "tiers": Benchmark("tiers.py", 30, "--scale 0.01 --repeats 1 --processes 2 --nodes 2"),
    "clustering": Benchmark("clustering.py", 2, "--scale 0.01 --repeats 1 --iterations 2"),
    "interference": Benchmark(
        "interference.py",
        20,
        "--scale 0.02 --repeats 1 --steps 8 --every 4 --step-ms 5",
        needs="make servers",
    ),
    "standby": Benchmark("standby.py", 6),
    "buckets": Benchmark(
        "buckets.py",
        5,
        "--scale 0.01 --repeats 1 --saves 2 --interval 0.1",
        needs="make servers",
    ),
    "extents": Benchmark("extents.py", 1, "--scale 0.1 --repeats 1"),
    "vocab": Benchmark("vocab.py", 3, "--scale 0.01 --repeats 2"),
    "dense-sparse": Benchmark("dense.py --only sparse", 3),
    "dense": Benchmark(
        "dense.py --only bytes w",
        60,
        "--models lora --size tiny --batch 1 --first 2 --gap 1 --more 1 --scale 0.01 --repeats 1",
    ),
    "dense-loss": Benchmark(
        "dense.py --only chain loss",
        30,
        "--size tiny --batch 1 --first 2 --gap 1 --more 1",
    ),
    "accuracy": Benchmark("accuracy.py", 45, "--steps 8 --seeds 2 --restores 2 --codecs adaptive2"),
    "web-scale": Benchmark("web_scale.py --repeats 5", 6, "--hosts 12 --hours 0.5 --repeats 2"),
    "gpu": Benchmark(
        "gpu.py --repeats 5",
        4,
        "--allow-cpu --scale 0.01 --repeats 1 --steps 6",
        needs="a GPU",
    ),
}


def run(name: str, *more: str, results: Path = RESULTS) -> bool:
    """Runs a benchmark; returns whether it wrote a result, which ``more`` arguments may change."""
    script, *words = BENCHMARKS[name].command.split()
    partial = results / f"{name}.json.part"
    command = [sys.executable, str(HERE / script), *words, *more, f"--json={partial}"]
    started = time.monotonic()
    # Virtual devices, as tests have them, would share the cores.
    done = subprocess.run(command, check=False, env=os.environ | {"XLA_FLAGS": ""})
    if done.returncode or not partial.exists():
        print(f"{name}: failed with {done.returncode}", file=sys.stderr)
        return False
    partial.rename(results / f"{name}.json")
    bars = json.loads((results / f"{name}.json").read_text())["bars"]
    missed = [bar["name"] for bar in bars if not bar["holds"]]
    print(f"{name}: {time.monotonic() - started:.0f} s, {len(missed)} bars missed", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of results; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are written")
    parser.add_argument("--quick-set", action="store_true", help="the bars that matter most")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--directory", type=Path, help="where benchmarks write")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"expected names of {', '.join(BENCHMARKS)}, found {', '.join(unknown)}")
    chosen = dict.fromkeys(options.names, "")
    if options.quick_set:
        chosen |= {name: one.quick for name, one in BENCHMARKS.items() if one.quick is not None}
    elif not chosen:
        chosen = dict.fromkeys((n for n, one in BENCHMARKS.items() if one.needs != "a GPU"), "")
    total = 0.0
    for name, more in chosen.items():
        one = BENCHMARKS[name]
        minutes = one.minutes * (0.6 if more else 1.0)  # Fewer rounds; warming up stays.
        total += minutes
        needs = f"; needs {one.needs}" if one.needs else ""
        print(f"{name}: about {minutes:.1f} min: {one.command} {more}{needs}")
    print(f"about {total:.0f} minutes in all; load average {os.getloadavg()[0]:.2f}", flush=True)
    if options.list:
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    place = [f"--directory={options.directory}"] if options.directory else []
    wrote = [
        run(name, *more.split(), *place, results=options.results) for name, more in chosen.items()
    ]
    return 0 if all(wrote) else 1


if __name__ == "__main__":
    sys.exit(main())
