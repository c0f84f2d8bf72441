# SPDX-License-Identifier: Apache-2.0
"""The write lease of a directory, and file locks.

The newest epoch's lease file, created with ``O_EXCL``, holds the lease. A restart after SIGKILL
therefore never waits for a dead holder; an older holder is fenced at its next commit. The name
alone is the claim, so it is valid even if the holder was killed before it wrote the contents.

A claim is pending until its trainer has started and removes the names of older epochs; a trainer
that fails before withdraws it. The previous holder commits nothing beside a pending claim, but
waits for the outcome, up to ``GRACE_SECS`` for each and ``GRACE_PERIODS`` times that for all: it is
then fenced rather than stalled for ever.

A backup has the same epochs. A holder therefore keeps the directory open, which pins its inode, and
checks before every commit that this directory is still at its path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from deltackpt.errors import (
    Damaged,
    DeltackptError,
    FencedError,
    FormatTooNew,
    InUse,
    RestoreError,
    StorageError,
)
from deltackpt.format import naming, records
from deltackpt.storage import posix
from deltackpt.storage.posix import DirectFile, DurableDir, fsync_path
from deltackpt.storage.store import store_path


@contextlib.contextmanager
def file_lock(
    name: Path,
    refusal: DeltackptError,
    *,
    make_folder: bool = False,
    private: bool = False,
) -> Iterator[None]:
    """Holds a lock against other processes and holders, or raises ``refusal``; creates the file.

    A holder may remove the file and its folder as its last action. If ``private``, only this user
    can access the file, for any umask.
    """
    with contextlib.ExitStack() as stack:
        with posix.typed_errors(name, "be locked"):
            while True:
                if make_folder:
                    DurableDir(name.parent).create()
                try:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                    descriptor = os.open(name, flags, 0o600 if private else 0o666)
                    stack.callback(os.close, descriptor)
                except FileNotFoundError:
                    if make_folder:
                        continue  # The previous holder is exiting.
                    raise
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise refusal from error
                # The locked file must still be the one with that name.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), name.stat()):
                        break
        yield


_MAGIC = "deltackpt.lease"
#: How long the previous holder waits for each trainer to start or to withdraw its claim. A start
#: that takes longer fences that holder, even if the start fails later.
GRACE_SECS = 60.0
#: Overlapping starts together may take this many times as long; then the holder is fenced.
GRACE_PERIODS = 3
#: Between two checks of a claim whose trainer has not started yet.
_POLL_SECS = 0.05
_FULL = "make room or keep fewer steps, then open the directory again"
#: The end of the year 9999: no clock shows a later time.
_MOST_SECS = 253_402_300_800


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
    """The holder of a directory, and since when (seconds since 1970)."""

    epoch: int
    holder: str
    host: str
    pid: int
    since_secs: float
    pending: bool = False  # in a journal: not started yet, the trainer may withdraw its claim

    @classmethod
    def new(cls, epoch: int, *, pending: bool = False) -> Lease:
        """Returns the lease of this process from now on."""
        return cls(
            epoch=epoch,
            holder=uuid.uuid4().hex,
            host=os.uname().nodename,
            pid=os.getpid(),
            since_secs=time.time(),
            pending=pending,
        )

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch} held by process {self.pid} on {self.host} (holder "
            f"{self.holder[:8]}) since {utc(self.since_secs)}"
        )

    @property
    def is_of_this_process(self) -> bool:
        """Returns whether this process took it."""
        return (self.host, self.pid) == (os.uname().nodename, os.getpid())

    @property
    def runs(self) -> bool | None:
        """Returns whether a process with its pid is running; None if it is on another host."""
        if self.host != os.uname().nodename:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # The process belongs to another user.
        return True


class Grace:
    """Bounds the waits of a lease holder for newer trainers that have not started yet."""

    def __init__(self, poll_secs: float):
        self._poll_secs = poll_secs
        #: When the holder first waited.
        self._since: float | None = None
        #: When each claim was seen first.
        self._seen: dict[tuple[int, str], float] = {}
        #: Claims whose processes have ended.
        self._ended: set[tuple[int, str]] = set()

    def wait(self, claimants: Mapping[int, Lease | None]) -> bool:
        """Waits briefly for newer trainers, by epoch; returns whether to check again."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        keys = {epoch: (epoch, one.holder if one else "") for epoch, one in claimants.items()}
        self._seen = {key: self._seen.get(key, now) for key in keys.values()}
        if (
            self._ended.intersection(self._seen)
            or now >= min(self._seen.values(), default=now) + GRACE_SECS
            or now >= self._since + GRACE_PERIODS * GRACE_SECS
        ):
            return False
        # A trainer may have withdrawn its claim just before it ended, so check once more.
        self._ended = {keys[epoch] for epoch, one in claimants.items() if one and one.runs is False}
        time.sleep(self._poll_secs)
        return True

    def reset(self) -> None:
        """Called when the holder was found to hold the lease."""
        self._since = None
        self._seen.clear()
        self._ended.clear()


