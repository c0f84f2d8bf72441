# SPDX-License-Identifier: Apache-2.0
"""The WAL of several real processes, some of which are killed, stopped or fail; see ``many.py``."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import many_wal_worker
import many_worker
import pytest
from many import Job, Server
from many_worker import Model

import deltackpt

TRAINED = {"mesh": [2, 2]}
ACROSS = {"mesh": [2, 2], "across": "y"}
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


def logged(job: Job, to: int, **arguments: Any) -> None:
    """Appends every step up to ``to``; returns once all are durable on all processes."""
    assert job.one("run_on", to=to, **arguments) == nothing_saved()
    job.all("wait_appended")


def nothing_saved() -> dict[str, Any]:
    return {"answer": "run_on", "saved": [], "skipped": []}


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


def assert_reads_alone(root: Path, step: int, model: Model | None = None) -> None:
    """The test's own process restores a step or recovery point without a template."""
    with deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": many_worker.tables()},
        options=deltackpt.ManagerOptions(access="read"),
    ) as reader:
        found = reader.restore(step).state
    assert many_worker.difference(found, (model or Model()).at(step)) is None


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
        assert_reads_alone(root, step)
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
    assert_reads_alone(root, newest + 3)
    assert_reads_alone(root, newest + 4)
    with Job(server, tmp_path / "jobs", processes=1, devices=4) as job:
        rows = {"mesh": [2, 2], "layout": "turned", "across": "y"}
        job.all("open", root=str(root), log={})
        found = restored(job, "restore_latest", place=rows, like=newest + 5)
        assert (found["point"], found["wrong"]) == (newest + 5, None)
        job.close()


@pytest.mark.parametrize("tracking", ["touched", "fingerprints"])
def test_changed_rows_are_found_by_ids_or_by_fingerprints(server, tmp_path, tracking):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, ACROSS, tracking=tracking)
        logged(job, 4, ids=tracking == "touched")
        job.all("train", to=5)
        assert job.one("save")["kind"] == "delta"
        job.all("wait")
        logged(job, 7, ids=tracking == "touched")
        found = restored(job, "restore_latest", place=TRAINED, like=7)
        assert (found["point"], found["wrong"]) == (7, None)
        job.close()
    for step in (3, 5, 7):
        assert_reads_alone(root, step)


@pytest.mark.parametrize("to", [0, 2], ids=["a step", "a point"])
def test_a_rollback_of_all_leaves_later_points_behind(server, tmp_path, to):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, TRAINED)
        logged(job, 4)
        found = restored(job, "restore", step=to, place=TRAINED, like=to)
        assert (found["step"], found["wrong"]) == (to, None)
        assert job.one("points")["points"] == [4, 3, 2, 1]
        logged(job, to + 1)
        assert job.one("points")["points"] == list(range(to + 1, 0, -1))
        job.close()
    assert_reads_alone(root, to + 1)


# Slow or lost processes.


def test_the_newest_point_is_the_last_that_a_killed_process_has(server, tmp_path):
    root = tmp_path / "root"
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


def test_a_stopped_process_is_named_and_holds_the_point_back_until_it_continues(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, TRAINED, log={"deadline_secs": 1.0})
        logged(job, 2)
        job.processes[1].kill(signal.SIGSTOP)
        job.ask("run_until_told", at_most=FAR, of=[0])
        [told] = job.answers(of=[0])
        assert told["code"] == "wal-behind" and "process 1" in told["message"], told
        job.ask("wait_appended", of=[0])
        assert [one["recovery"] for one in job.answers(of=[0])] == [[2, True]]
        assert_reads_alone(root, 2)
        job.processes[1].kill(signal.SIGCONT)
        last = told["step"]
        job.ask("run_on", to=last, of=[1])
        job.answers(of=[1])
        job.all("wait_recovery", step=last)
        job.close()


