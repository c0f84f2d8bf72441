# SPDX-License-Identifier: Apache-2.0
"""The other side of a node's server: its client, and a Store over several nodes.

Bytes go from the caller's buffers into the socket and from the socket into the caller's buffers,
whole pieces a system call. Connections are kept, and every call has a deadline: a node that is gone
is named, and nobody waits for it.
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
from deltackpt.storage import wire
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

#: Kept without a request; the server keeps them for longer.
_MOST_KEPT = 8
_KEPT_SECS = 60.0
_CONNECT_SECS = 10.0
#: How often a request is sent again that was dropped without an answer, as where others crowd in.
_TRIES = 5
_PAUSE_SECS = 0.02
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+)):([0-9]{1,5})")
#: Statuses after which the same request may succeed.
_BUSY = frozenset({"408", "429", "500", "503", "504"})


class Node:
    """A server of a node, as a client sees it; thread-safe."""

    def __init__(self, address: str, token: str, *, deadline_secs: float = DEADLINE_SECS):
        """Asks nothing yet.

        Args:
          address: "host:port".
          token: what the server lets in.
          deadline_secs: of each call.

        Raises:
          OptionError: the address is none.
        """
        self.address = address
        self._at = _checked(address)
        self._token = token
        self._deadline_secs = deadline_secs
        self._kept: list[tuple[float, socket.socket]] = []
        # A store is closed by nobody.
        weakref.finalize(self, _close, self._kept)
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, key: str, parts: Sequence[Any], *, absent: bool = False) -> None:
        """Puts the bytes of some buffers under a key: all of them or nothing.

        Args:
          key: where to; what was there is replaced.
          parts: buffers, which are sent one after the other.
          absent: only where nothing is there.

        Raises:
          Exists: something is; it may be these bytes, where an answer was lost.
          Refused: the token does not hold, or the node is full.
          Unanswered: no answer came in time.
        """
        body = [memoryview(part).cast("B") for part in parts]
        fields = [("If-None-Match", "*")] if absent else []
        self._ask("PUT", self._target(key), f"write {key}", fields=fields, body=body)

    def read_into(
        self, key: str, start: int, parts: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """Fills parts, one after the other; see ``Store.read_into``.

        Raises:
          Missing: there is no such object.
          Damaged: it is shorter; or longer, where it must not be.
          Refused: the token does not hold.
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
        """All that is under a key.

        Raises:
          Missing, Refused, Unanswered: as ``read_into``.
        """
        return self._ask("GET", self._target(key), f"read {key}").body

    def length(self, key: str) -> int:
        """Bytes under a key.

        Raises:
          Missing, Refused, Unanswered: as ``read_into``.
        """
        return self.length_and_version(key)[0]

    def version(self, key: str) -> str:
        """What changes with what is under a key.

        Raises:
          Missing, Refused, Unanswered: as ``read_into``.
        """
        return self.length_and_version(key)[1]

    def length_and_version(self, key: str) -> tuple[int, str]:
        """Both of the same object.

        Raises:
          Missing, Refused, Unanswered: as ``read_into``.
        """
        head = self._ask("HEAD", self._target(key), f"read {key}").head
        return head.nbytes or 0, head.fields.get("etag", "").strip('"')

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """All keys of the node below a folder, ascending; those that come after ``after``.

        Raises:
          Refused, Unanswered: as ``read_into``.
        """
        found: list[str] = []
        target = wire.target_of(folder)
        while True:
            query = urllib.parse.urlencode({"list": "", "after": found[-1] if found else after})
            page = self._ask("GET", f"{target}?{query}", f"list {folder}/").body.decode().split()
            try:
                found += map(wire.key_of, page)
            except wire.Malformed as error:
                raise self._odd(f"list {folder}/", error) from error
            if len(page) < wire.PAGE:
                return found

    def delete(self, keys: Iterable[str]) -> None:
        """Removes what is under keys; nothing is wrong where there is nothing.

        Raises:
          Refused, Unanswered: as ``read_into``.
        """
        for key in keys:
            with contextlib.suppress(Missing):
                self._ask("DELETE", self._target(key), f"delete {key}")

    def close(self) -> None:
        """Closes the connections that are kept."""
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
        """Checks that a range is in an object, and ends with it where it must."""
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
    ) -> Answer:
        """Sends a request; returns what was answered.

        Raises:
          Exists, Missing, Damaged, Refused, Unanswered: it was refused, or not answered in time.
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
                    answer = channel.asked(method, head, body, wanted)
                break
            except Dropped as error:
                with self._lock:  # Those of a server that was started again are of no use.
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
                f"{self.address}/{key}: expected nothing there, found an object; read who put it "
                "there"
            )
        if status == "416" and wanted is not None and answer.total is not None:
            self._check(key, wanted.start, wanted.nbytes, answer.total, whole=wanted.whole)
        told = {
            "401": "a token that does not hold; give that of the run, or of the node store",
            "507": "no room; give the node more, or remove what it holds",
        }.get(status, f"the answer {status}; look at the node, then try again")
        kind = Unanswered if status in _BUSY else Refused
        raise kind(f"{self.address}: expected to {action}, found {told}")

    def _gone(self, action: str, error: OSError) -> Unanswered:
        return Unanswered(
            f"{self.address}: expected to {action}, found no node that answers "
            f"({error.strerror or error}); start it again, or go on without it"
        )

    def _odd(self, action: str, error: wire.Malformed) -> Refused:
        return Refused(
            f"{self.address}: expected to {action}, found an answer that is none of a node "
            f"({error}); check the address"
        )

    @contextlib.contextmanager
    def _connection(self, ends_at: float) -> Iterator[Channel]:
        """A connection, which is kept where it may be used again."""
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
        """The connection that was used last, where it is still of use."""
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
    """Bytes under keys over several nodes; each key is on one of them."""

    def __init__(
        self,
        addresses: Sequence[str],
        folder: str,
        token: str,
        *,
        deadline_secs: float = DEADLINE_SECS,
    ):
        """Asks nothing yet.

        Args:
          addresses: of the nodes, "host:port" each; all of them, whoever opens the store.
          folder: what all keys are below; "" for all that the nodes hold.
          token: what the nodes let in.
          deadline_secs: of each call.

        Raises:
          OptionError: an address is none.
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
        """See ``Store``; from the socket straight into the parts."""
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
        """See ``Store``: none that lists, and none of several nodes."""
        return None

    def _of(self, key: str) -> Node:
        """The node that has a key, or would."""
        return self._nodes[ranked(self._inside + key, [*self._nodes])[0]]


def addresses_of(text: str) -> list[str]:
    """The nodes that a URL names, "host:port,host:port", each once and in one order.

    Raises:
      OptionError: there are none, or one is no address.
    """
    found = text.split(",")
    for address in found:
        _checked(address)
    if len({*found}) != len(found):
        raise OptionError(f"nodes://{text}: expected each node once, found one twice; leave it out")
    return sorted(found)


def _checked(address: str) -> tuple[str, int]:
    """Host and port of an address."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        # What stands before an "@" may be a secret.
        shown = "..." if "@" in address else address
        raise OptionError(
            f"nodes://{shown}: expected the address of a node as host:port, found another thing; "
            "write that, several of them with commas"
        )
    return found[1] or found[2], int(found[3])
