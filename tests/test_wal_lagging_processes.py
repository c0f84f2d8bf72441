# SPDX-License-Identifier: Apache-2.0
"""Agreement between processes over a board in memory, and reports of processes that lag."""

from __future__ import annotations

import pytest

from deltackpt.errors import StorageError
from deltackpt.wal.agreement import SaveRequest
from deltackpt.wal.epoch import FileProgress, LagWatch
from deltackpt.wal.save_requests import AgreementThread

NEEDED = SaveRequest("one process needs it", restarts_wal=False)


class MemoryBoard:
    """A board that never waits for a value."""

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self.changes = 0
        self.refuses = False

    def replace(self, key, data):
        self._check()
        self.values[key] = data
        self.changes += 1

    def put_first(self, key, data):
        self._check()
        return self.values.setdefault(key, data)

    def wait_for(self, key, timeout_secs):
        self._check()
        return self.values.get(key)

    def folder(self, key):
        self._check()
        return {k.removeprefix(key): v for k, v in self.values.items() if k.startswith(key)}

    def _check(self):
        if self.refuses:
            raise StorageError("the service is away")


class Clock:
    """A clock that a test advances."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Job:
    """Processes that listen only when a test makes them."""

    def __init__(self, directory, count, *, base_bytes=1 << 30):
        self.board, self.clock = MemoryBoard(), Clock()
        self.progress = [FileProgress(directory, process, count) for process in range(count)]
        self.all = [
            AgreementThread(
                self.board,
                "log",
                progress,
                calls=0,
                max_wal_ratio=1.0,
                base_bytes=base_bytes,
                deadline_secs=10.0,
                clock=self.clock,
            )
            for progress in self.progress
        ]
        for one in self.all:
            one._send_status()

    def run_round(self, *but: int) -> None:
        for process, one in enumerate(self.all):
            if process not in but:
                one.run_round()

    def call(self) -> list[SaveRequest | None]:
        return [one.call() for one in self.all]


@pytest.mark.parametrize("wishing", [0, 2])
def test_if_one_process_needs_a_save_all_save_at_the_same_call_exactly_once(tmp_path, wishing):
    job = Job(tmp_path, 3)
    assert job.call() == [None] * 3
    job.all[wishing].request_save(NEEDED)
    found = []
    for _ in range(6):
        job.run_round()
        found.append(job.call())
        if found[-1] == [NEEDED] * 3:
            for one in job.all:
                one.saved()
    assert found.count([NEEDED] * 3) == 1
    assert found.count([None] * 3) == 5


def test_no_process_saves_until_every_process_listens(tmp_path):
    job = Job(tmp_path, 3)
    job.all[1].request_save(NEEDED)
    for _ in range(5):
        job.run_round(2)
        # A process that has accepted reaches the call, waits and continues.
        assert job.call() == [None] * 3
    found = []
    while [NEEDED] * 3 not in found:
        job.clock.now += 1.0
        job.run_round()
        found.append(job.call())
        assert len(found) < 50


def test_the_total_bytes_of_all_processes_trigger_a_step(tmp_path):
    job = Job(tmp_path, 2, base_bytes=1000)
    found = []
    for grown in range(0, 1200, 50):
        for one in job.all:
            one.grew(grown, 0)
        job.run_round()
        found += [request for request in job.call() if request is not None]
        if found:
            break
    # Each has appended little more than half a base.
    assert [request.reason for request in found] == [
        "the WAL has grown to WalOptions.max_wal_ratio"
    ] * 2
    assert 500 <= grown <= 800


def test_a_job_that_needs_no_save_writes_nothing_to_the_board(tmp_path):
    job = Job(tmp_path, 2)
    before = job.board.changes
    for step in range(100):
        job.run_round()
        assert job.call() == [None, None]
        for one in job.all:
            one.grew(step, 0)
    assert job.board.changes == before


def test_a_request_for_a_new_epoch_outlasts_a_save_in_flight(tmp_path):
    job, anew = Job(tmp_path, 2), SaveRequest("rows were left out", restarts_wal=True)
    job.all[1].request_save(anew)
    job.all[1].request_save(NEEDED)
    for one in job.all:
        one.saved()
    found = []
    for _ in range(6):
        job.run_round()
        found += job.call()
    assert anew in found and NEEDED not in found


def test_a_save_request_that_could_not_be_sent_is_sent_at_the_next_call(tmp_path):
    job = Job(tmp_path, 2)
    job.board.refuses = True
    job.all[1].request_save(NEEDED)
    job.board.refuses = False
    found = []
    for _ in range(6):
        found += job.call()
        job.run_round()
    assert found.count(NEEDED) >= 2


def test_an_outcome_that_cannot_be_read_is_an_error(tmp_path):
    job = Job(tmp_path, 2)
    job.all[1].request_save(NEEDED)
    job.run_round()
    assert job.call() == [None, None]
    job.board.refuses = True
    with pytest.raises(StorageError):
        job.all[1].call()


def test_a_lagging_process_is_reported_once_a_minute_until_it_catches_up(tmp_path):
    job, found = Job(tmp_path, 3), []
    for second in range(200):
        job.clock.now = float(second)
        for process, progress in enumerate(job.progress):
            (tmp_path / str(process)).mkdir(exist_ok=True)
            stops = process == 1 and 20 <= second < 150
            progress.record(1 + (20 if stops else second), second)
        job.run_round()
        while job.all[0].alarms:
            error = job.all[0].alarms.popleft()
            found.append(second)
            assert error.processes == (1,) and error.code == "wal-behind"
            assert "process 1" in str(error) and "10 s" in str(error)
    assert all(20 + 10 <= second < 150 + 10 for second in found)
    assert len(found) == 2 and found[1] - found[0] >= 60


def test_processes_that_are_all_idle_are_not_behind():
    watch = LagWatch(10.0)
    assert not any(watch.poll(float(second), [7, 8, 7]) for second in range(9))
    assert watch.poll(11.0, [7, 8, 7]) == (0, 2)
    rested = LagWatch(10.0)
    assert not any(rested.poll(float(second), [8, 8, 8]) for second in range(100))
