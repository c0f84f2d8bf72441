# SPDX-License-Identifier: Apache-2.0
"""Digests of files, and verification of whole steps.

Array chunks and manifests carry their own checksums; the digests cover what does not, Orbax's
dense files above all (its data carries no checksum: a flipped bit restores silently), say which
files there must be, and tie every chunk to its place.

The CRC32C of bytes that end in their own CRC32C is a constant, whatever the bytes are: over whole
chunk files it would say nothing. A digest therefore holds the CRC32C of all bytes but the last
four, and the last four as they are.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from deltackpt.errors import Damaged, RestoreError, StorageError
from deltackpt.format import manifest, records
from deltackpt.format import names as layout
from deltackpt.format.manifest import ArrayEntry, Manifest
from deltackpt.storage import arrays, files
from deltackpt.storage.arrays import ChunkSums

_MAGIC = "deltackpt.digests"
#: Paths whose components are names, as ``soundness.is_name`` has it.
_INSIDE = re.compile(r"(?!/)(?:(?:^|/)(?!\.{1,2}(?:/|\Z))[^/\0]{1,255})+")
_READ_BYTES = 4 << 20
_TAIL_BYTES = 4
#: Of the path of a file below its directory, as an operating system has it.
_PATH_CHARACTERS = 4096
_READERS = 2
_CHUNK = re.compile(r"[^/]+/part\.\d+/[^/]+/[^/]+/c/[\d/]+")


class Digest(NamedTuple):
    """Digest of one file.

    Attributes:
      length: bytes of the file.
      crc32c: CRC32C of all bytes but the last four.
      tail: the last four bytes (fewer in a shorter file) as a little-endian number; of a chunk
        this is the chunk's own CRC32C.
      blocks: CRC32Cs of the blocks of a chunk; see ``arrays.ChunkSums``.
    """

    length: int
    crc32c: int
    tail: int
    blocks: bytes = b""


@dataclasses.dataclass(frozen=True)
class Digests:
    """Digests of files, by their posix path below some directory.

    Attributes:
      files: path to length, CRC32C and tail, as in ``Digest``.
      blocks: path to ``Digest.blocks``, of chunks that are not compressed.
      block_bytes: how many bytes of a chunk make a block.
    """

    files: dict[str, tuple[int, int, int]]
    blocks: dict[str, bytes] = dataclasses.field(default_factory=dict)
    block_bytes: int = arrays.BLOCK_BYTES

    @classmethod
    def of(cls, digests: Mapping[str, Digest]) -> Digests:
        """The digests of files by their path."""
        return cls(
            {name: (found.length, found.crc32c, found.tail) for name, found in digests.items()},
            {name: found.blocks for name, found in digests.items() if found.blocks},
        )

    def digest(self, name: str) -> Digest:
        """Digest of a file; without its blocks where they have another length than ours."""
        known = self.block_bytes == arrays.BLOCK_BYTES
        return Digest(*self.files[name], self.blocks.get(name, b"") if known else b"")

    def chunk(self, name: str) -> ChunkSums:
        """Checksums of a chunk."""
        found = self.digest(name)
        return ChunkSums(found.tail, found.blocks)


def digest_tree(
    directory: Path,
    *,
    below: Path | None = None,
    skip: Callable[[str], bool] = lambda name: False,
) -> dict[str, Digest]:
    """Digests of all files below a directory, read back, mostly from the page cache.

    Args:
      directory: what their paths are relative to.
      below: where to look; the whole directory where it is None.
      skip: whether a file or a folder, by its posix path below ``directory``, is left out.

    Raises:
      StorageError: a file cannot be read.
    """
    wanted = []
    for folder, folders, found in os.walk(below or directory):
        inside = Path(folder).relative_to(directory)
        folders[:] = [name for name in folders if not skip((inside / name).as_posix())]
        names = ((inside / name).as_posix() for name in found)
        wanted += [name for name in names if not skip(name)]
    wanted.sort()
    with concurrent.futures.ThreadPoolExecutor(_READERS, "deltackpt-digest") as pool:
        digests = pool.map(lambda name: digest_file(directory / name), wanted)
        return dict(zip(wanted, digests, strict=True))


def chunk_digests(
    below: str, entry: ArrayEntry, checksums: Mapping[str, ChunkSums]
) -> dict[str, Digest]:
    """Digests of the chunks that ``storage.arrays`` wrote, without reading them.

    Args:
      below: posix path of the array's directory.
      entry: what the array is.
      checksums: the chunks' paths below it and checksums.
    """
    length = arrays.chunk_bytes(entry)
    return {
        f"{below}/{name}": Digest(length, sums.crc32c, sums.crc32c, sums.blocks)
        for name, sums in checksums.items()
    }


def digests_bytes(digests: Digests) -> bytes:
    """Digests as a record."""
    return manifest.to_bytes(digests, _MAGIC)


def digests_from(data: bytes, *, name: str) -> Digests:
    """Digests from a record.

    Args:
      data: of ``digests_bytes``.
      name: how errors name it.

    Raises:
      Damaged: it is altered, none of digests, or names files outside of what it stands for.
    """
    found: Digests = manifest.from_bytes(data, Digests, name=name, magic=_MAGIC)
    for path in found.files:
        # A record may come from a store that others write to: no name leads out of the save.
        if len(path) > _PATH_CHARACTERS or _INSIDE.fullmatch(path) is None:
            raise Damaged(name, "paths of files below it", records.shown(path))
    for path, sums in found.blocks.items():
        if path not in found.files or found.block_bytes < 1:
            raise Damaged(name, "blocks of files that it knows", records.shown(path))
        nbytes = max(0, found.files[path][0] - _TAIL_BYTES)
        if len(sums) != (count := -(-nbytes // found.block_bytes)) * _TAIL_BYTES:
            raise Damaged(name, f"checksums of {count} blocks of {path}", f"{len(sums)} bytes")
    return found


def write_digests(path: Path, digests: Digests, *, fsync: bool) -> int:
    """Writes digests to a file; returns the CRC32C of its bytes."""
    data = digests_bytes(digests)
    files.write_atomic(path, data, fsync=fsync)
    return google_crc32c.value(data)


def read_digests(path: Path, *, crc32c: int | None = None) -> Digests:
    """Reads digests.

    Args:
      path: the file.
      crc32c: what the CRC32C of its bytes must be, where that is known.

    Raises:
      Damaged: the file is missing, altered, or that of another save.
    """
    name = files.object_name(path)
    data = files.read_bytes(path, name)
    if crc32c is not None and (found := google_crc32c.value(data)) != crc32c:
        raise Damaged(name, f"crc32c {crc32c:08x} as in the manifest", f"crc32c {found:08x}")
    return digests_from(data, name=name)


def read_item_digests(item_dir: Path, record: Manifest) -> Digests:
    """Digests of a process's part, as its manifest promises them."""
    path = item_dir / layout.digests_name(record.process)
    return read_digests(path, crc32c=record.item_digests_crc32c)


