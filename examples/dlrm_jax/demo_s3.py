# SPDX-License-Identifier: Apache-2.0
"""Trains against S3, loses the node in the middle of an upload, and goes on on an empty one.

A real S3 server runs on loopback (make servers). Saves are made in a stage and promoted; trainer
and promoter are killed while a save is half in the bucket, and the stage is gone with them.

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

import deltackpt
from deltackpt import inspect
from deltackpt.ledger.view import JournalView
from deltackpt.storage.store import spot
from deltackpt.tiers.stage import Stage
from dlrm_jax import main, trainer

_STEPS, _SAVE_EVERY = 60, 5
#: Steps at the root before the node is lost.
_AT_ROOT_FIRST = 3
#: Slow enough for an upload to be hit in its middle.
_BYTES_PER_SEC = 40e6
_POLL_SECS = 0.001


def run(options: argparse.Namespace) -> int:
    """The whole demonstration; returns the exit status."""
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

        console.rule("[bold]1. Train against S3, and lose the node in the middle of an upload")
        stage = Stage(root / "node")
        half = lose_node(killed, server, stage, tiers, console)
        show_bill("of the first node", server.requests(), collections.Counter(), console)

        console.rule("[bold]2. Resume on an empty node")
        before = server.requests()
        killed.run("--resume", f"--stage={root / 'other-node'}", *tiers)
        show_bill("of the second node", server.requests(), before, console)

        console.rule("[bold]3. Compare with a run that nobody interrupted")
        with console.status("training without interruption"):
            whole.run(quiet=True)
        sizes = main.model_options(main.parsed(list(whole.arguments)))
        reading = deltackpt.ManagerOptions(
            access="read", tiers=deltackpt.Tiers(endpoint=server.endpoint)
        )
        with deltackpt.CheckpointManager(
            url, handlers={"embeddings": trainer.checkpoint_tables()}, options=reading
        ) as manager:
            state = manager.restore(_STEPS, trainer.init_state(sizes, 0)).state
        equal = demonstration.show_comparison(killed, whole, [half], digest(state), console)
        steps = inspect.open(url, endpoint=server.endpoint).steps
        stored = sum(path.stat().st_size for path in server.folder.rglob("*") if path.is_file())
        console.print(f"{len(steps)} steps in the bucket, {size(stored)} in all")
    console.print(f"done in {time.perf_counter() - started:.0f} s")
    return 0 if equal else 1


def lose_node(
    victim: demonstration.Trainer,
    server: s3_server.Server,
    stage: Stage,
    tiers: tuple[str, ...],
    console: Console,
) -> str:
    """Kills trainer and promoter while a save is half in the bucket, and removes their stage.

    Returns:
      The step that was on its way.
    """
    process = victim.start(f"--stage={stage.path}", *tiers)
    # The server keeps objects as files: to look at these is no request.
    view = JournalView(spot(server.folder / "demo") / "run")
    half: set[str] = set()
    while not half and process.poll() is None:
        time.sleep(_POLL_SECS)
        if len(view.state().steps) >= _AT_ROOT_FIRST:
            found = {*(view.root / "saves").folders()}
            half = found - {prefix.split("/")[1] for prefix in view.state().prefixes}
    if not half:
        sys.exit("the trainer ended before its node could be lost in an upload")
    orders = stage.orders()
    assert orders is not None
    promoter = stage.progress(orders.holder).pid
    for pid in (process.pid, promoter):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    step = min(half).partition(".")[0]
    made = demonstration.committed(stage.steps)
    lost = sorted(set(made) - {*view.state().steps})
    shutil.rmtree(stage.path)
    console.print(
        f"[bold red]SIGKILL[/] to trainer {process.pid} and promoter {promoter} while step {step} "
        f"was being sent; the stage is gone, and with it steps {lost}, for which nobody had waited"
    )
    console.print(f"what a reader finds in the bucket: steps {[*view.state().steps]}, all whole")
    return step


def show_bill(
    what: str,
    now: collections.Counter[str],
    before: collections.Counter[str],
    console: Console,
) -> None:
    """Prints the requests since."""
    table = Table(f"requests {what}", "count", box=box.SIMPLE_HEAD)
    for kind, count in sorted((now - before).items()):
        table.add_row(kind, str(count))
    console.print(table)


def trainer_of(
    root: Path, name: str, directory: str, options: argparse.Namespace
) -> demonstration.Trainer:
    """``main.py`` with the arguments of the demonstration; nothing is started yet."""
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
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=0.5, help="factor on the tables' rows")
    parser.add_argument("--directory", type=Path, help="where to make a temporary directory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run(parsed()))
