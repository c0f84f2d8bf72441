# SPDX-License-Identifier: Apache-2.0
"""Staging with peers: the saves of a lost node are recovered from its peers' memory.

The nodes are real servers; the test discovers them in place of Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from damages import flip
from test_tiers import Node, eventually, s3, same, staged, without_uploader

import deltackpt
from deltackpt.errors import OptionError, ServiceUnavailable, WaitTimeout
from deltackpt.events import FailureEvent
from deltackpt.nodes.blobs import MemoryBlobs
from deltackpt.nodes.server import NodeServer, Tokens
from deltackpt.options import Timeouts
from deltackpt.service import discovery
from deltackpt.tiers import Copies, Erasure, Extents
from deltackpt.tiers.cursor import Trainer
from deltackpt.tiers.peer_push import Pusher
from deltackpt.tiers.peers import PeerTier
from deltackpt.tiers.replicator import ReplicatorProcess
from deltackpt.tiers.staging import PeerGroup, PeerNode, StagingDir

__all__ = ["s3"]

_numbers = itertools.count()


class Cluster:
    """Nodes with one peer agent each, discovered like those of Ray."""

    def __init__(self, count: int):
        self.stores: dict[str, MemoryBlobs] = {}
        self.tokens: dict[str, Tokens] = {}
        self.servers: dict[str, NodeServer] = {}
        for number in range(count):
            self.add(f"node{number}")
        self.own = "node0"
        self.holder, self.deadline_secs = "", 10.0
        self.gone: set[str] = set()

    def _serve(self, name: str) -> NodeServer:
        return NodeServer(self.stores[name], bind="127.0.0.1", tokens=self.tokens[name])

    def add(self, name: str, nbytes: int = 1 << 30) -> None:
        """Adds an empty node."""
        self.stores[name], self.tokens[name] = MemoryBlobs(nbytes), Tokens()
        self.servers[name] = self._serve(name)

    def peer_group(
        self,
        root: Any,
        item: str,
        how: Copies | Erasure,
        holder: str,
        *,
        earlier: PeerGroup | None = None,
    ) -> PeerGroup:
        """See ``service.discovery.peer_group``."""
        token = secrets.token_urlsafe(32) if earlier is None else earlier.token
        for tokens in self.tokens.values():
            tokens.admit(token) if self.holder == holder else tokens.rotate(token)
        self.holder = holder
        return self._peer_group(how, token)

    def require_nodes(self, root: Any, item: str, how: Copies | Erasure) -> None:
        """See ``service.discovery.require_nodes``."""
        self._peer_group(how, "").require_nodes()

    def _peer_group(self, how: Copies | Erasure, token: str) -> PeerGroup:
        k, m = (how.k, how.m) if isinstance(how, Erasure) else (1, how.copies - 1)
        nodes = tuple(
            PeerNode(node=name, address=server.address)
            for name, server in self.servers.items()
            if name not in self.gone
        )
        how = {"k": k, "m": m, "deadline_secs": self.deadline_secs}
        return PeerGroup(root="root", own=self.own, token=token, nodes=nodes, **how)

    def lose(self, name: str) -> None:
        """Removes a node and its memory for good."""
        self.gone.add(name)
        self.servers[name].close()
        self.stores[name].close()

    def restart_peer(self, name: str, nbytes: int = 1 << 30) -> None:
        """Restarts a peer agent: empty, at another address, without admitted tokens."""
        self.servers[name].close()
        self.stores[name].close()
        self.add(name, nbytes)

    def holding(self) -> dict[str, int]:
        """Number of fragments on each living node."""
        living = self.stores.keys() - self.gone
        return {name: len(self.stores[name].keys("", after="", most=1 << 20)) for name in living}

    def filled(self) -> list[str]:
        return [name for name, count in self.holding().items() if count]

    def close(self) -> None:
        for name in self.stores.keys() - self.gone:
            self.lose(name)


class NodeWithPeers(Node):
    """A machine whose saves are safe once its peers have them."""

    how: Copies | Erasure = Copies()

    def manager(self, **options: Any) -> deltackpt.CheckpointManager:
        given = {"peers": self.how, "wait_for": "peers", **options}
        return super().manager(**given)

    def lose(self) -> None:
        """Removes the machine for good; its replacement starts empty."""
        shutil.rmtree(self.stage.path)

    def peers_run(self, *steps: int, **more: Any) -> None:
        """A run whose saves reach peers, but not the remote directory."""
        with root_out_of_reach(self):
            self.run(*steps, **more)

    def peers_resumed(self, step: int, steps: list[int] | None = None, **more: Any) -> Any:
        """Like ``resumed``, and the remote directory is out of reach."""
        with root_out_of_reach(self):
            return self.resumed(step, steps, **more)

    def group(self) -> PeerGroup:
        orders = self.stage.orders()
        assert orders is not None and orders.peers is not None
        return orders.peers


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Callable[[int], Cluster]]:
    """Makes the cluster of the test."""
    with contextlib.ExitStack() as stack:

        def make(count: int) -> Cluster:
            found = stack.enter_context(contextlib.closing(Cluster(count)))
            monkeypatch.setattr(discovery, "peer_group", found.peer_group)
            monkeypatch.setattr(discovery, "require_nodes", found.require_nodes)
            return found

        yield make


@pytest.fixture
def node(s3, tmp_path) -> Callable[[], NodeWithPeers]:
    """Makes nodes that train on one remote directory."""
    url = s3.bucket(f"peers{next(_numbers)}") + "/some/run"
    made = (NodeWithPeers(url, s3.endpoint, tmp_path / f"node{number}") for number in range(9))
    return lambda: next(made)


class _Pushing:
    """Replaces an uploader that never reaches the remote directory: fills only the peers."""

    def __init__(self, stage: StagingDir):
        self._pusher = Pusher(stage)
        self.trainer = Trainer()
        self._thread = self._pusher.start(self.trainer)

    def end(self) -> None:
        self._pusher.end()
        self._thread.join()


@contextlib.contextmanager
def root_out_of_reach(one: Node) -> Iterator[None]:
    """Saves reach peers, but not the remote directory."""
    pushing: list[_Pushing] = []

    def start(self) -> None:
        if not pushing:
            pushing.append(_Pushing(one.stage))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicatorProcess, "start", start)
        patch.setattr(ReplicatorProcess, "wake", lambda *_: [p.trainer.wake() for p in pushing])
        try:
            yield
        finally:
            for each in pushing:
                each.end()


def push(one: Node) -> Pusher:
    """Pushes all staged saves to the peers."""
    pusher = Pusher(one.stage)
    while pusher.step():
        pass
    return pusher


HOWS = [(Copies(1), 2, ["node1"]), (Copies(2), 3, ["node2"]), (Erasure(k=2, m=1), 4, ["node1"])]


@pytest.mark.parametrize(("how", "count", "lost"), HOWS, ids=str)
def test_no_save_is_lost_with_a_node(node, cluster, how, count, lost):
    cluster = cluster(count)
    one, other = node(), node()
    one.how = other.how = how
    with root_out_of_reach(one), one.manager() as manager:
        one.saves(manager, 0, 1, 2, 3, metrics={"loss": 1.0})
        assert one.root() == []
    one.lose()
    if not isinstance(how, Copies) or how.copies > 1:
        for name in lost:
            cluster.lose(name)
        cluster.restart_peer("node0")
        cluster.add("spare")
    with other.manager(wait_for="remote") as manager:
        found = other.restore(manager)
        assert (found.step, found.source) == (3, ("peers",) * 4)
        assert same(other.held(), one.held())
        other.saves(manager, 4)
        assert other.root() == [0, 1, 2, 3, 4]


def test_the_loss_of_one_node_too_many_is_reported(node, cluster):
    cluster = cluster(5)
    one, other = node(), node()
    one.how = other.how = Erasure(2, 1)
    one.peers_run(0)
    one.lose()
    for name in cluster.filled()[:2]:
        cluster.lose(name)
    with root_out_of_reach(other):
        with pytest.raises(OptionError, match="expected 3 nodes besides this one, found 2"):
            other.manager()
        other.how = Copies()
        with pytest.warns(UserWarning, match=r"step 0 cannot be recovered.*needs 2 of 3"):
            manager = other.manager()
        with manager:
            assert manager.latest_step() is None


def test_a_trainer_that_moves_to_its_peer_finds_the_saves_there(node, cluster):
    cluster = cluster(2)
    one, other = node(), node()
    one.peers_run(0)
    one.lose()
    cluster.restart_peer("node0")
    cluster.own = "node1"
    with root_out_of_reach(other), other.manager() as manager:
        assert other.restore(manager).source == ("peers",)
        assert same(other.held(), one.held())
        manager.wait_until_finished()
        # Its own memory does not count as a copy.
        eventually(lambda: cluster.holding()["node0"] > 0, "the other node has it, too")


def test_peers_have_the_saves_of_the_staging_directory(node, cluster):
    cluster = cluster(2)
    one = node()
    with one.manager(wait_for="remote", keep_local=1) as manager:
        one.saves(manager, *range(6), bases=range(6))
        eventually(
            lambda: len(one.local()) <= 2 or bool(staged(manager).collect()), "they are evicted"
        )
        eventually(lambda: cluster.holding()["node1"] == len(one.local()), "and dropped")
    assert cluster.holding()["node0"] == 0


def test_rolled_back_saves_are_dropped_and_do_not_reappear(node, cluster):
    cluster = cluster(2)
    one, other = node(), node()
    with root_out_of_reach(one), one.manager() as manager:
        one.saves(manager, 0, 1, 2, 3)
        one.restore(manager, 1)
        with pytest.warns(UserWarning, match="rolled-back"):
            one.saves(manager, 2)
        eventually(lambda: cluster.holding()["node1"] == 3, "what was left is dropped")
    one.lose()
    other.peers_resumed(2, [0, 1, 2], like=one)


def test_a_restarted_peer_agent_is_refilled(node, cluster):
    cluster = cluster(2)
    one = node()
    with root_out_of_reach(one), one.manager() as manager:
        one.saves(manager, 0)
        cluster.restart_peer("node1")
        one.saves(manager, 1)
        eventually(lambda: cluster.holding()["node1"] == 2, "both saves are there again")
        assert sum(event.operation == "push" for event in one.events.of(FailureEvent)) <= 1


def test_if_no_peer_answers_the_wait_raises_and_loses_nothing(node, cluster, monkeypatch):
    cluster = cluster(2)
    one = node()
    manager = one.manager(timeouts=Timeouts(close_secs=10.0))
    without_uploader(monkeypatch, manager)
    with root_out_of_reach(one):
        cluster.lose("node1")
        one.save(manager, 0)
        eventually(lambda: not manager.is_saving_in_progress(), "it is in the stage")
        with pytest.raises(WaitTimeout, match="every save to reach tier 'peers'.*add nodes"):
            manager.wait_until_finished()
        with pytest.raises(WaitTimeout):
            manager.close()
    assert one.local() == [0]


def test_a_trainer_with_too_few_nodes_locks_out_nobody(node, cluster):
    cluster = cluster(2)
    one, other = node(), node()
    with one.manager() as manager:
        one.saves(manager, 0)
        other.how = Erasure(k=2, m=1)
        with pytest.raises(OptionError, match="expected 3 nodes besides this one, found 1"):
            other.manager()
        # A save that is uploaded first may not be sent to the peer.
        for step in range(1, 5):
            one.saves(manager, step)
        eventually(lambda: cluster.holding()["node1"] > 1, "its peer takes what is saved")


def test_peers_need_ray(node):
    with pytest.raises(ServiceUnavailable):
        node().manager()


def test_the_peer_token_is_readable_only_by_the_trainers_user(node, cluster):
    cluster(2)
    one = node()
    with one.manager() as manager:
        one.saves(manager, 0)
        token = one.group().token
        files = [path for path in one.stage.path.rglob("*") if path.is_file()]
        holding = [path for path in files if token.encode() in path.read_bytes()]
        assert {path.name.partition(".")[0] for path in holding} == {"orders", "starting"}
        assert {stat.S_IMODE(path.stat().st_mode) for path in holding} == {0o600}
        assert token not in repr(one.group())


def test_the_previous_trainer_is_locked_out(node, cluster):
    cluster(2)
    one, other = node(), node()
    one.peers_run(0)
    with root_out_of_reach(other), other.manager() as manager:
        other.restore(manager)
        with contextlib.closing(PeerTier(one.group())) as late:
            assert late.refs() == []
        assert staged(manager).replicas.offers()


def test_extents_are_read_before_peers(node, cluster, tmp_path):
    cluster(2)
    one = node()
    where = tmp_path / "extents"
    extents = Extents(directory=str(where), nbytes=40 << 16, extent_bytes=1 << 16)
    one.peers_run(0, 1, extents=extents)
    one.lose()
    data = (where / "extents").read_bytes()
    flip(where / "extents", data.index(b"dckpack1", data.index(b"dckpack1") + 8) + 40)  # The delta.
    assert one.peers_resumed(1, extents=extents).source == ("extents", "peers")
