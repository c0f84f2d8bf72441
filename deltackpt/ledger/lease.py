# SPDX-License-Identifier: Apache-2.0
"""Who may write a directory.

The lease is a file per epoch, ``lease.<epoch>.msgpack``, whose name is made with ``O_EXCL``: of
two trainers that start at the same moment one gets the epoch and the other the next. The newest
epoch holds the lease, so a restart after SIGKILL takes over at once and never waits for a dead
holder; an older holder that still runs is fenced at its next commit. The name is the claim, its
contents say who made it: a claim that was cut before they were written still counts.

Epochs alone do not tell directories apart: a backup has the same ones. A holder keeps the directory
open, which pins its inode, and before every commit looks whether that very directory still stands
under its path, and whether the lease in it is its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from deltackpt.errors import Damaged, FormatTooNew, InUse, RestoreError
from deltackpt.format import manifest, names
from deltackpt.storage import files

_MAGIC = "deltackpt.lease"
_FULL = "free space or keep fewer steps, then open the directory again"
#: The end of the year 9999: no clock shows a later time.
_MOST_SECS = 253_402_300_800


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
    """Who holds a directory, since when (seconds since 1970)."""

    epoch: int
    holder: str
    host: str
    pid: int
    since_secs: float

    @property
    def runs(self) -> bool | None:
        """Whether a process of its number runs; None where it is that of another host."""
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # It is another user's.
        return True


def epochs(path: Path) -> Iterator[int]:
    """Epochs of the leases of a directory, in no order."""
    for name in files.listing(path):
        epoch = names.lease_epoch(name)
        if epoch is not None:
            yield epoch


def claim(path: Path, after_epoch: int | None) -> Lease:
    """Takes the epoch after the newest; its name is on disk afterwards, its contents are not.

    Args:
      path: the directory.
      after_epoch: take it only after this epoch, and from nobody else.

    Raises:
      InUse: another epoch holds it.
      StorageError: it cannot be written.
    """
    while True:
        older = sorted(epochs(path))
        newest = older[-1] if older else 0
        if after_epoch not in (None, newest):
            raise InUse(
                f"{path}: expected its lease at epoch {after_epoch}, found epoch {newest}: a "
                "trainer started meanwhile; it collects by itself"
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
            files.fsync_path(path)
        if max(epochs(path), default=0) > lease.epoch:
            # The listing was old: a later epoch was taken, and removed the name of this one.
            continue
        with files.typed_errors(path, "remove older leases"):
            for epoch in older:
                (path / names.lease_name(epoch)).unlink(missing_ok=True)
        return lease


def sign(path: Path, lease: Lease) -> None:
    """Writes who holds the lease into its file; half of it reads as a trainer that starts."""
    name = path / names.lease_name(lease.epoch)
    with files.typed_errors(name, "write", full=_FULL), contextlib.suppress(FileNotFoundError):
        # Without the file a newer trainer has taken the directory: the first commit says so.
        with open(name, "r+b") as file:
            file.write(manifest.to_bytes(lease, _MAGIC))
            file.flush()
            os.fsync(file.fileno())


def read_lease(path: Path) -> Lease:
    """Reads who holds a directory from the file of the lease.

    Raises:
      Damaged: it was not signed, is altered, or says what no lease can.
    """
    lease = manifest.from_bytes(files.read_bytes(path), Lease, name=path.name, magic=_MAGIC)
    if not 0 <= lease.since_secs < _MOST_SECS:
        raise Damaged(path.name, "a time since 1970", f"{lease.since_secs} seconds")
    return lease


def holder(path: Path, newest: int, own: int) -> str:
    """What stands in the place of the lease of epoch ``own``."""
    if newest < own:
        return "its file removed, so that another trainer may hold the directory unseen"
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
    """A time as errors say it."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(secs))
