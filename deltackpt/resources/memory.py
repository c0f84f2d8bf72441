# SPDX-License-Identifier: Apache-2.0
"""Memory of the process and the machine: read buffers, available memory, trimming."""

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
#: From Linux 4.14 on; mmap has no name for it.
_MADV_WIPEONFORK = 18
#: Smaller buffers would waste most of a huge page.
_LARGE_BYTES = 8 << 20


def empty_buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array in its own page-aligned memory, for ``pages.populate``.

    The alignment lets XLA's CPU backend keep the memory as a device buffer without a copy.

    Args:
      shape: shape of the array.
      dtype: dtype of the array.

    Raises:
      RestoreError: there is not enough memory.
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
            f"array of shape {shape}, {dtype.name}: expected {nbytes:,} bytes of memory, found an "
            f"allocation error ({error}); restore fewer rows, or on more processes"
        ) from error
    return np.frombuffer(mapping, np.uint8, nbytes).view(dtype).reshape(shape)


def aligned_buffer(nbytes: int) -> np.ndarray:
    """Returns at least ``nbytes`` of uint8 for direct writes, aligned to ``ALIGNMENT``.

    Large buffers are in huge pages if possible, which are filled faster. Forked children find
    zeros. As with ``MADV_DONTFORK``, which open(2) requires of private memory, a fork does not make
    the parent's pages copy-on-write; but a child may touch the memory and free it.

    Raises:
      MemoryError: there is not enough memory.
    """
    padded = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
    is_large = padded >= _LARGE_BYTES
    room = -(-padded // pages.UNIT_BYTES) * pages.UNIT_BYTES + pages.UNIT_BYTES
    try:
        mapping = mmap.mmap(-1, room if is_large else padded, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"expected {padded:,} bytes of memory to stage a save in, found an allocation error "
            f"({error}); lower WriteOptions.staging_bytes"
        ) from error
    try:
        mapping.madvise(_MADV_WIPEONFORK)
    except OSError:  # The kernel is too old: children share the memory.
        mapping = mmap.mmap(-1, len(mapping), mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    buffer = np.frombuffer(mapping, np.uint8)
    if not is_large:
        return buffer
    advise_huge_pages(mapping)
    return buffer[-buffer.ctypes.data % pages.UNIT_BYTES :][:padded]


def is_aligned(array: np.ndarray) -> bool:
    """Returns whether an array supports direct writes: it is in ``aligned_buffer`` memory."""
    return isinstance(pages.owner_of(array), mmap.mmap) and array.ctypes.data % ALIGNMENT == 0


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Requests huge pages; a kernel without them provides small pages."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)


def trim_memory() -> None:
    """Returns free memory to the system, if the C library supports that (glibc).

    Otherwise glibc keeps freed pieces of some MiB in the arena of each thread: measured at twice
    the memory in use.
    """
    trim = getattr(_C_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_bytes() -> int:
    """Returns the bytes that this process may still allocate, by machine and container limits."""
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
            # The usage includes the page cache, which is evicted when memory is needed.
            cached = sum(
                int(told.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file")
            )
            found = min(found, max(0, left + cached))
    return found


def keep_little() -> None:
    """Makes the allocator return freed memory immediately; for a process with little work.

    With an arena for each thread, the uploader used 450 MB to send a base of 400 MB. With this
    setting it uses 180 MB and is faster.
    """
    mallopt = getattr(_C_LIBRARY, "mallopt", None)
    if mallopt is not None:  # Else the library is not glibc.
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
