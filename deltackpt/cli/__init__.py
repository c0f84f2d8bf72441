# SPDX-License-Identifier: Apache-2.0
"""The command line: ``deltackpt COMMAND``.

Exit codes: 0 done, or nothing to do; 1 failed, with one line on stderr that states what to do;
2 invalid usage; 75 in use by another process, so try again later.

A command imports what it needs when it runs, so that ``ls`` and ``--help`` start fast.
"""

from __future__ import annotations

import logging
import sys

import click

from deltackpt.__about__ import __version__
from deltackpt.cli import daemons, exchange, inspect_commands, maintenance_commands, service
from deltackpt.cli.terminal import as_commands
from deltackpt.errors import AlreadyCompacting, DeltackptError, InUse

_TRY_AGAIN = 75


def main() -> None:
    """Runs the command line; prints deltackpt's errors as one line on stderr."""
    # Orbax warns about every directory that is opened only for reading.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        cli()
    except (AlreadyCompacting, InUse) as error:
        _fail(error, _TRY_AGAIN)
    except (DeltackptError, OSError) as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    kind = error.code if isinstance(error, DeltackptError) else type(error).__name__
    # Error messages list names on separate lines.
    lines = [line.strip() for line in str(error).splitlines()]
    text = as_commands(", ".join(filter(None, lines)).replace(":, ", ": "))
    click.echo(f"deltackpt: {text} [{kind}]", err=True)
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Inspect and maintain directories of deltackpt checkpoints."""


for command in (
    inspect_commands.ls,
    inspect_commands.show,
    inspect_commands.diff,
    inspect_commands.history,
    inspect_commands.report,
    maintenance_commands.verify,
    maintenance_commands.plan,
    maintenance_commands.gc,
    maintenance_commands.copy,
    maintenance_commands.compact,
    daemons.upload,
    daemons.node_store,
    daemons.follow,
    maintenance_commands.doctor,
    exchange.export,
    exchange.import_,
    service.group,
    service.peers,
):
    cli.add_command(command)


if __name__ == "__main__":
    main()
