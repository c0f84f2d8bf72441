# SPDX-License-Identifier: Apache-2.0
"""Appends to new files: a few bytes through the page cache, long runs past it.

Of 32 MB that are appended each time, those that go through the page cache cost 40 ms of processor
where the cache has to be made room in, and 8 past it, which is what a training on two cores feels.
A few bytes are better left to the cache: several such writes go to disk together then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deltackpt.resources.memory import ALIGNMENT, aligned_buffer
from deltackpt.storage import aligned

#: Fewer bytes go through the page cache.
DIRECT_BYTES = 8 << 20
#: So many are gathered for a direct write.
_PIECE_BYTES = 4 << 20
#: Most buffers of one call, on Linux.
_BUFFERS = 1024
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


class Appender:
    """Appends to one new file after the other; used by one thread, which alone writes to them."""

    def __init__(self) -> None:
        """There is no file yet."""
        #: Of the file; None before ``begin`` and after ``end``.
        self.descriptor: int | None = None
        #: Likewise, for writes past the page cache; None where the file system takes none.
        self._direct: int | None = None
        self._piece: np.ndarray | None = None

    def begin(self, path: Path) -> None:
        """Makes a file, and appends to that from now on.

        Raises:
          OSError: it is there already, or cannot be made.
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
        """Appends bytes; a reader finds a part of them at any time, from the first on.

        Args:
          buffers: the bytes, end to end.

        Raises:
          OSError: the store refused; some of them may be in the file.
        """
        left = [buffer for buffer in buffers if buffer.nbytes]
        if self._direct is not None and _nbytes(left) >= DIRECT_BYTES:
            left = self._append_directly(left)
        self._append_cached(left)

    def end(self) -> None:
        """Ends the file, if there is one; forces nothing.

        Raises:
          OSError: the store says only now that a write was lost.
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
        """Appends whole blocks past the page cache; returns what is left to append.

        The block in which the file ends, and that in which it will, have other bytes, too: they go
        through the cache.
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
                # Some file systems open the file before they refuse.
                self._end_direct()
                return left
            left = rest
            at += nbytes
        return left


def _nbytes(buffers: Sequence[memoryview]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _cut(buffers: list[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first so many bytes of some buffers, and the others."""
    for number, buffer in enumerate(buffers):
        if nbytes < buffer.nbytes:
            parts = ([buffer[:nbytes]] if nbytes else []), [buffer[nbytes:]]
            return buffers[:number] + parts[0], parts[1] + buffers[number + 1 :]
        nbytes -= buffer.nbytes
    return buffers, []
