# SPDX-License-Identifier: Apache-2.0
"""Trains a T5 1.1 on span corruption and saves touched-row checkpoints while it does.

python examples/t5x/main.py --text wiki.txt --size small
python examples/t5x/main.py --text wiki.txt --size small --resume --steps 400
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from running.digest import digest
from running.journal import Journal, size
from running.restoring import resumed

import deltackpt
from deltackpt import policy
from t5_jax import data, model, trainer

POLICIES = {
    "consecutive": policy.Consecutive,
    "oneshot": policy.OneShot,
    "intermittent": policy.Intermittent,
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parsed(arguments)
    console = Console()
    source, training = batches(options)
    journal = Journal(console, options.journal)
    marks = options.tracking == "marks"
    with deltackpt.CheckpointManager(
        options.directory,
        handlers={"embeddings": trainer.checkpoint_tables(options.codec)},
        options=deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(
                tracking=options.tracking, policy=POLICIES[options.policy]()
            ),
            writes=deltackpt.WriteOptions(
                durability=options.durability, when_busy=options.when_busy
            ),
            retention=options.keep,
        ),
        sinks=(journal,),
    ) as manager:
        state = None
        if options.resume:
            state = resumed(manager, trainer.abstract_state(training, mark=marks), console)
        elif manager.latest_step() is not None:
            sys.exit(f"{options.directory} holds step {manager.latest_step()}: give --resume")
        if state is None:
            state = trainer.init_state(training, mark=marks)
        show_sizes(state, source.lengths, console)
        state = train(options, training, source, manager, state, journal, console)
        manager.wait()
        if options.journal is not None:
            journal.write("end", step=int(state.step), digest=digest(state))
    journal.close()


def train(
    options: argparse.Namespace,
    training: trainer.TrainOptions,
    source: data.SpanCorruption,
    manager: deltackpt.CheckpointManager,
    state: trainer.TrainState,
    journal: Journal,
    console: Console,
) -> trainer.TrainState:
    """Trains from ``state`` to ``options.steps``; prints the mean loss of each window."""
    step = trainer.train_step(training)
    window: list[jax.Array] = []
    started = time.perf_counter()
    for number in range(int(state.step), options.steps):
        state, loss = step(state, source.batch(number))
        window.append(loss)
        done = number + 1
        if done % options.print_every == 0 or done == options.steps:
            losses = [float(loss) for loss in window]
            speed = len(window) / (time.perf_counter() - started)
            journal.steps(done - len(window), losses)
            console.print(f"step {done}: loss {np.mean(losses):.4f}, {speed:.2f} steps/s")
            window, started = [], time.perf_counter()
        if done % options.save_every == 0 or done == options.steps:
            manager.save(done, state)
        else:
            # A save that the writer was too busy for, or that of an announced preemption.
            manager.save_if_due(done, state)
    return state


def show_sizes(state: trainer.TrainState, lengths: data.Lengths, console: Console) -> None:
    """Prints how large the model is, and how much of it a delta need not write."""
    rows, width = trainer.embedding(state.params).shape
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    console.print(
        f"{numbers:,} parameters, {size(4 * numbers)}; the embedding has {rows:,} rows of {width}, "
        f"{rows * width / numbers:.1%} of them"
    )
    console.print(
        f"a sample is {lengths.text} tokens of text, {lengths.noise} of them cut out in "
        f"{lengths.spans} spans: {lengths.inputs} tokens of input, {lengths.targets} of target"
    )


def batches(options: argparse.Namespace) -> tuple[data.SpanCorruption, trainer.TrainOptions]:
    """Where the batches come from, and how to train on them."""
    text = data.text_of(options.text)
    vocabulary = data.Words(text) if options.vocabulary == "words" else data.Bytes()
    source = data.SpanCorruption(
        text, vocabulary, options.batch, options.input_length, seed=options.seed
    )
    sizes = model.Sizes(rows=vocabulary.size, dropout=options.dropout, **model.NAMED[options.size])
    training = trainer.TrainOptions(
        sizes=sizes, seed=options.seed, warmup=options.warmup, z_loss=options.z_loss
    )
    return source, training


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    add = parser.add_argument
    add("--input-length", type=int, default=128, help="tokens of a sample's corrupted text")
    add("--steps", type=int, default=100, help="train until this step")
    add("--warmup", type=int, default=10_000, help="steps until the learning rate decays")
    add("--z-loss", type=float, default=1e-4, help="weight of the softmax's denominator")
    add("--dropout", type=float, default=0.0, help="rate")
    add("--seed", type=int, default=0, help="of parameters, windows of text and spans")
    add("--directory", type=Path, default=Path("t5-checkpoints"), help="of the checkpoints")
    add("--save-every", type=int, default=10, help="steps between saves")
    add("--tracking", choices=["marks", "fingerprints"], default="marks", help="of touched rows")
    add("--policy", choices=sorted(POLICIES), default="consecutive", help="base or delta")
    add("--codec", default="raw", help="of the rows of deltas, e.g. adaptive4")
    add("--durability", choices=["power", "process"], default="power", help="of the saves")
    add("--when-busy", choices=["wait", "skip", "coalesce"], default="wait", help="while one runs")
    add("--keep", type=int, help="steps to keep, with their chains; default: all")
    add("--resume", action="store_true", help="go on from the newest intact step")
    add("--print-every", type=int, default=10, help="steps between printed lines")
    add("--journal", type=Path, help="append losses, saves and the final digest as JSON lines")
    return parser.parse_args(arguments)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds which model learns from which text; ``demo.py`` has these options, too."""
    add = parser.add_argument
    add("--text", type=Path, help="any text file; default: docs and sources of this clone")
    add("--vocabulary", choices=["words", "bytes"], default="words", help="what a token is")
    add("--size", choices=list(model.NAMED), default="tiny", help="of the model")
    add("--batch", type=int, default=8, help="samples in a batch")


if __name__ == "__main__":
    main()
