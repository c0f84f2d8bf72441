# SPDX-License-Identifier: Apache-2.0
"""Makes 10 MB durable: as an extent, as a new directory, as a new file, and in place.

All variants take the same bytes from memory and end when these are on disk, which is otherwise idle
or has another writer. The reference is a directory of 20 files, with an fsync of each file and of
the directory; a save fsyncs them together in threads. The limit is one write past the page cache,
from aligned memory, into an existing file: no checksum, no copy. CPU is that of this process.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fresh
import numpy as np
import report as reports
import ways
from report import Figures, Report, count, interleaved, metered

from deltackpt.resources.host_memory import aligned_buffer
from deltackpt.resources.runtime import FSYNCS, Runtime
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import crc32c
from deltackpt.tiers.bundles import BundleRef
from deltackpt.tiers.extent_store import ExtentFile

NBYTES = 10_000_000
_FILES = 20
_BAR = 1 / 3
_EXTENT, _REFERENCE = "an extent", f"a new directory of {_FILES} files"
_WHEN = ("alone", "beside another process")
_BLOCK_BYTES = 4096


class _Pack:
    """Bytes in memory, as a bundle."""

    def __init__(self, key: str, data: np.ndarray, crc: int):
        self._data = data
        self.ref = BundleRef(key, len(data), crc)

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self._data[start : start + len(out)].data


def disturb(folder: str) -> None:
    """Writes and fsyncs 4 MB files until it is killed; in a process of its own."""
    data, number = os.urandom(4 << 20), 0
    fresh.say("ready")
    while True:
        with open(Path(folder, str(number % 8)), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        number += 1


def measure(folder: Path, nbytes: int, repeats: int) -> Figures:
    """Makes bytes durable in all ways, in turn."""
    folder.mkdir()
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    crc = crc32c(data)
    pieces = np.array_split(data, _FILES)
    numbers = iter(range(1 << 30))
    new, file = folder / "new", folder / "file"
    extent_bytes = max(64 << 20, -(-2 * nbytes // _BLOCK_BYTES) * _BLOCK_BYTES)
    held = ExtentFile(folder / "extents", nbytes=6 * extent_bytes, extent_bytes=extent_bytes)
    aligned = aligned_buffer(nbytes)
    aligned[:nbytes] = data
    place = folder / "place"
    place.write_bytes(bytes(len(aligned)))
    descriptor = os.open(place, os.O_WRONLY | (os.O_DIRECT if held.direct else 0))
    os.fsync(descriptor)

    def as_extent() -> None:
        held.put(_Pack(f"save.{next(numbers)}", data, crc))

    def as_directory() -> None:
        new.mkdir()
        for number, piece in enumerate(pieces):
            _write(new / str(number), piece)
        ways.fsync(new)
        ways.fsync(folder)

    def as_save() -> None:
        new.mkdir()
        batch = FileBatch(new, fsync=True, runtime=runtime)
        for number, piece in enumerate(pieces):
            batch.write_chunk(new / str(number), piece)
        batch.force()
        ways.fsync(folder)

    def as_file() -> None:
        _write(file, data)
        ways.fsync(folder)

    def in_place() -> None:
        os.pwrite(descriptor, aligned.data, 0)
        os.fdatasync(descriptor)

    def once(save: Callable[[], None], forget: Callable[[], object]) -> dict[str, float]:
        with metered() as spent:
            save()
        forget()
        return spent[0]._asdict()

    # What makes the bytes durable, and what cleans up before the next round.
    candidates = {
        _EXTENT: partial(once, as_extent, lambda: held.delete(held.refs())),
        _REFERENCE: partial(once, as_directory, lambda: shutil.rmtree(new)),
        "the same as a save writes it": partial(once, as_save, lambda: shutil.rmtree(new)),
        "a new file": partial(once, as_file, file.unlink),
        "one write in place, the limit": partial(once, in_place, lambda: None),
    }
    with Runtime(FSYNCS) as runtime:
        found = interleaved(repeats, candidates)
    os.close(descriptor)
    held.close()
    return found


def _write(path: Path, data: np.ndarray) -> None:
    with open(path, "xb", buffering=0) as file:
        file.write(data.data)
        os.fsync(file.fileno())


def file_system(directory: Path) -> str:
    """The type of the file system that contains a directory."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [mount for mount in mounts if directory.resolve().is_relative_to(mount[0])]
    return max(above, key=lambda mount: len(mount[0]))[1]


def extents(report: Report, options: argparse.Namespace, place: Path) -> None:
    nbytes = int(NBYTES * options.scale)
    report.sizes = f"{nbytes / 1e6:g} MB, {file_system(place)}"
    found = {_WHEN[0]: measure(place / "alone", nbytes, options.repeats)}
    (place / "other").mkdir()
    with fresh.started(disturb, place / "other") as other:
        fresh.heard(other)
        try:
            found[_WHEN[1]] = measure(place / "beside", nbytes, options.repeats)
        finally:
            other.kill()
    rows, alone = [], found[_WHEN[0]]
    for name in alone.candidates:
        for when, figures in found.items():
            if name != _EXTENT:
                bars = [_BAR] if name == _REFERENCE else ()
                report.against(f"{_EXTENT}, {when}", figures, "secs", _EXTENT, [name], bars=bars)
        report.state(f"{name}: cpu", alone(name, "cpu"))
        report.state(f"{name}: fsyncs", alone(name, "fsyncs"), count)
        rows.append([name, *(cell for one in found.values() for cell in one.cells(name, "secs"))])
    report.publish("extents", (f"{nbytes / 1e6:g} MB as", *_WHEN), rows)


if __name__ == "__main__":
    reports.main("A save made durable on a disk of the node", extents, repeats=9)
