# SPDX-License-Identifier: Apache-2.0
"""Checks a directory, the machine and package versions; jax and Orbax need not be installed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from deltackpt.lazy_import import LazyModule
from deltackpt.maintenance.doctor import machine
from deltackpt.maintenance.doctor.machine import SCHEME, Area, Finding

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
    where = "" if directory is None else os.fspath(directory)
    scheme = SCHEME.match(where)
    # Packages for buckets may be missing, and are not needed for a directory.
    if where.startswith("{") or (scheme and scheme[0].lower() != "file:/"):
        found += _checked(
            "directory", "bucket", lambda: _contents.bucket_findings(where, read_only, endpoint)
        )
    elif directory is not None:
        found += _checked(
            "directory", "contents", lambda: _contents.content_findings(where, read_only, wal)
        )
        if scheme is None:
            found += _checked(
                "directory", "file system", lambda: machine.file_system_findings(where, read_only)
            )
    found += _checked("machine", "limits", machine.machine_findings)
    found += _checked("software", "versions", machine.version_findings)
    found += _checked("software", "kernels", machine.kernel_findings)
    return tuple(found)


def _checked(area: Area, subject: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Runs a check; if a package that it needs is missing, returns this as a finding."""
    try:
        found = list(look())
    except ImportError as error:
        action = "install the missing package: pip install deltackpt"
        found = [Finding(subject, "problem", f"cannot be checked: {error}", action=action)]
    return [dataclasses.replace(finding, area=area) for finding in found]
