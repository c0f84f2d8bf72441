# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 between nodes: h11 parses and writes the headers; bodies bypass h11.

A body is transferred between the socket and the caller's buffers; h11 would copy each byte twice.
h11 is lenient in a few points. Here, anything that two parsers could read differently is rejected,
as are repeated fields and keys with another spelling.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import socket
import struct
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import h11

#: Maximum size of a request's or an answer's head.
MOST_HEAD_BYTES = 8192
_MOST_FIELDS = 32
#: Maximum length of a key in UTF-8; file systems limit names to 255.
MOST_KEY_BYTES = 1024
#: Maximum number of keys in one answer to a listing.
PAGE = 1000
#: Maximum size of such an answer: a byte of a key is at most three bytes of its target.
MOST_PAGE_BYTES = PAGE * (3 * MOST_KEY_BYTES + 2)
#: Bytes of a body per system call.
PIECE_BYTES = 1 << 20
#: Maximum number of buffers per system call.
_MOST_BUFFERS = 512
_HEAD_END = b"\r\n\r\n"
#: Accepted by h11: other line ends, folded fields, bytes that are not printable ASCII, and several
#: lengths in one field.
_AMBIGUOUS = re.compile(
    rb"\r(?!\n)|(?<!\r)\n|\n[ \t]|[^\t\r\n -~]|\ncontent-length:[^\r]*,", re.IGNORECASE
)
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18})")


class Malformed(ValueError):
    """The received bytes are not a valid message; the connection is closed."""


class TooLong(Malformed):
    """A head exceeds its limit."""


class Dropped(OSError):
    """The connection closed before the end of a head."""


class Head(NamedTuple):
    """A received head; ``fields`` have lower-case names."""

    fields: dict[str, str]
    method: str = ""
    target: str = ""
    status: int = 0

    @property
    def nbytes(self) -> int | None:
        """Length of the body, if given."""
        found = self.fields.get("content-length")
        return None if found is None else int(found)


def parsed(http: h11.Connection, head: bytes) -> Head:
    """Parses a head, up to its empty line; ``Malformed`` if unexpected or ambiguous."""
    if _AMBIGUOUS.search(head):
        raise Malformed("an ambiguous head")
    http.receive_data(head)
    try:
        message = http.next_event()
    except h11.RemoteProtocolError as error:
        raise Malformed(str(error)) from error
    if not isinstance(message, h11.Request | h11.Response | h11.InformationalResponse):
        raise Malformed("no head")
    fields = {name.decode(): value.decode() for name, value in message.headers}
    # The first line and the empty one end like the others. h11 merges equal lengths.
    if len(fields) != head.count(b"\r\n") - 2 or len(fields) > _MOST_FIELDS:
        raise Malformed("too many fields, or one that comes twice")
    if message.http_version != b"1.1" or "transfer-encoding" in fields:
        raise Malformed("another version or Transfer-Encoding")
    if isinstance(message, h11.Request):
        return Head(fields, message.method.decode(), message.target.decode())
    return Head(fields, status=message.status_code)


def head(
    http: h11.Connection,
    kind: type[h11.Request | h11.Response | h11.InformationalResponse],
    fields: Iterable[tuple[str, object]],
    **first: Any,
) -> bytes:
    """Encodes a head; ``first`` is method and target, or the status.

    A field with a line break or that is not ASCII is ``Malformed``; the error does not show it.
    """
    headers = [(name, str(value)) for name, value in fields]
    if not all(value.isascii() and value.isprintable() for _, value in headers):
        raise Malformed("a field that cannot be sent")
    return http.send(kind(headers=headers, **first)) or b""


def closes(fields: Mapping[str, str]) -> bool:
    """Returns whether the sender of these fields closes the connection after the answer."""
    return "close" in re.split(r"[ \t]*,[ \t]*", fields.get("connection", "").lower())


