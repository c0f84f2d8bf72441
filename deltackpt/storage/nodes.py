# SPDX-License-Identifier: Apache-2.0
"""Client of a node's server, and a Store over several nodes.

Data is transferred between the caller's buffers and the socket, one piece per system call.
Connections are reused, and every call has a deadline: errors name an unreachable node, and no call
waits for it indefinitely.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import urllib.parse
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from deltackpt.errors import Damaged, OptionError
from deltackpt.storage import redaction, wire
from deltackpt.storage.channel import ASKED_FIRST_BYTES, Answer, Channel, Dropped, Wanted
from deltackpt.storage.placement import ranked
from deltackpt.storage.store import (
    DEADLINE_SECS,
    Exists,
    Missing,
    Refused,
    Stamp,
    Unanswered,
    stamp_of_objects,
    unanswered,
)

#: Idle time of a connection before it is dropped; the server keeps it for longer.
_MOST_KEPT = 8
_KEPT_SECS = 60.0
_CONNECT_SECS = 10.0
#: Retries of a request that was dropped without an answer, for example under load.
_TRIES = 5
_PAUSE_SECS = 0.02
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+)):([0-9]{1,5})")
#: Limit for one listing, which is kept in memory.
_MOST_KEYS = 10_000_000
#: Statuses after which the same request may succeed.
_BUSY = frozenset({"408", "429", "500", "503", "504"})


class Node:
    """Client of a node's server; thread-safe."""

    def __init__(self, address: str, token: str, *, deadline_secs: float = DEADLINE_SECS):
        """Sends no request yet.

        Args:
          address: "host:port".
          token: the token that the server accepts.
          deadline_secs: timeout of each request in seconds.

        Raises:
          OptionError: the address is not valid, or the token cannot be sent.
        """
        redaction.check_token(token)
        self.address = address
        self._at = _checked(address)
        self._token = token
        self._deadline_secs = deadline_secs
        self._kept: list[tuple[float, socket.socket]] = []
        # Stores are not closed explicitly.
        weakref.finalize(self, _close, self._kept)
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, key: str, parts: Sequence[Any], *, absent: bool = False) -> None:
        """Writes buffers under a key atomically.

        Args:
          key: the key; an existing object is replaced.
          parts: buffers to send, in order.
          absent: fail if the key exists.

        Raises:
          Exists: the key exists, possibly with these bytes after a lost answer.
          Refused: the token is invalid, or the node is full.
          Unanswered: no answer came in time.
        """
        body = [memoryview(part).cast("B") for part in parts]
        fields = [("If-None-Match", "*")] if absent else []
        self._ask("PUT", self._target(key), f"write {key}", fields=fields, body=body)

    def read_into(
        self, key: str, start: int, parts: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """Fills parts in order; see ``Store.read_into``.

        Raises:
          Missing: the object does not exist.
          Damaged: it is shorter, or longer although ``whole`` is set.
          Refused: the token is invalid.
          Unanswered: no answer came in time.
        """
        wanted = sum(part.nbytes for part in parts)
        if start < 0 or not wanted:
            length = self.length(key)
            first = start + length if start < 0 else start
            self._check(key, first, wanted, length, whole=whole)
            start = first
        if wanted:
            asked = Wanted(start, [part.cast("B") for part in parts], whole)
            span = [("Range", f"bytes={start}-{start + wanted - 1}")]
            self._ask("GET", self._target(key), f"read {key}", fields=span, wanted=asked)

    def get(self, key: str) -> bytes:
        """Returns the bytes under a key.

        Raises:
          Missing, Refused, Unanswered: same as for ``read_into``.
        """
        return self._ask("GET", self._target(key), f"read {key}").body

    def length(self, key: str) -> int:
        """Returns the length of the object under a key.

        Raises:
          Missing, Refused, Unanswered: same as for ``read_into``.
        """
        return self.length_and_version(key)[0]

    def version(self, key: str) -> str:
        """Returns a value that changes with the object under a key.

        Raises:
          Missing, Refused, Unanswered: same as for ``read_into``.
        """
        return self.length_and_version(key)[1]

    def length_and_version(self, key: str) -> tuple[int, str]:
        """Returns length and version of the same object.

        Raises:
          Missing, Refused, Unanswered: same as for ``read_into``.
        """
        head = self._ask("HEAD", self._target(key), f"read {key}").head
        return head.nbytes or 0, head.fields.get("etag", "").strip('"')

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """Returns all keys of the node below a folder that sort after ``after``, ascending.

        Raises:
          Refused, Unanswered: same as for ``read_into``.
        """
        found: list[str] = []
        target, action = wire.target_of(folder), f"list {folder}/"
        while len(found) <= _MOST_KEYS:
            after = found[-1] if found else after
            query = urllib.parse.urlencode({"list": "", "after": after})
            answer = self._ask("GET", f"{target}?{query}", action, most_bytes=wire.MOST_PAGE_BYTES)
            try:
                page = wire.page(answer.body, folder, after)
            except wire.Malformed as error:
                raise self._odd(action, error) from error
            found += page
            if len(page) < wire.PAGE:
                return found
        raise self._odd(action, wire.Malformed(f"more than {_MOST_KEYS:,} keys"))

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; missing ones are ignored.

        Raises:
          Refused, Unanswered: same as for ``read_into``.
        """
        for key in keys:
            with contextlib.suppress(Missing):
                self._ask("DELETE", self._target(key), f"delete {key}")

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

    def _check(self, key: str, start: int, wanted: int, total: int, *, whole: bool) -> None:
        """Checks that a range is in an object, and reaches its end if required."""
        stop = start + wanted
        if start < 0 or stop > total or (whole and stop != total):
            expected = wanted if whole or start < 0 else stop
            raise Damaged(f"{self.address}/{key}", f"{expected} bytes", f"{total} bytes")

    def _ask(
        self,
        method: str,
        target: str,
        action: str,
        *,
        fields: Sequence[tuple[str, object]] = (),
        body: Sequence[memoryview] = (),
        wanted: Wanted | None = None,
        most_bytes: int | None = None,
    ) -> Answer:
        """Sends a request; returns the answer, with a body of limited size.

        Raises:
          Exists, Missing, Damaged, Refused, Unanswered: it was rejected, or not answered in time.
        """
        ends_at = time.monotonic() + self._deadline_secs
        key = action.partition(" ")[2]
        nbytes = sum(part.nbytes for part in body)
        sent = [("Host", self.address), ("Authorization", f"Bearer {self._token}"), *fields]
        sent.append((wire.DIRECT, "1"))
        if method == "PUT":
            sent.append(("Content-Length", nbytes))
            if nbytes > ASKED_FIRST_BYTES:
                sent.append(("Expect", "100-continue"))
        head = wire.head(f"{method} {target} HTTP/1.1", sent)
        for left in reversed(range(_TRIES)):
            try:
                with self._connection(ends_at) as channel:
                    answer = channel.asked(method, head, body, wanted, most_bytes)
                break
            except Dropped as error:
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
        self._raise_for(answer, key, action, wanted)
        return answer

    def _raise_for(self, answer: Answer, key: str, action: str, wanted: Wanted | None) -> None:
        status = answer.head.first[0]
        if status in ("200", "201", "206"):
            if wanted is not None and answer.total is not None:
                self._check(key, wanted.start, wanted.nbytes, answer.total, whole=wanted.whole)
            return
        if status == "404":
            raise Missing(f"{self.address}/{key}")
        if status == "412":
            raise Exists(
                f"{self.address}/{key}: expected nothing there, found an object; check which "
                "program wrote it"
            )
        if status == "416" and wanted is not None and answer.total is not None:
            self._check(key, wanted.start, wanted.nbytes, answer.total, whole=wanted.whole)
        told = {
            "401": "an invalid token; use the token of the run, or of the node store",
            "507": "no room; give the node more, or remove objects from it",
        }.get(status, f"status {status}; check the node, then try again")
        kind = Unanswered if status in _BUSY else Refused
        raise kind(f"{self.address}: expected to {action}, found {told}")

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

    @contextlib.contextmanager
    def _connection(self, ends_at: float) -> Iterator[Channel]:
        """A connection, which is kept if it can be reused."""
        connection = self._take()
        if connection is None:
            within = min(_CONNECT_SECS, ends_at - time.monotonic())
            connection = socket.create_connection(self._at, max(0.001, within))
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(connection, ends_at)
        try:
            yield channel
        finally:
            with self._lock:
                keeps = channel.is_clean and not self._is_closed and len(self._kept) < _MOST_KEPT
                if keeps:
                    self._kept.append((time.monotonic(), connection))
            if not keeps:
                connection.close()

    def _take(self) -> socket.socket | None:
        """The last used connection, if it is still usable."""
        while True:
            with self._lock:
                if not self._kept:
                    return None
                since, connection = self._kept.pop()
            if time.monotonic() - since < _KEPT_SECS:
                return connection
            connection.close()


def _close(kept: list[tuple[float, socket.socket]]) -> None:
    while kept:
        kept.pop()[1].close()


class NodesStore:
    """Objects spread over several nodes; each key is on one of them."""

    def __init__(
        self,
        addresses: Sequence[str],
        folder: str,
        token: str,
        *,
        deadline_secs: float = DEADLINE_SECS,
    ):
        """Sends no request yet.

        Args:
          addresses: "host:port" of all nodes; every process must pass the same ones.
          folder: common prefix of all keys; "" for everything on the nodes.
          token: the token that the nodes accept.
          deadline_secs: timeout of each request in seconds.

        Raises:
          OptionError: an address is not valid, or the token cannot be sent.
        """
        self._url = f"nodes://{','.join(addresses)}/{folder}".rstrip("/")
        self._inside = f"{folder}/" if folder else ""
        self._nodes = {
            address: Node(address, token, deadline_secs=deadline_secs) for address in addresses
        }

    @property
    def url(self) -> str:
        """See ``Store``."""
        return self._url

    def get(self, key: str) -> bytes:
        """See ``Store``."""
        return self._of(key).get(self._inside + key)

    def read_into(
        self, key: str, start: int, parts: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``; from the socket directly into the parts."""
        self._of(key).read_into(self._inside + key, start, parts, whole=whole)

    def length(self, key: str) -> int:
        """See ``Store``."""
        return self._of(key).length(self._inside + key)

    def version(self, key: str) -> Hashable:
        """See ``Store``."""
        return self._of(key).version(self._inside + key)

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """See ``Store``."""
        self._of(key).put(self._inside + key, [data], absent=absent)

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``; all nodes must answer."""
        where = self._inside + folder if folder else self._inside.rstrip("/")
        found: list[str] = []
        for node in self._nodes.values():
            found += node.keys(where, after=self._inside + after if after else "")
        return sorted(key.removeprefix(self._inside) for key in found)

    def folders(self, folder: str) -> list[str]:
        """See ``Store``."""
        inside = f"{folder}/" if folder else ""
        below = (key.removeprefix(inside).partition("/") for key in self.keys(folder))
        return sorted({name for name, slash, _ in below if slash})

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store``."""
        for key in keys:
            self._of(key).delete([self._inside + key])

    def stamp(self, folder: str) -> Stamp | None:
        """See ``Store``."""
        return stamp_of_objects(self, folder)

    def kvstore(self, folder: str) -> dict[str, Any] | None:
        """See ``Store``: TensorStore cannot list nodes, or combine several."""
        return None

    def _of(self, key: str) -> Node:
        """The node that a key belongs to."""
        return self._nodes[ranked(self._inside + key, [*self._nodes])[0]]


def addresses_of(text: str, *, shown: str | None = None) -> list[str]:
    """Returns the sorted, distinct nodes that a URL names: "host:port,host:port".

    Args:
      text: that part of the URL.
      shown: the URL for errors.

    Raises:
      OptionError: the URL names no node, or an invalid address.
    """
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
    """Host and port of an address."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        shown = shown or redaction.shown(f"nodes://{address}")
        raise OptionError(
            f"{shown}: expected node addresses as host:port, separated by commas, found something "
            "else; correct them"
        )
    return found[1] or found[2], int(found[3])
