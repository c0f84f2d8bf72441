# SPDX-License-Identifier: Apache-2.0
"""Large objects of a store over several nodes are spread, appear at once, and leave nothing."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import itertools
import secrets
from collections.abc import Iterator
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_nodes import TOKEN, serving
from test_tiers import Node as TrainingNode

from deltackpt.errors import Damaged, OptionError
from deltackpt.nodes.blobs import MemoryBlobs
from deltackpt.storage.node_client import Node
from deltackpt.storage.store import Exists, Missing
from deltackpt.storage.striping import HEAD_BYTES, NodesStore

MIB = 1 << 20
#: What a head begins with.
MAGIC = b"deltackpt stripe"
BIG = np.random.default_rng(0).bytes(9 * MIB + 12_345)


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    """Addresses of three nodes."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serving(MemoryBlobs(512 * MIB))).address for _ in range(3)]


@pytest.fixture
def store(addresses) -> Iterator[NodesStore]:
    """A store in a folder of its own."""
    with contextlib.closing(NodesStore(addresses, secrets.token_hex(4), TOKEN)) as found:
        yield found


def folder(store: NodesStore) -> str:
    return store.url.rpartition("/")[2]


def on_nodes(store: NodesStore, addresses: list[str]) -> dict[str, list[str]]:
    """Keys that each node has of a store."""
    found = {}
    for address in addresses:
        with contextlib.closing(Node(address, TOKEN)) as node:
            found[address] = node.keys(folder(store))
    return found


def pieces(store: NodesStore, addresses: list[str]) -> list[tuple[str, str]]:
    """Node and key of each piece."""
    found = on_nodes(store, addresses)
    return [(node, key) for node, keys in found.items() for key in keys if "~/" in key]


@pytest.mark.parametrize(
    "nbytes", [MIB - 1, MIB, MIB + 1, 3 * MIB, 12 * MIB, 12 * MIB + 1, 70 * MIB]
)
def test_objects_of_each_size_are_read_back_and_removed_without_a_trace(store, addresses, nbytes):
    data = BIG[:1] * nbytes if nbytes > len(BIG) else BIG[:nbytes]
    store.put("a/b", data, absent=True)
    assert store.length("a/b") == nbytes and store.get("a/b") == data
    assert store.keys("") == ["a/b"] == store.keys("a") and store.folders("") == ["a"]
    assert bool(pieces(store, addresses)) == (nbytes > MIB)
    store.delete(["a/b"])
    assert on_nodes(store, addresses) == {address: [] for address in addresses}
    with pytest.raises(Missing):
        store.get("a/b")


def test_each_node_has_the_same_share_of_each_object(store, addresses):
    for number in range(4):
        store.put(f"{number}", BIG)
    counts = {address: 0 for address in addresses}
    for address, _ in pieces(store, addresses):
        counts[address] += 1
    assert max(counts.values()) - min(counts.values()) <= 4


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_range_fills_any_buffers(addresses, data):
    with contextlib.closing(NodesStore(addresses, "ranges", TOKEN)) as store:
        with contextlib.suppress(Exists):
            store.put("x", BIG, absent=True)
        start = data.draw(st.integers(0, len(BIG)))
        sizes = data.draw(st.lists(st.integers(0, 2 * MIB), max_size=6))
        buffers = [memoryview(bytearray(size)) for size in sizes]
        stop = start + sum(sizes)
        from_end = data.draw(st.booleans()) and start < len(BIG)
        first = start - len(BIG) if from_end else start
        if stop > len(BIG):
            with pytest.raises(Damaged):
                store.read_into("x", first, buffers)
            return
        store.read_into("x", first, buffers)
        assert b"".join(buffers) == BIG[start:stop]
        if stop < len(BIG):
            with pytest.raises(Damaged):
                store.read_into("x", first, buffers, whole=True)


