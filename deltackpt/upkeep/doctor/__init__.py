# SPDX-License-Identifier: Apache-2.0
"""Checks a directory, the machine and package versions for obstacles to saves and restores.

Neither jax nor Orbax is imported or needs to be installed. Measuring and judging are separate: most
``*_finding`` functions are pure.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from deltackpt import units
from deltackpt.upkeep.doctor import disk, machine, versions
from deltackpt.upkeep.doctor.findings import SCHEME, SCRATCH, Area, Finding, file_text
from deltackpt.upkeep.doctor.steps import bucket_findings, content_findings


def examine(
    directory: str | os.PathLike[str] | None = None,
    *,
    read_only: bool = False,
    endpoint: str | None = None,
) -> tuple[Finding, ...]:
    """Checks a checkpoint directory, the machine and the installed packages.

    Measures in a temporary directory inside ``directory``, which is always removed.

    Args:
      directory: the checkpoint directory, which need not exist; None to check only the machine.
      read_only: write nothing; skips measurements that need writing.
      endpoint: address of a bucket's server, if it is not the provider's own.

    Returns:
      The findings; those of the directory first.
    """
    found: list[Finding] = []
    if directory is not None:
        where = os.fspath(directory)
        scheme = SCHEME.match(where)
        is_file = scheme is None or scheme[0].lower().startswith("file:")
        # Packages for buckets may be missing, and are not needed for a directory.
        if not is_file or where.startswith("{"):
            look = functools.partial(bucket_findings, where, read_only=read_only, endpoint=endpoint)
            found += _unless_missing("directory", "bucket", look)
        else:
            found += _examine_directory(where, read_only=read_only)
    found += [
        machine.memory_finding(),
        machine.shared_memory_finding(),
        machine.open_files_finding(),
        machine.processors_finding(),
    ]
    found += _unless_missing("machine", "huge pages", machine.huge_page_findings)
    found += versions.version_findings()
    found += _unless_missing("software", "checksums", versions.checksum_findings)
    return tuple(found)


def _unless_missing(
    area: Area, subject: str, look: Callable[[], Iterable[Finding]]
) -> Iterable[Finding]:
    """Runs a check; if a package that it needs is missing, returns this as a finding."""
    try:
        return list(look())
    except ImportError as error:
        return [
            Finding(
                area=area,
                subject=subject,
                severity="problem",
                found=f"cannot be checked: {error}",
                action="install the missing package: pip install deltackpt",
            )
        ]


# The directory.


def _examine_directory(directory: str, *, read_only: bool) -> Iterator[Finding]:
    look = functools.partial(content_findings, directory, read_only=read_only)
    yield from _unless_missing("directory", "contents", look)
    if SCHEME.match(directory):
        return
    path = Path(os.path.expanduser(directory)).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    mount = disk.mount_of(os.path.realpath(existing), file_text("/proc/self/mountinfo"))
    yield disk.file_system_finding(mount, read_only=read_only)
    yield from disk.room_findings(existing)
    if read_only or existing != path or not os.access(path, os.W_OK | os.X_OK):
        return
    room = shutil.disk_usage(path).free
    if room < disk.LEAST_ROOM_BYTES:
        yield Finding(
            subject="measurement",
            severity="warning",
            found=f"skipped: only {units.size(room)} free",
            meaning="A trainer may need the remaining space.",
            action="free some space and run this command again",
        )
        return
    try:
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=path) as scratch:
            yield from disk.semantics_findings(Path(scratch))
            times = disk.measure(Path(scratch))
    except OSError as error:
        yield Finding(
            subject="writing",
            severity="problem",
            found=os.strerror(error.errno or 0),
            meaning="A trainer cannot save here.",
            action="check the owner, the permissions and the mount of the directory",
        )
        return
    yield disk.fsync_finding(times, mount)
    yield disk.bandwidth_finding(times)