def test_a_stopped_process_0_is_named_by_the_call_that_needs_its_answer(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, TRAINED, processes_secs=3.0)
        logged(job, 1)
        job.processes[0].kill(signal.SIGSTOP)
        job.ask("run_on", to=9, of=[1])
        error = job.processes[1].answer()["error"]
        job.processes[0].kill(signal.SIGCONT)
        assert (error["type"], error["processes"]) == ("ProcessMissing", [0]), error
        # Nothing is lost that was durable before, and the next manager starts clean.
        job.all("open", root=str(root), log={})
        found = restored(job, "restore_latest", place=TRAINED, like=1)
        assert (found["point"], found["wrong"]) == (1, None)
        logged(job, 3)
        job.close()
    assert_reads_alone(root, 3)


# Failures of one process.


def test_a_failed_batch_of_one_process_voids_its_point_but_not_the_next(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, TRAINED)
        logged(job, 2)
        job.ask("refuse_writes", times=1, of=[1])
        job.answers(of=[1])
        job.all("run_on", to=3)
        job.ask("wait_failed", of=[1])
        assert "error" not in job.answers(of=[1])[0]
        logged(job, 5)
        assert job.one("points")["points"] == [5, 4, 2, 1]
        [event] = job.all("told")[1]["events"]
        assert (event["operation"], event["step"]) == ("append", 3)
        job.close()
    for step in (5, 4, 2):
        assert_reads_alone(root, step)


def test_a_wal_that_fails_again_makes_all_processes_save_at_the_same_call(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=4, devices=1) as job:
        started(job, root, TRAINED)
        logged(job, 1)
        job.ask("refuse_writes", times=FAR, of=[2])
        job.answers(of=[2])
        found = job.one("run_until_saved", at_most=FAR)
        [[step, kind, reason]] = found["saved"]
        assert kind == "delta" and "failed again" in reason
        # Also reports that earlier records failed, if that was not reported yet.
        job.each("wait")
        assert job.one("steps")["steps"] == [0, step]
        job.close()
    assert_reads_alone(root, step)


