# SPDX-License-Identifier: Apache-2.0
"""Nodes that store bytes for others: the store over them, and its behavior under faults."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import os
import secrets
import signal
import socket
import struct
import threading
import urllib.parse
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import command
import numpy as np
import orbax.checkpoint as ocp
import proxy
import pytest
import servers
import tensorstore as ts
from test_tiers import Node as TrainingNode
from test_tiers import resume_on_empty_nodes

from deltackpt import inspect, interchange
from deltackpt.errors import InUse, OptionError, OutOfSpace, StorageError
from deltackpt.nodes.blobs import MemoryBlobs
from deltackpt.nodes.directory_blobs import INCOMING, DirectoryBlobs
from deltackpt.nodes.server import NodeServer, Tokens
from deltackpt.storage import buckets
from deltackpt.storage.node_client import Node
from deltackpt.storage.store import Exists, Missing, Refused, Unanswered
from deltackpt.storage.striping import NodesStore, ranked
from deltackpt.testing import node_process
from deltackpt.testing.store_suite import StoreSuite

#: Fixed: it is part of test ids, which all workers must collect alike.
TOKEN = "a-token-of-tests-that-is-long-enough-0123456"
#: Deadline of calls that must be answered; never asserted on.
_PATIENCE_SECS = 60.0


@contextlib.contextmanager
def serving(blobs, **how) -> Iterator[NodeServer]:
    with contextlib.closing(blobs):
        how = {"bind": "127.0.0.1", "tokens": Tokens(TOKEN), **how}
        with contextlib.closing(NodeServer(blobs, **how)) as server:
            yield server


def client(
    server: Any, token: str = TOKEN, deadline_secs: float = _PATIENCE_SECS
) -> contextlib.closing[Node]:
    """A client of a server, or of an address."""
    address = server if isinstance(server, str) else server.address
    return contextlib.closing(Node(address, token, deadline_secs=deadline_secs))


@pytest.fixture(scope="class")
def addresses(request, tmp_path_factory) -> Iterator[list[str]]:
    """Addresses of three nodes with stores of the test class's kind."""
    with contextlib.ExitStack() as stack:
        stores = [request.cls.blobs(tmp_path_factory.mktemp("node")) for _ in range(3)]
        yield [stack.enter_context(serving(blobs)).address for blobs in stores]


class NodesSuite(StoreSuite):
    """A store over three nodes; each new store is a folder of its own."""

    @pytest.fixture
    def make(self, addresses):
        return lambda: NodesStore(addresses, secrets.token_hex(4), TOKEN)


class TestNodesOfMemory(NodesSuite):
    @staticmethod
    def blobs(folder: Path) -> MemoryBlobs:
        return MemoryBlobs(64 << 20)


class TestNodesOfDirectories(NodesSuite):
    @staticmethod
    def blobs(folder: Path) -> DirectoryBlobs:
        return DirectoryBlobs(folder)


# ---- one node


@pytest.fixture(params=["memory", "directory"])
def blobs(request, tmp_path):
    found = (
        MemoryBlobs(64 << 20) if request.param == "memory" else DirectoryBlobs(tmp_path / "held")
    )
    with contextlib.closing(found):
        yield found


@pytest.fixture
def server(blobs) -> Iterator[NodeServer]:
    with serving(blobs) as found:
        yield found


@pytest.fixture
def node(server) -> Iterator[Node]:
    with client(server) as found:
        yield found


def drawn(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 1 << 18, (1 << 18) + 1, (3 << 20) - 1, 5 << 20])
def test_objects_of_every_size_round_trip_through_many_buffers(node, nbytes):
    data = drawn(nbytes)
    node.put("a/x", [data[:1000], memoryview(data)[1000:1001], b"", data[1001:]])
    assert node.length("a/x") == nbytes and node.get("a/x") == data
    out = np.zeros(nbytes, np.uint8)
    cuts = [0, nbytes // 3, nbytes // 3, nbytes]
    node.read_into("a/x", 0, [out[a:b].data for a, b in zip(cuts, cuts[1:], strict=False)])
    assert out.tobytes() == data
    assert node.keys("") == ["a/x"]


def test_a_thousand_buffers_are_sent_in_order(node):
    data = drawn(3_000_000)
    cuts = sorted(np.random.default_rng(1).integers(0, len(data), 3000).tolist())
    node.put("x", [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)])
    assert node.get("x") == data


