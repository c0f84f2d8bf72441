# SPDX-License-Identifier: Apache-2.0
"""The drop-in for T5X in jobs of several real processes; see ``many.py`` and ``t5x_worker.py``."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from t5x_setup import REAL

if not REAL:
    pytest.skip("T5X is on no package index; see docs/how-to/t5x.md", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import t5x_worker

from many import Job, Server

from deltackpt import inspect


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(t5x_worker.__file__, TF_CPP_MIN_LOG_LEVEL="2")
    try:
        yield server
    finally:
        server.close()


def opened(job: Job, model_dir: Path, **arguments: Any) -> None:
    """Opens the manager on all processes of a job."""
    job.all("open", model_dir=str(model_dir), **arguments)


def restored(job: Job, path: Path, step: int, **arguments: Any) -> list[str]:
    """Restores a step on all processes; checks its bits and placement, returns the warnings."""
    answers = job.all("restore", path=str(path), **arguments)
    assert [(answer["step"], answer["wrong"]) for answer in answers] == [(step, None)] * job.count
    return ["\n".join(answer["warnings"]) for answer in answers]


def saved(job: Job, *steps: int) -> None:
    """Trains and saves steps; returns after the commits."""
    for step in steps:
        job.all("train", to=step)
        assert job.one("save")["taken"]
    job.all("settle")


def batches(job: Job) -> list[int]:
    """How many batches each process has taken of its data."""
    return [answer["batches"] for answer in job.all("position")]


def kinds(model_dir: Path) -> dict[int, str | None]:
    """Kind of each step; checks that each step has its name in T5X's style."""
    names = {path.name: os.readlink(path) for path in model_dir.glob("checkpoint_*")}
    found = inspect.open(model_dir / "deltackpt").saves
    assert names == {f"checkpoint_{save.step}": f"deltackpt/{save.step}" for save in found}
    return {save.step: save.kind for save in found}


def rows(model_dir: Path, step: int) -> list[int]:
    """Rows of the table that a delta holds."""
    [found] = inspect.open(model_dir / "deltackpt").touched(step).values()
    return found.tolist()


@pytest.fixture(scope="module")
def original(server, tmp_path_factory) -> Path:
    """A model directory with steps 1 to 3, by a job of two processes that has ended."""
    model_dir = tmp_path_factory.mktemp("original") / "model"
    model_dir.mkdir()
    with Job(server, model_dir.parent / "jobs", processes=2) as job:
        opened(job, model_dir, partitions=2, data=True)
        job.all("start")
        saved(job, 1, 2, 3)
        assert job.one("steps") == {"answer": "steps", "steps": [1, 2, 3], "newest": 3}
        job.close()
    return model_dir


@pytest.fixture
def model_dir(original, tmp_path) -> Path:
    return shutil.copytree(original, tmp_path / "model", symlinks=True)


# Contents of a save of several processes.


def test_processes_save_what_changed_under_the_names_of_t5x(original):
    assert kinds(original) == {1: "base", 2: "delta", 3: "delta"}
    assert rows(original, 3) == t5x_worker.changed(3)
    found = sorted(path.name for path in (original / "deltackpt/3/dataset").glob("*/*.index"))
    assert found == ["train_ds-000-of-002.index", "train_ds-001-of-002.index"]


def test_a_save_of_two_processes_resumes_on_two_then_on_one_and_back(server, tmp_path, model_dir):
    with Job(server, tmp_path / "jobs", processes=2) as job:
        opened(job, model_dir, partitions=2, data=True)
        assert restored(job, model_dir, 3) == [""] * 2
        assert batches(job) == [3, 3]
        # A concurrent evaluation job.
        with Job(server, tmp_path / "jobs", processes=1, devices=2) as reader:
            opened(reader, model_dir, reads=True)
            restored(reader, model_dir / "checkpoint_3", 3)
            reader.close()
        saved(job, 4)
        # T5X requests this save once more when it stops early.
        assert not job.one("save")["taken"]
        job.close()
    with Job(server, tmp_path / "jobs", processes=1, devices=4) as job:
        opened(job, model_dir, partitions=2)
        restored(job, model_dir, 4)
        # Replaces step 4 by one that a single process saves.
        restored(job, model_dir / "checkpoint_3", 3)
        saved(job, 4)
        job.close()
    assert kinds(model_dir)[4] == "delta"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        opened(job, model_dir, partitions=4)
        restored(job, model_dir, 4)
        saved(job, 5)
        # Also through a transformation.
        restored(job, model_dir / "checkpoint_4", 4, renames=True)
        job.close()
    assert kinds(model_dir)[5] == "delta" and rows(model_dir, 5) == t5x_worker.changed(5)


def test_the_data_position_is_restored_only_on_as_many_processes(server, tmp_path, model_dir):
    with Job(server, tmp_path / "jobs", processes=1, devices=4) as job:
        for reads in (False, True):
            opened(job, model_dir, data=True, reads=reads)
            [answer] = job.each("restore", path=str(model_dir))
            assert answer["error"]["type"] == "TemplateMismatch"
            assert "train_ds-*-of-001, found train_ds-000-of-002," in answer["error"]["text"]
            job.all("close")
        job.close()
    # In an evaluation job, each process also has its own position.
    with Job(server, tmp_path / "jobs", processes=2) as job:
        opened(job, model_dir, partitions=2, data=True, reads=True)
        restored(job, model_dir / "checkpoint_2", 2)
        assert batches(job) == [2, 2]
        job.close()


def test_processes_resume_from_a_checkpoint_of_t5x(server, tmp_path):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    with Job(server, tmp_path / "jobs", processes=2) as job:
        # If a dtype is requested for the parameters, T5X also applies it to the step.
        opened(job, model_dir, partitions=2, data=True, stock=True, dtype=None)
        job.all("start")
        job.all("train", to=1)
        assert job.one("save")["taken"]
        job.all("close")
        opened(job, model_dir, partitions=2, data=True, dtype=None)
        restored(job, model_dir, 1)
        assert batches(job) == [1, 1]
        saved(job, 2, 3)
        # A run resumes only from our checkpoints.
        errors = [
            answer["error"] for answer in job.each("restore", path=f"{model_dir}/checkpoint_1")
        ]
        assert [error["type"] for error in errors] == ["OptionError", "ProcessFailed"]
        job.close()
    found = inspect.open(model_dir / "deltackpt").saves
    assert [(save.step, save.kind) for save in found] == [(2, "base"), (3, "delta")]


# Processes with different views of the directory.


@pytest.mark.parametrize(("behind", "reads"), [(0, True), (0, False), (1, False)])
def test_processes_restore_the_same_step_if_one_sees_an_older_listing(
    server, tmp_path, model_dir, behind, reads
):
    with Job(server, tmp_path / "jobs", processes=2) as job:
        job.ask("hide", of=[behind], step=3)
        job.answers(of=[behind])
        opened(job, model_dir, partitions=2, data=True, reads=reads)
        # As process 0 sees it.
        restored(job, model_dir, 2 if behind == 0 else 3)
        job.close()


# Failed saves and killed processes.
