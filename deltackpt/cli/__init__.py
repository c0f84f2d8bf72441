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
        cli(prog_name="deltackpt")
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


for command, summary in (
    (inspect_commands.ls, "List steps with kinds, chains, rows and bytes."),
    (inspect_commands.show, "Show the chain, tables and dense leaves of a step."),
    (inspect_commands.diff, "Show which rows differ between two steps."),
    (inspect_commands.history, "Show the values of rows at each step."),
    (inspect_commands.report, "Write an HTML page about a directory."),
    (maintenance_commands.verify, "Read every byte; report what can be restored."),
    (maintenance_commands.plan, "Show what a restore reads and how long it takes."),
    (maintenance_commands.gc, "Remove unneeded files after training has ended."),
    (maintenance_commands.copy, "Copy steps and everything needed to restore them."),
    (maintenance_commands.compact, "Merge the chain of a step into a new base."),
    (daemons.upload, "Upload the saves of a staging directory."),
    (daemons.node_store, "Serve a directory as one node of a store."),
    (daemons.follow, "Keep the newest weights in memory, for serving."),
    (maintenance_commands.doctor, "Check a directory, the machine and the installation."),
    (exchange.export, "Convert a step to Orbax, safetensors or Parquet."),
    (exchange.import_, "Import a stock Orbax checkpoint."),
    (service.group, "Manage the hot standby of a directory."),
    (service.peers, "Manage peers, which keep saves in memory."),
):
    command.short_help = summary
    cli.add_command(command)


if __name__ == "__main__":
    main()
