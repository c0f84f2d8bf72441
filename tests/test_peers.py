# SPDX-License-Identifier: Apache-2.0
"""Bundles on peers that are real processes: killed during a push, full, corrupting, silent."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from memory_pack import MemoryPack

from deltackpt.errors import OptionError, StorageError
from deltackpt.storage.node_client import Node
from deltackpt.testing import NodeProcess, node_process
from deltackpt.tiers import erasure
from deltackpt.tiers.erasure import Fragment
from deltackpt.tiers.peers import PeerTier
from deltackpt.tiers.staging import PeerGroup, PeerNode

pytestmark = pytest.mark.processes

TOKEN = "a-token-of-some-length"
SEGMENT = erasure.SEGMENT_BYTES


def peer_group(nodes: dict[str, str], k: int, m: int, **options) -> PeerGroup:
    found = tuple(PeerNode(node=name, address=address) for name, address in nodes.items())
    own = PeerNode(node="own", address="127.0.0.1:1")
    return PeerGroup(root="root", own="own", token=TOKEN, nodes=(own, *found), k=k, m=m, **options)


@contextlib.contextmanager
def processes(count: int, memory: str = "200MB") -> Iterator[dict[str, NodeProcess]]:
    with contextlib.ExitStack() as stack:
        yield {
            f"n{i}": stack.enter_context(node_process(TOKEN, "--memory", memory))
            for i in range(count)
        }


def addresses(nodes: dict[str, NodeProcess]) -> dict[str, str]:
    return {name: one.address for name, one in nodes.items()}


def read(held: PeerTier, pack: MemoryPack) -> bytes:
    found = bytearray(pack.ref.nbytes)
    reader = held.open(pack.ref)
    reader.read_into(0, memoryview(found))
    return bytes(found)


@contextlib.contextmanager
def opened(found: PeerGroup) -> Iterator[PeerTier]:
    held = PeerTier(found)
    try:
        yield held
    finally:
        held.close()


class Killing(MemoryPack):
    """Kills a process when its second segment is read; the nodes then have the first one."""

    def __init__(self, key: str, nbytes: int, process):
        super().__init__(key, nbytes)
        self.process = process

    def read_into(self, start: int, out: memoryview) -> None:
        if start == SEGMENT:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        super().read_into(start, out)


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 1)])
def test_a_node_killed_during_a_push_is_replaced_and_the_bundle_is_complete(k, m):
    with processes(k + m + 1) as nodes, opened(peer_group(addresses(nodes), k, m)) as held:
        victim = nodes[held._in_order(MemoryPack("save", 1).ref)[0]]
        pack = Killing("save", 2 * SEGMENT + 12345, victim.process)
        held.put(pack)
        # Enough fragments of each segment are on live nodes to lose m more.
        [(coding, where)] = held._found(pack.ref).items()
        for segment in range(erasure.segments(coding.ref.nbytes)):
            assert len(erasure.placed_of(where[segment])) == k + m
        assert read(held, pack) == pack.data


def test_a_push_fails_by_name_if_a_killed_node_has_no_replacement():
    with processes(2) as nodes, opened(peer_group(addresses(nodes), 1, 1)) as held:
        victim = next(name for name in nodes)
        pack = Killing("save", 2 * SEGMENT, nodes[victim].process)
        with pytest.raises(StorageError, match=f"save: expected 2 other nodes.*{victim}: "):
            held.put(pack)


def test_a_full_node_is_replaced_and_keeps_what_it_has():
    with (
        node_process(TOKEN, "--memory", "20MB") as small,
        processes(2) as nodes,
        opened(peer_group({"small": small.address, **addresses(nodes)}, 1, 1)) as held,
    ):
        packs = [MemoryPack(f"save-{i}", 3 << 20) for i in range(12)]
        for pack in packs:
            held.put(pack)
        assert held.refs() == sorted(pack.ref for pack in packs)
        for pack in packs:
            assert read(held, pack) == pack.data


def lie(node: Node, key: str) -> None:
    """Flips a bit of an object, under the same key."""
    data = bytearray(node.get(key))
    data[len(data) // 2] ^= 1
    node.put(key, [data])


def test_corrupt_fragments_are_skipped_and_named_if_too_many():
    with processes(3) as nodes, opened(peer_group(addresses(nodes), 2, 1)) as held:
        pack = MemoryPack("save", (1 << 20) + 7)
        held.put(pack)
        clients = {name: Node(one.address, TOKEN) for name, one in nodes.items()}
        keys = {name: client.keys("root")[0] for name, client in clients.items()}
        by_number = {Fragment.parse(key).number: name for name, key in keys.items()}
        lie(clients[by_number[0]], keys[by_number[0]])
        assert read(held, pack) == pack.data
        lie(clients[by_number[2]], keys[by_number[2]])
        with pytest.raises(StorageError, match="expected 2 fragments") as caught:
            read(held, pack)
        for number in (0, 2):
            assert f"fragment {number} on {by_number[number]}: " in str(caught.value)
        for client in clients.values():
            client.close()


def test_a_node_that_dies_while_a_bundle_is_read_is_replaced():
    with processes(3) as nodes, opened(peer_group(addresses(nodes), 2, 1)) as held:
        pack = MemoryPack("save", 3 * SEGMENT)
        held.put(pack)
        out = bytearray(pack.ref.nbytes)
        reader = held.open(pack.ref)
        reader.read_into(0, memoryview(out)[:100])
        first = nodes[held._in_order(pack.ref)[0]].process
        first.send_signal(signal.SIGKILL)
        first.wait()
        reader.read_into(100, memoryview(out)[100:])
        assert out == pack.data


def test_a_silent_node_delays_one_push_and_is_used_again_once_it_answers():
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(processes(3))
        silent = nodes["n0"].process
        stack.callback(silent.send_signal, signal.SIGCONT)
        held = stack.enter_context(opened(peer_group(addresses(nodes), 1, 1, deadline_secs=2.0)))
        first = MemoryPack("first", 1000)
        held.put(first)
        silent.send_signal(signal.SIGSTOP)
        while "n0" not in held.silent():  # A signal takes effect late.
            held.survey()
        began, packs = time.monotonic(), [MemoryPack(f"save{i}", 1000) for i in range(10)]
        for pack in packs:
            held.put(pack)
            assert pack.ref in held.survey().complete
            held.delete([first.ref])
        assert time.monotonic() - began < 30.0  # 60 s if each request waited for it
        silent.send_signal(signal.SIGCONT)
        ends = time.monotonic() + 60
        while "n0" in held.silent() and time.monotonic() < ends:
            left = held.survey()
        left = held.survey()
        assert "n0" not in held.silent() and left.complete >= {pack.ref for pack in packs}
        # It was not there when its copy was deleted, so the survey shows that.
        held.delete(left.every)
        assert not held.refs()


def test_a_silent_node_has_one_probe_at_a_time_and_another_if_none_could_start(monkeypatch):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with opened(peer_group({"silent": address}, 1, 0, deadline_secs=0.3)) as held:
            begun: list[object] = []

            def submit(*work: object) -> Future[list[str]]:
                begun.append(work)
                if len(begun) == 1:
                    raise RuntimeError("can't start new thread")
                return Future()

            monkeypatch.setattr(held._prober, "submit", submit)
            held.refs()
            assert len(begun) == 1
            for _ in range(3):
                held.survey()
                held.refs()
                assert len(begun) == 2


def test_the_token_is_not_shown():
    assert TOKEN not in repr(peer_group({"n0": "127.0.0.1:2"}, 2, 1))


def test_too_few_nodes_are_refused_with_the_number_needed():
    with pytest.raises(OptionError, match=r"Erasure\(k=2, m=1\): expected 3 nodes.* found 2"):
        peer_group({"n0": "127.0.0.1:2", "n1": "127.0.0.1:3"}, 2, 1).require_nodes()
    peer_group({"n0": "127.0.0.1:2", "n1": "127.0.0.1:3"}, 1, 1).require_nodes()


@pytest.mark.parametrize(
    "key",
    ["root/save/10.1/2.1.0.0", "root/save/10.1/0.1.0.0.1", "root/save/10.1/2.1.0.3.1",
     "root/save/10.1/2.1.1.0.1", "root/save/0.1/2.1.0.0.1", "root/other"],
)  # fmt: skip
def test_keys_that_are_not_of_fragments_are_ignored(key):
    assert Fragment.parse(key) is None
