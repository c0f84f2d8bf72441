# SPDX-License-Identifier: Apache-2.0
"""What may stand in the way of saves and restores: a directory, the machine, the versions.

Neither jax nor Orbax is imported, nor needs to be installed. Measuring and judging are apart: the
``*_finding`` functions are pure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from deltackpt import units
from deltackpt.errors import Damaged, DeltackptError
from deltackpt.format import names as layout
from deltackpt.resources import memory

Severity = Literal["ok", "note", "warning", "problem"]
Area = Literal["directory", "machine", "software"]

#: What is written to measure: enough that a drive's flush takes a while.
_LARGE_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_SMALL_BYTES = 4096
_REPEATS = 15
#: Nothing is measured with less room than this: a trainer may need it.
_LEAST_ROOM_BYTES = 4 * _LARGE_BYTES
_SCRATCH = ".deltackpt-doctor."
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")
_BUFFER_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      area: of what.
      subject: what was looked at.
      severity: ``ok``; ``note``: worth knowing; ``warning``: works, but slower or with less than
        one may expect; ``problem``: saves or restores fail, or what they promise does not hold.
      found: what there is.
      meaning: what that means for checkpoints; empty where it goes without saying.
      action: what to do; empty where nothing is to be done.
      figures: what was found, for programs; units stand in the names.
    """

    area: Area
    subject: str
    severity: Severity
    found: str
    meaning: str = ""
    action: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def examine(
    directory: str | os.PathLike[str] | None = None, *, read_only: bool = False
) -> tuple[Finding, ...]:
    """Looks at a directory of checkpoints, the machine and the installed packages.

    It measures in a temporary directory inside ``directory``, which is removed whatever happens.

    Args:
      directory: root of the steps, or where they are to be; None for the machine alone.
      read_only: write nothing, so measure nothing that needs writing.

    Returns:
      What was found; the directory first.
    """
    found: list[Finding] = []
    if directory is not None:
        found += _examine_directory(os.fspath(directory), read_only=read_only)
    found += [_memory(), _shared_memory(), _open_files(), _processors()]
    found += _unless_missing("machine", "huge pages", _huge_pages)
    found += _versions()
    found += _unless_missing("software", "checksums", _checksums)
    return tuple(found)


def _unless_missing(
    area: Area, subject: str, look: Callable[[], Iterable[Finding]]
) -> Iterable[Finding]:
    """What is found, or that a package is missing that it takes to look."""
    try:
        return list(look())
    except ImportError as error:
        return [
            Finding(
                area=area,
                subject=subject,
                severity="problem",
                found=f"cannot be looked at: {error}",
                action="install what is missing: pip install deltackpt",
            )
        ]


# The directory.


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


def _examine_directory(directory: str, *, read_only: bool) -> Iterator[Finding]:
    look = functools.partial(_contents, directory, read_only=read_only)
    yield from _unless_missing("directory", "contents", look)
    if _SCHEME.match(directory):
        return
    path = Path(directory).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    mount = mount_of(os.path.realpath(existing), _text("/proc/self/mountinfo"))
    yield file_system_finding(mount, read_only=read_only)
    yield from _room(existing)
    if read_only or existing != path or not os.access(path, os.W_OK | os.X_OK):
        return
    room = shutil.disk_usage(path).free
    if room < _LEAST_ROOM_BYTES:
        yield Finding(
            area="directory",
            subject="measurement",
            severity="warning",
            found=f"not done: {units.size(room)} free",
            meaning="What is left may be needed by a trainer.",
            action="free some space and run this again",
        )
        return
    try:
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=path) as scratch:
            yield from _semantics(Path(scratch))
            times = measure(Path(scratch))
    except OSError as error:
        yield Finding(
            area="directory",
            subject="writing",
            severity="problem",
            found=os.strerror(error.errno or 0),
            meaning="A trainer cannot save here.",
            action="check the owner, the permissions and the mount of the directory",
        )
        return
    yield fsync_finding(times, mount)
    yield bandwidth_finding(times)


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


