# SPDX-License-Identifier: Apache-2.0
"""``deltackpt report``: writes an HTML page about a directory."""

from __future__ import annotations

import click

from deltackpt.cli import arguments, terminal
from deltackpt.cli.advice import as_commands


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt report /data/run-17\n"
    "  deltackpt report /data/run-17 -o run-17.html --json"
)
@arguments.root
@click.option(
    "-o",
    "--output",
    type=arguments.UserPath(dir_okay=False),
    default="report.html",
    show_default=True,
    help="File for the page.",
)
@arguments.item
@arguments.endpoint
@arguments.as_json
def report(
    directory: str, output: str, item: str | None, endpoint: str | None, as_json: bool
) -> None:
    """Write an HTML page about DIRECTORY: its contents, what can be restored, and plots.

    The page is one self-contained file. The command reads manifests and some rows of the busiest
    table; `deltackpt verify` reads every byte.
    """
    # Imported here: other commands need not pay for it.
    from deltackpt import inspect, units
    from deltackpt.inspect import report as page

    written = page.write(inspect.open(directory, item=item, endpoint=endpoint), output)
    if as_json:
        terminal.print_json(written)
        return
    click.echo(
        f"{written.path}: {units.count(written.steps, 'step')}, {units.size(written.nbytes)}"
    )
    for warning in written.warnings:
        click.echo(f"  {as_commands(warning)}")
