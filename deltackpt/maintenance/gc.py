# SPDX-License-Identifier: Apache-2.0
"""Garbage collection for a directory whose trainer has ended; a running trainer does this itself.

A save in flight looks like an interrupted one, so nothing is removed while a trainer may be
running. Garbage collection takes the lease, like a starting trainer: a trainer that is still alive
is fenced at its next commit, and cannot commit references to what was removed. Unless the caller
asserts that no trainer is running, the lease must name an ended process of this host, and the
lease, the newest step and unfinished saves must not have changed for an hour: process ids mean
nothing across containers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deltackpt.errors import Damaged, InUse
from deltackpt.format import naming
from deltackpt.ledger import lease as ledger_lease
from deltackpt.ledger.bucket_steps import BucketSteps
from deltackpt.ledger.directory import Root, is_leftover
from deltackpt.ledger.entries import State
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.lease import epochs
from deltackpt.ledger.opening import open_steps
from deltackpt.maintenance import compact, garbage
from deltackpt.maintenance.garbage import (
    KEEP_ALL,
    GarbageFinder,
    Removable,
    Retention,
    removable_at,
)
from deltackpt.reading.wal_index import read_wal_state
from deltackpt.reading.wal_locations import WalFolder
from deltackpt.storage import buckets, posix
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import StorePath

#: A trainer that changed something within this time may be running.
QUIET_SECS = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collectable:
    """What can be removed from a directory, or was removed."""

    directory: str
    removable: tuple[Removable, ...]  #: Newest first, so that no kept step loses its parent.
    kept: tuple[int, ...]
    notes: tuple[str, ...]  #: What is kept although its removal was requested.
    in_use: str | None  #: Why a trainer may be running.

    @property
    def nbytes(self) -> int:
        """Bytes of all objects to remove."""
        return sum(found.nbytes for found in self.removable)


def collectable(
    directory: str | os.PathLike[str],
    *,
    item: str = naming.EMBEDDINGS_ITEM,
    retention: Retention = KEEP_ALL,
    rolled_back: bool = False,
    endpoint: str | None = None,
) -> Collectable:
    """Finds what nothing needs, on request with rolled-back runs; changes nothing."""
    return _find_garbage(_opened(directory, item, endpoint), retention, rolled_back)


def collect(
    directory: str | os.PathLike[str],
    *,
    item: str = naming.EMBEDDINGS_ITEM,
    retention: Retention = KEEP_ALL,
    rolled_back: bool = False,
    offline: bool = False,
    endpoint: str | None = None,
) -> Collectable:
    """Removes and returns what nothing needs; if it is interrupted, each step is complete or gone.

    Raises ``InUse`` if a trainer may be running, unless ``offline`` asserts that none is. After
    ``FencedError``, because a trainer started during the removal, the rest stays.
    """
    opened = _opened(directory, item, endpoint)
    leftovers, in_use = opened.leftovers(), opened.in_use()
    if in_use is not None and not offline:
        raise InUse(
            f"{opened.steps}: expected no running trainer, found {in_use}; a running trainer "
            "removes garbage itself. If you know that it has ended, use --offline"
        )
    found = opened.collect(lambda: _find_garbage(opened, retention, rolled_back))
    # Taking the lease of a directory has removed its leftovers.
    known = {removable.name for removable in found.removable}
    removed = (*(entry for entry in leftovers if entry.name not in known), *found.removable)
    return dataclasses.replace(found, removable=removed, in_use=in_use)


def _opened(
    directory: str | os.PathLike[str], item: str, endpoint: str | None
) -> _Directory | _Bucket:
    if buckets.file_path(directory) is not None:
        return _Directory(directory, item)
    return _Bucket(directory, item, endpoint)


def _find_garbage(
    opened: _Directory | _Bucket, retention: Retention, rolled_back: bool
) -> Collectable:
    found = opened.leftovers()
    reason = opened.in_use()
    unneeded, notes = GarbageFinder(opened.steps, retention).find()
    found += unneeded
    if rolled_back:
        found += opened.rolled_back()
    gone = {entry.name for entry in unneeded if entry.kind == "step"}
    kept = sorted(step for step in opened.steps.steps() if str(step) not in gone)
    epochs, wal_notes = opened.wal_epochs(kept)
    return Collectable(
        directory=str(opened.steps),
        removable=(*found, *epochs),
        kept=tuple(kept),
        notes=(*notes, *wal_notes),
        in_use=reason,
    )


class _Directory:
    """Garbage collection of a directory, under its lease."""

    def __init__(self, directory: str | os.PathLike[str], item: str):
        self.steps = Root.open(directory, item=item, read_only=True)
        #: The newest lease epoch when the directory was opened.
        self._epoch = max(epochs(self.steps.path), default=0)

    def leftovers(self) -> list[Removable]:
        return [*_cut(self.steps.store_path)]

    def rolled_back(self) -> list[Removable]:
        aside = self.steps.store_path / naming.ROLLED_BACK
        return [
            removable_at(aside / run, "rolled-back run", "a rollback moved it aside")
            for run in aside.folders()
        ]

    def wal_epochs(self, kept: Sequence[int]) -> tuple[list[Removable], list[str]]:
        """WAL epochs that no restore needs once only some steps are kept."""
        log = read_wal_state(self.steps.wal_location)
        if log.problem is not None:
            return [], [f"the WAL stays: cannot determine which epochs are valid: {log.problem}"]
        known = self.steps.saves()
        needless = log.needless(
            {step: info.save_id for step in kept if (info := known.get(step)) is not None}
        )
        found = [
            Removable(
                f"{naming.LOG}/{state.number}", "WAL epoch", needless[state.number], state.nbytes
            )
            for state in log.epochs
            if state.number in needless
        ]
        return found, []

    def in_use(self) -> str | None:
        return in_use(self.steps)

    def collect(self, find: Callable[[], Collectable]) -> Collectable:
        """Takes the lease, then searches again and removes what is found."""
        path, item = self.steps.path, self.steps.item
        with contextlib.ExitStack() as stack:
            stack.enter_context(exclusive(path))
            if (path / naming.COMPACTED).is_dir():
                stack.enter_context(compact.exclusive(path))
            # Taking the lease from the ended trainer also removes leftovers.
            self.steps = stack.enter_context(
                contextlib.closing(Root.open(path, item=item, after_epoch=self._epoch))
            )
            found = find()
            for removable in found.removable:
                self._remove(removable)
            self.steps.remove_discarded()
            with posix.typed_errors(path, "remove what is empty"):
                _remove_empty(path)
        return found

    def _remove(self, removable: Removable) -> None:
        # Remove nothing more once another trainer has taken the directory.
        self.steps.check_lease()
        source = self.steps.path / removable.name
        if removable.kind == "WAL epoch":
            garbage.remove_wal_epoch(
                WalFolder(self.steps.store_path / naming.LOG), int(source.name)
            )
        else:
            # Renamed durably, so that it is complete or gone under its name.
            self.steps.discard(source)


class _Bucket:
    """Garbage collection of a bucket, under its claim: no clock decides what is needed."""

    def __init__(self, url: str | os.PathLike[str], item: str, endpoint: str | None):
        opened = open_steps(url, item=item, endpoint=endpoint)
        assert isinstance(opened, BucketSteps)
        self.steps = opened
        self._journal = Journal(opened.journal.root)
        self._epoch = self._journal.state().epoch

    def leftovers(self) -> list[Removable]:
        return [
            Removable(prefix, "interrupted save", "never committed", 0)
            for prefix in sorted(self._journal.find_leftovers(self._journal.state()))
        ]

    def rolled_back(self) -> list[Removable]:
        return [
            Removable(
                one.entry.prefix,
                "rolled-back run",
                f"run {one.run[:8]} resumed from an earlier step",
                one.entry.stored_bytes,
            )
            for one in self._journal.known.entry.rolled_back
        ]

    def wal_epochs(self, kept: Sequence[int]) -> tuple[list[Removable], list[str]]:
        """None: its uploader trims the WAL."""
        return [], []

    def in_use(self) -> str | None:
        return claimed_by(self._journal.known)

    def collect(self, find: Callable[[], Collectable]) -> Collectable:
        """Claims the bucket, then searches again and removes what is found."""
        self._journal.claim(after_epoch=self._epoch)
        found = find()
        gone, state = {one.name for one in found.removable}, self._journal.known
        units = {one.prefix for one in state.entry.catalog if one.object_key.name in gone}
        self._journal.retire(lambda _: units | (state.prefixes & gone))
        self._journal.sweep()
        self._journal.copy_newest()
        return found


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Locks a directory against garbage collection and copies to it, or raises ``InUse``.

    Creates a missing directory. The kernel releases the lock when the process ends.
    """
    place = path / naming.COPYING
    name = place / "lock"
    refusal = InUse(
        f"{path}: expected no other copy to it or garbage collection, found its lock held by "
        "another process; wait until it has ended"
    )
    with ledger_lease.file_lock(name, refusal, make_folder=True):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Files of an interrupted copy stay.
                if os.listdir(place) == [name.name]:
                    DurableDir(path).remove_file(name)


