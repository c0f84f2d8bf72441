# SPDX-License-Identifier: Apache-2.0
"""Stacked tables of several real processes, of which one is killed; see ``many.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import many_stack_worker
import pytest
from many import Job, Server
from test_sparsecore import TOPOLOGIES, Topology, assert_newest, assert_steps, model_at

from deltackpt.maintenance import compact, verify


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server(many_stack_worker.__file__)
    yield found
    found.close()


@contextlib.contextmanager
def running(server: Server, root: Path, processes: int, **options: Any) -> Iterator[Job]:
    """A job of several processes with eight devices, which ends cleanly."""
    jobs = root.parent / "jobs"
    with Job(server, jobs, processes=processes, devices=8 // processes) as job:
        job.all("open", root=str(root), **options)
        yield job
        job.close()


def put(job: Job, steps: Iterable[int], kind: str, **how: Any) -> None:
    for step in steps:
        assert {answer["kind"] for answer in job.all("put", step=step, **how)} == {kind}
        job.all("wait")


def assert_resumes(job: Job, step: int) -> None:
    """Asserts that each process restores its shards of the newest state, bit for bit."""
    for found in job.all("resume"):
        assert (found["step"], found["wrong"]) == (step, None)


@pytest.mark.parametrize(
    ("processes", "cores", "replicas", "writes"),
    [(2, 1, 1, {}), (4, 2, 1, {}), (2, 3, 2, {}), (4, 1, 1, {"staging_bytes": 1})],
    ids=["two", "four, two cores", "two, replicas", "four, unstaged"],
)
def test_several_processes_save_what_one_and_others_restore(
    server, tmp_path, processes, cores, replicas, writes
):
    root = tmp_path / "root"
    with running(server, root, processes, cores=cores, replicas=replicas, **writes) as job:
        job.all("begin")
        put(job, [0], "base")
        put(job, [1, 2], "delta")
        put(job, [3, 4], "full", call="append")
    models = [model_at(step) for step in range(8)]
    for target in TOPOLOGIES:
        assert_steps(root, target, dict(enumerate(models[:3])))
        assert_newest(root, target, models[4])
    assert not verify.verify_root(root).problems
    with running(server, root, 6 - processes) as job:
        assert_resumes(job, 4)
        put(job, [5], "delta")
    with running(server, root, 1, cores=2) as job:
        assert_resumes(job, 5)
        put(job, [6], "delta")
    assert_steps(root, Topology(4, 3), {step: models[step] for step in (5, 6)})
    assert compact.compact(root, step=6, memory_bytes=64 << 20) is not None
    with running(server, root, processes, replicas=2) as job:
        assert_resumes(job, 6)


def test_without_marks_each_process_finds_its_own_rows(server, tmp_path):
    root = tmp_path / "root"
    with running(server, root, 2) as job:
        job.all("begin")
        put(job, [0], "base", marked=False)
        put(job, [1, 2], "delta", marked=False)
    assert_steps(root, Topology(4), {step: model_at(step) for step in range(3)})


def test_each_process_verifies_the_marks_of_its_rows(server, tmp_path):
    with running(server, tmp_path / "root", 2) as job:
        job.all("begin")
        for compared in (False, True):
            assert {found["compared"] for found in job.all("verify")} == {compared}
            put(job, [int(compared)], "delta" if compared else "base")
        job.all("unmark")
        assert {found["error"]["type"] for found in job.each("verify")} == {"TrackingError"}


def test_an_id_with_rows_on_two_processes_fails_the_restore_on_both(server, tmp_path):
    with Job(server, tmp_path / "jobs", processes=2, devices=2) as job:
        first, second = (found["error"] for found in job.each("twice", root=str(tmp_path / "root")))
    assert first["type"] == "DamagedKeys" and "in rows 0 and 63" in first["text"]
    assert "process 0 DamagedKeys" in second["text"] and "in rows 0 and 63" in second["text"]
