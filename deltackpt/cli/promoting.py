# SPDX-License-Identifier: Apache-2.0
"""``deltackpt upload``: uploads the saves of a staging directory."""

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
    "  deltackpt upload /dev/shm/run-17 --status\n"
    "  deltackpt upload /dev/shm/run-17 --until-empty"
)
@click.argument(
    "stage",
    metavar="STAGING",
    type=arguments.UserPath(exists=True, file_okay=False, path_type=Path),
)
@click.option(
    "--until-empty",
    is_flag=True,
    help="Exit once every save is uploaded; otherwise run until stopped.",
)
@click.option("--status", "only_status", is_flag=True, help="Only print the progress.")
@arguments.as_json
def upload(stage: Path, until_empty: bool, only_status: bool, as_json: bool) -> None:
    """Upload the saves in the staging directory STAGING to the trainer's bucket.

    The trainer's own uploader survives the trainer. Use this command if it cannot: in a container's
    stop hook, in a job epilogue, or beside the trainer. It waits while another uploader works in
    STAGING, and can be killed at any time.

    With --status, the exit code is 1 if saves are waiting or cannot be uploaded.
    """
    # Imported here: other commands need not pay for it.
    from deltackpt.tiers import replicator
    from deltackpt.tiers.cursor import Trainer
    from deltackpt.tiers.stage import Stage
    from deltackpt.tiers.uploading import Uploader

    found = Stage(stage.absolute())
    if not only_status:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        trainer = Trainer(is_gone=until_empty)
        with replicator.only_one(found, trainer) as is_one:
            if is_one:
                Uploader(found, adopts=True).run(trainer)
    status = replicator.status_of(found)
    if as_json:
        terminal.print_json(status)
    elif status is None:
        click.echo("no save was ever staged here")
    else:
        click.echo(f"target   {status.url}")
        click.echo(f"waiting  {units.count(status.waiting, 'save')}, {units.size(status.nbytes)}")
        for key, text in status.damaged.items():
            click.echo(f"damaged  {key}: {text}")
        if status.problem:
            since = time.strftime("%H:%M:%S", time.localtime(status.problem_unix_secs))
            click.echo(f"failing since {since}: {status.problem}")
    if status is not None and (status.waiting or status.damaged):
        sys.exit(1)
