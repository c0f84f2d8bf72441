# SPDX-License-Identifier: Apache-2.0
"""The command line: ``deltackpt COMMAND``.

Exit codes: 0 done, or nothing to do; 1 failed, with one line on stderr that states what to do;
2 invalid usage; 75 in use by another process, so try again later.

Modules of commands import what a command needs when it runs, so that ``ls`` starts fast.
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


#: Modules, and the commands in each. A command runs without the modules of the others.
_COMMANDS = {
    "inspect_commands": ("diff", "history", "ls", "report", "show"),
    "maintenance_commands": ("compact", "copy", "doctor", "gc", "plan", "verify"),
    "daemons": ("follow", "node-store", "upload"),
    "exchange": ("export", "import"),
    "service": ("peers", "service"),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(name for names in _COMMANDS.values() for name in names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for module, names in _COMMANDS.items():
            if cmd_name in names:
                held = vars(importlib.import_module(f"deltackpt.cli.{module}")).values()
                commands = (one for one in held if isinstance(one, click.Command))
                return next(one for one in commands if one.name == cmd_name)
        return None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Inspect and maintain directories of deltackpt checkpoints."""


if __name__ == "__main__":
    main()
