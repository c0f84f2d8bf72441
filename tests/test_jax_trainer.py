# SPDX-License-Identifier: Apache-2.0
"""Training under Ray's ``JaxTrainer``, on a local cluster that the tests start."""

# ruff: noqa: E402
from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("ray.train", reason="needs deltackpt[ray]", exc_type=ImportError)

import ray
import ray.train
import ray_nodes
import ray_worker
from ray.train.v2.jax import JaxTrainer

import deltackpt
from deltackpt import errors
from deltackpt.service import jax_trainer
from deltackpt.testing.training_run import TrainingRun

pytestmark = ray_nodes.IGNORED

WORKERS = ray.train.ScalingConfig(num_workers=2)
TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


@pytest.fixture(scope="module")
def cluster():
    """A local Ray node for the duration of the module."""
    # A socket path can have at most 107 characters.
    place = tempfile.mkdtemp(prefix="ray-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        # On a busy machine, workers can take longer to start than the default limit of 60 s.
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "240")
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200_000_000,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
            _temp_dir=place,
        )
        yield
        ray.shutdown()
    shutil.rmtree(place, ignore_errors=True)


def run_config(path: Path, failures: int) -> ray.train.RunConfig:
    return ray.train.RunConfig(
        name="run",
        storage_path=str(path / "ray"),
        failure_config=ray.train.FailureConfig(max_failures=failures),
        worker_runtime_env={"env_vars": TWO_DEVICES},
    )


def noted(path: Path, event: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry for entry in entries if entry["event"] == event]


def assert_exact(entry: dict[str, Any]) -> None:
    for name, array in ray_worker.expected(entry["step"]).items():
        assert bytes.fromhex(entry[name]) == array.tobytes()


@pytest.fixture(scope="module")
def killed(cluster, tmp_path_factory):
    """A run of 20 steps whose worker 1 is killed after 13 steps."""
    path = tmp_path_factory.mktemp("killed")
    config = {"directory": str(path / "steps"), "journal": str(path / "journal.jsonl")}
    config |= {"steps": 20, "save_every": 4, "kill": 13}
    trainer = jax_trainer.trainer(
        ray_worker.train, config, scaling=WORKERS, run=run_config(path, failures=1)
    )
    return path, trainer.fit()


def test_a_run_resumes_from_the_newest_step_after_a_worker_is_killed(killed):
    path, result = killed
    assert result.error is None
    journal = path / "journal.jsonl"
    [restored] = noted(journal, "restored")
    # The save of step 12 may have been in flight.
    assert restored["step"] in (8, 12)
    assert restored["devices"] == 4
    assert_exact(restored)
    [end] = noted(journal, "end")
    assert end["step"] == 20
    assert_exact(end)


def test_ray_gets_the_location_of_each_committed_step(killed):
    path, result = killed
    told = [
        (jax_trainer.reference(checkpoint), metrics)
        for checkpoint, metrics in result.best_checkpoints
    ]
    assert all(refers.directory == str(path / "steps") for refers, _ in told)
    steps = [refers.step for refers, _ in told]
    assert steps == sorted({*steps}) and steps[-1] == 20
    assert [metrics["checkpoint_step"] for _, metrics in told] == steps
    # Metrics belong to the step that was being reported.
    assert all(metrics["loss"] == metrics["at"] / 2 for _, metrics in told)
    assert all(metrics["at"] >= step for step, (_, metrics) in zip(steps, told, strict=True))
    for checkpoint, _ in result.best_checkpoints:
        files = [found for found in Path(checkpoint.path).rglob("*") if found.is_file()]
        assert sum(found.stat().st_size for found in files) < 1000


def test_a_reader_restores_the_step_that_ray_got(killed):
    path, result = killed
    refers = jax_trainer.reference(result.checkpoint)
    with deltackpt.CheckpointManager(
        refers.directory,
        handlers={"embeddings": deltackpt.Tables(select="tables/*")},
        options=deltackpt.ManagerOptions(access="read"),
    ) as manager:
        state = manager.restore(refers.step).state
    expected = ray_worker.expected(20)
    assert np.array_equal(state["tables"]["words"], expected["words"])
    assert np.array_equal(state["bias"], expected["bias"])


def test_the_step_below_a_restored_recovery_point_is_reported(tmp_path, monkeypatch):
    context = mock.Mock(**{"get_world_size.return_value": 1, "get_world_rank.return_value": 0})
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    reported: list[int] = []

    def report(metrics: dict[str, Any], checkpoint: Any = None) -> None:
        if checkpoint is not None:
            reported.append(jax_trainer.reference(checkpoint).step)

    monkeypatch.setattr(ray.train, "report", report)
    options = deltackpt.ManagerOptions(wal=deltackpt.WalOptions())
    run = TrainingRun(tmp_path, options=options)
    with run.open():
        run.save()
        run.save()
        run.append()
    session = jax_trainer.Session(tmp_path)
    resumed = TrainingRun(tmp_path, options=options, event_handlers=(session,))
    with resumed.open() as manager:
        assert manager.restore_latest(run.state).step == 3
        session.report({})
        session.report({})
    assert reported == [2]


def test_workers_that_would_each_train_alone_are_refused(cluster, tmp_path):
    config = {"directory": str(tmp_path / "steps"), "journal": str(tmp_path / "journal.jsonl")}
    alone = JaxTrainer(
        ray_worker.train,
        train_loop_config=config | {"steps": 4, "save_every": 2},
        scaling_config=WORKERS,
        run_config=run_config(tmp_path, failures=0),
    )
    with pytest.raises(ray.train.WorkerGroupError) as caught:
        alone.fit()
    for failure in caught.value.worker_failures.values():
        assert isinstance(failure, errors.OptionError)
        assert "expected jax to count 2 processes, found 1" in str(failure)
    assert not (tmp_path / "steps").exists()


def test_a_run_that_ray_would_not_restart_is_refused(tmp_path):
    with pytest.raises(errors.OptionError, match="max_failures other than 0"):
        jax_trainer.trainer(
            ray_worker.train, {}, scaling=WORKERS, run=run_config(tmp_path, failures=0)
        )


def test_a_foreign_checkpoint_is_refused(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(errors.RestoreError, match=r"expected deltackpt.json in it.*'model.pt'"):
        jax_trainer.reference(ray.train.Checkpoint.from_directory(tmp_path))