def check(directory: Path, digests: Digests, *, share: tuple[int, int] = (0, 1)) -> list[Damaged]:
    """What is missing, truncated or altered among the files of a directory.

    Args:
      directory: what the paths of the digests are relative to.
      digests: what the files should be.
      share: ``(i, n)`` checks the i-th of n parts of the files, nearly equal in bytes.
    """
    number, count = share
    by_size = sorted(digests.files, key=lambda name: (-digests.files[name][0], name))
    return check_files(directory, {name: digests.digest(name) for name in by_size[number::count]})


def check_files(
    directory: Path,
    expected: Mapping[str, Digest],
    *,
    shown: str | None = None,
    unreadable: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> list[Damaged]:
    """What is missing, truncated or altered among some files, in the order in which they come.

    Args:
      directory: what the paths are relative to.
      expected: posix path to what the file should be.
      shown: what errors call the directory; its name by default.
      unreadable: whether a file that cannot be read is damage; it is raised otherwise.
      on_bytes: called with bytes read, from several threads.

    Raises:
      StorageError: a file is there and cannot be read.
    """
    prefix = directory.name if shown is None else shown

    def problem(name: str) -> Damaged | None:
        try:
            return _problem(directory / name, f"{prefix}/{name}", expected[name], on_bytes)
        except StorageError as error:
            if not unreadable:
                raise
            return Damaged(f"{prefix}/{name}", "a file that can be read", str(error.__cause__))

    with concurrent.futures.ThreadPoolExecutor(_READERS, "deltackpt-digest") as pool:
        return [damage for damage in pool.map(problem, expected) if damage is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inventory:
    """What the records of a save say of its files.

    Attributes:
      files: posix path below the save's directory to digest, of each file that a record knows; the
        records themselves are among them.
      records: the manifests that can be read, that of process 0 first.
      damage: records that are missing, altered, or do not fit each other. The files that such a
        record knows are not in ``files``.
      scope: every file whose path begins so must be in ``files`` where no record is damaged.
    """

    files: dict[str, Digest]
    records: tuple[Manifest, ...]
    damage: tuple[Damaged, ...]
    scope: str


def inventory(
    step_dir: Path,
    item: str = layout.EMBEDDINGS_ITEM,
    *,
    shown: str | None = None,
    unreadable: bool = False,
) -> Inventory:
    """Reads the records of a step, or of a compacted base: manifests and digests.

    Args:
      step_dir: the step, or the folder ``compacted/<step>``.
      item: name of our item in it.
      shown: what errors call the directory; its name by default.
      unreadable: whether a record that cannot be read is damage; it is raised otherwise.

    Raises:
      StorageError: a record is there and cannot be read.
    """
    shown = step_dir.name if shown is None else shown
    return _Inventory(step_dir, item, shown, unreadable).read()


class _Inventory:
    """An inventory that is being put together."""

    def __init__(self, step_dir: Path, item: str, shown: str, unreadable: bool):
        self._dir = step_dir
        self._item = item
        self._shown = shown
        self._unreadable = unreadable
        self._files: dict[str, Digest] = {}
        self._records: list[Manifest] = []
        self._damage: list[Damaged] = []

    def read(self) -> Inventory:
        self._read_item()
        compacted = self._dir.parent.name == layout.COMPACTED
        promised = not compacted and (
            any("step" in record.digests for record in self._records)
            or (self._dir / layout.STEP_DIGESTS).exists()
        )
        if promised:
            self._read_step()
        # Where nothing was promised of the step, Orbax's own files stand in the item as well.
        inside = f"{self._item}/" if compacted else f"{self._item}/part."
        return Inventory(
            files=self._files,
            records=tuple(self._records),
            damage=tuple(self._damage),
            scope="" if promised else inside,
        )

    def _read_item(self) -> None:
        head = self._manifest(0, None)
        for part in head.parts if head is not None else ():
            if part.process:
                self._manifest(part.process, part.crc32c)

    def _manifest(self, process: int, crc32c: int | None) -> Manifest | None:
        """Reads what a process wrote; None where its manifest cannot be read."""
        name = f"{self._item}/{layout.manifest_name(process)}"
        head = f"{self._item}/{layout.manifest_name(0)}"
        record: Manifest | None = self._record(name, manifest.from_bytes, crc32c, head)
        if record is not None:
            self._records.append(record)
            said_by, name = name, f"{self._item}/{layout.digests_name(process)}"
            digests = self._digests(name, record.item_digests_crc32c, said_by)
            for path in digests.files:
                self._add(f"{self._item}/{path}", digests.digest(path), name)
        return record

    def _read_step(self) -> None:
        names = [layout.STEP_DIGESTS]
        read: set[str] = set()
        while names:
            name = names.pop()
            read.add(name)
            digests = self._digests(name)
            for path in digests.files:
                if layout.step_digests_process(path) is not None and path not in read:
                    names.append(path)
                self._add(path, digests.digest(path), name)

    def _digests(self, name: str, crc32c: int | None = None, said_by: str = "") -> Digests:
        found: Digests | None = self._record(name, digests_from, crc32c, said_by)
        return found if found is not None else Digests({})

    def _record(
        self, name: str, parse: Callable[..., Any], crc32c: int | None, said_by: str
    ) -> Any:
        """Reads and checks a record; None where it is missing, altered or another one."""
        shown = f"{self._shown}/{name}"
        try:
            data = files.read_bytes(self._dir / name, shown)
            if crc32c is not None and (found := google_crc32c.value(data)) != crc32c:
                expected = f"crc32c {crc32c:08x} as {self._shown}/{said_by} says"
                raise Damaged(shown, expected, f"crc32c {found:08x}")
            record = parse(data, name=shown)
        except Damaged as error:
            self._damage.append(error)
            return None
        except StorageError as error:
            if not self._unreadable:
                raise
            self._damage.append(Damaged(shown, "a file that can be read", str(error.__cause__)))
            return None
        except RestoreError as error:
            self._damage.append(Damaged(shown, "a record that this deltackpt knows", str(error)))
            return None
        self._add(name, digest_bytes(data), name)
        return record

    def _add(self, name: str, digest: Digest, said_by: str) -> None:
        """Notes what a file should be; a record that was read before stays as it was read."""
        known = self._files.setdefault(name, digest)
        if known[:3] != digest[:3]:
            self._damage.append(
                Damaged(
                    f"{self._shown}/{name}",
                    f"{_figures(digest)} as {self._shown}/{said_by} says",
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


def verify_step(step_dir: Path, item: str = layout.EMBEDDINGS_ITEM) -> list[Damaged]:
    """Re-reads a whole step: its records, and every file that they know.

    Args:
      step_dir: the step.
      item: name of our item in it.
    """
    found = inventory(step_dir, item)
    return [*found.damage, *check_files(step_dir, found.files)]


def check_step_files(
    step_dir: Path,
    share: tuple[int, int] = (0, 1),
    *,
    wanted: Callable[[str], bool] = lambda name: True,
) -> list[Damaged]:
    """What is wrong with the files of a step that its own digests cover, dense ones included.

    Args:
      step_dir: the step.
      share: as for ``check``.
      wanted: whether a file, by its posix path below the step, is to be checked.
    """
    number, count = share

    def chosen(digests: Digests) -> Digests:
        def is_chosen(name: str) -> bool:
            return wanted(name) or layout.step_digests_process(name) is not None

        return Digests({name: of for name, of in digests.files.items() if is_chosen(name)})

    try:
        digests = read_digests(step_dir / layout.STEP_DIGESTS)
        damage = check(step_dir, chosen(digests), share=share)
        for name in digests.files:
            process = layout.step_digests_process(name)
            if process is not None and process % count == number:
                damage += check(step_dir, chosen(read_digests(step_dir / name)))
    except Damaged as error:
        return [error]
    return damage


def digest_file(
    path: Path, *, blocks: bool = False, on_bytes: Callable[[int], None] = lambda count: None
) -> Digest:
    """Digest of a file.

    Args:
      path: the file.
      blocks: whether those of its blocks are wanted, as of an uncompressed chunk.
      on_bytes: called with bytes read.

    Raises:
      StorageError: it cannot be read.
    """
    crc, tail, found = 0, b"", []
    buffer = np.empty(_READ_BYTES, np.uint8)
    with files.typed_errors(path, "read"), open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        left = max(0, length - _TAIL_BYTES)
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)].data)):
            crc = arrays.crc32c(buffer[:count], crc)
            if blocks:
                starts = range(0, count, arrays.BLOCK_BYTES)
                ends = (min(start + arrays.BLOCK_BYTES, count) for start in starts)
                found += [arrays.crc32c(buffer[start:end]) for start, end in zip(starts, ends)]
            left -= count
            on_bytes(count)
        tail = file.read()
        on_bytes(len(tail))
    return Digest(length, crc, int.from_bytes(tail, "little"), np.array(found, "<u4").tobytes())