def test_if_the_wal_of_all_has_grown_too_long_all_save_at_the_same_call(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        # On a slow machine, agreement takes more steps: allow a delta of any size.
        bounds = {"max_delta_ratio": 100, "max_restore_ratio": 100}
        started(job, root, TRAINED, log={"max_wal_ratio": 0.003}, bounds=bounds)
        for _ in range(2):
            found = job.one("run_until_saved", at_most=FAR)
            [[step, kind, reason]] = found["saved"]
            assert (kind, "max_wal_ratio" in reason) == ("delta", True), reason
            job.all("wait")
        logged(job, step + 1)
        assert job.one("points")["points"][0] == step + 1
        job.close()
    assert_reads_alone(root, step)


def test_append_failed_is_raised_by_one_process_and_the_others_continue(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, TRAINED, log={"on_failure": "raise"})
        logged(job, 1)
        job.ask("refuse_writes", times=1, of=[1])
        job.answers(of=[1])
        job.all("run_on", to=2)
        job.ask("wait_failed", of=[1])
        job.answers(of=[1])
        job.all("train", to=3)
        found = job.each("log")
        assert found[0]["kind"] == "full"
        assert found[1]["error"]["type"] == "AppendFailed"
        logged(job, 4)
        assert job.one("points")["points"] == [4, 1]
        job.close()
    assert_reads_alone(root, 4)


def test_a_process_that_fails_its_part_of_the_first_step_saves_with_the_others(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        job.all("open", root=str(root), log={})
        job.all("start", place=TRAINED)
        job.ask("fault", at="snapshot", of=[1])
        job.answers(of=[1])
        found = job.each("log")
        assert found[0]["saved"] == "base"
        assert "error" in found[1]
        # Records have no base until all agree on a step. That save reports the failure of the one
        # before.
        found = job.each("run_until_saved", at_most=FAR)
        assert found[0]["error"]["type"] == "SaveFailed", found
        job.each("wait")
        [step] = job.one("steps")["steps"]
        logged(job, step + 3)
        assert job.one("points")["points"] == [step + 3, step + 2, step + 1]
        job.close()
    assert_reads_alone(root, step + 3)


def test_if_the_step_that_records_continue_from_fails_all_save_another(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        job.all("open", root=str(root), log={})
        job.all("start", place=TRAINED)
        job.ask("fault", at="commit: digests", of=[0])
        job.answers(of=[0])
        assert job.one("log")["saved"] == "base"
        job.each("run_until_saved", at_most=FAR)
        job.each("wait")
        [step] = job.one("steps")["steps"]
        assert step > 0
        logged(job, step + 2)
        assert job.one("points")["points"][:2] == [step + 2, step + 1]
        job.close()
    assert_reads_alone(root, step + 2)


def test_rows_missing_from_the_ids_of_one_process_make_all_start_over(server, tmp_path):
    root, model = tmp_path / "root", Model(reach=0.5)
    # All rows of the table that change are in the shards of process 0.
    with Job(server, tmp_path / "jobs", processes=2, model=model) as job:
        started(job, root, TRAINED)
        logged(job, 2, ids=True)
        job.all("run_on", to=3, ids=True, without=1)
        job.all("train", to=4)
        found = job.each("save")
        assert any(one.get("error", {}).get("type") == "TrackingError" for one in found), found
        job.each("wait")
        found = job.each("run_until_saved", at_most=FAR)
        steps = [[one["saved"][0][0]] if one.get("saved") else one for one in found]
        assert steps[0] == steps[1], found
        job.each("wait")
        step = job.one("steps")["steps"][-1]
        logged(job, step + 2)
        assert job.one("points")["points"] == [step + 2, step + 1]
        job.close()
    assert_reads_alone(root, step + 2, model)


@pytest.mark.parametrize("forget", [[0, 1], [1]], ids=["all", "one"])
def test_forgotten_marks_end_the_points_and_all_start_over(server, tmp_path, forget):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, TRAINED)
        logged(job, 2)
        job.all("train", to=3, forget=forget)
        job.one("log")
        job.all("train", to=4)
        assert job.one("save")["kind"] == "delta"
        assert all(one["error"]["type"] == "TrackingFailed" for one in job.each("wait"))
        assert job.one("points")["points"] == []
        # The processes may notice it at different calls, but save at the same one.
        found = [one["saved"] for one in job.all("run_until_saved", at_most=FAR)]
        assert found[0] == found[1] and found[0][0][1] == "base", found
        job.all("wait")
        step = found[0][0][0]
        assert job.one("steps")["steps"] == [0, step]
        logged(job, step + 2)
        assert job.one("points")["points"] == [step + 2, step + 1]
        job.close()
    assert_reads_alone(root, step + 2)


def test_unmarked_rows_that_the_wal_finds_on_one_process_make_all_save_a_base(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, TRAINED)
        logged(job, 2)
        job.all("train", to=3, forget=[1])
        found = [one["saved"] for one in job.all("run_until_saved", at_most=FAR)]
        assert found[0] == found[1] and found[0][0][1] == "base", found
        assert "rows differ from those in the WAL" in found[0][0][2]
        job.all("wait")
        step = found[0][0][0]
        logged(job, step + 2)
        assert job.one("points")["points"] == [step + 2, step + 1]
        job.close()
    assert_reads_alone(root, step + 2)


@pytest.mark.parametrize("refused", [[1], [0, 1]], ids=["one", "all"])
def test_a_process_without_its_part_of_the_base_for_unmarked_rows_appends_nothing(
    server, tmp_path, refused
):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, TRAINED)
        logged(job, 2)
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
        logged(job, step + 2)
        assert job.one("points")["points"] == [step + 2, step + 1]
        job.close()
    assert_reads_alone(root, step + 2)


# Calls at which all processes must meet.


def test_wrong_arguments_of_one_process_after_a_restore_block_no_other(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, TRAINED)
        logged(job, 2)
        assert restored(job, "restore_latest", place=TRAINED, like=2)["point"] == 2
        job.all("train", to=3)
        # The first call of the run, which starts a WAL epoch on all processes.
        found = job.each("log", ids=True, beyond=1)
        assert found[0]["kind"] == "full"
        assert found[1]["error"]["type"] == "OptionError"
        # By the stamps, which include the rows that the ids should have named.
        logged(job, 4)
        assert job.one("points")["points"][0] == 4
        job.close()
    assert_reads_alone(root, 4)


def test_invalid_ids_of_one_process_without_marks_make_all_save_at_the_same_call(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        job.all("open", root=str(root), log={}, tracking="touched")
        job.all("start", place=TRAINED)
        job.all("hide_marks")
        assert job.one("log")["saved"] == "base"
        job.all("wait")
        logged(job, 2, ids=True)
        job.all("train", to=3)
        found = job.each("log", ids=True, beyond=1)
        assert found[0]["kind"] == "full"
        assert found[1]["error"]["type"] == "OptionError"
        found = job.each("run_on", to=4, ids=True)
        assert [one["skipped"] for one in found] == [[], [4]], found
        found = [one["saved"] for one in job.all("run_until_saved", at_most=FAR, ids=True)]
        assert found[0] == found[1] and "did not name its rows" in found[0][0][2], found
        job.all("wait")
        step = found[0][0][0]
        logged(job, step + 2, ids=True)
        assert job.one("points")["points"][:2] == [step + 2, step + 1]
        job.close()
    assert_reads_alone(root, step + 2)
    assert_reads_alone(root, 2)


def test_a_full_buffer_of_one_process_voids_points_and_the_next_holds_all(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        log = {"buffer_bytes": 1, "when_full": "coalesce"}
        started(job, root, TRAINED, log=log)
        job.ask("arm", at="before the log is forced", action="hold", of=[1])
        job.answers(of=[1])
        for step in (1, 2, 3):
            job.all("run_on", to=step)
            job.ask("wait_appended", of=[0])
            job.answers(of=[0])
        job.release()
        job.all("wait_appended")
        logged(job, 4)
        assert job.one("points")["points"] == [4, 1]
        job.close()
    assert_reads_alone(root, 4)
    assert_reads_alone(root, 1)


def test_recreated_marks_and_grown_tables_make_all_save_at_once(server, tmp_path):
    root = tmp_path / "root"
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
        logged(job, 6)
        assert job.one("points")["points"] == [6, 5]
        job.close()
    assert_reads_alone(root, 6, model)


def test_a_process_that_cannot_save_grown_tables_still_meets_the_others(server, tmp_path):
    root = tmp_path / "root"
    model = Model(grown=[(2, {"rows": 2560})])
    with Job(server, tmp_path / "jobs", processes=2, model=model) as job:
        started(job, root, TRAINED)
        logged(job, 1)
        job.ask("fault", at="snapshot", of=[1])
        job.answers(of=[1])
        job.all("train", to=2)
        found = job.each("log")
        assert found[0]["saved"] == "delta" and "error" in found[1]
        # The next call starts a WAL epoch of the new tables, on both.
        found = job.each("run_on", to=3)
        assert [one.get("skipped") for one in found] == [[], [3]], found
        job.each("run_until_saved", at_most=FAR)
        job.each("wait")
        step = job.one("steps")["steps"][-1]
        logged(job, step + 2)
        assert job.one("points")["points"][:2] == [step + 2, step + 1]
        job.close()
    assert_reads_alone(root, step + 2, model)


@pytest.mark.parametrize(
    ("directory", "number", "error"),
    [(None, errno.EIO, "StorageError"), ("logs", errno.ENOENT, "OptionError")],
)
def test_a_process_that_cannot_read_the_header_fails_the_call_on_all_and_the_next_works(
    server, tmp_path, directory, number, error
):
    root = tmp_path / "root"
    log = {} if directory is None else {"directory": str(tmp_path / directory)}
    with Job(server, tmp_path / "jobs", processes=2) as job:
        job.all("open", root=str(root), log=log)
        job.all("start", place=TRAINED)
        job.ask("refuse_reads", number=number, of=[1])
        job.answers(of=[1])
        first, second = (one["error"] for one in job.each("log"))
        assert (first["type"], second["type"]) == ("ProcessFailed", error)
        assert directory is None or "a directory that all 2 processes see" in second["text"]
        job.all("train", to=1)
        assert job.one("log")["saved"] == "base"
        job.all("wait")
        logged(job, 3)
        assert job.one("points")["points"] == [3, 2]
        job.close()
    assert_reads_alone(root, 3)


def test_processes_that_only_read_a_recovery_point_continue_from_their_own_state(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, TRAINED)
        logged(job, 3)
        assert {one["wrong"] for one in job.all("look", step=1)} == {None}
        logged(job, 5)
        assert job.one("points")["points"] == [5, 4, 3, 2, 1]
        job.close()
    assert_reads_alone(root, 5)
