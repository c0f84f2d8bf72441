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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from deltackpt import layout, manifest
from deltackpt.errors import Damaged, RestoreError, StorageError
from deltackpt.manifest import ArrayEntry, Manifest
from deltackpt.storage import arrays, files
from deltackpt.storage.arrays import ChunkSums

_MAGIC = "deltackpt.digests"
_READ_BYTES = 4 << 20
_TAIL_BYTES = 4
_READERS = 2


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

    def chunk(self, name: str) -> ChunkSums:
        """Checksums of a chunk."""
        known = self.block_bytes == arrays.BLOCK_BYTES
        return ChunkSums(self.files[name][2], self.blocks.get(name, b"") if known else b"")


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
        digests = pool.map(lambda name: _digest(directory / name), wanted)
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


def write_digests(path: Path, digests: Digests, *, fsync: bool) -> int:
    """Writes digests to a file; returns the CRC32C of its bytes."""
    data = manifest.to_bytes(digests, _MAGIC)
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
    return manifest.from_bytes(data, Digests, name=name, magic=_MAGIC)


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
    wanted = by_size[number::count]
    with concurrent.futures.ThreadPoolExecutor(_READERS, "deltackpt-digest") as pool:
        found = pool.map(lambda name: _problem(directory, name, digests.files[name]), wanted)
        return [damage for damage in found if damage is not None]


def verify_step(step_dir: Path, item: str = layout.EMBEDDINGS_ITEM) -> list[Damaged]:
    """Re-reads a whole step: manifests, and every file that its digests promise.

    Args:
      step_dir: the step.
      item: name of our item in it.
    """
    damage: list[Damaged] = []
    item_dir = step_dir / item
    promised: set[str] = set()
    crcs: dict[int, int | None] = {0: None}
    while crcs:
        process, crc32c = crcs.popitem()
        name = layout.manifest_name(process)
        try:
            data = files.read_bytes(item_dir / name)
            if crc32c is not None and (found := google_crc32c.value(data)) != crc32c:
                raise Damaged(
                    files.object_name(item_dir / name), f"crc32c {crc32c:08x}", f"{found:08x}"
                )
            record = manifest.from_bytes(data, name=files.object_name(item_dir / name))
            promised |= set(record.digests)
            if process == 0:
                crcs = {part.process: part.crc32c for part in record.parts if part.process}
            damage += check(item_dir, read_item_digests(item_dir, record))
        except Damaged as error:
            damage.append(error)
        except RestoreError as error:
            damage.append(Damaged(f"{step_dir.name}/{item}/{name}", "a manifest", str(error)))
    if "step" in promised or (step_dir / layout.STEP_DIGESTS).exists():
        damage += check_step_files(step_dir)
    return damage


def check_step_files(step_dir: Path, share: tuple[int, int] = (0, 1)) -> list[Damaged]:
    """What is wrong with the files of a step that its own digests cover, dense ones included.

    Args:
      step_dir: the step.
      share: as for ``check``.
    """
    number, count = share
    try:
        digests = read_digests(step_dir / layout.STEP_DIGESTS)
        damage = check(step_dir, digests, share=share)
        for name in digests.files:
            process = layout.step_digests_process(name)
            if process is not None and process % count == number:
                damage += check(step_dir, read_digests(step_dir / name))
    except Damaged as error:
        return [error]
    return damage


def _digest(path: Path) -> Digest:
    crc, tail = 0, b""
    buffer = np.empty(_READ_BYTES, np.uint8)
    with files.typed_errors(path, "read"), open(path, "rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        left = max(0, length - _TAIL_BYTES)
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)].data)):
            crc = arrays.crc32c(buffer[:count], crc)
            left -= count
        tail = file.read()
    return Digest(length, crc, int.from_bytes(tail, "little"))


def _problem(directory: Path, name: str, expected: tuple[int, int, int]) -> Damaged | None:
    path = directory / name
    shown = f"{directory.name}/{name}"
    try:
        found = _digest(path)
    except StorageError as error:
        if path.exists():
            raise
        return Damaged(shown, "a file", f"no such file ({error.__cause__})")
    wanted = Digest(*expected)
    if found.length != wanted.length:
        return Damaged(shown, f"{wanted.length} bytes", f"{found.length} bytes")
    if found != wanted:
        return Damaged(
            shown,
            f"crc32c {wanted.crc32c:08x}, tail {wanted.tail:08x}",
            f"crc32c {found.crc32c:08x}, tail {found.tail:08x}",
        )
    return None
