# SPDX-License-Identifier: Apache-2.0
"""Collection without a trainer: what nothing needs any more is found, and removed.

A trainer collects by itself. This is for a directory whose trainer has ended: what cut saves, cut
deletions and cut compactions left, compacted bases in which no chain ends, and, where asked, older
steps and rolled-back runs.

A save in flight looks like one that was cut, so nothing is removed beside a trainer that may live.
Whoever collects takes the lease, as a trainer that starts does: one that was taken for dead is
fenced at its next commit, and commits nothing that refers to what was removed. The lease says
which process of which host took it. Without the caller's word that nobody trains, it must be a
process of this host that has ended, and neither the lease, the newest step nor an unfinished save
may have changed for an hour: process ids say nothing across containers.

Which steps and bases may go is found in ``unneeded``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from deltackpt.errors import Damaged, InUse, UnsupportedRoot
from deltackpt.format import names
from deltackpt.ledger import locks
from deltackpt.ledger.directory import Root
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.lease import epochs
from deltackpt.ledger.leftovers import is_leftover
from deltackpt.ledger.opening import BucketSteps, open_steps
from deltackpt.reading.log_places import LogFolder
from deltackpt.reading.log_states import log_state
from deltackpt.storage import buckets, files
from deltackpt.storage.store import Spot
from deltackpt.upkeep import compact, stretches
from deltackpt.upkeep.unneeded import (
    KEEP_ALL,
    Checked,
    Removable,
    Retention,
    Unneeded,
    removable_at,
)

#: A trainer that changed something within this time may live.
QUIET_SECS = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collectable:
    """What may go from a directory, or went.

    Attributes:
      directory: the directory.
      removable: what may go; steps newest first, so that what stays is closed under parents.
      kept: steps that stay.
      notes: what stays although it was asked for, and why.
      in_use: why a trainer may be at work here; None where none can be.
    """

    directory: str
    removable: tuple[Removable, ...]
    kept: tuple[int, ...]
    notes: tuple[str, ...]
    in_use: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of all that may go."""
        return sum(found.nbytes for found in self.removable)


def collectable(
    directory: str | os.PathLike[str],
    *,
    item: str = names.EMBEDDINGS_ITEM,
    retention: Retention = KEEP_ALL,
    rolled_back: bool = False,
    endpoint: str | None = None,
) -> Collectable:
    """Finds what nothing needs; changes nothing.

    Args:
      directory: root of the steps: a path, or the URL of a bucket.
      item: name of our item in them.
      retention: which steps stay.
      rolled_back: whether runs that a rollback moved aside may go.
      endpoint: address of the server of a bucket, where it is not the service's own.

    Raises:
      ForeignDirectory, StorageError: the directory cannot be read, or is none of checkpoints.
    """
    if not buckets.is_path(directory):
        return InBucket(directory, item, endpoint).look(retention, rolled_back, {})
    return _look(directory, item, retention, rolled_back, {})


def _look(
    directory: str | os.PathLike[str],
    item: str,
    retention: Retention,
    rolled_back: bool,
    checked: Checked,
) -> Collectable:
    opened = Root.open(directory, item=item, read_only=True)
    path = opened.path
    found = [*_cut(opened.spot)]
    reason = in_use(opened)
    steps, notes = Unneeded(opened, item, retention, checked).find()
    found += steps
    if rolled_back:
        aside = opened.spot / names.ROLLED_BACK
        found += [
            removable_at(aside / run, "rollback", "a rollback moved it aside")
            for run in aside.folders()
        ]
    gone = {entry.name for entry in found if entry.kind == "step"}
    kept = sorted(step for step in opened.steps() if str(step) not in gone)
    of_log, told = _stretches(opened, kept)
    found += of_log
    notes += told
    return Collectable(
        directory=str(path),
        removable=tuple(found),
        kept=tuple(kept),
        notes=tuple(notes),
        in_use=reason,
    )


