# SPDX-License-Identifier: Apache-2.0
"""Findings of a directory's contents: steps, leftovers, lease, dense leaves, write-ahead log."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from deltackpt import units
from deltackpt.errors import Damaged, DeltackptError, FormatMismatch
from deltackpt.format import naming
from deltackpt.format.manifest import SaveId
from deltackpt.format.row_blocks import PLAIN
from deltackpt.ledger.steps import Steps, in_both, losses_of
from deltackpt.maintenance.doctor.machine import SCHEME, SCRATCH, Finding, ago_text
from deltackpt.reading import chains, stored_saves
from deltackpt.reading.stored_dense import StoredItem
from deltackpt.reading.wal_index import EpochView, ReplayPlan, WalIndex, WalReader, newest_plan
from deltackpt.reading.wal_state import WalState, read_wal_state
from deltackpt.storage.store import store_path


def dense_findings(opened: Steps) -> Iterator[Finding]:
    """Checks the newest step's manifest, and the block indices of dense leaves; reads no data."""
    newest = opened.newest_step()
    if newest is None:
        return
    try:
        at = store_path(opened.at(newest))
        if stored_saves.read_save(at, opened.item).head.dense_blocks is None:
            return
    except (Damaged, FormatMismatch) as error:
        yield Finding(
            subject="newest step",
            severity="problem",
            found=f"step {newest}: {error}",
            meaning="It cannot be restored.",
            action="deltackpt verify reports restorable steps",
        )
        return
    except (DeltackptError, OSError):
        return  # Another manager's step, or it was removed.
    try:
        item = StoredItem(chains.read_chain(at, opened.item))
        shards = [shard for of_save in item.shards for shard in of_save]
        for shard in shards:
            for segment in shard.record.segments:
                if segment.group != PLAIN:
                    shard.field_of(segment)
        item.check()
    except (DeltackptError, OSError) as error:
        yield Finding(
            subject="dense leaves",
            severity="problem",
            found=f"step {newest}: {error}",
            meaning="Its dense leaves, and those of deltas that depend on it, cannot be restored.",
            action="deltackpt verify reports restorable steps; the next base starts a new chain",
        )
        return
    deltas, nbytes = len(item.shards), sum(shard.record.nbytes for shard in shards)
    where = f", and the rest from {item.base.save.name}" if item.base and item.missing else ""
    yield Finding(
        subject="dense leaves",
        found=f"step {newest} stores them in the shards of {units.count(deltas, 'delta')}, "
        f"{units.size(nbytes)} before compression{where}",
        figures={"deltas": deltas, "nbytes": nbytes, "from_base": bool(item.missing)},
    )


#: A lag of a process beyond which a warning is emitted: it delays recovery points.
_BEHIND_SECS = 60.0
#: Replaying less than this takes hardly any time.
_LEAST_BASE_BYTES = 16 << 20


