# SPDX-License-Identifier: Apache-2.0
"""Kills a trainer in the middle of a save, resumes it, and proves that nothing was lost.

python examples/dlrm_jax/demo.py                  # synthetic traffic
python examples/dlrm_jax/demo.py --data train.txt # a Criteo file
"""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich import box
from rich.console import Console
from rich.table import Table

import deltackpt
from dlrm_jax import comparison, journal, main, trainer

#: How Orbax names the directory of a step until it is committed.
UNFINISHED = ".orbax-checkpoint-tmp"
_STEPS, _SAVE_EVERY = 80, 10
#: Steps committed before the trainer may be killed.
_COMMITTED_FIRST = 3
_POLL_SECS = 0.0005


def run(options: argparse.Namespace) -> int:
    """The whole demonstration; returns the exit status."""
    console = Console(highlight=False)
    # Orbax warns that a directory opened read-only is read-only.
    logging.getLogger("absl").setLevel(logging.ERROR)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dlrm-demo-", dir=options.directory) as place:
        root = Path(place)
        killed, whole = Trainer(root, "killed", options), Trainer(root, "whole", options)

        console.rule("[bold]1. Train, and be killed in the middle of a save")
        kills = kill_in_a_save(killed, console)
        show_directory(killed.directory, console)

        console.rule("[bold]2. Resume")
        killed.run("--resume")

        console.rule("[bold]3. Compare with a run that nobody interrupted")
        with console.status("training without interruption"):
            whole.run(quiet=True)
        state = restored(whole, options)
        equal = show_comparison(killed, whole, kills, state, console)

        console.rule("[bold]4. Against stock Orbax, the same state")
        with console.status("saving side by side"):
            figures = comparison.against_orbax(
                whole.sizes,
                whole.source,
                state,
                directory=root,
                steps_between=_SAVE_EVERY,
                rounds=5,
            )
        show_figures(figures, console)
    console.print(f"done in {time.perf_counter() - started:.0f} s")
    return 0 if equal else 1


class Trainer:
    """``main.py`` in a process of its own."""

    def __init__(self, root: Path, name: str, options: argparse.Namespace):
        """Chooses the arguments; nothing is started yet."""
        self.directory = root / name
        self.journal = root / f"{name}.jsonl"
        self._arguments = [
            *(f"--directory={self.directory}", f"--journal={self.journal}"),
            *(f"--steps={_STEPS}", f"--save-every={_SAVE_EVERY}", f"--print-every={_SAVE_EVERY}"),
            *("--batch=512", "--bottom=128", "--top=256-128"),
        ]
        if options.data is None:
            self._arguments += ["--tables=thesis", f"--scale={options.scale}"]
        else:
            scale = 0.02 * options.scale
            self._arguments += ["--tables=kaggle", f"--scale={scale}", f"--data={options.data}"]
        settings = main.parsed(self._arguments)
        self.sizes = main.model_options(settings)
        self.source = main.batches(settings, self.sizes.rows)

    def start(self, *more: str, quiet: bool = False) -> subprocess.Popen[bytes]:
        """Starts the process."""
        return subprocess.Popen(
            [sys.executable, main.__file__, *self._arguments, *more],
            stdout=subprocess.DEVNULL if quiet else None,
        )

    def run(self, *more: str, quiet: bool = False) -> None:
        """Runs the process to its end."""
        status = self.start(*more, quiet=quiet).wait()
        if status:
            sys.exit(f"the trainer failed with status {status}")


def kill_in_a_save(victim: Trainer, console: Console) -> list[str]:
    """Kills the trainer while a step is partly written; returns the steps that it was killed in.

    A kill that comes too late finds the step committed; the trainer is then resumed and killed
    again.
    """
    struck: list[str] = []
    while True:
        process = victim.start(*(["--resume"] if struck else []))
        unfinished = None
        while unfinished is None and process.poll() is None:
            if len(committed(victim.directory)) >= _COMMITTED_FIRST:
                unfinished = save_in_progress(victim.directory)
            time.sleep(_POLL_SECS)
        if unfinished is None:
            sys.exit("the trainer ended before it could be killed in a save")
        process.send_signal(signal.SIGKILL)
        process.wait()
        struck.append(unfinished.name.removesuffix(UNFINISHED))
        if unfinished.exists():
            console.print(
                f"[bold red]SIGKILL[/] to process {process.pid} while step {struck[-1]} was "
                "being written"
            )
            return struck
        console.print(f"step {struck[-1]} was committed just before the kill: once more")


