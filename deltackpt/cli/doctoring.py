# SPDX-License-Identifier: Apache-2.0
"""The command that looks for what may stand in the way of saves and restores."""

from __future__ import annotations

import collections
import shutil
import signal
import sys
import textwrap
from typing import TYPE_CHECKING

import click

from deltackpt import units
from deltackpt.cli import arguments, terminal

if TYPE_CHECKING:
    from deltackpt.upkeep.doctor.findings import Finding

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}
_SEVERITY_WIDTH = len("problem") + 2
_TERMINATED = 128 + signal.SIGTERM


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt doctor\n"
    "  deltackpt doctor /data/run-17\n"
    "  deltackpt doctor /data/run-17 --read-only\n"
    "  deltackpt doctor s3://bucket/run-17\n"
    "  deltackpt doctor /data/run-17 --json | jq '.findings[] | select(.severity != \"ok\")'"
)
@click.argument("directory", metavar="[DIRECTORY|URL]", required=False)
@click.option("--read-only", is_flag=True, help="Write nothing: measure neither fsync nor speed.")
@arguments.endpoint
@arguments.as_json
def doctor(directory: str | None, read_only: bool, endpoint: str | None, as_json: bool) -> None:
    """Look for what may stand in the way of saves and restores, and say what to do.

    Of DIRECTORY: the file system and what survives a power cut on it, how long fsync takes, the
    speed of writing and reading, free space, what cut saves left, and who holds the lease. Of the
    machine and the installation: memory, huge pages, limits, versions.

    Of a bucket: its journal, what cut uploads left, who claimed it, and, by a small object that is
    removed again, that it refuses a conditional write of what is there.

    It writes some 64 MiB to a temporary directory inside DIRECTORY for a moment and removes it. A
    trainer may run meanwhile. Neither jax nor Orbax needs to be installed.

    \b
    Severities:
      ok       as it should be
      note     worth knowing
      warning  works, but slower, or with less than one may expect
      problem  saves or restores fail, or what they promise does not hold: exit code 1
    """  # noqa: D301 - click wants the character itself
    from deltackpt.upkeep import doctor as examination

    # As an exception it leaves nothing behind.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        findings = examination.examine(directory, read_only=read_only, endpoint=endpoint)
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        terminal.print_json({"directory": directory, "findings": findings})
    else:
        _print(findings)
    if any(finding.severity == "problem" for finding in findings):
        sys.exit(1)


def _print(findings: tuple[Finding, ...]) -> None:
    width = max(len(finding.subject) for finding in findings)
    area = None
    for finding in findings:
        if finding.area != area:
            if area is not None:
                click.echo()
            area = finding.area
            click.secho(area.capitalize(), bold=True)
        severity = click.style(finding.severity.ljust(_SEVERITY_WIDTH), _COLOURS[finding.severity])
        indent = _SEVERITY_WIDTH + width + 4
        first, *more = _wrapped(finding.found, indent)
        click.echo(f"  {severity}{finding.subject.ljust(width)}  {first}")
        for line in more:
            click.echo(" " * indent + line)
        for line in _wrapped(finding.meaning, indent):
            click.echo(" " * indent + click.style(line, dim=True))
        for line in _wrapped(finding.action and f"-> {finding.action}", indent):
            click.echo(" " * indent + line)
    count = collections.Counter(finding.severity for finding in findings)
    parts = [units.count(count[name], name) for name in ("problem", "warning", "note")]
    click.echo(f"\n{', '.join(parts)}")


def _wrapped(text: str, indent: int) -> list[str]:
    """Lines that fit the terminal; one line where the output is none."""
    if not sys.stdout.isatty():
        return [text] if text else []
    columns = shutil.get_terminal_size().columns
    return textwrap.wrap(text, max(40, columns - indent), break_on_hyphens=False)
