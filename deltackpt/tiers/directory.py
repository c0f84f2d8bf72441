# SPDX-License-Identifier: Apache-2.0
"""A directory as a copy source or target."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from deltackpt.errors import (
    Damaged,
    OutOfSpace,
    RestoreError,
    StorageError,
)
from deltackpt.format import names
from deltackpt.format.chain import SaveInfo
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import Unit
from deltackpt.ledger.lease import epochs
from deltackpt.reading import inventory, saves
from deltackpt.resources.runtime import Runtime
from deltackpt.storage import digests, files
from deltackpt.storage.digests import Digest
from deltackpt.storage.posix import DirectFile, DurableDir, fsync_tree
from deltackpt.storage.store import StorePath, store_path
from deltackpt.tiers.places import (
    PIECE_BYTES,
    Write,
    differs,
    digests_bytes,
    head_name,
    pieces_of,
)
from deltackpt.upkeep import collect

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
        self._held.enter_context(collect.exclusive(self._path))
        return self

    def __exit__(self, *error: object) -> None:
        """Releases the lock; leaves nothing behind unless the copy was interrupted."""
        self._held.close()

    def steps(self) -> list[int]:
        """See ``Place``."""
        return Root.open(self._path, read_only=True).steps()

    def in_use(self) -> str | None:
        """See ``Place``; without a lease no trainer ever used the directory."""
        opened = Root.open(self._path, read_only=True)
        return collect.in_use(opened) if any(epochs(self._path)) else None

    def store_path(self, unit: Unit) -> StorePath:
        """See ``Place``."""
        return store_path(self._folder(unit))

    def info(self, unit: Unit) -> SaveInfo | None:
        """See ``Place``."""
        step_dir, folder = self._path / str(unit.step), self._folder(unit)
        if not folder.is_dir():
            return None
        try:
            if unit.item is None:
                return saves.read_save(step_dir, self.item).info
            return saves.read_base(step_dir, unit.item).info
        except RestoreError:
            if not folder.is_dir():  # The unit was removed concurrently.
                return None
            raise

    def digests(self, unit: Unit) -> dict[str, Digest]:
        """See ``Place``."""
        is_base = unit.item is not None
        return inventory.every_digest(self.store_path(unit), unit.item or self.item, base=is_base)

    def holds(self, unit: Unit, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """See ``Place``."""
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

    @contextlib.contextmanager
    def writing(
        self, unit: Unit, info: SaveInfo, expected: Mapping[str, Digest]
    ) -> Iterator[Write]:
        """See ``Place``; an interrupted copy is continued."""
        staged = self._staged(unit)
        self._dir.make(staged)
        needed = digests_bytes(expected) - files.tree_bytes(staged)
        if files.free_bytes(staged) < needed:
            raise OutOfSpace(
                f"{self.name}: expected room for {needed:,} bytes of {unit.name}, found "
                f"{files.free_bytes(staged):,} free; make room, then copy again"
            )

        def write(source: StorePath, workers: int, on_bytes: Callable[[int, int], None]) -> None:
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

            with Runtime(workers, memory_bytes=_MEMORY_BYTES) as runtime:
                runtime.map(
                    copy, expected, cost=lambda name: min(expected[name].length, PIECE_BYTES)
                )

        try:
            yield write
        except Damaged:
            self._dir.remove(staged)
            raise
        self.publish(unit, expected)

    def _has_written(self, unit: Unit, name: str, expected: Digest) -> bool:
        path = self._staged(unit) / name
        return path.is_file() and digests.digest_file(path)[:3] == expected[:3]

    def write(self, unit: Unit, name: str, pieces: Iterable[bytes | bytearray]) -> None:
        """Writes a file of an incomplete unit.

        It does not follow links, which could overwrite another file.
        """
        path = self._staged(unit) / name
        with files.typed_errors(path, "write"), self._dir.opened(path.parent, make=True) as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
            file = DirectFile(path, folder=folder, name=path.name)
            with contextlib.closing(file):
                for piece in pieces:
                    file.append(np.frombuffer(piece, np.uint8))
                file.sync()

    def publish(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """Makes a unit visible; nothing is removed before everything is durable."""
        staged, final = self._staged(unit), self._folder(unit)
        with files.typed_errors(final, "be published"), self._dir.opened(staged) as top:
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

    def _folder(self, unit: Unit) -> Path:
        return self._path / unit.name

    def _staged(self, unit: Unit) -> Path:
        return self._path / names.COPYING / unit.name.replace("/", ".")

    def _aside(self, unit: Unit) -> Path:
        """Folder of a damaged unit while it is being replaced; trainers do not empty it."""
        return self._path / names.COPYING / "replaced" / unit.name.replace("/", ".")

    def _require_same(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """Checks that the entry with a unit's name is the same save, intact or damaged."""
        head = head_name(unit, self.item)
        try:
            data = files.read_bytes(self._folder(unit) / head)
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
