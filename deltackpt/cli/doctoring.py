# SPDX-License-Identifier: Apache-2.0
"""``deltackpt doctor``: checks for problems that break or slow down saves and restores."""

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
@click.option("--read-only", is_flag=True, help="Write nothing; fsync and speed are not measured.")
@arguments.endpoint
@arguments.as_json
def doctor(directory: str | None, read_only: bool, endpoint: str | None, as_json: bool) -> None:
    """Check DIRECTORY, machine and installation for problems with saves and restores.

    For a directory, it checks the file system and its guarantees after a power cut, fsync latency,
    write and read speed, free space, leftovers of interrupted saves, and the lease. For the machine
    and installation, it checks memory, huge pages, limits and versions.

    For a bucket, it checks the journal, leftovers of interrupted uploads, and the claim. It also
    writes a small temporary object, to check that a conditional write of an existing key is
    rejected.

    The command writes about 64 MiB to a temporary directory inside DIRECTORY and removes it. A
    trainer may be running. Neither jax nor Orbax needs to be installed.

    \b
    Severities:
      ok       as it should be
      note     worth knowing
      warning  works, but slower or with weaker guarantees
      problem  saves or restores fail, or their guarantees do not hold: exit code 1
    """  # noqa: D301 - click wants the character itself
    from deltackpt.storage import redaction
    from deltackpt.upkeep import doctor as examination

    # As an exception, so that the temporary directory is removed.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        findings = examination.examine(directory, read_only=read_only, endpoint=endpoint)
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        shown = None if directory is None else redaction.shown(directory)
        terminal.print_json({"directory": shown, "findings": findings})
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
    """Splits a text into lines that fit the terminal; one line if stdout is not a terminal."""
    if not sys.stdout.isatty():
        return [text] if text else []
    columns = shutil.get_terminal_size().columns
    return textwrap.wrap(text, max(40, columns - indent), break_on_hyphens=False)
