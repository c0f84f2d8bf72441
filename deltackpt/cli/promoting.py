# SPDX-License-Identifier: Apache-2.0
"""The command that brings saves from a stage to its root."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import click

from deltackpt import units
from deltackpt.cli import arguments, terminal


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt promote /dev/shm/run-17 --status\n"
    "  deltackpt promote /dev/shm/run-17 --until-empty"
)
@click.argument("stage", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--until-empty", is_flag=True, help="End once every save is at the root; else never by itself."
)
@click.option("--status", "only_status", is_flag=True, help="Only say how far promotion has come.")
@arguments.as_json
def promote(stage: Path, until_empty: bool, only_status: bool, as_json: bool) -> None:
    """Bring the saves in STAGE to the bucket that its trainer saves to.

    A trainer has a promoter of its own, which goes on when the trainer was killed. This is for
    where that one does not outlive it: a container's hook before it stops, an epilogue of a job, or
    a process beside the trainer. It waits while another promoter is at work in STAGE, and may be
    killed at any moment.

    Exit code 1 with --status where saves are not at the root, or a save cannot come there.
    """
    # Imported here: other commands need not pay for it.
    from deltackpt.tiers import promoter
    from deltackpt.tiers.promotion import Promoter
    from deltackpt.tiers.stage import Stage

    found = Stage(stage.absolute())
    if not only_status:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        trainer = promoter.NoTrainer(until_empty=until_empty)
        with promoter.only_one(found, trainer) as is_one:
            if is_one:
                Promoter(found).run(trainer, adopts=True)
    status = promoter.status_of(found)
    if as_json:
        terminal.print_json(status)
    elif status is None:
        click.echo("nothing was ever saved here")
    else:
        click.echo(f"root     {status.url}")
        click.echo(f"waiting  {units.count(status.waiting, 'save')}, {units.size(status.nbytes)}")
        for key, text in status.damaged.items():
            click.echo(f"damaged  {key}: {text}")
        if status.problem:
            since = time.strftime("%H:%M:%S", time.localtime(status.problem_unix_secs))
            click.echo(f"since {since}: {status.problem}")
    if status is not None and (status.waiting or status.damaged):
        sys.exit(1)
