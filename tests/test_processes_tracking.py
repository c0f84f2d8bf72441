# SPDX-License-Identifier: Apache-2.0
"""Real processes whose marks differ from those of the parent save or of other processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from many import Job, Server
from test_processes import assert_restores, saved, started, step_numbers

PLACE = {"mesh": [2, 2]}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def assert_given_up(job: Job, root: Path, step: int) -> None:
    """The save in flight is not committed, and each process reports that tracking failed."""
    for answer in job.each("wait"):
        assert answer["error"]["type"] == "TrackingFailed", answer
    assert step not in step_numbers(root)
    job.all("train", to=step + 1)
    answer = job.one("save")
    assert answer["kind"] == "base", answer
    job.all("wait")


# Without the audit, replicas still compare their marks.
@pytest.mark.parametrize(
    ("forget", "proof"), [([0, 1], True), ([1], True), ([0], True), ([1], False), ([0], False)]
)
def test_a_process_that_forgets_its_marks_commits_no_wrong_step(server, tmp_path, forget, proof):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, PLACE, sampled_proof=proof)
        saved(job, 0)
        assert saved(job, 1)[0]["kind"] == "delta"
        job.all("train", to=2, forget=forget)
        assert job.one("save")["kind"] == "delta"
        assert_given_up(job, root, 2)
        assert saved(job, 4)[0]["kind"] == "delta"
        job.close()
    assert_restores(server, root, 4, PLACE, processes=2)


def test_marks_recreated_by_all_processes_cause_a_base_with_a_reason(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, PLACE)
        saved(job, 0)
        assert saved(job, 1)[0]["kind"] == "delta"
        job.all("renew")
        answer, _ = saved(job, 5)
        assert answer["kind"] == "base" and "re-created" in answer["reason"]
        assert saved(job, 6)[0]["kind"] == "delta"
        job.close()
    assert_restores(server, root, 6, PLACE, processes=2)


def test_processes_that_only_look_at_a_step_continue_from_their_own_state(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, PLACE)
        saved(job, 0)
        assert saved(job, 1)[0]["kind"] == "delta"
        assert {answer["wrong"] for answer in job.all("look", step=0)} == {None}
        assert saved(job, 2)[0]["kind"] == "delta"
        assert step_numbers(root) == [0, 1, 2]
        job.close()
    assert_restores(server, root, 2, PLACE, processes=2)