class DirectoryLease:
    """The lease of a directory; a trainer takes it, starts, and checks it before every commit."""

    def __init__(self, path: Path, given: Path, after_epoch: int | None = None):
        """Claims the epoch after the newest; its name is durable, but does not tell the holder yet.

        The names of older epochs remain until ``start``, so that ``withdraw`` can undo this.
        ``given`` is the path before links were followed. With ``after_epoch``, raises InUse unless
        that is the newest.
        """
        self._path, self._given = path, given
        self._grace = Grace(_POLL_SECS)
        #: Whether the file names the holder, and whether older names were removed.
        self.is_signed = self.is_started = False
        with posix.typed_errors(path, "be opened"):
            descriptor = os.open(path, os.O_RDONLY)
        # While it is open, no other directory can have its inode.
        self._unpin = weakref.finalize(self, os.close, descriptor)
        self._opened = os.fstat(descriptor)
        try:
            while not self._claim(after_epoch):
                pass  # Another trainer took the epoch.
        except BaseException:
            self.close()
            raise

    def _claim(self, after_epoch: int | None) -> bool:
        newest = max(epochs(self._path), default=0)
        if after_epoch not in (None, newest):
            raise InUse(
                f"{self._path}: expected its lease at epoch {after_epoch}, found epoch {newest}: a "
                "trainer started concurrently; it collects garbage itself"
            )
        self._own = Lease.new(newest + 1)
        with posix.typed_errors(self._name, "take the lease", full=_FULL):
            try:
                self._name.touch(exist_ok=False)
            except FileExistsError:
                return False
            try:
                fsync_path(self._path)
                # Later epochs have removed this name if the listing was outdated.
                return max(epochs(self._path), default=0) <= self.epoch
            except BaseException:
                self._give_back()
                raise

    @property
    def epoch(self) -> int:
        """The epoch."""
        return self._own.epoch

    @property
    def _name(self) -> Path:
        return self._path / naming.lease_name(self.epoch)

    def sign(self) -> None:
        """Writes the holder into the file; a torn file reads as a trainer that is starting."""
        try:
            with contextlib.closing(DirectFile(self._name, new=False, full=_FULL)) as file:
                file.append(np.frombuffer(records.to_bytes(self._own, _MAGIC), np.uint8))
                file.sync()
        except StorageError as error:
            # A newer trainer has taken the directory and removed it: the first commit reports it.
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        self.is_signed = True

    def start(self) -> None:
        """Fences the previous holders: removes their names. A leftover name is harmless."""
        self.is_started = True
        with contextlib.suppress(OSError, StorageError):
            for epoch in epochs(self._path):
                if epoch < self.epoch:
                    (self._path / naming.lease_name(epoch)).unlink(missing_ok=True)

    def withdraw(self) -> None:
        """Returns the lease to the previous holder, unless ``start`` was called; closes it.

        Does not wait for newer trainers. If they also fail to start, a claim left between would
        fence the previous holder.
        """
        if self.is_started:
            self.start()  # An interrupt may have ended it.
        else:
            with contextlib.suppress(FencedError, StorageError):
                self._check_place()
                if self._is_own():
                    self._give_back()
        self.close()

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):
            self._name.unlink(missing_ok=True)

    def close(self) -> None:
        """Unpins the directory. The lease remains; the next trainer takes the next epoch."""
        self._unpin()

    def has_rival(self) -> bool:
        """Returns whether an earlier holder may still be running."""
        earlier = max((one for one in epochs(self._path) if one < self.epoch), default=None)
        if earlier is None:
            return False
        found = claimant(self._path, earlier)
        return found is None or found.runs is not False

    def check(self, *, wait: bool = True, is_starting: bool = False) -> None:
        """Raises FencedError unless the lease is held and its directory is at its path.

        Unless ``wait``, a newer trainer that starts is ignored; ``is_starting``: a newer start of
        this process supersedes this one at once. Raises StorageError if the directory no longer
        exists.
        """
        while True:
            self._check_place()
            found = {*epochs(self._path)}
            # A newer trainer removes older leases once it has started.
            is_held = self.epoch in found and self._is_own()
            newer = {one: claimant(self._path, one) for one in found if one > self.epoch and wait}
            if is_held and not newer:
                if wait:
                    self._grace.reset()
                return
            is_superseded = is_starting and any(
                one.is_of_this_process for one in newer.values() if one is not None
            )
            if not is_held or is_superseded or not self._grace.wait(newer):
                raise self._fenced(self._holder(max(found, default=0)))

    def is_newest(self) -> bool:
        """Returns whether it is held and the newest, without waiting."""
        with contextlib.suppress(FencedError, StorageError):
            self.check(wait=False)
            return max(epochs(self._path), default=0) == self.epoch
        return False

    def _is_own(self) -> bool:
        """Whether the file names this holder, if it names one."""
        found = claimant(self._path, self.epoch) if self.is_signed else self._own
        return found is not None and found.holder == self._own.holder

    def _check_place(self) -> None:
        """Checks that the claimed directory is still at its path."""
        try:
            is_same = os.path.samestat(self._opened, os.stat(self._path))
        except OSError as error:
            raise StorageError(
                f"{self._path}: expected the directory where it was opened, found "
                f"{os.strerror(error.errno or 0)}: it was moved or removed; move it back and save "
                "again, or stop this trainer and open the directory at its new path"
            ) from error
        if not is_same:
            held = self._holder(max(epochs(self._path), default=0))
            raise self._fenced(f"another directory in its place, with {held}")
        # A missing link is not an error: it may be about to be recreated.
        with contextlib.suppress(OSError):
            if not os.path.samestat(self._opened, os.stat(self._given)):
                raise self._fenced(f"that the link {self._given} points to another directory now")

    def _holder(self, newest: int) -> str:
        """Describes who holds the lease instead."""
        if newest < self.epoch:
            return "its file removed, so that another trainer may hold the directory undetected"
        try:
            return str(read_lease(self._path / naming.lease_name(newest)))
        except FormatTooNew:
            return f"epoch {newest} held by a trainer of a newer deltackpt"
        except RestoreError:
            return f"epoch {newest} held by a trainer that is starting, or was killed while it did"

    def _fenced(self, found: str) -> FencedError:
        return FencedError(
            f"{self._path}: expected to hold its lease (epoch {self.epoch}, holder "
            f"{self._own.holder[:8]}, taken {utc(self._own.since_secs)}), found {found}; stop this "
            "trainer, since its later steps are not committed"
        )


def epochs(path: Path) -> Iterator[int]:
    """Returns the epochs of a directory's leases, in no order."""
    for name in posix.listing(path):
        epoch = naming.lease_epoch(name)
        if epoch is not None:
            yield epoch


def read_lease(path: Path) -> Lease:
    """Reads a directory's holder; Damaged if the lease was not signed or is altered."""
    return _decoded(store_path(path).read(), path.name)


@functools.lru_cache(8)  # Each save reads the same bytes twice.
def _decoded(data: bytes, name: str) -> Lease:
    lease = records.from_bytes(data, Lease, name=name, magic=_MAGIC)
    if not 0 <= lease.since_secs < _MOST_SECS:
        raise Damaged(name, "a time since 1970", f"{lease.since_secs} seconds")
    return lease


def claimant(path: Path, epoch: int) -> Lease | None:
    """Returns the holder of an epoch; None if its lease is not readable."""
    with contextlib.suppress(RestoreError):
        return read_lease(path / naming.lease_name(epoch))
    return None


def utc(secs: float) -> str:
    """Formats a time for errors."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(secs))
