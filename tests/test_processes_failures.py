# SPDX-License-Identifier: Apache-2.0
"""All processes report a failure of one of several real processes, and none hangs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from many import Answer, Job

from deltackpt.save import exits

PLACE = {"mesh": [2, 2]}
#: No test reaches this limit: one that comes near it would hang without it.
PEERS_SECS = 20.0


@pytest.fixture
def job(server, tmp_path) -> Iterator[Job]:
    """Two processes that have committed step 0."""
    with Job(server, tmp_path / "jobs", processes=2) as job:
        job.all("open", root=str(tmp_path / "root"), processes_secs=PEERS_SECS)
        job.all("start", place=PLACE)
        job.all("save")
        job.all("wait")
        job.all("train", to=1)
        yield job


def of_one(job: Job, process: int, do: str, **arguments: Any) -> None:
    job.processes[process].ask(do, **arguments)
    answer = job.processes[process].answer()
    assert "error" not in answer, answer


def root_cause(answer: Answer) -> dict[str, Any]:
    error = answer["error"]
    while error["cause"] is not None:
        error = error["cause"]
    return error


def assert_goes_on(job: Job, step: int) -> None:
    """Checks that both processes can save and restore a step."""
    job.all("train", to=step)
    job.all("save")
    job.all("wait")
    found = job.all("restore_latest", place=PLACE, like=step)
    assert {(answer["step"], answer["wrong"]) for answer in found} == {(step, None)}
    job.close()


def assert_told_by_the_other(job: Job, process: int, at: str, step: int) -> None:
    """Checks that the other process reports an I/O error in a restore; both can restore again."""
    of_one(job, process, "fault", at=at, number=5)
    errors = [answer["error"] for answer in job.each("restore_latest", place=PLACE, like=step)]
    own, told = errors[process], errors[1 - process]
    assert own["type"] == "OSError"
    assert told["type"] == "ProcessFailed" and f"process {process}" in told["text"]
    found = job.all("restore_latest", place=PLACE, like=step)
    assert {(answer["step"], answer["wrong"]) for answer in found} == {(step, None)}


def test_processes_that_save_different_steps_report_both(job, tmp_path):
    of_one(job, 1, "train", to=2)
    job.all("save")
    first, second = (root_cause(answer) for answer in job.each("wait"))
    assert first["type"] == "Disagreement" and "process 1" in first["text"]
    assert "it saves step 2" in first["text"] and first["text"] in second["text"]
    assert_goes_on(job, 3)


@pytest.mark.parametrize("number", [28, None], ids=["full", "interrupted"])
def test_a_snapshot_that_fails_on_one_process_leaves_none_at_a_barrier(job, tmp_path, number):
    of_one(job, 1, "fault", at="snapshot", number=number)
    saves = job.each("save")
    shown = "KeyboardInterrupt" if number is None else "No space left"
    error = saves[1]["error"]
    assert "error" not in saves[0] and shown in f"{error['type']}: {error['text']}"
    waits = job.each("wait")
    assert all(shown in answer["error"]["text"] for answer in waits)
    assert not (tmp_path / "root" / "1").exists()
    assert_goes_on(job, 2)


def test_a_process_that_ends_by_an_exception_finishes_its_part_while_the_other_runs(job, tmp_path):
    """It waits for process 0 only until its own save is committed."""
    of_one(job, 0, "arm", at="before its shard", action="hold")
    job.all("save")
    job.processes[0].wait_reached("before its shard")
    job.processes[1].ask("diverge")
    job.release()
    of_one(job, 0, "wait")
    assert job.processes[1].answer() == {"ended": 1}
    assert (tmp_path / "root" / "1").exists()


def test_a_process_that_ends_waits_for_a_dead_one_no_longer_than_processes_secs(server, tmp_path):
    with Job(server, tmp_path / "jobs", processes=2, apart=True) as job:
        job.all("open", root=str(tmp_path / "root"))
        job.all("start", place=PLACE)
        job.all("save")
        job.all("wait")
        job.all("train", to=1)
        job.all("limit", processes_secs=2.0)
        of_one(job, 0, "arm", at="before its shard", action="hold")
        job.all("save")
        job.processes[0].wait_reached("before its shard")
        job.processes[0].kill()
        job.processes[1].ask("diverge")
        assert job.processes[1].answer() == {"ended": exits.EXIT_CODE}
        told = job.processes[1].output()
        assert "the save of step 1 failed" in told and "timeouts.processes_secs" in told
        assert not (tmp_path / "root" / "1").exists()


def test_a_trainer_that_lost_its_directory_moves_no_steps_of_its_successor(job, tmp_path):
    root = tmp_path / "root"
    job.all("save")
    job.all("wait")
    job.all("restore", step=0, place=PLACE, like=0)
    of_one(job, 0, "usurp", root=str(root))
    job.all("train", to=3)
    errors = [answer["error"] for answer in job.each("save")]
    assert errors[0]["type"] == "FencedError"
    assert errors[1]["type"] == "ProcessFailed" and "FencedError" in errors[1]["text"]
    assert (root / "1").exists() and not (root / "rolled-back").exists()


def test_no_process_continues_before_later_steps_are_moved_aside(job, tmp_path):
    root = tmp_path / "root"
    for step in (1, 2, 3):
        job.all("train", to=step)
        job.all("save")
        job.all("wait")
    job.all("restore", step=0, place=PLACE, like=0)
    job.all("slow_renames")
    job.all("train", to=1)
    job.all("save")
    job.all("wait")
    assert sorted(path.name for path in (root / "rolled-back").glob("*/*")) == ["1", "2", "3"]
    assert_goes_on(job, 2)


def test_one_process_alone_may_read_beside_the_job(job, tmp_path):
    of_one(job, 1, "read_alone", root=str(tmp_path / "root"), step=0)
    assert_goes_on(job, 1)


@pytest.mark.parametrize("at", ["checking the options", "the end of a start"])
@pytest.mark.parametrize("process", [0, 1])
def test_a_manager_that_one_process_cannot_create_fails_on_all_and_fences_none(
    job, tmp_path, at, process
):
    """Later managers can still be created."""
    again = {"root": str(tmp_path / "root"), "processes_secs": PEERS_SECS}
    of_one(job, process, "fault", at=at)
    errors = [answer["error"]["type"] for answer in job.each("open", **again)]
    assert errors[process] == "OSError" and errors[1 - process] == "ProcessFailed"
    job.all("save")
    job.all("wait")
    assert (tmp_path / "root" / "1").exists()
    job.all("open", **again)
    found = job.all("restore_latest", place=PLACE, like=1)
    assert {(answer["step"], answer["wrong"]) for answer in found} == {(1, None)}
    assert_goes_on(job, 2)


@pytest.mark.parametrize("process", [0, 1])
def test_wrong_arguments_of_one_process_block_no_other(job, tmp_path, process):
    """Includes arguments that the manager refuses, and options that cannot be constructed."""
    right = {"root": str(tmp_path / "root"), "processes_secs": PEERS_SECS}
    for wrong in {"event_handlers": [1]}, {"max_to_keep": -1}, {"dense": "blocks"}:
        short = {"processes_secs": 2.0} if "max_to_keep" in wrong else {}
        for one in job.processes:
            one.ask("open", **right | short | (wrong if one.number == process else {}))
        errors = [one.answer()["error"] for one in job.processes]
        if "dense" in wrong:
            for error in errors:
                assert error["type"] == "Disagreement", error
                assert "equal ManagerOptions.dense.deltas on every process" in error["text"]
            continue
        assert errors[process]["type"] == "OptionError"
        if "event_handlers" in wrong:
            assert errors[1 - process]["type"] == "ProcessFailed"
            assert "expected objects with receive(event)" in errors[1 - process]["text"]
        else:
            assert errors[1 - process]["type"] == "ProcessMissing"
            assert f"expected process {process} to arrive" in errors[1 - process]["text"]
        # The processes are still in step with each other.
        job.all("open", **right)
    found = job.all("restore_latest", place=PLACE, like=0)
    assert {(answer["step"], answer["wrong"]) for answer in found} == {(0, None)}
    assert_goes_on(job, 2)


@pytest.mark.parametrize("what", ["dense leaves", "notes"])
@pytest.mark.parametrize("process", [0, 1])
def test_an_orbax_item_that_one_process_cannot_read_stops_the_other_in_time(
    server, tmp_path, what, process
):
    """Orbax makes the others wait for it at its own barrier, up to the timeouts."""
    with Job(server, tmp_path / "jobs", processes=2) as job:
        job.all("open", root=str(tmp_path / "root"), notes=True)
        job.all("start", place=PLACE)
        job.all("save")
        job.all("wait")
        job.all("limit", processes_secs=10.0)
        assert_told_by_the_other(job, process, f"reading {what}", step=0)
