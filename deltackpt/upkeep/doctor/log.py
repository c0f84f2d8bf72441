# SPDX-License-Identifier: Apache-2.0
"""Findings of a write-ahead log: recovery points, lagging processes, gaps, replay length."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from deltackpt import units
from deltackpt.errors import Damaged, DeltackptError
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.log_losses import in_both, losses_of
from deltackpt.ledger.steps import Steps
from deltackpt.reading.log_states import LogState, log_state
from deltackpt.reading.wal_index import Era, History, Logs, Way, newest_way
from deltackpt.storage.store import spot
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
        found = log_state(opened.log_at)
    except DeltackptError as error:
        yield _problem("WAL", str(error), "No recovery point can be restored.")
        return
    if not found.stretches:
        return
    if found.history is None:
        yield _problem(
            "WAL",
            str(found.problem),
            "The valid recovery points cannot be determined: restore_latest() raises an error.",
            "restore the epoch header from a backup, or resume from a step: "
            "restore_latest(wal=False)",
        )
        return
    yield _summary(found)
    for era in found.history.eras:
        yield from _places(era)
    if found.history.eras:
        yield from _processes(found.history.eras[0])
        yield from _gaps(opened, found.history)
    if (way := newest_way(found.history, steps)) is not None:
        try:
            yield _length(way)
        except Damaged as error:
            text = "The newest recovery point cannot be restored."
            yield _problem("WAL to replay", str(error), text)
    if needless := found.needless(steps):
        yield Finding(
            area="directory",
            subject="obsolete WAL epochs",
            severity="note",
            found=f"{len(needless)}: {', '.join(map(str, sorted(needless)[:5]))}",
            meaning="Records of earlier runs that no restore needs; they use space.",
            action="none: the trainer removes them at its next steps, or deltackpt gc does",
            figures={"epochs": sorted(needless)},
        )


def _summary(found: LogState) -> Finding:
    assert found.history is not None
    points = [point for point in found.history.points() if point.full]
    nbytes = sum(one.nbytes for one in found.stretches)
    newest = "no full recovery point"
    if points:
        age = ago_text(time.time() - points[0].unix_secs)
        counted = units.count(len(points), "full recovery point")
        newest = f"{counted}, newest {points[0].step}, {age}"
    return Finding(
        area="directory",
        subject="WAL",
        severity="ok",
        found=f"{units.count(len(found.stretches), 'epoch')}, {units.size(nbytes)}; {newest}",
        figures={
            "epochs": len(found.stretches),
            "full_recovery_points": len(points),
            "newest_recovery_point": points[0].step if points else None,
            "nbytes": nbytes,
        },
    )


def _places(era: Era) -> Iterator[Finding]:
    """Checks that a separate directory of the WAL is visible from here."""
    where = era.head.directory
    if where is not None and era.head.process_count and not spot(where).exists():
        yield _problem(
            f"directory of WAL epoch {era.head.stretch}",
            f"{where}: no such directory on this machine",
            "Its recovery points cannot be restored here: the disk is lost, or on another node.",
            "mount it, or restore on the node that has it",
        )


def _processes(era: Era) -> Iterator[Finding]:
    """Checks for processes of the newest epoch that delay its recovery points."""
    newest = {
        process: max(log.by_id.values(), key=lambda record: record.save_id.attempt, default=None)
        for process, log in era.processes.items()
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
        area="directory",
        subject="WAL processes",
        severity="warning" if late else "note",
        found=f"of {era.head.process_count}, " + ", ".join(texts),
        meaning="A recovery point needs the records of all processes; newer ones are lost.",
        action="check the disks and program logs of these processes" if late else "",
        figures={"behind_secs": behind},
    )


def _gaps(opened: Steps, history: History) -> Iterator[Finding]:
    """Checks for missing or altered records, except for a torn end."""
    if found := losses_of(opened, history, max(opened.steps(), default=-1)):
        again = Logs(opened.log_at).read()
        found = in_both(found, losses_of(opened, again, max(opened.steps(), default=-1)))
    if found:
        yield Finding(
            area="directory",
            subject="WAL gaps",
            severity="warning",
            found=f"{len(found)}, the first: {found[0].error}",
            meaning="Recovery points after a gap cannot be restored from a step before it.",
            action="run deltackpt verify to list them; save a step, which needs no WAL",
            figures={"count": len(found)},
        )


def _length(way: Way) -> Finding:
    """Compares the bytes that a restore replays with the size of a base."""
    groups = way.era.head.groups
    base = sum(group.rows * group.row_bytes for group in groups) + sum(
        value.nbytes
        for record in way.last_records.values()
        if record.dense is not None
        for value in record.dense.values
    )
    long = way.nbytes > max(base, _LEAST_BASE_BYTES)
    return Finding(
        area="directory",
        subject="WAL to replay",
        severity="warning" if long else "ok",
        found=(
            f"{units.size(way.nbytes)} from step {way.step.step} to {way.point.step}; a base has "
            f"{units.size(base)}"
        ),
        meaning="A restore reads more WAL than a full base would be." if long else "",
        action="save() more often, or lower WalOptions.max_wal_ratio" if long else "",
        figures={"wal_bytes": way.nbytes, "base_bytes": base},
    )


def _problem(subject: str, found: str, meaning: str, action: str = "") -> Finding:
    return Finding(
        area="directory",
        subject=subject,
        severity="problem",
        found=found,
        meaning=meaning,
        action=action,
    )