def _room(path: Path) -> Iterator[Finding]:
    found = os.statvfs(path)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    few = free < max(_LEAST_ROOM_BYTES, total // 50)
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


def _semantics(scratch: Path) -> Iterator[Finding]:
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
            f"{_time(times.large_fsync_secs)} for {units.size(times.large_bytes)}, "
            f"{_time(times.small_fsync_secs)} for a file of {units.size(_SMALL_BYTES)}, "
            f"{_time(times.rename_fsync_secs)} for a rename"
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


# What the directory holds.


def _contents(directory: str, *, read_only: bool) -> Iterator[Finding]:
    """Steps, leftovers and the lease."""
    from deltackpt.ledger.directory import Root

    path = Path(directory).absolute()
    if not _SCHEME.match(directory) and not path.exists():
        yield Finding(
            area="directory",
            subject="directory",
            severity="warning",
            found=f"{path}: there is none",
            meaning="A trainer makes it. Below is what holds of the directory above it.",
            action=f"check the spelling, or: mkdir -p {path}",
        )
        return
    try:
        with contextlib.closing(Root.open(directory, read_only=True)) as opened:
            steps = sorted(opened.steps())
        names = sorted(os.listdir(path))
    except (DeltackptError, OSError) as error:
        yield Finding(
            area="directory",
            subject="directory",
            severity="problem",
            found=str(error),
            meaning="Neither a trainer nor a reader can open it.",
        )
        return
    writable = read_only or os.access(path, os.W_OK | os.X_OK)
    yield Finding(
        area="directory",
        subject="directory",
        severity="ok" if writable else "problem",
        found=str(path) if writable else f"{path}: not writable for this user",
        meaning="" if writable else "Steps can be restored (access='read'), none can be saved.",
        action="" if writable else "check its owner and permissions, or run this as the trainer",
    )
    newest = f", newest {steps[-1]}" if steps else ""
    yield Finding(
        area="directory",
        subject="steps",
        severity="ok",
        found=f"{len(steps)} committed{newest}",
        figures={"steps": len(steps), "newest_step": steps[-1] if steps else None},
    )
    yield from _leftovers(path, names)
    yield from _lease(path, names)


def _leftovers(path: Path, names: Iterable[str]) -> Iterator[Finding]:
    from deltackpt.ledger.leftovers import is_leftover

    now = time.time()
    cut = {name: _age_secs(path / name, now) for name in names if is_leftover(name)}
    if cut:
        yield Finding(
            area="directory",
            subject="unfinished steps",
            severity="note",
            found=", ".join(f"{name} ({_ago(age)})" for name, age in cut.items()),
            meaning="A save in flight, or one that was cut off; readers never look at it.",
            action="none: the next trainer that opens the directory removes what was cut off",
            figures={"ages_secs": cut},
        )
    for subject, found, meaning, action in (
        (
            "moved-aside steps",
            sorted(path.glob(f"{layout.ROLLED_BACK}/*/[0-9]*")),
            "Steps after one that was restored and gone on from. They take room.",
            f"once nobody wants them: rm -r {path / layout.ROLLED_BACK}",
        ),
        (
            "deleted steps",
            sorted(path.glob(f"{layout.TRASH}/*/*")),
            "Retention has taken them out, and they are being removed.",
            "none: the trainer removes them, or the next one does",
        ),
        (
            "unfinished compactions",
            [p for p in path.glob(f"{layout.COMPACTED}/*") if layout.is_compaction(p.name)],
            "A compaction at work, or one that was cut off.",
            "none: the next compaction removes what was cut off",
        ),
        (
            "measurements cut off",
            [path / name for name in names if name.startswith(_SCRATCH)],
            "This command was killed while it measured.",
            f"unless another one runs: rm -r {path}/{_SCRATCH}*",
        ),
    ):
        if found:
            shown = ", ".join(entry.name for entry in found[:5])
            yield Finding(
                area="directory",
                subject=subject,
                severity="note",
                found=f"{len(found)}: {shown}{', ...' if len(found) > 5 else ''}",
                meaning=meaning,
                action=action,
                figures={"count": len(found)},
            )


def _age_secs(path: Path, now: float) -> float | None:
    """Age of a file or directory; None where it is gone meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return round(now - path.stat().st_mtime, 1)
    return None


def _lease(path: Path, names: Iterable[str]) -> Iterator[Finding]:
    from deltackpt.ledger.lease import read_lease

    newest = max((epoch for name in names if (epoch := layout.lease_epoch(name))), default=None)
    if newest is None:
        return
    try:
        lease = read_lease(path / layout.lease_name(newest))
    except Damaged:
        yield Finding(
            area="directory",
            subject="lease",
            severity="note",
            found=f"epoch {newest}, not signed",
            meaning="A trainer that is starting, or was killed while it did.",
            action="none: the next trainer takes the next epoch",
            figures={"epoch": newest},
        )
        return
    runs = lease.runs
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lease.since_secs))
    state = {True: ", which runs", False: ", which has ended", None: ""}[runs]
    yield Finding(
        area="directory",
        subject="lease",
        severity="ok" if runs is False else "note",
        found=f"epoch {newest}: process {lease.pid} on {lease.host}{state}, since {since}",
        meaning="" if runs is False else "Another trainer that opens the directory takes it over.",
        action="" if runs is False else "give each trainer a directory of its own",
        figures={**dataclasses.asdict(lease), "runs": runs},
    )


# The machine.


def _memory() -> Finding:
    text = _text("/proc/meminfo")
    total, available = (_meminfo_bytes(text, name) for name in ("MemTotal", "MemAvailable"))
    limit = memory_limit_bytes(_text("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    if total is None or available is None:
        found = "unknown: this system does not say it"
    else:
        found = f"{units.size(available)} of {units.size(total)} available"
    if limit is not None and (total is None or limit < total):
        found += f", this process is limited to {units.size(limit)} (cgroup)"
    return Finding(
        area="machine",
        subject="memory",
        severity="ok",
        found=found,
        figures={"total_bytes": total, "available_bytes": available, "limit_bytes": limit},
    )


def _meminfo_bytes(text: str, name: str) -> int | None:
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def memory_limit_bytes(groups: str, mounted: Path) -> int | None:
    """The tightest memory limit of a process's control groups, None where there is none.

    Args:
      groups: contents of ``/proc/self/cgroup``.
      mounted: where control groups are mounted.
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
        # In a container the path may be that outside of it: then only the root is there.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            text = _text(folder / name).strip()
            if text.isdigit() and int(text) < 1 << 60:
                limits.append(int(text))
            if folder == base:
                break
    return min(limits, default=None)


def _shared_memory() -> Finding:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return Finding(
            area="machine",
            subject="shared memory",
            severity="note",
            found="there is no /dev/shm",
            meaning="The restore service, which holds tables there, cannot run on this machine.",
        )
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    few = total < 1 << 30
    return Finding(
        area="machine",
        subject="shared memory",
        severity="note" if few else "ok",
        found=f"{units.size(free)} of {units.size(total)} free in /dev/shm",
        meaning="A restore service holds tables there; containers often have 64 MiB."
        if few
        else "",
        action="docker run --shm-size=..., or an emptyDir of medium Memory" if few else "",
        figures={"free_bytes": free, "total_bytes": total},
    )


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < 1024
    unlimited = resource.RLIM_INFINITY
    shown = ["unlimited" if n == unlimited else f"{n:,}" for n in (soft, hard)]
    return Finding(
        area="machine",
        subject="open files",
        severity="warning" if few else "ok",
        found=f"at most {shown[0]} (hard limit {shown[1]})",
        meaning="Saves of many groups open hundreds at a time, Ray thousands." if few else "",
        action="ulimit -n 65536" if few else "",
        figures={"soft": soft, "hard": hard},
    )


def _processors() -> Finding:
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return Finding(
        area="machine",
        subject="processors",
        severity="note" if count == 1 else "ok",
        found=f"{count} for this process ({platform.machine()})",
        meaning="Saves encode and write beside the training step." if count == 1 else "",
        action="give the job another processor" if count == 1 else "",
        figures={"count": count},
    )


def _huge_pages() -> Iterator[Finding]:
    import numpy as np

    setting = _text("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", setting)
    if chosen is None:
        return
    buffer = memory.empty_buffer((_BUFFER_BYTES,), np.dtype(np.uint8))
    buffer.fill(1)
    got = huge_bytes(_text("/proc/self/smaps"), buffer.ctypes.data)
    share = min(got, _BUFFER_BYTES) / _BUFFER_BYTES
    few = share < 0.5
    never = chosen[1] == "never"
    action = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    yield Finding(
        area="machine",
        subject="huge pages",
        severity="warning" if never else "note" if few else "ok",
        found=f"{chosen[1]}; {share:.0%} of a buffer of {units.size(_BUFFER_BYTES)} is in them",
        meaning="First touches of fresh memory cost a restore most of its time." if few else "",
        action=action if never else "none: memory is fragmented at the moment" if few else "",
        figures={"setting": chosen[1], "share": share},
    )


def huge_bytes(smaps: str, address: int) -> int:
    """Bytes of anonymous huge pages in the mapping that holds an address.

    Args:
      smaps: contents of ``/proc/self/smaps``.
      address: in bytes.
    """
    inside = False
    for line in smaps.splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span is not None:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


# The versions.

#: Always shown; others only where something is wrong with them.
_SHOWN = ("jax", "orbax-checkpoint", "tensorstore", "numpy", "flax", "ray")


def _versions() -> Iterator[Finding]:
    try:
        ours = importlib.metadata.distribution("deltackpt")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            area="software",
            subject="deltackpt",
            severity="warning",
            found="imported from a source tree that is not installed",
            meaning="Which versions it needs cannot be told.",
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
    """Whether the version of a package is one that is supported.

    Args:
      name: of the package, or ``python``.
      found: its version, None where it is not installed.
      supported: as in ``>=1.2,<2``.
      required: whether nothing goes without it.
    """
    wanted = ",".join(sorted(supported.split(","), reverse=True))
    action = f'pip install "{name}{wanted}"' if name != "python" else f"use python {wanted}"
    figures = {"version": found, "supported": wanted}
    if found is None:
        return Finding(
            area="software",
            subject=name,
            severity="problem" if required else "note",
            found="not installed",
            meaning="" if required else "Only what builds on it needs it.",
            action=action if required else f"where it is wanted: {action}",
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


def _checksums() -> Iterator[Finding]:
    import google_crc32c

    fast = google_crc32c.implementation == "c"
    yield Finding(
        area="software",
        subject="google-crc32c",
        severity="ok" if fast else "problem",
        found=f"{google_crc32c.implementation} implementation",
        meaning="" if fast else "Every byte goes through it: saves and restores take forever.",
        action="" if fast else "pip install --force-reinstall --only-binary :all: google-crc32c",
        figures={"implementation": google_crc32c.implementation},
    )


# Shown.


def _text(path: str | Path) -> str:
    """A file of the kernel's; empty where this system has none."""
    try:
        return Path(path).read_text(errors="surrogateescape")
    except OSError:
        return ""


def _time(secs: float) -> str:
    return f"{secs * 1e6:.0f} µs" if secs < 1e-3 else f"{secs * 1e3:.1f} ms"


def _ago(secs: float | None) -> str:
    if secs is None:
        return "gone meanwhile"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= length:
            return f"{secs / length:.0f} {unit} old"
    return f"{max(0.0, secs):.0f} s old"