def committed(directory: Path) -> list[int]:
    """Steps that stand in the directory, ascending."""
    names = [path.name for path in directory.glob("*")]
    return sorted(int(name) for name in names if name.isdecimal())


def save_in_progress(directory: Path) -> Path | None:
    """The step directory that is partly written, None where no save is under way."""
    for step_dir in directory.glob(f"*{UNFINISHED}"):
        chunks = step_dir.glob("embeddings*/part.*/*/*/c/**/*")
        if any(path.is_file() for path in chunks):
            return step_dir
    return None


def show_directory(directory: Path, console: Console) -> None:
    """What the kill left on disk."""
    table = Table("step", "state", "files", "bytes", box=box.SIMPLE_HEAD)
    steps = [path for path in directory.iterdir() if path.name.split(".")[0].isdecimal()]
    for path in sorted(steps, key=lambda path: int(path.name.split(".")[0])):
        done = path.name.isdecimal()
        table.add_row(
            path.name.split(".")[0],
            "[green]committed" if done else "[red]cut off",
            str(sum(file.is_file() for file in path.rglob("*"))),
            journal.size(comparison.step_bytes(path)),
        )
    console.print(table)


def restored(whole: Trainer, options: argparse.Namespace) -> trainer.TrainState:
    """The last step of the uninterrupted run, read from disk."""
    template = trainer.init_state(whole.sizes, 0)
    with deltackpt.CheckpointManager(
        whole.directory,
        handlers={"embeddings": trainer.checkpoint_tables()},
        options=deltackpt.ManagerOptions(read_only=True),
    ) as manager:
        return manager.restore(_STEPS, template).state


def show_comparison(
    killed: Trainer,
    whole: Trainer,
    kills: list[str],
    state: trainer.TrainState,
    console: Console,
) -> bool:
    """Prints whether both runs are equal bit for bit, and returns it."""
    expected = {e["step"]: e["loss"] for e in journal.read(whole.journal, "step")}
    found = journal.read(killed.journal, "step")
    matching = sum(expected.get(entry["step"]) == entry["loss"] for entry in found)
    losses = matching == len(found) and {e["step"] for e in found} == set(range(_STEPS))
    [first] = journal.read(whole.journal, "end")
    second = journal.read(killed.journal, "end")[-1]
    table = Table(
        "compared bit for bit", "uninterrupted", "killed and resumed", "", box=box.SIMPLE_HEAD
    )
    rows = [
        (
            f"losses of steps 0 to {_STEPS - 1}",
            len(expected),
            f"{matching} of {len(found)}",
            losses,
        ),
        (
            f"loss at step {_STEPS - 1}",
            expected[_STEPS - 1],
            next(e["loss"] for e in reversed(found) if e["step"] == _STEPS - 1),
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
            trainer.digest(state)[:16],
            second["digest"][:16],
            trainer.digest(state) == second["digest"],
        ),
    ]
    for name, left, right, equal in rows:
        table.add_row(name, str(left), str(right), "[green]equal" if equal else "[red]DIFFERENT")
    console.print(table)
    equal = all(row[-1] for row in rows)
    console.print(
        f"killed {len(kills)} time(s), last in the save of step {kills[-1]}: "
        + ("[green]nothing was lost" if equal else "[red]the runs differ")
    )
    return equal


def show_figures(figures: list[comparison.Figures], console: Console) -> None:
    """A table of what each way to save costs, as multiples of the first."""
    table = Table("save", box=box.SIMPLE_HEAD)
    for name in ("bytes", "", "save() blocks", "committed after", ""):
        table.add_column(name, justify="right")
    ours = figures[0]
    for row in figures:
        table.add_row(
            row.name,
            journal.size(row.nbytes),
            f"x {row.nbytes / ours.nbytes:.1f}",
            f"{row.blocked_secs * 1e3:.1f} ms",
            f"{row.committed_secs * 1e3:.0f} ms",
            f"x {row.committed_secs / ours.committed_secs:.1f}",
        )
    console.print(table)
    console.print(
        "Medians of 5 interleaved saves each. The first row survives a power cut; Orbax forces its "
        "arrays to disk, not its metadata."
    )


def parsed() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="Criteo file; default: synthetic traffic")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the tables' rows")
    parser.add_argument("--directory", type=Path, help="where to make a temporary directory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run(parsed()))
