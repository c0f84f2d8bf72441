# SPDX-License-Identifier: Apache-2.0
"""Kills a trainer in the middle of a save, and shows that nothing was lost."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

import deltackpt
from running import journal
from running.comparison import bytes_below
from running.progress import Progress

#: How Orbax names a step's directory until it is committed.
UNFINISHED = ".orbax-checkpoint-tmp"
#: Number of committed steps before the trainer may be killed.
_COMMITTED_FIRST = 3
_POLL_SECS = 0.0005

State = TypeVar("State")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """An example's ``main.py`` in its own process.

    Attributes:
      script: the ``main.py``.
      directory: its checkpoint directory or bucket URL.
      journal: its journal.
      arguments: further command-line options.
    """

    script: Path
    directory: Path | str
    journal: Path
    arguments: Sequence[str]

    def start(self, *more: str, quiet: bool = False) -> subprocess.Popen[bytes]:
        """Starts the process."""
        places = (f"--directory={self.directory}", f"--journal={self.journal}")
        return subprocess.Popen(
            [sys.executable, self.script, *places, *self.arguments, *more],
            stdout=subprocess.DEVNULL if quiet else None,
        )

    def run(self, *more: str, progress: Progress | None = None) -> None:
        """Runs the process to completion; shows ``progress``, if given, instead of its output."""
        process = self.start(*more, quiet=progress is not None)
        status = process.wait() if progress is None else progress.wait(process)
        if status:
            sys.exit(f"the trainer failed with status {status}")


def kill_in_a_save(victim: Trainer, console: Console) -> list[str]:
    """Kills the trainer while a step is partly written; returns the interrupted steps.

    If the kill comes too late and the step is committed, the trainer is resumed and killed again.
    """
    struck: list[str] = []
    while True:
        process = victim.start(*(["--resume"] if struck else []))
        unfinished = None
        while unfinished is None and process.poll() is None:
            if len(committed(Path(victim.directory))) >= _COMMITTED_FIRST:
                unfinished = save_in_progress(Path(victim.directory))
            time.sleep(_POLL_SECS)
        if unfinished is None:
            sys.exit("the trainer finished before it could be killed in a save")
        process.send_signal(signal.SIGKILL)
        process.wait()
        struck.append(unfinished.name.partition(UNFINISHED)[0])
        if unfinished.exists():
            console.print(
                f"[bold red]SIGKILL[/] to process {process.pid} while step {struck[-1]} was being "
                "written",
                soft_wrap=True,
            )
            return struck
        console.print(f"step {struck[-1]} was committed just before the kill: trying again")


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Polls a condition while a process is running; raises RuntimeError if it ends before."""
    is_over = False
    while not happened():
        if is_over:
            raise RuntimeError(f"the trainer exited with status {process.returncode} too early")
        is_over = process.poll() is not None
        time.sleep(_POLL_SECS)


def committed(directory: Path) -> list[int]:
    """Returns the committed steps, ascending."""
    names = [path.name for path in directory.glob("*")]
    return sorted(int(name) for name in names if name.isdecimal())


def save_in_progress(directory: Path) -> Path | None:
    """Returns the partly written step directory, or None."""
    for step_dir in directory.glob(f"*{UNFINISHED}*"):
        of_base = step_dir.glob("embeddings*/shard.*/*/*/c.*")
        of_delta = step_dir.glob("embeddings*/layer.*")
        with contextlib.suppress(FileNotFoundError):  # It has just been committed.
            if any(path.is_file() for path in (*of_base, *of_delta)):
                return step_dir
    return None


def show_directory(directory: Path | str, console: Console) -> None:
    """Prints the files that the kill left on disk."""
    directory = Path(directory)
    table = Table("step", "state", "files", "bytes", box=box.SIMPLE_HEAD)
    steps = [path for path in directory.iterdir() if path.name.split(".")[0].isdecimal()]
    for path in sorted(steps, key=lambda path: int(path.name.split(".")[0])):
        done = path.name.isdecimal()
        table.add_row(
            path.name.split(".")[0],
            "[green]committed" if done else "[red]cut off",
            str(sum(file.is_file() for file in path.rglob("*"))),
            journal.size(bytes_below(path)),
        )
    console.print(table)


def restored(directory: Path | str, step: int, tables: deltackpt.Tables, template: State) -> State:
    """Reads a step of a finished run from disk."""
    with deltackpt.CheckpointManager(
        directory,
        handlers={"embeddings": tables},
        options=deltackpt.ManagerOptions(access="read"),
    ) as manager:
        return manager.restore(step, template).state


def show_comparison(
    killed: Trainer,
    whole: Trainer,
    kills: list[str],
    on_disk: str,
    console: Console,
    verdict: str = "nothing was lost",
) -> bool:
    """Prints whether both runs are equal bit for bit, and returns it.

    Args:
      killed: the run that was killed and resumed.
      whole: the same run without interruption.
      kills: the interrupted steps, as returned by ``kill_in_a_save``.
      on_disk: digest of the last state of ``whole``, as read back from disk.
      console: where to print.
      verdict: what to print if they are equal.
    """
    equal = show_equal(killed, whole, on_disk, console)
    console.print(
        f"killed {len(kills)} time(s), last in the save of step {kills[-1]}: "
        + (f"[green]{verdict}" if equal else "[red]the runs differ"),
        soft_wrap=True,
    )
    return equal


def show_equal(killed: Trainer, whole: Trainer, on_disk: str, console: Console) -> bool:
    """Prints the table of ``show_comparison``."""
    expected = {e["step"]: e["loss"] for e in journal.read(whole.journal, "step")}
    found = journal.read(killed.journal, "step")
    matching = sum(expected.get(entry["step"]) == entry["loss"] for entry in found)
    [first] = journal.read(whole.journal, "end")
    second = journal.read(killed.journal, "end")[-1]
    last = first["step"] - 1
    every = set(range(first["step"]))
    losses = matching == len(found) and {e["step"] for e in found} == set(expected) == every
    table = Table(
        "compared bit for bit", "uninterrupted", "killed and resumed", "result", box=box.SIMPLE_HEAD
    )
    rows = [
        (
            f"losses of steps 0 to {last}",
            len(expected),
            f"{matching} of {len(found)}",
            losses,
        ),
        (
            f"loss at step {last}",
            expected[last],
            next(e["loss"] for e in reversed(found) if e["step"] == last),
            losses,
        ),
        (
            "every leaf of the final state (SHA-256)",
            first["digest"][:16],
            second["digest"][:16],
            first["digest"] == second["digest"],
        ),
        (
            "the same, as read back from disk",
            on_disk[:16],
            second["digest"][:16],
            on_disk == second["digest"],
        ),
    ]
    for name, left, right, equal in rows:
        table.add_row(name, str(left), str(right), "[green]equal" if equal else "[red]DIFFERENT")
    console.print(table)
    return all(row[-1] for row in rows)
