# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory: opening, steps, rollback and garbage collection.

A backup has the same epochs as its original. A path is therefore resolved once, at opening, and
every commit goes to that very directory or fails. A step appears by one atomic ``rename``, and is
durable once the directory has been fsynced.

Network file systems must honor ``rename``, ``fsync`` and ``O_EXCL``. Other machines see names only
after their attribute caches expire, so an older holder may be fenced that much later. The lease
check and the rename are two calls: a trainer that pauses between them for longer than another needs
to start may still add one complete step, but never replaces one.

The note of what a preservation policy keeps is informational and is not fsynced.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from deltackpt.errors import (
    FencedError,
    ForeignDirectory,
    OutOfSpace,
    RestoreError,
    StorageError,
    UnsupportedRoot,
)
from deltackpt.format import chain, naming, records
from deltackpt.format.manifest import SaveId
from deltackpt.lazy_import import LazyModule
from deltackpt.ledger import lease
from deltackpt.ledger.lease import DirectoryLease, Lease
from deltackpt.ledger.steps import Steps
from deltackpt.storage import posix, redaction
from deltackpt.storage.posix import DurableDir, fsync_path
from deltackpt.storage.store import FileStore, StorePath

if TYPE_CHECKING:
    from deltackpt import events
    from deltackpt.reading import stored_saves
else:  # Only warnings, and directories with saves, need them.
    events = LazyModule("deltackpt.events")
    stored_saves = LazyModule("deltackpt.reading.stored_saves")

_MAGIC = "deltackpt.kept"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """What a policy, named by its type, kept when it was last evaluated."""

    policy: str
    newest: int  # the newest step it was evaluated on
    steps: tuple[int, ...]  # ascending, without those that only their chains need


def write_kept(root: Path, kept: Kept | None) -> None:
    """Records what a policy keeps, replacing the previous note; None if it keeps every step."""
    if kept is not None:
        DurableDir(root, fsync=False).write(root / naming.KEPT, records.to_bytes(kept, _MAGIC))
        return
    with posix.typed_errors(root / naming.KEPT, "remove"):
        (root / naming.KEPT).unlink(missing_ok=True)


def read_kept(root: StorePath) -> Kept | None:
    """Returns what a policy keeps; None if there is no readable note."""
    with contextlib.suppress(RestoreError):
        data = (root / naming.KEPT).read(naming.KEPT)
        return records.from_bytes(data, Kept, name=naming.KEPT, magic=_MAGIC)
    return None


# One slash is enough: pathlib turns "s3://bucket" into "s3:/bucket".
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/")
_LEFTOVER = re.compile(r"[0-9]+\.orbax-checkpoint-tmp.*")


