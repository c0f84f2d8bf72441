# SPDX-License-Identifier: Apache-2.0
"""What a directory holds of a log between its steps, and what keeps its marks from being points."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from deltackpt import units
from deltackpt.errors import DeltackptError
from deltackpt.format.frames import BlocksHead, DenseHead, Head
from deltackpt.format.manifest import SaveId
from deltackpt.reading.log_places import LogPlaces
from deltackpt.reading.log_states import LogState, log_state
from deltackpt.reading.stretches import Era, Way, newest_way
from deltackpt.storage.store import spot
from deltackpt.upkeep.doctor.findings import Finding, ago_text

#: A process that is so far behind the others holds points back for that long.
_BEHIND_SECS = 60.0
#: A log of some such bases is replayed before anybody waits for it.
_LEAST_BASE_BYTES = 16 << 20


def log_findings(at: LogPlaces, steps: Mapping[int, SaveId]) -> Iterator[Finding]:
    """Stretches, points, and what is wrong with them; nothing where there never was a log.

    Args:
      at: where they are.
      steps: committed steps, by number.
    """
    try:
        found = log_state(at)
    except DeltackptError as error:
        yield _problem("log", str(error), "No point can be restored.")
        return
    if not found.stretches:
        return
    if found.history is None:
        yield _problem(
            "log",
            str(found.problem),
            "Nobody can tell which points count: restore_latest() refuses to choose.",
            "copy the head back from a backup, or restore_latest(log=None) and go on from a step",
        )
        return
    yield _summary(found)
    for era in found.history.eras:
        yield from _places(era)
    if found.history.eras:
        yield from _processes(found.history.eras[0])
        yield from _breaks(found.history.eras)
    if (way := newest_way(found.history, steps)) is not None:
        yield _length(way)
    if needless := found.needless(steps):
        yield Finding(
            area="directory",
            subject="stretches left over",
            severity="note",
            found=f"{len(needless)}: {', '.join(map(str, sorted(needless)[:5]))}",
            meaning="Logs of earlier runs that no restore can need; they take room.",
            action="none: the trainer removes them at its next steps, or deltackpt collect does",
            figures={"stretches": sorted(needless)},
        )


def _summary(found: LogState) -> Finding:
    assert found.history is not None
    points = [point for point in found.history.points() if point.full]
    nbytes = sum(one.nbytes for one in found.stretches)
    newest = "none that can be restored"
    if points:
        age = ago_text(time.time() - points[0].unix_secs)
        newest = f"{units.count(len(points), 'full point')}, newest {points[0].step}, {age}"
    return Finding(
        area="directory",
        subject="log",
        severity="ok",
        found=f"of {units.count(len(found.stretches), 'run')}, {units.size(nbytes)}; {newest}",
        figures={
            "stretches": len(found.stretches),
            "full_points": len(points),
            "newest_point": points[0].step if points else None,
            "nbytes": nbytes,
        },
    )


def _places(era: Era) -> Iterator[Finding]:
    """Logs in a directory of their own that cannot be seen from here."""
    where = era.head.directory
    if where is not None and era.head.process_count and not spot(where).exists():
        yield _problem(
            f"log directory of stretch {era.head.stretch}",
            f"{where}: there is no such directory here",
            "None of its points can be restored here: the disk is gone, or is another node's.",
            "mount it, or run this, and restore, on the node that has it",
        )


def _processes(era: Era) -> Iterator[Finding]:
    """Processes of the newest stretch that hold its points back."""
    newest = {
        process: max(log.by_id.values(), key=lambda mark: mark.save_id.attempt, default=None)
        for process, log in era.processes.items()
    }
    marks = [mark for mark in newest.values() if mark is not None]
    if not marks:
        return
    first = max(marks, key=lambda mark: mark.save_id.attempt)
    behind = {
        process: None if mark is None else first.unix_secs - mark.unix_secs
        for process, mark in newest.items()
        if mark is None or mark.save_id.attempt < first.save_id.attempt
    }
    late = {one: secs for one, secs in behind.items() if secs is None or secs > _BEHIND_SECS}
    if not behind:
        return
    texts = [
        f"{process} has no mark" if secs is None else f"{process} is {secs:.0f} s behind"
        for process, secs in behind.items()
    ]
    yield Finding(
        area="directory",
        subject="processes of the log",
        severity="warning" if late else "note",
        found=f"of {era.head.process_count}, " + ", ".join(texts),
        meaning="A mark that a process lacks is no point: a restore goes back to where all are.",
        action="look at the disk and the log of these processes" if late else "",
        figures={"behind_secs": behind},
    )


def _breaks(eras: tuple[Era, ...]) -> Iterator[Finding]:
    """Where logs break off in other places than at their ends."""
    found = [
        one
        for era in eras
        for log in era.processes.values()
        for one in log.log.breaks
        if one.counts and not one.is_last
    ]
    if found:
        yield Finding(
            area="directory",
            subject="gaps of the log",
            severity="warning",
            found=f"{len(found)}, the first: {found[0].problem}",
            meaning="Points behind a gap cannot be restored from a step before it.",
            action="deltackpt verify says which; a step that is saved now needs none of them",
            figures={"count": len(found)},
        )


def _length(way: Way) -> Finding:
    """How much a restore replays, against what a base would be."""
    groups = way.era.head.groups
    base = sum(group.rows * group.row_bytes for group in groups) + sum(
        _dense_bytes(frame.head) for mark in way.last_marks.values() for frame in mark.frames
    )
    long = way.nbytes > max(base, _LEAST_BASE_BYTES)
    return Finding(
        area="directory",
        subject="log to replay",
        severity="warning" if long else "ok",
        found=(
            f"{units.size(way.nbytes)} from step {way.step.step} to {way.point.step}; a base has "
            f"{units.size(base)}"
        ),
        meaning="A restore reads more of the log than a step would have." if long else "",
        action="save() more often, or lower LogOptions.most_bytes" if long else "",
        figures={"log_bytes": way.nbytes, "base_bytes": base},
    )


def _dense_bytes(head: Head) -> int:
    """Bytes of dense leaves that a frame is of; of other frames none."""
    if isinstance(head, DenseHead):
        return sum(value.decoded_bytes for value in head.values)
    if isinstance(head, BlocksHead):
        return sum(value.nbytes for value in head.record.values)
    return 0


def _problem(subject: str, found: str, meaning: str, action: str = "") -> Finding:
    return Finding(
        area="directory",
        subject=subject,
        severity="problem",
        found=found,
        meaning=meaning,
        action=action,
    )