def log_findings(opened: Steps, steps: Mapping[int, SaveId]) -> Iterator[Finding]:
    """Checks the WAL; yields nothing without one."""
    try:
        found = read_wal_state(opened.wal_location)
    except DeltackptError as error:
        yield _problem("WAL", str(error), "No recovery point can be restored.")
        return
    if not found.epochs:
        return
    if found.index is None:
        yield _problem(
            "WAL",
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
        yield from _gaps(opened, found.index)
    if (plan := newest_plan(found.index, steps)) is not None:
        try:
            yield _length(plan)
        except Damaged as error:
            text = "The newest recovery point cannot be restored."
            yield _problem("WAL to replay", str(error), text)
    if needless := found.needless(steps):
        yield Finding(
            subject="obsolete WAL epochs",
            severity="note",
            found=f"{len(needless)}: {', '.join(map(str, sorted(needless)[:5]))}",
            meaning="Records of earlier runs that no restore needs; they use space.",
            action="none: the trainer removes them at its next steps, or deltackpt gc does",
            figures={"epochs": sorted(needless)},
        )


def _summary(found: WalState) -> Finding:
    assert found.index is not None
    points = [point for point in found.index.points() if point.full]
    nbytes = sum(one.nbytes for one in found.epochs)
    newest = "no full recovery point"
    if points:
        age = ago_text(time.time() - points[0].unix_secs)
        counted = units.count(len(points), "full recovery point")
        newest = f"{counted}, newest {points[0].step}, {age}"
    return Finding(
        subject="WAL",
        found=f"{units.count(len(found.epochs), 'epoch')}, {units.size(nbytes)}; {newest}",
        figures={
            "epochs": len(found.epochs),
            "full_recovery_points": len(points),
            "newest_recovery_point": points[0].step if points else None,
            "nbytes": nbytes,
        },
    )


def _places(logs: WalReader, view: EpochView) -> Iterator[Finding]:
    """Checks that the records of an epoch can be read from here."""
    if (missing := logs.in_topic(view.head)) is not None:
        yield Finding(
            subject=f"records of WAL epoch {view.head.epoch}",
            severity="note",
            found=f"{missing.expected}, {missing.found}",
            meaning="Its recovery points are not checked.",
            action=missing.action,
        )
    where = view.head.directory
    if where is not None and view.head.process_count and not store_path(where).exists():
        yield _problem(
            f"directory of WAL epoch {view.head.epoch}",
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
    behind = {
        process: None if record is None else first.unix_secs - record.unix_secs
        for process, record in newest.items()
        if record is None or record.save_id.attempt < first.save_id.attempt
    }
    late = {one: secs for one, secs in behind.items() if secs is None or secs > _BEHIND_SECS}
    if not behind:
        return
    texts = [
        f"{process} has no record" if secs is None else f"{process} is {secs:.0f} s behind"
        for process, secs in behind.items()
    ]
    yield Finding(
        subject="WAL processes",
        severity="warning" if late else "note",
        found=f"of {view.head.process_count}, " + ", ".join(texts),
        meaning="A recovery point needs the records of all processes; newer ones are lost.",
        action="check the disks and program logs of these processes" if late else "",
        figures={"behind_secs": behind},
    )


def _gaps(opened: Steps, index: WalIndex) -> Iterator[Finding]:
    """Checks for missing or altered records, except for a torn end."""
    if found := losses_of(opened, index, max(opened.steps(), default=-1)):
        again = WalReader(opened.wal_location).read()
        found = in_both(found, losses_of(opened, again, max(opened.steps(), default=-1)))
    if found:
        yield Finding(
            subject="WAL gaps",
            severity="warning",
            found=f"{len(found)}, the first: {found[0].error}",
            meaning="Recovery points after a gap cannot be restored from a step before it.",
            action="run deltackpt verify to list them; save a step, which needs no WAL",
            figures={"count": len(found)},
        )


def _length(plan: ReplayPlan) -> Finding:
    """Compares the bytes that a restore replays with the size of a base."""
    groups = plan.view.head.groups
    base = sum(group.rows * group.row_bytes for group in groups) + sum(
        value.nbytes
        for record in plan.last_records.values()
        if record.dense is not None
        for value in record.dense.values
    )
    long = plan.nbytes > max(base, _LEAST_BASE_BYTES)
    return Finding(
        subject="WAL to replay",
        severity="warning" if long else "ok",
        found=(
            f"{units.size(plan.nbytes)} from step {plan.step.step} to {plan.point.step}; a base "
            f"has {units.size(base)}"
        ),
        meaning="A restore reads more WAL than a full base would be." if long else "",
        action="save() more often, or lower WalOptions.max_wal_ratio" if long else "",
        figures={"wal_bytes": plan.nbytes, "base_bytes": base},
    )


def _problem(subject: str, found: str, meaning: str, action: str = "") -> Finding:
    return Finding(
        subject=subject,
        severity="problem",
        found=found,
        meaning=meaning,
        action=action,
    )


def bucket_findings(url: str, *, read_only: bool, endpoint: str | None = None) -> Iterator[Finding]:
    """Checks a bucket; unless ``read_only``, probes its conditional writes too."""
    from deltackpt.ledger.journal import Journal
    from deltackpt.ledger.opening import refuse_foreign
    from deltackpt.storage import buckets

    try:
        root = buckets.locate(url, endpoint=endpoint).open()
        journal, started = Journal(root), time.perf_counter()
        state = journal.state()
        secs = time.perf_counter() - started
        if not state.entry.number:
            refuse_foreign(root)
        left = journal.find_leftovers(state)
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
            sorted(path.glob(f"{naming.ROLLED_BACK}/*/[0-9]*")),
            "Steps after the one from which training resumed. They use space.",
            "if they are not needed: deltackpt gc --rolled-back",
        ),
        (
            "deleted steps",
            sorted(path.glob(f"{naming.TRASH}/*/*")),
            "Retention has deleted them; their files are being removed.",
            "none: this trainer, or the next one, removes them",
        ),
        (
            "unfinished compactions",
            [p for p in path.glob(f"{naming.COMPACTED}/*") if naming.is_compaction(p.name)],
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

    newest = max((epoch for name in entries if (epoch := naming.lease_epoch(name))), default=None)
    if newest is None:
        return
    try:
        lease = read_lease(path / naming.lease_name(newest))
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
