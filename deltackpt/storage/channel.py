# SPDX-License-Identifier: Apache-2.0
"""One HTTP request to a node and its answer, on a persistent connection.

A piece of a body is transferred completely by one system call with its own timeout: 60 MB cost 30
ms of CPU time, mostly for the kernel's copying.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import socket
import struct
import time
from collections.abc import Sequence

from deltackpt.storage import wire

#: Larger bodies wait until the server signals that there is room; smaller ones fit its buffers
#: anyway.
ASKED_FIRST_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20
#: Limit for an unwanted body, which is received only so that the connection can be reused.
_MOST_IGNORED_BYTES = 1 << 16
#: Maximum number of buffers per system call.
_MOST_PARTS = 512


class Dropped(OSError):
    """The connection closed before any answer."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The wanted range of an object, and its destination.

    Attributes:
      start: first byte.
      parts: the destination buffers.
      whole: whether the object must end with them.
    """

    start: int
    parts: list[memoryview]
    whole: bool

    @property
    def nbytes(self) -> int:
        """Total size of the parts."""
        return sum(part.nbytes for part in self.parts)


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
      head: its header.
      body: its body, unless it was received into parts.
      total: size of the whole object, if a range was requested.
    """

    head: wire.Head
    body: bytes = b""
    total: int | None = None


class Channel:
    """One request and its answer on a connection.

    Attributes:
      is_clean: whether another request may follow.
    """

    def __init__(self, connection: socket.socket, ends_at: float):
        self._connection = connection
        self._ends_at = ends_at
        self._begun = b""
        self.is_clean = False

    def asked(
        self,
        method: str,
        head: bytes,
        body: Sequence[memoryview],
        wanted: Wanted | None,
        most_bytes: int | None = None,
    ) -> Answer:
        """Sends a request, and receives its answer.

        Args:
          method: method of the request.
          head: the request without its body.
          body: body of the request.
          wanted: destination of the answer's body.
          most_bytes: limit for the answer's body if it has no destination.

        Raises:
          Dropped: the connection closed before an answer.
          TimeoutError, OSError: the connection failed, or timed out.
          wire.Malformed: the received bytes are not an answer.
        """
        nbytes = sum(part.nbytes for part in body)
        refused = None
        try:
            if nbytes > ASKED_FIRST_BYTES:
                self._send([memoryview(head)])
                found = self._head()
                if found.first[0] != "100":
                    refused = found
                else:
                    self._send(body)
            else:
                self._send([memoryview(head), *body])
        except (BrokenPipeError, ConnectionResetError) as error:
            # It may have been rejected before the server had read it completely.
            with contextlib.suppress(OSError):
                refused = self._head()
            if refused is None:
                raise Dropped(error.errno, error.strerror) from error
        found = refused or self._head()
        answer = self._taken(method, found, wanted, most_bytes)
        closes = refused is not None or wire.closes(found.fields)
        self.is_clean = self.is_clean and not closes and not self._begun
        return answer

    def _taken(
        self, method: str, found: wire.Head, wanted: Wanted | None, most_bytes: int | None
    ) -> Answer:
        """Receives the answer with its body; an unexpected body is not received."""
        nbytes = found.nbytes
        if nbytes is None:
            raise wire.Malformed("no length")
        status = found.first[0]
        if method == "HEAD":
            self.is_clean = True
            return Answer(found)
        if wanted is None and (method, status) != ("GET", "200") and nbytes > _MOST_IGNORED_BYTES:
            return Answer(found)
        if wanted is None:
            if most_bytes is not None and nbytes > most_bytes:
                raise wire.Malformed(f"{nbytes} bytes, above the limit of {most_bytes}")
            body = self._body(nbytes)
            self.is_clean = True
            return Answer(found, body)
        total = None
        if status == "416":
            total = _total_outside(found.fields.get("content-range", ""))
        elif status == "206":
            first, stop, total = wire.content_range(found.fields.get("content-range", ""))
            if first != wanted.start or stop - first != nbytes or nbytes > wanted.nbytes:
                raise wire.Malformed("another range than requested")
        elif status == "200":
            raise wire.Malformed("no range")
        if status == "206" and nbytes == wanted.nbytes:
            self._fill(wanted.parts)
            self.is_clean = True
        else:
            self.is_clean = nbytes == 0
        return Answer(found, total=total)

    def _body(self, nbytes: int) -> bytes:
        """Reads a body into memory that grows with the data: an answer may claim any length."""
        found = bytearray()
        while len(found) < nbytes:
            begun = len(found)
            found += bytes(min(nbytes - begun, max(_PIECE_BYTES, begun)))
            with memoryview(found) as memory:
                self._fill([memory[begun:]])
        return bytes(found)

    def _head(self) -> wire.Head:
        found = self._begun
        while wire.HEAD_END not in found:
            if len(found) >= wire.MOST_HEAD_BYTES:
                raise wire.Malformed("too long a head")
            self._bound(socket.SO_RCVTIMEO)
            try:
                some = self._connection.recv(wire.MOST_HEAD_BYTES)
            except BlockingIOError as error:
                raise TimeoutError from error
            except ConnectionResetError as error:
                raise Dropped(error.errno, error.strerror) from error
            if not some:
                raise Dropped(0, "the connection was closed without an answer")
            found += some
        head, _, self._begun = found.partition(wire.HEAD_END)
        return wire.answer(head)

    def _send(self, parts: Sequence[memoryview]) -> None:
        left = [part for part in parts if part.nbytes]
        while left:
            some, room = [], _PIECE_BYTES
            for part in left[:_MOST_PARTS]:
                some.append(part[:room])
                room -= some[-1].nbytes
                if not room:
                    break
            self._bound(socket.SO_SNDTIMEO)
            try:
                sent = self._connection.sendmsg(some)
            except BlockingIOError as error:
                raise TimeoutError from error
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]

    def _fill(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            begun = self._begun[: part.nbytes]
            part[: len(begun)] = begun
            self._begun = self._begun[len(begun) :]
            left = part[len(begun) :]
            while left:
                self._bound(socket.SO_RCVTIMEO)
                piece = min(_PIECE_BYTES, left.nbytes)
                try:
                    count = self._connection.recv_into(left, piece, socket.MSG_WAITALL)
                except BlockingIOError as error:
                    raise TimeoutError from error
                if not count:
                    raise ConnectionError("the connection was closed in an answer")
                left = left[count:]

    def _bound(self, way: int) -> None:
        """Limits the next call to the remaining time."""
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        whole = math.floor(left)
        limit = struct.pack("ll", whole, max(1, int((left - whole) * 1e6)))
        self._connection.setsockopt(socket.SOL_SOCKET, way, limit)


def _total_outside(text: str) -> int:
    found = re.fullmatch(r"bytes \*/([0-9]{1,18})", text)
    if found is None:
        raise wire.Malformed("Content-Range")
    return int(found[1])
