# SPDX-License-Identifier: Apache-2.0
"""Garbage collection for a directory whose trainer has ended.

A running trainer does this itself. Garbage collection removes leftovers of interrupted saves,
deletions and compactions, compacted bases that no chain uses, and obsolete WAL epochs. On request,
it also removes older steps and rolled-back runs.

A save in flight looks like an interrupted one, so nothing is removed while a trainer may be
running. Garbage collection takes the lease, like a starting trainer. A trainer that is still alive
is therefore fenced at its next commit, and cannot commit references to what was removed. The lease
names the process and host that took it. Unless the caller asserts that no trainer is running, this
must be an ended process of this host, and the lease, the newest step and unfinished saves must not
have changed for an hour: process ids mean nothing across containers.

``unneeded`` determines which steps and bases to remove.
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
from deltackpt.reading.wal_locations import WalFolder
from deltackpt.reading.wal_state import read_wal_state
from deltackpt.storage import buckets, files
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import StorePath
from deltackpt.upkeep import compact, wal_removal
from deltackpt.upkeep.unneeded import (
    KEEP_ALL,
    Checked,
    Removable,
    Retention,
    Unneeded,
    removable_at,
)

#: A trainer that changed something within this time may be running.
QUIET_SECS = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collectable:
    """What can be removed from a directory, or was removed.

    Attributes:
      directory: the directory.
      removable: objects to remove; steps newest first, so that no kept step loses its parent.
      kept: steps that stay.
      notes: objects that are kept although their removal was requested, and why.
      in_use: why a trainer may be running; None if none can be.
    """

    directory: str
    removable: tuple[Removable, ...]
    kept: tuple[int, ...]
    notes: tuple[str, ...]
    in_use: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of all objects to remove."""
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
      directory: the checkpoint directory: a path, or a bucket URL.
      item: name of deltackpt's item in the steps.
      retention: which steps stay.
      rolled_back: whether to remove runs that a rollback moved aside.
      endpoint: address of a bucket's server, if it is not the provider's own.

    Raises:
      ForeignDirectory, StorageError: the directory cannot be read, or does not contain checkpoints.
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
    found = [*_cut(opened.store_path)]
    reason = in_use(opened)
    steps, notes = Unneeded(opened, item, retention, checked).find()
    found += steps
    if rolled_back:
        aside = opened.store_path / names.ROLLED_BACK
        found += [
            removable_at(aside / run, "rolled-back run", "a rollback moved it aside")
            for run in aside.folders()
        ]
    gone = {entry.name for entry in found if entry.kind == "step"}
    kept = sorted(step for step in opened.steps() if str(step) not in gone)
    of_log, told = _epochs(opened, kept)
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
    """Removes what nothing needs; if it is interrupted, each step is complete or gone.

    Args:
      directory: the checkpoint directory: a path, or a bucket URL.
      item: name of deltackpt's item in the steps.
      retention: which steps stay.
      rolled_back: whether to remove runs that a rollback moved aside.
      offline: the caller asserts that no trainer is running.
      endpoint: address of a bucket's server, if it is not the provider's own.

    Returns:
      What was removed.

    Raises:
      InUse: a trainer may be running, or a copy to the directory is.
      AlreadyCompacting: a compaction is running.
      FencedError: a trainer started during the removal; what was not removed yet stays.
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
        # Taking the lease from the ended trainer also removes leftovers.
        opened = stack.enter_context(
            contextlib.closing(Root.open(path, item=item, after_epoch=judged))
        )
        found = _look(path, item, retention, rolled_back, checked)
        for removable in found.removable:
            if removable.kind == "WAL epoch":
                opened.check_lease()
                wal_removal.remove(
                    WalFolder(opened.store_path / names.LOG), int(Path(removable.name).name)
                )
            else:
                _move_to_trash(opened, removable)
        opened.empty_trash()
        with files.typed_errors(path, "remove what is empty"):
            _remove_empty(path, item)
    known = {removable.name for removable in found.removable}
    cut = tuple(entry for entry in first.removable if entry.name not in known and _is_cut(entry))
    return dataclasses.replace(found, removable=(*cut, *found.removable), in_use=first.in_use)


def _require_idle(found: Collectable, offline: bool) -> None:
    if found.in_use is not None and not offline:
        raise InUse(
            f"{found.directory}: expected no running trainer, found {found.in_use}; a running "
            "trainer removes garbage itself. If you know that it has ended, use --offline"
        )


class InBucket:
    """Garbage collection of a bucket: its journal, and no clock, decides what is needed.

    Garbage collection claims the bucket, as it takes the lease of a directory.
    """

    def __init__(self, url: str | os.PathLike[str], item: str, endpoint: str | None):
        """Opens a bucket.

        Raises:
          UnsupportedRoot: it has no journal, only copies of earlier versions.
          StorageError: it cannot be read.
        """
        opened = open_steps(url, item=item, endpoint=endpoint)
        if not isinstance(opened, BucketSteps):
            raise UnsupportedRoot(
                f"{opened}: expected a journal, found copies with markers, which cannot be "
                "changed; copy them to another directory, then delete these with the provider's "
                "tools"
            )
        self._opened = opened
        self._journal = Journal(opened.journal.root)

    def look(self, retention: Retention, rolled_back: bool, checked: Checked) -> Collectable:
        """Finds what nothing needs."""
        state = self._journal.state()
        found = [
            Removable(name=prefix, kind="interrupted save", reason="never committed", nbytes=0)
            for prefix in sorted(self._journal.left_over(state))
        ]
        steps, notes = Unneeded(self._opened, self._opened.item, retention, checked).find()
        found += steps
        if rolled_back:
            found += [
                Removable(
                    name=one.standing.prefix,
                    kind="rolled-back run",
                    reason=f"run {one.run[:8]} resumed from an earlier step",
                    nbytes=one.standing.stored_bytes,
                )
                for one in state.entry.rolled_back
            ]
        gone = {entry.name for entry in steps if entry.kind == "step"}
        holds = None
        if (claim := state.trainer) is not None:
            held = claim.lease
            holds = f"it claimed by process {held.pid} on {held.host}, which may be running"
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
        self._journal.copy_newest()
        return dataclasses.replace(found, in_use=first.in_use)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Locks a directory against garbage collection and copies to it.

    The kernel releases the lock when the process ends.

    Args:
      path: the directory; it is created if it is missing.

    Raises:
      InUse: another process has the lock.
      StorageError: the directory cannot be written.
    """
    place = path / names.COPYING
    name = place / "lock"
    refusal = InUse(
        f"{path}: expected no other copy to it or garbage collection, found its lock held by "
        "another process; wait until it has ended"
    )
    with locks.held(name, refusal, make_folder=True):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Files of an interrupted copy stay.
                if os.listdir(place) == [name.name]:
                    DurableDir(path).remove_file(name)


