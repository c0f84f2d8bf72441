# SPDX-License-Identifier: Apache-2.0
"""The directory as a whole: opening it, its lease, its steps, rollback and collection.

What a root promises: a step is visible after one ``rename`` in the root. On a local POSIX file
system that is atomic, and durable once the root has been forced to disk; on a network file
system it is as atomic as that system's rename, and seen by other machines as late as its caches
allow.

The lease is a file per epoch, ``lease.<epoch>.msgpack``, made by ``link``, which fails where the
name exists, so that of two trainers that start at the same moment one gets the epoch and the
other the next. The newest epoch holds the lease: a restart after SIGKILL takes over at once and
never waits for a dead holder; an older holder that still runs is fenced at its next commit.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import socket
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

from deltackpt import layout, manifest, restore
from deltackpt.chain import SaveInfo
from deltackpt.errors import (
    Damaged,
    FencedError,
    ForeignDirectory,
    RestoreError,
    StorageError,
    UnsupportedRoot,
)
from deltackpt.integrity import check_step_files
from deltackpt.storage import files

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_STEP = re.compile(r"\d+")
_TEMPORARY = ".orbax-checkpoint-tmp"
_MAGIC = "deltackpt.lease"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
    """Who holds a directory, since when (seconds since 1970)."""

    epoch: int
    holder: str
    host: str
    pid: int
    since_secs: float


class Root:
    """One checkpoint directory, open for a trainer or read-only."""

    def __init__(self, path: Path, item: str, lease: Lease | None):
        """Made by ``Root.open``."""
        self.path = path
        self._item = item
        self._lease = lease
        self._known: dict[str, SaveInfo] = {}
        self._collected: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._collected.set_result(None)
        self._collector = concurrent.futures.ThreadPoolExecutor(1, "deltackpt-collect")

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        item: str = layout.EMBEDDINGS_ITEM,
        read_only: bool = False,
    ) -> Root:
        """Opens a directory; a trainer makes it where needed, and takes its lease.

        Args:
          directory: a path of a local or network file system.
          item: name of our item in a step.
          read_only: no lease, nothing is made or removed.

        Raises:
          UnsupportedRoot: the path has a scheme.
          ForeignDirectory: it holds files, and nothing that deltackpt or Orbax wrote.
          StorageError: it does not exist (read-only), or cannot be written.
        """
        scheme = _SCHEME.match(os.fspath(directory))
        if scheme is not None:
            raise UnsupportedRoot(
                f"{os.fspath(directory)}: expected a path of a file system, found the scheme "
                f"{scheme[1]!r}, which deltackpt does not commit on; mount it, or save to a local "
                "directory and copy whole chains"
            )
        path = Path(directory).absolute()
        if read_only:
            if not path.is_dir():
                raise StorageError(
                    f"{path}: expected a directory to read, found none; check the path"
                )
            return cls(path, item, None)
        with files.typed_errors(path, "make a directory"):
            path.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(path)
        root = cls(path, item, _take_lease(path))
        root.remove_leftovers()
        return root

    def step_dir(self, step: int) -> Path:
        """Where a step stands once it is committed."""
        return self.path / str(step)

    def steps(self) -> list[int]:
        """Committed steps, in no order: one listing of the root."""
        try:
            return [int(entry) for entry in os.listdir(self.path) if _STEP.fullmatch(entry)]
        except OSError as error:
            raise StorageError(
                f"{self.path}: expected to list it, found {os.strerror(error.errno or 0)}; check "
                "the file system"
            ) from error

    def saves(self) -> dict[int, SaveInfo | None]:
        """What each committed step is; None where its manifest cannot be read.

        Committed steps never change, so each is read once.
        """
        steps = {str(step): step for step in self.steps()}
        self._known = {name: info for name, info in self._known.items() if name in steps}
        found: dict[int, SaveInfo | None] = {}
        for name, step in steps.items():
            if name not in self._known:
                with contextlib.suppress(RestoreError):
                    self._known[name] = restore.read_save(self.path / name, self._item).info
            found[step] = self._known.get(name)
        return found

    def check_step_files(self, step_dir: Path) -> None:
        """Checks the files of a step that carry no checksum of their own, dense ones included.

        Raises:
          Damaged: the first that is missing or altered.
        """
        record = restore.read_save(step_dir, self._item).manifests[0]
        if "step" not in record.digests:
            return
        for damage in check_step_files(step_dir):
            raise damage

    def check_lease(self) -> None:
        """Checks that no newer trainer has taken the directory; called before every commit.

        Raises:
          FencedError: one has; it is named.
        """
        if self._lease is None:
            return
        newest = max(_epochs(self.path), default=0)
        if newest <= self._lease.epoch:
            return
        holder = _read_lease(self.path, newest)
        raise FencedError(
            f"{self.path}: expected to hold its lease (epoch {self._lease.epoch}), found epoch "
            f"{newest} held by {holder}; stop this trainer, its later steps are not committed"
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
        if not later:
            return []
        aside = self.path / layout.ROLLED_BACK / run
        with files.typed_errors(aside, "make a directory"):
            aside.mkdir(parents=True, exist_ok=True)
            files.fsync_path(aside.parent)
        for found in later:
            files.rename(self.step_dir(found), aside / str(found), fsync=True)
        warnings.warn(
            f"{self.path}: going on from step {step}, the later steps {sorted(later)} were moved "
            f"to {layout.ROLLED_BACK}/{run}",
            stacklevel=4,
        )
        return later

    def remove_leftovers(self) -> None:
        """Removes what cut saves and cut deletions left; for the holder of the lease only."""
        for entry in list(self.path.iterdir()):
            if entry.name.endswith(_TEMPORARY) and _STEP.match(entry.name):
                self._trash(entry)
        self.empty_trash()
        for emptied in self.path.glob(f"{layout.TRASH}/*"):
            files.remove_tree(emptied)

    def new_trash(self) -> str:
        """A fresh place below the root, by its relative name, to rename removed steps into."""
        return f"{layout.TRASH}/{uuid.uuid4().hex}"

    def empty_trash(self) -> None:
        """Removes the steps that were renamed for deletion.

        The renames are on disk before anything in them goes: a power cut leaves a step whole
        or gone.
        """
        removed = list(self.path.glob(f"{layout.TRASH}/*/*"))
        if removed:
            files.fsync_path(self.path)
        for entry in removed:
            files.remove_tree(entry)

    def collect(self) -> None:
        """Empties the trash in the background; a failure surfaces at the next call or close."""
        if self._collected.done():
            self._collected.result()
            self._collected = self._collector.submit(self.empty_trash)

    def close(self) -> None:
        """Finishes deletions. The lease stays: the next trainer takes the next epoch."""
        self._collector.shutdown()
        self._collected.result()
        if self._lease is not None:
            with contextlib.suppress(FencedError):
                self.check_lease()
                self.empty_trash()

    def _trash(self, entry: Path) -> None:
        trash = self.path / self.new_trash()
        with files.typed_errors(trash, "make a directory"):
            trash.mkdir(parents=True)
        files.rename(entry, trash / entry.name, fsync=False)


def _refuse_foreign(path: Path) -> None:
    names = {entry for entry in os.listdir(path) if not entry.startswith(".")}
    ours = {layout.ROLLED_BACK, layout.TRASH, "lost+found"}
    known = (
        name
        for name in names
        if _STEP.match(name) or name in ours or name.startswith(("lease.", "_"))
    )
    if names and not any(known):
        raise ForeignDirectory(
            f"{path}: expected an empty or a checkpoint directory, found "
            f"{sorted(names)[:5]}; give a directory of its own"
        )


def _epochs(path: Path) -> Iterator[int]:
    for name in os.listdir(path):
        epoch = layout.lease_epoch(name)
        if epoch is not None:
            yield epoch


def _take_lease(path: Path) -> Lease:
    """Takes the epoch after the newest."""
    while True:
        epochs = sorted(_epochs(path))
        lease = Lease(
            epoch=(epochs[-1] if epochs else 0) + 1,
            holder=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            since_secs=time.time(),
        )
        staged = path / f".lease.{lease.holder}"
        target = path / layout.lease_name(lease.epoch)
        files.write_atomic(staged, manifest.to_bytes(lease, _MAGIC), fsync=True)
        try:
            with files.typed_errors(path, "take the lease"):
                os.link(staged, target)
                files.fsync_path(path)
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                continue
            raise
        finally:
            staged.unlink(missing_ok=True)
        for epoch in epochs:
            (path / layout.lease_name(epoch)).unlink(missing_ok=True)
        return lease


def _read_lease(path: Path, epoch: int) -> str:
    file = path / layout.lease_name(epoch)
    try:
        lease = manifest.from_bytes(files.read_bytes(file), Lease, name=file.name, magic=_MAGIC)
    except Damaged as error:
        return f"an unknown trainer ({error})"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lease.since_secs))
    return f"process {lease.pid} on {lease.host} since {since}"
