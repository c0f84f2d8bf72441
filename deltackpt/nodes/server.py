# SPDX-License-Identifier: Apache-2.0
"""The server that hands out what a node holds, to whoever shows a token.

One thread reads the heads of all requests, which costs a bounded buffer and no thread each, however
many connections say nothing; who has shown a token in a whole head is served by one of a few
threads, which receives the body straight into the shelf's memory, or sends from it. Where there are
too many connections, the oldest that has shown nothing is closed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import errno
import ipaddress
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

_MOST_CONNECTIONS = 256
#: Requests that are served at a time.
_WORKERS = 32
#: How long a head, and what nobody asked for after a refusal, may take.
_HEAD_SECS = 5.0
#: How long a connection that has shown a token is kept without a request.
_IDLE_SECS = 120.0
#: How long a piece may take to come or go: 50 KB/s at least.
_PIECE_SECS = 20.0
_PIECE_BYTES = 1 << 20
#: Connections taken before those that are open are read from again.
_ACCEPTED_AT_ONCE = 16
#: Of a refused request's body, read so that the refusal arrives.
_MOST_IGNORED_BYTES = 1 << 18
_BEARER = "Bearer "
#: What would be another request than the one that is understood.
_NOT_TAKEN = frozenset(
    {"if-match", "if-unmodified-since", "content-range", "content-encoding", "upgrade", "trailer"}
)
#: What a file system says of a name that it will never take.
_LASTING = frozenset(
    {errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES, errno.EROFS}
)


class _Refusal(Exception):
    """A request that is answered with its status, and nothing else.

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
    """A client, as the thread of the heads sees it.

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
    """Serves a shelf over HTTP/1.1 by threads of its own, until it is closed."""

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
        """Listens.

        Args:
          shelf: what is served; it stays its owner's, who closes it afterwards.
          bind: the address to listen on, of this node: nobody else's, and not all of them.
          port: a free one by default.
          tokens: who is let in.
          most_connections: open at a time.
          bytes_per_sec: the most that is sent and received.
          elsewhere: what is handed out where the shelf does not hold it.

        Raises:
          OptionError: the address stands for every address of the node.
          StorageError: nobody can listen there.
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
        """Ends all connections; what was being received is gone."""
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
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._take_back()
                else:
                    self._read(key.data)
            self._end_late()
        for connection in self._open:
            with contextlib.suppress(OSError):  # Whoever serves it sees its end.
                connection.client.shutdown(socket.SHUT_RDWR)

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
        """Has a request served once its head is whole."""
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
          _Refusal: it is none.
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
        """Answers somebody who is not listened to any longer, without waiting for him."""
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
            # As of any other thread: nobody asks for the result of this one.
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
            closing = (("Connection", "close"),) if refusal.closes else ()
            _answer(client, refusal.line, *refusal.fields, *closing)
            return not refusal.closes
        return request.fields.get("connection", "").lower() != "close"

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
                    raise OSError("the reader is too slow, or the object was cut")
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
            # Whose token ended meanwhile changes nothing any more.
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
                    raise ConnectionError("the writer is gone, or too slow")
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
                f"{bind}: expected an address of this node to listen on, found one that stands for "
                "all of them; name the one of the network that the other nodes are on"
            )
        return socket.create_server(found[4][:2], family=found[0], backlog=1024)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"{bind}:{port}: expected to listen there, found {error.strerror}; give an address of "
            "this node, and a port that is free"
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
    """Turns what a shelf refuses into a refusal of a request."""
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
