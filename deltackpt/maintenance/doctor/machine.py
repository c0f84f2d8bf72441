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
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from deltackpt import units

Severity = Literal["ok", "note", "warning", "problem"]
Area = Literal["directory", "machine", "software"]
SCRATCH = ".deltackpt-doctor."
SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    A ``warning`` means that saves are slower or have weaker guarantees. A ``problem`` means that
    saves or restores fail, or that their guarantees do not hold.
    """

    subject: str
    severity: Severity
    found: str
    meaning: str = ""
    action: str = ""
    area: Area = "directory"

    def ok_if(self, fine: bool) -> Finding:
        """Returns the finding as ``ok``, without meaning and action, if everything is fine."""
        return dataclasses.replace(self, severity="ok", meaning="", action="") if fine else self


#: With less, a save of an ordinary model may not fit.
_FEW_BYTES = 256 << 20
_SMALL_BYTES = 4096
_REPEATS = 15
_SLOW_FSYNC_SECS = 0.1
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs"}
_NETWORK = {"nfs", "nfs4", "lustre", "ceph"}
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_OF_CONTAINERS = {"overlay", "aufs", "fuse.fuse-overlayfs"}
_OBJECT_STORE = re.compile(r"s3|gcs|goofys|rclone|blobfuse|geesefs", re.IGNORECASE)
_WITHOUT_FLUSHES = {"nobarrier", "barrier=0"}


class Mount(NamedTuple):
    """A mounted file system."""

    point: str
    kind: str
    source: str
    options: tuple[str, ...]


def mount_of(path: str) -> Mount | None:
    """Returns the mount of an absolute path without symbolic links; None if it is not known."""
    found = None
    for one in psutil.disk_partitions(all=True):
        inside = path == one.mountpoint or path.startswith(one.mountpoint.rstrip("/") + "/")
        # The last of several mounts at the same path hides the others.
        if inside and (found is None or len(one.mountpoint) >= len(found.point)):
            options = tuple(one.opts.split(","))
            found = Mount(one.mountpoint, one.fstype, one.device, options)
    return found


def file_system_findings(directory: str, read_only: bool) -> Iterator[Finding]:
    """Checks the file system of a directory, or of its nearest existing parent."""
    path = Path(os.path.expanduser(directory)).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    yield mount_finding(mount_of(os.path.realpath(existing)), read_only=read_only)
    room = os.statvfs(existing)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    yield Finding(
        "free space",
        "warning",
        f"{units.size(free)} of {units.size(total)}",
        "A save that does not fit fails before it starts.",
        "free space, or keep fewer steps (ManagerOptions.max_to_keep)",
    ).ok_if(free >= max(_FEW_BYTES, total // 50))
    if read_only or existing != path or not os.access(path, os.W_OK | os.X_OK):
        return
    try:
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=path) as scratch:
            for subject, check, meaning in (
                ("exclusive creation", _create_twice, "Two trainers could both hold the lease."),
                ("rename", _rename, "An incomplete step could appear, or replace another."),
            ):
                fault, action = check(Path(scratch)), "save to a file system with POSIX semantics"
                yield Finding(subject, "problem", fault or "works", meaning, action).ok_if(
                    not fault
                )
            yield fsync_finding(*_fsync_secs(Path(scratch)))
    except OSError as error:
        yield Finding(
            "writing",
            "problem",
            os.strerror(error.errno or 0),
            "A trainer cannot save here.",
            "check the owner, the permissions and the mount of the directory",
        )


def mount_finding(mount: Mount | None, *, read_only: bool = False) -> Finding:
    """Reports the guarantees of a file system, from its type and mount options."""
    if mount is None:
        meaning = "The kind of file system cannot be determined on this system."
        return Finding("file system", "note", "unknown", meaning)
    severity, what, meaning, action = _promises(mount)
    if read_only and "ro" in mount.options:
        severity, action = "ok", ""
    found = f"{mount.kind}, {what}: {mount.source} on {mount.point} ({','.join(mount.options)})"
    return Finding("file system", severity, found, meaning, action)


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


def _create_twice(scratch: Path) -> str:
    """Returns what is wrong with O_EXCL; empty if it works."""
    name = scratch / "exclusive"
    name.touch(exist_ok=False)
    try:
        name.touch(exist_ok=False)
    except FileExistsError:
        return ""
    return "a file was created twice with O_EXCL"


def _rename(scratch: Path) -> str:
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


def _fsync_secs(scratch: Path) -> tuple[float, float]:
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
    """Reports the latency of fsync."""
    return Finding(
        "fsync",
        "warning",
        f"{write_secs * 1e3:.2f} ms for a file of {units.size(_SMALL_BYTES)}, "
        f"{rename_secs * 1e3:.2f} ms for a rename",
        "A save fsyncs each of its files and folders: expect seconds until its commit.",
        "use a faster disk, or durability='process'",
    ).ok_if(write_secs <= _SLOW_FSYNC_SECS)


def machine_findings() -> Iterator[Finding]:
    """Checks memory, the limit of open files, and huge pages."""
    memory = psutil.virtual_memory()
    text = f"{units.size(memory.available)} of {units.size(memory.total)} available"
    yield Finding("memory", "ok", text)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    shown = ["unlimited" if n == unlimited else f"{n:,}" for n in (soft, hard)]
    yield Finding(
        "open files",
        "warning",
        f"at most {shown[0]} (hard limit {shown[1]})",
        "Saves with many groups open hundreds of files, Ray thousands.",
        "ulimit -n 65536",
    ).ok_if(soft == unlimited or soft >= 1024)
    setting = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text() if _HUGE_PAGES.exists() else "")
    if setting is not None:
        yield Finding(
            "huge pages",
            "warning",
            setting[1],
            "Page faults take most of the time of a restore.",
            f"echo madvise > {_HUGE_PAGES}",
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
        )
        return
    yield Finding("deltackpt", "ok", ours.version)
    python = ours.metadata["Requires-Python"] or ""
    yield version_finding("python", platform.python_version(), python, required=True)
    requirements: dict[str, Requirement] = {}
    for requirement in map(Requirement, ours.requires or ()):
        if requirement.name not in requirements or requirement.marker is None:
            requirements[requirement.name] = requirement
    for name in sorted(requirements, key=lambda name: (name not in _SHOWN, name)):
        requirement = requirements[name]
        marker = requirement.marker
        required = marker is None or marker.evaluate({"extra": ""})
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = None
        finding = version_finding(name, found, str(requirement.specifier), required=required)
        if name in _SHOWN or (required and finding.severity != "ok"):
            yield finding


def version_finding(name: str, found: str | None, supported: str, *, required: bool) -> Finding:
    """Checks the version of a package, or ``python``; ``found`` is None if it is not installed."""
    wanted = ",".join(sorted(supported.split(","), reverse=True))
    action = f'pip install "{name}{wanted}"' if name != "python" else f"use python {wanted}"
    if found is None and required:
        return Finding(name, "problem", "not installed", "", action)
    if found is None:
        meaning = "Only features that build on it need it."
        return Finding(name, "note", "not installed", meaning, f"if you need it: {action}")
    fits = SpecifierSet(supported).contains(found, prereleases=True)
    text = found if fits else f"{found}, supported is {wanted}"
    return Finding(name, "problem", text, "deltackpt is not tested with it.", action).ok_if(fits)


def kernel_findings() -> Iterator[Finding]:
    """Checks whether the compiled kernels are used, and with which instruction set."""
    from deltackpt import kernels

    fast = kernels.available()
    yield Finding(
        "kernels",
        "note",
        f"compiled, {kernels.instruction_set()}" if fast else "not compiled",
        "XLA and numpy do their work: saves with row codecs are slower.",
        "install a C compiler, then reinstall deltackpt",
    ).ok_if(fast)