def test_a_suffix_and_a_whole_object_are_read(store):
    store.put("x", BIG)
    end = memoryview(bytearray(100))
    store.read_into("x", -100, [end], whole=True)
    assert end == BIG[-100:]
    for nbytes in (0, HEAD_BYTES, len(BIG) - 1):
        with pytest.raises(Damaged, match=f"{len(BIG)} bytes"):
            store.read_into("x", 0, [memoryview(bytearray(nbytes))], whole=True)


def test_a_replaced_object_leaves_no_pieces(store, addresses):
    store.put("x", BIG)
    versions = {store.version("x")}
    store.put("x", BIG[::-1])
    versions.add(store.version("x"))
    assert store.get("x") == BIG[::-1] and len(versions) == 2
    assert len({key.rpartition("-")[0] for _, key in pieces(store, addresses)}) == 1
    store.put("x", b"small")
    assert store.get("x") == b"small"
    store.delete(["x"])
    assert store.keys("") == []
    assert on_nodes(store, addresses) == {address: [] for address in addresses}


def test_one_of_many_conditional_writers_wins_and_the_others_leave_nothing(store, addresses):
    bodies = [bytes([number]) * (2 * MIB + number + 1) for number in range(8)]

    def write(body: bytes) -> bool:
        try:
            store.put("x", body, absent=True)
        except Exists:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        won = [*pool.map(write, bodies)]
    assert won.count(True) == 1
    assert store.get("x") == bodies[won.index(True)]
    assert len(pieces(store, addresses)) == 3


def test_pieces_without_a_head_are_listed_as_their_object_and_can_be_deleted(store, addresses):
    store.put("save/x", BIG)
    for address in addresses:  # As after the death of a writer.
        with contextlib.closing(Node(address, TOKEN)) as node:
            node.delete([f"{folder(store)}/save/x"])
    assert store.keys("save") == ["save/x"] and store.folders("") == ["save"]
    with pytest.raises(Missing):
        store.length("save/x")
    store.put("save/x", BIG[::-1], absent=True)
    assert store.get("save/x") == BIG[::-1]
    store.delete(["save/x"])
    assert on_nodes(store, addresses) == {address: [] for address in addresses}


def test_a_listing_continues_behind_any_key(store):
    keys = ["a", "a.b", "a/b", "b", "b~", "c/d"]
    for key in keys:
        store.put(key, BIG[: MIB + 1])
    assert store.keys("") == keys
    for after in ["", *keys, "a~", "b~/", "zz"]:
        assert store.keys("", after=after) == [key for key in keys if key > after]


def test_a_small_object_with_the_bytes_of_a_head_is_an_object(store, addresses):
    store.put("x", BIG)
    for address in addresses:
        with contextlib.closing(Node(address, TOKEN)) as node, contextlib.suppress(Missing):
            head = node.get(f"{folder(store)}/x")
    assert head.startswith(MAGIC) and len(head) == HEAD_BYTES
    for other in (head, MAGIC + bytes(HEAD_BYTES - len(MAGIC)), bytes(HEAD_BYTES)):
        store.put("y", other)
        assert store.get("y") == other and store.length("y") == HEAD_BYTES
        buffer = memoryview(bytearray(8))
        store.read_into("y", 4, [buffer])
        assert buffer == other[4:12]


def test_the_name_of_a_piece_is_refused_and_a_long_one_is_stored(store):
    with pytest.raises(OptionError, match="piece"):
        store.put("x~/0123456789abcdef-000001", b"")
    long = "n" * 255
    store.put(long, BIG)
    assert store.get(long) == BIG