class Connection:
    """A socket for requests and answers, whose calls have a common deadline.

    Timeouts are set in the kernel: a socket of Python with a timeout returns after each packet.
    After the deadline, calls raise ``TimeoutError``; if the connection fails, another ``OSError``.
    """

    def __init__(self, connection: socket.socket, role: type[h11.CLIENT] | type[h11.SERVER]):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.http = h11.Connection(role)
        self.begun = b""
        self._ends_at = 0.0

    def renew(self) -> None:
        """Begins another request."""
        self.http = h11.Connection(self.http.our_role)

    def within(self, secs: float) -> None:
        """Sets the deadline of the next calls, seconds from now."""
        self._ends_at = time.monotonic() + secs

    def receive(self) -> None:
        """Receives some bytes into ``begun``; raises ``Dropped`` if the connection was closed."""
        try:
            found = self.call(socket.SO_RCVTIMEO, self.socket.recv, MOST_HEAD_BYTES)
        except ConnectionResetError as error:
            raise Dropped(error.errno, error.strerror) from error
        if not found:
            raise Dropped(0, "the connection was closed without an answer")
        self.begun += found

    def head(self) -> Head:
        """Receives a head; raises ``Malformed``, see ``parsed``."""
        while (end := self.begun.find(_HEAD_END, 0, MOST_HEAD_BYTES)) < 0:
            if len(self.begun) >= MOST_HEAD_BYTES:
                raise TooLong("too long a head")
            self.receive()
        end += len(_HEAD_END)
        received, self.begun = self.begun[:end], self.begun[end:]
        return parsed(self.http, received)

    def fill(self, buffer: memoryview) -> None:
        """Fills a buffer with the next bytes of a body."""
        count = min(len(self.begun), buffer.nbytes)
        buffer[:count] = self.begun[:count]
        self.begun = self.begun[count:]
        left = buffer[count:]
        while left:
            piece = min(PIECE_BYTES, left.nbytes)
            into = self.socket.recv_into
            count = self.call(socket.SO_RCVTIMEO, into, left, piece, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError("the connection was closed in a body")
            left = left[count:]

    def send(self, buffers: Sequence[bytes | memoryview], flags: int = 0) -> None:
        """Sends buffers in their order."""
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while left:
            some, room = [], PIECE_BYTES
            for buffer in left[:_MOST_BUFFERS]:
                some.append(buffer[:room])
                room -= some[-1].nbytes
                if not room:
                    break
            sent = self.call(socket.SO_SNDTIMEO, self.socket.sendmsg, some, (), flags)
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]

    def call(self, way: int, system_call: Callable[..., object], *args: object) -> Any:
        """Makes one system call until the deadline; ``way`` is SO_RCVTIMEO or SO_SNDTIMEO."""
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        fraction, whole = math.modf(left)
        limit = struct.pack("ll", int(whole), max(1, int(fraction * 1e6)))
        self.socket.setsockopt(socket.SOL_SOCKET, way, limit)
        try:
            return system_call(*args)
        except BlockingIOError as error:
            raise TimeoutError from error

    def shutdown(self, way: int) -> None:
        """Ends sending, or also wakes a thread that uses the connection."""
        with contextlib.suppress(OSError):  # It has ended.
            self.socket.shutdown(way)

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()


def page(body: bytes, folder: str, after: str) -> list[str]:
    """Parses the keys in one answer to a listing; ``Malformed`` if not above ``after``."""
    try:
        targets = body.decode("ascii").split("\n")
    except UnicodeDecodeError:
        targets = ["?"]
    if targets.pop():
        raise Malformed("a listing")
    inside = f"{folder}/" if folder else ""
    keys = [key_of(target) for target in targets]
    if not all(key.startswith(inside) for key in keys) or len(keys) > PAGE:
        raise Malformed("other keys than requested")
    if any(second <= first for first, second in itertools.pairwise([after, *keys])):
        raise Malformed("keys that are not in order")
    return keys


def target_of(key: str) -> str:
    """Returns the target of a key."""
    return "/" + urllib.parse.quote(key, safe="/")


def key_of(path: str) -> str:
    """Returns the key of a target, without its query; "" for the node itself.

    A key that is invalid, or would leave the store, is ``Malformed``.
    """
    if path == "/":
        return ""
    names = [_name_of(each) for each in path[1:].split("/")]
    key = "/".join(names)
    if len(key.encode()) > MOST_KEY_BYTES:
        raise Malformed("key")
    return key


def _name_of(quoted: str) -> str:
    try:
        name = urllib.parse.unquote(quoted, errors="strict")
    except UnicodeDecodeError as error:
        raise Malformed("key") from error
    if name in ("", ".", "..") or "/" in name or any(c < " " or c == "\x7f" for c in name):
        raise Malformed("key")
    return name


def is_key(key: str) -> bool:
    """Returns whether a node accepts a key."""
    try:
        return bool(key) and key_of(target_of(key)) == key
    except (Malformed, UnicodeEncodeError):
        return False


def span_of(text: str | None, nbytes: int) -> tuple[int, int] | None:
    """Returns start and end of a Range field's only range; None if it starts after the end.

    ``text`` is None for the whole object.
    """
    if text is None:
        return 0, nbytes
    found = _RANGE.fullmatch(text)
    if found is None or found[1] == found[2] == "":
        raise Malformed("Range")
    if not found[1]:
        return (max(0, nbytes - int(found[2])), nbytes) if int(found[2]) and nbytes else None
    first, stop = int(found[1]), min(nbytes, int(found[2]) + 1) if found[2] else nbytes
    if found[2] and int(found[2]) < first:
        raise Malformed("Range")
    return (first, stop) if first < nbytes else None


def content_range(fields: Mapping[str, str]) -> tuple[int, int, int]:
    """Parses Content-Range: start, end, and length of the whole object.

    Start and end are 0 if the answer has no part of the object.
    """
    found = _CONTENT_RANGE.fullmatch(fields.get("content-range", ""))
    if found is None:
        raise Malformed("Content-Range")
    total = int(found[3])
    if found[1] is None:
        return 0, 0, total
    first, last = int(found[1]), int(found[2])
    if not first <= last < total:
        raise Malformed("Content-Range")
    return first, last + 1, total