def _is_cut(removable: Removable) -> bool:
    return removable.kind.startswith("interrupted ")


def _move_to_trash(opened: Root, removable: Removable) -> None:
    """Renames an object durably, so that it is complete or gone under its name."""
    # Remove nothing more once another trainer has taken the directory.
    opened.check_lease()
    source = opened.path / removable.name
    DurableDir(opened.path).publish(source, opened.new_trash() / source.name)


def _remove_empty(path: Path, item: str) -> None:
    """Removes empty folders."""
    directory = DurableDir(path)
    for place in (names.COMPACTED, names.TRASH):
        for folder in directory.entries(path / place):
            directory.remove_empty(folder)  # Not empty if another item has a base.


def _cut(at: StorePath) -> Iterator[Removable]:
    """Leftovers of interrupted saves, deletions and compactions."""
    for name in sorted(os.listdir(at)):
        if is_leftover(name):
            yield removable_at(at / name, "interrupted save", "never committed")
    trash, bases = at / names.TRASH, at / names.COMPACTED
    for folder in (trash / one for one in trash.folders()):
        for name in folder.folders():
            yield removable_at(folder / name, "interrupted deletion", "it was being deleted")
    for name in filter(names.is_compaction, bases.folders()):
        yield removable_at(bases / name, "interrupted compaction", "never published")


def _epochs(opened: Root, kept: Sequence[int]) -> tuple[list[Removable], list[str]]:
    """WAL epochs that no restore needs once only some steps are kept."""
    log = read_wal_state(opened.log_at)
    if log.problem is not None:
        return [], [f"the WAL stays: cannot determine which epochs are valid: {log.problem}"]
    known = opened.saves()
    needless = log.needless(
        {step: info.save_id for step in kept if (info := known.get(step)) is not None}
    )
    found = [
        Removable(
            name=f"{names.LOG}/{state.number}",
            kind="WAL epoch",
            reason=needless[state.number],
            nbytes=state.nbytes,
        )
        for state in log.epochs
        if state.number in needless
    ]
    return found, []


def in_use(opened: Root) -> str | None:
    """Returns why a trainer may be running in a directory; None if none can be."""
    path = opened.path
    try:
        lease = opened.newest_lease()
    except Damaged:
        return "an unsigned lease: a trainer is starting, or was killed while it started"
    if lease is None:
        return "no lease, so the last trainer is not known"
    holder = f"its lease taken by process {lease.pid} on {lease.host}"
    if lease.runs is None:
        return f"{holder}, which may be running"
    if lease.runs:
        return f"{holder}, which is running"
    unfinished = (_changed(path / one.name) for one in _cut(opened.store_path))
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
    """Time of the last change of a file or directory itself, in seconds since 1970; 0 without it.

    For a step, this is when its digests were written, just before the commit.
    """
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _changed(directory: Path) -> float:
    """Time of the last change of anything in a directory, in seconds since 1970."""
    newest = 0.0
    for folder, _, inside in os.walk(directory):
        for path in (Path(folder), *(Path(folder, name) for name in inside)):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, path.stat().st_mtime)
    return newest
