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


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check; names of ``figures`` end in units.

    A ``warning`` means that saves are slower or have weaker guarantees. A ``problem`` means that
    saves or restores fail, or that their guarantees do not hold.
    """

    subject: str
    severity: Severity
    found: str
    meaning: str = ""
    action: str = ""
    _: dataclasses.KW_ONLY
    area: Area = "directory"
    figures: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def ok_if(self, fine: bool) -> Finding:
        """Returns the finding as ``ok``, without meaning and action, if everything is fine."""
        return dataclasses.replace(self, severity="ok", meaning="", action="") if fine else self


def file_text(path: str | Path) -> str:
    """Reads a file of the kernel; returns an empty string if it does not exist."""
    try:
        return Path(path).read_text(errors="surrogateescape")
    except OSError:
        return ""


def ago_text(secs: float) -> str:
    """Formats an age in seconds."""
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
        return Finding("file system", "note", "unknown", meaning)
    severity, what, meaning, action = _promises(mount)
    if read_only and "ro" in mount.options:
        severity, action = "ok", ""
    found = f"{mount.kind}, {what}: {mount.source} on {mount.point} ({','.join(mount.options)})"
    figures = dataclasses.asdict(mount)
    return Finding("file system", severity, found, meaning, action, figures=figures)


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
    yield Finding(
        "free space",
        "warning",
        f"{units.size(free)} of {units.size(total)}",
        "A save that does not fit fails before it starts.",
        "free space, or keep fewer steps (ManagerOptions.max_to_keep)",
        figures={"free_bytes": free, "total_bytes": total},
    ).ok_if(free >= max(_FEW_BYTES, total // 50))
    # Btrfs and others create inodes on demand, and report 0.
    if found.f_files:
        yield Finding(
            "free inodes",
            "warning",
            f"{found.f_favail:,} of {found.f_files:,}",
            "A save creates tens of files, more with many groups.",
            "remove files, or keep fewer steps",
            figures={"free_inodes": found.f_favail, "total_inodes": found.f_files},
        ).ok_if(found.f_favail >= _FEW_INODES)


def semantics_findings(scratch: Path) -> Iterator[Finding]:
    """Checks that O_EXCL is exclusive and that renames are atomic, in an empty directory."""
    for subject, check, meaning in (
        ("exclusive creation", _creates_exclusively, "Two trainers could both hold the lease."),
        ("rename", _renames, "An incomplete step could become visible, or replace another."),
    ):
        fault, action = check(scratch), "save to a file system with POSIX semantics"
        yield Finding(subject, "problem", fault or "works", meaning, action).ok_if(not fault)


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
    return Finding(
        "fsync",
        "warning",
        f"{write_secs * 1e3:.2f} ms for a file of {units.size(_SMALL_BYTES)}, "
        f"{rename_secs * 1e3:.2f} ms for a rename",
        "A save fsyncs each of its files and folders: expect seconds until its commit.",
        "use a faster disk, or durability='process'",
        figures={"write_secs": write_secs, "rename_secs": rename_secs},
    ).ok_if(write_secs <= _SLOW_FSYNC_SECS)


def memory_finding() -> Finding:
    """Reports the memory of the machine and of its container."""
    found = psutil.virtual_memory()
    limit = memory_limit_bytes(file_text("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    text = f"{units.size(found.available)} of {units.size(found.total)} available"
    if limit is not None and limit < found.total:
        text += f", this process is limited to {units.size(limit)} (cgroup)"
    figures = {"total_bytes": found.total, "available_bytes": found.available, "limit_bytes": limit}
    return Finding("memory", "ok", text, area="machine", figures=figures)


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


def open_files_finding() -> Finding:
    """Checks how many files this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    shown = ["unlimited" if n == unlimited else f"{n:,}" for n in (soft, hard)]
    return Finding(
        "open files",
        "warning",
        f"at most {shown[0]} (hard limit {shown[1]})",
        "Saves with many groups open hundreds of files, Ray thousands.",
        "ulimit -n 65536",
        area="machine",
        figures={"soft": soft, "hard": hard},
    ).ok_if(soft == unlimited or soft >= 1024)


def huge_page_findings() -> Iterator[Finding]:
    """Checks whether the kernel may back large buffers with huge pages."""
    setting = re.search(r"\[(\w+)\]", file_text("/sys/kernel/mm/transparent_hugepage/enabled"))
    if setting is not None:
        yield Finding(
            "huge pages",
            "warning",
            setting[1],
            "Page faults take most of the time of a restore.",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            area="machine",
            figures={"setting": setting[1]},
        ).ok_if(setting[1] != "never")


#: Always shown; others only if there is a problem.
_SHOWN = ("jax", "orbax-checkpoint", "tensorstore", "numpy", "flax", "ray")


def version_findings() -> Iterator[Finding]:
    """Checks the versions of the installed packages against the supported ranges."""
    try:
        ours = importlib.metadata.distribution("deltackpt")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "deltackpt",
            "warning",
            "imported from a source tree that is not installed",
            "The required versions cannot be determined.",
            "pip install -e .",
            area="software",
        )
        return
    yield Finding("deltackpt", "ok", ours.version, area="software")
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
    if found is not None:
        fits = SpecifierSet(supported).contains(found, prereleases=True)
        text = found if fits else f"{found}, supported is {wanted}"
        finding = Finding(name, "problem", text, "deltackpt is not tested with it.", action)
        finding = finding.ok_if(fits)
    elif required:
        finding = Finding(name, "problem", "not installed", "", action)
    else:
        meaning = "Only features that build on it need it."
        finding = Finding(name, "note", "not installed", meaning, f"if you need it: {action}")
    figures = {"version": found, "supported": wanted}
    return dataclasses.replace(finding, area="software", figures=figures)


def checksum_findings() -> Iterator[Finding]:
    """Checks that checksums are computed by compiled code."""
    import google_crc32c

    yield Finding(
        "google-crc32c",
        "problem",
        f"{google_crc32c.implementation} implementation",
        "Every byte is checksummed: saves and restores are very slow.",
        "pip install --force-reinstall --only-binary :all: google-crc32c",
        area="software",
        figures={"implementation": google_crc32c.implementation},
    ).ok_if(google_crc32c.implementation == "c")


def kernel_findings() -> Iterator[Finding]:
    """Checks whether the compiled kernels are used, and with which instruction set."""
    from deltackpt import kernels

    fast, used = kernels.available(), kernels.instruction_set()
    yield Finding(
        "kernels",
        "note",
        f"compiled, {used}" if fast else "not compiled",
        "XLA and numpy do their work: saves with row codecs are slower.",
        "install a C compiler, then reinstall deltackpt",
        area="software",
        figures={"instruction_set": used or None, "supported": list(kernels.instruction_sets())},
    ).ok_if(fast)
