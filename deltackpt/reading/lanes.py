# SPDX-License-Identifier: Apache-2.0
"""Work in lanes: stages of one lane follow each other, those of different lanes wait for none."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")


def run(
    lanes: Iterable[Iterable[Sequence[_T]]],
    call: Callable[[_T], None],
    pool: concurrent.futures.Executor,
    threads: int,
) -> None:
    """Calls with every item; of a lane those of a stage when those of the stage before are done.

    Args:
      lanes: of each its stages, of each its items, which may be called with at the same time.
      call: what to do with an item.
      pool: where the calls are made.
      threads: how many at a time.

    Raises:
      Exception: what a call raised; no other call began after it, and none runs any more.
    """
    work = _Work(lanes)
    futures = [pool.submit(work.do, call) for _ in range(threads)]
    concurrent.futures.wait(futures)
    for future in futures:
        future.result()


class _Work(Generic[_T]):
    """What may be done now, and what follows."""

    def __init__(self, lanes: Iterable[Iterable[Sequence[_T]]]):
        self._changed = threading.Condition()
        self._later = [collections.deque(stage for stage in lane if stage) for lane in lanes]
        self._ready: collections.deque[tuple[int, _T]] = collections.deque()
        #: Of each lane, how many items of its stage are not done.
        self._open = [0] * len(self._later)
        self._failed = False
        for lane in range(len(self._later)):
            self._open_next(lane)

    def do(self, call: Callable[[_T], None]) -> None:
        """Does what is ready until there is nothing more, here or on any other thread."""
        try:
            while (taken := self._take()) is not None:
                lane, item = taken
                call(item)
                self._done(lane)
        except BaseException:
            with self._changed:
                self._failed = True
                self._changed.notify_all()
            raise

    def _take(self) -> tuple[int, _T] | None:
        with self._changed:
            while not self._ready and any(self._open) and not self._failed:
                self._changed.wait()
            return self._ready.popleft() if self._ready and not self._failed else None

    def _done(self, lane: int) -> None:
        with self._changed:
            self._open[lane] -= 1
            if not self._open[lane]:
                self._open_next(lane)
                self._changed.notify_all()

    def _open_next(self, lane: int) -> None:
        if self._later[lane]:
            stage = self._later[lane].popleft()
            self._open[lane] = len(stage)
            self._ready += ((lane, item) for item in stage)
