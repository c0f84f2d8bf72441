# SPDX-License-Identifier: Apache-2.0
"""Memory, CPUs and limits of the machine."""

from __future__ import annotations

import mmap
import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from deltackpt import units
from deltackpt.upkeep.doctor.findings import Finding, file_text

_BUFFER_BYTES = 32 << 20


def memory_finding() -> Finding:
    """Reports the memory of the machine and of its container."""
    found = psutil.virtual_memory()
    limit = memory_limit_bytes(file_text("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    text = f"{units.size(found.available)} of {units.size(found.total)} available"
    if limit is not None and limit < found.total:
        text += f", this process is limited to {units.size(limit)} (cgroup)"
    return Finding(
        area="machine",
        subject="memory",
        found=text,
        figures={
            "total_bytes": found.total,
            "available_bytes": found.available,
            "limit_bytes": limit,
        },
    )


def memory_limit_bytes(groups: str, mounted: Path) -> int | None:
    """Returns the lowest memory limit of a process's control groups; None without a limit.

    Args:
      groups: contents of ``/proc/self/cgroup``.
      mounted: mount point of the control groups.
    """
    limits = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            base, name = mounted / "memory", "memory.limit_in_bytes"
        elif not controllers:
            base, name = mounted, "memory.max"
        else:
            continue
        # In a container, the path may be the one outside: then only the root exists.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            text = file_text(folder / name).strip()
            if text.isdigit() and int(text) < 1 << 60:
                limits.append(int(text))
            if folder == base:
                break
    return min(limits, default=None)


def shared_memory_finding() -> Finding:
    """Checks the size of ``/dev/shm``, which the hot standby uses."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return Finding(
            area="machine",
            subject="shared memory",
            severity="note",
            found="/dev/shm does not exist",
            meaning="The hot standby keeps tables there, and cannot run on this machine.",
        )
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    few = total < 1 << 30
    return Finding(
        area="machine",
        subject="shared memory",
        severity="note" if few else "ok",
        found=f"{units.size(free)} of {units.size(total)} free in /dev/shm",
        meaning="The hot standby keeps tables there; containers often have only 64 MiB."
        if few
        else "",
        action="docker run --shm-size=..., or an emptyDir of medium Memory" if few else "",
        figures={"free_bytes": free, "total_bytes": total},
    )


def open_files_finding() -> Finding:
    """Checks how many files this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < 1024
    unlimited = resource.RLIM_INFINITY
    shown = ["unlimited" if n == unlimited else f"{n:,}" for n in (soft, hard)]
    return Finding(
        area="machine",
        subject="open files",
        severity="warning" if few else "ok",
        found=f"at most {shown[0]} (hard limit {shown[1]})",
        meaning="Saves with many groups open hundreds of files, Ray thousands." if few else "",
        action="ulimit -n 65536" if few else "",
        figures={"soft": soft, "hard": hard},
    )


def processors_finding() -> Finding:
    """Checks how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return Finding(
        area="machine",
        subject="CPUs",
        severity="note" if count == 1 else "ok",
        found=f"{count} for this process ({platform.machine()})",
        meaning="Saves encode and write during training steps." if count == 1 else "",
        action="give the job another CPU" if count == 1 else "",
        figures={"count": count},
    )


def huge_page_findings() -> Iterator[Finding]:
    """Checks whether the kernel backs a large buffer with huge pages."""
    import numpy as np

    from deltackpt.resources import memory

    setting = file_text("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", setting)
    if chosen is None:
        return
    mapping = mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.advise_huge_pages(mapping)
    buffer = np.frombuffer(mapping, np.uint8)
    buffer.fill(1)
    got = huge_bytes(file_text("/proc/self/smaps"), buffer.ctypes.data)
    share = min(got, _BUFFER_BYTES) / _BUFFER_BYTES
    few = share < 0.5
    never = chosen[1] == "never"
    action = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    yield Finding(
        area="machine",
        subject="huge pages",
        severity="warning" if never else "note" if few else "ok",
        found=f"{chosen[1]}; they back {share:.0%} of a buffer of {units.size(_BUFFER_BYTES)}",
        meaning="Page faults take most of the time of a restore." if few else "",
        action=action if never else "none: memory is fragmented at the moment" if few else "",
        figures={"setting": chosen[1], "share": share},
    )


def huge_bytes(smaps: str, address: int) -> int:
    """Returns the bytes of anonymous huge pages in the mapping that contains an address.

    Args:
      smaps: contents of ``/proc/self/smaps``.
      address: the address.
    """
    inside = False
    for line in smaps.splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span is not None:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0
