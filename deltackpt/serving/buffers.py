# SPDX-License-Identifier: Apache-2.0
"""Memory of values: written once, read for as long as anybody refers to it, then used again.

A reader may keep an array, or have jax alias it, while newer versions come. So nobody waits and no
lock is taken: what nobody refers to any more goes back to the spare buffers by itself.
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
    """The memory of one value; arrays made of it by ``array`` keep it.

    Attributes:
      data: what may be written until the buffer is shown to others: (blocks, 256) numbers, or (n,)
        bytes.
      number: of this content; no two buffers have the same.
    """

    def __init__(self, data: np.ndarray):
        """Made by ``Buffers``."""
        self.data = data
        self.number = next(_NUMBERS)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        flat = self.data.reshape(-1).view(np.uint8)
        address, _ = flat.__array_interface__["data"]
        return {"shape": flat.shape, "typestr": "|u1", "data": (address, True), "version": 3}

    def array(self) -> np.ndarray:
        """All bytes, read-only; the buffer lasts for as long as the array and any view of it."""
        return np.asarray(self)


class Buffers:
    """Makes buffers, of memory that was one before where there is some."""

    def __init__(self) -> None:
        """Has none."""
        #: Appended to wherever the last reference goes: a deque needs no lock.
        self._spare: dict[tuple[tuple[int, ...], np.dtype], collections.deque[np.ndarray]] = {}

    def new(self, shape: tuple[int, ...], dtype: np.dtype) -> Buffer:
        """A buffer with any contents.

        Raises:
          RestoreError: there is not so much memory.
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
        """Gives memory back that the next version has no use for.

        Args:
          used: the buffers of the newest one, of which all may change.
        """
        wanted = collections.Counter((one.data.shape, one.data.dtype) for one in used)
        for kind, spare in [*self._spare.items()]:
            for _ in range(len(spare) - wanted[kind]):
                spare.popleft()
            if kind not in wanted:
                del self._spare[kind]