class Root(Steps):
    """A checkpoint directory, open for a trainer or read-only."""

    def __init__(self, path: Path, item: str, *, given: Path):
        """Created by ``Root.open``; ``given`` is the path before its links were followed."""
        super().__init__(StorePath(FileStore(path), ""), item, given=given)
        self.path = path
        #: The directory that was opened: ``path``, or the staging directory that contains it.
        self.opened_dir = path
        self._dir = DurableDir(path)
        self._lease: DirectoryLease | None = None
        self._collected: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._collected.set_result(None)
        self._collector = concurrent.futures.ThreadPoolExecutor(1, "deltackpt-collect")

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        item: str = naming.EMBEDDINGS_ITEM,
        read_only: bool = False,
        after_epoch: int | None = None,
        confirmed: bool = True,
    ) -> Root:
        """Opens a directory; a trainer creates it if necessary and takes its lease.

        In a multi-process job, one process takes the lease for all; the others open it read-only.
        With ``after_epoch``, raises InUse unless that is the newest epoch. Unless ``confirmed``,
        ``abandon`` can return the lease. Raises ForeignDirectory if it holds no files of deltackpt
        or Orbax, or if it is opened for writing and its newest step lacks the item.
        """
        scheme = _SCHEME.match(os.fspath(directory))
        if scheme is not None:
            raise UnsupportedRoot(
                f"{redaction.shown(directory)}: expected a file system path, found the scheme "
                f"{scheme[1]!r}, which deltackpt does not support; mount it, or save to a local "
                "directory and run 'deltackpt copy'"
            )
        given = posix.user_path(directory)
        path = Path(os.path.realpath(given))
        posix.check_path(path, writing=not read_only)
        if read_only:
            if not path.is_dir():
                raise StorageError(
                    f"{path}: expected a directory to read, found none; check the path"
                )
            _refuse_foreign(path)
            return cls(path, item, given=given)
        DurableDir(path).create()
        _refuse_foreign(path)
        _refuse_other_item(path, item)
        root = cls(path, item, given=given)
        try:
            root._lease = DirectoryLease(path, given, after_epoch)
            try:
                root._lease.sign()
            except OutOfSpace:
                # ``confirm`` removes leftovers, which may fill the file system, and tries again.
                if not any(map(is_leftover, posix.listing(path))):
                    raise
            if confirmed:
                root._confirm(root._lease)
        except BaseException:
            root.abandon()
            raise
        return root

    def confirm(self) -> None:
        """Fences the previous holder; called once every process has opened its manager.

        Leftovers may be that holder's save in flight. If it raises (FencedError: a newer trainer
        has started), ``abandon`` returns the lease or completes this.
        """
        if self._lease is not None and not self._lease.is_started:
            self._lease.check(wait=False)
            self._confirm(self._lease)

    def _confirm(self, own: DirectoryLease) -> None:
        own.start()
        try:
            self.remove_leftovers()
        except StorageError as error:
            events.warn(f"{self.path}: leftovers of interrupted saves were not removed: {error}")
        try:
            if not own.is_signed:
                own.sign()
        except StorageError as error:
            # The name alone is a valid claim; the first save reports a full file system.
            events.warn(f"{self.path}: the lease does not name its holder: {error}")

    @property
    def epoch(self) -> int:
        """The epoch of the lease; 0 if it is open for reading."""
        return 0 if self._lease is None else self._lease.epoch

    @property
    def wal_dir(self) -> Path:
        """The directory of the WAL."""
        return self.path / naming.LOG

    def step_dir(self, step: int) -> Path:
        """Returns the path to which a step is renamed."""
        return self.path / str(step)

    def remove_remade(self, temporary: Path) -> None:
        """Removes what a failed save recreated of a directory that was moved or removed.

        TensorStore creates all parent folders of a file. A directory in use has a lease file.
        """
        # It no longer exists, or another process has written there.
        with contextlib.suppress(OSError):
            if [*lease.epochs(self.path)]:
                return
            DurableDir(temporary.parent).remove(temporary)
            for folder in (self.path, *self.path.parents):
                folder.rmdir()
                if folder == self.opened_dir:
                    break

    @property
    def has_rival(self) -> bool:
        """Returns whether an earlier lease holder may still be running."""
        return self._lease is not None and self._lease.has_rival()

    def abandon(self) -> None:
        """See ``Steps``."""
        self._collector.shutdown()
        with contextlib.ExitStack() as stack:
            stack.callback(super().close)
            if self._lease is not None:
                self._lease.withdraw()

    def steps(self) -> list[int]:
        """See ``Steps``; StorageError if the directory no longer exists."""
        return _steps_in(self.path)

    def newest_lease(self) -> Lease | None:
        """Returns the newest lease; Damaged if it was not signed, None if never taken."""
        newest = max(lease.epochs(self.path), default=None)
        return None if newest is None else lease.read_lease(self.path / naming.lease_name(newest))

    def check_lease(self, *, wait: bool = True, is_starting: bool = False) -> None:
        """Checks that no other trainer has taken the lease; see ``DirectoryLease.check``."""
        if self._lease is not None:
            self._lease.check(wait=wait, is_starting=is_starting)

    def roll_back(self, step: int, run: str) -> list[int]:
        """Un-commits every step after ``step``, with a warning; returns them.

        They are moved aside durably, newest first, so parents stay longest.
        """
        later = sorted((found for found in self.steps() if found > step), reverse=True)
        if not later or self._lease is None:
            return []
        self.check_lease()
        aside = self.path / naming.ROLLED_BACK / run
        self._dir.make(aside)
        with posix.typed_errors(aside, "make a directory"):
            fsync_path(aside.parent)  # Another process may have made it, and ended.
        for found in later:
            # A trainer that has lost the lease must not move its successor's steps.
            self.check_lease()
            self.set_aside(found, aside / str(found))
        for name in stored_saves.compacted_bases(self.store_path, self.item):
            if int(name) > step:
                self._dir.publish(
                    naming.compacted_dir(self.path / name, self.item),
                    naming.compacted_dir(aside / name, self.item),
                )
        events.warn(
            f"{self.path}: resuming from step {step}, the later steps {sorted(later)} were moved "
            f"to {naming.ROLLED_BACK}/{run}"
        )
        return later

    def set_aside(self, step: int, target: Path) -> None:
        """Moves a committed step durably to where no reader looks."""
        common = DurableDir(Path(os.path.commonpath([self.path, target])))
        common.publish(self.step_dir(step), target)
        with self._lock:
            self._known.pop(str(step), None)

    def remove_leftovers(self) -> None:
        """Removes leftovers of interrupted saves and deletions, if the lease is held.

        If another trainer holds the lease, or is about to, they may be its save in flight.
        """
        if self._lease is None or not self._lease.is_newest():
            return
        self.remove_discarded()
        for name in filter(is_leftover, posix.listing(self.path)):
            # Never committed, so never read.
            self._dir.remove(self.path / name)

    def remove_steps(self, steps: Collection[int]) -> None:
        """Removes committed steps; no remaining step may need one of them.

        Renames them, newest first, so that what remains restores.
        """
        if self._lease is None:
            return
        with contextlib.suppress(FencedError):  # The next commit reports it.
            for step in sorted(steps, reverse=True):
                # A trainer that has lost the lease must not remove its successor's steps.
                self.check_lease()
                if self.step_dir(step).is_dir():
                    self.discard(self.step_dir(step), fsync=False)
                    with self._lock:
                        self._known.pop(str(step), None)  # Its number may be used again.

    def discard(self, committed: Path, *, fsync: bool = True) -> None:
        """Renames a step or base, which ``remove_discarded`` deletes; works on a full disk."""
        renamed = self.path / f"{naming.REMOVED}{uuid.uuid4().hex}"
        DurableDir(self.path, fsync=fsync).publish(committed, renamed)

    def remove_discarded(self) -> None:
        """Deletes what was renamed; fsyncs first, so that a power cut leaves no partial step."""
        if discarded := self._discarded():
            with posix.typed_errors(self.path, "force to disk"):
                fsync_path(self.path)
        for path in discarded:
            self._dir.remove(path)

    def _discarded(self) -> list[Path]:
        # Empty if the directory was moved or removed.
        found = self._dir.entries(self.path)
        return [path for path in found if path.name.startswith(naming.REMOVED)]

    def collect(
        self,
        protected: Callable[[], frozenset[SaveId]] = frozenset,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Deletes renamed steps, and compacted bases that no chain uses, in the background.

        A failure is raised by the next call. ``protected`` returns saves in flight and possible
        parents, as ``Lineage.protected`` does. ``before`` is called first, in the background.
        """
        if self._lease is not None and self._collected.done():
            last = self._collected
            self._collected = self._collector.submit(self._collect, protected, before)
            last.result()

    def _collect(
        self, protected: Callable[[], frozenset[SaveId]], before: Callable[[], None]
    ) -> None:
        try:
            before()
        finally:  # Runs even on a full disk: it frees space.
            self._collect_own(protected)

    def _collect_own(self, protected: Callable[[], frozenset[SaveId]]) -> None:
        with contextlib.suppress(FencedError):  # The next save reports it.
            for name in self._unneeded_bases(protected):
                self.check_lease()
                base = naming.compacted_dir(self.path / name, self.item)
                self.discard(base)
                self._dir.remove_empty(base.parent)  # Unless another item has a base.
        if self._discarded() and self._lease is not None and self._lease.is_newest():
            self.remove_discarded()

    def _unneeded_bases(self, protected: Callable[[], frozenset[SaveId]]) -> list[str]:
        """Returns the steps whose compacted bases no chain uses; none if a save is unreadable."""
        # The first compaction creates the folder.
        if not os.path.isdir(self.path / naming.COMPACTED) or not (bases := self._compacted()):
            return []
        # Computed after the bases were listed: a save with one of them as its parent is by now
        # committed or in flight, or did not begin.
        in_flight, saves = protected(), self.saves().values()
        infos = [info for info in saves if info is not None]
        if len(infos) < len(saves):
            return []
        needed = chain.needed_bases(infos, in_flight, {one.save_id for one in bases.values()})
        return [name for name, info in bases.items() if info.save_id not in needed]

    def close(self) -> None:
        """Finishes deletions. The lease remains; the next trainer takes the next epoch."""
        self._collector.shutdown()
        try:
            self._collected.result()
            if self._lease is not None:
                with contextlib.suppress(FencedError):
                    self.check_lease()
                    self.remove_discarded()
        finally:
            with contextlib.ExitStack() as stack:
                if self._lease is not None:
                    stack.callback(self._lease.close)
                super().close()


def _steps_in(path: Path) -> list[int]:
    """Returns the numbers of the folders that are steps."""
    with posix.typed_errors(path, "list it"), os.scandir(path) as entries:
        found = ((naming.step_number(entry.name), entry) for entry in entries)
        return [step for step, entry in found if step is not None and entry.is_dir()]


def _refuse_foreign(path: Path) -> None:
    entries = {name for name in posix.listing(path) if not name.startswith(".")}
    if _is_step_dir(path, entries):
        raise ForeignDirectory(
            f"{path}: expected a checkpoint directory, found a step; pass {path.parent} as the "
            f"directory and {path.name} as the step"
        )
    folders = [path, *(path / name for name in entries if naming.step_number(name) is None)]
    if any((folder / naming.PYTREE_METADATA).is_file() for folder in folders):
        raise ForeignDirectory(
            f"{path}: expected a deltackpt checkpoint directory, found a stock Orbax checkpoint; "
            f"import it into a new directory with 'deltackpt import {path} NEW_DIRECTORY "
            "--tables PATTERN', and continue there"
        )
    if entries and not any(is_known(name) for name in entries):
        raise ForeignDirectory(
            f"{path}: expected an empty or a checkpoint directory, found {sorted(entries)[:5]}; "
            "use the directory that holds the steps, or an empty one"
        )


def _refuse_other_item(path: Path, item: str) -> None:
    """Rejects a directory whose steps belong to stock Orbax or to another item."""
    steps = _steps_in(path)
    newest = path / str(max(steps, default=""))
    if steps and not (newest / item).is_dir() and stored_saves.is_checkpoint(newest):
        raise stored_saves.foreign(newest, item)


def is_leftover(name: str) -> bool:
    """Returns whether a name belongs to an interrupted or running save."""
    return _LEFTOVER.fullmatch(name) is not None


def is_known(name: str) -> bool:
    """Returns whether deltackpt, Orbax or mkfs creates such a name in a checkpoint directory."""
    own = (naming.ROLLED_BACK, naming.COMPACTED, naming.KEPT, naming.STEP_METADATA)
    return (
        name in (*own, "lost+found")
        or naming.lease_epoch(name) is not None
        or naming.step_number(name) is not None
        or is_leftover(name)
    )


def _is_step_dir(path: Path, entries: Collection[str]) -> bool:
    """Returns whether a directory with the given entries is a step, not a checkpoint directory."""
    return naming.STEP_DIGESTS in entries or any(
        (path / name / naming.manifest_name(0)).exists() for name in entries if not is_known(name)
    )
