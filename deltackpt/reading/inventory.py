# SPDX-License-Identifier: Apache-2.0
"""The files that the records of a save name, and their digests."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import google_crc32c

from deltackpt.errors import Damaged, RestoreError, StorageError
from deltackpt.format import manifest, naming
from deltackpt.format.manifest import LayerRef, Manifest
from deltackpt.storage import digests
from deltackpt.storage.digests import Digest
from deltackpt.storage.store import StorePath, store_path

_Record = TypeVar("_Record")

_CHUNK = re.compile(r"[^/]+/shard\.\d+/[^/]+/[^/]+/c\.[\d.]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inventory:
    """What the records of a save claim about its files.

    ``files`` has the digest of each file that a record names, and of the records, by path below the
    save's directory. ``records`` are the readable manifests, process 0's first. ``damage`` are
    missing, altered or inconsistent records, whose files are not in ``files``. If there are none,
    every file whose path begins with ``scope`` must be in ``files``.
    """

    files: dict[str, Digest]
    records: tuple[Manifest, ...]
    damage: tuple[Damaged, ...]
    scope: str


def read_inventory(
    step_dir: StorePath | Path,
    item: str = naming.EMBEDDINGS_ITEM,
    *,
    shown: str | None = None,
    unreadable: bool = False,
) -> Inventory:
    """Reads the manifests and digests of a step, or of a compacted base (``compacted/<step>``).

    ``shown`` is the directory's name in errors. An ``unreadable`` record counts as damage;
    otherwise it raises StorageError.
    """
    at = store_path(step_dir)
    return _Inventory(at, item, at.name if shown is None else shown, unreadable).read()


def every_digest(folder: StorePath, item: str, *, base: bool = False) -> dict[str, Digest]:
    """Returns digests of all files of a step, or of ``compacted/<step>/<item>``, by path below it.

    Files that no record names, as in a step that another manager committed, are read to compute
    their digest. Raises Damaged if a record is missing or altered.
    """
    shown = f"{naming.COMPACTED}/{folder.parent.name}/{item}" if base else None
    found = read_inventory(folder.parent if base else folder, item, shown=shown)
    for damage in found.damage:
        raise damage
    if base:
        below = f"{item}/"
        return {name.removeprefix(below): digest for name, digest in found.files.items()}
    known = dict(found.files)
    if found.scope:
        # Orbax's files have no digests but what they are now.
        known = {**digests.digest_tree(Path(folder), skip=known.__contains__), **known}
    return known


def only_at(folder: StorePath, item: str, process: int) -> dict[str, Digest]:
    """Returns digests of the files of a step that only one process's staging directory has.

    The process is not 0, which has all files that describe the step.
    """
    own = folder / item / naming.manifest_name(process)
    step = folder / naming.step_digests_name(process)
    known = _digests_of(folder / item, manifest.from_bytes(own.read(), name=own.shown()))
    files = {f"{item}/{path}": digest for path, digest in known.items()}
    if not step.is_file():  # It has only its shard.
        return files
    found = digests.read_digests(step)
    return files | {path: of for path, of in found.items() if not naming.is_dense_node(path)}


class _Inventory:
    def __init__(self, step_dir: StorePath, item: str, shown: str, unreadable: bool):
        self._dir = step_dir
        self._item = item
        self._shown = shown
        self._unreadable = unreadable
        self._files: dict[str, Digest] = {}
        self._records: list[Manifest] = []
        self._damage: list[Damaged] = []

    def read(self) -> Inventory:
        head = self._manifest(0, None)
        for shard in head.shards if head is not None else ():
            if shard.process:
                self._manifest(shard.process, shard.crc32c)
        compacted = self._dir.parent.name == naming.COMPACTED
        promised = not compacted and (
            any("step" in record.digests for record in self._records) or self._has_step_digests()
        )
        if promised:
            self._read_step(head)
        # If the commit promised no digests, Orbax's own files are in the item as well.
        inside = f"{self._item}/" if compacted else f"{self._item}/shard."
        return Inventory(
            files=self._files,
            records=tuple(self._records),
            damage=tuple(self._damage),
            scope="" if promised else inside,
        )

    def _has_step_digests(self) -> bool:
        try:
            return (self._dir / naming.STEP_DIGESTS).exists()
        except Damaged:
            return False  # In a bucket this is unknown; the manifest's error was reported.

    def _manifest(self, process: int, crc32c: int | None) -> Manifest | None:
        """Reads what a process wrote; None if its manifest cannot be read."""
        name = f"{self._item}/{naming.manifest_name(process)}"
        head = f"{self._item}/{naming.manifest_name(0)}"
        record: Manifest | None = self._record(name, manifest.from_bytes, crc32c, head)
        if record is not None:
            self._records.append(record)
            if record.layer is not None:
                path = f"{self._item}/{naming.layer_name(process)}"
                self._add(path, _digest_of(record.layer), name)
                return record
            said_by, name = name, f"{self._item}/{naming.digests_name(process)}"
            known = self._digests(name, record.item_digests_crc32c, said_by)
            for path, digest in known.items():
                self._add(f"{self._item}/{path}", digest, name)
        return record

    def _read_step(self, head: Manifest | None) -> None:
        files = {} if head is None else head.files
        for path, digest in files.items():
            self._add(path, Digest(*digest), f"{self._item}/{naming.manifest_name(0)}")
        pending = [name for name in files if naming.step_digests_process(name) is not None]
        pending = pending if files else [naming.STEP_DIGESTS]
        read: set[str] = set()
        while pending:
            name = pending.pop()
            read.add(name)
            known = self._digests(name)
            for path, digest in known.items():
                if naming.step_digests_process(path) is not None and path not in read:
                    pending.append(path)
                self._add(path, digest, name)

    def _digests(
        self, name: str, crc32c: int | None = None, said_by: str = ""
    ) -> dict[str, Digest]:
        return self._record(name, digests.digests_from, crc32c, said_by) or {}

    def _record(
        self, name: str, parse: Callable[..., _Record], crc32c: int | None, said_by: str
    ) -> _Record | None:
        """Reads and checks a record; None if it is missing, altered or another one."""
        shown = f"{self._shown}/{name}"
        try:
            data = (self._dir / name).read(shown)
            if crc32c is not None and (found := google_crc32c.value(data)) != crc32c:
                expected = f"crc32c {crc32c:08x} as in {self._shown}/{said_by}"
                raise Damaged(shown, expected, f"crc32c {found:08x}")
            record = parse(data, name=shown)
        except Damaged as error:
            self._damage.append(error)
            return None
        except StorageError as error:
            if not self._unreadable:
                raise
            self._damage.append(Damaged(shown, "a readable file", str(error.__cause__)))
            return None
        except RestoreError as error:
            self._damage.append(Damaged(shown, "a record that this deltackpt can read", str(error)))
            return None
        self._add(name, digests.digest_bytes(data), name)
        return record

    def _add(self, name: str, digest: Digest, said_by: str) -> None:
        """Adds the digest of a file; a record that was already read keeps its own."""
        known = self._files.setdefault(name, digest)
        if known[:3] != digest[:3]:
            self._damage.append(
                Damaged(
                    f"{self._shown}/{name}",
                    f"{_figures(digest)} as in {self._shown}/{said_by}",
                    _figures(known),
                )
            )
        if _is_chunk(name) and digest.crc32c != digest.tail:
            self._damage.append(
                Damaged(
                    f"{self._shown}/{name}",
                    f"a chunk that ends in its crc32c {digest.crc32c:08x}",
                    f"crc32c {digest.tail:08x} at its end",
                )
            )


def _digests_of(item_dir: StorePath, record: Manifest) -> dict[str, Digest]:
    """Digests of the files with a shard's arrays, by path below the item's directory."""
    if record.layer is not None:
        return {naming.layer_name(record.process): _digest_of(record.layer)}
    return digests.read_item_digests(item_dir, record)


def _digest_of(layer: LayerRef) -> Digest:
    return Digest(layer.nbytes, layer.crc32c, layer.digest)


def verify_step(step_dir: StorePath | Path, item: str = naming.EMBEDDINGS_ITEM) -> list[Damaged]:
    """Re-reads a whole step, its records and every file that they name; returns the damage."""
    found = read_inventory(step_dir, item)
    return [*found.damage, *digests.check_files(step_dir, found.files)]


def _is_chunk(name: str) -> bool:
    return _CHUNK.fullmatch(name) is not None


def _figures(digest: Digest) -> str:
    return f"{digest.length} bytes, crc32c {digest.crc32c:08x}, tail {digest.tail:08x}"
