# SPDX-License-Identifier: Apache-2.0
"""HTTP server for a node's objects, which authenticates clients by token.

Each connection has a thread; their number is limited. If there are too many, the oldest connection
that has shown no token is closed, else the one longest without a request. A request without a valid
token is answered from its head alone. Others wait for one of a few slots.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import http
import ipaddress
import logging
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import NamedTuple

import h11

from deltackpt.errors import OptionError, OutOfSpace, StorageError
from deltackpt.nodes.blobs import BlobStore, OpenObject
from deltackpt.resources.runtime import Pace
from deltackpt.storage import wire
from deltackpt.storage.store import Exists, Missing

#: 16 characters from an alphabet of 64 cannot be guessed.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,1024}")


class Tokens:
    """The valid tokens; thread-safe. Only their digests are stored."""

    def __init__(self, *tokens: str):
        """Accepts the given tokens; without any, no client."""
        self._lock = threading.Lock()
        self._digests: tuple[bytes, ...] = tuple(map(_digest, tokens))

    def admit(self, token: str) -> None:
        """Accepts an additional token; OptionError if it is too short or has invalid characters."""
        digest = _digest(token)
        with self._lock:
            if digest not in self._digests:
                self._digests += (digest,)

    def rotate(self, token: str) -> None:
        """Accepts only this token, and revokes all others."""
        digest = _digest(token)
        with self._lock:
            self._digests = (digest,)

    def is_valid(self, token: str) -> bool:
        """Returns whether a token is valid, in constant time."""
        shown = hashlib.sha256(token.encode(errors="backslashreplace")).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(shown, digest)
        return found


def _digest(token: str) -> bytes:
    if not _TOKEN.fullmatch(token):
        raise OptionError(
            f"token: expected 16 to 1,024 letters, digits and ._~+/=-, found {len(token)} other "
            "characters; generate one: python -c 'import secrets; "
            "print(secrets.token_urlsafe(32))'"
        )
    return hashlib.sha256(token.encode()).digest()


_logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 256
#: Requests that are served at a time.
_SLOTS = 32
#: Timeout for a head, and for the unread rest of a rejected request.
_HEAD_SECS = 5.0
#: How long a connection that has shown a token is kept without a request.
_IDLE_SECS = 120.0
#: How long a piece may take to come or go: 50 KB/s at least.
_PIECE_SECS = 20.0
#: Bytes of a rejected request's body to read, so that the rejection arrives.
_MOST_IGNORED_BYTES = 1 << 18
#: After a failure to accept a connection.
_PAUSE_SECS = 0.1
_BEARER = "Bearer "
#: Fields that would change the meaning of the request.
_NOT_TAKEN = frozenset(
    {"if-match", "if-unmodified-since", "content-range", "content-encoding", "upgrade", "trailer"}
)
#: File systems have no larger files.
_MOST_BYTES = (1 << 63) - 1
#: Statuses of requests after which the client is not understood, or not entitled.
_CLOSING = frozenset({400, 401, 405, 411, 431})
_STATUSES = {Missing: 404, Exists: 412, OutOfSpace: 507}
#: File system errors for invalid names.
_LASTING = frozenset(
    {
        *(errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
        *(errno.ENAMETOOLONG, errno.EACCES, errno.EROFS),
    }
)


class _Refusal(Exception):
    """A request that is rejected with a status and header fields."""

    def __init__(self, status: int, *fields: tuple[str, str]):
        self.status, self.fields = status, fields
        super().__init__(status)


class _Request(NamedTuple):
    method: str
    key: str
    query: dict[str, str]
    fields: dict[str, str]
    nbytes: int
    token: str


class _Client(wire.Connection):
    """A connection to a client; ``unread`` bytes of the request's body were not received yet."""

    def __init__(self, connection: socket.socket, serve: Callable[[_Client], None]):
        super().__init__(connection, h11.SERVER)
        self.thread = threading.Thread(
            target=serve, args=(self,), name="deltackpt-node-client", daemon=True
        )
        self.is_known = self.is_busy = self.closes = False
        self.unread = 0

    def answer(
        self,
        status: int,
        *fields: tuple[str, str],
        nbytes: int = 0,
        body: bytes = b"",
        more: bool = False,
    ) -> None:
        """Sends the head of an answer and ``body``; with ``more``, the caller sends ``nbytes``."""
        sent = [("Content-Length", nbytes or len(body)), *fields] if status >= 200 else []
        kind = h11.Response if status >= 200 else h11.InformationalResponse
        reason = http.HTTPStatus(status).phrase
        head = wire.head(self.http, kind, sent, status_code=status, reason=reason)
        self.within(_PIECE_SECS)
        self.send([head, body], socket.MSG_MORE if more and nbytes else 0)


