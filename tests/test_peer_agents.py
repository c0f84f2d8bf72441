# SPDX-License-Identifier: Apache-2.0
"""Peer agents on multi-node Ray clusters: nodes are removed, agents are killed during a push."""

# ruff: noqa: E402
from __future__ import annotations

import json
import os
import signal
import socket

import pytest

pytest.importorskip("ray", reason="needs deltackpt[ray]")

import ray
import ray_nodes
from memory_pack import MemoryPack
from ray_nodes import IGNORED, wait_until
from test_peers import read

from deltackpt.errors import OptionError, StorageError
from deltackpt.options import Copies
from deltackpt.service import discovery, peer_agents
from deltackpt.storage.store import Refused
from deltackpt.tiers.peers import PeerTier
from deltackpt.tiers.staging import PeerGroup

pytestmark = [pytest.mark.processes, *IGNORED]

ITEM = "embeddings"
MEMORY = 64 << 20


def remove(cluster, found: PeerGroup, count: int) -> list[str]:
    """Removes nodes other than this process's, and waits until their peer agents are gone."""
    gone = []
    for node in [*cluster.worker_nodes][:count]:
        gone.append(node.node_id)
        cluster.remove_node(node, allow_graceful=False)
    assert found.own not in gone
    # A Ray worker briefly outlives its node's daemon.
    for one in found.nodes:
        if one.node in gone:
            wait_until(lambda one=one: is_gone(one.address), "the peer agent has ended")
    return gone


def is_gone(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return True
    return False


@pytest.fixture
def three():
    with ray_nodes.nodes(3) as cluster:
        yield cluster


def test_copies_survive_the_loss_of_a_node(three):
    found = discovery.peer_group("/root", ITEM, Copies(copies=2, memory_bytes=MEMORY), "first")
    assert len(found.nodes) == 3
    held = PeerTier(found)
    pack = MemoryPack("save-1", 20 << 20)
    held.put(pack)
    [gone] = remove(three, found, 1)
    assert read(held, pack) == pack.data
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, "Ray has seen it")
    after = discovery.peer_group(
        "/root", ITEM, Copies(copies=2, memory_bytes=MEMORY), "first", earlier=found
    )
    assert gone not in {one.node for one in after.nodes}
    with pytest.raises(OptionError, match="expected 2 nodes besides this one, found 1"):
        after.require_nodes()
    held.close()


def test_a_dead_peer_agent_restarts_empty_and_gets_the_same_token(three):
    how = Copies(copies=1, memory_bytes=MEMORY)
    found = discovery.peer_group("/root", ITEM, how, "first")
    held = PeerTier(found)
    pack = MemoryPack("save-1", 1 << 20)
    held.put(pack)
    states = peer_agents.states("/root", ITEM)
    [holding] = [one for one in states.values() if one is not None and one.fragments]
    os.kill(holding.pid, signal.SIGKILL)

    def restarted():
        again = peer_agents.states("/root", ITEM)[holding.node]
        return again is not None and again.pid != holding.pid and again

    back = wait_until(restarted, "Ray starts the peer agent again")
    assert back.fragments == 0 and not back.claimed
    with pytest.raises(StorageError, match="save-1"), held.open(pack.ref):
        pass
    held.close()
    after = discovery.peer_group("/root", ITEM, how, "first", earlier=found)
    assert after.token == found.token and len(after.nodes) == 3
    held = PeerTier(after)
    held.put(pack)
    assert read(held, pack) == pack.data
    held.close()


def test_a_new_claim_shuts_out_the_previous_trainer(three):
    how = Copies(copies=1, memory_bytes=MEMORY)
    first = discovery.peer_group("/root", ITEM, how, "first")
    other_process = discovery.peer_group("/root", ITEM, how, "first")
    before = PeerTier(first)
    before.put(MemoryPack("save-1", 1000))
    beside = PeerTier(other_process)
    assert beside.refs() == before.refs()
    now = PeerTier(discovery.peer_group("/root", ITEM, how, "second"))
    assert now.refs() == [MemoryPack("save-1", 1000).ref]
    with pytest.raises(StorageError, match="an invalid token"):
        before.put(MemoryPack("save-2", 1000))
    assert discovery.peer_group("/root", ITEM, how, "first", earlier=first).nodes == ()
    with pytest.raises(Refused):
        next(iter(beside._nodes.values())).keys("")
    for one in (before, beside, now):
        one.close()


def test_the_command_line_shows_and_stops_peer_agents(three, capsys, monkeypatch):
    from click.testing import CliRunner

    from deltackpt.cli import cli, service

    monkeypatch.setattr(service, "connect", lambda address: None)
    discovery.peer_group("/root", ITEM, Copies(copies=1, memory_bytes=MEMORY), "first")
    shown = CliRunner().invoke(cli, ["peers", "status", "/root", "--json"])
    assert shown.exit_code == 0, shown.output
    said = json.loads(shown.output)["peers"]
    assert [one["memory_bytes"] for one in said.values()] == [MEMORY] * 3
    assert "address" in CliRunner().invoke(cli, ["peers", "status", "/root"]).output
    ended = CliRunner().invoke(cli, ["peers", "stop", "/root"])
    assert "3 actors ended" in ended.output
    wait_until(lambda: peer_agents.states("/root", ITEM) == {}, "no peer agent is left")
