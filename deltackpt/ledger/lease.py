# SPDX-License-Identifier: Apache-2.0
"""The write lease of a directory.

Each epoch has a lease file, ``lease.<epoch>.msgpack``, created with ``O_EXCL``: if two trainers
start at the same moment, one gets the epoch and the other the next. The newest epoch holds the
lease. A restart after SIGKILL therefore takes over at once and never waits for a dead holder; an
older holder that is still running is fenced at its next commit. The name alone is the claim, and
the contents identify the holder, so a claim is valid even if the holder was killed before it wrote
them.

A claim is pending until its trainer has started: then the trainer removes the names of older
epochs. If it fails before that, it withdraws the claim. The previous holder commits nothing beside
a pending claim, but it waits for the outcome, up to ``GRACE_SECS`` for each claim, before it counts
as fenced. If starts overlap, it waits at most ``GRACE_PERIODS`` times as long: it is then fenced
rather than stalled for ever.

Epochs alone do not distinguish directories: a backup has the same ones. A holder keeps the
directory open, which pins its inode. Before every commit it checks that this directory is still at
its path, and that its lease is its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from deltackpt.errors import Damaged, FormatTooNew, InUse, RestoreError, StorageError
from deltackpt.format import manifest, names
from deltackpt.storage import files
from deltackpt.storage.posix import DirectFile, fsync_path

_MAGIC = "deltackpt.lease"
#: How long the previous holder waits for each trainer to start or to withdraw its claim. A start
#: that takes longer fences that holder, even if the start fails later.
GRACE_SECS = 60.0
#: Overlapping starts together may take this many times as long; then the holder is fenced.
GRACE_PERIODS = 3
_FULL = "make room or keep fewer steps, then open the directory again"
#: The end of the year 9999: no clock shows a later time.
_MOST_SECS = 253_402_300_800


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
    """The holder of a directory, and since when (seconds since 1970).

    Attributes:
      pending: in a journal, whether the trainer has not started yet, and may withdraw its claim.
    """

    epoch: int
    holder: str
    host: str
    pid: int
    since_secs: float
    pending: bool = False

    @property
    def is_of_this_process(self) -> bool:
        """Returns whether this process took it."""
        return (self.host, self.pid) == (socket.gethostname(), os.getpid())

    @property
    def runs(self) -> bool | None:
        """Returns whether a process with its pid is running; None if it is on another host."""
        if self.host != socket.gethostname():
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
        """Waits ``poll_secs`` between two checks."""
        self._poll_secs = poll_secs
        #: When the holder first waited.
        self._since: float | None = None
        #: When each claim was seen first.
        self._seen: dict[tuple[int, str], float] = {}
        #: Claims whose processes have ended.
        self._ended: set[tuple[int, str]] = set()

    def wait(self, claimants: Mapping[int, Lease | None]) -> bool:
        """Waits briefly; returns whether to check again, because the claims may be withdrawn.

        Args:
          claimants: the newer trainers by epoch; None if a lease is not readable.
        """
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


def epochs(path: Path) -> Iterator[int]:
    """Returns the epochs of a directory's leases, in no order."""
    for name in files.listing(path):
        epoch = names.lease_epoch(name)
        if epoch is not None:
            yield epoch


def claim(path: Path, after_epoch: int | None) -> Lease:
    """Takes the epoch after the newest; makes its name durable, but not its contents.

    The names of older epochs remain until ``remove_older``, so that ``give_back`` can undo this.

    Args:
      path: the directory.
      after_epoch: take it only if this is the newest epoch.

    Raises:
      InUse: another epoch is the newest.
      StorageError: writing failed.
    """
    while True:
        older = sorted(epochs(path))
        newest = older[-1] if older else 0
        if after_epoch not in (None, newest):
            raise InUse(
                f"{path}: expected its lease at epoch {after_epoch}, found epoch {newest}: a "
                "trainer started concurrently; it collects garbage itself"
            )
        lease = Lease(
            epoch=newest + 1,
            holder=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            since_secs=time.time(),
        )
        with files.typed_errors(path / names.lease_name(lease.epoch), "take the lease", full=_FULL):
            try:
                (path / names.lease_name(lease.epoch)).touch(exist_ok=False)
            except FileExistsError:
                continue
            try:
                fsync_path(path)
                newest = max(epochs(path), default=0)
            except BaseException:
                give_back(path, lease)
                raise
        if newest <= lease.epoch:
            return lease
        # The listing was outdated: a later epoch was taken, and removed this one's name.


def remove_older(path: Path, lease: Lease) -> None:
    """Removes the names of epochs before a lease; a leftover name is harmless."""
    with contextlib.suppress(OSError, StorageError):
        for epoch in epochs(path):
            if epoch < lease.epoch:
                (path / names.lease_name(epoch)).unlink(missing_ok=True)


def give_back(path: Path, lease: Lease) -> None:
    """Removes a claim before ``remove_older``: the previous holder has the lease again."""
    with contextlib.suppress(OSError):
        (path / names.lease_name(lease.epoch)).unlink(missing_ok=True)


def sign(path: Path, lease: Lease) -> None:
    """Writes the holder into the lease file; a torn file reads as a trainer that is starting."""
    name = path / names.lease_name(lease.epoch)
    try:
        with contextlib.closing(DirectFile(name, new=False, full=_FULL)) as file:
            file.append(np.frombuffer(manifest.to_bytes(lease, _MAGIC), np.uint8))
            file.sync()
    except StorageError as error:
        # Without the file, a newer trainer has taken the directory: the first commit reports it.
        if not isinstance(error.__cause__, FileNotFoundError):
            raise


def read_lease(path: Path) -> Lease:
    """Reads a directory's holder from the lease file.

    Raises:
      Damaged: the lease was not signed, is altered, or is invalid.
    """
    lease = manifest.from_bytes(files.read_bytes(path), Lease, name=path.name, magic=_MAGIC)
    if not 0 <= lease.since_secs < _MOST_SECS:
        raise Damaged(path.name, "a time since 1970", f"{lease.since_secs} seconds")
    return lease


def holder(path: Path, newest: int, own: int) -> str:
    """Describes who holds the lease instead of epoch ``own``."""
    if newest < own:
        return "its file removed, so that another trainer may hold the directory undetected"
    try:
        lease = read_lease(path / names.lease_name(newest))
    except FormatTooNew:
        return f"epoch {newest} held by a trainer of a newer deltackpt"
    except RestoreError:
        return f"epoch {newest} held by a trainer that is starting, or was killed while it did"
    return (
        f"epoch {newest} held by process {lease.pid} on {lease.host} (holder {lease.holder[:8]}) "
        f"since {utc(lease.since_secs)}"
    )


def utc(secs: float) -> str:
    """Formats a time for errors."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(secs))
