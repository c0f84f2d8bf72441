# SPDX-License-Identifier: Apache-2.0
"""A client without a token or a valid request gets nothing and blocks no other client."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from machine import required
from memory_pack import MemoryPack
from test_nodes import TOKEN, answering, client, connected, read_all, request, serving

from deltackpt.errors import OptionError, StorageError
from deltackpt.nodes import server as servers
from deltackpt.nodes.blobs import MemoryBlobs
from deltackpt.nodes.directory_blobs import DirectoryBlobs
from deltackpt.nodes.server import NodeServer, Tokens
from deltackpt.storage import node_client, wire
from deltackpt.storage.node_client import Node
from deltackpt.storage.store import Exists, Missing, Refused, Unanswered
from deltackpt.testing import node_process
from deltackpt.tiers.erasure import Fragment
from deltackpt.tiers.peers import PeerTier
from deltackpt.tiers.staging import PeerGroup, PeerNode

_NBYTES = 8 << 20


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs(_NBYTES)


@pytest.fixture
def tokens() -> Tokens:
    return Tokens(TOKEN)


@pytest.fixture
def server(blobs, tokens) -> Iterator[NodeServer]:
    with serving(blobs, tokens=tokens) as found:
        yield found


@pytest.fixture
def node(server) -> Iterator[Node]:
    with client(server) as found:
        found.put("secret", [b"what nobody else may read"])
        yield found
        # After any attack.
        assert found.get("secret") == b"what nobody else may read"
        assert found.keys("") == ["secret"]


def response(server: NodeServer, *sent: bytes) -> bytes:
    """Sends some bytes; returns the server's response."""
    with connected(server) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for some in sent:
                connection.sendall(some)
        return read_all(connection)


# ---- tokens


BEARER = b"Authorization: Bearer "


@pytest.mark.parametrize(
    "shown",
    [
        b"",
        BEARER + b"\r\n",
        BEARER + b"x" * 32 + b"\r\n",
        b"Authorization: bearer " + TOKEN.encode() + b"\r\n",
        b"Authorization: Basic " + TOKEN.encode() + b"\r\n",
        BEARER + TOKEN[:-1].encode() + b"\r\n",
        BEARER + TOKEN.encode() + b"x\r\n",
        BEARER + TOKEN.encode() + b", Bearer x\r\n",
        b"X-" + BEARER + TOKEN.encode() + b"\r\n",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "LIST"])
def test_without_the_token_nothing_is_answered(server, node, shown, method):
    target = "/?list" if method == "LIST" else "/secret"
    method = "GET" if method == "LIST" else method
    first = f"{method} {target} HTTP/1.1\r\nHost: a-node\r\n".encode()
    body = b"Content-Length: 4\r\n" if method == "PUT" else b""
    found = response(server, first + shown + body + b"\r\n" + (b"evil" if body else b""))
    assert found.startswith(b"HTTP/1.1 401 ") and found.endswith(b"\r\n\r\n")
    assert b"nobody" not in found and TOKEN.encode() not in found


def test_a_rotated_token_is_refused_at_once_and_on_open_connections(server, node, tokens):
    fresh = secrets.token_urlsafe(32)
    with client(server) as kept:
        assert kept.length("secret")
        tokens.rotate(fresh)
        for _ in range(2):
            with pytest.raises(Refused, match="token") as caught:
                kept.get("secret")
            assert TOKEN not in str(caught.value)
    with client(server, fresh) as entitled:
        assert entitled.get("secret")
    tokens.admit(TOKEN)


def test_a_put_whose_token_is_rotated_before_its_body_changes_nothing(server, node, tokens):
    with connected(server) as connection:
        connection.sendall(
            request("PUT /secret HTTP/1.1", "Content-Length: 8", "Expect: 100-continue")
        )
        assert b" 100 " in connection.recv(100)
        tokens.rotate(secrets.token_urlsafe(32))
        connection.sendall(b"replaced")
        assert read_all(connection).startswith(b"HTTP/1.1 401 ")
    tokens.rotate(TOKEN)


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 15, "with space and more", "ü" * 20, "x" * 2000]
)
def test_tokens_that_could_be_guessed_or_cannot_be_sent_are_refused(token):
    for make in (Tokens, Tokens().admit, Tokens().rotate):
        with pytest.raises(OptionError, match="16 to 1,024") as caught:
            make(token)
        assert not token or token not in str(caught.value)
    assert not Tokens().is_valid(token)


