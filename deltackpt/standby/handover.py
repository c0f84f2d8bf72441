# SPDX-License-Identifier: Apache-2.0
"""Takes memory over that a process has mapped copy-on-write, once its owner has let it go.

The mapping's own copies of pages that were written to come on top of those below them, which stay
for as long as anything is mapped: training that writes everywhere would hold its state twice. So a
thread looks now and then. Where nobody else has the memory open (a lease tells, as in
``standby.memory``), a piece of 2 MiB of which the process has written to an eighth is copied
whole, and what is below it goes back to the system: the process holds its state 1.13 times at
most, but for what it wrote since the last look. ``/proc/self/pagemap`` says which pages are copies,
before and again after: nothing that could still be read is given back. 400 MB take 0.29 s, once,
which training would have waited for page by page.

A forked child goes on reading what its parent has a copy of: from the first fork on all stays as it
is (``subprocess``, which starts another program at once, is none).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref

import numpy as np

from deltackpt.standby import leases

#: Taken over at once, and after what share of it was written to.
PIECE_BYTES = 2 << 20
_WRITTEN_SHARE = 1 / 8
#: Rests between two looks: doubled while nothing is found.
_LEAST_REST_SECS, _MOST_REST_SECS = 1.0, 30.0
#: From Linux 5.14 on; mmap has no name for it.
_MADV_POPULATE_WRITE = 23
#: Of the three highest bits of an entry of pagemap; the others: swapped out, and there.
_OF_A_FILE = 1
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_C_LIBRARY = ctypes.CDLL(None, use_errno=True)
_madvise, _fallocate = _C_LIBRARY.madvise, _C_LIBRARY.fallocate
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Mapped:
    """A private mapping of memory that may become its process's alone."""

    def __init__(self, mapping: mmap.mmap, descriptor: int, first: int):
        """Looks at nothing yet.

        Args:
          mapping: of all of the memory, copy-on-write; it may go at any time.
          descriptor: that it was made of, opened for reading; a copy of it is kept while there is
            the mapping.
          first: byte from which on it is taken over, at the begin of a page.
        """
        self._mapping = weakref.ref(mapping)
        self._nbytes = -(-len(mapping) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._start = np.frombuffer(mapping, np.uint8).ctypes.data
        self._leased = os.dup(descriptor)
        self._writable: int | None = None
        self._left = [*range(first, self._nbytes, PIECE_BYTES)]
        weakref.finalize(mapping, os.close, self._leased)

    def take_over(self) -> bool | None:
        """Looks once.

        Returns:
          Whether something was taken over; None where there is nothing left to take.

        Raises:
          OSError: this process may not change the memory.
        """
        mapping = self._mapping()  # It stays while this looks.
        if mapping is None or not self._left:
            return None
        if self._writable is None:
            if leases.is_open_elsewhere(self._leased):
                return False
            # Nobody finds it any more: it had no name but the owner's descriptor.
            name = f"/proc/self/fd/{self._leased}"
            self._writable = os.open(name, os.O_RDWR | os.O_CLOEXEC)
            weakref.finalize(mapping, os.close, self._writable)
        written = self._copied(0, self._nbytes)
        before = len(self._left)
        self._left = [start for start in self._left if not self._take(start, written)]
        return len(self._left) < before

    def _take(self, start: int, written: np.ndarray) -> bool:
        """Makes a piece the mapping's own where much of it is; whether it is now."""
        stop = min(start + PIECE_BYTES, self._nbytes)
        pages = written[start // mmap.PAGESIZE : stop // mmap.PAGESIZE]
        if pages.mean() < _WRITTEN_SHARE:
            return False
        if _madvise(self._start + start, stop - start, _MADV_POPULATE_WRITE):
            return False
        if not self._copied(start, stop).all():
            return False
        assert self._writable is not None
        how = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        return _fallocate(self._writable, how, start, stop - start) == 0

    def _copied(self, start: int, stop: int) -> np.ndarray:
        """Of each page whether it is a copy: there, or swapped out, and none of a file."""
        first, count = (self._start + start) // mmap.PAGESIZE, (stop - start) // mmap.PAGESIZE
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = np.frombuffer(os.pread(descriptor, 8 * count, 8 * first), "<u8")
        finally:
            os.close(descriptor)
        if len(entries) < count:
            return np.zeros(count, bool)
        bits = entries >> np.uint64(61)
        return (bits != 0) & (bits & np.uint64(_OF_A_FILE) == 0)


class _Watch:
    """The one thread of a process that takes over; it ends where nothing is left."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._all: list[Mapped] = []
        self._running = False
        self._rest_secs = _LEAST_REST_SECS
        os.register_at_fork(before=self._forget)

    def add(self, mapped: Mapped) -> None:
        with self._changed:
            self._all.append(mapped)
            self._rest_secs = _LEAST_REST_SECS
            self._changed.notify_all()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="deltackpt-handover", daemon=True).start()

    def _forget(self) -> None:
        with self._changed:
            self._all.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._rest_secs)
                found = [(one, _taken_over(one)) for one in self._all]
                self._all = [one for one, taken in found if taken is not None]
                if not self._all:
                    self._running = False
                    return
                changed = any(taken for _, taken in found)
                rest = _LEAST_REST_SECS if changed else 2 * self._rest_secs
                self._rest_secs = min(rest, _MOST_REST_SECS)


_watch = _Watch()


def _taken_over(mapped: Mapped) -> bool | None:
    try:
        return mapped.take_over()
    except OSError:  # Then it stays as it is.
        return None


def watch(mapping: mmap.mmap, descriptor: int, first: int) -> None:
    """Takes the memory of a mapping over as its process writes to it; see ``Mapped``."""
    _watch.add(Mapped(mapping, descriptor, first))