def test_more_keys_than_an_answer_holds_are_listed(node):
    wanted = sorted(f"k/{i}.{i % 7}" for i in range(1100))
    for key in wanted:
        node.put(key, [b""])
    assert node.keys("k") == wanted and node.keys("k", after=wanted[50]) == wanted[51:]


@pytest.mark.parametrize("change", ["replace", "remove"])
def test_an_object_that_is_replaced_or_removed_is_read_to_its_end(blobs, change):
    fill(blobs, "x", drawn(1 << 20))
    held = blobs.find("x")
    fill(blobs, "x", drawn(1 << 20, 1)) if change == "replace" else blobs.delete("x")
    fill(blobs, "y", drawn(1 << 20, 2))  # Reuses freed memory.
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send_all, args=(held, ours))
        sender.start()
        found = read_all(theirs)
        sender.join()
    assert found == drawn(1 << 20)
    held.close()


def fill(blobs, key: str, data: bytes) -> None:
    incoming = blobs.receive(key, len(data))
    while window := incoming.window():
        count = min(len(window), len(data))
        window[:count], data = data[:count], data[count:]
        incoming.filled(count)
    incoming.commit(absent=False)


def send_all(held, connection: socket.socket) -> None:
    sent = 0
    while sent < held.nbytes:
        sent += held.send(connection, sent, held.nbytes - sent)
    connection.shutdown(socket.SHUT_WR)