def test_a_damaged_head_and_a_lost_or_truncated_piece_are_named(store, addresses):
    store.put("x", BIG)
    (owner,) = (
        address
        for address, keys in on_nodes(store, addresses).items()
        if f"{folder(store)}/x" in keys
    )
    address, key = pieces(store, addresses)[0]
    with contextlib.closing(Node(address, TOKEN)) as node:
        piece = node.get(key)
        for damaged in (piece[:-1], piece + b"0"):
            node.put(key, [damaged])
            with pytest.raises(Damaged, match="bytes"):
                store.get("x")
        node.delete([key])
    with pytest.raises(Damaged, match=key.rpartition("/")[2]):
        store.get("x")
    with contextlib.closing(Node(owner, TOKEN)) as node:
        head = node.get(f"{folder(store)}/x")
        for at, bit in itertools.product(range(HEAD_BYTES), range(8)):
            changed = bytearray(head)
            changed[at] ^= 1 << bit
            node.put(f"{folder(store)}/x", [changed])
            if at < len(MAGIC):  # It is no head.
                assert store.get("x") == changed
                continue
            for reads in (store.get, store.length):
                with pytest.raises(Damaged, match="head"):
                    reads("x")


class _SilentBlobs(MemoryBlobs):
    """Loses its connection after the first conditional write."""

    has_lost = False

    def commit(self, key, block, *, absent):
        super().commit(key, block, absent=absent)
        if absent and not self.has_lost:
            self.has_lost = True
            raise ConnectionError("lost")


def test_a_conditional_write_whose_answer_was_lost_stays_whole():
    with contextlib.ExitStack() as stack:
        stores = [_SilentBlobs(64 * MIB) for _ in range(2)]
        nodes = [stack.enter_context(serving(blobs)).address for blobs in stores]
        store = stack.enter_context(contextlib.closing(NodesStore(nodes, "run", TOKEN)))
        with pytest.raises(Exists):  # The retry finds the first write, as in any store.
            store.put("x", BIG, absent=True)
        assert store.get("x") == BIG
        with pytest.raises(Exists):
            store.put("x", BIG[::-1], absent=True)
        assert store.get("x") == BIG


def test_an_object_that_is_replaced_during_a_read_is_read_again(store):
    store.put("x", BIG)
    real, replaced = Node.read_into, []

    def replace_first(self, key, start, buffers, *, whole=False):
        if "~/" in key and not replaced:
            replaced.append(key)
            store.put("x", BIG[::-1])
        return real(self, key, start, buffers, whole=whole)

    with mock.patch.object(Node, "read_into", replace_first):
        assert store.get("x") == BIG[::-1]
        replaced.clear()
        buffer = memoryview(bytearray(3 * MIB))
        store.put("x", BIG)
        store.read_into("x", MIB, [buffer])
    assert buffer == BIG[::-1][MIB : 4 * MIB]


class _CountingBlobs(MemoryBlobs):
    """Counts the bytes of requested ranges, by key."""

    def __init__(self, nbytes: int):
        super().__init__(nbytes)
        self.sent = collections.Counter[str]()

    def find(self, key: str):
        held = super().find(key)
        send = held.send

        def counted(connection, start, nbytes):
            sent = send(connection, start, nbytes)
            self.sent[key] += sent
            return sent

        held.send = counted
        return held


def test_a_restore_downloads_each_large_file_once(tmp_path, monkeypatch):
    monkeypatch.setenv("DELTACKPT_NODES_TOKEN", TOKEN)
    dense = np.random.default_rng(0).normal(size=(1000, 1000)).astype(np.float32)
    with contextlib.ExitStack() as stack:
        stores = [_CountingBlobs(64 * MIB) for _ in range(3)]
        nodes = [stack.enter_context(serving(blobs)).address for blobs in stores]
        first, second = (
            TrainingNode(f"nodes://{','.join(nodes)}/run", None, tmp_path / name) for name in "ab"
        )
        for node in (first, second):
            node.state = {**node.state, "bias": jnp.zeros((1000, 1000))}
        first.state["bias"] = jnp.asarray(dense)
        with first.manager() as manager:
            first.save(manager, 0)
            manager.wait_until_finished()
        for blobs in stores:
            blobs.sent.clear()
        with second.manager() as manager:
            second.restore(manager)
        assert np.array_equal(second.held()["bias"], first.held()["bias"])
        sent = sum(blobs.sent.total() for blobs in stores)
        assert dense.nbytes <= sent < 1.2 * dense.nbytes
