# SPDX-License-Identifier: Apache-2.0
"""Kills one of two trainers in the middle of a save, and resumes with one and with four.

python examples/dlrm_jax/demo_multi.py

Every run has four virtual CPU devices in total, for any number of processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from running import demonstration, journal
from running.digest import digest
from running.ports import free_port
from running.progress import Progress

import deltackpt
from dlrm_jax import main, trainer

_STEPS, _SAVE_EVERY = 48, 8
#: Number of committed steps before a trainer may be killed.
_COMMITTED_FIRST = 3
_KILLS = 4
#: A process that is silent for this long counts as dead.
_PROCESSES_SECS = 15
#: Time limits of a run, and for a trainer to report that another is missing.
_RUN_SECS, _REPORT_SECS = 300, 90
#: A save may finish within 0.1 s; everything else can be polled less often.
_SAVE_POLL_SECS, _POLL_SECS = 0.002, 0.1
#: Relative difference of losses that the order of float32 sums explains: at the first step after a
#: restart, and at later steps, where training has amplified it.
_ROUNDING, _AMPLIFIED = 1e-6, 1e-4
_ARGUMENTS = (
    *(f"--steps={_STEPS}", f"--save-every={_SAVE_EVERY}", f"--print-every={_SAVE_EVERY}"),
    *("--batch=512", "--bottom=128", "--top=256-128"),
    *("--digests", f"--processes-secs={_PROCESSES_SECS}"),
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A number of processes, and the devices of each."""

    processes: int
    devices: int

    def __str__(self) -> str:
        return f"{self.processes} x {self.devices}"


class Run:
    """``main.py`` in several processes that share a checkpoint directory.

    Attributes:
      topology: processes and devices.
      directory: its checkpoint directory.
      sizes: sizes of its model.
    """

    def __init__(self, root: Path, name: str, topology: Topology, options: argparse.Namespace):
        """Chooses the arguments; starts nothing yet."""
        self.topology = topology
        self.directory = root / name
        self._journal = root / f"{name}.jsonl"
        self._logs = [root / f"{name}.{process}.log" for process in range(topology.processes)]
        self._arguments = [
            *(*_ARGUMENTS, f"--scale={options.scale}"),
            *(f"--directory={self.directory}", f"--journal={self._journal}"),
        ]
        self.sizes = main.model_options(main.parsed(self._arguments))

    @contextlib.contextmanager
    def started(self, *more: str) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Starts the processes; all of them end with the block."""
        address = f"127.0.0.1:{free_port()}"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={self.topology.devices}",
        }
        processes = []
        try:
            for number, log in enumerate(self._logs):
                place = [f"--processes={self.topology.processes}", f"--process={number}"]
                with log.open("wb") as output:
                    process = subprocess.Popen(
                        [
                            *(sys.executable, main.__file__, *self._arguments, *more, *place),
                            f"--coordinator={address}",
                        ],
                        env=environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                processes.append(process)
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def run(self, *more: str, console: Console) -> None:
        """Runs the processes to completion, and shows their progress."""
        progress = self.progress(console)
        with self.started(*more) as processes:
            deadline = time.monotonic() + _RUN_SECS
            while any(process.poll() is None for process in processes):
                self.check(processes, deadline)
                progress.show()
                time.sleep(_POLL_SECS)
            self.check(processes, deadline)
            progress.show()

    def progress(self, console: Console) -> Progress:
        """Shows the progress of the run."""
        return Progress(console, f"training on {self.topology}", self._journal, _STEPS)

    def check(self, processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
        """Exits if a process has failed, or all take too long."""
        for number, process in enumerate(processes):
            if process.poll():
                problem = f"process {number} ended with status {process.returncode}"
                sys.exit(f"{self.topology}: {problem}\n{self.said(number, lines=30)}")
        if time.monotonic() > deadline:
            sys.exit(f"{self.topology}: not done after {_RUN_SECS} s\n{self.said(0, lines=30)}")

    def said(self, process: int, lines: int = 0) -> str:
        """Returns a process's output, or its last lines."""
        text = self._logs[process].read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def reported(self, process: int) -> str | None:
        """Returns the first deltackpt error in a process's output, or None."""
        errors = re.search(r"^deltackpt\.errors\.(.*)$", self.said(process), re.MULTILINE)
        return None if errors is None else errors[1]

    def losses(self) -> dict[int, float]:
        """Returns the loss of every step in the journal."""
        return {e["step"]: float.fromhex(e["loss"]) for e in journal.read(self._journal, "step")}

    def restarted(self) -> tuple[int, str]:
        """Returns the step and digest of the restored state."""
        entry = journal.read(self._journal, "restored")[-1]
        return entry["step"], entry["digest"]

    def saved_digest(self, step: int) -> str:
        """Returns the digest of the state passed to ``save(step)``, gathered from its devices."""
        digests = {e["step"]: e["digest"] for e in journal.read(self._journal, "saved")}
        return digests[step]

    def stored_digest(self, step: int) -> str:
        """Returns the digest of a step on disk, read by this process alone."""
        with deltackpt.CheckpointManager(
            self.directory,
            handlers={"embeddings": trainer.checkpoint_tables()},
            options=deltackpt.ManagerOptions(access="read"),
        ) as manager:
            return digest(manager.restore(step, trainer.abstract_state(self.sizes)).state)