def read_all(connection: socket.socket) -> bytes:
    """Returns everything that is sent until the other side closes or resets the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while some := connection.recv(1 << 16):
            found += some
    return found


def test_a_full_node_refuses_before_the_transfer_and_reuses_freed_room():
    blobs = MemoryBlobs(10 << 20)
    with serving(blobs) as server, client(server) as node:
        node.put("a", [bytes(4 << 20)])
        node.put("b", [bytes(4 << 20)])
        free = blobs.free_bytes
        for nbytes in (4 << 20, 1 << 30):
            with pytest.raises(Refused, match=f"{server.address}.*write c.*no room"):
                node.put("c", [bytes(nbytes)])
        assert blobs.free_bytes == free and node.keys("") == ["a", "b"]
        node.delete(["a", "never there"])
        node.put("c", [bytes(5 << 20)])
        assert node.keys("") == ["b", "c"]


def test_many_empty_objects_fill_a_node():
    with serving(MemoryBlobs(64 << 10)) as server, client(server) as node:
        with pytest.raises(Refused, match="no room"):
            for number in range(100):
                node.put(f"{number}", [])
        assert 0 < len(node.keys("")) < 100


def test_the_room_of_thousands_of_objects_is_freed_and_nothing_keeps_their_store():
    blobs, nbytes = MemoryBlobs(10 << 20), 100_000
    free = blobs.free_bytes
    for number in range(5000):
        incoming = blobs.receive(f"{number}", nbytes + number % 7 * 10_000)
        incoming.filled(len(incoming.window()))
        incoming.commit(absent=False)
        del incoming
        blobs.delete(f"{number - 2}")
    assert blobs.free_bytes > free - 3 * 2 * nbytes
    known = weakref.ref(blobs)
    del blobs
    gc.collect()
    assert known() is None


def test_a_directory_without_room_refuses(tmp_path):
    with contextlib.closing(DirectoryBlobs(tmp_path)) as blobs:
        with pytest.raises(OutOfSpace, match="expected room"):
            blobs.receive("x", 1 << 60)


def test_a_directory_has_one_server(tmp_path):
    with contextlib.closing(DirectoryBlobs(tmp_path)):
        with pytest.raises(InUse, match="already served"):
            DirectoryBlobs(tmp_path)
    DirectoryBlobs(tmp_path).close()


def test_a_node_serves_only_files_of_its_directory(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    held = tmp_path / "held"
    blobs = DirectoryBlobs(held)
    (held / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(held / "pipe")
    with serving(blobs) as server, client(server) as node:
        with pytest.raises(Missing):
            node.get("pipe")
        with pytest.raises(StorageError) as caught:
            node.get("link")
        assert "secret" not in str(caught.value)
        for key in ("", "/", "../secret", "a/../../secret", "a//b", "./a", "a\x00", "x" * 2000):
            with pytest.raises(Refused, match="expected a key"):
                node.get(key)
        with pytest.raises((Refused, Unanswered)):
            node.put(".incoming/x", [b""])
        node.put("a", [b""])
        with pytest.raises(Refused, match="write a/b"):
            node.put("a/b", [b""])
        with pytest.raises(Refused, match="write y"):
            node.put("y" * 300, [b""])
    assert held.stat().st_mode & 0o777 == 0o700


def test_objects_are_readable_by_their_owner_only(tmp_path):
    with serving(DirectoryBlobs(tmp_path)) as server, client(server) as node:
        node.put("a/x", [b"abc"])
    assert (tmp_path / "a" / "x").stat().st_mode & 0o077 == 0


def test_a_wildcard_or_foreign_bind_address_is_refused():
    for bind in ("0.0.0.0", "::"):
        with pytest.raises(OptionError, match="found a wildcard"):
            NodeServer(MemoryBlobs(1), bind=bind, tokens=Tokens(TOKEN))
    with pytest.raises(StorageError, match="expected to listen"):
        NodeServer(MemoryBlobs(1), bind="192.0.2.1", tokens=Tokens(TOKEN))


def test_closing_a_server_ends_requests_in_flight(blobs):
    server = NodeServer(blobs, bind="127.0.0.1", tokens=Tokens(TOKEN))
    with client(server) as node, half_sent(server.address, "x", 2 << 20):
        node.put("y", [b"abc"])
        server.close()
        with pytest.raises(Unanswered, match=server.address):
            node.get("y")
    assert blobs.keys("", after="", most=10) == ["y"]


# ---- faults


def connected(server: Any) -> socket.socket:
    """A connection to a server, or to an address."""
    address = server if isinstance(server, str) else server.address
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), _PATIENCE_SECS)


def request(first: str, *fields: str, token: str = TOKEN) -> bytes:
    shown = f"Authorization: Bearer {token}"
    return "\r\n".join([first, "Host: a-node", shown, *fields, "", ""]).encode("latin-1")


@contextlib.contextmanager
def half_sent(address: str, key: str, nbytes: int) -> Iterator[socket.socket]:
    """A put whose first half the server has received."""
    head = request(f"PUT /{key} HTTP/1.1", f"Content-Length: {nbytes}", "Expect: 100-continue")
    with connected(address) as writer:
        writer.sendall(head)
        assert b" 100 " in writer.recv(100)
        writer.sendall(bytes(nbytes // 2))
        yield writer


@pytest.mark.parametrize("how", ["closes", "resets"])
def test_a_disconnected_writer_leaves_nothing_visible_and_its_room_is_freed(blobs, how):
    taken = blobs.free_bytes if isinstance(blobs, MemoryBlobs) else None
    server = NodeServer(blobs, bind="127.0.0.1", tokens=Tokens(TOKEN))
    with contextlib.closing(server), client(server) as node:
        node.put("x", [b"before"])
        with half_sent(server.address, "x", 4 << 20) as writer:
            assert node.get("x") == b"before" and node.keys("") == ["x"]
            if how == "resets":
                writer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.close()  # Waits until requests in flight have ended.
        assert blobs.keys("", after="", most=10) == ["x"]
        if isinstance(blobs, MemoryBlobs):
            blobs.delete("x")
            assert blobs.free_bytes == taken
        else:
            assert [*(blobs.path / INCOMING).iterdir()] == []


def test_a_node_killed_during_a_put_keeps_the_old_object_and_nothing_of_the_new(tmp_path):
    incoming = tmp_path / "held" / ".incoming"
    with node_process(TOKEN, tmp_path / "held") as found, client(found) as node:
        node.put("a/x", [b"before"])
        with half_sent(found.address, "a/x", 4 << 20):
            found.process.send_signal(signal.SIGKILL)
            found.process.wait()
        with pytest.raises(Unanswered, match=found.address):
            node.get("a/x")
    assert [*incoming.iterdir()] != []
    with node_process(TOKEN, tmp_path / "held") as found, client(found) as node:
        assert node.keys("") == ["a/x"] and node.get("a/x") == b"before"
    assert [*incoming.iterdir()] == []


@contextlib.contextmanager
def faulty(server: NodeServer) -> Iterator[tuple[proxy.Proxy, Node]]:
    """A node behind a network with faults."""
    behind = servers.Server("nodes", f"http://{server.address}", {}, lambda name: None, None)
    with proxy.before(behind) as found:
        address = urllib.parse.urlsplit(found.endpoint).netloc
        with client(address, deadline_secs=2.0) as node:
            yield found, node


@pytest.mark.parametrize("kind", [*proxy.KINDS])
def test_a_faulty_network_loses_answers_but_no_bytes(server, node, kind):
    data = drawn(300_000)
    node.put("there", [data])
    with faulty(server) as (network, far):
        for what in ("get", "list", "put", "absent", "delete"):
            key = f"{what}-x"
            if what == "delete":
                node.put(key, [b"old"])
            plan = network.plan(
                {"get": "there", "list": "list"}.get(what, key), proxy.at({0: kind})
            )
            try:
                if what == "get":
                    out = np.zeros(len(data), np.uint8)
                    far.read_into("there", 0, [out.data])
                    assert out.tobytes() == data
                elif what == "list":
                    assert "there" in far.keys("")
                elif what == "delete":
                    far.delete([key])
                    assert key not in node.keys("")
                else:
                    far.put(key, [data], absent=what == "absent")
                    assert node.get(key) == data
            except Unanswered as error:
                assert "expected to" in str(error)
            except Exists:
                assert what == "absent" and node.get(key) == data
            plan.tell()
            assert plan.struck == [(0, kind)]
            assert key not in node.keys("") or node.get(key) in (data, b"old")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("where", ["head", "body"])
def test_a_truncated_answer_is_never_taken_for_a_complete_one(where, share):
    body = drawn(200_000)
    head = (
        f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(body)}\r\n"
        f"Content-Range: bytes 0-{len(body) - 1}/{len(body)}\r\n\r\n"
    ).encode()
    cut = (
        int(share * (len(head) - 1)) if where == "head" else len(head) + int(share * len(body)) - 1
    )
    with answering((head + body)[:cut]) as address, client(address) as node:
        with pytest.raises(Unanswered, match=address):
            node.read_into("x", 0, [memoryview(bytearray(len(body)))])


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 206 OK\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 206 OK\r\nContent-Length: 4\r\nContent-Range: bytes 0-3/4\r\n\r\nabcd",
        b"HTTP/1.1 206 OK\r\nContent-Length: 3\r\nContent-Range: bytes 1-3/9\r\n\r\nabc",
        b"HTTP/1.1 206 OK\r\nContent-Length: 2\r\nContent-Range: bytes 0-1/9\r\n\r\nab",
        b"HTTP/1.1 206 OK\r\nContent-Length: 2\r\nContent-Range: bytes 0-2/9\r\n\r\nab",
        b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10_000,
    ],
)
def test_an_answer_that_is_not_from_a_node_is_refused(answer):
    with answering(answer) as address, client(address) as node:
        with pytest.raises(Refused, match="not from a node server"):
            node.read_into("x", 0, [memoryview(bytearray(3))])


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that answers each request with the next of some responses, and closes.

    The last response is repeated.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in itertools.chain(answers, itertools.repeat(answers[-1])):
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client, contextlib.suppress(OSError):
                    client.recv(1 << 16)
                    client.sendall(answer)
                    client.shutdown(socket.SHUT_WR)
                    client.recv(1 << 16)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield "{}:{}".format(*listener.getsockname())
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_silent_server_is_given_up_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with client("{}:{}".format(*listener.getsockname()), deadline_secs=0.2) as node:
            for ask in (lambda: node.get("x"), lambda: node.put("x", [bytes(20 << 20)])):
                with pytest.raises(Unanswered, match="no answer within 0.2 s"):
                    ask()


def test_connections_are_reused(node):
    with mock.patch.object(socket, "create_connection", wraps=socket.create_connection) as made:
        for number in range(20):
            node.put(f"{number}", [b"x"])
            node.get(f"{number}")
    assert made.call_count == 1


def test_a_restarted_node_is_found_again(blobs):
    server = NodeServer(blobs, bind="127.0.0.1", tokens=Tokens(TOKEN))
    port = int(server.address.rpartition(":")[2])
    data = drawn(1 << 20)
    with client(server) as node:
        node.put("x", [data])
        # The client keeps many connections.
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            barrier = threading.Barrier(8)
            assert {*pool.map(lambda _: (barrier.wait(), node.get("x"))[1], range(8))} == {data}
        server.close()
        with serving(blobs, port=port):
            for _ in range(3):
                assert node.get("x") == data
            node.put("y", [data], absent=True)
            assert node.keys("") == ["x", "y"]


def test_a_listing_follows_the_guide(server, node):
    node.put("a/ü", [b""])
    node.put("b", [b""])
    for query, wanted in (("list", b"/a/%C3%BC\n/b\n"), ("list&after=a/%C3%BC", b"/b\n")):
        with connected(server) as asked:
            asked.sendall(request(f"GET /?{query} HTTP/1.1", "Connection: close"))
            assert read_all(asked).partition(b"\r\n\r\n")[2] == wanted


# ---- stores


def test_a_lost_node_is_named_and_the_others_keep_serving():
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(serving(MemoryBlobs(1 << 24))) for _ in range(2)]
        lost = NodeServer(MemoryBlobs(1 << 24), bind="127.0.0.1", tokens=Tokens(TOKEN))
        addresses = [each.address for each in (*kept, lost)]
        store = NodesStore(addresses, "run", TOKEN)
        keys = [f"{number}" for number in range(30)]
        for key in keys:
            store.put(key, key.encode())
        store.put("striped", drawn(3 << 20))
        lost.close()
        on_lost = {key for key in keys if ranked(f"run/{key}", addresses)[0] == lost.address}
        assert 0 < len(on_lost) < 30
        for key in {*keys} - on_lost:
            assert store.get(key) == key.encode()
        for key in on_lost:
            with pytest.raises(Unanswered, match=lost.address):
                store.get(key)
        for ask in (
            lambda: store.keys(""),
            lambda: store.get("striped"),
            lambda: store.put("other", drawn(3 << 20)),
        ):
            with pytest.raises(Unanswered, match=lost.address):
                ask()


def test_nodes_in_any_order_are_the_same_store():
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(serving(MemoryBlobs(1 << 20))).address for _ in range(3)]
        with mock.patch.dict(os.environ, {"DELTACKPT_NODES_TOKEN": TOKEN}):
            first = buckets.locate(f"nodes://{found[0]},{found[1]},{found[2]}/run/1").open()
            other = buckets.locate(f"nodes:/{found[2]},{found[0]},{found[1]}/run/1/").open()
        assert first.store.url == other.store.url
        for number in range(10):
            first.store.put(f"{number}", b"%d" % number)
        for number in range(10):
            assert other.store.get(f"{number}") == b"%d" % number


@pytest.mark.parametrize(
    "names", ["", "/x", "a/x", "a:0/x", "a:1,a:1/x", "a:1,/x", "u:p@a:1/x", "a:99999"]
)
def test_a_url_that_names_no_nodes_is_refused(names):
    with pytest.raises(OptionError, match="expected") as caught:
        buckets.locate(f"nodes://{names}")
    assert "u:p" not in str(caught.value)


def test_a_store_of_nodes_requires_its_token(monkeypatch):
    monkeypatch.delenv("DELTACKPT_NODES_TOKEN", raising=False)
    with pytest.raises(Refused, match="DELTACKPT_NODES_TOKEN"):
        buckets.locate("nodes://127.0.0.1:1/x").open()
    with pytest.raises(OptionError, match="endpoint"):
        buckets.locate("nodes://127.0.0.1:1/x", endpoint="http://127.0.0.1:2")


def test_tensorstore_reads_a_node():
    with serving(MemoryBlobs(1 << 22)) as server:
        store = NodesStore([server.address], "run", TOKEN)
        memory = ts.KvStore.open({"driver": "memory"}).result()
        values = np.random.default_rng(0).normal(size=(100, 10))
        spec = {
            "driver": "zarr3",
            "kvstore": memory.spec().to_json(),
            "metadata": {
                "shape": [100, 10],
                "data_type": "float64",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [10, 10]}},
            },
        }
        array = ts.open(spec, create=True).result()
        array.write(values).result()
        for key in array.kvstore.list().result():
            store.put(f"x/{key.decode()}", array.kvstore.read(key).result().value)
        there = {
            "driver": "http",
            "base_url": f"http://{server.address}/run/x/",
            "headers": [f"Authorization: Bearer {TOKEN}"],
        }
        found = ts.open({"driver": "zarr3", "kvstore": there}).result()
        assert np.array_equal(found.read().result(), values)
        kvstore = ts.KvStore.open(there).result()
        whole = kvstore.read("c/3/0").result().value
        assert kvstore.read("c/3/0", byte_range=slice(5, 9)).result().value == whole[5:9]
        assert kvstore.read("none").result().state == "missing"


# ---- a root


def test_a_run_stored_on_nodes_resumes_on_an_empty_node(tmp_path, monkeypatch):
    monkeypatch.setenv("DELTACKPT_NODES_TOKEN", TOKEN)
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(node_process(TOKEN, tmp_path / f"held{number}"))
            for number in range(3)
        ]
        url = f"nodes://{','.join(each.address for each in found)}/some/run"
        expected = resume_on_empty_nodes(*(TrainingNode(url, None, tmp_path / x) for x in "abc"))
        assert all([*(tmp_path / f"held{number}").glob("some/run/**/*")] for number in range(3))
        shown = command.run("ls", url)
        assert shown.returncode == 0 and "base" in shown.stdout and "delta" in shown.stdout
        copied = command.run("copy", url, tmp_path / "copy")
        assert copied.returncode == 0, copied.stderr
        assert command.run("verify", tmp_path / "copy").returncode == 0
        assert np.array_equal(inspect.open(tmp_path / "copy").at(4)["bias"], expected[4]["bias"])
        interchange.export_orbax(url, 4, tmp_path / "exported")
        with ocp.CheckpointManager(tmp_path / "exported") as exported:
            found = exported.restore(4, args=ocp.args.StandardRestore())
        assert np.array_equal(found["bias"], expected[4]["bias"])


def test_sigterm_works_whichever_thread_it_interrupts():
    """The signal interrupts another thread, so the main thread's call is not interrupted."""
    with node_process(TOKEN, "--memory", "16MiB") as found:
        threads = {int(each.name) for each in Path(f"/proc/{found.process.pid}/task").iterdir()}
        others = threads - {found.process.pid}
        # The kernel prefers the thread whose id is given.
        os.kill(max(others), signal.SIGTERM)
        assert found.process.wait(60) == 0


def test_node_store_requires_a_token_that_others_cannot_read(tmp_path, monkeypatch):
    monkeypatch.delenv("DELTACKPT_NODES_TOKEN", raising=False)
    held, file = tmp_path / "held", tmp_path / "token"
    with_token = ("--token-file", file)

    def refused(wanted: str, *given: Any) -> None:
        done = command.run("node-store", held, *given)
        assert done.returncode == 1 and wanted in done.stderr and TOKEN not in done.stderr

    refused("--token-file", "--bind", "127.0.0.1")
    file.write_text(TOKEN)
    for mode, wanted in ((0o644, "0644"), (0o640, "0640")):
        file.chmod(mode)
        refused(wanted, *with_token)
    file.chmod(0o600)
    file.write_text("short")
    refused("16 to 1,024", *with_token)
    file.write_text(TOKEN)
    refused("found a wildcard", *with_token, "--bind", "0.0.0.0")
    for given in ([], [held, "--memory", "1G"]):
        assert command.run("node-store", *given, *with_token).returncode == 2
    with node_process("u" * 20, "--memory", "16MiB", *with_token) as found, client(found) as node:
        node.put("x", [b"abc"])
        assert node.get("x") == b"abc"
