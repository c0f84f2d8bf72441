# SPDX-License-Identifier: Apache-2.0
"""What follows from a layout alone, computed once: saves of one layout all ask for the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from deltackpt.format.manifest import Layout

#: A training run has one layout or two.
_MOST = 8
_T = TypeVar("_T")


class ByLayout(Generic[_T]):
    """Results by layout and by what else decides them; the oldest make room. Thread-safe.

    A layout is known by its identity: ``tables.split`` gives the same object for states of equal
    structure, shapes, dtypes and shardings, and comparing two of a thousand tables would cost more
    than what is kept here. No arrays may be kept.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self._lock = threading.Lock()
        # With the layout, whose identity no other has while it is kept.
        self._known: dict[Any, tuple[Layout, _T]] = {}

    def get(self, layout: Layout, rest: Hashable, make: Callable[[], _T]) -> _T:
        """The result for a layout, made where it is not known.

        Args:
          layout: of the state.
          rest: all else that the result depends on.
          make: makes it; what it raises is not kept.
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
        """Forgets everything."""
        with self._lock:
            self._known.clear()
