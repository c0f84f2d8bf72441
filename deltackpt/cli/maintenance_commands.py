# SPDX-License-Identifier: Apache-2.0
"""Maintenance commands: compact, verify, gc, copy, plan, doctor."""

from __future__ import annotations

import collections
import itertools
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from deltackpt import units
from deltackpt.cli import terminal
from deltackpt.cli.terminal import Output, ReadSource, as_commands
from deltackpt.inspect.listing import Listing

if TYPE_CHECKING:
    from deltackpt.maintenance.doctor.machine import Finding
    from deltackpt.maintenance.estimate import RestorePlan
    from deltackpt.maintenance.verify import RootReport, StepVerdict
    from deltackpt.maintenance.verify_wal import PointVerdict
    from deltackpt.wal import KafkaWal


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt compact /data/run-17\n"
    "  deltackpt compact /data/run-17 12000 --memory 4GiB --workers 8"
)
@terminal.root
@click.argument("step", type=terminal.STEP, required=False)
@terminal.item
@terminal.endpoint
@click.option(
    "--workers", type=click.IntRange(min=1), help="Shards in parallel; one per CPU by default."
)
@click.option(
    "--memory",
    "memory_bytes",
    type=terminal.Size(),
    default="1GiB",
    show_default=True,
    help="Memory limit for all workers together.",
)
@terminal.prints
def compact(directory: str, item: str | None, endpoint: str | None, **options: Any) -> Output:
    """Merge the chain of a step of DIRECTORY into a new base, while trainers and readers run.

    STEP is the newest step by default.

    Restores then read that base instead of the chain, and retention may remove what it replaces.
    The steps do not change. It is safe to kill and restart.
    """
    from deltackpt.maintenance import compact as compaction

    with terminal.progress("compacting") as progress:
        done = compaction.compact(
            directory,
            item=_found_item(directory, item, endpoint),
            progress=progress,
            endpoint=endpoint,
            **options,
        )
    text = "nothing to compact: the chain of the step is only a base"
    if done is not None:
        text = (
            f"step {done.step}: merged {units.count(done.deltas, 'delta')} into a base of "
            f"{units.size(done.bytes_written)} in {done.seconds:.1f} s"
        )
    return Output(done, [text])


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt verify /data/run-17\n"
    "  deltackpt verify /data/run-17 12000 12500\n"
    "  deltackpt verify /data/run-17 --json | jq .intact"
)
@terminal.reads
@click.argument("steps", metavar="[STEP]...", type=terminal.STEP, nargs=-1)
@terminal.prints
def verify(source: ReadSource, steps: tuple[int, ...]) -> Output:
    """Re-read every byte of DIRECTORY and report which steps and recovery points can be restored.

    Every file is checked against the digests, chunks against their own checksums, manifests against
    each other, row indices against their tables, and chains down to their bases. With STEP,
    only these steps and what they need are read. Trainers may be running. The exit code is 1 if
    anything is damaged.

    A step counts as restorable if every save in its chain is intact. A restore may also succeed if
    newer deltas replace all damaged rows.
    """
    from deltackpt.maintenance import verify as verification

    with terminal.progress("verifying") as progress:
        report = verification.verify_root(
            source.directory, steps=steps or None, progress=progress, **source.options
        )
    value = {"intact": report.intact, **terminal.plain(report)}
    del value["points"]
    value["recovery_points"] = [
        {
            "step": one.point.step,
            "epoch": one.point.epoch,
            "restorable": one.restorable,
            "restored_from": one.step,
            "broken_by": one.broken_by,
        }
        for one in report.points
    ]
    return Output(value, _verdicts(report), failed=not report.intact)


