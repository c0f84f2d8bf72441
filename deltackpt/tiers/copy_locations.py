# SPDX-License-Identifier: Apache-2.0
"""Copy sources and targets: directories, and buckets, which are written through their journal."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from deltackpt.errors import (
    Damaged,
    OutOfSpace,
    RestoreError,
    StepGone,
    StorageError,
    TargetDiffers,
)
from deltackpt.format import naming
from deltackpt.format.manifest import SaveInfo
from deltackpt.ledger import lease
from deltackpt.ledger.committed import SEGMENT_BYTES, CommittedStore
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import CatalogEntry, ObjectKey
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.lease import epochs
from deltackpt.ledger.opening import refuse_foreign
from deltackpt.ledger.upload import upload
from deltackpt.maintenance import gc
from deltackpt.reading import inventory, stored_saves
from deltackpt.resources.runtime import Runtime
from deltackpt.storage import buckets, digests, posix
from deltackpt.storage.digests import Digest
from deltackpt.storage.posix import DirectFile, DurableDir, fsync_tree
from deltackpt.storage.store import Missing, StorePath, store_path

#: Receives the bytes found and the bytes written of a copy, in several threads.
OnBytes = Callable[[int, int], None]

#: Bytes of a file in memory at a time.
PIECE_BYTES = SEGMENT_BYTES
_MEND = "copy another step, or restore this one from a backup"


def gone(source: Directory | Bucket, unit: ObjectKey) -> StepGone:
    """Returns the error for a unit that was removed from the source during the copy."""
    return StepGone(
        f"{source.name}/{unit.name}: expected it to remain during the copy, found it removed or "
        "replaced; copy again, since the newest step has changed"
    )


def differs(shown: str, found: str) -> TargetDiffers:
    """Returns the error for a target that holds something else under a name."""
    return TargetDiffers(
        f"{shown}: expected the copied save, or none, found {found}, which was not touched; copy "
        "to an empty target, or move this entry away first"
    )


def pieces_of(at: StorePath, expected: Digest) -> Iterator[bytes | bytearray]:
    """Yields a file piece by piece, one in memory; Damaged at the end if it does not match."""
    came, shown = digests.Streamed(), str(at)
    try:
        with at.missing_is_damage(shown):
            if (length := at.store.length(at.key)) != expected.length:
                raise Damaged(shown, f"{expected.length} bytes", f"{length} bytes")
            for start in range(0, expected.length, PIECE_BYTES):
                piece = bytearray(min(PIECE_BYTES, expected.length - start))
                at.store.read_into(at.key, start, [memoryview(piece)])
                came.add(piece)
                yield piece
        came.check(shown, expected)
    except Damaged as error:  # May name an object.
        raise Damaged(shown, error.expected, error.found, _MEND) from None


def digests_bytes(digests: Mapping[str, Digest]) -> int:
    """Returns the total size of files, by their digests."""
    return sum(digest.length for digest in digests.values())


#: Maximum bytes in flight; a larger file is copied alone.
_MEMORY_BYTES = 256 << 20


class Directory:
    """Steps and bases in a directory that is, or will become, a checkpoint directory."""

    def __init__(self, path: Path, item: str):
        self.name = str(path)
        self._path, self._dir = path, DurableDir(path)
        self.item = item
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

    def store_path(self, unit: ObjectKey) -> StorePath:
        """Returns the folder of a unit."""
        return store_path(self._folder(unit))

    def info(self, unit: ObjectKey) -> SaveInfo | None:
        """Returns a unit's entry in the chain; None if it does not exist."""
        step_dir, folder = self._path / str(unit.step), self._folder(unit)
        if not folder.is_dir():
            return None
        try:
            if unit.item is None:
                return stored_saves.read_save(step_dir, self.item).info
            return stored_saves.read_base(step_dir, unit.item).info
        except RestoreError:
            if not folder.is_dir():  # The unit was removed concurrently.
                return None
            raise

    def digests(self, unit: ObjectKey) -> dict[str, Digest]:
        """Returns the digests of all files of a unit, by relative path."""
        is_base = unit.item is not None
        return inventory.every_digest(self.store_path(unit), unit.item or self.item, base=is_base)

    def holds(self, unit: ObjectKey, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """Returns whether a unit is complete, or raises TargetDiffers; ``recheck`` reads it all."""
        folder, aside = self._folder(unit), self._aside(unit)
        if not os.path.lexists(folder):
            if aside.is_dir():  # An earlier copy was interrupted while replacing it.
                self._dir.publish(aside, folder)
            else:
                return False
        self._require_same(unit, expected)
        if any(_length(folder / name) != digest.length for name, digest in expected.items()):
            return False
        records = {name: digest for name, digest in expected.items() if name.endswith(".msgpack")}
        return not digests.check_files(folder, expected if recheck else records)

    def add(
        self,
        unit: ObjectKey,
        info: SaveInfo,
        source: StorePath,
        expected: Mapping[str, Digest],
        *,
        reading: AbstractContextManager[None],
        workers: int,
        on_bytes: OnBytes,
    ) -> None:
        """Copies a unit and makes it visible atomically; ``reading`` surrounds the reads."""
        staged = self._staged(unit)
        self._dir.make(staged)
        needed = digests_bytes(expected) - posix.tree_bytes(staged)
        if posix.free_bytes(staged) < needed:
            raise OutOfSpace(
                f"{self.name}: expected room for {needed:,} bytes of {unit.name}, found "
                f"{posix.free_bytes(staged):,} free; make room, then copy again"
            )

        def copy(name: str) -> None:
            digest = expected[name]
            found = self._has_written(unit, name, digest)
            if not found:
                self.write(unit, name, pieces_of(source / name, digest))
                if not self._has_written(unit, name, digest):
                    raise StorageError(
                        f"{self.name}/{unit.name}/{name}: expected to read back the written "
                        "bytes, found different bytes; check the store, then copy again"
                    )
            on_bytes(*((digest.length, 0) if found else (0, digest.length)))

        try:
            with reading, Runtime(workers, memory_bytes=_MEMORY_BYTES) as runtime:
                runtime.map(
                    copy, expected, cost=lambda name: min(expected[name].length, PIECE_BYTES)
                )
        except Damaged:
            self._dir.remove(staged)
            raise
        self.publish(unit, expected)

    def _has_written(self, unit: ObjectKey, name: str, expected: Digest) -> bool:
        path = self._staged(unit) / name
        return path.is_file() and digests.digest_file(path)[:3] == expected[:3]

    def write(self, unit: ObjectKey, name: str, pieces: Iterable[bytes | bytearray]) -> None:
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

    def publish(self, unit: ObjectKey, expected: Mapping[str, Digest]) -> None:
        """Makes a unit visible; nothing is removed before everything is durable."""
        staged, final = self._staged(unit), self._folder(unit)
        with posix.typed_errors(final, "be published"), self._dir.opened(staged) as top:
            for folder, _, inside, descriptor in os.fwalk(".", dir_fd=top):
                for name in inside:
                    if Path(folder, name).as_posix() not in expected:
                        os.unlink(name, dir_fd=descriptor)  # Left by another attempt.
        fsync_tree(staged)  # Another attempt may have been killed before it fsynced its files.
        missing = [name for name, of in expected.items() if _length(staged / name) != of.length]
        if missing:
            raise StorageError(
                f"{staged}: expected every written file, found {missing[0]} removed; stop the "
                "process that removes files there, then copy again"
            )
        if not os.path.lexists(final):
            self._dir.publish(staged, final)
            return
        self._require_same(unit, expected)  # The unit is damaged: the new copy replaces it.
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

    def _folder(self, unit: ObjectKey) -> Path:
        return self._path / unit.name

    def _staged(self, unit: ObjectKey) -> Path:
        return self._path / naming.COPYING / unit.name.replace("/", ".")

    def _aside(self, unit: ObjectKey) -> Path:
        """Folder of a damaged unit while it is being replaced; trainers do not empty it."""
        return self._path / naming.COPYING / "replaced" / unit.name.replace("/", ".")

    def _require_same(self, unit: ObjectKey, expected: Mapping[str, Digest]) -> None:
        """Checks that the entry with a unit's name is the same save, intact or damaged."""
        head = naming.manifest_name(0)  # It identifies the save.
        if unit.item is None:
            head = f"{self.item}/{head}"
        try:
            data = posix.read_bytes(self._folder(unit) / head)
        except Damaged as error:
            raise differs(f"{self.name}/{unit.name}", f"no {head}") from error
        if digests.digest_bytes(data)[:3] != expected[head][:3]:
            raise differs(f"{self.name}/{unit.name}", f"another save, or damage, in {head}")


def _length(path: Path) -> int:
    """The length of a file, or -1 if it does not exist."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


class Bucket:
    """Steps and bases in a bucket; each copied one is committed by one journal entry."""

    def __init__(self, where: str | os.PathLike[str], endpoint: str | None, item: str):
        """Opens a bucket; writes nothing."""
        place = buckets.locate(where, endpoint=endpoint)
        self.name = place.url
        self.item = item
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
        """See ``Directory``; a claim by a trainer counts, since its end is not known."""
        claim = self._journal.state().trainer
        if claim is None or self._is_claimed:
            return None
        held = claim.lease
        return (
            f"a trainer that holds it: epoch {held.epoch}, process {held.pid} on {held.host}, "
            f"since {lease.utc(held.since_secs)}"
        )

    def store_path(self, unit: ObjectKey) -> StorePath:
        """See ``Directory``."""
        return StorePath(self._store, unit.name)

    def info(self, unit: ObjectKey) -> SaveInfo | None:
        """See ``Directory``."""
        standing = self._journal.state().catalog.get(unit)
        return None if standing is None else standing.info

    def digests(self, unit: ObjectKey) -> dict[str, Digest]:
        """See ``Directory``."""
        try:
            return self._store.digests(unit)
        except Missing as error:
            raise gone(self, unit) from error

    def holds(self, unit: ObjectKey, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """See ``Directory``."""
        if unit not in self._store.units():
            return False
        try:
            known = self.digests(unit)
        except Damaged:
            return False  # The caller copies it again over the damaged one.
        if _figures(known) != _figures(expected):
            raise differs(f"{self.name}/{unit.name}", "another save")
        return not recheck or all(self._is(unit, *one) for one in expected.items())

    def _is(self, unit: ObjectKey, name: str, expected: Digest) -> bool:
        try:
            for _ in pieces_of(self.store_path(unit) / name, expected):
                pass
        except RestoreError:
            return False
        return True

    def add(
        self,
        unit: ObjectKey,
        info: SaveInfo,
        source: StorePath,
        expected: Mapping[str, Digest],
        *,
        reading: AbstractContextManager[None],
        workers: int,
        on_bytes: OnBytes,
    ) -> None:
        """See ``Directory``; claims the bucket if necessary."""
        if not self._is_claimed:
            if not self._journal.state().entry.number:
                refuse_foreign(self._root)
            buckets.probe(self._root)
            self._journal.claim()
            self._is_claimed = True
        prefix = self._journal.prefix(unit)
        on_sent = functools.partial(on_bytes, 0)
        try:
            with reading:
                put = upload(
                    source, expected, self._root / prefix, workers=workers, on_bytes=on_sent
                )
        except RestoreError:
            self._journal.abandon_upload(prefix)
            with contextlib.suppress(StorageError):  # It is swept later.
                self._journal.delete([prefix])
            raise
        self.publish(
            CatalogEntry.of(info, unit, prefix, stored_bytes=put.nbytes, crc32c=put.crc32c)
        )

    def publish(self, standing: CatalogEntry) -> None:
        """Commits an uploaded unit; one that is damaged is replaced."""
        # A base can exist without its step being copied.
        self._journal.commit(standing, alone=True, replace=True)


def _figures(digests: Mapping[str, Digest]) -> dict[str, tuple[int, int, int]]:
    """Values that identify a file's version."""
    return {name: digest[:3] for name, digest in digests.items()}
