# SPDX-License-Identifier: Apache-2.0
"""Trains a DLRM and saves touched-row checkpoints while it does.

python examples/dlrm_jax/main.py --data train.txt --tables kaggle --scale 0.01
python examples/dlrm_jax/main.py --resume
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

import deltackpt
from deltackpt import policy
from dlrm_jax import data, trainer
from dlrm_jax.journal import Journal, area_under_curve, size

POLICIES = {
    "consecutive": policy.Consecutive,
    "oneshot": policy.OneShot,
    "intermittent": policy.Intermittent,
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parsed(arguments)
    console = Console()
    journal = Journal(console, options.journal)
    rows = data.table_rows(options.tables, options.scale)
    sizes = trainer.ModelOptions(
        rows=rows, width=options.width, bottom=options.bottom, top=options.top
    )
    source = batches(options, rows)
    codec = deltackpt.CodecChoice(delta=options.codec, max_error=options.max_error)
    handlers = {"embeddings": trainer.checkpoint_tables(codec)}
    saving = deltackpt.ManagerOptions(
        policy=POLICIES[options.policy](),
        retention=options.keep,
        durability=options.durability,
    )
    with deltackpt.CheckpointManager(
        options.directory, handlers=handlers, options=saving, sinks=(journal,)
    ) as manager:
        if options.resume:
            state = resumed(manager, sizes, console)
        elif manager.latest_step() is not None:
            sys.exit(f"{options.directory} holds step {manager.latest_step()}: give --resume")
        else:
            state = None
        if state is None:
            state = trainer.init_state(sizes, options.seed)
        total = sum(rows.values())
        console.print(
            f"{len(rows)} tables, {total:,} rows of {options.width}, "
            f"{size(total * (options.width + 1) * 4)} with their optimizer slots"
        )
        state = train(options, sizes, source, manager, state, journal, console)
        manager.wait()
        journal.write("end", step=int(state.step), digest=trainer.digest(state))
    journal.close()


def train(
    options: argparse.Namespace,
    sizes: trainer.ModelOptions,
    source: data.Source,
    manager: deltackpt.CheckpointManager,
    state: trainer.TrainState,
    journal: Journal,
    console: Console,
) -> trainer.TrainState:
    """Trains from ``state`` to ``options.steps``; prints the loss and the AUC of each window.

    The AUC is that of predictions made before their batch was learnt (progressive validation).
    """
    step = trainer.train_step(sizes)
    window: list[tuple[jax.Array, jax.Array, np.ndarray]] = []
    started = time.perf_counter()
    for number in range(int(state.step), options.steps):
        batch = source.batch(number)
        state, loss, logits = step(state, batch)
        window.append((loss, logits, batch.labels))
        done = number + 1
        if done % options.print_every == 0 or done == options.steps:
            losses = [float(loss) for loss, _, _ in window]
            scores = np.concatenate([np.asarray(logits) for _, logits, _ in window])
            labels = np.concatenate([labels for _, _, labels in window])
            speed = len(window) / (time.perf_counter() - started)
            journal.steps(done - len(window), losses)
            console.print(
                f"step {done}: loss {np.mean(losses):.4f}, "
                f"AUC {area_under_curve(scores, labels):.4f}, {speed:.1f} steps/s"
            )
            window, started = [], time.perf_counter()
        if done % options.save_every == 0 or done == options.steps:
            manager.save(done, state)
    return state


def resumed(
    manager: deltackpt.CheckpointManager, sizes: trainer.ModelOptions, console: Console
) -> trainer.TrainState | None:
    """The newest intact step, restored behind a progress bar; None where there is none."""
    template = jax.eval_shape(lambda: trainer.init_state(sizes, 0))
    bar = Progress(
        TextColumn("restoring"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("restore")
        result = manager.restore_latest(
            template, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if result is None:
        console.print("nothing to resume from: starting at step 0")
        return None
    for skipped, error in result.skipped:
        console.print(f"[yellow]step {skipped} was skipped:[/] {error}")
    console.print(
        f"resumed at step {result.step} from a chain of {len(result.chain)} saves "
        f"({size(result.bytes_read)} in {result.seconds:.2f} s)"
    )
    return result.state


def batches(options: argparse.Namespace, rows: dict[str, int]) -> data.Source:
    """Where the batches come from."""
    if options.data is not None:
        return data.CriteoFile(options.data, rows, options.batch)
    return data.ZipfTraffic(rows, options.batch, exponent=options.zipf, seed=options.seed)


def layers(text: str) -> tuple[int, ...]:
    """``512-512`` as (512, 512)."""
    return tuple(int(width) for width in text.split("-"))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="Criteo file, Kaggle TSV or CSV; default: synthetic traffic")
    add("--tables", default="thesis", help="thesis, kaggle, or a file with one number per line")
    add("--scale", type=float, default=1.0, help="factor on the tables' rows")
    add("--width", type=int, default=64, help="columns of the tables")
    add("--bottom", type=layers, default=(512, 512), help="hidden layers, e.g. 512-512")
    add("--top", type=layers, default=(1024, 1024, 1024), help="hidden layers")
    add("--batch", type=int, default=2048, help="samples in a batch")
    add("--steps", type=int, default=200, help="train until this step")
    add("--zipf", type=float, default=1.07, help="exponent of synthetic ids; 0 is uniform")
    add("--seed", type=int, default=0, help="of parameters and synthetic traffic")
    add("--directory", type=Path, default=Path("dlrm-checkpoints"), help="of the checkpoints")
    add("--save-every", type=int, default=20, help="steps between saves")
    add("--policy", choices=sorted(POLICIES), default="consecutive", help="base or delta")
    add("--codec", default="raw", help="of the rows of deltas, e.g. adaptive4")
    add("--max-error", type=float, help="relative l2 error that a save may make; default: any")
    add("--durability", choices=["power", "process"], default="power", help="of the saves")
    add("--keep", type=int, help="steps to keep, with their chains; default: all")
    add("--resume", action="store_true", help="go on from the newest intact step")
    add("--print-every", type=int, default=20, help="steps between printed lines")
    add("--journal", type=Path, help="append losses, saves and the final digest as JSON lines")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