def _remove_empty(path: Path) -> None:
    directory = DurableDir(path)
    for folder in directory.entries(path / naming.COMPACTED):
        directory.remove_empty(folder)  # Not empty if another item has a base.


def _cut(at: StorePath) -> Iterator[Removable]:
    """Leftovers of interrupted saves, deletions and compactions."""
    for name in sorted(os.listdir(at)):
        if name.startswith(naming.REMOVED):
            yield removable_at(at / name, "interrupted deletion", "it was being deleted")
        elif is_leftover(name):
            yield removable_at(at / name, "interrupted save", "never committed")
    bases = at / naming.COMPACTED
    for name in filter(naming.is_compaction, bases.folders()):
        yield removable_at(bases / name, "interrupted compaction", "never published")


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
        "a lease": _own_change(path / naming.lease_name(lease.epoch)),
        "a newest step": _own_change(path / str(opened.newest_step())),
        "something unfinished": max(unfinished, default=0.0),
    }
    what, changed = max(changes.items(), key=lambda one: one[1])
    quiet = time.time() - changed
    if quiet < QUIET_SECS:
        return f"{holder}, which has ended, and {what} that changed {quiet:.0f} s ago"
    return None


def claimed_by(state: State) -> str | None:
    """Returns why a trainer may be running in a bucket: when it ends is not known."""
    if state.trainer is None:
        return None
    held = state.trainer.lease
    return (
        f"it claimed by process {held.pid} on {held.host}, which may be running (epoch "
        f"{held.epoch}, since {ledger_lease.utc(held.since_secs)})"
    )


def _own_change(path: Path) -> float:
    """Returns when a file or directory itself last changed, since 1970; 0 without it."""
    try:
        # For a step, this is when its digests were written, just before the commit.
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