def test_a_token_is_compared_in_constant_time(tokens):
    with mock.patch("hmac.compare_digest", return_value=False) as compared:
        assert not tokens.is_valid(TOKEN)
    assert compared.call_count == 1
    assert TOKEN not in repr(vars(tokens)) and TOKEN.encode() not in pickle.dumps(tokens._digests)


# ---- invalid requests


def get(*fields: str) -> bytes:
    return request("GET /secret HTTP/1.1", *fields)


def put(*fields: str, key: str = "x") -> bytes:
    return request(f"PUT /{key} HTTP/1.1", *fields)


def put_one(*fields: str, key: str = "x") -> bytes:
    """A put of one byte."""
    return put("Content-Length: 1", *fields, key=key) + b"a"


_CHUNKED = "Transfer-Encoding: chunked"
_INVALID_KEYS = (
    *("/..", "/../secret", "/a/../secret", "/./secret", "//secret", "/secret/"),
    *("/%2e%2e/secret", "/%2E%2e/%2e./secret", "/..%2fsecret", "/a%2fb", "/secret%00"),
    *("/%0d%0aSet-Cookie:x", "/%c0%ae%c0%ae/secret", "/%ff", "/a%2f..%2f..%2fetc"),
    "/" + "x" * 2000,
)
_NO_REQUESTS = {
    "another protocol": b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n",
    "a TLS handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300) + b"\r\n\r\n",
    "HTTP/1.0": request("GET /secret HTTP/1.0"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.10": request("GET /secret HTTP/1.10"),
    "another method": request("POST /secret HTTP/1.1", "Content-Length: 0"),
    "a tunnel": request("CONNECT 127.0.0.1:22 HTTP/1.1"),
    "a trace": request("TRACE / HTTP/1.1"),
    "a whole URL": request("GET http://127.0.0.1/secret HTTP/1.1"),
    "two spaces": request("GET  /secret HTTP/1.1"),
    "no target": request("GET HTTP/1.1"),
    "no host": get().replace(b"Host", b"Other"),
    "two hosts": get("Host: another"),
    "bare line feeds": get().replace(b"\r\n", b"\n") + b"\r\n\r\n",
    "a bare carriage return": get("X: a\rY: b"),
    "a folded field": get("X: a", " b"),
    "a space before the colon": get("X : a"),
    "a field without a name": get(": a"),
    "a NUL": get("X: a\0b"),
    "a byte that is not ASCII": get("X: \xff"),
    "two tokens": get(f"Authorization: Bearer {TOKEN}"),
    "the same length twice": put_one("Content-Length: 1"),
    "two lengths": put("Content-Length: 1", "Content-Length: 2") + b"ab",
    "lengths in one field": put("Content-Length: 1, 1") + b"a",
    "a negative length": put("Content-Length: -1"),
    "a length with a sign": put("Content-Length: +1") + b"a",
    "a hexadecimal length": put("Content-Length: 0x1") + b"a",
    "an endless length": put("Content-Length: " + "9" * 19),
    "no length": put(),
    "chunks": put(_CHUNKED) + b"1\r\na\r\n0\r\n\r\n",
    "chunks beside a length": put("Content-Length: 4", _CHUNKED)
    + b"0\r\n\r\nDELETE /secret HTTP/1.1\r\n\r\n",
    "chunks under another name": put_one("Transfer-Encoding: xchunked"),
    "a body of a GET": get("Content-Length: 5") + b"abcde",
    "a part of an object": put_one("Content-Range: bytes 0-0/4", key="secret"),
    "a condition that is not kept": put_one('If-Match: "x"', key="secret"),
    "another condition": put_one('If-None-Match: "x"'),
    "another protocol afterwards": get("Connection: Upgrade", "Upgrade: h2c"),
    "several ranges": get("Range: bytes=0-1,2-3"),
    "a range of lines": get("Range: lines=0-1"),
    "a range backwards": get("Range: bytes=3-1"),
    "an endless range": get(f"Range: bytes=0-{'9' * 40}"),
    "the node as an object": put_one(key=""),
    "an unknown query": request("GET /?evil=1 HTTP/1.1"),
    "a listing as an object": put_one(key="?list"),
    "more than the given length": put_one() + b"DELETE /secret HTTP/1.1\r\n\r\n",
    **{f"the key {key}": request(f"GET {key} HTTP/1.1") for key in _INVALID_KEYS},
}


@pytest.mark.parametrize("sent", _NO_REQUESTS.values(), ids=_NO_REQUESTS)
def test_an_invalid_request_is_refused_and_closed(server, node, blobs, sent):
    free = blobs.free_bytes
    found = response(server, sent)
    assert found.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 405 ", b"HTTP/1.1 411 ")), found
    assert found.count(b"HTTP/1.1") == 1 and b"nobody" not in found
    assert TOKEN.encode() not in found and blobs.free_bytes == free


@pytest.mark.parametrize("cut", [0.0, 0.2, 0.5, 0.8, 0.99])
def test_a_truncated_header_is_not_a_request(server, node, cut):
    whole = request("DELETE /secret HTTP/1.1")
    with connected(server) as connection:
        connection.sendall(whole[: int(cut * len(whole))])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


def test_an_oversized_header_is_cut_off(server, node):
    for sent in (
        b"GET /secret HTTP/1.1\r\nX: " + b"x" * (1 << 20),
        b"x" * (1 << 20),
        get("X: " + "x" * wire.MOST_HEAD_BYTES),
    ):
        assert response(server, sent)[:13] in (b"HTTP/1.1 431 ", b"")
    found = response(server, get(*[f"X{i}: a" for i in range(40)]))
    assert found.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("nbytes", [_NBYTES + 1, 1 << 40, 10**18 - 1])
def test_a_length_above_the_free_space_is_refused_before_any_allocation(
    server, node, blobs, nbytes
):
    free = blobs.free_bytes
    with mock.patch("deltackpt.nodes.blobs._memory") as memory:
        found = response(server, put(f"Content-Length: {nbytes}"), bytes(1000))
    assert found.startswith(b"HTTP/1.1 507 ") and not memory.called and blobs.free_bytes == free


def test_random_bytes_never_stop_a_server(server, node):
    drawn = np.random.default_rng(0)
    valid = put("Content-Length: 3", "If-None-Match: *") + b"abc"
    for _ in range(200):
        sent = bytearray(valid)
        for at in drawn.integers(0, len(sent), drawn.integers(1, 6)):
            sent[at] = drawn.integers(0, 256)
        with connected(server) as connection:
            connection.sendall(bytes(sent))
            connection.shutdown(socket.SHUT_WR)
            assert b"nobody" not in read_all(connection)
        node.delete([key for key in node.keys("") if key != "secret"])


# ---- many or slow connections


def test_a_thousand_silent_connections_block_no_client(server, node):
    with contextlib.ExitStack() as crowd:
        for number in range(1000):
            crowd.enter_context(connected(server))
            if number % 100 == 0:
                # On its own connection, among them.
                with client(server) as fresh:
                    assert fresh.get("secret")
        # And on the one that was open before.
        assert node.length("secret")
        assert len(server._open) <= servers._MOST_CONNECTIONS


def test_headers_sent_byte_by_byte_block_no_client(server, node):
    whole = request("GET /secret HTTP/1.1", token="x" * 32)
    with contextlib.ExitStack() as crowd:
        slow = [crowd.enter_context(connected(server)) for _ in range(100)]
        for letter in whole[:40]:
            for connection in slow:
                # On a slow machine, the server drops some of them.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(bytes([letter]))
        with client(server) as fresh:
            assert fresh.get("secret")


def test_a_header_that_takes_too_long_is_cut_off_although_bytes_arrive(server):
    with (
        mock.patch.object(servers, "_HEAD_SECS", 0.3),
        connected(server) as connection,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        connection.settimeout(0.05)
        for letter in itertools.cycle(b"x"):
            connection.sendall(bytes([letter]))
            with contextlib.suppress(TimeoutError):
                if connection.recv(100) == b"":
                    break


def test_connections_with_the_token_are_kept_before_those_without(blobs):
    with (
        serving(blobs, most_connections=4) as server,
        contextlib.ExitStack() as stack,
        connected(server) as kept,
    ):
        for others in (20, 0):
            kept.sendall(request("GET /x HTTP/1.1"))
            assert kept.recv(1000).startswith(b"HTTP/1.1 404 ")
            for _ in range(others):
                stack.enter_context(connected(server))


def test_a_body_that_stalls_is_dropped_and_its_space_is_freed(server, blobs):
    free = blobs.free_bytes
    with mock.patch.object(servers, "_PIECE_SECS", 1.0), connected(server) as connection:
        connection.sendall(put(f"Content-Length: {1 << 20}") + bytes(1000))
        assert read_all(connection) == b""
        assert blobs.free_bytes == free and blobs.keys("", after="", most=9) == []


_LONG = 24 << 20


def test_a_client_that_reads_nothing_is_dropped():
    with (
        serving(MemoryBlobs(2 * _LONG)) as server,
        client(server) as node,
        socket.socket() as connection,
    ):
        # More than the buffers of any connection hold.
        node.put("x", [bytes(_LONG)])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = server.address.rpartition(":")
        connection.connect((host, int(port)))
        with mock.patch.object(servers, "_PIECE_SECS", 1.0):
            connection.sendall(request("GET /x HTTP/1.1"))
            while not (served := _served(server, connection)):
                node.length("x")
            while served in server._open:
                node.length("x")
        assert len(read_all(connection)) < _LONG


def _served(server: NodeServer, client: socket.socket) -> servers._Client | None:
    """The server's side of a connection whose request it is serving."""
    for one in [*server._open]:
        with contextlib.suppress(OSError):  # If it is closed.
            if one.is_busy and one.socket.getpeername() == client.getsockname():
                return one
    return None


def test_connection_close_is_honored_after_a_refusal_too(server, node):
    for first, *fields in (
        ("GET /secret HTTP/1.1",),
        ("GET /none HTTP/1.1",),
        ("HEAD /none HTTP/1.1",),
        ("GET /secret HTTP/1.1", "Range: bytes=1000-1001"),
        ("DELETE /none HTTP/1.1",),
    ):
        for value in ("close", "Close", "keep-alive, close"):
            # The client does not close its side, so the server must close the connection.
            found = response(server, request(first, *fields, f"Connection: {value}"))
            assert found.startswith(b"HTTP/1.1 "), found


# ---- files in a directory that are not objects


@pytest.fixture
def outside(tmp_path) -> Path:
    """Another user's folder, the target of links in a node's directory."""
    found = tmp_path / "outside"
    (found / "folder").mkdir(parents=True)
    (found / "secret").write_bytes(b"what nobody else may read")
    (found / "folder" / "deep").write_bytes(b"nor this")
    return found


@pytest.fixture
def linked(tmp_path, outside) -> Iterator[Node]:
    held = tmp_path / "held"
    with serving(DirectoryBlobs(held)) as server, client(server) as found:
        found.put("a/x", [b"an object"])
        (held / "link").symlink_to(outside)
        (held / "a" / "link").symlink_to(outside, target_is_directory=True)
        (held / "file").symlink_to(outside / "secret")
        (held / "nowhere").symlink_to(tmp_path / "none")
        (held / "round").symlink_to(held)
        before = tree(outside)
        yield found
        assert tree(outside) == before and found.get("a/x") == b"an object"


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


LINKED = ["link", "a/link", "file", "nowhere", "round", "link/secret", "link/folder/deep"]
LINKED += ["a/link/secret", "round/a/x", "nowhere/x", "file/x", ".incoming/x"]


@pytest.mark.parametrize("key", LINKED)
def test_no_request_follows_a_link(linked, tmp_path, key):
    for read in (linked.get, linked.length):
        with pytest.raises(Missing):
            read(key)
    assert linked.keys(key) == [] and linked.keys("") == ["a/x"]
    for absent in (False, True):
        with contextlib.suppress(Refused, Exists):
            linked.put(key, [b"evil"], absent=absent)
    if "/" in key.removeprefix("a/"):
        with pytest.raises(Refused, match="409"):
            linked.put(key, [b"evil"])
    else:  # A link itself is replaced, like any name.
        linked.put(key, [b"evil"])
        assert linked.get(key) == b"evil" and not (tmp_path / "held" / key).is_symlink()
    linked.delete([key])


def test_removing_a_link_keeps_its_target(linked, tmp_path):
    linked.delete(["link", "file", "nowhere", "a/link", "round"])
    assert [path.name for path in (tmp_path / "held").iterdir() if path.is_symlink()] == []


def test_incomplete_uploads_are_not_listed(linked, tmp_path):
    (tmp_path / "held" / ".incoming" / "half").write_bytes(b"half")
    for folder in ("", ".incoming", ".incoming/x"):
        assert [key for key in linked.keys(folder) if "incoming" in key] == []


def test_a_server_never_empties_the_target_of_a_link(tmp_path, outside):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / ".incoming").symlink_to(outside)
    before = tree(outside)
    with pytest.raises(StorageError, match="held"):
        DirectoryBlobs(tmp_path / "held")
    assert tree(outside) == before


# ---- misbehaving peers


def answer(status: str, body: bytes = b"", nbytes: int | None = None) -> bytes:
    length = len(body) if nbytes is None else nbytes
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + body


LISTINGS = {
    "letters that are none": b"/a\xff\n",
    "letters of another alphabet": "/ключ\n".encode(),
    "no slash": b"a\n",
    "no end": b"/a",
    "the node itself": b"/\n",
    "a way out": b"/a/../../etc\n",
    "a NUL": b"/a%00\n",
    "not in order": b"/b\n/a\n",
    "twice": b"/a\n/a\n",
    "before what was asked for": b"/0\n",
    "more than a page": b"".join(b"/k%05d\n" % i for i in range(1001)),
}


@pytest.mark.parametrize("body", LISTINGS.values(), ids=LISTINGS)
def test_an_invalid_listing_is_a_typed_error(body):
    with answering(answer("200 OK", body)) as address, client(address) as node:
        with pytest.raises(Refused, match=f"{address}: expected to list.*not from a node server"):
            node.keys("", after="5")


def test_a_listing_of_other_keys_is_a_typed_error():
    with answering(answer("200 OK", b"/b/x\n")) as address, client(address) as node:
        with pytest.raises(Refused, match="other keys than requested"):
            node.keys("a")


def test_an_endless_listing_is_refused(monkeypatch):
    monkeypatch.setattr(node_client, "_MOST_KEYS", 3000)
    pages = [
        answer("200 OK", b"".join(b"/k%09d\n" % (1000 * page + i) for i in range(1000)))
        for page in range(5)
    ]
    with answering(*pages) as address, client(address) as node:
        with pytest.raises(Refused, match="more than 3,000 keys"):
            node.keys("")


@pytest.mark.parametrize("nbytes", [1 << 32, 1 << 40, 10**18 - 1])
@pytest.mark.parametrize(
    ("status", "ask", "kind"),
    [
        ("404 Not Found", lambda node: node.get("x"), Missing),
        ("404 Not Found", lambda node: node.keys(""), Missing),
        ("500 Internal Server Error", lambda node: node.get("x"), Unanswered),
        ("401 Unauthorized", lambda node: node.keys(""), Refused),
        ("412 Precondition Failed", lambda node: node.put("x", [b"a"], absent=True), Exists),
        ("200 OK", lambda node: node.keys(""), Refused),
        ("200 OK", lambda node: node.get("x"), Unanswered),
        ("201 Created", lambda node: node.put("x", [b"a"]), None),
        ("200 OK", lambda node: node.delete(["x"]), None),
        (
            "206 Partial Content",
            lambda node: node.read_into("x", 0, [memoryview(bytearray(9))]),
            Refused,
        ),
    ],
)
def test_the_length_that_a_response_claims_takes_no_memory(status, ask, kind, nbytes):
    with answering(answer(status, b"some bytes", nbytes)) as address, client(address) as node:
        tracemalloc.start()
        try:
            with contextlib.nullcontext() if kind is None else pytest.raises(kind):
                ask(node)
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "odd", [answer("200 OK", b"/\xff\n"), answer("200 OK", b"", 10**17), b"SSH-2.0-x\r\n\r\n", b""]
)
def test_one_bad_peer_does_not_hide_what_the_others_hold(server, odd):
    pack = MemoryPack("save", 1000)
    with answering(odd) as address, client(server) as node:
        places = {"own": server.address, "good": server.address, "odd": address}
        nodes = tuple(PeerNode(node=name, address=place) for name, place in places.items())
        found = PeerGroup(root="root", own="own", token=TOKEN, nodes=nodes, k=1, m=0)
        with contextlib.closing(PeerTier(found)) as held:
            name = Fragment(pack.ref, 1, 0, 0, 0, pack.ref.crc32c).key("root")
            node.put(name, [pack.data + bytes(-len(pack.data) % 64)])
            assert held.refs() == [pack.ref]
            assert held.silent().startswith("odd (")


# ---- other users of the machine


def test_other_users_cannot_read_the_memory_of_a_node():
    nobody = 65534
    required(os.geteuid() == 0, "root is needed to become another user")
    program = f"""
import glob, os, sys
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
for name in ('mem', 'environ', 'maps', 'fd', 'map_files'):
    path = f'/proc/{{sys.argv[1]}}/{{name}}'
    try:
        os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(1)
    except OSError:
        continue
    raise SystemExit(f'{{path}} can be read')
for path in glob.glob('/dev/shm/*'):
    assert 'deltackpt-node' not in path, path
"""
    with node_process(TOKEN, "--memory", "16MiB") as found:
        with client(found) as node:
            node.put("x", [bytes(1 << 20)])
        command = [sys.executable, "-S", "-c", program, str(found.process.pid)]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stderr
        # The token is not where every user can read it either.
        assert TOKEN.encode() not in Path(f"/proc/{found.process.pid}/cmdline").read_bytes()
