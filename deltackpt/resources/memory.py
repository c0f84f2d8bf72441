# SPDX-License-Identifier: Apache-2.0
"""Memory of this process and of the machine: buffers to read into, what is left, what goes back."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from pathlib import Path

import numpy as np

from deltackpt.errors import RestoreError
from deltackpt.resources import pages

#: What direct writes ask of memory and of positions in files.
ALIGNMENT = 4096
_C_LIBRARY = ctypes.CDLL(None)
#: Of glibc's ``mallopt``.
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3


def empty_buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array with undefined contents in its own page-aligned memory, for ``pages.populate``.

    The alignment lets XLA's CPU backend keep the memory as a device buffer without a copy.

    Args:
      shape: shape of the array.
      dtype: dtype of the array.

    Raises:
      RestoreError: there is not so much memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < pages.UNIT_BYTES:
        raw = np.empty(nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + nbytes].view(dtype).reshape(shape)
    try:
        mapping = pages.FreshMemory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RestoreError(
            f"array of shape {shape}, {dtype.name}: expected {nbytes:,} bytes of memory, found "
            f"that they cannot be had ({error}); restore fewer rows, or on more processes"
        ) from error
    return np.frombuffer(mapping, np.uint8, nbytes).view(dtype).reshape(shape)


def aligned_buffer(nbytes: int) -> np.ndarray:
    """Memory to write from directly: at least ``nbytes`` of uint8, at a multiple of ``ALIGNMENT``.

    Forked children share it: of private memory, a direct write that is under way at a fork might
    read what the child was given, and lose data (open(2)).

    Raises:
      MemoryError: there is not so much memory.
    """
    padded = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
    try:
        mapping = mmap.mmap(-1, padded, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"expected {padded:,} bytes of memory to stage a save in, found that they cannot be "
            f"had ({error}); lower WriteOptions.staging_bytes"
        ) from error
    return np.frombuffer(mapping, np.uint8)


def is_aligned(array: np.ndarray) -> bool:
    """Whether an array can be written from directly: it lies in memory of ``aligned_buffer``."""
    return isinstance(pages.owner_of(array), mmap.mmap) and array.ctypes.data % ALIGNMENT == 0


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Asks for huge pages; a kernel without them serves small ones."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)


def trim_memory() -> None:
    """Gives memory that is free back to the system, where the C library can (glibc).

    It would keep what pieces of some MiB leave behind in each of its threads' arenas: measured
    twice the memory that was in use.
    """
    trim = getattr(_C_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_bytes() -> int:
    """Bytes of memory that this process may still take: of the machine and of its container."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    found = int(fields["MemAvailable"].split()[0]) * 1024
    for folder, limit, used, prefix in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", ""),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        # Absent outside of a container, and "max" where it has no limit.
        with contextlib.suppress(OSError, ValueError):
            left = int(Path(folder, limit).read_text()) - int(Path(folder, used).read_text())
            lines = Path(folder, "memory.stat").read_text().splitlines()
            told = dict(line.split() for line in lines)
            # What is used counts the page cache of files, which goes where memory is needed.
            cached = sum(
                int(told.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file")
            )
            found = min(found, max(0, left + cached))
    return found


def keep_little() -> None:
    """Has memory given back to the system as soon as it is free; for a process of little work.

    With an arena for each thread, and buffers that stay in them, a promoter took 450 MB while it
    sent a base of 400 MB; so it takes 180, and is quicker.
    """
    mallopt = getattr(_C_LIBRARY, "mallopt", None)
    if mallopt is not None:  # Else the library is not glibc.
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
