# SPDX-License-Identifier: Apache-2.0
"""Preemption of a Ray cluster node during training, with notice."""

# ruff: noqa: E402
from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="needs deltackpt[ray]", exc_type=ImportError)

import ray
import ray.train
import ray_nodes
import ray_worker
from ray.cluster_utils import Cluster
from test_jax_trainer import WORKERS, assert_exact, noted, run_config

from deltackpt.service import jax_trainer

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    *ray_nodes.IGNORED,
]


@pytest.fixture
def cluster(monkeypatch):
    """A head without CPUs, and three nodes that take one worker each."""
    place = tempfile.mkdtemp(prefix="ray-")
    monkeypatch.setenv("RAY_TMPDIR", place)
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "240")
    sizes = {"object_store_memory": 100_000_000, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **sizes})
    for _ in range(3):
        nodes.add_node(num_cpus=1, **sizes)
    ray.init(
        nodes.address,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(ray_worker.__file__).parent)}},
    )
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    shutil.rmtree(place, ignore_errors=True)


@ray.remote(num_cpus=0)
def fit(trainer):
    result = trainer.fit()
    return jax_trainer.reference(result.checkpoint)


def test_a_preempted_run_saves_in_time_and_resumes_on_other_nodes(cluster, tmp_path):
    journal = tmp_path / "journal.jsonl"
    config = {"directory": str(tmp_path / "steps"), "journal": str(journal)}
    config |= {"steps": 12, "save_every": 4, "preemption": 6}
    trainer = jax_trainer.trainer(
        # A preemption does not count as a failure.
        *(ray_worker.train, config),
        scaling=WORKERS,
        run=run_config(tmp_path, failures=1),
    )
    done = fit.remote(trainer)
    while not (journal.exists() and noted(journal, "waiting")):
        assert not ray.wait([done], timeout=0.2)[0], ray.get(done)
    [waiting] = noted(journal, "waiting")
    subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *("--address", cluster.address, "--node-id", waiting["node"]),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"),
            *("--deadline-remaining-seconds", "60"),
        ],
        check=True,
    )
    assert ray.get(done).step == 12
    [saved], [restored] = noted(journal, "saved"), noted(journal, "restored")
    assert saved["step"] == restored["step"] == 6
    assert_exact(restored)
    [end] = noted(journal, "end")
    assert_exact(end)
    assert end["node"] != waiting["node"]
