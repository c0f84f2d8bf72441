# SPDX-License-Identifier: Apache-2.0
"""Defines findings, and checks the machine: file systems, memory, limits and packages."""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import os
import platform
import re
import resource
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import psutil
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from deltackpt import units

Severity = Literal["ok", "note", "warning", "problem"]
Area = Literal["directory", "machine", "software"]
SCRATCH = ".deltackpt-doctor."
SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check; names of ``figures`` end in units.

    A ``warning`` means that saves are slower or have weaker guarantees. A ``problem`` means that
    saves or restores fail, or that their guarantees do not hold.
    """

    area: Area = "directory"
    subject: str
    severity: Severity = "ok"
    found: str
    meaning: str = ""
    action: str = ""
    figures: Mapping[str, object] = dataclasses.field(default_factory=dict)


def file_text(path: str | Path) -> str:
    """Reads a file of the kernel; returns an empty string if it does not exist."""
    try:
        return Path(path).read_text(errors="surrogateescape")
    except OSError:
        return ""


def ago_text(secs: float | None) -> str:
    """Formats an age in seconds; None means that the object was removed."""
    if secs is None:
        return "removed since"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= length:
            return f"{secs / length:.0f} {unit} old"
    return f"{max(0.0, secs):.0f} s old"


#: With less, a save of an ordinary model may not fit.
_FEW_BYTES = 256 << 20
_FEW_INODES = 10_000
_SMALL_BYTES = 4096
_REPEATS = 15
_SLOW_FSYNC_SECS = 0.1

_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs"}
_NETWORK = {"nfs", "nfs4", "lustre", "ceph"}
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_OF_CONTAINERS = {"overlay", "aufs", "fuse.fuse-overlayfs"}
_OBJECT_STORE = re.compile(r"s3|gcs|goofys|rclone|blobfuse|geesefs", re.IGNORECASE)
_WITHOUT_FLUSHES = {"nobarrier", "barrier=0"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mount:
    """A mounted file system, from ``/proc/self/mountinfo``."""

    point: str
    kind: str
    source: str
    options: tuple[str, ...]


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """Returns the mount of an absolute path without symbolic links; None if the table lacks it."""
    found = None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, more = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(more) < 3:
            continue
        point = _unescaped(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # The last of several mounts at the same path hides the others.
        if inside and (found is None or len(point) >= len(found.point)):
            options = dict.fromkeys([*fields[5].split(","), *more[2].split(",")])
            found = Mount(
                point=point, kind=more[0], source=_unescaped(more[1]), options=tuple(options)
            )
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)


def file_system_finding(mount: Mount | None, *, read_only: bool = False) -> Finding:
    """Reports the guarantees of a file system, from its type and mount options."""
    if mount is None:
        meaning = "The kind of file system cannot be determined on this system."
        return Finding(subject="file system", severity="note", found="unknown", meaning=meaning)
    severity, what, meaning, action = _promises(mount)
    if read_only and "ro" in mount.options:
        severity, action = "ok", ""
    return Finding(
        subject="file system",
        severity=severity,
        found=f"{mount.kind}, {what}: {mount.source} on {mount.point} ({','.join(mount.options)})",
        meaning=meaning,
        action=action,
        figures=dataclasses.asdict(mount),
    )


def _promises(mount: Mount) -> tuple[Severity, str, str, str]:
    """Severity, kind, meaning, action."""
    if "ro" in mount.options:
        meaning = "Steps can be restored (access='read'), but not saved."
        return "problem", "read-only", meaning, "mount it writable on the trainer's machine"
    if mount.kind.startswith("fuse") and _OBJECT_STORE.search(f"{mount.kind} {mount.source}"):
        meaning = "Renames are not atomic: an interrupted save may look committed."
        action = "use the object store's URL, or save to a file system and copy steps to it"
        return "problem", "an object store", meaning, action
    if mount.kind in _IN_MEMORY:
        meaning = "It does not survive a power cut or a reboot."
        return "warning", "in memory", meaning, "save to a disk, unless you want memory"
    if mount.kind in _OF_CONTAINERS:
        meaning = "It is a container's layer, and is lost with the container."
        return "warning", "container layer", meaning, "mount a volume, and save there"
    if _WITHOUT_FLUSHES & set(mount.options):
        meaning = "Flushes are disabled: durability='power' does not survive a power cut."
        return "problem", "without flushes", meaning, "mount it without nobarrier"
    if mount.kind in _NETWORK and "soft" in mount.options:
        meaning = "With soft, reads and writes fail if the server is slow to answer."
        return "warning", "network", meaning, "mount it with hard"
    if mount.kind in _NETWORK:
        meaning = (
            "Commits, durability and leases depend on the server's rename, fsync and O_EXCL. Other "
            "machines see new names only when their attribute caches expire."
        )
        return "note", "network", meaning, ""
    if mount.kind in _LOCAL:
        return "ok", "local", "", ""
    meaning = (
        "deltackpt needs an atomic rename, O_EXCL and a reliable fsync, also in a power cut; check "
        "the documentation of this file system."
    )
    return "warning", "unknown kind", meaning, "prefer ext4, XFS, Btrfs, NFS or Lustre"


def room_findings(path: Path) -> Iterator[Finding]:
    """Checks free space and free inodes."""
    found = os.statvfs(path)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    few = free < max(_FEW_BYTES, total // 50)
    yield Finding(
        subject="free space",
        severity="warning" if few else "ok",
        found=f"{units.size(free)} of {units.size(total)}",
        meaning="A save that does not fit fails before it starts." if few else "",
        action="free space, or keep fewer steps (ManagerOptions.max_to_keep)" if few else "",
        figures={"free_bytes": free, "total_bytes": total},
    )
    # Btrfs and others create inodes on demand, and report 0.
    if found.f_files:
        few = found.f_favail < _FEW_INODES
        yield Finding(
            subject="free inodes",
            severity="warning" if few else "ok",
            found=f"{found.f_favail:,} of {found.f_files:,}",
            meaning="A save creates tens of files, more with many groups." if few else "",
            action="remove files, or keep fewer steps" if few else "",
            figures={"free_inodes": found.f_favail, "total_inodes": found.f_files},
        )


def semantics_findings(scratch: Path) -> Iterator[Finding]:
    """Checks that O_EXCL is exclusive and that renames are atomic, in an empty directory."""
    for subject, check, meaning in (
        ("exclusive creation", _creates_exclusively, "Two trainers could both hold the lease."),
        ("rename", _renames, "An incomplete step could become visible, or replace another."),
    ):
        fault = check(scratch)
        yield Finding(
            subject=subject,
            severity="problem" if fault else "ok",
            found=fault or "works",
            meaning=meaning if fault else "",
            action="save to a file system with POSIX semantics" if fault else "",
        )


def _creates_exclusively(scratch: Path) -> str:
    """Returns what is wrong with O_EXCL; empty if it works."""
    name = scratch / "exclusive"
    name.touch(exist_ok=False)
    try:
        name.touch(exist_ok=False)
    except FileExistsError:
        return ""
    return "a file was created twice with O_EXCL"


def _renames(scratch: Path) -> str:
    """Returns what is wrong with renames; empty if they work."""
    old, new, other = scratch / "old", scratch / "new", scratch / "other"
    for folder in (old, other):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    os.rename(old, new)
    if old.exists() or (new / "file").read_text() != "old":
        return "a renamed directory has other contents"
    try:
        os.rename(new, other)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        return "a directory that is not empty was replaced"
    inode = (new / "file").stat().st_ino
    os.replace(new / "file", other / "file")
    if (other / "file").read_text() != "old":
        return "a file was not replaced by the renamed one"
    if (other / "file").stat().st_ino != inode:
        return "a renamed file has another inode: it was copied, which is not atomic"
    return ""


def measured_fsync_secs(scratch: Path) -> tuple[float, float]:
    """Returns median seconds to fsync a file of 4 KiB, and to rename it and fsync its directory."""
    written, renamed = [], []
    folder = os.open(scratch, os.O_RDONLY)
    try:
        for number in range(_REPEATS):
            path = scratch / f"small.{number}"
            with open(path, "wb", buffering=0) as file:
                started = time.perf_counter()
                file.write(bytes(_SMALL_BYTES))
                os.fsync(file.fileno())
                written.append(time.perf_counter() - started)
            started = time.perf_counter()
            os.rename(path, scratch / f"renamed.{number}")
            os.fsync(folder)
            renamed.append(time.perf_counter() - started)
    finally:
        os.close(folder)
    return statistics.median(written), statistics.median(renamed)


def fsync_finding(write_secs: float, rename_secs: float) -> Finding:
    """Reports the results of ``measured_fsync_secs``."""
    slow = write_secs > _SLOW_FSYNC_SECS
    return Finding(
        subject="fsync",
        severity="warning" if slow else "ok",
        found=f"{write_secs * 1e3:.2f} ms for a file of {units.size(_SMALL_BYTES)}, "
        f"{rename_secs * 1e3:.2f} ms for a rename",
        meaning="A save fsyncs each of its files and folders: expect seconds until its commit."
        if slow
        else "",
        action="use a faster disk, or durability='process'" if slow else "",
        figures={"write_secs": write_secs, "rename_secs": rename_secs},
    )


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

    ``groups`` is the contents of ``/proc/self/cgroup``.
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
    """Checks whether the kernel may back large buffers with huge pages."""
    setting = re.search(r"\[(\w+)\]", file_text("/sys/kernel/mm/transparent_hugepage/enabled"))
    if setting is None:
        return
    never = setting[1] == "never"
    yield Finding(
        area="machine",
        subject="huge pages",
        severity="warning" if never else "ok",
        found=setting[1],
        meaning="Page faults take most of the time of a restore." if never else "",
        action="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled" if never else "",
        figures={"setting": setting[1]},
    )


#: Always shown; others only if there is a problem.
_SHOWN = ("jax", "orbax-checkpoint", "tensorstore", "numpy", "flax", "ray")


def version_findings() -> Iterator[Finding]:
    """Checks the versions of the installed packages against the supported ranges."""
    try:
        ours = importlib.metadata.distribution("deltackpt")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            area="software",
            subject="deltackpt",
            severity="warning",
            found="imported from a source tree that is not installed",
            meaning="The required versions cannot be determined.",
            action="pip install -e .",
        )
        return
    yield Finding(area="software", subject="deltackpt", severity="ok", found=ours.version)
    python = ours.metadata["Requires-Python"] or ""
    yield version_finding("python", platform.python_version(), python, required=True)
    requirements = {}
    for text in ours.requires or ():
        requirement = Requirement(text)
        if requirement.name not in requirements or requirement.marker is None:
            requirements[requirement.name] = requirement
    for name in (*_SHOWN, *sorted(requirements.keys() - {*_SHOWN})):
        requirement = requirements.get(name)
        if requirement is None:
            continue
        marker = requirement.marker
        required = marker is None or marker.evaluate({**default_environment(), "extra": ""})
        finding = version_finding(
            name, _installed(name), str(requirement.specifier), required=required
        )
        if name in _SHOWN or (required and finding.severity != "ok"):
            yield finding


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_finding(name: str, found: str | None, supported: str, *, required: bool) -> Finding:
    """Checks the version of a package, or ``python``; ``found`` is None if it is not installed."""
    wanted = ",".join(sorted(supported.split(","), reverse=True))
    action = f'pip install "{name}{wanted}"' if name != "python" else f"use python {wanted}"
    figures = {"version": found, "supported": wanted}
    if found is None:
        return Finding(
            area="software",
            subject=name,
            severity="problem" if required else "note",
            found="not installed",
            meaning="" if required else "Only features that build on it need it.",
            action=action if required else f"if you need it: {action}",
            figures=figures,
        )
    fits = SpecifierSet(supported).contains(found, prereleases=True)
    return Finding(
        area="software",
        subject=name,
        severity="ok" if fits else "problem",
        found=found if fits else f"{found}, supported is {wanted}",
        meaning="" if fits else "deltackpt is not tested with it.",
        action="" if fits else action,
        figures=figures,
    )


def checksum_findings() -> Iterator[Finding]:
    """Checks that checksums are computed by compiled code."""
    import google_crc32c

    fast = google_crc32c.implementation == "c"
    yield Finding(
        area="software",
        subject="google-crc32c",
        severity="ok" if fast else "problem",
        found=f"{google_crc32c.implementation} implementation",
        meaning="" if fast else "Every byte is checksummed: saves and restores are very slow.",
        action="" if fast else "pip install --force-reinstall --only-binary :all: google-crc32c",
        figures={"implementation": google_crc32c.implementation},
    )


def kernel_findings() -> Iterator[Finding]:
    """Checks whether the compiled kernels are used, and with which instruction set."""
    from deltackpt import kernels

    fast = kernels.available()
    yield Finding(
        area="software",
        subject="kernels",
        severity="ok" if fast else "note",
        found=f"compiled, {kernels.instruction_set()}" if fast else "not compiled",
        meaning="" if fast else "XLA and numpy do their work: saves with row codecs are slower.",
        action="" if fast else "install a C compiler, then reinstall deltackpt",
        figures={
            "instruction_set": kernels.instruction_set() or None,
            "supported": list(kernels.instruction_sets()),
        },
    )
