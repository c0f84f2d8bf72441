# SPDX-License-Identifier: Apache-2.0
"""The file system of a directory: what it promises, its room, how fast it forces to disk."""

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
from deltackpt.upkeep.doctor.findings import (
    Finding,
    Severity,
    secs_text,
)

#: What is written to measure: enough that a drive's flush takes a while.
_LARGE_BYTES = 64 << 20


_PIECE_BYTES = 1 << 20


_SMALL_BYTES = 4096


_REPEATS = 15


#: Nothing is measured with less room than this: a trainer may need it.
LEAST_ROOM_BYTES = 4 * _LARGE_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mount:
    """A mounted file system, as ``/proc/self/mountinfo`` tells it."""

    point: str
    kind: str
    source: str
    options: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskTimes:
    """What was measured of a file system; seconds.

    Attributes:
      small_fsync_secs: writing a file of 4 KiB and forcing it to disk; median.
      rename_fsync_secs: renaming a file and forcing the directory to disk; median.
      large_bytes: size of the large file.
      large_write_secs: writing it.
      large_fsync_secs: then forcing it to disk.
      large_read_secs: reading it again, dropped from the page cache before where that works.
    """

    small_fsync_secs: float
    rename_fsync_secs: float
    large_bytes: int
    large_write_secs: float
    large_fsync_secs: float
    large_read_secs: float


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """The mount that holds a path; None where the table does not say it.

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
        # The last of several mounts on one point hides the others.
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
    """What the kind of a file system promises, and its mount options.

    Args:
      mount: the file system; None where it is not known.
      read_only: whether nobody is to save there.
    """
    severity, what, meaning, action = _promises(mount)
    if read_only and mount is not None and "ro" in mount.options:
        severity, action = "ok", ""
    if mount is None:
        return Finding(
            area="directory",
            subject="file system",
            severity=severity,
            found=what,
            meaning=meaning,
            action=action,
        )
    return Finding(
        area="directory",
        subject="file system",
        severity=severity,
        found=f"{mount.kind}, {what}: {mount.source} on {mount.point} ({','.join(mount.options)})",
        meaning=meaning,
        action=action,
        figures=dataclasses.asdict(mount),
    )


def _promises(mount: Mount | None) -> tuple[Severity, str, str, str]:
    """Severity, what it is, what that means, what to do."""
    if mount is None:
        meaning = "Which file system it is cannot be told on this system."
        return "note", "unknown", meaning, ""
    if "ro" in mount.options:
        meaning = "Steps can be restored (access='read'), none can be saved."
        return "problem", "read-only", meaning, "mount it writable where a trainer is to save"
    of_fuse = mount.kind.startswith("fuse")
    if of_fuse and _OBJECT_STORE.search(f"{mount.kind} {mount.source}"):
        meaning = "A rename there is not atomic: a step that is cut off may look committed."
        action = "save to a file system, and copy whole chains to the object store"
        return "problem", "an object store", meaning, action
    if mount.kind in _IN_MEMORY:
        meaning = "It does not survive a power cut, nor a restart of the machine."
        return "warning", "in memory", meaning, "save to a disk, unless memory is what you want"
    if mount.kind in _OF_CONTAINERS:
        meaning = "It is the layer of a container, and gone with it."
        return "warning", "of a container", meaning, "mount a volume, and save there"
    if _WITHOUT_FLUSHES & set(mount.options):
        meaning = "Flushes are switched off: durability='power' does not survive a power cut."
        return "problem", "without flushes", meaning, "mount it without nobarrier"
    if mount.kind in _NETWORK:
        if "soft" in mount.options:
            meaning = "With soft, reads and writes fail once the server is slow to answer."
            return "warning", "network", meaning, "mount it with hard"
        meaning = (
            "Commit, durability and lease are what the server keeps of rename, fsync and O_EXCL. "
            "Other machines see names as late as their attribute caches allow."
        )
        return "note", "network", meaning, ""
    if mount.kind in _LOCAL:
        return "ok", "local", "", ""
    meaning = (
        "deltackpt needs an atomic rename, O_EXCL and an fsync that is true; whether this file "
        "system has them when the power goes is for its documentation to say."
    )
    return "warning", "not one that is known", meaning, "prefer ext4, XFS, Btrfs, NFS or Lustre"


def room_findings(path: Path) -> Iterator[Finding]:
    """Bytes and files that the file system still has room for."""
    found = os.statvfs(path)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    few = free < max(LEAST_ROOM_BYTES, total // 50)
    yield Finding(
        area="directory",
        subject="free space",
        severity="warning" if few else "ok",
        found=f"{units.size(free)} of {units.size(total)}",
        meaning="A save that does not fit is refused before it starts." if few else "",
        action="free space, or keep fewer steps (ManagerOptions.retention)" if few else "",
        figures={"free_bytes": free, "total_bytes": total},
    )
    # Btrfs and others make inodes as they need them, and say 0.
    if found.f_files:
        few = found.f_favail < 10_000
        yield Finding(
            area="directory",
            subject="free inodes",
            severity="warning" if few else "ok",
            found=f"{found.f_favail:,} of {found.f_files:,}",
            meaning="A save takes some tens of files, more with many groups." if few else "",
            action="remove files, or keep fewer steps" if few else "",
            figures={"free_inodes": found.f_favail, "total_inodes": found.f_files},
        )


def semantics_findings(scratch: Path) -> Iterator[Finding]:
    """Whether names are made exclusively and renames replace as a whole."""
    for subject, check, meaning in (
        ("exclusive creation", _creates_exclusively, "Two trainers could both hold the lease."),
        ("rename", _renames, "A step could be seen before it is whole, or replace another."),
    ):
        fault = check(scratch)
        yield Finding(
            area="directory",
            subject=subject,
            severity="problem" if fault else "ok",
            found=fault or "works",
            meaning=meaning if fault else "",
            action="save to a file system that has POSIX semantics" if fault else "",
        )


def _creates_exclusively(scratch: Path) -> str:
    """What is wrong with O_EXCL, empty where nothing is."""
    name = scratch / "exclusive"
    name.touch(exist_ok=False)
    try:
        name.touch(exist_ok=False)
    except FileExistsError:
        return ""
    return "a name was made twice with O_EXCL"


def _renames(scratch: Path) -> str:
    """What is wrong with renames, empty where nothing is."""
    old, new, other = scratch / "old", scratch / "new", scratch / "other"
    for folder in (old, other):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    os.rename(old, new)
    if old.exists() or (new / "file").read_text() != "old":
        return "a renamed directory is not as it was"
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
        return "a file was not replaced by the one that was renamed to it"
    if (other / "file").stat().st_ino != inode:
        return "a renamed file is another file: it was copied, which is not atomic"
    return ""


def measure(scratch: Path) -> DiskTimes:
    """Times writes, forced writes, renames and reads.

    Args:
      scratch: an empty directory, which is not emptied again.

    Raises:
      OSError: the file system refused.
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
    """Seconds of writing a new file, and of forcing it to disk."""
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


