# SPDX-License-Identifier: Apache-2.0
"""Files of uncompressed Zarr v3 chunks, written past the page cache.

Nothing uses it yet: ``storage.arrays`` writes through TensorStore.

Beside a training loop on two cores 60 MB written by O_DIRECT cost 2.6 ms of training, buffered 15
to 54. The bytes are TensorStore's: those of the chunk and their CRC32C. What is written lies in
aligned memory that forked children share, since a fork during a direct write may lose data in
private memory. Descriptors stay open until their files are forced, so that no write error is lost.
"""

from __future__ import annotations

import concurrent.futures
import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import google_crc32c
import numpy as np

from deltackpt.errors import OutOfSpace, StorageError

CRC_BYTES = 4
#: What no file system that allows direct writes asks more of.
ALIGNMENT = 4096
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORCERS = 8
# Longer arrays hold the interpreter's lock for too long at a time.
_CRC_PIECE_BYTES = 4 << 20


class Memory:
    """Aligned memory for one chunk at a time, to be used again after ``Writer.write``.

    Attributes:
      array: its bytes; the chunk is gathered into the first of them.
    """

    def __init__(self, nbytes: int):
        """Takes memory for chunks of ``nbytes``, their checksum and their padding."""
        self._map = mmap.mmap(-1, _aligned(nbytes + CRC_BYTES))
        self.array = np.frombuffer(self._map, np.uint8)
        self.capacity = nbytes

    def seal(self, nbytes: int) -> int:
        """Appends the CRC32C of the first ``nbytes``, and returns it."""
        if not 0 <= nbytes <= self.capacity:
            raise ValueError(f"memory for {self.capacity} bytes, found a chunk of {nbytes}")
        crc = 0
        for start in range(0, nbytes, _CRC_PIECE_BYTES):
            piece = self.array[start : min(nbytes, start + _CRC_PIECE_BYTES)]
            crc = google_crc32c.extend(crc, piece)
        self.array[nbytes : nbytes + CRC_BYTES] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
        # The padding, which is cut off again, must not be what another chunk left.
        self.array[nbytes + CRC_BYTES : _aligned(nbytes + CRC_BYTES)] = 0
        return crc


class Writer:
    """Writes files of chunks and forces them at the end; not for several threads at once."""

    def __init__(self, *, descriptors: int | None = None):
        """Begins.

        Args:
          descriptors: most files that stay open; a quarter of the process's limit by default.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._budget = descriptors or max(1, limit // 4)
        self._open: dict[Path, int] = {}
        self._direct = True

    def write(self, path: Path, memory: Memory, nbytes: int) -> int:
        """Writes a chunk to a new file; the memory may be used again when this returns.

        Args:
          path: the file; nothing has its name.
          memory: its first ``nbytes`` are the chunk.
          nbytes: bytes of the chunk.

        Returns:
          The CRC32C of the chunk.

        Raises:
          OutOfSpace: the file system is full.
          StorageError: the store refused.
        """
        crc = memory.seal(nbytes)
        if len(self._open) >= self._budget:
            self.force()
        length = nbytes + CRC_BYTES
        try:
            descriptor = self._write(path, memory.array, length)
        except OSError as error:
            raise _refusal(path, error) from error
        self._open[path] = descriptor
        return crc

    def force(self, directories: Iterable[Path] = ()) -> None:
        """Forces every file written, then the directories, and closes them all.

        Raises:
          StorageError: a file, which is named, could not be forced.
        """
        files, self._open = self._open, {}
        try:
            _each(_force_descriptor, list(files.items()))
        finally:
            for descriptor in files.values():
                os.close(descriptor)
        force(directories)

    def close(self) -> None:
        """Gives up what was not forced."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _write(self, path: Path, data: np.ndarray, length: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if self._direct:
            try:
                descriptor = os.open(path, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                # Some file systems make the file before they refuse.
                path.unlink(missing_ok=True)
                self._direct = False
            else:
                try:
                    if self._write_directly(descriptor, data, length):
                        return descriptor
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
                path.unlink()
                self._direct = False
        descriptor = os.open(path, flags, 0o666)
        try:
            _write_all(descriptor, data, 0, length)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _write_directly(self, descriptor: int, data: np.ndarray, length: int) -> bool:
        """Whether the file system took it; it refuses before it takes anything."""
        done, padded = 0, _aligned(length)
        while done < padded:
            try:
                taken = os.pwrite(descriptor, data[done:padded].data, done)
            except OSError as error:
                if done == 0 and error.errno in _REFUSED:
                    return False
                raise
            if taken == 0:
                raise OSError(errno.EIO, "nothing was written")
            done += taken
            if done < padded and done % ALIGNMENT:
                # A write that was cut short: what is left of its block is written once more.
                done -= done % ALIGNMENT
                if taken < ALIGNMENT:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, length)
        return True


def force(paths: Iterable[Path]) -> None:
    """Forces files or directories that others wrote and closed, in parallel.

    Raises:
      StorageError: one of them, which is named, could not be forced.
    """
    _each(_force_path, list(paths))


def _each(action: Callable[..., None], items: Sequence[object]) -> None:
    if len(items) < 2:
        for item in items:
            action(item)
        return
    with concurrent.futures.ThreadPoolExecutor(
        min(_FORCERS, len(items)), "deltackpt-force"
    ) as pool:
        # All are waited for, so that descriptors may be closed, before the first error is raised.
        pending = [pool.submit(action, item) for item in items]
    for future in pending:
        future.result()


def _force_descriptor(item: tuple[Path, int]) -> None:
    path, descriptor = item
    try:
        os.fsync(descriptor)
        # XFS that has shut down forces directories without an error, and fails here only.
        os.fstat(descriptor)
    except OSError as error:
        raise _refusal(path, error) from error


def _force_path(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        _force_descriptor((path, descriptor))
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: np.ndarray, done: int, length: int) -> None:
    while done < length:
        taken = os.pwrite(descriptor, data[done:length].data, done)
        if taken == 0:
            raise OSError(errno.EIO, "nothing was written")
        done += taken


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _refusal(path: Path, error: OSError) -> StorageError:
    if error.errno in _FULL:
        return OutOfSpace(
            f"{path}: expected space for a chunk, found none ({error}); free some and save again"
        )
    return StorageError(f"{path}: expected to be written and forced, found {error}; save again")
