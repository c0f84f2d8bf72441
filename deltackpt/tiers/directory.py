# SPDX-License-Identifier: Apache-2.0
"""A directory as a place of copies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

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
from deltackpt.storage import digests, files
from deltackpt.storage.digests import Digest
from deltackpt.storage.store import Spot, spot
from deltackpt.tiers.places import (
    differs,
    digests_bytes,
    head_name,
    length,
)
from deltackpt.upkeep import collect


class Directory:
    """Units in a directory: a checkpoint root, or one that will be."""

    def __init__(self, path: Path, item: str):
        self.name = str(path)
        self._path = path
        self.item = item
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Directory:
        """Holds the directory against other copies to it, and against collections of it."""
        if self._path.is_dir():
            # Before anything is made there: it may be another's.
            Root.open(self._path, read_only=True).close()
        self._held.enter_context(collect.exclusive(self._path))
        return self

    def __exit__(self, *error: object) -> None:
        """Lets go of it; nothing is left where nothing was cut."""
        self._held.close()

    def steps(self) -> list[int]:
        """See ``Place``."""
        return Root.open(self._path, read_only=True).steps()

    def in_use(self) -> str | None:
        """See ``Place``; without a lease no trainer was ever there."""
        opened = Root.open(self._path, read_only=True)
        return collect.in_use(opened) if any(epochs(self._path)) else None

    def spot(self, unit: Unit) -> Spot:
        """See ``Place``."""
        return spot(self._folder(unit))

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
            if not folder.is_dir():  # It was removed meanwhile.
                return None
            raise

    def digests(self, unit: Unit) -> dict[str, Digest]:
        """See ``Place``."""
        is_base = unit.item is not None
        return inventory.every_digest(self.spot(unit), unit.item or self.item, base=is_base)

    def read(self, unit: Unit, name: str) -> bytes:
        """See ``Place``."""
        shown = f"{self.name}/{unit.name}/{name}"
        return files.read_bytes(self._folder(unit) / name, shown, most_bytes=None)

    def holds(self, unit: Unit, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """See ``Place``."""
        folder, aside = self._folder(unit), self._aside(unit)
        if not os.path.lexists(folder):
            if aside.is_dir():  # A copy was cut while it replaced it.
                files.rename(aside, folder, fsync=True)
            else:
                return False
        self._require_same(unit, expected)
        if any(length(folder / name) != digest.length for name, digest in expected.items()):
            return False
        records = {name: digest for name, digest in expected.items() if name.endswith(".msgpack")}
        return not digests.check_files(folder, expected if recheck else records)

    def begin(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """See ``Place``."""
        staged = self._staged(unit)
        with files.typed_errors(staged, "make a directory"):
            staged.mkdir(parents=True, exist_ok=True)
            needed = digests_bytes(expected) - files.tree_bytes(staged)
        if files.free_bytes(staged) < needed:
            raise OutOfSpace(
                f"{self.name}: expected room for {needed:,} bytes of {unit.name}, found "
                f"{files.free_bytes(staged):,} free; free space, then copy again"
            )

    def discard(self, unit: Unit) -> None:
        """See ``Place``."""
        files.remove_tree(self._staged(unit))

    def written(self, unit: Unit, name: str, expected: Digest) -> bool:
        """See ``Place``."""
        path = self._staged(unit) / name
        return path.is_file() and digests.digest_file(path)[:3] == expected[:3]

    def write(self, unit: Unit, name: str, data: bytes) -> None:
        """See ``Place``."""
        path = self._staged(unit) / name
        with files.typed_errors(path, "write"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def publish(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """See ``Place``."""
        staged, final = self._staged(unit), self._folder(unit)
        with files.typed_errors(final, "be published"):
            for path in staged.rglob("*"):
                if path.is_file() and path.relative_to(staged).as_posix() not in expected:
                    path.unlink()  # Of another attempt.
            files.fsync_tree(staged, folders_only=True)
            missing = [folder for folder in final.parents if not folder.exists()]
            final.parent.mkdir(parents=True, exist_ok=True)
            for folder in missing:
                files.fsync_path(folder.parent)
        missing = [name for name, of in expected.items() if length(staged / name) != of.length]
        if missing:
            raise StorageError(
                f"{staged}: expected every file that was written, found {missing[0]} removed; end "
                "what removes files there, then copy again"
            )
        if not os.path.lexists(final):
            files.rename(staged, final, fsync=True)
            return
        self._require_same(unit, expected)  # It is damaged: what mends it takes its place.
        aside = self._aside(unit)
        with files.typed_errors(aside, "make a directory"):
            files.remove_tree(aside)
            aside.parent.mkdir(parents=True, exist_ok=True)
        files.rename(final, aside, fsync=True)
        try:
            files.rename(staged, final, fsync=True)
        except BaseException:
            if not os.path.lexists(final):
                files.rename(aside, final, fsync=True)
            raise
        files.remove_tree(aside)
        with contextlib.suppress(OSError):
            aside.parent.rmdir()

    def _folder(self, unit: Unit) -> Path:
        return self._path / unit.name

    def _staged(self, unit: Unit) -> Path:
        return self._path / names.COPYING / unit.name.replace("/", ".")

    def _aside(self, unit: Unit) -> Path:
        """Where a damaged unit is while another takes its place; no trainer empties it."""
        return self._path / names.COPYING / "replaced" / unit.name.replace("/", ".")

    def _require_same(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """Checks that what has the name of a unit is the same save, whole or damaged."""
        head = head_name(unit, self.item)
        try:
            data = files.read_bytes(self._folder(unit) / head)
        except Damaged as error:
            raise differs(f"{self.name}/{unit.name}", f"no {head}") from error
        if digests.digest_bytes(data)[:3] != expected[head][:3]:
            raise differs(f"{self.name}/{unit.name}", f"another save, or damage, in {head}")
