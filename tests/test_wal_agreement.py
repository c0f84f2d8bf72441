# SPDX-License-Identifier: Apache-2.0
"""Agreement on the calls at which all processes save, and reports of processes that lag."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from job import MemoryService, coordinators

from deltackpt import coordination
from deltackpt.errors import ProcessMissing, StorageError
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.format.wal_format import EpochHeader
from deltackpt.options import ManagerOptions, WalOptions
from deltackpt.resources.runtime import Runtime, Task
from deltackpt.session.run import Run
from deltackpt.wal.epoch import CoordinatorProgress, LagWatch, OpenEpoch
from deltackpt.wal.save_requests import _EVERY, _KEPT, SaveAgreement, SaveRequest, SaveRequests

NEEDED = SaveRequest("one process needs it", restarts_wal=False)
ANEW = SaveRequest("rows were left out", restarts_wal=True)


class CountingService(MemoryService):
    """Counts its requests."""

    requests = 0

    def _locked(self):
        self.requests += 1
        return super()._locked()


class Background:
    """Runs submitted calls when a test calls ``run``, or when a result is needed."""

    def __init__(self) -> None:
        self.tasks: list[Task[Any]] = []

    def submit(self, call: Callable[..., Any], *arguments: object) -> Task[Any]:
        self.tasks.append(Task(lambda: call(*arguments)))
        return self.tasks[-1]

    def run(self) -> None:
        while self.tasks:
            self.tasks.pop(0).run()


class Job:
    """Some processes, whose background work a test runs."""

    def __init__(
        self, count: int, *, calls: int = 0, base_bytes: int = 1 << 30, timeout_secs: float = 60.0
    ):
        self.service, self.backgrounds = CountingService(), [Background() for _ in range(count)]
        self.calls, self.saved = [calls] * count, [list[int]() for _ in range(count)]
        self.all = [
            SaveAgreement(
                coordinator,
                "log",
                cast(Runtime, background),
                calls=calls,
                max_wal_ratio=1.0,
                base_bytes=base_bytes,
            )
            for coordinator, background in zip(
                coordinators(self.service, count, timeout_secs), self.backgrounds, strict=True
            )
        ]

    def call(self, process: int) -> SaveRequest | None:
        """Appends in one process, and saves if all do."""
        self.calls[process] += 1
        if (found := self.all[process].call()) is not None:
            self.saved[process].append(self.calls[process])
            self.all[process].saved()
        return found

    def call_all(self, times: int = 1) -> list[SaveRequest]:
        """Appends in all processes, which work in the background in between."""
        found: list[SaveRequest | None] = []
        for _ in range(times):
            found += map(self.call, range(len(self.all)))
            for background in self.backgrounds:
                background.run()
        return [one for one in found if one is not None]

    def check(self) -> None:
        """Checks that all that have made a call saved at it, or none did."""
        for one in self.saved:
            for number in one:
                for calls, other in zip(self.calls, self.saved, strict=True):
                    assert calls < number or number in other, (number, self.calls, self.saved)


@pytest.fixture
def job() -> Job:
    return Job(2)


@pytest.mark.parametrize("requesting", [0, 2])
@pytest.mark.parametrize("calls", range(_EVERY))
def test_if_one_process_needs_a_save_all_save_at_the_same_call_exactly_once(requesting, calls):
    job = Job(3, calls=calls)
    assert not job.call_all()
    job.all[requesting].request_save(NEEDED)
    assert job.call_all(5 * _EVERY) == [NEEDED] * 3
    job.check()
    assert job.saved[0][0] <= calls + 2 + 2 * _EVERY


@pytest.mark.parametrize("seed", range(50))
def test_in_any_order_all_save_at_the_same_calls_and_every_request_is_met(seed):
    rng = random.Random(seed)
    count = rng.randrange(2, 6)
    job, requests = Job(count, calls=rng.randrange(20)), list[tuple[int, int]]()
    # One process may be lost; it holds no other back.
    living = [*range(count)][: count - rng.randrange(2)]
    for _ in range(1500):
        process = rng.choice(living)
        kind = rng.choice(("call", "call", "call", "work", "request", "grow"))
        if kind == "call":
            job.call(process)
        elif kind == "work":
            job.backgrounds[process].run()
        elif kind == "request" and rng.random() < 0.1:
            job.all[process].request_save(NEEDED)
            requests.append((process, job.calls[process]))
        elif kind == "grow":  # Its status is stored anew.
            job.all[process].grew(rng.choice((0, 1 << 26)), 0)
        job.check()
    last = max(job.calls)
    for process in living * (last + 3 * _EVERY):
        if job.calls[process] < last + 3 * _EVERY:
            job.call(process)
    job.check()
    # No process made a request in the last calls, so all requests were met.
    for process, calls in requests:
        assert any(number > calls for number in job.saved[process]), (process, calls)
    assert not [number for number in job.saved[0] if number > last + 2 * _EVERY]


def test_a_call_sends_and_waits_for_nothing_if_the_service_has_answered(job):
    for _ in range(5 * _EVERY):
        before = job.service.requests
        assert job.call(0) is None
        assert job.service.requests == before
        job.backgrounds[0].run()


def test_process_0_removes_the_answers_of_calls_that_all_have_passed(job):
    def answers() -> set[str]:
        return {key for key in job.service.values if "/calls/" in key}

    job.all[1].request_save(NEEDED)
    for _ in range(100 * _EVERY):
        job.call_all()
        assert len(answers()) <= 3 * _KEPT
    assert job.saved[0] == job.saved[1] != []
    # A process that lags still needs the later ones.
    before, calls = answers(), job.calls[1]
    for _ in range(20 * _EVERY):
        job.call(0)
        job.backgrounds[0].run()
    job.all[1].request_save(NEEDED)
    assert {key for key in before if int(key.rpartition("/")[2]) > calls} <= answers()
    for _ in range(24 * _EVERY):
        job.call(1)
        job.backgrounds[1].run()
        job.check()
    for _ in range(20 * _EVERY):
        job.call_all()
        job.check()
    assert len(answers()) <= 3 * _KEPT


def test_a_call_that_was_not_asked_ahead_waits_no_longer_than_the_timeout():
    job, stopped = Job(2, calls=_EVERY - 1, timeout_secs=0.2), threading.Event()

    def wait(_: str) -> list[tuple[str, bytes]]:
        stopped.wait(60)
        return []

    with mock.patch.object(job.service, "key_value_dir_get_bytes", wait):
        with pytest.raises(ProcessMissing, match="within 0.2 s"):
            job.call(1)
        stopped.set()


def test_the_total_bytes_of_all_processes_trigger_a_step():
    job, found, grown = Job(2, base_bytes=1000), [], 0
    while not found and grown < 2000:
        grown += 10
        for one in job.all:
            one.grew(grown, 0)
        found = job.call_all()
    assert [one.reason for one in found] == ["the WAL has grown to WalOptions.max_wal_ratio"] * 2
    # Each has appended little more than half a base.
    assert 500 <= grown <= 500 + 1000 // 16 + 10 * (2 * _EVERY + 1)


def test_what_a_save_has_met_is_not_requested_again_by_a_status_from_before(job):
    job.all[1].request_save(NEEDED)
    job.call_all(_EVERY - 1)  # Process 0 asks first: its answer is no, and the request is stored.
    for one in job.all:
        one.saved()
    for _ in range(4 * _EVERY):
        # Process 1 lags, and does not replace its status.
        assert job.call(0) is None


def test_a_request_for_a_new_epoch_outlasts_a_save_and_comes_first(job):
    job.all[1].request_save(ANEW)
    job.all[1].request_save(NEEDED)
    job.all[0].request_save(NEEDED)
    for one in job.all:
        one.saved()
    assert job.call_all(2 * _EVERY)[:2] == [ANEW] * 2


def test_a_service_that_does_not_answer_fails_the_call_that_needs_it_and_the_next_ones_work(job):
    job.all[1].request_save(NEEDED)
    job.service.refuses = True
    for _ in range(_EVERY - 1):
        assert job.call(1) is None
    job.backgrounds[1].run()
    with pytest.raises(StorageError):
        job.call(1)
    job.service.refuses = False
    for _ in range(_EVERY):
        assert job.call(0) is None
    assert job.call_all(2 * _EVERY) == [NEEDED] * 2
    job.check()


def test_process_0_is_missing_if_it_does_not_answer_within_the_timeout():
    job, asked, stopped = Job(2), threading.Event(), threading.Event()

    def wait(_: str) -> list[tuple[str, bytes]]:
        asked.set()
        stopped.wait(60)
        return []

    with Runtime(2) as runtime, mock.patch.object(job.service, "key_value_dir_get_bytes", wait):
        one = SaveAgreement(
            coordinators(job.service, 2, 0.2)[1],
            "log",
            runtime,
            calls=0,
            max_wal_ratio=1.0,
            base_bytes=1,
        )
        for _ in range(_EVERY - 1):
            assert one.call() is None
        assert asked.wait(60)
        with pytest.raises(ProcessMissing, match="which process 0 runs, within 0.2 s") as caught:
            one.call()
        stopped.set()
    assert caught.value.processes == (0,)


def test_process_0_removes_the_keys_of_an_ended_epoch():
    service = MemoryService()
    run = SimpleNamespace(
        coordinator=coordinators(service, 2, 60.0)[0],
        options=ManagerOptions(wal=WalOptions()),
        runtime=Background(),
    )
    requests = SaveRequests(cast(Run, run))
    for number, left in ((0, {"0", "1", "10"}), (0, {"0", "1", "10"}), (1, {"1", "10"})):
        for epoch in (0, 1, 10):
            service.values[f"deltackpt/wal/run/{epoch}/calls/4"] = b"null"
        epoch = SimpleNamespace(head=SimpleNamespace(run="run", epoch=number))
        requests.start_epoch(cast(OpenEpoch, epoch), Layout((), (), (), ()), 0)
        assert {key.split("/")[3] for key in service.values} == left
    with mock.patch.object(coordination, "_discarded", []):
        requests.close()
        assert coordination._discarded == ["deltackpt/wal/run/1"]


def test_progress_through_a_service_that_does_not_answer_is_the_last_known():
    service, stopped = MemoryService(), threading.Event()
    head = cast(EpochHeader, SimpleNamespace(run="run", epoch=0))
    first, second = coordinators(service, 2, 60.0)
    one, other = CoordinatorProgress(first, head), CoordinatorProgress(second, head)
    other.record([SaveId("run", 70, 7)])
    one.record([SaveId("run", 90, 9)])
    assert min(one.of_each(fresh=True)) == 7
    first.timeout_secs = 0.2

    def wait(_: str) -> list[tuple[str, bytes]]:
        stopped.wait(60)
        return []

    with mock.patch.object(service, "key_value_dir_get_bytes", wait):
        assert one.of_each(fresh=True) == [9, 7]
        one._read_at = 0.0
        assert min(one.of_each()) == 7
        stopped.set()


def test_a_lagging_process_is_reported_once_a_minute_until_it_catches_up():
    watch, found = LagWatch(10.0), []
    for second in range(200):
        numbers = [1 + second, 21 if 20 <= second < 150 else 1 + second, 1 + second]
        error = watch.look(float(second), numbers.copy)
        if error is not None:
            found.append(second)
            assert error.processes == (1,) and error.code == "wal-behind"
            assert "process 1" in str(error) and "10 s" in str(error)
    assert all(20 + 10 <= second < 150 + 10 for second in found)
    assert len(found) == 2 and found[1] - found[0] >= 60


def test_processes_that_are_all_idle_are_not_behind():
    watch = LagWatch(10.0)
    assert not any(watch.look(float(second), lambda: [7, 8, 7]) for second in range(9))
    error = watch.look(11.0, lambda: [7, 8, 7])
    assert error is not None and error.processes == (0, 2)
    rested = LagWatch(10.0)
    assert not any(rested.look(float(second), lambda: [8, 8, 8]) for second in range(100))
