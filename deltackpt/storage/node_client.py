# SPDX-License-Identifier: Apache-2.0
"""Client of a node's server.

Data is transferred between the caller's buffers and the socket, one piece per system call. Every
call has a deadline, and errors name an unreachable node.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import urllib.parse
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import h11

from deltackpt.errors import OptionError
from deltackpt.storage import redaction, wire
from deltackpt.storage.store import (
    DEADLINE_SECS,
    Exists,
    Missing,
    Refused,
    Unanswered,
    first_byte,
    unanswered,
)

#: Idle time of a connection before it is dropped; the server keeps it for longer.
_MOST_KEPT = 8
_KEPT_SECS = 60.0
_CONNECT_SECS = 10.0
#: Larger bodies wait until the server signals that there is room; smaller ones fit its buffers
#: anyway.
_ASKED_FIRST_BYTES = 1 << 16
#: Limit for an unwanted body, which is received only so that the connection can be reused.
_MOST_IGNORED_BYTES = 1 << 16
#: Retries of a request that was dropped without an answer, for example under load.
_TRIES = 5
_PAUSE_SECS = 0.02
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+)):([0-9]{1,5})")
#: Limit for one listing, which is kept in memory.
_MOST_KEYS = 10_000_000
#: Statuses after which the same request may succeed.
_BUSY = frozenset({408, 429, 500, 503, 504})


class Node:
    """Client of a node's server; thread-safe. Any call may raise ``Refused`` or ``Unanswered``."""

    def __init__(self, address: str, token: str, *, deadline_secs: float = DEADLINE_SECS):
        """Sends no request yet; ``address`` is "host:port"."""
        redaction.check_token(token)
        self.address = address
        self._at = _checked(address)
        self._token = token
        self._deadline_secs = deadline_secs
        self._kept: list[tuple[float, wire.Connection]] = []
        # Stores are not closed explicitly.
        weakref.finalize(self, _close, self._kept)
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, key: str, buffers: Sequence[Any], *, absent: bool = False) -> None:
        """Writes buffers under a key atomically, in order.

        With ``absent``, an existing key raises ``Exists``: after a lost answer, possibly for these
        bytes.
        """
        body = [memoryview(buffer).cast("B") for buffer in buffers]
        fields = [("If-None-Match", "*")] if absent else []
        self._request("PUT", self._target(key), f"write {key}", fields=fields, body=body)

    def read_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, whole: bool = False
    ) -> int:
        """Fills buffers in order, see ``Store.read_into``; returns the length of the object."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        if start < 0 or not wanted:
            length = self.length(key)
            start = first_byte(f"{self.address}/{key}", start, wanted, length, whole=whole)
            if not wanted:
                return length
        into = [buffer.cast("B") for buffer in buffers]
        span = [("Range", f"bytes={start}-{start + wanted - 1}")]
        action = f"read {key}"
        head, _ = self._request("GET", self._target(key), action, fields=span, into=into)
        try:
            first, stop, total = wire.content_range(head.fields)
        except wire.Malformed as error:
            raise self._odd(action, error) from error
        first_byte(f"{self.address}/{key}", start, wanted, total, whole=whole)
        if (first, stop, head.nbytes) != (start, start + wanted, wanted):
            raise self._odd(action, wire.Malformed("another range than requested"))
        return total

    def get(self, key: str) -> bytes:
        """Returns the bytes under a key."""
        return self._request("GET", self._target(key), f"read {key}")[1]

    def length(self, key: str) -> int:
        """Returns the length of the object under a key."""
        return self._head(key).nbytes or 0

    def version(self, key: str) -> str:
        """Returns a value that changes with the object under a key."""
        return self._head(key).fields.get("etag", "").strip('"')

    def _head(self, key: str) -> wire.Head:
        return self._request("HEAD", self._target(key), f"read {key}")[0]

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """Returns all keys of the node below a folder that sort after ``after``, ascending."""
        found: list[str] = []
        target, action = wire.target_of(folder), f"list {folder}/"
        while len(found) <= _MOST_KEYS:
            after = found[-1] if found else after
            query = urllib.parse.urlencode({"list": "", "after": after})
            _, body = self._request(
                "GET", f"{target}?{query}", action, most_bytes=wire.MOST_PAGE_BYTES
            )
            try:
                page = wire.page(body, folder, after)
            except wire.Malformed as error:
                raise self._odd(action, error) from error
            found += page
            if len(page) < wire.PAGE:
                return found
        raise self._odd(action, wire.Malformed(f"more than {_MOST_KEYS:,} keys"))

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; missing ones are ignored."""
        for key in keys:
            with contextlib.suppress(Missing):
                self._request("DELETE", self._target(key), f"delete {key}")

    def close(self) -> None:
        """Closes the idle connections."""
        with self._lock:
            self._is_closed = True
            _close(self._kept)

    def _target(self, key: str) -> str:
        if not wire.is_key(key):
            raise Refused(
                f"{self.address}/{key}: expected a key of names without control characters, '.' "
                f"and '..', of {wire.MOST_KEY_BYTES} bytes at most, found another; choose one"
            )
        return wire.target_of(key)

    def _request(
        self,
        method: str,
        target: str,
        action: str,
        *,
        fields: Sequence[tuple[str, object]] = (),
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] | None = None,
        most_bytes: int | None = None,
    ) -> tuple[wire.Head, bytes]:
        """Sends a request; returns the answer, whose body fills ``into`` if its size matches."""
        ends_at = time.monotonic() + self._deadline_secs
        sent = [("Host", self.address), ("Authorization", f"Bearer {self._token}"), *fields]
        if method == "PUT":
            nbytes = sum(buffer.nbytes for buffer in body)
            sent.append(("Content-Length", nbytes))
            if nbytes > _ASKED_FIRST_BYTES:
                sent.append(("Expect", "100-continue"))
        for left in reversed(range(_TRIES)):
            try:
                connection = self._connection(ends_at)
                try:
                    request = wire.head(
                        connection.http, h11.Request, sent, method=method, target=target
                    )
                    head = _answered(connection, request, body)
                    received, clean = _received(connection, method, head, into, most_bytes)
                except BaseException:
                    connection.close()
                    raise
                self._keep(connection, clean=clean)
                break
            except wire.Dropped as error:
                with self._lock:  # Connections to a restarted server are useless.
                    _close(self._kept)
                pause = _PAUSE_SECS * 2 ** (_TRIES - left)
                if not left or time.monotonic() + pause > ends_at:
                    raise self._gone(action, error) from error
                time.sleep(pause)
            except TimeoutError as error:
                raise unanswered(self.address, action, self._deadline_secs) from error
            except wire.Malformed as error:
                raise self._odd(action, error) from error
            except OSError as error:
                raise self._gone(action, error) from error
        self._raise_for(head.status, action, allowed=416 if into else None)
        return head, received

    def _raise_for(self, status: int, action: str, *, allowed: int | None) -> None:
        if status in (200, 201, 206, allowed):
            return
        key = action.partition(" ")[2]
        if status == 404:
            raise Missing(f"{self.address}/{key}")
        if status == 412:
            raise Exists(f"{self.address}/{key}")
        found = {
            401: "an invalid token; use the token of the run, or of the node store",
            507: "no room; give the node more, or remove objects from it",
        }.get(status, f"status {status}; check the node, then try again")
        kind = Unanswered if status in _BUSY else Refused
        raise kind(f"{self.address}: expected to {action}, found {found}")

    def _gone(self, action: str, error: OSError) -> Unanswered:
        return Unanswered(
            f"{self.address}: expected to {action}, found no answer ({error.strerror or error}); "
            "restart the node, or continue without it"
        )

    def _odd(self, action: str, error: wire.Malformed) -> Refused:
        return Refused(
            f"{self.address}: expected to {action}, found an answer that is not from a node server "
            f"({error}); check the address"
        )

    def _connection(self, ends_at: float) -> wire.Connection:
        """The last used connection if it is still usable, else a new one."""
        found = None
        with self._lock:
            while self._kept and found is None:
                since, kept = self._kept.pop()
                if time.monotonic() - since < _KEPT_SECS:
                    found = kept
                else:
                    kept.close()
        if found is None:
            within = max(0.001, min(_CONNECT_SECS, ends_at - time.monotonic()))
            made = socket.create_connection(self._at, within)
            found = wire.Connection(made, h11.CLIENT)
        found.renew()
        found.within(ends_at - time.monotonic())
        return found

    def _keep(self, connection: wire.Connection, *, clean: bool) -> None:
        with self._lock:
            if clean and not self._is_closed and len(self._kept) < _MOST_KEPT:
                self._kept.append((time.monotonic(), connection))
                return
        connection.close()


