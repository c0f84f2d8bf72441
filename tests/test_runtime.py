# SPDX-License-Identifier: Apache-2.0
"""Threads and memory of concurrent work: bounds, errors, nested waits, forks and exits."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from types import FrameType

import numpy as np
import pytest

from deltackpt.errors import OptionError
from deltackpt.resources.runtime import Memory, Reservation, Runtime, Task
from deltackpt.save import dense_save


def ours() -> set[str]:
    return {one.name for one in threading.enumerate() if one.name.startswith("deltackpt")}


# Threads.


@pytest.fixture
def runtime():
    with Runtime(4) as runtime:
        yield runtime


def test_results_are_in_the_order_of_the_requests(runtime):
    assert runtime.map(lambda one: one * one, range(100)) == [one * one for one in range(100)]
    assert runtime.map(str, []) == []


def test_the_requested_number_of_threads_run_at_the_same_time(runtime):
    barrier = threading.Barrier(4)
    assert sorted(runtime.map(lambda _: barrier.wait(60.0), range(4))) == [0, 1, 2, 3]
    with Runtime(2, size=7) as other:
        barrier = threading.Barrier(8)
        other.map(lambda _: barrier.wait(60.0), range(8), threads=8)


def test_one_thread_is_the_callers():
    with Runtime(1) as runtime:
        before = ours()
        found = runtime.map(lambda _: threading.get_ident(), range(5))
        assert {*found} == {threading.get_ident()} and ours() == before


def test_the_first_error_is_raised_after_all_calls_have_ended(runtime):
    running, called = threading.Event(), []

    def call(number: int) -> None:
        called.append(number)
        if number == 0:
            assert running.wait(60.0)
            raise OSError("lost")
        running.set()
        called.append(-number)

    with pytest.raises(OSError, match="lost"):
        runtime.map(call, range(10_000))
    assert all(-number in called for number in called if number > 0)
    assert len(called) < 20_000


def test_an_error_on_another_thread_is_raised_in_the_caller(runtime):
    here, failed = threading.get_ident(), threading.Event()

    def call(_: int) -> None:
        if threading.get_ident() == here:
            assert failed.wait(60.0)
        else:
            failed.set()
            raise KeyError("there")

    with pytest.raises(KeyError, match="there"):
        runtime.map(call, range(4))
    task = runtime.submit(int, "x")
    for _ in range(2):
        with pytest.raises(ValueError, match="'x'"):
            task.result()


def test_nested_work_ends_with_a_single_thread():
    """Whoever waits for a call that no thread has started runs it."""
    with Runtime(2) as runtime:

        def depth(left: int) -> int:
            if not left:
                return 0
            inner = [runtime.submit(depth, left - 1) for _ in range(2)]
            return 1 + max(runtime.map(Task.result, inner))

        assert runtime.submit(depth, 6).result() == 6


def test_waiting_does_not_need_an_idle_thread():
    go = threading.Event()
    with Runtime(2, size=2) as runtime:
        busy = [runtime.start(go.wait, 60.0) for _ in range(2)]
        try:
            assert runtime.map(abs, range(8)) == [*range(8)]
            assert runtime.submit(abs, -1).result() == 1
            assert not any(one.done() for one in busy)
        finally:
            go.set()


def test_a_call_runs_once():
    calls, barrier = [], threading.Barrier(8)
    task = Task(lambda: calls.append(1))

    def run() -> None:
        barrier.wait(60.0)
        task.result()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1] and not task.cancel()


def test_a_call_is_dropped_before_its_result_is_there():
    # XLA does not donate arrays that a call refers to.
    held = np.zeros(3)
    known, found = weakref.ref(held), []
    task = Task(functools.partial(np.sum, held))
    task.future.add_done_callback(lambda _: found.append(known()))
    del held
    assert task.result() == 0
    assert found == [None]


def test_a_cancelled_call_never_runs():
    calls = []
    task = Task(lambda: calls.append(1))
    assert task.cancel() and not task.cancel()
    task.wait()
    with pytest.raises(CancelledError):
        task.result()
    assert not calls


def test_an_interrupt_of_a_caller_that_runs_a_call_is_raised_there():
    def interrupted() -> None:
        raise KeyboardInterrupt

    for act in (Task.wait, Task.result):
        task = Task(interrupted)
        with pytest.raises(KeyboardInterrupt):
            act(task)
        with pytest.raises(KeyboardInterrupt):
            task.future.result()


def test_an_interrupt_is_raised_once_no_other_thread_uses_the_callers_memory():
    """Otherwise a later save could get a buffer that a thread still writes to."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    here, started, ended = threading.get_ident(), threading.Event(), []

    def call(_: int) -> None:
        if threading.get_ident() == here:
            assert started.wait(60.0)
            return
        started.set()
        time.sleep(0.1)  # Until the caller waits.
        signal.pthread_kill(here, signal.SIGINT)
        time.sleep(0.2)
        ended.append(True)

    try:
        with Runtime(2) as runtime, pytest.raises(KeyboardInterrupt):
            runtime.map(call, range(2))
        assert ended
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_call_that_another_thread_has_taken_does_not_fail_for_lack_of_a_thread(
    runtime, monkeypatch
):
    """The executor has queued a call before it finds that no further thread can start."""

    def submit(call):
        taker = threading.Thread(target=call)
        taker.start()
        taker.join()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(runtime._pool, "submit", submit)
    assert runtime.start(lambda: "done").result(60.0) == "done"


