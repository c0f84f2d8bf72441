# SPDX-License-Identifier: Apache-2.0
"""Host memory for snapshots: bounded, and reused from save to save.

Fresh memory fills at 0.3 to 8 GB/s because of page faults, warm memory at 17. Buffers of a finished
save are therefore kept for the next one, up to the budget. They are aligned for direct I/O.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from deltackpt.errors import OptionError
from deltackpt.resources.memory import aligned_buffer
from deltackpt.resources.workers import drain

_GRAIN_BYTES = 1 << 20
#: Threads share copies of so many bytes at least, each in pieces of about so many.
_SHARED_BYTES, _PIECE_BYTES = 8 << 20, 2 << 20
_T = TypeVar("_T")


class Staging:
    """A bounded pool of host buffers, and the threads that fill them; thread-safe."""

    THREADS = 2

    def __init__(self, budget_bytes: int):
        """Makes an empty pool.

        Args:
          budget_bytes: most bytes that may be lent and kept at any time.

        Raises:
          OptionError: the budget is not positive.
        """
        if budget_bytes <= 0:
            raise OptionError(f"staging_bytes: expected a positive size, found {budget_bytes}")
        self.budget_bytes = budget_bytes
        #: Most bytes that are kept without being lent.
        self.most_free_bytes = budget_bytes
        self._pool = concurrent.futures.ThreadPoolExecutor(self.THREADS, "deltackpt-copy")
        self._lock = threading.Lock()
        self._here = False
        self._free: list[np.ndarray] = []
        self._lent: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def submit(self, call: Callable[..., _T], *arguments: Any) -> concurrent.futures.Future[_T]:
        """Runs a call, typically a copy into a buffer, on one of the threads."""
        if not self._here:
            return self._pool.submit(call, *arguments)
        found: concurrent.futures.Future[_T] = concurrent.futures.Future()
        try:
            found.set_result(call(*arguments))
        except Exception as error:
            found.set_exception(error)
        return found

    @contextlib.contextmanager
    def here(self, wanted: bool = True) -> Iterator[None]:
        """Inside the context, runs submitted work immediately in the submitting thread.

        A thread that wakes up while others contend for the GIL starts after one to two ms; a few MB
        are copied in less.

        Args:
          wanted: whether to do so; if False, the context has no effect.
        """
        before, self._here = self._here, wanted
        try:
            yield
        finally:
            self._here = before

    def copy(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Copies arrays in this thread; for large copies, the pool's threads help.

        Args:
          pairs: destination and source arrays, of equal shapes.
        """
        if sum(source.nbytes for _, source in pairs) < _SHARED_BYTES:
            for pair in pairs:
                _copy(pair)
            return
        left = collections.deque(piece for pair in pairs for piece in _pieces(*pair))
        helpers = [self._pool.submit(drain, left, _copy) for _ in range(self.THREADS - 1)]
        try:
            drain(left, _copy)
        finally:
            left.clear()
            # Threads that have not started are not awaited: no work is left.
            begun = [helper for helper in helpers if not helper.cancel()]
            concurrent.futures.wait(begun)
        for helper in begun:
            helper.result()

    def fits(self, nbytes: int) -> bool:
        """Returns whether buffers of ``nbytes`` in total are available now."""
        with self._lock:
            lent = sum(raw.nbytes for _, raw in self._lent.values())
            return lent + nbytes <= self.budget_bytes

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an uninitialized buffer; pass it to ``give_back`` after use."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            # What any small request gets fits all of them: else each would take a new one.
            most = max(4 * nbytes, 2 * _GRAIN_BYTES)
            fitting = [raw for raw in self._free if nbytes <= raw.nbytes <= most]
            raw = min(fitting, key=lambda raw: raw.nbytes, default=None)
            if raw is None:
                grains = max(1, -(-nbytes * 5 // 4 // _GRAIN_BYTES))
                raw = aligned_buffer(grains * _GRAIN_BYTES)
            else:
                self._free = [kept for kept in self._free if kept is not raw]
            out = raw[:nbytes].view(dtype).reshape(shape)
            self._lent[id(out)] = (out, raw)
        return out

    def give_back(self, buffer: np.ndarray) -> None:
        """Returns a buffer of ``take`` to the pool, which evicts its oldest ones if it is full."""
        self.done_with([buffer])

    def done_with(self, arrays: Iterable[Any]) -> None:
        """Returns the buffers among some arrays to the pool; see ``give_back``."""
        with self._lock:
            self._free += [self._lent.pop(id(one))[1] for one in arrays if id(one) in self._lent]
            while self._free and (
                self.nbytes > self.budget_bytes
                or sum(raw.nbytes for raw in self._free) > self.most_free_bytes
            ):
                self._free.pop(0)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all buffers, lent or kept."""
        lent = sum(raw.nbytes for _, raw in self._lent.values())
        return lent + sum(raw.nbytes for raw in self._free)


def _pieces(out: np.ndarray, source: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A copy in pieces along the first axis."""
    if source.nbytes < 2 * _PIECE_BYTES or not source.ndim:
        yield out, source
        return
    count = max(1, len(source) * _PIECE_BYTES // source.nbytes)
    for start in range(0, len(source), count):
        yield out[start : start + count], source[start : start + count]


def _copy(pair: tuple[np.ndarray, np.ndarray]) -> None:
    np.copyto(*pair)
