# SPDX-License-Identifier: Apache-2.0
"""Serves the rows of a DLRM while it trains; the trainer is killed and resumed meanwhile.

python examples/dlrm_jax/demo_serving.py

The trainer appends a WAL record per step. ``serve.py`` follows it and answers over HTTP, and
checkers ask it all the time: for the same rows of every table and the ``step`` leaf. At the end,
each answer is compared with the same rows of an uninterrupted training at that step. It kills only
processes that it started, by process id.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rich.console import Console
from running import demonstration, journal
from running.progress import Progress

from dlrm_jax import main, serve, trainer

_ROWS, _CHECKERS = 16, 2
_READY_SECS, _POLL_SECS = 120.0, 0.002


class Checker(threading.Thread):
    """Asks the server until it is told to stop.

    Attributes:
      answers: step to the digests that were answered for it.
      first_ages: position to the age of its version when it was first answered, in seconds.
      count: number of answers.
      error: what ended it early, or None.
    """

    def __init__(self, port: int):
        """Connects to the server."""
        super().__init__(daemon=True)
        self.answers: dict[int, set[str]] = collections.defaultdict(set)
        self.first_ages: dict[str, float] = {}
        self.count = 0
        self.error: Exception | None = None
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._stopping = threading.Event()

    def run(self) -> None:
        """Asks until ``stop``."""
        try:
            while not self._stopping.is_set():
                self._connection.request("GET", f"/digest?first=0&stop={_ROWS}")
                answer = self._connection.getresponse()
                found = json.loads(answer.read())
                if answer.status == 200:
                    self.answers[found["step"]].add(found["digest"])
                    self.first_ages.setdefault(found["position"], found["age_secs"])
                    self.count += 1
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self.join(60)


def run(options: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit status."""
    console = Console(highlight=False)
    # Orbax warns that a directory opened read-only is read-only.
    logging.getLogger("absl").setLevel(logging.ERROR)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dlrm-demo-", dir=options.directory) as place:
        root = Path(place)
        # Otherwise every new process would compile again.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(root / "compiled")
        victim = demonstration.Trainer(
            script=Path(main.__file__),
            directory=root / "run",
            journal=root / "run.jsonl",
            arguments=[
                *(f"--steps={options.steps}", "--save-every=20", "--print-every=5"),
                *("--tables=thesis", f"--scale={options.scale}", "--log=whole"),
            ],
        )
        console.rule("[bold]1. Train with a WAL record at every step; serve and check; kill -9")
        process = victim.start(quiet=True)
        demonstration.wait_until(lambda: len(records(victim.journal)) > 1, process)
        with server(victim.directory) as found:
            console.print(
                f"lookups at http://127.0.0.1:{found['port']}, status at {found['status']}"
            )
            checkers = [Checker(found["port"]) for _ in range(_CHECKERS)]
            for checker in checkers:
                checker.start()
            kill_step = random.Random(options.seed).randint(options.steps // 3, options.steps // 2)
            demonstration.wait_until(
                lambda: records(victim.journal)[-1]["step"] >= kill_step, process
            )
            process.kill()
            process.wait()
            console.print(f"[bold red]SIGKILL[/] to the trainer, process {process.pid}")

            console.rule("[bold]2. Resume; the server and the checkers did not stop")
            progress = Progress(console, "training", victim.journal, options.steps)
            victim.run("--resume", progress=progress)
            end = time.monotonic() + _READY_SECS
            while not any(options.steps in one.answers for one in checkers):
                if time.monotonic() > end:
                    sys.exit("the last step was not served")
                time.sleep(_POLL_SECS)
            for checker in checkers:
                checker.stop()

        console.rule("[bold]3. Compare each answer with an uninterrupted training")
        expected = digests(victim, options.steps)
    wrong, seen = 0, set[int]()
    for checker in checkers:
        seen |= checker.answers.keys()
        wrong += sum(
            digest != expected[step] for step, found in checker.answers.items() for digest in found
        )
    ages: dict[str, float] = {}
    for checker in checkers:
        for position, age in checker.first_ages.items():
            ages[position] = min(age, ages.get(position, age))
    p50, p99 = np.percentile([*ages.values()], (50, 99))
    answers = sum(checker.count for checker in checkers)
    failed = [checker.error for checker in checkers if checker.error is not None]
    console.print(
        f"{answers:,} answers of {len(seen)} steps, each with {_ROWS} rows of every table: "
        + (f"[red]{wrong} differ" if wrong else "[green]none is mixed or wrong")
    )
    console.print(
        f"from capture to the first answer: p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms"
    )
    for error in failed:
        console.print(f"[red]a checker failed: {error!r}")
    console.print(f"(done in {time.perf_counter() - started:.0f} s)")
    return 1 if wrong or failed or not answers else 0


def digests(whole: demonstration.Trainer, steps: int) -> dict[int, str]:
    """Returns the right answer at each step, from a training in this process."""
    options = main.parsed(list(whole.arguments))
    sizes = main.model_options(options)
    source, step = main.batches(options, sizes.rows), trainer.train_step(sizes)
    state = trainer.init_state(sizes, options.seed)
    found: dict[int, str] = {}
    for number in range(steps + 1):
        rows = {f"tables/{name}": np.asarray(one[:_ROWS]) for name, one in state.tables.items()}
        found[number] = serve.digest_of(number, rows)
        if number < steps:
            state, _, _ = step(state, source.batch(number))
    return found


@contextlib.contextmanager
def server(directory: Path | str) -> Iterator[dict[str, Any]]:
    """Runs ``serve.py``; yields its ports."""
    command = [sys.executable, serve.__file__, f"--directory={directory}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def records(path: Path) -> list[dict[str, Any]]:
    """Returns the trainer's journal entries about WAL records."""
    return journal.read(path, "logged") if path.exists() else []


def parsed() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scale", type=float, default=0.25, help="factor on the tables' row counts")
    add("--steps", type=int, default=60, help="number of training steps")
    add("--seed", type=int, default=None, help="seed of the kill; default: random")
    add("--directory", type=Path, help="where to create the temporary directory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run(parsed()))