def collect(
    directory: str | os.PathLike[str],
    *,
    item: str = names.EMBEDDINGS_ITEM,
    retention: Retention = KEEP_ALL,
    rolled_back: bool = False,
    offline: bool = False,
    endpoint: str | None = None,
) -> Collectable:
    """Removes what nothing needs; a cut at any moment leaves each step whole or gone.

    Args:
      directory: root of the steps: a path, or the URL of a bucket.
      item: name of our item in them.
      retention: which steps stay.
      rolled_back: whether runs that a rollback moved aside may go.
      offline: the caller's word that no trainer is at work here.
      endpoint: address of the server of a bucket, where it is not the service's own.

    Returns:
      What was removed.

    Raises:
      InUse: a trainer may be at work, or a copy to the directory is.
      AlreadyCompacting: a compaction is.
      FencedError: a trainer started meanwhile; what was not removed yet stays.
      ForeignDirectory, StorageError: the directory cannot be read or written.
    """
    checked: Checked = {}
    if not buckets.is_path(directory):
        return InBucket(directory, item, endpoint).collect(retention, rolled_back, offline)
    opened = Root.open(directory, item=item, read_only=True)
    path = opened.path
    judged = max(epochs(path), default=0)
    first = _look(path, item, retention, rolled_back, checked)
    _require_idle(first, offline)
    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusive(path))
        if (path / names.COMPACTED).is_dir():
            stack.enter_context(compact.exclusive(path))
        # Taking the lease, from whoever was judged to have ended, removes what was cut.
        opened = stack.enter_context(
            contextlib.closing(Root.open(path, item=item, after_epoch=judged))
        )
        found = _look(path, item, retention, rolled_back, checked)
        for number, removable in enumerate(found.removable):
            if removable.kind == "stretch":
                opened.check_lease()
                stretches.remove(LogFolder(opened.spot / names.LOG), int(Path(removable.name).name))
            else:
                _move_to_trash(opened, removable, number)
        opened.empty_trash()
        with files.typed_errors(path, "remove what is empty"):
            _remove_empty(path, item)
    known = {removable.name for removable in found.removable}
    cut = tuple(entry for entry in first.removable if entry.name not in known and _is_cut(entry))
    return dataclasses.replace(found, removable=(*cut, *found.removable), in_use=first.in_use)


def _require_idle(found: Collectable, offline: bool) -> None:
    if found.in_use is not None and not offline:
        raise InUse(
            f"{found.directory}: expected that no trainer is at work, found {found.in_use}; a "
            "trainer collects by itself. Where you know that it has ended, collect with --offline"
        )


