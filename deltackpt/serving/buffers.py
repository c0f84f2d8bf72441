# SPDX-License-Identifier: Apache-2.0
"""Memory that is written once, read while it is referenced, and then reused.

A reader may keep an array, or let jax alias it, while newer versions arrive. Memory returns to the
pool when its last reference is dropped, without locks or waiting.
"""

from __future__ import annotations

import collections
import math
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from deltackpt.format.dense_blocks import BLOCK, BlockedValue
from deltackpt.format.dtypes import dtype_of
from deltackpt.reading.stored_dense import shape_of
from deltackpt.resources import memory

#: Sizes are multiples of the largest block, so a value has the same one with its padding.
_UNIT_BYTES = BLOCK * 8


class Buffers:
    """A pool of memory for values."""

    def __init__(self) -> None:
        """Creates an empty pool."""
        #: Appended to in whichever thread drops the last reference: a deque needs no lock.
        self._spare: dict[int, collections.deque[np.ndarray]] = {}

    def room(self, value: BlockedValue) -> np.ndarray:
        """Returns uninitialized memory for a value; see ``stored_dense.Room``.

        Raises:
          RestoreError: there is not enough memory.
        """
        shape, dtype = shape_of(value), dtype_of(value.dtype)
        size = _size(value.nbytes)
        spare = self._spare.setdefault(size, collections.deque())
        try:
            data = spare.popleft()
        except IndexError:
            data = memory.empty_buffer((size,), np.dtype(np.uint8))
        owner = _Owner(data)
        weakref.finalize(owner, spare.append, data).atexit = False
        used = np.asarray(owner)[: math.prod(shape) * dtype.itemsize]
        return used.view(dtype).reshape(shape)

    def trim(self, used: Iterable[int]) -> None:
        """Frees spare memory that the next version cannot use.

        Args:
          used: sizes in bytes of the newest version's values; all of them may change in the next.
        """
        wanted = collections.Counter(map(_size, used))
        for size, spare in [*self._spare.items()]:
            for _ in range(len(spare) - wanted[size]):
                spare.popleft()
            if size not in wanted:
                del self._spare[size]


class _Owner:
    """Keeps memory out of the pool while an array refers to it."""

    def __init__(self, data: np.ndarray):
        self.__array_interface__: dict[str, Any] = data.__array_interface__


def _size(nbytes: int) -> int:
    return -(-nbytes // _UNIT_BYTES) * _UNIT_BYTES