#: No drive of today takes data faster: what is forced sooner was not forced.
_FASTEST_BYTES_PER_SEC = 32e9


#: Slower than this, the data may have gone to the disk while it was written.
_CACHED_BYTES_PER_SEC = 0.2e9


_SLOW_FSYNC_SECS = 0.1


def fsync_finding(times: DiskTimes, mount: Mount | None) -> Finding:
    """Whether forcing data to disk takes as long as it must, and how long that is."""
    severity, meaning, action = _judged_fsync(times, mount)
    return Finding(
        area="directory",
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
    """Severity, what it means, what to do."""
    at_once = times.large_fsync_secs < times.large_bytes / _FASTEST_BYTES_PER_SEC
    cached = times.large_bytes / times.large_write_secs > _CACHED_BYTES_PER_SEC
    synchronous = mount is not None and "sync" in mount.options
    if at_once and cached and not synchronous:
        meaning = (
            "It returns sooner than any drive can write: what is committed does not survive a "
            "power cut, whatever ManagerOptions.durability says."
        )
        if mount is not None and mount.kind in _IN_MEMORY:
            return "warning", meaning, "save to a disk, unless memory is what you want"
        action = "look for what swallows fsync: libeatmydata, sync=disabled, an unsafe cache mode"
        return "problem", meaning, action
    if times.small_fsync_secs > _SLOW_FSYNC_SECS:
        meaning = "A save forces each of its files and folders: expect seconds until its commit."
        return "warning", meaning, "use a faster disk, or durability='process'"
    return "ok", "", ""


def bandwidth_finding(times: DiskTimes) -> Finding:
    """How fast one thread writes and reads a large file."""
    write = times.large_bytes / (times.large_write_secs + times.large_fsync_secs)
    read = times.large_bytes / times.large_read_secs
    slow = min(write, read) < 100e6
    return Finding(
        area="directory",
        subject="bandwidth",
        severity="note" if slow else "ok",
        found=f"{units.size(write)}/s written and forced, {units.size(read)}/s read",
        meaning=f"A base of 1 GiB takes about {(1 << 30) / write:.0f} s." if slow else "",
        action="save less often, or let compaction make the bases" if slow else "",
        figures={"write_bytes_per_sec": round(write), "read_bytes_per_sec": round(read)},
    )
