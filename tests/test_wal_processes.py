# SPDX-License-Identifier: Apache-2.0
"""The WAL of several real processes, some of which are killed, stopped or fail; see ``many.py``."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import many_wal_worker
import pytest
from many import Answer, Job, Server
from many_worker import Model
from test_processes import assert_read_alone, chunk_of

TRAINED = {"mesh": [2, 2]}
#: A call number that no test reaches otherwise.
FAR = 5000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(many_wal_worker.__file__)
    yield server
    server.close()


def started(job: Job, root: Path, place: dict[str, Any], **options: Any) -> None:
    """Opens a job's managers, creates its state and saves the first step with ``append()``."""
    log = options.pop("log", {})
    job.all("open", root=str(root), log=log, **options)
    job.all("start", place=place)
    assert job.one("log")["saved"] == "base"
    job.all("wait")


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def two(server, tmp_path) -> Iterator[Job]:
    """A job of two processes, which opens no manager."""
    with Job(server, tmp_path / "jobs", processes=2) as job:
        yield job


@pytest.fixture
def job(two, root) -> Job:
    """A job of two processes that has saved step 0 and appended two durable steps."""
    started(two, root, TRAINED)
    logged(two, 2)
    return two


def of_one(job: Job, process: int, do: str, **arguments: Any) -> Answer:
    """The answer of one process, which must succeed."""
    job.ask(do, of=[process], **arguments)
    [answer] = job.answers(of=[process])
    assert "error" not in answer, answer
    return answer


def logged(job: Job, to: int, **arguments: Any) -> None:
    """Appends every step up to ``to``; returns once all are durable on all processes."""
    nothing = {"answer": "run_on", "saved": [], "skipped": []}
    assert job.one("run_on", to=to, **arguments) == nothing
    job.all("wait_appended")


def assert_goes_on(
    job: Job, root: Path, step: int, points: list[Any], model: Model | None = None, **how: Any
) -> None:
    """Appends steps up to ``step`` and ends the job; ``...`` stands for older points."""
    logged(job, step, **how)
    found = job.one("points")["points"]
    assert found == points or (points[-1] is ... and found[: len(points) - 1] == points[:-1])
    job.close()
    assert_read_alone(root, step, model)


def saved_at_once(job: Job, **arguments: Any) -> tuple[int, str, str]:
    """Appends until all processes save at the same call; returns the step, kind and reason."""
    one, other = (found["saved"] for found in job.all("run_until_saved", at_most=FAR, **arguments))
    assert one == other, (one, other)
    job.all("wait")
    [saved] = one
    return saved


def restored(job: Job, do: str, **arguments: Any) -> dict[str, Any]:
    """Returns the common result of a restore on all processes, except what each has read."""
    [first, *others] = [{**found, "bytes_read": 0, "secs": 0} for found in job.all(do, **arguments)]
    assert all(other == first for other in others), (first, others)
    return first


def assert_restores(job: Job, root: Path, place: dict[str, Any], step: int, base: int = 0) -> None:
    """A fresh job restores the newest recovery point bit for bit."""
    job.all("open", root=str(root), log={})
    found = restored(job, "restore_latest", place=place, like=step)
    assert (found["step"], found["wrong"], found["skipped"]) == (step, None, [])
    assert (found["point"], found["chain"]) == (step, [base])


# Recovery points, and restores on other topologies.