def run(options: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit status."""
    console = Console(highlight=False)
    # Orbax warns that a directory opened read-only is read-only.
    logging.getLogger("absl").setLevel(logging.ERROR)
    jax.config.update("jax_platforms", "cpu")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dlrm-demo-", dir=options.directory) as place:
        root = Path(place)
        whole = Run(root, "whole", Topology(2, 2), options)
        killed = Run(root, "killed", Topology(2, 2), options)
        others = [
            Run(root, f"{topology}", topology, options)
            for topology in (Topology(1, 4), Topology(4, 1))
        ]

        console.rule("[bold]1. Train on 2 processes x 2 devices, uninterrupted")
        show_sizes(whole.sizes, console)
        whole.run(console=console)

        console.rule("[bold]2. Train again, and kill one process in the middle of a save")
        kill_in_a_save(killed, console)
        demonstration.show_directory(killed.directory, console)

        console.rule("[bold]3. Restart on other process counts, each from a copy")
        for other in others:
            shutil.copytree(killed.directory, other.directory)
            other.run("--resume", console=console)
        step = demonstration.committed(killed.directory)[-1]
        equal = show_states(step, killed, others, console)

        console.rule("[bold]4. Compare the losses with the uninterrupted run")
        close = show_losses(step, whole, killed, others, console)
    console.print(
        "[green]nothing was lost" if equal and close else "[red]the runs differ",
        f"(done in {time.perf_counter() - started:.0f} s)",
    )
    return 0 if equal and close else 1


def kill_in_a_save(victims: Run, console: Console) -> None:
    """Kills the last process while a step is partly written; after its report, the other one.

    If the kill comes too late and the step is committed, the run is resumed and killed again.
    """
    for attempt in range(_KILLS):
        with victims.started(*(["--resume"] if attempt else [])) as processes:
            unfinished, deadline = None, time.monotonic() + _RUN_SECS
            progress = victims.progress(console)
            while unfinished is None:
                victims.check(processes, deadline)
                progress.show()
                if all(process.poll() == 0 for process in processes):
                    sys.exit("the trainers finished before one could be killed in a save")
                if len(demonstration.committed(victims.directory)) >= _COMMITTED_FIRST:
                    unfinished = demonstration.save_in_progress(victims.directory)
                time.sleep(_SAVE_POLL_SECS)
            processes[-1].send_signal(signal.SIGKILL)
            processes[-1].wait()
            step = int(unfinished.name.partition(demonstration.UNFINISHED)[0])
            console.print(
                f"[bold red]SIGKILL[/] to process {len(processes) - 1} (pid {processes[-1].pid}) "
                f"while step {step} was being written",
                soft_wrap=True,
            )
            show_report(victims, processes[0], console)
        if step not in demonstration.committed(victims.directory):
            return
        console.print(f"step {step} was committed before the kill: trying again")
    sys.exit(f"{_KILLS} kills came too late to interrupt a save")


def show_report(victims: Run, survivor: subprocess.Popen[bytes], console: Console) -> None:
    """Waits until process 0 has reported that another is missing, or has ended."""
    started = time.monotonic()
    while survivor.poll() is None and time.monotonic() < started + _REPORT_SECS:
        if (report := victims.reported(0)) is not None:
            console.print(f"process 0 reported after {time.monotonic() - started:.0f} s:")
            console.print(f"  {report}", markup=False)
            return
        time.sleep(_POLL_SECS)
    end = "still ran" if survivor.returncode is None else f"ended with {survivor.returncode}"
    console.print(f"process 0 {end} after {time.monotonic() - started:.0f} s, without a report")


def show_sizes(sizes: trainer.ModelOptions, console: Console) -> None:
    """Prints the tables and how they are padded."""
    rows = sum(sizes.rows.values())
    padded = sum(count + -count % sizes.row_multiple for count in sizes.rows.values())
    console.print(
        f"{len(sizes.rows)} tables with {rows:,} rows of {sizes.width} values.\nEach table is "
        f"padded to a multiple of {sizes.row_multiple} rows ({padded:,} in total), so that 4 "
        "devices can share it."
    )


def show_states(step: int, killed: Run, others: Sequence[Run], console: Console) -> bool:
    """Prints whether every topology restored the saved state bit for bit, and returns it."""
    saved = killed.saved_digest(step)
    rows = [
        (f"passed to save() on {killed.topology}", step, saved),
        ("read from disk by this process", step, killed.stored_digest(step)),
        *((f"restored on {other.topology}", *other.restarted()) for other in others),
    ]
    table = Table("state", "step", "SHA-256 of every leaf", "result", box=box.SIMPLE_HEAD)
    found = []
    for name, at, sha256 in rows:
        found.append((at, sha256) == (step, saved))
        mark = "[green]equal" if found[-1] else "[red]DIFFERENT"
        table.add_row(name, str(at), sha256[:16], mark)
    console.print(table)
    return all(found)


def show_losses(
    step: int, whole: Run, killed: Run, others: Sequence[Run], console: Console
) -> bool:
    """Prints the differences of the losses; returns whether rounding explains them."""
    expected = whole.losses()
    table = Table("losses of", box=box.SIMPLE_HEAD)
    for name in ("steps", "equal bits", "first step", "greatest", "last loss"):
        table.add_column(name, justify="right")
    close = set(expected) == set(range(_STEPS))
    for name, source, steps in (
        (f"{killed.topology}, killed", killed, range(step)),
        *((f"{other.topology}, restarted", other, range(step, _STEPS)) for other in others),
    ):
        losses = source.losses()
        if not set(steps) <= set(losses):
            sys.exit(f"{name}: expected the losses of steps {steps}, found some missing")
        differences = relative_differences(losses, expected, steps)
        close &= differences[0] <= _ROUNDING and max(differences) <= _AMPLIFIED
        table.add_row(
            name,
            f"{steps[0]} to {steps[-1]}",
            f"{np.count_nonzero(differences == 0)} of {len(steps)}",
            f"{differences[0]:.1e}",
            f"{max(differences):.1e}",
            f"{losses[steps[-1]]:.7f}",
        )
    whole_steps, last = f"0 to {_STEPS - 1}", f"{expected[_STEPS - 1]:.7f}"
    table.add_row(f"{whole.topology}, whole", whole_steps, "", "", "", last)
    console.print(table)
    console.print(
        "The columns hold relative differences. Other device counts sum the same float32 values "
        f"in another order. At the first step after the restart, up to {_ROUNDING:.0e} is "
        f"rounding; later, training may amplify it up to {_AMPLIFIED:.0e}."
    )
    return close


def relative_differences(
    found: dict[int, float], expected: dict[int, float], steps: Sequence[int]
) -> np.ndarray:
    """Returns |found - expected| / |expected| for each of ``steps``, (steps,) float64."""
    ours = np.array([found[step] for step in steps])
    theirs = np.array([expected[step] for step in steps])
    return np.abs(ours - theirs) / np.abs(theirs)


def parsed() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scale", type=float, default=0.25003, help="factor on the tables' row counts"
    )
    parser.add_argument("--directory", type=Path, help="where to create the temporary directory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run(parsed()))
