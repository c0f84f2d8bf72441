# SPDX-License-Identifier: Apache-2.0
"""Checks a directory, the machine and package versions; jax and Orbax need not be installed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deltackpt.lazy_import import LazyModule
from deltackpt.maintenance.doctor import machine
from deltackpt.maintenance.doctor.machine import SCHEME, SCRATCH, Area, Finding, file_text

if TYPE_CHECKING:
    from deltackpt.maintenance.doctor import contents as _contents
    from deltackpt.options import KafkaWal
else:  # A package that it needs may be missing, which is a finding.
    _contents = LazyModule("deltackpt.maintenance.doctor.contents")


def examine(
    directory: str | os.PathLike[str] | None = None,
    *,
    read_only: bool = False,
    endpoint: str | None = None,
    wal: KafkaWal | None = None,
) -> tuple[Finding, ...]:
    """Returns findings about a directory, which need not exist, the machine and the packages.

    Unless ``read_only``, writes small files to a temporary directory inside ``directory``.
    ``wal`` reads WAL records in Kafka.
    """
    found: list[Finding] = []
    if directory is not None:
        where = os.fspath(directory)
        scheme = SCHEME.match(where)
        is_file = scheme is None or scheme[0].lower().startswith("file:")
        # Packages for buckets may be missing, and are not needed for a directory.
        if not is_file or where.startswith("{"):
            found += _unless_missing(
                "directory",
                "bucket",
                lambda: _contents.bucket_findings(where, read_only=read_only, endpoint=endpoint),
            )
        else:
            found += _examine_directory(where, read_only=read_only, wal=wal)
    found += [machine.memory_finding(), machine.open_files_finding()]
    found += machine.huge_page_findings()
    found += machine.version_findings()
    found += _unless_missing("software", "checksums", machine.checksum_findings)
    found += _unless_missing("software", "kernels", machine.kernel_findings)
    return tuple(found)


def _unless_missing(
    area: Area, subject: str, look: Callable[[], Iterable[Finding]]
) -> Iterable[Finding]:
    """Runs a check; if a package that it needs is missing, returns this as a finding."""
    try:
        return list(look())
    except ImportError as error:
        action = "install the missing package: pip install deltackpt"
        found = f"cannot be checked: {error}"
        return [Finding(subject, "problem", found, action=action, area=area)]


# The directory.


def _examine_directory(
    directory: str, *, read_only: bool, wal: KafkaWal | None
) -> Iterator[Finding]:
    yield from _unless_missing(
        "directory",
        "contents",
        lambda: _contents.content_findings(directory, read_only=read_only, wal=wal),
    )
    if SCHEME.match(directory):
        return
    path = Path(os.path.expanduser(directory)).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    mount = machine.mount_of(os.path.realpath(existing), file_text("/proc/self/mountinfo"))
    yield machine.file_system_finding(mount, read_only=read_only)
    yield from machine.room_findings(existing)
    if read_only or existing != path or not os.access(path, os.W_OK | os.X_OK):
        return
    try:
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=path) as scratch:
            yield from machine.semantics_findings(Path(scratch))
            yield machine.fsync_finding(*machine.measured_fsync_secs(Path(scratch)))
    except OSError as error:
        yield Finding(
            "writing",
            "problem",
            os.strerror(error.errno or 0),
            "A trainer cannot save here.",
            "check the owner, the permissions and the mount of the directory",
        )
