# SPDX-License-Identifier: Apache-2.0
"""Jobs of several processes against buckets: a stage that all of them see, one promoter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import servers
from many import Job, Server

from deltackpt.ledger.opening import open_steps
from deltackpt.upkeep.verify import verify_root

PLACE = {"mesh": [2, 2]}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> Iterator[servers.Server]:
    with servers.s3(tmp_path_factory.mktemp("server")) as running:
        with servers.environment_of(running):
            yield running


@pytest.fixture(scope="module")
def server(bucket) -> Iterator[Server]:
    found = Server(**bucket.environment)
    yield found
    found.close()


def saved(job: Job, step: int) -> str:
    job.all("train", to=step)
    answer = job.one("save")
    job.all("wait")
    return answer["kind"]


def test_a_job_saves_to_a_bucket_and_another_goes_on_elsewhere(server, bucket, tmp_path):
    url = bucket.bucket("jobs") + "/run"
    tiers = {"stage": str(tmp_path / "stage"), "endpoint": bucket.endpoint}
    with Job(server, tmp_path / "jobs", processes=2) as job:
        job.all("open", root=url, tiers=tiers, notes=True)
        job.all("start", place=PLACE)
        assert [saved(job, step) for step in range(3)] == ["base", "delta", "delta"]
        # What every process waited for is at the root.
        assert sorted(open_steps(url, endpoint=bucket.endpoint).steps()) == [0, 1, 2]
        for answer in job.all("restore", step=1, place=PLACE, like=1):
            assert (answer["step"], answer["wrong"]) == (1, None)
        assert saved(job, 3) == "delta"
        assert sorted(open_steps(url, endpoint=bucket.endpoint).steps()) == [0, 1, 3]
        job.close()
    assert verify_root(url, endpoint=bucket.endpoint).intact
    elsewhere = tiers | {"stage": str(tmp_path / "other")}
    with Job(server, tmp_path / "jobs", processes=4, devices=1) as job:
        job.all("open", root=url, tiers=elsewhere)
        turned = {"mesh": [4, 1], "layout": "turned"}
        for answer in job.all("restore_latest", place=turned, like=3):
            assert (answer["step"], answer["wrong"], answer["skipped"]) == (3, None, [])
        assert saved(job, 4) == "delta"
        job.close()
    assert sorted(open_steps(url, endpoint=bucket.endpoint).steps()) == [0, 1, 3, 4]


def opened_apart(job: Job, url: str, folder: Path, endpoint: str, **how) -> None:
    """Each process with a stage that no other one sees."""
    for number, process in enumerate(job.processes):
        tiers = {"stage": str(folder / f"node{number}"), "endpoint": endpoint, "shared": False}
        process.ask("open", root=url, tiers=tiers | how, notes=True)
    for answer in job.answers():
        assert "error" not in answer, answer


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_with_stages_of_their_own_each_promote_their_parts(
    server, bucket, tmp_path, processes
):
    url = bucket.bucket(f"parts{processes}") + "/run"
    with Job(server, tmp_path / "jobs", processes=processes, devices=4 // processes) as job:
        opened_apart(job, url, tmp_path, bucket.endpoint)
        job.all("start", place=PLACE)
        assert [saved(job, step) for step in range(3)] == ["base", "delta", "delta"]
        assert sorted(open_steps(url, endpoint=bucket.endpoint).steps()) == [0, 1, 2]
        for answer in job.all("restore", step=1, place=PLACE, like=1):
            assert (answer["step"], answer["wrong"]) == (1, None)
        assert saved(job, 3) == "delta"
        assert sorted(open_steps(url, endpoint=bucket.endpoint).steps()) == [0, 1, 3]
        job.close()
    assert verify_root(url, endpoint=bucket.endpoint).intact
    elsewhere = {"stage": str(tmp_path / "other"), "endpoint": bucket.endpoint}
    with Job(server, tmp_path / "jobs", processes=2, devices=2) as job:
        job.all("open", root=url, tiers=elsewhere)
        turned = {"mesh": [4, 1], "layout": "turned"}
        for answer in job.all("restore_latest", place=turned, like=3):
            assert (answer["step"], answer["wrong"], answer["skipped"]) == (3, None, [])
        assert saved(job, 4) == "delta"
        job.close()


def test_stages_that_not_all_processes_see_are_refused(server, bucket, tmp_path):
    url = bucket.bucket("apart") + "/run"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        for number, process in enumerate(job.processes):
            stage = str(tmp_path / f"node{number}")
            tiers = {"stage": stage, "endpoint": bucket.endpoint}
            process.ask("open", root=url, tiers=tiers, processes_secs=5.0)
        first, second = job.answers()
        assert second["error"]["type"] == "OptionError"
        assert "expected the stage that process 0 opened" in second["error"]["text"]
        assert not Path(tmp_path / "node1" / "steps").exists()
        assert first is not None
