# SPDX-License-Identifier: Apache-2.0
"""Stages of a lane follow each other; lanes do not wait for each other."""

import concurrent.futures
import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.reading import lanes


@given(st.lists(st.lists(st.integers(0, 4), max_size=5), max_size=5), st.integers(1, 4))
def test_every_item_is_done_once_and_a_stage_after_the_one_before(sizes, threads):
    work = [
        [[(lane, stage, item) for item in range(size)] for stage, size in enumerate(stages)]
        for lane, stages in enumerate(sizes)
    ]
    log, lock = [], threading.Lock()

    def call(item):
        with lock:
            log.append(("begun", *item))
        if random.random() < 0.1:
            time.sleep(0.0005)
        with lock:
            log.append(("done", *item))

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        lanes.run(work, call, pool, threads)
    items = [item for stages in work for stage in stages for item in stage]
    assert sorted(entry[1:] for entry in log if entry[0] == "done") == sorted(items)
    for lane in range(len(work)):
        mine = [entry for entry in log if entry[1] == lane]
        for position, (what, _, stage, _) in enumerate(mine):
            if what == "begun":
                assert all(later[2] >= stage for later in mine[position:])
                earlier = {item for item in items if item[0] == lane and item[1] < stage}
                assert earlier <= {entry[1:] for entry in mine[:position] if entry[0] == "done"}


def test_a_lane_goes_on_while_another_is_held_up():
    others_done = threading.Event()

    def call(item):
        if item == "slow":
            assert others_done.wait(30)
        elif item == "last":
            others_done.set()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        lanes.run([[["slow"]], [["first"], [], ["second"], ["last"]]], call, pool, 2)


def test_the_items_of_a_stage_run_at_the_same_time():
    together = threading.Barrier(3)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        lanes.run([[[1, 2, 3]]], lambda item: together.wait(30) and None, pool, 3)


def test_what_a_call_raises_comes_out_when_none_runs_any_more():
    begun, running = [], threading.Event()

    def call(item):
        begun.append(item)
        if item == "bad":
            assert running.wait(30)
            raise ValueError("bad")
        if item == "long":
            running.set()
            time.sleep(0.05)
            begun.append("long is done")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with pytest.raises(ValueError, match="bad"):
            lanes.run([[["bad"], ["never"]], [["long"], ["never"]]], call, pool, 2)
        assert sorted(begun) == ["bad", "long", "long is done"]
