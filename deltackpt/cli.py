# SPDX-License-Identifier: Apache-2.0
"""The command line: ``deltackpt COMMAND``.

Exit codes: 0 done, or nothing to do; 1 failed, with one line on stderr that says what to do;
2 wrong usage; 75 another process is at it, so try again later.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from deltackpt import arguments
from deltackpt.__about__ import __version__
from deltackpt.errors import AlreadyCompacting, DeltackptError
from deltackpt.service import commands

_TRY_AGAIN = 75


def main() -> None:
    """Runs the command line; what deltackpt raises becomes one line on stderr."""
    try:
        cli()
    except AlreadyCompacting as error:
        _fail(error, _TRY_AGAIN)
    except DeltackptError as error:
        _fail(error, 1)


def _fail(error: DeltackptError, code: int) -> None:
    click.echo(f"deltackpt: {' '.join(str(error).split())} [{error.code}]", err=True)
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Look after directories of deltackpt checkpoints."""


@cli.command(
    epilog="\b\nExamples:\n"
    "  deltackpt compact /data/run-17\n"
    "  deltackpt compact /data/run-17 --step 12000 --memory 4GiB --workers 8"
)
@arguments.directory
@click.option("--step", type=click.IntRange(min=0), help="Step to fold; the newest by default.")
@arguments.item
@click.option("--workers", type=click.IntRange(min=1), help="Parts at a time; one per CPU.")
@click.option(
    "--memory",
    "memory_bytes",
    type=arguments.Size(),
    default="1GiB",
    show_default=True,
    help="Most memory of all workers together.",
)
@arguments.as_json
def compact(
    directory: str,
    step: int | None,
    item: str,
    workers: int | None,
    memory_bytes: int,
    as_json: bool,
) -> None:
    """Fold the chain of a step of DIRECTORY into a new base, beside trainers and readers.

    Restores then read that base instead of the chain, and retention may drop what it replaces. The
    steps themselves do not change. A run that is killed has changed nothing: start it again.
    """
    # Imported here: other commands need not pay for it.
    from deltackpt import compact as compaction

    console = Console(stderr=True)
    quiet = as_json or not console.is_terminal
    columns = (BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("folding", total=None)
        done = compaction.compact(
            directory,
            item=item,
            step=step,
            workers=workers,
            memory_bytes=memory_bytes,
            progress=lambda found, total: bar.update(task, completed=found, total=total),
        )
    if as_json:
        click.echo(json.dumps(None if done is None else dataclasses.asdict(done)))
    elif done is None:
        click.echo("nothing to fold: the step is a base alone")
    else:
        click.echo(
            f"step {done.step}: folded {done.deltas} deltas into a base of "
            f"{done.bytes_written:,} bytes in {done.seconds:.1f} s"
        )


cli.add_command(commands.group)


if __name__ == "__main__":
    main()
