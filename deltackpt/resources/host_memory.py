# SPDX-License-Identifier: Apache-2.0
"""Memory of the process and the machine: read buffers, prefaulted pages, what is available.

Page faults dominate the time of a restore. Huge pages are the fastest if the machine has them
ready, and the slowest if not (1.04 GB: 0.20 to 1.7 s; small ones 0.32 to 0.43 s), which changes
within minutes. Each unit of memory is therefore measured, and the result selects the page size of
the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import time
from pathlib import Path

import numpy as np

from deltackpt.errors import RestoreError

#: Taken, and timed, at once: a huge page.
UNIT_BYTES = 2 << 20
#: From Linux 5.14 on; mmap has no name for it.
_MADV_POPULATE_WRITE = 23
#: What a measurement weighs against those just before it.
_WEIGHT = 0.25
#: How the estimate of the unused page size decays with each unit: an eighth of the time
#: after 100, so that it is tried again.
_FADING = 0.98

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FreshMemory(mmap.mmap):
    """Private memory without pages, except those that ``populate`` has allocated."""


class PageChoice:
    """Selects the faster page size. Thread-safe: a lost measurement costs little."""

    def __init__(self) -> None:
        self._secs: dict[bool, float | None] = {True: None, False: None}
        self._last: bool | None = None

    def is_huge(self) -> bool:
        """Whether the next unit should be a huge page."""
        huge, small = self._secs[True], self._secs[False]
        return huge is None or (small is not None and huge <= small)

    def record(self, *, huge: bool, secs: float) -> None:
        """Records how long a unit took."""
        before, other = self._secs[huge], self._secs[not huge]
        if before is None or self._last != huge:
            before = secs  # The measurements are outdated.
        self._secs[huge] = before + _WEIGHT * (secs - before)
        self._last = huge
        if other is not None:
            self._secs[not huge] = other * _FADING


_choice = PageChoice()
_can_populate = hasattr(mmap, "MADV_HUGEPAGE")


def populate(array: np.ndarray) -> None:
    """Prefaults a contiguous array in ``FreshMemory``; does nothing for others, or on failure."""
    if not _can_populate or array.nbytes < UNIT_BYTES:
        return
    if not isinstance(owner_of(array), FreshMemory):
        return
    start = array.ctypes.data
    stop = start + array.nbytes
    while start < stop:
        end = min(stop, (start // UNIT_BYTES + 1) * UNIT_BYTES)
        # Whichever array touches it first allocates a shared huge page.
        if not _prefault(start, end):
            return
        start = end


@functools.cache
def _huge_unasked() -> bool:
    try:
        return "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def _prefault(start: int, stop: int) -> bool:
    global _can_populate
    start -= start % mmap.PAGESIZE
    length = stop - start
    whole = length == UNIT_BYTES
    huge = whole and _choice.is_huge()
    if whole and huge != _huge_unasked():
        # Only then, as it waits for the other thread's unit, which is not a huge page's cost.
        _madvise(start, length, mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    began = time.perf_counter()
    if _madvise(start, length, _MADV_POPULATE_WRITE):
        # The kernel is too old, or out of memory; a page fault then reports that as usual.
        _can_populate = False
        return False
    if whole:
        _choice.record(huge=huge, secs=time.perf_counter() - began)
    return True


def owner_of(array: np.ndarray) -> object:
    """Returns the object whose memory an array views."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner.obj if isinstance(owner, memoryview) else owner


#: What direct writes ask of memory and of positions in files.
ALIGNMENT = 4096
_C_LIBRARY = ctypes.CDLL(None)
#: Of glibc's ``mallopt``.
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3
#: From Linux 4.14 on; mmap has no name for it.
_MADV_WIPEONFORK = 18
#: Smaller arrays would waste much of a huge page.
_LARGE_BYTES = 8 << 20


def empty_buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array in its own page-aligned memory, for ``populate``.

    The alignment lets XLA's CPU backend keep the memory as a device buffer without a copy. Large
    arrays begin at a huge page. Without enough memory it raises ``RestoreError``.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < UNIT_BYTES:
        raw = np.empty(nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + nbytes].view(dtype).reshape(shape)
    room = nbytes if nbytes < _LARGE_BYTES else nbytes + UNIT_BYTES
    try:
        mapping = FreshMemory(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RestoreError(
            f"array of shape {shape}, {dtype.name}: expected {nbytes:,} bytes of memory, found an "
            f"allocation error ({error}); restore fewer rows, or on more processes"
        ) from error
    data = np.frombuffer(mapping, np.uint8)
    start = -data.ctypes.data % UNIT_BYTES if room > nbytes else 0
    return data[start : start + nbytes].view(dtype).reshape(shape)


def aligned_buffer(nbytes: int) -> np.ndarray:
    """Returns at least ``nbytes`` of uint8 for direct writes, aligned to ``ALIGNMENT``.

    Large buffers are in huge pages if possible. Forked children find zeros. As with
    ``MADV_DONTFORK``, which open(2) requires of private memory, a fork does not make the parent's
    pages copy-on-write; but a child may touch the memory and free it.
    """
    padded = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
    # Direct writes of 1 GB from pieces of 4 MiB took 240 to 280 ms with huge pages, and 440 to 480
    # with small ones.
    is_large = padded >= UNIT_BYTES
    room = -(-padded // UNIT_BYTES) * UNIT_BYTES + UNIT_BYTES
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
    return buffer[-buffer.ctypes.data % UNIT_BYTES :][:padded]


def is_aligned(array: np.ndarray) -> bool:
    """Returns whether an array supports direct writes: it is in ``aligned_buffer`` memory."""
    return isinstance(owner_of(array), mmap.mmap) and array.ctypes.data % ALIGNMENT == 0


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Requests huge pages; a kernel without them provides small pages."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)


def trim_memory() -> None:
    """Returns free memory to the system, if the C library supports that (glibc).

    Otherwise glibc keeps freed pieces in the arena of each thread: twice the memory in use.
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
            reported = dict(line.split() for line in lines)
            # The usage includes the page cache, which is evicted when memory is needed.
            cached = sum(
                int(reported.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file")
            )
            found = min(found, max(0, left + cached))
    return found


def keep_little() -> None:
    """Makes the allocator return freed memory immediately; for a process with little work.

    An uploader of a base of 400 MB uses 180 MB in this way, instead of 450, and is faster.
    """
    mallopt = getattr(_C_LIBRARY, "mallopt", None)
    if mallopt is not None:  # Else the library is not glibc.
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
