# SPDX-License-Identifier: Apache-2.0
"""Findings of a directory's contents: the newest step, the write-ahead log, the lease."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deltackpt import units
from deltackpt.errors import BrokenChain, Damaged, DeltackptError, FormatMismatch
from deltackpt.format import naming
from deltackpt.ledger.directory import Root
from deltackpt.ledger.lease import read_lease, utc
from deltackpt.ledger.steps import Steps
from deltackpt.maintenance.doctor.machine import SCHEME, Finding
from deltackpt.reading import chains
from deltackpt.reading.wal_index import EpochView, WalReader, WalState, read_wal_state
from deltackpt.reading.wal_topics import WalTopics
from deltackpt.storage.store import store_path

if TYPE_CHECKING:
    from deltackpt.options import KafkaWal

#: A lag of a process beyond which a warning is emitted: it delays recovery points.
_BEHIND_SECS = 60.0


def content_findings(
    directory: str, read_only: bool, wal: KafkaWal | None = None
) -> Iterator[Finding]:
    """Checks the newest step of a directory, its WAL and its lease."""
    path = Path(os.path.expanduser(directory)).absolute()
    if not SCHEME.match(directory) and not path.exists():
        yield Finding(
            "directory",
            "warning",
            f"{path}: does not exist",
            "A trainer creates it. The findings below are for its parent directory.",
            f"check the spelling, or: mkdir -p {path}",
        )
        return
    try:
        with contextlib.closing(Root.open(directory, read_only=True)) as opened:
            steps = sorted(opened.steps())
            of_newest = [*_newest_step(opened)]
        entries = sorted(os.listdir(path))
    except (DeltackptError, OSError) as error:
        meaning = "Trainers and readers cannot open it."
        yield Finding("directory", "problem", str(error), meaning)
        return
    writable = read_only or os.access(path, os.W_OK | os.X_OK)
    yield Finding(
        "directory",
        "problem",
        str(path) if writable else f"{path}: not writable for this user",
        "Steps can be restored (access='read'), but not saved.",
        "check its owner and permissions, or run this as the trainer",
    ).ok_if(writable)
    yield _steps_finding(steps)
    yield from of_newest
    with contextlib.ExitStack() as held:
        if wal is not None:
            opened.topics = held.enter_context(contextlib.closing(WalTopics(wal.config)))
        yield from _wal_findings(opened)
    yield from _lease(path, entries)


def bucket_findings(url: str, read_only: bool, endpoint: str | None = None) -> Iterator[Finding]:
    """Checks a bucket; unless ``read_only``, probes its conditional writes too."""
    from deltackpt.ledger.bucket_steps import refuse_foreign
    from deltackpt.ledger.journal import Journal
    from deltackpt.storage import buckets

    try:
        root = buckets.locate(url, endpoint=endpoint).open()
        journal = Journal(root)
        state = journal.state()
        if not state.entry.number:
            refuse_foreign(root)
        if not read_only:
            buckets.probe(root)
    except (DeltackptError, OSError) as error:
        meaning = "Trainers and readers cannot open it, or a trainer's commits can fail."
        yield Finding("bucket", "problem", str(error), meaning)
        return
    commits = "not checked (read-only)" if read_only else "work as commits need"
    yield Finding("bucket", "ok", f"{root}: conditional writes {commits}")
    for problem in journal.problems:
        meaning = "An object of the bucket was removed or altered: find out what did this."
        yield Finding("journal", "problem", str(problem), meaning)
    yield _steps_finding([*state.steps])
    found = "no trainer has used this bucket" if state.claim is None else str(state.claim.lease)
    yield Finding("claim", "ok", found)


def _steps_finding(steps: Sequence[int]) -> Finding:
    newest = f", newest {steps[-1]}" if steps else ""
    return Finding("steps", "ok", f"{len(steps)} committed{newest}")


def _newest_step(opened: Steps) -> Iterator[Finding]:
    """Checks the manifests of the newest step's chain."""
    newest = opened.newest_step()
    if newest is None:
        return
    try:
        chains.read_chain(opened.at(newest), opened.item)
    except (Damaged, FormatMismatch, BrokenChain) as error:
        found, action = f"step {newest}: {error}", "deltackpt verify reports restorable steps"
        yield Finding("newest step", "problem", found, "It cannot be restored.", action)
    except (DeltackptError, OSError):
        return  # Another manager's step, or it was removed.


