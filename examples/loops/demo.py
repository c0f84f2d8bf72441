# SPDX-License-Identifier: Apache-2.0
"""Kills training loops at random moments, resumes them, and shows that no sample is lost.

python examples/loops/demo.py                       # the optax loop, then the nnx loop
python examples/loops/demo.py --loop nnx --pipeline loader --workers 2 --kills 5
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich import box
from rich.console import Console
from rich.table import Table
from running import journal
from running.demonstration import UNFINISHED, wait_until
from running.progress import Progress

from loops import data, lineage
from loops.options import parsed

#: Maximum number of steps of a start before it is killed.
_STEPS_BEFORE_KILL = 16
_LOOPS = ("optax", "nnx")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A loop, the folder of its checkpoints and journals, and further command-line options.

    Attributes:
      loop: ``"optax"`` or ``"nnx"``.
      folder: created if it does not exist.
      arguments: arguments of the script.
    """

    loop: str
    folder: Path
    arguments: Sequence[str] = ()

    @property
    def directory(self) -> Path:
        """The checkpoint directory."""
        return self.folder / "checkpoints"

    @property
    def journals(self) -> list[Path]:
        """The journals of all starts, in order."""
        found = self.folder.glob("start-*.jsonl")
        return sorted(found, key=lambda path: int(path.stem.removeprefix("start-")))

    def start(self) -> tuple[subprocess.Popen[bytes], Path]:
        """Starts the loop in its own process group; also returns its new journal."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"start-{len(self.journals)}.jsonl"
        path.touch()
        script = Path(__file__).with_name(f"{self.loop}_loop.py")
        places = (f"--directory={self.directory}", f"--journal={path}")
        process = subprocess.Popen(
            [sys.executable, script, *places, *self.arguments],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        return process, path

    def finish(self, console: Console) -> str:
        """Runs the loop to completion, shows its progress, and returns its final state's digest."""
        process, path = self.start()
        steps = parsed([*self.arguments, "--directory=."], "").steps
        try:
            status = Progress(console, "training", path, steps).wait(process)
        finally:
            end_group(process)
        if status:
            raise RuntimeError(f"{self.loop} loop: expected to end with status 0, found {status}")
        [end] = journal.read(path, "end")
        return end["digest"]

    def kill(self, rng: random.Random, *, in_save: bool) -> tuple[int, bool]:
        """Starts the loop and kills it after some steps.

        Args:
          rng: chooses the number of steps.
          in_save: whether to kill while a save is being written.

        Returns:
          The last step that it trained, and whether a save was interrupted.
        """
        process, path = self.start()
        try:
            steps = rng.randint(1, _STEPS_BEFORE_KILL)
            wait_until(lambda: len(journal.read(path, "step")) >= steps, process)
            if in_save:
                wait_until(lambda: bool(self.unfinished()), process)
        finally:
            end_group(process)
        return journal.read(path, "step")[-1]["step"], bool(self.unfinished())

    def unfinished(self) -> list[Path]:
        """Returns the partly written steps."""
        return list(self.directory.glob(f"*{UNFINISHED}*"))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a loop and its data workers, which would otherwise survive it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # It has exited, and had no workers.
    process.wait()


def whole_epochs(samples: list[list[int]]) -> bool:
    """Returns whether every epoch holds every sample exactly once."""
    step = data.STEPS_PER_EPOCH
    epochs = [sum(samples[i : i + step], []) for i in range(0, len(samples), step)]
    return all(sorted(epoch) == list(range(data.SAMPLES)) for epoch in epochs)


def run(loop: str, options: argparse.Namespace, console: Console) -> bool:
    """Demonstrates one loop; returns whether both runs are equal."""
    rng = random.Random(options.seed)
    arguments = [f"--pipeline={options.pipeline}", f"--workers={options.workers}"]
    with tempfile.TemporaryDirectory(prefix="loops-demo-") as place:
        killed = Run(loop=loop, folder=Path(place, "killed"), arguments=arguments)
        whole = Run(loop=loop, folder=Path(place, "whole"), arguments=arguments)

        console.rule(f"[bold]The {loop} loop, killed {options.kills} times")
        for number in range(options.kills):
            step, cut_off = killed.kill(rng, in_save=number % 2 == 0)
            where = ", in the middle of a save" if cut_off else ""
            console.print(f"[red]SIGKILL[/] after step {step}{where}")
        digest = killed.finish(console)
        found = lineage.read(killed.journals)
        starts = ", ".join(map(str, found.starts))
        console.print(f"started at steps {starts}; {found.repeated} steps were trained again")

        console.rule(f"[bold]The {loop} loop, compared with an uninterrupted run")
        expected_digest = whole.finish(console)
        expected = lineage.read(whole.journals)
    epochs = len(expected.samples) // data.STEPS_PER_EPOCH
    rows = [
        (f"each sample once in each of {epochs} epochs", whole_epochs(found.samples)),
        ("the samples behind the final state, in order", found.samples == expected.samples),
        (f"every leaf of the final state ({digest[:16]})", digest == expected_digest),
    ]
    table = Table("equal to the other run", "result", box=box.SIMPLE_HEAD)
    for name, equal in rows:
        table.add_row(name, "[green]yes" if equal else "[red]NO")
    console.print(table)
    return all(equal for _, equal in rows)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Kills a loop at random moments and resumes it.")
    parser.add_argument("--loop", choices=_LOOPS, action="append", help="default: both")
    parser.add_argument("--pipeline", choices=("dataset", "loader"), default="dataset")
    parser.add_argument("--workers", type=int, default=0, help="number of prefetching processes")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills")
    options, console = parser.parse_args(), Console(highlight=False)
    equal = [run(loop, options, console) for loop in options.loop or _LOOPS]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
