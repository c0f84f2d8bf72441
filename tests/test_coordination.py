# SPDX-License-Identifier: Apache-2.0
"""Messages between processes: who is missing, what failed, and what is left behind."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import types
from typing import Any
from unittest import mock

import pytest
from job import MemoryService, coordinators
from many import wait_until

from deltackpt import coordination
from deltackpt.coordination import Coordinator
from deltackpt.errors import (
    BrokenChain,
    DamagedWal,
    Disagreement,
    ProcessFailed,
    ProcessMissing,
    RestoreError,
    StepGone,
    StorageError,
)
from deltackpt.format.manifest import SaveId
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.session.restore_choice import RestoreChoice, RestoreChooser

#: Far longer than any test.
LONG_SECS = 60.0
#: Longer than a busy machine delays a thread.
SHORT_SECS = 2.0


class Job:
    """Processes as threads, with a service in memory."""

    def __init__(self, count: int, timeout_secs: float):
        self.service, self._timeout_secs = MemoryService(), timeout_secs
        self.all = self.renewed(count)

    def renewed(self, count: int) -> list[Coordinator]:
        """Returns the coordinators of the next manager."""
        return coordinators(self.service, count, self._timeout_secs)

    def left(self) -> set[str]:
        """Returns the keys of all messages."""
        return {key for key in self.service.values if not key.startswith("deltackpt/alive/")}


def each(calls: list[Any]) -> list[Any]:
    """Makes all calls at once; returns each result or exception."""

    def run(call):
        try:
            return call()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def gathering(all: list[Coordinator]) -> list[Any]:
    return [lambda one=one: one.gather("asking", one.index) for one in all]


@pytest.mark.parametrize("size", [0, 1, (64 << 10) - 15, 64 << 10, 300_000])
def test_messages_of_any_size_reach_every_process(size):
    job = Job(3, LONG_SECS)
    values = [chr(ord("a") + one.index) * size for one in job.all]
    calls = [lambda one=one: one.gather("asking", values[one.index]) for one in job.all]
    assert each(calls) == [values] * 3


def test_different_calls_are_refused_on_every_process():
    job = Job(3, LONG_SECS)
    calls = gathering(job.all)
    calls[1] = lambda: job.all[1].gather("choosing", 1)
    first, *others = each(calls)
    assert type(first) is Disagreement and "on process 1 choosing" in str(first)
    assert [type(error) for error in others] == [ProcessFailed] * 2
    assert each(gathering(job.all)) == [[0, 1, 2]] * 3


def test_calls_leave_nothing_behind_but_the_last_ones():
    job = Job(2, LONG_SECS)
    for _ in range(20):
        assert each(gathering(job.all)) == [[0, 1]] * 2
    assert len(job.left()) == 2
    again = job.renewed(2)
    first, second = each([lambda one=one: one.join("starting") for one in again])
    assert first == second and len(job.left()) == 2


def test_what_a_closed_manager_left_is_deleted_at_the_next_call_of_all():
    job = Job(2, LONG_SECS)
    each(gathering(job.all))
    job.service.values["deltackpt/save/run-1/done/0"] = b"+"
    for one in job.all:
        one.expire("deltackpt/save/run-1")
        one.close()
    assert len(job.left()) == 3  # Process 1 may still read them.
    again = job.renewed(2)
    assert each(gathering(again)) == [[0, 1]] * 2
    assert {key.split("/")[1] for key in job.left()} == {again[0]._id}


def test_a_removal_or_a_damage_that_one_process_finds_counts_on_all():
    job = Job(2, LONG_SECS)
    runs: list[Any] = [types.SimpleNamespace(coordinator=one) for one in job.all]
    first, second = map(RestoreChooser, runs)
    save_id = SaveId("run", 5, 1)
    choice = RestoreChoice(3, RecoveryPoint(1, save_id, True, 0.0))
    damage = DamagedWal("its record", "the bytes", "others", record=save_id)
    told, own = RestoreError("process 0 found it"), BrokenChain("step 3")
    for error in (told, own):
        calls = [lambda: first.wal_damage(choice, damage)]
        calls.append(lambda error=error: second.wal_damage(choice, error))
        one, other = each(calls)
        assert one is damage
        if error is own:
            assert other is own
        else:
            assert (str(other), other.record) == (str(damage), save_id)
            assert other.__cause__ is told
    calls = [lambda: first.is_gone(StepGone("step 3")), lambda: second.is_gone(own)]
    assert each(calls) == [True, True]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_silent_process_is_named_on_all_others_within_the_timeout(missing):
    job = Job(3, SHORT_SECS)
    assert each(gathering(job.all)) == [[0, 1, 2]] * 3
    others = [one for one in job.all if one.index != missing]
    errors = each(gathering(others))
    assert [type(error) for error in errors] == [ProcessMissing] * 2
    assert {error.processes for error in errors} == {(missing,)}
    expected = f"expected process {missing} to arrive, or to show that it is alive, within 2 s"
    assert all(expected in str(error) for error in errors)
    # It gets an error too when it arrives.
    job.all[missing].timeout_secs = 0.1
    with pytest.raises(ProcessMissing):
        job.all[missing].gather("asking", missing)
    # The next manager of the job starts clean.
    assert each(gathering(job.renewed(3))) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("missing", [0, 1])
def test_a_process_that_does_not_join_is_named_and_joins_later(missing):
    job = Job(3, SHORT_SECS)
    errors = each(gathering([one for one in job.all if one.index != missing]))
    assert {(type(error), error.processes) for error in errors} == {(ProcessMissing, (missing,))}
    assert each(gathering(job.renewed(3))) == [[0, 1, 2]] * 3


def test_a_process_that_works_is_waited_for():
    job = Job(3, SHORT_SECS)

    def work(one: Coordinator) -> str:
        with one.together("working"):
            time.sleep(2 * SHORT_SECS if one.index == 1 else 0)
        return "done"

    assert each([lambda one=one: work(one) for one in job.all]) == ["done"] * 3


def test_a_process_that_works_but_never_arrives_is_missing_in_the_end(monkeypatch):
    monkeypatch.setattr(coordination, "_MOST_TIMEOUTS", 2)
    job = Job(2, SHORT_SECS)
    first, second = job.all
    started = time.monotonic()
    with second.alive(), pytest.raises(ProcessMissing, match=r"to arrive within 4 s"):
        first.gather("asking", 0)
    assert time.monotonic() - started >= 2 * SHORT_SECS
    # Once nothing is done, no thread stays.
    wait_until(lambda: "deltackpt-alive" not in [t.name for t in threading.enumerate()], "it ends")


@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError("broken"), ProcessFailed), (RestoreError("damaged"), RestoreError)],
)
@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_one_process_is_raised_on_all(failing, error, expected):
    job = Job(2, LONG_SECS)

    def work(one: Coordinator) -> None:
        with one.together("working"):
            if one.index == failing:
                raise error

    found = each([lambda one=one: work(one) for one in job.all])
    assert found[failing] is error
    assert type(found[1 - failing]) is expected and str(error) in str(found[1 - failing])
    assert f"found on process {failing}" in str(found[1 - failing])


def test_a_service_that_does_not_answer_is_named():
    job = Job(2, LONG_SECS)
    job.service.refuses = True
    with pytest.raises(StorageError, match="an answer of JAX's coordination service, found UNAV"):
        job.all[0].gather("asking", 0)


def test_an_error_that_ends_the_thread_of_a_process_is_raised_by_its_next_work():
    job, error = Job(2, 0.1), ZeroDivisionError("unexpected")
    one, real = job.all[1], job.service.key_value_set_bytes

    def refuse(key: str, *arguments: Any, **options: Any) -> None:
        if key.startswith("deltackpt/alive/"):
            raise error
        real(key, *arguments, **options)

    with mock.patch.object(job.service, "key_value_set_bytes", refuse), one.alive():
        wait_until(lambda: one._died is not None, "it dies")
    with pytest.raises(StorageError, match="ended with ZeroDivisionError") as caught, one.alive():
        pass
    assert caught.value.__cause__ is error
    with one.alive():
        wait_until(lambda: "deltackpt/alive/1" in job.service.values, "it is shown again")


def test_one_process_needs_no_service():
    one = Coordinator("directory", LONG_SECS, alone=True)
    assert one.gather("asking", 5) == [5] and one.from_process_0("looking", lambda: 6) == 6
    assert one.join("starting") != one.join("starting")
