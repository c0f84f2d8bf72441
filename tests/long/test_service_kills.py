# SPDX-License-Identifier: Apache-2.0
"""Kills restore actors, nodes and the trainer at random moments: no restore has a wrong bit.

This includes earlier restores, which are memory of a replica.
"""

# ruff: noqa: E402
from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("ray.cluster_utils", reason="needs deltackpt[ray]", exc_type=ImportError)

import ray_nodes
from ray_nodes import HANG_SECS, pids, remove_arrays, wait_until

import deltackpt
from deltackpt import service
from deltackpt.service import ServiceOptions
from deltackpt.testing.states import assert_same

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600), *ray_nodes.IGNORED]

KILLS = {"actor": 60, "node": 20, "trainer": 20}
#: How long a restore waits for the service.
SERVICE_SECS = 3.0
#: The maximum random delay before a kill.
MOMENT_SECS = 0.5


class Model:
    """Computes the state at each step with numpy."""

    def __init__(self) -> None:
        self._states = {0: ray_nodes.initial(ray_nodes.ROWS)}

    def at(self, step: int) -> dict[str, Any]:
        start = max(known for known in self._states if known <= step)
        state = self._states[start]
        for now in range(start + 1, step + 1):
            state, _ = ray_nodes.trained(state, now)
            if now % 50 == 0:
                self._states[now] = state
        return state


@contextlib.contextmanager
def training(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A trainer's process, which ends with the context."""
    code = f"import ray_nodes; ray_nodes.train_for_ever({str(root)!r})"
    environment = os.environ | {"PYTHONPATH": str(Path(ray_nodes.__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def newest(root: Path) -> int:
    return max((int(path.name) for path in root.glob("*") if path.name.isdecimal()), default=0)


def test_each_restore_equals_the_model_after_a_kill_at_any_moment(tmp_path, campaign, record):
    draw = campaign.random("kills under the service")
    root, model = tmp_path / "root", Model()
    whole = model.at(0)
    devices = np.array(jax.devices()[:2])
    by_rows = jax.sharding.NamedSharding(
        jax.sharding.Mesh(devices, ("x",)), jax.sharding.PartitionSpec("x")
    )
    # Sharded like the replicas, so that each one's data can be mapped.
    halves = jax.tree.map_with_path(
        lambda path, leaf: (
            leaf
            if path[0].key == "bias"
            else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=by_rows)
        ),
        whole,
    )
    kept: collections.deque[Any] = collections.deque(maxlen=3)
    victims = [kind for kind, count in KILLS.items() for _ in range(campaign.count(count))]
    draw.shuffle(victims)
    sources: dict[str, collections.Counter[str]] = {
        kind: collections.Counter() for kind in [*KILLS, "later"]
    }

    def compared(kind: str, by: deltackpt.CheckpointManager) -> Any:
        found = ray_nodes.newest(by, draw.choice([whole, halves]))
        assert_same(found.state, model.at(found.step))
        kept.append(found)
        for before in kept:
            assert_same(before.state, model.at(before.step))
        assert ({*found.source} == {"service"}) == (found.service_error is None), (
            found.service_error
        )
        sources[kind][found.source[0]] += 1
        return found

    with ray_nodes.nodes(3) as cluster, contextlib.ExitStack() as stack:
        options = ServiceOptions(shards=2, replicas=2, poll_secs=0.05)
        running = service.start(root, options=options)
        # One reader for all restores: it stays open while steps come and go.
        reader = stack.enter_context(ray_nodes.reader(root, SERVICE_SECS))
        trainer = stack.enter_context(training(root))
        wait_until(lambda: newest(root) > 0, "the trainer saves")
        for victim in victims:
            before = newest(root)
            threading.Event().wait(draw.uniform(0, MOMENT_SECS))
            if victim == "actor":
                replicas = pids(running.status())
                for pid in draw.sample(replicas, min(len(replicas), draw.choice([1, 1, 2, 4]))):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            elif victim == "node":
                cluster.remove_node(draw.choice([*cluster.worker_nodes]), allow_graceful=False)
            else:
                trainer.send_signal(signal.SIGKILL)
            assert compared(victim, reader).step >= before
            if victim == "node":
                ray_nodes.add_node(cluster)
            elif victim == "trainer":
                trainer.wait(HANG_SECS)
                trainer = stack.enter_context(training(root))
            wait_until(lambda before=before: newest(root) > before, "the trainer goes on")
            compared("later", reader)
        trainer.kill()
        trainer.wait(HANG_SECS)
        running.wait_ready(newest(root), HANG_SECS)
        remove_arrays(root)
        found = compared("later", stack.enter_context(ray_nodes.reader(root)))
        assert ({*found.source}, found.step) == ({"service"}, newest(root))
        assert len(pids(running.status(HANG_SECS))) == 4
        service.stop(root)
    told = ", ".join(f"{kind}: {dict(found)}" for kind, found in sources.items())
    record(f"{len(victims)} kills, {newest(root)} steps; restores after {told}")