def test_no_thread_is_left_after_closing():
    before = ours()
    with Runtime(4) as runtime:
        runtime.map(abs, range(64))
    assert ours() == before
    # Work still ends, in the caller.
    assert runtime.submit(abs, -1).result() == 1
    assert runtime.map(abs, range(8)) == [*range(8)]
    assert ours() == before


def test_closing_without_waiting_lets_calls_end():
    go, runtime = threading.Event(), Runtime(size=1)
    first, second = runtime.start(go.wait, 60.0), runtime.start(abs, -1)
    runtime.close(wait=False)
    go.set()
    assert first.result(60.0) and second.result(60.0) == 1
    with pytest.raises(RuntimeError):
        runtime.start(abs, -1)


PROGRAM = """
import os, sys, threading, atexit
from deltackpt.resources.runtime import Runtime
runtime = Runtime(4)
runtime.map(abs, range(100))
"""


def test_work_ends_in_a_forked_child_and_at_exit():
    forked = (
        "child = os.fork()\n"
        "if not child:\n"
        "    found = runtime.map(abs, range(100)), runtime.submit(abs, -1).result()\n"
        "    os._exit(0 if found == ([*range(100)], 1) else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    ending = (
        "def end():\n"
        "    assert runtime.map(abs, range(100)) == [*range(100)]\n"
        "    assert Runtime(4).map(abs, range(100)) == [*range(100)]\n"
        "    print('ended')\n"
        "atexit.register(end)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM + forked + ending],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert (found.returncode, found.stdout) == (0, "ended\n"), found.stderr


# Memory.


def test_the_cost_of_concurrent_requests_is_bounded():
    lock, used, most = threading.Lock(), 0, 0

    def call(cost: int) -> None:
        nonlocal used, most
        with lock:
            used += cost
            most = max(most, used)
        threading.Event().wait(0.001)
        with lock:
            used -= cost

    with Runtime(8, memory_bytes=100) as runtime:
        runtime.map(call, [30, 60, 10] * 20, cost=lambda cost: cost)
        assert 60 <= most <= 100
        # A larger request than the limit runs alone.
        most = 0
        runtime.map(call, [1000, 100, 1000, 10], cost=lambda cost: cost)
        assert most == 1000


def test_reservations_are_returned_after_an_error():
    memory = Memory(10)
    for _ in range(3):
        with pytest.raises(KeyError), memory.reserved(10):
            raise KeyError
    with memory.reserved(4), memory.reserved(6):
        assert memory.reserved_bytes == 10 and not Reservation(memory).acquire(1, 0.01)
    with memory.reserved(100):
        assert not Reservation(memory).acquire(0, 0.0)
    assert memory.reserved_bytes == 0


def interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Interrupts a call where Python runs signal handlers for the n-th time, if it does so.

    That is as a Python function begins, or as a C function returns. Returns whether it did.
    """
    left = itertools.count(number, -1)

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and next(left) == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    try:
        sys.setprofile(interrupt)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def is_usable(memory: Memory) -> bool:
    """Whether another thread can use memory, all of which is free."""
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.append(memory.fits(100)), daemon=True)
    other.start()
    other.join(10)
    return found == [True] and memory.reserved_bytes == 0


def test_an_interrupt_holds_neither_memory_nor_the_lock_that_other_threads_need():
    def reserve(memory: Memory) -> None:
        with memory.reserved(10):
            pass

    for number in itertools.count():
        memory = Memory(100)
        is_interrupted = interrupted_at(number, functools.partial(reserve, memory))
        assert is_usable(memory), number
        if not is_interrupted:
            break
    assert number > 2


def test_parts_share_threads_and_have_their_own_memory(runtime):
    piece = runtime.with_memory(1 << 20)
    buffer = piece.memory.allocate((1 << 20,), np.dtype(np.uint8))
    assert not piece.memory.fits(1) and runtime.memory.fits(1 << 20)
    piece.memory.give_back([buffer])
    assert piece.memory.fits(1) and piece.pace is runtime.pace


def test_buffers_are_reused_within_the_limit():
    memory = Memory(4 << 20)
    first = memory.allocate((1 << 18,), np.dtype(np.float32))
    address = first.ctypes.data
    assert not memory.fits(4 << 20)
    memory.give_back([first, np.zeros(3)])
    again = memory.allocate((1 << 17,), np.dtype(np.uint64))
    assert again.ctypes.data == address
    memory.give_back([again])
    many = [memory.allocate((1 << 20,), np.dtype(np.uint8)) for _ in range(6)]
    memory.give_back(many)
    assert memory.nbytes <= memory.limit_bytes


def test_kept_buffers_make_room_for_lent_ones():
    memory = Memory(8 << 20)
    memory.give_back([memory.allocate((6 << 20,), np.dtype(np.uint8))])
    assert memory.nbytes == 8 << 20
    small = memory.allocate((1 << 20,), np.dtype(np.uint8))
    assert memory.nbytes == 2 << 20
    memory.give_back([small])


def test_the_last_huge_page_of_a_buffer_counts_as_a_whole():
    memory = Memory(64 << 20)
    memory.allocate((2 << 20,), np.dtype(np.uint8))
    assert memory.nbytes == 4 << 20


def test_small_requests_reuse_one_buffer():
    """Memory that kept one buffer per request would grow to its limit over the saves."""
    memory = Memory(64 << 20)
    for number in range(20):
        memory.give_back([memory.allocate((number % 5,), np.dtype(np.int32))])
    assert memory.nbytes == 1 << 20


def test_memory_serves_threads_at_once(runtime):
    memory, mixed = Memory(64 << 20), []

    def work(number: int) -> None:
        for _ in range(200):
            buffer = memory.allocate((1000,), np.dtype(np.int64))
            buffer[:] = number
            if not (buffer == number).all():
                mixed.append(number)
            memory.give_back([buffer])

    runtime.map(work, range(4))
    assert not mixed


@pytest.mark.parametrize("wide", [1, 700_000, 1_200_000])
def test_arrays_are_copied(runtime, wide):
    """A few bytes, more, and enough that threads split the copy."""
    random = np.random.default_rng(0)
    sources = [
        random.integers(0, 255, shape, np.uint8)
        for shape in ((7, wide), (3 * wide + 1,), (1, wide), (wide, 2), (0, 5), ())
    ]
    sources += [sources[0].T, sources[3][::-1], np.broadcast_to(sources[2], (4, wide))]
    pairs = [(np.empty(source.shape, source.dtype), source) for source in sources]
    dense_save._copy(pairs, runtime)
    for out, source in pairs:
        np.testing.assert_array_equal(out, source)


def test_a_limit_that_is_not_positive_is_rejected():
    with pytest.raises(OptionError, match="memory limit"):
        Memory(0)