class InBucket:
    """What nothing needs of a bucket: its journal says what stands, and no time or clock.

    Whoever collects claims the bucket, as whoever collects a directory takes its lease.
    """

    def __init__(self, url: str | os.PathLike[str], item: str, endpoint: str | None):
        """Opens a bucket.

        Raises:
          UnsupportedRoot: it has no journal, but copies of earlier versions.
          StorageError: it cannot be read.
        """
        opened = open_steps(url, item=item, endpoint=endpoint)
        if not isinstance(opened, BucketSteps):
            raise UnsupportedRoot(
                f"{opened}: expected a journal, found copies with markers, of which nothing is "
                "collected; copy them to another place, then delete these with the tools of the "
                "service"
            )
        self._opened = opened
        self._journal = Journal(opened.journal.root)

    def look(self, retention: Retention, rolled_back: bool, checked: Checked) -> Collectable:
        """Finds what nothing needs."""
        state = self._journal.state()
        found = [
            Removable(name=prefix, kind="cut save", reason="it was never committed", nbytes=0)
            for prefix in sorted(self._journal.left_over(state))
        ]
        steps, notes = Unneeded(self._opened, self._opened.item, retention, checked).find()
        found += steps
        if rolled_back:
            found += [
                Removable(
                    name=one.standing.prefix,
                    kind="rollback",
                    reason=f"run {one.run[:8]} went back behind it",
                    nbytes=one.standing.stored_bytes,
                )
                for one in state.entry.rolled_back
            ]
        gone = {entry.name for entry in steps if entry.kind == "step"}
        claim = state.claim
        holds = None
        if claim is not None and claim.began:
            held = claim.lease
            holds = f"it claimed by process {held.pid} on {held.host}, of which nothing is known"
        return Collectable(
            directory=str(self._opened),
            removable=tuple(found),
            kept=tuple(step for step in state.steps if str(step) not in gone),
            notes=tuple(notes),
            in_use=holds,
        )

    def collect(self, retention: Retention, rolled_back: bool, offline: bool) -> Collectable:
        """Removes what nothing needs."""
        checked: Checked = {}
        epoch = self._journal.state().epoch
        first = self.look(retention, rolled_back, checked)
        _require_idle(first, offline)
        self._journal.claim(after_epoch=epoch)
        found = self.look(retention, rolled_back, checked)
        names_gone = {one.name for one in found.removable if one.kind in ("step", "compacted base")}
        state = self._journal.known
        self._journal.retire(
            {unit: one.save_id for unit, one in state.standings.items() if unit.name in names_gone}
        )
        if rolled_back:
            self._journal.forget_rolled_back()
        self._journal.sweep()
        return dataclasses.replace(found, in_use=first.in_use)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a directory against collections of it and copies to it.

    The kernel lets go of it when the process ends, however it does.

    Args:
      path: the directory; it is made where it is missing.

    Raises:
      InUse: another process holds it.
      StorageError: it cannot be written.
    """
    place = path / names.COPYING
    name = place / "lock"
    refusal = InUse(
        f"{path}: expected no other copy to it or collection of it, found its lock held by another "
        "process; wait until that one has ended"
    )
    with locks.held(name, refusal):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # A copy was cut off: what it wrote stays.
                if os.listdir(place) == [name.name]:
                    name.unlink()
                    place.rmdir()


def _is_cut(removable: Removable) -> bool:
    return removable.kind in ("cut save", "cut deletion", "cut compaction")


def _move_to_trash(opened: Root, removable: Removable, number: int) -> None:
    """Renames it, durably, so that it is whole or gone under its name."""
    trash = opened.path / opened.new_trash()
    with files.typed_errors(trash, "make a directory"):
        trash.mkdir(parents=True)
    # A trainer that started meanwhile holds the directory: nothing more is removed.
    opened.check_lease()
    source = opened.path / removable.name
    files.rename(source, trash / f"{number}.{source.name}", fsync=True)


def _remove_empty(path: Path, item: str) -> None:
    """Folders that nothing is left in."""
    for folder in (*_entries(path / names.COMPACTED), *_entries(path / names.TRASH)):
        if folder.is_dir():
            with contextlib.suppress(OSError):  # Another item of the step has a base.
                folder.rmdir()


def _cut(at: Spot) -> Iterator[Removable]:
    """What cut saves, deletions and compactions left."""
    for name in sorted(os.listdir(at)):
        if is_leftover(name):
            yield removable_at(at / name, "cut save", "it was never committed")
    trash, bases = at / names.TRASH, at / names.COMPACTED
    for folder in (trash / one for one in trash.folders()):
        for name in folder.folders():
            yield removable_at(folder / name, "cut deletion", "it was being deleted")
    for name in filter(names.is_compaction, bases.folders()):
        yield removable_at(bases / name, "cut compaction", "it was never published")


def _stretches(opened: Root, kept: Sequence[int]) -> tuple[list[Removable], list[str]]:
    """Stretches of the log that no restore can need once only some steps are kept."""
    log = log_state(opened.log_at)
    if log.problem is not None:
        return [], [f"the log stays: nobody can tell what counts of it: {log.problem}"]
    known = opened.saves()
    needless = log.needless(
        {step: info.save_id for step in kept if (info := known.get(step)) is not None}
    )
    found = [
        Removable(
            name=f"{names.LOG}/{state.number}",
            kind="stretch",
            reason=needless[state.number],
            nbytes=state.nbytes,
        )
        for state in log.stretches
        if state.number in needless
    ]
    return found, []


def in_use(opened: Root) -> str | None:
    """Why a trainer may be at work in a directory of steps; None where none can be."""
    path = opened.path
    try:
        lease = opened.newest_lease()
    except Damaged:
        return "a lease that was not signed: a trainer that is starting, or was killed while it did"
    if lease is None:
        return "no lease that says who trained here"
    holder = f"its lease taken by process {lease.pid} on {lease.host}"
    if lease.runs is None:
        return f"{holder}, of which nothing is known here"
    if lease.runs:
        return f"{holder}, which lives"
    unfinished = (_changed(path / one.name) for one in _cut(opened.spot))
    changes = {
        "a lease": _own_change(path / names.lease_name(lease.epoch)),
        "a newest step": _own_change(path / str(opened.newest_step())),
        "something unfinished": max(unfinished, default=0.0),
    }
    what, changed = max(changes.items(), key=lambda one: one[1])
    quiet = time.time() - changed
    if quiet < QUIET_SECS:
        return f"{holder}, which has ended, and {what} that changed {quiet:.0f} s ago"
    return None


def _own_change(path: Path) -> float:
    """When a file or directory itself last changed, in seconds since 1970; 0 where there is none.

    That of a step is when its digests were written, just before it was committed.
    """
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _entries(folder: Path) -> list[Path]:
    """What stands in a folder; nothing where it is gone."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _changed(directory: Path) -> float:
    """When anything in a directory last changed, in seconds since 1970."""
    newest = 0.0
    for folder, _, inside in os.walk(directory):
        for path in (Path(folder), *(Path(folder, name) for name in inside)):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, path.stat().st_mtime)
    return newest
