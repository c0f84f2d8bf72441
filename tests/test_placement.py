# SPDX-License-Identifier: Apache-2.0
"""Placement of keys on nodes, and recovery of bundles after nodes are lost; uses no sockets."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from many import wait_until
from memory_pack import MemoryPack

from deltackpt.errors import StorageError
from deltackpt.storage.store import Missing, Unanswered
from deltackpt.storage.striping import ranked
from deltackpt.tiers import erasure, peers
from deltackpt.tiers.peers import PeerTier
from deltackpt.tiers.staging import PeerGroup, PeerNode

NAMES = st.lists(st.text("abcdef0123456789", min_size=1), unique=True, min_size=1, max_size=12)


@given(st.text(), NAMES, st.randoms())
def test_the_ranking_does_not_depend_on_the_order_of_the_nodes(key, nodes, random_):
    shuffled = [*nodes]
    random_.shuffle(shuffled)
    assert ranked(key, nodes) == ranked(key, shuffled)
    assert sorted(ranked(key, nodes)) == sorted(nodes)


@given(st.text(), NAMES, st.data())
def test_a_node_that_leaves_moves_nothing_else(key, nodes, data):
    gone = data.draw(st.sampled_from(nodes))
    left = [node for node in ranked(key, nodes) if node != gone]
    assert ranked(key, [node for node in nodes if node != gone]) == left


@given(st.text(), NAMES, st.data())
def test_no_rack_has_a_second_node_before_every_rack_has_one(key, nodes, data):
    racks = {node: data.draw(st.sampled_from("xyz")) for node in nodes}
    order = ranked(key, nodes, racks=racks)
    count = len(set(racks.values()))
    assert len({racks[node] for node in order[:count]}) == count


def test_keys_spread_over_the_nodes():
    nodes = [f"node-{i}" for i in range(10)]
    first = collections.Counter(ranked(f"key-{i}", nodes)[0] for i in range(5000))
    assert max(first.values()) < 1.3 * min(first.values())


class Cluster:
    """Peers in memory; those that are down do not answer, and lost ones restart empty."""

    def __init__(self, count: int, racks: int = 0):
        self.racks = {f"n{i}": f"r{i % racks}" if racks else "" for i in range(count)}
        self.objects: dict[str, dict[str, bytes]] = {f"n{i}": {} for i in range(count)}
        self.down: set[str] = set()

    def lose(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            self.down.add(node)
            self.objects[node].clear()

    def peer_group(self, k: int, m: int) -> PeerGroup:
        nodes = tuple(PeerNode(node=n, address=n, rack=self.racks[n]) for n in self.objects)
        return PeerGroup(root="root", own="n0", token="t", nodes=nodes, k=k, m=m)

    def connect(self, address: str, token: str, *, deadline_secs: float) -> MemoryNode:
        return MemoryNode(self, address)


class MemoryNode:
    """A ``Node`` without a socket."""

    def __init__(self, cluster: Cluster, name: str):
        self.cluster, self.name = cluster, name

    def _objects(self) -> dict[str, bytes]:
        if self.name in self.cluster.down:
            raise Unanswered(f"{self.name}: expected an answer, found none")
        return self.cluster.objects[self.name]

    def put(self, key: str, buffers: Sequence[Any], *, absent: bool = False) -> None:
        self._objects()[key] = b"".join(buffers)

    def read_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        data = self._objects().get(key)
        if data is None:
            raise Missing(key)
        for buffer in buffers:
            buffer[:] = data[start : start + len(buffer)]
            start += len(buffer)

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        return sorted(key for key in self._objects() if key.startswith(f"{folder}/"))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._objects().pop(key, None)

    def close(self) -> None:
        pass


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives bundles of a few hundred bytes several segments and stripes."""
    monkeypatch.setattr(erasure, "SEGMENT_BYTES", 400)
    monkeypatch.setattr(erasure, "STRIPE_BYTES", 256)


def opened(cluster: Cluster, k: int, m: int, monkeypatch: pytest.MonkeyPatch) -> PeerTier:
    monkeypatch.setattr(peers, "Node", cluster.connect)
    return PeerTier(cluster.peer_group(k, m))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(6)


@pytest.fixture
def held(cluster, small, monkeypatch) -> Iterator[PeerTier]:
    """Peers of ``cluster`` that hold four fragments of each bundle, and need three."""
    with contextlib.closing(opened(cluster, 3, 1, monkeypatch)) as found:
        yield found


@pytest.fixture
def pack(held) -> MemoryPack:
    """A bundle that the peers hold."""
    found = MemoryPack("save", 1000)
    held.put(found)
    return found


def read(held: PeerTier, pack: MemoryPack) -> bytes:
    found = bytearray(pack.ref.nbytes)
    reader = held.open(pack.ref)
    for at in range(0, len(found), 170):
        reader.read_into(at, memoryview(found)[at : at + 170])
    return bytes(found)


