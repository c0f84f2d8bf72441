# SPDX-License-Identifier: Apache-2.0
"""Trains against S3, loses the node in the middle of an upload, and resumes on an empty node.

A real S3 server runs on loopback (make servers). Saves are staged locally and uploaded. The demo
kills the trainer and the uploader during an upload, and deletes the staging directory.

python examples/dlrm_jax/demo_s3.py
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich import box
from rich.console import Console
from rich.table import Table
from running import demonstration, s3_server
from running.digest import digest
from running.journal import size
from running.progress import Progress

import deltackpt
from deltackpt import inspect
from deltackpt.ledger.view import JournalView
from deltackpt.storage.store import store_path
from deltackpt.tiers.staging import StagingDir
from dlrm_jax import main, trainer

_STEPS, _SAVE_EVERY = 60, 5
#: Number of uploaded steps before the node is lost.
_AT_ROOT_FIRST = 3
#: Slow enough to interrupt an upload halfway.
_BYTES_PER_SEC = 40e6
_POLL_SECS = 0.001


def run(options: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit status."""
    console = Console(highlight=False)
    logging.getLogger("absl").setLevel(logging.ERROR)
    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="dlrm-demo-", dir=options.directory) as place,
        s3_server.running(Path(place) / "server") as server,
    ):
        root = Path(place)
        url = server.bucket("demo") + "/run"
        killed = trainer_of(root, "killed", url, options)
        whole = trainer_of(root, "whole", str(root / "whole"), options)
        tiers = (f"--endpoint={server.endpoint}", f"--bytes-per-sec={_BYTES_PER_SEC}")

        console.rule("[bold]1. Train against S3; lose the node in the middle of an upload")
        stage = StagingDir(root / "node")
        half, lost = lose_node(killed, server, stage, tiers, console)
        show_bill("of the first node", server.requests(), collections.Counter(), console)

        console.rule("[bold]2. Resume on an empty node")
        before = server.requests()
        killed.run("--resume", f"--stage={root / 'other-node'}", *tiers)
        show_bill("of the second node", server.requests(), before, console)

        console.rule("[bold]3. Compare with an uninterrupted run")
        whole.run(progress=Progress(console, "training", whole.journal, _STEPS))
        sizes = main.model_options(main.parsed(list(whole.arguments)))
        reading = deltackpt.ManagerOptions(
            access="read", tiers=deltackpt.Tiers(endpoint=server.endpoint)
        )
        with deltackpt.CheckpointManager(
            url, handlers={"embeddings": trainer.checkpoint_tables()}, options=reading
        ) as manager:
            state = manager.restore(_STEPS, trainer.init_state(sizes, 0)).state
        verdict = f"no step in the bucket was lost; steps {lost} were trained again"
        equal = demonstration.show_comparison(
            killed, whole, [half], digest(state), console, verdict
        )
        steps = inspect.open(url, endpoint=server.endpoint).steps
        stored = sum(path.stat().st_size for path in server.folder.rglob("*") if path.is_file())
        console.print(f"{len(steps)} steps in the bucket, {size(stored)} in total")
    console.print(f"done in {time.perf_counter() - started:.0f} s")
    return 0 if equal else 1


def lose_node(
    victim: demonstration.Trainer,
    server: s3_server.Server,
    stage: StagingDir,
    tiers: tuple[str, ...],
    console: Console,
) -> tuple[str, list[int]]:
    """Kills trainer and uploader in the middle of an upload, and removes the staging directory.

    Returns:
      The step whose upload was cut off, and the steps that existed only on the lost node.
    """
    process = victim.start(f"--stage={stage.path}", *tiers)
    # The server stores objects as files, so listing them sends no request.
    view = JournalView(store_path(server.folder / "demo") / "run")
    half: set[str] = set()
    while not half and process.poll() is None:
        time.sleep(_POLL_SECS)
        if len(view.state().steps) >= _AT_ROOT_FIRST:
            found = {*(view.root / "saves").folders()}
            half = found - {prefix.split("/")[1] for prefix in view.state().prefixes}
    if not half:
        sys.exit("the trainer finished before its node could be lost in an upload")
    orders = stage.orders()
    assert orders is not None
    uploader = stage.progress(orders.holder).pid
    for pid in (process.pid, uploader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    step = min(half).partition(".")[0]
    made = demonstration.committed(stage.steps)
    lost = sorted(set(made) - {*view.state().steps})
    shutil.rmtree(stage.path)
    console.print(
        f"[bold red]SIGKILL[/] to trainer {process.pid} and uploader {uploader} during the upload "
        f"of step {step}.\nThe staging directory is gone, and with it steps {lost}: the trainer "
        "had not waited for their upload."
    )
    console.print(f"A reader finds steps {[*view.state().steps]} in the bucket, all complete.")
    return step, lost


def show_bill(
    what: str,
    now: collections.Counter[str],
    before: collections.Counter[str],
    console: Console,
) -> None:
    """Prints the new requests by kind."""
    table = Table(f"requests {what}", "count", box=box.SIMPLE_HEAD)
    for kind, count in sorted((now - before).items()):
        table.add_row(kind, str(count))
    console.print(table)


def trainer_of(
    root: Path, name: str, directory: str, options: argparse.Namespace
) -> demonstration.Trainer:
    """``main.py`` with the arguments of the demonstration; starts nothing yet."""
    return demonstration.Trainer(
        script=Path(main.__file__),
        directory=directory,
        journal=root / f"{name}.jsonl",
        arguments=[
            *(f"--steps={_STEPS}", f"--save-every={_SAVE_EVERY}", f"--print-every={_SAVE_EVERY}"),
            *("--batch=512", "--bottom=128", "--top=256-128"),
            *("--tables=thesis", f"--scale={options.scale}"),
        ],
    )


def parsed() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=0.5, help="factor on the tables' row counts")
    parser.add_argument("--directory", type=Path, help="where to create the temporary directory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run(parsed()))
