# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of whole blocks, past the page cache where the file system allows it.

Beside a training loop on two cores 60 MB that were written past the cache cost 2.6 ms of training,
through it 15 to 54. Who refuses says so at the opening, or at the first read or write, before
anything is taken.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.resources.memory import ALIGNMENT, aligned_buffer
from deltackpt.storage import files

#: What a file system answers that takes no direct reads and writes.
REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS})
#: Of ``struct statx`` and its flags, which Python does not know: linux/stat.h.
_STATX_BYTES, _STATX_DIOALIGN, _AT_EMPTY_PATH = 256, 0x2000, 0x1000
_DIO_MEMORY_ALIGN, _DIO_OFFSET_ALIGN = 0x98, 0x9C
_C_LIBRARY = ctypes.CDLL(None)


class BlockFile:
    """A file that exists and keeps its size; positions and lengths are multiples of ``ALIGNMENT``.

    Memory that is read into and written from is that of ``memory.aligned_buffer``.

    Attributes:
      path: the file.
      direct: whether it is read and written past the page cache.
    """

    def __init__(self, path: Path):
        """Opens it for reading and writing.

        Raises:
          StorageError: it cannot be.
        """
        self.path = path
        with files.typed_errors(path, "open"):
            self._descriptor, self.direct = _opened(path)

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Fills ``out``.

        Raises:
          Damaged: the file ends before.
          StorageError: it cannot be read.
        """
        done = 0
        with files.typed_errors(self.path, "read"):
            while done < len(out):
                taken = os.preadv(self._descriptor, [out[done:].data], start + done)
                if taken == 0:
                    shown = files.object_name(self.path)
                    raise Damaged(shown, f"{len(out) - done} more bytes", "its end")
                done += taken

    def write(self, start: int, data: np.ndarray) -> None:
        """Writes in place; ``force`` makes it last.

        Raises:
          StorageError: the store refused.
        """
        with files.typed_errors(self.path, "write"):
            (write_aligned if self.direct else write_all)(self._descriptor, data, start)

    def force(self) -> None:
        """Forces what was written to disk.

        Raises:
          StorageError: the store refused; what was written since the last time may be lost.
        """
        with files.typed_errors(self.path, "force to disk"):
            os.fdatasync(self._descriptor)
            # XFS that has shut down may say so here only.
            os.fstat(self._descriptor)

    def close(self) -> None:
        """Closes it."""
        os.close(self._descriptor)


def check_alignment(descriptor: int) -> None:
    """Checks that the file system takes direct writes of whole blocks of ``ALIGNMENT``.

    Raises:
      OSError: EINVAL, it takes none, or others.
    """
    if alignment(descriptor) > ALIGNMENT:
        raise OSError(errno.EINVAL, "another alignment")


def alignment(descriptor: int) -> int:
    """What the file system asks of direct writes in memory and in the file.

    Raises:
      OSError: EINVAL, it takes none.
    """
    if not hasattr(_C_LIBRARY, "statx"):
        return ALIGNMENT
    found = (ctypes.c_uint32 * (_STATX_BYTES // 4))()
    refused = _C_LIBRARY.statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found)
    if refused or not found[0] & _STATX_DIOALIGN:
        return ALIGNMENT  # An older kernel, which does not know.
    memory, file = found[_DIO_MEMORY_ALIGN // 4], found[_DIO_OFFSET_ALIGN // 4]
    if not file:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return max(memory, file)


def write_all(descriptor: int, data: np.ndarray, start: int) -> None:
    """Writes all of it, however often the kernel takes less.

    Raises:
      OSError: the store refused.
    """
    done = 0
    while done < len(data):
        taken = os.pwrite(descriptor, data[done:].data, start + done)
        if taken == 0:
            raise OSError(errno.EIO, "nothing was written")
        done += taken


def write_aligned(descriptor: int, data: np.ndarray, start: int) -> None:
    """As ``write_all``, of whole blocks of aligned memory to a file that was opened for that.

    Raises:
      OSError: the store refused.
    """
    done = 0
    while done < len(data):
        taken = os.pwrite(descriptor, data[done:].data, start + done)
        if done + taken == len(data):
            return
        if taken < ALIGNMENT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # A write that was cut short: what is left of its block is written once more.
        done += taken // ALIGNMENT * ALIGNMENT


def _opened(path: Path) -> tuple[int, bool]:
    """The file, and whether it is read and written directly: tried by reading its first block."""
    flags = os.O_RDWR | os.O_CLOEXEC
    descriptor = -1
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
        check_alignment(descriptor)
        os.preadv(descriptor, [aligned_buffer(ALIGNMENT).data], 0)
        return descriptor, True
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if error.errno not in REFUSED:
            raise
    return os.open(path, flags), False
