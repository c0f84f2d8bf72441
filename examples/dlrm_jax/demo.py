# SPDX-License-Identifier: Apache-2.0
"""Kills a trainer in the middle of a save, resumes it, and shows that nothing was lost.

python examples/dlrm_jax/demo.py # synthetic traffic python examples/dlrm_jax/demo.py --data
train.txt # a Criteo file
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from running import comparison, demonstration
from running.digest import digest
from running.progress import Progress

from dlrm_jax import main, trainer

_STEPS, _SAVE_EVERY = 80, 10


def run(options: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit status."""
    console = Console(highlight=False)
    # Orbax warns that a directory opened read-only is read-only.
    logging.getLogger("absl").setLevel(logging.ERROR)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dlrm-demo-", dir=options.directory) as place:
        root = Path(place)
        killed, whole = (trainer_of(root, name, options) for name in ("killed", "whole"))

        console.rule("[bold]1. Train; SIGKILL in the middle of a save")
        kills = demonstration.kill_in_a_save(killed, console)
        demonstration.show_directory(killed.directory, console)

        console.rule("[bold]2. Resume")
        killed.run("--resume")

        console.rule("[bold]3. Compare with an uninterrupted run")
        whole.run(progress=Progress(console, "training", whole.journal, _STEPS))
        settings = main.parsed(list(whole.arguments))
        sizes = main.model_options(settings)
        tables, template = trainer.checkpoint_tables(), trainer.init_state(sizes, 0)
        state = demonstration.restored(whole.directory, _STEPS, tables, template)
        equal = demonstration.show_comparison(killed, whole, kills, digest(state), console)

        console.rule("[bold]4. Compare with stock Orbax on the same state")
        step, source = trainer.train_step(sizes), main.batches(settings, sizes.rows)

        def train(state: trainer.TrainState) -> trainer.TrainState:
            for _ in range(_SAVE_EVERY):
                state, _, _ = step(state, source.batch(int(state.step)))
            return state

        figures = comparison.against_orbax(
            train, trainer.checkpoint_tables, state, directory=root, rounds=5, console=console
        )
        comparison.show_figures(figures, console)
    console.print(f"done in {time.perf_counter() - started:.0f} s")
    return 0 if equal else 1


def trainer_of(root: Path, name: str, options: argparse.Namespace) -> demonstration.Trainer:
    """``main.py`` with the arguments of the demonstration; starts nothing yet."""
    arguments = [
        *(f"--steps={_STEPS}", f"--save-every={_SAVE_EVERY}", f"--print-every={_SAVE_EVERY}"),
        *("--batch=512", "--bottom=128", "--top=256-128"),
    ]
    if options.data is None:
        arguments += ["--tables=thesis", f"--scale={options.scale}"]
    else:
        scale = 0.02 * options.scale
        arguments += ["--tables=kaggle", f"--scale={scale}", f"--data={options.data}"]
    return demonstration.Trainer(
        script=Path(main.__file__),
        directory=root / name,
        journal=root / f"{name}.jsonl",
        arguments=arguments,
    )


def parsed() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="Criteo file; default: synthetic traffic")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the tables' row counts")
    parser.add_argument("--directory", type=Path, help="where to create the temporary directory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run(parsed()))
