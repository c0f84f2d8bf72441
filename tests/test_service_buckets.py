# SPDX-License-Identifier: Apache-2.0
"""A hot standby that follows a bucket, in a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray.cluster_utils", reason="needs deltackpt[ray]", exc_type=ImportError)

import ray_nodes
import servers
from ray_nodes import HANDLERS, HANG_SECS, Trainer, newest, wait_until

import deltackpt
from deltackpt import inspect, service
from deltackpt.options import Tiers, Timeouts
from deltackpt.service import ServiceOptions
from deltackpt.testing.states import assert_same

pytestmark = ray_nodes.IGNORED


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> Iterator[servers.Server]:
    with servers.s3(tmp_path_factory.mktemp("server")) as found, servers.environment_of(found):
        yield found


@pytest.fixture(scope="module")
def cluster(bucket) -> Iterator[Any]:
    """Two nodes, which inherit the credentials from the environment."""
    with ray_nodes.nodes(2) as found:
        yield found


def restored(trainer: Trainer, tiers: Tiers, **arguments: Any) -> Any:
    options = deltackpt.ManagerOptions(
        access="read", timeouts=Timeouts(service_secs=HANG_SECS), tiers=tiers
    )
    with deltackpt.CheckpointManager(trainer.root, handlers=HANDLERS, options=options) as reader:
        return newest(reader, trainer.state, **arguments)


def test_a_service_follows_a_bucket_restores_from_memory_and_compacts(cluster, bucket, tmp_path):
    url = bucket.bucket("served") + "/run"
    tiers = Tiers(staging_dir=str(tmp_path / "stage"), endpoint=bucket.endpoint)
    with Trainer(url, tiers=tiers) as trainer:
        trainer.save()
        options = ServiceOptions(
            endpoint=bucket.endpoint, poll_secs=0.05, shards=2, compact_after=3
        )
        found = service.start(url, options=options)
        try:
            for _ in range(4):
                trainer.save()
                found.wait_ready(trainer.step, HANG_SECS)
                near = restored(trainer, tiers)
                assert ({*near.source}, near.service_error, near.step) == (
                    {"service"},
                    None,
                    trainer.step,
                )
                assert_same(near.state, trainer.state)
            wait_until(
                lambda: inspect.open(url, endpoint=bucket.endpoint).compacted,
                "a base is compacted at the root",
            )
            trainer.save()
            found.wait_ready(trainer.step, HANG_SECS)
            assert_same(restored(trainer, tiers).state, trainer.state)
            far = restored(trainer, tiers, service=None)
            assert {*far.source} <= {"directory", "staging"}
            assert_same(far.state, trainer.state)
        finally:
            assert service.stop(url) > 0
