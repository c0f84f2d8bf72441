# SPDX-License-Identifier: Apache-2.0
"""Appends to new files: small writes through the page cache, long ones with direct I/O.

Appending 32 MB costs 40 ms of CPU time through a full page cache and 8 ms with direct I/O, which
matters to training on two cores. Small writes are better left to the cache, which flushes several
of them together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deltackpt.resources.memory import ALIGNMENT, aligned_buffer
from deltackpt.storage import aligned

#: Smaller writes use the page cache.
DIRECT_BYTES = 8 << 20
#: Bytes gathered for a direct write.
_PIECE_BYTES = 4 << 20
#: Maximum number of buffers per call on Linux.
_BUFFERS = 1024
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


class Appender:
    """Appends to one new file after another; used by one thread, the only writer of the files."""

    def __init__(self) -> None:
        """Starts without a file."""
        #: Descriptor of the file; None before ``begin`` and after ``end``.
        self.descriptor: int | None = None
        #: The same, for direct writes; None if the file system does not support them.
        self._direct: int | None = None
        self._piece: np.ndarray | None = None

    def begin(self, path: Path) -> None:
        """Creates a file, to which later calls append.

        Raises:
          OSError: the file exists, or cannot be created.
        """
        self.descriptor = os.open(path, _NEW, 0o666)
        try:
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
            aligned.check_alignment(self._direct)
        except OSError as error:
            if error.errno not in aligned.REFUSED:
                raise
            self._end_direct()

    def append(self, buffers: Sequence[memoryview]) -> None:
        """Appends bytes; a reader may see any prefix of them at any time.

        Args:
          buffers: consecutive buffers of bytes.

        Raises:
          OSError: writing failed; the file may contain some of the bytes.
        """
        left = [buffer for buffer in buffers if buffer.nbytes]
        if self._direct is not None and _nbytes(left) >= DIRECT_BYTES:
            left = self._append_directly(left)
        self._append_cached(left)

    def end(self) -> None:
        """Closes the file, if there is one; does not fsync.

        Raises:
          OSError: an earlier write was lost.
        """
        descriptor, self.descriptor = self.descriptor, None
        try:
            self._end_direct()
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _end_direct(self) -> None:
        if self._direct is not None:
            descriptor, self._direct = self._direct, None
            os.close(descriptor)

    def _append_cached(self, left: list[memoryview]) -> None:
        assert self.descriptor is not None
        while left:
            count = os.writev(self.descriptor, left[:_BUFFERS])
            left = _cut(left, count)[1]

    def _append_directly(self, left: list[memoryview]) -> list[memoryview]:
        """Appends whole blocks with direct I/O; returns what is left to append.

        The blocks at the file's current and future end also hold other bytes, so they use the
        cache.
        """
        assert self.descriptor is not None and self._direct is not None
        at = os.fstat(self.descriptor).st_size
        first, left = _cut(left, -at % ALIGNMENT)
        self._append_cached(first)
        at += _nbytes(first)
        if self._piece is None:
            self._piece = aligned_buffer(_PIECE_BYTES)
        while (nbytes := min(_nbytes(left), _PIECE_BYTES) // ALIGNMENT * ALIGNMENT) > 0:
            taken, rest = _cut(left, nbytes)
            piece = self._piece[:nbytes]
            np.concatenate([np.frombuffer(one, np.uint8) for one in taken], out=piece)
            try:
                aligned.write_aligned(self._direct, piece, at)
            except OSError as error:
                if error.errno not in aligned.REFUSED or os.fstat(self.descriptor).st_size > at:
                    raise
                # Some file systems open the file before they report the error.
                self._end_direct()
                return left
            left = rest
            at += nbytes
        return left


def _nbytes(buffers: Sequence[memoryview]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _cut(buffers: list[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """Splits buffers after some number of bytes."""
    for number, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            parts = ([buffer[:nbytes]] if nbytes else []), [buffer[nbytes:]]
            return buffers[:number] + parts[0], parts[1] + buffers[number + 1 :]
        nbytes -= buffer.nbytes
    return buffers, []
