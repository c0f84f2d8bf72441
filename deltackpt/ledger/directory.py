# SPDX-License-Identifier: Apache-2.0
"""The directory as a whole: opening it, its steps, rollback and collection.

Who may write is in ``lease``. A backup has the same epochs as what it is of: a path is resolved
once, at opening, and what is committed is committed to that very directory, or not at all.

What a root promises of commit, durability and lease:

- A local POSIX file system (ext4, XFS, Btrfs, tmpfs): a step appears by one atomic ``rename`` and
  is durable once the root has been forced to disk; the lease is exclusive.
- A network file system (NFS 3 and later, Lustre, CephFS): the same, as far as its server keeps
  ``rename``, ``fsync`` and ``O_EXCL``. Other machines see names as late as their attribute caches
  allow, so an older holder may be fenced that much later.
- Everywhere: the check and the rename are two calls. A trainer that stops between them for longer
  than another needs to start may still add one whole step; it replaces none.
- Object stores and every other scheme are refused: a rename there is not atomic.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from deltackpt import events
from deltackpt.errors import (
    Damaged,
    FencedError,
    ForeignDirectory,
    FormatTooNew,
    StorageError,
    UnsupportedRoot,
)
from deltackpt.format import chain, names
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import SaveId
from deltackpt.ledger import kept, lease, leftovers
from deltackpt.ledger.held import Held
from deltackpt.ledger.lease import Lease
from deltackpt.reading import foreign, saves
from deltackpt.storage import files
from deltackpt.storage.store import FileStore, Spot, Stamp

# One slash is enough: pathlib turns "s3://bucket" into "s3:/bucket".
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/")
#: Orbax 0.12.8 looks for the parts of its dense files by a glob of the whole path.
_PATTERN = frozenset("*?[")


class Root(Held):
    """One checkpoint directory, open for a trainer or read-only."""

    def __init__(self, path: Path, item: str, held: Lease | None, *, given: Path | None = None):
        """Made by ``Root.open``; ``given`` is the path before links in it were followed."""
        super().__init__(Spot(FileStore(path), ""), item, path, given or path)
        self._lease = held
        #: Whether the file of the lease says who holds it.
        self._signed = False
        if held is not None:
            with files.typed_errors(path, "be opened"):
                descriptor = os.open(path, os.O_RDONLY)
            # While it is open, no other directory can have its inode.
            self._unpin = weakref.finalize(self, os.close, descriptor)
            self._stamp = Stamp.of(os.fstat(descriptor))
        self._collected: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._collected.set_result(None)
        self._collector = concurrent.futures.ThreadPoolExecutor(1, "deltackpt-collect")

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        item: str = names.EMBEDDINGS_ITEM,
        read_only: bool = False,
        after_epoch: int | None = None,
    ) -> Root:
        """Opens a directory; a trainer makes it where needed, and takes its lease.

        Of several processes one takes the lease for all; the others open it read-only.

        Args:
          directory: a path of a local or network file system.
          item: name of our item in a step.
          read_only: no lease, nothing is made or removed.
          after_epoch: take the lease only after this epoch, and from nobody else.

        Raises:
          InUse: another epoch than ``after_epoch`` holds the lease.
          UnsupportedRoot: the path has a scheme, or characters that Orbax cannot save under.
          ForeignDirectory: it holds files, and nothing that deltackpt or Orbax wrote; or, where it
            is not opened read-only, its newest step has no item of that name.
          OutOfSpace: there is no room for the lease, leftovers removed.
          StorageError: it does not exist (read-only), or cannot be written.
        """
        scheme = _SCHEME.match(os.fspath(directory))
        if scheme is not None:
            raise UnsupportedRoot(
                f"{os.fspath(directory)}: expected a path of a file system, found the scheme "
                f"{scheme[1]!r}, which deltackpt does not commit on; mount it, or save to a local "
                "directory and copy whole chains"
            )
        given = Path(directory).absolute()
        path = Path(os.path.realpath(given))
        if read_only:
            if not path.is_dir():
                raise StorageError(
                    f"{path}: expected a directory to read, found none; check the path"
                )
            _refuse_foreign(path)
            return cls(path, item, None, given=given)
        if found := sorted(set(str(path)) & _PATTERN):
            raise UnsupportedRoot(
                f"{path}: expected a path without any of {sorted(_PATTERN)}, found {found}: Orbax "
                "takes them for patterns and would commit steps whose dense leaves nobody can "
                "read; give another path"
            )
        files.make_durable(path)
        _refuse_foreign(path)
        _refuse_other_item(path, item)
        held = lease.claim(path, after_epoch)
        root = cls(path, item, held, given=given)
        # Before the claim is signed: on a full file system the leftovers are what fills it.
        root.remove_leftovers()
        lease.sign(path, held)
        root._signed = True
        return root

    def steps(self) -> list[int]:
        """See ``Steps``.

        Raises:
          StorageError: the directory is not there any more, or cannot be read.
        """
        numbers = map(names.step_number, files.listing(self.path))
        return [number for number in numbers if number is not None]

    def newest_lease(self) -> Lease | None:
        """The lease of the newest epoch; None where nobody ever took one.

        Raises:
          Damaged: it was not signed, or is altered.
        """
        newest = max(lease.epochs(self.path), default=None)
        return None if newest is None else lease.read_lease(self.path / names.lease_name(newest))

    def check_lease(self, *, ask: bool = False) -> None:
        """Checks that the directory is still the one that was opened, and its lease still ours.

        Called before every commit.

        Raises:
          FencedError: a newer trainer holds it, or another directory stands in its place.
          StorageError: nothing stands there any more, or it cannot be read.
        """
        if self._lease is None:
            return
        self._check_place(self._lease)
        newest = max(lease.epochs(self.path), default=0)
        if newest == self._lease.epoch:
            if not self._signed:
                return
            with contextlib.suppress(Damaged, FormatTooNew):
                found = lease.read_lease(self.path / names.lease_name(newest))
                if found.holder == self._lease.holder:
                    return
        raise self._fenced(lease.holder(self.path, newest, self._lease.epoch))

    def _check_place(self, own: Lease) -> None:
        """Checks that the directory that was opened stands where it did."""
        try:
            stands = self._stamp.same(Stamp.of(os.stat(self.path)))
        except OSError as error:
            raise StorageError(
                f"{self.path}: expected to find the directory where it was opened, found "
                f"{os.strerror(error.errno or 0)}; it was moved or removed: move it back and save "
                "again, or stop this trainer and open it where it is now"
            ) from error
        if not stands:
            newest = max(lease.epochs(self.path), default=0)
            held = lease.holder(self.path, newest, own.epoch)
            raise self._fenced(f"another directory in its place, with {held}")
        # A link that is gone leads to no other directory: it may be about to be made anew.
        with contextlib.suppress(OSError):
            if not self._stamp.same(Stamp.of(os.stat(self.given))):
                raise self._fenced(f"that {self.given}, which led to it, leads elsewhere now")

    def _fenced(self, found: str) -> FencedError:
        assert self._lease is not None
        return FencedError(
            f"{self.path}: expected to hold its lease (epoch {self._lease.epoch}, holder "
            f"{self._lease.holder[:8]}, taken {lease.utc(self._lease.since_secs)}), found {found}; "
            "stop this trainer, its later steps are not committed"
        )

    def roll_back(self, step: int, run: str) -> list[int]:
        """Moves every step after ``step`` aside, durably, with a warning.

        Newer steps move first, so that at every moment what stays is closed under parents.

        Args:
          step: the step that training goes on from.
          run: id of the run that goes on.

        Returns:
          The steps that were moved.
        """
        later = sorted((found for found in self.steps() if found > step), reverse=True)
        if not later or self._lease is None:
            return []
        self.check_lease()
        aside = self.path / names.ROLLED_BACK / run
        with files.typed_errors(aside, "make a directory"):
            aside.mkdir(parents=True, exist_ok=True)
            files.fsync_path(aside.parent)
        for found in later:
            # A trainer that has lost the directory must not move the steps of its successor.
            self.check_lease()
            self.set_aside(found, aside / str(found))
        self._move_bases_aside(step, aside)
        events.warn(
            f"{self.path}: going on from step {step}, the later steps {sorted(later)} were moved "
            f"to {names.ROLLED_BACK}/{run}"
        )
        return later

    def set_aside(self, step: int, target: Path) -> None:
        """Moves a committed step to where no reader looks, durably.

        Raises:
          StorageError: the store refused.
        """
        files.make_folder(target.parent)
        files.rename(self.step_dir(step), target, fsync=True)
        with self._lock:
            self._known.pop(str(step), None)

    def _move_bases_aside(self, step: int, aside: Path) -> None:
        """Compacted bases of later steps go with these, so that they stay whole."""
        bases = saves.compacted_bases(self.spot, self.item)
        for name in bases:
            number = names.step_number(name)
            if number is not None and number > step:
                target = names.compacted_dir(aside / name, self.item)
                with files.typed_errors(target, "make a directory"):
                    target.parent.mkdir(parents=True, exist_ok=True)
                files.rename(
                    names.compacted_dir(self.step_dir(number), self.item), target, fsync=True
                )

    def _holds(self) -> bool:
        """Whether the lease is held, as far as the directory can be asked."""
        if self._lease is None:
            return False
        try:
            self.check_lease()
        except (FencedError, StorageError):
            return False
        return True

    def remove_leftovers(self) -> None:
        """Removes what cut saves and cut deletions left; nothing unless the lease is held.

        To another trainer's holder these are no leftovers but its save in flight.
        """
        if not self._holds():
            return
        for name in files.listing(self.path):
            if leftovers.is_leftover(name):
                # Never committed, so nobody reads it; removing it in place works on a full disk.
                files.remove_tree(self.path / name)
        self.empty_trash()
        for emptied in self.path.glob(f"{names.TRASH}/*"):
            files.remove_tree(emptied)

    def note_kept(self, note: kept.Kept | None) -> None:
        """See ``Held``."""
        if note is None:
            kept.forget(self.path)
        else:
            kept.note(self.path, note)

    def remove_steps(self, steps: Collection[int]) -> None:
        """Removes committed steps by renaming them, newest first; what is lost to others stays.

        At every moment what is listed is closed under parents: a cut leaves only what restores.

        Args:
          steps: such that no step that stays needs one of them.

        Raises:
          StorageError: the store refused.
        """
        if self._lease is None or not steps:
            return
        trash = self.path / self.new_trash()
        with files.typed_errors(trash, "make a directory"):
            trash.mkdir(parents=True)
        with contextlib.suppress(FencedError):  # The next commit says so.
            for step in sorted(steps, reverse=True):
                # A trainer that has lost the directory must not remove its successor's steps.
                self.check_lease()
                if self.step_dir(step).is_dir():
                    files.rename(self.step_dir(step), trash / str(step), fsync=False)
                    with self._lock:
                        self._known.pop(str(step), None)  # Its number may be used again.

    def new_trash(self) -> str:
        """A fresh place below the root, by its relative name, to rename removed steps into."""
        return f"{names.TRASH}/{uuid.uuid4().hex}"

    def empty_trash(self) -> None:
        """Removes the steps that were renamed for deletion.

        The renames are on disk before anything in them goes: a power cut leaves a step whole
        or gone.
        """
        removed = list(self.path.glob(f"{names.TRASH}/*/*"))
        if removed:
            with files.typed_errors(self.path / names.TRASH, "force to disk"):
                for folder in {entry.parent for entry in removed}:
                    files.fsync_path(folder)
                files.fsync_path(self.path / names.TRASH)
                files.fsync_path(self.path)
        for entry in removed:
            files.remove_tree(entry)

    def collect(self, protected: Callable[[], frozenset[SaveId]] = frozenset) -> None:
        """Removes in the background what nothing needs; a failure surfaces at the next call.

        That is what was renamed for deletion, and compacted bases in which no chain ends.

        Args:
          protected: saves in flight, and possible parents; ``Lineage.protected``.
        """
        if self._lease is not None and self._collected.done():
            self._collected.result()
            self._collected = self._collector.submit(self._collect, protected)

    def _collect(self, protected: Callable[[], frozenset[SaveId]]) -> None:
        bases = self._compacted()
        if bases:
            # Asked for after the bases were listed: a save that goes on from one of them is
            # committed or in flight by now, or was not begun.
            in_flight, saves = protected(), self.saves().values()
            infos = [info for info in saves if info is not None]
            if len(infos) == len(saves):
                self._drop_bases(bases, infos, in_flight)
        if self._holds():  # Else the next save says what is wrong with the directory.
            self.empty_trash()

    def _drop_bases(
        self,
        bases: Mapping[str, SaveInfo],
        infos: Sequence[SaveInfo],
        in_flight: frozenset[SaveId],
    ) -> None:
        ids = {info.save_id for info in bases.values()}
        needed = chain.needed_bases(infos, in_flight, ids)
        dropped = [name for name, info in bases.items() if info.save_id not in needed]
        if not dropped:
            return
        with contextlib.suppress(FencedError):
            self.check_lease()
            trash = self.path / self.new_trash()
            with files.typed_errors(trash, "make a directory"):
                trash.mkdir(parents=True)
            for name in dropped:
                base = names.compacted_dir(self.path / name, self.item)
                files.rename(base, trash / name, fsync=True)
                with contextlib.suppress(OSError):  # Another item of the step has a base.
                    base.parent.rmdir()

    def close(self) -> None:
        """Finishes deletions. The lease stays: the next trainer takes the next epoch."""
        self._collector.shutdown()
        self._collected.result()
        if self._lease is not None:
            try:
                with contextlib.suppress(FencedError):
                    self.check_lease()
                    self.empty_trash()
            finally:
                self._unpin()


def _refuse_foreign(path: Path) -> None:
    entries = {name for name in files.listing(path) if not name.startswith(".")}
    if leftovers.is_step_dir(path, entries):
        raise ForeignDirectory(
            f"{path}: expected a directory of steps, found a step; give {path.parent}, and "
            f"{path.name} as the step"
        )
    folders = [path, *(path / name for name in entries if names.step_number(name) is None)]
    if any((folder / names.PYTREE_METADATA).is_file() for folder in folders):
        raise ForeignDirectory(
            f"{path}: expected a directory of steps, found a checkpoint of stock Orbax; make it "
            f"the first base of a directory of its own with 'deltackpt import {path} NEW_DIRECTORY "
            "--tables PATTERN', and go on there"
        )
    if entries and not any(leftovers.is_known(name) for name in entries):
        raise ForeignDirectory(
            f"{path}: expected an empty or a checkpoint directory, found "
            f"{sorted(entries)[:5]}; give the directory of the steps, or an empty one"
        )


def _refuse_other_item(path: Path, item: str) -> None:
    """A trainer's steps are not to stand among those of stock Orbax, or of another item."""
    steps = [name for name in files.listing(path) if names.step_number(name) is not None]
    newest = path / max(steps, key=int, default="")
    if steps and not (newest / item).is_dir() and foreign.is_checkpoint(newest):
        raise foreign.foreign(newest, item)
