# SPDX-License-Identifier: Apache-2.0
"""A trainer with peers on a real Ray cluster: it loses its staging directory, and nodes."""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import os
import signal

import pytest

pytest.importorskip("ray", reason="needs deltackpt[ray]")

import ray_nodes
import servers
from ray_nodes import IGNORED, wait_until
from test_tiers import same
from test_tiers_peers import NodeWithPeers, root_out_of_reach

from deltackpt.service import peer_agents
from deltackpt.tiers import Copies, Erasure

pytestmark = [pytest.mark.processes, *IGNORED]

ITEM = "embeddings"
MEMORY = 64 << 20


@pytest.mark.filterwarnings("ignore:peers. expected an answer from all nodes:UserWarning")
@pytest.mark.parametrize(
    ("how", "count", "lost"),
    [(Copies(2, memory_bytes=MEMORY), 3, 1), (Erasure(2, 2, memory_bytes=MEMORY), 5, 2)],
    ids=["copies", "erasure"],
)
def test_the_whole_step_is_restored_from_the_remaining_nodes(tmp_path, how, count, lost):
    with contextlib.ExitStack() as stack:
        s3 = stack.enter_context(servers.s3(tmp_path))
        stack.enter_context(servers.environment_of(s3))
        url = s3.bucket("of-a-cluster") + "/run"
        one = NodeWithPeers(url, s3.endpoint, tmp_path / "one")
        other = NodeWithPeers(url, s3.endpoint, tmp_path / "other")
        cluster = stack.enter_context(ray_nodes.nodes(count))
        one.how = how
        with root_out_of_reach(one), one.manager() as manager:
            for step in range(3):
                one.save(manager, step, metrics={"loss": 1.0})
            manager.wait_until_finished()
            assert one.root() == []
        one.lose()
        for node in [*cluster.worker_nodes][:lost]:
            cluster.remove_node(node, allow_graceful=False)
        # Restores ask the remaining nodes, which may be too few for new saves.
        other.how = Copies(1, memory_bytes=MEMORY)
        with other.manager(wait_for="remote") as manager:
            found = other.restore(manager)
            assert (found.step, found.source) == (2, ("peers",) * 3)
            assert same(other.held(), one.held())
            other.save(manager, 3)
            manager.wait_until_finished()
        assert other.root() == [0, 1, 2, 3]


def test_a_killed_peer_agent_rejoins_and_is_refilled(tmp_path):
    with contextlib.ExitStack() as stack:
        s3 = stack.enter_context(servers.s3(tmp_path))
        stack.enter_context(servers.environment_of(s3))
        stack.enter_context(ray_nodes.nodes(2))
        url = s3.bucket("of-a-cluster") + "/run"
        one = NodeWithPeers(url, s3.endpoint, tmp_path / "one")
        one.how = Copies(1, memory_bytes=MEMORY)
        with root_out_of_reach(one), one.manager() as manager:
            one.save(manager, 0)
            manager.wait_until_finished()
            [holding] = [
                state
                for state in peer_agents.states(url, ITEM).values()
                if state and state.fragments
            ]
            os.kill(holding.pid, signal.SIGKILL)
            one.save(manager, 1)
            manager.wait_until_finished()

            def filled() -> bool:
                found = peer_agents.states(url, ITEM)[holding.node]
                return found is not None and found.fragments == 2

            wait_until(filled, "the peer agent has both saves again")