def _answered(connection: wire.Connection, head: bytes, body: Sequence[memoryview]) -> wire.Head:
    waits = connection.http.client_is_waiting_for_100_continue
    # It may be rejected before the server has read it completely.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send([head] if waits else [head, *body])
    found = connection.head()
    if waits and found.status == 100:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send(body)
        found = connection.head()
    return found


def _received(
    connection: wire.Connection,
    method: str,
    found: wire.Head,
    into: Sequence[memoryview] | None,
    most_bytes: int | None,
) -> tuple[bytes, bool]:
    """Receives the body of an answer; returns also whether another request may follow."""
    status, nbytes = found.status, found.nbytes
    if nbytes is None:
        raise wire.Malformed("no length")
    is_object = (method, status) == ("GET", 200)
    if into is not None and is_object:
        raise wire.Malformed("no range")
    if is_object and most_bytes is not None and nbytes > most_bytes:
        raise wire.Malformed(f"{nbytes} bytes, above the limit of {most_bytes}")
    body, clean = b"", True
    if method == "HEAD":
        pass
    elif into is not None and status == 206:
        clean = nbytes == sum(buffer.nbytes for buffer in into)
        for buffer in into if clean else ():
            connection.fill(buffer)
    elif is_object or nbytes <= _MOST_IGNORED_BYTES:
        body = _body(connection, nbytes)
    else:
        clean = False
    # A body may have been rejected before it was sent completely.
    clean = clean and (method != "PUT" or status == 201)
    return body, clean and not connection.begun and not wire.closes(found.fields)


def _body(connection: wire.Connection, nbytes: int) -> bytes:
    """Reads a body into memory that grows with the data: an answer may claim any length."""
    found = bytearray()
    while len(found) < nbytes:
        begun = len(found)
        found += bytes(min(nbytes - begun, max(wire.PIECE_BYTES, begun)))
        with memoryview(found) as memory:
            connection.fill(memory[begun:])
    return bytes(found)


def _close(kept: list[tuple[float, wire.Connection]]) -> None:
    while kept:
        kept.pop()[1].close()


def addresses_of(text: str, *, shown: str | None = None) -> list[str]:
    """Returns the sorted, distinct nodes that a URL names: "host:port,host:port"."""
    found = text.split(",")
    for address in found:
        _checked(address, shown=shown)
    if len({*found}) != len(found):
        shown = shown or f"nodes://{text}"
        raise OptionError(
            f"{shown}: expected each node once, found one twice; remove the duplicate"
        )
    return sorted(found)


def _checked(address: str, *, shown: str | None = None) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        shown = shown or redaction.shown(f"nodes://{address}")
        raise OptionError(
            f"{shown}: expected node addresses as host:port, separated by commas, found something "
            "else; correct them"
        )
    return found[1] or found[2], int(found[3])