def _verdicts(report: RootReport) -> Iterator[str | Listing]:
    kinds = {save.name: save.kind for save in report.saves}
    rows = [
        (
            str(one.step),
            kinds[str(one.step)],
            "yes" if one.restorable else "NO",
            _chain_text(one),
        )
        for one in report.steps
    ]
    if rows:
        yield Listing(("step", "kind", "restorable", "reads"), rows)
    for problem in report.problems:
        harm = " (restores do not read it)" if problem.stops == "nothing" else ""
        yield f"damaged: {problem}{harm}"
    yield from (f"note: {save.name}: {note}" for save in report.saves for note in save.notes)
    yield from (f"note: {as_commands(note)}" for note in report.notes)
    if report.points:
        yield _points_text(report.points)
    whole = sum(verdict.restorable for verdict in report.steps)
    yield (
        f"{whole} of {units.count(len(report.steps), 'step')} can be restored, "
        f"{units.count(len(report.problems), 'damaged object')}; read "
        f"{units.count(report.file_count, 'file')}, {units.size(report.bytes_read)} in "
        f"{report.seconds:.1f} s"
    )


def _points_text(points: Sequence[PointVerdict]) -> str:
    whole = [verdict for verdict in points if verdict.restorable]
    newest = f", the newest at step {whole[-1].point.step}" if whole else ""
    total = units.count(len(points), "full recovery point")
    text = f"WAL: {len(whole)} of {total} can be restored{newest}"
    void = [verdict for verdict in points if not verdict.restorable]
    if not void:
        return text
    steps = ", ".join(str(verdict.point.step) for verdict in void[:5])
    more = ", ..." if void[5:] else ""
    return f"{text}; not restorable: {steps}{more}, because {void[0].broken_by}"


