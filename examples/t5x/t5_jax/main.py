# SPDX-License-Identifier: Apache-2.0
"""Trains a T5 1.1 on span corruption and saves touched-row checkpoints.

python examples/t5x/main.py --text wiki.txt --size small python examples/t5x/main.py --text wiki.txt
--size small --resume --steps 400
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
from deltackpt import policies
from t5_jax import data, model, trainer

POLICIES = {
    "consecutive": policies.Consecutive,
    "oneshot": policies.OneShot,
    "intermittent": policies.Intermittent,
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parsed(arguments)
    console = Console()
    source, training = batches(options)
    journal = Journal(console, options.journal)
    marks = options.tracking == "touched"
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
            max_to_keep=options.keep,
        ),
        event_handlers=(journal,),
    ) as manager:
        state = None
        if options.resume:
            state = resumed(manager, trainer.abstract_state(training, mark=marks), console)
        elif manager.latest_step() is not None:
            sys.exit(f"{options.directory} holds step {manager.latest_step()}: pass --resume")
        if state is None:
            state = trainer.init_state(training, mark=marks)
        show_sizes(state, source.lengths, console)
        state = train(options, training, source, manager, state, journal, console)
        manager.wait_until_finished()
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
            # A save for which the writer was busy, or that of an announced preemption.
            manager.save_if_due(done, state)
    return state


def show_sizes(state: trainer.TrainState, lengths: data.Lengths, console: Console) -> None:
    """Prints the size of the model, and how much of it a delta can skip."""
    rows, width = trainer.embedding(state.params).shape
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    console.print(
        f"{numbers:,} parameters, {size(4 * numbers)}; the embedding has {rows:,} rows of {width}, "
        f"{rows * width / numbers:.1%} of them"
    )
    console.print(
        f"a sample has {lengths.text} tokens of text, {lengths.noise} of them masked in "
        f"{lengths.spans} spans: {lengths.inputs} input tokens, {lengths.targets} target tokens"
    )


def batches(options: argparse.Namespace) -> tuple[data.SpanCorruption, trainer.TrainOptions]:
    """Returns the source of batches and the training options."""
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
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    add = parser.add_argument
    add("--input-length", type=int, default=128, help="tokens of a sample's corrupted text")
    add("--steps", type=int, default=100, help="train until this step")
    add("--warmup", type=int, default=10_000, help="warm-up steps before the learning rate decays")
    add(
        "--z-loss",
        type=float,
        default=1e-4,
        help="weight of the softmax's z-loss",
    )
    add("--dropout", type=float, default=0.0, help="dropout rate")
    add("--seed", type=int, default=0, help="seed of parameters, text windows and spans")
    add("--directory", type=Path, default=Path("t5-checkpoints"), help="checkpoint directory")
    add("--save-every", type=int, default=10, help="steps between saves")
    add(
        "--tracking",
        choices=["touched", "fingerprints"],
        default="touched",
        help="how to track changed rows",
    )
    add("--policy", choices=sorted(POLICIES), default="consecutive", help="base-or-delta policy")
    add("--codec", default="raw", help="codec of delta rows, e.g. adaptive4")
    add("--durability", choices=["power", "process"], default="power", help="durability of saves")
    add(
        "--when-busy",
        choices=["wait", "skip", "coalesce"],
        default="wait",
        help="what save() does during a save",
    )
    add("--keep", type=int, help="steps to keep, with their chains; default: all")
    add("--resume", action="store_true", help="resume from the newest intact step")
    add("--print-every", type=int, default=10, help="steps between printed lines")
    add("--journal", type=Path, help="append losses, saves and the final digest as JSON lines")
    return parser.parse_args(arguments)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of model and text, which ``demo.py`` shares."""
    add = parser.add_argument
    add("--text", type=Path, help="any text file; default: this repository's docs and sources")
    add("--vocabulary", choices=["words", "bytes"], default="words", help="kind of tokens")
    add("--size", choices=list(model.NAMED), default="tiny", help="size of the model")
    add("--batch", type=int, default=8, help="samples in a batch")


if __name__ == "__main__":
    main()
