# SPDX-License-Identifier: Apache-2.0
"""Findings of a directory's contents: steps, leftovers, lease or claim."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from deltackpt.errors import Damaged, DeltackptError, FormatMismatch
from deltackpt.format import names
from deltackpt.upkeep.doctor.findings import SCHEME, SCRATCH, Finding, ago_text


def bucket_findings(url: str, *, read_only: bool, endpoint: str | None = None) -> Iterator[Finding]:
    """Checks a bucket: latency, journal, steps, leftovers and claim.

    Unless ``read_only``, also checks that it refuses a conditional write of an existing key.
    """
    from deltackpt.ledger.journal import Journal
    from deltackpt.ledger.opening import refuse_foreign
    from deltackpt.storage import buckets

    try:
        root = buckets.place(url, endpoint=endpoint).open()
        journal, started = Journal(root), time.perf_counter()
        state = journal.state()
        secs = time.perf_counter() - started
        if not state.entry.number:
            refuse_foreign(root)
        left = journal.left_over(state)
        if not read_only:
            buckets.probe(root)
    except (DeltackptError, OSError) as error:
        yield Finding(
            subject="bucket",
            severity="problem",
            found=str(error),
            meaning="Trainers and readers cannot open it, or a trainer's commits can fail.",
        )
        return
    commits = "not checked (read-only)" if read_only else "work as commits need"
    yield Finding(
        subject="bucket",
        found=f"{root}: journal read in {secs * 1e3:.0f} ms; conditional writes {commits}",
        figures={"journal_secs": secs, "entry": state.entry.number},
    )
    for problem in journal.problems:
        yield Finding(
            subject="journal",
            severity="problem",
            found=str(problem),
            meaning="An object of the bucket was removed or altered: find out what did this.",
        )
    steps = [*state.steps]
    yield Finding(
        subject="steps",
        found=f"{len(steps)} committed{f', newest {steps[-1]}' if steps else ''}",
        figures={"steps": len(steps), "newest_step": steps[-1] if steps else None},
    )
    count = sum(map(len, left.values()))
    yield Finding(
        subject="leftovers",
        severity="note" if left else "ok",
        found=f"{count} objects of {len(left)} interrupted uploads" if left else "none",
        meaning="The next trainer deletes them." if left else "",
        figures={"objects": count},
    )
    claim = state.claim
    yield Finding(
        subject="claim",
        found="no trainer has used this bucket"
        if claim is None
        else f"epoch {claim.lease.epoch}, by process {claim.lease.pid} on {claim.lease.host}, "
        f"{ago_text(time.time() - claim.lease.since_secs)}",
    )


def content_findings(directory: str, *, read_only: bool) -> Iterator[Finding]:
    """Checks the steps of a directory, its WAL, leftovers and lease."""
    from deltackpt.ledger.directory import Root
    from deltackpt.upkeep.doctor.dense import dense_findings
    from deltackpt.upkeep.doctor.log import log_findings

    path = Path(os.path.expanduser(directory)).absolute()
    if not SCHEME.match(directory) and not path.exists():
        yield Finding(
            subject="directory",
            severity="warning",
            found=f"{path}: does not exist",
            meaning="A trainer creates it. The findings below are for its parent directory.",
            action=f"check the spelling, or: mkdir -p {path}",
        )
        return
    try:
        with contextlib.closing(Root.open(directory, read_only=True)) as opened:
            steps = sorted(opened.steps())
            known = {step: info.save_id for step, info in opened.saves().items() if info}
            of_dense = [*dense_findings(opened)]
        entries = sorted(os.listdir(path))
    except (DeltackptError, OSError) as error:
        yield Finding(
            subject="directory",
            severity="problem",
            found=str(error),
            meaning="Trainers and readers cannot open it.",
        )
        return
    writable = read_only or os.access(path, os.W_OK | os.X_OK)
    yield Finding(
        subject="directory",
        severity="ok" if writable else "problem",
        found=str(path) if writable else f"{path}: not writable for this user",
        meaning="" if writable else "Steps can be restored (access='read'), but not saved.",
        action="" if writable else "check its owner and permissions, or run this as the trainer",
    )
    newest = f", newest {steps[-1]}" if steps else ""
    yield Finding(
        subject="steps",
        found=f"{len(steps)} committed{newest}",
        figures={"steps": len(steps), "newest_step": steps[-1] if steps else None},
    )
    yield from of_dense
    yield from log_findings(opened, known)
    yield from _leftovers(path, entries)
    yield from _lease(path, entries)


def _leftovers(path: Path, entries: Iterable[str]) -> Iterator[Finding]:
    from deltackpt.ledger.directory import is_leftover

    now = time.time()
    cut = {name: _age_secs(path / name, now) for name in entries if is_leftover(name)}
    if cut:
        yield Finding(
            subject="unfinished steps",
            severity="note",
            found=", ".join(f"{name} ({ago_text(age)})" for name, age in cut.items()),
            meaning="A save in flight, or an interrupted one; readers ignore it.",
            action="none: the next trainer that opens the directory removes leftovers",
            figures={"ages_secs": cut},
        )
    for subject, found, meaning, action in (
        (
            "moved-aside steps",
            sorted(path.glob(f"{names.ROLLED_BACK}/*/[0-9]*")),
            "Steps after the one from which training resumed. They use space.",
            "if they are not needed: deltackpt gc --rolled-back",
        ),
        (
            "deleted steps",
            sorted(path.glob(f"{names.TRASH}/*/*")),
            "Retention has deleted them; their files are being removed.",
            "none: this trainer, or the next one, removes them",
        ),
        (
            "unfinished compactions",
            [p for p in path.glob(f"{names.COMPACTED}/*") if names.is_compaction(p.name)],
            "A compaction in progress, or an interrupted one.",
            "none: the next compaction removes leftovers",
        ),
        (
            "interrupted measurements",
            [path / name for name in entries if name.startswith(SCRATCH)],
            "A deltackpt doctor was killed while it measured.",
            f"unless another one is running: rm -r {path}/{SCRATCH}*",
        ),
    ):
        if found:
            shown = ", ".join(entry.name for entry in found[:5])
            yield Finding(
                subject=subject,
                severity="note",
                found=f"{len(found)}: {shown}{', ...' if len(found) > 5 else ''}",
                meaning=meaning,
                action=action,
                figures={"count": len(found)},
            )


def _age_secs(path: Path, now: float) -> float | None:
    """Age of a file or directory in seconds; None if it was removed."""
    with contextlib.suppress(FileNotFoundError):
        return round(now - path.stat().st_mtime, 1)
    return None


def _lease(path: Path, entries: Iterable[str]) -> Iterator[Finding]:
    from deltackpt.ledger.lease import read_lease

    newest = max((epoch for name in entries if (epoch := names.lease_epoch(name))), default=None)
    if newest is None:
        return
    try:
        lease = read_lease(path / names.lease_name(newest))
    except FormatMismatch as error:
        yield Finding(
            subject="lease",
            severity="problem",
            found=str(error),
            meaning="Another version of deltackpt uses the directory.",
        )
        return
    except Damaged:
        yield Finding(
            subject="lease",
            severity="note",
            found=f"epoch {newest}, not signed",
            meaning="A trainer is starting, or was killed while it started.",
            action="none: the next trainer takes the next epoch",
            figures={"epoch": newest},
        )
        return
    runs = lease.runs
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lease.since_secs))
    state = {True: ", which is running", False: ", which has ended", None: ""}[runs]
    yield Finding(
        subject="lease",
        severity="ok" if runs is False else "note",
        found=f"epoch {newest}: process {lease.pid} on {lease.host}{state}, since {since}",
        meaning=""
        if runs is False
        else "Another trainer that opens the directory fences this one.",
        action="" if runs is False else "use a separate directory for each trainer",
        figures={**dataclasses.asdict(lease), "runs": runs},
    )
