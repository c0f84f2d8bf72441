# SPDX-License-Identifier: Apache-2.0
"""Staging with peers: the saves of a lost node are recovered from its peers' memory.

The nodes are real servers; the test discovers them in place of Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
from test_tiers import Kept, Node, eventually, same, staged, without_promoter

import deltackpt
from deltackpt.errors import OptionError, ServiceUnavailable, WaitTimeout
from deltackpt.events import FailureEvent
from deltackpt.nodes.blobs import MemoryBlobs
from deltackpt.nodes.server import NodeServer, Tokens
from deltackpt.options import Timeouts
from deltackpt.service import discovery
from deltackpt.tiers import Copies, Erasure
from deltackpt.tiers.cursor import Trainer
from deltackpt.tiers.peer_push import Pusher
from deltackpt.tiers.peers import PeerGroup, PeerNode, PeerTier
from deltackpt.tiers.staging import StagingDir

_numbers = itertools.count()


class Cluster:
    """Nodes with one peer agent each, discovered like those of Ray."""

    def __init__(self, count: int):
        self.shelves = {f"node{i}": MemoryBlobs(1 << 30) for i in range(count)}
        self.tokens = {name: Tokens() for name in self.shelves}
        self.servers = {name: self._serve(name) for name in self.shelves}
        self.own = "node0"
        self.holder = ""
        self.gone: set[str] = set()

    def _serve(self, name: str) -> NodeServer:
        return NodeServer(self.shelves[name], bind="127.0.0.1", tokens=self.tokens[name])

    def keepers(
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
        return self._keepers(how, token)

    def require_nodes(self, root: Any, item: str, how: Copies | Erasure) -> None:
        """See ``service.discovery.require_nodes``."""
        self._keepers(how, "").require_nodes()

    def _keepers(self, how: Copies | Erasure, token: str) -> PeerGroup:
        k, m = (how.k, how.m) if isinstance(how, Erasure) else (1, how.copies - 1)
        nodes = tuple(
            PeerNode(node=name, address=server.address)
            for name, server in self.servers.items()
            if name not in self.gone
        )
        return PeerGroup(root="root", own=self.own, token=token, nodes=nodes, k=k, m=m)

    def lose(self, name: str) -> None:
        """Removes a node and its memory for good."""
        self.gone.add(name)
        self.servers[name].close()
        self.shelves[name].close()

    def restart_keeper(self, name: str) -> None:
        """Restarts a peer agent: empty, at another address, without admitted tokens."""
        self.servers[name].close()
        self.shelves[name].close()
        self.shelves[name], self.tokens[name] = MemoryBlobs(1 << 30), Tokens()
        self.servers[name] = self._serve(name)

    def holding(self) -> dict[str, int]:
        """Number of fragments on each living node."""
        living = self.shelves.keys() - self.gone
        return {name: len(self.shelves[name].keys("", after="", most=1 << 20)) for name in living}

    def close(self) -> None:
        for name in self.shelves.keys() - self.gone:
            self.lose(name)


class NeighbourNode(Node):
    """A machine whose saves are safe once its peers have them."""

    how: Copies | Erasure = Copies()

    def manager(self, **options: Any) -> deltackpt.CheckpointManager:
        given = {"peers": self.how, "wait_for": "peers", **options}
        return super().manager(**given)

    def lose(self) -> None:
        """Removes the machine for good; its replacement starts empty."""
        shutil.rmtree(self.stage.path)


@pytest.fixture(scope="module")
def s3(tmp_path_factory) -> Iterator[servers.Server]:
    with servers.s3(tmp_path_factory.mktemp("server")) as found:
        with servers.environment_of(found):
            yield found


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Callable[[int], Cluster]]:
    """Makes the cluster of the test."""
    with contextlib.ExitStack() as stack:

        def make(count: int) -> Cluster:
            found = stack.enter_context(contextlib.closing(Cluster(count)))
            monkeypatch.setattr(discovery, "peer_group", found.keepers)
            monkeypatch.setattr(discovery, "require_nodes", found.require_nodes)
            return found

        yield make


@pytest.fixture
def node(s3, tmp_path) -> Callable[[], NeighbourNode]:
    """Makes nodes that train on one remote directory."""
    url = s3.bucket(f"neighbours{next(_numbers)}") + "/some/run"
    made = (NeighbourNode(url, s3.endpoint, tmp_path / f"node{number}") for number in range(9))
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
def root_out_of_reach(one: Node, monkeypatch) -> Iterator[None]:
    """Saves reach peers, but not the remote directory."""
    pushing: list[_Pushing] = []

    def start(self) -> None:
        if not pushing:
            pushing.append(_Pushing(one.stage))

    with monkeypatch.context() as patch:
        patch.setattr("deltackpt.tiers.replicator.ReplicatorProcess.start", start)
        patch.setattr(
            "deltackpt.tiers.replicator.ReplicatorProcess.wake",
            lambda *_: [each.trainer.wake() for each in pushing],
        )
        try:
            yield
        finally:
            for each in pushing:
                each.end()


HOWS = [(Copies(1), 2, ["node1"]), (Copies(2), 3, ["node2"]), (Erasure(k=2, m=1), 4, ["node1"])]


@pytest.mark.parametrize(("how", "count", "lost"), HOWS, ids=str)
def test_no_save_is_lost_with_a_node(node, cluster, monkeypatch, how, count, lost):
    cluster = cluster(count)
    one, other = node(), node()
    one.how = other.how = how
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        for step in range(4):
            one.save(manager, step, metrics={"loss": float(step)})
        manager.wait_until_finished()
        assert one.root() == []
    one.lose()
    if not isinstance(how, Copies) or how.copies > 1:
        for name in lost:
            cluster.lose(name)
        cluster.restart_keeper("node0")
        cluster.servers["spare"] = NodeServer(
            cluster.shelves.setdefault("spare", MemoryBlobs(1 << 30)),
            bind="127.0.0.1",
            tokens=cluster.tokens.setdefault("spare", Tokens()),
        )
    with other.manager(wait_for="remote") as manager:
        found = other.restore(manager)
        assert (found.step, found.source) == (3, ("peers",) * 4)
        assert same(other.held(), one.held())
        other.save(manager, 4)
        manager.wait_until_finished()
        assert other.root() == [0, 1, 2, 3, 4]


def test_the_loss_of_one_node_too_many_is_reported(node, cluster, monkeypatch):
    cluster = cluster(5)
    one, other = node(), node()
    one.how = other.how = Erasure(2, 1)
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        one.save(manager, 0)
        manager.wait_until_finished()
    one.lose()
    holding = [name for name, count in cluster.holding().items() if count]
    for name in holding[:2]:
        cluster.lose(name)
    with root_out_of_reach(other, monkeypatch):
        with pytest.raises(OptionError, match="expected 3 nodes besides this one, found 2"):
            other.manager()
        other.how = Copies()
        match = r"step 0 cannot be recovered.*needs 2 of 3"
        with pytest.warns(UserWarning, match=match):
            manager = other.manager()
        with manager:
            assert manager.latest_step() is None


def test_a_trainer_that_moves_to_its_peer_finds_the_saves_there(node, cluster, monkeypatch):
    cluster = cluster(2)
    one, other = node(), node()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        one.save(manager, 0)
        manager.wait_until_finished()
    one.lose()
    cluster.restart_keeper("node0")
    cluster.own = "node1"
    with root_out_of_reach(other, monkeypatch), other.manager() as manager:
        assert other.restore(manager).source == ("peers",)
        assert same(other.held(), one.held())
        manager.wait_until_finished()
        # Its own memory does not count as a copy.
        eventually(lambda: cluster.holding()["node0"] > 0, "the other node has it, too")


def test_peers_have_the_saves_of_the_staging_directory(node, cluster):
    cluster = cluster(2)
    one = node()
    with one.manager(wait_for="remote", keep_local=1) as manager:
        for step in range(6):
            one.save(manager, step, force_base=True)
        manager.wait_until_finished()
        eventually(
            lambda: len(one.local()) <= 2 or bool(staged(manager).collect()), "they are evicted"
        )
        eventually(lambda: cluster.holding()["node1"] == len(one.local()), "and dropped")
    assert cluster.holding()["node0"] == 0


def test_rolled_back_saves_are_dropped_and_do_not_reappear(node, cluster, monkeypatch):
    cluster = cluster(2)
    one, other = node(), node()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        for step in range(4):
            one.save(manager, step)
        manager.wait_until_finished()
        one.restore(manager, 1)
        with pytest.warns(UserWarning, match="rolled-back"):
            one.save(manager, 2)
        manager.wait_until_finished()
        expected = one.held()
        eventually(lambda: cluster.holding()["node1"] == 3, "what was left is dropped")
    one.lose()
    with root_out_of_reach(other, monkeypatch), other.manager() as manager:
        assert manager.all_steps() == [0, 1, 2]
        other.restore(manager)
        assert same(other.held(), expected)


def test_a_restarted_peer_agent_is_refilled(node, cluster, monkeypatch):
    cluster = cluster(2)
    one = node()
    one.events = Kept()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        one.save(manager, 0)
        manager.wait_until_finished()
        cluster.restart_keeper("node1")
        one.save(manager, 1)
        manager.wait_until_finished()
        eventually(lambda: cluster.holding()["node1"] == 2, "both saves are there again")
        told = [event for event in one.events.of(FailureEvent) if event.operation == "push"]
        assert len(told) <= 1


def test_if_no_peer_answers_the_wait_raises_and_loses_nothing(node, cluster, monkeypatch):
    cluster = cluster(2)
    one = node()
    limits = Timeouts(close_secs=3.0)
    manager = one.manager(timeouts=limits)
    without_promoter(monkeypatch, manager)
    with root_out_of_reach(one, monkeypatch):
        cluster.lose("node1")
        one.save(manager, 0)
        eventually(lambda: not manager.is_saving_in_progress(), "it is in the stage")
        with pytest.raises(WaitTimeout, match="every save to reach tier 'peers'.*add nodes"):
            manager.wait_until_finished()
        with pytest.raises(WaitTimeout):
            manager.close()
    assert one.local() == [0]


def test_too_few_nodes_are_refused_at_startup(node, cluster):
    cluster(2)
    one = node()
    one.how = Erasure(k=2, m=1)
    with pytest.raises(OptionError, match="expected 3 nodes besides this one, found 1"):
        one.manager()
    one.how = Copies()
    with one.manager() as manager:
        one.save(manager, 0)


def test_a_trainer_with_too_few_nodes_locks_out_nobody(node, cluster):
    cluster = cluster(2)
    one, other = node(), node()
    with one.manager() as manager:
        one.save(manager, 0)
        manager.wait_until_finished()
        other.how = Erasure(k=2, m=1)
        with pytest.raises(OptionError, match="expected 3 nodes besides this one, found 1"):
            other.manager()
        # A save that is uploaded first may not be sent to the peer.
        for step in range(1, 5):
            one.save(manager, step)
            manager.wait_until_finished()
        eventually(lambda: cluster.holding()["node1"] > 1, "its neighbour takes what is saved")


def test_peers_need_ray(node):
    with pytest.raises(ServiceUnavailable):
        node().manager()


def test_the_peer_token_is_readable_only_by_the_trainers_user(node, cluster):
    cluster(2)
    one = node()
    with one.manager() as manager:
        one.save(manager, 0)
        manager.wait_until_finished()
        path = one.stage.path / "neighbours.msgpack"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        token = PeerGroup.from_bytes(path.read_bytes()).token
        for other in one.stage.path.rglob("*"):
            if other.is_file() and other != path:
                assert token.encode() not in other.read_bytes()
        assert token not in repr(PeerGroup.from_bytes(path.read_bytes()))


def test_the_previous_trainer_is_locked_out(node, cluster, monkeypatch):
    cluster(2)
    one, other = node(), node()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        one.save(manager, 0)
        manager.wait_until_finished()
        before = PeerGroup.from_bytes((one.stage.path / "neighbours.msgpack").read_bytes())
    with root_out_of_reach(other, monkeypatch), other.manager() as manager:
        other.restore(manager)
        with contextlib.closing(PeerTier(dataclasses.replace(before))) as late:
            assert late.refs() == []
        assert staged(manager)._client.recoverable()


def test_extents_are_read_before_peers(node, cluster, tmp_path, monkeypatch):
    cluster(2)
    one = node()
    extents = deltackpt.tiers.Extents(
        directory=str(tmp_path / "extents"), nbytes=40 << 16, extent_bytes=1 << 16
    )
    with root_out_of_reach(one, monkeypatch), one.manager(extents=extents) as manager:
        for step in range(2):
            one.save(manager, step)
        manager.wait_until_finished()
    expected = one.held()
    one.lose()
    data = bytearray(Path(tmp_path / "extents" / "extents").read_bytes())
    place = data.index(b"dckpack1", data.index(b"dckpack1") + 8)
    data[place + 40] ^= 1  # In the delta.
    Path(tmp_path / "extents" / "extents").write_bytes(data)
    with root_out_of_reach(one, monkeypatch), one.manager(extents=extents) as manager:
        assert one.restore(manager).source == ("extents", "peers")
        assert same(one.held(), expected)