def _chain_text(verdict: StepVerdict) -> str:
    if not verdict.restorable:
        return f"broken by {', '.join(verdict.broken_by)}"
    base, *deltas = verdict.chain
    return f"{base} + {units.count(len(deltas), 'delta')}" if deltas else base


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt gc /data/run-17 --dry-run\n"
    "  deltackpt gc /data/run-17 --keep-last 10 --keep-every 10000\n"
    "  deltackpt gc /data/run-17 --rolled-back --offline"
)
@terminal.root
@terminal.item
@terminal.endpoint
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option(
    "--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the newest N steps."
)
@click.option(
    "--keep-every", type=click.IntRange(min=1), metavar="N", help="Keep the multiples of N."
)
@click.option("--rolled-back", is_flag=True, help="Also remove steps that rollbacks moved aside.")
@click.option(
    "--offline", is_flag=True, help="Skip the check; you assert that no trainer is running."
)
@terminal.prints
def gc(
    directory: str,
    item: str | None,
    endpoint: str | None,
    dry_run: bool,
    keep_last: int | None,
    keep_every: int | None,
    rolled_back: bool,
    offline: bool,
) -> Output:
    """Remove unneeded files from DIRECTORY after its trainer has ended.

    These are leftovers of interrupted saves, deletions and compactions, compacted bases that end no
    chain, and obsolete WAL epochs. All steps are kept unless you pass --keep-last or --keep-every;
    then only the selected steps, the newest step, and everything that these need are kept.

    A running trainer does this itself. If a trainer may be running, the exit code is 75 and nothing
    is removed. The lease must name a process of this host that has ended; --offline skips this
    check. A bucket that a trainer has used always needs --offline. A trainer that is still alive is
    fenced: it cannot commit again.
    """
    from deltackpt.maintenance import gc as collection
    from deltackpt.maintenance.garbage import Retention

    chosen: dict[str, Any] = {
        "item": _found_item(directory, item, endpoint),
        "retention": Retention(keep_last=keep_last, keep_every=keep_every),
        "rolled_back": rolled_back,
        "endpoint": endpoint,
    }
    if dry_run:
        found = collection.collectable(directory, **chosen)
    else:
        found = collection.collect(directory, offline=offline, **chosen)
    shown: list[str | Listing] = [f"note: {note}" for note in found.notes]
    if found.removable:
        rows = [(one.name, units.size(one.nbytes), one.kind, one.reason) for one in found.removable]
        shown.insert(0, Listing(("name", "size", "kind", "reason"), rows))
    if dry_run and not offline and found.in_use is not None:
        shown.append(f"note: refused unless --offline is given: found {found.in_use}")
    shown.append(
        f"{'would remove' if dry_run else 'removed'} "
        f"{units.count(len(found.removable), 'object')}, {units.size(found.nbytes)}; "
        f"{units.count(len(found.kept), 'step')} kept"
    )
    return Output({"dry_run": dry_run, **terminal.plain(found)}, shown)


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt copy /data/run-17 /backup/run-17\n"
    "  deltackpt copy /data/run-17 gs://bucket/run-17 --all\n"
    "  deltackpt copy s3://bucket/run-17 /data/again 12000\n"
    "  deltackpt copy /data/run-17 s3://bucket/run-17 --endpoint http://minio:9000"
)
@click.argument("source")
@click.argument("target")
@click.argument("steps", metavar="[STEP]...", type=terminal.STEP, nargs=-1)
@click.option("--all", "all_steps", is_flag=True, help="Copy every step.")
@terminal.item
@click.option(
    "--recheck", is_flag=True, help="Re-read existing steps at TARGET too; replace damage."
)
@click.option("--offline", is_flag=True, help="Assert that no trainer is running at TARGET.")
@terminal.endpoint
@click.option("--workers", type=click.IntRange(min=1), help="Files in flight; 8 by default.")
@terminal.prints
def copy(
    source: str,
    target: str,
    steps: tuple[int, ...],
    all_steps: bool,
    item: str | None,
    endpoint: str | None,
    workers: int | None,
    **options: Any,
) -> Output:
    """Copy steps and everything needed to restore them from SOURCE to TARGET.

    Without STEP, the newest step is copied. SOURCE and TARGET are each a directory, a URL (file://,
    s3://, gs://, az:// or nodes://), or a TensorStore kvstore spec as JSON. Credentials are looked
    up in the same way as by the provider's own tools. The WAL is not copied.

    Every byte is checked when it is read and after it was written. A step appears at the target
    only when it is complete. Restart an interrupted copy; it resumes where it stopped.
    """
    if steps and all_steps:
        raise click.UsageError("STEP and --all are mutually exclusive")
    from deltackpt.ledger.upload import WORKERS
    from deltackpt.tiers import copy as copying

    item = _found_item(source, item, endpoint)
    with terminal.progress("copying") as progress:
        done = copying.copy(
            source,
            target,
            item=item,
            steps=steps or None,
            all_steps=all_steps,
            endpoint=endpoint,
            workers=workers or WORKERS,
            progress=progress,
            **options,
        )
    names = ", ".join(map(str, done.steps[-5:]))
    text = (
        f"{units.count(len(done.steps), 'step')} ({'..., ' if done.steps[5:] else ''}"
        f"{names}) at the target: copied {units.count(done.file_count, 'file')}, "
        f"{units.size(done.bytes_written)} in {done.seconds:.1f} s; "
        f"{units.size(done.bytes_found)} already present"
    )
    return Output(done, [text])


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt plan /data/run-17\n"
    "  deltackpt plan /data/run-17 12000 --tables"
)
@terminal.reads
@click.argument("step", type=terminal.STEP, required=False)
@click.option("--tables", is_flag=True, help="Also list what is read for each table.")
@terminal.prints
def plan(source: ReadSource, step: int | None, tables: bool) -> Output:
    """Show what a restore of STEP reads from DIRECTORY, and estimate its duration.

    STEP is a step, or the training step of a full recovery point; the newest step by default.

    The time is extrapolated from restoring some of the step's rows, for at most about a second.
    Files in the page cache are read from there. The time excludes dense leaves and the transfer to
    devices.
    """
    from deltackpt.maintenance import estimate

    found = estimate.restore_plan(source.directory, step, **source.options)
    value = terminal.plain(found)
    value["estimate"]["seconds"] = found.estimate.seconds
    value["recovery_point"] = value.pop("point")
    return Output(value, _planned(found, tables))


