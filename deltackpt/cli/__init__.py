# SPDX-License-Identifier: Apache-2.0
"""The command line: ``deltackpt COMMAND``.

Exit codes: 0 done, or nothing to do; 1 failed, with one line on stderr that states what to do;
2 invalid usage; 75 in use by another process, so try again later.

Each command imports its module when it runs, so that ``ls`` starts fast.
"""

from __future__ import annotations

import importlib
import logging
import sys

import click

from deltackpt.__about__ import __version__
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


#: Maps each command to its module, its name in that module, and its summary.
_COMMANDS = {
    "ls": ("inspect_commands", "ls", "List steps with kinds, chains, rows and bytes."),
    "show": ("inspect_commands", "show", "Show the chain, tables and dense leaves of a step."),
    "diff": ("inspect_commands", "diff", "Show which rows differ between two steps."),
    "history": ("inspect_commands", "history", "Show the values of rows at each step."),
    "report": ("inspect_commands", "report", "Write an HTML page about a directory."),
    "verify": ("maintenance_commands", "verify", "Read every byte; report what can be restored."),
    "plan": ("maintenance_commands", "plan", "Show what a restore reads and how long it takes."),
    "gc": ("maintenance_commands", "gc", "Remove unneeded files after training has ended."),
    "copy": ("maintenance_commands", "copy", "Copy steps and everything needed to restore them."),
    "compact": ("maintenance_commands", "compact", "Merge the chain of a step into a new base."),
    "upload": ("daemons", "upload", "Upload the saves of a staging directory."),
    "node-store": ("daemons", "node_store", "Serve a directory as one node of a store."),
    "follow": ("daemons", "follow", "Keep the newest weights in memory, for serving."),
    "doctor": (
        "maintenance_commands",
        "doctor",
        "Check a directory, the machine and the installation.",
    ),
    "export": ("exchange", "export", "Convert a step to Orbax, safetensors or Parquet."),
    "import": ("exchange", "import_", "Import a stock Orbax checkpoint."),
    "service": ("service", "group", "Manage the hot standby of a directory."),
    "peers": ("service", "peers", "Manage peers, which keep saves in memory."),
}


def _load(name: str) -> click.Command:
    module, attribute, summary = _COMMANDS[name]
    command = getattr(importlib.import_module(f"deltackpt.cli.{module}"), attribute)
    command.short_help = summary
    return command


class _Commands(click.Group):
    """Imports the module of a command when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS:
            return _load(cmd_name)
        self.commands = {name: _load(name) for name in _COMMANDS}  # click suggests similar ones.
        return None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Inspect and maintain directories of deltackpt checkpoints."""


if __name__ == "__main__":
    main()