@pytest.mark.parametrize(
    ("processes", "place", "log"),
    [
        (2, TRAINED, {"dense": "delta"}),
        (2, {"mesh": [2, 2], "layout": "cut"}, {"dense_every": 3}),
        (4, {"mesh": [4, 2], "across": "y"}, {"segment_bytes": 4096}),
    ],
    ids=["two", "two, cut", "four"],
)
def test_points_restore_bit_for_bit_on_fewer_and_on_more(server, tmp_path, processes, place, log):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=processes) as job:
        started(job, root, place, log=log)
        logged(job, 6)
        every = log.get("dense_every", 1)
        # The call of step 0 was the first.
        full = [step for step in range(6, 0, -1) if (step + 1) % every == 0]
        assert job.one("points")["points"] == full
        job.close()
    newest = full[0]
    for step in full:
        assert_read_alone(root, step)
    others = 4 if processes == 2 else 2
    turned = {"mesh": [4, 1], "layout": "turned"} if others == 4 else {"mesh": [1, 4]}
    with Job(server, tmp_path / "jobs", processes=others, devices=4 // others) as job:
        assert_restores(job, root, turned, newest)
        # The next records continue from the point, and a delta holds the replayed rows.
        logged(job, newest + 3)
        job.all("train", to=newest + 4)
        assert job.one("save")["kind"] == "delta"
        job.all("wait")
        logged(job, newest + 5)
        job.close()
    assert_read_alone(root, newest + 3)
    assert_read_alone(root, newest + 4)
    with Job(server, tmp_path / "jobs", processes=1, devices=4) as job:
        rows = {"mesh": [2, 2], "layout": "turned", "across": "y"}
        job.all("open", root=str(root), log={})
        found = restored(job, "restore_latest", place=rows, like=newest + 5)
        assert (found["point"], found["wrong"]) == (newest + 5, None)
        job.close()


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("is_gone", [False, True], ids=["older step", "no other step"])
def test_a_step_that_one_process_finds_damaged_is_skipped_below_a_point_by_every_process(
    server, tmp_path, job, root, process, is_gone
):
    if not is_gone:
        job.all("save")
        job.all("wait")
    logged(job, 5)
    job.close()
    newest = max(int(path.name) for path in root.glob("[0-9]"))
    chunk_of(root, newest, process, "values").flip()
    with Job(server, tmp_path / "jobs", processes=2) as job:
        job.all("open", root=str(root), log={})
        for number, answer in enumerate(job.each("restore", step=4, place=TRAINED, like=4)):
            if is_gone:
                kind = "Damaged" if number == process else "RestoreError"
                assert answer["error"]["type"] == kind, answer
                continue
            assert "error" not in answer, answer
            assert (answer["step"], answer["point"], answer["wrong"]) == (4, 4, None)
            assert answer["chain"] == [0]
            [warning] = answer["warnings"]
            assert warning.startswith(f"step {newest} is skipped")
        if not is_gone:
            logged(job, 6)
        job.close()


# Slow or lost processes.


def test_the_newest_point_is_the_last_that_a_killed_process_has(server, tmp_path, root):
    with Job(server, tmp_path / "jobs", processes=4, devices=1, apart=True) as job:
        started(job, root, TRAINED)
        logged(job, 3)
        job.processes[2].kill()
        job.processes[2].end()
        job.ask("run_on", to=6, of=[0, 1, 3])
        assert all(one["skipped"] == [] for one in job.answers(of=[0, 1, 3]))
        job.ask("wait_appended", of=[0, 1, 3])
        assert [one["recovery"] for one in job.answers(of=[0, 1, 3])] == [[3, True]] * 3
    with Job(server, tmp_path / "jobs", processes=2) as job:
        assert_restores(job, root, TRAINED, 3)
        job.close()


# Failures of one process.


def test_a_failed_batch_of_one_process_voids_its_point_but_not_the_next(job, root):
    job.all("wait_recovery", step=2)
    of_one(job, 1, "refuse_writes", times=1)
    job.all("run_on", to=3)
    of_one(job, 1, "wait_failed")
    of_one(job, 1, "run_on", to=4)
    of_one(job, 1, "wait_appended")
    # Process 1 has no record of step 3, although it has a later one.
    assert of_one(job, 0, "wait_appended")["recovery"] == [2, True]
    assert_read_alone(root, 2)
    logged(job, 5)
    [event] = job.all("told")[1]["events"]
    assert (event["operation"], event["step"]) == ("append", 3)
    assert_goes_on(job, root, 5, [5, 4, 2, 1])
    for step in (4, 2):
        assert_read_alone(root, step)


def test_append_failed_is_raised_by_one_process_and_the_others_continue(two, root):
    started(two, root, TRAINED, log={"on_failure": "raise"})
    logged(two, 1)
    of_one(two, 1, "refuse_writes", times=1)
    two.all("run_on", to=2)
    of_one(two, 1, "wait_failed")
    two.all("train", to=3)
    found = two.each("log")
    assert found[0]["kind"] == "full"
    assert found[1]["error"]["type"] == "AppendFailed"
    assert_goes_on(two, root, 4, [4, 1])


def test_a_process_that_first_notices_a_disagreement_does_not_save_alone(two, root):
    two.all("open", root=str(root), log={})
    two.all("start", place=TRAINED)
    of_one(two, 1, "train", to=1)
    of_one(two, 1, "arm", at="waiting for the commit", action="hold")
    assert {one["saved"] for one in two.all("log")} == {"base"}
    two.ask("wait", of=[0])
    assert two.answers(of=[0])[0]["error"]["type"] == "TrackingFailed"
    two.all("train", to=2)
    assert [one["saved"] for one in two.all("log")] == [None, None]
    two.release()
    two.each("run_until_saved", at_most=FAR)
    two.each("wait")
    [step] = two.one("steps")["steps"]
    assert_goes_on(two, root, step + 2, [step + 2, step + 1])


@pytest.mark.parametrize(("process", "at"), [(1, "snapshot"), (0, "commit: digests")])
def test_if_the_first_step_fails_all_save_another(two, root, process, at):
    two.all("open", root=str(root), log={})
    two.all("start", place=TRAINED)
    of_one(two, process, "fault", at=at)
    found = two.each("log")
    assert found[0]["saved"] == "base" and ("error" in found[1]) == (process == 1)
    # Records have no base until all agree on a step. That save reports the failure of the one
    # before.
    found = two.each("run_until_saved", at_most=FAR)
    assert process == 0 or found[0]["error"]["type"] == "SaveFailed", found
    two.each("wait")
    [step] = two.one("steps")["steps"]
    assert step > 0
    older = [] if process else [...]
    assert_goes_on(two, root, step + 3, [step + 3, step + 2, step + 1, *older])


@pytest.mark.parametrize("forget", [[0, 1], [1]], ids=["all", "one"])
def test_forgotten_marks_end_the_points_and_all_start_over(job, root, forget):
    job.all("train", to=3, forget=forget)
    job.one("log")
    job.all("train", to=4)
    assert job.one("save")["kind"] == "delta"
    assert all(one["error"]["type"] == "TrackingFailed" for one in job.each("wait"))
    assert job.one("points")["points"] == []
    # The processes may notice it at different calls, but save at the same one.
    step, kind, _ = saved_at_once(job)
    assert kind == "base" and job.one("steps")["steps"] == [0, step]
    assert_goes_on(job, root, step + 2, [step + 2, step + 1])


@pytest.mark.parametrize("refused", [[1], [0, 1]], ids=["one", "all"])
def test_a_process_without_its_part_of_the_base_for_unmarked_rows_appends_nothing(
    job, root, refused
):
    job.all("train", to=3, forget=[0, 1])
    job.ask("fault", at="snapshot", of=refused)
    job.answers(of=refused)
    found = job.each("run_until_saved", at_most=FAR)
    assert ["error" in one for one in found] == [one in refused for one in (0, 1)], found
    step = job.all("told")[1]["events"][-1]["step"]
    found = job.each("run_on", to=step + 1)
    assert [one["skipped"] for one in found if "skipped" in one][-1] == [step + 1], found
    for one in job.each("wait_appended"):
        assert one.get("recovery") in (0, None), one
    job.each("run_until_saved", at_most=FAR)
    job.each("wait")
    step = job.one("steps")["steps"][-1]
    assert_goes_on(job, root, step + 2, [step + 2, step + 1])


# Calls at which all processes must meet.


def test_wrong_arguments_of_one_process_after_a_restore_block_no_other(job, root):
    assert restored(job, "restore_latest", place=TRAINED, like=2)["point"] == 2
    job.all("train", to=3)
    # The first call of the run, which starts a WAL epoch on all processes.
    found = job.each("log", ids=True, beyond=1)
    assert found[0]["kind"] == "full"
    assert found[1]["error"]["type"] == "OptionError"
    # By the stamps, which include the rows that the ids should have named.
    assert_goes_on(job, root, 4, [4, ...])


def test_invalid_ids_of_one_process_without_marks_make_all_save_at_the_same_call(two, root):
    two.all("open", root=str(root), log={}, tracking="touched")
    two.all("start", place=TRAINED)
    two.all("hide_marks")
    assert two.one("log")["saved"] == "base"
    two.all("wait")
    logged(two, 2, ids=True)
    two.all("train", to=3)
    found = two.each("log", ids=True, beyond=1)
    assert found[0]["kind"] == "full"
    assert found[1]["error"]["type"] == "OptionError"
    found = two.each("run_on", to=4, ids=True)
    assert [one["skipped"] for one in found] == [[], [4]], found
    step, _, reason = saved_at_once(two, ids=True)
    assert "did not name its rows" in reason
    assert_goes_on(two, root, step + 2, [step + 2, step + 1, ...], ids=True)
    assert_read_alone(root, 2)


def test_a_full_buffer_of_one_process_voids_points_and_the_next_holds_all(two, root):
    started(two, root, TRAINED, log={"buffer_bytes": 1, "when_full": "coalesce"})
    of_one(two, 1, "arm", at="before the log is forced", action="hold")
    for step in (1, 2, 3):
        two.all("run_on", to=step)
        of_one(two, 0, "wait_appended")
    two.release()
    two.all("wait_appended")
    logged(two, 4)
    assert two.one("points")["points"] == [4, 1]
    two.close()
    for step in (4, 1):
        assert_read_alone(root, step)


@pytest.mark.parametrize("do", ["log", "save"])
def test_a_return_to_before_a_record_that_one_process_skipped_makes_all_save_a_base(two, root, do):
    started(two, root, TRAINED, log={"buffer_bytes": 1, "when_full": "coalesce"})
    of_one(two, 1, "arm", at="before the log is forced", action="hold")
    two.all("run_on", to=1)
    two.all("keep_marks")
    of_one(two, 0, "wait_appended")
    skipped = [one["skipped"] for one in two.all("run_on", to=2)]
    assert skipped == [[], [2]]
    two.release()
    two.all("wait_appended")
    two.all("return_marks")
    two.all("train", to=3, forget=[0, 1])
    assert two.one(do)["saved" if do == "log" else "kind"] == "base"
    two.all("wait")
    assert_goes_on(two, root, 4, [4, 1])


def test_recreated_marks_and_grown_tables_make_all_save_at_once(server, tmp_path, root):
    model = Model(grown=[(4, {"rows": 2560})])
    with Job(server, tmp_path / "jobs", processes=2, model=model) as job:
        started(job, root, TRAINED)
        logged(job, 1)
        job.all("renew")
        [[step, kind, reason]] = job.one("run_on", to=2)["saved"]
        assert (step, kind) == (2, "base") and "re-created" in reason
        job.all("wait")
        logged(job, 3)
        [[step, kind, reason]] = job.one("run_on", to=4)["saved"]
        assert (step, kind) == (4, "delta") and "tables are not those" in reason
        job.all("wait")
        assert_goes_on(job, root, 6, [6, 5], model)


def test_a_process_that_cannot_save_grown_tables_still_meets_the_others(server, tmp_path, root):
    model = Model(grown=[(2, {"rows": 2560})])
    with Job(server, tmp_path / "jobs", processes=2, model=model) as job:
        started(job, root, TRAINED)
        logged(job, 1)
        of_one(job, 1, "fault", at="snapshot")
        job.all("train", to=2)
        found = job.each("log")
        assert found[0]["saved"] == "delta" and "error" in found[1]
        # The next call starts a WAL epoch of the new tables, on both.
        found = job.each("run_on", to=3)
        assert [one.get("skipped") for one in found] == [[], [3]], found
        job.each("run_until_saved", at_most=FAR)
        job.each("wait")
        step = job.one("steps")["steps"][-1]
        assert_goes_on(job, root, step + 2, [step + 2, step + 1, ...], model)


@pytest.mark.parametrize(
    ("directory", "number", "error"),
    [(None, errno.EIO, "StorageError"), ("logs", errno.ENOENT, "OptionError")],
)
def test_a_process_that_cannot_read_the_header_fails_the_call_on_all_and_the_next_works(
    two, root, directory, number, error
):
    log = {} if directory is None else {"directory": str(root.with_name(directory))}
    two.all("open", root=str(root), log=log)
    two.all("start", place=TRAINED)
    of_one(two, 1, "refuse_reads", number=number)
    first, second = (one["error"] for one in two.each("log"))
    assert (first["type"], second["type"]) == ("ProcessFailed", error)
    assert directory is None or "a directory that all 2 processes see" in second["text"]
    two.all("train", to=1)
    assert two.one("log")["saved"] == "base"
    two.all("wait")
    assert_goes_on(two, root, 3, [3, 2])