def _planned(found: RestorePlan, tables: bool) -> Iterator[str | Listing]:
    lines = [
        (
            save.name,
            save.kind,
            save.rows,
            units.size(save.nbytes),
            save.file_count,
            ", ".join(save.codecs),
        )
        for save in found.chain
    ]
    yield Listing(("reads", "kind", "rows", "size", "files", "codecs"), lines)
    if tables:
        lines = [
            (
                *(table.table, table.rows, table.rows_read),
                *(units.size(table.bytes_read), units.size(table.memory_bytes)),
            )
            for table in found.tables
        ]
        yield Listing(("table", "rows", "rows read", "read", "memory"), lines)
    took, where, wal = found.estimate, units.count(found.dense_file_count, "file"), ""
    yield f"memory: {units.size(found.memory_bytes)} for tables and slots"
    if found.point is not None:
        where, wal = "the WAL", f", {took.wal_secs:.2g} s WAL"
        replayed, records = units.size(found.wal_bytes), units.count(found.wal_records, "record")
        yield f"WAL: {replayed} in {records} up to {found.point}"
    yield f"dense leaves: {units.size(found.dense_bytes)} in {where}"
    yield (
        f"time: about {took.seconds:.2g} s: {took.records_secs:.2g} s manifests, "
        f"{took.tables_secs:.2g} s tables ({took.sampled_share:.0%} of them measured){wal}"
    )
    if len(found.chain) > 1:
        yield (
            f"compaction: a base of at most {units.size(found.merged_bytes)} instead of "
            f"{units.size(found.bytes_read)} in {len(found.chain)} saves"
        )


def _found_item(directory: str, item: str | None, endpoint: str | None) -> str:
    from deltackpt.ledger.opening import open_steps

    return open_steps(directory, item=item, endpoint=endpoint).item


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
@click.option("--read-only", is_flag=True, help="Write nothing; fsync is not measured.")
@terminal.endpoint
@terminal.kafka_config
@terminal.prints
def doctor(
    directory: str | None, read_only: bool, endpoint: str | None, wal: KafkaWal | None
) -> Output:
    """Check DIRECTORY, machine and installation for problems with saves and restores.

    For a directory, it checks the file system and its guarantees after a power cut, fsync latency,
    free space, the newest step, the WAL and the lease. For the machine and installation, it checks
    memory, huge pages, limits and versions. Damage and leftovers are reported by
    `deltackpt verify`.

    For a bucket, it checks the journal and the claim. It also writes a small temporary object, to
    check that a conditional write of an existing key is rejected.

    The command writes small files to a temporary directory inside DIRECTORY and removes it. A
    trainer may be running. Neither jax nor Orbax needs to be installed.

    \b
    Severities:
      ok       as it should be
      note     worth knowing
      warning  works, but slower or with weaker guarantees
      problem  saves or restores fail, or their guarantees do not hold: exit code 1
    """  # noqa: D301 - click wants the character itself
    from deltackpt.maintenance import doctor as examination
    from deltackpt.storage import redaction

    # As an exception, so that the temporary directory is removed.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        findings = examination.examine(directory, read_only=read_only, endpoint=endpoint, wal=wal)
    finally:
        signal.signal(signal.SIGTERM, before)
    shown = None if directory is None else redaction.shown(directory)
    return Output(
        {"directory": shown, "findings": findings},
        _findings(findings),
        failed=any(finding.severity == "problem" for finding in findings),
    )


def _findings(findings: tuple[Finding, ...]) -> Iterator[str]:
    width = max(len(finding.subject) for finding in findings)
    indent = " " * (_SEVERITY_WIDTH + width + 4)
    groups = itertools.groupby(findings, key=lambda finding: finding.area)
    for number, (area, inside) in enumerate(groups):
        yield ("\n" if number else "") + click.style(area.capitalize(), bold=True)
        for finding in inside:
            severity = finding.severity.ljust(_SEVERITY_WIDTH)
            severity = click.style(severity, _COLOURS[finding.severity])
            yield f"  {severity}{finding.subject.ljust(width)}  {finding.found}"
            if finding.meaning:
                yield indent + click.style(finding.meaning, dim=True)
            if finding.action:
                yield f"{indent}-> {as_commands(finding.action)}"
    count = collections.Counter(finding.severity for finding in findings)
    pieces = [units.count(count[name], name) for name in ("problem", "warning", "note")]
    yield f"\n{', '.join(pieces)}"