@pytest.mark.parametrize(("k", "m"), [(1, 0), (1, 1), (2, 1), (2, 2), (4, 2)])
def test_bundles_survive_random_losses_of_as_many_nodes_as_promised(k, m, small, monkeypatch):
    """Copies(r) is k = 1, m = r - 1: own node and r - 1 others, or any r - 1 of the others."""
    if k > 1 and m > 1:
        pytest.importorskip("pyeclib", reason="needs deltackpt[erasure]")
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    random_ = random.Random(seed)
    for round_ in range(200):
        cluster = Cluster(random_.randint(k + m + 1, 12), racks=random_.choice([0, 3]))
        held = opened(cluster, k, m, monkeypatch)
        packs = [MemoryPack(f"save-{round_}-{i}", random_.randint(1, 1500)) for i in range(3)]
        for pack in packs:
            held.put(pack)
        cluster.lose(["n0"])  # Nothing may depend on the own node.
        others = [node for node in cluster.objects if node != "n0"]
        cluster.lose(random_.sample(others, m))
        assert held.refs() == sorted(pack.ref for pack in packs)
        for pack in packs:
            assert read(held, pack) == pack.data
        held.close()


@pytest.mark.parametrize(("k", "m"), [(1, 1), (3, 1)])
def test_one_loss_too_many_reports_the_missing_fragments_and_nodes(k, m, small, monkeypatch):
    cluster = Cluster(k + m + 1)
    held = opened(cluster, k, m, monkeypatch)
    pack = MemoryPack("save", 1000)
    held.put(pack)
    gone = [f"n{i}" for i in range(1, m + 2)]
    cluster.lose(gone)
    assert held.refs() == []
    found = held.survey()
    assert found.every - found.whole == ({pack.ref} if k > 1 else set())
    with pytest.raises(StorageError, match="save: expected") as caught:
        held.open(pack.ref)
    for node in gone:
        assert f"{node}: expected an answer" in str(caught.value)
    if k > 1:
        assert f"needs {k} of {k + m}" in str(caught.value)
    held.close()


def test_the_own_node_stores_nothing_and_no_node_stores_two_fragments(cluster, pack):
    assert not cluster.objects["n0"]
    assert sorted(map(len, cluster.objects.values())) == [0, 0, 3, 3, 3, 3]


def test_fragments_are_spread_over_racks(small, monkeypatch):
    cluster = Cluster(9, racks=4)
    with contextlib.closing(opened(cluster, 3, 1, monkeypatch)) as held:
        held.put(MemoryPack("save", 100))
    racks = [cluster.racks[node] for node, there in cluster.objects.items() if there]
    assert len(set(racks)) == 4


def test_a_node_that_is_down_is_replaced_by_the_next_one(cluster, held):
    pack = MemoryPack("save", 1000)
    order = ranked("save", ["n1", "n2", "n3", "n4", "n5"])
    cluster.lose(order[:1])
    held.put(pack)
    assert all(cluster.objects[node] for node in order[1:])
    cluster.lose(order[1:2])
    assert read(held, pack) == pack.data


def test_too_few_live_nodes_refuse_a_bundle_by_name(cluster, held):
    cluster.lose(["n3", "n4"])
    with pytest.raises(StorageError, match="4 other nodes.*n3: expected an answer"):
        held.put(MemoryPack("save", 1000))
    cluster.down.clear()
    held.put(MemoryPack("save", 1000))


def test_holding_a_bundle_again_sends_only_what_a_node_lost(cluster, held, pack, monkeypatch):
    before = {node: dict(there) for node, there in cluster.objects.items()}
    with monkeypatch.context() as patch:
        patch.setattr(MemoryNode, "put", None)
        held.put(pack)
    assert cluster.objects == before
    lost = next(node for node, there in before.items() if there)
    cluster.lose([lost])
    cluster.down.clear()
    held.put(pack)
    assert cluster.objects == before


def test_bundles_that_could_not_be_dropped_are_dropped_later(cluster, held):
    packs = [MemoryPack(f"save-{i}", 1000) for i in range(3)]
    for pack in packs:
        held.put(pack)
    cluster.down.add("n1")
    held.delete([packs[0].ref])
    assert cluster.objects["n1"] and held.refs() == [packs[1].ref, packs[2].ref]
    cluster.down.clear()
    # A node that did not answer is asked again once a probe of it has succeeded.
    wait_until(lambda: packs[0].ref in held.survey().every, "the node is asked again")
    held.delete([packs[0].ref, packs[1].ref])
    keys = [key for there in cluster.objects.values() for key in there]
    assert keys and all("/save-2/" in key for key in keys)
