# SPDX-License-Identifier: Apache-2.0
"""A store over several nodes, which stripes large objects over all of them.

An object is on the first of its nodes, which rendezvous hashing orders. If it is larger than a
piece, it is cut into pieces, which go to its nodes in turn: every node's link transfers the same
share. A head in the object's place then makes them visible with one write, so an object appears
atomically, as in any store. Piece 3 of ``a/b`` is ``a/b~/ID-000003``, where each write draws an ID.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import google_crc32c

from deltackpt.errors import Damaged, OptionError, StorageError
from deltackpt.resources.runtime import Runtime
from deltackpt.storage.node_client import Node
from deltackpt.storage.store import DEADLINE_SECS, Exists, Missing, Store, first_byte, split

#: Sizes of pieces. Each node should get four of an object, so that requests overlap.
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 4 << 20
_PIECES_PER_NODE = 4
#: Concurrent requests per node, and in total.
_THREADS_PER_NODE, _THREADS = 2, 32
_HEAD = struct.Struct("<16sQI8s")
_MAGIC = b"deltackpt stripe"
_CRC = struct.Struct("<I")
#: Length of a head.
HEAD_BYTES = _HEAD.size + _CRC.size
_PIECE_KEY = re.compile(r"(.+)~/[0-9a-f]{16}-[0-9]{6}", re.DOTALL)
#: File systems limit names to it; "~" is added.
_MOST_NAME_BYTES = 255


class _Head(NamedTuple):
    """What is in the place of a striped object; ``id`` is of the write."""

    nbytes: int
    piece_bytes: int  # Of each piece but the last one.
    id: bytes

    @classmethod
    def parse(cls, data: bytes | memoryview, shown: str) -> _Head | None:
        """Parses an object; None if it is not a head, ``Damaged`` if its checksum is wrong."""
        if len(data) != HEAD_BYTES or bytes(data[: len(_MAGIC)]) != _MAGIC:
            return None
        found = google_crc32c.value(bytes(data[: _HEAD.size]))
        (expected,) = _CRC.unpack_from(data, _HEAD.size)
        if found != expected:
            raise Damaged(
                shown, f"the head of a striped object with CRC32C {expected:08x}", f"{found:08x}"
            )
        return cls(*_HEAD.unpack_from(data)[1:])

    def packed(self) -> bytes:
        """Returns its bytes, which ``of`` parses."""
        packed = _HEAD.pack(_MAGIC, *self)
        return packed + _CRC.pack(google_crc32c.value(packed))

    @property
    def count(self) -> int:
        """Number of pieces."""
        return -(-self.nbytes // self.piece_bytes)

    def piece_length(self, number: int) -> int:
        """Returns the length of a piece."""
        return min(self.piece_bytes, self.nbytes - number * self.piece_bytes)


class NodesStore(Store):
    """Objects spread over several nodes; see the module. Thread-safe."""

    def __init__(
        self,
        addresses: Sequence[str],
        folder: str,
        token: str,
        *,
        deadline_secs: float = DEADLINE_SECS,
    ):
        """Sends no request yet; ``folder`` is the prefix of all keys.

        Every process must pass the same ``addresses``, each "host:port".
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
        data = self._of(key).get(self._inside + key)
        while (head := _Head.parse(data, self._shown(key))) is not None:
            try:
                # A length is trusted only if the last piece is there.
                self._check_last(key, head)
                found = bytearray(head.nbytes)
                self._read_pieces(key, head, 0, [memoryview(found)], whole=True)
            except Damaged:
                newer = self._of(key).get(self._inside + key)
                if newer == data:
                    raise
                data = newer  # It was replaced during the read.
            else:
                return bytes(found)
        return data

    def read_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``; from the sockets directly into the buffers."""
        nbytes, error = HEAD_BYTES, None
        try:
            nbytes = self._of(key).read_into(self._inside + key, start, buffers, whole=whole)
        except Damaged as damage:  # A head is shorter than its object.
            error = damage
        head = self._head(key) if nbytes == HEAD_BYTES else None
        if head is None:
            if error is not None:
                raise error
            return
        try:
            self._read_pieces(key, head, start, buffers, whole=whole)
        except Damaged:
            if self._head(key) == head:
                raise
            self.read_into(key, start, buffers, whole=whole)  # It was replaced during the read.

    def length(self, key: str) -> int:
        """See ``Store``."""
        nbytes = self._of(key).length(self._inside + key)
        head = self._head(key) if nbytes == HEAD_BYTES else None
        return nbytes if head is None else head.nbytes

    def version(self, key: str) -> str:
        """See ``Store``."""
        return self._of(key).version(self._inside + key)

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """See ``Store``."""
        body = memoryview(data).cast("B")
        if _PIECE_KEY.fullmatch(self._inside + key):
            raise OptionError(
                f"{self._shown(key)}: expected a name that is not the name of a striped object's "
                "piece, found one; choose another one"
            )
        if not self._is_striped(key, body):
            self._of(key).put(self._inside + key, [body], absent=absent)
            return
        replaced = None
        with contextlib.suppress(Missing):
            self.version(key)
            if absent:
                raise Exists(self._shown(key))
            replaced = self._head(key)
        share = -(-body.nbytes // (_PIECES_PER_NODE * len(self._nodes)))
        piece_bytes = min(max(share, _LEAST_BYTES), _MOST_BYTES)
        head = _Head(body.nbytes, piece_bytes, secrets.token_bytes(8))

        def put_piece(node: Node, name: str, number: int) -> None:
            start = number * piece_bytes
            node.put(name, [body[start : start + piece_bytes]])

        try:
            self._each(put_piece, self._pieces(key, head))
            self._of(key).put(self._inside + key, [head.packed()], absent=absent)
        except Exists:
            # It may be this object: a retry after a lost answer finds the first write.
            with contextlib.suppress(StorageError, Damaged):
                if self._head(key) != head:
                    self._delete_pieces(key, head)
            raise
        if replaced is not None:
            self._delete_pieces(key, replaced)

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``; all nodes must answer.

        Pieces whose head is missing are listed as their object, so that it can be deleted.
        """
        where = self._inside + folder if folder else self._inside.rstrip("/")
        begin = self._inside + after if after else ""
        found = {
            _object_key(key)
            for node in self._nodes.values()
            for key in node.keys(where, after=begin)
        }
        return sorted(key.removeprefix(self._inside) for key in found if key > begin)

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store``."""
        for key in keys:
            node, name = self._of(key), self._inside + key
            try:
                nbytes = node.length(name)
                node.delete([name])
            except Missing:  # A writer may have died before it wrote the head.
                nbytes = HEAD_BYTES
            # A small object may have replaced a striped one, whose first piece is on this node.
            if nbytes == HEAD_BYTES or node.keys(f"{name}~"):
                for other in self._nodes.values():
                    other.delete(other.keys(f"{name}~"))

    def close(self) -> None:
        """Closes the connections."""
        for node in self._nodes.values():
            node.close()

    def _ranked(self, key: str) -> list[str]:
        return ranked(self._inside + key, [*self._nodes])

    def _of(self, key: str) -> Node:
        """The node that has an object, or its head."""
        return self._nodes[self._ranked(key)[0]]

    def _shown(self, key: str) -> str:
        return f"{self._url}/{key}"

    def _is_striped(self, key: str, body: memoryview) -> bool:
        if body.nbytes == HEAD_BYTES and body[: len(_MAGIC)] == _MAGIC:
            return True  # It would be taken for a head.
        fits = len(key.rpartition("/")[2].encode()) < _MOST_NAME_BYTES
        return body.nbytes > _LEAST_BYTES and len(self._nodes) > 1 and fits

    def _head(self, key: str) -> _Head | None:
        data = bytearray(HEAD_BYTES)
        try:
            self._of(key).read_into(self._inside + key, 0, [memoryview(data)], whole=True)
        except Damaged:
            return None
        return _Head.parse(memoryview(data), self._shown(key))

    def _pieces(self, key: str, head: _Head) -> list[tuple[Node, str, int]]:
        """Node, name and number of each piece."""
        nodes = [self._nodes[address] for address in self._ranked(key)]
        folder = f"{self._inside}{key}~/{head.id.hex()}"
        return [(nodes[n % len(nodes)], f"{folder}-{n:06d}", n) for n in range(head.count)]

    def _check_last(self, key: str, head: _Head) -> None:
        node, name, number = self._pieces(key, head)[-1]
        with self._missing_is_damage(key, name):
            found = node.length(name)
            first_byte(self._shown(key), 0, head.piece_length(number), found, whole=True)

    def _read_pieces(
        self, key: str, head: _Head, start: int, buffers: Sequence[memoryview], *, whole: bool
    ) -> None:
        wanted = sum(buffer.nbytes for buffer in buffers)
        start = first_byte(self._shown(key), start, wanted, head.nbytes, whole=whole)
        ends = count(head.piece_bytes, head.piece_bytes)
        into = {number: inside for number, _, inside in split(start, buffers, ends)}

        def read_piece(node: Node, name: str, number: int) -> None:
            used = max(0, start - number * head.piece_bytes)
            nbytes = used + sum(buffer.nbytes for buffer in into[number])
            with self._missing_is_damage(key, name):
                node.read_into(name, used, into[number], whole=nbytes == head.piece_length(number))

        self._each(read_piece, [one for one in self._pieces(key, head) if one[2] in into])

    def _delete_pieces(self, key: str, head: _Head) -> None:
        self._each(lambda node, name, _: node.delete([name]), self._pieces(key, head))

    @contextlib.contextmanager
    def _missing_is_damage(self, key: str, name: str) -> Iterator[None]:
        try:
            yield
        except Missing as error:
            raise Damaged(self._shown(key), f"its piece {name}", error.found) from error

    def _each(
        self, work: Callable[[Node, str, int], object], pieces: Sequence[tuple[Node, str, int]]
    ) -> None:
        """Transfers pieces concurrently; raises the first error."""
        threads = min(_THREADS_PER_NODE * len(self._nodes), _THREADS)
        with Runtime(threads, name="deltackpt-nodes") as runtime:
            runtime.map(lambda piece: work(*piece), pieces)


def _object_key(key: str) -> str:
    found = _PIECE_KEY.fullmatch(key)
    return found[1] if found else key


# Rendezvous hashing: each node's score is a hash of the key and its name; the nodes with the
# greatest scores hold the key. When a node joins or leaves, only its own keys move.


def ranked(key: str, nodes: Sequence[str], *, racks: Mapping[str, str] | None = None) -> list[str]:
    """Returns all nodes in order of preference for a key; the same for every caller.

    Each failure domain in ``racks`` appears once before any appears twice.
    """
    drawn = sorted(nodes, key=lambda node: _drawn(key, node), reverse=True)
    before: dict[str, int] = {}
    rounds = []
    for node in drawn:
        rack = (racks or {}).get(node, node)
        rounds.append(before.get(rack, 0))
        before[rack] = rounds[-1] + 1
    return [drawn[i] for i in sorted(range(len(drawn)), key=rounds.__getitem__)]


def _drawn(key: str, node: str) -> bytes:
    return hashlib.blake2b(f"{node}\n{key}".encode(), digest_size=16).digest()