class NodeServer:
    """Serves a blob store over HTTP/1.1 in its own threads, until it is closed."""

    def __init__(
        self,
        blobs: BlobStore,
        *,
        bind: str,
        port: int = 0,
        tokens: Tokens,
        most_connections: int = _MOST_CONNECTIONS,
        bytes_per_sec: float | None = None,
    ):
        """Starts listening on a specific address of this node; OptionError if it is a wildcard.

        The caller still owns ``blobs`` and closes them afterwards. ``bytes_per_sec`` limits each
        direction.
        """
        self._blobs, self._tokens = blobs, tokens
        self._pace = Pace(bytes_per_sec)
        self._most = most_connections
        self._listener = _listener(bind, port)
        host, bound = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        self._stopped = threading.Event()
        self._slots = threading.BoundedSemaphore(_SLOTS)
        #: Open connections; the one longest without a request first.
        self._open: dict[_Client, None] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, name="deltackpt-node", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes all connections; partially received objects are dropped."""
        self._stopped.set()
        with contextlib.suppress(OSError):  # It is closed.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            left = [*self._open]
            for client in left:
                client.shutdown(socket.SHUT_RDWR)
        for client in left:
            client.thread.join()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # The server is closed, or this process has too many open files.
                if not self._stopped.is_set() and not self._evict():
                    self._stopped.wait(_PAUSE_SECS)
                continue
            if len(self._open) >= self._most and not self._evict():
                connection.close()
                continue
            client = _Client(connection, self._serve)
            with self._lock:
                self._open[client] = None
            try:
                client.thread.start()
            except RuntimeError:  # There are too many threads.
                self._drop(client)

    def _evict(self) -> bool:
        """Closes a connection that waits for a request, if there is one."""
        with self._lock:
            idle = [each for each in self._open if not each.is_busy]
            if not idle:
                return False
            evicted = min(idle, key=lambda each: each.is_known)
            del self._open[evicted]
            evicted.shutdown(socket.SHUT_RDWR)
        evicted.thread.join()
        return True

    def _serve(self, client: _Client) -> None:
        """Serves the requests of a client; in its thread."""
        try:
            while self._answered(client):
                pass
        except OSError:  # The client is gone, too slow, or evicted.
            pass
        except Exception:
            _logger.exception("%s: expected to serve a request", self.address)
        finally:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        with self._lock:  # Nothing wakes a thread through a socket that was closed.
            self._open.pop(client, None)
        client.close()

    def _answered(self, client: _Client) -> bool:
        try:
            request = self._request(client)
            with self._busy(client):
                self._serve_request(client, request)
        except (_Refusal, StorageError) as error:
            refusal = error if isinstance(error, _Refusal) else _Refusal(_status_of(error))
            # What is not read of a body would be taken for a request.
            invalid = refusal.status in _CLOSING or client.unread > 0
            client.closes |= invalid
            closing = [("Connection", "close")] if client.closes else []
            client.answer(refusal.status, *refusal.fields, *closing)
            if invalid:
                _ignore(client)
        return not client.closes

    @contextlib.contextmanager
    def _busy(self, client: _Client) -> Iterator[None]:
        """Protects a client from eviction while its request is served."""
        with self._lock:
            if client not in self._open:
                raise ConnectionError("evicted")
            client.is_busy = True
        try:
            with self._slots:
                yield
        finally:
            with self._lock:
                client.is_busy = False
                self._open[client] = self._open.pop(client)  # At the end.

    def _request(self, client: _Client) -> _Request:
        """Receives a request of somebody who may make it, without its body."""
        client.renew()
        if not client.begun:
            client.within(_IDLE_SECS if client.is_known else _HEAD_SECS)
            client.receive()
        client.within(_HEAD_SECS)
        try:
            head = client.head()
        except wire.TooLong as error:
            raise _Refusal(431) from error
        except wire.Malformed as error:
            raise _Refusal(400) from error
        method, fields, nbytes = head.method, head.fields, head.nbytes
        shown = fields.get("authorization", "")
        token = shown.removeprefix(_BEARER)
        if not shown.startswith(_BEARER) or not self._tokens.is_valid(token):
            raise _Refusal(401, ("WWW-Authenticate", "Bearer"))
        client.is_known = True
        path, _, asked = head.target.partition("?")
        try:
            key = wire.key_of(path)
            query = dict(urllib.parse.parse_qsl(asked, True, errors="strict"))
        except ValueError as error:
            raise _Refusal(400) from error
        if method not in ("GET", "HEAD", "PUT", "DELETE"):
            raise _Refusal(405)
        if _NOT_TAKEN & fields.keys() or query.keys() - {"list", "after"}:
            raise _Refusal(400)
        if (nbytes and method != "PUT") or (method == "PUT" and query):
            raise _Refusal(400)
        if method == "PUT" and nbytes is None:
            raise _Refusal(411)
        # Behind its body, a client that does not wait for answers has sent another request.
        if not len(client.begun) <= (nbytes or 0) <= _MOST_BYTES:
            raise _Refusal(400)
        client.unread, client.closes = nbytes or 0, wire.closes(fields)
        return _Request(method, key, query, fields, nbytes or 0, token)

    def _serve_request(self, client: _Client, request: _Request) -> None:
        if request.method == "PUT":
            self._put(client, request)
            client.answer(201)
        elif request.method == "DELETE":
            self._blobs.delete(request.key)
            client.answer(200)
        elif "list" in request.query:
            after = request.query.get("after", "")
            found = self._blobs.keys(request.key, after=after, most=wire.PAGE)
            listing = "".join(f"{wire.target_of(key)}\n" for key in found).encode()
            client.answer(200, ("Content-Type", "text/plain"), body=listing)
        else:
            with contextlib.closing(self._blobs.find(request.key)) as held:
                self._get(client, request, held)

    def _get(self, client: _Client, request: _Request, held: OpenObject) -> None:
        try:
            span = wire.span_of(request.fields.get("range"), held.nbytes)
        except wire.Malformed as error:
            raise _Refusal(400) from error
        if span is None:
            raise _Refusal(416, ("Content-Range", f"bytes */{held.nbytes}"))
        start, stop = span
        status, fields = 200, [("ETag", f'"{held.version}"'), ("Accept-Ranges", "bytes")]
        if "range" in request.fields:
            status = 206
            fields.append(("Content-Range", f"bytes {start}-{stop - 1}/{held.nbytes}"))
        is_head = request.method == "HEAD"
        client.answer(status, *fields, nbytes=stop - start, more=not is_head)
        if is_head:
            return
        while start < stop:
            end = min(start + wire.PIECE_BYTES, stop)
            self._pace.acquire(end - start, self._stopped)
            client.within(_PIECE_SECS)
            while start < end:
                sent = client.call(socket.SO_SNDTIMEO, held.send, client.socket, start, end - start)
                if not sent:
                    raise OSError("the object was truncated")
                start += sent

    def _put(self, client: _Client, request: _Request) -> None:
        condition = request.fields.get("if-none-match")
        if condition not in (None, "*") or not request.key:
            raise _Refusal(400)
        absent = condition is not None
        if absent:
            with contextlib.suppress(Missing):
                self._blobs.find(request.key).close()
                raise Exists(request.key)
        incoming = self._blobs.receive(request.key, request.nbytes)
        try:
            if client.http.they_are_waiting_for_100_continue:
                client.answer(100)
            while window := incoming.window():
                piece = window[: wire.PIECE_BYTES]
                self._pace.acquire(piece.nbytes, self._stopped)
                client.within(_PIECE_SECS)
                client.fill(piece)
                client.unread -= piece.nbytes
                incoming.filled(piece.nbytes)
            # A client whose token was revoked concurrently changes nothing.
            if not self._tokens.is_valid(request.token):
                raise _Refusal(401)
            incoming.commit(absent=absent)
        except BaseException:
            incoming.discard()
            raise


def _listener(bind: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(found[4][0]).is_unspecified:
            raise OptionError(
                f"{bind}: expected a specific address of this node, found a wildcard; use the "
                "address in the network of the other nodes"
            )
        return socket.create_server(found[4][:2], family=found[0], backlog=1024)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"{bind}:{port}: expected to listen there, found {error.strerror}; use an address of "
            "this node and a free port"
        ) from error


def _ignore(client: _Client) -> None:
    """Reads what a rejected client still sends: closing at once would revoke the rejection."""
    client.shutdown(socket.SHUT_WR)
    client.within(_HEAD_SECS)
    left = _MOST_IGNORED_BYTES
    while left > 0:
        client.begun = b""
        client.receive()
        left -= len(client.begun)


def _status_of(error: StorageError) -> int:
    for kind, status in _STATUSES.items():
        if isinstance(error, kind):
            return status
    lasts = isinstance(error.__cause__, OSError) and error.__cause__.errno in _LASTING
    return 409 if lasts else 500
