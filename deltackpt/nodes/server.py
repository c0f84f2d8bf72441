# SPDX-License-Identifier: Apache-2.0
"""HTTP server for a node's objects, which authenticates clients by token.

One thread reads the heads of all requests, so an idle connection costs a bounded buffer and no
thread. Once a complete head has shown a valid token, one of a few threads serves the request; it
receives the body directly into the store's memory, or sends from it. If there are too many
connections, the oldest unauthenticated one is closed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import errno
import ipaddress
import logging
import selectors
import socket
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import NamedTuple

from deltackpt.errors import OptionError, OutOfSpace, StorageError
from deltackpt.ledger.upload import Pace
from deltackpt.nodes.elsewhere import Elsewhere
from deltackpt.nodes.shelves import Held, Incoming, Shelf
from deltackpt.nodes.tokens import Tokens
from deltackpt.storage import wire
from deltackpt.storage.store import Exists, Missing, Unanswered

_logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 256
#: Requests that are served at a time.
_WORKERS = 32
#: Timeout for a head, and for the unread rest of a rejected request.
_HEAD_SECS = 5.0
#: How long a connection that has shown a token is kept without a request.
_IDLE_SECS = 120.0
#: How long a piece may take to come or go: 50 KB/s at least.
_PIECE_SECS = 20.0
_PIECE_BYTES = 1 << 20
#: Connections taken before those that are open are read from again.
_ACCEPTED_AT_ONCE = 16
#: Bytes of a rejected request's body to read, so that the rejection arrives.
_MOST_IGNORED_BYTES = 1 << 18
#: After an unexpected error.
_ODD_SECS = 0.1
_BEARER = "Bearer "
#: Fields that would change the meaning of the request.
_NOT_TAKEN = frozenset(
    {"if-match", "if-unmodified-since", "content-range", "content-encoding", "upgrade", "trailer"}
)
#: File system errors for invalid names.
_LASTING = frozenset(
    {
        *(errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
        *(errno.ENAMETOOLONG, errno.EACCES, errno.EROFS),
    }
)


class _Refusal(Exception):
    """A request that is rejected with a status only.

    Attributes:
      line: status and reason.
      closes: whether the connection is of no use any more.
    """

    def __init__(self, line: str, *, closes: bool = True, fields: tuple[tuple[str, str], ...] = ()):
        self.line, self.closes, self.fields = line, closes, fields
        super().__init__(line)


class _Request(NamedTuple):
    method: str
    key: str
    query: dict[str, str]
    fields: dict[str, str]
    nbytes: int
    token: str


class _Connection:
    """A client connection, as seen by the thread that reads heads.

    Attributes:
      is_known: whether it has ever shown a token that held.
      ends_at: when it is closed.
      ignoring: bytes that are still read and not looked at, of one that was refused.
    """

    def __init__(self, client: socket.socket):
        self.client = client
        self.buffer = bytearray()
        self.is_known = False
        self.ends_at = time.monotonic() + _HEAD_SECS
        self.ignoring = 0


class NodeServer:
    """Serves a blob store over HTTP/1.1 in its own threads, until it is closed."""

    def __init__(
        self,
        shelf: Shelf,
        *,
        bind: str,
        port: int = 0,
        tokens: Tokens,
        most_connections: int = _MOST_CONNECTIONS,
        bytes_per_sec: float | None = None,
        elsewhere: Elsewhere | None = None,
    ):
        """Starts listening.

        Args:
          shelf: the objects to serve; the caller still owns it and closes it afterwards.
          bind: a specific address of this node to listen on, not a wildcard.
          port: a free one by default.
          tokens: the valid tokens.
          most_connections: maximum number of open connections.
          bytes_per_sec: rate limit of sending and receiving.
          elsewhere: where to look for objects that the store lacks.

        Raises:
          OptionError: the address is a wildcard.
          StorageError: listening failed.
        """
        self._shelf, self._tokens, self._elsewhere = shelf, tokens, elsewhere
        self._pace = Pace(bytes_per_sec)
        self._most = most_connections
        self._listener = _listener(bind, port)
        host, bound = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        self._stopped = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._returned: collections.deque[tuple[_Connection, bool]] = collections.deque()
        #: All that are open; the oldest first.
        self._open: dict[_Connection, None] = {}
        #: Those that a request of is being served.
        self._busy: set[_Connection] = set()
        self._workers = concurrent.futures.ThreadPoolExecutor(_WORKERS, "deltackpt-node")
        for one in (self._listener, self._woken):
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="deltackpt-node", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes all connections; partially received objects are dropped."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._wake()
        self._thread.join()
        self._workers.shutdown()
        for connection in [*self._open]:
            self._close(connection)
        for one in (self._listener, self._waker, self._woken):
            one.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            for key, _ in self._selector.select(self._until_next_end()):
                try:
                    self._turn(key)
                except Exception:  # One odd client, or peer, ends no server.
                    _logger.exception("%s: expected to serve a request", self.address)
                    if key.data in self._open:
                        self._close(key.data)
                    self._stopped.wait(_ODD_SECS)
            self._end_late()
        for connection in self._open:
            with contextlib.suppress(OSError):  # Whoever serves it sees its end.
                connection.client.shutdown(socket.SHUT_RDWR)

    def _turn(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._woken:
            self._take_back()
        else:
            self._read(key.data)

    def _until_next_end(self) -> float:
        waiting = [each.ends_at for each in self._open if each not in self._busy]
        return max(0.0, min(waiting, default=time.monotonic() + 60.0) - time.monotonic())

    def _end_late(self) -> None:
        now = time.monotonic()
        for connection in [*self._open]:
            if connection.ends_at <= now and connection not in self._busy:
                self._close(connection)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # It went; or this process has too many open files.
                if not self._evict():
                    return
                continue
            while len(self._open) >= self._most:
                if not self._evict():
                    client.close()
                    return
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(client)
            self._open[connection] = None
            self._selector.register(client, selectors.EVENT_READ, connection)

    def _evict(self) -> bool:
        """Closes the oldest that has shown no token, else the one longest without use."""
        idle = [each for each in self._open if each not in self._busy]
        if not idle:
            return False
        self._close(min(idle, key=lambda each: (each.is_known, each.ends_at)))
        return True

    def _close(self, connection: _Connection) -> None:
        del self._open[connection]
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.client)
        connection.client.close()

    def _read(self, connection: _Connection) -> None:
        if connection not in self._open:
            return  # Closed for another one in this turn.
        try:
            found = connection.client.recv(wire.MOST_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        if not found:
            return self._close(connection)
        if connection.ignoring:
            connection.ignoring -= len(found)
            if connection.ignoring <= 0:
                self._close(connection)
            return
        if not connection.buffer:
            connection.ends_at = time.monotonic() + _HEAD_SECS
        connection.buffer += found
        self._begin(connection)

    def _begin(self, connection: _Connection) -> None:
        """Serves a request once its header is complete."""
        end = connection.buffer.find(wire.HEAD_END, 0, wire.MOST_HEAD_BYTES)
        try:
            if end < 0:
                if len(connection.buffer) >= wire.MOST_HEAD_BYTES:
                    raise _Refusal("431 Request Header Fields Too Large")
                return
            end += len(wire.HEAD_END)
            request = self._understood(bytes(connection.buffer[:end]))
        except _Refusal as refusal:
            return self._refuse(connection, refusal)
        connection.is_known = True
        begun = bytes(connection.buffer[end:])
        connection.buffer.clear()
        try:
            self._workers.submit(self._serve, connection, request, begun)
        except RuntimeError:  # No thread can be started.
            return self._close(connection)
        self._selector.unregister(connection.client)
        self._busy.add(connection)

    def _understood(self, head: bytes) -> _Request:
        """A request of somebody who may make it.

        Raises:
          _Refusal: the request is invalid or not allowed.
        """
        try:
            (method, target), fields = found = wire.request(head)
        except (wire.Malformed, ValueError) as error:
            raise _Refusal("400 Bad Request") from error
        shown = fields.get("authorization", "")
        token = shown.removeprefix(_BEARER)
        if not shown.startswith(_BEARER) or not self._tokens.let_in(token):
            raise _Refusal("401 Unauthorized", fields=(("WWW-Authenticate", "Bearer"),))
        path, _, asked = target.partition("?")
        try:
            nbytes, key = found.nbytes, wire.key_of(path)
            query = dict(urllib.parse.parse_qsl(asked, True, errors="strict"))
        except ValueError as error:
            raise _Refusal("400 Bad Request") from error
        if method not in ("GET", "HEAD", "PUT", "DELETE"):
            raise _Refusal("405 Method Not Allowed")
        if _NOT_TAKEN & fields.keys() or query.keys() - {"list", "after"}:
            raise _Refusal("400 Bad Request")
        if (nbytes and method != "PUT") or (method == "PUT" and query):
            raise _Refusal("400 Bad Request")
        if method == "PUT" and nbytes is None:
            raise _Refusal("411 Length Required")
        return _Request(method, key, query, fields, nbytes or 0, token)

    def _refuse(self, connection: _Connection, refusal: _Refusal) -> None:
        """Answers a client whose requests are no longer read, without waiting for it."""
        answer = wire.head(
            f"HTTP/1.1 {refusal.line}",
            (("Content-Length", 0), ("Connection", "close"), *refusal.fields),
        )
        connection.buffer.clear()
        try:
            connection.client.send(answer)
            connection.client.shutdown(socket.SHUT_WR)
        except OSError:
            return self._close(connection)
        connection.ignoring = _MOST_IGNORED_BYTES
        connection.ends_at = time.monotonic() + _HEAD_SECS

    def _take_back(self) -> None:
        """Listens again to those whose requests were served."""
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        while self._returned:
            connection, goes_on = self._returned.popleft()
            self._busy.discard(connection)
            if not goes_on or self._stopped.is_set():
                self._close(connection)
                continue
            connection.client.setblocking(False)
            connection.ends_at = time.monotonic() + _IDLE_SECS
            self._selector.register(connection.client, selectors.EVENT_READ, connection)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    def _serve(self, connection: _Connection, request: _Request, begun: bytes) -> None:
        """Serves one request; by a worker."""
        goes_on = False
        try:
            connection.client.setblocking(True)
            _bound_waits(connection.client)
            goes_on = self._answered(connection.client, request, begun)
        except OSError:  # The client is gone, or too slow.
            pass
        except Exception:
            # Report it as for any thread: this one's result is not read.
            threading.excepthook(
                threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
            )
        finally:
            if not goes_on:
                with contextlib.suppress(OSError):
                    connection.client.shutdown(socket.SHUT_WR)
            self._returned.append((connection, goes_on))
            self._wake()

    def _answered(self, client: socket.socket, request: _Request, begun: bytes) -> bool:
        """Answers a request; returns whether another one may follow.

        Raises:
          OSError: the client is gone, or too slow.
        """
        try:
            if len(begun) > request.nbytes:
                raise _Refusal("400 Bad Request")  # It does not wait for answers.
            if request.method == "PUT":
                self._put(client, request, begun)
            elif request.method == "DELETE":
                self._delete(client, request)
            elif "list" in request.query:
                self._list(client, request)
            else:
                self._get(client, request)
        except _Refusal as refusal:
            closes = refusal.closes or wire.closes(request.fields)
            closing = (("Connection", "close"),) if closes else ()
            _answer(client, refusal.line, *refusal.fields, *closing)
            return not closes
        return not wire.closes(request.fields)

    def _get(self, client: socket.socket, request: _Request) -> None:
        with _refusals():
            found = self._find(request)
        # From here on a refusal would be taken for a part of the object.
        with contextlib.closing(found) as held:
            try:
                span = wire.span_of(request.fields.get("range"), held.nbytes)
            except wire.Malformed as error:
                raise _Refusal("400 Bad Request") from error
            if span is None:
                outside = (("Content-Range", f"bytes */{held.nbytes}"),)
                raise _Refusal("416 Range Not Satisfiable", closes=False, fields=outside)
            start, stop = span
            fields = [("ETag", f'"{held.version}"'), ("Accept-Ranges", "bytes")]
            line = "200 OK"
            if "range" in request.fields:
                line = "206 Partial Content"
                fields.append(("Content-Range", f"bytes {start}-{stop - 1}/{held.nbytes}"))
            is_head = request.method == "HEAD"
            _answer(client, line, *fields, nbytes=stop - start, more=not is_head)
            if not is_head:
                self._send(client, held, start, stop)

    def _find(self, request: _Request) -> Held:
        try:
            return self._shelf.find(request.key)
        except Missing:
            if self._elsewhere is None or wire.DIRECT.lower() in request.fields:
                raise
            return self._elsewhere.find(request.key, self.address)

    def _send(self, client: socket.socket, held: Held, start: int, stop: int) -> None:
        while start < stop:
            piece = min(_PIECE_BYTES, stop - start)
            self._pace.take(piece, self._stopped)
            began, sent = time.monotonic(), 0
            while sent < piece:
                some = held.send(client, start + sent, piece - sent)
                if not some or time.monotonic() - began > _PIECE_SECS:
                    raise OSError("the reader is too slow, or the object was truncated")
                sent += some
            start += piece

    def _put(self, client: socket.socket, request: _Request, begun: bytes) -> None:
        condition = request.fields.get("if-none-match")
        if condition not in (None, "*") or not request.key:
            raise _Refusal("400 Bad Request")
        absent = condition is not None
        # Until all of the body came, what a refusal does not read would be taken for a request.
        with _refusals(closes=True):
            if absent and self._is_there(request.key):
                raise Exists(request.key)
            incoming = self._shelf.take(request.key, request.nbytes)
        try:
            if request.fields.get("expect", "").lower() == "100-continue":
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            with _refusals(closes=True):
                self._receive(client, incoming, begun)
            # A client whose token was revoked concurrently changes nothing.
            if not self._tokens.let_in(request.token):
                raise _Refusal("401 Unauthorized")
            with _refusals():
                incoming.commit(absent=absent)
        except BaseException:
            incoming.discard()
            raise
        _answer(client, "201 Created")

    def _is_there(self, key: str) -> bool:
        try:
            self._shelf.find(key).close()
        except Missing:
            return False
        return True

    def _receive(self, client: socket.socket, incoming: Incoming, begun: bytes) -> None:
        left = memoryview(begun)
        while window := incoming.window():
            piece = min(_PIECE_BYTES, window.nbytes)
            if left:
                piece = min(piece, left.nbytes)
                window[:piece] = left[:piece]
                left = left[piece:]
            else:
                self._pace.take(piece, self._stopped)
                if client.recv_into(window, piece, socket.MSG_WAITALL) != piece:
                    raise ConnectionError("the writer disconnected, or is too slow")
            incoming.filled(piece)

    def _delete(self, client: socket.socket, request: _Request) -> None:
        with _refusals():
            self._shelf.delete(request.key)
        _answer(client, "200 OK")

    def _list(self, client: socket.socket, request: _Request) -> None:
        after = request.query.get("after", "")
        with _refusals():
            found = self._shelf.keys(request.key, after=after, most=wire.PAGE)
        body = "".join(f"{wire.target_of(key)}\n" for key in found).encode()
        _answer(client, "200 OK", ("Content-Type", "text/plain"), nbytes=len(body), more=True)
        client.sendall(body)


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


def _bound_waits(client: socket.socket) -> None:
    """Bounds each call, not only the gaps: who sends a byte now and then is too slow as well."""
    limit = struct.pack("ll", int(_PIECE_SECS), 0)
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        client.setsockopt(socket.SOL_SOCKET, way, limit)


def _answer(
    client: socket.socket,
    line: str,
    *fields: tuple[str, str],
    nbytes: int = 0,
    more: bool = False,
) -> None:
    head = wire.head(f"HTTP/1.1 {line}", (("Content-Length", nbytes), *fields))
    client.sendall(head, socket.MSG_MORE if more and nbytes else 0)


@contextlib.contextmanager
def _refusals(*, closes: bool = False) -> Iterator[None]:
    """Converts a store's errors into rejections of a request."""
    try:
        yield
    except Missing as error:
        raise _Refusal("404 Not Found", closes=closes) from error
    except Exists as error:
        raise _Refusal("412 Precondition Failed", closes=closes) from error
    except OutOfSpace as error:
        raise _Refusal("507 Insufficient Storage", closes=closes) from error
    except Unanswered as error:
        raise _Refusal("503 Service Unavailable", closes=closes) from error
    except StorageError as error:
        lasts = isinstance(error.__cause__, OSError) and error.__cause__.errno in _LASTING
        line = "409 Conflict" if lasts else "500 Internal Server Error"
        raise _Refusal(line, closes=closes) from error
