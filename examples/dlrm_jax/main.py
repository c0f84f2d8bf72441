# SPDX-License-Identifier: Apache-2.0
"""Trains a DLRM and saves touched-row checkpoints.

python examples/dlrm_jax/main.py --data train.txt --tables kaggle --scale 0.01 python
examples/dlrm_jax/main.py --resume python examples/dlrm_jax/main.py --processes 1 # on every device
of this process
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from rich.console import Console
from running.digest import digest
from running.journal import Journal, size
from running.restoring import resumed

import deltackpt
from deltackpt import policies
from deltackpt.options import Timeouts
from deltackpt.wal import KafkaWal
from dlrm_jax import data, trainer
from dlrm_jax.model import area_under_curve
from dlrm_jax.placement import Placement

if TYPE_CHECKING:
    from deltackpt.service.jax_trainer import Session

POLICIES = {
    "consecutive": policies.Consecutive,
    "oneshot": policies.OneShot,
    "intermittent": policies.Intermittent,
}


def main(arguments: list[str] | None = None, session: Session | None = None) -> None:
    """Runs the command line.

    Args:
      arguments: command-line arguments.
      session: session of a Ray worker, which has already started ``jax.distributed``.
    """
    options = parsed(arguments)
    placement = joined(options, session)
    # Process 0 prints; all processes take part in everything else.
    speaks = jax.process_index() == 0
    console = Console(quiet=not speaks)
    journal = Journal(console, options.journal if speaks else None, jax.process_count())
    sizes = model_options(options)
    source = batches(options, sizes.rows)
    codec = deltackpt.policies.CodecChoice(delta=options.codec, max_error=options.max_error)
    handlers = {"embeddings": trainer.checkpoint_tables(codec)}
    tiers = None
    if "://" in options.directory:
        tiers = deltackpt.Tiers(
            staging_dir=options.stage,
            endpoint=options.endpoint,
            bytes_per_sec=options.bytes_per_sec,
        )
    saving = deltackpt.ManagerOptions(
        tiers=tiers,
        deltas=deltackpt.DeltaOptions(policy=POLICIES[options.policy]()),
        writes=deltackpt.WriteOptions(durability=options.durability),
        wal=None if options.log is None else wal_options(options),
        max_to_keep=options.keep,
        timeouts=Timeouts(processes_secs=options.processes_secs),
    )
    with deltackpt.CheckpointManager(
        options.directory,
        handlers=handlers,
        options=saving,
        event_handlers=(journal,) if session is None else (journal, session),
    ) as manager:
        if options.resume:
            state = resumed(manager, trainer.abstract_state(sizes, placement), console)
            if state is not None and options.digests:
                journal.write("restored", step=int(state.step), digest=digest(state))
        elif manager.latest_step() is not None:
            sys.exit(f"{options.directory} holds step {manager.latest_step()}: pass --resume")
        else:
            state = None
        if state is None:
            state = trainer.init_state(sizes, options.seed, placement)
            if options.log is not None:
                # The parent of the WAL records up to the next save.
                manager.save(0, state)
        journal.write("start", step=int(state.step))
        total = sum(sizes.rows.values())
        console.print(
            f"{len(sizes.rows)} tables, {total:,} rows of {options.width}, "
            f"{size(total * (options.width + 1) * 4)} with their optimizer slots"
        )
        state = train(options, sizes, placement, source, manager, state, journal, console, session)
        manager.wait_until_finished()
        if session is not None:
            session.report({"step": int(state.step)})
        if options.journal is not None:
            journal.write("end", step=int(state.step), digest=digest(state))
    journal.close()


def joined(options: argparse.Namespace, session: Session | None) -> Placement | None:
    """Returns the placement: one device, or all devices of ``--processes`` or Ray processes.

    Starts ``jax.distributed`` for several processes unless Ray has.
    """
    if session is None and options.processes is None:
        return None
    if session is None and options.processes != 1:
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process,
            # By default process 0 would listen on every interface.
            coordinator_bind_address=options.coordinator if options.process == 0 else None,
            # After the manager's timeout: its error names the missing process, while jax aborts the
            # process.
            heartbeat_timeout_seconds=2 * options.processes_secs,
            shutdown_timeout_seconds=options.processes_secs,
        )
    devices = jax.device_count()
    for name in ("batch", "row_multiple"):
        if getattr(options, name) % devices:
            sys.exit(
                f"--{name.replace('_', '-')}: expected a multiple of {devices}, the number of "
                f"devices, found {getattr(options, name)}"
            )
    return Placement.over_all_devices()


def train(
    options: argparse.Namespace,
    sizes: trainer.ModelOptions,
    placement: Placement | None,
    source: data.Source,
    manager: deltackpt.CheckpointManager,
    state: trainer.TrainState,
    journal: Journal,
    console: Console,
    session: Session | None,
) -> trainer.TrainState:
    """Trains from ``state`` to ``options.steps``; prints loss and AUC of each window.

    The AUC is that of predictions made before training on their batch (progressive validation).
    """
    step = trainer.train_step(sizes, placement=placement)
    window: list[tuple[jax.Array, jax.Array, np.ndarray]] = []
    started = time.perf_counter()
    for number in range(int(state.step), options.steps):
        batch = source.batch(number)
        placed = batch if placement is None else placement.batch(batch)
        state, loss, logits = step(state, placed)
        window.append((loss, logits, batch.labels))
        done = number + 1
        preempted = False
        if done % options.print_every == 0 or done == options.steps:
            losses = [float(loss) for loss, _, _ in window]
            scores = np.concatenate([np.asarray(logits) for _, logits, _ in window])
            labels = np.concatenate([labels for _, _, labels in window])
            speed = len(window) / (time.perf_counter() - started)
            loss, auc = float(np.mean(losses)), area_under_curve(scores, labels)
            journal.steps(done - len(window), losses)
            console.print(f"step {done}: loss {loss:.4f}, AUC {auc:.4f}, {speed:.1f} steps/s")
            if session is not None:
                session.report({"step": done, "loss": loss, "auc": auc, "steps_per_sec": speed})
                preempted = session.preempted()
            window, started = [], time.perf_counter()
        if options.log is not None:
            journal.logged(manager.append(done, state, ids=batch.ids))
        if preempted or done % options.save_every == 0 or done == options.steps:
            if options.digests:
                journal.write("saved", step=done, digest=digest(state))
            manager.save(done, state)
        if preempted:
            manager.wait_until_finished()
    return state


def wal_options(options: argparse.Namespace) -> deltackpt.WalOptions:
    """Returns where the WAL is stored, and how its records store the MLPs."""
    if options.kafka is None:
        return deltackpt.WalOptions(dense=options.log)
    servers, _, topic = options.kafka.rpartition("/")
    backend = KafkaWal(topic, config={"bootstrap.servers": servers})
    return deltackpt.WalOptions(backend=backend, dense=options.log)


def model_options(options: argparse.Namespace) -> trainer.ModelOptions:
    """Returns the model options from the command line."""
    return trainer.ModelOptions(
        rows=data.table_rows(options.tables, options.scale),
        row_multiple=options.row_multiple,
        width=options.width,
        bottom=options.bottom,
        top=options.top,
    )


def batches(options: argparse.Namespace, rows: Mapping[str, int]) -> data.Source:
    """Returns the source of batches."""
    if options.data is not None:
        return data.CriteoFile(options.data, rows, options.batch)
    return data.ZipfTraffic(rows, options.batch, exponent=options.zipf, seed=options.seed)


def layers(text: str) -> tuple[int, ...]:
    """Parses ``512-512`` as (512, 512)."""
    return tuple(int(width) for width in text.split("-"))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="Criteo file, Kaggle TSV or CSV; default: synthetic traffic")
    add("--tables", default="thesis", help="thesis, kaggle, or a file with one row count per line")
    add("--scale", type=float, default=1.0, help="factor on the tables' row counts")
    add(
        "--row-multiple",
        type=int,
        default=8,
        help="pad tables to this multiple of rows",
    )
    add("--width", type=int, default=64, help="columns of the tables")
    add(
        "--bottom",
        type=layers,
        default=(512, 512),
        help="hidden layers of the bottom MLP, e.g. 512-512",
    )
    add("--top", type=layers, default=(1024, 1024, 1024), help="hidden layers of the top MLP")
    add("--batch", type=int, default=2048, help="samples in a batch")
    add("--steps", type=int, default=200, help="train until this step")
    add("--zipf", type=float, default=1.07, help="Zipf exponent of synthetic ids; 0 is uniform")
    add("--seed", type=int, default=0, help="seed of parameters and synthetic traffic")
    add("--directory", default="dlrm-checkpoints", help="checkpoint directory, or bucket URL")
    add("--stage", help="local staging directory for a bucket; default: below the user's cache")
    add("--endpoint", help="server of the bucket, if it is not the provider's default")
    add("--bytes-per-sec", type=float, help="upload rate limit; default: none")
    add("--save-every", type=int, default=20, help="steps between saves")
    add(
        "--log",
        choices=["whole", "delta", "soft"],
        help="WAL record per step; how MLPs are stored",
    )
    add("--kafka", metavar="HOST:PORT/TOPIC", help="WAL in Kafka instead of the directory")
    add("--policy", choices=sorted(POLICIES), default="consecutive", help="base-or-delta policy")
    add("--codec", default="raw", help="codec of delta rows, e.g. adaptive4")
    add("--max-error", type=float, help="maximum relative L2 error of a save; default: any")
    add("--durability", choices=["power", "process"], default="power", help="durability of saves")
    add("--keep", type=int, help="steps to keep, with their chains; default: all")
    add("--resume", action="store_true", help="resume from the newest intact step")
    add("--print-every", type=int, default=20, help="steps between printed lines")
    add("--journal", type=Path, help="append losses, saves and the final digest as JSON lines")
    add(
        "--digests",
        action="store_true",
        help="also the SHA-256 of each saved or restored state",
    )
    group = parser.add_argument_group("devices", "default: one process on one device")
    add = group.add_argument
    add("--processes", type=int, help="number of processes to train on, with all their devices")
    add("--process", type=int, help="index of this process, from 0")
    add("--coordinator", metavar="HOST:PORT", help="address of process 0's coordinator")
    add("--processes-secs", type=int, default=60, help="timeout for an unresponsive process")
    options = parser.parse_args(arguments)
    place = (options.process, options.coordinator)
    if options.processes is None and place != (None, None):
        parser.error("--process and --coordinator need --processes: each would train alone")
    if (options.processes or 1) > 1 and None in place:
        parser.error("several --processes need --process and --coordinator")
    return options


if __name__ == "__main__":
    main()
