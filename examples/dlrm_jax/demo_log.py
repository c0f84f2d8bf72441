# SPDX-License-Identifier: Apache-2.0
"""Trains with a WAL record per step, is killed ten times, and resumes from the newest record.

python examples/dlrm_jax/demo_log.py                # the thesis's DLRM, synthetic traffic
python examples/dlrm_jax/demo_log.py --dense delta  # a third of the bytes
python examples/dlrm_jax/demo_log.py --kafka        # the WAL in Kafka, whose broker is killed too

A kill loses the step being computed. It loses at most one more step, whose ``append()`` had
returned, if a step takes at least twice as long as making a record durable. The losses are counted
from the trainer's journal and compared with those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import contextlib
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
from running import demonstration, journal, kafka_cluster
from running.digest import digest
from running.kafka_cluster import KafkaCluster
from running.progress import Progress

from dlrm_jax import main, trainer

_SAVE_EVERY = 20
_POLL_SECS = 0.002


@dataclasses.dataclass(frozen=True)
class Kill:
    """What one kill cost.

    Attributes:
      logged: the last step whose ``append()`` had returned.
      acknowledged: the newest step that the trainer knew to be durable.
      restored: the step from which the next trainer resumed.
    """

    logged: int
    acknowledged: int
    restored: int

    @property
    def repeated(self) -> int:
        """Number of steps whose ``append()`` had returned and that were computed again."""
        return max(0, self.logged - self.restored)


def run(options: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit status."""
    console = Console(highlight=False)
    # Orbax warns that a directory opened read-only is read-only.
    logging.getLogger("absl").setLevel(logging.ERROR)
    started = time.perf_counter()
    place = tempfile.TemporaryDirectory(prefix="dlrm-demo-", dir=options.directory)
    with place as folder, contextlib.ExitStack() as stack:
        root = Path(folder)
        # Otherwise every new process would compile again.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(root / "compiled")
        cluster = stack.enter_context(brokers(root)) if options.kafka else None
        killed, whole = (trainer_of(root, name, options, cluster) for name in ("killed", "whole"))

        console.rule("[bold]1. Train with a WAL record at every step, uninterrupted")
        whole.run(progress=Progress(console, "training", whole.journal, options.steps))
        step_secs, durable_secs = show_cost(whole, console)

        console.rule(f"[bold]2. Train again, with {options.kills} random SIGKILLs")
        kill_at_random(killed, cluster, options, console)
        killed.run(
            "--resume", progress=Progress(console, "training", killed.journal, options.steps)
        )
        kills = kills_of(killed.journal)
        kept = show_kills(kills, step_secs, durable_secs, console)

        console.rule("[bold]3. Compare with the uninterrupted run")
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


def brokers(root: Path) -> KafkaCluster:
    """Returns a broker that is not started yet."""
    if (reason := kafka_cluster.missing()) is not None:
        sys.exit(reason)
    (root / "kafka").mkdir()
    return KafkaCluster(root / "kafka")


def trainer_of(
    root: Path, name: str, options: argparse.Namespace, cluster: KafkaCluster | None
) -> demonstration.Trainer:
    """``main.py`` with the arguments of the demonstration; starts nothing yet."""
    kafka = []
    if cluster is not None:
        servers = cluster.config["bootstrap.servers"]
        kafka = [f"--kafka={servers}/{cluster.topic(name)}"]
    return demonstration.Trainer(
        script=Path(main.__file__),
        directory=root / name,
        journal=root / f"{name}.jsonl",
        arguments=[
            *(f"--steps={options.steps}", f"--save-every={_SAVE_EVERY}", "--print-every=1"),
            *("--tables=thesis", f"--scale={options.scale}", f"--log={options.dense}"),
            *kafka,
        ],
    )


