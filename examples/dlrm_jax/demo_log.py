# SPDX-License-Identifier: Apache-2.0
"""Trains with a mark at every step, is killed ten times, and goes on from the newest mark.

python examples/dlrm_jax/demo_log.py                  # the thesis's DLRM, synthetic traffic
python examples/dlrm_jax/demo_log.py --dense delta    # a third of the bytes

A kill takes the step in computation, and at most one whose ``log()`` had returned where a step
takes at least twice as long as a mark until it is durable. That is counted from what the trainer
wrote down before it died, and the losses are compared with those of a run that nobody killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich import box
from rich.console import Console
from rich.table import Table
from running import demonstration, journal
from running.digest import digest

from dlrm_jax import main, trainer

_SAVE_EVERY = 20
_POLL_SECS = 0.002


@dataclasses.dataclass(frozen=True)
class Kill:
    """What one kill cost.

    Attributes:
      logged: the last step whose ``log()`` had returned.
      acknowledged: the newest step that the trainer knew to be durable.
      restored: the step that the next trainer went on from.
    """

    logged: int
    acknowledged: int
    restored: int

    @property
    def repeated(self) -> int:
        """Steps whose ``log()`` had returned, and which were computed again."""
        return max(0, self.logged - self.restored)


def run(options: argparse.Namespace) -> int:
    """The whole demonstration; returns the exit status."""
    console = Console(highlight=False)
    # Orbax warns that a directory opened read-only is read-only.
    logging.getLogger("absl").setLevel(logging.ERROR)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dlrm-demo-", dir=options.directory) as place:
        root = Path(place)
        # What every new process would compile again.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(root / "compiled")
        killed, whole = (trainer_of(root, name, options) for name in ("killed", "whole"))

        console.rule("[bold]1. Train with a mark at every step, without interruption")
        with console.status("training"):
            whole.run(quiet=True)
        step_secs, durable_secs = show_cost(whole, console)

        console.rule(f"[bold]2. Train again, and be killed {options.kills} times")
        kill_at_random(killed, options, console)
        killed.run("--resume", quiet=True)
        kills = kills_of(killed.journal)
        kept = show_kills(kills, step_secs, durable_secs, console)

        console.rule("[bold]3. Compare with the run that nobody interrupted")
        sizes = main.model_options(main.parsed(list(whole.arguments)))
        tables, template = trainer.checkpoint_tables(), trainer.abstract_state(sizes)
        state = demonstration.restored(whole.directory, options.steps, tables, template)
        equal = demonstration.show_equal(killed, whole, digest(state), console)
    console.print(
        f"killed {len(kills)} times: "
        + ("[green]no acknowledged step was lost" if equal and kept else "[red]the runs differ"),
        f"(done in {time.perf_counter() - started:.0f} s)",
    )
    return 0 if equal and kept else 1


def trainer_of(root: Path, name: str, options: argparse.Namespace) -> demonstration.Trainer:
    """``main.py`` with the arguments of the demonstration; nothing is started yet."""
    return demonstration.Trainer(
        script=Path(main.__file__),
        directory=root / name,
        journal=root / f"{name}.jsonl",
        arguments=[
            *(f"--steps={options.steps}", f"--save-every={_SAVE_EVERY}", "--print-every=1"),
            *("--tables=thesis", f"--scale={options.scale}", f"--log={options.dense}"),
        ],
    )


def kill_at_random(
    victim: demonstration.Trainer, options: argparse.Namespace, console: Console
) -> None:
    """Kills the trainer some steps after each start, and at any moment of a step."""
    draw = random.Random(options.seed)
    for number in range(options.kills):
        before = logged(victim.journal)
        process = victim.start(*(["--resume"] if number else []), quiet=True)
        left = options.steps - (before[-1]["step"] if before else 0)
        # Its share of what is left, so that there is something for those that follow.
        wanted = draw.randint(1, max(1, left // (options.kills + 1 - number)))
        entries: list[dict[str, Any]] = []
        while len(entries) < wanted and process.poll() is None:
            time.sleep(_POLL_SECS)
            entries = logged(victim.journal)[len(before) :]
        if process.poll() is not None:
            sys.exit("the trainer ended before it could be killed")
        time.sleep(draw.uniform(0, options.longest_secs))
        process.kill()
        process.wait()
        console.print(
            f"[bold red]SIGKILL[/] to process {process.pid} after step {entries[-1]['step']}"
        )


def logged(path: Path) -> list[dict[str, Any]]:
    """What a trainer wrote down of its marks."""
    return journal.read(path, "logged") if path.exists() else []


def kills_of(path: Path) -> list[Kill]:
    """What each kill cost, from the journal of all lives of a trainer."""
    found: list[Kill] = []
    last = acknowledged = 0
    for entry in journal.lines(path):
        if entry["event"] == "start":
            found.append(Kill(last, acknowledged, entry["step"]))
            last = acknowledged = entry["step"]
        elif entry["event"] == "logged":
            last = entry["step"]
            acknowledged = max(acknowledged, entry["recovery"] or 0)
    # The first life began anew.
    return found[1:]


def show_cost(whole: demonstration.Trainer, console: Console) -> tuple[float, float]:
    """Prints what a mark costs; returns the medians of a step and of a mark until it is durable."""
    marks = journal.read(whole.journal, "durable")
    starts = [entry["unix_secs"] for entry in logged(whole.journal)]
    step_secs = median(later - earlier for earlier, later in zip(starts, starts[1:]))
    table = Table("a mark", box=box.SIMPLE_HEAD)
    for name in ("median", "least", "greatest"):
        table.add_column(name, justify="right")

    def milliseconds(value: float) -> str:
        return f"{1e3 * value:.1f} ms"

    figures: list[tuple[str, str, Callable[[float], str]]] = [
        ("rows", "rows", "{:,.0f}".format),
        ("bytes written", "bytes_written", journal.size),
        ("training blocked", "blocked_secs", milliseconds),
        ("encoded in", "encode_secs", milliseconds),
        ("durable after", "durable_secs", milliseconds),
    ]
    for name, field, shown in figures:
        values = [mark[field] for mark in marks]
        table.add_row(name, *(shown(of(values)) for of in (median, min, max)))
    console.print(table)
    blocked = median(mark["blocked_secs"] for mark in marks)
    console.print(
        f"A step takes {milliseconds(step_secs)}; log() is {blocked / step_secs:.1%} of it."
    )
    return step_secs, median(mark["durable_secs"] for mark in marks)


def show_kills(kills: list[Kill], step_secs: float, durable_secs: float, console: Console) -> bool:
    """Prints what each kill cost, and returns whether that is no more than was promised."""
    table = Table("kill", box=box.SIMPLE_HEAD)
    for name in ("last log() returned", "acknowledged", "went on from", "repeated"):
        table.add_column(name, justify="right")
    for number, kill in enumerate(kills, 1):
        steps = (kill.logged, kill.acknowledged, kill.restored)
        table.add_row(str(number), *map(str, steps), f"{kill.repeated} + the one in computation")
    console.print(table)
    most = max(kill.repeated for kill in kills)
    promised = step_secs >= 2 * durable_secs
    console.print(
        f"At most {most} step(s) whose log() had returned were repeated; a step takes "
        f"{step_secs / durable_secs:.1f} times as long as a mark until it is durable"
        + ("." if promised else ": less than twice, so more than one may be.")
    )
    held = all(kill.restored >= kill.acknowledged for kill in kills)
    return held and (most <= 1 or not promised)


def parsed() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dense", choices=["whole", "delta"], default="whole", help="the MLPs of a mark")
    add("--scale", type=float, default=1.0, help="factor on the tables' rows")
    add("--steps", type=int, default=80, help="of the training")
    add("--kills", type=int, default=10, help="of the trainer")
    add("--longest-secs", type=float, default=0.5, help="from a mark until the kill")
    add("--seed", type=int, default=None, help="of the moments; default: another each time")
    add("--directory", type=Path, help="where to make a temporary directory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run(parsed()))
