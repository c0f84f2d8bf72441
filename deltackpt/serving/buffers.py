# SPDX-License-Identifier: Apache-2.0
"""Buffers that are written once, read while they are referenced, and then reused.

A reader may keep an array, or let jax alias it, while newer versions arrive. Buffers return to the
pool when their last reference is dropped, without locks or waiting.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from deltackpt.resources import memory

_NUMBERS = itertools.count()


class Buffer:
    """The memory of one value; arrays returned by ``array`` keep it alive.

    Attributes:
      data: the memory: (blocks, 256) elements, or (n,) bytes. Writable until it is published.
      number: unique number of the content.
    """

    def __init__(self, data: np.ndarray):
        """Internal: call ``Buffers.new``."""
        self.data = data
        self.number = next(_NUMBERS)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        flat = self.data.reshape(-1).view(np.uint8)
        address, _ = flat.__array_interface__["data"]
        return {"shape": flat.shape, "typestr": "|u1", "data": (address, True), "version": 3}

    def array(self) -> np.ndarray:
        """Returns all bytes, read-only; the array and its views keep the buffer alive."""
        return np.asarray(self)


class Buffers:
    """A pool of buffers."""

    def __init__(self) -> None:
        """Creates an empty pool."""
        #: Appended to in whichever thread drops the last reference: a deque needs no lock.
        self._spare: dict[tuple[tuple[int, ...], np.dtype], collections.deque[np.ndarray]] = {}

    def new(self, shape: tuple[int, ...], dtype: np.dtype) -> Buffer:
        """Returns an uninitialized buffer.

        Raises:
          RestoreError: there is not enough memory.
        """
        spare = self._spare.setdefault((shape, dtype), collections.deque())
        try:
            data = spare.popleft()
        except IndexError:
            data = memory.empty_buffer(shape, dtype)
        found = Buffer(data)
        weakref.finalize(found, spare.append, data).atexit = False
        return found

    def trim(self, used: Iterable[Buffer]) -> None:
        """Frees spare memory that the next version cannot use.

        Args:
          used: the buffers of the newest version; all of them may change in the next.
        """
        wanted = collections.Counter((one.data.shape, one.data.dtype) for one in used)
        for kind, spare in [*self._spare.items()]:
            for _ in range(len(spare) - wanted[kind]):
                spare.popleft()
            if kind not in wanted:
                del self._spare[kind]
