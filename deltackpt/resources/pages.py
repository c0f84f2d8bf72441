# SPDX-License-Identifier: Apache-2.0
"""Prefaults fresh memory in one call, with the page size that is currently faster.

Page faults dominate the time of a restore. Huge pages are the fastest if the machine has them
ready, and the slowest if not, as in a guest whose host reclaims free memory; this changes within
minutes. Measured on one such machine within an hour, 1.04 GB
read from the page cache by two threads: 0.20 to 1.7 s into huge pages, 0.36 to 0.43 s into small
ones that are faulted one by one, 0.32 to 0.40 s into small ones taken here. Each unit of
memory is therefore measured, and the result selects the page size of the next one.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import time
from pathlib import Path

import numpy as np

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
        """Neither was tried."""
        self._secs: dict[bool, float | None] = {True: None, False: None}
        self._last: bool | None = None

    def is_huge(self) -> bool:
        """Whether the next unit should be a huge page."""
        huge, small = self._secs[True], self._secs[False]
        return huge is None or (small is not None and huge <= small)

    def tell(self, *, huge: bool, secs: float) -> None:
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
    """Prefaults an array in ``FreshMemory``; does nothing for other arrays, or on failure.

    Args:
      array: a contiguous array; its contents do not change.
    """
    if not (_can_populate and array.nbytes >= UNIT_BYTES and _is_fresh(array)):
        return
    start = array.ctypes.data
    stop = start + array.nbytes
    while start < stop:
        end = min(stop, (start // UNIT_BYTES + 1) * UNIT_BYTES)
        # Whichever array touches it first allocates a shared huge page.
        if not _take(start, end):
            return
        start = end


@functools.cache
def _huge_unasked() -> bool:
    """Whether the machine uses huge pages by default."""
    try:
        return "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def _take(start: int, stop: int) -> bool:
    global _can_populate
    start -= start % mmap.PAGESIZE
    length = stop - start
    whole = length == UNIT_BYTES
    huge = whole and _choice.is_huge()
    began = time.perf_counter()
    if whole and huge != _huge_unasked():
        # Only then, as it waits for the other thread's unit.
        _madvise(start, length, mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    if _madvise(start, length, _MADV_POPULATE_WRITE):
        # The kernel is too old, or out of memory; a page fault then reports that as usual.
        _can_populate = False
        return False
    if whole:
        _choice.tell(huge=huge, secs=time.perf_counter() - began)
    return True


def _is_fresh(array: np.ndarray) -> bool:
    return isinstance(owner_of(array), FreshMemory)


def owner_of(array: np.ndarray) -> object:
    """Returns the object whose memory an array views."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner.obj if isinstance(owner, memoryview) else owner
