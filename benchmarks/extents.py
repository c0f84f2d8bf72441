# SPDX-License-Identifier: Apache-2.0
"""Makes 10 MB durable: as an extent, as a new directory, as a new file, and in place.

Measured once with the disk otherwise idle, once beside a process that writes 4 MB files and fsyncs
each.

All variants take the same bytes from memory and end when these are on disk. The reference is a
directory of 20 files, with an fsync of each file and of the directory. "The same as a save writes
it" writes these files past the page cache and fsyncs them together in threads. The limit is one
write past the page cache, from aligned memory, into an existing file: no checksum, no copy. CPU is
that of this process.

    python benchmarks/extents.py --json extents.json
    python benchmarks/extents.py --scale 6 --directory /nvme
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from report import Report, Sample, arguments, secs

from deltackpt.resources.memory import aligned_buffer
from deltackpt.resources.runtime import FSYNCS, Runtime
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.crc import crc32c
from deltackpt.tiers.extents import ExtentFile
from deltackpt.tiers.packing import Label

NBYTES = 10_000_000
_FILES = 20
_BAR = 1 / 3
#: The program of another process on the same file system.
_OTHER = """
import os, sys
data, number = os.urandom(4 << 20), 0
while True:
    with open(os.path.join(sys.argv[1], str(number % 8)), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    number += 1
"""
_BLOCK_BYTES = 4096


class _Pack:
    """Bytes in memory, as a bundle."""

    def __init__(self, key: str, data: np.ndarray, crc: int):
        self._data = data
        self.label = Label(key, len(data), crc)

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self._data[start : start + len(out)].data


@dataclasses.dataclass
class Way:
    """A method of making bytes durable.

    Attributes:
      name: in the table.
      save: makes the bytes durable.
      forget: cleanup before the next round; not measured.
    """

    name: str
    save: Callable[[], None]
    forget: Callable[[], None]
    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    forced: int = 0


def measure(report: Report, directory: Path, *, nbytes: int = NBYTES, repeats: int = 9) -> None:
    """Adds the lines of this benchmark to a report.

    Args:
      report: receives the lines.
      directory: on the file system to measure.
      nbytes: size of a save.
      repeats: interleaved rounds.
    """
    size = f"{nbytes / 1e6:g} MB"
    with tempfile.TemporaryDirectory(prefix="extents-", dir=directory) as folder:
        alone = _rounds(Path(folder, "alone"), nbytes, repeats)
        with _another(Path(folder, "other")):
            beside = _rounds(Path(folder, "beside"), nbytes, repeats)
    for ways, when in ((alone, ""), (beside, ", beside another")):
        extent, *others = ways
        for number, other in enumerate(others):
            report.compare(
                f"{size} as an {extent.name}{when}",
                Sample(tuple(extent.seconds)),
                other.name,
                Sample(tuple(other.seconds)),
                secs,
                bar=None if number else _BAR,
            )
        reference, limit = others[0], others[-1]
        report.compare(
            f"{limit.name}{when}",
            Sample(tuple(limit.seconds)),
            reference.name,
            Sample(tuple(reference.seconds)),
            secs,
        )
        report.section()
    for way in alone:
        report.state(f"CPU: {way.name}", Sample(tuple(way.cpu)), secs)
    forced = ", ".join(f"{way.name} {way.forced}" for way in alone)
    report.note(f"Calls that force something: {forced}.")


def _rounds(folder: Path, nbytes: int, repeats: int) -> list[Way]:
    folder.mkdir()
    with _ways(folder, nbytes) as ways:
        for number in range(-1, repeats):
            for way in ways:
                _run(way, measured=number >= 0)
    return ways


@contextmanager
def _another(folder: Path) -> Iterator[None]:
    """A concurrent process that writes and fsyncs files."""
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", _OTHER, str(folder)]) as process:
        try:
            yield
        finally:
            process.kill()


def _run(way: Way, *, measured: bool) -> None:
    with _forcings() as forcings:
        cpu, started = time.process_time(), time.perf_counter()
        way.save()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    way.forget()
    if measured:
        way.seconds.append(seconds)
        way.cpu.append(cpu)
        way.forced = len(forcings)


@contextmanager
def _forcings() -> Iterator[list[str]]:
    """Records fsync calls as they are made."""
    real, calls = {name: getattr(os, name) for name in ("fsync", "fdatasync")}, []

    def counting(name: str) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            calls.append(name)
            real[name](descriptor)

        return call

    for name in real:
        setattr(os, name, counting(name))
    try:
        yield calls
    finally:
        for name, call in real.items():
            setattr(os, name, call)


@contextmanager
def _ways(folder: Path, nbytes: int) -> Iterator[list[Way]]:
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
        held.hold(_Pack(f"save.{next(numbers)}", data, crc))

    def as_directory() -> None:
        new.mkdir()
        for number, piece in enumerate(pieces):
            _write(new / str(number), piece)
        _force(new)
        _force(folder)

    def as_save() -> None:
        new.mkdir()
        batch = FileBatch(new, fsync=True, runtime=runtime)
        for number, piece in enumerate(pieces):
            batch.write_chunk(new / str(number), piece)
        batch.force()
        _force(folder)

    def as_file() -> None:
        _write(file, data)
        _force(folder)

    def in_place() -> None:
        os.pwrite(descriptor, aligned.data, 0)
        os.fdatasync(descriptor)

    with Runtime(FSYNCS) as runtime:
        yield [
            Way("extent", as_extent, lambda: held.drop(held.labels())),
            Way(f"new directory of {_FILES} files", as_directory, lambda: shutil.rmtree(new)),
            Way("the same as a save writes it", as_save, lambda: shutil.rmtree(new)),
            Way("new file", as_file, lambda: file.unlink()),
            Way("limit: one write in place", in_place, lambda: None),
        ]
    os.close(descriptor)
    held.close()


def _write(path: Path, data: np.ndarray) -> None:
    with open(path, "xb", buffering=0) as file:
        file.write(data.data)
        os.fsync(file.fileno())


def _force(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_system(directory: Path) -> str:
    """The type of the file system that contains a directory."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [mount for mount in mounts if directory.resolve().is_relative_to(mount[0])]
    return max(above, key=lambda mount: len(mount[0]))[1]


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(repeats=9)
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.gettempdir())
    nbytes = int(NBYTES * options.scale)
    report = Report(
        "A save made durable on a disk of the node",
        sizes=f"{nbytes / 1e6:g} MB, {file_system(directory)}, {options.repeats} rounds",
    )
    measure(report, directory, nbytes=nbytes, repeats=options.repeats)
    report.show(options.json, options.markdown)


if __name__ == "__main__":
    main()
