# SPDX-License-Identifier: Apache-2.0
"""Findings of a write-ahead log: recovery points, lagging processes, gaps, replay length."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from deltackpt import units
from deltackpt.errors import Damaged, DeltackptError
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.points import in_both, losses_of
from deltackpt.ledger.steps import Steps
from deltackpt.reading.wal_index import EpochView, ReplayPlan, WalIndex, WalReader, newest_plan
from deltackpt.reading.wal_state import WalState, read_wal_state
from deltackpt.storage.store import store_path
from deltackpt.upkeep.doctor.findings import Finding, ago_text

#: A lag of a process beyond which a warning is emitted: it delays recovery points.
_BEHIND_SECS = 60.0
#: Replaying less than this takes hardly any time.
_LEAST_BASE_BYTES = 16 << 20


def log_findings(opened: Steps, steps: Mapping[int, SaveId]) -> Iterator[Finding]:
    """Checks the WAL; yields nothing without one.

    Args:
      opened: the checkpoint directory.
      steps: its committed steps, by number.
    """
    try:
        found = read_wal_state(opened.log_at)
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
        yield from _places(WalReader(opened.log_at), view)
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
        again = WalReader(opened.log_at).read()
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