def kill_at_random(
    victim: demonstration.Trainer,
    cluster: KafkaCluster | None,
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Kills the trainer some steps after each start, at a random moment, and brokers before it."""
    draw = random.Random(options.seed)
    for number in range(options.kills):
        before = logged(victim.journal)
        process = victim.start(*(["--resume"] if number else []), quiet=True)
        left = options.steps - (before[-1]["step"] if before else 0)
        # Its share of the remaining steps, so that some are left for later kills.
        wanted = draw.randint(1, max(1, left // (options.kills + 1 - number)))
        entries: list[dict[str, Any]] = []
        while len(entries) < wanted and process.poll() is None:
            time.sleep(_POLL_SECS)
            entries = logged(victim.journal)[len(before) :]
        if process.poll() is not None and number == 0:
            sys.exit("the trainer finished before it could be killed")
        if process.poll() is not None:
            console.print("the trainer finished before it could be killed again")
            return
        time.sleep(draw.uniform(0, options.longest_secs))
        if cluster is not None and number % 3 == 2:
            [broker] = cluster.brokers
            broker.kill()
            console.print("[bold red]SIGKILL[/] to the broker, which restarts")
            time.sleep(draw.uniform(0, options.longest_secs))
            broker.start()
            cluster.wait()
            time.sleep(draw.uniform(0, options.longest_secs))
        process.kill()
        process.wait()
        newest = logged(victim.journal)[-1]["step"]
        console.print(f"[bold red]SIGKILL[/] to process {process.pid} after step {newest}")


def logged(path: Path) -> list[dict[str, Any]]:
    """Returns the trainer's journal entries about WAL records."""
    return journal.read(path, "logged") if path.exists() else []


def kills_of(path: Path) -> list[Kill]:
    """Returns what each kill cost, from the journal of all starts of a trainer."""
    found: list[Kill] = []
    last = acknowledged = 0
    for entry in journal.lines(path):
        if entry["event"] == "start":
            found.append(Kill(last, acknowledged, entry["step"]))
            last = acknowledged = entry["step"]
        elif entry["event"] == "logged":
            last = entry["step"]
            acknowledged = max(acknowledged, entry["recovery"] or 0)
    # The first start began from scratch.
    return found[1:]


def show_cost(whole: demonstration.Trainer, console: Console) -> tuple[float, float]:
    """Prints the cost of a record; returns the median times of a step and of a durable record."""
    marks = journal.read(whole.journal, "durable")
    starts = [entry["unix_secs"] for entry in logged(whole.journal)]
    step_secs = median(later - earlier for earlier, later in zip(starts, starts[1:]))
    table = Table("WAL record", box=box.SIMPLE_HEAD)
    for name in ("median", "min", "max"):
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
        f"A step takes {milliseconds(step_secs)}; append() blocks for {blocked / step_secs:.1%} of "
        "it."
    )
    return step_secs, median(mark["durable_secs"] for mark in marks)


def show_kills(kills: list[Kill], step_secs: float, durable_secs: float, console: Console) -> bool:
    """Prints what each kill cost, and returns whether no acknowledged step was lost.

    More steps are repeated if the disk stalls, or during an outage of the broker.
    """
    table = Table("kill", box=box.SIMPLE_HEAD)
    for name in ("last append()", "acknowledged", "resumed from", "repeated"):
        table.add_column(name, justify="right")
    for number, kill in enumerate(kills, 1):
        steps = (kill.logged, kill.acknowledged, kill.restored)
        table.add_row(str(number), *map(str, steps), f"{kill.repeated} + current")
    console.print(table)
    most = max(kill.repeated for kill in kills)
    is_slow = step_secs >= 2 * durable_secs
    console.print(
        f"At most {most} step(s) whose append() had returned were repeated, besides the one being "
        f"computed.\nA step takes {step_secs / durable_secs:.1f} times as long as a durable record"
        + ("." if is_slow else ": less than twice, so it may be more than one.")
    )
    return all(kill.restored >= kill.acknowledged for kill in kills)


def parsed() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dense", choices=["whole", "delta"], default="whole", help="how records store the MLPs")
    add("--kafka", action="store_true", help="the WAL in Kafka; the broker is killed, too")
    add("--scale", type=float, default=1.0, help="factor on the tables' row counts")
    add("--steps", type=int, default=80, help="number of training steps")
    add("--kills", type=int, default=10, help="number of kills")
    add("--longest-secs", type=float, default=0.5, help="delay of the kill after a record")
    add("--seed", type=int, default=None, help="seed of the kills; default: random")
    add("--directory", type=Path, help="where to create the temporary directory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run(parsed()))
