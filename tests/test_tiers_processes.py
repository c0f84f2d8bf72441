# SPDX-License-Identifier: Apache-2.0
"""Multi-process jobs against buckets, with a shared staging directory or one per process."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import many_wal_worker
import pytest
import servers
from left_running import kill_uploaders, uploaders
from many import Job, Server, wait_until
from many_worker import Model

from deltackpt.ledger.opening import open_steps
from deltackpt.ledger.view import JournalView
from deltackpt.maintenance.compact import compact
from deltackpt.maintenance.verify import verify_root
from deltackpt.storage import buckets
from deltackpt.tiers.staging import StagingDir

PLACE = {"mesh": [2, 2]}
_numbers = itertools.count()


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


def assert_restores(
    job: Job, step: int, place: dict | None = PLACE, call: str = "restore_latest"
) -> None:
    """Every process restores a step bit for bit, and skips none if it is the newest."""
    newest = call == "restore_latest"
    for answer in job.all(call, place=place, like=step, **({} if newest else {"step": step})):
        assert (answer["step"], answer["wrong"]) == (step, None), answer
        assert not newest or (answer["skipped"], answer["warnings"]) == ([], []), answer


def opened(
    job: Job, url: str, folder: Path, endpoint: str, *, shared: bool = False, tiers=(), **how
) -> list[str]:
    """Opens a manager in each process, with one staging directory or one each; returns warnings."""
    for number, process in enumerate(job.processes):
        stage = folder / ("stage" if shared else f"node{number}")
        given = {"staging_dir": str(stage), "endpoint": endpoint, "shared": shared}
        process.ask("open", root=url, tiers=given | dict(tiers), **how)
    found = job.answers()
    for answer in found:
        assert "error" not in answer, answer
    return [text for answer in found for text in answer["warnings"]]


@pytest.mark.parametrize(("processes", "shared"), [(2, True), (2, False), (4, False)])
def test_a_job_saves_to_a_bucket_and_another_resumes_elsewhere(
    server, bucket, tmp_path, processes, shared
):
    url = bucket.bucket(f"jobs{processes}{shared}".lower()) + "/run"

    def at_root() -> list[int]:
        return sorted(open_steps(url, endpoint=bucket.endpoint).steps())

    with Job(server, tmp_path / "jobs", processes=processes, devices=4 // processes) as job:
        opened(job, url, tmp_path, bucket.endpoint, shared=shared, notes=True)
        job.all("start", place=PLACE)
        assert [saved(job, step) for step in range(3)] == ["base", "delta", "delta"]
        # Steps that every process waited for are at the root.
        assert at_root() == [0, 1, 2]
        assert_restores(job, 1, call="restore")
        assert saved(job, 3) == "delta"
        assert at_root() == [0, 1, 3]
        job.close()
    assert verify_root(url, endpoint=bucket.endpoint).intact
    others = 6 - processes
    with Job(server, tmp_path / "jobs", processes=others, devices=4 // others) as job:
        opened(job, url, tmp_path / "elsewhere", bucket.endpoint, shared=True)
        assert_restores(job, 3, {"mesh": [4, 1], "layout": "turned"})
        assert saved(job, 4) == "delta"
        job.close()
    assert at_root() == [0, 1, 3, 4]


def test_unmarked_rows_of_one_process_leave_the_epoch_after_them_to_process_0(bucket, tmp_path):
    url, log = bucket.bucket("unmarked") + "/run", {"directory": str(tmp_path / "log")}

    def logged(job: Job, to: int) -> None:
        assert job.one("run_on", to=to)["saved"] == []
        job.all("wait_recovery", step=to)

    def headers() -> list[int]:
        return open_steps(url, endpoint=bucket.endpoint).wal_location.numbers()

    server = Server(many_wal_worker.__file__, **bucket.environment)
    with contextlib.closing(server), Job(server, tmp_path / "jobs", processes=2) as job:
        opened(job, url, tmp_path, bucket.endpoint, log=log)
        job.all("start", place=PLACE)
        assert job.one("log")["saved"] == "base"
        job.all("wait")
        logged(job, 2)
        wait_until(lambda: headers() == [0], "the header is uploaded")
        job.all("train", to=3, forget=[1])
        found = [one["saved"] for one in job.all("run_until_saved", at_most=5000)]
        assert found[0] == found[1] and found[0][0][1] == "base", found
        step = found[0][0][0]
        # Its uploader would commit a header that process 1 writes, in place of that of process 0.
        assert not [*(tmp_path / "node1").rglob("log/*.msgpack")]
        job.all("wait")
        logged(job, step + 2)
        job.close()
    with contextlib.closing(Server(many_wal_worker.__file__, **bucket.environment)) as server:
        with Job(server, tmp_path / "jobs", processes=2) as job:
            opened(job, url, tmp_path / "elsewhere", bucket.endpoint, log=log)
            assert_restores(job, step + 2)
            job.close()


@pytest.mark.parametrize("shared", [True, False], ids=["one stage", "stages"])
def test_dense_blocks_are_uploaded_to_a_bucket_and_compacted_there(
    server, bucket, tmp_path, shared
):
    url = bucket.bucket(f"dense-{shared}".lower()) + "/run"
    known, cut = Model(kernel=[256, 64]), {"layout": "cut"}

    with Job(server, tmp_path / "jobs", processes=2, devices=1, model=known) as job:
        opened(job, url, tmp_path, bucket.endpoint, shared=shared, dense="blocks")
        job.all("start", place={"mesh": [2, 1], **cut})
        assert [saved(job, step) for step in range(4)] == ["base", "delta", "delta", "delta"]
        job.close()
    for compacted in (False, True):
        if compacted:
            assert compact(url, endpoint=bucket.endpoint) is not None
        newest = max(open_steps(url, endpoint=bucket.endpoint).steps())
        with Job(server, tmp_path / "jobs", processes=4, devices=1, model=known) as job:
            again = tmp_path / f"again{compacted}"
            opened(job, url, again, bucket.endpoint, shared=shared, dense="blocks")
            assert_restores(job, newest, {"mesh": [4, 1], **cut})
            assert saved(job, newest + 1) == "delta"
            job.close()
        assert verify_root(url, endpoint=bucket.endpoint).intact


class Nodes:
    """A job that is killed and restarted; each process has its own staging directory."""

    def __init__(self, server: Server, bucket: servers.Server, folder: Path, name: str):
        self.server, self.bucket, self.folder = server, bucket, folder
        self.url = bucket.bucket(name) + "/run"

    @property
    def extents(self) -> dict:
        """Extents of each process, which outlast its staging directory."""
        directory = str(self.folder / "extents")
        return {"directory": directory, "nbytes": 8 << 20, "extent_bytes": 128 << 10}

    def job(self, processes: int = 2) -> Job:
        return Job(self.server, self.folder / "jobs", processes=processes, devices=4 // processes)

    def open(self, job: Job, policy: str = "consecutive", **how) -> list[str]:
        where = self.url, self.folder, self.bucket.endpoint
        return opened(job, *where, tiers=how, policy=policy, notes=True)

    def stage(self, process: int) -> Path:
        return self.folder / f"node{process}" / f"process-{process}"

    def at_root(self) -> list[int]:
        return sorted(open_steps(self.url, endpoint=self.bucket.endpoint).steps())

    def kill(self, job: Job, processes: Iterable[int] = (0, 1)) -> None:
        """Kills the job and its uploaders."""
        for process in job.processes:
            process.kill()
        for number in processes:
            self.kill_uploader(number)

    def kill_uploader(self, number: int) -> None:
        kill_uploaders(self.stage(number))

    def stop_uploader(self, number: int, how: int = signal.SIGSTOP) -> None:
        for pid in uploaders(self.stage(number)):
            os.kill(pid, how)


@pytest.fixture
def nodes(server, bucket, tmp_path, request) -> Nodes:
    return Nodes(server, bucket, tmp_path, f"nodes{next(_numbers)}")


def saves_that_wait(nodes: Nodes, job: Job, **how) -> None:
    """Uploads step 0; 1 and 2 stay staged, since one uploader is stopped."""
    nodes.open(job, wait_for="staging", **how)
    job.all("start", place=PLACE)
    job.all("train", to=0)
    job.one("save")
    job.all("wait")
    wait_until(lambda: nodes.at_root() == [0], "step 0 comes to the root")
    nodes.stop_uploader(1)
    for step in (1, 2):
        assert saved(job, step) == "delta"
    assert nodes.at_root() == [0]


@pytest.mark.parametrize("is_stage_lost", [False, True])
def test_the_next_job_uploads_steps_that_are_still_staged_or_in_extents(nodes, is_stage_lost):
    with nodes.job() as job:
        saves_that_wait(nodes, job, extents=nodes.extents)
        nodes.kill(job)
    if is_stage_lost:
        for process in (0, 1):
            shutil.rmtree(nodes.stage(process))
    with nodes.job() as job:
        assert nodes.open(job, extents=nodes.extents) == []
        assert_restores(job, 2)
        assert nodes.at_root() == [0, 1, 2]
        assert saved(job, 3) == "delta"
        assert nodes.at_root() == [0, 1, 2, 3]
        job.close()
    assert verify_root(nodes.url, endpoint=nodes.bucket.endpoint).intact


def test_a_restore_waits_for_the_upload_of_a_staged_step(nodes):
    with nodes.job() as job:
        saves_that_wait(nodes, job)
        later = threading.Timer(0.5, nodes.stop_uploader, (1, signal.SIGCONT))
        later.start()
        assert_restores(job, 2, call="restore")
        later.join()
        assert nodes.at_root() == [0, 1, 2]
        job.close()


def test_a_lost_node_loses_only_steps_that_were_not_uploaded(nodes):
    with nodes.job() as job:
        saves_that_wait(nodes, job)
        nodes.kill(job)
    shutil.rmtree(nodes.stage(1))
    with nodes.job() as job:
        [warning] = nodes.open(job)
        assert "expected a shard of steps [1, 2] in the staging directory of each" in warning
        assert_restores(job, 0)
        assert saved(job, 1) == "delta" and nodes.at_root() == [0, 1]
        job.close()
    [aside] = (nodes.stage(0) / "aside").iterdir()
    assert sorted(path.name for path in aside.iterdir()) == ["1", "2"]


def test_a_job_of_another_number_of_processes_resumes_from_the_root(nodes):
    with nodes.job() as job:
        saves_that_wait(nodes, job)
        nodes.kill(job)
    with nodes.job(4) as job:
        first, second = nodes.open(job)
        assert "steps [1, 2], which are not at" in first and "of 2 processes, not 4" in first
        assert_restores(job, 0)
        assert saved(job, 1) == "delta" and nodes.at_root() == [0, 1]
        job.close()


def test_a_job_with_another_process_count_resumes_from_the_newest_step(nodes):
    step = 0
    for count in (2, 1, 2, 4, 1):
        with nodes.job(count) as job:
            assert nodes.open(job, extents=nodes.extents) == []
            if step:
                assert_restores(job, step)
            else:
                job.all("start", place=PLACE)
            for _ in range(3):
                step += 1
                saved(job, step)
            job.close()
    assert nodes.at_root() == [*range(1, step + 1)]
    assert verify_root(nodes.url, endpoint=nodes.bucket.endpoint).intact


def test_a_damaged_staged_shard_is_reported_to_all_and_the_next_save_is_a_base(nodes):
    with nodes.job() as job:
        saves_that_wait(nodes, job)
        layer = nodes.stage(1) / "steps" / "1" / "embeddings" / "layer.1"
        layer.write_bytes(bytes(len(layer.read_bytes())))
        nodes.stop_uploader(1, signal.SIGCONT)
        wait_until(
            lambda: all(
                b"the shard of process 1" in (nodes.stage(n) / "progress.msgpack").read_bytes()
                for n in range(2)
            ),
            "both uploaders report",
        )
        assert nodes.at_root() == [0]
        assert saved(job, 3) == "base"
        wait_until(lambda: nodes.at_root() == [0, 3], "the base comes to the root")
        assert saved(job, 4) == "delta"
        job.close()
    assert verify_root(nodes.url, endpoint=nodes.bucket.endpoint).intact


def test_a_killed_uploader_is_restarted_and_no_save_is_partial(nodes):
    with nodes.job() as job:
        nodes.open(job, wait_for="staging")
        job.all("start", place=PLACE)
        for step in range(6):
            saved(job, step)
            nodes.kill_uploader(step % 2)
        nodes.open(job)  # Closes the previous managers.
        assert_restores(job, 5)
        job.close()
    assert nodes.at_root() == [*range(6)]
    assert verify_root(nodes.url, endpoint=nodes.bucket.endpoint).intact


@pytest.mark.parametrize("policy", ["consecutive", "one_shot"])
def test_a_bucket_outage_delays_uploads_on_every_node_and_no_save(nodes, policy):
    def uploaded(number: int) -> int:
        """The newest save that an uploader knows to be committed."""
        stage = StagingDir(nodes.stage(number))
        orders = stage.orders()
        assert orders is not None
        return max(stage.progress(orders.holder).entry.committed.values(), default=0)

    with nodes.job() as job:
        nodes.open(job, policy, wait_for="staging")
        job.all("start", place=PLACE)
        assert [saved(job, step) for step in range(2)] == ["base", "delta"]
        wait_until(lambda: [*map(uploaded, range(2))] == [2, 2], "both uploaders know of both")
        nodes.bucket.process.send_signal(signal.SIGSTOP)
        try:
            for step in (2, 3, 4):  # The base, the parent of some, leaves the staging directories.
                job.all("train", to=step)
                for answer in job.all("save"):
                    assert answer["kind"] == "delta" and answer["secs"] < 30, answer
                job.all("wait")
        finally:
            nodes.bucket.process.send_signal(signal.SIGCONT)
        job.close()
    wait_until(lambda: nodes.at_root() == [*range(5)], "all steps come to the root")
    wait_until(lambda: not any(uploaders(nodes.stage(n)) for n in range(2)), "uploaders end")
    assert verify_root(nodes.url, endpoint=nodes.bucket.endpoint).intact
    view = JournalView(buckets.locate(nodes.url, endpoint=nodes.bucket.endpoint).open())
    assert not [key for key in view.root.keys() if "shard-reports" in key]


def test_staging_directories_that_some_processes_cannot_see_are_refused(server, bucket, tmp_path):
    url = bucket.bucket("apart") + "/run"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        for number, process in enumerate(job.processes):
            stage = str(tmp_path / f"node{number}")
            tiers = {"staging_dir": stage, "endpoint": bucket.endpoint}
            process.ask("open", root=url, tiers=tiers)
        first, second = job.answers()
        assert second["error"]["type"] == "OptionError"
        assert "expected the directory that process 0 opened" in second["error"]["text"]
        assert not Path(tmp_path / "node1" / "steps").exists()
        assert first is not None
