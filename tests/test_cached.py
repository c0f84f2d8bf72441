# SPDX-License-Identifier: Apache-2.0
"""Cached properties of objects that threads share."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from deltackpt.cached import cached_property

#: Keeps the objects alive: freeing one with two dicts would crash the process.
KEPT: list[Any] = []


class Shared:
    def __init__(self) -> None:
        self.first, self.second = [1], [2]

    @cached_property
    def found(self) -> list[int]:
        return self.first + self.second


@pytest.mark.parametrize("later", range(8))
def test_a_thread_that_runs_during_a_collection_gets_the_same_dict(later):
    shared, dicts, threads = Shared(), [], []
    KEPT.append(shared)

    def use() -> None:
        assert shared.found == [1, 2]
        dicts.append(shared.__dict__)

    def during(phase: str, info: dict[str, int]) -> None:
        if not threads:
            threads.append(threading.Thread(target=use))
            threads[0].start()
            threads[0].join(0.2)  # It may wait for this thread.

    limits = gc.get_threshold()
    gc.disable()
    # Empties CPython's free list of dicts, so that creating a dict may start a collection.
    KEPT.append([{} for _ in range(100)])
    gc.callbacks.append(during)
    gc.set_threshold(gc.get_count()[0] + later, 1000, 1000)
    gc.enable()
    try:
        use()
    finally:
        gc.set_threshold(*limits)
        gc.callbacks.remove(during)
    for thread in threads:
        thread.join()
    assert all(one is shared.__dict__ for one in dicts)
