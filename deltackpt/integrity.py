# SPDX-License-Identifier: Apache-2.0
"""Digests of files, and verification of whole steps.

Array chunks and manifests carry their own checksums; the digests cover what does not, Orbax's
dense files above all (its data carries no checksum: a flipped bit restores silently), and say
which files there must be.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Collection
from pathlib import Path

import numpy as np

from deltackpt import layout, manifest
from deltackpt.errors import Damaged, RestoreError, StorageError
from deltackpt.storage import arrays, files

_MAGIC = "deltackpt.digests"
_READ_BYTES = 4 << 20
_READERS = 2


@dataclasses.dataclass(frozen=True)
class Digests:
    """Length and CRC32C of files, by their posix path below some directory."""

    files: dict[str, tuple[int, int]]


def digest_tree(directory: Path, *, skip: Collection[str] = ()) -> Digests:
    """Digests of all files below a directory, read back from the page cache.

    Args:
      directory: where to look.
      skip: posix paths below ``directory`` that are left out.

    Raises:
      StorageError: a file cannot be read.
    """
    names = []
    for folder, _, found in os.walk(directory):
        names += [Path(folder, name).relative_to(directory).as_posix() for name in found]
    wanted = sorted(set(names) - set(skip))
    with concurrent.futures.ThreadPoolExecutor(_READERS, "deltackpt-digest") as pool:
        digests = pool.map(lambda name: _digest(directory / name), wanted)
        return Digests(dict(zip(wanted, digests, strict=True)))


def write_digests(path: Path, digests: Digests, *, fsync: bool) -> None:
    """Writes digests to a file."""
    files.write_atomic(path, manifest.to_bytes(digests, _MAGIC), fsync=fsync)


def read_digests(path: Path) -> Digests:
    """Reads digests.

    Raises:
      Damaged: the file is missing or altered.
    """
    name = files.object_name(path)
    return manifest.from_bytes(
        files.read_bytes(path, name), Digests, name=name, magic=_MAGIC
    )


def check(directory: Path, digests: Digests, *, below: str = "") -> list[Damaged]:
    """What is missing, truncated or altered among the files of a directory.

    Args:
      directory: what the paths of the digests are relative to.
      digests: what the files should be.
      below: check only files whose path starts so.
    """
    wanted = [name for name in digests.files if name.startswith(below)]
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
    names = sorted(path.name for path in item_dir.glob("manifest.*.msgpack"))
    promised: set[str] = set()
    for name in names or [layout.manifest_name(0)]:
        try:
            data = files.read_bytes(item_dir / name)
            record = manifest.from_bytes(data, name=files.object_name(item_dir / name))
            promised |= set(record.digests)
            digests = read_digests(item_dir / layout.digests_name(record.process))
            damage += check(item_dir, digests)
        except Damaged as error:
            damage.append(error)
        except RestoreError as error:
            damage.append(Damaged(f"{step_dir.name}/{item}/{name}", "a manifest", str(error)))
    if "step" in promised or (step_dir / layout.STEP_DIGESTS).exists():
        damage += check_step_files(step_dir)
    return damage


def check_step_files(step_dir: Path) -> list[Damaged]:
    """What is wrong with the files of a step that its own digests cover, dense ones included."""
    try:
        return check(step_dir, read_digests(step_dir / layout.STEP_DIGESTS))
    except Damaged as error:
        return [error]


def _digest(path: Path) -> tuple[int, int]:
    length, crc = 0, 0
    buffer = np.empty(_READ_BYTES, np.uint8)
    with files.typed_errors(path, "read"), open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer.data):
            crc = arrays.crc32c(buffer[:count], crc)
            length += count
    return length, crc


def _problem(directory: Path, name: str, expected: tuple[int, int]) -> Damaged | None:
    path = directory / name
    shown = f"{directory.name}/{name}"
    try:
        length, crc = _digest(path)
    except StorageError as error:
        if path.exists():
            raise
        return Damaged(shown, "a file", f"no such file ({error.__cause__})")
    if length != expected[0]:
        return Damaged(shown, f"{expected[0]} bytes", f"{length} bytes")
    if crc != expected[1]:
        return Damaged(shown, f"crc32c {expected[1]:08x}", f"crc32c {crc:08x}")
    return None
