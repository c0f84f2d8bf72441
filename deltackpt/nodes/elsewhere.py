# SPDX-License-Identifier: Apache-2.0
"""Serves the objects of a whole store, for clients that know only the address of one node.

TensorStore's ``http`` driver has a single base URL. The node at that address therefore also serves
the objects of the other nodes, and striped ones, through a buffer of one piece.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from deltackpt.nodes.shelves import Held
from deltackpt.storage.store import Missing
from deltackpt.storage.striping import NodesStore

_PIECE_BYTES = 1 << 20
_DEADLINE_SECS = 15.0


class Elsewhere:
    """The objects of all nodes of a store; thread-safe."""

    def __init__(self, addresses: Sequence[str], token: str):
        """Sends no request yet.

        Args:
          addresses: addresses of all nodes, as in the URL of the store.
          token: the token that the nodes accept.

        Raises:
          OptionError: an address is invalid.
        """
        self._store = NodesStore(addresses, "", token, deadline_secs=_DEADLINE_SECS)

    def find(self, key: str, own: str, *, is_here: bool) -> Held:
        """Opens an object of the store.

        Args:
          key: key of the object.
          own: the node that asks.
          is_here: whether that node has something under the key: the head of a striped object.

        Raises:
          Missing: it does not exist.
          Refused, Unanswered: another node rejected the request, or did not answer.
        """
        if not is_here and self._store.owner(key) == own:
            raise Missing(key)
        return _Forwarded(self._store, key)

    def close(self) -> None:
        """Closes the connections to the other nodes."""
        self._store.close()


class _Forwarded:
    """See ``Held``; if the object is replaced during the answer, the answer ends early."""

    def __init__(self, store: NodesStore, key: str):
        self._store, self._key = store, key
        self.version = store.version(key)
        self.nbytes = store.length(key)
        self._buffer = bytearray()

    def send(self, connection: socket.socket, start: int, nbytes: int) -> int:
        """See ``Held``."""
        nbytes = min(nbytes, _PIECE_BYTES)
        if not self._buffer:
            self._buffer = bytearray(min(self.nbytes, _PIECE_BYTES))
        piece = memoryview(self._buffer)[:nbytes]
        self._store.read_into(self._key, start, [piece])
        if self._store.version(self._key) != self.version:
            raise OSError(f"{self._key}: the object was replaced while it was sent")
        connection.sendall(piece)
        return nbytes

    def close(self) -> None:
        """See ``Held``: nothing is held."""
