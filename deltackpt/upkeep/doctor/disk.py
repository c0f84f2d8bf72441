# SPDX-License-Identifier: Apache-2.0
"""The file system of a directory: its guarantees, free space, and fsync latency."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from deltackpt import units
from deltackpt.upkeep.doctor.findings import Finding, Severity, secs_text

#: Size of the large file: enough that a drive's flush takes a while.
_LARGE_BYTES = 64 << 20


_PIECE_BYTES = 1 << 20


_SMALL_BYTES = 4096


_REPEATS = 15


#: Nothing is measured with less free space: a trainer may need it.
LEAST_ROOM_BYTES = 4 * _LARGE_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mount:
    """A mounted file system, from ``/proc/self/mountinfo``."""

    point: str
    kind: str
    source: str
    options: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskTimes:
    """Measured times of a file system, in seconds.

    Attributes:
      small_fsync_secs: time to write and fsync a file of 4 KiB; median.
      rename_fsync_secs: time to rename a file and fsync its directory; median.
      large_bytes: size of the large file in bytes.
      large_write_secs: time to write it.
      large_fsync_secs: time to fsync it afterwards.
      large_read_secs: time to read it again, after dropping it from the page cache if possible.
    """

    small_fsync_secs: float
    rename_fsync_secs: float
    large_bytes: int
    large_write_secs: float
    large_fsync_secs: float
    large_read_secs: float


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """Returns the mount that contains a path; None if it is not in the table.

    Args:
      path: absolute, without symbolic links.
      mountinfo: contents of ``/proc/self/mountinfo``.
    """
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


_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs"}


_NETWORK = {"nfs", "nfs4", "lustre", "ceph"}


_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


_OF_CONTAINERS = {"overlay", "aufs", "fuse.fuse-overlayfs"}


_OBJECT_STORE = re.compile(r"s3|gcs|goofys|rclone|blobfuse|geesefs", re.IGNORECASE)


_WITHOUT_FLUSHES = {"nobarrier", "barrier=0"}


def file_system_finding(mount: Mount | None, *, read_only: bool = False) -> Finding:
    """Reports the guarantees of a file system, from its type and mount options.

    Args:
      mount: the file system; None if unknown.
      read_only: whether the directory is only for reading.
    """
    severity, what, meaning, action = _promises(mount)
    if read_only and mount is not None and "ro" in mount.options:
        severity, action = "ok", ""
    if mount is None:
        return Finding(
            subject="file system",
            severity=severity,
            found=what,
            meaning=meaning,
            action=action,
        )
    return Finding(
        subject="file system",
        severity=severity,
        found=f"{mount.kind}, {what}: {mount.source} on {mount.point} ({','.join(mount.options)})",
        meaning=meaning,
        action=action,
        figures=dataclasses.asdict(mount),
    )


def _promises(mount: Mount | None) -> tuple[Severity, str, str, str]:
    """Severity, kind, meaning, action."""
    if mount is None:
        meaning = "The kind of file system cannot be determined on this system."
        return "note", "unknown", meaning, ""
    if "ro" in mount.options:
        meaning = "Steps can be restored (access='read'), but not saved."
        return "problem", "read-only", meaning, "mount it writable on the trainer's machine"
    of_fuse = mount.kind.startswith("fuse")
    if of_fuse and _OBJECT_STORE.search(f"{mount.kind} {mount.source}"):
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
    if mount.kind in _NETWORK:
        if "soft" in mount.options:
            meaning = "With soft, reads and writes fail if the server is slow to answer."
            return "warning", "network", meaning, "mount it with hard"
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
    few = free < max(LEAST_ROOM_BYTES, total // 50)
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
        few = found.f_favail < 10_000
        yield Finding(
            subject="free inodes",
            severity="warning" if few else "ok",
            found=f"{found.f_favail:,} of {found.f_files:,}",
            meaning="A save creates tens of files, more with many groups." if few else "",
            action="remove files, or keep fewer steps" if few else "",
            figures={"free_inodes": found.f_favail, "total_inodes": found.f_files},
        )


def semantics_findings(scratch: Path) -> Iterator[Finding]:
    """Checks that O_EXCL is exclusive and that renames are atomic."""
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


def measure(scratch: Path) -> DiskTimes:
    """Times writes, fsyncs, renames and reads.

    Args:
      scratch: an empty directory; files are left there.

    Raises:
      OSError: an operation failed.
    """
    small, renamed = [], []
    folder = os.open(scratch, os.O_RDONLY)
    try:
        for number in range(_REPEATS):
            small.append(sum(_write_forced(scratch / f"small.{number}", [bytes(_SMALL_BYTES)])))
            started = time.perf_counter()
            os.rename(scratch / f"small.{number}", scratch / f"renamed.{number}")
            os.fsync(folder)
            renamed.append(time.perf_counter() - started)
    finally:
        os.close(folder)
    large = scratch / "large"
    # Random: some file systems compress.
    piece = os.urandom(_PIECE_BYTES)
    write_secs, fsync_secs = _write_forced(large, [piece] * (_LARGE_BYTES // _PIECE_BYTES))
    return DiskTimes(
        small_fsync_secs=statistics.median(small),
        rename_fsync_secs=statistics.median(renamed),
        large_bytes=_LARGE_BYTES,
        large_write_secs=write_secs,
        large_fsync_secs=fsync_secs,
        large_read_secs=_read_secs(large),
    )


def _write_forced(path: Path, pieces: Iterable[bytes]) -> tuple[float, float]:
    """Seconds to write a new file, and to fsync it."""
    with open(path, "wb", buffering=0) as file:
        started = time.perf_counter()
        for piece in pieces:
            file.write(piece)
        written = time.perf_counter()
        os.fsync(file.fileno())
        return written - started, time.perf_counter() - written


def _read_secs(path: Path) -> float:
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(_PIECE_BYTES)
        started = time.perf_counter()
        while file.readinto(buffer):
            pass
        return time.perf_counter() - started


#: No current drive is faster: an fsync that returns sooner did not write.
_FASTEST_BYTES_PER_SEC = 32e9


#: If writing is slower, the data may have reached the disk before the fsync.
_CACHED_BYTES_PER_SEC = 0.2e9


_SLOW_FSYNC_SECS = 0.1


def fsync_finding(times: DiskTimes, mount: Mount | None) -> Finding:
    """Checks that fsync takes a plausible time, and whether it is slow."""
    severity, meaning, action = _judged_fsync(times, mount)
    return Finding(
        subject="fsync",
        severity=severity,
        found=(
            f"{secs_text(times.large_fsync_secs)} for {units.size(times.large_bytes)}, "
            f"{secs_text(times.small_fsync_secs)} for a file of {units.size(_SMALL_BYTES)}, "
            f"{secs_text(times.rename_fsync_secs)} for a rename"
        ),
        meaning=meaning,
        action=action,
        figures=dataclasses.asdict(times),
    )


def _judged_fsync(times: DiskTimes, mount: Mount | None) -> tuple[Severity, str, str]:
    """Severity, meaning, action."""
    at_once = times.large_fsync_secs < times.large_bytes / _FASTEST_BYTES_PER_SEC
    cached = times.large_bytes / times.large_write_secs > _CACHED_BYTES_PER_SEC
    synchronous = mount is not None and "sync" in mount.options
    if at_once and cached and not synchronous:
        meaning = (
            "It returns sooner than any drive can write: committed saves do not survive a power "
            "cut, whatever ManagerOptions.durability is."
        )
        if mount is not None and mount.kind in _IN_MEMORY:
            return "warning", meaning, "save to a disk, unless you want memory"
        action = "find what disables fsync: libeatmydata, sync=disabled, an unsafe cache mode"
        return "problem", meaning, action
    if times.small_fsync_secs > _SLOW_FSYNC_SECS:
        meaning = "A save fsyncs each of its files and folders: expect seconds until its commit."
        return "warning", meaning, "use a faster disk, or durability='process'"
    return "ok", "", ""


def bandwidth_finding(times: DiskTimes) -> Finding:
    """Checks how fast one thread writes and reads a large file."""
    write = times.large_bytes / (times.large_write_secs + times.large_fsync_secs)
    read = times.large_bytes / times.large_read_secs
    slow = min(write, read) < 100e6
    return Finding(
        subject="bandwidth",
        severity="note" if slow else "ok",
        found=f"{units.size(write)}/s written and fsynced, {units.size(read)}/s read",
        meaning=f"A base of 1 GiB takes about {(1 << 30) / write:.0f} s." if slow else "",
        action="save less often, or let compaction write the bases" if slow else "",
        figures={"write_bytes_per_sec": round(write), "read_bytes_per_sec": round(read)},
    )