def digest_bytes(data: bytes) -> Digest:
    """Digest of a file with such contents."""
    body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    return Digest(len(data), google_crc32c.value(body), int.from_bytes(tail, "little"))


def _is_chunk(name: str) -> bool:
    """Whether a path in a step is that of a chunk of one of our arrays."""
    return _CHUNK.fullmatch(name) is not None


def _figures(digest: Digest) -> str:
    return f"{digest.length} bytes, crc32c {digest.crc32c:08x}, tail {digest.tail:08x}"


def _problem(
    path: Path, shown: str, wanted: Digest, on_bytes: Callable[[int], None]
) -> Damaged | None:
    try:
        # The longest of files is no reason to read it where it should be shorter.
        if (length := files.length(path, shown)) != wanted.length:
            return Damaged(shown, f"{wanted.length} bytes", f"{length} bytes")
        found = digest_file(path, blocks=bool(wanted.blocks), on_bytes=on_bytes)
    except Damaged as error:
        return error
    except StorageError as error:
        if path.is_file():
            raise
        return Damaged(shown, "a file", f"no such file ({error.__cause__})")
    if found.length != wanted.length:
        return Damaged(shown, f"{wanted.length} bytes", f"{found.length} bytes")
    if found[:3] != wanted[:3]:
        return Damaged(
            shown,
            f"crc32c {wanted.crc32c:08x}, tail {wanted.tail:08x}",
            f"crc32c {found.crc32c:08x}, tail {found.tail:08x}",
        )
    if found.blocks != wanted.blocks:
        return Damaged(shown, "the checksums of its blocks as its digests say", "others")
    return None
