# SPDX-License-Identifier: Apache-2.0
"""Copy sources and targets: directories, and buckets, which are written through their journal.

A bucket receives a unit as from the uploader. A directory receives it in another way: files of an
interrupted copy are kept for the next one, and a rename may replace a damaged unit.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from deltackpt.errors import (
    Damaged,
    RestoreError,
    StepGone,
    StorageError,
    TargetDiffers,
)
from deltackpt.format import naming
from deltackpt.format.manifest import SaveInfo
from deltackpt.ledger.bucket_steps import refuse_foreign
from deltackpt.ledger.committed import SEGMENT_BYTES, CommittedStore
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import ObjectKey
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.lease import epochs
from deltackpt.ledger.upload import Unit, commit
from deltackpt.maintenance import gc
from deltackpt.reading import inventory, stored_saves
from deltackpt.resources.runtime import Runtime
from deltackpt.storage import buckets, digests, posix
from deltackpt.storage.posix import DirectFile, DurableDir, fsync_tree
from deltackpt.storage.store import Missing, StorePath, store_path

#: Receives the bytes found and the bytes written of a copy, in several threads.
OnBytes = Callable[[int, int], None]


def gone(source: Directory | Bucket, key: ObjectKey) -> StepGone:
    """Returns the error for a unit that was removed from the source during the copy."""
    return StepGone(
        f"{source.name}/{key.name}: expected it to remain during the copy, found it removed or "
        "replaced; copy again, since the newest step has changed"
    )


def _differs(shown: str, found: str) -> TargetDiffers:
    """The error for a target that holds something else under a name."""
    return TargetDiffers(
        f"{shown}: expected the copied save, or none, found {found}, which was not touched; copy "
        "to an empty target, or move this entry away first"
    )


#: Maximum bytes in flight; a larger file is copied alone.
_MEMORY_BYTES = 256 << 20


class Directory:
    """Steps and bases in a directory that is, or will become, a checkpoint directory."""

    def __init__(self, path: Path, item: str, workers: int):
        """Opens a directory; ``workers`` is the number of files that are copied at a time."""
        posix.check_path(path, writing=False)
        self.name = str(path)
        self._path, self._dir = path, DurableDir(path)
        self.item, self._workers = item, workers
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Directory:
        """Locks the directory against other copies to it and against garbage collection."""
        if self._path.is_dir():
            # Before anything is created there: the directory may belong to another program.
            Root.open(self._path, read_only=True).close()
        self._held.enter_context(gc.exclusive(self._path))
        return self

    def __exit__(self, *error: object) -> None:
        """Releases the lock; leaves nothing behind unless the copy was interrupted."""
        self._held.close()

    def steps(self) -> list[int]:
        """Returns the complete steps."""
        return Root.open(self._path, read_only=True).steps()

    def in_use(self) -> str | None:
        """Returns why a trainer may be using it; None if that is impossible."""
        opened = Root.open(self._path, read_only=True)
        # Without a lease, no trainer ever used it.
        return gc.in_use(opened) if any(epochs(self._path)) else None

    def store_path(self, key: ObjectKey) -> StorePath:
        """Returns the folder of a unit."""
        return store_path(self._path / key.name)

    def info(self, key: ObjectKey) -> SaveInfo | None:
        """Returns a unit's entry in the chain; None if it does not exist."""
        step_dir, folder = self._path / str(key.step), self._path / key.name
        if not folder.is_dir():
            return None
        try:
            if key.item is None:
                return stored_saves.read_save(step_dir, self.item).info
            return stored_saves.read_base(step_dir, key.item).info
        except RestoreError:
            if not folder.is_dir():  # The unit was removed concurrently.
                return None
            raise

    def unit(self, key: ObjectKey, info: SaveInfo) -> Unit:
        """Returns a unit with the digests of all its files."""
        at, is_base = self.store_path(key), key.item is not None
        return Unit(key, info, at, inventory.every_digest(at, key.item or self.item, base=is_base))

    def contains(self, unit: Unit, *, recheck: bool) -> bool:
        """Returns whether a unit is complete, or raises TargetDiffers; ``recheck`` reads it all."""
        folder, aside = self._path / unit.name, self._aside(unit)
        if not os.path.lexists(folder):
            if aside.is_dir():  # An earlier copy was interrupted while replacing it.
                self._dir.publish(aside, folder)
            else:
                return False
        self._require_same(unit)
        files = unit.files
        if any(_length(folder / name) != digest.length for name, digest in files.items()):
            return False
        records = {name: digest for name, digest in files.items() if name.endswith(".msgpack")}
        return not digests.check_files(folder, files if recheck else records)

    def add(self, unit: Unit, reading: AbstractContextManager[None], on_bytes: OnBytes) -> None:
        """Copies a unit and makes it visible atomically; ``reading`` surrounds the reads."""
        staged = self._staged(unit)
        self._dir.make(staged)
        needed = unit.nbytes - store_path(staged).tree_bytes()
        shown = f"{self.name}/{unit.name}"
        posix.require_room(staged, needed, shown, "make room, then copy again")

        def copy(name: str) -> None:
            digest = unit.files[name]
            found = self._has_written(unit, name)
            if not found:
                pieces = digests.verified_file(unit.at / name, digest, most_bytes=SEGMENT_BYTES)
                self.write(unit, name, pieces)
                if not self._has_written(unit, name):
                    raise StorageError(
                        f"{self.name}/{unit.name}/{name}: expected to read back the written "
                        "bytes, found different bytes; check the store, then copy again"
                    )
            on_bytes(*((digest.length, 0) if found else (0, digest.length)))

        try:
            with reading, Runtime(self._workers, memory_bytes=_MEMORY_BYTES) as runtime:
                runtime.map(
                    copy,
                    unit.files,
                    cost=lambda name: min(unit.files[name].length, SEGMENT_BYTES),
                )
        except Damaged:
            self._dir.remove(staged)
            raise
        self.publish(unit)

    def _has_written(self, unit: Unit, name: str) -> bool:
        path = self._staged(unit) / name
        return path.is_file() and digests.digest_file(path)[:3] == unit.files[name][:3]

    def write(self, unit: Unit, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Writes a file of an incomplete unit; does not follow links to other files."""
        path = self._staged(unit) / name
        with posix.typed_errors(path, "write"), self._dir.opened(path.parent, make=True) as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
            file = DirectFile(path, folder=folder, name=path.name)
            with contextlib.closing(file):
                for piece in pieces:
                    file.append(np.frombuffer(piece, np.uint8))
                file.sync()

    def publish(self, unit: Unit) -> None:
        """Makes a unit visible; nothing is removed before everything is durable."""
        staged, final = self._staged(unit), self._path / unit.name
        with posix.typed_errors(final, "be published"), self._dir.opened(staged) as top:
            for folder, _, inside, descriptor in os.fwalk(".", dir_fd=top):
                for name in inside:
                    if Path(folder, name).as_posix() not in unit.files:
                        os.unlink(name, dir_fd=descriptor)  # Left by another attempt.
        fsync_tree(staged)  # Another attempt may have been killed before it fsynced its files.
        missing = [name for name, of in unit.files.items() if _length(staged / name) != of.length]
        if missing:
            raise StorageError(
                f"{staged}: expected every written file, found {missing[0]} removed; stop the "
                "process that removes files there, then copy again"
            )
        if not os.path.lexists(final):
            self._dir.publish(staged, final)
            return
        self._require_same(unit)  # The unit is damaged: the new copy replaces it.
        aside = self._aside(unit)
        self._dir.remove(aside)
        self._dir.publish(final, aside)
        try:
            self._dir.publish(staged, final)
        except BaseException:
            if not os.path.lexists(final):
                self._dir.publish(aside, final)
            raise
        self._dir.remove(aside)
        self._dir.remove_empty(aside.parent)

    def _staged(self, unit: Unit) -> Path:
        return self._path / naming.COPYING / unit.name.replace("/", ".")

    def _aside(self, unit: Unit) -> Path:
        """Folder of a damaged unit while it is being replaced; trainers do not empty it."""
        return self._path / naming.COPYING / "replaced" / unit.name.replace("/", ".")

    def _require_same(self, unit: Unit) -> None:
        """Checks that the entry with a unit's name is the same save, intact or damaged."""
        head = naming.manifest_name(0)  # It identifies the save.
        if unit.key.item is None:
            head = f"{self.item}/{head}"
        try:
            data = store_path(self._path / unit.name / head).read()
        except Damaged as error:
            raise _differs(f"{self.name}/{unit.name}", f"no {head}") from error
        if digests.digest_bytes(data)[:3] != unit.files[head][:3]:
            raise _differs(f"{self.name}/{unit.name}", f"another save, or damage, in {head}")


def _length(path: Path) -> int:
    """The length of a file, or -1 if it does not exist."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


class Bucket:
    """Steps and bases in a bucket; each copied one is committed by one journal entry."""

    def __init__(
        self, where: str | os.PathLike[str], endpoint: str | None, item: str, workers: int
    ):
        """Opens a bucket; writes nothing."""
        place = buckets.locate(where, endpoint=endpoint)
        self.name = place.url
        self.item, self._workers = item, workers
        self._root = place.open()
        self._journal = Journal(self._root)
        self._store = CommittedStore(self._journal)
        #: Whether this copy has claimed it for writing.
        self._is_claimed = False

    def __enter__(self) -> Bucket:
        """Takes no lock: any other copy that claims the bucket fences this one."""
        return self

    def __exit__(self, *error: object) -> None:
        """Releases nothing; copies the journal entry that names all copied steps."""
        if self._is_claimed and error[0] is None:
            self._journal.copy_newest()

    def steps(self) -> list[int]:
        """See ``Directory``."""
        return [unit.step for unit in self._store.units() if unit.item is None]

    def in_use(self) -> str | None:
        """See ``Directory``."""
        return gc.claimed_by(self._journal.state())

    def store_path(self, key: ObjectKey) -> StorePath:
        """See ``Directory``."""
        return StorePath(self._store, key.name)

    def info(self, key: ObjectKey) -> SaveInfo | None:
        """See ``Directory``."""
        entry = self._journal.state().catalog.get(key)
        return None if entry is None else entry.info

    def unit(self, key: ObjectKey, info: SaveInfo) -> Unit:
        """See ``Directory``."""
        try:
            return Unit(key, info, self.store_path(key), self._store.digests(key))
        except Missing as error:
            raise gone(self, key) from error

    def contains(self, unit: Unit, *, recheck: bool) -> bool:
        """See ``Directory``."""
        if unit.key not in self._store.units():
            return False
        try:
            known = self.unit(unit.key, unit.info)
        except Damaged:
            return False  # The caller copies it again over the damaged one.
        if digests.without_blocks(known.files) != digests.without_blocks(unit.files):
            raise _differs(f"{self.name}/{unit.name}", "another save")
        return not (recheck and digests.check_files(known.at, known.files))

    def add(self, unit: Unit, reading: AbstractContextManager[None], on_bytes: OnBytes) -> None:
        """See ``Directory``; claims the bucket if necessary."""
        if not self._is_claimed:
            if not self._journal.state().entry.number:
                refuse_foreign(self._root)
            buckets.probe(self._root)
            self._journal.claim()
            self._is_claimed = True
        commit(
            unit,
            self._journal,
            reading=reading,
            workers=self._workers,
            on_bytes=functools.partial(on_bytes, 0),
            alone=True,  # A base can exist without its step being copied.
            replace=True,
        )
