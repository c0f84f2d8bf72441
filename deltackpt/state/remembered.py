# SPDX-License-Identifier: Apache-2.0
"""Caches results that depend only on a layout, because all saves with that layout share them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from deltackpt.format.manifest import Layout

#: A training run has one layout or two.
_MOST = 8
_T = TypeVar("_T")


class ByLayout(Generic[_T]):
    """Caches results by layout and other inputs; evicts the oldest. Thread-safe.

    A layout is compared by identity: ``tables.split`` returns the same object for states of equal
    structure, shapes, dtypes and shardings, and comparing two of a thousand tables would cost more
    than this cache saves. It must not contain arrays.
    """

    def __init__(self) -> None:
        """Creates an empty cache."""
        self._lock = threading.Lock()
        # With the layout, whose identity no other has while it is kept.
        self._known: dict[Any, tuple[Layout, _T]] = {}

    def get(self, layout: Layout, rest: Hashable, make: Callable[[], _T]) -> _T:
        """Returns the result for a layout, computing it if it is not cached.

        Args:
          layout: the state's layout.
          rest: all other inputs of the result.
          make: computes it; errors are not cached.
        """
        key = id(layout), rest
        with self._lock:
            known = self._known.get(key)  # Hashing a thousand shardings takes a millisecond.
        if known is not None:
            return known[1]
        made = make()
        with self._lock:
            self._known[key] = layout, made
            while len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
        return made

    def clear(self) -> None:
        """Empties the cache."""
        with self._lock:
            self._known.clear()
