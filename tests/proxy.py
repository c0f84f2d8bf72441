# SPDX-License-Identifier: Apache-2.0
"""A faulty network in front of a server of ``servers``: HTTP/1.1, with a plan of faults.

The proxy forwards requests byte for byte, with the client's Host header, because S3 signatures
cover it. It reads each request in full, then looks up its fate in the plan whose word is in the
target. So many tests, each in its own folder, can share one proxy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator

from servers import Server

#: Faults of a request. If a reused connection ends without a response, libcurl retries on another
#: one, whatever retries are set: the client then never sees lose, drop or late.
#: - lose: the request is forwarded, but the connection is closed instead of responding.
#: - drop: the connection is closed without forwarding the request.
#: - stall: nothing is forwarded until released, then the request proceeds normally.
#: - late: the connection is closed, and the request is forwarded when released.
#: - cut: the connection is closed after half of the response's body, or of its head without one.
#: - behead: the connection is closed in the first header of the response.
#: - slow: the response is delayed.
#: - 503: the server is overloaded.
KINDS = ("lose", "drop", "stall", "late", "cut", "behead", "slow", "503")
SLOW_SECS = 0.15
_XML_BUSY = (
    "application/xml",
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SlowDown</Code><Message>Please reduce '
    b"your request rate.</Message><RequestId>0</RequestId></Error>",
)
_GCS_BUSY = (
    "application/json",
    b'{"error": {"code": 503, "message": "We encountered an internal error. Please try again.", '
    b'"errors": [{"domain": "global", "reason": "backendError"}]}}',
)
_LINE = b"\r\n"


class Closed(OSError):
    """The other side closed its connection."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
      method: GET, PUT and so on.
      key: the key with its bucket, or the prefix of a listing.
    """

    method: str
    key: str


@dataclasses.dataclass
class Plan:
    """The fates of the requests whose target contains a word.

    Attributes:
      word: that word.
      fate: the kind of fault of a request, by its number from 0; None if it succeeds.
      after: how many requests later a late or stalled one is released; None: by ``tell``.
      seen: the requests, in order.
      struck: number and kind of each fault.
    """

    word: str
    fate: Callable[[int], str | None]
    after: int | None = None
    seen: list[Request] = dataclasses.field(default_factory=list)
    struck: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    _held: list[tuple[int, threading.Event]] = dataclasses.field(default_factory=list)
    _on_their_way: set[threading.Event] = dataclasses.field(default_factory=set)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    _arrived: threading.Condition = dataclasses.field(default_factory=threading.Condition)

    @property
    def counts(self) -> Counter[str]:
        """The number of requests by method."""
        return Counter(one.method for one in self.seen)

    def tell(self) -> None:
        """Releases late and stalled requests, and waits until they have arrived."""
        arrived = False
        while not arrived:  # A client may send another one meanwhile.
            self._go_on(lambda number: True)
            with self._arrived:
                arrived = self._arrived.wait_for(lambda: not self._on_their_way, timeout=0.1)

    def met(self, request: Request) -> tuple[str | None, threading.Event]:
        """Records a request; returns its fate, and the event that releases it."""
        told = threading.Event()
        with self._lock:
            number = len(self.seen)
            self.seen.append(request)
            kind = self.fate(number)
            if kind is not None:
                self.struck.append((number, kind))
            if kind in ("stall", "late"):
                self._held.append((number, told))
                self._on_their_way.add(told)
        self._go_on(lambda held: self.after is not None and number - held >= self.after)
        return kind, told

    def arrived(self, told: threading.Event) -> None:
        """Records that a delayed request has arrived, or never will."""
        with self._arrived:
            self._on_their_way.discard(told)
            self._arrived.notify_all()

    def _go_on(self, which: Callable[[int], bool]) -> None:
        with self._lock:
            for number, told in self._held:
                if which(number):
                    told.set()


def at(numbers: dict[int, str]) -> Callable[[int], str | None]:
    """A fate that injects faults by request number."""
    return numbers.get


class Proxy:
    """A proxy that injects network faults in front of a server."""

    def __init__(self, server: Server):
        """Starts to listen; ``close`` stops it."""
        self.server = server
        found = urllib.parse.urlsplit(server.endpoint)
        assert found.hostname is not None and found.port is not None
        self._upstream = (found.hostname, found.port)
        self._plans: dict[str, Plan] = {}
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """The address for clients."""
        below = urllib.parse.urlsplit(self.server.endpoint).path
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}{below}"

    def plan(
        self, word: str, fate: Callable[[int], str | None], *, after: int | None = None
    ) -> Plan:
        """Creates a plan for requests whose target contains a word; it replaces an earlier one."""
        plan = Plan(word, fate, after)
        with self._lock:
            self._plans[word] = plan
        return plan

    def close(self) -> None:
        """Closes all connections."""
        with self._lock:
            plans = [*self._plans.values()]
            every = [self._listener, *self._open]
        for one in every:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for plan in plans:
            plan.tell()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Serves the requests of one connection in order."""
        with self._kept(client), contextlib.ExitStack() as stack:
            upstream: _Upstream | None = None
            source = _Source(client)
            while True:
                message = source.message()
                plan, kind, told = self._met(message)
                if kind == "drop":
                    return
                if kind == "late":
                    threading.Thread(
                        target=self._late, args=(plan, told, message), daemon=True
                    ).start()
                    return
                if kind == "503":
                    client.sendall(self._busy(message.method))
                    continue
                if kind == "stall":
                    told.wait()
                try:
                    if upstream is None or upstream.gone():
                        upstream = stack.enter_context(self._to_server())
                    answer = upstream.ask(message)
                finally:
                    if plan is not None:
                        plan.arrived(told)
                if kind == "lose":
                    return
                if kind == "cut":
                    client.sendall(_half(answer))
                    return
                if kind == "behead":
                    client.sendall(answer.head[: answer.head.index(_LINE) + 10])
                    return
                if kind == "slow":
                    time.sleep(SLOW_SECS)
                client.sendall(answer.head)
                client.sendall(answer.body)
                if message.closes or answer.closes:
                    return

    def _late(self, plan: Plan, told: threading.Event, message: _Message) -> None:
        told.wait()
        with contextlib.suppress(OSError), self._to_server() as upstream:
            upstream.ask(message)
        plan.arrived(told)

    def _met(self, message: _Message) -> tuple[Plan | None, str | None, threading.Event]:
        target = urllib.parse.unquote(message.target)
        with self._lock:
            plan = next((one for word, one in self._plans.items() if word in target), None)
        if plan is None:
            return None, None, threading.Event()
        return plan, *plan.met(Request(message.method, _key(message.target)))

    def _busy(self, method: str) -> bytes:
        kind, body = _GCS_BUSY if self.server.scheme == "gs" else _XML_BUSY
        head = (
            f"HTTP/1.1 503 Slow Down\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else body)

    @contextlib.contextmanager
    def _to_server(self) -> Iterator[_Upstream]:
        found = socket.create_connection(self._upstream)
        with self._kept(found):
            yield _Upstream(found)

    @contextlib.contextmanager
    def _kept(self, connection: socket.socket) -> Iterator[None]:
        """Closes a connection at the end; an ``OSError`` from the peer just ends its use."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.add(connection)
        try:
            yield
        except OSError:
            pass
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


@contextlib.contextmanager
def before(server: Server) -> Iterator[Proxy]:
    """A proxy in front of a server, closed on exit."""
    proxy = Proxy(server)
    try:
        yield proxy
    finally:
        proxy.close()


def _half(answer: _Message) -> bytes:
    """The head and half of the body; half of the head if there is almost no body."""
    if len(answer.body) < 2:
        return answer.head[: len(answer.head) // 2]
    return answer.head + answer.body[: len(answer.body) // 2]


def _key(target: str) -> str:
    """The key or prefix of a request."""
    path, _, query = target.partition("?")
    asked = dict(urllib.parse.parse_qsl(query))
    return asked.get("name") or asked.get("prefix") or urllib.parse.unquote(path)


@dataclasses.dataclass
class _Message:
    """A request or response, unmodified."""

    first: str
    head: bytes
    body: bytes | bytearray
    closes: bool

    @property
    def method(self) -> str:
        return self.first.split(" ")[0]

    @property
    def target(self) -> str:
        return self.first.split(" ")[1]


class _Upstream:
    """A connection to the server."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._source = _Source(connection)

    def gone(self) -> bool:
        """Whether it was closed; nothing else can be readable."""
        polled = select.poll()
        try:
            polled.register(self._connection, select.POLLIN)
        except ValueError:  # By this proxy, in another thread.
            return True
        return bool(polled.poll(0))

    def ask(self, message: _Message) -> _Message:
        """Sends a request and returns its response."""
        self._connection.sendall(message.head)
        self._connection.sendall(message.body)
        return self._source.message(of=message.method)


class _Source:
    """Reads messages from a connection."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._left = b""

    def message(self, of: str | None = None) -> _Message:
        """The next message; a response if the method of its request is given.

        Raises:
          OSError: the connection failed or was closed.
        """
        while True:
            head = self._until(_LINE * 2)
            first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
            fields = {
                name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
            }
            if of is None and fields.get("expect", "").lower() == "100-continue":
                self._connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            if of is None or not first.split(" ")[1].startswith("1"):
                break
        closes = "close" in fields.get("connection", "").lower()
        if of == "HEAD" or (of is not None and first.split(" ")[1] in ("204", "304")):
            body = b""
        elif "chunked" in fields.get("transfer-encoding", "").lower():
            body = self._chunked()
        elif "content-length" in fields:
            body = self._exactly(int(fields["content-length"]))
        elif of is not None:
            body, closes = self._rest(), True
        else:
            body = b""
        return _Message(first, head, body, closes)

    def _chunked(self) -> bytes:
        """A chunked body, unmodified, with its trailers."""
        found = []
        while True:
            line = self._until(_LINE)
            found.append(line)
            length = int(line.split(b";")[0], 16)
            if length == 0:
                break
            found.append(bytes(self._exactly(length + len(_LINE))))
        while found[-1] != _LINE:
            found.append(self._until(_LINE))
        return b"".join(found)

    def _until(self, end: bytes) -> bytes:
        while end not in self._left:
            self._left += self._some()
        found, _, self._left = self._left.partition(end)
        return found + end

    def _exactly(self, nbytes: int) -> bytearray:
        found = bytearray(nbytes)
        view = memoryview(found)
        begun = self._left[:nbytes]
        view[: len(begun)] = begun
        self._left = self._left[nbytes:]
        at = len(begun)
        while at < nbytes:
            count = self._connection.recv_into(view[at:])
            if count == 0:
                raise Closed
            at += count
        return found

    def _rest(self) -> bytes:
        found = [self._left]
        with contextlib.suppress(Closed):
            while True:
                found.append(self._some())
        self._left = b""
        return b"".join(found)

    def _some(self) -> bytes:
        found = self._connection.recv(1 << 16)
        if not found:
            raise Closed
        return found