def _wal_findings(opened: Steps) -> Iterator[Finding]:
    """Checks the WAL; yields nothing without one."""
    try:
        found = read_wal_state(opened.wal_location)
    except DeltackptError as error:
        yield Finding("WAL", "problem", str(error), "No recovery point can be restored.")
        return
    if not found.epochs:
        return
    if found.index is None:
        yield Finding(
            "WAL",
            "problem",
            str(found.problem),
            "The valid recovery points cannot be determined: restore_latest() raises an error.",
            "restore the epoch header from a backup, or resume from a step: "
            "restore_latest(wal=False)",
        )
        return
    yield _summary(found)
    for view in found.index.views:
        yield from _places(WalReader(opened.wal_location), view)
    if found.index.views:
        yield from _processes(found.index.views[0])


def _summary(found: WalState) -> Finding:
    assert found.index is not None
    points = [point for point in found.index.points() if point.full]
    newest = "no full recovery point"
    if points:
        counted = units.count(len(points), "full recovery point")
        newest = f"{counted}, newest {points[0].step} of {utc(points[0].unix_secs)}"
    nbytes = units.size(sum(one.nbytes for one in found.epochs))
    return Finding("WAL", "ok", f"{units.count(len(found.epochs), 'epoch')}, {nbytes}; {newest}")


def _places(logs: WalReader, view: EpochView) -> Iterator[Finding]:
    """Checks that the records of an epoch can be read from here."""
    if (missing := logs.in_topic(view.head)) is not None:
        subject, found = "records of WAL epoch", f"{missing.expected}, {missing.found}"
        meaning = "Its recovery points are not checked."
        yield Finding(f"{subject} {view.head.epoch}", "note", found, meaning, missing.action)
    where = view.head.directory
    if where is not None and view.head.process_count and not store_path(where).exists():
        yield Finding(
            f"directory of WAL epoch {view.head.epoch}",
            "problem",
            f"{where}: no such directory on this machine",
            "Its recovery points cannot be restored here: the disk is lost, or on another node.",
            "mount it, or restore on the node that has it",
        )


def _processes(view: EpochView) -> Iterator[Finding]:
    """Checks for processes of the newest epoch that delay its recovery points."""
    newest = {
        process: max(log.by_id.values(), key=lambda record: record.save_id.attempt, default=None)
        for process, log in view.processes.items()
    }
    records = [record for record in newest.values() if record is not None]
    if not records:
        return
    first = max(records, key=lambda record: record.save_id.attempt)
    texts, late = [], False
    for process, record in newest.items():
        if record is None:
            texts, late = [*texts, f"{process} has no record"], True
        elif record.save_id.attempt < first.save_id.attempt:
            secs = first.unix_secs - record.unix_secs
            texts, late = [*texts, f"{process} is {secs:.0f} s behind"], late or secs > _BEHIND_SECS
    if texts:
        yield Finding(
            "WAL processes",
            "warning" if late else "note",
            f"of {view.head.process_count}, {', '.join(texts)}",
            "A recovery point needs the records of all processes; newer ones are lost.",
            "check the disks and program logs of these processes" if late else "",
        )


def _lease(path: Path, entries: Iterable[str]) -> Iterator[Finding]:
    newest = max((epoch for name in entries if (epoch := naming.lease_epoch(name))), default=None)
    if newest is None:
        return
    try:
        lease = read_lease(path / naming.lease_name(newest))
    except FormatMismatch as error:
        meaning = "Another version of deltackpt uses the directory."
        yield Finding("lease", "problem", str(error), meaning)
        return
    except Damaged:
        yield Finding(
            "lease",
            "note",
            f"epoch {newest}, not signed",
            "A trainer is starting, or was killed while it started.",
            "none: the next trainer takes the next epoch",
        )
        return
    state = {True: ", which is running", False: ", which has ended", None: ""}[lease.runs]
    yield Finding(
        "lease",
        "note",
        f"epoch {newest}: process {lease.pid} on {lease.host}{state}, since "
        f"{utc(lease.since_secs)}",
        "Another trainer that opens the directory fences this one.",
        "use a separate directory for each trainer",
    ).ok_if(lease.runs is False)
